"""LSTM: large numbers, NaN, infinity, and empty problems."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmWeights
from retrograd.lab import cases
from retrograd.lab.cases import LstmCase
from retrograd.lab.verify import lstm_errors, lstm_oracle, run_lstm
from support.arrays import assert_same_bits
from support.lstm import BASE, NEEDS, VARIANTS, backward, flat, forward, moved


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("peephole", ["none", "diagonal", "full"])
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_pre_activations(scale: float, peephole: Any, dtype: str, isa: str) -> None:
    """Saturated gates: finite, and as near to the oracle as elsewhere."""
    case = LstmCase(7, 4, 6, 13, peephole=peephole, dtype=dtype, states=True)
    data = cases.make_lstm_data(case)
    data = data._replace(x=data.x * data.x.dtype.type(scale))
    got = run_lstm(case, data, 2)
    assert all(np.isfinite(array).all() for array in got.arrays())
    assert max(lstm_errors(got, lstm_oracle(case, data))) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pre_activations_beyond_the_range(dtype: Any, isa: str) -> None:
    """Infinite pre-activations of all signs: the functions' limits, and gradients of 0."""
    huge = np.finfo(dtype).max / 2
    units = 9
    sign = np.where(np.arange(4 * units) % 3 == 0, -1, 1)[:, None]
    weights = LstmWeights((huge * sign * np.ones((1, 2))).astype(dtype), np.zeros((4 * units, units), dtype))
    x = np.full((3, 2, 2), 10, dtype)
    result = rg.lstm_forward(x, weights)
    assert result.cache is not None
    assert np.isfinite(result.y).all()
    values = result.cache.gates()
    for k, gate in enumerate(values[:4]):
        low = -1 if k == 2 else 0
        np.testing.assert_array_equal(gate[0, 0], np.where(sign[k * units : (k + 1) * units, 0] > 0, 1, low))
    gradients = rg.lstm_backward(np.ones_like(result.y), result.cache)
    assert all(np.isfinite(a).all() for a in flat(gradients) if a is not None)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["plain", "stacked", "diagonal", "full", "lengths"])
def test_nan_and_inf_stay_in_their_sample(name: str, poison: float) -> None:
    case = VARIANTS[name]
    data = cases.make_lstm_data(case)
    clean = run_lstm(case, data, 1)
    x = data.x.copy()
    x[0, 3, 1] = poison
    got = run_lstm(case, data._replace(x=x), 2)
    others = [0, 1, 2, 4, 5, 6]
    for field in ("y", "hn", "cn", "dx", "dh0", "dc0"):
        assert_same_bits([getattr(got, field)[:, others]], [getattr(clean, field)[:, others]])
    if math.isnan(poison):
        assert np.isnan(got.hn[0, 3]).all()
        assert all(np.isnan(part).any() for part in got.cells[0] if part is not None)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["lengths", "batch_sizes"])
def test_what_takes_no_part_is_not_looked_at(name: str, poison: float, isa: str) -> None:
    for case in (VARIANTS[name], replace(VARIANTS[name], peephole="full", dropout=0.5)):
        data = cases.make_lstm_data(case)
        expected = run_lstm(case, data, 1)
        active = case.active
        assert active is not None
        x, dy = data.x.copy(), data.dy.copy()
        x[~active] = dy[~active] = poison
        got = run_lstm(case, data._replace(x=x, dy=dy), 3)
        assert_same_bits(got.arrays(), expected.arrays())
        assert not got.y[~active].any()
        assert not got.dx[~active].any()


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (4, 0, 5), (0, 0, 0), (4, 3, 0)])
def test_nothing_there(sizes: tuple[int, int, int], layers: int, directions: int, isa: str) -> None:
    for peephole in ("none", "full"):
        for states in (False, True):
            case = LstmCase(*sizes, 6, layers, directions, peephole=peephole, states=states)  # type: ignore[arg-type]
            data = cases.make_lstm_data(case)
            out = {"y": np.full((*sizes[:2], 6 * directions), math.nan, np.float32)}
            result = forward(case, data, out=out)
            need = [n for n in NEEDS if n != "dpeephole" or peephole == "full"]
            buffers = moved(backward(data, result.cache, need=need), itertools.repeat("contiguous"), blank=True)
            got = backward(data, result.cache, need=need, out=buffers)
            if sizes[0] and sizes[1]:
                assert max(lstm_errors(run_lstm(case, data, 1), lstm_oracle(case, data))) <= 1
                continue
            assert result.y.shape == (*sizes[:2], 6 * directions)
            zero = np.zeros((case.cells, case.samples, 6), np.float32)
            assert_same_bits([result.hn, result.cn], [a if states else zero for a in (data.h0, data.c0)])
            assert_same_bits([got.dh0, got.dc0], [data.dhn, data.dcn])
            assert got.dx is not None
            assert got.dx.shape == data.x.shape
            assert not any(a.any() for a in flat(got.dweights) if a is not None)
            backward(data, result.cache, need=need, out=buffers, accumulate=True)
            assert_same_bits([got.dh0, got.dc0], [2 * data.dhn, 2 * data.dcn])


def test_all_lengths_zero() -> None:
    case = replace(BASE, layers=2, states=True, lengths=(0,) * 7)
    data = cases.make_lstm_data(case)
    got = run_lstm(case, data, 2)
    assert not got.y.any()
    assert not got.dx.any()
    assert_same_bits([got.hn, got.cn, got.dh0, got.dc0], [data.h0, data.c0, data.dhn, data.dcn])
    assert not any(a.any() for cell in got.cells for a in cell if a is not None)
