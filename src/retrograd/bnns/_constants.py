"""Apple's BNNS constants: Apple's names and values.

An enumeration lists its names in the order of their values. Type checkers read ``_constants.pyi``, in which
``retrograd.lab.declared`` writes every name and value.
"""


def _enumeration(prefix: str, names: str, first: int = 0) -> None:
    """Number names from `first` on; those that a slash separates have the same number."""
    for value, aliases in enumerate(names.split(), first):
        globals().update((f"{prefix}{name}", value) for name in aliases.split("/"))


BNNS_MAX_TENSOR_DIMENSION = 8
SIZE_MAX = 2**64 - 1  # what size queries return on failure

# BNNSDataType: a class bit and the width in bits. The bare class bits are not types.
BNNSDataTypeFloatBit = 0x10000
BNNSDataTypeIntBit = 0x20000
BNNSDataTypeUIntBit = 0x40000
BNNSDataTypeIndexedBit = 0x80000
BNNSDataTypeMiscellaneousBit = 0x100000
_WIDTHS = {"Float": "16 32", "Int": "1 2 4 8 16 32 64", "UInt": "1 2 3 4 6 8 16 32 64", "Indexed": "1 2 4 8"}
for _kind, _widths in _WIDTHS.items():
    for _width in _widths.split():
        globals()[f"BNNSDataType{_kind}{_width}"] = globals()[f"BNNSDataType{_kind}Bit"] | int(_width)
BNNSDataTypeBFloat16 = 0x18010
BNNSDataTypeBoolean = 0x100008

# BNNSDataLayout: the rank is the value >> 16; bit 15 marks the generic layouts.
BNNSDataLayoutVector = 0x10000
BNNSDataLayoutRowMajorMatrix = 0x20000
BNNSDataLayoutColumnMajorMatrix = 0x20001
BNNSDataLayoutFullyConnectedSparse = 0x21001
BNNSDataLayoutImageCHW = 0x30000
BNNSDataLayoutSNE = 0x30001
BNNSDataLayoutNSE = 0x30002
BNNSDataLayoutMHA_DHK = 0x30003
BNNSDataLayoutConvolutionWeightsOIHW = 0x40000
BNNSDataLayoutConvolutionWeightsOIHrWr = 0x40001
BNNSDataLayoutConvolutionWeightsIOHrWr = 0x40002
BNNSDataLayoutConvolutionWeightsOIHW_Pack32 = 0x40010
for _rank in range(1, BNNS_MAX_TENSOR_DIMENSION + 1):
    _enumeration(f"BNNSDataLayout{_rank}D", "LastMajor FirstMajor", first=_rank << 16 | 0x8000)

# BNNSNDArrayFlags: whether a call overwrites a gradient or adds to it.
BNNSNDArrayFlagBackpropSet = 0
BNNSNDArrayFlagBackpropAccumulate = 1

_enumeration(
    "BNNSActivationFunction",
    "Identity RectifiedLinear LeakyRectifiedLinear Sigmoid Tanh ScaledTanh Abs Linear Clamp IntegerLinearSaturate "
    "IntegerLinearSaturatePerChannel Softmax GELUApproximation Gumbel GumbelMax HardSigmoid Softplus Softsign ELU "
    "ClampedLeakyRectifiedLinear LinearWithBias LogSoftmax LogSigmoid SELU CELU HardShrink SoftShrink TanhShrink "
    "Threshold PReLUPerChannel GELUApproximation2/HardSwish SiLU ReLU6 Erf GELU GELUApproximationSigmoid",
)

# BNNSFilterType
_enumeration(
    "BNNS",
    "Convolution FullyConnected BatchNorm InstanceNorm LayerNorm GroupNorm TransposedConvolution Quantization "
    "Arithmetic",
)

# BNNSPoolingFunction
_enumeration("BNNSPoolingFunction", "Max AverageCountIncludePadding/Average AverageCountExcludePadding UnMax L2Norm")

BNNSQuantizerFunctionQuantize = 0
BNNSQuantizerFunctionDequantize = 1

# BNNSFlags, of a filter
BNNSFlagsUseClientPtr = 0x0001

# BNNSLayerFlags, of an LSTM
BNNSLayerFlagsLSTMBidirectional = 0x0001
BNNSLayerFlagsLSTMDefaultActivations = 0x0002

