"""BNNSOptimizerStep against Apple's formulas written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import fails

Descriptor = bnns.BNNSNDArrayDescriptor
SHAPES = [(5, 3), (17,), (1,)]
RATE, SCALE = float(np.float32(0.1)), 0.5  # C floats


def normal(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, shape).astype(np.float32) for shape in SHAPES]


def zeros(kinds: int) -> list[np.ndarray]:
    return [np.zeros(shape, np.float32) for _ in range(kinds) for shape in SHAPES]


def described(arrays: list[np.ndarray]) -> list[Any]:
    return [Descriptor.from_array(array) for array in arrays]


def step(function: int, fields: Any, w: list[np.ndarray], g: list[np.ndarray], a: list[np.ndarray] | None) -> int:
    accumulators = None if a is None else described(a)
    return bnns.BNNSOptimizerStep(function, fields, len(w), described(w), described(g), accumulators, None)


def run(function: int, fields: Any, kinds: int, rule: Callable[..., Any], steps: int = 4) -> None:
    """Some steps of the function and of `rule(w, g, states, t)`, which returns the new w and changes its states."""
    w, a = normal(0), zeros(kinds) if kinds else None
    wide = [p.astype(np.float64) for p in w]
    states = [[np.zeros(shape) for _ in range(kinds)] for shape in SHAPES]
    for t in range(1, steps + 1):
        g = normal(t)
        if hasattr(fields, "time_step"):
            fields.time_step = t
        assert step(function, fields, w, g, a) == 0, bnns.last_error()
        slopes = [SCALE * s.astype(np.float64) for s in g]
        for k in range(len(wide)):
            wide[k] = rule(wide[k], slopes[k], states[k], t)
        for got, want in zip(w, wide, strict=True):
            assert np.allclose(got, want, rtol=1e-5, atol=1e-6)
    for kind in range(kinds):
        for k in range(len(SHAPES)):
            assert a is not None
            assert np.allclose(a[kind * len(SHAPES) + k], states[k][kind], rtol=1e-5, atol=1e-6)


# ---- SGD -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("variant", [0, 1, 2])
def test_sgd_momentum_variants(variant: int, nesterov: bool) -> None:
    m = 0.75

    def rule(w: np.ndarray, g: np.ndarray, v: list[np.ndarray], t: int) -> np.ndarray:
        old = v[0]
        if variant == 0:
            v[0] = m * old - RATE * g
            return w + v[0] + m * (v[0] - old) if nesterov else w + v[0]
        if variant == 1 or nesterov:
            v[0] = m * old + g
            return w - RATE * (m * v[0] + g if nesterov else v[0])
        v[0] = m * old + RATE * g
        return w - v[0]

    fields = bnns.BNNSOptimizerSGDMomentumFields(
        learning_rate=0.1, momentum=m, gradient_scale=SCALE, nesterov=nesterov, sgd_momentum_variant=variant
    )
    run(bnns.BNNSOptimizerFunctionSGDMomentum, fields, 1, rule)


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_sgd_without_momentum_needs_no_accumulators_and_touches_none(variant: int) -> None:
    fields = bnns.BNNSOptimizerSGDMomentumFields(
        learning_rate=0.1, gradient_scale=SCALE, sgd_momentum_variant=variant, nesterov=True
    )
    run(bnns.BNNSOptimizerFunctionSGDMomentum, fields, 0, lambda w, g, s, t: w - RATE * g)
    a = [np.full(shape, 7, np.float32) for shape in SHAPES]
    assert step(bnns.BNNSOptimizerFunctionSGDMomentum, fields, normal(0), normal(1), a) == 0
    assert all((array == 7).all() for array in a)


# ---- Adam ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("clipping", [False, True])
def test_adam_family(decoupled: bool, largest: bool, clipping: bool) -> None:
    """epsilon is the paper's epsilon-hat: added to the root of the uncorrected second moment."""
    b1, b2, eps, decay = 0.75, 0.5, 0.25, 0.125
    name = f"Adam{'W' * decoupled}{'AMSGrad' * largest}{'WithClipping' * clipping}"
    kind = bnns.BNNSOptimizerAdamWithClippingFields if clipping else bnns.BNNSOptimizerAdamFields
    fields = kind(learning_rate=0.1, beta1=b1, beta2=b2, epsilon=eps, gradient_scale=SCALE)
    fields.regularization_scale = decay
    fields.regularization_func = bnns.BNNSOptimizerRegularizationL1 if decoupled else 0  # ignored by AdamW

    def rule(w: np.ndarray, g: np.ndarray, s: list[np.ndarray], t: int) -> np.ndarray:
        s[0], s[1] = b1 * s[0] + (1 - b1) * g, b2 * s[1] + (1 - b2) * g * g
        v = s[1]
        if largest:
            s[2] = v = np.maximum(s[2], s[1])
        rate = RATE * np.sqrt(1 - b2**t) / (1 - b1**t)
        return w - rate * s[0] / (np.sqrt(v) + eps) - (RATE * decay * w if decoupled else 0)

    run(getattr(bnns, f"BNNSOptimizerFunction{name}"), fields, 3 if largest else 2, rule)


