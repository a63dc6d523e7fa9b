"""A model that is trained by all shards of a group at once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import numpy as np

import retrograd as rg

from .. import nn
from .group import Group
from .overlap import EarlySums
from .tree import Array

__all__ = ["DataParallel", "Shard"]

_M = TypeVar("_M", bound=nn.Module)
_T = TypeVar("_T")

_PIECE: Final = 4096  # elements of the parameters that ranks compare in each run: some microseconds
_SAME_MODEL: Final = (
    ". Build the model from the same seed on every rank, load the same file, or use rank 0's: "
    "model.load_state_dict(group.broadcast(model.state_dict()))"
)
_SAME_STEPS: Final = (
    ". Optimizers need the same settings and state on every rank, and nothing else may change parameters on one alone"
)


@dataclasses.dataclass(frozen=True)
class Shard(Generic[_M]):
    """A part of each batch: its index, and a model and a loss (any object) that no other shard uses.

    The model shares its parameters with the models of the other shards, and has gradients and buffers of its own.
    """

    index: int
    model: _M
    loss: Any
    group: Group

    def part(self, count: int) -> slice:
        """The samples of a batch of `count` that belong to this shard."""
        return self.group.part(count, self.index)

    def part_of_rank(self, count: int) -> slice:
        """The same samples, counted from the first one of this rank, for a rank that loads only its own."""
        part, first = self.part(count), self.group.rank_part(count).start
        return slice(part.start - first, part.stop - first)

    def share(self, count: int) -> float:
        """The fraction of the batch in this shard: the factor of its mean loss in that of the batch."""
        part = self.part(count)
        return float(part.stop - part.start) / count


class DataParallel(Generic[_M]):
    """Computes the gradients of a model as the sum over the shards of a batch.

    ``run(work)`` calls ``work(shard)`` for every shard, on some rank, in a thread. It runs forward and backward with
    ``shard.model``, on the samples ``shard.part(count)``; the gradients of all shards are then added, in an order that
    does not depend on the number of ranks, into those of `model`. Buffers of `model`, such as running statistics,
    become those of the first shard; with :func:`synchronize` those of all shards are equal.

    All ranks create it together, and refuse to if anything is not the same on all: number of shards, parameters and
    buffers (names, shapes, dtypes and values), layers and their options, the loss. Values are compared, not replaced
    by those of rank 0, because an optimizer whose state differs too would go unnoticed: build the model from a seed,
    or load it on every rank. `run` compares the sizes of batches, and a piece of the parameters, another one each time,
    which shows optimizers with other settings. The error is a ValueError on the rank that differs from most, and a
    :class:`RankError` on the others. `loss` is copied for each shard.

    With `overlap` the gradients of a layer are sent while backward still computes those of the layers before it. Then
    ``work`` runs backward once, and leaves the gradients alone. The bits are the same.
    """

    def __init__(self, model: _M, group: Group, loss: Any = None, *, overlap: bool = False) -> None:
        self.model, self.group = model, group
        if group.size > 1:
            group.agree("DataParallel", dict(_structure(model, loss, overlap)))
            group.agree("DataParallel", dict(_contents(model)), _SAME_MODEL)
        self._gradients = model.gradients()
        self._pieces = _pieces(model)
        self._shards: list[Shard[_M]] = [Shard(0, model, loss, group)]
        self._flat: list[list[Array]] = []  # by dtype, then by shard: all gradients of the dtype in one array
        self._total: list[Array] = []
        if group.shards > 1:
            self._total = [np.empty(sum(a.size for a in arrays), arrays[0].dtype) for arrays in self._by_dtype()]
            self._flat = [[np.zeros_like(total) for _ in group.local] for total in self._total]
            self._shards = [
                Shard(index, self._replica(at), copy.deepcopy(loss), group) for at, index in enumerate(group.local)
            ]
        self._early: EarlySums | None = None
        if overlap and group.shards > 1:
            self._early = EarlySums([shard.model for shard in self._shards], group, self._flat, self._total)

    def _by_dtype(self) -> list[list[Array]]:
        arrays: dict[np.dtype[Any], list[Array]] = {}
        for gradient in self._gradients.values():
            arrays.setdefault(gradient.dtype, []).append(gradient)
        return list(arrays.values())

    def _replica(self, at: int) -> _M:
        """A model with the same parameters, whose gradients are parts of the flat arrays."""
        replaced = {id(parameter): parameter for parameter in self.model.parameters().values()}
        for arrays, flats in zip(self._by_dtype(), self._flat, strict=True):
            for gradient, view in zip(arrays, _views(flats[at], arrays), strict=True):
                replaced[id(gradient)] = view
        return copy.deepcopy(self.model, replaced)

    def run(self, work: Callable[[Shard[_M]], _T]) -> list[_T]:
        """Call ``work(shard)`` for every shard, add up the gradients, and return all results, in the order of shards.

        A mean over the batch needs the factor ``shard.share(count)`` on the gradient of each shard's mean:
        ``shard.loss.backward(shard.share(count))``.
        """
        if self.group.shards == 1:
            return self.group.run(lambda _: work(self._shards[0]))
        for shard in self._shards:
            self._prepare(shard)

        first, piece = self.group.local.start, next(self._pieces, {}) if self.group.size > 1 else {}

        def run(index: int) -> tuple[_T, dict[str, Array] | None, dict[str, str] | None]:
            shard = self._shards[index - first]
            return work(shard), shard.model.buffers() if index == 0 else None, piece if index == first else None

        with self._early or contextlib.nullcontext():
            results = self.group.run(run)
        pieces = [each for _, _, each in results if each is not None]
        self.group.refuse_differences("DataParallel.run", pieces, _SAME_STEPS)
        buffers = results[0][1]
        assert buffers is not None
        for name, buffer in self.model.buffers().items():
            buffer[...] = buffers[name]
        for arrays, flats, total in zip(self._by_dtype(), self._flat, self._total, strict=True):
            if self._early is None:
                self.group.sum(flats, total)
            for gradient, view in zip(arrays, _views(total, arrays), strict=True):
                gradient[...] = view
        return [result for result, _, _ in results]

    def _prepare(self, shard: Shard[_M]) -> None:
        """Give a shard the model's buffers and modes; each shard has its own dropout masks."""
        for (_, module), (_, replica) in zip(self.model.modules(), shard.model.modules(), strict=True):
            replica.training, replica.num_threads = module.training, module.num_threads
        buffers = shard.model.buffers()
        for name, buffer in self.model.buffers().items():
            buffers[name][...] = buffer
            if shard.index and name.rpartition(".")[2] == "stream":
                seeds = np.random.SeedSequence([int(buffer[0]), shard.index])
                buffers[name][0] = seeds.generate_state(1, np.uint64)[0]


