"""retrograd.mps: device, buffers, command queues and command buffers; what runs when, and on which thread."""

from __future__ import annotations

import array
import ctypes
import gc
import logging
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from waiting import ATTEMPTS, PATIENCE, ends, nobody_interrupted, wait_until

from retrograd.mps import (
    MPSDataType,
    MPSMatrix,
    MPSMatrixBatchNormalization,
    MPSMatrixDescriptor,
    MPSSupportsMTLDevice,
    MPSVector,
    MPSVectorDescriptor,
    MTLCommandBuffer,
    MTLCommandBufferStatus,
    MTLCommandQueue,
    MTLCopyAllDevices,
    MTLCreateSystemDefaultDevice,
    MTLResourceOptions,
    MTLStorageMode,
    NSMakeRange,
)

Array = np.ndarray[Any, Any]
DEVICE = MTLCreateSystemDefaultDevice()
STATUS = MTLCommandBufferStatus


def record(buffer: MTLCommandBuffer, work: Callable[[], None]) -> None:
    """Anything as the work of a command buffer; the kernels put theirs there in the same way."""
    buffer._work.append(work)


def finished(queue: MTLCommandQueue, *work: Callable[[], None]) -> MTLCommandBuffer:
    buffer = queue.makeCommandBuffer()
    for item in work:
        record(buffer, item)
    buffer.commit()
    buffer.waitUntilCompleted()
    return buffer


def leave_to_the_caller(queue: MTLCommandQueue) -> None:
    """End the queue's thread and let none be started: those who wait run the buffers."""
    executor = queue._executor
    if executor.thread is not None:
        executor.wakeups.put(False)
        executor.thread.join(PATIENCE)
    executor.thread = threading.main_thread()


def let_it_look(queue: MTLCommandQueue) -> None:
    """Until the queue's thread has looked for something to do. Taking the second wakeup it is done with the first."""
    for _ in range(2):
        queue._executor.wakeups.put(True)
        wait_until(queue._executor.wakeups.empty)


def add_one(memory: Array) -> tuple[MPSMatrixBatchNormalization, tuple[Any, ...]]:
    """A kernel and its operands: memory += 1, in place."""
    rows, columns = memory.shape
    descriptor = MPSMatrixDescriptor(
        rows=rows, columns=columns, rowBytes=memory.strides[0], dataType=MPSDataType.float32
    )
    matrix = MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=memory), descriptor=descriptor)

    def vector(value: float) -> MPSVector:
        array = np.full(columns, value, np.float32)
        described = MPSVectorDescriptor(length=columns, dataType=MPSDataType.float32)
        return MPSVector(buffer=DEVICE.makeBuffer(bytes=array), descriptor=described)

    kernel = MPSMatrixBatchNormalization(device=DEVICE)
    kernel.epsilon = 0
    return kernel, (matrix, vector(0), vector(1), None, vector(1), matrix)


# ---- device and buffers ----------------------------------------------------------------------------------------------


def test_there_is_one_device() -> None:
    assert MTLCreateSystemDefaultDevice() is DEVICE
    assert MTLCopyAllDevices() == [DEVICE]
    assert MPSSupportsMTLDevice(DEVICE)
    assert not MPSSupportsMTLDevice(None)
    assert isinstance(DEVICE.name, str)
    assert DEVICE.hasUnifiedMemory
    assert not DEVICE.isLowPower
    assert DEVICE.registryID >= 0
    assert 2**20 < DEVICE.recommendedMaxWorkingSetSize <= DEVICE.maxBufferLength


def test_a_new_buffer_is_zero_and_writable() -> None:
    buffer = DEVICE.makeBuffer(length=10, options=MTLResourceOptions.storageModeShared)
    contents = buffer.contents()
    assert (buffer.length, bytes(contents), buffer.device) == (10, bytes(10), DEVICE)
    contents[3] = 7
    assert bytes(buffer.contents())[3] == 7
    buffer.label = "weights"
    assert buffer.label == "weights"
    assert buffer.resourceOptions == 0
    buffer.didModifyRange(NSMakeRange(0, 10))
    assert (buffer.storageMode, buffer.allocatedSize) == (MTLStorageMode.shared, 10)
    managed = DEVICE.makeBuffer(length=1, options=[MTLResourceOptions.storageModeManaged])
    assert managed.storageMode == MTLStorageMode.managed
    assert DEVICE.makeBuffer(length=1, options=[]).resourceOptions == 0


