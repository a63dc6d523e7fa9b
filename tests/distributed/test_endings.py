"""How a run of several ranks ends: uncaught exceptions, signals and early exits of one rank end all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.mpi import run_on_ranks, two_or_three_ranks

PROGRAM = """
import os, signal, sys, threading
import numpy as np
from retrograd import distributed, nn

group = distributed.world(4)
last = group.rank == group.size - 1
model = nn.Sequential(nn.Linear(2, 2, rng=np.random.default_rng(0)))
x = np.ones((8, 2), np.float32)

def step():
    return group.run(group.exchange)

def parallel_model():
    return distributed.DataParallel(model, group, nn.MeanSquaredError(), nn.SGD(model, 0.1))

{body}
"""
NOTICE = "retrograd: rank {} failed and ends all ranks\n"


def stderr_of(ranks: int, body: str, *, code: int = 1) -> str:
    return run_on_ranks(ranks, "-c", PROGRAM.format(body=body), code=code).stderr


ENDINGS = {
    "in the loop, outside work": """
parallel = parallel_model()
for i in range(5):
    if last and i == 3:
        raise KeyError("no such file")
    parallel.step(x, x)
""",
    "before DataParallel": """
if last:
    raise KeyError("no such file")
parallel_model()
""",
    "before a broadcast": """
if last:
    raise KeyError("no such file")
group.broadcast(1)
""",
    "before a sum": """
if last:
    raise KeyError("no such file")
group.sum([np.ones(3) for _ in group.local], np.empty(3))
""",
    "before another library's collective": """
if last:
    raise KeyError("no such file")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
    "in a thread": """
def load():
    raise KeyError("no such file")
if last:
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
step()
""",
    "in work": """
def work(shard):
    if last:
        raise KeyError("no such file")
    return group.exchange(shard)
group.run(work)
""",
}


@pytest.mark.parametrize("where", ENDINGS)
@two_or_three_ranks
def test_an_uncaught_exception_is_printed_once_and_ends_all_ranks(where: str, ranks: int) -> None:
    printed = stderr_of(ranks, ENDINGS[where])
    assert printed.count(NOTICE.format(ranks - 1)) == 1
    assert printed.count("KeyError: 'no such file'") == 1
    assert printed.count("Traceback") == 1
    assert "RankError" not in printed


@two_or_three_ranks
def test_a_group_of_ones_own_communicator_ends_together_too(ranks: int) -> None:
    body = """
from mpi4py import MPI
group = distributed.Group(4, MPI.COMM_WORLD.Split(0))
if last:
    raise KeyError("no such file")
step()
"""
    printed = stderr_of(ranks, body)
    assert printed.count(NOTICE.format(ranks - 1)) == 1
    assert printed.count("KeyError: 'no such file'") == 1


@two_or_three_ranks
def test_ctrl_c_on_one_rank_ends_all(ranks: int) -> None:
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
if last:
    signal.raise_signal(signal.SIGINT)
step()
"""
    printed = stderr_of(ranks, body, code=130)
    assert printed.count(NOTICE.format(ranks - 1)) == 1
    assert printed.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("ending", ["sys.exit(0)", "sys.exit(3)", "raise SystemExit('no data')"])
@pytest.mark.parametrize("wait", ["step()", "group.broadcast(1)", "parallel_model()"])
@two_or_three_ranks
def test_a_rank_that_ends_early_ends_all(ending: str, wait: str, ranks: int) -> None:
    body = f"""
step()
if last:
    {ending}
{wait}
"""
    result = run_on_ranks(ranks, "-c", PROGRAM.format(body=body), code=3 if "3" in ending else 1)
    call = {"s": "Group.exchange", "g": "Group.broadcast", "p": "DataParallel"}[wait[0]]
    message = f"RankError: {call}: rank {ranks - 1} has ended, and the others wait for it\n"
    assert result.stderr.count(message) == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count(NOTICE.format(0)) == 1
    assert result.stderr.count("no data") == ("no data" in ending)


def test_a_failure_that_was_caught_where_it_happened_is_reported_elsewhere() -> None:
    body = """
def work(shard):
    if last:
        raise KeyError("no such file")

try:
    group.run(work)
except KeyError:
    pass
step()
"""
    printed = stderr_of(3, body)
    assert printed.count("RankError: rank 2 failed: KeyError: 'no such file'\n") == 1
    assert printed.count("Traceback") == 1


@two_or_three_ranks
@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(0)"])
def test_a_clean_end_stays_clean(ending: str, ranks: int) -> None:
    """Even if one rank has more to do than the others, and if a process was forked."""
    body = f"""
step()
if os.fork() == 0:
    try:
        raise ValueError("in a child")  # which is no rank
    except ValueError:
        os._exit(0)
os.wait()
if last:
    print("ok", sum(range(10**6)))
{ending}
"""
    result = run_on_ranks(ranks, "-c", PROGRAM.format(body=body))
    assert (result.stdout, result.stderr) == ("ok 499999500000\n", "")


def test_an_uncaught_exception_of_a_forked_process_is_its_own() -> None:
    body = """
if last:
    child = os.fork()
    if not child:
        try:
            raise ValueError("in a child")
        except ValueError:
            sys.excepthook(*sys.exc_info())
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert step() == [[0, 1, 2, 3]] * 4
"""
    printed = stderr_of(2, body, code=0)
    assert printed.count("ValueError: in a child") == 1
    assert "ends all ranks" not in printed


def test_codes_of_all_ranks_are_kept() -> None:
    assert stderr_of(2, "step()\nsys.exit(3)", code=3) == ""


@two_or_three_ranks
def test_train_reports_an_unexpected_error_of_one_rank(ranks: int, tmp_path: Path) -> None:
    """The other ranks are in different calls by then: in a step, or about to join."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a bird.\n" * 200)
    options = ["--hidden", "4", "--embedding", "3", "--batch", "8", "--unroll", "4", "--steps", "8"]
    for place in ("step", "__init__"):
        body = f"""
from retrograd.cli import main
from retrograd.train.text import TextTask
real = TextTask.{place}
def failing(self, *rest, **options):
    if last:
        raise KeyError("no such file")
    return real(self, *rest, **options)
TextTask.{place} = failing
sys.exit(main({["train", "text", str(text), *options, "--output", str(tmp_path / place)]!r}))
"""
        printed = stderr_of(ranks, body)
        assert printed.count(NOTICE.format(ranks - 1)) == 1
        assert printed.count("KeyError: 'no such file'") == 1
        assert printed.count("Traceback") == 1


def test_hooks_of_the_program_still_run() -> None:
    """A rank's report goes through the hook that the program had installed before."""
    body = """
if last:
    raise KeyError("no such file")
step()
"""
    before = "import sys\nsys.excepthook = lambda kind, error, trace: sys.stderr.write(f'mine: {error}\\n')\n"
    result = run_on_ranks(2, "-c", before + PROGRAM.format(body=body), code=1)
    assert result.stderr.count("mine: 'no such file'\n") == 1
    assert "Traceback" not in result.stderr
    assert sys.excepthook is sys.__excepthook__  # one process keeps its own
