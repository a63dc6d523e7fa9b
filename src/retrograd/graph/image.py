"""Convolution and pooling of images, with one or two spatial axes, and their gradients as functions of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd as rg

from ..ops import _args
from ..ops._images import Padding, PerAxis, paddings, per_axis, spatial
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS, Activation
from ..ops.convolution import conv_problem
from ..ops.pooling import pool_windows, pooled_shape
from .elementwise import identity, multiply
from .indexing import place_along_axis, take_along_axis
from .layer import ONCE
from .layer import activation as activate
from .operation import Operation, Spec
from .product import totals_of
from .shaping import broadcast_to, reshape, zeros
from .tensor import Node, Operand, Tensor, apply, apply_one, fail

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
    in_place=[(0, 0), (0, 1)], why_not=ONCE, flops=lambda inputs, results, **_: inputs[0].elements,
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
    return activate(found, chosen) if apart and chosen is not None else found


def _conv_shape_options(
    dy: Operand, x_shape: Sequence[int], w_shape: Sequence[int], stride: PerAxis, padding: Padding, dilation: PerAxis,
    groups: int, channels_last: bool,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """dy, and the options of the convolution from `x_shape` by `w_shape` that it belongs to."""
    given = identity(dy)
    axes = len(spatial("x_shape", tuple(x_shape), channels_last))
    options = {
        "stride": per_axis("stride", stride, axes, 1),
        "padding": paddings(padding, axes),
        "output_padding": None,
        "dilation": per_axis("dilation", dilation, axes, 1),
        "groups": _args.as_count("groups", groups),
        "channels_last": bool(channels_last),
    }
    expected = _conv_problem(Spec(tuple(x_shape), given.dtype), Spec(tuple(w_shape), given.dtype), options).y_shape
    if given.shape != expected:
        raise ValueError(
            f"dy has shape {given.shape}, but the convolution of x of shape {tuple(x_shape)} by weights of shape "
            f"{tuple(w_shape)} has {expected}"
        )
    return given, options


def conv_input_gradient(
    dy: Operand,
    weight: Operand,
    x_shape: Sequence[int],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
) -> Tensor:
    """The gradient of the input, of shape `x_shape`, of :func:`conv` with these weights and options."""
    w = identity(weight)
    try:
        given, options = _conv_shape_options(dy, x_shape, w.shape, stride, padding, dilation, groups, channels_last)
    except (TypeError, ValueError) as error:
        raise fail("conv_input_gradient", str(error), type(error)) from None
    extras = []
    sizes = zip(spatial("x", tuple(x_shape), channels_last), w.shape[2:], strict=True)
    for (size, kernel), step, apart, pads in zip(
        sizes, options["stride"], options["dilation"], options["padding"], strict=True
    ):
        extras.append((size + sum(pads) - (kernel - 1) * apart - 1) % step)  # pixels that no window reached
    attributes = {**options, "output_padding": tuple(extras), "activation": None}
    return apply_one(CONV, (given, w, None), attributes)


def conv_weight_gradient(
    dy: Operand,
    x: Operand,
    weight_shape: Sequence[int],
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    channels_last: bool = False,
) -> Tensor:
    """The gradient of the weights, of shape `weight_shape`, of :func:`conv` of x with these options."""
    images = identity(x)
    try:
        given, options = _conv_shape_options(
            dy, images.shape, weight_shape, stride, padding, dilation, groups, channels_last
        )
    except (TypeError, ValueError) as error:
        raise fail("conv_weight_gradient", str(error), type(error)) from None
    # Of the weights only the shape counts.
    found: Tensor = apply(_CONV_BACKWARD, (given, images, zeros(weight_shape, given.dtype)), options)[1]
    return found


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


def _planes(array: Tensor, channels_last: bool) -> tuple[Tensor, int]:
    """Images with their spatial axes as one, and its position."""
    shape = array.shape
    planes = (shape[0], math.prod(shape[1:-1]), shape[-1]) if channels_last else (*shape[:2], math.prod(shape[2:]))
    return reshape(array, planes), 1 if channels_last else 2


def _pool_second(node: Node, given: Sequence[Tensor | None], needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """Of dy, in which it is linear: the average of the gradients, or those at the indices."""
    (g,), attributes = given, dict(node.attributes)
    assert g is not None
    del attributes["shape"]
    if attributes["kind"] == "average":
        return [apply(POOL, (g,), attributes)[0]]
    if attributes["kind"] == "l2":
        file, line = node.line
        raise TypeError(f"gradients: pool_backward ({file}:{line}) has no derivative: {ONCE}")
    dy, indices = node.inputs
    assert dy is not None
    assert indices is not None
    (planes, axis), (places, _) = (_planes(t, attributes["channels_last"]) for t in (g, indices))
    return [reshape(take_along_axis(planes, places, axis), dy.shape), None]


_POOL_BACKWARD: Final = Operation(
    "pool_backward", lambda dy, *saved, shape, **_: (Spec(shape, dy.dtype),), compute=_pool_backward,
    gradient=_pool_second,
)  # fmt: skip


class MaxPool(NamedTuple):
    """The largest values, and their positions h * W + w in the planes of x, as int32."""

    y: Tensor
    indices: Tensor


def _pool_call(
    kind: str,
    shape: Sequence[int],
    kernel: PerAxis,
    stride: PerAxis | None,
    padding: Padding,
    dilation: PerAxis,
    count_includes_padding: bool,
    channels_last: bool,
    ceil_mode: bool,
) -> tuple[dict[str, Any], Array | None]:
    """The options of the operation, and the factors of averages over windows that reach beyond the padding."""
    try:
        sizes = spatial("x", tuple(shape), channels_last)
        axes = len(sizes)
        kernels = per_axis("kernel", kernel, axes, 1)
        strides = kernels if stride is None else per_axis("stride", stride, axes, 1)
        dilations, pads = per_axis("dilation", dilation, axes, 1), paddings(padding, axes)
    except (TypeError, ValueError) as error:
        raise fail(f"{kind}_pool", str(error), type(error)) from None
    factors = None
    if ceil_mode:
        wider = tuple(map(_ceil_padding, sizes, kernels, strides, dilations, pads))
        if wider != pads and kind == "average" and count_includes_padding:
            factors = _ceil_factors(sizes, kernels, strides, pads, wider, channels_last)
        pads = wider
    options = {
        "kind": kind,
        "kernel": kernels,
        "stride": strides,
        "padding": pads,
        "dilation": dilations,
        "count_includes_padding": bool(count_includes_padding),
        "channels_last": bool(channels_last),
    }
    return options, factors


def _ceil_padding(size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> tuple[int, int]:
    """The padding with which the last window, if it starts at a pixel or before them, is whole."""
    before, after = pads
    rest = size + before + after - (kernel - 1) * dilation - 1
    missing = -rest % stride
    last = (rest + missing) // stride * stride - before  # where the last window starts
    return (before, after + missing) if rest >= 0 and last < size else pads


def _ceil_factors(
    sizes: Sequence[int], kernels: Sequence[int], strides: Sequence[int], pads: Any, wider: Any, channels_last: bool
) -> Array:
    """kernel / count, for counts that include the padding but not what `wider` adds to it."""
    found = np.ones((1,) * len(sizes))
    for axis, (size, kernel, stride, (before, after), (_, wide)) in enumerate(
        zip(sizes, kernels, strides, pads, wider, strict=True)
    ):
        starts = np.arange((size + before + wide - kernel) // stride + 1) * stride - before
        counts = np.minimum(starts + kernel, size + after) - starts
        found = found * (kernel / counts).reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return found[None, ..., None] if channels_last else found[None, None]


def _pooled(kind: str, x: Operand, *call: Any) -> tuple[Any, ...]:
    images = identity(x)
    options, factors = _pool_call(kind, images.shape, *call)
    found = apply(POOL, (images,), options)
    return found if factors is None else (multiply(found[0], factors.astype(images.dtype)),)


def max_pool(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The largest value of each window, as :func:`retrograd.max_pool_forward`; the gradient goes to the first one.

    `ceil_mode`: windows at the end that reach beyond the padding count too, if they start before the last pixel's end.
    """
    found: Tensor = _pooled("max", x, kernel, stride, padding, dilation, True, channels_last, ceil_mode)[0]
    return found


