"""MPSGraph under PyObjC's names. A script for its MetalPerformanceShadersGraph module runs with

    import retrograd.mpsgraph.pyobjc as MetalPerformanceShadersGraph

The classes are those of :mod:`retrograd.mpsgraph` with members as methods (``tensor.shape()``), selectors with an
underscore for each colon, and ``alloc()``. Names of Metal and MetalPerformanceShaders are here too. Objects of both
modules can be mixed in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, Final

from ..mps import pyobjc as _metal
from ..mps.pyobjc import *  # noqa: F403
from ..mps.pyobjc import _factory, _init, _method, _pyobjc_class
from . import _control, _data, _graph, _running, _types
from ._declare import python_name, selectors
from ._table import METHODS

# ---- constants -------------------------------------------------------------------------------------------------------

_PREFIXES: Final[dict[type[IntEnum] | type[IntFlag], str]] = {
    _types.MPSGraphPoolingReturnIndicesMode: "MPSGraphPoolingReturnIndices",
    _types.MPSGraphRandomNormalSamplingMethod: "MPSGraphRandomNormalSampling",
}
_CONSTANTS: Final[dict[str, int]] = {
    f"{_PREFIXES.get(kind, kind.__name__)}{name[0].upper()}{name[1:]}": int(value)
    for kind in vars(_types).values()
    if isinstance(kind, type) and issubclass(kind, (IntEnum, IntFlag)) and kind.__module__ == _types.__name__
    for name, value in kind.__members__.items()
}
globals().update(_CONSTANTS)

# ---- classes ---------------------------------------------------------------------------------------------------------


def _sends(kind: type, swift: str) -> Callable[..., Any]:
    """A selector that calls a method of a Swift class, whose labels are in the selector's order."""
    name, _, rest = swift[:-1].partition("(")
    function = getattr(kind, python_name(name))
    labels = [python_name(label) for label in rest.split(":")[:-1]]

    def send(self: Any, /, *arguments: Any) -> Any:
        if len(arguments) != len(labels):
            raise TypeError(f"{kind.__name__}.{name}: needs {len(labels)} arguments, got {len(arguments)}")
        pairs = list(zip(labels, arguments, strict=True))
        return function(self, *(a for n, a in pairs if n == "_"), **{n: a for n, a in pairs if n != "_"})

    send.__doc__ = function.__doc__
    return send


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        selector.replace(":", "_"): _sends(kind, swift)
        for swift, both in METHODS[kind.__name__].items()
        for selector in both.split()
    }


def _descriptor(kind: type, **more: Any) -> Any:
    return _pyobjc_class(
        kind, descriptor=classmethod(lambda cls: cls()), init=_init(), new=classmethod(lambda cls: cls()),
        copyWithZone_=_method("copy", "with_"), **more,
    )  # fmt: skip


MPSNDArray: Any = _pyobjc_class(
    _data.MPSNDArray,
    lengthOfDimension_=_method("length", "ofDimension"),
    readBytes_strideBytes_=_method("readBytes", "buffer", "strideBytes"),
    writeBytes_strideBytes_=_method("writeBytes", "buffer", "strideBytes"),
)


def _data_of(*names: str) -> Callable[..., Any]:
    """An initializer whose first argument has no label in Swift."""

    def init(self: Any, first: Any, *rest: Any) -> Any:
        _data.MPSGraphTensorData.__init__(self, first, **dict(zip(names, rest, strict=True)))
        return self

    return init


MPSGraphTensorData: Any = _pyobjc_class(
    _data.MPSGraphTensorData,
    _ndarray_type=MPSNDArray,
    initWithDevice_data_shape_dataType_=_init("device", "data", "shape", "dataType"),
    initWithMTLBuffer_shape_dataType_=_data_of("shape", "dataType"),
    initWithMTLBuffer_shape_dataType_rowBytes_=_data_of("shape", "dataType", "rowBytes"),
    initWithMPSMatrix_=_data_of(),
    initWithMPSMatrix_rank_=_data_of("rank"),
    initWithMPSVector_=_data_of(),
    initWithMPSVector_rank_=_data_of("rank"),
    initWithMPSNDArray_=_data_of(),
)
MPSCommandBuffer: Any = _pyobjc_class(
    _data.MPSCommandBuffer,
    commandBufferWithCommandBuffer_=_factory("commandBuffer"),
    commandBufferFromCommandQueue_=_factory("from_"),
    initWithCommandBuffer_=_init("commandBuffer"),
    addCompletedHandler_=_method("addCompletedHandler", "handler"),
    addScheduledHandler_=_method("addScheduledHandler", "handler"),
)
MPSGraphDevice: Any = _pyobjc_class(_types.MPSGraphDevice, deviceWithMTLDevice_=_factory("mtlDevice"))
MPSGraphShapedType: Any = _pyobjc_class(
    _types.MPSGraphShapedType, initWithShape_dataType_=_init("shape", "dataType"), isEqualTo_=_method("isEqual", "to")
)
MPSGraphType: Any = _types.MPSGraphType
MPSGraphObject: Any = _types.MPSGraphObject
MPSGraphTensor: Any = _pyobjc_class(_graph.MPSGraphTensor)
MPSGraphOperation: Any = _pyobjc_class(_graph.MPSGraphOperation)
MPSGraphVariableOp: Any = _pyobjc_class(_graph.MPSGraphVariableOp)