# ---- RMSProp ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.75])
@pytest.mark.parametrize("clipping", [False, True])
def test_rmsprop(centered: bool, momentum: float, clipping: bool) -> None:
    """Accumulators: squares, means if centered, steps if there is momentum."""
    a, eps = 0.875, 0.25
    kind = bnns.BNNSOptimizerRMSPropWithClippingFields if clipping else bnns.BNNSOptimizerRMSPropFields
    fields = kind(
        learning_rate=0.1, alpha=a, epsilon=eps, centered=centered, momentum=momentum, gradient_scale=SCALE
    )  # fmt: skip

    def rule(w: np.ndarray, g: np.ndarray, s: list[np.ndarray], t: int) -> np.ndarray:
        s[0] = a * s[0] + (1 - a) * g * g
        spread = s[0]
        if centered:
            s[1] = a * s[1] + (1 - a) * g
            spread = s[0] - s[1] ** 2
        delta = -RATE * g / (np.sqrt(spread) + eps)
        if momentum:
            s[-1] = delta = momentum * s[-1] + delta
        return w + delta

    function = bnns.BNNSOptimizerFunctionRMSPropWithClipping if clipping else bnns.BNNSOptimizerFunctionRMSProp
    run(function, fields, 1 + centered + bool(momentum), rule)


# ---- gradients: scale, clipping, regularization ----------------------------------------------------------------------


@pytest.mark.parametrize("function", [1, 7])
def test_clipping_by_value_comes_before_the_scale(function: int) -> None:
    kind = bnns.BNNSOptimizerSGDMomentumFields if function == 1 else bnns.BNNSOptimizerSGDMomentumWithClippingFields
    fields = kind(learning_rate=1, gradient_scale=SCALE, clip_gradients_min=-0.25, clip_gradients_max=0.5)
    setattr(fields, "clip_gradients" if function == 1 else "clipping_func", 1)
    w, g = normal(0), normal(1)
    want = [p - SCALE * np.clip(s, -0.25, 0.5) for p, s in zip(w, g, strict=True)]
    assert step(function, fields, w, g, None) == 0
    for got, expected in zip(w, want, strict=True):
        assert np.allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("maximum", [0.5, 100.0])
@pytest.mark.parametrize("clipping", ["ByNorm", "ByGlobalNorm", "KnownNorm"])
def test_clipping_by_norm(clipping: str, maximum: float) -> None:
    w, g = normal(0), normal(1)
    total = 123.0 if clipping == "KnownNorm" else float(np.sqrt(sum((s.astype(np.float64) ** 2).sum() for s in g)))
    fields = bnns.BNNSOptimizerSGDMomentumWithClippingFields(
        learning_rate=1,
        gradient_scale=1,
        clipping_func=2 if clipping == "ByNorm" else 3,
        clip_gradients_max_norm=maximum,
        clip_gradients_use_norm=total if clipping == "KnownNorm" else 0,
    )
    want = []
    for p, s in zip(w, g, strict=True):
        norm = float(np.linalg.norm(s.astype(np.float64))) if clipping == "ByNorm" else total
        want.append(p - s * min(1, maximum / norm))
    assert step(bnns.BNNSOptimizerFunctionSGDMomentumWithClipping, fields, w, g, None) == 0
    for got, expected in zip(w, want, strict=True):
        assert np.allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["L1", "L2"])
