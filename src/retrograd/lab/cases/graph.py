"""Named problems for the operations of graphs: shapes, memory layouts and values that hurt.

A case is an operation with its inputs and attributes. `arrays` makes the inputs from integers, not with a generator of
a library, so that digests of results stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from .types import Array

__all__ = ["GraphActivation", "GraphCase", "GraphCell", "GraphInput", "graph_cases", "graph_values", "graph_view"]

_F64, _F32, _I64, _I32, _BOOL = (np.dtype(t) for t in (np.float64, np.float32, np.int64, np.int32, np.bool_))


Table: TypeAlias = tuple[tuple[Any, ...], ...]  # rows of shapes, attributes and names


class GraphActivation(NamedTuple):
    """An activation as an attribute of a case; the caller of the engine converts it to retrograd's."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


class GraphCell(NamedTuple):
    """What a recurrent cell computes, as an attribute of a case, which is converted in the same way."""

    cell: str
    activations: tuple[GraphActivation, ...]
    kind: str = "after"
    flip: bool = False
    output_gate_reads: str = "new"
    coupled: bool = False
    clip: float | None = None
    cell_clip: float | None = None
    norm: str | None = None
    norm_eps: float = 1e-5


class GraphInput(NamedTuple):
    """An array: floats of the case's dtype, unless `values` says otherwise.

    `memory` is how it is stored: "" in row-major order; otherwise it is a view, as `graph_view` makes it, of an array
    that is.
    """

    shape: tuple[int, ...]
    values: str = "any"  # any, positive, unit, above one, special, ties, zeros, far, integers, small, bools, below N
    memory: str = ""
    seed: int | None = None  # of the values; None: its position among the inputs


class GraphCase(NamedTuple):
    name: str
    operation: str
    inputs: tuple[GraphInput | None, ...]
    attributes: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    smooth: bool = True  # near every element the function has a derivative
    gradients: bool = True  # compare them
    group: str = ""  # cases of an operation whose digest is apart from that of the others

    def arrays(self, dtype: Any) -> list[Array | None]:
        """The inputs as they are stored: those that are views as the arrays that they are views of."""
        found: list[Array | None] = []
        for number, given in enumerate(self.inputs):
            if given is None:
                found.append(None)
                continue
            seed = number if given.seed is None else given.seed
            kept = graph_values(given.shape, given.values, dtype, len(self.name) + 7 * seed)
            found.append(stored(kept, given.memory))
        return found


# ---- values ----------------------------------------------------------------------------------------------------------

SPECIAL: Final = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 1e-40, 3e38, -3e38, 7.25)


def graph_values(shape: tuple[int, ...], values: str, dtype: Any, seed: int) -> Array:
    found: Array = np.asarray(_values(shape, values, dtype, seed))
    return found


