"""retrograd.nn: layers compute what the functions do, forward and backward, and their first values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import retrograd as rg
from retrograd import graph, nn
from support.arrays import Array, assert_same_bits
from support.nn import Passes, assert_differences, model, passes, random

# ---- every layer by finite differences -------------------------------------------------------------------------------


def layers_of_all_kinds(dtype: npt.DTypeLike = np.float64) -> list[tuple[nn.Module, Array]]:
    x, images = random(3, 4, 6, dtype=dtype), random(2, 4, 5, 7, seed=1, dtype=dtype)
    tokens = np.array([[0, 5, 5], [2, 3, 0]])
    embedding = nn.Embedding(6, 4, padding_index=2, dtype=dtype, rng=0)
    return [
        (nn.Linear(6, 5, dtype=dtype, rng=0), x),
        (nn.Linear(6, 5, bias=False, dtype=dtype, rng=0), x),
        (nn.Conv(4, 6, (3,), padding=1, groups=2, activation="tanh", dtype=dtype, rng=0), x),
        (nn.Conv(4, 3, (2,), bias=False, dtype=dtype, rng=0), x),
        (nn.Conv(6, 3, (2,), channels_last=True, dtype=dtype, rng=0), x),
        (nn.Conv(4, 3, 3, stride=2, dilation=(1, 2), activation="silu", dtype=dtype, rng=0), images),
        (nn.ConvTranspose(4, 3, (2,), stride=2, activation="softplus", dtype=dtype, rng=0), x),
        (nn.ConvTranspose(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2, dtype=dtype, rng=0), images),
        (nn.Embedding(6, 5, dtype=dtype, rng=0), tokens),
        (nn.Embedding(6, 5, padding_index=5, dtype=dtype, rng=0), tokens),
        (nn.Activation("gelu"), x),
        (nn.Activation(rg.Activation("leaky_relu", alpha=0.3)), x),
        *((kind(), x) for kind in (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.ELU)),
        (nn.GELU("tanh"), x),
        (nn.Softmax(), x),
        (nn.Softmax(1), x),
        (nn.Dropout(0.4, rng=0), x),
        (nn.Flatten(), x),
        (nn.MaxPool(2), images),
        (nn.MaxPool((2, 3), stride=1, padding=1), images),
        (nn.AveragePool(2, padding=1, count_includes_padding=False), images),
        (nn.BatchNorm(4, dtype=dtype, activation="silu"), x),
        (nn.BatchNorm(4, dtype=dtype, affine=False, running=False), x),
        (nn.BatchNorm(6, dtype=dtype, channel_axis=-1), x),
        (nn.BatchNorm(4, dtype=dtype).eval(), x),
        (nn.InstanceNorm(4, dtype=dtype), x),
        (nn.InstanceNorm(4, dtype=dtype, affine=True, running=True, activation="tanh"), x),
        (nn.LayerNorm(6, dtype=dtype), x),
        (nn.LayerNorm((4, 6), dtype=dtype, activation="sigmoid"), x),
        (nn.GroupNorm(2, 4, dtype=dtype, activation="gelu_tanh"), x),
        (nn.LSTM(6, 3, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, last=True, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, last=True, bidirectional=True, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, layers=2, bidirectional=True, batch_first=True, peephole="full", dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, layers=2, dropout=0.3, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, bias=False, peephole="diagonal", recompute=True, dtype=dtype, rng=0), x),
        (nn.LSTM(4, 3, embedding=embedding, dtype=dtype, rng=0), tokens),
        (nn.LSTM(6, 3, layers=2, projection=2, coupled=True, recurrent_dropout=0.3, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, norm="cell", zoneout=(0.3, 0.2), batch_first=True, dtype=dtype, rng=0), x),
        (nn.LSTM(6, 3, norm="haste", dtype=dtype, rng=0), x),
        (nn.GRU(6, 3, dtype=dtype, rng=0), x),
        (nn.GRU(6, 3, layers=2, bidirectional=True, batch_first=True, dropout=0.3, dtype=dtype, rng=0), x),
        (nn.GRU(6, 3, kind="before", flip=True, recurrent_dropout=0.3, zoneout=0.2, dtype=dtype, rng=0), x),
        (nn.GRU(4, 3, norm="haste", embedding=embedding, last=True, dtype=dtype, rng=0), tokens),
        (nn.RNN(6, 3, dtype=dtype, rng=0), x),
        (nn.RNN(6, 3, norm="haste", recompute=True, recurrent_dropout=0.3, zoneout=0.2, dtype=dtype, rng=0), x),
        (nn.RNN(4, 3, activation="sigmoid", embedding=embedding, dtype=dtype, rng=0), tokens),
        (nn.MultiHeadAttention(6, 2, dtype=dtype, rng=0), x),
        (nn.MultiHeadAttention(6, 3, causal=True, dropout=0.2, bias=False, dtype=dtype, rng=0), x),
        (nn.Residual(nn.Linear(6, 6, dtype=dtype, rng=0), nn.Tanh()), x),
    ]  # fmt: skip


KINDS = [type(layer).__name__ + str(i) for i, (layer, _) in enumerate(layers_of_all_kinds())]


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_gradients_are_differences(index: int) -> None:
    """In the mode that each layer is in, for its parameters and for x."""
    layer, x = layers_of_all_kinds()[index]
    frozen = isinstance(layer, nn.Embedding) and layer.padding_index is not None
    state = layer.state_dict()
    both = Passes(layer, x)
    step = nn.compile(both, None, nn.SGD(both, 0.0))
    y = both.layer(x)
    layer.load_state_dict(state)  # the call moved running statistics and streams
    dy = random(*y.shape, seed=2)
    if getattr(layer, "embedding", None) is not None:
        layer.embedding.freeze()  # its padding row has no gradient, see below
    if not frozen:
        assert_differences(step, dy)
    else:  # the gradient is that of the elements that are trained
        table = step.gradients(dy)[1]["layer.table"]
        assert not table[5].any()
        assert np.array_equal(table[3], dy[1, 1])
    assert all(np.array_equal(array, state[name]) for name, array in layer.state_dict().items())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_everything_has_the_dtype_of_the_layer(dtype: npt.DTypeLike) -> None:
    for layer, x in layers_of_all_kinds(dtype):
        y = layer(x)
        assert y.dtype == dtype
        y, gradients = passes(layer, x, np.ones(y.shape, dtype))
        assert {a.dtype for a in [y, *gradients.values()]} == {np.dtype(dtype)}
        arrays = [*layer.parameters().values(), *layer.buffers().values()]
        assert {a.dtype for a in arrays if a.dtype.kind == "f"} <= {np.dtype(dtype)}


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_at_once_compiled_and_predicted_are_the_same_bits(index: int) -> None:
    layer, x = layers_of_all_kinds(np.float32)[index]
    state = layer.state_dict()
    y = layer(x)
    moved = layer.state_dict()
    layer.load_state_dict(state)
    compiled, _ = passes(layer, x, np.ones_like(y))
    assert_same_bits([compiled], [y])
    layer.eval()
    layer.load_state_dict(moved)
    assert_same_bits([layer.predict(x)], [layer(x)])
    assert_same_bits([layer.state_dict()[name] for name in moved], moved.values())  # evaluation changes nothing


# ---- the functions ---------------------------------------------------------------------------------------------------


def test_linear_is_the_function() -> None:
    linear, x, dy = nn.Linear(6, 5, dtype=np.float64, rng=0), random(3, 4, 6), random(3, 4, 5, seed=1)
    y, gradients = passes(linear, x, dy)
    np.testing.assert_allclose(y, x @ linear.w.value.T + linear.b.value, rtol=1e-12, atol=1e-14)
    assert_same_bits([y], [rg.linear_forward(x, linear.w.value, linear.b.value)])
    expected = rg.linear_backward(dy, x, linear.w.value)
    assert_same_bits([gradients[name] for name in ("x", "w", "b")], expected)


def test_embedding_is_the_function() -> None:
    layer = nn.Embedding(6, 5, padding_index=2, dtype=np.float64, rng=0)
    indices = np.array([[0, 5], [2, 0]])
    assert not layer.table.value[2].any()
    dy = random(2, 2, 5)
    y, gradients = passes(layer, indices, dy)
    assert np.array_equal(y, layer.table.value[indices])
    table = gradients["table"]
    assert np.array_equal(table[5], dy[0, 1])
    assert np.array_equal(table[0], dy[0, 0] + dy[1, 1])
    assert not table[[1, 2, 3, 4]].any()
    assert np.array_equal(layer(indices.astype(np.uint8)), y)
    for call in (layer, layer.predict):
        with pytest.raises(IndexError, match="an index is 6, must be from 0 to below 6"):
            call(np.array([6]))


def test_dropout_drops_in_training_only_and_anew_each_time() -> None:
    layer = nn.Dropout(0.25, rng=3)
    x = np.ones((50, 40))
    _, gradients = passes(layer, x, x)
    assert layer.stream.saved[1] == 0  # gradients change nothing
    first = layer(x)
    assert set(np.unique(first)) == {0.0, 1 / 0.75}
    assert abs((first == 0).mean() - 0.25) < 0.03
    assert np.array_equal(gradients["x"], first)  # the mask of forward
    second = layer(x)
    assert abs((first == second).mean() - (0.75**2 + 0.25**2)) < 0.05

    twin = nn.Dropout(0.25, rng=3)
    assert np.array_equal(twin(x), first)
    other = nn.Dropout(0.25, rng=4)
    assert not np.array_equal(other(x), first)
    other.load_state_dict(twin.state_dict())  # after its first pass
    assert np.array_equal(other(x), second)

    layer.eval()
    assert np.array_equal(layer(x), x)
    assert np.array_equal(passes(layer, x, 2 * x)[1]["x"], 2 * x)
    assert layer.stream.saved[1] == 2
    assert np.array_equal(nn.Dropout(0.0)(x), x)


def test_batch_norm_follows_the_batches() -> None:
    layer = nn.BatchNorm(3, dtype=np.float64, update=rg.RunningUpdate(0.5, False))
    x = random(8, 3) * 2 + 1
    y = layer(x)
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-14)
    np.testing.assert_allclose(layer.running_mean.value, x.mean(axis=0) / 2)
    np.testing.assert_allclose(layer.running_var.value, (1 + x.var(axis=0)) / 2)
    layer.eval()
    before = layer.state_dict()
    scale = 1 / np.sqrt(layer.running_var.value + 1e-5)
    expected = (x - layer.running_mean.value) * scale
    np.testing.assert_allclose(layer(x), expected, rtol=1e-12)
    # Statistics are constants now, in gradients too: a frozen layer in a model that learns.
    _, gradients = passes(layer, x, np.ones((8, 3)))
    np.testing.assert_allclose(gradients["x"], np.broadcast_to(scale, (8, 3)), rtol=1e-12)
    np.testing.assert_allclose(gradients["gamma"], expected.sum(axis=0), rtol=1e-12)
    assert all(np.array_equal(a, before[name]) for name, a in layer.state_dict().items())

    untracked = nn.BatchNorm(3, dtype=np.float64, running=False).eval()
    np.testing.assert_allclose(untracked(x), y, rtol=1e-12)
    assert not untracked.buffers()


def test_batch_norm_of_a_huge_mean_and_a_tiny_variance() -> None:
    """Where the mean of the squares minus the square of the mean has no correct digits."""
    x = (1e6 + random(64, 3, seed=5, dtype=np.float32)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axis=0)) / np.sqrt(wide.var(axis=0) + 1e-5)
    layer = nn.BatchNorm(3)
    state = layer.state_dict()
    dy = random(64, 3, seed=6, dtype=np.float32)
    y, gradients = passes(layer, x, dy)
    np.testing.assert_allclose(y, expected, atol=1e-4)
    np.testing.assert_allclose(gradients["gamma"], (dy * expected).sum(axis=0), rtol=1e-4, atol=1e-4)
    assert all(np.array_equal(array, state[name]) for name, array in layer.state_dict().items())
    layer(x)
    np.testing.assert_allclose(layer.running_var.value, 0.9 + 0.1 * wide.var(axis=0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_norms_are_the_functions(training: bool) -> None:
    x, dy = random(3, 4, 6), random(3, 4, 6, seed=9)
    gamma, beta = random(4, seed=1), random(4, seed=2)
    mean, var = random(4, seed=3), random(4, seed=4) ** 2
    slope: dict[str, Any] = {"slope_from": "input"}
    for layer, function, backward, options in (
        (nn.BatchNorm(4, activation="silu", dtype=np.float64), rg.batch_norm_forward, rg.batch_norm_backward,
         {"activation": "silu", **slope}),
        (nn.InstanceNorm(4, affine=True, running=True, activation="relu", dtype=np.float64), rg.instance_norm_forward,
         rg.instance_norm_backward, {"activation": "relu", **slope}),
        (nn.GroupNorm(2, 4, eps=1e-3, activation="tanh", dtype=np.float64), rg.group_norm_forward,
         rg.group_norm_backward, {"num_groups": 2, "eps": 1e-3, "activation": "tanh", **slope}),
    ):  # fmt: skip
        layer.gamma[...], layer.beta[...] = gamma, beta
        kept: dict[str, Any] = {}
        if layer.buffers():
            layer.running_mean[...], layer.running_var[...] = mean, var
            kept = {"running_mean": mean.copy(), "running_var": var.copy(), "training": training}
        layer.train() if training else layer.eval()
        y, gradients = passes(layer, x, dy)
        expected, cache = function(x, gamma, beta, **options, **kept)
        assert_same_bits([y], [expected])
        assert_same_bits([gradients[name] for name in ("x", "gamma", "beta")], backward(dy, cache))
        layer(x)  # which moves the running statistics as the function does; of instances they are means over samples
        for buffer, expected in zip(layer.buffers().values(), kept.values(), strict=False):
            np.testing.assert_allclose(buffer.value, expected, rtol=1e-15 if isinstance(layer, nn.InstanceNorm) else 0)
    plain = nn.InstanceNorm(4)
    assert_same_bits([plain(x)], [rg.instance_norm_forward(x)[0]])
    assert not plain.state_dict()
    last = nn.LayerNorm((4, 6), dtype=np.float64)
    y, gradients = passes(last, x, dy)
    expected, cache = rg.layer_norm_forward(x, last.gamma.value, last.beta.value, axis=-2)
    assert_same_bits([y], [expected])
    assert_same_bits([gradients[name] for name in ("x", "gamma", "beta")], rg.layer_norm_backward(dy, cache))


@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.ReLU(), "relu"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Tanh(), "tanh"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.Softplus(), "softplus"),
        (nn.LeakyReLU(0.3), rg.Activation("leaky_relu", 0.3)),
        (nn.ELU(0.7), rg.Activation("elu", 0.7)),
        (nn.Activation("hard_sigmoid"), "hard_sigmoid"),
    ],
    ids=repr,
)
def test_activations_are_the_functions(layer: nn.Module, function: Any) -> None:
    x, dy = random(5, 7), random(5, 7, seed=1)
    y, gradients = passes(layer, x, dy)
    assert_same_bits([y], [rg.activation_forward(x, function)])
    np.testing.assert_allclose(gradients["x"], rg.activation_backward(dy, function, x=x), rtol=1e-13, atol=1e-15)


def test_softmax() -> None:
    x = random(3, 4, 5)
    for axis in (-1, 1, 0):
        expected = np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True)
        np.testing.assert_allclose(nn.Softmax(axis)(x), expected, rtol=1e-13)
    large = nn.Softmax()(np.array([[1e4, 0.0, -1e4]]))
    assert np.array_equal(large, [[1.0, 0.0, 0.0]])
    assert repr(nn.Sequential(nn.Softmax(), nn.Softmax(1))) == "Sequential(\n  0: Softmax()\n  1: Softmax(1)\n)"


def test_residual() -> None:
    inner = nn.Linear(4, 4, dtype=np.float64, rng=0)
    layer, x, dy = nn.Residual(inner, nn.Tanh()), random(3, 4), random(3, 4, seed=1)
    y, gradients = passes(layer, x, dy)
    hidden = np.tanh(x @ inner.w.value.T + inner.b.value)
    np.testing.assert_allclose(y, x + hidden, rtol=1e-13)
    np.testing.assert_allclose(gradients["x"], dy + (dy * (1 - hidden**2)) @ inner.w.value, rtol=1e-12)
    lengths = np.array([2, 5])
    lstm = nn.LSTM(3, 3, dtype=np.float64, rng=0)
    x = random(5, 2, 3)
    np.testing.assert_array_equal(nn.Residual(lstm)(x, lengths=lengths), x + lstm(x, lengths=lengths))
    with pytest.raises(ValueError, match=r"the result of the layers has shape \(2, 1\), but x has shape \(2, 4\)"):
        nn.Residual(nn.Linear(4, 1))(np.zeros((2, 4)))


# ---- LSTM ------------------------------------------------------------------------------------------------------------


def lstm_and_input(**options: Any) -> tuple[nn.LSTM, Array]:
    return nn.LSTM(5, 4, dtype=np.float64, rng=0, **options), random(7, 3, 5, seed=5)


class Run(nn.Module):
    """An LSTM from given states, with losses of everything that it returns."""

    def __init__(self, lstm: nn.LSTM, x: Array, h: Array, c: Array, lengths: Any = None) -> None:
        self.lstm, self.lengths = lstm, lengths
        self.x, self.h, self.c = nn.Parameter(x), nn.Parameter(h), nn.Parameter(c)

    def forward(self, dy: Any, dh: Any, dc: Any) -> Any:
        x, h, c = (graph.identity(v) for v in (self.x, self.h, self.c))
        y, state = self.lstm.run(x, (h, c), lengths=self.lengths)
        return graph.sum(y * dy) + graph.sum(state.h * dh) + graph.sum(state.c * dc), y, state


def test_lstm_hands_over_every_option() -> None:
    options: dict[str, Any] = {
        "bidirectional": True,
        "activations": rg.LstmActivations(g="softsign", h="relu"),
        "output_gate_reads": "old",
    }
    lstm, x = lstm_and_input(layers=2, peephole="diagonal", batch_first=True, dropout=0.3, **options)
    x = np.ascontiguousarray(x.transpose(1, 0, 2))
    h0, c0 = random(4, 3, 4, seed=1), random(4, 3, 4, seed=2)
    lengths = np.array([7, 2, 5])
    seed = int(lstm.stream.saved.sum())
    dy, dhn, dcn = random(3, 7, 8, seed=3), random(4, 3, 4, seed=4), random(4, 3, 4, seed=5)
    both = Run(lstm, x, h0, c0, lengths)
    (_, y, state), gradients = nn.compile(both, None, nn.SGD(both, 0.0)).gradients(dy, dhn, dcn)
    names = [name for name, _ in lstm.modules() if name]
    weights = [
        rg.LstmWeights(*(None if p is None else p.value for p in getattr(lstm, name).weights())) for name in names
    ]
    expected = rg.lstm_forward(x, weights, h0, c0, lengths=lengths, dropout=0.3, seed=seed, batch_first=True, **options)
    assert_same_bits([y, *state], [expected.y, expected.hn, expected.cn])
    assert isinstance(state, nn.LstmState)
    assert expected.cache is not None
    wanted = rg.lstm_backward(dy, expected.cache, dhn=dhn, dcn=dcn)
    assert_same_bits([gradients[name] for name in ("x", "h", "c")], [wanted.dx, wanted.dh0, wanted.dc0])
    for cell, dcell in zip(names, wanted.dweights, strict=True):
        for name in ("wx", "wh", "b", "peephole"):
            assert_same_bits([gradients[f"lstm.{cell}.{name}"]], [getattr(dcell, name)])
    assert lstm.stream.saved[1] == 0
    at_once = lstm(x, (h0, c0), lengths=[7, 2, 5])
    assert_same_bits([at_once], [expected.y])
    assert lstm.stream.saved[1] == 1


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
    for number in range(2):
        x = np.random.default_rng(number).integers(0, 7, shape)
        y, expected = passes(apart, x, np.float64(1.0))
        found, gradients = passes(both, x, np.float64(1.0))
        np.testing.assert_array_equal(found, y)
        for name, gradient in expected.items():
            np.testing.assert_allclose(gradients[name.removeprefix("lstm.")], gradient, rtol=1e-12, atol=1e-14)
        assert gradients["embedding.table"].any()
        assert not gradients["embedding.table"][2].any()
    with pytest.raises(ValueError, match=r"LSTM: x has shape \(2, 3, 4\), must have the axes \([NT], [NT]\)"):
        both(np.zeros((2, 3, 4), int))
    with pytest.raises(ValueError, match="LSTM: inputs is 5, but the embedding has 4 features"):
        nn.LSTM(5, 3, embedding=embedding)


def test_lstm_drops_anew_each_time() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.5)
    first, second = lstm(x), lstm(x)
    assert not np.array_equal(first, second)
    lstm.stream[1] = 0
    assert np.array_equal(lstm(x), first)


def test_lstm_in_evaluation_drops_nothing_and_still_has_gradients() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.5)
    lstm.eval()
    y, gradients = passes(lstm, x, np.float64(1.0))
    assert lstm.stream.saved[1] == 0
    dense, _ = lstm_and_input(layers=2)
    dense.load_state_dict({name: a for name, a in lstm.state_dict().items() if name != "stream"})
    expected, others = passes(dense, x, np.float64(1.0))
    assert_same_bits([y, *gradients.values()], [expected, *others.values()])


def test_lstm_goes_on_where_it_ended() -> None:
    """Time split in two is time run whole, forward and backward."""
    lstm, x = lstm_and_input(layers=2)
    h0, c0 = random(2, 3, 4, seed=7), random(2, 3, 4, seed=8)
    dy, zero = random(7, 3, 4, seed=6), np.zeros((2, 3, 4))

    def run(x: Array, h: Array, c: Array, *given: Array) -> Any:
        both = Run(lstm, x, h, c)
        return nn.compile(both, None, nn.SGD(both, 0.0)).gradients(*given)

    (_, y, state), whole = run(x, h0, c0, dy, zero, zero)
    (_, first, middle), _ = run(x[:3], h0, c0, dy[:3], zero, zero)
    (_, second, final), later = run(x[3:], *middle, dy[3:], zero, zero)
    np.testing.assert_allclose(np.concatenate([first, second]), y, rtol=1e-12)
    np.testing.assert_allclose(final, state, rtol=1e-12)
    _, earlier = run(x[:3], h0, c0, dy[:3], later["h"], later["c"])
    np.testing.assert_allclose(np.concatenate([earlier["x"], later["x"]]), whole["x"], rtol=1e-11, atol=1e-14)
    for name in ("h", "c"):
        np.testing.assert_allclose(earlier[name], whole[name], rtol=1e-11, atol=1e-14)
    for name in lstm.parameters():
        found = earlier[f"lstm.{name}"] + later[f"lstm.{name}"]
        np.testing.assert_allclose(found, whole[f"lstm.{name}"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"batch_first": True}], ids=str)
def test_lstm_one_step_at_a_time(options: dict[str, Any]) -> None:
    lstm, x = lstm_and_input(**options)
    whole = lstm(x)
    axis = 1 if "batch_first" in options else 0
    outputs, state = [], None
    for part in np.split(x, x.shape[axis], axis):
        y, state = lstm.run(part, state)
        outputs.append(y)
    np.testing.assert_allclose(np.concatenate(outputs, axis), whole, rtol=1e-12)


def test_the_last_output_of_each_sequence() -> None:
    x, lengths = random(7, 3, 5, seed=5), np.array([7, 2, 5])
    for bidirectional in (False, True):
        options: dict[str, Any] = {"layers": 2, "bidirectional": bidirectional, "dtype": np.float64, "rng": 0}
        y = nn.LSTM(5, 4, **options)(x, lengths=lengths)
        last = nn.LSTM(5, 4, last=True, **options)(x, lengths=lengths)
        ends = y[lengths - 1, np.arange(3), :4]
        np.testing.assert_array_equal(last[:, :4], ends)
        if bidirectional:
            np.testing.assert_array_equal(last[:, 4:], y[0, :, 4:])
        assert last.shape == (3, 8 if bidirectional else 4)


def test_recomputing_gives_the_same_gradients() -> None:
    lstm, x = lstm_and_input(layers=2, dropout=0.3)
    again, _ = lstm_and_input(layers=2, dropout=0.3, recompute=True)
    found, expected = (passes(m, x, np.float64(1.0)) for m in (again, lstm))
    assert_same_bits([found[0], *found[1].values()], [expected[0], *expected[1].values()])


# ---- what is refused -------------------------------------------------------------------------------------------------


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
        (lambda: nn.MultiHeadAttention(6, 4), ValueError, "6 features cannot be cut into 4 heads"),
        (lambda: nn.Linear(3, 2, dtype=np.float16), TypeError, "Linear: dtype is float16"),
        (lambda: nn.LayerNorm(4)(np.zeros((2, 3))), ValueError, r"\(2, 3\), .* must be \(4,\)"),
        (lambda: nn.LSTM(4, 2)(np.zeros((2, 3))), ValueError, r"\(2, 3\), must have the axes \(T, N\) and inputs = 4"),
        (lambda: nn.LSTM(4, 2)(np.zeros((2, 3, 5))), ValueError, r"\(2, 3, 5\), .* inputs = 4"),
        (lambda: nn.LSTM(4, 2)(np.zeros((2, 3, 4)), lengths=[1, 2]), ValueError, r"lengths"),
        (
            lambda: nn.BatchNorm(4)(np.zeros((2, 3))),
            ValueError,
            r"BatchNorm: x has shape \(2, 3\), with 3 channels on axis 1, must have 4",
        ),
        (lambda: nn.SoftmaxCrossEntropy()(np.zeros((1, 3)), [3]), IndexError, "index is 3, must be from 0 to below 3"),
        (lambda: nn.Linear(4, 2)(np.zeros((2, 3))), ValueError, r"linear: .*3.*4|linear: .*4.*3"),
        (lambda: nn.Linear(4, 2)(np.zeros((2, 4), int)), TypeError, r"linear: x has dtype int64"),
    ],
)
def test_layers_refuse(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# ---- first values ----------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_parameters() -> None:
    first, second, third = model().state_dict(), model().state_dict(), model(seed=1).state_dict()
    double = model(np.float64).state_dict()
    for name, array in first.items():
        assert np.array_equal(array, second[name])
        if not name.startswith("norm"):
            assert not np.array_equal(array, third[name])
        assert np.array_equal(array, double[name].astype(array.dtype))
    assert not np.array_equal(nn.Linear(4, 4).w.value, nn.Linear(4, 4).w.value)  # without a seed: fresh entropy
    assert np.array_equal(nn.Linear(4, 4, rng=7).w.value, nn.Linear(4, 4, rng=np.random.default_rng(7)).w.value)


def assert_uniform(parameter: nn.Parameter, bound: float) -> None:
    array = parameter.value
    assert np.abs(array).max() <= bound
    assert abs(array.mean()) < 0.05 * bound
    assert abs(array.std() / (bound / math.sqrt(3)) - 1) < 0.05


def test_linear_and_embedding_begin_as_in_the_field() -> None:
    linear = nn.Linear(400, 100, rng=0)
    assert_uniform(linear.w, 1 / 20)
    assert 0 < np.abs(linear.b.value).max() <= 1 / 20
    keras = nn.Linear(400, 100, init="keras", rng=0)
    assert_uniform(keras.w, math.sqrt(6 / 500))
    assert not keras.b.value.any()
    he = nn.Linear(400, 100, init="he", rng=0)
    assert abs(he.w.value.std() / math.sqrt(2 / 400) - 1) < 0.05
    assert not he.b.value.any()
    assert abs(nn.Embedding(400, 100, rng=0).table.value.std() - 1) < 0.05
    assert_uniform(nn.Embedding(400, 100, init="keras", rng=0).table, 0.05)


def test_lstm_begins_as_in_the_field() -> None:
    lstm: Any = nn.LSTM(30, 64, layers=2, bidirectional=True, peephole="full", rng=0)
    for cell in (lstm.layer0, lstm.layer0_reverse, lstm.layer1, lstm.layer1_reverse):
        for parameter in (cell.wx, cell.wh, cell.peephole):
            assert_uniform(parameter, 1 / 8)
        forget = cell.b.value[64:128]
        assert np.abs(forget - 1).max() <= 1 / 8 + 1e-6
        assert np.abs(np.delete(cell.b.value, np.s_[64:128])).max() <= 1 / 8
    assert lstm.layer1.wx.shape == (256, 128)
    keras: Any = nn.LSTM(30, 64, init="keras", peephole="diagonal", rng=0, dtype=np.float64)
    assert_uniform(keras.layer0.wx, math.sqrt(6 / (30 + 256)))
    np.testing.assert_allclose(keras.layer0.wh.value.T @ keras.layer0.wh.value, np.eye(64), atol=1e-12)
    assert np.array_equal(keras.layer0.b.value, np.repeat([0.0, 1.0, 0.0, 0.0], 64))
    assert not keras.layer0.peephole.value.any()
    plain: Any = nn.LSTM(3, 2, forget_bias=0.0, init="keras", rng=0)
    assert not plain.layer0.b.value.any()
    assert "layer0.b" not in nn.LSTM(3, 2, bias=False).parameters()
