"""retrograd.lab.bench: what is timed is verified first, PyTorch does the same work, and ratios are right."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import _core, cli
from retrograd.lab import bench, cases, verify
from retrograd.lab.bench import apple as bench_apple
from retrograd.lab.bench import recurrent as bench_recurrent
from retrograd.lab.bench import rows as bench_rows
from retrograd.lab.bench import timing
from retrograd.lab.bench import train as bench_train
from retrograd.lab.commands import bench as bench_command
from support.bench import SMALL_APPLE_ROW, SMALL_LSTM_ROW, SMALL_ROW, SMALL_TRAIN_ROW, FixedTimes


def test_front_ends_and_array_functions_agree_to_the_bit() -> None:
    for case in bench.SUITES["apple"].cases:
        assert list(bench_apple.apple_failures(case, _core.isa(), [1, 2])) == [], case.name
        apple, arrays = case.make()
        assert list(apple.passes) == list(arrays.passes), case.name
        assert list(apple.results) == list(arrays.results), case.name
        before = {name: array.copy() for name, array in apple.results.items()}
        for call in apple.passes.values():
            call()
        for name, array in apple.results.items():
            assert not np.array_equal(array, before[name]), f"{case.name} does not write {name}"


def test_a_front_end_that_differs_in_one_bit_is_not_timed() -> None:
    """And the number of threads that the library uses is as it was."""
    (case,) = (case for case in bench.SUITES["apple"].cases if case.name == SMALL_APPLE_ROW)

    def off() -> bench_apple.Pair:
        apple, arrays = case.make()

        def backward() -> None:
            apple.passes["backward"]()
            apple.results["dx"].view(np.int32)[3, 5] ^= 1

        return bench_apple.Pair(apple._replace(passes={**apple.passes, "backward": backward}), arrays)

    threads = retrograd.get_num_threads()
    failures = list(bench_apple.apple_failures(case._replace(make=off), _core.isa(), [threads + 1]))
    assert failures == [f"dx is not what the array functions compute, threads {threads + 1}"]
    assert retrograd.get_num_threads() == threads


@pytest.mark.long
def test_the_same_training_in_torch(torch: Any) -> None:
    case = bench_train.TrainCase(9, 3, 5, 11)
    assert list(bench_train.train_failures(case, torch, [1, 2])) == []
    contest = prepared("train", case, torch)
    assert [[stepper.name for stepper in slot] for slot in contest.slots] == [["retrograd"], ["torch", "torch"]]
    assert contest.tokens == 15
    assert (contest.peaks.keys(), contest.notes) == ({("retrograd", "step"), ("torch", "step")}, [])


def test_training_is_verified_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 and at every number of threads, step by step."""
    case = bench_train.TrainCase(9, 3, 5, 11)
    assert list(bench_train.train_failures(case, None, [1, 2])) == []
    losses = iter([[3.0, 2.5, 2.0, 1.5], [3.0, 2.5, 2.0, 1.25], [3.0, 2.5001, 1.0, 1.5]])
    monkeypatch.setattr(bench_train, "_losses", lambda training: next(losses))
    assert list(bench_train.train_failures(case, None, [1, 2])) == [
        "the losses depend on the number of threads",
        "the loss of step 2 is 2, but 1 with float64",
    ]


def test_torch_is_asked_for_the_same_results(torch: Any) -> None:
    for case in cases.NORM_BENCH_CASES:
        samples, channels, *space = case.shape
        small = cases.NormCase(
            case.kind,
            (min(samples, 4), min(channels, 16), *(min(extent, 5) for extent in space)),
            case.layout,
            case.activation,
            num_groups=case.num_groups,
            axis=case.axis,
        )
        contest = prepared("norm", small, torch)
        assert [slot[0].name for slot in contest.slots][:2] == ["retrograd", "torch"], case.name


