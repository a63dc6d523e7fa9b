"""BNNS normalization filters: parameters, the client's allocator, and what a filter keeps from call to call."""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from support.bnns import Allocator, describe, fails, image, normal
from support.bnns_norm import Layer, tanh

# ---- parameters, memory, threads (sections 1, 10, 13) ----------------------------------------------------------------


def test_null_parameters_are_one_and_zero() -> None:
    x = normal(4, 3, 2, 5)
    plain = Layer("batch", (3, 2, 5)).forward(x)
    assert np.array_equal(Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).forward(x), plain)
    assert np.array_equal(Layer("batch", (3, 2, 5), beta=np.zeros(3, np.float32)).forward(x), plain)


def test_client_memory_is_read_at_every_call_with_the_flag_only() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    for flags in (0, bnns.BNNSFlagsUseClientPtr):
        gamma = np.ones(3, np.float32)
        layer = Layer("batch", (3, 2, 5), gamma=gamma, parameters=bnns.BNNSFilterParameters(flags))
        y, (dx, *_) = layer.forward(x), layer.gradients(dy, x, (3,))
        gamma[:] = 2
        factor = 2 if flags else 1
        assert np.allclose(layer.forward(x), factor * y, rtol=1e-6)
        assert np.allclose(layer.gradients(dy, x, (3,))[0], factor * dx, rtol=1e-6)


def test_parameters_of_any_type_and_stride() -> None:
    x = normal(4, 3, 2, 5)
    gamma = np.array([1.5, -0.25, 2.0], np.float32)
    expected = Layer("batch", (3, 2, 5), gamma=gamma).forward(x)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert np.array_equal(Layer("batch", (3, 2, 5), gamma=gamma.astype(dtype)).forward(x), expected)
    dy = normal(4, 3, 2, 5, seed=1)
    plain = Layer("batch", (3, 2, 5), gamma=gamma)
    plain.forward(x)
    wanted = plain.gradients(dy, x, (3,))
    spread = np.zeros(6, np.float32)
    spread[::2] = gamma
    odd = np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32)
    odd[:] = gamma
    for values in (spread[::2], odd):
        for flags in (0, bnns.BNNSFlagsUseClientPtr):
            layer = Layer("batch", (3, 2, 5), gamma=values, parameters=bnns.BNNSFilterParameters(flags))
            assert np.array_equal(layer.forward(x), expected)
            for got, want in zip(layer.gradients(dy, x, (3,)), wanted, strict=True):
                assert np.array_equal(got, want)


@pytest.mark.parametrize("hint", [0, 1, 2, 5, 2**63, bnns.SIZE_MAX])
def test_the_number_of_threads_is_a_hint(hint: int) -> None:
    x = normal(4, 3, 2, 5)
    y = Layer("batch", (3, 2, 5), parameters=bnns.BNNSFilterParameters(0, hint)).forward(x)
    assert np.array_equal(y, Layer("batch", (3, 2, 5)).forward(x))


def test_memory_comes_from_the_clients_allocator_and_goes_back() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    allocator = Allocator()
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    assert [len(block) for block in allocator.given] == [12]
    y = layer.forward(x)
    assert len(allocator.given) == 2
    assert len(allocator.given[1]) >= x.nbytes
    layer.forward(x)
    assert len(allocator.given) == 2  # kept from pass to pass
    assert np.array_equal(y, Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).forward(x))
    layer.gradients(dy, y, (3,))
    bnns.BNNSFilterDestroy(layer.filter)
    bnns.BNNSFilterDestroy(layer.filter)
    assert len(allocator.freed) == len(allocator.given)


def test_garbage_collection_gives_memory_back() -> None:
    allocator = Allocator()
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    layer.forward(normal(4, 3, 2, 5))
    del layer
    gc.collect()
    assert len(allocator.freed) == len(allocator.given) == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_an_allocator_that_fails(limit: int) -> None:
    allocator = Allocator(limit)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=allocator.parameters())
    assert layer.made is (limit == 1)
    if layer.made:
        x = normal(4, 3, 2, 5)
        y = np.full_like(x, 7)
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True) == -1
        assert (y == 7).all()
    assert "alloc_memory returned 12" in (bnns.last_error() or "")
    del layer
    gc.collect()
    assert len(allocator.freed) == len(allocator.given)


@pytest.mark.parametrize(
    "alloc",
    [
        lambda *_: 0,
        lambda *_: 1 / 0,
        lambda m, a, s: m.__setitem__(0, bytes(s)) or 0,
        lambda m, a, s: m.__setitem__(0, bytearray(1)) or 0,
        5,
    ],
    ids=["nothing", "raises", "read-only", "short", "no function"],
)
def test_an_allocator_that_misbehaves(alloc: Any) -> None:
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=bnns.BNNSFilterParameters(0, 0, alloc))
    assert not layer.made


