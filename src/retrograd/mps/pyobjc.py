"""The kernels under PyObjC's names. A script for its Metal, MetalPerformanceShaders and Foundation modules runs with

    import retrograd.mps.pyobjc as Metal
    import retrograd.mps.pyobjc as MetalPerformanceShaders

The classes are those of :mod:`retrograd.mps` with members as methods (``matrix.rows()``, ``kernel.setEpsilon_(x)``),
selectors with an underscore for each colon, and ``alloc()``. Objects of both modules can be mixed in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import FunctionType
from typing import Any, Final

from . import _archive, _batch_normalization, _matrix, _metal, _rnn, _rnn_descriptor, _rnn_state, _types
from ._kernel import MPSKernel, MPSMatrixBinaryKernel, MPSMatrixUnaryKernel
from ._types import (
    FLT_MIN,
    MPSCNNNeuronType,
    MPSDataType,
    MPSKernelOptions,
    MPSRNNMatrixId,
    MPSRNNSequenceDirection,
    MTLCommandBufferStatus,
    MTLResourceOptions,
    MTLSize,
    MTLSizeMake,
    MTLStorageMode,
    NSMakeRange,
    NSRange,
    NSUIntegerMax,
    Setting,
)

__all__ = [
    "FLT_MIN",
    "MPSCNNConvolutionDescriptor",
    "MPSCNNNeuronTypeAbsolute",
    "MPSCNNNeuronTypeCount",
    "MPSCNNNeuronTypeELU",
    "MPSCNNNeuronTypeExponential",
    "MPSCNNNeuronTypeGeLU",
    "MPSCNNNeuronTypeHardSigmoid",
    "MPSCNNNeuronTypeLinear",
    "MPSCNNNeuronTypeLogarithm",
    "MPSCNNNeuronTypeNone",
    "MPSCNNNeuronTypePReLU",
    "MPSCNNNeuronTypePower",
    "MPSCNNNeuronTypeReLU",
    "MPSCNNNeuronTypeReLUN",
    "MPSCNNNeuronTypeSigmoid",
    "MPSCNNNeuronTypeSoftPlus",
    "MPSCNNNeuronTypeSoftSign",
    "MPSCNNNeuronTypeTanH",
    "MPSDataTypeAlternateEncodingBit",
    "MPSDataTypeBFloat16",
    "MPSDataTypeBool",
    "MPSDataTypeFloat16",
    "MPSDataTypeFloat32",
    "MPSDataTypeFloat64",
    "MPSDataTypeFloatBit",
    "MPSDataTypeInt8",
    "MPSDataTypeInt16",
    "MPSDataTypeInt32",
    "MPSDataTypeInt64",
    "MPSDataTypeInvalid",
    "MPSDataTypeNormalizedBit",
    "MPSDataTypeSignedBit",
    "MPSDataTypeUInt8",
    "MPSDataTypeUInt16",
    "MPSDataTypeUInt32",
    "MPSDataTypeUInt64",
    "MPSDataTypeUnorm1",
    "MPSDataTypeUnorm8",
    "MPSGRUDescriptor",
    "MPSKernel",
    "MPSKernelOptionsAllowReducedPrecision",
    "MPSKernelOptionsDisableInternalTiling",
    "MPSKernelOptionsInsertDebugGroups",
    "MPSKernelOptionsNone",
    "MPSKernelOptionsSkipAPIValidation",
    "MPSKernelOptionsVerbose",
    "MPSLSTMDescriptor",
    "MPSMatrix",
    "MPSMatrixBatchNormalization",
    "MPSMatrixBatchNormalizationGradient",
    "MPSMatrixBinaryKernel",
    "MPSMatrixDescriptor",
    "MPSMatrixUnaryKernel",
    "MPSNNNeuronDescriptor",
    "MPSRNNDescriptor",
    "MPSRNNMatrixIdGRUInputGateBiasTerms",
    "MPSRNNMatrixIdGRUInputGateInputWeights",
    "MPSRNNMatrixIdGRUInputGateRecurrentWeights",
    "MPSRNNMatrixIdGRUOutputGateBiasTerms",
    "MPSRNNMatrixIdGRUOutputGateInputGateWeights",
    "MPSRNNMatrixIdGRUOutputGateInputWeights",
    "MPSRNNMatrixIdGRUOutputGateRecurrentWeights",
    "MPSRNNMatrixIdGRURecurrentGateBiasTerms",
    "MPSRNNMatrixIdGRURecurrentGateInputWeights",
    "MPSRNNMatrixIdGRURecurrentGateRecurrentWeights",
    "MPSRNNMatrixIdLSTMForgetGateBiasTerms",
    "MPSRNNMatrixIdLSTMForgetGateInputWeights",
    "MPSRNNMatrixIdLSTMForgetGateMemoryWeights",
    "MPSRNNMatrixIdLSTMForgetGateRecurrentWeights",
    "MPSRNNMatrixIdLSTMInputGateBiasTerms",
    "MPSRNNMatrixIdLSTMInputGateInputWeights",
    "MPSRNNMatrixIdLSTMInputGateMemoryWeights",
    "MPSRNNMatrixIdLSTMInputGateRecurrentWeights",
    "MPSRNNMatrixIdLSTMMemoryGateBiasTerms",
    "MPSRNNMatrixIdLSTMMemoryGateInputWeights",
    "MPSRNNMatrixIdLSTMMemoryGateMemoryWeights",
    "MPSRNNMatrixIdLSTMMemoryGateRecurrentWeights",
    "MPSRNNMatrixIdLSTMOutputGateBiasTerms",
    "MPSRNNMatrixIdLSTMOutputGateInputWeights",
    "MPSRNNMatrixIdLSTMOutputGateMemoryWeights",
    "MPSRNNMatrixIdLSTMOutputGateRecurrentWeights",
    "MPSRNNMatrixIdSingleGateBiasTerms",
    "MPSRNNMatrixIdSingleGateInputWeights",
    "MPSRNNMatrixIdSingleGateRecurrentWeights",
    "MPSRNNMatrixId_count",
    "MPSRNNMatrixTrainingLayer",
    "MPSRNNMatrixTrainingState",
    "MPSRNNRecurrentMatrixState",
    "MPSRNNSequenceDirectionBackward",
    "MPSRNNSequenceDirectionForward",
    "MPSRNNSingleGateDescriptor",
    "MPSSupportsMTLDevice",
    "MPSTemporaryMatrix",
    "MPSTemporaryVector",
    "MPSVector",
    "MPSVectorDescriptor",
    "MTLBlitCommandEncoder",
    "MTLBuffer",
    "MTLCommandBuffer",
    "MTLCommandBufferStatusCommitted",
    "MTLCommandBufferStatusCompleted",
    "MTLCommandBufferStatusEnqueued",
    "MTLCommandBufferStatusError",
    "MTLCommandBufferStatusNotEnqueued",
    "MTLCommandBufferStatusScheduled",
    "MTLCommandQueue",
    "MTLCopyAllDevices",
    "MTLCreateSystemDefaultDevice",
    "MTLDevice",
    "MTLOrigin",
    "MTLOriginMake",
    "MTLResourceCPUCacheModeDefaultCache",
    "MTLResourceCPUCacheModeWriteCombined",
    "MTLResourceHazardTrackingModeTracked",
    "MTLResourceHazardTrackingModeUntracked",
    "MTLResourceStorageModeManaged",
    "MTLResourceStorageModeMemoryless",
    "MTLResourceStorageModePrivate",
    "MTLResourceStorageModeShared",
    "MTLSize",
    "MTLSizeMake",
    "MTLStorageModeManaged",
    "MTLStorageModeMemoryless",
    "MTLStorageModePrivate",
    "MTLStorageModeShared",
    "NSError",
    "NSKeyedArchiver",
    "NSKeyedUnarchiver",
    "NSMakeRange",
    "NSRange",
    "NSUIntegerMax",
]

# ---- constants -------------------------------------------------------------------------------------------------------

MPSDataTypeInvalid: Final[int] = MPSDataType.invalid.value
MPSDataTypeFloatBit: Final[int] = MPSDataType.floatBit.value
MPSDataTypeFloat16: Final[int] = MPSDataType.float16.value
MPSDataTypeFloat32: Final[int] = MPSDataType.float32.value
MPSDataTypeSignedBit: Final[int] = MPSDataType.signedBit.value
MPSDataTypeInt8: Final[int] = MPSDataType.int8.value
MPSDataTypeInt16: Final[int] = MPSDataType.int16.value
MPSDataTypeInt32: Final[int] = MPSDataType.int32.value
MPSDataTypeInt64: Final[int] = MPSDataType.int64.value
MPSDataTypeUInt8: Final[int] = MPSDataType.uInt8.value
MPSDataTypeUInt16: Final[int] = MPSDataType.uInt16.value
MPSDataTypeUInt32: Final[int] = MPSDataType.uInt32.value
MPSDataTypeUInt64: Final[int] = MPSDataType.uInt64.value
MPSDataTypeNormalizedBit: Final[int] = MPSDataType.normalizedBit.value
MPSDataTypeUnorm1: Final[int] = MPSDataType.unorm1.value
MPSDataTypeUnorm8: Final[int] = MPSDataType.unorm8.value
MPSDataTypeAlternateEncodingBit: Final[int] = MPSDataType.alternateEncodingBit.value
MPSDataTypeBool: Final[int] = MPSDataType.bool.value
MPSDataTypeBFloat16: Final[int] = MPSDataType.bFloat16.value
MPSDataTypeFloat64: Final[int] = MPSDataType.float64.value
MPSCNNNeuronTypeNone: Final[int] = MPSCNNNeuronType.none.value
MPSCNNNeuronTypeReLU: Final[int] = MPSCNNNeuronType.reLU.value
MPSCNNNeuronTypeLinear: Final[int] = MPSCNNNeuronType.linear.value
MPSCNNNeuronTypeSigmoid: Final[int] = MPSCNNNeuronType.sigmoid.value
MPSCNNNeuronTypeHardSigmoid: Final[int] = MPSCNNNeuronType.hardSigmoid.value
MPSCNNNeuronTypeTanH: Final[int] = MPSCNNNeuronType.tanH.value
MPSCNNNeuronTypeAbsolute: Final[int] = MPSCNNNeuronType.absolute.value
MPSCNNNeuronTypeSoftPlus: Final[int] = MPSCNNNeuronType.softPlus.value
MPSCNNNeuronTypeSoftSign: Final[int] = MPSCNNNeuronType.softSign.value
MPSCNNNeuronTypeELU: Final[int] = MPSCNNNeuronType.elu.value
MPSCNNNeuronTypePReLU: Final[int] = MPSCNNNeuronType.pReLU.value
MPSCNNNeuronTypeReLUN: Final[int] = MPSCNNNeuronType.reLUN.value
MPSCNNNeuronTypePower: Final[int] = MPSCNNNeuronType.power.value
MPSCNNNeuronTypeExponential: Final[int] = MPSCNNNeuronType.exponential.value
MPSCNNNeuronTypeLogarithm: Final[int] = MPSCNNNeuronType.logarithm.value
MPSCNNNeuronTypeGeLU: Final[int] = MPSCNNNeuronType.geLU.value
MPSCNNNeuronTypeCount: Final[int] = MPSCNNNeuronType.count.value
MPSKernelOptionsNone: Final[int] = MPSKernelOptions.none.value
MPSKernelOptionsSkipAPIValidation: Final[int] = MPSKernelOptions.skipAPIValidation.value
MPSKernelOptionsAllowReducedPrecision: Final[int] = MPSKernelOptions.allowReducedPrecision.value
MPSKernelOptionsDisableInternalTiling: Final[int] = MPSKernelOptions.disableInternalTiling.value
MPSKernelOptionsInsertDebugGroups: Final[int] = MPSKernelOptions.insertDebugGroups.value
MPSKernelOptionsVerbose: Final[int] = MPSKernelOptions.verbose.value
MPSRNNMatrixIdSingleGateInputWeights: Final[int] = MPSRNNMatrixId.singleGateInputWeights.value
MPSRNNMatrixIdSingleGateRecurrentWeights: Final[int] = MPSRNNMatrixId.singleGateRecurrentWeights.value
MPSRNNMatrixIdSingleGateBiasTerms: Final[int] = MPSRNNMatrixId.singleGateBiasTerms.value
MPSRNNMatrixIdLSTMInputGateInputWeights: Final[int] = MPSRNNMatrixId.lstmInputGateInputWeights.value
MPSRNNMatrixIdLSTMInputGateRecurrentWeights: Final[int] = MPSRNNMatrixId.lstmInputGateRecurrentWeights.value
MPSRNNMatrixIdLSTMInputGateMemoryWeights: Final[int] = MPSRNNMatrixId.lstmInputGateMemoryWeights.value
MPSRNNMatrixIdLSTMInputGateBiasTerms: Final[int] = MPSRNNMatrixId.lstmInputGateBiasTerms.value
MPSRNNMatrixIdLSTMForgetGateInputWeights: Final[int] = MPSRNNMatrixId.lstmForgetGateInputWeights.value
MPSRNNMatrixIdLSTMForgetGateRecurrentWeights: Final[int] = MPSRNNMatrixId.lstmForgetGateRecurrentWeights.value
MPSRNNMatrixIdLSTMForgetGateMemoryWeights: Final[int] = MPSRNNMatrixId.lstmForgetGateMemoryWeights.value
MPSRNNMatrixIdLSTMForgetGateBiasTerms: Final[int] = MPSRNNMatrixId.lstmForgetGateBiasTerms.value
MPSRNNMatrixIdLSTMMemoryGateInputWeights: Final[int] = MPSRNNMatrixId.lstmMemoryGateInputWeights.value
MPSRNNMatrixIdLSTMMemoryGateRecurrentWeights: Final[int] = MPSRNNMatrixId.lstmMemoryGateRecurrentWeights.value
MPSRNNMatrixIdLSTMMemoryGateMemoryWeights: Final[int] = MPSRNNMatrixId.lstmMemoryGateMemoryWeights.value
MPSRNNMatrixIdLSTMMemoryGateBiasTerms: Final[int] = MPSRNNMatrixId.lstmMemoryGateBiasTerms.value
MPSRNNMatrixIdLSTMOutputGateInputWeights: Final[int] = MPSRNNMatrixId.lstmOutputGateInputWeights.value
MPSRNNMatrixIdLSTMOutputGateRecurrentWeights: Final[int] = MPSRNNMatrixId.lstmOutputGateRecurrentWeights.value
MPSRNNMatrixIdLSTMOutputGateMemoryWeights: Final[int] = MPSRNNMatrixId.lstmOutputGateMemoryWeights.value
MPSRNNMatrixIdLSTMOutputGateBiasTerms: Final[int] = MPSRNNMatrixId.lstmOutputGateBiasTerms.value
MPSRNNMatrixIdGRUInputGateInputWeights: Final[int] = MPSRNNMatrixId.gruInputGateInputWeights.value
MPSRNNMatrixIdGRUInputGateRecurrentWeights: Final[int] = MPSRNNMatrixId.gruInputGateRecurrentWeights.value
MPSRNNMatrixIdGRUInputGateBiasTerms: Final[int] = MPSRNNMatrixId.gruInputGateBiasTerms.value
MPSRNNMatrixIdGRURecurrentGateInputWeights: Final[int] = MPSRNNMatrixId.gruRecurrentGateInputWeights.value
MPSRNNMatrixIdGRURecurrentGateRecurrentWeights: Final[int] = MPSRNNMatrixId.gruRecurrentGateRecurrentWeights.value
MPSRNNMatrixIdGRURecurrentGateBiasTerms: Final[int] = MPSRNNMatrixId.gruRecurrentGateBiasTerms.value
MPSRNNMatrixIdGRUOutputGateInputWeights: Final[int] = MPSRNNMatrixId.gruOutputGateInputWeights.value
MPSRNNMatrixIdGRUOutputGateRecurrentWeights: Final[int] = MPSRNNMatrixId.gruOutputGateRecurrentWeights.value
MPSRNNMatrixIdGRUOutputGateInputGateWeights: Final[int] = MPSRNNMatrixId.gruOutputGateInputGateWeights.value
MPSRNNMatrixIdGRUOutputGateBiasTerms: Final[int] = MPSRNNMatrixId.gruOutputGateBiasTerms.value
MPSRNNMatrixId_count: Final[int] = MPSRNNMatrixId.MPSRNNMatrixId_count.value
MPSRNNSequenceDirectionForward: Final[int] = MPSRNNSequenceDirection.forward.value
MPSRNNSequenceDirectionBackward: Final[int] = MPSRNNSequenceDirection.backward.value
MTLCommandBufferStatusNotEnqueued: Final[int] = MTLCommandBufferStatus.notEnqueued.value
MTLCommandBufferStatusEnqueued: Final[int] = MTLCommandBufferStatus.enqueued.value
MTLCommandBufferStatusCommitted: Final[int] = MTLCommandBufferStatus.committed.value
MTLCommandBufferStatusScheduled: Final[int] = MTLCommandBufferStatus.scheduled.value
MTLCommandBufferStatusCompleted: Final[int] = MTLCommandBufferStatus.completed.value
MTLCommandBufferStatusError: Final[int] = MTLCommandBufferStatus.error.value
MTLStorageModeShared: Final[int] = MTLStorageMode.shared.value
MTLStorageModeManaged: Final[int] = MTLStorageMode.managed.value
MTLStorageModePrivate: Final[int] = MTLStorageMode.private.value
MTLStorageModeMemoryless: Final[int] = MTLStorageMode.memoryless.value
MTLResourceCPUCacheModeDefaultCache: Final[int] = MTLResourceOptions.cpuCacheModeDefaultCache.value
MTLResourceStorageModeShared: Final[int] = MTLResourceOptions.storageModeShared.value
MTLResourceCPUCacheModeWriteCombined: Final[int] = MTLResourceOptions.cpuCacheModeWriteCombined.value
MTLResourceStorageModeManaged: Final[int] = MTLResourceOptions.storageModeManaged.value
MTLResourceStorageModePrivate: Final[int] = MTLResourceOptions.storageModePrivate.value
MTLResourceStorageModeMemoryless: Final[int] = MTLResourceOptions.storageModeMemoryless.value
MTLResourceHazardTrackingModeUntracked: Final[int] = MTLResourceOptions.hazardTrackingModeUntracked.value
MTLResourceHazardTrackingModeTracked: Final[int] = MTLResourceOptions.hazardTrackingModeTracked.value

_COCOA_ERRORS: Final = "NSCocoaErrorDomain"
_CORRUPT: Final = 4864
_INVALID_VALUE: Final = 4866

# ---- from Swift's names to PyObjC's ----------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert to what PyObjC returns: enumerations as ints, an origin as a mutable copy."""
    if isinstance(value, Enum):
        return value.value
    return MTLOrigin(*value) if isinstance(value, _types.MTLOrigin) else value