def test_contents_belong_to_who_asked_for_them() -> None:
    buffer = DEVICE.makeBuffer(length=4)
    with buffer.contents() as contents:
        contents[1] = 5
    assert bytes(buffer.contents()) == b"\0\5\0\0"


def test_only_members_can_be_set() -> None:
    queue = DEVICE.makeCommandQueue()
    for thing in (DEVICE, DEVICE.makeBuffer(length=1), queue, queue.makeCommandBuffer()):
        with pytest.raises(AttributeError, match="lable"):
            thing.lable = "misspelt"  # type: ignore[union-attr]


def test_bytes_are_copied() -> None:
    source = np.arange(4, dtype=np.float32)
    buffer = DEVICE.makeBuffer(bytes=source, length=12)
    source[0] = 9
    assert np.frombuffer(buffer.contents(), np.float32).tolist() == [0, 1, 2]
    assert DEVICE.makeBuffer(bytes=b"abc").length == 3


@pytest.mark.parametrize(
    "make", [lambda: np.zeros(16, np.uint8), lambda: bytearray(16), lambda: (ctypes.c_char * 16)()]
)
def test_memory_of_the_caller_is_used_without_a_copy(make: Callable[[], Any]) -> None:
    memory = make()
    buffer = DEVICE.makeBuffer(bytesNoCopy=memory, length=8)
    assert buffer.length == 8
    buffer.contents()[2] = 5
    assert bytes(memoryview(memory).cast("B"))[2] == 5


def test_the_deallocator_is_called_when_nothing_uses_the_buffer() -> None:
    memory, called = np.zeros((4, 3), np.float32), []
    buffer = DEVICE.makeBuffer(bytesNoCopy=memory, deallocator=lambda pointer, length: called.append((pointer, length)))
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    matrix = MPSMatrix(buffer=buffer, descriptor=descriptor)
    kernel, (_, mean, var, _, beta, _) = add_one(np.zeros((4, 3), np.float32))
    work = DEVICE.makeCommandQueue().makeCommandBuffer()
    kernel.encode(work, matrix, mean, var, None, beta, matrix)
    del buffer, matrix
    gc.collect()
    assert not called  # the work needs it
    work.commit()
    work.waitUntilCompleted()
    gc.collect()
    assert len(called) == 1
    assert called[0][0] is memory
    assert called[0][1] == 48
    assert (memory == 1).all()


MATRIX = MPSMatrixDescriptor(rows=2, columns=2, rowBytes=8, dataType=MPSDataType.float32)
VECTOR = MPSVectorDescriptor(length=4, dataType=MPSDataType.float32)


@pytest.mark.parametrize("source", ["bytes", "bytesNoCopy"])
@pytest.mark.parametrize("dtype", ["f8", "i4", "i8", "f2", "u1", ">f4", "?", ml_dtypes.bfloat16], ids=str)
def test_a_buffer_of_elements_of_another_type_is_refused(source: str, dtype: Any) -> None:
    buffer = DEVICE.makeBuffer(**{source: np.zeros(16, dtype)})
    for make in (
        lambda: MPSMatrix(buffer=buffer, descriptor=MATRIX),
        lambda: MPSVector(buffer=buffer, descriptor=VECTOR),
        lambda: MPSVector(buffer=buffer, offset=4, descriptor=MPSVectorDescriptor(length=1, dataType=0x10000020)),
    ):
        with pytest.raises(TypeError, match=r"dataType is float32, but the buffer has elements of type "):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(4, np.float32),
        lambda: np.zeros((2, 2), np.float32),
        lambda: array.array("f", [0.0] * 4),
        lambda: (ctypes.c_float * 4)(),
        lambda: bytearray(16),
        lambda: memoryview(np.zeros(2)).cast("B"),
        lambda: (ctypes.c_char * 16)(),
        lambda: mmap.mmap(-1, 16),
    ],
)
def test_a_buffer_that_agrees_or_is_raw(make: Callable[[], Any]) -> None:
    memory = make()
    matrix = MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=memory), descriptor=MATRIX)
    matrix._elements()[...] = [[1, 2], [3, 4]]
    assert np.frombuffer(memory, np.float32).tolist() == [1, 2, 3, 4]
    assert MPSVector(buffer=DEVICE.makeBuffer(bytes=memory), descriptor=VECTOR)._elements().tolist() == [[1, 2, 3, 4]]


def test_a_tensor_is_used_without_a_copy(torch: Any) -> None:
    tensor = torch.zeros(4)
    matrix = MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=tensor), descriptor=MATRIX)
    matrix._elements()[...] = 3
    assert tensor.tolist() == [3, 3, 3, 3]


