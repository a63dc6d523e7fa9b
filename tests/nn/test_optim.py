"""retrograd.nn: losses, schedules and optimizers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.nn import Halve, Scale, random

# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_and_their_gradients() -> None:
    y, target = random(5, 4), random(5, 4, seed=1)
    error = y - target
    squared = nn.MeanSquaredError()
    assert math.isclose(squared.forward(y, target), (error**2).mean())
    np.testing.assert_allclose(squared.backward(), 2 * error / 20, rtol=1e-12)
    np.testing.assert_allclose(squared.backward(3.0), 6 * error / 20, rtol=1e-12)
    np.testing.assert_allclose(squared.backward(), 2 * error / 20, rtol=1e-12)  # a factor lasts for one call
    huber = nn.Huber(delta=0.5, reduction="sum")
    far = np.abs(error) > 0.5
    assert far.any()
    assert not far.all()
    values = np.where(far, 0.5 * (np.abs(error) - 0.25), error**2 / 2)
    assert math.isclose(huber.forward(y, target), values.sum())
    np.testing.assert_allclose(huber.backward(), np.clip(error, -0.5, 0.5), rtol=1e-12)
    labels = np.array([0, 3, -1, 2, 2])
    entropy = nn.SoftmaxCrossEntropy(ignore_index=-1, label_smoothing=0.1)
    p = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    wanted = 0.9 * np.eye(4)[labels] + 0.025
    counts = (labels != -1)[:, None]
    assert math.isclose(entropy.forward(y, labels), (-wanted * np.log(p) * counts).sum() / 4)
    np.testing.assert_allclose(entropy.backward(), (p - wanted) * counts / 4, rtol=1e-12, atol=1e-16)


def test_losses_one_by_one() -> None:
    y, labels = random(2, 3, 4), np.array([[0, 1, 2], [3, 2, -100]])
    each = nn.SoftmaxCrossEntropy(reduction="none")
    losses = each.forward(y, labels)
    assert losses.shape == (2, 3)
    assert losses[1, 2] == 0
    assert math.isclose(nn.SoftmaxCrossEntropy().forward(y, labels), losses.sum() / 5)
    weights = random(2, 3, seed=1)
    plain = each.backward().copy()
    np.testing.assert_allclose(each.backward(weights), plain * weights[..., None], rtol=1e-14)
    with pytest.raises(ValueError, match=r"dloss has shape \(3,\), but the loss has \(2, 3\)"):
        each.backward(np.ones(3))
    squares = nn.MeanSquaredError(reduction="none")
    np.testing.assert_allclose(squares.forward(y, 0 * y), y**2, rtol=1e-12)
    np.testing.assert_allclose(squares.backward(y), 2 * y * y, rtol=1e-12)


def test_losses_without_gradient() -> None:
    loss = nn.MeanSquaredError()
    with pytest.raises(RuntimeError, match=r"MeanSquaredError.backward: there was no forward pass"):
        loss.backward()
    y = random(3, 2)
    value = loss.forward(y, 0 * y)
    loss.backward()
    assert loss.forward(y, 0 * y, want_gradient=False) == value
    with pytest.raises(RuntimeError, match="want_gradient"):
        loss.backward()
    with pytest.raises(ValueError, match="Huber: reduction is 'average'"):
        nn.Huber(reduction="average")


# ---- schedules and optimizers ----------------------------------------------------------------------------------------


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


def two_scales() -> nn.Sequential:
    m = nn.Sequential(Scale(3), Scale(2))
    for name, gradient in m.gradients().items():
        gradient[...] = random(*gradient.shape, seed=len(name))
    return m


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
    m, plain = two_scales(), two_scales()
    schedule = nn.StepDecay(0.1, every=1, factor=0.5)
    optimizer = kind(m, schedule, num_threads=1, **options)
    parameters, gradients = list(plain.parameters().values()), list(plain.gradients().values())
    arrays = {state: [np.zeros_like(p) for p in parameters] for state in states}
    plain_options = {name: value for name, value in options.items() if name not in ("amsgrad", "centered")}
    if kind is nn.AdamW:
        plain_options |= {"decoupled": True, "weight_decay": 0.01}
    for step in range(3):
        numbered = {"step": step + 1} if function == "adam_step" else {}
        rate = schedule(step)
        assert optimizer.steps == step
        assert optimizer.current_rate() == rate
        optimizer.step(gradient_scale=0.5)
        getattr(rg, function)(
            parameters, gradients, **arrays, learning_rate=rate, gradient_scale=0.5, **plain_options, **numbered
        )
    for name, array in m.parameters().items():
        assert np.array_equal(array, plain.parameters()[name])
    state = optimizer.state_dict()
    assert state.pop("steps") == 3
    assert list(state) == [f"{kind}.{name}" for kind in states for name in ("0.w", "1.w")]
    for kept, expected in zip(state.values(), itertools.chain(*arrays.values()), strict=True):
        assert np.array_equal(kept, expected)


def test_an_optimizer_goes_on_from_its_state() -> None:
    first = two_scales()
    optimizer = nn.Adam(first, nn.Cosine(0.1, 10))
    optimizer.step()
    second = two_scales()
    second.load_state_dict(first.state_dict())
    other = nn.Adam(second, nn.Cosine(0.1, 10))
    other.load_state_dict(optimizer.state_dict())
    for each in (optimizer, other):
        each.step()
    assert other.steps == 2
    assert all(np.array_equal(a, second.parameters()[name]) for name, a in first.parameters().items())
    with pytest.raises(ValueError, match=r"RMSProp.load_state_dict: the state does not have squares.0.w"):
        nn.RMSProp(second).load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()
    state["first_moments.1.w"] = np.zeros(7)
    with pytest.raises(ValueError, match=r"first_moments.1.w has shape \(7,\), but here it has shape \(2,\)"):
        other.load_state_dict(state)


def test_a_part_of_a_model_learns() -> None:
    m = two_scales()
    before = m.state_dict()
    nn.SGD(m[1], 0.1).step()
    assert np.array_equal(m.parameters()["0.w"], before["0.w"])
    assert not np.array_equal(m.parameters()["1.w"], before["1.w"])


def test_the_learning_rate_can_be_set() -> None:
    m = two_scales()
    optimizer = nn.SGD(m, 0.1)
    before = m.state_dict()["0.w"]
    optimizer.learning_rate = 0.0
    optimizer.step()
    assert np.array_equal(m.parameters()["0.w"], before)
    optimizer.learning_rate = lambda step: 0.1 * step
    assert optimizer.current_rate() == 0.1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (nn.SGD, {"learning_rate": -1.0}, "learning_rate is -1.0"),
        (nn.SGD, {"learning_rate": 0.1, "nesterov": True}, "nesterov is set, but"),
        (nn.SGD, {"learning_rate": 0.1, "momentum": 0.9, "velocity_of": "speed"}, "velocity_of is 'speed'"),
        (nn.SGD, {"learning_rate": 0.1, "clip": (0.0, 1.0), "maximum_norm": 1.0}, "clip in one way"),
        (nn.Adam, {"beta1": 1.0}, "beta1 is 1.0"),
        (nn.AdamW, {"weight_decay": -1.0}, "weight_decay is -1.0"),
        (nn.RMSProp, {"alpha": -0.1}, "alpha is -0.1"),
    ],
)
def test_optimizers_refuse_at_once(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(two_scales(), **options)


def test_an_optimizer_needs_parameters() -> None:
    with pytest.raises(ValueError, match="SGD: the Halve has no parameters"):
        nn.SGD(Halve(), 0.1)
