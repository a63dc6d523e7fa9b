"""Norms, compared with PyTorch and with a streaming pass over their bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import retrograd

from ... import _core
from ...ops._types import Array
from ...ops.normalization import NormGradients
from ..cases import (
    NormCase,
    NormData,
)
from ..verify import fused_activation, verify_norm
from .timing import Contest, Machine, Stepper, admit, agree, clock, wake_workers

_EPS: Final = 1e-5
_PAGE_BYTES: Final = 4096
_LARGE_STREAM: Final = 1 << 20


class _OurNorm:
    name = "retrograd"

    def __init__(self, case: NormCase, data: NormData, threads: int) -> None:
        self.data = data
        self.out = np.zeros_like(data.x)
        self.gradients = NormGradients(*(np.zeros_like(a) for a in (data.x, data.gamma, data.beta)))
        self._forward = getattr(retrograd, f"{case.kind}_norm_forward")
        self._backward = getattr(retrograd, f"{case.kind}_norm_backward")
        self._forward_options: dict[str, Any] = {
            "eps": _EPS,
            "activation": fused_activation(case.activation, case.alpha, case.beta),
            "out": self.out,
            "num_threads": threads,
        }
        if case.kind == "layer":
            self._forward_options["axis"] = case.axis
        else:
            self._forward_options["channel_axis"] = case.channel_axis
        if case.kind == "group":
            self._forward_options["num_groups"] = case.num_groups
        self._backward_options: dict[str, Any] = {"out": self.gradients, "num_threads": threads}
        self._threads = threads

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, float]:
        start = clock()
        _, cache = self._forward(self.data.x, self.data.gamma, self.data.beta, **self._forward_options)
        middle = clock()
        self._backward(self.data.dy, cache, **self._backward_options)
        end = clock()
        return middle - start, end - middle


class _TorchNorm:
    """PyTorch as users call it: eager, autograd, the activation in place, channels-last memory format."""

    name = "torch"

    def __init__(self, torch: Any, case: NormCase, data: NormData) -> None:
        functional = torch.nn.functional
        to_torch = torch.from_numpy
        x, dy = to_torch(data.x), to_torch(data.dy)
        if case.kind != "layer" and case.layout == "last" and len(case.shape) > 2:
            x, dy = torch.movedim(x, -1, 1), torch.movedim(dy, -1, 1)
        x, gamma, beta = (tensor.detach().requires_grad_() for tensor in (x, to_torch(data.gamma), to_torch(data.beta)))
        activate = {
            "identity": lambda y: y,
            "relu": functional.relu_,
            "tanh": torch.tanh_,
            "sigmoid": torch.sigmoid_,
        }[case.activation]
        normalize: dict[str, Callable[[], Any]] = {
            "batch": lambda: functional.batch_norm(x, None, None, gamma, beta, True, 0.1, _EPS),
            "instance": lambda: functional.instance_norm(x, weight=gamma, bias=beta, eps=_EPS),
            "layer": lambda: functional.layer_norm(x, case.parameter_shape, gamma, beta, _EPS),
            "group": lambda: functional.group_norm(x, case.num_groups, gamma, beta, _EPS),
        }
        self._call: Callable[[], Any] = lambda: activate(normalize[case.kind]())
        self._leaves, self._dy, self._grad = (x, gamma, beta), dy, torch.autograd.grad
        self._case = case

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float]:
        start = clock()
        y = self._call()
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # freed outside the timed section
        return middle - start, end - middle

    def results(self) -> tuple[Any, Any]:
        """Return y and dx in retrograd's layout."""
        y = self._call()
        dx = self._grad(y, self._leaves, self._dy)[0]
        arrays = (y.detach().numpy(), dx.numpy())
        if self._case.kind != "layer" and self._case.layout == "last" and len(self._case.shape) > 2:
            return np.moveaxis(arrays[0], 1, -1), np.moveaxis(arrays[1], 1, -1)
        return arrays


