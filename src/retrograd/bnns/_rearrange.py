"""Copies of arrays in another arrangement: tiles, shuffled channels, bands of matrices. And comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from ..ops._arrays import overlaps
from . import _constants as c
from ._conversion import PLAIN, converted, scale_of
from ._copy import check_unrotated, size_in_order, source_of, target_of
from ._failure import Invalid, Unsupported, status
from ._filter import check_same_type, checked_parameters
from ._layer import Result, logical, rows_first
from ._memory import Array, Geometry, as_signed, as_size, is_first_major
from ._names import constant_name
from ._sample_map import ANY_TYPE
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

_Found: TypeAlias = tuple[str, Array, Geometry]  # an argument's name, its array and its geometry


def _put(target: Array, source: Array) -> None:
    target[...] = source.copy() if overlaps(target, source) else source


# ---- tiles ----------------------------------------------------------------------------------------------------------


def _opposite(name: str, array: Array, geometry: Geometry) -> Array:
    """The array as Apple's forward call was measured to read it: its ``size`` in the opposite order.

    Only contiguous arrays have an answer. Axes are in the order of ``size`` before and after.
    """
    if not geometry.dense:
        raise Unsupported(f"{name}.stride is {geometry.strides}; with opposite_axes the array must be contiguous")
    memory = logical(array, geometry.layout, batched=False)
    turned = memory.reshape(memory.shape[::-1])
    return turned.T if is_first_major(geometry.layout) else turned


def _tiles(small: _Found, large: _Found, opposite: bool) -> tuple[Array, Array]:
    """An array as ``[1, n, 1, m ...]``, and its tiles as ``[repeats, n, repeats, m ...]``."""
    extents, arrays = [], []
    for name, array, geometry in (small, large):
        check_unrotated(name, geometry)
        extents.append(size_in_order(geometry))
        arrays.append(_opposite(name, array, geometry) if opposite else array)
    tile, whole = extents
    if len(tile) != len(whole) or any(n % m for n, m in zip(whole, tile, strict=True)):
        raise Invalid(f"{large[0]}.size is {whole}, expected multiples of {tile} as in {small[0]}")
    # Axes are only split, which never copies.
    return (
        arrays[0].reshape([part for m in tile for part in (1, m)]),
        arrays[1].reshape([part for n, m in zip(whole, tile, strict=True) for part in (n // m, m)]),
    )


@status(-1)
def BNNSTile(
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
    *,
    opposite_axes: bool = False,
) -> int:
    """Fill an array with copies of another one, whose extents divide its own. 0, or -1 on failure.

    `opposite_axes`, a retrograd extension: as measured, Apple's function takes ``size`` in the opposite order, so that
    a first-major array is read as a last-major one, and any other as a first-major one. By default axes are those that
    the layout says.
    """
    checked_parameters(filter_params)
    small, large = source_of("input", input), target_of("output", output)
    check_same_type("output", output, "input", input)
    tile, whole = _tiles(("input", *small), ("output", *large), bool(opposite_axes))
    _put(whole, tile)
    return 0


@status(-1)
def BNNSTileBackward(
    in_delta: BNNSNDArrayDescriptor,
    out_delta: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
    *,
    opposite_axes: bool = False,
) -> int:
    """Compute the gradient of :func:`BNNSTile`: the sum over all copies of an element. 0, or -1 on failure.

    As measured, Apple's function takes ``size`` in its own order, although the forward one does not. `opposite_axes`
    gives the gradient of a forward call that had it.
    """
    checked_parameters(filter_params)
    float32 = (c.BNNSDataTypeFloat32,)
    small, large = target_of("in_delta", in_delta, float32), source_of("out_delta", out_delta, float32)
    tile, whole = _tiles(("in_delta", *small), ("out_delta", *large), bool(opposite_axes))
    result = Result("in_delta", in_delta, tile)
    repeats = tuple(range(0, whole.ndim, 2))
    with np.errstate(all="ignore"):
        result.put(whole.sum(axis=repeats, keepdims=True, dtype=np.float64))
    return 0


# ---- channels and pixels --------------------------------------------------------------------------------------------

# Whether channels become pixels, and whether the block's pixel counts faster than the channel: "CRD" or "DCR".
_SHUFFLES: Final = {
    c.BNNSShuffleTypePixelShuffleNCHW: (True, True),
    c.BNNSShuffleTypePixelUnshuffleNCHW: (False, True),
    c.BNNSShuffleTypeDepthToSpaceNCHW: (True, False),
    c.BNNSShuffleTypeSpaceToDepthNCHW: (False, False),
}


@status(-1)
def BNNSShuffle(
    type: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Rearrange channels as blocks of r x r pixels, or back, in arrays of layout 4DFirstMajor. 0, or -1 on failure.

    Pixel (i, j) of a block of channel c comes from channel ``c r r + i r + j`` (pixel shuffle) or ``(i r + j) C + c``
    (depth to space, where C is the number of channels afterwards).
    """
    checked_parameters(filter_params)
    order = _SHUFFLES.get(as_size("type", type))
    if order is None:
        raise Invalid(f"type is {type}, which is not a BNNSShuffleType")
    given = {"input": source_of("input", input), "output": target_of("output", output)}
    check_same_type("output", output, "input", input)
    for name, (_, geometry) in given.items():
        if geometry.layout != c.BNNSDataLayout4DFirstMajor:
            shown = constant_name("BNNSDataLayout", geometry.layout)
            raise Unsupported(f"{name}.layout is {shown}; it must be BNNSDataLayout4DFirstMajor")
    spreads, pixel_fastest = order
    deep, wide = ("input", "output") if spreads else ("output", "input")
    views = dict(zip((deep, wide), _blocks(deep, given[deep][0], wide, given[wide][0], pixel_fastest), strict=True))
    _put(views["output"], views["input"])
    return 0


