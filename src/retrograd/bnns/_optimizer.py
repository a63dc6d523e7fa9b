"""``BNNSOptimizerStep`` for SGD with momentum, Adam and RMSProp, and the structures of their fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

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


class _Adam(Structure):
    learning_rate: Float
    beta1: Float
    beta2: Float
    time_step: Float
    epsilon: Float
    gradient_scale: Float
    regularization_scale: Float


class BNNSOptimizerAdamFields(_Adam):
    """Adam, AdamW and AMSGrad. ``time_step`` starts at 1; the caller increments it."""

    clip_gradients: Bool
    clip_gradients_min: Float
    clip_gradients_max: Float
    regularization_func: UInt32


class BNNSOptimizerAdamWithClippingFields(_Adam):
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


class _Function(NamedTuple):
    fields: type[Structure]
    decoupled: bool = False  # AdamW
    amsgrad: bool = False


_COMMON_FLOATS: Final = Floats("learning_rate", "gradient_scale", "regularization_scale")
_ADAM_FLOATS: Final = Floats("time_step", "beta1", "beta2", "epsilon")
_SGD_FIELDS: Final = (BNNSOptimizerSGDMomentumFields, BNNSOptimizerSGDMomentumWithClippingFields)
_ADAM_FIELDS: Final = (BNNSOptimizerAdamFields, BNNSOptimizerAdamWithClippingFields)
_RMSPROP_FIELDS: Final = (BNNSOptimizerRMSPropFields, BNNSOptimizerRMSPropWithClippingFields)
_FUNCTIONS: Final = {
    c.BNNSOptimizerFunctionSGDMomentum: _Function(_SGD_FIELDS[0]),
    c.BNNSOptimizerFunctionAdam: _Function(_ADAM_FIELDS[0]),
    c.BNNSOptimizerFunctionRMSProp: _Function(BNNSOptimizerRMSPropFields),
    c.BNNSOptimizerFunctionAdamW: _Function(_ADAM_FIELDS[0], decoupled=True),
    c.BNNSOptimizerFunctionAdamAMSGrad: _Function(_ADAM_FIELDS[0], amsgrad=True),
    c.BNNSOptimizerFunctionAdamWAMSGrad: _Function(_ADAM_FIELDS[0], decoupled=True, amsgrad=True),
    c.BNNSOptimizerFunctionSGDMomentumWithClipping: _Function(_SGD_FIELDS[1]),
    c.BNNSOptimizerFunctionAdamWithClipping: _Function(_ADAM_FIELDS[1]),
    c.BNNSOptimizerFunctionRMSPropWithClipping: _Function(BNNSOptimizerRMSPropWithClippingFields),
    c.BNNSOptimizerFunctionAdamWWithClipping: _Function(_ADAM_FIELDS[1], decoupled=True),
    c.BNNSOptimizerFunctionAdamAMSGradWithClipping: _Function(_ADAM_FIELDS[1], amsgrad=True),
    c.BNNSOptimizerFunctionAdamWAMSGradWithClipping: _Function(_ADAM_FIELDS[1], decoupled=True, amsgrad=True),
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
    fields: Any = OptimizerAlgFields
    if type(fields) is not chosen.fields:
        shown = constant_name("BNNSOptimizerFunction", function)
        raise Invalid(f"{shown} takes {chosen.fields.__name__}, not {type(fields).__name__}")
    options = _options(fields, chosen.decoupled)
    if filter_params is not None:
        options["num_threads"] = threads_of(checked_parameters(filter_params).n_threads)
    count = as_size("number_of_parameters", number_of_parameters)
    kinds, momentum = _accumulators(fields, chosen)
    weights, weight_gradients, *states = _arrays(parameters, gradients, accumulators, count, kinds)
    try:
        _step(chosen, fields, momentum, weights, weight_gradients, states, options)
    except (ValueError, TypeError) as error:
        raise with_apples_names(error, _rename(fields, count)) from None
    if options["learning_rate"] == 0:
        advise_once("learning_rate is 0: the parameters do not change")
    if options["gradient_scale"] == 0:
        advise_once("gradient_scale is 0: gradients have no effect")
    if options.get("clip") == (0, 0):
        advise_once("clip_gradients_min and clip_gradients_max are 0: gradients have no effect")
    if as_float("epsilon", getattr(fields, "epsilon", 1.0)) == 0:
        advise_once("epsilon is 0: parameters whose gradient is 0 become NaN")
    return 0


def _step(
    chosen: _Function,
    fields: Any,
    momentum: float,
    weights: list[Array],
    gradients: list[Array],
    states: list[list[Array]],
    options: dict[str, Any],
) -> None:
    if isinstance(fields, _SGD_FIELDS):
        # With Nesterov, Apple's third variant equals the second.
        variants = {0: "step", 1: "gradient", 2: "gradient" if fields.nesterov else "descent"}
        velocity_of = variants.get(fields.sgd_momentum_variant)
        if velocity_of is None:
            raise Invalid(f"sgd_momentum_variant is {fields.sgd_momentum_variant!r}, must be 0, 1 or 2")
        sgd_step(
            weights,
            gradients,
            *states,
            momentum=momentum,
            nesterov=bool(fields.nesterov and momentum),
            velocity_of=velocity_of,  # type: ignore[arg-type]
            **options,
        )
    elif isinstance(fields, _ADAM_FIELDS):
        step, beta1, beta2, eps = _ADAM_FLOATS(fields)
        adam_step(
            weights,
            gradients,
            *states,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            epsilon_hat=True,
            decoupled=chosen.decoupled,
            **options,
        )
    elif isinstance(fields, _RMSPROP_FIELDS):
        rmsprop_step(
            weights,
            gradients,
            states[0],
            means=states[1] if fields.centered else None,
            velocities=states[-1] if momentum else None,
            alpha=as_float("alpha", fields.alpha),
            eps=as_float("epsilon", fields.epsilon),
            momentum=momentum,
            velocity_of="step",
            **options,
        )


def _rename(fields: Any, count: int) -> Rename:
    """From the array functions' argument names to Apple's."""
    kinds: dict[str, int] = {"velocities": 0}
    if isinstance(fields, _ADAM_FIELDS):
        kinds = {"first_moments": 0, "second_moments": 1, "largest_second_moments": 2}
    elif isinstance(fields, _RMSPROP_FIELDS):
        kinds = {"squares": 0, "means": 1, "velocities": 1 + bool(fields.centered)}
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
    for name, kind in kinds.items():
        names[name] = partial(_accumulator, kind * count)
    return renaming(names)


def _accumulator(first: int, index: int) -> str:
    return f"accumulators[{first + index}]"


def _options(fields: Any, decoupled: bool) -> dict[str, Any]:
    """Options that all optimizers share: learning rate, gradient scale, clipping, regularization."""
    rate, scale, strength = _COMMON_FLOATS(fields)
    options: dict[str, Any] = {"learning_rate": rate, "gradient_scale": scale, "clip_before_scale": True}
    if decoupled:  # AdamW ignores regularization_func
        options["weight_decay"] = strength
    elif fields.regularization_func == c.BNNSOptimizerRegularizationL1:
        options["l1"] = strength
    elif fields.regularization_func == c.BNNSOptimizerRegularizationL2:
        options["weight_decay"] = strength
    elif fields.regularization_func != c.BNNSOptimizerRegularizationNone:
        raise Invalid(f"regularization_func is {fields.regularization_func!r}, must be 0, 1 or 2")

    if hasattr(fields, "clipping_func"):
        clipping = fields.clipping_func
    else:
        clipping = c.BNNSOptimizerClippingByValue if fields.clip_gradients else c.BNNSOptimizerClippingNone
    if clipping == c.BNNSOptimizerClippingByValue:
        low, high = fields.clip_gradients_min, fields.clip_gradients_max
        options["clip"] = as_float("clip_gradients_min", low), as_float("clip_gradients_max", high)
    elif clipping == c.BNNSOptimizerClippingByNorm:
        options["maximum_norm_each"] = as_float("clip_gradients_max_norm", fields.clip_gradients_max_norm)
    elif clipping == c.BNNSOptimizerClippingByGlobalNorm:
        options["maximum_norm"] = as_float("clip_gradients_max_norm", fields.clip_gradients_max_norm)
        options["known_norm"] = as_float("clip_gradients_use_norm", fields.clip_gradients_use_norm) or None
    elif clipping != c.BNNSOptimizerClippingNone:
        raise Invalid(f"clipping_func is {clipping!r}, must be from 0 to 3")
    return options


def _accumulators(fields: Any, chosen: _Function) -> tuple[int, float]:
    """The number of kinds of accumulators, and the momentum that it depends on."""
    if isinstance(fields, _ADAM_FIELDS):
        return 3 if chosen.amsgrad else 2, 0.0
    momentum = as_float("momentum", fields.momentum)
    always = 0 if isinstance(fields, _SGD_FIELDS) else 1 + bool(fields.centered)
    return always + int(momentum != 0), momentum


def _arrays(parameters: Any, gradients: Any, accumulators: Any, count: int, kinds: int) -> list[list[Array]]:
    """Lists of `count` arrays: parameters, gradients, and each kind of accumulator."""
    given = [("parameters", parameters, 1), ("gradients", gradients, 1)]
    if kinds:
        given.append(("accumulators", accumulators, kinds))
    descriptors: list[Any] = []
    for name, listed, groups in given:
        if type(listed) is not list and (not isinstance(listed, Sequence) or isinstance(listed, (str, bytes))):
            shown = "NULL" if listed is None else f"of type {type(listed).__name__}"
            raise Invalid(f"{name} is {shown}, must be a list of descriptors")
        if len(listed) < groups * count:
            raise Invalid(f"{name} has {len(listed)} descriptors, must have {groups * count}")
        descriptors += listed[: groups * count]
    if count == 0:
        return [[] for _ in range(2 + kinds)]
    return _checked_arrays(*descriptors, count)


@Planned
def _checked_arrays(*arguments: Any) -> list[list[Array]]:
    """The arrays of the descriptors, in lists of `count`. The last argument is that count."""
    *descriptors, count = arguments
    checked: list[Array] = []
    for index, descriptor in enumerate(descriptors):
        kind, position = divmod(index, count)
        name = ("parameters", "gradients", "accumulators")[min(kind, 2)]
        label = f"{name}[{position + count * max(kind - 2, 0)}]"
        array = _checked_array(label, descriptor, name != "gradients")
        if kind and array.shape != checked[position].shape:
            raise unlike(label, descriptor.geometry(), f"parameters[{position}]", descriptors[position].geometry())
        checked.append(array)
    return [checked[first : first + count] for first in range(0, len(checked), count)]


def _checked_array(name: str, descriptor: Any, written: bool) -> Array:
    if not isinstance(descriptor, BNNSNDArrayDescriptor):
        shown = "NULL" if descriptor is None else f"of type {type(descriptor).__name__}"
        raise Invalid(f"{name} is {shown}, must be a BNNSNDArrayDescriptor")
    if descriptor.data_type != c.BNNSDataTypeFloat32:
        shown = constant_name("BNNSDataType", descriptor.data_type)
        raise Invalid(f"{name}.data_type is {shown}, must be BNNSDataTypeFloat32")
    view = viewed(name, descriptor)
    if not view.flags.c_contiguous:
        raise Invalid(f"{name}.stride is {descriptor.stride!r}, must be 0 or contiguous for size={descriptor.size!r}")
    if written:
        check_writable(f"{name}.data", view)
    return view
