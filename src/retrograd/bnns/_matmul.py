"""Products of matrices, broadcast over leading axes: a filter, and ``BNNSMatMul``."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ..ops._arrays import overlaps
from ..ops.linear import linear_forward
from . import _constants as c
from ._apply import OneInputFilter, TwoInputFilter
from ._failure import Invalid, Unsupported, status
from ._filter import (
    FLOAT32,
    FLOATS,
    checked_batch,
    checked_descriptor,
    checked_parameters,
    in_shape,
    put,
    source_samples,
    target_samples,
    viewed,
)
from ._layer import (
    Parameter,
    Result,
    check_apart,
    checked_layer,
    output_geometry,
    parameter_delta,
    rows_first,
    sample_delta,
    stored,
    typed_geometry,
)
from ._memory import Array, Geometry, as_float, check_writable, listed, size_of, threads_of
from ._names import constant_name
from ._structures import BOOL, FLOAT, BNNSFilterParameters, BNNSNDArrayDescriptor, Structure

__all__ = [
    "BNNSFilterCreateLayerBroadcastMatMul",
    "BNNSLayerParametersBroadcastMatMul",
    "BNNSMatMul",
    "BNNSMatMulWorkspaceSize",
]


class BNNSLayerParametersBroadcastMatMul(Structure):
    """``C = beta C + alpha op(A) op(B)``, where op transposes if ``transA`` or ``transB``. ``beta`` is 0 or 1.

    Weights are in the data of ``iA_desc`` or ``iB_desc``. ``quadratic``: B is A.
    """

    _declared = (
        ("alpha", FLOAT),
        ("beta", FLOAT),
        ("transA", BOOL),
        ("transB", BOOL),
        ("quadratic", BOOL),
        ("a_is_weights", BOOL),
        ("b_is_weights", BOOL),
        ("iA_desc", BNNSNDArrayDescriptor),
        ("iB_desc", BNNSNDArrayDescriptor),
        ("o_desc", BNNSNDArrayDescriptor),
    )
    __slots__ = tuple(name for name, _ in _declared)

    alpha: float
    beta: float
    transA: bool
    transB: bool
    quadratic: bool
    a_is_weights: bool
    b_is_weights: bool
    iA_desc: BNNSNDArrayDescriptor
    iB_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor


def _check_matrix(name: str, geometry: Geometry) -> None:
    generic = geometry.layout & 0x8000 and len(geometry.extents) > 1
    matrices = (c.BNNSDataLayoutRowMajorMatrix, c.BNNSDataLayoutColumnMajorMatrix)
    if not generic and geometry.layout not in matrices:
        shown = constant_name("BNNSDataLayout", geometry.layout)
        raise Unsupported(f"{name}.layout is {shown}; it must be a matrix or an nD layout with at least 2 axes")


def stored_matrices(array: Array, layout: int, batched: bool = True) -> Array:
    """The opposite of :func:`rows_first`: the array with its slowest axis first."""
    return array if layout == c.BNNSDataLayoutRowMajorMatrix else stored(array, layout, batched)


def matrix_shape(geometry: Geometry) -> tuple[int, ...]:
    """Extents in the order of :func:`rows_first`."""
    if geometry.layout == c.BNNSDataLayoutRowMajorMatrix:
        return geometry.shape
    return listed(geometry.layout, geometry.extents)


def _turned(array: Array, transposed: bool) -> Array:
    return np.swapaxes(array, -1, -2) if transposed else array


def _with_rank(array: Array, rank: int) -> Array:
    """The array with so many axes behind the batch; new ones, of extent 1, come first."""
    missing = rank - (array.ndim - 1)
    return array.reshape(array.shape[0], *(1,) * missing, *array.shape[1:])


def products(a: Array, b: Array, threads: int | None) -> Array:
    """a [..., M, K] times b [..., K, N], broadcast, in float32."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    turned = np.swapaxes(b, -1, -2)
    if math.prod(b.shape[:-2]) == 1:  # one product for all
        whole = linear_forward(a, turned.reshape(turned.shape[-2:]), num_threads=threads)
        return whole.reshape(*lead, *whole.shape[-2:])
    a, turned = np.broadcast_to(a, (*lead, *a.shape[-2:])), np.broadcast_to(turned, (*lead, *turned.shape[-2:]))
    result = np.empty((*lead, a.shape[-2], turned.shape[-2]), np.float32)
    for index in np.ndindex(*lead):
        linear_forward(a[index], turned[index], out=result[index], num_threads=threads)
    return result


