"""retrograd.nn: modules, layers, losses, optimizers, schedules, each by itself. Training is in test_nn_training.py."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import retrograd as rg
from retrograd import nn

Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Scale(nn.Module):
    """A layer of one's own, as short as it can be."""

    def __init__(self, features: int) -> None:
        self.add_parameter("w", np.full(features, 2.0))

    w: Array

    def forward(self, x: Array) -> Array:
        self.keep(x=x)
        return self.w * x

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array:
        self.set_gradient("w", (dy * self.kept("x")).sum(axis=0), accumulate)
        return dy * self.w


class Halve(nn.Module):
    def forward(self, x: Array) -> Array:
        return x / 2

    def backward(self, dy: Array) -> Array:
        return dy / 2


# ---- modules ---------------------------------------------------------------------------------------------------------


def model(dtype: npt.DTypeLike = np.float32, seed: int = 0) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        embedding=nn.Embedding(7, 4, dtype=dtype, rng=rng),
        lstm=nn.LSTM(4, 3, layers=2, bidirectional=True, dropout=0.2, dtype=dtype, rng=rng),
        norm=nn.LayerNorm(6, dtype=dtype),
        head=nn.Linear(6, 5, dtype=dtype, rng=rng),
    )


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


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_linear_and_embedding_compute_what_they_say() -> None:
    linear, x = nn.Linear(6, 5, dtype=np.float64, rng=0), random(3, 4, 6)
    np.testing.assert_allclose(linear.forward(x), x @ linear.w.T + linear.b, rtol=1e-12, atol=1e-14)
    table = nn.Embedding(6, 5, padding_index=2, dtype=np.float64, rng=0)
    indices = np.array([[0, 5], [2, 0]], np.int32)
    assert np.array_equal(table.forward(indices), table.table[indices])
    assert not table.table[2].any()
    dy = random(2, 2, 5)
    for again in range(2):
        if again:
            table.forward(indices)
        table.backward(dy)
        assert np.array_equal(table.dtable[5], dy[0, 1])
        assert np.array_equal(table.dtable[0], dy[0, 0] + dy[1, 1])
        assert not table.dtable[[1, 2, 3, 4]].any()
    table.forward(indices)
    table.backward(dy, accumulate=True)
    assert np.array_equal(table.dtable[5], 2 * dy[0, 1])
    assert not table.dtable[2].any()


def test_dropout_drops_in_training_only_and_anew_each_time() -> None:
    layer = nn.Dropout(0.25, rng=3)
    x = np.ones((50, 40))
    first = layer.forward(x).copy()
    assert set(np.unique(first)) == {0.0, 1 / 0.75}
    assert abs((first == 0).mean() - 0.25) < 0.03
    assert np.array_equal(layer.backward(x), first)  # the mask of forward
    second = layer.forward(x).copy()
    assert abs((first == second).mean() - (0.75**2 + 0.25**2)) < 0.05
    assert layer.backward(x, need_dx=False) is None

    twin = nn.Dropout(0.25, rng=3)
    assert np.array_equal(twin.forward(x), first)
    other = nn.Dropout(0.25, rng=4)
    assert not np.array_equal(other.forward(x), first)
    other.load_state_dict(twin.state_dict())  # after its first pass
    assert np.array_equal(other.forward(x), second)

    layer.eval()
    assert np.array_equal(layer.forward(x), x)
    assert np.array_equal(layer.backward(2 * x), 2 * x)
    assert layer.stream[1] == 2
    assert np.array_equal(nn.Dropout(0.0).forward(x), x)


def test_batch_norm_follows_the_batches() -> None:
    layer = nn.BatchNorm(3, dtype=np.float64, update=rg.RunningUpdate(0.5, False))
    x = random(8, 3) * 2 + 1
    y = layer.forward(x).copy()
    layer.backward(y)
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-14)
    np.testing.assert_allclose(layer.running_mean, x.mean(axis=0) / 2)
    np.testing.assert_allclose(layer.running_var, (1 + x.var(axis=0)) / 2)
    layer.eval()
    before = layer.state_dict()
    expected = (x - layer.running_mean) / np.sqrt(layer.running_var + 1e-5)
    np.testing.assert_allclose(layer.forward(x), expected, rtol=1e-12)
    assert all(np.array_equal(a, before[name]) for name, a in layer.state_dict().items())
    # Statistics are constants now, in backward too: a frozen layer in a model that learns.
    dx = layer.backward(np.ones((8, 3)))
    assert dx is not None
    np.testing.assert_allclose(dx, np.broadcast_to(1 / np.sqrt(layer.running_var + 1e-5), (8, 3)), rtol=1e-12)

    untracked = nn.BatchNorm(3, dtype=np.float64, running=False).eval()
    np.testing.assert_allclose(untracked.forward(x), y, rtol=1e-12)
    assert not untracked.buffers()


