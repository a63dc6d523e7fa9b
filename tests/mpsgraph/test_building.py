"""Building graphs: refusals, constants, gradients, control flow, random numbers, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.lab import declared_mpsgraph
from retrograd.mpsgraph import (
    MPSDataType,
    MPSGraph,
    MPSGraphConvolution2DOpDescriptor,
    MPSGraphLossReductionType,
    MPSGraphPaddingStyle,
    MPSGraphPooling2DOpDescriptor,
    MPSGraphPooling4DOpDescriptor,
    MPSGraphRandomDistribution,
    MPSGraphRandomOpDescriptor,
    MPSGraphTensorData,
    _declare,
)
from retrograd.mpsgraph._left_out import LEFT_OUT
from support.mpsgraph import constant, evaluate

F32, F64, I32 = MPSDataType.float32, MPSDataType.float64, MPSDataType.int32
ROOT = Path(__file__).parents[2]


def run(graph: MPSGraph, tensor: Any, **feeds: Any) -> np.ndarray[Any, Any]:
    """A tensor's value, for feeds by the names of placeholders."""
    fed = {
        t: MPSGraphTensorData(feeds[t.operation.name]) for t in graph.placeholderTensors if t.operation.name in feeds
    }
    return graph.run(feeds=fed, targetTensors=[tensor])[tensor].numpy()


@pytest.mark.parametrize("path", ["src/retrograd/mpsgraph/__init__.pyi", "docs/mpsgraph.md"])
def test_written_files_are_as_the_table_says(path: str) -> None:
    assert declared_mpsgraph.main(["--check", str(ROOT / path)]) == 0


def test_a_stale_file_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = tmp_path / "__init__.pyi"
    assert declared_mpsgraph.main(["--check", str(stub)]) == 1
    assert "not what the table says" in capsys.readouterr().out
    assert declared_mpsgraph.main([str(stub)]) == 0
    assert declared_mpsgraph.main(["--check", str(stub)]) == 0


def test_methods_have_signatures_and_documentation() -> None:
    for row in _declare.ROWS:
        method = getattr(MPSGraph, row.method)
        assert row.doc, row.swift
        assert row.selector_only or row.python in method.__doc__, row.swift
    assert str(_declare.signature(next(r for r in _declare.ROWS if r.swift == "softMax"))) == (
        "(self, /, *, with_, axis, name=None)"
    )


@pytest.mark.parametrize("name", list(LEFT_OUT))
def test_what_is_left_out_says_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"MPSGraph.{name} is not supported: "):
        getattr(MPSGraph(), name)(1, x=2)


