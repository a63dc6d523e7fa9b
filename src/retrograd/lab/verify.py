"""Compare the engine with the oracle, in units of the tolerances of :mod:`retrograd.lab.bounds`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import _core
from ..ops import normalization, recurrent, scan
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS, Activation
from . import bounds, cases, reference
from .cases import GruCase, GruParameters, LstmCase, LstmParameters, NormCase, RecurrentCase, RnnCase

__all__ = [
    "GruErrors",
    "LstmErrors",
    "LstmOracle",
    "LstmResults",
    "NormErrors",
    "RecurrentOracle",
    "RecurrentResults",
    "RnnErrors",
    "VerifyRow",
    "fused_activation",
    "lstm_errors",
    "lstm_options",
    "lstm_oracle",
    "lstm_weights",
    "recurrent_errors",
    "recurrent_inside",
    "recurrent_options",
    "recurrent_oracle",
    "recurrent_weights",
    "run_gru",
    "run_lstm",
    "run_rnn",
    "scan_errors",
    "verify_gru",
    "verify_lstm",
    "verify_norm",
    "verify_rnn",
]

_C = TypeVar("_C", NormCase, LstmCase, GruCase, RnnCase)
_R = TypeVar("_R")  # the results of a run


class NormErrors(NamedTuple):
    """The maximum error of each result, in units of the element's tolerance."""

    y: float
    mean: float
    var: float
    dx: float
    dgamma: float
    dbeta: float


class _Results(NamedTuple):
    y: Array
    mean: Array
    var: Array
    dx: Array
    dgamma: Array
    dbeta: Array


def fused_activation(name: str, alpha: float, beta: float) -> Activation:
    """Return an activation with only the parameters that it has."""
    kind = ACTIVATIONS[name]
    return Activation(name, None if kind.alpha == 0.0 else alpha, None if kind.beta == 0.0 else beta)


def _run(case: NormCase, data: cases.NormData, threads: int) -> _Results:
    options: dict[str, Any] = {"axis": case.axis} if case.kind == "layer" else {"channel_axis": case.channel_axis}
    if case.kind == "group":
        options["num_groups"] = case.num_groups
    forward = getattr(normalization, f"{case.kind}_norm_forward")
    backward = getattr(normalization, f"{case.kind}_norm_backward")
    activation = fused_activation(case.activation, case.alpha, case.beta)
    options |= {"activation": activation, "slope_from": case.slope_from}
    y, cache = forward(data.x, data.gamma, data.beta, num_threads=threads, **options)
    gradients = backward(data.dy, cache, num_threads=threads)
    return _Results(y, cache.mean, cache.var, *gradients)


def _errors(case: NormCase, data: cases.NormData, got: _Results) -> NormErrors:
    options = {
        **case.geometry,
        "activation": case.activation,
        "alpha": case.alpha,
        "act_beta": case.beta,
    }
    forward = reference.norm_forward(data.x, data.gamma, data.beta, **options)
    forward_bound = bounds.forward_bound(
        data.x,
        data.gamma,
        data.beta,
        forward,
        lambda z: reference.activation_value(case.activation, z, case.alpha, case.beta),
        **options,
    )
    slope_error = None
    if case.slope_from == "input":
        slope = partial(reference.activation_input_slope, case.activation, alpha=case.alpha, beta=case.beta)
        slope_error = bounds.input_slope_error(data.x, data.gamma, data.beta, forward, slope, **options)
    # The engine computes the slope from its stored y, so the oracle's backward must start from the same y.
    backward = reference.norm_backward(
        data.dy, data.x, got.y, data.gamma, data.beta, slope_from=case.slope_from, **options
    )
    backward_bound = bounds.backward_bound(data.dy, data.x, data.gamma, backward, slope_error=slope_error, **options)
    expected = (forward.y, forward.mean, forward.var, backward.dx, backward.dgamma, backward.dbeta)
    tolerances = (*forward_bound, *backward_bound)
    return NormErrors(*(bounds.error_in_tolerances(*triple) for triple in zip(got, expected, tolerances, strict=True)))


def _same_bits(a: Iterable[Array], b: Iterable[Array]) -> bool:
    pairs = ((np.ascontiguousarray(p), np.ascontiguousarray(q)) for p, q in zip(a, b, strict=True))
    return all(np.array_equal(p.view(np.uint8), q.view(np.uint8)) for p, q in pairs)


# ---- what recurrent layers share -------------------------------------------------------------------------------------


