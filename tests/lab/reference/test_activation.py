"""The oracle's activations against finite differences, exact arithmetic and other people's libraries.

The engine is then checked against the oracle, so nothing here may import the engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from retrograd.lab import reference
from support.arrays import Array
from support.reference import CASES, EPS, EVERY_CASE, INPUT_CASES, LONG_EPS, ORDER, STEP, assert_close, derivative

PI = "3.141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342117067982148"
# Parameters that leave only the input to tell the slope.
UNUSUAL_PARAMETERS: list[tuple[str, float, float, tuple[float, ...]]] = [
    ("leaky_relu", -0.4, 0.0, (0.0,)),
    ("leaky_relu", 0.0, 0.0, (0.0,)),
    ("scaled_tanh", 0.0, 0.6, ()),
    ("scaled_tanh", -1.7, -0.6, ()),
    ("clamp", 0.5, 0.5, (0.5,)),
    ("gelu_tanh", -0.5, 0.1, ()),
    ("gelu_tanh", 0.5, -0.05, ()),
    ("gelu_tanh", 0.0, 0.1, ()),
    ("hard_sigmoid", -0.4, 0.45, (-1.375, 1.125)),
    ("hard_sigmoid", 0.0, 0.5, ()),
    ("softplus", 0.0, 1.4, ()),
    ("softplus", 0.8, 0.0, ()),
    ("softplus", -0.8, -1.4, ()),
    ("elu", -0.7, 0.0, (0.0,)),
    ("elu", 0.0, 0.0, (0.0,)),
    ("celu", -3.0, 0.0, (0.0,)),
    ("clamped_leaky_relu", -0.25, 0.75, (-3.0, 0.0, 0.75)),
    ("clamped_leaky_relu", 0.25, -1.0, (-4.0, 0.0)),
    ("hard_shrink", -0.5, 0.0, (-0.5, 0.5)),
    ("soft_shrink", -0.5, 0.0, (-0.5, 0.5)),
    ("soft_shrink", 0.0, 0.0, ()),
    ("threshold", 0.25, 2.0, (0.25,)),
]


def test_all_activations_are_covered() -> None:
    assert set(EVERY_CASE) == set(reference.ACTIVATIONS)
    assert (len(CASES), len(INPUT_CASES), len(reference.ACTIVATIONS)) == (22, 8, 30)


# --- finite differences -----------------------------------------------------------------------------------------------


def points_between(kinks: tuple[float, ...]) -> Array:
    """Between and beyond the kinks, but no stencil across one."""
    z = np.linspace(-9, 9, 721).astype(np.longdouble)
    z = z[np.all([np.abs(z - k) > 3 * STEP for k in kinks], axis=0)] if kinks else z
    for low, high in itertools.pairwise((-math.inf, *kinks, math.inf)):
        assert np.any((z > low) & (z < high))
    return z


@pytest.mark.parametrize("name", CASES)
def test_activation_slope_is_the_derivative(name: str) -> None:
    alpha, beta, kinks = CASES[name]
    z = points_between(kinks)
    y = reference.activation_value(name, z, alpha, beta)
    slope = reference.activation_slope(name, y, alpha, beta)
    expected = derivative(lambda h: reference.activation_value(name, z + h, alpha, beta))
    # Values up to 13 round by ten times what values near 1 do; truncation adds f'''''/30, at most 4 (softsign).
    assert_close(slope, expected, atol=30 * ORDER)


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "kinks"), [*((name, *case) for name, case in EVERY_CASE.items()), *UNUSUAL_PARAMETERS]
)
def test_activation_input_slope_is_the_derivative(
    name: str, alpha: float, beta: float, kinks: tuple[float, ...]
) -> None:
    z = points_between(kinks)
    slope = reference.activation_input_slope(name, z, alpha, beta)
    expected = derivative(lambda h: reference.activation_value(name, z + h, alpha, beta))
    # As above.
    assert_close(slope, expected, atol=30 * ORDER, rtol=30 * ORDER)


@pytest.mark.parametrize("name", CASES)
def test_both_slopes_agree(name: str) -> None:
    """That from the input and that from the output, at kinks and zeros too.

    Not so at the ends of soft_shrink's flat piece, which the input sees outside and the output, 0, inside; hard_sigmoid
    rounds 0.4 z + 0.45.
    """
    alpha, beta, kinks = CASES[name]
    z = np.array([-7.0, -2.0, -0.6, -0.1, -0.0, 0.0, 0.1, 0.6, 2.0, 7.0])
    if name not in ("soft_shrink", "hard_sigmoid"):
        z = np.append(z, kinks)
    from_y = reference.activation_slope(name, reference.activation_value(name, z, alpha, beta), alpha, beta)
    from_z = reference.activation_input_slope(name, z, alpha, beta)
    # Where a slope has all but vanished (1e-6 at 7), y has not as many digits of it as z.
    assert_close(from_z, from_y, atol=20 * LONG_EPS)


@pytest.mark.parametrize(
    ("name", "z", "value", "slope"),
    [
        ("abs", [-2.0, -0.0, 0.0, 3.0], [2.0, 0.0, 0.0, 3.0], [-1.0, 0.0, 0.0, 1.0]),
        ("hard_swish", [-4.0, -3.0, -1.5, 0.0, 3.0, 4.0], [0, 0, -0.375, 0, 3, 4], [0, -0.5, 0, 0.5, 1.5, 1]),
        ("silu", [-math.inf, -12000.0, 0.0, 12000.0, math.inf], [0, 0, 0, 12000, math.inf], [0, 0, 0.5, 1, 1]),
        ("gelu", [-math.inf, -12000.0, 0.0, 12000.0, math.inf], [0, 0, 0, 12000, math.inf], [0, 0, 0.5, 1, 1]),
        ("gelu_sigmoid", [-math.inf, -12000.0, 0.0, 12000.0], [0, 0, 0, 12000], [0, 0, 0.5, 1]),
        ("gelu_tanh", [-math.inf, -12000.0, 0.0, 12000.0], [0, 0, 0, 12000], [0, 0, 0.5, 1]),
        ("erf", [-math.inf, -300.0, 0.0, 300.0, math.inf], [-1, -1, 0, 1, 1], [0, 0, 1.1283791670955126, 0, 0]),
    ],
)
def test_kinks_and_ends_of_those_that_need_the_input(
    name: str, z: list[float], value: list[float], slope: list[float]
) -> None:
    alpha, beta, _ = INPUT_CASES[name]
    assert_close(reference.activation_value(name, z, alpha, beta), np.array(value, float))
    assert_close(reference.activation_input_slope(name, z, alpha, beta), np.array(slope, float), rtol=EPS)


def test_closed_hard_sigmoid_has_its_slope_at_the_bounds() -> None:
    z = [-1.5, -1.0, 0.0, 1.0, 1.5]
    for alpha, beta, slope in ((0.5, 0.5, [0, 0.5, 0.5, 0.5, 0]), (-0.5, 0.5, [0, -0.5, -0.5, -0.5, 0])):
        value = [0, 0, 0.5, 1, 1] if alpha > 0 else [1, 1, 0.5, 0, 0]
        np.testing.assert_array_equal(reference.activation_value("closed_hard_sigmoid", z, alpha, beta), value)
        np.testing.assert_array_equal(reference.activation_input_slope("closed_hard_sigmoid", z, alpha, beta), slope)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_apply_input_slope(name: str) -> None:
    """A product, but for constant pieces, which give 0 whatever dy is."""
    alpha, beta, _ = EVERY_CASE[name]
    z = np.linspace(-9, 9, 721)
    slope = reference.activation_input_slope(name, z, alpha, beta)
    assert_close(reference.apply_input_slope(name, z, 3 * np.ones_like(z), alpha, beta), 3 * slope)
    flat = slope == 0 if name in FLAT else np.zeros(z.shape, bool)
    flat &= ~((name == "hard_swish") & (z == -1.5))  # a minimum
    assert flat.any() == (name in FLAT)
    infinite = reference.apply_input_slope(name, z, np.full_like(z, math.inf), alpha, beta)
    np.testing.assert_array_equal(infinite == 0, flat)


FLAT = ("relu", "clamp", "hard_sigmoid", "closed_hard_sigmoid", "clamped_leaky_relu", "hard_shrink", "soft_shrink")
FLAT += ("threshold", "relu6", "hard_swish")


# --- exact arithmetic -------------------------------------------------------------------------------------------------


def decimal(v: Any) -> Decimal:
    high = float(v)
    return Decimal(high) + Decimal(float(v - np.longdouble(high)))


def decimal_value(name: str, z: Decimal) -> Decimal:
    """f(z) straight from the table of the BNNS description, with digits to waste."""
    a, b = (Decimal(p) for p in EVERY_CASE[name][:2])
    scale, low = Decimal("1.0507009873554804934193349852946"), Decimal("1.6732632423543772848170429916717")
    zero, one, six = Decimal(0), Decimal(1), Decimal(6)

    def tanh(t: Decimal) -> Decimal:
        return 1 - 2 / ((2 * t).exp() + 1)

    def erf(t: Decimal) -> Decimal:
        """The alternating series; its terms reach e^(t^2), so digits are wasted as announced."""
        term = total = t
        for n in range(1, 20 + 6 * int(t * t)):
            term *= -t * t / n
            total += term / (2 * n + 1)
        return 2 / Decimal(PI).sqrt() * total

    table: dict[str, Callable[[], Decimal]] = {
        "abs": lambda: abs(z),
        "gelu_tanh": lambda: z / (1 + (-2 * a * (z + b * z**3)).exp()),
        "hard_swish": lambda: z * min(max(z + 3, zero), six) / 6,
        "silu": lambda: z / (1 + (-z).exp()),
        "erf": lambda: erf(z),
        "gelu": lambda: z * (1 + erf(z / Decimal(2).sqrt())) / 2,
        "gelu_sigmoid": lambda: z / (1 + (Decimal("-1.702") * z).exp()),
        "identity": lambda: z,
        "relu": lambda: max(z, zero),
        "leaky_relu": lambda: a * z if z < 0 else z,
        "sigmoid": lambda: 1 / (1 + (-z).exp()),
        "tanh": lambda: tanh(z),
        "scaled_tanh": lambda: a * tanh(b * z),
        "linear": lambda: a * z,
        "clamp": lambda: min(max(z, a), b),
        "hard_sigmoid": lambda: max(zero, min(one, a * z + b)),
        "closed_hard_sigmoid": lambda: max(zero, min(one, a * z + b)),
        "softplus": lambda: a * (1 + (b * z).exp()).ln(),
        "softsign": lambda: z / (1 + abs(z)),
        "elu": lambda: a * (z.exp() - 1) if z < 0 else z,
        "clamped_leaky_relu": lambda: min(a * z if z < 0 else z, b),
        "linear_with_bias": lambda: a * z + b,
        "log_sigmoid": lambda: -(1 + (-z).exp()).ln(),
        "selu": lambda: scale * low * (z.exp() - 1) if z < 0 else scale * z,
        "celu": lambda: a * ((z / a).exp() - 1) if z < 0 else z,
        "hard_shrink": lambda: zero if abs(z) < abs(a) else z,
        "soft_shrink": lambda: zero if abs(z) < abs(a) else z - a.copy_sign(z),
        "tanh_shrink": lambda: z - tanh(z),
        "threshold": lambda: b if z <= a else z,
        "relu6": lambda: min(max(z, zero), six),
    }
    return table[name]()


@pytest.mark.parametrize("name", EVERY_CASE)
def test_activation_value_keeps_relative_precision(name: str) -> None:
    sizes = [1e-30, 1e-12, 1e-5, 0.01, 0.3, 0.5, 0.9999, 1.0, 1.9999, 2.0, 2.5, 7.0, 20.0, 45.0]
    if name in ("erf", "gelu", "gelu_tanh"):  # the series would need 900 digits at 45, and gelu_tanh is no float there
        sizes = [*sizes[:-2], 12.0]
    z = np.array([sign * size for size in sizes for sign in (-1, 1)])
    alpha, beta, _ = EVERY_CASE[name]
    got = reference.activation_value(name, z, alpha, beta)
    with localcontext() as context:
        context.prec = 150
        for point, value in zip(z, got, strict=True):
            exact = decimal_value(name, Decimal(float(point)))
            # e^t multiplies the rounding of t by t, and for z << 0 some are nothing but that; gelu is 1 - erf up to
            # |z| = 2.1, where 1 - erf has fallen to 1/30.
            argument = {
                "softplus": beta * point,
                "gelu_sigmoid": 1.702 * 2 * point,
                "gelu_tanh": 2 * alpha * (point + beta * point**3) * 4,
                "gelu": 60,
            }
            units = 6 + abs(argument.get(name, 0))
            assert abs(decimal(value) - exact) <= Decimal(float(units) * LONG_EPS) * abs(exact), (name, point)


def test_tanh_shrink_slope_keeps_relative_precision() -> None:
    y = np.array([5e-324, 1e-300, 1e-60, 1e-24, 1e-18, 1e-9, 1e-3, 0.2, 0.9999, 1.0, 1.5, 5.0, 50.0, 101.0, 1e300])
    got = reference.activation_slope("tanh_shrink", y)
    assert_close(reference.activation_slope("tanh_shrink", -y), got)
    with localcontext() as context:
        context.prec = 400
        for target, value in zip(y, got, strict=True):
            t = Decimal(float(target))
            x = (3 * t) ** (Decimal(1) / 3) if t < 1 else t + 1
            if t > 1000:
                assert value == 1
                continue
            # A step doubles the digits, but 400 of them do not hold e^2x - 1 to the third order of a tiny x; there the
            # start is exact enough.
            for _ in range(12 if t > Decimal("1e-100") else 0):
                tanh = 1 - 2 / ((2 * x).exp() + 1)
                x -= (x - tanh - t) / (tanh * tanh)
            tanh = 1 - 2 / ((2 * x).exp() + 1)
            assert abs(decimal(value) - tanh * tanh) <= 16 * Decimal(LONG_EPS) * tanh * tanh, target


# --- conventions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "flat", "steep"),
    [
        ("relu", 0.0, 0.0, [0.0, -0.0, -1.0], [2.0**-14, 2.0]),
        ("relu6", 0.0, 0.0, [0.0, 6.0], [2.0**-14, 5.96875]),
        ("clamp", -1.0, 2.0, [-1.0, 2.0], [-0.99609375, 0.0, 1.9921875]),
        ("clamp", 0.1, 0.7, [0.1, 0.7], [0.1015625, 0.69140625]),
        ("hard_sigmoid", 1.0, 0.5, [0.0, 1.0], [2.0**-14, 0.99609375]),
        ("clamped_leaky_relu", 1.0, 0.7, [0.7], [-3.0, 0.0, 0.69140625]),
        ("hard_shrink", 0.5, 0.0, [0.0], [-0.5, 0.5]),
        ("hard_shrink", 0.0, 0.0, [], [-0.5, 0.0, 0.5]),
        ("soft_shrink", 0.5, 0.0, [0.0], [-(2.0**-14), 2.0**-14]),
        ("soft_shrink", 0.0, 0.0, [], [-0.5, 0.0, 0.5]),
        ("threshold", 0.5, 0.1, [0.1], [0.5078125, 2.0]),
        ("threshold", 0.5, 20.1, [20.1], [0.5078125, 20.0]),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_constant_pieces_ignore_dy(
    name: str, alpha: float, beta: float, flat: list[float], steep: list[float], dtype: str
) -> None:
    """Also when the bound (0.1) is not a number of y's type: y then holds the bound rounded. The steep points are."""
    y_type = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    for dy in (3.0, math.inf, math.nan):
        y = np.array(flat, dtype=np.float64).astype(y_type)
        dz = reference.apply_slope(name, y, np.full(len(flat), dy), alpha, beta)
        assert_close(dz, np.zeros(len(flat)))
        y = np.array(steep, dtype=np.float64).astype(y_type)
        dz = reference.apply_slope(name, y, np.full(len(steep), dy), alpha, beta)
        assert_close(dz, np.full(len(steep), dy))


