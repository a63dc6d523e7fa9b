"""retrograd.mps.pyobjc: recurrent training layers as PyObjC spells them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd.mps as swift

# In a script for PyObjC: import Metal, MetalPerformanceShaders as MPS
import retrograd.mps.pyobjc as MPS
import retrograd.mps.pyobjc as Metal
from support.arrays import Array, assert_same_bits
from support.mps_rnn import GATES, descriptor, forward, gradient, hidden, layer, member, random_weights

FORWARD = (
    "encodeForwardSequenceToCommandBuffer_sourceMatrices_sourceOffsets_destinationMatrices_destinationOffsets_"
    "trainingStates_recurrentInputState_recurrentOutputStates_weights_"
)
GRADIENT = (
    "encodeGradientSequenceToCommandBuffer_forwardSources_forwardSourceOffsets_sourceGradients_sourceGradientOffsets_"
    "destinationGradients_destinationOffsets_weightGradients_trainingStates_recurrentInputState_"
    "recurrentOutputStates_weights_"
)
CREATE = {
    "rnn": ("MPSRNNSingleGateDescriptor", "RNNSingleGate"),
    "gru": ("MPSGRUDescriptor", "GRU"),
    "lstm": ("MPSLSTMDescriptor", "LSTM"),
}


class Weights:
    """A data source, as a subclass of NSObject would be."""

    def __init__(self, weights: Array, bias: Array | None = None, neuron: int | None = None) -> None:
        self._weights, self._bias, self._neuron = weights, bias, neuron

    def dataType(self) -> int:
        return MPS.MPSDataTypeFloat32

    def descriptor(self) -> Any:
        rows, columns = self._weights.shape
        create = (
            MPS.MPSCNNConvolutionDescriptor
            .cnnConvolutionDescriptorWithKernelWidth_kernelHeight_inputFeatureChannels_outputFeatureChannels_
        )  # fmt: skip
        made = create(1, 1, columns, rows)
        if self._neuron == MPS.MPSCNNNeuronTypeTanH:
            neuron = MPS.MPSNNNeuronDescriptor.cnnNeuronDescriptorWithType_a_b_(self._neuron, 1.0, 1.0)
            made.setFusedNeuronDescriptor_(neuron)
        elif self._neuron is not None:
            made.setFusedNeuronDescriptor_(MPS.MPSNNNeuronDescriptor.cnnNeuronDescriptorWithType_(self._neuron))
        return made

    def weights(self) -> bytes:
        return self._weights.tobytes()

    def biasTerms(self) -> bytes | None:
        return None if self._bias is None else self._bias.tobytes()

    def load(self) -> bool:
        return True

    def purge(self) -> None:
        pass

    def label(self) -> str | None:
        return "weights"


def script(kind: str, x: Array, dy: Array) -> tuple[Array, Array, list[Array], Any]:
    """Forward and gradient, as one would write it for Apple's library."""
    device = Metal.MTLCreateSystemDefaultDevice()
    queue = device.newCommandQueue()
    values = random_weights(kind, x.shape[2], dy.shape[2])
    cls, name = CREATE[kind]
    create = getattr(getattr(MPS, cls), f"create{name}DescriptorWithInputFeatureChannels_outputFeatureChannels_")
    described = create(x.shape[2], dy.shape[2])
    described.setUseFloat32Weights_(True)
    for prefix, id_prefix, neuron, _ in GATES[kind]:
        w, u, b = (
            values[swift.MPSRNNMatrixId[id_prefix + ending]]
            for ending in ("InputWeights", "RecurrentWeights", "BiasTerms")
        )
        for ending, source in (
            ("InputWeights", Weights(w, b, int(neuron[0]))),
            ("RecurrentWeights", Weights(u)),
        ):
            setter = member(prefix, ending)
            getattr(described, f"set{setter[0].upper()}{setter[1:]}_")(source)
    weights: list[Any] = []
    made = MPS.MPSRNNMatrixTrainingLayer.alloc().initWithDevice_rnnDescriptor_trainableWeights_(
        device, described, weights
    )
    made.setStoreAllIntermediateStates_(True)

    def matrices_of(array: Array) -> list[Any]:
        found = []
        for step in array:
            shape = MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_rowBytes_dataType_(
                step.shape[0], step.shape[1], step.strides[0], MPS.MPSDataTypeFloat32
            )
            buffer = device.newBufferWithBytes_length_options_(step.tobytes(), step.nbytes, 0)
            found.append(MPS.MPSMatrix.alloc().initWithBuffer_descriptor_(buffer, shape))
        return found

    def read(matrices: list[Any]) -> Array:
        return np.stack(
            [
                np.frombuffer(one.data().contents().as_buffer(one.data().length()), np.float32).reshape(
                    one.rows(), one.columns()
                )
                for one in matrices
            ]
        )

    sources, results = matrices_of(x), matrices_of(np.zeros_like(dy))
    slopes, dx = matrices_of(dy), matrices_of(np.zeros_like(x))
    dweights: list[Any] = []
    made.createWeightGradientMatrices_dataType_(dweights, MPS.MPSDataTypeFloat32)
    training: list[Any] = []
    states: list[Any] = []
    gradients: list[Any] = []
    commands = queue.commandBuffer()
    getattr(made, FORWARD)(commands, sources, None, results, None, training, None, states, weights)
    getattr(made, GRADIENT)(
        commands, sources, None, slopes, None, dx, None, dweights, training, None, gradients, weights
    )
    commands.commit()
    commands.waitUntilCompleted()
    assert commands.error() is None
    assert len(training) == len(states) == len(gradients) == len(x)
    return read(results), read(dx), [one._elements()[0] for one in dweights], states[-1]


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_both_spellings_give_the_same_bits(kind: str) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, 4)).astype(np.float32)
    dy = random.standard_normal((3, 2, 4)).astype(np.float32)
    y, dx, dweights, state = script(kind, x, dy)
    made, weights = layer(descriptor(kind, random_weights(kind, 4, 4)))
    passed = forward(made, weights, list(x))
    found = gradient(made, weights, passed, list(dy))
    assert_same_bits(y, np.stack(passed.y))
    assert_same_bits(dx, np.stack(found.dx))
    for got, want in zip(dweights, found.dweights, strict=True):
        assert_same_bits(got, want)
    last = state.getRecurrentOutputMatrixForLayerIndex_(0)
    assert isinstance(last, MPS.MPSMatrix)
    assert_same_bits(last._elements()[0], hidden(passed.states[0]))
    assert (state.getMemoryCellMatrixForLayerIndex_(0) is None) == (kind != "lstm")
    assert not state.isTemporary()


