"""Named problems for the operations of graphs: shapes, memory layouts and values that hurt.

A case is an operation with its inputs and attributes. `arrays` makes the inputs from integers, not with a generator of
a library, so that digests of results stay the same.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from .types import Array

__all__ = ["GraphActivation", "GraphCase", "GraphCell", "GraphInput", "graph_values", "graph_view"]

_F64, _F32, _I64, _I32, _BOOL = (np.dtype(t) for t in (np.float64, np.float32, np.int64, np.int32, np.bool_))


Table: TypeAlias = tuple[tuple[Any, ...], ...]  # rows of shapes, attributes and names


class GraphActivation(NamedTuple):
    """An activation as an attribute of a case; the caller of the engine converts it to retrograd's."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


class GraphCell(NamedTuple):
    """What a recurrent cell computes, as an attribute of a case, which is converted in the same way."""

    cell: str
    activations: tuple[GraphActivation, ...]
    kind: str = "after"
    flip: bool = False
    output_gate_reads: str = "new"
    coupled: bool = False
    clip: float | None = None
    cell_clip: float | None = None
    norm: str | None = None
    norm_eps: float = 1e-5


class GraphInput(NamedTuple):
    """An array: floats of the case's dtype, unless `values` says otherwise.

    `memory` is how it is stored: "" in row-major order; otherwise it is a view, as `graph_view` makes it, of an array
    that is.
    """

    shape: tuple[int, ...]
    values: str = "any"  # any, positive, unit, above one, special, ties, zeros, far, integers, small, bools, below N
    memory: str = ""
    seed: int | None = None  # of the values; None: its position among the inputs


class GraphCase(NamedTuple):
    name: str
    operation: str
    inputs: tuple[GraphInput | None, ...]
    attributes: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    smooth: bool = True  # near every element the function has a derivative
    gradients: bool = True  # compare them
    group: str = ""  # cases of an operation whose digest is apart from that of the others

    def arrays(self, dtype: Any) -> list[Array | None]:
        """The inputs as they are stored: those that are views as the arrays that they are views of."""
        found: list[Array | None] = []
        for number, given in enumerate(self.inputs):
            if given is None:
                found.append(None)
                continue
            seed = number if given.seed is None else given.seed
            kept = graph_values(given.shape, given.values, dtype, len(self.name) + 7 * seed)
            found.append(stored(kept, given.memory))
        return found


# ---- values ----------------------------------------------------------------------------------------------------------

SPECIAL: Final = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 1e-40, 3e38, -3e38, 7.25)


def graph_values(shape: tuple[int, ...], values: str, dtype: Any, seed: int) -> Array:
    found: Array = np.asarray(_values(shape, values, dtype, seed))
    return found


def _values(shape: tuple[int, ...], values: str, dtype: Any, seed: int) -> Any:
    count = math.prod(shape)
    offset = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    bits = (np.arange(1, count + 1, dtype=np.uint64) + np.full(1, offset, np.uint64)) * np.uint64(0xD1342543DE82EF95)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    even = ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)  # from 0 to 1
    whole = (bits >> np.uint64(20)).astype(np.int64).reshape(shape)
    match values:
        case "any":
            return (4 * even - 2).astype(dtype)
        case "positive":
            return (0.25 + 2 * even).astype(dtype)
        case "unit":
            return (1.8 * even - 0.9).astype(dtype)
        case "inside":
            return (0.05 + 0.9 * even).astype(dtype)
        case "above one":
            return (1.25 + 2 * even).astype(dtype)
        case "far":
            return (200 * even - 100).astype(dtype)
        case "apart":  # no two are closer than 0.01
            order = np.argsort(bits, kind="stable").astype(np.float64)
            return (0.03 * (order - count / 2) + 0.01).reshape(shape).astype(dtype)
        case "ties":
            return (whole % 3 - 1).astype(dtype)
        case "zeros":
            return np.where(whole % 4 == 0, 0.0, 4 * even - 2).astype(dtype)
        case "special":
            with np.errstate(over="ignore"):
                return np.resize(np.array(SPECIAL), shape).astype(dtype)
        case "special too":  # with "special", every pair
            with np.errstate(over="ignore"):
                return np.repeat(np.array(SPECIAL), -(-count // len(SPECIAL)))[:count].reshape(shape).astype(dtype)
        case "halves":
            return (whole % 17 / 2 - 4).astype(dtype)
        case "integers":
            return (whole % 19 - 9).astype(_I64)
        case "divisors":
            return np.where(whole % 19 == 9, 4, whole % 19 - 9).astype(_I64)
        case "small":
            return (whole % 19 - 9).astype(_I32)
        case "shifts":
            return (whole % 72 - 3).astype(_I64)
        case "small shifts":
            return (whole % 40 - 3).astype(_I32)
        case "wide":
            return bits.astype(_I64).reshape(shape)
        case "wide small":
            return bits.astype(_I64).astype(_I32).reshape(shape)
        case "bools":
            return whole % 2 == 0
        case "seed":
            return np.asarray(11, _I64)
        case "probabilities":
            return (even / even.sum(-1, keepdims=True)).astype(dtype)
    if values.startswith("float32"):
        return graph_values(shape, "far", _F32, seed)
    if values.startswith("float64"):
        return graph_values(shape, "positive" if "positive" in values else "far", _F64, seed)
    if values.startswith("small below"):
        return (whole % int(values.removeprefix("small below "))).astype(_I32)
    return (whole % int(values.removeprefix("below "))).astype(_I64)


def stored(values: Array, memory: str) -> Array:
    """The array in row-major order of which `graph_view` is the view with these values."""
    match memory:
        case "transposed":
            return np.ascontiguousarray(values.T)
        case "reversed":
            return np.ascontiguousarray(values[..., ::-1])
        case "every other":
            wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
            wide[..., ::2] = values
            return wide
        case "inside":
            return np.pad(values, [(1, 2)] * values.ndim, constant_values=values.dtype.type(1))
        case "repeated":
            return np.ascontiguousarray(values[:1])
        case _:
            return values


def graph_view(stored: Any, memory: str, shape: tuple[int, ...], library: Any = np) -> Any:
    """The view of a stored array, or of a tensor: then `library` is retrograd.graph."""
    match memory:
        case "transposed":
            return library.transpose(stored)
        case "reversed":
            return stored[..., ::-1]
        case "every other":
            return stored[..., ::2]
        case "inside":
            return stored[tuple(slice(1, -2) for _ in shape)]
        case "repeated":
            return library.broadcast_to(stored, shape)
        case _:
            return stored
