"""Contexts of BNNSGraph: Apple's examples, arguments and their order, shapes, memory, bad input."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNSGraph, BNNSTensor
from support.bnns_graph import Array, executed, made

Builder = BNNSGraph.Builder
F32 = np.dtype(np.float32)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def counted() -> Array:
    return np.arange(1, 9, dtype=np.float32)


def product_and_mean(builder: Any) -> list[Any]:
    x = builder.argument(name="x", dataType=float, shape=[8])
    y = builder.argument(name="y", dataType=np.float32, shape=[8])
    product = x * y
    return [product, product.mean(axes=[0], keepDimensions=True)]


# ---- Apple's examples -----------------------------------------------------------------------------------------------


def test_the_product_and_its_mean() -> None:
    context = BNNSGraph.makeContext(product_and_mean)
    out, mean = ones(8), ones(1)
    context.executeFunction(arguments=[out, mean, counted(), counted()[::-1]])
    assert out.tolist() == [8, 14, 18, 20, 20, 18, 14, 8]
    assert mean.tolist() == [15]
    assert context.argumentNames() == ["output_0", "output_1", "x", "y"]
    assert context.argumentCount() == 4
    assert context.argumentPosition(argument="y") == 3
    assert context.functionNames == ["main"]
    assert context.functionCount == 1


def test_select() -> None:
    z = np.array([True, True, False, False] * 2)
    (found,) = executed(lambda builder, z, x: z.select(x, x * 10), [z, counted()])
    assert found.tolist() == [1, 2, 30, 40, 5, 6, 70, 80]


# ---- the builder ----------------------------------------------------------------------------------------------------


def test_properties_of_tensors() -> None:
    def build(builder: Any) -> Any:
        x = builder.argument(dataType=bnns.BNNSDataTypeFloat32, shape=[-1, 3])
        y = x.linear(weight=np.ones((2, 3), np.float32))
        assert (x.name, x.shape, x.rank, x.stride, x.dataType) == ("input_0", [-1, 3], 2, None, F32)
        assert y.shape == [-1, 2]
        fixed = builder.constant(values=[1, 2, 3, 4, 5, 6], shape=[2, 3])
        assert fixed.stride == [3, 1]
        assert "[2, 3]" in fixed.description
        return [y]

    assert BNNSGraph.makeContext(build).argumentNames() == ["output_0", "input_0"]


def test_constants() -> None:
    def build(builder: Any) -> Any:
        scalar = builder.constant(value=2)
        assert (scalar.shape, scalar.dataType) == ([], np.dtype(np.int64))
        columns = builder.constant(values=[[1, 2, 3], [4, 5, 6]])
        rows = builder.constant(values=[[1, 2, 3], [4, 5, 6]], rowMajor=True)
        assert (columns.shape, rows.shape, rows.dataType) == ([3, 2], [2, 3], F32)
        with pytest.raises(ValueError, match="6 elements, but shape is \\[4\\]"):
            builder.constant(values=[1, 2, 3, 4, 5, 6], shape=[4])
        with pytest.raises(TypeError, match="one of value and values"):
            builder.constant()
        return [columns, rows]

    first, second = np.empty((3, 2), np.float32), np.empty((2, 3), np.float32)
    BNNSGraph.makeContext(build).executeFunction(arguments=[first, second])
    assert second.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert first.tolist() == second.T.tolist()


def test_numbers_and_arrays_on_both_sides_of_operators() -> None:
    x = counted()
    found = executed(lambda builder, x: [2 - x, x - 2, np.float32(1) / x, 3 * x, counted() + x, x < 4], [x])
    expected = [2 - x, x - 2, 1 / x, 3 * x, 2 * x, x < 4]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_subscripts() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    part = Builder.SliceRange(startIndex=1, endIndex=-1)

    def block(builder: Any, x: Any) -> Any:
        changed = x.copy()
        changed[Builder.SliceRange.fillAll, 0, 1:3] = 7
        row = x.copy()
        row[1, 2] = builder.constant(values=[9, 9, 9, 9])
        return [x[1], x[:, part, range(0, 4, 2)], x[0, -1], x[Builder.SliceRange.fillAll, 2], changed, row, x]

    changed, row = x.copy(), x.copy()
    changed[:, 0, 1:3], row[1, 2] = 7, 9
    expected = [x[1], x[:, 1:-1, 0:4:2], x[0, -1], x[:, 2], changed, row, x]
    for a, b in zip(executed(block, [x]), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_concatenate() -> None:
    (found,) = executed(lambda builder, a, b: builder.concatenate([a, b, a], axis=1), [ones(2, 1), ones(2, 3) * 2])
    assert found.tolist() == [[1, 2, 2, 2, 1]] * 2


# ---- bad input while building ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "kind", "message"),
    [
        (lambda b, x: x + ones(3), ValueError, r"\+ \d+: .*placeholder 'x0' \(float32, \[2, 4\]\)"),
        (lambda b, x: x.matmul(other=ones(3, 2)), ValueError, "matmul .*x0"),
        (lambda b, x: x.conv(weight=ones(1, 1, 3), strides=[1], padding=Builder.ConvolutionPadding.valid), ValueError, "conv"),
        (lambda b, x: x + np.ones(4), TypeError, "float32 and float64"),
        (lambda b, x: x.pow(y="2"), TypeError, "pow: y is '2'"),
        (lambda b, x: x.cast(to=int) + 1.5, TypeError, "y is 1.5, which a tensor of int64 cannot hold"),
        (lambda b, x: x.sum(axes=[5], keepDimensions=True), ValueError, "sum"),
        (lambda b, x: x.sum(axes="0", keepDimensions=True), TypeError, "sum: axes is '0', must be integers"),
        (lambda b, x: x.sum(axes=[0], keepDimensions=1), TypeError, "sum: keepDimensions is 1, must be a bool"),
        (lambda b, x: x.softmax(axis=1.5), TypeError, "softmax: axis is 1.5"),
        (lambda b, x: x.clip(to=(2, 1)), ValueError, "clip: to is"),
        (lambda b, x: x.argSort(axis=0, sortOrder="up"), TypeError, "sortOrder is 'up', must be a SortOrder"),
        (lambda b, x: x.softmax(), TypeError, "axis"),
        (lambda b, x: x["a"], TypeError, "subscript"),
        (lambda b, x: [x if x > 0 else 1], TypeError, "truth value"),
        (lambda b, x: [], TypeError, "must return the output tensors"),
        (lambda b, x: [3], TypeError, "output 0 is int, must be a tensor"),
        (lambda b, x: b.argument(name="x0", dataType=float, shape=[1]), ValueError, "'x0' already"),
        (lambda b, x: b.argument(dataType=np.float16, shape=[1]), TypeError, "float16, must be one of float32"),
        (lambda b, x: b.argument(dataType=float, shape=[1], intent=Builder.Intent.output), ValueError, "output"),
        (lambda b, x: b.argument(dataType=float, shape=[-1], intent=Builder.Intent.inOut), ValueError, "must be known"),
        (lambda b, x: b.update(x, x), TypeError, "'x0'.*neither a parameter nor"),
        (lambda b, x: b.gradient(of=x, withRespectTo=[b.constant(values=[1.0])]), ValueError, "does not depend on"),
        (lambda b, x: b.gradient(of=x.cast(to=int), withRespectTo=[x]), TypeError, "no derivative"),
    ],
)  # fmt: skip
def test_errors_name_the_operation_and_the_tensors(block: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        made(block, [ones(2, 4)])


def test_tensors_of_another_builder() -> None:
    kept: list[Any] = []

    def first(builder: Any, x: Any) -> Any:
        kept.append(x)
        return x.exp()

    made(first, [ones(2)])
    with pytest.raises(ValueError, match="\\+: y, placeholder 'x0' .* belongs to another builder"):
        made(lambda builder, x: x + kept[0], [ones(2)])
    with pytest.raises(RuntimeError, match="exp: the graph of this builder is made already"):
        kept[0].exp()


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_arguments_are_tensors_arrays_or_memory() -> None:
    context = BNNSGraph.makeContext(product_and_mean)
    x = BNNSTensor.allocate(initializingFrom=counted(), shape=[8])
    out, mean = context.allocateTensor(argument="output_0"), context.tensor(argument="output_1")
    assert mean.data is None
    assert (mean.rank, mean.shape[0], mean.data_type, mean.name) == (1, 1, bnns.BNNSDataTypeFloat32, b"output_1")
    context.executeFunction(arguments=[out, mean, x, bytearray(counted()[::-1].tobytes())])
    assert out.makeArray(of=float).tolist() == [8, 14, 18, 20, 20, 18, 14, 8]
    assert mean.makeArray(of=float).tolist() == [15]  # the context has allocated it
    memory = bytearray(32)
    context.executeFunction(arguments=[memory, ones(1, 1), counted().reshape(2, 4), counted()[::-1]])
    assert np.frombuffer(memory, np.float32).tolist() == [8, 14, 18, 20, 20, 18, 14, 8]


def test_strided_and_overlapping_memory() -> None:
    context = BNNSGraph.makeContext(product_and_mean)
    wide = np.zeros((8, 2), np.float32)
    mean = ones(1)
    context.executeFunction(arguments=[wide[:, 1], mean, counted(), counted()])
    assert wide[:, 1].tolist() == (counted() ** 2).tolist()
    assert not wide[:, 0].any()
    strided = BNNSTensor(data_type=bnns.BNNSDataTypeFloat32, rank=1, shape=[8], stride=[2], data=np.zeros(15, F32))
    context.executeFunction(arguments=[strided, mean, counted(), counted()])
    assert strided.data[::2].tolist() == (counted() ** 2).tolist()
    same = counted()
    context.executeFunction(arguments=[same, mean, same, same])  # inputs are read first
    assert same.tolist() == (counted() ** 2).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([ones(8), ones(1), ones(8)], "3 arguments are given, but 'main' has 4: output_0, output_1, x, y"),
        ([ones(8), ones(1), ones(8), None], "'y' is NULL"),
        ([ones(8), ones(1), ones(7), ones(8)], r"'x' has shape \[7\], but the graph has \[8\]"),
        ([ones(8), ones(1), ones(8).astype(float), ones(8)], "'x' has elements of type float64, must have float32"),
        ([ones(8), ones(1), 5, ones(8)], "'x' is the address"),
        ([ones(7), ones(1), ones(8), ones(8)], r"'output_0' has shape \[7\], but the graph computes \[8\]"),
        ([ones(8).astype(np.int32), ones(1), ones(8), ones(8)], "'output_0' has elements of type int32"),
        ([np.broadcast_to(ones(1), 8), ones(1), ones(8), ones(8)], "'output_0' is read-only"),
        ([bytearray(31), ones(1), ones(8), ones(8)], "'output_0' has 31 bytes"),
        ([ones(8), ones(1), BNNSTensor(rank=1, shape=[9], data=ones(9)), ones(8)], r"'x' has shape \[9\]"),
        ([ones(8), ones(1), BNNSTensor(rank=1, shape=[8], stride=[2], data=ones(9)), ones(8)], "spans 60"),
        ([ones(8), ones(1), BNNSTensor(rank=1, shape=[8]), ones(8)], "'x.data' is NULL"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(arguments: list[Any], message: str) -> None:
    context = BNNSGraph.makeContext(product_and_mean)
    with pytest.raises(BNNSGraph.Error, match=message) as error:
        context.executeFunction(arguments=arguments)
    assert error.value.case == "unableToExecute"
    assert all(np.all(np.asarray(one) == 1) for one in arguments[:2] if isinstance(one, np.ndarray))


def test_outputs_may_not_share_memory() -> None:
    memory = ones(8)
    context = BNNSGraph.makeContext(product_and_mean)
    with pytest.raises(BNNSGraph.Error, match="output_0 overlaps output_1"):
        context.executeFunction(arguments=[memory, memory[:1], ones(8), ones(8)])


def test_an_index_out_of_range_is_refused() -> None:
    context = made(lambda b, x, i: x.gather(indices=i, axis=0), [ones(3), np.zeros(2, np.int32)])
    out = ones(2)
    with pytest.raises(BNNSGraph.Error, match="3.*must be from 0 to below 3"):
        context.executeFunction(arguments=[out, ones(3) * 5, np.array([0, 3], np.int32)])
    assert out.tolist() == [1, 1]


def test_nans_and_infinities() -> None:
    context = made(lambda b, x: x.reciprocal(epsilon=0.0), [ones(2)])
    out = ones(2)
    context.executeFunction(arguments=[out, np.zeros(2, F32)])
    assert np.isinf(out).all()
    context.checkForNaNsAndInfinities = True
    with pytest.raises(BNNSGraph.Error, match="'output_0' has NaNs or infinities"):
        context.executeFunction(arguments=[out, np.zeros(2, F32)])
    with pytest.raises(BNNSGraph.Error, match="'x0' has NaNs or infinities"):
        context.executeFunction(arguments=[out, np.full(2, np.nan, F32)])
    context.executeFunction(arguments=[out, ones(2)])


def test_streaming_is_refused() -> None:
    context = BNNSGraph.makeContext(product_and_mean)
    with pytest.raises(BNNSGraph.Error, match="streaming is not supported"):
        context.streamingAdvanceCount = 2


# ---- shapes ---------------------------------------------------------------------------------------------------------


def flexible(builder: Any) -> Any:
    x = builder.argument(name="x", dataType=float, shape=[-1, 3])
    w = builder.argument(name="w", dataType=float, shape=[2, 3])
    return [x.linear(weight=w), x.sum(axes=[1], keepDimensions=False)]


def test_flexible_sizes() -> None:
    context = BNNSGraph.makeContext(flexible)
    assert list(context.tensor(argument="x").shape[:2]) == [-1, 3]
    with pytest.raises(BNNSGraph.Error, match="shapes of x are not set"):
        context.workspaceSize()
    with pytest.raises(BNNSGraph.Error, match="'x' is memory without a shape"):
        context.executeFunction(arguments=[ones(4, 2), ones(4), bytearray(48), ones(2, 3)])
    shapes = [BNNSGraph.Shape([0, 0]), BNNSGraph.Shape(), BNNSGraph.Shape([4, 0]), BNNSGraph.Shape()]
    assert context.setDynamicShapes(shapes) == 0
    assert shapes == [[4, 2], [], [4, 0], []]
    assert context.workspaceSize() > 0
    assert list(context.tensor(argument="x", fillKnownDynamicShapes=False).shape[:2]) == [-1, 3]
    assert list(context.tensor(argument="output_0").shape[:2]) == [4, 2]
    y, total = ones(4, 2), ones(4)
    context.executeFunction(arguments=[y, total, bytearray(ones(4, 3).tobytes()), ones(2, 3)])
    assert y.tolist() == [[3, 3]] * 4
    assert context.setDynamicShapes([[], [], [0, 3], []]) == 2
    for rows in (1, 5, 4):  # arrays say their shapes themselves
        y, total = ones(rows, 2), ones(rows)
        context.executeFunction(arguments=[y, total, ones(rows, 3) * 2, ones(2, 3)])
        assert y.tolist() == [[6, 6]] * rows


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([[], [], [4, 5], []], r"shape of 'x' is \[4, 5\], but the graph has \[-1, 3\]"),
        ([[], [], [4], []], r"shape of 'x' is \[4\]"),
        ([[], [], [-4, 3], []], r"shape of 'x' is \[-4, 3\]"),
        ([[3, 2], [], [4, 3], []], r"shape of 'output_0' is \[3, 2\], but the graph has \[4, 2\]"),
        ([[], []], "2 shapes are given, but 'main' has 4 arguments"),
    ],
)
def test_wrong_shapes_are_named(shapes: list[Any], message: str) -> None:
    context = BNNSGraph.makeContext(flexible)
    with pytest.raises(BNNSGraph.Error, match=message) as error:
        context.setDynamicShapes(shapes)
    assert error.value.case == "unableToSetDynamicShapes"


def test_batch_size() -> None:
    context = BNNSGraph.makeContext(flexible)
    context.setBatchSize(7)
    assert list(context.tensor(argument="output_1").shape[:1]) == [7]
    with pytest.raises(BNNSGraph.Error, match="at least 1"):
        context.setBatchSize(0)
    with pytest.raises(BNNSGraph.Error, match="no argument of 'main' has a flexible size"):
        BNNSGraph.makeContext(product_and_mean).setBatchSize(3)
    other = BNNSGraph.makeContext(lambda b: b.argument(name="x", dataType=float, shape=[2, -1]).exp())
    with pytest.raises(BNNSGraph.Error, match="'x'.* flexible size that is not the first"):
        other.setBatchSize(3)


# ---- memory and threads ---------------------------------------------------------------------------------------------


def test_execution_allocates_no_arrays() -> None:
    x = ones(64, 256)
    options = BNNSGraph.CompileOptions(useSingleThread=True)
    context = made(lambda b, x: x.matmul(other=ones(256, 256)).tanh().softmax(axis=-1), [x], options=options)
    out = ones(64, 256)
    assert context.workspaceSize() >= out.nbytes
    arguments = [out, x]
    for _ in range(3):
        context.executeFunction(arguments=arguments)
    tracemalloc.start()
    try:
        context.executeFunction(arguments=arguments)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        context.executeFunction(arguments=arguments)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 16_000  # Python's own objects; one array here has 65 kB


def test_threads_do_not_change_bits() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 300), dtype=np.float32)
    w = rng.standard_normal((300, 200), dtype=np.float32)
    block = lambda b, x, w: x.matmul(other=w).softmax(axis=-1)  # noqa: E731
    one = executed(block, [x, w], options=BNNSGraph.CompileOptions(useSingleThread=True))
    assert one[0].tobytes() == executed(block, [x, w])[0].tobytes()
