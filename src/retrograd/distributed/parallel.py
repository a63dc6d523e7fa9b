"""A model that is trained by all shards of a group at once."""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np

import retrograd as rg

from .. import graph, nn
from ..graph.operation import Spec
from ..graph.tensor import Variable, aligned
from ..nn.fit import sample_axis
from ..nn.module import Changes
from ..nn.program import Programs
from .group import Group
from .tree import Array

__all__ = ["DataParallel", "Shard"]

_M = TypeVar("_M", bound=nn.Module)
_T = TypeVar("_T")

_PIECE: Final = 4096  # elements of the parameters that ranks compare in each run: some microseconds
_SAME_MODEL: Final = (
    ". Build the model from the same seed on every rank, load the same file, or use rank 0's: "
    "model.load_state_dict(group.broadcast(model.state_dict()))"
)
_SAME_OPTIMIZER: Final = (
    ". Load the same file on every rank, or use rank 0's: optimizer.load_state_dict(group.broadcast("
    "optimizer.state_dict()))"
)
_SAME_STEPS: Final = (
    ". Optimizers need the same settings and state on every rank, and nothing else may change parameters on one alone"
)


class _Part(Variable):
    """A variable in memory that is part of a larger array."""

    __slots__ = ()

    def __init__(self, memory: Array, name: str) -> None:
        self.spec = Spec(memory.shape, memory.dtype)
        self._value = memory
        self.name = name


class _Gradients:
    """Variables for the gradients of parameters, whose memory is one array for each dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.flat: list[Array] = []
        self.of: dict[nn.Parameter, _Part] = {}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            inside = [p for p in parameters if p.dtype == dtype]
            line = 64 // dtype.itemsize  # each starts at a cache line
            ends = np.cumsum([-(-p.size // line) * line for p in inside]).tolist()
            memory = aligned(Spec((ends[-1],), dtype))
            for parameter, start in zip(inside, [0, *ends], strict=False):
                values = memory[start : start + parameter.size].reshape(parameter.shape)
                self.of[parameter] = _Part(values, f"gradient of {parameter.name}")
            self.flat.append(memory)


class Shard(Generic[_M]):
    """A part of each batch: its index, and a model and a loss that no other shard uses.

    The model shares its parameters with the models of the other shards, and has buffers of its own.
    """

    def __init__(self, index: int, step: nn.Step, parallel: DataParallel[_M]) -> None:
        self.index, self.loss, self.group = index, step.loss, parallel.group
        self.model: _M = step.model  # type: ignore[assignment]
        self.has_stepped = False
        self._step, self._parallel = step, parallel
        self._dtype = self.model.dtype
        self._programs = Programs(self._differentiated, _roots(step), num_threads=parallel.num_threads)

    def part(self, count: int) -> slice:
        """The samples of a batch of `count` that belong to this shard."""
        return self.group.part(count, self.index)

    def part_of_rank(self, count: int) -> slice:
        """The same samples, counted from the first one of this rank, for a rank that loads only its own."""
        part, first = self.part(count), self.group.rank_part(count).start
        return slice(part.start - first, part.stop - first)

    def share(self, count: int) -> float:
        """The fraction of the batch in this shard: the factor of its mean loss in the batch's mean."""
        part = self.part(count)
        return float(part.stop - part.start) / count

    def step(self, *arguments: Any, share: float = 1.0, **keywords: Any) -> Any:
        """Compute the gradients of ``share * loss`` on this shard's samples; return what :class:`nn.Step` returns.

        The loss that is returned is not multiplied by `share`. The parameters are updated when all shards are done.
        """
        if self.has_stepped:
            raise RuntimeError(f"Shard.step: shard {self.index} has taken its step of this run; call run for another")
        if self.group.shards == 1 and share != 1:
            raise ValueError(f"Shard.step: share is {share}, but the only shard has the whole batch, a share of 1")
        if not self.model.training:
            raise RuntimeError("Shard.step: the model is in evaluation mode; call model.train() first")
        if self.group.shards == 1:
            found = self._step(*arguments, **keywords)
        else:
            found = self._programs(np.array(share, self._dtype), *arguments, **keywords)
        self.has_stepped = True
        return found

    def _differentiated(self, share: Any, *arguments: Any, **keywords: Any) -> Any:
        loss, answer = self._step.answer(*arguments, **keywords)
        gradients = self._step.found_gradients(loss * graph.cast(share, loss.dtype))
        variables = self._parallel.gradients_of(self.index)
        for parameter, gradient in gradients.items():
            variables[parameter].assign(gradient)
        return answer


