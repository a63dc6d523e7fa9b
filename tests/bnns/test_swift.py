"""The Swift face of retrograd.bnns."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import normal

SHAPE = BNNS.Shape.imageCHW(5, 2, 3)


def layer(type: Any, **fields: Any) -> Any:
    return BNNS.NormalizationLayer(
        **{"type": type, "input": SHAPE.descriptor(), "output": SHAPE.descriptor(), "epsilon": 1e-3, **fields}
    )


TYPES = {
    "batch": (BNNS.NormalizationType.batch(), bnns.BNNSBatchNorm, {}),
    "instance": (BNNS.NormalizationType.instance(), bnns.BNNSInstanceNorm, {}),
    "layer": (BNNS.NormalizationType.layer(normalizationAxis=1), bnns.BNNSLayerNorm, {"normalization_axis": 1}),
    "group": (BNNS.NormalizationType.group(groupCount=3), bnns.BNNSGroupNorm, {"num_groups": 3}),
}


@pytest.mark.parametrize("kind", TYPES)
def test_the_same_numbers_as_the_functions(kind: str) -> None:
    type, number, fields = TYPES[kind]
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    parameter = (2, 5) if kind == "layer" else (3,)
    gamma, beta = (bnns.BNNSNDArrayDescriptor.from_array(normal(*parameter, seed=seed)) for seed in (2, 3))
    swift = layer(type, beta=beta, gamma=gamma, momentum=0.9, activation=BNNS.ActivationFunction.elu(alpha=0.5))
    plain = bnns.BNNSFilterCreateLayerNormalization(
        number,
        bnns.BNNSLayerParametersNormalization(
            i_desc=SHAPE.descriptor(),
            o_desc=SHAPE.descriptor(),
            beta_desc=beta,
            gamma_desc=gamma,
            momentum=0.9,
            epsilon=1e-3,
            activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionELU, 0.5),
            **fields,
        ),
    )
    y, y2 = np.empty_like(x), np.empty_like(x)
    swift.apply(batchSize=4, input=SHAPE.descriptor(x), output=SHAPE.descriptor(y), for_=BNNS.LearningPhase.training)
    assert bnns.BNNSNormalizationFilterApplyBatch(plain, 4, x, 30, y2, 30, True) == 0
    assert np.array_equal(y, y2)
    results, results2 = ([np.empty_like(x), *(np.empty(parameter, np.float32) for _ in range(2))] for _ in range(2))
    swift.applyBackward(
        batchSize=4,
        input=SHAPE.descriptor(x),
        output=SHAPE.descriptor(y),
        outputGradient=SHAPE.descriptor(dy),
        generatingInputGradient=SHAPE.descriptor(results[0]),
        generatingBetaGradient=bnns.BNNSNDArrayDescriptor.from_array(results[1]),
        generatingGammaGradient=bnns.BNNSNDArrayDescriptor.from_array(results[2]),
    )
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        plain, 4, SHAPE.descriptor(results2[0]), 30, y, 30, SHAPE.descriptor(dy), 30,
        *(bnns.BNNSNDArrayDescriptor.from_array(a) for a in results2[1:]),
    )  # fmt: skip
    assert status == 0
    for got, want in zip(results, results2, strict=True):
        assert np.array_equal(got, want)


def test_moving_statistics_and_inference() -> None:
    mean, variance = np.zeros(3, np.float32), np.ones(3, np.float32)
    moving = (bnns.BNNSNDArrayDescriptor.from_array(a) for a in (mean, variance))
    swift = layer(BNNS.NormalizationType.batch(*moving), momentum=0.5)
    x = normal(4, 3, 2, 5)
    y = SHAPE.descriptor(np.empty_like(x))
    swift.apply(batchSize=4, input=SHAPE.descriptor(x), output=y, for_=BNNS.LearningPhase.training)
    assert np.allclose(mean, 0.5 * x.mean((0, 2, 3)), atol=1e-6)
    before = mean.copy()
    swift.apply(batchSize=4, input=SHAPE.descriptor(x), output=y, for_=BNNS.LearningPhase.inference)
    assert np.array_equal(mean, before)


def test_where_swift_throws_this_raises() -> None:
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*num_groups is 2") as failure:
        layer(BNNS.NormalizationType.group(groupCount=2))
    assert failure.value.case == "unableToCreateLayer"
    swift = layer(BNNS.NormalizationType.batch())
    x = SHAPE.descriptor(normal(4, 3, 2, 5))
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: output has no data"):
        swift.apply(batchSize=4, input=x, output=SHAPE.descriptor(), for_=BNNS.LearningPhase.training)
    counts = r"layerApplyFail: input has 29 elements of BNNSDataTypeFloat32, but the layer was made for 30 of"
    with pytest.raises(BNNS.Error, match=counts):
        swift.apply(
            batchSize=1, input=BNNS.Shape.vector(29).descriptor(x.data), output=x, for_=BNNS.LearningPhase.training
        )
    half = SHAPE.descriptor(np.zeros(120, np.float16), bnns.BNNSDataTypeFloat16)
    with pytest.raises(
        BNNS.Error, match=r"output has 30 elements of BNNSDataTypeFloat16, but .* of BNNSDataTypeFloat32"
    ):
        swift.apply(batchSize=4, input=x, output=half, for_=BNNS.LearningPhase.training)
    gaps = BNNS.Shape.vector(30, stride=2).descriptor(np.zeros(240, np.float32))
    with pytest.raises(
        BNNS.Error, match=r"output has size \(30,\) and stride \(2,\).* made for \(5, 2, 3\) and \(1, 5, 10\)"
    ):
        swift.apply(batchSize=4, input=x, output=gaps, for_=BNNS.LearningPhase.training)
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*out has 480 bytes"):
        swift.apply(batchSize=5, input=x, output=x, for_=BNNS.LearningPhase.training)
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*no training pass"):
        swift.applyBackward(batchSize=4, output=x, outputGradient=x, generatingInputGradient=x)
    with pytest.raises(TypeError, match="LearningPhase"):
        swift.apply(batchSize=4, input=x, output=x, for_=True)


def test_arrays_of_another_shape_and_as_many_elements() -> None:
    """As in Apple's sample of digits: a vector where an image was declared, forward and backward."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    vector, training = BNNS.Shape.vector(30), BNNS.LearningPhase.training
    results = []
    for shape in (SHAPE, vector):
        swift = layer(BNNS.NormalizationType.batch(), activation=BNNS.ActivationFunction.tanh)
        y, dx = np.empty_like(x), np.empty_like(x)
        swift.apply(batchSize=4, input=shape.descriptor(x), output=shape.descriptor(y), for_=training)
        swift.applyBackward(
            batchSize=4,
            output=shape.descriptor(y),
            outputGradient=shape.descriptor(dy),
            generatingInputGradient=shape.descriptor(dx),
        )
        results.append((y, dx))
    assert all(map(np.array_equal, *results))


