"""The namespace of the Swift interface."""

from __future__ import annotations

from . import _swift_activation, _swift_arrays
from ._swift import ActivationFunction, BNNSError, LearningPhase, NormalizationLayer, NormalizationType, Shape
from ._swift_activation import ActivationLayer
from ._swift_arithmetic import (
    ArithmeticBinaryFunction,
    ArithmeticTernaryFunction,
    ArithmeticUnaryFunction,
    BinaryArithmeticLayer,
    DescriptorType,
    TernaryArithmeticLayer,
    UnaryArithmeticLayer,
)
from ._swift_convolution import ConvolutionLayer, ConvolutionType
from ._swift_functions import (
    BroadcastMatrixMultiplyLayer,
    GramLayer,
    ReductionFunction,
    ReductionLayer,
    applyInTopK,
    applyMatrixMultiplication,
    applyReduction,
    applyTopK,
    matrixMultiplicationWorkspaceSize,
)
from ._swift_fused import (
    FusedConvolutionNormalizationLayer,
    FusedFullyConnectedNormalizationLayer,
    FusedLayer,
    FusedParametersLayer,
)
from ._swift_fused_parameters import (
    FusableLayerParameters,
    FusedBinaryArithmeticParameters,
    FusedConvolutionParameters,
    FusedDequantizationParameters,
    FusedFullyConnectedParameters,
    FusedNormalizationParameters,
    FusedQuantizationParameters,
    FusedTernaryArithmeticParameters,
    FusedUnaryArithmeticParameters,
)
from ._swift_gather import (
    RelationalOperator,
    ShuffleType,
    compare,
    copyBandPart,
    gather,
    gatherND,
    scatter,
    scatterND,
    shuffle,
    tile,
    tileBackward,
)
from ._swift_layers import (
    DropoutLayer,
    EmbeddingLayer,
    FullyConnectedLayer,
    Norm,
    PaddingLayer,
    PaddingMode,
    PermuteLayer,
    copy,
    transpose,
)
from ._swift_loss import LossFunction, LossLayer, LossReduction, YoloParameters
from ._swift_nearest_neighbors import NearestNeighbors
from ._swift_optimizer import (
    AdamOptimizer,
    AdamWOptimizer,
    GradientClipping,
    RMSPropOptimizer,
    SGDMomentumOptimizer,
)
from ._swift_pooling import ConvolutionPadding, PoolingLayer, PoolingType
from ._swift_random import RandomGenerator, RandomGeneratorMethod
from ._swift_resize import CropResizeLayer, InterpolationMethod, ResizeLayer

__all__ = [
    "BNNS",
    "FusableLayerParameters",
]


class BNNS:
    """Swift's namespace."""

    ActivationFunction = ActivationFunction
    ActivationLayer = ActivationLayer
    AdamOptimizer = AdamOptimizer
    AdamWOptimizer = AdamWOptimizer
    ConvolutionLayer = ConvolutionLayer
    ConvolutionPadding = ConvolutionPadding
    ConvolutionType = ConvolutionType
    CropResizeLayer = CropResizeLayer
    ArithmeticBinaryFunction = ArithmeticBinaryFunction
    ArithmeticTernaryFunction = ArithmeticTernaryFunction
    ArithmeticUnaryFunction = ArithmeticUnaryFunction
    BinaryArithmeticLayer = BinaryArithmeticLayer
    BroadcastMatrixMultiplyLayer = BroadcastMatrixMultiplyLayer
    DescriptorType = DescriptorType
    DropoutLayer = DropoutLayer
    EmbeddingLayer = EmbeddingLayer
    Error = BNNSError
    FullyConnectedLayer = FullyConnectedLayer
    FusedBinaryArithmeticParameters = FusedBinaryArithmeticParameters
    FusedConvolutionNormalizationLayer = FusedConvolutionNormalizationLayer
    FusedConvolutionParameters = FusedConvolutionParameters
    FusedDequantizationParameters = FusedDequantizationParameters
    FusedFullyConnectedNormalizationLayer = FusedFullyConnectedNormalizationLayer
    FusedFullyConnectedParameters = FusedFullyConnectedParameters
    FusedLayer = FusedLayer
    FusedNormalizationParameters = FusedNormalizationParameters
    FusedParametersLayer = FusedParametersLayer
    FusedQuantizationParameters = FusedQuantizationParameters
    FusedTernaryArithmeticParameters = FusedTernaryArithmeticParameters
    FusedUnaryArithmeticParameters = FusedUnaryArithmeticParameters
    GradientClipping = GradientClipping
    GramLayer = GramLayer
    InterpolationMethod = InterpolationMethod
    LearningPhase = LearningPhase
    Norm = Norm
    LossFunction = LossFunction
    LossLayer = LossLayer
    LossReduction = LossReduction
    NearestNeighbors = NearestNeighbors
    NormalizationLayer = NormalizationLayer
    NormalizationType = NormalizationType
    PoolingLayer = PoolingLayer
    PoolingType = PoolingType
    RMSPropOptimizer = RMSPropOptimizer
    RandomGenerator = RandomGenerator
    RandomGeneratorMethod = RandomGeneratorMethod
    SGDMomentumOptimizer = SGDMomentumOptimizer
    PaddingLayer = PaddingLayer
    PaddingMode = PaddingMode
    PermuteLayer = PermuteLayer
    ReductionFunction = ReductionFunction
    ReductionLayer = ReductionLayer
    RelationalOperator = RelationalOperator
    ResizeLayer = ResizeLayer
    Shape = Shape
    ShuffleType = ShuffleType
    TernaryArithmeticLayer = TernaryArithmeticLayer
    UnaryArithmeticLayer = UnaryArithmeticLayer
    YoloParameters = YoloParameters

    applyActivation = staticmethod(_swift_activation.applyActivation)
    clip = staticmethod(_swift_arrays.clip)
    clipByGlobalNorm = staticmethod(_swift_arrays.clipByGlobalNorm)
    clipByNorm = staticmethod(_swift_arrays.clipByNorm)
    computeNorm = staticmethod(_swift_arrays.computeNorm)
    computeNormBackward = staticmethod(_swift_arrays.computeNormBackward)
    dequantize = staticmethod(_swift_arrays.dequantize)
    quantize = staticmethod(_swift_arrays.quantize)
    applyInTopK = staticmethod(applyInTopK)
    applyMatrixMultiplication = staticmethod(applyMatrixMultiplication)
    applyReduction = staticmethod(applyReduction)
    compare = staticmethod(compare)
    applyTopK = staticmethod(applyTopK)
    copy = staticmethod(copy)
    copyBandPart = staticmethod(copyBandPart)
    gather = staticmethod(gather)
    gatherND = staticmethod(gatherND)
    matrixMultiplicationWorkspaceSize = staticmethod(matrixMultiplicationWorkspaceSize)
    scatter = staticmethod(scatter)
    scatterND = staticmethod(scatterND)
    shuffle = staticmethod(shuffle)
    tile = staticmethod(tile)
    tileBackward = staticmethod(tileBackward)
    transpose = staticmethod(transpose)
