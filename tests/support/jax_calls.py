"""The functions of retrograd.jax with arguments for them, and the same calls of the array functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import retrograd
from retrograd import GruActivations, GruWeights, LstmActivations, LstmWeights, RnnWeights

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


def _recurrent(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    run, back = getattr(retrograd, f"{name}_forward"), getattr(retrograd, f"{name}_backward")

    def forward(*arguments: Any, **options: Any) -> Any:
        result = run(*arguments, **options)
        return result[:-1], result.cache

    def backward(cache: Any, dy: Array, *dstates: Array) -> tuple[Any, ...]:
        gradients = back(dy, cache, **dict(zip(("dhn", "dcn"), dstates, strict=False)))
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


CELLS: dict[str, tuple[Any, int]] = {"lstm": (LstmWeights, 4), "gru": (GruWeights, 3), "rnn": (RnnWeights, 1)}


def cell_of(
    name: str, rng: np.random.Generator, inputs: int, units: int, dtype: Any, projection: int = 0, **shapes: Any
) -> Any:
    """The parameters of a cell: wx, wh, all biases, and what `shapes` gives the shapes of."""
    kind, gates = CELLS[name]
    rows = gates * units
    every = {"wx": (rows, inputs), "wh": (rows, projection or units), "b": (rows,), "bh": (rows,)}
    every |= {"projection": (projection, units)} if projection else {}
    drawn = {
        part: (rng.normal(size=shape) / 2).astype(dtype)
        for part, shape in {**every, **shapes}.items()
        if part in kind._fields
    }
    return kind(**drawn)


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
    """Linear and recurrent layers, and linear recurrences."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    def case(name: str, *arguments: Any, **options: Any) -> Case:
        return Case(name, arguments, options, *_recurrent(name))

    def cell(name: str, inputs: int, units: int, **parts: Any) -> Any:
        return cell_of(name, rng, inputs, units, dtype, **parts)

    yield Case("linear", (draw(9, 5), draw(4, 5), draw(4)), {}, *_linear())
    yield Case("linear", (draw(2, 3, 7), draw(6, 7)), {}, *_linear())
    yield Case("linear", (draw(7), draw(2, 7), draw(2)), {}, *_linear())
    yield Case("scan", (draw(6, 3, 5), draw(6, 3, 5), draw(3, 5)), {}, *_scan())
    yield Case("scan", (draw(3, 7), draw(3, 7)), {"axis": 1}, *_scan())
    yield case("lstm", draw(4, 3, 5), cell("lstm", 5, 6))
    yield case("lstm", draw(3, 4, 5), cell("lstm", 5, 7), draw(3, 7), draw(3, 7), batch_first=True)
    lengths = [5, 0, 2, 5]
    ragged = {"bidirectional": True, "lengths": lengths, "dropout": 0.25, "seed": 11}
    yield case(
        "lstm", draw(5, 4, 3), [cell("lstm", n, 4) for n in (3, 3, 8, 8)], draw(4, 4, 4), draw(4, 4, 4), **ragged
    )
    activations = LstmActivations("hard_sigmoid", "sigmoid", "softsign", "sigmoid", "identity")
    full = [cell("lstm", 2, 5, peephole=(20, 5))]
    yield case("lstm", draw(3, 2, 2), full, activations=activations, output_gate_reads="old")
    yield case("lstm", draw(3, 2, 2), cell("lstm", 2, 3, peephole=(12,)), lengths=[3, 3])
    # Options inside the recurrence.
    reset = rng.random((2, 4)) < 0.4  # batch first
    projected = [cell("lstm", 3, 5, projection=2), cell("lstm", 2, 5, projection=2)]
    yield case("lstm", draw(2, 4, 3), projected, draw(2, 2, 2), draw(2, 2, 5), batch_first=True, reset=reset)
    yield case("lstm", draw(4, 2, 3), cell("lstm", 3, 4), coupled=True, clip=1.5, cell_clip=0.4)
    # Without a state to start from, the first step would normalize zeros, which amplifies finite differences.
    gammas = {"gamma_x": (16,), "gamma_h": (16,), "gamma_c": (4,), "beta_c": (4,)}
    yield case("lstm", draw(4, 2, 3), cell("lstm", 3, 4, **gammas), draw(2, 4), draw(2, 4), norm="haste")
    yield case("lstm", draw(4, 2, 3), cell("lstm", 3, 4, **gammas), draw(2, 4), draw(2, 4), norm="cell", norm_eps=1e-3)
    yield case("gru", draw(4, 3, 5), cell("gru", 5, 6))
    yield case("gru", draw(2, 4, 3), cell("gru", 3, 5), draw(2, 5), kind="before", batch_first=True, reset=reset)
    yield case("gru", draw(5, 4, 3), [cell("gru", n, 4) for n in (3, 3, 8, 8)], draw(4, 4, 4), **ragged)
    gates = GruActivations("hard_sigmoid", "sigmoid", "softsign")
    yield case("gru", draw(4, 2, 3), [cell("gru", 3, 4)], flip=True, activations=gates, clip=0.7)
    yield case("gru", draw(4, 2, 3), cell("gru", 3, 4, gamma_x=(12,), gamma_h=(12,)), draw(2, 4), norm="haste")
    yield case("rnn", draw(4, 3, 5), cell("rnn", 5, 6))
    yield case("rnn", draw(5, 4, 3), [cell("rnn", n, 4) for n in (3, 3, 8, 8)], draw(4, 4, 4), **ragged)
    yield case("rnn", draw(2, 4, 3), cell("rnn", 3, 5), draw(2, 5), activation="sigmoid", batch_first=True, reset=reset)
    yield case("rnn", draw(4, 2, 3), cell("rnn", 3, 4, gamma_x=(4,), gamma_h=(4,)), draw(2, 4), norm="haste")


def label(case: Case) -> str:
    options = "-".join(
        name if name == "reset" else f"{name}={value}" for name, value in case.options.items() if name != "activations"
    )
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
