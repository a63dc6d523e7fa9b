"""What the fuzz targets (``fuzz_*.py``) share: guarded memory, and cases that run by seed.

A target is a module with a function for one case:

    def run(seed: int, tally: Counter[str]) -> None:
        random = np.random.default_rng(seed)  # everything a case does follows from its seed
        memory = Memory(random)
        x = memory.take((4, 3), np.float32)  # a buffer between two guards, filled with random values
        ...
        memory.check_guards()  # raises Broken if a call wrote outside a buffer
        tally["function done"] += 1

    if __name__ == "__main__":
        sys.exit(main("retrograd.mps", run))

``run`` raises :class:`Broken` for a promise that was not kept; any other exception is a finding too, and so is a
process that dies or that stays in one case. `main` gives the target the options ``--count``, ``--seed`` and ``--jobs``,
prints the tally, and on a finding the seed that repeats it. A test calls ``work(run, first, count)`` for a short run.
`timed` is for single calls that must not hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

GUARD = 64  # bytes on either side of a buffer
PATTERN = 0xA5
SLOW = 20.0  # seconds: no call on buffers of a few kilobytes takes that long
STUCK = 120.0  # seconds in one case, after which its process is ended
BUSY = 120.0  # the same in seconds of processor time, which other processes cannot use up
# What descriptors and members are mutated to.
INTEGERS = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62]
INTEGERS += [2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 0.9, 1e-3, 1e38, 1e300, -1e-45, float("nan"), float("inf"), -float("inf")]
STRANGE = [None, "text", b"", 1.5, [], {}, object(), np.zeros(0, np.float32), np.array([None] * 4), True]

Run: TypeAlias = Callable[[int, Counter[str]], None]


class Broken(Exception):
    """A promise that was not kept."""


@dataclass
class Memory:
    """The caller's buffers, each between two guards."""

    random: np.random.Generator
    blocks: list[np.ndarray] = field(default_factory=list)
    buffers: list[np.ndarray] = field(default_factory=list)

    def take(self, shape: int | tuple[int, ...], dtype: Any = np.float32, shift: int = 0) -> np.ndarray:
        """A contiguous array with random values; `shift` bytes off its alignment."""
        dtype = np.dtype(dtype)
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        block = np.full(count * dtype.itemsize + 2 * GUARD + shift, PATTERN, np.uint8)
        buffer = block[GUARD + shift : GUARD + shift + count * dtype.itemsize].view(dtype).reshape(shape)
        if dtype.kind in "iub":
            buffer[...] = self.random.integers(0, 2 if dtype.kind == "b" else 5, shape)
        else:
            buffer[...] = self.random.normal(0, 1, shape)
        self.blocks.append(block)
        self.buffers.append(buffer)
        return buffer

    def state(self) -> list[bytes]:
        """What all buffers hold now, to be compared later."""
        return [buffer.tobytes() for buffer in self.buffers]

    def check_guards(self) -> None:
        for block, buffer in zip(self.blocks, self.buffers, strict=True):
            low = block.size - GUARD - buffer.nbytes
            if (block[:low] != PATTERN).any() or (block[-GUARD:] != PATTERN).any():
                raise Broken("a call wrote outside a buffer")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Raise Broken if what is inside takes longer than SLOW seconds."""
    start = time.monotonic()
    yield
    if time.monotonic() - start > SLOW:
        raise Broken(f"{name} took {time.monotonic() - start:.0f} seconds")


def work(run: Run, first: int, count: int, report: bool = False, now: Any = None) -> Counter[str]:
    """Run the cases of `count` seeds, beginning with `first`; `now.value` is always the seed of the case that runs."""
    tally: Counter[str] = Counter()
    start = time.monotonic()
    for index in range(count):
        seed = first + index
        if now is not None:
            now.value = seed
        try:
            run(seed, tally)
        except Exception:
            raise Broken(f"{traceback.format_exc()}repeat it with --seed {seed} --count 1") from None
        if report and sys.stderr.isatty() and index % 500 == 499:
            rate = (index + 1) / (time.monotonic() - start)
            print(f"\r{index + 1} of {count}, {rate:.0f} a second", end="", file=sys.stderr, flush=True)
    if report and sys.stderr.isatty():
        print(file=sys.stderr)
    return tally


@dataclass
class Job:
    """A process with a part of the cases."""

    process: Any
    answer: Connection  # a Counter, or the text of a finding
    now: Any  # the seed of the case that it runs
    seen: int = -1  # the last of those that was seen here, when, and the processor time used by then
    since: float = 0.0
    used: float = 0.0

    @staticmethod
    def start(run: Run, first: int, count: int, report: bool) -> Job:
        context = multiprocessing.get_context("fork")
        mine, its = context.Pipe(duplex=False)
        now = context.Value("q", first, lock=False)
        process = context.Process(target=Job.main, args=(run, first, count, report, now, its), daemon=True)
        process.start()
        its.close()
        return Job(process, mine, now)

    @staticmethod
    def main(run: Run, first: int, count: int, report: bool, now: Any, answer: Connection) -> None:
        faulthandler.enable()  # a crash, or SIGABRT, shows where
        try:
            answer.send(work(run, first, count, report, now))
        except Broken as error:
            answer.send(str(error))

    def result(self) -> Counter[str] | None:
        """The tally, or None while there is none. Raises if there will never be one."""
        repeat = f"repeat it with --seed {self.now.value} --count 1"
        if self.answer.poll():
            try:
                tally: Counter[str] | str = self.answer.recv()
            except EOFError:
                self.process.join()
                raise Broken(f"the process ended with {self.process.exitcode}; {repeat}") from None
            if isinstance(tally, str):
                raise Broken(tally)
            return tally
        if self.now.value != self.seen:
            self.seen, self.since, self.used = self.now.value, time.monotonic(), self.processor_time()
            return None
        stuck, busy = time.monotonic() - self.since > STUCK, self.processor_time() - self.used > BUSY
        if stuck or busy:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(10)
            limit = f"{STUCK:.0f} seconds" if stuck else f"{BUSY:.0f} seconds of processor time"
            raise Broken(f"a case has not ended after {limit}; {repeat}")
        return None

    def processor_time(self) -> float:
        """What the process has used, in seconds; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work_in_processes(run: Run, first: int, count: int, jobs: int) -> Counter[str]:
    """As `work`, in processes of its own, so that one may crash or hang."""
    ends = [first + count * k // jobs for k in range(jobs + 1)]
    running = [Job.start(run, ends[k], ends[k + 1] - ends[k], k == 0) for k in range(jobs)]
    tally: Counter[str] = Counter()
    try:
        while running:
            wait([job.answer for job in running], timeout=1)
            done = {id(job): job.result() for job in running}
            for found in done.values():
                tally.update(found or {})
            running = [job for job in running if done[id(job)] is None]
    finally:
        for job in running:
            job.process.kill()
            job.process.join()
    return tally


def main(target: str, run: Run) -> int:
    """The command line of a target."""
    parser = argparse.ArgumentParser(description=f"Fuzz {target}.")
    parser.add_argument("--count", type=int, default=20000, help="cases to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args()
    try:
        if options.count == 1:  # in this process, for a debugger
            tally = work(run, options.seed, 1)
        else:
            tally = work_in_processes(run, options.seed, options.count, max(1, min(options.jobs, options.count)))
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    for name, number in sorted(tally.items()):
        print(f"{number:9}  {name}")
    print(f"{options.count} cases, nothing found")
    return 0
