"""Linear, Embedding, Dropout and Activation."""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .init import Rng, generator, glorot_bound, normal, uniform
from .module import Array, Module

__all__ = ["Activation", "Dropout", "Embedding", "Linear"]


# The gradients to compute, by (need_dx, bias).
_NEEDED: Final = {
    (True, True): rg.LinearGradients._fields,
    (True, False): ("dx", "dw"),
    (False, True): ("dw", "db"),
    (False, False): ("dw",),
}


class Linear(Module):
    """``y = x wᵀ + b`` over the last axis of x. w is ``[outputs, inputs]``, b ``[outputs]``.

    `init`: "pytorch" draws w and b uniformly from ±1/sqrt(inputs); "keras" (Glorot) and "he" (for ReLU) draw w so that
    the variance of the activations is preserved, and set b = 0.
    """

    w: Array
    dw: Array
    b: Array
    db: Array

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        init: Literal["pytorch", "keras", "he"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        shape, draw = (outputs, inputs), generator(rng)
        bound = 1.0 / math.sqrt(max(inputs, 1))
        if init == "pytorch":
            w = uniform(draw, shape, bound, dtype)
        elif init == "keras":
            w = uniform(draw, shape, glorot_bound(inputs, outputs), dtype)
        elif init == "he":
            w = normal(draw, shape, math.sqrt(2.0) * bound, dtype)
        else:
            raise ValueError(f"Linear: init is {init!r}; there are 'pytorch', 'keras' and 'he'")
        self.add_parameter("w", w)
        self.bias = bias
        if bias:
            self.add_parameter(
                "b", uniform(draw, (outputs,), bound, dtype) if init == "pytorch" else np.zeros(outputs, dtype)
            )

    def forward(self, x: Array) -> Array:
        self.keep(x=x)
        y = self.reuse("y", (*x.shape[:-1], self.w.shape[0]), x.dtype)
        return rg.linear_forward(x, self.w, self.b if self.bias else None, out=y, num_threads=self.num_threads)

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        x: Array = self.kept("x")
        dx = self.reuse("dx", x.shape, x.dtype) if need_dx else None
        if dx is not None and accumulate:
            dx.fill(0)
        rg.linear_backward(
            dy,
            x,
            self.w,
            need=_NEEDED[bool(need_dx), bool(self.bias)],
            out=rg.LinearGradients(dx, self.dw, self.db if self.bias else None),
            accumulate=accumulate,
            num_threads=self.num_threads,
        )
        return dx

    def describe(self) -> str:
        return f"{self.w.shape[1]}, {self.w.shape[0]}" + ("" if self.bias else ", bias=False")


class Embedding(Module):
    """Rows of a table ``[rows, features]`` by index. Row `padding_index` starts as 0 and is not trained.

    `init`: "pytorch" draws from the standard normal distribution, "keras" uniformly from ±0.05.
    """

    table: Array
    dtable: Array

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        padding_index: int | None = None,
        init: Literal["pytorch", "keras"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        if init not in ("pytorch", "keras"):
            raise ValueError(f"Embedding: init is {init!r}; there are 'pytorch' and 'keras'")
        if padding_index is not None and not 0 <= padding_index < rows:
            raise ValueError(f"Embedding: padding_index is {padding_index}, must be from 0 to {rows - 1}")
        shape, draw = (rows, features), generator(rng)
        table = normal(draw, shape, 1.0, dtype) if init == "pytorch" else uniform(draw, shape, 0.05, dtype)
        if padding_index is not None:
            table[padding_index] = 0
        self.padding_index = padding_index
        self.add_parameter("table", table)

    def forward(self, x: Array) -> Array:
        """Look up the rows of `x`, integer indices of any shape."""
        x = np.asanyarray(x)
        self.keep(indices=x)
        y = self.reuse("y", (*x.shape, self.table.shape[1]), self.table.dtype)
        return rg.embedding_forward(x, self.table, out=y, num_threads=self.num_threads)

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = False) -> None:
        """Compute the gradient of the table. Returns None: indices have no gradient."""
        rg.embedding_backward(
            dy,
            self.kept("indices"),
            self.table.shape[0],
            out=self.dtable,
            accumulate=accumulate,
            num_threads=self.num_threads,
        )
        self.keep_padding()

    def keep_padding(self) -> None:
        """Zero the gradient of the padding row, so that it is not trained."""
        if self.padding_index is not None:
            self.dtable[self.padding_index] = 0

    def describe(self) -> str:
        rows, features = self.table.shape
        return f"{rows}, {features}" + ("" if self.padding_index is None else f", padding_index={self.padding_index}")


def new_stream(rng: Rng) -> Array:
    """Create the seed sequence of a layer, [first seed, training passes so far], a buffer in its state."""
    return np.array([generator(rng).integers(2**64, dtype=np.uint64), 0], np.uint64)


def next_seed(stream: Array) -> int:
    return (int(stream[0]) + int(stream[1])) % 2**64


class Dropout(Module):
    """In training mode, set each element to 0 with probability `rate` and multiply the others by 1 / (1 - rate).

    The mask depends only on the seed and the number of training passes so far (Philox). Both are in the state, so that
    training resumed from a checkpoint uses the same masks.
    """

    stream: Array

    def __init__(self, rate: float, *, rng: Rng = None) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate is {rate}, must be at least 0 and below 1")
        self.rate = rate
        self.add_buffer("stream", new_stream(rng))

    def forward(self, x: Array) -> Array:
        seed = next_seed(self.stream) if self.training and self.rate else None
        y = self._masked("y", x, seed)
        if seed is not None:
            self.stream[1] += 1
        self.keep(seed=seed)
        return y

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        seed: int | None = self.kept("seed")
        return self._masked("dx", dy, seed) if need_dx else None

    def _masked(self, name: str, array: Array, seed: int | None) -> Array:
        if seed is None:
            return array
        out = self.reuse(name, array.shape, array.dtype)
        return rg.dropout(array, self.rate, seed=seed, out=out, num_threads=self.num_threads)

    def describe(self) -> str:
        return f"{self.rate}"


class Activation(Module):
    """An elementwise activation: a name, or a :class:`retrograd.Activation` with parameters."""

    def __init__(self, function: str | rg.Activation) -> None:
        self.function = rg.Activation(function) if isinstance(function, str) else function

    def forward(self, x: Array) -> Array:
        self.keep(x=x)
        y = self.reuse("y", x.shape, x.dtype)
        return rg.activation_forward(x, self.function, out=y, num_threads=self.num_threads)

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        x: Array = self.kept("x")
        if not need_dx:
            return None
        dx = self.reuse("dx", x.shape, x.dtype)
        return rg.activation_backward(dy, self.function, x=x, out=dx, num_threads=self.num_threads)

    def describe(self) -> str:
        return repr(self.function)