def test_an_allocator_that_gives_a_block_twice_or_a_bad_one() -> None:
    block, given, freed = bytearray(4096), [], []

    def same(memptr: Any, alignment: int, size: int) -> int:
        memptr[0] = block
        return 0

    twice = bnns.BNNSFilterParameters(0, 0, same, freed.append)
    ones = np.ones(3, np.float32)
    assert not Layer("batch", (3, 2, 5), gamma=ones, beta=ones, parameters=twice).made
    assert "twice" in (bnns.last_error() or "")

    def short(memptr: Any, alignment: int, size: int) -> int:
        given.append(bytearray(size - 1))
        memptr[0] = given[-1]
        return 0

    gc.collect()  # what the first filter leaves in a cycle
    freed.clear()
    assert not Layer(
        "batch", (3, 2, 5), gamma=ones, parameters=bnns.BNNSFilterParameters(0, 0, short, freed.append)
    ).made
    assert freed == given


def test_an_allocator_of_ctypes_without_a_prototype() -> None:
    """Sizes are passed as size_t, and arrays over the memory keep it."""
    libc = ctypes.CDLL(None)
    sizes = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    def count(memptr: int, alignment: int, size: int) -> int:
        sizes.append(size)
        return 12

    big = Layer("batch", (3, 2**15, 2**15), parameters=bnns.BNNSFilterParameters(0, 0, count))
    big.filter.arena._alloc = count
    with pytest.raises(ValueError, match="returned 12"):
        big.filter.arena.allocate((2**32 + 16,), np.dtype(np.uint8))
    assert sizes == [2**32 + 16]
    layer = Layer(
        "batch",
        (3, 2, 5),
        gamma=np.ones(3, np.float32),
        parameters=bnns.BNNSFilterParameters(0, 0, libc.posix_memalign, libc.free),
    )
    x = normal(4, 3, 2, 5)
    assert np.array_equal(layer.forward(x), Layer("batch", (3, 2, 5)).forward(x))


def test_a_free_function_of_another_kind_does_no_harm() -> None:
    free = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_double), ctypes.c_int)(lambda *_: None)
    allocator = Allocator()
    parameters = bnns.BNNSFilterParameters(0, 0, allocator.alloc, free)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=parameters)
    layer.forward(normal(4, 3, 2, 5))
    bnns.BNNSFilterDestroy(layer.filter)


def test_an_allocator_of_ctypes() -> None:
    libc = ctypes.CDLL(None)
    count = []
    alloc_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)

    @alloc_type
    def alloc(memptr: Any, alignment: int, size: int) -> int:
        count.append(size)
        return int(libc.posix_memalign(memptr, ctypes.c_size_t(alignment), ctypes.c_size_t(size)))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(pointer: int) -> None:
        count.pop()
        libc.free(ctypes.c_void_p(pointer))

    layer = Layer(
        "batch", (3, 2, 5), gamma=np.ones(3, np.float32), parameters=bnns.BNNSFilterParameters(0, 0, alloc, free)
    )
    x = normal(4, 3, 2, 5)
    assert np.array_equal(layer.forward(x), Layer("batch", (3, 2, 5)).forward(x))
    assert len(count) == 2
    bnns.BNNSFilterDestroy(layer.filter)
    assert not count


def test_inference_from_several_threads() -> None:
    layer = Layer("batch", (3, 8, 8), mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32))
    inputs = [normal(4, 3, 8, 8, seed=seed) for seed in range(40)]
    expected = [layer.forward(x, training=False) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(lambda x: layer.forward(x, training=False), inputs), expected, strict=True):
            assert np.array_equal(got, want)


# ---- changes between calls, and what is kept -------------------------------------------------------------------------


