"""Layers with kernels of their own: activations, normalization, convolution, pooling, embedding and dropout.

Their gradients are single calls of the engine. Second derivatives are there where the gradient is made of operations:
for linear layers and convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd as rg

from .. import _core
from ..ops import _args
from ..ops._images import Padding, PerAxis, paddings, per_axis, spatial
from ..ops._norm_problem import NormKind, NormProblem, norm_problem_of
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS, Activation
from ..ops.convolution import conv_problem
from ..ops.normalization import RunningUpdate
from ..ops.pooling import pool_windows, pooled_shape
from .elementwise import add, cast, identity, run_map
from .indexing import as_seed, place_along_axis, refuse_index
from .operation import Operation, Spec
from .product import totals_of
from .reduction import INT64, mean, refuse
from .shaping import broadcast_to, expand_dims, reshape, stack, take_slice
from .tensor import Node, Operand, Tensor, Variable, apply, apply_one, fail

_ONCE: Final = "it is a single call of the engine; second derivatives need a layer made of operations"


# ---- activations -----------------------------------------------------------------------------------------------------


def _activation_shapes(x: Spec, *, activation: Activation) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64; convert it with .astype")
    return (x,)


def _activation(inputs: Sequence[Array], results: Sequence[Array], *, activation: Activation) -> None:
    rg.activation_forward(inputs[0], activation, out=results[0])


def _activation_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return list(apply(_ACTIVATION_BACKWARD, (given[0], node.inputs[0]), node.attributes))


def _activation_backward(inputs: Sequence[Array], results: Sequence[Array], *, activation: Activation) -> None:
    rg.activation_backward(inputs[0], activation, x=inputs[1], out=results[0])


ACTIVATION: Final = Operation(
    "activation", _activation_shapes, compute=_activation, gradient=_activation_gradient, contiguous=(),
    in_place=[(0, 0)], flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip
_ACTIVATION_BACKWARD: Final = Operation(
    "activation_backward", lambda dy, x, *, activation: (x,), compute=_activation_backward, contiguous=(),
    in_place=[(0, 0), (0, 1)], why_not=_ONCE, flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip


def activation(x: Operand, function: str | Activation) -> Tensor:
    """One of the engine's activations, by name; docs/activations.md lists them."""
    try:
        chosen = _args.as_activation(function)
    except (TypeError, ValueError) as error:
        raise fail("activation", str(error), type(error)) from None
    if chosen.name == "identity":
        return identity(x)
    return apply_one(ACTIVATION, (x,), {"activation": chosen})


_activate: Final = activation  # for functions with an argument of that name


def gelu(x: Operand) -> Tensor:
    """x times the probability that a normal variable is below it."""
    return activation(x, "gelu")


def silu(x: Operand) -> Tensor:
    """``x * sigmoid(x)``"""
    return activation(x, "silu")


def softplus(x: Operand) -> Tensor:
    """``log(1 + exp(x))``"""
    return activation(x, "softplus")


def elu(x: Operand, alpha: float = 1.0) -> Tensor:
    """x, or ``alpha * (exp(x) - 1)`` below 0."""
    return activation(x, Activation("elu", alpha))


def leaky_relu(x: Operand, alpha: float = 0.01) -> Tensor:
    """x, or ``alpha * x`` below 0."""
    return activation(x, Activation("leaky_relu", alpha))


# ---- normalization ---------------------------------------------------------------------------------------------------


def _norm(
    x: Spec, kind: NormKind, axis: int, groups: int, eps: float, activation: Activation, slope_from: str
) -> NormProblem:
    return norm_problem_of(kind, x.shape, x.dtype, axis, groups, eps, activation, slope_from)


def _check_parameters(problem: Any, gamma: Spec | None, beta: Spec | None) -> None:
    for name, spec in (("gamma", gamma), ("beta", beta)):
        if spec is not None and spec.shape != problem.parameter_shape:
            raise ValueError(
                f"{name} has shape {spec.shape}, expected {problem.parameter_shape} to match x of shape {problem.shape}"
            )
        if spec is not None and spec.dtype != problem.arithmetic:
            raise TypeError(f"{name} has dtype {spec.dtype}, expected {problem.arithmetic}")


