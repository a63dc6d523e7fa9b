"""Several ranks under mpirun: the same bits at any number of them, checkpoints, failures, lost ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrograd import nn
from support.mpi import on_ranks, run_on_ranks
from support.waiting import PATIENCE, wait_until

TEXT = (
    *("-m", "retrograd", "train", "text", "--hidden", "12", "--embedding", "6", "--layers", "2", "--dropout", "0.2"),
    *("--batch", "11", "--unroll", "8", "--steps", "24", "--validate-every", "8", "--validation-items", "256"),
)
SERIES = (
    *("-m", "retrograd", "train", "series", "--hidden", "8", "--window", "12", "--horizon", "3", "--batch", "16"),
    *("--steps", "12", "--validate-every", "6", "--target", "a"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = np.random.default_rng(0).choice(["the ", "cat ", "sees ", "a ", "bird.\n"], 3000)
    path.write_text("".join(words))
    return path


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "series.csv"
    t = np.arange(400)
    noise = np.random.default_rng(0).standard_normal(400)
    rows = zip(np.sin(t / 5) + 0.1 * noise, np.cos(t / 7), strict=True)
    path.write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in rows))
    return path


def alone(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, timeout=PATIENCE, check=True)


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model that one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    alone(*TEXT, text, "--shards", "8", "--output", folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3, 4, 8))])
def test_any_number_of_ranks_writes_the_same_model(ranks: int, text: Path, expected: bytes, tmp_path: Path) -> None:
    result = run_on_ranks(ranks, *TEXT, text, "--output", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == expected
    # One report, from rank 0.
    assert result.stderr == ""
    assert re.search(rf"^ranks +{ranks}, 8 shards of each batch$", result.stdout, re.MULTILINE)
    assert len(re.findall(r"^step 24  loss", result.stdout, re.MULTILINE)) == 1
    assert (tmp_path / "report.html").exists()


@pytest.mark.long
def test_a_model_with_batch_norm_too(series: Path, tmp_path: Path) -> None:
    for ranks in (1, 4):
        run_on_ranks(ranks, *SERIES, series, "--output", tmp_path / str(ranks))
    one, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in "14")
    assert one == four


@pytest.mark.long
def test_a_run_resumes_on_another_number_of_ranks(text: Path, expected: bytes, tmp_path: Path) -> None:
    run_on_ranks(4, *TEXT, text, "--output", tmp_path, "--time-limit", "0")  # which ends it before the first step
    resume = ("-m", "retrograd", "train", "text", "--resume", tmp_path)
    run_on_ranks(2, *resume)
    assert (tmp_path / "model.safetensors").read_bytes() == expected


@pytest.mark.long
def test_a_run_on_ranks_is_planned_for_a_time_limit_and_extended(text: Path, tmp_path: Path) -> None:
    where = TEXT.index("--steps")
    unplanned = (*TEXT[:where], *TEXT[where + 2 :])
    result = run_on_ranks(2, *unplanned, text, "--output", tmp_path / "planned", "--time-limit", "3")
    planned = re.search(r"^plan +([\d,]+) steps", result.stdout, re.MULTILINE)
    assert planned, result.stdout
    settings = nn.read_metadata(tmp_path / "planned" / "checkpoint.safetensors")["settings"]
    assert settings["steps"] == int(planned[1].replace(",", ""))
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        alone(*TEXT, text, "--shards", "8", "--output", folder)
        run_on_ranks(ranks, "-m", "retrograd", "train", "text", "--resume", folder, "--steps", "40")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in "12")
    assert one == two
    assert nn.read_metadata(tmp_path / "2" / "checkpoint.safetensors")["records"][-1]["step"] == 40


@pytest.mark.long
def test_a_lost_rank_ends_the_run_and_leaves_a_checkpoint(text: Path, expected: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            on_ranks(3, *TEXT, text, "--output", tmp_path / "run", "--checkpoint-every", "0"),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        history = tmp_path / "run" / "history.csv"
        wait_until(lambda: (history.exists() and "\n8," in history.read_text()) or process.poll() is not None)
        ranks = _ranks_of(process.pid)
        if process.poll() is None and ranks:
            os.kill(max(ranks), signal.SIGKILL)
        wait_until(lambda: process.poll() is not None, "the other ranks wait for the lost one")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    run_on_ranks(2, "-m", "retrograd", "train", "text", "--resume", tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


def _ranks_of(launcher: int) -> list[int]:
    """The Python processes below mpiexec."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == launcher:
                command = (entry / "cmdline").read_bytes()
                found += [int(entry.name)] * (command.startswith(sys.executable.encode()))
        except (OSError, ProcessLookupError):
            continue
    return found


