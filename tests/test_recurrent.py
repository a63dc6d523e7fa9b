"""LSTM: the engine against the oracle, other people's libraries, and itself; and every call it refuses."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from arrays import MEMORY, assert_same_bits, assert_untouched_around, fenced, placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_cases import OnnxLstm, collect_onnx_lstm_cases
from test_reference_lstm import jax_lstm
from test_threads import forks, linux, python

import retrograd as rg
from retrograd import LstmActivations, LstmGradients, LstmWeights, _core
from retrograd.lab import bounds, cases, reference
from retrograd.lab.cases import ACTIVATION_PARAMETERS, LSTM_STANDARD, LstmCase, LstmData, LstmParameters
from retrograd.lab.verify import (
    LstmErrors,
    LstmResults,
    lstm_errors,
    lstm_options,
    lstm_oracle,
    lstm_weights,
    run_lstm,
    verify_lstm,
)
from retrograd.ops import _threads
from retrograd.ops.activation import ACTIVATIONS

Array = np.ndarray[Any, Any]
ISA_LEVELS = tuple(_core.isa_levels())
THREADS = (1, 2, 3, 7)
NEEDS = ("dx", "dwx", "dwh", "db", "dpeephole", "dh0", "dc0")


def flat(value: Any) -> list[Array | None]:
    """All arrays of nested results, in order."""
    if value is None or isinstance(value, np.ndarray):
        return [value]
    return [array for part in value for array in flat(part)]


def forward(case: LstmCase, data: LstmData, **options: Any) -> rg.LstmResult:
    return rg.lstm_forward(data.x, lstm_weights(data), data.h0, data.c0, **lstm_options(case) | options)


def backward(data: LstmData, cache: rg.LstmCache | None, **options: Any) -> LstmGradients:
    assert cache is not None
    return rg.lstm_backward(data.dy, cache, **{"dhn": data.dhn, "dcn": data.dcn} | options)


def check(case: LstmCase, levels: Sequence[str] = ISA_LEVELS, threads: Sequence[int] = THREADS) -> None:
    """Within tolerance at each level, and the same bits at all numbers of threads."""
    rows = verify_lstm([case], levels, threads)
    assert [(row.isa, row.threads, row.same_bits, row.errors) for row in rows if not row.ok] == []


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# ---- a table ---------------------------------------------------------------------------------------------------------

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


# ---- everything with everything --------------------------------------------------------------------------------------


def custom(**names: str) -> tuple[cases.NamedActivation, ...]:
    """Activations of the roles i f g o h; the others are standard."""
    return tuple(
        (names[role], *ACTIVATION_PARAMETERS[names[role]]) if role in names else usual
        for role, usual in zip("ifgoh", LSTM_STANDARD, strict=True)
    )


# Just large enough for a team to be asked.
BASE = LstmCase(6, 7, 5, 35)
OPTIONS: dict[str, dict[str, Any]] = {
    "layers": {"layers": 2},
    "directions": {"directions": 2},
    "no_bias": {"bias": False},
    "states": {"states": True},
    "diagonal": {"peephole": "diagonal"},
    "full": {"peephole": "full"},
    "reads_old": {"output_gate_reads": "old"},
    "activations": {"activations": custom(i="hard_sigmoid", f="softsign", g="elu", o="softplus", h="scaled_tanh")},
    "dropout": {"dropout": 0.4, "layers": 2},
    "lengths": {"lengths": (6, 2, 0, 5, 6, 1, 4)},
    "batch_sizes": {"batch_sizes": (3, 7, 0, 6, 1, 7)},
    "batch_first": {"batch_first": True},
    "stacked": {"weights": "stacked"},
    "gates": {"weights": "gates"},
    "float64": {"dtype": "float64"},
}
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


def test_published_cases() -> None:
    rows = verify_lstm(thread_counts=(1, 2))
    assert len(rows) == len(cases.LSTM_VERIFY_CASES) * len(ISA_LEVELS) * 2
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

    monkeypatch.setattr("retrograd.ops.lstm.lstm_forward", wrong)
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
    for cells in (stacked, [LstmParameters(*(tuple(part) for part in cell)) for cell in stacked]):
        assert_same_bits(run_lstm(case, data._replace(weights=tuple(cells)), 1).arrays(), expected)
    # Of one cell alone, also as a plain tuple.
    alone = LstmWeights(*data.weights[0])
    y, hn, _, _ = rg.lstm_forward(data.x, alone)
    for form in (tuple(alone), [*alone], [alone], [tuple(alone)], LstmWeights(*(list(part) for part in stacked[0]))):
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


def moved(value: Any, memory: Iterator[str], blank: bool = False) -> Any:
    """The same arrays elsewhere in memory, or results' buffers full of NaN there."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return placed(np.full_like(value, math.nan) if blank else value, next(memory), tuple(range(value.ndim))[::-1])
    parts = (moved(part, memory, blank) for part in value)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


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


