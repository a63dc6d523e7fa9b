"""Enumerations, shaped types and descriptors of MPSGraph, under Swift's names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum, IntFlag
from typing import Any, Final, TypeVar

import numpy as np

from ..mps import MPSDataType, MTLDevice
from ..mps._types import Members, Setting, as_bool, as_unsigned

# ---- data types ------------------------------------------------------------------------------------------------------

NUMPY_TYPES: Final[dict[int, np.dtype[Any]]] = {
    MPSDataType.float32: np.dtype(np.float32),
    MPSDataType.float64: np.dtype(np.float64),
    MPSDataType.int32: np.dtype(np.int32),
    MPSDataType.int64: np.dtype(np.int64),
    MPSDataType.bool: np.dtype(np.bool_),
}
DATA_TYPES: Final = {dtype: MPSDataType(code) for code, dtype in NUMPY_TYPES.items()}
_WHY_NOT: Final = {
    MPSDataType.float16: "the engine's graphs compute in float32 and float64",
    MPSDataType.bFloat16: "the engine's graphs compute in float32 and float64",
}


def as_dtype(name: str, value: object) -> np.dtype[Any]:
    """The element type of a tensor."""
    code = as_unsigned(name, value)
    found = NUMPY_TYPES.get(code)
    if found is None:
        known = ", ".join(MPSDataType(c).name for c in NUMPY_TYPES)
        given = MPSDataType(code).name if code in MPSDataType._value2member_map_ else f"{code:#x}"
        reason = _WHY_NOT.get(code, "graphs have no tensors of it")  # type: ignore[call-overload]
        raise TypeError(f"{name} is {given}, which is not supported: {reason}; the types of tensors are {known}")
    return found


# ---- enumerations ----------------------------------------------------------------------------------------------------


class MPSGraphOptions(IntFlag):
    none = 0
    synchronizeResults = 1
    verbose = 2
    default = 1


class MPSGraphTensorNamedDataLayout(IntEnum):
    NCHW = 0
    NHWC = 1
    OIHW = 2
    HWIO = 3
    CHW = 4
    HWC = 5
    HW = 6
    NCDHW = 7
    NDHWC = 8
    OIDHW = 9
    DHWIO = 10


class MPSGraphPaddingStyle(IntEnum):
    explicit = 0
    TF_VALID = 1
    TF_SAME = 2
    explicitOffset = 3
    ONNX_SAME_LOWER = 4


class MPSGraphPaddingMode(IntEnum):
    constant = 0
    reflect = 1
    symmetric = 2
    clampToEdge = 3
    zero = 4
    periodic = 5
    antiPeriodic = 6


class MPSGraphReductionMode(IntEnum):
    min = 0
    max = 1
    sum = 2
    product = 3
    argumentMin = 4
    argumentMax = 5


class MPSGraphScatterMode(IntEnum):
    add = 0
    sub = 1
    mul = 2
    div = 3
    min = 4
    max = 5
    set = 6


class MPSGraphLossReductionType(IntEnum):
    none = 0
    axis = 0
    sum = 1
    mean = 2


class MPSGraphRNNActivation(IntEnum):
    none = 0
    relu = 1
    tanh = 2
    sigmoid = 3
    hardSigmoid = 4


class MPSGraphPoolingReturnIndicesMode(IntEnum):
    none = 0
    globalFlatten1D = 1
    globalFlatten2D = 2
    globalFlatten3D = 3
    globalFlatten4D = 4
    localFlatten1D = 5
    localFlatten2D = 6
    localFlatten3D = 7
    localFlatten4D = 8


class MPSGraphRandomDistribution(IntEnum):
    uniform = 0
    normal = 1
    truncatedNormal = 2


class MPSGraphRandomNormalSamplingMethod(IntEnum):
    invCDF = 0
    boxMuller = 1


class MPSGraphOptimization(IntEnum):
    level0 = 0
    level1 = 1


class MPSGraphDeviceType(IntEnum):
    metal = 0


class MPSGraphExecutionStage(IntEnum):
    completed = 0


# ---- checks ----------------------------------------------------------------------------------------------------------

E = TypeVar("E", bound=IntEnum)


def as_enum(kind: type[E]) -> Callable[[str, object], E]:
    def check(name: str, value: object) -> E:
        try:
            return kind(as_int(name, value))
        except ValueError:
            raise ValueError(f"{name} is {value!r}, which is not a {kind.__name__}") from None

    return check


def as_int(name: str, value: object) -> int:
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def as_number(name: str, value: object) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def as_ints(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list of ints, not {type(value).__name__}")
    return tuple(as_int(f"{name}[{i}]", one) for i, one in enumerate(value))


def as_shape(name: str, value: object) -> tuple[int, ...]:
    """A shape; -1 is a size that is not known, or in a reshape the rest."""
    shape = as_ints(name, value)
    for size in shape:
        if size < -1:
            raise ValueError(f"{name} is {list(shape)}; a size is at least 0, or -1 if it is not known")
    return shape


def _as_handler(name: str, value: object) -> Callable[..., object] | None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, not {type(value).__name__}")
    return value


def _as_size(name: str, value: object) -> int:
    size = as_unsigned(name, value)
    if not size:
        raise ValueError(f"{name} is 0, must be at least 1")
    return size


def _as_dictionary(name: str, value: object) -> dict[Any, Any]:
    if value is not None and not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict, not {type(value).__name__}")
    return dict(value or {})


def _as_vector(count: int, smallest: int) -> Callable[[str, object], tuple[int, ...]]:
    def check(name: str, value: object) -> tuple[int, ...]:
        found = as_ints(name, value)
        if len(found) != count or min(found) < smallest:
            raise ValueError(f"{name} is {list(found)}, must have {count} entries of at least {smallest}")
        return found

    return check


# ---- objects without behaviour ---------------------------------------------------------------------------------------


class MPSGraphObject(Members):
    """The base of MPSGraph's classes."""


