"""The Swift interface: what its layers and functions share. It raises where Swift throws or returns nil.

Swift's layers and functions are declared by their labels (``calls``, ``takes`` and the arguments of a layer's class),
and by what becomes of them: fields of a C structure, or arguments of a C function.
"""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from .. import bnns as c
from ._arguments import Given as Given
from ._declare import written
from ._failure import Invalid, Unsupported, raising
from ._memory import Geometry, data_type_of, listed
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure

_L = TypeVar("_L", bound="Layer")
_T = TypeVar("_T")
Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
NAMESPACE: Final[dict[str, object]] = {}  # what Swift's BNNS has


def public(member: _T) -> _T:
    """Add a class or function to Swift's namespace."""
    NAMESPACE[getattr(member, "__name__", "")] = member
    return member


class BNNSError(RuntimeError):
    """Swift's ``BNNS.Error``. The message is the reason.

    `case` is the name of Swift's case: ``unableToCreateLayer``, ``layerApplyFail``, ``arrayDescriptorInvalidData`` or
    ``optimizerStepFail``.
    """

    def __init__(self, case: str, reason: str | None) -> None:
        super().__init__(f"{case}: {reason}")
        self.case = case


NAMESPACE["Error"] = BNNSError


@public
class LearningPhase(enum.Enum):
    """Training or inference."""

    training = "training"
    inference = "inference"


class Value:
    """A case of a Swift enumeration, with its parameters: fields of a C structure."""

    fields: Mapping[str, Any]


# ---- calls of C functions -------------------------------------------------------------------------------------------


def batch_stride(descriptor: BNNSNDArrayDescriptor) -> int:
    """Elements from one sample to the next: the span of the slowest axis."""
    rank = descriptor.layout >> 16
    strides = descriptor.stride[:rank]
    sizes = listed(descriptor.layout, descriptor.size[:rank])
    step = 1
    for size, stride in zip(sizes, strides, strict=True):
        step = (stride or step) * size
    return step


def stride_of(descriptor: BNNSNDArrayDescriptor | None) -> int:
    """The stride of a packed batch; 0 for an array that is not given."""
    return 0 if descriptor is None else batch_stride(descriptor)


def data_of(descriptor: BNNSNDArrayDescriptor | None) -> object:
    return None if descriptor is None else descriptor.data


def axis_flags(axes: Sequence[int] | None) -> int:
    """The bits of these axes; 0 for None."""
    flags = 0
    for axis in axes or ():
        if axis < 0:
            raise ValueError(f"axes has {axis}, must be at least 0")
        flags |= 1 << axis
    return flags


def checked_call(
    function: Callable[..., int], *arguments: object, case: str = "layerApplyFail", **options: object
) -> None:
    """Call a C function; raise if it fails. `case` is Swift's name of the error, `options` are retrograd's."""
    with raising():
        status = function(*arguments, **options)
    if status:
        raise BNNSError(case, c.last_error())


def made(create: Callable[..., _T | None], *arguments: object, **options: object) -> _T:
    """Call a C function that creates an object; raise if it fails."""
    with raising():
        result = create(*arguments, **options)
    if result is None:
        raise BNNSError("unableToCreateLayer", c.last_error())
    return result


def check_data(**descriptors: BNNSNDArrayDescriptor | None) -> None:
    for name, descriptor in descriptors.items():
        if descriptor is not None and descriptor.data is None:
            raise BNNSError("arrayDescriptorInvalidData", f"{name} has no data")


