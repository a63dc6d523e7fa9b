"""What must not end the process or make it wait: exits, races, exhausted memory, huge sizes, idle threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from support.waiting import PATIENCE

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script in a fresh interpreter, which may well die."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


# ---- exits -----------------------------------------------------------------------------------------------------------

EXIT = """
    import sys, threading
    import numpy as np
    import retrograd as rg

    x = np.random.default_rng(0).normal(size=(16, 32, 30, 30)).astype(np.float32)
    w = rg.LstmWeights(*(np.ones(shape, np.float32) for shape in ((128, 8), (128, 32))))
    sequence = np.ones((30, 16, 8), np.float32)
    parameters, gradients = [np.ones(300_000, np.float32)], [np.ones(300_000, np.float32)]
    labels, logits = np.zeros(2000, np.int64), np.ones((2000, 100), np.float32)
    calls = [
        lambda: rg.batch_norm_forward(x),
        lambda: rg.activation_forward(x, "tanh"),
        lambda: rg.lstm_backward(None, rg.lstm_forward(sequence, w).cache, dhn=np.ones((16, 32), np.float32)),
        lambda: rg.linear_forward(logits, logits),
        lambda: rg.softmax_cross_entropy(logits, labels),
        lambda: rg.sgd_step(parameters, gradients, learning_rate=0.1),
        lambda: rg.global_norm(gradients),
        lambda: rg.dropout(logits, 0.5, seed=1),
        lambda: rg.embedding_forward(labels, logits),
    ]
    inside = threading.Barrier(len(calls) + 1)

    def work(call):
        call()
        inside.wait()
        while True:
            call()

    for call in calls:
        threading.Thread(target=work, args=(call,), daemon=True).start()
    inside.wait()
    print("leaving", flush=True)
"""


@pytest.mark.parametrize("attempt", range(5))
def test_exit_while_daemon_threads_are_inside_kernels(attempt: int) -> None:
    done = run(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


# ---- races -----------------------------------------------------------------------------------------------------------

RACE = """
    import sys, threading
    import numpy as np
    import retrograd as rg

    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 32)).astype(np.float32)
    indices = rng.integers(0, 50, (40, 64))
    good = indices.copy()
    w = rg.LstmWeights(*(rng.normal(size=shape).astype(np.float32) for shape in ((64, 32), (64, 16))))
    dy, logits = np.ones((40, 64, 32), np.float32), rng.normal(size=(40, 64, 50)).astype(np.float32)
    calls = {
        "embedding_forward": lambda: rg.embedding_forward(indices, table),
        "embedding_backward": lambda: rg.embedding_backward(dy, indices, 50),
        "softmax_cross_entropy": lambda: rg.softmax_cross_entropy(logits, indices)[1],
        "lstm": lambda: rg.lstm_backward(None, rg.lstm_forward(indices, w, table=table).cache,
                                         dhn=np.ones((64, 16), np.float32)).dx,
    }
    call = calls[sys.argv[1]]
    sys.setswitchinterval(1e-5)
    stop = threading.Event()

    def meddle():
        while not stop.is_set():
            indices[...] = 1 << 40
            indices[...] = good

    meddler = threading.Thread(target=meddle, daemon=True)
    meddler.start()
    outcomes = set()
    for _ in range(150):
        try:
            outcomes.add(type(call()).__name__)
        except ValueError as error:
            assert " is 1099511627776, but " in str(error) or "changed by another thread" in str(error), error
    stop.set()
    meddler.join()
    assert outcomes <= {"ndarray"}, outcomes
    print("alive")
