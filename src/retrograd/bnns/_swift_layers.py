"""Swift's layers, except fused ones."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import ClassVar

from .. import bnns as c
from . import _swift as swift
from ._memory import Geometry
from ._structures import BNNSNDArrayDescriptor, Structure
from ._swift import Decorator, Given, Layer
from ._swift_values import ConvolutionType


def _applies(
    function: Callable[..., int], declared: str, passed: str, data: str | None = None, like: str | None = None
) -> Decorator:
    """Declare a method that applies a layer's filter to a packed batch."""
    return swift.calls(function, f"batchSize {declared}", f"self batchSize {passed}", data=data, like=like)


# ---- layers with one input ------------------------------------------------------------------------------------------


class UnaryLayer(Layer):
    """A layer with one input."""

    @_applies(c.BNNSFilterApplyBatch, "input output", ".input+ .output+")
    def apply(self) -> None:
        """Apply the layer to a packed batch."""

    @_applies(
        c.BNNSFilterApplyBackwardBatch,
        "input? output? outputGradient generatingInputGradient? generatingWeightsGradient? generatingBiasGradient?",
        ".input+ generatingInputGradient+ .output+ outputGradient+ generatingWeightsGradient generatingBiasGradient",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of a packed batch."""


class ActivationLayer(UnaryLayer, layer="Activation", takes="function:ActivationFunction axes? input output"):
    """An activation. `axes` are those of a softmax; one more than the last axis is the batch."""


class FullyConnectedLayer(UnaryLayer, layer="FullyConnected", takes="input output weights bias? activation=.identity"):
    """A fully connected layer."""


class DropoutLayer(UnaryLayer, layer="Dropout", takes="input output rate seed control"):
    """Dropout. `seed` 0 means a different mask in every process."""


class PermuteLayer(UnaryLayer, layer="Permute", takes="input output permutation"):
    """A permutation of axes."""


class PaddingLayer(UnaryLayer):
    """Padding. `size` has the padding before and after each axis."""

    @swift.takes("input output mode:PaddingMode size filterParameters?")
    def __init__(self, given: Given) -> None:
        input, output, mode, size, parameters = given.values()
        bits = mode.bits_for(input.data_type)
        layer = c.BNNSLayerParametersPadding(input, output, size, mode.mode, bits)
        self._filter = swift.made(c.BNNSFilterCreateLayerPadding, layer, parameters)


class ReductionLayer(UnaryLayer, layer="Reduction", takes="function:ReductionFunction input output weights?"):
    """A reduction over the axes whose extent in the output is 1."""


class GramLayer(UnaryLayer, layer="Gram", takes="input output alpha"):
    """The scalar products of all pairs of channels."""


class ResizeLayer(
    UnaryLayer, layer="Resize", takes="interpolationMethod:InterpolationMethod input output alignsCorners"
):
    """A layer that resizes the axes whose extents differ between input and output."""


class ConvolutionLayer(UnaryLayer):
    """A convolution, or a transposed one."""

    @swift.takes(
        "type:ConvolutionType input weights output bias|None padding activation "
        "groupCount stride dilationStride filterParameters?"
    )
    def __init__(self, given: Given) -> None:
        transposed = given["type"] is ConvolutionType.transposed
        create = c.BNNSFilterCreateLayerTransposedConvolution if transposed else c.BNNSFilterCreateLayerConvolution
        layer = swift.filled(c.BNNSLayerParametersConvolution, given, ["bias"])
        self._filter = swift.made(create, layer, given["filterParameters"])


class EmbeddingLayer(
    UnaryLayer,
    layer="Embedding",
    takes="input output dictionary paddingIndex maximumNorm normType:Norm scalesGradientByFrequency",
):
    """A lookup of items in a dictionary."""

    @_applies(
        c.BNNSFilterApplyBackwardBatch,
        "input output? outputGradient generatingWeightsGradient",
        ".input+ (None) (0) (None) (0) outputGradient+ generatingWeightsGradient (None)",
    )
    def applyBackward(self) -> None:
        """Compute the gradient of the dictionary. `output` is ignored."""


class PoolingLayer(Layer):
    """A pooling layer."""

    @swift.takes(
        "type:PoolingType input output bias? activation=.identity kernelSize stride padding=.zero filterParameters?"
    )
    def __init__(self, given: Given) -> None:
        self._indices = given["type"].index_type, given["type"].indices, 0
        layer = swift.filled(c.BNNSLayerParametersPooling, given, ["bias"])
        self._filter = swift.made(c.BNNSFilterCreateLayerPooling, layer, given["filterParameters"])

    @_applies(c.BNNSPoolingFilterApplyBatchEx, "input output", ".input+ .output+ *self._indices")
    def apply(self) -> None:
        """Pool a packed batch."""

    @_applies(
        c.BNNSPoolingFilterApplyBackwardBatchEx,
        "input? output? outputGradient generatingInputGradient? generatingBiasGradient?",
        ".input+ generatingInputGradient+ .output+ outputGradient+ generatingBiasGradient *self._indices",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of a packed batch."""


class BroadcastMatrixMultiplyLayer(
    UnaryLayer,
    layer="BroadcastMatMul",
    takes="inputA transposedA isWeightsA inputB transposedB isWeightsB output alpha accumulatesToOutput isQuadratic",
):
    """A product of matrices: of one input and weights, of one input with itself, or of two inputs.

    Swift repeats the labels ``transposed`` and ``isWeights``; here they carry the letter of their input.
    """

    def _made(self, label: str) -> Geometry | None:
        if label not in ("inputA", "inputB"):
            return super()._made(label)
        operand: Geometry | None = getattr(self._filter, "operands", (None, None))[label == "inputB"]
        return operand

    @_applies(c.BNNSFilterApplyTwoInputBatch, "inputA inputB output", ".inputA+ .inputB+ .output+")
    def applyTwo(self) -> None:
        """Multiply two inputs: Swift's ``apply(batchSize:inputA:inputB:output:)``."""

    @_applies(
        c.BNNSFilterApplyBackwardTwoInputBatch,
        "inputA inputB output? outputGradient generatingInputAGradient|None generatingInputBGradient|None",
        ".inputA+ generatingInputAGradient+ .inputB+ generatingInputBGradient+ (None) (0) outputGradient+ (None) "
        "(None)",
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

    @swift.takes(
        "type:NormalizationType input output beta? gamma? momentum=0.0 epsilon activation=.identity "
        "filterParameters? momentumWeighs='old'"
    )
    def __init__(self, given: Given) -> None:
        layer = swift.filled(c.BNNSLayerParametersNormalization, given, ["beta", "gamma"])
        kind, parameters, weighs = (given[label] for label in ("type", "filterParameters", "momentumWeighs"))
        create = c.BNNSFilterCreateLayerNormalization
        self._filter = swift.made(create, kind.norm_type, layer, parameters, momentum_weighs=weighs)

    @_applies(c.BNNSNormalizationFilterApplyBatch, "input output for_", ".input+ .output+ for_")
    def apply(self) -> None:
        """Normalize a packed batch. `for_` is Swift's label ``for``."""

    @_applies(
        c.BNNSNormalizationFilterApplyBackwardBatch,
        "input? output outputGradient generatingInputGradient|None generatingBetaGradient? generatingGammaGradient?",
        "generatingInputGradient+ .output+ outputGradient+ generatingBetaGradient generatingGammaGradient",
        data="outputGradient generatingInputGradient generatingBetaGradient generatingGammaGradient",
        like="",
    )
    def applyBackward(self) -> None:
        """Compute the gradients of the last training pass. `input` is ignored: the layer keeps a copy of its input."""


class LossLayer(Layer):
    """A loss layer. `dividesByClasses`, which Swift does not have, is `divide_by_classes` of the C function."""

    @swift.takes(
        "input output lossFunction:LossFunction lossReduction:LossReduction filterParameters? dividesByClasses=True"
    )
    def __init__(self, given: Given) -> None:
        input, output, function, reduction, parameters, divides = given.values()
        layer = function.structure(i_desc=input, o_desc=output, reduction=reduction.value, **function.fields)
        self._filter = swift.made(c.BNNSFilterCreateLayerLoss, layer, parameters, divide_by_classes=divides)

    @_applies(
        c.BNNSLossFilterApplyBatch,
        "input labels output weights? broadcastsWeights=False generatingInputGradient",
        ".input+ .labels+ .weights (self._count(batchSize,weights,broadcastsWeights)) .output generatingInputGradient+",
        data="input labels output weights generatingInputGradient",
        like="input labels",
    )
    def apply(self) -> None:
        """Compute the loss of a packed batch and the gradient of its input.

        With `broadcastsWeights` the first of the `weights` is that of all losses; otherwise each has its own.
        """

    def _made(self, label: str) -> Geometry | None:
        return super()._made("input" if label == "labels" else label)

    def _count(self, batch: int, weights: BNNSNDArrayDescriptor | None, broadcasts: bool) -> int:
        """The number of weights."""
        if weights is None:
            return 0
        return 1 if broadcasts else batch * getattr(self._filter, "values", 1)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def operands(
    inputs: Sequence[BNNSNDArrayDescriptor], types: Sequence[int], output: BNNSNDArrayDescriptor, outputType: int
) -> Structure:
    """The structure of the operands, for the C function."""
    kind = (c.BNNSArithmeticUnary, c.BNNSArithmeticBinary, c.BNNSArithmeticTernary)[len(inputs) - 1]
    pairs = [part for pair in zip(inputs, types, strict=True) for part in pair]
    return kind(*pairs, output, outputType)


class _ArithmeticLayer(Layer):
    """A layer whose class declares its inputs, and the type of its function."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, inputs: str = "", function: str = "") -> None:
        super().__init_subclass__()
        cls._names = names = tuple(inputs.split())
        types = " ".join(f"{name} {name}DescriptorType:DescriptorType" for name in (*names, "output"))
        gradients = [f"generating{name[0].upper()}{name[1:]}Gradient" for name in names]
        all_inputs, all_gradients = ",".join(names) + ",", ",".join(gradients) + ","
        nullable = " ".join(f"{gradient}|None" for gradient in gradients)

        @swift.takes(f"{types} function:{function} activation=.identity filterParameters?")
        def __init__(self: _ArithmeticLayer, given: Given) -> None:
            arrays, kinds = ([given[f"{name}{end}"] for name in names] for end in ("", "DescriptorType"))
            fields = operands(arrays, kinds, given["output"], given["outputDescriptorType"])
            layer = c.BNNSLayerParametersArithmetic(given["function"], fields, given["activation"].bnnsActivation)
            self._filter = swift.made(c.BNNSFilterCreateLayerArithmetic, layer, given["filterParameters"])

        @_applies(c.BNNSArithmeticFilterApplyBatch, f"{inputs} output", f"({len(names)}) .{all_inputs}+ .output+")
        def apply() -> None:
            """Apply the layer to a packed batch."""

        @_applies(
            c.BNNSArithmeticFilterApplyBackwardBatch,
            f"{inputs} output? outputGradient {nullable}",
            f"({len(names)}) .{all_inputs}+ {all_gradients}+ .output+ outputGradient+",
            data="outputGradient",
        )
        def applyBackward() -> None:
            """Compute the gradients of the inputs."""

        for method in (__init__, apply, applyBackward):
            method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
            setattr(cls, method.__name__, method)

    def _made(self, label: str) -> Geometry | None:
        if self._filter.destroyed:
            return None
        operand = self._filter.output if label == "output" else self._filter.operands[self._names.index(label)]
        geometry: Geometry = operand.geometry
        return geometry


class UnaryArithmeticLayer(_ArithmeticLayer, inputs="input", function="ArithmeticUnaryFunction"):
    """An elementwise function of one input."""


class BinaryArithmeticLayer(_ArithmeticLayer, inputs="inputA inputB", function="ArithmeticBinaryFunction"):
    """An elementwise function of two inputs."""


class TernaryArithmeticLayer(_ArithmeticLayer, inputs="inputA inputB inputC", function="ArithmeticTernaryFunction"):
    """An elementwise function of three inputs."""


# ---- crops ----------------------------------------------------------------------------------------------------------


@swift.public
class CropResizeLayer:
    """Samples regions of images by linear interpolation.

    It has no filter: arrays say the sizes, and the C functions take its structure.
    """

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

    @swift.takes(
        "coordinatesAreNormalized spatialScale extrapolationValue=0.0 samplingMode=.default boxCoordinateMode",
        samplingMode=LinearSamplingMode,
        boxCoordinateMode=BoxCoordinateMode,
    )
    def __init__(self, given: Given) -> None:
        fields = {"method": c.BNNSInterpolationMethodLinear}
        self._filter = swift.filled(c.BNNSLayerParametersCropResize, given, fields=fields)

    @swift.calls(
        c.BNNSCropResize,
        "input regionOfInterest output filterParameters?",
        "self input regionOfInterest output filterParameters",
    )
    def apply(self) -> None:
        """Sample every region of every image."""

    @swift.calls(
        c.BNNSCropResizeBackward,
        "regionOfInterest outputGradient generatingInputGradient filterParameters?",
        "self generatingInputGradient regionOfInterest outputGradient filterParameters",
    )
    def applyBackward(self) -> None:
        """Compute the gradient of the images."""
