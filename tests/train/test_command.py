"""retrograd train, sample and forecast: what a person at a terminal, or a script, gets from them."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrograd import cli, nn
from support.waiting import ATTEMPTS, PATIENCE, wait_until

SMALL = (
    *("--hidden", "16", "--embedding", "8", "--batch", "4", "--unroll", "16", "--steps", "60"),
    *("--validate-every", "20", "--validation-items", "256"),
)
LONG = (*SMALL, "--steps", "100000", "--patience", "none")


@pytest.fixture
def charts() -> None:
    """For tests of commands that draw PNG files."""


@pytest.fixture(autouse=True)
def _no_charts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Commands of other tests do not find matplotlib, whose import takes longer than what they compute."""
    if "charts" not in request.fixturenames:
        hidden = tmp_path_factory.mktemp("hidden") / "matplotlib.py"
        hidden.write_text("raise ImportError(__name__)")
        monkeypatch.setenv("PYTHONPATH", str(hidden.parent), prepend=os.pathsep)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "retrograd", *map(str, arguments)]


def run(*arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False, encoding="utf-8"
    )
    return checked(result, code)


def call(*arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The same in this process, which is quicker: for what a command computes, refuses and prints, not how it ends."""
    words, before = [*map(str, arguments)], Path.cwd()
    output, errors = io.StringIO(), io.StringIO()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                ended = cli.main(words)
            except SystemExit as exit:  # of the parser
                ended = int(exit.code or 0)
    finally:
        os.chdir(before)
    return checked(subprocess.CompletedProcess(words, ended, output.getvalue(), errors.getvalue()), code)


def checked(result: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    if code in (0, 130):
        assert result.stderr == ""
    else:
        assert result.stderr.startswith("retrograd: error: ") or result.stderr.startswith("usage:"), result.stderr
    return result


def prose(words: int, seed: int = 0) -> str:
    """Something to learn: sentences of a few words."""
    draw = random.Random(seed)
    vocabulary = ["the", "cat", "dog", "sees", "a", "bird", "and", "runs", "to", "green", "house"]
    text = [draw.choice(vocabulary) + draw.choice(["", "", "", ",", ".\n"]) for _ in range(words)]
    return " ".join(text)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(prose(3000))
    return path


@pytest.fixture(scope="module")
def trained_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, for tests of what comes after one. They copy it."""
    folder = tmp_path_factory.mktemp("trained_text")
    (folder / "text.txt").write_text(prose(3000))
    call("train", "text", folder / "text.txt", *SMALL, "--output", "run", cwd=folder)
    return folder / "run"


def validations(folder: Path) -> list[float]:
    return [float(number) for number in history(folder)["validation"]]


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("charts")
def test_train_text_and_sample(tmp_path: Path, text: Path) -> None:
    result = run("train", "text", text, *SMALL, cwd=tmp_path)
    folder = tmp_path / "runs" / "text-text"
    scores = validations(folder)
    assert len(scores) == 4
    assert scores[-1] < scores[0] < 7
    assert "\x1b" not in result.stdout  # plain lines where nobody looks at a terminal
    assert {path.name for path in folder.iterdir()} - {"curves.png"} == {
        *("model.safetensors", "checkpoint.safetensors", "history.csv", "report.html")
    }
    first = run("sample", folder, "--length", "50", "--prompt", "the ", cwd=tmp_path).stdout
    assert first.startswith("the ")
    assert len(first) == 4 + 50 + 1
    file = folder / "model.safetensors"
    assert call("sample", file, "--length", "50", "--prompt", "the ", cwd=tmp_path).stdout == first
    assert call("sample", folder, "--length", "50", "--seed", "1", cwd=tmp_path).stdout != first
    greedy = call("sample", folder, "--length", "50", "--temperature", "0", cwd=tmp_path).stdout
    assert call("sample", folder, "--length", "50", "--temperature", "0", "--seed", "7", cwd=tmp_path).stdout == greedy


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_an_output_that_is_full(tmp_path: Path, text: Path, trained_text: Path) -> None:
    shutil.copytree(trained_text, tmp_path / "a")
    train = ("train", "text", text, *SMALL, "--output", "b")
    for arguments in (("sample", "a", "--length", "20"), ("sample", "a", "--length", "9000"), ("info",), train):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command(*arguments), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE, check=False
            )
        message = b"retrograd: error: the output could not be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (1, message), arguments


