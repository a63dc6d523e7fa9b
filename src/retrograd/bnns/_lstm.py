"""Apple's BNNS LSTM, forward and backward, over :mod:`retrograd.ops.lstm`.

What a call derives from a parameter structure is a plan, kept until a field changes. The contents of its buffers are
read by every call.
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
from ._failure import Invalid, Unsupported, advise_once, note_extension, renaming, status
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
    check_disjoint,
    check_writable,
    sized_bytes,
    threads_of,
)
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSLayerParametersLSTM

# Follows the engine's part of a training cache: a magic number, the dropout seed, which optional arrays were present,
# and a copy of the engine's header, so that a cache overwritten by another call is detected.
_TRAILER: Final = struct.Struct("<8sQQ32s")
_HEADER: Final = struct.Struct("32s")
_MAGIC: Final = b"RGBNNSL1"

# From a descriptor's name to lstm_backward's name for its gradient.
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

# Layouts that Apple's headers allow for sequences: those of macOS 12, and the earlier generic ones.
_DATA_LAYOUTS: Final = (
    0,  # means SNE
    c.BNNSDataLayoutSNE,
    c.BNNSDataLayoutNSE,
    c.BNNSDataLayout3DLastMajor,
    c.BNNSDataLayout3DFirstMajor,
    c.BNNSDataLayout4DLastMajor,
    c.BNNSDataLayout4DFirstMajor,
)
# From the array functions' argument names to Apple's.
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
    """Seed dropout, so that a run can be repeated. Not one of Apple's functions.

    Every forward call with dropout draws its seed from one generator, which is seeded randomly by default.
    """
    _seeds.seed(seed)


def _rename(message: str) -> str:
    def gate(match: re.Match[str]) -> str:
        side = "layer_delta_params." if "dweights" in match[0] else ""
        return f"{side}{GATES['ifgo'.index(match[2])]}.{_WEIGHTS.get(match[1], match[1])}"

    return _WEIGHT.sub(gate, _RENAMED(message))


# ---- the three functions --------------------------------------------------------------------------------------------


@status(c.SIZE_MAX)
def BNNSComputeLSTMTrainingCacheCapacity(layer_params: BNNSLayerParametersLSTM) -> int:
    """Return the bytes that a layer's training cache needs; SIZE_MAX if the parameters are invalid.

    Depends only on the sizes, ``dropout`` and ``lstm_flags``. Sizes that are 0 are inferred from the descriptors.
    """
    sizes = sizes_of(_checked("layer_params", layer_params))
    dropout_of(layer_params, sizes)
    return _capacity(sizes)


@status(-1, rename=_rename)
def BNNSDirectApplyLSTMBatchTrainingCaching(
    layer_params: BNNSLayerParametersLSTM,
    filter_params: BNNSFilterParameters | None,
    training_cache_ptr: Any,
    training_cache_capacity: int,
) -> int:
    """Run the layer forward; 0 on success. Fills the training cache, if there is one, for backward.

    The cache is any writable buffer, at any alignment. Dropout is applied only with a cache.
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
        temporaries.free()
    if cache is not None:
        content = cache.data
        (header,) = _HEADER.unpack_from(content)
        _TRAILER.pack_into(content, cache.size - _TRAILER.size, _MAGIC, seed, inputs.present, header)
    return 0


@status(-1, rename=_rename)
def BNNSDirectApplyLSTMBatchBackward(
    layer_params: BNNSLayerParametersLSTM,
    layer_delta_params: BNNSLayerParametersLSTM,
    filter_params: BNNSFilterParameters | None,
    training_cache_ptr: Any,
    training_cache_capacity: int,
) -> int:
    """Compute the layer's gradients; 0 on success.

    The output descriptor of `layer_delta_params` holds the incoming gradients. Its other descriptors receive the
    results, except those whose ``data`` is None. Without a cache, forward is recomputed, without dropout.
    """
    threads, arena = _filter(filter_params)
    inputs = _inputs(_checked("layer_params", layer_params))
    gradients = _gradients(_checked("layer_delta_params", layer_delta_params), inputs)
    temporaries = _Temporaries(arena)
    try:
        if training_cache_ptr is None:
            buffer = temporaries.allocate((inputs.capacity,), np.dtype(np.uint8))
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
        temporaries.free()
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
    """The part of the buffer that is used."""
    return sized_bytes("training_cache_ptr", pointer, "training_cache_capacity", capacity, least)


def _filled(inputs: _Inputs, memory: Array) -> LstmCache:
    """The cache that a forward call with the same parameters has filled."""
    content = memory.data
    magic, seed, present, header = _TRAILER.unpack_from(content, memory.size - _TRAILER.size)
    if magic != _MAGIC or header != _HEADER.unpack_from(content)[0]:
        raise Invalid("training_cache_ptr does not hold the cache of a finished forward call")
    if present != inputs.present:
        raise Invalid("training_cache_ptr was filled by a layer with other biases, peepholes or initial states")
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
    assert cache is not None  # training is the default
    return cache


