"""The calls of linear recurrences that fuzz_arrays.py makes, and what they should give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import retrograd as rg
from retrograd.lab import bounds, reference
from support.fuzz_calls import Arguments, Impossible, Maker
from support.fuzz_oracle import ORACLES, Array, Triple, accumulated, usual


def scan_shapes(make: Maker) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Of b and of a state, and the axis."""
    shape = make.shape(1, 4, 400)
    axis = int(make.random.integers(len(shape)))
    return shape, (*shape[:axis], *shape[axis + 1 :]), axis - len(shape) * int(make.chance(0.3))


def part_of(make: Maker, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that is broadcast to this one."""
    if make.chance(0.6):
        return shape
    return tuple(1 if make.chance(0.4) else extent for extent in shape[int(make.random.integers(len(shape) + 1)) :])


def scan_inputs(make: Maker) -> tuple[Arguments, tuple[int, ...], Any]:
    (shape, state, axis), dtype = scan_shapes(make), make.dtype()
    reset = make.memory.place(make.random.random(part_of(make, shape)) < 0.3)
    arguments = {
        "a": make.real(part_of(make, shape), dtype),
        "b": make.real(shape, dtype),
        "h0": make.maybe(make.real(state, dtype)),
        "axis": axis,
        "reset": make.maybe(reset, 0.3),
    }
    return arguments, state, dtype


def scan_forward(make: Maker) -> Arguments:
    arguments, state, dtype = scan_inputs(make)
    out = {"y": make.result(arguments["b"].shape, dtype), "hn": make.result(state, dtype)}
    return {**arguments, "out": make.one_of(None, out["y"], out), "num_threads": make.threads()}


def scan_backward(make: Maker) -> Arguments:
    arguments, state, dtype = scan_inputs(make)
    try:
        cache = rg.scan_forward(**arguments).cache
    except (ValueError, MemoryError):  # not aligned, or enormous
        raise Impossible from None
    shape = arguments["b"].shape
    buffers = {
        "da": make.result(arguments["a"].shape, dtype),
        "db": make.result(shape, dtype),
        "dh0": make.result(state, dtype),
    }
    need = [name for name in buffers if buffers[name] is not None or make.chance()]
    make.memory.notes[id(cache)] = cache
    return {
        "dy": make.maybe(make.real(shape, dtype), 0.8),
        "cache": cache,
        "dhn": make.maybe(make.real(state, dtype)),
        "need": need,
        "out": buffers if make.chance(0.8) else None,
        "accumulate": all(buffers[name] is not None for name in need) and make.chance(),
        "num_threads": make.threads(),
    }


SCAN_GENERATORS: dict[str, Callable[[Maker], Arguments]] = {
    "scan_forward": scan_forward,
    "scan_backward": scan_backward,
}


# ---- what the oracle says -------------------------------------------------------------------------------------------


def scan_factors(a: Array, whole: Array, reset: Any) -> Array:
    wide = np.broadcast_to(a, whole.shape)
    return wide if reset is None else np.where(reset, 0, wide)


def scan_forward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    a, b, h0, reset = (old[name] for name in ("a", "b", "h0", "reset"))
    if not usual(a, b, h0):
        return None
    axis = int(old["axis"]) % b.ndim
    right = reference.scan_forward(a, b, h0, axis=axis, reset=reset)
    allowed = bounds.scan_forward_bound(scan_factors(a, b, reset), right[0], axis, b.dtype, h0)
    return zip(("y", "hn"), answer[:2], right, allowed, strict=True)


def scan_backward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    dy, dhn, cache = old["dy"], old["dhn"], old["cache"]
    if not usual(dy, dhn) or type(cache) is not rg.ScanCache:
        return None
    axis, a, h0, reset, y = cache
    right = reference.scan_backward(dy, dhn, a, y, h0, axis=axis, reset=reset)
    factors = scan_factors(a, y, reset)
    allowed = bounds.scan_backward_bound(factors, y, h0, right.db, right.dh0, a.shape, axis, y.dtype)
    return (
        triple
        for name, got, exact, tolerance in zip(answer._fields, answer, right, allowed, strict=True)
        if got is not None
        for triple in accumulated(name, got, exact, tolerance, old)
    )


ORACLES |= {"scan_forward": scan_forward, "scan_backward": scan_backward}
