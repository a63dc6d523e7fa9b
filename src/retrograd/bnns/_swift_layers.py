"""Swift's layers, except fused ones."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from . import _constants as c
from ._activation_filter import BNNSFilterCreateLayerActivation
from ._apply import (
    BNNSFilterApplyBackwardBatch,
    BNNSFilterApplyBackwardTwoInputBatch,
    BNNSFilterApplyBatch,
    BNNSFilterApplyTwoInputBatch,
)
from ._arithmetic_filter import (
    BNNSArithmeticBinary,
    BNNSArithmeticFilterApplyBackwardBatch,
    BNNSArithmeticFilterApplyBatch,
    BNNSArithmeticTernary,
    BNNSArithmeticUnary,
    BNNSFilterCreateLayerArithmetic,
    BNNSLayerParametersArithmetic,
)
from ._contraction import BNNSFilterCreateLayerGram, BNNSLayerParametersGram
from ._convolution import (
    BNNSFilterCreateLayerConvolution,
    BNNSFilterCreateLayerTransposedConvolution,
    BNNSLayerParametersConvolution,
)
from ._crop_resize import BNNSCropResize, BNNSCropResizeBackward, BNNSLayerParametersCropResize
from ._embedding import BNNSFilterCreateLayerEmbedding, BNNSLayerParametersEmbedding
from ._fully_connected import BNNSFilterCreateLayerFullyConnected, BNNSLayerParametersFullyConnected
from ._loss import BNNSFilterCreateLayerLoss, BNNSLossFilterApplyBatch
from ._matmul import BNNSFilterCreateLayerBroadcastMatMul, BNNSLayerParametersBroadcastMatMul
from ._memory import Geometry
from ._normalization import (
    BNNSFilterCreateLayerNormalization,
    BNNSNormalizationFilterApplyBackwardBatch,
    BNNSNormalizationFilterApplyBatch,
)
from ._pooling import (
    BNNSFilterCreateLayerPooling,
    BNNSLayerParametersPooling,
    BNNSPoolingFilterApplyBackwardBatchEx,
    BNNSPoolingFilterApplyBatchEx,
)
from ._reduction import BNNSFilterCreateLayerReduction, BNNSLayerParametersReduction
from ._resize import BNNSFilterCreateLayerResize, BNNSLayerParametersResize
from ._sample_map import (
    BNNSFilterCreateLayerDropout,
    BNNSFilterCreateLayerPadding,
    BNNSFilterCreateLayerPermute,
    BNNSLayerParametersDropout,
    BNNSLayerParametersPadding,
    BNNSLayerParametersPermute,
)
from ._structures import (
    BNNSLayerParametersActivation,
    BNNSLayerParametersNormalization,
    BNNSNDArrayDescriptor,
    Structure,
)
from ._swift import (
    Given,
    Layer,
    batch_stride,
    calls,
    check_data,
    check_like,
    checked_call,
    data_of,
    filled,
    made,
    public,
    stride_of,
    takes,
)
from ._swift_values import ConvolutionType

# ---- layers with one input ------------------------------------------------------------------------------------------


class UnaryLayer(Layer):
    """A layer with one input."""

    @calls(BNNSFilterApplyBatch, "batchSize input output", "self batchSize .input+ .output+")
    def apply(self) -> None:
        """Apply the layer to a packed batch."""

    @calls(
        BNNSFilterApplyBackwardBatch,
        "batchSize input? output? outputGradient generatingInputGradient? generatingWeightsGradient? "
        "generatingBiasGradient?",
        "self batchSize .input+ generatingInputGradient+ .output+ outputGradient+ generatingWeightsGradient "
        "generatingBiasGradient",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of a packed batch."""


class ActivationLayer(
    UnaryLayer,
    layer=BNNSLayerParametersActivation,
    create=BNNSFilterCreateLayerActivation,
    takes="function:ActivationFunction axes? input output filterParameters?",
):
    """An activation. `axes` are those of a softmax; one more than the last axis is the batch."""