def test_arguments_of_the_wrong_kind_are_named() -> None:
    g, other = MPSGraph(), MPSGraph()
    x = g.placeholder(shape=[2, 3], dataType=F32, name="x")
    y = other.placeholder(shape=[2, 3], dataType=F32, name="y")
    i = g.placeholder(shape=[2, 3], dataType=I32, name="i")
    for call, error, words in (
        (
            lambda: g.addition(x, 1.0, name=None),
            TypeError,
            "addition: secondaryTensor must be an MPSGraphTensor, not float",
        ),
        (
            lambda: g.addition(x, y, name=None),
            ValueError,
            "addition: secondaryTensor is placeholder 'y'.* another graph",
        ),
        (lambda: g.addition(x, i, name="sum"), TypeError, "addition 'sum': .*dtypes float32 and int32"),
        (lambda: g.addition(x), TypeError, "1 argument without a label; its forms are addition"),
        (lambda: g.softMax(x, axis=1), TypeError, r"the labels axis; its forms are softMax\(with_=, axis=, name=\)"),
        (lambda: g.softMax(with_=x, axis="1"), TypeError, "softMax: axis must be an int, not str"),
        (lambda: g.softMax(with_=x, axis=1, name=3), TypeError, "name must be a str or None, not int"),
        (lambda: g.reductionSum(with_=x, axis=2), ValueError, r"reductionSum .*axis is 2, .*\(2, 3\).*placeholder 'x'"),
        (lambda: g.reductionSum(with_=x, axes=1), TypeError, "axes must be a list of ints, not int"),
        (lambda: g.reshape(x, shape=[4, -2]), ValueError, r"shape is \[4, -2\]"),
        (lambda: g.reshape(x, shape=[4]), ValueError, "reshape .*6 elements"),
        (lambda: g.concatTensors([], dimension=0), TypeError, "tensors must be a list of tensors"),
        (lambda: g.concatTensors([x, 2], dimension=0), TypeError, r"tensors\[1\] must be an MPSGraphTensor"),
        (lambda: g.matrixMultiplication(primary=x, secondary=x, name="p"), ValueError, "matrixMultiplication 'p'"),
        (lambda: g.cast(x, to=MPSDataType.float16), TypeError, "type is float16, which is not supported: the engine's"),
        (lambda: g.placeholder(shape=[1], dataType=MPSDataType.bFloat16), TypeError, "dataType is bFloat16"),
        (lambda: g.placeholder(shape=[1], dataType=MPSDataType.uInt8), TypeError, "dataType is uInt8"),
        (
            lambda: g.convolution2D(x, weights=x, descriptor=None),
            TypeError,
            "descriptor must be an MPSGraphConvolution2D",
        ),
        (lambda: g.variable(with_=b"1234", shape=[2], dataType=F32), ValueError, "4 bytes are given, .* needs 8"),
        (lambda: g.constant("x", dataType=F32), TypeError, "needs a number, or data"),
        (lambda: g.constant(1, shape=[-1], dataType=F32), ValueError, "all sizes of a constant are known"),
        (lambda: g.read(x), TypeError, "placeholder 'x'.* is not a variable"),
        (lambda: g.assign(x, tensor=x), TypeError, "placeholder 'x'.* is not a variable"),
        (
            lambda: g.softMaxCrossEntropy(x, labels=i, axis=1, reuctionType=MPSGraphLossReductionType.sum),
            ValueError,
            "labels are int32",
        ),
        (
            lambda: g.softMaxCrossEntropy(x, labels=x, axis=1, reuctionType=7),
            ValueError,
            "7, which is not a MPSGraphLoss",
        ),
        (lambda: g.split(x, splitSizes=[1, 1], axis=1), ValueError, r"splitSizes is \[1, 1\], but axis 1 has size 3"),
        (lambda: g.sliceTensor(x, dimension=1, start=2, length=2), ValueError, "start is 2 and length 2, .* size 3"),
        (lambda: g.tileTensor(x, withMultiplier=[2]), ValueError, r"withMultiplier is \[2\]"),
        (lambda: g.dropout(x, rate=1.5), ValueError, "rate is 1.5"),
    ):
        calls = len(g._recording.calls)
        with pytest.raises(error, match=words):
            call()
        assert len(g._recording.calls) == calls  # nothing is added


def test_shapes_are_not_read_from_feeds() -> None:
    g = MPSGraph()
    x = g.placeholder(shape=[2, 3], dataType=F32, name="x")
    shape = g.placeholder(shape=[1], dataType=I32, name="shape")
    y = g.reshape(x, shapeTensor=shape, name="y")
    assert y.shape is None
    with pytest.raises(ValueError, match=r"reshape 'y': shape is not a constant.*placeholder 'shape'"):
        run(g, y, x=np.ones((2, 3), np.float32), shape=np.array([6], np.int32))


def test_a_variable_is_assigned_its_own_shape_and_type() -> None:
    g = MPSGraph()
    w = g.variable(with_=np.zeros(3, np.float32), shape=[3], dataType=F32, name="w")
    for shape, kind, error in (([2], F32, ValueError), ([3], F64, TypeError), ([1, 3], F32, ValueError)):
        value = g.constant(1, shape=shape, dataType=kind)
        with pytest.raises(error, match=r"assign: constant .* than variable 'w'"):
            g.assign(w, tensor=value, name=None)
    x = g.placeholder(shape=[-1], dataType=F32, name="x")
    op = g.assign(w, tensor=x, name="late")
    with pytest.raises(ValueError, match=r"assign 'late': the value is float32.2."):
        g.run(feeds={x: MPSGraphTensorData(np.ones(2, np.float32))}, targetTensors=[], targetOperations=[op])
    assert run(g, w).tolist() == [0, 0, 0]


