"""The operations of MPSGraph: one row each. See _declare.py for how a row is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import graph as G
from ..graph import joins
from . import _functions as F
from . import _images as I
from . import _random as R
from . import _recurrent as N
from ._declare import group, row

name: str
function: Callable[..., Any]
gradient: Callable[..., Any]

# ---- arithmetic ------------------------------------------------------------------------------------------------------

group("arithmetic, one operand")
for name, function in {
    "identity": G.identity, "exponent": G.exp, "exponentBase2": G.exp2, "exponentBase10": G.exp10,
    "logarithm": G.log, "logarithmBase2": G.log2, "logarithmBase10": G.log10, "square": G.square,
    "squareRoot": G.sqrt, "reverseSquareRoot": G.rsqrt, "reciprocal": G.reciprocal, "absolute": G.absolute,
    "negative": G.negative, "sign": G.sign, "signbit": F.signbit, "ceil": G.ceil, "floor": G.floor,
    "round": G.round_away, "rint": G.round, "sin": G.sin, "cos": G.cos, "tan": G.tan, "sinh": G.sinh, "cosh": G.cosh,
    "tanh": G.tanh, "asin": G.arcsin, "acos": G.arccos, "atan": G.arctan, "asinh": G.arcsinh, "acosh": G.arccosh,
    "atanh": G.arctanh, "erf": G.erf, "not": F.logical_not, "isInfinite": G.isinf, "isFinite": G.isfinite,
    "isNaN": G.isnan,
}.items():  # fmt: skip
    row(f"{name}(with:name:)", f"{name}WithTensor:name:", "tensor", function)
for name, function in {
    "reciprocalSquareRoot": G.rsqrt, "truncate": G.trunc, "bitwiseNOT": G.bitwise_not,
    "bitwisePopulationCount": G.bitwise_count,
}.items():  # fmt: skip
    row(f"{name}(_:name:)", f"{name}WithTensor:name:", "tensor", function)
row("absoluteSquare(tensor:name:)", "absoluteSquareWithTensor:name:", "tensor", G.square)

group("arithmetic, two operands")
for name, function in {
    "addition": joins.add, "subtraction": G.subtract, "multiplication": G.multiply, "division": G.divide,
    "divisionNoNaN": G.divide_no_nan, "modulo": G.fmod, "floorModulo": G.mod, "power": G.power,
    "minimum": G.fmin, "maximum": G.fmax, "minimumWithNaNPropagation": G.minimum,
    "maximumWithNaNPropagation": G.maximum, "equal": G.equal, "notEqual": G.not_equal, "lessThan": G.less,
    "lessThanOrEqualTo": G.less_equal, "greaterThan": G.greater, "greaterThanOrEqualTo": G.greater_equal,
    "logicalAND": F.logical_and, "logicalOR": F.logical_or, "logicalNAND": F.logical_nand, "logicalNOR": F.logical_nor,
    "logicalXOR": F.logical_xor, "logicalXNOR": F.logical_xnor, "bitwiseAND": G.bitwise_and, "bitwiseOR": G.bitwise_or,
    "bitwiseXOR": G.bitwise_xor, "bitwiseLeftShift": G.left_shift, "bitwiseRightShift": G.right_shift,
}.items():  # fmt: skip
    selector = f"{name}WithPrimaryTensor:secondaryTensor:name:"
    row(f"{name}(_:_:name:)", selector, "primaryTensor secondaryTensor", function)
row(
    "atan2(withPrimaryTensor:secondaryTensor:name:)", "atan2WithPrimaryTensor:secondaryTensor:name:",
    "primaryTensor secondaryTensor", G.arctan2,
)  # fmt: skip

group("arithmetic, three operands")
row(
    "select(predicate:trueTensor:falseTensor:name:)",
    "selectWithPredicateTensor:truePredicateTensor:falsePredicateTensor:name:",
    "predicateTensor trueTensor falseTensor", F.select,
)  # fmt: skip
row(
    "clamp(_:min:max:name:)", "clampWithTensor:minValueTensor:maxValueTensor:name:",
    "tensor minValueTensor maxValueTensor", G.clip,
)  # fmt: skip

# ---- reductions ------------------------------------------------------------------------------------------------------

group("reductions")
for name, function in {
    "Sum": F.reduction(G.sum), "Product": F.reduction(G.prod), "Maximum": F.reduction(G.fmax_reduce),
    "Minimum": F.reduction(G.fmin_reduce), "MaximumPropagateNaN": F.reduction(G.max),
    "MinimumPropagateNaN": F.reduction(G.min), "And": F.reduction_and, "Or": F.reduction_or,
}.items():  # fmt: skip
    row(f"reduction{name}(with:axis:name:)", f"reduction{name}WithTensor:axis:name:", "tensor axis:axis", function)
    row(f"reduction{name}(with:axes:name:)", f"reduction{name}WithTensor:axes:name:", "tensor axes:axes?", function)
for name, function in {"ArgMaximum": F.arg_maximum, "ArgMinimum": F.arg_minimum}.items():
    row(f"reduction{name}(with:axis:name:)", f"reduction{name}WithTensor:axis:name:", "tensor axis:axis", function)
row("mean(of:axes:name:)", "meanOfTensor:axes:name:", "tensor axes:axes", F.mean)
row("variance(of:axes:name:)", "varianceOfTensor:axes:name:", "tensor axes:axes", F.variance)
row(
    "variance(of:mean:axes:name:)", "varianceOfTensor:meanTensor:axes:name:", "tensor mean axes:axes", F.variance_around
)
for name, function in {
    "Sum": F.cumulative(G.cumsum), "Product": F.cumulative(G.cumprod), "Maximum": F.cumulative(G.cummax),
    "Minimum": F.cumulative(G.cummin),
}.items():  # fmt: skip
    for label, kind in (("axis", "axis:axis"), ("axisTensor", "axis:axis~")):
        row(
            f"cumulative{name}(_:{label}:name:)",
            f"cumulative{name}WithTensor:{label}:name:",
            f"tensor {kind}",
            function,
        )
        row(
            f"cumulative{name}(_:{label}:exclusive:reverse:name:)",
            f"cumulative{name}WithTensor:{label}:exclusive:reverse:name:",
            f"tensor {kind} exclusive:bool reverse:bool", function,
        )  # fmt: skip
for name, function in {"sort": F.sort, "argSort": F.arg_sort}.items():
    for label, kind in (("axis", "axis:axis"), ("axisTensor", "axis:axis~")):
        row(f"{name}(_:{label}:name:)", f"{name}WithTensor:{label}:name:", f"tensor {kind}", function)
        row(
            f"{name}(_:{label}:descending:name:)", f"{name}WithTensor:{label}:descending:name:",
            f"tensor {kind} descending:bool", function,
        )  # fmt: skip
for name, function, gradient in (("topK", F.top_k, F.top_k_gradient), ("bottomK", F.bottom_k, F.bottom_k_gradient)):
    for labels, kinds in (("axis:k:", "axis:axis k:int"), ("axisTensor:kTensor:", "axis:axis~ k:int~")):
        row(f"{name}(_:{labels}name:)", f"{name}WithSourceTensor:{labels}name:", f"tensor {kinds}", function, count=2)
        row(
            f"{name}Gradient(_:source:{labels}name:)", f"{name}WithGradientTensor:source:{labels}name:",
            f"gradient source {kinds}", gradient,
        )  # fmt: skip
for label, kind in (("k", "k:int"), ("kTensor", "k:int~")):
    row(f"topK(_:{label}:name:)", f"topKWithSourceTensor:{label}:name:", f"tensor {kind}", F.top_k, count=2)
    row(
        f"topKGradient(_:input:{label}:name:)", f"topKWithGradientTensor:source:{label}:name:",
        f"gradient source {kind}", F.top_k_gradient,
    )  # fmt: skip

# ---- shapes ----------------------------------------------------------------------------------------------------------

group("shapes")
row("reshape(_:shape:name:)", "reshapeTensor:withShape:name:", "tensor shape:shape", G.reshape)
row("reshape(_:shapeTensor:name:)", "reshapeTensor:withShapeTensor:name:", "tensor shape:shape~", G.reshape)
row("transpose(_:permutation:name:)", "transposeTensor:permutation:name:", "tensor permutation:ints", F.transpose)
row(
    "transposeTensor(_:dimension:withDimension:name:)", "transposeTensor:dimension:withDimension:name:",
    "tensor dimension:axis withDimension:axis", F.swap,
)  # fmt: skip
row("squeeze(_:name:)", "squeezeTensor:name:", "tensor", F.squeeze)
row("squeeze(_:axis:name:)", "squeezeTensor:axis:name:", "tensor axis:axis", F.squeeze)
row("squeeze(_:axes:name:)", "squeezeTensor:axes:name:", "tensor axes:axes", F.squeeze)
row("squeeze(_:axesTensor:name:)", "squeezeTensor:axesTensor:name:", "tensor axes:axes~", F.squeeze)
row("expandDims(_:axis:name:)", "expandDimsOfTensor:axis:name:", "tensor axis:axis", F.expand_dims)
row("expandDims(_:axes:name:)", "expandDimsOfTensor:axes:name:", "tensor axes:axes", F.expand_dims)
row("expandDims(_:axesTensor:name:)", "expandDimsOfTensor:axesTensor:name:", "tensor axes:axes~", F.expand_dims)
row("broadcast(_:shape:name:)", "broadcastTensor:toShape:name:", "tensor shape:shape", F.broadcast)
row("broadcast(_:shapeTensor:name:)", "broadcastTensor:toShapeTensor:name:", "tensor shape:shape~", F.broadcast)
row("flatten2D(_:axis:name:)", "flatten2DTensor:axis:name:", "tensor axis:axis", F.flatten)
row("flatten2D(_:axisTensor:name:)", "flatten2DTensor:axisTensor:name:", "tensor axis:axis~", F.flatten)
row("reverse(_:name:)", "reverseTensor:name:", "tensor", F.reverse)
row("reverse(_:axes:name:)", "reverseTensor:axes:name:", "tensor axes:axes?", F.reverse)
row("reverse(_:axesTensor:name:)", "reverseTensor:axesTensor:name:", "tensor axes:axes~", F.reverse)
row("cast(_:to:name:)", "castTensor:toType:name:", "tensor type:dtype", F.cast)
row("shapeOf(_:name:)", "shapeOfTensor:name:", "tensor", F.shape_of)
for along, axis in (("alongAxis", "axis:axis"), ("alongAxisTensor", "axis:axis~")):
    for with_, shape in (("withShape", "shape:shape"), ("withShapeTensor", "shape:shape~")):
        selector = f"coordinate{along[0].upper()}{along[1:]}:{with_}:name:"
        row(f"coordinate({along}:{with_}:name:)", selector, f"{axis} {shape}", F.coordinate)
row("bandPart(_:numLower:numUpper:name:)", "bandPartWithTensor:numLower:numUpper:name:",
    "tensor numLower:int numUpper:int", F.band_part)  # fmt: skip
row("bandPart(_:numLowerTensor:numUpperTensor:name:)", "bandPartWithTensor:numLowerTensor:numUpperTensor:name:",
    "tensor numLower:int~ numUpper:int~", F.band_part)  # fmt: skip

group("joining and slicing")
row("concatTensor(_:with:dimension:name:)", "concatTensor:withTensor:dimension:name:", "tensor other dimension:axis",
    F.concatenate)  # fmt: skip
row(
    "concatTensors(_:dimension:name:)", "concatTensors:dimension:name:", "tensors:tensors dimension:axis", F.concatenate
)
row("concatTensors(_:dimension:interleave:name:)", "concatTensors:dimension:interleave:name:",
    "tensors:tensors dimension:axis interleave:bool", F.concatenate)  # fmt: skip
row("stack(_:axis:name:)", "stackTensors:axis:name:", "tensors:tensors axis:axis", F.stack)


def _sizes(options: dict[str, Any], operands: object) -> int:
    return len(options["splitSizes"])


row("split(_:splitSizes:axis:name:)", "splitTensor:splitSizes:axis:name:", "tensor splitSizes:ints axis:axis",
    F.split_sizes, count=_sizes)  # fmt: skip
row(
    "split(_:splitSizesTensor:axis:name:)",
    "splitTensor:splitSizesTensor:axis:name:",
    "tensor splitSizes:ints~ axis:axis",
    F.split_sizes,
    count=lambda options, operands: operands[-1].shape[0],
)
row("split(_:numSplits:axis:name:)", "splitTensor:numSplits:axis:name:", "tensor numSplits:int axis:axis",
    F.split_count, count=lambda options, operands: options["numSplits"])  # fmt: skip
row("tileTensor(_:withMultiplier:name:)", "tileTensor:withMultiplier:name:", "tensor multiplier:ints", F.tile)
row("tileGradient(withIncomingGradientTensor:sourceTensor:withMultiplier:name:)",
    "tileGradientWithIncomingGradientTensor:sourceTensor:withMultiplier:name:", "gradient source multiplier:ints",
    F.tile_gradient)  # fmt: skip
row("padTensor(_:with:leftPadding:rightPadding:constantValue:name:)",
    "padTensor:withPaddingMode:leftPadding:rightPadding:constantValue:name:",
    "tensor mode:padding leftPadding:ints rightPadding:ints constantValue:float", F.pad)  # fmt: skip
row("padGradient(withIncomingGradientTensor:sourceTensor:paddingMode:leftPadding:rightPadding:name:)",
    "padGradientWithIncomingGradientTensor:sourceTensor:paddingMode:leftPadding:rightPadding:name:",
    "gradient source mode:padding leftPadding:ints rightPadding:ints", F.pad_gradient)  # fmt: skip
row("sliceTensor(_:dimension:start:length:name:)", "sliceTensor:dimension:start:length:name:",
    "tensor dimension:axis start:int length:int", F.slice_length)  # fmt: skip
_MASKS, _MASKED = "startMask:endMask:squeezeMask:", "startMask:int endMask:int squeezeMask:int"
_LISTS, _LISTED = "starts:ends:strides:", "starts:ints ends:ints strides:ints"
_TENSORS = "starts:ints~ ends:ints~ strides:ints~"
row(f"sliceTensor(_:{_LISTS}name:)", f"sliceTensor:{_LISTS}name:", f"tensor {_LISTED}", F.strided_slice)
row(f"sliceTensor(_:{_LISTS}{_MASKS}name:)", f"sliceTensor:{_LISTS}{_MASKS}name:", f"tensor {_LISTED} {_MASKED}",
    F.strided_slice)  # fmt: skip
row(f"sliceTensor(_:start:end:strideTensor:{_MASKS}name:)",
    f"sliceTensor:startTensor:endTensor:strideTensor:{_MASKS}name:", f"tensor {_TENSORS} {_MASKED}",
    F.strided_slice)  # fmt: skip
row("sliceTensor(_:start:sizeTensor:squeezeMask:name:)", "sliceTensor:startTensor:sizeTensor:squeezeMask:name:",
    "tensor start:ints~ size:ints~ squeezeMask:int", F.slice_sizes)  # fmt: skip
_FORWARD = "fwdInShapeTensor:"
row(f"sliceGradientTensor(_:{_FORWARD}{_LISTS}name:)", f"sliceGradientTensor:{_FORWARD}{_LISTS}name:",
    f"gradient shape:shape~ {_LISTED}", F.slice_gradient)  # fmt: skip
row(f"sliceGradientTensor(_:{_FORWARD}{_LISTS}{_MASKS}name:)", f"sliceGradientTensor:{_FORWARD}{_LISTS}{_MASKS}name:",
    f"gradient shape:shape~ {_LISTED} {_MASKED}", F.slice_gradient)  # fmt: skip
row(f"sliceGradientTensor(_:{_FORWARD}start:end:strideTensor:{_MASKS}name:)",
    f"sliceGradientTensor:{_FORWARD}startTensor:endTensor:strideTensor:{_MASKS}name:",
    f"gradient shape:shape~ {_TENSORS} {_MASKED}", F.slice_gradient)  # fmt: skip
row(f"sliceGradientTensor(_:{_FORWARD}start:sizeTensor:squeezeMask:name:)",
    f"sliceGradientTensor:{_FORWARD}startTensor:sizeTensor:squeezeMask:name:",
    "gradient shape:shape~ start:ints~ size:ints~ squeezeMask:int", F.slice_sizes_gradient)  # fmt: skip
for masks, masked in (("", ""), (_MASKS, _MASKED)):
    row(
        f"sliceUpdateDataTensor(_:update:{_LISTS}{masks}name:)",
        f"sliceUpdateDataTensor:updateTensor:{_LISTS}{masks}name:",
        f"data update {_LISTED} {masked}",
        F.slice_update,
    )
    row(f"sliceUpdateDataTensor(_:update:startsTensor:endsTensor:stridesTensor:{masks}name:)",
        f"sliceUpdateDataTensor:updateTensor:startsTensor:endsTensor:stridesTensor:{masks}name:",
        f"data update {_TENSORS} {masked}", F.slice_update)  # fmt: skip

group("gathering and scattering")
row("gather(withUpdatesTensor:indicesTensor:axis:batchDimensions:name:)",
    "gatherWithUpdatesTensor:indicesTensor:axis:batchDimensions:name:", "updates indices axis:axis batchDimensions:int",
    F.gather)  # fmt: skip
row("gatherND(withUpdatesTensor:indicesTensor:batchDimensions:name:)",
    "gatherNDWithUpdatesTensor:indicesTensor:batchDimensions:name:", "updates indices batchDimensions:int",
    F.gather_nd)  # fmt: skip
row("scatter(_:indices:shape:axis:mode:name:)", "scatterWithUpdatesTensor:indicesTensor:shape:axis:mode:name:",
    "updates indices shape:shape axis:axis mode:scatter", F.scatter)  # fmt: skip
row("scatterWithData(_:updates:indices:axis:mode:name:)",
    "scatterWithDataTensor:updatesTensor:indicesTensor:axis:mode:name:", "data updates indices axis:axis mode:scatter",
    F.scatter_data)  # fmt: skip
row("scatterND(withUpdatesTensor:indicesTensor:shape:batchDimensions:name:)",
    "scatterNDWithUpdatesTensor:indicesTensor:shape:batchDimensions:name:",
    "updates indices shape:shape batchDimensions:int", F.scatter_nd)  # fmt: skip
row("scatterND(withUpdatesTensor:indicesTensor:shape:batchDimensions:mode:name:)",
    "scatterNDWithUpdatesTensor:indicesTensor:shape:batchDimensions:mode:name:",
    "updates indices shape:shape batchDimensions:int mode:scatter", F.scatter_nd)  # fmt: skip
row("scatterNDWithData(_:updates:indices:batchDimensions:mode:name:)",
    "scatterNDWithDataTensor:updatesTensor:indicesTensor:batchDimensions:mode:name:",
    "data updates indices batchDimensions:int mode:scatter", F.scatter_nd_data)  # fmt: skip
for name, axis in (("Axis", "axis:axis"), ("AxisTensor", "axis:axis~")):
    row(f"gatherAlong{name}(_:updates:indices:name:)", f"gatherAlong{name}:withUpdatesTensor:indicesTensor:name:",
        f"{axis} updates indices", F.gather_along)  # fmt: skip
    row(f"scatterAlong{name}(_:updates:indices:shape:mode:name:)",
        f"scatterAlong{name}:withUpdatesTensor:indicesTensor:shape:mode:name:",
        f"{axis} updates indices shape:shape mode:scatter", F.scatter_along)  # fmt: skip
    row(f"scatterAlong{name}(_:data:updates:indices:mode:name:)",
        f"scatterAlong{name}:withDataTensor:updatesTensor:indicesTensor:mode:name:",
        f"{axis} data updates indices mode:scatter", F.scatter_along_data)  # fmt: skip
for labels, kinds in {
    "": "", "axis:": "axis:axis", "dataType:": "dataType:dtype", "axis:dataType:": "axis:axis dataType:dtype",
    "dataType:onValue:offValue:": "dataType:dtype onValue:float offValue:float",
    "axis:dataType:onValue:offValue:": "axis:axis dataType:dtype onValue:float offValue:float",
}.items():  # fmt: skip
    row(f"oneHot(withIndicesTensor:depth:{labels}name:)", f"oneHotWithIndicesTensor:depth:{labels}name:",
        f"indices depth:int {kinds}", F.one_hot)  # fmt: skip

# ---- layers ----------------------------------------------------------------------------------------------------------

group("products and activations")
row("matrixMultiplication(primary:secondary:name:)", "matrixMultiplicationWithPrimaryTensor:secondaryTensor:name:",
    "primaryTensor secondaryTensor", G.matmul)  # fmt: skip
row("reLU(with:name:)", "reLUWithTensor:name:", "tensor", G.relu)
row("sigmoid(with:name:)", "sigmoidWithTensor:name:", "tensor", G.sigmoid)
row("softMax(with:axis:name:)", "softMaxWithTensor:axis:name:", "tensor axis:axis", G.softmax)
row("leakyReLU(with:alpha:name:)", "leakyReLUWithTensor:alpha:name:", "tensor alpha:float", F.leaky_relu)
row("leakyReLU(with:alphaTensor:name:)", "leakyReLUWithTensor:alphaTensor:name:", "tensor alphaTensor",
    F.leaky_relu_tensor)  # fmt: skip
_INCOMING, _SOURCE = "withIncomingGradient:sourceTensor:", "WithIncomingGradient:sourceTensor:"
row(f"reLUGradient({_INCOMING}name:)", f"reLUGradient{_SOURCE}name:", "gradient source", F.relu_gradient)
row(f"sigmoidGradient({_INCOMING}name:)", f"sigmoidGradient{_SOURCE}name:", "gradient source", F.sigmoid_gradient)
row(f"leakyReLUGradient({_INCOMING}alphaTensor:name:)", f"leakyReLUGradient{_SOURCE}alphaTensor:name:",
    "gradient source alphaTensor", F.leaky_relu_gradient)  # fmt: skip
row(f"softMaxGradient({_INCOMING}axis:name:)", f"softMaxGradient{_SOURCE}axis:name:", "gradient source axis:axis",
    F.softmax_gradient)  # fmt: skip
row("dropout(_:rate:name:)", "dropoutTensor:rate:name:", "tensor rate:rate", R.dropout)
row("dropout(_:rate:name:)", "dropoutTensor:rateTensor:name:", "tensor rate:float~", R.dropout, selector_only=True)

group("loss and optimizers")
row("softMaxCrossEntropy(_:labels:axis:reuctionType:name:)",
    "softMaxCrossEntropyWithSourceTensor:labelsTensor:axis:reductionType:name:",
    "source labels axis:axis reduction:loss", F.cross_entropy)  # fmt: skip
row("softMaxCrossEntropyGradient(_:source:labels:axis:reuctionType:name:)",
    "softMaxCrossEntropyGradientWithIncomingGradientTensor:sourceTensor:labelsTensor:axis:reductionType:name:",
    "gradient source labels axis:axis reduction:loss", F.cross_entropy_gradient)  # fmt: skip
row("stochasticGradientDescent(learningRate:values:gradient:name:)",
    "stochasticGradientDescentWithLearningRateTensor:valuesTensor:gradientTensor:name:", "learningRate values gradient",
    F.gradient_descent)  # fmt: skip


def _adam_count(options: object, operands: list[Any]) -> int:
    return 3 if operands[-2] is None else 4


row("adam(learningRate:beta1:beta2:epsilon:beta1Power:beta2Power:values:momentum:velocity:maximumVelocity:gradient:name:)",
    "adamWithLearningRateTensor:beta1Tensor:beta2Tensor:epsilonTensor:beta1PowerTensor:beta2PowerTensor:valuesTensor:"
    "momentumTensor:velocityTensor:maximumVelocityTensor:gradientTensor:name:",
    "learningRate beta1 beta2 epsilon beta1Power beta2Power values momentum velocity maximumVelocity?=None gradient",
    F.adam, count=_adam_count)  # fmt: skip
row("adam(currentLearningRate:beta1:beta2:epsilon:values:momentum:velocity:maximumVelocity:gradient:name:)",
    "adamWithCurrentLearningRateTensor:beta1Tensor:beta2Tensor:epsilonTensor:valuesTensor:momentumTensor:"
    "velocityTensor:maximumVelocityTensor:gradientTensor:name:",
    "currentLearningRate beta1 beta2 epsilon values momentum velocity maximumVelocity?=None gradient",
    F.adam_current, count=_adam_count)  # fmt: skip

group("normalization")
row("normalize(_:mean:variance:gamma:beta:epsilon:name:)",
    "normalizationWithTensor:meanTensor:varianceTensor:gammaTensor:betaTensor:epsilon:name:",
    "tensor mean variance gamma?=None beta?=None epsilon:float", F.normalize)  # fmt: skip
row("normalizationBetaGradient(withIncomingGradientTensor:sourceTensor:reductionAxes:name:)",
    "normalizationBetaGradientWithIncomingGradientTensor:sourceTensor:reductionAxes:name:",
    "gradient source reductionAxes:axes", F.normalization_beta_gradient)  # fmt: skip
row("normalizationGammaGradient(withIncomingGradientTensor:sourceTensor:mean:varianceTensor:reductionAxes:epsilon:name:)",
    "normalizationGammaGradientWithIncomingGradientTensor:sourceTensor:meanTensor:varianceTensor:reductionAxes:epsilon:"
    "name:", "gradient source mean variance reductionAxes:axes epsilon:float",
    F.normalization_gamma_gradient)  # fmt: skip
row("normalizationGradient(withIncomingGradientTensor:sourceTensor:mean:varianceTensor:gammaTensor:gammaGradientTensor:"
    "betaGradientTensor:reductionAxes:epsilon:name:)",
    "normalizationGradientWithIncomingGradientTensor:sourceTensor:meanTensor:varianceTensor:gammaTensor:"
    "gammaGradientTensor:betaGradientTensor:reductionAxes:epsilon:name:",
    "gradient source mean variance gamma? gammaGradient? betaGradient? reductionAxes:axes epsilon:float",
    F.normalization_gradient)  # fmt: skip

group("convolution")
row("convolution2D(_:weights:descriptor:name:)", "convolution2DWithSourceTensor:weightsTensor:descriptor:name:",
    "source weights descriptor:conv", I.convolution)  # fmt: skip
for shape, kind in (("outputShape", "outputShape:shape"), ("outputShapeTensor", "outputShape:shape~")):
    of_data = f"WithIncomingGradientTensor:weightsTensor:{shape}:forwardConvolutionDescriptor:name:"
    of_weights = f"WithIncomingGradientTensor:sourceTensor:{shape}:forwardConvolutionDescriptor:name:"
    row(f"convolution2DDataGradient(_:weights:{shape}:forwardConvolutionDescriptor:name:)",
        f"convolution2DDataGradient{of_data}", f"gradient weights {kind} descriptor:conv",
        I.convolution_data_gradient)  # fmt: skip
    row(f"convolution2DWeightsGradient(_:source:{shape}:forwardConvolutionDescriptor:name:)",
        f"convolution2DWeightsGradient{of_weights}", f"gradient source {kind} descriptor:conv",
        I.convolution_weights_gradient)  # fmt: skip
    row(f"convolutionTranspose2D(_:weights:{shape}:descriptor:name:)",
        f"convolutionTranspose2DWithSourceTensor:weightsTensor:{shape}:descriptor:name:",
        f"source weights {kind} descriptor:conv", I.transposed_convolution)  # fmt: skip
    row(f"convolutionTranspose2DDataGradient(_:weights:{shape}:forwardConvolutionDescriptor:name:)",
        f"convolutionTranspose2DDataGradient{of_data}", f"gradient weights {kind} descriptor:conv",
        I.transposed_data_gradient)  # fmt: skip
    row(f"convolutionTranspose2DWeightsGradient(_:weights:{shape}:forwardConvolutionDescriptor:name:)",
        f"convolutionTranspose2DWeightsGradient{of_weights}", f"gradient source {kind} descriptor:conv",
        I.transposed_weights_gradient)  # fmt: skip
row("depthwiseConvolution2D(_:weights:descriptor:name:)",
    "depthwiseConvolution2DWithSourceTensor:weightsTensor:descriptor:name:", "source weights descriptor:depthwise",
    I.depthwise)  # fmt: skip
row("depthwiseConvolution2DDataGradient(_:weights:outputShape:descriptor:name:)",
    "depthwiseConvolution2DDataGradientWithIncomingGradientTensor:weightsTensor:outputShape:descriptor:name:",
    "gradient weights outputShape:shape descriptor:depthwise", I.depthwise_data_gradient)  # fmt: skip
row("depthwiseConvolution2DWeightsGradient(_:source:outputShape:descriptor:name:)",
    "depthwiseConvolution2DWeightsGradientWithIncomingGradientTensor:sourceTensor:outputShape:descriptor:name:",
    "gradient source outputShape:shape descriptor:depthwise", I.depthwise_weights_gradient)  # fmt: skip

group("pooling")
_POOLS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("max", I.max_pool, I.max_pool_gradient), ("avg", I.average_pool, I.average_pool_gradient),
)  # fmt: skip
for name, function, gradient in _POOLS:
    row(f"{name}Pooling2D(withSourceTensor:descriptor:name:)", f"{name}Pooling2DWithSourceTensor:descriptor:name:",
        "source descriptor:pool", function)  # fmt: skip
    row(f"{name}Pooling2DGradient(withGradientTensor:sourceTensor:descriptor:name:)",
        f"{name}Pooling2DGradientWithGradientTensor:sourceTensor:descriptor:name:", "gradient source descriptor:pool",
        gradient)  # fmt: skip
for name, function, gradient in (*_POOLS, ("L2Norm", I.l2_pool, I.l2_pool_gradient)):
    row(f"{name}Pooling4D(_:descriptor:name:)", f"{name}Pooling4DWithSourceTensor:descriptor:name:",
        "source descriptor:pool4", function)  # fmt: skip
    row(f"{name}Pooling4DGradient(_:source:descriptor:name:)",
        f"{name}Pooling4DGradientWithGradientTensor:sourceTensor:descriptor:name:", "gradient source descriptor:pool4",
        gradient)  # fmt: skip
for rank, pool in (("2D", "pool"), ("4D", "pool4")):
    row(f"maxPooling{rank}ReturnIndices(_:descriptor:name:)",
        f"maxPooling{rank}ReturnIndicesWithSourceTensor:descriptor:name:", f"source descriptor:{pool}",
        I.max_pool_indices, count=2)  # fmt: skip
    for shape, kind in (("outputShape", "outputShape:shape"), ("outputShapeTensor", "outputShape:shape~")):
        row(f"maxPooling{rank}Gradient(withGradientTensor:indicesTensor:{shape}:descriptor:name:)",
            f"maxPooling{rank}GradientWithGradientTensor:indicesTensor:{shape}:descriptor:name:",
            f"gradient indices {kind} descriptor:{pool}", I.max_pool_indices_gradient)  # fmt: skip

group("random numbers")
row("randomPhiloxStateTensor(withSeed:name:)", "randomPhiloxStateTensorWithSeed:name:", "seed:int", R.philox_state)
row("randomPhiloxStateTensor(withCounterLow:counterHigh:key:name:)",
    "randomPhiloxStateTensorWithCounterLow:counterHigh:key:name:", "counterLow:int counterHigh:int key:int",
    R.philox_state_of)  # fmt: skip
for shape, kind in (("withShape", "shape:shape"), ("withShapeTensor", "shape:shape~")):
    selector = shape[0].upper() + shape[1:]
    for name, label, descriptor in (("random", "descriptor:", "descriptor:random"), ("randomUniform", "", "")):
        row(f"{name}Tensor({shape}:{label}name:)", f"{name}Tensor{selector}:{label}name:", f"{kind} {descriptor}",
            R.random)  # fmt: skip
        row(f"{name}Tensor({shape}:{label}seed:name:)", f"{name}Tensor{selector}:{label}seed:name:",
            f"{kind} {descriptor} seed:int", R.random_seed)  # fmt: skip
        row(f"{name}Tensor({shape}:{label}stateTensor:name:)", f"{name}Tensor{selector}:{label}stateTensor:name:",
            f"{kind} {descriptor} stateTensor", R.random_state, count=2)  # fmt: skip

# ---- recurrent layers ------------------------------------------------------------------------------------------------

group("recurrent layers")
_LABELS = {  # of the operands: Swift's and the selector's
    "R": "recurrentWeight", "W": "inputWeight", "b": "bias", "h0": "initState", "c0": "initCell", "mask": "mask",
    "p": "peephole", "b2": "secondaryBias", "dy": "sourceGradient", "z": "zState", "c": "cellOutputFwd",
    "y": "outputFwd", "dh": "stateGradient", "dc": "cellGradient",
}  # fmt: skip
_NULLABLE = {"W", "b", "h0", "c0", "mask", "p", "b2", "dh", "dc"}
for name, kind, forward, backward, whole, whole_gradient, forms in (
    ("singleGateRNN", "rnn", N.single_gate_rnn, N.single_gate_rnn_gradients,
     "x R W b h0 mask", "x R dy z dh W b h0 mask",
     ("R h0", "R W b h0", "R W b h0 mask",
      "R dy z h0", "R dy z W b h0", "R dy z W b h0 mask", "R dy z dh W b h0 mask")),
    ("LSTM", "lstm", N.lstm, N.lstm_gradients,
     "x R W b h0 c0 mask p", "x R dy z c dh dc W b h0 c0 mask p",
     ("R h0 c0", "R W b h0 c0", "R W b h0 c0 mask p",
      "R dy z c", "R dy z c W b h0 c0", "R dy z c W b h0 c0 mask", "R dy z c dh dc W b h0 c0 mask p")),
    ("GRU", "gru", N.gru, N.gru_gradients,
     "x R W b h0 mask b2", "x R dy z y dh W b h0 mask b2",
     ("R W b", "R W b h0", "R W b h0 mask b2",
      "R dy z y W b", "R dy z y W b h0", "R dy z y dh W b h0 mask b2")),
):  # fmt: skip
    for form in forms:
        short = form.split()
        is_gradient = "dy" in short
        labels = "".join(f"{_LABELS[one]}:" for one in short)
        method = f"{name}Gradients" if is_gradient else name
        given = " ".join(f"{_LABELS[one]}{'?' if one in _NULLABLE else ''}" for one in short)
        call = N.placed(backward, f"x {form}", whole_gradient) if is_gradient else N.placed(forward, f"x {form}", whole)
        row(f"{method}(_:{labels}descriptor:name:)", f"{method}WithSourceTensor:{labels}descriptor:name:",
            f"source {given} descriptor:{kind}", call,
            count=N.gradient_count(f"x {form}") if is_gradient else N.layer_count)  # fmt: skip

# ---- methods that are not operations on tensors ----------------------------------------------------------------------

# Swift's signature and the selector, of MPSGraph and of MPSGraphExecutable.
METHODS: dict[str, dict[str, str]] = {
    "MPSGraph": {
        "placeholder(shape:dataType:name:)": "placeholderWithShape:dataType:name:",
        "placeholder(shape:name:)": "placeholderWithShape:name:",
        "constant(_:dataType:)": "constantWithScalar:dataType:",
        "constant(_:shape:dataType:)": "constantWithScalar:shape:dataType: constantWithData:shape:dataType:",
        "variable(with:shape:dataType:name:)": "variableWithData:shape:dataType:name:",
        "variableFromTensor(_:name:)": "variableFromTensorWithTensor:name:",
        "read(_:name:)": "readVariable:name:",
        "assign(_:tensor:name:)": "assignVariable:withValueOfTensor:name:",
        "applyStochasticGradientDescent(learningRate:variable:gradient:name:)":
            "applyStochasticGradientDescentWithLearningRateTensor:variable:gradientTensor:name:",
        "gradients(of:with:name:)": "gradientForPrimaryTensor:withTensors:name:",
        "controlDependency(with:dependentBlock:name:)": "controlDependencyWithOperations:dependentBlock:name:",
        "if(_:then:else:name:)": "ifWithPredicateTensor:thenBlock:elseBlock:name:",
        "while(initialInputs:before:after:name:)": "whileWithInitialInputs:before:after:name:",
        "for(lowerBound:upperBound:step:initialBodyArguments:body:name:)":
            "forLoopWithLowerBound:upperBound:step:initialBodyArguments:body:name:",
        "for(numberOfIterations:initialBodyArguments:body:name:)":
            "forLoopWithNumberOfIterations:initialBodyArguments:body:name:",
        "run(feeds:targetTensors:targetOperations:)": "runWithFeeds:targetTensors:targetOperations:",
        "run(with:feeds:targetTensors:targetOperations:)":
            "runWithMTLCommandQueue:feeds:targetTensors:targetOperations:",
        "run(with:feeds:targetOperations:resultsDictionary:)":
            "runWithMTLCommandQueue:feeds:targetOperations:resultsDictionary:",
        "runAsync(feeds:targetTensors:targetOperations:executionDescriptor:)":
            "runAsyncWithFeeds:targetTensors:targetOperations:executionDescriptor:",
        "runAsync(with:feeds:targetTensors:targetOperations:executionDescriptor:)":
            "runAsyncWithMTLCommandQueue:feeds:targetTensors:targetOperations:executionDescriptor:",
        "runAsync(with:feeds:targetOperations:resultsDictionary:executionDescriptor:)":
            "runAsyncWithMTLCommandQueue:feeds:targetOperations:resultsDictionary:executionDescriptor:",
        "encode(to:feeds:targetTensors:targetOperations:executionDescriptor:)":
            "encodeToCommandBuffer:feeds:targetTensors:targetOperations:executionDescriptor:",
        "encode(to:feeds:targetOperations:resultsDictionary:executionDescriptor:)":
            "encodeToCommandBuffer:feeds:targetOperations:resultsDictionary:executionDescriptor:",
        "compile(with:feeds:targetTensors:targetOperations:compilationDescriptor:)":
            "compileWithDevice:feeds:targetTensors:targetOperations:compilationDescriptor:",
    },
    "MPSGraphExecutable": {
        "run(with:inputs:results:executionDescriptor:)":
            "runWithMTLCommandQueue:inputsArray:resultsArray:executionDescriptor:",
        "runAsync(with:inputs:results:executionDescriptor:)":
            "runAsyncWithMTLCommandQueue:inputsArray:resultsArray:executionDescriptor:",
        "encode(to:inputs:results:executionDescriptor:)":
            "encodeToCommandBuffer:inputsArray:resultsArray:executionDescriptor:",
        "specialize(with:inputTypes:compilationDescriptor:)": "specializeWithDevice:inputTypes:compilationDescriptor:",
        "getOutputTypes(with:inputTypes:compilationDescriptor:)":
            "getOutputTypesWithDevice:inputTypes:compilationDescriptor:",
        "serialize(package:descriptor:)": "serializeToMPSGraphPackageAtURL:descriptor:",
    },
}  # fmt: skip
