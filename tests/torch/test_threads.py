"""The engine on PyTorch's threads: the same bits, after a fork, from many threads, and back on its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import retrograd as rg
from support.processes import forks, python

torch = pytest.importorskip("torch")
rt = pytest.importorskip("retrograd.torch")


@pytest.fixture(autouse=True)
def _restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    rt.set_thread_pool("torch")


def trained() -> list[np.ndarray]:
    """A step of layers that are split over items (norms) and in phases (LSTM), large enough to wake threads."""
    torch.manual_seed(0)
    lstm, norm = rt.LSTM(48, 96), rt.LayerNorm(96)
    x = torch.randn(40, 16, 48, requires_grad=True)
    y = norm(lstm(x)[0])
    (y * torch.linspace(-1, 1, 96)).sum().backward()
    return [t.detach().numpy().copy() for t in (y, x.grad, lstm.weight_hh_l0.grad, norm.weight.grad)]


def test_a_program_that_imports_the_bridge_runs_on_pytorchs_threads() -> None:
    assert rt.get_thread_pool() == "torch"
    # Own workers are created when a call first needs them.
    count = python(
        """
        import os, numpy as np, torch, retrograd as rg, retrograd.torch as rt
        torch.set_num_threads(2)
        torch.ones(4_000_000).exp()
        before = len(os.listdir("/proc/self/task"))
        x = np.ones((4096, 512), np.float32)
        rg.layer_norm_forward(x, np.ones(512, np.float32), np.zeros(512, np.float32), num_threads=2)
        shared = len(os.listdir("/proc/self/task")) - before
        rt.set_thread_pool("retrograd")
        rg.layer_norm_forward(x, np.ones(512, np.float32), np.zeros(512, np.float32), num_threads=2)
        print(shared, len(os.listdir("/proc/self/task")) - before)
        """
    )
    assert count == "0 1"


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_bits_do_not_depend_on_the_pool(threads: int) -> None:
    torch.set_num_threads(threads)
    on_torch = trained()
    rt.set_thread_pool("retrograd")
    assert rt.get_thread_pool() == "retrograd"
    for ours, theirs in zip(trained(), on_torch, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_more_threads_than_the_team_has() -> None:
    """Shares of threads that are not there are done by the others."""
    torch.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal((2048, 300), dtype=np.float32)
    gamma, beta = np.ones(300, np.float32), np.zeros(300, np.float32)
    alone = rg.layer_norm_forward(x, gamma, beta, num_threads=1)[0]
    np.testing.assert_array_equal(rg.layer_norm_forward(x, gamma, beta, num_threads=5)[0], alone)


def test_many_python_threads() -> None:
    torch.set_num_threads(2)
    expected = trained()
    weights = rg.LstmWeights(*(np.full(shape, 0.01, np.float32) for shape in ((256, 32), (256, 64), (256,))))
    x = np.random.default_rng(1).standard_normal((64, 24, 32), dtype=np.float32)
    alone = rg.lstm_forward(x, weights, num_threads=1).y
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: rg.lstm_forward(x, weights, num_threads=2).y, range(24)):
            np.testing.assert_array_equal(y, alone)
    for ours, before in zip(trained(), expected, strict=True):
        np.testing.assert_array_equal(ours, before)


@forks
def test_a_forked_child_has_its_own_threads() -> None:
    """PyTorch's own operations would wait forever in such a child."""
    answer = python(
        """
        import os, sys, numpy as np, torch, retrograd as rg, retrograd.torch as rt
        torch.set_num_threads(2)
        torch.ones(4_000_000).exp()
        x = np.random.default_rng(0).standard_normal((4096, 512), dtype=np.float32)
        gamma, beta = np.ones(512, np.float32), np.zeros(512, np.float32)
        before = rg.layer_norm_forward(x, gamma, beta, num_threads=2)[0]
        pid = os.fork()
        if not pid:
            same = (rg.layer_norm_forward(x, gamma, beta, num_threads=2)[0] == before).all()
            os._exit(0 if same and rt.get_thread_pool() == "retrograd" else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), rt.get_thread_pool())
        """
    )
    assert answer == "0 torch"


def test_names_of_pools() -> None:
    with pytest.raises(ValueError, match="name is 'openmp', must be 'torch' or 'retrograd'"):
        rt.set_thread_pool("openmp")
    assert rt.get_thread_pool() == "torch"