def checked_geometry(name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
    """The geometry of an array; errors begin with its name."""
    try:
        return descriptor.geometry()
    except (Invalid, Unsupported) as error:
        raise BNNSError("layerApplyFail", f"{name}: {error}") from None


def check_like(name: str, descriptor: BNNSNDArrayDescriptor, made: Geometry | None) -> None:
    """Raise if an array differs in type or number of elements from that which its layer was made for.

    The C call takes only its memory. A contiguous array may have another shape; others must have the same strides.
    """
    given = checked_geometry(name, descriptor)
    if made is None:  # the layer was closed
        return
    differs = ""
    if given.dtype != made.dtype or given.elements != made.elements:
        shown = [constant_name("BNNSDataType", data_type_of(one.dtype)) for one in (given, made)]
        differs = f"{given.elements} elements of {shown[0]}, but the layer was made for {made.elements} of {shown[1]}"
    elif not (given.dense and made.dense) and (given.extents, given.strides) != (made.extents, made.strides):
        size = f"size {given.extents} and stride {given.strides} (fastest first)"
        differs = f"{size}, but the layer was made for {made.extents} and {made.strides}"
    if differs:
        raise BNNSError("layerApplyFail", f"{name} has {differs}")


def learning_phase(phase: LearningPhase) -> bool:
    """Whether it is training."""
    if not isinstance(phase, LearningPhase):
        raise TypeError(f"for_ must be a LearningPhase, not {phase!r}")
    return phase is LearningPhase.training


# ---- labels ---------------------------------------------------------------------------------------------------------

_TYPES: Final[dict[str, Any]] = {
    label: kind
    for kind, labels in {
        int: "batchSize axis k seed control paddingIndex groupCount firstTransposeAxis secondTransposeAxis "
        "lowerBandCount upperBandCount",
        float: "alpha momentum epsilon rate maximumNorm threshold globalNorm spatialScale extrapolationValue "
        "normalizationMomentum normalizationEpsilon",
        bool: "transposedA transposedB isWeightsA isWeightsB accumulatesToOutput isQuadratic alignsCorners "
        "oppositeAxes broadcastsWeights scalesGradientByFrequency coordinatesAreNormalized dividesByClasses",
        str: "momentumWeighs",
        object: "workspace",
        Sequence[int]: "axes permutation",
        Sequence[tuple[int, int]]: "size",
        tuple[int, int]: "stride dilationStride kernelSize convolutionStride convolutionDilationStride",
        Sequence[BNNSNDArrayDescriptor | None]: "generatingParameterGradients",
        LearningPhase: "for_",
        "ActivationFunction": "activation normalizationActivation",
        "ConvolutionPadding": "padding convolutionPadding",
        "NormalizationType": "normalization",
        BNNSFilterParameters: "filterParameters",
    }.items()
    for label in labels.split()
}


class _Label(NamedTuple):
    """One of Swift's labels, as it is declared.

    ``label?`` is None if it is not given, ``label|None`` may be None but must be given, ``label=0.5`` has a default
    (and ``label=.zero`` a case of its type), and ``label:Name`` has a type of the namespace. Labels without a type have
    that of the table, or are arrays.
    """

    name: str
    kind: Any
    default: Any
    may_be_none: bool
    positional: bool


def _labels(declared: str, types: Mapping[str, Any] = _TYPES) -> list[_Label]:
    """The labels of a declaration. Those before a ``*`` have no label in Swift: they may be given by position."""
    found = []
    words = declared.split()
    for index, word in enumerate(words):
        if word == "*":
            continue
        label, _, default = word.partition("=")
        optional, must_be_given = label.endswith("?"), label.endswith("|None")
        label, _, kind = label.removesuffix("?").removesuffix("|None").partition(":")
        value: object = None if optional else inspect.Parameter.empty
        of = kind or types.get(label, BNNSNDArrayDescriptor)
        of = NAMESPACE[of] if isinstance(of, str) else of
        if default:
            value = getattr(of, default[1:]) if default[0] == "." else ast.literal_eval(default)
        found.append(_Label(label, of, value, optional or must_be_given, "*" in words[index:]))
    return found


def _written(named: Callable[..., object], labels: list[_Label], self: bool, body: str, names: dict[str, Any]) -> Any:
    """A function with these labels and this body."""
    signature, types = ["self"] if self else [], {}
    for one in labels:
        if not one.positional and "*" not in signature:
            signature.append("*")
        required = one.default is inspect.Parameter.empty
        signature.append(one.name if required else f"{one.name}=default_{one.name}")
        names[f"default_{one.name}"] = one.default
        types[one.name] = one.kind | None if one.may_be_none else one.kind
    return written(named, signature, body, names, {**types, "return": None})


def takes(declared: str, **types: object) -> Decorator:
    """Give a method these labels. What is decorated gets the arguments as one mapping.

    `types` are those of labels that the table does not have.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        labels = _labels(declared, {**_TYPES, **types})
        body = f"_function(self, {_given(labels)})"
        defined: Callable[..., None] = _written(function, labels, True, body, {"_function": function})
        return defined

    return decorate


def calls(
    function: Callable[..., int],
    declared: str,
    passed: str,
    /,
    *,
    data: str | None = None,
    like: str | None = None,
    layer: type[Structure] | None = None,
    **fields: object,
) -> Decorator:
    """Declare a function or a method of a layer with these labels, which checks arrays and calls a C function.

    `passed` are the arguments of the C function: labels; ``.label`` for the data of an array; ``label+`` and
    ``.label+`` with the stride of a batch after it, ``+label`` for the stride alone; ``.one,two+`` for lists of them;
    ``(0)`` for a constant; ``name=label`` for a keyword; ``self`` for the filter of the layer; ``layer`` for a
    structure of this type, filled from the labels and `fields`. Arrays must have data: those of `data`, or all that are
    passed, except optional ones of which only the data is. Of a layer, arrays must be as those that it was made for:
    those of `like`, or all of which the data is passed.
    """

    def decorate(named: Callable[..., None]) -> Callable[..., None]:
        labels = _labels(declared)
        optional = {one.name for one in labels if one.may_be_none}
        expressions = {one: f"_{one}({one})" for one in _ARGUMENTS}
        expressions |= {"self": "self._filter", "layer": f"_filled(_layer, {_given(labels)}, _optional, _fields)"}
        arguments, memory, used = [], [], []
        for word in passed.split():
            keyword, equals, name = word.rpartition("=")
            is_list = "," in name and name[0] != "("
            several = [one for one in name.strip("+.").split(",") if one] if is_list else [name.strip("+.")]
            form = "[{}]" if is_list else "{}"
            used += several
            if word[0] == ".":
                memory += several
                arguments.append(form.format(", ".join(f"_data_of({one})" for one in several)))
            elif word[0] != "+":
                given = ", ".join(expressions.get(one, one) for one in several)
                arguments.append(f"{keyword}{equals}{form.format(given)}")
            if "+" in word:
                arguments.append(form.format(", ".join(f"_stride_of({one})" for one in several)))
        unchecked = optional.intersection(memory) if "self" in used else set()
        arrays = [one.name for one in labels if one.kind is BNNSNDArrayDescriptor]
        needed = [name for name in arrays if name in used and name not in unchecked]
        body = [f"_check_data({', '.join(f'{name}={name}' for name in (needed if data is None else data.split()))})"]
        if "for_" in used:
            body.insert(0, "_learning_phase(for_)")
        for name in like.split() if like is not None else memory if "self" in used else ():
            condition = f"if {name} is not None and {name}.data is not None: " if name in optional else ""
            body.append(f"{condition}_check_like({name!r}, {name}, self._made({name!r}))")
        body.append(f"_checked_call(_function, {', '.join(arguments)})")
        helpers = (check_data, check_like, checked_call, data_of, filled, learning_phase, stride_of)
        names: dict[str, Any] = {f"_{helper.__name__}": helper for helper in helpers}
        names |= {f"_{name}": convert for name, convert in _ARGUMENTS.items()}
        names |= {"_function": function, "_layer": layer, "_optional": optional, "_fields": fields}
        defined: Callable[..., None] = _written(named, labels, "self" in used, "\n    ".join(body), names)
        return defined if "self" in used else public(defined)

    return decorate


def _given(labels: list[_Label]) -> str:
    return f"{{{', '.join(f'{one.name!r}: {one.name}' for one in labels)}}}"


# What becomes of a label that is an argument of a C function.
_ARGUMENTS: Final[dict[str, Callable[[Any], object]]] = {
    "axes": axis_flags,
    "for_": learning_phase,
    "reductionFunction": lambda function: c.BNNSReduceFunctionNone if function is None else function.function,
    "lowerBandCount": lambda count: -1 if count is None else count,
    "upperBandCount": lambda count: -1 if count is None else count,
}
# The fields of a C structure that labels become, if they do not have the same name.
_RENAMED: Final = (
    "input=i_desc output=o_desc weights=w_desc inputA=iA_desc inputB=iB_desc beta=beta_desc gamma=gamma_desc "
    "transposedA=transA transposedB=transB isWeightsA=a_is_weights isWeightsB=b_is_weights isQuadratic=quadratic "
    "groupCount=groups groupSize=groups paddingIndex=padding_idx maximumNorm=max_norm interpolationMethod=method "
    "alignsCorners=align_corners coordinatesAreNormalized=normalized_coordinates spatialScale=spatial_scale "
    "extrapolationValue=extrapolation_value samplingMode=sampling_mode boxCoordinateMode=box_coordinate_mode"
)
_FIELDS: Final = dict(pair.split("=") for pair in _RENAMED.split())
_CONVERTED: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "axes": lambda axes: {"axis_flags": axis_flags(axes)},
    "axis": lambda axis: {"axis_mask": axis_flags([axis])},
    "stride": lambda stride: {"x_stride": stride[0], "y_stride": stride[1]},
    "dilationStride": lambda stride: {"x_dilation_stride": stride[0], "y_dilation_stride": stride[1]},
    "kernelSize": lambda size: {"k_width": size[0], "k_height": size[1]},
    "accumulatesToOutput": lambda accumulates: {"beta": 1.0 if accumulates else 0.0},
    "scalesGradientByFrequency": lambda scales: {"flags": c.BNNSEmbeddingFlagScaleGradientByFrequency if scales else 0},
    **dict.fromkeys(("type", "batchSize", "filterParameters", "momentumWeighs"), lambda argument: {}),  # of the call
}


def filled(
    layer: type[Structure], given: Given, optional: Collection[str] = (), fields: Mapping[str, object] | None = None
) -> Structure:
    """A C structure from the arguments of a layer. Optional ones that are None leave their fields zero."""
    values: dict[str, Any] = dict(fields or {})
    for label, value in given.items():
        if value is None and label in optional:
            continue
        if isinstance(value, Value):
            values.update(value.fields)
        elif label in _CONVERTED:
            values.update(_CONVERTED[label](value))
        else:
            values[_FIELDS.get(label, label)] = value.value if isinstance(value, enum.Enum) else value
    return layer(**values)


class Layer:
    """A filter. Its memory is released when the object is deleted, or at the end of a ``with`` block.

    The class of a layer declares its C name, which ends the names of the structure and of the function that creates a
    filter from it, and the labels that fill the structure.
    """

    _filter: Any = None

    def __init_subclass__(cls, layer: str = "", takes: str = "") -> None:
        if not cls.__name__.startswith("_") and cls.__name__.endswith("Layer") and cls.__name__ != "UnaryLayer":
            public(cls)
        if layer:
            labels = _labels(f"{takes} filterParameters?")
            names = {"_made": made, "_filled": filled, "_optional": {one.name for one in labels if one.may_be_none}}
            names |= {"_layer": getattr(c, f"BNNSLayerParameters{layer}")}
            names |= {"_create": getattr(c, f"BNNSFilterCreateLayer{layer}")}
            body = f"self._filter = _made(_create, _filled(_layer, {_given(labels)}, _optional), filterParameters)"
            cls.__init__ = _written(Layer.__init__, labels, True, body, names)  # type: ignore[method-assign]
            cls.__init__.__qualname__ = f"{cls.__qualname__}.__init__"

    def __init__(self) -> None:
        """Create the layer."""

    @property
    def bnnsFilter(self) -> Any:
        """The filter, for the C functions."""
        return self._filter

    def _made(self, label: str) -> Geometry | None:
        """What the layer was made for; None if it was closed."""
        made: Geometry | None = getattr(self._filter, label, None)
        return made

    def close(self) -> None:
        """Release the layer's memory now."""
        c.BNNSFilterDestroy(self._filter)

    def __enter__(self: _L) -> _L:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
