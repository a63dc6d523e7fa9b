"""Apple's BNNS LSTM, forward and backward, over :mod:`retrograd.recurrent`.

What a parameter structure says is a plan, which is kept until one of its fields changes; what its buffers hold is read
anew by every call.
"""

from __future__ import annotations

import dataclasses
import random
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops._arrays import overlaps
from ..ops._planned import Planned, Version, Versioned
from ..ops.lstm import (
    LstmActivations,
    LstmCache,
    LstmGradients,
    LstmWeights,
    lstm_backward,
    lstm_cache,
    lstm_cache_size,
    lstm_forward,
)
from . import _constants as c
from ._activation import elementwise
from ._failure import Invalid, Unsupported, note_extension, renaming, status
from ._filter import FLOAT32, accumulates, checked_parameters
from ._lstm_arrays import (
    C0,
    CN,
    GATE_FIELDS,
    GATES,
    H0,
    HN,
    LENGTHS,
    SCALARS,
    Arrays,
    Sizes,
    X,
    Y,
    arrays_of,
    cells_of,
    descriptors_of,
    dropout_of,
    sizes_of,
)
from ._memory import (
    Arena,
    Array,
    as_size,
    bytes_of,
    check_disjoint,
    check_writable,
    threads_of,
)
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSLayerParametersLSTM

__all__ = [
    "BNNSComputeLSTMTrainingCacheCapacity",
    "BNNSDirectApplyLSTMBatchBackward",
    "BNNSDirectApplyLSTMBatchTrainingCaching",
    "seed_dropout",
]

# After the engine's part of a training cache: a mark, the seed of its dropout, which optional arrays there were, and
# once more the first bytes of all, where the engine says what the rest is.
_TRAILER: Final = struct.Struct("<8sQQ32s")
_FIRST: Final = struct.Struct("32s")
_MARK: Final = b"RGBNNSL1"

# Gradients by the names of their descriptors, as lstm_backward calls them.
_NEEDS: Final = {
    X: "dx",
    H0: "dh0",
    C0: "dc0",
    "iw_desc[0]": "dwx",
    "iw_desc[1]": "dwx",
    "hw_desc": "dwh",
    "b_desc": "db",
    "cw_desc": "dpeephole",
}

# Layouts of sequences by Apple's headers: those of macOS 12, and the generic ones that were used before.
_DATA_LAYOUTS: Final = (
    0,  # which stands for SNE
    c.BNNSDataLayoutSNE,
    c.BNNSDataLayoutNSE,
    c.BNNSDataLayout3DLastMajor,
    c.BNNSDataLayout3DFirstMajor,
    c.BNNSDataLayout4DLastMajor,
    c.BNNSDataLayout4DFirstMajor,
)
# Apple's names for the arguments of the array functions.
_WEIGHTS: Final = {"wx": "iw_desc", "wh": "hw_desc", "b": "b_desc", "peephole": "cw_desc"}
_WEIGHT: Final = re.compile(r"\b(?:out\.)?d?weights(?:\[\d+\])?\.(\w+) of gate ([ifgo])\b")
_RENAMED: Final = renaming(
    {
        "x": X,
        "h0": H0,
        "c0": C0,
        "y": Y,
        "hn": HN,
        "cn": CN,
        "dx": f"layer_delta_params.{X}",
        "dh0": f"layer_delta_params.{H0}",
        "dc0": f"layer_delta_params.{C0}",
        "dy": f"layer_delta_params.{Y}",
        "dhn": f"layer_delta_params.{HN}",
        "dcn": f"layer_delta_params.{CN}",
        "batch_sizes": f"{LENGTHS}.data",
        "cache": "training_cache_ptr",
    }
)

_seeds: Final = random.Random()
_SYSTEM_MEMORY: Final = Arena(None, None)


def seed_dropout(seed: int) -> None:
    """Start the sequence of dropout seeds anew, so that a run can be repeated. Not one of Apple's functions.

    Every forward call that drops takes the next seed of one sequence, which otherwise begins anywhere.
    """
    _seeds.seed(seed)


def _words(message: str) -> str:
    def gate(match: re.Match[str]) -> str:
        side = "layer_delta_params." if "dweights" in match[0] else ""
        return f"{side}{GATES['ifgo'.index(match[2])]}.{_WEIGHTS.get(match[1], match[1])}"

    return _WEIGHT.sub(gate, _RENAMED(message))


