"""Scatter: a tensor in which elements at given indices are combined with others, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from .. import _core
from ..ops._types import Array
from .elementwise import add, cast, divide, equal, identity, multiply, negative, run_map, where
from .indexing import PUT_ADD, TAKE, TAKE_ALONG, around, as_indices, refuse_index, row_indices
from .operation import Operation, Spec
from .reduction import INT64, as_axes
from .shaping import coordinates, reshape, zeros
from .tensor import Node, Operand, Tensor, apply, apply_one, fail

MODES: Final = {name: number for number, name in enumerate(_core.scatter_modes())}


def _shapes(
    data: Spec, indices: Spec, updates: Spec, *, axis: int, mode: str, along: bool
) -> Sequence[Spec]:  # fmt: skip
    if data.dtype != updates.dtype:
        raise TypeError(f"data has dtype {data.dtype}, but updates has {updates.dtype}; convert one with .astype")
    if data.dtype.kind not in "fi":
        raise TypeError(f"data has dtype {data.dtype}, must be of numbers")
    if mode == "divide" and data.dtype.kind != "f":
        raise TypeError(f"data has dtype {data.dtype}, must be of floats for mode 'divide'")
    before, after = data.shape[:axis], data.shape[axis + 1 :]
    if along:
        if (*indices.shape[:axis], *indices.shape[axis + 1 :]) != (*before, *after):
            raise ValueError(f"indices has shape {indices.shape}, but data {data.shape}: only axis {axis} may differ")
        expected = indices.shape
    else:
        expected = (*before, *indices.shape, *after)
    if updates.shape != expected:
        raise ValueError(f"updates has shape {updates.shape}, expected {expected} for data of shape {data.shape}")
    return (data,)


def _scatter(inputs: Sequence[Array], results: Sequence[Array], *, axis: int, mode: str, along: bool) -> None:
    (data, indices, updates), (y,) = inputs, results
    outer, count, inner = around(y.shape, axis)
    places = indices.reshape(around(indices.shape, axis)) if along else indices.reshape(-1)
    source = updates.reshape(outer, indices.shape[axis] if along else indices.size, inner)
    run_map([], [data], [], [y], [0])
    target = y.reshape(outer, count, inner)
    refuse_index(_core.scatter(MODES[mode], along, source, places, target, False, 0), indices, count)


def _gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (data, indices, updates), (g,), y = node.inputs, given, node.result
    assert data is not None
    assert indices is not None
    assert updates is not None
    assert g is not None
    mode, attributes = node.attributes["mode"], node.attributes
    axis, along = attributes["axis"], attributes["along"]

    def pick(x: Tensor) -> Tensor:
        return apply_one(TAKE_ALONG if along else TAKE, (x, indices), {"axis": axis})

    def put(base: Operand, values: Operand, how: str) -> Tensor:
        return apply_one(SCATTER, (base, indices, values), {**attributes, "mode": how})

    ddata = dupdates = None
    if mode in ("add", "subtract"):
        ddata = g
        dupdates = pick(g) if needed[2] else None
        dupdates = negative(dupdates) if dupdates is not None and mode == "subtract" else dupdates
    elif mode == "set":
        ddata = put(g, zeros(updates.shape, g.dtype), "set") if needed[0] else None
        dupdates = where(_last(data, indices, axis, along), pick(g), 0.0) if needed[2] else None
    elif mode in ("minimum", "maximum"):  # those that share the extreme share the gradient
        kept, new = equal(data, y), equal(updates, pick(y))
        count = put(cast(kept, g.dtype), cast(new, g.dtype), "add")
        share = divide(g, where(equal(count, 0.0), 1.0, count))
        ddata, dupdates = where(kept, share, 0.0), where(new, pick(share), 0.0)
    elif mode == "divide":
        ddata = put(g, updates, mode) if needed[0] else None
        dupdates = negative(divide(pick(multiply(g, y)), updates)) if needed[2] else None
    else:
        ddata = put(g, updates, mode) if needed[0] else None
        if needed[2]:  # the product of data and the other updates, also where one of them is 0
            zero = equal(updates, 0.0)
            others = where(zero, 1.0, updates)
            count = pick(put(zeros(data.shape, g.dtype), cast(zero, g.dtype), "add"))
            rest = divide(pick(multiply(g, put(data, others, mode))), others)
            dupdates = where(equal(count, cast(zero, g.dtype)), rest, 0.0)
    return [ddata, None, dupdates]


def _last(data: Tensor, indices: Tensor, axis: int, along: bool) -> Tensor:
    """Which updates no later one replaces."""
    if along:
        numbers = coordinates(indices.shape, axis, INT64)
        attributes = {"axis": axis, "mode": "set", "along": True}
        final = apply_one(SCATTER, (zeros(data.shape, INT64), indices, numbers), attributes)
        return equal(apply_one(TAKE_ALONG, (final, indices), {"axis": axis}), numbers)
    flat, order = reshape(indices, (-1,)), np.arange(indices.size, dtype=INT64)
    attributes = {"axis": 0, "mode": "set", "along": False}
    final = apply_one(SCATTER, (zeros((data.shape[axis],), INT64), flat, order), attributes)
    wins = equal(apply_one(TAKE, (final, flat), {"axis": 0}), order)
    return reshape(wins, (*indices.shape, *(1,) * (data.ndim - axis - 1)))


SCATTER: Final = Operation("scatter", _shapes, compute=_scatter, gradient=_gradient, in_place=[(0, 0)])


def _checked(name: str, mode: str, data: Tensor, axis: int) -> int:
    if mode not in MODES:
        raise fail(name, f"mode is {mode!r}, must be one of {', '.join(MODES)}")
    try:
        return as_axes(axis, data.ndim)[0]
    except ValueError as error:
        raise fail(name, str(error)) from None


def scatter(data: Operand, indices: Operand, updates: Operand, axis: int = 0, mode: str = "add") -> Tensor:
    """`data` in which `updates` are combined with the elements at `indices` along an axis, in the order of the indices.

    `mode` is "add", "subtract", "multiply", "divide", "minimum", "maximum" or "set", which keeps the last of several.
    Where data and updates share a minimum or maximum they share the gradient evenly.
    """
    tensor = identity(data)
    attributes = {"axis": _checked("scatter", mode, tensor, axis), "mode": mode, "along": False}
    return apply_one(SCATTER, (tensor, as_indices("scatter", indices), updates), attributes)


def scatter_along_axis(data: Operand, indices: Operand, updates: Operand, axis: int, mode: str = "add") -> Tensor:
    """As :func:`scatter`, with an index along the axis for each of the updates, as NumPy's put_along_axis."""
    tensor = identity(data)
    attributes = {"axis": _checked("scatter_along_axis", mode, tensor, axis), "mode": mode, "along": True}
    return apply_one(SCATTER, (tensor, as_indices("scatter_along_axis", indices), updates), attributes)


