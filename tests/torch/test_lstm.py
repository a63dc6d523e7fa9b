"""The LSTM against PyTorch's, and its options against the array functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from support.torch_layers import assert_close, compare, exact, rt, same_bits, torch

rnn = torch.nn.utils.rnn
PackedSequence = rnn.PackedSequence


def pair(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    """retrograd's LSTM, and PyTorch's in float64, with the same parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(*arguments, **options)
    ours = rt.LSTM(*arguments, **options)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, exact(theirs)


SHAPES = list(itertools.product((1, 2), (False, True), (False, True), (True, False)))


@pytest.mark.parametrize(("layers", "bidirectional", "batch_first", "bias"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients(layers: int, bidirectional: bool, batch_first: bool, bias: bool, dtype: str) -> None:
    ours, theirs = pair(5, 7, layers, bias, batch_first, bidirectional=bidirectional)
    kind = getattr(torch, dtype)
    ours = ours.to(kind)
    x = torch.randn(4, 3, 5, dtype=kind)
    states = torch.randn(2, layers * (1 + bidirectional), 4 if batch_first else 3, 7, dtype=kind)
    compare(ours, theirs, [x])
    compare(ours, theirs, [x, *states], lambda lstm, x, h, c: lstm(x, (h, c)))
    single = states[:, :, 0]
    compare(ours, theirs, [x[:, 0], *single], lambda lstm, x, h, c: lstm(x, (h, c)))  # without a batch
    compare(ours, theirs, [x.transpose(0, 1)])  # not contiguous


@pytest.mark.parametrize(("layers", "bidirectional", "batch_first", "bias"), SHAPES)
@pytest.mark.parametrize("sorted_", [False, True])
def test_packed_sequences(layers: int, bidirectional: bool, batch_first: bool, bias: bool, sorted_: bool) -> None:
    ours, theirs = pair(5, 7, layers, bias, batch_first, bidirectional=bidirectional)
    parts = [torch.randn(length, 5) for length in ((6, 3, 2) if sorted_ else (3, 6, 2))]
    states = torch.randn(2, layers * (1 + bidirectional), 3, 7)

    def call(lstm: Any, h: Any, c: Any, *parts: Any) -> Any:
        packed = rnn.pack_sequence(parts, enforce_sorted=sorted_)
        result, final = lstm(packed, (h, c))
        for a, b in zip(result[1:], packed[1:], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        return result, final

    compare(ours, theirs, [*states, *parts], call)
    compare(ours, theirs, parts, lambda lstm, *parts: lstm(rnn.pack_sequence(parts, enforce_sorted=sorted_)))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_lengths_are_those_of_a_packed_sequence(batch_first: bool, kind: Any) -> None:
    ours, theirs = pair(5, 7, 2, batch_first=batch_first, bidirectional=True)
    x, lengths = torch.randn(3, 6, 5) if batch_first else torch.randn(6, 3, 5), [3, 6, 2]

    def call(lstm: Any, x: Any) -> Any:
        if lstm is ours:
            return lstm(x, lengths=kind(lengths))
        packed = rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
        result, final = lstm(packed)
        return rnn.pad_packed_sequence(result, batch_first)[0], final

    compare(ours, theirs, [x], call)


def arrays_of(lstm: Any) -> list[rg.LstmWeights]:
    """The weights of every cell, as the array functions take them."""
    cells = []
    for names in lstm._all_weights:
        wx, wh, *rest = (getattr(lstm, name).detach().numpy() for name in names)
        b = rest[0] + rest[1] if lstm.bias else None
        cells.append(rg.LstmWeights(wx, wh, b, rest[-1] if lstm.peephole else None))
    return cells


ACTIVATIONS = rg.LstmActivations("hard_sigmoid", "sigmoid", rg.Activation("elu", alpha=0.7), "sigmoid", "softsign")


@pytest.mark.parametrize(
    "options",
    [
        {"peephole": "diagonal"},
        {"peephole": "full", "output_gate_reads": "old", "bidirectional": True},
        {"activations": ACTIVATIONS},
        {"activations": ("relu", "sigmoid", "tanh", "sigmoid", "tanh"), "peephole": "full", "bias": False},
        {"recompute": True, "num_layers": 2},
    ],
)
def test_options_are_those_of_the_array_functions(options: dict[str, Any]) -> None:
    lstm = rt.LSTM(4, 6, **options)
    x = torch.randn(5, 3, 4, requires_grad=True)
    y, (hn, cn) = lstm(x)
    functions = {
        key: value for key, value in options.items() if key in ("activations", "output_gate_reads", "recompute")
    }
    if "activations" in functions:
        functions["activations"] = rg.LstmActivations(*functions["activations"])
    result = rg.lstm_forward(
        x.detach().numpy(), arrays_of(lstm), bidirectional=options.get("bidirectional", False), **functions
    )
    for found, expected in zip((y, hn, cn), result[:3], strict=True):
        assert np.array_equal(found.detach().numpy(), expected)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *lstm.parameters()], dy)
    expected = rg.lstm_backward(dy.numpy(), result.cache)
    assert np.array_equal(gradients[0].numpy(), expected.dx)
    by_name = dict(zip((name for name, _ in lstm.named_parameters()), gradients[1:], strict=True))
    for names, cell in zip(lstm._all_weights, expected.dweights, strict=True):
        parts = [cell.wx, cell.wh, *([cell.b, cell.b] if lstm.bias else []), cell.peephole][: len(names)]
        for name, part in zip(names, parts, strict=True):
            assert np.array_equal(by_name[name].numpy(), part), name


def test_peepholes_are_parameters() -> None:
    torch.manual_seed(0)
    lstm = rt.LSTM(4, 6, 2, bidirectional=True, peephole="full")
    names = [name for name in lstm.state_dict() if name.startswith("peephole")]
    assert names == ["peephole_l0", "peephole_l0_reverse", "peephole_l1", "peephole_l1_reverse"]
    assert lstm.peephole_l1_reverse.shape == (24, 6)
    assert 0 < lstm.peephole_l0.abs().max() <= 6**-0.5
    assert rt.LSTM(4, 6, peephole="diagonal", dtype=torch.float64).peephole_l0.dtype is torch.float64
    again = rt.LSTM(4, 6, 2, bidirectional=True, peephole="full")
    again.load_state_dict(lstm.state_dict())
    x = torch.randn(5, 3, 4)
    assert same_bits(again(x)[0], lstm(x)[0])
    with torch.no_grad():
        again.peephole_l1.add_(1.0)
    assert not same_bits(again(x)[0], lstm(x)[0])


def test_both_biases_have_gradients_of_their_own() -> None:
    lstm = rt.LSTM(4, 6)
    lstm(torch.randn(5, 3, 4))[0].sum().backward()
    assert same_bits(lstm.bias_ih_l0.grad, lstm.bias_hh_l0.grad)
    lstm.bias_ih_l0.grad.mul_(0.5)
    assert not same_bits(lstm.bias_ih_l0.grad, lstm.bias_hh_l0.grad)


def test_dropout_is_drawn_from_the_generator_of_torch() -> None:
    lstm, x = rt.LSTM(4, 6, 3, dropout=0.5), torch.randn(5, 3, 4)

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return lstm(x)[0]

    assert same_bits(run(1), run(1))
    assert not same_bits(run(1), run(2))
    with torch.no_grad():
        assert same_bits(run(1), run(1).detach())
    lstm.eval()
    assert same_bits(run(1), run(2))
    plain = rt.LSTM(4, 6, 3)
    plain.load_state_dict(lstm.state_dict())
    assert same_bits(run(1), plain(x)[0])


def test_dropout_scales_and_its_gradient_uses_the_same_mask() -> None:
    torch.manual_seed(0)
    lstm = rt.LSTM(2, 3, 2, dropout=0.4).double()
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Any) -> Any:
        torch.manual_seed(7)
        return lstm(x)[0]

    assert torch.autograd.gradcheck(run, x)


