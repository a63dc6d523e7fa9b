"""Apple's BNNS LSTM, forward and backward, over :mod:`retrograd.ops.recurrent`.

What a call derives from a parameter structure is a plan, kept until a field changes. The contents of its buffers are
read by every call.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from ..ops._arrays import overlaps
from ..ops._planned import Planned, Version, Versioned
from ..ops._types import BYTE
from ..ops.recurrent import LstmActivations, LstmGradients, LstmWeights, lstm_backward, lstm_cache_size
from ..ops.recurrent.cache import new_cache, stamp_of
from ..ops.recurrent.forward import forward_bound
from ..ops.recurrent.problem import Inputs, Sequences, bind
from ..ops.recurrent.types import CellOptions
from . import _constants as c
from . import _lstm_arrays as layer
from ._activation import elementwise
from ._direct import Parameters
from ._failure import Invalid, advise_once, note_extension, prefixing, renaming, status
from ._filter import FLOAT32, accumulates, checked_parameters
from ._lstm_arrays import C0, CN, GATE_FIELDS, GATES, H0, HN, LENGTHS, SCALARS, Arrays, Sizes, X, Y
from ._memory import Arena, Array, as_size, check_disjoint, check_writable, sized_bytes, threads_of
from ._names import layout_name, type_name
from ._structures import BNNSLayerParametersLSTM

# From a descriptor's name to lstm_backward's name for its gradient.
_NEEDS: Final = {X: "dx", H0: "dh0", C0: "dc0"} | dict(
    zip(GATE_FIELDS, ("dwx", "dwx", "dwh", "db", "dpeephole"), strict=True)
)

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


def _same_for_all(name: str, _: int) -> str:
    """Apple's name for a parameter of every cell."""
    return name


# From the array functions' argument names to Apple's.
_SEQUENCES: Final = {"x": X, "h0": H0, "c0": C0, "y": Y, "hn": HN, "cn": CN}
_WEIGHTS: Final = {"wx": "iw_desc", "wh": "hw_desc", "b": "b_desc", "peephole": "cw_desc"}
_RENAME: Final = renaming(
    {
        **_SEQUENCES,
        **{f"d{name}": f"layer_delta_params.{apples}" for name, apples in _SEQUENCES.items()},
        "batch_sizes": f"{LENGTHS}.data",
        "cache": "training_cache_ptr",
        # One descriptor holds a gate's parameters of all cells.
        **{
            f"{array}.{field} of gate {gate}": partial(_same_for_all, f"{side}{apples_gate}.{apples_field}")
            for array, side in (("weights", ""), ("dweights", "layer_delta_params."))
            for field, apples_field in _WEIGHTS.items()
            for gate, apples_gate in zip("ifgo", GATES, strict=True)
        },
    }
)

_seeds: Final = random.Random()
_SYSTEM_MEMORY: Final = Arena(None, None)


def seed_dropout(seed: int) -> None:
    """Seed dropout, so that a run can be repeated. Not one of Apple's functions.

    Every forward call with dropout draws its seed from one generator, which is seeded randomly by default.
    """
    _seeds.seed(seed)


# ---- the three functions --------------------------------------------------------------------------------------------


@status(c.SIZE_MAX)
def BNNSComputeLSTMTrainingCacheCapacity(layer_params: BNNSLayerParametersLSTM) -> int:
    """Return the bytes that a layer's training cache needs; SIZE_MAX if the parameters are invalid.

    Depends only on the sizes, ``dropout`` and ``lstm_flags``. Sizes that are 0 are inferred from the descriptors.
    """
    sizes = layer.sizes_of(_checked("layer_params", layer_params))
    layer.dropout_of(layer_params, sizes)
    return _capacity(sizes)


@status(-1, rename=_RENAME)
def BNNSDirectApplyLSTMBatchTrainingCaching(
    layer_params: BNNSLayerParametersLSTM,
    filter_params: Parameters,
    training_cache_ptr: object,
    training_cache_capacity: int,
) -> int:
    """Run the layer forward; 0 on success. Fills the training cache, if there is one, for backward.

    The cache is any writable buffer, at any alignment. Dropout is applied only with a cache.
    """
    threads, arena = _filter(filter_params)
    inputs, results, unseen = _forward(_checked("layer_params", layer_params))
    cache, seed = None, 0
    if training_cache_ptr is not None:
        cache = _cache(inputs, training_cache_ptr, training_cache_capacity, unseen)
        check_writable("training_cache_ptr", cache)
        if inputs.dropout:
            seed = _seeds.getrandbits(64)
    try:
        bound = inputs.bound(seed, cache is not None)
        arrays = results.allocated(arena)
        forward_bound(bound, cache is not None, False, cache, arrays, threads, seed ^ inputs.present)
        results.store(arrays)
    finally:
        arena.free_all()
    return 0


