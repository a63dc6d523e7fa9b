"""retrograd.mps.pyobjc: the same objects as PyObjC spells them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import retrograd.mps as swift

# In a script for PyObjC: import Metal, MetalPerformanceShaders as MPS, Foundation
import retrograd.mps.pyobjc as Foundation
import retrograd.mps.pyobjc as MPS
import retrograd.mps.pyobjc as Metal
from support.arrays import assert_same_bits

Array = np.ndarray[Any, Any]
X = np.array([(1, 2, 3), (4, 5, 7), (2, 8, 1), (9, 1, 5)], np.float32)
GRADIENT_SELECTOR = (
    "encodeToCommandBuffer_gradientMatrix_inputMatrix_meanVector_varianceVector_gammaVector_betaVector_"
    "resultGradientForDataMatrix_resultGradientForGammaVector_resultGradientForBetaVector_"
)


def test_a_script() -> None:
    """Forward and gradient, as one would write it for Apple's library."""
    device = Metal.MTLCreateSystemDefaultDevice()
    queue = device.newCommandQueue()
    rows, columns = X.shape

    def buffer_of(array: Array) -> Any:
        return device.newBufferWithBytes_length_options_(
            array.tobytes(), array.nbytes, Metal.MTLResourceStorageModeShared
        )

    def matrix_of(buffer: Any) -> Any:
        descriptor = MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_rowBytes_dataType_(
            rows, columns, columns * 4, MPS.MPSDataTypeFloat32
        )
        return MPS.MPSMatrix.alloc().initWithBuffer_descriptor_(buffer, descriptor)

    def vector_of(buffer: Any) -> Any:
        descriptor = MPS.MPSVectorDescriptor.vectorDescriptorWithLength_dataType_(columns, MPS.MPSDataTypeFloat32)
        return MPS.MPSVector.alloc().initWithBuffer_descriptor_(buffer, descriptor)

    def read(buffer: Any) -> Array:
        return np.frombuffer(buffer.contents().as_buffer(buffer.length()), dtype=np.float32)

    x, y, dx = matrix_of(buffer_of(X)), matrix_of(buffer_of(0 * X)), matrix_of(buffer_of(0 * X))
    gamma = vector_of(buffer_of(np.array([1.5, 0.75, 2], np.float32)))
    beta = vector_of(device.newBufferWithBytes_length_options_(struct.pack("<3f", 0.5, -0.5, 1), 12, 0))
    mean, variance, dgamma, dbeta = (vector_of(device.newBufferWithLength_options_(12, 0)) for _ in range(4))

    forward = MPS.MPSMatrixBatchNormalization.alloc().initWithDevice_(device)
    backward = MPS.MPSMatrixBatchNormalizationGradient.alloc().initWithDevice_(device)
    forward.setComputeStatistics_(True)
    for kernel in (forward, backward):
        kernel.setEpsilon_(0.001)
        kernel.setNeuronType_parameterA_parameterB_parameterC_(MPS.MPSCNNNeuronTypeTanH, 1.2, 0.5, 0.0)
        kernel.setLabel_("batch norm")

    commands = queue.commandBuffer()
    seen = []
    commands.addCompletedHandler_(lambda buffer: seen.append(buffer.status()))
    forward.encodeToCommandBuffer_inputMatrix_meanVector_varianceVector_gammaVector_betaVector_resultMatrix_(
        commands, x, mean, variance, gamma, beta, y
    )
    dy = matrix_of(buffer_of(np.array([(0.5, -1, 2), (1, 0.25, -0.5), (-0.75, 1.5, 1), (2, -0.5, 0.25)], np.float32)))
    getattr(backward, GRADIENT_SELECTOR)(commands, dy, x, mean, variance, gamma, beta, dx, dgamma, dbeta)
    commands.commit()
    commands.waitUntilCompleted()
    assert commands.error() is None
    assert commands.status() == Metal.MTLCommandBufferStatusCompleted == 4
    assert seen == [4]

    np.testing.assert_allclose(read(mean.data()), [4, 4, 4])
    np.testing.assert_allclose(read(variance.data()), [9.5, 7.5, 5])
    np.testing.assert_allclose(read(y.data())[:3], [-0.5354519460, -0.5767927417, 0.0633384254], rtol=2e-6)
    np.testing.assert_allclose(read(dx.data())[:3], [0.0921034273, -0.0570154049, 0.6260874531], rtol=2e-6)
    np.testing.assert_allclose(read(dgamma.data()), [0.4159813567, 1.8140072331, -0.9685838064], rtol=2e-6)
    np.testing.assert_allclose(read(dbeta.data()), [0.6088831725, 0.3119771841, 1.5532787522], rtol=2e-6)


