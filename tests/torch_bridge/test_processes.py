"""Import orders, worker processes, and whose number of threads counts."""

from __future__ import annotations

from typing import Any

import pytest

import retrograd as rg
from retrograd.ops import _threads
from retrograd.torch import _arrays
from support.processes import forks, python
from support.torch_layers import rt, same_bits, torch

QUIET = "import warnings; warnings.simplefilter('ignore')\n"
STEP = """
x = torch.randn(40, 32, 64, requires_grad=True)
y, _ = rt.LSTM(64, 64)(rt.LayerNorm(64)(x))
y.sum().backward()
print(bool(x.grad.isfinite().all()))
"""


@pytest.mark.parametrize(
    "imports", ["import torch\nimport retrograd.torch as rt", "import retrograd.torch as rt\nimport torch"]
)
def test_both_orders_of_imports(imports: str) -> None:
    assert python(QUIET + imports + STEP) == "True"


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, retrograd, retrograd.nn, retrograd.bnns, retrograd.mps; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_without_torch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import retrograd.torch"
    assert "ImportError: retrograd.torch needs PyTorch: pip install 'retrograd[torch]'" in python(code, expect=1)


@forks
def test_workers_of_a_data_loader() -> None:
    """Forked after layers have run with several threads, the workers run them too."""
    code = """
import warnings; warnings.simplefilter("ignore")
import torch
import retrograd.torch as rt

norm = rt.BatchNorm2d(16).eval()
lstm = rt.LSTM(16, 16)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        x = torch.full((8, 16, 32, 32), float(index))
        with torch.no_grad():
            return float(norm(x).sum()) + float(lstm(x[:, :, 0].transpose(1, 2))[0].sum())

torch.set_num_threads(2)
expected = [Data()[index] for index in range(6)]
norm(torch.randn(64, 16, 32, 32, requires_grad=True)).sum().backward()
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork")
found = [value for batch in loader for value in batch.tolist()]
print(all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(found, expected)), len(found))
"""
    assert python(code) == "True 6"


THREADS = (
    QUIET
    + """
import torch
import retrograd, retrograd.torch
from retrograd.torch import _arrays
torch.set_num_threads(3)
print(_arrays.num_threads())
"""
)


def test_threads_follow_torch_unless_they_are_chosen() -> None:
    assert python(THREADS) == "3"
    assert python(THREADS, RETROGRAD_NUM_THREADS="2") == "None"
    assert python(THREADS.replace("print", "retrograd.set_num_threads(2)\nprint")) == "None"


def test_the_engine_gets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    from retrograd.torch import _lstm, _norm

    forward, lstm_forward = _norm.run_forward, _lstm.lstm_forward
    monkeypatch.setattr(_norm, "run_forward", lambda *given: seen.append(given[-1]) or forward(*given))
    monkeypatch.setattr(
        _lstm,
        "lstm_forward",
        lambda *given, **options: seen.append(options["num_threads"]) or lstm_forward(*given, **options),
    )
    monkeypatch.setattr(_threads, "chosen", False)
    x = torch.randn(4, 3, 5)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rt.LayerNorm(5)(x)
        rt.LSTM(5, 2)(x)
    rg.set_num_threads(2)
    rt.LayerNorm(5)(x)
    rt.LSTM(5, 2)(x)
    assert seen == [1, 1, 2, 2, None, None]


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
