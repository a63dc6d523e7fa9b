"""The rows of ``retrograd bench jax``."""

from __future__ import annotations

from typing import Any

import pytest

from retrograd.cli import main
from retrograd.lab import bench
from retrograd.lab.bench import jax_layers, rows

SMALL = {
    "batch_norm": (4, 3, 5, 2),
    "layer_norm": (6, 7),
    "linear": (5, 4, 3),
    "lstm": (4, 3, 5, 2),
}


def small(case: jax_layers.JaxCase) -> jax_layers.JaxCase:
    return case._replace(shape=next(shape for kind, shape in SMALL.items() if kind in case.name))


@pytest.mark.usefixtures("jax")
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(small(case) for case in jax_layers.JAX_CASES)
    monkeypatch.setitem(rows.SUITES, "jax", rows.SUITES["jax"]._replace(cases=cases))
    results = list(rows.bench_rows(["jax"], rows.BenchOptions(threads=(2,), rounds=2, budget=0.01)))
    assert [result.name for result in results] == [case.name for case in cases]
    for result in results:
        assert not result.failed, result.notes
        assert {(row.provider, row.pass_) for row in result.rows} == {("retrograd", "step"), ("arrays", "step")}
        assert next(row for row in result.rows if row.provider == "retrograd").added is not None


@pytest.mark.usefixtures("jax")
def test_other_bits_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(jax_layers.JAX_CASES[0])
    make = jax_layers.make_jax_layer

    def wrong(case: jax_layers.JaxCase) -> Any:
        layer = make(case)
        return layer._replace(function=lambda x, *rest: layer.function(x + 1e-3, *rest))

    monkeypatch.setattr(jax_layers, "make_jax_layer", wrong)
    (failure,) = jax_layers.jax_failures(case, "", [2])
    assert failure == "under jit the bits are not those of the array functions, with 2 threads"


def test_without_jax_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None)
    notes = {result.notes for result in rows.bench_rows(["jax"], rows.BenchOptions())}
    assert notes == {("not timed, because jax is not installed",)}


@pytest.mark.parametrize(("suite", "title"), [("jax", "JAX"), ("torch", "PyTorch")])
def test_a_suite_of_what_is_missing_is_one_sentence(
    suite: str, title: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "is_installed", lambda package: False)
    monkeypatch.setattr(bench, "is_installed", lambda package: False)
    assert main(["bench", suite]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].endswith(f"bench {suite} needs {title}: pip install 'retrograd[{suite}]'")
