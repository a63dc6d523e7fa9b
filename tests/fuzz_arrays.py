"""Random and mutated calls of every array function of retrograd.

Every array, in or out, is a view into a block of bytes filled with a pattern, which surrounds the view and fills the
gaps between the elements of a strided one. After a call the pattern and the inputs must be unchanged. A call that
raises (ValueError, TypeError, MemoryError or OverflowError, nothing else) has written nothing at all. A call that
succeeds gives the same bits at another thread count, and a sample of the results is compared with the oracle.

    python tests/fuzz_arrays.py --count 200000
    python tests/fuzz_arrays.py --seed 1234 --count 1
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import retrograd as rg
from support import fuzz_calls
from support.fuzz_calls import (
    ENORMOUS,
    MANY,
    MOST,
    Arguments,
    Array,
    Impossible,
    Maker,
    Memory,
    Parts,
    as_called,
)
from support.fuzz_convolution import CONV_GENERATORS
from support.fuzz_driver import GUARD, Broken, main
from support.fuzz_oracle import disagreement
from support.fuzz_pooling import POOL_GENERATORS
from support.fuzz_recurrent import RECURRENT_GENERATORS
from support.fuzz_scan import SCAN_GENERATORS

GENERATORS = fuzz_calls.GENERATORS | CONV_GENERATORS | POOL_GENERATORS | RECURRENT_GENERATORS | SCAN_GENERATORS
CELLS = ("lstm", "gru", "rnn")
REFUSALS = (ValueError, TypeError, MemoryError, OverflowError)
INTEGERS = [0, 1, 2, 3, 7, 64, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
INTEGERS += [-1, -2, -100, -(2**31), -(2**63), -(2**63) - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 0.999, 1e-3, 1e-8, 1e30, 1e300, 5e-324, math.nan, math.inf, -math.inf, 10**400]
WORDS = ["", "text", "mean", "none", "dx", "dgamma", "output", "input", "new", "old", "step", "relu", "gelu", "softmax"]
STRANGE = [None, "text", b"bytes", 1.5, 7, [], {}, (), object(), [[1.0], [2.0, 3.0]], np.array([None, 1]), True]
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint64", "bool", "complex64", ">f4", ">f8", "O"]
NO_ARRAYS = {"get_num_threads", "set_num_threads", "release_memory"}
# They read every element and may have a small result: an enormous extent would take them as long as it is.
READ_EVERYTHING = {"batch_norm_statistics", "batch_norm_gradient_sums", "global_norm", "combine_statistics"}
READ_EVERYTHING |= {"linear_forward", "linear_backward", *CONV_GENERATORS, *POOL_GENERATORS}
# Where a mask does not matter: y is only read where a slope is found from it, the others are memory and not numbers.
NO_NUMBERS = {("batch_norm_cache", "y"), *((f"{cell}_cache", "buffer") for cell in CELLS)}
# Forward passes that fill a cache.
FILL = {f"{cell}_{name}" for cell in CELLS for name in ("forward", "step")}
NO_NUMBERS |= {(name, "cache") for name in FILL}
# The arguments that a function writes to.
WRITTEN = {"out", "keep_x", "running_mean", "running_var", "parameters", "velocities", "first_moments"}
WRITTEN |= {"second_moments", "largest_second_moments", "squares", "means"}


class Subclass(np.ndarray[Any, Any]):
    """Of which NumPy's functions know no more than that it is one."""


# ---- mutations -------------------------------------------------------------------------------------------------------


def slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of an argument tree that can be set: (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from slots(inner)


def leaves(value: Any) -> Iterator[Array]:
    if isinstance(value, (rg.LstmCache, rg.GruCache, rg.RnnCache)):  # opaque: its buffer holds the number of the pass
        return
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, memoryview):
        yield np.asarray(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner)


def mutate(make: Maker, arguments: Arguments) -> None:
    for _ in range(make.one_of(0, 0, 0, 1, 1, 1, 2, 3)):
        places = list(slots(arguments))
        container, key = places[int(make.random.integers(len(places)))]
        container[key] = changed(make, container[key], arguments)


