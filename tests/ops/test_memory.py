"""Memory of large results: made where earlier ones have lain, never where one still lies, and never more of it than
results once needed together."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.ops import _memory
from retrograd.ops._args import Array
from support.arrays import MEMORY, placed

FLOAT32 = np.dtype(np.float32)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    gc.collect()
    rg.release_memory()
    yield
    rg.release_memory()


def begin(array: Array) -> int:
    return int(array.ctypes.data)


def waiting() -> int:
    return _core.waiting_memory()


def held_by(array: Array) -> int:
    assert array.base is not None
    return memoryview(array.base).nbytes


def data(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def lstm() -> tuple[Array, rg.LstmWeights]:
    return data(70, 32, 64), rg.LstmWeights(data(512, 64) / 8, data(512, 128) / 8, data(512))


def lstm_results() -> list[Array]:
    x, weights = lstm()
    y, _, _, cache = rg.lstm_forward(x, weights)
    assert cache is not None
    assert cache.buffer is not None
    return [y, cache.buffer]


def lstm_gradients() -> list[Array]:
    wide = rg.LstmWeights(data(2048, 512), data(2048, 512))
    cache = rg.lstm_forward(data(2, 3, 512), wide).cache
    assert cache is not None
    return list(rg.lstm_backward(data(2, 3, 512), cache).dweights[:2])


def norm_results() -> list[Array]:
    x = data(16, 32, 24, 24)
    y, cache = rg.batch_norm_forward(x)
    dx = rg.batch_norm_backward(x, cache).dx
    assert dx is not None
    return [y, dx]


def linear_results() -> list[Array]:
    x, w = data(600, 500), data(1000, 500)
    gradients = rg.linear_backward(data(600, 1000), x, w)
    assert gradients.dx is not None
    assert gradients.dw is not None
    return [rg.linear_forward(x, w), gradients.dx, gradients.dw]


def other_results() -> list[Array]:
    x, labels = data(1000, 500), np.zeros(1000, np.int64)
    dlogits = rg.softmax_cross_entropy(x, labels, want_gradient=True)[1]
    dy = rg.mean_squared_error(x, x, want_gradient=True)[1]
    assert dlogits is not None
    assert dy is not None
    table = rg.embedding_forward(labels, x), rg.embedding_backward(x, labels, 1000)
    return [rg.activation_forward(x, "tanh"), rg.dropout(x, 0.5, seed=1), dlogits, dy, *table]


@pytest.mark.parametrize("results", [lstm_results, lstm_gradients, norm_results, linear_results, other_results])
def test_results_lie_where_those_of_the_last_call_lay(results: Callable[[], list[Array]]) -> None:
    first = results()
    values = [array.copy() for array in first]
    places = {begin(array) for array in first}
    assert len(places) == len(first)
    assert all(array.nbytes >= MIB for array in first)
    del first
    again = results()
    assert {begin(array) for array in again} <= places
    if results is lstm_results:  # beside its numbers a cache has a header, with the number of its pass
        values, again = values[:1], again[:1]
    for value, array in zip(values, again, strict=True):
        np.testing.assert_array_equal(array, value)


VIEWS: dict[str, Callable[[Array], object]] = {
    "the array": lambda y: y,
    "a row": lambda y: y[3],
    "a view of a view": lambda y: y.reshape(-1)[5:].view(np.uint32),
    "a transpose": lambda y: y.T,
    "a memoryview": memoryview,
    "its base": lambda y: y.base,
    "a capsule": lambda y: y.__dlpack__(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_not_used_again_while_anything_lies_in_it(view: str) -> None:
    y = rg.activation_forward(data(700, 500), "relu")
    place, values = begin(y), y.copy()
    kept = VIEWS[view](y)
    del y
    other = rg.activation_forward(data(700, 500), "tanh")
    assert begin(other) != place
    assert waiting() == 0
    if isinstance(kept, np.ndarray) and kept.shape == values.shape:
        np.testing.assert_array_equal(kept, values)
    del kept
    assert waiting() > 0
    assert begin(rg.activation_forward(data(700, 500), "tanh")) == place


def test_a_tensor_holds_its_memory() -> None:
    torch = pytest.importorskip("torch")
    y = rg.activation_forward(data(700, 500), "relu")
    tensor, values = torch.from_numpy(y), y.copy()
    del y
    rg.activation_forward(data(700, 500), "tanh")
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_a_cache_outlives_its_result() -> None:
    x, weights = lstm()
    dy = data(70, 32, 128)
    cache = rg.lstm_forward(x, weights).cache
    assert cache is not None
    expected = rg.lstm_backward(dy, cache).dx
    for _ in range(3):
        rg.lstm_forward(2 * x, weights)
    np.testing.assert_array_equal(rg.lstm_backward(dy, cache).dx, expected)


def test_results_begin_with_a_cache_line() -> None:
    assert all(begin(array) % 64 == 0 for array in norm_results())


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_layout_is_that_of_numpy(memory: str, permutation: tuple[int, ...]) -> None:
    array = placed(data(70, 65, 60), memory, permutation)  # just over 1 MiB
    ours, numpys = _memory.empty_like(array), np.empty_like(array)
    assert (ours.shape, ours.strides, ours.dtype) == (numpys.shape, numpys.strides, numpys.dtype)
    assert ours.base is not None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 1 << 30), (7,), (MIB // 4 - 1,)])
def test_small_results_are_plain_arrays(shape: tuple[int, ...]) -> None:
    array = _memory.empty(shape, FLOAT32)
    assert (array.shape, array.dtype, array.base) == (shape, FLOAT32, None)
    del array
    assert waiting() == 0


def test_about_the_same_size_will_do() -> None:
    first = _memory.empty((100 * MIB // 4,), FLOAT32)
    size, place = held_by(first), begin(first)
    assert 100 * MIB <= size <= 112 * MIB
    del first
    second = _memory.empty((98 * MIB // 4,), FLOAT32)
    assert (begin(second), waiting()) == (place, 0)
    del second
    third = _memory.empty((50 * MIB // 4,), FLOAT32)  # which would waste it
    assert (held_by(third) < 60 * MIB, waiting()) == (True, 0)


def test_what_was_used_last_is_used_first() -> None:
    first, second = (_memory.empty((MIB,), FLOAT32) for _ in range(2))
    places = begin(first), begin(second)
    del first
    del second
    again = [_memory.empty((MIB,), FLOAT32) for _ in range(2)]
    assert (begin(again[1]), begin(again[0])) == places


def test_too_large() -> None:
    with pytest.raises(ValueError, match="too big"):
        _memory.empty((1 << 62, 1 << 10), FLOAT32)
    kept = _memory.empty((MIB,), FLOAT32)
    with pytest.raises(MemoryError):
        _memory.empty((1 << 50,), FLOAT32)
    kept[:] = 1


def test_release_memory_gives_back_what_waits() -> None:
    assert rg.release_memory() == 0
    held, gone = _memory.empty((MIB,), FLOAT32), _memory.empty((MIB,), FLOAT32)
    del gone
    assert 4 * MIB <= rg.release_memory() < 5 * MIB
    assert rg.release_memory() == 0
    del held
    assert rg.release_memory() >= 4 * MIB


def test_release_memory_gives_back_scratch_of_its_own_thread() -> None:
    x, weights = lstm()
    expected = rg.lstm_forward(x, weights, training=False).y
    released: list[int] = []
    thread = threading.Thread(target=lambda: released.append(rg.release_memory()))
    thread.start()
    thread.join()
    assert released == [0]
    packed = weights.wh
    assert isinstance(packed, np.ndarray)
    assert rg.release_memory() >= packed.nbytes
    assert rg.release_memory() == 0
    np.testing.assert_array_equal(rg.lstm_forward(x, weights, training=False).y, expected)


def test_only_so_much_waits() -> None:
    arrays = [_memory.empty((60 * MIB // 4,), FLOAT32) for _ in range(12)]
    del arrays
    before = waiting()
    assert 400 * MIB < before <= 512 * MIB
    assert held_by(_memory.empty((60 * MIB // 4,), FLOAT32)) <= 64 * MIB
    assert waiting() == before


def test_what_may_not_wait_leaves_the_others_alone() -> None:
    small = _memory.empty((MIB,), FLOAT32)
    huge = _memory.empty((600 * MIB,), np.dtype(np.uint8))
    del small
    before = waiting()
    del huge
    assert waiting() == before > 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.parametrize(("gone", "wanted", "limit"), [(400, 300, 600), (400, 1200, 1500)])
def test_waiting_memory_makes_room(gone: int, wanted: int, limit: int) -> None:
    program = f"""