def test_the_meaning_of_momentum() -> None:
    x = normal(4, 3, 2, 5)
    mean, variance = np.ones(3, np.float32), np.ones(3, np.float32)
    moving = (bnns.BNNSNDArrayDescriptor.from_array(a) for a in (mean, variance))
    swift = layer(BNNS.NormalizationType.batch(*moving), momentum=0.25, momentumWeighs="new")
    y = SHAPE.descriptor(np.empty_like(x))
    swift.apply(batchSize=4, input=SHAPE.descriptor(x), output=y, for_=BNNS.LearningPhase.training)
    assert np.allclose(mean, 0.75 + 0.25 * x.mean((0, 2, 3)), atol=1e-6)


def test_memory_is_released_by_with_and_by_garbage_collection() -> None:
    taken: list[bytearray] = []

    def alloc(memptr: Any, alignment: int, size: int) -> int:
        taken.append(bytearray(size))
        memptr[0] = taken[-1]
        return 0

    def free(block: Any) -> None:
        taken[:] = [one for one in taken if one is not block]

    parameters = bnns.BNNSFilterParameters(0, 0, alloc, free)
    x = SHAPE.descriptor(normal(4, 3, 2, 5))
    with layer(BNNS.NormalizationType.batch(), filterParameters=parameters) as swift:
        swift.apply(batchSize=4, input=x, output=x, for_=BNNS.LearningPhase.training)
        assert taken
    assert not taken
    with pytest.raises(BNNS.Error, match="destroyed"):
        swift.apply(batchSize=4, input=x, output=x, for_=BNNS.LearningPhase.training)
    swift = layer(BNNS.NormalizationType.batch(), filterParameters=parameters)
    swift.apply(batchSize=4, input=x, output=x, for_=BNNS.LearningPhase.training)
    assert taken
    del swift
    gc.collect()
    assert not taken


