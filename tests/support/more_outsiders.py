"""Functions of graphs that NumPy does not have, which Apple's graphs do, with what PyTorch and JAX compute instead."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrograd import graph
from support.arrays import Array
from support.outsiders import BETA, COLUMN, GAMMA, IMAGES, MORE, PLACES, ROW, STACK, A, B, P, Q, named, normal, row

SPARSE = np.where(np.abs(B) < 0.5, 0.0, B)
HOLES = np.where(np.abs(A) > 1.2, np.nan, A)
ROWS_AT = np.array([1, 1, 3])
PAIRS = np.array([[[0, 1], [1, 3]], [[1, 0], [0, 1]]])
row(
    "divide_no_nan", (A, SPARSE), graph.divide_no_nan,
    lambda T, a, b: T.where(b == 0, 0.0, a / T.where(b == 0, 1.0, b)),
    lambda J, a, b: J.numpy.where(b == 0, 0.0, a / J.numpy.where(b == 0, 1.0, b)),
)  # fmt: skip
for _name in ("floor", "ceil", "round", "trunc", "sign"):
    named(_name, A * 3)
row(
    "round_away", np.concatenate([A * 3, np.rint(A) + 0.5]), graph.round_away,
    lambda T, x: T.sign(x) * T.floor(T.abs(x) + 0.5), lambda J, x: J.lax.round(x, J.lax.RoundingMethod.AWAY_FROM_ZERO),
)  # fmt: skip
row("exp10", A, graph.exp10, lambda T, x: T.pow(10.0, x), lambda J, x: J.numpy.power(10.0, x))
row("fma", (A, ROW, B), graph.fma, lambda T, x, y, z: x * y + z, lambda J, x, y, z: x * y + z)
for _name in ("fmax", "fmin"):
    row(
        _name, (A, B), lambda a, b, n=_name: getattr(graph, n)(a, b), lambda T, a, b, n=_name: getattr(T, n)(a, b),
        lambda J, a, b, n=_name: getattr(J.numpy, n)(a, b),
    )  # fmt: skip
row(
    "clip", (A, -np.abs(ROW), np.abs(COLUMN)), lambda x, a, b: graph.clip(x, a, b),
    lambda T, x, a, b: T.minimum(T.maximum(x, a), b), lambda J, x, a, b: J.numpy.minimum(J.numpy.maximum(x, a), b),
)  # fmt: skip
row(
    "prelu", (STACK, GAMMA[:1].repeat(4)), graph.prelu, lambda T, x, a: T.nn.functional.prelu(x, a),
    lambda J, x, a: J.numpy.where(x > 0, x, a[:, None] * x),
)  # fmt: skip
row("l1_norm", A, lambda x: graph.l1_norm(x, 1), lambda T, x: x.abs().sum(1), lambda J, x: abs(x).sum(1))
row(
    "l2_norm", A, lambda x: graph.l2_norm(x, 0, True), lambda T, x: T.linalg.vector_norm(x, dim=0, keepdim=True),
    lambda J, x: J.numpy.sqrt((x * x).sum(0, keepdims=True)),
)  # fmt: skip
row("log_sum", P, lambda x: graph.log_sum(x, 1), lambda T, x: x.sum(1).log(), lambda J, x: J.numpy.log(x.sum(1)))
for _name, _least, _torch in (("fmax_reduce", -np.inf, "amax"), ("fmin_reduce", np.inf, "amin")):
    row(
        _name, HOLES, lambda x, n=_name: getattr(graph, n)(x, 0),
        lambda T, x, n=_torch, v=_least: getattr(T, n)(T.where(T.isnan(x), v, x), 0),
        lambda J, x, n=_torch, v=_least: getattr(J.numpy.where(J.numpy.isnan(x), v, x), n[1:])(0),
    )  # fmt: skip
for _reverse in (False, True):
    row(
        "cumprod", SPARSE, lambda x, r=_reverse: graph.cumprod(x, 1, reverse=r),
        lambda T, x, r=_reverse: T.cumprod(x.flip(1), 1).flip(1) if r else T.cumprod(x, 1),
        lambda J, x, r=_reverse: J.numpy.cumprod(x[:, ::-1], 1)[:, ::-1] if r else J.numpy.cumprod(x, 1),
    )  # fmt: skip
    for _name, _jax in (("cummax", "cummax"), ("cummin", "cummin")):
        row(
            _name, A, lambda x, n=_name, r=_reverse: getattr(graph, n)(x, 0, reverse=r),
            lambda T, x, n=_name, r=_reverse: (
                getattr(T, n)(x.flip(0), 0).values.flip(0) if r else getattr(T, n)(x, 0).values
            ),
            lambda J, x, n=_jax, r=_reverse: getattr(J.lax, n)(x, 0, reverse=r),
        )  # fmt: skip
row(
    "sort", A, lambda x: graph.sort(x, 1, descending=True), lambda T, x: T.sort(x, 1, descending=True).values,
    lambda J, x: J.numpy.sort(x, 1)[:, ::-1],
)  # fmt: skip
for _mode, _torch in (("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")):
    row(
        "pad", STACK, lambda x, m=_mode: graph.pad(x, [(0, 0), (0, 0), (2, 1)], m),
        lambda T, x, m=_torch: T.nn.functional.pad(x, (2, 1), m),
        lambda J, x, m=_mode: J.numpy.pad(x, [(0, 0), (0, 0), (2, 1)], m),
    )  # fmt: skip
row(
    "pad", A, lambda x: graph.pad(x, [(3, 0), (0, 2)], "symmetric"),
    lambda T, x: T.cat([x[:3].flip(0), x])[:, [0, 1, 2, 2, 1]],
    lambda J, x: J.numpy.pad(x, [(3, 0), (0, 2)], "symmetric"),
)  # fmt: skip
row(
    "band_part", STACK, lambda x: graph.band_part(x, 1, 0), lambda T, x: x.tril(0).triu(-1),
    lambda J, x: J.numpy.triu(J.numpy.tril(x, 0), -1),
)  # fmt: skip
row(
    "slice_update", (A, B[:2, :2]), lambda x, u: graph.slice_update(x, u, [0, 1], [4, 3], [2, 1]),
    lambda T, x, u: T.slice_scatter(x, T.slice_scatter(x[::2], u, 1, 1, 3), 0, 0, 4, 2),
    lambda J, x, u: x.at[0:4:2, 1:3].set(u),
)  # fmt: skip
row(
    "take", STACK, lambda x: graph.take(x, PLACES, 2, batch_dims=1),
    lambda T, x: T.stack([x[i][:, PLACES[i]] for i in range(2)]),
    lambda J, x: J.numpy.stack([x[i][:, PLACES[i]] for i in range(2)]),
)  # fmt: skip
row(
    "gather_nd", STACK, lambda x: graph.gather_nd(x, PAIRS), lambda T, x: x[PAIRS[..., 0], PAIRS[..., 1]],
    lambda J, x: x[PAIRS[..., 0], PAIRS[..., 1]],
)  # fmt: skip
row(
    "gather_nd", STACK, lambda x: graph.gather_nd(x, PAIRS[..., :1], batch_dims=1),
    lambda T, x: T.stack([x[i, PAIRS[i, :, 0]] for i in range(2)]),
    lambda J, x: J.numpy.stack([x[i, PAIRS[i, :, 0]] for i in range(2)]),
)  # fmt: skip
AT_ROWS = np.array([[2, 0, 1], [1, 1, 1], [2, 2, 1]])


def _jax_scatter(J: Any, a: Any, b: Any, at: Array, mode: str) -> Any:
    """Row by row, for indices [k, columns] along the first axis."""
    combine = {"add": J.numpy.add, "multiply": J.numpy.multiply, "divide": J.numpy.divide}
    combine |= {"minimum": J.numpy.minimum, "maximum": J.numpy.maximum}
    for k in range(len(at)):
        hit = np.arange(a.shape[0])[:, None] == at[k]
        a = J.numpy.where(hit, combine[mode](a, b[k]), a)
    return a


for _mode, _reduce in (("add", "sum"), ("multiply", "prod"), ("minimum", "amin"), ("maximum", "amax")):
    row(
        "scatter_along_axis", (A, B[:3]), lambda a, b, m=_mode: graph.scatter_along_axis(a, AT_ROWS, b, 0, m),
        lambda T, a, b, r=_reduce: T.scatter_reduce(a, 0, T.from_numpy(AT_ROWS), b, r),
        lambda J, a, b, m=_mode: _jax_scatter(J, a, b, AT_ROWS, m),
    )  # fmt: skip
    row(
        "scatter", (A, B[:3]), lambda a, b, m=_mode: graph.scatter(a, ROWS_AT, b, 0, m),
        lambda T, a, b, r=_reduce: T.scatter_reduce(a, 0, T.from_numpy(ROWS_AT)[:, None].expand(3, 3), b, r),
        lambda J, a, b, m=_mode: _jax_scatter(J, a, b, ROWS_AT[:, None], m),
    )  # fmt: skip
row(
    "scatter", (A, Q[:3]), lambda a, b: graph.scatter(a, [2, 1, 2], b, 0, "divide"),
    lambda T, a, b: T.stack([a[0], a[1] / b[1], a[2] / b[0] / b[2], a[3]]),
    lambda J, a, b: _jax_scatter(J, a, b, np.array([[2], [1], [2]]), "divide"),
)  # fmt: skip
row(
    "scatter", (A, B[:3]), lambda a, b: graph.scatter(a, [2, 1, 2], b, 0, "set"),
    lambda T, a, b: T.stack([a[0], b[1], b[2] + 0 * b[0], a[3]]),
    lambda J, a, b: J.numpy.stack([a[0], b[1], b[2] + 0 * b[0], a[3]]),
)  # fmt: skip
row(
    "scatter_nd", (STACK, MORE[..., :3][:, :2]), lambda a, b: graph.scatter_nd(a, PAIRS, b, "subtract"),
    lambda T, a, b: T.index_put(a, (T.from_numpy(PAIRS[..., 0]), T.from_numpy(PAIRS[..., 1])), -b, accumulate=True),
    lambda J, a, b: a.at[PAIRS[..., 0], PAIRS[..., 1]].add(-b),
)  # fmt: skip
row(
    "normalize",
    (IMAGES, *(a[:, None, None] for a in (GAMMA, GAMMA[::-1].copy(), BETA, GAMMA + 1))),
    lambda x, m, v, b, g: graph.normalize(x, m, v, g, b, 1e-3),
    lambda T, x, m, v, b, g: (x - m) / T.sqrt(v + 1e-3) * g + b,
    lambda J, x, m, v, b, g: (x - m) / J.numpy.sqrt(v + 1e-3) * g + b,
)  # fmt: skip
row(
    "sgd_update", (STACK, STACK, np.float64(0.3).reshape(1)), lambda w, g, rate: graph.sgd_update(w, g, rate),
    lambda T, w, g, rate: w - rate * g, lambda J, w, g, rate: w - rate * g,
)  # fmt: skip
row(
    "adam_update", (STACK, STACK, STACK, STACK**2),
    lambda w, g, m, v: graph.adam_update(w, g, m, v, learning_rate=0.3, beta1=0.7, beta2=0.8, eps=1e-2)[0],
    lambda T, w, g, m, v: w - 0.3 * (0.7 * m + 0.3 * g) / (T.sqrt(0.8 * v + 0.2 * g * g) + 1e-2),
    lambda J, w, g, m, v: w - 0.3 * (0.7 * m + 0.3 * g) / (J.numpy.sqrt(0.8 * v + 0.2 * g * g) + 1e-2),
)  # fmt: skip
row(
    "rms_norm", (STACK, ROW), lambda x, s: graph.rms_norm(x, s, (1, 2), 1e-3),
    lambda T, x, s: x / T.sqrt((x * x).mean((1, 2), keepdim=True) + 1e-3) * s,
    lambda J, x, s: x / J.numpy.sqrt((x * x).mean((1, 2), keepdims=True) + 1e-3) * s,
)  # fmt: skip
row(
    "l2_normalize", STACK, lambda x: graph.l2_normalize(x, 1, 1e-3),
    lambda T, x: x / T.sqrt((x * x).sum(1, keepdim=True) + 1e-3),
    lambda J, x: x / J.numpy.sqrt((x * x).sum(1, keepdims=True) + 1e-3),
)  # fmt: skip
row(
    "softmax_gradient", (A, B), lambda dy, y: graph.softmax_gradient(dy, y, 0),
    lambda T, dy, y: y * (dy - (dy * y).sum(0)),
    lambda J, dy, y: y * (dy - (dy * y).sum(0)),
)  # fmt: skip
CONV = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
PAIRED, GROUPED = normal(2, 4, 6, 7), normal(6, 2, 3, 2)


def _torch_conv(T: Any, x: Any, w: Any) -> Any:
    return T.nn.functional.conv2d(T.nn.functional.pad(x, (2, 1, 1, 0)), w, None, (2, 1), 0, (1, 2), 2)


def _jax_conv(J: Any, x: Any, w: Any) -> Any:
    return J.lax.conv_general_dilated(x, w, (2, 1), ((1, 0), (2, 1)), rhs_dilation=(1, 2), feature_group_count=2)


row("conv", (PAIRED, GROUPED), lambda x, w: graph.conv(x, w, **CONV), _torch_conv, _jax_conv)
row(
    "conv", (PAIRED, GROUPED),
    lambda x, w: graph.transpose(graph.conv(graph.transpose(x, (0, 2, 3, 1)), graph.transpose(
        graph.transpose(w, (2, 3, 1, 0)), (3, 2, 0, 1)), channels_last=True, **CONV), (0, 3, 1, 2)),
    _torch_conv, _jax_conv,
)  # fmt: skip
CONVOLVED = normal(2, 6, 3, 8)
row(
    "conv_input_gradient", (CONVOLVED, GROUPED), lambda dy, w: graph.conv_input_gradient(dy, w, PAIRED.shape, **CONV),
    lambda T, dy, w: T.autograd.grad(
        (_torch_conv(T, x := T.from_numpy(PAIRED).requires_grad_(), w) * dy).sum(), x, create_graph=True
    )[0],
    lambda J, dy, w: J.vjp(lambda x: _jax_conv(J, x, w), PAIRED)[1](dy)[0],
)  # fmt: skip
row(
    "conv_weight_gradient", (CONVOLVED, PAIRED), lambda dy, x: graph.conv_weight_gradient(dy, x, GROUPED.shape, **CONV),
    lambda T, dy, x: T.autograd.grad(
        (_torch_conv(T, x, w := T.from_numpy(GROUPED).requires_grad_()) * dy).sum(), w, create_graph=True
    )[0],
    lambda J, dy, x: J.vjp(lambda w: _jax_conv(J, x, w), GROUPED)[1](dy)[0],
)  # fmt: skip
POOLED = normal(2, 3, 3, 3)
for _includes in (True, False):
    POOL = {"stride": 2, "padding": 1, "count_includes_padding": _includes, "ceil_mode": True}
    row(
        "average_pool", IMAGES, lambda x, o=POOL: graph.average_pool(x, (3, 2), **o),
        lambda T, x, i=_includes: T.nn.functional.avg_pool2d(x, (3, 2), 2, 1, True, i),
        lambda J, x, i=_includes: _jax_average(J, x, i),
    )  # fmt: skip
    row(
        "average_pool_gradient", normal(2, 3, 4, 3),
        lambda dy, o=POOL: graph.average_pool_gradient(dy, IMAGES.shape, (3, 2), **o),
        lambda T, dy, i=_includes: T.autograd.grad((T.nn.functional.avg_pool2d(
            x := T.from_numpy(IMAGES).requires_grad_(), (3, 2), 2, 1, True, i) * dy).sum(), x, create_graph=True)[0],
        lambda J, dy, i=_includes: J.vjp(lambda x: _jax_average(J, x, i), IMAGES)[1](dy)[0],
    )  # fmt: skip


def _jax_average(J: Any, x: Any, includes: bool) -> Any:
    """Windows of 3 by 2 with stride 2 and padding 1, of planes of 6 by 5, with a ceiling: one more row."""

    def total(v: Any) -> Any:
        return sum(v[:, :, i : i + 7 : 2, j : j + 5 : 2] for i in range(3) for j in range(2))

    pads = ((0, 0), (0, 0), (1, 2), (1, 1))
    # The padding may count; what the ceiling adds does not.
    counted = (
        np.pad(np.ones((1, 1, 8, 7)), ((0, 0), (0, 0), (0, 1), (0, 0)))
        if includes
        else np.pad(np.ones((1, 1, 6, 5)), pads)
    )
    return total(J.numpy.pad(x, pads)) / total(counted)


row(
    "max_pool", IMAGES, lambda x: graph.max_pool(x, 3, stride=2, ceil_mode=True),
    lambda T, x: T.nn.functional.max_pool2d(x, 3, 2, ceil_mode=True),
    lambda J, x: _jax_largest(J, x),
)  # fmt: skip
row(
    "max_pool_gradient", POOLED[..., :2], lambda dy: graph.max_pool_gradient(dy, IMAGES, 3, stride=2, ceil_mode=True),
    lambda T, dy: T.autograd.grad((T.nn.functional.max_pool2d(
        x := T.from_numpy(IMAGES).requires_grad_(), 3, 2, ceil_mode=True) * dy).sum(), x, create_graph=True)[0],
    lambda J, dy: J.vjp(lambda x: _jax_largest(J, x), IMAGES)[1](dy)[0],
)  # fmt: skip


def _jax_largest(J: Any, x: Any) -> Any:
    wide = J.numpy.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=-1e9)
    windows = [wide[:, :, i : i + 5 : 2, j : j + 3 : 2] for i in range(3) for j in range(3)]
    return J.numpy.stack(windows).max(0)