def test_uint8_holds_unorm8_and_uint8() -> None:
    buffer = DEVICE.makeBuffer(bytesNoCopy=np.zeros(4, np.uint8))
    for kind in (MPSDataType.uInt8, MPSDataType.unorm8):
        MPSVector(buffer=buffer, descriptor=MPSVectorDescriptor(length=4, dataType=kind))
    with pytest.raises(TypeError, match="dataType is int8"):
        MPSVector(buffer=buffer, descriptor=MPSVectorDescriptor(length=4, dataType=MPSDataType.int8))


def test_memory_that_is_not_whole_pages_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "retrograd.mps")
    DEVICE.makeBuffer(bytesNoCopy=mmap.mmap(-1, 2 * mmap.PAGESIZE))
    DEVICE.makeBuffer(bytes=bytearray(16))
    assert not caplog.records
    memory = np.arange(4, dtype=np.float32)
    buffer = DEVICE.makeBuffer(bytesNoCopy=memory)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("MTLDevice.makeBuffer: bytesNoCopy is 16 bytes at 0x")
    assert record.getMessage().endswith("this is accepted here, but not by Apple's headers")
    assert MPSVector(buffer=buffer, descriptor=VECTOR)._elements().tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs length"),
        ({"length": 0}, ValueError, "length is 0"),
        ({"length": -1}, ValueError, "length is -1"),
        ({"length": 2**63}, ValueError, "length is 9223372036854775808, but maxBufferLength is"),
        ({"length": 2.0}, TypeError, "length must be an int"),
        ({"bytes": b""}, ValueError, "bytes is empty"),
        ({"bytes": b"abc", "length": 4}, ValueError, "length is 4, but the memory has 3 bytes"),
        ({"bytesNoCopy": bytearray(3), "length": 4}, ValueError, "length is 4, but the memory has 3 bytes"),
        (
            {"bytesNoCopy": 12345, "length": 4},
            TypeError,
            "bytesNoCopy is the address 0x3039: pass the array, not its address",
        ),
        ({"bytesNoCopy": [1, 2]}, TypeError, "bytesNoCopy is of type list, which has no buffer"),
        ({"bytesNoCopy": np.zeros((4, 4))[:, ::2]}, ValueError, "not contiguous"),
        (
            {"bytesNoCopy": ctypes.c_void_p(4096)},
            TypeError,
            "bytesNoCopy is a c_void_p: pass the array, not its address",
        ),
        (
            {"bytes": ctypes.pointer(ctypes.c_float())},
            TypeError,
            "bytes is a LP_c_float: pass the array, not its address",
        ),
        ({"bytesNoCopy": np.ma.zeros(4, np.float32)}, TypeError, "bytesNoCopy is a masked array"),
        ({"bytes": np.zeros((4, 4), order="F")}, ValueError, "not contiguous"),
        ({"bytes": b"a", "bytesNoCopy": bytearray(1)}, ValueError, "not both"),
        ({"length": 4, "options": -1}, ValueError, "options is -1"),
        ({"bytesNoCopy": bytearray(4), "deallocator": 5}, TypeError, "deallocator must be callable"),
    ],
)
def test_buffer_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DEVICE.makeBuffer(**arguments)


# ---- the life of a command buffer ------------------------------------------------------------------------------------


def test_status_through_its_life() -> None:
    queue = DEVICE.makeCommandQueue()
    buffer = queue.makeCommandBuffer()
    assert (buffer.commandQueue, buffer.device, buffer.error) == (queue, DEVICE, None)
    assert buffer.retainedReferences
    seen = [buffer.status]
    gate = threading.Event()
    record(buffer, lambda: seen.append(buffer.status))
    record(buffer, lambda: None if gate.wait(PATIENCE) else pytest.fail("nobody opened the gate"))
    buffer.enqueue()
    seen.append(buffer.status)
    buffer.commit()
    wait_until(lambda: buffer.status > STATUS.committed)
    gate.set()
    buffer.waitUntilCompleted()
    seen.append(buffer.status)
    assert seen == [STATUS.notEnqueued, STATUS.enqueued, STATUS.scheduled, STATUS.completed]
    assert 0 < buffer.gpuStartTime <= buffer.gpuEndTime
    assert (buffer.kernelStartTime, buffer.kernelEndTime) == (buffer.gpuStartTime, buffer.gpuEndTime)
    buffer.waitUntilCompleted()  # again, at once
    buffer.waitUntilScheduled()


