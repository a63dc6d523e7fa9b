"""LSTM: the cache that forward leaves for backward."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmActivations, LstmWeights
from retrograd.lab import cases, reference
from retrograd.lab.cases import LstmCase
from retrograd.lab.verify import lstm_options, lstm_weights
from support.arrays import assert_same_bits
from support.lstm import CACHED, VARIANTS, backward, flat, forward, moved, variants

# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_size(case: LstmCase) -> int:
    return rg.lstm_cache_size(
        case.steps,
        case.samples,
        case.inputs,
        case.units,
        num_layers=case.layers,
        bidirectional=case.directions == 2,
        dtype=case.dtype,
        lengths=case.lengths,
        batch_sizes=case.batch_sizes,
    )


@variants
def test_cache_size_is_what_forward_takes(name: str) -> None:
    case = VARIANTS[name]
    data = cases.make_lstm_data(case)
    size = cache_size(case)
    cache = forward(case, data).cache
    assert cache is not None
    assert cache.buffer is not None
    assert cache.buffer.nbytes == size
    assert repr(cache).startswith(f"LstmCache(<lstm of {case.dtype}: T={case.steps} N={case.samples} I={case.inputs} ")
    assert repr(cache).endswith(f", {size} bytes)")
    if case.lengths or case.batch_sizes:
        assert size < cache_size(replace(case, lengths=None, batch_sizes=None))
    forward(case, data, cache=bytearray(size))
    with pytest.raises(ValueError, match=rf"^lstm_forward: cache has {size - 1} bytes, this problem needs {size} "):
        forward(case, data, cache=bytearray(size - 1))


def test_cache_in_the_callers_memory() -> None:
    """Of any kind and at any address, and moved to any other."""
    data = cases.make_lstm_data(CACHED)
    size = cache_size(CACHED)
    expected = flat(backward(data, forward(CACHED, data).cache))
    room = bytearray(size + 200)
    floats = np.zeros(size // 4 + 1, np.float32)
    for buffer in (
        bytearray(size),
        memoryview(room)[1 : size + 1],
        memoryview(room)[62:],
        np.zeros(size, np.uint8),
        floats,
    ):
        result = forward(CACHED, data, cache=buffer)
        assert result.cache is not None
        kept = bytes(memoryview(buffer).cast("B"))
        assert_same_bits(flat(backward(data, result.cache)), expected)
        assert bytes(memoryview(buffer).cast("B")) == kept
        for shift in (0, 1, 4, 36, 63):
            elsewhere = bytearray(size + 200 + shift)
            elsewhere[shift : shift + len(kept)] = kept
            for moved_cache in (memoryview(elsewhere)[shift:], memoryview(bytes(elsewhere))[shift:]):
                options = lstm_options(CACHED) | {"buffer": moved_cache}
                cache = rg.lstm_cache(data.x, lstm_weights(data), data.h0, data.c0, **options)
                assert_same_bits(flat(backward(data, cache)), expected)
                assert_same_bits(cache.gates(3), result.cache.gates(3))
    assert not any(room[size + 62 :])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_cache_taken_apart(recompute: bool) -> None:
    data = cases.make_lstm_data(CACHED)
    result = forward(CACHED, data, recompute=recompute)
    assert result.cache is not None
    expected = flat(backward(data, result.cache))
    bare, cells = result.cache.without_arrays(), [LstmWeights(*cell) for cell in result.cache.cells]
    arrays = data.x.copy(), cells, data.h0, data.c0
    buffer = None if result.cache.buffer is None else result.cache.buffer.copy()
    assert_same_bits(flat(backward(data, bare.with_arrays(*arrays, buffer))), expected)
    with pytest.raises(ValueError, match=rf"weights has {len(cells) - 1} cells, but forward had {len(cells)}"):
        bare.with_arrays(data.x, cells[1:], data.h0, data.c0, buffer)
    with pytest.raises(ValueError, match=r"x has shape .*, but forward had "):
        bare.with_arrays(data.x[1:], *arrays[1:], buffer)
    with pytest.raises(ValueError, match=r"h0 has shape .*, must be \(cells, N, H\) = "):
        bare.with_arrays(data.x, cells, data.x, data.c0, buffer)
    if buffer is not None:
        for wrong in (buffer[:-1], buffer.view(np.int8)):
            with pytest.raises(ValueError, match=r"^lstm_backward: cache has a buffer of another dtype or size"):
                backward(data, bare.with_arrays(*arrays, wrong))


def test_a_cache_is_checked() -> None:
    data = cases.make_lstm_data(CACHED)
    size = cache_size(CACHED)
    buffer = bytearray(size)
    call = (data.x, lstm_weights(data), data.h0, data.c0)
    options = lstm_options(CACHED)
    with pytest.raises(ValueError, match=r"^lstm_cache: cache holds nothing that a finished forward pass has written"):
        rg.lstm_cache(*call, **options, buffer=buffer)
    result = forward(CACHED, data, cache=buffer)
    for change in (
        {"lengths": (6, 2, 0, 5, 6, 4, 1)},
        {"seed": 12},
        {"activations": LstmActivations(i="hard_sigmoid")},
        {"output_gate_reads": "old"},
        {"dropout": 0.25},
        {"lengths": None, "batch_sizes": [7, 5, 4, 4, 3, 1]},
    ):
        with pytest.raises(ValueError, match=r"^lstm_cache: cache is of another problem"):
            rg.lstm_cache(*call, **options | change, buffer=buffer)
    with pytest.raises(ValueError, match=rf"^lstm_cache: buffer has {size - 1} bytes, this problem needs {size}"):
        rg.lstm_cache(*call, **options, buffer=memoryview(buffer)[1:])

    later = forward(CACHED, data, cache=buffer)
    assert result.cache is not None
    buffers = moved(backward(data, later.cache), itertools.repeat("contiguous"), blank=True)
    for call_it in (lambda: backward(data, result.cache, out=buffers), lambda: result.cache.gates()):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="cache is stale: a later forward pass has used the same buffer"):
            call_it()
    backward(data, later.cache)
    buffer[:] = bytes(size)
    with pytest.raises(ValueError, match=r"^lstm_backward: cache holds nothing"):
        backward(data, later.cache, out=buffers)
    assert all(a is None or np.isnan(a).all() for a in flat(buffers))


def test_refused_caches() -> None:
    data = cases.make_lstm_data(CACHED)
    size = cache_size(CACHED)
    for wrong, error, words in (
        (bytes(size), ValueError, "cache is read-only"),
        (3, TypeError, "cache must be a buffer of bytes"),
        (np.zeros((2, size), np.uint8).T, ValueError, "cache is not contiguous"),
        (bytearray(), ValueError, f"cache has 0 bytes, this problem needs {size}"),
    ):
        with pytest.raises(error, match=f"^lstm_forward: {words}"):
            forward(CACHED, data, cache=wrong)
    for option, why in (({"training": False}, "training=False"), ({"recompute": True}, "recompute=True")):
        with pytest.raises(ValueError, match=f"cache is given, but {why} keeps none"):
            forward(CACHED, data, cache=bytearray(size), **option)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    data = cases.make_lstm_data(CACHED)
    buffer = bytearray(cache_size(CACHED))
    result = forward(CACHED, data, cache=buffer)
    kept = bytes(buffer)
    with pytest.raises(ValueError, match="out\\.y has shape"):
        forward(CACHED, data, cache=buffer, out=np.zeros((6, 7, 71), np.float32))
    with pytest.raises(ValueError, match="lengths has 7"):
        forward(CACHED, data, cache=buffer, lengths=[7] * 7)
    weights = lstm_weights(data)
    with pytest.raises(ValueError, match=r"weights\[1\].wh has shape"):
        rg.lstm_forward(data.x, [weights[0], weights[1]._replace(wh=weights[1].wh[1:]), *weights[2:]], cache=buffer,
                        bidirectional=True, lengths=CACHED.lengths)  # type: ignore[index]  # fmt: skip
    numbers = np.frombuffer(buffer, np.float32)[: 6 * 7 * 5].reshape(6, 7, 5)
    with pytest.raises(ValueError, match=r"cache .* overlaps x"):
        forward(CACHED, data._replace(x=numbers), cache=buffer)
    assert bytes(buffer) == kept
    backward(data, result.cache)


@pytest.mark.parametrize("name", ["plain", "stacked", "activations", "lengths", "batch_sizes", "full"])
def test_gates(name: str, isa: str) -> None:
    case = replace(VARIANTS[name], dtype="float64")
    data = cases.make_lstm_data(case)
    result = forward(case, data)
    cells = [reference.LstmCell(*cell.stacked()) for cell in data.weights]
    oracle = reference.lstm_forward(
        data.x,
        cells,
        data.h0,
        data.c0,
        directions=case.directions,
        active=case.active,
        activations=case.activations,
        output_reads=case.output_gate_reads,
    )
    assert result.cache is not None
    for cell in range(case.cells):
        gates = result.cache.gates(cell)
        for k, field in enumerate("ifgo"):
            np.testing.assert_allclose(getattr(gates, field), oracle.gates[cell][:, :, k], rtol=0, atol=1e-13)
        np.testing.assert_allclose(gates.c, oracle.cells[cell], rtol=0, atol=1e-13)
        if case.active is None:
            last = 0 if cell % case.directions else -1
            assert_same_bits([gates.c[last]], [result.cn[cell]])
    for wrong in (-1, case.cells):
        with pytest.raises(
            ValueError, match=rf"^LstmCache.gates: cell is {wrong}, must be .*{0 if wrong < 0 else wrong}"
        ):
            result.cache.gates(wrong)
    with pytest.raises(TypeError, match=r"^LstmCache.gates: cell must be an int, not float"):
        result.cache.gates(0.5)  # type: ignore[arg-type]


# ---- the cache is a value --------------------------------------------------------------------------------------------


def test_nothing_changes_a_cache() -> None:
    """Weights whose gates lie differently are copied for the engine: for each call anew, not in the cache."""
    rng = np.random.default_rng(0)
    x, wh = rng.normal(size=(5, 3, 4)), rng.normal(size=(12, 3))
    wx = tuple(np.asfortranarray(w) if i % 2 else w for i, w in enumerate(rng.normal(size=(4, 3, 4))))
    cache = rg.lstm_cache(x, LstmWeights(wx, wh))
    # lstm_cache has copied them already.
    cache = cache._replace(inputs=cache.inputs._replace(cells=[(wx, wh, None, None)]))
    before = [id(field) for field in (*cache, *cache.inputs, *cache.inputs.cells)]
    dy = rng.normal(size=(5, 3, 3))
    expected = rg.lstm_backward(dy, cache).dx
    with ThreadPoolExecutor(4) as pool:
        for gradients in pool.map(lambda _: rg.lstm_backward(dy, cache), range(16)):
            assert np.array_equal(gradients.dx, expected)
    assert [id(field) for field in (*cache, *cache.inputs, *cache.inputs.cells)] == before
    for field in cache._fields:
        with pytest.raises(AttributeError):
            setattr(cache, field, None)


def test_what_a_cache_says_of_its_gradients() -> None:
    x, weights, h0 = np.zeros((5, 3, 4)), (np.ones((8, 4)), np.ones((8, 2))), np.zeros((3, 2))
    cache = rg.lstm_cache(x, weights, h0)
    gradients = rg.lstm_backward(np.ones((5, 3, 2)), cache)
    for name in ("dx", "dh0", "dc0"):
        array = getattr(gradients, name)
        assert cache.gradient_shape(name) == (None if array is None else array.shape)
    assert cache.dtype == np.float64
    assert not cache.has_table
    table = rg.lstm_cache(np.zeros((5, 3), int), weights, table=np.zeros((7, 4)))
    assert table.has_table
    assert table.gradient_shape("dx") == (7, 4)
    assert cache.refers_to(x, weights)
    assert not cache.refers_to(x.copy(), weights)
    assert not cache.refers_to(x, (weights[0].copy(), weights[1]))
