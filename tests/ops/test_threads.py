"""Threads, environment, fork, the interpreter lock, what an import costs, and memory over many calls."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from retrograd.ops import _threads
from support.processes import forks, linux, python
from support.waiting import runs_meanwhile

Array = np.ndarray[Any, Any]

# ---- how many --------------------------------------------------------------------------------------------------------


def test_set_and_get() -> None:
    for threads in (1, 2, 4, np.int64(3)):
        rg.set_num_threads(threads)
        assert rg.get_num_threads() == threads
    for wrong in (0, -1):
        with pytest.raises(
            ValueError, match=rf"^set_num_threads: the number of threads is {wrong}, must be at least 1"
        ):
            rg.set_num_threads(wrong)
    for untyped in (1.0, "2", None):
        with pytest.raises(TypeError, match=r"^set_num_threads: the number of threads must be an int, not \w+"):
            rg.set_num_threads(untyped)
    assert rg.get_num_threads() == 3


PRINT_THREADS = "import retrograd; print(retrograd.get_num_threads())"


def test_environment_sets_the_number() -> None:
    assert python(PRINT_THREADS, RETROGRAD_NUM_THREADS="3") == "3"
    assert python(PRINT_THREADS, RETROGRAD_NUM_THREADS=" 4 ") == "4"
    assert python(PRINT_THREADS, RETROGRAD_NUM_THREADS="100000") == str(_threads._MOST)
    assert python(PRINT_THREADS, RETROGRAD_NUM_THREADS="") == python(PRINT_THREADS)


def test_one_thread_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_NUM_THREADS", "1")
    assert _threads.default_num_threads() == 1
    monkeypatch.setenv("RETROGRAD_NUM_THREADS", "0")
    with pytest.raises(ValueError, match="RETROGRAD_NUM_THREADS='0': must be a whole number of at least 1"):
        _threads.default_num_threads()


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", "1e3"])
def test_environment_refuses_what_is_no_number_of_threads(value: str) -> None:
    message = python("import retrograd", expect=1, RETROGRAD_NUM_THREADS=value)
    assert f"ValueError: RETROGRAD_NUM_THREADS={value!r}: must be a whole number of at least 1" in message


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity here")
def test_default_is_what_the_process_may_use() -> None:
    quota = _threads._cgroup_quota()
    cpus = len(os.sched_getaffinity(0))
    expected = cpus if quota is None else max(1, min(cpus, round(quota)))
    assert int(python(PRINT_THREADS)) == expected == _threads.default_num_threads()
    one = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); " + PRINT_THREADS
    assert python(one) == "1"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "max 100000"}, None),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a": "200000 100000", "a/b": "max 100000"}, 2.0),
        ({"a": "200000 100000", "a/b": "350000 100000"}, 2.0),
        ({"": "50000 100000", "a/b": "350000 100000"}, 0.5),
        ({"a/b": "25000 50000"}, 0.5),
        ({"a/b": "nonsense"}, None),
        ({"a/b": ""}, None),
        ({"a/b": "0 100000"}, None),
        ({"other": "10000 100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_control_groups_version_2(tmp_path: Path, limits: dict[str, str], expected: float | None) -> None:
    """The tightest from the process's own group up to the root."""
    root = tmp_path / "cgroup"
    for path, text in limits.items():
        write(root / path, cpu__max=text)
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert _threads._cgroup_quota(root, membership) == expected


@pytest.mark.parametrize(
    ("path", "quota", "expected"),
    [("jobs/7", "300000", 3.0), ("jobs/7", "-1", None), ("", "150000", 1.5), ("elsewhere", "100000", None)],
)
def test_quota_of_control_groups_version_1(tmp_path: Path, path: str, quota: str, expected: float | None) -> None:
    root = tmp_path / "cgroup"
    write(root / "cpu" / path, cpu__cfs_quota_us=quota + "\n", cpu__cfs_period_us="100000\n")
    membership = tmp_path / "membership"
    membership.write_text("5:memory:/jobs/7\n4:cpuset:/\n3:cpu,cpuacct:/jobs/7\n1:name=systemd:/\n")
    assert _threads._cgroup_quota(root, membership) == expected


def test_no_control_groups(tmp_path: Path) -> None:
    assert _threads._cgroup_quota(tmp_path, tmp_path / "missing") is None


