"""Checks of what layers are made with and called with, before anything is allocated or computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops._args import as_number

__all__ = ["check_channels", "float_dtype", "number", "operand", "size", "sizes"]


def size(layer: str, name: str, value: SupportsIndex, least: int | None = 0) -> int:
    """A size that a layer is made with; without `least` it is only an integer."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{layer}: {name} is {value!r}, must be an integer") from None
    if least is not None and found < least:
        raise ValueError(f"{layer}: {name} is {found}, must be at least {least}")
    return found


def sizes(layer: str, name: str, value: SupportsIndex | Sequence[int], least: int = 0) -> int | tuple[int, ...]:
    """A size, or one for each of several axes."""
    if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
        return tuple(size(layer, name, one, least) for one in value)
    return size(layer, name, value, least)


def number(layer: str, name: str, value: float) -> float:
    """A number that a layer is made with."""
    try:
        return as_number(name, value)
    except TypeError:
        raise TypeError(f"{layer}: {name} is {value!r}, must be a number") from None


def float_dtype(layer: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype of a layer's parameters."""
    found = np.dtype(dtype)
    if found not in (np.float32, np.float64):
        raise TypeError(f"{layer}: dtype is {found}, must be float32 or float64")
    return found


def operand(layer: str, name: str, given: Any) -> Any:
    """A tensor or an array that a layer is called with."""
    if given is None:
        raise TypeError(f"{layer}: {name} is None, must be a tensor or an array")
    return graph.identity(given)


def check_channels(layer: str, x: Any, channels: int, axis: int, least: int = 2) -> None:
    """Raise unless x has this many channels on this axis. The functions cannot know it where there is no gamma."""
    found = operand(layer, "x", x).shape
    if len(found) >= least and -len(found) <= axis < len(found) and found[axis] != channels:
        raise ValueError(
            f"{layer}: x has shape {found}, with {found[axis]} channels on axis {axis}, must have {channels}"
        )
