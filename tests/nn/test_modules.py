"""retrograd.nn: modules, their parameters and state, and the memory that layers use again."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array
from support.nn import Halve, Scale, model, random

# ---- modules ---------------------------------------------------------------------------------------------------------


def test_names_lead_through_children() -> None:
    m = model()
    cells = ["layer0", "layer0_reverse", "layer1", "layer1_reverse"]
    expected = ["embedding.table"]
    expected += [f"lstm.{cell}.{name}" for cell in cells for name in ("wx", "wh", "b")]
    expected += ["norm.gamma", "norm.beta", "head.w", "head.b"]
    assert list(m.parameters()) == list(m.gradients()) == expected
    assert list(m.buffers()) == ["lstm.stream"]
    assert list(m.state_dict()) == [*expected, "lstm.stream"]
    assert m.parameters()["head.w"] is m.head.w
    assert m.gradients()["head.w"] is m.head.dw
    assert m.num_parameters == sum(a.size for a in m.parameters().values())
    for name, parameter in m.parameters().items():
        assert m.gradients()[name].shape == parameter.shape
        assert m.gradients()[name].dtype == parameter.dtype == np.float32


def test_sequential_by_position() -> None:
    m = nn.Sequential(Scale(2), nn.Sequential(Halve(), Scale(2)))
    assert list(m.parameters()) == ["0.w", "1.1.w"]
    assert len(m) == 2
    assert isinstance(m[0], Scale)
    assert isinstance(m[-1], nn.Sequential)
    assert [type(layer) for layer in m] == [Scale, nn.Sequential]
    assert m["1"] is m[1]
    x = random(3, 2)
    assert np.array_equal(m.forward(x), 2 * x)
    dx = m.backward(np.ones((3, 2)))
    assert np.array_equal(dx, np.full((3, 2), 2.0))
    assert np.array_equal(m.gradients()["0.w"], x.sum(axis=0))
    assert np.array_equal(m.gradients()["1.1.w"], x.sum(axis=0))
    assert np.array_equal(nn.Sequential().backward(x), x)


def test_sequential_refuses() -> None:
    with pytest.raises(TypeError, match="name all layers or none"):
        nn.Sequential(Halve(), b=Halve())
    with pytest.raises(TypeError, match="layer 0 is a int, must be a Module"):
        nn.Sequential(3)
    with pytest.raises(ValueError, match="'forward' is taken"):
        nn.Sequential(forward=Halve())
    m = nn.Sequential(Halve(), nn.Embedding(3, 2, dtype=np.float64))
    m[1].forward(np.array([0, 2]))
    with pytest.raises(TypeError, match="Embedding gives no dx, so it must come first"):
        m.backward(np.ones((2, 2)))


def test_an_attribute_is_a_child_until_it_is_replaced() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            self.first, self.second = Scale(2), Scale(3)

    m = Two()
    assert list(m.parameters()) == ["first.w", "second.w"]
    m.second = Halve()
    assert list(m.parameters()) == ["first.w"]
    m.second = None
    assert [name for name, _ in m.modules()] == ["", "first"]
    m.second = m.first
    with pytest.raises(ValueError, match="Two: first and second are the same Scale"):
        m.parameters()


def test_modules_that_would_not_be_found_are_refused() -> None:
    m = nn.Module()
    for hidden in ([Halve()], (Halve(),), {"a": Halve()}):
        with pytest.raises(TypeError, match=rf"Module.layers: modules inside a {type(hidden).__name__} would not be"):
            m.layers = hidden
    m.sizes = [1, 2]


def test_parameters_stay_the_same_arrays() -> None:
    m = Scale(2)
    optimizer = nn.SGD(m, 1.0)
    m.w *= 3
    m.w[...] = m.w + 1
    assert np.array_equal(m.w, [7.0, 7.0])
    for name in ("w", "dw"):
        with pytest.raises(AttributeError, match=rf"Scale.{name} stays the same array; write into it"):
            setattr(m, name, np.zeros(2))
    m.forward(np.ones((1, 2)))
    m.backward(np.ones((1, 2)))
    optimizer.step()
    assert np.array_equal(m.w, [6.0, 6.0])


def test_parameters_that_cannot_be() -> None:
    m = nn.Module()
    with pytest.raises(TypeError, match="parameter w has dtype int64"):
        m.add_parameter("w", np.zeros(2, int))
    with pytest.raises(ValueError, match="'forward' of a parameter or buffer is taken"):
        m.add_parameter("forward", np.zeros(2))
    with pytest.raises(ValueError, match=r"'a\.b' of a parameter or buffer is not an identifier"):
        m.add_buffer("a.b", np.zeros(2))
    m.add_parameter("w", np.zeros(2))
    with pytest.raises(ValueError, match="'dw' of a parameter or buffer is taken"):
        m.add_buffer("dw", np.zeros(2))
    with pytest.raises(ValueError, match=r"gradient has shape \(3,\), but w has shape \(2,\)"):
        m.set_gradient("w", np.zeros(3))
    for method in (m.forward, m.backward):
        with pytest.raises(NotImplementedError, match="Module has no"):
            method(np.zeros(2))


def test_state_is_copied_both_ways() -> None:
    m, other = model(), model(seed=1)
    state = m.state_dict()
    assert all(not np.shares_memory(a, state[name]) for name, a in m.parameters().items())
    places = {name: id(a) for name, a in other.parameters().items()}
    assert other.load_state_dict(state) == ((), ())
    assert {name: id(a) for name, a in other.parameters().items()} == places
    for name, array in other.state_dict().items():
        assert np.array_equal(array, state[name])
    state["head.b"] += 1
    assert not np.array_equal(other.head.b, state["head.b"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    m = model()
    before = m.state_dict()
    good = model(seed=1).state_dict()
    for change, error, message in (
        ({"head.w": np.zeros((5, 7), np.float32)}, ValueError, r"head.w has shape \(5, 7\), but here .* \(5, 6\)"),
        ({"head.w": np.zeros((5, 6))}, TypeError, "head.w has dtype float64, but here it has dtype float32"),
        ({"tail.w": np.zeros(3)}, ValueError, "the state has unexpected tail.w"),
        ({"head.w": None}, ValueError, "the state does not have head.w"),
    ):
        state = {name: array for name, array in {**good, **change}.items() if array is not None}
        with pytest.raises(error, match="Sequential.load_state_dict: .*" + message):
            m.load_state_dict(state)
        for name, array in m.state_dict().items():
            assert np.array_equal(array, before[name]), name

    part = {"head.w": good["head.w"], "tail.w": np.zeros(3)}
    difference = m.load_state_dict(part, strict=False)
    assert difference.unexpected == ("tail.w",)
    assert set(difference.missing) == set(before) - {"head.w"}
    assert np.array_equal(m.state_dict()["head.w"], good["head.w"])
    assert np.array_equal(m.state_dict()["head.b"], before["head.b"])
    with pytest.raises(ValueError, match="shape"):
        m.load_state_dict({"head.w": np.zeros(2, np.float32)}, strict=False)


def test_a_copy_is_independent_and_whole() -> None:
    """Also one that was made between forward and backward, when caches are there."""
    m = model()
    m.forward(np.array([[0, 1], [2, 3]]))
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert all(np.array_equal(a, twin.parameters()[name]) for name, a in m.parameters().items())
        assert not any(np.shares_memory(a, twin.parameters()[name]) for name, a in m.parameters().items())
        with pytest.raises(
            RuntimeError, match=r"Linear.backward \(layer 'head' of Sequential\): there was no forward pass"
        ):
            twin.backward(np.ones((2, 2, 5), np.float32))
        nn.SGD(twin, 1.0)
        twin.forward(np.array([[0, 1], [2, 3]]))
        twin.backward(np.ones((2, 2, 5), np.float32))
        assert twin.gradients()["lstm.layer0.wx"].any()  # what the engine fills is what the module shows
        assert not m.gradients()["lstm.layer0.wx"].any()


def test_repr_shows_the_tree() -> None:
    text = repr(model())
    assert text.startswith("Sequential(\n  embedding: Embedding(7, 4)\n  lstm: LSTM(4, 3, layers=2, bidirectional=True")
    assert "    layer0_reverse: LstmCell(wx: (12, 4), wh: (12, 3), b: (12,))\n" in text
    assert text.endswith("  head: Linear(6, 5)\n)")
    assert repr(nn.GroupNorm(2, 4, activation="relu")) == "GroupNorm(2, 4, eps=1e-05, activation=Activation('relu'))"
    assert repr(nn.Dropout(0.5)) == "Dropout(0.5)"


def test_threads_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model().set_num_threads(2)
    seen = []
    for name in ("embedding_forward", "lstm_forward", "layer_norm_forward", "linear_forward"):
        function = getattr(rg, name)

        def spy(*args: Any, _function: Any = function, **options: Any) -> Any:
            seen.append(options["num_threads"])
            return _function(*args, **options)

        monkeypatch.setattr(rg, name, spy)
    m.forward(np.array([[0, 1]]))
    assert seen == [2, 2, 2, 2]


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, retrograd.nn; assert not {'safetensors', 'torch', 'jax', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, retrograd; assert 'retrograd.nn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- memory ----------------------------------------------------------------------------------------------------------


def layers_of_all_kinds(dtype: npt.DTypeLike = np.float64) -> list[tuple[nn.Module, Array]]:
    x = random(3, 4, 6, dtype=dtype)
    return [
        (nn.Linear(6, 5, dtype=dtype, rng=0), x),
        (nn.Linear(6, 5, bias=False, dtype=dtype, rng=0), x),
        (nn.Conv(4, 6, (3,), padding=1, groups=2, activation="tanh", dtype=dtype, rng=0), x),
        (nn.Conv(4, 3, (2,), bias=False, dtype=dtype, rng=0), x),
        (nn.Conv(6, 3, (2,), channels_last=True, dtype=dtype, rng=0), x),
        (nn.ConvTranspose(4, 3, (2,), stride=2, activation="relu", dtype=dtype, rng=0), x),
        (nn.Embedding(6, 5, dtype=dtype, rng=0), np.array([[0, 5, 5], [2, 3, 0]])),
        (nn.Activation("gelu"), x),
        (nn.Activation(rg.Activation("leaky_relu", alpha=0.3)), x),
        (nn.BatchNorm(4, dtype=dtype, activation="silu"), x),
        (nn.BatchNorm(4, dtype=dtype, affine=False, running=False), x),
        (nn.BatchNorm(6, dtype=dtype, channel_axis=-1), x),
        (nn.InstanceNorm(4, dtype=dtype), x),
        (nn.InstanceNorm(4, dtype=dtype, affine=True, running=True, activation="tanh"), x),
        (nn.LayerNorm(6, dtype=dtype), x),
        (nn.LayerNorm((4, 6), dtype=dtype, activation="sigmoid"), x),
        (nn.GroupNorm(2, 4, dtype=dtype, activation="gelu_tanh"), x),
        (nn.LSTM(6, 3, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, layers=2, bidirectional=True, batch_first=True, peephole="full", dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, bias=False, peephole="diagonal", recompute=True, dtype=dtype, rng=0), x),
    ]


KINDS = [type(layer).__name__ + str(i) for i, (layer, _) in enumerate(layers_of_all_kinds())]


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_training_uses_memory_again_and_evaluation_does_not(index: int) -> None:
    layer, x = layers_of_all_kinds()[index]
    y = layer.forward(x)
    dx = layer.backward(np.ones_like(y))
    again = layer.forward(x)
    assert again.ctypes.data == y.ctypes.data
    if dx is not None:
        dx_again = layer.backward(np.ones_like(y))
        assert dx_again is not None
        assert dx_again.ctypes.data == dx.ctypes.data
        assert dx.shape == x.shape
    fewer = layer.forward(x[:2].copy())
    assert fewer.ctypes.data == y.ctypes.data
    layer.eval()
    first, second = layer.forward(x), layer.forward(x)
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, y)


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_accumulate_adds_gradients_but_not_dx(index: int) -> None:
    layer, x = layers_of_all_kinds()[index]
    dy = random(*layer.forward(x).shape, seed=2)
    first = layer.backward(dy)
    first = None if first is None else first.copy()
    once = {name: array.copy() for name, array in layer.gradients().items()}
    layer.forward(x)
    second = layer.backward(dy, accumulate=True)
    if first is not None:
        assert second is not None
        np.testing.assert_allclose(second, first, rtol=1e-13, atol=1e-15)
    for name, array in layer.gradients().items():
        np.testing.assert_allclose(array, 2 * once[name], rtol=1e-12, atol=1e-14, err_msg=name)
        assert array.any(), name
    layer.forward(x)
    assert layer.backward(dy, need_dx=False) is None
    for name, array in layer.gradients().items():
        np.testing.assert_allclose(array, once[name], rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_backward_without_forward_is_refused(index: int) -> None:
    layer, x = layers_of_all_kinds()[index]
    with pytest.raises(RuntimeError, match=rf"{type(layer).__name__}.backward: there was no forward pass"):
        layer.backward(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_everything_is_of_the_type_asked_for(dtype: npt.DTypeLike) -> None:
    for layer, x in layers_of_all_kinds(dtype):
        y = layer.forward(x)
        assert y.dtype == dtype
        dx = layer.backward(y.copy())
        assert dx is None or dx.dtype == dtype
        assert {a.dtype for a in [*layer.parameters().values(), *layer.buffers().values()]} <= {np.dtype(dtype)}


def test_half_precision_data_through_a_norm() -> None:
    layer = nn.BatchNorm(4, activation="relu")
    x = random(3, 4, 6, dtype=np.float16)
    y = layer.forward(x)
    dx = layer.backward(y.copy())
    assert dx is not None
    assert y.dtype == dx.dtype == np.float16
    assert layer.dgamma.dtype == np.float32