@pytest.mark.parametrize(
    ("name", "alpha", "asymptote"), [("elu", 0.7, -0.7), ("celu", 0.7, -0.7), ("selu", 0.0, -1.7580993408473766)]
)
def test_slope_beyond_the_asymptote_is_zero(name: str, alpha: float, asymptote: float) -> None:
    """float16 rounds -0.7 to -0.7002: f never gets there, but its stored output does."""
    assert reference.activation_slope(name, asymptote * 1.001, alpha) == 0
    assert reference.activation_slope(name, asymptote * 0.5, alpha) > 0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scaled_tanh_slope_beyond_the_asymptotes_is_zero(sign: float) -> None:
    assert reference.activation_slope("scaled_tanh", sign * 0.7002, 0.7, -2.0) == 0
    assert reference.activation_slope("scaled_tanh", sign * 0.35, 0.7, -2.0) < 0


def test_smooth_slopes_multiply() -> None:
    assert np.isnan(reference.apply_slope("tanh", [1.0], [math.inf])).all()
    assert np.isnan(reference.apply_slope("linear", [0.0], [math.inf], 0.0)).all()


@pytest.mark.parametrize("name", EVERY_CASE)
def test_nan_goes_through_activations(name: str) -> None:
    alpha, beta, _ = EVERY_CASE[name]
    assert np.isnan(reference.activation_value(name, math.nan, alpha, beta))
    # Under NaN the slope from the input is the slope from the output.
    slope = reference.activation_input_slope(name, math.nan, alpha, beta)
    if name in INPUT_CASES:
        assert slope == alpha if name == "closed_hard_sigmoid" else np.isnan(slope)
        return
    assert_close(slope, reference.activation_slope(name, math.nan, alpha, beta))
    selected = {"relu", "clamp", "hard_shrink", "soft_shrink", "threshold", "relu6", "leaky_relu", "clamped_leaky_relu"}
    if name in selected | {"identity", "elu", "celu"}:
        assert reference.apply_slope(name, math.nan, 2.5, alpha, beta) == 2.5


