"""GRU, RNN, projected LSTMs and the cells against PyTorch's; resets, masks and zoneout against loops over steps."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from support.torch_layers import assert_close, compare, exact, gradients_of, outgoing_of, rt, same_bits, torch

rnn = torch.nn.utils.rnn
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM, projection": ("LSTM", {"proj_size": 4}),
    "GRU": ("GRU", {}),
    "RNN": ("RNN", {}),
    "RNN, ReLU": ("RNN", {"nonlinearity": "relu"}),
}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTMCell": ("LSTMCell", {}),
    "GRUCell": ("GRUCell", {}),
    "RNNCell": ("RNNCell", {}),
    "RNNCell, ReLU": ("RNNCell", {"nonlinearity": "relu"}),
}


def pair(kind: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """retrograd's layer, and PyTorch's in float64, with the same parameters."""
    torch.manual_seed(0)
    name, own = {**KINDS, **CELLS, "LSTM": ("LSTM", {})}[kind]
    theirs = getattr(torch.nn, name)(*arguments, **own, **options)
    ours = getattr(rt, name)(*arguments, **own, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, exact(theirs)


def joined(states: tuple[Any, ...]) -> Any:
    """hx of an LSTM, or of the others."""
    return states if len(states) == 2 else states[0]


def call(layer: Any, x: Any, *states: Any) -> Any:
    return layer(x, joined(states))


def states_of(kind: str, cells: int, samples: int, dtype: Any) -> list[Any]:
    sizes = [4, 7] if kind == "LSTM, projection" else [7]
    return [torch.randn(cells, samples, size, dtype=dtype) for size in sizes]


SHAPES = list(itertools.product((1, 2), (False, True), (False, True), (True, False)))


@pytest.mark.parametrize(("layers", "bidirectional", "batch_first", "bias"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(
    kind: str, layers: int, bidirectional: bool, batch_first: bool, bias: bool, dtype: str
) -> None:
    options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    ours, theirs = pair(kind, 5, 7, layers, **options)
    number = getattr(torch, dtype)
    ours = ours.to(number)
    x = torch.randn(4, 3, 5, dtype=number)
    states = states_of(kind, layers * (1 + bidirectional), 4 if batch_first else 3, number)
    compare(ours, theirs, [x])
    compare(ours, theirs, [x, *states], call)
    compare(ours, theirs, [x[:, 0], *(state[:, 0] for state in states)], call)  # without a batch
    compare(ours, theirs, [x.transpose(0, 1)])  # not contiguous


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, bias: bool, dtype: str) -> None:
    ours, theirs = pair(kind, 5, 7, bias)
    number = getattr(torch, dtype)
    ours = ours.to(number)
    x, states = torch.randn(3, 5, dtype=number), torch.randn(2 if "LSTM" in kind else 1, 3, 7, dtype=number)
    compare(ours, theirs, [x])
    compare(ours, theirs, [x, *states], call)
    compare(ours, theirs, [x[0], *states[:, 0]], call)  # without a batch
    compare(ours, theirs, [x.t().contiguous().t(), *states], call)  # not contiguous

    def loop(layer: Any, x: Any) -> Any:
        """Three steps of the same cell."""
        hx = None
        for part in x.unbind():
            hx = layer(part, hx)
        return hx

    compare(ours, theirs, [torch.randn(3, 2, 5, dtype=number)], loop)


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_computes_the_bits_of_a_layer(kind: str) -> None:
    cell, _ = pair(kind, 5, 7)
    name, own = CELLS[kind]
    layer = getattr(rt, name.removesuffix("Cell"))(5, 7, **own)
    layer.load_state_dict({f"{key}_l0": value for key, value in cell.state_dict().items()})
    x, hx = torch.randn(4, 3, 5), None
    y, _ = layer(x)
    for step, part in enumerate(x.unbind()):
        hx = cell(part, hx)
        assert same_bits(hx[0] if "LSTM" in kind else hx, y[step])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "bidirectional", "batch_first", "bias"), SHAPES[::3])
@pytest.mark.parametrize("sorted_", [False, True])
def test_packed_sequences(
    kind: str, layers: int, bidirectional: bool, batch_first: bool, bias: bool, sorted_: bool
) -> None:
    ours, theirs = pair(kind, 5, 7, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    parts = [torch.randn(length, 5) for length in ((6, 3, 2) if sorted_ else (3, 6, 2))]
    states = states_of(kind, layers * (1 + bidirectional), 3, torch.float32)

    def packed(layer: Any, *given: Any) -> Any:
        hx = joined(given[:-3]) if len(given) > 3 else None
        return layer(rnn.pack_sequence(given[-3:], enforce_sorted=sorted_), hx)

    compare(ours, theirs, [*states, *parts], packed)
    compare(ours, theirs, parts, packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_lengths_are_those_of_a_packed_sequence(kind: str, batch_first: bool) -> None:
    ours, theirs = pair(kind, 5, 7, 2, batch_first=batch_first, bidirectional=True)
    x, lengths = torch.randn(3, 6, 5) if batch_first else torch.randn(6, 3, 5), [3, 6, 2]

    def ragged(layer: Any, x: Any) -> Any:
        if layer is ours:
            return layer(x, lengths=torch.tensor(lengths))
        result, final = layer(rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False))
        return rnn.pad_packed_sequence(result, batch_first)[0], final

    compare(ours, theirs, [x], ragged)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout(kind: str) -> None:
    """Drawn from PyTorch's generator; the gradient uses the mask of forward; none in evaluation."""
    ours, theirs = pair(kind, 2, 7, 2, dropout=0.4)
    ours = ours.double()
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Any, seed: int = 7) -> Any:
        torch.manual_seed(seed)
        return ours(x)[0]

    assert torch.autograd.gradcheck(run, x)
    assert same_bits(run(x), run(x))
    assert not same_bits(run(x), run(x, 8))
    compare(ours.eval(), theirs.eval(), [x.detach()])


