"""LSTM: an input of indices into a table."""

from __future__ import annotations

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmWeights
from retrograd.lab import cases
from retrograd.lab.cases import LstmCase, LstmData
from support.arrays import MEMORY, Array, assert_same_bits, placed
from support.lstm import THREADS, backward, flat, forward, random

TABLE_CASES = {
    "plain": LstmCase(9, 13, 5, 35, states=True),
    "two_layers": LstmCase(6, 7, 5, 18, layers=2, directions=2, dropout=0.3),
    "ragged": LstmCase(6, 7, 5, 35, lengths=(6, 2, 0, 5, 6, 1, 4), directions=2),
    "batch_sizes": LstmCase(6, 7, 5, 35, batch_sizes=(3, 7, 0, 6, 1, 7), batch_first=True),
    "peepholes": LstmCase(6, 7, 5, 20, peephole="full", batch_first=True),
    "float64": LstmCase(6, 7, 40, 9, dtype="float64", weights="gates"),
}


def looked_up(case: LstmCase) -> tuple[LstmData, Array, Array]:
    """Data whose x are rows of a table, the table, and their numbers."""
    data = cases.make_lstm_data(case)
    table = random(11, case.inputs, dtype=data.x.dtype, seed=1)
    numbers = np.random.default_rng(2).integers(0, 11, data.x.shape[:2])
    return data._replace(x=table[numbers]), table, numbers


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", TABLE_CASES)
def test_a_table_is_an_embedding_before_it(name: str) -> None:
    """Outputs to the bit; the gradients of weights and table are other sums of the same terms."""
    case = TABLE_CASES[name]
    data, table, numbers = looked_up(case)
    plain = forward(case, data)
    expected = backward(data, plain.cache)
    assert expected.dx is not None
    expected = expected._replace(dx=rg.embedding_backward(expected.dx, numbers, len(table)))
    found = {}
    for threads in THREADS:
        options = {"table": table, "num_threads": threads}
        result = forward(case, data._replace(x=numbers), **options)
        assert_same_bits(result[:3], plain[:3])
        found[threads] = flat(backward(data, result.cache, num_threads=threads))
        again = forward(case, data._replace(x=numbers), recompute=True, **options)
        assert_same_bits(found[threads], found[1])
        assert_same_bits(flat(backward(data, again.cache)), found[1])
    close = 1e-12 if case.dtype == "float64" else 2e-5
    for got, want in zip(found[1], flat(expected), strict=True):
        if got is None or want is None:
            assert got is want
        else:
            np.testing.assert_allclose(got, want, rtol=close, atol=close * np.abs(want).max())


def test_a_table_and_buffers() -> None:
    case = TABLE_CASES["plain"]
    data, table, numbers = looked_up(case)
    cache = forward(case, data._replace(x=numbers.astype(np.uint8)), table=table).cache
    fresh = backward(data, cache)
    assert fresh.dx is not None
    start = random(*table.shape, seed=5)
    for memory in MEMORY:
        dx = placed(start, memory, (1, 0))
        backward(data, cache, need=["dx"], out={"dx": dx}, accumulate=True)
        np.testing.assert_allclose(dx, start + fresh.dx, rtol=1e-6, atol=1e-6)
    wide = np.zeros((2 * len(table), 2 * case.inputs), np.float32)
    wide[::2, ::2] = table
    assert_same_bits(forward(case, data._replace(x=numbers), table=wide[::2, ::2])[:3], forward(case, data)[:3])


def test_numbers_past_the_end_are_not_looked_at() -> None:
    case = TABLE_CASES["ragged"]
    data, table, numbers = looked_up(case)
    past = np.arange(case.steps)[:, None] >= np.array(case.lengths)
    result = forward(case, data._replace(x=np.where(past, -1, numbers)), table=table)
    assert_same_bits(result[:3], forward(case, data)[:3])
    whole = forward(case, data._replace(x=numbers), table=table)
    assert_same_bits(flat(backward(data, result.cache)), flat(backward(data, whole.cache)))
    with pytest.raises(ValueError, match=r"lstm_forward: x\[0, 1\] is 11, but the rows of table are 11"):
        forward(case, data._replace(x=np.where(numbers == numbers[0, 1], 11, numbers)), table=table)


@pytest.mark.parametrize(
    ("x", "table", "error", "message"),
    [
        (np.zeros((2, 3), int), np.zeros(4, np.float32), ValueError, r"table has shape \(4,\), must have 2 axes"),
        (
            np.zeros((2, 3, 1), int),
            np.zeros((5, 4), np.float32),
            ValueError,
            r"x has shape \(2, 3, 1\), must have the 2",
        ),
        (np.zeros((2, 3)), np.zeros((5, 4), np.float32), TypeError, "x has dtype float64; it must be of integers"),
        (np.full((2, 3), 5), np.zeros((5, 4), np.float32), ValueError, r"x\[0, 0\] is 5, but the rows of table are 5"),
        (
            np.full((2, 3), -1),
            np.zeros((5, 4), np.float32),
            ValueError,
            r"x\[0, 0\] is -1, but the rows of table are 5",
        ),
        (np.zeros((2, 3), int), np.zeros((5, 7), np.float32), ValueError, r"wx has shape \(12, 4\), must be \(12, 7\)"),
    ],
)
def test_tables_that_are_refused(x: Array, table: Array, error: type[Exception], message: str) -> None:
    cell = LstmWeights(np.zeros((12, 4), np.float32), np.zeros((12, 3), np.float32))
    for function in (rg.lstm_forward, rg.lstm_cache):
        with pytest.raises(error, match=message):
            function(x, cell, table=table)
