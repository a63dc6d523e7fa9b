"""The oracle: the rules of the layers of graphs, which call the other modules of the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .activation import apply_input_slope, apply_slope, value_at
from .convolution import conv_backward, conv_forward, conv_transpose_backward, conv_transpose_forward
from .dense import embedding_backward, philox_mask
from .graph import GRAPH, Gradients, Rule, Shape, Vjp, sigmoid, sum_of, wide
from .loss import cosine_distance, reduced_loss, soft_cross_entropy, softmax_cross_entropy
from .norm import norm_backward, norm_forward
from .optimizer import adam_step
from .pooling import (
    average_pool_backward,
    average_pool_forward,
    l2_pool_backward,
    l2_pool_forward,
    max_pool_backward,
    max_pool_forward,
)
from .precision import Array
from .recurrent import (
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
)
from .recurrent_types import GruCell, LstmCell, RnnCell
from .scan import scan_backward, scan_forward

__all__: list[str] = []  # the rules are in GRAPH

# ---- layers ----------------------------------------------------------------------------------------------------------


def _parameters(activation: Any) -> tuple[str, float, float]:
    return ("identity", 0.0, 0.0) if activation is None else (activation.name, activation.alpha, activation.beta)


@np.errstate(all="ignore")
def _activation(x: Array, *, activation: Any) -> tuple[Array]:
    return (value_at(activation.name, wide(x), activation.alpha, activation.beta),)


def _activation_backward(dy: Array, x: Array, *, activation: Any) -> tuple[Array]:
    return (apply_input_slope(activation.name, x, dy, activation.alpha, activation.beta),)


GRAPH["activation"] = Rule(
    _activation, lambda dys, results, x, *, activation: _activation_backward(dys[0], x, activation=activation)
)
GRAPH["activation_backward"] = Rule(_activation_backward)
GRAPH["activation_output_slope"] = Rule(
    lambda dy, y, *, activation: (apply_slope(activation.name, y, dy, activation.alpha, activation.beta),)
)


def _norm_options(statistics: Array | None, options: dict[str, Any]) -> dict[str, Any]:
    name, alpha, beta = _parameters(options["activation"])
    kind = options["kind"].removesuffix("_norm")
    found = {
        "kind": kind, "num_groups": options["groups"], "eps": options["eps"], "activation": name, "alpha": alpha,
        "act_beta": beta, "axis" if kind == "layer" else "channel_axis": options["axis"],
    }  # fmt: skip
    return found if statistics is None else found | {"mean": statistics[0], "var": statistics[1]}


def _norm(x: Array, gamma: Any, beta: Any, statistics: Any, *, frozen: bool, **options: Any) -> tuple[Array, ...]:
    found = norm_forward(x, gamma, beta, **_norm_options(statistics, options))
    return (found.y, np.stack([found.mean, found.var])) if statistics is None else (found.y,)


def _norm_backward(
    dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Any, *, frozen: bool, given: bool, **options: Any
) -> tuple[Array, ...]:
    named = _norm_options(statistics, options)
    return norm_backward(dy, x, y, gamma, beta, frozen=frozen, slope_from=options["slope_from"], **named)[:3]


def _norm_vjp(
    dys: Gradients, results: Sequence[Array], x: Array, gamma: Any, beta: Any, statistics: Any, *, frozen: bool,
    **options: Any,
) -> Gradients:  # fmt: skip
    dy = dys[0]
    assert dy is not None
    named = _norm_options(statistics, options)
    found = norm_backward(dy, x, results[0], gamma, beta, frozen=frozen, slope_from=options["slope_from"], **named)
    return [found.dx, None if gamma is None else found.dgamma, None if beta is None else found.dbeta, None]


GRAPH["norm"] = Rule(_norm, _norm_vjp)
GRAPH["norm_backward"] = Rule(_norm_backward)


# Batch norm over shards. Statistics and sums are [2, C].


def _shard_options(statistics: Array, options: dict[str, Any]) -> dict[str, Any]:
    return _norm_options(statistics, {**options, "kind": "batch_norm", "groups": 1})


def _norm_statistics(x: Array, *, axis: int) -> tuple[Array, ...]:
    found = norm_forward(x, kind="batch", channel_axis=axis)
    return (np.stack([found.mean, found.var]),)


def _shard_backward(dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, options: Any) -> Any:
    named = _shard_options(statistics, options)
    return norm_backward(dy, x, y, gamma, beta, slope_from=options["slope_from"], **named)


def _norm_sums(dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, **options: Any) -> Any:
    found = _shard_backward(dy, x, y, gamma, beta, statistics, options)
    return (np.stack([found.dbeta, found.dgamma]),)


def _norm_dx(
    dy: Array, x: Array, y: Any, gamma: Any, beta: Any, statistics: Array, sums: Array, count: Array, **options: Any
) -> tuple[Array, ...]:
    """rstd * gamma * (dz - sum(dz) / count - xhat * sum(dz * xhat) / count), with sums over all shards"""
    found = _shard_backward(dy, x, y, gamma, beta, statistics, options)
    axis = options["axis"] % x.ndim
    shape = [-1 if k == axis else 1 for k in range(x.ndim)]
    factor = found.rstd if gamma is None else found.rstd * wide(gamma)
    mean_dz, mean_dz_xhat = ((wide(s) / wide(count)).reshape(shape) for s in sums)
    return (factor.reshape(shape) * (found.dz - mean_dz - found.xhat * mean_dz_xhat),)


def _sync_norm(
    x: Array, gamma: Any, beta: Any, statistics: Array, count: Array, *, exchange: Any, **options: Any
) -> tuple[Array, ...]:
    return (norm_forward(x, gamma, beta, **_shard_options(statistics, options)).y,)


def _sync_norm_vjp(
    dys: Gradients, results: Sequence[Array], x: Array, gamma: Any, beta: Any, statistics: Array, count: Array, *,
    exchange: Any, **options: Any,
) -> Gradients:  # fmt: skip
    """dx includes the gradient of the statistics; dgamma and dbeta are this shard's part."""
    dy = dys[0]
    assert dy is not None
    saved = (dy, x, results[0], gamma, beta, statistics)
    (sums,) = _norm_sums(*saved, **options)
    (dx,) = _norm_dx(*saved, np.sum(exchange(sums), axis=0), count, **options)
    return [dx, None if gamma is None else sums[1], None if beta is None else sums[0], None, None]


