"""Wrong sizes, lengths, shapes and kinds: each error names the argument and what was expected, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn

RNG = np.random.default_rng(0)


def data(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def compiled(model: nn.Module, loss: Any = None, **options: Any) -> nn.Step:
    return nn.compile(model, loss or nn.MeanSquaredError(), nn.Adam(model), **options)


class WithoutReturn(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(4, 3)

    def forward(self, x: nn.Tensor) -> None:
        self.linear(x)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(4, 3)

    def forward(self, x: nn.Tensor) -> Any:
        y = self.linear(x)
        return y, y


class Empty:
    """Not a model."""


def fit(x: Any, target: Any, **options: Any) -> Any:
    return nn.fit(compiled(nn.Linear(4, 3)), (x, target), progress=False, **options)


CELLS = [nn.LSTM, nn.GRU, nn.RNN]

# What a layer is made with.
MADE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: nn.LayerNorm(4, eps="a"), TypeError, "LayerNorm: eps is 'a', must be a number"),  # type: ignore[arg-type]
    (lambda: nn.Softmax(1.5), TypeError, "Softmax: axis is 1.5, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Linear(3, 4, rng=-1), TypeError, "rng is -1, must be a numpy.random.Generator, a seed from 0 or None"),
    (lambda: nn.SGD(nn.Linear(3, 4), "a"), TypeError, "SGD: learning_rate is 'a', must be a number"),  # type: ignore[arg-type]
    (lambda: nn.Linear(4.0, 3), TypeError, "Linear: inputs is 4.0, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Linear("4", 3), TypeError, "Linear: inputs is '4', must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Linear(4, -3), ValueError, "Linear: outputs is -3, must be at least 0"),
    (lambda: nn.Linear(4, 3, dtype=int), TypeError, "Linear: dtype is int64, must be float32 or float64"),
    (lambda: nn.Embedding(10.0, 4), TypeError, "Embedding: rows is 10.0, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Embedding(10, -1), ValueError, "Embedding: features is -1, must be at least 0"),
    (lambda: nn.Embedding(10, 4, dtype="f2"), TypeError, "Embedding: dtype is float16, must be float32 or"),
    (lambda: nn.Dropout("half"), TypeError, "Dropout: rate is 'half', must be a number"),  # type: ignore[arg-type]
    (lambda: nn.Activation(3), TypeError, "Activation: function is 3, must be a name or"),  # type: ignore[arg-type]
    (lambda: nn.MultiHeadAttention(8.0, 2), TypeError, "features is 8.0, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.BatchNorm(4.5), TypeError, "BatchNorm: channels is 4.5, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.InstanceNorm(-4), ValueError, "InstanceNorm: channels is -4, must be at least 0"),
    (lambda: nn.BatchNorm(4, update=0.1), TypeError, "BatchNorm: update is 0.1, must be a RunningUpdate"),  # type: ignore[arg-type]
    (lambda: nn.LayerNorm(4.0), TypeError, "LayerNorm: shape is 4.0, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.LayerNorm(()), ValueError, "LayerNorm: shape is (), must have at least one size"),
    (lambda: nn.GroupNorm(2.0, 4), TypeError, "GroupNorm: groups is 2.0, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Conv(3, 4, 1.5), TypeError, "Conv: kernel is 1.5, must be an integer"),  # type: ignore[arg-type]
    (lambda: nn.Conv(-1, 4, 3), ValueError, "Conv: in_channels is -1, must be at least 0"),
    (lambda: nn.MaxPool(0), ValueError, "MaxPool: kernel is 0, must be at least 1"),
    (lambda: nn.AveragePool((2, 0)), ValueError, "AveragePool: kernel is 0, must be at least 1"),
    (lambda: nn.Parameter(None), TypeError, "Parameter: value is None, must be an array"),  # type: ignore[arg-type]
    *(
        (lambda cell=cell: cell(4, 3.0), TypeError, f"{cell.__name__}: hidden is 3.0, must be an integer")
        for cell in CELLS
    ),
    *(
        (lambda cell=cell: cell(4, 3, layers=1.5), TypeError, f"{cell.__name__}: layers is 1.5, must be an integer")
        for cell in CELLS
    ),
    *(
        (
            lambda cell=cell: cell(4, 3, embedding=nn.Linear(5, 4)),
            TypeError,
            f"{cell.__name__}: embedding is a Linear, must be an nn.Embedding",
        )
        for cell in CELLS
    ),
]

# What it is called with.
CALLED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: nn.Linear(4, 3)(None), TypeError, "linear: x is None, must be a tensor or an array"),
    (lambda: nn.Linear(4, 3)(np.ones((2, 4), bool)), TypeError, "linear: x has dtype bool, must be float32 or float64"),
    (lambda: nn.Linear(2, 3)([[1, 2], [1]]), ValueError, "an argument has rows of several lengths; pad them"),
    (lambda: nn.LayerNorm(4)(None), TypeError, "LayerNorm: x is None"),
    (lambda: nn.BatchNorm(4)(None), TypeError, "BatchNorm: x is None"),
    (lambda: nn.MaxPool(2)(None), TypeError, "MaxPool: x is None"),
    (lambda: nn.Conv(3, 4, 3)(None), TypeError, "Conv: x is None"),
    (lambda: nn.Flatten()(None), TypeError, "Flatten: x is None"),
    (
        lambda: nn.BatchNorm(4, affine=False)(data(2, 5, 3)),
        ValueError,
        "BatchNorm: x has shape (2, 5, 3), with 5 channels on axis 1, must have 4",
    ),
    (lambda: nn.InstanceNorm(4)(data(2, 5, 3)), ValueError, "InstanceNorm: x has shape (2, 5, 3), with 5 channels on"),
    (lambda: nn.GroupNorm(2, 4, affine=False)(data(2, 6, 3)), ValueError, "(2, 6, 3), with 6 channels on axis 1, must"),
    (
        lambda: nn.Conv(3, 4, 3, channels_last=True)(data(2, 3, 8, 8)),
        ValueError,
        "Conv: x has shape (2, 3, 8, 8), with 8 channels on axis -1, must have 3",
    ),
    (
        lambda: nn.Conv(3, 4, 3)(data(3, 8, 8)),
        ValueError,
        "Conv: x has shape (3, 8, 8), must have 4 axes, [N, C, H, W], as the kernel needs",
    ),
    (
        lambda: nn.Conv(3, 4, (3,), channels_last=True)(data(1, 8, 8, 3)),
        ValueError,
        "Conv: x has shape (1, 8, 8, 3), must have 3 axes, [N, W, C], as the kernel needs",
    ),
    (
        lambda: nn.MultiHeadAttention(8, 2)(data(3, 8)),
        ValueError,
        "MultiHeadAttention: x has shape (3, 8), must have the shape (N, T, 8)",
    ),
    (
        lambda: nn.MultiHeadAttention(8, 2)(data(2, 3, 8), data(2, 3, 7)),
        ValueError,
        "MultiHeadAttention: context has shape (2, 3, 7), must have the shape (N, T, 8)",
    ),
    (
        lambda: nn.MultiHeadAttention(8, 2)(data(2, 3, 8), data(4, 3, 8)),
        ValueError,
        "MultiHeadAttention: context has 4 samples, but x has 2",
    ),
    (
        lambda: nn.MultiHeadAttention(8, 2)(data(2, 3, 8), mask=np.ones((4, 4), bool)),
        ValueError,
        "MultiHeadAttention: mask has shape (4, 4), which does not broadcast to (2, 2, 3, 3)",
    ),
    (
        lambda: nn.MultiHeadAttention(8, 2)(data(2, 3, 8), mask=np.ones((3, 3))),
        TypeError,
        "MultiHeadAttention: mask has dtype float32, must be bool",
    ),
    (
        lambda: nn.LSTM(4, 3)(data(5, 2, 4), data(1, 2, 3)),
        TypeError,
        "LSTM: state is of shape (1, 2, 3), must be a pair (h, c)",
    ),
    (
        lambda: nn.GRU(4, 3)(data(5, 2, 4), (data(1, 2, 3), data(1, 2, 3))),
        TypeError,
        "GRU: state is a tuple, must be one array, h",
    ),
    (lambda: nn.Sequential(WithoutReturn())(data(2, 4)), TypeError, "the forward of WithoutReturn returned None"),
    (lambda: nn.Residual(WithoutReturn())(data(2, 4)), TypeError, "the forward of WithoutReturn returned None"),
]

# What compile, fit and the functions of graph are called with.
TRAINED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: nn.compile(abs, None, None), TypeError, "compile: model is a builtin_function_or_method, must be an nn.M"),  # type: ignore[arg-type]
    (lambda: nn.compile(nn.Linear, None, None), TypeError, "compile: model is the class Linear; write Linear()"),  # type: ignore[arg-type]
    (lambda: nn.compile([nn.ReLU()], None, None), TypeError, "compile: model is a list; write Sequential(*layers)"),  # type: ignore[arg-type]
    (lambda: nn.compile(Empty(), None, None), TypeError, "compile: model is a Empty, must be an nn.Module"),  # type: ignore[arg-type]
    (lambda: compiled(nn.Linear(4, 3), accumulate="2"), TypeError, "compile: accumulate is '2', must be an integer"),
    (lambda: compiled(nn.Linear(4, 3), keep=1.5), TypeError, "compile: keep is 1.5, must be an integer"),
    (
        lambda: compiled(WithoutReturn())(data(2, 4), data(2, 3)),
        TypeError,
        "step: the forward of WithoutReturn returned None; end it with a return",
    ),
    (
        lambda: nn.compile(model := WithoutReturn(), None, nn.Adam(model))(data(2, 4)),
        TypeError,
        "step: the forward of WithoutReturn returned None",
    ),
    (
        lambda: compiled(TwoResults())(data(2, 4), data(2, 3)),
        TypeError,
        "step: the forward of TwoResults returned a tuple of 2, but MeanSquaredError takes one tensor",
    ),
    (
        lambda: compiled(nn.Linear(4, 3), lambda y, target: None)(data(2, 4), data(2, 3)),
        TypeError,
        "step: the loss is None; end it with a return",
    ),
    (
        lambda: compiled(nn.Linear(4, 3))(data(2, 4), None),
        TypeError,
        "MeanSquaredError: target is None, must be a tensor or an array",
    ),
    (lambda: fit(data(6, 4), None), TypeError, "fit: data[1] is None, must be an array"),
    (lambda: fit([[1], [1, 2]], data(2, 3)), ValueError, "fit: data[0] has rows of several lengths; pad them"),
    (lambda: fit(data(6, 4), data(5, 3)), ValueError, "fit: data has shapes (6, 4), (5, 3); all need the same number"),
    (lambda: fit(data(6, 4), data(6, 3), epochs="3"), TypeError, "fit: epochs is '3', must be an integer"),
    (lambda: fit(data(6, 4), data(6, 3), batch=2.5), TypeError, "fit: batch is 2.5, must be an integer"),
    (
        lambda: fit(data(6, 4), data(6, 3), validation=(data(6, 4), data(6, 3)), patience=-1),
        ValueError,
        "fit: patience is -1, must be at least 0",
    ),
    (
        lambda: fit(data(6, 4), data(6, 3), validation=(data(6, 4),)),
        ValueError,
        "fit: validation has 1 arrays, but data has 2",
    ),
    (lambda: graph.compile(None), TypeError, "compile: function is a NoneType, must be a function of tensors"),  # type: ignore[arg-type]
    (lambda: graph.compile(graph.exp, None), TypeError, "compile: example 0 is None, must be an array or a spec"),  # type: ignore[arg-type]
    (lambda: graph.exp(None), TypeError, "exp: operand 0 is None, must be a tensor or an array"),  # type: ignore[arg-type]
    (lambda: graph.matmul(None, data(2, 3)), TypeError, "an operand is None, must be a tensor or an array"),  # type: ignore[arg-type]
    (lambda: graph.take(data(5), np.array([7])), IndexError, "indices: an index is 7, must be from 0 to below 5"),
    (
        lambda: graph.lstm(data(5, 2, 4), data(12, 4)),
        TypeError,
        "lstm: weights is one array of shape (12, 4), must be a tuple such as LstmWeights(wx, wh, b)",
    ),
    (
        lambda: nn.Linear(4, 3).load_state_dict("model.safetensors"),  # type: ignore[arg-type]
        TypeError,
        "Linear.load_state_dict: state is a str, must be arrays by name; nn.load(path, model) reads a file",
    ),
]


@pytest.mark.parametrize(("line", "kind", "message"), [*MADE, *CALLED, *TRAINED])
def test_wrong_arguments(line: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        line()


def test_sizes_and_numbers_may_be_numpys() -> None:
    kernel: Any = np.array([3, 2])
    assert nn.Conv(2, 4, kernel)(data(1, 2, 5, 5)).shape == (1, 4, 3, 4)
    assert nn.MaxPool(kernel)(data(1, 2, 6, 6)).shape == (1, 2, 2, 3)
    assert nn.LayerNorm(kernel).shape == (3, 2)
    assert nn.LayerNorm(range(2, 4)).shape == (2, 3)
    assert nn.LayerNorm(np.int64(4)).shape == (4,)
    rate: Any = np.float32(0.5)
    assert nn.Dropout(rate).rate == 0.5


def test_a_model_of_pytorch_is_not_one_to_compile() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=re.escape("compile: model is PyTorch's Linear; write nn.from_torch(model)")):
        nn.compile(torch.nn.Linear(4, 3), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("cell", CELLS)
def test_wrong_lengths(cell: Any) -> None:
    """At once, in a program and in a step."""
    model, x, target = cell(4, 3, last=True), data(5, 2, 4), data(2, 3)
    step, before = compiled(model), model.state_dict()
    for call in (model, model.predict, lambda *given, **options: step(*given, target, **options)):
        for lengths, found in (([6, 2], "6"), ([5, -1], "-1")):
            with pytest.raises(IndexError, match=rf"lengths.* {found}, must be from 0 to 5, the steps of x"):
                call(x, lengths=lengths)
        with pytest.raises(ValueError, match=r"lengths has shape \(3,\), expected \(2,\): x has 2 samples"):
            call(x, lengths=[1, 2, 3])
        with pytest.raises(TypeError, match="lengths has dtype float32, must be integers"):
            call(x, lengths=[1.5, 2.0])
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("cell", CELLS)
def test_wrong_indices_of_an_embedding(cell: Any) -> None:
    model = cell(4, 3, embedding=nn.Embedding(5, 4))
    with pytest.raises(TypeError, match="x has dtype float32, must be integers, the indices of the embedding"):
        model(data(5, 2))
    with pytest.raises(IndexError, match="x: an index is 7, must be from 0 to below 5"):
        model(np.full((5, 2), 7))


def test_validation_data_are_checked_before_the_first_epoch() -> None:
    model = nn.Linear(4, 3)
    step, before = compiled(model), model.state_dict()
    message = "fit: validation: linear: x has shape (6, 5), expected (..., 4) to match w of shape (3, 4)"
    with pytest.raises(ValueError, match=re.escape(message)):
        nn.fit(step, (data(6, 4), data(6, 3)), validation=(data(6, 5), data(6, 3)), progress=False)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_sizes_of_numpy_are_sizes() -> None:
    four = np.int64(4)
    for layer in (nn.LayerNorm(four), nn.LayerNorm((four,)), nn.BatchNorm(four), nn.Linear(four, four)):
        assert layer(data(2, 4)).shape == (2, 4)


def test_a_batch_axis_from_the_end() -> None:
    model = nn.LSTM(4, 3)
    history = nn.fit(compiled(model), (data(5, 6, 4), data(5, 6, 3)), batch_axis=-2, batch=4, epochs=1, progress=False)
    assert len(history) == 1