def _values(shape: tuple[int, ...], values: str, dtype: Any, seed: int) -> Any:
    count = math.prod(shape)
    offset = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    bits = (np.arange(1, count + 1, dtype=np.uint64) + np.full(1, offset, np.uint64)) * np.uint64(0xD1342543DE82EF95)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    even = ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)  # from 0 to 1
    whole = (bits >> np.uint64(20)).astype(np.int64).reshape(shape)
    match values:
        case "any":
            return (4 * even - 2).astype(dtype)
        case "positive":
            return (0.25 + 2 * even).astype(dtype)
        case "unit":
            return (1.8 * even - 0.9).astype(dtype)
        case "inside":
            return (0.05 + 0.9 * even).astype(dtype)
        case "above one":
            return (1.25 + 2 * even).astype(dtype)
        case "far":
            return (200 * even - 100).astype(dtype)
        case "apart":  # no two are closer than 0.01
            order = np.argsort(bits, kind="stable").astype(np.float64)
            return (0.03 * (order - count / 2) + 0.01).reshape(shape).astype(dtype)
        case "ties":
            return (whole % 3 - 1).astype(dtype)
        case "zeros":
            return np.where(whole % 4 == 0, 0.0, 4 * even - 2).astype(dtype)
        case "special":
            with np.errstate(over="ignore"):
                return np.resize(np.array(SPECIAL), shape).astype(dtype)
        case "special too":  # with "special", every pair
            with np.errstate(over="ignore"):
                return np.repeat(np.array(SPECIAL), -(-count // len(SPECIAL)))[:count].reshape(shape).astype(dtype)
        case "halves":
            return (whole % 17 / 2 - 4).astype(dtype)
        case "integers":
            return (whole % 19 - 9).astype(_I64)
        case "divisors":
            return np.where(whole % 19 == 9, 4, whole % 19 - 9).astype(_I64)
        case "small":
            return (whole % 19 - 9).astype(_I32)
        case "bools":
            return whole % 2 == 0
        case "seed":
            return np.asarray(11, _I64)
        case "probabilities":
            return (even / even.sum(-1, keepdims=True)).astype(dtype)
    if values.startswith("float32"):
        return graph_values(shape, "far", _F32, seed)
    if values.startswith("float64"):
        return graph_values(shape, "positive" if "positive" in values else "far", _F64, seed)
    return (whole % int(values.removeprefix("below "))).astype(_I64)


def stored(values: Array, memory: str) -> Array:
    """The array in row-major order of which `graph_view` is the view with these values."""
    match memory:
        case "transposed":
            return np.ascontiguousarray(values.T)
        case "reversed":
            return np.ascontiguousarray(values[..., ::-1])
        case "every other":
            wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
            wide[..., ::2] = values
            return wide
        case "inside":
            return np.pad(values, [(1, 2)] * values.ndim, constant_values=values.dtype.type(1))
        case "repeated":
            return np.ascontiguousarray(values[:1])
        case _:
            return values


def graph_view(stored: Any, memory: str, shape: tuple[int, ...], library: Any = np) -> Any:
    """The view of a stored array, or of a tensor: then `library` is retrograd.graph."""
    match memory:
        case "transposed":
            return library.transpose(stored)
        case "reversed":
            return stored[..., ::-1]
        case "every other":
            return stored[..., ::2]
        case "inside":
            return stored[tuple(slice(1, -2) for _ in shape)]
        case "repeated":
            return library.broadcast_to(stored, shape)
        case _:
            return stored


# ---- elementwise -----------------------------------------------------------------------------------------------------

_VALUES: Final = {
    "sqrt": "positive", "rsqrt": "positive", "log": "positive", "log2": "positive", "log10": "positive",
    "log1p": "positive", "arcsin": "unit", "arccos": "unit", "arctanh": "unit", "arccosh": "above one",
    "reciprocal": "positive", "tan": "unit",
}  # fmt: skip
_FUNCTIONS: Final = (
    "negative", "absolute", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10",
    "log1p", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh",
    "erf", "sigmoid", "relu", "copy",
)  # fmt: skip
_FLAT: Final = ("sign", "floor", "ceil", "round", "trunc", "isnan", "isinf", "isfinite")
_ARITHMETIC: Final = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "mod", "fmod", "arctan2", "power",
)  # fmt: skip
_COMPARISONS: Final = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
# Of two operands: every axis of either may be stretched.
_PAIRS: Final = {
    "scalars": ((), ()),
    "number": ((5, 7), ()),
    "one": ((1,), (1,)),
    "empty": ((0, 3), (3,)),
    "lanes less 1": ((15,), (15,)),
    "lanes": ((16,), (16,)),
    "lanes more 1": ((17,), (17,)),
    "prime": ((13, 31), (13, 31)),
    "last axis": ((5, 7, 9), (9,)),
    "middle axis": ((5, 7, 9), (7, 1)),
    "first axis": ((5, 7, 9), (5, 1, 1)),
    "first and last axis": ((5, 1, 9), (7, 1)),
    "both ways": ((5, 1), (1, 33)),
    "column and row": ((1, 7, 1), (5, 1, 9)),
    "four axes": ((2, 1, 3, 1), (1, 4, 1, 17)),
}
_VIEWS: Final = (
    ("transposed", ""), ("", "transposed"), ("reversed", "every other"), ("inside", "reversed"),
    ("repeated", "transposed"),
)  # fmt: skip


def _unary() -> Iterator[GraphCase]:
    for operation in (*_FUNCTIONS, *_FLAT):
        values = _VALUES.get(operation, "any")
        for label, shape in (("scalar", ()), ("empty", (0, 3)), ("lanes", (17,)), ("plane", (3, 33))):
            yield GraphCase(f"{operation} {label}", operation, (GraphInput(shape, values),))
        for memory in ("transposed", "reversed", "every other", "inside", "repeated"):
            yield GraphCase(f"{operation} {memory}", operation, (GraphInput((5, 9), values, memory),))
        yield GraphCase(
            f"{operation} special", operation, (GraphInput((15,), "special"),), smooth=False, gradients=False
        )
    yield GraphCase("exp large", "exp", (GraphInput((7, 3001)),))
    for operation in ("relu", "absolute"):
        yield GraphCase(f"{operation} ties", operation, (GraphInput((17,), "ties"),), smooth=False)
    for operation in ("round", "floor", "ceil", "trunc"):
        yield GraphCase(f"{operation} halves", operation, (GraphInput((33,), "halves"),))
    for operation in ("negative", "absolute", "sign"):
        for values in ("integers", "small"):
            yield GraphCase(f"{operation} {values}", operation, (GraphInput((5, 7), values),), gradients=False)


def _binary() -> Iterator[GraphCase]:
    for operation in (*_ARITHMETIC, *_COMPARISONS):
        second = "positive" if operation in ("divide", "mod", "fmod", "arctan2") else "any"
        first = "positive" if operation == "power" else "any"
        smooth = operation not in ("mod", "fmod", *_COMPARISONS)
        for label, (a, b) in _PAIRS.items():
            yield GraphCase(
                f"{operation} {label}", operation, (GraphInput(a, first), GraphInput(b, second)), smooth=smooth
            )
            if a != b:
                inputs = (GraphInput(b, first), GraphInput(a, second))
                yield GraphCase(f"{operation} {label}, exchanged", operation, inputs, smooth=smooth)
        for one, other in _VIEWS:
            inputs = (GraphInput((5, 9), first, one), GraphInput((5, 9), second, other))
            yield GraphCase(f"{operation} {one or 'plain'} {other or 'plain'}", operation, inputs, smooth=smooth)
        pairs = (GraphInput((15, 15), "special"), GraphInput((15, 15), "special too"))
        yield GraphCase(f"{operation} special", operation, pairs, smooth=False, gradients=False)
        ties = (GraphInput((5, 9), "ties"), GraphInput((5, 9), "ties"))
        defined = operation not in ("divide", "mod", "fmod", "arctan2")
        yield GraphCase(f"{operation} ties", operation, ties, smooth=False, gradients=defined)
    yield GraphCase("add large", "add", (GraphInput((11, 3001)), GraphInput((11, 1))))
    yield GraphCase(
        "power zero", "power", (GraphInput((5, 9), "ties"), GraphInput((9,), "zeros")), smooth=False, gradients=False
    )
    for operation in ("add", "subtract", "multiply", "maximum", "minimum", "mod", *_COMPARISONS):
        numbers = (GraphInput((5, 1), "integers"), GraphInput((7,), "divisors"))
        yield GraphCase(f"{operation} integers", operation, numbers, gradients=False)
    for operation in ("add", "less"):
        yield GraphCase(f"{operation} small", operation, (GraphInput((5, 7), "small"),) * 2, gradients=False)
    for operation in ("equal", "not_equal"):
        yield GraphCase(f"{operation} bools", operation, (GraphInput((5, 7), "bools"), GraphInput((7,), "bools")))


def _logic() -> Iterator[GraphCase]:
    for operation in ("logical_and", "logical_or", "logical_xor"):
        for label in ("scalars", "empty", "lanes more 1", "both ways", "column and row"):
            a, b = _PAIRS[label]
            yield GraphCase(f"{operation} {label}", operation, (GraphInput(a, "bools"), GraphInput(b, "bools")))
    for label, shape in (("scalar", ()), ("lanes", (17,)), ("plane", (3, 33))):
        yield GraphCase(f"logical_not {label}", "logical_not", (GraphInput(shape, "bools"),))
    for label, shapes in {
        "scalars": ((), (), ()), "equal": ((5, 9),) * 3, "condition row": ((9,), (5, 9), (5, 1)),
        "number": ((5, 9), (), (9,)), "empty": ((0, 3), (3,), ()), "three ways": ((4, 1, 1), (1, 5, 1), (1, 1, 17)),
    }.items():  # fmt: skip
        p, a, b = shapes
        for values in ("any", "integers", "bools"):
            inputs = (GraphInput(p, "bools"), GraphInput(a, values), GraphInput(b, values))
            yield GraphCase(f"where {label} {values}", "where", inputs)
    inputs = (GraphInput((15,), "bools"), GraphInput((15,), "special"), GraphInput((15,)))
    yield GraphCase("where not chosen", "where", inputs, smooth=False)
    inputs = (GraphInput((9, 5), "bools", "transposed"), GraphInput((9, 5), "any", "reversed"), GraphInput((9, 5)))
    yield GraphCase("where views", "where", inputs)
    for source in ("any", "float32", "float64", "integers", "small", "bools"):
        for target in (_F32, _F64, _I64, _I32, _BOOL):
            for shape, memory in (((), ""), ((0, 3), ""), ((5, 9), "transposed"), ((17,), "")):
                given = GraphInput(shape, source, memory)
                name = f"cast {source} to {target} {shape}"
                # A derivative in float32 cannot be found by differences.
                yield GraphCase(name, "cast", (given,), {"dtype": target}, smooth=False, gradients=target.kind == "f")
    for target in (_I64, _I32):
        yield GraphCase(f"cast special to {target}", "cast", (GraphInput((15,), "special"),), {"dtype": target})


# ---- reductions ------------------------------------------------------------------------------------------------------

_REDUCED: Final[Table] = (
    ("scalar", (), (), ""), ("all", (17,), (0,), ""), ("one", (1,), (0,), ""), ("last", (5, 33), (1,), ""),
    ("first", (33, 5), (0,), ""), ("middle", (5, 13, 7), (1,), ""), ("ends", (5, 13, 7), (0, 2), ""),
    ("both", (13, 31), (0, 1), ""), ("transposed", (5, 9), (1,), "transposed"), ("reversed", (5, 9), (0,), "reversed"),
    ("every other", (3, 7, 5), (0, 1), "every other"), ("repeated", (5, 9), (0,), "repeated"),
    ("no axis", (5, 9), (), ""), ("four axes", (3, 2, 5, 4), (0, 2, 3), ""),
)  # fmt: skip


def _reductions() -> Iterator[GraphCase]:
    for operation in ("sum", "mean", "sum_of_squares", "max", "min", "prod"):
        values = "apart" if operation in ("max", "min") else "any"
        for label, shape, axes, memory in _REDUCED:
            for keepdims in (False, True):
                kept = ", kept" if keepdims else ""
                # A repeated axis has ties, and the product of hundreds of elements overflows.
                smooth = not (memory == "repeated" and operation in ("max", "min"))
                attributes = {"axes": axes, "keepdims": keepdims}
                inputs = (GraphInput(shape, "positive" if operation == "prod" else values, memory),)
                yield GraphCase(f"{operation} {label}{kept}", operation, inputs, attributes, smooth)
        special = (GraphInput((15, 15), "special"),)
        for axis in (0, 1):
            attributes = {"axes": (axis,), "keepdims": False}
            yield GraphCase(f"{operation} special {axis}", operation, special, attributes, False, False)
        if operation not in ("max", "min"):
            attributes = {"axes": (1,), "keepdims": False}
            yield GraphCase(f"{operation} empty", operation, (GraphInput((3, 0)),), attributes, gradients=False)
        attributes = {"axes": (0,), "keepdims": True}
        yield GraphCase(f"{operation} none", operation, (GraphInput((3, 0)),), attributes)
    for operation in ("sum", "mean", "sum_of_squares", "max"):
        for label, shape, axes in (("long", (20011,), (0,)), ("large", (37, 1003), (0,)), ("rows", (601, 67), (1,))):
            attributes = {"axes": axes, "keepdims": False}
            yield GraphCase(f"{operation} {label}", operation, (GraphInput(shape, "apart"),), attributes)
    for operation in ("max", "min", "prod"):
        for axes in ((0,), (1,), (0, 1)):
            attributes = {"axes": axes, "keepdims": False}
            values = "zeros" if operation == "prod" else "ties"
            yield GraphCase(f"{operation} {values} {axes}", operation, (GraphInput((3, 4), values),), attributes, False)
    for every in (False, True):
        for label, shape, axes, memory in _REDUCED:
            attributes = {"axes": axes, "keepdims": label == "middle", "every": every}
            yield GraphCase(
                f"reduce_bool {label} {every}", "reduce_bool", (GraphInput(shape, "bools", memory),), attributes
            )
        attributes = {"axes": (1,), "keepdims": False, "every": every}
        yield GraphCase(f"reduce_bool empty {every}", "reduce_bool", (GraphInput((3, 0), "bools"),), attributes)
    for largest in (False, True):
        for label, shape, axes, memory in _REDUCED:
            if len(axes) == 1:
                for values in ("any", "ties"):
                    attributes = {"axis": axes[0], "largest": largest}
                    inputs = (GraphInput(shape, values, memory),)
                    yield GraphCase(f"arg_reduce {label} {values} {largest}", "arg_reduce", inputs, attributes)
        attributes = {"axis": 0, "largest": largest}
        yield GraphCase(f"arg_reduce special {largest}", "arg_reduce", (GraphInput((15, 15), "special"),), attributes)


# ---- shapes, indices, products ---------------------------------------------------------------------------------------


def _shaping() -> Iterator[GraphCase]:
    shape: Any
    axes: Any
    for shape, wanted in (((), (1, 1)), ((6, 4), (3, 8)), ((0, 3), (5, 0)), ((2, 3, 5), (30,)), ((30,), (5, 1, 6))):
        yield GraphCase(f"reshape {shape} {wanted}", "reshape", (GraphInput(shape),), {"shape": wanted})
    yield GraphCase("reshape view", "reshape", (GraphInput((6, 4), "any", "transposed"),), {"shape": (8, 3)})
    for shape, axes in (((5, 7), (1, 0)), ((2, 3, 5), (1, 2, 0)), ((2, 3, 5), (0, 2, 1)), ((2, 1, 3, 5), (3, 1, 0, 2))):
        yield GraphCase(f"transpose {axes}", "transpose", (GraphInput(shape),), {"axes": axes})
    for shape, wanted in (((), (3, 5)), ((1, 5), (4, 5)), ((3, 1), (2, 3, 17)), ((1,), (0,)), ((5, 1, 7), (5, 3, 7))):
        yield GraphCase(f"broadcast_to {shape} {wanted}", "broadcast_to", (GraphInput(shape),), {"shape": wanted})
    for label, shape, slices in (
        ("first", (9,), ((0, 4, 1),)), ("steps", (9, 17), ((1, 9, 3), (0, 17, 2))),
        ("backwards", (9, 5), ((8, None, -1), (3, 0, -2))),
        ("one", (9, 5), ((4, 5, 1), (0, 5, 1))), ("none", (9, 5), ((4, 4, 1), (0, 5, 1))),
        ("three axes", (4, 5, 6), ((3, None, -2), (0, 5, 1), (1, 6, 4))),
    ):  # fmt: skip
        extents = tuple(len(range(*slice(*part).indices(e))) for e, part in zip(shape, slices, strict=True))
        yield GraphCase(f"slice {label}", "slice", (GraphInput(shape),), {"slices": slices})
        yield GraphCase(f"place {label}", "place", (GraphInput(extents),), {"shape": shape, "slices": slices})
    for label, shapes, axis in (
        ("first", ((3, 5), (1, 5), (4, 5)), 0), ("last", ((3, 5), (3, 17)), 1), ("middle", ((2, 3, 5), (2, 1, 5)), 1),
        ("empty", ((3, 0), (3, 5)), 1), ("one", ((3, 5),), 0), ("vectors", ((1,), (15,), (17,)), 0),
    ):  # fmt: skip
        yield GraphCase(f"concatenate {label}", "concatenate", tuple(map(GraphInput, shapes)), {"axis": axis})
    views = (GraphInput((5, 9), "any", "transposed"), GraphInput((5, 3), "any", "reversed"))
    yield GraphCase("concatenate views", "concatenate", views, {"axis": 1})
    integers = (GraphInput((5, 9), "integers"), GraphInput((5, 3), "integers"))
    yield GraphCase("concatenate integers", "concatenate", integers, {"axis": 1}, gradients=False)
    yield GraphCase("stop_gradient", "stop_gradient", (GraphInput((5, 9), "any", "transposed"),))


def _indexing() -> Iterator[GraphCase]:
    shape: Any
    inputs: Any
    for label, shape, indices, axis, memory in (
        ("rows", (5, 7), (4,), 0, ""), ("columns", (5, 17), (3,), 1, ""), ("table", (6, 33), (2, 3), 0, ""),
        ("middle", (3, 5, 7), (2, 3), 1, ""), ("last", (3, 5, 7), (4,), 2, ""), ("number", (5, 7), (), 1, ""),
        ("none", (5, 7), (0,), 0, ""), ("vector", (9,), (31,), 0, ""), ("view", (5, 9), (4,), 0, "transposed"),
        ("large", (301, 67), (501,), 0, ""),
    ):  # fmt: skip
        below = f"below {shape[axis]}"
        taken = (*shape[:axis], *indices, *shape[axis + 1 :])
        inputs = (GraphInput(shape, "any", memory), GraphInput(indices, below))
        yield GraphCase(f"take {label}", "take", inputs, {"axis": axis})
        inputs = (GraphInput(taken), GraphInput(indices, below))
        yield GraphCase(f"put_add {label}", "put_add", inputs, {"shape": shape, "axis": axis})
    for label, shape, count, axis in (
        ("last", (5, 17), 3, 1), ("first", (5, 7), 9, 0), ("middle", (3, 5, 7), 2, 1), ("one", (4, 1), 1, 1),
        ("none", (4, 5), 0, 1), ("vector", (33,), 40, 0),
    ):  # fmt: skip
        places = (*shape[:axis], count, *shape[axis + 1 :])
        below = f"below {shape[axis]}"
        inputs = (GraphInput(shape), GraphInput(places, below))
        yield GraphCase(f"take_along_axis {label}", "take_along_axis", inputs, {"axis": axis})
        inputs = (GraphInput(places), GraphInput(places, below))
        attributes = {"shape": shape, "axis": axis}
        yield GraphCase(f"put_along_axis_add {label}", "put_along_axis_add", inputs, attributes)
    for exclusive, reverse in ((False, False), (False, True), (True, False), (True, True)):
        for shape, axis in (
            ((17,), 0),
            ((5, 33), 1),
            ((33, 5), 0),
            ((3, 5, 7), 1),
            ((1, 1), 0),
            ((3, 0), 1),
            ((3001, 3), 0),
        ):
            attributes = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
            yield GraphCase(f"cumsum {shape} {axis} {exclusive} {reverse}", "cumsum", (GraphInput(shape),), attributes)
    for largest in (False, True):
        for shape, k in (((17,), 3), ((5, 33), 33), ((3, 5, 7), 1), ((4, 1), 1), ((4, 5), 0), ((2, 100), 10)):
            for values in ("apart", "ties"):
                inputs = (GraphInput(shape, values),)
                attributes = {"k": k, "largest": largest}
                yield GraphCase(f"top_k {shape} {k} {values} {largest}", "top_k", inputs, attributes, values == "apart")
        special = (GraphInput((3, 15), "special"),)
        yield GraphCase(f"top_k special {largest}", "top_k", special, {"k": 15, "largest": largest}, False, False)
    for log in (False, True):
        for shape, values, memory in (
            ((17,), "any", ""), ((5, 33), "any", ""), ((3, 2, 7), "far", ""), ((4, 1), "any", ""), ((0, 5), "any", ""),
            ((5, 9), "any", "transposed"), ((70, 131), "any", ""), ((3, 3001), "any", ""),
        ):  # fmt: skip
            name = f"{shape} {values} {memory} {log}"
            yield GraphCase(f"softmax {name}", "softmax", (GraphInput(shape, values, memory),), {"log": log})
            y = GraphInput(shape, "any" if log or not shape[-1] or 0 in shape else "probabilities")
            yield GraphCase(f"softmax_backward {name}", "softmax_backward", (GraphInput(shape), y), {"log": log})
        special = (GraphInput((15, 15), "special too"),)
        yield GraphCase(f"softmax special {log}", "softmax", special, {"log": log}, False, False)


def _products() -> Iterator[GraphCase]:
    for b, m, k, n in (
        (1, 1, 1, 1), (1, 5, 7, 9), (3, 17, 15, 16), (2, 1, 33, 1), (5, 2, 0, 3), (0, 2, 3, 4), (2, 0, 3, 4),
        (1, 65, 130, 67), (7, 31, 13, 33), (40, 4, 4, 4),
    ):  # fmt: skip
        yield GraphCase(f"matmul {b} {m} {k} {n}", "matmul", (GraphInput((b, m, k)), GraphInput((b, k, n))))
    for one, other in (("every other", ""), ("", "reversed"), ("inside", "inside"), ("repeated", "repeated")):
        inputs = (GraphInput((3, 5, 7), "any", one), GraphInput((3, 7, 9), "any", other))
        yield GraphCase(f"matmul {one or 'plain'} {other or 'plain'}", "matmul", inputs)
    inputs = (GraphInput((5, 5, 5), "any", "transposed"), GraphInput((5, 5, 5), "any", "transposed"))
    yield GraphCase("matmul transposed", "matmul", inputs)
    for shape, outputs, bias in (
        ((7,), 3, True),
        ((5, 7), 17, True),
        ((2, 3, 33), 9, False),
        ((1, 1), 1, True),
        ((0, 7), 3, True),
    ):
        added = GraphInput((outputs,)) if bias else None
        w = GraphInput((outputs, shape[-1]))
        yield GraphCase(f"linear {shape} {outputs}", "linear", (GraphInput(shape), w, added))
        dy = GraphInput((*shape[:-1], outputs))
        yield GraphCase(f"linear_backward {shape} {outputs}", "linear_backward", (dy, GraphInput(shape), w))
    w = GraphInput((9, 7), "any", "transposed")
    yield GraphCase("linear view", "linear", (GraphInput((5, 7), "any", "reversed"), w, GraphInput((9,))))


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers() -> Iterator[GraphCase]:
    for name, alpha, beta in (
        ("gelu", 0.0, 0.0), ("silu", 0.0, 0.0), ("elu", 0.7, 0.0), ("leaky_relu", 0.2, 0.0), ("softplus", 1.0, 1.0),
        ("tanh", 0.0, 0.0), ("relu", 0.0, 0.0), ("hard_swish", 0.0, 0.0),
    ):  # fmt: skip
        chosen = {"activation": GraphActivation(name, alpha, beta)}
        for shape, memory in (((), ""), ((17,), ""), ((5, 9), "transposed"), ((0, 3), "")):
            x = GraphInput(shape, "any", memory)
            yield GraphCase(f"activation {name} {shape}", "activation", (x,), chosen)
            inputs = (GraphInput(shape), x)
            yield GraphCase(f"activation_backward {name} {shape}", "activation_backward", inputs, chosen)
    for name in ("tanh", "sigmoid", "relu"):
        chosen = {"activation": GraphActivation(name)}
        inputs = (GraphInput((5, 9)), GraphInput((5, 9), "unit"))
        yield GraphCase(f"activation_output_slope {name}", "activation_output_slope", inputs, chosen)
    yield from _norms()
    yield from _shards()
    yield from _calls()
    yield from _convolutions()
    for label, indices, table in (("rows", (4,), (5, 7)), ("plane", (3, 5), (11, 17)), ("none", (0,), (5, 7))):
        below = f"below {table[0]}"
        inputs = (GraphInput(indices, below), GraphInput(table))
        yield GraphCase(f"embedding {label}", "embedding", inputs)
        dy = GraphInput((*indices, table[1]))
        rows = {"rows": table[0]}
        yield GraphCase(f"embedding_backward {label}", "embedding_backward", (dy, GraphInput(indices, below)), rows)
    for shape in ((), (17,), (5, 33), (0, 3), (3, 5000)):
        for rate in (0.3, 0.5):
            inputs = (GraphInput(shape), GraphInput((), "seed"))
            yield GraphCase(f"dropout {shape} {rate}", "dropout", inputs, {"rate": rate})


def _norms() -> Iterator[GraphCase]:
    for kind, shape, axis, groups in (
        ("batch_norm", (8, 5, 9), 1, 1), ("batch_norm", (17, 3), 1, 1), ("batch_norm", (4, 9, 5), 2, 1),
        ("layer_norm", (5, 33), -1, 1), ("layer_norm", (3, 4, 5), -2, 1), ("instance_norm", (3, 4, 17), 1, 1),
        ("group_norm", (3, 6, 5), 1, 3),
    ):  # fmt: skip
        sizes = shape[axis:] if kind == "layer_norm" else (shape[axis],)
        statistics = {
            "batch_norm": (2, shape[axis]), "layer_norm": (2, *shape[:axis]), "instance_norm": (2, *shape[:2]),
            "group_norm": (2, shape[0], groups),
        }[kind]  # fmt: skip
        for name, slope_from in (("identity", "output"), ("tanh", "output"), ("gelu", "input")):
            options: dict[str, Any] = {
                "kind": kind, "axis": axis, "groups": groups, "eps": 1e-5, "activation": GraphActivation(name),
                "slope_from": slope_from, "frozen": False,
            }  # fmt: skip
            both = (GraphInput(sizes, "positive"), GraphInput(sizes))
            label = f"{kind} {shape} {name}"
            yield GraphCase(f"norm {label}", "norm", (GraphInput(shape), *both, None), options)
            if name == "identity":
                yield GraphCase(f"norm {label} plain", "norm", (GraphInput(shape), None, None, None), options)
            if kind == "batch_norm":
                given = GraphInput(statistics, "float64 positive")
                yield GraphCase(
                    f"norm {label} frozen", "norm", (GraphInput(shape), *both, given), options | {"frozen": True}
                )
    # With a mean and a variance other than x's.
    options = {
        "kind": "batch_norm", "axis": 1, "groups": 1, "eps": 1e-5, "activation": GraphActivation("identity"),
        "slope_from": "output", "frozen": True, "given": True,
    }  # fmt: skip
    x, parameter = GraphInput((8, 5, 9)), GraphInput((5,), "positive")
    given = GraphInput((2, 5), "float64 positive")
    yield GraphCase("norm_backward frozen", "norm_backward", (x, x, None, parameter, GraphInput((5,)), given), options)


def _alone(value: Any) -> list[Any]:
    """What a shard without others gets from them."""
    return [value]


def _one_of_three(value: Any) -> list[Any]:
    return [2 * value, value, -0.5 * value]


def _shards() -> Iterator[GraphCase]:
    for shape, axis in (((8, 5, 9), 1), ((17, 3), 1), ((4, 9, 5), -1), ((70, 33), 1), ((0, 3), 1)):
        x, channels = GraphInput(shape), shape[axis]
        yield GraphCase(f"norm_statistics {shape}", "norm_statistics", (x,), {"axis": axis})
        # Not x's, but those of all shards.
        statistics, sums = GraphInput((2, channels), "float64 positive"), GraphInput((2, channels), "float64")
        count = GraphInput((), "float64 positive")
        for name, slope_from in (("identity", "output"), ("tanh", "output"), ("gelu", "input")):
            options: dict[str, Any] = {
                "axis": axis, "eps": 1e-5, "activation": GraphActivation(name), "slope_from": slope_from
            }  # fmt: skip
            both = (GraphInput((channels,), "positive"), GraphInput((channels,)))
            y = GraphInput(shape, "unit") if name == "tanh" else None
            label = f"{shape} {name}"
            for exchange in (_alone, _one_of_three):
                # Its dx includes the gradient of the statistics, which differences do not move.
                yield GraphCase(
                    f"sync_norm {label} {exchange.__name__}", "sync_norm", (x, *both, statistics, count),
                    options | {"exchange": exchange}, smooth=False,
                )  # fmt: skip
            yield GraphCase(f"norm_sums {label}", "norm_sums", (x, x, y, *both, statistics), options)
            yield GraphCase(f"norm_dx {label}", "norm_dx", (x, x, y, *both, statistics, sums, count), options)
    options = {"axis": 1, "eps": 1e-5, "activation": GraphActivation("identity"), "slope_from": "output"}
    x, statistics = GraphInput((5, 3), "any", "transposed"), GraphInput((2, 3), "float64 positive", "transposed")
    yield GraphCase("norm_statistics view", "norm_statistics", (x,), {"axis": 1})
    yield GraphCase("norm_sums plain", "norm_sums", (x, x, None, None, None, statistics), options)
    plain = (x, None, None, statistics, GraphInput((), "float64 positive"))
    yield GraphCase("sync_norm plain", "sync_norm", plain, options | {"exchange": _alone}, smooth=False)


def _order(a: Array) -> Array:
    return np.argsort(a, axis=-1, kind="stable")


def _doubled_and_larger(a: Array, b: Array) -> tuple[Array, Array]:
    return 2.0 * np.asarray(a, _F64), np.asarray(a > b)


def _calls() -> Iterator[GraphCase]:
    for shape, memory in (((7,), ""), ((5, 9), "transposed"), ((3, 4), "every other"), ((0, 3), ""), ((3, 5000), "")):
        attributes: dict[str, Any] = {"function": _order, "specs": ((shape, _I64),), "several": False}
        yield GraphCase(f"call order {shape}", "call", (GraphInput(shape, "any", memory),), attributes)
    for both in ((), (17,), (2, 0)):
        specs = ((both, _F64), (both, _BOOL))
        attributes = {"function": _doubled_and_larger, "specs": specs, "several": True}
        yield GraphCase(f"call pair {both}", "call", (GraphInput(both), GraphInput(both, "ties")), attributes)


def _convolutions() -> Iterator[GraphCase]:
    options: Any
    for label, shape, w, transposed, options in (
        ("plain", (2, 3, 6, 5), (4, 3, 3, 2), None, {}),
        ("strided", (1, 4, 9, 8), (6, 2, 3, 3), None, {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "groups": 2}),
        ("one axis", (2, 3, 17), (5, 3, 4), None, {"stride": (2,), "padding": ((1, 1),), "dilation": (2,)}),
        ("channels last", (2, 6, 5, 3), (4, 3, 3, 2), None, {"channels_last": True, "padding": ((1, 1), (1, 1))}),
        ("tanh", (2, 3, 6, 5), (4, 3, 3, 2), None, {"activation": GraphActivation("tanh")}),
        ("transposed", (2, 3, 4, 5), (3, 2, 2, 3), (0, 0), {"stride": (2, 2)}),
        ("transposed more", (2, 3, 4, 5), (3, 2, 2, 3), (1, 0), {"stride": (2, 1), "padding": ((1, 0), (0, 1))}),
    ):
        axes = len(w) - 2
        full: dict[str, Any] = {
            "stride": (1,) * axes, "padding": ((0, 0),) * axes, "output_padding": transposed, "dilation": (1,) * axes,
            "groups": 1, "channels_last": False, "activation": None,
        } | options  # fmt: skip
        outputs = w[0] if transposed is None else w[1] * full["groups"]
        yield GraphCase(f"conv {label}", "conv", (GraphInput(shape), GraphInput(w), GraphInput((outputs,))), full)
        if full["activation"] is None:
            yield GraphCase(f"conv {label} plain", "conv", (GraphInput(shape), GraphInput(w), None), full)
    options = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "output_padding": None, "dilation": (1, 1), "groups": 1}
    inputs = (GraphInput((2, 4, 4, 4)), GraphInput((2, 3, 6, 5)), GraphInput((4, 3, 3, 2)))
    yield GraphCase("conv_backward", "conv_backward", inputs, options | {"channels_last": False})
    for kind in ("max", "average", "l2"):
        for label, shape, kernel, more in (
            ("halves", (2, 3, 6, 8), (2, 2), {}),
            ("overlap", (1, 2, 7, 9), (3, 2),
             {"stride": (2, 1), "padding": ((1, 1), (0, 1)), "count_includes_padding": False}),
            ("one axis", (2, 3, 17), (3,), {"stride": (2,)}),
            ("channels last", (2, 6, 8, 3), (2, 2), {"channels_last": True}),
        ):  # fmt: skip
            options = {
                "kind": kind, "kernel": kernel, "stride": kernel, "padding": ((0, 0),) * len(kernel),
                "dilation": (1,) * len(kernel), "count_includes_padding": True, "channels_last": False,
            } | more  # fmt: skip
            yield GraphCase(f"pool {kind} {label}", "pool", (GraphInput(shape, "apart"),), options)
    options = {
        "kind": "average", "kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0),) * 2, "dilation": (1, 1),
        "count_includes_padding": True, "channels_last": False, "shape": (2, 3, 6, 8),
    }  # fmt: skip
    yield GraphCase("pool_backward", "pool_backward", (GraphInput((2, 3, 3, 4)),), options)


