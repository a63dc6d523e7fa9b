"""LSTMs, compared with PyTorch and with NumPy's matrix product."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

import retrograd

from ...ops._types import Array
from ...ops.recurrent import LstmGradients, LstmResult
from ..cases import (
    LSTM_STANDARD,
    LstmCase,
    LstmData,
    make_lstm_data,
)
from ..verify import lstm_options, lstm_weights, verify_lstm
from .sgemm import Gemm, Sgemm
from .timing import Contest, Machine, admit, agree, clock, wake_workers

_ORACLE_STEPS: Final = 8
_GEMM: Final = Gemm(1024, 1024, 1024)


def _lstm_flops(case: LstmCase) -> tuple[float, float, float]:
    """FLOPs of the matrix products of forward, backward (twice as many) and both; only active steps count."""
    rows = case.steps * case.samples if case.active is None else int(case.active.sum())
    widths = sum(case.cell_inputs(cell) + case.units * (1 + (case.peephole == "full")) for cell in range(case.cells))
    forward = 8.0 * rows * widths * case.units
    return forward, 2 * forward, 3 * forward


class _OurLstm:
    """retrograd as users call it, without buffers."""

    def __init__(self, case: LstmCase, data: LstmData, threads: int, name: str = "retrograd") -> None:
        self.name = name
        self._threads = threads
        self._x, self._dy, self._states = data.x, data.dy, (data.h0, data.c0)
        self._weights = lstm_weights(data)
        self._options = {**lstm_options(case), "num_threads": threads}
        for option in ("lengths", "batch_sizes"):
            if self._options[option] is not None:
                self._options[option] = np.array(self._options[option])

    def wake(self) -> None:
        wake_workers(self._threads)

    def _run(self) -> tuple[LstmResult, LstmGradients, tuple[float, float, float]]:
        start = clock()
        result = retrograd.lstm_forward(self._x, self._weights, *self._states, **self._options)
        middle = clock()
        assert result.cache is not None
        gradients = retrograd.lstm_backward(self._dy, result.cache, num_threads=self._threads)
        end = clock()
        return result, gradients, (middle - start, end - middle, end - start)

    def step(self) -> tuple[float, float, float]:
        return self._run()[2]

    def results(self) -> list[Any]:
        """Return y, dx, and the gradients of wx, wh and b of every cell."""
        result, gradients, _ = self._run()
        cells = [part for cell in gradients.dweights for part in cell[:3] if part is not None]
        return [result.y, gradients.dx, *cells]


class _TorchLstm:
    """PyTorch as users call it: torch.nn.LSTM, eager, autograd; a packed sequence if lengths differ."""

    name = "torch"

    def __init__(self, torch: Any, case: LstmCase, data: LstmData) -> None:
        module = torch.nn.LSTM(
            case.inputs,
            case.units,
            case.layers,
            bias=case.bias,
            batch_first=case.batch_first,
            dropout=case.dropout,
            bidirectional=case.directions == 2,
        )
        x, self._dy = torch.from_numpy(data.x).requires_grad_(), torch.from_numpy(data.dy)
        self._leaves, self._names = [x], ["x"]
        with torch.no_grad():
            for cell, parts in enumerate(data.weights):
                layer, direction = divmod(cell, case.directions)
                suffix = f"l{layer}" + "_reverse" * direction
                given = {"weight_ih_": parts.wx, "weight_hh_": parts.wh, "bias_ih_": parts.b, "bias_hh_": None}
                for prefix, array in given.items():
                    if prefix.startswith("bias") and not case.bias:
                        continue
                    parameter = getattr(module, prefix + suffix)
                    if array is None:
                        parameter.zero_()
                    else:
                        parameter.copy_(torch.from_numpy(array))
                    self._leaves.append(parameter)
                    self._names.append(prefix)
        rnn, lengths = torch.nn.utils.rnn, torch.tensor(case.lengths or ())

        def packed() -> Any:
            sequence = rnn.pack_padded_sequence(x, lengths, case.batch_first, enforce_sorted=False)
            return rnn.pad_packed_sequence(module(sequence)[0], case.batch_first, total_length=case.steps)[0]

        self._call: Callable[[], Any] = (lambda: module(x)[0]) if case.lengths is None else packed
        self._module, self._grad = module, torch.autograd.grad

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, float, float]:
        start = clock()
        y = self._call()
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # freed outside the timed section
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        """Return the same results as `_OurLstm`, without dropout, whose masks differ."""
        self._module.eval()
        y = self._call()
        gradients = zip(self._names, self._grad(y, self._leaves, self._dy), strict=True)
        self._module.train()
        return [y.detach().numpy(), *(gradient.numpy() for name, gradient in gradients if name != "bias_hh_")]


def _plain(case: LstmCase, data: LstmData) -> tuple[LstmCase, LstmData]:
    """Return the same case with default activations, and without peepholes and dropout."""
    plain = dataclasses.replace(case, peephole="none", output_gate_reads="new", activations=LSTM_STANDARD, dropout=0.0)
    return plain, data._replace(weights=tuple(cell._replace(peephole=None) for cell in data.weights))


def lstm_failures(case: LstmCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for wrong results: the first steps against the slow oracle, all against the engine in float64."""
    steps = min(case.steps, _ORACLE_STEPS)
    short = dataclasses.replace(
        case,
        steps=steps,
        lengths=None if case.lengths is None else tuple(min(length, steps) for length in case.lengths),
        batch_sizes=None if case.batch_sizes is None else case.batch_sizes[:steps],
    )
    for row in verify_lstm([short], [isa], threads):
        if not row.ok:
            yield f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"
    data = make_lstm_data(case)
    wide = _OurLstm(case, _in_float64(data), max(threads)).results()
    for number in threads:
        if not agree(_OurLstm(case, data, number).results(), wide, 1e-4):
            yield f"float32 and float64 differ, threads {number}"


def _in_float64(data: LstmData) -> LstmData:
    def wide(array: Array | None) -> Array | None:
        return None if array is None else array.astype(np.float64)

    cells = tuple(type(cell)(*map(wide, cell)) for cell in data.weights)
    x, _, *others = data
    return LstmData(wide(x), cells, *map(wide, others))  # type: ignore[arg-type]


def lstm_contest(
    case: LstmCase, data: LstmData, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    flops = _lstm_flops(case)
    sgemm = Sgemm([_GEMM], flops, threads, stack)
    passes = ("forward", "backward", "step")
    contest = Contest([[_OurLstm(case, data, threads)]], "sgemm", [], passes, flops, lambda: sgemm.cpu_seconds)
    plain, plain_data = _plain(case, data)
    if plain != case:
        contest.slots.append([_OurLstm(plain, plain_data, threads, "plain")])
    can = dataclasses.replace(plain, dropout=case.dropout, batch_sizes=None) == case
    if machine.torch is not None and can:
        machine.torch.set_num_threads(threads)
        peer = _TorchLstm(machine.torch, case, data)
        admit(contest, peer, agree(_OurLstm(plain, plain_data, threads).results(), peer.results()))
    contest.slots.append([sgemm])
    return contest
