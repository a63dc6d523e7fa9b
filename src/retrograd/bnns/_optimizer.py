"""``BNNSOptimizerStep`` for SGD with momentum, Adam and RMSProp, and the structures of their fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from ..ops._planned import Planned
from ..ops.optimizer import adam_step, rmsprop_step, sgd_step
from . import _constants as c
from ._failure import Invalid, Rename, advise_once, renaming, status, with_apples_names
from ._filter import checked_parameters, unlike, viewed
from ._memory import Array, Floats, as_float, as_size, check_writable, threads_of
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Bool, Float, Structure, UInt32

_Descriptors: TypeAlias = Sequence[BNNSNDArrayDescriptor | None]


class _SGDMomentum(Structure):
    learning_rate: Float
    momentum: Float
    gradient_scale: Float
    regularization_scale: Float


class BNNSOptimizerSGDMomentumFields(_SGDMomentum):
    """SGD with momentum."""

    clip_gradients: Bool
    clip_gradients_min: Float
    clip_gradients_max: Float
    nesterov: Bool
    regularization_func: UInt32
    sgd_momentum_variant: UInt32


class BNNSOptimizerSGDMomentumWithClippingFields(_SGDMomentum):
    """SGD with momentum, with clipping by value, norm or global norm."""

    nesterov: Bool
    regularization_func: UInt32
    sgd_momentum_variant: UInt32
    clipping_func: UInt32
    clip_gradients_min: Float
    clip_gradients_max: Float
    clip_gradients_max_norm: Float
    clip_gradients_use_norm: Float


class _AdamBase(Structure):
    learning_rate: Float
    beta1: Float
    beta2: Float
    time_step: Float
    epsilon: Float
    gradient_scale: Float
    regularization_scale: Float


class BNNSOptimizerAdamFields(_AdamBase):
    """Adam, AdamW and AMSGrad. ``time_step`` starts at 1; the caller increments it."""

    clip_gradients: Bool
    clip_gradients_min: Float
    clip_gradients_max: Float
    regularization_func: UInt32


class BNNSOptimizerAdamWithClippingFields(_AdamBase):
    """Adam, AdamW and AMSGrad, with clipping by value, norm or global norm."""

    regularization_func: UInt32
    clipping_func: UInt32
    clip_gradients_min: Float
    clip_gradients_max: Float
    clip_gradients_max_norm: Float
    clip_gradients_use_norm: Float


class _RMSProp(Structure):
    learning_rate: Float
    alpha: Float
    epsilon: Float
    centered: Bool
    momentum: Float
    gradient_scale: Float
    regularization_scale: Float


class BNNSOptimizerRMSPropFields(_RMSProp):
    """RMSProp."""

    clip_gradients: Bool
    clip_gradients_min: Float
    clip_gradients_max: Float
    regularization_func: UInt32


class BNNSOptimizerRMSPropWithClippingFields(_RMSProp):
    """RMSProp, with clipping by value, norm or global norm."""

    regularization_func: UInt32
    clipping_func: UInt32
    clip_gradients_min: Float
    clip_gradients_max: Float
    clip_gradients_max_norm: Float
    clip_gradients_use_norm: Float


# ---- algorithms -----------------------------------------------------------------------------------------------------

_Sgd: TypeAlias = BNNSOptimizerSGDMomentumFields | BNNSOptimizerSGDMomentumWithClippingFields
_Adam: TypeAlias = BNNSOptimizerAdamFields | BNNSOptimizerAdamWithClippingFields
_RmsProp: TypeAlias = BNNSOptimizerRMSPropFields | BNNSOptimizerRMSPropWithClippingFields
_Fields: TypeAlias = _Sgd | _Adam | _RmsProp
_Options: TypeAlias = dict[str, object]
_COMMON_FLOATS: Final = Floats("learning_rate", "gradient_scale", "regularization_scale")
_ADAM_FLOATS: Final = Floats("time_step", "beta1", "beta2", "epsilon")
_MOMENTS: Final = ("first_moments", "second_moments", "largest_second_moments")


# Each adds options of its array function, and returns the kinds of accumulators in Apple's order, by their names there.


def _sgd(fields: _Sgd, options: _Options) -> tuple[str, ...]:
    momentum = as_float("momentum", fields.momentum)
    # With Nesterov, Apple's third variant equals the second.
    variants = {0: "step", 1: "gradient", 2: "gradient" if fields.nesterov else "descent"}
    if fields.sgd_momentum_variant not in variants:
        raise Invalid(f"sgd_momentum_variant is {fields.sgd_momentum_variant!r}, must be 0, 1 or 2")
    nesterov = bool(fields.nesterov and momentum)
    options.update(momentum=momentum, nesterov=nesterov, velocity_of=variants[fields.sgd_momentum_variant])
    return ("velocities",) if momentum else ()


def _adam(fields: _Adam, options: _Options, kinds: int = 2) -> tuple[str, ...]:
    options["step"], options["beta1"], options["beta2"], options["eps"] = _ADAM_FLOATS(fields)
    options["epsilon_hat"] = True
    return _MOMENTS[:kinds]


def _rmsprop(fields: _RmsProp, options: _Options) -> tuple[str, ...]:
    alpha, eps, momentum = (as_float(name, getattr(fields, name)) for name in ("alpha", "epsilon", "momentum"))
    options.update(alpha=alpha, eps=eps, momentum=momentum, velocity_of="step")
    return ("squares", *(("means",) if fields.centered else ()), *(("velocities",) if momentum else ()))


class _Algorithm(NamedTuple):
    name: str
    structures: tuple[type[Structure], type[Structure]]  # without and with clipping by norms
    step: Callable[..., None]
    read: Callable[..., tuple[str, ...]]
    decoupled: bool = False  # AdamW


_amsgrad: Final = partial(_adam, kinds=3)
_BY_VALUE: Final = (BNNSOptimizerSGDMomentumFields, BNNSOptimizerAdamFields, BNNSOptimizerRMSPropFields)
_SGD_FIELDS: Final = (BNNSOptimizerSGDMomentumFields, BNNSOptimizerSGDMomentumWithClippingFields)
_ADAM_FIELDS: Final = (BNNSOptimizerAdamFields, BNNSOptimizerAdamWithClippingFields)
_RMSPROP_FIELDS: Final = (BNNSOptimizerRMSPropFields, BNNSOptimizerRMSPropWithClippingFields)
_ALGORITHMS: Final = (
    _Algorithm("SGDMomentum", _SGD_FIELDS, sgd_step, _sgd),
    _Algorithm("Adam", _ADAM_FIELDS, adam_step, _adam),
    _Algorithm("RMSProp", _RMSPROP_FIELDS, rmsprop_step, _rmsprop),
    _Algorithm("AdamW", _ADAM_FIELDS, adam_step, _adam, decoupled=True),
    _Algorithm("AdamAMSGrad", _ADAM_FIELDS, adam_step, _amsgrad),
    _Algorithm("AdamWAMSGrad", _ADAM_FIELDS, adam_step, _amsgrad, decoupled=True),
)
_FUNCTIONS: Final[dict[int, tuple[_Algorithm, type[Structure]]]] = {
    getattr(c, f"BNNSOptimizerFunction{algorithm.name}{suffix}"): (algorithm, structure)
    for algorithm in _ALGORITHMS
    for suffix, structure in zip(("", "WithClipping"), algorithm.structures, strict=True)
}


@status(-1)
def BNNSOptimizerStep(
    function: int,
    OptimizerAlgFields: Structure,
    number_of_parameters: int,
    parameters: _Descriptors,
    gradients: _Descriptors,
    accumulators: _Descriptors | None,
    filter_params: BNNSFilterParameters | None = None,
) -> int:
    """Update a list of parameters in place, in one call. 0, or -1 on failure.

    The caller owns the accumulators and zeroes them before the first step. They are grouped by kind: all of the first,
    then all of the second... SGD has one kind with momentum, otherwise none (None). Adam has two, AMSGrad three.
    RMSProp has squares, then means if centered, then velocities if there is momentum.
    """
    chosen = _FUNCTIONS.get(function) if isinstance(function, int) else None
    if chosen is None:
        raise Invalid(f"function is {function!r}, must be from 1 to {len(_FUNCTIONS)}")
    algorithm, structure = chosen
    if type(OptimizerAlgFields) is not structure:
        shown = constant_name("BNNSOptimizerFunction", function)
        raise Invalid(f"{shown} takes {structure.__name__}, not {type(OptimizerAlgFields).__name__}")
    fields: _Fields = OptimizerAlgFields  # type: ignore[assignment]  # it is one of them
    options = _options(fields, algorithm.decoupled)
    kinds = algorithm.read(fields, options)
    if filter_params is not None:
        options["num_threads"] = threads_of(checked_parameters(filter_params).n_threads)
    count = as_size("number_of_parameters", number_of_parameters)
    weights, weight_gradients, *states = _arrays(parameters, gradients, accumulators, count, len(kinds))
    options.update(zip(kinds, states, strict=True))
    try:
        algorithm.step(weights, weight_gradients, **options)
    except (ValueError, TypeError) as error:
        raise with_apples_names(error, _rename(kinds, count)) from None
    if options["learning_rate"] == 0:
        advise_once("learning_rate is 0: the parameters do not change")
    if options["gradient_scale"] == 0:
        advise_once("gradient_scale is 0: gradients have no effect")
    if options.get("clip") == (0, 0):
        advise_once("clip_gradients_min and clip_gradients_max are 0: gradients have no effect")
    if options.get("eps") == 0:
        advise_once("epsilon is 0: parameters whose gradient is 0 become NaN")
    return 0


def _rename(kinds: tuple[str, ...], count: int) -> Rename:
    """From the array functions' argument names to Apple's."""
    names: dict[str, str | Callable[[int], str]] = {
        "eps": "epsilon",
        "step": "time_step",
        "weight_decay": "regularization_scale",
        "l1": "regularization_scale",
        "clip": "(clip_gradients_min, clip_gradients_max)",
        "maximum_norm": "clip_gradients_max_norm",
        "maximum_norm_each": "clip_gradients_max_norm",
        "known_norm": "clip_gradients_use_norm",
    }
    names.update((name, partial(_accumulator, kind * count)) for kind, name in enumerate(kinds))
    return renaming(names)


def _accumulator(first: int, index: int) -> str:
    return f"accumulators[{first + index}]"


def _limit(fields: _Fields, name: str) -> float:
    return as_float(f"clip_gradients_{name}", getattr(fields, f"clip_gradients_{name}"))


def _options(fields: _Fields, decoupled: bool) -> _Options:
    """Options that all optimizers share: learning rate, gradient scale, clipping, regularization."""
    rate, scale, strength = _COMMON_FLOATS(fields)
    options: _Options = {"learning_rate": rate, "gradient_scale": scale, "clip_before_scale": True}
    if decoupled:  # AdamW ignores regularization_func
        options |= {"weight_decay": strength, "decoupled": True}
    elif fields.regularization_func == c.BNNSOptimizerRegularizationL1:
        options["l1"] = strength
    elif fields.regularization_func == c.BNNSOptimizerRegularizationL2:
        options["weight_decay"] = strength
    elif fields.regularization_func != c.BNNSOptimizerRegularizationNone:
        raise Invalid(f"regularization_func is {fields.regularization_func!r}, must be 0, 1 or 2")

    if isinstance(fields, _BY_VALUE):
        clipping = c.BNNSOptimizerClippingByValue if fields.clip_gradients else c.BNNSOptimizerClippingNone
    else:
        clipping = fields.clipping_func
    if clipping == c.BNNSOptimizerClippingByValue:
        options["clip"] = _limit(fields, "min"), _limit(fields, "max")
    elif clipping == c.BNNSOptimizerClippingByNorm:
        options["maximum_norm_each"] = _limit(fields, "max_norm")
    elif clipping == c.BNNSOptimizerClippingByGlobalNorm:
        options |= {"maximum_norm": _limit(fields, "max_norm"), "known_norm": _limit(fields, "use_norm") or None}
    elif clipping != c.BNNSOptimizerClippingNone:
        raise Invalid(f"clipping_func is {clipping!r}, must be from 0 to 3")
    return options


def _arrays(parameters: object, gradients: object, accumulators: object, count: int, kinds: int) -> list[list[Array]]:
    """Lists of `count` arrays: parameters, gradients, and each kind of accumulator."""
    given = [("parameters", parameters, 1), ("gradients", gradients, 1)]
    if kinds:
        given.append(("accumulators", accumulators, kinds))
    descriptors: list[object] = []
    for name, listed, groups in given:
        if not (type(listed) is list or (isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)))):
            shown = "NULL" if listed is None else f"of type {type(listed).__name__}"
            raise Invalid(f"{name} is {shown}, must be a list of descriptors")
        if len(listed) < groups * count:
            raise Invalid(f"{name} has {len(listed)} descriptors, must have {groups * count}")
        descriptors += listed[: groups * count]
    if count == 0:
        return [[] for _ in range(2 + kinds)]
    return _checked_arrays(*descriptors, count)


@Planned
def _checked_arrays(*arguments: object) -> list[list[Array]]:
    """The arrays of the descriptors, in lists of `count`. The last argument is that count."""
    *descriptors, count = arguments
    assert isinstance(count, int)
    checked: list[Array] = []
    for index, descriptor in enumerate(descriptors):
        kind, position = divmod(index, count)
        name = ("parameters", "gradients", "accumulators")[min(kind, 2)]
        label = f"{name}[{position + count * max(kind - 2, 0)}]"
        if not isinstance(descriptor, BNNSNDArrayDescriptor):
            shown = "NULL" if descriptor is None else f"of type {type(descriptor).__name__}"
            raise Invalid(f"{label} is {shown}, must be a BNNSNDArrayDescriptor")
        if descriptor.data_type != c.BNNSDataTypeFloat32:
            shown = constant_name("BNNSDataType", descriptor.data_type)
            raise Invalid(f"{label}.data_type is {shown}, must be BNNSDataTypeFloat32")
        view = viewed(label, descriptor)
        if not view.flags.c_contiguous:
            stride, size = descriptor.stride, descriptor.size
            raise Invalid(f"{label}.stride is {stride!r}, must be 0 or contiguous for size={size!r}")
        if name != "gradients":
            check_writable(f"{label}.data", view)
        like = descriptors[position]
        if isinstance(like, BNNSNDArrayDescriptor) and kind and view.shape != checked[position].shape:
            raise unlike(label, descriptor.geometry(), f"parameters[{position}]", like.geometry())
        checked.append(view)
    return [checked[first : first + count] for first in range(0, len(checked), count)]