def _losses() -> Iterator[GraphCase]:
    for reduction in ("mean", "sum", "none", "weighted_mean", "nonzero_mean"):
        for shape in ((17, 5), (2, 3, 33), (1, 1)):
            rows = shape[:-1]
            for weighted in (False, True):
                weights = GraphInput(rows, "positive") if weighted else None
                options: dict[str, Any] = {"reduction": reduction, "scale": 0.5}
                entropy = options | {"ignore_index": 2, "smoothing": 0.1}
                name = f"{shape} {reduction}{' weighted' if weighted else ''}"
                labels = GraphInput(rows, f"below {shape[-1]}")
                inputs = (GraphInput(shape), labels, weights)
                yield GraphCase(f"softmax_cross_entropy {name}", "softmax_cross_entropy", inputs, entropy)
                inputs = (GraphInput(shape), GraphInput(shape, "probabilities"), weights)
                yield GraphCase(f"softmax_cross_entropy targets {name}", "softmax_cross_entropy", inputs, entropy)
                # Its gradient assumes rows of length 1, which finite differences would not keep.
                inputs = (GraphInput(shape), GraphInput(shape), weights)
                yield GraphCase(f"cosine_distance {name}", "cosine_distance", inputs, options, False)
                each = GraphInput(shape, "positive") if weighted else None
                for kind, a, b, y, target in (
                    (0, 1.0, math.inf, "any", "any"), (0, 0.5, 1.0, "any", "any"), (1, 0.0, 0.0, "any", "any"),
                    (2, 0.0, 0.0, "any", "bools"), (3, 1e-7, 0.0, "inside", "inside"), (4, 0.9, 0.05, "any", "inside"),
                ):  # fmt: skip
                    of = GraphInput(shape, "inside" if target == "bools" else target)
                    element = options | {"kind": kind, "a": a, "b": b}
                    label = f"element_losses {kind} {a} {name}"
                    yield GraphCase(label, "element_losses", (GraphInput(shape, y), of, each), element)


