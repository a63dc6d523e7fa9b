"""retrograd.nn.compile: what a training step computes, changes, returns and refuses."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn
from support.arrays import Array, assert_same_bits
from support.nn import assert_differences, random


def linear(seed: int = 0, inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=np.float64, rng=seed)


def network() -> nn.Sequential:
    return nn.Sequential(first=linear(0), act=nn.Tanh(), second=linear(1))


def differentiated(model: nn.Module, loss: Any = None) -> nn.Step:
    return nn.compile(model, nn.MeanSquaredError() if loss is None else loss, nn.SGD(model, 0.0))


def state(*parts: Any) -> dict[str, bytes]:
    """The bits of models and optimizers."""
    return {f"{i}.{name}": a.tobytes() for i, part in enumerate(parts) for name, a in part.state_dict().items()}


X, TARGET = random(3, 4), random(3, 4, seed=1)

# ---- any graph of layers ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Calls its children in an order that each test gives."""

    def __init__(self, order: str, **children: nn.Module) -> None:
        for name, child in children.items():
            setattr(self, name, child)
        self.order = order

    def forward(self, x: Any) -> Any:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": linear,
    "Dropout": lambda: nn.Sequential(nn.Dropout(0.5, rng=0), linear()),
    "LayerNorm": lambda: nn.LayerNorm(4, dtype=np.float64),
    "BatchNorm": lambda: nn.BatchNorm(4, dtype=np.float64),
    "LSTM": lambda: nn.Sequential(Net("a", a=nn.LSTM(4, 4, dtype=np.float64, rng=0))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_used_twice(name: str) -> None:
    x, target = (X, TARGET) if name != "LSTM" else (random(3, 2, 4), random(3, 2, 4, seed=1))
    net = Net("aba", a=LAYERS[name](), b=nn.Tanh())
    assert_differences(differentiated(net), x, target)


def test_the_gradient_of_a_layer_used_twice_is_the_sum_of_both() -> None:
    shared, apart = Net("aba", a=linear(0), b=nn.Tanh()), Net("abc", a=linear(0), b=nn.Tanh(), c=linear(0))
    loss, found = differentiated(shared).gradients(X, TARGET)
    expected_loss, expected = differentiated(apart).gradients(X, TARGET)
    assert loss == expected_loss
    for name in ("w", "b"):
        np.testing.assert_allclose(found[f"a.{name}"], expected[f"a.{name}"] + expected[f"c.{name}"], rtol=1e-13)


def test_each_use_of_dropout_draws_and_each_use_of_a_norm_counts() -> None:
    x = np.ones((40, 40))
    net = Net("aa", a=nn.Dropout(0.5, rng=0))
    twice = net(x)
    assert net.a.stream.saved[1] == 2
    assert abs((twice == 0).mean() - 0.75) < 0.05
    norm = nn.BatchNorm(4, dtype=np.float64)
    both, apart = Net("aba", a=norm, b=linear(0)), nn.BatchNorm(4, dtype=np.float64)
    differentiated(both)(X, TARGET)
    apart(linear(0)(apart(X)))
    np.testing.assert_allclose(norm.running_mean.value, apart.running_mean.value, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(norm.running_var.value, apart.running_var.value, rtol=1e-12)


def test_weights_shared_by_two_layers() -> None:
    """An embedding whose table is the output layer's matrix."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embedding = nn.Embedding(6, 4, dtype=np.float64, rng=0)
            self.head = linear(1, 4, 6)
            self.head.w = self.embedding.table

        def forward(self, x: Any) -> Any:
            return self.head(graph.tanh(self.embedding(x)))

    model, x = Tied(), np.array([0, 3, 3, 5])
    assert list(model.parameters()) == ["embedding.table", "head.b"]
    assert_differences(differentiated(model, nn.SoftmaxCrossEntropy()), x, x)
    optimizer = nn.SGD(model, 0.1)
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), optimizer)
    _, gradients = step.gradients(x, x)
    before = model.embedding.table.value.copy()
    step(x, x)
    np.testing.assert_allclose(model.head.w.value, before - 0.1 * gradients["embedding.table"], rtol=1e-13)


def test_skips_branches_and_parameters_of_ones_own() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            self.a, self.b, self.gate = linear(0), linear(1), nn.Parameter(random(4, seed=2))

        def forward(self, x: Any) -> Any:
            h = graph.tanh(self.a(x))
            return graph.concatenate([x + self.gate * self.b(h), h * x, x], -1)

    assert_differences(differentiated(Skips()), X, random(3, 12))


def test_several_inputs_and_results() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            self.a, self.b = linear(0), linear(1)

        def forward(self, pair: Any, scale: Any) -> Any:
            return {"sum": self.a(pair[0]) * scale, "parts": (self.b(pair[1]), pair[0])}

    def loss(y: Any, target: Any) -> Any:
        first, second = target["first"], target["second"]
        squares = graph.mean(graph.square(y["sum"] - first)) + graph.sum(graph.square(y["parts"][0] - second))
        return squares + graph.mean(y["parts"][1])

    model = Two()
    step = nn.compile(model, loss, nn.SGD(model, 0.01))
    target = {"first": TARGET, "second": random(2, 4)}
    arguments = ((X, random(2, 4, seed=3)), 0.5, target)
    assert_differences(step, *arguments)
    y = (model.a(X) * 0.5 - TARGET, model.b(arguments[0][1]) - target["second"])
    assert step(*arguments) == pytest.approx((y[0] ** 2).mean() + (y[1] ** 2).sum() + X.mean(), rel=1e-12)


def test_states_carried_from_step_to_step() -> None:
    """Without a loss of its own, forward returns the loss and whatever else the step shall return."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            self.lstm = nn.LSTM(4, 3, layers=2, dtype=np.float64, rng=0)
            self.head, self.loss = linear(1, 3, 4), nn.MeanSquaredError()

        def forward(self, x: Any, target: Any, state: Any = None) -> Any:
            y, state = self.lstm.run(x, state)
            return self.loss(self.head(y), target), {"state": state, "y": y}

    model = Stream()
    step = nn.compile(model, None, nn.SGD(model, 0.0))
    x, target = random(6, 2, 4), random(6, 2, 4, seed=1)
    y, final = model.lstm.run(x)
    carried: Any = None
    for first in (0, 2, 4):
        loss, rest = step(x[first : first + 2], target[first : first + 2], carried)
        carried = rest["state"]
        assert type(loss) is float
        assert isinstance(carried, nn.LstmState)
        np.testing.assert_allclose(rest["y"], y[first : first + 2], rtol=1e-12)
    np.testing.assert_allclose(carried.h, final.h, rtol=1e-12)
    np.testing.assert_allclose(carried.c, final.c, rtol=1e-12)
    assert step(x[:2], target[:2], None)[0] == step(x[:2], target[:2])[0]
    assert step(x[:2], target[:2], carried)[0] != step(x[:2], target[:2])[0]
    kept = carried.h.copy()
    step(x[:2], target[:2], carried)
    assert np.array_equal(carried.h, kept)  # results are the caller's


# ---- what a step is told ---------------------------------------------------------------------------------------------


def test_metrics() -> None:
    model = nn.Sequential(nn.Linear(4, 3, rng=0))
    metrics = {"accuracy": nn.accuracy, "largest": lambda y, target: graph.max(y)}
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.SGD(model, 0.1), metrics=metrics)
    x, labels = random(20, 4, dtype=np.float32), np.arange(20) % 3
    labels[3] = -100
    y = model(x)
    counted = labels != -100
    expected = (y.argmax(axis=1) == labels)[counted].mean()
    for call in (step.evaluate, lambda *a: step.gradients(*a)[0], step):
        loss, found = call(x, labels)
        assert loss == pytest.approx(nn.SoftmaxCrossEntropy()(y, labels), rel=1e-6)
        assert found == {"accuracy": pytest.approx(expected, rel=1e-6), "largest": float(y.max())}
    assert step.evaluate(x, labels)[0] < loss


def test_accuracy() -> None:
    y = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    assert nn.accuracy(y, np.array([0, 1, 2])) == pytest.approx(2 / 3)
    assert nn.accuracy(y, np.array([0, 1, -100])) == 1.0
    assert nn.accuracy(y, np.array([0, -1, -1]), ignore_index=-1) == 1.0
    assert nn.accuracy(y, np.eye(3)[[0, 1, 2]]) == pytest.approx(2 / 3)  # probabilities
    assert nn.accuracy(np.array([1.0, -1.0, 2.0]), np.array([1, 0, 0])) == pytest.approx(2 / 3)  # logits
    assert nn.accuracy(np.array([[1.0], [-1.0]]), np.array([[1.0], [0.0]])) == 1.0
    assert nn.accuracy(y, np.full(3, -100)) == 0.0
    with pytest.raises(ValueError, match=r"target has shape \(3, 1\), but y has shape \(3, 3\)"):
        nn.accuracy(y, np.zeros((3, 1), int))
    with pytest.raises(ValueError, match=r"target has shape \(3,\), but y has shape \(3, 1\)"):
        nn.accuracy(y[:, :1], np.zeros(3, int))


def test_weights_of_samples() -> None:
    model, weights = linear(), np.array([1.0, 0.0, 3.0])
    step = differentiated(model)
    assert_differences(step, X, TARGET, weights=weights)
    losses = ((model(X) - TARGET) ** 2).mean(axis=1)
    loss, gradients = step.gradients(X, TARGET, weights=weights)
    assert loss == pytest.approx((weights * losses).mean(), rel=1e-12)
    repeated = differentiated(model).gradients(X[[0, 2, 2, 2]], TARGET[[0, 2, 2, 2]])[1]
    np.testing.assert_allclose(gradients["w"] / 4, repeated["w"] / 3, rtol=1e-12)
    mean = nn.compile(model, nn.MeanSquaredError(reduction="weighted_mean"), nn.SGD(model, 0.0))
    assert mean(X, TARGET, weights=weights) == pytest.approx((weights * losses).sum() / 4, rel=1e-12)
    assert mean.evaluate(X, TARGET, weights=weights.tolist()) == mean(X, TARGET, weights=weights)
    assert mean(X, TARGET, weights=np.ones(3)) == pytest.approx(step(X, TARGET), rel=1e-14)


def test_keywords_go_to_forward_or_to_the_loss() -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.LSTM(4, 3, dtype=np.float64, rng=rng), nn.Linear(3, 2, dtype=np.float64, rng=rng))
    x, labels, lengths = random(5, 2, 4), np.zeros((5, 2), int), np.array([5, 2])
    labels[2:, 1] = -100
    step = differentiated(model, nn.SoftmaxCrossEntropy())
    assert_differences(step, x, labels, lengths=lengths, weights=np.array([[1.0, 2.0]] * 5))
    loss = step(x, labels, lengths=lengths)
    assert loss == pytest.approx(nn.SoftmaxCrossEntropy()(model(x, lengths=lengths), labels), rel=1e-13)
    changed = x.copy()
    changed[2:, 1] = 1e6  # past the end of the second sequence
    assert step(changed, labels, lengths=lengths) == loss
    with pytest.raises(TypeError, match="neither the model's forward nor the loss has an argument 'length'"):
        step(x, labels, length=lengths)


