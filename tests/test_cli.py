"""The command line, as a process."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import retrograd
from retrograd import _core, cli
from retrograd.lab import bench, cases, verify
from retrograd.lab.bench import train as bench_train
from support.bench import SMALL_APPLE_ROW, SMALL_LSTM_ROW, SMALL_ROW, SMALL_TRAIN_ROW
from support.waiting import PATIENCE, wait_until

SMALL_CASE, SMALL_LSTM_CASE = "layer_norm_n7c17", "lstm_t5n3i4h7"


def run(*arguments: str, timeout: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "retrograd", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


def with_torch_as(folder: Path, text: str) -> str:
    """A PYTHONPATH with another PyTorch in front of what it was."""
    (folder / "torch.py").write_text(text)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH that makes PyTorch look absent: quicker, and the same whether it is there or not."""
    return with_torch_as(tmp_path_factory.mktemp("without_torch"), "raise ImportError('hidden')\n")


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info_says_what_is_in_force() -> None:
    result = run("info", RETROGRAD_ISA="scalar", RETROGRAD_NUM_THREADS="3")
    assert result.returncode == 0, result.stderr
    lines = dict(re.split(r"\s{2,}|(?<=^data types) ", line, maxsplit=1) for line in result.stdout.splitlines())
    assert lines["retrograd"] == retrograd.__version__
    assert lines["ISA level"].startswith("scalar (RETROGRAD_ISA=scalar; this machine can run scalar")
    assert all(level in lines["ISA level"] for level in _core.isa_levels())
    assert lines["caches"] == bench.cache_sizes()
    assert lines["threads"] == "3 (RETROGRAD_NUM_THREADS=3)"
    assert lines["pool"].startswith("retrograd's own; PyTorch's workers in programs that import")
    assert lines["BLAS"] == "none: matrix products are retrograd's own kernels"
    assert lines["NumPy"] == np.__version__
    assert "bfloat16" in lines["data types"]


def test_info_says_where_the_threads_come_from() -> None:
    result = run("info", RETROGRAD_NUM_THREADS="")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("threads")]
    assert f"{retrograd.ops._threads.default_num_threads()} (CPUs this process may run on" in line or "quota" in line


def test_info_as_json_is_what_is_in_force() -> None:
    result = run("info", "--json", RETROGRAD_ISA="scalar", RETROGRAD_NUM_THREADS="3")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["retrograd"] == retrograd.__version__
    assert facts["processor"] == bench.cpu_model()
    assert tuple(facts["caches"].values()) == _core.caches()
    assert facts["isa"] == {"level": "scalar", "available": list(_core.isa_levels()), "requested": "scalar"}
    assert facts["threads"]["default"] == 3
    assert facts["threads"]["requested"] == "3"
    assert facts["numpy"] == np.__version__
    assert facts["python"] == platform.python_version()
    quota = facts["threads"]["cgroup_quota"]
    assert quota is None or quota > 0
    facts = json.loads(run("info", "--json", RETROGRAD_NUM_THREADS="").stdout)
    assert facts["threads"]["default"] == retrograd.ops._threads.default_num_threads()
    assert facts["threads"]["requested"] is None


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).with_name("retrograd")
    if not command.exists():
        pytest.skip("the package's command is not beside this interpreter")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stdout) == (0, f"retrograd {retrograd.__version__}\n")


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_prints_one_plain_line_per_case() -> None:
    result = run("verify", "--rows", SMALL_CASE, SMALL_LSTM_CASE, "--threads", "1", "2", "--isa", "scalar")
    assert result.returncode == 0, result.stderr
    header, *rows, summary = result.stdout.splitlines()
    assert header.split() == ["case", "error", "result", "ISA"]
    assert [row.split()[0] for row in rows] == [SMALL_CASE, SMALL_LSTM_CASE]
    assert all(0 <= float(row.split()[1]) <= 1 for row in rows)
    assert summary.startswith("2 cases, 4 runs (scalar; 1, 2 threads): all within tolerance")
    assert "\x1b" not in result.stdout


