"""retrograd.nn: fit, and the summary of a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn
from support.arrays import Array, assert_same_bits
from support.nn import random

# ---- batches ---------------------------------------------------------------------------------------------------------


def linear_step(rate: Any = 0.1, **options: Any) -> nn.Step:
    model = nn.Linear(3, 2, dtype=np.float64, rng=0)
    return nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, rate, **options))


def watched(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda number: None) -> list[Any]:
    """The arguments of all steps that follow; `before` is called with the number of each."""
    seen: list[Any] = []
    original = nn.Step.__call__

    def call(self: nn.Step, *arguments: Any) -> Any:
        before(len(seen))
        seen.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(nn.Step, "__call__", call)
    return seen


def test_every_sample_once_in_each_epoch_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)
    x = random(11, 3)
    target = np.stack([x.sum(axis=1), np.arange(11.0)], axis=1)
    nn.fit(linear_step(), (x, target), epochs=3, batch=4, rng=5, progress=False)
    assert [len(a) for a, _ in seen] == [4, 4, 3] * 3
    orders = [np.concatenate([t[:, 1] for _, t in seen[i : i + 3]]) for i in (0, 3, 6)]
    for order in orders:
        assert sorted(order) == list(range(11))
        assert list(order) != list(range(11))
    assert not np.array_equal(orders[0], orders[1])
    for a, t in seen:  # samples and targets stay together
        assert np.array_equal(a, x[t[:, 1].astype(int)])
    first = [t for _, t in seen]
    seen.clear()
    nn.fit(linear_step(), (x, target), epochs=3, batch=4, rng=np.random.default_rng(5), progress=False)
    assert_same_bits([t for _, t in seen], first)
    seen.clear()
    nn.fit(linear_step(), (x, target), epochs=1, batch=4, shuffle=False, progress=False)
    assert np.array_equal(np.concatenate([a for a, _ in seen]), x)


def test_fit_is_the_loop(torch: Any) -> None:
    x, target = random(10, 3), random(10, 2, seed=1)
    step, other = linear_step(), linear_step()
    history = nn.fit(step, (torch.from_numpy(x), target.tolist()), epochs=4, batch=4, shuffle=False, progress=False)
    assert len(history) == 4
    for epoch in history:
        losses = [other(x[i : i + 4], target[i : i + 4]) for i in (0, 4, 8)]
        assert epoch.loss == pytest.approx((4 * losses[0] + 4 * losses[1] + 2 * losses[2]) / 10, rel=1e-14)
        assert epoch.validation is None
        assert epoch.seconds >= 0
    assert_same_bits(step.model.state_dict().values(), other.model.state_dict().values())
    assert nn.fit(step, (x, target), epochs=0, progress=False) == []


def test_samples_on_another_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time first; lengths have one axis only."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            self.lstm, self.loss = nn.LSTM(3, 2, dtype=np.float64, rng=0), nn.MeanSquaredError()

        def forward(self, x: Any, lengths: Any, target: Any) -> Any:
            return self.loss(self.lstm(x, lengths=lengths), target), lengths

    seen = watched(monkeypatch)
    model = Tagger()
    step = nn.compile(model, None, nn.SGD(model, 0.1))
    x, lengths, target = random(4, 5, 3), np.array([4, 3, 2, 1, 4]), random(4, 5, 2, seed=1)
    history = nn.fit(step, (x, lengths, target), validation=(x, lengths, target), epochs=2, batch=2, batch_axis=1,
                     shuffle=False, progress=False)  # fmt: skip
    assert [[a.shape for a in arguments] for arguments in seen[:3]] == [
        [(4, 2, 3), (2,), (4, 2, 2)], [(4, 2, 3), (2,), (4, 2, 2)], [(4, 1, 3), (1,), (4, 1, 2)]
    ]  # fmt: skip
    assert np.array_equal(seen[1][0], x[:, 2:4])
    assert np.array_equal(seen[1][1], lengths[2:4])
    assert history[1].loss < history[0].loss
    assert history[1].validation == pytest.approx(step.evaluate(x, lengths, target)[0], rel=1e-12)


# ---- validation ------------------------------------------------------------------------------------------------------


def test_validation_is_the_evaluation_of_all_samples() -> None:
    model = nn.Sequential(nn.Linear(3, 8, rng=0), nn.Dropout(0.5, rng=0), nn.Linear(8, 2, rng=1))
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.05), metrics={"largest": lambda y, t: graph.max(y)})
    x, target = random(20, 3), random(20, 2, seed=1)
    history = nn.fit(step, (x[:13], target[:13]), validation=(x[13:], target[13:]), batch=3, epochs=3, progress=False)
    best = min(range(3), key=lambda i: history[i].validation or 0.0)
    assert step.evaluate(x[13:], target[13:])[0] == pytest.approx(history[best].validation, rel=1e-6)
    assert model[1].stream.saved[1] == 5 * (best + 1)  # of training alone, and of the best epoch


def worsening(count: int) -> float:
    """Good for two epochs of 3 steps, then ever worse."""
    return 0.1 if count < 6 else 1.5


DATA = random(9, 3), random(9, 2, seed=1)


@pytest.mark.parametrize("patience", [1, 2, None])
def test_the_best_epoch_is_kept(patience: int | None) -> None:
    step = linear_step(worsening)
    history = nn.fit(step, DATA, validation=DATA, epochs=6, batch=3, patience=patience, progress=False)
    values = [epoch.validation or 0.0 for epoch in history]
    assert len(history) == (6 if patience is None else 2 + patience)
    assert np.argmin(values) == 1
    other = linear_step(worsening)
    nn.fit(other, DATA, epochs=2, batch=3, progress=False)
    assert_same_bits(step.model.state_dict().values(), other.model.state_dict().values())
    assert step.evaluate(*DATA) == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("number", [7, 10], ids=["in the epoch after the best", "two epochs after"])
def test_an_interrupt_leaves_the_best_epoch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def interrupt(count: int) -> None:
        if count == number:
            raise KeyboardInterrupt

    step, other = linear_step(worsening), linear_step(worsening)
    nn.fit(other, DATA, epochs=2, batch=3, progress=False)
    watched(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        nn.fit(step, DATA, validation=DATA, epochs=6, batch=3, progress=False)
    assert_same_bits(step.model.state_dict().values(), other.model.state_dict().values())


def test_an_interrupt_without_validation_leaves_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    step, other = linear_step(), linear_step()
    order = np.random.default_rng(0)
    for _ in range(2):
        chosen = order.permutation(9)
        for first in (0, 3, 6):
            if other.optimizers[0].steps < 4:
                part = chosen[first : first + 3]
                other(DATA[0][part], DATA[1][part])
    watched(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        nn.fit(step, DATA, epochs=6, batch=3, rng=0, progress=False)
    assert_same_bits(step.model.state_dict().values(), other.model.state_dict().values())


def test_a_validation_loss_that_is_no_number_is_not_the_best() -> None:
    step = linear_step()
    x, target = DATA
    bad = target.copy()
    bad[0, 0] = np.nan
    history = nn.fit(step, DATA, validation=(x, bad), epochs=5, batch=3, patience=2, progress=False)
    assert len(history) == 2
    assert np.isnan(history[0].validation or 0.0)
    other = linear_step()
    nn.fit(other, DATA, epochs=2, batch=3, progress=False)
    assert_same_bits(step.model.state_dict().values(), other.model.state_dict().values())


# ---- rates, modes and what is shown ----------------------------------------------------------------------------------


def test_a_plateau_is_told_the_loss() -> None:
    for validation in (None, DATA):
        plateau = nn.Plateau(0.0, patience=2, factor=0.5)  # nothing is learned, so nothing gets better
        plateau.state[0] = 1e-30
        model = nn.Sequential(nn.Linear(3, 4, rng=0), nn.Linear(4, 2, rng=1))
        both = [nn.SGD(model[0], plateau), nn.SGD([{"params": model[1].w, "lr": plateau}, {"params": model[1].b}], 0.0)]
        step = nn.compile(model, nn.MeanSquaredError(), both)
        history = nn.fit(step, DATA, validation=validation, epochs=6, batch=9, progress=False)
        assert plateau.state[0] == 0.25e-30  # told once in each epoch, though both optimizers have it
        best = history[0].loss if validation is None else history[0].validation
        assert plateau.state[1] == best


def test_layers_in_evaluation_mode_stay_in_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4, rng=0), nn.BatchNorm(4), nn.Linear(4, 2, rng=1))
    model[1].eval().freeze()
    before = model[1].state_dict()
    step = nn.compile(model, nn.MeanSquaredError(), nn.SGD(model, 0.1))
    history = nn.fit(step, DATA, epochs=3, progress=False)
    assert history[2].loss < history[0].loss
    assert_same_bits(model[1].state_dict().values(), before.values())
    assert not model[1].training
    model.eval()
    nn.fit(step, DATA, epochs=1, progress=False)  # a model that is as a whole in evaluation is switched
    assert model[1].training
    assert not np.array_equal(model[1].running_mean.value, before["running_mean"])


def test_a_line_for_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    history = nn.fit(linear_step(), DATA, validation=DATA, epochs=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"epoch 2 of 2  loss {history[1].loss:.4g}  validation {history[1].validation:.4g}  ")
    nn.fit(linear_step(), DATA, epochs=2, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ((DATA[0], DATA[1][:8]), {}, ValueError, r"data has shapes \(9, 3\), \(8, 2\); all need the same number"),
        ((), {}, ValueError, "data has shapes none"),
        ((DATA[0][:0], DATA[1][:0]), {}, ValueError, "at least 1"),
        (DATA, {"validation": (DATA[0][:2], DATA[1])}, ValueError, r"validation has shapes \(2, 3\), \(9, 2\)"),
        (DATA, {"batch": 0}, ValueError, "batch is 0 and epochs is 10; the minima are 1 and 0"),
        (DATA, {"epochs": -1}, ValueError, "epochs is -1"),
        (DATA, {"patience": 3}, ValueError, "patience is 3, which needs validation data"),
        (DATA[0], {}, TypeError, r"data is a ndarray, must be a tuple: \(x, target\)"),
    ],
)
def test_fit_refuses(data: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    step = linear_step()
    before = step.model.state_dict()
    with pytest.raises(error, match=message):
        nn.fit(step, data, progress=False, **options)
    assert_same_bits(step.model.state_dict().values(), before.values())


def test_a_model_learns() -> None:
    """The signs of a sum, from a list and in float64."""
    x: Array = random(256, 6)
    labels = (x.sum(axis=1) > 0).astype(int)
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(6, 16, rng=rng), nn.ReLU(), nn.Linear(16, 2, rng=rng))
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.Adam(model, 1e-2), metrics={"accuracy": nn.accuracy})
    nn.fit(step, (x[:200], labels[:200]), validation=(x[200:], labels[200:]), epochs=20, progress=False)
    assert step.evaluate(x[200:], labels[200:])[1]["accuracy"] > 0.9


# ---- summary ---------------------------------------------------------------------------------------------------------


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    shared = nn.Linear(8, 8, rng=0)
    model = nn.Sequential(
        embed=nn.Embedding(100, 8), first=shared, norm=nn.BatchNorm(8, channel_axis=-1), again=shared,
        drop=nn.Dropout(0.5), head=nn.Sequential(nn.Linear(8, 3)),
    )  # fmt: skip
    model["embed"].freeze()
    before = {name: array.tobytes() for name, array in model.state_dict().items()}
    model.summary(np.zeros((4, 5), int))
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(" {2,}", line.strip()) for line in (lines[0], *lines[2:-2])] == [
        ["layer", "kind", "result", "parameters"],
        ["the model", "Sequential", "float32[4, 5, 3]"],
        ["embed", "Embedding(100, 8)", "float32[4, 5, 8]", "800"],
        ["first", "Linear(8, 8)", "float32[4, 5, 8]", "72"],  # once
        ["norm", "BatchNorm(8, eps=1e-05)", "float32[4, 5, 8]", "16"],  # running statistics are no parameters
        ["drop", "Dropout(0.5)", "float32[4, 5, 8]"],
        ["head", "Sequential", "float32[4, 5, 3]"],
        ["head.0", "Linear(8, 3)", "float32[4, 5, 3]", "27"],
    ]
    assert lines[-1] == "915 parameters, 3.6 KiB; 800 are frozen"
    assert {name: array.tobytes() for name, array in model.state_dict().items()} == before
    assert model.training
    nn.Linear(3, 2).summary()
    assert capsys.readouterr().out.splitlines()[-1] == "8 parameters, 32 bytes"
    setattr(model["head"], "0", nn.Linear(7, 3))
    with pytest.raises(ValueError, match=r"layer 'head\.0'"):
        model.summary(np.zeros((4, 5), int))
