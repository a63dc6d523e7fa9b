"""Random generators and the arrays that they fill."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from support.bnns import all_fail, created, describe, fails, not_created

AES = bnns.BNNSRandomGeneratorMethodAES_CTR
FLOAT_TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
INTEGER_TYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


def seeded(seed: int = 1) -> Any:
    return created(bnns.BNNSCreateRandomGeneratorWithSeed(AES, seed))


def uniform(generator: Any, *shape: int, a: float = 0, b: float = 1) -> np.ndarray:
    array = np.empty(shape, np.float32)
    assert bnns.BNNSRandomFillUniformFloat(generator, describe(array), a, b) == 0, bnns.last_error()
    return array


# ---- generators ------------------------------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_numbers() -> None:
    assert np.array_equal(uniform(seeded(5), 20), uniform(seeded(5), 20))
    others = [uniform(seeded(seed), 20) for seed in (0, 1, 2**63, 2**64 - 1)]
    others += [uniform(bnns.BNNSCreateRandomGenerator(AES), 20) for _ in range(2)]
    assert len({array.tobytes() for array in others}) == 6


def test_the_stream_is_always_the_same() -> None:
    """Written down, so that a program draws the same weights with every version."""
    assert uniform(seeded(5), 4, a=-1, b=2).tolist() == pytest.approx(
        [1.2012379, 0.7715619, -0.37657318, 0.33008927], rel=1e-7
    )


@pytest.mark.parametrize("sizes", [(7, 10), (1, 1, 1, 14), (4, 13), (16, 1)])
def test_how_arrays_are_cut_does_not_matter(sizes: tuple[int, ...]) -> None:
    generator = seeded()
    assert np.array_equal(np.concatenate([uniform(generator, n) for n in sizes]), uniform(seeded(), 17))


def test_a_state_continues_exactly() -> None:
    generator = seeded()
    uniform(generator, 5)
    size = bnns.BNNSRandomGeneratorStateSize(generator)
    state = bytearray(size + 3)
    assert bnns.BNNSRandomGeneratorGetState(generator, len(state), state) == 0
    following = uniform(generator, 9)
    for other in (generator, seeded(99), bnns.BNNSCreateRandomGenerator(AES)):
        assert bnns.BNNSRandomGeneratorSetState(other, size, bytes(state)) == 0
        assert np.array_equal(uniform(other, 9), following)


def test_what_generators_refuse() -> None:
    generator, state = seeded(), bytearray(24)
    not_created(bnns.BNNSCreateRandomGenerator(1), "method is 1, must be BNNSRandomGeneratorMethodAES_CTR")
    for seed in (-1, 2**64, "3", 1.5):
        not_created(bnns.BNNSCreateRandomGeneratorWithSeed(AES, seed), "seed is")  # type: ignore[arg-type]
    not_created(bnns.BNNSCreateRandomGenerator(AES, 3), "filter_params is of type int")  # type: ignore[arg-type]
    get, put = bnns.BNNSRandomGeneratorGetState, bnns.BNNSRandomGeneratorSetState
    for call, reason in (
        (lambda: get(generator, 23, state), "state_size is 23, but the state has 24 bytes"),
        (lambda: get(generator, 25, state), "state_size is 25, but the buffer has 24 bytes"),
        (lambda: get(generator, 24, None), "state is NULL"),
        (lambda: get(generator, 24, bytes(24)), "state is read-only"),
        (lambda: get(None, 24, state), "generator is NULL"),
        (lambda: put(generator, 23, state), "state_size is 23"),
        (lambda: put(generator, 24, state), "state is not one that BNNSRandomGeneratorGetState has written"),
        (lambda: put(3, 24, state), "generator is of type int"),  # type: ignore[arg-type]
    ):
        fails(call(), reason)  # type: ignore[no-untyped-call]
    assert not any(state)
    assert np.array_equal(uniform(generator, 3), uniform(seeded(), 3))  # nothing was drawn
    bnns.BNNSDestroyRandomGenerator(generator)
    bnns.BNNSDestroyRandomGenerator(generator)
    bnns.BNNSDestroyRandomGenerator(None)
    assert bnns.BNNSRandomGeneratorStateSize(generator) == 0
    assert "generator has been destroyed" in (bnns.last_error() or "")
    assert bnns.BNNSRandomGeneratorStateSize(None) == 0
    bnns.BNNSDestroyRandomGenerator(3)  # type: ignore[arg-type]
    assert "generator is of type int" in (bnns.last_error() or "")


def test_threads_share_a_generator() -> None:
    """Every number is drawn once, whoever draws it."""
    generator, drawn = seeded(), []

    def draw() -> None:
        for _ in range(50):
            drawn.append(uniform(generator, 31))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(np.sort(np.concatenate(drawn)), np.sort(uniform(seeded(), 50 * 4 * 31)))


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("a", "b"), [(0, 1), (-3, 5), (0.1, 0.11), (1, 1.01), (2, 2), (-65504, 65504)])
def test_uniform_floats_stay_in_their_interval(dtype: Any, a: float, b: float) -> None:
    array = np.empty(4096, dtype)
    assert bnns.BNNSRandomFillUniformFloat(seeded(), describe(array), a, b) == 0, bnns.last_error()
    values = array.astype(np.float64)
    a, b = float(np.float32(a)), float(np.float32(b))
    assert ((values >= a) & ((values < b) | (a == b))).all()
    if b - a >= 1:
        assert abs(values.mean() - (a + b) / 2) < 0.03 * (b - a)
        assert abs(values.std() - (b - a) / np.sqrt(12)) < 0.03 * (b - a)


@pytest.mark.parametrize("dtype", INTEGER_TYPES)
def test_uniform_integers(dtype: Any) -> None:
    """Half open, every value as likely as any other, at the ends of the type too."""
    limits = np.iinfo(dtype)
    array = np.empty(6000, dtype)
    assert bnns.BNNSRandomFillUniformInt(seeded(), describe(array), 3, 8) == 0
    counts = np.bincount(array.astype(np.int64), minlength=9)
    assert (counts[:3] == 0).all()
    assert counts[8] == 0
    assert (abs(counts[3:8] - 1200) < 150).all()
    low, high = limits.min, min(int(limits.max), 2**63 - 1)
    assert bnns.BNNSRandomFillUniformInt(seeded(), describe(array), low, high) == 0
    assert abs(array.astype(np.float64).mean() - (low + high) / 2) < 0.03 * (high - low)
    assert bnns.BNNSRandomFillUniformInt(seeded(), describe(array), high - 1, high) == 0
    assert (array == high - 1).all()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_normal_floats(dtype: Any) -> None:
    array = np.empty(40000, dtype)
    assert bnns.BNNSRandomFillNormalFloat(seeded(), describe(array), 1.5, 0.5) == 0
    standard = (array.astype(np.float64) - 1.5) / 0.5
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((standard**power).mean() - moment) < 0.1, power
    assert abs((np.abs(standard) < 1).mean() - 0.6827) < 0.01
    assert bnns.BNNSRandomFillNormalFloat(seeded(), describe(array), 1.5, 0) == 0
    assert (array == dtype(1.5)).all()


@pytest.mark.parametrize("logarithms", [False, True])
def test_categories(logarithms: bool) -> None:
    """Weights need not add up to 1; what is impossible never comes."""
    weights = np.array([0, 6, 0, 2, 4, 0], np.float32)
    with np.errstate(divide="ignore"):
        given = np.log(weights) - 200 if logarithms else weights
    array = np.empty((60, 100), np.float32)
    assert bnns.BNNSRandomFillCategoricalFloat(seeded(), describe(array), describe(given), logarithms) == 0
    counts = np.bincount(array.astype(np.int64).ravel(), minlength=6)
    assert (counts[weights == 0] == 0).all()
    assert np.allclose(counts / counts.sum(), weights / weights.sum(), atol=0.03)


def test_a_distribution_for_each_element() -> None:
    probabilities = np.zeros((3, 4, 5), np.float32)
    chosen = np.random.default_rng(0).integers(0, 5, (3, 4))
    np.put_along_axis(probabilities, chosen[..., None], 0.25, -1)
    first_major = bnns.BNNSDataLayout3DFirstMajor
    array = np.empty((3, 4), np.float32)
    status = bnns.BNNSRandomFillCategoricalFloat(seeded(), describe(array), describe(probabilities, first_major), False)
    assert status == 0, bnns.last_error()
    assert np.array_equal(array, chosen)
    row = np.empty(3, np.float32)
    assert bnns.BNNSRandomFillCategoricalFloat(seeded(), describe(row), describe(probabilities[:, 0]), False) == 0
    assert np.array_equal(row, chosen[:, 0])


def test_strided_arrays_are_filled_between_their_gaps() -> None:
    memory = np.full((4, 6), 7, np.float32)
    assert bnns.BNNSRandomFillUniformFloat(seeded(), describe(memory[:, ::2]), 0, 1) == 0
    assert np.array_equal(memory[:, ::2].ravel(), uniform(seeded(), 12))
    assert (memory[:, 1::2] == 7).all()


def test_what_cannot_be_drawn() -> None:
    generator = seeded()
    x, n = np.full(4, 7, np.float32), np.full(4, 7, np.int8)
    nan, inf = float("nan"), float("inf")
    fill_float, fill_int = bnns.BNNSRandomFillUniformFloat, bnns.BNNSRandomFillUniformInt
    fill_normal, fill_category = bnns.BNNSRandomFillNormalFloat, bnns.BNNSRandomFillCategoricalFloat
    dx, dn = describe(x), describe(n)
    half = np.ones(4, np.float16)

    def categories(values: Any, logarithms: bool = False, layout: int | None = None) -> Any:
        array = np.array(values, np.float32)
        return lambda: fill_category(generator, dx, describe(array, layout), logarithms)

    cases: list[tuple[Any, str]] = [
        (lambda: fill_float(None, dx, 0, 1), "generator is NULL"),
        (lambda: fill_float(generator, None, 0, 1), "desc is of type NoneType"),  # type: ignore[arg-type]
        (lambda: fill_float(generator, dn, 0, 1), "desc.data_type is BNNSDataTypeInt8; it must be Float32"),
        (lambda: fill_float(generator, dx, 2, 1), "a is 2.0, must be at most b, which is 1.0"),
        (lambda: fill_float(generator, dx, 0, inf), "b is inf, must be finite"),
        (lambda: fill_float(generator, dx, nan, 1), "a is nan, must be finite"),
        (lambda: fill_float(generator, describe(half), 1.0001, 1.0002), "there is no BNNSDataTypeFloat16 in [a, b)"),
        (lambda: fill_int(generator, dx, 0, 1), "desc.data_type is BNNSDataTypeFloat32; it must be an integer type"),
        (lambda: fill_int(generator, dn, 3, 3), "a is 3, must be below b, which is 3"),
        (lambda: fill_int(generator, dn, 0, 129), "the integers from 0 to 128 do not fit into desc.data_type"),
        (lambda: fill_int(generator, dn, -129, 0), "the integers from -129 to -1 do not fit"),
        (lambda: fill_int(generator, dn, 0, 2**63), "b is 9223372036854775808, which an int64_t cannot hold"),
        (lambda: fill_int(generator, dn, 0.5, 2), "a is 0.5, must be an integer"),  # type: ignore[arg-type]
        (lambda: fill_normal(generator, dx, 0, -1), "stddev is -1.0, must be at least 0"),
        (lambda: fill_normal(generator, dx, nan, 1), "mean is nan"),
        (categories([-1, 2]), "probabilities holds values that are negative, infinite or NaN"),
        (categories([nan, 2]), "negative, infinite or NaN"),
        (categories([0, 0]), "probabilities holds a distribution with no possible category"),
        (categories([-inf, -inf], True), "no possible category"),
        (categories([inf, 0], True), "NaN or positive infinity"),
        (categories([[1, 2]] * 3), "desc.size is (4,), expected"),
        (categories([[1, 2]] * 4, layout=bnns.BNNSDataLayoutColumnMajorMatrix), "must be Vector, RowMajorMatrix or"),
        (lambda: fill_category(generator, dx, describe(half), False), "probabilities.data_type is BNNSDataTypeFloat16"),
        (lambda: fill_category(generator, dx, None, False), "probabilities is of type NoneType"),  # type: ignore[arg-type]
        (
            lambda: fill_category(generator, describe(half), describe(np.ones(2050, np.float16)), False),
            "probabilities has 2050 categories, but BNNSDataTypeFloat16 holds the indices of 2049 at most",
        ),
    ]
    all_fail(cases, x, n)
    assert np.array_equal(uniform(generator, 3), uniform(seeded(), 3))  # nothing was drawn
    x.flags.writeable = False
    fails(bnns.BNNSRandomFillUniformFloat(generator, describe(x), 0, 1), "desc.data is read-only")