def test_torch_is_asked_for_the_same_lstm(torch: Any) -> None:
    """Where it has one; options are compared with the same LSTM without them."""
    for case in cases.LSTM_BENCH_CASES:
        contest = prepared("lstm", shortened(case), torch)
        rivals = [slot[0].name for slot in contest.slots]
        own = case.peephole != "none" or case.activations != cases.LSTM_STANDARD
        expected = ["retrograd", *["plain"] * (own or case.dropout > 0), *["torch"] * (not own), "sgemm"]
        assert (rivals, contest.notes) == (expected, []), case.name


@pytest.mark.parametrize("of", [cases.LSTM_OPTION_BENCH_CASES, cases.GRU_BENCH_CASES, cases.RNN_BENCH_CASES])
def test_torch_and_jax_are_asked_for_the_same_cell(of: tuple[cases.RecurrentCase, ...], torch: Any, jax: Any) -> None:
    """PyTorch for plain cells, ragged batches, projections and, by a loop over steps, resets; JAX for plain cells."""
    for case in of:
        contest = prepared("gru", shortened(case), torch)
        is_plain = bench_recurrent.plain_case(case) == case
        in_torch = is_plain or case.reset or getattr(case, "projection", 0)
        expected = [["plain"], []][is_plain] + ["torch"] * bool(in_torch) + ["jax"] * is_plain
        rivals = [slot[0].name for slot in contest.slots]
        assert (rivals, contest.notes) == (["retrograd", *expected, "sgemm"], []), case.name


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_rival_that_differs_is_not_timed(library: str, torch: Any, jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = {"torch": bench_recurrent._Torch, "jax": bench_recurrent._Jax}[library]
    right = rival.results
    monkeypatch.setattr(rival, "results", lambda self: [1.1 * array for array in right(self)])
    contest = prepared("gru", cases.GruCase(4, 3, 5, 7), torch)
    assert library not in [slot[0].name for slot in contest.slots]
    assert contest.notes == [f"{library} gives a different result: not timed"]


def shortened(case: Any) -> Any:
    lengths = None if case.lengths is None else tuple(1 + length % 6 for length in case.lengths[:5])
    sizes = {"steps": 6, "samples": min(case.samples, 5), "inputs": min(case.inputs, 7), "units": min(case.units, 9)}
    if getattr(case, "projection", 0):
        sizes["projection"] = 4
    return dataclasses.replace(case, lengths=lengths, **sizes)


def prepared(suite: str, case: Any, torch: Any) -> timing.Contest:
    with contextlib.ExitStack() as stack:
        machine = timing.Machine("a machine", _core.isa(), torch)
        data = bench.SUITES[suite].make_data(case)
        return bench.SUITES[suite].contest(case, data, 1, machine, stack)


def test_an_lstm_is_verified_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short against the oracle, whole against float64."""
    case = cases.LstmCase(40, 3, 4, 5, lengths=(40, 7, 20))
    seen = []

    def wrong(problems: list[cases.LstmCase], *others: object) -> list[verify.VerifyRow]:
        seen.extend(problems)
        errors = verify.LstmErrors(*[17.0 * (name == "dwh") for name in verify.LstmErrors._fields])
        return [verify.VerifyRow(problems[0], "scalar", 1, errors, same_bits=True, ok=False)]

    assert list(bench_recurrent.recurrent_failures(case, _core.isa(), [1, 2])) == []
    monkeypatch.setattr(bench_recurrent, "verify_lstm", wrong)
    assert list(bench_recurrent.recurrent_failures(case, _core.isa(), [1])) == [
        "dwh is off by 17 tolerances, threads 1"
    ]
    assert (seen[0].steps, seen[0].lengths) == (8, (8, 7, 8))
    monkeypatch.setattr(bench_recurrent, "verify_lstm", lambda *arguments: [])
    monkeypatch.setattr(bench_recurrent, "_in_float64", lambda data: data._replace(x=2 * data.x))
    assert list(bench_recurrent.recurrent_failures(case, _core.isa(), [1])) == ["float32 and float64 differ, threads 1"]


@pytest.mark.parametrize(
    "case", [cases.GruCase(20, 3, 4, 5, lengths=(20, 7, 9)), cases.RnnCase(20, 3, 4, 5, norm="haste")]
)
def test_other_cells_are_verified_before_they_are_timed(
    case: cases.GruCase | cases.RnnCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(bench_recurrent.recurrent_failures(case, _core.isa(), [1, 2])) == []
    name = f"verify_{case.kind_name}"
    row = verify.VerifyRow(case, "scalar", 2, verify.LstmErrors(*[3.0, *[0.0] * 14]), same_bits=True, ok=False)
    monkeypatch.setattr(bench_recurrent, name, lambda *arguments: [row])
    assert list(bench_recurrent.recurrent_failures(case, _core.isa(), [1])) == ["y is off by 3 tolerances, threads 2"]


@pytest.mark.parametrize(
    ("suite", "row"),
    [("norm", SMALL_ROW), ("lstm", SMALL_LSTM_ROW), ("apple", SMALL_APPLE_ROW), ("train", SMALL_TRAIN_ROW)],
)
def test_bench_does_not_time_what_is_wrong(
    suite: str, row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bench.SUITES[suite]._replace(failures=lambda case, isa, threads: iter(["dx is off by 17 tolerances"]))
    monkeypatch.setattr(bench_rows, "SUITES", {suite: bad})
    monkeypatch.setattr(bench_rows, "_bench_case", lambda *arguments: pytest.fail("timed"))
    monkeypatch.setattr(bench_rows, "import_torch", lambda: None)
    assert cli.main(["bench", suite, "--rows", row, "--threads", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{row}  WRONG" in out
    assert "dx is off by 17 tolerances" in out


def measured(contest: timing.Contest, torch: Any) -> dict[tuple[str, str], bench.BenchRow]:
    times = timing.take_turns(contest.slots, rounds=4, budget=1e-6)
    machine = timing.Machine("a machine", "scalar", torch)
    rows = [
        row
        for index, pass_ in enumerate(contest.passes)
        for row in bench_rows._rows_of_pass("a_row", pass_, index, 2, contest, times, machine)
    ]
    return {(row.provider, row.pass_): row for row in rows}


@pytest.mark.long
def test_ratios_and_shares(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Against torch, and against the better of the streaming passes: each pass has its own."""
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0.0)
    slots: list[list[Any]] = [
        [FixedTimes("retrograd", 1.0, 2.0)],
        [FixedTimes("torch", 3.0, 8.0)],
        [FixedTimes("stream", 0.5, 1.0), FixedTimes("stream", 0.4, 1.5)],
    ]
    rows = measured(timing.Contest(slots, "stream", []), torch)
    assert {key: (row.p50, row.ratio_vs_torch, row.share_of_bound) for key, row in rows.items()} == {
        ("retrograd", "forward"): (1.0, 3.0, 0.4),
        ("retrograd", "backward"): (2.0, 4.0, 0.5),
        ("torch", "forward"): (3.0, None, pytest.approx(0.4 / 3)),
        ("torch", "backward"): (8.0, None, 0.125),
        ("stream", "forward"): (0.4, None, None),
        ("stream", "backward"): (1.0, None, None),
    }