def test_gradients_name_what_they_do_not_reach() -> None:
    g = MPSGraph()
    x, z = (g.placeholder(shape=[2], dataType=F32, name=n) for n in "xz")
    i = g.placeholder(shape=[2], dataType=I32, name="i")
    y = g.square(with_=x, name="y")
    with pytest.raises(ValueError, match=r"square 'y'.* does not depend on placeholder 'z'"):
        g.gradients(of=y, with_=[x, z], name=None)
    with pytest.raises(TypeError, match=r"bitwiseNOT 4 .int32.* no derivative"):
        g.gradients(of=g.bitwiseNOT(i), with_=[i], name=None)
    with pytest.raises(TypeError, match="with_ must be a list"):
        g.gradients(of=y, with_=x)
    flat = g.gradients(of=g.floor(with_=y), with_=[x])[x]
    feed = MPSGraphTensorData(np.array([1.5, -2.5], np.float32))
    assert g.run(feeds={x: feed}, targetTensors=[flat], targetOperations=None)[flat].numpy().tolist() == [0, 0]


def test_gradients_of_intermediates_reads_and_second_derivatives() -> None:
    g = MPSGraph()
    x = g.placeholder(shape=[2], dataType=F64, name="x")
    w = g.variable(with_=np.array([3.0, 4.0]), shape=[2], dataType=F64, name="w")
    read = g.read(w, name=None)
    middle = g.multiplication(x, read, name=None)
    y = g.multiplication(middle, middle, name=None)
    found = g.gradients(of=y, with_=[middle, read, x], name=None)
    second = g.gradients(of=found[x], with_=[x], name=None)[x]
    feed = np.array([1.0, 2.0])
    for tensor, expected in (
        (found[middle], [6, 16]),
        (found[read], [6, 32]),
        (found[x], [18, 64]),
        (second, [18, 32]),
    ):
        assert run(g, tensor, x=feed).tolist() == expected


def test_constants() -> None:
    g = MPSGraph()
    assert g.constant(2, dataType=F32).shape == [1]
    assert run(g, g.constant(2**53 + 1, shape=[2], dataType=MPSDataType.int64)).tolist() == [2**53 + 1] * 2
    assert run(g, g.constant(True, shape=[], dataType=MPSDataType.bool)).tolist() is True
    data = np.arange(4, dtype=np.int32)
    tensor = g.constant(data.tobytes(), shape=[2, 2], dataType=I32)
    assert run(g, tensor).tolist() == [[0, 1], [2, 3]]
    assert tensor.operation.outputTensors == [tensor]


def test_if_chooses_a_branch_and_its_gradient() -> None:
    g = MPSGraph()
    p = g.placeholder(shape=[1], dataType=MPSDataType.bool, name="p")
    x = g.placeholder(shape=[2], dataType=F64, name="x")
    (y,) = g.if_(p, then=lambda: g.square(with_=x), else_=lambda: [g.negative(with_=x)], name=None)
    dx = g.gradients(of=y, with_=[x])[x]
    feed = np.array([2.0, 3.0])
    assert run(g, y, p=np.array([True]), x=feed).tolist() == [4, 9]
    assert run(g, dx, p=np.array([True]), x=feed).tolist() == [4, 6]
    assert run(g, dx, p=np.array([False]), x=feed).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="then returns 1 tensors, else 0"):
        g.if_(p, then=lambda: [x], else_=None)
    w = g.variable(with_=np.zeros(2), shape=[2], dataType=F64, name="w")
    with pytest.raises(ValueError, match="assign: not possible inside a branch of if"):
        g.if_(p, then=lambda: g.assign(w, tensor=x), else_=None)
    g.assign(w, tensor=x)
    with pytest.raises(ValueError, match="the branches return"):
        g.if_(p, then=lambda: [x], else_=lambda: [p])