@status(-1, rename=_RENAME)
def BNNSDirectApplyLSTMBatchBackward(
    layer_params: BNNSLayerParametersLSTM,
    layer_delta_params: BNNSLayerParametersLSTM,
    filter_params: Parameters,
    training_cache_ptr: object,
    training_cache_capacity: int,
) -> int:
    """Compute the layer's gradients; 0 on success.

    The output descriptor of `layer_delta_params` holds the incoming gradients. Its other descriptors receive the
    results, except those whose ``data`` is None. Without a cache, forward is recomputed, without dropout.
    """
    threads, arena = _filter(filter_params)
    inputs = _inputs(_checked("layer_params", layer_params))
    gradients = _gradients(_checked("layer_delta_params", layer_delta_params), inputs)
    try:
        if training_cache_ptr is None:
            cache = arena.allocate((inputs.capacity,), BYTE)
            bound = inputs.bound(0, False)
            forward_bound(bound, True, False, cache, None, threads, 0)
        else:
            cache = _cache(inputs, training_cache_ptr, training_cache_capacity, gradients.unseen)
            bound = inputs.bound(stamp_of(cache) ^ inputs.present, True)
        arrays = gradients.results.allocated(arena)
        lstm_backward(
            inputs.sequence(gradients.dy),
            new_cache((bound, cache, None)),
            dhn=inputs.state(gradients.dhn),
            dcn=inputs.state(gradients.dcn),
            need=gradients.need,
            out=gradients.out or _out(inputs.sizes, arrays),
            accumulate=gradients.accumulate,
            num_threads=threads,
        )
        gradients.results.store(arrays)
    finally:
        arena.free_all()
    return 0


def _checked(name: str, params: object) -> BNNSLayerParametersLSTM:
    if not isinstance(params, BNNSLayerParametersLSTM):
        raise Invalid(f"{name} is of type {type(params).__name__}, must be a BNNSLayerParametersLSTM")
    return params


def _filter(params: Parameters) -> tuple[int | None, Arena]:
    if params is None:
        return None, _SYSTEM_MEMORY
    params = checked_parameters(params)
    return threads_of(params.n_threads), Arena(params.alloc_memory, params.free_memory)


def _capacity(sizes: Sizes) -> int:
    inputs, units, samples, layers, steps, directions, _ = sizes
    return lstm_cache_size(steps, samples, inputs, units, num_layers=layers, bidirectional=directions == 2)


def _cache(inputs: _Inputs, pointer: object, capacity: object, unseen: Arrays) -> Array:
    """The part of the training cache that is used, which is the cache of the array functions.

    Raises if it overlaps arrays that the engine does not see; the engine checks those that it is passed.
    """
    cache = sized_bytes("training_cache_ptr", pointer, "training_cache_capacity", capacity, inputs.capacity)
    for name, array in unseen.items():
        if overlaps(cache, array):
            raise Invalid(f"training_cache_ptr overlaps {name} in memory")
    return cache


# ---- results --------------------------------------------------------------------------------------------------------


class _Temporary(NamedTuple):
    """A result that the engine cannot write in place."""

    name: str
    view: Array | None  # where it goes; None: the engine computes it, but the client did not ask for it
    shape: tuple[int, ...]  # the engine's
    initial: Array | float | None = None  # contents before the call