_STANDARD: Final = {"lstm": ("sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"), "gru": ("sigmoid", "sigmoid", "tanh")}
_STANDARD["rnn"] = ("tanh",)


def _cell_options(cell: str, **options: Any) -> GraphCell:
    return GraphCell(cell, tuple(map(GraphActivation, _STANDARD[cell])), **options)


def _recurrent_case(
    name: str,
    cell: str,
    attributes: dict[str, Any],
    first: dict[str, Any],
    cells: Sequence[dict[str, Any]],
    options: dict[str, Any],
    group: str = "",
) -> GraphCase:
    """A case of a recurrent layer: the inputs before the parameters, and the parameters, by name."""
    fields = {
        "lstm": ("wx", "wh", "b", "peephole", "projection", "gamma_x", "gamma_h", "gamma_c", "beta_c"),
        "gru": ("wx", "wh", "b", "bh", "gamma_x", "gamma_h"),
        "rnn": ("wx", "wh", "b", "gamma_x", "gamma_h"),
    }[cell]
    places = ("x", "table", "h0", "c0", "active", "order", "seed", "reset", "mask", "zoneout", "cell_zoneout")
    inputs = [first.get(place) for place in places]
    inputs += [of.get(field) for of in cells for field in fields]
    whole = {
        "single": True, "bidirectional": False, "batch_first": False, "dropout": 0.0,
        "options": _cell_options(cell, **options),
    }  # fmt: skip
    return GraphCase(name, cell, tuple(inputs), whole | attributes, group=group)


