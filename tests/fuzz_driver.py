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

``run`` raises :class:`Broken` for a promise that was not kept; any other exception is a finding too. `main` gives the
target the options ``--count``, ``--seed`` and ``--jobs``, prints the tally, and on a finding the seed that repeats it.
A test calls ``work(run, first, count)`` for a short run. `timed` is for single calls that must not hang.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

GUARD = 64  # bytes on either side of a buffer
PATTERN = 0xA5
SLOW = 20.0  # seconds: no call on buffers of a few kilobytes takes that long

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


def work(run: Run, first: int, count: int, report: bool = False) -> Counter[str]:
    """Run the cases of `count` seeds, beginning with `first`."""
    tally: Counter[str] = Counter()
    start = time.monotonic()
    for index in range(count):
        seed = first + index
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


def main(target: str, run: Run) -> int:
    """The command line of a target. `run` must be a function of a module, so that other processes find it."""
    parser = argparse.ArgumentParser(description=f"Fuzz {target}.")
    parser.add_argument("--count", type=int, default=20000, help="cases to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args()
    jobs = max(1, min(options.jobs, options.count))
    try:
        if jobs == 1:
            tally = work(run, options.seed, options.count, True)
        else:
            ends = [options.count * k // jobs for k in range(jobs + 1)]
            parts = [(run, options.seed + ends[k], ends[k + 1] - ends[k], k == 0) for k in range(jobs)]
            with multiprocessing.get_context("fork").Pool(jobs) as pool:
                tally = sum(pool.starmap(work, parts), Counter())
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    for name, number in sorted(tally.items()):
        print(f"{number:9}  {name}")
    print(f"{options.count} cases, nothing found")
    return 0
