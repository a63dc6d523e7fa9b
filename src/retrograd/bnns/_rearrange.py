"""Copies of arrays in another arrangement: tiles, shuffled channels, bands of matrices. And comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..ops._arrays import overlaps
from . import _constants as c
from ._conversion import PLAIN, converted, scale_of
from ._direct import Descriptor, Given, Operand, Operands, Parameters
from ._failure import Invalid, Unsupported, status
from ._filter import check_layout, checked_parameters
from ._layer import Result, logical, rows_first
from ._memory import Array, as_signed, as_size, is_first_major

_FLOAT32: Final = (c.BNNSDataTypeFloat32,)
_BOOLEAN: Final = (c.BNNSDataTypeBoolean,)
_TILE: Final = Operands(Operand("input"), Operand("output", like="input", written=True))
_TILE_BACKWARD: Final = Operands(Operand("in_delta", _FLOAT32, written=True), Operand("out_delta", _FLOAT32))
_SHUFFLE: Final = Operands(Operand("input", rotated=True), Operand("output", like="input", written=True, rotated=True))
_BAND_PART: Final = Operands(
    Operand("input", rotated=True, order=rows_first),
    Operand("output", like="input", written=True, rotated=True, order=rows_first),
)
_TRUTH: Final = Operand("out", _BOOLEAN, written=True)
_COMPARED: Final = Operands(_TRUTH, Operand("in0"), Operand("in1", like="in0"))
_COMBINED: Final = Operands(_TRUTH, Operand("in0", _BOOLEAN), Operand("in1", _BOOLEAN))
_NEGATED: Final = Operands(_TRUTH, Operand("in0", _BOOLEAN))


def _put(target: Array, source: Array) -> None:
    target[...] = source.copy() if overlaps(target, source) else source


# ---- tiles ----------------------------------------------------------------------------------------------------------


def _opposite(given: Given) -> Array:
    """The array as Apple's forward call was measured to read it: its ``size`` in the opposite order.

    Only contiguous arrays have an answer. Axes are in the order of ``size`` before and after.
    """
    geometry = given.geometry
    if not geometry.dense:
        raise Unsupported(f"{given.name}.stride is {geometry.strides}; with opposite_axes the array must be contiguous")
    memory = logical(given.array, geometry.layout, batched=False)
    opposite = memory.reshape(memory.shape[::-1])
    return opposite.T if is_first_major(geometry.layout) else opposite


def _tiles(small: Given, large: Given, opposite: bool) -> tuple[Array, Array]:
    """An array as ``[1, n, 1, m ...]``, and its tiles as ``[repeats, n, repeats, m ...]``."""
    arrays = [_opposite(given) if opposite else given.array for given in (small, large)]
    tile, whole = small.size, large.size
    if len(tile) != len(whole) or any(n % m for n, m in zip(whole, tile, strict=True)):
        raise Invalid(f"{large.name}.size is {whole}, expected multiples of {tile} as in {small.name}")
    # Axes are only split, which never copies.
    return (
        arrays[0].reshape([part for m in tile for part in (1, m)]),
        arrays[1].reshape([part for n, m in zip(whole, tile, strict=True) for part in (n // m, m)]),
    )


@status(-1)
def BNNSTile(
    input: Descriptor, output: Descriptor, filter_params: Parameters = None, *, opposite_axes: bool = False
) -> int:
    """Fill an array with copies of another one, whose extents divide its own. 0, or -1 on failure.

    `opposite_axes`, a retrograd extension: as measured, Apple's function takes ``size`` in the opposite order, so that
    a first-major array is read as a last-major one, and any other as a first-major one. By default axes are those that
    the layout says.
    """
    checked_parameters(filter_params)
    small, large = _TILE(input, output)
    tile, whole = _tiles(small, large, bool(opposite_axes))
    _put(whole, tile)
    return 0


@status(-1)
def BNNSTileBackward(
    in_delta: Descriptor, out_delta: Descriptor, filter_params: Parameters = None, *, opposite_axes: bool = False
) -> int:
    """Compute the gradient of :func:`BNNSTile`: the sum over all copies of an element. 0, or -1 on failure.

    As measured, Apple's function takes ``size`` in its own order, although the forward one does not. `opposite_axes`
    gives the gradient of a forward call that had it.
    """
    checked_parameters(filter_params)
    small, large = _TILE_BACKWARD(in_delta, out_delta)
    tile, whole = _tiles(small, large, bool(opposite_axes))
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
def BNNSShuffle(type: int, input: Descriptor, output: Descriptor, filter_params: Parameters = None) -> int:
    """Rearrange channels as blocks of r x r pixels, or back, in arrays of layout 4DFirstMajor. 0, or -1 on failure.

    Pixel (i, j) of a block of channel c comes from channel ``c r r + i r + j`` (pixel shuffle) or ``(i r + j) C + c``
    (depth to space, where C is the number of channels afterwards).
    """
    checked_parameters(filter_params)
    order = _SHUFFLES.get(as_size("type", type))
    if order is None:
        raise Invalid(f"type is {type}, which is not a BNNSShuffleType")
    source, target = _SHUFFLE(input, output)
    for given in (source, target):
        check_layout(given.name, given.geometry.layout, (c.BNNSDataLayout4DFirstMajor,), "BNNSDataLayout4DFirstMajor")
    spreads, pixel_fastest = order
    channels, pixels = _blocks(*(source, target) if spreads else (target, source), pixel_fastest)
    _put(*(pixels, channels) if spreads else (channels, pixels))
    return 0


def _blocks(deep: Given, wide: Given, pixel_fastest: bool) -> tuple[Array, Array]:
    """Both arrays as ``[N, C, r, r, H, W]``."""
    channels, pixels = deep.array, wide.array
    (n, depth, h, w), (batch, c, height, width) = channels.shape, pixels.shape
    r = height // h
    if (batch, height, width) != (n, h * r, w * r) or depth != c * r * r:
        raise Invalid(
            f"{deep.name}.size is {channels.shape} and {wide.name}.size {pixels.shape}, expected (N, C r r, H, W) and "
            "(N, C, H r, W r)"
        )
    channels = channels.reshape((n, c, r, r, h, w) if pixel_fastest else (n, r, r, c, h, w))
    channels = channels if pixel_fastest else channels.transpose(0, 3, 1, 2, 4, 5)
    return channels, pixels.reshape(n, c, h, r, w, r).transpose(0, 1, 3, 5, 2, 4)


# ---- bands ----------------------------------------------------------------------------------------------------------


def _check_matrices(given: Given) -> None:
    matrices = (c.BNNSDataLayoutRowMajorMatrix, c.BNNSDataLayoutColumnMajorMatrix, c.BNNSDataLayout2DLastMajor)
    if not (is_first_major(given.geometry.layout) and given.array.ndim > 1):
        check_layout(given.name, given.geometry.layout, matrices, "a matrix or nDFirstMajor with at least 2 axes")


@status(-1)
def BNNSBandPart(
    num_lower: int, num_upper: int, input: Descriptor, output: Descriptor, filter_params: Parameters = None
) -> int:
    """Copy the main diagonal of matrices, `num_lower` diagonals below it and `num_upper` above; the rest is 0.

    A negative number means all of them. The last two axes are rows and columns. 0, or -1 on failure.
    """
    checked_parameters(filter_params)
    below, above = as_signed("num_lower", num_lower, 32), as_signed("num_upper", num_upper, 32)
    operands = _BAND_PART(input, output)
    for given in operands:
        _check_matrices(given)
    source, target = (given.array for given in operands)
    if source.shape != target.shape:
        raise Invalid(f"output has the extents {target.shape}, rows and columns last, expected {source.shape} as input")
    rows, columns = np.ogrid[: source.shape[-2], : source.shape[-1]]
    kept = ((below < 0) | (rows - columns <= below)) & ((above < 0) | (columns - rows <= above))
    target[...] = np.where(kept, source, np.zeros((), source.dtype))
    return 0


# ---- comparison -----------------------------------------------------------------------------------------------------

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


def _comparable(given: list[Given], *descriptors: Descriptor | None) -> list[Array]:
    """Arrays as numbers that compare as the values they stand for."""
    scales = [scale_of(one.name, d) for one, d in zip(given, descriptors, strict=False) if d is not None]
    if scales[0] == scales[-1] and scales[0].factor > 0:
        return [one.array for one in given]
    return [converted(one.array, scale, _FLOAT64, PLAIN) for one, scale in zip(given, scales, strict=True)]


@status(-1)
def BNNSCompareTensor(in0: Descriptor, in1: Descriptor | None, op: int, out: Descriptor) -> int:
    """Compare two arrays of one type, or combine two Boolean ones, elementwise; the result is Boolean. 0, or -1.

    LogicalNOT reads `in0` alone: `in1` is ignored and may be None.
    """
    code = as_size("op", op)
    operation = _COMPARISONS.get(code) or _LOGICAL.get(code)
    if operation is None:
        raise Invalid(f"op is {op}, which is not a BNNSRelationalOperator")
    if code == c.BNNSRelationalOperatorLogicalNOT:
        target, *given = _NEGATED(out, in0)
    else:
        target, *given = (_COMBINED if code in _LOGICAL else _COMPARED)(out, in0, in1)
    for one in given:
        one.check_size(target)
    values = _comparable(given, in0, in1)
    with np.errstate(all="ignore"):
        target.array[...] = operation(values[0], values[-1])  # a new array: out may overlap its operands
    return 0