class _TorchKernels:
    """PyTorch's kernels without autograd and with arrays for their results: what its modules cannot be faster than."""

    name = "kernels"

    def __init__(self, torch: Any, case: NormCase, data: NormData) -> None:
        operators, to_torch = torch.ops.aten, torch.from_numpy
        x, dy, gamma, beta = (to_torch(a) for a in (data.x, data.dy, data.gamma, data.beta))
        self._y, dx, dgamma, dbeta = (torch.empty_like(a) for a in (x, x, gamma, beta))
        self._dx = dx
        sets = {"layer": (case.shape[0], 1), "batch": case.shape[1:2], "group": (case.shape[0], case.num_groups)}
        mean, rstd = torch.empty(sets[case.kind]), torch.empty(sets[case.kind])
        results = {"out0": self._y, "out1": mean, "out2": rstd}
        gradients = {"out0": dx, "out1": dgamma, "out2": dbeta}
        wanted = [True, True, True]
        if case.kind == "layer":
            size = list(case.parameter_shape)
            self._forward = partial(operators.native_layer_norm.out, x, size, gamma, beta, _EPS, **results)
            self._backward = partial(
                operators.native_layer_norm_backward.out, dy, x, size, mean, rstd, gamma, beta, wanted, **gradients
            )
        elif case.kind == "group":
            sizes = *case.shape[:2], math.prod(case.shape[2:]), case.num_groups
            self._forward = partial(operators.native_group_norm.out, x, gamma, beta, *sizes, _EPS, **results)
            self._backward = partial(
                operators.native_group_norm_backward.out, dy, x, mean, rstd, gamma, *sizes, wanted, **gradients
            )
        else:
            running = torch.zeros_like(gamma), torch.ones_like(gamma)
            self._forward = partial(
                operators.native_batch_norm.out,
                *(x, gamma, beta, *running, True, 0.1, _EPS),
                out=self._y,
                save_mean=mean,
                save_invstd=rstd,
            )
            self._backward = partial(
                operators.native_batch_norm_backward.out,
                *(dy, x, gamma, *running, mean, rstd, True, _EPS, wanted),
                **gradients,
            )

    @staticmethod
    def supports(case: NormCase) -> bool:
        plain = case.activation == "identity" and case.layout == "first"
        return plain and (case.kind in ("batch", "group") or (case.kind == "layer" and len(case.shape) == 2))

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float]:
        start = clock()
        self._forward()
        middle = clock()
        self._backward()
        return middle - start, clock() - middle

    def results(self) -> tuple[Any, Any]:
        self.step()
        return self._y.numpy(), self._dx.numpy()


class _Stream:
    """One pass over the minimum number of bytes: a copy for forward, a sum of two or three arrays for backward."""

    name = "stream"

    def __init__(self, arrays: Sequence[Array], fused: bool, non_temporal: bool, threads: int) -> None:
        x, dy, self._y, self._dx = arrays
        self._forward_sources = [x]
        self._backward_sources = [x, dy, self._y] if fused else [x, dy]
        self._non_temporal, self._threads = non_temporal, threads

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, float]:
        return self._seconds(self._y, self._forward_sources), self._seconds(self._dx, self._backward_sources)

    def _seconds(self, target: Array, sources: list[Array]) -> float:
        # The call overhead of a microsecond must not be part of a small row's bound.
        passes = 1 if target.nbytes >= _LARGE_STREAM else 16
        start = clock()
        refusal = _core.add_streams(target, sources, self._non_temporal, passes, self._threads)
        assert refusal is None
        return (clock() - start) / passes


def _streams(elements: int, fused: bool, threads: int) -> list[Stepper]:
    """Return streams with ordinary and non-temporal stores, with all threads and with one, which is faster if small.

    The arrays have the size of the row's, and are aligned to pages.
    """
    arrays = [_aligned_zeros(elements) for _ in range(4)]
    return [_Stream(arrays, fused, kind, count) for count in sorted({1, threads}) for kind in (False, True)]


def _aligned_zeros(elements: int) -> Array:
    """Return page-aligned zeros whose pages are already mapped."""
    words = _PAGE_BYTES // 4
    array = np.zeros(elements + words, np.float32)
    array.fill(0)
    first = -array.ctypes.data % _PAGE_BYTES // 4
    return array[first : first + elements]


def norm_failures(case: NormCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for results outside tolerance. A row with failures is not timed."""
    for row in verify_norm([case], [isa], threads):
        if not row.ok:
            yield f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"


def norm_contest(
    case: NormCase, data: NormData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    ours = _OurNorm(case, data, threads)
    ours.step()
    contest = Contest([[ours]], "stream", [])
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        peer = _TorchNorm(machine.torch, case, data)
        admit(contest, peer, agree((ours.out, ours.gradients.dx), peer.results()))
        if _TorchKernels.supports(case):
            kernels = _TorchKernels(machine.torch, case, data)
            admit(contest, kernels, agree((ours.out, ours.gradients.dx), kernels.results()))
    contest.slots.append(_streams(data.x.size, case.activation != "identity", threads))
    return contest