def test_the_short_selectors() -> None:
    device = Metal.MTLCreateSystemDefaultDevice()
    described = MPS.MPSGRUDescriptor.createGRUDescriptorWithInputFeatureChannels_outputFeatureChannels_(3, 2)
    described.setUseFloat32Weights_(True)
    described.setFlipOutputGates_(True)
    assert described.flipOutputGates() is True
    assert described.gatePnormValue() == 1
    assert described.layerSequenceDirection() == MPS.MPSRNNSequenceDirectionForward
    assert isinstance(described, MPS.MPSRNNDescriptor)
    described.setInputGateInputWeights_(Weights(np.ones((2, 3), np.float32), None, MPS.MPSCNNNeuronTypeSigmoid))
    described.setOutputGateInputWeights_(Weights(np.ones((2, 3), np.float32)))
    weights: list[Any] = []
    made = MPS.MPSRNNMatrixTrainingLayer.alloc().initWithDevice_rnnDescriptor_trainableWeights_(
        device, described, weights
    )
    assert (made.inputFeatureChannels(), made.outputFeatureChannels()) == (3, 2)
    assert len(weights) == 9
    assert all(isinstance(one, MPS.MPSMatrix) for one in weights)
    moments: list[Any] = []
    made.createWeightMatrices_(moments)
    commands = device.newCommandQueue().commandBuffer()
    temporary: list[Any] = []
    made.createTemporaryWeightGradientMatrices_dataType_commandBuffer_(temporary, MPS.MPSDataTypeFloat32, commands)
    assert temporary[0].readCount() == 1
    shape = MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_rowBytes_dataType_
    x, dx, y, dy, exported = (
        MPS.MPSMatrix.alloc().initWithDevice_descriptor_(device, shape(2, n, 4 * n, MPS.MPSDataTypeFloat32))
        for n in (3, 3, 2, 2, 3)
    )
    x._elements()[0] = 1
    dy._elements()[0] = 1
    training: list[Any] = []
    made.encodeForwardSequenceToCommandBuffer_sourceMatrices_destinationMatrices_trainingStates_weights_(
        commands, [x], [y], training, weights
    )
    gradient = (
        "encodeGradientSequenceToCommandBuffer_forwardSources_sourceGradients_destinationGradients_weightGradients_"
        "trainingStates_weights_"
    )
    getattr(made, gradient)(commands, [x], [dy], [dx], temporary, training, weights)
    made.encodeCopyWeightsToCommandBuffer_weights_matrixId_matrix_copyFromWeightsToMatrix_matrixOffset_(
        commands, temporary, MPS.MPSRNNMatrixIdGRUOutputGateInputWeights, exported, True, MPS.MTLOrigin(0, 0, 0)
    )
    commands.commit()
    commands.waitUntilCompleted()
    assert commands.error() is None
    z = 1 / (1 + np.exp(-3.0))
    np.testing.assert_allclose(y._elements()[0], 3 * z, rtol=1e-6)  # z h, with h = 1 + 1 + 1
    np.testing.assert_allclose(exported._elements()[0], 2 * z, rtol=1e-6)  # two rows
    copied = made.copyWithZone_device_(None, None)
    assert isinstance(copied, MPS.MPSRNNMatrixTrainingLayer)
    data, error = MPS.NSKeyedArchiver.archivedDataWithRootObject_requiringSecureCoding_error_(made, True, None)
    assert error is None
    restored, error = MPS.NSKeyedUnarchiver.unarchivedObjectOfClass_fromData_error_(
        MPS.MPSRNNMatrixTrainingLayer, data, None
    )
    assert error is None
    assert restored.outputFeatureChannels() == 2


def test_constants_are_those_of_apple() -> None:
    names = [name for name in MPS.__all__ if name.startswith("MPSRNNMatrixId") and "_count" not in name]
    numbers = {getattr(MPS, name): name for name in names}
    assert sorted(numbers) == list(range(29))
    assert MPS.MPSRNNMatrixId_count == 29
    assert numbers[0] == "MPSRNNMatrixIdSingleGateInputWeights"
    assert numbers[13] == "MPSRNNMatrixIdLSTMMemoryGateMemoryWeights"
    assert numbers[18] == "MPSRNNMatrixIdLSTMOutputGateBiasTerms"
    assert numbers[27] == "MPSRNNMatrixIdGRUOutputGateInputGateWeights"
    for number, name in numbers.items():
        assert name.lower() == f"mpsrnnmatrixid{swift.MPSRNNMatrixId(number).name}".lower()
    assert (MPS.MPSRNNSequenceDirectionForward, MPS.MPSRNNSequenceDirectionBackward) == (0, 1)
