"""The calls of linear recurrences that fuzz_arrays.py makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import retrograd as rg
from support.fuzz_calls import Arguments, Impossible, Maker


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
