"""Arrays of images, with one or two spatial axes, and options that are given for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from . import _args
from ._errors import ArgumentValueError
from ._types import Array

__all__ = ["Padding", "PerAxis", "as_given", "as_images", "paddings", "per_axis", "spatial", "with_spatial"]

# One number for all spatial axes, or one for each; of padding also (before, after) for each.
PerAxis: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int | Sequence[int]]

_MOST: Final = 2**31 - 1  # beyond it, positions in an image might overflow


def spatial(name: str, shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """The spatial axes of an array of images with this shape."""
    channels_last = _args.as_flag("channels_last", channels_last)
    if len(shape) not in (3, 4):
        axes = "[N, W, C] or [N, H, W, C]" if channels_last else "[N, C, W] or [N, C, H, W]"
        raise ArgumentValueError(name, "{argument} has {} axes, needs 3 or 4, {}", len(shape), axes)
    return shape[1:-1] if channels_last else shape[2:]


def with_spatial(samples: int, channels: int, axes: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """The shape of an array of images."""
    return (samples, *axes, channels) if channels_last else (samples, channels, *axes)


def as_images(array: Array, channels_last: bool) -> Array:
    """A view [N, C, H, W]."""
    if channels_last:
        array = array.transpose(0, array.ndim - 1, *range(1, array.ndim - 1))
    return array[:, :, None] if array.ndim == 3 else array


def as_given(images: Array, rank: int, channels_last: bool) -> Array:
    """The opposite of :func:`as_images`."""
    array = images[:, :, 0] if rank == 3 else images
    return array.transpose(0, *range(2, rank), 1) if channels_last else array


def per_axis(name: str, value: Any, axes: int, least: int) -> tuple[int, ...]:
    """One int for each spatial axis."""
    return tuple(_size(name, entry, least) for entry in _entries(name, value, axes))


def paddings(padding: Any, axes: int) -> tuple[tuple[int, int], ...]:
    """(before, after) for each spatial axis."""
    pairs = []
    for entry in _entries("padding", padding, axes):
        both = tuple(entry) if _is_sequence(entry) else (entry,) * 2
        if len(both) != 2:
            raise ArgumentValueError(
                "padding", "{padding} of an axis has {} entries, must be one int or (before, after)", len(both)
            )
        pairs.append((_size("padding", both[0], 0), _size("padding", both[1], 0)))
    return tuple(pairs)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _entries(name: str, value: Any, axes: int) -> tuple[Any, ...]:
    if not _is_sequence(value):
        return (value,) * axes
    if len(value) != axes:
        raise ArgumentValueError(name, "{argument} has {} entries, but there are {} spatial axes", len(value), axes)
    return tuple(value)


def _size(name: str, value: Any, least: int) -> int:
    size = _args.as_count(name, value, least)
    if size > _MOST:
        raise ArgumentValueError(name, "{argument} is {}, must be at most {}", size, _MOST)
    return size