def _named(keywords: tuple[str, ...], arguments: tuple[Any, ...]) -> dict[str, Any]:
    if len(arguments) != len(keywords):
        raise TypeError(f"the selector has {len(keywords)} arguments ({', '.join(keywords)}), not {len(arguments)}")
    return dict(zip(keywords, arguments, strict=True))


def _method(swift_name: str, *keywords: str) -> Callable[..., Any]:
    """A selector for a Swift method. `keywords` name its arguments in order."""

    def send(self: Any, *arguments: Any) -> Any:
        return _plain(getattr(self, swift_name)(**_named(keywords, arguments)))

    return send


def _init(*keywords: str) -> Callable[..., Any]:
    """A selector for an initializer."""

    def send(self: Any, *arguments: Any) -> Any:
        type(self).__init__(self, **_named(keywords, arguments))
        return self

    return send


def _factory(*keywords: str) -> Any:
    """A class selector that makes an object."""
    return classmethod(lambda cls, *arguments: cls(**_named(keywords, arguments)))


def _with_error(function: Callable[..., Any], code: int) -> Callable[..., Any]:
    """A selector whose last argument is an error pointer: it returns (result, error or None)."""

    def send(*arguments: Any) -> tuple[Any, Any]:
        *most, out = arguments
        if out is not None:
            raise TypeError("the last argument, for the error, must be None")
        try:
            return function(*most), None
        except (ValueError, TypeError, RuntimeError) as error:
            return None, NSError(str(error), _COCOA_ERRORS, code)

    return send


