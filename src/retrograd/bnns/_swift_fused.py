"""Swift's fused layers: two layers, applied as one, and their parameters, which may be changed before it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

from .. import bnns as c
from . import _swift as swift
from ._filter import FLOATS
from ._memory import Geometry
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure
from ._swift import BNNSError, Given, Layer
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
    structure: ClassVar[type[Structure]]  # of the C function
    constants: ClassVar[tuple[str, ...]] = ()  # attributes of the class that are fields of the structure

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            swift.public(cls)

    @property
    def filter_type(self) -> int:
        """The number of the C function's filter."""
        raise NotImplementedError

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        """The structure of the C function."""
        (input,) = inputs
        optional = ("beta", "gamma", "bias", "scale", "axis")
        fields = {name: getattr(self, name) for name in self.constants}
        return swift.filled(self.structure, {**vars(self), "input": input, "output": output}, optional, fields)

    def input_type(self, first: int, output: int) -> int:
        """The data type of the input of a second layer, given those of the first layer's input and of the output."""
        return output


@dataclasses.dataclass(kw_only=True)
class FusedConvolutionParameters(FusableLayerParameters):
    """A convolution, or a transposed one. `groupSize` is the number of groups."""

    structure = c.BNNSLayerParametersConvolution

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


@dataclasses.dataclass(kw_only=True)
class FusedFullyConnectedParameters(FusableLayerParameters):
    """A fully connected layer."""

    filter_type = c.BNNSFullyConnected
    structure = c.BNNSLayerParametersFullyConnected

    weights: BNNSNDArrayDescriptor
    bias: BNNSNDArrayDescriptor | None


@dataclasses.dataclass(kw_only=True)
class FusedNormalizationParameters(FusableLayerParameters):
    """A normalization."""

    structure = c.BNNSLayerParametersNormalization

    type: NormalizationType
    beta: BNNSNDArrayDescriptor | None = None
    gamma: BNNSNDArrayDescriptor | None = None
    momentum: float = 0.0
    epsilon: float
    activation: ActivationFunction

    @property
    def filter_type(self) -> int:
        return self.type.norm_type


@dataclasses.dataclass(kw_only=True)
class FusedQuantizationParameters(FusableLayerParameters):
    """A quantization. `axis` is that of scale and bias; None, as it is at first: they have one element."""

    filter_type = c.BNNSQuantization
    structure = c.BNNSLayerParametersQuantization
    constants: ClassVar[tuple[str, ...]] = ("function",)
    function: ClassVar[int] = c.BNNSQuantizerFunctionQuantize

    scale: BNNSNDArrayDescriptor | None
    bias: BNNSNDArrayDescriptor | None
    axis: int | None = dataclasses.field(default=None, init=False)

    def input_type(self, first: int, output: int) -> int:
        # A layer with an input of integers has a floating-point output.
        return first if first in FLOATS else c.BNNSDataTypeFloat32


@dataclasses.dataclass(kw_only=True)
class FusedDequantizationParameters(FusedQuantizationParameters):
    """A dequantization of a layer whose input and output are integers."""

    function: ClassVar[int] = c.BNNSQuantizerFunctionDequantize

    def input_type(self, first: int, output: int) -> int:
        return first


class _ArithmeticParameters(FusableLayerParameters):
    filter_type = c.BNNSArithmetic
    outputDescriptorType: DescriptorType
    function: int

    def layer(self, inputs: Sequence[BNNSNDArrayDescriptor], output: BNNSNDArrayDescriptor) -> Structure:
        types = [value for label, value in vars(self).items() if label.startswith("input")]
        fields = operands(inputs, types, output, self.outputDescriptorType)
        return c.BNNSLayerParametersArithmetic(self.function, fields)


@dataclasses.dataclass(kw_only=True)
class FusedUnaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of one input."""

    inputDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: int


@dataclasses.dataclass(kw_only=True)
class FusedBinaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of two inputs."""

    inputs: ClassVar[int] = 2

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: int


@dataclasses.dataclass(kw_only=True)
class FusedTernaryArithmeticParameters(_ArithmeticParameters):
    """An elementwise function of three inputs."""

    inputs: ClassVar[int] = 3

    inputADescriptorType: DescriptorType
    inputBDescriptorType: DescriptorType
    inputCDescriptorType: DescriptorType
    outputDescriptorType: DescriptorType
    function: ArithmeticTernaryFunction


_Functions: TypeAlias = tuple[Callable[..., int], Callable[..., int]]  # for one input and for many
_INPUTS: Final = ("input", "inputA", "inputB", "inputC")
_FORWARD: Final = (c.BNNSFusedFilterApplyBatch, c.BNNSFusedFilterApplyMultiInputBatch)
_BACKWARD: Final = (c.BNNSFusedFilterApplyBackwardBatch, c.BNNSFusedFilterApplyBackwardMultiInputBatch)