# ---- bits ------------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, LstmCase] = {
    "plain": replace(BASE, states=True),
    "stacked": replace(BASE, layers=3, directions=2, states=True),
    "diagonal": replace(BASE, peephole="diagonal", states=True, directions=2),
    "full": replace(BASE, peephole="full", states=True, layers=2),
    "full_old": replace(BASE, peephole="full", output_gate_reads="old", states=True),
    "activations": replace(BASE, states=True, **OPTIONS["activations"]),
    "lengths": replace(BASE, layers=2, directions=2, states=True, **OPTIONS["lengths"]),
    "batch_sizes": replace(BASE, layers=2, directions=2, states=True, **OPTIONS["batch_sizes"]),
    "wide": LstmCase(3, 5, 40, 150, states=True, dtype="float64"),
}
variants = pytest.mark.parametrize("name", VARIANTS)


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
        LstmCase(20, 40, 64, 64),  # slots apart
        LstmCase(12, 6, 100, 320, peephole="full"),  # units apart
        LstmCase(8, 3, 70, 200, 2, 2, dtype="float64", peephole="diagonal"),
        LstmCase(30, 50, 16, 16, lengths=tuple(n * 7 % 31 for n in range(50)), directions=2),
    ],
    ids=lambda case: case.name,
)
def test_larger_problems(case: LstmCase) -> None:
    check(case, ISA_LEVELS[-1:], THREADS)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_is_the_oracles_mask() -> None:
    """Seen through layers that pass on what they read: g is the input, i and o are 1, f is 0."""
    units, p, seed = 150, 0.4, 0x123456789ABCDEF
    x = random(3, 5, units, dtype=np.float64)
    wx = np.array([0.0, 0.0, 1.0, 0.0])[:, None, None] * np.eye(units)
    b = np.array([1.0, 0.0, 0.0, 1.0])[:, None] * np.ones(units)
    cells = [LstmWeights(wx, np.zeros((4, units, units)), b)] * 3
    y = rg.lstm_forward(x, cells, activations=LstmActivations(*["identity"] * 5), dropout=p, seed=seed).y
    masks = [reference.philox_mask(seed, layer, x.shape, p) for layer in range(2)]
    np.testing.assert_allclose(y, x * masks[0] * masks[1], rtol=1e-15)


def test_dropout_depends_on_the_seed_alone(isa: str) -> None:
    case = LstmCase(6, 7, 5, 35, layers=3, directions=2, dropout=0.5, seed=2**63 + 5)
    data = cases.make_lstm_data(case)
    expected = run_lstm(case, data, 1)
    for threads in THREADS:
        assert_same_bits(run_lstm(case, data, threads).arrays(), expected.arrays())
    for seed in (0, 5, 2**63 + 6):
        assert np.mean(run_lstm(replace(case, seed=seed), data, 1).y == expected.y) < 0.05


def test_dropout_is_off_in_inference_and_without_layers_in_between() -> None:
    case = LstmCase(4, 3, 5, 9, layers=2, dropout=0.5)
    data = cases.make_lstm_data(case)
    plain = replace(case, dropout=0.0)
    assert_same_bits(flat(forward(case, data, training=False)[:3]), flat(forward(plain, data)[:3]))
    assert not np.array_equal(forward(case, data).y, forward(plain, data).y)
    one = replace(case, layers=1)
    data = cases.make_lstm_data(one)
    assert_same_bits(run_lstm(one, data, 1).arrays(), run_lstm(replace(one, dropout=0.0), data, 1).arrays())


# ---- the cache -------------------------------------------------------------------------------------------------------

CACHED = replace(BASE, layers=2, directions=2, states=True, **OPTIONS["lengths"])


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


def test_a_cache_is_checked() -> None:
    data = cases.make_lstm_data(CACHED)
    size = cache_size(CACHED)
    buffer = bytearray(size)
    call = (data.x, lstm_weights(data), data.h0, data.c0)
    options = lstm_options(CACHED)
    with pytest.raises(ValueError, match=r"^lstm_cache: cache holds nothing that a finished lstm_forward has written"):
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


def test_array_likes_are_taken_as_they_are(torch: Any) -> None:
    case = LstmCase(4, 3, 5, 9)
    data = cases.make_lstm_data(case)
    expected = forward(case, data)
    given = [LstmWeights(*(torch.from_numpy(part) for part in cell if part is not None)) for cell in data.weights]
    result = rg.lstm_forward(torch.from_numpy(data.x), given)
    assert_same_bits([result.y], [expected.y])
    assert result.cache is not None
    got = rg.lstm_backward(torch.from_numpy(data.dy), result.cache)
    assert_same_bits(flat(got), flat(backward(data, expected.cache, dhn=None, dcn=None)))


# ---- refusals --------------------------------------------------------------------------------------------------------

X = (4, 3, 5)
H = 6