def test_no_steps_and_no_samples() -> None:
    ours, _ = pair(5, 7, 2, bidirectional=True)
    for shape in ((0, 3, 5), (4, 0, 5)):
        x = torch.randn(shape, requires_grad=True)
        y, (hn, cn) = ours(x)
        assert (y.shape, hn.shape, cn.shape) == ((*shape[:2], 14), (4, shape[1], 7), (4, shape[1], 7))
        gradients = torch.autograd.grad(y.sum() + hn.sum(), [x, *ours.parameters()])
        assert [g.shape for g in gradients] == [x.shape, *(p.shape for p in ours.parameters())]
        assert not any(g.any() for g in gradients)


X = torch.randn(5, 3, 4)
H = torch.zeros(1, 3, 6)
REFUSALS = {
    "GRU: proj_size is 2, but only an LSTM has a projection": lambda: rt.GRU(4, 6, proj_size=2),
    "LSTM: dropout is 1, must be below 1": lambda: rt.LSTM(4, 6, 2, dropout=1),
    "LSTM: peephole is 'round', must be 'diagonal', 'full' or None": lambda: rt.LSTM(4, 6, peephole="round"),
    "LSTM: output_gate_reads is 'none', must be": lambda: rt.LSTM(4, 6, output_gate_reads="none"),
    "LSTM: activations has 2 functions, must have 5": lambda: rt.LSTM(4, 6, activations=("tanh", "tanh")),
    "activation 'tan' is unknown": lambda: rt.LSTM(4, 6, activations=("tan",) * 5),
    "LSTM: input has shape (5, 3, 4), but input_size is 3": lambda: rt.LSTM(3, 6)(X),
    "LSTM: input has shape (4,), needs 3 axes": lambda: rt.LSTM(4, 6)(X[0, 0]),
    "LSTM: input has dtype torch.float64 and the weights have torch.float32": lambda: rt.LSTM(4, 6)(X.double()),
    "LSTM: input has dtype torch.bfloat16 and the weights have torch.float32": lambda: rt.LSTM(4, 6)(X.bfloat16()),
    "LSTM: hx[0] has shape (1, 2, 6), expected (1, 3, 6)": lambda: rt.LSTM(4, 6)(X, (H[:, :2], H)),
    "LSTM: hx[1] has shape None, expected (1, 3, 6)": lambda: rt.LSTM(4, 6)(X, (H, None)),
    "LSTM: hx[1] has dtype torch.float64, but the weights have torch.float32": lambda: rt.LSTM(4, 6)(
        X, (H, H.double())
    ),
    "LSTM: lengths is given, but a PackedSequence has its own": lambda: rt.LSTM(4, 6)(
        rnn.pack_sequence([X[:, 0]]), lengths=[5]
    ),
    "lstm_forward: lengths has 6, must be from 0 to 5, the steps of x": lambda: rt.LSTM(4, 6)(X, lengths=[1, 6, 2]),
    "lstm_forward: lengths has shape (2,), must be (3,)": lambda: rt.LSTM(4, 6)(X, lengths=[1, 2]),
}


