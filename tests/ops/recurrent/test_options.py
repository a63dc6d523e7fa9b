"""LSTM: the engine against the oracle over all options, and over shapes and strides that hurt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import LstmWeights, _core
from retrograd.lab import bounds, cases
from retrograd.lab.cases import LSTM_STANDARD, LstmCase, LstmParameters
from retrograd.lab.verify import LstmErrors, lstm_errors, lstm_oracle, run_lstm, verify_lstm
from retrograd.ops.activation import ACTIVATIONS
from support.arrays import MEMORY, assert_same_bits, assert_untouched_around
from support.lstm import BASE, ISA_LEVELS, NEEDS, OPTIONS, THREADS, backward, check, custom, flat, forward, moved

# ---- everything with everything --------------------------------------------------------------------------------------

IMPOSSIBLE = {("diagonal", "full"), ("lengths", "batch_sizes"), ("stacked", "gates")}
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if pair not in IMPOSSIBLE]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_two_options_together(pair: tuple[str, str]) -> None:
    check(replace(BASE, **OPTIONS[pair[0]] | OPTIONS[pair[1]]))


@pytest.mark.parametrize("role", "ifgoh")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_every_role(name: str, role: str) -> None:
    for peephole, dtype in (("none", "float32"), ("full", "float64")):
        activations = custom(**{role: name})
        check(LstmCase(4, 3, 3, 9, peephole=peephole, activations=activations, dtype=dtype), threads=[1])  # type: ignore[arg-type]


def test_everything_at_once() -> None:
    common: dict[str, Any] = {"states": True, "output_gate_reads": "old", "dropout": 0.3, "batch_first": True}
    activations = custom(i="hard_sigmoid", g="softsign", h="softsign")
    for peephole, form in (("diagonal", "gates"), ("full", "stacked")):
        for ragged in ({"lengths": (6, 2, 0, 5, 6, 1, 4)}, {"batch_sizes": (3, 7, 0, 6, 1, 7)}):
            options = {**common, **ragged, "peephole": peephole, "weights": form, "activations": activations}
            check(replace(BASE, layers=3, directions=2, **options))


@pytest.mark.long
def test_published_cases() -> None:
    rows = verify_lstm(thread_counts=(1, 2))
    assert len(rows) == len(cases.LSTM_VERIFY_CASES + cases.LSTM_OPTION_CASES) * len(ISA_LEVELS) * 2
    assert [(row.case.name, row.isa, row.threads, row.errors) for row in rows if not row.ok] == []
    # A tolerance that nothing comes near would not be one.
    for dtype in ("float32", "float64"):
        for result, name in enumerate(LstmErrors._fields):
            assert max(row.errors[result] for row in rows if row.case.dtype == dtype) > 0.03, name


def test_large_published_cases() -> None:
    """The rows to be timed that NumPy can do in a second."""
    chosen = [case for case in cases.LSTM_BENCH_CASES if case.steps * case.samples * case.units**2 < 2e6]
    assert len(chosen) >= 3
    assert all(row.ok for row in verify_lstm(chosen, [_core.isa()], (1, 2)))


def test_verify_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty units in the last place of y, after twelve steps, are enough."""
    right = rg.lstm_forward

    def wrong(*arguments: Any, **options: Any) -> rg.LstmResult:
        result = right(*arguments, **options)
        return result._replace(y=result.y * np.float32(1 + 2.0**-18))

    monkeypatch.setattr("retrograd.ops.recurrent.lstm_forward", wrong)
    (row,) = verify_lstm([LstmCase(12, 5, 7, 11)], ["scalar"], [1])
    assert not row.ok
    assert row.what == "y"
    assert row.error == row.errors.y > 1


def test_weights_may_lack_gates() -> None:
    """Of b and of peepholes any gate may be None: it is 0, and so is what would be its gradient."""
    for peephole in ("diagonal", "full"):
        case = LstmCase(4, 3, 5, 9, peephole=peephole, weights="gates", output_gate_reads="new")  # type: ignore[arg-type]
        data = cases.make_lstm_data(case)
        (cell,) = data.weights
        for lacking in ((0,), (3,), (1, 2), (0, 1, 3)):
            some = cell._replace(
                **{
                    field: tuple(None if k in lacking else a for k, a in enumerate(getattr(cell, field)))
                    for field in ("b", "peephole")
                }
            )
            partial = data._replace(weights=(some,))
            oracle = lstm_oracle(case, partial)
            result = forward(case, partial)
            gradients = backward(partial, result.cache, need=NEEDS)
            (dcell,) = gradients.dweights
            for field in ("b", "peephole"):
                assert [a is None for a in getattr(dcell, field)] == [k in lacking for k in range(4)]
            for k in set(range(4)) - set(lacking):  # the others are as the oracle has them
                for field in ("b", "peephole"):
                    triple = getattr(dcell, field)[k], *(getattr(c.cells[0], field)[k] for c in oracle)
                    assert bounds.error_in_tolerances(*triple) <= 1
            for name in ("y", "hn", "cn"):
                triple = getattr(result, name), *(getattr(o, name) for o in oracle)
                assert bounds.error_in_tolerances(*triple) <= 1


