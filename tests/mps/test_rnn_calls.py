"""retrograd.mps: how recurrent layers are called: offsets, temporary objects, archives, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.mps import (
    MPSCNNConvolutionDataSource,
    MPSCNNConvolutionDescriptor,
    MPSCNNNeuronType,
    MPSDataType,
    MPSGRUDescriptor,
    MPSLSTMDescriptor,
    MPSMatrix,
    MPSMatrixDescriptor,
    MPSNNNeuronDescriptor,
    MPSRNNDescriptor,
    MPSRNNMatrixId,
    MPSRNNMatrixTrainingLayer,
    MPSRNNMatrixTrainingState,
    MPSRNNRecurrentMatrixState,
    MPSRNNSequenceDirection,
    MPSRNNSingleGateDescriptor,
    MPSState,
    MPSTemporaryMatrix,
    MTLCommandBufferStatus,
    NSKeyedArchiver,
    NSKeyedUnarchiver,
)
from support.arrays import Array, assert_same_bits
from support.mps import DEVICE, QUEUE, matrix
from support.mps_rnn import (
    Source,
    descriptor,
    forward,
    gradient,
    hidden,
    layer,
    random_weights,
    run,
    state_of,
    values_of,
)


def steps(rows: list[int], columns: int, seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((count, columns)).astype(np.float32) for count in rows]


def a_layer(kind: str = "gru", **members: Any) -> Any:
    return layer(descriptor(kind, random_weights(kind, 3, 4)), **members)


# ---- sequences in one buffer -----------------------------------------------------------------------------------------


def test_one_matrix_with_byte_offsets() -> None:
    """A whole sequence in one buffer: the same matrix for each step, at another offset."""
    made, weights = a_layer()
    x, y = np.stack(steps([2] * 5, 3)), np.full((5, 2, 4), 7, np.float32)
    expected = forward(made, weights, list(x))

    def first(array: Array) -> MPSMatrix:
        shape = MPSMatrixDescriptor(
            rows=2, columns=array.shape[2], rowBytes=array.strides[1], dataType=MPSDataType.float32
        )
        return MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=array), descriptor=shape)

    training: list[Any] = []
    buffer = QUEUE.makeCommandBuffer()
    made.encodeForwardSequence(
        buffer, [first(x)] * 5, range(0, 5 * 24, 24), [first(y)] * 5, range(0, 5 * 32, 32), training, weights=weights
    )
    dy, dx = np.stack(steps([2] * 5, 4, 1)), np.full((5, 2, 3), 7, np.float32)
    made.encodeGradientSequence(
        buffer,
        [first(x)] * 5,
        range(0, 5 * 24, 24),
        [first(dy)] * 5,
        range(0, 5 * 32, 32),
        [first(dx)] * 5,
        range(0, 5 * 24, 24),
        None,
        training,
        weights=weights,
    )
    run(buffer)
    assert_same_bits(y, np.stack(expected.y))
    assert_same_bits(dx, np.stack(gradient(made, weights, expected, list(dy)).dx))


def test_offsets_that_are_refused() -> None:
    made, weights = a_layer()
    x, y = steps([2, 2], 3), steps([2, 2], 4)
    sources, results = [matrix(step) for step in x], [matrix(step) for step in y]
    for offsets, error, message in [
        ([0], ValueError, "sourceOffsets has 1 elements, but sourceMatrices has 2"),
        ([0, 4], ValueError, r"sourceMatrices\[1\] with an offset of 4 needs 28 bytes, but its buffer has 24"),
        ([0, -1], ValueError, r"sourceOffsets\[1\] is -1"),
        ([0, "a"], TypeError, r"sourceOffsets\[1\] must be an int"),
        (5, TypeError, "sourceOffsets must be a list or None, not int"),
    ]:
        with pytest.raises(error, match=message):
            made.encodeForwardSequence(QUEUE.makeCommandBuffer(), sources, offsets, results, None, [], weights=weights)
    wide = np.zeros((2, 6), np.float32)
    narrow = MPSMatrixDescriptor(rows=1, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    part = MPSMatrix(buffer=DEVICE.makeBuffer(bytesNoCopy=wide), descriptor=narrow)
    with pytest.raises(ValueError, match="offset of 2, not a multiple of the element's 4 bytes"):
        made.encodeForwardSequence(
            QUEUE.makeCommandBuffer(), [part], [2], [matrix(y[0][:1].copy())], None, [], weights=weights
        )


# ---- temporary objects -----------------------------------------------------------------------------------------------


def test_temporary_objects_last_for_their_reads() -> None:
    made, weights = a_layer(
        "lstm", recurrentOutputIsTemporary=True, trainingStateIsTemporary=True, storeAllIntermediateStates=True
    )
    x, y, dy = steps([2, 1], 3), steps([2, 1], 4), steps([2, 1], 4, 1)
    training: list[MPSRNNMatrixTrainingState] = []
    states: list[MPSRNNRecurrentMatrixState] = []
    temporary: list[MPSMatrix] = []
    buffer = QUEUE.makeCommandBuffer()
    made.createTemporaryWeightGradientMatrices(temporary, MPSDataType.float32, buffer)
    assert all(isinstance(one, MPSTemporaryMatrix) and one.readCount == 1 for one in temporary)
    sources = [matrix(step) for step in x]
    results = [matrix(step) for step in y]
    made.encodeForwardSequence(buffer, sources, None, results, None, training, None, states, weights)
    assert len(training) == len(states) == 2
    assert all(isinstance(one, MPSState) and one.isTemporary and one.readCount == 1 for one in [*training, *states])
    training[0].readCount = 2
    for repeat in range(2):
        call: Callable[[], None] = lambda: made.encodeGradientSequence(  # noqa: E731
            commandBuffer=buffer,
            forwardSources=sources,
            sourceGradients=[matrix(step) for step in dy],
            weightGradients=temporary,
            trainingStates=training,
            weights=weights,
        )
        if repeat:
            with pytest.raises(
                ValueError, match=r"trainingStates\[1\]: its readCount reached 0, so the contents are gone"
            ):
                call()
            assert training[0].readCount == 1
        else:
            call()
    result = np.zeros((1, 4), np.float32)
    slot = MPSRNNMatrixId.lstmInputGateBiasTerms
    made.encodeCopyWeights(buffer, temporary, slot, matrix(result), True)
    with pytest.raises(ValueError, match="readCount is 0, so the contents are gone"):
        made.encodeCopyWeights(buffer, temporary, slot, matrix(result), True)
    states[1].readCount = 2
    for _ in range(2):
        made.encodeForwardSequence(
            buffer, [matrix(x[1])], None, [matrix(np.zeros((1, 4), np.float32))], None, [], states[1], None, weights
        )
    for count in (0, 3):  # once it was 0, setting it brings nothing back
        states[1].readCount = count
        with pytest.raises(ValueError, match="recurrentInputState: its readCount reached 0, so the contents are gone"):
            made.encodeForwardSequence(buffer, [matrix(x[1])], None, results[1:], None, [], states[1], None, weights)
    gone = states[1].getRecurrentOutputMatrix(0)
    assert isinstance(gone, MPSTemporaryMatrix)
    assert gone.readCount == 0
    run(buffer)
    plain, _ = a_layer("lstm")
    passed = forward(plain, weights, x)
    assert_same_bits(result, gradient(plain, weights, passed, dy).dweights[2])
    assert not passed.states[0].isTemporary


def test_states_belong_to_layers() -> None:
    made, weights = a_layer("lstm")
    state = forward(made, weights, steps([2], 3)).states[0]
    assert values_of(state.getMemoryCellMatrix(0)).shape == (2, 4)
    assert state.getRecurrentOutputMatrix(1) is None
    assert state.getMemoryCellMatrix(1) is None
    gru, gru_weights = a_layer("gru")
    with pytest.raises(ValueError, match="recurrentInputState has 2 matrices, but this layer has the states h"):
        forward(gru, gru_weights, steps([2], 3), state)


# ---- archives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_archives_keep_the_layer_without_its_weights(kind: str) -> None:
    values = random_weights(kind, 3, 4, "fo" if kind == "lstm" else "")
    made, weights = layer(descriptor(kind, values), accumulateWeightGradients=True, label="mine")
    data = NSKeyedArchiver.archivedData(withRootObject=made, requiringSecureCoding=True)
    restored = NSKeyedUnarchiver.unarchivedObject(ofClass=MPSRNNMatrixTrainingLayer, from_=data)
    assert restored._cell == made._cell
    assert restored.accumulateWeightGradients
    assert restored.label == "mine"
    x = steps([2, 1], 3)
    assert_same_bits(forward(restored, weights, x).y[1], forward(made, weights, x).y[1])
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(made)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lstm", "wxyz", "cell.kind is 'wxyz'"),
        ("ifgo", "ofgi", "cell.memory is 'ofgi', must be letters of 'ifgo' in order"),
    ],
)
def test_damaged_archives_are_refused(old: str, new: str, message: str) -> None:
    made, _ = layer(descriptor("lstm", random_weights("lstm", 3, 4, "ifgo")))
    data = NSKeyedArchiver.archivedData(withRootObject=made)
    assert data.count(old.encode()) == 1
    with pytest.raises(ValueError, match=message):
        NSKeyedUnarchiver.unarchivedObject(MPSRNNMatrixTrainingLayer, data.replace(old.encode(), new.encode()))


# ---- descriptors and data sources ------------------------------------------------------------------------------------


def test_members_and_defaults() -> None:
    made = MPSLSTMDescriptor.createLSTMDescriptor(withInputFeatureChannels=3, outputFeatureChannels=4)
    assert (made.inputFeatureChannels, made.outputFeatureChannels) == (3, 4)
    assert not made.useFloat32Weights
    assert not made.useLayerInputUnitTransformMode
    assert not made.memoryWeightsAreDiagonal
    assert made.layerSequenceDirection == MPSRNNSequenceDirection.forward
    assert made.cellToOutputNeuronType == MPSCNNNeuronType.tanH
    assert made.cellToOutputNeuronParamA == made.cellToOutputNeuronParamB == made.cellToOutputNeuronParamC == 1
    gru = MPSGRUDescriptor.createGRUDescriptor(1, 1)
    assert gru.gatePnormValue == 1
    assert not gru.flipOutputGates
    assert gru.outputGateInputGateWeights is None
    with pytest.raises(TypeError, match="MPSRNNDescriptor is abstract"):
        MPSRNNDescriptor()
    with pytest.raises(AttributeError, match="has no member inputGateWeights"):
        gru.inputGateWeights = None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="layerSequenceDirection is 2"):
        gru.layerSequenceDirection = 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="tanH has the parameter b, which is not given"):
        MPSNNNeuronDescriptor.cnnNeuronDescriptor(MPSCNNNeuronType.tanH, 1.0)
    single = MPSRNNSingleGateDescriptor.createRNNSingleGateDescriptor(2, 2)
    with pytest.raises(TypeError, match="must be an MPSCNNConvolutionDataSource, but ndarray has no method dataType"):
        single.inputWeights = np.eye(2)  # type: ignore[assignment]
    source: MPSCNNConvolutionDataSource = Source(np.eye(2, dtype=np.float32))
    single.inputWeights = source
    assert single.inputWeights is source
    described = MPSCNNConvolutionDescriptor(
        kernelWidth=1, kernelHeight=1, inputFeatureChannels=2, outputFeatureChannels=2
    )
    described.setNeuronType(MPSCNNNeuronType.tanH, 1.5, 0.5)
    assert described.fusedNeuronDescriptor is not None
    assert described.fusedNeuronDescriptor.a == 1.5


class Other(Source):
    """A data source of which one answer is another."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(np.eye(4, 3, dtype=np.float32))
        for name, answer in answers.items():
            setattr(self, name, lambda answer=answer: answer)