# ---- the three functions --------------------------------------------------------------------------------------------


@status(c.SIZE_MAX)
def BNNSComputeLSTMTrainingCacheCapacity(layer_params: BNNSLayerParametersLSTM) -> int:
    """Bytes that the training cache of such a layer needs at least; SIZE_MAX if there can be no such layer.

    Depends on the sizes, ``dropout`` and ``lstm_flags`` alone.
    """
    sizes = sizes_of(_checked("layer_params", layer_params))
    dropout_of(layer_params, sizes)
    return _capacity(sizes)


@status(-1, words=_words)
def BNNSDirectApplyLSTMBatchTrainingCaching(
    layer_params: BNNSLayerParametersLSTM,
    filter_params: BNNSFilterParameters | None,
    training_cache_ptr: Any,
    training_cache_capacity: int,
) -> int:
    """Run the layer forward; 0 on success. What backward needs goes into the training cache, if there is one.

    The cache is any writable buffer, at any alignment. Dropout happens with a cache only.
    """
    threads, arena = _filter(filter_params)
    inputs, targets, unseen = _forward(_checked("layer_params", layer_params))
    cache, seed, dropout = None, 0, 0.0
    if training_cache_ptr is not None:
        cache = _cache_bytes(training_cache_ptr, training_cache_capacity, inputs.capacity)
        check_writable("training_cache_ptr", cache)
        _check_apart(cache, unseen)
        if inputs.dropout:
            seed, dropout = _seeds.getrandbits(64), inputs.dropout
    temporaries = _Temporaries(arena)
    try:
        lstm_forward(
            inputs.x,
            inputs.cells,
            inputs.state(inputs.h0),
            inputs.state(inputs.c0),
            bidirectional=inputs.bidirectional,
            batch_sizes=inputs.batch_sizes,
            activations=inputs.activations,
            dropout=dropout,
            seed=seed,
            training=cache is not None,
            cache=cache,
            out=temporaries.targets(targets),
            num_threads=threads,
        )
        temporaries.store()
    finally:
        temporaries.give_back()
    if cache is not None:
        content = cache.data
        (first,) = _FIRST.unpack_from(content)
        _TRAILER.pack_into(content, cache.size - _TRAILER.size, _MARK, seed, inputs.present, first)
    return 0


@status(-1, words=_words)
def BNNSDirectApplyLSTMBatchBackward(
    layer_params: BNNSLayerParametersLSTM,
    layer_delta_params: BNNSLayerParametersLSTM,
    filter_params: BNNSFilterParameters | None,
    training_cache_ptr: Any,
    training_cache_capacity: int,
) -> int:
    """Gradients of the layer; 0 on success.

    Incoming gradients are in the output descriptor of `layer_delta_params`, results go to its other descriptors; those
    whose ``data`` is None are not produced. Without a cache forward is run again, without dropout.
    """
    threads, arena = _filter(filter_params)
    inputs = _inputs(_checked("layer_params", layer_params))
    gradients = _gradients(_checked("layer_delta_params", layer_delta_params), inputs)
    temporaries = _Temporaries(arena)
    try:
        if training_cache_ptr is None:
            buffer = temporaries.take((inputs.capacity,), np.dtype(np.uint8))
            cache = _recomputed(inputs, buffer, threads)
        else:
            memory = _cache_bytes(training_cache_ptr, training_cache_capacity, inputs.capacity)
            _check_apart(memory, gradients.unseen)
            cache = _filled(inputs, memory)
        lstm_backward(
            inputs.sequence(gradients.dy),
            cache,
            dhn=inputs.state(gradients.dhn),
            dcn=inputs.state(gradients.dcn),
            need=gradients.need,
            out=gradients.out or _out(inputs.sizes, temporaries.targets(gradients.targets)),
            accumulate=gradients.accumulate,
            num_threads=threads,
        )
        temporaries.store()
    finally:
        temporaries.give_back()
    return 0


def _checked(name: str, params: object) -> BNNSLayerParametersLSTM:
    if not isinstance(params, BNNSLayerParametersLSTM):
        raise Invalid(f"{name} is of type {type(params).__name__}, must be a BNNSLayerParametersLSTM")
    return params


