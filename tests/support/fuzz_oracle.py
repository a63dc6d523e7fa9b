"""What a call of an array function should have given, by the oracle: for fuzz_arrays.py.

`disagreement` takes a call as it was made: the arguments before it (`old`), those after it, and its answer. Bounds are
those of retrograd.lab.cases where it has some, else roundings of the sizes of the terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import retrograd as rg
from retrograd.lab import bounds, cases, reference
from support.fuzz_calls import Parts

Array = np.ndarray[Any, Any]
Triple = tuple[str, Any, Any, Any]  # name, got, expected, tolerance

SLACK = 2.0  # bounds take roundings to be independent, but a stride of 0 repeats the same ones
ROUNDINGS = 64  # of an elementwise function, in units of its terms


def disagreement(name: str, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: dict[int, Any]) -> str | None:
    """ "" if the oracle agrees, None if it cannot say."""
    oracle = ORACLES.get(name)
    triples = None if oracle is None else oracle(old, new, answer, notes)
    if triples is None:
        return None
    for label, got, expected, tolerance in triples:
        if np.abs(expected).max(initial=0) > 1e30:  # near the end of the range: it may overflow on the way
            return None
        error = bounds.error_in_tolerances(np.asarray(got), np.asarray(expected), np.asarray(tolerance, np.float64))
        if error > SLACK:
            return f"{label} is {error:.3g} tolerances from the oracle"
    return ""


def wide(values: Any) -> Array:
    return np.asarray(values).astype(np.longdouble)


def roundings(got: Any, *terms: Any, count: float = ROUNDINGS) -> Array:
    """A tolerance of that many roundings of these sizes, in the type of the result; bfloat16 has 2**-8."""
    dtype = np.asarray(got).dtype
    eps = 2.0**-8 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    smallest = 1e-38 if dtype.name == "bfloat16" else float(np.finfo(dtype).tiny)
    size: Any = sum(np.abs(wide(term)) for term in terms)
    return np.asarray(count * eps * size + smallest, np.float64)


# ---- normalization ---------------------------------------------------------------------------------------------------


def activation_options(activation: Any) -> dict[str, Any] | None:
    if activation is None:
        return {}
    if not isinstance(activation, (str, rg.Activation)):
        return None
    f = activation if isinstance(activation, rg.Activation) else rg.Activation(activation)
    return {"activation": f.name, "alpha": f.alpha, "act_beta": f.beta}


def usual(*values: Any) -> bool:
    """Whether these are arrays of the types that have bounds, or nothing."""
    return all(
        value is None
        or (
            isinstance(value, np.ndarray)
            and (value.dtype.name in bounds.precision.PRECISIONS or value.dtype.kind in "iu")
        )
        for value in values
    )


def norm_forward(
    kind: Any, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    x, eps, running = old["x"], float(old.get("eps", 1e-5)), old.get("running_mean")
    activation = activation_options(old.get("activation"))
    if activation is None or not 1e-8 <= eps <= 1 or not usual(x, old.get("gamma"), old.get("beta"), running):
        return None
    options: dict[str, Any] = {"kind": kind, "eps": eps, **activation}
    options |= {key: int(old[key]) for key in ("axis", "channel_axis", "num_groups") if key in old}
    mean, var = old.get("mean"), old.get("var")
    training = old.get("training", True)
    if mean is None and not training:
        mean, var = running, old["running_var"]
    if mean is not None:
        if not usual(mean, var) or np.min(var, initial=0) < 0:
            return None
        if kind == "instance":
            shape = (x.shape[0], x.shape[options["channel_axis"]])
            mean, var = np.broadcast_to(mean, shape), np.broadcast_to(var, shape)
        options |= {"mean": mean, "var": var}
    return norm_forward_triples(old, new, answer, options, running if training and mean is None else None)


def norm_forward_triples(
    old: dict[str, Any], new: dict[str, Any], answer: Any, options: dict[str, Any], running: Any
) -> Iterator[Triple]:
    x, gamma, beta = old["x"], old.get("gamma"), old.get("beta")
    y, cache = answer
    expected = reference.norm_forward(x, gamma, beta, **options)
    alpha, act_beta, name = (
        options.get("alpha", 0.0),
        options.get("act_beta", 0.0),
        options.get("activation", "identity"),
    )
    bound = bounds.forward_bound(
        x, gamma, beta, expected, lambda z: reference.activation_value(name, z, alpha, act_beta), **options
    )
    if new.get("out") is not None and y is not new["out"]:
        yield "an array that is not out", 1, 0, 0
    yield "y", y, expected.y, bound.y
    yield "mean", cache.mean, expected.mean, bound.mean
    yield "var", cache.var, expected.var, bound.var
    if new.get("keep_x") is not None:
        yield "keep_x", new["keep_x"], x, 0.0
    if running is not None:
        update = old.get("update", rg.RunningUpdate.pytorch())
        count = old.get("count") or cache.problem.set_size
        news = reference.running_update(
            running, old["running_var"], cache.mean, cache.var, count, update.keep, update.unbiased
        )
        for label, right in zip(("running_mean", "running_var"), news, strict=True):
            batch = np.abs(cache.mean if label == "running_mean" else cache.var)
            yield label, new[label], right, roundings(new[label], old[label], batch.max(initial=0), count=4)


def norm_backward(
    kind: Any, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    cache = old["cache"]
    note = notes.get(id(cache))
    if note is None or old.get("sums") is not None or not usual(old["dy"], cache.x) or cache.problem.eps < 1e-8:
        return None
    if cache.problem.activation.name in ("hard_shrink", "threshold"):  # y may not tell on which side of a jump z was
        return None
    return norm_backward_triples(old["dy"], cache, note, answer, old)


def norm_gradients(dy: Array, cache: Any, note: dict[str, Any]) -> tuple[Any, Any]:
    """The oracle's gradients and their bounds."""
    problem = cache.problem
    f = problem.activation
    options = {key: value for key, value in note.items() if key != "slope_from"}
    options |= {"eps": problem.eps, "activation": f.name, "alpha": f.alpha, "act_beta": f.beta}
    if cache.given:
        options |= {"mean": cache.mean, "var": cache.var}
    x, gamma, beta = (None if a is None else np.array(a) for a in (cache.x, cache.gamma, cache.beta))
    assert x is not None
    y = None if cache.y is None else np.array(cache.y)
    slope_error = None
    if y is None and f.name != "identity":
        forward = reference.norm_forward(x, gamma, beta, **options)
        slope = partial(reference.activation_input_slope, f.name, alpha=f.alpha, beta=f.beta)
        slope_error = bounds.input_slope_error(x, gamma, beta, forward, slope, **options)
    slope_from = "output" if y is not None else "input"
    right = reference.norm_backward(dy, x, y, gamma, beta, slope_from=slope_from, frozen=cache.frozen, **options)
    return right, bounds.backward_bound(dy, x, gamma, right, slope_error=slope_error, frozen=cache.frozen, **options)