def test_commit_runs_the_work_without_being_waited_for() -> None:
    queue, main = DEVICE.makeCommandQueue(), threading.get_ident()
    for _ in range(3):
        done, threads = threading.Event(), []
        buffer = queue.makeCommandBuffer()
        record(buffer, lambda threads=threads: threads.append(threading.get_ident()))  # type: ignore[misc]
        buffer.addCompletedHandler(lambda _, done=done: done.set())  # type: ignore[misc]
        buffer.commit()
        assert done.wait(PATIENCE)
        assert threads
        assert threads[0] != main
        finished(queue)  # lets the queue's thread believe that somebody always waits


def test_nothing_runs_before_commit() -> None:
    memory = np.zeros((3, 4), np.float32)
    kernel, operands = add_one(memory)
    queue = DEVICE.makeCommandQueue()
    buffer = queue.makeCommandBuffer()
    kernel.encode(buffer, *operands)
    finished(queue)
    let_it_look(queue)
    assert not memory.any()
    buffer.commit()
    buffer.waitUntilCompleted()
    assert (memory == 1).all()


@pytest.mark.parametrize("wait", [False, True])
def test_buffers_run_in_the_order_of_their_commits(wait: bool) -> None:
    queue, ran = DEVICE.makeCommandQueue(), []
    buffers = [queue.makeCommandBuffer() for _ in range(50)]
    for k, buffer in enumerate(buffers):
        record(buffer, lambda k=k: ran.append(k))  # type: ignore[misc]
    order = list(np.random.default_rng(0).permutation(50))
    for k in order:
        buffers[k].commit()
        if wait and k % 7 == 0:
            buffers[k].waitUntilCompleted()
    buffers[order[-1]].waitUntilCompleted()
    assert ran == order
    assert all(buffer.status == STATUS.completed for buffer in buffers)


def test_an_enqueued_buffer_keeps_its_place() -> None:
    queue, ran = DEVICE.makeCommandQueue(), []
    first, second, third = (queue.makeCommandBuffer() for _ in range(3))
    for name, buffer in (("first", first), ("second", second), ("third", third)):
        record(buffer, lambda name=name: ran.append(name))  # type: ignore[misc]
    first.enqueue()
    second.enqueue()
    third.commit()
    second.commit()
    let_it_look(queue)
    assert ran == []
    first.commit()
    third.waitUntilCompleted()
    assert ran == ["first", "second", "third"]


def test_work_of_one_buffer_runs_in_the_order_of_its_encodes() -> None:
    memory = np.zeros((5, 3), np.float32)
    kernel, operands = add_one(memory)
    buffer = DEVICE.makeCommandQueue().makeCommandBuffer()
    for _ in range(10):
        kernel.encode(buffer, *operands)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert (memory == 10).all()


def test_queues_are_independent() -> None:
    gate = threading.Event()
    slow, fast = DEVICE.makeCommandQueue(), DEVICE.makeCommandQueue(maxCommandBufferCount=2)
    blocked = slow.makeCommandBuffer()
    record(blocked, lambda: None if gate.wait(PATIENCE) else pytest.fail("nobody opened the gate"))
    blocked.commit()
    assert finished(fast).status == STATUS.completed
    assert blocked.status < STATUS.completed
    gate.set()
    blocked.waitUntilCompleted()


def test_a_committed_buffer_takes_nothing_more() -> None:
    kernel, operands = add_one(np.zeros((3, 4), np.float32))
    buffer = finished(DEVICE.makeCommandQueue())
    for action in (
        buffer.commit,
        lambda: buffer.addCompletedHandler(print),
        lambda: buffer.addScheduledHandler(print),
        lambda: kernel.encode(buffer, *operands),
    ):
        with pytest.raises(RuntimeError, match="has been committed already"):
            action()
    with pytest.raises(RuntimeError, match="completed already"):
        buffer.enqueue()


def test_waiting_for_what_was_not_committed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has not been committed"):
        DEVICE.makeCommandQueue().makeCommandBuffer().waitUntilCompleted()


