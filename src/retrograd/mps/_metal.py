"""The parts of Metal that kernels need: a device, buffers, command queues and command buffers.

Encoding checks and records work; `commit` submits it. The command buffers of a queue run one at a time, in the order of
their commits: on the queue's worker thread, or on a thread that waits for one of them and would otherwise be idle.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Iterable
from mmap import PAGESIZE
from queue import SimpleQueue
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..ops._buffers import elements_of
from ._types import (
    LARGEST_SIZE,
    MTLCommandBufferStatus,
    MTLResourceOptions,
    MTLStorageMode,
    NSError,
    Setting,
    as_flags,
    as_label,
    as_unsigned,
)

Handler: TypeAlias = Callable[[Any], object]
Work: TypeAlias = Callable[[], None]

_LOG: Final = logging.getLogger("retrograd.mps")
# Seconds that the worker thread leaves callers after a commit. Most of them wait for the buffer and run it themselves,
# which is faster than waking a thread; the worker runs the rest.
_GRACE: Final = 0.001

_NOT_ENQUEUED: Final = MTLCommandBufferStatus.notEnqueued
_ENQUEUED: Final = MTLCommandBufferStatus.enqueued
_COMMITTED: Final = MTLCommandBufferStatus.committed
_SCHEDULED: Final = MTLCommandBufferStatus.scheduled
_COMPLETED: Final = MTLCommandBufferStatus.completed
_ERROR: Final = MTLCommandBufferStatus.error


class MTLBuffer:
    """Memory. Made by :meth:`MTLDevice.makeBuffer`."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_bytes",
        "_device",
        "_dtype",
        "_has_deallocator",
        "_label",
        "_memory",
        "_options",
    )

    label = Setting[str | None](as_label, None, "Debug label.")

    def __init__(
        self, device: MTLDevice, memory: memoryview, options: MTLResourceOptions, dtype: np.dtype[Any] | None = None
    ) -> None:
        self._device = device
        self._memory = memory
        self._dtype = dtype  # of the array that it was made from; None: raw memory, which can hold any type
        self._options = options
        self._label: str | None = None
        self._has_deallocator = False
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._address: int = self._bytes.__array_interface__["data"][0]

    @property
    def device(self) -> MTLDevice:
        return self._device

    @property
    def length(self) -> int:
        return self._bytes.size

    @property
    def resourceOptions(self) -> MTLResourceOptions:
        return self._options

    @property
    def storageMode(self) -> MTLStorageMode:
        """The storage mode in the options. The memory is always the CPU's."""
        return MTLStorageMode(self._options >> 4 & 3)

    @property
    def allocatedSize(self) -> int:
        return self._bytes.size

    def contents(self) -> memoryview:
        """The bytes, without a copy."""
        return self._memory[:]  # a new view, which the caller may release

    def didModifyRange(self, range: object) -> None:
        """No effect: CPU and device share memory."""

    def __repr__(self) -> str:
        return f"<MTLBuffer of {self._bytes.size} bytes>"


