"""The rows of ``retrograd bench steps``: whole training steps of small models, forward, loss, backward and Adam.

The step is a program of `retrograd.graph`. The others are the step of `retrograd.nn.compile`, a run of an MPSGraph,
PyTorch eager and compiled, and JAX under jit, from the same weights. JAX reads its number of threads when it is loaded,
so it uses all of them in every row.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import graph, nn
from ...ops._types import Array
from ...ops.recurrent.types import LstmWeights
from .steps_mpsgraph import MpsGraphStep
from .timing import Contest, Machine, WholeSteps, admit, library_threads

__all__ = ["STEP_CASES", "StepCase", "StepData", "make_step", "step_contest", "step_failures"]

_RATE: Final = 1e-3
_CHECKED: Final = 4
_TOLERANCE: Final = 1e-4  # relative, of a loss: after a few updates, with another order of summation
Weights = dict[str, Array]


class StepCase(NamedTuple):
    name: str
    kind: str  # mlp, lstm or cnn
    sizes: tuple[int, ...]


STEP_CASES: Final = (
    StepCase("step_mlp_n32i64h64", "mlp", (32, 64, 64, 10)),
    StepCase("step_mlp_n128i784h256", "mlp", (128, 784, 256, 10)),
    StepCase("step_lstm_t20n1i4h16", "lstm", (20, 1, 4, 16, 4)),
    StepCase("step_lstm_t32n8i64h64", "lstm", (32, 8, 64, 64, 32)),
    StepCase("step_lstm_t50n32i64h128", "lstm", (50, 32, 64, 128, 64)),
    StepCase("step_cnn_n32c1s8k16", "cnn", (32, 1, 8, 16)),
    StepCase("step_cnn_n32c1s28k16", "cnn", (32, 1, 28, 16)),
)


class StepData(NamedTuple):
    x: Array
    labels: Array
    weights: Weights


def make_step(case: StepCase) -> StepData:
    """A batch, and the weights from which all implementations start."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        scaled: Array = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return scaled

    w: Weights = {}

    def norm(name: str, channels: int) -> None:
        w[f"{name}.gamma"], w[f"{name}.beta"] = np.ones(channels, np.float32), np.zeros(channels, np.float32)

    if case.kind == "mlp":
        samples, inputs, hidden, classes = case.sizes
        x = rng.standard_normal((samples, inputs), dtype=np.float32)
        for i, (before, after) in enumerate(((inputs, hidden), (hidden, hidden), (hidden, classes))):
            w[f"{i}.w"], w[f"{i}.b"] = normal(after, before), np.zeros(after, np.float32)
            if i < 2:
                norm(f"{i}.norm", hidden)
        return StepData(x, rng.integers(0, classes, samples), w)
    if case.kind == "lstm":
        steps, samples, inputs, hidden, classes = case.sizes
        x = rng.standard_normal((steps, samples, inputs), dtype=np.float32)
        w["wx"], w["wh"], w["b"] = normal(4 * hidden, inputs), normal(4 * hidden, hidden), normal(4 * hidden)
        w["w"], w["bias"] = normal(classes, hidden), np.zeros(classes, np.float32)
        return StepData(x, rng.integers(0, classes, (steps, samples)), w)
    samples, channels, size, kernels = case.sizes
    x = rng.standard_normal((samples, channels, size, size), dtype=np.float32)
    for i, (before, after) in enumerate(((channels, kernels), (kernels, 2 * kernels))):
        w[f"{i}.w"] = (normal(after, before * 9) * np.float32(1)).reshape(after, before, 3, 3)
        w[f"{i}.b"] = np.zeros(after, np.float32)
        norm(f"{i}.norm", after)
    features = 2 * kernels * (size // 4) ** 2
    w["w"], w["bias"] = normal(10, features), np.zeros(10, np.float32)
    return StepData(x, rng.integers(0, 10, samples), w)


# ---- ours ------------------------------------------------------------------------------------------------------------


def _graph_logits(kind: str, x: Any, w: dict[str, Any], running: dict[str, dict[str, Any]]) -> Any:
    g = graph
    if kind == "mlp":
        for i in range(2):
            x = g.linear(x, w[f"{i}.w"], w[f"{i}.b"])
            x = g.batch_norm(x, w[f"{i}.norm.gamma"], w[f"{i}.norm.beta"], activation="relu", **running[f"{i}.norm"])
        return g.linear(x, w["2.w"], w["2.b"])
    if kind == "lstm":
        return g.linear(g.lstm(x, LstmWeights(w["wx"], w["wh"], w["b"])).y, w["w"], w["bias"])
    for i in range(2):
        x = g.conv(x, w[f"{i}.w"], w[f"{i}.b"], padding=1)
        x = g.batch_norm(x, w[f"{i}.norm.gamma"], w[f"{i}.norm.beta"], activation="relu", **running[f"{i}.norm"])
        x = g.max_pool(x, 2)
    return g.linear(g.reshape(x, (x.shape[0], -1)), w["w"], w["bias"])


def graph_program(case: StepCase, data: StepData) -> graph.Program:
    """The step as a program."""
    variables = {name: graph.Variable(array, name=name) for name, array in data.weights.items()}
    running = {  # as the norms of nn and of PyTorch keep them
        name.removesuffix(".gamma"): {
            "running_mean": graph.Variable(np.zeros_like(array)), "running_var": graph.Variable(np.ones_like(array))
        }
        for name, array in data.weights.items() if name.endswith(".gamma")
    }  # fmt: skip
    adam = graph.Adam(_RATE)

    def step(x: Any, labels: Any) -> Any:
        loss = graph.softmax_cross_entropy(_graph_logits(case.kind, x, variables, running), labels)
        adam.minimize(loss, list(variables.values()))
        return loss

    return graph.compile(step, data.x, data.labels)


def _graph_step(case: StepCase, data: StepData, threads: int) -> Callable[[], float]:
    program = graph_program(case, data)

    def run() -> float:
        loss: float = program(data.x, data.labels, num_threads=threads)
        return loss

    return run


def _nn_step(case: StepCase, data: StepData, threads: int, dtype: npt.DTypeLike = np.float32) -> Callable[[], float]:
    relu: dict[str, Any] = {"activation": "relu", "dtype": dtype}
    layers: list[nn.Module]
    if case.kind == "mlp":
        _, inputs, hidden, classes = case.sizes
        layers = [
            nn.Linear(inputs, hidden, dtype=dtype), nn.BatchNorm(hidden, **relu),
            nn.Linear(hidden, hidden, dtype=dtype), nn.BatchNorm(hidden, **relu),
            nn.Linear(hidden, classes, dtype=dtype),
        ]  # fmt: skip
    elif case.kind == "lstm":
        _, _, inputs, hidden, classes = case.sizes
        layers = [nn.LSTM(inputs, hidden, dtype=dtype), nn.Linear(hidden, classes, dtype=dtype)]
    else:
        _, channels, size, kernels = case.sizes
        layers = [
            nn.Conv(channels, kernels, 3, padding=1, dtype=dtype), nn.BatchNorm(kernels, **relu), nn.MaxPool(2),
            nn.Conv(kernels, 2 * kernels, 3, padding=1, dtype=dtype), nn.BatchNorm(2 * kernels, **relu), nn.MaxPool(2),
            nn.Flatten(), nn.Linear(2 * kernels * (size // 4) ** 2, 10, dtype=dtype),
        ]  # fmt: skip
    model = nn.Sequential(*layers)
    # The weights are in the order of the layers.
    for parameter, array in zip(model.parameters().values(), data.weights.values(), strict=True):
        parameter[...] = array
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.Adam(model, _RATE), num_threads=threads)
    x = data.x.astype(dtype)

    def run() -> float:
        loss: float = step(x, data.labels)
        return loss

    return run


def _mpsgraph_step(case: StepCase, data: StepData) -> Callable[[], float]:
    """With retrograd's default thread count: MPSGraph has no argument for it."""
    return MpsGraphStep(case.kind, data.x, data.labels, data.weights, _RATE)


# ---- others ----------------------------------------------------------------------------------------------------------


def _torch_model(torch: Any, case: StepCase, w: Weights) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The model, and its logits as rows."""
    tn = torch.nn
    if case.kind == "lstm":
        _, _, inputs, hidden, classes = case.sizes
        model = tn.ModuleList((tn.LSTM(inputs, hidden), tn.Linear(hidden, classes)))
        arrays = [w["wx"], w["wh"], w["b"], np.zeros_like(w["b"]), w["w"], w["bias"]]
        logits = lambda model, x: model[1](model[0](x)[0]).flatten(0, 1)  # noqa: E731
    else:
        if case.kind == "mlp":
            _, inputs, hidden, classes = case.sizes
            layers = [
                tn.Linear(inputs, hidden), tn.BatchNorm1d(hidden), tn.ReLU(), tn.Linear(hidden, hidden),
                tn.BatchNorm1d(hidden), tn.ReLU(), tn.Linear(hidden, classes),
            ]  # fmt: skip
        else:
            _, channels, size, kernels = case.sizes
            layers = [
                tn.Conv2d(channels, kernels, 3, padding=1), tn.BatchNorm2d(kernels), tn.ReLU(), tn.MaxPool2d(2),
                tn.Conv2d(kernels, 2 * kernels, 3, padding=1), tn.BatchNorm2d(2 * kernels), tn.ReLU(),
                tn.MaxPool2d(2), tn.Flatten(), tn.Linear(2 * kernels * (size // 4) ** 2, 10),
            ]  # fmt: skip
        model, arrays = tn.Sequential(*layers), list(w.values())
        logits = lambda model, x: model(x)  # noqa: E731
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.tensor(array))
    if case.kind == "lstm":
        model[0].bias_hh_l0.requires_grad_(False)  # ours has one bias; two would move twice as far
    return model, logits


def _torch_step(torch: Any, case: StepCase, data: StepData, compiled: bool) -> Callable[[], Any]:
    model, logits = _torch_model(torch, case, data.weights)
    x, labels = torch.tensor(data.x), torch.tensor(data.labels).flatten()
    optimizer = torch.optim.Adam(model.parameters(), _RATE, foreach=True)
    forward: Callable[[], Any] = lambda: torch.nn.functional.cross_entropy(logits(model, x), labels)  # noqa: E731
    update: Callable[[], Any] = optimizer.step
    if compiled:
        forward, update = torch.compile(forward), torch.compile(optimizer.step)

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        update()
        return loss.detach()

    return run


def _jax_step(case: StepCase, data: StepData) -> Callable[[], Any]:
    jax = importlib.import_module("jax")
    jnp = jax.numpy

    def norm(x: Any, w: Any, name: str, axes: Any, shape: Any) -> Any:
        centered = x - x.mean(axes, keepdims=True)
        rstd = jax.lax.rsqrt((centered * centered).mean(axes, keepdims=True) + 1e-5)
        return jax.nn.relu(centered * rstd * w[f"{name}.gamma"].reshape(shape) + w[f"{name}.beta"].reshape(shape))

    def logits(w: Any, x: Any) -> Any:
        if case.kind == "mlp":
            for i in range(2):
                x = norm(x @ w[f"{i}.w"].T + w[f"{i}.b"], w, f"{i}.norm", (0,), (1, -1))
            return x @ w["2.w"].T + w["2.b"]
        if case.kind == "lstm":
            projected = x @ w["wx"].T + w["b"]
            zero = jnp.zeros((x.shape[1], w["wh"].shape[1]))

            def cell(state: Any, row: Any) -> Any:
                h, c = state
                i, f, g, o = jnp.split(row + h @ w["wh"].T, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            y = jax.lax.scan(cell, (zero, zero), projected)[1]
            return y @ w["w"].T + w["bias"]
        for i in range(2):
            x = jax.lax.conv_general_dilated(x, w[f"{i}.w"], (1, 1), ((1, 1), (1, 1)))
            x = norm(x + w[f"{i}.b"].reshape(1, -1, 1, 1), w, f"{i}.norm", (0, 2, 3), (1, -1, 1, 1))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return x.reshape(x.shape[0], -1) @ w["w"].T + w["bias"]

    def loss(w: Any, x: Any, labels: Any) -> Any:
        rows = jax.nn.log_softmax(logits(w, x))
        return -jnp.mean(jnp.take_along_axis(rows, labels[..., None], -1))

    @jax.jit  # type: ignore[untyped-decorator]
    def step(w: Any, m: Any, v: Any, count: Any, x: Any, labels: Any) -> Any:
        value, d = jax.value_and_grad(loss)(w, x, labels)
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, d)
        v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, d)
        first, second = 1 - 0.9**count, 1 - 0.999**count
        w = jax.tree.map(lambda p, a, b: p - _RATE * (a / first) / (jnp.sqrt(b / second) + 1e-8), w, m, v)
        return value, w, m, v

    w = {name: jnp.asarray(array) for name, array in data.weights.items()}
    state: list[Any] = [w, jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.zeros_like, w)]
    x, labels, count = jnp.asarray(data.x), jnp.asarray(data.labels), [0.0]

    def run() -> Any:
        count[0] += 1.0
        value, *state[:] = step(*state, count[0], x, labels)
        jax.block_until_ready(state[0])
        return value

    return run


# ---- timing ----------------------------------------------------------------------------------------------------------


def _agree(ours: Sequence[float], run: Callable[[], Any]) -> bool:
    theirs = [float(run()) for _ in ours]
    return all(abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(ours, theirs, strict=True))


def _losses(case: StepCase, data: StepData, threads: int) -> list[float]:
    run = _graph_step(case, data, threads)
    return [run() for _ in range(_CHECKED)]


def step_failures(case: StepCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Reasons not to time the program: it does not train as `nn` does, or not as in float64."""
    data = make_step(case)
    for count in threads:
        ours = _losses(case, data, count)
        for name, dtype in (("nn", np.float32), ("nn in float64", np.float64)):
            if not _agree(ours, _nn_step(case, data, count, dtype)):
                yield f"with {count} threads the losses differ from those of {name}"


def step_contest(
    case: StepCase, data: StepData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    stack.enter_context(library_threads(threads))
    ours = _losses(case, data, threads)
    contest = Contest([[WholeSteps("retrograd", _graph_step(case, data, threads), threads)]], None, [], ("step",))
    contest.slots.append([WholeSteps("nn", _nn_step(case, data, threads), threads)])
    agrees = _agree(ours, _mpsgraph_step(case, data))
    admit(contest, WholeSteps("mpsgraph", _mpsgraph_step(case, data), threads), agrees)
    torch = machine.torch
    if torch is not None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        stack.callback(torch.set_num_threads, before)
        for name, compiled in (("torch", False), ("compile", True)):
            if compiled and case.kind == "lstm":
                continue  # it is not compiled: Dynamo leaves torch.nn.LSTM to eager PyTorch
            agrees = _agree(ours, _torch_step(torch, case, data, compiled))
            admit(contest, WholeSteps(name, _torch_step(torch, case, data, compiled), threads), agrees)
    if importlib.util.find_spec("jax") is not None:
        agrees = _agree(ours, _jax_step(case, data))
        admit(contest, WholeSteps("jax", _jax_step(case, data), threads), agrees)
    return contest
