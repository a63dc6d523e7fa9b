"""The functions of retrograd.jax with arguments for them, and the same calls of the array functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import retrograd
from retrograd import LstmActivations, LstmWeights

Array = Any


class Case(NamedTuple):
    """A function of retrograd.jax, its arguments, and what its gradients are taken of."""

    name: str
    arguments: tuple[Any, ...]  # NumPy arrays in pytrees; all of them are differentiated
    options: dict[str, Any]
    forward: Callable[..., tuple[Any, Any]]  # the array function: outputs as arrays, and what backward needs
    backward: Callable[..., tuple[Any, ...]]  # from the gradients of the outputs to those of the arguments


def _norm(kind: str, outputs: int = 1) -> tuple[Callable[..., Any], Callable[..., Any]]:
    run = getattr(retrograd, f"{kind}_forward")
    back = getattr(retrograd, f"{kind}_backward")

    def forward(x: Array, gamma: Array = None, beta: Array = None, **options: Any) -> Any:
        y, cache = run(x, gamma, beta, **options)
        arithmetic = cache.problem.arithmetic
        return (y, cache.mean.astype(arithmetic), cache.var.astype(arithmetic))[:outputs], cache

    def backward(cache: Any, dy: Array, *others: Array) -> tuple[Any, ...]:
        assert not others  # the array functions do not differentiate statistics
        gradients = back(dy, cache)
        return tuple(gradient for gradient in gradients if gradient is not None)

    return forward, backward


def _linear() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Array, w: Array, b: Array = None, **options: Any) -> Any:
        return (retrograd.linear_forward(x, w, b, **options),), (x, w, b)

    def backward(saved: Any, dy: Array) -> tuple[Any, ...]:
        x, w, b = saved
        gradients = retrograd.linear_backward(dy, x, w)
        return gradients if b is not None else gradients[:2]

    return forward, backward


def _lstm() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(*arguments: Any, **options: Any) -> Any:
        result = retrograd.lstm_forward(*arguments, **options)
        return result[:3], result.cache

    def backward(cache: Any, dy: Array, dhn: Array, dcn: Array) -> tuple[Any, ...]:
        gradients = retrograd.lstm_backward(dy, cache, dhn=dhn, dcn=dcn)
        return tuple(gradient for gradient in gradients if gradient is not None)

    return forward, backward


def _scan() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(*arguments: Any, **options: Any) -> Any:
        result = retrograd.scan_forward(*arguments, **options)
        return result[:2], result.cache

    def backward(cache: Any, dy: Array, dhn: Array) -> tuple[Any, ...]:
        gradients = retrograd.scan_backward(dy, cache, dhn=dhn)
        return tuple(gradient for gradient in gradients if gradient is not None)

    return forward, backward


def _weights(rng: np.random.Generator, inputs: int, units: int, dtype: Any, peephole: str = "") -> LstmWeights:
    def draw(*shape: int) -> Array:
        return (rng.normal(size=shape) / 2).astype(dtype)

    columns = {"": None, "diagonal": (), "full": (units,)}[peephole]
    return LstmWeights(
        draw(4 * units, inputs),
        draw(4 * units, units),
        draw(4 * units),
        None if columns is None else draw(4 * units, *columns),
    )


def norm_cases(dtype: Any, seed: int = 0) -> Iterator[Case]:
    """Every kind, with and without parameters, with activations, in several layouts of the axes."""
    rng = np.random.default_rng(seed)
    arithmetic = np.float64 if dtype == np.float64 else np.float32

    def case(kind: str, shape: tuple[int, ...], parameter: tuple[int, ...] | None, **options: Any) -> Case:
        x = rng.normal(1, 2, size=shape).astype(dtype)
        parameters = () if parameter is None else tuple(rng.normal(size=(2, *parameter)).astype(arithmetic))
        return Case(kind, (x, *parameters), options, *_norm(kind, 3 if kind == "batch_norm" else 1))

    yield case("batch_norm", (5, 7, 3, 2), (7,))
    yield case("batch_norm", (33, 20), (20,), activation="relu")
    yield case("batch_norm", (4, 3, 6), (6,), channel_axis=-1, eps=0.1, activation="silu", slope_from="input")
    yield case("batch_norm", (6, 5), None)
    yield case("instance_norm", (3, 4, 17), (4,), activation="tanh")
    yield case("instance_norm", (2, 9, 4), None, channel_axis=2)
    yield case("layer_norm", (6, 37), (37,))
    yield case("layer_norm", (3, 4, 5), (4, 5), axis=1, activation="gelu", slope_from="input")
    yield case("layer_norm", (40,), None, eps=1e-3)
    yield case("group_norm", (3, 8, 5), (8,), num_groups=4)
    yield case("group_norm", (2, 5, 6), (6,), num_groups=2, channel_axis=-1, activation="sigmoid")


def dense_cases(dtype: Any, seed: int = 1) -> Iterator[Case]:
    """Linear layers, recurrences and LSTMs."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    def lstm(arguments: tuple[Any, ...], **options: Any) -> Case:
        return Case("lstm", arguments, options, *_lstm())

    yield Case("linear", (draw(9, 5), draw(4, 5), draw(4)), {}, *_linear())
    yield Case("linear", (draw(2, 3, 7), draw(6, 7)), {}, *_linear())
    yield Case("linear", (draw(7), draw(2, 7), draw(2)), {}, *_linear())
    yield Case("scan", (draw(6, 3, 5), draw(6, 3, 5), draw(3, 5)), {}, *_scan())
    yield Case("scan", (draw(3, 7), draw(3, 7)), {"axis": 1}, *_scan())
    yield lstm((draw(4, 3, 5), _weights(rng, 5, 6, dtype)))
    yield lstm((draw(3, 4, 5), _weights(rng, 5, 7, dtype), draw(3, 7), draw(3, 7)), batch_first=True)
    stack = [_weights(rng, inputs, 4, dtype) for inputs in (3, 3, 8, 8)]
    lengths = [5, 0, 2, 5]
    states = draw(4, 4, 4), draw(4, 4, 4)
    yield lstm((draw(5, 4, 3), stack, *states), bidirectional=True, lengths=lengths, dropout=0.25, seed=11)
    activations = LstmActivations("hard_sigmoid", "sigmoid", "softsign", "sigmoid", "identity")
    full = [_weights(rng, 2, 5, dtype, "full")]
    yield lstm((draw(3, 2, 2), full), activations=activations, output_gate_reads="old")
    yield lstm((draw(3, 2, 2), _weights(rng, 2, 3, dtype, "diagonal")), lengths=[3, 3])


def label(case: Case) -> str:
    options = "-".join(f"{name}={value}" for name, value in case.options.items() if name != "activations")
    return f"{case.name}-{options}" if options else case.name


def outputs(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def draw_like(rng: np.random.Generator, arrays: Any) -> tuple[Any, ...]:
    return tuple(rng.normal(size=array.shape).astype(array.dtype) for array in arrays)


def assert_same_bits(jax: Any, found: Any, expected: Any) -> None:
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
