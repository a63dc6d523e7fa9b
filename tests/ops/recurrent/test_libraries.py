"""LSTM: the engine against PyTorch, JAX and ONNX's node tests, and gradients against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import GruWeights, LstmWeights, RnnWeights
from retrograd.lab import cases, reference
from retrograd.lab.cases import LstmCase, LstmData, LstmParameters
from retrograd.lab.verify import LstmResults, lstm_errors, lstm_oracle, run_lstm
from support.arrays import Array
from support.lstm import backward, custom, forward
from support.onnx_cases import OnnxRecurrent, collect_onnx_recurrent_cases
from support.reference import jax_lstm


def torch_run(torch: Any, case: LstmCase, data: LstmData) -> LstmResults:
    """torch.nn.LSTM with the case's weights, forward and all gradients."""
    dtype = getattr(torch, case.dtype)
    module = torch.nn.LSTM(
        case.inputs,
        case.units,
        case.layers,
        bias=case.bias,
        batch_first=case.batch_first,
        bidirectional=case.directions == 2,
        dtype=dtype,
    )
    leaves = []
    for number, weights in enumerate(data.weights):
        suffix = f"_l{number // case.directions}{'_reverse' * (number % case.directions)}"
        for name, array in (("weight_ih", weights.wx), ("weight_hh", weights.wh), ("bias_ih", weights.b)):
            if array is not None:
                parameter = getattr(module, name + suffix)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(array))
                leaves.append(parameter)
        if case.bias:
            torch.nn.init.zeros_(getattr(module, "bias_hh" + suffix))
    x, h0, c0 = (torch.tensor(a, requires_grad=True) for a in (data.x, data.h0, data.c0))
    if case.lengths is None:
        y, (hn, cn) = module(x, (h0, c0))
    else:
        rnn = torch.nn.utils.rnn
        packed = rnn.pack_padded_sequence(x, case.lengths, batch_first=case.batch_first, enforce_sorted=False)
        packed, (hn, cn) = module(packed, (h0, c0))
        y, _ = rnn.pad_packed_sequence(packed, batch_first=case.batch_first, total_length=case.steps)
    given = [torch.from_numpy(a) for a in (data.dy, data.dhn, data.dcn)]
    dx, dh0, dc0, *dw = torch.autograd.grad([y, hn, cn], [x, h0, c0, *leaves], given)
    each = len(leaves) // case.cells
    cells = [LstmParameters(*(a.numpy() for a in dw[n * each : (n + 1) * each])) for n in range(case.cells)]
    y, hn, cn, dx, dh0, dc0 = (a.detach().numpy() for a in (y, hn, cn, dx, dh0, dc0))
    if case.batch_first:
        y, dx = y.swapaxes(0, 1), dx.swapaxes(0, 1)
    return LstmResults(y, hn, cn, dx, dh0, dc0, [cell.stacked() for cell in cells])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"lengths": (3, 9, 1, 7, 9)},
        {"lengths": (3, 9, 1, 7, 9), "batch_first": True, "directions": 2, "layers": 2},
        {"directions": 2},
        {"layers": 3},
        {"layers": 2, "directions": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_pytorch(torch: Any, options: dict[str, Any], dtype: str, isa: str) -> None:
    """y, hn, cn and all gradients: as far from PyTorch as two results within tolerance of the truth can be."""
    case = LstmCase(9, 5, 6, 21, states=True, dtype=dtype, **options)
    data = cases.make_lstm_data(case)
    theirs = torch_run(torch, case, data)
    oracle = lstm_oracle(case, data)
    assert max(lstm_errors(theirs, oracle)) <= 1
    assert max(lstm_errors(run_lstm(case, data, 2), oracle._replace(expected=theirs))) <= 2


@pytest.mark.parametrize("options", [{}, {"peephole": "full"}, {"peephole": "diagonal", "output_gate_reads": "old"},
                                     {"activations": custom(i="softsign", g="elu", o="softplus", h="scaled_tanh")}],
                         ids=["plain", "full", "diagonal_old", "activations"])  # fmt: skip
def test_gradients_are_the_derivative(options: dict[str, Any], isa: str) -> None:
    """Central differences of the engine itself, in float64, along a random direction in each array."""
    case = LstmCase(4, 3, 4, 7, layers=2, directions=2, states=True, dtype="float64", lengths=(4, 2, 3), **options)
    data = cases.make_lstm_data(case)
    rng = np.random.default_rng(1)
    gradients = backward(data, forward(case, data).cache)

    def loss(at: LstmData) -> float:
        y, hn, cn, _ = forward(case, at, training=False)
        return float(np.sum(y * data.dy) + np.sum(hn * data.dhn) + np.sum(cn * data.dcn))

    def along(name: str, index: int, step: float, direction: Array) -> LstmData:
        if name in ("x", "h0", "c0"):
            return data._replace(**{name: getattr(data, name) + step * direction})
        cells = list(data.weights)
        cells[index] = cells[index]._replace(**{name: getattr(cells[index], name) + step * direction})
        return data._replace(weights=tuple(cells))

    places = [("x", 0), ("h0", 0), ("c0", 0)]
    places += [(n, k) for k in range(4) for n in LstmParameters._fields if getattr(data.weights[0], n) is not None]
    for name, index in places:
        is_data = name in ("x", "h0", "c0")
        gradient = getattr(gradients, "d" + name) if is_data else getattr(gradients.dweights[index], name)
        direction = rng.normal(size=gradient.shape)
        h = 1e-5
        difference = (loss(along(name, index, h, direction)) - loss(along(name, index, -h, direction))) / (2 * h)
        # The differences' own error: h^2 times a third derivative, and u / h times the loss.
        assert abs(np.sum(gradient * direction) - difference) < 2e-7 * max(1, abs(difference)), (name, index)


@pytest.mark.parametrize(
    ("peephole", "reads", "layers", "directions"),
    [
        pytest.param("none", "new", 2, 2, marks=pytest.mark.long),
        pytest.param("diagonal", "old", 1, 2, marks=pytest.mark.long),
        ("full", "new", 2, 1),
    ],
)
def test_jax_scan(jax: Any, peephole: Any, reads: str, layers: int, directions: int) -> None:
    case = LstmCase(
        5,
        3,
        4,
        9,
        layers,
        directions,
        dtype="float64",
        states=True,
        peephole=peephole,
        output_gate_reads=reads,
        batch_sizes=(3, 1, 2, 0, 3),
    )
    data = cases.make_lstm_data(case)
    net = (data.x, [reference.LstmCell(*cell.stacked()) for cell in data.weights], data.h0, data.c0)

    def loss(net: Any) -> Any:
        out = jax_lstm(jax, net, case.active, directions, reads)
        return sum((w * a).sum() for w, a in zip((data.dy, data.dhn, data.dcn), out, strict=True)), out

    with jax.enable_x64(True):
        (dx, dcells, dh0, dc0), outputs = jax.jit(jax.grad(loss, has_aux=True))(net)
    y, hn, cn, dx, dh0, dc0 = (np.asarray(a) for a in (*outputs, dx, dh0, dc0))
    cells = [LstmParameters(*(None if a is None else np.asarray(a) for a in cell)) for cell in dcells]
    oracle = lstm_oracle(case, data)
    theirs = oracle._replace(expected=LstmResults(y, hn, cn, dx, dh0, dc0, cells))
    assert max(lstm_errors(run_lstm(case, data, 2), theirs)) <= 2


# Weights, and the gates in ONNX's order and in ours.
ONNX_CELLS: dict[str, tuple[Any, str, str]] = {
    "LSTM": (LstmWeights, "iofg", "ifgo"),
    "GRU": (GruWeights, "zrn", "rzn"),
    "RNN": (RnnWeights, "h", "h"),
}


@pytest.mark.parametrize(
    ("operator", "case"),
    [(operator, case) for operator in ONNX_CELLS for case in collect_onnx_recurrent_cases(operator)],
    ids=lambda value: getattr(value, "name", value),
)
def test_onnx_node_cases(operator: str, case: OnnxRecurrent, isa: str) -> None:
    """Weights of each gate in ONNX's own array, in its order, without a copy."""
    kind, theirs, ours = ONNX_CELLS[operator]
    units = case.attributes["hidden_size"]
    direction = case.attributes.get("direction", b"forward").decode()
    batch_first = bool(case.attributes.get("layout", 0))
    given = case.inputs

    def of_gates(array: Array, order: str = theirs) -> tuple[Any, ...]:
        parts = dict(zip(order, array.reshape(len(order), units, *array.shape[1:]), strict=True))
        return tuple(parts.get(gate) for gate in ours)

    cells = []
    for d in range(len(given["W"])):
        cell = kind(of_gates(given["W"][d]), of_gates(given["R"][d]))
        if "B" in given:
            b, bh = given["B"][d].reshape(2, len(theirs) * units)
            cell = (
                cell._replace(b=of_gates(b), bh=of_gates(bh))
                if operator == "GRU"
                else cell._replace(b=of_gates(b + bh))
            )
        cells.append(cell._replace(peephole=of_gates(given["P"][d], "iof")) if "P" in given else cell)
    x, *states = (given.get(name) for name in ("X", "initial_h", "initial_c")[: 3 if operator == "LSTM" else 2])
    assert x is not None
    if batch_first:
        states = [None if s is None else s.swapaxes(0, 1) for s in states]
    if direction == "reverse":
        x = x[:, ::-1] if batch_first else x[::-1]
    kinds = {0: "before", 1: "after"}
    options = {"kind": kinds[case.attributes.get("linear_before_reset", 0)]} if operator == "GRU" else {}
    result = getattr(rg, f"{operator.lower()}_forward")(
        x,
        cells,
        *states,
        bidirectional=direction == "bidirectional",
        batch_first=batch_first,
        lengths=given.get("sequence_lens"),
        **options,
    )
    y = result.y.swapaxes(0, 1) if batch_first else result.y
    if direction == "reverse":
        y = y[::-1]
    got = {"Y": y.reshape(*y.shape[:2], len(cells), units).transpose(0, 2, 1, 3), "Y_h": result.hn}
    if operator == "LSTM":
        got["Y_c"] = result.cn
    if batch_first:
        got = {name: a.transpose(2, 0, 1, 3) if name == "Y" else a.swapaxes(0, 1) for name, a in got.items()}
    for name, published in case.outputs.items():
        # Both were computed in float32: a few of its units, 1.2e-7.
        np.testing.assert_allclose(got[name], published, rtol=0, atol=5e-7)
