"""Operations that are one call of the engine together, for front ends whose users cannot ask for that call.

They join what they are given only in a recording, where it is known beforehand which tensors gradients are taken of and
which ones only one call reads. A program of plain functions keeps the bits that the functions have one by one.

- A normalization by a mean and a variance that are those of the tensor itself is the engine's of a batch, a layer or an
  instance, whose gradient goes through both, with statistics in float64. The mean and the variance stay what they are
  for whatever else reads them.
- A product or a convolution plus one number for each of its outputs is a layer with a bias.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..ops._norm_problem import NormKind
from .elementwise import add as plain_add
from .elementwise import identity, multiply, rsqrt, subtract
from .image import CONV
from .layer import layer_of_norm
from .operation import OPERATIONS
from .product import affine, matmul
from .reduction import kept_shape
from .shaping import reshape
from .tensor import FLOATS, Joins, Operand, Tensor, apply, current_graph

# ---- biases ----------------------------------------------------------------------------------------------------------


def add(a: Operand, b: Operand) -> Tensor:
    """``a + b``"""
    graph = current_graph()
    if graph is not None and graph.joins is not None:
        for sum_of, bias in ((a, b), (b, a)):
            if isinstance(sum_of, Tensor) and isinstance(bias, Tensor):
                found = _with_bias(sum_of, bias, graph.joins)
                if found is not None:
                    return found
    return plain_add(a, b)


def _with_bias(y: Tensor, bias: Tensor, joins: Joins) -> Tensor | None:
    """y plus a bias, as a layer; None: y is none, or is read elsewhere too, or this is no bias."""
    if id(y) not in joins.made or bias.dtype != y.dtype or y.ndim < 2:
        return None
    function, operands = joins.made[id(y)]
    node = y.node
    if function is matmul and operands[0].ndim >= 2 and operands[1].ndim == 2:
        channels = y.ndim - 1
    elif node.operation is CONV and node.inputs[2] is None and node.attributes["activation"] is None:
        channels = y.ndim - 1 if node.attributes["channels_last"] else 1
    else:
        return None
    if _padded(bias.shape, y.ndim) != _along(y.shape, channels):
        return None
    flat = reshape(bias, (y.shape[channels],))
    if function is matmul:
        return affine(operands[0], operands[1], flat)
    layer: Tensor = apply(CONV, (*node.inputs[:2], flat), node.attributes)[0]
    return layer


def _padded(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return (1,) * (ndim - len(shape)) + shape


def _along(shape: tuple[int, ...], *axes: int) -> tuple[int, ...]:
    """The shape with all other axes of size 1."""
    return tuple(n if axis in axes else 1 for axis, n in enumerate(shape))


# ---- moments ---------------------------------------------------------------------------------------------------------


def normalize(
    x: Operand,
    mean: Operand,
    var: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * gamma + beta``, of a mean and a variance that are given and have gradients."""
    graph = current_graph()
    if graph is not None and graph.joins is not None and graph.joins.first:
        scale, shift = (None if t is None else identity(t) for t in (gamma, beta))
        found = _joined(identity(x), identity(mean), identity(var), scale, shift, float(eps))
        if found is not None:
            return found
    return _affine(multiply(subtract(x, mean), rsqrt(plain_add(var, float(eps)))), gamma, beta)


def _affine(normalized: Tensor, gamma: Operand | None, beta: Operand | None) -> Tensor:
    scaled = normalized if gamma is None else multiply(normalized, gamma)
    return scaled if beta is None else plain_add(scaled, beta)


class _Layer(NamedTuple):
    """A normalization that the engine has."""

    kind: NormKind
    axis: int  # of the channels, or the first one that is normalized
    parameters: tuple[int, ...]  # the shape of gamma and beta, broadcast to x


def _joined(
    x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> Tensor | None:
    """The engine's normalization; None: it has none for this."""
    axes = _moment_axes(x, mean, var)
    if axes is None or not 0 <= eps < math.inf:
        return None
    layers = _layers(x.shape, axes)
    if not layers:
        return None

    def fits(layer: _Layer, parameter: Tensor | None) -> bool:
        if parameter is None:
            return True
        return parameter.dtype == x.dtype and _padded(parameter.shape, x.ndim) == layer.parameters

    layer = max(layers, key=lambda one: (fits(one, gamma), fits(one, beta)))
    scale = gamma if fits(layer, gamma) else None
    shift = beta if scale is gamma and fits(layer, beta) else None
    own_gamma, own_beta = (None if p is None else reshape(p, _own_shape(layer, x.shape)) for p in (scale, shift))
    y = layer_of_norm(layer.kind, x, own_gamma, own_beta, layer.axis, eps)
    return _affine(y, None if scale is gamma else gamma, None if shift is beta else beta)


def _own_shape(layer: _Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the engine's gamma has."""
    return shape[layer.axis :] if layer.kind == "layer_norm" else (shape[layer.axis],)


def _layers(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[_Layer]:
    """The normalizations over these axes, the one with the simplest statistics first."""
    ndim = len(shape)
    kept = [axis for axis in range(ndim) if axis not in axes]
    found: list[_Layer] = []
    if axes and kept == list(range(len(kept))):
        found.append(_Layer("layer_norm", len(kept), _along(shape, *axes)))
    if len(kept) == 1 and ndim >= 2:
        found.append(_Layer("batch_norm", kept[0], _along(shape, kept[0])))
    if len(kept) == 2 and kept[0] == 0 and ndim >= 3:
        found.append(_Layer("instance_norm", kept[1], _along(shape, kept[1])))
    return found


def _moment_axes(x: Tensor, mean: Tensor, var: Tensor) -> tuple[int, ...] | None:
    """The axes over which these are the mean and the variance of x, and which they keep; None: they are not."""
    axes = _mean_axes(x, mean)
    if axes is None or x.dtype not in FLOATS:
        return None
    of = _reduced(x, var, axes)
    if of is None or of.node.operation is not OPERATIONS["square"]:
        return None
    (difference,) = of.node.inputs
    assert difference is not None
    if difference.node.operation is not OPERATIONS["subtract"]:
        return None
    minuend, center = difference.node.inputs
    assert center is not None
    return axes if minuend is x and _mean_axes(x, center) == axes else None


def _mean_axes(x: Tensor, mean: Tensor) -> tuple[int, ...] | None:
    """The axes of x over which this is its mean, and which it keeps."""
    source = _reshaped(mean)
    if source.node.operation is not OPERATIONS["mean"] or source.node.inputs[0] is not x:
        return None
    axes: tuple[int, ...] = source.node.attributes["axes"]
    return axes if _keeps(x, mean, axes) else None


def _reduced(x: Tensor, tensor: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """What this is the mean of over axes, of a tensor like x, which it keeps."""
    node = _reshaped(tensor).node
    if node.operation is not OPERATIONS["mean"] or node.attributes["axes"] != axes or not _keeps(x, tensor, axes):
        return None
    return node.inputs[0]


def _keeps(x: Tensor, reduced: Tensor, axes: tuple[int, ...]) -> bool:
    return _padded(reduced.shape, x.ndim) == kept_shape(x.shape, axes)


def _reshaped(tensor: Tensor) -> Tensor:
    """The tensor that this one is only another shape of."""
    while tensor.node.operation is OPERATIONS["reshape"]:
        (source,) = tensor.node.inputs
        assert source is not None
        tensor = source
    return tensor