def test_verify_fails_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*arguments: object, **options: object) -> list[verify.VerifyRow]:
        (case,) = [case for case in cases.NORM_VERIFY_CASES if case.name == SMALL_CASE]
        errors = verify.NormErrors(0.1, 0.1, 0.1, 17.0, 0.1, 0.1)
        return [verify.VerifyRow(case, "scalar", 1, errors, same_bits=True, ok=False)]

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
    assert "PyTorch is not installed: only retrograd is timed" in lines[-1]

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = "case,provider,pass,threads,isa,p20,p50,p80,spread,ratio_vs_torch,ratio_vs_plain,over_retrograd"
    columns += ",share_of_bound,share_of_peak,gflops,added,tokens_per_second,peak_bytes,device,caches,environment"
    assert ",".join(rows[0]) == columns + ",version"
    own = [row for row in rows if row["provider"] == "retrograd"]
    assert [(row["case"], row["pass"]) for row in own] == [
        (SMALL_ROW, "forward"),
        (SMALL_ROW, "backward"),
        ("overhead_layer_norm_forward", "call"),
        ("overhead_layer_norm_backward", "call"),
    ]
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) < math.inf
        assert row["isa"] == _core.isa()
        assert row["version"] == retrograd.__version__
        assert (row["over_retrograd"] == "") == (row["provider"] == "retrograd")
        for column in ("ratio_vs_torch", "ratio_vs_plain", "gflops", "added", "tokens_per_second", "peak_bytes"):
            assert row[column] == "", column
    assert {row["provider"] for row in rows} == {"retrograd", "stream"}
    assert all(float(row["share_of_bound"]) > 0 for row in own[:2])


