"""The suite products: the engine's products are verified in their own layouts, and compared with BLAS and the peak."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from retrograd import _core
from retrograd.lab import bench
from retrograd.lab.bench import products, timing
from retrograd.lab.bench import rows as bench_rows
from retrograd.lab.bench.products import ProductCase
from retrograd.lab.bench.sgemm import Gemm, Sgemm
from support.bench import FixedTimes

# Fewer units than a panel, not a multiple of one, more than one block of rows.
CASES = [ProductCase(kind, rows, units) for kind in ("lstm", "linear") for rows, units in ((1, 1), (37, 21), (300, 48))]


@pytest.mark.parametrize("level", _core.isa_levels())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_are_those_of_float64(case: ProductCase, level: str) -> None:
    before = _core.isa()
    assert _core.select_isa(level)
    try:
        assert list(products.product_failures(case, level, [1, 2])) == []
    finally:
        _core.select_isa(before)


@pytest.mark.parametrize(
    ("kind", "pass_", "owner", "name"),
    [
        ("lstm", "projection", products._core, "gate_projection"),
        ("lstm", "dx", products._core, "gate_input_gradient"),
        ("lstm", "dwx", products._core, "gate_weight_gradient"),
        ("linear", "forward", products.retrograd, "linear_forward"),
    ],
)
def test_one_wrong_element_is_seen(
    kind: str, pass_: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> object:
        outcome = compute(*arguments, **options)
        result = options["out"] if options else arguments[-2]
        result.reshape(-1)[7] += np.float32(0.01)
        return outcome

    monkeypatch.setattr(owner, name, wrong)
    (failure,) = products.product_failures(ProductCase(kind, 37, 21), _core.isa(), [2])
    assert failure.startswith(f"{pass_} is off by ")
    assert failure.endswith(" tolerances, threads 2")


def test_operations_are_those_of_the_products() -> None:
    lstm, linear = ProductCase("lstm", 10, 6).gemms, ProductCase("linear", 10, 6).gemms
    assert [gemm.flops for gemm in lstm] == [2 * 10 * 6 * 24] * 3
    assert [gemm.flops for gemm in linear] == [2 * 10 * 6 * 6] * 3
    assert [gemm[:3] for gemm in lstm] == [(10, 6, 24), (10, 24, 6), (24, 10, 6)]


def test_blas_times_each_product() -> None:
    """And scales one product's time to the operations of several passes."""
    with contextlib.ExitStack() as stack:
        each = Sgemm([Gemm(64, 32, 16), Gemm(16, 64, 32, a_transposed=True)], (1.0, 2.0), 1, stack)
        one, two = each.step()
        assert one > 0
        assert two > 0
        assert each.cpu_seconds > 0
        shared = Sgemm([Gemm(64, 64, 64)], (1e6, 2e6, 3e6), 1, stack)
        first, second, third = shared.step()
        assert (second, third) == (pytest.approx(2 * first), pytest.approx(3 * first))


def test_the_peak_counts_what_it_executes() -> None:
    unit = _core.multiply_adds(1, 1)
    assert unit > 0
    assert [_core.multiply_adds(steps, threads) for steps, threads in ((1000, 1), (1000, 2), (7, 3))] == [
        1000 * unit,
        1000 * unit,
        7 * unit,
    ]
    with pytest.raises(ValueError, match="at least 1"):
        _core.multiply_adds(0, 1)


def test_shares_of_blas_and_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0.0)

    slots: list[list[Any]] = [
        [FixedTimes("retrograd", 1.0, 2.0)],
        [FixedTimes("sgemm", 0.5, 2.5)],
        [FixedTimes("peak", 0.25, 1.0)],
    ]
    contest = timing.Contest(slots, "sgemm", [], ("forward", "dx"), flops=(1e9, 4e9))
    times = timing.take_turns(contest.slots, rounds=2, budget=1e-6)
    machine = timing.Machine("a machine", "scalar", None)
    found = {
        (row.provider, row.pass_): (row.share_of_bound, row.share_of_peak, row.gflops)
        for index, pass_ in enumerate(contest.passes)
        for row in bench_rows._rows_of_pass("a_row", pass_, index, 1, contest, times, machine)
    }
    assert found == {
        ("retrograd", "forward"): (0.5, 0.25, 1.0),
        ("retrograd", "dx"): (1.25, 0.5, 2.0),
        ("sgemm", "forward"): (None, 0.5, 2.0),
        ("sgemm", "dx"): (None, 0.4, 1.6),
        ("peak", "forward"): (2.0, None, 4.0),
        ("peak", "dx"): (2.5, None, 4.0),
    }


def panels(count: int, rows: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, rows, 16), np.float32)


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


# Of 5 rows, 20 units and 10 inputs: 8 panels of gates, one of inputs.
U, W, BIAS, GATES, DZ, DU = panels(1, 5), zeros(4, 20, 10), zeros(128), zeros(5, 128), panels(8, 5), zeros(5, 10)


@pytest.mark.parametrize(
    ("function", "arguments", "reason", "argument"),
    [
        ("gate_projection", (panels(2, 5), W, BIAS, GATES), "shape", "u"),
        ("gate_projection", (U[:, :, ::2], W, BIAS, GATES), "shape", "u"),
        ("gate_projection", (panels(1, 10)[:, ::2], W, BIAS, GATES), "layout", "u"),
        ("gate_projection", (U, zeros(3, 20, 10), BIAS, GATES), "shape", "w"),
        ("gate_projection", (U, zeros(4, 10, 20).swapaxes(1, 2), BIAS, GATES), "layout", "w"),
        ("gate_projection", (U, W, zeros(127), GATES), "shape", "bias"),
        ("gate_projection", (U, W, BIAS, zeros(4, 128)), "shape", "gates"),
        ("gate_projection", (U, W, BIAS, GATES.astype(np.float64)), "dtype", "gates"),
        ("gate_input_gradient", (panels(4, 5), W, DU), "shape", "dz"),
        ("gate_input_gradient", (DZ, W, zeros(5, 11)), "shape", "du"),
        ("gate_input_gradient", (DZ, W, W[0, :5, :]), "overlap", "du"),
        ("gate_weight_gradient", (DZ, panels(1, 4), W), "shape", "u"),
        ("gate_weight_gradient", (DZ, panels(2, 5), W), "shape", "u"),
        ("gate_weight_gradient", (panels(12, 5), U, W), "shape", "dz"),
        ("gate_weight_gradient", (DZ, U, zeros(4, 20)), "shape", "dw"),
    ],
)
def test_arrays_of_other_shapes_are_refused(
    function: str, arguments: tuple[Any, ...], reason: str, argument: str
) -> None:
    refusal = getattr(_core, function)(*arguments, 1)
    assert (refusal.reason.name, refusal.argument) == (reason, argument)


def test_rows_of_the_suite() -> None:
    names = bench.bench_names(["products"])
    assert len(names) == 24
    assert {"lstm_products_n3200h512", "linear_products_n700h650"} <= set(names)