def test_a_short_text_is_validated_often_and_stops_early(tmp_path: Path) -> None:
    """It used to validate twice, and to end in weights worse than counting."""
    (tmp_path / "a.txt").write_text(prose(600))
    settings = ("--hidden", "64", "--batch", "4", "--unroll", "16", "--learning-rate", "0.02", "--steps", "400")
    result = run("train", "text", "a.txt", *settings, "--output", "run", cwd=tmp_path)
    scores = validations(tmp_path / "run")
    assert 6 < len(scores) < 21
    assert min(scores) < scores[-1]
    assert scores.index(min(scores)) == len(scores) - 6
    stopped = re.search(
        r"^Stopped early at step (\d+) of 400: none of the last 5 validations [^:]*:\n  (retrograd .*)$",
        result.stdout,
        re.M,
    )
    assert stopped, result.stdout
    assert int(stopped[1]) == 20 * (len(scores) - 1)
    assert f"fell from {scores[0]:.3f} to {min(scores):.3f}" in result.stdout.replace("\n", " ")
    best = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert "Stopped early at step" in run("train", "text", "--resume", "run", cwd=tmp_path).stdout
    again = run(*stopped[2].split()[1:], cwd=tmp_path).stdout
    assert "Stopped early" not in again
    assert len(history(tmp_path / "run")["step"]) == 21
    if min(validations(tmp_path / "run")[len(scores) :]) >= min(scores):
        assert nn.read_metadata(tmp_path / "run" / "model.safetensors")["settings"]["patience"] == 5
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == best


def test_a_second_run_does_not_touch_the_first(tmp_path: Path, text: Path) -> None:
    for _ in range(2):
        run("train", "text", text, *SMALL, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"text-text", "text-text-2"}
    one, two = (tmp_path / "runs" / name / "model.safetensors" for name in ("text-text", "text-text-2"))
    assert one.read_bytes() == two.read_bytes()
    refused = call("train", "text", text, *SMALL, "--output", "runs/text-text", cwd=tmp_path, code=2)
    assert "has a run already: --resume runs/text-text continues it, --overwrite replaces it" in refused.stderr
    run("train", "text", text, *SMALL, "--seed", "1", "--output", "runs/text-text", "--overwrite", cwd=tmp_path)
    assert one.read_bytes() != two.read_bytes()