def _norm_shapes(
    x: Spec, gamma: Spec | None, beta: Spec | None, statistics: Spec | None, *, frozen: bool, **options: Any
) -> Sequence[Spec]:
    problem = _norm(x, **options)
    _check_parameters(problem, gamma, beta)
    shape = problem.cache_shape
    if statistics is not None and statistics != Spec(shape, np.dtype(np.float64)):
        raise ValueError(f"mean and variance are {statistics!r}, expected float64{list(shape)}")
    if statistics is not None:
        return (x,)
    return x, Spec(shape, np.dtype(np.float64))


def _norm_forward(
    inputs: Sequence[Array | None], results: Sequence[Array | None], *, frozen: bool, **options: Any
) -> None:
    x, gamma, beta, statistics = inputs
    assert x is not None
    given = statistics is not None
    problem = _norm(Spec(x.shape, x.dtype), **options)
    if problem.engine is None:
        return
    if statistics is None:
        statistics = results[1]
    refuse(problem.engine.forward(x, gamma, beta, results[0], None, statistics, given, False, 0))


def _norm_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, gamma, beta, statistics = node.inputs
    if len(given) > 1 and given[1] is not None:
        raise fail("gradients", "the statistics of a normalization have no gradient; use mean and var", TypeError)
    if needed[3]:
        raise fail("gradients", "given statistics of a normalization have no gradient; use mean and var", TypeError)
    if given[0] is None:
        return [None] * 4
    saved = statistics if statistics is not None else node.results[1]
    problem = _norm(x.spec, **{k: v for k, v in node.attributes.items() if k != "frozen"})  # type: ignore[union-attr]
    y = node.results[0] if problem.needs_y else None
    attributes = {**node.attributes, "given": statistics is not None}
    dx, dgamma, dbeta = apply(NORM_BACKWARD, (given[0], x, y, gamma, beta, saved), attributes)
    return [dx, dgamma if gamma is not None else None, dbeta if beta is not None else None, None]


NORM: Final = Operation(
    "norm", _norm_shapes, compute=_norm_forward, gradient=_norm_gradient, contiguous=(1, 2, 3),
    flops=lambda inputs, results, **_: 8.0 * inputs[0].elements,
)  # fmt: skip


def _norm_backward(
    inputs: Sequence[Array | None], results: Sequence[Array | None], *, frozen: bool, given: bool, **options: Any
) -> None:
    dy, x, y, gamma, beta, statistics = inputs
    assert x is not None
    problem = _norm(Spec(x.shape, x.dtype), **options)
    dx, dgamma, dbeta = results
    if problem.engine is None:
        for array in (dgamma, dbeta):
            if array is not None:
                run_map([], [], [0.0], [array], [0])
        return
    cache = (problem, x, y, gamma, beta, statistics, given, frozen)
    refuse(problem.engine.backward(dy, cache, None, None, None, dx, dgamma, dbeta, False, False, 0))


def _norm_backward_shapes(
    dy: Spec, x: Spec, y: Spec | None, gamma: Spec | None, beta: Spec | None, statistics: Spec, **options: Any
) -> Sequence[Spec]:
    problem = _norm(x, **{k: v for k, v in options.items() if k not in ("frozen", "given")})
    parameter = Spec(problem.parameter_shape, problem.arithmetic)
    return x, parameter, parameter


NORM_BACKWARD: Final = Operation(
    "norm_backward", _norm_backward_shapes, compute=_norm_backward, contiguous=(3, 4, 5), in_place=[(0, 0)],
    optional=(0, 1, 2), why_not=_ONCE, flops=lambda inputs, results, **_: 12.0 * inputs[0].elements,
)  # fmt: skip


