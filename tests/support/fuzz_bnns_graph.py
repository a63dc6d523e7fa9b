"""Random calls of the C functions of graphs, for fuzz_bnns.py."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case
from support.fuzz_driver import STRANGE

# Nothing streams, so that these always fail.
ALWAYS_REFUSED = {"BNNSGraphContextMakeStreaming", "BNNSGraphContextSetStreamingAdvanceCount"}
NAMES = ("output_0", "output_1", "x", "w")  # of the arguments


def build(builder: Any) -> Any:
    x = builder.argument(name="x", dataType=float, shape=[-1, 3])
    w = builder.argument(name="w", dataType=float, shape=[3], intent=builder.Intent.inOut)
    builder.update(w, w + 1)
    y = (x * w).linear(weight=np.eye(3, dtype=np.float32)).tanh()
    return [y, y.sum(axes=[1], keepDimensions=False)]


@functools.cache
def saved() -> bytes:
    """The file of a graph."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph"
        bnns.BNNSGraph.makeContext(build).write(to=path)
        return path.read_bytes()


def failed(answer: Any) -> bool:
    return bnns.last_error() is not None


def realloc(user: Any, size: int, memory: list[Any], alignment: int, count: int) -> int:
    memory[0] = bytearray(count)
    return 0


def graph_functions(random: np.random.Generator, memory: Buffers) -> Case:
    rows = int(random.integers(1, 4))
    options = bnns.BNNSGraphCompileOptionsMakeDefault()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph"
        path.write_bytes(saved())
        graph = bnns.BNNSGraphCompileFromFile(str(path), None, options)
    context = bnns.BNNSGraphContextMake(graph)
    sizes = [(rows, 3), (rows,), (rows, 3), (3,)]
    tensors = bool(random.random() < 0.3)
    arguments = []
    for shape in sizes:
        data: Any = memory.take(shape)
        if tensors:
            strides = (3, 1) if len(shape) == 2 else (1,)
            data = bnns.BNNSTensor(bnns.BNNSDataTypeFloat32, len(shape), shape, strides, data, data.nbytes)
        arguments.append(bnns.bnns_graph_argument_t(data, 12 * rows))
    shapes = [bnns.bnns_graph_shape_t(len(shape), np.array(shape)) for shape in sizes]
    a: dict[str, Any] = {
        "function": str(random.choice(["", "main"])), "argument": str(random.choice(NAMES)), "count": 4,
        "batch": rows, "mask": int(random.integers(16)), "fd": -1, "preference": int(random.integers(2)),
        "type": 2 if tensors else 0, "workspace_size": 0, "workspace": None, "flag": bool(random.random() < 0.5),
        "path": "copy", "filename": "graph", "callback": lambda level, text, where, extra: None, "realloc": realloc,
        "damage": 0, "names": [None] * 4,
    }  # fmt: skip
    described = [one.tensor for one in arguments if tensors]
    roots: list[Any] = [options, graph, context, bnns.BNNSTensor(), *arguments, *shapes, a, *described]

    def any_of(handle: Any) -> Any:
        return STRANGE[random.integers(len(STRANGE))] if random.random() < 0.04 else handle

    def calls() -> Iterator[Any]:
        options, graph, context, tensor = roots[:4]
        arguments, shapes, a = roots[4:8], roots[8:12], roots[12]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            content = bytearray(saved())
            if random.random() < 0.3:
                content[random.integers(len(content))] = random.integers(256)
            (path / "graph").write_bytes(content)
            places = [str(path / one) if isinstance(one, str) else one for one in (a["filename"], a["path"])]
            fd = -1 if isinstance(a["fd"], int) and 0 <= a["fd"] < 4096 else a["fd"]  # not those of this process
            function, argument, count, flag = a["function"], a["argument"], a["count"], a["flag"]
            given: dict[str, tuple[Any, ...]] = {
                "CompileOptionsSetTargetSingleThread": (options, flag),
                "CompileOptionsSetGenerateDebugInfo": (options, flag),
                "CompileOptionsSetOptimizationPreference": (options, a["preference"]),
                "CompileOptionsSetOutputPath": (options, places[1]),
                "CompileOptionsSetOutputFD": (options, fd),
                "CompileOptionsSetMessageLogCallback": (options, a["callback"], None),
                "CompileOptionsSetMessageLogMask": (options, a["mask"]),
                "CompileOptionsGetTargetSingleThread": (options,),
                "CompileOptionsGetGenerateDebugInfo": (options,),
                "CompileOptionsGetOptimizationPreference": (options,),
                "CompileOptionsGetOutputPath": (options,),
                "CompileOptionsGetOutputFD": (options,),
                "CompileFromFile": (places[0], function, options),
                "GetInputCount": (graph, function),
                "GetOutputCount": (graph, function),
                "GetArgumentCount": (graph, function),
                "GetFunctionCount": (graph,),
                "GetInputNames": (graph, function, count, a["names"]),
                "GetOutputNames": (graph, function, count, a["names"]),
                "GetArgumentNames": (graph, function, count, a["names"]),
                "GetArgumentIntents": (graph, function, count, a["names"]),
                "GetFunctionNames": (graph, count, a["names"]),
                "GetArgumentPosition": (graph, function, argument),
                "GetArgumentInterleaveFactors": (graph, function, count, a["names"], [0] * 4),
                "TensorFillStrides": (graph, function, argument, tensor),
                "ContextMake": (graph,),
                "ContextMakeStreaming": (graph, function, count, None),
                "ContextSetStreamingAdvanceCount": (context, count),
                "ContextSetMessageLogCallback": (context, a["callback"], None),
                "ContextSetMessageLogMask": (context, a["mask"]),
                "ContextSetArgumentType": (context, a["type"]),
                "ContextEnableNanAndInfChecks": (context, flag),
                "ContextSetWorkspaceAllocationCallback": (context, a["realloc"], lambda user, size: None, 0, None),
                "ContextSetOutputAllocationCallback": (context, a["realloc"], lambda user, size: None, 0, None),
                "ContextSetBatchSize": (context, function, a["batch"]),
                "ContextSetDynamicShapes": (context, function, count, shapes),
                "ContextGetWorkspaceSize": (context, function),
                "ContextGetTensor": (context, function, argument, flag, tensor),
                "ContextExecute": (context, function, count, arguments, a["workspace_size"], a["workspace"]),
                "CompileOptionsDestroy": (options,),
                "ContextDestroy": (context,),
            }
            for name, (handle, *rest) in given.items():
                if name.startswith("ContextSet") and random.random() < 0.3:
                    continue  # as a caller that leaves something at its default
                if random.random() < 0.003:
                    bnns.BNNSGraphContextDestroy(context)
                call: Callable[..., Any] = getattr(bnns, f"BNNSGraph{name}")
                first = handle if name == "CompileFromFile" else any_of(handle)
                yield f"BNNSGraph{name}", lambda call=call, first=first, rest=rest: call(first, *rest), failed

    return Case(roots, calls)
