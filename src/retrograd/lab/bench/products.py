"""The matrix products of an LSTM over all steps, and of a linear layer, on their own.

Each is compared with NumPy's product (BLAS) of the same shape, and with the peak of multiply-adds on registers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

import retrograd

from ... import _core
from ...ops._types import Array
from .sgemm import Gemm, Sgemm
from .timing import Contest, Machine, Stepper, clock, wake_workers

__all__ = ["PRODUCT_CASES", "ProductCase", "product_contest", "product_failures"]

_PANEL: Final = 16  # float32 columns of a panel: one cache line
# The rounding errors of a sum of a few thousand random products add up to about 1e-5 of their typical size.
_TOLERANCE: Final = 1e-4
_PEAK_STEPS: Final = 200_000


class ProductCase(NamedTuple):
    kind: str  # lstm, linear
    rows: int  # steps times samples
    units: int  # hidden units, which are also the inputs

    @property
    def name(self) -> str:
        return f"{self.kind}_products_n{self.rows}h{self.units}"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("projection", "dx", "dwx") if self.kind == "lstm" else ("forward", "dx", "dw")

    @property
    def gemms(self) -> tuple[Gemm, Gemm, Gemm]:
        """The products of the passes as BLAS would compute them."""
        outputs = 4 * self.units if self.kind == "lstm" else self.units
        return (
            Gemm(self.rows, self.units, outputs, b_transposed=True),
            Gemm(self.rows, outputs, self.units),
            Gemm(outputs, self.rows, self.units, a_transposed=True),
        )


PRODUCT_CASES: Final = tuple(
    ProductCase(kind, rows, units)
    for kind in ("lstm", "linear")
    for units in (256, 512, 650, 1024)
    for rows in (700, 2048, 3200)
)


class ProductData(NamedTuple):
    """float32. With four gates in an LSTM: w [4H, H], dz [rows, 4H]; else w [H, H], dz [rows, H]."""

    x: Array
    w: Array
    b: Array
    dz: Array


def make_product_data(case: ProductCase) -> ProductData:
    rng = np.random.default_rng(0)
    outputs = case.gemms[0].cols
    shapes = ((case.rows, case.units), (outputs, case.units), (outputs,), (case.rows, outputs))
    return ProductData(*(rng.standard_normal(shape, np.float32) for shape in shapes))


class _Products:
    """The passes of a case on one set of buffers."""

    name = "retrograd"

    def __init__(
        self, passes: Sequence[Callable[[], object]], results: Callable[[], list[Array]], threads: int
    ) -> None:
        self._passes, self._threads = passes, threads
        self.results = results

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, ...]:
        times = [clock()]
        for call in self._passes:
            call()
            times.append(clock())
        return tuple(end - start for start, end in itertools.pairwise(times))


def _ours(case: ProductCase, data: ProductData, threads: int) -> _Products:
    return (_lstm_products if case.kind == "lstm" else _linear_products)(data, threads)


def _linear_products(data: ProductData, threads: int) -> _Products:
    x, w, b, dz = data
    y, dx, dw = np.zeros_like(dz), np.zeros_like(x), np.zeros_like(w)

    def backward(name: str, to: Array) -> Callable[[], object]:
        return lambda: retrograd.linear_backward(dz, x, w, need=[name], out={name: to}, num_threads=threads)

    passes = (
        lambda: retrograd.linear_forward(x, w, b, out=y, num_threads=threads),
        backward("dx", dx),
        backward("dw", dw),
    )
    return _Products(passes, lambda: [y, dx, dw], threads)


def _lstm_products(data: ProductData, threads: int) -> _Products:
    """In the layouts that the engine uses within an LSTM: rows in panels, gates in blocks of units."""
    x, w, b, dz = data
    rows, units = x.shape
    blocks = -(-units // _PANEL)
    u, dz_panels = _in_panels(x), _in_panels(_by_blocks(dz, units))
    weights = w.reshape(4, units, units)
    bias = _by_blocks(b[None], units)[0]
    gates, dx, dw = np.zeros((rows, 4 * blocks * _PANEL), np.float32), np.zeros_like(x), np.zeros_like(weights)
    passes = (
        lambda: _core.gate_projection(u, weights, bias, gates, threads),
        lambda: _core.gate_input_gradient(dz_panels, weights, dx, threads),
        lambda: _core.gate_weight_gradient(dz_panels, u, dw, threads),
    )

    def results() -> list[Array]:
        by_gate = gates.reshape(rows, blocks, 4, _PANEL).swapaxes(1, 2).reshape(rows, 4, -1)[:, :, :units]
        return [by_gate.reshape(rows, 4 * units), dx, dw.reshape(w.shape)]

    return _Products(passes, results, threads)


def _by_blocks(gates: Array, units: int) -> Array:
    """[rows, 4H], gate by gate, as [rows, blocks of units, 4, units of a block], flat, padded with 0."""
    blocks = -(-units // _PANEL)
    padded = np.zeros((len(gates), 4, blocks * _PANEL), gates.dtype)
    padded[:, :, :units] = gates.reshape(-1, 4, units)
    return np.ascontiguousarray(padded.reshape(-1, 4, blocks, _PANEL).swapaxes(1, 2)).reshape(len(gates), -1)


def _in_panels(matrix: Array) -> Array:
    """[rows, columns] as [panels, rows, columns of a panel], with the padding between panels that an LSTM has."""
    rows, columns = matrix.shape
    panels = -(-columns // _PANEL)
    padded = np.zeros((panels, rows + (16 - rows) % 64, _PANEL), matrix.dtype)
    for panel in range(panels):
        part = matrix[:, panel * _PANEL : (panel + 1) * _PANEL]
        padded[panel, :rows, : part.shape[1]] = part
    return padded[:, :rows]


def product_failures(case: ProductCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for products that differ from float64, element by element."""
    data = make_product_data(case)
    x, w, b, dz = (array.astype(np.float64) for array in data)
    expected = (x @ w.T + b, dz @ w, dz.T @ x)
    for number in threads:
        ours = _ours(case, data, number)
        ours.step()
        for pass_, result, reference in zip(case.passes, ours.results(), expected, strict=True):
            error = np.abs(result - reference).max() / np.sqrt(np.square(reference).mean())
            if not error <= _TOLERANCE:
                yield f"{pass_} is off by {error / _TOLERANCE:.3g} tolerances, threads {number}"


class _Peak:
    """The time that each pass would take at the peak of multiply-adds."""

    name = "peak"

    def __init__(self, flops: Sequence[float], threads: int) -> None:
        self._flops, self._threads = flops, threads

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, ...]:
        start = clock()
        done = _core.multiply_adds(_PEAK_STEPS * self._threads, self._threads)
        speed = done / (clock() - start)
        return tuple(flops / speed for flops in self._flops)


def product_contest(
    case: ProductCase, data: ProductData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    flops = tuple(gemm.flops for gemm in case.gemms)
    sgemm = Sgemm(case.gemms, flops, threads, stack)
    slots: list[list[Stepper]] = [[_ours(case, data, threads)], [sgemm], [_Peak(flops, threads)]]
    return Contest(slots, "sgemm", [], case.passes, flops, lambda: sgemm.cpu_seconds)