D = TypeVar("D", bound="Descriptor")


class Descriptor(MPSGraphObject):
    """Settings with defaults, all of which the constructor takes by name."""

    def __init__(self, **settings: Any) -> None:
        known = {name: one for base in type(self).__mro__ for name, one in vars(base).items() if _is_setting(one)}
        for member in known.values():
            setattr(self, member.attribute, member.default)
        for name, value in settings.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__}: there is no argument {name!r}; there are {', '.join(known)}")
            known[name].__set__(self, value)

    def copy(self: D, with_: object = None) -> D:
        """An independent copy."""
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _is_setting(member: object) -> bool:
    return isinstance(member, Setting)


class MPSGraphType(MPSGraphObject):
    """The base of types of tensors."""


class MPSGraphShapedType(MPSGraphType):
    """A shape and a data type: ``MPSGraphShapedType(shape=[-1, 3], dataType=.float32)``."""

    def __init__(self, *, shape: Sequence[int] | None, dataType: int = MPSDataType.float32) -> None:
        self._shape = None if shape is None else as_shape("MPSGraphShapedType: shape", shape)
        self._dtype = as_dtype("MPSGraphShapedType: dataType", dataType)

    @property
    def shape(self) -> list[int] | None:
        return None if self._shape is None else list(self._shape)

    @property
    def dataType(self) -> MPSDataType:
        return DATA_TYPES[self._dtype]

    def isEqual(self, to: object) -> bool:
        return self == to

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, MPSGraphShapedType)
        return same and (self._shape, self._dtype) == (other._shape, other._dtype)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self._shape, self._dtype))

    def __repr__(self) -> str:
        return f"MPSGraphShapedType(shape={self._shape and list(self._shape)}, dataType={DATA_TYPES[self._dtype].name})"