def packed(
    sizes: Any, rows: int, sorted_: list[int] | None = None, unsorted: list[int] | None = None, dtype: Any = torch.int64
) -> Callable[[], Any]:
    """A call with a PackedSequence that PyTorch's functions would not make."""

    def call() -> Any:
        orders = [None if order is None else torch.tensor(order) for order in (sorted_, unsorted)]
        return rt.LSTM(4, 6)(PackedSequence(torch.randn(rows, 4), torch.tensor(sizes, dtype=dtype), *orders))

    return call


REFUSALS |= {
    "LSTM: input.batch_sizes has -1 in [3, -1, 7], expected sizes of at least 1 that do": packed([3, -1, 7], 9),
    "LSTM: input.batch_sizes has 0 in [3, 0, 3, 3], expected sizes of at least 1": packed([3, 0, 3, 3], 9),
    "LSTM: input.batch_sizes has 3 in [2, 3], expected": packed([2, 3], 5),
    "LSTM: input.batch_sizes has 0 in [0], expected": packed([0], 0),
    "LSTM: input.batch_sizes has 9 in [1, 1, 1, 1, 1, 1, 1, 1, ...], expected": packed([1] * 9 + [9], 18),
    "LSTM: input.batch_sizes is empty, expected sizes": packed([], 0),
    "LSTM: input.batch_sizes has the sum 5, expected 4, the rows of data": packed([3, 2], 4),
    "LSTM: input.batch_sizes has the sum 5, expected 6, the rows of data": packed([3, 2], 6),
    "LSTM: input.batch_sizes has the sum 9223372036854775808, expected 3": packed([2**62, 2**62], 3),
    "LSTM: input.batch_sizes has dtype torch.int32, expected torch.int64": packed([3, 2], 5, dtype=torch.int32),
    "LSTM: input.batch_sizes has shape (1, 2), expected 1 axes": packed([[3, 2]], 5),
    "LSTM: input.sorted_indices has [0, 1, 1], expected a permutation of 3": packed([3, 2], 5, [0, 1, 1], [0, 1, 2]),
    "LSTM: input.unsorted_indices has [0, 1, 7], expected a permutation": packed([3, 2], 5, [0, 1, 2], [0, 1, 7]),
    "LSTM: input.unsorted_indices has [0, 1], expected a permutation of 3": packed([3, 2], 5, [0, 1, 2], [0, 1]),
    "LSTM: input.sorted_indices has shape (1, 3), expected 1 axes": packed([3, 2], 5, [[0, 1, 2]], [0, 1, 2]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        REFUSALS[message]()


def test_packed_sequences_without_their_storage() -> None:
    whole = rnn.pack_sequence([X[:4, 0], X[:2, 1], X[:, 2]], enforce_sorted=False)
    for field in whole._fields:
        tensor = getattr(whole, field).clone()
        size = tensor.nbytes
        tensor.untyped_storage().resize_(8)
        with pytest.raises(
            ValueError, match=f"LSTM: input.{field} has a storage of 8 bytes, expected at least {size} "
        ):
            rt.LSTM(4, 6)(whole._replace(**{field: tensor}))
    for index in (0, 1):
        states = [torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)]
        states[index].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=rf"LSTM: hx\[{index}\] has a storage of 0 bytes, expected at least 72"):
            rt.LSTM(4, 6)(whole, tuple(states))


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_a_packed_sequence_in_a_compiled_function() -> None:
    lstm, parts = rt.LSTM(4, 6), [X[:4, 0], X[:2, 1], X[:, 2]]
    whole = rnn.pack_sequence(parts, enforce_sorted=False)

    @torch.compile(backend="aot_eager")  # type: ignore[untyped-decorator]
    def run(data: Any, sizes: Any) -> Any:
        return lstm(PackedSequence(data, sizes, whole.sorted_indices, whole.unsorted_indices))[0].data

    assert same_bits(run(whole.data, whole.batch_sizes), lstm(whole)[0].data)
    with pytest.raises(ValueError, match=r"LSTM: input.batch_sizes has -1 in \[3, -1, 7\]"):
        run(X.reshape(-1, 4)[:9], torch.tensor([3, -1, 7]))


