"""MPSGraph in PyObjC's spelling: the same graph, and selectors for every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd.mpsgraph.pyobjc as M
from retrograd import mpsgraph
from retrograd.mpsgraph import _declare
from retrograd.mpsgraph._table import METHODS


def data(array: Any) -> Any:
    device = M.MPSGraphDevice.deviceWithMTLDevice_(M.MTLCreateSystemDefaultDevice())
    return M.MPSGraphTensorData.alloc().initWithDevice_data_shape_dataType_(
        device, array.tobytes(), list(array.shape), M.MPSDataTypeFloat32
    )


def test_every_row_and_method_has_a_selector() -> None:
    for row in _declare.ROWS:
        assert callable(getattr(M.MPSGraph, row.selected))
    for kind, methods in METHODS.items():
        for selectors in methods.values():
            for selector in selectors.split():
                assert callable(getattr(getattr(M, kind), selector.replace(":", "_")))
    assert set(mpsgraph.__all__) - set(M.__all__) == {
        name for name in mpsgraph.__all__ if isinstance(getattr(mpsgraph, name), type(mpsgraph.MPSGraphOptions))
    }


def test_training_in_both_spellings_has_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    w0, x0 = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    t0 = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 8)]
    g = M.MPSGraph.alloc().init()
    x = g.placeholderWithShape_dataType_name_([-1, 4], M.MPSDataTypeFloat32, "x")
    t = g.placeholderWithShape_name_([-1, 3], "labels")
    w = g.variableWithData_shape_dataType_name_(w0.tobytes(), [4, 3], M.MPSDataTypeFloat32, "w")
    y = g.matrixMultiplicationWithPrimaryTensor_secondaryTensor_name_(x, w, None)
    loss = g.softMaxCrossEntropyWithSourceTensor_labelsTensor_axis_reductionType_name_(
        y, t, -1, M.MPSGraphLossReductionTypeMean, "loss"
    )
    dw = g.gradientForPrimaryTensor_withTensors_name_(loss, [w], None)[w]
    rate = g.constantWithScalar_dataType_(0.1, M.MPSDataTypeFloat32)
    new = g.stochasticGradientDescentWithLearningRateTensor_valuesTensor_gradientTensor_name_(rate, w, dw, None)
    update = g.assignVariable_withValueOfTensor_name_(w, new, None)
    queue = M.MTLCreateSystemDefaultDevice().newCommandQueue()
    s = mpsgraph.MPSGraph()
    sx = s.placeholder(shape=[-1, 4], dataType=mpsgraph.MPSDataType.float32, name="x")
    st = s.placeholder(shape=[-1, 3], name="labels")
    sw = s.variable(with_=w0.tobytes(), shape=[4, 3], dataType=mpsgraph.MPSDataType.float32, name="w")
    sy = s.matrixMultiplication(primary=sx, secondary=sw)
    mean = mpsgraph.MPSGraphLossReductionType.mean
    sloss = s.softMaxCrossEntropy(sy, labels=st, axis=-1, reuctionType=mean, name="loss")
    sdw = s.gradients(of=sloss, with_=[sw])[sw]
    snew = s.stochasticGradientDescent(
        learningRate=s.constant(0.1, dataType=mpsgraph.MPSDataType.float32), values=sw, gradient=sdw
    )
    supdate = s.assign(sw, tensor=snew)
    for _ in range(3):
        found = g.runWithMTLCommandQueue_feeds_targetTensors_targetOperations_(
            queue, {x: data(x0), t: data(t0)}, [loss], [update]
        )
        other = s.run(
            feeds={sx: mpsgraph.MPSGraphTensorData(x0), st: data(t0)}, targetTensors=[sloss], targetOperations=[supdate]
        )
        assert found[loss].numpy().tobytes() == other[sloss].numpy().tobytes()
    assert (loss.shape(), y.shape(), w.dataType()) == ([], [-1, 3], M.MPSDataTypeFloat32)
    assert w.operation().shape() == [4, 3]
    assert update.inputTensors()[0] is w


def test_descriptors_buffers_and_executables() -> None:
    d = M.MPSGraphLSTMDescriptor.descriptor()
    d.setTraining_(True)
    assert (d.training(), d.activation(), d.copyWithZone_(None).training()) == (True, M.MPSGraphRNNActivationTanh, True)
    c = M.MPSGraphConvolution2DOpDescriptor
    steps = "descriptorWithStrideInX_strideInY_dilationRateInX_dilationRateInY"
    made = getattr(c, f"{steps}_groups_paddingStyle_dataLayout_weightsLayout_")(
        2, 1, 1, 1, 1, M.MPSGraphPaddingStyleTF_SAME, M.MPSGraphTensorNamedDataLayoutNHWC,
        M.MPSGraphTensorNamedDataLayoutHWIO,
    )  # fmt: skip
    made.setExplicitPaddingWithPaddingLeft_paddingRight_paddingTop_paddingBottom_(1, 2, 3, 4)
    assert (made.strideInX(), made.paddingBottom(), made.paddingStyle()) == (2, 4, M.MPSGraphPaddingStyleExplicit)
    g = M.MPSGraph.new()
    x = g.placeholderWithShape_dataType_name_([2], M.MPSDataTypeFloat32, "x")
    y = g.squareWithTensor_name_(x, None)
    (z,) = g.ifWithPredicateTensor_thenBlock_elseBlock_name_(
        g.constantWithScalar_dataType_(1, M.MPSDataTypeBool), lambda: [y], lambda: [x], None
    )
    shaped = M.MPSGraphShapedType.alloc().initWithShape_dataType_([2], M.MPSDataTypeFloat32)
    executable = g.compileWithDevice_feeds_targetTensors_targetOperations_compilationDescriptor_(
        None, {x: shaped}, [z], None, None
    )
    assert executable.feedTensors() == [x]
    device = M.MTLCreateSystemDefaultDevice()
    three = data(np.full(2, 3, np.float32))
    (found,) = executable.runWithMTLCommandQueue_inputsArray_resultsArray_executionDescriptor_(
        device.newCommandQueue(), [three], None, None
    )
    assert found.numpy().tolist() == [9, 9]
    buffer = M.MPSCommandBuffer.commandBufferFromCommandQueue_(device.newCommandQueue())
    seen: list[Any] = []
    run = M.MPSGraphExecutionDescriptor.alloc().init()
    run.setCompletionHandler_(lambda results, error: seen.append(results[y].shape()))
    g.encodeToCommandBuffer_feeds_targetTensors_targetOperations_executionDescriptor_(
        buffer, {x: three}, [y], None, run
    )
    buffer.commit()
    buffer.waitUntilCompleted()
    assert seen == [[2]]
    block = bytearray(8)
    found.mpsndarray().readBytes_strideBytes_(block, None)
    assert np.frombuffer(block, np.float32).tolist() == [9, 9]


def test_wrong_calls() -> None:
    g = M.MPSGraph.new()
    with pytest.raises(TypeError, match="squareWithTensor_name_: needs 2 arguments, got 1"):
        g.squareWithTensor_name_(1)
    with pytest.raises(TypeError, match="must be an MPSGraphTensor, not int"):
        g.squareWithTensor_name_(1, None)
    with pytest.raises(NotImplementedError, match="stencil"):
        g.stencil()