def f32(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def cell(**parts: Any) -> LstmWeights:
    return LstmWeights(f32(4 * H, 5), f32(4 * H, H), f32(4 * H), f32(4 * H))._replace(**parts)


def gates(*shape: int, **lacking: Any) -> tuple[Any, ...]:
    return tuple(lacking.get(gate, f32(*shape)) for gate in "ifgo")


def stride_0(*shape: int) -> Array:
    return np.lib.stride_tricks.as_strided(f32(*shape[1:]), shape, (0, *f32(*shape[1:]).strides), writeable=True)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def unaligned(*shape: int) -> Array:
    return np.frombuffer(bytearray(math.prod(shape) * 4 + 1), np.uint8)[1:].view(np.float32).reshape(shape)


class Refusal(NamedTuple):
    """A call that must fail, and what its message must say besides the function's name."""

    options: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


def shape_error(words: str, **options: Any) -> Refusal:
    return Refusal(options, ValueError, tuple(words.split("|")))


def type_error(words: str, **options: Any) -> Refusal:
    return Refusal(options, TypeError, tuple(words.split("|")))


BIG = np.dtype(np.float32).newbyteorder()
FORWARD_REFUSALS: dict[str, Refusal] = {
    # x
    "x has 2 axes": shape_error("x|(4, 3)|3 axes (T, N, I)", x=f32(4, 3)),
    "x has 4 axes, batch first": shape_error("x|(1, 4, 3, 5)|3 axes (N, T, I)", x=f32(1, 4, 3, 5), batch_first=True),
    "x double": type_error("wx|float32|float64", x=np.zeros(X), out=None),
    "x half": type_error("x|float16|float32 or float64", x=np.zeros(X, np.float16)),
    "x integer": type_error("x|int64|float32", x=np.zeros(X, np.int64)),
    "x of the other byte order": type_error("x|byte order|astype", x=np.zeros(X, BIG)),
    "x unaligned": shape_error("x|align", x=unaligned(*X)),
    "x ragged": type_error("x|array", x=[[1.0], [1.0, 2.0]]),
    # weights
    "weights None": type_error("weights|LstmWeights|NoneType", weights=None),
    "weights an array": type_error("weights|LstmWeights|ndarray", weights=f32(24, 5)),
    "weights empty": shape_error("weights|empty|1", weights=[]),
    "weights of one array": shape_error("weights|1 arrays|2 to 4", weights=(f32(24, 5),)),
    "cell of five": shape_error("weights[0]|5 arrays|2 to 4", weights=[[None] * 5]),
    "cell a number": type_error("weights[1]|LstmWeights|float", weights=[cell(), 1.0]),
    "wx None": shape_error("wx is None", weights=cell(wx=None)),
    "wh None": shape_error("wh is None", weights=cell(wh=None)),
    "wx too wide": shape_error("wx|(24, 6)|(24, 5)|(4, 6, 5)", weights=cell(wx=f32(24, 6))),
    "wx too short": shape_error("wx|(23, 5)|(24, 5)", weights=cell(wx=f32(23, 5))),
    "wx transposed": shape_error("wx|(5, 24)|(24, 5)", weights=cell(wx=f32(5, 24))),
    "wx of one axis": shape_error("wx|(120,)|(24, 5)", weights=cell(wx=f32(120))),
    "wh not square": shape_error("wh|(20, 6)|(24, 6)", weights=cell(wh=f32(20, 6))),
    "wh of one axis": shape_error("wh|(4H, H)|(144,)", weights=cell(wh=f32(144))),
    "wh empty": shape_error("wh|(0, 0)|hidden size is 0|1", weights=cell(wh=f32(0, 0))),
    "b too long": shape_error("b has|(25,)|(24,)|(4, 6)", weights=cell(b=f32(25))),
    "b a matrix": shape_error("b has|(24, 1)|(24,)", weights=cell(b=f32(24, 1))),
    "peephole too short": shape_error("peephole|(23,)|(24,)", weights=cell(peephole=f32(23))),
    "peephole not square": shape_error("peephole|(24, 5)|(24, 6)", weights=cell(peephole=f32(24, 5))),
    "three gates": shape_error("weights.wx|3 arrays|4", weights=cell(wx=gates(6, 5)[:3])),
    "a gate of wx None": shape_error("wx of gate g is None", weights=cell(wx=gates(6, 5, g=None))),
    "a gate of wh None": shape_error("wh is None", weights=cell(wh=gates(6, 6, i=None))),
    "a gate of wx too wide": shape_error("wx of gate f|(6, 4)|(6, 5)", weights=cell(wx=gates(6, 5, f=f32(6, 4)))),
    "a gate of b too short": shape_error("b of gate o|(5,)|(6,)", weights=cell(b=gates(6, o=f32(5)))),
    "a gate of b double": type_error("b of gate i|float64|float32", weights=cell(b=gates(6, i=np.zeros(6)))),
    "peepholes of both kinds": shape_error("diagonal|full", weights=[cell(), cell(wx=f32(24, 6), peephole=f32(24, 6))]),
    "second layer reads x": shape_error("weights[1].wx|(24, 5)|(24, 6)", weights=[cell(), cell()]),
    "second layer reads one direction": shape_error(
        "weights[2].wx|(24, 6)|(24, 12)",
        weights=[cell(), cell(), cell(wx=f32(24, 6))] * 2,
        bidirectional=True,
        out=None,
    ),
    "odd number of directions": shape_error("weights has 3 cells|2 each", weights=[cell()] * 3, bidirectional=True),
    "one cell for two directions": shape_error("weights has 1 cells|2 each", bidirectional=True),
    "wh double": type_error("wh|float64|float32", weights=cell(wh=np.zeros((24, 6)))),
    "b integer": type_error("b has|int64|float32", weights=cell(b=np.zeros(24, np.int64))),
    "b of the other byte order": type_error("b is|byte order", weights=cell(b=np.zeros(24, BIG))),
    "peephole half": type_error("peephole|float16|float32", weights=cell(peephole=np.zeros(24, np.float16))),
    "wx unaligned": shape_error("wx|align", weights=cell(wx=unaligned(24, 5))),
    # states
    "h0 for many cells": shape_error("h0|(1, 3, 6)|(N, H) = (3, 6)", h0=f32(1, 3, 6)),
    "h0 for one cell": shape_error("h0|(3, 6)|(cells, N, H) = (1, 3, 6)", h0=f32(3, 6), weights=[cell()]),
    "c0 of other samples": shape_error("c0|(4, 6)|(3, 6)", c0=f32(4, 6)),
    "c0 double": type_error("c0|float64|float32", c0=np.zeros((3, 6))),
    "h0 integer": type_error("h0|int32|float32", h0=np.zeros((3, 6), np.int32)),
    "h0 unaligned": shape_error("h0|align", h0=unaligned(3, 6)),
    # ragged batches
    "lengths too many": shape_error("lengths|(4,)|(3,)|3 samples", lengths=[1, 2, 3, 4]),
    "lengths scalar": shape_error("lengths|()|(3,)", lengths=4),
    "lengths too long": shape_error("lengths has 5|0 to 4|steps", lengths=[4, 5, 1]),
    "lengths negative": shape_error("lengths has -1|0 to 4", lengths=[4, -1, 1]),
    "lengths float": type_error("lengths|float64|integers", lengths=[4.0, 1.0, 2.0]),
    "lengths bool": type_error("lengths|bool|integers", lengths=[True, True, False]),
    "lengths huge": shape_error(f"lengths has {2**64 - 1}|0 to 4", lengths=np.array([2**64 - 1, 1, 1], np.uint64)),
    "batch_sizes too few": shape_error("batch_sizes|(3,)|(4,)|4 steps", batch_sizes=[3, 3, 3]),
    "batch_sizes too large": shape_error("batch_sizes has 4|0 to 3|samples", batch_sizes=[3, 4, 3, 3]),
    "batch_sizes negative": shape_error("batch_sizes has -2|0 to 3", batch_sizes=[3, -2, 3, 3]),
    "batch_sizes strings": type_error("batch_sizes|integers", batch_sizes=["3"] * 4),
    "lengths and batch_sizes": shape_error("lengths|batch_sizes|both", lengths=[1, 1, 1], batch_sizes=[3] * 4),
    # options
    "dropout 1": shape_error("dropout is 1.0|below 1", dropout=1),
    "dropout negative": shape_error("dropout is -0.1|at least 0", dropout=-0.1),
    "dropout NaN": shape_error("dropout is nan|at least 0", dropout=math.nan),
    "dropout wrong in inference too": shape_error("dropout is 7.0|below 1", dropout=7, training=False),
    "dropout a string": type_error("dropout|number|str", dropout="0.5"),
    "dropout unhashable": type_error("dropout|number|list", dropout=[0.5]),
    "seed negative": shape_error("seed is -1|0", seed=-1),
    "seed too large": shape_error(f"seed is {2**64}|2**64", seed=2**64),
    "seed float": type_error("seed|int|float", seed=1.0),
    "reads nothing": shape_error("output_gate_reads|'next'|'new' or 'old'", output_gate_reads="next"),
    "reads a number": shape_error("output_gate_reads|1|'new' or 'old'", output_gate_reads=1),
    "activations a name": type_error("activations|LstmActivations|str", activations="tanh"),
    "activations None": type_error("activations|LstmActivations|NoneType", activations=None),
    "four activations": shape_error("activations|4|5", activations=("sigmoid",) * 4),
    "unknown activation": shape_error("activations.g|'tahn'|tanh", activations=LstmActivations(g="tahn")),
    "activation that needs alpha": shape_error("activations.h|'linear'|alpha", activations=LstmActivations(h="linear")),
    "activation a number": type_error("activations.i|int", activations=LstmActivations(i=3)),  # type: ignore[arg-type]
    "activation unhashable": type_error("activations.o|list", activations=LstmActivations(o=["tanh"])),  # type: ignore[arg-type]
    "no threads": shape_error("threads|0|1", num_threads=0),
    "threads float": type_error("threads|float", num_threads=2.0),
    # out
    "out a list": type_error("out.y|ndarray|list", out=[1.0]),
    "out of another name": shape_error("out has 'h'|y, hn and cn", out={"h": f32(3, 6)}),
    "y of another shape": shape_error("out.y|(4, 3, 5)|(4, 3, 6)", out=f32(4, 3, 5)),
    "y for batch first": shape_error("out.y|(3, 4, 6)|(4, 3, 6)", out={"y": f32(3, 4, 6)}),
    "y double": type_error("out.y|float64|float32", out=np.zeros((4, 3, 6))),
    "y read-only": shape_error("out.y|read-only", out=read_only(f32(4, 3, 6))),
    "y stride 0": shape_error("out.y|overlaps itself", out=stride_0(4, 3, 6)),
    "y unaligned": shape_error("out.y|align", out=unaligned(4, 3, 6)),
    "hn of another shape": shape_error("out.hn|(1, 3, 6)|(3, 6)", out={"hn": f32(1, 3, 6)}),
    "hn a list": type_error("out.hn|ndarray|list", out={"hn": [1.0]}),
    "hn read-only": shape_error("out.hn|read-only", out={"hn": read_only(f32(3, 6))}),
    "cn integer": type_error("out.cn|int32|float32", out={"cn": np.zeros((3, 6), np.int32)}),
    "cn stride 0": shape_error("out.cn|overlaps itself", out={"cn": stride_0(3, 6)}),
    "cn of the other byte order": type_error("out.cn|byte order", out={"cn": np.zeros((3, 6), BIG)}),
}


def assert_refused(refusal: Refusal, function: str, call: Any) -> None:
    with pytest.raises(refusal.error) as caught:
        call()
    assert type(caught.value) is refusal.error
    message = str(caught.value)
    assert message.startswith(f"{function}: "), message
    for word in refusal.words:
        assert word in message, (word, message)


@pytest.mark.parametrize("name", FORWARD_REFUSALS)
def test_forward_refuses(name: str) -> None:
    refusal = FORWARD_REFUSALS[name]
    words = {"x": f32(*X), "weights": cell()} | refusal.options
    nans = {"y": np.full((4, 3, 6), math.nan, np.float32)}
    if isinstance(words["weights"], LstmWeights):
        nans |= {name: np.full((3, 6), math.nan, np.float32) for name in ("hn", "cn")}
    given = words.pop("out", {})
    if isinstance(given, dict):
        given = {**nans, **given}
    x, weights, h0, c0 = (words.pop(key, None) for key in ("x", "weights", "h0", "c0"))
    for _ in range(2):  # no refusal is forgotten because the same call was made before
        assert_refused(refusal, "lstm_forward", lambda: rg.lstm_forward(x, weights, h0, c0, out=given, **words))
    if not {"training", "num_threads", "out"} & refusal.options.keys():
        assert_refused(refusal, "lstm_cache", lambda: rg.lstm_cache(x, weights, h0, c0, **words))
    for buffer in nans.values():
        assert np.isnan(buffer).all()


BACKWARD_REFUSALS: dict[str, Refusal] = {
    "cache None": type_error("cache|lstm_forward|NoneType", cache=None),
    "cache a buffer": type_error("cache|lstm_forward|bytearray", cache=bytearray(3)),
    "dy of another shape": shape_error("dy|(3, 4, 6)|(4, 3, 6)", dy=f32(3, 4, 6)),
    "dy double": type_error("dy|float64|float32", dy=np.zeros((4, 3, 6))),
    "dy of the other byte order": type_error("dy|byte order", dy=np.zeros((4, 3, 6), BIG)),
    "dy unaligned": shape_error("dy|align", dy=unaligned(4, 3, 6)),
    "dhn of another shape": shape_error("dhn|(1, 3, 6)|(3, 6)", dhn=f32(1, 3, 6)),
    "dcn double": type_error("dcn|float64|float32", dcn=np.zeros((3, 6))),
    "dcn ragged": type_error("dcn|array", dcn=[[1.0], [1.0, 2.0]]),
    "need of another name": shape_error("need has 'dw'|dx, dwx", need=["dx", "dw"]),
    "need of what is not there": shape_error("need has 'dpeephole'|forward was given no peephole", need=["dpeephole"]),
    "no threads": shape_error("threads|0|1", num_threads=0),
    "out a list": type_error("out|LstmGradients|list", out=[]),
    "out of another name": shape_error("out has 'dw'|dweights", out={"dw": f32(3)}),
    "dx not needed": shape_error("out|dx|need", out={"dx": f32(4, 3, 5)}, need=["dh0"]),
    "dh0 not needed": shape_error("out|dh0|need", out={"dh0": f32(3, 6)}, need=["dx"]),
    "dweights not needed": shape_error(
        "out|dweights|need", out={"dweights": LstmWeights(f32(24, 5), None)}, need=["dx"]
    ),
    "dwh not needed": shape_error(
        "out.dweights.wh|need", out={"dweights": LstmWeights(None, f32(24, 6))}, need=["dwx"]
    ),
    "dpeephole not there": shape_error(
        "out.dweights.peephole|not given", out={"dweights": LstmWeights(None, None, None, f32(24))}
    ),
    "dx of another shape": shape_error("out.dx|(4, 3, 6)|(4, 3, 5)", out={"dx": f32(4, 3, 6)}),
    "dx double": type_error("out.dx|float64|float32", out={"dx": np.zeros(X)}),
    "dx read-only": shape_error("out.dx|read-only", out={"dx": read_only(f32(*X))}),
    "dx stride 0": shape_error("out.dx|overlaps itself", out={"dx": stride_0(*X)}),
    "dh0 for many cells": shape_error("out.dh0|(1, 3, 6)|(3, 6)", out={"dh0": f32(1, 3, 6)}),
    "dc0 a list": type_error("out.dc0|ndarray|list", out={"dc0": [1.0]}),
    "dwx of another shape": shape_error(
        "out.dweights.wx|(4, 6, 5)|(24, 5)", out={"dweights": LstmWeights(f32(4, 6, 5), None)}
    ),
    "dwx of four gates": shape_error(
        "out.dweights.wx|(24, 5)|(6, 5)", out={"dweights": LstmWeights(gates(6, 5), None)}
    ),
    "dwh a list": type_error("out.dweights.wh|ndarray|float", out={"dweights": LstmWeights(None, 1.0)}),  # type: ignore[arg-type]
    "db read-only": shape_error(
        "out.dweights.b|read-only", out={"dweights": LstmWeights(None, None, read_only(f32(24)))}
    ),
    "dweights of a list": shape_error("out.dweights|2 cells|1", out={"dweights": [cell(peephole=None)] * 2}),
    "dweights a number": type_error("out.dweights|LstmWeights|int", out={"dweights": 3}),
    "accumulate without dx": shape_error("accumulate|dx", accumulate=True, need=["dx"]),
    "accumulate without dwh": shape_error(
        "accumulate|dweights.wh",
        accumulate=True,
        need=["dwx", "dwh"],
        out={"dweights": LstmWeights(f32(24, 5), None)},
    ),
    "dx over dy": shape_error("out.dx|overlaps dy", dy=(shared := f32(4, 3, 6)), out={"dx": shared[:, :, :5]}),
    "dx over itself": shape_error(
        "overlaps", out={"dx": (room := f32(200))[:60].reshape(X), "dh0": room[50:68].reshape(3, 6)}
    ),
}


# Of those, the buffers must be as they were.
WITH_BUFFERS = ("dx over dy", "dx over itself", "accumulate without dwh", "dwh not needed", "dx not needed")


@pytest.mark.parametrize("name", BACKWARD_REFUSALS)
def test_backward_refuses(name: str) -> None:
    refusal = BACKWARD_REFUSALS[name]
    words = dict(refusal.options)
    result = rg.lstm_forward(random(*X), cell(peephole=None))
    cache, dy = words.pop("cache", result.cache), words.pop("dy", f32(4, 3, 6))
    out = words.get("out")
    buffers = [a for a in flat(out.values()) if isinstance(a, np.ndarray)] if name in WITH_BUFFERS else []
    before = [a.copy() for a in buffers]
    assert_refused(refusal, "lstm_backward", lambda: rg.lstm_backward(dy, cache, **words))
    assert_same_bits(buffers, before)


def test_backward_refuses_gates_in_another_form() -> None:
    weights = cell(b=gates(H, g=None), peephole=None)
    cache = rg.lstm_forward(random(*X), weights).cache
    for b, words in (
        (f32(24), r"out.dweights.b has the form \(24,\), the weights have \(\(6,\), \(6,\), None, \(6,\)\)"),
        (gates(H), "out.dweights.b of gate g is a buffer, but that gate was given none"),
        (gates(H, g=None, o=f32(5)), r"out.dweights.b of gate o has shape \(5,\), the result has \(6,\)"),
    ):
        with pytest.raises(ValueError, match=f"^lstm_backward: {words}"):
            rg.lstm_backward(f32(4, 3, 6), cache, out={"dweights": LstmWeights(None, None, b)})  # type: ignore[arg-type]


def test_cache_size_refuses() -> None:
    good: dict[str, Any] = {"seq_len": 4, "batch_size": 3, "input_size": 5, "hidden_size": 6}
    for change, error, words in (
        ({"seq_len": -1}, ValueError, "seq_len is -1, must be at least 0"),
        ({"hidden_size": 0}, ValueError, "hidden_size is 0, must be at least 1"),
        ({"num_layers": 0}, ValueError, "num_layers is 0, must be at least 1"),
        ({"input_size": 2.5}, TypeError, "input_size must be an int, not float"),
        ({"dtype": np.float16}, TypeError, "dtype float16; an LSTM is computed in float32 or float64"),
        ({"lengths": [1, 2]}, ValueError, r"lengths has shape \(2,\), must be \(3,\)"),
        ({"batch_sizes": [1, 2, 3, 4]}, ValueError, "batch_sizes has 4, must be from 0 to 3"),
    ):
        with pytest.raises(error, match=f"^lstm_cache_size: .*{words}"):
            rg.lstm_cache_size(**good | change)
    assert rg.lstm_cache_size(4, 3, 5, 32) < rg.lstm_cache_size(4, 3, 5, 32, dtype="float64")


def test_engine_checks_every_view_itself() -> None:
    """Whatever Python believes, the engine compares sizes with what the buffers say."""
    problem = _core.LstmProblem(4, 3, 5, 6, 1, 1, 0, [(3, 0.0, 0.0)] * 5, 0, False, 0.0)
    parts = (f32(24, 5), f32(24, 6), None, None)
    size = problem.cache_bytes(12)
    cache, outputs = np.zeros(size, np.uint8), (f32(4, 3, 6), f32(1, 3, 6), f32(1, 3, 6))

    def run(
        x: Any = None,
        indices: Any = None,
        cells: Any = None,
        buffer: Any = cache,
        active: Any = None,
        order: Any = None,
    ) -> Any:
        x, cells = f32(*X) if x is None else x, [parts] if cells is None else cells
        inputs = (None, x, indices, cells, None, None, active, order, 0)
        return problem.forward(inputs, buffer, 1, *outputs, False, 1)

    assert run() is None
    indices = np.array([[0, 6, 2]] * 4)
    assert run(x=f32(7, 5), indices=indices) is None
    for array in outputs:
        array.fill(7)
    for wrong, why in (
        ({"x": f32(7, 5), "indices": np.full((4, 3), 7)}, ("x", "out_of_range")),
        ({"x": f32(7, 5), "indices": np.full((4, 3), -1)}, ("x", "out_of_range")),
        ({"x": f32(4, 3, 6)}, ("x", "shape")),
        ({"indices": indices}, ("x", "shape")),
        ({"x": f32(7, 5)}, ("x", "shape")),
        ({"x": f32(7, 4), "indices": indices}, ("x", "shape")),
        ({"x": f32(7, 10)[:, ::2], "indices": indices}, ("x", "layout")),
        ({"x": f32(7, 5), "indices": indices.T}, ("x", "shape")),
        ({"x": f32(7, 5), "indices": indices.astype(np.int32)}, ("x", "dtype")),
        ({"x": np.zeros(X)}, ("x", "dtype")),
        ({"x": f32(4, 3, 10)[:, :, ::2]}, ("x", "layout")),
        ({"cells": [(None, *parts[1:])]}, ("wx", "missing")),
        ({"cells": [(f32(24, 4), *parts[1:])]}, ("wx", "shape")),
        ({"cells": [((f32(6, 5), *[f32(12, 5)[::2]] * 3), *parts[1:])]}, ("wx", "layout")),
        ({"buffer": cache[:-1]}, ("cache", "shape")),
        ({"buffer": cache.view(np.int8)}, ("cache", "dtype")),
    ):
        refusal = run(**wrong)
        assert type(refusal) is _core.Refusal
        assert (refusal.argument, refusal.reason.name) == why, wrong
    assert all((array == 7).all() for array in outputs)
    for impossible in (
        {"cells": []},
        {"cells": [parts[:3]]},
        {"cells": [((f32(6, 5),) * 3, *parts[1:])]},
        {"active": np.full(4, 4, np.int64)},
        {"active": np.full(3, 1, np.int64)},
        {"order": np.zeros(3, np.int64)},
        {"order": np.array([0, 1, 3])},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            run(**impossible)
    for sizes in ((-1, 3, 5, 6, 1, 1), (4, 3, 5, 0, 1, 1), (4, 3, 5, 6, 0, 1), (4, 3, 5, 6, 1, 3)):
        with pytest.raises(ValueError, match="a size is out of range"):
            _core.LstmProblem(*sizes, 0, [(3, 0.0, 0.0)] * 5, 0, False, 0.0)


# ---- numbers ---------------------------------------------------------------------------------------------------------


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


# ---- other people's libraries ----------------------------------------------------------------------------------------


def torch_run(torch: Any, case: LstmCase, data: LstmData) -> LstmResults:
    """torch.nn.LSTM with the case's weights, forward and all gradients."""
    dtype = getattr(torch, case.dtype)
    module = torch.nn.LSTM(
        case.inputs,
        case.units,
        case.layers,
        bias=case.bias,
        batch_first=case.batch_first,
        bidirectional=case.directions == 2,
        dtype=dtype,
    )
    leaves = []
    for number, weights in enumerate(data.weights):
        suffix = f"_l{number // case.directions}{'_reverse' * (number % case.directions)}"
        for name, array in (("weight_ih", weights.wx), ("weight_hh", weights.wh), ("bias_ih", weights.b)):
            if array is not None:
                parameter = getattr(module, name + suffix)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(array))
                leaves.append(parameter)
        if case.bias:
            torch.nn.init.zeros_(getattr(module, "bias_hh" + suffix))
    x, h0, c0 = (torch.tensor(a, requires_grad=True) for a in (data.x, data.h0, data.c0))
    if case.lengths is None:
        y, (hn, cn) = module(x, (h0, c0))
    else:
        rnn = torch.nn.utils.rnn
        packed = rnn.pack_padded_sequence(x, case.lengths, batch_first=case.batch_first, enforce_sorted=False)
        packed, (hn, cn) = module(packed, (h0, c0))
        y, _ = rnn.pad_packed_sequence(packed, batch_first=case.batch_first, total_length=case.steps)
    given = [torch.from_numpy(a) for a in (data.dy, data.dhn, data.dcn)]
    dx, dh0, dc0, *dw = torch.autograd.grad([y, hn, cn], [x, h0, c0, *leaves], given)
    each = len(leaves) // case.cells
    cells = [LstmParameters(*(a.numpy() for a in dw[n * each : (n + 1) * each])) for n in range(case.cells)]
    y, hn, cn, dx, dh0, dc0 = (a.detach().numpy() for a in (y, hn, cn, dx, dh0, dc0))
    if case.batch_first:
        y, dx = y.swapaxes(0, 1), dx.swapaxes(0, 1)
    return LstmResults(y, hn, cn, dx, dh0, dc0, [cell.stacked() for cell in cells])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"lengths": (3, 9, 1, 7, 9)},
        {"lengths": (3, 9, 1, 7, 9), "batch_first": True, "directions": 2, "layers": 2},
        {"directions": 2},
        {"layers": 3},
        {"layers": 2, "directions": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_pytorch(torch: Any, options: dict[str, Any], dtype: str, isa: str) -> None:
    """y, hn, cn and all gradients: as far from PyTorch as two results within tolerance of the truth can be."""
    case = LstmCase(9, 5, 6, 21, states=True, dtype=dtype, **options)
    data = cases.make_lstm_data(case)
    theirs = torch_run(torch, case, data)
    oracle = lstm_oracle(case, data)
    assert max(lstm_errors(theirs, oracle)) <= 1
    assert max(lstm_errors(run_lstm(case, data, 2), oracle._replace(expected=theirs))) <= 2


@pytest.mark.parametrize("options", [{}, {"peephole": "full"}, {"peephole": "diagonal", "output_gate_reads": "old"},
                                     {"activations": custom(i="softsign", g="elu", o="softplus", h="scaled_tanh")}],
                         ids=["plain", "full", "diagonal_old", "activations"])  # fmt: skip
def test_gradients_are_the_derivative(options: dict[str, Any], isa: str) -> None:
    """Central differences of the engine itself, in float64, along a random direction in each array."""
    case = LstmCase(4, 3, 4, 7, layers=2, directions=2, states=True, dtype="float64", lengths=(4, 2, 3), **options)
    data = cases.make_lstm_data(case)
    rng = np.random.default_rng(1)
    gradients = backward(data, forward(case, data).cache)

    def loss(at: LstmData) -> float:
        y, hn, cn, _ = forward(case, at, training=False)
        return float(np.sum(y * data.dy) + np.sum(hn * data.dhn) + np.sum(cn * data.dcn))

    def along(name: str, index: int, step: float, direction: Array) -> LstmData:
        if name in ("x", "h0", "c0"):
            return data._replace(**{name: getattr(data, name) + step * direction})
        cells = list(data.weights)
        cells[index] = cells[index]._replace(**{name: getattr(cells[index], name) + step * direction})
        return data._replace(weights=tuple(cells))

    places = [("x", 0), ("h0", 0), ("c0", 0)]
    places += [(n, k) for k in range(4) for n in LstmParameters._fields if getattr(data.weights[0], n) is not None]
    for name, index in places:
        is_data = name in ("x", "h0", "c0")
        gradient = getattr(gradients, "d" + name) if is_data else getattr(gradients.dweights[index], name)
        direction = rng.normal(size=gradient.shape)
        h = 1e-5
        difference = (loss(along(name, index, h, direction)) - loss(along(name, index, -h, direction))) / (2 * h)
        # The differences' own error: h^2 times a third derivative, and u / h times the loss.
        assert abs(np.sum(gradient * direction) - difference) < 2e-7 * max(1, abs(difference)), (name, index)


@pytest.mark.parametrize(
    ("peephole", "reads", "layers", "directions"),
    [("none", "new", 2, 2), ("diagonal", "old", 1, 2), ("full", "new", 2, 1)],
)
def test_jax_scan(jax: Any, peephole: Any, reads: str, layers: int, directions: int) -> None:
    case = LstmCase(
        5,
        3,
        4,
        9,
        layers,
        directions,
        dtype="float64",
        states=True,
        peephole=peephole,
        output_gate_reads=reads,
        batch_sizes=(3, 1, 2, 0, 3),
    )
    data = cases.make_lstm_data(case)
    net = (data.x, [reference.LstmCell(*cell.stacked()) for cell in data.weights], data.h0, data.c0)

    def loss(net: Any) -> Any:
        out = jax_lstm(jax, net, case.active, directions, reads)
        return sum((w * a).sum() for w, a in zip((data.dy, data.dhn, data.dcn), out, strict=True)), out

    with jax.enable_x64(True):
        (dx, dcells, dh0, dc0), outputs = jax.jit(jax.grad(loss, has_aux=True))(net)
    y, hn, cn, dx, dh0, dc0 = (np.asarray(a) for a in (*outputs, dx, dh0, dc0))
    cells = [LstmParameters(*(None if a is None else np.asarray(a) for a in cell)) for cell in dcells]
    oracle = lstm_oracle(case, data)
    theirs = oracle._replace(expected=LstmResults(y, hn, cn, dx, dh0, dc0, cells))
    assert max(lstm_errors(run_lstm(case, data, 2), theirs)) <= 2


@pytest.mark.parametrize("case", collect_onnx_lstm_cases(), ids=lambda case: case.name)
def test_onnx_node_cases(case: OnnxLstm, isa: str) -> None:
    """Weights of each gate in ONNX's own array, in its order i o f c, without a copy."""
    units = case.attributes["hidden_size"]
    direction = case.attributes.get("direction", b"forward").decode()
    batch_first = bool(case.attributes.get("layout", 0))
    given = case.inputs

    def of_gates(array: Array, order: str) -> tuple[Any, ...]:
        parts = dict(zip(order, array.reshape(len(order), units, *array.shape[1:]), strict=True))
        return tuple(parts.get(gate) for gate in "ifgo")

    cells = []
    for d in range(len(given["W"])):
        b = given["B"][d].reshape(2, 4 * units).sum(axis=0) if "B" in given else None
        cells.append(
            LstmWeights(
                of_gates(given["W"][d], "iofg"),
                of_gates(given["R"][d], "iofg"),
                None if b is None else of_gates(b, "iofg"),
                of_gates(given["P"][d], "iof") if "P" in given else None,
            )
        )
    x, h0, c0 = (given.get(name) for name in ("X", "initial_h", "initial_c"))
    assert x is not None
    if batch_first:
        h0, c0 = (None if s is None else s.swapaxes(0, 1) for s in (h0, c0))
    if direction == "reverse":
        x = x[:, ::-1] if batch_first else x[::-1]
    result = rg.lstm_forward(
        x,
        cells,
        h0,
        c0,
        bidirectional=direction == "bidirectional",
        batch_first=batch_first,
        lengths=given.get("sequence_lens"),
    )
    y = result.y.swapaxes(0, 1) if batch_first else result.y
    if direction == "reverse":
        y = y[::-1]
    y = y.reshape(*y.shape[:2], len(cells), units).transpose(0, 2, 1, 3)
    got = {"Y": y, "Y_h": result.hn, "Y_c": result.cn}
    if batch_first:
        got = {"Y": y.transpose(2, 0, 1, 3), "Y_h": result.hn.swapaxes(0, 1), "Y_c": result.cn.swapaxes(0, 1)}
    for name, published in case.outputs.items():
        # Both were computed in float32: a few of its units, 1.2e-7.
        np.testing.assert_allclose(got[name], published, rtol=0, atol=5e-7)


# ---- threads and memory ----------------------------------------------------------------------------------------------


def test_many_python_threads_at_once() -> None:
    """One of them has the team, the others work alone; all get the bits of a quiet process."""
    chosen = [
        LstmCase(10, 20, 24, 40, states=True),
        LstmCase(3, 2, 5, 7, layers=2),
        LstmCase(6, 3, 30, 130, peephole="full"),
        replace(CACHED, dropout=0.3),
        LstmCase(30, 1, 8, 16, dtype="float64"),
        LstmCase(5, 9, 100, 64, directions=2, peephole="diagonal"),
    ]
    datas = [cases.make_lstm_data(case) for case in chosen]
    expected = [run_lstm(case, data, 1).arrays() for case, data in zip(chosen, datas, strict=True)]
    wrong: list[Any] = []
    start = threading.Barrier(len(chosen))

    def repeat(number: int) -> None:
        try:
            start.wait()
            for round_ in range(12):
                got = run_lstm(chosen[number], datas[number], 1 + round_ % 3).arrays()
                assert_same_bits(got, expected[number])
        except BaseException as error:
            wrong.append((chosen[number].name, error))
            raise

    workers = [threading.Thread(target=repeat, args=(number,)) for number in range(len(chosen))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


SETUP = """
import os
import numpy as np
import retrograd as rg

rng = np.random.default_rng(0)
def weights(inputs, units):
    return rg.LstmWeights(*(rng.normal(0, 0.1, s).astype("f4") for s in ((4 * units, inputs), (4 * units, units))))
"""
FORK = (
    SETUP
    + """
def threads():
    return len(os.listdir("/proc/self/task"))

x, cells = rng.normal(size=(20, 32, 64)).astype("f4"), [weights(64, 96), weights(96, 96)]
rg.set_num_threads(2)

def work(number=None):
    result = rg.lstm_forward(x, cells, num_threads=number)
    gradients = rg.lstm_backward(result.y, result.cache, num_threads=number)
    return [result.y, gradients.dx, gradients.dweights[0].wh]

def same(a, b):
    return all(np.array_equal(p, q) for p, q in zip(a, b))

alone = threads()
expected = work()
assert threads() == alone + 1, (threads(), alone)
"""
)


@linux
@forks
def test_fork_after_two_threads() -> None:
    """Children, and a child of a child, work with two threads; so does the parent after them."""
    script = """
def child(depth):
    right = same(work(), expected) and threads() == 2
    if depth:
        pid = os.fork()
        if pid == 0:
            os._exit(child(depth - 1))
        right = right and os.waitpid(pid, 0)[1] == 0
    return 0 if right else 1

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(child(1))
    assert os.waitpid(pid, 0)[1] == 0
    assert same(work(), expected)
print("done")
"""
    assert python(FORK + script) == "done"


@linux
@forks
def test_fork_while_another_thread_works() -> None:
    script = """
import threading

stop = False
def busy():
    while not stop:
        work()

worker = threading.Thread(target=busy)
worker.start()
try:
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same(work(), expected) else 1)
        assert os.waitpid(pid, 0)[1] == 0
finally:
    stop = True
    worker.join()
print("done")
"""
    assert python(FORK + script) == "done"


@linux
def test_no_memory_growth_over_changing_shapes() -> None:
    """A thousand shapes, forward and backward, whose caches are a megabyte or so each."""
    script = """
import gc

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def calls(first, last):
    for number in range(first, last):
        steps, samples, units = 5 + number % 13, 1 + number // 13 % 17, 20 + number % 31
        x = np.ones((steps, samples, 7), np.float32)
        cells = [weights(7, units), weights(units, units)]
        lengths = np.arange(samples) % (steps + 1) if number % 3 == 0 else None
        result = rg.lstm_forward(x, cells, lengths=lengths, dropout=0.1, recompute=number % 5 == 0, num_threads=2)
        rg.lstm_backward(result.y, result.cache, num_threads=2)

calls(0, 300)
before = resident()
calls(300, 1300)
print((resident() - before) / 2**20)
"""
    # A thousand caches are 500 MB; the allocator may keep a few.
    assert float(python(SETUP + script)) < 12


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