def test_regularization_is_neither_scaled_nor_clipped(function: str) -> None:
    fields = bnns.BNNSOptimizerSGDMomentumFields(
        learning_rate=0.5,
        gradient_scale=SCALE,
        regularization_scale=0.25,
        clip_gradients=True,
        clip_gradients_min=-0.125,
        clip_gradients_max=0.125,
        regularization_func=getattr(bnns, f"BNNSOptimizerRegularization{function}"),
    )
    w, g = normal(0), normal(1)
    w[0][0, 0] = 0
    slope = np.sign if function == "L1" else (lambda p: p)
    want = [
        p - 0.5 * (SCALE * np.clip(s, -0.125, 0.125) + 0.25 * slope(p)) for p, s in zip(w, g, strict=True)
    ]  # fmt: skip
    assert step(bnns.BNNSOptimizerFunctionSGDMomentum, fields, w, g, None) == 0
    for got, expected in zip(w, want, strict=True):
        assert np.allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_threads_and_any_layout() -> None:
    results = []
    for threads in (1, 2, 3):
        w, g = (np.random.default_rng(seed).normal(0, 1, (64, 32, 32, 4)).astype(np.float32) for seed in (0, 1))
        fields = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.1, gradient_scale=1)
        parameters = bnns.BNNSFilterParameters(0, threads)
        assert bnns.BNNSOptimizerStep(1, fields, 1, described([w]), described([g]), None, parameters) == 0
        results.append(w)
    assert all(np.array_equal(w, results[0]) for w in results)


def test_no_parameters_is_nothing_to_do() -> None:
    fields = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.1, gradient_scale=1)
    assert bnns.BNNSOptimizerStep(1, fields, 0, [], [], None, None) == 0


def test_every_change_of_a_descriptor_is_noticed_by_the_next_call() -> None:
    fields = bnns.BNNSOptimizerSGDMomentumFields(
        learning_rate=1, momentum=0.5, gradient_scale=1, sgd_momentum_variant=1
    )
    w, g, v = normal(0), normal(1), zeros(1)
    parameters, gradients, velocities = described(w), described(g), described(v)

    def run() -> int:
        return bnns.BNNSOptimizerStep(1, fields, 3, parameters, gradients, velocities)

    before = [p.copy() for p in w]
    for _ in range(2):  # checked, then remembered
        assert run() == 0
    assert np.allclose(w[1], before[1] - 2.5 * g[1], rtol=1e-5, atol=1e-6)
    other = w[1].copy()
    parameters[1].data = other
    kept = w[1].copy()
    assert run() == 0
    assert np.array_equal(w[1], kept)
    assert not np.array_equal(other, kept)
    gradients[2].size[0] = 2
    assert run() == -1
    gradients[2].size[0] = 1
    assert run() == 0
    v[0].flags.writeable = False
    fails(run(), "accumulators[0].data is read-only")
    v[0].flags.writeable = True
    assert run() == 0
    parameters[0], gradients[0] = gradients[0], parameters[0]
    assert run() == 0
    velocities.pop()
    assert run() == -1


def test_the_same_descriptors_in_other_groups() -> None:
    arrays = [np.full(2, k, np.float32) for k in range(6)]
    listed = described(arrays)
    momentum = bnns.BNNSOptimizerSGDMomentumFields(
        learning_rate=1, momentum=0.5, gradient_scale=1, sgd_momentum_variant=1
    )
    assert bnns.BNNSOptimizerStep(1, momentum, 2, listed[:2], listed[2:4], listed[4:6]) == 0
    for k, array in enumerate(arrays):
        array[:] = k
    plain = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=1, gradient_scale=1)
    assert bnns.BNNSOptimizerStep(1, plain, 3, listed[:3], listed[3:6], None) == 0
    assert [float(array[0]) for array in arrays] == [-3, -3, -3, 3, 4, 5]


