"""The Swift interface: what layers share, and ``BNNS.NormalizationLayer``. Raises where Swift throws or returns nil.

The other members are in modules of their own, the namespace in ``_swift_namespace.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from . import _constants as c
from ._failure import Invalid, Unsupported, last_error, raising
from ._filter import BNNSFilterDestroy
from ._memory import Geometry, data_type_of, listed
from ._names import constant_name
from ._normalization import (
    BNNSFilterCreateLayerNormalization,
    BNNSNormalizationFilterApplyBackwardBatch,
    BNNSNormalizationFilterApplyBatch,
)
from ._structures import (
    BNNSActivation,
    BNNSFilterParameters,
    BNNSLayerParametersNormalization,
    BNNSNDArrayDescriptor,
)

_L = TypeVar("_L", bound="Layer")
_TENSOR: Final = 0x8000  # the bit that marks generic layouts


class BNNSError(RuntimeError):
    """Swift's ``BNNS.Error``. The message is the reason.

    `case` is the name of Swift's case: ``unableToCreateLayer``, ``layerApplyFail``, ``arrayDescriptorInvalidData`` or
    ``optimizerStepFail``.
    """

    def __init__(self, case: str, reason: str | None) -> None:
        super().__init__(f"{case}: {reason}")
        self.case = case


class LearningPhase(enum.Enum):
    """Training or inference."""

    training = "training"
    inference = "inference"


class NormalizationType:
    """A kind of normalization with its own parameters.

    Made by :meth:`batch`, :meth:`instance`, :meth:`layer` or :meth:`group`.
    """

    def __init__(self, norm_type: int, fields: dict[str, Any]) -> None:
        self.norm_type, self.fields = norm_type, fields

    @classmethod
    def batch(
        cls, movingMean: BNNSNDArrayDescriptor | None = None, movingVariance: BNNSNDArrayDescriptor | None = None
    ) -> NormalizationType:
        return cls(c.BNNSBatchNorm, _moving(movingMean, movingVariance))

    @classmethod
    def instance(
        cls, movingMean: BNNSNDArrayDescriptor | None = None, movingVariance: BNNSNDArrayDescriptor | None = None
    ) -> NormalizationType:
        return cls(c.BNNSInstanceNorm, _moving(movingMean, movingVariance))

    @classmethod
    def layer(cls, normalizationAxis: int) -> NormalizationType:
        return cls(c.BNNSLayerNorm, {"normalization_axis": normalizationAxis})

    @classmethod
    def group(cls, groupCount: int) -> NormalizationType:
        return cls(c.BNNSGroupNorm, {"num_groups": groupCount})


def _moving(mean: BNNSNDArrayDescriptor | None, variance: BNNSNDArrayDescriptor | None) -> dict[str, Any]:
    given = {"moving_mean_desc": mean, "moving_variance_desc": variance}
    return {name: descriptor for name, descriptor in given.items() if descriptor is not None}


class ActivationFunction:
    """An activation: ``ActivationFunction.tanh``, ``ActivationFunction.elu(alpha=1.0)``."""

    def __init__(self, function: int, alpha: float = 0.0, beta: float = 0.0) -> None:
        self.bnnsActivation = BNNSActivation(function, alpha, beta)

    identity: ActivationFunction
    rectifiedLinear: ActivationFunction
    sigmoid: ActivationFunction
    logSigmoid: ActivationFunction
    tanh: ActivationFunction
    abs: ActivationFunction
    softmax: ActivationFunction
    logSoftmax: ActivationFunction
    softsign: ActivationFunction
    selu: ActivationFunction
    tanhShrink: ActivationFunction

    @classmethod
    def leakyRectifiedLinear(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionLeakyRectifiedLinear, alpha)

    @classmethod
    def scaledTanh(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionScaledTanh, alpha, beta)

    @classmethod
    def linear(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionLinear, alpha)

    @classmethod
    def clamp(cls, bounds: Sequence[float]) -> ActivationFunction:
        low, high = bounds
        return cls(c.BNNSActivationFunctionClamp, low, high)

    @classmethod
    def geluApproximation(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionGELUApproximation, alpha, beta)

    @classmethod
    def geluApproximation2(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionGELUApproximation2, alpha, beta)

    @classmethod
    def gumbel(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionGumbel, alpha, beta)

    @classmethod
    def gumbelMax(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionGumbelMax, alpha, beta)

    @classmethod
    def hardSigmoid(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionHardSigmoid, alpha, beta)

    @classmethod
    def softplus(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionSoftplus, alpha, beta)

    @classmethod
    def elu(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionELU, alpha)

    @classmethod
    def celu(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionCELU, alpha)

    @classmethod
    def clampedLeakyRectifiedLinear(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionClampedLeakyRectifiedLinear, alpha, beta)

    @classmethod
    def linearWithBias(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionLinearWithBias, alpha, beta)

    @classmethod
    def hardShrink(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionHardShrink, alpha)

    @classmethod
    def softShrink(cls, alpha: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionSoftShrink, alpha)

    @classmethod
    def threshold(cls, alpha: float, beta: float) -> ActivationFunction:
        return cls(c.BNNSActivationFunctionThreshold, alpha, beta)


for _name, _function in {
    "identity": c.BNNSActivationFunctionIdentity,
    "rectifiedLinear": c.BNNSActivationFunctionRectifiedLinear,
    "sigmoid": c.BNNSActivationFunctionSigmoid,
    "logSigmoid": c.BNNSActivationFunctionLogSigmoid,
    "tanh": c.BNNSActivationFunctionTanh,
    "abs": c.BNNSActivationFunctionAbs,
    "softmax": c.BNNSActivationFunctionSoftmax,
    "logSoftmax": c.BNNSActivationFunctionLogSoftmax,
    "softsign": c.BNNSActivationFunctionSoftsign,
    "selu": c.BNNSActivationFunctionSELU,
    "tanhShrink": c.BNNSActivationFunctionTanhShrink,
}.items():
    setattr(ActivationFunction, _name, ActivationFunction(_function))


class Shape:
    """Extents and strides of an array, made by the methods named after Swift's cases.

    ``Shape(size)`` picks the layout by the number of axes: a vector, or first-major with the slowest axis first.
    """

    def __init__(self, size: Sequence[int], dataLayout: int | None = None, stride: Sequence[int] | None = None) -> None:
        if dataLayout is None:
            if not 1 <= len(size) <= c.BNNS_MAX_TENSOR_DIMENSION:
                raise ValueError(f"a shape has from 1 to {c.BNNS_MAX_TENSOR_DIMENSION} axes, not {len(size)}")
            dataLayout = c.BNNSDataLayoutVector if len(size) == 1 else len(size) << 16 | _TENSOR | 1
        layout, rank = dataLayout, dataLayout >> 16
        if len(size) != rank or (stride is not None and len(stride) != rank):
            given = len(size) if len(size) != rank else len(stride or ())
            raise ValueError(f"{constant_name('BNNSDataLayout', layout)} has {rank} axes, not {given}")
        self.layout = layout
        self.size: tuple[int, ...] = tuple(size)
        self.stride: tuple[int, ...] = (0,) * rank if stride is None else tuple(stride)

    @property
    def rank(self) -> int:
        return self.layout >> 16

    @property
    def batchStride(self) -> int:
        """Elements from one sample of a packed batch to the next."""
        return batch_stride(self.descriptor())

    def descriptor(self, data: Any = None, data_type: int = c.BNNSDataTypeFloat32) -> BNNSNDArrayDescriptor:
        """A descriptor of this shape over `data`."""
        return BNNSNDArrayDescriptor(
            layout=self.layout, size=self.size, stride=self.stride, data=data, data_type=data_type
        )

    def _fields(self) -> tuple[Any, ...]:
        return self.layout, self.size, self.stride

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Shape({constant_name('BNNSDataLayout', self.layout)}, size={self.size}, stride={self.stride})"

    @classmethod
    def vector(cls, size: int, stride: int = 0) -> Shape:
        return cls((size,), c.BNNSDataLayoutVector, (stride,))

    @classmethod
    def matrixColumnMajor(cls, rows: int, columns: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((rows, columns), c.BNNSDataLayoutColumnMajorMatrix, stride)

    @classmethod
    def matrixRowMajor(cls, columns: int, rows: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((columns, rows), c.BNNSDataLayoutRowMajorMatrix, stride)

    @classmethod
    def matrixFirstMajor(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(size, c.BNNSDataLayout2DFirstMajor, stride)

    @classmethod
    def matrixLastMajor(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(size, c.BNNSDataLayout2DLastMajor, stride)

    @classmethod
    def imageCHW(cls, width: int, height: int, channels: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((width, height, channels), c.BNNSDataLayoutImageCHW, stride)

    @classmethod
    def tensor3DSNE(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        """A sequence: features, samples, steps."""
        return cls(size, c.BNNSDataLayoutSNE, stride)

    @classmethod
    def tensor3DNSE(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        """A sequence: features, steps, samples."""
        return cls(size, c.BNNSDataLayoutNSE, stride)

    @classmethod
    def convolutionWeightsOIHW(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(size, c.BNNSDataLayoutConvolutionWeightsOIHW, stride)


def _tensor(layout: int) -> Callable[..., Shape]:
    def make(cls: type[Shape], *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(size, layout, stride)

    return make


for _rank in range(3, c.BNNS_MAX_TENSOR_DIMENSION + 1):
    for _order, _bit in (("LastMajor", 0), ("FirstMajor", 1)):
        _name = f"tensor{_rank}D{_order}"
        setattr(Shape, _name, classmethod(_tensor(_rank << 16 | _TENSOR | _bit)))


def batch_stride(descriptor: BNNSNDArrayDescriptor) -> int:
    """Elements from one sample to the next: the span of the slowest axis."""
    rank = descriptor.layout >> 16
    strides = descriptor.stride[:rank]
    sizes = listed(descriptor.layout, descriptor.size[:rank])
    step = 1
    for size, stride in zip(sizes, strides, strict=True):
        step = (stride or step) * size
    return step


def axis_flags(axes: Sequence[int] | None) -> int:
    """The bits of these axes; 0 for None."""
    flags = 0
    for axis in axes or ():
        if axis < 0:
            raise ValueError(f"axes has {axis}, must be at least 0")
        flags |= 1 << axis
    return flags


def checked_call(function: Callable[..., int], *arguments: Any, case: str = "layerApplyFail", **options: Any) -> None:
    """Call a C function; raise if it fails. `case` is Swift's name of the error, `options` are retrograd's."""
    with raising():
        status = function(*arguments, **options)
    if status:
        raise BNNSError(case, last_error())


def check_data(**descriptors: BNNSNDArrayDescriptor | None) -> None:
    for name, descriptor in descriptors.items():
        if descriptor is not None and descriptor.data is None:
            raise BNNSError("arrayDescriptorInvalidData", f"{name} has no data")


def check_like(name: str, descriptor: BNNSNDArrayDescriptor, made: Geometry | None) -> None:
    """Raise if an array differs in type or number of elements from that which its layer was made for.

    The C call takes only its memory. A contiguous array may have another shape; others must have the same strides.
    """
    try:
        given = descriptor.geometry()
    except (Invalid, Unsupported) as error:
        raise BNNSError("layerApplyFail", f"{name}: {error}") from None
    if made is None:  # the layer was closed
        return
    if given.dtype != made.dtype or given.elements != made.elements:
        shown = [constant_name("BNNSDataType", data_type_of(one.dtype)) for one in (given, made)]
        raise BNNSError(
            "layerApplyFail",
            f"{name} has {given.elements} elements of {shown[0]}, but the layer was made for {made.elements} of "
            f"{shown[1]}",
        )
    if not (given.dense and made.dense) and (given.extents, given.strides) != (made.extents, made.strides):
        raise BNNSError(
            "layerApplyFail",
            f"{name} has size {given.extents} and stride {given.strides} (fastest first), but the layer was made for "
            f"{made.extents} and {made.strides}",
        )


class Layer:
    """A filter. Its memory is released when the object is deleted, or at the end of a ``with`` block."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._filter: Any = None
        with raising():
            self._filter = make()
        if self._filter is None:
            raise BNNSError("unableToCreateLayer", last_error())

    @property
    def bnnsFilter(self) -> Any:
        """The filter, for the C functions."""
        return self._filter

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a C function on the filter; raise if it fails."""
        checked_call(function, self._filter, *arguments)

    def close(self) -> None:
        """Release the layer's memory now."""
        BNNSFilterDestroy(self._filter)

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def normalization(
    type: NormalizationType,
    input: BNNSNDArrayDescriptor,
    output: BNNSNDArrayDescriptor,
    beta: BNNSNDArrayDescriptor | None,
    gamma: BNNSNDArrayDescriptor | None,
    momentum: float,
    epsilon: float,
    activation: ActivationFunction,
) -> BNNSLayerParametersNormalization:
    """The structure of the C function."""
    empty = BNNSNDArrayDescriptor()
    return BNNSLayerParametersNormalization(
        i_desc=input,
        o_desc=output,
        beta_desc=empty if beta is None else beta,
        gamma_desc=empty if gamma is None else gamma,
        momentum=momentum,
        epsilon=epsilon,
        activation=activation.bnnsActivation,
        **type.fields,
    )


