"""BNNSGraph in C's spelling: codes, queries, shapes, callbacks, workspaces."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import (
    BNNSGraph,
    BNNSTensor,
    bnns_graph_argument_t,
    bnns_graph_context_t,
    bnns_graph_shape_t,
    bnns_graph_t,
)

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.bnns._failure.BNNSWarning")


def build(builder: Any) -> Any:
    x = builder.argument(name="x", dataType=float, shape=[-1, 3])
    w = builder.argument(name="w", dataType=float, shape=[3], intent=builder.Intent.inOut)
    builder.update(w, w + 1)
    y = x * w
    return [y, y.sum(axes=[1], keepDimensions=False)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "graph.safetensors"
    BNNSGraph.makeContext(build).write(to=file)
    return file


@pytest.fixture
def graph(path: Path) -> bnns_graph_t:
    found = bnns.BNNSGraphCompileFromFile(str(path), None, bnns.BNNSGraphCompileOptionsMakeDefault())
    assert found.data is not None
    return found


@pytest.fixture
def context(graph: bnns_graph_t) -> Iterator[bnns_graph_context_t]:
    found = bnns.BNNSGraphContextMake(graph)
    yield found
    bnns.BNNSGraphContextDestroy(found)


def pointer(array: Any, size: int | None = None) -> bnns_graph_argument_t:
    return bnns_graph_argument_t(data_ptr=array, data_ptr_size=array.nbytes if size is None else size)


def arrays(rows: int) -> list[Any]:
    f = np.float32
    return [np.zeros((rows, 3), f), np.zeros(rows, f), np.ones((rows, 3), f), np.full(3, 2, f)]


def shapes(*sizes: list[int]) -> list[bnns_graph_shape_t]:
    return [bnns_graph_shape_t(len(one), one) for one in sizes]


def test_options() -> None:
    options = bnns.BNNSGraphCompileOptionsMakeDefault()
    assert options.size
    assert bnns.BNNSGraphCompileOptionsGetTargetSingleThread(options) is False
    bnns.BNNSGraphCompileOptionsSetTargetSingleThread(options, True)
    assert bnns.BNNSGraphCompileOptionsGetTargetSingleThread(options) is True
    bnns.BNNSGraphCompileOptionsSetGenerateDebugInfo(options, True)
    assert bnns.BNNSGraphCompileOptionsGetGenerateDebugInfo(options) is True
    bnns.BNNSGraphCompileOptionsSetOptimizationPreference(options, bnns.BNNSGraphOptimizationPreferenceIRSize)
    assert bnns.BNNSGraphCompileOptionsGetOptimizationPreference(options) == 1
    bnns.BNNSGraphCompileOptionsSetOptimizationPreference(options, 7)
    assert "preference is 7" in (bnns.last_error() or "")
    assert bnns.BNNSGraphCompileOptionsGetOutputPath(options) is None
    assert bnns.BNNSGraphCompileOptionsGetOutputFD(options) == -1
    bnns.BNNSGraphCompileOptionsDestroy(options)
    bnns.BNNSGraphCompileOptionsSetTargetSingleThread(options, True)
    assert "options is NULL, or was destroyed" in (bnns.last_error() or "")


def test_a_compiled_graph_is_written(path: Path, tmp_path: Path) -> None:
    options, copy = bnns.BNNSGraphCompileOptionsMakeDefault(), tmp_path / "copy"
    bnns.BNNSGraphCompileOptionsSetOutputPath(options, str(copy))
    assert bnns.BNNSGraphCompileOptionsGetOutputPath(options) == str(copy)
    assert bnns.BNNSGraphCompileFromFile(str(path), b"main", options).data is not None
    assert bnns.BNNSGraphGetArgumentCount(bnns.BNNSGraphCompileFromFile(copy)) == 4
    other = tmp_path / "other"
    with other.open("wb") as file:
        bnns.BNNSGraphCompileOptionsSetOutputFD(options, file.fileno())
        assert bnns.BNNSGraphCompileFromFile(str(path), "", options).data is not None
    assert other.read_bytes() == copy.read_bytes()


def test_queries(graph: bnns_graph_t) -> None:
    assert bnns.BNNSGraphGetInputCount(graph, None) == 2
    assert bnns.BNNSGraphGetOutputCount(graph, None) == 2
    assert bnns.BNNSGraphGetArgumentCount(graph, b"main") == 4
    assert bnns.BNNSGraphGetFunctionCount(graph) == 1
    names = [""] * 4
    assert bnns.BNNSGraphGetArgumentNames(graph, None, 4, names) == 0
    assert names == ["output_0", "output_1", "x", "w"]
    for function, expected in (
        (bnns.BNNSGraphGetInputNames, ["x", "w"]),
        (bnns.BNNSGraphGetOutputNames, ["output_0", "output_1"]),
    ):
        found = [""] * 9
        assert function(graph, None, 9, found) == 0
        assert found[:3] == [*expected, ""]
    intents = np.zeros(4, np.uint32)
    assert bnns.BNNSGraphGetArgumentIntents(graph, None, 4, intents) == 0
    assert intents.tolist() == [2, 2, 1, 3]
    functions = [""]
    assert bnns.BNNSGraphGetFunctionNames(graph, 1, functions) == 0
    assert functions == ["main"]
    assert bnns.BNNSGraphGetArgumentPosition(graph, None, b"w") == 3
    factors, counts = [1] * 4, [1] * 4
    assert bnns.BNNSGraphGetArgumentInterleaveFactors(graph, None, 4, factors, counts) == 0
    assert (factors, counts) == ([None] * 4, [0] * 4)
    tensor = BNNSTensor(rank=2, shape=[4, 3])
    assert bnns.BNNSGraphTensorFillStrides(graph, None, "x", tensor) == 0
    assert list(tensor.stride[:2]) == [3, 1]


def test_failures_of_queries(graph: bnns_graph_t) -> None:
    assert bnns.BNNSGraphGetArgumentCount(graph, "other") == bnns.SIZE_MAX
    assert "no function 'other'; there are main" in (bnns.last_error() or "")
    assert bnns.BNNSGraphGetArgumentPosition(graph, None, "z") == bnns.SIZE_MAX
    assert "no argument 'z'" in (bnns.last_error() or "")
    assert bnns.BNNSGraphGetArgumentNames(graph, None, 4, [""]) == -1
    assert bnns.BNNSGraphGetFunctionCount(bnns_graph_t()) == bnns.SIZE_MAX
    assert bnns.BNNSGraphContextMake(bnns_graph_t()).data is None
    assert bnns.BNNSGraphTensorFillStrides(graph, None, "x", BNNSTensor(rank=2, shape=[-1, 3])) == -1
    assert bnns.BNNSGraphContextMakeStreaming(graph, None, 0, None).data is None
    assert "streaming is not supported" in (bnns.last_error() or "")


def test_execution_by_pointers(context: bnns_graph_context_t) -> None:
    assert bnns.BNNSGraphContextGetWorkspaceSize(context, None) == bnns.SIZE_MAX
    given = shapes([0, 0], [0], [4, 3], [])
    assert bnns.BNNSGraphContextSetDynamicShapes(context, None, 4, given) == 0
    assert [one.shape for one in given] == [[4, 3], [4], [4, 3], []]
    size = bnns.BNNSGraphContextGetWorkspaceSize(context, None)
    assert size % mmap.PAGESIZE == 0
    y, total, x, w = arrays(4)
    workspace = mmap.mmap(-1, size)
    arguments = [pointer(one) for one in (y, total, x, w)]
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments, size, workspace) == 0
    assert total.tolist() == [6] * 4
    assert w.tolist() == [3, 3, 3]
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments, 1, workspace) == -1
    assert "workspace_size is 1" in (bnns.last_error() or "")
    assert bnns.BNNSGraphContextExecute(context, None, 3, arguments) == -1
    assert "3 arguments are given, but 'main' has 4" in (bnns.last_error() or "")
    arguments[2] = pointer(x, 8)
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments) == -1
    assert "data_ptr_size of 'x' is 8, but it needs 48 bytes" in (bnns.last_error() or "")
    assert w.tolist() == [3, 3, 3]


def test_codes_of_shapes(context: bnns_graph_context_t) -> None:
    set_shapes = bnns.BNNSGraphContextSetDynamicShapes
    assert set_shapes(context, None, 4, shapes([], [], [], [])) == 2
    assert set_shapes(context, None, 4, shapes([], [], [5, 0], [3])) == 0
    assert set_shapes(context, None, 4, shapes([], [], [5, 4], [])) < 0
    assert set_shapes(context, None, 4, [None] * 4) < 0  # type: ignore[list-item]
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 6) == 0
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 0) < 0
    tensor = BNNSTensor()
    assert bnns.BNNSGraphContextGetTensor(context, None, "output_0", True, tensor) == 0
    assert list(tensor.shape[:2]) == [6, 3]
    assert bnns.BNNSGraphContextGetTensor(context, None, "x", False, tensor) == 0
    assert list(tensor.shape[:2]) == [-1, 3]


def test_execution_by_tensors_and_allocation(graph: bnns_graph_t) -> None:
    context = bnns.BNNSGraphContextMake(graph)
    blocks: list[bytearray] = []
    freed: list[Any] = []

    def realloc(user: Any, size: int, memory: list[Any], alignment: int, nbytes: int) -> int:
        blocks.append(bytearray(nbytes))
        memory[0] = blocks[-1]
        return 0

    user = object()
    for function in (
        bnns.BNNSGraphContextSetOutputAllocationCallback,
        bnns.BNNSGraphContextSetWorkspaceAllocationCallback,
    ):
        assert function(context, realloc, lambda one, size: freed.append(one), 8, user) == 0
        assert function(context, realloc, None) == -1
        assert function(context, realloc, lambda one, size: freed.append(one), 8, user) == 0
    assert bnns.BNNSGraphContextSetArgumentType(context, bnns.BNNSGraphArgumentTypeTensor) == 0
    assert bnns.BNNSGraphContextSetArgumentType(context, 1) == -1
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 2) == 0
    _, _, x, w = arrays(2)
    y, total = BNNSTensor(), BNNSTensor()
    tensors = [y, total, BNNSTensor.allocate(initializingFrom=x), BNNSTensor.allocate(initializingFrom=w)]
    arguments = [bnns_graph_argument_t(tensor=one) for one in tensors]
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments) == 0, bnns.last_error()
    assert y.data is blocks[0]
    assert np.frombuffer(blocks[1], np.float32).tolist() == [6, 6]
    assert list(y.shape[:2]) == [2, 3]
    arguments[0] = pointer(x)
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments) == -1
    bnns.BNNSGraphContextDestroy(context)
    assert freed == [user]
    assert bnns.BNNSGraphContextExecute(context, None, 4, arguments) == -1


def test_messages(path: Path, context: bnns_graph_context_t) -> None:
    told: list[tuple[Any, ...]] = []
    extra = bnns.bnns_user_message_data_t()
    options = bnns.BNNSGraphCompileOptionsMakeDefault()
    bnns.BNNSGraphCompileOptionsSetMessageLogCallback(options, lambda *message: told.append(message), extra)
    assert bnns.BNNSGraphCompileFromFile(f"{path}.mlmodelc", None, options).data is None
    level, text, _, given = told.pop()
    assert (level, given) == (bnns.BNNSGraphMessageLevelUnsupported, extra)
    assert "compiled Core ML model" in text
    bnns.BNNSGraphCompileOptionsSetMessageLogMask(options, bnns.BNNSGraphMessageLevelError)
    assert bnns.BNNSGraphCompileFromFile(f"{path}.mlmodelc", None, options).data is None
    assert not told
    assert bnns.BNNSGraphContextSetMessageLogCallback(context, lambda *message: told.append(message)) == 0
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 0) < 0
    assert told.pop()[0] == bnns.BNNSGraphMessageLevelError
    assert bnns.BNNSGraphContextSetMessageLogMask(context, 0) == 0
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 0) < 0
    assert not told
    assert bnns.BNNSGraphContextSetStreamingAdvanceCount(context, 1) == -1


def test_nan_checks_and_indices(context: bnns_graph_context_t) -> None:
    bnns.BNNSGraphContextEnableNanAndInfChecks(context, True)
    assert bnns.BNNSGraphContextSetBatchSize(context, None, 1) == 0
    y, total, x, w = arrays(1)
    x[0, 1] = np.nan
    assert bnns.BNNSGraphContextExecute(context, None, 4, [pointer(one) for one in (y, total, x, w)]) == -1
    assert "'x' has NaNs" in (bnns.last_error() or "")
    assert w.tolist() == [2, 2, 2]


def test_contexts_share_a_graph(graph: bnns_graph_t) -> None:
    first, second = (bnns.BNNSGraphContextMake(graph) for _ in range(2))
    for context, rows in ((first, 1), (second, 5), (first, 1)):
        assert bnns.BNNSGraphContextSetBatchSize(context, None, rows) == 0
        given = arrays(rows)
        assert bnns.BNNSGraphContextExecute(context, None, 4, [pointer(one) for one in given]) == 0
        assert given[1].tolist() == [6] * rows
