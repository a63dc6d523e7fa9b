"""LSTM: many threads at once, fork, and memory over many calls."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from retrograd.lab import cases
from retrograd.lab.cases import LstmCase
from retrograd.lab.verify import run_lstm
from support.arrays import assert_same_bits
from support.lstm import CACHED
from support.processes import forks, linux, python


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