def test_every_change_of_a_descriptor_is_noticed_by_the_next_call() -> None:
    """What a call has worked out is kept with its descriptors, and must not outlive a change."""
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32), activation=tanh())
    y = layer.forward(x)
    dx, dgamma, dbeta = layer.gradients(dy, y, (3,))
    results = [np.empty_like(x), np.empty(3, np.float32), np.empty(3, np.float32)]
    out_delta, in_delta = image((3, 2, 5), dy), image((3, 2, 5), results[0])
    gamma_delta, beta_delta = describe(results[1]), describe(results[2])

    def run(out: Any = y, gamma: Any = gamma_delta, beta: Any = beta_delta, stride: int = 30) -> int:
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, stride, out, 30, out_delta, 30, beta, gamma
        )

    for _ in range(2):  # planned, then remembered
        assert run() == 0
        assert np.array_equal(results[0], dx)
    assert run(gamma=beta_delta, beta=gamma_delta) == 0  # the same descriptors in other places
    assert np.array_equal(results[1], dbeta)
    assert np.array_equal(results[2], dgamma)
    assert run() == 0
    elsewhere = np.empty_like(x)
    in_delta.data = elsewhere
    assert run() == 0
    assert np.array_equal(elsewhere, dx)
    in_delta.flags = 1
    assert run() == 0
    assert np.allclose(elsewhere, 2 * dx, rtol=1e-6)
    in_delta.flags = 0
    out_delta.data = 2 * dy
    assert run() == 0
    assert np.allclose(elsewhere, 2 * dx, rtol=1e-5)
    assert run(out=y[:3]) == -1
    assert (
        bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter,
            4.0,
            in_delta,
            30,
            y,
            30,
            out_delta,
            30,
            beta_delta,
            gamma_delta,  # type: ignore[arg-type]
        )
        == -1
    )
    assert run(out=y.copy()) == 0
    results[1][:] = 7
    assert run(gamma=None) == 0
    assert (results[1] == 7).all()
    assert run() == 0
    assert (results[1] != 7).all()
    assert run(stride=29) == -1
    in_delta.size[0] = 4
    assert run() == -1
    in_delta.size[0] = 5
    assert run() == 0
    results[1].flags.writeable = False
    fails(run(), "gamma_delta.data is read-only")
    results[1].flags.writeable = True
    assert run() == 0
    other = Layer("batch", (3, 2, 5), activation=tanh())
    other.forward(2 * x)
    layer.filter, first = other.filter, layer.filter
    assert run() == 0  # another filter has plans of its own
    layer.filter = first
    layer.forward(x[:3])
    assert run() == -1


def test_destroying_a_filter_releases_its_memory() -> None:
    layer = Layer("batch", (64, 32, 32))
    tracemalloc.start()
    layer.forward(normal(16, 64, 32, 32))
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    bnns.BNNSFilterDestroy(layer.filter)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert before - after >= 16 * 64 * 32 * 32 * 4


def test_nothing_of_a_call_is_kept_alive() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    dx = image((3, 2, 5), np.empty_like(x))
    out_delta = image((3, 2, 5), dy)
    y, counts = bytearray(x.nbytes), set()
    for _ in range(50):
        filter = Layer("batch", (3, 2, 5), activation=tanh()).filter
        assert bnns.BNNSNormalizationFilterApplyBatch(filter, 4, x, 30, y, 30, True) == 0
        status = bnns.BNNSNormalizationFilterApplyBackwardBatch(filter, 4, dx, 30, y, 30, out_delta, 30, None, None)
        assert status == 0
        bnns.BNNSFilterDestroy(filter)
        counts.add(sys.getrefcount(dy))
    y.append(0)  # no one holds its buffer
    assert len(counts) == 1  # one plan, not fifty


def test_tensors_that_move_their_memory_are_looked_at_anew(torch: Any) -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    gamma, result = torch.ones(3), torch.zeros(x.shape)
    parameters = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    layer = Layer("batch", (3, 2, 5))
    layer.parameters.gamma_desc = image((3,), gamma)
    layer.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer.parameters, parameters)
    in_delta, out_delta = image((3, 2, 5), result), image((3, 2, 5), dy)

    def run() -> np.ndarray:
        y = layer.forward(x)
        status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, 30, y, 30, out_delta, 30, None, None
        )
        assert status == 0, bnns.last_error()
        return y

    y = run()
    dx = result.numpy().copy()
    gamma.data, result.data = torch.full((3,), 2.0), torch.zeros(x.shape)
    assert np.allclose(run(), 2 * y, rtol=1e-6)
    assert np.allclose(result.numpy(), 2 * dx, rtol=1e-6)


def test_arrays_may_be_given_other_shapes_and_types_between_calls() -> None:
    """A plan that is kept has views of its own: of the memory, whatever the client's array says of it by then."""
    x, dy, dx = normal(4, 6), normal(4, 6, seed=1), np.zeros((4, 6), np.float32)
    layer = Layer("batch", (6,), activation=tanh())
    in_delta, out_delta = image((6,), dx), image((6,), dy)
    y = layer.forward(x)

    def run() -> int:
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            layer.filter, 4, in_delta, 6, y, 6, out_delta, 6, None, None
        )

    assert run() == 0
    before = dx.copy()
    dx[...] = 0
    dx.shape = (2, 12)
    dx.dtype = dy.dtype = np.dtype(np.int32)
    assert run() == 0
    assert np.array_equal(dx.view(np.float32).reshape(4, 6), before)
    other = np.zeros(24, np.float32)
    x.shape = (24,)  # neither does forward look at the shape
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 6, other, 6, True) == 0
    assert np.array_equal(other.reshape(4, 6), y)