class _Results(NamedTuple):
    """Where the results of a call go, by the engine's names."""

    direct: dict[str, Array]
    temporaries: list[_Temporary]

    def allocated(self, arena: Arena) -> dict[str, Array]:
        """The arrays that the engine writes to."""
        if not self.temporaries:
            return self.direct
        arrays = dict(self.direct)
        for name, view, shape, initial in self.temporaries:
            array = arena.allocate(shape if view is None else view.shape, FLOAT32)
            if initial is not None:
                array[...] = initial
            arrays[name] = array.reshape(shape)
        return arrays

    def store(self, arrays: Arrays) -> None:
        for name, view, _, _ in self.temporaries:
            if view is not None:
                view[...] = arrays[name].reshape(view.shape)


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Inputs(Versioned):
    """What forward and backward read from ``layer_params``. Other plans are made from this one."""

    sizes: Sizes
    capacity: int  # of the training cache
    activations: LstmActivations
    dropout: float
    arrays: Arrays  # by name
    cells: list[LstmWeights]
    # One bit for each optional array that is present. A pass is stamped with it and the seed of its dropout, so that
    # the cache of a layer with other arrays seems to have another seed, and is refused.
    present: int
    kept: Inputs | None  # the inputs of every pass without dropout; None: a call reads counts, or copies a state
    _version: Version = dataclasses.field(default_factory=Version)

    def bound(self, seed: int, trains: bool) -> Inputs:
        """The inputs of a pass. There is dropout if it trains."""
        if self.kept is not None and seed == 0:
            return self.kept
        read = self.arrays.get
        h0, c0, counts = self.state(read(H0)), self.state(read(C0)), read(LENGTHS)
        sequences = Sequences(None, self.sizes.directions == 2, False, None, counts, self.dropout, seed)
        return bind(self.arrays[X], self.cells, h0, c0, CellOptions("lstm", self.activations), sequences, trains)

    def state(self, array: Array | None) -> Array | None:
        """The array in the engine's shape, copied if its axes cannot be joined in place."""
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.states())

    def sequence(self, array: Array | None) -> Array | None:
        return array if array is None or array.ndim == 3 else array.reshape(self.sizes.outputs())


class _Forward(NamedTuple):
    """What forward reads from and writes to ``layer_params``."""

    inputs: _Inputs
    results: _Results
    unseen: Arrays  # arrays that the engine is passed as copies, so it cannot check them for overlap


class _Gradients(NamedTuple):
    """What backward reads from and writes to ``layer_delta_params``."""

    dy: Array | None
    dhn: Array | None
    dcn: Array | None
    need: tuple[str, ...] | None  # None: all gradients, lstm_backward's default
    accumulate: bool
    results: _Results
    out: LstmGradients | None  # None: each call allocates temporaries
    unseen: Arrays  # results that the engine writes through temporaries


@Planned
def _inputs(params: BNNSLayerParametersLSTM) -> _Inputs:
    sizes = layer.sizes_of(params)
    dropout = layer.dropout_of(params, sizes)
    activations = _activations(params)
    gates = [f"{gate}.{field}" for gate in GATES for field in GATE_FIELDS]
    arrays = layer.arrays_of(layer.descriptors_of(params), (X, H0, C0, LENGTHS, *gates), sizes, results=False)
    fields = ("iw_desc[0]", "iw_desc[1]", "hw_desc") if sizes.layers > sizes.first_layers else ("iw_desc[0]", "hw_desc")
    for name in (X, *(f"{gate}.{field}" for gate in GATES for field in fields)):
        if name not in arrays:
            raise Invalid(f"{name}.data is NULL; it is required")
    for what in _extensions(params, arrays):
        note_extension("BNNSLayerParametersLSTM", what)
    optional = (H0, C0, *(f"{gate}.{field}" for gate in GATES for field in ("b_desc", "cw_desc")))
    present = sum(1 << bit for bit, name in enumerate(optional) if name in arrays)
    made = _Inputs(sizes, _capacity(sizes), activations, dropout, arrays, layer.cells_of(sizes, arrays), present, None)
    changing = LENGTHS in arrays or dropout or any(name in arrays and arrays[name].ndim != 3 for name in (H0, C0))
    return made if changing else dataclasses.replace(made, kept=made.bound(0, True))


def _extensions(params: BNNSLayerParametersLSTM, arrays: Arrays) -> Iterator[str]:
    """Properties of the layer that retrograd accepts and Apple's headers do not."""
    counts_type = params.sequence_descriptor.data_type
    if LENGTHS in arrays and counts_type != c.BNNSDataTypeUInt32:
        yield f"{LENGTHS}.data_type is {type_name(counts_type)}"
    for name, descriptor in ((X, params.input_descriptor.data_desc), (Y, params.output_descriptor.data_desc)):
        if descriptor.data is not None and descriptor.layout not in _DATA_LAYOUTS:
            yield f"{name}.layout is {layout_name(descriptor.layout)}"