"""


@pytest.mark.parametrize("function", ["embedding_forward", "embedding_backward", "softmax_cross_entropy", "lstm"])
def test_indices_that_another_thread_writes_never_reach_a_kernel(function: str) -> None:
    done = run(RACE, function)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_lookup_keeps_the_indices_of_the_forward_pass() -> None:
    rng = np.random.default_rng(0)
    table, x = rng.normal(size=(9, 3)).astype(np.float32), rng.integers(0, 9, (6, 4))
    weights = rg.LstmWeights(rng.normal(size=(20, 3)).astype(np.float32), rng.normal(size=(20, 5)).astype(np.float32))
    dy = rng.normal(size=(6, 4, 5)).astype(np.float32)
    cache = rg.lstm_forward(x, weights, table=table).cache
    assert cache is not None
    expected = rg.lstm_backward(dy, cache).dx
    x[...] = 0
    np.testing.assert_array_equal(rg.lstm_backward(dy, cache).dx, expected)


# ---- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
    import resource, sys
    import numpy as np
    import retrograd as rg

    kind, threads, spare = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) << 10
    rng = np.random.default_rng(0)
    f32 = lambda *shape: rng.normal(size=shape).astype(np.float32)

    def norm():
        _, cache = rg.batch_norm_forward(x, channel_axis=-1, activation="tanh", out=y, num_threads=threads)
        rg.batch_norm_backward(x, cache, need="dx", out={"dx": dx}, num_threads=threads)
        return y, dx

    def lstm():
        result = rg.lstm_forward(sequence, w, cache=buffer, out=y, num_threads=threads)
        rg.lstm_backward(y, result.cache, out=gradients, num_threads=threads)
        return y, gradients.dx, *gradients.dweights[:2]

    def linear():
        rg.linear_forward(x, x, out=y, num_threads=threads)
        rg.linear_backward(y, x, x, need=("dx", "dw"), out={"dx": dx, "dw": dw}, num_threads=threads)
        return y, dx, dw

    if kind == "norm":
        x, y, dx = f32(40, 9, 9, 1000), f32(40, 9, 9, 1000), f32(40, 9, 9, 1000)
    elif kind == "lstm":
        sequence, w = f32(20, 30, 300), rg.LstmWeights(f32(1200, 300) * 0.1, f32(1200, 300) * 0.1)
        y, buffer = f32(20, 30, 300), bytearray(rg.lstm_cache_size(20, 30, 300, 300))
        gradients = rg.LstmGradients(f32(20, 30, 300), rg.LstmWeights(f32(1200, 300), f32(1200, 300)))
    else:
        x, y, dx, dw = (f32(900, 900) for _ in range(4))
    # The workers are there, and have needed no scratch yet.
    rg.sgd_step(f32(200_000), f32(200_000), learning_rate=0.1, num_threads=threads)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        got = [a.copy() for a in globals()[kind]()]
    except MemoryError:
        got = None
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    right = globals()[kind]()  # the engine works as before
    assert got is None or all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))
    print("no memory" if got is None else "done")
"""


@pytest.mark.long
@linux
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("kind", ["norm", "lstm", "linear"])
def test_out_of_memory_is_a_memory_error(kind: str, threads: int) -> None:
    """Wherever memory ends, in the calling thread or in a worker."""
    outcomes = []
    for spare in (0, 60, 130, 260, 400, 600, 900, 1400, 2000, 3000, 5000, 8000, 1_000_000):
        done = run(MEMORY, kind, threads, spare)
        assert done.returncode == 0, (spare, done.stderr)
        outcomes.append(done.stdout)
    assert outcomes[0] == "no memory\n"
    assert outcomes[-1] == "done\n"


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "cells"),
    [
        ((2**58 + 256, 1, 1, 1), 1),
        ((2**58, 2**58, 2**58, 2**58), 1),
        ((2**31, 2**31, 1, 1), 1),
        ((1, 1, 2**62, 1), 1),
        ((0, 0, 0, 2**60), 1),
        ((2**63, 1, 1, 1), 1),
        ((10**30, 1, 1, 1), 1),
        ((1, 1, 1, 1), 2**60),
    ],
)
def test_cache_sizes_beyond_64_bits_are_refused(sizes: tuple[int, int, int, int], cells: int) -> None:
    with pytest.raises(ValueError, match=r"^lstm_cache_size: T=\d+, N=\d+, I=\d+, H=\d+ with \d+ cells takes about"):
        rg.lstm_cache_size(*sizes, num_layers=cells)