def shape(**changed: int) -> MPSCNNConvolutionDescriptor:
    given = {"kernelWidth": 1, "kernelHeight": 1, "inputFeatureChannels": 3, "outputFeatureChannels": 4}
    return MPSCNNConvolutionDescriptor(**{**given, **changed})


CREATED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"outputGateInputGateWeights": Source(np.eye(4, dtype=np.float32))}, ValueError, "no product with z h0"),
    ({"gatePnormValue": 2.0}, ValueError, "gatePnormValue is 2.0, must be 1: the GRU here has no p-norm gates"),
    ({"gatePnormValue": np.nan}, ValueError, "gatePnormValue is nan"),
    ({"inputFeatureChannels": 0}, ValueError, "inputFeatureChannels is 0, must be at least 1"),
    ({"outputFeatureChannels": 5}, ValueError, "is described as 4 outputs x 3 inputs, must be 5 outputs x 3 inputs"),
    ({"useLayerInputUnitTransformMode": True}, ValueError, "3 input and 4 output channels"),
    ({"inputGateInputWeights": Other(load=False)}, RuntimeError, r"load\(\) of the data source returned False"),
    ({"inputGateInputWeights": Other(dataType=8)}, TypeError, "must be float32 or float16"),
    ({"inputGateInputWeights": Other(descriptor=None)}, TypeError, r"descriptor\(\) must be an MPSCNNConvolution"),
    ({"inputGateInputWeights": Other(descriptor=shape(kernelWidth=3))}, ValueError, "kernel of 1 x 3, must be 1 x 1"),
    ({"inputGateInputWeights": Other(weights=np.eye(4, 3))}, TypeError, "elements of type float64, must be of float32"),
    ({"inputGateInputWeights": Other(weights=bytes(44))}, ValueError, "has 44 bytes, must have 12 elements of float32"),
    ({"inputGateInputWeights": Other(weights=None)}, TypeError, r"weights\(\)"),
    ({"inputGateInputWeights": Other(biasTerms=bytes(12))}, ValueError, r"biasTerms\(\) has 12 bytes"),
]


