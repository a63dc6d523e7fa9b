"""Swift's enumerations, and its cases with parameters."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from .. import bnns as c
from . import _constants
from ._declare import written
from ._memory import dtype_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, Structure
from ._swift import Value, batch_stride, public

_Array: TypeAlias = BNNSNDArrayDescriptor | None
_CONSTANTS: Final = {name.lower(): value for name, value in vars(_constants).items() if name.startswith("BNNS")}


def _numbers(prefix: str, cases: str) -> dict[str, int]:
    """The cases and Apple's numbers: those of constants with this prefix and the name of the case, or another one."""
    pairs = [word.partition("=")[::2] for word in cases.split()]
    return {case: _CONSTANTS[f"{prefix}{name or case}".lower()] for case, name in pairs}


def _enumeration(name: str, doc: str, prefix: str, cases: str) -> type[enum.IntEnum]:
    make: Any = enum.IntEnum
    made: type[enum.IntEnum] = make(name, _numbers(prefix, cases), module=__name__)
    made.__doc__ = doc
    return public(made)


# ---- enumerations ---------------------------------------------------------------------------------------------------


@public
class DescriptorType(enum.IntEnum):
    """What an operand is: the same for all samples, one of each sample, or the same for all and trained."""

    constant = c.BNNSConstant
    sample = c.BNNSSample
    parameter = c.BNNSParameter


ArithmeticUnaryFunction = _enumeration(
    "ArithmeticUnaryFunction",
    "Functions of one operand.",
    "BNNSArithmetic",
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf exp exp2 floor log log2 negate reciprocal "
    "reciprocalSquareRoot round sign sin sinh square squareRoot tan tanh",
)
ArithmeticBinaryFunction = _enumeration(
    "ArithmeticBinaryFunction",
    "Functions of two operands.",
    "BNNSArithmetic",
    "add subtract multiply divide pow multiplyNoNaN divideNoNaN min=minimum max=maximum flooringDivide=floorDivide "
    "truncatingDivide=truncDivide truncatingRemainder=truncRemainder",
)


@public
class ArithmeticTernaryFunction(enum.IntEnum):
    """Functions of three operands."""

    multiplyAdd = c.BNNSArithmeticMultiplyAdd
    select = c.BNNSArithmeticSelect


RelationalOperator = _enumeration(
    "RelationalOperator",
    "Comparisons, and logical functions. Names that Python reserves have an underscore.",
    "BNNSRelationalOperator",
    "equal less lessEqual greater greaterEqual notEqual and_=logicalAND or_=logicalOR not_=logicalNOT "
    "nand=logicalNAND nor=logicalNOR xor=logicalXOR",
)


@public
class ShuffleType(enum.IntEnum):
    """Swift's two cases are the pixel shuffle and its inverse, whose channels count blocks fastest."""

    depthToSpaceNCHW = c.BNNSShuffleTypePixelShuffleNCHW
    spaceToDepthNCHW = c.BNNSShuffleTypePixelUnshuffleNCHW


@public
class InterpolationMethod(enum.Enum):
    """How values between elements are found."""

    nearestNeighbor = c.BNNSInterpolationMethodNearest
    linear = c.BNNSInterpolationMethodLinear


@public
class RandomGeneratorMethod(enum.Enum):
    """How numbers are drawn."""

    aesCtr = c.BNNSRandomGeneratorMethodAES_CTR


@public
class ConvolutionType(enum.Enum):
    standard = 0
    transposed = 1


@public
class LossReduction(enum.Enum):
    """How the losses of a batch become one."""

    none = c.BNNSLossReductionNone
    sum = c.BNNSLossReductionSum
    weightedMean = c.BNNSLossReductionWeightedMean
    reductionMean = c.BNNSLossReductionMean
    zeroWeightMean = c.BNNSLossReductionNonZeroWeightMean

    @property
    def bnnsLossReductionFunction(self) -> int:
        return int(self.value)


# ---- cases with parameters ------------------------------------------------------------------------------------------


