"""The engine against the oracle, in units of the tolerances of :mod:`retrograd.cases`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _core, cases, normalization, reference
from .activation import ACTIVATIONS, Activation
from .cases import NormCase

__all__ = ["NormErrors", "NormRow", "fused_activation", "verify_norm"]

Array = npt.NDArray[Any]


class NormErrors(NamedTuple):
    """The worst error of each result over its elements, in units of the element's tolerance."""

    y: float
    mean: float
    var: float
    dx: float
    dgamma: float
    dbeta: float


class NormRow(NamedTuple):
    case: NormCase
    isa: str
    threads: int
    errors: NormErrors
    same_bits: bool  # as with the first of the thread counts
    ok: bool  # all within tolerance, and the same bits

    @property
    def what(self) -> str:
        """The name of the worst result."""
        if not self.same_bits:
            return "bits"
        return NormErrors._fields[self.errors.index(max(self.errors))]

    @property
    def error(self) -> float:
        """The error of the worst result, in tolerances; infinite where the bits depend on the threads."""
        return max(self.errors) if self.same_bits else math.inf


class _Results(NamedTuple):
    y: Array
    mean: Array
    var: Array
    dx: Array
    dgamma: Array
    dbeta: Array


def fused_activation(name: str, alpha: float, beta: float) -> Activation:
    """An activation with the parameters it takes, and without those it does not."""
    kind = ACTIVATIONS[name]
    return Activation(name, None if kind.alpha == 0.0 else alpha, None if kind.beta == 0.0 else beta)


def _run(case: NormCase, data: cases.NormData, threads: int) -> _Results:
    options: dict[str, Any] = {"axis": case.axis} if case.kind == "layer" else {"channel_axis": case.channel_axis}
    if case.kind == "group":
        options["num_groups"] = case.num_groups
    forward = getattr(normalization, f"{case.kind}_norm_forward")
    backward = getattr(normalization, f"{case.kind}_norm_backward")
    activation = fused_activation(case.activation, case.alpha, case.beta)
    y, cache = forward(data.x, data.gamma, data.beta, activation=activation, num_threads=threads, **options)
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
    forward_bound = cases.forward_bound(
        data.x,
        data.gamma,
        data.beta,
        forward,
        lambda z: reference.activation_value(case.activation, z, case.alpha, case.beta),
        **options,
    )
    # The slope follows from y as it was stored, so the oracle's backward starts from the engine's y.
    backward = reference.norm_backward(data.dy, data.x, got.y, data.gamma, **options)
    backward_bound = cases.backward_bound(data.dy, data.x, data.gamma, backward, **options)
    expected = (forward.y, forward.mean, forward.var, backward.dx, backward.dgamma, backward.dbeta)
    bounds = (*forward_bound, *backward_bound)
    return NormErrors(*(cases.error_in_tolerances(*triple) for triple in zip(got, expected, bounds, strict=True)))


def _same_bits(a: Iterable[Array], b: Iterable[Array]) -> bool:
    return all(np.array_equal(p.view(np.uint8), q.view(np.uint8)) for p, q in zip(a, b, strict=True))


def verify_norm(
    problems: Sequence[NormCase] = cases.NORM_VERIFY_CASES,
    isa_levels: Sequence[str] | None = None,
    thread_counts: Sequence[int] = (1, 2, 7),
    progress: Callable[[NormRow], None] | None = None,
) -> list[NormRow]:
    """Run each case at each instruction-set level (by default all this machine has) and thread count.

    `progress` is called with each row as it is done. The level in force is the same afterwards as before.
    """
    levels = list(_core.isa_levels()) if isa_levels is None else list(isa_levels)
    before = _core.isa()
    rows = []
    try:
        for case in problems:
            data = cases.make_norm_data(case)
            for isa in levels:
                if not _core.select_isa(isa):
                    raise ValueError(f"verify_norm: isa is {isa!r}, this machine can run {_core.isa_levels()}")
                first: _Results | None = None
                errors: NormErrors | None = None
                for threads in thread_counts:
                    got = _run(case, data, threads)
                    same = first is None or _same_bits(got, first)
                    if errors is None or not same:  # the same bits have the same errors
                        errors = _errors(case, data, got)
                    first = got if first is None else first
                    row = NormRow(case, isa, threads, errors, same, same and max(errors) <= 1)
                    rows.append(row)
                    if progress is not None:
                        progress(row)
    finally:
        _core.select_isa(before)
    return rows
