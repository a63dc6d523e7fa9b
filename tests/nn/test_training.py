"""retrograd.nn as a whole: gradients of models by finite differences, losses step by step beside PyTorch's, the same
bits at any number of threads, memory that does not grow, and checkpoints."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import stat
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import retrograd as rg
from retrograd import nn
from retrograd.nn.checkpoint import write_whole
from support.waiting import PATIENCE

Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- models ----------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Labels for every step of ragged sequences that begin in given states, which count in the loss at the end too."""

    def __init__(self, rng: np.random.Generator, dtype: npt.DTypeLike) -> None:
        self.embedding = nn.Embedding(9, 5, dtype=dtype, rng=rng)
        self.lstm = nn.LSTM(
            5, 4, layers=2, bidirectional=True, batch_first=True, peephole="full", dropout=0.3, dtype=dtype, rng=rng
        )
        self.norm = nn.LayerNorm(8, activation="gelu", dtype=dtype)
        self.dropout = nn.Dropout(0.2, rng=rng)
        self.head = nn.Linear(8, 6, dtype=dtype, rng=rng)

    def forward(self, x: Array) -> Array:
        states = random(4, len(x), 4, seed=8), random(4, len(x), 4, seed=9)
        y = self.lstm.forward(self.embedding.forward(x), states, lengths=[6, 2, 4])
        return self.head.forward(self.dropout.forward(self.norm.forward(y)))

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> None:
        dy = self.norm.backward(self.dropout.backward(self.head.backward(dy)))
        self.embedding.backward(self.lstm.backward(dy))


class Residual(nn.Module):
    """x + inner(x)"""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def forward(self, x: Array) -> Array:
        return x + self.inner.forward(x)

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array:
        dx = self.inner.backward(dy, accumulate=accumulate)
        assert dx is not None
        return dy + dx


def norms(rng: np.random.Generator, dtype: npt.DTypeLike) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm(4, activation="silu", dtype=dtype),
        Residual(
            nn.Sequential(nn.GroupNorm(2, 4, activation="tanh", dtype=dtype), nn.Linear(6, 6, dtype=dtype, rng=rng))
        ),
        nn.InstanceNorm(4, affine=True, dtype=dtype),
        nn.Activation("softplus"),
        nn.Linear(6, 3, bias=False, init="he", dtype=dtype, rng=rng),
        nn.LayerNorm((4, 3), dtype=dtype),
    )


def forecaster(rng: np.random.Generator, dtype: npt.DTypeLike) -> nn.Sequential:
    return nn.Sequential(
        nn.LSTM(6, 5, activations=rg.LstmActivations(g="softsign"), peephole="diagonal", output_gate_reads="old",
                recompute=True, dtype=dtype, rng=rng),
        nn.BatchNorm(5, channel_axis=-1, dtype=dtype),
        nn.Linear(5, 2, init="keras", dtype=dtype, rng=rng),
    )  # fmt: skip


Problem = tuple[nn.Module, nn.Loss, Array, Array]


def problem(name: str) -> Problem:
    rng = np.random.default_rng(3)
    if name == "tagger":
        labels = rng.integers(0, 6, (3, 6))
        labels[1, 2:] = -100
        return Tagger(rng, np.float64), nn.SoftmaxCrossEntropy(label_smoothing=0.1), rng.integers(0, 9, (3, 6)), labels
    if name == "norms":
        return norms(rng, np.float64), nn.Huber(delta=0.5), random(3, 4, 6), random(3, 4, 3, seed=1)
    if name == "detector":
        return (
            norms(rng, np.float64),
            nn.SigmoidCrossEntropy(label_smoothing=0.1),
            random(3, 4, 6),
            rng.random((3, 4, 3)),
        )
    if name == "separator":
        return norms(rng, np.float64), nn.Hinge(), random(3, 4, 6), np.round(rng.random((3, 4, 3)))
    if name == "absolute":
        return norms(rng, np.float64), nn.MeanAbsoluteError(), random(3, 4, 6), random(3, 4, 3, seed=1)
    if name == "norms in evaluation":
        model = norms(rng, np.float64)
        model.backward(model.forward(random(3, 4, 6)))  # the running statistics have seen something
        return model.eval(), nn.MeanSquaredError(reduction="sum"), random(3, 4, 6), random(3, 4, 3, seed=1)
    return forecaster(rng, np.float64), nn.MeanSquaredError(), random(7, 3, 6), random(7, 3, 2, seed=1)


