"""The smallest useful call of every public function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import retrograd

from ...ops.normalization import NormGradients, NormStatistics
from ...ops.recurrent import GruWeights, LstmWeights, RnnWeights

__all__ = ["overhead_calls"]


def overhead_calls() -> dict[str, Callable[[], object]]:
    """The smallest useful call of every public function, by the name of its row."""
    x = np.ones((2, 4), np.float32)
    x[0] = 0
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    out, gradients = np.empty_like(x), NormGradients(np.empty_like(x), np.empty_like(gamma), np.empty_like(beta))
    part = NormStatistics(2, np.zeros(4), np.ones(4))
    calls: dict[str, Callable[[], object]] = {}

    def add_norm(kind: str, **options: Any) -> None:
        forward, backward = (getattr(retrograd, f"{kind}_norm_{name}") for name in ("forward", "backward"))
        _, cache = forward(x, gamma, beta, **options)
        calls[f"{kind}_norm_forward"] = lambda: forward(x, gamma, beta, out=out, **options)
        calls[f"{kind}_norm_backward"] = lambda: backward(x, cache, out=gradients)

    for kind in ("batch", "instance", "layer"):
        add_norm(kind)
    add_norm("group", num_groups=2)
    _, cache = retrograd.batch_norm_forward(x, gamma, beta)
    calls["batch_norm_statistics"] = lambda: retrograd.batch_norm_statistics(x)
    calls["combine_statistics"] = lambda: retrograd.combine_statistics((part, part))
    calls["batch_norm_gradient_sums"] = lambda: retrograd.batch_norm_gradient_sums(x, cache)
    calls["batch_norm_cache"] = lambda: retrograd.batch_norm_cache(x, gamma, beta, mean=part.mean, var=part.var)
    calls["activation_forward"] = lambda: retrograd.activation_forward(x, "relu", out=out)
    calls["activation_backward"] = lambda: retrograd.activation_backward(x, "relu", x=x, out=out)
    calls["dropout"] = lambda: retrograd.dropout(x, 0.5, seed=0, out=out)
    w, labels = np.ones((4, 4), np.float32), np.zeros(2, np.int64)
    linear_gradients = retrograd.LinearGradients(np.empty_like(x), np.empty_like(w), np.empty_like(gamma))
    calls["linear_forward"] = lambda: retrograd.linear_forward(x, w, beta, out=out)
    calls["linear_backward"] = lambda: retrograd.linear_backward(x, x, w, out=linear_gradients)
    scan_cache = retrograd.scan_forward(x, x).cache
    scan_gradients = retrograd.ScanGradients(np.empty_like(x), np.empty_like(x))
    calls["scan_forward"] = lambda: retrograd.scan_forward(x, x, out=out)
    calls["scan_backward"] = lambda: retrograd.scan_backward(x, scan_cache, out=scan_gradients)
    calls["embedding_forward"] = lambda: retrograd.embedding_forward(labels, w, out=out)
    calls["embedding_backward"] = lambda: retrograd.embedding_backward(x, labels, 4, out=linear_gradients.dw)
    calls["softmax_cross_entropy"] = lambda: retrograd.softmax_cross_entropy(x, labels, out=out)
    calls["mean_squared_error"] = lambda: retrograd.mean_squared_error(x, x, out=out)
    calls["huber"] = lambda: retrograd.huber(x, x, out=out)
    for name in (
        "sigmoid_cross_entropy",
        "mean_absolute_error",
        "hinge",
        "log_loss",
        "cosine_distance",
        "categorical_cross_entropy",
    ):
        calls[name] = _loss_call(name, x, out)
    _add_images(calls)
    states = [np.zeros_like(gamma), np.zeros_like(gamma)]
    calls["sgd_step"] = lambda: retrograd.sgd_step(gamma, beta, learning_rate=0.1)
    calls["adam_step"] = lambda: retrograd.adam_step(gamma, beta, *states, step=1)
    calls["rmsprop_step"] = lambda: retrograd.rmsprop_step(gamma, beta, states[0])
    calls["global_norm"] = lambda: retrograd.global_norm(gamma)
    _add_recurrent(calls, x)
    calls["release_memory"] = retrograd.release_memory
    calls["get_num_threads"] = retrograd.get_num_threads
    calls["set_num_threads"] = lambda: retrograd.set_num_threads(retrograd.get_num_threads())
    return {f"overhead_{name}": call for name, call in calls.items()}


def _add_recurrent(calls: dict[str, Callable[[], object]], x: npt.NDArray[np.float32]) -> None:
    """The calls of recurrent layers of one unit: a sequence of two steps, and a single step."""
    sequence, row = x[:, None], x[:1]
    for name, weights, gates in (("lstm", LstmWeights, 4), ("gru", GruWeights, 3), ("rnn", RnnWeights, 1)):
        cell = weights(np.ones((gates, 4), np.float32), np.ones((gates, 1), np.float32))
        calls |= {f"{name}_{which}": call for which, call in _recurrent_calls(name, cell, sequence, row)}


def _recurrent_calls(name: str, cell: Any, sequence: Any, row: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    forward, backward, cache_of, size_of, step, step_backward = (
        getattr(retrograd, f"{name}_{which}")
        for which in ("forward", "backward", "cache", "cache_size", "step", "step_backward")
    )
    y, *states, cache = forward(sequence, cell)
    outputs = {"y": y, **dict(zip(("hn", "cn"), states, strict=False))}
    buffer = np.empty(size_of(2, 1, 4, 1), np.uint8)
    gradients = {"dx": np.empty_like(sequence), "dweights": type(cell)(*map(np.empty_like, cell[:2]))}
    *_, step_cache = step(row, cell, *states)
    yield "forward", lambda: forward(sequence, cell, cache=buffer, out=outputs)
    yield "backward", lambda: backward(y, cache, out=gradients)
    yield "cache", lambda: cache_of(sequence, cell)
    yield "cache_size", lambda: size_of(2, 1, 4, 1)
    yield "step", lambda: step(row, cell, *states)
    yield "step_backward", lambda: step_backward(*states, step_cache)


def _loss_call(name: str, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> Callable[[], object]:
    loss = getattr(retrograd, name)
    return lambda: loss(x, x, out=out)


def _add_images(calls: dict[str, Callable[[], object]]) -> None:
    """The calls of convolutions and pooling, on one image of 2 x 2 pixels."""
    image, w = np.ones((1, 1, 2, 2), np.float32), np.ones((1, 1, 1, 1), np.float32)
    out, small = np.empty_like(image), np.empty((1, 1, 1, 1), np.float32)
    gradients = retrograd.ConvGradients(np.empty_like(image), np.empty_like(w), np.empty(1, np.float32))
    calls["conv_forward"] = lambda: retrograd.conv_forward(image, w, out=out)
    calls["conv_backward"] = lambda: retrograd.conv_backward(image, image, w, out=gradients)
    calls["conv_transpose_forward"] = lambda: retrograd.conv_transpose_forward(image, w, out=out)
    calls["conv_transpose_backward"] = lambda: retrograd.conv_transpose_backward(image, image, w, out=gradients)
    pooled = retrograd.max_pool_forward(image, 2)
    y, indices = pooled.y, pooled.indices
    assert y is not None
    assert indices is not None
    shape = image.shape
    calls["max_pool_forward"] = lambda: retrograd.max_pool_forward(image, 2, out=pooled)
    calls["max_pool_backward"] = lambda: retrograd.max_pool_backward(small, indices, shape, out=out)
    calls["average_pool_forward"] = lambda: retrograd.average_pool_forward(image, 2, out=small)
    calls["average_pool_backward"] = lambda: retrograd.average_pool_backward(y, shape, 2, out=out)
    calls["l2_pool_forward"] = lambda: retrograd.l2_pool_forward(image, 2, out=small)
    calls["l2_pool_backward"] = lambda: retrograd.l2_pool_backward(y, image, y, 2, out=out)
    calls["max_unpool_forward"] = lambda: retrograd.max_unpool_forward(y, indices, shape, out=out)
    calls["max_unpool_backward"] = lambda: retrograd.max_unpool_backward(image, indices, out=small)