def changed(make: Maker, value: Any, arguments: Arguments) -> Any:
    kind = make.random.random()
    if kind < 0.05:
        return copy.deepcopy(make.one_of(*STRANGE))  # of which a later mutation may change a part
    if isinstance(value, np.ndarray):
        return changed_array(make, value, arguments)
    if isinstance(value, bool) or value is None:
        return make.one_of(True, False, None, *(leaves(arguments) if kind < 0.3 else ()))
    if isinstance(value, (int, np.integer)):
        return make.one_of(*INTEGERS) if kind < 0.7 else int(make.random.integers(-1, 9))
    if isinstance(value, float):
        return make.one_of(*FLOATS)
    if isinstance(value, str):
        return make.one_of(*WORDS)
    if isinstance(value, (list, tuple)) and value:
        return make.one_of(value[:-1], [*value, value[0]], value[::-1], [], tuple(value), list(value))
    return copy.deepcopy(make.one_of(*STRANGE))


def changed_array(make: Maker, array: Array, arguments: Arguments) -> Any:
    """The array in some other form, in the memory of the case."""
    random, memory = make.random, make.memory
    small = max(array.size, *array.shape, 0) <= MANY
    match int(random.integers(13)) if small else 4:
        case 0:  # other memory
            return memory.place(np.array(array))
        case 1:
            name = make.one_of(*DTYPES)
            with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError):
                other = array.astype(name)
                return other if name == "O" else memory.place(other)
        case 2:
            shape = list(array.shape)
            match int(random.integers(4)):
                case 0:
                    shape.insert(int(random.integers(len(shape) + 1)), 1)
                case 1 if shape:
                    shape.pop(int(random.integers(len(shape))))
                case 2 if shape:
                    shape[int(random.integers(len(shape)))] = make.extent()
                case _:
                    shape.reverse()
            if math.prod(shape) <= MOST:
                return memory.place(random.standard_normal(shape).astype(array.dtype))
        case 3:
            mask = random.random(array.shape) < 0.5
            return np.ma.masked_array(array, mask) if array.dtype.kind != "V" else array
        case 4:
            view = array[...]
            view.flags.writeable = False
            return view
        case 5 | 6:  # memory that another argument has
            others = [other for other in leaves(arguments) if other is not array and other.size <= MANY]
            if others:
                return overlapping(make, make.one_of(*others), array)
        case 7:  # memory that it shares with itself
            if array.size and array.ndim and memory.block_of(array) is not None:
                steps = [int(random.integers(0, 3)) * array.itemsize for _ in array.shape]
                inside = sum((extent - 1) * step for extent, step in zip(array.shape, steps, strict=True))
                if inside < max(array.size, 1) * array.itemsize:
                    return as_strided(memory.place(np.array(array), "C"), array.shape, steps)
        case 8:
            twin = memory.place(np.array(array), "C")
            view = twin if array.dtype.kind == "V" else memoryview(twin)  # bfloat16 has none
            return make.one_of(array.tolist(), view, array.view(Subclass))
        case 9 | 10:
            return with_values(make, array)
        case 11:
            return array[::-1] if array.ndim else array
        case _:
            if array.ndim and make.may_be_enormous:
                extents = list(array.shape)
                extents[int(random.integers(array.ndim))] = make.one_of(*ENORMOUS)
                with contextlib.suppress(ValueError):  # NumPy has no such array
                    return np.broadcast_to(memory.place(np.ones((), array.dtype)), extents)
    return array


def overlapping(make: Maker, other: Array, like: Array) -> Any:
    """A view of `other`'s memory with the shape of `like`: exactly there, shifted, or backwards."""
    if other.shape == like.shape and make.chance():
        return other if make.chance(0.7) else other[::-1] if other.ndim else other
    number = make.memory.block_of(other)
    if number is None or not like.size or like.dtype.hasobject:
        return other
    block = make.memory.blocks[number]
    room = (block.size - 2 * GUARD - like.size * like.itemsize) // like.itemsize
    if room < 0:
        return other
    start = GUARD + like.itemsize * int(make.random.integers(room + 1))
    return np.ndarray(like.shape, like.dtype, block, start)


def with_values(make: Maker, array: Array) -> Array:
    values = np.array(array)
    if not values.size:
        return array
    places = tuple(int(make.random.integers(extent)) for extent in values.shape)
    with np.errstate(all="ignore"), contextlib.suppress(OverflowError, TypeError, ValueError):
        values[places] = make.one_of(*INTEGERS) if values.dtype.kind in "iu" else make.one_of(*FLOATS)
    return make.memory.place(values)


NAMES = sorted(GENERATORS)


def check_every_function_has_a_generator() -> None:
    functions = {name for name in rg.__all__ if inspect.isfunction(getattr(rg, name))} - NO_ARRAYS
    if functions != set(GENERATORS):
        raise Broken(f"without a generator, or no longer there: {sorted(functions ^ set(GENERATORS))}")


