"""The rows of ``retrograd bench torch``."""

from __future__ import annotations

import math
from typing import Any

import pytest

from retrograd.lab.bench import bench_names, drop_in, modules, optimizers, rows
from support.torch_layers import rt, torch

NAMES = [
    *("torch_tagger", "torch_characters", "torch_small_cnn", "torch_layer_norms"),
    *("bridge_layer_norm_n8c16", "bridge_batch_norm_n8c16", "bridge_lstm_t8n2i16h16"),
]
UPDATES = ["adamw_resnet18", "adamw_lstm_h128", "adamw_lstm_h512"]
MODELS = {
    "torch_tagger": lambda torch: drop_in.tagger(torch, words=20, samples=3, longest=8, hidden=4),
    "torch_small_cnn": lambda torch: drop_in.small_cnn(torch, samples=4, size=8, channels=2),
}


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def small(monkeypatch: pytest.MonkeyPatch, name: str) -> drop_in.DropInCase:
    """The case with a small model."""
    (case,) = (case for case in drop_in.DROP_IN_CASES if case.name == name)
    case = case._replace(make=MODELS.get(name, case.make))
    monkeypatch.setitem(rows.SUITES, "torch", rows.SUITES["torch"]._replace(cases=(case,)))
    return case


def measured(threads: int = 1) -> list[Any]:
    options = rows.BenchOptions(threads=(threads,), rounds=2, budget=0.01)
    return list(rows.bench_rows(["torch"], options))


def test_names() -> None:
    assert [name for name in bench_names(["torch"]) if not name.startswith("module_")] == [*NAMES, *UPDATES]


def test_rows_of_single_layers() -> None:
    """A name says what the row has: its layer, the shape of the input, its memory order, its type and the mode."""
    names = [case.name for case in modules.MODULE_CASES]
    assert len(set(names)) == len(names)
    wanted = {"layer_norm_512x16", "layer_norm_4096x768", "group_norm_1_4x128x600", "batch_norm_16x512x1x1"}
    assert {f"module_{name}" for name in wanted} < set(names)
    assert [case.evaluation for case in modules.MODULE_CASES] == [name.endswith("_eval") for name in names]
    kinds = {case.kind for case in modules.MODULE_CASES}
    assert kinds == {name for name in rt.__all__ if isinstance(getattr(torch.nn, name, None), type)} - {"SyncBatchNorm"}


SMALL = [
    ("module_layer_norm_4x96x56x56_permuted", {"shape": (2, 96, 3, 3)}),
    ("module_batch_norm_32x64x28x28_last_eval", {"shape": (2, 64, 3, 3)}),
    ("module_group_norm_8_8x64x32x32_bf16", {"shape": (2, 64, 3, 3)}),
    ("module_lstm_2_layers_h64_40x32x64", {"shape": (3, 2, 64)}),
    ("module_gru_cell_h16_1x16_eval", {}),
]


@pytest.mark.parametrize(("name", "fields"), SMALL)
def test_single_layers(name: str, fields: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case._replace(**fields) for case in modules.MODULE_CASES if case.name == name)
    monkeypatch.setitem(rows.SUITES, "torch", rows.SUITES["torch"]._replace(cases=(case,)))
    (result,) = measured()
    assert not result.failed
    assert [row.provider for row in result.rows] == ["retrograd", "torch"]
    assert all(row.pass_ == "step" and row.p50 > 0 for row in result.rows)


def test_a_wrong_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in modules.MODULE_CASES if case.name == "module_layer_norm_8x16")
    monkeypatch.setattr(rt.LayerNorm, "forward", lambda self, x: 1.1 * super(rt.norms.Fused, self).forward(x))
    assert list(drop_in.drop_in_failures(case, "", [1])) == ["the results differ from PyTorch's"]


@pytest.mark.parametrize("name", [*MODELS, *NAMES[4:]])
def test_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, name)
    (result,) = measured()
    assert not result.failed
    providers = {row.provider for row in result.rows}
    assert providers == {"retrograd", "torch"} | ({"arrays", "autograd"} if name.startswith("bridge") else set())
    ours = next(row for row in result.rows if row.provider == "retrograd")
    assert ours.ratio_vs_torch > 0
    assert (ours.added is None) == (not name.startswith("bridge"))


def test_another_loss_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(monkeypatch, "torch_small_cnn")
    assert list(drop_in.drop_in_failures(case, "", [1])) == []
    replace = rt.replace

    def wrong(model: Any, **options: Any) -> Any:
        with torch.no_grad():
            model[-1].weight.mul_(2.0)
        return replace(model, **options)

    monkeypatch.setattr(rt, "replace", wrong)
    (failure,) = drop_in.drop_in_failures(case, "", [1])
    assert failure.startswith("the loss of step 0 is ")


def test_layers_that_compute_nothing_have_the_parameters_of_others() -> None:
    layer = torch.nn.LSTM(4, 4)
    empty = drop_in._empty_layers(torch)(layer)
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in layer.named_parameters()]
    x = torch.ones(3, 2, 4, requires_grad=True)
    empty(x).backward(x)
    assert all(parameter.grad.shape == parameter.shape for parameter in (x, *layer.parameters()))


def test_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet, lstm, _ = optimizers.OPTIMIZER_CASES
    assert sum(map(math.prod, resnet.shapes)) == 11_689_512  # as published
    model = torch.nn.ModuleList([torch.nn.Embedding(96, 128), torch.nn.LSTM(128, 128, 2), torch.nn.Linear(128, 96)])
    assert lstm.shapes == tuple(tuple(p.shape) for p in model.parameters())
    case = optimizers.OptimizerCase("adamw", ((3, 5), (7,)))
    monkeypatch.setitem(rows.SUITES, "torch", rows.SUITES["torch"]._replace(cases=(case,)))
    (result,) = measured()
    assert not result.failed
    assert [row.provider for row in result.rows] == ["retrograd", "torch"]
    monkeypatch.setattr(optimizers, "_DECAY", 1.0)
    monkeypatch.setattr(optimizers._Ours, "__call__", lambda self: None)
    (result,) = measured()
    assert result.notes == ("the parameters differ from PyTorch's",)
