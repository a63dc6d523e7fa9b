"""Reads an LSTM's parameter structure: its sizes, and its arrays in the engine's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..ops.recurrent import LstmWeights
from . import _constants as c
from . import _memory
from ._failure import Invalid, Unsupported, advise_once, note, prefixing
from ._filter import FLOAT32
from ._memory import Array, as_float, as_size, extents_of, listed
from ._names import type_name
from ._structures import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor

SCALARS: Final = ("input_size", "hidden_size", "batch_size", "num_layers", "seq_len")
GATES: Final = ("input_gate", "forget_gate", "candidate_gate", "output_gate")  # the engine's i f g o
_KNOWN_FLAGS: Final = c.BNNSLayerFlagsLSTMBidirectional | c.BNNSLayerFlagsLSTMDefaultActivations
_MOST_BYTES: Final = 2**62  # larger byte counts would overflow 64 bits

X: Final = "input_descriptor.data_desc"
H0: Final = "input_descriptor.hidden_desc"
C0: Final = "input_descriptor.cell_state_desc"
Y: Final = "output_descriptor.data_desc"
HN: Final = "output_descriptor.hidden_desc"
CN: Final = "output_descriptor.cell_state_desc"
LENGTHS: Final = "sequence_descriptor"
GATE_FIELDS: Final = ("iw_desc[0]", "iw_desc[1]", "hw_desc", "b_desc", "cw_desc")
STATES: Final = (H0, C0, HN, CN)
Arrays: TypeAlias = Mapping[str, Array]

# The axes of each array, fastest first, in terms of the scalar fields. Other names than theirs are for messages.
_STATE: Final = ("hidden_size", "batch_size", "directions", "num_layers")
_RECURRENT: Final = ("hidden_size of the previous step", "hidden_size", "directions", "num_layers")
_AXES: Final = {
    LENGTHS: ("seq_len",),
    X: ("input_size", "batch_size", "seq_len"),
    Y: ("directions * hidden_size", "batch_size", "seq_len"),
    **dict.fromkeys(STATES, _STATE),
    "iw_desc[0]": ("input_size", "hidden_size", "directions", "layers"),
    "iw_desc[1]": ("directions * hidden_size", "hidden_size", "directions", "num_layers - 1"),
    "hw_desc": _RECURRENT,
    "b_desc": ("hidden_size", "directions", "num_layers"),
    "cw_desc": _RECURRENT,
}


def _axes_of(name: str, layout: int) -> tuple[str, ...]:
    axes = _AXES.get(name) or _AXES[name.partition(".")[2]]
    if layout == c.BNNSDataLayoutNSE and name in (X, Y):
        return axes[0], axes[2], axes[1]
    if name == Y and isinstance(layout, int) and layout >> 16 >= 4:
        return "hidden_size", "directions", "batch_size", "seq_len"
    return axes


# ---- sizes ----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    inputs: int
    units: int
    samples: int
    layers: int
    steps: int
    directions: int
    first_layers: int  # how many layers iw_desc[0] holds; the others are in iw_desc[1]

    @property
    def width(self) -> int:
        """Features of the output, and of the input of upper layers."""
        return self.directions * self.units

    def extent(self, axis: str) -> int:
        known = {"directions": self.directions, "layers": self.first_layers}
        known |= {"directions * hidden_size": self.width, "num_layers - 1": self.layers - self.first_layers}
        return known.get(axis) or self[SCALARS.index(axis.partition(" ")[0])]

    def states(self) -> tuple[int, int, int]:
        return self.layers * self.directions, self.samples, self.units

    def outputs(self) -> tuple[int, int, int]:
        return self.steps, self.samples, self.width


def sizes_of(params: BNNSLayerParametersLSTM) -> Sizes:
    scalars = {name: as_size(name, getattr(params, name)) for name in SCALARS}
    flags = as_size("lstm_flags", params.lstm_flags)
    if flags & ~_KNOWN_FLAGS:
        note(f"lstm_flags has the unknown bits {flags & ~_KNOWN_FLAGS:#x}, which are ignored")
    directions = 2 if flags & c.BNNSLayerFlagsLSTMBidirectional else 1
    if 0 in scalars.values():
        _infer(scalars, params, directions)
    values = inputs, units, samples, layers, steps = tuple(scalars[name] for name in SCALARS)
    first = _first_layers(params, inputs, units, layers, directions)
    sizes = Sizes(inputs, units, samples, layers, steps, directions, first)
    # Generous upper bounds in elements: data and cache, and weights. Rows are padded to 16.
    cells, rows = layers * directions, steps * samples + 64
    data = rows * (inputs + 16 + cells * 8 * (sizes.width + 16))
    weights = cells * 4 * (units + 16) * (max(inputs, sizes.width) + 2 * units + 32)
    if 8 * max(data, weights) >= _MOST_BYTES:
        shown = ", ".join(f"{name} {value}" for name, value in zip(SCALARS, values, strict=True))
        raise Invalid(f"{shown}: the arrays of such a layer would not fit in a 64-bit address space")
    return sizes


def _infer(scalars: dict[str, int], params: BNNSLayerParametersLSTM, directions: int) -> None:
    """Replace scalars that are 0 by what the extents of descriptors with data say."""
    listed_axes = list(_axes(params))
    known = {"directions": directions}
    for products in (False, True):  # first from axes of their own, then from extents that are products
        for axes, extents in listed_axes:
            last = max((k for k, extent in enumerate(extents[: len(axes)]) if extent), default=-1)
            for k in range(last + 1):
                is_product = k == last < len(axes) - 1
                if not extents[k] or is_product != products:
                    continue
                known.update((name, value) for name, value in scalars.items() if value)
                parts = [part for axis in (axes[k:] if is_product else axes[k : k + 1]) for part in axis.split(" * ")]
                unknown = [part for part in parts if part not in known]
                rest = math.prod(known[part] for part in parts if part in known)
                if len(unknown) == 1 and unknown[0] in scalars and extents[k] % rest == 0:
                    scalars[unknown[0]] = extents[k] // rest
    for name, value in scalars.items():
        if value == 0:
            raise Invalid(f"{name} is 0, and no descriptor with data determines it")


def _axes(params: BNNSLayerParametersLSTM) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The axes of each descriptor with data and its extents, fastest first."""
    for name, desc in descriptors_of(params).items():
        layout = desc.layout or (c.BNNSDataLayoutSNE if name in (X, Y) else 0)
        try:
            extents = extents_of(layout, desc._size)
        except (Invalid, Unsupported):
            continue  # refused when it is read, with its name
        if not name.endswith("iw_desc[1]"):  # which may be ignored
            yield tuple(axis.partition(" of ")[0] for axis in _axes_of(name, layout)), extents


