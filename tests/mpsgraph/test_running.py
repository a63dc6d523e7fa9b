"""How graphs run: feeds, variables, order, queues, command buffers, executables, handlers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from retrograd import mps
from retrograd.mps import MPSDataType, MTLCommandBufferStatus, MTLCreateSystemDefaultDevice
from retrograd.mpsgraph import (
    MPSCommandBuffer,
    MPSGraph,
    MPSGraphCompilationDescriptor,
    MPSGraphDevice,
    MPSGraphExecutableExecutionDescriptor,
    MPSGraphExecutionDescriptor,
    MPSGraphShapedType,
    MPSGraphTensorData,
)
from support.waiting import PATIENCE

F32 = MPSDataType.float32
DEVICE = MTLCreateSystemDefaultDevice()
ONES = np.ones((2, 3), np.float32)


class Counting:
    """w := w + sum over rows of x; the loss is sum(w * x)."""

    def __init__(self) -> None:
        self.graph = g = MPSGraph()
        self.x = g.placeholder(shape=[-1, 3], dataType=F32, name="x")
        self.unused = g.placeholder(shape=[1], dataType=F32, name="unused")
        self.w = g.variable(with_=np.zeros(3, np.float32).tobytes(), shape=[3], dataType=F32, name="w")
        self.sums = g.reshape(g.reductionSum(with_=self.x, axis=0, name=None), shape=[3], name=None)
        self.loss = g.reductionSum(with_=g.multiplication(self.w, self.x, name=None), axes=None, name="loss")
        self.update = g.assign(self.w, tensor=g.addition(self.w, self.sums, name=None), name="update")

    def feeds(self, array: Any = ONES) -> dict[Any, MPSGraphTensorData]:
        return {self.x: MPSGraphTensorData(array)}

    def value(self) -> list[float]:
        return self.graph.run(feeds={}, targetTensors=[self.w])[self.w].numpy().tolist()


def test_reads_see_the_value_at_the_start_and_assigns_are_stored_at_the_end() -> None:
    c = Counting()
    for step in range(3):
        results = c.graph.run(feeds=c.feeds(), targetTensors=[c.loss, c.w], targetOperations=[c.update])
        assert results[c.loss].numpy().tolist() == [[12.0 * step]]
        assert results[c.w].numpy().tolist() == [2.0 * step] * 3
    c.graph.run(feeds=c.feeds(), targetTensors=[c.loss], targetOperations=None)
    assert c.value() == [6, 6, 6]  # only targets run


def test_feeds_of_other_sizes_and_layouts() -> None:
    c = Counting()
    for rows in (2, 5, 0, 2, 1):
        array = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        for view in (array, np.asfortranarray(array), np.repeat(array, 2, 1)[:, ::2]):
            results = c.graph.run(feeds=c.feeds(view), targetTensors=[c.sums], targetOperations=[])
            assert results[c.sums].numpy().tolist() == array.sum(0).tolist()


def test_unneeded_feeds_are_ignored_and_missing_ones_named() -> None:
    c = Counting()
    feeds = {**c.feeds(), c.unused: MPSGraphTensorData(np.zeros(1, np.float32))}
    assert c.graph.run(feeds=feeds, targetTensors=[c.sums])[c.sums].shape == [3]
    with pytest.raises(ValueError, match=r"no feed for placeholder 'x'.*, on which reductionSum 'loss'"):
        c.graph.run(feeds={}, targetTensors=[c.w, c.loss])
    with pytest.raises(ValueError, match=r"no feed for placeholder 'x'.*, on which assign 'update' depends"):
        c.graph.run(feeds={}, targetTensors=[c.w], targetOperations=[c.update])


def test_wrong_feeds_are_named_and_write_nothing() -> None:
    c, other = Counting(), Counting()
    run = c.graph.run
    for feeds, error, words in (
        ({c.x: MPSGraphTensorData(ONES.astype(np.float64))}, TypeError, "placeholder 'x'.* float64"),
        ({c.x: MPSGraphTensorData(np.ones((2, 4), np.float32))}, ValueError, r"placeholder 'x'.* \[2, 4\]"),
        ({c.x: MPSGraphTensorData(np.ones(3, np.float32))}, ValueError, r"placeholder 'x'.* \[3\]"),
        ({c.x: ONES}, TypeError, "'x'.* must be an MPSGraphTensorData, not ndarray"),
        ({c.x: None}, TypeError, "'x'.* must be an MPSGraphTensorData, not NoneType"),
        ({**c.feeds(), c.sums: MPSGraphTensorData(ONES)}, TypeError, "reshape 4.* is not a placeholder"),
        ({**c.feeds(), other.x: MPSGraphTensorData(ONES)}, ValueError, "belongs to another graph"),
        ({**c.feeds(), "x": MPSGraphTensorData(ONES)}, TypeError, "feeds has str"),
        ([], TypeError, "feeds must be a dict"),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises(error, match=words):
                run(feeds=feeds, targetTensors=[c.loss], targetOperations=[c.update])
    with pytest.raises(ValueError, match=r"targetTensors has .*another graph"):
        run(feeds=c.feeds(), targetTensors=[other.loss])
    with pytest.raises(ValueError, match=r"targetOperations has .*another graph"):
        run(feeds=c.feeds(), targetTensors=[], targetOperations=[other.update])
    with pytest.raises(TypeError, match="targetOperations has MPSGraphTensor"):
        run(feeds=c.feeds(), targetTensors=[], targetOperations=[c.loss])
    with pytest.raises(TypeError, match="needs targetTensors"):
        run(feeds=c.feeds())
    with pytest.raises(TypeError, match="with_ must be an MTLCommandQueue"):
        run(with_=DEVICE, feeds=c.feeds(), targetTensors=[c.loss])
    assert c.value() == [0, 0, 0]


def test_two_assigns_to_one_variable_are_refused() -> None:
    c = Counting()
    again = c.graph.assign(c.w, tensor=c.sums, name="again")
    with pytest.raises(ValueError, match=r"assign 'again': variable 'w'.* is assigned twice"):
        c.graph.run(feeds=c.feeds(), targetTensors=[], targetOperations=[c.update, again])
    assert c.value() == [0, 0, 0]


def test_control_dependencies() -> None:
    c = Counting()
    g = c.graph

    def block() -> list[Any]:
        return [g.read(c.w, name=None), g.multiplication(c.w, g.constant(10, dataType=F32), name=None), c.loss]

    new, ten, loss = g.controlDependency(with_=[c.update], dependentBlock=block, name=None)
    assert new.operation.controlDependencies == [c.update]
    results = g.run(feeds=c.feeds(), targetTensors=[new, ten, loss, c.w])
    assert results[new].numpy().tolist() == [2, 2, 2]
    assert results[ten].numpy().tolist() == [20, 20, 20]
    assert results[c.w].numpy().tolist() == [0, 0, 0]
    assert results[loss].numpy().tolist() == [[0]]
    assert c.value() == [2, 2, 2]  # what a target depends on has run
    read = g.read(c.w, name=None).operation  # not an assign
    (after,) = g.controlDependency(with_=[read], dependentBlock=lambda: [c.w], name=None)
    assert g.run(feeds={}, targetTensors=[after])[after].numpy().tolist() == [2, 2, 2]


def test_runs_with_a_queue_are_in_the_order_of_its_buffers() -> None:
    c = Counting()
    queue = DEVICE.makeCommandQueue()
    buffer = MPSCommandBuffer(commandBuffer=queue.makeCommandBuffer())
    feeds = c.feeds(ONES.copy())
    encoded = c.graph.encode(
        to=buffer, feeds=feeds, targetTensors=[c.w], targetOperations=[c.update], executionDescriptor=None
    )
    feeds[c.x].numpy()[...] = 3  # read when the buffer runs
    assert c.value() == [0, 0, 0]
    buffer.commit()
    results = c.graph.run(with_=queue, feeds=feeds, targetTensors=[c.w], targetOperations=[c.update])
    assert encoded[c.w].numpy().tolist() == [0, 0, 0]
    assert results[c.w].numpy().tolist() == [6, 6, 6]
    assert c.value() == [12, 12, 12]
    buffer = MPSCommandBuffer(from_=queue)
    for _ in range(2):
        c.graph.encode(to=buffer, feeds=feeds, targetTensors=[], targetOperations=[c.update])
        buffer.commitAndContinue()
    buffer.commit()
    buffer.waitUntilCompleted()
    assert c.value() == [24, 24, 24]
    assert buffer.status == MTLCommandBufferStatus.completed


def test_handlers_are_called_in_order_with_the_results() -> None:
    c = Counting()
    seen: list[Any] = []
    done = threading.Event()
    descriptor = MPSGraphExecutionDescriptor()
    descriptor.scheduledHandler = lambda results, error: seen.append(("scheduled", error))
    descriptor.completionHandler = lambda results, error: (
        seen.append((results[c.loss].numpy().item(), error)),
        done.set(),
    )
    results = c.graph.runAsync(
        feeds=c.feeds(), targetTensors=[c.loss], targetOperations=None, executionDescriptor=descriptor
    )
    assert done.wait(PATIENCE)
    assert seen == [("scheduled", None), (0.0, None)]
    assert list(results) == [c.loss]
    descriptor.waitUntilCompleted = True
    c.graph.runAsync(
        with_=DEVICE.makeCommandQueue(), feeds=c.feeds(), targetTensors=[c.loss], executionDescriptor=descriptor
    )
    assert len(seen) == 4


def test_a_failure_in_a_command_buffer_reaches_the_handler() -> None:
    g = MPSGraph()
    table = g.placeholder(shape=[2, 1], dataType=F32, name="table")
    indices = g.placeholder(shape=[1], dataType=MPSDataType.int32, name="indices")
    rows = g.gather(withUpdatesTensor=table, indicesTensor=indices, axis=0, batchDimensions=0, name=None)
    feeds = {
        table: MPSGraphTensorData(np.ones((2, 1), np.float32)), indices: MPSGraphTensorData(np.array([7], np.int32))
    }  # fmt: skip
    with pytest.raises(IndexError, match="an index is 7, must be from 0 to below 2"):
        g.run(feeds=feeds, targetTensors=[rows])
    errors: list[Any] = []
    descriptor = MPSGraphExecutionDescriptor(completionHandler=lambda results, error: errors.append(error))
    buffer = MPSCommandBuffer(from_=DEVICE.makeCommandQueue())
    target = {rows: MPSGraphTensorData(np.full((1, 1), 5, np.float32))}
    g.encode(to=buffer, feeds=feeds, targetOperations=None, resultsDictionary=target, executionDescriptor=descriptor)
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.status == MTLCommandBufferStatus.error
    assert "index is 7" in str(errors[0])
    assert target[rows].numpy().tolist() == [[5]]


def test_results_are_written_to_given_data() -> None:
    c = Counting()
    memory = np.zeros((3, 2), np.float32)
    target = {c.sums: MPSGraphTensorData(memory[:, 1])}
    c.graph.run(with_=DEVICE.makeCommandQueue(), feeds=c.feeds(), targetOperations=[c.update], resultsDictionary=target)
    assert memory.tolist() == [[0, 2]] * 3
    assert c.value() == [2, 2, 2]
    wrong = {c.sums: MPSGraphTensorData(np.zeros(4, np.float32))}
    with pytest.raises(ValueError, match=r"float32\[4\].* is given for .*reshape 4"):
        c.graph.run(
            with_=DEVICE.makeCommandQueue(), feeds=c.feeds(), targetOperations=[c.update], resultsDictionary=wrong
        )
    assert c.value() == [2, 2, 2]


def test_executables_share_variables_and_order_inputs_by_creation() -> None:
    c = Counting()
    g = c.graph
    types = {
        c.unused: MPSGraphShapedType(shape=[1], dataType=F32),
        c.x: MPSGraphShapedType(shape=[-1, 3], dataType=F32),
    }
    made: list[Any] = []
    descriptor = MPSGraphCompilationDescriptor(compilationCompletionHandler=lambda e, error: made.append(e))
    device = MPSGraphDevice(mtlDevice=DEVICE)
    train = g.compile(
        with_=device, feeds=types, targetTensors=[c.loss], targetOperations=[c.update], compilationDescriptor=descriptor
    )
    read = g.compile(with_=None, feeds={}, targetTensors=[c.w])
    assert made == [train]
    assert train.feedTensors == [c.x, c.unused]
    assert train.targetTensors == [c.loss]
    inputs = [MPSGraphTensorData(ONES), MPSGraphTensorData(np.zeros(1, np.float32))]
    queue = DEVICE.makeCommandQueue()
    assert [train.run(with_=queue, inputs=inputs)[0].numpy().item() for _ in range(2)] == [0, 12]
    assert read.run(with_=queue, inputs=[], results=None, executionDescriptor=None)[0].numpy().tolist() == [4, 4, 4]
    out = [MPSGraphTensorData(np.zeros((1, 1), np.float32))]
    seen: list[Any] = []
    done = MPSGraphExecutableExecutionDescriptor(completionHandler=lambda results, error: seen.append(error))
    train.run(with_=queue, inputs=inputs, results=out, executionDescriptor=done)
    assert out[0].numpy().item() == 24
    assert seen == [None]
    assert c.value() == [6, 6, 6]
    buffer = queue.makeCommandBuffer()
    train.encode(to=buffer, inputs=inputs)
    buffer.commit()
    buffer.waitUntilCompleted()
    done.waitUntilCompleted = True
    train.runAsync(with_=queue, inputs=inputs, executionDescriptor=done)
    assert c.value() == [10, 10, 10]
    five = [MPSGraphShapedType(shape=[5, 3], dataType=F32), MPSGraphShapedType(shape=[1], dataType=F32)]
    train.specialize(with_=device, inputTypes=five)
    assert train.getOutputTypes(with_=device, inputTypes=five) == [MPSGraphShapedType(shape=[1, 1], dataType=F32)]
    with pytest.raises(ValueError, match="inputs has 1 entries, but there are 2 feedTensors"):
        train.run(with_=queue, inputs=inputs[:1])
    with pytest.raises(ValueError, match="no feed for placeholder 'x'"):
        g.compile(feeds={}, targetTensors=[c.loss])
    with pytest.raises(TypeError, match=r"'x'.* has data type int32"):
        g.compile(feeds={c.x: MPSGraphShapedType(shape=[2, 3], dataType=MPSDataType.int32)}, targetTensors=[c.loss])
    with pytest.raises(NotImplementedError, match="format is private"):
        train.serialize(package="x")


def test_weights_as_placeholders_give_the_bits_of_variables() -> None:
    rng = np.random.default_rng(0)
    w0, x0 = rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)

    def build(as_variable: bool) -> tuple[Any, ...]:
        g = MPSGraph()
        x = g.placeholder(shape=[4, 3], dataType=F32, name="x")
        if as_variable:
            w = g.variable(with_=w0.tobytes(), shape=[3, 2], dataType=F32, name="w")
        else:
            w = g.placeholder(shape=[3, 2], dataType=F32, name="w")
        y = g.tanh(with_=g.matrixMultiplication(primary=x, secondary=w, name=None), name=None)
        dw = g.gradients(of=g.reductionSum(with_=y, axes=None, name=None), with_=[w], name=None)[w]
        new = g.stochasticGradientDescent(learningRate=g.constant(0.1, dataType=F32), values=w, gradient=dw, name=None)
        return g, x, w, new

    g, x, w, new = build(True)
    update = g.assign(w, tensor=new, name=None)
    h, hx, hw, hnew = build(False)
    fed = w0
    for _ in range(5):
        g.run(feeds={x: MPSGraphTensorData(x0)}, targetTensors=[], targetOperations=[update])
        feeds = {hx: MPSGraphTensorData(x0), hw: MPSGraphTensorData(fed)}
        fed = h.run(feeds=feeds, targetTensors=[hnew])[hnew].numpy()
    assert g.run(feeds={}, targetTensors=[w])[w].numpy().tobytes() == fed.tobytes()


def test_apply_stochastic_gradient_descent_and_variables_from_tensors() -> None:
    g = MPSGraph()
    two = g.constant(2, shape=[2, 2], dataType=F32)
    v = g.variableFromTensor(g.square(with_=two, name=None), name="v")
    step = g.applyStochasticGradientDescent(
        learningRate=g.constant(0.5, dataType=F32), variable=v.operation, gradient=two, name="step"
    )
    g.run(feeds={}, targetTensors=[], targetOperations=[step])
    assert g.run(feeds={}, targetTensors=[v])[v].numpy().tolist() == [[3, 3], [3, 3]]
    assert v.operation.shape == [2, 2]
    assert v.operation.dataType == F32
    assert v.operation.name == "v"
    x = g.placeholder(shape=[1], name="x")
    with pytest.raises(ValueError, match="depends on placeholder 'x'"):
        g.variableFromTensor(x)


def test_data_share_memory_or_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = DEVICE.makeBuffer(bytesNoCopy=array)
    shared = MPSGraphTensorData(buffer, shape=[3, 2], dataType=F32)
    array[0, 0] = 9
    assert shared.numpy()[0, 0] == 9
    assert shared.shape == [3, 2]
    assert shared.dataType == F32
    rows = MPSGraphTensorData(buffer, shape=[2, 2], dataType=F32, rowBytes=12)
    assert rows.numpy().tolist() == [[9, 1], [3, 4]]
    copied = MPSGraphTensorData(device=MPSGraphDevice(DEVICE), data=array.tobytes(), shape=[6], dataType=F32)
    array[0, 0] = 0
    assert copied.numpy()[0] == 9
    matrix = mps.MPSMatrix(
        buffer=buffer, descriptor=mps.MPSMatrixDescriptor(rows=2, columns=3, rowBytes=12, dataType=F32)
    )
    assert MPSGraphTensorData(matrix).shape == [2, 3]
    assert MPSGraphTensorData(matrix, rank=4).shape == [1, 1, 2, 3]
    vector = mps.MPSVector(buffer=buffer, descriptor=mps.MPSVectorDescriptor(length=6, dataType=F32))
    assert MPSGraphTensorData(vector).numpy().tolist() == array.ravel().tolist()
    block = bytearray(24)
    MPSGraphTensorData(matrix).mpsndarray().readBytes(block)
    assert bytes(block) == array.tobytes()
    MPSGraphTensorData(matrix).mpsndarray().writeBytes(np.full(6, 7, np.float32), strideBytes=None)
    assert (array == 7).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"data": b"12345", "shape": [1], "dataType": F32}, ValueError, r"5 bytes are given, but shape \[1\] needs 4"),
        ({"data": b"1234", "shape": [-1], "dataType": F32}, ValueError, "all sizes of data are known"),
        ({"data": b"12", "shape": [1], "dataType": MPSDataType.float16}, TypeError, "float16, which is not supported"),
        ({"data": b"1234", "shape": [1]}, TypeError, "needs shape and dataType"),
        ({"data": np.zeros(1), "shape": [1], "dataType": F32}, TypeError, "elements of float64, dataType is float32"),
        ({}, TypeError, "needs an MTLBuffer"),
    ],
)
def test_wrong_data(arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        MPSGraphTensorData(**arguments)
    with pytest.raises(TypeError, match="float16, which is not supported"):
        MPSGraphTensorData(np.zeros(2, np.float16))
    with pytest.raises(TypeError, match="list holds no elements"):
        MPSGraphTensorData([1, 2])  # type: ignore[arg-type]


def test_threads_share_a_graph() -> None:
    c = Counting()

    def work() -> None:
        for _ in range(50):
            c.graph.run(feeds=c.feeds(), targetTensors=[c.loss], targetOperations=[c.update])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert c.value() == [400, 400, 400]
