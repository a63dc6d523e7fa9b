"""Swift's arrays: allocation, random generators, activations, clipping and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import normal

Descriptor = bnns.BNNSNDArrayDescriptor
IMAGE = BNNS.Shape.imageCHW(5, 2, 3)
AES = BNNS.RandomGeneratorMethod.aesCtr


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_of_sequences_and_from_lists() -> None:
    sne, nse = BNNS.Shape.tensor3DSNE(4, 3, 2), BNNS.Shape.tensor3DNSE(4, 2, 3, stride=(1, 5, 10))
    assert (sne.layout, sne.size, sne.batchStride) == (bnns.BNNSDataLayoutSNE, (4, 3, 2), 24)
    assert (nse.layout, nse.stride, nse.batchStride) == (bnns.BNNSDataLayoutNSE, (1, 5, 10), 30)
    assert BNNS.Shape([7]) == BNNS.Shape.vector(7)
    assert BNNS.Shape([2, 3]) == BNNS.Shape.matrixFirstMajor(2, 3)
    assert BNNS.Shape(range(1, 9)) == BNNS.Shape.tensor8DFirstMajor(*range(1, 9))
    assert BNNS.Shape([3, 2], dataLayout=bnns.BNNSDataLayoutRowMajorMatrix) == BNNS.Shape.matrixRowMajor(3, 2)
    assert BNNS.Shape([7], stride=[2]) == BNNS.Shape.vector(7, stride=2) != BNNS.Shape.vector(7)
    assert len({BNNS.Shape([2, 3]), BNNS.Shape.matrixFirstMajor(2, 3), BNNS.Shape([3, 2])}) == 2
    for size in ([], range(9)):
        with pytest.raises(ValueError, match="a shape has from 1 to 8 axes"):
            BNNS.Shape(size)
    with pytest.raises(ValueError, match="BNNSDataLayoutSNE has 3 axes, not 2"):
        BNNS.Shape.tensor3DSNE(4, 3)


def test_every_case_has_its_layout() -> None:
    for rank in range(3, 9):
        for order in ("FirstMajor", "LastMajor"):
            shape = getattr(BNNS.Shape, f"tensor{rank}D{order}")(*range(2, rank + 2))
            assert shape.layout == getattr(bnns, f"BNNSDataLayout{rank}D{order}")
            assert shape.descriptor(np.zeros(shape.batchStride, np.float32)).shape == shape


# ---- allocation ------------------------------------------------------------------------------------------------------


def test_allocate_repeating() -> None:
    one = Descriptor.allocate(repeating=0.5, shape=IMAGE, batchSize=4)
    assert (one.data_type, one.size, one.layout) == (bnns.BNNSDataTypeFloat32, (5, 2, 3), bnns.BNNSDataLayoutImageCHW)
    assert one.makeArray(of=float, batchSize=4).tolist() == [0.5] * 120
    assert one.makeArray(of=np.float32).shape == (30,)
    assert one.shape == IMAGE
    assert one.dataSize == 120  # of one sample
    assert Descriptor.allocate(repeating=0, shape=IMAGE).data_type == bnns.BNNSDataTypeFloat32
    assert Descriptor.allocate(repeating=np.int16(3), shape=IMAGE).data_type == bnns.BNNSDataTypeInt16
    assert Descriptor.allocate(repeating=np.float64(3), shape=IMAGE).data_type == bnns.BNNSDataTypeFloat32
    half = Descriptor.allocate(repeating=3, scalarType=np.float16, shape=IMAGE)
    assert half.makeArray(of=np.float16).tolist() == [3] * 30


def test_allocate_initializing_from() -> None:
    """What makeArray returns, allocate takes: so are weights saved and restored."""
    values = normal(6)
    for source in (values, values.tolist(), values.reshape(2, 3)):
        one = Descriptor.allocate(initializingFrom=source, shape=BNNS.Shape.matrixRowMajor(3, 2))
        assert np.array_equal(one.view(), values.reshape(2, 3))
        assert one.data is not source
    gaps = BNNS.Shape.matrixRowMajor(3, 2, stride=(1, 4))
    one = Descriptor.allocate(initializingFrom=np.arange(16, dtype=np.int32), shape=gaps, batchSize=2)
    assert one.view().tolist() == [[0, 1, 2], [4, 5, 6]]
    again = Descriptor.allocate(initializingFrom=one.makeArray(of=np.int32, batchSize=2), shape=gaps, batchSize=2)
    assert np.array_equal(again.data, one.data)
    integers = Descriptor.allocate(initializingFrom=[1, 2], scalarType=int, shape=BNNS.Shape.vector(2))
    assert integers.data_type == bnns.BNNSDataTypeInt64
    flags = Descriptor.allocate(initializingFrom=[True, False], scalarType=bool, shape=BNNS.Shape.vector(2))
    assert flags.data_type == bnns.BNNSDataTypeBoolean


def test_allocate_random_numbers() -> None:
    shape = BNNS.Shape.vector(500)
    one = Descriptor.allocate(randomIn=(-0.5, 0.5), using=np.random.default_rng(3), shape=shape, batchSize=2)
    values = one.makeArray(of=float, batchSize=2)
    assert ((values >= -0.5) & (values <= 0.5)).all()
    assert values.std() > 0.2
    two = Descriptor.allocate(randomIn=(-0.5, 0.5), using=np.random.default_rng(3), shape=shape, batchSize=2)
    assert np.array_equal(two.data, one.data)
    assert not np.array_equal(Descriptor.allocate(randomIn=(-0.5, 0.5), shape=shape).data, one.data[:500])
    dice = Descriptor.allocate(randomIn=(1, 6), scalarType=np.uint8, shape=shape).makeArray(of=np.uint8)
    assert set(dice.tolist()) == {1, 2, 3, 4, 5, 6}
    generator = BNNS.RandomGenerator(method=AES, seed=5)
    uniform = Descriptor.allocate(randomUniformUsing=generator, range=(-1, 2), shape=shape)
    expected = np.empty(500, np.float32)
    plain = bnns.BNNSCreateRandomGeneratorWithSeed(0, 5)
    assert bnns.BNNSRandomFillUniformFloat(plain, Descriptor.from_array(expected), -1, 2) == 0
    assert np.array_equal(uniform.data, expected)
    dice = Descriptor.allocate(randomUniformUsing=generator, range=(1, 6), scalarType=np.int8, shape=shape).data
    assert set(dice.tolist()) == {1, 2, 3, 4, 5, 6}  # Swift's range includes its end
    edge = Descriptor.allocate(randomUniformUsing=generator, range=(2**63 - 1,) * 2, scalarType=int, shape=shape).data
    assert (edge == 2**63 - 1).all()
    gauss = Descriptor.allocate(randomNormalUsing=generator, mean=3, standardDeviation=0.5, shape=shape).data
    assert abs(gauss.mean() - 3) < 0.1
    assert abs(gauss.std() - 0.5) < 0.1


def test_allocate_without_values() -> None:
    one = Descriptor.allocateUninitialized(scalarType=np.float16, shape=IMAGE, batchSize=3)
    assert (one.data.dtype, one.data.shape, one.data_type) == (np.float16, (90,), bnns.BNNSDataTypeFloat16)
    one.deallocate()
    assert one.data is None
    assert one.dataSize == 0
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: data is NULL"):
        one.makeArray(of=np.float16)


def test_what_allocation_refuses() -> None:
    shape, generator = BNNS.Shape.vector(3), BNNS.RandomGenerator(method=AES)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, TypeError, "allocate takes one of repeating, .*, not 0 of them"),
        ({"repeating": 1, "randomIn": (0, 1)}, TypeError, "not 2 of them"),
        ({"repeating": 1, "range": (0, 1)}, TypeError, "repeating does not take range"),
        ({"randomUniformUsing": generator}, TypeError, "randomUniformUsing needs range"),
        ({"randomNormalUsing": generator, "mean": 0}, TypeError, "randomNormalUsing needs standardDeviation"),
        ({"repeating": 1, "using": np.random.default_rng()}, TypeError, "repeating does not take using"),
        ({"initializingFrom": [1, 2]}, ValueError, r"initializingFrom has 2 values, but 1 samples of .* have 3"),
        ({"initializingFrom": np.zeros(3)}, ValueError, "no BNNSDataType for elements of type float64"),
        ({"initializingFrom": normal(3), "scalarType": np.int8}, ValueError, "of type float32, scalarType is int8"),
        ({"repeating": 1, "batchSize": 0}, ValueError, "batchSize is 0, must be at least 1"),
        ({"repeating": 1, "shape": BNNS.Shape.vector(0)}, ValueError, "an extent must be at least 1"),
        ({"randomIn": (1, 0)}, ValueError, "randomIn is from 1 to 0, must not be empty"),
        ({"randomUniformUsing": generator, "range": (1, 0)}, BNNS.Error, "a is 1.0, must be at most b"),
        (
            {"randomUniformUsing": generator, "range": (1, 300), "scalarType": np.int8},
            BNNS.Error,
            "the integers from 1 to 300 do not fit",
        ),
    ]
    for arguments, error, reason in cases:
        with pytest.raises(error, match=reason):
            Descriptor.allocate(**{"shape": shape, **arguments})
    one = Descriptor.allocate(repeating=1, shape=shape)
    with pytest.raises(BNNS.Error, match="the elements are of type float32, not int32"):
        one.makeArray(of=np.int32)
    with pytest.raises(BNNS.Error, match=r"data has 12 bytes, but .* spans 24"):
        one.makeArray(of=float, batchSize=2)


# ---- random generators -----------------------------------------------------------------------------------------------


def test_the_state_of_a_generator() -> None:
    generator = BNNS.RandomGenerator(method=AES)
    Descriptor.allocate(randomNormalUsing=generator, mean=0, standardDeviation=1, shape=BNNS.Shape.vector(7))
    state = generator.state
    other = BNNS.RandomGenerator(method=AES, seed=1)
    other.state = state
    shape = BNNS.Shape.vector(9)
    a, b = (Descriptor.allocate(randomUniformUsing=one, range=(0, 1), shape=shape) for one in (generator, other))
    assert np.array_equal(a.data, b.data)
    with pytest.raises(BNNS.Error, match="state is not one"):
        other.state = bytes(24)
    with pytest.raises(BNNS.Error, match="seed is -1"):
        BNNS.RandomGenerator(method=AES, seed=-1)


# ---- activations -----------------------------------------------------------------------------------------------------


def test_an_activation_layer() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    y, dx = np.empty_like(x), np.empty_like(x)
    with BNNS.ActivationLayer(
        function=BNNS.ActivationFunction.tanh, input=IMAGE.descriptor(), output=BNNS.Shape.vector(30).descriptor()
    ) as layer:
        layer.apply(batchSize=4, input=IMAGE.descriptor(x), output=IMAGE.descriptor(y))
        assert np.array_equal(y, rg.activation_forward(x, "tanh"))
        layer.applyBackward(
            batchSize=4,
            input=IMAGE.descriptor(x),
            output=IMAGE.descriptor(y),
            outputGradient=IMAGE.descriptor(dy),
            generatingInputGradient=BNNS.Shape.vector(30).descriptor(dx),
        )
        assert np.array_equal(dx, rg.activation_backward(dy, "tanh", y=y))
        assert layer.bnnsFilter is not None
        with pytest.raises(BNNS.Error, match="input has 29 elements"):
            layer.apply(batchSize=1, input=BNNS.Shape.vector(29).descriptor(x), output=IMAGE.descriptor(y))
        with pytest.raises(BNNS.Error, match="outputGradient has no data"):
            layer.applyBackward(batchSize=4, outputGradient=IMAGE.descriptor(), generatingInputGradient=None)
    with pytest.raises(BNNS.Error, match=r"unableToCreateLayer: .*BNNSActivationFunctionGumbel"):
        BNNS.ActivationLayer(
            function=BNNS.ActivationFunction.gumbel(alpha=1, beta=0),
            input=IMAGE.descriptor(),
            output=IMAGE.descriptor(),
        )


@pytest.mark.parametrize("axes", [None, [0], [2], [0, 1], [3]])
def test_softmax_axes_of_a_layer(axes: list[int] | None) -> None:
    x = normal(4, 3, 2, 5)
    y, z = np.empty_like(x), np.empty_like(x)
    softmax = BNNS.ActivationFunction.softmax
    arrays = {"input": IMAGE.descriptor(x), "output": IMAGE.descriptor(y)}
    BNNS.ActivationLayer(function=softmax, axes=axes, **arrays).apply(batchSize=4, **arrays)
    assert np.allclose(y.sum(axis=tuple(3 - k for k in axes or [0])), 1, rtol=1e-6)
    BNNS.applyActivation(
        activation=softmax, axes=axes, input=IMAGE.descriptor(x), output=IMAGE.descriptor(z), batchSize=4
    )
    assert np.array_equal(y, z)


def test_what_apply_activation_refuses() -> None:
    x = IMAGE.descriptor(normal(4, 3, 2, 5))
    tanh = BNNS.ActivationFunction.tanh
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*o_desc.data has 480 bytes, but 5 samples"):
        BNNS.applyActivation(activation=tanh, input=x, output=x, batchSize=5)
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: output has no data"):
        BNNS.applyActivation(activation=tanh, input=x, output=IMAGE.descriptor(), batchSize=4)
    with pytest.raises(ValueError, match="axes has -1, must be at least 0"):
        BNNS.applyActivation(activation=tanh, axes=[-1], input=x, output=x, batchSize=4)
    with pytest.raises(BNNS.Error, match="axis_flags is 0x10, but i_desc has 3 axes"):
        BNNS.applyActivation(activation=BNNS.ActivationFunction.softmax, axes=[4], input=x, output=x, batchSize=4)


# ---- clipping and norms ----------------------------------------------------------------------------------------------


def test_clipping_and_norms() -> None:
    """Apple's printed examples."""
    matrix = Descriptor.allocate(initializingFrom=range(1, 10), shape=BNNS.Shape.matrixRowMajor(3, 3))
    result = Descriptor.allocate(repeating=0, shape=BNNS.Shape.matrixRowMajor(3, 3))
    BNNS.clipByNorm(threshold=10, input=matrix, output=result, axes=[1])
    expected = [1, 2, 3, 4, 5, 6, 5.0257072, 5.743665, 6.461623]
    assert np.allclose(result.makeArray(of=float), expected, rtol=1e-6)
    BNNS.clip(to=(2, 4), input=matrix, output=result)
    assert result.makeArray(of=float).tolist() == [2, 2, 3, 4, 4, 4, 4, 4, 4]
    BNNS.clipByGlobalNorm(threshold=5, inputs=[matrix], outputs=[result], globalNorm=10)
    assert np.allclose(result.makeArray(of=float), np.arange(1, 10) / 2)
    norms = Descriptor.allocate(repeating=0, shape=BNNS.Shape.vector(3))
    BNNS.computeNorm(input=matrix, output=norms, axes=[1])
    rows = np.linalg.norm(np.arange(1, 10).reshape(3, 3), axis=1)
    assert np.allclose(norms.makeArray(of=float), rows)
    ones = Descriptor.allocate(repeating=1, shape=BNNS.Shape.vector(3))
    BNNS.computeNormBackward(input=matrix, output=norms, axes=[1], outputGradient=ones, generatingInputGradient=result)
    assert np.allclose(result.view(), matrix.view() / rows[:, None], rtol=1e-6)
    BNNS.computeNorm(input=matrix, output=Descriptor.allocate(repeating=0, shape=BNNS.Shape.vector(1)))


def test_what_clipping_and_norms_throw() -> None:
    vector = Descriptor.allocate(repeating=1, shape=BNNS.Shape.vector(3))
    other = Descriptor.allocate(repeating=1, shape=BNNS.Shape.vector(4))
    empty = BNNS.Shape.vector(3).descriptor()
    with pytest.raises(BNNS.Error, match="arrayDescriptorInvalidData: output has no data"):
        BNNS.clip(to=(0, 1), input=vector, output=empty)
    with pytest.raises(BNNS.Error, match=r"arrayDescriptorInvalidData: inputs\[1\] has no data"):
        BNNS.clipByGlobalNorm(threshold=1, inputs=[vector, empty], outputs=[vector, other])
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*dest.size is"):
        BNNS.clip(to=(0, 1), input=vector, output=other)
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*src has 1 descriptors, must have 2"):
        BNNS.clipByGlobalNorm(threshold=1, inputs=[vector], outputs=[vector, other])
    with pytest.raises(BNNS.Error, match="max_norm is -1"):
        BNNS.clipByNorm(threshold=-1, input=vector, output=vector)
    with pytest.raises(BNNS.Error, match=r"dest.size is"):
        BNNS.computeNorm(input=vector, output=vector)