# ---- temporaries ----------------------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """Where a result goes, through a temporary if the engine cannot write there directly."""

    name: str
    view: Array | None  # None: the engine computes it, but the client did not ask for it
    shape: tuple[int, ...]  # the engine's
    temporary: bool = False
    initial: str = "unspecified"  # contents of the temporary before the call: "unspecified", "zero" or "view"


class _Temporaries:
    """Arrays that live for one call, from the client's allocator if there is one."""

    __slots__ = ("_arena", "_arrays", "_stores")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._arrays: list[Array] = []
        self._stores: list[tuple[Array, Array]] = []

    def free(self) -> None:
        for array in self._arrays:
            self._arena.free(array)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self._arena.allocate(shape, dtype)
        self._arrays.append(array)
        return array

    def targets(self, targets: Sequence[_Target] | dict[str, Array]) -> dict[str, Array]:
        """The arrays that the engine writes to, by name."""
        if isinstance(targets, dict):
            return targets
        found = {}
        for name, view, shape, temporary, initial in targets:
            if not temporary:
                assert view is not None
                found[name] = view
                continue
            array = self.allocate(shape if view is None else view.shape, FLOAT32)
            if initial == "zero":
                array.fill(0)
            if view is not None:
                if initial == "view":
                    array[...] = view
                self._stores.append((view, array))
            found[name] = array.reshape(shape)
        return found

    def store(self) -> None:
        for view, array in self._stores:
            view[...] = array


def _simplest(targets: list[_Target]) -> Sequence[_Target] | dict[str, Array]:
    """A dictionary if the engine can write to every array directly."""
    if any(target.temporary for target in targets):
        return targets
    return {target.name: target.view for target in targets if target.view is not None}


# ---- overlaps -------------------------------------------------------------------------------------------------------


def _check_apart(cache: Array, arrays: Arrays) -> None:
    """Raise if the training cache overlaps these arrays. The engine checks those that it is passed itself."""
    for name, array in arrays.items():
        if overlaps(cache, array):
            raise Invalid(f"training_cache_ptr overlaps {name} in memory")


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Inputs(Versioned):
    """What forward and backward read from ``layer_params``. Other plans are made from this one."""

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
    present: int  # one bit for each optional array that is present
    arrays: Arrays  # all of these, by name
    # A cache without its buffer, if everything else in it is the same in every call and none of its arrays is a copy.
    bare_cache: LstmCache | None
    _version: Version = dataclasses.field(default_factory=Version)

    def state(self, array: Array | None) -> Array | None:
        """The array in the engine's shape, copied if its axes cannot be joined in place."""
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.states())

    def sequence(self, array: Array | None) -> Array | None:
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.outputs())


class _Forward(NamedTuple):
    """What forward reads from and writes to ``layer_params``."""

    inputs: _Inputs
    targets: Sequence[_Target] | dict[str, Array]
    unseen: Arrays  # arrays that the engine is passed as copies, so it cannot check them for overlap


class _Gradients(NamedTuple):
    """What backward reads from and writes to ``layer_delta_params``."""

    dy: Array | None
    dhn: Array | None
    dcn: Array | None
    need: tuple[str, ...] | None  # None: all gradients, lstm_backward's default
    accumulate: bool
    targets: Sequence[_Target] | dict[str, Array]
    out: LstmGradients | None  # None: each call allocates temporaries
    unseen: Arrays  # results that the engine writes through temporaries


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
            raise Invalid(f"{name}.data is NULL; it is required")
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
    """Properties of the layer that retrograd accepts and Apple's headers do not."""
    counts_type = params.sequence_descriptor.data_type
    if LENGTHS in arrays and counts_type != c.BNNSDataTypeUInt32:
        yield f"{LENGTHS}.data_type is {constant_name('BNNSDataType', counts_type)}"
    for name, descriptor in ((X, params.input_descriptor.data_desc), (Y, params.output_descriptor.data_desc)):
        if descriptor.data is not None and descriptor.layout not in _DATA_LAYOUTS:
            yield f"{name}.layout is {constant_name('BNNSDataLayout', descriptor.layout)}"


def _activations(params: BNNSLayerParametersLSTM) -> LstmActivations:
    if as_size("lstm_flags", params.lstm_flags) & c.BNNSLayerFlagsLSTMDefaultActivations:
        return LstmActivations()
    stored = {f"{gate}.activation": getattr(params, gate).activation for gate in GATES}
    functions = {}
    for name, activation in {**stored, "hidden_activation": params.hidden_activation}.items():
        try:
            functions[name] = elementwise(activation)
        except (Invalid, Unsupported) as error:
            raise type(error)(f"{name.removesuffix('.activation')}: {error}") from None
    linear = [name for name, function in functions.items() if function.name == "identity"]
    if linear:
        advise_once(
            f"lstm_flags has no BNNSLayerFlagsLSTMDefaultActivations, and these are Identity: {', '.join(linear)}"
        )
    return LstmActivations(*functions.values())


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
        if accumulate and not adds[name]:  # the engine accumulates into all results or none
            target = target._replace(temporary=True, initial="zero")
        elif array.ndim != len(shape):
            target = target._replace(temporary=True, initial="view" if accumulate else "unspecified")
        targets.append(target)
    if accumulate:  # and into every gate of each name in `need`
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
