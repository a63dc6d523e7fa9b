"""The rows of ``retrograd bench jax``: layers under `jit`, forward and backward, against the array functions.

``arrays µs`` is the time of the array functions, ``added µs`` what XLA adds: its call, and the memory of the results.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd

from ...ops._types import Array
from .timing import Contest, Machine, WholeSteps, library_threads

__all__ = ["JAX_CASES", "JaxCase", "JaxLayer", "jax_contest", "jax_failures", "make_jax_layer"]


class JaxLayer(NamedTuple):
    """A layer's arrays, and its forward and backward pass: by the array functions, and as a function for JAX."""

    arrays: tuple[Array, ...]
    dy: Array
    step: Callable[[], Sequence[Any]]  # y and the gradients of the arrays
    function: Callable[..., Any]  # of JAX's arrays


class JaxCase(NamedTuple):
    name: str
    make: Callable[..., JaxLayer]
    shape: tuple[int, ...]


def _norm(layers: Any, draw: Callable[..., Array], shape: tuple[int, ...], kind: str) -> JaxLayer:
    channels = shape[1] if kind == "batch" else shape[-1]
    arrays, dy = (draw(*shape), draw(channels), draw(channels)), draw(*shape)
    forward, backward = (getattr(retrograd, f"{kind}_norm_{pass_}") for pass_ in ("forward", "backward"))

    def step() -> list[Any]:
        y, cache = forward(*arrays)
        return [y, *backward(dy, cache)]

    jitted = layers.layer_norm if kind == "layer" else lambda *given: layers.batch_norm(*given).y
    return JaxLayer(arrays, dy, step, jitted)


def _linear(layers: Any, draw: Callable[..., Array], shape: tuple[int, ...]) -> JaxLayer:
    rows, inputs, outputs = shape
    x, w, b = arrays = draw(rows, inputs), draw(outputs, inputs), draw(outputs)
    dy = draw(rows, outputs)
    return JaxLayer(
        arrays,
        dy,
        lambda: [retrograd.linear_forward(x, w, b), *retrograd.linear_backward(dy, x, w)],
        layers.linear,
    )


def _lstm(layers: Any, draw: Callable[..., Array], shape: tuple[int, ...]) -> JaxLayer:
    steps, samples, inputs, hidden = shape
    x, dy = draw(steps, samples, inputs), draw(steps, samples, hidden)
    weights = tuple(0.1 * draw(4 * hidden, *rest) for rest in ((inputs,), (hidden,), ()))

    def step() -> list[Any]:
        y, _, _, cache = retrograd.lstm_forward(x, [retrograd.LstmWeights(*weights)])
        assert cache is not None
        gradients = retrograd.lstm_backward(dy, cache)
        return [y, gradients.dx, *gradients.dweights[0][:3]]

    return JaxLayer((x, *weights), dy, step, lambda x, *parts: layers.lstm(x, retrograd.LstmWeights(*parts)).y)


JAX_CASES: Final = (
    JaxCase("jax_batch_norm_n16c64h28w28", partial(_norm, kind="batch"), (16, 64, 28, 28)),
    JaxCase("jax_batch_norm_n32c64h56w56", partial(_norm, kind="batch"), (32, 64, 56, 56)),
    JaxCase("jax_layer_norm_n1024c1024", partial(_norm, kind="layer"), (1024, 1024)),
    JaxCase("jax_layer_norm_n4096c768", partial(_norm, kind="layer"), (4096, 768)),
    JaxCase("jax_linear_n1024i512o512", _linear, (1024, 512, 512)),
    JaxCase("jax_lstm_t50n32i128h128", _lstm, (50, 32, 128, 128)),
)


def make_jax_layer(case: JaxCase) -> JaxLayer:
    rng = np.random.default_rng(0)
    layers = importlib.import_module("retrograd.jax")
    return case.make(layers, lambda *shape: rng.standard_normal(shape, dtype=np.float32), case.shape)


def _jitted(layer: JaxLayer) -> Callable[[], Any]:
    """The same step for JAX: y and the gradients of all arrays, compiled together."""
    jax = importlib.import_module("jax")
    given, dy = [jax.numpy.asarray(array) for array in layer.arrays], jax.numpy.asarray(layer.dy)

    @jax.jit  # type: ignore[untyped-decorator]
    def step(dy: Any, *given: Any) -> Any:
        y, pull = jax.vjp(layer.function, *given)
        return y, *pull(dy)

    return lambda: jax.block_until_ready(step(dy, *given))


def jax_failures(case: JaxCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield a message if the bits differ from the array functions'."""
    layer = make_jax_layer(case)
    for number in threads:
        with library_threads(number):
            pairs = zip(layer.step(), _jitted(layer)(), strict=True)
            if any(mine.tobytes() != np.asarray(theirs).tobytes() for mine, theirs in pairs):
                yield f"under jit the bits are not those of the array functions, with {number} threads"


def jax_contest(case: JaxCase, layer: JaxLayer, threads: int, machine: Machine, stack: contextlib.ExitStack) -> Contest:
    stack.enter_context(library_threads(threads))
    jitted, arrays = WholeSteps("retrograd", _jitted(layer), threads), WholeSteps("arrays", layer.step, threads)
    return Contest([[jitted], [arrays]], None, [], ("step",))