def _lstms() -> Iterator[GraphCase]:
    def cell(
        number: int, inputs: int, units: int, bias: bool = True, peephole: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        at = 7 + 4 * number
        return {
            "wx": GraphInput((4 * units, inputs), "unit", seed=at),
            "wh": GraphInput((4 * units, units), "unit", seed=at + 1),
            "b": GraphInput((4 * units,), seed=at + 2) if bias else None,
            "peephole": None if peephole is None else GraphInput(peephole, "unit", seed=at + 3),
        }

    def case(
        name: str, first: dict[str, Any], cells: Sequence[Any], reads: str = "new", **attributes: Any
    ) -> GraphCase:
        return _recurrent_case(f"lstm {name}", "lstm", attributes, first, cells, {"output_gate_reads": reads})

    x, h0, c0 = GraphInput((5, 3, 4)), GraphInput((3, 6)), GraphInput((3, 6))
    yield case("plain", {"x": x}, [cell(0, 4, 6)])
    yield case("states", {"x": x, "h0": h0, "c0": c0}, [cell(0, 4, 6, False)])
    yield case("diagonals", {"x": x}, [cell(0, 4, 6, True, (24,))], "old")
    yield case("peepholes", {"x": x}, [cell(0, 4, 6, True, (24, 6))])
    yield case("samples first", {"x": x}, [cell(0, 4, 6)], batch_first=True)
    table = {"x": GraphInput((5, 3), "below 7"), "table": GraphInput((7, 4))}
    yield case("table", table, [cell(0, 4, 6)])
    states = GraphInput((4, 3, 6))
    deep = {"x": x, "h0": states, "c0": states, "seed": GraphInput((), "seed")}
    cells = [cell(n, 4 if n < 2 else 12, 6) for n in range(4)]
    yield case("two layers", deep, cells, single=False, bidirectional=True, dropout=0.4)
    for steps, samples in ((5, 7), (1, 1), (3, 0)):
        inputs = (GraphInput((samples,), f"below {steps + 1}"),)
        yield GraphCase(f"lstm_slots {steps} {samples}", "lstm_slots", inputs, {"steps": steps})


def _scans() -> Iterator[GraphCase]:
    for shape, axis, memory in (
        ((5, 3, 4), 0, ""), ((5, 3, 4), 1, ""), ((5, 3, 17), 2, ""), ((1, 7), 0, ""), ((4, 0), 0, ""), ((0, 4), 0, ""),
        ((33, 65), 0, ""), ((19, 37), 1, ""), ((6, 5, 9), 0, "transposed"), ((7, 9), 1, "reversed"), ((40,), 0, ""),
    ):  # fmt: skip
        state = tuple(extent for i, extent in enumerate(shape) if i != axis)
        whole, a = GraphInput(shape, "any", memory), GraphInput(shape, "unit", memory)
        name = f"{shape} {axis}{memory and f' {memory}'}"
        for h0 in (None, GraphInput(state)):
            label = f"{name}{' from h0' if h0 else ''}"
            yield GraphCase(f"scan {label}", "scan", (a, whole, h0), {"axis": axis})
            yield GraphCase(
                f"scan_backward {label}", "scan_backward", (whole, GraphInput(state), a, whole, h0), {"axis": axis}
            )
    a, whole = GraphInput((5, 6), "unit"), GraphInput((5, 6))
    yield GraphCase("scan_backward of hn", "scan_backward", (None, GraphInput((6,)), a, whole, None), {"axis": 0})


def _recurrent() -> Iterator[GraphCase]:
    """GRU and RNN as the LSTM above, and of all three cells the options inside the recurrence."""
    for cell in ("gru", "rnn"):
        yield from _plain_recurrent(cell)
    for cell in ("lstm", "gru", "rnn"):
        yield from _inside_recurrent(cell)


def _cell_inputs(cell: str, inputs: int, units: int, projection: int = 0, norm: bool = False) -> dict[str, Any]:
    rows = {"lstm": 4, "gru": 3, "rnn": 1}[cell] * units
    found = {"wx": GraphInput((rows, inputs), "unit"), "wh": GraphInput((rows, projection or units), "unit")}
    found["b"] = GraphInput((rows,))
    if cell == "gru":
        found["bh"] = GraphInput((rows,))
    if projection:
        found["projection"] = GraphInput((projection, units), "unit")
    if norm:
        found |= {"gamma_x": GraphInput((rows,), "positive"), "gamma_h": GraphInput((rows,), "positive")}
        if cell == "lstm":
            found |= {"gamma_c": GraphInput((units,), "positive"), "beta_c": GraphInput((units,))}
    return found


def _plain_recurrent(cell: str) -> Iterator[GraphCase]:
    x, h0 = GraphInput((5, 3, 4)), GraphInput((3, 6))
    one = [_cell_inputs(cell, 4, 6)]

    def case(name: str, first: dict[str, Any], cells: Any = one, of: Any = {}, **attributes: Any) -> GraphCase:  # noqa: B006
        return _recurrent_case(f"{cell} {name}", cell, attributes, first, cells, of)

    yield case("plain", {"x": x})
    yield case("states", {"x": x, "h0": h0}, [{name: one[0][name] for name in ("wx", "wh")}])
    yield case("samples first", {"x": x}, batch_first=True)
    yield case("table", {"x": GraphInput((5, 3), "below 7"), "table": GraphInput((7, 4))})
    cells = [_cell_inputs(cell, 4 if n < 2 else 12, 6) for n in range(4)]
    deep = {"x": x, "h0": GraphInput((4, 3, 6)), "seed": GraphInput((), "seed")}
    yield case("two layers", deep, cells, single=False, bidirectional=True, dropout=0.4)
    if cell == "gru":
        yield case("before", {"x": x, "h0": h0}, of={"kind": "before"})
        yield case("flip", {"x": x, "h0": h0}, of={"flip": True})


def _inside_recurrent(cell: str) -> Iterator[GraphCase]:
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[cell]
    start = {"x": GraphInput((5, 3, 4)), "h0": GraphInput((3, 6))}
    one = [_cell_inputs(cell, 4, 6)]

    def case(name: str, first: Any, cells: Any = one, of: Any = {}, **attributes: Any) -> GraphCase:  # noqa: B006
        return _recurrent_case(f"{cell} {name}", cell, attributes, start | first, cells, of, "options")

    yield case("reset", {"reset": GraphInput((5, 3), "bools")})
    yield case("mask", {"mask": GraphInput((3, 6))})
    yield case("mask of gates", {"mask": GraphInput((gates, 5, 3, 6))})
    yield case("zoneout", {"zoneout": GraphInput((5, 3, 6), "unit")})
    inside = {"x": GraphInput((3, 5, 4)), "reset": GraphInput((5, 3), "bools"), "mask": GraphInput((3, 5, 6))}
    yield case("samples first with reset and mask", inside, batch_first=True)
    yield case("clip", {}, of={"clip": 8.0})
    normed = [_cell_inputs(cell, 4, 6, norm=True)]
    for norm in ("haste", "cell") if cell == "lstm" else ("haste",):
        yield case(f"norm {norm}", {}, normed, {"norm": norm, "norm_eps": 1e-2})
    if cell == "gru":
        yield case("mask before", {"mask": GraphInput((gates, 5, 3, 6))}, of={"kind": "before"})
    if cell == "lstm":
        yield case("coupled", {"c0": GraphInput((3, 6))}, of={"coupled": True})
        yield case("cell_clip", {}, of={"cell_clip": 8.0})
        yield case(
            "zoneout of both", {"zoneout": GraphInput((6,), "unit"), "cell_zoneout": GraphInput((5, 3, 6), "unit")}
        )
        yield case("projection", {"h0": GraphInput((3, 2))}, [_cell_inputs(cell, 4, 6, 2)])


def graph_cases() -> list[GraphCase]:
    makers = (
        _unary,
        _binary,
        _logic,
        _reductions,
        _shaping,
        _indexing,
        _products,
        _layers,
        _losses,
        _lstms,
        _recurrent,
        _scans,
    )
    return [case for make in makers for case in make()]