def test_the_engine_refuses_sizes_beyond_64_bits_by_itself() -> None:
    nothing = [(0, 0.0, 0.0)] * 5
    for *sizes, layers in (
        (2**58 + 256, 1, 1, 1, 1),
        (2**31, 2**31, 1, 1, 1),
        (1, 1, 1, 2**40, 1),
        (1, 1, 1, 1, 2**60),
    ):
        with pytest.raises(ValueError, match="the sizes are too large"):
            _core.RecurrentProblem(
                0, *sizes, 0, layers, 1, 0, nothing, 0, False, False, False, 0.0, 0.0, 0, 0.0, 0, False, 0.0
            )
    with pytest.raises(ValueError, match="the shape is too large"):
        _core.NormProblem([2**31, 2**31], "nc", 1, 0, 1e-5, 0, 0.0, 0.0, False)


def test_cache_sizes_grow_with_every_size_up_to_the_largest() -> None:
    """Just below the limit nothing has wrapped around."""
    sizes = [rg.lstm_cache_size(2**k, 1, 1, 1) for k in range(48)]
    assert all(0 < a < b for a, b in itertools.pairwise(sizes))
    assert sizes[-1] == pytest.approx(2**47 * (64 + 32) * 4, rel=1e-6)


@pytest.mark.parametrize("rows", [2**58 + 2**6, 2**60, 2**47])
def test_a_table_whose_products_no_memory_holds(rows: int) -> None:
    """Every row of the table is multiplied once; a view of one element can have more rows than 64 bits count bytes."""
    table = np.broadcast_to(np.ones(1, np.float32), (rows, 1))
    weights = (np.ones((64, 1), np.float32), np.ones((64, 16), np.float32))
    with pytest.raises(MemoryError):
        rg.lstm_forward(np.zeros((1, 1), np.int64), weights, table=table)
    y, *_ = rg.lstm_forward(np.zeros((0, 1), np.int64), weights, table=table)  # nothing is looked up
    assert y.shape == (0, 1, 16)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_far_more_threads_than_processors_are_capped_with_a_warning() -> None:
    most = max(8, 4 * (os.cpu_count() or 1))
    x = np.random.default_rng(0).normal(size=(8, 4, 5000)).astype(np.float32)
    expected, _ = rg.batch_norm_forward(x, num_threads=1)
    with pytest.warns(RuntimeWarning, match=rf"^batch_norm_forward: 4000 threads are asked for; {most} are used"):
        y, _ = rg.batch_norm_forward(x, num_threads=4000)
    np.testing.assert_array_equal(y, expected)
    with pytest.warns(RuntimeWarning, match=rf"^set_num_threads: 4000 threads are asked for; {most} are used"):
        rg.set_num_threads(4000)
    assert rg.get_num_threads() == most
    rg.set_num_threads(most)
    assert rg.get_num_threads() == most


IDLE = """
    import os
    from pathlib import Path
    import numpy as np
    import retrograd as rg
    from support.processes import sleeps

    most = 8
    tasks = Path("/proc/self/task")
    x = np.random.default_rng(0).normal(size=(64, 64, 1000)).astype(np.float32)
    before = set(tasks.iterdir())
    rg.batch_norm_forward(x, num_threads=most)
    team = sorted(set(tasks.iterdir()) - before, key=lambda task: int(task.name))
    assert len(team) == most - 1, team
    while any((task / "stat").read_text().split(") ")[1][0] != "S" for task in team):
        os.sched_yield()
    counts = [sleeps(task) for task in team]
    for _ in range(200):
        rg.batch_norm_forward(x, num_threads=2)
    print([now - then for now, then in zip(map(sleeps, team), counts)][1:])
"""


@linux
def test_a_call_wakes_only_the_threads_that_take_part() -> None:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + textwrap.dedent(IDLE)
    done = run(script)
    assert (done.returncode, done.stdout) == (0, f"{[0] * 6}\n"), done.stderr