def test_every_member_is_a_method_of_plain_numbers() -> None:
    """Whatever Swift's classes have as a member PyObjC's have as a method, with a setter where it can be set."""
    device = Metal.MTLCreateSystemDefaultDevice()
    queue = device.newCommandQueue()
    buffer = device.newBufferWithLength_options_(64, 0)
    description = MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_rowBytes_dataType_(4, 3, 12, 0x10000020)
    vectors = MPS.MPSVectorDescriptor.vectorDescriptorWithLength_vectors_vectorBytes_dataType_(3, 2, 16, 0x10000010)
    commands = queue.commandBuffer()
    objects = [
        device,
        queue,
        buffer,
        commands,
        description,
        vectors,
        MPS.MPSMatrix.alloc().initWithBuffer_offset_descriptor_(buffer, 8, description),
        MPS.MPSVector.alloc().initWithDevice_descriptor_(device, vectors),
        MPS.MPSTemporaryMatrix.temporaryMatrixWithCommandBuffer_matrixDescriptor_(commands, description),
        MPS.MPSTemporaryVector.temporaryVectorWithCommandBuffer_descriptor_(commands, vectors),
        MPS.MPSMatrixBatchNormalization.alloc().initWithDevice_(device),
        MPS.MPSMatrixBatchNormalizationGradient.alloc().initWithDevice_(device),
        Foundation.NSKeyedArchiver.alloc().initRequiringSecureCoding_(True),
    ]
    checked = 0
    for thing in objects:
        cls = getattr(swift, type(thing).__name__)
        assert isinstance(thing, cls)
        for name in dir(cls):
            member = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            if not isinstance(member, property) and not hasattr(member, "attribute"):
                continue
            value = getattr(thing, name)()
            assert value is None or type(value).__name__ not in (
                "MPSDataType",
                "MPSKernelOptions",
                "MTLResourceOptions",
            )
            assert not isinstance(value, int) or type(value) in (int, bool)
            setter = f"set{name[0].upper()}{name[1:]}_"
            writable = getattr(member, "writable", False)
            assert hasattr(thing, setter) == writable, setter
            if writable:
                getattr(thing, setter)(value)
                assert getattr(thing, name)() == value
            checked += 1
    assert checked > 70