def _views(flat: Array, like: list[Array]) -> list[Array]:
    """Consecutive parts of a flat array, in the shapes of these arrays."""
    ends = np.cumsum([array.size for array in like])
    return [flat[end - array.size : end].reshape(array.shape) for end, array in zip(ends, like, strict=True)]


# ---- what must be the same on every rank -----------------------------------------------------------------------------


def _structure(model: nn.Module, loss: object, overlap: bool) -> Iterator[tuple[str, str]]:
    yield "overlap", f"is {overlap}"
    for kind, arrays in (("parameter", model.parameters()), ("buffer", model.buffers())):
        for name, array in arrays.items():
            yield f"{kind} {name}", f"is {array.dtype} of shape {array.shape}"
    for name, module in model.modules():
        yield from _options(f"layer {name}" if name else "the model", module)
    yield from _options("loss", loss)


def _options(title: str, thing: object) -> Iterator[tuple[str, str]]:
    """The class of a layer or a loss, and the options of retrograd's own."""
    yield title, f"is {type(thing).__name__}"
    if type(thing).__module__.split(".")[0] == __name__.split(".")[0]:
        for name, value in vars(thing).items():
            # Modes may change, machines may have other numbers of CPUs.
            if not name.startswith("_") and name not in ("training", "num_threads") and _is_plain(value):
                yield f"{name} of {title}", f"is {value!r}"


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, rg.Activation))


def _contents(model: nn.Module) -> Iterator[tuple[str, str]]:
    for kind, arrays in (("parameter", model.parameters()), ("buffer", model.buffers())):
        for name, array in arrays.items():
            yield f"the content of {kind} {name}", f"has the digest {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _pieces(model: nn.Module) -> Iterator[dict[str, str]]:
    """Digests of one piece of the parameters after the other, for ever; of none if there are no parameters."""
    parameters = {name: array for name, array in model.parameters().items() if array.size}
    while parameters:
        for name, array in parameters.items():
            for start in range(0, array.size, _PIECE):
                digest = zlib.crc32(array.flat[start : start + _PIECE].tobytes())
                yield {f"the content of parameter {name}": f"has the digest {digest:08x}"}