def test_tensors_that_move_their_memory_are_looked_at_anew(torch: Any) -> None:
    tensor, fields = torch.zeros(4), bnns.BNNSOptimizerSGDMomentumFields(learning_rate=1, gradient_scale=1)
    parameters = [Descriptor(layout=0x10000, size=(4,), data=tensor, data_type=0x10020)]
    gradients = described([np.ones(4, np.float32)])
    for _ in range(2):
        assert bnns.BNNSOptimizerStep(1, fields, 1, parameters, gradients, None) == 0
    tensor.data = torch.full((4,), 10.0)
    assert bnns.BNNSOptimizerStep(1, fields, 1, parameters, gradients, None) == 0
    assert tensor.tolist() == [9, 9, 9, 9]
    tensor.resize_(1)
    assert bnns.BNNSOptimizerStep(1, fields, 1, parameters, gradients, None) == -1


def test_lists_that_change_after_a_step() -> None:
    fields = bnns.BNNSOptimizerAdamFields(0.1, 0.9, 0.99, 1, 1e-8, 1)
    w, g, a = normal(0), normal(1), zeros(2)
    lists = {"parameters": described(w), "gradients": described(g), "accumulators": described(a)}

    def run() -> int:
        return bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionAdam, fields, 3, *lists.values())

    assert run() == 0
    assert run() == 0
    for name, listed in lists.items():
        before = [array.copy() for array in w + a]
        for wrong in (None, 7, listed):
            kept, listed[1] = listed[1], wrong  # type: ignore[assignment]
            fails(run(), f"{name}[1] is")
            listed[1] = kept
        assert all(np.array_equal(now, then) for now, then in zip(w + a, before, strict=True))
    for array in (*w, *a):
        array.flags.writeable = False
        assert run() == -1
        array.flags.writeable = True
    lists["parameters"] = tuple(lists["parameters"])  # type: ignore[assignment]
    assert run() == 0


