"""Apple's BNNS LSTM, forward and backward, over :mod:`retrograd.recurrent`.

What a parameter structure says is worked out once and kept with the structure until one of its fields changes; what
its buffers hold is read anew by every call.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..ops._arrays import overlaps
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
from ._failure import Invalid, Unsupported, note, note_extension, renaming, status
from ._filter import FLOAT32, accumulates, checked_parameters
from ._memory import (
    Arena,
    Array,
    as_float,
    as_size,
    bytes_of,
    check_disjoint,
    check_writable,
    dtype_of,
    extents_of,
    geometry,
    is_first_major,
    is_writable,
    keeps_still,
    listed,
    size_of,
    threads_of,
    view_of,
)
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSLayerParametersLSTM, BNNSNDArrayDescriptor

__all__ = [
    "BNNSComputeLSTMTrainingCacheCapacity",
    "BNNSDirectApplyLSTMBatchBackward",
    "BNNSDirectApplyLSTMBatchTrainingCaching",
    "seed_dropout",
]

_SCALARS: Final = ("input_size", "hidden_size", "batch_size", "num_layers", "seq_len")
_GATES: Final = ("input_gate", "forget_gate", "candidate_gate", "output_gate")  # the engine's i f g o
_KNOWN_FLAGS: Final = c.BNNSLayerFlagsLSTMBidirectional | c.BNNSLayerFlagsLSTMDefaultActivations
_MOST_BYTES: Final = 2**62  # of anything: beyond it byte counts would leave 64 bits

# After the engine's part of a training cache: a mark, the seed of its dropout, which optional arrays there were, and
# once more the first bytes of all, where the engine says what the rest is.
_TRAILER: Final = struct.Struct("<8sQQ32s")
_FIRST: Final = struct.Struct("32s")
_MARK: Final = b"RGBNNSL1"

_X: Final = "input_descriptor.data_desc"
_H0: Final = "input_descriptor.hidden_desc"
_C0: Final = "input_descriptor.cell_state_desc"
_Y: Final = "output_descriptor.data_desc"
_HN: Final = "output_descriptor.hidden_desc"
_CN: Final = "output_descriptor.cell_state_desc"
_LENGTHS: Final = "sequence_descriptor"
_GATE_FIELDS: Final = ("iw_desc[0]", "iw_desc[1]", "hw_desc", "b_desc", "cw_desc")
# Gradients by the names of their descriptors, as lstm_backward calls them.
_NEEDS: Final = {
    _X: "dx",
    _H0: "dh0",
    _C0: "dc0",
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
        "x": _X,
        "h0": _H0,
        "c0": _C0,
        "y": _Y,
        "hn": _HN,
        "cn": _CN,
        "dx": f"layer_delta_params.{_X}",
        "dh0": f"layer_delta_params.{_H0}",
        "dc0": f"layer_delta_params.{_C0}",
        "dy": f"layer_delta_params.{_Y}",
        "dhn": f"layer_delta_params.{_HN}",
        "dcn": f"layer_delta_params.{_CN}",
        "batch_sizes": f"{_LENGTHS}.data",
        "cache": "training_cache_ptr",
    }
)

_seeds: Final = random.Random()
_serials: Final = itertools.count()
_SYSTEM_MEMORY: Final = Arena(None, None)

Arrays: TypeAlias = Mapping[str, Array]


def seed_dropout(seed: int) -> None:
    """Start the sequence of dropout seeds anew, so that a run can be repeated. Not one of Apple's functions.

    Every forward call that drops takes the next seed of one sequence, which otherwise begins anywhere.
    """
    _seeds.seed(seed)


def _words(message: str) -> str:
    def gate(match: re.Match[str]) -> str:
        side = "layer_delta_params." if "dweights" in match[0] else ""
        return f"{side}{_GATES['ifgo'.index(match[2])]}.{_WEIGHTS.get(match[1], match[1])}"

    return _WEIGHT.sub(gate, _RENAMED(message))


# ---- the three functions --------------------------------------------------------------------------------------------


@status(c.SIZE_MAX)
def BNNSComputeLSTMTrainingCacheCapacity(layer_params: BNNSLayerParametersLSTM) -> int:
    """Bytes that the training cache of such a layer needs at least; SIZE_MAX if there can be no such layer.

    Depends on the sizes, ``dropout`` and ``lstm_flags`` alone.
    """
    sizes = _sizes(_checked("layer_params", layer_params))
    _dropout(layer_params, sizes)
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
    inputs = _inputs(layer_params)
    outputs = _outputs(layer_params, inputs)
    _check_still_writable(outputs.owners)
    cache, seed, dropout = None, 0, 0.0
    if training_cache_ptr is not None:
        cache = _cache_bytes(training_cache_ptr, training_cache_capacity, inputs.capacity)
        check_writable("training_cache_ptr", cache)
        _check_apart(cache, outputs.unseen)
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
            out=temporaries.targets(outputs.targets),
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
    inputs = _inputs(layer_params)
    gradients = _gradients(layer_delta_params, inputs)
    _check_still_writable(gradients.owners)
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


# ---- sizes ----------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    inputs: int
    units: int
    samples: int
    layers: int
    steps: int
    directions: int

    @property
    def width(self) -> int:
        """Of the output, and of the input of the upper layers."""
        return self.directions * self.units

    @property
    def first_layers(self) -> int:
        """How many layers ``iw_desc[0]`` holds; the others are in ``iw_desc[1]``."""
        return self.layers if self.inputs == self.width else 1

    def states(self) -> tuple[int, int, int]:
        return self.layers * self.directions, self.samples, self.units

    def outputs(self) -> tuple[int, int, int]:
        return self.steps, self.samples, self.width


def _sizes(params: BNNSLayerParametersLSTM) -> _Sizes:
    values: list[int] = []
    for name in _SCALARS:
        value = as_size(name, getattr(params, name))
        if value == 0:
            raise Invalid(f"{name} is 0, must be at least 1")
        values.append(value)
    flags = as_size("lstm_flags", params.lstm_flags)
    if flags & ~_KNOWN_FLAGS:
        note(f"lstm_flags has the unknown bits {flags & ~_KNOWN_FLAGS:#x}, which are ignored")
    inputs, units, samples, layers, steps = values
    directions = 2 if flags & c.BNNSLayerFlagsLSTMBidirectional else 1
    sizes = _Sizes(inputs, units, samples, layers, steps, directions)
    # Generous bounds of the largest things there will be: data and cache, and weights. 16: what rows are padded to.
    cells, rows = layers * directions, steps * samples + 64
    data = rows * (inputs + 16 + cells * 8 * (sizes.width + 16))
    weights = cells * 4 * (units + 16) * (max(inputs, sizes.width) + 2 * units + 32)
    if 8 * max(data, weights) >= _MOST_BYTES:
        shown = ", ".join(f"{name} {value}" for name, value in zip(_SCALARS, values, strict=True))
        raise Invalid(f"{shown}: the arrays of such a layer would not fit into 64 bits of memory")
    return sizes


def _dropout(params: BNNSLayerParametersLSTM, sizes: _Sizes) -> float:
    if sizes.layers == 1:
        return 0.0  # there is nothing between layers
    dropout = as_float("dropout", params.dropout)
    if not 0 <= dropout < 1:
        raise Invalid(f"dropout is {dropout}, must be at least 0 and below 1")
    return dropout


def _capacity(sizes: _Sizes) -> int:
    return _TRAILER.size + lstm_cache_size(
        sizes.steps,
        sizes.samples,
        sizes.inputs,
        sizes.units,
        num_layers=sizes.layers,
        bidirectional=sizes.directions == 2,
    )


# ---- descriptors as arrays ------------------------------------------------------------------------------------------


def _descriptors(params: BNNSLayerParametersLSTM) -> dict[str, BNNSNDArrayDescriptor]:
    """All that have data, by name."""
    found = {_LENGTHS: params.sequence_descriptor}
    for side in ("input_descriptor", "output_descriptor"):
        for field in ("data_desc", "hidden_desc", "cell_state_desc"):
            found[f"{side}.{field}"] = getattr(getattr(params, side), field)
    for gate in _GATES:
        fields = getattr(params, gate)
        descriptors = (*fields.iw_desc, fields.hw_desc, fields.b_desc, fields.cw_desc)
        found.update((f"{gate}.{field}", desc) for field, desc in zip(_GATE_FIELDS, descriptors, strict=True))
    return {name: desc for name, desc in found.items() if desc.data is not None}


def _arrays(
    descriptors: Mapping[str, BNNSNDArrayDescriptor], names: Iterable[str], sizes: _Sizes, results: bool
) -> dict[str, Array]:
    """Those of the named arrays that are there, in the form that the engine takes, or nearly (see _Inputs.state)."""
    found = {}
    for name in names:
        if name in descriptors:
            try:
                array = _array(name, descriptors[name], sizes, results)
            except (Invalid, Unsupported) as error:
                raise type(error)(f"{name}.{error}") from None
            if array is not None:
                found[name] = array
    return found


def _array(name: str, desc: BNNSNDArrayDescriptor, sizes: _Sizes, result: bool) -> Array | None:
    inputs, units, samples, layers, steps, directions = sizes
    first = sizes.first_layers
    if name == _LENGTHS:
        return _view(desc, {"seq_len": steps}, result, integers=True)
    if name in (_X, _Y):
        width = {"input_size": inputs} if name == _X else {"directions * hidden_size": sizes.width}
        if desc.layout == c.BNNSDataLayoutNSE:
            batch_first = _view(desc, {**width, "seq_len": steps, "batch_size": samples}, result)
            time_first: Array = batch_first.swapaxes(0, 1)
            return time_first
        if name == _Y and isinstance(desc.layout, int) and desc.layout >> 16 >= 4:
            four = {"hidden_size": units, "directions": directions, "batch_size": samples, "seq_len": steps}
            return _reshaped(_view(desc, four, result), sizes.outputs())
        three = {**width, "batch_size": samples, "seq_len": steps}
        return _view(desc, three, result, no_layout=c.BNNSDataLayoutSNE)
    if name in (_H0, _C0, _HN, _CN):
        state = {"hidden_size": units, "batch_size": samples, "directions": directions, "num_layers": layers}
        return _reshaped(_view(desc, state, result), sizes.states())
    field = name.partition(".")[2]
    if field == "iw_desc[0]":
        weights = {"input_size": inputs, "hidden_size": units, "directions": directions, "layers": first}
        return _view(desc, weights, result)
    if field == "iw_desc[1]":  # which counts only where there are layers left for it
        if layers == first:
            return None
        weights = {"directions * hidden_size": sizes.width, "hidden_size": units, "directions": directions}
        return _view(desc, {**weights, "num_layers - 1": layers - first}, result)
    tail = {"hidden_size": units, "directions": directions, "num_layers": layers}
    return _view(desc, tail if field == "b_desc" else {"hidden_size of the step before": units, **tail}, result)


def _view(
    desc: BNNSNDArrayDescriptor, implied: Mapping[str, int], result: bool, integers: bool = False, no_layout: int = 0
) -> Array:
    """The array of the extents that the scalar fields imply, which come fastest first; its own are slowest first."""
    dtype = dtype_of(desc.data_type)
    if dtype.kind not in "iu" if integers else dtype != FLOAT32:
        wanted = "an integer" if integers else "BNNSDataTypeFloat32"
        raise Unsupported(f"data_type is {constant_name('BNNSDataType', desc.data_type)}, must be {wanted}")
    layout = desc.layout or no_layout
    extents = extents_of(layout, desc._size)
    own = tuple(implied.values())
    full = own + (1,) * (len(extents) - len(own))
    shape = geometry(layout, dtype, full, desc._stride[: _matched(layout, extents, full, tuple(implied))])
    view = view_of(shape, desc.data)
    if result:
        check_writable("data", view)
        if shape.may_overlap:
            raise Invalid(f"stride is {shape.strides}, with which elements of {size_of(shape)} share memory")
    return view.reshape(own[::-1])  # which drops slow axes of extent 1


def _matched(layout: int, extents: tuple[int, ...], implied: tuple[int, ...], names: tuple[str, ...]) -> int:
    """Compare a descriptor's extents with the implied ones, fastest first; how many of its axes count.

    0 stands for the implied extent. The slowest one given may also be the product of all that are left.
    """
    last = max((k for k, extent in enumerate(extents) if extent), default=-1)
    for k, extent in enumerate(extents):
        if extent not in (0, implied[k]):
            if k == last and extent == math.prod(implied[k:]):
                return k + 1
            size, expected = listed(layout, extents), _expected(layout, len(extents), implied, names)
            raise Invalid(f"size is {size}, expected {expected}, or 0 for any of these")
    return len(extents)


def _expected(layout: int, rank: int, implied: tuple[int, ...], names: tuple[str, ...]) -> str:
    """The ``size`` that a descriptor of this rank should have; of a low rank the last extent is a product."""
    extents, words = [*implied[:rank]], [*names[:rank], *"1" * (rank - len(names))]
    if len(implied) > rank:
        extents[-1], words[-1] = math.prod(implied[rank - 1 :]), " * ".join(names[rank - 1 :])
    if is_first_major(layout):
        words.reverse()
    return f"size=({', '.join(words)})={listed(layout, tuple(extents))}"


def _reshaped(view: Array, shape: tuple[int, ...]) -> Array:
    """Over the same memory, or the view itself if its axes cannot be joined."""
    reshaped = view.reshape(shape)
    return reshaped if np.may_share_memory(reshaped, view) else view


def _cells(sizes: _Sizes, arrays: Arrays) -> list[LstmWeights]:
    """The gates' arrays, ``[layers, D, H, ...]`` each, as a cell for each direction of each layer."""

    def four(field: str, layer: int, direction: int) -> tuple[Array | None, ...] | None:
        gates = [arrays.get(f"{gate}.{field}") for gate in _GATES]
        if all(array is None for array in gates):
            return None
        return tuple(None if array is None else array[layer, direction] for array in gates)

    first = sizes.first_layers
    cells = []
    for layer in range(sizes.layers):
        inputs = ("iw_desc[0]", layer) if layer < first else ("iw_desc[1]", layer - first)
        for direction in range(sizes.directions):
            others = (four(field, layer, direction) for field in ("hw_desc", "b_desc", "cw_desc"))
            cells.append(LstmWeights(four(*inputs, direction), *others))
    return cells


