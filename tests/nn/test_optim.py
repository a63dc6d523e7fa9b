"""retrograd.nn: losses, schedules and optimizers."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array, assert_same_bits
from support.nn import Halve, Scale, random

# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_are_their_formulas() -> None:
    y, target = random(5, 4), random(5, 4, seed=1)
    error = y - target
    assert math.isclose(nn.MeanSquaredError()(y, target), (error**2).mean())
    assert math.isclose(nn.MeanAbsoluteError()(y, target), np.abs(error).mean())
    far = np.abs(error) > 0.5
    assert far.any()
    assert not far.all()
    values = np.where(far, 0.5 * (np.abs(error) - 0.25), error**2 / 2)
    assert math.isclose(nn.Huber(delta=0.5, reduction="sum")(y, target), values.sum())
    labels = np.array([0, 3, -1, 2, 2])
    entropy = nn.SoftmaxCrossEntropy(ignore_index=-1, label_smoothing=0.1)
    p = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    wanted = 0.9 * np.eye(4)[labels] + 0.025
    counts = (labels != -1)[:, None]
    assert math.isclose(entropy(y, labels), (-wanted * np.log(p) * counts).sum() / 4)
    true = (random(5, 4, seed=2) > 0).astype(np.float64)
    assert math.isclose(nn.Hinge()(y, true), np.maximum(0, 1 - (2 * true - 1) * y).mean())
    s = 1 / (1 + np.exp(-y))
    smooth = 0.9 * true + 0.05
    expected = -(smooth * np.log(s) + (1 - smooth) * np.log(1 - s)).mean()
    assert math.isclose(nn.SigmoidCrossEntropy(label_smoothing=0.1)(y, true), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean", "none"])
def test_losses_are_the_functions(reduction: Any, dtype: Any) -> None:
    """Values and gradients, bit for bit, with weights and without."""
    y, target, weights = random(5, 4, dtype=dtype), random(5, 4, seed=1, dtype=dtype), np.arange(5, dtype=dtype)
    labels, true = np.array([0, 3, -100, 2, 2]), (random(5, 4, seed=2) > 0).astype(dtype)
    pairs: list[tuple[Any, Any, Array, dict[str, Any]]] = [
        (nn.MeanSquaredError, rg.mean_squared_error, target, {}),
        (nn.MeanAbsoluteError, rg.mean_absolute_error, target, {}),
        (nn.Huber, rg.huber, target, {"delta": 0.5}),
        (nn.Hinge, rg.hinge, true, {}),
        (nn.SigmoidCrossEntropy, rg.sigmoid_cross_entropy, true, {"label_smoothing": 0.1}),
        (nn.SoftmaxCrossEntropy, rg.softmax_cross_entropy, labels, {"label_smoothing": 0.1}),
    ]
    for kind, function, wanted, options in pairs:
        loss = kind(reduction=reduction, **options)
        for given in ((), (weights,)):
            over = given and (given[0] if function is rg.softmax_cross_entropy else given[0][:, None] * np.ones_like(y))
            expected, gradient = function(y, wanted, reduction=reduction, weights=over if given else None, **options)
            found = loss(y, wanted, *given)
            np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == np.float32 else 1e-14)
            if reduction == "none":
                assert found.shape == (labels.shape if wanted is labels else y.shape)
                continue

            class Logits(nn.Module):
                def __init__(self) -> None:
                    self.y = nn.Parameter(y)

                def forward(self) -> Any:
                    return self.y * 1.0

            logits = Logits()
            _, gradients = nn.compile(logits, loss, nn.SGD(logits, 0.0)).gradients(
                wanted, **dict(zip(["weights"], given, strict=False))
            )
            np.testing.assert_allclose(
                gradients["y"], gradient, rtol=1e-6 if dtype == np.float32 else 1e-13, atol=1e-18
            )


def test_losses_one_by_one() -> None:
    y, labels = random(2, 3, 4), np.array([[0, 1, 2], [3, 2, -100]])
    losses = nn.SoftmaxCrossEntropy(reduction="none")(y, labels)
    assert losses.shape == (2, 3)
    assert losses[1, 2] == 0
    assert math.isclose(nn.SoftmaxCrossEntropy()(y, labels), losses.sum() / 5)
    np.testing.assert_allclose(nn.MeanSquaredError(reduction="none")(y, 0 * y), y**2, rtol=1e-12)
    assert repr(nn.Huber(delta=0.5)) == "Huber(delta=0.5, reduction='mean')"
    with pytest.raises(ValueError, match="Huber: reduction is 'average'"):
        nn.Huber(reduction="average")
    with pytest.raises(ValueError, match=r"target has shape \(2, 3\), but y has shape \(2, 3, 4\)"):
        nn.MeanSquaredError()(y, y[..., 0])


def test_targets_are_converted() -> None:
    y = random(3, 2, dtype=np.float32)
    whole = np.array([[1, 0], [0, 1], [1, 1]])
    expected = nn.MeanSquaredError()(y, whole.astype(np.float32))
    for target in (whole, whole.tolist(), whole.astype(np.float64), whole.astype(bool)):
        assert nn.MeanSquaredError()(y, target) == expected
    labels = np.array([0, 1, 1])
    expected = nn.SoftmaxCrossEntropy()(y, labels)
    for target in (labels.tolist(), labels.astype(np.uint8), labels.astype(np.int32)):
        assert nn.SoftmaxCrossEntropy()(y, target) == expected
    assert nn.SoftmaxCrossEntropy()(y, np.eye(2)[labels]) == pytest.approx(expected, rel=1e-6)


# ---- schedules -------------------------------------------------------------------------------------------------------


def test_schedules() -> None:
    assert [nn.Constant(0.5)(step) for step in (0, 9)] == [0.5, 0.5]
    assert [nn.Constant(0.5, warm_up=4)(step) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert [nn.StepDecay(1.0, every=2, factor=0.5)(step) for step in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    cosine = nn.Cosine(1.0, steps=14, warm_up=4, final=0.2)
    rates = [cosine(step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert math.isclose(rates[9], 0.6)  # halfway down
    assert all(math.isclose(rate, 0.2) for rate in rates[14:])
    assert all(a > b for a, b in itertools.pairwise(rates[4:15]))
    with pytest.raises(ValueError, match="warm_up is 4 and steps is 4"):
        nn.Cosine(1.0, steps=4, warm_up=4)
    with pytest.raises(ValueError, match="every is 0, must be at least 1"):
        nn.StepDecay(1.0, every=0)


def test_plateau() -> None:
    plateau = nn.Plateau(1.0, factor=0.5, patience=2, threshold=0.1, final=0.3)
    m = two_scales()
    optimizer = nn.SGD(m, plateau)
    reports = [(10.0, False, 1.0), (9.5, False, 1.0), (8.0, False, 1.0), (7.9, False, 1.0), (8.5, True, 0.5),
               (math.nan, False, 0.5), (7.0, False, 0.5), (7.0, False, 0.5), (7.0, True, 0.3), (7.0, False, 0.3),
               (7.0, True, 0.3)]  # fmt: skip
    for value, lowered, rate in reports:
        assert plateau.report(value) == lowered
        assert optimizer.current_rate() == rate
    assert np.array_equal(optimizer.state_dict()["plateau"], [0.3, 7.0, 0.0])
    other = nn.SGD(two_scales(), nn.Plateau(1.0, factor=0.5, patience=2, threshold=0.1, final=0.3))
    other.load_state_dict(optimizer.state_dict())
    assert other.current_rate() == 0.3
    for wrong in ({"factor": 1.0}, {"patience": 0}):
        with pytest.raises(ValueError, match=r"Plateau: factor is .* and patience is"):
            nn.Plateau(0.1, **wrong)


def test_a_plateau_of_one_group() -> None:
    m = two_scales()
    plateau = nn.Plateau(0.5, factor=0.1, patience=1)
    optimizer = nn.SGD([{"params": m[0]}, {"params": m[1], "lr": plateau}], 0.25)
    plateau.report(1.0)
    plateau.report(1.0)
    before, gradients = m.state_dict(), step_of(m, optimizer)
    assert np.array_equal(m[0].w.value, before["0.w"] - 0.25 * gradients["0.w"])
    np.testing.assert_allclose(m[1].w.value, before["1.w"] - 0.05 * gradients["1.w"], rtol=1e-15)
    assert optimizer.state_dict()["plateau.1"][0] == 0.05


# ---- optimizers ------------------------------------------------------------------------------------------------------


def two_scales() -> nn.Sequential:
    return nn.Sequential(Scale(3), Scale(3))


X, TARGET = random(4, 3, seed=8), random(4, 3, seed=9)


def step_of(m: nn.Module, optimizer: nn.Optimizer) -> dict[str, Array]:
    """One step on fixed data; returns its gradients."""
    step = nn.compile(m, nn.MeanSquaredError(), optimizer)
    gradients = step.gradients(X, TARGET)[1]
    step(X, TARGET)
    return gradients


OPTIMIZERS: list[tuple[type[nn.Optimizer], str, dict[str, Any], list[str]]] = [
    (nn.SGD, "sgd_step", {}, []),
    (nn.SGD, "sgd_step", {"momentum": 0.9, "weight_decay": 0.1, "l1": 0.01}, ["velocities"]),
    (nn.SGD, "sgd_step", {"momentum": 0.9, "nesterov": True, "velocity_of": "step"}, ["velocities"]),
    (nn.SGD, "sgd_step", {"momentum": 0.9, "velocity_of": "descent"}, ["velocities"]),
    (nn.Adam, "adam_step", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}, ["first_moments", "second_moments"]),
    (
        nn.Adam,
        "adam_step",
        {"amsgrad": True, "epsilon_hat": True},
        ["first_moments", "second_moments", "largest_second_moments"],
    ),
    (nn.AdamW, "adam_step", {"maximum_norm": 0.5}, ["first_moments", "second_moments"]),
    (nn.RMSProp, "rmsprop_step", {"alpha": 0.9, "clip": (-0.1, 0.2)}, ["squares"]),
    (
        nn.RMSProp,
        "rmsprop_step",
        {"centered": True, "momentum": 0.9, "velocity_of": "descent", "eps_inside_root": True},
        ["squares", "means", "velocities"],
    ),
    (nn.RMSProp, "rmsprop_step", {"momentum": 0.5, "maximum_norm_each": 0.5}, ["squares", "velocities"]),
]


@pytest.mark.parametrize(("kind", "function", "options", "states"), OPTIMIZERS)
def test_optimizers_are_the_functions(
    kind: type[Any], function: str, options: dict[str, Any], states: list[str]
) -> None:
    m = two_scales()
    schedule = nn.StepDecay(0.1, every=1, factor=0.5)
    optimizer = kind(m, schedule, gradient_scale=0.5, **options)
    parameters = [p.value.copy() for p in m.parameters().values()]
    arrays = {state: [np.zeros_like(p) for p in parameters] for state in states}
    plain_options = {name: value for name, value in options.items() if name not in ("amsgrad", "centered")}
    if kind is nn.AdamW:
        plain_options |= {"decoupled": True, "weight_decay": 0.01}
    for step in range(3):
        numbered = {"step": step + 1} if function == "adam_step" else {}
        rate = schedule(step)
        assert optimizer.steps == step
        assert optimizer.current_rate() == rate
        gradients = list(step_of(m, optimizer).values())
        getattr(rg, function)(
            parameters, gradients, **arrays, learning_rate=rate, gradient_scale=0.5, **plain_options, **numbered
        )
    assert_same_bits([p.value for p in m.parameters().values()], parameters)
    state = optimizer.state_dict()
    assert state.pop("steps") == 3
    assert list(state) == [f"{kind}.{name}" for kind in states for name in ("0.w", "1.w")]
    assert_same_bits(state.values(), itertools.chain(*arrays.values()))


def test_an_optimizer_goes_on_from_its_state() -> None:
    first = two_scales()
    optimizer = nn.Adam(first, nn.Cosine(0.1, 10))
    step_of(first, optimizer)
    second = two_scales()
    second.load_state_dict(first.state_dict())
    other = nn.Adam(second, nn.Cosine(0.1, 10))
    other.load_state_dict(optimizer.state_dict())
    pairs = [(first, optimizer), (second, other), copy.deepcopy((first, optimizer)),
             pickle.loads(pickle.dumps((first, optimizer)))]  # fmt: skip
    for each in pairs:
        step_of(*each)
        assert each[1].steps == 2
        assert_same_bits(each[0].state_dict().values(), first.state_dict().values())
        assert_same_bits(each[1].state_dict().values(), optimizer.state_dict().values())
    with pytest.raises(ValueError, match=r"RMSProp.load_state_dict: the state does not have squares.0.w"):
        nn.RMSProp(second).load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()
    state["first_moments.1.w"] = np.zeros(7)
    with pytest.raises(ValueError, match=r"first_moments.1.w has shape \(7,\), but here it has shape \(3,\)"):
        other.load_state_dict(state)
    state = optimizer.state_dict()
    state["steps"] = np.array(-1)
    with pytest.raises(ValueError, match="steps is -1, must be from 0"):
        other.load_state_dict(state)
    assert other.steps == 2


@pytest.mark.parametrize("how", ["module", "mapping", "list of modules", "list of parameters", "parameter"])
def test_a_part_of_a_model_learns(how: str) -> None:
    m = two_scales()
    given: Any = {
        "module": m[1], "mapping": m[1].parameters(), "list of modules": [m[1]], "list of parameters": [m[1].w],
        "parameter": m[1].w,
    }[how]  # fmt: skip
    before = m.state_dict()
    step = nn.compile(m, nn.MeanSquaredError(), nn.SGD(given, 0.1))
    _, gradients = step.gradients(X, TARGET)
    assert list(gradients) == ["1.w"]  # nothing else is computed
    step(X, TARGET)
    assert np.array_equal(m[0].w.value, before["0.w"])
    assert np.array_equal(m[1].w.value, before["1.w"] - 0.1 * gradients["1.w"])


def test_the_learning_rate_can_be_set() -> None:
    m = two_scales()
    optimizer = nn.SGD(m, lr=0.1)
    step = nn.compile(m, nn.MeanSquaredError(), optimizer)
    before = m.state_dict()["0.w"]
    optimizer.learning_rate = 0.0
    step(X, TARGET)
    assert np.array_equal(m[0].w.value, before)
    optimizer.learning_rate = lambda count: 0.1 * count
    assert optimizer.current_rate() == 0.1
    gradient = step.gradients(X, TARGET)[1]["0.w"]
    step(X, TARGET)
    assert np.array_equal(m[0].w.value, before - 0.1 * gradient)
    for wrong in (-1.0, math.nan, math.inf):
        optimizer.learning_rate = wrong
        kept = m.state_dict()
        with pytest.raises(ValueError, match=f"SGD: learning_rate is {wrong}"):
            step(X, TARGET)
        assert_same_bits(m.state_dict().values(), kept.values())


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_have_options_of_their_own() -> None:
    m = two_scales()
    optimizer = nn.SGD([{"params": m[0], "lr": 0.01}, {"params": [m[1].w], "momentum": 0.5}], 0.1, weight_decay=0.2)
    before, velocity = m.state_dict(), np.zeros(3)
    for _ in range(3):
        gradients = step_of(m, optimizer)
        before["0.w"] -= 0.01 * (gradients["0.w"] + 0.2 * before["0.w"])
        velocity = 0.5 * velocity + gradients["1.w"] + 0.2 * before["1.w"]
        before["1.w"] -= 0.1 * velocity
    assert optimizer.steps == 3
    np.testing.assert_allclose(m[0].w.value, before["0.w"], rtol=1e-14)
    np.testing.assert_allclose(m[1].w.value, before["1.w"], rtol=1e-14)
    state = optimizer.state_dict()
    assert len(state) == 2  # the steps, and the velocities of the second group
    np.testing.assert_allclose(next(a for name, a in state.items() if name != "steps"), velocity, rtol=1e-14)
    again = nn.SGD([{"params": m[0], "lr": 0.01}, {"params": [m[1].w], "momentum": 0.5}], 0.1, weight_decay=0.2)
    again.load_state_dict(state)
    assert_same_bits(again.state_dict().values(), state.values())
    with pytest.raises(ValueError, match="SGD: a parameter is given twice"):
        nn.SGD([{"params": m}, {"params": m[1]}], 0.1)
    with pytest.raises(TypeError, match="momentums"):
        nn.SGD([{"params": m[0]}, {"params": m[1], "momentums": 0.5}], 0.1)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3}, {"gradient_scale": 0.25}, {"l1": 0.1}], ids=str)
@pytest.mark.parametrize("maximum", [0.05, 100.0])
def test_a_norm_over_all_groups_is_that_of_all_gradients(options: dict[str, Any], maximum: float) -> None:
    one, two = two_scales(), two_scales()
    whole = nn.SGD(one, 0.1, maximum_norm=maximum, **options)
    parts = nn.SGD([{"params": two[0]}, {"params": two[1]}], 0.1, maximum_norm=maximum, **options)
    for _ in range(3):
        step_of(one, whole)
        step_of(two, parts)
    for name, array in one.state_dict().items():
        np.testing.assert_allclose(two.state_dict()[name], array, rtol=1e-13)
    assert not np.array_equal(one[0].w.value, two_scales()[0].w.value)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (nn.SGD, {"learning_rate": -1.0}, "SGD: learning_rate is -1.0"),
        (nn.SGD, {"learning_rate": 0.1, "nesterov": True}, "nesterov is set, but"),
        (nn.SGD, {"learning_rate": 0.1, "momentum": 0.9, "velocity_of": "speed"}, "velocity_of is 'speed'"),
        (nn.SGD, {"learning_rate": 0.1, "clip": (0.0, 1.0), "maximum_norm": 1.0}, "clip in one way"),
        (nn.Adam, {"beta1": 1.0}, "Adam: beta1 is 1.0"),
        (nn.AdamW, {"weight_decay": -1.0}, "weight_decay is -1.0"),
        (nn.RMSProp, {"alpha": -0.1}, "RMSProp: alpha is -0.1"),
    ],
)
def test_optimizers_refuse_at_once(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(two_scales(), **options)


@pytest.mark.parametrize("maximum", [-1.0, 0.0, math.nan])
def test_norms_of_groups_are_checked_as_those_of_one(maximum: float) -> None:
    m = two_scales()
    for given in (m, [{"params": m[0]}, {"params": m[1]}]):
        with pytest.raises(ValueError, match=r"maximum_norm is .*, must be a finite number above 0"):
            nn.SGD(given, 0.1, maximum_norm=maximum)
        with pytest.raises(ValueError, match="clip in one way"):
            nn.SGD(given, 0.1, maximum_norm=1.0, clip=(-1.0, 1.0))


def test_an_optimizer_needs_parameters_and_a_rate() -> None:
    for nothing in (Halve(), {}, []):
        with pytest.raises(ValueError, match="SGD: there are no parameters"):
            nn.SGD(nothing, 0.1)
    m = two_scales()
    with pytest.raises(TypeError, match="SGD: learning_rate is missing"):
        nn.SGD(m)
    with pytest.raises(TypeError, match=r"learning_rate is 0\.1, and lr, which is the same, is 0\.2"):
        nn.SGD(m, 0.1, lr=0.2)
    with pytest.raises(TypeError, match=r"Adam: .*'betas'.*beta1=0\.9, beta2=0\.999"):
        nn.Adam(m, betas=(0.9, 0.99))
    with pytest.raises(TypeError, match="SGD: parameters has a float64, must be modules or parameters"):
        nn.SGD([np.zeros(3)], 0.1)