@pytest.mark.parametrize("name", ["learning_rate", "gradient_scale", "regularization_scale", "beta1", "beta2"])
def test_numbers_of_the_fields_change_between_steps(name: str) -> None:
    fields = bnns.BNNSOptimizerAdamFields(0.1, 0.9, 0.99, 1, 1e-8, 1)
    w, g, a = normal(0), normal(1), zeros(2)
    lists = described(w), described(g), described(a)
    for value, status in ((getattr(fields, name), 0), ("0.5", -1), (None, -1), (np.float64(0.5), 0), (10**400, -1)):
        setattr(fields, name, value)
        before = w[0].copy()
        assert bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionAdam, fields, 3, *lists) == status, bnns.last_error()
        assert np.array_equal(before, w[0]) is (status != 0)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_what_must_fail_and_touch_nothing() -> None:
    good = {
        "function": bnns.BNNSOptimizerFunctionAdam,
        "fields": bnns.BNNSOptimizerAdamFields(0.1, 0.9, 0.99, 1, 1e-8, 1),
        "count": 3,
        "parameters": None,
        "gradients": None,
        "accumulators": None,
        "filter": None,
    }
    adam = bnns.BNNSOptimizerAdamFields

    def read_only() -> Any:
        array = np.zeros(SHAPES[0], np.float32)
        array.flags.writeable = False
        return array

    half = [Descriptor.from_array(np.zeros(shape, np.float16)) for shape in SHAPES]
    strided = [Descriptor.from_array(np.zeros((5, 6), np.float32)[:, ::2]), *described(zeros(1))[1:]]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"function": 0}, "function is 0"),
        ({"function": 13}, "function is 13"),
        ({"function": "adam"}, "function is 'adam'"),
        ({"function": 1}, "takes BNNSOptimizerSGDMomentumFields, not BNNSOptimizerAdamFields"),
        ({"fields": None}, "not NoneType"),
        ({"count": 4}, "parameters has 3 descriptors, must have 4"),
        ({"count": -1}, "number_of_parameters is -1"),
        ({"parameters": 5}, "parameters is of type int"),
        ({"gradients": described(zeros(1))[:2]}, "gradients has 2 descriptors"),
        ({"gradients": [*described(zeros(1))[:2], None]}, "gradients[2] is NULL"),
        ({"gradients": described(zeros(1))[::-1]}, "gradients[0].size is (1,), expected size=(columns, rows)=(3, 5)"),
        ({"gradients": half}, "gradients[0].data_type is BNNSDataTypeFloat16"),
        ({"gradients": strided}, "gradients[0].stride is (2, 6), must be 0 or contiguous"),
        ({"gradients": [Descriptor(layout=0x10000, size=(3,), data_type=0x10020)] * 3}, "gradients[0].data is NULL"),
        ({"accumulators": described(zeros(1))}, "accumulators has 3 descriptors, must have 6"),
        ({"accumulators": "nothing"}, "accumulators is of type str"),
        ({"parameters": described([read_only(), *zeros(1)[1:]])}, "parameters[0].data is read-only"),
        ({"fields": adam(float("nan"), 0.9, 0.99, 1, 1e-8, 1)}, "learning_rate is nan"),
        ({"fields": adam(0.1, 1.0, 0.99, 1, 1e-8, 1)}, "beta1 is 1.0"),
        ({"fields": adam(0.1, 0.9, 0.99, 0, 1e-8, 1)}, "step is 0"),
        ({"fields": adam(0.1, 0.9, 0.99, "x", 1e-8, 1)}, "time_step is 'x'"),
        ({"fields": adam(0.1, 0.9, 0.99, 1, 1e-8, 1, 0.1, regularization_func=3)}, "regularization_func is 3"),
        (
            {"fields": adam(0.1, 0.9, 0.99, 1, 1e-8, 1, 0, True, 1, -1)},
            "(clip_gradients_min, clip_gradients_max) is (1.0, -1.0)",
        ),
        ({"filter": 3}, "filter_params is of type int"),
    ]
    for changes, reason in cases:
        w, g, a = normal(0), normal(1), zeros(2)
        call = {**good, "parameters": described(w), "gradients": described(g), "accumulators": described(a), **changes}
        assert bnns.BNNSOptimizerStep(*call.values()) == -1, reason
        assert reason in (bnns.last_error() or ""), bnns.last_error()
        assert all(np.array_equal(p, q) for p, q in zip(w, normal(0), strict=True))
        assert not any(array.any() for array in a)


def test_more_failures_of_their_own_fields() -> None:
    w, g = normal(0), normal(1)
    for function in (4, None, "value"):
        clipping = bnns.BNNSOptimizerSGDMomentumWithClippingFields(0.1, 0, 1, clipping_func=function)
        assert step(bnns.BNNSOptimizerFunctionSGDMomentumWithClipping, clipping, w, g, None) == -1
        assert f"clipping_func is {function!r}" in (bnns.last_error() or "")
    variant = bnns.BNNSOptimizerSGDMomentumFields(0.1, 0.9, 1, sgd_momentum_variant=3)
    assert step(bnns.BNNSOptimizerFunctionSGDMomentum, variant, w, g, zeros(1)) == -1
    momentum = bnns.BNNSOptimizerSGDMomentumFields(0.1, 0.9, 1)
    fails(step(bnns.BNNSOptimizerFunctionSGDMomentum, momentum, w, g, None), "accumulators is NULL")
    fails(step(bnns.BNNSOptimizerFunctionSGDMomentum, momentum, w, w, zeros(1)), "overlaps")
    assert all(np.array_equal(p, q) for p, q in zip(w, normal(0), strict=True))
