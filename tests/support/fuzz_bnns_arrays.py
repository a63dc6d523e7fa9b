"""Random calls for fuzz_bnns.py: largest values, quantizers, nearest neighbours, fused filters with other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, array, filter_parameters, sample, status

INT32, FLOAT32 = bnns.BNNSDataTypeInt32, bnns.BNNSDataTypeFloat32
HIGHER = [(INT32, np.int32), (bnns.BNNSDataTypeFloat16, np.float16), (FLOAT32, np.float32)]
LOWER = [
    (getattr(bnns, f"BNNSDataType{name}"), np.dtype(name.lower()))
    for name in ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32")
]


def typed(memory: Buffers, layout: int, size: list[int], batch: int, data_type: int, dtype: Any) -> Any:
    """A descriptor of one sample, over the memory of a batch."""
    described = array(memory, layout, *size, data=memory.take(batch * int(np.prod(size)), dtype))
    described.data_type = data_type
    return described


def largest(random: np.random.Generator, memory: Buffers) -> Case:
    layout = int(random.choice([bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor]))
    size, axis, batch = [int(n) for n in random.integers(1, 5, 3)], int(random.integers(3)), int(random.integers(1, 4))
    count = int(random.integers(1, size[axis] + 1))
    best, rest = [*size[:axis], count, *size[axis + 1 :]], [*size[:axis], *size[axis + 1 :]]
    matrix = bnns.BNNSDataLayout2DFirstMajor if layout & 1 else bnns.BNNSDataLayout2DLastMajor
    test = typed(memory, matrix, rest, batch, INT32, np.int32)
    test.data %= size[axis]
    a = {"K": count, "axis": axis, "batch": batch, "in_stride": 0, "out_stride": 0}
    roots = [
        typed(memory, layout, size, batch, FLOAT32, np.float32),
        typed(memory, layout, best, batch, FLOAT32, np.float32),
        typed(memory, layout, best, batch, INT32, np.int32),
        test,
        typed(memory, matrix, rest, batch, bnns.BNNSDataTypeBoolean, np.bool_),
        a,
        filter_parameters(random),
    ]
    wanted = random.random() < 0.8

    def calls() -> Iterator[Any]:
        source, values, indices, test, output, a, parameters = roots
        first = (a["K"], a["axis"], a["batch"], source, a["in_stride"])
        yield (
            "BNNSDirectApplyTopK",
            lambda: bnns.BNNSDirectApplyTopK(
                *first, values, a["out_stride"], indices if wanted else None, a["out_stride"], parameters
            ),
            status,
        )
        yield (
            "BNNSDirectApplyInTopK",
            lambda: bnns.BNNSDirectApplyInTopK(*first, test, a["in_stride"], output, a["out_stride"], parameters),
            status,
        )

    return Case(roots, calls)


def operand(random: np.random.Generator, memory: Buffers, length: int) -> Any:
    """A scale or a bias, if there is one."""
    return sample([length], memory.take(length)) if random.random() < 0.7 else bnns.BNNSNDArrayDescriptor()


def quantizer(random: np.random.Generator, memory: Buffers) -> Case:
    layout = int(random.choice([bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor]))
    size, batch = [int(n) for n in random.integers(1, 5, 3)], int(random.integers(1, 4))
    function, bit = int(random.integers(2)), int(random.integers(-1, 4))
    types = [HIGHER[random.integers(3)], LOWER[random.integers(6)]]
    source, target = (typed(memory, layout, size, batch, *one) for one in (types[::-1] if function else types))
    length = 1 if bit < 0 else [*size, batch][bit]
    layer = bnns.BNNSLayerParametersQuantization(
        0 if bit < 0 else 1 << bit, function, source, target,
        operand(random, memory, length), operand(random, memory, length),
    )  # fmt: skip
    a = {"batch": batch, "in_stride": 0, "out_stride": 0}
    roots = [layer, a, filter_parameters(random)]

    def calls() -> Iterator[Any]:
        layer, a, parameters = roots
        yield (
            "BNNSDirectApplyQuantizer",
            lambda: bnns.BNNSDirectApplyQuantizer(layer, parameters, a["batch"], a["in_stride"], a["out_stride"]),
            status,
        )

    return Case(roots, calls)


def fused_quantizer(random: np.random.Generator, memory: Buffers) -> Case:
    """A fully connected layer and a quantization of its output."""
    inputs, outputs, batch = (int(n) for n in random.integers(1, 5, 3))
    bit = int(random.integers(-1, 2))
    length = 1 if bit < 0 else [outputs, batch][bit]
    data_type, dtype = LOWER[random.integers(6)]
    stored = sample([outputs])
    stored.data_type = data_type
    layer = bnns.BNNSLayerParametersQuantization(
        0 if bit < 0 else 1 << bit, 0, sample([outputs]), stored,
        operand(random, memory, length), operand(random, memory, length),
    )  # fmt: skip
    first = bnns.BNNSLayerParametersFullyConnected(
        sample([inputs]), array(memory, bnns.BNNSDataLayoutRowMajorMatrix, inputs, outputs), sample([outputs])
    )
    x, dx, dy = (memory.take(batch * n) for n in (inputs, inputs, outputs))
    a: dict[str, Any] = {"batch": batch, "in": x, "in_stride": 0, "out_stride": 0, "training": False}
    a |= {"out": memory.take(batch * outputs, dtype), "types": [bnns.BNNSFullyConnected, bnns.BNNSQuantization]}
    roots = [layer, first, a, sample([inputs], dx), sample([outputs], dy), filter_parameters(random)]

    def calls() -> Iterator[Any]:
        layer, first, a, in_delta, out_delta, parameters = roots
        made: list[Any] = []

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateFusedLayer(2, a["types"], [first, layer], parameters))
            return made[0]

        yield "BNNSFilterCreateFusedLayer", create, lambda answer: answer is None
        yield (
            "BNNSFusedFilterApplyBatch",
            lambda: bnns.BNNSFusedFilterApplyBatch(
                made[0], a["batch"], a["in"], a["in_stride"], a["out"], a["out_stride"], a["training"]
            ),
            status,
        )
        yield (
            "BNNSFusedFilterApplyBackwardBatch",
            lambda: bnns.BNNSFusedFilterApplyBackwardBatch(
                made[0], a["batch"], a["in"], 0, in_delta, 0, a["out"], 0, out_delta, 0, None
            ),
            status,
        )

    return Case(roots, calls)


def fused_arithmetic(random: np.random.Generator, memory: Buffers) -> Case:
    """A sum or a product of a sample and a parameter, and a batch norm of it."""
    shape, batch = [int(n) for n in random.integers(1, 4, 3)], int(random.integers(1, 4))
    size, kind = int(np.prod(shape)), int(random.choice([bnns.BNNSArithmeticAdd, bnns.BNNSArithmeticMultiply]))
    fields = bnns.BNNSArithmeticBinary(
        sample(shape), bnns.BNNSSample, sample(shape), bnns.BNNSParameter, sample(shape), bnns.BNNSSample
    )
    norm = bnns.BNNSLayerParametersNormalization(i_desc=sample(shape), o_desc=sample(shape), epsilon=1e-3)
    a: dict[str, Any] = {"batch": batch, "number": 2, "in": memory.take(batch * size), "source": memory.take(size)}
    a |= {"in_stride": 0, "out": memory.take(batch * size), "out_stride": 0, "training": True, "delta_stride": 0}
    deltas = [sample(shape, memory.take(batch * size)), sample(shape, memory.take(size))]
    rest = [sample(shape, memory.take(batch * size)), sample([shape[0]], memory.take(shape[0]))]
    roots = [
        bnns.BNNSLayerParametersArithmetic(kind, fields),
        norm,
        fields,
        a,
        *deltas,
        *rest,
        filter_parameters(random),
    ]

    def calls() -> Iterator[Any]:
        layer, norm, _, a, da, db, out_delta, beta_delta, parameters = roots
        made: list[Any] = []
        types = (bnns.BNNSArithmetic, bnns.BNNSBatchNorm)

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateFusedLayer(2, types, [layer, norm], parameters))
            return made[0]

        given = lambda: (made[0], a["batch"], a["number"], [a["in"], a["source"]], [a["in_stride"], 0])  # noqa: E731
        out = (a["out"], a["out_stride"])
        yield "BNNSFilterCreateFusedLayer", create, lambda answer: answer is None
        yield (
            "BNNSFusedFilterApplyMultiInputBatch",
            lambda: bnns.BNNSFusedFilterApplyMultiInputBatch(*given(), *out, a["training"]),
            status,
        )
        yield (
            "BNNSFusedFilterApplyBackwardMultiInputBatch",
            lambda: bnns.BNNSFusedFilterApplyBackwardMultiInputBatch(
                *given(), [da, db], [a["delta_stride"], 0], *out, out_delta, a["delta_stride"], [beta_delta, None]
            ),
            status,
        )

    return Case(roots, calls)


def neighbours(random: np.random.Generator, memory: Buffers) -> Case:
    count, features, wanted = (int(n) for n in random.integers(1, 6, 3))
    half = random.random() < 0.3
    dtype = np.float16 if half else np.float32
    a: dict[str, Any] = {"capacity": count + 2, "features": features, "wanted": wanted, "count": count}
    a |= {"data_type": bnns.BNNSDataTypeFloat16 if half else FLOAT32, "sample": int(random.integers(-1, count))}
    a |= {"in": memory.take(count * features, dtype), "out": memory.take(count * wanted, dtype)}
    a |= {"indices": memory.take(count * wanted, np.int32)}
    roots = [a, filter_parameters(random)]

    def calls() -> Iterator[Any]:
        a, parameters = roots
        made: list[Any] = []

        def create() -> Any:
            made.append(
                bnns.BNNSCreateNearestNeighbors(a["capacity"], a["features"], a["wanted"], a["data_type"], parameters)
            )
            return made[0]

        yield "BNNSCreateNearestNeighbors", create, lambda answer: answer is None
        for _ in range(2):  # the second load may be too much
            yield (
                "BNNSNearestNeighborsLoad",
                lambda: bnns.BNNSNearestNeighborsLoad(made[0], a["count"], a["in"]),
                status,
            )
        if random.random() < 0.1:
            bnns.BNNSDestroyNearestNeighbors(made[0])
        yield (
            "BNNSNearestNeighborsGetInfo",
            lambda: bnns.BNNSNearestNeighborsGetInfo(made[0], a["sample"], a["indices"], a["out"]),
            status,
        )
        bnns.BNNSDestroyNearestNeighbors(made[0])

    return Case(roots, calls)


ARRAYS: list[Callable[[np.random.Generator, Any], Case]] = [
    largest, quantizer, fused_quantizer, fused_arithmetic, neighbours
]  # fmt: skip