def max_pool_indices(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
    ceil_mode: bool = False,
) -> MaxPool:
    """The largest value of each window and where it is, for :func:`max_unpool`."""
    return MaxPool(*_pooled("max", x, kernel, stride, padding, dilation, True, channels_last, ceil_mode))


def max_pool_gradient(
    dy: Operand,
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    channels_last: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The gradient of x of :func:`max_pool` with these options. It has a derivative in dy."""
    images, given = identity(x), identity(dy)
    options, _ = _pool_call(
        "max", images.shape, kernel, stride, padding, dilation, True, channels_last, ceil_mode
    )  # fmt: skip
    y, indices = apply(POOL, (images,), options)
    _check_pooled("max_pool_gradient", given, y.shape, images.shape)
    return apply_one(_POOL_BACKWARD, (given, indices), {**options, "shape": images.shape})


def _check_pooled(name: str, dy: Tensor, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if dy.shape != expected:
        raise fail(name, f"dy has shape {dy.shape}, but the pooling of x of shape {shape} has {expected}")


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
    ceil_mode: bool = False,
) -> Tensor:
    """The average of each window, as :func:`retrograd.average_pool_forward`.

    `ceil_mode` as in :func:`max_pool`; what is beyond the padding does not count.
    """
    found: Tensor = _pooled(
        "average", x, kernel, stride, padding, 1, count_includes_padding, channels_last, ceil_mode
    )[0]  # fmt: skip
    return found


def average_pool_gradient(
    dy: Operand,
    x_shape: Sequence[int],
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    count_includes_padding: bool = True,
    channels_last: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The gradient of the input, of shape `x_shape`, of :func:`average_pool` with these options."""
    given, shape = identity(dy), tuple(x_shape)
    options, factors = _pool_call(
        "average", shape, kernel, stride, padding, 1, count_includes_padding, channels_last, ceil_mode
    )  # fmt: skip
    try:
        (pooled,) = _pool_shapes(Spec(shape, given.dtype), **options)
    except (TypeError, ValueError) as error:
        raise fail("average_pool_gradient", str(error), type(error)) from None
    _check_pooled("average_pool_gradient", given, pooled.shape, shape)
    scaled = given if factors is None else multiply(given, factors.astype(given.dtype))
    return apply_one(_POOL_BACKWARD, (scaled,), {**options, "shape": shape})


def l2_pool(
    x: Operand,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    channels_last: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The L2 norm of each window, as :func:`retrograd.l2_pool_forward`; `ceil_mode` as in :func:`max_pool`."""
    found: Tensor = _pooled("l2", x, kernel, stride, padding, 1, True, channels_last, ceil_mode)[0]
    return found