def recurrent_options(case: RecurrentCase) -> dict[str, Any]:
    """Return the options of a case that are not arrays, as arguments of the case's forward function."""
    activations = [fused_activation(*named) for named in case.activations]
    options: dict[str, Any] = {
        "bidirectional": case.directions == 2,
        "batch_first": case.batch_first,
        "lengths": case.lengths,
        "batch_sizes": case.batch_sizes,
        "clip": case.clip,
        "norm": case.norm,
        "norm_eps": case.norm_eps,
        "dropout": case.dropout,
        "seed": case.seed,
    }
    own: tuple[str, ...] = ()
    match case:
        case LstmCase():
            own = ("output_gate_reads", "coupled", "cell_clip")
            options["activations"] = recurrent.LstmActivations(*activations)
        case GruCase():
            own = ("kind", "flip")
            options["activations"] = recurrent.GruActivations(*activations)
        case _:
            (options["activation"],) = activations
    return options | {name: getattr(case, name) for name in own}


def recurrent_inside(case: RecurrentCase, data: cases.LstmData | cases.RecurrentData) -> dict[str, Any]:
    """Return the arrays that act inside the recurrence, as arguments of the case's forward function."""

    def ordered(array: Array | None, time: int) -> Array | None:
        return array.swapaxes(time, time + 1) if array is not None and case.batch_first else array

    mask, zoneout_h, zoneout_c = (ordered(a, -3) for a in (data.mask, data.zoneout_h, getattr(data, "zoneout_c", None)))
    zoneout = zoneout_h if zoneout_c is None else (zoneout_h, zoneout_c)
    return {"reset": ordered(data.reset, 0), "mask": mask, "zoneout": zoneout}


def _needed(weights: Sequence[Any], *states: str) -> list[str]:
    """The names of all gradients that there are."""
    return ["dx", *("d" + name for name, part in weights[0]._asdict().items() if part is not None), *states]


# ---- LSTM ------------------------------------------------------------------------------------------------------------


class LstmErrors(NamedTuple):
    """The maximum error of each result over all cells, in units of the element's tolerance."""

    y: float
    hn: float
    cn: float
    dx: float
    dwx: float
    dwh: float
    db: float
    dpeephole: float
    dprojection: float
    dgamma_x: float
    dgamma_h: float
    dgamma_c: float
    dbeta_c: float
    dh0: float
    dc0: float


def lstm_weights(data: cases.LstmData) -> list[recurrent.LstmWeights]:
    return [recurrent.LstmWeights(*cell) for cell in data.weights]


def lstm_options(case: LstmCase) -> dict[str, Any]:
    """Return a case's options as arguments of :func:`retrograd.lstm_forward`."""
    return recurrent_options(case)


class LstmResults(NamedTuple):
    """Outputs and all gradients: time first, parameters stacked."""

    y: Array
    hn: Array
    cn: Array
    dx: Array
    dh0: Array
    dc0: Array
    cells: list[LstmParameters]

    def arrays(self) -> list[Array]:
        return [*self[:6], *(a for cell in self.cells for a in cell if a is not None)]


def run_lstm(case: LstmCase, data: cases.LstmData, threads: int) -> LstmResults:
    """Run forward and backward with the engine."""
    weights = lstm_weights(data)
    options = {**recurrent_options(case), **recurrent_inside(case, data), "num_threads": threads}
    y, hn, cn, cache = recurrent.lstm_forward(data.x, weights, data.h0, data.c0, **options)
    assert cache is not None
    need = _needed(weights, "dh0", "dc0")
    dx, dweights, dh0, dc0 = recurrent.lstm_backward(
        data.dy, cache, dhn=data.dhn, dcn=data.dcn, need=need, num_threads=threads
    )
    assert dx is not None
    assert dh0 is not None
    assert dc0 is not None
    if case.batch_first:
        y, dx = y.swapaxes(0, 1), dx.swapaxes(0, 1)
    return LstmResults(y, hn, cn, dx, dh0, dc0, [LstmParameters(*cell).stacked() for cell in dweights])


class LstmOracle(NamedTuple):
    expected: LstmResults
    bound: bounds.LstmBound


def oracle_options(case: RecurrentCase, data: cases.LstmData | cases.RecurrentData) -> dict[str, Any]:
    """Return the options that all cells have, as arguments of the oracle and of the bounds."""
    masks = None
    if case.dropout and case.layers > 1:
        shape = (case.steps, case.samples, case.directions * case.outputs)
        masks = [reference.philox_mask(case.seed, layer, shape, case.dropout) for layer in range(case.layers - 1)]
    return {
        "directions": case.directions,
        "active": case.active,
        "activations": case.activations,
        "masks": masks,
        "reset": data.reset,
        "mask": data.mask,
        "zoneout_h": data.zoneout_h,
        "clip": case.clip,
        "norm": case.norm,
        "eps": case.norm_eps,
    }


