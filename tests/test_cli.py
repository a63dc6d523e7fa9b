"""The command line, as a process."""

from __future__ import annotations

import csv
import inspect
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import _core, bench, cases, cli, verify

SMALL_CASE = "layer_norm_n7c17"
SMALL_ROW = "layer_norm_n64c256"


def run(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "retrograd", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH that makes PyTorch look absent: quicker, and the same whether it is there or not."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise ImportError('hidden')\n")
    return str(folder)


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info_says_what_is_in_force() -> None:
    result = run("info", RETROGRAD_ISA="scalar", RETROGRAD_NUM_THREADS="3")
    assert result.returncode == 0, result.stderr
    lines = dict(re.split(r"\s{2,}|(?<=^data types) ", line, maxsplit=1) for line in result.stdout.splitlines())
    assert lines["retrograd"] == retrograd.__version__
    assert lines["ISA level"].startswith("scalar (RETROGRAD_ISA=scalar; this machine can run scalar")
    assert all(level in lines["ISA level"] for level in _core.isa_levels())
    assert lines["threads"] == "3 (RETROGRAD_NUM_THREADS=3)"
    assert lines["BLAS"]
    assert lines["NumPy"] == np.__version__
    assert "bfloat16" in lines["data types"]


def test_info_says_where_the_threads_come_from() -> None:
    result = run("info", RETROGRAD_NUM_THREADS="")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("threads")]
    assert f"{retrograd._threads.default_num_threads()} (CPUs this process may run on" in line or "quota" in line


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).with_name("retrograd")
    if not command.exists():
        pytest.skip("the package's command is not beside this interpreter")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, f"retrograd {retrograd.__version__}\n")


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_prints_one_plain_line_per_case() -> None:
    result = run("verify", "--rows", SMALL_CASE, "layer_norm_n7c1", "--threads", "1", "2", "--isa", "scalar")
    assert result.returncode == 0, result.stderr
    header, *rows, summary = result.stdout.splitlines()
    assert header.split() == ["case", "error", "of", "at"]
    assert sorted(row.split()[0] for row in rows) == ["layer_norm_n7c1", SMALL_CASE]
    assert all(0 <= float(row.split()[1]) <= 1 for row in rows)
    assert summary.startswith("2 cases, 4 runs (scalar; 1, 2 threads): all right")
    assert "\x1b" not in result.stdout


def test_verify_fails_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*arguments: object, **options: object) -> list[verify.NormRow]:
        (case,) = [case for case in cases.NORM_VERIFY_CASES if case.name == SMALL_CASE]
        errors = verify.NormErrors(0.1, 0.1, 0.1, 17.0, 0.1, 0.1)
        return [verify.NormRow(case, "scalar", 1, errors, same_bits=True, ok=False)]

    monkeypatch.setattr(verify, "verify_norm", wrong)
    assert cli.main(["verify", "--rows", SMALL_CASE]) == 1
    out = capsys.readouterr().out
    assert "17.000  dx" in out
    assert "WRONG" in out


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench_writes_csv_and_plain_lines(tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    chosen = ["--rows", SMALL_ROW, "overhead_layer_norm_*", "--threads", "1"]
    result = run("bench", "norm", "--quick", *chosen, "--csv", str(path), PYTHONPATH=without_torch)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    notes = [line for line in lines if "other processes used" in line]  # of a machine that is not quiet
    assert [line.split()[:3] for line in lines[1:-1] if line not in notes] == [
        [SMALL_ROW, "forward", "1"],
        [SMALL_ROW, "backward", "1"],
        ["overhead_layer_norm_forward", "call", "1"],
        ["overhead_layer_norm_backward", "call", "1"],
    ]
    assert "PyTorch is not installed: own times only" in lines[-1]

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = "case,provider,pass,threads,isa,p20,p50,p80,ratio_vs_torch,share_of_bound,device,version"
    assert ",".join(rows[0]) == columns
    own = [row for row in rows if row["provider"] == "retrograd"]
    assert [(row["case"], row["pass"]) for row in own] == [
        (SMALL_ROW, "forward"),
        (SMALL_ROW, "backward"),
        ("overhead_layer_norm_forward", "call"),
        ("overhead_layer_norm_backward", "call"),
    ]
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) < 1
        assert row["isa"] == _core.isa()
        assert row["version"] == retrograd.__version__
        assert row["ratio_vs_torch"] == ""
    if hasattr(_core, "stream_seconds"):
        assert {row["provider"] for row in rows} == {"retrograd", "stream"}
        assert all(float(row["share_of_bound"]) > 0 for row in own[:2])


