"""Every public function of graphs and its gradients, in float64, against PyTorch's and JAX's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from retrograd.lab.graphs import outcome
from support.arrays import Array
from support.jaxpr import traced
from support.more_outsiders import POOL  # noqa: F401 (its rows)
from support.outsiders import (
    ALONG,
    BETA,
    BIAS,
    COLUMN,
    GAMMA,
    IMAGES,
    KERNELS,
    LABELS,
    MORE,
    PLACES,
    ROW,
    ROWS,
    SHARES,
    STACK,
    TARGETS,
    A,
    B,
    P,
    Q,
    Row,
    U,
    V,
    W,
    named,
    normal,
    row,
)

# Both libraries compute in float64; some of their functions are only good to a few hundred units in the last place.
TOLERANCE = 1e-10

# ---- elementwise -----------------------------------------------------------------------------------------------------

for _name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "arctan2"):
    for _pair in ((A, B), (A, ROW), (COLUMN, A), (ROW, COLUMN)):
        named(_name, *_pair)
named("power", P, B, torch="pow")
named("power", P, ROW, torch="pow")
named("fmod", A * 3, Q)
row("mod", (A * 3, Q), graph.mod, lambda T, a, b: T.remainder(a, b), lambda J, a, b: J.numpy.mod(a, b))
for _name in (
    "absolute", "negative", "square", "exp", "exp2", "expm1", "sin", "cos", "tan", "arctan", "sinh", "cosh", "tanh",
    "arcsinh",
):  # fmt: skip
    named(_name, A)
for _name in ("sqrt", "reciprocal", "log", "log2", "log10", "log1p"):
    named(_name, P)
for _name in ("arcsin", "arccos", "arctanh"):
    named(_name, U)
named("arccosh", P + 1)
row("abs", A, graph.abs, lambda T, x: x.abs(), lambda J, x: abs(x))
row("rsqrt", P, graph.rsqrt, lambda T, x: T.rsqrt(x), lambda J, x: J.lax.rsqrt(x))
row("erf", A, graph.erf, lambda T, x: T.erf(x), lambda J, x: J.scipy.special.erf(x))
row("sigmoid", A, graph.sigmoid, lambda T, x: T.sigmoid(x), lambda J, x: J.nn.sigmoid(x))
row("relu", A, graph.relu, lambda T, x: T.relu(x), lambda J, x: J.nn.relu(x))
row("gelu", A, graph.gelu, lambda T, x: T.nn.functional.gelu(x), lambda J, x: J.nn.gelu(x, approximate=False))
row("silu", A, graph.silu, lambda T, x: T.nn.functional.silu(x), lambda J, x: J.nn.silu(x))
row("softplus", A, graph.softplus, lambda T, x: T.nn.functional.softplus(x), lambda J, x: J.nn.softplus(x))
row("elu", A, lambda x: graph.elu(x, 0.7), lambda T, x: T.nn.functional.elu(x, 0.7), lambda J, x: J.nn.elu(x, 0.7))
row(
    "leaky_relu", A, lambda x: graph.leaky_relu(x, 0.2), lambda T, x: T.nn.functional.leaky_relu(x, 0.2),
    lambda J, x: J.nn.leaky_relu(x, 0.2),
)  # fmt: skip
row(
    "activation", A, lambda x: graph.activation(x, "softsign"), lambda T, x: T.nn.functional.softsign(x),
    lambda J, x: J.nn.soft_sign(x),
)  # fmt: skip
row(
    "where", (A, B), lambda a, b: graph.where(a > b, a * 2, b), lambda T, a, b: T.where(a > b, a * 2, b),
    lambda J, a, b: J.numpy.where(a > b, a * 2, b),
)  # fmt: skip
row(
    "clip", A, lambda x: graph.clip(x, -0.5, 0.6), lambda T, x: T.clamp(x, -0.5, 0.6),
    lambda J, x: J.numpy.clip(x, -0.5, 0.6),
)  # fmt: skip
row("identity", A, lambda x: graph.identity(x) * 1, lambda T, x: x, lambda J, x: x)
row(
    "stop_gradient", A, lambda x: graph.stop_gradient(x) * x, lambda T, x: x.detach() * x,
    lambda J, x: J.lax.stop_gradient(x) * x,
)  # fmt: skip
row(
    "cast",
    A,
    lambda x: graph.cast(x, np.float64) * 2,
    lambda T, x: x.double() * 2,
    lambda J, x: x.astype("float64") * 2,
)

# ---- reductions ------------------------------------------------------------------------------------------------------

for _axis in (None, 0, (0, 1)):
    for _name in ("sum", "mean", "prod", "max", "min"):
        row(
            _name, A, lambda x, n=_name, a=_axis: getattr(graph, n)(x, a),
            lambda T, x, n=_name, a=_axis: _reduced(T, n, x, a),
            lambda J, x, n=_name, a=_axis: getattr(J.numpy, n)(x, a),
        )  # fmt: skip
row("var", A, lambda x: graph.var(x, 0), lambda T, x: T.var(x, 0, unbiased=False), lambda J, x: J.numpy.var(x, 0))
row(
    "logsumexp", A, lambda x: graph.logsumexp(x, 1), lambda T, x: T.logsumexp(x, 1),
    lambda J, x: J.scipy.special.logsumexp(x, 1),
)  # fmt: skip
row(
    "sum_of_squares", A, lambda x: graph.sum_of_squares(x, 1), lambda T, x: (x * x).sum(1), lambda J, x: (x * x).sum(1)
)  # fmt: skip


def _reduced(T: Any, name: str, x: Any, axis: Any) -> Any:
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if name != "prod":
        return getattr(T, {"max": "amax", "min": "amin"}.get(name, name))(x, axes)
    for one in sorted(axes, reverse=True):
        x = T.prod(x, one)
    return x


# ---- shapes ----------------------------------------------------------------------------------------------------------

row("reshape", A, lambda x: graph.reshape(x, (2, -1)), lambda T, x: x.reshape(2, -1), lambda J, x: x.reshape(2, -1))
row(
    "transpose", STACK, lambda x: graph.transpose(x, (2, 0, 1)), lambda T, x: x.permute(2, 0, 1),
    lambda J, x: x.transpose(2, 0, 1),
)  # fmt: skip
row(
    "swapaxes",
    STACK,
    lambda x: graph.swapaxes(x, 0, -1),
    lambda T, x: x.swapaxes(0, -1),
    lambda J, x: x.swapaxes(0, -1),
)
for _from, _to in ((0, -1), (-1, 0), (1, -2), (2, 1)):
    row(
        "moveaxis", STACK, lambda x, a=_from, b=_to: graph.moveaxis(x, a, b),
        lambda T, x, a=_from, b=_to: T.moveaxis(x, a, b), lambda J, x, a=_from, b=_to: J.numpy.moveaxis(x, a, b),
    )  # fmt: skip
row(
    "broadcast_to", COLUMN, lambda x: graph.broadcast_to(x, (2, 4, 5)), lambda T, x: T.broadcast_to(x, (2, 4, 5)),
    lambda J, x: J.numpy.broadcast_to(x, (2, 4, 5)),
)  # fmt: skip
row(
    "expand_dims", A, lambda x: graph.expand_dims(x, (0, 2)), lambda T, x: x[None, :, None],
    lambda J, x: J.numpy.expand_dims(x, (0, 2)),
)  # fmt: skip
row("squeeze", COLUMN, lambda x: graph.squeeze(x, 1), lambda T, x: x.squeeze(1), lambda J, x: x.squeeze(1))
row(
    "take_slice", A, lambda x: graph.take_slice(x, (slice(1, None), None, slice(None, None, -2))),
    lambda T, x: T.flip(x[1:, None], (2,))[:, :, ::2], lambda J, x: x[1:, None, ::-2],
)  # fmt: skip
row("flip", A, lambda x: graph.flip(x, 1), lambda T, x: T.flip(x, (1,)), lambda J, x: J.numpy.flip(x, 1))
row(
    "concatenate", (A, B), lambda a, b: graph.concatenate([a, b, a], 1), lambda T, a, b: T.cat([a, b, a], 1),
    lambda J, a, b: J.numpy.concatenate([a, b, a], 1),
)  # fmt: skip
for _axis in (0, 1, -1):
    row(
        "stack", (A, B), lambda a, b, k=_axis: graph.stack([a, b], k), lambda T, a, b, k=_axis: T.stack([a, b], k),
        lambda J, a, b, k=_axis: J.numpy.stack([a, b], k),
    )  # fmt: skip
row(
    "split", A, lambda x: graph.split(x, [1, 3], 0)[1], lambda T, x: T.tensor_split(x, [1, 3], 0)[1],
    lambda J, x: J.numpy.split(x, [1, 3], 0)[1],
)  # fmt: skip
row(
    "pad", A, lambda x: graph.pad(x, [(1, 2), (0, 1)], value=0.5),
    lambda T, x: T.nn.functional.pad(x, (0, 1, 1, 2), value=0.5),
    lambda J, x: J.numpy.pad(x, [(1, 2), (0, 1)], constant_values=0.5),
)  # fmt: skip
row(
    "tile", A, lambda x: graph.tile(x, (2, 1, 3)), lambda T, x: T.tile(x, (2, 1, 3)),
    lambda J, x: J.numpy.tile(x, (2, 1, 3)),
)  # fmt: skip

# ---- products and indices --------------------------------------------------------------------------------------------

for _a, _b in (
    (A, W.T.copy()), (STACK, W.T.copy()), (STACK, MORE), (A[0], MORE), (STACK, ROW), (ROW, normal(3)), (A, MORE),
    (STACK[:, None], MORE[None]), (normal(2, 3, 0), normal(0, 4)), (normal(0, 3), normal(3, 2)),
):  # fmt: skip
    named("matmul", _a, _b)
row("outer", (ROW, V), graph.outer, lambda T, a, b: T.outer(a, b), lambda J, a, b: J.numpy.outer(a, b))
row("vdot", (A, B), graph.vdot, lambda T, a, b: (a * b).sum(), lambda J, a, b: J.numpy.vdot(a, b))
row(
    "linear", (STACK, W, V), graph.linear, lambda T, x, w, b: T.nn.functional.linear(x, w, b),
    lambda J, x, w, b: x @ w.T + b,
)  # fmt: skip
row(
    "take", A, lambda x: graph.take(x, PLACES, 1), lambda T, x: x[:, T.from_numpy(PLACES)],
    lambda J, x: J.numpy.take(x, PLACES, 1),
)  # fmt: skip
row(
    "take_along_axis", A, lambda x: graph.take_along_axis(x, ALONG, 1),
    lambda T, x: T.take_along_dim(x, T.from_numpy(ALONG), 1), lambda J, x: J.numpy.take_along_axis(x, ALONG, 1),
)  # fmt: skip
row(
    "scatter_add", (A, B[:2]), lambda a, b: graph.scatter_add(a, np.array([1, 1]), b),
    lambda T, a, b: T.index_add(a, 0, T.tensor([1, 1]), b), lambda J, a, b: a.at[np.array([1, 1])].add(b),
)  # fmt: skip
row("cumsum", A, lambda x: graph.cumsum(x, 1), lambda T, x: T.cumsum(x, 1), lambda J, x: J.numpy.cumsum(x, 1))
row("sort", A, lambda x: graph.sort(x, 0), lambda T, x: T.sort(x, 0).values, lambda J, x: J.numpy.sort(x, 0))
row(
    "top_k", A, lambda x: graph.top_k(x, 2).values, lambda T, x: T.topk(x, 2).values, lambda J, x: J.lax.top_k(x, 2)[0]
)  # fmt: skip
for _axis in (0, 1, -2):
    for _name in ("softmax", "log_softmax"):
        row(
            _name, A, lambda x, n=_name, a=_axis: getattr(graph, n)(x, a),
            lambda T, x, n=_name, a=_axis: getattr(T, n)(x, a), lambda J, x, n=_name, a=_axis: getattr(J.nn, n)(x, a),
        )  # fmt: skip
row(
    "embedding", W, lambda t: graph.embedding(PLACES, t),
    lambda T, t: T.nn.functional.embedding(T.from_numpy(PLACES), t),
    lambda J, t: t[PLACES],
)  # fmt: skip

# ---- layers ----------------------------------------------------------------------------------------------------------


def _normalized(J: Any, x: Any, gamma: Any, beta: Any, axes: tuple[int, ...], channels: tuple[int, ...]) -> Any:
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / J.numpy.sqrt(var + 1e-5) * gamma.reshape(channels) + beta.reshape(channels)


NORM = (IMAGES, GAMMA, BETA)
row(
    "batch_norm", NORM, graph.batch_norm,
    lambda T, x, g, b: T.nn.functional.batch_norm(x, None, None, g, b, training=True),
    lambda J, x, g, b: _normalized(J, x, g, b, (0, 2, 3), (1, 3, 1, 1)),
)  # fmt: skip
row(
    "instance_norm", NORM, graph.instance_norm, lambda T, x, g, b: T.nn.functional.instance_norm(x, weight=g, bias=b),
    lambda J, x, g, b: _normalized(J, x, g, b, (2, 3), (1, 3, 1, 1)),
)  # fmt: skip
row(
    "group_norm", NORM, lambda x, g, b: graph.group_norm(x, g, b, num_groups=1, activation="tanh"),
    lambda T, x, g, b: T.tanh(T.nn.functional.group_norm(x, 1, g, b)),
    lambda J, x, g, b: J.numpy.tanh(_normalized(J, x, g, b, (1, 2, 3), (1, 3, 1, 1))),
)  # fmt: skip
row(
    "layer_norm", (A, GAMMA, BETA), graph.layer_norm, lambda T, x, g, b: T.nn.functional.layer_norm(x, (3,), g, b),
    lambda J, x, g, b: _normalized(J, x, g, b, (1,), (1, 3)),
)  # fmt: skip


def _convolved(J: Any, x: Any, w: Any, b: Any, stride: Any, padding: Any, spread: Any = (1, 1)) -> Any:
    y = J.lax.conv_general_dilated(x, w, stride, padding, lhs_dilation=spread)
    return y + b.reshape(1, -1, 1, 1)


row(
    "conv", (IMAGES, KERNELS, BIAS), lambda x, w, b: graph.conv(x, w, b, stride=(2, 1), padding=1),
    lambda T, x, w, b: T.nn.functional.conv2d(x, w, b, (2, 1), 1),
    lambda J, x, w, b: _convolved(J, x, w, b, (2, 1), ((1, 1), (1, 1))),
)  # fmt: skip
row(
    "conv", (IMAGES, KERNELS, BIAS), lambda x, w, b: graph.conv(x, w, b, activation="gelu"),
    lambda T, x, w, b: T.nn.functional.gelu(T.nn.functional.conv2d(x, w, b)),
    lambda J, x, w, b: J.nn.gelu(_convolved(J, x, w, b, (1, 1), ((0, 0), (0, 0))), approximate=False),
)  # fmt: skip
row(
    "conv_transpose", (IMAGES, normal(3, 2, 2, 3), normal(2)), lambda x, w, b: graph.conv_transpose(x, w, b, stride=2),
    lambda T, x, w, b: T.nn.functional.conv_transpose2d(x, w, b, 2),
    lambda J, x, w, b: _convolved(
        J, x, J.numpy.flip(w, (2, 3)).transpose(1, 0, 2, 3), b, (1, 1), ((1, 1), (2, 2)), (2, 2)
    ),
)  # fmt: skip


def _windows(x: Any) -> Any:
    """[2, 3, 3, 2, 4]: windows of 2 by 2."""
    cut = x[:, :, :6, :4].reshape(2, 3, 3, 2, 2, 2)
    return cut.transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 3, 2, 4)


row(
    "max_pool", IMAGES, lambda x: graph.max_pool(x, 2), lambda T, x: T.nn.functional.max_pool2d(x, 2),
    lambda J, x: _windows(x).max(-1),
)  # fmt: skip
row(
    "average_pool", IMAGES, lambda x: graph.average_pool(x, 2), lambda T, x: T.nn.functional.avg_pool2d(x, 2),
    lambda J, x: _windows(x).mean(-1),
)  # fmt: skip


def _only_largest(J: Any, x: Any) -> Any:
    """x with zeros but for the largest element of each window."""
    windows = _windows(x)
    kept = J.numpy.where(windows == windows.max(-1, keepdims=True), windows, 0)
    rows = kept.reshape(2, 3, 3, 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 6, 4)
    return J.numpy.zeros_like(x).at[:, :, :6, :4].set(rows)


UNPOOLED = np.arange(2 * 3 * 3 * 2).reshape(2, 3, 3, 2) % 6 * 5 + 2  # positions in planes of 6 by 5
row(
    "max_unpool", np.cos(np.arange(36.0)).reshape(2, 3, 3, 2),
    lambda x: graph.max_unpool(x, UNPOOLED, (2, 3, 6, 5)),
    lambda T, x: T.nn.functional.max_unpool2d(x, T.from_numpy(UNPOOLED), 2, output_size=(6, 5)),
    lambda J, x: J.numpy.zeros((2, 3, 30)).at[
        np.arange(2)[:, None, None], np.arange(3)[:, None], UNPOOLED.reshape(2, 3, 6)
    ].set(x.reshape(2, 3, 6)).reshape(2, 3, 6, 5),
)  # fmt: skip
row(
    "max_pool_indices", IMAGES, lambda x: graph.max_unpool(*graph.max_pool_indices(x, 2), x.shape),
    lambda T, x: T.nn.functional.max_unpool2d(
        *T.nn.functional.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:]
    ),
    lambda J, x: _only_largest(J, x),
)  # fmt: skip
row(
    "l2_pool", IMAGES, lambda x: graph.l2_pool(x, 2), lambda T, x: T.nn.functional.lp_pool2d(x, 2.0, 2),
    lambda J, x: J.numpy.sqrt((_windows(x) ** 2).sum(-1)),
)  # fmt: skip

# ---- losses ----------------------------------------------------------------------------------------------------------

for _reduction in ("mean", "sum", "none"):
    row(
        "softmax_cross_entropy", A,
        lambda x, r=_reduction: graph.softmax_cross_entropy(x, LABELS, label_smoothing=0.1, reduction=r),
        lambda T, x, r=_reduction: T.nn.functional.cross_entropy(
            x, T.from_numpy(LABELS), label_smoothing=0.1, reduction=r
        ),
        lambda J, x, r=_reduction: _total(
            J, -(J.nn.log_softmax(x) * (0.9 * np.eye(3)[LABELS] + 0.1 / 3)).sum(-1), r
        ),
    )  # fmt: skip
    for _name, _call, _formula in (
        ("mean_squared_error", "mse_loss", lambda J, a, b: (a - b) ** 2),
        ("mean_absolute_error", "l1_loss", lambda J, a, b: abs(a - b)),
        ("huber", "huber_loss",
         lambda J, a, b: J.numpy.where(abs(a - b) < 1, (a - b) ** 2 / 2, abs(a - b) - 0.5)),
    ):  # fmt: skip
        row(
            _name, (A, B), lambda a, b, n=_name, r=_reduction: getattr(graph, n)(a, b, reduction=r),
            lambda T, a, b, n=_call, r=_reduction: getattr(T.nn.functional, n)(a, b, reduction=r),
            lambda J, a, b, f=_formula, r=_reduction: _total(J, f(J, a, b), r),
        )  # fmt: skip
row(
    "softmax_cross_entropy", A, lambda x: graph.softmax_cross_entropy(x, graph.constant(SHARES)),
    lambda T, x: T.nn.functional.cross_entropy(x, T.from_numpy(SHARES)),
    lambda J, x: -(J.nn.log_softmax(x) * SHARES).sum(-1).mean(),
)  # fmt: skip
row(
    "categorical_cross_entropy", A, lambda x: graph.categorical_cross_entropy(x, SHARES),
    lambda T, x: -(T.log_softmax(x, -1) * T.from_numpy(SHARES)).sum(-1).div(T.from_numpy(SHARES != 0).sum(-1)).mean(),
    lambda J, x: (-(J.nn.log_softmax(x) * SHARES).sum(-1) / (SHARES != 0).sum(-1)).mean(),
)  # fmt: skip
row(
    "sigmoid_cross_entropy", A, lambda x: graph.sigmoid_cross_entropy(x, TARGETS),
    lambda T, x: T.nn.functional.binary_cross_entropy_with_logits(x, T.from_numpy(TARGETS)),
    lambda J, x: -(TARGETS * J.nn.log_sigmoid(x) + (1 - TARGETS) * J.nn.log_sigmoid(-x)).mean(),
)  # fmt: skip
row(
    "log_loss", (np.abs(U) * 0.9 + 0.05,), lambda x: graph.log_loss(x, TARGETS, eps=0.0),
    lambda T, x: T.nn.functional.binary_cross_entropy(x, T.from_numpy(TARGETS)),
    lambda J, x: -(TARGETS * J.numpy.log(x) + (1 - TARGETS) * J.numpy.log(1 - x)).mean(),
)  # fmt: skip
row(
    "hinge", A, lambda x: graph.hinge(x, TARGETS), lambda T, x: T.relu(1 - T.from_numpy(2 * TARGETS - 1) * x).mean(),
    lambda J, x: J.nn.relu(1 - (2 * TARGETS - 1) * x).mean(),
)  # fmt: skip


def _total(J: Any, losses: Any, reduction: str) -> Any:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


# ---- recurrent layers ------------------------------------------------------------------------------------------------

UNITS = 4
LSTM = (normal(5, 3, 2), normal(3, UNITS), normal(3, UNITS), normal(16, 2), normal(16, UNITS), normal(16))


def _torch_lstm(T: Any, x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any) -> Any:
    steps = []
    for t in range(5):
        i, f, g, o = (x[t] @ wx.T + h @ wh.T + b).chunk(4, 1)
        c = T.sigmoid(f) * c + T.sigmoid(i) * T.tanh(g)
        h = T.sigmoid(o) * T.tanh(c)
        steps.append(h)
    return T.stack(steps) + c[None]


def _jax_lstm(J: Any, x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any) -> Any:
    steps, sigmoid, tanh = [], J.nn.sigmoid, J.numpy.tanh
    for t in range(5):
        i, f, g, o = J.numpy.split(x[t] @ wx.T + h @ wh.T + b, 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        steps.append(h)
    return J.numpy.stack(steps) + c[None]


def _our_lstm(x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any) -> Any:
    y, _, cn = graph.lstm(x, (wx, wh, b), h, c)
    return y + graph.expand_dims(cn, 0)


row("lstm", LSTM, _our_lstm, _torch_lstm, _jax_lstm)

GRU = (normal(5, 3, 2), normal(3, UNITS), normal(12, 2), normal(12, UNITS), normal(12), normal(12))


def _our_gru(x: Any, h: Any, wx: Any, wh: Any, b: Any, bh: Any) -> Any:
    y, hn = graph.gru(x, (wx, wh, b, bh), h)
    return y + graph.expand_dims(hn, 0)


def _torch_gru(T: Any, x: Any, h: Any, *parameters: Any) -> Any:
    y, hn = T.gru(x, h[None], parameters, True, 1, 0.0, False, False, False)
    return y + hn


def _jax_gru(J: Any, x: Any, h: Any, wx: Any, wh: Any, b: Any, bh: Any) -> Any:
    steps, sigmoid, tanh = [], J.nn.sigmoid, J.numpy.tanh
    for t in range(5):
        xr, xz, xn = J.numpy.split(x[t] @ wx.T + b, 3, 1)
        hr, hz, hn = J.numpy.split(h @ wh.T + bh, 3, 1)
        z = sigmoid(xz + hz)
        h = (1 - z) * tanh(xn + sigmoid(xr + hr) * hn) + z * h
        steps.append(h)
    return J.numpy.stack(steps) + h[None]


row("gru", GRU, _our_gru, _torch_gru, _jax_gru)

RNN = (normal(5, 3, 2), normal(3, UNITS), normal(UNITS, 2), normal(UNITS, UNITS), normal(UNITS))


def _our_rnn(x: Any, h: Any, wx: Any, wh: Any, b: Any) -> Any:
    y, hn = graph.rnn(x, (wx, wh, b), h)
    return y + graph.expand_dims(hn, 0)


def _torch_rnn(T: Any, x: Any, h: Any, wx: Any, wh: Any, b: Any) -> Any:
    y, hn = T.rnn_tanh(x, h[None], (wx, wh, b, T.zeros_like(b)), True, 1, 0.0, False, False, False)
    return y + hn


def _jax_rnn(J: Any, x: Any, h: Any, wx: Any, wh: Any, b: Any) -> Any:
    steps = []
    for t in range(5):
        h = J.numpy.tanh(x[t] @ wx.T + h @ wh.T + b)
        steps.append(h)
    return J.numpy.stack(steps) + h[None]


row("rnn", RNN, _our_rnn, _torch_rnn, _jax_rnn)

SCAN = (normal(5, 3), normal(5, 3), normal(3))


def _steps(stack: Any, a: Any, b: Any, h: Any) -> Any:
    steps = []
    for t in range(5):
        h = a[t] * h + b[t]
        steps.append(h)
    return stack(steps)


row(
    "scan", SCAN, lambda a, b, h: graph.scan(a, b, h).y, lambda T, a, b, h: _steps(T.stack, a, b, h),
    lambda J, a, b, h: _steps(J.numpy.stack, a, b, h),
)  # fmt: skip

# ---- the tests -------------------------------------------------------------------------------------------------------

# Without a derivative (test_integers.py compares values), or of other things than tensors, or whose definition no other
# library shares.
NOT_COMPARED = {
    "all", "any", "argmax", "argmin", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf", "isfinite", "one_hot", "compile",
    "constant", "counter", "custom_gradient", "full", "gradients", "next_count", "ones", "recompute", "spec", "trace",
    "zeros", "dropout", "cosine_distance", "call", "sync_batch_norm", "signbit", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not", "bitwise_count", "left_shift", "right_shift", "argsort", "coordinates", "philox",
    "random_uniform", "random_normal", "truncated_normal", "random_integers",
}  # fmt: skip


def test_every_function_is_compared() -> None:
    functions = {n for n in graph.__all__ if n.islower() and callable(getattr(graph, n))}
    assert functions - {r.name for r in ROWS} == NOT_COMPARED & functions
    assert not NOT_COMPARED - functions


def expected_of_ours(r: Row) -> tuple[list[Array], Array]:
    """The value, the gradients, and the weights whose product with the value is summed."""
    # The function of arrays has the same shape; graph.constant needs a trace.
    shape = np.shape(r.ours(*r.inputs)) if r.name != "softmax_cross_entropy" else None

    def step(*tensors: Any) -> Any:
        y = r.ours(*tensors)
        weights = graph.constant(np.cos(np.arange(y.size, dtype=np.float64)).reshape(y.shape))
        return [y, *graph.gradients(graph.sum(y * weights), tensors)]

    program = graph.compile(step, *r.inputs)
    results = outcome(program, r.inputs)
    assert shape is None or results[0].shape == shape
    return results, np.cos(np.arange(results[0].size, dtype=np.float64)).reshape(results[0].shape)


def close(r: Row, got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        b = np.asarray(other)
        assert one.shape == b.shape, r.name
        size = max(1.0, float(np.abs(b).max(initial=0.0)))
        assert float(np.abs(one - b).max(initial=0.0)) <= TOLERANCE * size, r.name


@pytest.mark.parametrize("name", sorted({r.name for r in ROWS}))
def test_against_torch(torch: Any, name: str) -> None:
    for r in ROWS:
        if r.name == name:
            results, weights = expected_of_ours(r)
            tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in r.inputs]
            y = r.torch(torch, *tensors)
            (y * torch.from_numpy(weights)).sum().backward()
            close(r, results, [y.detach().numpy(), *(t.grad.numpy() for t in tensors)])


@pytest.fixture
def jax64(jax: Any) -> Iterator[Any]:
    import jax.scipy.special

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", sorted({r.name for r in ROWS}))
def test_against_jax(jax64: Any, name: str) -> None:
    for r in ROWS:
        if r.name == name:
            results, weights = expected_of_ours(r)

            def loss(inputs: Any, r: Row = r, weights: Array = weights) -> Any:
                y = r.jax(jax64, *inputs)
                return (y * weights).sum(), y

            function = jax64.value_and_grad(loss, has_aux=True)
            try:
                (_, y), gradients = traced(jax64, function, list(r.inputs))
            except NotImplementedError:  # convolutions and the like need XLA
                (_, y), gradients = jax64.jit(function)(list(r.inputs))
            close(r, results, [y, *gradients])