# ---- overlaps -------------------------------------------------------------------------------------------------------


def _check_apart(cache: Array, arrays: Arrays) -> None:
    """The training cache must not share memory with these; with all that it sees itself the engine compares it."""
    for name, array in arrays.items():
        if overlaps(cache, array):
            raise Invalid(f"training_cache_ptr overlaps {name} in memory")


# ---- what a structure says ------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    """What forward and backward read of ``layer_params``."""

    serial: int  # no two are alike
    sizes: _Sizes
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

    def state(self, array: Array | None) -> Array | None:
        """As the engine takes it. Axes that could not be joined in place are copied."""
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.states())

    def sequence(self, array: Array | None) -> Array | None:
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.outputs())


class _Outputs(NamedTuple):
    """What forward writes."""

    owners: Arrays  # the arrays whose memory that is, where it is an array's
    targets: Sequence[_Target] | dict[str, Array]
    unseen: Arrays  # of these and of the inputs: those that the engine has copies of


class _Gradients(NamedTuple):
    """What backward reads and writes of ``layer_delta_params``."""

    serial: int  # of the _Inputs that these are gradients for
    owners: Arrays
    dy: Array | None
    dhn: Array | None
    dcn: Array | None
    need: tuple[str, ...] | None  # None: all that there is, which is lstm_backward's own choice
    accumulate: bool
    targets: Sequence[_Target] | dict[str, Array]
    out: LstmGradients | None  # None: every call has temporaries of its own
    unseen: Arrays  # results that the engine writes to temporaries