def test_loops() -> None:
    g = MPSGraph()
    x = g.placeholder(shape=[2], dataType=F64, name="x")
    n = g.placeholder(shape=[], dataType=I32, name="n")

    def body(index: Any, arguments: list[Any]) -> list[Any]:
        step = g.cast(g.reshape(index, shape=[1]), to=F64)
        return [g.addition(g.multiplication(arguments[0], x), step)]  # x is captured

    def expected(count: int, value: Any) -> list[float]:
        found = value
        for i in range(count):
            found = found * value + i
        return found.tolist()

    feed = np.array([2.0, -0.5])
    (unrolled,) = g.for_(numberOfIterations=constant(g, 3), initialBodyArguments=[x], body=body, name=None)
    (counted,) = g.for_(numberOfIterations=n, initialBodyArguments=[x], body=body, name=None)
    (bounded,) = g.for_(
        lowerBound=constant(g, 0), upperBound=n, step=constant(g, 1), initialBodyArguments=[x], body=body, name=None
    )
    assert run(g, unrolled, x=feed).tolist() == expected(3, feed)
    for count in (0, 1, 3):
        for tensor in (counted, bounded):
            assert run(g, tensor, x=feed, n=np.asarray(count, np.int32)).tolist() == expected(count, feed)
    dx = g.gradients(of=unrolled, with_=[x])[x]  # ((x^2) x + 1) x + 2
    assert run(g, dx, x=feed).tolist() == (4 * feed**3 + 1).tolist()
    with pytest.raises(TypeError, match="no derivative"):
        g.gradients(of=counted, with_=[x])

    limit = g.placeholder(shape=[1], dataType=F64, name="limit")

    def before(inputs: list[Any], results: list[Any]) -> Any:
        results.append(inputs[0])
        return g.lessThan(g.reductionSum(with_=inputs[0], axes=None), limit)

    (grown,) = g.while_(initialInputs=[x], before=before, after=lambda inputs: [g.addition(inputs[0], inputs[0])])
    assert run(g, grown, x=np.array([1.0, 2.0]), limit=np.array([20.0])).tolist() == [8, 16]
    assert run(g, grown, x=np.array([1.0, 2.0]), limit=np.array([-1.0])).tolist() == [1, 2]


def test_loops_refuse_what_they_cannot_do() -> None:
    g = MPSGraph()
    x = g.placeholder(shape=[2], dataType=F64, name="x")
    n = g.placeholder(shape=[], dataType=I32, name="n")
    w = g.variable(with_=np.zeros(2), shape=[2], dataType=F64, name="w")
    kept: list[Any] = []

    def loop(body: Any) -> Any:
        return g.for_(numberOfIterations=n, initialBodyArguments=[x], body=body, name=None)

    with pytest.raises(ValueError, match="assign: not possible inside the body of for"):
        loop(lambda i, a: [g.assign(w, tensor=a[0])])
    with pytest.raises(ValueError, match="placeholder: not possible inside the body of for"):
        loop(lambda i, a: [g.placeholder(shape=[1])])
    with pytest.raises(ValueError, match="returned 2 tensors, expected 1"):
        loop(lambda i, a: [a[0], a[0]])
    with pytest.raises(ValueError, match=r"argument 0 is float64.2., but the body returns float64.4."):
        loop(lambda i, a: [g.concatTensors([a[0], a[0]], dimension=0)])
    loop(lambda i, a: kept.append(a[0]) or a)
    with pytest.raises(ValueError, match="only known inside the body of a loop"):
        g.square(with_=kept[0])
    with pytest.raises(ValueError, match="only known inside the body of a loop"):
        g.run(feeds={}, targetTensors=kept)
    zero = constant(g, 0)
    with pytest.raises(ValueError, match="step is 0"):
        g.for_(lowerBound=zero, upperBound=zero, step=zero, initialBodyArguments=[x], body=lambda i, a: a)
    with pytest.raises(TypeError, match="bounds are integers"):
        g.for_(numberOfIterations=x, initialBodyArguments=[x], body=lambda i, a: a)