def _filter(params: BNNSFilterParameters | None) -> tuple[int | None, Arena]:
    if params is None:
        return None, _SYSTEM_MEMORY
    params = checked_parameters(params)
    return threads_of(params.n_threads), Arena(params.alloc_memory, params.free_memory)


def _capacity(sizes: Sizes) -> int:
    return _TRAILER.size + lstm_cache_size(
        sizes.steps,
        sizes.samples,
        sizes.inputs,
        sizes.units,
        num_layers=sizes.layers,
        bidirectional=sizes.directions == 2,
    )


# ---- the training cache ---------------------------------------------------------------------------------------------


def _cache_bytes(pointer: Any, capacity: Any, least: int) -> Array:
    """As much of the buffer as is needed. The capacity is the caller's word for its length."""
    capacity = as_size("training_cache_capacity", capacity)
    if capacity < least:
        raise Invalid(f"training_cache_capacity is {capacity}, but this layer needs {least}")
    memory = bytes_of("training_cache_ptr", pointer)
    if memory.size < capacity:
        raise Invalid(f"training_cache_capacity is {capacity}, but the buffer has {memory.size} bytes")
    return memory if memory.size == least else memory[:least]


def _filled(inputs: _Inputs, memory: Array) -> LstmCache:
    """What a forward call with the same parameters has left."""
    content = memory.data
    mark, seed, present, first = _TRAILER.unpack_from(content, memory.size - _TRAILER.size)
    if mark != _MARK or first != _FIRST.unpack_from(content)[0]:
        raise Invalid("training_cache_ptr holds nothing that a finished forward call has written")
    if present != inputs.present:
        raise Invalid("training_cache_ptr is of a layer with other biases, peepholes or initial states than this one")
    if inputs.bare_cache is not None:
        return inputs.bare_cache.with_buffer(memory)
    return lstm_cache(
        inputs.x,
        inputs.cells,
        bidirectional=inputs.bidirectional,
        batch_sizes=inputs.batch_sizes,
        activations=inputs.activations,
        dropout=inputs.dropout,
        seed=seed,
        buffer=memory,
    )


def _recomputed(inputs: _Inputs, buffer: Array, threads: int | None) -> LstmCache:
    cache = lstm_forward(
        inputs.x,
        inputs.cells,
        inputs.state(inputs.h0),
        inputs.state(inputs.c0),
        bidirectional=inputs.bidirectional,
        batch_sizes=inputs.batch_sizes,
        activations=inputs.activations,
        cache=buffer,
        num_threads=threads,
    ).cache
    assert cache is not None  # in training there is one
    return cache


# ---- temporaries ----------------------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """Where a result goes, by way of a temporary if the engine must not have the place itself."""

    name: str
    view: Array | None  # None: it is computed, but no one wants it
    shape: tuple[int, ...]  # as the engine has it
    temporary: bool = False
    start: str = "anything"  # what the temporary holds before: that, "zero", or what is in the "view"


class _Temporaries:
    """Arrays for the length of a call, from the client's allocator where there is one."""

    __slots__ = ("_arena", "_stores", "_taken")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._taken: list[Array] = []
        self._stores: list[tuple[Array, Array]] = []

    def give_back(self) -> None:
        for array in self._taken:
            self._arena.give_back(array)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self._arena.take(shape, dtype)
        self._taken.append(array)
        return array

    def targets(self, targets: Sequence[_Target] | dict[str, Array]) -> dict[str, Array]:
        """What the engine is to write to, by name."""
        if isinstance(targets, dict):
            return targets
        found = {}
        for name, view, shape, temporary, start in targets:
            if not temporary:
                assert view is not None
                found[name] = view
                continue
            array = self.take(shape if view is None else view.shape, FLOAT32)
            if start == "zero":
                array.fill(0)
            if view is not None:
                if start == "view":
                    array[...] = view
                self._stores.append((view, array))
            found[name] = array.reshape(shape)
        return found

    def store(self) -> None:
        for view, array in self._stores:
            view[...] = array


def _simplest(targets: list[_Target]) -> Sequence[_Target] | dict[str, Array]:
    """A dictionary if the engine can write to every place itself."""
    if any(target.temporary for target in targets):
        return targets
    return {target.name: target.view for target in targets if target.view is not None}