def _gradient(input: str) -> str:
    """The label of an input's gradient."""
    return f"generatingI{input[1:]}Gradient"


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
        create = c.BNNSFilterCreateFusedLayer
        self._filter = swift.made(create, 2, types, layers, filterParameters, momentum_weighs=momentumWeighs)

    def _made(self, label: str) -> Geometry | None:
        if label == "output" or not getattr(self._filter, "many", False):
            return super()._made(label)
        made: Geometry = self._filter.first.operands[self._names.index(label)].geometry
        return made

    def _check_like(self, arrays: Mapping[str, BNNSNDArrayDescriptor | None]) -> None:
        """Compare inputs and output with what the layer was made for."""
        for name, array in arrays.items():
            if array is not None and array.data is not None:
                swift.check_like(name, array, self._made(name))

    def _own(self, given: Given, label: Callable[[str], str] = str) -> Given:
        """The arrays of this layer's inputs, or their gradients, which have another `label`."""
        for name in _INPUTS:
            if given.get(label(name)) is not None and name not in self._names:
                inputs = " and ".join(self._names)
                raise BNNSError("layerApplyFail", f"{name}, or its gradient, is given, but the layer has {inputs}")
        return {name: given[label(name)] for name in self._names}

    def _call(self, functions: _Functions, batch: int, lists: Sequence[Sequence[object]], *rest: object) -> None:
        """Call the C function for one input or for many. `lists` have an entry for each input."""
        for_one, for_many = functions
        if getattr(self._filter, "many", False):
            swift.checked_call(for_many, self._filter, batch, len(self._names), *lists, *rest)
        else:
            swift.checked_call(for_one, self._filter, batch, *(entries[0] for entries in lists), *rest)

    def _apply(self, given: Given) -> None:
        inputs, output = self._own(given), given["output"]
        for name, array in inputs.items():
            if array is None:
                raise BNNSError("layerApplyFail", f"{name} is not given")
        training = swift.learning_phase(given["for_"])
        swift.check_data(**inputs, output=output)
        self._check_like({**inputs, "output": output})
        lists = [array.data for array in inputs.values()], [swift.stride_of(array) for array in inputs.values()]
        self._call(_FORWARD, given["batchSize"], lists, output.data, swift.stride_of(output), training)

    def _apply_backward(self, given: Given) -> None:
        inputs, gradients = self._own(given), self._own(given, _gradient)
        output, dy, parameters = given["output"], given["outputGradient"], given["generatingParameterGradients"]
        swift.check_data(outputGradient=dy, **{_gradient(name): array for name, array in gradients.items()})
        swift.check_data(**{f"generatingParameterGradients[{k}]": array for k, array in enumerate(parameters)})
        self._check_like({**inputs, "output": output})
        data = [swift.data_of(array) for array in inputs.values()]
        strides, steps = ([swift.stride_of(array) for array in some.values()] for some in (inputs, gradients))
        rest = (swift.data_of(output), swift.stride_of(output), dy, swift.stride_of(dy), parameters)
        self._call(_BACKWARD, given["batchSize"], (data, strides, list(gradients.values()), steps), *rest)

    @swift.takes("batchSize input output for_")
    def apply(self, given: Given) -> None:
        """Apply the layer to a packed batch. `for_` is Swift's label ``for``."""
        self._apply(given)

    @swift.takes("batchSize input? output? outputGradient generatingInputGradient? generatingParameterGradients")
    def applyBackward(self, given: Given) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        self._apply_backward(given)


_NORMALIZATION: Final = (
    "normalization normalizationBeta|None normalizationGamma|None normalizationMomentum normalizationEpsilon "
    "normalizationActivation filterParameters? momentumWeighs='old'"
)


def _options(start: str, given: Given) -> Given:
    """The arguments whose labels start so, by the rest of their labels."""
    found = {label.removeprefix(start): value for label, value in given.items() if label.startswith(start)}
    return {f"{label[0].lower()}{label[1:]}": value for label, value in found.items() if label}


def _normalized(layer: FusedLayer, first: FusableLayerParameters, given: Given) -> None:
    """Create a layer that is followed by a normalization."""
    second = FusedNormalizationParameters(type=given["normalization"], **_options("normalization", given))
    parameters, weighs = given["filterParameters"], given["momentumWeighs"]
    FusedLayer.__init__(layer, {"input": given["input"]}, given["output"], [first, second], parameters, weighs)


class FusedConvolutionNormalizationLayer(FusedLayer):
    """A convolution and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    @swift.takes(
        "input output convolutionWeights convolutionBias|None convolutionStride convolutionDilationStride "
        f"convolutionPadding {_NORMALIZATION}"
    )
    def __init__(self, given: Given) -> None:
        options = _options("convolution", given)
        _normalized(self, FusedConvolutionParameters(type=ConvolutionType.standard, groupSize=1, **options), given)


class FusedFullyConnectedNormalizationLayer(FusedLayer):
    """A fully connected layer and a normalization. The parameter gradients are those of weights, bias, beta and gamma.

    `momentumWeighs`, which Swift does not have, is that of the normalization layer.
    """

    @swift.takes(f"input output fullyConnectedWeights fullyConnectedBias|None {_NORMALIZATION}")
    def __init__(self, given: Given) -> None:
        _normalized(self, FusedFullyConnectedParameters(**_options("fullyConnected", given)), given)


class FusedParametersLayer(FusedLayer):
    """Two layers, given by their parameters. The first has one input, or two or three if it is arithmetic.

    An arithmetic layer is followed by a normalization, whose beta and gamma have the parameter gradients; other layers
    are followed by a normalization or a quantization. `momentumWeighs`, which Swift does not have, is that of the
    normalization layer.
    """

    @swift.takes(
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

    @swift.takes("batchSize input? inputA? inputB? inputC? output for_")
    def apply(self, given: Given) -> None:
        """Apply the layer to a packed batch of each input. `for_` is Swift's label ``for``."""
        self._apply(given)

    @swift.takes(
        "batchSize input? inputA? inputB? inputC? output? outputGradient generatingInputGradient? "
        "generatingInputAGradient? generatingInputBGradient? generatingInputCGradient? generatingParameterGradients"
    )
    def applyBackward(self, given: Given) -> None:
        """Compute the gradients of the last training pass, those of the parameters in the order of the C function."""
        self._apply_backward(given)