def _normalize(
    kind: NormKind,
    x: Operand,
    gamma: Operand | None,
    beta: Operand | None,
    statistics: Operand | None,
    axis: int,
    groups: int,
    eps: float,
    activation: str | Activation | None,
    slope_from: str,
    frozen: bool = False,
) -> tuple[Any, ...]:
    options = {
        "kind": kind, "axis": axis, "groups": groups, "eps": float(eps), "activation": _args.as_activation(activation),
        "slope_from": slope_from, "frozen": frozen,
    }  # fmt: skip
    return apply(NORM, (x, gamma, beta, statistics), options)


def batch_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    training: bool = True,
    running_mean: Variable | None = None,
    running_var: Variable | None = None,
    update: RunningUpdate = RunningUpdate.pytorch(),  # noqa: B008 (immutable)
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Each channel normalized over samples and space, as :func:`retrograd.batch_norm_forward`.

    In training the running statistics, if given, are assigned their new values; in evaluation they are used.
    """
    options = {"axis": channel_axis, "eps": eps, "activation": activation, "slope_from": slope_from}
    return _running_norm(
        "batch_norm", x, gamma, beta, options, training=training, running=(running_mean, running_var), update=update
    )


def _running_norm(
    kind: NormKind,
    x: Operand,
    gamma: Operand | None,
    beta: Operand | None,
    options: dict[str, Any],
    *,
    training: bool,
    running: tuple[Variable | None, Variable | None],
    update: RunningUpdate,
) -> Tensor:
    running_mean, running_var = running
    if (running_mean is None) != (running_var is None):
        raise fail(kind, "running_mean and running_var belong together; one of them is missing")
    if not training:
        if running_mean is None or running_var is None:
            raise fail(kind, "evaluation needs running_mean and running_var")
        given = stack([cast(running_mean, np.float64), cast(running_var, np.float64)])
        if kind == "instance_norm":  # the same for every sample
            samples = identity(x).shape[0]
            given = broadcast_to(expand_dims(given, 1), (2, samples, running_mean.size))
        evaluated: Tensor = _normalize(kind, x, gamma, beta, given, groups=1, frozen=True, **options)[0]
        return evaluated
    y, statistics = _normalize(kind, x, gamma, beta, None, groups=1, **options)
    sets = statistics.size // 2
    if running_mean is not None and running_var is not None and sets:
        if kind == "instance_norm":
            statistics = mean(statistics, 1)
        _update_running(running_mean, running_var, statistics, y.size // sets, update)
    normalized: Tensor = y
    return normalized


def _update_running(
    running_mean: Variable, running_var: Variable, statistics: Tensor, count: int, update: RunningUpdate
) -> None:
    if count == 0:
        return
    center, var = take_slice(statistics, 0), take_slice(statistics, 1)
    if update.unbiased and count > 1:
        var = var * (count / (count - 1))
    for variable, batch in ((running_mean, center), (running_var, var)):
        variable.assign(cast(moved(variable, batch, update)[1], variable.dtype))


def moved(variable: Variable, batch: Tensor, update: RunningUpdate) -> tuple[Tensor, Tensor]:
    """A running statistic before and after a batch, in float64."""
    old = cast(identity(variable), np.float64)
    return old, add(old * update.keep, batch * (1.0 - update.keep))


def instance_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    training: bool = True,
    running_mean: Variable | None = None,
    running_var: Variable | None = None,
    update: RunningUpdate = RunningUpdate.pytorch(),  # noqa: B008 (immutable)
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Each channel of each sample normalized over space, as :func:`retrograd.instance_norm_forward`.

    Running statistics are per channel, updated by the mean over the samples.
    """
    options = {"axis": channel_axis, "eps": eps, "activation": activation, "slope_from": slope_from}
    return _running_norm(
        "instance_norm", x, gamma, beta, options, training=training, running=(running_mean, running_var), update=update
    )