class DataParallel(Generic[_M]):
    """Trains a model like :class:`retrograd.nn.Step`, with each batch split over the shards of a group.

    ``step(x, target)`` takes a step on a batch that every rank has. For other batches ``run(work)`` calls
    ``work(shard)`` for every shard, on some rank, in a thread; it calls ``shard.step`` once, on the samples
    ``shard.part(count)``. Then the gradients of all shards are added, in an order that does not depend on the number of
    ranks, and the parameters are updated. Buffers of `model`, such as running statistics, are taken from the first
    shard; with :func:`synchronize` they are equal on all shards. If anything fails, nothing is changed. With a single
    shard, ``shard.step`` is a step of :class:`retrograd.nn.Step`, which updates the parameters itself.

    All ranks create it together, and refuse to if anything is not the same on all: number of shards, parameters and
    buffers (names, shapes, dtypes and values), layers and their options, the loss, the optimizer's state. Values are
    compared, not replaced by rank 0's: build the model from a seed, or load it on every rank. `run` compares the
    sizes of batches, and a piece of the parameters, another one each time, which shows optimizers with other settings.
    The error is a ValueError on the rank that differs from most, and a :class:`RankError` on the others. The arguments
    are described in :func:`retrograd.nn.compile`; model and loss are copied for each shard.
    """

    def __init__(
        self,
        model: _M,
        group: Group,
        loss: Callable[..., Any] | None,
        optimizer: nn.Optimizer | Sequence[nn.Optimizer],
        *,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.model, self.group, self.num_threads = model, group, num_threads
        self._step = nn.Step(model, loss, optimizer, metrics=metrics, num_threads=num_threads)
        if group.size > 1:
            group.agree("DataParallel", dict(_structure(model, loss, self._step.optimizers)))
            group.agree("DataParallel", dict(_contents(model)), _SAME_MODEL)
            group.agree("DataParallel", dict(_states(self._step.optimizers)), _SAME_OPTIMIZER)
        self._pieces = _pieces(model)
        self._shards: list[Shard[_M]] = []
        self._seen: tuple[int, Any] = (-1, None)
        # By what is trained: the gradients of each shard, and their sum.
        self._gradients: dict[tuple[bool, ...], tuple[list[_Gradients], _Gradients]] = {}
        self._update = Programs(self._updated, _roots(self._step), num_threads=num_threads)
        self._replicate()

    def _replicate(self) -> None:
        """Make the shards, again if a layer of the model has another attribute since."""
        if self._seen[0] == Changes.count:
            return
        state = [(id(module), module._changed) for root in _roots(self._step) for _, module in root.modules()]
        if self._seen[1] != state:
            if self.group.shards == 1:
                self._shards = [Shard(0, self._step, self)]
            else:
                self._shards = [Shard(index, self._replica(), self) for index in self.group.local]
        self._seen = Changes.count, state

    def _replica(self) -> nn.Step:
        """A step of a model with the same parameters, but other buffers."""
        step = self._step
        kept: dict[int, Any] = {id(p): p for root in _roots(step) for p in root.parameters().values()}
        model, *loss = copy.deepcopy(_roots(step), kept)
        return nn.Step(
            model, loss[0] if loss else step.loss, step.optimizers, metrics=step.metrics, num_threads=self.num_threads
        )

    def _trained(self) -> tuple[list[_Gradients], _Gradients]:
        """The gradients of the shards of this rank and their sums, for the parameters that are trained now."""
        parameters = [p for optimizer in self._step.optimizers for p in optimizer.parameters.values()]
        key = tuple(p.trainable for p in parameters)
        if key not in self._gradients:
            trained = [p for p in parameters if p.trainable]
            self._gradients[key] = [_Gradients(trained) for _ in self.group.local], _Gradients(trained)
        return self._gradients[key]

    def gradients_of(self, index: int) -> Mapping[nn.Parameter, Variable]:
        """The variables for the gradients of a shard of this rank."""
        return self._trained()[0][index - self.group.local.start].of

    def run(self, work: Callable[[Shard[_M]], _T]) -> list[_T]:
        """Call ``work(shard)`` for every shard, update the parameters, and return all results, in the order of shards.

        ``work`` calls ``shard.step`` once. A mean over the batch needs ``share=shard.share(count)``.
        """
        self._replicate()
        for shard in self._shards:
            shard.has_stepped = False
        if self.group.shards == 1:
            return self.group.run(lambda _: _worked(work, self._shards[0]))
        for shard in self._shards:
            self._prepare(shard)
        own, total = self._trained()

        first, piece = self.group.local.start, next(self._pieces, {}) if self.group.size > 1 else {}

        def run(index: int) -> tuple[_T, list[Array] | None, dict[str, str] | None]:
            shard = self._shards[index - first]
            result = _worked(work, shard)
            buffers = [buffer.value for buffer in shard.model.buffers().values()] if index == 0 else None
            return result, buffers, piece if index == first else None

        results = self.group.run(run)
        pieces = [each for _, _, each in results if each is not None]
        self.group.refuse_differences("DataParallel.run", pieces, _SAME_STEPS)
        for at, summed in enumerate(total.flat):
            self.group.sum([gradients.flat[at] for gradients in own], summed)
        for optimizer in self._step.optimizers:
            optimizer.set_rates()
        self._update()
        buffers = results[0][1]
        assert buffers is not None
        for buffer, value in zip(self.model.buffers().values(), buffers, strict=True):
            buffer[...] = value
        return [result for result, _, _ in results]

    def step(self, *arguments: Any, batch_axis: int = 0, **keywords: Any) -> Any:
        """Take a step on a batch that every rank has, and return its loss, or ``(loss, metrics)`` if there are metrics.

        Samples are on `batch_axis` of all arrays, or on axis 0 of arrays that have no such axis. The loss and the
        metrics are taken as means over the samples.
        """
        count = _samples(arguments, keywords, batch_axis)

        def work(shard: Shard[_M]) -> tuple[float, Any]:
            part, share = shard.part(count), shard.share(count)
            inputs = _cut((arguments, keywords), batch_axis, part)
            return share, shard.step(*inputs[0], share=share, **inputs[1])

        results = self.run(work)
        losses = [(share, found[0] if isinstance(found, tuple) else found) for share, found in results]
        loss = sum(share * value for share, value in losses)
        if not self._step.metrics:
            return loss
        return loss, {name: sum(share * found[1][name] for share, found in results) for name in self._step.metrics}

    def _updated(self) -> None:
        _, total = self._trained()
        gradients = {parameter: graph.identity(variable) for parameter, variable in total.of.items()}
        for optimizer in self._step.optimizers:
            optimizer.update(gradients)

    def _prepare(self, shard: Shard[_M]) -> None:
        """Give a shard the model's buffers and modes; each shard has its own dropout masks."""
        for (_, module), (_, replica) in zip(self.model.modules(), shard.model.modules(), strict=True):
            if replica.training != module.training:
                replica.training = module.training
        buffers = shard.model.buffers()
        for name, buffer in self.model.buffers().items():
            buffers[name][...] = buffer.value
            if shard.index and name.rpartition(".")[2] == "stream":
                seeds = np.random.SeedSequence([int(buffer.saved[0]), shard.index])
                buffers[name].saved[0] = seeds.generate_state(1, np.uint64)[0]


def _roots(step: nn.Step) -> list[nn.Module]:
    """The modules that a step depends on."""
    return [step.model, *([step.loss] if isinstance(step.loss, nn.Module) else [])]


def _worked(work: Callable[[Shard[_M]], _T], shard: Shard[_M]) -> _T:
    result = work(shard)
    if not shard.has_stepped:
        raise RuntimeError(f"DataParallel.run: the work of shard {shard.index} did not call shard.step")
    return result


# ---- batches ---------------------------------------------------------------------------------------------------------


def _arrays(value: Any) -> Iterator[Array]:
    """The arrays with axes of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif value is not None and np.ndim(value):
        yield np.asarray(value)


def _samples(arguments: Sequence[Any], keywords: Mapping[str, Any], batch_axis: int) -> int:
    """The number of samples that all arrays have."""
    count, first = 0, ""
    for name, value in (*((f"argument {at}", a) for at, a in enumerate(arguments)), *keywords.items()):
        for array in _arrays(value):
            here = array.shape[sample_axis(array, batch_axis)]
            if not first:
                count, first = here, name
            elif here != count:
                raise ValueError(
                    f"DataParallel.step: {name} has {here} samples, its shape is {array.shape}, but {first} has {count}"
                )
    if not first:
        raise TypeError("DataParallel.step: no argument is an array")
    return count


def _cut(value: Any, batch_axis: int, part: slice) -> Any:
    """The samples of a shard, of all arrays in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        return {key: _cut(item, batch_axis, part) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_cut(item, batch_axis, part) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if value is None or not np.ndim(value):
        return value
    array = np.asarray(value)
    index = (*(slice(None),) * sample_axis(array, batch_axis), part)
    return np.ascontiguousarray(array[index])


# ---- what must be the same on every rank -----------------------------------------------------------------------------


def _structure(model: nn.Module, loss: object, optimizers: Sequence[nn.Optimizer]) -> Iterator[tuple[str, str]]:
    kinds = {**dict.fromkeys(model.parameters(), "parameter"), **dict.fromkeys(model.buffers(), "buffer")}
    for name, array in model.state_arrays().items():
        yield f"{kinds[name]} {name}", f"is {array.dtype} of shape {array.shape}"
    for name, module in model.modules():
        yield from _options(f"layer {name}" if name else "the model", module)
    yield from _options("loss", loss)
    yield "the optimizer", f"is {', '.join(type(optimizer).__name__ for optimizer in optimizers)}"


def _options(title: str, thing: object) -> Iterator[tuple[str, str]]:
    """The class of a layer or a loss, and the options of retrograd's own."""
    yield title, f"is {type(thing).__name__}"
    if type(thing).__module__.split(".")[0] == __name__.split(".")[0]:
        for name, value in vars(thing).items():
            # Modes may change.
            if not name.startswith("_") and name != "training" and _is_plain(value):
                for option, given in value.items() if isinstance(value, dict) else [(name, value)]:
                    yield f"{option} of {title}", f"is {given!r}"


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, rg.Activation))


def _digests(what: str, arrays: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
    for name, array in arrays.items():
        yield f"the content of {what} {name}", f"has the digest {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _contents(model: nn.Module) -> Iterator[tuple[str, str]]:
    yield from _digests("parameter", {name: p.saved for name, p in model.parameters().items()})
    yield from _digests("buffer", {name: b.saved for name, b in model.buffers().items()})


def _states(optimizers: Sequence[nn.Optimizer]) -> Iterator[tuple[str, str]]:
    for number, optimizer in enumerate(optimizers):
        yield from _digests("the state of the optimizer," if not number else f"optimizer {number},", optimizer.arrays())


def _pieces(model: nn.Module) -> Iterator[dict[str, str]]:
    """Digests of one piece of the parameters after the other, for ever; of none if there are no parameters."""
    parameters = {name: p.value for name, p in model.parameters().items() if p.size}
    while parameters:
        for name, array in parameters.items():
            for start in range(0, array.size, _PIECE):
                digest = zlib.crc32(array.flat[start : start + _PIECE].tobytes())
                yield {f"the content of parameter {name}": f"has the digest {digest:08x}"}
