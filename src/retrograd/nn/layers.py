"""Linear, Embedding, Dropout, activations, Softmax, Flatten and attention."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops.activation import Activation as Function
from .init import Rng, generator, glorot_bound, normal, uniform
from .module import Buffer, Layer, Parameter
from .sizes import float_dtype, number, operand, size

__all__ = [
    "ELU", "GELU", "Activation", "Dropout", "Embedding", "Flatten", "LeakyReLU", "Linear", "MultiHeadAttention",
    "ReLU", "SiLU", "Sigmoid", "Softmax", "Softplus", "Tanh",
]  # fmt: skip


class Linear(Layer):
    """``y = x wᵀ + b`` over the last axis of x. w is ``[outputs, inputs]``, b ``[outputs]``.

    `init`: "pytorch" draws w and b uniformly from ±1/sqrt(inputs); "keras" (Glorot) and "he" (for ReLU) draw w so that
    the variance of the activations is preserved, and set b = 0.
    """

    w: Parameter
    b: Parameter

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
        inputs, outputs = size("Linear", "inputs", inputs), size("Linear", "outputs", outputs)
        self.bias = bias
        set_weights(self, (outputs, inputs), inputs, outputs, outputs, init, dtype, generator(rng))

    def forward(self, x: Any) -> Any:
        return graph.linear(x, self.w, self.b if self.bias else None)

    def describe(self) -> str:
        return f"{self.w.shape[1]}, {self.w.shape[0]}" + ("" if self.bias else ", bias=False")


def set_weights(
    layer: Any,
    shape: tuple[int, ...],
    inputs: int,
    outputs: int,
    biases: int,
    init: str,
    dtype: npt.DTypeLike,
    draw: np.random.Generator,
) -> None:
    """Make the parameters w and, if the layer has a bias, b."""
    dtype, bound = float_dtype(type(layer).__name__, dtype), 1.0 / math.sqrt(max(inputs, 1))
    if init == "pytorch":
        w = uniform(draw, shape, bound, dtype)
    elif init == "keras":
        w = uniform(draw, shape, glorot_bound(inputs, outputs), dtype)
    elif init == "he":
        w = normal(draw, shape, math.sqrt(2.0) * bound, dtype)
    else:
        raise ValueError(f"{type(layer).__name__}: init is {init!r}; there are 'pytorch', 'keras' and 'he'")
    layer.w = Parameter(w)
    if layer.bias:
        layer.b = Parameter(uniform(draw, (biases,), bound, dtype) if init == "pytorch" else np.zeros(biases, dtype))


class Embedding(Layer):
    """Rows of a table ``[rows, features]`` by index. Row `padding_index` starts as 0 and is not trained.

    `init`: "pytorch" draws from the standard normal distribution, "keras" uniformly from ±0.05.
    """

    table: Parameter

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
        rows, features = size("Embedding", "rows", rows), size("Embedding", "features", features)
        dtype = float_dtype("Embedding", dtype)
        if init not in ("pytorch", "keras"):
            raise ValueError(f"Embedding: init is {init!r}; there are 'pytorch' and 'keras'")
        if padding_index is not None and not 0 <= padding_index < rows:
            raise ValueError(f"Embedding: padding_index is {padding_index}, must be from 0 to {rows - 1}")
        shape, draw = (rows, features), generator(rng)
        table = normal(draw, shape, 1.0, dtype) if init == "pytorch" else uniform(draw, shape, 0.05, dtype)
        mask = None
        if padding_index is not None:
            table[padding_index] = 0
            mask = (np.arange(rows) != padding_index)[:, None]
        self.padding_index = padding_index
        self.table = Parameter(table, mask=mask)

    def forward(self, x: Any) -> Any:
        """Look up the rows of `x`, integer indices of any shape."""
        return graph.embedding(x, self.table)

    def describe(self) -> str:
        rows, features = self.table.shape
        return f"{rows}, {features}" + ("" if self.padding_index is None else f", padding_index={self.padding_index}")


def new_stream(rng: Rng) -> Buffer:
    """Create the seed sequence of a layer: [first seed, training passes so far]."""
    return Buffer(np.array([generator(rng).integers(2**64, dtype=np.uint64), 0], np.uint64))


def next_seed(stream: Buffer) -> Any:
    """The seed of this pass, and another one for the next."""
    seed = stream[0] + stream[1]
    stream.assign(stream + np.array([0, 1]))
    return seed


class Dropout(Layer):
    """In training mode, set each element to 0 with probability `rate` and multiply the others by 1 / (1 - rate).

    The mask depends only on the seed and the number of training passes so far (Philox). Both are in the state, so that
    training resumed from a checkpoint uses the same masks.
    """

    stream: Buffer

    def __init__(self, rate: float, *, rng: Rng = None) -> None:
        if not 0 <= number("Dropout", "rate", rate) < 1:
            raise ValueError(f"Dropout: rate is {rate}, must be at least 0 and below 1")
        self.rate = rate
        self.stream = new_stream(rng)

    def forward(self, x: Any) -> Any:
        if not (self.training and self.rate):
            return x
        return graph.dropout(x, self.rate, seed=next_seed(self.stream))

    def describe(self) -> str:
        return f"{self.rate}"


class Activation(Layer):
    """An elementwise activation: a name, or a :class:`retrograd.Activation` with parameters."""

    def __init__(self, function: str | Function) -> None:
        self.function = Function(function) if isinstance(function, str) else function
        if not isinstance(self.function, Function):
            raise TypeError(f"Activation: function is {function!r}, must be a name or a retrograd.Activation")

    def forward(self, x: Any) -> Any:
        return graph.activation(x, self.function)

    def describe(self) -> str:
        return repr(self.function) if type(self) is Activation else ""


class ReLU(Activation):
    """``max(x, 0)``"""

    def __init__(self) -> None:
        super().__init__("relu")


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``"""

    def __init__(self) -> None:
        super().__init__("sigmoid")


