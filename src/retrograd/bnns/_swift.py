"""The Swift interface: ``BNNS.NormalizationLayer`` and its types. Raises where Swift throws or returns nil."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from . import _constants as c
from ._failure import last_error, raising
from ._filter import BNNSFilterDestroy
from ._memory import Geometry, data_type_of, is_first_major
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

__all__ = [
    "BNNS",
]

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
    """Extents and strides of an array, made by the methods named after Swift's cases."""

    def __init__(self, layout: int, size: Sequence[int], stride: Sequence[int] | None) -> None:
        rank = layout >> 16
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

    def __repr__(self) -> str:
        return f"Shape({constant_name('BNNSDataLayout', self.layout)}, size={self.size}, stride={self.stride})"

    @classmethod
    def vector(cls, size: int, stride: int = 0) -> Shape:
        return cls(c.BNNSDataLayoutVector, (size,), (stride,))

    @classmethod
    def matrixColumnMajor(cls, rows: int, columns: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayoutColumnMajorMatrix, (rows, columns), stride)

    @classmethod
    def matrixRowMajor(cls, columns: int, rows: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayoutRowMajorMatrix, (columns, rows), stride)

    @classmethod
    def matrixFirstMajor(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayout2DFirstMajor, size, stride)

    @classmethod
    def matrixLastMajor(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayout2DLastMajor, size, stride)

    @classmethod
    def imageCHW(cls, width: int, height: int, channels: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayoutImageCHW, (width, height, channels), stride)

    @classmethod
    def convolutionWeightsOIHW(cls, *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(c.BNNSDataLayoutConvolutionWeightsOIHW, size, stride)


def _tensor(layout: int) -> Callable[..., Shape]:
    def make(cls: type[Shape], *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(layout, size, stride)

    return make


for _rank in range(3, c.BNNS_MAX_TENSOR_DIMENSION + 1):
    for _order, _bit in (("LastMajor", 0), ("FirstMajor", 1)):
        _name = f"tensor{_rank}D{_order}"
        setattr(Shape, _name, classmethod(_tensor(_rank << 16 | _TENSOR | _bit)))


def batch_stride(descriptor: BNNSNDArrayDescriptor) -> int:
    """Elements from one sample to the next: the span of the slowest axis."""
    rank = descriptor.layout >> 16
    strides = descriptor.stride[:rank]
    sizes = descriptor.size[:rank][:: -1 if is_first_major(descriptor.layout) else 1]
    step = 1
    for size, stride in zip(sizes, strides, strict=True):
        step = (stride or step) * size
    return step


def _check_data(**descriptors: BNNSNDArrayDescriptor | None) -> None:
    for name, descriptor in descriptors.items():
        if descriptor is not None and descriptor.data is None:
            raise BNNSError("arrayDescriptorInvalidData", f"{name} has no data")


class NormalizationLayer:
    """A normalization layer.

    Memory is released when the object is deleted, or at the end of a ``with`` block. `beta` and `gamma` may be None, or
    descriptors without data. `momentumWeighs`, which Swift does not have, says what `momentum` is the weight of: the
    "old" moving statistics or the "new" batch.
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
        empty = BNNSNDArrayDescriptor()
        self._filter: Any = None
        parameters = BNNSLayerParametersNormalization(
            i_desc=input,
            o_desc=output,
            beta_desc=empty if beta is None else beta,
            gamma_desc=empty if gamma is None else gamma,
            momentum=momentum,
            epsilon=epsilon,
            activation=activation.bnnsActivation,
            **type.fields,
        )
        with raising():
            self._filter = BNNSFilterCreateLayerNormalization(
                type.norm_type, parameters, filterParameters, momentum_weighs=momentumWeighs
            )
        if self._filter is None:
            raise BNNSError("unableToCreateLayer", last_error())

    def apply(
        self, *, batchSize: int, input: BNNSNDArrayDescriptor, output: BNNSNDArrayDescriptor, for_: LearningPhase
    ) -> None:
        """Normalize a packed batch. `for_` is Swift's label ``for``."""
        if not isinstance(for_, LearningPhase):
            raise TypeError(f"for_ must be a LearningPhase, not {for_!r}")
        _check_data(input=input, output=output)
        self._check_like(input=input, output=output)
        with raising():
            status = BNNSNormalizationFilterApplyBatch(
                self._filter,
                batchSize,
                input.data,
                batch_stride(input),
                output.data,
                batch_stride(output),
                for_ is LearningPhase.training,
            )
        if status:
            raise BNNSError("layerApplyFail", last_error())

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
        _check_data(outputGradient=outputGradient, generatingInputGradient=generatingInputGradient)
        _check_data(generatingBetaGradient=generatingBetaGradient, generatingGammaGradient=generatingGammaGradient)
        with raising():
            status = BNNSNormalizationFilterApplyBackwardBatch(
                self._filter,
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
        if status:
            raise BNNSError("layerApplyFail", last_error())

    def _check_like(self, **descriptors: BNNSNDArrayDescriptor) -> None:
        """Raise if descriptors differ in type or number of elements from those that the layer was made with.

        The C call takes only their memory. Contiguous arrays may have another shape; others must have the same strides.
        """
        for name, descriptor in descriptors.items():
            made: Geometry | None = getattr(self._filter, name, None)  # None: the layer was closed
            try:
                given = descriptor.geometry()
            except ValueError as error:
                raise BNNSError("layerApplyFail", f"{name}: {error}") from None
            if made is None:
                continue
            if given.dtype != made.dtype or given.elements != made.elements:
                types = (constant_name("BNNSDataType", data_type_of(g.dtype)) for g in (given, made))
                given_type, made_type = types
                raise BNNSError(
                    "layerApplyFail",
                    f"{name} has {given.elements} elements of {given_type}, but the layer was made for "
                    f"{made.elements} of {made_type}",
                )
            if not (given.dense and made.dense) and (given.extents, given.strides) != (made.extents, made.strides):
                raise BNNSError(
                    "layerApplyFail",
                    f"{name} has size {given.extents} and stride {given.strides} (fastest first), but the layer was "
                    f"made for {made.extents} and {made.strides}",
                )

    def close(self) -> None:
        """Release the layer's memory now."""
        BNNSFilterDestroy(self._filter)

    def __enter__(self) -> NormalizationLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BNNS:
    """Swift's namespace."""

    ActivationFunction = ActivationFunction
    Error = BNNSError
    LearningPhase = LearningPhase
    NormalizationLayer = NormalizationLayer
    NormalizationType = NormalizationType
    Shape = Shape