def test_an_error_in_the_work_is_told_and_stays_in_its_buffer() -> None:
    queue, ran = DEVICE.makeCommandQueue(), []

    def fail() -> None:
        raise ZeroDivisionError("as intended")

    bad = finished(queue, fail, lambda: ran.append("after the error"))
    assert bad.status == STATUS.error
    assert "ZeroDivisionError: as intended" in str(bad.error)
    assert isinstance(bad.error.__cause__, ZeroDivisionError)  # type: ignore[union-attr]
    assert "as intended" in bad.error.localizedDescription  # type: ignore[union-attr]
    assert (bad.error.domain, bad.error.code) == ("MTLCommandBufferErrorDomain", 1)  # type: ignore[union-attr]
    assert bad.error.userInfo == {"NSLocalizedDescription": str(bad.error)}  # type: ignore[union-attr]
    assert bad.error is bad.error
    assert finished(queue, lambda: ran.append("next")).status == STATUS.completed
    assert ran == ["next"]


def test_an_interrupt_while_waiting_is_raised() -> None:
    queue = DEVICE.makeCommandQueue()
    finished(queue)
    buffer = queue.makeCommandBuffer()

    def interrupt() -> None:
        raise KeyboardInterrupt

    record(buffer, interrupt)
    leave_to_the_caller(queue)
    buffer.commit()
    with pytest.raises(KeyboardInterrupt):
        buffer.waitUntilCompleted()
    assert buffer.status == STATUS.error
    assert finished(queue).status == STATUS.completed