def norm_backward_triples(
    dy: Array, cache: Any, note: dict[str, Any], answer: Any, old: dict[str, Any]
) -> Iterator[Triple]:
    right, bound = norm_gradients(dy, cache, note)
    for name in ("dx", "dgamma", "dbeta"):
        got = getattr(answer, name)
        if got is not None:
            yield from accumulated(name, got, getattr(right, name), getattr(bound, name), old)


def accumulated(name: str, got: Any, right: Any, bound: Any, old: dict[str, Any]) -> Iterator[Triple]:
    """A gradient, or what it was added to."""
    if old.get("accumulate"):
        start = old["out"][name] if isinstance(old["out"], dict) else getattr(old["out"], name)
        right = wide(start) + right
        bound = bound + roundings(got, start, right, count=4)
    yield name, got, right, bound


def gradient_sums(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    cache = old["cache"]
    if id(cache) not in notes or not usual(old["dy"], cache.x) or cache.problem.eps < 1e-8:
        return None
    if cache.problem.activation.name in ("hard_shrink", "threshold"):
        return None
    right, bound = norm_gradients(old["dy"], cache, notes[id(cache)])
    return iter(
        [
            ("sum_dz", answer.sum_dz, right.dbeta, bound.dbeta),
            ("sum_dz_xhat", answer.sum_dz_xhat, right.dgamma, bound.dgamma),
        ]
    )


def statistics(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    x = old["x"]
    if not usual(x):
        return None
    options: dict[str, Any] = {"kind": "batch", "channel_axis": int(old.get("channel_axis", 1))}
    right = reference.norm_forward(x, **options)
    bound = bounds.forward_bound(x, None, None, right, lambda z: z, **options)
    return iter([("mean", answer.mean, right.mean, bound.mean), ("var", answer.var, right.var, bound.var)])


def combine_statistics(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    parts = old["parts"]
    if not all(
        isinstance(part, rg.NormStatistics) and isinstance(part.count, int) and part.count >= 0 for part in parts
    ):
        return None
    if not parts[0].count or not all(usual(part.mean, part.var) for part in parts):
        return None
    total = sum(part.count for part in parts)
    mean = sum(part.count * wide(part.mean) for part in parts) / total
    var = sum(part.count * (wide(part.var) + (wide(part.mean) - mean) ** 2) for part in parts) / total
    size = np.max([np.abs(part.mean) for part in parts if part.count], axis=0, initial=1.0)
    return iter([("mean", answer.mean, mean, 1e-14 * size * len(parts)), ("var", answer.var, var, 1e-14 * size**2 * 8)])


# ---- elementwise, linear, losses -------------------------------------------------------------------------------------


def activation_forward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    options, x = activation_options(old["activation"]), old["x"]
    if not options or not usual(x) or x.dtype.itemsize < 4:
        return None
    right = reference.activation_value(options["activation"], x, options["alpha"], options["act_beta"])
    size = 1 + abs(options["alpha"]) + abs(options["act_beta"])
    return iter([("y", answer, right, roundings(answer, right, np.minimum(np.abs(x), 1) * size))])


def activation_backward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    options, dy = activation_options(old["activation"]), old["dy"]
    by_input = old.get("x") is not None
    known = old["x"] if by_input else old["y"]
    if not options or not usual(dy, known) or dy.dtype.itemsize < 4 or not by_input:
        return None
    apply = reference.apply_input_slope
    right = apply(options["activation"], known, dy, options["alpha"], options["act_beta"])
    size = 1 + abs(options["alpha"]) + abs(options["act_beta"])
    bound = roundings(answer, right, wide(dy) * size)
    if old.get("accumulate"):
        right, bound = wide(old["out"]) + right, bound + roundings(answer, old["out"], right, count=4)
    return iter([("dx", answer, right, bound)])


def dropout(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    x = old["x"]
    if not usual(x):
        return None
    right = wide(x) * reference.dropout_mask(int(old["seed"]), x.shape, float(old["rate"]))
    return iter([("y", answer, right, roundings(answer, right, count=2))])


def linear_forward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    x, w, b = old["x"], old["w"], old.get("b")
    if not usual(x, w, b):
        return None
    right = reference.linear_forward(x, w, b)
    size = reference.linear_forward(np.abs(x), np.abs(w), None if b is None else np.abs(b))
    return iter([("y", answer, right, roundings(answer, size, count=8 + 2 * math.sqrt(x.shape[-1])))])


def linear_backward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    dy, x, w = (old[name] for name in ("dy", "x", "w"))
    if not usual(dy, x, w):
        return None
    right, size = reference.linear_backward(dy, x, w), reference.linear_backward(*map(np.abs, (dy, x, w)))
    count = 8 + 2 * math.sqrt(max(dy.size, 1))
    return (
        triple
        for name, got, exact, terms in zip(answer._fields, answer, right, size, strict=True)
        if got is not None
        for triple in accumulated(name, got, exact, roundings(got, terms, count=count), old)
    )


def conv_options(old: dict[str, Any], transposed: bool) -> dict[str, Any] | None:
    """In the oracle's form; None if a mutation has given them another."""
    axes = old["x"].ndim - 2
    names = ("stride", "dilation", *(("output_padding",) if transposed else ()))
    given = {name: old[name] if isinstance(old[name], (list, tuple)) else (old[name],) * axes for name in names}
    padding = old["padding"] if isinstance(old["padding"], (list, tuple)) else (old["padding"],) * axes
    pairs = tuple(tuple(p) if isinstance(p, (list, tuple)) else (p, p) for p in padding)
    if max((*given["stride"], *given["dilation"], *(n for pair in pairs for n in pair)), default=0) > 100:
        return None
    return {**{k: tuple(map(int, v)) for k, v in given.items()}, "padding": pairs, "groups": int(old["groups"])}


def conv_forward(
    transposed: bool, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    x, w, b, last = old["x"], old["w"], old.get("b"), old["channels_last"]
    if not usual(x, w, b) or old.get("activation") is not None:
        return None
    options = conv_options(old, transposed)
    if options is None:
        return None
    function = reference.conv_transpose_forward if transposed else reference.conv_forward
    images = np.moveaxis(x, -1, 1) if last else x
    right = function(images, w, b, **options)
    size = function(np.abs(images), np.abs(w), None if b is None else np.abs(b), **options)
    got = np.moveaxis(answer, -1, 1) if last else answer
    return iter([("y", got, right, roundings(answer, size, count=8 + 2 * math.sqrt(w.size)))])


def conv_backward(
    transposed: bool, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    dy, x, w, last = old["dy"], old["x"], old["w"], old["channels_last"]
    if not usual(dy, x, w) or old.get("activation") is not None:
        return None
    options = conv_options(old, transposed)
    if options is None:
        return None
    options.pop("output_padding", None)
    function = reference.conv_transpose_backward if transposed else reference.conv_backward
    dy, x = (np.moveaxis(a, -1, 1) if last else a for a in (dy, x))
    right, size = function(dy, x, w, **options), function(*map(np.abs, (dy, x, w)), **options)
    if last:
        right, size = ((np.moveaxis(dx, 1, -1), dw, db) for dx, dw, db in (right, size))
    count = 8 + 2 * math.sqrt(max(dy.size, x.size, w.size, 1))
    return (
        triple
        for name, got, exact, terms in zip(answer._fields, answer, right, size, strict=True)
        if got is not None
        for triple in accumulated(name, got, exact, roundings(got, terms, count=count), old)
    )


def embedding_forward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    if not usual(old["table"]):
        return None
    return iter([("y", answer, old["table"][np.asarray(old["indices"]).astype(np.int64)], 0.0)])


def embedding_backward(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    dy, indices = old["dy"], np.asarray(old["indices"]).astype(np.int64)
    if not usual(dy):
        return None
    right, size = (reference.embedding_backward(d, indices, int(old["rows"])) for d in (dy, np.abs(dy)))
    start = wide(old["out"]) if old.get("accumulate") else np.zeros(right.shape)
    return iter([("dtable", answer, start + right, roundings(answer, size, start, count=8 + indices.size))])


def pool_windows(old: dict[str, Any], axes: int) -> tuple[Any, ...]:
    """Kernel, stride and padding as the oracle takes them."""
    kernel, stride, padding = old["kernel"], old.get("stride"), old.get("padding", 0)
    kernel = (kernel,) * axes if isinstance(kernel, int) else tuple(kernel)
    stride = kernel if stride is None else (stride,) * axes if isinstance(stride, int) else tuple(stride)
    padding = (padding,) * axes if isinstance(padding, int) else tuple(padding)
    return kernel, stride, tuple((p, p) if isinstance(p, int) else tuple(p) for p in padding)


def channels_second(array: Any, old: dict[str, Any]) -> Array:
    return np.moveaxis(np.asarray(array), -1, 1) if old.get("channels_last") else np.asarray(array)


def pooling(name: str, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    arrays = {key: channels_second(old[key], old) for key in ("x", "dy", "y") if key in old}
    if not usual(*arrays.values()) or any(array.size == 0 for array in arrays.values()):
        return None
    answers = answer if name == "max_pool_forward" else (answer,)
    got = [channels_second(a, old) for a in answers if a is not None]
    if "indices" in old:
        indices = channels_second(old["indices"], old).astype(np.int64)
        shape = got[0].shape
        if name == "max_unpool_backward":
            exact = size = reference.max_unpool_backward(arrays["dy"], indices)
        elif name == "max_unpool_forward":
            exact = size = reference.max_unpool_forward(arrays["x"], indices, shape)
        else:
            exact, size = (reference.max_pool_backward(d, indices, shape) for d in (arrays["dy"], np.abs(arrays["dy"])))
    else:
        windows = pool_windows(old, got[0].ndim - 2)
        includes = bool(old.get("count_includes_padding", True))
        x, dy = arrays.get("x"), arrays.get("dy")
        if name == "max_pool_forward":
            assert x is not None
            dilation = (old.get("dilation", 1),) * (x.ndim - 2) if isinstance(old.get("dilation", 1), int) else None
            if dilation is None:
                return None
            right = reference.max_pool_forward(x, *windows, dilation)
            return ((field, a, b, 0.0) for field, a, b in zip(rg.MaxPoolResult._fields, got, right, strict=False))
        if name == "average_pool_forward":
            assert x is not None
            exact, size = (reference.average_pool_forward(v, *windows, includes) for v in (x, np.abs(x)))
        elif name == "l2_pool_forward":
            assert x is not None
            exact = size = reference.l2_pool_forward(x, *windows)
        elif name == "average_pool_backward":
            assert dy is not None
            exact, size = (
                reference.average_pool_backward(d, got[0].shape, *windows, includes) for d in (dy, np.abs(dy))
            )
        else:
            assert x is not None
            assert dy is not None
            exact, size = (
                reference.l2_pool_backward(d, v, arrays["y"], *windows) for d, v in ((dy, x), (np.abs(dy), np.abs(x)))
            )
            size = np.abs(size) + reference.l2_pool_backward(np.abs(dy), np.abs(x), np.abs(arrays["y"]), *windows)
    start: Any = 0.0
    if old.get("accumulate"):
        start = wide(channels_second(old["out"], old))
    return iter([("result", got[0], start + exact, roundings(got[0], size, start))])


def losses(
    old: dict[str, Any], answer: Any, right: Array, slope: Array, sizes: tuple[Any, Any], count: int, like: Array
) -> Iterator[Triple] | None:
    reduction, given = old.get("reduction", "mean"), old.get("weights")
    if reduction in ("weighted_mean", "nonzero_mean"):  # the sum of the weights may be rounding alone
        return None
    share = float(old.get("scale", 1.0)) * (1 / max(count, 1) if reduction == "mean" else 1.0)
    weights = np.broadcast_to(wide(1.0 if given is None else given).T, right.shape[::-1]).T
    steep = weights.reshape(weights.shape + (1,) * (slope.ndim - weights.ndim)) * share
    return reduced(reduction, answer, right, slope, sizes, count, like, weights * share, steep)


def reduced(
    reduction: str,
    answer: Any,
    right: Array,
    slope: Array,
    sizes: tuple[Any, Any],
    count: int,
    like: Array,
    weights: Array,
    steep: Array,
) -> Iterator[Triple]:
    loss, gradient = answer
    bound = np.abs(weights) * roundings(like, right, sizes[0])
    if reduction == "none":
        yield "loss", loss, weights * right, bound + np.finfo(like.dtype).tiny
    else:
        total = np.sum(weights * right) if count or reduction == "sum" else math.nan
        yield "loss", loss, total, np.sum(bound) + 1e-12 * np.abs(weights * right).sum() + np.finfo(like.dtype).tiny
    if gradient is not None:
        tolerance = np.abs(steep) * roundings(like, slope, sizes[1]) + np.finfo(like.dtype).tiny
        yield "gradient", gradient, steep * slope, tolerance


def softmax_cross_entropy(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    logits, labels = old["logits"], np.asarray(old["labels"])
    if not usual(logits, labels, old.get("weights")) or not logits.shape[-1]:
        return None
    smoothing, reach = float(old.get("label_smoothing", 0.0)), 1 + np.ptp(wide(logits), axis=-1)
    if labels.dtype.kind == "f":
        right, slope = reference.soft_cross_entropy(logits, labels, label_smoothing=smoothing)
        reach = reach * (1 + np.abs(wide(labels)).sum(-1))
        return losses(old, answer, right, slope, (reach, reach[..., None]), right.size, logits)
    labels, ignored = labels.astype(np.int64), int(old.get("ignore_index", -100))
    right, slope = reference.softmax_cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=smoothing)
    if old.get("weights") is not None and (labels == ignored).any():  # the weights of ignored rows do not matter
        return None
    count = int((labels != ignored).sum())
    return losses(old, answer, right, slope, (reach, reach[..., None]), count, logits)


def element_loss(
    name: str, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    y, target = old["logits" if "logits" in old else "y"], old["target"]
    if not usual(y, target, old.get("weights")):
        return None
    options = {key: float(old[key]) for key in ("delta", "slope_at_zero", "label_smoothing") if key in old}
    right, slope = getattr(reference, name)(y, target, **options)
    sizes: tuple[Any, Any] = (0.0, 0.0)
    if name == "sigmoid_cross_entropy":
        sizes = (1 + np.abs(wide(target))) * (1 + np.abs(wide(y))), 1 + np.abs(wide(target))
    return losses(old, answer, right, slope, sizes, y.size, y)


# ---- optimizers ------------------------------------------------------------------------------------------------------

STATES = {  # and their names in the oracle
    "sgd_step": {"velocities": "velocity"},
    "adam_step": {"first_moments": "m", "second_moments": "v", "largest_second_moments": "largest"},
    "rmsprop_step": {"squares": "square", "means": "mean", "velocities": "velocity"},
}
CLIPPING = ("clip", "maximum_norm", "maximum_norm_each", "known_norm", "clip_before_scale")


def optimizer(name: str, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    lists = ["parameters", "gradients", *(state for state in STATES[name] if old.get(state) is not None)]
    if "means" in lists:  # the variance is a difference, whose terms the sizes below do not show
        return None
    before, after = ({key: one_list(side[key]) for key in lists} for side in (old, new))
    if not all(usual(*arrays) for side in (before, after) for arrays in side.values()):
        return None
    known = {*STATES[name], "parameters", "gradients", "gradient_scale", "num_threads", *CLIPPING}
    options = {key: value for key, value in old.items() if key not in known and value is not None}
    if any(np.min(a, initial=0) < 0 for key in lists if key in ("squares", "second_moments") for a in before[key]):
        return None
    return optimizer_triples(name, before, after, lists, options, old)


def one_list(arrays: Any) -> list[Any]:
    return [np.asarray(arrays)] if isinstance(arrays, (np.ndarray, memoryview)) else list(arrays)


def optimizer_triples(
    name: str, before: Any, after: Any, lists: list[str], options: dict[str, Any], old: dict[str, Any]
) -> Iterator[Triple]:
    clipping = {key: old[key] for key in CLIPPING if old.get(key) is not None}
    gradients = reference.clipped_gradients(before["gradients"], scale=old.get("gradient_scale", 1.0), **clipping)
    step: Callable[..., Any] = getattr(reference, name)
    if name == "adam_step":
        options.setdefault("learning_rate", 1e-3)
    for index, gradient in enumerate(gradients):
        p, states = before["parameters"][index], {STATES[name][key]: before[key][index] for key in lists[2:]}
        right = step(p, gradient, **states, **options)
        sizes = {key: np.abs(state) for key, state in states.items()}
        if options.get("velocity_of") == "step" and "velocity" in sizes:
            sizes["velocity"] = -sizes["velocity"]
        terms = step(np.abs(p), np.abs(gradient), **sizes, **options)
        for label, exact, size in zip(("parameters", *lists[2:]), right, terms, strict=True):
            got = after[label][index]
            tolerance = roundings(got, exact, size, p if label == "parameters" else 0.0)
            if label == "parameters" and name != "sgd_step":  # the step is of the size of the learning rate
                tolerance = tolerance + roundings(got, options["learning_rate"], 1e-3)
            yield f"{label}[{index}]", got, exact, tolerance


def global_norm(old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any) -> Iterator[Triple] | None:
    if not isinstance(old["arrays"], (list, tuple, np.ndarray)):
        return None
    arrays = one_list(old["arrays"])
    if not usual(*arrays) or any(a is None for a in arrays):
        return None
    right = math.sqrt(sum(float(np.sum(wide(a) ** 2)) for a in arrays))
    return iter([("norm", answer, right, 1e-12 * right)])


# ---- recurrent layers ------------------------------------------------------------------------------------------------

PARAMETERS: dict[str, Any] = {"lstm": cases.LstmParameters, "gru": cases.GruParameters, "rnn": cases.RnnParameters}
ORACLE_CELLS: dict[str, Any] = {"lstm": reference.LstmCell, "gru": reference.GruCell, "rnn": reference.RnnCell}
STATES_OF = {"lstm": ("h", "c"), "gru": ("h",), "rnn": ("h",)}


def named_activations(cell: str, old: dict[str, Any]) -> list[Any] | None:
    records: dict[str, Any] = {"lstm": rg.LstmActivations, "gru": rg.GruActivations}
    given = [old.get("activation", "tanh")] if cell == "rnn" else old.get("activations", records[cell]())
    if cell != "rnn" and not isinstance(given, records[cell]):
        return None
    named = []
    for f in given:
        options = activation_options(f)
        if not options or options["activation"] in ("hard_shrink", "threshold"):
            return None
        named.append((options["activation"], options["alpha"], options["act_beta"]))
    return named


def recurrent_factors(old: dict[str, Any], training: bool) -> dict[str, Any] | None:
    """reset, mask and zoneout, time first; None if it cannot say which elements a rate of zoneout has kept."""

    def ordered(array: Any, first: int) -> Any:
        swap = array is not None and old.get("batch_first") and array.ndim >= -first
        return array.swapaxes(first, first + 1) if swap else array

    def weights(part: Any) -> Any:
        if part is None or isinstance(part, np.ndarray):
            return ordered(part, -3)
        return np.array(1.0 - float(part))

    given = old.get("zoneout")
    parts = given if isinstance(given, tuple) else (given, None)
    if len(parts) != 2 or not all(part is None or isinstance(part, (np.ndarray, float)) for part in parts):
        return None
    if training and any(isinstance(part, float) and part for part in parts):
        return None
    reset, mask = old.get("reset"), old.get("mask")
    if not usual(reset, mask, *(part for part in parts if isinstance(part, np.ndarray))):
        return None
    found = {"reset": None if reset is None else ordered(np.asarray(reset) != 0, -2), "mask": ordered(mask, -3)}
    found |= {"zoneout_h": weights(parts[0])}
    return found | ({} if parts[1] is None else {"zoneout_c": weights(parts[1])})


def recurrent_options(
    cell: str, old: dict[str, Any], steps: int, samples: int, outputs: int, layers: int, training: bool
) -> dict[str, Any] | None:
    named, factors = named_activations(cell, old), recurrent_factors(old, training)
    if named is None or factors is None:
        return None
    active = None
    if old.get("lengths") is not None:
        active = reference.active_from_lengths(old["lengths"], steps)
    elif old.get("batch_sizes") is not None:
        active = reference.active_from_batch_sizes(old["batch_sizes"], samples)
    directions = 2 if old.get("bidirectional") else 1
    rate, masks = float(old.get("dropout", 0.0)), None
    if rate and layers > 1 and training:
        shape = (steps, samples, directions * outputs)
        masks = [reference.philox_mask(int(old.get("seed", 0)), layer, shape, rate) for layer in range(layers - 1)]
    options = {"directions": directions, "active": active, "activations": named, "masks": masks, **factors}
    options |= {"clip": old.get("clip"), "norm": old.get("norm"), "eps": old.get("norm_eps", 1e-5)}
    if cell == "lstm":
        options["output_reads"] = old.get("output_gate_reads", "new")
        options |= {"coupled": bool(old.get("coupled")), "cell_clip": old.get("cell_clip")}
    elif cell == "gru":
        options |= {"kind": old.get("kind", "after"), "flip": bool(old.get("flip"))}
    return options


def recurrent_inputs(cell: str, old: dict[str, Any]) -> tuple[Any, ...] | None:
    """x time first, cells and states in the oracle's form, and whether there is one cell given as such."""
    weights = old["weights"]
    if not isinstance(weights, list) or not weights:
        return None
    single = not isinstance(weights[0], list)
    if any(part is not None and not isinstance(part, (list, np.ndarray)) for part in (weights if single else [])):
        return None
    if single != isinstance(weights, Parts):
        return None
    listed = [weights] if single else weights
    parts = [p for of in listed for part in of for p in (part if isinstance(part, (tuple, list)) else [part])]
    if not all(part is None or isinstance(part, np.ndarray) for part in parts):
        return None
    cells = [PARAMETERS[cell](*of).stacked() for of in listed]
    x = old["x"]
    if not usual(x, old.get("table")):
        return None
    if old.get("table") is not None:
        x = old["table"][x.astype(np.int64)]
    if old.get("batch_first"):
        x = x.swapaxes(0, 1)
    given = (old.get(name + "0") for name in STATES_OF[cell])
    states = [None if state is None else np.asarray(state)[None] if single else state for state in given]
    arrays = [x, *(a for of in cells for a in of), *states]
    if not usual(*arrays) or x.ndim != 3 or x.size == 0:
        return None
    return x, cells, states, single


def of_step(old: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a sequence of one step."""
    if not isinstance(old["x"], np.ndarray):
        return None
    return {**old, "x": old["x"][None], "h0": old.get("h"), "c0": old.get("c")}


def output_width(cell: Any) -> int:
    projection = getattr(cell, "projection", None)
    return int(cell.wh.shape[-1] if projection is None else projection.shape[0])


def recurrent_bound(cell: str, *arguments: Any, **options: Any) -> Any:
    slopes = reference.activation_value, reference.activation_input_slope
    return getattr(bounds, f"{cell}_bound")(*arguments, *slopes, **options)


def recurrent_forward(
    cell: str, step: bool, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    called = of_step(old) if step else old
    found = None if called is None else recurrent_inputs(cell, called)
    if called is None or found is None:
        return None
    x, cells, states, single = found
    layers = len(cells) // (2 if old.get("bidirectional") else 1)
    training = bool(old.get("training", True))
    options = recurrent_options(cell, called, *x.shape[:2], output_width(cells[0]), layers, training)
    if options is None:
        return None
    given = [ORACLE_CELLS[cell](*of) for of in cells]
    right = getattr(reference, f"{cell}_forward")(x, given, *states, **options)
    bound = recurrent_bound(cell, x, cells, *states, None, *[None] * len(states), **options)
    names = [(name, name if step else name + "n") for name in STATES_OF[cell]]
    triples = [
        (name, np.asarray(getattr(answer, name))[(None,) * single], getattr(right, state + "n"), state)
        for state, name in names
    ]
    compared: list[Triple] = [(name, got, exact, getattr(bound, state + "n")) for name, got, exact, state in triples]
    if not step:
        y = np.asarray(answer.y)
        y = y.swapaxes(0, 1) if old.get("batch_first") else y
        compared.append(("y", y, right.y, bound.y))
    return iter(compared)


def recurrent_backward(
    cell: str, step: bool, old: dict[str, Any], new: dict[str, Any], answer: Any, notes: Any
) -> Iterator[Triple] | None:
    made = notes.get(id(old["cache"]))
    called = None if made is None else of_step(made.arguments) if step else made.arguments
    found = None if called is None else recurrent_inputs(cell, called)
    incoming = [old[f"d{name}" if step else f"d{name}n"] for name in STATES_OF[cell]]
    dy = None if step else old["dy"]
    if found is None or old.get("accumulate") or not usual(dy, *incoming):
        return None
    x, cells, states, single = found
    for array in (x, *states, *(a for of in cells for a in of)):
        if array is not None and not np.abs(array).max(initial=0) < 1e3:
            return None
    options = recurrent_options(cell, called, *x.shape[:2], made.outputs, made.cells // made.directions, True)
    if options is None:
        return None
    if dy is not None and made.batch_first:
        dy = dy.swapaxes(0, 1)
    incoming = [None if d is None else d[None] if single else d for d in incoming]
    given = [ORACLE_CELLS[cell](*of) for of in cells]
    right = getattr(reference, f"{cell}_backward")(dy, *incoming, x, given, *states, **options)
    bound = recurrent_bound(cell, x, cells, *states, dy, *incoming, **options)
    return recurrent_gradients(made, answer, right, bound, single, step)


def recurrent_gradients(made: Any, answer: Any, right: Any, bound: Any, single: bool, step: bool) -> Iterator[Triple]:
    if answer.dx is not None:
        if made.arguments.get("table") is not None:
            indices = np.asarray(made.arguments["x"]).astype(np.int64)
            indices = indices.T if made.batch_first else indices
            rows = len(made.arguments["table"])
            table, allowed = (reference.embedding_backward(d, indices, rows) for d in (right.dx, bound.dx))
            size = reference.embedding_backward(np.abs(right.dx), indices, rows)
            yield "dx", answer.dx, table, allowed + roundings(answer.dx, size, count=8 + indices.size)
        else:
            dx = np.asarray(answer.dx)
            dx = dx[None] if step else dx.swapaxes(0, 1) if made.batch_first else dx
            yield "dx", dx, right.dx, bound.dx
    for name in (f"d{state}0" for state in STATES_OF[made.cell]):
        got = getattr(answer, name)
        if got is not None:
            found = np.asarray(got)  # it may be a memoryview
            yield name, found[None] if single else found, getattr(right, name), getattr(bound, name)
    if answer.dweights is not None:
        given = [answer.dweights] if single else answer.dweights
        for index, (cell, exact, allowed) in enumerate(zip(given, right.cells, bound.cells, strict=True)):
            for field in cell._fields:
                got, expected, tolerance = (getattr(part, field) for part in (cell, exact, allowed))
                if got is not None and expected is not None:
                    found = np.stack(got) if isinstance(got, (list, tuple)) else np.asarray(got).reshape(expected.shape)
                    yield f"d{field}[{index}]", found, expected, tolerance


KINDS = ("batch", "instance", "layer", "group")
ORACLES: dict[str, Callable[..., Iterator[Triple] | None]] = {
    **{f"{kind}_norm_forward": partial(norm_forward, kind) for kind in KINDS},
    **{f"{kind}_norm_backward": partial(norm_backward, kind) for kind in KINDS},
    **{name: partial(optimizer, name) for name in STATES},
    **{
        name: partial(element_loss, name)
        for name in ("mean_squared_error", "huber", "mean_absolute_error", "sigmoid_cross_entropy")
    },
    "batch_norm_gradient_sums": gradient_sums,
    "batch_norm_statistics": statistics,
    "combine_statistics": combine_statistics,
    "activation_forward": activation_forward,
    "activation_backward": activation_backward,
    "dropout": dropout,
    "linear_forward": linear_forward,
    "linear_backward": linear_backward,
    "conv_forward": partial(conv_forward, False),
    "conv_backward": partial(conv_backward, False),
    "conv_transpose_forward": partial(conv_forward, True),
    "conv_transpose_backward": partial(conv_backward, True),
    "embedding_forward": embedding_forward,
    "embedding_backward": embedding_backward,
    "softmax_cross_entropy": softmax_cross_entropy,
    "global_norm": global_norm,
    **{
        name: partial(pooling, name)
        for name in (
            *(f"{kind}_pool_{way}" for kind in ("max", "average", "l2") for way in ("forward", "backward")),
            "max_unpool_forward",
            "max_unpool_backward",
        )
    },
    **{f"{cell}_forward": partial(recurrent_forward, cell, False) for cell in PARAMETERS},
    **{f"{cell}_backward": partial(recurrent_backward, cell, False) for cell in PARAMETERS},
    **{f"{cell}_step": partial(recurrent_forward, cell, True) for cell in PARAMETERS},
    **{f"{cell}_step_backward": partial(recurrent_backward, cell, True) for cell in PARAMETERS},
}