@pytest.mark.parametrize(("members", "error", "message"), CREATED)
def test_descriptors_that_are_refused(members: dict[str, Any], error: type[Exception], message: str) -> None:
    described = descriptor("gru", random_weights("gru", 3, 4), **members)
    weights: list[Any] = []
    with pytest.raises(error, match=message):
        MPSRNNMatrixTrainingLayer(device=DEVICE, rnnDescriptor=described, trainableWeights=weights)
    assert not weights


@pytest.mark.parametrize("kind", [MPSCNNNeuronType.power, MPSCNNNeuronType.exponential, MPSCNNNeuronType.logarithm])
def test_neurons_that_the_engine_does_not_have(kind: MPSCNNNeuronType) -> None:
    described = descriptor("rnn", random_weights("rnn", 3, 4), [(kind, 1.0, 1.0, 2.0)])
    with pytest.raises(ValueError, match=f"neuron {kind.name} is not a function of the gates"):
        layer(described)
    lstm = descriptor("lstm", random_weights("lstm", 3, 4), cellToOutputNeuronType=kind)
    with pytest.raises(ValueError, match=f"neuron {kind.name} is not a function of the gates"):
        layer(lstm)


def test_arguments_of_the_initializer() -> None:
    described = descriptor("gru", random_weights("gru", 3, 4))
    for arguments, message in [
        ((None, described, []), "device must be an MTLDevice"),
        ((DEVICE, None, []), "rnnDescriptor is missing"),
        ((DEVICE, 5, []), "rnnDescriptor must be an MPSRNNDescriptor, not int"),
        ((DEVICE, described, None), "trainableWeights is missing"),
        ((DEVICE, described, ()), "trainableWeights is not a list but tuple"),
    ]:
        with pytest.raises(TypeError, match=message):
            MPSRNNMatrixTrainingLayer(*arguments)  # type: ignore[arg-type]


