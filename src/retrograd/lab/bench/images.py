"""The suite conv: convolutions and pooling, compared with PyTorch; convolutions also with NumPy's matrix product."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ...ops._types import Array
from .memory import Peak, run_apart
from .sgemm import Gemm, Sgemm
from .timing import Contest, Machine, admit, agree, clock, wake_workers

__all__ = ["ImageCase", "Steps", "TorchSteps", "image_contest", "image_failures", "peak_bytes", "print_peaks"]

_GEMM: Final = Gemm(1024, 1024, 1024)
_PASSES: Final = ("forward", "backward", "step")
_MEMORY_STEPS: Final = 3


class Steps:
    """Times forward, backward and both.

    `forward` returns y, or a tuple that starts with y; `backward` gets that and returns the gradients. With `threads`,
    retrograd's worker threads are woken before a turn.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[], Any],
        backward: Callable[[Any], Sequence[Any]],
        threads: int | None = None,
    ) -> None:
        self.name, self.forward, self.backward, self._threads = name, forward, backward, threads

    def wake(self) -> None:
        if self._threads is not None:
            wake_workers(self._threads)

    def step(self) -> tuple[float, float, float]:
        start = clock()
        kept = self.forward()
        middle = clock()
        gradients = self.backward(kept)
        end = clock()
        del kept, gradients  # freed outside the timed section
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        kept = self.forward()
        return [kept[0] if isinstance(kept, tuple) else kept, *self.backward(kept)]


class TorchSteps(Steps):
    """PyTorch as users call it: eager, autograd."""

    def __init__(self, torch: Any, call: Callable[..., Any], inputs: Sequence[Array], dy: Array) -> None:
        leaves = [torch.from_numpy(array).requires_grad_() for array in inputs]
        gradient, grad = torch.from_numpy(dy), torch.autograd.grad
        super().__init__("torch", lambda: call(*leaves), lambda y: grad(y, leaves, gradient))

    def results(self) -> list[Any]:
        return [tensor.detach().numpy() for tensor in super().results()]


class ImageCase(Protocol):
    """A named tuple, so that its repr makes another one."""

    @property
    def name(self) -> str: ...
    @property
    def flops(self) -> tuple[float, ...] | None:
        """Of the matrix products in each pass."""
        ...

    @property
    def small(self) -> ImageCase:
        """A case of the same kind with little data."""
        ...

    def make(self) -> Any:
        """The arrays, a named tuple."""
        ...

    def ours(self, data: Any, threads: int, given: bool = True) -> Steps:
        """With `given`, into given buffers."""
        ...

    def torch(self, torch: Any, data: Any) -> Steps: ...


def image_failures(case: ImageCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for results that differ from the engine's in float64, which tests compare with the oracle."""
    data = case.make()
    wide = case.ours(type(data)(*(a.astype(np.float64) for a in data)), max(threads)).results()
    for number in threads:
        if not agree(case.ours(data, number).results(), wide, 1e-4):
            yield f"float32 and float64 differ, threads {number}"


def image_contest(case: ImageCase, data: Any, threads: int, machine: Machine, stack: contextlib.ExitStack) -> Contest:
    ours = case.ours(data, threads)
    contest = Contest([[ours]], None, [], _PASSES)
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        peer = case.torch(machine.torch, data)
        admit(contest, peer, agree(ours.results(), peer.results()))
    peaks: dict[tuple[str, str], int | None] = {}
    for (stepper,) in contest.slots:
        found = peak_bytes(case, stepper.name, threads)
        if found is not None:
            peaks |= {(stepper.name, pass_): peak for pass_, peak in zip(_PASSES, found, strict=True)}
    contest = contest._replace(peaks=peaks)
    if case.flops is None:
        return contest
    sgemm = Sgemm([_GEMM], case.flops, threads, stack)
    contest.slots.append([sgemm])
    return contest._replace(bound=sgemm.name, flops=case.flops, child_seconds=lambda: sgemm.cpu_seconds)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(case: ImageCase, provider: str, threads: int) -> list[int] | None:
    """Return the peak memory of each pass above that before it all, in bytes. Linux only, otherwise None.

    Forward and backward are the first ones of a process, and backward keeps y. Of steps, there are several. Results are
    allocated by the library.
    """
    kind = type(case)
    return run_apart(
        f"from {kind.__module__} import {kind.__name__}\n"
        f"from {__name__} import print_peaks\n"
        f"print_peaks({case!r}, {provider!r}, {threads})"
    )


def print_peaks(case: ImageCase, provider: str, threads: int) -> None:
    """Print the peaks of all passes, in a separate process. A small case loads the library first."""
    torch = None
    if provider == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(threads)

    def steps(problem: ImageCase, data: Any) -> Steps:
        return problem.ours(data, threads, given=False) if torch is None else problem.torch(torch, data)

    data = case.make()
    steps(case.small, case.small.make()).step()
    peak = Peak()
    measured = steps(case, data)
    kept = measured.forward()
    forward = peak.bytes()
    peak.restart()
    gradients = measured.backward(kept)
    backward = peak.bytes()
    del kept, gradients
    for _ in range(_MEMORY_STEPS):
        measured.step()
    print(forward, backward, max(forward, backward, peak.bytes()))
