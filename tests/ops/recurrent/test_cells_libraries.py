"""GRU, RNN and the projected LSTM: the engine against PyTorch and ONNX's node tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.lab.cases import GruCase, LstmCase, RnnCase
from support.onnx_cases import OnnxRecurrent, collect_onnx_recurrent_cases
from support.recurrent import backward, flat, forward, make, named, state_names

MODULES = {"gru": "GRU", "rnn": "RNN", "lstm": "LSTM"}
CASES: dict[str, Any] = {
    "gru": GruCase(9, 5, 6, 21, states=True, dtype="float64"),
    "gru_stacked": GruCase(9, 5, 6, 21, 2, 2, states=True, dtype="float64", lengths=(3, 9, 1, 7, 9)),
    "gru_no_bias": GruCase(9, 5, 6, 21, states=True, dtype="float64", bias=False, batch_first=True),
    "rnn": RnnCase(9, 5, 6, 21, states=True, dtype="float64"),
    "rnn_relu": RnnCase(9, 5, 6, 21, 2, 2, states=True, dtype="float64", activations=named(RnnCase, h="relu")),
    "rnn_lengths": RnnCase(9, 5, 6, 21, 2, 2, states=True, dtype="float64", lengths=(3, 9, 1, 7, 9)),
    "lstm_projection": LstmCase(9, 5, 6, 21, states=True, dtype="float64", projection=7),
    "lstm_projection_stacked": LstmCase(9, 5, 6, 21, 2, 2, states=True, dtype="float64", projection=7),
}


@pytest.mark.parametrize("name", CASES)
def test_pytorch(torch: Any, name: str, isa: str) -> None:
    """Outputs and all gradients, in float64."""
    case = CASES[name]
    data = make(case)
    more: dict[str, Any] = {}
    if case.kind_name == "rnn":
        more["nonlinearity"] = case.activations[0][0]
    if getattr(case, "projection", 0):
        more["proj_size"] = case.projection
    module = getattr(torch.nn, MODULES[case.kind_name])(
        case.inputs,
        case.units,
        case.layers,
        bias=case.bias,
        batch_first=case.batch_first,
        bidirectional=case.directions == 2,
        dtype=torch.float64,
        **more,
    )
    leaves = []
    for number, cell in enumerate(data.weights):
        suffix = f"_l{number // case.directions}{'_reverse' * (number % case.directions)}"
        theirs = {"wx": "weight_ih", "wh": "weight_hh", "b": "bias_ih", "bh": "bias_hh", "projection": "weight_hr"}
        if case.bias:
            torch.nn.init.zeros_(getattr(module, "bias_hh" + suffix))
        for field, array in cell._asdict().items():
            if array is not None:
                parameter = getattr(module, theirs[field] + suffix)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(array))
                leaves.append(parameter)
    x, *states = (
        torch.tensor(a, requires_grad=True) for a in (data.x, *(getattr(data, f"{s}0") for s in state_names(case)))
    )
    given: Any = x
    pack = torch.nn.utils.rnn
    if case.lengths is not None:
        given = pack.pack_padded_sequence(x, case.lengths, enforce_sorted=False)
    y, last = module(given, tuple(states) if len(states) == 2 else states[0])
    if case.lengths is not None:
        y, _ = pack.pad_packed_sequence(y, total_length=case.steps)
    finals = list(last) if len(states) == 2 else [last]
    seeds = [torch.from_numpy(a) for a in (data.dy, *(getattr(data, f"d{s}n") for s in state_names(case)))]
    dx, *others = (a.numpy() for a in torch.autograd.grad([y, *finals], [x, *states, *leaves], seeds))
    result = forward(case, data)
    gradients = backward(case, data, result.cache)
    ours = [result.y, *result[1:-1], gradients.dx, *(getattr(gradients, f"d{s}0") for s in state_names(case))]
    ours += [a for a in flat(gradients.dweights) if a is not None]
    expected = [a.detach().numpy() for a in (y, *finals)] + [dx, *others]
    for got, want in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("operator", "case"),
    [(operator, case) for operator in ("GRU", "RNN") for case in collect_onnx_recurrent_cases(operator)],
    ids=lambda value: getattr(value, "name", value),
)
def test_onnx_node_cases(operator: str, case: OnnxRecurrent, isa: str) -> None:
    """Weights of each gate in ONNX's own array, in its order z r h, without a copy."""
    assert case.attributes.keys() <= {"hidden_size", "layout", "linear_before_reset", "direction"}
    units, batch_first = case.attributes["hidden_size"], bool(case.attributes.get("layout", 0))
    direction = case.attributes.get("direction", b"forward").decode()
    given = case.inputs
    gates, order = (3, (1, 0, 2)) if operator == "GRU" else (1, (0,))

    def of_gates(array: Any) -> tuple[Any, ...]:
        parts = array.reshape(gates, units, *array.shape[1:])
        return tuple(parts[k] for k in order)

    cells: list[Any] = []
    for d in range(len(given["W"])):
        wx, wh = of_gates(given["W"][d]), of_gates(given["R"][d])
        b, bh = (None, None) if "B" not in given else np.split(given["B"][d], 2)
        if operator == "GRU":
            cells.append(rg.GruWeights(wx, wh, *(None if a is None else of_gates(a) for a in (b, bh))))
        else:
            cells.append(rg.RnnWeights(wx, wh, None if b is None else b + bh))
    x, h0 = given["X"], given.get("initial_h")
    if h0 is not None and batch_first:
        h0 = h0.swapaxes(0, 1)
    backwards = (slice(None),) * batch_first + (slice(None, None, -1),)
    if direction == "reverse":
        x = x[backwards]
    options: dict[str, Any] = {"batch_first": batch_first, "lengths": given.get("sequence_lens")}
    if operator == "GRU":
        options["kind"] = "after" if case.attributes.get("linear_before_reset", 0) else "before"
    run = rg.gru_forward if operator == "GRU" else rg.rnn_forward
    result: Any = run(x, cells, h0, bidirectional=direction == "bidirectional", **options)
    y = result.y[backwards] if direction == "reverse" else result.y
    y = y.reshape(*y.shape[:2], len(cells), units)
    got = {"Y": y if batch_first else y.transpose(0, 2, 1, 3), "Y_h": result.hn}
    if batch_first:
        got["Y_h"] = result.hn.swapaxes(0, 1)
    for name, published in case.outputs.items():
        # Both were computed in float32: a few of its units, 1.2e-7.
        np.testing.assert_allclose(got[name], published, rtol=0, atol=5e-7)