# ---- encodes that are refused ----------------------------------------------------------------------------------------


def forward_operands(matrices: list[MPSMatrix], **changed: Any) -> dict[str, Any]:
    operands: dict[str, Any] = {
        "commandBuffer": QUEUE.makeCommandBuffer(),
        "sourceMatrices": [matrix(step) for step in steps([2, 2], 3)],
        "destinationMatrices": [matrix(step) for step in steps([2, 2], 4)],
        "trainingStates": [],
        "weights": matrices,
    }
    return operands | changed


def some(rows: list[int], columns: int, dtype: Any = np.float32) -> list[MPSMatrix]:
    return [matrix(np.zeros((count, columns), dtype)) for count in rows]


def integers() -> MPSMatrix:
    shape_ = MPSMatrixDescriptor(rows=2, columns=3, rowBytes=12, dataType=MPSDataType.int32)
    return MPSMatrix(device=DEVICE, descriptor=shape_)


FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: None}, TypeError, f"{name} is missing")
        for name in ("commandBuffer", "sourceMatrices", "destinationMatrices", "trainingStates", "weights")
    ),
    ({"sourceMatrices": []}, ValueError, "sourceMatrices is empty"),
    ({"sourceMatrices": 5}, TypeError, "sourceMatrices must be a list, not int"),
    ({"sourceMatrices": [None, None]}, TypeError, r"sourceMatrices\[0\] is missing"),
    ({"sourceMatrices": [np.zeros((2, 3))] * 2}, TypeError, r"sourceMatrices\[0\] must be an MPSMatrix, not ndarray"),
    ({"sourceMatrices": some([2, 2], 4)}, ValueError, r"sourceMatrices\[0\] is 2 x 4, must have 3 columns"),
    ({"sourceMatrices": some([1, 2], 3)}, ValueError, r"sourceMatrices\[1\] has 2 rows, but sourceMatrices\[0\] has"),
    ({"sourceMatrices": [integers()] * 2}, TypeError, r"sourceMatrices\[0\] is of int32"),
    ({"sourceMatrices": [matrix(np.zeros((3, 2, 3), np.float32))] * 2}, ValueError, "has 3 matrices, must have 1"),
    ({"destinationMatrices": some([2], 4)}, ValueError, "destinationMatrices has 1 elements, must have 2"),
    ({"destinationMatrices": some([2, 1], 4)}, ValueError, r"destinationMatrices\[1\] is 1 x 4, must have 2 x 4"),
    ({"trainingStates": ()}, TypeError, "trainingStates is not a list but tuple"),
    ({"recurrentOutputStates": 5}, TypeError, "recurrentOutputStates is not a list but int"),
    ({"recurrentInputState": 5}, TypeError, "recurrentInputState must be an MPSRNNRecurrentMatrixState, not int"),
    ({"weights": []}, ValueError, "weights has 0 elements, must have 9"),
    ({"weights": some([4] * 9, 4)}, ValueError, r"weights\[0\] is 4 x 4, must have 4 x 3"),
]