# ---- one case --------------------------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """The tree with the arrays' values as they are now."""
    if isinstance(value, (np.ndarray, memoryview)):
        array = np.asarray(value)
        return array if array.size > MANY else array.copy()
    if type(value) is list or isinstance(value, Parts):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, rg.NormStatistics):
        return rg.NormStatistics(*map(copied, value))
    return tuple(map(copied, value)) if type(value) is tuple else value


def same_numbers(a: Array, b: Array) -> bool:
    """To the bit, but for which NaN it is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.dtype.kind not in "fV" or not a.size:
        return a.tobytes() == b.tobytes()
    bits = f"u{a.itemsize}"
    return bool(((a.view(bits) == b.view(bits)) | ((a != a) & (b != b))).all())


def run(seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    name = NAMES[seed % len(NAMES)]
    make = Maker(random, Memory(random), name not in READ_EVERYTHING)
    make.memory.misaligned = make.chance(0.05)
    make.enormous = make.may_be_enormous and make.chance(0.04)
    make.large = not make.enormous and make.chance(0.02)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            arguments = GENERATORS[name](make)
            mutate(make, arguments)
        except Impossible:
            return
        except (MemoryError, ValueError):  # NumPy has no such array
            if make.enormous:
                return
            raise
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*threads are asked for", RuntimeWarning)
        one_case(name, make, arguments, tally)


def one_case(name: str, make: Maker, arguments: Arguments, tally: Counter[str]) -> None:
    memory, function = make.memory, getattr(rg, name)
    written = WRITTEN | ({"cache"} if name in FILL else set())
    with contextlib.suppress(ValueError):  # an array has no truth value
        if not arguments.get("training", True):
            written = written - {"running_mean", "running_var"}
    results = [array for key in sorted(written & set(arguments)) for array in leaves(arguments[key])]
    data = {key: value for key, value in arguments.items() if (name, key) not in NO_NUMBERS}
    masked = any(isinstance(a, np.ma.MaskedArray) and np.ma.getmaskarray(a).any() for a in leaves(data))
    masks, fault = memory.writable(results)
    old, before = copied(arguments), memory.snapshot()
    try:
        answer = function(**as_called(arguments))
    except REFUSALS as error:
        memory.check(before, None, f"{name} raised {error!r}, and")
        tally[f"{name} refused"] += 1
        return
    tally[f"{name} done"] += 1
    memory.check(before, masks, name)
    if masked:
        raise Broken(f"{name} took a masked array, whose mask it does not know")
    if fault:
        raise Broken(f"{name} took {fault}")
    found = [copied(array) for array in (*leaves(answer), *results)]
    if make.chance(0.3):
        disagreement = compare(name, old, arguments, answer, memory)
        tally[f"{name} compared"] += disagreement is not None
        if disagreement:
            raise Broken(f"{name}: {disagreement}")
    if "num_threads" in arguments and make.chance(0.2):
        memory.restore(before)
        arguments["num_threads"] = make.one_of(1, 2, 4)
        again = [*leaves(function(**as_called(arguments))), *results]
        stamped = [memory.block_of(a) for a in leaves(arguments.get("cache"))]  # the number of its pass is in it
        for number, (first, second) in enumerate(zip(found, again, strict=True)):
            if memory.block_of(second) not in stamped and not same_numbers(first, second):
                raise Broken(f"{name}: result {number} depends on the number of threads")


def compare(name: str, old: Arguments, arguments: Arguments, answer: Any, memory: Memory) -> str | None:
    """What the oracle has against a result; "" if nothing; None if it was not asked."""
    if any(isinstance(value, float) and not abs(value) < 1e7 for value in old.values()):
        return None
    for array in (*leaves(old), *leaves(answer)):
        if max(array.size, *array.shape, 0) > MANY or array.dtype.kind not in "fViu":
            return None
        values = np.asarray(array).astype(np.float64) if array.dtype.kind in "fV" else np.zeros(0)
        if not np.isfinite(values).all() or np.abs(values).max(initial=0) > 1e7:
            return None
    return disagreement(name, old, arguments, answer, memory.notes)


def limit_memory() -> None:
    """Where an extent is enormous, memory must end before the machine's does. The sanitizer has a limit of its own."""
    if "asan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


if __name__ == "__main__":
    limit_memory()
    check_every_function_has_a_generator()
    sys.exit(main("the array functions", run))