def test_operations_and_what_options_cost(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0.0)
    slots: list[list[Any]] = [
        [FixedTimes("retrograd", 1.0, 2.0, 3.0)],
        [FixedTimes("plain", 0.8, 2.0, 2.8)],
        [FixedTimes("sgemm", 0.5, 1.0, 1.5)],
    ]
    contest = timing.Contest(slots, "sgemm", [], ("forward", "backward", "step"), flops=(1e9, 2e9, 3e9))
    rows = measured(contest, torch)
    assert {key: (row.ratio_vs_plain, row.share_of_bound, row.gflops) for key, row in rows.items()} == {
        ("retrograd", "forward"): (0.8, 0.5, 1.0),
        ("retrograd", "backward"): (1.0, 0.5, 1.0),
        ("retrograd", "step"): (pytest.approx(2.8 / 3), 0.5, 1.0),
        ("plain", "forward"): (None, 0.625, 1.25),
        ("plain", "backward"): (None, 0.5, 1.0),
        ("plain", "step"): (None, pytest.approx(1.5 / 2.8), pytest.approx(3 / 2.8)),
        ("sgemm", "forward"): (None, None, 2.0),
        ("sgemm", "backward"): (None, None, 2.0),
        ("sgemm", "step"): (None, None, 2.0),
    }
    result = bench.BenchResult("a_row", 2, tuple(rows.values()))
    assert [line["over plain"] for line in bench_command._bench_lines(result)] == ["+25%", "+0%", "+7%"]


