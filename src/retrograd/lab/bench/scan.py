"""Linear recurrences, compared with PyTorch, JAX and copies of as many bytes; and a minGRU written with them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd

from ... import _core, graph
from ...ops._types import Array
from ..verify import scan_errors
from .timing import Contest, Machine, Stepper, WholeSteps, admit, agree, clock, library_threads, wake_workers

__all__ = ["SCAN_CASES", "MinGruCase", "ScanCase", "make_scan", "scan_contest", "scan_failures"]

_LEAST_COPY: Final = 1 << 20  # bytes; of smaller arrays several copies are timed, without the call's overhead


class ScanCase(NamedTuple):
    """A recurrence along one axis of an array of float32; `steps` is its extent."""

    name: str
    shape: tuple[int, ...]
    axis: int = 0


class MinGruCase(NamedTuple):
    """Forward and backward of a minGRU: two linear layers, a sigmoid, the recurrence, and all gradients."""

    name: str
    steps: int
    samples: int
    inputs: int
    units: int


class ScanData(NamedTuple):
    a: Array
    b: Array
    dy: Array


class MinGruData(NamedTuple):
    x: Array
    wz: Array
    bz: Array
    wn: Array
    bn: Array
    dy: Array


SCAN_CASES: Final = (
    ScanCase("scan_t100n8h64", (100, 8, 64)),  # in the second level of cache
    ScanCase("scan_t1000n64h100", (1000, 64, 100)),  # 25 MB an array
    ScanCase("scan_t4000n64h256", (4000, 64, 256)),  # 260 MB an array
    ScanCase("scan_n64t1000h100", (64, 1000, 100), 1),
    ScanCase("scan_n6400t1000", (6400, 1000), 1),  # time is contiguous
    ScanCase("scan_t1000", (1000,)),
    MinGruCase("min_gru_t1000n64h100", 1000, 64, 100, 100),
    MinGruCase("min_gru_t100n8h32", 100, 8, 32, 32),
)


def make_scan(case: ScanCase | MinGruCase) -> ScanData | MinGruData:
    rng = np.random.default_rng(0)
    if isinstance(case, ScanCase):
        a = rng.random(case.shape, np.float32)
        return ScanData(a, *(rng.standard_normal(case.shape, np.float32) for _ in range(2)))
    steps, samples, inputs, units = case[1:]
    x = rng.standard_normal((steps, samples, inputs), np.float32)
    weights = [(rng.standard_normal((units, inputs)) / np.sqrt(inputs)).astype(np.float32) for _ in range(2)]
    biases = [rng.standard_normal(units, np.float32) for _ in range(2)]
    return MinGruData(
        x, weights[0], biases[0], weights[1], biases[1], rng.standard_normal((steps, samples, units), np.float32)
    )


def scan_failures(case: ScanCase | MinGruCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for results outside tolerance. A row with failures is not timed."""
    if isinstance(case, MinGruCase):
        return  # it agrees with PyTorch's, or that is not timed
    shape = tuple(min(extent, 40) if i != case.axis else min(extent, 200) for i, extent in enumerate(case.shape))
    a, b, dy = _small(case, shape)
    for count in threads:
        for name, error in scan_errors(a, b, dy, case.axis, count).items():
            if error > 1:
                yield f"{name} is off by {error:.3g} tolerances, threads {count}"


def _small(case: ScanCase, shape: tuple[int, ...]) -> ScanData:
    data = make_scan(case._replace(shape=shape))
    assert isinstance(data, ScanData)
    return data


class _OurScan:
    name = "retrograd"

    def __init__(self, case: ScanCase, data: ScanData, threads: int) -> None:
        self.data, self.axis, self.threads = data, case.axis, threads
        self.y = np.zeros_like(data.b)
        self.gradients = retrograd.ScanGradients(np.zeros_like(data.a), np.zeros_like(data.b))

    def wake(self) -> None:
        wake_workers(self.threads)

    def step(self) -> tuple[float, float]:
        a, b, dy = self.data
        start = clock()
        cache = retrograd.scan_forward(a, b, axis=self.axis, out=self.y, num_threads=self.threads).cache
        middle = clock()
        retrograd.scan_backward(dy, cache, out=self.gradients, num_threads=self.threads)
        return middle - start, clock() - middle


class _Copy:
    """Copies of as many bytes: forward moves 3 arrays (a and b read, y written), backward 5."""

    name = "copy"

    def __init__(self, elements: int, streamed: bool, threads: int) -> None:
        self._source, self._target = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
        self._source.fill(0)
        self._target.fill(0)
        self._streamed = streamed and self._target.ctypes.data % 64 == 0
        self._threads = threads

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, float]:
        passes = 1 if self._source.nbytes >= _LEAST_COPY else 16
        start = clock()
        refusal = _core.add_streams(self._target, [self._source], self._streamed, passes, self._threads)
        assert refusal is None
        seconds = (clock() - start) / passes
        return 1.5 * seconds, 2.5 * seconds


class _TorchLoop:
    """A loop over time in PyTorch, with autograd."""

    name = "torch"

    def __init__(self, torch: Any, case: ScanCase, data: ScanData) -> None:
        self._torch, self._axis = torch, case.axis
        self._leaves = [torch.from_numpy(v).requires_grad_() for v in (data.a.copy(), data.b.copy())]
        self._dy = torch.from_numpy(data.dy)

    def wake(self) -> None:
        pass

    def _forward(self) -> Any:
        a, b = (leaf.unbind(self._axis) for leaf in self._leaves)
        h, rows = b[0], [b[0]]
        for t in range(1, len(b)):
            h = a[t] * h + b[t]
            rows.append(h)
        return self._torch.stack(rows, self._axis)

    def step(self) -> tuple[float, float]:
        start = clock()
        y = self._forward()
        middle = clock()
        self._torch.autograd.grad(y, self._leaves, self._dy, allow_unused=True)
        return middle - start, clock() - middle

    def results(self) -> tuple[Any, Any]:
        y = self._forward()
        return y.detach().numpy(), self._torch.autograd.grad(y, self._leaves, self._dy)[1].numpy()


