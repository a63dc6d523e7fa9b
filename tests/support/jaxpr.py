"""What JAX would compute, by NumPy: its own trace, one primitive at a time.

JAX traces a function and differentiates it; XLA would then compile the result, which takes a second for a graph of ten
nodes. NumPy computes the primitives of the trace at once. Derivatives are JAX's; only sums and products are NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.arrays import Array

Primitive = Callable[..., Any]


def traced(jax: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a function of arrays, nested as the function returns it."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = jax.tree_util.tree_leaves(arguments)
    with np.errstate(all="ignore"):
        results = _run(closed.jaxpr, closed.consts, flat)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), results)


def _run(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Array]:
    values: dict[Any, Array] = {}

    def read(atom: Any) -> Array:
        return np.asarray(atom.val) if hasattr(atom, "val") else values[atom]

    values.update(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
    values.update(zip(jaxpr.invars, map(np.asarray, arguments), strict=True))
    for equation in jaxpr.eqns:
        name, inputs, options = equation.primitive.name, [read(v) for v in equation.invars], equation.params
        inner = options.get("jaxpr", options.get("call_jaxpr", options.get("fun_jaxpr")))
        if inner is not None:
            closed = hasattr(inner, "consts")
            results = _run(inner.jaxpr if closed else inner, inner.consts if closed else (), inputs)
        elif name in PRIMITIVES:
            found = PRIMITIVES[name](*inputs, **options)
            results = list(found) if isinstance(found, (list, tuple)) else [found]
        elif name in PLAIN:
            results = [PLAIN[name](*inputs)]  # its options are about accuracy
        else:
            raise NotImplementedError(f"{name} {options}")
        for variable, result in zip(equation.outvars, results, strict=True):
            shape = tuple(variable.aval.shape)
            array = np.asarray(result, variable.aval.dtype)
            assert array.shape == shape, (name, array.shape, shape)
            values[variable] = array
    return [read(v) for v in jaxpr.outvars]


def _select(which: Array, *cases: Array) -> Array:
    return np.choose(which.astype(np.int64), np.broadcast_arrays(*cases))


def _broadcast(x: Array, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Array:
    wide = [1] * len(shape)
    for axis, extent in zip(broadcast_dimensions, x.shape, strict=True):
        wide[axis] = extent
    return np.broadcast_to(x.reshape(wide), shape)


def _pad(x: Array, value: Array, *, padding_config: Any) -> Array:
    """With elements before, after and between; a negative number takes elements away."""
    for axis, (low, high, between) in enumerate(padding_config):
        extent = x.shape[axis]
        spread = extent + max(extent - 1, 0) * between
        shape = list(x.shape)
        shape[axis] = spread
        wide = np.full(shape, value, x.dtype)
        lead = (slice(None),) * axis
        wide[(*lead, slice(None, None, between + 1))] = x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        wide = np.pad(wide, widths, constant_values=value)
        x = wide[(*lead, slice(max(-low, 0), wide.shape[axis] - max(-high, 0)))]
    return x


def _dot(a: Array, b: Array, *, dimension_numbers: Any, **_: Any) -> Array:
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    letters = iter(range(100))
    of_a: list[int] = [next(letters) for _ in a.shape]
    of_b: list[int] = [next(letters) for _ in b.shape]
    for i, j in (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True)):
        of_b[j] = of_a[i]
    kept = [of_a[i] for i in a_batch]
    kept += [of_a[i] for i in range(a.ndim) if i not in a_sum and i not in a_batch]
    kept += [of_b[j] for j in range(b.ndim) if j not in b_sum and j not in b_batch]
    found: Array = np.einsum(a, of_a, b, of_b, kept)
    return found


def _sort(*operands: Array, dimension: int, num_keys: int, **_: Any) -> list[Array]:
    assert num_keys == 1
    order = np.argsort(operands[0], axis=dimension, kind="stable")
    return [np.take_along_axis(a, order, dimension) for a in operands]


def _starts(shape: Any, indices: Array, into: Any, batching: Any, of_indices: Any, sizes: Any) -> Any:
    """For each position of the indices, where its window begins, moved inside."""
    for position in np.ndindex(indices.shape[:-1]):
        start = [0] * len(shape)
        for axis, value in zip(into, indices[position], strict=True):
            start[axis] = int(value)
        for axis, at in zip(batching, of_indices, strict=True):
            start[axis] = position[at]
        inside = [min(max(s, 0), e - n) for s, e, n in zip(start, shape, sizes, strict=True)]
        assert inside == start, "an index out of range"
        yield position, tuple(slice(s, s + n) for s, n in zip(inside, sizes, strict=True))


def _gather(x: Array, indices: Array, *, dimension_numbers: Any, slice_sizes: Any, **_: Any) -> Array:
    d = dimension_numbers
    gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    window = [n for i, n in enumerate(slice_sizes) if i not in gone]
    lead = indices.shape[:-1]
    result = np.zeros((*lead, *window), x.dtype)
    starts = _starts(
        x.shape, indices, d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims, slice_sizes
    )
    for position, place in starts:
        result[position] = x[place].reshape(window)
    axes = [i for i in range(result.ndim) if i not in d.offset_dims]
    return np.moveaxis(result, range(result.ndim), [*axes, *d.offset_dims])


def _scatter_add(x: Array, indices: Array, updates: Array, *, dimension_numbers: Any, **_: Any) -> Array:
    d = dimension_numbers
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    windows = [updates.shape[i] for i in d.update_window_dims]
    sizes, rest = [], iter(windows)
    for axis in range(x.ndim):
        sizes.append(1 if axis in gone else next(rest))
    axes = [i for i in range(updates.ndim) if i not in d.update_window_dims]
    ordered = np.moveaxis(updates, [*axes, *d.update_window_dims], range(updates.ndim))
    result = np.array(x)
    into, batching = d.scatter_dims_to_operand_dims, d.operand_batching_dims
    for position, place in _starts(x.shape, indices, into, batching, d.scatter_indices_batching_dims, sizes):
        result[place] += ordered[position].reshape(sizes)
    return result


def _cumulative(function: Any) -> Primitive:
    def run(x: Array, *, axis: int, reverse: bool) -> Array:
        found: Array = np.flip(function(np.flip(x, axis), axis=axis), axis) if reverse else function(x, axis=axis)
        return found

    return run


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Array:
    wide = [1] * len(shape)
    wide[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(wide), shape)


PLAIN: dict[str, Primitive] = {
    "neg": np.negative, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sqrt": np.sqrt,
    "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "not": np.bitwise_not, "is_finite": np.isfinite,
    "square": np.square, "copy": np.copy, "copy_p": np.copy, "stop_gradient": np.copy, "add": np.add, "add_any": np.add,
    "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "pow": np.power, "atan2": np.arctan2,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "div": np.divide, "select_n": _select,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip
PRIMITIVES: dict[str, Primitive] = {
    "rsqrt": lambda x, **_: 1 / np.sqrt(x),
    "round": lambda x, rounding_method: np.copysign(np.floor(abs(x) + 0.5), x) if rounding_method == 0 else np.rint(x),
    "shift_left": lambda a, b, **_: np.left_shift(a, b),
    "shift_right_arithmetic": lambda a, b, **_: np.right_shift(a, b),
    "shift_right_logical": lambda a, b, **_: np.right_shift(a.view(f"u{a.itemsize}"), b.astype("u8")).astype(a.dtype),
    "bitcast_convert_type": lambda x, *, new_dtype: np.asarray(x).view(new_dtype),
    "population_count": lambda x, **_: np.bitwise_count(x).astype(x.dtype),
    "logistic": lambda x, **_: 1 / (1 + np.exp(-x)),
    "erf": lambda x, **_: np.vectorize(math.erf, otypes=[np.float64])(x),
    "integer_pow": lambda x, *, y: x**y if y >= 0 else 1 / x**-y,
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes, dimensions, **_: (x if dimensions is None else x.transpose(dimensions)).reshape(
        new_sizes
    ),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "reduce_sum": lambda x, *, axes, **_: x.sum(axes),
    "reduce_max": lambda x, *, axes, **_: x.max(axes),
    "reduce_min": lambda x, *, axes, **_: x.min(axes),
    "reduce_prod": lambda x, *, axes, **_: x.prod(axes),
    "reduce_and": lambda x, *, axes, **_: x.all(axes),
    "reduce_or": lambda x, *, axes, **_: x.any(axes),
    "argmax": lambda x, *, axes, index_dtype: x.argmax(axes[0]).astype(index_dtype),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "pad": _pad,
    "slice": lambda x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))
    ],
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "stack": lambda *arrays, axis: np.stack(arrays, axis),
    "unstack": lambda x, *, axis: [np.take(x, i, axis) for i in range(x.shape[axis])],
    "tile": lambda x, *, reps: np.tile(x, reps),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "dot_general": _dot,
    "sort": _sort,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "scatter_add": _scatter_add,
    "iota": _iota,
}
