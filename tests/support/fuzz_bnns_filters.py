"""Random calls of the filters of retrograd.bnns that have no functions of their own, for fuzz_bnns.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_driver import Broken, Memory

WRONG_TYPES = [np.float64, np.int64, np.int32, np.int16, np.int8, np.dtype(">f4"), np.complex64, np.bool_]


@dataclass
class Buffers(Memory):
    """With arrays that know better than their descriptor."""

    gaps: list[tuple[np.ndarray, bytes]] = field(default_factory=list)  # between the elements of strided arrays
    strided_buffers: set[int] = field(default_factory=set)  # which no one else may use

    def shared(self) -> list[np.ndarray]:
        return [buffer for buffer in self.buffers if id(buffer) not in self.strided_buffers]

    def any(self) -> np.ndarray:
        shared = self.shared()
        return shared[self.random.integers(len(shared))]

    def strided(self, count: int) -> np.ndarray:
        """Every second element, with gaps that no call may touch."""
        whole = self.take(2 * count)
        self.strided_buffers.add(id(whole))
        self.gaps.append((whole[1::2], whole[1::2].tobytes()))
        return whole[::2]

    def wrong(self) -> np.ndarray:
        """A buffer under another type, which is refused wherever it is given."""
        array = self.any()
        dtype = np.dtype(WRONG_TYPES[self.random.integers(len(WRONG_TYPES))])
        flat = array.reshape(-1).view(np.uint8)
        return flat[: flat.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def check_guards(self) -> None:
        super().check_guards()
        if any(gap.tobytes() != before for gap, before in self.gaps):
            raise Broken("a call wrote between the elements of a strided array")


@dataclass
class Case:
    """Structures and arguments to be mutated, and calls that use them: (name, call, answers that mean failure)."""

    roots: list[Any]
    calls: Callable[[], Iterator[tuple[str, Callable[[], Any], Callable[[Any], bool]]]]


def status(answer: Any) -> bool:
    if answer not in (0, -1) or isinstance(answer, bool):
        raise Broken(f"the answer is {answer!r}, neither 0 nor -1")
    return bool(answer)


def sample(shape: list[int], data: Any = None, **fields: Any) -> bnns.BNNSNDArrayDescriptor:
    layout = bnns.BNNSDataLayoutImageCHW if len(shape) == 3 else bnns.BNNSDataLayoutVector
    return bnns.BNNSNDArrayDescriptor(
        layout=layout, size=shape[::-1], data=data, data_type=bnns.BNNSDataTypeFloat32, **fields
    )


def filter_parameters(random: np.random.Generator) -> Any:
    if random.random() < 0.5:
        return None

    def alloc(memptr: list[Any], alignment: int, size: int) -> int:
        memptr[0] = bytearray(size)
        return 0

    allocator = (alloc, lambda block: None) if random.random() < 0.2 else (None, None)
    return bnns.BNNSFilterParameters(int(random.integers(0, 2)), int(random.integers(0, 3)), *allocator)


def array(memory: Buffers, layout: int, *size: int, flags: int = 0, data: Any = None) -> bnns.BNNSNDArrayDescriptor:
    data = memory.take(int(np.prod(size))) if data is None else data
    return bnns.BNNSNDArrayDescriptor(
        flags=flags, layout=layout, size=size, data=data, data_type=bnns.BNNSDataTypeFloat32
    )


def applied(
    name: str, made: list[Any], a: dict[str, Any], **others: Any
) -> tuple[str, Callable[[], Any], Callable[[Any], bool]]:
    """A call of a filter with the arguments that the function declares: those of `others`, or of `a`."""
    function = getattr(bnns, name)
    _, *names = inspect.signature(function).parameters

    def run() -> Any:
        given = {"batch_size": a["batch"], "in_": a.get("in"), **a, **others}
        return function(made[0], *(given[one] for one in names))

    return name, run, status


def one_input(create: str, random: np.random.Generator, memory: Buffers, layer: Any, *deltas: Any) -> Case:
    """Calls of a filter with one input. `deltas`: weights_delta and bias_delta."""
    sizes = [int(np.prod([n for n in d.size if n])) for d in (layer.i_desc, layer.o_desc)]
    batch = int(random.integers(1, 4))
    x, dx, y, dy = (memory.take(batch * size) for size in np.repeat(sizes, 2))
    strides = [0 if random.random() < 0.3 else size for size in sizes]
    a = {"batch": batch, "in": x, "in_stride": strides[0], "out": y, "out_stride": strides[1]}
    a |= {"in_delta_stride": strides[0], "out_delta_stride": strides[1]}
    samples = [d.copy() for d in (layer.i_desc, layer.o_desc)]
    samples[0].data, samples[1].data = dx, dy
    if layer.i_desc.data_type == bnns.BNNSDataTypeInt32:
        a["in"] = memory.take(batch * sizes[0], np.int32)
        a["in"][:] = random.integers(-1 if random.random() < 0.1 else 0, 4, batch * sizes[0])
    for one in samples:
        one.data_type = bnns.BNNSDataTypeFloat32
    roots = [layer, filter_parameters(random), a, *samples, *deltas]

    def calls() -> Iterator[Any]:
        layer, parameters, a, in_delta, out_delta, *rest = roots
        weights_delta, bias_delta = (*rest, None, None)[:2]
        made = []

        def make() -> Any:
            made.append(getattr(bnns, create)(layer, parameters))
            return made[0]

        yield create, make, lambda answer: answer is None
        yield applied("BNNSFilterApplyBatch", made, a)
        wanted = random.random(3) < 0.7
        wanted[0] &= create != "BNNSFilterCreateLayerEmbedding"  # indices have no gradient
        yield applied(
            "BNNSFilterApplyBackwardBatch",
            made,
            a,
            in_delta=in_delta if wanted[0] else None,
            out_delta=out_delta,
            weights_delta=weights_delta if wanted[1] else None,
            bias_delta=bias_delta if wanted[2] else None,
        )
        if create == "BNNSFilterCreateLayerPermute":
            yield applied("BNNSPermuteFilterApplyBackwardBatch", made, a, in_delta=in_delta, out_delta=out_delta)
        if create == "BNNSFilterCreateLayerReduction":
            yield "BNNSDirectApplyReduction", lambda: bnns.BNNSDirectApplyReduction(layer, parameters), status

    return Case(roots, calls)


def fully_connected(random: np.random.Generator, memory: Buffers) -> Case:
    inputs, outputs = (int(n) for n in random.integers(1, 6, 2))
    layout = int(random.choice([0x20000, 0x20001, 0x28000, 0x28001]))
    size = (outputs, inputs) if layout == 0x28001 else (inputs, outputs)
    layer = bnns.BNNSLayerParametersFullyConnected(
        i_desc=sample([inputs]),
        w_desc=array(memory, layout, *size),
        o_desc=sample([outputs]),
        bias=sample([outputs], memory.take(outputs)) if random.random() < 0.7 else bnns.BNNSNDArrayDescriptor(),
        activation=bnns.BNNSActivation(int(random.integers(0, 9)), 0.5, 1.0),
    )
    deltas = array(memory, layout, *size, flags=int(random.integers(0, 2))), sample([outputs], memory.take(outputs))
    return one_input("BNNSFilterCreateLayerFullyConnected", random, memory, layer, *deltas)


def dropout(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    layer = bnns.BNNSLayerParametersDropout(sample(shape), sample(shape), 0.5, int(random.integers(0, 3)), 0)
    layer.control = int(random.integers(0, 16))
    return one_input("BNNSFilterCreateLayerDropout", random, memory, layer)


def permute(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    order = [int(k) for k in random.permutation(3)]
    new = [shape[::-1][k] for k in order][::-1]
    layer = bnns.BNNSLayerParametersPermute(sample(shape), sample(new), order)
    return one_input("BNNSFilterCreateLayerPermute", random, memory, layer)


def padding(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(2, 5, 3)]
    pads = [(int(a), int(b)) for a, b in random.integers(0, 2, (3, 2))]
    new = [n + sum(pad) for n, pad in zip(shape, pads[::-1], strict=True)]
    layer = bnns.BNNSLayerParametersPadding(sample(shape), sample(new), pads, int(random.integers(0, 3)), 0)
    return one_input("BNNSFilterCreateLayerPadding", random, memory, layer)


def embedding(random: np.random.Generator, memory: Buffers) -> Case:
    width, items, count = (int(n) for n in random.integers(1, 6, 3))
    layout = bnns.BNNSDataLayout2DLastMajor
    layer = bnns.BNNSLayerParametersEmbedding(
        int(random.integers(0, 2)),
        sample([count]),
        array(memory, layout, width, count),
        array(memory, layout, width, items + 3),
        int(random.integers(0, 8)),
        float(random.choice([0.0, 1.0])),
        float(random.choice([0.0, 1.0, 2.0])),
    )
    layer.i_desc.data_type = bnns.BNNSDataTypeInt32
    case = one_input("BNNSFilterCreateLayerEmbedding", random, memory, layer, array(memory, layout, width, items + 3))
    return case


def reduction(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 4, 3)]
    out = [n if random.random() < 0.5 else 1 for n in shape]
    weighted = random.random() < 0.5
    weights = sample(shape, memory.take(int(np.prod(shape)))) if weighted else bnns.BNNSNDArrayDescriptor()
    sides = [sample(one, memory.take(int(np.prod(one)))) for one in (shape, out)]  # the direct function reads these
    layer = bnns.BNNSLayerParametersReduction(*sides, weights, int(random.integers(0, 17)), 0.5)
    deltas = [sample(shape, memory.take(int(np.prod(shape))))] if weighted else []
    return one_input("BNNSFilterCreateLayerReduction", random, memory, layer, *deltas)


def matmul(random: np.random.Generator, memory: Buffers) -> Case:
    m, k, n, lead = (int(size) for size in random.integers(1, 4, 4))
    turned = [bool(random.random() < 0.5) for _ in range(2)]
    sizes = [(k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n), (m, n)]
    leads = [lead, 1 if random.random() < 0.5 else lead, lead]
    layout = bnns.BNNSDataLayout3DFirstMajor
    parts = [array(memory, layout, a, *b) for a, b in zip(leads, sizes, strict=True)]
    layer = bnns.BNNSLayerParametersBroadcastMatMul(
        1.5, float(random.integers(0, 2)), *turned, False, False, bool(random.random() < 0.3), *parts
    )
    deltas = [array(memory, layout, a, *b) for a, b in zip(leads, sizes, strict=True)]
    a = {"alpha": 0.5, "transA": turned[0], "transB": turned[1], "in": memory.take(lead * m * k)}
    a |= {"in_stride": 0, "out": memory.take(lead * m * n)}
    roots = [layer, *parts, *deltas, a, filter_parameters(random)]

    def calls() -> Iterator[Any]:
        layer, *parts, da, db, dc, a, parameters = roots
        other = parts[1].data
        product = (a["transA"], a["transB"], a["alpha"], *parts)
        yield "BNNSMatMulWorkspaceSize", lambda: bnns.BNNSMatMulWorkspaceSize(*product, parameters), status
        yield "BNNSMatMul", lambda: bnns.BNNSMatMul(*product, None, parameters), status
        made = []

        def make() -> Any:
            made.append(bnns.BNNSFilterCreateLayerBroadcastMatMul(layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerBroadcastMatMul", make, lambda answer: answer is None
        yield (
            "BNNSFilterApplyTwoInput",
            lambda: bnns.BNNSFilterApplyTwoInput(made[0], a["in"], other, a["out"]),
            status,
        )
        yield (
            "BNNSFilterApplyTwoInputBatch",
            lambda: bnns.BNNSFilterApplyTwoInputBatch(made[0], 1, a["in"], a["in_stride"], other, 0, a["out"], 0),
            status,
        )
        yield (
            "BNNSFilterApplyBackwardTwoInputBatch",
            lambda: bnns.BNNSFilterApplyBackwardTwoInputBatch(
                made[0], 1, a["in"], a["in_stride"], da, 0, other, 0, db, 0, None, 0, dc, 0, None, None
            ),
            status,
        )
        # Only the gradients of a product with weights: its forward call would need a descriptor i_desc to compare.
        yield (
            "BNNSFilterApplyBackwardBatch",
            lambda: bnns.BNNSFilterApplyBackwardBatch(
                made[0], 1, a["in"], a["in_stride"], da, 0, None, 0, dc, 0, db, None
            ),
            status,
        )

    return Case(roots, calls)


def copies(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    axes = [int(k) for k in random.integers(0, 3, 2)]
    turned = shape[::-1]
    turned[axes[0]], turned[axes[1]] = turned[axes[1]], turned[axes[0]]
    roots = [
        sample(shape, memory.take(int(np.prod(shape)))),
        sample(shape, memory.take(int(np.prod(shape)))),
        sample(turned[::-1], memory.take(int(np.prod(shape)))),
        {"axis0": axes[0], "axis1": axes[1]},
        filter_parameters(random),
    ]

    def calls() -> Iterator[Any]:
        source, target, turned, a, parameters = roots
        yield "BNNSCopy", lambda: bnns.BNNSCopy(target, source, parameters), status
        yield (
            "BNNSTranspose",
            lambda: bnns.BNNSTranspose(turned, source, a["axis0"], a["axis1"], parameters),
            status,
        )

    return Case(roots, calls)


def arithmetic(random: np.random.Generator, memory: Buffers) -> Case:
    function = int(random.integers(0, 41))
    arity = 3 if function in (28, 31) else 2 if function in (0, 1, 2, 3, 21, 26, 27, 29, 30, 37, 38, 39) else 1
    shape = [int(n) for n in random.integers(1, 4, 3)]
    shapes = [[n if random.random() < 0.8 else 1 for n in shape] for _ in range(arity)]
    out = [max(column) for column in zip(*shapes, strict=True)]
    batch = int(random.integers(1, 4))
    types = [int(random.choice([1, 1, 2, 0])) for _ in range(arity)]
    kind = (bnns.BNNSArithmeticUnary, bnns.BNNSArithmeticBinary, bnns.BNNSArithmeticTernary)[arity - 1]
    pairs = [part for pair in zip(map(sample, shapes), types, strict=True) for part in pair]
    fields = kind(*pairs, sample(out), bnns.BNNSSample)
    layer = bnns.BNNSLayerParametersArithmetic(
        function, fields, bnns.BNNSActivation(int(random.choice([0, 0, 4, 31])), 0.5, 1.0)
    )
    inputs = [memory.take(batch * int(np.prod(one))) for one in shapes]
    results = [sample(one, memory.take(batch * int(np.prod(one)))) for one in shapes]
    y, dy = memory.take(batch * int(np.prod(out))), memory.take(batch * int(np.prod(out)))
    a = {"batch": batch, "count": arity, "in": inputs[0], "in_stride": 0, "out": y, "out_stride": 0}
    roots = [layer, fields, filter_parameters(random), a, sample(out, dy), *results]

    def calls() -> Iterator[Any]:
        layer, _, parameters, a, out_delta, *results = roots
        made = []

        def make() -> Any:
            made.append(bnns.BNNSFilterCreateLayerArithmetic(layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerArithmetic", make, lambda answer: answer is None
        sources, strides = [a["in"], *inputs[1:]], [a["in_stride"], *[0] * (arity - 1)]
        yield (
            "BNNSArithmeticFilterApplyBatch",
            lambda: bnns.BNNSArithmeticFilterApplyBatch(
                made[0], a["batch"], a["count"], sources, strides, a["out"], a["out_stride"]
            ),
            status,
        )
        deltas = [one if kind and random.random() < 0.9 else None for one, kind in zip(results, types, strict=True)]
        yield (
            "BNNSArithmeticFilterApplyBackwardBatch",
            lambda: bnns.BNNSArithmeticFilterApplyBackwardBatch(
                made[0],
                a["batch"],
                a["count"],
                sources if random.random() < 0.8 else None,
                strides,
                deltas,
                [0] * arity,
                a["out"],
                a["out_stride"],
                out_delta,
                0,
            ),
            status,
        )

    return Case(roots, calls)


FILTERS: list[Callable[[np.random.Generator, Any], Case]] = [
    fully_connected, arithmetic, dropout, permute, padding, embedding, reduction, matmul, copies
]  # fmt: skip
