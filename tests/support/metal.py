"""Work for Metal's command buffers, and waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd.mps import (
    MPSDataType,
    MPSMatrix,
    MPSMatrixBatchNormalization,
    MPSMatrixDescriptor,
    MPSVector,
    MPSVectorDescriptor,
    MTLCommandBuffer,
    MTLCommandBufferStatus,
    MTLCommandQueue,
    MTLCreateSystemDefaultDevice,
)
from support.arrays import Array
from support.waiting import PATIENCE, wait_until

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
