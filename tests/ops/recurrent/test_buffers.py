"""LSTM: which gradients are computed, the caller's buffers, accumulation, and memory beside the arrays."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmGradients, LstmWeights, _core
from retrograd.lab import cases
from retrograd.lab.cases import LstmCase
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, fenced, placed
from support.lstm import CACHED, NEEDS, backward, flat, forward, moved

# ---- need, out, accumulate -------------------------------------------------------------------------------------------

FULL = LstmCase(4, 3, 5, 9, layers=2, peephole="diagonal", states=True)


@pytest.mark.parametrize(
    "case", [FULL, replace(FULL, directions=2, lengths=(4, 0, 2), weights="gates")], ids=["whole", "ragged"]
)
def test_need_computes_what_is_asked_for(case: LstmCase) -> None:
    data = cases.make_lstm_data(case)
    cache = forward(case, data).cache
    everything = backward(data, cache)
    for count in range(len(NEEDS) + 1):
        for need in itertools.combinations(NEEDS, count):
            got = backward(data, cache, need=need)
            for name in ("dx", "dh0", "dc0"):
                assert_same_bits([getattr(got, name)], [getattr(everything, name) if name in need else None])
            if not set(need) & {"dwx", "dwh", "db", "dpeephole"}:
                assert got.dweights is None
                continue
            for mine, whole in zip(got.dweights, everything.dweights, strict=True):
                for field in LstmWeights._fields:
                    part = getattr(mine, field)
                    if f"d{field}" in need:
                        assert_same_bits(flat(part), flat(getattr(whole, field)))
                    else:
                        assert part is None
    assert_same_bits(flat(backward(data, cache, need="dx").dx), flat(everything.dx))


def test_states_gradients_come_with_states() -> None:
    case = LstmCase(4, 3, 5, 9)
    data = cases.make_lstm_data(case)
    result = forward(case, data)
    assert backward(data, result.cache)[2:] == (None, None)
    asked = backward(data, result.cache, need=["dh0", "dc0"])
    assert asked.dh0 is not None
    assert asked.dc0 is not None
    zeros = np.zeros((1, 3, 9), np.float32)
    given = data._replace(h0=zeros, c0=zeros)
    assert_same_bits(flat(backward(given, forward(case, given).cache)[2:]), [asked.dh0, asked.dc0])
    only = backward(data, result.cache, out={"dh0": np.empty_like(zeros)})
    assert_same_bits([only.dh0], [asked.dh0])
    assert only.dc0 is None


@pytest.mark.parametrize("missing", ["dy", "dhn", "dcn", "all"])
def test_missing_gradients_are_zero(missing: str) -> None:
    case = replace(FULL, directions=2)
    data = cases.make_lstm_data(case)
    cache = forward(case, data).cache
    assert cache is not None
    given = {"dy": data.dy, "dhn": data.dhn, "dcn": data.dcn}
    names = list(given) if missing == "all" else [missing]
    zero = {name: np.zeros_like(a) if name in names else a for name, a in given.items()}
    none = {name: None if name in names else a for name, a in given.items()}
    expected, got = (rg.lstm_backward(v["dy"], cache, dhn=v["dhn"], dcn=v["dcn"]) for v in (zero, none))
    for a, b in zip(flat(got), flat(expected), strict=True):
        np.testing.assert_array_equal(a, b)  # -0 and 0 are equal here


@pytest.mark.parametrize("form", ["concatenated", "stacked", "gates"])
@pytest.mark.parametrize("memory", MEMORY)
def test_out_and_accumulate(memory: str, form: Any) -> None:
    case = replace(FULL, weights=form, peephole="full")
    data = cases.make_lstm_data(case)
    cache = forward(case, data).cache
    expected = backward(data, cache)
    out = moved(expected, itertools.repeat(memory), blank=True)
    got = backward(data, cache, out=out)
    assert_same_bits(flat(got), flat(expected))
    assert got.dx is out.dx
    assert got.dh0 is out.dh0
    assert all(a is b for a, b in zip(flat(got.dweights), flat(out.dweights), strict=True))
    added = backward(data, cache, out=out._asdict(), accumulate=True)
    for a, b in zip(flat(added), flat(expected), strict=True):
        assert a is not None
        assert b is not None
        # The sum may be rounded once more, or not at all.
        np.testing.assert_allclose(a, 2 * b, rtol=4e-7, atol=4e-7)
        assert_untouched_around(a)


def test_accumulate_into_a_sum_of_three() -> None:
    case = replace(FULL, lengths=(4, 0, 2))
    data = cases.make_lstm_data(case)
    cache = forward(case, data).cache
    gradients = [backward(data._replace(dy=factor * data.dy), cache, dhn=None, dcn=None) for factor in (1, -3, 2)]
    out = moved(gradients[0], itertools.repeat("contiguous"))
    for factor in (-3, 2):
        backward(data._replace(dy=factor * data.dy), cache, dhn=None, dcn=None, out=out, accumulate=True)
    for got, *three in zip(flat(out), *(flat(g) for g in gradients), strict=True):
        assert got is not None
        np.testing.assert_allclose(got, sum(three), rtol=0, atol=2e-6 * max(1.0, float(np.max(np.abs(three)))))


def test_inputs_are_never_modified() -> None:
    for case in (FULL, CACHED, replace(FULL, weights="gates", batch_first=True)):
        data = cases.make_lstm_data(case)
        before = [None if a is None else a.copy() for a in flat(data)]
        for array in flat(data):
            if array is not None:
                array.flags.writeable = False
        result = forward(case, data)
        kept = result.cache.buffer.copy()  # type: ignore[union-attr]
        backward(data, result.cache)
        assert_same_bits([*flat(data), result.cache.buffer], [*before, kept])  # type: ignore[union-attr]


def test_final_states_in_the_place_of_the_initial_ones() -> None:
    data = cases.make_lstm_data(FULL)
    expected = forward(FULL, data)
    for memory in MEMORY:
        h, c = (placed(a, memory, (2, 1, 0)) for a in (data.h0, data.c0) if a is not None)
        result = forward(FULL, data._replace(h0=h, c0=c), out={"hn": h, "cn": c})
        assert result.hn is h
        assert result.cn is c
        assert_same_bits([result.y, h, c], expected[:3])
        assert_same_bits(flat(backward(data, result.cache)), flat(backward(data, expected.cache)))
    for memory in MEMORY:
        room = placed(np.zeros((3, 3, 9), np.float32), memory, (2, 1, 0))
        h, after = room[:-1], room[1:]
        h[...] = data.h0
        for out in ({"hn": after}, {"cn": h}, {"hn": h[::-1]}, {"hn": h, "cn": h}):
            kept = room.copy()
            with pytest.raises(ValueError, match=r"^lstm_forward: out.[hc]n .* overlaps (h0|out.cn)"):
                forward(FULL, data._replace(h0=h), out=out)
            assert_same_bits([room], [kept])
    h = data.h0.copy()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is in the place of h0, which backward needs with recompute=True"):
        forward(FULL, data._replace(h0=h), out={"hn": h}, recompute=True)
    assert_same_bits([h], [data.h0])


def test_lengths_are_remembered_as_they_were() -> None:
    data = cases.make_lstm_data(replace(CACHED, lengths=None))
    for name, values in (("lengths", [6, 2, 0, 5, 6, 1, 4]), ("batch_sizes", [3, 7, 0, 6, 1, 7])):
        counts = np.array(values)
        caches = [
            forward(CACHED, data, **{"lengths": None, name: counts, "recompute": again}).cache
            for again in (False, True)
        ]
        expected = flat(backward(data, caches[0]))
        counts[:] = 0
        for cache in caches:
            assert_same_bits(flat(backward(data, cache)), expected)


# ---- in bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 1, 1), (2, 3, 10, 16), (4, 5, 16, 17), (3, 20, 33, 15), (2, 15, 7, 48)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_beside_the_arrays_is_not_even_read(shape: tuple[int, ...], dtype: str, at_end: bool) -> None:
    """Every array stands against a page without access: a kernel that reads a lane too far ends the test run."""
    steps, samples, inputs, units = shape
    rng = np.random.default_rng(0)

    def fenced_normal(*extents: int) -> Array:
        return fenced(rng.normal(0, 0.3, extents).astype(dtype), at_end)

    def like(array: Array | None) -> Array | None:
        return None if array is None else fenced(np.zeros_like(array), at_end)

    lengths = rng.integers(0, steps + 1, samples)
    size = rg.lstm_cache_size(steps, samples, inputs, units, num_layers=2, bidirectional=True, dtype=dtype)
    for isa in _core.isa_levels():
        _core.select_isa(isa)
        for peephole in ((), (4 * units,), (4 * units, units)):
            weights = [
                LstmWeights(
                    fenced_normal(4 * units, width),
                    fenced_normal(4 * units, units),
                    fenced_normal(4 * units),
                    fenced_normal(*peephole) if peephole else None,
                )
                for width in (inputs, inputs, 2 * units, 2 * units)
            ]
            x, dy = fenced_normal(steps, samples, inputs), fenced_normal(steps, samples, 2 * units)
            h0, c0, dhn, dcn = (fenced_normal(4, samples, units) for _ in range(4))
            cache = fenced(np.zeros(size, np.uint8), at_end)
            for chosen, threads in ((None, 1), (lengths, 2)):
                result = rg.lstm_forward(
                    x,
                    weights,
                    h0,
                    c0,
                    bidirectional=True,
                    lengths=chosen,
                    dropout=0.2,
                    cache=cache,
                    out={"y": like(dy), "hn": like(h0), "cn": like(c0)},
                    num_threads=threads,
                )
                assert result.cache is not None
                out = LstmGradients(like(x), [LstmWeights(*map(like, cell)) for cell in weights], like(h0), like(c0))
                gradients = rg.lstm_backward(dy, result.cache, dhn=dhn, dcn=dcn, out=out, num_threads=threads)
                assert np.isfinite(gradients.dx).all()
                inference = rg.lstm_forward(
                    x, weights, h0, c0, bidirectional=True, lengths=chosen, training=False, num_threads=threads
                )
                assert np.isfinite(inference.y).all()