GRAPH["norm_statistics"] = Rule(_norm_statistics)
GRAPH["norm_sums"] = Rule(_norm_sums)
GRAPH["norm_dx"] = Rule(_norm_dx)
GRAPH["sync_norm"] = Rule(_sync_norm, _sync_norm_vjp)


def _images(a: Array, channels_last: bool) -> Array:
    return np.moveaxis(a, -1, 1) if channels_last else a


def _laid_out(a: Array, channels_last: bool) -> Array:
    return np.moveaxis(a, 1, -1) if channels_last else a


def _conv_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("stride", "padding", "dilation", "groups")}


def _convolved(x: Array, w: Array, b: Array | None, options: dict[str, Any]) -> Array:
    """Before the activation, channels first."""
    images, named = _images(x, options["channels_last"]), _conv_options(options)
    if options["output_padding"] is None:
        return conv_forward(images, w, b, **named)
    return conv_transpose_forward(images, w, b, output_padding=options["output_padding"], **named)


@np.errstate(all="ignore")
def _conv(x: Array, w: Array, b: Array | None, **options: Any) -> tuple[Array]:
    z = _convolved(x, w, b, options)
    return (_laid_out(value_at(*_shuffled(_parameters(options["activation"]), z)), options["channels_last"]),)


def _shuffled(parameters: tuple[str, float, float], z: Array) -> tuple[str, Array, float, float]:
    name, alpha, beta = parameters
    return name, z, alpha, beta


def _conv_backward(dy: Array, x: Array, w: Array, **options: Any) -> tuple[Array, ...]:
    last = options["channels_last"]
    backward = conv_backward if options["output_padding"] is None else conv_transpose_backward
    dx, dw, db = backward(_images(dy, last), _images(x, last), w, **_conv_options(options))
    return _laid_out(dx, last), dw, db


def _conv_vjp(dys: Gradients, results: Sequence[Array], x: Array, w: Array, b: Any, **options: Any) -> Gradients:
    dy = dys[0]
    assert dy is not None
    name, alpha, beta = _parameters(options["activation"])
    dz = wide(dy) if name == "identity" else apply_slope(name, results[0], dy, alpha, beta)
    dx, dw, db = _conv_backward(dz, x, w, **options)
    return [dx, dw, None if b is None else db]