@pytest.mark.parametrize(("changed", "error", "message"), FORWARD)
def test_forward_encodes_that_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    made, weights = a_layer()
    operands = forward_operands(weights, **changed)
    with pytest.raises(error, match=message):
        made.encodeForwardSequence(**operands)
    assert not operands["trainingStates"]
    if changed.get("commandBuffer", operands) is not None:
        assert not operands["commandBuffer"]._work


def test_other_refusals() -> None:
    made, weights = a_layer()
    half: list[MPSMatrix] = []
    made.createWeightGradientMatrices(half, MPSDataType.float16)
    with pytest.raises(TypeError, match=r"weights\[0\] is of float16, must be of float32 as the weights of this layer"):
        made.encodeForwardSequence(**forward_operands(half))
    with pytest.raises(ValueError, match="dataType is int32, must be float32 or float16"):
        made.createWeightGradientMatrices([], MPSDataType.int32)
    short = state_of(made, weights, np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="recurrentInputState has 1 rows, but the first of sourceMatrices has 2"):
        made.encodeForwardSequence(**forward_operands(weights, recurrentInputState=short))
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = False
    square, square_weights = layer(descriptor("rnn", random_weights("rnn", 3, 3)))
    with pytest.raises(ValueError, match=r"destinationMatrices\[0\] lies in read-only memory"):
        square.encodeForwardSequence(
            QUEUE.makeCommandBuffer(), some([2], 3), None, [matrix(array)], None, [], weights=square_weights
        )
    one = some([2], 3)
    with pytest.raises(ValueError, match=r"destinationMatrices\[0\] overlaps sourceMatrices\[0\]"):
        square.encodeForwardSequence(QUEUE.makeCommandBuffer(), one, None, one, None, [], weights=square_weights)
    with pytest.raises(ValueError, match=r"destinationMatrices\[0\] overlaps destinationMatrices\[1\]"):
        square.encodeForwardSequence(
            QUEUE.makeCommandBuffer(), some([2, 2], 3), None, one * 2, None, [], weights=square_weights
        )
    buffer = QUEUE.makeCommandBuffer()
    buffer.commit()
    with pytest.raises(RuntimeError, match="committed already"):
        made.encodeForwardSequence(**forward_operands(weights, commandBuffer=buffer))


