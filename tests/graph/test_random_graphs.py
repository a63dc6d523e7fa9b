"""Random graphs with their gradients against jax.numpy in float64; tests/fuzz_graph.py runs any number of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import fuzz_graph
import numpy as np
import pytest

from retrograd import graph
from support import fuzz_driver
from support.jaxpr import traced
from support.random_graphs import NUMPY, OfGraph, RandomGraph


@pytest.fixture
def jax64(jax: Any) -> Iterator[Any]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))])
def test_random_graphs(jax64: Any, part: int) -> None:
    tally = fuzz_driver.work(fuzz_graph.run, 50 * part, 50)
    assert tally["graphs"] == 50
    assert tally["gradients"] > 100


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))  # JAX traces fifteen graphs a second
def test_many_random_graphs(jax64: Any, part: int) -> None:
    tally = fuzz_driver.work(fuzz_graph.run, 10_000 + 300 * part, 100)
    assert tally["graphs"] == 100


def test_every_kind_of_node_is_drawn() -> None:
    kinds: Counter[str] = Counter()
    most = 0
    for seed in range(1500):
        drawn = RandomGraph(seed)
        kinds.update("input" if node is None else node.label.split()[0] for node in drawn.nodes)
        most = max(most, len(drawn.nodes) - len(drawn.inputs))
        total, _ = drawn.run(NUMPY, drawn.inputs)
        assert np.isfinite(total)
    assert most == 15
    for kind in (
        "add", "divide", "power", "where", "clip", "sum", "max", "prod", "var", "logsumexp", "reshape", "transpose",
        "broadcast_to", "slice", "concatenate", "stack", "split", "pad", "tile", "matmul", "linear", "softmax", "take",
        "take_along_axis", "scatter_add", "embedding", "cumsum", "sort", "top_k", "layer_norm", "cross_entropy",
        "recomputed", "stop_gradient",
    ):  # fmt: skip
        assert kinds[kind] >= 5, kind


# Layers and losses, which test_outsiders.py compares; random numbers; what is not a function of tensors, or has no
# derivative and is tested alone; and what is drawn as an operator or is like a function that is drawn.
NOT_DRAWN = {
    "average_pool", "average_pool_gradient", "batch_norm", "conv", "conv_input_gradient", "conv_transpose",
    "conv_weight_gradient", "dropout", "group_norm", "gru", "instance_norm", "l2_pool", "lstm", "max_pool",
    "max_pool_gradient", "max_pool_indices", "max_unpool", "rnn", "scan", "sync_batch_norm", "activation", "elu",
    "leaky_relu", "categorical_cross_entropy", "cosine_distance", "hinge", "huber", "log_loss", "mean_absolute_error",
    "sigmoid_cross_entropy", "philox", "random_integers", "random_normal", "random_uniform", "truncated_normal", "call",
    "compile", "constant", "counter", "custom_gradient", "full", "gradients", "next_count", "ones", "spec", "trace",
    "zeros", "all", "any", "argmax", "argmin", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "isnan", "isinf", "isfinite", "logical_and", "logical_not", "logical_or", "logical_xor", "one_hot", "abs",
    "divide", "identity", "take_slice", "vdot", "mod", "fmod", "tan", "arcsin", "arccos", "arctanh", "cosh",
    "adam_update", "sgd_update",
}  # fmt: skip


def test_every_function_is_drawn() -> None:
    functions = {n for n in graph.__all__ if n.islower() and callable(getattr(graph, n))}
    used: set[str] = set()

    class Watched(OfGraph):
        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return super().__getattr__(name)

    for seed in range(600):
        drawn = RandomGraph(seed)
        specs = [graph.spec(a.shape, a.dtype) for a in drawn.inputs]
        graph.trace(lambda *tensors, drawn=drawn: drawn.run(Watched(graph), tensors), specs)
    assert functions - used == NOT_DRAWN & functions
    assert not NOT_DRAWN - functions


def test_the_primitives_are_those_of_xla(jax64: Any) -> None:
    """The trace computed by NumPy is what XLA computes."""
    for seed in (3, 7):
        drawn = RandomGraph(seed)
        _, library = fuzz_graph.jax_library()

        def loss(inputs: Any, drawn: RandomGraph = drawn, library: Any = library) -> Any:
            return drawn.run(library, inputs)[0]

        function = jax64.value_and_grad(loss)
        expected, gradients = jax64.jit(function)(drawn.inputs)
        total, found = traced(jax64, function, drawn.inputs)
        np.testing.assert_allclose(total, expected, rtol=1e-12)
        for one, other in zip(found, gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_wrong_gradient_is_found(jax64: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = graph.custom_gradient(graph.tanh, lambda g, y, x: [g * (1.0 - y * y) * 1.000001])
    monkeypatch.setattr(graph, "tanh", wrong)
    with pytest.raises(fuzz_driver.Broken, match="the gradient of input"):
        fuzz_driver.work(fuzz_graph.run, 0, 40)