class NormalizationLayer(Layer):
    """A normalization layer. `beta` and `gamma` may be None, or descriptors without data.

    `momentumWeighs`, which Swift does not have, says what `momentum` is the weight of: the "old" moving statistics or
    the "new" batch.
    """

    def __init__(
        self,
        *,
        type: NormalizationType,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        beta: BNNSNDArrayDescriptor | None = None,
        gamma: BNNSNDArrayDescriptor | None = None,
        momentum: float = 0.0,
        epsilon: float,
        activation: ActivationFunction = ActivationFunction.identity,
        filterParameters: BNNSFilterParameters | None = None,
        momentumWeighs: str = "old",
    ) -> None:
        parameters = normalization(type, input, output, beta, gamma, momentum, epsilon, activation)
        super().__init__(
            lambda: BNNSFilterCreateLayerNormalization(
                type.norm_type, parameters, filterParameters, momentum_weighs=momentumWeighs
            )
        )

    def apply(
        self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, for_: LearningPhase
    ) -> None:
        """Normalize a packed batch. `for_` is Swift's label ``for``."""
        if not isinstance(for_, LearningPhase):
            raise TypeError(f"for_ must be a LearningPhase, not {for_!r}")
        check_data(input=input, output=output)
        check_like("input", input, getattr(self._filter, "input", None))
        check_like("output", output, getattr(self._filter, "output", None))
        self._call(
            BNNSNormalizationFilterApplyBatch,
            batchSize,
            input.data,
            batch_stride(input),
            output.data,
            batch_stride(output),
            for_ is LearningPhase.training,
        )

    def applyBackward(
        self,
        *,
        batchSize: int,
        input: BNNSNDArrayDescriptor | None = None,
        output: BNNSNDArrayDescriptor,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor | None,
        generatingBetaGradient: BNNSNDArrayDescriptor | None = None,
        generatingGammaGradient: BNNSNDArrayDescriptor | None = None,
    ) -> None:
        """Compute the gradients of the last training pass. `input` is ignored: the layer keeps a copy of its input."""
        check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
        check_data(generatingBetaGradient=generatingBetaGradient, generatingGammaGradient=generatingGammaGradient)
        self._call(
            BNNSNormalizationFilterApplyBackwardBatch,
            batchSize,
            generatingInputGradient,
            0 if generatingInputGradient is None else batch_stride(generatingInputGradient),
            output.data,
            batch_stride(output),
            outputGradient,
            batch_stride(outputGradient),
            generatingBetaGradient,
            generatingGammaGradient,
        )