def _pyobjc_class(swift: type, **selectors: Any) -> Any:
    """Make a subclass of a Swift class with its members as methods, and with these selectors.

    This is safe because the Swift classes never use their own public members.
    """
    members: dict[str, Any] = {"__slots__": (), "alloc": classmethod(_alloc), "__doc__": swift.__doc__}
    for base in reversed(swift.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, (property, Setting)) and not name.startswith("_"):
                members[name] = _getter(member)
                if member.writable if isinstance(member, Setting) else member.fset:
                    members[f"set{name[0].upper()}{name[1:]}_"] = _setter(member)
    members.update(selectors)
    for selector, member in members.items():
        if isinstance(member, FunctionType):
            member.__name__ = member.__qualname__ = selector
    return type(swift.__name__, (swift,), members)


def _alloc(cls: Any) -> Any:
    return cls.__new__(cls)


def _getter(member: Any) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return _plain(member.__get__(self, type(self)))

    get.__doc__ = member.__doc__
    return get


def _setter(member: Any) -> Callable[[Any, Any], None]:
    def set_(self: Any, value: Any) -> None:
        member.__set__(self, value)

    return set_


# ---- Metal -----------------------------------------------------------------------------------------------------------


class varlist:
    """Memory of unknown length, as PyObjC returns it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def as_buffer(self, count: int) -> memoryview:
        """The first `count` bytes, without a copy."""
        if not 0 <= count <= self._memory.nbytes:
            raise ValueError(f"as_buffer: count is {count}, but there are {self._memory.nbytes} bytes")
        return self._memory[:count]

    def as_tuple(self, count: int) -> tuple[int, ...]:
        """The first `count` bytes, as ints."""
        if not 0 <= count <= self._memory.nbytes:
            raise ValueError(f"as_tuple: count is {count}, but there are {self._memory.nbytes} bytes")
        return tuple(self._memory[:count])

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._memory.nbytes:
            raise IndexError(f"index is {index}, but there are {self._memory.nbytes} bytes")
        return self._memory[index]


class MTLOrigin:
    """The origin of a window: x counts rows, y counts columns, and z is 0. Mutable, by name or index."""

    __slots__ = ("x", "y", "z")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.x, self.y, self.z = x, y, z

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return (self.x, self.y, self.z)[index]

    def __setitem__(self, index: int, value: int) -> None:
        setattr(self, "xyz"[index], value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MTLOrigin):
            other = other[:]
        return other == self[:] if isinstance(other, tuple) else NotImplemented

    def __repr__(self) -> str:
        return f"<MTLOrigin x={self.x} y={self.y} z={self.z}>"


def MTLOriginMake(x: int, y: int, z: int) -> MTLOrigin:
    return MTLOrigin(x, y, z)


NSError: Any = _pyobjc_class(_types.NSError)

MTLBuffer: Any = _pyobjc_class(
    _metal.MTLBuffer,
    contents=lambda self: varlist(self._memory),
    didModifyRange_=_method("didModifyRange", "range"),
)

MTLBlitCommandEncoder: Any = _pyobjc_class(
    _metal.MTLBlitCommandEncoder,
    synchronizeResource_=_method("synchronize", "resource"),
)

MTLCommandBuffer: Any = _pyobjc_class(
    _metal.MTLCommandBuffer,
    _error_type=NSError,
    _blit_encoder_type=MTLBlitCommandEncoder,
    blitCommandEncoder=_method("makeBlitCommandEncoder"),
    pushDebugGroup_=_method("pushDebugGroup", "string"),
    addCompletedHandler_=_method("addCompletedHandler", "handler"),
    addScheduledHandler_=_method("addScheduledHandler", "handler"),
    GPUStartTime=_method("gpuStartTime"),
    GPUEndTime=_method("gpuEndTime"),
)

MTLCommandQueue: Any = _pyobjc_class(
    _metal.MTLCommandQueue,
    _command_buffer_type=MTLCommandBuffer,
    commandBuffer=_method("makeCommandBuffer"),
    commandBufferWithUnretainedReferences=_method("makeCommandBufferWithUnretainedReferences"),
)

MTLDevice: Any = _pyobjc_class(
    _metal.MTLDevice,
    _buffer_type=MTLBuffer,
    _queue_type=MTLCommandQueue,
    newCommandQueue=_method("makeCommandQueue"),
    newCommandQueueWithMaxCommandBufferCount_=_method("makeCommandQueue", "maxCommandBufferCount"),
    newBufferWithLength_options_=_method("makeBuffer", "length", "options"),
    newBufferWithBytes_length_options_=_method("makeBuffer", "bytes", "length", "options"),
    newBufferWithBytesNoCopy_length_options_deallocator_=_method(
        "makeBuffer", "bytesNoCopy", "length", "options", "deallocator"
    ),
)

_default_device: Final = MTLDevice()


def MTLCreateSystemDefaultDevice() -> Any:
    """The only device."""
    return _default_device


def MTLCopyAllDevices() -> list[Any]:
    return [_default_device]


def MPSSupportsMTLDevice(device: Any) -> bool:
    return _metal.MPSSupportsMTLDevice(device)


# ---- Foundation ------------------------------------------------------------------------------------------------------

NSKeyedArchiver: Any = _pyobjc_class(
    _archive.NSKeyedArchiver,
    initRequiringSecureCoding_=_init("requiringSecureCoding"),
    archivedDataWithRootObject_requiringSecureCoding_error_=staticmethod(
        _with_error(_archive.NSKeyedArchiver.archivedData, _INVALID_VALUE)
    ),
    encodeObject_forKey_=_method("encode", "value", "forKey"),
    encodeBool_forKey_=_method("encode", "value", "forKey"),
    encodeInteger_forKey_=_method("encode", "value", "forKey"),
    encodeDouble_forKey_=_method("encode", "value", "forKey"),
    encodeFloat_forKey_=_method("encode", "value", "forKey"),
)

NSKeyedUnarchiver: Any = _pyobjc_class(
    _archive.NSKeyedUnarchiver,
    unarchivedObjectOfClass_fromData_error_=staticmethod(
        _with_error(_archive.NSKeyedUnarchiver.unarchivedObject, _CORRUPT)
    ),
    initForReadingFromData_error_=_with_error(_init("forReadingFrom"), _CORRUPT),
    containsValueForKey_=_method("containsValue", "forKey"),
    decodeObjectOfClass_forKey_=_method("decodeObject", "of", "forKey"),
    decodeBoolForKey_=_method("decodeBool", "forKey"),
    decodeIntegerForKey_=_method("decodeInteger", "forKey"),
    decodeDoubleForKey_=_method("decodeDouble", "forKey"),
    decodeFloatForKey_=_method("decodeFloat", "forKey"),
)

# ---- Metal Performance Shaders ---------------------------------------------------------------------------------------

MPSMatrixDescriptor: Any = _pyobjc_class(
    _matrix.MPSMatrixDescriptor,
    matrixDescriptorWithRows_columns_rowBytes_dataType_=_factory("rows", "columns", "rowBytes", "dataType"),
    matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_=_factory(
        "rows", "columns", "matrices", "rowBytes", "matrixBytes", "dataType"
    ),
    matrixDescriptorWithDimensions_columns_rowBytes_dataType_=_factory("dimensions", "columns", "rowBytes", "dataType"),
    rowBytesForColumns_dataType_=staticmethod(_matrix.MPSMatrixDescriptor.rowBytes),
    rowBytesFromColumns_dataType_=staticmethod(_matrix.MPSMatrixDescriptor.rowBytes),
)

MPSVectorDescriptor: Any = _pyobjc_class(
    _matrix.MPSVectorDescriptor,
    vectorDescriptorWithLength_dataType_=_factory("length", "dataType"),
    vectorDescriptorWithLength_vectors_vectorBytes_dataType_=_factory("length", "vectors", "vectorBytes", "dataType"),
    vectorBytesForLength_dataType_=staticmethod(_matrix.MPSVectorDescriptor.vectorBytes),
)

MPSMatrix: Any = _pyobjc_class(
    _matrix.MPSMatrix,
    initWithBuffer_descriptor_=_init("buffer", "descriptor"),
    initWithBuffer_offset_descriptor_=_init("buffer", "offset", "descriptor"),
    initWithDevice_descriptor_=_init("device", "descriptor"),
    synchronizeOnCommandBuffer_=_method("synchronize", "on"),
)

MPSVector: Any = _pyobjc_class(
    _matrix.MPSVector,
    initWithBuffer_descriptor_=_init("buffer", "descriptor"),
    initWithBuffer_offset_descriptor_=_init("buffer", "offset", "descriptor"),
    initWithDevice_descriptor_=_init("device", "descriptor"),
    synchronizeOnCommandBuffer_=_method("synchronize", "on"),
)

MPSTemporaryMatrix: Any = _pyobjc_class(
    _matrix.MPSTemporaryMatrix,
    temporaryMatrixWithCommandBuffer_matrixDescriptor_=_factory("commandBuffer", "matrixDescriptor"),
    prefetchStorageWithCommandBuffer_matrixDescriptorList_=staticmethod(_matrix.MPSTemporaryMatrix.prefetchStorage),
)

MPSTemporaryVector: Any = _pyobjc_class(
    _matrix.MPSTemporaryVector,
    temporaryVectorWithCommandBuffer_descriptor_=_factory("commandBuffer", "descriptor"),
    prefetchStorageWithCommandBuffer_descriptorList_=staticmethod(_matrix.MPSTemporaryVector.prefetchStorage),
)

_KERNEL: Final[dict[str, Any]] = {
    "_default_device": staticmethod(MTLCreateSystemDefaultDevice),
    "supportsSecureCoding": staticmethod(lambda: True),
    "initWithCoder_": _init("coder"),
    "initWithCoder_device_": _init("coder", "device"),
    "encodeWithCoder_": _method("encode", "with_"),
    "copyWithZone_": _method("copy", "with_"),
    "copyWithZone_device_": _method("copy", "with_", "device"),
}

_NORMALIZATION: Final[dict[str, Any]] = {
    **_KERNEL,
    "initWithDevice_": _init("device"),
    "setNeuronType_parameterA_parameterB_parameterC_": _method(
        "setNeuronType", "neuronType", "parameterA", "parameterB", "parameterC"
    ),
    "neuronType": lambda self: self._neuron[0].value,
}

MPSMatrixBatchNormalization: Any = _pyobjc_class(
    _batch_normalization.MPSMatrixBatchNormalization,
    **_NORMALIZATION,
    encodeToCommandBuffer_inputMatrix_meanVector_varianceVector_gammaVector_betaVector_resultMatrix_=_method(
        "encode",
        "commandBuffer",
        "inputMatrix",
        "meanVector",
        "varianceVector",
        "gammaVector",
        "betaVector",
        "resultMatrix",
    ),
)

MPSMatrixBatchNormalizationGradient: Any = _pyobjc_class(
    _batch_normalization.MPSMatrixBatchNormalizationGradient,
    **_NORMALIZATION,
    encodeToCommandBuffer_gradientMatrix_inputMatrix_meanVector_varianceVector_gammaVector_betaVector_resultGradientForDataMatrix_resultGradientForGammaVector_resultGradientForBetaVector_=_method(
        "encode",
        "to",
        "gradientMatrix",
        "inputMatrix",
        "mean",
        "varianceVector",
        "gammaVector",
        "betaVector",
        "resultGradientForDataMatrix",
        "resultGradientForGammaVector",
        "resultGradientForBetaVector",
    ),
)

_CHANNELS: Final = ("withInputFeatureChannels", "outputFeatureChannels")


def _creator(swift_name: str) -> Any:
    """A class selector for one of a descriptor's factories."""
    return classmethod(lambda cls, *arguments: getattr(cls, swift_name)(**_named(_CHANNELS, arguments)))