class _Jax:
    """`jax.lax.scan` or `associative_scan` under jit, forward and its vjp."""

    def __init__(self, jax: Any, case: ScanCase, data: ScanData, associative: bool) -> None:
        self.name = "associative" if associative else "jax"
        numpy, axis = jax.numpy, case.axis

        def loop(a: Any, b: Any) -> Any:
            a, b = (numpy.moveaxis(v, axis, 0) for v in (a, b))

            def one(h: Any, t: Any) -> Any:
                h = t[0] * h + t[1]
                return h, h

            return numpy.moveaxis(jax.lax.scan(one, numpy.zeros_like(b[0]), (a, b))[1], 0, axis)

        def tree(a: Any, b: Any) -> Any:
            return jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b), axis=axis)[1]

        function = tree if associative else loop
        self._forward = jax.jit(function)
        self._both = jax.jit(lambda a, b, dy: jax.vjp(function, a, b)[1](dy))
        self._data = [numpy.asarray(v) for v in data]

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float]:
        a, b, dy = self._data
        start = clock()
        self._forward(a, b).block_until_ready()
        middle = clock()
        for gradient in self._both(a, b, dy):  # forward again, and backward
            gradient.block_until_ready()
        end = clock()
        return middle - start, max(end - middle - (middle - start), 1e-9)

    def results(self) -> tuple[Any, Any]:
        a, b, dy = self._data
        return np.asarray(self._forward(a, b)), np.asarray(self._both(a, b, dy)[1])


def scan_contest(
    case: ScanCase | MinGruCase, data: Any, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    if isinstance(case, MinGruCase):
        return _min_gru_contest(data, threads, machine, stack)
    ours = _OurScan(case, data, threads)
    ours.step()
    contest = Contest([[ours]], "copy", [])
    expected = ours.y, ours.gradients.db
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        loop = _TorchLoop(machine.torch, case, data)
        admit(contest, loop, agree(expected, loop.results()))
    with contextlib.suppress(ImportError):
        jax = importlib.import_module("jax")
        for associative in (False, True):
            peer = _Jax(jax, case, data, associative)
            admit(contest, peer, agree(expected, peer.results()))
    contest.slots.append([_Copy(data.b.size, streamed, threads) for streamed in (False, True)])
    return contest


# ---- minGRU ----------------------------------------------------------------------------------------------------------


def _our_min_gru(data: MinGruData) -> Callable[[], list[Array]]:
    """A program: forward, and the gradients of x and of the weights."""

    def function(x: Any, wz: Any, bz: Any, wn: Any, bn: Any, dy: Any) -> Any:
        z = graph.sigmoid(graph.linear(x, wz, bz))
        y = graph.scan(1 - z, z * graph.linear(x, wn, bn)).y
        return [y, *graph.gradients(y, [x, wz, bz, wn, bn], seed=dy)]

    program = graph.compile(function, *data)
    return lambda: program(*data)


def _torch_min_gru(torch: Any, data: MinGruData, form: str) -> Callable[[], list[Any]]:
    functional = torch.nn.functional
    x, wz, bz, wn, bn = leaves = [torch.from_numpy(v.copy()).requires_grad_() for v in data[:5]]
    dy = torch.from_numpy(data.dy)

    def run() -> list[Any]:
        gate, n = functional.linear(x, wz, bz), functional.linear(x, wn, bn)
        if form == "loop":
            z = torch.sigmoid(gate)
            keep, added = 1 - z, z * n
            h, rows = added[0], [added[0]]
            for t in range(1, len(x)):
                h = torch.addcmul(added[t], keep[t], h)
                rows.append(h)
            y = torch.stack(rows)
        else:
            # The usual form in logarithms: h[t] = exp(c[t]) * sum over s of exp(b[s] - c[s]), of each sign of n alone.
            c = -functional.softplus(gate).cumsum(0)
            start = -functional.softplus(-gate) - c
            size = n.abs().clamp_min(1e-30).log() + start
            minus = torch.full_like(size, -1e30)  # finite, or the gradient is NaN
            positive = torch.logcumsumexp(torch.where(n > 0, size, minus), 0)
            negative = torch.logcumsumexp(torch.where(n > 0, minus, size), 0)
            y = (positive + c).exp() - (negative + c).exp()
        return [y, *torch.autograd.grad(y, leaves, dy)]

    return run


def _min_gru_contest(data: MinGruData, threads: int, machine: Machine, stack: contextlib.ExitStack) -> Contest:
    stack.enter_context(library_threads(threads))
    run = _our_min_gru(data)
    expected = [np.array(v) for v in run()]
    contest = Contest([[WholeSteps("retrograd", run, threads)]], None, [], ("step",))
    if machine.torch is None:
        return contest
    machine.torch.set_num_threads(threads)
    for form, name in (("loop", "torch"), ("logarithms", "logarithms")):
        peer = _torch_min_gru(machine.torch, data, form)
        found = [v.detach().numpy() for v in peer()]
        stepper: Stepper = WholeSteps(name, peer, threads)
        admit(contest, stepper, agree(expected, found, 0.02))
    return contest
