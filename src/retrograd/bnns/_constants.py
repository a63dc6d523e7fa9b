"""Apple's BNNS constants: Apple's names and values."""

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

BNNSActivationFunctionIdentity = 0
BNNSActivationFunctionRectifiedLinear = 1
BNNSActivationFunctionLeakyRectifiedLinear = 2
BNNSActivationFunctionSigmoid = 3
BNNSActivationFunctionTanh = 4
BNNSActivationFunctionScaledTanh = 5
BNNSActivationFunctionAbs = 6
BNNSActivationFunctionLinear = 7
BNNSActivationFunctionClamp = 8
BNNSActivationFunctionIntegerLinearSaturate = 9
BNNSActivationFunctionIntegerLinearSaturatePerChannel = 10
BNNSActivationFunctionSoftmax = 11
BNNSActivationFunctionGELUApproximation = 12
BNNSActivationFunctionGumbel = 13
BNNSActivationFunctionGumbelMax = 14
BNNSActivationFunctionHardSigmoid = 15
BNNSActivationFunctionSoftplus = 16
BNNSActivationFunctionSoftsign = 17
BNNSActivationFunctionELU = 18
BNNSActivationFunctionClampedLeakyRectifiedLinear = 19
BNNSActivationFunctionLinearWithBias = 20
BNNSActivationFunctionLogSoftmax = 21
BNNSActivationFunctionLogSigmoid = 22
BNNSActivationFunctionSELU = 23
BNNSActivationFunctionCELU = 24
BNNSActivationFunctionHardShrink = 25
BNNSActivationFunctionSoftShrink = 26
BNNSActivationFunctionTanhShrink = 27
BNNSActivationFunctionThreshold = 28
BNNSActivationFunctionPReLUPerChannel = 29
BNNSActivationFunctionGELUApproximation2 = 30
BNNSActivationFunctionHardSwish = 30  # an alias of GELUApproximation2
BNNSActivationFunctionSiLU = 31
BNNSActivationFunctionReLU6 = 32
BNNSActivationFunctionErf = 33
BNNSActivationFunctionGELU = 34
BNNSActivationFunctionGELUApproximationSigmoid = 35

# BNNSFilterType
BNNSConvolution = 0
BNNSFullyConnected = 1
BNNSBatchNorm = 2
BNNSInstanceNorm = 3
BNNSLayerNorm = 4
BNNSGroupNorm = 5
BNNSTransposedConvolution = 6
BNNSQuantization = 7
BNNSArithmetic = 8

# BNNSPoolingFunction
BNNSPoolingFunctionMax = 0
BNNSPoolingFunctionAverageCountIncludePadding = 1
BNNSPoolingFunctionAverage = 1  # an alias of AverageCountIncludePadding
BNNSPoolingFunctionAverageCountExcludePadding = 2
BNNSPoolingFunctionUnMax = 3
BNNSPoolingFunctionL2Norm = 4

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

BNNSOptimizerFunctionSGDMomentum = 1
BNNSOptimizerFunctionAdam = 2
BNNSOptimizerFunctionRMSProp = 3
BNNSOptimizerFunctionAdamW = 4
BNNSOptimizerFunctionAdamAMSGrad = 5
BNNSOptimizerFunctionAdamWAMSGrad = 6
BNNSOptimizerFunctionSGDMomentumWithClipping = 7
BNNSOptimizerFunctionAdamWithClipping = 8
BNNSOptimizerFunctionRMSPropWithClipping = 9
BNNSOptimizerFunctionAdamWWithClipping = 10
BNNSOptimizerFunctionAdamAMSGradWithClipping = 11
BNNSOptimizerFunctionAdamWAMSGradWithClipping = 12

# BNNSOptimizerRegularizationFunction
BNNSOptimizerRegularizationNone = 0
BNNSOptimizerRegularizationL1 = 1
BNNSOptimizerRegularizationL2 = 2

# BNNSOptimizerSGDMomentumVariant
BNNSSGDMomentumVariant0 = 0
BNNSSGDMomentumVariant1 = 1
BNNSSGDMomentumVariant2 = 2

# BNNSOptimizerClippingFunction
BNNSOptimizerClippingNone = 0
BNNSOptimizerClippingByValue = 1
BNNSOptimizerClippingByNorm = 2
BNNSOptimizerClippingByGlobalNorm = 3