def test_dropout_keeps_its_mask_for_the_gradient_and_changes_it() -> None:
    g = MPSGraph()
    x = g.placeholder(shape=[64, 64], dataType=F32, name="x")
    y = g.dropout(x, rate=0.25, name=None)
    z = g.dropout(x, rate=constant(g, 0.25, np.float64), name=None)
    dx = g.gradients(of=y, with_=[x])[x]
    feeds = {x: MPSGraphTensorData(np.full((64, 64), 3, np.float32))}
    found = g.run(feeds=feeds, targetTensors=[y, dx, z])
    again = g.run(feeds=feeds, targetTensors=[y])
    first = found[y].numpy()
    assert set(np.unique(first)) == {0, 4}
    assert abs((first == 0).mean() - 0.25) < 0.03
    np.testing.assert_array_equal(found[dx].numpy() * 3, first)
    assert (again[y].numpy() != first).any()
    assert (found[z].numpy() != first).any()


def test_random_numbers() -> None:
    def build(seed: int | None) -> Any:
        g = MPSGraph()
        extra = {} if seed is None else {"seed": seed}
        tensors = {"uniform": g.randomUniformTensor(withShape=[4096], **extra, name=None)}
        for name, kind, settings in (
            ("range", MPSGraphRandomDistribution.uniform, {"min": 2.0, "max": 5.0}),
            ("normal", MPSGraphRandomDistribution.normal, {"mean": 1.0, "standardDeviation": 0.5}),
            ("truncated", MPSGraphRandomDistribution.truncatedNormal, {}),
            ("integers", MPSGraphRandomDistribution.uniform, {"dataType": I32, "minInteger": -2, "maxInteger": 3}),
        ):  # fmt: skip
            descriptor = MPSGraphRandomOpDescriptor(distribution=kind, **settings)
            shape = constant(g, [4096])
            tensors[name] = g.randomTensor(withShapeTensor=shape, descriptor=descriptor, **extra, name=None)
            tensors[f"{name} list"] = g.randomTensor(withShape=[4096], descriptor=descriptor, **extra, name=None)
        return [
            {n: r[t].numpy() for n, t in tensors.items()}
            for r in (g.run(feeds={}, targetTensors=list(tensors.values())) for _ in range(2))
        ]

    for seed in (None, 5):
        first, second = build(seed)
        other, _ = build(seed)
        for name in first:
            np.testing.assert_array_equal(first[name], other[name])  # in every process
            assert np.array_equal(first[name], second[name]) == (seed is not None)
        assert first["uniform"].min() >= 0
        assert first["uniform"].max() < 1
        assert abs(first["uniform"].mean() - 0.5) < 0.03
        assert first["range"].min() >= 2
        assert first["range"].max() < 5
        assert abs(first["normal"].mean() - 1) < 0.05
        assert abs(first["normal"].std() - 0.5) < 0.03
        assert np.abs(first["truncated"]).max() <= 2
        assert first["truncated"].std() > 0.7
        assert set(first["integers"].tolist()) == {-2, -1, 0, 1, 2}


