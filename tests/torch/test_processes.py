"""Import orders, worker processes, and whose number of threads counts."""

from __future__ import annotations

from typing import Any

import pytest

import retrograd as rg
from retrograd.ops import _threads
from support.processes import forks, python
from support.torch_layers import rt, same_bits, torch

_arrays, _recurrent, _norm = rt._arrays, rt._recurrent, rt._norm


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, retrograd, retrograd.nn, retrograd.bnns, retrograd.mps; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_without_torch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import retrograd.torch"
    assert "ImportError: retrograd.torch needs PyTorch: pip install 'retrograd[torch]'" in python(code, expect=1)


ORDERS = ["import torch\nimport retrograd.torch as rt\n", "import retrograd.torch as rt\nimport torch\n"]


@forks
@pytest.mark.parametrize("imports", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.long)])
def test_both_orders_of_imports_and_workers_of_a_data_loader(imports: str) -> None:
    """Workers forked after layers have been trained with several threads run the layers too."""
    code = """
norm = rt.BatchNorm2d(16)
lstm = rt.LSTM(16, 16)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        x = torch.full((8, 16, 32, 32), float(index))
        with torch.no_grad():
            return torch.cat((norm(x).flatten(), lstm(x[:, :, 0].transpose(1, 2))[0].flatten()))

torch.set_num_threads(2)
x = torch.randn(64, 16, 32, 32, requires_grad=True)
(norm(x).sum() + lstm(x.flatten(2).transpose(1, 2))[0].sum()).backward()
norm.eval()
expected = torch.stack([Data()[index] for index in range(6)])
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
print(bool(x.grad.isfinite().all()), torch.equal(torch.cat(list(loader)), expected))
"""
    assert python(f"import warnings; warnings.simplefilter('ignore')\n{imports}{code}") == "True True"


def test_threads_follow_torch_unless_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.delenv("RETROGRAD_NUM_THREADS", raising=False)
    _threads.start_num_threads()  # as the import does
    assert _arrays.num_threads() == 3
    monkeypatch.setenv("RETROGRAD_NUM_THREADS", "2")
    _threads.start_num_threads()
    assert _arrays.num_threads() is None
    monkeypatch.delenv("RETROGRAD_NUM_THREADS")
    _threads.start_num_threads()
    assert _arrays.num_threads() == 3
    rg.set_num_threads(2)
    assert _arrays.num_threads() is None


def test_the_engine_gets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    problem_of, functions = _norm.problem_of, _recurrent.FUNCTIONS["lstm"]

    class Engine:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def forward_at(self, *given: Any) -> Any:
            seen.append(given[-1])
            return self.engine.forward_at(*given)

    monkeypatch.setattr(_norm, "problem_of", lambda *given: (p := problem_of(*given))._replace(engine=Engine(p.engine)))

    def lstm_forward(*given: Any, **options: Any) -> Any:
        seen.append(options["num_threads"])
        return functions.forward(*given, **options)

    monkeypatch.setitem(_recurrent.FUNCTIONS, "lstm", functions._replace(forward=lstm_forward))
    monkeypatch.setattr(_threads, "chosen", False)
    x = torch.randn(4, 3, 5)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rt.LayerNorm(5)(x)
        rt.LSTM(5, 2)(x)
    rg.set_num_threads(2)
    rt.LayerNorm(5)(x)
    rt.LSTM(5, 2)(x)
    assert seen == [1, 1, 2, 2, 0, None]  # retrograd's own number is 0 or None


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 16, 64, requires_grad=True)
    lstm, norm = rt.LSTM(64, 64), rt.LayerNorm(64)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(_arrays.torch, "get_num_threads", lambda threads=threads: threads)
        y, _ = lstm(norm(x))
        results.append([y, *torch.autograd.grad(y.sum(), [x, *lstm.parameters(), *norm.parameters()])])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))