class MTLDevice:
    """The CPU, in place of a GPU."""

    __slots__ = ()

    _buffer_type: ClassVar[type[MTLBuffer]] = MTLBuffer
    _queue_type: ClassVar[type[MTLCommandQueue]]

    @property
    def name(self) -> str:
        return "retrograd CPU"

    @property
    def hasUnifiedMemory(self) -> bool:
        return True

    @property
    def registryID(self) -> int:
        return 0

    @property
    def isLowPower(self) -> bool:
        return False

    @property
    def maxBufferLength(self) -> int:
        """The largest addressable size; available memory may be less."""
        return LARGEST_SIZE

    @property
    def recommendedMaxWorkingSetSize(self) -> int:
        """Physical memory in bytes, if the operating system reports it."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return LARGEST_SIZE

    def makeBuffer(
        self,
        *,
        length: int | None = None,
        bytes: Any = None,
        bytesNoCopy: Any = None,
        options: int | Iterable[int] = 0,
        deallocator: Callable[[Any, int], object] | None = None,
    ) -> MTLBuffer:
        """Make a buffer of `length` zeros, from a copy of `bytes`, or over the memory of `bytesNoCopy` without a copy.

        `bytes` and `bytesNoCopy` are any objects with contiguous memory (ndarray, bytearray, mmap, ctypes array,
        tensor); `length` bytes of it are used, by default all. A buffer made from typed elements can only hold matrices
        and vectors of that type; raw memory can hold any. `deallocator(bytesNoCopy, length)` is called when the buffer
        is deleted.
        """
        function = "MTLDevice.makeBuffer"
        flags = MTLResourceOptions(as_flags(f"{function}: options", options))
        size = None if length is None else as_unsigned(f"{function}: length", length)
        if bytes is not None and bytesNoCopy is not None:
            raise ValueError(f"{function}: give bytes or bytesNoCopy, not both")
        if deallocator is not None and not callable(deallocator):
            raise TypeError(f"{function}: deallocator must be callable, not {type(deallocator).__name__}")
        if bytes is None and bytesNoCopy is None:
            if size is None:
                raise ValueError(f"{function}: needs length, bytes or bytesNoCopy")
            _check_length(function, size, None)
            return self._buffer_type(self, np.zeros(size, np.uint8).data, flags)
        name, source = ("bytes", bytes) if bytesNoCopy is None else ("bytesNoCopy", bytesNoCopy)
        memory, dtype = memory_of(function, name, source)
        if size is None:
            size = memory.nbytes
        _check_length(function, size, memory.nbytes)
        if bytesNoCopy is None:
            memory = np.frombuffer(memory, np.uint8, size).copy().data
        buffer = self._buffer_type(self, memory[:size], flags, dtype)
        if bytesNoCopy is not None and (buffer._address % PAGESIZE or size % PAGESIZE):
            _LOG.info(
                "%s: bytesNoCopy is %d bytes at %#x, not whole pages of %d bytes; this is accepted here, but not by "
                "Apple's headers",
                *(function, size, buffer._address, PAGESIZE),
            )
        if deallocator is not None:
            buffer._has_deallocator = True
            weakref.finalize(buffer, deallocator, source, size).atexit = False
        return buffer

    def makeCommandQueue(self, maxCommandBufferCount: int = 64) -> MTLCommandQueue:
        """Make a command queue. `maxCommandBufferCount` is checked but does not limit it."""
        as_unsigned("MTLDevice.makeCommandQueue: maxCommandBufferCount", maxCommandBufferCount)
        return self._queue_type(self)

    def __repr__(self) -> str:
        return "<MTLDevice: CPU>"


def memory_of(function: str, name: str, source: object) -> tuple[memoryview, np.dtype[Any] | None]:
    """The memory, and the dtype of its elements if it has one."""
    try:
        array, typed = elements_of(source)
    except TypeError as error:
        raise TypeError(f"{function}: {name} {error}") from None
    if not array.flags.c_contiguous:
        raise ValueError(f"{function}: {name} is not contiguous (strides {array.strides}); a buffer must be contiguous")
    if not array.nbytes:
        raise ValueError(f"{function}: {name} is empty")
    return array.reshape(-1).view(np.uint8).data, array.dtype if typed else None


def _check_length(function: str, length: int, available: int | None) -> None:
    if length == 0:
        raise ValueError(f"{function}: length is 0, must be at least 1")
    if length > LARGEST_SIZE:
        raise ValueError(f"{function}: length is {length}, but maxBufferLength is {LARGEST_SIZE}")
    if available is not None and length > available:
        raise ValueError(f"{function}: length is {length}, but the memory has {available} bytes")


# ---- queue -----------------------------------------------------------------------------------------------------------


class _Executor:
    """A queue's pending command buffers, and the threads that run them.

    The first pending buffer runs on a thread that waits for it or for a later one, or else, after a short delay, on the
    queue's worker thread. A signal handler may raise an exception anywhere in a waiting thread. So locks are taken only
    by `with`, and a buffer is removed only after it has ended: the next thread continues from there.
    """

    def __init__(self) -> None:
        self.pending: deque[weakref.ref[MTLCommandBuffer]] = deque()  # enqueued and committed buffers
        self.committed: set[MTLCommandBuffer] = set()  # kept alive; a buffer that is only enqueued may be deleted
        self.run_lock = allocate_lock()  # held by the thread that runs the first pending buffer
        self.runner = 0  # the id of that thread
        self.engine_lock = allocate_lock()  # held by it while the engine computes
        self.start()

    def start(self) -> None:
        self.append_lock = allocate_lock()  # held while a buffer is appended to `pending`
        self.wakeups: SimpleQueue[bool] = SimpleQueue()  # for the worker thread; False: the queue has been deleted
        self.thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """Reset in the child, which has neither the worker thread nor the threads that held the locks."""
        lost, self.committed = self.committed, set()
        if self.runner == get_ident():  # work or a handler forked: its buffer ends in the child too
            self.committed = {buffer for buffer in lost if buffer._status > _COMMITTED}
            lost -= self.committed
        else:
            self.runner = 0
            self.run_lock = allocate_lock()
            self.engine_lock = allocate_lock()
        self.pending = deque(reference for reference in self.pending if reference() not in lost)
        self.start()
        for buffer in lost:
            if not buffer._ended:
                buffer._abandon(
                    RuntimeError("the process forked before this command buffer ended; only the parent completes it")
                )

    def enqueue(self, buffer: MTLCommandBuffer) -> None:
        with self.append_lock:
            if buffer._status != _NOT_ENQUEUED:
                raise RuntimeError(f"MTLCommandBuffer.enqueue: the buffer is {buffer._status.name} already")
            self.pending.append(weakref.ref(buffer, self.wake))  # if it is deleted, later buffers can run
            buffer._status = _ENQUEUED

    def commit(self, buffer: MTLCommandBuffer) -> None:
        with self.append_lock:
            buffer._check_open("MTLCommandBuffer.commit")
            self.committed.add(buffer)  # first: a child forked here must not find it only in `pending`
            if buffer._status != _ENQUEUED:
                self.pending.append(weakref.ref(buffer))
            buffer._status = _COMMITTED
            if self.thread is None:
                self.start_thread()
        if self.wakeups.empty():  # otherwise the worker thread will find this buffer anyway
            self.wake()

    def wake(self, _: object = None) -> None:
        self.wakeups.put(True)

    def start_thread(self) -> None:
        thread = threading.Thread(target=self.serve, name="MTLCommandQueue", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or shutdown: waiting threads run the buffers, the next commit retries
            return
        self.thread = thread

    def serve(self) -> None:
        """The worker thread."""
        while self.wakeups.get():
            time.sleep(_GRACE)
            self.leave_to_callers()
            try:
                while self.run_first():
                    pass
            except BaseException:  # such as SystemExit from a handler: the thread must keep running
                _LOG.exception("a command buffer was interrupted")
                self.wake()

    def leave_to_callers(self) -> None:
        """Wait while another thread runs buffers: it should not contend for the lock with the worker."""
        while self.runner:
            try:
                buffer = self.pending[0]()
            except IndexError:
                return
            if buffer is None or buffer._ended or buffer._status < _COMMITTED:  # none is running, or it has just ended
                return
            with buffer._done:
                pass

    def run_until(self, buffer: MTLCommandBuffer) -> None:
        """Run pending buffers up to this one, unless another thread does."""
        while not buffer._ended and self.run_first(buffer):
            pass

    def run_first(self, last: MTLCommandBuffer | None = None) -> bool:
        """Run the first pending buffer. Return False if none is ready, or `last` has ended."""
        with self.run_lock:
            self.runner = get_ident()
            try:
                buffer = self.first()
                if buffer is None or (last is not None and last._ended):
                    return False
                try:
                    buffer._run()
                finally:
                    self.first()  # removes the buffer, which has ended
                return True
            finally:
                self.runner = 0

    def first(self) -> MTLCommandBuffer | None:
        """The first pending buffer that has not ended, if it is committed. The caller holds `run_lock`."""
        while self.pending:
            buffer = self.pending[0]()
            if buffer is not None:
                if not buffer._ended:
                    return buffer if buffer._status >= _COMMITTED else None
                self.committed.discard(buffer)
            self.pending.popleft()
        return None


_executors: Final[weakref.WeakSet[_Executor]] = weakref.WeakSet()


def _after_fork() -> None:
    for executor in list(_executors):
        executor.after_fork()


_exiting = False


def _before_exit() -> None:
    """Wait until no thread is in the engine, then let the interpreter shut down. Work not started is dropped."""
    global _exiting
    _exiting = True
    for executor in list(_executors):
        with executor.engine_lock:
            pass


atexit.register(_before_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class MTLCommandQueue:
    """Runs command buffers in order. Queues are independent of each other."""

    __slots__ = ("__weakref__", "_device", "_executor", "_label")

    label = Setting[str | None](as_label, None, "Debug label.")

    _command_buffer_type: ClassVar[type[MTLCommandBuffer]]

    def __init__(self, device: MTLDevice) -> None:
        self._device = device
        self._label: str | None = None
        self._executor = _Executor()
        _executors.add(self._executor)

    def __del__(self) -> None:
        executor = getattr(self, "_executor", None)
        if executor is not None:
            executor.wakeups.put(False)

    @property
    def device(self) -> MTLDevice:
        return self._device

    def makeCommandBuffer(self) -> MTLCommandBuffer:
        return self._command_buffer_type(self)

    def makeCommandBufferWithUnretainedReferences(self) -> MTLCommandBuffer:
        """The same as makeCommandBuffer: objects that work needs are always kept alive."""
        return self._command_buffer_type(self)


class MTLBlitCommandEncoder:
    """Copies between CPU and device. No effect: they share memory."""

    __slots__ = ("_label",)

    label = Setting[str | None](as_label, None, "Debug label.")

    def __init__(self) -> None:
        self._label: str | None = None

    def synchronize(self, resource: MTLBuffer) -> None:
        if not isinstance(resource, MTLBuffer):
            raise TypeError(
                f"MTLBlitCommandEncoder.synchronize: resource must be an MTLBuffer, not {type(resource).__name__}"
            )

    def endEncoding(self) -> None:
        """No effect."""


class MTLCommandBuffer:
    """A list of work that runs once, in order, after `commit`."""

    __slots__ = (
        "__weakref__",
        "_completed_handlers",
        "_done",
        "_end_time",
        "_ended",
        "_error",
        "_failure",
        "_label",
        "_queue",
        "_scheduled_handlers",
        "_start_time",
        "_status",
        "_work",
    )

    label = Setting[str | None](as_label, None, "Debug label.")

    _error_type: ClassVar[type[NSError]] = NSError
    _blit_encoder_type: ClassVar[type[MTLBlitCommandEncoder]] = MTLBlitCommandEncoder

    def __init__(self, queue: MTLCommandQueue) -> None:
        self._queue = queue
        self._label: str | None = None
        self._status = _NOT_ENQUEUED
        self._failure: BaseException | None = None
        self._error: NSError | None = None
        self._work: list[Work] = []
        self._scheduled_handlers: list[Handler] = []
        self._completed_handlers: list[Handler] = []
        self._start_time = self._end_time = 0.0
        self._ended = False  # the work and the handlers have finished
        self._done = allocate_lock()  # released when they have
        self._done.acquire()

    @property
    def commandQueue(self) -> MTLCommandQueue:
        return self._queue

    @property
    def device(self) -> MTLDevice:
        return self._queue._device

    @property
    def retainedReferences(self) -> bool:
        return True

    @property
    def status(self) -> MTLCommandBufferStatus:
        return self._status

    @property
    def error(self) -> NSError | None:
        """Why the status is `error`."""
        if self._status == _ERROR and self._error is None:
            # No failure recorded: an interrupt came first.
            failure = self._failure or KeyboardInterrupt("while the command buffer ended")
            error = self._error_type(f"{type(failure).__name__}: {failure}")
            error.__cause__ = failure
            self._error = error
        return self._error

    @property
    def gpuStartTime(self) -> float:
        """When the work started, in seconds of a clock with an arbitrary origin; 0 before."""
        return self._start_time

    @property
    def gpuEndTime(self) -> float:
        return self._end_time

    @property
    def kernelStartTime(self) -> float:
        """The same as gpuStartTime: there is no other device to submit work to."""
        return self._start_time

    @property
    def kernelEndTime(self) -> float:
        return self._end_time

    def pushDebugGroup(self, string: str) -> None:
        """No effect: there is no debugger for command buffers."""
        if not isinstance(string, str):
            raise TypeError(f"MTLCommandBuffer.pushDebugGroup: string must be a str, not {type(string).__name__}")

    def popDebugGroup(self) -> None:
        """No effect."""

    def makeBlitCommandEncoder(self) -> MTLBlitCommandEncoder:
        self._check_open("MTLCommandBuffer.makeBlitCommandEncoder")
        return self._blit_encoder_type()

    def addScheduledHandler(self, handler: Handler) -> None:
        """Call `handler(self)` before the work."""
        self._check_open("MTLCommandBuffer.addScheduledHandler")
        self._scheduled_handlers.append(_checked_handler("addScheduledHandler", handler))

    def addCompletedHandler(self, handler: Handler) -> None:
        """Call `handler(self)` after the work. Waiting for the buffer includes waiting for its handlers."""
        self._check_open("MTLCommandBuffer.addCompletedHandler")
        self._completed_handlers.append(_checked_handler("addCompletedHandler", handler))

    def enqueue(self) -> None:
        """Reserve a place in the queue, before buffers that are enqueued or committed later."""
        self._queue._executor.enqueue(self)

    def commit(self) -> None:
        """Submit the work. Returns immediately."""
        self._queue._executor.commit(self)

    def waitUntilScheduled(self) -> None:
        """Wait until the work has started. Here that is when it is done, as in waitUntilCompleted."""
        self._wait("waitUntilScheduled")

    def waitUntilCompleted(self) -> None:
        """Wait for the work and the completion handlers. Runs them on this thread if they have not started."""
        self._wait("waitUntilCompleted")

    def _wait(self, function: str) -> None:
        if self._status < _COMMITTED:
            raise RuntimeError(f"MTLCommandBuffer.{function}: the buffer has not been committed and would never finish")
        if self._ended:
            return
        executor = self._queue._executor
        if executor.runner == get_ident():
            raise RuntimeError(f"MTLCommandBuffer.{function}: called by a handler, and would wait for itself")
        executor.run_until(self)
        if not self._ended:
            with self._done:
                pass

    def _check_open(self, function: str) -> None:
        if self._status >= _COMMITTED:
            raise RuntimeError(f"{function}: the command buffer has been committed already")

    def _run(self) -> None:
        """Run the work and end the buffer, even if an interrupt comes at any point."""
        failure: BaseException | None = None
        try:
            try:
                self._status = _SCHEDULED
                if self._scheduled_handlers:
                    self._call(self._scheduled_handlers)
                self._start_time = time.perf_counter()
                engine_lock = self._queue._executor.engine_lock
                for work in self._work:
                    with engine_lock:
                        if _exiting:
                            raise RuntimeError("the interpreter is ending")
                        work()
            except BaseException as error:
                failure = error
            self._end_time = time.perf_counter()
            self._work = []
            self._failure = failure
            self._status = _COMPLETED if failure is None else _ERROR
            if self._completed_handlers and not _exiting:
                self._call(self._completed_handlers)
        finally:
            # No calls before `release`: an interrupt could follow each of them.
            if self._status < _COMPLETED:
                self._failure = failure
                self._status = _ERROR
            self._ended = True
            self._done.release()
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # an interrupt: the waiting caller must see it

    def _abandon(self, failure: BaseException) -> None:
        """End the buffer in a forked child. The parent runs the work and the handlers."""
        self._work = []
        self._completed_handlers.clear()
        if self._status < _COMPLETED:
            self._failure = failure
            self._status = _ERROR
        self._ended = True
        self._done.release()

    def _call(self, handlers: list[Handler]) -> None:
        for handler in handlers:
            try:
                handler(self)
            except Exception:
                _LOG.exception("a handler of %r failed", self)
        handlers.clear()

    def __repr__(self) -> str:
        return f"<MTLCommandBuffer {self._label or ''}: {self._status.name}>"


def _checked_handler(function: str, handler: Handler) -> Handler:
    if not callable(handler):
        raise TypeError(f"MTLCommandBuffer.{function}: handler must be callable, not {type(handler).__name__}")
    return handler


MTLDevice._queue_type = MTLCommandQueue
MTLCommandQueue._command_buffer_type = MTLCommandBuffer

_default_device: Final = MTLDevice()


def MTLCreateSystemDefaultDevice() -> MTLDevice:
    """The only device."""
    return _default_device


def MTLCopyAllDevices() -> list[MTLDevice]:
    """Return the devices: the CPU alone."""
    return [_default_device]


def MPSSupportsMTLDevice(device: MTLDevice | None) -> bool:
    """Return whether kernels run on this device: on any that is not None."""
    return isinstance(device, MTLDevice)