# ---- overlaps -------------------------------------------------------------------------------------------------------


def _check_apart(cache: Array, arrays: Arrays) -> None:
    """The training cache must not share memory with these; with all that it sees itself the engine compares it."""
    for name, array in arrays.items():
        if overlaps(cache, array):
            raise Invalid(f"training_cache_ptr overlaps {name} in memory")


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Inputs(Versioned):
    """What forward and backward read of ``layer_params``. Other plans are made from this one."""

    sizes: Sizes
    capacity: int  # of the training cache
    bidirectional: bool
    activations: LstmActivations
    dropout: float
    batch_sizes: Array | None
    x: Array
    h0: Array | None
    c0: Array | None
    cells: list[LstmWeights]
    present: int  # a bit for each optional array that is there
    arrays: Arrays  # all of these by name
    # Without its buffer; if all else that is in it is the same in every call, and nothing in it is a copy.
    bare_cache: LstmCache | None
    _version: Version = dataclasses.field(default_factory=Version)

    def state(self, array: Array | None) -> Array | None:
        """As the engine takes it. Axes that could not be joined in place are copied."""
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.states())

    def sequence(self, array: Array | None) -> Array | None:
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.outputs())


class _Forward(NamedTuple):
    """What forward reads and writes of ``layer_params``."""

    inputs: _Inputs
    targets: Sequence[_Target] | dict[str, Array]
    unseen: Arrays  # of the arrays those that the engine has copies of


class _Gradients(NamedTuple):
    """What backward reads and writes of ``layer_delta_params``."""

    dy: Array | None
    dhn: Array | None
    dcn: Array | None
    need: tuple[str, ...] | None  # None: all that there is, which is lstm_backward's own choice
    accumulate: bool
    targets: Sequence[_Target] | dict[str, Array]
    out: LstmGradients | None  # None: every call has temporaries of its own
    unseen: Arrays  # results that the engine writes to temporaries


@Planned
def _inputs(params: BNNSLayerParametersLSTM) -> _Inputs:
    sizes = sizes_of(params)
    dropout = dropout_of(params, sizes)
    activations = _activations(params)
    gates = [f"{gate}.{field}" for gate in GATES for field in GATE_FIELDS]
    arrays = arrays_of(descriptors_of(params), (X, H0, C0, LENGTHS, *gates), sizes, results=False)
    fields = ("iw_desc[0]", "iw_desc[1]", "hw_desc") if sizes.layers > sizes.first_layers else ("iw_desc[0]", "hw_desc")
    for name in (X, *(f"{gate}.{field}" for gate in GATES for field in fields)):
        if name not in arrays:
            raise Invalid(f"{name}.data is NULL; it is needed")
    for what in _extensions(params, arrays):
        note_extension("BNNSLayerParametersLSTM", what)
    optional = (H0, C0, *(f"{gate}.{field}" for gate in GATES for field in ("b_desc", "cw_desc")))
    cells = cells_of(sizes, arrays)
    bare = None
    if LENGTHS not in arrays and not dropout:
        bare = lstm_cache(arrays[X], cells, bidirectional=sizes.directions == 2, activations=activations)
        if not bare.refers_to(arrays[X], cells):
            bare = None
    return _Inputs(
        sizes,
        _capacity(sizes),
        sizes.directions == 2,
        activations,
        dropout,
        arrays.get(LENGTHS),
        arrays[X],
        arrays.get(H0),
        arrays.get(C0),
        cells,
        sum(1 << bit for bit, name in enumerate(optional) if name in arrays),
        arrays,
        bare,
    )


def _extensions(params: BNNSLayerParametersLSTM, arrays: Arrays) -> Iterator[str]:
    """What Apple's headers do not accept of a layer that is accepted here."""
    counts = params.sequence_descriptor.data_type
    if LENGTHS in arrays and counts != c.BNNSDataTypeUInt32:
        yield f"{LENGTHS}.data_type is {constant_name('BNNSDataType', counts)}"
    for name, descriptor in ((X, params.input_descriptor.data_desc), (Y, params.output_descriptor.data_desc)):
        if descriptor.data is not None and descriptor.layout not in _DATA_LAYOUTS:
            yield f"{name}.layout is {constant_name('BNNSDataLayout', descriptor.layout)}"