def _add_cases(kind: type[Value], prefix: str, cases: str, parameters: str = "") -> None:
    """Cases of Apple's functions: attributes, or class methods with parameters, which are floats."""
    names = parameters.split()
    for case, number in _numbers(prefix, cases).items():
        if names:
            body, types = f"return cls({number}, {', '.join(names)})", dict.fromkeys(names, float)

            def named() -> None: ...

            named.__name__, named.__qualname__ = case, f"{kind.__qualname__}.{case}"
            method = written(named, ["cls", *names], body, {}, {**types, "return": kind})
            setattr(kind, case, classmethod(method))
        else:
            setattr(kind, case, kind(number))  # type: ignore[call-arg]


@public
class ActivationFunction(Value):
    """An activation: ``ActivationFunction.tanh``, ``ActivationFunction.elu(alpha=1.0)``."""

    identity: ClassVar[ActivationFunction]

    def __init__(self, function: int, alpha: float = 0.0, beta: float = 0.0) -> None:
        self.bnnsActivation = BNNSActivation(function, alpha, beta)
        self.fields = {"activation": self.bnnsActivation}

    @classmethod
    def clamp(cls, bounds: Sequence[float]) -> ActivationFunction:
        low, high = bounds
        return cls(c.BNNSActivationFunctionClamp, low, high)


_PREFIX: Final = "BNNSActivationFunction"
_add_cases(
    ActivationFunction,
    _PREFIX,
    "identity rectifiedLinear sigmoid logSigmoid tanh abs softmax logSoftmax softsign selu tanhShrink",
)
_add_cases(ActivationFunction, _PREFIX, "leakyRectifiedLinear linear elu celu hardShrink softShrink", "alpha")
_add_cases(
    ActivationFunction,
    _PREFIX,
    "scaledTanh geluApproximation geluApproximation2 gumbel gumbelMax hardSigmoid softplus clampedLeakyRectifiedLinear "
    "linearWithBias threshold",
    "alpha beta",
)


@public
class ReductionFunction(Value):
    """A reduction: ``ReductionFunction.sum``, ``ReductionFunction.sumOfLogs(epsilon=1e-6)``."""

    def __init__(self, function: int, epsilon: float = 0.0) -> None:
        self.function, self.epsilon = function, epsilon
        self.fields = {"reduce_func": function, "epsilon": epsilon}


_add_cases(
    ReductionFunction,
    "BNNSReduceFunction",
    "max min argMax argMin mean meanNonZero sum sumOfSquares=sumSquare sumOfAbsolutes=l1Norm logicalOr any logicalAnd "
    "all l2Norm logSumExp product",
)
_add_cases(ReductionFunction, "BNNSReduceFunction", "sumOfLogs=sumLog", "epsilon")


@public
class YoloParameters:
    """The parameters of YOLO's loss, by the names of the C structure's fields."""

    def __init__(self, **fields: Any) -> None:
        c.BNNSLayerParametersLossYolo(**fields)  # raises for other names
        self.fields = fields


@public
class LossFunction(Value):
    """A loss: ``LossFunction.meanSquareError``, ``LossFunction.huber(huberDelta=1.0)``."""

    def __init__(self, function: int, structure: type[Structure] | None = None, **fields: object) -> None:
        self.bnnsLossFunction, self.structure = function, structure or c.BNNSLayerParametersLossBase
        self.fields = {**fields, "function": function}

    @classmethod
    def _with(cls, name: str, **fields: object) -> LossFunction:
        """A function that has a structure of its own."""
        return cls(getattr(c, f"BNNSLossFunction{name}"), getattr(c, f"BNNSLayerParametersLoss{name}"), **fields)

    @classmethod
    def softmaxCrossEntropy(cls, labelSmoothing: float) -> LossFunction:
        return cls._with("SoftmaxCrossEntropy", label_smooth=labelSmoothing)

    @classmethod
    def sigmoidCrossEntropy(cls, labelSmoothing: float) -> LossFunction:
        return cls._with("SigmoidCrossEntropy", label_smooth=labelSmoothing)

    @classmethod
    def huber(cls, huberDelta: float) -> LossFunction:
        return cls._with("Huber", huber_delta=huberDelta)

    @classmethod
    def yolo(cls, parameters: YoloParameters) -> LossFunction:
        return cls._with("Yolo", **parameters.fields)


_add_cases(
    LossFunction,
    "BNNSLossFunction",
    "meanSquareError meanAbsoluteError log cosineDistance hinge categoricalCrossEntropy",
)