def test_numbers_that_are_no_integers_are_refused_by_a_remembered_call_too() -> None:
    layer, dx = Layer("batch", (6,)), np.full((4, 6), 7, np.float32)
    layer.forward(normal(4, 6))
    deltas = image((6,), dx), image((6,), normal(4, 6, seed=1))
    for batch, stride, status in ((4, 6, 0), (4.0, 6.0, -1), (4, 6, 0), (4, 6.0, -1), (np.int64(4), np.int64(6), 0)):
        dx[...] = 7
        call: tuple[Any, ...] = (layer.filter, batch, deltas[0], stride, None, stride, deltas[1], stride, None, None)
        assert bnns.BNNSNormalizationFilterApplyBackwardBatch(*call) == status
        assert (dx == 7).all() == (status != 0)


OVERLAPS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda memory: memory,
    "a view": lambda memory: memory[:].reshape(4, 6),
    "a view of a view": lambda memory: memory.view(np.uint8)[:].view(np.float32),
    "a buffer": memoryview,
    "an array over a buffer": lambda memory: np.frombuffer(memoryview(memory), np.float32).reshape(4, 6),
    "an array over an address": lambda memory: np.ctypeslib.as_array(
        (ctypes.c_float * 24).from_address(memory.ctypes.data)
    ).reshape(4, 6),
}


@pytest.mark.parametrize("part", ["gamma", "beta", "mean", "variance"])
@pytest.mark.parametrize("made", OVERLAPS)
def test_an_output_over_the_clients_own_is_seen_however_it_was_made(part: str, made: str) -> None:
    memory = np.ones(24, np.float32)
    own: dict[str, Any] = {name: np.ones(6, np.float32) for name in ("gamma", "beta", "mean", "variance")}
    own[part] = memory[9:15]
    layer = Layer("batch", (6,), parameters=bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr), **own)
    x, dy = normal(4, 6), normal(4, 6, seed=1)
    y = layer.forward(x)  # one that lies elsewhere
    gradients = layer.gradients(dy, y, (6,))
    before = memory.copy()
    for training in (True, False):
        out = OVERLAPS[made](memory)
        fails(bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 6, out, 6, training), "out overlaps")
    assert np.array_equal(memory, before)
    for got, want in zip(layer.gradients(dy, y, (6,)), gradients, strict=True):
        assert np.array_equal(got, want)


def test_an_output_beside_the_clients_own_in_one_array() -> None:
    memory = np.zeros(36, np.float32)
    memory[24:30] = 1
    flags = bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    layer = Layer(
        "batch", (6,), gamma=memory[24:30], mean=memory[30:], variance=np.ones(6, np.float32), parameters=flags
    )
    other = Layer("batch", (6,), gamma=np.ones(6, np.float32))
    x = normal(4, 6)
    assert np.array_equal(layer.forward(x, y=memory[:24].reshape(4, 6)), other.forward(x))
    assert np.array_equal(memory[24:30], np.ones(6))


def test_statistics_made_read_only_and_writable_again_between_passes() -> None:
    mean, variance = np.zeros(3, np.float32), np.ones(3, np.float32)
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=variance)
    x = normal(4, 3, 2, 5)
    layer.forward(x)
    after = mean.copy()
    for array in (mean, variance):
        array.flags.writeable = False
        y = np.full(x.shape, 7, np.float32)
        fails(bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True), "read-only")
        assert (y == 7).all()
        layer.forward(x, training=False)
        array.flags.writeable = True
    assert np.array_equal(mean, after)
    layer.forward(x)
    assert not np.array_equal(mean, after)


def test_moving_statistics_that_move_are_looked_at_anew(torch: Any) -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    layer = Layer("batch", (3, 2, 5))
    layer.parameters.moving_mean_desc, layer.parameters.moving_variance_desc = image((3,), mean), image((3,), variance)
    layer.filter = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer.parameters)
    x = normal(4, 3, 2, 5)
    layer.forward(x)
    first = mean.clone()
    mean.data = torch.zeros(3)
    layer.forward(x)
    assert torch.equal(mean, first)


def test_a_filter_keeps_no_array_of_a_forward_pass() -> None:
    x, y = normal(4, 6), np.empty((4, 6), np.float32)
    layer = Layer("batch", (6,), activation=tanh())
    layer.forward(x, y=y)
    references = [weakref.ref(array) for array in (x, y)]
    del x, y
    assert [reference() for reference in references] == [None, None]
    memory = bytearray(96)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, memory, 6, memory, 6, True) == 0
    memory.extend(b"more")  # which it could not if someone had a view of it
    short = memory[:92]
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, short, 6, short, 6, True) == -1