def _first_layers(params: BNNSLayerParametersLSTM, inputs: int, units: int, layers: int, directions: int) -> int:
    """How many layers ``iw_desc[0]`` holds.

    The header: ``iw_desc[1]`` holds the upper layers if there are any and ``input_size`` is not ``hidden_size``. With
    two directions, upper layers read twice ``hidden_size``. If ``input_size`` is that too, one array can also hold all
    layers: the extents of ``iw_desc[0]`` decide. If they are open, upper layers are in ``iw_desc[1]`` if that has data
    of its own.
    """
    if layers == 1 or inputs != directions * units:
        return 1
    if directions == 1:
        return layers
    pairs = [getattr(params, gate).iw_desc for gate in GATES]
    for first, _ in pairs:
        if first.data is not None:
            one, every = (_fits(first, (inputs, units, directions, count)) for count in (1, layers))
            if one != every:
                return 1 if one else layers
    return 1 if any(second.data is not None and not _same_data(first, second) for first, second in pairs) else layers


def _fits(desc: BNNSNDArrayDescriptor, implied: tuple[int, ...]) -> bool:
    try:
        extents = extents_of(desc.layout, desc._size)
        _matched(desc.layout, extents, implied + (1,) * (len(extents) - len(implied)), ("",) * len(implied))
    except (Invalid, Unsupported):
        return False
    return True


def _same_data(first: BNNSNDArrayDescriptor, second: BNNSNDArrayDescriptor) -> bool:
    """Whether two descriptors have the same pointer, as in Apple's article, which passes one of them twice."""
    a, b = first.data, second.data
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return a is b or (arrays and a.ctypes.data == b.ctypes.data)


def dropout_of(params: BNNSLayerParametersLSTM, sizes: Sizes) -> float:
    if sizes.layers == 1:
        if params.dropout != 0:
            shown = f"dropout is {params.dropout!r}, but num_layers is 1"
            advise_once(f"{shown}: dropout is applied between layers, so there is none")
        return 0.0
    dropout = as_float("dropout", params.dropout)
    if not 0 <= dropout < 1:
        raise Invalid(f"dropout is {dropout}, must be at least 0 and below 1")
    return dropout


# ---- descriptors as arrays ------------------------------------------------------------------------------------------


def descriptors_of(params: BNNSLayerParametersLSTM) -> dict[str, BNNSNDArrayDescriptor]:
    """All descriptors that have data, by name."""
    found = {LENGTHS: params.sequence_descriptor}
    for side in ("input_descriptor", "output_descriptor"):
        for field in ("data_desc", "hidden_desc", "cell_state_desc"):
            found[f"{side}.{field}"] = getattr(getattr(params, side), field)
    for gate in GATES:
        fields = getattr(params, gate)
        descriptors = (*fields.iw_desc, fields.hw_desc, fields.b_desc, fields.cw_desc)
        found.update((f"{gate}.{field}", desc) for field, desc in zip(GATE_FIELDS, descriptors, strict=True))
    return {name: desc for name, desc in found.items() if desc.data is not None}