def test_states_of_random_numbers_continue() -> None:
    g = MPSGraph()
    state = g.randomPhiloxStateTensor(withSeed=7, name=None)
    same = g.randomPhiloxStateTensor(withCounterLow=0, counterHigh=0, key=7, name=None)
    assert state.shape == [7]
    assert run(g, state).tolist() == run(g, same).tolist()
    descriptor = MPSGraphRandomOpDescriptor(distribution=MPSGraphRandomDistribution.normal)
    for options in ({}, {"descriptor": descriptor}):
        name = "randomTensor" if options else "randomUniformTensor"
        one, after = getattr(g, name)(withShape=[100], **options, stateTensor=state, name=None)
        two, _ = getattr(g, name)(withShapeTensor=constant(g, [100]), **options, stateTensor=after, name=None)
        found = g.run(feeds={}, targetTensors=[one, two])
        again = g.run(feeds={}, targetTensors=[one, two])
        assert (found[one].numpy() != found[two].numpy()).all()
        for tensor in (one, two):
            np.testing.assert_array_equal(found[tensor].numpy(), again[tensor].numpy())


def test_check_values_of_the_cross_entropy() -> None:
    x, t = np.array([[1.0, 2, 3], [0, 1, -1]]), np.array([[0.0, 0, 1], [0.5, 0.5, 0]])
    for kind, expected in (("none", [[0.4076059644], [0.9076059644]]), ("sum", 1.3152119289), ("mean", 0.6576059644)):
        reduction = MPSGraphLossReductionType[kind]
        found = evaluate(
            lambda g, a, b, r=reduction: g.softMaxCrossEntropy(a, labels=b, axis=-1, reuctionType=r), [x, t]
        )
        np.testing.assert_allclose(found.values[0], expected, atol=6e-11)


def test_descriptors() -> None:
    d = MPSGraphConvolution2DOpDescriptor(strideInX=2, paddingStyle=MPSGraphPaddingStyle.TF_SAME)
    assert (d.strideInX, d.strideInY, d.groups) == (2, 1, 1)
    d.setExplicitPaddingWithPaddingLeft(1, paddingRight=2, paddingTop=3, paddingBottom=4)
    assert (d.paddingLeft, d.paddingBottom, d.paddingStyle) == (1, 4, MPSGraphPaddingStyle.explicit)
    assert d.copy() == d
    assert d.copy() is not d
    g = MPSGraph()
    x, w = (g.placeholder(shape=s, dataType=F32, name=n) for s, n in (([1, 1, 4, 4], "x"), ([1, 1, 3, 3], "w")))
    y = g.convolution2D(x, weights=w, descriptor=d, name=None)
    d.strideInX = 1  # no longer the operation's
    assert y.shape == [1, 1, 9, 3]
    assert g.convolution2D(x, weights=w, descriptor=d).shape == [1, 1, 9, 5]
    for settings, error, words in (
        ({"strideInX": 0}, ValueError, "strideInX is 0, must be at least 1"),
        ({"strides": 1}, TypeError, "there is no argument 'strides'"),
        ({"dataLayout": 77}, ValueError, "dataLayout is 77"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            MPSGraphConvolution2DOpDescriptor(**settings)
    with pytest.raises(AttributeError, match="no member stride"):
        d.stride = 3  # type: ignore[attr-defined]
    offset = MPSGraphConvolution2DOpDescriptor(paddingStyle=MPSGraphPaddingStyle.explicitOffset)
    with pytest.raises(NotImplementedError, match="explicitOffset"):
        g.convolution2D(x, weights=w, descriptor=offset)
    with pytest.raises(NotImplementedError, match="more than two axes"):
        g.maxPooling4D(x, descriptor=MPSGraphPooling4DOpDescriptor(kernelSizes=[1, 2, 2, 2], strides=[1, 1, 1, 1]))
    with pytest.raises(NotImplementedError, match="returnIndicesMode is none"):
        g.maxPooling2DReturnIndices(x, descriptor=MPSGraphPooling2DOpDescriptor(kernelWidth=2, kernelHeight=2))


def test_errors_name_the_line_of_the_program() -> None:
    graph = MPSGraph()
    x = graph.placeholder(shape=[2, 3], dataType=F32, name="x")
    with pytest.raises(ValueError, match=r"do not fit.*\(test_building\.py:\d+\)"):
        graph.matrixMultiplication(primary=x, secondary=x, name=None)