@pytest.mark.parametrize("name", ["leaky_relu", "clamped_leaky_relu"])
def test_leaky_slope_at_zero(name: str) -> None:
    assert reference.activation_slope(name, 0.0, 0.2, 1.0) == 1
    assert reference.activation_slope(name, 0.0, 0.0, 1.0) == 0
    assert reference.activation_slope(name, -1.0, 0.25, 1.0) == 0.25


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("leaky_relu", -0.1),
        ("clamped_leaky_relu", -0.1),
        ("elu", 0.0),
        ("celu", -1.0),
        ("softplus", 0.0),
        ("scaled_tanh", 0.0),
        *((name, 1.0) for name in INPUT_CASES),
    ],
)
def test_slope_refuses_what_y_does_not_determine(name: str, alpha: float) -> None:
    with pytest.raises(ValueError, match=name):
        reference.activation_slope(name, [0.5], alpha, 1.0)


# --- other people's libraries -----------------------------------------------------------------------------------------


def torch_functions() -> dict[str, Callable[[Any], Any]]:
    f = pytest.importorskip("torch").nn.functional
    p = {name: (alpha, beta) for name, (alpha, beta, _) in EVERY_CASE.items()}
    return {
        "abs": lambda z: z.abs(),
        "gelu_tanh": lambda z: f.gelu(z, approximate="tanh"),
        "hard_swish": f.hardswish,
        "silu": f.silu,
        "erf": lambda z: z.erf(),
        "gelu": f.gelu,
        "gelu_sigmoid": lambda z: z * (1.702 * z).sigmoid(),
        "identity": lambda z: z,
        "relu": f.relu,
        "leaky_relu": lambda z: f.leaky_relu(z, p["leaky_relu"][0]),
        "sigmoid": lambda z: z.sigmoid(),
        "tanh": lambda z: z.tanh(),
        "scaled_tanh": lambda z: p["scaled_tanh"][0] * (p["scaled_tanh"][1] * z).tanh(),
        "linear": lambda z: p["linear"][0] * z,
        "clamp": lambda z: f.hardtanh(z, *p["clamp"]),
        "hard_sigmoid": lambda z: f.hardtanh(p["hard_sigmoid"][0] * z + p["hard_sigmoid"][1], 0.0, 1.0),
        "softplus": lambda z: p["softplus"][0] * p["softplus"][1] * f.softplus(z, p["softplus"][1], threshold=100),
        "softsign": f.softsign,
        "elu": lambda z: f.elu(z, p["elu"][0]),
        "clamped_leaky_relu": lambda z: f.leaky_relu(z, p["clamped_leaky_relu"][0]).clamp(
            max=p["clamped_leaky_relu"][1]
        ),
        "linear_with_bias": lambda z: p["linear_with_bias"][0] * z + p["linear_with_bias"][1],
        "log_sigmoid": f.logsigmoid,
        "selu": f.selu,
        "celu": lambda z: f.celu(z, p["celu"][0]),
        "hard_shrink": lambda z: f.hardshrink(z, p["hard_shrink"][0]),
        "soft_shrink": lambda z: f.softshrink(z, p["soft_shrink"][0]),
        "tanh_shrink": f.tanhshrink,
        "threshold": lambda z: f.threshold(z, *p["threshold"]),
        "relu6": f.relu6,
        "closed_hard_sigmoid": lambda z: f.hardtanh(
            p["closed_hard_sigmoid"][0] * z + p["closed_hard_sigmoid"][1], 0, 1
        ),
    }


@pytest.mark.parametrize("name", EVERY_CASE)
def test_torch_activations(name: str) -> None:
    torch = pytest.importorskip("torch")
    z = np.random.default_rng(23).normal(0, 3, size=4000)
    t = torch.tensor(z, requires_grad=True)
    y = torch_functions()[name](t)
    (dz,) = torch.autograd.grad(y.sum(), t)
    alpha, beta, _ = EVERY_CASE[name]
    ours = reference.activation_value(name, z, alpha, beta)
    assert_close(ours, y.detach().numpy(), atol=8 * EPS, rtol=4 * EPS)
    # Theirs has 1 - tanh^2 and 1 - sigmoid, multiplied by up to 20 in the gelus.
    assert_close(reference.activation_input_slope(name, z, alpha, beta), dz.numpy(), atol=20 * EPS)
    if name in CASES:
        assert_close(reference.activation_slope(name, ours, alpha, beta), dz.numpy(), atol=4 * EPS)