import numpy as np, resource
from retrograd.ops import _memory
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + ({limit} << 20),) * 2)
byte = np.dtype(np.uint8)
_memory.empty(({gone} << 20,), byte)
_memory.empty(({wanted} << 20,), byte)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10_000)), min_size=1, max_size=60))
def test_no_more_is_held_than_was_once_needed(steps: list[tuple[bool, int]]) -> None:
    """Results come and go in any order, of any size: what lives and what waits is never more than once lived."""
    rg.release_memory()
    living: list[tuple[Array, int]] = []
    most = 0
    for make, number in steps:
        if make or not living:
            array = _memory.empty((MIB + number * 4096,), np.dtype(np.uint8))
            living.append((array, held_by(array)))
        else:
            del living[number % len(living)]
        array = np.empty(0)
        lives = sum(size for _, size in living)
        most = max(most, lives)
        assert lives + waiting() <= most
        begins = sorted((begin(array), array.nbytes) for array, _ in living)
        assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(begins))


def test_threads_never_share_memory() -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            arrays = [_memory.empty((MIB // 4 + 4096 * (turn % 3),), FLOAT32) for _ in range(2)]
            for index, array in enumerate(arrays):
                array[::1024] = number * 1000 + index
            for index, array in enumerate(arrays):
                if not (array[::1024] == number * 1000 + index).all():
                    faults.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults


def test_memory_in_rings_of_references() -> None:
    """They are given back whenever the collector runs, which may be in the middle of anything."""
    several = [_memory.empty((MIB // 4,), FLOAT32) for _ in range(60)]
    del several
    pairs: list[tuple[int, int]] = []
    for turn in range(2000):
        ring: list[object] = [_memory.empty((MIB // 4,), FLOAT32)]
        ring.append(ring)
        pairs.extend((turn, number) for number in range(40))
    del ring
    gc.collect()
    assert waiting() >= 60 * MIB


def test_end_of_a_process_with_results() -> None:
    program = """
import numpy as np, retrograd as rg, sys
result = rg.activation_forward(np.ones((1000, 1000), np.float32), "relu")
ring = [rg.activation_forward(result, "relu")]
ring.append(ring)
sys.kept_longer_than_modules = rg.activation_forward(result, "relu")
rg.activation_forward(result, "relu")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