def _conv_second(dys: Gradients, results: Sequence[Array], dy: Array, x: Array, w: Array, **options: Any) -> Gradients:
    gdx, gdw, gdb = dys
    options = {**options, "activation": None}
    last = options["channels_last"]
    by_dy, by_x, by_w = [], [], []
    if gdx is not None:
        by_dy.append(_conv(gdx, w, None, **options)[0])
        by_w.append(_conv_backward(dy, gdx, w, **options)[1])
    if gdw is not None:
        by_dy.append(_conv(x, gdw, None, **options)[0])
        by_x.append(_conv_backward(dy, x, gdw, **options)[0])
    if gdb is not None:
        channels = gdb.reshape(1, -1, *(1,) * (dy.ndim - 2))
        by_dy.append(np.broadcast_to(_laid_out(channels, last), dy.shape))
    return [sum_of(by_dy, dy), sum_of(by_x, x), sum_of(by_w, w)]


GRAPH["conv"] = Rule(_conv, _conv_vjp)
GRAPH["conv_backward"] = Rule(_conv_backward, _conv_second)


def _pool(x: Array, *, kind: str, **options: Any) -> tuple[Array, ...]:
    o, last = options, options["channels_last"]
    images = _images(x, last)
    window = (o["kernel"], o["stride"], o["padding"])
    if kind == "max":
        y, indices = max_pool_forward(images, *window, o["dilation"])
        return wide(_laid_out(y, last)), _laid_out(indices, last)
    if kind == "average":
        return (_laid_out(average_pool_forward(images, *window, o["count_includes_padding"]), last),)
    return (_laid_out(l2_pool_forward(images, *window), last),)


def _pool_backward(dy: Array, *saved: Array, kind: str, shape: Shape, **options: Any) -> tuple[Array]:
    o, last = options, options["channels_last"]
    planes = (shape[0], shape[-1], *shape[1:-1]) if last else shape
    window = (o["kernel"], o["stride"], o["padding"])
    given = [_images(a, last) for a in (dy, *saved)]
    if kind == "max":
        dx = max_pool_backward(given[0], given[1], planes)
    elif kind == "average":
        dx = average_pool_backward(given[0], planes, *window, o["count_includes_padding"])
    else:
        dx = l2_pool_backward(given[0], given[1], given[2], *window)
    return (_laid_out(dx, last),)


def _pool_vjp(dys: Gradients, results: Sequence[Array], x: Array, *, kind: str, **options: Any) -> Gradients:
    dy = dys[0]
    assert dy is not None
    saved = {"max": (results[-1],), "average": (), "l2": (x, results[0])}[kind]
    return _pool_backward(dy, *saved, kind=kind, shape=x.shape, **options)


GRAPH["pool"] = Rule(_pool, _pool_vjp)


def _pool_second(
    dys: Gradients, results: Sequence[Array], dy: Array, *saved: Array, kind: str, shape: Shape, **options: Any
) -> Gradients:
    """Linear in dy: averages of the gradients, or those at the indices."""
    assert kind != "l2"
    given, last = dys[0], options["channels_last"]
    assert given is not None
    if kind == "average":
        return _pool(given, kind=kind, **options)
    planes = _images(wide(given), last).reshape(*_images(given, last).shape[:2], -1)
    places = _images(saved[0], last)
    found = np.take_along_axis(planes, places.reshape(*places.shape[:2], -1), -1)
    return [_laid_out(found.reshape(places.shape), last), None]


GRAPH["pool_backward"] = Rule(_pool_backward, _pool_second)


# ---- losses: (loss, its gradient) ------------------------------------------------------------------------------------


def _reduced(losses: Array, slopes: Array, weights: Array | None, reduction: str, scale: float) -> tuple[Array, Array]:
    loss, gradient = reduced_loss(losses, slopes, weights, reduction)
    return np.asarray(loss * scale), gradient * scale


