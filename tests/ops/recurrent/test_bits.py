"""LSTM: calls that must give the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmWeights
from retrograd.lab import cases
from retrograd.lab.cases import LstmCase, LstmData, LstmParameters
from retrograd.lab.verify import lstm_errors, lstm_options, lstm_oracle, lstm_weights, run_lstm
from retrograd.ops import _threads
from support.arrays import Array, assert_same_bits
from support.lstm import BASE, ISA_LEVELS, OPTIONS, THREADS, VARIANTS, backward, check, flat, forward, variants

# ---- bits ------------------------------------------------------------------------------------------------------------


@variants
def test_without_a_cache_the_same_bits(name: str, isa: str) -> None:
    case = VARIANTS[name]
    data = cases.make_lstm_data(case)
    kept = forward(case, data)
    again = forward(case, data, recompute=True)
    without = forward(case, data, training=False)
    assert without.cache is None
    assert again.cache is not None
    assert again.cache.buffer is None
    assert kept.cache is not None
    assert kept.cache.buffer is not None
    for other in (again, without):
        assert_same_bits(flat(other[:3]), flat(kept[:3]))
    expected = flat(backward(data, kept.cache))
    made = rg.lstm_cache(data.x, lstm_weights(data), data.h0, data.c0, **lstm_options(case))
    for cache in (kept.cache, again.cache, made):
        for _ in range(2):  # and backward may run again
            assert_same_bits(flat(backward(data, cache)), expected)
    for cell in range(case.cells):
        assert_same_bits(made.gates(cell), kept.cache.gates(cell))


@variants
def test_full_lengths_are_no_lengths(name: str) -> None:
    case = replace(VARIANTS[name], lengths=None, batch_sizes=None)
    data = cases.make_lstm_data(case)
    expected = run_lstm(case, data, 1).arrays()
    for full in (
        replace(case, lengths=(case.steps,) * case.samples),
        replace(case, batch_sizes=(case.samples,) * case.steps),
    ):
        assert_same_bits(run_lstm(full, data, 1).arrays(), expected)


@pytest.mark.parametrize("given", ["h0", "c0", "both"])
@variants
def test_no_state_is_a_state_of_zeros(name: str, given: str, isa: str) -> None:
    """What has no initial state skips products with it, and what is not asked for products that lead there."""
    case = replace(VARIANTS[name], states=False)
    data = cases.make_lstm_data(case)
    zeros = np.zeros((case.cells, case.samples, case.units), case.dtype)
    states = {state: zeros for state in ("h0", "c0") if given in (state, "both")}
    for options in ({}, {"training": False}):
        expected = flat(forward(case, data, **options)[:3])
        assert_same_bits(flat(forward(case, data._replace(**states), **options)[:3]), expected)
    none, zero = forward(case, data), forward(case, data._replace(**states))
    weights = ["dx", "dwx", "dwh", "db"] + ["dpeephole"] * (case.peephole != "none")
    asked = backward(data, zero.cache, need=[*weights, "dh0", "dc0"])
    for more in (["dh0", "dc0"], ["dh0"], ["dc0"], []):
        got = backward(data, none.cache, need=weights + more)
        assert_same_bits(flat(got[:2]), flat(asked[:2]))
        assert_same_bits(flat(got[2:]), [getattr(asked, name) if name in more else None for name in ("dh0", "dc0")])


@pytest.mark.parametrize("part", ["wh", "peephole"])
def test_the_first_step_of_a_sample_has_no_state(part: str, isa: str) -> None:
    """In either direction, and also of one that begins later than others, or stops and goes on."""
    for shape in ({}, OPTIONS["lengths"], OPTIONS["batch_sizes"]):
        case = replace(BASE, directions=2, peephole="full", output_gate_reads="old", **shape)
        data = cases.make_lstm_data(case)
        expected = forward(case, data).y
        broken = tuple(cell._replace(**{part: np.full_like(getattr(cell, part), math.nan)}) for cell in data.weights)
        y = forward(case, data._replace(weights=broken)).y
        active = np.ones((case.steps, case.samples), bool) if case.active is None else case.active
        for direction, order in enumerate((slice(None), slice(None, None, -1))):
            units = slice(direction * case.units, (direction + 1) * case.units)
            begun = np.cumsum(active[order], axis=0)[order]
            first, later = active & (begun == 1), active & (begun > 1)
            assert_same_bits([y[first][:, units]], [expected[first][:, units]])
            assert np.isnan(y[later][:, units]).all()


def of_sample(data: LstmData, order: Sequence[int]) -> LstmData:
    """Only some samples, in another order."""
    pick = list(order)
    return data._replace(**{name: getattr(data, name)[:, pick] for name in ("x", "h0", "c0", "dy", "dhn", "dcn")})


@variants
def test_a_sample_is_the_same_in_any_company(name: str, isa: str) -> None:
    """Alone, with others, and wherever it stands: y, hn, cn, dx, dh0 and dc0."""
    case = replace(VARIANTS[name], batch_sizes=None)
    if name == "batch_sizes":
        case = replace(case, lengths=(3, 1, 6, 6, 0, 2, 5))
    data = cases.make_lstm_data(case)
    whole = run_lstm(case, data, 1)
    everyone = range(case.samples)
    for order in (*([n] for n in everyone), [*everyone][::-1], [1, 0], [4, 2, 3, 0]):
        lengths = None if case.lengths is None else tuple(case.lengths[n] for n in order)
        some = run_lstm(replace(case, samples=len(order), lengths=lengths), of_sample(data, order), 2)
        for field in ("y", "hn", "cn", "dx", "dh0", "dc0"):
            assert_same_bits([getattr(some, field)], [getattr(whole, field)[:, order]])


@pytest.mark.parametrize("first", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("name", ["plain", "full", "full_old", "activations", "two_layers", "lengths", "diagonal"])
def test_time_split_in_two(name: str, first: int, isa: str) -> None:
    """Forward in two parts that pass the states on, backward in two that pass their gradients back."""
    case = {**VARIANTS, "two_layers": replace(BASE, layers=2, states=True)}[name]
    case = replace(case, directions=1)
    data = cases.make_lstm_data(case)
    steps = [first, case.steps - first]
    parts, results, states = [], [], (data.h0, data.c0)
    for number in range(2):
        span = slice(first) if number == 0 else slice(first, None)
        lengths = None
        if case.lengths is not None:
            done = 0 if number == 0 else first
            lengths = tuple(min(max(n - done, 0), steps[number]) for n in case.lengths)
        part = replace(case, steps=steps[number], lengths=lengths)
        piece = data._replace(x=data.x[span], dy=data.dy[span], h0=states[0], c0=states[1])
        results.append(forward(part, piece))
        states = results[-1].hn, results[-1].cn
        parts.append(piece)
    second = backward(parts[1], results[1].cache)
    front = backward(parts[0], results[0].cache, dhn=second.dh0, dcn=second.dc0)

    whole = run_lstm(case, data, 1)
    assert_same_bits([np.concatenate([r.y for r in results]), *states], [whole.y, whole.hn, whole.cn])
    assert front.dx is not None
    assert second.dx is not None
    assert_same_bits([np.concatenate([front.dx, second.dx]), front.dh0, front.dc0], [whole.dx, whole.dh0, whole.dc0])
    added = [
        LstmParameters(*(None if a is None else a + b for a, b in zip(*pair, strict=True))).stacked()
        for pair in zip(front.dweights, second.dweights, strict=True)
    ]
    errors = lstm_errors(whole._replace(cells=added), lstm_oracle(case, data))
    assert max(errors) <= 1, errors


def test_same_bits_run_to_run(isa: str) -> None:
    case = LstmCase(9, 6, 33, 70, 2, 2, states=True)
    data = cases.make_lstm_data(case)
    expected = run_lstm(case, data, 1).arrays()
    for threads in (*THREADS, _threads._MOST, 7, 2, 1):
        assert_same_bits(run_lstm(case, data, threads).arrays(), expected)


@pytest.mark.parametrize(
    "case",
    [
        LstmCase(7, 40, 64, 64),  # slots apart
        LstmCase(5, 6, 100, 320, peephole="full"),  # units apart
        LstmCase(4, 3, 70, 200, 2, 2, dtype="float64", peephole="diagonal"),
        LstmCase(30, 50, 16, 16, lengths=tuple(n * 7 % 31 for n in range(50)), directions=2),
    ],
    ids=lambda case: case.name,
)
def test_larger_problems(case: LstmCase) -> None:
    check(case, ISA_LEVELS[-1:], THREADS)


# ---- units apart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peephole", ["none", "diagonal", "full"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("samples", "lengths"), [(1, None), (3, (9, 4, 7))])
def test_threads_that_share_the_units_of_a_step(
    samples: int, lengths: tuple[int, ...] | None, directions: int, peephole: str
) -> None:
    """A batch too small to cut and steps long enough to meet in: the same bits as on one thread."""
    steps, inputs, units = 9, 5, 600 if samples > 1 else 130
    rng = np.random.default_rng(0)

    def normal(*extents: int) -> Array:
        return rng.normal(0, 0.05, extents).astype(np.float32)

    shapes: dict[str, tuple[int, ...]] = {"diagonal": (4 * units,), "full": (4 * units, units)}
    weights = [
        LstmWeights(
            normal(4 * units, inputs),
            normal(4 * units, units),
            normal(4 * units),
            normal(*shapes[peephole]) if peephole in shapes else None,
        )
        for _ in range(directions)
    ]
    x, dy = normal(steps, samples, inputs), normal(steps, samples, directions * units)

    def run(threads: int) -> list[Array]:
        result = rg.lstm_forward(x, weights, bidirectional=directions == 2, lengths=lengths, num_threads=threads)
        assert result.cache is not None
        gradients = rg.lstm_backward(dy, result.cache, num_threads=threads)
        cells = [array for cell in gradients.dweights for array in cell if array is not None]
        return [result.y, result.hn, result.cn, gradients.dx, *cells]

    alone = run(1)
    for threads in (2, 3, 4, 7):
        assert_same_bits(run(threads), alone)