def test_what_a_front_end_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of differences, which is not the difference of medians when the machine changes its pace."""
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0.0)

    class Slowing(FixedTimes):
        def step(self) -> tuple[float, ...]:
            self.calls = getattr(self, "calls", -1) + 1
            return (self.times[self.calls],)

    monkeypatch.setattr(timing, "_turn", lambda stepper, seconds: [stepper.step()])
    apple, arrays = Slowing("retrograd", 0, 11e-6, 25e-6, 39e-6, 40e-6), Slowing("arrays", 0, 9e-6, 19e-6, 20e-6, 38e-6)
    rows = measured(timing.Contest([[apple], [arrays]], None, [], ("step",)), None)
    assert rows["retrograd", "step"].added == pytest.approx(4e-6)
    assert (rows["arrays", "step"].added, rows["retrograd", "step"].share_of_bound) == (None, None)
    (line,) = bench_command._bench_lines(bench.BenchResult("a_row", 2, tuple(rows.values())))
    assert (line["added µs"], line["arrays µs"]) == ("+4.0", "19.5")


def test_operations_of_real_steps() -> None:
    """Of forward: 8 (I + H) H for each step, sample, direction and layer."""
    assert bench_recurrent._flops(cases.LstmCase(5, 3, 7, 11))[0] == 5 * 3 * 8 * (7 + 11) * 11
    ragged = cases.LstmCase(5, 3, 7, 11, 2, 2, lengths=(5, 0, 2))
    assert bench_recurrent._flops(ragged) == tuple(k * 7 * 8 * 2 * (18 + 33) * 11 for k in (1, 2, 3))
    assert bench_recurrent._flops(cases.GruCase(5, 3, 7, 11))[0] == 5 * 3 * 6 * (7 + 11) * 11
    assert bench_recurrent._flops(cases.RnnCase(5, 3, 7, 11, 2))[0] == 5 * 3 * 2 * (18 + 22) * 11
    projected = cases.LstmCase(5, 3, 7, 11, projection=4)
    assert bench_recurrent._flops(projected)[0] == 5 * 3 * 2 * (4 * (7 + 4) * 11 + 11 * 4)


def test_every_public_function_has_an_overhead_row() -> None:
    functions = {name for name in retrograd.__all__ if inspect.isroutine(getattr(retrograd, name))}
    assert {name.removeprefix("overhead_") for name in bench.overhead_calls()} == functions


def test_caches_are_described() -> None:
    try:
        _core.override_caches(48 << 10, 1280 << 10, 105 << 20, 56)
        assert bench.cache_sizes() == "L1 48 KiB, L2 1280 KiB, last level 105 MiB shared by 56 CPUs"
        _core.override_caches(32 << 10, 1 << 20, 1 << 20, 1)
        assert bench.cache_sizes() == "L1 32 KiB, L2 1 MiB, last level 1 MiB shared by 1 CPU"
    finally:
        _core.restore_caches()