def layer_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Normalized over the axes from `axis` to the last, as :func:`retrograd.layer_norm_forward`."""
    found: Tensor = _normalize("layer_norm", x, gamma, beta, None, axis, 1, eps, activation, slope_from)[0]
    return found


def group_norm(
    x: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    *,
    num_groups: int,
    eps: float = 1e-5,
    channel_axis: int = 1,
    activation: str | Activation | None = None,
    slope_from: str = "output",
) -> Tensor:
    """Normalized over space and groups of channels, as :func:`retrograd.group_norm_forward`."""
    found: Tensor = _normalize(
        "group_norm", x, gamma, beta, None, channel_axis, num_groups, eps, activation, slope_from
    )[0]  # fmt: skip
    return found


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv_shapes(x: Spec, w: Spec, b: Spec | None, **options: Any) -> Sequence[Spec]:
    problem = _conv_problem(x, w, options)
    for name, spec in (("w", w), ("b", b)):
        if spec is not None and spec.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {spec.dtype}, but x has {x.dtype}")
    if b is not None and b.shape != (problem.outputs,):
        raise ValueError(f"b has shape {b.shape}, but the result has {problem.outputs} channels")
    return (Spec(problem.y_shape, x.dtype),)


def _conv_problem(x: Spec, w: Spec, options: dict[str, Any]) -> Any:
    o = options
    return conv_problem(
        x.shape, w.shape, o["stride"], o["padding"], o["output_padding"], o["dilation"], o["groups"], o["channels_last"]
    )


def _conv_options(options: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether it is transposed, and the options of the array functions."""
    passed = dict(options)
    if passed["output_padding"] is None:
        del passed["output_padding"]
        return False, passed
    return True, passed


def _conv(inputs: Sequence[Array], results: Sequence[Array], **options: Any) -> None:
    transposed, passed = _conv_options(options)
    function = rg.conv_transpose_forward if transposed else rg.conv_forward
    function(*inputs, out=results[0], **passed)


def _conv_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    x, w, _ = node.inputs
    options = {k: v for k, v in node.attributes.items() if k != "activation"}
    if node.attributes["activation"] is not None:
        dy: Any = apply(
            _SLOPE_FROM_OUTPUT, (given[0], node.results[0]), {"activation": node.attributes["activation"]}
        )[0]  # fmt: skip
    else:
        dy = given[0]
    found = apply(_CONV_BACKWARD, (dy, x, w), options)
    return [t if wanted else None for t, wanted in zip(found, needed, strict=True)]


def _output_slope(inputs: Sequence[Array], results: Sequence[Array], *, activation: Activation) -> None:
    rg.activation_backward(inputs[0], activation, y=inputs[1], out=results[0])