# BNNSArithmeticFunction
BNNSArithmeticAdd = 0
BNNSArithmeticSubtract = 1
BNNSArithmeticMultiply = 2
BNNSArithmeticDivide = 3
BNNSArithmeticSquareRoot = 4
BNNSArithmeticReciprocalSquareRoot = 5
BNNSArithmeticCeil = 6
BNNSArithmeticFloor = 7
BNNSArithmeticRound = 8
BNNSArithmeticSin = 9
BNNSArithmeticCos = 10
BNNSArithmeticTan = 11
BNNSArithmeticAsin = 12
BNNSArithmeticAcos = 13
BNNSArithmeticAtan = 14
BNNSArithmeticSinh = 15
BNNSArithmeticCosh = 16
BNNSArithmeticTanh = 17
BNNSArithmeticAsinh = 18
BNNSArithmeticAcosh = 19
BNNSArithmeticAtanh = 20
BNNSArithmeticPow = 21
BNNSArithmeticExp = 22
BNNSArithmeticExp2 = 23
BNNSArithmeticLog = 24
BNNSArithmeticLog2 = 25
BNNSArithmeticMultiplyNoNaN = 26
BNNSArithmeticDivideNoNaN = 27
BNNSArithmeticMultiplyAdd = 28
BNNSArithmeticMinimum = 29
BNNSArithmeticMaximum = 30
BNNSArithmeticSelect = 31
BNNSArithmeticAbs = 32
BNNSArithmeticSign = 33
BNNSArithmeticNegate = 34
BNNSArithmeticReciprocal = 35
BNNSArithmeticSquare = 36
BNNSArithmeticFloorDivide = 37
BNNSArithmeticTruncDivide = 38
BNNSArithmeticTruncRemainder = 39
BNNSArithmeticErf = 40

# BNNSDescriptorType, of an operand of an arithmetic filter
BNNSConstant = 0
BNNSSample = 1
BNNSParameter = 2

# BNNSPaddingMode
BNNSPaddingModeConstant = 0
BNNSPaddingModeReflect = 1
BNNSPaddingModeSymmetric = 2

# BNNSShuffleType
BNNSShuffleTypePixelShuffleNCHW = 0
BNNSShuffleTypePixelUnshuffleNCHW = 1
BNNSShuffleTypeDepthToSpaceNCHW = 2
BNNSShuffleTypeSpaceToDepthNCHW = 3

# BNNSRelationalOperator
BNNSRelationalOperatorEqual = 0
BNNSRelationalOperatorLess = 1
BNNSRelationalOperatorLessEqual = 2
BNNSRelationalOperatorGreater = 3
BNNSRelationalOperatorGreaterEqual = 4
BNNSRelationalOperatorNotEqual = 5
BNNSRelationalOperatorLogicalAND = 6
BNNSRelationalOperatorLogicalOR = 7
BNNSRelationalOperatorLogicalNOT = 8
BNNSRelationalOperatorLogicalNAND = 9
BNNSRelationalOperatorLogicalNOR = 10
BNNSRelationalOperatorLogicalXOR = 11

# BNNSInterpolationMethod
BNNSInterpolationMethodNearest = 0
BNNSInterpolationMethodLinear = 1

# BNNSLinearSamplingMode, of a crop-resize
BNNSLinearSamplingDefault = 0
BNNSLinearSamplingAlignCorners = 1
BNNSLinearSamplingUnalignCorners = 2
BNNSLinearSamplingStrictAlignCorners = 3
BNNSLinearSamplingOffsetCorners = 4

# BNNSBoxCoordinateMode, of a crop-resize
BNNSCornersHeightFirst = 0
BNNSCornersWidthFirst = 1
BNNSCenterSizeHeightFirst = 2
BNNSCenterSizeWidthFirst = 3

# BNNSEmbeddingFlags
BNNSEmbeddingFlagScaleGradientByFrequency = 1

# BNNSReduceFunction
BNNSReduceFunctionMax = 0
BNNSReduceFunctionMin = 1
BNNSReduceFunctionArgMax = 2
BNNSReduceFunctionArgMin = 3
BNNSReduceFunctionMean = 4
BNNSReduceFunctionMeanNonZero = 5
BNNSReduceFunctionSum = 6
BNNSReduceFunctionSumSquare = 7
BNNSReduceFunctionSumLog = 8
BNNSReduceFunctionL1Norm = 9
BNNSReduceFunctionLogicalOr = 10
BNNSReduceFunctionAny = 10  # an alias of LogicalOr
BNNSReduceFunctionLogicalAnd = 11
BNNSReduceFunctionAll = 11  # an alias of LogicalAnd
BNNSReduceFunctionL2Norm = 12
BNNSReduceFunctionLogSumExp = 13
BNNSReduceFunctionProduct = 14
BNNSReduceFunctionNone = 15
BNNSReduceFunctionLogSum = 16

# BNNSLossFunction
BNNSLossFunctionSoftmaxCrossEntropy = 1
BNNSLossFunctionSigmoidCrossEntropy = 2
BNNSLossFunctionMeanSquareError = 3
BNNSLossFunctionHuber = 4
BNNSLossFunctionYolo = 5
BNNSLossFunctionLog = 6
BNNSLossFunctionCosineDistance = 7
BNNSLossFunctionHinge = 8
BNNSLossFunctionMeanAbsoluteError = 9
BNNSLossFunctionCategoricalCrossEntropy = 10

# BNNSLossReductionFunction
BNNSLossReductionNone = 0
BNNSLossReductionSum = 1
BNNSLossReductionWeightedMean = 2
BNNSLossReductionMean = 3
BNNSLossReductionNonZeroWeightMean = 4
