"""The rows of ``retrograd bench train``: training steps of a character model, compared with the same in PyTorch.

The model is an embedding, an LSTM, a layer norm and a linear head with softmax cross entropy, trained by Adam with
truncated backpropagation: each step starts from the final states of the previous one.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import nn
from ...ops._types import Array
from .memory import Peak, run_apart
from .timing import Contest, Machine, Stepper

__all__ = [
    "TRAIN_CASES",
    "OurTraining",
    "TorchTraining",
    "TrainCase",
    "TrainData",
    "make_train_data",
    "peak_bytes",
    "train_contest",
    "train_failures",
]

_RATE: Final = 1e-3
_WINDOWS: Final = 32  # chunks of text, used cyclically
_CHECKED_STEPS: Final = 4
_TOLERANCE: Final = 1e-4  # relative, of a loss: after a few updates, with another order of summation

clock = time.perf_counter


class TrainCase(NamedTuple):
    hidden: int
    samples: int
    steps: int = 64
    characters: int = 96

    @property
    def name(self) -> str:
        return f"train_h{self.hidden}n{self.samples}"

    @property
    def tokens(self) -> int:
        """Characters per training step."""
        return self.steps * self.samples


TRAIN_CASES: Final = tuple(TrainCase(hidden, samples) for hidden in (64, 128, 256, 512) for samples in (1, 16, 64))


class TrainData(NamedTuple):
    text: Array  # [windows * steps + 1, samples]
    weights: dict[str, Array]  # by the names of our model's parameters

    def window(self, number: int, case: TrainCase) -> tuple[Array, Array]:
        """Return characters, and the character after each."""
        first = number % _WINDOWS * case.steps
        return self.text[first : first + case.steps], self.text[first + 1 : first + 1 + case.steps]


def make_train_data(case: TrainCase) -> TrainData:
    rng = np.random.default_rng(0)
    text = rng.integers(0, case.characters, (_WINDOWS * case.steps + 1, case.samples))
    return TrainData(text, _Characters(case, np.float32, rng).state_dict())


class _Characters(nn.Module):
    def __init__(self, case: TrainCase, dtype: npt.DTypeLike, rng: np.random.Generator) -> None:
        hidden = case.hidden
        embedding = nn.Embedding(case.characters, hidden, dtype=dtype, rng=rng)
        self.lstm = nn.LSTM(hidden, hidden, embedding=embedding, dtype=dtype, rng=rng)
        self.norm = nn.LayerNorm(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, case.characters, dtype=dtype, rng=rng)
        self.loss = nn.SoftmaxCrossEntropy()

    def forward(self, x: Any, labels: Any, state: Any) -> tuple[Any, nn.LstmState]:
        y, state = self.lstm.run(x, state)
        return self.loss(self.head(self.norm(y)), labels), state


class OurTraining:
    name = "retrograd"

    def __init__(self, case: TrainCase, data: TrainData, threads: int, dtype: npt.DTypeLike = np.float32) -> None:
        self._case, self._data, self._number = case, data, 0
        model = _Characters(case, dtype, np.random.default_rng(0))
        model.load_state_dict({name: array.astype(dtype) for name, array in data.weights.items()})
        self._step = nn.compile(model, None, nn.Adam(model, _RATE), num_threads=threads)
        zeros = np.zeros((1, case.samples, case.hidden), dtype)
        self._state = nn.LstmState(zeros, zeros)

    def train(self) -> float:
        """Take one training step and return the loss before it."""
        x, labels = self._data.window(self._number, self._case)
        self._number += 1
        loss: float
        loss, self._state = self._step(x, labels, self._state)
        return loss

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float]:
        start = clock()
        self.train()
        return (clock() - start,)


# PyTorch's names of the parameters. Its second bias is 0 and is not trained.
_TORCH_NAMES: Final = {
    "lstm.embedding.table": "0.weight",
    "lstm.layer0.wx": "1.weight_ih_l0",
    "lstm.layer0.wh": "1.weight_hh_l0",
    "lstm.layer0.b": "1.bias_ih_l0",
    "norm.gamma": "2.weight",
    "norm.beta": "2.bias",
    "head.w": "3.weight",
    "head.b": "3.bias",
}


class TorchTraining:
    """PyTorch as users write it: eager, autograd, default or fused Adam."""

    name = "torch"

    def __init__(self, torch: Any, case: TrainCase, data: TrainData, fused: bool) -> None:
        self._case, self._number = case, 0
        hidden, layers = case.hidden, torch.nn
        self._model = layers.ModuleList(
            (
                layers.Embedding(case.characters, hidden),
                layers.LSTM(hidden, hidden),
                layers.LayerNorm(hidden),
                layers.Linear(hidden, case.characters),
            )
        )
        weights = {_TORCH_NAMES[name]: torch.from_numpy(array) for name, array in data.weights.items()}
        self._model.load_state_dict({**weights, "1.bias_hh_l0": torch.zeros(4 * hidden)})
        self._model[1].bias_hh_l0.requires_grad_(False)
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trainable, lr=_RATE, fused=fused)
        self._cross_entropy = layers.functional.cross_entropy
        self._data = data._replace(text=torch.from_numpy(data.text))
        self._state: Any = None

    def train(self) -> Any:
        """Take one training step and return the loss before it."""
        x, labels = self._data.window(self._number, self._case)
        self._number += 1
        embedding, lstm, norm, head = self._model
        y, (h, c) = lstm(embedding(x), self._state)
        self._state = h.detach(), c.detach()
        logits = head(norm(y))
        loss = self._cross_entropy(logits.view(-1, self._case.characters), labels.reshape(-1))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float]:
        start = clock()
        self.train()
        return (clock() - start,)


def train_failures(case: TrainCase, torch: Any | None, threads: Sequence[int]) -> Iterator[str]:
    """Yield a message if the first losses depend on the thread count, or differ from float64 or from PyTorch."""
    data = make_train_data(case)
    ours = {number: _losses(OurTraining(case, data, number)) for number in threads}
    peers = {"float64": _losses(OurTraining(case, data, max(threads), np.float64))}
    if torch is not None:
        torch.set_num_threads(max(threads))
        for fused in (False, True):
            peers["torch, fused" if fused else "torch"] = _losses(TorchTraining(torch, case, data, fused))
    first, *others = ours.values()
    if any(losses != first for losses in others):
        yield "the losses depend on the number of threads"
    for name, losses in peers.items():
        for step, (loss, expected) in enumerate(zip(first, losses, strict=True)):
            if not abs(loss - expected) <= _TOLERANCE * abs(expected):
                yield f"the loss of step {step} is {loss:.7g}, but {expected:.7g} with {name}"
                break


def _losses(training: OurTraining | TorchTraining) -> list[float]:
    return [float(training.train()) for _ in range(_CHECKED_STEPS)]


# ---- memory ----------------------------------------------------------------------------------------------------------

_MEMORY_STEPS: Final = 3


def peak_bytes(case: TrainCase, provider: str, threads: int) -> int | None:
    """Return the peak memory of training above the loaded library, in bytes. Linux only, otherwise None."""
    program = f"from retrograd.lab.bench import train as b; b.print_growth(b.{case!r}, {provider!r}, {threads})"
    found = run_apart(program)
    return None if found is None else found[0]


def print_growth(case: TrainCase, provider: str, threads: int) -> None:
    """Print the memory growth in bytes, in a separate process. A small model is trained first, to load the library."""
    data = make_train_data(case)
    small = TrainCase(8, 1, 4)
    for problem, given in ((small, make_train_data(small)), (case, data)):
        peak = Peak()
        training: OurTraining | TorchTraining
        if provider == "retrograd":
            training = OurTraining(problem, given, threads)
        else:
            torch = importlib.import_module("torch")
            torch.set_num_threads(threads)
            training = TorchTraining(torch, problem, given, fused=True)
        for _ in range(_MEMORY_STEPS):
            training.train()
    print(peak.bytes())


def train_contest(
    case: TrainCase, data: TrainData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    slots: list[list[Stepper]] = [[OurTraining(case, data, threads)]]
    if machine.torch is not None:
        machine.torch.set_num_threads(threads)
        slots.append([TorchTraining(machine.torch, case, data, fused) for fused in (False, True)])
    peaks = {(slot[0].name, "step"): peak_bytes(case, slot[0].name, threads) for slot in slots}
    return Contest(slots, None, [], ("step",), tokens=case.tokens, peaks=peaks)