def arrays_of(
    descriptors: Mapping[str, BNNSNDArrayDescriptor], names: Iterable[str], sizes: Sizes, results: bool
) -> dict[str, Array]:
    """The named arrays that are present, in the engine's shape if that needs no copy (see _Inputs.state)."""
    found = {}
    for name in names:
        if name in descriptors:
            with prefixing(f"{name}."):
                array = _array(name, descriptors[name], sizes, results)
            if array is not None:
                found[name] = array
    return found


def _array(name: str, desc: BNNSNDArrayDescriptor, sizes: Sizes, result: bool) -> Array | None:
    if name.endswith("iw_desc[1]") and sizes.layers == sizes.first_layers:
        return None  # iw_desc[0] holds all layers
    layout = desc.layout or (c.BNNSDataLayoutSNE if name in (X, Y) else 0)
    axes = _axes_of(name, layout)
    view = _view(desc, layout, {axis: sizes.extent(axis) for axis in axes}, result, integers=name == LENGTHS)
    if name in STATES:
        return _reshaped(view, sizes.states())
    if name == Y and len(axes) == 4:
        return _reshaped(view, sizes.outputs())
    return view.swapaxes(0, 1) if name in (X, Y) and axes[1] == "seq_len" else view


def _view(desc: BNNSNDArrayDescriptor, layout: int, implied: Mapping[str, int], result: bool, integers: bool) -> Array:
    """The descriptor's array, slowest axis first. `implied`: extents given by the scalar fields, fastest first."""
    dtype = _memory.dtype_of(desc.data_type)
    if dtype.kind not in "iu" if integers else dtype != FLOAT32:
        wanted = "an integer" if integers else "BNNSDataTypeFloat32"
        raise Unsupported(f"data_type is {type_name(desc.data_type)}, must be {wanted}")
    if layout == c.BNNSDataLayoutMHA_DHK:  # its size lists axes in another order
        raise Unsupported("layout is BNNSDataLayoutMHA_DHK, which is that of an attention's weights")
    extents = extents_of(layout, desc._size)
    expected = tuple(implied.values())
    full = expected + (1,) * (len(extents) - len(expected))
    used = _matched(layout, extents, full, tuple(implied))
    shape = _memory.geometry(layout, dtype, full, desc._stride[:used])
    view = _memory.view_of(shape, desc.data)
    if result:
        _memory.check_writable("data", view)
    if shape.may_overlap:
        shared = f"stride is {shape.strides}, with which elements of {_memory.size_of(shape)} share memory"
        if result:
            raise Invalid(shared)
        advise_once(shared)
    return view.reshape(expected[::-1])  # drops slow axes of extent 1


def _matched(layout: int, extents: tuple[int, ...], implied: tuple[int, ...], names: tuple[str, ...]) -> int:
    """Check a descriptor's extents against the implied ones, fastest first; return how many of its axes are used.

    0 means the implied extent. The slowest extent given may also be the product of all remaining ones.
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
    """The ``size`` that a descriptor of this rank should have; at a low rank the last extent is a product."""
    extents, shown = [*implied[:rank]], [*names[:rank], *"1" * (rank - len(names))]
    if len(implied) > rank:
        extents[-1], shown[-1] = math.prod(implied[rank - 1 :]), " * ".join(names[rank - 1 :])
    if _memory.is_first_major(layout):
        shown.reverse()
    return f"size=({', '.join(shown)})={listed(layout, tuple(extents))}"


def _reshaped(view: Array, shape: tuple[int, ...]) -> Array:
    """Reshape without a copy, or return the view itself if its axes cannot be joined."""
    reshaped = view.reshape(shape)
    return reshaped if np.may_share_memory(reshaped, view) else view


def cells_of(sizes: Sizes, arrays: Arrays) -> list[LstmWeights]:
    """Split the gates' arrays, each ``[layers, D, H, ...]``, into the weights of each layer and direction."""

    def four(field: str, layer: int, direction: int) -> tuple[Array | None, ...] | None:
        gates = [arrays.get(f"{gate}.{field}") for gate in GATES]
        if all(array is None for array in gates):
            return None
        return tuple(None if array is None else array[layer, direction] for array in gates)

    first = sizes.first_layers
    cells = []
    for layer in range(sizes.layers):
        inputs = ("iw_desc[0]", layer) if layer < first else ("iw_desc[1]", layer - first)
        for direction in range(sizes.directions):
            wh, b, peephole = (four(field, layer, direction) for field in ("hw_desc", "b_desc", "cw_desc"))
            cells.append(LstmWeights(four(*inputs, direction), wh, b, peephole))
    return cells
