"""The oracle's normalization against finite differences, documents and other people's libraries.

The engine is then checked against the oracle, so nothing here may import the engine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.lab import reference
from support.arrays import Array
from support.onnx_cases import OnnxCase, collect_onnx_cases
from support.reference import CASES, EPS, EVERY_CASE, LONG_EPS, ORDER, STEP, assert_close, derivative

KINDS: tuple[reference.Kind, ...] = ("batch", "instance", "layer", "group")


def parameter_shape(x: Array, kind: reference.Kind, axis: int = -1, channel_axis: int = 1) -> tuple[int, ...]:
    return x.shape[range(x.ndim)[axis] :] if kind == "layer" else (x.shape[channel_axis],)


# --- finite differences -----------------------------------------------------------------------------------------------


def smooth_problem(
    kind: reference.Kind, activation: str, with_gamma: bool, with_beta: bool, frozen: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Arrays, directions to move them in, and options, such that no z meets a kink anywhere on the stencils."""
    alpha, act_beta, kinks = EVERY_CASE[activation]
    options: dict[str, Any] = {
        "kind": kind,
        "num_groups": 2,
        "eps": 0.25,
        "activation": activation,
        "alpha": alpha,
        "act_beta": act_beta,
    }
    if kind == "layer":
        options["axis"] = 1
    rng = np.random.default_rng([KINDS.index(kind), list(EVERY_CASE).index(activation), with_gamma, with_beta, frozen])
    while True:
        x = rng.normal(0.3, 1.5, size=(2, 4, 5))
        arrays: dict[str, Any] = {"x": x}
        shape = parameter_shape(x, kind, axis=1)
        if with_gamma:
            arrays["gamma"] = rng.uniform(0.5, 4, size=shape) * rng.choice([-1, 1], size=shape)
        if with_beta:
            arrays["beta"] = rng.normal(0, 0.5, size=shape)
        directions = {key: rng.uniform(-1, 1, size=a.shape) for key, a in arrays.items()}
        if frozen:
            sets = reference.norm_forward(x, kind=kind, axis=1, num_groups=2).mean.shape
            options |= {"mean": rng.normal(0, 1, size=sets), "var": rng.uniform(0.5, 2, size=sets)}
        z = np.array(
            [
                reference.norm_forward(**moved(arrays, key, k * STEP * directions[key]), **options).z
                for key in arrays
                for k in (-2, -1, 0, 1, 2)
            ]
        )
        sides = [z > kink for kink in kinks]
        if all(np.all(side == side[0]) for side in sides):
            return arrays, directions, options


def moved(arrays: dict[str, Any], key: str, by: Any) -> dict[str, Any]:
    return {k: (a + by if k == key else a.astype(np.longdouble)) for k, a in arrays.items()}


