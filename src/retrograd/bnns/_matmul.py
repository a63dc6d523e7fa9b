"""Products of matrices, broadcast over leading axes: a filter, and ``BNNSMatMul``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from . import _constants as c
from ._declare import creates
from ._direct import Operand, Operands
from ._failure import Invalid, status
from ._filter import FLOATS, check_layout, checked_descriptor, checked_parameters, in_shape, put
from ._layer import rows_first
from ._memory import Geometry, as_float, size_of, threads_of
from ._products import Axes, Contraction, ProductFilter, extents_of, labelled, shape_rows_first
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Bool, Float, Structure


class BNNSLayerParametersBroadcastMatMul(Structure):
    """``C = beta C + alpha op(A) op(B)``, where op transposes if ``transA`` or ``transB``. ``beta`` is 0 or 1.

    Weights are in the data of ``iA_desc`` or ``iB_desc``. ``quadratic``: B is A.
    """

    alpha: Float
    beta: Float
    transA: Bool
    transB: Bool
    quadratic: Bool
    a_is_weights: Bool
    b_is_weights: Bool
    iA_desc: BNNSNDArrayDescriptor
    iB_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor


_MATRICES: Final = (c.BNNSDataLayoutRowMajorMatrix, c.BNNSDataLayoutColumnMajorMatrix)


def _labels(transposed: tuple[bool, bool], names: Sequence[str], parts: Sequence[Geometry]) -> list[Axes]:
    """The labels of the operands' axes and of the output's. Leading axes are counted from the back.

    Raises unless these are two matrices and their product.
    """
    for name, part in zip(names, parts, strict=True):
        if not (part.layout & 0x8000 and len(part.extents) > 1):
            check_layout(name, part.layout, _MATRICES, "a matrix or an nD layout with at least 2 axes")
    shapes = [shape_rows_first(part) for part in parts]
    a, b = (
        (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
        for shape, swapped in zip(shapes, transposed, strict=False)
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
    last = [("row", "inner"), ("inner", "column"), ("row", "column")]
    for k, swapped in enumerate(transposed):
        last[k] = last[k][::-1] if swapped else last[k]
    return [
        (*(f"leading {k}" for k in range(len(shape) - 2, 0, -1)), *labels)
        for shape, labels in zip(shapes, last, strict=True)
    ]


class MatMulFilter(ProductFilter):
    """See :func:`BNNSFilterCreateLayerBroadcastMatMul`."""

    def __init__(self, layer: BNNSLayerParametersBroadcastMatMul, parameters: object) -> None:
        same, trained = bool(layer.quadratic), (bool(layer.a_is_weights), bool(layer.b_is_weights))
        if sum(trained) + same > 1:
            raise Invalid("at most one of quadratic, a_is_weights and b_is_weights may be true")
        first, second = ("iA_desc", layer.iA_desc), ("iB_desc", layer.iB_desc)
        operands, weights = [first, first if same else second], trained.index(True) if any(trained) else None
        labels_of = partial(_labels, (bool(layer.transA), bool(layer.transB)))
        super().__init__(parameters, (layer.alpha, layer.beta), operands, layer.o_desc, same, weights, labels_of)


@creates(MatMulFilter, BNNSLayerParametersBroadcastMatMul)
def BNNSFilterCreateLayerBroadcastMatMul() -> None:
    """Create a filter that multiplies matrices; leading axes are broadcast. None on failure.

    With two inputs it is applied by the functions for two inputs; if one operand is weights, or both are the same, by
    those for one.
    """


# ---- without a filter -----------------------------------------------------------------------------------------------

_OPERANDS: Final = (
    Operand("inputA", FLOATS, rotated=True, order=rows_first),
    Operand("inputB", FLOATS, rotated=True, order=rows_first),
    Operand("output", FLOATS, written=True, rotated=True, order=rows_first),
)
_NAMES: Final = [one.name for one in _OPERANDS]
_ARRAYS: Final = Operands(*_OPERANDS[::-1], disjoint=True)  # the output is checked first


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
    target, right, left = _ARRAYS(output, inputB, inputA)
    given = (left, right, target)
    labels = _labels((bool(transA), bool(transB)), _NAMES, [one.geometry for one in given])
    shapes = [one.array.shape for one in given]
    a, b, wanted = (labelled(shape, one) for shape, one in zip(shapes, labels, strict=True))
    factor = as_float("alpha", alpha)
    first, second = (in_shape(one.array, one.array.shape) for one in (left, right))
    values = Contraction(a, b, wanted, extents_of(shapes, labels))(first, second, threads)
    with np.errstate(all="ignore"):
        put(target.array, values if factor == 1 else values * np.float32(factor), False)
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
    given = zip(_OPERANDS, (inputA, inputB, output), strict=True)
    parts = [one.geometry(checked_descriptor(one.name, descriptor)) for one, descriptor in given]
    _labels((bool(transA), bool(transB)), _NAMES, parts)
    return 0
