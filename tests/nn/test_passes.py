"""A backward that does not belong to a module's last forward pass is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd import nn

Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def linear(seed: int = 0) -> nn.Linear:
    return nn.Linear(4, 4, dtype=np.float64, rng=seed)


def network() -> nn.Sequential:
    return nn.Sequential(first=linear(0), act=nn.Activation("tanh"), second=linear(1))


class Net(nn.Module):
    """Calls its children in an order that each test gives."""

    def __init__(self, order: str = "a", back: str | None = None, **children: nn.Module) -> None:
        for name, child in (children or {"a": linear(0), "b": linear(1)}).items():
            setattr(self, name, child)
        self.order, self.back = order, order[::-1] if back is None else back

    def forward(self, x: Array) -> Array:
        for name in self.order:
            x = getattr(self, name).forward(x)
        return x

    def backward(self, dy: Array) -> Array:
        for name in self.back:
            dy = getattr(self, name).backward(dy)
        return dy


# ---- a layer in two places -------------------------------------------------------------------------------------------


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": linear,
    "Activation": lambda: nn.Activation("tanh"),
    "Dropout": lambda: nn.Dropout(0.5),
    "LayerNorm": lambda: nn.LayerNorm(4, dtype=np.float64),
    "LSTM": lambda: nn.LSTM(4, 4, dtype=np.float64),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sequential_refuses_a_layer_in_two_places(name: str) -> None:
    layer = LAYERS[name]()
    with pytest.raises(ValueError, match=rf"Sequential: 0 and 2 are the same {name}; .* make one for each place"):
        nn.Sequential(layer, linear(), layer)
    with pytest.raises(ValueError, match=rf"Sequential: 0\.0 and 1\.inner\.1 are the same {name}"):
        nn.Sequential(nn.Sequential(layer), Net(inner=nn.Sequential(linear(), layer)))


@pytest.mark.parametrize("back", ["aba", "a"], ids=["backward twice", "backward once"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_runs_twice_in_a_pass_is_refused(name: str, back: str) -> None:
    net, x = Net("aba", back, a=LAYERS[name](), b=nn.Activation("tanh")), random(3, 2, 4)
    y = net.forward(x)
    message = rf"{name}\.backward \(layer 'a' of Net\): it ran forward twice in one pass of Net.*two layers"
    with pytest.raises(RuntimeError, match=message):
        net.backward(y)
    assert not any(gradient.any() for gradient in net.gradients().values())


def test_the_places_of_a_shared_layer_are_named() -> None:
    shared = linear()
    net = Net("ab", a=nn.Sequential(shared, nn.Activation("tanh")), b=nn.Sequential(shared))
    y = net.forward(random(3, 4))
    with pytest.raises(RuntimeError, match=r"Linear.backward \(layer 'a\.0' and 'b\.0' of Net\): it ran forward twice"):
        net.backward(y)


def test_layers_called_one_by_one_are_checked_too() -> None:
    layer, act, x = linear(), nn.Activation("tanh"), random(3, 4)
    dy = np.ones_like(layer.forward(act.forward(layer.forward(x).copy())))
    with pytest.warns(RuntimeWarning, match=r"Linear\.backward: forward ran more than once since the last backward"):
        dy = layer.backward(dy).copy()
    dy = act.backward(dy)
    with pytest.raises(RuntimeError, match=r"Linear\.backward: backward has run already .* must be two layers"):
        layer.backward(dy)


def test_a_module_that_keeps_its_state_in_attributes_is_checked_too() -> None:
    class Square(nn.Module):
        def forward(self, x: Array) -> Array:
            self.x = x
            return x**2

        def backward(self, dy: Array) -> Array:
            return 2 * self.x * dy

    net = Net("aa", a=Square())
    net.forward(random(3))
    with pytest.raises(RuntimeError, match=r"Square\.backward \(layer 'a' of Net\): it ran forward twice"):
        net.backward(np.ones(3))


# ---- passes in the wrong order ---------------------------------------------------------------------------------------


def test_one_backward_for_each_forward() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x).copy()
    dx = net.backward(y)
    assert dx is not None
    dx = dx.copy()
    with pytest.raises(
        RuntimeError, match=r"Linear\.backward \(layer 'second' of Sequential\): backward has run already"
    ):
        net.backward(y)
    net.forward(x)
    assert np.array_equal(net.backward(y), dx)


def test_a_pass_that_was_abandoned_is_no_error_but_is_not_silent() -> None:
    net, x, other = network(), random(3, 4), random(3, 4, seed=1)
    y = net.forward(x).copy()
    dx = net.backward(y).copy()
    net.forward(other)
    net.forward(x)
    with pytest.warns(RuntimeWarning, match=r"Sequential\.backward: forward ran more than once .* eval\(\)") as seen:
        assert np.array_equal(net.backward(y), dx)  # of the last pass
    assert len(seen) == 1  # of the model, not of each layer
    assert seen[0].filename == __file__
    net.forward(x)
    assert np.array_equal(net.backward(y), dx)  # and no warning


def test_evaluation_passes_between_training_steps_are_no_matter() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x).copy()
    dx = net.backward(y).copy()
    net.eval()
    for seed in range(3):
        net.forward(random(3, 4, seed=seed))
    net.train()
    net.forward(x)
    assert np.array_equal(net.backward(y), dx)


def test_an_evaluation_between_forward_and_backward_is_refused() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x)
    net.eval()
    net.forward(random(3, 4, seed=1))
    net.train()
    message = r"'second' of Sequential\): its last forward pass was in evaluation, but it is in training now"
    with pytest.raises(RuntimeError, match=message):
        net.backward(y)
    net.forward(x)
    net.eval()
    with pytest.raises(RuntimeError, match="its last forward pass was in training, but it is in evaluation now"):
        net.backward(y)


def test_gradients_in_evaluation_and_of_a_model_with_a_frozen_part() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x).copy()
    dx = net.backward(y).copy()
    net.eval()
    net.forward(random(3, 4, seed=1))
    net.forward(x)
    assert np.array_equal(net.backward(y), dx)
    net.train()
    net["act"].eval()
    net.forward(x)
    assert np.array_equal(net.backward(y), dx)


def test_a_layer_that_ran_by_itself_in_between_is_refused() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x).copy()
    net["first"].forward(random(3, 4, seed=1))
    with pytest.raises(RuntimeError, match=r"layer 'first' of Sequential\): its last forward pass was after that of"):
        net.backward(y)


def test_a_layer_that_the_last_pass_left_out_is_refused() -> None:
    net, x = Net("ab"), random(3, 4)
    net.forward(x)
    net.order = "a"
    y = net.forward(x).copy()
    with pytest.raises(RuntimeError, match=r"layer 'b' of Net\): its last forward pass was before that of Net"):
        net.backward(y)


def test_after_a_forward_that_failed() -> None:
    net, x = network(), random(3, 4)
    y = net.forward(x).copy()
    with pytest.raises(ValueError, match="linear_forward"):
        net.forward(random(3, 5))
    with pytest.raises(RuntimeError, match=r"Sequential\.backward: its last forward pass failed; run forward again"):
        net.backward(y)
    net.forward(x)
    net.backward(y)


@pytest.mark.parametrize("name", LAYERS)
def test_a_dy_of_another_shape_is_refused(name: str) -> None:
    layer, x = LAYERS[name](), random(3, 2, 4)
    y = layer.forward(x).copy()
    message = r"\.backward: dy has shape \(2, 2, 4\), but the last forward pass gave y of shape \(3, 2, 4\)"
    with pytest.raises(ValueError, match=name + message):
        layer.backward(y[:2].copy())
    with pytest.raises(ValueError, match=message):
        layer.backward(dy=y[:2].copy())
    layer.backward(y)  # the pass is still there


# ---- what is right stays right ---------------------------------------------------------------------------------------


def test_super_is_the_same_pass() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Array) -> Array:
            return 2 * super().forward(x)

        def backward(self, dy: Array, **options: Any) -> Array | None:
            return super().backward(2 * dy, **options)

    layer, x = Doubled(4, 4, dtype=np.float64, rng=0), random(3, 4)
    layer.forward(x)
    np.testing.assert_allclose(layer.backward(np.ones((3, 4))), 2 * np.ones((3, 4)) @ layer.w)


def test_backward_may_run_a_layer_forward_again() -> None:
    class Recompute(nn.Module):
        """Keeps x only; what its layers need is computed again when it is needed."""

        def __init__(self, inner: nn.Module) -> None:
            self.inner = inner

        def forward(self, x: Array) -> Array:
            self.keep(x=x)
            return self.inner.forward(x)

        def backward(self, dy: Array) -> Any:
            self.inner.forward(self.kept("x"))
            return self.inner.backward(dy)

    plain, x = network(), random(3, 4)
    y = plain.forward(x).copy()
    dx = plain.backward(y)
    again = nn.Sequential(Recompute(network()))
    again.forward(x)
    assert np.array_equal(again.backward(y), dx)


def test_a_model_whose_passes_have_other_names() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            self.net = network()

        def forward(self, x: Array) -> Array:
            return self.net.forward(x)

        def loss(self, x: Array) -> float:
            self.y = self.net.forward(x)
            return float((self.y**2).sum() / 2)

        def backward(self) -> Any:
            return self.net.backward(self.y)

    model, x = Loss(), random(3, 4)
    for _ in range(2):
        model.loss(x)
        model.backward()
        model.eval()
        model.forward(x)
        model.train()


def test_branches_in_threads_belong_to_the_pass() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            self.a, self.b = linear(0), linear(1)

        def forward(self, x: Array) -> Array:
            results: dict[str, Array] = {}
            threads = [
                threading.Thread(target=lambda name=name: results.update({name: getattr(self, name).forward(x)}))
                for name in ("a", "b")
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results["a"] + results["b"]

        def backward(self, dy: Array) -> Array:
            return self.a.backward(dy) + self.b.backward(dy)

    model, x = Branches(), random(3, 4)
    dy = model.forward(x)
    np.testing.assert_allclose(model.backward(dy), dy @ (model.a.w + model.b.w))


def test_weights_shared_by_two_layers_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self, w: Array) -> None:
            self.add_parameter("w", w)

    w = np.ones((2, 2))
    model = nn.Sequential(Tied(w), Tied(w))
    with pytest.raises(ValueError, match=r"SGD: parameters 0\.w and 1\.w share memory"):
        nn.SGD(model, 0.1)
    first = nn.Linear(2, 2, rng=0)
    with pytest.raises(AttributeError, match=r"Linear\.w stays the same array"):
        nn.Linear(2, 2, rng=0).w = first.w


def test_a_loss_used_in_two_places() -> None:
    loss, y = nn.MeanSquaredError(), random(3, 4)
    loss.forward(y, np.zeros((3, 4)))
    dy = loss.backward().copy()
    assert np.array_equal(loss.backward(), dy)  # the same gradient may be asked for again
    loss.forward(y, np.zeros((3, 4)))
    loss.forward(y, np.ones((3, 4)))
    np.testing.assert_allclose(loss.backward(), 2 * (y - 1) / y.size)
    with pytest.raises(
        RuntimeError, match=r"MeanSquaredError\.backward: forward ran 2 times, .* a loss object for each"
    ):
        loss.backward()
    loss.forward(y, np.zeros((3, 4)))
    assert np.array_equal(loss.backward(), dy)