def lstm_oracle(case: LstmCase, data: cases.LstmData) -> LstmOracle:
    """Run forward and backward with the oracle, and compute the tolerances."""
    cells = [cell.stacked() for cell in data.weights]
    x, dy = (a.swapaxes(0, 1) if case.batch_first else a for a in (data.x, data.dy))
    options = oracle_options(case, data) | {
        "output_reads": case.output_gate_reads,
        "zoneout_c": data.zoneout_c,
        "cell_clip": case.cell_clip,
        "coupled": case.coupled,
    }
    given = [reference.LstmCell(*cell) for cell in cells]
    forward = reference.lstm_forward(x, given, data.h0, data.c0, **options)
    backward = reference.lstm_backward(dy, data.dhn, data.dcn, x, given, data.h0, data.c0, **options)
    bound = bounds.lstm_bound(
        x,
        cells,
        data.h0,
        data.c0,
        dy,
        data.dhn,
        data.dcn,
        reference.activation_value,
        reference.activation_input_slope,
        **options,
    )
    gradients = [LstmParameters(*cell) for cell in backward.cells]
    expected = LstmResults(forward.y, forward.hn, forward.cn, backward.dx, backward.dh0, backward.dc0, gradients)
    return LstmOracle(expected, bound)


def lstm_errors(got: LstmResults, oracle: LstmOracle) -> LstmErrors:
    return LstmErrors(**dict.fromkeys(LstmErrors._fields, 0.0) | recurrent_errors(got, oracle))


# ---- GRU and simple RNN ----------------------------------------------------------------------------------------------


class GruErrors(NamedTuple):
    """The maximum error of each result over all cells, in units of the element's tolerance."""

    y: float
    hn: float
    dx: float
    dwx: float
    dwh: float
    db: float
    dbh: float
    dgamma_x: float
    dgamma_h: float
    dh0: float


class RnnErrors(NamedTuple):
    """The maximum error of each result over all cells, in units of the element's tolerance."""

    y: float
    hn: float
    dx: float
    dwx: float
    dwh: float
    db: float
    dgamma_x: float
    dgamma_h: float
    dh0: float


_Errors: TypeAlias = NormErrors | LstmErrors | GruErrors | RnnErrors


class RecurrentResults(NamedTuple):
    """Outputs and all gradients of a GRU or a simple RNN: time first, parameters stacked."""

    y: Array
    hn: Array
    dx: Array
    dh0: Array
    cells: list[Any]  # GruParameters or RnnParameters

    def arrays(self) -> list[Array]:
        return [*self[:4], *(a for cell in self.cells for a in cell if a is not None)]


def recurrent_weights(data: cases.RecurrentData) -> list[Any]:
    """The weights of a GRU or a simple RNN."""
    record: Any = recurrent.GruWeights if isinstance(data.weights[0], GruParameters) else recurrent.RnnWeights
    return [record(*cell) for cell in data.weights]


def run_gru(case: GruCase, data: cases.RecurrentData, threads: int) -> RecurrentResults:
    """Run forward and backward with the engine."""
    return _run_recurrent(recurrent.gru_forward, recurrent.gru_backward, case, data, threads)


def run_rnn(case: RnnCase, data: cases.RecurrentData, threads: int) -> RecurrentResults:
    """Run forward and backward with the engine."""
    return _run_recurrent(recurrent.rnn_forward, recurrent.rnn_backward, case, data, threads)


def _run_recurrent(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    case: GruCase | RnnCase,
    data: cases.RecurrentData,
    threads: int,
) -> RecurrentResults:
    weights = recurrent_weights(data)
    options = {**recurrent_options(case), **recurrent_inside(case, data), "num_threads": threads}
    y, hn, cache = forward(data.x, weights, data.h0, **options)
    need = _needed(weights, "dh0")
    dx, dweights, dh0 = backward(data.dy, cache, dhn=data.dhn, need=need, num_threads=threads)
    if case.batch_first:
        y, dx = y.swapaxes(0, 1), dx.swapaxes(0, 1)
    gradients = [type(of)(*cell).stacked() for of, cell in zip(data.weights, dweights, strict=True)]
    return RecurrentResults(y, hn, dx, dh0, gradients)


class RecurrentOracle(NamedTuple):
    expected: RecurrentResults
    bound: bounds.GruBound | bounds.RnnBound