def test_norms_are_the_functions() -> None:
    x = random(3, 4, 6)
    gamma, beta = random(4, seed=1), random(4, seed=2)
    group = nn.GroupNorm(2, 4, eps=1e-3, activation="tanh", dtype=np.float64)
    group.gamma[...], group.beta[...] = gamma, beta
    expected, _ = rg.group_norm_forward(x, gamma, beta, num_groups=2, eps=1e-3, activation="tanh")
    assert np.array_equal(group.forward(x), expected)
    expected, _ = rg.instance_norm_forward(x)
    assert np.array_equal(nn.InstanceNorm(4).forward(x), expected)
    assert not nn.InstanceNorm(4).state_dict()
    tracking = nn.InstanceNorm(4, running=True, dtype=np.float64)
    tracking.forward(x)
    tracking.eval()
    expected, _ = rg.instance_norm_forward(
        x, training=False, running_mean=tracking.running_mean, running_var=tracking.running_var
    )
    assert np.array_equal(tracking.forward(x), expected)
    last = nn.LayerNorm((4, 6), dtype=np.float64)
    expected, _ = rg.layer_norm_forward(x, axis=-2)
    np.testing.assert_allclose(last.forward(x), expected, rtol=1e-14)


def lstm_and_input(**options: Any) -> tuple[nn.LSTM, Array]:
    return nn.LSTM(5, 4, dtype=np.float64, rng=0, **options), random(7, 3, 5, seed=5)


def test_lstm_hands_over_every_option() -> None:
    options: dict[str, Any] = {
        "bidirectional": True,
        "activations": rg.LstmActivations(g="softsign", h="relu"),
        "output_gate_reads": "old",
    }
    lstm, x = lstm_and_input(layers=2, peephole="diagonal", batch_first=True, dropout=0.3, **options)
    x = np.ascontiguousarray(x.transpose(1, 0, 2))
    h0, c0 = random(4, 3, 4, seed=1), random(4, 3, 4, seed=2)
    lengths = [7, 2, 5]
    seed = (int(lstm.stream[0]) + int(lstm.stream[1])) % 2**64
    y = lstm.forward(x, (h0, c0), lengths=lengths)
    cells = [m for name, m in lstm.modules() if name]
    weights = [rg.LstmWeights(m.wx, m.wh, m.b, m.peephole) for m in cells]
    expected = rg.lstm_forward(x, weights, h0, c0, lengths=lengths, dropout=0.3, seed=seed, batch_first=True, **options)
    assert np.array_equal(y, expected.y)
    assert np.array_equal(lstm.state.h, expected.hn)
    assert np.array_equal(lstm.state.c, expected.cn)
    dy, dhn, dcn = random(*y.shape, seed=3), random(*h0.shape, seed=4), random(*h0.shape, seed=5)
    dx = lstm.backward(dy, (dhn, dcn))
    assert expected.cache is not None
    gradients = rg.lstm_backward(dy, expected.cache, dhn=dhn, dcn=dcn)
    assert np.array_equal(dx, gradients.dx)
    assert np.array_equal(lstm.dstate.h, gradients.dh0)
    assert np.array_equal(lstm.dstate.c, gradients.dc0)
    for cell, dcell in zip(cells, gradients.dweights, strict=True):
        for name in ("wx", "wh", "b", "peephole"):
            assert np.array_equal(getattr(cell, f"d{name}"), getattr(dcell, name))
    lstm.stream[1] -= 1
    lstm.forward(x, (h0, c0), lengths=lengths)
    assert lstm.backward(dy, (dhn, dcn), need_dx=False) is None
    assert np.array_equal(lstm.dstate.h, gradients.dh0)

    sizes = [3, 3, 2, 2, 1, 1, 0]
    y = lstm.eval().forward(x, batch_sizes=sizes)
    expected = rg.lstm_forward(x, weights, batch_sizes=sizes, batch_first=True, **options)
    assert np.array_equal(y, expected.y)


