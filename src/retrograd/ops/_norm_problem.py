"""A normalization of one shape with one set of options.

Its checks depend only on shapes and options, so they run once per combination (:func:`norm_problem` is memoised). Each
later call only compares tuples.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from . import _args
from ._errors import ArgumentTypeError, ArgumentValueError
from ._types import FLOAT32, FLOAT64, Array, Statistics, dtype_code
from .activation import Activation, check_output_tells_slope

NormKind: TypeAlias = Literal["batch_norm", "instance_norm", "layer_norm", "group_norm"]


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
        eps = _args.as_number("eps", eps)
    try:
        if type(axis) is not int or type(num_groups) is not int:
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
    fused = _args.as_activation(activation)
    if slope_from == "output":
        check_output_tells_slope(fused, "slope_from='input' finds it from the input")
    from_input = slope_from == "input"
    if not (0 <= eps < math.inf):
        raise ArgumentValueError("eps", "{eps} is {}, must be a finite number of at least 0", eps)
    rank = len(shape)
    if kind == "layer_norm":
        if rank < 1:
            raise ArgumentValueError("x", "{x} has 0 axes, needs at least 1")
        first = _args.as_axis("axis", axis, rank)
        roles = "n" * first + "c" * (rank - first)
        parameter_shape, statistics_shape = shape[first:], shape[:first]
        channels_per_set = count = math.prod(parameter_shape)
    else:
        if rank < 2:
            raise ArgumentValueError("x", "{x} has {} axes, needs at least 2 (samples and channels)", rank)
        channel = _args.as_axis("channel_axis", axis, rank)
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
    arithmetic = FLOAT64 if dtype == FLOAT64 else FLOAT32
    # The activation's input has the arithmetic dtype, its output the data's dtype.
    alpha, beta = _args.rounded_parameters(fused, arithmetic if from_input else dtype)
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
    groups = _args.as_count("num_groups", num_groups)
    if channels % groups:
        raise ArgumentValueError(
            "num_groups", "{num_groups} is {}, which does not divide the {} channels of {x}", groups, channels
        )
    return groups


def as_parameter(problem: NormProblem, name: str, value: object) -> Array:
    """Check gamma or beta. A strided array is copied; it is small."""
    array = _args.as_array(name, value)
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
    _args.check_dtype(name, array, problem.arithmetic, "for such data")


def as_set_values(problem: NormProblem, name: str, value: object) -> Statistics:
    """Convert one real value per statistics set, of any dtype, to float64."""
    array = _args.as_array(name, value)
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


def check_data(name: str, array: Array, problem: NormProblem) -> None:
    """Check that an array has the shape and dtype of x."""
    if array.shape != problem.shape:
        raise ArgumentValueError(name, "{argument} has shape {}, but {x} has shape {}", array.shape, problem.shape)
    _args.check_dtype(name, array, problem.dtype, "as {x} is")