def _summed(values: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which an operand of this shape was broadcast."""
    axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1 and values.shape[axis] > 1)
    return values.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else values


class _Shapes:
    """The shapes of a product, checked; extents with rows and columns last."""

    def __init__(self, names: tuple[str, str, str], parts: list[Geometry], transposed: tuple[bool, bool]) -> None:
        for name, part in zip(names, parts, strict=True):
            _check_matrix(name, part)
        shapes = [matrix_shape(part) for part in parts]
        a, b = (
            (*shape[:-2], shape[-1], shape[-2]) if turned else shape
            for shape, turned in zip(shapes, transposed, strict=False)
        )
        if a[-1] != b[-2]:
            raise Invalid(
                f"{names[0]} has {size_of(parts[0])} and {names[1]} {size_of(parts[1])}: a product of matrices "
                f"{a[-2]} x {a[-1]} and {b[-2]} x {b[-1]}"
            )
        try:
            lead = np.broadcast_shapes(a[:-2], b[:-2])
        except ValueError:
            raise Invalid(
                f"the leading axes of {names[0]}, {a[:-2]}, and of {names[1]}, {b[:-2]}, do not broadcast"
            ) from None
        wanted = (*lead, a[-2], b[-1])
        if shapes[2] != wanted:
            raise Invalid(f"{names[2]} has the extents {shapes[2]}, rows and columns last, expected {wanted}")
        self.rank = max(len(shape) for shape in shapes)


class MatMulFilter(OneInputFilter, TwoInputFilter):
    """See :func:`BNNSFilterCreateLayerBroadcastMatMul`."""

    def __init__(self, layer: Any, parameters: Any) -> None:
        layer = checked_layer(BNNSLayerParametersBroadcastMatMul, layer)
        super().__init__(parameters)
        self.alpha, beta = as_float("alpha", layer.alpha), as_float("beta", layer.beta)
        if beta not in (0, 1):
            raise Invalid(f"beta is {beta:g}, must be 0 or 1")
        self.adds = beta == 1
        self.turned = bool(layer.transA), bool(layer.transB)
        self.quadratic = bool(layer.quadratic)
        weights = bool(layer.a_is_weights), bool(layer.b_is_weights)
        if sum(weights) + self.quadratic > 1:
            raise Invalid("at most one of quadratic, a_is_weights and b_is_weights may be true")
        second = ("iA_desc", layer.iA_desc) if self.quadratic else ("iB_desc", layer.iB_desc)
        given = (("iA_desc", layer.iA_desc), second)
        self.operands = [typed_geometry(name, descriptor, FLOATS) for name, descriptor in given]
        self.output = output_geometry("o_desc", layer.o_desc, FLOATS)
        names = (given[0][0], given[1][0], "o_desc")
        self.shapes = _Shapes(names, [*self.operands, self.output], self.turned)
        self.names = names
        self.weights = weights.index(True) if any(weights) else None  # which operand
        self.parameter: Parameter | None = None
        if self.weights is not None:
            self.parameter = Parameter(*given[self.weights], self, FLOATS)
        self.inputs = [k for k in range(1 if self.quadratic else 2) if k != self.weights]
        # The input of a filter that has one.
        self.input = self.operands[self.inputs[0]]

    def _check_inputs(self, count: int) -> None:
        if len(self.inputs) != count:
            words = (
                ("one input", "the functions for two inputs") if count == 1 else ("two inputs", "BNNSFilterApplyBatch")
            )
            raise Invalid(f"the filter does not have {words[0]}: use {words[1]}")

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any) -> None:
        self._check_inputs(1)
        self._run(batch_size, [("in", source, in_stride)], target, out_stride)

    def apply_two(
        self, batch_size: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, target: Any, out_stride: Any
    ) -> None:
        self._check_inputs(2)
        self._run(batch_size, [("inA", a, a_stride), ("inB", b, b_stride)], target, out_stride)

    def _run(self, batch_size: Any, given: list[tuple[str, Any, Any]], target: Any, out_stride: Any) -> None:
        batch = checked_batch(batch_size)
        y = target_samples("out", self.output, target, batch, out_stride)
        arrays = self._samples(batch, given, set(self.inputs))
        values = products(self._operand(0, arrays[0]), self._operand(1, arrays[1]), self.threads)
        if self.alpha != 1:
            with np.errstate(all="ignore"):
                values *= np.float32(self.alpha)
        put(y, self._laid_out(values, self.output), self.adds)

    def _samples(self, batch: int, given: list[tuple[str, Any, Any]], needed: set[int]) -> list[Array | None]:
        """The operands' arrays; None for weights, and for those that are not needed."""
        arrays: list[Array | None] = [None, None]
        for k, (name, data, stride) in zip(self.inputs, given, strict=True):
            if k in needed:
                arrays[k] = source_samples(name, self.operands[k], data, batch, stride)
        if self.quadratic:
            arrays[1] = arrays[0]
        return arrays

    def _operand(self, k: int, array: Array | None) -> Array:
        """An operand in float32, transposed where asked, with a batch and leading axes; None means the weights."""
        if array is None:
            assert self.parameter is not None
            array = self.parameter.values()[None]
        if array.dtype is not FLOAT32 or not array.flags.aligned:
            array = array.astype(np.float32)
        return _turned(_with_rank(rows_first(array, self.operands[k].layout), self.shapes.rank), self.turned[k])

    def _laid_out(self, values: Array, geometry: Geometry) -> Array:
        """Matrices, with leading axes, as an array of this geometry."""
        whole = values.reshape(values.shape[0], *matrix_shape(geometry))
        return stored_matrices(whole, geometry.layout)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(
        self,
        batch_size: Any,
        source: Any,
        in_stride: Any,
        in_delta: Any,
        in_delta_stride: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        weights_delta: Any,
        bias_delta: Any,
    ) -> None:
        self._check_inputs(1)
        inputs = [("in", source, in_stride)]
        deltas = [("in_delta", in_delta, in_delta_stride)]
        self._run_backward(batch_size, inputs, deltas, out_delta, out_delta_stride, weights_delta, bias_delta)

    def apply_two_backward(
        self,
        batch_size: Any,
        a: Any,
        a_stride: Any,
        a_delta: Any,
        a_delta_stride: Any,
        b: Any,
        b_stride: Any,
        b_delta: Any,
        b_delta_stride: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        weights_delta: Any,
        bias_delta: Any,
    ) -> None:
        self._check_inputs(2)
        inputs = [("inA", a, a_stride), ("inB", b, b_stride)]
        deltas = [("inA_delta", a_delta, a_delta_stride), ("inB_delta", b_delta, b_delta_stride)]
        self._run_backward(batch_size, inputs, deltas, out_delta, out_delta_stride, weights_delta, bias_delta)

    def _run_backward(
        self,
        batch_size: Any,
        inputs: list[tuple[str, Any, Any]],
        deltas: list[tuple[str, Any, Any]],
        out_delta: Any,
        out_delta_stride: Any,
        weights_delta: Any,
        bias_delta: Any,
    ) -> None:
        batch = checked_batch(batch_size)
        for name, geometry in zip(self.names, (*self.operands, self.output), strict=True):
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} of this filter has type {geometry.dtype}; backward needs Float32")
        if bias_delta is not None:
            raise Unsupported("bias_delta is given, but a product has no bias")
        if weights_delta is not None and self.weights is None:
            raise Invalid("weights_delta is given, but neither operand is weights")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        dy = sample_delta("out_delta", out_delta, "o_desc", self.output, batch, out_delta_stride, source_samples)
        results: dict[int, Result] = {}
        for k, (name, delta, stride) in zip(self.inputs, deltas, strict=True):
            if delta is not None:
                array = sample_delta(name, delta, self.names[k], self.operands[k], batch, stride, target_samples)
                results[k] = Result(name, delta, array)
        if weights_delta is not None and self.weights is not None:
            like = self.names[self.weights], self.operands[self.weights]
            results[self.weights] = parameter_delta("weights_delta", weights_delta, *like)
        check_apart(list(results.values()))
        needed = set() if not results else {0} if self.quadratic else {1 - k for k in results}
        arrays = self._samples(batch, inputs, needed)
        computed = self._gradients(arrays, in_shape(dy, (batch, *self.output.shape)), results)
        for k, result in results.items():
            result.put(computed[k])

    def _gradients(self, arrays: list[Array | None], dy: Array, results: dict[int, Result]) -> dict[int, Array]:
        batch = len(dy)
        g = _with_rank(rows_first(dy, self.output.layout), self.shapes.rank)
        wanted = [0, 1] if self.quadratic and results else list(results)
        computed: dict[int, Array] = {}
        for k in wanted:
            other = self._operand(1 - k, arrays[1 - k])
            product = (
                products(g, np.swapaxes(other, -1, -2), self.threads)
                if k == 0
                else products(np.swapaxes(other, -1, -2), g, self.threads)
            )
            product = _turned(product, self.turned[k])
            own = matrix_shape(self.operands[k])
            shape = (1 if k == self.weights else batch, *(1,) * (self.shapes.rank - len(own)), *own)
            with np.errstate(all="ignore"):
                total = np.float64(self.alpha) * _summed(product, shape)
            computed[k] = self._laid_out(np.asarray(total), self.operands[k])
        if self.quadratic and results:
            computed = {0: computed[0] + computed[1]}
        return computed