@pytest.mark.parametrize("shape", [(6, 3), (2, 3)], ids=["more numbers than rows", "fewer"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_lstm_with_an_embedding_is_both_of_them(shape: tuple[int, int], batch_first: bool) -> None:
    options: dict[str, Any] = {"bidirectional": True, "batch_first": batch_first, "dtype": np.float64}
    apart = nn.Sequential(
        embedding=nn.Embedding(7, 4, padding_index=2, dtype=np.float64, rng=0), lstm=nn.LSTM(4, 3, rng=1, **options)
    )
    embedding = nn.Embedding(7, 4, padding_index=2, dtype=np.float64, rng=0)
    both = nn.LSTM(4, 3, embedding=embedding, rng=1, **options)
    assert sorted(both.parameters()) == sorted(name.removeprefix("lstm.") for name in apart.parameters())
    for number in range(3):
        x = np.random.default_rng(number).integers(0, 7, shape)
        y = apart.forward(x)
        np.testing.assert_array_equal(both.forward(x), y)
        apart.backward(y - 1, accumulate=number == 2)
        assert both.backward(y - 1, accumulate=number == 2) is None
        for name, gradient in apart.gradients().items():
            np.testing.assert_allclose(both.gradients()[name.removeprefix("lstm.")], gradient, rtol=1e-12, atol=1e-14)
        assert not embedding.dtable[2].any()
    with pytest.raises(ValueError, match=r"LSTM.forward: x has shape \(2, 3, 4\), must be .*: there is an embedding"):
        both.forward(np.zeros((2, 3, 4), int))
    with pytest.raises(ValueError, match="LSTM: inputs is 5, but the embedding has 4 features"):
        nn.LSTM(5, 3, embedding=embedding)


def test_lstm_drops_anew_each_time() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.5)
    first, second = lstm.forward(x).copy(), lstm.forward(x).copy()
    assert not np.array_equal(first, second)
    lstm.stream[1] = 0
    assert np.array_equal(lstm.forward(x), first)


def test_lstm_in_evaluation_keeps_nothing_and_still_has_gradients() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.5)
    lstm.eval()
    y = lstm.forward(x)
    assert lstm.kept("cache").buffer is None
    assert lstm.stream[1] == 0
    dx = lstm.backward(np.ones_like(y))
    dense, _ = lstm_and_input(layers=2)
    dense.load_state_dict({name: a for name, a in lstm.state_dict().items() if name != "stream"})
    assert np.array_equal(dense.forward(x), y)
    assert np.array_equal(dense.backward(np.ones_like(y)), dx)


def test_lstm_goes_on_where_it_ended() -> None:
    """Time split in two is time run whole, forward and backward."""
    lstm, x = lstm_and_input(layers=2)
    later = copy.deepcopy(lstm)
    dy = random(7, 3, 4, seed=6)
    y = lstm.forward(x).copy()
    state = nn.LstmState(*(a.copy() for a in lstm.state))
    dx = lstm.backward(dy)
    assert dx is not None
    dx = dx.copy()
    whole = {name: a.copy() for name, a in lstm.gradients().items()}
    assert lstm.dstate == (None, None)

    np.testing.assert_allclose(lstm.forward(x[:3].copy()), y[:3], rtol=1e-13)
    np.testing.assert_allclose(later.forward(x[3:].copy(), lstm.state), y[3:], rtol=1e-13)
    np.testing.assert_allclose(later.state.h, state.h, rtol=1e-13)
    np.testing.assert_allclose(later.backward(dy[3:]), dx[3:], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(
        lstm.backward(dy[:3], later.dstate),
        dx[:3],
        rtol=1e-11,
        atol=1e-14,
    )
    for name, array in lstm.gradients().items():
        np.testing.assert_allclose(array + later.gradients()[name], whole[name], rtol=1e-11, atol=1e-13)


def test_lstm_state_can_be_handed_back_again_and_again() -> None:
    """Truncated backpropagation: the states of the last pass are where the next begins, in memory used in turns."""
    for options, training in (({}, True), ({}, False), ({"recompute": True}, True)):
        lstm, x = lstm_and_input(**options)
        lstm.train() if training else lstm.eval()
        parts = [x[i : i + 1].copy() for i in range(7)]
        outputs, state = [], None
        for part in parts:
            y = lstm.forward(part, state)
            outputs.append(y.copy())
            lstm.backward(np.ones_like(y))
            state = lstm.state
        np.testing.assert_allclose(np.concatenate(outputs), lstm.forward(x), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(3, 2, init="glorot"), ValueError, "Linear: init is 'glorot'"),
        (lambda: nn.Embedding(3, 2, init="he"), ValueError, "Embedding: init is 'he'"),
        (lambda: nn.Embedding(3, 2, padding_index=3), ValueError, "padding_index is 3, must be from 0 to 2"),
        (lambda: nn.LSTM(3, 2, init="he"), ValueError, "LSTM: init is 'he'"),
        (lambda: nn.LSTM(3, 2, peephole="some"), ValueError, "peephole is 'some'"),
        (lambda: nn.LSTM(3, 2, dropout=1.0), ValueError, "LSTM: dropout is 1.0, must be at least 0 and below 1"),
        (lambda: nn.LSTM(3, 0), ValueError, "hidden is 0"),
        (lambda: nn.Dropout(1.0), ValueError, "Dropout: rate is 1.0, must be at least 0 and below 1"),
        (lambda: nn.Activation("swish"), ValueError, "here it is called 'silu'"),
        (lambda: nn.GroupNorm(3, 4), ValueError, "4 channels cannot be cut into 3 groups"),
        (lambda: nn.Linear(3, 2, dtype=np.float16), TypeError, "parameter w has dtype float16"),
        (lambda: nn.LayerNorm(4).forward(np.zeros((2, 3), np.float32)), ValueError, r"\(2, 3\), .* must be \(4,\)"),
        (lambda: nn.LSTM(4, 2).forward(np.zeros((2, 3), np.float32)), ValueError, r"\(2, 3\), must be .* I = 4"),
        (lambda: nn.BatchNorm(4).forward(np.zeros((2, 3), np.float32)), ValueError, r"batch_norm_forward: "),
        (lambda: nn.Linear(4, 2).forward(np.zeros((2, 3), np.float32)), ValueError, r"linear_forward: "),
        (lambda: nn.Linear(4, 2).forward(np.zeros((2, 4))), TypeError, r"linear_forward: "),
    ],
)
def test_layers_refuse(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_refused_pass_draws_nothing() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.5)
    with pytest.raises(TypeError):
        lstm.forward(x.astype(np.float32))
    assert lstm.stream[1] == 0