def test_the_remaining_selectors() -> None:
    device = Metal.MTLCreateSystemDefaultDevice()
    assert Metal.MTLCopyAllDevices() == [device]
    assert MPS.MPSSupportsMTLDevice(device)
    queue = device.newCommandQueueWithMaxCommandBufferCount_(4)
    commands = queue.commandBufferWithUnretainedReferences()
    commands.addScheduledHandler_(lambda buffer: None)
    commands.enqueue()
    assert commands.status() == Metal.MTLCommandBufferStatusEnqueued
    commands.commit()
    commands.waitUntilScheduled()
    assert 0 < commands.GPUStartTime() <= commands.GPUEndTime()
    assert 0 < commands.kernelStartTime() <= commands.kernelEndTime()

    row = MPS.MPSMatrixDescriptor.rowBytesForColumns_dataType_(5, MPS.MPSDataTypeFloat32)
    assert row == MPS.MPSMatrixDescriptor.rowBytesFromColumns_dataType_(5, MPS.MPSDataTypeFloat32) == 32
    assert MPS.MPSVectorDescriptor.vectorBytesForLength_dataType_(9, MPS.MPSDataTypeFloat16) == 32
    several = MPS.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_(
        4, 3, 2, 16, 80, MPS.MPSDataTypeFloat32
    )
    assert (several.matrices(), several.matrixBytes(), several.rowBytes()) == (2, 80, 16)
    old = MPS.MPSMatrixDescriptor.matrixDescriptorWithDimensions_columns_rowBytes_dataType_(
        4, 3, 16, MPS.MPSDataTypeFloat32
    )
    assert old.rows() == 4
    matrix = MPS.MPSMatrix.alloc().initWithDevice_descriptor_(device, several)
    matrix.synchronizeOnCommandBuffer_(commands)
    assert matrix.resourceSize() == 80 + 3 * 16 + 12
    MPS.MPSTemporaryMatrix.prefetchStorageWithCommandBuffer_matrixDescriptorList_(commands, [several])
    MPS.MPSTemporaryVector.prefetchStorageWithCommandBuffer_descriptorList_(commands, [])

    kernel = MPS.MPSMatrixBatchNormalization.alloc().initWithDevice_(device)
    kernel.setSourceMatrixOrigin_(Metal.MTLOriginMake(1, 2, 0))
    kernel.setResultMatrixOrigin_((3, 4, 0))
    assert (kernel.sourceMatrixOrigin().x, kernel.resultMatrixOrigin().y) == (1, 4)
    assert Metal.MTLSizeMake(1, 2, 3).height == 2
    assert kernel.neuronType() == MPS.MPSCNNNeuronTypeNone
    assert type(kernel.neuronType()) is int
    assert kernel.neuronParameterA() == 0
    for made in (kernel.copy(), kernel.copyWithZone_(None), kernel.copyWithZone_device_(None, device)):
        assert type(made) is type(kernel)
        assert made.sourceMatrixOrigin() == (1, 2, 0)
    with pytest.raises(TypeError, match="the selector has 4 arguments"):
        kernel.setNeuronType_parameterA_parameterB_parameterC_(1, 2)


def test_a_script_for_managed_memory() -> None:
    """What it does to keep two copies of the memory alike is accepted, and does nothing."""
    device = Metal.MTLCreateSystemDefaultDevice()
    assert device.recommendedMaxWorkingSetSize() <= device.maxBufferLength()
    assert (device.isLowPower(), device.registryID()) == (False, 0)
    buffer = device.newBufferWithLength_options_(16, Metal.MTLResourceStorageModeManaged)
    assert (buffer.storageMode(), buffer.allocatedSize()) == (Metal.MTLStorageModeManaged, 16)
    buffer.didModifyRange_(Foundation.NSMakeRange(0, buffer.length()))
    assert Foundation.NSMakeRange(3, 5).location == 3
    commands = device.newCommandQueue().commandBuffer()
    commands.pushDebugGroup_("read back")
    encoder = commands.blitCommandEncoder()
    encoder.setLabel_("blit")
    encoder.synchronizeResource_(buffer)
    encoder.endEncoding()
    commands.popDebugGroup()
    commands.commit()
    commands.waitUntilCompleted()
    assert (encoder.label(), commands.status()) == ("blit", 4)


def test_an_origin_can_be_changed_in_part() -> None:
    kernel = MPS.MPSMatrixBatchNormalization.alloc().initWithDevice_(Metal.MTLCreateSystemDefaultDevice())
    origin = kernel.sourceMatrixOrigin()
    origin.x = 4
    origin[1] = 5
    assert kernel.sourceMatrixOrigin() == (0, 0, 0)  # it is a copy
    kernel.setSourceMatrixOrigin_(origin)
    origin.z = 6
    assert kernel.sourceMatrixOrigin() == Metal.MTLOriginMake(4, 5, 0) == (4, 5, 0)
    assert kernel.sourceMatrixOrigin() != origin
    assert (len(origin), list(origin), origin[-1]) == (3, [4, 5, 6], 6)
    with pytest.raises(TypeError, match=r"sourceMatrixOrigin\.x must be an int"):
        kernel.setSourceMatrixOrigin_(Metal.MTLOrigin("1"))


