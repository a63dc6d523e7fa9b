"""Random calls of resize filters, crop-resize, tensor contractions and Gram filters, for fuzz_bnns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, array, filter_parameters, one_input, sample, status

OPERATIONS = [
    "a_ij -> c_ji",
    "a_*i -> c_*",
    "a_ij, b_jk -> c_ik",
    "a_ij, b_ij -> c_j",
    "a_*ij, b_jk -> c_*ik",
    "a_ij*, b_jk -> c_ik*",
    "x_ij, x_ik -> c_jk",
    "x_*i, x_*k -> c_*ik",
    "a_ij, w_jk -> c_ik",
    "w_*ij, a_*jk -> c_*ik",
    "a_i, b_k -> c_ik",
    "a_ij, b_ij -> c_",
]


def resize(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    factors = [int(n) for n in random.integers(1, 4, 3)]
    method = int(random.integers(0, 2))
    if method == bnns.BNNSInterpolationMethodLinear:
        factors[int(random.integers(3))] = 1
    large = [n * factor for n, factor in zip(shape, factors, strict=True)]
    sizes = (large, shape) if random.random() < 0.4 else (shape, large)
    layer = bnns.BNNSLayerParametersResize(method, *map(sample, sizes), bool(random.random() < 0.5))
    return one_input("BNNSFilterCreateLayerResize", random, memory, layer)


def gram(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    square = array(memory, bnns.BNNSDataLayoutRowMajorMatrix, shape[0], shape[0])
    layer = bnns.BNNSLayerParametersGram(0.5, sample(shape), square)
    return one_input("BNNSFilterCreateLayerGram", random, memory, layer)


def crop_resize(random: np.random.Generator, memory: Buffers) -> Case:
    n, channels, boxes = (int(size) for size in random.integers(1, 3, 3))
    height, width, rows, columns = (int(size) for size in random.integers(1, 6, 4))
    layouts = [rank << 16 | 0x8000 | int(random.integers(0, 2)) for rank in (4, 2, 5)]
    shapes = (n, channels, height, width), (boxes, 4), (boxes, n, channels, rows, columns)

    def described(k: int) -> Any:
        shape = shapes[k] if layouts[k] & 1 else shapes[k][::-1]
        return array(memory, layouts[k], *shape, flags=int(random.integers(0, 2)) if k != 1 else 0)

    layer = bnns.BNNSLayerParametersCropResize(
        bool(random.random() < 0.5),
        float(random.choice([1.0, 0.5, 3.0])),
        float(random.choice([0.0, 2.5, np.nan])),
        int(random.integers(0, 5)),
        int(random.integers(0, 4)),
        int(random.integers(0, 2)),
    )
    roi = described(1)
    roi.data *= 2
    roots = [layer, described(0), roi, described(2), described(0), described(2), filter_parameters(random)]

    def calls() -> Iterator[Any]:
        layer, image, roi, crops, image_delta, crops_delta, parameters = roots
        yield "BNNSCropResize", lambda: bnns.BNNSCropResize(layer, image, roi, crops, parameters), status
        yield (
            "BNNSCropResizeBackward",
            lambda: bnns.BNNSCropResizeBackward(layer, image_delta, roi, crops_delta, parameters),
            status,
        )

    return Case(roots, calls)


def contraction(random: np.random.Generator, memory: Buffers) -> Case:
    operation = OPERATIONS[random.integers(len(OPERATIONS))]
    left, right = operation.split(" -> ")
    extents = {letter: int(random.integers(1, 4)) for letter in "ijk"} | {"*": int(random.integers(1, 4))}
    terms = [*left.split(", "), right]
    sizes = [tuple(extents[index] for index in term.split("_")[1]) or (1,) for term in terms]
    if len(terms) == 2 or terms[0][0] == terms[1][0]:  # one input: the second operand is not looked at
        sizes = [sizes[0], sizes[0], sizes[-1]]
    parts = [array(memory, len(size) << 16 | 0x8001, *size) for size in sizes]
    layer = bnns.BNNSLayerParametersTensorContraction(operation, 1.5, float(random.integers(0, 2)), *parts)
    batch = int(random.integers(1, 4))

    def samples(k: int) -> np.ndarray:
        return memory.take(batch * int(np.prod(sizes[k])))

    deltas = [
        array(memory, part.layout, *size, flags=int(random.integers(0, 2)), data=samples(k))
        for k, (part, size) in enumerate(zip(parts, sizes, strict=True))
    ]
    weights = [term[0] == "w" for term in terms[:2]]
    inputs = [k for k in range(len(terms) - 1) if not weights[k]]
    x, other, y = samples(inputs[0]), samples(1), samples(2)
    a: dict[str, Any] = {"batch": batch, "in": x, "in_stride": 0, "out": y, "out_stride": 0}
    roots = [layer, filter_parameters(random), a, *deltas]

    def calls() -> Iterator[Any]:
        layer, parameters, a, *deltas = roots
        made = []

        def make() -> Any:
            made.append(bnns.BNNSFilterCreateLayerTensorContraction(layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerTensorContraction", make, lambda answer: answer is None
        if len(inputs) == 2 and terms[0][0] != terms[1][0]:
            given = made[0], a["batch"], a["in"], a["in_stride"]
            yield (
                "BNNSFilterApplyTwoInputBatch",
                lambda: bnns.BNNSFilterApplyTwoInputBatch(*given, other, 0, a["out"], a["out_stride"]),
                status,
            )
            yield (
                "BNNSFilterApplyBackwardTwoInputBatch",
                lambda: bnns.BNNSFilterApplyBackwardTwoInputBatch(
                    *given, deltas[0], 0, other, 0, deltas[1], 0, None, 0, deltas[2], 0, None, None
                ),
                status,
            )
            return
        yield (
            "BNNSFilterApplyBatch",
            lambda: bnns.BNNSFilterApplyBatch(made[0], a["batch"], a["in"], a["in_stride"], a["out"], a["out_stride"]),
            status,
        )
        yield (
            "BNNSFilterApplyBackwardBatch",
            lambda: bnns.BNNSFilterApplyBackwardBatch(
                made[0],
                a["batch"],
                a["in"],
                a["in_stride"],
                deltas[inputs[0]],
                0,
                None,
                0,
                deltas[2],
                0,
                deltas[1 - inputs[0]] if any(weights) else None,
                None,
            ),
            status,
        )

    return Case(roots, calls)


def changed(random: np.random.Generator) -> str:
    """An operation, with some characters replaced, removed or added."""
    text = OPERATIONS[random.integers(len(OPERATIONS))]
    for _ in range(int(random.integers(0, 3))):
        k = int(random.integers(len(text)))
        new = str(random.choice(list("aijkwx_*,-> \0")))
        text = text[:k] + new[: random.integers(0, 2)] + text[k + int(random.integers(0, 2)) :]
    return text


RESIZES: list[Callable[[np.random.Generator, Any], Case]] = [resize, crop_resize, contraction, gram]