def read_rows(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    with path.open(newline="") as file:
        return {(row["case"], row["provider"], row["pass"]): row for row in csv.DictReader(file)}


def test_bench_lstm_against_the_matrix_product(tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    chosen = ["--rows", SMALL_LSTM_ROW, "overhead_lstm_*", "overhead_layer_norm_forward", "--threads", "1"]
    result = run(
        "bench", "lstm", "--rounds", "2", "--budget", "0.01", *chosen, "--csv", str(path), PYTHONPATH=without_torch
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].endswith("of bound  GFLOPS  over plain")
    rows = read_rows(path)
    assert {(provider, pass_) for case, provider, pass_ in rows if case == SMALL_LSTM_ROW} == {
        (provider, pass_) for provider in ("retrograd", "sgemm") for pass_ in ("forward", "backward", "step")
    }
    assert {case for case, _, pass_ in rows if pass_ == "call"} == {
        f"overhead_lstm_{name}" for name in ("forward", "backward", "cache", "cache_size", "step", "step_backward")
    }
    forward, step, limit = (
        rows[(SMALL_LSTM_ROW, *key)] for key in (("retrograd", "forward"), ("retrograd", "step"), ("sgemm", "step"))
    )
    flops = 20 * 8 * (4 + 16) * 16
    assert float(forward["gflops"]) == pytest.approx(flops / float(forward["p50"]) / 1e9, rel=1e-4)
    assert float(step["gflops"]) == pytest.approx(3 * flops / float(step["p50"]) / 1e9, rel=1e-4)
    assert 0 < float(step["share_of_bound"]) < math.inf
    assert 0 < float(limit["gflops"]) < math.inf
    assert limit["version"] == np.__version__


@pytest.mark.long
def test_bench_conv_has_pooling_and_memory(tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    rows = ["conv_n64c1o16s8k3", "max_pool_n32c32s20k2"]
    chosen = ["--rows", *rows, "--rounds", "2", "--budget", "0.01", "--threads", "1", "--csv", str(path)]
    result = run("bench", "conv", *chosen, PYTHONPATH=without_torch)
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert header.split()[-6:] == ["of", "bound", "GFLOPS", "MiB", "torch", "MiB"]
    measured = read_rows(path)
    passes = ("forward", "backward", "step")
    assert set(measured) == {
        (case, provider, pass_)
        for case, providers in zip(rows, (("retrograd", "sgemm"), ("retrograd",)), strict=True)
        for provider in providers
        for pass_ in passes
    }
    printed = {(cells[0], cells[1]): cells for cells in map(str.split, lines)}
    for case, pass_ in [(case, pass_) for case in rows for pass_ in passes]:
        row = measured[case, "retrograd", pass_]
        assert (row["gflops"] == "") == (row["share_of_bound"] == "") == (case == rows[1])
        if Path("/proc/self/status").exists():
            assert 0 < int(row["peak_bytes"]) < 4 << 20
            assert printed[case, pass_][-1] == f"{int(row['peak_bytes']) / 2**20:.1f}"


@pytest.mark.long
def test_bench_at_a_lower_level(tmp_path: Path) -> None:
    """PyTorch is loaded after its level is set, BLAS runs at that level, and the file records it."""
    path, fake = tmp_path / "out.csv", tmp_path / "fake"
    fake.mkdir()
    shown = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "RETROGRAD_ISA")
    code = f"import os, sys\nprint(*map(os.environ.get, {shown}), file=sys.stderr)\nraise ImportError\n"
    arguments = ["bench", "lstm", "--isa", "scalar", "--quick", "--rows", SMALL_LSTM_ROW, "--threads", "1"]
    result = run(*arguments, "--csv", str(path), PYTHONPATH=with_torch_as(fake, code), ATEN_CPU_CAPABILITY="avx2")
    assert result.returncode == 0, result.stderr
    core = "Nehalem" if platform.machine() == "x86_64" else "ARMV8"
    assert set(result.stderr.splitlines()) == {f"default SSE41 {core} scalar"}
    conditions, _, restricted = result.stdout.splitlines()[-1].partition("; restricted by ")
    assert "; scalar, retrograd" in conditions
    assert "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41" in restricted
    rows = read_rows(path)
    assert {(provider, row["isa"].lower()) for (_, provider, _), row in rows.items()} <= {
        ("retrograd", "scalar"),
        ("sgemm", core.lower()),
        ("sgemm", ""),  # a BLAS that does not say
    }
    assert {row["environment"] for row in rows.values()} == {restricted}
    assert {row["caches"] for row in rows.values()} == {bench.cache_sizes()}


def test_bench_apple_against_the_array_functions(tmp_path: Path) -> None:
    path, trap = tmp_path / "out.csv", tmp_path / "trap"
    trap.mkdir()
    trapped = with_torch_as(trap, "raise SystemExit('the front ends have no need of PyTorch')\n")
    chosen = ["--rows", SMALL_APPLE_ROW, "bnns_adam_*", "mps_*", "--threads", "2", "--csv", str(path)]
    result = run("bench", "apple", "--quick", *chosen, PYTHONPATH=trapped)
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert header.split("  ")[-2:] == ["arrays µs", "added µs"]
    assert "torch" not in header
    rows = read_rows(path)
    passes = {
        SMALL_APPLE_ROW: ("forward", "backward"),
        "bnns_adam_4_parameters": ("step",),
        "mps_batch_norm_n128c256": ("forward", "backward"),
    }
    keys = [(case, pass_) for case, names in passes.items() for pass_ in names]
    assert set(rows) == {(case, provider, pass_) for case, pass_ in keys for provider in ("retrograd", "arrays")}
    printed = {(cells[0], cells[1]): cells for cells in map(str.split, lines)}
    for case, pass_ in keys:
        own, arrays = (rows[case, provider, pass_] for provider in ("retrograd", "arrays"))
        assert float(printed[case, pass_][-1]) == pytest.approx(1e6 * float(own["added"]), abs=0.06)
        assert arrays["added"] == ""
        assert (own["threads"], own["ratio_vs_torch"], own["share_of_bound"]) == ("2", "", "")


def test_bench_train_counts_tokens_and_memory(tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    chosen = ["--rows", SMALL_TRAIN_ROW, "--threads", "2", "--csv", str(path)]
    result = run("bench", "train", "--quick", *chosen, PYTHONPATH=without_torch)
    assert result.returncode == 0, result.stderr
    header, line, *_ = result.stdout.splitlines()
    assert header.split()[-4:] == ["tokens/s", "MiB", "torch", "MiB"]
    assert "of bound" not in header
    (row,) = read_rows(path).values()
    assert (row["provider"], row["pass"], row["threads"], row["gflops"]) == ("retrograd", "step", "2", "")
    assert float(row["tokens_per_second"]) == pytest.approx(64 / float(row["p50"]), rel=1e-4)
    if Path("/proc/self/status").exists():
        # Parameters, gradients, two moments and the LSTM's cache; some may be in memory that the process had before.
        weights = bench_train.make_train_data(bench_train.TRAIN_CASES[0]).weights
        assert 0 < int(row["peak_bytes"]) < 32 * sum(array.nbytes for array in weights.values())
        assert line.split()[-1] == f"{int(row['peak_bytes']) / 2**20:.1f}"


@pytest.mark.long
@pytest.mark.usefixtures("torch")
def test_bench_takes_turns_with_torch(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    chosen = ["--rows", SMALL_ROW, SMALL_LSTM_ROW, SMALL_TRAIN_ROW, "--threads", "1", "--csv", str(path)]
    result = run("bench", "all", "--quick", *chosen)
    assert result.returncode == 0, result.stderr
    assert "gives a different result" not in result.stdout
    rows = read_rows(path)
    for case, last in ((SMALL_ROW, "backward"), (SMALL_LSTM_ROW, "step"), (SMALL_TRAIN_ROW, "step")):
        assert float(rows[case, "torch", last]["p50"]) > 0
        assert float(rows[case, "retrograd", last]["ratio_vs_torch"]) > 0


def test_bench_lists_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    names = {suite: bench.bench_names([suite]) for suite in bench.SUITES}
    names["all"] = bench.bench_names()
    for suite, expected in names.items():
        assert cli.main(["bench", suite, "--list"]) == 0
        assert capsys.readouterr().out.splitlines() == expected
    suites = ("norm", "lstm", "gru", "conv", "scan", "products", "apple", "train", "steps", "torch", "jax")
    assert names["all"] == [name for suite in suites for name in names[suite]]
    assert len(set(names["all"])) == len(names["all"])
    overheads = [name for name in names["all"] if name.startswith("overhead_")]
    assert sorted(overheads) == sorted(bench.overhead_calls())


# ---- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["bench"], "SUITE"),
        (["bench", "norm", "--rows", "no_such_row"], "no row matches no_such_row"),
        (["bench", "lstm", "--rows", SMALL_ROW], f"no row matches {SMALL_ROW}"),
        (["bench", "norm", "--threads", "0"], "0 is not from 1 to 4096"),
        (["bench", "norm", "--rounds", "many"], "many"),
        (["bench", "norm", "--isa", "sse9"], "--isa sse9: this machine can run scalar"),
        (["bench", "norm", "--compare", "no_such.csv"], "no_such.csv: No such file"),
        (["bench", "norm", "--threshold", "0.9"], "0.9 is not a ratio of at least 1"),
        (["bench", "compare", "a.csv"], "NEW.csv"),
        (["bench", "norm", "--budget", "-1"], "not a positive number"),
        (["bench", "norm", "--rows", SMALL_ROW, "--csv", "/no/such/folder/out.csv"], "/no/such/folder/out.csv"),
        (["verify", "--rows", "no_such_case"], "no case matches no_such_case"),
        (["verify", "--isa", "sse9"], "sse9"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_2(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tarin", "text"], "retrograd: error: unknown command 'tarin'; did you mean train?"),
        (["train", "tetx"], "retrograd train: error: unknown kind 'tetx'; did you mean text?"),
        (["bench", "layers"], "retrograd bench: error: unknown suite 'layers'; choose from norm, lstm, gru, "),
        (["train", "text", "--hiden", "3"], "retrograd train text: error: unknown option --hiden; did you mean --hid"),
        (["train", "series", "x.csv", "--traget=y"], "train series: error: unknown option --traget; did you mean --ta"),
        (["bench", "norm", "--rows", "a", "--quik"], "unknown option --quik; did you mean --quick?"),
        (["bench", "programs", "-list"], "unknown option -list; did you mean --list?"),
        # An unknown option counts before the argument that is missing because its value was taken for one.
        (["bench", "compare", "--treshold", "1.2"], "unknown option --treshold; did you mean --threshold?"),
        (["convert", "--overwite"], "unknown option --overwite; did you mean --overwrite?"),
        (["info", "--zzz"], "unknown option --zzz; 'retrograd info --help' lists the options"),
        (["sample", "no_such", "--prompt", "--- no"], "no_such"),  # with a space it is a value
        (["train", "text", "--momentum", "-.5"], "argument --momentum: -.5 is not from 0 to 1"),
        (["sample", "x", "--prompt", "-zz"], "unknown option -zz; did you mean --prompt=-zz?"),
        (["train", "--steps", "3", "text"], "--steps is an option of 'retrograd train text', and comes after it"),
        (["--steps", "3", "train", "series"], "--steps is an option of 'retrograd train series', and comes after it"),
        (["verify", "layer_norm_*"], "retrograd verify: error: unexpected argument layer_norm_*"),
        (["train", "text", "--optimizer", "adm"], "argument --optimizer: invalid choice 'adm'; did you mean adam?"),
        (["train", "text", "--schedule", "x"], "argument --schedule: invalid choice 'x'; choose from cosine, constant"),
        (["info", "--js\x1b"], "unknown option --js\u241b"),
    ],
    ids=lambda value: " ".join(value).replace("\x1b", "ESC") if isinstance(value, list) else "",
)
def test_a_misspelt_word_is_answered_with_the_nearest(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as end:  # argparse's
        code = end.code
    shown = capsys.readouterr()
    assert code == 2
    assert complaint in shown.err.splitlines()[-1]
    assert shown.out == ""


def test_options_may_be_shortened_and_files_named_like_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--js"]) == 0
    assert json.loads(capsys.readouterr().out)["retrograd"] == retrograd.__version__
    options = cli._parser().parse_args(["train", "text", "--hid", "3", "--", "-file", "--hiden"])
    assert (options.hidden, options.files) == (3, ["-file", "--hiden"])


def test_bad_arguments_of_a_process_end_with_2() -> None:
    result = run("bench", "norm", "--rows", "no_such_row")
    assert result.returncode == 2
    assert "no row matches no_such_row" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["bench"],
        ["bench", "norm"],
        ["bench", "lstm"],
        ["bench", "gru"],
        ["bench", "conv"],
        ["bench", "products"],
        ["bench", "apple"],
        ["bench", "train"],
        ["bench", "compare"],
        ["bench", "all"],
        ["completion"],
        ["info"],
    ],
    ids=" ".join,
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: retrograd")


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is longer only if it is one word, such as a path, which is not broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    program = cli._parser()
    parsers = {parser.prog: parser for parser in (program, *program._below())}
    assert {"retrograd", "retrograd train text", "retrograd bench all", "retrograd completion"} <= set(parsers)
    for name, parser in parsers.items():
        text = parser.format_help()
        assert re.match(rf"usage: {name}\s+\[OPTIONS\]".replace(" ", r"\s+"), text), text
        long = [line for line in text.splitlines() if len(line) > columns and len(line.split()) > 1]
        assert long == [], name
        assert parser.format_usage().startswith(f"usage: {name.split()[0]}")
    if columns == 80:
        words = parsers["retrograd completion"].format_help().splitlines()
        assert "  retrograd completion fish > ~/.config/fish/completions/retrograd.fish" in words


@pytest.mark.parametrize(("suite", "row"), [("norm", SMALL_ROW), ("lstm", SMALL_LSTM_ROW)])
def test_interrupt_ends_with_130(suite: str, row: str, tmp_path: Path, without_torch: str) -> None:
    path = tmp_path / "out.csv"
    # A test run in the background of a shell ignores the signal, and its children would too.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{listening}; import runpy; runpy.run_module('retrograd', run_name='__main__')"
    command = [sys.executable, "-c", start, "bench", suite, "--budget", "60", "--rows", row]
    environment = {**os.environ, "PYTHONPATH": without_torch}
    with subprocess.Popen(
        [*command, "--csv", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        wait_until(lambda: process.poll() is not None or (path.exists() and path.stat().st_size))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert path.read_text().startswith("case,provider,pass")


PRESSES_CTRL_C = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n"
# A test run in the background of a shell ignores the signal, and its children would too.
LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def interrupted(module: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """The command with Ctrl-C pressed while it imports the module."""
    (folder / f"{module}.py").write_text(PRESSES_CTRL_C)
    return subprocess.run(
        [sys.executable, "-c", LISTENING, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])},
        check=False,
    )


@pytest.mark.parametrize("module", ["numpy", "difflib"])  # of the package, of the command line
@pytest.mark.parametrize("installed", [False, True], ids=["python -m", "installed"])
def test_interrupt_during_imports_ends_with_130(module: str, installed: bool, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("retrograd")
    if installed and not script.exists():
        pytest.skip("the package's command is not beside this interpreter")
    start = [str(script)] if installed else [sys.executable, "-m", "retrograd"]
    result = interrupted(module, tmp_path, *start, "train", "text", "--steps", "1")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_interrupt_during_imports_of_other_programs_is_theirs(tmp_path: Path) -> None:
    code = "try:\n    import retrograd\nexcept BaseException:\n    print('caught')"
    result = interrupted("numpy", tmp_path, sys.executable, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "caught\n", "")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m retrograd verify --rows 'batch_norm_*' --isa scalar --threads 1"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.stdout.startswith("case")
    assert "Traceback" not in result.stderr


def on_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """The exit code of a command on a terminal, and all that it wrote there."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-m", "retrograd", *arguments], stdout=child, stderr=child, env=environment
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
    return process.returncode, shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_a_table() -> None:
    """With a rule below the titles, and a progress bar that leaves nothing behind it."""
    code, text = on_terminal(120, "verify", "--rows", SMALL_CASE)
    assert code == 0, text
    assert SMALL_CASE in text
    assert "─" in text
    assert "all within tolerance" in text


@pytest.mark.parametrize("arguments", [["info"], ["bench", "compare"]], ids=" ".join)
def test_narrow_terminals_get_narrow_lines(arguments: list[str], tmp_path: Path, without_torch: str) -> None:
    """Of 40 columns; words are not broken."""
    if arguments == ["bench", "compare"]:
        path = str(tmp_path / "a.csv")
        result = run("bench", "norm", "--quick", "--rows", SMALL_ROW, "--csv", path, PYTHONPATH=without_torch)
        assert result.returncode == 0, result.stderr
        arguments = [*arguments, path, path]
    code, text = on_terminal(40, *arguments)
    assert code == 0, text
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\n")
    assert max(len(line.rpartition("\r")[2].rstrip()) for line in lines) <= 40, text
    expected = ["  old/new  1.00x", f"{SMALL_ROW}"] if "compare" in arguments else ["data types  float32, float64;"]
    assert set(expected) <= set(lines), text