# ---- what random calls have found ------------------------------------------------------------------------------------


def test_gradient_of_a_table_with_reversed_rows_stays_inside_its_buffer() -> None:
    rng = np.random.default_rng(0)
    table, x = rng.normal(size=(7, 3)).astype(np.float32), rng.integers(0, 7, (5, 5))
    weights = rg.LstmWeights(rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32))
    cache = rg.lstm_forward(x, weights, table=table).cache
    assert cache is not None
    dy = rng.normal(size=(5, 5, 2)).astype(np.float32)
    expected = rg.lstm_backward(dy, cache).dx
    memory = np.full((60, 3), 7, np.float32)
    rg.lstm_backward(dy, cache, out={"dx": memory[20:27][::-1]})
    np.testing.assert_array_equal(memory[20:27][::-1], expected)
    assert (memory[:20] == 7).all()
    assert (memory[27:] == 7).all()


def test_running_statistics_are_disjoint_from_the_arrays_of_the_pass() -> None:
    memory = np.zeros(100, np.float32)
    x, running_var = np.arange(40, dtype=np.float32).reshape(8, 5), memory[60:65]
    y = memory[:40].reshape(8, 5)
    with pytest.raises(ValueError, match=r"^batch_norm_forward: running_mean .* overlaps out "):
        rg.batch_norm_forward(x, out=y, running_mean=memory[38:43], running_var=running_var)
    with pytest.raises(ValueError, match=r"^batch_norm_forward: running_mean .* overlaps x "):
        rg.batch_norm_forward(x, running_mean=x[3], running_var=running_var)
    with pytest.raises(ValueError, match=r"^batch_norm_forward: running_mean .* overlaps gamma "):
        rg.batch_norm_forward(x, memory[70:75], running_mean=memory[74:79], running_var=running_var)
    repeated = np.lib.stride_tricks.as_strided(memory, (5,), (0,))
    with pytest.raises(ValueError, match=r"^instance_norm_forward: running_var overlaps itself"):
        rg.instance_norm_forward(x[..., None], running_mean=memory[80:85], running_var=repeated)
    with pytest.raises(ValueError, match=r"^batch_norm_forward: running_mean .* overlaps x "):
        rg.batch_norm_forward(x, b"no array", running_mean=x[3], running_var=running_var)
    assert not memory.any()
    np.testing.assert_array_equal(x.ravel(), np.arange(40))


def test_combine_statistics_leaves_its_arguments_alone_and_checks_them() -> None:
    mean, var = np.array([1.0, 2.0]), np.array([0.5, 0.25])
    count = np.array(3)
    total = rg.combine_statistics([rg.NormStatistics(count, mean, var), rg.NormStatistics(2, mean + 1, var)])
    assert (int(count), total.count) == (3, 5)
    np.testing.assert_allclose(total.mean, mean + 0.4)
    np.testing.assert_allclose(total.var, var + 0.4 * 0.6)
    with pytest.raises(TypeError, match=r"^combine_statistics: parts\[0\] must be NormStatistics, not int"):
        rg.combine_statistics([3])
    with pytest.raises(ValueError, match=r"^combine_statistics: parts\[1\]\.count is -1, must be at least 0"):
        rg.combine_statistics([total, rg.NormStatistics(-1, mean, var)])
    with pytest.raises(ValueError, match=r"^combine_statistics: parts disagree in shape: \(2,\) and \(\)"):
        rg.combine_statistics([total, rg.NormStatistics(1, np.array(1.0), np.array(1.0))])


def test_statistics_of_one_set_keep_their_shape() -> None:
    x = np.arange(16, dtype=np.float32)
    _, cache = rg.layer_norm_forward(x, axis=0, mean=np.float64(7.5), var=np.float64(21.25))
    assert cache.mean.shape == cache.var.shape == ()


