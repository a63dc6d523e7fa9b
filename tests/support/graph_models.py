"""Models made of tensors, for tests of programs: a loss, its parameters, and batches to train it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import retrograd as rg
from retrograd import graph
from retrograd.graph.tensor import leaves


@dataclass
class Model:
    loss: Callable[..., graph.Tensor]
    parameters: list[graph.Variable]
    batch: Callable[[int], tuple[np.ndarray, ...]]
    others: list[graph.Variable] = field(default_factory=list)  # running statistics and counters

    def step(self, optimizer: graph.Optimizer) -> Callable[..., Any]:
        def step(*arguments: graph.Tensor) -> graph.Tensor:
            loss = self.loss(*arguments)
            optimizer.minimize(loss, self.parameters)
            return loss

        return step

    def compiled(self, optimizer: graph.Optimizer) -> graph.Program:
        return graph.compile(self.step(optimizer), *self.batch(0))

    def values(self) -> list[np.ndarray]:
        return [v.value.copy() for v in (*self.parameters, *self.others)]


class Weights:
    """Makes variables with random values that depend on the seed alone."""

    def __init__(self, dtype: type, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.all: list[graph.Variable] = []

    def __call__(self, *shape: int, scale: float = 0.0, shift: float = 0.0, name: str = "") -> graph.Variable:
        scale = scale or 1 / np.sqrt(max(1, int(np.prod(shape[1:]))))
        values = self.rng.standard_normal(shape) * scale + shift
        self.all.append(graph.Variable(values.astype(self.dtype), name=name or f"w{len(self.all)}"))
        return self.all[-1]


def mlp(dtype: type = np.float32, sizes: Sequence[int] = (6, 16, 16, 4), samples: int = 8) -> Model:
    """Linear layers with ReLU; the labels are integers."""
    weights = Weights(dtype)
    layers = [(weights(o, i), weights(o, scale=0.1)) for i, o in itertools.pairwise(sizes)]

    def loss(x: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        for i, (w, b) in enumerate(layers):
            x = graph.linear(x if i == 0 else graph.relu(x), w, b)
        return graph.softmax_cross_entropy(x, labels)

    def batch(k: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(100 + k)
        return rng.standard_normal((samples, sizes[0])).astype(dtype), rng.integers(0, sizes[-1], samples)

    return Model(loss, weights.all, batch)


WORDS, STEPS, WIDTH, HEADS = 11, 6, 8, 2


def transformer(dtype: type = np.float32, dropout: float = 0.0, samples: int = 3) -> Model:
    """A block with causal attention made of products and a softmax, layer norms, and a layer with GELU."""
    make = Weights(dtype)
    table, position = make(WORDS, WIDTH, scale=0.5, name="table"), make(STEPS, WIDTH, scale=0.5, name="position")
    norms = [(make(WIDTH, scale=0.1, shift=1.0), make(WIDTH, scale=0.1)) for _ in range(3)]
    qkv, qkv_b = make(3 * WIDTH, WIDTH, name="qkv"), make(3 * WIDTH, scale=0.1)
    out, out_b = make(WIDTH, WIDTH, name="out"), make(WIDTH, scale=0.1)
    up, up_b = make(4 * WIDTH, WIDTH, name="up"), make(4 * WIDTH, scale=0.1)
    down, down_b = make(WIDTH, 4 * WIDTH, name="down"), make(WIDTH, scale=0.1)
    head = make(WORDS, WIDTH, name="head")
    mask = np.tril(np.ones((STEPS, STEPS), bool))
    count = graph.counter(name="mask")

    def attention(x: graph.Tensor) -> graph.Tensor:
        parts = graph.split(graph.linear(x, qkv, qkv_b), 3, axis=-1)
        q, k, v = (p.reshape(samples, STEPS, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3) for p in parts)
        scores = q @ graph.swapaxes(k, -1, -2) * (WIDTH // HEADS) ** -0.5
        chosen = graph.softmax(graph.where(mask, scores, -1e9)) @ v
        return graph.linear(chosen.transpose(0, 2, 1, 3).reshape(samples, STEPS, WIDTH), out, out_b)

    def loss(words: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        x = graph.embedding(words, table) + position
        if dropout:
            x = graph.dropout(x, dropout, seed=graph.next_count(count))
        x = x + attention(graph.layer_norm(x, *norms[0]))
        h = graph.gelu(graph.linear(graph.layer_norm(x, *norms[1]), up, up_b))
        x = x + graph.linear(h, down, down_b)
        return graph.softmax_cross_entropy(graph.linear(graph.layer_norm(x, *norms[2]), head), labels, ignore_index=-1)

    def batch(k: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(200 + k)
        words = rng.integers(0, WORDS, (samples, STEPS))
        labels = np.roll(words, -1, 1)
        labels[:, -1] = -1
        return words, labels

    return Model(loss, make.all, batch, [count] if dropout else [])


CHANNELS, CLASSES = 6, 5


def residual_cnn(dtype: type = np.float32, samples: int = 4, training: bool = True) -> Model:
    """Convolutions with batch norm, a residual connection, pooling; running statistics are variables."""
    make = Weights(dtype)
    first, second, third = make(CHANNELS, 2, 3, 3), make(CHANNELS, CHANNELS, 3, 3), make(CHANNELS, CHANNELS, 3, 3)
    norms = [(make(CHANNELS, scale=0.1, shift=1.0), make(CHANNELS, scale=0.1)) for _ in range(3)]
    head, head_b = make(CLASSES, CHANNELS), make(CLASSES, scale=0.1)
    running = [
        graph.Variable(np.full(CHANNELS, float(i % 2), dtype), name=f"running {i}") for i in range(6)
    ]  # mean, variance of each norm

    def norm(x: graph.Tensor, i: int, activation: str | None) -> graph.Tensor:
        y = graph.batch_norm(
            x, *norms[i], training=training, running_mean=running[2 * i], running_var=running[2 * i + 1]
        )  # fmt: skip
        return y if activation is None else graph.activation(y, activation)

    def loss(x: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        h = graph.max_pool(norm(graph.conv(x, first, padding=1), 0, "relu"), 2)
        branch = norm(graph.conv(h, second, padding=1), 1, "relu")
        branch = norm(graph.conv(branch, third, padding=1), 2, None)
        h = graph.relu(h + branch)
        return graph.softmax_cross_entropy(graph.linear(h.mean(axis=(2, 3)), head, head_b), labels)

    def batch(k: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(300 + k)
        return rng.standard_normal((samples, 2, 6, 6)).astype(dtype), rng.integers(0, CLASSES, samples)

    return Model(loss, make.all, batch, running)


def two_inputs(dtype: type = np.float32, samples: int = 6) -> Model:
    """Two images of one encoder, compared: shared layers get gradients from both."""
    make = Weights(dtype)
    w1, b1, w2, b2 = make(16, 5), make(16, scale=0.1), make(8, 16), make(8, scale=0.1)
    bilinear, side = make(8, 8), make(1, 3)

    def encoder(x: graph.Tensor) -> graph.Tensor:
        return graph.tanh(graph.linear(graph.silu(graph.linear(x, w1, b1)), w2, b2))

    def loss(a: graph.Tensor, b: graph.Tensor, extra: graph.Tensor, target: graph.Tensor) -> graph.Tensor:
        left, right = encoder(a), encoder(b)
        score = ((left @ bilinear) * right).sum(axis=1) + graph.linear(extra, side)[:, 0]
        distance = graph.sqrt(graph.sum((left - right) ** 2, axis=1) + 1e-3)
        return graph.sigmoid_cross_entropy(score, target) + 0.1 * (distance * target).mean()

    def batch(k: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(400 + k)
        a, b, extra = (rng.standard_normal((samples, n)).astype(dtype) for n in (5, 5, 3))
        return a, b, extra, (a[:, 0] > b[:, 0]).astype(dtype)

    return Model(loss, make.all, batch)


TAGS, UNITS = 4, 5


def tagger(dtype: type = np.float32, samples: int = 4, steps: int = 7) -> Model:
    """A bidirectional LSTM over words, with lengths; each word gets a tag."""
    make = Weights(dtype)
    table = make(WORDS, 6, scale=0.5, name="table")
    cells = [
        rg.LstmWeights(make(4 * UNITS, 6), make(4 * UNITS, UNITS), make(4 * UNITS, scale=0.1)) for _ in range(2)
    ]  # forward, backward
    head, head_b = make(TAGS, 2 * UNITS), make(TAGS, scale=0.1)

    def loss(words: graph.Tensor, lengths: graph.Tensor, tags: graph.Tensor) -> graph.Tensor:
        x = graph.embedding(words, table)
        y = graph.lstm(x, cells, lengths=lengths, bidirectional=True).y
        return graph.softmax_cross_entropy(graph.linear(y, head, head_b), tags, ignore_index=-1)

    def batch(k: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(500 + k)
        lengths = rng.integers(1, steps + 1, samples)
        words, tags = rng.integers(0, WORDS, (steps, samples)), rng.integers(0, TAGS, (steps, samples))
        tags[np.arange(steps)[:, None] >= lengths] = -1
        return words, lengths, tags

    return Model(loss, make.all, batch)


MODELS: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "transformer": transformer,
    "residual_cnn": residual_cnn,
    "two_inputs": two_inputs,
    "tagger": tagger,
}


def evaluated(found: graph.Graph, arguments: Sequence[Any]) -> tuple[list[np.ndarray], dict[Any, np.ndarray]]:
    """The outputs of a graph and the new values of its variables, node by node: nothing is joined or shared."""
    values: dict[int, np.ndarray] = {}
    for tensor, argument in zip(found.inputs, arguments, strict=True):
        values[id(tensor)] = np.array(argument, tensor.dtype)
    for node in found.nodes:
        name, attributes = node.operation.name, node.attributes
        if name == "input":
            continue
        if name in ("constant", "variable"):
            source = attributes["value"] if name == "constant" else attributes["variable"].value
            values[id(node.result)] = np.array(source)
            continue
        inputs = [None if t is None else values[id(t)].copy() for t in node.inputs]
        if node.operation.updates:  # writes to its inputs
            assert node.operation.compute is not None
            node.operation.compute(inputs, [None] * len(node.results), **attributes)
            results = [inputs[position] for _, position in node.operation.in_place or attributes["in_place"]]
        else:
            results = list(graph.tensor.compute(node.operation, inputs, attributes))
        for tensor, result in zip(node.results, results, strict=True):
            assert result is not None
            assert (result.shape, result.dtype) == tensor.spec, node
            values[id(tensor)] = result.copy()
    assigned = {variable: values[id(tensor)] for variable, tensor in found.assigned.items()}
    return [values[id(tensor)] for tensor in found.outputs], assigned


def same_bits(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes(), (found, expected)


def check_program(function: Callable[..., Any], *arguments: Any, runs: int = 2) -> graph.Program:
    """Compare the runs of a program with the evaluation of its graph, node by node; values of variables included."""
    program = graph.compile(function, *arguments)
    for _ in range(runs):
        expected, assigned = evaluated(program.graph, arguments)
        before = {v: v.value.copy() for v in program.variables}
        found = leaves(program(*arguments))
        for one, other in zip(found, expected, strict=True):
            same_bits(np.asarray(one, other.dtype), other)
        for variable in program.variables:
            same_bits(variable.value, assigned.get(variable, before[variable]))
    return program
