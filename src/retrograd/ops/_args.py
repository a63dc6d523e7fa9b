"""Check and convert arguments. Copies are made here, and errors about arguments are raised here."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from .. import _core
from . import _memory
from ._arrays import find_overlap
from ._buffers import foreign_array, is_foreign, is_tensor
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._threads import checked_num_threads
from ._types import INT64, Array, check_native
from .activation import Activation

_Record = TypeVar("_Record", bound=tuple[Any, ...])
# Activation parameters that are compared with the data, so they must be rounded to the data's dtype.
_BOUND_PARAMETERS: Final = {"clamp": ("alpha", "beta"), "clamped_leaky_relu": ("beta",), "threshold": ("beta",)}


def as_activation(activation: str | Activation | None) -> Activation:
    if isinstance(activation, Activation):
        return activation
    return Activation("identity" if activation is None else activation)


def as_axis(name: str, axis: int, rank: int) -> int:
    try:
        index = operator.index(axis)
    except TypeError:
        raise ArgumentTypeError(name, "{argument} must be an int, not {}", type(axis)) from None
    if not -rank <= index < rank:
        raise ArgumentValueError(name, "{argument} is {}, but {x} has {} axes", index, rank)
    return index % rank


def as_number(name: str, value: float, shown: str = "{argument}") -> float:
    if not isinstance(value, str):
        try:
            return float(value)
        except OverflowError:
            raise ArgumentValueError(name, shown + " is too large for a float") from None
        except (TypeError, ValueError):
            pass
    raise ArgumentTypeError(name, shown + " must be a number, not {}", type(value))


def as_flag(name: str, value: object) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, (int, np.bool_, np.integer)):
        return bool(value)
    raise ArgumentTypeError(name, "{argument} must be True or False, not {}", type(value))


def as_count(name: str, value: int, least: int = 1) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(name, "{argument} must be an int, not {}", type(value)) from None
    if count < least:
        raise ArgumentValueError(name, "{argument} is {}, must be at least {}", count, least)
    return count


def as_seed(seed: int) -> int:
    value = as_count("seed", seed, least=0)
    if value >= 1 << 64:
        raise ArgumentValueError("seed", "{seed} is {}, must be below 2**64", value)
    return value


def rounded_parameters(activation: Activation, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return alpha and beta as the engine takes them. `dtype` is the dtype of the data they are compared with."""
    values = {"alpha": activation.alpha, "beta": activation.beta}
    for name in _BOUND_PARAMETERS.get(activation.name, ()):
        values[name] = float(np.array(values[name]).astype(dtype))
    return values["alpha"], values["beta"]


def as_array(name: str, value: object) -> Array:
    """Convert to a plain ndarray, without a copy where possible."""
    if type(value) is np.ndarray:
        return value
    check_not_masked(name, value)
    if is_tensor(value):
        # The public function is called again with a view of it.
        raise ArgumentTypeError(name, "{argument} is a tensor, not an array")
    if is_foreign(value):
        try:
            return foreign_array(value)
        except TypeError as error:
            raise ArgumentTypeError(name, "{argument} {}", str(error)) from None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(name, "{argument} is not an array: {}", str(error)) from None


def check_not_masked(name: str, value: object) -> None:
    masked = sys.modules.get("numpy.ma")  # if not imported, no masked array can exist
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise ArgumentTypeError(
            name,
            "{argument} is a masked array, whose mask would be ignored; pass {argument}.filled(value) or "
            "{argument}.data",
        )


def check_aligned(name: str, array: Array) -> None:
    if array.flags.carray:
        return
    size = array.itemsize
    steps = (step for extent, step in zip(array.shape, array.strides, strict=True) if extent > 1)
    if not array.flags.aligned or any(step % size for step in steps):
        raise ArgumentValueError(
            name,
            "{argument} is not aligned: its elements of {} bytes are not at multiples of {} (strides {}); "
            "copy it first",
            size,
            size,
            array.strides,
        )


def check_dtype(name: str, array: Array, dtype: np.dtype[Any], why: str) -> None:
    if array.dtype != dtype:
        if array.dtype == dtype.newbyteorder():
            check_native(name, array.dtype)
        raise ArgumentTypeError(name, "{argument} has dtype {}, must be {} " + why, array.dtype, dtype)


def as_indices(name: str, value: object) -> tuple[Array, Array]:
    """Return the integers as given, and a flat int64 copy for the engine."""
    array = as_array(name, value)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(name, "{argument} has dtype {}; it must be of integers", array.dtype)
    # Always a copy: the engine checks indices once, and another thread may write to the caller's array after that.
    flat = _memory.empty((array.size,), INT64)
    values = array.reshape(-1)
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        values = np.minimum(values, np.iinfo(np.int64).max)  # larger values are out of range either way
    np.copyto(flat, values, casting="unsafe")
    return array, flat


def raise_out_of_range(name: str, indices: Array, limit: int, what: str, ignored: int | None = None) -> NoReturn:
    """Raise an error that names the first index outside [0, limit)."""
    indices = indices.copy()  # another thread may be writing to them
    outside = (indices < 0) | (indices >= limit)
    if ignored is not None:
        outside &= indices != ignored
    if not outside.any():
        raise ArgumentValueError(name, "{argument} was changed by another thread during the call")
    position = tuple(int(i) for i in np.argwhere(outside)[0])
    place = f"[{', '.join(map(str, position))}]" if position else ""
    value = int(indices[position])
    template = "{argument}{} is {}, but " + what + " {}, counted from 0"
    if ignored is None:
        raise ArgumentValueError(name, template, place, value, limit)
    raise ArgumentValueError(name, template + ", and {ignore_index} is {}", place, value, limit, ignored)