def test_the_biases_of_a_gru_are_two_parameters() -> None:
    """They have different gradients; those of the others are added."""
    for name in ("LSTM", "GRU", "RNN"):
        layer = getattr(rt, name)(4, 6)
        layer(torch.randn(5, 3, 4))[0].sum().backward()
        assert same_bits(layer.bias_ih_l0.grad, layer.bias_hh_l0.grad) == (name != "GRU")
        assert layer.bias_ih_l0.grad.data_ptr() != layer.bias_hh_l0.grad.data_ptr()


# ---- inside the recurrence -------------------------------------------------------------------------------------------


def stepwise(layer: Any, x: Any, states: tuple[Any, ...], reset: Any) -> Any:
    """PyTorch's layer, one step at a time, its states multiplied by 0 before the steps where reset is true."""
    outputs, states = [], list(states)
    for part, cut in zip(x.unbind(), reset.unbind(), strict=True):
        kept = (~cut).to(x.dtype)[:, None]
        y, final = layer(part[None], joined(tuple(state * kept for state in states)))
        states = list(final) if isinstance(final, tuple) else [final]
        outputs.append(y)
    return torch.cat(outputs), joined(tuple(states))


RESET = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "LSTM"])
def test_reset_against_a_loop_over_steps(kind: str, batch_first: bool, dtype: str) -> None:
    ours, theirs = pair(kind, 5, 7, 2)
    ours.batch_first = batch_first
    states = states_of("LSTM, projection" if kind == "LSTM, projection" else kind, 2, 3, torch.float32)
    if kind == "LSTM":
        states = [torch.randn(2, 3, 7), torch.randn(2, 3, 7)]
    reset = RESET.to(getattr(torch, dtype))

    def run(layer: Any, x: Any, *states: Any) -> Any:
        if layer is theirs:
            return stepwise(layer, x, states, RESET)
        given = (x.transpose(0, 1), reset.t()) if batch_first else (x, reset)
        y, final = layer(given[0], joined(states), reset=given[1])
        return y.transpose(0, 1) if batch_first else y, final

    compare(ours, theirs, [torch.randn(5, 3, 5), *states], run)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_of_packed_and_unbatched_sequences(kind: str) -> None:
    """In the order of the samples before packing, as the states are."""
    ours, _ = pair(kind, 5, 7)
    ours = ours.double()
    lengths = [2, 5, 3]
    parts = [torch.randn(length, 5, dtype=torch.float64) for length in lengths]
    for batch_first in (False, True):
        ours.batch_first = batch_first
        given = RESET.t() if batch_first else RESET
        packed, _ = ours(rnn.pack_sequence(parts, enforce_sorted=False), reset=given)
        outputs, _ = rnn.pad_packed_sequence(packed)
        padded = rnn.pad_sequence(parts, batch_first=batch_first)
        y, _ = ours(padded, lengths=lengths, reset=given)
        assert_close(outputs, y.transpose(0, 1) if batch_first else y)
        for sample, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            alone, _ = ours(part, reset=RESET[:length, sample])
            assert_close(outputs[:length, sample], alone)
    x = parts[1]
    again, _ = ours(x, reset=torch.ones(5))
    for step in range(5):
        assert_close(again[step], ours(x[step : step + 1])[0][0])


