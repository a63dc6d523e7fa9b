"""Swift's fused layers: two layers, applied as one, and their parameters, which may be changed before it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from . import _constants as c
from ._arithmetic_filter import BNNSLayerParametersArithmetic
from ._convolution import BNNSLayerParametersConvolution
from ._filter import FLOATS
from ._fully_connected import BNNSLayerParametersFullyConnected
from ._fused import (
    BNNSFilterCreateFusedLayer,
    BNNSFusedFilterApplyBackwardBatch,
    BNNSFusedFilterApplyBackwardMultiInputBatch,
    BNNSFusedFilterApplyBatch,
    BNNSFusedFilterApplyMultiInputBatch,
)
from ._quantization import BNNSLayerParametersQuantization
from ._structures import BNNSFilterParameters, BNNSLayerParametersNormalization, BNNSNDArrayDescriptor, Structure
from ._swift import (
    BNNSError,
    Given,
    Layer,
    LearningPhase,
    batch_stride,
    check_data,
    check_like,
    checked_call,
    data_of,
    filled,
    learning_phase,
    made,
    public,
    stride_of,
    takes,
)
from ._swift_layers import operands
from ._swift_values import (
    ActivationFunction,
    ArithmeticTernaryFunction,
    ConvolutionPadding,
    ConvolutionType,
    DescriptorType,
    NormalizationType,
)


class FusableLayerParameters:
    """A layer that can be fused with another one."""

    inputs: ClassVar[int] = 1

    @property
    def filter_type(self) -> int:
        """The number of the C function's filter."""
        raise NotImplementedError

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        """The structure of the C function."""
        raise NotImplementedError

    def input_type(self, first: int, output: int) -> int:
        """The data type of the input of a second layer, given those of the first layer's input and of the output."""
        return output


@public
@dataclasses.dataclass(kw_only=True)
class FusedConvolutionParameters(FusableLayerParameters):
    """A convolution, or a transposed one. `groupSize` is the number of groups."""

    type: ConvolutionType
    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor | None
    stride: tuple[int, int]
    dilationStride: tuple[int, int]
    groupSize: int
    padding: ConvolutionPadding

    @property
    def filter_type(self) -> int:
        return c.BNNSTransposedConvolution if self.type is ConvolutionType.transposed else c.BNNSConvolution

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        return _filled(BNNSLayerParametersConvolution, self, inputs, output, "type")


@public
@dataclasses.dataclass(kw_only=True)
class FusedFullyConnectedParameters(FusableLayerParameters):
    """A fully connected layer."""

    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor | None

    @property
    def filter_type(self) -> int:
        return c.BNNSFullyConnected

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        return _filled(BNNSLayerParametersFullyConnected, self, inputs, output)


@public
@dataclasses.dataclass(kw_only=True)
class FusedNormalizationParameters(FusableLayerParameters):
    """A normalization."""

    type: NormalizationType
    beta: BNNSNDArrayDescriptor | None = None
    gamma: BNNSNDArrayDescriptor | None = None
    momentum: float = 0.0
    epsilon: float
    activation: ActivationFunction

    @property
    def filter_type(self) -> int:
        return self.type.norm_type

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        return _filled(BNNSLayerParametersNormalization, self, inputs, output)


@public
@dataclasses.dataclass(kw_only=True)
class FusedQuantizationParameters(FusableLayerParameters):
    """A quantization. `axis` is that of scale and bias; None, as it is at first: they have one element."""

    function: ClassVar[int] = c.BNNSQuantizerFunctionQuantize

    scale: BNNSNDArrayDescriptor | None
    bias: BNNSNDArrayDescriptor | None
    axis: int | None = dataclasses.field(default=None, init=False)

    @property
    def filter_type(self) -> int:
        return c.BNNSQuantization

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        return _filled(BNNSLayerParametersQuantization, self, inputs, output, function=self.function)

    def input_type(self, first: int, output: int) -> int:
        # A layer with an input of integers has a floating-point output.
        return first if first in FLOATS else c.BNNSDataTypeFloat32


@public
@dataclasses.dataclass(kw_only=True)
class FusedDequantizationParameters(FusedQuantizationParameters):
    """A dequantization of a layer whose input and output are integers."""

    function: ClassVar[int] = c.BNNSQuantizerFunctionDequantize

    def input_type(self, first: int, output: int) -> int:
        return first


class _ArithmeticParameters(FusableLayerParameters):
    outputDescriptorType: DescriptorType
    function: int

    @property
    def filter_type(self) -> int:
        return c.BNNSArithmetic

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        types = [value for label, value in vars(self).items() if label.startswith("input")]
        return BNNSLayerParametersArithmetic(self.function, operands(inputs, types, output, self.outputDescriptorType))


@public
@dataclasses.dataclass(kw_only=True)
class FusedUnaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of one input."""

    inputDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: int


@public
@dataclasses.dataclass(kw_only=True)
class FusedBinaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of two inputs."""

    inputs: ClassVar[int] = 2

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: int


