"""Named problems for the layers of graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from .graph_case import _BOOL, _F64, _I64, GraphActivation, GraphCase, GraphCell, GraphInput
from .types import Array

__all__: list[str] = []

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
    largest = options | {"kind": "max"}
    dy = GraphInput((2, 3, 3, 4)), GraphInput((2, 3, 3, 4), "small below 48")
    yield GraphCase("pool_backward max", "pool_backward", dy, largest)
    last = {"padding": ((1, 0), (0, 1)), "channels_last": True, "shape": (2, 5, 7, 3), "count_includes_padding": False}
    yield GraphCase("pool_backward last", "pool_backward", (GraphInput((2, 3, 4, 3)),), options | last)
    dy = GraphInput((2, 3, 4, 3)), GraphInput((2, 3, 4, 3), "small below 35")
    yield GraphCase("pool_backward max last", "pool_backward", dy, largest | last)


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


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _updates() -> Iterator[GraphCase]:
    for shape in ((), (17,), (5, 33), (0, 3), (2, 4099)):
        one = (1,) if shape == (17,) else ()
        settings = (GraphInput(one), *(GraphInput(one, "inside", seed=k) for k in (1, 2)), GraphInput(one, "positive"))
        values, gradient, momentum = (GraphInput(shape, seed=k) for k in (4, 5, 6))
        velocity, largest = (GraphInput(shape, "positive", seed=k) for k in (7, 8))
        nothing = (None,) * 3
        yield GraphCase(
            f"optimizer_step sgd {shape}", "optimizer_step", (settings[0], *nothing, values, gradient, *nothing),
            {"kind": "sgd"},
        )  # fmt: skip
        for name, more in (("adam", None), ("amsgrad", largest)):
            inputs = (*settings, values, gradient, momentum, velocity, more)
            yield GraphCase(f"optimizer_step {name} {shape}", "optimizer_step", inputs, {"kind": "adam"})


LAYER_CASES: Final = (_layers, _losses, _lstms, _recurrent, _scans, _updates)