def _entropy(
    logits: Array, labels: Array, weights: Array | None, *, reduction: str, scale: float, ignore_index: int,
    smoothing: float,
) -> tuple[Array, Array]:  # fmt: skip
    if labels.dtype.kind == "f":
        return _reduced(*soft_cross_entropy(logits, labels, label_smoothing=smoothing), weights, reduction, scale)
    kept = labels != ignore_index
    losses, slopes = softmax_cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=smoothing)
    if kept.all() or reduction in ("none", "sum"):
        return _reduced(losses, slopes, weights, reduction, scale)
    # Ignored rows do not count.
    loss, some = _reduced(losses[kept], slopes[kept], None if weights is None else weights[kept], reduction, scale)
    gradient = np.zeros_like(slopes)
    gradient[kept] = some
    return loss, gradient


def _cosine(
    y: Array, target: Array, weights: Array | None, *, reduction: str, scale: float
) -> tuple[Array, Array]:  # fmt: skip
    return _reduced(*cosine_distance(y, target), weights, reduction, scale)


def _elements(
    y: Array, target: Array, weights: Array | None, *, kind: int, a: float, b: float, reduction: str, scale: float
) -> tuple[Array, Array]:
    """0: a d^2 up to |d| = b, then linear; 1: |d|, slope a at 0; 2: hinge; 3: log, eps a; 4: sigmoid, t -> a t + b."""
    x, t = wide(y), wide(target)
    d = x - t
    if kind == 0:
        inside = np.abs(d) <= b
        beyond = 0.0 if math.isinf(b) else 2 * a * b * np.abs(d) - a * b * b
        losses, slopes = np.where(inside, a * d * d, beyond), 2 * a * np.clip(d, -b, b)
    elif kind == 1:
        losses, slopes = np.abs(d), np.where(d == 0, a, np.sign(d))
    elif kind == 2:
        side = 2 * t - 1
        losses, slopes = np.maximum(0, 1 - side * x), np.where(side * x <= 1, -side, 0)
    elif kind == 3:
        losses = -t * np.log(x + a) - (1 - t) * np.log(1 - x + a)
        slopes = (1 - t) / (1 - x + a) - t / (x + a)
    else:
        t = a * t + b
        losses = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)
        slopes = (1 - t) * sigmoid(x) - t * sigmoid(-x)
    return _reduced(losses, slopes, weights, reduction, scale)


def _loss_vjp(two_sided: bool, rows: bool) -> Vjp:
    def vjp(
        dys: Gradients, results: Sequence[Array], y: Array, target: Array, weights: Any, **options: Any
    ) -> Gradients:
        dy = dys[0]
        assert dy is not None
        g = wide(np.asarray(dy))
        dx = results[1] * (g[..., None] if rows and g.ndim else g)
        return [dx, -dx if two_sided and options["kind"] < 2 else None, None]

    return vjp


GRAPH["softmax_cross_entropy"] = Rule(_entropy, _loss_vjp(two_sided=False, rows=True))
GRAPH["cosine_distance"] = Rule(_cosine, _loss_vjp(two_sided=False, rows=True))
GRAPH["element_losses"] = Rule(_elements, _loss_vjp(two_sided=True, rows=False))


# ---- recurrent layers ------------------------------------------------------------------------------------------------


def _lstm_slots(lengths: Array, *, steps: int) -> tuple[Array, Array]:
    """The samples that are active in each step, and the samples by falling length."""
    active = np.array([(lengths > t).sum() for t in range(steps)], np.int64)
    return active, np.array(sorted(range(lengths.size), key=lambda n: (-lengths[n], n)), np.int64)


class _Cell(NamedTuple):
    """The oracle of a cell."""

    parameters: Any  # LstmCell, GruCell or RnnCell
    gates: int
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    options: dict[str, str]  # its own, and what the oracle calls them


_RECURRENT: Final = {
    "lstm": _Cell(
        LstmCell, 4, lstm_forward, lstm_backward,
        {"output_gate_reads": "output_reads", "coupled": "coupled", "cell_clip": "cell_clip"},
    ),
    "gru": _Cell(GruCell, 3, gru_forward, gru_backward, {"kind": "kind", "flip": "flip"}),
    "rnn": _Cell(RnnCell, 1, rnn_forward, rnn_backward, {}),
}  # fmt: skip
# The inputs that precede the parameters of the cells.
_FIRST: Final = 11
_UNGATED: Final = ("projection", "gamma_c", "beta_c")


