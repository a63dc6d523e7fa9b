"""Maps: operations as NumPy defines them, layouts, conversions, chains, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrograd import _core
from support.arrays import MEMORY, Array, fenced, placed, same_bits
from support.maps import ARITIES, CODES, apply, run_map, step, without_nan_payload

FLOATS = (np.float32, np.float64)
INTEGERS = (np.int32, np.int64)

# As NumPy computes them, exactly.
EXACT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "fmod": np.fmod,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
    "is_finite": np.isfinite,
    "select": lambda p, a, b: np.asarray(np.where(p != 0, a, b)),
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "reciprocal": np.reciprocal,
    "relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "copy_sign": np.copysign,
    "sign_bit": np.signbit,
}


def specials(dtype: Any) -> Array:
    """Values at which operations differ, and some ordinary ones."""
    info = np.finfo(dtype)
    positive = [0.0, 1, 0.5, 1.5, 2, 2.5, 3, 7, 100.25, 1e9, math.inf, math.nan]
    positive += [float(v) for v in (info.tiny, info.smallest_subnormal, info.max, info.eps, 1 / info.eps)]
    rng = np.random.default_rng(1)
    values = np.array([*positive, *(-v for v in positive), *rng.normal(0, 5, 13)], dtype)
    return values


def combinations(arity: int, dtype: Any) -> list[Array]:
    values = specials(dtype)
    if arity == 3:
        values = values[::2]
    grid = np.meshgrid(*[values] * arity, indexing="ij")
    return [np.ascontiguousarray(axis.ravel()) for axis in grid]


ONLY_INTEGERS = ("bit_and", "bit_or", "bit_xor", "bit_not", "shift_left", "shift_right", "bit_count")


@pytest.mark.parametrize("name", ONLY_INTEGERS)
def test_operations_of_integers_refuse_floats(name: str) -> None:
    with pytest.raises(ValueError, match="one of integers"):
        apply(name, *[np.ones(3, np.float32)] * ARITIES[name])


def test_operations_are_listed_with_codes_and_arities() -> None:
    listed = _core.map_operations()
    assert [code for _, code, _ in listed] == list(range(len(listed)))
    assert len({name for name, _, _ in listed}) == len(listed)
    assert all(1 <= arity <= 3 for _, _, arity in listed)
    assert set(EXACT) <= set(CODES)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", EXACT)
def test_exact_operations_equal_numpy(name: str, dtype: Any, isa: str) -> None:
    operands = combinations(ARITIES[name], dtype)
    got = apply(name, *operands)
    with np.errstate(all="ignore"):
        expected = EXACT[name](*operands).astype(dtype)
    np.testing.assert_array_equal(got, expected)
    if name not in ("maximum", "minimum", "relu"):  # of 0 and -0, NumPy's own levels take either
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_remainders_of_any_magnitudes_are_exact(dtype: Any, isa: str) -> None:
    rng = np.random.default_rng(2)
    bits, count = (np.uint32, 2**32) if dtype == np.float32 else (np.uint64, 2**64)
    a, b = (rng.integers(0, count, 20_000, dtype=np.uint64).astype(bits).view(dtype) for _ in range(2))
    with np.errstate(all="ignore"):
        near = (a[:5000] * rng.integers(1, 1000, 5000)).astype(dtype)  # quotients that are almost integers
        a, b = np.concatenate([a, near]), np.concatenate([b, a[:5000]])
        np.testing.assert_array_equal(apply("fmod", a, b), np.fmod(a, b))
        np.testing.assert_array_equal(apply("mod", a, b), np.mod(a, b))
        np.testing.assert_array_equal(apply("floor_div", a, b), np.floor_divide(a, b))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fma_is_rounded_once(dtype: Any, isa: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 1001)).astype(dtype)
    product = (a * b).astype(dtype)
    error = apply("fma", a, b, -product)
    if dtype == np.float32:
        np.testing.assert_array_equal(error, (a.astype(np.float64) * b - product).astype(dtype))
    assert np.any(error != 0)
    np.testing.assert_array_equal(apply("fma", a, b, np.zeros_like(a)), product)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in CODES if name not in ONLY_INTEGERS])
def test_lengths_threads_and_levels_do_not_change_bits(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(4)
    for count in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 257, 8191, 20_011):
        arrays = [rng.normal(0, 3, count).astype(dtype) for _ in range(ARITIES[name])]
        reference = None
        for level, threads in itertools.product(_core.isa_levels(), (1, 2, 7)):
            assert _core.select_isa(level)
            got = without_nan_payload(apply(name, *arrays, threads=threads))
            reference = got if reference is None else reference
            assert same_bits(got, reference), (count, level, threads)
        if count > 100:  # and an element's value does not depend on its place
            alone = without_nan_payload(apply(name, *(array[count - 5 :] for array in arrays)))
            assert reference is not None
            assert same_bits(alone, np.ascontiguousarray(reference[count - 5 :]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_outside_the_arrays_is_touched(dtype: Any, at_end: bool, isa: str) -> None:
    for count in (1, 3, 16, 17, 33, 1021):
        x, y = (fenced(np.linspace(1, 2, count).astype(dtype), at_end) for _ in range(2))
        out = fenced(np.zeros(count, dtype), at_end)
        assert run_map([step("add", 0, 1), step("exp", 2)], [x, y], [out], f64=dtype == np.float64) is None
        np.testing.assert_allclose(out, np.exp(x + y), rtol=1e-6)
        flags = fenced(np.zeros(count, bool), at_end)
        assert run_map([step("less", 0, 1)], [x, y], [flags], f64=dtype == np.float64) is None
        assert not flags.any()


# ---- layouts ---------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), level=st.sampled_from(_core.isa_levels()), threads=st.sampled_from((1, 2, 7)))
def test_any_shape_broadcast_and_strides(data: st.DataObject, level: str, threads: int) -> None:
    """A chain over arrays of any layout gives the bits of the same chain over contiguous copies."""
    assert _core.select_isa(level)
    shape = data.draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33, 130)), min_size=1, max_size=5).map(tuple))
    if math.prod(shape) > 60_000:
        shape = shape[:2]
    dtype = data.draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    order = data.draw(st.permutations(range(len(shape))))

    def array(values: Array) -> Array:
        return placed(values, data.draw(st.sampled_from(MEMORY)), order)

    def operand() -> Array:
        own = tuple(data.draw(st.sampled_from((extent, extent, 1))) for extent in shape)
        kind = data.draw(st.sampled_from((dtype, dtype, np.float32, np.float64)))
        return np.asarray(np.broadcast_to(array(rng.normal(size=own).astype(kind)), shape))

    a, b, c = operand(), operand(), operand()
    outs = [array(np.full(shape, math.nan, dtype)) for _ in range(2)]
    steps = [step("mul", 0, 1), step("add", 4, 3), step("sub", 5, 2), step("maximum", 5, 6)]
    f64 = dtype == np.float64
    assert run_map(steps, [a, b, c], outs, constants=[0.25], registers=[5, 7], f64=f64, threads=threads) is None
    a, b, c = (v.astype(dtype) for v in (a, b, c))
    middle = a * b + dtype(0.25)
    np.testing.assert_array_equal(outs[0], middle)
    np.testing.assert_array_equal(outs[1], np.maximum(middle, middle - c))


def test_arrays_without_axes(isa: str) -> None:
    x, out, flag = np.array(3.0, np.float32), np.array(0.0, np.float32), np.array(False)
    assert run_map([step("mul", 0, 1), step("greater", 2, 0)], [x], [out, flag], constants=[2.0]) is None
    assert (float(out), bool(flag)) == (6, True)


@pytest.mark.parametrize("shape", [(2, 3, 5, 700), (3000, 3), (7, 300, 40), (64, 4096), (5, 1, 9000)])
def test_broadcast_operands_of_larger_arrays(shape: tuple[int, ...], isa: str) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=shape).astype(np.float32)
    for keep in itertools.product((False, True), repeat=len(shape)):
        small = rng.normal(size=[e if k else 1 for e, k in zip(shape, keep, strict=True)]).astype(np.float32)
        out = np.empty_like(x)
        for threads in (1, 3):
            assert run_map([step("sub", 1, 0)], [x, np.broadcast_to(small, shape)], [out], threads=threads) is None
            np.testing.assert_array_equal(out, small - x)


@pytest.mark.parametrize("shape", [(1000, 900), (33, 65, 47), (4, 128, 256), (8, 9)])
def test_transposed_operands(shape: tuple[int, ...], isa: str) -> None:
    rng = np.random.default_rng(6)
    for order in itertools.permutations(range(len(shape))):
        x = rng.normal(size=shape).astype(np.float32).transpose(order)
        out, bias = np.empty(x.shape, np.float32), rng.normal(size=x.shape[-1]).astype(np.float32)
        for threads in (1, 2):
            assert run_map([step("add", 0, 1)], [x, np.broadcast_to(bias, x.shape)], [out], threads=threads) is None
            np.testing.assert_array_equal(out, x + bias)
            assert run_map([], [x], [out], threads=threads) is None
            np.testing.assert_array_equal(out, x)


def test_results_beyond_the_caches() -> None:
    """With small caches, results are streamed."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(2, 40_003)).astype(np.float32)
    _core.override_caches(4096, 8192, 16384, 1)
    try:
        for offset in range(3):
            a, b, out = x[offset:], y[offset:], np.empty(40_003, np.float32)[offset:]
            assert run_map([step("add", 0, 1), step("mul", 2, 0)], [a, b], [out], threads=2) is None
            np.testing.assert_array_equal(out, (a + b) * a)
            assert run_map([], [a], [out], threads=2) is None
            np.testing.assert_array_equal(out, a)
    finally:
        _core.restore_caches()