def test_a_method_is_not_overwritten_by_swift_s_spelling() -> None:
    kernel = MPS.MPSMatrixBatchNormalization.alloc().initWithDevice_(Metal.MTLCreateSystemDefaultDevice())
    with pytest.raises(AttributeError, match="epsilon is a method"):
        kernel.epsilon = 0.5
    assert kernel.epsilon() == MPS.FLT_MIN


def test_constants() -> None:
    assert (MPS.MPSDataTypeFloat32, MPS.MPSDataTypeFloat16) == (0x10000020, 0x10000010)
    assert (MPS.MPSCNNNeuronTypeReLU, MPS.MPSCNNNeuronTypeELU, MPS.MPSCNNNeuronTypeGeLU) == (1, 9, 15)
    assert (Metal.MTLResourceStorageModeShared, Metal.MTLResourceStorageModePrivate) == (0, 32)
    assert Metal.MTLResourceCPUCacheModeWriteCombined == 1
    assert MPS.MPSKernelOptionsSkipAPIValidation == 1
    assert (Metal.MTLCommandBufferStatusCompleted, Metal.MTLCommandBufferStatusError) == (4, 5)
    assert MPS.NSUIntegerMax == 2**64 - 1
    for name in MPS.__all__:
        assert hasattr(MPS, name)
        assert not isinstance(getattr(MPS, name), int) or type(getattr(MPS, name)) is int


def test_memory_without_a_copy() -> None:
    device = Metal.MTLCreateSystemDefaultDevice()
    memory = np.zeros(4, np.float32)
    buffer = device.newBufferWithBytesNoCopy_length_options_deallocator_(memory, 16, 0, None)
    np.frombuffer(buffer.contents().as_buffer(16), np.float32)[1] = 5
    assert memory[1] == 5
    with pytest.raises(ValueError, match="count is 17, but there are 16 bytes"):
        buffer.contents().as_buffer(17)
    assert buffer.contents().as_tuple(8) == (0, 0, 0, 0, 0, 0, 160, 64)
    assert buffer.contents()[7] == 64
    with pytest.raises(ValueError, match="count is 17, but there are 16 bytes"):
        buffer.contents().as_tuple(17)
    with pytest.raises(IndexError, match="index is 16, but there are 16 bytes"):
        buffer.contents()[16]
    with buffer.contents().as_buffer(16) as contents:
        contents[0] = 1
    assert buffer.contents()[0] == 1
    buffer.didModifyRange_((0, 16))


def test_the_two_spellings_go_together() -> None:
    """A kernel of one with matrices and command buffers of the other, both ways."""
    swift_device, device = swift.MTLCreateSystemDefaultDevice(), Metal.MTLCreateSystemDefaultDevice()
    mean, var = np.zeros(3, np.float32), np.ones(3, np.float32)
    results = []
    for kernel_module, other in ((swift, device), (MPS, swift_device)):
        y = np.empty_like(X)
        described = swift.MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=swift.MPSDataType.float32)
        vectors = swift.MPSVectorDescriptor(length=3, dataType=swift.MPSDataType.float32)
        x_matrix, y_matrix = (
            swift.MPSMatrix(buffer=other.makeBuffer(bytesNoCopy=a), descriptor=described) for a in (X.copy(), y)
        )
        m, v = (swift.MPSVector(buffer=other.makeBuffer(bytesNoCopy=a), descriptor=vectors) for a in (mean, var))
        kernel = kernel_module.MPSMatrixBatchNormalization(device=other)
        commands = other.makeCommandQueue().makeCommandBuffer()
        kernel.encode(
            commandBuffer=commands, inputMatrix=x_matrix, meanVector=m, varianceVector=v, resultMatrix=y_matrix
        )
        commands.commit()
        commands.waitUntilCompleted()
        results.append(y)
    assert_same_bits([results[0]], [X])
    assert_same_bits([results[0]], [results[1]])