def _recurrent_call(inputs: Sequence[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the oracle, which has time first and states of several cells."""
    x, table, h0, c0, active, order, seed, reset, *factors = inputs[:_FIRST]
    of, batch_first = options["options"], options["batch_first"]
    kind = _RECURRENT[of.cell]
    # Indices have time first.
    sequence = table[x] if table is not None else np.moveaxis(x, 0, 1) if batch_first else x
    steps, samples, _ = sequence.shape
    fields = kind.parameters._fields
    cells = []
    for i in range(_FIRST, len(inputs), len(fields)):
        given = dict(zip(fields, inputs[i : i + len(fields)], strict=True))
        projection = given.get("projection")
        units = given["wh"].shape[-1] if projection is None else projection.shape[-1]
        shaped = {
            name: a if a is None or name in _UNGATED else a.reshape(kind.gates, units, *a.shape[1:])
            for name, a in given.items()
        }
        cells.append(kind.parameters(**shaped))
    states = [None if s is None else s.reshape(len(cells), samples, -1) for s in (h0, c0)]
    directions = 2 if options["bidirectional"] else 1
    mask, zoneout, cell_zoneout = (
        a.swapaxes(-3, -2) if a is not None and batch_first and a.ndim > 2 else a for a in factors
    )
    named: dict[str, Any] = {"directions": directions, "reset": reset, "mask": mask, "zoneout_h": zoneout}
    named |= {"clip": of.clip, "norm": of.norm, "eps": of.norm_eps}
    named |= {theirs: getattr(of, ours) for ours, theirs in kind.options.items()}
    named["activations"] = [_parameters(a) for a in of.activations]
    if of.cell == "lstm":
        named["zoneout_c"] = cell_zoneout
    if active is not None:
        on = np.zeros((steps, samples), bool)
        for t in range(steps):
            on[t, order[: active[t]]] = True
        named["active"] = on
    if options["dropout"]:
        shape = (steps, samples, directions * cells[0].wh.shape[-1])
        layers = len(cells) // directions
        number = int(seed) % 2**64
        named["masks"] = [philox_mask(number, layer, shape, options["dropout"]) for layer in range(layers - 1)]
    return (sequence, cells, *states[: 2 if of.cell == "lstm" else 1]), named


def _recurrent(*inputs: Any, **options: Any) -> tuple[Any, ...]:
    arguments, named = _recurrent_call(inputs, options)
    found = _RECURRENT[options["options"].cell].forward(*arguments, **named)
    y = np.moveaxis(found.y, 0, 1) if options["batch_first"] else found.y
    cn = getattr(found, "cn", None)
    hn, cn = (None if s is None else s[0] if options["single"] else s for s in (found.hn, cn))
    return y, hn, np.zeros(0) if cn is None else cn, None


def _recurrent_vjp(dys: Gradients, results: Sequence[Any], *inputs: Any, **options: Any) -> Gradients:
    arguments, named = _recurrent_call(inputs, options)
    dy, *states = dys[: 3 if options["options"].cell == "lstm" else 2]
    if dy is not None and options["batch_first"]:
        dy = np.moveaxis(dy, 0, 1)
    if options["single"]:
        states = [None if s is None else s[None] for s in states]
    found = _RECURRENT[options["options"].cell].backward(dy, *states, *arguments, **named)
    x, table, *initial = inputs[:4]
    dx = np.moveaxis(found.dx, 0, 1) if options["batch_first"] and table is None else found.dx
    first: list[Any] = [dx, None] if table is None else [None, embedding_backward(dx, x, table.shape[0])]
    first += [
        None if s is None else getattr(found, name).reshape(s.shape)
        for name, s in zip(("dh0", "dc0"), initial, strict=True)
    ]
    gradients = (gradient for cell in found.cells for gradient in cell)
    parts = [
        None if given is None else gradient.reshape(given.shape)
        for given, gradient in zip(inputs[_FIRST:], gradients, strict=True)
    ]
    return [*first, *[None] * (_FIRST - len(first)), *parts]


GRAPH["lstm_slots"] = Rule(_lstm_slots)
GRAPH.update(dict.fromkeys(_RECURRENT, Rule(_recurrent, _recurrent_vjp)))


# ---- linear recurrences ----------------------------------------------------------------------------------------------


def _scan_vjp(dys: Gradients, results: Sequence[Array], a: Array, b: Array, h0: Any, *, axis: int) -> Gradients:
    da, db, dh0 = scan_backward(dys[0], dys[1], a, results[0], h0, axis=axis)
    return [da, db, None if h0 is None else dh0]


def _scan_backward_vjp(
    dys: Gradients, results: Sequence[Array], dy: Any, dhn: Any, a: Array, y: Array, h0: Any, *, axis: int
) -> Gradients:
    """Step by step: the reverse of the loop over steps in the oracle of the gradients."""
    gda, gdb = (np.zeros(y.shape, wide(y).dtype) if g is None else wide(g) for g in dys[:2])
    gda, gdb, a, y, adjoint = (np.moveaxis(wide(v), axis, 0) for v in (gda, gdb, a, y, results[1]))
    state = y.shape[1:]
    first = np.zeros(state, y.dtype) if h0 is None else wide(h0)
    carried = np.zeros(state, y.dtype) if dys[2] is None else wide(dys[2])  # the gradient of a[t] * l[t]
    ga, gy, gl = np.zeros_like(y), np.zeros_like(y), np.zeros_like(y)
    gh0 = np.zeros(state, y.dtype)
    for t in range(len(y)):
        ga[t] = carried * adjoint[t]
        gl[t] = gdb[t] + gda[t] * (y[t - 1] if t else first) + carried * a[t]
        if t:
            gy[t - 1] = gda[t] * adjoint[t]
        else:
            gh0 = gda[t] * adjoint[t]
        carried = gl[t]
    ga, gy, gl = (np.moveaxis(v, 0, axis) for v in (ga, gy, gl))
    return [None if dy is None else gl, None if dhn is None else carried, ga, gy, None if h0 is None else gh0]


GRAPH["scan"] = Rule(lambda a, b, h0, *, axis: scan_forward(a, b, h0, axis=axis), _scan_vjp)
GRAPH["scan_backward"] = Rule(
    lambda dy, dhn, a, y, h0, *, axis: scan_backward(dy, dhn, a, y, h0, axis=axis), _scan_backward_vjp
)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _one(a: Any) -> Any:
    return wide(a).reshape(())


def _update(rate: Any, beta1: Any, beta2: Any, eps: Any, p: Any, g: Any, m: Any, v: Any, top: Any, *, kind: str) -> Any:
    if kind == "sgd":
        return (wide(p) - _one(rate) * wide(g),)
    keep1, keep2 = _one(beta1), _one(beta2)
    corrected = _one(rate) * (1 - keep1) / np.sqrt(1 - keep2)  # adam_step makes the opposite correction
    return adam_step(
        p, g, m, v, top, step=1, learning_rate=corrected, beta1=keep1, beta2=keep2, eps=_one(eps), epsilon_hat=True
    )


def _update_vjp(dys: Gradients, results: Sequence[Array], *arrays: Any, kind: str) -> Gradients:
    shapes = [None if a is None else a.shape for a in arrays]
    g, m, v, top = (None if a is None else wide(a) for a in arrays[5:])
    dp, *others = (np.zeros(arrays[4].shape) if dy is None else wide(dy) for dy in dys)

    def total(terms: Array, i: int) -> Any:
        return np.asarray(terms.sum()).reshape(shapes[i])

    assert g is not None
    rate = _one(arrays[0])
    if kind == "sgd":
        return [total(-g * dp, 0), None, None, None, dp, -rate * dp, None, None, None]
    beta1, beta2, eps = (_one(a) for a in arrays[1:4])
    new_m, new_v = wide(results[1]), wide(results[2])
    root = np.sqrt(new_v if top is None else wide(results[3]))
    dm = others[0] - rate * dp / (root + eps)
    deps = rate * dp * new_m / (root + eps) ** 2
    dlargest = deps / (2 * root) + (0 if top is None else others[2])
    wins = 1.0 if top is None else _share(new_v, top)
    dv = others[1] + dlargest * wins
    dg = (1 - beta1) * dm + 2 * (1 - beta2) * g * dv
    settings = [
        total(-dp * new_m / (root + eps), 0),
        total(dm * (m - g), 1),
        total(dv * (v - g * g), 2),
        total(deps, 3),
    ]
    return [*settings, dp, dg, beta1 * dm, beta2 * dv, None if top is None else dlargest * (1 - wins)]


def _share(a: Array, b: Array) -> Any:
    return np.where(a > b, 1.0, np.where(a == b, 0.5, 0.0))


GRAPH["optimizer_step"] = Rule(_update, _update_vjp)