def test_cache_size_of_a_ragged_batch_needs_no_array_of_steps() -> None:
    long = rg.lstm_cache_size(2**40, 2, 15, 3, lengths=[13, 5])
    assert long == rg.lstm_cache_size(13, 2, 15, 3, lengths=[13, 5]) < rg.lstm_cache_size(13, 2, 15, 3)
    assert rg.lstm_cache_size(3, 4, 15, 3, batch_sizes=[4, 2, 1]) == rg.lstm_cache_size(7, 1, 15, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, s: rg.adam_step([a], [a], None, [s], step=1), TypeError, "adam_step: first_moments is None"),
        (lambda a, s: rg.rmsprop_step([a], [a], None), TypeError, "rmsprop_step: squares is None"),
        (
            lambda a, s: rg.adam_step([a], [s], [a.tobytes()], [s], step=1),
            TypeError,
            r"adam_step: first_moments\[0\] must be an ndarray, not bytes",
        ),
        (
            lambda a, s: rg.layer_norm_backward(a, rg.layer_norm_forward(a)[1], accumulate="yes"),
            ValueError,
            "layer_norm_backward: accumulate=True adds to buffers",
        ),
        (
            lambda a, s: rg.layer_norm_backward(a, rg.layer_norm_forward(a)[1], accumulate=[], out={"dx": s}),
            TypeError,
            "layer_norm_backward: accumulate must be True or False, not list",
        ),
        (
            lambda a, s: rg.layer_norm_backward(a, rg.layer_norm_forward(a)[1], need=[["dx"]]),
            TypeError,
            "layer_norm_backward: need must be a sequence of names",
        ),
        (lambda a, s: rg.layer_norm_forward(a, eps=10**400), ValueError, "layer_norm_forward: eps is too large"),
        (
            lambda a, s: rg.lstm_cache_size(1, 1, 1, 1, dtype="text"),
            TypeError,
            "lstm_cache_size: dtype is 'text'",
        ),
    ],
)
def test_errors_name_the_function_and_the_argument(call: Any, error: type[Exception], message: str) -> None:
    array, state = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(error, match=f"^{message}"):
        call(array, state)
    assert (array == 1).all()
    assert not state.any()


def test_overlap_where_the_statistics_are_single_numbers() -> None:
    memory = np.arange(3, dtype=np.float32)
    with pytest.raises(ValueError, match=r"^layer_norm_forward: out .* overlaps x "):
        rg.layer_norm_forward(memory[::-1], axis=0, out=memory)
    np.testing.assert_array_equal(memory, np.arange(3))


def test_empty_arrays_may_be_anywhere() -> None:
    """NumPy calls an array without elements aligned, whatever its address."""
    memory = np.zeros(64, np.uint8)
    empty, other = (np.ndarray((0, 7), np.float64, memory, offset) for offset in (2, 3))
    assert rg.global_norm([empty, np.full(4, 2.0)]) == 4.0
    rg.sgd_step([empty], [other], learning_rate=0.1)
    assert rg.linear_forward(empty, np.ones((3, 7))).shape == (0, 3)
    assert not memory.any()


@pytest.mark.parametrize("training", [False, True])
def test_no_steps_carry_the_states_of_every_layer(training: bool) -> None:
    """In a fresh process: nothing has made scratch yet, and without a cache there is no other memory either."""
    script = f"""
        import numpy as np
        import retrograd as rg

        weights = [rg.LstmWeights(np.ones((8, n), np.float32), np.ones((8, 2), np.float32)) for n in (3, 3, 4, 4, 4, 4)]
        h0, c0 = (np.arange(24, dtype=np.float32).reshape(6, 2, 2) + k for k in (1, 50))
        out = {{name: np.full((6, 2, 2), 7, np.float32) for name in ("hn", "cn")}}
        rg.lstm_forward(np.ones((0, 2, 3), np.float32), weights, h0, c0, bidirectional=True,
                        training={training}, out=out)
        print(np.array_equal(out["hn"], h0), np.array_equal(out["cn"], c0))
    """
    done = run(script)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