@pytest.mark.parametrize("frozen", [False, True], ids=["through_statistics", "frozen"])
@pytest.mark.parametrize("parameters", ["both", "none", "gamma", "beta"])
@pytest.mark.parametrize("activation", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_derivative(kind: reference.Kind, activation: str, parameters: str, frozen: bool) -> None:
    with_gamma, with_beta = parameters in ("both", "gamma"), parameters in ("both", "beta")
    arrays, directions, options = smooth_problem(kind, activation, with_gamma, with_beta, frozen)
    assert_derivative(arrays, directions, options, frozen, "output")


@pytest.mark.parametrize("parameters", ["both", "none"])
@pytest.mark.parametrize("activation", EVERY_CASE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_the_input_are_the_derivative(kind: reference.Kind, activation: str, parameters: str) -> None:
    """The slope from gamma * xhat + beta, for every activation."""
    for frozen in (False, True):
        arrays, directions, options = smooth_problem(kind, activation, *(parameters == "both",) * 2, frozen)
        assert_derivative(arrays, directions, options, frozen, "input")


def assert_derivative(
    arrays: dict[str, Any], directions: dict[str, Any], options: dict[str, Any], frozen: bool, slope_from: Any
) -> None:
    dy = np.random.default_rng(7).normal(size=arrays["x"].shape)
    out = reference.norm_forward(**arrays, **options)
    y = out.y if slope_from == "output" else None
    parameters = (arrays.get("gamma"), arrays.get("beta"))
    back = reference.norm_backward(dy, arrays["x"], y, *parameters, frozen=frozen, slope_from=slope_from, **options)
    for key, direction in directions.items():

        def loss(h: Any, key: str = key, direction: Array = direction) -> Any:
            y = reference.norm_forward(**moved(arrays, key, h * direction), **options).y
            return np.sum(dy * (y - out.y))  # less y at 0: the sum then rounds in proportion to the step

        gradient = getattr(back, f"d{key}")
        assert gradient.shape == arrays[key].shape
        expected = derivative(loss)
        # Absolute, because a directional derivative may cancel to anything; 1 to 10 is its size here. The factor makes
        # room for the fifth derivative over 30: gamma * rstd reaches 8 and the activations are compressed by that.
        assert_close(np.sum(gradient * direction), expected, atol=500 * ORDER)


# --- documents --------------------------------------------------------------------------------------------------------

# The worked example of the BNNS description: [N, C, H, W] = [2, 2, 1, 2], printed to ten decimals.
SPEC_X = np.array([1, 3, 2, -1, -2, 4, 0.5, 2.5]).reshape(2, 2, 1, 2)
SPEC_DY = np.array([0.5, -1, 2, 0.25, 1, 0.75, -0.5, 1.5]).reshape(2, 2, 1, 2)
SPEC: dict[reference.Kind, str] = {
    "batch": """
gamma 1.5 -0.5
beta 0.25 1
mean 1.5 1
var 5.25 1.875
rstd 0.4363942211 0.7301020754
xhat -0.2181971105 0.6545913316 0.7301020754 -1.4602041508 -1.5273797738 1.0909855527 -0.3650510377 1.0951531131
y -0.0771420954 0.8431257988 0.5614505476 0.9390679950 -0.9668171710 0.9550647777 0.8282463049 0.4238890401
moving_mean 0.15 0.1
moving_variance 1.425 1.0875
dz 0.4970245486 -0.2891388874 1.3695465653 0.0295378252 0.0652645579 0.0658884528 -0.1570040292 1.2304771225
dx 0.2582416045 -0.2098805154 -0.1169423765 -0.0998495940 -0.0941252185 0.0457641293 0.2042871028 0.0125048677
dgamma -0.3255175454 2.3616528698
dbeta 0.3390386718 2.4725574837
""",
    "instance": """
gamma 1.5 -0.5
beta 0.25 1
rstd 0.9995003747 0.6665185679 0.3333148164 0.9995003747
y -0.8480733528 0.9412901832 0.4622045067 0.9051281798 -0.8482602723 0.9413660542 0.9051031006 0.4623135992
moving_mean 0.15 0.1
moving_variance 1.4 1.0625
dx 0.0001904831 -0.0001904831 -0.0001130763 0.0001130763 0.0000054180 -0.0000054180 0.0003169728 -0.0003169728
dgamma -0.4493027106 2.7963678730
dbeta 0.3922399775 2.7069247478
""",
    "group": """
gamma 1.5 -0.5
beta 0.25 1
rstd 0.6759689143 0.4444005552
y -0.0034883287 0.9657127562 0.6330632439 0.9425549235 -0.9576240334 0.9694548031 0.8231953403 0.6183008559
dx 0.4858302997 0.0313606393 -0.3657816124 -0.1514093267 0.0153001244 0.1030099837 0.0428698520 -0.1611799601
dgamma -0.2288992666 1.1335841364
dbeta 0.5606692925 1.9917407740
""",
    "layer": """
gamma 1.5 1 -0.5 0.75
beta 0.25 0 1 -0.5
y -0.0034883287 0.8283781679 0.6330632439 -0.9275700169 -0.9576240334 0.8402729930 0.8231953403 -0.0831818280
dx 0.5060641797 -0.0207521779 -0.3098347267 -0.1754772751 -0.0064264177 -0.1662190200 -0.1102723135 0.2829177512
dgamma -0.2043088908 -0.1017764586 0.6613118209 0.7743998662
dbeta 0.5829501264 -0.0933336381 1.0372871426 1.5245246411
""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_worked_example(kind: reference.Kind) -> None:
    rows = [line.split() for line in SPEC[kind].strip().splitlines()]
    printed = {name: np.array(numbers, dtype=np.float64) for name, *numbers in rows}
    shape = parameter_shape(SPEC_X, kind, axis=1)
    gamma, beta = (printed.pop(p).reshape(shape) for p in ("gamma", "beta"))
    options: dict[str, Any] = {"kind": kind, "axis": 1, "num_groups": 1, "eps": 0.001, "activation": "tanh"}
    out = reference.norm_forward(SPEC_X, gamma, beta, **options)
    back = reference.norm_backward(SPEC_DY, SPEC_X, out.y, gamma, **options)
    values = {**out._asdict(), **back._asdict()}
    if "moving_mean" in printed:
        count = 4 if kind == "batch" else 2
        values["moving_mean"], values["moving_variance"] = reference.running_update(
            np.zeros(2), np.ones(2), out.mean, out.var, count, keep=0.9, unbiased=False
        )
    for name, value in printed.items():
        # Half a unit of the last printed digit.
        assert_close(values[name].ravel(), value, atol=0.5001e-10)


def test_worked_example_inference() -> None:
    printed = (
        "0.8662115342 0.9990577257 0.0892005622 0.9099385922 -0.9852362822 0.9999235614 0.6686529345 -0.1490641924"
    )
    out = reference.norm_forward(
        SPEC_X,
        [1.5, -0.5],
        [0.25, 1],
        kind="batch",
        eps=0.001,
        mean=[0.15, 0.1],
        var=[1.425, 1.0875],
        activation="tanh",
    )
    assert_close(out.y.ravel(), np.array(printed.split(), dtype=np.float64), atol=0.5001e-10)


def test_apple_published_instance_norm() -> None:
    x = np.outer([1, 10, 100], np.arange(1, 10)).reshape(1, 3, 1, 9).astype(np.float32)
    out = reference.norm_forward(x, np.ones(3), kind="instance", eps=0.0)
    row = [-1.549, -1.162, -0.775, -0.387, 0, 0.387, 0.775, 1.162, 1.549]
    assert_close(out.y.reshape(3, 9), np.tile(row, (3, 1)), atol=0.5e-3)


# --- exact arithmetic -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=40),
    offset=st.sampled_from([0.0, 1.0, 4096.0, 2.0**20, -(2.0**30)]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_statistics_are_exact_to_the_last_digits(values: list[float], offset: float, dtype: type[Any]) -> None:
    x = (np.array(values) + offset).astype(dtype)
    out = reference.norm_forward(x[None], kind="layer")
    exact = [Fraction(float(v)) for v in x]
    mean = sum(exact, Fraction(0)) / len(exact)
    var = sum(((v - mean) ** 2 for v in exact), Fraction(0)) / len(exact)
    eps = Fraction(EPS if dtype is np.float32 else LONG_EPS)
    spread = max(abs(v - mean) for v in exact)
    assert abs(fraction(out.mean[0]) - mean) <= eps * (abs(mean) + 2 * spread)
    # The offset must cost nothing here: not in the variance, nor in the differences from a mean that cannot be stored.
    assert abs(fraction(out.var[0]) - var) <= 16 * eps * var
    rstd = fraction(out.rstd[0])
    for v, xhat in zip(exact, out.xhat[0], strict=True):
        assert abs(fraction(xhat) - (v - mean) * rstd) <= 16 * eps * spread * rstd


def fraction(v: Any) -> Fraction:
    """A long double exactly, as two floats."""
    high = float(v)
    return Fraction(high) + Fraction(float(v - np.longdouble(high)))


# --- conventions ------------------------------------------------------------------------------------------------------


def test_computes_in_a_wider_type() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(3)
    expected: dict[Any, Any] = dict.fromkeys((np.float32, np.float16, bfloat16), np.float64)
    expected[np.float64] = np.longdouble
    for dtype, work in expected.items():
        x, dy = (rng.normal(size=(2, 6, 3)).astype(dtype) for _ in range(2))
        gamma = rng.normal(size=6).astype(np.float32)
        options: dict[str, Any] = {
            "kind": "group",
            "num_groups": 2,
            "activation": "softplus",
            "alpha": 1.0,
            "act_beta": 1.0,
        }
        out = reference.norm_forward(x, gamma, **options)
        back = reference.norm_backward(dy, x, out.y, gamma, **options)
        wide = reference.norm_forward(x.astype(np.longdouble), gamma, **options)
        wide_back = reference.norm_backward(dy, x.astype(np.longdouble), wide.y, gamma, **options)
        for got, exact in zip((*out, *back), (*wide, *wide_back), strict=True):
            assert got.dtype == work
            assert_close(got, exact, atol=16 * float(np.finfo(work).eps))


# --- one formula, many shapes -----------------------------------------------------------------------------------------


def run(x: Array, dy: Array, gamma: Array, beta: Array, **options: Any) -> dict[str, Array]:
    options = {"activation": "celu", "alpha": 0.8, **options}
    out = reference.norm_forward(x, gamma, beta, **options)
    back = reference.norm_backward(dy, x, out.y, gamma, **options)
    return {"y": out.y, "mean": out.mean, "dx": back.dx, "dgamma": back.dgamma, "dbeta": back.dbeta}


def same(a: dict[str, Array], b: dict[str, Array]) -> None:
    for name, value in a.items():
        assert_close(value, b[name], atol=64 * LONG_EPS)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 3), channels=st.sampled_from([1, 2, 4, 6]), spatial=st.lists(st.integers(1, 4), max_size=2),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_kinds_agree_where_they_coincide(n: int, channels: int, spatial: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, n, channels, *spatial))
    gamma, beta = rng.normal(size=(2, channels))
    instance = run(x, dy, gamma, beta, kind="instance")
    same(instance, run(x, dy, gamma, beta, kind="group", num_groups=channels))
    # Batch norm of each sample on its own is instance norm; the parameter gradients add up.
    alone = [run(x[i : i + 1], dy[i : i + 1], gamma, beta, kind="batch") for i in range(n)]
    for name in ("y", "dx"):
        assert_close(np.concatenate([a[name] for a in alone]), instance[name], atol=64 * LONG_EPS)
    assert_close(np.stack([a["mean"] for a in alone]), instance["mean"], atol=64 * LONG_EPS)
    for name in ("dgamma", "dbeta"):
        assert_close(sum(a[name] for a in alone), instance[name], atol=64 * LONG_EPS)
    # One group is layer norm over [C, S] with gamma spread over S.
    group = run(x, dy, gamma, beta, kind="group", num_groups=1)
    spread = [np.broadcast_to(p.reshape(-1, *(1 for _ in spatial)), x.shape[1:]) for p in (gamma, beta)]
    layer = run(x, dy, *spread, kind="layer", axis=1)
    same({"y": group["y"], "dx": group["dx"], "mean": group["mean"][:, 0]}, layer)
    for name in ("dgamma", "dbeta"):
        assert_close(layer[name].reshape(channels, -1).sum(axis=1), group[name], atol=64 * LONG_EPS)


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
@pytest.mark.parametrize("channel_axis", [0, 1, 2, 3, -1, -2])
def test_channel_axis_is_a_transposition(kind: reference.Kind, channel_axis: int) -> None:
    rng = np.random.default_rng(5)
    x, dy = rng.normal(size=(2, 3, 6, 2, 4))
    gamma, beta = rng.normal(size=(2, 6))
    there_x, there_dy = (np.moveaxis(a, 1, channel_axis) for a in (x, dy))
    options: dict[str, Any] = {"kind": kind, "num_groups": 3}
    if channel_axis == 0 and kind != "batch":
        with pytest.raises(ValueError, match="axis 0"):
            run(there_x, there_dy, gamma, beta, channel_axis=channel_axis, **options)
        return
    got = run(there_x, there_dy, gamma, beta, channel_axis=channel_axis, **options)
    for name in ("y", "dx"):
        got[name] = np.moveaxis(got[name], channel_axis, 1)
    same(got, run(x, dy, gamma, beta, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_dx_is_orthogonal_to_what_the_statistics_remove(kind: reference.Kind) -> None:
    """With eps = 0, adding a constant to a set or scaling it leaves y as it is, so dx sums to 0 alone and with xhat."""
    rng = np.random.default_rng(11)
    x, dy = rng.normal(size=(2, 3, 4, 5))
    options: dict[str, Any] = {"kind": kind, "axis": 1, "num_groups": 2, "eps": 0.0}
    gamma = rng.normal(size=parameter_shape(x, kind, axis=1))
    back = reference.norm_backward(dy, x, None, gamma, **options)
    axes = {"batch": (0, 2), "instance": (2,), "layer": (1, 2), "group": (2, 3)}[kind]
    dx, xhat = (a.reshape(3, 2, 2, 5) if kind == "group" else a for a in (back.dx, back.xhat))
    assert np.abs(dx.sum(axis=axes)).max() < 64 * LONG_EPS
    assert np.abs((dx * xhat).sum(axis=axes)).max() < 64 * LONG_EPS
    assert np.abs(dx).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_given_statistics_are_used(kind: reference.Kind, frozen: bool) -> None:
    rng = np.random.default_rng(13)
    x, dy = rng.normal(size=(2, 3, 4, 5))
    options: dict[str, Any] = {"kind": kind, "num_groups": 2}
    own = reference.norm_forward(x, **options)
    given = reference.norm_forward(x, mean=own.mean + 1, var=own.var * 4, eps=4 * 1e-5, **options)
    assert_close(
        given.xhat, reference.norm_forward(x - 1, mean=own.mean, var=own.var, **options).xhat / 2, atol=64 * EPS
    )
    # The statistics of x, handed over, change nothing, unless they are declared constant.
    back = reference.norm_backward(dy, x, None, mean=own.mean, var=own.var, frozen=frozen, **options)
    through = reference.norm_backward(dy, x, None, **options)
    assert_close(back.dgamma, through.dgamma, atol=64 * LONG_EPS)
    if frozen:
        np.testing.assert_array_equal(back.dx, reference.norm_backward(dy, x, None, frozen=True, **options).dx)
        assert np.abs(back.dx - through.dx).max() > 0.01
    else:
        assert_close(back.dx, through.dx, atol=64 * LONG_EPS)


def test_running_statistics_serve_every_sample_of_instance_norm() -> None:
    x = np.random.default_rng(17).normal(size=(3, 2, 4))
    mean, var = np.array([0.5, -1.0]), np.array([2.0, 0.25])
    got = reference.norm_forward(x, kind="instance", mean=mean, var=var)
    assert_close(got.y, reference.norm_forward(x, kind="batch", mean=mean, var=var).y)
    assert_close(got.mean, np.tile(mean, (3, 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0), (1, 2), (1, 2, 1), (2, 4, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_empty_and_single_element_sets(kind: reference.Kind, shape: tuple[int, ...], dtype: type[Any]) -> None:
    x = np.ones(shape, dtype=dtype)
    parameters = parameter_shape(x, kind)
    gamma = np.full(parameters, 2, dtype=dtype)
    options: dict[str, Any] = {"kind": kind, "num_groups": 2, "activation": "tanh"}
    out = reference.norm_forward(x, gamma, gamma, **options)
    back = reference.norm_backward(x, x, out.y, gamma, **options)
    sets = {"batch": shape[1:2], "instance": shape[:2], "layer": shape[:-1], "group": (shape[0], 2)}[kind]
    for a in (out.y, out.z, out.xhat, back.dx, back.dz):
        assert a.shape == shape
    assert out.mean.shape == out.var.shape == out.rstd.shape == back.rstd.shape == sets
    assert back.dgamma.shape == back.dbeta.shape == parameters
    # Constant data: no spread, no gradient through the statistics.
    assert_close(out.mean, np.full(sets, 1.0 if x.size else 0.0))
    assert_close(out.var, np.zeros(sets))
    assert_close(back.dgamma, np.zeros(parameters))
    slope = 1 - math.tanh(2) ** 2
    users = x.size // max(math.prod(parameters), 1)
    assert_close(back.dbeta, np.full(parameters, slope * users), rtol=1e-15)
    assert_close(back.dx, np.zeros(shape), atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_stay_in_their_set(kind: reference.Kind, poison: float) -> None:
    rng = np.random.default_rng(19)
    x, dy = rng.normal(size=(2, 2, 4, 3)).astype(np.float32)
    clean = reference.norm_forward(x, kind=kind, num_groups=2)
    x[1, 2, 1] = poison
    out = reference.norm_forward(x, kind=kind, num_groups=2)
    back = reference.norm_backward(dy, x, out.y, kind=kind, num_groups=2)
    hit = np.zeros(x.shape, dtype=bool)
    where: dict[str, Any] = {"batch": np.s_[:, 2], "instance": (1, 2), "layer": (1, 2), "group": np.s_[1, 2:4]}
    hit[where[kind]] = True
    np.testing.assert_array_equal(np.isnan(out.y), hit)
    np.testing.assert_array_equal(np.isnan(back.dx), hit)
    np.testing.assert_array_equal(out.y[~hit], clean.y[~hit])
    np.testing.assert_array_equal(out.mean[~np.isfinite(out.mean)], [poison])


def test_wrong_shapes_are_refused() -> None:
    x = np.ones((2, 4, 3))
    with pytest.raises(ValueError, match="gamma has shape"):
        reference.norm_forward(x, np.ones(3), kind="batch")
    with pytest.raises(ValueError, match="does not divide"):
        reference.norm_forward(x, kind="group", num_groups=3)
    with pytest.raises(ValueError, match="given together"):
        reference.norm_forward(x, kind="batch", mean=np.zeros(4))
    with pytest.raises(ValueError, match="needs y"):
        reference.norm_backward(x, x, None, kind="batch", activation="tanh")
    with pytest.raises(ValueError, match="dy has shape"):
        reference.norm_backward(x[:1], x, None, kind="batch")
    with pytest.raises(ValueError, match="unknown kind"):
        reference.norm_forward(x, kind="rms")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mean", "var", "count", "unbiased", "expected"),
    [
        ([3.0], [4.0], 5, False, (1.5, 2.5)),
        ([3.0], [4.0], 5, True, (1.5, 2.75)),
        ([3.0], [0.0], 1, True, (1.5, 1.5)),  # not 0 / 0
        ([0.0], [0.0], 0, True, (1.0, 2.0)),
        ([[2.0], [4.0]], [[3.0], [5.0]], 5, True, (1.5, 2.75)),
        (np.zeros((0, 1)), np.zeros((0, 1)), 5, True, (1.0, 2.0)),
    ],
)
def test_running_update(mean: Any, var: Any, count: int, unbiased: bool, expected: tuple[float, float]) -> None:
    new = reference.running_update([1.0], [2.0], mean, var, count, keep=0.75, unbiased=unbiased)
    assert_close(new, np.array(expected).reshape(2, 1))


# --- other people's libraries -----------------------------------------------------------------------------------------

ONNX_KINDS: dict[str, reference.Kind] = {
    "BatchNormalization": "batch",
    "InstanceNormalization": "instance",
    "LayerNormalization": "layer",
    "GroupNormalization": "group",
}


@pytest.mark.parametrize("case", collect_onnx_cases(), ids=lambda case: case.name)
def test_onnx_node_cases(case: OnnxCase) -> None:
    x, gamma, beta, *running = case.inputs
    assert x is not None
    options: dict[str, Any] = {"kind": ONNX_KINDS[case.op_type], "eps": case.attributes["epsilon"]}
    options |= {key: case.attributes[key] for key in ("axis", "num_groups") if key in case.attributes}
    if running and not case.attributes["training_mode"]:
        options |= {"mean": running[0], "var": running[1]}
    out = reference.norm_forward(x, gamma, beta, **options)
    expected = [out.y]
    if case.op_type == "LayerNormalization":
        ones = (1,) * (x.ndim - out.mean.ndim)
        expected += [out.mean.reshape(out.mean.shape + ones), out.rstd.reshape(out.rstd.shape + ones)]
    elif running and case.attributes["training_mode"]:
        keep, count = case.attributes["momentum"], x.size // x.shape[1]
        old_mean, old_var = (np.asarray(r) for r in running)
        expected += reference.running_update(old_mean, old_var, out.mean, out.var, count, keep, unbiased=False)
    assert len(case.outputs) == len(expected)
    for published, ours in zip(case.outputs, expected, strict=True):
        # The published numbers were computed in float32: a few of its units, 1.2e-7.
        assert_close(ours, published, atol=5e-7, rtol=5e-7)


TORCH_NORMS = ["batch", "batch_frozen", "instance", "instance_frozen", "group", "layer1", "layer2", "layer3"]


@pytest.mark.parametrize("with_parameters", [True, False])
@pytest.mark.parametrize("norm", TORCH_NORMS)
def test_torch_norms(norm: str, with_parameters: bool) -> None:
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    rng = np.random.default_rng(29)
    x, dy = rng.normal(2, 3, size=(2, 3, 6, 4, 5))
    kind: reference.Kind = "layer" if norm.startswith("layer") else norm.removesuffix("_frozen")  # type: ignore[assignment]
    frozen = norm.endswith("_frozen")
    axis = int(norm[-1]) if kind == "layer" else -1
    parameters = rng.normal(size=(2, *parameter_shape(x, kind, axis))) if with_parameters else (None, None)
    running = rng.normal(size=6), rng.uniform(0.5, 2, size=6)
    old = [r.copy() for r in running]
    tx, *tp = (None if a is None else torch.tensor(a, requires_grad=True) for a in (x, *parameters))
    tr = [torch.from_numpy(r) for r in running]  # shares memory: torch updates `running`
    if kind == "batch":
        ty = f.batch_norm(tx, *tr, *tp, training=not frozen, momentum=0.1, eps=1e-3)
    elif kind == "instance":
        ty = f.instance_norm(tx, *tr, *tp, use_input_stats=not frozen, momentum=0.1, eps=1e-3)
    elif kind == "group":
        ty = f.group_norm(tx, 3, *tp, eps=1e-3)
    else:
        ty = f.layer_norm(tx, x.shape[axis:], *tp, eps=1e-3)
    theirs = torch.autograd.grad(ty, [t for t in (tx, *tp) if t is not None], torch.tensor(dy))

    options: dict[str, Any] = {"kind": kind, "axis": axis, "num_groups": 3, "eps": 1e-3}
    if frozen:
        options |= {"mean": old[0], "var": old[1]}
    out = reference.norm_forward(x, *parameters, **options)
    ours = reference.norm_backward(dy, x, out.y, parameters[0], frozen=frozen, **options)
    assert_close(out.y, ty.detach().numpy(), atol=32 * EPS)
    for mine, other in zip(ours[: len(theirs)], theirs, strict=True):
        # PyTorch adds up dgamma and dbeta in float64: up to 60 terms of size up to 30.
        assert_close(mine, other.numpy(), atol=(64 if mine is ours.dx else 256) * EPS, rtol=8 * EPS)
    if kind in ("batch", "instance") and not frozen:
        count = 60 if kind == "batch" else 20
        new = reference.running_update(old[0], old[1], out.mean, out.var, count, keep=1 - 0.1, unbiased=True)
        for mine, other in zip(new, running, strict=True):
            assert_close(mine, other, atol=16 * EPS)


def jax_activation(jax: Any, name: str) -> Callable[[Any], Any]:
    """f from the formulas of the table, to be differentiated by JAX with respect to z."""
    jnp = jax.numpy
    a, b, _ = CASES[name]
    table: dict[str, Callable[[Any], Any]] = {
        "identity": lambda z: z,
        "relu": jax.nn.relu,
        "leaky_relu": lambda z: jax.nn.leaky_relu(z, a),
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
        "scaled_tanh": lambda z: a * jnp.tanh(b * z),
        "linear": lambda z: a * z,
        "clamp": lambda z: jnp.clip(z, a, b),
        "hard_sigmoid": lambda z: jnp.clip(a * z + b, 0, 1),
        "softplus": lambda z: a * jax.nn.softplus(b * z),
        "softsign": jax.nn.soft_sign,
        "elu": lambda z: jax.nn.elu(z, a),
        "clamped_leaky_relu": lambda z: jnp.minimum(jax.nn.leaky_relu(z, a), b),
        "linear_with_bias": lambda z: a * z + b,
        "log_sigmoid": jax.nn.log_sigmoid,
        "selu": jax.nn.selu,
        "celu": lambda z: jax.nn.celu(z, a),
        "hard_shrink": lambda z: jnp.where(jnp.abs(z) < a, 0, z),
        "soft_shrink": lambda z: jnp.where(jnp.abs(z) < a, 0, z - jnp.sign(z) * a),
        "tanh_shrink": lambda z: z - jnp.tanh(z),
        "threshold": lambda z: jnp.where(z <= a, b, z),
        "relu6": jax.nn.relu6,
    }
    return table[name]


@pytest.mark.long
def test_jax_norms(jax: Any) -> None:
    """All kinds of norms, and each activation after all of them, so that it is compiled once."""
    jnp = jax.numpy
    blocks: dict[str, tuple[tuple[int, ...], Any]] = {
        "batch": ((3, 4, 5), (0, 2)),
        "instance": ((3, 4, 5), 2),
        "layer": ((3, 4, 5), (1, 2)),
        "group": ((3, 2, 2, 5), (2, 3)),
    }

    def forward(kind: reference.Kind, x: Any, gamma: Any, beta: Any) -> Any:
        shape, axes = blocks[kind]
        spread = gamma.shape if kind == "layer" else (4, 1)
        xhat = jax.nn.standardize(x.reshape(shape), axis=axes, epsilon=1e-3).reshape(x.shape)
        return gamma.reshape(spread) * xhat + beta.reshape(spread)

    with jax.enable_x64(True):
        parameters, normalized = {}, {}
        for kind in KINDS:
            rng = np.random.default_rng(31)
            x, dy = rng.normal(1, 2, size=(2, 3, 4, 5))  # the same for all
            parameters[kind] = rng.normal(size=(2, *parameter_shape(x, kind, axis=1)))
            given = (jnp.asarray(a) for a in (x, *parameters[kind]))
            normalized[kind] = jax.vjp(jax.jit(functools.partial(forward, kind)), *given)
            assert normalized[kind][0].dtype == np.float64
        for name, kind in itertools.product(CASES, KINDS):
            alpha, act_beta, _ = CASES[name]
            options: dict[str, Any] = {"kind": kind, "axis": 1, "num_groups": 2, "eps": 1e-3}
            options |= {"activation": name, "alpha": alpha, "act_beta": act_beta}
            if kind == KINDS[0]:
                f = jax.jit(jax_activation(jax, name))
            (z, pull), (gamma, beta) = normalized[kind], parameters[kind]
            y, pull_activation = jax.vjp(f, z)
            theirs = pull(*pull_activation(jnp.asarray(dy)))
            out = reference.norm_forward(x, gamma, beta, **options)
            ours = reference.norm_backward(dy, x, out.y, gamma, **options)
            # jax.nn.standardize takes E[x^2] - E[x]^2, which costs a factor mean^2/var over our two passes.
            assert_close(out.y, y, atol=16 * EPS)
            for mine, other in zip(ours[:3], theirs, strict=True):
                assert_close(mine, other, atol=128 * EPS)