# ---- what is trained -------------------------------------------------------------------------------------------------


def test_frozen_parameters_and_parts_in_evaluation_mode() -> None:
    model = nn.Sequential(
        body=linear(0), norm=nn.BatchNorm(4, dtype=np.float64), drop=nn.Dropout(0.5, rng=0), head=linear(1)
    )
    model(X)
    nn.Sequential(model["norm"], model["drop"]).eval()
    model["body"].freeze()
    model["norm"].freeze()
    optimizer = nn.Adam(model, 0.1, weight_decay=0.5)
    step = nn.compile(model, nn.MeanSquaredError(), optimizer)
    assert set(step.gradients(X, TARGET)[1]) == {"head.w", "head.b"}
    assert_differences(step, X, TARGET)
    before = model.state_dict()
    for _ in range(3):
        assert step.evaluate(X, TARGET) == step(X, TARGET)  # all that depends on the mode is in evaluation
    for name, array in model.state_dict().items():
        assert np.array_equal(array, before[name]) == (not name.startswith("head.")), name
    model["body"].unfreeze()
    step(X, TARGET)
    assert not np.array_equal(model["body"].w.value, before["body.w"])
    assert np.array_equal(model["norm"].gamma.value, before["norm.gamma"])
    assert np.array_equal(model["norm"].running_mean.value, before["norm.running_mean"])