@pytest.mark.parametrize(
    "name", ["tagger", "norms", "detector", "separator", "absolute", "norms in evaluation", "forecaster"]
)
def test_gradients_by_finite_differences(name: str) -> None:
    """Along a random direction in each parameter, and in x where x is of real numbers."""
    model, loss, x, target = problem(name)
    buffers = {key: array.copy() for key, array in model.buffers().items()}

    def value() -> float:
        for key, array in model.buffers().items():  # the same masks, the same running statistics
            array[...] = buffers[key]
        return float(loss.forward(model.forward(x), target))

    value()
    dx = model.backward(loss.backward())
    checked = {key: (array, model.gradients()[key].copy()) for key, array in model.parameters().items()}
    if dx is not None:
        checked["x"] = (x, dx.copy())
    step = 1e-5
    for key, (array, gradient) in checked.items():
        direction = random(*array.shape, seed=17)
        kept = array.copy()
        array += step * direction
        above = value()
        array[...] = kept - step * direction
        below = value()
        array[...] = kept
        # Truncation is of the order step^2 = 1e-10, rounding of the losses 1e-16 / step = 1e-11.
        np.testing.assert_allclose((gradient * direction).sum(), (above - below) / (2 * step), rtol=1e-6, atol=1e-9,
                                   err_msg=key)  # fmt: skip


# ---- beside PyTorch --------------------------------------------------------------------------------------------------


def language_model(dtype: npt.DTypeLike, rng: np.random.Generator) -> nn.Sequential:
    return nn.Sequential(
        embedding=nn.Embedding(12, 8, dtype=dtype, rng=rng),
        lstm=nn.LSTM(8, 10, layers=2, dtype=dtype, rng=rng),
        norm=nn.LayerNorm(10, dtype=dtype),
        head=nn.Linear(10, 12, dtype=dtype, rng=rng),
    )


def to_torch(torch: Any, model: nn.Sequential) -> Any:
    """The same layers with the same weights. PyTorch has two biases; the second is 0 and does not learn."""
    layers: Any = model
    dtype = {"float32": torch.float32, "float64": torch.float64}[str(layers.head.w.dtype)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(12, 8, dtype=dtype)
            self.lstm = torch.nn.LSTM(8, 10, num_layers=2, dtype=dtype)
            self.norm = torch.nn.LayerNorm(10, dtype=dtype)
            self.head = torch.nn.Linear(10, 12, dtype=dtype)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.lstm(self.embedding(x))[0]))

    theirs = Model()
    state = {
        "embedding.weight": layers.embedding.table,
        "norm.weight": layers.norm.gamma,
        "norm.bias": layers.norm.beta,
    }
    state |= {"head.weight": layers.head.w, "head.bias": layers.head.b}
    for i, cell in enumerate((layers.lstm.layer0, layers.lstm.layer1)):
        state |= {f"lstm.weight_ih_l{i}": cell.wx, f"lstm.weight_hh_l{i}": cell.wh, f"lstm.bias_ih_l{i}": cell.b}
        state[f"lstm.bias_hh_l{i}"] = np.zeros_like(cell.b)
    theirs.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})
    for i in range(2):
        getattr(theirs.lstm, f"bias_hh_l{i}").requires_grad_(False)
    return theirs