class FullyConnectedLayer(
    UnaryLayer,
    layer=BNNSLayerParametersFullyConnected,
    create=BNNSFilterCreateLayerFullyConnected,
    takes="input output weights bias? activation=.identity filterParameters?",
):
    """A fully connected layer."""


class DropoutLayer(
    UnaryLayer,
    layer=BNNSLayerParametersDropout,
    create=BNNSFilterCreateLayerDropout,
    takes="input output rate seed control filterParameters?",
):
    """Dropout. `seed` 0 means a different mask in every process."""


class PermuteLayer(
    UnaryLayer,
    layer=BNNSLayerParametersPermute,
    create=BNNSFilterCreateLayerPermute,
    takes="input output permutation filterParameters?",
):
    """A permutation of axes."""


class PaddingLayer(UnaryLayer):
    """Padding. `size` has the padding before and after each axis."""

    @takes("input output mode:PaddingMode size filterParameters?")
    def __init__(self, given: Given) -> None:
        input, mode = given["input"], given["mode"]
        bits = mode.bits_for(input.data_type)
        parameters = BNNSLayerParametersPadding(input, given["output"], given["size"], mode.mode, bits)
        self._filter = made(BNNSFilterCreateLayerPadding, parameters, given["filterParameters"])


class ReductionLayer(
    UnaryLayer,
    layer=BNNSLayerParametersReduction,
    create=BNNSFilterCreateLayerReduction,
    takes="function:ReductionFunction input output weights? filterParameters?",
):
    """A reduction over the axes whose extent in the output is 1."""


class GramLayer(
    UnaryLayer,
    layer=BNNSLayerParametersGram,
    create=BNNSFilterCreateLayerGram,
    takes="input output alpha filterParameters?",
):
    """The scalar products of all pairs of channels."""


class ResizeLayer(
    UnaryLayer,
    layer=BNNSLayerParametersResize,
    create=BNNSFilterCreateLayerResize,
    takes="interpolationMethod:InterpolationMethod input output alignsCorners filterParameters?",
):
    """A layer that resizes the axes whose extents differ between input and output."""


class ConvolutionLayer(UnaryLayer):
    """A convolution, or a transposed one."""

    @takes(
        "type:ConvolutionType input weights output bias|None padding activation "
        "groupCount stride dilationStride filterParameters?"
    )
    def __init__(self, given: Given) -> None:
        labels = {label: given[label] for label in given if label not in ("type", "filterParameters")}
        transposed = given["type"] is ConvolutionType.transposed
        create = BNNSFilterCreateLayerTransposedConvolution if transposed else BNNSFilterCreateLayerConvolution
        parameters = filled(BNNSLayerParametersConvolution, labels, ["bias"])
        self._filter = made(create, parameters, given["filterParameters"])


class EmbeddingLayer(
    UnaryLayer,
    layer=BNNSLayerParametersEmbedding,
    create=BNNSFilterCreateLayerEmbedding,
    takes="input output dictionary paddingIndex maximumNorm normType:Norm scalesGradientByFrequency filterParameters?",
):
    """A lookup of items in a dictionary."""

    @calls(
        BNNSFilterApplyBackwardBatch,
        "batchSize input output? outputGradient generatingWeightsGradient",
        "self batchSize .input+ (None) (0) (None) (0) outputGradient+ generatingWeightsGradient (None)",
    )
    def applyBackward(self) -> None:
        """Compute the gradient of the dictionary. `output` is ignored."""