@status(None)
def BNNSFilterCreateLayerBroadcastMatMul(
    layer_params: BNNSLayerParametersBroadcastMatMul, filter_params: BNNSFilterParameters | None = None
) -> MatMulFilter | None:
    """Create a filter that multiplies matrices; leading axes are broadcast. None on failure.

    With two inputs it is applied by the functions for two inputs; if one operand is weights, or both are the same, by
    those for one.
    """
    return MatMulFilter(layer_params, filter_params)


# ---- without a filter -----------------------------------------------------------------------------------------------

_NAMES: Final = ("inputA", "inputB", "output")


def _checked(transA: Any, transB: Any, descriptors: tuple[Any, Any, Any]) -> tuple[list[Geometry], _Shapes]:
    checks = (typed_geometry, typed_geometry, output_geometry)
    parts = [
        check(name, checked_descriptor(name, descriptor), FLOATS)
        for check, name, descriptor in zip(checks, _NAMES, descriptors, strict=True)
    ]
    return parts, _Shapes(_NAMES, parts, (bool(transA), bool(transB)))


@status(-1)
def BNNSMatMul(
    transA: bool,
    transB: bool,
    alpha: float,
    inputA: BNNSNDArrayDescriptor,
    inputB: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    workspace: Any = None,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """``output = alpha op(A) op(B)`` for matrices, broadcast over leading axes. 0, or -1 on failure.

    `workspace` is not used.
    """
    threads = threads_of(checked_parameters(filter_params).n_threads)
    parts, shapes = _checked(transA, transB, (inputA, inputB, output))
    factor = as_float("alpha", alpha)
    target = viewed("output", output)
    check_writable("output.data", target)
    operands = []
    for name, descriptor, part, turned in zip(
        _NAMES, (inputA, inputB), parts, (bool(transA), bool(transB)), strict=False
    ):
        array = viewed(name, descriptor)
        if overlaps(target, array):
            raise Invalid(f"output overlaps {name} in memory")
        array = array if array.dtype is FLOAT32 and array.flags.aligned else array.astype(np.float32)
        operands.append(_turned(_with_rank(rows_first(array[None], part.layout), shapes.rank), turned))
    values = products(operands[0], operands[1], threads)
    with np.errstate(all="ignore"):
        values = values if factor == 1 else values * np.float32(factor)
    put(target, stored_matrices(values.reshape(matrix_shape(parts[2])), parts[2].layout, batched=False), False)
    return 0


@status(-1)
def BNNSMatMulWorkspaceSize(
    transA: bool,
    transB: bool,
    alpha: float,
    inputA: BNNSNDArrayDescriptor,
    inputB: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Return the bytes of workspace that :func:`BNNSMatMul` needs, which is 0, or -1 if it would fail."""
    checked_parameters(filter_params)
    _checked(transA, transB, (inputA, inputB, output))
    return 0