# ours, PyTorch's; both with the same mathematics. Learning rates at which the loss falls well within 200 steps.
PAIRS: dict[str, tuple[Callable[[nn.Module], nn.Optimizer], Callable[[Any, Any], Any]]] = {
    "sgd": (lambda m: nn.SGD(m, 0.3), lambda t, p: t.optim.SGD(p, 0.3)),
    "momentum": (
        lambda m: nn.SGD(m, 0.05, momentum=0.9, weight_decay=1e-3),
        lambda t, p: t.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    ),
    "nesterov": (
        lambda m: nn.SGD(m, 0.05, momentum=0.9, nesterov=True),
        lambda t, p: t.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "step": (  # BNNS's other forms of a velocity move as PyTorch's while the learning rate stays
        lambda m: nn.SGD(m, 0.05, momentum=0.9, velocity_of="step"),
        lambda t, p: t.optim.SGD(p, 0.05, momentum=0.9),
    ),
    "descent": (
        lambda m: nn.SGD(m, 0.05, momentum=0.9, velocity_of="descent", nesterov=True),
        lambda t, p: t.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (
        lambda m: nn.Adam(m, 3e-3, eps=1e-5, weight_decay=1e-3),
        lambda t, p: t.optim.Adam(p, 3e-3, eps=1e-5, weight_decay=1e-3),
    ),
    "amsgrad": (
        lambda m: nn.Adam(m, 3e-3, eps=1e-5, amsgrad=True),
        lambda t, p: t.optim.Adam(p, 3e-3, eps=1e-5, amsgrad=True),
    ),
    "adamw": (lambda m: nn.AdamW(m, 3e-3, eps=1e-5), lambda t, p: t.optim.AdamW(p, 3e-3, eps=1e-5)),
    "rmsprop": (lambda m: nn.RMSProp(m, 1e-3, eps=1e-4), lambda t, p: t.optim.RMSprop(p, 1e-3, eps=1e-4)),
    "rmsprop centered": (
        lambda m: nn.RMSProp(m, 1e-3, eps=1e-3, centered=True, momentum=0.9),
        lambda t, p: t.optim.RMSprop(p, 1e-3, eps=1e-3, centered=True, momentum=0.9),
    ),
    "clip by value": (lambda m: nn.SGD(m, 0.3, clip=(-0.03, 0.03)), lambda t, p: t.optim.SGD(p, 0.3)),
    "clip by norm": (lambda m: nn.SGD(m, 1.0, maximum_norm=0.3), lambda t, p: t.optim.SGD(p, 1.0)),
}
# Roundings of a step are carried into the next ones and grow there. After 200 steps the largest relative difference of
# all pairs was 1.3e-12 in float64 and 5e-6 in float32.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


@pytest.mark.parametrize(
    ("pair", "dtype"),
    [*((pair, "float64") for pair in PAIRS), *((pair, "float32") for pair in ("nesterov", "adamw", "rmsprop"))],
)
def test_losses_are_those_of_pytorch(torch: Any, pair: str, dtype: str) -> None:
    rng = np.random.default_rng(11)
    ours = language_model(dtype, rng)
    theirs = to_torch(torch, ours)
    make, make_theirs = PAIRS[pair]
    optimizer = make(ours)
    their_parameters = [p for p in theirs.parameters() if p.requires_grad]
    their_optimizer = make_theirs(torch, their_parameters)
    loss, their_loss = nn.SoftmaxCrossEntropy(label_smoothing=0.05), torch.nn.CrossEntropyLoss(label_smoothing=0.05)
    batches = [(x, (3 * x + np.roll(x, 1, axis=0)) % 12) for x in rng.integers(0, 12, (5, 6, 4))]
    values, their_values = [], []
    for step in range(200):
        x, labels = batches[step % 5]
        values.append(loss.forward(ours.forward(x), labels))
        ours.backward(loss.backward())
        optimizer.step()

        their_optimizer.zero_grad()
        value = their_loss(theirs(torch.from_numpy(x)).reshape(-1, 12), torch.from_numpy(labels).reshape(-1))
        value.backward()
        if pair == "clip by value":
            torch.nn.utils.clip_grad_value_(their_parameters, 0.03)
        if pair == "clip by norm":  # without the 1e-6 that clip_grad_norm_ adds
            norm = torch.sqrt(sum((p.grad**2).sum() for p in their_parameters))
            for p in their_parameters:
                p.grad *= min(1.0, 0.3 / norm)
        their_optimizer.step()
        their_values.append(value.item())
    assert values[-1] < 0.7 * values[0]
    np.testing.assert_allclose(values, their_values, rtol=TOLERANCE[dtype])


def test_batch_norm_models_are_those_of_pytorch(torch: Any) -> None:
    """Running statistics included: both are evaluated after 200 steps."""
    rng = np.random.default_rng(5)
    ours = nn.Sequential(
        nn.Linear(6, 8, dtype=np.float64, rng=rng),
        nn.BatchNorm(8, activation="relu", dtype=np.float64),
        nn.Linear(8, 3, dtype=np.float64, rng=rng),
    )
    theirs = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ).double()
    for place, layer in ((0, ours[0]), (3, ours[2])):
        theirs[place].load_state_dict({"weight": torch.from_numpy(layer.w), "bias": torch.from_numpy(layer.b)})
    optimizer, their_optimizer = nn.Adam(ours, 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)
    loss = nn.Huber()
    x, target = random(40, 6), random(40, 3, seed=1)
    values, their_values = [], []
    for step in range(200):
        part = np.s_[8 * (step % 5) : 8 * (step % 5) + 8]
        values.append(loss.forward(ours.forward(x[part]), target[part]))
        ours.backward(loss.backward(), need_dx=False)
        optimizer.step()
        their_optimizer.zero_grad()
        value = torch.nn.HuberLoss()(theirs(torch.from_numpy(x[part])), torch.from_numpy(target[part]))
        value.backward()
        their_optimizer.step()
        their_values.append(value.item())
    assert values[-1] < 0.7 * values[0]
    np.testing.assert_allclose(values, their_values, rtol=1e-9)
    evaluated = theirs.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(ours.eval().forward(x), evaluated, rtol=1e-8, atol=1e-9)


# ---- bits and memory -------------------------------------------------------------------------------------------------


def train(
    seed: int, threads: int | None, steps: int, dtype: npt.DTypeLike = np.float32
) -> tuple[nn.Module, list[float]]:
    rng = np.random.default_rng(seed)
    model = nn.Sequential(
        nn.Embedding(50, 48, dtype=dtype, rng=rng),
        nn.LSTM(48, 64, layers=2, bidirectional=True, dropout=0.2, dtype=dtype, rng=rng),
        nn.LayerNorm(128, activation="gelu", dtype=dtype),
        nn.Dropout(0.1, rng=rng),
        nn.Linear(128, 50, dtype=dtype, rng=rng),
    ).set_num_threads(threads)
    loss = nn.SoftmaxCrossEntropy(num_threads=threads)
    optimizer = nn.AdamW(model, nn.Cosine(3e-3, 100, warm_up=5), maximum_norm=1.0, num_threads=threads)
    x = rng.integers(0, 50, (12, 32))
    losses = []
    for _ in range(steps):
        losses.append(loss.forward(model.forward(x), x[::-1].copy()))
        model.backward(loss.backward())
        optimizer.step()
    return model, losses


def test_the_same_seed_gives_the_same_bits_at_any_number_of_threads() -> None:
    model, losses = train(0, 1, 8)
    for threads in (2, 3):
        other, other_losses = train(0, threads, 8)
        assert losses == other_losses
        for name, array in model.state_dict().items():
            assert array.tobytes() == other.state_dict()[name].tobytes(), name
    assert train(1, 1, 1)[1] != losses[:1]


@pytest.mark.long
def test_training_does_not_grow() -> None:
    """After every shape has been seen, steps leave nothing behind, and allocate nothing of the size of the data."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Embedding(20, 32, rng=rng),
        nn.LSTM(32, 32, layers=2, dropout=0.1, rng=rng),
        nn.LayerNorm(32),
        nn.Dropout(0.1, rng=rng),
        nn.Linear(32, 20, rng=rng),
        nn.BatchNorm(20, channel_axis=-1),
        nn.Activation("gelu"),
    )
    loss, optimizer = nn.SoftmaxCrossEntropy(), nn.Adam(model)
    batches = [rng.integers(0, 20, (steps, 512)) for steps in (30, 17, 24)]
    smallest = 17 * 512 * 20 * 4  # bytes of the smallest activation, many times what the interpreter's free lists hold
    addresses = set()

    def epoch() -> None:
        for x in batches:
            y = model.forward(x)
            addresses.add(y.ctypes.data)
            loss.forward(y, x)
            model.backward(loss.backward())
            optimizer.step()

    for _ in range(3):
        epoch()
    addresses.clear()
    tracemalloc.start()
    try:
        epoch()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(100):
            epoch()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(addresses) == 1
    assert after - before < 300 * 40  # less than the smallest object in each of 300 steps
    assert peak - before < smallest


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def small(seed: int = 0) -> tuple[nn.Sequential, nn.Optimizer]:
    rng = np.random.default_rng(seed)
    model = nn.Sequential(
        lstm=nn.LSTM(4, 5, layers=2, dropout=0.4, rng=rng),
        drop=nn.Dropout(0.3, rng=rng),
        norm=nn.BatchNorm(5, channel_axis=-1),
        head=nn.Linear(5, 2, rng=rng),
    )
    return model, nn.Adam(model, nn.Cosine(1e-2, 50), amsgrad=True)


def steps_of(model: nn.Module, optimizer: nn.Optimizer, count: int) -> list[float]:
    x, target = random(6, 3, 4, dtype=np.float32), random(6, 3, 2, seed=1, dtype=np.float32)
    loss, losses = nn.MeanSquaredError(), []
    for _ in range(count):
        losses.append(loss.forward(model.forward(x), target))
        model.backward(loss.backward())
        optimizer.step()
    return losses


def bits(model: nn.Module, optimizer: nn.Optimizer) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in {**model.state_dict(), **optimizer.state_dict()}.items()}


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = small()
    steps_of(model, optimizer, 5)
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer, metadata={"epoch": 5, "note": "ünïcode", "nested": [1, {"a": None}]})
    nn.save(tmp_path / "same", model, optimizer, metadata=nn.read_metadata(path))
    assert (tmp_path / "same").read_bytes() == path.read_bytes()
    (tmp_path / "same").unlink()
    losses = steps_of(model, optimizer, 5)
    again, other = small(seed=1)
    assert nn.load(path, again, other) == {"epoch": 5, "note": "ünïcode", "nested": [1, {"a": None}]}
    assert other.steps == 5
    assert steps_of(again, other, 5) == losses
    assert bits(again, other) == bits(model, optimizer)
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(str(path), model)
    again, other = small(seed=1)
    with pytest.raises(ValueError, match="has no optimizer's state, not that of Adam"):
        nn.load(path, again, other)
    assert nn.load(str(path), again) == {}
    assert again.state_dict()["head.w"].tobytes() == model.state_dict()["head.w"].tobytes()
    nn.save(path, model, optimizer)
    assert nn.load(path, again) == {}  # for use, not for more training
    with pytest.raises(ValueError, match="has the state of Adam, not that of SGD"):
        nn.load(path, again, nn.SGD(again, 0.1))


def test_a_checkpoint_with_arrays_of_ones_own(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    h, position = np.arange(12.0, dtype=np.float32).reshape(3, 4).T, np.array(7)
    nn.save(path, model, optimizer, arrays={"h": h, "position": position}, metadata={"hidden": 3})
    assert nn.read_metadata(path) == {"hidden": 3}
    place = {"h": np.zeros((4, 3), np.float32), "position": np.array(0)}
    assert nn.load(path, model, arrays=place) == {"hidden": 3}
    np.testing.assert_array_equal(place["h"], h)
    assert place["position"] == 7
    assert nn.load(path, model, optimizer) == {"hidden": 3}  # the model and the optimizer are enough
    before = bits(*small(seed=1))
    for wrong, message in (
        ({"h": place["h"]}, "arrays: the state has unexpected position"),
        ({**place, "h": np.zeros((4, 4), np.float32)}, r"h has shape \(4, 3\), but here it has shape \(4, 4\)"),
    ):
        other, moments = small(seed=1)
        with pytest.raises(ValueError, match=message):
            nn.load(path, other, moments, arrays=wrong)
        assert bits(other, moments) == before


def test_others_can_read_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model, optimizer = small()
    nn.save(tmp_path / "a", model, optimizer)
    arrays = load_file(tmp_path / "a")
    assert {name for name in arrays if name.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}
    assert np.array_equal(arrays["model.lstm.layer0.wx"], model.parameters()["lstm.layer0.wx"])
    assert arrays["optimizer.steps"] == 0


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model, optimizer = small()
    nn.save(path, model, optimizer)
    rng = np.random.default_rng(1)
    wider = nn.Sequential(lstm=nn.LSTM(4, 6, rng=rng))
    others = (
        (nn.Sequential(head=nn.Linear(5, 2, rng=rng)), "has unexpected .*lstm.layer0.wx"),
        (wider, "has unexpected "),
    )
    for other, message in others:
        before = other.state_dict()
        with pytest.raises(ValueError, match=message):
            nn.load(path, other)
        assert all(np.array_equal(array, before[name]) for name, array in other.state_dict().items())
    with pytest.raises(ValueError, match=r"lstm.layer0.wx has shape \(20, 4\), but here it has shape \(24, 4\)"):
        nn.load(path, wider, strict=False)
    head = others[0][0]
    nn.load(path, head, strict=False)
    assert np.array_equal(head.state_dict()["head.w"], model.state_dict()["head.w"])

    # The model fits, the optimizer does not: neither changes.
    same, _ = small(seed=1)
    part = nn.Adam(same.head, 1e-2, amsgrad=True)
    before = same.state_dict()
    with pytest.raises(ValueError, match=r"Adam: the state does not have first_moments\.w"):
        nn.load(path, same, part)
    assert all(np.array_equal(array, before[name]) for name, array in same.state_dict().items())


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    before = bits(model, optimizer)
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(content[:8], "little")
    damaged = [content[:length] for length in (0, 4, 8, header - 1, header, len(content) - 1)] + [content + b"x"]
    for place in (0, 9, *rng.integers(8, len(content), 60)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(changed))
    damaged.append(b"PK\x03\x04" + bytes(200))
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"model.safetensors|Sequential|Adam"):
            nn.load(path, model, optimizer)
        assert bits(model, optimizer) == before
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            nn.read_metadata(path)

    arrays = {f"model.{name}": array for name, array in model.state_dict().items()}
    save_file(arrays, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is a safetensors file, but retrograd\.nn\.save did not write it"):
        nn.load(path, model)
    save_file(arrays, path, metadata={"retrograd.nn": "00000000 {}"})
    with pytest.raises(ValueError, match=r"is damaged: its checksum is [0-9a-f]{8}, must be 00000000"):
        nn.load(path, model)
    from retrograd.nn.checkpoint import _checksum

    for text in ("[", "[" * 100_000, "7", "{}", '{"version": 1}', '{"version": 1, "optimizer": null, "metadata": 3}'):
        save_file(arrays, path, metadata={"retrograd.nn": f"{_checksum(text, arrays)} {text}"})
        with pytest.raises(ValueError, match=r"has version None|has a header that"):
            nn.load(path, model)
    with monkeypatch.context() as patch:
        patch.setattr("retrograd.nn.checkpoint._VERSION", 2)
        nn.save(path, model)
    with pytest.raises(ValueError, match="has version 2, this release reads version 1"):
        nn.load(path, model)
    with pytest.raises(FileNotFoundError):
        nn.load(tmp_path / "absent", model)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for there, what in ((tmp_path, "a folder"), (os.devnull, "a device"), ("pipe", "a pipe"), ("socket", "a socket")):
        for read in (lambda path: nn.load(path, model), nn.read_metadata):
            with pytest.raises(ValueError, match=f"load: .* is {what}, not a file"):
                read(tmp_path / there)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    steps_of(model, optimizer, 1)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fail(*args: Any) -> None:
                raise OSError("the disk is full")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="the disk is full"):
                nn.save(path, model, optimizer)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError, match="not JSON serializable"):
        nn.save(path, model, metadata={"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        nn.save(path, model, metadata={"x": float("nan")})
    assert path.read_bytes() == content

    with pytest.raises(OSError, match="it is a device, not a file"):
        nn.save(os.devnull, model)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    link = tmp_path / "latest"
    link.symlink_to(path)
    nn.save(link, model, optimizer)
    assert link.is_symlink()
    assert path.read_bytes() != content
    other = tmp_path / "plain"
    other.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)  # as the umask says


def test_a_save_that_was_killed_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    process = multiprocessing.get_context("spawn").Process(target=_killed_while_saving, args=(path,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert path.read_bytes() == content
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "model.safetensors.retrograd.part"}
    nn.save(path, model, optimizer)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def _killed_while_saving(path: Path) -> None:
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    nn.save(path, nn.Linear(300, 300))


def test_saves_at_once_are_each_whole(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [bytes([i]) * (1 << 20) for i in range(8)]
    threads = [threading.Thread(target=lambda c=c: [write_whole(path, c) for _ in range(5)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_where_a_save_writes_is_not_followed(tmp_path: Path) -> None:
    path, own = tmp_path / "file", tmp_path / "own"
    own.write_text("mine")
    for make in (lambda part: part.symlink_to(own), os.mkfifo, Path.mkdir):
        part = tmp_path / "file.retrograd.part"
        make(part)
        with pytest.raises(OSError, match=r"file\.retrograd\.part"):
            write_whole(path, b"new")
        assert own.read_text() == "mine"
        assert not path.exists()
        part.rmdir() if part.is_dir() else part.unlink(missing_ok=True)