def test_attributes() -> None:
    ours, theirs = (
        rt.LSTM(4, 6, 2, batch_first=True, dropout=0.25),
        torch.nn.LSTM(4, 6, 2, batch_first=True, dropout=0.25),
    )
    assert repr(ours) == repr(theirs)
    for name in theirs.__constants__:
        assert getattr(ours, name) == getattr(theirs, name)
    assert [[w.shape for w in cell] for cell in ours.all_weights] == [
        [w.shape for w in cell] for cell in theirs.all_weights
    ]
    assert "peephole='full', recompute=True" in repr(rt.LSTM(4, 6, peephole="full", recompute=True))


def test_parametrized_weights() -> None:
    """Weights that are computed before every call, by `torch.nn.utils.parametrizations`."""
    ours, theirs = pair(4, 6)
    ours, theirs = ours.double(), theirs
    for lstm in (ours, theirs):
        torch.manual_seed(3)
        torch.nn.utils.parametrizations.weight_norm(lstm, "weight_hh_l0")
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    compare(ours, theirs, [x])
    with torch.no_grad():
        for lstm in (ours, theirs):
            lstm.parametrizations.weight_hh_l0.original0.mul_(2.0)
    compare(ours, theirs, [x])


def test_truncated_backpropagation_through_carried_states() -> None:
    ours, theirs = pair(4, 6)
    x = torch.randn(10, 3, 4)

    def call(lstm: Any, x: Any) -> Any:
        first, state = lstm(x[:5])
        second, state = lstm(x[5:], state)
        return first, second, state

    compare(ours, theirs, [x], call)
    whole, (hn, _) = ours(x)
    first, second, (last, _) = call(ours, x)
    assert same_bits(torch.cat((first, second)), whole)
    assert same_bits(last, hn)
    assert_close(whole, theirs(x.double())[0])


def test_only_what_backward_needs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients there is no cache, except with dropout, whose mask is part of one."""
    functions = rt._recurrent.FUNCTIONS
    caches: list[Any] = []

    def forward(*arguments: Any, **options: Any) -> Any:
        result = rg.lstm_forward(*arguments, **options)
        caches.append(result.cache)
        return result

    monkeypatch.setitem(functions, "lstm", functions["lstm"]._replace(forward=forward))
    torch.manual_seed(0)
    layer, x = rt.LSTM(5, 6, 2), torch.randn(4, 3, 5)
    with torch.no_grad():
        y, _ = layer(x)
        rt.LSTM(5, 6, 2, dropout=0.5)(x)
    assert caches[0] is None
    assert caches[1] is not None
    assert same_bits(layer(x)[0].detach(), y)
    assert caches[2] is not None
    assert len(caches) == 3