@pytest.mark.parametrize("kind", CELLS)
def test_reset_of_a_cell(kind: str) -> None:
    ours, theirs = pair(kind, 5, 7)
    reset = torch.tensor([True, False, True])

    def run(layer: Any, x: Any, *states: Any) -> Any:
        if layer is ours:
            return layer(x, joined(states), reset=reset)
        return layer(x, joined(tuple(state * (~reset).to(x.dtype)[:, None] for state in states)))

    compare(ours, theirs, [torch.randn(3, 5), *torch.randn(2 if "LSTM" in kind else 1, 3, 7)], run)
    ours, x = ours.double(), torch.randn(5, dtype=torch.float64)
    h = torch.randn(7, dtype=torch.float64)
    found = ours(x, (h, h) if "LSTM" in kind else h, reset=torch.tensor(True))
    assert_close(found[0] if "LSTM" in kind else found, ours(x)[0] if "LSTM" in kind else ours(x))


@pytest.mark.parametrize("kind", [*KINDS, "LSTM"])
def test_a_compiled_and_an_exported_layer_with_reset_and_mask(kind: str) -> None:
    torch._dynamo.reset()
    ours, _ = pair(kind, 5, 7)
    width = 4 if kind == "LSTM, projection" else 7
    given = torch.randn(5, 3, 5, requires_grad=True), RESET, torch.rand(1, 3, width)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = ours

        def forward(self, x: Any, reset: Any, mask: Any) -> Any:
            return self.layer(x, reset=reset, mask=mask)[0]

    model = Model()
    y = model(*given)
    expected = [y, *gradients_of([y], [given[0], *ours.parameters()])]
    z = torch.compile(model, fullgraph=True, backend="aot_eager")(*given)
    found = [z, *gradients_of([z], [given[0], *ours.parameters()])]
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    exported = torch.export.export(model, given).module()
    assert same_bits(exported(*given), y)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [*KINDS, "LSTM"])
def test_a_mask_is_that_of_the_array_functions(kind: str) -> None:
    """The hidden state, multiplied in the recurrent products: also in one step at a time."""
    ours, _ = pair(kind, 5, 7)
    ours = ours.double()
    width = 4 if kind == "LSTM, projection" else 7
    x, mask = torch.randn(5, 3, 5, dtype=torch.float64), torch.rand(3, width, dtype=torch.float64)
    y, _ = ours(x, mask=mask)
    packed, _ = ours(rnn.pack_sequence([x[:4, 0], x[:, 1]], enforce_sorted=False), mask=mask[:2])
    outputs, _ = rnn.pad_packed_sequence(packed)
    assert_close(outputs[:4, 0], y[:4, 0])
    assert_close(outputs[:, 1], y[:, 1])
    assert_close(ours(x[:, 2], mask=mask[2])[0], y[:, 2])
    ours.batch_first = True
    assert_close(ours(x.transpose(0, 1), mask=mask[:, None])[0].transpose(0, 1), y)
    ours.batch_first = False
    if kind in ("RNN", "LSTM, projection", "LSTM"):  # with a constant mask, its product with the weights
        masked = copy.deepcopy(ours)
        with torch.no_grad():
            masked.weight_hh_l0.mul_(mask[0])
        assert_close(masked(x)[0], ours(x, mask=mask[0])[0])
    else:
        assert not torch.allclose(ours(x)[0], y)


