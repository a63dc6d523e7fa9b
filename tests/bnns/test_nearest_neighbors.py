"""Nearest neighbours: BNNSNearestNeighbors and Swift's NearestNeighbors."""

from __future__ import annotations

import math
import re
import threading
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import Allocator, created, fails
from support.bnns_inside import nearest_neighbors

Descriptor = bnns.BNNSNDArrayDescriptor
Array = np.ndarray[Any, Any]
F32, F16, INT32 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16, bnns.BNNSDataTypeInt32
DTYPES = {F32: np.float32, F16: np.float16}
# Apple's samples, of its page.
POINTS = np.array([[1, 2], [7, 2], [3, 4], [8, 4], [3, 7], [7, 7], [2, 8], [2, 5]], np.float32)


def loaded(samples: Array, neighbors: int, capacity: int | None = None) -> Any:
    data_type = F16 if samples.dtype == np.float16 else F32
    knn = created(bnns.BNNSCreateNearestNeighbors(capacity or len(samples), samples.shape[1], neighbors, data_type))
    assert bnns.BNNSNearestNeighborsLoad(knn, len(samples), samples) == 0, bnns.last_error()
    return knn


def found(knn: Any, number: int = -1) -> tuple[Array, Array]:
    rows = knn.count if number < 0 else 1
    indices = np.full((rows, knn.neighbors), 77, np.int32)
    distances = np.full((rows, knn.neighbors), 77, knn.dtype)
    assert bnns.BNNSNearestNeighborsGetInfo(knn, number, indices, distances) == 0, bnns.last_error()
    return (indices, distances) if number < 0 else (indices[0], distances[0])


def oracle(samples: Array, number: int, neighbors: int) -> tuple[list[int], list[float]]:
    """By exact fractions: the sample itself, then by distance, then by index."""
    points = [[Fraction(value) for value in row.tolist()] for row in samples]
    squares = [sum((a - b) ** 2 for a, b in zip(point, points[number], strict=True)) for point in points]
    order = sorted(range(len(points)), key=lambda i: (i != number, squares[i], i))[:neighbors]
    missing = neighbors - len(order)
    distances = [math.sqrt(squares[i]) for i in order]
    return order + [-1] * missing, distances + [math.inf] * missing


def test_neighbours_as_apple_prints_them() -> None:
    indices, distances = found(loaded(POINTS, 4), 7)
    assert indices.tolist() == [7, 2, 4, 6]
    assert distances.tolist() == np.float32([0, 1.4142135, 2.236068, 3]).tolist()


@pytest.mark.parametrize("data_type", [F32, F16])
@pytest.mark.parametrize(
    ("count", "features", "neighbors"),
    [(1, 1, 1), (1, 3, 4), (2, 1, 2), (5, 7, 3), (31, 2, 31), (37, 13, 5), (64, 1, 9)],
)
def test_against_exact_distances(data_type: int, count: int, features: int, neighbors: int) -> None:
    """On a grid of few points, so that there are duplicates and ties."""
    rng = np.random.default_rng(count)
    samples = rng.integers(-3, 4, (count, features)).astype(DTYPES[data_type])
    knn = loaded(samples, neighbors)
    indices, distances = found(knn)
    for number in range(count):
        at, exact = oracle(samples, number, neighbors)
        assert indices[number].tolist() == at
        np.testing.assert_array_equal(distances[number], np.array(exact).astype(DTYPES[data_type]))
        one = found(knn, number)
        np.testing.assert_array_equal(one[0], indices[number])
        np.testing.assert_array_equal(one[1], distances[number])


def test_samples_far_from_the_origin_lose_no_digits() -> None:
    """|a|^2 + |b|^2 - 2 a b would have no correct digit."""
    rng = np.random.default_rng(0)
    offsets = np.array([1e7, -1e7, 16e6, 1e6, -9e6])
    samples = (rng.integers(0, 9, (40, 5)) + offsets).astype(np.float32)
    indices, distances = found(loaded(samples, 40))
    for number in range(40):
        at, exact = oracle(samples, number, 40)
        assert indices[number].tolist() == at
        np.testing.assert_allclose(distances[number], exact, rtol=1e-7)


def test_distances_of_extreme_numbers() -> None:
    samples = np.array([[3e38], [-3e38], [1e-45], [0], [3e38]], np.float32)
    indices, distances = found(loaded(samples, 5))
    assert indices[3].tolist() == [3, 2, 0, 1, 4]
    np.testing.assert_array_equal(distances[3], np.float32([0, 1e-45, 3e38, 3e38, 3e38]))
    assert indices[0].tolist() == [0, 4, 2, 3, 1]
    assert distances[0, 4] == np.inf  # 6e38: the index is that of a sample, unlike that of a missing one