class MPSGraphDevice(MPSGraphObject):
    """A device for graphs: ``MPSGraphDevice(mtlDevice=device)``."""

    def __init__(self, mtlDevice: MTLDevice) -> None:
        if not isinstance(mtlDevice, MTLDevice):
            raise TypeError(f"MPSGraphDevice: mtlDevice must be an MTLDevice, not {type(mtlDevice).__name__}")
        self._metalDevice = mtlDevice

    @property
    def type(self) -> MPSGraphDeviceType:
        return MPSGraphDeviceType.metal

    @property
    def metalDevice(self) -> MTLDevice:
        return self._metalDevice


class MPSGraphCompilationDescriptor(Descriptor):
    """How to compile. Without effect: programs are compiled when they are first run."""

    optimizationLevel = Setting[MPSGraphOptimization](
        as_enum(MPSGraphOptimization), MPSGraphOptimization.level1, "Without effect."
    )
    waitForCompilationCompletion = Setting[bool](as_bool, False, "Without effect: compilation is synchronous.")
    compilationCompletionHandler = Setting[Callable[..., object] | None](
        _as_handler, None, "Called with the executable and None when `compile` has made it."
    )
    callables = Setting[dict[Any, Any]](_as_dictionary, {}, "Without effect.")

    def disableTypeInference(self) -> None:
        """No effect: types that are known are always inferred."""


class _Handlers(Descriptor):
    completionHandler = Setting[Callable[..., object] | None](
        _as_handler, None, "Called with the results and an error, or None, after the work."
    )
    scheduledHandler = Setting[Callable[..., object] | None](
        _as_handler, None, "Called with the results and an error, or None, before `completionHandler`."
    )
    waitUntilCompleted = Setting[bool](as_bool, False, "Whether the call returns after the work.")
    _completionHandler: Callable[..., object] | None
    _scheduledHandler: Callable[..., object] | None
    _waitUntilCompleted: bool

    def wait(self, for_: object, value: int) -> None:
        raise NotImplementedError("waitForEvent: shared events are not part of this package; use one command queue")

    def signal(self, event: object, atExecutionEvent: int, value: int) -> None:
        raise NotImplementedError("signalEvent: shared events are not part of this package; use completionHandler")


def _as_compilation(name: str, value: object) -> MPSGraphCompilationDescriptor | None:
    if value is not None and not isinstance(value, MPSGraphCompilationDescriptor):
        raise TypeError(f"{name} must be an MPSGraphCompilationDescriptor or None, not {type(value).__name__}")
    return value


class MPSGraphExecutionDescriptor(_Handlers):
    """Handlers of a run: they get the dictionary of results."""

    compilationDescriptor = Setting[MPSGraphCompilationDescriptor | None](
        _as_compilation,
        None,
        "Without effect.",
    )


class MPSGraphExecutableExecutionDescriptor(_Handlers):
    """Handlers of an executable's run: they get the list of results."""


class MPSGraphExecutableSerializationDescriptor(Descriptor):
    """How to write a package."""

    append = Setting[bool](as_bool, False, "Without effect.")


# ---- descriptors of operations ---------------------------------------------------------------------------------------

_LAYOUT: Final = as_enum(MPSGraphTensorNamedDataLayout)
_STYLE: Final = as_enum(MPSGraphPaddingStyle)
_NCHW: Final = MPSGraphTensorNamedDataLayout.NCHW
_EXPLICIT: Final = MPSGraphPaddingStyle.explicit