def test_elements_that_a_mask_leaves_out_stay() -> None:
    """Also where weights decay, and where gradients are clipped to a range without 0."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(np.ones(4), mask=[True, False, True, False])

        def forward(self, x: Any) -> Any:
            return x * self.w

    makers: list[Callable[[nn.Module], nn.Optimizer]] = [
        lambda m: nn.SGD(m, 0.1),
        lambda m: nn.SGD(m, 0.1, momentum=0.9, l1=0.1),
        lambda m: nn.SGD(m, 0.1, clip=(0.1, 0.2)),
        lambda m: nn.Adam(m, 0.1, weight_decay=0.5),
        lambda m: nn.AdamW(m, 0.1, weight_decay=0.5),
    ]
    for make in makers:
        for parts in (1, 2):
            model, plain = Masked(), Masked()
            plain.w = nn.Parameter(np.ones(4))
            for m in (model, plain):
                step = nn.compile(m, nn.MeanSquaredError(), make(m), accumulate=parts)
                for _ in range(3 * parts):
                    step(X, TARGET)
            assert np.array_equal(model.w.value[[1, 3]], [1.0, 1.0])
            assert np.array_equal(model.w.value[[0, 2]], plain.w.value[[0, 2]])
            assert not np.array_equal(model.w.value[[0, 2]], [1.0, 1.0])


def test_several_optimizers() -> None:
    """Each for its part, as one alone would do while the other part is frozen."""
    model, twin = network(), network()
    both = [nn.Adam(model["first"], 0.1), nn.SGD(model["second"], 0.2, momentum=0.9, maximum_norm=0.1)]
    step = nn.compile(model, nn.MeanSquaredError(), both)
    loss, gradients = step.gradients(X, TARGET)
    assert step(X, TARGET) == loss
    assert [o.steps for o in both] == [1, 1]
    apart = nn.compile(twin, nn.MeanSquaredError(), nn.Adam(twin["first"], 0.1))
    apart(X, TARGET)
    assert np.array_equal(model["first"].w.value, twin["first"].w.value)
    norm = np.sqrt(sum((gradients[f"second.{name}"] ** 2).sum() for name in ("w", "b")))  # not of the other's
    assert norm > 0.1
    moved = twin["second"].w.value - model["second"].w.value
    np.testing.assert_allclose(moved, 0.2 * gradients["second.w"] * 0.1 / norm, rtol=1e-12)
    with pytest.raises(ValueError, match="parameter 'w' belongs to two optimizers"):
        nn.compile(model, nn.MeanSquaredError(), [*both, nn.SGD(model, 0.1)])


@pytest.mark.parametrize("kind", [nn.SGD, nn.AdamW])
@pytest.mark.parametrize("options", [{}, {"maximum_norm": 0.05}])
def test_accumulated_gradients_are_those_of_the_whole_batch(kind: type[Any], options: dict[str, Any]) -> None:
    x, target = random(12, 4), random(12, 4, seed=1)
    whole, parts = network(), network()
    step = nn.compile(whole, nn.MeanSquaredError(), kind(whole, 0.1, **options))
    optimizer = kind(parts, 0.1, **options)
    small = nn.compile(parts, nn.MeanSquaredError(), optimizer, accumulate=3)
    for count in range(1, 4):
        loss = step(x, target)
        before = state(parts, optimizer)
        losses = [small(x[:4], target[:4]), small(x[4:8], target[4:8])]
        assert state(parts, optimizer) == before
        assert optimizer.collected == 2
        small.evaluate(x, target)
        small.gradients(x, target)
        assert optimizer.collected == 2
        losses.append(small(x[8:], target[8:]))
        assert optimizer.collected == 0
        assert optimizer.steps == count
        assert np.mean(losses) == pytest.approx(loss, rel=1e-12)
    for name, array in whole.state_dict().items():
        np.testing.assert_allclose(parts.state_dict()[name], array, rtol=1e-10, atol=1e-13)


def test_accumulation_in_groups_and_with_frozen_parts() -> None:
    for first in (True, False):
        model, twin = network(), network()
        names = ("first", "second") if first else ("second", "first")
        for m in (model, twin):
            m[names[0]].freeze()
        groups = [{"params": model["first"]}, {"params": model["second"], "lr": 0.2}]
        optimizer = nn.SGD(groups, 0.1, momentum=0.9, maximum_norm=0.05)
        step = nn.compile(model, nn.MeanSquaredError(), optimizer, accumulate=2)
        same = nn.SGD([{"params": twin["first"]}, {"params": twin["second"], "lr": 0.2}], 0.1, momentum=0.9,
                      maximum_norm=0.05)  # fmt: skip
        other = nn.compile(twin, nn.MeanSquaredError(), same)
        for _ in range(2):
            step(X, TARGET)
            step(X, TARGET)
            other(X, TARGET)
        assert optimizer.steps == same.steps == 2
        for m in (model, twin):
            m[names[1]].freeze()
            m[names[0]].unfreeze()
        kept = model[names[1]].w.value.copy()
        step(X, TARGET)
        step(X, TARGET)
        other(X, TARGET)
        assert np.array_equal(model[names[1]].w.value, kept)  # momentum does not move what is frozen
        for name, array in twin.state_dict().items():
            np.testing.assert_allclose(model.state_dict()[name], array, rtol=1e-12)


# ---- nothing else changes --------------------------------------------------------------------------------------------


def everything() -> tuple[nn.Sequential, nn.Optimizer, nn.Step]:
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Embedding(7, 4, rng=rng), nn.LSTM(4, 5, layers=2, dropout=0.3, rng=rng), nn.BatchNorm(5, channel_axis=-1),
        nn.Dropout(0.3, rng=rng), nn.Linear(5, 7, rng=rng),
    )  # fmt: skip
    optimizer = nn.Adam(model, 0.1)
    return model, optimizer, nn.compile(model, nn.SoftmaxCrossEntropy(), optimizer)


def test_evaluations_and_gradients_change_nothing() -> None:
    model, optimizer, step = everything()
    x = np.random.default_rng(1).integers(0, 7, (4, 3))
    twin, same, other = everything()
    for _ in range(3):
        before = state(model, optimizer)
        loss = step.evaluate(x, x)
        assert loss == step.evaluate(x, x) == pytest.approx(nn.SoftmaxCrossEntropy()(model.predict(x), x), rel=1e-6)
        first, second = step.gradients(x, x), step.gradients(x, x)
        assert first[0] == second[0]
        assert first[0] != loss  # in training mode, with dropout
        assert_same_bits(first[1].values(), second[1].values())
        assert state(model, optimizer) == before
        assert step(x, x) == first[0]
        other(x, x)
        assert state(model, optimizer) == state(twin, same)
        assert state(model, optimizer) != before


def test_buffers_of_ones_own_change_in_steps_alone() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            self.calls, self.w = nn.Buffer(np.zeros((), np.int64)), nn.Parameter(np.ones(4))

        def forward(self, x: Any) -> Any:
            self.calls.assign(self.calls + 1)  # in any mode
            return x * self.w

    model = Counts()
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    for count in range(1, 4):
        step(X, TARGET)
        assert model.calls.value == count
        step.evaluate(X, TARGET)
        step.gradients(X, TARGET)
        assert model.calls.value == count
    model(X)
    assert model.calls.value == 4


def test_changes_after_compiling_take_effect() -> None:
    x = np.ones((50, 20), np.float32)
    model = nn.Sequential(drop=nn.Dropout(0.5, rng=0), scale=nn.Linear(20, 20, rng=0))
    optimizer = nn.SGD(model, 0.0)
    loss = nn.MeanSquaredError()
    step = nn.compile(model, loss, optimizer)
    target = np.zeros((50, 20), np.float32)
    dropped = step(x, target)
    model["drop"].rate = 0.0
    whole = step(x, target)
    assert whole == step.evaluate(x, target) != dropped
    model["drop"].rate = 0.5
    assert step(x, target) != whole
    model["drop"].eval()
    assert step(x, target) == whole
    loss.reduction = "sum"
    assert step(x, target) == pytest.approx(1000 * whole, rel=1e-5)
    loss.reduction = "mean"
    optimizer.learning_rate = 0.1
    before = model["scale"].w.value.copy()
    model["scale"].w.trainable = False
    step(x, target)
    assert np.array_equal(model["scale"].w.value, before)
    model["scale"].w.trainable = True
    step(x, target)
    assert not np.array_equal(model["scale"].w.value, before)
    model.drop = nn.Activation("identity")
    assert [name for name, _ in model.modules()] == ["", "drop", "scale"]
    plain = step.evaluate(x, target)
    model.drop = nn.Tanh()
    assert step.evaluate(x, target) == pytest.approx(float((model["scale"](np.tanh(x)) ** 2).mean()), rel=1e-6)
    assert step.evaluate(x, target) != plain
    model.scale = nn.Linear(20, 20, rng=1)  # which the optimizer does not have
    for _ in range(2):  # not the program of before, either
        with pytest.raises(ValueError, match=r"the loss does not depend on scale\.w, scale\.b"):
            step(x, target)


def test_what_would_have_no_effect_cannot_be_set() -> None:
    model = linear()
    optimizer = nn.SGD(model, 0.1)
    step = nn.compile(model, nn.MeanSquaredError(), optimizer)
    for name in ("loss", "model", "accumulate", "metrics", "optimizers"):
        with pytest.raises(AttributeError, match=rf"step\.{name} is fixed; call nn\.compile for another step"):
            setattr(step, name, 2)
    for name in ("weight_decay", "momentum", "maximum_norm", "steps"):
        with pytest.raises(AttributeError, match=rf"SGD\.{name} is fixed; only learning_rate can be set"):
            setattr(optimizer, name, 0.5)
    optimizer.learning_rate = 0.25
    assert optimizer.learning_rate == optimizer.current_rate() == 0.25


def test_one_thread_traces_at_a_time() -> None:
    """A trace in evaluation mode switches the modes of modules, which another thread would see."""
    from retrograd.nn.program import TRACING

    free: list[bool] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            self.drop, self.scale = nn.Dropout(0.5, rng=0), nn.Parameter(np.ones(()))

        def forward(self, x: Any) -> Any:
            thread = threading.Thread(target=lambda: free.append(TRACING.acquire(blocking=False)))
            thread.start()
            thread.join()
            return self.drop(x) * self.scale

    model = Looks()
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.0))
    x = np.ones((20, 20))
    assert np.array_equal(model.predict(x), x)
    assert step.evaluate(x, x) == 0
    assert step(x, x) > 0
    assert free == [False] * 3


def test_threads_that_train_and_predict() -> None:
    """Each with shapes that are compiled meanwhile: a training step keeps its dropout, a prediction has none."""
    model = nn.Sequential(nn.Dropout(0.5, rng=0), nn.Linear(8, 8, bias=False, dtype=np.float64))
    model[1].w[...] = np.eye(8)
    model[1].freeze()
    model.offset = nn.Linear(8, 8, dtype=np.float64)
    model.offset.w[...], model.offset.b[...] = np.eye(8), 0
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.0))
    wrong: list[str] = []

    def predict() -> None:
        for rows in range(1, 40):
            x = np.ones((rows, 8))
            if not np.array_equal(model.predict(x), x):
                wrong.append(f"predicted {rows}")

    def train() -> None:
        for rows in range(40, 1, -1):
            x = np.ones((rows, 8))
            if not step(x, x) > 0:
                wrong.append(f"trained {rows}")

    threads = [threading.Thread(target=work) for work in (predict, train, predict)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that many programs are compiled
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_changes_nothing() -> None:
    model, optimizer, step = everything()
    x = np.random.default_rng(1).integers(0, 7, (4, 3))
    wrong = x.copy()
    wrong[2, 1] = 7
    for _ in range(2):  # before it is compiled, and after
        before = state(model, optimizer)
        with pytest.raises(IndexError, match=r"index is 7, must be from 0 to below 7.*no variable was changed"):
            step(wrong, x)
        with pytest.raises(IndexError, match=r"index is 7, must be from 0 to below 7.*no variable was changed"):
            step(x, wrong)
        with pytest.raises(ValueError, match=r"labels"):
            step(x, x[:3])
        assert state(model, optimizer) == before
        step(x, x)
    twin, same, other = everything()
    other(x, x)
    other(x, x)
    assert state(model, optimizer) == state(twin, same)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, o: nn.compile(3, None, o), TypeError, "model is a int, must be an nn.Module"),
        (lambda m, o: nn.compile(m, nn.Huber, o), TypeError, r"loss is the class Huber; write nn\.Huber\(\)"),
        (lambda m, o: nn.compile(m, "mse", o), TypeError, "loss is"),
        (lambda m, o: nn.compile(m, nn.Huber(), nn.Adam), TypeError, "optimizer"),
        (lambda m, o: nn.compile(m, nn.Huber(), []), TypeError, "optimizer is empty"),
        (lambda m, o: nn.compile(m, None, o, metrics={"a": nn.accuracy}), TypeError, "metrics need a loss"),
        (lambda m, o: nn.compile(m, nn.Huber(), o, accumulate=0), ValueError, "accumulate is 0, must be at least 1"),
        (lambda m, o: nn.compile(m, nn.Huber(), o, num_threads=0), ValueError, "threads is 0, must be at least 1"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(), TypeError, "there is no target"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(X), TypeError, "the last argument of a step is the target"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(X, X, X), TypeError, "too many|positional"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(X, X[:2]), ValueError, r"shape \(2, 4\), but y has shape \(3, 4\)"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(X[:, :3], X), ValueError, r"layer 'first'.*3.*4"),
        (lambda m, o: nn.compile(m, nn.Huber(reduction="none"), o)(X, X), ValueError, r"loss has shape \(3, 4\)"),
        (lambda m, o: nn.compile(m, lambda y, t: 1.0, o)(X, X), TypeError, "the loss is a float, must be a tensor"),
        (lambda m, o: nn.compile(m, lambda y, t: graph.mean(y - t), nn.SGD(m.freeze(), 0.1))(X, X), ValueError,
         "all parameters of the optimizer are frozen"),
        (lambda m, o: nn.compile(m["first"], nn.Huber(), o)(X, X), ValueError,
         r"the loss does not depend on second\.w, second\.b"),
        (lambda m, o: nn.compile(m.eval(), nn.Huber(), o)(X, X), RuntimeError, r"evaluation mode; call model\.train"),
        (lambda m, o: nn.compile(m, nn.Huber(), o)(X, np.array(["a"] * 3)), TypeError, "dtype <U1"),
    ],
)  # fmt: skip
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    model = network()
    optimizer = nn.SGD(model, 0.1)
    before = state(model, optimizer)
    with pytest.raises(error, match=message):
        call(model, optimizer)
    assert state(model, optimizer) == before


def test_a_layer_in_a_list_is_not_forgotten() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            self.layers: list[nn.Module] = []
            self.layers.append(linear(0))
            self.head = linear(1)

        def forward(self, x: Any) -> Any:
            return self.head(self.layers[0](x))

    model = Lists()
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    with pytest.raises(ValueError, match=r"depends on a parameter '[wb]' of shape .* that the model does not have"):
        step(X, TARGET)
    model.layers[0].freeze()  # a teacher
    kept = model.layers[0].w.value.copy()
    assert step(X, TARGET) > step(X, TARGET)
    assert np.array_equal(model.layers[0].w.value, kept)


# ---- shapes and values that hurt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 13, 31, 33])
def test_any_size_of_a_batch(count: int) -> None:
    model, x, target = network(), random(count, 4), random(count, 4, seed=1)
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    hidden = np.tanh(x @ model["first"].w.value.T + model["first"].b.value)
    error = hidden @ model["second"].w.value.T + model["second"].b.value - target
    loss, gradients = step.gradients(x, target)
    assert loss == pytest.approx((error**2).mean(), rel=1e-12)
    np.testing.assert_allclose(gradients["second.w"], 2 * error.T @ hidden / error.size, rtol=1e-10, atol=1e-14)
    before = model["second"].b.value.copy()
    step(x, target)
    np.testing.assert_allclose(model["second"].b.value, before - 0.2 * error.sum(axis=0) / error.size, rtol=1e-10)


def test_an_empty_batch_moves_no_parameter() -> None:
    """Its mean loss is not a number; there is nothing to learn from it."""
    model = network()
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(step(np.zeros((0, 4)), np.zeros((0, 4))))
    assert state(model) == before
    assert model.predict(np.zeros((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("loss", [nn.MeanSquaredError(), nn.Huber(), nn.MeanAbsoluteError(), nn.Hinge(),
                                  nn.SigmoidCrossEntropy(), nn.SoftmaxCrossEntropy()], ids=repr)  # fmt: skip
def test_a_nan_in_the_data_shows_in_the_loss(loss: nn.Loss) -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(4, 5, rng=rng), nn.BatchNorm(5), nn.ReLU(), nn.Linear(5, 4, rng=rng))
    step = nn.compile(model, loss, nn.SGD(model, 0.0))
    x = random(6, 4, dtype=np.float32)
    target: Array = np.zeros((6, 4), np.float32)
    target[:, 0] = 1
    assert np.isfinite(step(x, target))
    x[2, 1] = np.nan
    assert np.isnan(step(x, target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted_mean"])
@pytest.mark.parametrize(
    "make",
    [nn.MeanSquaredError, nn.MeanAbsoluteError, nn.Hinge, lambda **o: nn.Huber(delta=0.5, **o),
     lambda **o: nn.SigmoidCrossEntropy(label_smoothing=0.1, **o),
     lambda **o: nn.SoftmaxCrossEntropy(label_smoothing=0.1, ignore_index=-1, **o)],
)  # fmt: skip
def test_losses_by_differences(make: Any, reduction: str) -> None:
    loss = make(reduction=reduction)
    labels = isinstance(loss, nn.SoftmaxCrossEntropy)
    target: Any = np.array([0, -1, 3, 2, 1]) if labels else (random(5, 4, seed=1) > 0).astype(np.float64)
    step = differentiated(linear(), loss)
    assert_differences(step, random(5, 4, seed=3), target, rtol=2e-6)
    assert_differences(step, random(5, 4, seed=3), target, weights=np.array([1.0, 2.0, 0.0, 0.5, 3.0]), rtol=2e-6)
    if labels:
        probabilities = np.abs(random(5, 4, seed=2))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        assert_differences(step, random(5, 4, seed=3), probabilities)