def scatter_nd(data: Operand, indices: Operand, updates: Operand, mode: str = "add", batch_dims: int = 0) -> Tensor:
    """As :func:`scatter`, with index vectors along the last axis of `indices`, as those of :func:`gather_nd`."""
    tensor, extra = identity(data), identity(updates)
    _checked("scatter_nd", mode, tensor, 0)
    rows, depth = row_indices("scatter_nd", tensor.shape, indices, batch_dims)
    kept = tensor.shape[batch_dims + depth :]
    if extra.shape != (*rows.shape, *kept):
        raise fail("scatter_nd", f"updates has shape {extra.shape}, expected {(*rows.shape, *kept)}")
    flat = reshape(tensor, (math.prod(tensor.shape[: batch_dims + depth]), *kept))
    attributes = {"axis": 0, "mode": mode, "along": False}
    return reshape(apply_one(SCATTER, (flat, rows, extra), attributes), tensor.shape)


def scatter_add(x: Operand, indices: Operand, updates: Operand, axis: int = 0) -> Tensor:
    """x with `updates` added at `indices` along an axis, in the order of the indices."""
    tensor, extra = identity(x), identity(updates)
    (number,) = as_axes(axis, tensor.ndim)
    places = as_indices("scatter_add", indices)
    expected = (*tensor.shape[:number], *places.shape, *tensor.shape[number + 1 :])
    if extra.shape != expected:
        raise fail("scatter_add", f"updates has shape {extra.shape}, expected {expected}")
    placed: Tensor = apply(PUT_ADD, (extra, places), {"shape": tensor.shape, "axis": number})[0]
    return add(tensor, placed)
