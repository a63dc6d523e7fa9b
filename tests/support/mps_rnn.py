"""MPS recurrent layers for tests: data sources, layers with given weights, and whole passes over NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from retrograd.mps import (
    MPSCNNConvolutionDescriptor,
    MPSCNNNeuronType,
    MPSDataType,
    MPSGRUDescriptor,
    MPSLSTMDescriptor,
    MPSMatrix,
    MPSNNNeuronDescriptor,
    MPSRNNMatrixId,
    MPSRNNMatrixTrainingLayer,
    MPSRNNSingleGateDescriptor,
    MTLCommandBufferStatus,
)
from support.arrays import Array
from support.mps import DEVICE, QUEUE, TYPES, matrix

TANH = (MPSCNNNeuronType.tanH, 1.0, 1.0, 0.0)
SIGMOID = (MPSCNNNeuronType.sigmoid, 0.0, 0.0, 0.0)
# The members and ids of each gate in the order of the ids, its neuron, and the engine's letter.
GATES: dict[str, list[tuple[str, str, Any, str]]] = {
    "rnn": [("", "singleGate", TANH, "h")],
    "gru": [
        ("inputGate", "gruInputGate", SIGMOID, "z"),
        ("recurrentGate", "gruRecurrentGate", SIGMOID, "r"),
        ("outputGate", "gruOutputGate", TANH, "n"),
    ],
    "lstm": [
        ("inputGate", "lstmInputGate", SIGMOID, "i"),
        ("forgetGate", "lstmForgetGate", SIGMOID, "f"),
        ("cellGate", "lstmMemoryGate", TANH, "g"),
        ("outputGate", "lstmOutputGate", SIGMOID, "o"),
    ],
}
CREATE = {
    "rnn": MPSRNNSingleGateDescriptor.createRNNSingleGateDescriptor,
    "gru": MPSGRUDescriptor.createGRUDescriptor,
    "lstm": MPSLSTMDescriptor.createLSTMDescriptor,
}


class Source:
    """An MPSCNNConvolutionDataSource over arrays."""

    def __init__(self, weights: Array, bias: Array | None = None, neuron: Any = None) -> None:
        self.array, self.bias, self.neuron = weights, bias, neuron
        self.calls: list[str] = []

    def dataType(self) -> int:
        return TYPES[self.array.dtype]

    def descriptor(self) -> MPSCNNConvolutionDescriptor:
        rows, columns = self.array.shape if self.array.ndim == 2 else (len(self.array), 1)
        made = MPSCNNConvolutionDescriptor(
            kernelWidth=1, kernelHeight=1, inputFeatureChannels=columns, outputFeatureChannels=rows
        )
        if self.neuron is not None:
            made.fusedNeuronDescriptor = MPSNNNeuronDescriptor.cnnNeuronDescriptor(*self.neuron)
        return made

    def weights(self) -> Any:
        return np.ascontiguousarray(self.array)

    def biasTerms(self) -> Any:
        return self.bias

    def load(self) -> bool:
        self.calls.append("load")
        return True

    def purge(self) -> None:
        self.calls.append("purge")

    def label(self) -> str | None:
        return None


def member(prefix: str, ending: str) -> str:
    return prefix + ending if prefix else ending[0].lower() + ending[1:]


def descriptor(kind: str, values: dict[MPSRNNMatrixId, Array], neurons: Sequence[Any] = (), **members: Any) -> Any:
    """A descriptor with these weights by id, and the usual neurons unless others are given, by gate."""
    first = values[MPSRNNMatrixId[GATES[kind][0][1] + "InputWeights"]]
    made = CREATE[kind](first.shape[1], first.shape[0])
    made.useFloat32Weights = True
    for index, (prefix, id_prefix, neuron, _) in enumerate(GATES[kind]):
        for ending in ("InputWeights", "RecurrentWeights", "MemoryWeights"):
            value = values.get(getattr(MPSRNNMatrixId, id_prefix + ending, None))  # type: ignore[arg-type]
            if value is None:
                continue
            if ending == "InputWeights":
                bias = values.get(MPSRNNMatrixId[id_prefix + "BiasTerms"])
                source = Source(value, bias, neurons[index] if neurons else neuron)
            else:
                source = Source(value)
            setattr(made, member(prefix, ending), source)
    for name, given in members.items():
        setattr(made, name, given)
    return made


def layer(described: Any, **members: Any) -> tuple[MPSRNNMatrixTrainingLayer, list[MPSMatrix]]:
    weights: list[MPSMatrix] = []
    made = MPSRNNMatrixTrainingLayer(device=DEVICE, rnnDescriptor=described, trainableWeights=weights)
    for name, value in members.items():
        setattr(made, name, value)
    return made, weights


def random_weights(
    kind: str, inputs: int, units: int, memory: str = "", diagonal: bool = False, seed: int = 0
) -> dict[MPSRNNMatrixId, Array]:
    """Weights by id; `memory` has the letters of the gates with memory weights."""
    random = np.random.default_rng(seed)
    found = {}
    for _, prefix, _, letter in GATES[kind]:
        shapes: dict[str, tuple[int, ...]] = {"InputWeights": (units, inputs), "RecurrentWeights": (units, units)}
        if letter in memory:
            shapes["MemoryWeights"] = (units,) if diagonal else (units, units)
        shapes["BiasTerms"] = (units,)
        for ending, shape in shapes.items():
            found[MPSRNNMatrixId[prefix + ending]] = random.uniform(-0.8, 0.8, shape).astype(np.float32)
    return found


def run(buffer: Any) -> None:
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.status == MTLCommandBufferStatus.completed, buffer.error


def values_of(found: MPSMatrix | None) -> Array:
    assert found is not None
    array: Array = found._elements()[0].copy()
    return array


class Pass(NamedTuple):
    y: list[Array]
    training: list[Any]
    states: list[Any]
    sources: list[MPSMatrix]


def forward(made: MPSRNNMatrixTrainingLayer, weights: list[MPSMatrix], x: Sequence[Array], state: Any = None) -> Pass:
    """A forward pass over the steps `x`."""
    sources = [matrix(np.ascontiguousarray(step)) for step in x]
    y = [np.full((len(step), made.outputFeatureChannels), 7, step.dtype) for step in x]
    training: list[Any] = []
    states: list[Any] = []
    buffer = QUEUE.makeCommandBuffer()
    made.encodeForwardSequence(
        commandBuffer=buffer,
        sourceMatrices=sources,
        destinationMatrices=[matrix(step) for step in y],
        trainingStates=training,
        recurrentInputState=state,
        recurrentOutputStates=states,
        weights=weights,
    )
    run(buffer)
    return Pass(y, training, states, sources)


class Gradients(NamedTuple):
    dx: list[Array]
    dweights: list[Array]
    states: list[Any]


def gradient(
    made: MPSRNNMatrixTrainingLayer,
    weights: list[MPSMatrix],
    passed: Pass,
    dy: Sequence[Array],
    state: Any = None,
    targets: list[MPSMatrix] | None = None,
) -> Gradients:
    """The gradients of a forward pass."""
    dx = [np.full((len(step), made.inputFeatureChannels), 7, step.dtype) for step in dy]
    if targets is None:
        targets = []
        made.createWeightGradientMatrices(targets, MPSDataType.float32)
    states: list[Any] = []
    buffer = QUEUE.makeCommandBuffer()
    made.encodeGradientSequence(
        commandBuffer=buffer,
        forwardSources=passed.sources,
        sourceGradients=[matrix(np.ascontiguousarray(step)) for step in dy],
        destinationGradients=[matrix(step) for step in dx],
        weightGradients=targets,
        trainingStates=passed.training,
        recurrentInputState=state,
        recurrentOutputStates=states,
        weights=weights,
    )
    run(buffer)
    return Gradients(dx, [values_of(target) for target in targets], states)


def state_of(made: MPSRNNMatrixTrainingLayer, weights: list[MPSMatrix], *values: Array) -> Any:
    """A recurrent state with these values, made as a program would: by a pass, whose result is overwritten."""
    step = np.zeros((len(values[0]), made.inputFeatureChannels), np.float32)
    (state,) = forward(made, weights, [step]).states[-1:]
    for found, value in zip(state._matrices, values, strict=True):
        found._elements()[0] = value
    return state


def hidden(state: Any) -> Array:
    return values_of(state.getRecurrentOutputMatrix(0))


def cells(state: Any) -> Array:
    return values_of(state.getMemoryCellMatrix(0))