@pytest.mark.usefixtures("torch")
def test_bench_takes_turns_with_torch(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    chosen = ["--rows", SMALL_ROW, "--threads", "1", "--csv", str(path)]
    result = run("bench", "norm", "--quick", *chosen)
    assert result.returncode == 0, result.stderr
    assert "computes something else" not in result.stdout
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"retrograd", "torch"} <= {row["provider"] for row in rows}
    assert all(float(row["ratio_vs_torch"]) > 0 for row in rows if row["provider"] == "retrograd")


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
        data = cases.make_norm_data(small)
        ours = bench._Ours(small, data, threads=1)
        ours.step()
        assert bench._agree(ours, bench._Torch(torch, small, data)), case.name


def test_bench_does_not_time_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_verify", lambda case, isa, threads: ["dx is off by 17 tolerances at 1 threads"])
    monkeypatch.setattr(bench, "_bench_case", lambda *arguments: pytest.fail("timed"))
    monkeypatch.setattr(bench, "_import_torch", lambda: None)
    assert cli.main(["bench", "norm", "--rows", SMALL_ROW, "--threads", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{SMALL_ROW}  WRONG" in out
    assert "dx is off by 17 tolerances" in out


class _Fixed:
    """Takes what it is told to take."""

    def __init__(self, name: str, forward: float, backward: float) -> None:
        self.name, self.times = name, (forward, backward)

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float]:
        return self.times


def test_ratios_and_shares(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Against torch, and against the better of the streaming passes: each pass has its own."""
    monkeypatch.setattr(bench, "_SETTLE_SECONDS", 0.0)
    slots = [
        [_Fixed("retrograd", 1.0, 2.0)],
        [_Fixed("torch", 3.0, 8.0)],
        [_Fixed("stream", 0.5, 1.0), _Fixed("stream", 0.4, 1.5)],
    ]
    times = bench._take_turns(slots, rounds=4, budget=1e-6)
    measured = {slot[0].name: record for slot, record in zip(slots, times, strict=True)}
    machine = bench._Machine("a machine", "scalar", torch)
    rows = [row for index in range(2) for row in bench._rows_of_pass("a_row", index, 2, measured, machine)]
    found = {(row.provider, row.pass_): (row.p50, row.ratio_vs_torch, row.share_of_bound) for row in rows}
    assert found == {
        ("retrograd", "forward"): (1.0, 3.0, 0.4),
        ("retrograd", "backward"): (2.0, 4.0, 0.5),
        ("torch", "forward"): (3.0, None, pytest.approx(0.4 / 3)),
        ("torch", "backward"): (8.0, None, 0.125),
        ("stream", "forward"): (0.4, None, None),
        ("stream", "backward"): (1.0, None, None),
    }


def test_every_public_function_has_an_overhead_row() -> None:
    functions = {name for name in retrograd.__all__ if inspect.isroutine(getattr(retrograd, name))}
    assert {name.removeprefix("overhead_") for name in bench.overhead_calls()} == functions


def test_bench_lists_its_rows() -> None:
    result = run("bench", "norm", "--list")
    assert result.returncode == 0
    assert result.stdout.splitlines() == bench.bench_names()
    assert len(set(bench.bench_names())) == len(bench.bench_names())


# ---- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["bench"], "SUITE"),
        (["bench", "norm", "--rows", "no_such_row"], "no row matches no_such_row"),
        (["bench", "norm", "--threads", "0"], "0 is not from 1 to 4096"),
        (["bench", "norm", "--rounds", "many"], "many"),
        (["bench", "norm", "--budget", "-1"], "not a positive number"),
        (["bench", "norm", "--rows", SMALL_ROW, "--csv", "/no/such/folder/out.csv"], "/no/such/folder/out.csv"),
        (["verify", "--rows", "no_such_case"], "no case matches no_such_case"),
        (["verify", "--isa", "sse9"], "sse9"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_2(arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["verify", "--help"], ["bench", "--help"], ["bench", "norm", "--help"]]
)
def test_help(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: retrograd")


def test_interrupt_ends_with_130(tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    command = [sys.executable, "-m", "retrograd", "bench", "norm", "--budget", "60", "--rows", SMALL_ROW]
    environment = {**os.environ, "PYTHONPATH": without_torch}
    with subprocess.Popen(
        [*command, "--csv", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert path.read_text().startswith("case,provider,pass")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m retrograd verify --rows 'batch_norm_*' --isa scalar --threads 1"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.startswith("case")
    assert "Traceback" not in result.stderr


def test_a_terminal_gets_a_table() -> None:
    """Box drawing, and a progress bar that leaves nothing behind it."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-m", "retrograd", "verify", "--rows", SMALL_CASE], stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not data:
                break
            shown += data
        os.close(parent)
    text = shown.decode()
    assert process.returncode == 0, text
    assert SMALL_CASE in text
    assert "─" in text
    assert "all right" in text
