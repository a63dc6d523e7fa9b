"""Swift's FusedParametersLayer and its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import normal

Descriptor = bnns.BNNSNDArrayDescriptor
Array = np.ndarray[Any, Any]
TRAINING, INFERENCE = BNNS.LearningPhase.training, BNNS.LearningPhase.inference
F32, INT8 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeInt8
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
TANH = BNNS.ActivationFunction.tanh
IMAGE, OUT = BNNS.Shape.imageCHW(6, 5, 2), BNNS.Shape.imageCHW(6, 5, 4)
VECTOR4 = BNNS.Shape.vector(4)


def weights(array: Array, data_type: int = F32) -> Any:
    return BNNS.Shape.convolutionWeightsOIHW(*array.shape[::-1]).descriptor(array, data_type)


def convolution(w: Array, b: Array | None, **changes: Any) -> Any:
    given = {
        "type": BNNS.ConvolutionType.standard, "weights": weights(w),
        "bias": None if b is None else Descriptor.from_array(b), "stride": (1, 1), "dilationStride": (1, 1),
        "groupSize": 1, "padding": BNNS.ConvolutionPadding.symmetric(x=1, y=1),
    }  # fmt: skip
    return BNNS.FusedConvolutionParameters(**{**given, **changes})


def norm(beta: Array | None = None, gamma: Array | None = None, **changes: Any) -> Any:
    given = {
        "type": BNNS.NormalizationType.batch(), "beta": None if beta is None else Descriptor.from_array(beta),
        "gamma": None if gamma is None else Descriptor.from_array(gamma), "epsilon": 1e-5, "activation": TANH,
    }  # fmt: skip
    return BNNS.FusedNormalizationParameters(**{**given, **changes})


def test_a_convolution_and_a_normalization() -> None:
    """The same bits as the layer that is made for these two, gradients and moving statistics included."""
    x, w, b, dy = normal(3, 2, 5, 6), normal(4, 2, 3, 3, seed=1), normal(4, seed=2), normal(3, 4, 5, 6, seed=3)
    beta, gamma = normal(4, seed=4), normal(4, seed=5)
    results = []
    for fused in (False, True):
        mean, variance = np.zeros(4, np.float32), np.ones(4, np.float32)
        kind = BNNS.NormalizationType.batch(
            movingMean=Descriptor.from_array(mean), movingVariance=Descriptor.from_array(variance)
        )
        ends = {"input": IMAGE.descriptor(), "output": OUT.descriptor(), "filterParameters": CLIENT}
        if fused:
            parts = [convolution(w, b), norm(beta, gamma, type=kind, momentum=0.75)]
            layer = BNNS.FusedParametersLayer(**ends, fusedLayerParameters=parts)
        else:
            layer = BNNS.FusedConvolutionNormalizationLayer(
                **ends,
                convolutionWeights=weights(w),
                convolutionBias=Descriptor.from_array(b),
                convolutionStride=(1, 1),
                convolutionDilationStride=(1, 1),
                convolutionPadding=BNNS.ConvolutionPadding.symmetric(x=1, y=1),
                normalization=kind,
                normalizationBeta=Descriptor.from_array(beta),
                normalizationGamma=Descriptor.from_array(gamma),
                normalizationMomentum=0.75,
                normalizationEpsilon=1e-5,
                normalizationActivation=TANH,
            )
        y, dx = np.empty((3, 4, 5, 6), np.float32), np.empty_like(x)
        gradients = [np.empty_like(array) for array in (w, b, beta, gamma)]
        layer.apply(batchSize=3, input=IMAGE.descriptor(x), output=OUT.descriptor(y), for_=TRAINING)
        layer.applyBackward(
            batchSize=3,
            input=IMAGE.descriptor(x),
            output=OUT.descriptor(y),
            outputGradient=OUT.descriptor(dy),
            generatingInputGradient=IMAGE.descriptor(dx),
            generatingParameterGradients=[
                weights(gradients[0]),
                *(Descriptor.from_array(array) for array in gradients[1:]),
            ],
        )
        after = np.empty_like(y)
        layer.apply(batchSize=3, input=IMAGE.descriptor(x), output=OUT.descriptor(after), for_=INFERENCE)
        results.append([y, dx, *gradients, mean, variance, after])
    for got, right in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(got, right)
    z = rg.conv_forward(x, w, b, padding=1)
    np.testing.assert_array_equal(results[1][0], rg.batch_norm_forward(z, gamma, beta, activation="tanh")[0])
    assert not np.array_equal(results[1][0], results[1][-1])


def test_groups_strides_and_a_transposed_convolution() -> None:
    x, w = normal(2, 4, 3, 5), normal(6, 2, 2, 3, seed=1)
    source, target = BNNS.Shape.imageCHW(5, 3, 4), BNNS.Shape.imageCHW(3, 2, 6)
    part = convolution(
        w, None, stride=(2, 1), groupSize=2, padding=BNNS.ConvolutionPadding.asymmetric(left=1, right=1, up=0, down=0)
    )
    group = norm(type=BNNS.NormalizationType.group(groupCount=3), activation=BNNS.ActivationFunction.identity)
    layer = BNNS.FusedParametersLayer(
        input=source.descriptor(), output=target.descriptor(), fusedLayerParameters=[part, group]
    )
    y = np.empty((2, 6, 2, 3), np.float32)
    layer.apply(batchSize=2, input=source.descriptor(x), output=target.descriptor(y), for_=TRAINING)
    z = rg.conv_forward(x, w, stride=(1, 2), padding=((0, 0), (1, 1)), groups=2)
    np.testing.assert_array_equal(y, rg.group_norm_forward(z, num_groups=3)[0])
    # Transposed: the layer's weights are [outputs, inputs, ...], the array function's [inputs, outputs, ...].
    w = normal(6, 4, 2, 3, seed=2)
    target = BNNS.Shape.imageCHW(7, 4, 6)
    part = convolution(w, None, type=BNNS.ConvolutionType.transposed, padding=BNNS.ConvolutionPadding.zero)
    layer = BNNS.FusedParametersLayer(
        input=source.descriptor(), output=target.descriptor(), fusedLayerParameters=[part, group]
    )
    y = np.empty((2, 6, 4, 7), np.float32)
    layer.apply(batchSize=2, input=source.descriptor(x), output=target.descriptor(y), for_=TRAINING)
    z = rg.conv_transpose_forward(x, np.ascontiguousarray(w.swapaxes(0, 1)))
    np.testing.assert_array_equal(y, rg.group_norm_forward(z, num_groups=3)[0])


@pytest.mark.parametrize("data_type", [F32, INT8])
def test_a_fully_connected_layer_and_a_quantization(data_type: int) -> None:
    """With integers too: what is between the layers is then Float32."""
    if data_type == F32:
        x, w = normal(3, 5), normal(4, 5, seed=1)
    else:
        rng = np.random.default_rng(0)
        x, w = rng.integers(-9, 9, (3, 5), np.int8), rng.integers(-9, 9, (4, 5), np.int8)
    scale, bias = np.float32([1, 2, 4, 0.5]), np.float32([3, -3, 0, 7])
    second = BNNS.FusedQuantizationParameters(scale=Descriptor.from_array(scale), bias=Descriptor.from_array(bias))
    assert second.axis is None
    second.axis = 0
    first = BNNS.FusedFullyConnectedParameters(
        weights=BNNS.Shape.matrixRowMajor(5, 4).descriptor(w, data_type), bias=None
    )
    source, target = BNNS.Shape.vector(5), VECTOR4
    layer = BNNS.FusedParametersLayer(
        input=source.descriptor(None, data_type),
        output=target.descriptor(None, INT8),
        fusedLayerParameters=[first, second],
    )
    y = np.empty((3, 4), np.int8)
    ends = {"input": source.descriptor(x, data_type), "output": target.descriptor(y, INT8)}
    layer.apply(batchSize=3, **ends, for_=INFERENCE)
    z = rg.linear_forward(x.astype(np.float32), w.astype(np.float32)).astype(np.float64)
    np.testing.assert_array_equal(y, np.clip(np.rint(z * scale + bias), -128, 127))
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .* rounding to integers has no gradient"):
        layer.applyBackward(
            batchSize=3,
            **ends,
            outputGradient=target.descriptor(z.astype(np.float32)),
            generatingInputGradient=source.descriptor(np.empty((3, 5), np.float32)),
            generatingParameterGradients=[],
        )


def test_a_convolution_of_integers_and_a_dequantization() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 4, (2, 2, 5, 6), np.int8), rng.integers(-3, 4, (4, 2, 3, 3), np.int8)
    scale = np.float32([0.5])
    layer = BNNS.FusedParametersLayer(
        input=IMAGE.descriptor(None, INT8),
        output=OUT.descriptor(),
        fusedLayerParameters=[
            convolution(w, None, weights=weights(w, INT8)),
            BNNS.FusedDequantizationParameters(scale=Descriptor.from_array(scale), bias=None),
        ],
    )
    y = np.empty((2, 4, 5, 6), np.float32)
    layer.apply(batchSize=2, input=IMAGE.descriptor(x, INT8), output=OUT.descriptor(y), for_=INFERENCE)
    z = rg.conv_forward(x.astype(np.float32), w.astype(np.float32), padding=1)
    np.testing.assert_array_equal(y, 2 * np.clip(z, -128, 127))


SAMPLE, PARAMETER = BNNS.DescriptorType.sample, BNNS.DescriptorType.parameter


def test_fused_layers_with_one_input() -> None:
    x, dy = np.abs(normal(3, 2, 5, 6)), normal(3, 2, 5, 6, seed=1)
    part = BNNS.FusedUnaryArithmeticParameters(
        inputDescriptorType=SAMPLE, outputDescriptorType=SAMPLE, function=BNNS.ArithmeticUnaryFunction.square
    )
    layer = BNNS.FusedParametersLayer(
        input=IMAGE.descriptor(), output=IMAGE.descriptor(), fusedLayerParameters=[part, norm()]
    )
    y, dx, dbeta = np.empty_like(x), np.empty_like(x), np.empty(2, np.float32)
    ends = {"input": IMAGE.descriptor(x), "output": IMAGE.descriptor(y)}
    layer.apply(batchSize=3, **ends, for_=TRAINING)
    expected, cache = rg.batch_norm_forward(x * x, activation="tanh")
    np.testing.assert_array_equal(y, expected)
    layer.applyBackward(
        batchSize=3,
        **ends,
        outputGradient=IMAGE.descriptor(dy),
        generatingInputGradient=IMAGE.descriptor(dx),
        generatingParameterGradients=[Descriptor.from_array(dbeta), None],
    )
    right = rg.batch_norm_backward(dy, cache)
    assert right.dx is not None
    np.testing.assert_allclose(dx, 2 * x * right.dx, rtol=1e-6, atol=1e-6)
    right = rg.batch_norm_backward(dy, rg.batch_norm_forward(x * x, beta=np.zeros(2, np.float32), activation="tanh")[1])
    np.testing.assert_allclose(dbeta, np.asarray(right.dbeta), rtol=1e-5, atol=1e-6)


def test_fused_layers_with_two_inputs() -> None:
    a, b, dy = normal(3, 2, 5, 6), normal(2, 5, 6, seed=1), normal(3, 2, 5, 6, seed=2)
    beta, gamma = normal(2, seed=3), normal(2, seed=4)
    part = BNNS.FusedBinaryArithmeticParameters(
        inputADescriptorType=SAMPLE,
        inputBDescriptorType=PARAMETER,
        outputDescriptorType=SAMPLE,
        function=BNNS.ArithmeticBinaryFunction.multiply,
    )
    layer = BNNS.FusedParametersLayer(
        inputA=IMAGE.descriptor(),
        inputB=IMAGE.descriptor(),
        output=IMAGE.descriptor(),
        fusedLayerParameters=[part, norm(beta, gamma)],
        filterParameters=CLIENT,
    )
    y, da, db = np.empty_like(a), np.empty_like(a), np.empty_like(b)
    gradients = [np.empty(2, np.float32), np.empty(2, np.float32)]
    ends = {"inputA": IMAGE.descriptor(a), "inputB": IMAGE.descriptor(b), "output": IMAGE.descriptor(y)}
    layer.apply(batchSize=3, **ends, for_=TRAINING)
    expected, cache = rg.batch_norm_forward(a * b, gamma, beta, activation="tanh")
    np.testing.assert_array_equal(y, expected)
    layer.applyBackward(
        batchSize=3,
        **ends,
        outputGradient=IMAGE.descriptor(dy),
        generatingInputAGradient=IMAGE.descriptor(da),
        generatingInputBGradient=IMAGE.descriptor(db),
        generatingParameterGradients=[Descriptor.from_array(array) for array in gradients],
    )
    right = rg.batch_norm_backward(dy, cache)
    assert right.dx is not None
    for got, exact in (
        (da, right.dx * b),
        (db, (right.dx * a).sum(0)),
        (gradients[0], right.dbeta),
        (gradients[1], right.dgamma),
    ):
        np.testing.assert_allclose(got, np.asarray(exact), rtol=1e-5, atol=1e-5)
    with pytest.raises(BNNS.Error, match="layerApplyFail: inputB is not given"):
        layer.apply(batchSize=3, inputA=ends["inputA"], output=ends["output"], for_=TRAINING)
    with pytest.raises(BNNS.Error, match="input, or its gradient, is given, but the layer has inputA and inputB"):
        layer.apply(batchSize=3, input=ends["inputA"], output=ends["output"], for_=TRAINING)
    with pytest.raises(BNNS.Error, match="inputC, or its gradient, is given, but the layer has inputA and inputB"):
        layer.applyBackward(
            batchSize=3,
            **ends,
            outputGradient=IMAGE.descriptor(dy),
            generatingInputCGradient=IMAGE.descriptor(da),
            generatingParameterGradients=[None, None],
        )
    with pytest.raises(BNNS.Error, match="inputB has 120 elements of BNNSDataTypeFloat32, but the layer was made for"):
        layer.apply(batchSize=3, **{**ends, "inputB": OUT.descriptor(a)}, for_=TRAINING)
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: generatingInputAGradient has no data"):
        layer.applyBackward(
            batchSize=3,
            **ends,
            outputGradient=IMAGE.descriptor(dy),
            generatingInputAGradient=IMAGE.descriptor(),
            generatingParameterGradients=[None, None],
        )
    layer.close()
    with pytest.raises(BNNS.Error, match="filter has been destroyed"):
        layer.apply(batchSize=3, **ends, for_=TRAINING)


def test_fused_layers_with_three_inputs() -> None:
    a, b, c, dy = (normal(3, 2, 5, 6, seed=seed) for seed in range(4))
    part = BNNS.FusedTernaryArithmeticParameters(
        inputADescriptorType=SAMPLE,
        inputBDescriptorType=SAMPLE,
        inputCDescriptorType=SAMPLE,
        outputDescriptorType=SAMPLE,
        function=BNNS.ArithmeticTernaryFunction.multiplyAdd,
    )
    shapes = {name: IMAGE.descriptor() for name in ("inputA", "inputB", "inputC", "output")}
    layer = BNNS.FusedParametersLayer(**shapes, fusedLayerParameters=[part, norm()])
    y, gradients = np.empty_like(a), [np.empty_like(a) for _ in range(3)]
    ends = {name: IMAGE.descriptor(array) for name, array in zip(shapes, (a, b, c, y), strict=True)}
    layer.apply(batchSize=3, **ends, for_=TRAINING)
    z = (a.astype(np.float64) * b + c).astype(np.float32)
    expected, cache = rg.batch_norm_forward(z, activation="tanh")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    layer.applyBackward(
        batchSize=3,
        **ends,
        outputGradient=IMAGE.descriptor(dy),
        generatingInputAGradient=IMAGE.descriptor(gradients[0]),
        generatingInputBGradient=IMAGE.descriptor(gradients[1]),
        generatingInputCGradient=IMAGE.descriptor(gradients[2]),
        generatingParameterGradients=[None, None],
    )
    dz = rg.batch_norm_backward(dy, cache).dx
    assert dz is not None
    for got, exact in zip(gradients, (dz * b, dz * a, dz), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


def test_parts_may_be_changed_before_the_layer_is_made() -> None:
    """They are structures, and the layer keeps nothing of them."""
    x, w = normal(2, 2, 5, 6), normal(4, 2, 3, 3, seed=1)
    first, second = convolution(w, None), norm()
    first.padding = BNNS.ConvolutionPadding.zero
    second.activation = BNNS.ActivationFunction.identity
    out = BNNS.Shape.imageCHW(4, 3, 4)
    layer = BNNS.FusedParametersLayer(
        input=IMAGE.descriptor(), output=out.descriptor(), fusedLayerParameters=(first, second)
    )
    second.epsilon = 100.0
    y = np.empty((2, 4, 3, 4), np.float32)
    layer.apply(batchSize=2, input=IMAGE.descriptor(x), output=out.descriptor(y), for_=TRAINING)
    np.testing.assert_array_equal(y, rg.batch_norm_forward(rg.conv_forward(x, w))[0])


def test_the_meaning_of_momentum_in_a_fused_layer() -> None:
    x = normal(4, 2, 5, 6)
    part = BNNS.FusedUnaryArithmeticParameters(
        inputDescriptorType=SAMPLE, outputDescriptorType=SAMPLE, function=BNNS.ArithmeticUnaryFunction.negate
    )
    for weighs, factor in (("old", 0.1), ("new", 0.9)):
        mean = np.zeros(2, np.float32)
        moving = BNNS.NormalizationType.batch(movingMean=Descriptor.from_array(mean))
        layer = BNNS.FusedParametersLayer(
            input=IMAGE.descriptor(),
            output=IMAGE.descriptor(),
            fusedLayerParameters=[part, norm(type=moving, momentum=0.9)],
            momentumWeighs=weighs,
        )
        layer.apply(batchSize=4, input=IMAGE.descriptor(x), output=IMAGE.descriptor(np.empty_like(x)), for_=TRAINING)
        np.testing.assert_allclose(mean, -factor * x.mean((0, 2, 3)), rtol=1e-4)


def test_swifts_fused_layers_that_cannot_be_made() -> None:
    w = normal(4, 2, 3, 3)
    binary = BNNS.FusedBinaryArithmeticParameters(
        inputADescriptorType=SAMPLE,
        inputBDescriptorType=SAMPLE,
        outputDescriptorType=SAMPLE,
        function=BNNS.ArithmeticBinaryFunction.add,
    )
    quantization = BNNS.FusedQuantizationParameters(scale=None, bias=None)
    one, two = {"input": IMAGE.descriptor()}, {"inputA": OUT.descriptor(), "inputB": OUT.descriptor()}
    for inputs, parts, message in (
        (one, [convolution(w, None)], "fusedLayerParameters has 1 entries, must have 2"),
        (one, [convolution(w, None), norm(), norm()], "fusedLayerParameters has 3 entries, must have 2"),
        (one, [binary, norm()], "FusedBinaryArithmeticParameters has 2 inputs, but is given 1"),
        (two, [convolution(w, None), norm()], "FusedConvolutionParameters has 1 inputs, but is given 2"),
        (one, [convolution(w, None), binary], "FusedBinaryArithmeticParameters has 2 inputs, but is given 1"),
        (one, [norm(), norm()], r"filter_type\[0\] is BNNSBatchNorm, which cannot come first"),
        (one, [convolution(w, None), convolution(w, None)], r"filter_type\[1\] is BNNSConvolution; after BNNSConvolu"),
        (two, [binary, quantization], r"filter_type\[1\] is BNNSQuantization; after BNNSArithmetic it must be a norm"),
        (one, [convolution(w, None), quantization], r"layer_params\[1\]: o_desc.data_type is BNNSDataTypeFloat32; it"),
        (one, [convolution(w[:3], None), norm()], r"layer_params\[0\]: w_desc has 3 outputs and 2 inputs, expected 4"),
    ):
        with pytest.raises(BNNS.Error, match=f"unableToCreateLayer: .*{message}"):
            BNNS.FusedParametersLayer(**inputs, output=OUT.descriptor(), fusedLayerParameters=parts)
    for inputs in ({}, {"inputA": IMAGE.descriptor()}, {**one, **two}, {"inputB": OUT.descriptor()}):
        with pytest.raises(TypeError, match="give input; or inputA and inputB; or inputA, inputB and inputC: not"):
            BNNS.FusedParametersLayer(**inputs, output=OUT.descriptor(), fusedLayerParameters=[binary, norm()])
    assert issubclass(BNNS.FusedNormalizationParameters, bnns.FusableLayerParameters)