_EVENTS: Final[dict[str, Any]] = {
    "waitForEvent_value_": _method("wait", "for_", "value"),
    "signalEvent_atExecutionEvent_value_": _method("signal", "event", "atExecutionEvent", "value"),
}
MPSGraphExecutionDescriptor: Any = _descriptor(_types.MPSGraphExecutionDescriptor, **_EVENTS)
MPSGraphExecutableExecutionDescriptor: Any = _descriptor(_types.MPSGraphExecutableExecutionDescriptor, **_EVENTS)
MPSGraphExecutableSerializationDescriptor: Any = _descriptor(_types.MPSGraphExecutableSerializationDescriptor)
MPSGraphCompilationDescriptor: Any = _descriptor(_types.MPSGraphCompilationDescriptor)
MPSGraphSingleGateRNNDescriptor: Any = _descriptor(_types.MPSGraphSingleGateRNNDescriptor)
MPSGraphLSTMDescriptor: Any = _descriptor(_types.MPSGraphLSTMDescriptor)
MPSGraphGRUDescriptor: Any = _descriptor(_types.MPSGraphGRUDescriptor)

_STEPS: Final = ("strideInX", "strideInY", "dilationRateInX", "dilationRateInY")
_PADS: Final = ("paddingLeft", "paddingRight", "paddingTop", "paddingBottom")
_SELECTOR: Final = "_".join(("descriptorWithStrideInX", *_STEPS[1:]))


def _set_padding(self: Any, left: int, right: int, top: int, bottom: int) -> None:
    _types._Window.setExplicitPaddingWithPaddingLeft(
        self, left, paddingRight=right, paddingTop=top, paddingBottom=bottom
    )


def _window(kind: type, **factories: tuple[str, ...]) -> Any:
    made = {selector: _factory(*names) for selector, names in factories.items()}
    padding = {"setExplicitPaddingWithPaddingLeft_paddingRight_paddingTop_paddingBottom_": _set_padding}
    return _descriptor(kind, **made, **padding)


def _selector(*names: str) -> str:
    return f"{_SELECTOR}_{'_'.join(names)}_"


_LAYOUTS: Final = ("paddingStyle", "dataLayout", "weightsLayout")
_KERNEL: Final = ("kernelWidth", "kernelHeight")
_POOL: Final = f"descriptorWithKernelWidth_kernelHeight_{'_'.join(_STEPS)}"
MPSGraphConvolution2DOpDescriptor: Any = _window(
    _types.MPSGraphConvolution2DOpDescriptor,
    **{
        _selector("groups", *_LAYOUTS): (*_STEPS, "groups", *_LAYOUTS),
        _selector("groups", *_PADS, *_LAYOUTS): (*_STEPS, "groups", *_PADS, *_LAYOUTS),
    },
)
MPSGraphDepthwiseConvolution2DOpDescriptor: Any = _window(
    _types.MPSGraphDepthwiseConvolution2DOpDescriptor,
    descriptorWithDataLayout_weightsLayout_=("dataLayout", "weightsLayout"),
    **{_selector(*_PADS, *_LAYOUTS): (*_STEPS, *_PADS, *_LAYOUTS)},
)
MPSGraphPooling2DOpDescriptor: Any = _window(
    _types.MPSGraphPooling2DOpDescriptor,
    descriptorWithKernelWidth_kernelHeight_strideInX_strideInY_paddingStyle_dataLayout_=(
        *_KERNEL,
        *_STEPS[:2],
        "paddingStyle",
        "dataLayout",
    ),
    **{
        f"{_POOL}_{'_'.join(_PADS)}_paddingStyle_dataLayout_": (*_KERNEL, *_STEPS, *_PADS, "paddingStyle", "dataLayout")
    },
)
MPSGraphPooling4DOpDescriptor: Any = _descriptor(
    _types.MPSGraphPooling4DOpDescriptor,
    descriptorWithKernelSizes_paddingStyle_=_factory("kernelSizes", "paddingStyle"),
    descriptorWithKernelSizes_strides_dilationRates_paddingValues_paddingStyle_=_factory(
        "kernelSizes", "strides", "dilationRates", "paddingValues", "paddingStyle"
    ),
)
MPSGraphRandomOpDescriptor: Any = _descriptor(
    _types.MPSGraphRandomOpDescriptor,
    descriptorWithDistribution_dataType_=_factory("distribution", "dataType"),
)
MPSGraphExecutable: Any = _pyobjc_class(_running.MPSGraphExecutable, **_methods(_running.MPSGraphExecutable))
MPSGraph: Any = _pyobjc_class(
    _control.MPSGraph,
    _tensor_type=MPSGraphTensor,
    _operation_type=MPSGraphOperation,
    _variable_type=MPSGraphVariableOp,
    _data_type=MPSGraphTensorData,
    _executable_type=MPSGraphExecutable,
    init=_init(),
    new=classmethod(lambda cls: cls()),
    **selectors(),
    **_methods(_control.MPSGraph),
)

__all__ = sorted({*_metal.__all__, *(name for name in globals() if name.startswith("MPS"))})