@public
@dataclasses.dataclass(kw_only=True)
class FusedTernaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of three inputs."""

    inputs: ClassVar[int] = 3

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    inputCDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: ArithmeticTernaryFunction


def _filled(
    layer: type[Structure],
    parameters: FusableLayerParameters,
    inputs: Sequence[BNNSNDArrayDescriptor],
    output: BNNSNDArrayDescriptor,
    *unused: str,
    **fields: object,
) -> Structure:
    (input,) = inputs
    labels = {label: value for label, value in vars(parameters).items() if label not in unused}
    optional = ("beta", "gamma", "bias", "scale", "axis")
    return filled(layer, {**labels, "input": input, "output": output}, optional, fields)


class FusedLayer(Layer):
    """A layer, and another one that is applied to its output."""

    def __init__(
        self,
        inputs: Mapping[str, BNNSNDArrayDescriptor],
        output: BNNSNDArrayDescriptor,
        parts: Sequence[FusableLayerParameters],
        filterParameters: BNNSFilterParameters | None,
        momentumWeighs: str,
    ) -> None:
        """`inputs` are named as the arguments of `apply`."""
        self._names = tuple(inputs)
        if len(parts) != 2:
            raise BNNSError("unableToCreateLayer", f"fusedLayerParameters has {len(parts)} entries, must have 2")
        first, second = parts
        for part, count in ((first, len(inputs)), (second, 1)):
            if part.inputs != count:
                name = type(part).__name__
                raise BNNSError("unableToCreateLayer", f"{name} has {part.inputs} inputs, but is given {count}")
        arrays = list(inputs.values())
        between = output.copy()
        between.data, between.data_type = None, second.input_type(arrays[0].data_type, output.data_type)
        types = (first.filter_type, second.filter_type)
        layers = (first.layer(arrays, between), second.layer([between], output))
        self._filter = made(
            BNNSFilterCreateFusedLayer, 2, types, layers, filterParameters, momentum_weighs=momentumWeighs
        )

    def _check_like(self, arrays: Mapping[str, BNNSNDArrayDescriptor | None]) -> None:
        """Compare inputs and output with what the layer was made for."""
        filter = self._filter
        if filter.destroyed:
            return
        inputs = [operand.geometry for operand in filter.first.operands] if filter.many else [filter.input]
        made = {**dict(zip(self._names, inputs, strict=True)), "output": filter.output}
        for name, array in arrays.items():
            if array is not None and array.data is not None:
                check_like(name, array, made[name])

    def _apply(
        self,
        batchSize: int,
        inputs: Mapping[str, BNNSNDArrayDescriptor],
        output: BNNSNDArrayDescriptor,
        for_: LearningPhase,
    ) -> None:
        training = learning_phase(for_)
        check_data(**inputs, output=output)
        self._check_like({**inputs, "output": output})
        arrays = [array.data for array in inputs.values()]
        strides = [batch_stride(array) for array in inputs.values()]
        rest = (output.data, batch_stride(output), training)
        if getattr(self._filter, "many", False):
            checked_call(
                BNNSFusedFilterApplyMultiInputBatch, self._filter, batchSize, len(arrays), arrays, strides, *rest
            )
        else:
            checked_call(BNNSFusedFilterApplyBatch, self._filter, batchSize, arrays[0], strides[0], *rest)

    def _apply_backward(
        self,
        given: Given,
        inputs: Mapping[str, BNNSNDArrayDescriptor | None],
        gradients: Mapping[str, BNNSNDArrayDescriptor | None],
    ) -> None:
        """`gradients` has the names of the inputs."""
        batchSize, output, outputGradient = (given[label] for label in ("batchSize", "output", "outputGradient"))
        parameterGradients = given["generatingParameterGradients"]
        check_data(outputGradient=outputGradient)
        check_data(**{f"generatingI{name[1:]}Gradient": gradient for name, gradient in gradients.items()})
        for index, gradient in enumerate(parameterGradients):
            check_data(**{f"generatingParameterGradients[{index}]": gradient})
        self._check_like({**inputs, "output": output})
        arrays = [data_of(array) for array in inputs.values()]
        strides = [stride_of(array) for array in inputs.values()]
        wanted = list(gradients.values())
        steps = [stride_of(gradient) for gradient in wanted]
        rest = (
            data_of(output),
            stride_of(output),
            outputGradient,
            stride_of(outputGradient),
            parameterGradients,
        )
        if getattr(self._filter, "many", False):
            many = (len(arrays), arrays, strides, wanted, steps)
            checked_call(BNNSFusedFilterApplyBackwardMultiInputBatch, self._filter, batchSize, *many, *rest)
        else:
            first = (arrays[0], strides[0], wanted[0], steps[0])
            checked_call(BNNSFusedFilterApplyBackwardBatch, self._filter, batchSize, *first, *rest)

    @takes("batchSize input output for_")
    def apply(self, given: Given) -> None:
        """Apply the layer to a packed batch. `for_` is Swift's label ``for``."""
        self._apply(given["batchSize"], {"input": given["input"]}, given["output"], given["for_"])

    @takes("batchSize input? output? outputGradient generatingInputGradient? generatingParameterGradients")
    def applyBackward(self, given: Given) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        self._apply_backward(given, {"input": given["input"]}, {"input": given["generatingInputGradient"]})


