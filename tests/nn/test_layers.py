"""retrograd.nn: layers, and their first values."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import nn
from support.arrays import Array
from support.nn import model, random

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
