"""Descriptors of recurrent layers, the data sources of their weights, and the cells that they describe.

A table says which of the engine's gates has which members of a descriptor and which ids; all else follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np

from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.recurrent import (
    GruActivations,
    GruWeights,
    LstmActivations,
    LstmWeights,
    RnnWeights,
    gru_backward,
    gru_cache,
    gru_forward,
    lstm_backward,
    lstm_cache,
    lstm_forward,
    rnn_backward,
    rnn_cache,
    rnn_forward,
)
from ._metal import memory_of
from ._neuron import Curve, as_neuron_type, neuron, used_parameters
from ._types import (
    NUMPY_TYPES,
    Members,
    MPSCNNNeuronType,
    MPSDataType,
    MPSRNNMatrixId,
    MPSRNNSequenceDirection,
    Setting,
    as_bool,
    as_float,
    as_label,
    as_unsigned,
)

FLOAT_TYPES: Final = (MPSDataType.float32, MPSDataType.float16)
NeuronOf: TypeAlias = tuple[MPSCNNNeuronType, float, float, float]
_IDENTITY: Final[NeuronOf] = (MPSCNNNeuronType.none, 0.0, 0.0, 0.0)

Descriptor = TypeVar("Descriptor", bound="MPSRNNDescriptor")


# ---- data sources ----------------------------------------------------------------------------------------------------


class MPSNNNeuronDescriptor(Members):
    """A neuron and its parameters. Made by :meth:`cnnNeuronDescriptor`."""

    neuronType = Setting[MPSCNNNeuronType](as_neuron_type, MPSCNNNeuronType.none, "The function.")
    a = Setting[float](as_float, 0.0, "Parameter a.")
    b = Setting[float](as_float, 0.0, "Parameter b.")
    c = Setting[float](as_float, 0.0, "Parameter c.")
    label = Setting[str | None](as_label, None, "Debug label.")
    _neuronType: MPSCNNNeuronType
    _a: float
    _b: float
    _c: float

    def __init__(self, with_: int, a: float | None = None, b: float | None = None, c: float | None = None) -> None:
        """The parameters that the neuron uses are required: Apple does not document defaults."""
        function = "MPSNNNeuronDescriptor"
        self._neuronType = as_neuron_type(f"{function}: with_", with_)
        for name, value in zip("abc", (a, b, c), strict=True):
            if value is None and name in used_parameters(self._neuronType):
                raise ValueError(f"{function}: {self._neuronType.name} has the parameter {name}, which is not given")
            setattr(self, f"_{name}", 0.0 if value is None else as_float(f"{function}: {name}", value))
        self._label: str | None = None

    @classmethod
    def cnnNeuronDescriptor(
        cls, with_: int, a: float | None = None, b: float | None = None, c: float | None = None
    ) -> MPSNNNeuronDescriptor:
        return cls(with_, a, b, c)


def _as_neuron(name: str, value: object) -> MPSNNNeuronDescriptor | None:
    if value is None or isinstance(value, MPSNNNeuronDescriptor):
        return value
    raise TypeError(f"{name} must be an MPSNNNeuronDescriptor or None, not {type(value).__name__}")


class MPSCNNConvolutionDescriptor(Members):
    """The shape and the neuron of a data source. In recurrent layers the kernel is 1 x 1."""

    kernelWidth = Setting[int](as_unsigned, 1, "Width of the kernel.")
    kernelHeight = Setting[int](as_unsigned, 1, "Height of the kernel.")
    inputFeatureChannels = Setting[int](as_unsigned, 1, "Columns of the weights.")
    outputFeatureChannels = Setting[int](as_unsigned, 1, "Rows of the weights.")
    fusedNeuronDescriptor = Setting[MPSNNNeuronDescriptor | None](_as_neuron, None, "The neuron; None is the identity.")
    _kernelWidth: int
    _kernelHeight: int
    _inputFeatureChannels: int
    _outputFeatureChannels: int
    _fusedNeuronDescriptor: MPSNNNeuronDescriptor | None

    def __init__(
        self, *, kernelWidth: int, kernelHeight: int, inputFeatureChannels: int, outputFeatureChannels: int
    ) -> None:
        function = "MPSCNNConvolutionDescriptor"
        self._kernelWidth = as_unsigned(f"{function}: kernelWidth", kernelWidth)
        self._kernelHeight = as_unsigned(f"{function}: kernelHeight", kernelHeight)
        self._inputFeatureChannels = as_unsigned(f"{function}: inputFeatureChannels", inputFeatureChannels)
        self._outputFeatureChannels = as_unsigned(f"{function}: outputFeatureChannels", outputFeatureChannels)
        self._fusedNeuronDescriptor = None

    def setNeuronType(self, neuronType: int, parameterA: float = 0.0, parameterB: float = 0.0) -> None:
        """Set the neuron: the deprecated form of fusedNeuronDescriptor."""
        self._fusedNeuronDescriptor = MPSNNNeuronDescriptor(neuronType, parameterA, parameterB, 0.0)

    def _neuron(self) -> NeuronOf:
        fused = self._fusedNeuronDescriptor
        return _IDENTITY if fused is None else (fused._neuronType, fused._a, fused._b, fused._c)


class MPSCNNConvolutionDataSource(Protocol):
    """What a member for weights takes: any object with these methods. It is read when a layer is made."""

    def dataType(self) -> int:
        """The type of the weights: float32 or float16."""

    def descriptor(self) -> MPSCNNConvolutionDescriptor: ...

    def weights(self) -> Any:
        """The weights, outputs x inputs: an array, or any object with contiguous memory."""

    def biasTerms(self) -> Any:
        """The bias, of float32, or None."""

    def load(self) -> bool:
        """Called before the others. False: there are no weights."""

    def purge(self) -> None:
        """Called after the others."""

    def label(self) -> str | None: ...


_SOURCE_METHODS: Final = ("dataType", "descriptor", "weights", "biasTerms", "load", "purge", "label")


def _as_source(name: str, value: Any) -> MPSCNNConvolutionDataSource | None:
    if value is not None:
        missing = [method for method in _SOURCE_METHODS if not callable(getattr(value, method, None))]
        if missing:
            raise TypeError(
                f"{name} must be an MPSCNNConvolutionDataSource, but {type(value).__name__} has no method "
                f"{', '.join(missing)}"
            )
    source: MPSCNNConvolutionDataSource | None = value
    return source


class _Source(NamedTuple):
    """What a data source has."""

    weights: Array
    bias: Array | None
    neuron: NeuronOf


def _read(name: str, source: MPSCNNConvolutionDataSource, shape: tuple[int, int], diagonal: bool) -> _Source:
    if not source.load():
        raise RuntimeError(f"{name}: load() of the data source returned False")
    try:
        data_type = as_unsigned(f"{name}.dataType()", source.dataType())
        if data_type not in FLOAT_TYPES:
            raise TypeError(f"{name}.dataType() is {data_type:#x}, must be float32 or float16")
        described = source.descriptor()
        if not isinstance(described, MPSCNNConvolutionDescriptor):
            raise TypeError(
                f"{name}.descriptor() must be an MPSCNNConvolutionDescriptor, not {type(described).__name__}"
            )
        rows, columns = shape
        kernel = (described._kernelHeight, described._kernelWidth)
        if kernel != (1, 1):
            raise ValueError(f"{name} has a kernel of {kernel[0]} x {kernel[1]}, must be 1 x 1")
        found = (described._outputFeatureChannels, described._inputFeatureChannels)
        # A diagonal is a vector: of its descriptor only the number of outputs has a meaning.
        if found != (columns if diagonal else rows, found[1] if diagonal else columns):
            needed = f"{columns} outputs" if diagonal else f"{rows} outputs x {columns} inputs"
            raise ValueError(f"{name} is described as {found[0]} outputs x {found[1]} inputs, must be {needed}")
        weights = _elements(f"{name}.weights()", source.weights(), NUMPY_TYPES[data_type], rows * columns)
        terms = source.biasTerms()
        bias = None if terms is None else _elements(f"{name}.biasTerms()", terms, np.dtype(np.float32), rows)
        return _Source(weights.reshape(shape), bias, described._neuron())
    finally:
        source.purge()


def _elements(name: str, source: object, dtype: np.dtype[Any], count: int) -> Array:
    """A copy of the elements: the source may free its memory after `purge`."""
    function, _, argument = name.rpartition(": ")
    memory, found = memory_of(function, argument, source)
    if found is not None and found != dtype:
        raise TypeError(f"{name} has elements of type {found}, must be of {dtype}")
    if memory.nbytes != count * dtype.itemsize:
        raise ValueError(f"{name} has {memory.nbytes} bytes, must have {count} elements of {dtype}")
    elements: Array = np.frombuffer(memory, dtype).copy()
    return elements


# ---- descriptors -----------------------------------------------------------------------------------------------------


def _as_direction(name: str, value: object) -> MPSRNNSequenceDirection:
    try:
        return MPSRNNSequenceDirection(as_unsigned(name, value))
    except ValueError:
        raise ValueError(f"{name} is {value!r}, must be 0 (forward) or 1 (backward)") from None


def _weights(doc: str) -> Setting[MPSCNNConvolutionDataSource | None]:
    return Setting[MPSCNNConvolutionDataSource | None](_as_source, None, doc)


class MPSRNNDescriptor(Members):
    """Describes a recurrent layer. A layer reads its descriptor once, when it is made."""

    inputFeatureChannels = Setting[int](as_unsigned, 1, "Columns of the source matrices.")
    outputFeatureChannels = Setting[int](as_unsigned, 1, "Columns of the destination matrices.")
    useLayerInputUnitTransformMode = Setting[bool](
        as_bool, False, "Replace all input weights by the identity. The numbers of channels are then equal."
    )
    useFloat32Weights = Setting[bool](as_bool, False, "Keep the weights as float32 instead of float16.")
    layerSequenceDirection = Setting[MPSRNNSequenceDirection](
        _as_direction, MPSRNNSequenceDirection.forward, "For bidirectional encodes. A training layer has none."
    )
    _inputFeatureChannels: int
    _outputFeatureChannels: int
    _useLayerInputUnitTransformMode: bool
    _useFloat32Weights: bool
    _kind: ClassVar[str]

    def __init__(self) -> None:
        if not hasattr(self, "_kind"):
            raise TypeError("MPSRNNDescriptor is abstract; create one of its subclasses")
        for base in type(self).__mro__:
            for member in vars(base).values():
                if isinstance(member, Setting):
                    setattr(self, member.attribute, member.default)

    @classmethod
    def _create(cls: type[Descriptor], withInputFeatureChannels: int, outputFeatureChannels: int) -> Descriptor:
        made = cls()
        made._inputFeatureChannels = as_unsigned(f"{cls.__name__}.inputFeatureChannels", withInputFeatureChannels)
        made._outputFeatureChannels = as_unsigned(f"{cls.__name__}.outputFeatureChannels", outputFeatureChannels)
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it refers to data sources")


class MPSRNNSingleGateDescriptor(MPSRNNDescriptor):
    """h1 = g(x W' + h0 U' + b)"""

    inputWeights = _weights("W, b and g.")
    recurrentWeights = _weights("U.")
    _kind = "rnn"

    @classmethod
    def createRNNSingleGateDescriptor(
        cls, withInputFeatureChannels: int, outputFeatureChannels: int
    ) -> MPSRNNSingleGateDescriptor:
        return cls._create(withInputFeatureChannels, outputFeatureChannels)


class MPSGRUDescriptor(MPSRNNDescriptor):
    """z = gz(x Wz' + h0 Uz' + bz), r = gr(x Wr' + h0 Ur' + br), h = gh(x Wh' + (r h0) Uh' + bh)

    h1 = (1 - z) h + z h0, or with flipOutputGates h1 = (1 - z) h0 + z h.
    """

    inputGateInputWeights = _weights("Wz, bz and gz.")
    inputGateRecurrentWeights = _weights("Uz.")
    recurrentGateInputWeights = _weights("Wr, br and gr.")
    recurrentGateRecurrentWeights = _weights("Ur.")
    outputGateInputWeights = _weights("Wh, bh and gh.")
    outputGateRecurrentWeights = _weights("Uh.")
    outputGateInputGateWeights = _weights("Vh, of the product with z h0: a layer refuses it.")
    gatePnormValue = Setting[float](as_float, 1.0, "p of (1 - z^p)^(1/p): a layer refuses other values than 1.")
    flipOutputGates = Setting[bool](as_bool, False, "Whether z weighs the new output h instead of the old one.")
    _outputGateInputGateWeights: MPSCNNConvolutionDataSource | None
    _gatePnormValue: float
    _flipOutputGates: bool
    _kind = "gru"

    @classmethod
    def createGRUDescriptor(cls, withInputFeatureChannels: int, outputFeatureChannels: int) -> MPSGRUDescriptor:
        return cls._create(withInputFeatureChannels, outputFeatureChannels)


class MPSLSTMDescriptor(MPSRNNDescriptor):
    """I = gi(x Wi' + h0 Ui' + c0 Vi' + bi), F and C likewise, c1 = F c0 + I C

    O = go(x Wo' + h0 Uo' + c1 Vo' + bo), h1 = O gh(c1).
    """

    inputGateInputWeights = _weights("Wi, bi and gi.")
    inputGateRecurrentWeights = _weights("Ui.")
    inputGateMemoryWeights = _weights("Vi.")
    forgetGateInputWeights = _weights("Wf, bf and gf.")
    forgetGateRecurrentWeights = _weights("Uf.")
    forgetGateMemoryWeights = _weights("Vf.")
    cellGateInputWeights = _weights("Wc, bc and gc.")
    cellGateRecurrentWeights = _weights("Uc.")
    cellGateMemoryWeights = _weights("Vc.")
    outputGateInputWeights = _weights("Wo, bo and go.")
    outputGateRecurrentWeights = _weights("Uo.")
    outputGateMemoryWeights = _weights("Vo.")
    memoryWeightsAreDiagonal = Setting[bool](as_bool, False, "Whether Vi, Vf, Vc and Vo are vectors.")
    cellToOutputNeuronType = Setting[MPSCNNNeuronType](as_neuron_type, MPSCNNNeuronType.tanH, "gh.")
    cellToOutputNeuronParamA = Setting[float](as_float, 1.0, "Parameter a of gh.")
    cellToOutputNeuronParamB = Setting[float](as_float, 1.0, "Parameter b of gh.")
    cellToOutputNeuronParamC = Setting[float](as_float, 1.0, "Parameter c of gh.")
    _memoryWeightsAreDiagonal: bool
    _cellToOutputNeuronType: MPSCNNNeuronType
    _cellToOutputNeuronParamA: float
    _cellToOutputNeuronParamB: float
    _cellToOutputNeuronParamC: float
    _kind = "lstm"

    @classmethod
    def createLSTMDescriptor(cls, withInputFeatureChannels: int, outputFeatureChannels: int) -> MPSLSTMDescriptor:
        return cls._create(withInputFeatureChannels, outputFeatureChannels)


# ---- cells -----------------------------------------------------------------------------------------------------------


class _Gate(NamedTuple):
    letter: str  # the engine's
    member: str  # how a descriptor's members begin
    id: str  # how the ids begin


class Kind(NamedTuple):
    """A kind of layer: its gates in the order of the ids, and the engine's functions."""

    gates: tuple[_Gate, ...]
    letters: str  # the gates in the engine's order
    states: tuple[str, ...]  # that go from step to step
    record: Callable[..., Any]  # of weights
    forward: Callable[..., Any]
    cache: Callable[..., Any]
    backward: Callable[..., Any]


KINDS: Final[dict[str, Kind]] = {
    "rnn": Kind((_Gate("h", "", "singleGate"),), "h", ("h",), RnnWeights, rnn_forward, rnn_cache, rnn_backward),
    "lstm": Kind(
        (
            _Gate("i", "inputGate", "lstmInputGate"),
            _Gate("f", "forgetGate", "lstmForgetGate"),
            _Gate("g", "cellGate", "lstmMemoryGate"),
            _Gate("o", "outputGate", "lstmOutputGate"),
        ),
        "ifgo",
        ("h", "c"),
        LstmWeights,
        lstm_forward,
        lstm_cache,
        lstm_backward,
    ),
    "gru": Kind(
        (
            _Gate("z", "inputGate", "gruInputGate"),
            _Gate("r", "recurrentGate", "gruRecurrentGate"),
            _Gate("n", "outputGate", "gruOutputGate"),
        ),
        "rzn",
        ("h",),
        GruWeights,
        gru_forward,
        gru_cache,
        gru_backward,
    ),
}
# How the members and the ids of a gate end, and the engine's name of the parameter.
_PARTS: Final = (
    ("wx", "InputWeights"),
    ("wh", "RecurrentWeights"),
    ("peephole", "MemoryWeights"),
    ("b", "BiasTerms"),
)


class Slot(NamedTuple):
    """One of a layer's weights."""

    id: MPSRNNMatrixId
    field: str  # of the engine's weights
    letter: str  # of the gate
    member: str  # of the descriptor; of a bias, the member for the input weights
    shape: tuple[int, int]


class Cell(NamedTuple):
    """What a layer computes."""

    kind: str
    inputs: int
    units: int
    unit_transform: bool  # the input weights are the identity
    float32: bool  # the type of the weights
    flip: bool  # GRU
    diagonal: bool  # LSTM: the memory weights are vectors
    memory: str  # LSTM: the gates with memory weights
    neurons: tuple[NeuronOf, ...]  # of the gates in the engine's order, and of an LSTM's cell

    def slots(self) -> list[Slot]:
        """The weights, in the order of their ids."""
        shapes = {
            "wx": (self.units, self.inputs),
            "wh": (self.units, self.units),
            "peephole": (1 if self.diagonal else self.units, self.units),
            "b": (1, self.units),
        }
        return [
            Slot(MPSRNNMatrixId[gate.id + ending], field, gate.letter, _member(gate, field, ending), shapes[field])
            for gate in KINDS[self.kind].gates
            for field, ending in _PARTS
            if not (field == "peephole" and gate.letter not in self.memory)
            and not (field == "wx" and self.unit_transform)
        ]

    def weights(self, arrays: Sequence[Array]) -> Any:
        """The engine's record of the arrays of the slots, [rows, columns] each."""
        kind = KINDS[self.kind]
        found: dict[str, dict[str, Array]] = {}
        for slot, array in zip(self.slots(), arrays, strict=True):
            is_vector = slot.field == "b" or (slot.field == "peephole" and self.diagonal)
            found.setdefault(slot.field, {})[slot.letter] = array[0] if is_vector else array
        if self.unit_transform:
            found["wx"] = dict.fromkeys(kind.letters, np.eye(self.units, dtype=np.float32))
        return kind.record(**{field: tuple(map(by_gate.get, kind.letters)) for field, by_gate in found.items()})

    def fields(self) -> list[str]:
        """The fields of the record that are trained."""
        return list(dict.fromkeys(slot.field for slot in self.slots()))

    def options(self) -> dict[str, Any]:
        """The arguments of the engine's functions besides arrays."""
        functions = [_activation(*given) for given in self.neurons]
        if self.kind == "rnn":
            return {"activation": functions[0]}
        if self.kind == "gru":
            return {"kind": "before", "flip": self.flip, "activations": GruActivations(*functions)}
        return {"activations": LstmActivations(*functions)}


def _member(gate: _Gate, field: str, ending: str) -> str:
    ending = "InputWeights" if field == "b" else ending
    return gate.member + ending if gate.member else ending[0].lower() + ending[1:]


def _activation(type_: MPSCNNNeuronType, a: float, b: float, c: float) -> Activation | str:
    """The engine's function of a neuron. Its plain functions are faster than the ones with parameters."""
    if type_ is MPSCNNNeuronType.tanH and a == b == 1:
        return "tanh"
    if type_ is MPSCNNNeuronType.reLU and a == 0:
        return "relu"
    made = neuron(type_, a, b, c)
    if isinstance(made, Curve):
        raise ValueError(f"neuron {type_.name} is not a function of the gates of recurrent layers here")
    return "identity" if made is None else made


def described_cell(function: str, descriptor: MPSRNNDescriptor) -> tuple[Cell, list[Array]]:
    """The cell of a descriptor, and the values of its weights in the order of the slots."""
    kind = KINDS[descriptor._kind]
    inputs, units = descriptor._inputFeatureChannels, descriptor._outputFeatureChannels
    for name, channels in (("inputFeatureChannels", inputs), ("outputFeatureChannels", units)):
        if channels < 1:
            raise ValueError(f"{function}: rnnDescriptor.{name} is {channels}, must be at least 1")
    unit = descriptor._useLayerInputUnitTransformMode
    if unit and inputs != units:
        raise ValueError(
            f"{function}: rnnDescriptor has {inputs} input and {units} output channels; with "
            "useLayerInputUnitTransformMode they must be equal"
        )
    flip = diagonal = False
    if isinstance(descriptor, MPSGRUDescriptor):
        _refuse_unsupported(function, descriptor)
        flip = descriptor._flipOutputGates
    memory = ""
    if isinstance(descriptor, MPSLSTMDescriptor):
        diagonal = descriptor._memoryWeightsAreDiagonal
        memory = "".join(
            gate.letter for gate in kind.gates if getattr(descriptor, f"_{gate.member}MemoryWeights") is not None
        )
    cell = Cell(descriptor._kind, inputs, units, unit, descriptor._useFloat32Weights, flip, diagonal, memory, ())
    values, neurons = [], dict.fromkeys(kind.letters, _IDENTITY)
    bias: Array | None = None  # of the gate
    for slot in cell._replace(unit_transform=False).slots():
        source = _slot_source(function, descriptor, cell, slot)
        if slot.field == "wx":
            bias = None if source is None else source.bias
            if source is not None:
                neurons[slot.letter] = source.neuron
        value = bias if slot.field == "b" else None if source is None else source.weights
        if not (unit and slot.field == "wx"):
            values.append(np.zeros(slot.shape, np.float32) if value is None else value.reshape(slot.shape))
    cell = cell._replace(neurons=(*neurons.values(), *_cell_neurons(descriptor)))
    try:
        cell.options()
    except ValueError as error:
        raise ValueError(f"{function}: rnnDescriptor: {error}") from None
    return cell, values


def _slot_source(function: str, descriptor: MPSRNNDescriptor, cell: Cell, slot: Slot) -> _Source | None:
    source = None if slot.field == "b" else getattr(descriptor, f"_{slot.member}")
    if source is None:
        return None
    return _read(
        f"{function}: rnnDescriptor.{slot.member}", source, slot.shape, slot.field == "peephole" and cell.diagonal
    )


def _cell_neurons(descriptor: MPSRNNDescriptor) -> tuple[NeuronOf, ...]:
    if not isinstance(descriptor, MPSLSTMDescriptor):
        return ()
    parameters = (getattr(descriptor, f"_cellToOutputNeuronParam{name}") for name in "ABC")
    a, b, c = parameters
    return ((descriptor._cellToOutputNeuronType, a, b, c),)


def _refuse_unsupported(function: str, descriptor: MPSGRUDescriptor) -> None:
    if descriptor._outputGateInputGateWeights is not None:
        raise ValueError(
            f"{function}: rnnDescriptor.outputGateInputGateWeights is given; the GRU here has no product with z h0, "
            "so it must be None"
        )
    if descriptor._gatePnormValue != 1:
        raise ValueError(
            f"{function}: rnnDescriptor.gatePnormValue is {descriptor._gatePnormValue}, must be 1: the GRU here has no "
            "p-norm gates"
        )