def recurrent_oracle(case: GruCase | RnnCase, data: cases.RecurrentData) -> RecurrentOracle:
    """:func:`lstm_oracle` for a GRU or a simple RNN."""
    options = oracle_options(case, data)
    functions: tuple[Any, ...] = reference.rnn_forward, reference.rnn_backward, bounds.rnn_bound, reference.RnnCell
    if isinstance(case, GruCase):
        options |= {"kind": case.kind, "flip": case.flip}
        functions = reference.gru_forward, reference.gru_backward, bounds.gru_bound, reference.GruCell
    run_forward, run_backward, bound_of, cell_of = functions
    cells = [cell.stacked() for cell in data.weights]
    given = [cell_of(*cell) for cell in cells]
    x, dy = (a.swapaxes(0, 1) if case.batch_first else a for a in (data.x, data.dy))
    forward = run_forward(x, given, data.h0, **options)
    backward = run_backward(dy, data.dhn, x, given, data.h0, **options)
    slopes = reference.activation_value, reference.activation_input_slope
    bound = bound_of(x, cells, data.h0, dy, data.dhn, *slopes, **options)
    gradients = [type(cell)(*found) for cell, found in zip(cells, backward.cells, strict=True)]
    return RecurrentOracle(RecurrentResults(forward.y, forward.hn, backward.dx, backward.dh0, gradients), bound)


def recurrent_errors(got: LstmResults | RecurrentResults, oracle: LstmOracle | RecurrentOracle) -> dict[str, float]:
    """Return the maximum error of each result over all cells, in units of the element's tolerance, by name."""
    expected, bound = oracle
    errors = {
        name: bounds.error_in_tolerances(*(getattr(results, name) for results in (got, expected, bound)))
        for name in expected._fields
        if name != "cells"
    }
    for actual, right, allowed in zip(got.cells, expected.cells, bound.cells, strict=True):
        for field, *triple in zip(right._fields, actual, right, allowed, strict=True):
            if triple[1] is not None:
                errors["d" + field] = max(errors.get("d" + field, 0.0), bounds.error_in_tolerances(*triple))
    return errors


# ---- linear recurrences ----------------------------------------------------------------------------------------------


def scan_errors(a: Array, b: Array, dy: Array, axis: int, threads: int) -> dict[str, float]:
    """The maximum error of each result of a recurrence, in units of the element's tolerance. `a` has the shape of b."""
    y, _, cache = scan.scan_forward(a, b, axis=axis, num_threads=threads)
    exact, _ = reference.scan_forward(a, b, axis=axis)
    tolerance, _ = bounds.scan_forward_bound(a, exact, axis, b.dtype)
    errors = {"y": bounds.error_in_tolerances(y, exact, tolerance)}
    got = scan.scan_backward(dy, cache, num_threads=threads)
    right = reference.scan_backward(dy, None, a, y, axis=axis)
    allowed = bounds.scan_backward_bound(a, y, None, right.db, right.dh0, a.shape, axis, b.dtype)
    for name in ("da", "db"):
        errors[name] = bounds.error_in_tolerances(*(getattr(part, name) for part in (got, right, allowed)))
    return errors


# ---- all of a kind ---------------------------------------------------------------------------------------------------


class VerifyRow(NamedTuple):
    case: NormCase | LstmCase | GruCase | RnnCase
    isa: str
    threads: int
    errors: _Errors
    same_bits: bool  # bitwise identical to the first thread count
    ok: bool  # within tolerance, and same_bits

    @property
    def what(self) -> str:
        """The name of the result with the largest error."""
        if not self.same_bits:
            return "bits"
        return self.errors._fields[self.errors.index(max(self.errors))]

    @property
    def error(self) -> float:
        """The largest error, in tolerances; infinite if the bits depend on the thread count."""
        return max(self.errors) if self.same_bits else math.inf


def verify_norm(
    problems: Sequence[NormCase] = cases.NORM_VERIFY_CASES,
    isa_levels: Sequence[str] | None = None,
    thread_counts: Sequence[int] = (1, 2, 7),
    progress: Callable[[VerifyRow], None] | None = None,
) -> list[VerifyRow]:
    """Run each case at each instruction-set level (by default all that this machine supports) and thread count.

    `progress` is called with each row when it is done. The selected level is restored afterwards.
    """

    def prepare(case: NormCase) -> _Prepared[_Results]:
        data = cases.make_norm_data(case)
        return _Prepared(partial(_run, case, data), tuple, partial(_errors, case, data))

    return _verify("verify_norm", problems, prepare, isa_levels, thread_counts, progress)