def test_a_mask_that_is_modified_before_backward_is_detected() -> None:
    layer, mask = rt.GRU(4, 6), torch.rand(3, 6)
    y, _ = layer(torch.randn(5, 3, 4), mask=mask)
    mask.mul_(2.0)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()
    reset = torch.zeros(5, 3)  # which is copied
    y, _ = layer(torch.randn(5, 3, 4), reset=reset)
    expected = torch.autograd.grad(y.sum(), layer.weight_hh_l0, retain_graph=True)[0]
    reset.fill_(1.0)
    assert same_bits(torch.autograd.grad(y.sum(), layer.weight_hh_l0)[0], expected)


@pytest.mark.parametrize(("kind", "rate"), [("GRU", 0.3), ("RNN", 0.3), ("LSTM", 0.3), ("LSTM", (0.3, 0.2))])
def test_zoneout(kind: str, rate: Any) -> None:
    """In evaluation weighted averages of the states, in training drawn from PyTorch's generator."""
    torch.manual_seed(0)
    layer = getattr(rt, kind)(4, 6, zoneout=rate, dtype=torch.float64).eval()
    cell = getattr(torch.nn, f"{kind}Cell")(4, 6, dtype=torch.float64)
    cell.load_state_dict({key.removesuffix("_l0"): value for key, value in layer.state_dict().items()})
    rates = rate if isinstance(rate, tuple) else (rate, 0.0)
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    states = [torch.zeros(3, 6, dtype=torch.float64)] * (2 if kind == "LSTM" else 1)
    expected = []
    for part in x.unbind():
        new = cell(part, joined(tuple(states)))
        new = list(new) if kind == "LSTM" else [new]
        states = [r * a + (1 - r) * b for r, a, b in zip(rates, states, new, strict=False)]
        expected.append(states[0])
    y, _ = layer(x)
    assert_close(y, torch.stack(expected))
    outgoing = outgoing_of([y])
    assert_close(*(gradients_of([out], [x], outgoing)[0] for out in (y, torch.stack(expected))))
    with torch.no_grad():
        assert same_bits(layer(x)[0], y)
    layer.train()

    def run(x: Any, seed: int = 1) -> Any:
        torch.manual_seed(seed)
        return layer(x)[0]

    assert torch.autograd.gradcheck(run, x)
    assert not same_bits(run(x), run(x, 2))
    with torch.no_grad():
        assert same_bits(run(x.detach()), run(x).detach())
    kept = (run(x)[1:] == run(x)[:-1]).double().mean()
    assert 0.1 < float(kept) < 0.6  # some units keep their value


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GRU", {"kind": "before"}),
        ("GRU", {"flip": True, "clip": 0.5}),
        ("GRU", {"activations": ("hard_sigmoid", "sigmoid", "softsign"), "recompute": True}),
        ("RNN", {"nonlinearity": "sigmoid"}),
        ("RNN", {"nonlinearity": rg.Activation("elu", alpha=0.7), "clip": 0.8}),
        ("LSTM", {"coupled": True, "clip": 0.9}),
        ("LSTM", {"cell_clip": 0.4, "proj_size": 3, "peephole": "diagonal"}),
    ],
)
def test_options_are_those_of_the_array_functions(name: str, options: dict[str, Any]) -> None:
    layer = getattr(rt, name)(4, 6, **options)
    x = torch.randn(5, 3, 4, requires_grad=True)
    y, _ = layer(x)
    functions = {key: value for key, value in options.items() if key not in ("peephole", "proj_size", "nonlinearity")}
    if "activations" in functions:
        functions["activations"] = rg.GruActivations(*functions["activations"])
    if "nonlinearity" in options:
        functions["activation"] = options["nonlinearity"]
    arrays = {key: value.detach().numpy() for key, value in layer.state_dict().items()}
    wx, wh, b, bh = (arrays[f"{key}_l0"] for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    weights: Any = rg.GruWeights(wx, wh, b, bh) if name == "GRU" else rg.RnnWeights(wx, wh, b + bh)
    if name == "LSTM":
        weights = rg.LstmWeights(wx, wh, b + bh, arrays.get("peephole_l0"), arrays.get("weight_hr_l0"))
    forward, backward = getattr(rg, f"{name.lower()}_forward"), getattr(rg, f"{name.lower()}_backward")
    result = forward(x.detach().numpy(), weights, **functions)
    assert np.array_equal(y.detach().numpy(), result.y)
    dy = torch.randn_like(y)
    dx, dwh, db = torch.autograd.grad(y, [x, layer.weight_hh_l0, layer.bias_ih_l0], dy)
    expected = backward(dy.numpy(), result.cache)
    for found, part in ((dx, expected.dx), (dwh, expected.dweights.wh), (db, expected.dweights.b)):
        assert np.array_equal(found.numpy(), part)
    for option, value in options.items():
        assert option == "proj_size" or f"{option}=" in repr(layer) or value == "tanh"


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_parametrized_weights_and_attributes(kind: str) -> None:
    ours, theirs = pair(kind, 4, 6)
    assert repr(ours) == repr(theirs)
    for name in theirs.__constants__:
        assert getattr(ours, name) == getattr(theirs, name)
    ours = ours.double()
    weight = "weight_hh" if kind in CELLS else "weight_hh_l0"
    for layer in (ours, theirs):
        torch.nn.utils.parametrizations.weight_norm(layer, weight)
    x = torch.randn(3, 4, dtype=torch.float64) if kind in CELLS else torch.randn(5, 3, 4, dtype=torch.float64)
    compare(ours, theirs, [x])


@pytest.mark.parametrize("kind", KINDS)
def test_no_steps_and_no_samples(kind: str) -> None:
    ours, _ = pair(kind, 5, 7)
    width = 4 if kind == "LSTM, projection" else 7
    for shape in ((0, 3, 5), (4, 0, 5)):
        x = torch.randn(shape, requires_grad=True)
        y, _ = ours(x, reset=torch.zeros(shape[:2]))
        assert y.shape == (*shape[:2], width)
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), [x, *ours.parameters()]))


