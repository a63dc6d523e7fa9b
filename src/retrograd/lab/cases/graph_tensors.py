"""Named problems for the operations of graphs that are not layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from .graph_case import _BOOL, _F32, _F64, _I32, _I64, GraphCase, GraphInput, Table

__all__: list[str] = []

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
_STEPS: Final = ("sign", "floor", "ceil", "round", "trunc")
_BOOLS: Final = ("isnan", "isinf", "isfinite", "signbit")
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
    for operation in (*_FUNCTIONS, *_STEPS, *_BOOLS):
        values = _VALUES.get(operation, "any")
        for label, shape in (("scalar", ()), ("empty", (0, 3)), ("lanes", (17,)), ("plane", (3, 33))):
            yield GraphCase(f"{operation} {label}", operation, (GraphInput(shape, values),))
        for memory in ("transposed", "reversed", "every other", "inside", "repeated"):
            inputs = (GraphInput((5, 9), values, memory),)
            # Some of these values are within a difference of a step.
            yield GraphCase(f"{operation} {memory}", operation, inputs, smooth=operation not in _STEPS)
        yield GraphCase(
            f"{operation} special", operation, (GraphInput((15,), "special"),), smooth=False, gradients=False
        )
    yield GraphCase("exp large", "exp", (GraphInput((7, 3001)),))
    for operation in ("relu", "absolute"):
        yield GraphCase(f"{operation} ties", operation, (GraphInput((17,), "ties"),), smooth=False)
    for operation in ("round", "floor", "ceil", "trunc"):
        yield GraphCase(f"{operation} halves", operation, (GraphInput((33,), "halves"),), smooth=False)
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


def _bits() -> Iterator[GraphCase]:
    for wide, shifts in (("wide", "shifts"), ("wide small", "small shifts")):
        for operation in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
            second = shifts if "shift" in operation else wide
            for label in ("scalars", "empty", "lanes more 1", "last axis", "both ways"):
                a, b = _PAIRS[label]
                inputs = (GraphInput(a, wide), GraphInput(b, second))
                yield GraphCase(f"{operation} {label} {wide}", operation, inputs)
            inputs = (GraphInput((5, 9), wide, "transposed"), GraphInput((5, 9), second, "reversed"))
            yield GraphCase(f"{operation} views {wide}", operation, inputs)
        for operation in ("bitwise_not", "bitwise_count"):
            for label, shape in (("scalar", ()), ("empty", (0, 3)), ("lanes", (17,)), ("plane", (3, 33))):
                yield GraphCase(f"{operation} {label} {wide}", operation, (GraphInput(shape, wide),))


def _fused() -> Iterator[GraphCase]:
    for label, shapes in {
        "scalars": ((), (), ()), "equal": ((5, 9),) * 3, "number": ((5, 9), (), (9,)), "empty": ((0, 3), (3,), ()),
        "three ways": ((4, 1, 1), (1, 5, 1), (1, 1, 17)), "large": ((7, 3001), (1,), (7, 1)),
    }.items():  # fmt: skip
        yield GraphCase(f"fma {label}", "fma", tuple(map(GraphInput, shapes)))
    views = (GraphInput((9, 5), "any", "transposed"), GraphInput((9, 5), "any", "reversed"), GraphInput((9, 5)))
    yield GraphCase("fma views", "fma", views)
    special = (GraphInput((15, 15), "special"), GraphInput((15, 15), "special too"), GraphInput((15,), "special"))
    yield GraphCase("fma special", "fma", special, smooth=False, gradients=False)


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
        for values in ("any", "integers", "bools"):
            both = (GraphInput(shape, values), GraphInput(extents, values))
            yield GraphCase(
                f"slice_update {label} {values}", "slice_update", both, {"slices": slices}, gradients=values == "any"
            )
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
    for largest, reverse in ((False, False), (False, True), (True, False), (True, True)):
        for shape, axis in (((17,), 0), ((5, 33), 1), ((33, 5), 0), ((3, 5, 7), 1), ((1, 1), 0), ((3, 0), 1)):
            for values in ("apart", "ties"):
                attributes = {"axis": axis, "largest": largest, "reverse": reverse}
                name = f"cumulative_extreme {shape} {axis} {values} {largest} {reverse}"
                inputs = (GraphInput(shape, values),)
                yield GraphCase(name, "cumulative_extreme", inputs, attributes, values == "apart")
        attributes = {"axis": 0, "largest": largest, "reverse": reverse}
        special = (GraphInput((15, 7), "special"),)
        name = f"cumulative_extreme special {largest} {reverse}"
        yield GraphCase(name, "cumulative_extreme", special, attributes, False)
        name = f"cumulative_extreme large {largest} {reverse}"
        yield GraphCase(name, "cumulative_extreme", (GraphInput((7, 1100), "apart"),), attributes)
    yield from _scatters()
    for count in (0, 1, 4, 7, 2050):
        yield GraphCase(f"philox {count}", "philox", (GraphInput((7,), "wide small"),), {"count": count})
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


def _scatters() -> Iterator[GraphCase]:
    for mode in ("add", "subtract", "multiply", "divide", "minimum", "maximum", "set"):
        for label, shape, indices, axis in (
            ("rows", (5, 7), (4,), 0), ("columns", (5, 17), (9,), 1), ("middle", (3, 5, 7), (2, 3), 1),
            ("number", (5, 7), (), 1), ("none", (5, 7), (0,), 0), ("vector", (9,), (31,), 0),
            ("wide", (6, 67), (8,), 0),
        ):  # fmt: skip
            taken = (*shape[:axis], *indices, *shape[axis + 1 :])
            yield from _scatter_cases(label, shape, indices, taken, axis, mode, False)
        for label, shape, count, axis in (
            ("last", (5, 17), 3, 1), ("first", (5, 7), 9, 0), ("middle", (3, 5, 7), 2, 1), ("none", (4, 5), 0, 1),
        ):  # fmt: skip
            places = (*shape[:axis], count, *shape[axis + 1 :])
            yield from _scatter_cases(label, shape, places, places, axis, mode, True)
        attributes: dict[str, Any] = {"axis": 0, "mode": mode, "along": False}
        special = (GraphInput((4, 15), "special too"), GraphInput((15,), "below 4"), GraphInput((15, 15), "special"))
        yield GraphCase(f"scatter special {mode}", "scatter", special, attributes, False, False)
        ties = (GraphInput((4, 5), "ties"), GraphInput((9,), "below 4"), GraphInput((9, 5), "ties"))
        if mode != "divide":
            yield GraphCase(f"scatter ties {mode}", "scatter", ties, attributes, mode == "multiply")
            for values in ("integers", "small"):
                whole = (GraphInput((4, 5), values), GraphInput((9,), "below 4"), GraphInput((9, 5), values))
                yield GraphCase(f"scatter {values} {mode}", "scatter", whole, attributes, gradients=False)


def _scatter_cases(
    label: str, shape: Any, indices: Any, updates: Any, axis: int, mode: str, along: bool
) -> Iterator[GraphCase]:
    # Each minimum or maximum has one winner, and products stay small.
    first, second = {"minimum": ("any", "any"), "maximum": ("any", "any")}.get(mode, ("any", "positive"))
    inputs = (GraphInput(shape, first), GraphInput(indices, f"below {shape[axis]}"), GraphInput(updates, second))
    name = f"scatter {label} {mode}{' along' if along else ''}"
    yield GraphCase(name, "scatter", inputs, {"axis": axis, "mode": mode, "along": along})


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
        columns, turned = GraphInput((shape[-1], outputs)), {"transposed": True}
        yield GraphCase(f"linear columns {shape} {outputs}", "linear", (GraphInput(shape), columns, added), turned)
        arrays = (dy, GraphInput(shape), columns)
        yield GraphCase(f"linear_backward columns {shape} {outputs}", "linear_backward", arrays, turned)
    w = GraphInput((9, 7), "any", "transposed")
    yield GraphCase("linear view", "linear", (GraphInput((5, 7), "any", "reversed"), w, GraphInput((9,))))


TENSOR_CASES: Final = (_unary, _binary, _bits, _fused, _logic, _reductions, _shaping, _indexing, _products)