def _inputs(params: BNNSLayerParametersLSTM) -> _Inputs:
    known: Any = _checked("layer_params", params).memo()
    inputs: _Inputs | None = known.get("lstm inputs")
    if inputs is None:
        inputs = _read_inputs(params)
        if _keep_still(params):
            known["lstm inputs"] = inputs
    return inputs


def _outputs(params: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Outputs:
    known: Any = params.memo()
    outputs: _Outputs | None = known.get("lstm outputs")
    if outputs is None:
        outputs = _read_outputs(params, inputs)
        if _keep_still(params):
            known["lstm outputs"] = outputs
    return outputs


def _gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    known: Any = _checked("layer_delta_params", deltas).memo()
    gradients: _Gradients | None = known.get("lstm gradients")
    if gradients is None or gradients.serial != inputs.serial:
        try:
            gradients = _read_gradients(deltas, inputs)
        except (Invalid, Unsupported) as error:
            raise type(error)(f"layer_delta_params.{error}") from None
        if _keep_still(deltas):
            known["lstm gradients"] = gradients
    return gradients


def _keep_still(params: BNNSLayerParametersLSTM) -> bool:
    """Whether what was worked out of a structure's buffers holds for the next call too."""
    return all(keeps_still(descriptor.data) for descriptor in _descriptors(params).values())


def _read_inputs(params: BNNSLayerParametersLSTM) -> _Inputs:
    sizes = _sizes(params)
    dropout = _dropout(params, sizes)
    activations = _activations(params)
    gates = [f"{gate}.{field}" for gate in _GATES for field in _GATE_FIELDS]
    arrays = _arrays(_descriptors(params), (_X, _H0, _C0, _LENGTHS, *gates), sizes, results=False)
    fields = ("iw_desc[0]", "iw_desc[1]", "hw_desc") if sizes.layers > sizes.first_layers else ("iw_desc[0]", "hw_desc")
    for name in (_X, *(f"{gate}.{field}" for gate in _GATES for field in fields)):
        if name not in arrays:
            raise Invalid(f"{name}.data is NULL; it is needed")
    for what in _extensions(params, arrays):
        note_extension("BNNSLayerParametersLSTM", what)
    optional = (_H0, _C0, *(f"{gate}.{field}" for gate in _GATES for field in ("b_desc", "cw_desc")))
    cells = _cells(sizes, arrays)
    bare = None
    if _LENGTHS not in arrays and not dropout:
        bare = lstm_cache(arrays[_X], cells, bidirectional=sizes.directions == 2, activations=activations)
        if not bare.refers_to(arrays[_X], cells):
            bare = None
    return _Inputs(
        next(_serials),
        sizes,
        _capacity(sizes),
        sizes.directions == 2,
        activations,
        dropout,
        arrays.get(_LENGTHS),
        arrays[_X],
        arrays.get(_H0),
        arrays.get(_C0),
        cells,
        sum(1 << bit for bit, name in enumerate(optional) if name in arrays),
        arrays,
        bare,
    )


def _extensions(params: BNNSLayerParametersLSTM, arrays: Arrays) -> Iterator[str]:
    """What Apple's headers do not accept of a layer that is accepted here."""
    counts = params.sequence_descriptor.data_type
    if _LENGTHS in arrays and counts != c.BNNSDataTypeUInt32:
        yield f"{_LENGTHS}.data_type is {constant_name('BNNSDataType', counts)}"
    for name, descriptor in ((_X, params.input_descriptor.data_desc), (_Y, params.output_descriptor.data_desc)):
        if descriptor.data is not None and descriptor.layout not in _DATA_LAYOUTS:
            yield f"{name}.layout is {constant_name('BNNSDataLayout', descriptor.layout)}"


def _activations(params: BNNSLayerParametersLSTM) -> LstmActivations:
    if as_size("lstm_flags", params.lstm_flags) & c.BNNSLayerFlagsLSTMDefaultActivations:
        return LstmActivations()
    stored = {gate: getattr(params, gate).activation for gate in _GATES}
    functions = []
    for name, activation in {**stored, "hidden_activation": params.hidden_activation}.items():
        try:
            functions.append(elementwise(activation))
        except (Invalid, Unsupported) as error:
            raise type(error)(f"{name}: {error}") from None
    return LstmActivations(*functions)


def _read_outputs(params: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Outputs:
    sizes = inputs.sizes
    names = {_Y: "y", _HN: "hn", _CN: "cn"}
    descriptors = _descriptors(params)
    arrays = _arrays(descriptors, names, sizes, results=True)
    check_disjoint(arrays, inputs.arrays, {_HN: (_H0,), _CN: (_C0,)})
    shapes = {_Y: sizes.outputs(), _HN: sizes.states(), _CN: sizes.states()}
    targets = [_Target(names[name], array, shapes[name], array.ndim != 3) for name, array in arrays.items()]
    simplest = _simplest(targets)
    unseen = {} if isinstance(simplest, dict) else dict(arrays)
    for name in (_LENGTHS, _H0, _C0):
        if name in inputs.arrays and inputs.arrays[name].ndim != 3:
            unseen[name] = inputs.arrays[name]
    return _Outputs(_owners(arrays, descriptors), simplest, unseen)


def _read_gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    sizes = inputs.sizes
    for name, expected in zip(_SCALARS, sizes, strict=False):
        value = as_size(name, getattr(deltas, name))
        if value not in (0, expected):
            raise Invalid(f"{name} is {value}, must be 0 or {expected} as in layer_params")
    descriptors = _descriptors(deltas)
    incoming = _arrays(descriptors, (_Y, _HN, _CN), sizes, results=False)
    gates = [f"{gate}.{field}" for gate in _GATES for field in _GATE_FIELDS]
    arrays = _arrays(descriptors, (_X, _H0, _C0, *gates), sizes, results=True)
    for name in arrays:
        if name not in inputs.arrays and name not in (_H0, _C0):
            raise Invalid(f"{name} asks for the gradient of an array that layer_params does not have")
    values = {f"layer_params.{name}": array for name, array in inputs.arrays.items()}
    check_disjoint(arrays, {**values, **incoming})

    adds = {name: accumulates(name, descriptors[name]) for name in arrays}
    accumulate = any(adds.values())
    need = {_need(name) for name in arrays}
    targets = []
    for name, array in arrays.items():
        shape = sizes.states() if name in (_H0, _C0) else array.shape
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
        inputs.serial,
        _owners(arrays, descriptors),
        incoming.get(_Y),
        incoming.get(_HN),
        incoming.get(_CN),
        None if need >= {_need(name) for name in inputs.arrays if name != _LENGTHS} else tuple(need),
        accumulate,
        simplest,
        _out(sizes, simplest) if isinstance(simplest, dict) else None,
        {} if isinstance(simplest, dict) else arrays,
    )


def _owners(arrays: Arrays, descriptors: Mapping[str, BNNSNDArrayDescriptor]) -> Arrays:
    return {name: descriptors[name].data for name in arrays if isinstance(descriptors[name].data, np.ndarray)}


def _check_still_writable(owners: Arrays) -> None:
    """Alone of all that can be said of an array's memory, this may change while others refer to it."""
    if not all(map(is_writable, owners.values())):
        for name, array in owners.items():
            check_writable(name, array)


def _need(name: str) -> str:
    return _NEEDS[name if name in _NEEDS else name.partition(".")[2]]


def _out(sizes: _Sizes, targets: Arrays) -> LstmGradients:
    weights = any("." in name for name in targets)
    return LstmGradients(
        targets.get("dx"), _cells(sizes, targets) if weights else None, targets.get("dh0"), targets.get("dc0")
    )