def test_what_is_in_the_folder_is_not_lost(tmp_path: Path, text: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    data = own / "history.csv"
    data.write_bytes(text.read_bytes())
    refused = run("train", "text", data, *SMALL, "--output", own, "--overwrite", cwd=tmp_path, code=2)
    assert f"the run would replace its own data, {data}: name another folder" in refused.stderr
    refused = call("train", "text", text, *SMALL, "--output", own, cwd=tmp_path, code=2)
    assert f"{own} has a history.csv already: --overwrite replaces it" in refused.stderr
    (own / "model.safetensors").mkdir()
    refused = call("train", "text", text, *SMALL, "--output", own, "--overwrite", cwd=tmp_path, code=2)
    assert "model.safetensors cannot be replaced: Is a directory" in refused.stderr
    assert data.read_bytes() == text.read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_two_runs_do_not_share_a_folder(tmp_path: Path, text: Path) -> None:
    first = subprocess.Popen(
        command("train", "text", text, *LONG, "--output", "run"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert any(line.startswith("step") for line in first.stdout)
    for again in ((text, *SMALL, "--output", "run", "--overwrite"), ("--resume", "run")):
        wait_until(lambda: first.poll() is not None or (tmp_path / "run" / "checkpoint.safetensors").exists())
        assert "another run is active in run" in call("train", "text", *again, cwd=tmp_path, code=2).stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE)
    assert first.returncode == 130


def test_threads_do_not_change_the_model(tmp_path: Path, text: Path) -> None:
    for threads in (1, 2):
        run("train", "text", text, *SMALL, "--threads", threads, "--output", f"t{threads}", cwd=tmp_path)
    assert (tmp_path / "t1/model.safetensors").read_bytes() == (tmp_path / "t2/model.safetensors").read_bytes()


def interrupt(folder: Path, *arguments: object, cwd: Path, number: int = signal.SIGINT) -> str:
    """Start training, and stop it by a signal once it has validated. One that ends before is tried again."""
    for _ in range(ATTEMPTS):
        process = subprocess.Popen(
            command(*arguments), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "loss" in line:
                process.send_signal(number)
                break
        rest, errors = process.communicate(timeout=PATIENCE)
        assert errors == ""
        if process.returncode:
            break
        shutil.rmtree(folder)
    assert process.returncode == 128 + number
    return "".join(lines) + rest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_ends_in_the_same_bits(
    tmp_path: Path, text: Path, number: signal.Signals
) -> None:
    settings = (*SMALL, "--steps", "3000", "--dropout", "0.1", "--layers", "2", "--validation-items", "4096")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", "text", text, *settings, "--output", whole, cwd=tmp_path)
    output = interrupt(parts, "train", "text", text, *settings, "--output", parts, cwd=tmp_path, number=number)
    stopped = re.search(r"Stopped at step ([\d,]+) of 3,000\. Everything .* To continue:\n  (retrograd .*)\n", output)
    assert stopped, output
    assert int(stopped[1].replace(",", "")) < 3000
    assert nn.read_metadata(parts / "checkpoint.safetensors")["items"] > 0
    again = run(*stopped[2].split()[1:], cwd=tmp_path)
    assert f"resumed at step {stopped[1]} of 3,000" in again.stdout
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("loss", "validation"):
        assert history(parts)[name] == history(whole)[name]


def history(folder: Path) -> dict[str, list[str]]:
    header, *rows = (line.split(",") for line in (folder / "history.csv").read_text().splitlines())
    return {name: [row[column] for row in rows] for column, name in enumerate(header)}


@pytest.mark.parametrize("folder", ["a b", 'it\'s "ü"', "-dash"])
def test_the_command_that_goes_on_is_one_for_a_shell(tmp_path: Path, text: Path, folder: str) -> None:
    result = run("train", "text", text, *SMALL, f"--output={folder}", "--time-limit", "0", cwd=tmp_path)
    shown = re.search(r"^  retrograd (.* --resume .*)$", result.stdout, re.M)
    assert shown, result.stdout
    assert "resumed" not in run(*shlex.split(shown[1]), cwd=tmp_path).stdout  # no step was done
    assert (tmp_path / folder / "report.html").exists()


def test_nobody_has_to_listen(tmp_path: Path, text: Path) -> None:
    train = " ".join(command("train", "text", text, *SMALL, "--output"))
    for name, script in (("pipe", f"{train} pipe | head -n 1"), ("closed", f"{train} closed >&-")):
        result = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.stderr == ""
        assert (tmp_path / name / "report.html").exists()


def test_an_output_of_few_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve café ☃\n" * 300, encoding="utf-8")
    for arguments in (
        ("train", "text", "a.txt", *SMALL, "--output", "run"),
        ("sample", "run", "--length", "40", "--prompt", "é"),
    ):
        result = subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert arguments[0] == "train" or "\\xe9" in result.stdout


def test_the_model_is_missed_before_a_run_goes_on(tmp_path: Path, trained_text: Path) -> None:
    shutil.copytree(trained_text, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "model.safetensors" in call("train", "text", "--resume", "run", cwd=tmp_path, code=2).stderr


@pytest.mark.long
def test_forged_checkpoints(tmp_path: Path, text: Path) -> None:
    from retrograd.train.text import TextSettings, TextTask

    run("train", "text", text, *SMALL, "--output", "run", cwd=tmp_path)
    path = tmp_path / "run" / "checkpoint.safetensors"
    metadata = nn.read_metadata(path)
    settings = TextSettings.from_record(metadata["settings"])
    with contextlib.closing(TextTask(settings, [text], scratch=tmp_path)) as task:
        nn.load(path, task.model, task.optimizer, arrays=task.arrays())
        for change in (
            {"settings": None},
            {"settings": {**metadata["settings"], "hidden": 20000, "layers": 64}},
            {"files": [5]},
            {"source": []},
            {"source": {}},
            {"records": [{}]},
            {"records": [{**metadata["records"][0], "validation": "1"}]},
            {"records": []},
            {"pending": ["x"]},
            {"items": {}},
            {"seconds": 10**400},
        ):
            nn.save(path, task.model, task.optimizer, arrays=task.arrays(), metadata={**metadata, **change})
            result = call("train", "text", "--resume", "run", cwd=tmp_path, code=2)
            assert "checkpoint.safetensors" in result.stderr
        task.optimizer.arrays()["steps"][...] = -5
        nn.save(path, task.model, task.optimizer, arrays=task.arrays(), metadata=metadata)
        result = call("train", "text", "--resume", "run", cwd=tmp_path, code=2)
        assert "steps is -5, must be from 0" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.long
def test_what_a_resumed_run_may_not_change(tmp_path: Path, text: Path) -> None:
    run("train", "text", text, *SMALL, "--output", "run", cwd=tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    content = checkpoint.read_bytes()

    def refused(why: str, *arguments: object) -> None:
        result = call("train", *arguments, "--resume", "run", cwd=tmp_path, code=2)
        assert re.search(why, result.stderr), result.stderr

    refused("--hidden cannot change when a run is resumed: the run has 16, not 32", "text", "--hidden", "32")
    refused("--steps 59 is less than the 60 steps that the run has taken", "text", "--steps", "59")
    refused("--output and --overwrite are for a new one", "text", "--overwrite")
    refused("was written by retrograd train text, not by retrograd train series", "series")
    text.write_text(prose(3000, seed=1))
    refused("the data have changed since the run began", "text")
    text.unlink()
    refused(r"text\.txt", "text")
    moved = tmp_path / "moved.txt"
    moved.write_text(prose(3000))
    run("train", "text", moved, "--resume", "run", "--threads", "1", "--time-limit", "1m", cwd=tmp_path)
    checkpoint.write_bytes(content[:-3])
    refused("is not a whole safetensors file", "text", moved)
    checkpoint.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    refused("is damaged", "text", moved)
    # A pickle, which would run code if anything were to unpickle it.
    checkpoint.write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    refused("is not a whole safetensors file", "text", moved)
    checkpoint.unlink()
    refused("there is no run to resume", "text", moved)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"x", "1 "),
        (b"only one short line\n", "20 "),
    ],
)
def test_too_little_text_is_refused_with_both_numbers(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    result = call("train", "text", "a.txt", cwd=tmp_path, code=2)
    assert why in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]  # nothing half-made is left


def test_files_that_are_none(tmp_path: Path, text: Path) -> None:
    assert "absent.txt" in run("train", "text", text, "absent.txt", cwd=tmp_path, code=2).stderr
    assert str(tmp_path) in call("train", "text", tmp_path, cwd=tmp_path, code=2).stderr
    (tmp_path / "file").write_text("")
    result = call("train", "text", text, *SMALL, "--output", "file/run", cwd=tmp_path, code=2)
    assert "the folder file/run cannot be created" in result.stderr
    assert "absent" in call("sample", "absent", cwd=tmp_path, code=2).stderr
    assert "text.txt" in call("sample", text, cwd=tmp_path, code=2).stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_pipes_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("pipe", "run/model.safetensors", "run/checkpoint.safetensors"):
        os.mkfifo(tmp_path / name)
    for arguments in (
        ("train", "text", "pipe"),
        ("train", "series", "pipe"),
        ("train", "text", "--resume", "run"),
        ("sample", "pipe"),
        ("sample", "run"),
        ("forecast", "pipe", "pipe"),
        ("forecast", "run", "pipe"),
    ):
        assert "is a pipe, not a file" in call(*arguments, cwd=tmp_path, code=2).stderr


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_run_left_half_written_goes_away(
    tmp_path: Path, text: Path, trained_text: Path, resume: bool
) -> None:
    folder = shutil.copytree(trained_text, tmp_path / "run")
    left = ["model.safetensors.retrograd.part", "model-as-planned.safetensors.retrograd.part", "history.csv.4711.part"]
    own = ["notes.txt.part", "model.safetensors.part", "other.retrograd.part"]
    for name in (*left, *own):
        (folder / name).write_text("x")
    again = ("--resume", "run") if resume else (text, *SMALL, "--output", "run", "--overwrite")
    run("train", "text", *again, cwd=tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert not names & set(left)
    assert set(own) <= names


@pytest.mark.parametrize(
    ("content", "measure"),
    [
        ("naïve café Ελλάδα 日本語 👩🏽‍🚀 é \u202eabc\x00\x1b[31m\r\n".encode() * 60, "bits per character"),
        (bytes(range(256)) * 20, "bits per byte"),
        ("é🚀".encode() * 2500, "bits per character"),  # one line
    ],
    ids=["unicode", "binary", "one line"],
)
def test_any_content_trains_and_samples(tmp_path: Path, content: bytes, measure: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert measure in run("train", "text", "a.txt", *SMALL, "--output", "run", cwd=tmp_path).stdout
    call("sample", "run", "--length", "40", "--prompt", "é🚀", cwd=tmp_path)
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in report
    assert "\x00" not in report


@pytest.mark.long
def test_a_text_of_200_mb_in_bounded_memory(tmp_path: Path) -> None:
    piece = prose(200_000).encode()

    def peak(megabytes: int) -> int:
        path = tmp_path / f"{megabytes}.txt"
        with path.open("wb") as file:
            for _ in range(megabytes * 1_000_000 // len(piece)):
                file.write(piece)
        process = subprocess.Popen(
            command("train", "text", path, *SMALL, "--steps", "200", "--output", tmp_path / f"run{megabytes}"),
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        path.unlink()
        return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    assert peak(200) - peak(2) < 30e6


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, text: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare to make a small file system with")
    settings = ("--hidden", "64", "--embedding", "8", "--batch", "4", "--unroll", "16")
    settings += ("--steps", "1000000", "--validate-every", "1000000", "--checkpoint-every", "0")  # the disk ends it
    script = f"""
        mkdir small && mount -t tmpfs -o size=3m tmpfs small || exit 99
        {" ".join(command("train", "text", text, *settings, "--output", "small/run"))} &
        while ! [ -e small/run/history.csv ]; do sleep 0.05; done
        head -c 3m /dev/zero > small/filler 2> filler-error
        wait $!
        echo $? > code
        cp -r small/run saved
    """
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (tmp_path / "code").read_text() == "1\n", result.stdout + result.stderr
    assert re.search(
        r"retrograd: error: small/run/\S+ could not be written: No space left on device; the last checkpoint is "
        r"complete: retrograd train text --resume small/run\n",
        result.stderr,
    ), result.stderr
    assert not list((tmp_path / "saved").glob("*.part"))
    steps = nn.read_metadata(tmp_path / "saved" / "checkpoint.safetensors")["items"]
    assert steps >= 0
    run("train", "text", "--resume", "saved", "--time-limit", "1", cwd=tmp_path)


def in_terminal(*arguments: object, cwd: Path) -> str:
    """What a terminal is sent."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
    )
    os.close(slave)
    output = b""
    while select.select([master], [], [], PATIENCE)[0]:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(master)
    assert process.wait(timeout=PATIENCE) == 0
    return output.decode(errors="replace")


def test_a_terminal_is_not_controlled_by_what_a_model_writes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\x1b[31m\x07" * 1000)
    run("train", "text", "a.txt", *SMALL, "--output", "run", cwd=tmp_path)
    assert "\x1b" in call("sample", "run", "--length", "200", cwd=tmp_path).stdout
    shown = in_terminal("sample", "run", "--length", "200", "--prompt", "\x1b[31m", cwd=tmp_path)
    assert "\x1b" not in shown
    assert shown.startswith("␛[31m")


def test_a_terminal_gets_a_bar(tmp_path: Path, text: Path) -> None:
    shown = in_terminal("train", "text", text, *LONG, "--time-limit", "3", "--output", "run", cwd=tmp_path)
    assert "━" in shown
    assert re.search(r"loss [\d.]+  validation [\d.]+  [\d,]+ \w+/s  0:0\d left", shown)
    assert "Time limit reached at step" in shown


def test_help_names_every_setting(tmp_path: Path) -> None:
    from retrograd.train.series import SeriesSettings
    from retrograd.train.text import TextSettings

    for kind, settings in (("text", TextSettings), ("series", SeriesSettings)):
        shown = call("train", kind, "--help", cwd=tmp_path).stdout
        for name, *_ in settings.options():
            assert f"--{name.replace('_', '-')} " in shown
    for options, why in (
        (("--hidden", "many"), "'many' is not a whole number"),
        (("--hidden", "0"), "0 is not from 1 to 65536"),
        (("--dropout", "1.5"), "1.5 is not"),
        (("--time-limit", "soon"), "'soon' is not a time, such as 90s, 10m or 2h"),
        (("--learning-rate", "nan"), "nan is not"),
    ):
        assert why in call("train", "text", *options, cwd=tmp_path, code=2).stderr


# ---- series ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "sales.csv"
    rng, days = np.random.default_rng(0), np.arange(500)
    sales = 100 + 10 * np.sin(days * 2 * np.pi / 7) + 0.05 * days + rng.normal(0, 1, 500)
    dates = np.datetime64("2025-01-01") + days
    path.write_text("date,sales\n" + "".join(f"{d},{s:.3f}\n" for d, s in zip(dates, sales, strict=True)))
    return path


QUICK = ("--hidden", "8", "--steps", "60")


@pytest.mark.usefixtures("charts")
def test_train_series_and_forecast(tmp_path: Path, table: Path) -> None:
    result = run("train", "series", table, *QUICK, cwd=tmp_path)
    assert re.search(r"(beats|LOSES|does not beat)", result.stdout)
    for name in ("naive", "seasonal naive", "linear"):
        assert re.search(rf"^[* ] {name} +[\d.]+ +[\d.]+", result.stdout, re.M)
    folder = tmp_path / "runs" / "series-sales"
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "Error by horizon" in report
    run("forecast", folder, table, cwd=tmp_path)
    header, *rows = (tmp_path / "sales-forecast.csv").read_text().splitlines()
    assert header == "date,sales,sales_low,sales_high"
    assert rows[0].split(",")[0] == "2026-05-16"
    for row in rows:
        value, low, high = map(float, row.split(",")[1:])
        assert 90 < low <= value <= high < 160
    assert (tmp_path / "sales-forecast.svg").read_text().startswith("<svg")
    call("forecast", folder, table, "--output", "a.csv", "--plot", "b.svg", cwd=tmp_path)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "sales-forecast.csv").read_bytes()


def test_a_forecast_repeats_the_verdict_and_can_use_a_baseline(tmp_path: Path) -> None:
    """A trend that the held-out part does not have: then the last value is the best forecast."""
    path = tmp_path / "trend.csv"
    rng, rows = np.random.default_rng(3), np.arange(300)
    trend = np.minimum(rows, 255) + rng.normal(0, 0.1, 300)
    path.write_text("x\n" + "".join(f"{x:.6f}\n" for x in trend))
    trained = run("train", "series", path, *QUICK, "--season", "1", "--output", "run", cwd=tmp_path).stdout
    verdict = re.search(r"^The model LOSES to the naive forecast by \d+ %: use that instead [^)]*\)\.$", trained, re.M)
    assert verdict, trained
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    ahead = report.partition("Beyond the data")[2].partition("Data and model")[0]
    assert ">naive<" in ahead
    assert ">model<" not in ahead
    shown = call("forecast", "run", path, "--output", "a.csv", cwd=tmp_path).stdout
    assert verdict[0].replace("\n", " ") in shown
    assert "method       the naive baseline (the smallest error on the test set; --use chooses another)" in shown
    values = {}
    for use in ("naive", "linear", "model"):
        shown = call("forecast", "run", path, "--output", f"{use}.csv", "--use", use, cwd=tmp_path).stdout
        assert verdict[0].replace("\n", " ") in shown
        assert f"(--use {use})" in shown
        values[use] = (tmp_path / f"{use}.csv").read_bytes()
    assert len(set(values.values())) == 3
    assert (tmp_path / "a.csv").read_bytes() == values["naive"]
    first = values["naive"].decode().splitlines()[1].split(",")
    assert float(first[1]) == pytest.approx(trend[-1], abs=1e-6)
    assert float(first[2]) <= float(first[1]) < float(first[3])  # all errors of validation were upwards
    assert "--use seasonal: " in call("forecast", "run", path, "--use", "seasonal", cwd=tmp_path, code=2).stderr
    assert "invalid choice" in call("forecast", "run", path, "--use", "best", cwd=tmp_path, code=2).stderr


@pytest.mark.usefixtures("charts")
def test_a_forecast_as_png(tmp_path: Path, table: Path) -> None:
    pytest.importorskip("matplotlib")
    run("train", "series", table, *QUICK, "--output", "run", cwd=tmp_path)
    run("forecast", "run", table, "--plot", "b.png", cwd=tmp_path)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_series_run_ends_in_the_same_bits(tmp_path: Path, table: Path) -> None:
    settings = ("--hidden", "8", "--steps", "4000", "--dropout", "0.1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", "series", table, *settings, "--threads", "1", "--output", whole, cwd=tmp_path)
    interrupt(parts, "train", "series", table, *settings, "--output", parts, cwd=tmp_path)
    run("train", "series", "--resume", parts, cwd=tmp_path)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("loss", "validation"):
        assert history(parts)[name] == history(whole)[name]


def test_tables_that_are_refused(tmp_path: Path, table: Path) -> None:
    def refused(content: str, *why: str) -> None:
        (tmp_path / "bad.csv").write_text(content)
        result = call("train", "series", "bad.csv", cwd=tmp_path, code=2)
        for part in why:
            assert part in result.stderr, result.stderr
        assert not (tmp_path / "runs").exists()

    content = table.read_text()
    refused("")
    refused("date,sales\n")
    lines = content.splitlines(keepends=True)
    day, number = lines[41].strip().split(",")
    refused("".join([*lines[:41], f"{day},\n", *lines[42:]]), "line 42", "sales", "--gaps")
    refused("".join([*lines[:41], f"{day},{number}x\n", *lines[42:]]), "line 42", "sales", f"{number}x")
    refused("".join([*lines[:41], f"{day},{number},7\n", *lines[42:]]), "line 42", "3", "2")
    refused("".join(lines[:8]), "7")
    assert "DATA.csv is missing" in call("train", "series", cwd=tmp_path, code=2).stderr
    assert "absent.csv" in call("train", "series", "absent.csv", cwd=tmp_path, code=2).stderr
    assert "price" in call("train", "series", table, "--target", "price", cwd=tmp_path, code=2).stderr
    gap = tmp_path / "gap.csv"
    gap.write_text("".join([*lines[:41], f"{day},\n", *lines[42:]]))
    run("train", "series", gap, "--gaps", "interpolate", *QUICK, cwd=tmp_path)


def test_forecasts_that_are_refused(tmp_path: Path, table: Path, trained_text: Path) -> None:
    run("train", "series", table, *QUICK, "--output", "run", cwd=tmp_path)

    def refused(why: str, *arguments: object, code: int = 2) -> None:
        before = sorted(tmp_path.iterdir())
        result = call("forecast", *arguments, cwd=tmp_path, code=code)
        assert why in result.stderr, result.stderr
        assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "other.csv").write_text(table.read_text().replace("sales", "price"))
    (tmp_path / "short.csv").write_text("".join(table.read_text().splitlines(keepends=True)[:6]))
    refused("sales", "run", "other.csv")
    refused("5 rows", "run", "short.csv")
    refused("must be three files", "run", table, "--output", table)
    refused("ends in .svg or .png", "run", table, "--plot", "a.jpg")
    refused(". is a folder, and cannot be written to", "run", table, "--output", ".")
    os.mkfifo(tmp_path / "pipe.svg")
    refused("pipe.svg is a pipe, and cannot be written to", "run", table, "--plot", "pipe.svg")
    refused("pipe.svg is a pipe, and cannot be written to", "run", table, "--output", "pipe.csv")
    refused("pipe.svg is a pipe, not a file", "run", "pipe.svg")
    refused("pipe.svg is a pipe, not a file", "pipe.svg", table)
    refused("there is no such file", "absent", table)
    refused("could not be written", "run", table, "--output", "no/such/folder.csv", code=1)
    shutil.copytree(trained_text, tmp_path / "text")
    refused("it is of the kind 'text', not 'series'", "text", table)
    assert "run" in call("sample", "run", cwd=tmp_path, code=2).stderr