def test_archives() -> None:
    device = Metal.MTLCreateSystemDefaultDevice()
    kernel = MPS.MPSMatrixBatchNormalizationGradient.alloc().initWithDevice_(device)
    kernel.setEpsilon_(0.5)
    kernel.setNeuronType_parameterA_parameterB_parameterC_(MPS.MPSCNNNeuronTypeELU, 0.25, 0, 0)
    data, error = Foundation.NSKeyedArchiver.archivedDataWithRootObject_requiringSecureCoding_error_(kernel, True, None)
    assert error is None
    restored, error = Foundation.NSKeyedUnarchiver.unarchivedObjectOfClass_fromData_error_(type(kernel), data, None)
    assert error is None
    assert (restored.epsilon(), restored.neuronType(), restored.neuronParameterA()) == (0.5, 9, 0.25)
    assert restored.device() is device
    # An archive knows nothing of the spelling.
    same = swift.NSKeyedUnarchiver.unarchivedObject(swift.MPSMatrixBatchNormalizationGradient, data)
    assert same.epsilon == 0.5

    nothing, error = Foundation.NSKeyedUnarchiver.unarchivedObjectOfClass_fromData_error_(type(kernel), b"no", None)
    assert nothing is None
    assert "not a binary property list" in error.localizedDescription()
    assert (error.domain(), error.code()) == ("NSCocoaErrorDomain", 4864)
    assert error.userInfo()["NSLocalizedDescription"] == error.localizedDescription()
    with pytest.raises(TypeError, match="coder must be an NSKeyedUnarchiver, not NoneType"):
        MPS.MPSMatrixBatchNormalization.alloc().initWithCoder_device_(None, device)

    archiver = Foundation.NSKeyedArchiver.alloc().initRequiringSecureCoding_(True)
    kernel.encodeWithCoder_(archiver)
    archiver.encodeObject_forKey_("note", "remark")
    archiver.finishEncoding()
    coder, error = Foundation.NSKeyedUnarchiver.alloc().initForReadingFromData_error_(archiver.encodedData(), None)
    assert error is None
    again = MPS.MPSMatrixBatchNormalizationGradient.alloc().initWithCoder_device_(coder, device)
    assert again.epsilon() == coder.decodeDoubleForKey_("epsilon") == coder.decodeFloatForKey_("epsilon") == 0.5
    assert MPS.MPSMatrixBatchNormalizationGradient.alloc().initWithCoder_(coder).device() is device
    assert coder.containsValueForKey_("batchStart")
    assert coder.decodeIntegerForKey_("batchSize") == -1
    assert coder.decodeBoolForKey_("gradientThroughStatistics") is True
    assert coder.decodeObjectOfClass_forKey_(str, "remark") == "note"


def test_an_error_of_the_work_is_an_nserror() -> None:
    commands = Metal.MTLCreateSystemDefaultDevice().newCommandQueue().commandBuffer()

    def fail() -> None:
        raise ZeroDivisionError("as intended")

    commands._work.append(fail)
    commands.commit()
    commands.waitUntilCompleted()
    assert commands.status() == Metal.MTLCommandBufferStatusError
    assert "as intended" in commands.error().localizedDescription()
    assert (commands.error().domain(), commands.error().code()) == ("MTLCommandBufferErrorDomain", 1)


def test_only_members_can_be_set() -> None:
    queue = Metal.MTLCreateSystemDefaultDevice().newCommandQueue()
    buffer = queue.device().newBufferWithLength_options_(1, 0)
    for thing in (queue, queue.commandBuffer(), buffer):
        with pytest.raises(AttributeError):
            thing.lable = "misspelt"
        with pytest.raises(AttributeError, match="label"):
            thing.label = "not PyObjC's spelling"