MPSNNNeuronDescriptor: Any = _pyobjc_class(
    _rnn_descriptor.MPSNNNeuronDescriptor,
    cnnNeuronDescriptorWithType_=_factory("with_"),
    cnnNeuronDescriptorWithType_a_=_factory("with_", "a"),
    cnnNeuronDescriptorWithType_a_b_=_factory("with_", "a", "b"),
    cnnNeuronDescriptorWithType_a_b_c_=_factory("with_", "a", "b", "c"),
)

MPSCNNConvolutionDescriptor: Any = _pyobjc_class(
    _rnn_descriptor.MPSCNNConvolutionDescriptor,
    cnnConvolutionDescriptorWithKernelWidth_kernelHeight_inputFeatureChannels_outputFeatureChannels_=_factory(
        "kernelWidth", "kernelHeight", "inputFeatureChannels", "outputFeatureChannels"
    ),
    setNeuronType_parameterA_parameterB_=_method("setNeuronType", "neuronType", "parameterA", "parameterB"),
)

MPSRNNDescriptor: Final = _rnn_descriptor.MPSRNNDescriptor

MPSRNNSingleGateDescriptor: Any = _pyobjc_class(
    _rnn_descriptor.MPSRNNSingleGateDescriptor,
    createRNNSingleGateDescriptorWithInputFeatureChannels_outputFeatureChannels_=_creator(
        "createRNNSingleGateDescriptor"
    ),
)

