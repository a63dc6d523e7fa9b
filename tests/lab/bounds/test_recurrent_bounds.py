"""The bounds of recurrent layers: results that were computed in the data's own precision are within them, not far.

The oracle, made to compute in the data's precision, stands for an engine. So do PyTorch's layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.lab import bounds, cases, reference
from retrograd.lab.cases import GruCase, LstmCase, RecurrentCase, RnnCase
from retrograd.lab.reference import recurrent
from retrograd.lab.verify import (
    RecurrentResults,
    lstm_oracle,
    recurrent_errors,
    recurrent_oracle,
)

CASES: tuple[RecurrentCase, ...] = (
    *cases.GRU_VERIFY_CASES,
    *cases.RNN_VERIFY_CASES,
    *cases.LSTM_OPTION_CASES,
)


def errors_of(case: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The errors of the oracle in the case's precision, in tolerances."""

    def own(a: Any) -> tuple[Any, Any]:
        a = np.asarray(a)
        return a, a.dtype.type

    lstm = isinstance(case, LstmCase)
    data: Any = cases.make_lstm_data(case) if lstm else cases.make_recurrent_data(case)
    oracle: Any = lstm_oracle if lstm else recurrent_oracle
    right = oracle(case, data)
    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "working_type", own)
        patch.setattr(bounds, f"{case.kind_name}_bound", lambda *_, **__: None)
        got = oracle(case, data).expected
    assert got.y.dtype == case.dtype
    assert right.expected.y.dtype != case.dtype
    return recurrent_errors(got, right)


@pytest.mark.parametrize("kind", ["gru", "rnn", "lstm"])
def test_results_in_the_precision_of_the_data(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worst: dict[tuple[str, str], float] = {}
    chosen = [case for case in CASES if case.kind_name == kind]
    assert len(chosen) > 50
    wrong = []
    for case in chosen:
        errors = errors_of(case, monkeypatch)
        wrong += [(case.name, errors)] if max(errors.values()) > 1 else []
        for name, error in errors.items():
            worst[name, case.dtype] = max(worst.get((name, case.dtype), 0.0), error)
    assert wrong == []
    # A tolerance that nothing comes near would not be one. NumPy's functions have half an ulp of the three allowed.
    assert {key: error for key, error in worst.items() if error < 0.01} == {}


def test_names_are_distinct_and_options_reach_the_data() -> None:
    names = [case.name for case in (*CASES, *cases.LSTM_VERIFY_CASES, *cases.LSTM_BENCH_CASES)]
    assert len(set(names)) == len(names)
    for case in CASES:
        data: Any = (
            cases.make_lstm_data(case) if isinstance(case, LstmCase) else cases.make_recurrent_data(case)  # type: ignore[arg-type]
        )
        assert (data.reset is not None) == case.reset
        assert (data.mask is not None) == (case.mask != "none")
        assert (data.zoneout_h is not None) == (case.zoneout > 0)
        assert all((cell.gamma_x is not None) == (case.norm is not None) for cell in data.weights)
        assert data.x.dtype == data.weights[0].stacked().wx.dtype == case.dtype
        assert data.weights[0].stacked().wx.shape == (case.gates, case.units, case.inputs)
        assert data.weights[-1].stacked().wh.shape == (case.gates, case.units, case.outputs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of", [GruCase, RnnCase])
def test_torch(torch: Any, of: Any, dtype: str) -> None:
    """PyTorch's float32 and float64 are within the tolerances, too."""
    for sizes, lengths in (((9, 5, 6, 21), None), ((9, 5, 6, 21, 2, 2), (3, 9, 1, 7, 9)), ((30, 20, 50, 64), None)):
        case = of(*sizes, states=True, dtype=dtype, lengths=lengths)
        data = cases.make_recurrent_data(case)
        module = getattr(torch.nn, "GRU" if of is GruCase else "RNN")(
            case.inputs, case.units, case.layers, bidirectional=case.directions == 2, dtype=getattr(torch, dtype)
        )
        leaves = []
        for number, cell in enumerate(data.weights):
            suffix = f"_l{number // case.directions}{'_reverse' * (number % case.directions)}"
            given = {
                "weight_ih": cell.wx,
                "weight_hh": cell.wh,
                "bias_ih": cell.b,
                "bias_hh": getattr(cell, "bh", None),
            }
            for name, array in given.items():
                parameter = getattr(module, name + suffix)
                with torch.no_grad():
                    parameter.copy_(torch.zeros(()) if array is None else torch.from_numpy(array))
                leaves += [] if array is None else [parameter]
        x, h0 = (torch.tensor(a, requires_grad=True) for a in (data.x, data.h0))
        if lengths is None:
            y, hn = module(x, h0)
        else:
            rnn = torch.nn.utils.rnn
            packed, hn = module(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False), h0)
            y, _ = rnn.pad_packed_sequence(packed, total_length=case.steps)
        d = [torch.from_numpy(a) for a in (data.dy, data.dhn)]
        dx, dh0, *dw = (a.numpy() for a in torch.autograd.grad([y, hn], [x, h0, *leaves], d))
        each = len(leaves) // case.cells
        cells = [type(data.weights[0])(*dw[n * each : (n + 1) * each]).stacked() for n in range(case.cells)]
        got = RecurrentResults(y.detach().numpy(), hn.detach().numpy(), dx, dh0, cells)
        errors = recurrent_errors(got, recurrent_oracle(case, data))
        assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("field", ["y", "dx", "dh0"])
def test_a_wrong_result_is_seen(field: str) -> None:
    """A relative error of 2^-16 in one result is seen."""
    for of in (GruCase, RnnCase):
        case = of(12, 5, 7, 11, states=True)
        oracle = recurrent_oracle(case, cases.make_recurrent_data(case))
        right = oracle.expected
        wrong = right._replace(**{field: getattr(right, field) * (1 + 2.0**-16)})
        assert recurrent_errors(right, oracle)[field] == 0
        assert recurrent_errors(wrong, oracle)[field] > 1


def test_an_lstm_without_its_options_is_wrong() -> None:
    """Each option of the list changes y by more than the tolerance."""
    for case in cases.LSTM_OPTION_CASES:
        if case.projection or case.dropout:
            continue
        data = cases.make_lstm_data(case)
        oracle = lstm_oracle(case, data)
        cells = [reference.LstmCell(*cell.stacked()[:4]) for cell in data.weights]
        x = data.x.swapaxes(0, 1) if case.batch_first else data.x
        options: dict[str, Any] = {"directions": case.directions, "active": case.active}
        out = reference.lstm_forward(x, cells, data.h0, data.c0, output_reads=case.output_gate_reads, **options)
        assert recurrent_errors(oracle.expected._replace(y=out.y), oracle)["y"] > 1, case.name