def test_gradient_encodes_that_are_refused() -> None:
    made, weights = a_layer()
    passed = forward(made, weights, steps([2, 2], 3))
    other = forward(made, weights, steps([2, 2], 3))
    flipped, _ = layer(descriptor("gru", random_weights("gru", 3, 4), flipOutputGates=True))
    state = state_of(made, weights, np.zeros((3, 4), np.float32))

    def operands(**changed: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "commandBuffer": QUEUE.makeCommandBuffer(),
            "forwardSources": passed.sources,
            "sourceGradients": some([2, 2], 4),
            "destinationGradients": some([2, 2], 3),
            "trainingStates": passed.training,
            "weights": weights,
        }
        return given | changed

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"forwardSources": None}, TypeError, "forwardSources is missing"),
        ({"sourceGradients": None}, TypeError, "sourceGradients is missing"),
        ({"trainingStates": None}, TypeError, "trainingStates is missing"),
        ({"weights": None}, TypeError, "weights is missing"),
        ({"destinationGradients": None}, ValueError, "needs destinationGradients, weightGradients or recurrentOutput"),
        ({"destinationGradients": None, "destinationOffsets": [0, 0]}, ValueError, "without destinationGradients"),
        ({"trainingStates": passed.training[:1]}, ValueError, "trainingStates has 1 elements, must have 2"),
        ({"trainingStates": passed.training[::-1]}, ValueError, "must be consecutive steps of one forward pass"),
        ({"trainingStates": [passed.training[0], other.training[1]]}, ValueError, "consecutive steps of one"),
        ({"trainingStates": [5, 5]}, TypeError, r"trainingStates\[0\] must be an MPSRNNMatrixTrainingState, not int"),
        ({"sourceGradients": some([2, 1], 4)}, ValueError, r"sourceGradients\[1\] is 1 x 4, must have 2 x 4"),
        (
            {
                "forwardSources": some([2, 1], 3),
                "sourceGradients": some([2, 1], 4),
                "destinationGradients": some([2, 1], 3),
            },
            ValueError,
            r"forwardSources have \[2, 1\] rows, but the forward pass had \[2, 2\]",
        ),
        ({"recurrentInputState": state}, ValueError, "recurrentInputState has 3 rows, but the first of forwardSources"),
        ({"weightGradients": weights}, ValueError, r"weightGradients\[\d\] overlaps weights\[\d\]"),
        ({"weightGradients": weights[1:]}, ValueError, "weightGradients has 8 elements, must have 9"),
    ]
    for changed, error, message in cases:
        with pytest.raises(error, match=message):
            made.encodeGradientSequence(**operands(**changed))
    with pytest.raises(ValueError, match="trainingStates are of a layer with another descriptor"):
        flipped.encodeGradientSequence(**operands())
    assert hidden(state).shape == (3, 4)


def test_a_gradient_before_its_forward_pass_fails_in_the_buffer() -> None:
    made, weights = a_layer()
    late, training = QUEUE.makeCommandBuffer(), []  # type: ignore[var-annotated]
    sources = some([2], 3)
    made.encodeForwardSequence(late, sources, None, some([2], 4), None, training, weights=weights)
    early = QUEUE.makeCommandBuffer()
    result = np.full((2, 3), 7, np.float32)
    made.encodeGradientSequence(
        commandBuffer=early,
        forwardSources=sources,
        sourceGradients=some([2], 4),
        destinationGradients=[matrix(result)],
        trainingStates=training,
        weights=weights,
    )
    early.commit()
    early.waitUntilCompleted()
    assert early.status == MTLCommandBufferStatus.error
    assert early.error is not None
    assert "the forward pass of these training states has not run" in early.error.localizedDescription
    assert (result == 7).all()


def test_copies_that_are_refused() -> None:
    made, weights = a_layer()
    target = matrix(np.zeros((4, 4), np.float32))
    for changed, error, message in [
        ({"matrixId": 27}, ValueError, "matrixId is 27 .gruOutputGateInputGateWeights., but this layer has the ids 19"),
        ({"matrixId": 3}, ValueError, "matrixId is 3 .lstmInputGateInputWeights."),
        ({"matrixId": 29}, ValueError, "matrixId is 29, which is not an MPSRNNMatrixId"),
        ({"matrixId": None}, TypeError, "matrixId must be an int"),
        ({"matrix": None}, TypeError, "matrix is missing"),
        ({"matrixOffset": (0, 2, 0)}, ValueError, r"4 x 3 from matrixOffset \(0, 2\) reach beyond matrix, 4 x 4"),
        ({"matrixOffset": (0, 0, 1)}, ValueError, "matrixOffset.z is 1, must be 0"),
        ({"copyFromWeightsToMatrix": None}, TypeError, "copyFromWeightsToMatrix must be a bool"),
        ({"weights": weights[:3]}, ValueError, "weights has 3 elements, must have 9"),
    ]:
        given: dict[str, Any] = {
            "commandBuffer": QUEUE.makeCommandBuffer(),
            "weights": weights,
            "matrixId": MPSRNNMatrixId.gruInputGateInputWeights,
            "matrix": target,
            "copyFromWeightsToMatrix": True,
            "matrixOffset": (0, 0, 0),
        }
        with pytest.raises(error, match=message):
            made.encodeCopyWeights(**(given | changed))  # type: ignore[arg-type]
