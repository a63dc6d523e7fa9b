"""Check and convert arguments. Copies are made here, and errors about arguments are raised here.

Checks that depend only on shapes and options run once per combination (:func:`norm_problem` is memoised). Each later
call only compares tuples.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from . import _memory
from ._arrays import find_overlap
from ._buffers import foreign_array, is_foreign, is_tensor
from ._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from ._threads import checked_num_threads
from .activation import Activation, check_output_tells_slope

Array: TypeAlias = npt.NDArray[Any]
Statistics: TypeAlias = npt.NDArray[np.float64]
NormKind: TypeAlias = Literal["batch_norm", "instance_norm", "layer_norm", "group_norm"]

_FLOAT32: Final = np.dtype(np.float32)
_FLOAT64: Final = np.dtype(np.float64)
_INT64: Final = np.dtype(np.int64)
# The engine's dtype codes. bfloat16 is recognised by name, so that ml_dtypes need not be imported.
_DTYPE_CODES: Final = {_FLOAT32: 0, _FLOAT64: 1, np.dtype(np.float16): 2}
_BFLOAT16_CODE: Final = 3
# Activation parameters that are compared with the data, so they must be rounded to the data's dtype.
_BOUND_PARAMETERS: Final = {"clamp": ("alpha", "beta"), "clamped_leaky_relu": ("beta",), "threshold": ("beta",)}


class NormSettings(NamedTuple):
    """What the engine is told about a normalization besides its shape."""

    roles: str  # of the axes: n for samples, c for channels, r for those that are reduced too
    channels_per_set: int
    dtype: int  # the engine's code
    eps: float
    activation: int  # its code and parameters
    alpha: float
    beta: float
    slope_from_input: bool


class NormProblem(NamedTuple):
    """A normalization of one shape with one set of options, checked."""

    kind: NormKind
    settings: NormSettings
    engine: _core.NormProblem | None  # None: there are no elements
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    arithmetic: np.dtype[Any]
    parameter_shape: tuple[int, ...]
    statistics_shape: tuple[int, ...]
    cache_shape: tuple[int, ...]  # mean and variance in one array
    set_size: int  # elements of a statistics set
    eps: float
    activation: Activation
    needs_y: bool  # backward computes the activation's slope from the output
    needs_beta: bool  # or from the input, which it recomputes

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.dtype} {self.shape}>"


def dtype_code(name: str, dtype: np.dtype[Any]) -> int:
    code = _DTYPE_CODES.get(dtype)
    if code is not None:
        return code
    if not dtype.isnative:
        raise ArgumentTypeError(
            name,
            "{argument} is in non-native byte order ({}); convert it with "
            "{argument}.astype({argument}.dtype.newbyteorder('='))",
            dtype.str,
        )
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return _BFLOAT16_CODE
    raise ArgumentTypeError(name, "{argument} has dtype {}; it must be float32, float64, float16 or bfloat16", dtype)


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


def norm_problem(
    kind: NormKind,
    x: Array,
    axis: int,
    num_groups: int,
    eps: float,
    activation: str | Activation | None,
    slope_from: str,
) -> NormProblem:
    """Return the checked problem. `axis` is the channel axis, or the first normalized axis of a layer norm."""
    if type(eps) is not float:
        eps = as_number("eps", eps)
    try:
        # As integers: 1.0 is not a valid axis, but equals 1.
        axis, num_groups = operator.index(axis), operator.index(num_groups)
        return norm_problem_of(kind, x.shape, x.dtype, axis, num_groups, eps, activation, slope_from)
    except TypeError:  # an unhashable argument, or a type error from the checks: run them again without the memo
        return norm_problem_of.__wrapped__(kind, x.shape, x.dtype, axis, num_groups, eps, activation, slope_from)


@lru_cache(maxsize=512)
def norm_problem_of(
    kind: NormKind,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    axis: int,
    num_groups: int,
    eps: float,
    activation: str | Activation | None,
    slope_from: str,
) -> NormProblem:
    code = dtype_code("x", dtype)
    if slope_from not in ("output", "input"):
        raise ArgumentValueError("slope_from", "{slope_from} is {!r}, must be 'output' or 'input'", slope_from)
    fused = as_activation(activation)
    if slope_from == "output":
        check_output_tells_slope(fused, "slope_from='input' finds it from the input")
    from_input = slope_from == "input"
    if not (0 <= eps < math.inf):
        raise ArgumentValueError("eps", "{eps} is {}, must be a finite number of at least 0", eps)
    rank = len(shape)
    if kind == "layer_norm":
        if rank < 1:
            raise ArgumentValueError("x", "{x} has 0 axes, needs at least 1")
        first = as_axis("axis", axis, rank)
        roles = "n" * first + "c" * (rank - first)
        parameter_shape, statistics_shape = shape[first:], shape[:first]
        channels_per_set = count = math.prod(parameter_shape)
    else:
        if rank < 2:
            raise ArgumentValueError("x", "{x} has {} axes, needs at least 2 (samples and channels)", rank)
        channel = as_axis("channel_axis", axis, rank)
        if channel == 0 and kind != "batch_norm":
            raise ArgumentValueError("channel_axis", "{channel_axis} is 0, but axis 0 counts the samples")
        channels = shape[channel]
        roles = "".join("c" if i == channel else "n" if i == 0 and kind != "batch_norm" else "r" for i in range(rank))
        spatial = math.prod(extent for extent, role in zip(shape, roles, strict=True) if role == "r")
        parameter_shape = (channels,)
        channels_per_set = 1
        if kind == "batch_norm":
            statistics_shape = (channels,)
        elif kind == "instance_norm":
            statistics_shape = (shape[0], channels)
        else:
            groups = _as_groups(num_groups, channels)
            channels_per_set = channels // groups
            statistics_shape = (shape[0], groups)
        count = channels_per_set * spatial
    arithmetic = _FLOAT64 if dtype == _FLOAT64 else _FLOAT32
    # The activation's input has the arithmetic dtype, its output the data's dtype.
    alpha, beta = rounded_parameters(fused, arithmetic if from_input else dtype)
    settings = NormSettings(roles, channels_per_set, code, eps, fused.code, alpha, beta, from_input)
    return NormProblem(
        kind,
        settings,
        _core.NormProblem(list(shape), *settings) if math.prod(shape) else None,
        shape,
        dtype,
        arithmetic,
        parameter_shape,
        statistics_shape,
        (2, *statistics_shape),
        count,
        eps,
        fused,
        bool(fused.code) and not from_input,
        bool(fused.code) and from_input,
    )


def _as_groups(num_groups: int, channels: int) -> int:
    groups = as_count("num_groups", num_groups)
    if channels % groups:
        raise ArgumentValueError(
            "num_groups", "{num_groups} is {}, which does not divide the {} channels of {x}", groups, channels
        )
    return groups


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
            raise ArgumentTypeError(name, "{argument} {}", error) from None
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(name, "{argument} is not an array: {}", error) from None


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


def as_parameter(problem: NormProblem, name: str, value: object) -> Array:
    """Check gamma or beta. A strided array is copied; it is small."""
    array = as_array(name, value)
    check_parameter(problem, name, array)
    return array if array.flags.carray else np.array(array, order="C")


def check_parameter(problem: NormProblem, name: str, array: Array) -> None:
    """Check the shape of gamma or beta, and that it has the arithmetic dtype."""
    if array.shape != problem.parameter_shape:
        raise ArgumentValueError(
            name,
            "{argument} has shape {}, but {x} of shape {} needs {}",
            array.shape,
            problem.shape,
            problem.parameter_shape,
        )
    check_dtype(name, array, problem.arithmetic, "for such data")


def as_set_values(problem: NormProblem, name: str, value: object) -> Statistics:
    """Convert one real value per statistics set, of any dtype, to float64."""
    array = as_array(name, value)
    check_set_values(problem, name, array)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ArgumentTypeError(name, "{argument} has dtype {}; it must be of real numbers", array.dtype)
    return np.require(array, np.float64, ["C_CONTIGUOUS", "ALIGNED"])


def check_set_values(problem: NormProblem, name: str, array: Array) -> None:
    if array.shape != problem.statistics_shape:
        raise ArgumentValueError(
            name,
            "{argument} has shape {}, but {x} of shape {} has statistics of shape {}",
            array.shape,
            problem.shape,
            problem.statistics_shape,
        )


def as_statistics(problem: NormProblem, mean: object, var: object) -> Statistics:
    """Pack the caller's mean and var into the engine's one array."""
    if mean is None or var is None:
        missing = "mean" if mean is None else "var"
        raise ArgumentValueError(missing, "{argument} is missing: give both {mean} and {var}, or neither")
    pair = (as_set_values(problem, "mean", mean), as_set_values(problem, "var", var))
    return np.stack(pair)


def check_dtype(name: str, array: Array, dtype: np.dtype[Any], why: str) -> None:
    if array.dtype != dtype:
        if array.dtype == dtype.newbyteorder():
            dtype_code(name, array.dtype)  # raises: byte order
        raise ArgumentTypeError(name, "{argument} has dtype {}, must be {} " + why, array.dtype, dtype)


def is_float64(name: str, array: Array) -> bool:
    """Whether the array is float64; raises unless it is float32 or float64."""
    dtype = array.dtype
    if dtype is _FLOAT32:
        return False
    if dtype is _FLOAT64:
        return True
    if dtype in (_FLOAT32, _FLOAT64):
        return dtype == _FLOAT64
    if dtype.newbyteorder() in (_FLOAT32, _FLOAT64):
        dtype_code(name, dtype)  # raises: byte order
    raise ArgumentTypeError(name, "{argument} has dtype {}; it must be float32 or float64", dtype)


def as_indices(name: str, value: object) -> tuple[Array, Array]:
    """Return the integers as given, and a flat int64 copy for the engine."""
    array = as_array(name, value)
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(name, "{argument} has dtype {}; it must be of integers", array.dtype)
    # Always a copy: the engine checks indices once, and another thread may write to the caller's array after that.
    flat = _memory.empty((array.size,), _INT64)
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


def check_data(name: str, array: Array, problem: NormProblem) -> None:
    """Check that an array has the shape and dtype of x."""
    if array.shape != problem.shape:
        raise ArgumentValueError(name, "{argument} has shape {}, but {x} has shape {}", array.shape, problem.shape)
    check_dtype(name, array, problem.dtype, "as {x} is")


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
    arguments: tuple[Any, ...],
    results: Mapping[str, Array | None],
    inputs: Mapping[str, Array | None],
    in_place: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[Any, ...]:
    """Return the engine's arguments, after a check by element: the engine compares only spans of memory."""
    check_disjoint(results, inputs, in_place)
    return arguments


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
