"""The calls that fuzz_arrays.py makes: memory between patterns, and for each function the arguments of a valid call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

import retrograd as rg
from retrograd.lab.cases import ACTIVATION_PARAMETERS
from retrograd.lab.verify import fused_activation
from support.fuzz_driver import GUARD, PATTERN, Broken

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]

EXTENTS = [0, 1, 1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33]
MOST = 4000  # elements of an array; a few cases are larger, so that threads take part
MANY = 1_000_000  # what has more elements has no memory for them, only strides of 0
# Nothing of that size can be allocated: a function refuses, or has an extent of 0 beside it.
ENORMOUS = [2**44, 2**47 + 1, 2**52, 2**58 + 256, 2**60, 2**61 - 1]
# C and Fortran order, permuted axes, reversed, every other element, part of a larger array, stride 0, misaligned.
LAYOUTS = "CCCFPRSXZM"
WRITABLE = "CCFPRSX"


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Blocks of bytes, each with one view that a call was given, and others that mutations have made."""

    random: np.random.Generator
    blocks: list[Array] = field(default_factory=list)
    misaligned: bool = False  # some arrays of the case are
    notes: dict[int, Any] = field(default_factory=dict)  # what the oracle needs to know of a cache, by its id

    def place(self, values: Array, layouts: str = LAYOUTS) -> Array:
        """The values as a view into a new block, in a layout drawn from these letters."""
        if values.dtype.hasobject:  # pointers are not for patterns
            return values
        layout = str(self.random.choice(list(layouts if self.misaligned else layouts.replace("M", ""))))
        item = values.itemsize
        extents = [extent if values.size else min(extent, 3) for extent in values.shape]  # one may be enormous
        order = list(range(values.ndim))
        gap = shift = 0
        if layout == "F":
            order.reverse()
        elif layout == "P":
            self.random.shuffle(order)
        elif layout == "X":  # a part of a larger array
            gap = int(self.random.integers(1, 4)) * item
        elif layout == "M":
            shift = int(self.random.integers(1, max(item, 2)))
        zero = int(self.random.integers(values.ndim)) if layout == "Z" and values.ndim else -1
        strides, span = [0] * values.ndim, item
        for axis in reversed(order):
            if axis == zero and extents[axis] > 1:
                continue
            step = span * (2 if layout == "S" and self.random.random() < 0.7 else 1)
            strides[axis], span = step, max(step * extents[axis], span) + gap
        if layout == "M" and values.ndim and self.random.random() < 0.3:
            strides[order[-1]] += 1  # from element to element, too
            span += extents[order[-1]]
        block = np.full(span + shift + 2 * GUARD, PATTERN, np.uint8)
        offset = GUARD + shift
        for axis in range(values.ndim):
            if layout == "R" and self.random.random() < 0.7 and extents[axis]:
                offset += (extents[axis] - 1) * strides[axis]
                strides[axis] = -strides[axis]
        view = np.ndarray(values.shape, values.dtype, block, offset, strides)
        if values.size:
            view[...] = values if zero < 0 else values[(slice(None),) * zero + (slice(0, 1),)]
        self.blocks.append(block)
        return view

    def block_of(self, view: Any) -> int | None:
        while view is not None:
            for number, block in enumerate(self.blocks):
                if view is block:
                    return number
            view = getattr(view, "base", getattr(view, "obj", None))
        return None

    def count_bytes(self, view: Array, counts: Array, block: Array) -> None:
        """Count at each byte of the block how many elements of the view include it."""
        if not view.size:
            return
        places: Any = view.__array_interface__["data"][0] - block.__array_interface__["data"][0]
        axes = [(extent, step) for extent, step in zip(view.shape, view.strides, strict=True) if step]
        for extent, step in (*axes, (view.itemsize, 1)):
            places = np.add.outer(places, np.arange(extent) * step)
        np.add.at(counts, places.reshape(-1), 1)

    def writable(self, arrays: list[Array]) -> tuple[list[Array], str]:
        """Which bytes of each block these arrays may change; and which of the arrays cannot be a result, and why."""
        masks, fault = [np.zeros(block.size, np.bool_) for block in self.blocks], ""
        for array in arrays:
            if any(step == 0 and extent > 1 for step, extent in zip(array.strides, array.shape, strict=True)):
                fault = "a result with stride 0" if array.size else fault
            number = self.block_of(array)
            if number is None or not array.flags.writeable:
                continue
            counts = np.zeros(self.blocks[number].size, np.int64)
            self.count_bytes(array, counts, self.blocks[number])
            if (counts > 1).any():
                fault = "a result that overlaps itself"
            if (masks[number] & (counts > 0)).any():
                fault = "two results that overlap"
            masks[number] |= counts > 0
        return masks, fault

    def snapshot(self) -> list[Array]:
        return [block.copy() for block in self.blocks]

    def restore(self, before: list[Array]) -> None:
        for block, old in zip(self.blocks, before, strict=True):
            block[...] = old

    def check(self, before: list[Array], masks: list[Array] | None, what: str) -> None:
        for number, (block, old) in enumerate(zip(self.blocks, before, strict=True)):
            changed = block != old
            if masks is not None:
                changed &= ~masks[number]
            if changed.any():
                raise Broken(f"{what} has changed byte {int(changed.argmax())} of block {number} of {block.size} bytes")


