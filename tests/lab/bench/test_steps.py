"""The rows of ``retrograd bench steps``."""

from __future__ import annotations

from typing import Any

import pytest

from retrograd import graph
from retrograd.lab.bench import rows, steps

SMALL = (
    steps.StepCase("step_mlp_small", "mlp", (6, 5, 4, 3)),
    steps.StepCase("step_lstm_small", "lstm", (4, 3, 2, 5, 3)),
    steps.StepCase("step_cnn_small", "cnn", (3, 1, 8, 2)),
)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.usefixtures("torch", "jax")
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.SUITES, "steps", rows.SUITES["steps"]._replace(cases=SMALL))
    results = list(rows.bench_rows(["steps"], rows.BenchOptions(threads=(2,), rounds=2, budget=0.01)))
    assert [result.name for result in results] == [case.name for case in SMALL]
    for result, case in zip(results, SMALL, strict=True):
        assert not result.failed, result.notes
        assert not any("different result" in note for note in result.notes), result.notes
        others = {"nn", "mpsgraph", "torch", "jax"} | (set() if case.kind == "lstm" else {"compile"})
        assert {row.provider for row in result.rows} == {"retrograd", *others}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_program_trains_as_the_layers_do(case: steps.StepCase) -> None:
    assert not list(steps.step_failures(case, "", [1, 2]))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_mpsgraph_trains_as_the_program_does(case: steps.StepCase) -> None:
    data = steps.make_step(case)
    assert steps._agree(steps._losses(case, data, 2), steps._mpsgraph_step(case, data))


def test_other_losses_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = graph.softmax_cross_entropy

    def wrong(logits: Any, labels: Any) -> Any:
        return loss(logits * 1.01, labels)

    monkeypatch.setattr(graph, "softmax_cross_entropy", wrong)
    assert list(steps.step_failures(SMALL[0], "", [2])) == [
        "with 2 threads the losses differ from those of nn",
        "with 2 threads the losses differ from those of nn in float64",
    ]
