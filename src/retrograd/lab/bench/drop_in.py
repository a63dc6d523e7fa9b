"""The rows of ``retrograd bench torch``: PyTorch models, plain and after `retrograd.torch.replace`.

A row named torch_* is a whole training step of a model: forward, loss, backward and a fused AdamW. Rows named bridge_*
are forward and backward of one small layer in a chain, compared with the array functions: ``added`` is what the bridge
costs, including PyTorch's modules and autograd. What these cost alone is ``autograd``. Those named module_* are single
layers (:mod:`.modules`), and adamw_* steps of an optimizer (:mod:`.optimizers`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import retrograd

from .modules import MODULE_CASES, Layer, ModuleCase, layer_failures, layer_slots, make_layer
from .optimizers import OPTIMIZER_CASES, OptimizerCase, Update, make_update, update_failures, update_slots
from .timing import Contest, Machine, Stepper, WholeSteps, import_torch, library_threads

__all__ = [
    "DROP_IN_CASES",
    "DropIn",
    "DropInCase",
    "drop_in_contest",
    "drop_in_failures",
    "make_drop_in",
    "train_drop_in",
]

_CHECKED_STEPS: Final = 4
_TOLERANCE: Final = 1e-4  # relative, of a loss: after a few updates, with another order of summation
_LAYERS: Final = 16  # of a chain


class DropIn(NamedTuple):
    """A model of PyTorch's layers, and its loss for a fixed batch."""

    model: Any
    loss: Callable[[Any], Any]


class DropInCase(NamedTuple):
    name: str
    make: Callable[..., Any]  # takes the module torch; returns a DropIn, or a _Chain
    fuse: bool = False  # activations, with the normalizations before them


# ---- models ----------------------------------------------------------------------------------------------------------