def _blocks(deep: str, channels: Array, wide: str, pixels: Array, pixel_fastest: bool) -> tuple[Array, Array]:
    """Both arrays as ``[N, C, r, r, H, W]``."""
    (n, depth, h, w), (batch, c, height, width) = channels.shape, pixels.shape
    r = height // h
    if (batch, height, width) != (n, h * r, w * r) or depth != c * r * r:
        raise Invalid(
            f"{deep}.size is {channels.shape} and {wide}.size {pixels.shape}, expected (N, C r r, H, W) and "
            "(N, C, H r, W r)"
        )
    channels = channels.reshape((n, c, r, r, h, w) if pixel_fastest else (n, r, r, c, h, w))
    channels = channels if pixel_fastest else channels.transpose(0, 3, 1, 2, 4, 5)
    return channels, pixels.reshape(n, c, h, r, w, r).transpose(0, 1, 3, 5, 2, 4)


# ---- bands ----------------------------------------------------------------------------------------------------------


def _check_matrices(name: str, geometry: Geometry) -> None:
    matrices = (c.BNNSDataLayoutRowMajorMatrix, c.BNNSDataLayoutColumnMajorMatrix, c.BNNSDataLayout2DLastMajor)
    first = is_first_major(geometry.layout) and len(geometry.extents) > 1
    if not first and geometry.layout not in matrices:
        shown = constant_name("BNNSDataLayout", geometry.layout)
        raise Unsupported(f"{name}.layout is {shown}; it must be a matrix or nDFirstMajor with at least 2 axes")