def verify_lstm(
    problems: Sequence[LstmCase] = cases.LSTM_VERIFY_CASES + cases.LSTM_OPTION_CASES,
    isa_levels: Sequence[str] | None = None,
    thread_counts: Sequence[int] = (1, 2, 7),
    progress: Callable[[VerifyRow], None] | None = None,
) -> list[VerifyRow]:
    """:func:`verify_norm` for LSTMs: each case at each instruction-set level and thread count."""

    def prepare(case: LstmCase) -> _Prepared[LstmResults]:
        data = cases.make_lstm_data(case)
        oracle = lstm_oracle(case, data)
        return _Prepared(partial(run_lstm, case, data), LstmResults.arrays, partial(lstm_errors, oracle=oracle))

    return _verify("verify_lstm", problems, prepare, isa_levels, thread_counts, progress)


def verify_gru(
    problems: Sequence[GruCase] = cases.GRU_VERIFY_CASES,
    isa_levels: Sequence[str] | None = None,
    thread_counts: Sequence[int] = (1, 2, 7),
    progress: Callable[[VerifyRow], None] | None = None,
) -> list[VerifyRow]:
    """:func:`verify_norm` for GRUs: each case at each instruction-set level and thread count."""

    def prepare(case: GruCase) -> _Prepared[RecurrentResults]:
        data = cases.make_recurrent_data(case)
        return _Prepared(partial(run_gru, case, data), RecurrentResults.arrays, _errors_as(GruErrors, case, data))

    return _verify("verify_gru", problems, prepare, isa_levels, thread_counts, progress)


def verify_rnn(
    problems: Sequence[RnnCase] = cases.RNN_VERIFY_CASES,
    isa_levels: Sequence[str] | None = None,
    thread_counts: Sequence[int] = (1, 2, 7),
    progress: Callable[[VerifyRow], None] | None = None,
) -> list[VerifyRow]:
    """:func:`verify_norm` for simple RNNs: each case at each instruction-set level and thread count."""

    def prepare(case: RnnCase) -> _Prepared[RecurrentResults]:
        data = cases.make_recurrent_data(case)
        return _Prepared(partial(run_rnn, case, data), RecurrentResults.arrays, _errors_as(RnnErrors, case, data))

    return _verify("verify_rnn", problems, prepare, isa_levels, thread_counts, progress)


def _errors_as(
    record: type[GruErrors] | type[RnnErrors], case: GruCase | RnnCase, data: cases.RecurrentData
) -> Callable[[RecurrentResults], GruErrors | RnnErrors]:
    oracle = recurrent_oracle(case, data)
    return lambda got: record(**dict.fromkeys(record._fields, 0.0) | recurrent_errors(got, oracle))


class _Prepared(Generic[_R]):
    """How to run a case, list its result arrays, and compute its errors, at any level and thread count."""

    def __init__(
        self,
        run: Callable[[int], _R],
        arrays: Callable[[_R], Iterable[Array]],
        errors: Callable[[_R], _Errors],
    ) -> None:
        self.run, self.arrays, self.errors = run, arrays, errors


def _verify(
    function: str,
    problems: Sequence[_C],
    prepare: Callable[[_C], _Prepared[_R]],
    isa_levels: Sequence[str] | None,
    thread_counts: Sequence[int],
    progress: Callable[[VerifyRow], None] | None,
) -> list[VerifyRow]:
    levels = list(_core.isa_levels()) if isa_levels is None else list(isa_levels)
    before = _core.isa()
    rows = []
    try:
        for case in problems:
            prepared = prepare(case)
            measured: _R | None = None
            errors: _Errors | None = None
            for isa in levels:
                if not _core.select_isa(isa):
                    raise ValueError(f"{function}: isa is {isa!r}, this machine can run {_core.isa_levels()}")
                first: _R | None = None
                for threads in thread_counts:
                    got = prepared.run(threads)
                    same = first is None or _same_bits(prepared.arrays(got), prepared.arrays(first))
                    # Identical bits have identical errors, at other levels too.
                    known = measured is not None and _same_bits(prepared.arrays(got), prepared.arrays(measured))
                    if errors is None or not known:
                        measured, errors = got, prepared.errors(got)
                    first = got if first is None else first
                    row = VerifyRow(case, isa, threads, errors, same, same and max(errors) <= 1)
                    rows.append(row)
                    if progress is not None:
                        progress(row)
    finally:
        _core.select_isa(before)
    return rows
