"""BNNS arithmetic filters."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.lab import reference
from support.bnns import created, fails, not_created, succeeds

Descriptor = bnns.BNNSNDArrayDescriptor
F32 = bnns.BNNSDataTypeFloat32
CONSTANT, SAMPLE, PARAMETER = bnns.BNNSConstant, bnns.BNNSSample, bnns.BNNSParameter
IMAGE = bnns.BNNSDataLayoutImageCHW
FIELDS = {1: bnns.BNNSArithmeticUnary, 2: bnns.BNNSArithmeticBinary, 3: bnns.BNNSArithmeticTernary}
SHAPE = (3, 2, 5)
EVERYWHERE, POSITIVE, INSIDE, ABOVE_ONE = (-3.0, 3.0), (0.2, 3.0), (-0.9, 0.9), (1.1, 4.0)

# Code by code: the function in float64, where it is tested, and its partial derivatives if not by finite differences.
ORACLE: dict[int, tuple[Any, Any]] = {
    0: (lambda a, b: a + b, EVERYWHERE),
    1: (lambda a, b: a - b, EVERYWHERE),
    2: (lambda a, b: a * b, EVERYWHERE),
    3: (lambda a, b: a / b, POSITIVE),
    4: (np.sqrt, POSITIVE),
    5: (lambda x: x**-0.5, POSITIVE),
    6: (np.ceil, EVERYWHERE),
    7: (np.floor, EVERYWHERE),
    8: (np.rint, EVERYWHERE),
    9: (np.sin, EVERYWHERE),
    10: (np.cos, EVERYWHERE),
    11: (np.tan, INSIDE),
    12: (np.arcsin, INSIDE),
    13: (np.arccos, INSIDE),
    14: (np.arctan, EVERYWHERE),
    15: (np.sinh, EVERYWHERE),
    16: (np.cosh, EVERYWHERE),
    17: (np.tanh, EVERYWHERE),
    18: (np.arcsinh, EVERYWHERE),
    19: (np.arccosh, ABOVE_ONE),
    20: (np.arctanh, INSIDE),
    21: (lambda a, b: a**b, POSITIVE),
    22: (np.exp, EVERYWHERE),
    23: (lambda x: 2**x, EVERYWHERE),
    24: (np.log, POSITIVE),
    25: (lambda x: np.log(x) / math.log(2), POSITIVE),
    26: (lambda a, b: a * b, EVERYWHERE),
    27: (lambda a, b: a / b, POSITIVE),
    28: (lambda a, b, d: a * b + d, EVERYWHERE),
    29: (np.minimum, EVERYWHERE),
    30: (np.maximum, EVERYWHERE),
    31: (lambda a, b, d: np.where(a != 0, b, d), EVERYWHERE),
    32: (np.abs, EVERYWHERE),
    33: (np.sign, EVERYWHERE),
    34: (lambda x: -x, EVERYWHERE),
    35: (lambda x: 1 / x, POSITIVE),
    36: (lambda x: x * x, EVERYWHERE),
    37: (lambda a, b: np.floor(a / b), POSITIVE),
    38: (lambda a, b: np.trunc(a / b), POSITIVE),
    39: (lambda a, b: a - np.trunc(a / b) * b, POSITIVE),
    40: (lambda x: np.vectorize(math.erf)(x), EVERYWHERE),
}


def arity_of(code: int) -> int:
    function = ORACLE[code][0]
    return function.nin if isinstance(function, np.ufunc) else len(inspect.signature(function).parameters)


def image(shape: tuple[int, ...] = SHAPE, data: Any = None, **fields: Any) -> Any:
    return Descriptor(**{"layout": IMAGE, "size": shape[::-1], "data": data, "data_type": F32, **fields})


def layer(
    code: int, operands: list[Any], types: list[int], out: Any = None, out_type: int = SAMPLE, **more: Any
) -> Any:
    pairs = [part for pair in zip(operands, types, strict=True) for part in pair]
    fields = FIELDS[len(operands)](*pairs, image() if out is None else out, out_type)
    return bnns.BNNSLayerParametersArithmetic(code, fields, more.get("activation", bnns.BNNSActivation()))


def create(code: int, shapes: list[tuple[int, ...]], types: list[int] | None = None, **more: Any) -> Any:
    types = [SAMPLE] * len(shapes) if types is None else types
    return created(bnns.BNNSFilterCreateLayerArithmetic(layer(code, [image(s) for s in shapes], types, **more)))


def drawn(bounds: tuple[float, float], *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(*bounds, shape).astype(np.float32)


def applied(filter: Any, inputs: list[np.ndarray], batch: int = 4, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    y = np.empty((batch, *shape), np.float32)
    strides = [0] * len(inputs)
    succeeds(bnns.BNNSArithmeticFilterApplyBatch(filter, batch, len(inputs), inputs, strides, y, 0))
    return y


def backward(filter: Any, inputs: Any, deltas: list[Any], y: Any, dy: np.ndarray, **more: Any) -> int:
    count = len(deltas)
    strides = None if inputs is None else [0] * count
    return bnns.BNNSArithmeticFilterApplyBackwardBatch(
        filter, len(dy), count, inputs, strides, deltas, [0] * count, y, 0, more.get("out_delta", image(data=dy)), 0
    )


# ---- the functions ---------------------------------------------------------------------------------------------------


def test_there_are_all_functions() -> None:
    assert sorted(ORACLE) == list(range(41))
    names = {n: v for n, v in vars(bnns).items() if n.startswith("BNNSArithmetic") and type(v) is int}
    assert set(names.values()) == set(range(41))
    some = {"Add": 0, "Round": 8, "Pow": 21, "MultiplyAdd": 28, "Select": 31, "Abs": 32, "Square": 36, "Erf": 40}
    for name, code in some.items():
        assert names[f"BNNSArithmetic{name}"] == code


@pytest.mark.parametrize("code", ORACLE)
def test_every_function_forward_and_backward(code: int) -> None:
    """Values against float64 formulas, gradients against finite differences of those."""
    function, bounds = ORACLE[code]
    arity = arity_of(code)
    inputs = [drawn(bounds, 4, *SHAPE, seed=k) for k in range(arity)]
    if code == 31:
        inputs[0] = (inputs[0] > 0).astype(np.float32)
    filter = create(code, [SHAPE] * arity)
    y = applied(filter, inputs)
    wide = [array.astype(np.float64) for array in inputs]
    assert np.allclose(y, function(*wide), rtol=2e-7, atol=1e-7)
    dy = drawn(EVERYWHERE, 4, *SHAPE, seed=9)
    results = [np.full(dy.shape, 7, np.float32) for _ in range(arity)]
    deltas = [image(data=array) for array in results]
    assert backward(filter, inputs, deltas, y, dy) == 0, bnns.last_error()
    step = 1e-6
    for k, got in enumerate(results):
        ends = [function(*(a + s * step if j == k else a for j, a in enumerate(wide))) for s in (1, -1)]
        slope = np.zeros_like(wide[0]) if code == 31 and k == 0 else (ends[0] - ends[1]) / (2 * step)
        assert np.allclose(got, dy * slope, rtol=1e-5, atol=1e-6), k


@pytest.mark.parametrize("code", [code for code in ORACLE if arity_of(code) == 1])
def test_a_gradient_without_what_it_does_not_need(code: int) -> None:
    """From the output alone, as after a step in place, where the output has overwritten the input."""
    _, bounds = ORACLE[code]
    x, dy = drawn(bounds, 4, *SHAPE), drawn(EVERYWHERE, 4, *SHAPE, seed=1)
    filter = create(code, [SHAPE])
    y = applied(filter, [x])
    expected, got = np.empty_like(x), np.full_like(x, 7)
    assert backward(filter, [x], [image(data=expected)], None, dy) == 0, bnns.last_error()
    status = backward(filter, None, [image(data=got)], y, dy)
    if code in (4, 5, 11, 17, 22, 23, 35):
        assert status == 0
        assert np.allclose(got, expected, rtol=1e-4, atol=1e-6)
        in_place = y.copy()
        assert backward(filter, [in_place], [image(data=in_place)], in_place, dy) == 0
        assert np.array_equal(in_place, got)
    elif code in (6, 7, 8, 33, 34):
        assert status == 0
        assert np.array_equal(got, expected)
    else:
        fails(status, "in[0] is NULL, and in_delta[0] is computed from it")
        assert (got == 7).all()


def test_functions_at_their_edges() -> None:
    def value(code: int, *numbers: list[float]) -> list[float]:
        shape = (1, 1, len(numbers[0]))
        inputs = [np.array(n, np.float32).reshape(1, *shape) for n in numbers]
        y = np.empty((1, *shape), np.float32)
        filter = create(code, [shape] * len(inputs), out=image(shape))
        succeeds(bnns.BNNSArithmeticFilterApplyBatch(filter, 1, len(inputs), inputs, [0] * len(inputs), y, 0))
        return y.ravel().tolist()

    inf, nan = math.inf, math.nan
    assert value(26, [nan, inf, 2.0], [0.0, 0.0, 3.0]) == [0, 0, 6]
    assert value(27, [nan, inf, 6.0, 0.0], [0.0, 0.0, 3.0, 0.0]) == [0, 0, 2, 0]
    assert value(8, [0.5, 1.5, 2.5, -2.5]) == [0, 2, 2, -2]
    assert value(37, [7.0, -7.0], [2.0, 2.0]) == [3, -4]
    assert value(38, [7.0, -7.0], [2.0, 2.0]) == [3, -3]
    assert value(39, [7.0, -7.0], [2.0, 2.0]) == [1, -1]
    assert value(31, [0.0, -1.0, nan], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == [4, 2, 3]
    assert value(3, [1.0, -1.0], [0.0, 0.0]) == [inf, -inf]
    assert math.isnan(value(24, [-1.0])[0])
    assert math.isnan(value(30, [nan], [1.0])[0])


def test_gradients_at_edges() -> None:
    shape = (1, 1, 3)
    dy = np.ones((1, *shape), np.float32)

    def gradients(code: int, a: list[float], b: list[float]) -> list[list[float]]:
        inputs = [np.array(n, np.float32).reshape(1, *shape) for n in (a, b)]
        results = [np.empty_like(dy), np.empty_like(dy)]
        filter = create(code, [shape, shape], out=image(shape))
        deltas = [image(shape, one) for one in results]
        assert backward(filter, inputs, deltas, None, dy, out_delta=image(shape, dy)) == 0, bnns.last_error()
        return [one.ravel().tolist() for one in results]

    assert gradients(29, [1, 2, 3], [1, 1, 4]) == [[1, 0, 1], [0, 1, 0]]  # a tie goes to the first operand
    assert gradients(30, [1, 2, 3], [1, 1, 4]) == [[1, 1, 0], [0, 0, 1]]
    assert gradients(26, [5, 2, math.inf], [0, 3, 0]) == [[0, 3, 0], [0, 2, 0]]
    assert gradients(27, [5, 6, math.inf], [0, 2, 0]) == [[0, 0.5, 0], [0, -1.5, 0]]
    assert gradients(21, [0, 0, 2], [2, 0, 0]) == [[0, 0, 0], [0, -math.inf, np.float32(math.log(2))]]


# ---- batches, broadcasting, parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((3, 1, 1), SHAPE), (SHAPE, (1, 2, 1)), ((1, 1, 1), SHAPE), ((3, 1, 5), (1, 2, 5))])
@pytest.mark.parametrize("types", [(SAMPLE, SAMPLE), (SAMPLE, PARAMETER), (PARAMETER, SAMPLE), (PARAMETER, PARAMETER)])
def test_broadcasting_sums_gradients(shapes: Any, types: Any, torch: Any) -> None:
    filter = create(bnns.BNNSArithmeticMultiply, list(shapes), list(types))
    batches = [4 if kind == SAMPLE else 1 for kind in types]
    inputs = [drawn(EVERYWHERE, n, *s, seed=k) for k, (n, s) in enumerate(zip(batches, shapes, strict=True))]
    y = applied(filter, inputs)
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in inputs]
    expected = (tensors[0] * tensors[1]).broadcast_to(4, *SHAPE)
    assert np.allclose(y, expected.detach().numpy(), rtol=1e-6)
    dy = drawn(EVERYWHERE, 4, *SHAPE, seed=9)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    for flags in (0, 1):
        results = [np.ones_like(a) for a in inputs]
        deltas = [image(s, one, flags=flags) for s, one in zip(shapes, results, strict=True)]
        assert backward(filter, inputs, deltas, None, dy) == 0, bnns.last_error()
        for got, tensor in zip(results, tensors, strict=True):
            assert np.allclose(got, tensor.grad.numpy() + flags, rtol=1e-5, atol=1e-5)


def test_strides_of_samples_and_of_batches() -> None:
    a, b = drawn(EVERYWHERE, 2, 40), drawn(EVERYWHERE, 2, 12, seed=1)
    strided = Descriptor(layout=IMAGE, size=(5, 2, 2), stride=(2, 10, 20), data_type=F32)
    plain = Descriptor(layout=IMAGE, size=(1, 2, 2), data_type=F32)
    out = Descriptor(layout=IMAGE, size=(5, 2, 2), data_type=F32)
    filter = bnns.BNNSFilterCreateLayerArithmetic(layer(0, [strided, plain], [SAMPLE, SAMPLE], out))
    y = np.full((2, 24), 9, np.float32)
    assert bnns.BNNSArithmeticFilterApplyBatch(filter, 2, 2, [a, b], [40, 7], y, 24) == 0, bnns.last_error()
    parts = np.stack([b.ravel()[:4], b.ravel()[7:11]]).reshape(2, 2, 2, 1)
    assert np.array_equal(y[:, :20].reshape(2, 2, 2, 5), a[:, ::2].reshape(2, 2, 2, 5) + parts)
    assert (y[:, 20:] == 9).all()


def test_constants_have_no_batch_and_no_gradient() -> None:
    """The cost of a public program: the difference of two arrays, all three of them constants."""
    filter = create(bnns.BNNSArithmeticSubtract, [SHAPE, SHAPE], [CONSTANT, CONSTANT], out_type=CONSTANT)
    a, b = drawn(EVERYWHERE, *SHAPE), drawn(EVERYWHERE, *SHAPE, seed=1)
    y = np.empty(SHAPE, np.float32)
    for batch in (1, 3):
        assert bnns.BNNSArithmeticFilterApplyBatch(filter, batch, 2, [a, b], [0, 0], y, 0) == 0, bnns.last_error()
        assert np.array_equal(y, a - b)
    assert backward(filter, [a, b], [image(data=y), None], None, a[None]) == -1
    assert "in_delta[0] is given, but in1_type is BNNSConstant" in (bnns.last_error() or "")
    filter = create(bnns.BNNSArithmeticSubtract, [SHAPE, SHAPE], [SAMPLE, CONSTANT], out_type=CONSTANT)
    assert bnns.BNNSArithmeticFilterApplyBatch(filter, 2, 2, [a, b], [0, 0], y, 0) == -1
    assert "batch_size is 2 and in1_type is BNNSSample, but out_type is BNNSConstant" in (bnns.last_error() or "")


def test_square_with_a_linear_activation() -> None:
    linear = bnns.BNNSActivation(bnns.BNNSActivationFunctionLinear, 2.0)
    shape = (1, 1, 3)
    filter = create(bnns.BNNSArithmeticSquare, [shape], out=image(shape), activation=linear)
    assert applied(filter, [np.array([-1, 0, 1], np.float32)], 1, shape).ravel().tolist() == [2, 0, 2]


@pytest.mark.parametrize("name", [(4, "tanh"), (7, "linear"), (35, "gelu_sigmoid")])
def test_a_fused_activation(name: tuple[int, str]) -> None:
    code, function = name
    alpha = 0.5 if function == "linear" else 0.0
    filter = create(bnns.BNNSArithmeticMultiply, [SHAPE, (3, 1, 1)], activation=bnns.BNNSActivation(code, alpha))
    a, b, dy = drawn(EVERYWHERE, 4, *SHAPE), drawn(EVERYWHERE, 4, 3, 1, 1, seed=1), drawn(EVERYWHERE, 4, *SHAPE, seed=2)
    y = applied(filter, [a, b])
    activation = rg.Activation(function, alpha) if alpha else function
    assert np.array_equal(y, rg.activation_forward(a * b, activation))
    da, db = np.empty_like(a), np.empty_like(b)
    assert backward(filter, [a, b], [image(data=da), image((3, 1, 1), db)], y, dy) == 0, bnns.last_error()
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dz = dy * reference.activation_input_slope(function, wide_a * wide_b, alpha)
    assert np.allclose(da, dz * wide_b, rtol=1e-4, atol=1e-5)
    assert np.allclose(db, (dz * wide_a).sum((2, 3), keepdims=True), rtol=1e-4, atol=1e-5)


def test_in_place_and_half_over_the_input() -> None:
    filter = create(bnns.BNNSArithmeticSubtract, [SHAPE, SHAPE])
    a, b = drawn(EVERYWHERE, 4, *SHAPE), drawn(EVERYWHERE, 4, *SHAPE, seed=1)
    for shift in (0, 13):
        memory = np.zeros(140, np.float32)
        memory[:120] = a.ravel()
        assert bnns.BNNSArithmeticFilterApplyBatch(filter, 4, 2, [memory, b], [0, 0], memory[shift:], 0) == 0
        assert np.array_equal(memory[shift : shift + 120].reshape(a.shape), a - b)


def test_operands_that_are_one_tensor_share_a_gradient() -> None:
    x, dy = drawn(EVERYWHERE, 4, *SHAPE), drawn(EVERYWHERE, 4, *SHAPE, seed=1)
    filter = create(bnns.BNNSArithmeticMultiply, [SHAPE, SHAPE])
    for flags in (0, 1):
        dx = np.ones_like(x)
        delta = image(data=dx, flags=flags)
        assert backward(filter, [x, x], [delta, delta], None, dy) == 0, bnns.last_error()
        assert np.allclose(dx, 2 * x * dy + flags, rtol=1e-6, atol=1e-6)
    add, dx = create(bnns.BNNSArithmeticAdd, [SHAPE, SHAPE]), np.ones_like(x)
    assert backward(add, None, [image(data=dx), image(data=dx)], None, dy) == 0
    assert np.array_equal(dx, 2 * dy)
    dx[:] = 7
    assert backward(filter, [x, x.copy()], [image(data=dx), image(data=dx)], None, dy) == -1
    assert "in_delta[1] is in_delta[0], but in[1] is not in[0]" in (bnns.last_error() or "")
    assert backward(filter, [x, x], [image(data=dx), image(data=dx, flags=1)], None, dy) == -1
    assert "in_delta[1] overlaps in_delta[0] in memory" in (bnns.last_error() or "")
    assert (dx == 7).all()


def test_types_of_operands() -> None:
    half = drawn(EVERYWHERE, 4, *SHAPE).astype(np.float16)
    b = drawn(EVERYWHERE, 4, *SHAPE, seed=1)
    operands = [image(data_type=bnns.BNNSDataTypeFloat16), image()]
    out = image(data_type=bnns.BNNSDataTypeFloat16)
    filter = bnns.BNNSFilterCreateLayerArithmetic(layer(2, operands, [SAMPLE, SAMPLE], out))
    y = np.empty_like(half)
    assert bnns.BNNSArithmeticFilterApplyBatch(filter, 4, 2, [half, b], [0, 0], y, 0) == 0, bnns.last_error()
    assert np.array_equal(y, (half.astype(np.float32) * b).astype(np.float16))
    assert backward(filter, [half, b], [None, image(data=b.copy())], None, b) == -1
    assert "in1 of this filter has type float16; backward needs Float32" in (bnns.last_error() or "")
    condition = [image(data_type=bnns.BNNSDataTypeBoolean), image(), image()]
    filter = bnns.BNNSFilterCreateLayerArithmetic(layer(31, condition, [SAMPLE] * 3))
    chosen = b > 0
    assert np.array_equal(applied(filter, [chosen, b, -b]), np.abs(b))
    db = np.empty_like(b)
    assert backward(filter, [chosen, b, -b], [None, image(data=db), None], None, b) == 0, bnns.last_error()
    assert np.array_equal(db, np.where(chosen, b, 0))


def test_the_structure_of_the_operands_is_a_pointer() -> None:
    fields = bnns.BNNSArithmeticUnary(image(), SAMPLE, image(), SAMPLE)
    made = bnns.BNNSLayerParametersArithmetic(36, fields)
    picture = bytearray(made.to_bytes())
    assert picture[8:16] == bytes(8)  # a structure in Python has no address
    picture[8:16] = (0x1234).to_bytes(8, "little")
    there = bnns.BNNSLayerParametersArithmetic.from_bytes(picture, {0x1234: fields})
    assert there.arithmetic_function_fields is fields
    assert bnns.BNNSFilterCreateLayerArithmetic(there) is not None
    unknown = bnns.BNNSLayerParametersArithmetic.from_bytes(picture)
    assert bnns.BNNSFilterCreateLayerArithmetic(unknown) is None
    assert "arithmetic_function_fields is of type Address, must be BNNSArithmeticUnary" in (bnns.last_error() or "")


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (None, "layer_params is NULL, must be BNNSLayerParametersArithmetic"),
        (bnns.BNNSLayerParametersArithmetic(41), "arithmetic_function is 41, which is not a BNNSArithmeticFunction"),
        (
            bnns.BNNSLayerParametersArithmetic(0, bnns.BNNSArithmeticUnary()),
            "arithmetic_function_fields is of type BNNSArithmeticUnary, must be BNNSArithmeticBinary",
        ),
        (bnns.BNNSLayerParametersArithmetic(0), "arithmetic_function_fields is NULL, must be BNNSArithmeticBinary"),
        (layer(0, [image((2, 2, 5)), image()], [1, 1]), "in1.size is (5, 2, 2), expected 1 or that of out"),
        (layer(0, [image((1, 2, 5)), image((1, 2, 5))], [1, 1]), "out.size is (5, 2, 3), but the operands broadcast"),
        (
            layer(36, [image(layout=bnns.BNNSDataLayout3DLastMajor)], [1]),
            "in.layout is BNNSDataLayout3DLastMajor, but out.layout is BNNSDataLayoutImageCHW",
        ),
        (layer(0, [image(), image()], [1, 3]), "in2_type is 3, must be BNNSConstant, BNNSSample or BNNSParameter"),
        (layer(36, [image(data_type=bnns.BNNSDataTypeInt32)], [1]), "in.data_type is BNNSDataTypeInt32; it must be"),
        (layer(36, [image()], [1], activation=bnns.BNNSActivation(11)), "not an elementwise"),
    ],
)
def test_creation_fails(made: Any, reason: str) -> None:
    not_created(bnns.BNNSFilterCreateLayerArithmetic(made), reason)


def test_apply_fails_and_touches_nothing() -> None:
    filter = create(0, [SHAPE, SHAPE])
    x, y = drawn(EVERYWHERE, 4, *SHAPE), np.full((4, *SHAPE), 7, np.float32)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((0, 2, [x, x], [0, 0], y, 0), "batch_size is 0"),
        ((4, 1, [x, x], [0, 0], y, 0), "number_of_inputs is 1, but the function has 2"),
        ((4, 2, None, [0, 0], y, 0), "in is NULL"),
        ((4, 2, [x, None], [0, 0], y, 0), "in[1] is NULL"),
        ((4, 2, [x], [0, 0], y, 0), "in has 1 entries, expected 2"),
        ((4, 2, [x, x], None, y, 0), "in_stride is NULL"),
        ((4, 2, x, [0, 0], y, 0), "in is of type ndarray, must be a list of 2"),
        ((4, 2, [x, x[:3]], [0, 0], y, 0), "in[1] has 360 bytes"),
        ((4, 2, [x, x], [0, 0], y[:3], 0), "out has 360 bytes"),
        ((4, 2, [x, x], [0, 0], y, 29), "out_stride is 29, but a sample of out spans 30 values"),
    ]
    for arguments, reason in cases:
        fails(bnns.BNNSArithmeticFilterApplyBatch(filter, *arguments), reason)
    assert (y == 7).all()
    # As measured, the functions for any filter do not apply this one.
    assert bnns.BNNSFilterApply(filter, x, y) == -1
    assert bnns.BNNSFilterApplyBatch(filter, 4, x, 0, y, 0) == -1
    assert bnns.BNNSFilterApplyTwoInput(filter, x, x, y) == -1
    other = bnns.BNNSFilterCreateLayerActivation(
        bnns.BNNSLayerParametersActivation(image(), image(), bnns.BNNSActivation(3))
    )
    fails(bnns.BNNSArithmeticFilterApplyBatch(other, 4, 1, [x], [0], y, 0), "filter is not an arithmetic filter")


def test_backward_fails_and_touches_nothing() -> None:
    x, dy, dx = drawn(EVERYWHERE, 4, *SHAPE), drawn(EVERYWHERE, 4, *SHAPE, seed=1), np.full((4, *SHAPE), 7, np.float32)
    square, multiply = create(36, [SHAPE]), create(2, [SHAPE, SHAPE])
    tanh, silu = (create(36, [SHAPE], activation=bnns.BNNSActivation(code)) for code in (4, 31))
    good = image(data=dx)
    cases: list[tuple[Any, Any, list[Any], Any, str]] = [
        (square, None, [good], x, "in[0] is NULL, and in_delta[0] is computed from it"),
        (multiply, [None, x], [None, good], None, "in[0] is NULL, and in_delta[1] is computed from it"),
        (tanh, [x], [good], None, "out is NULL; a filter with an activation needs it"),
        (
            silu,
            [x],
            [good],
            x,
            "the output does not tell the slope: it is not monotone; an activation filter trains it",
        ),
        (square, [x], [image((3, 2, 4), dx)], None, "in_delta[0] has 24 elements, expected 30 as in in"),
        (square, [x], [image()], None, "in_delta[0].data is NULL"),
        (square, [x], [3], None, "in_delta[0] is of type int, not BNNSNDArrayDescriptor"),
        (square, [x], [image(data=bytes(480))], None, "in_delta[0].data is read-only"),
    ]
    for filter, inputs, deltas, out, reason in cases:
        fails(backward(filter, inputs, deltas, out, dy), reason)
        assert (dx == 7).all()
    fails(backward(square, [x], [good], None, dy, out_delta=None), "out_delta is NULL")


# ---- Swift -----------------------------------------------------------------------------------------------------------


def test_the_layers_of_swift() -> None:
    shape, kind = BNNS.Shape.imageCHW(5, 2, 3), BNNS.DescriptorType
    arrays = [drawn(POSITIVE, 4, *SHAPE, seed=k) for k in range(3)]
    dy = drawn(EVERYWHERE, 4, *SHAPE, seed=9)
    plain = shape.descriptor()

    def of(array: np.ndarray) -> Any:
        return shape.descriptor(array)

    y, gradients = np.empty_like(dy), [np.empty_like(dy) for _ in range(3)]
    unary = BNNS.UnaryArithmeticLayer(
        input=plain,
        inputDescriptorType=kind.sample,
        output=plain,
        outputDescriptorType=kind.sample,
        function=BNNS.ArithmeticUnaryFunction.squareRoot,
    )
    unary.apply(batchSize=4, input=of(arrays[0]), output=of(y))
    assert np.array_equal(y, np.sqrt(arrays[0]))
    unary.applyBackward(
        batchSize=4,
        input=of(arrays[0]),
        output=of(y),
        outputGradient=of(dy),
        generatingInputGradient=of(gradients[0]),
    )
    assert np.allclose(gradients[0], dy / (2 * y), rtol=1e-6)
    binary = BNNS.BinaryArithmeticLayer(
        inputA=plain,
        inputADescriptorType=kind.sample,
        inputB=plain,
        inputBDescriptorType=kind.sample,
        output=plain,
        outputDescriptorType=kind.sample,
        function=BNNS.ArithmeticBinaryFunction.divide,
    )
    binary.apply(batchSize=4, inputA=of(arrays[0]), inputB=of(arrays[1]), output=of(y))
    assert np.array_equal(y, arrays[0] / arrays[1])
    binary.applyBackward(
        batchSize=4,
        inputA=of(arrays[0]),
        inputB=of(arrays[1]),
        outputGradient=of(dy),
        generatingInputAGradient=of(gradients[0]),
        generatingInputBGradient=of(gradients[1]),
    )
    assert np.allclose(gradients[1], -dy * arrays[0] / arrays[1] ** 2, rtol=1e-5)
    ternary = BNNS.TernaryArithmeticLayer(
        inputA=plain,
        inputADescriptorType=kind.sample,
        inputB=plain,
        inputBDescriptorType=kind.sample,
        inputC=plain,
        inputCDescriptorType=kind.constant,
        output=plain,
        outputDescriptorType=kind.sample,
        function=BNNS.ArithmeticTernaryFunction.multiplyAdd,
        activation=BNNS.ActivationFunction.tanh,
    )
    inputs = {f"input{letter}": of(array) for letter, array in zip("ABC", arrays, strict=True)}
    ternary.apply(batchSize=4, output=of(y), **inputs)
    z = arrays[0].astype(np.float64) * arrays[1] + arrays[2][:1]
    assert np.allclose(y, np.tanh(z), rtol=1e-6)
    ternary.applyBackward(
        batchSize=4,
        output=of(y),
        outputGradient=of(dy),
        generatingInputAGradient=of(gradients[0]),
        generatingInputBGradient=None,
        generatingInputCGradient=None,
        **inputs,
    )
    assert np.allclose(gradients[0], dy * (1 - y.astype(np.float64) ** 2) * arrays[1], rtol=1e-4, atol=1e-6)
    vector = BNNS.Shape.vector(3).descriptor(arrays[0])
    with pytest.raises(BNNS.Error, match="layerApplyFail: inputB has 3 elements"):
        binary.apply(batchSize=4, inputA=of(arrays[0]), inputB=vector, output=of(y))