# ---- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY)
def test_in_place_where_later_steps_read_the_operand(memory: str, isa: str) -> None:
    rng = np.random.default_rng(8)
    first, second = rng.normal(size=(2, 50, 70)).astype(np.float32)
    x, y = placed(first, memory, (1, 0)), placed(second, memory, (1, 0))
    # x becomes x + y, and y becomes (x + y) * x with the old x
    steps = [step("add", 0, 1), step("mul", 2, 0)]
    assert run_map(steps, [x, y], [x, y], registers=[2, 3]) is None
    np.testing.assert_array_equal(x, first + second)
    np.testing.assert_array_equal(y, (first + second) * first)


def test_arrays_are_exchanged_in_place(isa: str) -> None:
    first, second = np.arange(3000, dtype=np.float32), np.arange(3000, dtype=np.float32) * 2
    x, y = first.copy(), second.copy()
    assert run_map([], [x, y], [x, y], registers=[1, 0]) is None
    np.testing.assert_array_equal(x, second)
    np.testing.assert_array_equal(y, first)


def test_one_register_for_several_results(isa: str) -> None:
    x = np.linspace(0, 1, 777, dtype=np.float32)
    outs: list[Array] = [
        np.empty(777, np.float32),
        np.empty(777, np.float64),
        np.empty(777, np.float32),
        np.empty(777, np.int32),
    ]
    assert run_map([step("exp", 0)], [x], outs, constants=[3.5], registers=[2, 2, 2, 1]) is None
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
    assert np.all(outs[3] == 3)