def test_norms_are_parameters() -> None:
    """Layer normalization, by the array functions; gammas begin at 1 and betas at 0, also after a reset."""
    layer = rt.LSTM(4, 6, 2, norm="haste")
    added = ["gamma_x_l0", "gamma_h_l0", "gamma_c_l0", "beta_c_l0"]
    assert [name for name in layer.state_dict() if name.endswith("l0")][4:] == added
    assert [tuple(getattr(layer, name).shape) for name in added] == [(24,), (24,), (6,), (6,)]
    for _ in range(2):
        assert [float(getattr(layer, name).detach().sum()) for name in added] == [24.0, 24.0, 6.0, 0.0]
        layer.reset_parameters()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(5, 3, 4)
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    cells = []
    for level in range(2):
        wx, wh, b, bh, *norms = (arrays[name] for name in layer._all_weights[level])
        cells.append(rg.LstmWeights(wx, wh, b + bh, None, None, *norms))
    expected = rg.lstm_forward(x.numpy(), cells, norm="haste").y
    assert np.array_equal(layer(x)[0].detach().numpy(), expected)


X, H = torch.randn(5, 3, 4), torch.zeros(1, 3, 6)
REFUSALS = {
    "RNN: proj_size is 2, but only an LSTM has a projection": lambda: rt.RNN(4, 6, proj_size=2),
    "GRU: dropout is 1, must be below 1": lambda: rt.GRU(4, 6, 2, dropout=1),
    "GRU: kind is 'between', must be 'after' or 'before'": lambda: rt.GRU(4, 6, kind="between"),
    "GRU: activations has 2 functions, must have 3, for r, z and n": lambda: rt.GRU(4, 6, activations=("tanh",) * 2),
    "GRU: clip is -1.0, must be above 0 and finite": lambda: rt.GRU(4, 6, clip=-1),
    "GRU: zoneout is 1.5, must be at least 0 and below 1": lambda: rt.GRU(4, 6, zoneout=1.5),
    "RNN: zoneout is (0.1, 0.2), must be a rate, or for an LSTM two": lambda: rt.RNN(4, 6, zoneout=(0.1, 0.2)),
    "activation 'tan' is unknown": lambda: rt.RNN(4, 6, nonlinearity="tan"),
    "LSTM: weights have full peepholes, and there is a projection": lambda: rt.LSTM(4, 6, peephole="full", proj_size=2),
    "GRU: norm is 'cell', must be 'haste' or None": lambda: rt.GRU(4, 6, norm="cell"),
    "LSTM: norm is given, and so is a projection; they cannot be combined": lambda: rt.LSTM(
        4, 6, norm="haste", proj_size=2
    ),
    "GRUCell: size is not an argument": lambda: rt.GRUCell(4, 6, size=3),
    "GRU: input has shape (5, 3, 4), but input_size is 3": lambda: rt.GRU(3, 6)(X),
    "GRU: input has shape (4,), needs 3 axes": lambda: rt.GRU(4, 6)(X[0, 0]),
    "RNN: input has dtype torch.float64 and the weights have torch.float32": lambda: rt.RNN(4, 6)(X.double()),
    "GRU: hx has shape (1, 2, 6), expected (1, 3, 6)": lambda: rt.GRU(4, 6)(X, H[:, :2]),
    "GRU: hx has dtype torch.float64, but the weights have torch.float32": lambda: rt.GRU(4, 6)(X, H.double()),
    "GRU: hx must be a tensor, not tuple": lambda: rt.GRU(4, 6)(X, (H, H)),
    "LSTM: hx must be the 2 tensors (h_0, c_0), not Tensor": lambda: rt.LSTM(4, 6)(X, torch.cat((H, H))),
    "LSTM: hx[0] has shape (1, 3, 6), expected (1, 3, 2)": lambda: rt.LSTM(4, 6, proj_size=2)(X, (H, H)),
    "LSTMCell: input has shape (5, 3, 4), needs 2 axes, or 1 without a batch": lambda: rt.LSTMCell(4, 6)(X),
    "LSTMCell: hx[1] has shape (2, 6), expected (3, 6)": lambda: rt.LSTMCell(4, 6)(X[0], (H[0], H[0, :2])),
    "GRUCell: input has shape (3, 4), but input_size is 5": lambda: rt.GRUCell(5, 6)(X[0]),
    "RNNCell: input has dtype torch.int64 and the weights have torch.float32": lambda: rt.RNNCell(4, 6)(X[0].long()),
    "gru_forward: reset has shape (3, 5), must be (T, N) = (5, 3)": lambda: rt.GRU(4, 6)(X, reset=RESET.t()),
    "rnn_forward: reset is given, but layers are bidirectional": lambda: rt.RNN(4, 6, bidirectional=True)(
        X, reset=RESET
    ),
    "rnn_forward: mask has shape (3, 5), which does not broadcast to": lambda: rt.RNN(4, 6)(X, mask=torch.ones(3, 5)),
    "rnn_forward: mask has dtype float64": lambda: rt.RNN(4, 6)(X, mask=torch.ones(6).double()),
    "GRU: mask requires a gradient, but masks have none; pass mask.detach()": lambda: rt.GRU(4, 6)(
        X, mask=torch.ones(6, requires_grad=True)
    ),
    "GRU: lengths is given, but a PackedSequence has its own": lambda: rt.GRU(4, 6)(
        rnn.pack_sequence([X[:, 0]]), lengths=[5]
    ),
    "GRU: input.batch_sizes has the sum 5, expected 4": lambda: rt.GRU(4, 6)(
        rnn.PackedSequence(torch.randn(4, 4), torch.tensor([3, 2]))
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        REFUSALS[message]()