@public
class NormalizationType(Value):
    """A kind of normalization with its own parameters.

    Made by :meth:`batch`, :meth:`instance`, :meth:`layer` or :meth:`group`.
    """

    def __init__(self, norm_type: int, fields: dict[str, Any]) -> None:
        self.norm_type = norm_type
        self.fields = {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def batch(cls, movingMean: _Array = None, movingVariance: _Array = None) -> NormalizationType:
        return cls(c.BNNSBatchNorm, {"moving_mean_desc": movingMean, "moving_variance_desc": movingVariance})

    @classmethod
    def instance(cls, movingMean: _Array = None, movingVariance: _Array = None) -> NormalizationType:
        return cls(c.BNNSInstanceNorm, {"moving_mean_desc": movingMean, "moving_variance_desc": movingVariance})

    @classmethod
    def layer(cls, normalizationAxis: int) -> NormalizationType:
        return cls(c.BNNSLayerNorm, {"normalization_axis": normalizationAxis})

    @classmethod
    def group(cls, groupCount: int) -> NormalizationType:
        return cls(c.BNNSGroupNorm, {"num_groups": groupCount})


@public
class ConvolutionPadding(Value):
    """The padding of an image, made by :meth:`symmetric` or :meth:`asymmetric`; ``ConvolutionPadding.zero`` is none."""

    zero: ClassVar[ConvolutionPadding]

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    @classmethod
    def symmetric(cls, x: int, y: int) -> ConvolutionPadding:
        return cls({"x_padding": x, "y_padding": y})

    @classmethod
    def asymmetric(cls, left: int, right: int, up: int, down: int) -> ConvolutionPadding:
        return cls({"pad": (left, right, up, down)})


ConvolutionPadding.zero = ConvolutionPadding.symmetric(0, 0)


@public
class PoolingType(Value):
    """A kind of pooling with its own parameters.

    Indices are an array of Swift's Int (int64) or of uint64, or a descriptor of UInt64 or UInt32.
    """

    l2Norm: ClassVar[PoolingType]

    def __init__(self, function: int, indices: Any = None, xDilationStride: int = 0, yDilationStride: int = 0) -> None:
        self.fields = {
            "pooling_function": function,
            "x_dilation_stride": xDilationStride,
            "y_dilation_stride": yDilationStride,
        }
        self.index_type, self.indices = c.BNNSDataTypeUInt64, indices
        if isinstance(indices, BNNSNDArrayDescriptor):
            self.index_type, self.indices = indices.data_type, indices.data
        elif isinstance(indices, np.ndarray) and indices.dtype == np.int64:
            self.indices = indices.view(np.uint64)

    @classmethod
    def max(cls, indices: Any = None, xDilationStride: int = 0, yDilationStride: int = 0) -> PoolingType:
        return cls(c.BNNSPoolingFunctionMax, indices, xDilationStride, yDilationStride)

    @classmethod
    def maxEx(cls, indicesDescriptor: _Array = None, xDilationStride: int = 0, yDilationStride: int = 0) -> PoolingType:
        return cls(c.BNNSPoolingFunctionMax, indicesDescriptor, xDilationStride, yDilationStride)

    @classmethod
    def unMax(cls, indices: Any, xDilationStride: int = 0, yDilationStride: int = 0) -> PoolingType:
        return cls(c.BNNSPoolingFunctionUnMax, indices, xDilationStride, yDilationStride)

    @classmethod
    def unMaxEx(
        cls, indicesDescriptor: BNNSNDArrayDescriptor, xDilationStride: int = 0, yDilationStride: int = 0
    ) -> PoolingType:
        return cls(c.BNNSPoolingFunctionUnMax, indicesDescriptor, xDilationStride, yDilationStride)

    @classmethod
    def average(cls, countIncludesPadding: bool) -> PoolingType:
        including = c.BNNSPoolingFunctionAverageCountIncludePadding
        return cls(including if countIncludesPadding else c.BNNSPoolingFunctionAverageCountExcludePadding)


PoolingType.l2Norm = PoolingType(c.BNNSPoolingFunctionL2Norm)


@public
class PaddingMode:
    """What is padded with: ``PaddingMode.constantScalar(0.5)``, ``PaddingMode.reflect``."""

    reflect: ClassVar[PaddingMode]
    symmetric: ClassVar[PaddingMode]

    def __init__(self, mode: int, scalar: float | None = None, bits: int = 0) -> None:
        self.mode, self._scalar, self._bits = mode, scalar, bits

    @classmethod
    def constantScalar(cls, value: float) -> PaddingMode:
        return cls(c.BNNSPaddingModeConstant, scalar=value)

    @classmethod
    def constantBitPattern(cls, bits: int) -> PaddingMode:
        return cls(c.BNNSPaddingModeConstant, bits=bits)

    def bits_for(self, data_type: int) -> int:
        """The constant as elements of this type store it."""
        if self._scalar is None:
            return self._bits
        with np.errstate(all="ignore"):
            image = np.array(self._scalar).astype(dtype_of(data_type)).tobytes()
        return int.from_bytes(image[:4], "little")


PaddingMode.reflect = PaddingMode(c.BNNSPaddingModeReflect)
PaddingMode.symmetric = PaddingMode(c.BNNSPaddingModeSymmetric)


@public
class Norm(Value):
    """A norm by its exponent."""

    def __init__(self, rawValue: float) -> None:
        self.rawValue = rawValue
        self.fields = {"norm_type": rawValue}


_NORMS: Final = {"l1 taxicab": Norm(1.0), "l2 euclidean": Norm(2.0), "lInfinity maximum": Norm(math.inf)}
for _cases, _norm in _NORMS.items():
    for _case in _cases.split():
        setattr(Norm, _case, _norm)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@public
class Shape:
    """Extents and strides of an array, made by the methods named after Swift's cases.

    ``Shape(size)`` picks the layout by the number of axes: a vector, or first-major with the slowest axis first. The
    axes of the sequences ``tensor3DSNE`` and ``tensor3DNSE`` are features, samples, steps and features, steps, samples.
    """

    def __init__(self, size: Sequence[int], dataLayout: int | None = None, stride: Sequence[int] | None = None) -> None:
        if dataLayout is None:
            if not 1 <= len(size) <= c.BNNS_MAX_TENSOR_DIMENSION:
                raise ValueError(f"a shape has from 1 to {c.BNNS_MAX_TENSOR_DIMENSION} axes, not {len(size)}")
            name = "Vector" if len(size) == 1 else f"{len(size)}DFirstMajor"
            dataLayout = int(getattr(c, f"BNNSDataLayout{name}"))
        layout, rank = dataLayout, dataLayout >> 16
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

    def _fields(self) -> tuple[Any, ...]:
        return self.layout, self.size, self.stride

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Shape({constant_name('BNNSDataLayout', self.layout)}, size={self.size}, stride={self.stride})"

    @classmethod
    def vector(cls, size: int, stride: int = 0) -> Shape:
        return cls((size,), c.BNNSDataLayoutVector, (stride,))

    @classmethod
    def matrixColumnMajor(cls, rows: int, columns: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((rows, columns), c.BNNSDataLayoutColumnMajorMatrix, stride)

    @classmethod
    def matrixRowMajor(cls, columns: int, rows: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((columns, rows), c.BNNSDataLayoutRowMajorMatrix, stride)

    @classmethod
    def imageCHW(cls, width: int, height: int, channels: int, stride: Sequence[int] | None = None) -> Shape:
        return cls((width, height, channels), c.BNNSDataLayoutImageCHW, stride)


def _listed(layout: int) -> Callable[..., Shape]:
    def make(cls: type[Shape], *size: int, stride: Sequence[int] | None = None) -> Shape:
        return cls(size, layout, stride)

    return make


_ranks = range(3, c.BNNS_MAX_TENSOR_DIMENSION + 1)
_tensors = " ".join(f"tensor{rank}D{order}Major={rank}D{order}Major" for rank in _ranks for order in ("First", "Last"))
_others = "matrixFirstMajor=2DFirstMajor matrixLastMajor=2DLastMajor tensor3DSNE=SNE tensor3DNSE=NSE"
for _name, _layout in _numbers("BNNSDataLayout", f"{_tensors} {_others} convolutionWeightsOIHW").items():
    setattr(Shape, _name, classmethod(_listed(_layout)))