class Tanh(Activation):
    """The hyperbolic tangent."""

    def __init__(self) -> None:
        super().__init__("tanh")


class GELU(Activation):
    """x times the probability that a normal variable is below it; with ``approximate="tanh"`` an approximation."""

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__("gelu_tanh" if approximate == "tanh" else "gelu")


class SiLU(Activation):
    """``x * sigmoid(x)``"""

    def __init__(self) -> None:
        super().__init__("silu")


class Softplus(Activation):
    """``log(1 + exp(x))``"""

    def __init__(self) -> None:
        super().__init__("softplus")


class LeakyReLU(Activation):
    """x, or ``alpha * x`` below 0."""

    def __init__(self, alpha: float = 0.01) -> None:
        super().__init__(Function("leaky_relu", alpha))


class ELU(Activation):
    """x, or ``alpha * (exp(x) - 1)`` below 0."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(Function("elu", alpha))


class Softmax(Layer):
    """``exp(x)`` over its sum along an axis. :class:`SoftmaxCrossEntropy` takes logits, without a softmax before it."""

    def __init__(self, axis: int = -1) -> None:
        self.axis = size("Softmax", "axis", axis, None)

    def forward(self, x: Any) -> Any:
        return graph.softmax(x, self.axis)

    def describe(self) -> str:
        return "" if self.axis == -1 else f"{self.axis}"


class Flatten(Layer):
    """All axes but the first as one: [N, C, H, W] becomes [N, C * H * W]."""

    def forward(self, x: Any) -> Any:
        x = operand("Flatten", "x", x)
        if x.ndim == 0:
            raise ValueError("Flatten: x has no axes, needs at least 1")
        return graph.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class MultiHeadAttention(Layer):
    """Attention of x [N, T, features] to itself, or to `context` [N, S, features], in several heads.

    `causal`: position t attends to positions up to t only. `mask`, of booleans that broadcast to [N, heads, T, S], says
    what is attended to. `dropout` applies to the attention's weights.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        features, heads = size("MultiHeadAttention", "features", features), size("MultiHeadAttention", "heads", heads)
        if heads < 1 or features % heads:
            raise ValueError(f"MultiHeadAttention: {features} features cannot be cut into {heads} heads")
        self.features, self.heads, self.causal = features, heads, causal
        draw = generator(rng)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, Linear(features, features, bias=bias, dtype=dtype, rng=draw))
        self.dropout = Dropout(dropout, rng=draw)

    query: Linear
    key: Linear
    value: Linear
    out: Linear

    def forward(self, x: Any, context: Any = None, mask: Any = None) -> Any:
        x = self._checked("x", x)
        other = x if context is None else self._checked("context", context)
        if len(other) != len(x):
            raise ValueError(f"MultiHeadAttention: context has {len(other)} samples, but x has {len(x)}")
        if mask is not None:
            mask = _checked_mask(mask, (len(x), self.heads, x.shape[1], other.shape[1]))
        q, k, v = self._split(self.query(x)), self._split(self.key(other)), self._split(self.value(other))
        scores = graph.matmul(q, graph.swapaxes(k, -1, -2)) * (1.0 / math.sqrt(self.features // self.heads))
        if self.causal:
            allowed = np.tri(q.shape[2], k.shape[2], dtype=np.bool_)
            scores = graph.where(allowed, scores, -math.inf)
        if mask is not None:
            scores = graph.where(mask, scores, -math.inf)
        weights = self.dropout(graph.softmax(scores, -1))
        y = graph.transpose(graph.matmul(weights, v), (0, 2, 1, 3))
        return self.out(graph.reshape(y, (*y.shape[:2], self.features)))

    def _checked(self, name: str, given: Any) -> Any:
        found = operand("MultiHeadAttention", name, given)
        if found.ndim != 3 or found.shape[2] != self.features:
            wanted = f"(N, T, {self.features})"
            raise ValueError(f"MultiHeadAttention: {name} has shape {found.shape}, must have the shape {wanted}")
        return found

    def _split(self, x: Any) -> Any:
        """[N, T, features] as [N, heads, T, features / heads]"""
        parts = graph.reshape(x, (*x.shape[:2], self.heads, self.features // self.heads))
        return graph.transpose(parts, (0, 2, 1, 3))

    def describe(self) -> str:
        return f"{self.features}, {self.heads}" + (", causal=True" if self.causal else "")


def _checked_mask(given: Any, shape: tuple[int, ...]) -> Any:
    """A mask of attention, of booleans that broadcast to [N, heads, T, S]."""
    mask = graph.identity(given)
    if mask.dtype != np.bool_:
        raise TypeError(f"MultiHeadAttention: mask has dtype {mask.dtype}, must be bool: True where it attends")
    try:
        fits = np.broadcast_shapes(mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"MultiHeadAttention: mask has shape {mask.shape}, which does not broadcast to {shape}")
    return mask
