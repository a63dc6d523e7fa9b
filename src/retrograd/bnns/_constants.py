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
BNNSDataTypeFloat16 = 0x10010
BNNSDataTypeFloat32 = 0x10020
BNNSDataTypeBFloat16 = 0x18010
BNNSDataTypeInt1 = 0x20001
BNNSDataTypeInt2 = 0x20002
BNNSDataTypeInt4 = 0x20004
BNNSDataTypeInt8 = 0x20008
BNNSDataTypeInt16 = 0x20010
BNNSDataTypeInt32 = 0x20020
BNNSDataTypeInt64 = 0x20040
BNNSDataTypeUInt1 = 0x40001
BNNSDataTypeUInt2 = 0x40002
BNNSDataTypeUInt3 = 0x40003
BNNSDataTypeUInt4 = 0x40004
BNNSDataTypeUInt6 = 0x40006
BNNSDataTypeUInt8 = 0x40008
BNNSDataTypeUInt16 = 0x40010
BNNSDataTypeUInt32 = 0x40020
BNNSDataTypeUInt64 = 0x40040
BNNSDataTypeIndexed1 = 0x80001
BNNSDataTypeIndexed2 = 0x80002
BNNSDataTypeIndexed4 = 0x80004
BNNSDataTypeIndexed8 = 0x80008
BNNSDataTypeBoolean = 0x100008

# BNNSDataLayout: the rank is the value >> 16; bit 15 marks the generic layouts.
BNNSDataLayoutVector = 0x10000
BNNSDataLayout1DLastMajor = 0x18000
BNNSDataLayout1DFirstMajor = 0x18001
BNNSDataLayoutRowMajorMatrix = 0x20000
BNNSDataLayoutColumnMajorMatrix = 0x20001
BNNSDataLayoutFullyConnectedSparse = 0x21001
BNNSDataLayout2DLastMajor = 0x28000
BNNSDataLayout2DFirstMajor = 0x28001
BNNSDataLayoutImageCHW = 0x30000
BNNSDataLayoutSNE = 0x30001
BNNSDataLayoutNSE = 0x30002
BNNSDataLayoutMHA_DHK = 0x30003
BNNSDataLayout3DLastMajor = 0x38000
BNNSDataLayout3DFirstMajor = 0x38001
BNNSDataLayoutConvolutionWeightsOIHW = 0x40000
BNNSDataLayoutConvolutionWeightsOIHrWr = 0x40001
BNNSDataLayoutConvolutionWeightsIOHrWr = 0x40002
BNNSDataLayoutConvolutionWeightsOIHW_Pack32 = 0x40010
BNNSDataLayout4DLastMajor = 0x48000
BNNSDataLayout4DFirstMajor = 0x48001
BNNSDataLayout5DLastMajor = 0x58000
BNNSDataLayout5DFirstMajor = 0x58001
BNNSDataLayout6DLastMajor = 0x68000
BNNSDataLayout6DFirstMajor = 0x68001
BNNSDataLayout7DLastMajor = 0x78000
BNNSDataLayout7DFirstMajor = 0x78001
BNNSDataLayout8DLastMajor = 0x88000
BNNSDataLayout8DFirstMajor = 0x88001

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