class PoolingLayer(Layer):
    """A pooling layer."""

    @takes("type:PoolingType input output bias? activation=.identity kernelSize stride padding=.zero filterParameters?")
    def __init__(self, given: Given) -> None:
        self._type = given["type"]
        labels = {label: given[label] for label in given if label != "filterParameters"}
        parameters = filled(BNNSLayerParametersPooling, labels, ["bias"])
        self._filter = made(BNNSFilterCreateLayerPooling, parameters, given["filterParameters"])

    @calls(
        BNNSPoolingFilterApplyBatchEx,
        "batchSize input output",
        "self batchSize .input+ .output+ (self._type.index_type) (self._type.indices) (0)",
    )
    def apply(self) -> None:
        """Pool a packed batch."""

    @calls(
        BNNSPoolingFilterApplyBackwardBatchEx,
        "batchSize input? output? outputGradient generatingInputGradient? generatingBiasGradient?",
        "self batchSize .input+ generatingInputGradient+ .output+ outputGradient+ generatingBiasGradient "
        "(self._type.index_type) (self._type.indices) (0)",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of a packed batch."""


class BroadcastMatrixMultiplyLayer(
    UnaryLayer,
    layer=BNNSLayerParametersBroadcastMatMul,
    create=BNNSFilterCreateLayerBroadcastMatMul,
    takes="inputA transposedA isWeightsA inputB transposedB isWeightsB output alpha accumulatesToOutput isQuadratic "
    "filterParameters?",
):
    """A product of matrices: of one input and weights, of one input with itself, or of two inputs.

    Swift repeats the labels ``transposed`` and ``isWeights``; here they carry the letter of their input.
    """

    def _made(self, label: str) -> Geometry | None:
        if label not in ("inputA", "inputB"):
            return super()._made(label)
        operand: Geometry | None = getattr(self._filter, "operands", (None, None))[label == "inputB"]
        return operand

    @calls(
        BNNSFilterApplyTwoInputBatch,
        "batchSize inputA inputB output",
        "self batchSize .inputA+ .inputB+ .output+",
    )
    def applyTwo(self) -> None:
        """Multiply two inputs: Swift's ``apply(batchSize:inputA:inputB:output:)``."""

    @calls(
        BNNSFilterApplyBackwardTwoInputBatch,
        "batchSize inputA inputB output? outputGradient generatingInputAGradient|None generatingInputBGradient|None",
        "self batchSize .inputA+ generatingInputAGradient+ .inputB+ generatingInputBGradient+ (None) (0) "
        "outputGradient+ (None) (None)",
        data="inputA inputB outputGradient",
        like="",
    )
    def applyBackwardTwo(self) -> None:
        """Compute the gradients of two inputs. `output` is ignored."""


# ---- normalization and losses ---------------------------------------------------------------------------------------


class NormalizationLayer(Layer):
    """A normalization layer. `beta` and `gamma` may be None, or descriptors without data.

    `momentumWeighs`, which Swift does not have, says what `momentum` is the weight of: the "old" moving statistics or
    the "new" batch.
    """

    @takes(
        "type:NormalizationType input output beta? gamma? momentum=0.0 epsilon activation=.identity "
        "filterParameters? momentumWeighs='old'"
    )
    def __init__(self, given: Given) -> None:
        labels = {label: given[label] for label in given if label not in ("filterParameters", "momentumWeighs")}
        self._filter = made(
            BNNSFilterCreateLayerNormalization,
            given["type"].norm_type,
            filled(BNNSLayerParametersNormalization, labels, ["beta", "gamma"]),
            given["filterParameters"],
            momentum_weighs=given["momentumWeighs"],
        )

    @calls(
        BNNSNormalizationFilterApplyBatch,
        "batchSize input output for_",
        "self batchSize .input+ .output+ for_",
    )
    def apply(self) -> None:
        """Normalize a packed batch. `for_` is Swift's label ``for``."""

    @calls(
        BNNSNormalizationFilterApplyBackwardBatch,
        "batchSize input? output outputGradient generatingInputGradient|None generatingBetaGradient? "
        "generatingGammaGradient?",
        "self batchSize generatingInputGradient+ .output+ outputGradient+ generatingBetaGradient "
        "generatingGammaGradient",
        data="outputGradient generatingInputGradient generatingBetaGradient generatingGammaGradient",
        like="",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of the last training pass. `input` is ignored: the layer keeps a copy of its input."""


class LossLayer(Layer):
    """A loss layer. `dividesByClasses`, which Swift does not have, is `divide_by_classes` of the C function."""

    @takes("input output lossFunction:LossFunction lossReduction:LossReduction filterParameters? dividesByClasses=True")
    def __init__(self, given: Given) -> None:
        labels = {label: given[label] for label in ("lossFunction", "input", "output")}
        reduction = given["lossReduction"].bnnsLossReductionFunction
        self._filter = made(
            BNNSFilterCreateLayerLoss,
            filled(given["lossFunction"].structure, labels, fields={"reduction": reduction}),
            given["filterParameters"],
            divide_by_classes=given["dividesByClasses"],
        )

    @takes("batchSize input labels output weights? broadcastsWeights=False generatingInputGradient")
    def apply(self, given: Given) -> None:
        """Compute the loss of a packed batch and the gradient of its input.

        With `broadcastsWeights` the first of the `weights` is that of all losses; otherwise each has its own.
        """
        arrays = {label: given[label] for label in ("input", "labels", "output", "weights", "generatingInputGradient")}
        check_data(**arrays)
        input, labels, output, weights, gradient = arrays.values()
        for name in ("input", "labels"):
            check_like(name, given[name], self._made("input"))
        size = 0
        if weights is not None:
            size = 1 if given["broadcastsWeights"] else given["batchSize"] * getattr(self._filter, "values", 1)
        samples = (input.data, batch_stride(input), labels.data, batch_stride(labels), data_of(weights), size)
        rest = (output.data, gradient, batch_stride(gradient))
        checked_call(BNNSLossFilterApplyBatch, self._filter, given["batchSize"], *samples, *rest)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def operands(
    inputs: Sequence[BNNSNDArrayDescriptor], types: Sequence[int], output: BNNSNDArrayDescriptor, outputType: int
) -> Structure:
    """The structure of the operands, for the C function."""
    kind = (BNNSArithmeticUnary, BNNSArithmeticBinary, BNNSArithmeticTernary)[len(inputs) - 1]
    pairs = [part for pair in zip(inputs, types, strict=True) for part in pair]
    return kind(*pairs, output, outputType)


class _ArithmeticLayer(Layer):
    """A layer whose class declares its inputs, and the type of its function."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, inputs: str = "", function: str = "") -> None:
        super().__init_subclass__()
        cls._names = tuple(inputs.split())
        types = " ".join(f"{name} {name}DescriptorType:DescriptorType" for name in (*cls._names, "output"))
        gradients = " ".join(f"generating{name[0].upper()}{name[1:]}Gradient|None" for name in cls._names)
        rest = f"function:{function} activation=.identity filterParameters?"
        methods: dict[str, tuple[Callable[..., None], str]] = {
            "__init__": (_arithmetic_init, f"{types} {rest}"),
            "apply": (_arithmetic_apply, f"batchSize {inputs} output"),
            "applyBackward": (_arithmetic_backward, f"batchSize {inputs} output? outputGradient {gradients}"),
        }
        for name, (body, labels) in methods.items():
            body.__name__, body.__qualname__ = name, f"{cls.__qualname__}.{name}"
            setattr(cls, name, takes(labels)(body))

    def _check(self, given: Given) -> list[Any]:
        """The inputs, which must be as those that the layer was made for."""
        made = getattr(self._filter, "operands", ())  # none: the layer was closed
        for name, operand in zip(self._names, made, strict=False):
            check_like(name, given[name], operand.geometry)
        if given["output"] is not None and made:
            check_like("output", given["output"], self._filter.output.geometry)
        return [given[name] for name in self._names]


def _arithmetic_init(self: _ArithmeticLayer, given: Given) -> None:
    inputs, types = ([given[f"{name}{end}"] for name in self._names] for end in ("", "DescriptorType"))
    fields = operands(inputs, types, given["output"], given["outputDescriptorType"])
    parameters = BNNSLayerParametersArithmetic(given["function"], fields, given["activation"].bnnsActivation)
    self._filter = made(BNNSFilterCreateLayerArithmetic, parameters, given["filterParameters"])


def _arithmetic_apply(self: _ArithmeticLayer, given: Given) -> None:
    """Apply the layer to a packed batch."""
    batch, output = given["batchSize"], given["output"]
    check_data(**{name: given[name] for name in (*self._names, "output")})
    inputs = self._check(given)
    data, strides = [one.data for one in inputs], [batch_stride(one) for one in inputs]
    rest = (output.data, batch_stride(output))
    checked_call(BNNSArithmeticFilterApplyBatch, self._filter, batch, len(inputs), data, strides, *rest)


def _arithmetic_backward(self: _ArithmeticLayer, given: Given) -> None:
    """Compute the gradients of the inputs."""
    output, dy = given["output"], given["outputGradient"]
    check_data(outputGradient=dy)
    inputs = self._check(given)
    gradients = [given[label] for label in given if label.startswith("generating")]
    checked_call(
        BNNSArithmeticFilterApplyBackwardBatch,
        self._filter,
        given["batchSize"],
        len(inputs),
        [one.data for one in inputs],
        [batch_stride(one) for one in inputs],
        gradients,
        [stride_of(one) for one in gradients],
        data_of(output),
        stride_of(output),
        dy,
        batch_stride(dy),
    )


class UnaryArithmeticLayer(_ArithmeticLayer, inputs="input", function="ArithmeticUnaryFunction"):
    """An elementwise function of one input."""


class BinaryArithmeticLayer(_ArithmeticLayer, inputs="inputA inputB", function="ArithmeticBinaryFunction"):
    """An elementwise function of two inputs."""


class TernaryArithmeticLayer(_ArithmeticLayer, inputs="inputA inputB inputC", function="ArithmeticTernaryFunction"):
    """An elementwise function of three inputs."""


# ---- crops ----------------------------------------------------------------------------------------------------------


@public
class CropResizeLayer:
    """Samples regions of images by linear interpolation. It has no filter: arrays say the sizes."""

    class LinearSamplingMode(enum.Enum):
        """Which points of a region are sampled."""

        default = c.BNNSLinearSamplingDefault
        alignCorners = c.BNNSLinearSamplingAlignCorners
        unalignCorners = c.BNNSLinearSamplingUnalignCorners
        strictAlignCorners = c.BNNSLinearSamplingStrictAlignCorners
        offsetCorners = c.BNNSLinearSamplingOffsetCorners

    class BoxCoordinateMode(enum.Enum):
        """What the four coordinates of a region are."""

        cornersHeightFirst = c.BNNSCornersHeightFirst
        cornersWidthFirst = c.BNNSCornersWidthFirst
        centerSizeHeightFirst = c.BNNSCenterSizeHeightFirst
        centerSizeWidthFirst = c.BNNSCenterSizeWidthFirst

    def __init__(
        self,
        *,
        coordinatesAreNormalized: bool,
        spatialScale: float,
        extrapolationValue: float = 0.0,
        samplingMode: LinearSamplingMode = LinearSamplingMode.default,
        boxCoordinateMode: BoxCoordinateMode,
    ) -> None:
        self._filter = BNNSLayerParametersCropResize(  # the first argument of the C functions
            coordinatesAreNormalized,
            spatialScale,
            extrapolationValue,
            samplingMode.value,
            boxCoordinateMode.value,
            c.BNNSInterpolationMethodLinear,
        )

    @calls(
        BNNSCropResize,
        "input regionOfInterest output filterParameters?",
        "self input regionOfInterest output filterParameters",
    )
    def apply(self) -> None:
        """Sample every region of every image."""

    @calls(
        BNNSCropResizeBackward,
        "regionOfInterest outputGradient generatingInputGradient filterParameters?",
        "self generatingInputGradient regionOfInterest outputGradient filterParameters",
    )
    def applyBackward(self) -> None:
        """Compute the gradient of the images."""
