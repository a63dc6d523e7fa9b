"""retrograd.mps: command queues among threads, after fork, and at the end of the process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from retrograd.mps import MTLCommandBuffer, MTLCommandQueue
from support.arrays import Array
from support.metal import DEVICE, STATUS, add_one, finished, leave_to_the_caller, let_it_look, record
from support.waiting import ATTEMPTS, PATIENCE, nobody_interrupted, wait_until


def test_many_threads_on_one_queue_and_many_waiters() -> None:
    queue = DEVICE.makeCommandQueue()
    memories = [np.zeros((20, 30), np.float32) for _ in range(6)]
    failures: list[BaseException] = []

    def use(memory: Array) -> None:
        try:
            kernel, operands = add_one(memory)
            for step in range(60):
                buffer = queue.makeCommandBuffer()
                kernel.encode(buffer, *operands)
                buffer.commit()
                if step % 3:
                    buffer.waitUntilCompleted()
                    assert (memory == step + 1).all()
            last = queue.makeCommandBuffer()
            last.commit()
            waiters = [threading.Thread(target=last.waitUntilCompleted) for _ in range(3)]
            for waiter in waiters:
                waiter.start()
            for waiter in waiters:
                waiter.join(PATIENCE)
                assert not waiter.is_alive()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    assert all((memory == 60).all() for memory in memories)


def test_python_runs_while_a_kernel_does() -> None:
    """The queue's thread releases the interpreter's lock in the kernel: that is where this one finds it, if at all."""
    memory = np.zeros((4000, 1000), np.float32)
    kernel, operands = add_one(memory)
    queue = DEVICE.makeCommandQueue()
    for attempt in range(ATTEMPTS):
        began, ended = threading.Event(), threading.Event()
        buffer = queue.makeCommandBuffer()
        record(buffer, began.set)
        kernel.encode(buffer, *operands)
        record(buffer, ended.set)
        with nobody_interrupted():
            buffer.commit()
            assert began.wait(PATIENCE)
            inside = not ended.is_set()
        buffer.waitUntilCompleted()
        assert (memory == attempt + 1).all()
        if inside:
            break
    assert inside


def test_the_thread_leaves_buffers_to_callers_who_run_them() -> None:
    queue, ran = DEVICE.makeCommandQueue(), []
    leave_to_the_caller(queue)
    for _ in range(10):
        finished(queue, lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()] * 10


def test_a_buffer_behind_one_that_a_caller_runs_is_not_forgotten() -> None:
    queue, ran = DEVICE.makeCommandQueue(), threading.Event()
    leave_to_the_caller(queue)

    def commit_another() -> None:
        queue._executor.wakeups.get()  # that of the commit before
        queue._executor.thread = None
        behind = queue.makeCommandBuffer()
        record(behind, ran.set)
        behind.commit()
        wait_until(queue._executor.wakeups.empty)  # the queue's new thread looks
        assert not ran.is_set()

    assert finished(queue, commit_another).error is None
    assert ran.wait(PATIENCE)


def test_a_queue_that_is_gone_ends_its_thread() -> None:
    queue = DEVICE.makeCommandQueue()
    finished(queue)
    thread = queue._executor.thread
    assert thread is not None
    assert thread.daemon
    del queue
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_place_that_is_given_up_holds_nobody_up() -> None:
    queue, ran = DEVICE.makeCommandQueue(), []
    finished(queue)
    place, following = queue.makeCommandBuffer(), queue.makeCommandBuffer()
    place.enqueue()
    record(following, lambda: ran.append("following"))
    following.commit()
    done = threading.Event()
    last = queue.makeCommandBuffer()
    last.addCompletedHandler(lambda _: done.set())
    last.commit()
    del following, last  # committed, they run all the same
    let_it_look(queue)
    assert not ran
    del place
    gc.collect()
    assert done.wait(PATIENCE)
    assert ran == ["following"]


def test_a_buffer_that_was_enqueued_and_dropped_does_not_keep_its_queue() -> None:
    queue = DEVICE.makeCommandQueue()
    finished(queue)
    thread = queue._executor.thread
    assert thread is not None
    buffer = queue.makeCommandBuffer()
    buffer.enqueue()
    del queue, buffer
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_without_a_thread_the_waiter_runs_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = DEVICE.makeCommandQueue()
    buffers = [queue.makeCommandBuffer() for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        buffers[0].commit()
        buffers[1].commit()
        buffers[0].waitUntilCompleted()
    assert [buffer.status for buffer in buffers] == [STATUS.completed, STATUS.committed, STATUS.notEnqueued]
    done = threading.Event()
    buffers[2].addCompletedHandler(lambda _: done.set())
    buffers[2].commit()
    assert done.wait(PATIENCE)  # a thread was made
    assert buffers[1].status == STATUS.completed


def test_the_thread_sleeps_when_there_is_nothing_to_do() -> None:
    queue, done = DEVICE.makeCommandQueue(), threading.Event()
    finished(queue)
    let_it_look(queue)
    wait_until(queue._executor.wakeups.empty)  # which it waits for
    buffer = queue.makeCommandBuffer()
    buffer.addCompletedHandler(lambda _: done.set())
    buffer.commit()
    assert done.wait(PATIENCE)


OLD_QUEUE = DEVICE.makeCommandQueue()


def _in_a_child(connection: Any, pending: MTLCommandBuffer) -> None:
    memory = np.zeros((30, 40), np.float32)
    kernel, operands = add_one(memory)
    for queue in (OLD_QUEUE, DEVICE.makeCommandQueue()):
        for _ in range(2):
            buffer = queue.makeCommandBuffer()
            kernel.encode(buffer, *operands)
            buffer.commit()
            buffer.waitUntilCompleted()
    unfinished = OLD_QUEUE.makeCommandBuffer()
    done = threading.Event()
    unfinished.addCompletedHandler(lambda _: done.set())
    unfinished.commit()  # run by the child's own thread
    arrived = done.wait(PATIENCE)
    pending.waitUntilCompleted()
    connection.send((float(memory.min()), float(memory.max()), arrived, pending.status, str(pending.error)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork:RuntimeWarning")  # JAX minds any fork
def test_old_and_new_queues_work_in_a_child_after_fork() -> None:
    gate, called = threading.Event(), []
    finished(OLD_QUEUE)
    running = OLD_QUEUE.makeCommandBuffer()
    record(running, lambda: None if gate.wait(PATIENCE) else pytest.fail("nobody opened the gate"))
    running.addCompletedHandler(lambda _: called.append(os.getpid()))
    running.commit()
    wait_until(lambda: running.status > STATUS.committed)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_in_a_child, args=(theirs, running))
    child.start()
    try:
        assert mine.poll(PATIENCE), "the child hangs"
        low, high, arrived, status, error = mine.recv()
    finally:
        gate.set()
        child.join(PATIENCE)
        child.kill()
    assert (low, high, arrived) == (4.0, 4.0, True)
    assert status == STATUS.error  # it ends in the parent
    assert "forked" in error
    running.waitUntilCompleted()
    assert running.status == STATUS.completed
    assert called == [os.getpid()]
    assert finished(OLD_QUEUE).status == STATUS.completed


@pytest.mark.long
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork:RuntimeWarning")  # JAX minds any fork
def test_a_fork_while_queues_are_busy() -> None:
    queues, stop = [DEVICE.makeCommandQueue() for _ in range(3)], threading.Event()

    def keep_busy(queue: MTLCommandQueue) -> None:
        while not stop.is_set():
            buffers = [queue.makeCommandBuffer() for _ in range(20)]
            for buffer in buffers:
                buffer.commit()
            buffers[-1].waitUntilCompleted()

    threads = [threading.Thread(target=keep_busy, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    endings = []
    try:
        for _ in range(60):
            child = os.fork()
            if not child:
                signal.alarm(int(PATIENCE))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                well = all(finished(queue).status == STATUS.completed for queue in queues)
                os._exit(0 if well else 1)
            endings.append(os.waitpid(child, 0)[1])
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(endings), endings


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork:RuntimeWarning")  # JAX minds any fork
def test_a_fork_by_a_handler() -> None:
    """In the child its buffer ends, and those behind it do not run."""
    queue, ran, endings = DEVICE.makeCommandQueue(), [], []
    leave_to_the_caller(queue)
    first, second = queue.makeCommandBuffer(), queue.makeCommandBuffer()

    def fork(buffer: MTLCommandBuffer) -> None:
        endings.append(os.fork())

    record(first, lambda: ran.append("first"))
    record(second, lambda: ran.append("second"))
    first.addCompletedHandler(fork)
    first.commit()
    second.commit()
    first.waitUntilCompleted()
    if endings[0] == 0:
        signal.alarm(int(PATIENCE))
        second.waitUntilCompleted()
        well = ran == ["first"] and first.status == STATUS.completed and second.status == STATUS.error
        os._exit(0 if well and finished(queue).status == STATUS.completed else 1)
    assert os.waitpid(endings[0], 0)[1] == 0
    second.waitUntilCompleted()
    assert ran == ["first", "second"]


EXIT = """
import atexit, threading
import numpy as np
from retrograd.mps import *
device = MTLCreateSystemDefaultDevice()
queue = device.makeCommandQueue()
memory = np.zeros((3000, 1000), np.float32)
described = MPSMatrixDescriptor(rows=3000, columns=1000, rowBytes=4000, dataType=MPSDataType.float32)
matrix = MPSMatrix(buffer=device.makeBuffer(bytesNoCopy=memory), descriptor=described)
vector = MPSVector(device=device, descriptor=MPSVectorDescriptor(length=1000, dataType=MPSDataType.float32))
kernel = MPSMatrixBatchNormalization(device=device)
kernel.epsilon = 1
buffers = [queue.makeCommandBuffer() for _ in range(5)]
began, hanging = [threading.Event() for _ in buffers], threading.Event()
def hang(buffer):
    hanging.set()
    threading.Event().wait()