def test_most_steps_operands_and_results(isa: str) -> None:
    rng = np.random.default_rng(9)
    arrays = list(rng.normal(size=(20, 1500)).astype(np.float32))
    constants = [1.0, 2.0, 3.0, 4.0]
    steps = [step("add", k, 24 + k - 1 if k else 1) for k in range(24)]
    steps += [step("mul", 24 + k, 23) for k in range(8)]
    results = [np.empty(1500, np.float32) for _ in range(8)]
    assert run_map(steps, arrays, results, constants=constants) is None
    sums = [arrays[0] + arrays[1]]
    for k in range(1, 24):
        sums.append((arrays[k] if k < 20 else np.float32(constants[k - 20])) + sums[-1])
    for k in range(8):
        np.testing.assert_array_equal(results[k], sums[k] * np.float32(4))


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, np.bool_])
@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS, np.bool_])
@pytest.mark.parametrize("f64", [False, True])
def test_copies_convert(source: Any, target: Any, f64: bool, isa: str) -> None:
    values = np.array([0, 1, 2.75, 100, 127, 3e4, 2.0**24 + 1, 1e9], np.float64)
    if source != np.bool_:
        values = np.concatenate([values, -values])
    x = np.tile(values.astype(source), 41)
    expected = x.astype(np.float64 if f64 else np.float32).astype(target)
    for stride in (1, 3):
        out = np.zeros(x.size * stride, target)[::stride]
        assert run_map([], [x], [out], f64=f64) is None
        np.testing.assert_array_equal(out, expected)
        assert run_map([], [x[::-1]], [out], f64=f64) is None
        np.testing.assert_array_equal(out, expected[::-1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_conversion_to_integers_saturates(dtype: Any, isa: str) -> None:
    x = np.array([math.nan, math.inf, -math.inf, 1e30, -1e30, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63), -1.9], dtype)
    narrow, wide, flags = (np.empty(x.shape, kind) for kind in (np.int32, np.int64, np.bool_))
    f64 = dtype == np.float64
    assert run_map([], [x], [narrow, wide, flags], registers=[0, 0, 0], f64=f64) is None
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    assert narrow.tolist() == [0, high, low, high, low, high, low, high, low, -1]
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert wide.tolist() == [0, high, low, high, low, 2**31, -(2**31), high, low, -1]
    assert flags.all()


def test_double_rounds_to_nearest_float(isa: str) -> None:
    x = 1 + np.arange(512) * 2.0**-30
    out = np.empty(512, np.float32)
    assert run_map([], [x], [out], f64=True) is None
    assert same_bits(out, x.astype(np.float32))


# ---- integers --------------------------------------------------------------------------------------------------------

INTEGER_OPERATIONS = (
    *("add", "sub", "mul", "floor_div", "mod", "maximum", "minimum", "neg", "abs", "sign", "square", "relu"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor", "logical_not", "select"),
)


@pytest.mark.parametrize("name", INTEGER_OPERATIONS)
def test_integer_operations_equal_numpy(name: str, isa: str) -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    values = np.array([0, 1, 2, 3, 7, 100, -1, -2, -3, -7, 2**40, -(2**40), low, low + 1, high, high - 1], np.int64)
    grid = np.meshgrid(*[values] * ARITIES[name], indexing="ij")
    operands = [axis.ravel() for axis in grid]
    out = np.empty_like(operands[0])
    steps, results = [step(name, *range(len(operands)))], [out]
    assert _core.map_integers(steps, operands, [], results, [len(operands)], False, 2) is None
    with np.errstate(all="ignore"):
        expected = EXACT[name](*operands).astype(np.int64)
    np.testing.assert_array_equal(out, expected)


def test_integers_keep_all_their_bits() -> None:
    x = np.array([2**53 + 1, -(2**62) - 1, 5], np.int64)
    out = np.empty((2, 3), np.int64)
    view = np.asarray(np.broadcast_to(x, (2, 3)))
    assert _core.map_integers([step("add", 0, 1)], [view], [1], [out], [2], False, 1) is None
    np.testing.assert_array_equal(out, np.tile(x + 1, (2, 1)))
    narrow, flags = np.empty((2, 3), np.int32), np.empty((2, 3), np.bool_)
    assert _core.map_integers([], [view], [], [narrow, flags], [0, 0], False, 1) is None
    np.testing.assert_array_equal(narrow, np.tile(x.astype(np.int32), (2, 1)))
    assert flags.all()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    x, out = np.ones((4, 5), np.float32), np.zeros((4, 5), np.float32)
    add = [step("add", 0, 1)]

    def reason(operands: list[Any], results: list[Any]) -> str:
        refusal = run_map(add, operands, results)
        assert refusal is not None
        return str(refusal.reason).rsplit(".", 1)[-1]

    assert reason([x, x[:3]], [out]) == "shape"
    assert reason([x, x.astype(np.float16)], [out]) == "dtype"
    assert reason([x, x], [np.broadcast_to(out[:1], (4, 5))]) == "type"  # read-only
    assert reason([x, x], [np.lib.stride_tricks.as_strided(out, (4, 5), (4, 4))]) == "self_overlap"
    long = np.ones(30, np.float32)
    assert reason([long[:20], long[:20]], [long[1:21]]) == "overlap"
    assert reason([long[:20], long[:20]], [long[19::-1]]) == "overlap"
    assert reason([x.view(np.int32), x], [x]) == "overlap"
    assert reason([x, [1.0]], [out]) == "type"
    assert np.all(long == 1)
    assert not out.any()
    refusal = _core.map_integers([], [x], [], [out], [0], False, 1)
    assert refusal is not None
    assert str(refusal.reason).endswith("dtype")


def test_what_raises() -> None:
    x, out = np.ones(5, np.float32), np.zeros(5, np.float32)
    whole, flags = np.ones(5, np.int64), np.zeros(5, np.int64)
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (_core.map, (False, [step("add", 0, 2)], [x, x], [], [out], [2], False, 1)),
        (_core.map, (False, [(len(CODES), 0, 0, 0)], [x], [], [out], [1], False, 1)),
        (_core.map, (False, [], [x], [], [out], [1], False, 1)),
        (_core.map, (False, [], [x], [], [out], [], False, 1)),
        (_core.map, (False, [], [x] * 25, [], [out], [0], False, 1)),
        (_core.map, (False, [], [x], [1.0] * 24, [out], [0], False, 1)),
        (_core.map, (False, [step("neg", 0)] * 33, [x], [], [out], [0], False, 1)),
        (_core.map, (False, [], [x], [], [out] * 9, [0] * 9, False, 1)),
        (_core.map_integers, ([step("exp", 0)], [whole], [], [flags], [1], False, 1)),
    ]
    for function, arguments in wrong:
        with pytest.raises(ValueError, match=r"map|register|step"):
            function(*arguments)
    assert not out.any()


def test_a_recorded_map_runs_with_its_program() -> None:
    program = _core.Program(3 * 4000)
    x, y, out = np.frombuffer(program.arena, np.float32, 3000).reshape(3, 1000)  # type: ignore[call-overload]
    program.add_input(x)
    program.add_input(y)
    program.add_output(out)
    program.start_recording()
    try:
        assert run_map([step("mul", 0, 1), step("add", 3, 2)], [x, y], [out], constants=[1.5]) is None
        refusal = run_map([], [np.ones(1000, np.float32)], [out])
        assert refusal is not None
        assert str(refusal.reason).endswith("outside")
    finally:
        program.stop_recording()
    assert (program.size, out.any()) == (1, False)
    rng = np.random.default_rng(10)
    for threads in (1, 2):
        a, b = rng.normal(size=(2, 1000)).astype(np.float32)
        result = np.empty(1000, np.float32)
        assert program.run((a, b), (result,), 1, False, threads, None) is None
        np.testing.assert_array_equal(result, a * b + np.float32(1.5))
