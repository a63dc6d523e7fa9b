"""NumPy's matrix product (BLAS), as a bound."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Gemm", "Sgemm", "blas_core"]


class Gemm(NamedTuple):
    """c[rows, cols] = a[rows, depth] b[depth, cols]; a transposed operand is stored as its transpose."""

    rows: int
    depth: int
    cols: int
    a_transposed: bool = False
    b_transposed: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.depth * self.cols


_PROGRAM: Final = """
import ast, sys, time
import numpy as np
def matrix(rows, cols, transposed=False):
    return np.full((cols, rows), 0.5, np.float32).T if transposed else np.full((rows, cols), 0.5, np.float32)
products = [
    (matrix(rows, depth, a_transposed), matrix(depth, cols, b_transposed), matrix(rows, cols))
    for rows, depth, cols, a_transposed, b_transposed in ast.literal_eval(sys.argv[1])
]
for line in sys.stdin:
    seconds = []
    for a, b, c in products:
        start = time.perf_counter()
        np.matmul(a, b, out=c)
        seconds.append(time.perf_counter() - start)
    print(*seconds, time.process_time(), flush=True)
"""
# Prints the core for which OpenBLAS, if that is NumPy's BLAS, has chosen its kernels.
_CORE_PROGRAM: Final = """
import ctypes
import numpy
with open("/proc/self/maps") as maps:
    paths = {line.split()[-1] for line in maps if "openblas" in line}
for path in paths:
    for name in ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename"):
        if core := getattr(ctypes.CDLL(path), name, None):
            core.restype = ctypes.c_char_p
            print(core().decode())
            raise SystemExit
"""
_BLAS_THREADS: Final = ("OPENBLAS", "MKL", "BLIS", "OMP")


class Sgemm:
    """The time that each pass would take at the speed of NumPy's sgemm, with as many threads.

    `products` has the product whose speed counts for each pass, or one for all. BLAS reads its thread count when it is
    loaded, so it runs in a separate process, which sleeps between turns. Its threads are configured not to spin.
    """

    name = "sgemm"

    def __init__(
        self, products: Sequence[Gemm], flops: Sequence[float], threads: int, stack: contextlib.ExitStack
    ) -> None:
        # The time of a pass is its product's time multiplied by this.
        counted = list(products) if len(products) > 1 else [*products] * len(flops)
        self._factors = [work / product.flops for work, product in zip(flops, counted, strict=True)]
        self.cpu_seconds = 0.0
        settings = {f"{library}_NUM_THREADS": str(threads) for library in _BLAS_THREADS}
        settings |= {"VECLIB_MAXIMUM_THREADS": str(threads), "OPENBLAS_THREAD_TIMEOUT": "4"}
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, repr([tuple(product) for product in products])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **settings},
            )
        )

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, ...]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        *seconds, self.cpu_seconds = map(float, self._process.stdout.readline().split())
        if len(seconds) == 1:
            seconds *= len(self._factors)
        return tuple(time * factor for time, factor in zip(seconds, self._factors, strict=True))


def blas_core() -> str:
    """The core for which NumPy's BLAS has chosen its kernels, such as haswell; empty where it cannot be asked."""
    return _blas_core(os.environ.get("OPENBLAS_CORETYPE", ""))


@functools.cache
def _blas_core(core_type: str) -> str:
    program = [sys.executable, "-c", _CORE_PROGRAM]
    settings = {**os.environ, "OPENBLAS_CORETYPE": core_type}
    found = subprocess.run(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings, check=False
    )
    return found.stdout.strip().lower()
