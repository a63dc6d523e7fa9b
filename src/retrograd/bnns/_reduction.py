"""Reduction filters: sums, means, norms and extrema over axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ..ops.linear import LinearGradients
from . import _constants as c
from ._conversion import INTEGERS
from ._declare import creates
from ._failure import Invalid, Unsupported, status
from ._filter import FLOAT32, FLOATS
from ._layer import Gradients, OneInputFilter, Parameter, checked_layer, logical, parameter_of, stored
from ._memory import Array, as_float
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Float, InputOutput, UInt32

_ARGUMENTS: Final = (c.BNNSReduceFunctionArgMax, c.BNNSReduceFunctionArgMin)
_LOGICAL: Final = (c.BNNSReduceFunctionLogicalOr, c.BNNSReduceFunctionLogicalAnd)


class BNNSLayerParametersReduction(InputOutput):
    """A reduction over the axes whose extent in ``o_desc`` is 1. ``w_desc`` has weights in the shape of the input."""

    w_desc: BNNSNDArrayDescriptor
    reduce_func: UInt32
    epsilon: Float


class _Terms(NamedTuple):
    """What a reduction is computed from."""

    u: Array  # the input, times the weights
    axes: tuple[int, ...]
    elements: Array | int  # their number, for MeanNonZero of those that count
    epsilon: float

    def sum(self, values: Array) -> Array:
        return np.asarray(values.sum(axis=self.axes, keepdims=True))


class _Reduction(NamedTuple):
    value: Callable[[_Terms], Array]
    slope: Callable[[_Terms, Array], Array | float] | None  # with respect to u, given the output
    linear: bool = False  # the slope does not depend on u


def _l2(t: _Terms) -> Array:
    """The Euclidean norm; elements are scaled, so that squares neither overflow nor vanish."""
    largest = np.abs(t.u).max(axis=t.axes, keepdims=True)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return np.asarray(scale * np.sqrt(t.sum((t.u / scale) ** 2)))


def _log_sum_exp(t: _Terms) -> Array:
    largest = t.u.max(axis=t.axes, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    return np.asarray(shift + np.log(t.sum(np.exp(t.u - shift))))


def _product_slope(t: _Terms, y: Array) -> Array:
    """The product of all other elements."""
    zero = t.u == 0
    zeros = t.sum(zero)
    others = np.where(zero, 1.0, t.u).prod(axis=t.axes, keepdims=True)
    return np.where(zero, np.where(zeros == 1, others, 0.0), np.where(zeros == 0, y / t.u, 0.0))


def _first(t: _Terms, y: Array) -> Array:
    """1 for the first element that equals the output, in the order of the axes."""
    return _unfold(_is_first(_fold(t.u == y, t.axes)), t.u.shape, t.axes)


def _fold(array: Array, axes: tuple[int, ...]) -> Array:
    """The array with the reduced axes joined after the others, their first one fastest."""
    kept = [axis for axis in range(array.ndim) if axis not in axes]
    moved = array.transpose(*kept, *reversed(axes))
    return np.reshape(moved, (*(array.shape[axis] for axis in kept), -1))


def _unfold(array: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    order = [*kept, *reversed(axes)]
    return np.transpose(array.reshape([shape[axis] for axis in order]), np.argsort(order))


def _is_first(hits: Array) -> Array:
    return np.asarray(hits & (hits.cumsum(axis=-1) == 1))


_FUNCTIONS: Final[dict[int, _Reduction]] = {
    c.BNNSReduceFunctionMax: _Reduction(lambda t: np.asarray(t.u.max(axis=t.axes, keepdims=True)), _first),
    c.BNNSReduceFunctionMin: _Reduction(lambda t: np.asarray(t.u.min(axis=t.axes, keepdims=True)), _first),
    c.BNNSReduceFunctionArgMax: _Reduction(lambda t: np.asarray(t.u.argmax(axis=t.axes[0], keepdims=True)), None),
    c.BNNSReduceFunctionArgMin: _Reduction(lambda t: np.asarray(t.u.argmin(axis=t.axes[0], keepdims=True)), None),
    c.BNNSReduceFunctionMean: _Reduction(
        lambda t: t.sum(t.u) / t.elements, lambda t, y: 1 / np.asarray(t.elements), True
    ),
    c.BNNSReduceFunctionMeanNonZero: _Reduction(
        lambda t: t.sum(t.u) / np.maximum(t.elements, 1), lambda t, y: 1 / np.maximum(t.elements, 1)
    ),
    c.BNNSReduceFunctionSum: _Reduction(lambda t: t.sum(t.u), lambda t, y: 1.0, True),
    c.BNNSReduceFunctionSumSquare: _Reduction(lambda t: t.sum(t.u * t.u), lambda t, y: 2 * t.u),
    c.BNNSReduceFunctionSumLog: _Reduction(
        lambda t: t.sum(np.log(t.u + t.epsilon)), lambda t, y: 1 / (t.u + t.epsilon)
    ),
    c.BNNSReduceFunctionL1Norm: _Reduction(lambda t: t.sum(np.abs(t.u)), lambda t, y: np.sign(t.u)),
    c.BNNSReduceFunctionLogicalOr: _Reduction(lambda t: np.asarray((t.u != 0).any(axis=t.axes, keepdims=True)), None),
    c.BNNSReduceFunctionLogicalAnd: _Reduction(lambda t: np.asarray((t.u != 0).all(axis=t.axes, keepdims=True)), None),
    c.BNNSReduceFunctionL2Norm: _Reduction(_l2, lambda t, y: np.where(y == 0, 0.0, t.u / y)),
    c.BNNSReduceFunctionLogSumExp: _Reduction(_log_sum_exp, lambda t, y: np.exp(t.u - y)),
    c.BNNSReduceFunctionProduct: _Reduction(lambda t: np.asarray(t.u.prod(axis=t.axes, keepdims=True)), _product_slope),
    c.BNNSReduceFunctionLogSum: _Reduction(
        lambda t: np.log(t.sum(t.u)), lambda t, y: np.broadcast_to(1 / t.sum(t.u), t.u.shape)
    ),
}


class ReductionFilter(OneInputFilter):
    """See :func:`BNNSFilterCreateLayerReduction`."""

    may_overlap = frozenset({"in", "w_desc.data"})

    def __init__(self, layer: BNNSLayerParametersReduction, parameters: object) -> None:
        super().__init__(parameters)
        code = layer.reduce_func
        if not isinstance(code, int) or code not in _FUNCTIONS:
            raise Invalid(f"reduce_func is {code!r}, which this layer does not have")
        self.function = _FUNCTIONS[code]
        self._by_nonzero = code == c.BNNSReduceFunctionMeanNonZero
        booleans = (c.BNNSDataTypeBoolean,) if code in _LOGICAL else ()
        integers = INTEGERS if code in _ARGUMENTS else ()
        self.describe(layer, (*FLOATS, *booleans), (*FLOATS, *booleans, *integers))
        size = self.input.size
        given = (1,) * len(size) if self.output.elements == 1 else self.output.size
        if len(given) != len(size) or any(b not in (1, a) for a, b in zip(size, given, strict=True)):
            raise Invalid(f"o_desc.size is {given}, expected that of i_desc, {size}, with 1 for the reduced axes")
        self._reduced = given
        # Axes of extent 1 count as reduced too: it makes no difference.
        self.axes = tuple(1 + k for k, extent in enumerate(given) if extent == 1)
        if code in _ARGUMENTS:
            proper = tuple(axis for axis in self.axes if size[axis - 1] > 1)
            if len(proper) > 1:
                raise Unsupported(f"o_desc.size is {given}, but an index of a maximum or minimum is along one axis")
            if not self.axes:
                raise Invalid(f"o_desc.size is {given}, the same as that of i_desc, expected 1 along one axis")
            self.axes = proper or self.axes[:1]
        self.epsilon = as_float("epsilon", layer.epsilon)
        self.weights = self.parameter("w_desc", layer.w_desc, FLOATS)
        self.absent = {"bias_delta": "a reduction has no bias"}
        if self.weights is None:
            self.absent["weights_delta"] = "w_desc.data was NULL"
            return
        weights = self.weights.geometry
        if weights.size != size:
            raise Invalid(f"w_desc.size is {weights.size}, expected {size} as in i_desc")
        self.deltas["dw"] = parameter_of("weights_delta", "w_desc", weights)

    def _weights(self) -> Array | None:
        """The weights in float64, with a batch of 1."""
        if self.weights is None:
            return None
        values = self.weights.values().astype(np.float64)
        return logical(values, self.weights.geometry.layout, batched=False)[None]

    def _terms(self, x: Array, weights: Array | None) -> _Terms:
        wide = x.astype(np.float64)
        u = wide if weights is None else wide * weights
        count: Array | int = int(np.prod([x.shape[axis] for axis in self.axes]))
        if self._by_nonzero:
            counted = np.broadcast_to((wide if weights is None else weights) != 0, wide.shape)
            count = np.asarray(counted.sum(axis=self.axes, keepdims=True))
        return _Terms(u, self.axes, count, self.epsilon)

    def parameters(self) -> Sequence[Parameter]:
        return () if self.weights is None else (self.weights,)

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        with np.errstate(all="ignore"):
            values = self.function.value(self._terms(logical(arrays["in"], self.input.layout), self._weights()))
        return stored(values.reshape(-1, *self.output.size), self.output.layout)

    def check_backward(self) -> None:
        if self.function.slope is None:
            raise Unsupported("an index, or a logical value, has no gradient")
        if self.input.dtype != FLOAT32 or self.output.dtype != FLOAT32:
            raise Unsupported(f"this filter maps {self.input.dtype} to {self.output.dtype}; backward needs Float32")

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        wanted = "weights_delta" if "dw" in need else "in_delta"
        needed = "dw" in need or not self.function.linear
        return {"in": f"in is NULL, and {wanted} is computed from it" if needed else ""}

    def backward(self, wanted: Gradients) -> LinearGradients:
        slope, x, weights = self.function.slope, wanted.arrays["in"], self._weights()
        assert slope is not None  # check_backward
        shape = (len(wanted.dy), *self.input.size)
        known = np.zeros(shape) if x is None else logical(x, self.input.layout).astype(np.float64)
        g = logical(wanted.dy, self.output.layout).astype(np.float64).reshape(len(wanted.dy), *self._reduced)
        with np.errstate(all="ignore"):
            terms = self._terms(known, weights)
            du = np.broadcast_to(g * slope(terms, self.function.value(terms)), shape)
            dx = du if weights is None else du * weights
            dw = None
            if self.weights is not None and "dw" in wanted.need:
                dw = stored((du * known).sum(axis=0), self.weights.geometry.layout, batched=False)
        return LinearGradients(dx=stored(dx, self.input.layout), dw=dw)


@creates(ReductionFilter, BNNSLayerParametersReduction)
def BNNSFilterCreateLayerReduction() -> None:
    """Create a filter that reduces axes of its input, which may be weighted. None on failure."""


@status(-1)
def BNNSDirectApplyReduction(
    layer_params: BNNSLayerParametersReduction, filter_params: BNNSFilterParameters | None = None
) -> int:
    """Reduce the array of ``i_desc`` into the array of ``o_desc``. 0, or -1 on failure."""
    filter = ReductionFilter(checked_layer(BNNSLayerParametersReduction, layer_params), filter_params)
    for name, descriptor in (("i_desc", layer_params.i_desc), ("o_desc", layer_params.o_desc)):
        if descriptor.data is None:
            raise Invalid(f"{name}.data is NULL")
    filter.apply(1, layer_params.i_desc.data, 0, layer_params.o_desc.data, 0)
    return 0