_SLOPE_FROM_OUTPUT: Final = Operation(
    "activation_output_slope", lambda dy, y, *, activation: (y,), compute=_output_slope, contiguous=(),
    in_place=[(0, 0), (0, 1)], why_not=_ONCE, flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip


def _conv_flops(inputs: Sequence[Spec], results: Sequence[Spec], **_: Any) -> float:
    return 2.0 * results[0].elements * inputs[1].elements / max(1, inputs[1].shape[0])


CONV: Final = Operation(
    "conv", _conv_shapes, compute=_conv, gradient=_conv_gradient, contiguous=(2,), flops=_conv_flops
)  # fmt: skip


def _conv_backward(inputs: Sequence[Array], results: Sequence[Array | None], **options: Any) -> None:
    transposed, passed = _conv_options(options)
    function = rg.conv_transpose_backward if transposed else rg.conv_backward
    need = [name for name, array in zip(("dx", "dw", "db"), results, strict=True) if array is not None]
    function(*inputs, need=need, out=rg.ConvGradients(*results), **passed)


def _conv_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (dy, x, w), (gdx, gdw, gdb) = node.inputs, given
    options, forward = node.attributes, {**node.attributes, "activation": None}
    parts: list[list[Tensor]] = [[], [], []]
    if gdx is not None:
        parts[0].append(apply(CONV, (gdx, w, None), forward)[0])
        parts[2].append(apply(_CONV_BACKWARD, (dy, gdx, w), options)[1])
    if gdw is not None:
        parts[0].append(apply(CONV, (x, gdw, None), forward)[0])
        parts[1].append(apply(_CONV_BACKWARD, (dy, x, gdw), options)[0])
    if gdb is not None:
        assert dy is not None
        last = options["channels_last"]
        shape = (-1,) if last else (-1, *(1,) * (dy.ndim - 2))
        parts[0].append(broadcast_to(reshape(gdb, shape), dy.shape))
    return totals_of(parts, needed)


def _conv_backward_shapes(dy: Spec, x: Spec, w: Spec, **options: Any) -> Sequence[Spec]:
    return x, w, Spec((_conv_problem(x, w, options).outputs,), x.dtype)


_CONV_BACKWARD: Final = Operation(
    "conv_backward", _conv_backward_shapes, compute=_conv_backward, gradient=_conv_second, contiguous=(),
    optional=(0, 1, 2),
    flops=lambda inputs, results, **_: 4.0 * inputs[0].elements * inputs[2].elements / max(1, inputs[2].shape[0]),
)  # fmt: skip


def conv(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
) -> Tensor:
    """A convolution of images, with 1 or 2 spatial axes, as :func:`retrograd.conv_forward`."""
    return _convolve(x, w, b, stride, padding, None, dilation, groups, channels_last, activation)


def conv_transpose(
    x: Operand,
    w: Operand,
    b: Operand | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
    activation: str | Activation | None = None,
) -> Tensor:
    """A transposed convolution of images, as :func:`retrograd.conv_transpose_forward`."""
    return _convolve(x, w, b, stride, padding, output_padding, dilation, groups, channels_last, activation)


def _convolve(
    x: Operand,
    w: Operand,
    b: Operand | None,
    stride: PerAxis,
    padding: Padding,
    output_padding: PerAxis | None,
    dilation: PerAxis,
    groups: int,
    channels_last: bool,
    activation: str | Activation | None,
) -> Tensor:
    images = identity(x)
    try:
        axes = len(spatial("x", images.shape, channels_last))
        options = {
            "stride": per_axis("stride", stride, axes, 1),
            "padding": paddings(padding, axes),
            "output_padding": None if output_padding is None else per_axis("output_padding", output_padding, axes, 0),
            "dilation": per_axis("dilation", dilation, axes, 1),
            "groups": _args.as_count("groups", groups),
            "channels_last": bool(channels_last),
        }
        chosen = None if activation is None else _args.as_activation(activation)
    except (TypeError, ValueError) as error:
        raise fail("conv", str(error), type(error)) from None
    # One whose slope the output does not determine is a node of its own.
    apart = chosen is not None and bool(ACTIVATIONS[chosen.name].needs_input)
    found: Tensor = apply(CONV, (images, w, b), {**options, "activation": None if apart else chosen})[0]
    return _activate(found, chosen) if apart and chosen is not None else found


# ---- pooling ---------------------------------------------------------------------------------------------------------


def _pool_shapes(x: Spec, *, kind: str, **options: Any) -> Sequence[Spec]:
    o = options
    windows = pool_windows(
        spatial("x", x.shape, o["channels_last"]), o["kernel"], o["stride"], o["padding"], o["dilation"],
        "the largest value" if kind == "max" else "" if kind == "l2" or o["count_includes_padding"] else "the average",
    )  # fmt: skip
    y = Spec(pooled_shape(x.shape, windows.outputs, o["channels_last"]), x.dtype)
    return (y, Spec(y.shape, np.dtype(np.int32))) if kind == "max" else (y,)


def _pool_options(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    unused = {
        "max": ("count_includes_padding",),
        "average": ("dilation",),
        "l2": ("dilation", "count_includes_padding"),
    }
    return {k: v for k, v in options.items() if k not in unused[kind]}


def _pool(inputs: Sequence[Array], results: Sequence[Array | None], *, kind: str, **options: Any) -> None:
    passed = _pool_options(kind, options)
    if kind == "max":
        y, indices = results
        rg.max_pool_forward(
            inputs[0], **passed, return_indices=indices is not None, out=rg.MaxPoolResult(y, indices)
        )  # fmt: skip
    else:
        function = rg.average_pool_forward if kind == "average" else rg.l2_pool_forward
        function(inputs[0], **passed, out=results[0])


def _pool_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    assert x is not None
    kind = node.attributes["kind"]
    saved = {"max": (node.results[-1],), "average": (), "l2": (x, node.results[0])}[kind]
    return list(apply(_POOL_BACKWARD, (given[0], *saved), {**node.attributes, "shape": x.shape}))


POOL: Final = Operation("pool", _pool_shapes, compute=_pool, gradient=_pool_gradient, optional=(1,))


def _pool_backward(
    inputs: Sequence[Array], results: Sequence[Array], *, kind: str, shape: tuple[int, ...], **options: Any
) -> None:
    passed = _pool_options(kind, options)
    if kind == "max":
        dy, indices = inputs
        rg.max_pool_backward(dy, indices, shape, channels_last=options["channels_last"], out=results[0])
    elif kind == "average":
        rg.average_pool_backward(inputs[0], shape, **passed, out=results[0])
    else:
        dy, x, y = inputs
        rg.l2_pool_backward(dy, x, y, **passed, out=results[0])


_POOL_BACKWARD: Final = Operation(
    "pool_backward", lambda dy, *saved, shape, **_: (Spec(shape, dy.dtype),), compute=_pool_backward, why_not=_ONCE
)


class MaxPool(NamedTuple):
    """The largest values, and their positions h * W + w in the planes of x, as int32."""

    y: Tensor
    indices: Tensor


def _pooled(
    kind: str,
    x: Operand,
    kernel: PerAxis,
    stride: PerAxis | None,
    padding: Padding,
    dilation: PerAxis,
    count_includes_padding: bool,
    channels_last: bool,
) -> tuple[Any, ...]:
    images = identity(x)
    try:
        axes = len(spatial("x", images.shape, channels_last))
        kernels = per_axis("kernel", kernel, axes, 1)
        options = {
            "kind": kind,
            "kernel": kernels,
            "stride": kernels if stride is None else per_axis("stride", stride, axes, 1),
            "padding": paddings(padding, axes),
            "dilation": per_axis("dilation", dilation, axes, 1),
            "count_includes_padding": bool(count_includes_padding),
            "channels_last": bool(channels_last),
        }
    except (TypeError, ValueError) as error:
        raise fail(f"{kind}_pool", str(error), type(error)) from None
    return apply(POOL, (images,), options)


def max_pool(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
) -> Tensor:
    """The largest value of each window, as :func:`retrograd.max_pool_forward`; the gradient goes to the first one."""
    return max_pool_indices(x, kernel, stride=stride, padding=padding, dilation=dilation, channels_last=channels_last).y


def max_pool_indices(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
) -> MaxPool:
    """The largest value of each window and where it is, for :func:`max_unpool`."""
    return MaxPool(*_pooled("max", x, kernel, stride, padding, dilation, True, channels_last))


def max_unpool(x: Operand, indices: Operand, shape: Sequence[int], *, channels_last: bool = False) -> Tensor:
    """Zeros of this shape, with the elements of x at `indices` of their planes.

    As :func:`retrograd.max_unpool_forward`, but where an index occurs more than once, in windows that overlap, the
    elements are added.
    """
    values, places = identity(x), identity(indices)
    if values.shape != places.shape or len(shape) != values.ndim:
        raise fail("max_unpool", f"x has shape {values.shape}, indices {places.shape}, and shape is {tuple(shape)}")
    axis = 1 if channels_last else -1
    sizes = spatial("shape", tuple(shape), channels_last)
    planes = (shape[0], -1, shape[-1]) if channels_last else (*shape[:2], -1)
    flat = place_along_axis(reshape(values, planes), reshape(places, planes), math.prod(sizes), axis)
    return reshape(flat, tuple(shape))


def average_pool(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    count_includes_padding: bool = True,
    channels_last: bool = False,
) -> Tensor:
    """The average of each window, as :func:`retrograd.average_pool_forward`."""
    found: Tensor = _pooled("average", x, kernel, stride, padding, 1, count_includes_padding, channels_last)[0]
    return found


def l2_pool(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    channels_last: bool = False,
) -> Tensor:
    """The L2 norm of each window, as :func:`retrograd.l2_pool_forward`."""
    found: Tensor = _pooled("l2", x, kernel, stride, padding, 1, True, channels_last)[0]
    return found


# ---- embedding -------------------------------------------------------------------------------------------------------


def _embedding_shapes(indices: Spec, table: Spec) -> Sequence[Spec]:
    if indices.dtype != INT64:
        raise TypeError(f"indices has dtype {indices.dtype}, must be int64; convert it with .astype")
    if len(table.shape) != 2 or table.dtype.kind != "f":
        raise ValueError(f"table is {table!r}, must be [rows, width] of floats")
    return (Spec((*indices.shape, table.shape[1]), table.dtype),)


def _embedding(inputs: Sequence[Array], results: Sequence[Array]) -> None:
    (indices, table), (y,) = inputs, results
    rows = y.reshape(-1, table.shape[1]) if y.size else y.reshape(indices.size, table.shape[1])
    answer = _core.embedding_forward(table.dtype.itemsize == 8, indices.reshape(-1), table, rows, False, 0)
    refuse_index(answer, indices, table.shape[0])


def _embedding_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    indices, table = node.inputs
    assert table is not None
    return [None, apply(_EMBEDDING_BACKWARD, (given[0], indices), {"rows": table.shape[0]})[0]]


EMBEDDING: Final = Operation(
    "embedding", _embedding_shapes, compute=_embedding, gradient=_embedding_gradient, contiguous=(0,)
)


def _embedding_backward(inputs: Sequence[Array], results: Sequence[Array], *, rows: int) -> None:
    (dy, indices), (dtable,) = inputs, results
    flat = dy.reshape(indices.size, dy.shape[-1])
    refuse_index(
        _core.embedding_backward(dy.dtype.itemsize == 8, flat, indices.reshape(-1), dtable, False, False, 0)
    )  # fmt: skip


def _embedding_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(EMBEDDING, (node.inputs[1], given[0]))[0], None]


_EMBEDDING_BACKWARD: Final = Operation(
    "embedding_backward",
    lambda dy, indices, *, rows: (Spec((rows, dy.shape[-1]), dy.dtype),),
    compute=_embedding_backward,
    gradient=_embedding_second,
)


def embedding(indices: Operand, table: Operand) -> Tensor:
    """The rows of `table` that integer `indices`, of any shape, select."""
    return apply_one(EMBEDDING, (identity(indices), table), dtype=INT64)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _dropout_shapes(x: Spec, seed: Spec, *, rate: float) -> Sequence[Spec]:
    if x.dtype.kind != "f":
        raise TypeError(f"x has dtype {x.dtype}, must be float32 or float64")
    if seed != Spec((), INT64):
        raise TypeError(f"seed is {seed!r}, must be one int64")
    return (x,)


def _dropout(inputs: Sequence[Array], results: Sequence[Array], *, rate: float) -> None:
    x, seed = inputs
    refuse(_core.dropout(x.dtype.itemsize == 8, x.reshape(-1), rate, seed, results[0].reshape(-1), False, 0))


def _dropout_gradient(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [apply(DROPOUT, (given[0], node.inputs[1]), node.attributes)[0], None]


DROPOUT: Final = Operation(
    "dropout", _dropout_shapes, compute=_dropout, gradient=_dropout_gradient, in_place=[(0, 0)],
    flops=lambda inputs, results, **_: inputs[0].elements,
)  # fmt: skip


def dropout(x: Operand, rate: float, *, seed: Operand) -> Tensor:
    """x with a fraction `rate` of its elements set to 0, the others divided by ``1 - rate``.

    The mask is the one that :func:`retrograd.dropout` draws for the seed, an int64 without axes: a number, or a counter
    that the program keeps, `graph.counter()`, so that every run has another mask.
    """
    if not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise fail("dropout", f"rate is {rate}, must be at least 0 and below 1")
    if rate == 0:
        return identity(x)
    return apply_one(DROPOUT, (x, as_seed(seed)), {"rate": float(rate)})