def test_the_three_forms_of_weights_are_one() -> None:
    case = LstmCase(5, 3, 4, 17, layers=2, peephole="full")
    data = cases.make_lstm_data(case)
    stacked = [cell.stacked() for cell in data.weights]
    expected = run_lstm(case, data, 1).arrays()
    for cells in (stacked, [LstmParameters(*(None if a is None else tuple(a) for a in cell)) for cell in stacked]):
        assert_same_bits(run_lstm(case, data._replace(weights=tuple(cells)), 1).arrays(), expected)
    # Of one cell alone, also as a plain tuple.
    alone = LstmWeights(*data.weights[0])
    y, hn, _, _ = rg.lstm_forward(data.x, alone)
    for form in (
        tuple(alone),
        [*alone],
        [alone],
        [tuple(alone)],
        LstmWeights(*(None if a is None else [*a] for a in stacked[0])),
    ):
        got = rg.lstm_forward(data.x, form)
        assert_same_bits([got.y, got.hn.reshape(3, 17)], [y, hn])


# ---- shapes and strides that hurt ------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)


class Drawn(NamedTuple):
    case: LstmCase
    seed: int
    memory: Iterator[str]


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    steps = draw(st.sampled_from((0, 1, 2, 3, 5, 11)))
    samples = draw(st.sampled_from((0, 1, 2, 3, 7, 8, 9, 13)))
    inputs, units = draw(st.sampled_from((0, *SIZES))), draw(st.sampled_from(SIZES))
    ragged: dict[str, Any] = {}
    match draw(st.sampled_from(("no", "lengths", "batch_sizes"))):
        case "lengths":
            ragged["lengths"] = tuple(draw(st.lists(st.integers(0, steps), min_size=samples, max_size=samples)))
        case "batch_sizes":
            ragged["batch_sizes"] = tuple(draw(st.lists(st.integers(0, samples), min_size=steps, max_size=steps)))
    case = LstmCase(
        steps,
        samples,
        inputs,
        units,
        layers=draw(st.sampled_from((1, 1, 2, 3))),
        directions=draw(st.sampled_from((1, 2))),
        dtype=draw(st.sampled_from(("float32", "float64"))),
        bias=draw(st.booleans()),
        states=draw(st.booleans()),
        peephole=draw(st.sampled_from(("none", "none", "diagonal", "full"))),
        output_gate_reads=draw(st.sampled_from(("new", "old"))),
        activations=draw(st.sampled_from((LSTM_STANDARD, custom(i="hard_sigmoid", g="softsign", h="identity")))),
        dropout=draw(st.sampled_from((0.0, 0.5))),
        batch_first=draw(st.booleans()),
        weights=draw(st.sampled_from(("concatenated", "stacked", "gates"))),
        **ragged,
    )
    memory = draw(st.lists(st.sampled_from(MEMORY), min_size=7, max_size=7))
    return Drawn(case, draw(st.integers(0, 2**32 - 1)), itertools.cycle(memory))


@pytest.mark.long
@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=problems(), level=st.sampled_from(ISA_LEVELS), threads=st.sampled_from(THREADS))
def test_shapes_and_strides_that_hurt(drawn: Drawn, level: str, threads: int) -> None:
    case, seed, memory = drawn
    assert _core.select_isa(level)
    data = cases.make_lstm_data(case, seed)
    plain = run_lstm(case, data, 1)
    errors = lstm_errors(plain, lstm_oracle(case, data))
    assert max(errors) <= 1, errors

    need = [n for n in NEEDS if (case.bias or n != "db") and (case.peephole != "none" or n != "dpeephole")]
    result = forward(case, data)
    gradients = backward(data, result.cache, need=need)
    elsewhere = moved(data, memory)
    before = [None if a is None else a.copy() for a in flat(elsewhere)]
    out = dict(zip(("y", "hn", "cn"), moved(list(result[:3]), memory, blank=True), strict=True))
    dout = moved(gradients, memory, blank=True)
    got = forward(case, elsewhere, out=out, num_threads=threads)
    dgot = backward(elsewhere, got.cache, need=need, out=dout, num_threads=threads)
    for name, buffer in out.items():
        assert getattr(got, name) is buffer
    assert dgot.dx is dout.dx
    assert_same_bits(flat(got[:3]), flat(result[:3]))
    assert_same_bits(flat(dgot), flat(gradients))
    assert_same_bits(flat(dout), flat(gradients))
    assert_same_bits(flat(elsewhere), before)
    for buffer in (*out.values(), *flat(dout)):
        if buffer is not None:
            assert_untouched_around(buffer)


def test_views_that_interleave_do_not_overlap() -> None:
    """Results in every other row of the memory that holds the inputs."""
    case = LstmCase(4, 3, 6, 6)
    data = cases.make_lstm_data(case)
    both = np.full((4, 3, 2, 6), math.nan, np.float32)
    x, y = both[:, :, 0], both[:, :, 1]
    x[...] = data.x
    result = forward(case, data._replace(x=x), out=y)
    assert result.y is y
    assert_same_bits([y, x], [forward(case, data).y, data.x])
    gradients = np.full((4, 3, 2, 6), math.nan, np.float32)
    dy, dx = gradients[:, :, 0], gradients[:, :, 1]
    dy[...] = data.dy
    got = backward(data._replace(dy=dy), result.cache, out={"dx": dx}, need=["dx"])
    assert got.dx is dx
    assert_same_bits([dx, dy], [backward(data, forward(case, data).cache).dx, data.dy])
