"""Swift's enumerations and values of graphs: those of ``BNNSGraph`` and of ``BNNSGraph.Builder``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from ..graph.tensor import DTYPES
from . import _constants as c
from ._allocation import scalar_dtype
from ._memory import DType, dtype_of

# Swift's default of every `epsilon`: Float.ulpOfOne.squareRoot().
EPSILON: Final = 3.4526698e-4


class GraphError(RuntimeError):
    """Swift's ``BNNSGraph.Error``. The message is the reason, `case` the name of Swift's case.

    ``unableToMakeGraph``, ``unableToCreateContext``, ``unableToExecute``, ``unableToSetDynamicShapes``,
    ``unableToSetBatchSize``, ``unableToQuery``.
    """

    def __init__(self, case: str, reason: str) -> None:
        super().__init__(f"{case}: {reason}")
        self.case = case
        self.reason = reason


class OptimizationPreference(enum.IntEnum):
    """What a compilation favours. Programs here are the same for both."""

    performance = c.BNNSGraphOptimizationPreferencePerformance
    irSize = c.BNNSGraphOptimizationPreferenceIRSize


class CompileOptions:
    """How a graph is compiled. With `useSingleThread` it runs in the caller's thread."""

    def __init__(
        self,
        *,
        useSingleThread: bool = False,
        generateDebugInfo: bool = False,
        optimizationPreference: OptimizationPreference = OptimizationPreference.performance,
    ) -> None:
        self.useSingleThread = useSingleThread
        self.generateDebugInfo = generateDebugInfo
        self.optimizationPreference = optimizationPreference


class Shape:
    """The sizes of an argument, ``BNNSGraph.Shape([2, 3])``; 0 stands for the size of the model."""

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self.shape = [int(size) for size in shape]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Shape, list, tuple)) and self.shape == list(other)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        return f"Shape({self.shape})"


# ---- the builder's enumerations -------------------------------------------------------------------------------------


class Intent(enum.IntEnum):
    """What a graph does with an argument. One that is `inOut` is read, then gets the value of ``builder.update``."""

    input = c.BNNSGraphArgumentIntentIn
    output = c.BNNSGraphArgumentIntentOut
    inOut = c.BNNSGraphArgumentIntentInOut


class Activation(enum.Enum):
    """The activations of recurrent cells."""

    hardSigmoid = "hardSigmoid"
    linear = "linear"
    relu = "relu"
    scaledTanh = "scaledTanh"
    sigmoid = "sigmoid"
    tanh = "tanh"


class Direction(enum.Enum):
    """The order in which a recurrent cell reads its steps."""

    forward = "forward"
    reverse = "reverse"


class CeilingMode(enum.Enum):
    """Whether a last window that is not full counts."""

    floor = "floor"
    ceiling = "ceiling"


class ScatterMode(enum.Enum):
    """What an update does to the element that it is for."""

    add = "add"
    subtract = "subtract"
    multiply = "multiply"
    divide = "divide"
    maximum = "maximum"
    minimum = "minimum"
    update = "update"


class SortOrder(enum.Enum):
    """The order of sorted elements."""

    ascending = "ascending"
    descending = "descending"


class Reduction(enum.Enum):
    """How the losses of a batch become one (retrograd's)."""

    mean = "mean"
    sum = "sum"
    none = "none"


class Case:
    """A case of a Swift enumeration that may have a parameter."""

    __slots__ = ("case", "parameter")

    def __init__(self, case: str, parameter: Any = None) -> None:
        self.case = case
        self.parameter = parameter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and (self.case, self.parameter) == (other.case, other.parameter)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.case, self.parameter))

    def __repr__(self) -> str:
        parameter = "" if self.parameter is None else f"({self.parameter!r})"
        return f"{type(self).__name__}.{self.case}{parameter}"


class ConvolutionPadding(Case):
    """The padding of a convolution or a pooling.

    ``same`` has the output's size that a stride divides, with an odd one at the end; ``lower`` has it at the start.
    """

    __slots__ = ()
    valid: ClassVar[ConvolutionPadding]
    same: ClassVar[ConvolutionPadding]
    lower: ClassVar[ConvolutionPadding]

    @classmethod
    def custom(cls, padding: Sequence[int]) -> ConvolutionPadding:
        """Before and after, for each spatial axis."""
        return cls("custom", tuple(int(one) for one in padding))


ConvolutionPadding.valid, ConvolutionPadding.same, ConvolutionPadding.lower = map(
    ConvolutionPadding, ("valid", "same", "lower")
)


class Padding(Case):
    """What ``pad`` fills with."""

    __slots__ = ()
    reflection: ClassVar[Padding]
    replication: ClassVar[Padding]

    @classmethod
    def constant(cls, value: float) -> Padding:
        return cls("constant", float(value))


Padding.reflection, Padding.replication = Padding("reflection"), Padding("replication")


class PoolingFunction(Case):
    """What a pooling makes of a window."""

    __slots__ = ()
    max: ClassVar[PoolingFunction]
    l2Norm: ClassVar[PoolingFunction]

    @classmethod
    def average(cls, includePadding: bool) -> PoolingFunction:
        return cls("average", bool(includePadding))


PoolingFunction.max, PoolingFunction.l2Norm = PoolingFunction("max"), PoolingFunction("l2Norm")


class SliceRange:
    """A part of an axis, from `startIndex` to below `endIndex`; a negative `endIndex` counts from the end."""

    fillAll: ClassVar[SliceRange]

    def __init__(self, *, startIndex: int = 0, endIndex: int | None = None) -> None:
        self.startIndex, self.endIndex = startIndex, endIndex

    def __repr__(self) -> str:
        return f"SliceRange(startIndex={self.startIndex}, endIndex={self.endIndex})"


SliceRange.fillAll = SliceRange()

# Those that an option of an operation may have, by name: what a saved graph is read with.
ENUMERATIONS: Final[dict[str, Callable[..., Any]]] = {
    kind.__name__: kind
    for kind in (
        *(Activation, Direction, CeilingMode, ScatterMode, SortOrder, Reduction),
        *(ConvolutionPadding, Padding, PoolingFunction),
    )
}


def as_dtype(dataType: Any) -> DType:
    """The type of a tensor's elements: NumPy's, Python's float for Swift's Float, or a BNNSDataType."""
    if isinstance(dataType, (int, np.integer)) and not isinstance(dataType, bool):
        dtype = dtype_of(int(dataType))
    else:
        dtype = scalar_dtype(dataType)
    if dtype not in DTYPES:
        known = ", ".join(one.name for one in DTYPES)
        raise TypeError(f"dataType is {dtype.name}, must be one of {known}")
    return dtype