class _Window(Descriptor):
    """Strides, dilations and padding of windows over images."""

    strideInX = Setting[int](_as_size, 1, "Columns from one window to the next.")
    strideInY = Setting[int](_as_size, 1, "Rows from one window to the next.")
    dilationRateInX = Setting[int](_as_size, 1, "Columns from one tap to the next.")
    dilationRateInY = Setting[int](_as_size, 1, "Rows from one tap to the next.")
    paddingLeft = Setting[int](as_unsigned, 0, "Columns of padding before the image, with the style `explicit`.")
    paddingRight = Setting[int](as_unsigned, 0, "Columns of padding after the image.")
    paddingTop = Setting[int](as_unsigned, 0, "Rows of padding before the image.")
    paddingBottom = Setting[int](as_unsigned, 0, "Rows of padding after the image.")
    paddingStyle = Setting[MPSGraphPaddingStyle](_STYLE, _EXPLICIT, "How padding is determined.")
    dataLayout = Setting[MPSGraphTensorNamedDataLayout](_LAYOUT, _NCHW, "NCHW or NHWC.")

    def setExplicitPaddingWithPaddingLeft(
        self, paddingLeft: int, /, *, paddingRight: int, paddingTop: int, paddingBottom: int
    ) -> None:
        """Set the padding of all sides, and the style."""
        for name, value in (
            ("paddingLeft", paddingLeft), ("paddingRight", paddingRight),
            ("paddingTop", paddingTop), ("paddingBottom", paddingBottom), ("paddingStyle", _EXPLICIT),
        ):  # fmt: skip
            vars(_Window)[name].__set__(self, value)


class MPSGraphConvolution2DOpDescriptor(_Window):
    """A convolution. Layouts of weights are OIHW and HWIO."""

    groups = Setting[int](_as_size, 1, "Groups of channels.")
    weightsLayout = Setting[MPSGraphTensorNamedDataLayout](_LAYOUT, MPSGraphTensorNamedDataLayout.OIHW, "OIHW or HWIO.")


class MPSGraphDepthwiseConvolution2DOpDescriptor(_Window):
    """A convolution of each channel with its own filters."""

    weightsLayout = Setting[MPSGraphTensorNamedDataLayout](_LAYOUT, MPSGraphTensorNamedDataLayout.OIHW, "OIHW or HWIO.")


class MPSGraphPooling2DOpDescriptor(_Window):
    """Windows of images."""

    kernelWidth = Setting[int](_as_size, 1, "Columns of a window.")
    kernelHeight = Setting[int](_as_size, 1, "Rows of a window.")
    returnIndicesMode = Setting[MPSGraphPoolingReturnIndicesMode](
        as_enum(MPSGraphPoolingReturnIndicesMode), MPSGraphPoolingReturnIndicesMode.none, "What indices count."
    )
    returnIndicesDataType = Setting[MPSDataType](as_enum(MPSDataType), MPSDataType.int32, "int32 or int64.")
    ceilMode = Setting[bool](as_bool, False, "Whether a window may begin in the image and end beyond its padding.")
    includeZeroPadToAverage = Setting[bool](as_bool, False, "Whether averages count padding.")


class MPSGraphPooling4DOpDescriptor(Descriptor):
    """Windows over any of four axes."""

    kernelSizes = Setting[tuple[int, ...]](_as_vector(4, 1), (1, 1, 1, 1), "Extents of a window.")
    strides = Setting[tuple[int, ...]](_as_vector(4, 1), (1, 1, 1, 1), "From one window to the next.")
    dilationRates = Setting[tuple[int, ...]](_as_vector(4, 1), (1, 1, 1, 1), "From one tap to the next.")
    paddingValues = Setting[tuple[int, ...]](_as_vector(8, 0), (0,) * 8, "(before, after) of each axis.")
    paddingStyle = Setting[MPSGraphPaddingStyle](_STYLE, _EXPLICIT, "How padding is determined.")
    returnIndicesMode = Setting[MPSGraphPoolingReturnIndicesMode](
        as_enum(MPSGraphPoolingReturnIndicesMode), MPSGraphPoolingReturnIndicesMode.none, "What indices count."
    )
    returnIndicesDataType = Setting[MPSDataType](as_enum(MPSDataType), MPSDataType.int32, "int32 or int64.")
    ceilMode = Setting[bool](as_bool, False, "As in MPSGraphPooling2DOpDescriptor.")
    includeZeroPadToAverage = Setting[bool](as_bool, False, "Whether averages count padding.")