class Alarm(BaseException):
    """What the signals of the next test raise: like KeyboardInterrupt, and nobody else's."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@pytest.mark.parametrize("scheduled", [False, True])
def test_an_interrupt_at_any_moment_of_a_wait_leaves_the_queue_alive(scheduled: bool) -> None:
    queue, rng = DEVICE.makeCommandQueue(), random.Random(0)

    def work() -> None:
        for _ in range(rng.randrange(200)):
            pass

    def alarm(number: int, frame: object) -> None:
        raise Alarm

    interrupted = 0
    before = signal.signal(signal.SIGALRM, alarm)
    gc.disable()  # others' callbacks of the collector would swallow the exception
    try:
        for _ in range(4000):
            buffer = queue.makeCommandBuffer()
            record(buffer, work)
            if scheduled:
                buffer.addScheduledHandler(lambda _: work())
            buffer.commit()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1.5e-4))
                    buffer.waitUntilCompleted()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                interrupted += 1
            wait_until(lambda buffer=buffer: buffer._ended, "the buffer never ends")  # type: ignore[misc]
            if buffer.status == STATUS.error:
                assert "Alarm" in str(buffer.error) or "while the command buffer ended" in str(buffer.error)
            else:
                assert buffer.status == STATUS.completed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupted
    ends(lambda: finished(queue))


def test_an_interrupt_fails_the_buffer_that_the_waiter_was_running() -> None:
    """Be it one that somebody else has committed before."""
    queue = DEVICE.makeCommandQueue()
    leave_to_the_caller(queue)
    first, second = queue.makeCommandBuffer(), queue.makeCommandBuffer()

    def interrupt() -> None:
        raise KeyboardInterrupt

    record(first, interrupt)
    first.commit()
    second.commit()
    with pytest.raises(KeyboardInterrupt):
        second.waitUntilCompleted()
    assert first.status == STATUS.error
    assert "KeyboardInterrupt" in str(first.error)
    ends(second.waitUntilCompleted)
    assert second.status == STATUS.completed


def test_debug_groups_and_blit_encoders_do_nothing() -> None:
    buffer = DEVICE.makeCommandQueue().makeCommandBuffer()
    buffer.pushDebugGroup("step")
    encoder = buffer.makeBlitCommandEncoder()
    encoder.synchronize(resource=DEVICE.makeBuffer(length=4))
    encoder.endEncoding()
    buffer.popDebugGroup()
    with pytest.raises(TypeError, match="resource must be an MTLBuffer, not int"):
        encoder.synchronize(resource=5)  # type: ignore[arg-type]
    buffer.commit()
    with pytest.raises(RuntimeError, match="committed already"):
        buffer.makeBlitCommandEncoder()


# ---- handlers --------------------------------------------------------------------------------------------------------


def test_handlers_are_called_before_and_after_the_work_in_order() -> None:
    queue, seen = DEVICE.makeCommandQueue(), []
    buffer = queue.makeCommandBuffer()
    buffer.addCompletedHandler(lambda b: seen.append(("completed", b is buffer, b.status)))
    buffer.addCompletedHandler(lambda b: seen.append("second"))
    buffer.addScheduledHandler(lambda b: seen.append("scheduled"))
    record(buffer, lambda: seen.append("work"))
    buffer.commit()
    buffer.waitUntilCompleted()
    assert seen == ["scheduled", "work", ("completed", True, STATUS.completed), "second"]


def test_a_handler_that_raises_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    queue, seen = DEVICE.makeCommandQueue(), []

    def fail(buffer: MTLCommandBuffer) -> None:
        raise ValueError("as intended")

    for wait in (True, False):
        buffer = queue.makeCommandBuffer()
        buffer.addCompletedHandler(fail)
        done = threading.Event()
        buffer.addCompletedHandler(lambda b, done=done: (seen.append(b.status), done.set()))  # type: ignore[misc]
        with caplog.at_level(logging.ERROR, "retrograd.mps"):
            buffer.commit()
            if wait:
                buffer.waitUntilCompleted()
            assert done.wait(PATIENCE)
    assert seen == [STATUS.completed] * 2
    assert len([entry for entry in caplog.records if entry.exc_info]) == 2
    assert finished(queue).status == STATUS.completed


def test_a_handler_that_exits_does_not_end_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    queue = DEVICE.makeCommandQueue()
    buffer = queue.makeCommandBuffer()
    buffer.addCompletedHandler(lambda _: sys.exit("as intended"))
    with caplog.at_level(logging.ERROR, "retrograd.mps"):
        buffer.commit()
        wait_until(lambda: buffer.status >= STATUS.completed)
        done = threading.Event()
        following = queue.makeCommandBuffer()
        following.addCompletedHandler(lambda _: done.set())
        following.commit()
        assert done.wait(PATIENCE)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_scheduled_handler_that_exits_fails_its_buffer(
    ending: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    queue = DEVICE.makeCommandQueue()

    def end(buffer: MTLCommandBuffer) -> None:
        raise ending("as intended")

    with caplog.at_level(logging.CRITICAL, "retrograd.mps"):
        buffer = queue.makeCommandBuffer()
        buffer.addScheduledHandler(end)
        buffer.commit()  # the queue's thread runs it
        done = threading.Event()
        buffer_after = queue.makeCommandBuffer()
        buffer_after.addCompletedHandler(lambda _: done.set())
        buffer_after.commit()
        assert done.wait(PATIENCE)
        ends(buffer.waitUntilCompleted)
    assert buffer.status == STATUS.error
    assert "as intended" in str(buffer.error)

    leave_to_the_caller(queue)
    buffer = queue.makeCommandBuffer()
    buffer.addScheduledHandler(end)
    buffer.commit()
    with pytest.raises(ending):
        buffer.waitUntilCompleted()
    assert buffer.status == STATUS.error
    assert finished(queue).status == STATUS.completed


@pytest.mark.parametrize("when", ["addScheduledHandler", "addCompletedHandler"])
def test_a_handler_that_waits_for_its_own_buffer_is_told(when: str) -> None:
    seen: list[str] = []

    def wait(buffer: MTLCommandBuffer) -> None:
        try:
            buffer.waitUntilCompleted()
        except RuntimeError as error:
            seen.append(str(error))

    buffer = DEVICE.makeCommandQueue().makeCommandBuffer()
    getattr(buffer, when)(wait)
    buffer.commit()
    ends(buffer.waitUntilCompleted)
    assert len(seen) == 1
    assert "called by a handler" in seen[0]
    buffer.waitUntilCompleted()


def test_a_handler_may_commit_more_work() -> None:
    queue, ran, done = DEVICE.makeCommandQueue(), [], threading.Event()

    def again(buffer: MTLCommandBuffer) -> None:
        ran.append(len(ran))
        if len(ran) == 5:
            done.set()
            return
        following = queue.makeCommandBuffer()
        following.addCompletedHandler(again)
        following.commit()

    buffer = queue.makeCommandBuffer()
    buffer.addCompletedHandler(again)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert done.wait(PATIENCE)
    assert ran == [0, 1, 2, 3, 4]


def test_a_handler_that_waits_for_its_own_queue_is_told() -> None:
    queue, seen = DEVICE.makeCommandQueue(), []

    def wait(buffer: MTLCommandBuffer) -> None:
        following = queue.makeCommandBuffer()
        following.commit()
        try:
            following.waitUntilCompleted()
        except RuntimeError as error:
            seen.append(str(error))

    buffer = queue.makeCommandBuffer()
    buffer.addCompletedHandler(wait)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert "called by a handler" in seen[0]


def test_handlers_must_be_callable() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        DEVICE.makeCommandQueue().makeCommandBuffer().addCompletedHandler(None)  # type: ignore[arg-type]


# ---- threads, processes ----------------------------------------------------------------------------------------------


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