def test_activation_functions_carry_apples_numbers() -> None:
    functions = {
        BNNS.ActivationFunction.identity: (0, 0, 0),
        BNNS.ActivationFunction.rectifiedLinear: (1, 0, 0),
        BNNS.ActivationFunction.leakyRectifiedLinear(alpha=0.5): (2, 0.5, 0),
        BNNS.ActivationFunction.sigmoid: (3, 0, 0),
        BNNS.ActivationFunction.tanh: (4, 0, 0),
        BNNS.ActivationFunction.scaledTanh(alpha=1, beta=2): (5, 1, 2),
        BNNS.ActivationFunction.abs: (6, 0, 0),
        BNNS.ActivationFunction.linear(alpha=3): (7, 3, 0),
        BNNS.ActivationFunction.clamp(bounds=(-1, 2)): (8, -1, 2),
        BNNS.ActivationFunction.softmax: (11, 0, 0),
        BNNS.ActivationFunction.geluApproximation(alpha=1, beta=2): (12, 1, 2),
        BNNS.ActivationFunction.gumbel(alpha=1, beta=2): (13, 1, 2),
        BNNS.ActivationFunction.gumbelMax(alpha=1, beta=2): (14, 1, 2),
        BNNS.ActivationFunction.hardSigmoid(alpha=1, beta=2): (15, 1, 2),
        BNNS.ActivationFunction.softplus(alpha=1, beta=2): (16, 1, 2),
        BNNS.ActivationFunction.softsign: (17, 0, 0),
        BNNS.ActivationFunction.elu(alpha=1): (18, 1, 0),
        BNNS.ActivationFunction.clampedLeakyRectifiedLinear(alpha=1, beta=2): (19, 1, 2),
        BNNS.ActivationFunction.linearWithBias(alpha=1, beta=2): (20, 1, 2),
        BNNS.ActivationFunction.logSoftmax: (21, 0, 0),
        BNNS.ActivationFunction.logSigmoid: (22, 0, 0),
        BNNS.ActivationFunction.selu: (23, 0, 0),
        BNNS.ActivationFunction.celu(alpha=1): (24, 1, 0),
        BNNS.ActivationFunction.hardShrink(alpha=1): (25, 1, 0),
        BNNS.ActivationFunction.softShrink(alpha=1): (26, 1, 0),
        BNNS.ActivationFunction.tanhShrink: (27, 0, 0),
        BNNS.ActivationFunction.threshold(alpha=1, beta=2): (28, 1, 2),
        BNNS.ActivationFunction.geluApproximation2(alpha=1, beta=2): (30, 1, 2),
    }
    for function, (number, alpha, beta) in functions.items():
        structure = function.bnnsActivation
        assert (structure.function, structure.alpha, structure.beta) == (number, alpha, beta)


def test_shapes() -> None:
    cases = {
        BNNS.Shape.vector(7): (1, bnns.BNNSDataLayoutVector, (7,), 7),
        BNNS.Shape.vector(7, stride=2): (1, bnns.BNNSDataLayoutVector, (7,), 14),
        BNNS.Shape.matrixRowMajor(4, 3): (2, bnns.BNNSDataLayoutRowMajorMatrix, (4, 3), 12),
        BNNS.Shape.matrixColumnMajor(4, 3): (2, bnns.BNNSDataLayoutColumnMajorMatrix, (4, 3), 12),
        BNNS.Shape.matrixFirstMajor(4, 3, stride=(1, 5)): (2, bnns.BNNSDataLayout2DFirstMajor, (4, 3), 20),
        BNNS.Shape.matrixLastMajor(4, 3, stride=(1, 5)): (2, bnns.BNNSDataLayout2DLastMajor, (4, 3), 15),
        BNNS.Shape.imageCHW(5, 4, 3): (3, bnns.BNNSDataLayoutImageCHW, (5, 4, 3), 60),
        BNNS.Shape.convolutionWeightsOIHW(3, 3, 2, 4): (4, bnns.BNNSDataLayoutConvolutionWeightsOIHW, (3, 3, 2, 4), 72),
        BNNS.Shape.tensor3DFirstMajor(2, 3, 4): (3, bnns.BNNSDataLayout3DFirstMajor, (2, 3, 4), 24),
        BNNS.Shape.tensor8DLastMajor(*range(1, 9)): (8, bnns.BNNSDataLayout8DLastMajor, tuple(range(1, 9)), 40320),
    }
    for shape, (rank, layout, size, batch_stride) in cases.items():
        assert (shape.rank, shape.layout, shape.size, shape.batchStride) == (rank, layout, size, batch_stride), shape
    with pytest.raises(ValueError, match="BNNSDataLayout3DFirstMajor has 3 axes, not 2"):
        BNNS.Shape.tensor3DFirstMajor(2, 3)