_NORMALIZATION = (
    "normalization normalizationBeta|None normalizationGamma|None normalizationMomentum normalizationEpsilon "
    "normalizationActivation filterParameters? momentumWeighs='old'"
)


def _normalized(layer: FusedLayer, first: FusableLayerParameters, given: Given) -> None:
    """Create a layer that is followed by a normalization."""
    labels = ("beta", "gamma", "momentum", "epsilon", "activation")
    options = {label: given[f"normalization{label.capitalize()}"] for label in labels}
    second = FusedNormalizationParameters(type=given["normalization"], **options)
    parts = [first, second]
    FusedLayer.__init__(
        layer, {"input": given["input"]}, given["output"], parts, given["filterParameters"], given["momentumWeighs"]
    )


class FusedConvolutionNormalizationLayer(FusedLayer):
    """A convolution and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    @takes(
        "input output convolutionWeights convolutionBias|None convolutionStride convolutionDilationStride "
        f"convolutionPadding {_NORMALIZATION}"
    )
    def __init__(self, given: Given) -> None:
        labels = ("weights", "bias", "stride", "dilationStride", "padding")
        options = {label: given[f"convolution{label[0].upper()}{label[1:]}"] for label in labels}
        first = FusedConvolutionParameters(type=ConvolutionType.standard, groupSize=1, **options)
        _normalized(self, first, given)


class FusedFullyConnectedNormalizationLayer(FusedLayer):
    """A fully connected layer and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    @takes(f"input output fullyConnectedWeights fullyConnectedBias|None {_NORMALIZATION}")
    def __init__(self, given: Given) -> None:
        first = FusedFullyConnectedParameters(weights=given["fullyConnectedWeights"], bias=given["fullyConnectedBias"])
        _normalized(self, first, given)


_INPUTS = ("input", "inputA", "inputB", "inputC")


class FusedParametersLayer(FusedLayer):
    """Two layers, given by their parameters. The first has one input, or two or three if it is arithmetic.

    An arithmetic layer is followed by a normalization, whose beta and gamma have the parameter gradients; other layers
    are followed by a normalization or a quantization. `momentumWeighs`, which Swift does not have, is that of the
    normalization layer.
    """

    @takes(
        "input? inputA? inputB? inputC? output fusedLayerParameters filterParameters? momentumWeighs='old'",
        fusedLayerParameters=Sequence[FusableLayerParameters],
    )
    def __init__(self, given: Given) -> None:
        inputs = {name: given[name] for name in _INPUTS if given[name] is not None}
        if tuple(inputs) not in (("input",), ("inputA", "inputB"), ("inputA", "inputB", "inputC")):
            shown = ", ".join(inputs) or "nothing"
            raise TypeError(f"give input; or inputA and inputB; or inputA, inputB and inputC: not {shown}")
        parts, weighs = given["fusedLayerParameters"], given["momentumWeighs"]
        super().__init__(inputs, given["output"], parts, given["filterParameters"], weighs)

    def _own(self, given: Mapping[str, BNNSNDArrayDescriptor | None]) -> dict[str, BNNSNDArrayDescriptor | None]:
        """The arrays of this layer's inputs."""
        for name, array in given.items():
            if array is not None and name not in self._names:
                inputs = " and ".join(self._names)
                raise BNNSError("layerApplyFail", f"{name}, or its gradient, is given, but the layer has {inputs}")
        return {name: given[name] for name in self._names}

    @takes("batchSize input? inputA? inputB? inputC? output for_")
    def apply(self, given: Given) -> None:
        """Apply the layer to a packed batch of each input. `for_` is Swift's label ``for``."""
        inputs: dict[str, BNNSNDArrayDescriptor] = {}
        for name, array in self._own({name: given[name] for name in _INPUTS}).items():
            if array is None:
                raise BNNSError("layerApplyFail", f"{name} is not given")
            inputs[name] = array
        self._apply(given["batchSize"], inputs, given["output"], given["for_"])

    @takes(
        "batchSize input? inputA? inputB? inputC? output? outputGradient generatingInputGradient? "
        "generatingInputAGradient? generatingInputBGradient? generatingInputCGradient? generatingParameterGradients"
    )
    def applyBackward(self, given: Given) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        gradients = {name: given[f"generatingI{name[1:]}Gradient"] for name in _INPUTS}
        self._apply_backward(given, self._own({name: given[name] for name in _INPUTS}), self._own(gradients))