def _activations(params: BNNSLayerParametersLSTM) -> LstmActivations:
    if as_size("lstm_flags", params.lstm_flags) & c.BNNSLayerFlagsLSTMDefaultActivations:
        return LstmActivations()
    stored = {f"{gate}.activation": getattr(params, gate).activation for gate in GATES}
    functions = {}
    for name, activation in {**stored, "hidden_activation": params.hidden_activation}.items():
        with prefixing(f"{name.removesuffix('.activation')}: "):
            functions[name] = elementwise(activation)
    linear = [name for name, function in functions.items() if function.name == "identity"]
    if linear:
        advise_once(
            f"lstm_flags has no BNNSLayerFlagsLSTMDefaultActivations, and these are Identity: {', '.join(linear)}"
        )
    return LstmActivations(*functions.values())


@Planned
def _forward(params: BNNSLayerParametersLSTM) -> _Forward:
    inputs = _inputs(params)
    states = inputs.sizes.states()
    names = {Y: ("y", inputs.sizes.outputs()), HN: ("hn", states), CN: ("cn", states)}
    arrays = layer.arrays_of(layer.descriptors_of(params), names, inputs.sizes, results=True)
    check_disjoint(arrays, inputs.arrays, {HN: (H0,), CN: (C0,)})
    results = _Results({}, [])
    for name, array in arrays.items():
        short, shape = names[name]
        if array.ndim == 3:
            results.direct[short] = array
        else:
            results.temporaries.append(_Temporary(short, array, shape))
    unseen = dict(arrays) if results.temporaries else {}
    for name in (LENGTHS, H0, C0):
        if name in inputs.arrays and inputs.arrays[name].ndim != 3:
            unseen[name] = inputs.arrays[name]
    return _Forward(inputs, results, unseen)


@Planned
def _gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    with prefixing("layer_delta_params."):
        return _read_gradients(deltas, inputs)


def _read_gradients(deltas: BNNSLayerParametersLSTM, inputs: _Inputs) -> _Gradients:
    sizes = inputs.sizes
    for name, expected in zip(SCALARS, sizes, strict=False):
        value = as_size(name, getattr(deltas, name))
        if value not in (0, expected):
            raise Invalid(f"{name} is {value}, must be 0 or {expected} as in layer_params")
    descriptors = layer.descriptors_of(deltas)
    incoming = layer.arrays_of(descriptors, (Y, HN, CN), sizes, results=False)
    gates = [f"{gate}.{field}" for gate in GATES for field in GATE_FIELDS]
    arrays = layer.arrays_of(descriptors, (X, H0, C0, *gates), sizes, results=True)
    for name in arrays:
        if name not in inputs.arrays and name not in (H0, C0):
            raise Invalid(f"{name} asks for the gradient of an array that layer_params does not have")
    values = {f"layer_params.{name}": array for name, array in inputs.arrays.items()}
    check_disjoint(arrays, {**values, **incoming})

    adds = {name: accumulates(name, descriptors[name]) for name in arrays}
    accumulate = any(adds.values())
    need = {_need(name) for name in arrays}
    results = _Results({}, [])
    for name, array in arrays.items():
        key, shape = _NEEDS.get(name, name), sizes.states() if name in (H0, C0) else array.shape
        if accumulate and not adds[name]:  # the engine accumulates into all results or none
            results.temporaries.append(_Temporary(key, array, shape, 0.0))
        elif array.ndim != len(shape):
            results.temporaries.append(_Temporary(key, array, shape, array if accumulate else None))
        else:
            results.direct[key] = array
    if accumulate:  # and into every gate of each name in `need`
        unwanted = [name for name in gates if name in inputs.arrays and name not in arrays and _need(name) in need]
        results.temporaries.extend(_Temporary(name, None, inputs.arrays[name].shape, 0.0) for name in unwanted)
    return _Gradients(
        incoming.get(Y),
        incoming.get(HN),
        incoming.get(CN),
        None if need >= {_need(name) for name in inputs.arrays if name != LENGTHS} else tuple(need),
        accumulate,
        results,
        None if results.temporaries else _out(sizes, results.direct),
        arrays if results.temporaries else {},
    )


def _need(name: str) -> str:
    return _NEEDS[name if name in _NEEDS else name.partition(".")[2]]


def _out(sizes: Sizes, targets: Arrays) -> LstmGradients:
    weights = any("." in name for name in targets)
    return LstmGradients(
        targets.get("dx"), layer.cells_of(sizes, targets) if weights else None, targets.get("dh0"), targets.get("dc0")
    )