# BNNSPointerSpecifier
BNNSPointerSpecifierAlpha = 0
BNNSPointerSpecifierBeta = 1

# BNNSRandomGeneratorMethod
BNNSRandomGeneratorMethodAES_CTR = 0

# BNNSNormType
BNNSL2Norm = 1

_enumeration(
    "BNNSOptimizerFunction",
    "SGDMomentum Adam RMSProp AdamW AdamAMSGrad AdamWAMSGrad SGDMomentumWithClipping AdamWithClipping "
    "RMSPropWithClipping AdamWWithClipping AdamAMSGradWithClipping AdamWAMSGradWithClipping",
    first=1,
)

# BNNSOptimizerRegularizationFunction
_enumeration("BNNSOptimizerRegularization", "None L1 L2")

# BNNSOptimizerSGDMomentumVariant
_enumeration("BNNSSGDMomentumVariant", "0 1 2")

# BNNSOptimizerClippingFunction
_enumeration("BNNSOptimizerClipping", "None ByValue ByNorm ByGlobalNorm")

# BNNSArithmeticFunction
_enumeration(
    "BNNSArithmetic",
    "Add Subtract Multiply Divide SquareRoot ReciprocalSquareRoot Ceil Floor Round Sin Cos Tan Asin Acos Atan Sinh "
    "Cosh Tanh Asinh Acosh Atanh Pow Exp Exp2 Log Log2 MultiplyNoNaN DivideNoNaN MultiplyAdd Minimum Maximum Select "
    "Abs Sign Negate Reciprocal Square FloorDivide TruncDivide TruncRemainder Erf",
)

# BNNSDescriptorType, of an operand of an arithmetic filter
_enumeration("BNNS", "Constant Sample Parameter")

# BNNSPaddingMode
_enumeration("BNNSPaddingMode", "Constant Reflect Symmetric")

# BNNSShuffleType
_enumeration("BNNSShuffleType", "PixelShuffleNCHW PixelUnshuffleNCHW DepthToSpaceNCHW SpaceToDepthNCHW")

# BNNSRelationalOperator
_enumeration(
    "BNNSRelationalOperator",
    "Equal Less LessEqual Greater GreaterEqual NotEqual LogicalAND LogicalOR LogicalNOT LogicalNAND LogicalNOR "
    "LogicalXOR",
)

# BNNSInterpolationMethod
BNNSInterpolationMethodNearest = 0
BNNSInterpolationMethodLinear = 1

# BNNSLinearSamplingMode, of a crop-resize
_enumeration("BNNSLinearSampling", "Default AlignCorners UnalignCorners StrictAlignCorners OffsetCorners")

# BNNSBoxCoordinateMode, of a crop-resize
_enumeration("BNNS", "CornersHeightFirst CornersWidthFirst CenterSizeHeightFirst CenterSizeWidthFirst")

# BNNSEmbeddingFlags
BNNSEmbeddingFlagScaleGradientByFrequency = 1

# BNNSReduceFunction
_enumeration(
    "BNNSReduceFunction",
    "Max Min ArgMax ArgMin Mean MeanNonZero Sum SumSquare SumLog L1Norm LogicalOr/Any LogicalAnd/All L2Norm LogSumExp "
    "Product None LogSum",
)

# BNNSLossFunction
_enumeration(
    "BNNSLossFunction",
    "SoftmaxCrossEntropy SigmoidCrossEntropy MeanSquareError Huber Yolo Log CosineDistance Hinge MeanAbsoluteError "
    "CategoricalCrossEntropy",
    first=1,
)

# BNNSLossReductionFunction
_enumeration("BNNSLossReduction", "None Sum WeightedMean Mean NonZeroWeightMean")

# BNNSGraphArgumentIntent, BNNSGraphArgumentType, BNNSGraphOptimizationPreference, BNNSGraphMessageLevel
_enumeration("BNNSGraphArgumentIntent", "In Out InOut", first=1)
BNNSGraphArgumentTypePointer = 0
BNNSGraphArgumentTypeTensor = 2
_enumeration("BNNSGraphOptimizationPreference", "Performance IRSize")
BNNSGraphMessageLevelInfo = 1
BNNSGraphMessageLevelUnsupported = 2
BNNSGraphMessageLevelWarning = 4
BNNSGraphMessageLevelError = 8