def contiguous_result(array: Array, keep: bool = False) -> Array:
    """The array itself if it is contiguous, else a contiguous buffer to write instead, with its values if `keep`."""
    if array.flags.c_contiguous:
        return as_plain(array)
    return as_plain(array).copy(order="C") if keep else _memory.empty(array.shape, array.dtype)


def check_result(name: str, array: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check a buffer that the caller passed for a result."""
    if type(array) is np.ndarray and array.shape == shape and array.dtype is dtype and array.flags.carray:
        return  # contiguous, aligned and writeable: the common case
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(name, "{argument} must be an ndarray, not {}", type(array))
    check_not_masked(name, array)
    if array.shape != shape:
        raise ArgumentValueError(name, "{argument} has shape {}, the result has {}", array.shape, shape)
    check_dtype(name, array, dtype, "as the result is")
    if not array.flags.writeable:
        raise ArgumentValueError(name, "{argument} is read-only")
    check_aligned(name, array)
    check_no_self_overlap(name, array)


def check_no_self_overlap(name: str, array: Array) -> None:
    if _core.may_overlap_itself(array):
        raise ArgumentValueError(
            name,
            "{argument} overlaps itself: with shape {} and strides {} several of its elements share memory",
            array.shape,
            array.strides,
        )


def check_disjoint(
    results: Mapping[str, Array | None],
    inputs: Mapping[str, Array | None],
    in_place: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Raise if a result shares memory with an input or another result.

    `in_place` maps a result to the inputs that it may overwrite in place, element for element.
    """
    found = find_overlap(results, inputs, in_place)
    if found is None:
        return
    result, other = ((name, inputs[name] if name in inputs else results[name]) for name in found)
    (name, a), (other_name, b) = result, other
    assert a is not None
    assert b is not None
    raise ArgumentValueError(
        name,
        "{argument} (shape {}, strides {}) overlaps {} (shape {}, strides {}) without being exactly in its place",
        a.shape,
        a.strides,
        ArgumentName(other_name),
        b.shape,
        b.strides,
    )


def check_accumulated(names: Iterable[str], wanted: Iterable[bool], buffers: Iterable[Array | None]) -> None:
    """Raise if a wanted gradient has no buffer to be added to."""
    for name, want, buffer in zip(names, wanted, buffers, strict=True):
        if want and buffer is None:
            raise ArgumentValueError(
                f"out.{name}", "{accumulate}=True adds to buffers, and {out} has none for {}", ArgumentName(name)
            )


def named_results(gradients: Any) -> dict[str, Array | None]:
    """The fields of a NamedTuple of gradients, under the names used in error messages."""
    return {f"out.{name}": array for name, array in gradients._asdict().items()}


def as_plain(array: Array) -> Array:
    """View a subclass as a plain ndarray, which is all the engine takes."""
    return array if type(array) is np.ndarray else array.view(np.ndarray)


def disjoint_arguments(
    _: object,
    arguments: _Record,
    results: Mapping[str, Array | None],
    inputs: Mapping[str, Array | None],
    in_place: Mapping[str, tuple[str, ...]] | None = None,
) -> _Record:
    """Return refused arguments, after a check by element: the engine compares only spans of memory."""
    check_disjoint(results, inputs, in_place)
    return arguments._replace(overlap_checked=True)  # type: ignore[attr-defined, no-any-return]  # a NamedTuple


def all_contiguous(*arrays: Array | None) -> bool:
    """Whether the engine gets these arrays themselves rather than copies, and so can detect what overlaps them."""
    for array in arrays:  # noqa: SIM110 (a generator takes twice as long)
        if array is not None and not array.flags.c_contiguous:
            return False
    return True


def gradient_buffers(out: object, kind: type[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The caller's buffers in the order of `kind`'s fields. `out` is a `kind` (a NamedTuple), a mapping or None."""
    if isinstance(out, kind):
        return out
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, Mapping):
        raise ArgumentTypeError("out", "{out} must be {} or a mapping, not {}", kind.__name__, type(out))
    for name in set(out) - set(names):
        raise ArgumentValueError("out", "{out} has {!r}; the gradients are {}", name, ", ".join(names))
    return tuple(map(out.get, names))


def needed_names(need: Sequence[str], names: tuple[str, ...]) -> frozenset[str]:
    try:
        wanted = frozenset((need,) if isinstance(need, str) else need)
    except TypeError:
        raise ArgumentTypeError("need", "{need} must be a sequence of names, not {!r}", need) from None
    for name in wanted.difference(names):
        raise ArgumentValueError("need", "{need} has {!r}; the gradients are {}", name, ", ".join(names))
    return wanted


def needed_gradients(
    need: Sequence[str], names: tuple[str, ...], buffers: tuple[Array | None, ...]
) -> tuple[bool, ...]:
    """Which gradients `need` names. A buffer for a gradient that it does not name is an error."""
    wanted = needed_names(need, names)
    for name, buffer in zip(names, buffers, strict=True):
        if buffer is not None and name not in wanted:
            raise ArgumentValueError("out", "{out} has a buffer for {}, which {need} does not name", ArgumentName(name))
    return tuple(name in wanted for name in names)


def thread_count(num_threads: int | None) -> int:
    return 0 if num_threads is None else checked_num_threads(num_threads)