PROGRAM = """
import sys
import numpy as np
from retrograd import distributed, nn

group = distributed.world(4)
{body}
"""


def program(body: str) -> tuple[str, str]:
    return "-c", PROGRAM.format(body=body)


def test_a_failure_reaches_every_rank() -> None:
    body = """
def work(shard):
    if shard == 2:
        raise ValueError("shard 2 has no data")
    return group.exchange(shard)

try:
    group.run(work)
except distributed.RankError as error:
    sys.stdout.write(f"{group.rank}: {error}|")
except ValueError as error:
    sys.stdout.write(f"{group.rank}: itself, {error}|")
assert group.run(group.exchange) == [[0, 1, 2, 3]] * 4
"""
    result = run_on_ranks(3, *program(body))
    said = sorted(result.stdout.strip("|\n").split("|"))
    failed = next(line for line in said if "itself" in line)
    owner = failed[0]
    assert failed == f"{owner}: itself, shard 2 has no data"
    others = [line for line in said if line != failed]
    assert [line[3:] for line in others] == [f"rank {owner} failed: ValueError: shard 2 has no data"] * 2


def test_training_on_ranks_has_the_bits_of_one_process() -> None:
    """Also of a model whose parameters have two dtypes, and after a failure on one rank."""
    body = """
from retrograd import graph

class Mixed(nn.Module):
    def __init__(self, rng):
        self.wide, self.narrow = nn.Linear(6, 5, dtype=np.float64, rng=rng), nn.Linear(5, 3, rng=rng)
        self.dropout = nn.Dropout(0.25, rng=rng)

    def forward(self, x):
        return self.narrow(self.dropout(graph.cast(self.wide(x), np.float32)))

def trained(group):
    rng = np.random.default_rng(0)
    model = Mixed(rng)
    optimizer = nn.Adam(model, 0.01, maximum_norm=0.1)
    parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), optimizer)
    x, target = rng.standard_normal((13, 6)), rng.standard_normal((13, 3))

    def work(shard):
        if shard.index == 2:
            raise ValueError("no data")
        return shard.step(x[shard.part(13)], target[shard.part(13)], share=shard.share(13))

    losses = []
    for step in range(5):
        try:
            losses.append(parallel.run(work) if step == 2 else parallel.step(x, target))
        except (ValueError, distributed.RankError):
            losses.append(None)
    assert losses[2] is None and len(set(losses)) == 5, losses
    arrays = {**model.state_arrays(), **optimizer.arrays()}
    return repr(losses).encode() + b"".join(array.tobytes() for array in arrays.values())

assert trained(group) == trained(distributed.Group(4))
print("ok")
"""
    for ranks in (2, 3):
        assert run_on_ranks(ranks, *program(body)).stdout.count("ok") == ranks


def test_sums_of_arrays_smaller_than_the_number_of_ranks() -> None:
    body = """
for size in (0, 1, 2, 3, 1000):
    parts = [np.full(size, 10.0**shard) for shard in group.local]
    total = np.empty(size)
    group.sum(parts, total)
    assert (total == 1111.0).all(), (size, total)
print("ok")
"""
    assert run_on_ranks(3, *program(body)).stdout.count("ok") == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--shards", "2"), "there are 3 ranks, but --shards is 2: each rank needs at least one shard of a batch"),
        (("--batch", "5"), "--batch 5 cannot be split into 8 shards; reduce --shards"),
    ],
)
def test_what_cannot_be_split_is_refused(extra: tuple[str, str], message: str, text: Path, tmp_path: Path) -> None:
    result = run_on_ranks(3, *TEXT, text, *extra, "--output", tmp_path / "run", code=2)
    assert result.stderr.count(f"retrograd: error: {message}\n") == 1
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_are_refused(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "text.txt"
    body = f"""
import shutil
from retrograd.cli import main
path = {str(tmp_path)!r} + f"/{{group.rank}}.txt"
shutil.copy({str(text)!r}, path)
if group.rank:
    open(path, "a").write("more")
# Each rank finds another file under the name that rank 0 gave.
from retrograd.train import text as module
real = module.Corpus
module.Corpus = lambda files, *rest: real([__import__("pathlib").Path(path)], *rest)
sys.exit(main([*{list(TEXT[2:])!r}, path, "--output", {str(other)!r} + ".run"]))
"""
    result = run_on_ranks(2, *program(body), code=2)
    assert "rank 1: the data of rank 1 differ from those of rank 0" in result.stderr


def test_the_saved_model_loads(text: Path, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(expected)
    assert nn.read_metadata(path)["settings"]["shards"] == 8
