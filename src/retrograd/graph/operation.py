"""What an operation is: one declaration of its shapes, its gradient, and how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..ops._types import Array

if TYPE_CHECKING:
    from .tensor import Node, Tensor

Attributes: TypeAlias = Mapping[str, Any]


class Spec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


# The specs of an operation's results, from the specs of its inputs. Raises TypeError or ValueError for invalid ones.
Shapes: TypeAlias = Callable[..., Sequence[Spec]]
# Computes: the inputs' arrays, the results' arrays (None: not wanted), the attributes.
Compute: TypeAlias = Callable[..., None]
# The gradients of the inputs: the node, the gradients of its results (None: zero), which inputs need one.
Gradient: TypeAlias = Callable[["Node", Sequence["Tensor | None"], Sequence[bool]], Sequence["Tensor | None"]]


class Operation:
    """An operation: everything that is known about it.

    `shapes(*inputs, **attributes)` gets a Spec for each input (None for an absent one) and returns the specs of the
    results. `compute(inputs, results, **attributes)` calls the engine with arrays. It runs at once for arrays. While a
    program is recorded, the same calls become its records; so it only passes views of the given arrays to the engine.
    A view instead has `view(array, **attributes)`, which returns a view of its input's array.

    `gradient` is missing for results that have no derivative; `why_not` then says what to do.
    `contiguous`: the inputs that the engine takes only in row-major order. `optional`: the results that `compute` can
    do without, and gets None for if nothing reads them. `in_place`: pairs (result, input) that may
    share memory. `flops(inputs, results, **attributes)` is for tables.
    """

    __slots__ = (
        "compute", "contiguous", "flops", "gradient", "in_place", "map_code", "name", "optional", "shapes", "updates",
        "view",
        "why_not",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        shapes: Shapes,
        *,
        compute: Compute | None = None,
        view: Callable[..., Array] | None = None,
        gradient: Gradient | None = None,
        why_not: str = "",
        contiguous: Sequence[int] | None = None,
        optional: Sequence[int] = (),
        in_place: Sequence[tuple[int, int]] = (),
        updates: bool = False,
        flops: Callable[..., float] | None = None,
        map_code: int | None = None,
    ) -> None:
        self.name = name
        self.shapes = shapes
        self.compute = compute
        self.view = view
        self.gradient = gradient
        self.why_not = why_not
        self.contiguous = contiguous  # None: all
        self.optional = tuple(optional)
        self.in_place = tuple(in_place)
        self.updates = updates  # its results replace the inputs paired with them by in_place: variables
        self.flops = flops
        self.map_code = map_code  # of an elementwise operation: its code in the engine
        if name in OPERATIONS:
            raise ValueError(f"there is an operation {name!r} already")
        OPERATIONS[name] = self

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


OPERATIONS: Final[dict[str, Operation]] = {}
SLOTS: Final = "lstm_slots"  # whose indices are lengths