@status(-1)
def BNNSBandPart(
    num_lower: int,
    num_upper: int,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Copy the main diagonal of matrices, with so many diagonals below and above it; other elements become 0.

    A negative number means all of them. The last two axes are rows and columns. 0, or -1 on failure.
    """
    checked_parameters(filter_params)
    below, above = as_signed("num_lower", num_lower, 32), as_signed("num_upper", num_upper, 32)
    (source, geometry), (target, wanted) = (
        source_of("input", input, order=rows_first),
        target_of("output", output, order=rows_first),
    )
    check_same_type("output", output, "input", input)
    for name, given in (("input", geometry), ("output", wanted)):
        _check_matrices(name, given)
    if source.shape != target.shape:
        raise Invalid(f"output has the extents {target.shape}, rows and columns last, expected {source.shape} as input")
    rows, columns = np.ogrid[: source.shape[-2], : source.shape[-1]]
    kept = np.ones((1, 1), np.bool_)
    if below >= 0:
        kept = kept & (rows - columns <= below)
    if above >= 0:
        kept = kept & (columns - rows <= above)
    target[...] = np.where(kept, source, np.zeros((), source.dtype))
    return 0


# ---- comparison -----------------------------------------------------------------------------------------------------

_BOOLEAN: Final = (c.BNNSDataTypeBoolean,)
_FLOAT64: Final = np.dtype(np.float64)
_COMPARISONS: Final[dict[int, Callable[[Array, Array], Array]]] = {
    c.BNNSRelationalOperatorEqual: np.equal,
    c.BNNSRelationalOperatorLess: np.less,
    c.BNNSRelationalOperatorLessEqual: np.less_equal,
    c.BNNSRelationalOperatorGreater: np.greater,
    c.BNNSRelationalOperatorGreaterEqual: np.greater_equal,
    c.BNNSRelationalOperatorNotEqual: np.not_equal,
}
_LOGICAL: Final[dict[int, Callable[[Array, Array], Array]]] = {
    c.BNNSRelationalOperatorLogicalAND: lambda a, b: a & b,
    c.BNNSRelationalOperatorLogicalOR: lambda a, b: a | b,
    c.BNNSRelationalOperatorLogicalNOT: lambda a, b: ~a,
    c.BNNSRelationalOperatorLogicalNAND: lambda a, b: ~(a & b),
    c.BNNSRelationalOperatorLogicalNOR: lambda a, b: ~(a | b),
    c.BNNSRelationalOperatorLogicalXOR: lambda a, b: a ^ b,
}


def _comparable(given: dict[str, tuple[Any, Array]]) -> list[Array]:
    """Arrays as numbers that compare as the values they stand for."""
    arrays = [array for _, array in given.values()]
    scales = [scale_of(name, descriptor) for name, (descriptor, _) in given.items()]
    if scales[0] == scales[-1] and scales[0].factor > 0:
        return arrays
    return [converted(array, scale, _FLOAT64, PLAIN) for array, scale in zip(arrays, scales, strict=True)]


@status(-1)
def BNNSCompareTensor(
    in0: BNNSNDArrayDescriptor, in1: BNNSNDArrayDescriptor | None, op: int, out: BNNSNDArrayDescriptor
) -> int:
    """Compare two arrays of one type, or combine two Boolean ones, elementwise; the result is Boolean. 0, or -1.

    LogicalNOT reads `in0` alone: `in1` is ignored and may be None.
    """
    code = as_size("op", op)
    operation = _COMPARISONS.get(code) or _LOGICAL.get(code)
    if operation is None:
        raise Invalid(f"op is {op}, which is not a BNNSRelationalOperator")
    target, wanted = target_of("out", out, _BOOLEAN)
    check_unrotated("out", wanted)
    given: dict[str, tuple[Any, Array]] = {}
    operands: tuple[tuple[str, Any], ...] = (("in0", in0), ("in1", in1))
    for name, descriptor in operands:
        if name == "in1" and code == c.BNNSRelationalOperatorLogicalNOT:
            break
        array, geometry = source_of(name, descriptor, _BOOLEAN if code in _LOGICAL else ANY_TYPE)
        check_unrotated(name, geometry)
        if size_in_order(geometry) != size_in_order(wanted):
            raise Invalid(f"{name}.size is {size_in_order(geometry)}, expected {size_in_order(wanted)} as in out")
        check_same_type(name, descriptor, "in0", in0)
        given[name] = descriptor, array
    values = _comparable(given)
    with np.errstate(all="ignore"):
        target[...] = operation(values[0], values[-1])  # a new array: out may overlap its operands
    return 0