def test_neighbours_of_nan_and_infinity() -> None:
    """NaN is farther than infinity; what is missing comes behind; the distance of a sample from itself is 0."""
    inf, nan = np.inf, np.nan
    samples = np.array([[0, 0], [nan, 0], [1, 0], [inf, 0], [nan, 5], [-inf, 0], [inf, 2]], np.float32)
    indices, distances = found(loaded(samples, 8))
    assert indices.tolist() == [
        [0, 2, 3, 5, 6, 1, 4, -1],
        [1, 0, 2, 3, 4, 5, 6, -1],
        [2, 0, 3, 5, 6, 1, 4, -1],
        [3, 0, 2, 5, 1, 4, 6, -1],  # 6 is infinity too: the difference is NaN
        [4, 0, 1, 2, 3, 5, 6, -1],
        [5, 0, 2, 3, 6, 1, 4, -1],
        [6, 0, 2, 5, 1, 3, 4, -1],
    ]
    np.testing.assert_array_equal(distances[0], [0, 1, inf, inf, inf, nan, nan, inf])
    np.testing.assert_array_equal(distances[1], [0, *[nan] * 6, inf])
    np.testing.assert_array_equal(distances[3], [0, inf, inf, inf, nan, nan, nan, inf])


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and the same choice among ties, whatever is computed at a time."""
    rng = np.random.default_rng(1)
    samples = np.concatenate([rng.normal(size=(20, 11)), rng.normal(size=(1, 11)).repeat(13, 0)]).astype(np.float32)
    rng.shuffle(samples)
    expected = found(loaded(samples, 17))
    for differences, distances in ((1, 1), (11, 7), (50, 33), (333, 5), (50, 100), (5000, 7), (5000, 1000)):
        monkeypatch.setattr(nearest_neighbors, "_DIFFERENCES", differences)
        monkeypatch.setattr(nearest_neighbors, "_DISTANCES", distances)
        for got, right in zip(found(loaded(samples, 17)), expected, strict=True):
            np.testing.assert_array_equal(got, right)


def test_samples_of_several_loads() -> None:
    rng = np.random.default_rng(2)
    samples = rng.normal(size=(100, 3)).astype(np.float32)
    knn = bnns.BNNSCreateNearestNeighbors(100, 3, 6, F32)
    first = 0
    for number in (1, 2, 0, 40, 57):
        part = samples[first : first + number].copy()
        assert bnns.BNNSNearestNeighborsLoad(knn, number, part) == 0, bnns.last_error()
        part[...] = 0  # the samples were copied
        first += number
    for got, right in zip(found(knn), found(loaded(samples, 6)), strict=True):
        np.testing.assert_array_equal(got, right)
    assert bnns.BNNSNearestNeighborsLoad(knn, 1, samples) == -1
    assert "n_new_samples is 1, but with 100 samples loaded there is room for 0 of max_n_samples, which is 100" in (
        bnns.last_error() or ""
    )


def test_too_many_samples_are_refused_and_change_nothing() -> None:
    knn = loaded(POINTS[:5], 8, capacity=7)
    before = found(knn)
    assert bnns.BNNSNearestNeighborsLoad(knn, 3, POINTS) == -1
    assert "n_new_samples is 3, but with 5 samples loaded there is room for 2" in (bnns.last_error() or "")
    fails(bnns.BNNSNearestNeighborsLoad(knn, 2, POINTS[:1]), "data_ptr has 8 bytes")
    for got, right in zip(found(knn), before, strict=True):
        np.testing.assert_array_equal(got, right)
    assert bnns.BNNSNearestNeighborsLoad(knn, 2, POINTS[5:]) == 0
    indices, distances = found(knn, 6)
    assert indices.tolist() == [6, 4, 2, 5, 0, 3, 1, -1]
    assert distances[7] == np.inf


def test_one_result_alone_and_memory_around() -> None:
    knn = loaded(POINTS, 4)
    indices, distances = found(knn)
    wide, flat = np.full(40, 77, np.int32), np.full(40, 77, np.float32)
    assert bnns.BNNSNearestNeighborsGetInfo(knn, -1, wide[:32], None) == 0
    assert bnns.BNNSNearestNeighborsGetInfo(knn, -1, None, flat[:32]) == 0
    np.testing.assert_array_equal(wide[:32], indices.ravel())
    np.testing.assert_array_equal(flat[:32], distances.ravel())
    assert (wide[32:] == 77).all()
    assert (flat[32:] == 77).all()
    assert bnns.BNNSNearestNeighborsGetInfo(knn, 3, None, None) == 0
    raw = bytearray(16)
    assert bnns.BNNSNearestNeighborsGetInfo(knn, 3, raw, None) == 0
    np.testing.assert_array_equal(np.frombuffer(raw, np.int32), indices[3])


def test_nothing_loaded() -> None:
    knn = bnns.BNNSCreateNearestNeighbors(3, 2, 1, F32)
    assert bnns.BNNSNearestNeighborsGetInfo(knn, -1, np.empty(1, np.int32), None) == 0
    assert bnns.BNNSNearestNeighborsGetInfo(knn, 0, np.empty(1, np.int32), None) == -1
    assert "sample_number is 0, but 0 samples are loaded" in (bnns.last_error() or "")


def test_memory_is_bounded() -> None:
    """Not the 72 MB of all distances, nor the 576 MB of all differences."""
    samples = np.random.default_rng(0).normal(size=(3000, 8)).astype(np.float32)
    knn = loaded(samples, 3)
    indices = np.empty((3000, 3), np.int32)
    tracemalloc.start()
    try:
        assert bnns.BNNSNearestNeighborsGetInfo(knn, -1, indices, None) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6
    # Capacity alone takes no memory.
    assert bnns.BNNSCreateNearestNeighbors(2**31 - 1, 2**32 - 1, 2**32 - 1, F32) is not None


def test_samples_are_in_memory_of_the_clients_allocator() -> None:
    allocator = Allocator()
    knn = bnns.BNNSCreateNearestNeighbors(8, 2, 4, F32, allocator.parameters())
    for point in POINTS:
        assert bnns.BNNSNearestNeighborsLoad(knn, 1, point) == 0
        assert allocator.live == 1
    assert found(knn, 7)[0].tolist() == [7, 2, 4, 6]
    bnns.BNNSDestroyNearestNeighbors(knn)
    assert allocator.live == 0
    bnns.BNNSDestroyNearestNeighbors(knn)
    bnns.BNNSDestroyNearestNeighbors(None)
    for status in (
        bnns.BNNSNearestNeighborsLoad(knn, 1, POINTS),
        bnns.BNNSNearestNeighborsGetInfo(knn, 0, None, None),
    ):
        fails(status, "knn has been destroyed")


def test_threads_share_an_object() -> None:
    """Loads from several threads: every sample is there once."""
    knn = bnns.BNNSCreateNearestNeighbors(400, 1, 1, F32)
    values = np.arange(400, dtype=np.float32).reshape(4, 100)

    def load(row: Array) -> None:
        for value in row:
            assert bnns.BNNSNearestNeighborsLoad(knn, 1, np.array([value])) == 0
            found(knn, 0)

    threads = [threading.Thread(target=load, args=(row,)) for row in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert knn.count == 400
    assert sorted(knn._memory[:400, 0].tolist()) == list(range(400))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_n_samples": 0}, "max_n_samples is 0, must be at least 1"),
        ({"n_features": 0}, "n_features is 0, must be at least 1"),
        ({"n_neighbors": 0}, "n_neighbors is 0, must be at least 1"),
        ({"n_features": 2**32}, "n_features is 4294967296, which an unsigned int cannot hold"),
        ({"n_neighbors": -1}, "n_neighbors is -1, which"),
        ({"max_n_samples": 2**31}, "max_n_samples is 2147483648, must be at most 2147483647: indices are of type int"),
        ({"data_type": bnns.BNNSDataTypeBFloat16}, "data_type is BNNSDataTypeBFloat16; it must be Float32 or Float16"),
        ({"data_type": "float"}, "data_type is 'float'; it must be"),
        ({"filter_params": 1}, "filter_params is of type int"),
    ],
)
def test_objects_that_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    given = {"max_n_samples": 4, "n_features": 2, "n_neighbors": 3, "data_type": F32}
    assert bnns.BNNSCreateNearestNeighbors(**{**given, **changes}) is None
    assert re.search(f"BNNSCreateNearestNeighbors: {message}", bnns.last_error() or ""), bnns.last_error()


def test_calls_of_neighbours_fail_and_touch_nothing() -> None:
    knn = loaded(POINTS, 4)
    indices, distances = np.full(4, 77, np.int32), np.full(4, 77, np.float32)
    shared = np.full(4, 77, np.int32)
    for arguments, message in (
        ((None, 0, indices, distances), "knn is NULL"),
        ((object(), 0, indices, distances), "knn is of type object"),
        ((knn, 8, indices, distances), "sample_number is 8, but 8 samples are loaded"),
        ((knn, 2**31, indices, distances), "sample_number is 2147483648, which an int32_t cannot hold"),
        ((knn, 0.5, indices, distances), "sample_number is 0.5, must be an integer"),
        ((knn, -1, indices, distances), "indices has 16 bytes, but size=.* spans 128"),
        ((knn, 0, indices.astype(np.int64), distances), "indices has elements of type int64"),
        ((knn, 0, indices, distances.astype(np.float16)), "distances has elements of type float16"),
        ((knn, 0, shared, shared.view(np.float32)), "indices overlaps distances in memory"),
    ):
        assert bnns.BNNSNearestNeighborsGetInfo(*arguments) == -1, message
        assert re.search(message, bnns.last_error() or ""), bnns.last_error()
    read_only = indices.copy()
    read_only.flags.writeable = False
    fails(bnns.BNNSNearestNeighborsGetInfo(knn, 0, read_only, distances), "indices is read-only")
    for arguments, message in (
        ((knn, 1, None), "n_new_samples is 1, but with 8 samples loaded"),
        ((None, 1, POINTS), "knn is NULL"),
    ):
        fails(bnns.BNNSNearestNeighborsLoad(*arguments), message)
    empty = bnns.BNNSCreateNearestNeighbors(8, 2, 4, F32)
    fails(bnns.BNNSNearestNeighborsLoad(empty, 1, None), "data_ptr is NULL")
    fails(bnns.BNNSNearestNeighborsLoad(empty, 1, POINTS.astype(np.float64)), "data_ptr has elements of type float64")
    assert (indices == 77).all()
    assert (distances == 77).all()
    assert (shared == 77).all()
    bnns.BNNSDestroyNearestNeighbors(POINTS)  # type: ignore[arg-type]
    assert "knn is of type ndarray" in (bnns.last_error() or "")
    bnns.BNNSFilterDestroy(knn)  # it is no filter
    assert "not a filter" in (bnns.last_error() or "")
    assert bnns.BNNSNearestNeighborsGetInfo(knn, 0, indices, distances) == 0


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_swifts_nearest_neighbors() -> None:
    knn = BNNS.NearestNeighbors(capacity=8, dimensionCount=2, neighborCount=4, dataType=F32)
    knn.append(samples=BNNS.Shape.matrixRowMajor(2, 5).descriptor(POINTS[:5]))
    knn.append(samples=BNNS.Shape.vector(6).descriptor(POINTS[5:]))
    indices = Descriptor.allocate(repeating=np.int32(0), shape=BNNS.Shape.vector(4))
    distances = Descriptor.allocate(repeating=0, shape=BNNS.Shape.vector(4))
    knn.apply(index=7, outputIndices=indices, outputDistances=distances)
    assert indices.makeArray(of=np.int32).tolist() == [7, 2, 4, 6]
    assert distances.makeArray(of=float).tolist() == np.float32([0, 1.4142135, 2.236068, 3]).tolist()
    every = Descriptor.allocate(repeating=np.int32(0), shape=BNNS.Shape.matrixRowMajor(4, 8))
    far = Descriptor.allocate(repeating=0, shape=BNNS.Shape.matrixRowMajor(4, 8))
    knn.apply(index=None, outputIndices=every, outputDistances=far)
    assert every.view()[7].tolist() == [7, 2, 4, 6]
    assert every.view()[:, 0].tolist() == list(range(8))
    for changes, message in (
        ({"index": 8}, "sample_number is 8, but 8 samples are loaded"),
        ({"index": -1}, "index is -1, must be at least 0"),
        ({"index": None}, "outputIndices has 4 elements, expected 32"),
        (
            {"outputIndices": distances},
            "outputIndices has elements of BNNSDataTypeFloat32, must have BNNSDataTypeInt32",
        ),
        ({"outputDistances": Descriptor(layout=0x10000, size=(4,), data_type=F32)}, "outputDistances has no data"),
        (
            {
                "outputDistances": Descriptor(
                    layout=0x10000, size=4, stride=2, data=np.empty(7, np.float32), data_type=F32
                )
            },
            r"outputDistances has stride \(2,\), must be contiguous",
        ),
    ):
        with pytest.raises(BNNS.Error, match=message):
            knn.apply(**{"index": 7, "outputIndices": indices, "outputDistances": distances, **changes})
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: BNNSNearestNeighborsLoad: n_new_samples is 3"):
        knn.append(samples=BNNS.Shape.vector(6).descriptor(POINTS[5:]))
    with pytest.raises(BNNS.Error, match="samples has 5 elements, which is not a multiple of dimensionCount, 2"):
        knn.append(samples=BNNS.Shape.vector(5).descriptor(POINTS))
    with pytest.raises(BNNS.Error, match="unableToCreateLayer: BNNSCreateNearestNeighbors: data_type is"):
        BNNS.NearestNeighbors(capacity=8, dimensionCount=2, neighborCount=4, dataType=INT32)