# ---- first values ----------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_parameters() -> None:
    first, second, third = model().state_dict(), model().state_dict(), model(seed=1).state_dict()
    double = model(np.float64).state_dict()
    for name, array in first.items():
        assert np.array_equal(array, second[name])
        if not name.startswith("norm"):
            assert not np.array_equal(array, third[name])
        assert np.array_equal(array, double[name].astype(array.dtype))
    assert not np.array_equal(nn.Linear(4, 4).w, nn.Linear(4, 4).w)  # without a seed: fresh entropy
    assert np.array_equal(nn.Linear(4, 4, rng=7).w, nn.Linear(4, 4, rng=np.random.default_rng(7)).w)


def assert_uniform(array: Array, bound: float) -> None:
    assert np.abs(array).max() <= bound
    assert abs(array.mean()) < 0.05 * bound
    assert abs(array.std() / (bound / math.sqrt(3)) - 1) < 0.05


def test_linear_and_embedding_begin_as_in_the_field() -> None:
    linear = nn.Linear(400, 100, rng=0)
    assert_uniform(linear.w, 1 / 20)
    assert 0 < np.abs(linear.b).max() <= 1 / 20
    keras = nn.Linear(400, 100, init="keras", rng=0)
    assert_uniform(keras.w, math.sqrt(6 / 500))
    assert not keras.b.any()
    he = nn.Linear(400, 100, init="he", rng=0)
    assert abs(he.w.std() / math.sqrt(2 / 400) - 1) < 0.05
    assert not he.b.any()
    assert abs(nn.Embedding(400, 100, rng=0).table.std() - 1) < 0.05
    assert_uniform(nn.Embedding(400, 100, init="keras", rng=0).table, 0.05)


def test_lstm_begins_as_in_the_field() -> None:
    lstm: Any = nn.LSTM(30, 64, layers=2, bidirectional=True, peephole="full", rng=0)
    for cell in (lstm.layer0, lstm.layer0_reverse, lstm.layer1, lstm.layer1_reverse):
        for array in (cell.wx, cell.wh, cell.peephole):
            assert_uniform(array, 1 / 8)
        forget = cell.b[64:128]
        assert np.abs(forget - 1).max() <= 1 / 8 + 1e-6
        assert np.abs(np.delete(cell.b, np.s_[64:128])).max() <= 1 / 8
    assert lstm.layer1.wx.shape == (256, 128)
    keras: Any = nn.LSTM(30, 64, init="keras", peephole="diagonal", rng=0, dtype=np.float64)
    assert_uniform(keras.layer0.wx, math.sqrt(6 / (30 + 256)))
    np.testing.assert_allclose(keras.layer0.wh.T @ keras.layer0.wh, np.eye(64), atol=1e-12)
    assert np.array_equal(keras.layer0.b, np.repeat([0.0, 1.0, 0.0, 0.0], 64))
    assert not keras.layer0.peephole.any()
    plain: Any = nn.LSTM(3, 2, forget_bias=0.0, init="keras", rng=0)
    assert not plain.layer0.b.any()
    assert "layer0.b" not in nn.LSTM(3, 2, bias=False).parameters()


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