def tagger(torch: Any, words: int = 5000, samples: int = 32, longest: int = 40, hidden: int = 64) -> DropIn:
    """A tag for every word of sentences of different lengths: embedding, bidirectional LSTM, linear head."""
    rnn = torch.nn.utils.rnn
    tags = 17
    model = torch.nn.ModuleList(
        (
            torch.nn.Embedding(words, hidden),
            torch.nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True),
            torch.nn.Linear(2 * hidden, tags),
        )
    )
    lengths = torch.randint(longest // 8, longest + 1, (samples,))
    x = torch.randint(words, (samples, int(lengths.max())))
    target = torch.randint(tags, (int(lengths.sum()),))

    def loss(model: Any) -> Any:
        embedding, lstm, head = model
        packed = rnn.pack_padded_sequence(embedding(x), lengths, batch_first=True, enforce_sorted=False)
        return torch.nn.functional.cross_entropy(head(lstm(packed)[0].data), target)

    return DropIn(model, loss)


def characters(torch: Any, samples: int = 16, steps: int = 64, hidden: int = 128) -> DropIn:
    """The next character of a text: embedding, LSTM of two layers, layer norm, linear head."""
    kinds = 96
    model = torch.nn.ModuleList(
        (
            torch.nn.Embedding(kinds, hidden),
            torch.nn.LSTM(hidden, hidden, 2),
            torch.nn.LayerNorm(hidden),
            torch.nn.Linear(hidden, kinds),
        )
    )
    text = torch.randint(kinds, (steps + 1, samples))

    def loss(model: Any) -> Any:
        embedding, lstm, norm, head = model
        logits = head(norm(lstm(embedding(text[:-1]))[0]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten())

    return DropIn(model, loss)


def small_cnn(torch: Any, samples: int = 64, size: int = 28, channels: int = 8) -> DropIn:
    """Images of digits: three convolutions, each with batch norm and ReLU, average pooling, linear head."""
    nn = torch.nn
    widths = (1, channels, 2 * channels, 4 * channels)
    layers = []
    for index, (before, after) in enumerate(pairwise(widths)):
        convolution = nn.Conv2d(before, after, 3, stride=1 + (index > 0), padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    x, target = torch.randn(samples, 1, size, size), torch.randint(10, (samples,))
    return DropIn(model, lambda model: torch.nn.functional.cross_entropy(model(x), target))


def layer_norms(torch: Any, tokens: int = 4096, features: int = 512, blocks: int = 4) -> DropIn:
    """The layer norms of transformer blocks, without attention and linear layers, and a linear head."""
    nn = torch.nn
    model = nn.Sequential(*(nn.LayerNorm(features) for _ in range(2 * blocks)), nn.Linear(features, 10))
    x, target = torch.randn(tokens, features), torch.randint(10, (tokens,))
    return DropIn(model, lambda model: torch.nn.functional.cross_entropy(model(x), target))


def train_drop_in(torch: Any, case: DropIn, model: Any) -> Callable[[], Any]:
    """A function that takes one training step and returns the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> Any:
        loss = case.loss(model)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _replaced(case: DropIn, fuse: bool) -> Any:
    model = copy.deepcopy(case.model)
    importlib.import_module("retrograd.torch").replace(model, fuse=fuse, verbose=False)
    return model


# ---- the bridge ------------------------------------------------------------------------------------------------------


class _Chain(NamedTuple):
    """A small layer: how PyTorch or the bridge makes one, and forward and backward by the array functions."""

    shape: tuple[int, ...]
    make: Callable[[Any], Any]  # takes torch.nn or retrograd.torch
    arrays: Callable[[int], object]  # takes the number of threads


def _chain_of_layer_norms(torch: Any) -> _Chain:
    x, gamma, beta = np.ones((8, 16), np.float32), np.ones(16, np.float32), np.zeros(16, np.float32)

    def arrays(threads: int) -> object:
        y, cache = retrograd.layer_norm_forward(x, gamma, beta, num_threads=threads)
        return retrograd.layer_norm_backward(y, cache, num_threads=threads)

    return _Chain((8, 16), lambda nn: nn.LayerNorm(16), arrays)


def _chain_of_batch_norms(torch: Any) -> _Chain:
    x, gamma, beta = np.ones((8, 16), np.float32), np.ones(16, np.float32), np.zeros(16, np.float32)
    mean, var = np.zeros(16, np.float32), np.ones(16, np.float32)

    def arrays(threads: int) -> object:
        y, cache = retrograd.batch_norm_forward(x, gamma, beta, running_mean=mean, running_var=var, num_threads=threads)
        return retrograd.batch_norm_backward(y, cache, num_threads=threads)

    return _Chain((8, 16), lambda nn: nn.BatchNorm1d(16), arrays)


def _chain_of_lstms(torch: Any) -> _Chain:
    x = np.ones((8, 2, 16), np.float32)
    wx = wh = np.full((64, 16), 0.1, np.float32)
    weights = [retrograd.LstmWeights(wx, wh, np.zeros(64, np.float32))]

    def arrays(threads: int) -> object:
        y, _, _, cache = retrograd.lstm_forward(x, weights, num_threads=threads)
        assert cache is not None
        return retrograd.lstm_backward(y, cache, num_threads=threads)

    return _Chain((8, 2, 16), lambda nn: nn.LSTM(16, 16), arrays)


DROP_IN_CASES: Final = (
    DropInCase("torch_tagger", tagger),
    DropInCase("torch_characters", characters),
    DropInCase("torch_small_cnn", small_cnn, fuse=True),
    DropInCase("torch_layer_norms", layer_norms),
    DropInCase("bridge_layer_norm_n8c16", _chain_of_layer_norms),
    DropInCase("bridge_batch_norm_n8c16", _chain_of_batch_norms),
    DropInCase("bridge_lstm_t8n2i16h16", _chain_of_lstms),
    *MODULE_CASES,
    *OPTIMIZER_CASES,
)
AnyCase: TypeAlias = DropInCase | ModuleCase | OptimizerCase


def make_drop_in(case: AnyCase) -> Any:
    torch = import_torch()
    assert torch is not None
    torch.manual_seed(0)
    if isinstance(case, ModuleCase):
        return make_layer(torch, case)
    return make_update(torch, case) if isinstance(case, OptimizerCase) else case.make(torch)


# ---- timing ----------------------------------------------------------------------------------------------------------


def _chain_step(torch: Any, chain: _Chain, make: Callable[[], Any]) -> Callable[[], object]:
    """Forward and backward through a chain of layers, so that what autograd costs per pass is shared by many."""
    layers = [make() for _ in range(_LAYERS)]
    x = torch.ones(chain.shape, requires_grad=True)
    parameters = [x, *(parameter for layer in layers for parameter in layer.parameters())]

    def run() -> None:
        y = x
        for layer in layers:
            y = layer(y)
            if type(y) is tuple:
                y = y[0]
        y.backward(x)
        for parameter in parameters:
            parameter.grad = None

    return run


def _empty_layers(torch: Any) -> Callable[[Any], Any]:
    """A function from a layer to one with the same parameters that computes nothing: modules and autograd alone."""

    class Nothing(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, *parameters: Any) -> Any:
            ctx.save_for_backward(x, *parameters)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, layer: Any) -> None:
            super().__init__()
            for name, parameter in layer.named_parameters():
                self.register_parameter(name, parameter)

        def forward(self, x: Any) -> Any:
            return Nothing.apply(x, *self._parameters.values())

    return Layer


def drop_in_failures(case: AnyCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield a message if the first losses of a model, or the results of a layer, differ from plain PyTorch's."""
    made = make_drop_in(case)
    if isinstance(made, Layer):
        yield from layer_failures(made)
    elif isinstance(made, Update):
        yield from update_failures(made)
    if not isinstance(case, DropInCase) or isinstance(made, _Chain):
        return
    losses = []
    for model in (copy.deepcopy(made.model), _replaced(made, case.fuse)):
        step = train_drop_in(import_torch(), made, model)
        losses.append([float(step()) for _ in range(_CHECKED_STEPS)])
    for number, (expected, found) in enumerate(zip(*losses, strict=True)):
        if not abs(found - expected) <= _TOLERANCE * abs(expected):
            yield f"the loss of step {number} is {found:.7g}, but {expected:.7g} with plain PyTorch"
            return


def drop_in_contest(case: AnyCase, made: Any, threads: int, machine: Machine, stack: contextlib.ExitStack) -> Contest:
    torch = machine.torch
    assert torch is not None
    torch.set_num_threads(threads)
    stack.enter_context(library_threads(threads))
    slots: list[list[Stepper]]
    if isinstance(case, ModuleCase):
        slots = layer_slots(torch, made, threads)
    elif isinstance(case, OptimizerCase):
        slots = update_slots(torch, made, threads)
    elif isinstance(made, _Chain):
        bridge, empty = importlib.import_module("retrograd.torch"), _empty_layers(torch)
        chains = {
            "retrograd": _chain_step(torch, made, lambda: made.make(bridge)),
            "arrays": lambda: [made.arrays(threads) for _ in range(_LAYERS)],
            "torch": _chain_step(torch, made, lambda: made.make(torch.nn)),
            "autograd": _chain_step(torch, made, lambda: empty(made.make(torch.nn))),
        }
        slots = [[WholeSteps(name, run, threads, _LAYERS)] for name, run in chains.items()]
    else:
        replaced, plain = _replaced(made, case.fuse), copy.deepcopy(made.model)
        slots = [
            [WholeSteps("retrograd", train_drop_in(torch, made, replaced), threads)],
            [WholeSteps("torch", train_drop_in(torch, made, plain), threads)],
        ]
    return Contest(slots, None, [], ("step",))