# ---- which instructions ----------------------------------------------------------------------------------------------


def test_environment_lowers_the_level() -> None:
    levels = _core.isa_levels()
    assert levels[0] == "scalar"
    script = "import retrograd; print(retrograd._core.isa())"
    for level in levels:
        assert python(script, RETROGRAD_ISA=level) == level
    assert python(script) == python(script, RETROGRAD_ISA="") == levels[-1]


@pytest.mark.parametrize("value", ["avx9", "SCALAR", "none", "avx512f"])
def test_environment_refuses_a_level_this_machine_has_not(value: str) -> None:
    message = python("import retrograd", expect=1, RETROGRAD_ISA=value)
    assert f"ImportError: RETROGRAD_ISA={value!r}: this machine can run {', '.join(_core.isa_levels())}" in message


def test_select_isa_refuses_and_stays() -> None:
    before = _core.isa()
    assert not _core.select_isa("avx9")
    assert _core.isa() == before


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_many_python_threads_at_once() -> None:
    """One of them has the team, the others work alone; all get the bits of a quiet process."""
    rng = np.random.default_rng(0)
    shapes = [(8, 16, 40, 40), (300, 700), (6, 4, 99), (2, 3, 300, 301), (64, 64), (5, 4099), (40, 8, 30, 31), (9, 7)]
    inputs = [rng.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]

    def work(x: Array, dy: Array) -> list[Array]:
        results = []
        y, cache = rg.batch_norm_forward(x, activation="tanh", num_threads=3)
        results += [y, *rg.batch_norm_backward(dy, cache, need=("dx", "dgamma"), num_threads=2)[:2]]
        y, cache = rg.layer_norm_forward(x, num_threads=2)
        results += [y, *rg.layer_norm_backward(dy, cache, need=("dx", "dbeta"), num_threads=3)[::2]]
        return results

    expected = [work(*pair) for pair in inputs]
    wrong: list[Any] = []
    start = threading.Barrier(len(inputs))

    def repeat(number: int) -> None:
        try:
            start.wait()
            for _ in range(15):
                for got, right in zip(work(*inputs[number]), expected[number], strict=True):
                    if not np.array_equal(got.view(np.uint32), right.view(np.uint32)):
                        wrong.append((number, got.shape))
        except BaseException as error:
            wrong.append(error)
            raise

    workers = [threading.Thread(target=repeat, args=(number,)) for number in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_more_threads_than_work_and_than_processors() -> None:
    x = np.random.default_rng(1).normal(size=(3, 2, 5000)).astype(np.float32)
    expected, _ = rg.batch_norm_forward(x, num_threads=1)
    for threads in (2, 3, _threads._MOST):
        y, _ = rg.batch_norm_forward(x, num_threads=threads)
        np.testing.assert_array_equal(y, expected)


def test_the_interpreter_lock_is_released() -> None:
    x = np.random.default_rng(2).normal(size=(64, 32, 64, 64)).astype(np.float32)
    out = np.empty_like(x)
    assert runs_meanwhile(lambda: rg.batch_norm_forward(x, activation="tanh_shrink", out=out, num_threads=1))


@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no such lock")
def test_a_lock_that_is_not_released_would_be_seen() -> None:
    assert not runs_meanwhile(lambda: sum(range(1_000_000)), attempts=20)


# ---- fork ------------------------------------------------------------------------------------------------------------

# The parent has used its team of two; the child must have one of its own. One line per check.
FORK = """
import os
import numpy as np
import retrograd as rg

def threads():
    return len(os.listdir("/proc/self/task"))

x, dy = np.random.default_rng(0).normal(size=(2, 16, 32, 40, 40)).astype(np.float32)
rg.set_num_threads(2)

def work(number=None):
    y, cache = rg.batch_norm_forward(x, activation="relu", num_threads=number)
    return [y, rg.batch_norm_backward(dy, cache).dx]

def same(a, b):
    return all(np.array_equal(p, q) for p, q in zip(a, b))

alone = threads()
expected = work()
assert threads() == alone + 1, (threads(), alone)
"""


@linux
@forks
def test_fork_after_two_threads() -> None:
    """Children, and a child of a child, work with two threads; so does the parent after them."""
    script = (
        FORK
        + """
def child(depth):
    before = threads()
    right = same(work(), expected)
    size = threads() - before
    if depth:
        pid = os.fork()
        if pid == 0:
            os._exit(child(depth - 1))
        right = right and os.waitpid(pid, 0)[1] == 0
    return 0 if right and size == 1 and before == 1 else 10 + size

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(child(1))
    status = os.waitpid(pid, 0)[1]
    assert status == 0, os.waitstatus_to_exitcode(status)
    assert same(work(), expected)
print("done")
"""
    )
    assert python(script) == "done"


@linux
@forks
def test_multiprocessing_fork() -> None:
    script = (
        FORK
        + """
import multiprocessing

def task(number):
    before = threads()
    right = same(work(2), expected)
    return right, threads() >= 2, before

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(task, range(6))
    assert all(right and team for right, team, _ in results), results
    assert same(work(), expected)
    print("done")
"""
    )
    assert python(script) == "done"


@linux
@forks
def test_fork_while_another_thread_works() -> None:
    """The child inherits the locks of a team that was busy; it must not wait for them."""
    script = (
        FORK
        + """
import threading

stop = False
def busy():
    while not stop:
        work()

worker = threading.Thread(target=busy)
worker.start()
try:
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same(work(), expected) else 1)
        assert os.waitpid(pid, 0)[1] == 0
finally:
    stop = True
    worker.join()
print("done")
"""
    )
    assert python(script) == "done"


# ---- cost of the package ---------------------------------------------------------------------------------------------


def test_import_brings_numpy_and_nothing_else() -> None:
    script = """
    import sys
    import numpy
    before = set(sys.modules)
    import retrograd
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(*sorted(new - set(sys.stdlib_module_names)))
    """
    assert set(python(script).split()) <= {"numpy", "retrograd"}  # numpy: more of its own modules


def test_first_calls_import_nothing_heavy() -> None:
    script = """
    import sys
    import numpy as np
    import retrograd as rg
    x = np.ones((4, 3, 5), np.float32)
    y, cache = rg.batch_norm_forward(x, activation="relu")
    rg.batch_norm_backward(y, cache)
    heavy = ("torch", "jax", "tensorflow", "scipy", "rich", "ml_dtypes", "onnx", "hypothesis", "pytest")
    print(*(name for name in heavy if name in sys.modules))
    """
    assert python(script) == ""


def test_no_thread_is_started_for_small_work() -> None:
    script = """
    import os
    import numpy as np
    import retrograd as rg
    before = len(os.listdir("/proc/self/task"))
    rg.set_num_threads(8)
    x = np.ones((8, 8, 8), np.float32)
    y, cache = rg.batch_norm_forward(x)
    rg.batch_norm_backward(y, cache)
    print(len(os.listdir("/proc/self/task")) - before)
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("looks into /proc")
    assert python(script) == "0"


@linux
def test_no_memory_growth_over_changing_shapes() -> None:
    """A thousand shapes, forward and backward, on two threads: 30,000 elements each, of which nothing may stay."""
    script = """
    import gc
    import os
    import numpy as np
    import retrograd as rg

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rng = np.random.default_rng(0)
    data = rng.normal(size=40_000).astype(np.float32)

    def calls(first, last):
        for number in range(first, last):
            rows, columns = 20 + number % 37, 10 + number // 37 % 29
            shape = (rows, columns, 30_000 // (rows * columns) - number % 3)
            x = data[: int(np.prod(shape))].reshape(shape)
            for forward, backward, options in (
                (rg.batch_norm_forward, rg.batch_norm_backward, {}),
                (rg.instance_norm_forward, rg.instance_norm_backward, {}),
                (rg.layer_norm_forward, rg.layer_norm_backward, {"axis": 1, "activation": "tanh"}),
                (rg.group_norm_forward, rg.group_norm_backward, {"num_groups": 1, "channel_axis": -1}),
            ):
                y, cache = forward(x, num_threads=2, **options)
                backward(y, cache, num_threads=2)

    calls(0, 300)
    before = resident()
    calls(300, 1300)
    print((resident() - before) / 2**20)
    """
    # 4,000 results of 120 KB are 480 MB; the allocator may keep a few.
    assert float(python(script)) < 12