@dataclass
class Maker:
    """Draws the arguments of a valid call."""

    random: np.random.Generator
    memory: Memory
    may_be_enormous: bool = False  # a mutation may make an array enormous
    enormous: bool = False  # the call is made with enormous arrays
    large: bool = False

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def maybe(self, value: Any, share: float = 0.5) -> Any:
        return value if self.random.random() < share else None

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.random.random() < share)

    def shape(self, low: int, high: int, most: int = MOST) -> tuple[int, ...]:
        if self.large:
            most *= 15
        rank = int(self.random.integers(low, high + 1))
        extents = [self.extent() for _ in range(rank)]
        while math.prod(extents) > most:
            extents[int(np.argmax(extents))] //= 2
        if self.large and rank and math.prod(extents):
            axis = int(self.random.integers(rank))
            extents[axis] *= max(1, most // math.prod(extents))
        return tuple(self.enlarged(extents))

    def extent(self, low: int = 0) -> int:
        return max(low, self.one_of(*EXTENTS))

    def enlarged(self, extents: list[int]) -> list[int]:
        """With one enormous extent, in a case that is to have some."""
        if self.enormous and extents and self.chance(0.7):
            extents[int(self.random.integers(len(extents)))] = self.one_of(*ENORMOUS)
        return extents

    def dtype(self, halves: bool = False) -> np.dtype[Any]:
        names: list[Any] = ["float32", "float32", "float64", *(["float16", ml_dtypes.bfloat16] if halves else [])]
        return np.dtype(names[int(self.random.integers(len(names)))])

    def real(self, shape: tuple[int, ...], dtype: Any, layouts: str = LAYOUTS) -> Array:
        """An input of normal numbers; of some, with a mean far from 0, and NaN or infinities here and there."""
        if math.prod(shape) > MANY:
            if math.prod(shape) * np.dtype(dtype).itemsize >= 2**63:
                raise Impossible
            return np.broadcast_to(self.memory.place(np.ones((), dtype)), shape)
        values = self.random.standard_normal(shape)
        kind = self.random.random()
        if kind < 0.05:
            values = values + self.one_of(1e2, 1e4, 1e6)
        elif kind < 0.1:
            values = np.full(shape, self.one_of(0.0, -0.0, 1.0, 1e4))
        elif kind < 0.15:
            holes = self.random.random(shape) < 0.1
            values = np.where(holes, self.one_of(math.nan, math.inf, -math.inf, 1e38, 1e-42), values)
        with np.errstate(all="ignore"):
            return self.memory.place(values.astype(dtype), layouts)

    def indices(self, shape: tuple[int, ...], limit: int, layouts: str = LAYOUTS) -> Array:
        if math.prod(shape) > MANY:
            return np.broadcast_to(self.memory.place(np.zeros((), np.int64)), shape)
        values = self.random.integers(0, max(limit, 1), shape)
        return self.memory.place(values.astype(self.one_of("int64", "int64", "int32", "uint8", "uint64")), layouts)

    def result(self, shape: tuple[int, ...], dtype: Any, share: float = 0.5) -> Array | None:
        """A buffer for a result, or none; rarely one that cannot be written to in its layout."""
        if math.prod(shape) > MANY or not self.chance(share):
            return None
        values = self.random.standard_normal(shape)
        return self.memory.place(values.astype(dtype), self.one_of(WRITABLE, WRITABLE, LAYOUTS))

    def activation(self) -> Any:
        name = self.one_of(*ACTIVATION_PARAMETERS)
        return fused_activation(name, *ACTIVATION_PARAMETERS[name])

    def threads(self) -> Any:
        return self.one_of(None, 1, 2, 3, 4)


class Impossible(Exception):
    """There is no such array, or no such cache."""


class Parts(list[Any]):
    """The arrays of a recurrent cell, in a form that can be mutated; a call gets the record of its weights."""

    record: ClassVar[Any]


def as_called(value: Any) -> Any:
    if isinstance(value, Parts) and 2 <= len(value) <= len(value.record._fields):
        return value.record(*value)
    if type(value) is list:
        return [as_called(inner) for inner in value]
    if type(value) is dict:
        return {key: as_called(inner) for key, inner in value.items()}
    return value


# ---- generators: the arguments of a valid call, by the function's name -----------------------------------------------


def norm_arguments(make: Maker, kind: str) -> tuple[Arguments, dict[str, Any]]:
    """Of a forward, and the geometry in the oracle's words."""
    shape = make.shape(1 if kind == "layer" else 2, 4)
    dtype, rank = make.dtype(halves=True), len(shape)
    arithmetic = np.float64 if dtype == np.float64 else np.float32
    arguments: Arguments = {"x": make.real(shape, dtype)}
    if kind == "layer":
        axis = int(make.random.integers(rank))
        geometry: dict[str, Any] = {"axis": axis}
        parameters = shape[axis:]
    else:
        axis = int(make.random.integers(1, rank)) if kind != "batch" else int(make.random.integers(rank))
        geometry = {"channel_axis": axis}
        parameters = (shape[axis],)
        if kind == "group":
            divisors = [n for n in range(1, min(shape[axis], 40) + 1) if shape[axis] % n == 0] or [1]
            geometry["num_groups"] = make.one_of(*divisors)
    arguments |= geometry
    for name in ("gamma", "beta"):
        arguments[name] = make.maybe(make.real(parameters, arithmetic))
    arguments |= {
        "eps": make.one_of(1e-5, 1e-3, 0.1, 0.0),
        "activation": make.one_of(None, None, make.activation()),
        "slope_from": make.one_of("output", "input", "input"),
    }
    if kind == "batch":
        sets: tuple[int, ...] = parameters
    elif kind == "instance":
        sets = (shape[0], shape[axis])
    elif kind == "layer":
        sets = shape[:axis]
    else:
        sets = (shape[0], geometry["num_groups"])
    return arguments, {"sets": sets, "parameters": parameters, "dtype": dtype, "shape": shape}


def norm_forward(kind: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, sizes = norm_arguments(make, kind)
        if make.chance(0.2):
            arguments["mean"] = make.real(sizes["sets"], np.float64)
            arguments["var"] = np.abs(arguments["mean"]) if make.chance() else make.real(sizes["sets"], np.float32)
        if kind in ("batch", "instance") and make.chance(0.4):
            running = make.dtype()
            arguments["running_mean"] = make.real(sizes["parameters"], running, "CFRSX")
            arguments["running_var"] = make.memory.place(
                np.abs(make.random.standard_normal(sizes["parameters"])), "CRSX"
            )
            arguments["training"] = make.chance(0.7)
            arguments["update"] = make.one_of(
                rg.RunningUpdate.pytorch(), rg.RunningUpdate.keras(), rg.RunningUpdate(1, True)
            )
        x = arguments["x"]
        arguments["out"] = make.result(sizes["shape"], sizes["dtype"])
        arguments["keep_x"] = make.result(sizes["shape"], sizes["dtype"], 0.2)
        if make.chance(0.1) and x.flags.writeable:
            arguments["out"] = x  # in place
        arguments["num_threads"] = make.threads()
        return arguments

    return generate


def norm_cache(make: Maker, kind: str) -> tuple[Any, dict[str, Any]]:
    """Of a forward that went well."""
    arguments, sizes = norm_arguments(make, kind)
    arguments["x"] = make.real(sizes["shape"], sizes["dtype"], "CCFPRSXZ")
    for name in ("gamma", "beta"):
        if arguments[name] is not None:
            arguments[name] = make.memory.place(np.array(arguments[name]), "CFRSX")
    if arguments["activation"] is not None and make.chance():
        arguments["slope_from"] = "input"
    try:
        cache = getattr(rg, f"{kind}_norm_forward")(**arguments)[1]
    except ValueError:  # an activation whose slope needs the input
        arguments["slope_from"] = "input"
        cache = getattr(rg, f"{kind}_norm_forward")(**arguments)[1]
    sizes["geometry"] = {
        "kind": kind,
        **{k: v for k, v in arguments.items() if k in ("axis", "channel_axis", "num_groups")},
    }
    sizes["slope_from"] = arguments["slope_from"]
    return cache, sizes


def norm_backward(kind: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        if make.enormous:
            raise Impossible  # there is no cache of such a pass
        cache, sizes = norm_cache(make, kind)
        arithmetic = np.float64 if sizes["dtype"] == np.float64 else np.float32
        arguments = {"dy": make.real(sizes["shape"], sizes["dtype"]), "cache": cache, "num_threads": make.threads()}
        buffers = {
            "dx": make.result(sizes["shape"], sizes["dtype"]),
            "dgamma": make.result(sizes["parameters"], arithmetic),
            "dbeta": make.result(sizes["parameters"], arithmetic),
        }
        arguments["out"] = buffers if make.chance() else None
        arguments["accumulate"] = make.chance(0.3)
        if make.chance(0.3):
            arguments["need"] = [name for name in buffers if make.chance(0.7)]
        if kind == "batch" and make.chance(0.2):
            sums = rg.batch_norm_gradient_sums(np.array(arguments["dy"]), cache)
            arguments["sums"] = make.one_of(
                sums, rg.GradientSums(7, *(make.memory.place(np.array(a)) for a in sums[1:]))
            )
        make.memory.notes[id(cache)] = {**sizes["geometry"], "slope_from": sizes["slope_from"]}
        return arguments

    return generate


def batch_norm_cache(make: Maker) -> Arguments:
    arguments, sizes = norm_arguments(make, "batch")
    arguments |= {"mean": make.real(sizes["sets"], np.float64), "var": make.real(sizes["sets"], np.float64)}
    arguments["y"] = make.maybe(make.real(sizes["shape"], sizes["dtype"]), 0.7)
    arguments["frozen"] = make.chance()
    return arguments


def batch_norm_statistics(make: Maker) -> Arguments:
    arguments, _ = norm_arguments(make, "batch")
    return {"x": arguments["x"], "channel_axis": arguments["channel_axis"], "num_threads": make.threads()}


def batch_norm_gradient_sums(make: Maker) -> Arguments:
    cache, sizes = norm_cache(make, "batch")
    make.memory.notes[id(cache)] = {**sizes["geometry"], "slope_from": sizes["slope_from"]}
    return {"dy": make.real(sizes["shape"], sizes["dtype"]), "cache": cache, "num_threads": make.threads()}


def combine_statistics(make: Maker) -> Arguments:
    channels = (make.extent(),)
    parts = [
        rg.NormStatistics(
            int(make.random.integers(0, 9)),
            make.real(channels, np.float64, "CSXR"),
            make.memory.place(np.abs(make.random.standard_normal(channels))),
        )
        for _ in range(int(make.random.integers(1, 5)))
    ]
    return {"parts": parts}


def activation_forward(make: Maker) -> Arguments:
    shape, dtype = make.shape(0, 4), make.dtype(halves=True)
    x = make.real(shape, dtype)
    return {"x": x, "activation": make.activation(), "out": make.result(shape, dtype), "num_threads": make.threads()}


def activation_backward(make: Maker) -> Arguments:
    shape, dtype = make.shape(0, 4), make.dtype(halves=True)
    arguments = {
        "dy": make.real(shape, dtype),
        "activation": make.activation(),
        make.one_of("x", "x", "y"): make.real(shape, dtype),
    }
    out = make.result(shape, dtype)
    return {**arguments, "out": out, "accumulate": out is not None and make.chance(0.3), "num_threads": make.threads()}


def dropout(make: Maker) -> Arguments:
    shape, dtype = make.shape(0, 4), make.dtype()
    arguments = {
        "x": make.real(shape, dtype),
        "rate": make.one_of(0.0, 0.1, 0.5, 0.999),
        "seed": make.one_of(0, 7, 2**64 - 1),
    }
    return {**arguments, "out": make.result(shape, dtype), "num_threads": make.threads()}


def linear_sizes(make: Maker) -> tuple[tuple[int, ...], int, int]:
    """Rows, inputs and outputs. An enormous one is an extent of a result: sums over it alone would only take long."""
    outputs = make.one_of(*ENORMOUS) if make.enormous and make.chance(0.3) else make.extent()
    return make.shape(0, 3, 200), make.extent(int(make.enormous)), outputs


def linear_forward(make: Maker) -> Arguments:
    (rows, inputs, outputs), dtype = linear_sizes(make), make.dtype()
    return {
        "x": make.real((*rows, inputs), dtype),
        "w": make.real((outputs, inputs), dtype),
        "b": make.maybe(make.real((outputs,), dtype)),
        "out": make.result((*rows, outputs), dtype),
        "num_threads": make.threads(),
    }


def linear_backward(make: Maker) -> Arguments:
    (rows, inputs, outputs), dtype = linear_sizes(make), make.dtype()
    buffers = {
        "dx": make.result((*rows, inputs), dtype),
        "dw": make.result((outputs, inputs), dtype),
        "db": make.result((outputs,), dtype),
    }
    need = [name for name in buffers if buffers[name] is not None or make.enormous or make.chance()]
    return {
        "dy": make.real((*rows, outputs), dtype),
        "x": make.real((*rows, inputs), dtype),
        "w": make.real((outputs, inputs), dtype),
        "need": need,
        "out": buffers if make.chance(0.8) else None,
        "accumulate": all(buffers[name] is not None for name in need) and make.chance(),
        "num_threads": make.threads(),
    }


def embedding_forward(make: Maker) -> Arguments:
    shape, (rows, width), dtype = make.shape(0, 3, 200), (make.extent(), make.extent()), make.dtype()
    return {
        "indices": make.indices(shape, rows),
        "table": make.real((rows, width), dtype),
        "out": make.result((*shape, width), dtype),
        "num_threads": make.threads(),
    }


def embedding_backward(make: Maker) -> Arguments:
    shape, (rows, width), dtype = make.shape(0, 3, 200), (make.extent(), make.extent()), make.dtype()
    out = make.result((rows, width), dtype)
    return {
        "dy": make.real((*shape, width), dtype),
        "indices": make.indices(shape, rows),
        "rows": rows,
        "out": out,
        "accumulate": out is not None and make.chance(),
        "num_threads": make.threads(),
    }


def loss_options(make: Maker, shape: tuple[int, ...], dtype: Any, losses: int) -> Arguments:
    """Of a loss of an array of this shape, with values along its first `losses` axes."""
    weighed = make.one_of(None, None, 0.5, *(shape[:axes] for axes in range(losses + 1)))
    want = make.chance(0.8)
    return {
        "weights": make.real(weighed, dtype) if isinstance(weighed, tuple) else weighed,
        "reduction": make.one_of("mean", "sum", "none", "weighted_mean", "nonzero_mean"),
        "scale": make.one_of(1.0, 1.0, -0.5),
        "want_gradient": want,
        "out": make.result(shape, dtype) if want else None,
        "num_threads": make.threads(),
    }


def softmax_cross_entropy(make: Maker) -> Arguments:
    shape, classes, dtype = make.shape(0, 3, 200), make.extent(), make.dtype()
    if make.enormous and make.chance():
        classes = make.one_of(*ENORMOUS)
    soft = make.chance(0.3)
    return {
        "logits": make.real((*shape, classes), dtype),
        "labels": make.real((*shape, classes), dtype) if soft else make.indices(shape, min(classes, 100)),
        "ignore_index": make.one_of(-100, 0, 1),
        "label_smoothing": make.one_of(0.0, 0.1, 1.0),
        **loss_options(make, (*shape, classes), dtype, len(shape)),
    }


def row_loss(first: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        shape, dtype = make.shape(1, 4), make.dtype()
        rows = {first: make.real(shape, dtype), "target": make.real(shape, dtype)}
        return {**rows, **loss_options(make, shape, dtype, len(shape) - 1)}

    return generate


def element_loss(first: str = "y", **options: Any) -> Callable[[Maker], Arguments]:
    """`options`: an option's name to its values."""

    def generate(make: Maker) -> Arguments:
        shape, dtype = make.shape(0, 4), make.dtype()
        arrays = {first: make.real(shape, dtype), "target": make.real(shape, dtype)}
        chosen = {name: make.one_of(*values) for name, values in options.items()}
        return {**arrays, **chosen, **loss_options(make, shape, dtype, len(shape))}

    return generate


def optimizer(*states: str, **options: tuple[Any, ...]) -> Callable[[Maker], Arguments]:
    """States with a question mark may be missing."""

    def generate(make: Maker) -> Arguments:
        shapes = [make.shape(0, 3, 300) for _ in range(int(make.random.integers(0, 4)))]
        dtypes = [make.dtype() for _ in shapes]

        def arrays(layouts: str, positive: bool = False) -> list[Array]:
            made = []
            for shape, dtype in zip(shapes, dtypes, strict=True):
                values = make.random.standard_normal(shape) if math.prod(shape) < MANY else None
                if values is None:
                    made.append(make.real(shape, dtype))
                else:
                    made.append(make.memory.place((np.abs(values) if positive else values).astype(dtype), layouts))
            return made

        arguments: Arguments = {
            "parameters": arrays(WRITABLE),
            "gradients": [make.real(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)],
        }
        for name in states:
            if not name.endswith("?") or make.chance():
                key = name.rstrip("?")
                arguments[key] = arrays(WRITABLE, key in ("squares", "second_moments", "largest_second_moments"))
        for name, values in options.items():
            arguments[name] = make.one_of(*values)
        if arguments.get("momentum") and "velocities" not in arguments:
            arguments["momentum"] = 0.0
        if arguments.get("nesterov") and not arguments["momentum"]:
            arguments["nesterov"] = False
        way = make.one_of("", "", "clip", "maximum_norm", "maximum_norm_each")
        if way:
            arguments[way] = [-0.5, 0.5] if way == "clip" else 0.7
        arguments |= {
            "gradient_scale": make.one_of(1.0, 0.5),
            "weight_decay": make.one_of(0.0, 0.1),
            "l1": make.one_of(0.0, 0.1),
        }
        arguments |= {"clip_before_scale": make.chance(0.2), "num_threads": make.threads()}
        if len(shapes) == 1 and make.chance(0.3):  # arrays instead of lists
            for name, value in arguments.items():
                if isinstance(value, list) and name != "clip":
                    arguments[name] = value[0]
        return arguments

    return generate


def global_norm(make: Maker) -> Arguments:
    return {
        "arrays": [make.real(make.shape(0, 3, 300), make.dtype()) for _ in range(int(make.random.integers(0, 4)))],
        "num_threads": make.threads(),
    }


STEP = {"learning_rate": (0.1, 0.0)}
VELOCITY = {"momentum": (0.0, 0.9), "velocity_of": ("gradient", "step", "descent")}
GENERATORS: dict[str, Callable[[Maker], Arguments]] = {
    **{f"{kind}_norm_forward": norm_forward(kind) for kind in ("batch", "instance", "layer", "group")},
    **{f"{kind}_norm_backward": norm_backward(kind) for kind in ("batch", "instance", "layer", "group")},
    "batch_norm_cache": batch_norm_cache,
    "batch_norm_statistics": batch_norm_statistics,
    "batch_norm_gradient_sums": batch_norm_gradient_sums,
    "combine_statistics": combine_statistics,
    "activation_forward": activation_forward,
    "activation_backward": activation_backward,
    "dropout": dropout,
    "linear_forward": linear_forward,
    "linear_backward": linear_backward,
    "embedding_forward": embedding_forward,
    "embedding_backward": embedding_backward,
    "softmax_cross_entropy": softmax_cross_entropy,
    "categorical_cross_entropy": row_loss("logits"),
    "cosine_distance": row_loss("y"),
    "mean_squared_error": element_loss(),
    "huber": element_loss(delta=(1.0, 0.1, 5.0)),
    "mean_absolute_error": element_loss(slope_at_zero=(0.0, 1.0)),
    "hinge": element_loss(),
    "log_loss": element_loss(eps=(1e-7, 0.0)),
    "sigmoid_cross_entropy": element_loss("logits", label_smoothing=(0.0, 0.1, 1.0)),
    "sgd_step": optimizer("velocities?", **STEP, **VELOCITY, nesterov=(False, False, True)),
    "adam_step": optimizer(
        "first_moments", "second_moments", "largest_second_moments?", **STEP,
        step=(1, 2, 1000), epsilon_hat=(False, True), decoupled=(False, True),
    ),
    "rmsprop_step": optimizer("squares", "means?", "velocities?", **STEP, **VELOCITY, eps_inside_root=(False, True)),
    "global_norm": global_norm,
}  # fmt: skip
