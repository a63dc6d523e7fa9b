"""Single steps on the direct road: the same bits as the usual one, and never with parameters that were replaced."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import retrograd.torch as rt  # noqa: E402
from retrograd import Activation  # noqa: E402

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTMCell", {}),
    "LSTM, no bias": ("LSTMCell", {"bias": False}),
    "LSTM, options": ("LSTMCell", {"clip": 0.5, "cell_clip": 0.3}),
    "LSTM, norm": ("LSTMCell", {"norm": "haste", "coupled": True}),
    "GRU": ("GRUCell", {}),
    "GRU, before": ("GRUCell", {"kind": "before", "flip": True}),
    "RNN": ("RNNCell", {"nonlinearity": "relu"}),
}
SAMPLES, INPUTS, UNITS = 3, 4, 5
# Every option of the cells, with a value that is not its default.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    name: {
        "clip": (0.1,),
        "zoneout": (0.25,),
        "norm": ("haste",),
        "norm_eps": (0.1,),
        "recompute": (True,),
        **own,
    }
    for name, own in {
        "LSTM": {
            "peephole": ("diagonal", "full"),
            "output_gate_reads": ("old",),
            "activations": (("relu", "sigmoid", "tanh", "relu", "identity"),),
            "coupled": (True,),
            "cell_clip": (0.1,),
            "norm": ("haste", "cell"),
            "zoneout": (0.25, (0.25, 0.5)),
        },
        "GRU": {"kind": ("before",), "flip": (True,), "activations": (("relu", "sigmoid", "identity"),)},
        "RNN": {"nonlinearity": ("relu", "sigmoid", Activation("elu", 0.5))},
    }.items()
}
# What an option needs beside it to have an effect.
BESIDE: dict[str, dict[str, Any]] = {"norm_eps": {"norm": "haste"}, "output_gate_reads": {"peephole": "diagonal"}}


def made(case: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    name, options = CASES[case]
    return getattr(rt, name)(INPUTS, UNITS, dtype=dtype, **options)


def given(cell: Any, dtype: Any = torch.float32) -> tuple[Any, Any]:
    x, h, c = (torch.randn(SAMPLES, size, dtype=dtype) for size in (INPUTS, UNITS, UNITS))
    return x, (h, c) if isinstance(cell, rt.LSTMCell) else h


def first(states: Any) -> Any:
    return states[0] if isinstance(states, tuple) else states


def usual(cell: Any, x: Any, hx: Any) -> Any:
    """The step on the usual road, which a reset takes."""
    return cell(x, hx, reset=torch.zeros(len(x), dtype=torch.bool))


def leaves(states: Any) -> tuple[Any, ...]:
    return states if isinstance(states, tuple) else (states,)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_the_usual_road(case: str, dtype: Any, states: bool) -> None:
    cell = made(case, dtype)
    x, hx = given(cell, dtype)
    x.requires_grad_()
    if states:
        for state in leaves(hx):
            state.requires_grad_()
    else:
        hx = None
    inputs = [x, *(leaves(hx) if states else ()), *cell.parameters()]
    results = []
    for run in (cell, lambda x, hx: usual(cell, x, hx)):
        found = leaves(run(x, hx))
        gradients = torch.autograd.grad([f.square().sum() for f in found], inputs)
        results.append((*found, *gradients))
    assert cell._direct is not None
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    with torch.no_grad():
        for ours, expected in zip(leaves(cell(x, hx)), results[0], strict=False):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_tested(name: str) -> None:
    options = set(getattr(rt, f"{name}Cell")._names)
    assert set(OPTIONS[name]) - {"nonlinearity"} == options
    with pytest.raises(TypeError, match=f"{name}Cell: unknown is not an argument"):
        getattr(rt, f"{name}Cell")(INPUTS, UNITS, unknown=1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name in OPTIONS for option, given in OPTIONS[name].items() for value in given],
)
def test_options_do_what_they_do_in_a_layer(name: str, option: str, value: Any) -> None:
    torch.manual_seed(0)
    beside = BESIDE.get(option, {})
    cell = getattr(rt, f"{name}Cell")(INPUTS, UNITS, **beside, **{option: value}).eval()
    layer = getattr(rt, name)(INPUTS, UNITS, **beside, **{option: value}).eval()
    state = {key.replace("weight_peephole", "peephole") + "_l0": part for key, part in cell.state_dict().items()}
    layer.load_state_dict(state)  # the same parameters
    assert f"{option}=" in repr(cell)
    x, hx = given(cell)
    found = leaves(cell(x, hx))
    lead = tuple(h[None] for h in leaves(hx))
    expected = leaves(layer(x[None], lead if name == "LSTM" else lead[0])[1])
    for ours, its in zip(found, expected, strict=True):
        assert torch.equal(ours, its[0])
    found[0].sum().backward()
    expected[0].sum().backward()
    for ours, its in zip(cell.parameters(), layer.parameters(), strict=True):
        assert torch.equal(ours.grad, its.grad)
    plain = getattr(rt, f"{name}Cell")(INPUTS, UNITS, **beside)
    plain.load_state_dict({key: part for key, part in cell.state_dict().items() if key in plain.state_dict()})
    assert option == "recompute" or not torch.equal(found[0], first(plain.eval()(x, hx)))
    again = pickle.loads(pickle.dumps(copy.deepcopy(cell)))
    assert torch.equal(first(again(x, hx)), found[0])


@pytest.mark.parametrize("case", ["LSTM", "GRU", "RNN"])
def test_only_gradients_that_are_needed(case: str) -> None:
    cell = made(case)
    for name, parameter in cell.named_parameters():
        parameter.requires_grad_(name == "bias_hh")
    x, hx = given(cell)
    first(cell(x, hx)).sum().backward()
    expected = torch.autograd.grad(first(usual(cell, x, hx)).sum(), cell.bias_hh)[0]
    assert torch.equal(cell.bias_hh.grad, expected)
    assert cell.weight_ih.grad is None


def transposed(cell: Any) -> None:
    cell.weight_hh.data = cell.weight_hh.data[:UNITS].t().repeat(len(cell.weight_hh) // UNITS, 1)


def replaced(cell: Any) -> None:
    cell.weight_ih = torch.nn.Parameter(cell.weight_ih.detach() * 2)


def written(cell: Any) -> None:
    with torch.no_grad():
        cell.bias_hh.add_(1)


def moved(cell: Any) -> None:
    cell.weight_ih.data = cell.weight_ih.data.clone() + 1


def strided(cell: Any) -> None:  # the same address, other strides
    wide = torch.zeros(len(cell.weight_hh), 2 * UNITS)
    wide[:, :UNITS] = cell.weight_hh.data
    cell.weight_hh.data = wide[:, :UNITS]


@pytest.mark.parametrize("change", [transposed, replaced, written, moved, strided])
@pytest.mark.parametrize("case", ["LSTM", "GRU", "RNN"])
def test_parameters_that_changed_are_seen(case: str, change: Any) -> None:
    cell = made(case)
    x, hx = given(cell)
    before = first(cell(x, hx)).detach()
    change(cell)
    after = first(cell(x, hx))
    assert torch.equal(after, first(usual(cell, x, hx)))
    assert change is strided or not torch.equal(before, after)


def test_weights_of_the_same_memory_with_other_strides() -> None:
    cell = rt.RNNCell(UNITS, UNITS)
    x = torch.randn(SAMPLES, UNITS)
    before = cell(x)
    cell.weight_ih.data = cell.weight_ih.data.t()
    assert torch.equal(cell(x), usual(cell, x, None))
    assert not torch.equal(before, cell(x))


def test_tensors_that_changed_before_backward_are_an_error() -> None:
    cell = made("GRU")
    x, hx = given(cell)
    y = cell(x, hx)
    with torch.no_grad():
        cell.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_memory_that_is_too_small_is_refused() -> None:
    cell = made("GRU")
    x, _ = given(cell)
    x.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match="GRUCell: input"):
        cell(x)


@pytest.mark.parametrize("case", ["LSTM", "GRU", "RNN"])
def test_strided_and_empty_batches(case: str) -> None:
    cell = made(case)
    wide = torch.randn(SAMPLES, 2 * INPUTS)[:, ::2]
    assert torch.equal(first(cell(wide)), first(cell(wide.contiguous())))
    assert first(cell(torch.randn(0, INPUTS))).shape == (0, UNITS)
    first(cell(torch.randn(0, INPUTS))).sum().backward()
    y = first(cell(torch.randn(SAMPLES, INPUTS)))
    y.backward(torch.ones(1).expand(y.shape))  # a gradient without memory of its own


def test_copies_have_their_own_parameters() -> None:
    cell = made("LSTM")
    x, hx = given(cell)
    expected = cell(x, hx)[0]
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert torch.equal(other(x, hx)[0], expected)
        with torch.no_grad():
            other.weight_ih.zero_()
        assert not torch.equal(other(x, hx)[0], expected)
    assert torch.equal(cell(x, hx)[0], expected)
    assert "_direct" not in cell.state_dict()
    wide = cell.double()
    assert wide(x.double(), tuple(state.double() for state in hx))[0].dtype is torch.float64


def test_gradients_twice_and_a_graph_that_is_kept() -> None:
    cell = made("LSTM", torch.float64)
    x, hx = given(cell, torch.float64)
    y = cell(x, hx)[0].sum()
    one, two = (torch.autograd.grad(y, cell.weight_hh, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(torch.autograd.grad(y, cell.weight_hh, create_graph=True)[0].sum(), cell.weight_hh)
    inputs = (x.requires_grad_(), *(state.requires_grad_() for state in hx))
    assert torch.autograd.gradcheck(lambda x, h, c: cell(x, (h, c)), inputs)