_ACTIVATION: Final = as_enum(MPSGraphRNNActivation)


def _activation(default: MPSGraphRNNActivation, doc: str) -> Setting[MPSGraphRNNActivation]:
    return Setting[MPSGraphRNNActivation](_ACTIVATION, default, doc)


class _Recurrent(Descriptor):
    reverse = Setting[bool](as_bool, False, "Whether time runs backwards. Ignored if bidirectional.")
    bidirectional = Setting[bool](as_bool, False, "Whether there is a second cell, for which time runs backwards.")
    training = Setting[bool](as_bool, False, "Whether the state z, for the gradients, is a result.")


class MPSGraphSingleGateRNNDescriptor(_Recurrent):
    """h[t] = activation(x[t] W' + (m h[t-1]) R' + b)"""

    activation = _activation(MPSGraphRNNActivation.relu, "Of the only gate.")


class MPSGraphLSTMDescriptor(_Recurrent):
    """Gates i, f, g, o; with `forgetGateLast` i, g, f, o."""

    produceCell = Setting[bool](as_bool, False, "Whether the cell states are a result.")
    forgetGateLast = Setting[bool](as_bool, False, "Whether the gates are in the order i, g, f, o.")
    inputGateActivation = _activation(MPSGraphRNNActivation.sigmoid, "Of the gate i.")
    forgetGateActivation = _activation(MPSGraphRNNActivation.sigmoid, "Of the gate f.")
    cellGateActivation = _activation(MPSGraphRNNActivation.tanh, "Of the gate g.")
    outputGateActivation = _activation(MPSGraphRNNActivation.sigmoid, "Of the gate o.")
    activation = _activation(MPSGraphRNNActivation.tanh, "Of the cell state.")


class MPSGraphGRUDescriptor(_Recurrent):
    """Gates z, r, o; with `resetGateFirst` r, z, o."""

    resetGateFirst = Setting[bool](as_bool, False, "Whether the gates are in the order r, z, o.")
    resetAfter = Setting[bool](as_bool, False, "Whether the reset gate acts after the product.")
    flipZ = Setting[bool](as_bool, False, "Whether the update gate weights the candidate, not the old state.")
    updateGateActivation = _activation(MPSGraphRNNActivation.sigmoid, "Of the gate z.")
    resetGateActivation = _activation(MPSGraphRNNActivation.sigmoid, "Of the gate r.")
    outputGateActivation = _activation(MPSGraphRNNActivation.tanh, "Of the candidate.")


class MPSGraphRandomOpDescriptor(Descriptor):
    """A distribution: ``MPSGraphRandomOpDescriptor(distribution=.uniform, dataType=.float32)``."""

    distribution = Setting[MPSGraphRandomDistribution](
        as_enum(MPSGraphRandomDistribution), MPSGraphRandomDistribution.uniform, "Which one."
    )
    dataType = Setting[MPSDataType](as_enum(MPSDataType), MPSDataType.float32, "float32, float64, int32 or int64.")
    min = Setting[float](as_number, 0.0, "The smallest value; of a truncated normal distribution.")
    max = Setting[float](as_number, 1.0, "The limit; of a truncated normal distribution.")
    minInteger = Setting[int](as_int, 0, "The smallest integer.")
    maxInteger = Setting[int](as_int, 2**31 - 1, "The limit of integers, which is not drawn.")
    mean = Setting[float](as_number, 0.0, "Of a normal distribution.")
    standardDeviation = Setting[float](as_number, 1.0, "Of a normal distribution.")
    samplingMethod = Setting[MPSGraphRandomNormalSamplingMethod](
        as_enum(MPSGraphRandomNormalSamplingMethod), MPSGraphRandomNormalSamplingMethod.invCDF, "Without effect."
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self._distribution == MPSGraphRandomDistribution.truncatedNormal:  # type: ignore[attr-defined]
            if "min" not in settings:
                self._min = -2.0
            if "max" not in settings:
                self._max = 2.0