for buffer, event in zip(buffers, began):
    buffer._work.append(event.set)
    for _ in range(20):
        kernel.encode(buffer, matrix, vector, vector, None, None, matrix)
{ending}
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",  # not committed
        "buffers[0].commit()",
        "[buffer.commit() for buffer in buffers]",
        "[buffer.commit() for buffer in buffers]; began[0].wait()",
        "[buffer.commit() for buffer in buffers]; began[3].wait()",
        "[buffer.commit() for buffer in buffers]; buffers[0].waitUntilCompleted()",
        "buffers[0].addCompletedHandler(hang); buffers[0].commit(); hanging.wait()",
        "atexit.register(lambda: (buffers[0].commit(), buffers[0].waitUntilCompleted()))",
    ],
)
def test_the_interpreter_ends_whatever_is_going_on(ending: str) -> None:
    script = EXIT.format(ending=ending)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_wait_at_the_end_needs_no_thread() -> None:
    """From Python 3.12 on none can be started by then."""
    ending = """
def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def last():
    threading.Thread.start = refuse
    buffers[0].commit()
    buffers[0].waitUntilCompleted()
    print(buffers[0].status.name)
atexit.register(last)
"""
    script = EXIT.format(ending=ending)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "completed\n", "")


def test_a_wait_after_the_end_is_told() -> None:
    """By a function that was registered before the package was imported, and so is called last."""
    script = EXIT.format(ending="").replace(
        "import atexit, threading\n",
        "import atexit, threading\n"
        "def last():\n    buffers[0].commit()\n    buffers[0].waitUntilCompleted()\n    print(buffers[0].error)\n"
        "atexit.register(last)\n",
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "the interpreter is ending" in run.stdout