def _activations(params: BNNSLayerParametersLSTM) -> LstmActivations:
    if as_size("lstm_flags", params.lstm_flags) & c.BNNSLayerFlagsLSTMDefaultActivations:
        return LstmActivations()
    stored = {gate: getattr(params, gate).activation for gate in GATES}
    functions = []
    for name, activation in {**stored, "hidden_activation": params.hidden_activation}.items():
        try:
            functions.append(elementwise(activation))
        except (Invalid, Unsupported) as error:
            raise type(error)(f"{name}: {error}") from None
    return LstmActivations(*functions)


@Planned
def _forward(params: BNNSLayerParametersLSTM) -> _Forward:
    inputs = _inputs(params)
    sizes = inputs.sizes
    names = {Y: "y", HN: "hn", CN: "cn"}
    arrays = arrays_of(descriptors_of(params), names, sizes, results=True)
    check_disjoint(arrays, inputs.arrays, {HN: (H0,), CN: (C0,)})
    shapes = {Y: sizes.outputs(), HN: sizes.states(), CN: sizes.states()}
    targets = [_Target(names[name], array, shapes[name], array.ndim != 3) for name, array in arrays.items()]
    simplest = _simplest(targets)
    unseen = {} if isinstance(simplest, dict) else dict(arrays)
    for name in (LENGTHS, H0, C0):
        if name in inputs.arrays and inputs.arrays[name].ndim != 3:
            unseen[name] = inputs.arrays[name]
    return _Forward(inputs, simplest, unseen)


@Planned
def _gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    try:
        return _read_gradients(deltas, inputs)
    except (Invalid, Unsupported) as error:
        raise type(error)(f"layer_delta_params.{error}") from None


def _read_gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    sizes = inputs.sizes
    for name, expected in zip(SCALARS, sizes, strict=False):
        value = as_size(name, getattr(deltas, name))
        if value not in (0, expected):
            raise Invalid(f"{name} is {value}, must be 0 or {expected} as in layer_params")
    descriptors = descriptors_of(deltas)
    incoming = arrays_of(descriptors, (Y, HN, CN), sizes, results=False)
    gates = [f"{gate}.{field}" for gate in GATES for field in GATE_FIELDS]
    arrays = arrays_of(descriptors, (X, H0, C0, *gates), sizes, results=True)
    for name in arrays:
        if name not in inputs.arrays and name not in (H0, C0):
            raise Invalid(f"{name} asks for the gradient of an array that layer_params does not have")
    values = {f"layer_params.{name}": array for name, array in inputs.arrays.items()}
    check_disjoint(arrays, {**values, **incoming})

    adds = {name: accumulates(name, descriptors[name]) for name in arrays}
    accumulate = any(adds.values())
    need = {_need(name) for name in arrays}
    targets = []
    for name, array in arrays.items():
        shape = sizes.states() if name in (H0, C0) else array.shape
        target = _Target(_NEEDS.get(name, name), array, shape)
        if accumulate and not adds[name]:  # the engine adds to all or to none
            target = target._replace(temporary=True, start="zero")
        elif array.ndim != len(shape):
            target = target._replace(temporary=True, start="view" if accumulate else "anything")
        targets.append(target)
    if accumulate:  # and it adds to everything that has a name in `need`
        unwanted = [name for name in gates if name in inputs.arrays and name not in arrays and _need(name) in need]
        targets += [_Target(name, None, inputs.arrays[name].shape, True, "zero") for name in unwanted]
    simplest = _simplest(targets)
    return _Gradients(
        incoming.get(Y),
        incoming.get(HN),
        incoming.get(CN),
        None if need >= {_need(name) for name in inputs.arrays if name != LENGTHS} else tuple(need),
        accumulate,
        simplest,
        _out(sizes, simplest) if isinstance(simplest, dict) else None,
        {} if isinstance(simplest, dict) else arrays,
    )


def _need(name: str) -> str:
    return _NEEDS[name if name in _NEEDS else name.partition(".")[2]]


def _out(sizes: Sizes, targets: Arrays) -> LstmGradients:
    weights = any("." in name for name in targets)
    return LstmGradients(
        targets.get("dx"), cells_of(sizes, targets) if weights else None, targets.get("dh0"), targets.get("dc0")
    )