MPSGRUDescriptor: Any = _pyobjc_class(
    _rnn_descriptor.MPSGRUDescriptor,
    createGRUDescriptorWithInputFeatureChannels_outputFeatureChannels_=_creator("createGRUDescriptor"),
)

MPSLSTMDescriptor: Any = _pyobjc_class(
    _rnn_descriptor.MPSLSTMDescriptor,
    createLSTMDescriptorWithInputFeatureChannels_outputFeatureChannels_=_creator("createLSTMDescriptor"),
)

MPSRNNRecurrentMatrixState: Any = _pyobjc_class(
    _rnn_state.MPSRNNRecurrentMatrixState,
    getRecurrentOutputMatrixForLayerIndex_=_method("getRecurrentOutputMatrix", "forLayerIndex"),
    getMemoryCellMatrixForLayerIndex_=_method("getMemoryCellMatrix", "forLayerIndex"),
)

MPSRNNMatrixTrainingState: Any = _pyobjc_class(_rnn_state.MPSRNNMatrixTrainingState)

MPSRNNMatrixTrainingLayer: Any = _pyobjc_class(
    _rnn.MPSRNNMatrixTrainingLayer,
    **_KERNEL,
    _matrix_type=MPSMatrix,
    _temporary_matrix_type=MPSTemporaryMatrix,
    _recurrent_state_type=MPSRNNRecurrentMatrixState,
    _training_state_type=MPSRNNMatrixTrainingState,
    initWithDevice_rnnDescriptor_trainableWeights_=_init("device", "rnnDescriptor", "trainableWeights"),
    createWeightMatrices_=_method("createWeightMatrices", "matricesOut"),
    createWeightGradientMatrices_dataType_=_method("createWeightGradientMatrices", "matricesOut", "dataType"),
    createTemporaryWeightGradientMatrices_dataType_commandBuffer_=_method(
        "createTemporaryWeightGradientMatrices", "matricesOut", "dataType", "commandBuffer"
    ),
    encodeCopyWeightsToCommandBuffer_weights_matrixId_matrix_copyFromWeightsToMatrix_matrixOffset_=_method(
        "encodeCopyWeights",
        "commandBuffer",
        "weights",
        "matrixId",
        "matrix",
        "copyFromWeightsToMatrix",
        "matrixOffset",
    ),
    encodeForwardSequenceToCommandBuffer_sourceMatrices_sourceOffsets_destinationMatrices_destinationOffsets_trainingStates_recurrentInputState_recurrentOutputStates_weights_=_method(
        "encodeForwardSequence",
        "commandBuffer",
        "sourceMatrices",
        "sourceOffsets",
        "destinationMatrices",
        "destinationOffsets",
        "trainingStates",
        "recurrentInputState",
        "recurrentOutputStates",
        "weights",
    ),
    encodeForwardSequenceToCommandBuffer_sourceMatrices_destinationMatrices_trainingStates_weights_=_method(
        "encodeForwardSequence",
        "commandBuffer",
        "sourceMatrices",
        "destinationMatrices",
        "trainingStates",
        "weights",
    ),
    encodeGradientSequenceToCommandBuffer_forwardSources_forwardSourceOffsets_sourceGradients_sourceGradientOffsets_destinationGradients_destinationOffsets_weightGradients_trainingStates_recurrentInputState_recurrentOutputStates_weights_=_method(
        "encodeGradientSequence",
        "commandBuffer",
        "forwardSources",
        "forwardSourceOffsets",
        "sourceGradients",
        "sourceOffsets",
        "destinationGradients",
        "destinationOffsets",
        "weightGradients",
        "trainingStates",
        "recurrentInputState",
        "recurrentOutputStates",
        "weights",
    ),
    encodeGradientSequenceToCommandBuffer_forwardSources_sourceGradients_destinationGradients_weightGradients_trainingStates_weights_=_method(
        "encodeGradientSequence",
        "commandBuffer",
        "forwardSources",
        "sourceGradients",
        "destinationGradients",
        "weightGradients",
        "trainingStates",
        "weights",
    ),
)
