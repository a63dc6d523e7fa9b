"""BNNS tensor contractions and Gram matrices."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import (
    BF16,
    F16,
    F32,
    FIRST,
    TYPES,
    Descriptor,
    all_fail,
    created,
    fails,
    first,
    normal,
    not_created,
    succeeds,
)
from support.bnns_inside import products

ROW, COLUMN, IMAGE = (
    bnns.BNNSDataLayoutRowMajorMatrix,
    bnns.BNNSDataLayoutColumnMajorMatrix,
    bnns.BNNSDataLayoutImageCHW,
)
VECTOR, ONE = bnns.BNNSDataLayoutVector, (1,)
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)


def layer(operation: Any, a: Any, b: Any, out: Any, **fields: Any) -> Any:
    given = {"operation": operation, "alpha": 1.0, "iA_desc": a, "iB_desc": Descriptor() if b is None else b}
    return bnns.BNNSLayerParametersTensorContraction(**{**given, "o_desc": out, **fields})


def create(operation: Any, a: Any, b: Any, out: Any, parameters: Any = CLIENT, **fields: Any) -> Any:
    return created(bnns.BNNSFilterCreateLayerTensorContraction(layer(operation, a, b, out, **fields), parameters))


def refusal(operation: Any, a: Any, b: Any, out: Any, **fields: Any) -> str:
    assert bnns.BNNSFilterCreateLayerTensorContraction(layer(operation, a, b, out, **fields)) is None
    return bnns.last_error() or ""


def einsum_of(operation: str, batch: bool = True) -> str:
    """The same in NumPy's and PyTorch's words, with a batch before all indices but those of weights."""
    left, right = operation.replace(" ", "").split("->")
    terms = [
        ("Z" if batch and not term.startswith("w_") else "") + term.split("_")[1].replace("*", "...")
        for term in (*left.split(","), right)
    ]
    return ",".join(terms[:-1]) + "->" + terms[-1]


def apply(filter: Any, inputs: list[np.ndarray], y: np.ndarray) -> int:
    if len(inputs) == 1:
        return bnns.BNNSFilterApplyBatch(filter, len(y), inputs[0], 0, y, 0)
    return bnns.BNNSFilterApplyTwoInputBatch(filter, len(y), inputs[0], 0, inputs[1], 0, y, 0)


def backward(filter: Any, inputs: list[Any], deltas: list[Any], dy: Any, batch: int, **more: Any) -> int:
    last = None, 0, dy, 0, more.get("weights"), more.get("bias")
    if len(inputs) == 1:
        return bnns.BNNSFilterApplyBackwardBatch(filter, batch, inputs[0], 0, deltas[0], 0, *last)
    return bnns.BNNSFilterApplyBackwardTwoInputBatch(
        filter, batch, inputs[0], 0, deltas[0], 0, inputs[1], 0, deltas[1], 0, *last
    )


# ---- values and gradients --------------------------------------------------------------------------------------------

OPERATIONS: list[tuple[str, tuple[int, ...], tuple[int, ...] | None]] = [
    ("a_ij -> c_ji", (2, 3), None),
    ("a_ij -> c_i", (4, 5), None),
    ("a_ijk -> c_", (2, 3, 5), None),
    ("a_*i -> c_*", (2, 3, 5), None),
    ("a_i* -> c_*", (3, 2, 5), None),
    ("a_ijp, b_ijq -> o_pq", (3, 2, 5), (3, 2, 7)),
    ("a_ik, b_kj -> c_ij", (4, 3), (3, 5)),
    ("a_ki, b_jk -> c_ji", (3, 4), (5, 3)),
    ("a_i, b_j -> c_ji", (5,), (7,)),
    ("a_i, b_i -> c_", (13,), (13,)),
    ("a_i, b_i -> c_i", (13,), (13,)),
    ("a_ij, b_ij -> c_ij", (4, 5), (4, 5)),
    ("a_ij, b_jk -> c_k", (3, 4), (4, 5)),
    ("a_ij, b_kl -> c_lik", (2, 3), (5, 2)),
    ("a_gij, b_gjk -> c_gik", (3, 2, 5), (3, 5, 4)),
    ("a_gi, b_gi -> c_g", (6, 5), (6, 5)),
    ("first_bqhd, second_bkhd -> out_bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("a_*ik, b_*kj -> c_*ij", (2, 3, 4, 3), (2, 3, 3, 5)),
    ("a_*ik, b_*kj -> c_*ij", (4, 2, 3), (5, 4, 3, 2)),
    ("a_*ik, b_*kj -> c_*ij", (2, 1, 4, 3), (3, 3, 2)),
    ("a_*ik, b_kj -> c_*ij", (2, 3, 4, 3), (3, 5)),
    ("a_ij*, b_ij -> c_*", (3, 2, 4, 5), (3, 2)),
    ("a_ij*, b_jk* -> c_ki*", (3, 2, 4), (2, 5, 4)),
    ("a_ik, b_kj -> c_ij", (4, 1), (3, 5)),
    ("a_ik, b_ik -> c_ik", (4, 1), (1, 3)),
    ("a_ik, b_ik -> c_k", (1, 3), (4, 3)),
    ("a_ijk, b_jk -> c_i", (1, 1, 1), (1, 1)),
    ("A_aA, B_Aa -> C_a", (3, 2), (2, 3)),
]


@pytest.mark.parametrize(("operation", "a", "b"), OPERATIONS)
def test_contractions_and_their_gradients(
    operation: str, a: tuple[int, ...], b: tuple[int, ...] | None, torch: Any
) -> None:
    batch = 3
    shapes = [a] if b is None else [a, b]
    inputs = [normal(batch, *shape, seed=k) for k, shape in enumerate(shapes)]
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    expected = -1.5 * torch.einsum(einsum_of(operation), *tensors)
    out = tuple(expected.shape[1:])
    wide = [x.astype(np.float64) for x in inputs]
    assert np.allclose(-1.5 * np.einsum(einsum_of(operation), *wide), expected.detach().numpy())  # both outsiders
    filter = create(operation, first(a), None if b is None else first(b), first(out), alpha=-1.5)
    y = np.full((batch, *out), 7, np.float32)
    assert apply(filter, inputs, y) == 0, bnns.last_error()
    assert np.allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    one = np.empty((1, *out), np.float32)
    assert apply(filter, [x[2:] for x in inputs], one) == 0
    assert np.array_equal(one[0], y[2])  # the same bits in any batch
    dy = normal(batch, *out, seed=9)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    for flags in (0, 1):
        results = [np.ones_like(x) for x in inputs]
        deltas = [first(shape, dx, flags=flags) for shape, dx in zip(shapes, results, strict=True)]
        assert backward(filter, inputs, deltas, first(out, dy), batch) == 0, bnns.last_error()
        for dx, tensor in zip(results, tensors, strict=True):
            assert np.allclose(dx, tensor.grad.numpy() + flags, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("operation", "a", "b"), [OPERATIONS[1], *OPERATIONS[5:8], OPERATIONS[14], OPERATIONS[21]])
def test_contraction_gradients_against_finite_differences(
    operation: str, a: tuple[int, ...], b: tuple[int, ...] | None
) -> None:
    shapes = [a] if b is None else [a, b]
    inputs = [normal(1, *shape, seed=k) for k, shape in enumerate(shapes)]
    wide = [x.astype(np.float64) for x in inputs]
    words = einsum_of(operation)
    out = np.einsum(words, *wide).shape[1:]
    dy, results = normal(1, *out, seed=5), [np.empty_like(x) for x in inputs]
    filter = create(operation, first(a), None if b is None else first(b), first(out), alpha=0.5)
    deltas = [first(shape, dx) for shape, dx in zip(shapes, results, strict=True)]
    assert backward(filter, inputs, deltas, first(out, dy), 1) == 0, bnns.last_error()
    for k, gradient in enumerate(results):
        direction = np.random.default_rng(k).normal(size=wide[k].shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x + step * direction if k == index else x for index, x in enumerate(wide)]
            ends.append(0.5 * np.einsum(words, *moved))
        slope = ((ends[0] - ends[1]) * dy).sum() / 2e-6
        assert np.isclose(slope, (gradient * direction).sum(), rtol=1e-4, atol=1e-5)


def test_contraction_as_apple_prints_it() -> None:
    """In a row-major matrix, whose size is (columns, rows), the first index is the row."""
    matrix, out = (Descriptor(layout=ROW, size=size, data_type=F32) for size in ((2, 1), (2, 2)))
    filter = create("a_ip, b_iq -> o_pq", matrix, matrix, out, None, alpha=10.0)
    a, b, y = np.array([1, 2], np.float32), np.array([3, 4], np.float32), np.full(4, -1, np.float32)
    assert bnns.BNNSFilterApplyTwoInput(filter, a, b, y) == 0, bnns.last_error()
    assert y.tolist() == [30, 40, 60, 80]


def test_a_permutation_as_measured() -> None:
    filter = create("a_ij -> c_ji", first((2, 3)), None, first((3, 2)))
    y = np.empty(6, np.float32)
    assert bnns.BNNSFilterApply(filter, np.arange(6, dtype=np.float32), y) == 0, bnns.last_error()
    assert y.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("operation", "x", "w"),
    [
        ("x_i, w_ij -> o_j", (7,), (7, 5)),
        ("x_gi, w_gij -> o_gj", (3, 4), (3, 4, 5)),
        ("x_i, w_i -> o_i", (11,), (11,)),
        ("x_*i, w_ij -> o_*j", (2, 3, 4), (4, 5)),
        ("x_*i, w_*ij -> o_*j", (2, 3, 4), (3, 4, 5)),
    ],
)
def test_trained_weights(operation: str, x: tuple[int, ...], w: tuple[int, ...], which: int, torch: Any) -> None:
    left, right = operation.split(" -> ")
    if which == 0:
        operation = ", ".join(reversed(left.split(", "))) + " -> " + right
    values, weights = normal(5, *x), normal(*w, seed=1)
    tensors = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in (values, weights)]
    words = einsum_of(f"{left} -> {right}")
    if "*" in operation.split("w_")[1][:2]:
        words = words.replace("Z...", "Zl...", 1).replace("->Z...", "->Zl...")  # an axis that the weights do not have
    expected = 2 * torch.einsum(words, *tensors)
    out = tuple(expected.shape[1:])
    parts = (first(x), first(w, weights))
    filter = create(operation, *(parts[::-1] if which == 0 else parts), first(out), alpha=2.0)
    y = np.empty((5, *out), np.float32)
    assert apply(filter, [values], y) == 0, bnns.last_error()
    assert np.allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    dy = normal(5, *out, seed=2)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    for flags in (0, 1):
        dx, dw = np.ones_like(values), np.ones_like(weights)
        delta = first(w, dw, flags=flags)
        assert backward(filter, [values], [first(x, dx, flags=flags)], first(out, dy), 5, weights=delta) == 0
        assert np.allclose(dx, tensors[0].grad.numpy() + flags, rtol=1e-4, atol=1e-4)
        assert np.allclose(dw, tensors[1].grad.numpy() + flags, rtol=1e-4, atol=1e-4)


def test_weights_are_read_at_every_call_or_copied_when_made() -> None:
    x, weights = normal(2, 3), normal(3, 4, seed=1)
    for parameters in (CLIENT, None):
        w = weights.copy()
        filter = create("x_i, w_ij -> o_j", first((3,)), first((3, 4), w), first((4,)), parameters)
        w += 1
        y = np.empty((2, 4), np.float32)
        assert apply(filter, [x], y) == 0
        assert np.allclose(y, x @ (weights if parameters is None else w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        ("x_ij, x_ik -> o_jk", (5, 3)),
        ("x_ij, x_kj -> o_ik", (5, 3)),
        ("x_ij, x_jk -> o_ik", (4, 4)),
        ("x_ij, x_ji -> o_", (4, 4)),
        ("x_i, x_i -> o_", (17,)),
        ("x_i, x_j -> o_ij", (7,)),
        ("x_*i, x_*j -> o_*ij", (2, 3, 4)),
        ("x_ij, x_ij -> o_ij", (3, 5)),
    ],
)
def test_a_contraction_with_itself_adds_both_gradients(operation: str, shape: tuple[int, ...], torch: Any) -> None:
    x = normal(3, *shape)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = 0.5 * torch.einsum(einsum_of(operation), tensor, tensor)
    out = tuple(expected.shape[1:])
    filter = create(operation, first(shape), None, first(out), alpha=0.5)  # iB_desc is not looked at
    y = np.empty((3, *out), np.float32)
    assert apply(filter, [x], y) == 0, bnns.last_error()
    assert np.allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    dy, dx = normal(3, *out, seed=1), np.empty_like(x)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    assert backward(filter, [x], [first(shape, dx)], first(out, dy), 3) == 0, bnns.last_error()
    assert np.allclose(dx, tensor.grad.numpy(), rtol=1e-4, atol=1e-4)
    direction = np.random.default_rng(1).normal(size=x.shape)
    ends = [
        0.5 * np.einsum(einsum_of(operation), moved, moved)
        for moved in (x.astype(np.float64) + step * direction for step in (1e-6, -1e-6))
    ]
    assert np.isclose(((ends[0] - ends[1]) * dy).sum() / 2e-6, (dx * direction).sum(), rtol=1e-4)


def test_beta_keeps_the_output() -> None:
    a, b, y = normal(2, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)
    before = y.copy()
    filter = create("a_i, b_i -> o_i", first((3,)), first((3,)), first((3,)), beta=1.0, alpha=3.0)
    assert apply(filter, [a, b], y) == 0
    assert np.allclose(y, before + 3 * a * b, rtol=1e-5, atol=1e-5)


def test_an_output_larger_than_its_operands_is_repeated() -> None:
    a, y, dx = normal(2, 1, 3), np.empty((2, 4, 3), np.float32), np.empty((2, 1, 3), np.float32)
    filter = create("a_ij -> c_ij", first((1, 3)), None, first((4, 3)), alpha=2.0)
    assert apply(filter, [a], y) == 0, bnns.last_error()
    assert np.array_equal(y, np.repeat(2 * a, 4, 1))
    dy = normal(2, 4, 3, seed=1)
    assert backward(filter, [None], [first((1, 3), dx)], first((4, 3), dy), 2) == 0
    assert np.allclose(dx, 2 * dy.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(17, 19, 23, 1), (1, 64, 64, 5), (16, 16, 16, 3), (3, 5, 7, 300), (1, 1, 1, 5000)])
def test_small_and_large_products(sizes: tuple[int, int, int, int]) -> None:
    """Matrices that the engine multiplies, and ones that are too small for it; alone and many."""
    m, k, n, count = sizes
    a, b = normal(2, count, m, k), normal(2, count, k, n, seed=1)
    filter = create("a_gik, b_gkj -> c_gij", first(a.shape[1:]), first(b.shape[1:]), first((count, m, n)))
    y = np.empty((2, count, m, n), np.float32)
    assert apply(filter, [a, b], y) == 0, bnns.last_error()
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    assert (np.abs(y - exact) <= (k + 2) * 2.0**-24 * bound).all()


def test_small_products_in_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(2, 30, 3, 5), normal(2, 30, 5, 2, seed=1)
    whole, parts = np.empty((2, 30, 3, 2), np.float32), np.empty((2, 30, 3, 2), np.float32)
    filter = create("a_gik, b_gkj -> c_gij", first((30, 3, 5)), first((30, 5, 2)), first((30, 3, 2)))
    assert apply(filter, [a, b], whole) == 0, bnns.last_error()
    monkeypatch.setattr(products, "_MOST_AT_ONCE", 7 * 30)  # seven of sixty products
    assert apply(filter, [a, b], parts) == 0, bnns.last_error()
    assert np.array_equal(whole, parts)


@pytest.mark.parametrize(
    ("operation", "shapes", "calls"),
    [
        ("a_ij, b_ij -> c_ij", ((20, 30),) * 3, 0),
        ("a_gk, b_gk -> c_g", ((50, 3000), (50, 3000), (50,)), 0),
        ("a_gik, b_gkj -> c_gij", ((9, 4, 5), (9, 5, 6), (9, 4, 6)), 0),
        ("a_gik, b_gkj -> c_gij", ((9, 20, 30), (9, 30, 40), (9, 20, 40)), 18),  # of two samples
        ("a_gik, w_kj -> c_gij", ((9, 4, 5), (5, 6), (9, 4, 6)), 1),  # one for all
    ],
)
def test_how_often_the_engine_is_called(
    operation: str, shapes: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def counting(*arguments: Any, **options: Any) -> np.ndarray:
        counted.append(arguments)
        return rg.linear_forward(*arguments, **options)

    a, b = normal(2, *shapes[0]), normal(2, *shapes[1], seed=1)
    weights = "w" in operation
    filter = create(operation, first(shapes[0]), first(shapes[1], b[0] if weights else None), first(shapes[2]))
    y = np.empty((2, *shapes[2]), np.float32)
    monkeypatch.setattr(products, "linear_forward", counting)
    assert apply(filter, [a] if weights else [a, b], y) == 0, bnns.last_error()
    assert len(counted) == calls
    exact = np.einsum(einsum_of(operation), a.astype(np.float64), (b[0] if weights else b).astype(np.float64))
    assert np.allclose(y, exact, rtol=1e-4, atol=1e-3)


# ---- layouts, memory -------------------------------------------------------------------------------------------------


def stored(matrix: np.ndarray, layout: int) -> Any:
    """A matrix [rows, columns] in a layout: RowMajorMatrix lists columns first, all others list rows first."""
    rows_slowest = layout in (ROW, FIRST[2])
    memory = np.ascontiguousarray(matrix if rows_slowest else np.swapaxes(matrix, -1, -2))
    size = matrix.shape[-2:][::-1] if layout == ROW else matrix.shape[-2:]
    return Descriptor(layout=layout, size=size, data=memory, data_type=F32)


@pytest.mark.parametrize("layout", [ROW, COLUMN, bnns.BNNSDataLayout2DLastMajor, FIRST[2]])
def test_layouts_of_operands(layout: int) -> None:
    a, b, dy = normal(2, 3, 4), normal(2, 4, 5, seed=1), normal(2, 5, 3, seed=2)
    parts = [stored(one, layout) for one in (a, b)]
    out, incoming = stored(np.zeros_like(dy), layout), stored(dy, layout)
    deltas = [stored(np.zeros_like(one), layout) for one in (a, b)]
    filter = create("a_ik, b_kj -> c_ji", *parts, out)
    assert apply(filter, [part.data for part in parts], out.data) == 0, bnns.last_error()
    assert np.allclose(out.data, stored((a @ b).transpose(0, 2, 1), layout).data, rtol=1e-5, atol=1e-5)
    assert backward(filter, [part.data for part in parts], deltas, incoming, 2) == 0, bnns.last_error()
    da = dy.transpose(0, 2, 1) @ b.transpose(0, 2, 1)
    assert np.allclose(deltas[0].data, stored(da, layout).data, rtol=1e-4, atol=1e-4)
    assert np.allclose(deltas[1].data, stored((dy @ a).transpose(0, 2, 1), layout).data, rtol=1e-4, atol=1e-4)


def test_weights_of_attention_heads_go_by_size() -> None:
    """MHA_DHK: size is (d, k, heads), memory has the heads before k. As operand, output and gradients."""
    heads = Descriptor(layout=bnns.BNNSDataLayoutMHA_DHK, size=(5, 3, 2), data_type=F32)
    values, x, dy = normal(5, 3, 2), normal(4, 5, seed=1), normal(4, 2, 3, seed=2)
    memory = np.ascontiguousarray(values.transpose(1, 2, 0))
    filter = create(
        "x_d, w_dkh -> o_hk",
        first((5,)),
        Descriptor(layout=heads.layout, size=(5, 3, 2), data=memory, data_type=F32),
        first((2, 3)),
    )
    y, dw = np.empty_like(dy), np.empty_like(memory)
    assert apply(filter, [x], y) == 0, bnns.last_error()
    assert np.allclose(y, np.einsum("nd,dkh->nhk", x, values), rtol=1e-5, atol=1e-5)
    heads.data = dw
    assert backward(filter, [x], [None], first((2, 3), dy), 4, weights=heads) == 0, bnns.last_error()
    assert np.allclose(dw.transpose(2, 0, 1), np.einsum("nd,nhk->dkh", x, dy), rtol=1e-4, atol=1e-4)
    heads.data = None
    turned = create("a_hkd -> c_dkh", first((2, 3, 5)), None, heads)
    result = np.empty((1, *memory.shape), np.float32)
    assert apply(turned, [np.ascontiguousarray(values.transpose(2, 1, 0))[None]], result) == 0, bnns.last_error()
    assert np.array_equal(result[0], memory)


def test_strides_of_operands_and_batches() -> None:
    a, b = np.full((2, 20), np.nan, np.float32), normal(2, 9, seed=1)
    places = [0, 2, 4, 7, 9, 11]  # stride 2 within rows of 7
    a[:, places] = normal(2, 6)
    y, dx = np.full((2, 15), 7, np.float32), np.full((2, 25), 7, np.float32)
    parts = first((2, 3), stride=(2, 7)), first((3, 3)), first((2, 3), stride=(1, 5))
    filter = create("a_ik, b_kj -> c_ij", *parts)
    assert bnns.BNNSFilterApplyTwoInputBatch(filter, 2, a, 20, b, 0, y, 15) == 0, bnns.last_error()
    exact = a[:, places].reshape(2, 2, 3) @ b.reshape(2, 3, 3)
    written = [0, 1, 2, 5, 6, 7]
    assert np.allclose(y[:, written], exact.reshape(2, 6), rtol=1e-5, atol=1e-5)
    assert (np.delete(y, written, 1) == 7).all()
    dy = normal(2, 6, seed=3)
    succeeds(bnns.BNNSFilterApplyBackwardTwoInputBatch(
        filter, 2, None, 0, first((2, 3), dx, stride=(2, 7)), 25, b, 9, None, 0, None, 0, first((2, 3), dy), 6,
        None, None,
    ))  # fmt: skip
    gradient = dy.reshape(2, 2, 3) @ b.reshape(2, 3, 3).transpose(0, 2, 1)
    assert np.allclose(dx[:, places], gradient.reshape(2, 6), rtol=1e-4, atol=1e-4)
    assert (np.delete(dx, places, 1) == 7).all()


def test_outputs_and_gradients_in_the_memory_of_inputs() -> None:
    x = normal(2, 3, 4)
    memory = x.copy()
    filter = create("a_ij -> c_ji", first((3, 4)), None, first((4, 3)))
    assert apply(filter, [memory], memory.reshape(2, 4, 3)) == 0, bnns.last_error()
    assert np.array_equal(memory.reshape(2, 4, 3), x.transpose(0, 2, 1))
    a, b, dy = normal(2, 4), normal(2, 4, seed=1), normal(2, 4, seed=2)
    product = create("a_i, b_i -> c_i", first((4,)), first((4,)), first((4,)))
    da, db = a.copy(), b.copy()
    assert backward(product, [da, db], [first((4,), da), first((4,), db)], first((4,), dy), 2) == 0
    assert np.array_equal(da, dy * b)
    assert np.array_equal(db, dy * a)


def test_each_gradient_alone_and_what_it_needs() -> None:
    a, b, dy = normal(2, 3), normal(2, 4, seed=1), normal(2, 3, 4, seed=2)
    filter = create("a_i, b_j -> c_ij", first((3,)), first((4,)), first((3, 4)))
    da, db, incoming = np.empty_like(a), np.empty_like(b), first((3, 4), dy)
    assert backward(filter, [None, b], [first((3,), da), None], incoming, 2) == 0, bnns.last_error()
    assert np.allclose(da, np.einsum("nij,nj->ni", dy, b), rtol=1e-5, atol=1e-5)
    assert backward(filter, [a, None], [None, first((4,), db)], incoming, 2) == 0, bnns.last_error()
    assert np.allclose(db, np.einsum("nij,ni->nj", dy, a), rtol=1e-5, atol=1e-5)
    assert backward(filter, [None, None], [None, None], incoming, 2) == 0
    fails(backward(filter, [None, b], [first((3,), da), first((4,), db)], incoming, 2), "inA is NULL")


@pytest.mark.parametrize("types", [(F16, F16, F16), (BF16, F32, BF16), (F32, F16, F32)])
def test_types_of_a_contraction(types: tuple[int, int, int]) -> None:
    a, b = normal(2, 3, 5).astype(TYPES[types[0]]), normal(2, 5, 4, seed=1).astype(TYPES[types[1]])
    y = np.empty((2, 3, 4), TYPES[types[2]])
    shapes = (3, 5), (5, 4), (3, 4)
    made = [first(shape, data_type=kind) for shape, kind in zip(shapes, types, strict=True)]
    filter = create("a_ik, b_kj -> c_ij", *made)
    assert apply(filter, [a, b], y) == 0, bnns.last_error()
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = float(ml_dtypes.finfo(y.dtype).eps) * np.abs(exact) + 1e-5
    assert (np.abs(y.astype(np.float64) - exact) <= bound).all()
    dy, dx = normal(2, 3, 4), np.full((2, 3, 5), 7, np.float32)
    fails(backward(filter, [a, b], [first((3, 5), dx), None], first((3, 4), dy), 2), "backward needs Float32")
    assert (dx == 7).all()


@pytest.mark.parametrize("operation", ["a_ik, b_kj -> c_ij", "a_gk, b_gk -> c_g", "a_ij -> c_i"])
def test_nan_reaches_only_sums_that_it_is_part_of(operation: str) -> None:
    shapes = [(3, 3)] * (2 if "," in operation else 1)
    inputs = [np.ones((2, *shape), np.float32) for shape in shapes]
    inputs[0][1, 2, 0] = np.nan
    expected = np.einsum(einsum_of(operation), *inputs)
    filter = create(operation, *(first((3, 3)) for _ in range(2)), first(expected.shape[1:]))
    y = np.empty_like(expected)
    assert apply(filter, inputs, y) == 0
    assert np.array_equal(y, expected, equal_nan=True)
    assert np.isnan(y).sum() in (1, 3)


# ---- the operation ---------------------------------------------------------------------------------------------------


def test_how_an_operation_may_be_given() -> None:
    parts = first((2, 3)), None, first((3, 2))
    x, y = np.arange(6, dtype=np.float32), np.empty(6, np.float32)
    buffer = ctypes.create_string_buffer(b"a_ij -> c_ji")
    texts: list[Any] = [
        "a_ij -> c_ji",
        b"a_ij->c_ji",
        bytearray(b" a_ij   -> c_ji "),
        buffer,
        b"a_ij -> c_ji\0 ignored",
    ]
    for text in texts:
        assert bnns.BNNSFilterApply(create(text, *parts), x, y) == 0, bnns.last_error()
        assert y.tolist() == [0, 3, 1, 4, 2, 5]
    made = layer("a_ij -> c_ji", *parts)
    assert made.operation == b"a_ij -> c_ji"  # memory that a pointer leads to
    image = made.to_bytes()
    address = int.from_bytes(image[:8], "little")
    assert ctypes.string_at(address) == b"a_ij -> c_ji"
    restored = bnns.BNNSLayerParametersTensorContraction.from_bytes(image, {address: made.operation})
    assert restored == made
    assert bnns.BNNSFilterCreateLayerTensorContraction(restored) is not None
    unknown = bnns.BNNSLayerParametersTensorContraction.from_bytes(image)
    not_created(bnns.BNNSFilterCreateLayerTensorContraction(unknown), "operation ")


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (None, "operation is NULL"),
        (3, "operation "),
        ("", 'which has "->" 0 times, must have it once'),
        ("a_ij, b_jk", 'which has "->" 0 times'),
        ("a_ij -> b_ij -> c_ij", 'which has "->" 2 times'),
        ("-> c_ij", "in which an operand is missing"),
        ("a_ij ->", "in which an operand is missing"),
        ("a_ij, -> c_ij", "in which an operand is missing"),
        ("a_ij, b_ij, d_ij -> c_ij", "which has 3 operands, may have 2 at most"),
        ("a_ij -> c_ij, d_ij", "which has 2 outputs, must have 1"),
        ("aij -> c_ij", 'in which "aij" has no "_" between its name and its indices'),
        ("_ij -> c_ij", 'in which "_ij" has the name "", must be letters and digits'),
        ("a b_ij -> c_ij", 'has the name "a b", must be letters and digits'),
        ("1a_ij -> c_ij", 'has the name "1a"'),
        ("a_i_j -> c_ij", 'in which "a_i_j" has the indices "i_j", must be letters'),
        ("a_i j -> c_ij", 'has the indices "i j", must be letters'),
        ("a_i1 -> c_i", 'has the indices "i1", must be letters'),
        ("a_i\u00e9 -> c_i", "must be letters"),
        ("a_ii -> c_i", 'in which "a_ii" has the index "i" twice'),
        ("a_ij -> c_ijj", 'in which "c_ijj" has the index "j" twice'),
        ("a_ij -> c_ijk", 'whose output has the index "k", which no operand has'),
        ("a_i*j -> c_ij", 'in which "a_i*j" has "*" between its indices, must be first or last'),
        ("a_*ij* -> c_*", 'in which "a_*ij*" has "*" twice'),
        ("a_** -> c_*", 'in which "a_**" has "*" twice'),
        ("a_*i, b_i* -> c_*", 'which has "*" as the first and as the last index, must have it at the same end'),
        ("a_*i -> c_i*", 'which has "*" as the first and as the last index'),
        ("a_*i -> c_i", 'whose output has no "*", although an operand has one'),
        ("a_i -> c_*i", 'whose output has a "*", which no operand has'),
        ("w_ij -> c_ij", 'which has no input: "w" means weights'),
        ("w_ij, w_jk -> c_ik", 'which has no input: "w" means weights, and at most one operand may be weights'),
    ],
)
def test_malformed_operations(operation: Any, reason: str) -> None:
    message = refusal(operation, first((3, 3)), first((3, 3)), first((3, 3)))
    assert reason in message
    if isinstance(operation, str) and operation.isascii():
        assert f'operation is "{operation}"' in message


def test_stars_alone_and_without_axes() -> None:
    """A "*" may stand for no axes; alone, it is both first and last."""
    x, y = normal(2, 3), np.empty((2, 3), np.float32)
    for operation in ("a_* -> c_*", "a_*i -> c_*i", "a_i* -> c_i*"):
        assert apply(create(operation, first((3,)), None, first((3,)), alpha=2.0), [x], y) == 0, bnns.last_error()
        assert np.array_equal(y, 2 * x)
    message = refusal("a_i*, b_i -> c_*", first((3,)), first((3,)), first(ONE))
    assert '"*" stands for 0 axes of the operands, but for 1 of o_desc' in message


@pytest.mark.parametrize(
    ("operation", "shapes", "reason"),
    [
        (
            "a_ij -> c_ji",
            ((2, 3, 4), (), (3, 2)),
            'iA_desc has size=(2, 3, 4) (slowest first), 3 axes, but "a_ij" has 2',
        ),
        ("a_ij, b_jk -> c_ik", ((2, 3), (3,), (2, 4)), 'iB_desc has size=(3,), 1 axes, but "b_jk" has 2 indices'),
        ("a_ij -> c_", ((2, 3), (), (2, 3)), 'o_desc has size=(2, 3) (slowest first), 2 axes, but "c_" has 0 indices'),
        ("a_*ij -> c_*", ((3,), (), (3,)), 'but "a_*ij" has at least 2 indices'),
        ("a_ij, b_jk -> c_ik", ((2, 3), (4, 5), (2, 5)), 'the index "j" has the extent 3 in iA_desc and 4 in iB_desc'),
        ("a_ij, b_jk -> c_ik", ((2, 3), (3, 5), (2, 4)), 'the index "k" has the extent 5 in iB_desc and 4 in o_desc'),
        ("a_ij -> c_ij", ((2, 3), (), (2, 1)), 'the index "j" has the extent 3 in iA_desc and 1 in o_desc'),
        ("x_ij, x_jk -> o_ik", ((2, 3), (), (2, 3)), 'the index "j" has the extent 3 in iA_desc and 2 in iA_desc'),
        ("a_*i, b_*i -> c_*", ((2, 4, 3), (5, 3), (2, 4)), "axis 1 of * has the extent 4 in iA_desc and 5 in iB_desc"),
        ("a_*i, b_*i -> c_*", ((2, 4, 3), (4, 3), (4,)), '"*" stands for 2 axes of the operands, but for 1 of o_desc'),
        ("a_i*, b_i* -> c_*", ((3, 4, 2), (3, 4), (4, 2)), '"*" stands for 2 axes of iA_desc and 1 of iB_desc; as the'),
    ],
)
def test_arrays_that_do_not_fit_the_operation(operation: str, shapes: tuple[Any, Any, Any], reason: str) -> None:
    assert reason in refusal(operation, *map(first, shapes))


def test_contractions_that_cannot_be_made() -> None:
    parts = first((2, 3)), first((3, 4)), first((2, 4))
    operation = "a_ij, b_jk -> c_ik"
    assert "beta is 0.5, must be 0 or 1" in refusal(operation, *parts, beta=0.5)
    assert "alpha is 'x'" in refusal(operation, *parts, alpha="x")
    assert "iB_desc.data is NULL" in refusal("a_ij, w_jk -> c_ik", *parts)
    integers = first((2, 3), data_type=bnns.BNNSDataTypeInt8)
    assert "iA_desc.data_type is BNNSDataTypeInt8; it must be" in refusal(operation, integers, *parts[1:])
    rotated = Descriptor(layout=bnns.BNNSDataLayoutConvolutionWeightsOIHrWr, size=(3, 3, 1, 1), data_type=F32)
    assert "iA_desc.layout is BNNSDataLayoutConvolutionWeightsOIHrWr; kernels must not be rotated" in refusal(
        "a_ijkl -> c_jikl", rotated, None, first((3, 3, 1, 1))
    )
    assert "o_desc.stride is (1, 1)" in refusal(operation, *parts[:2], first((2, 4), stride=(1, 1)))
    assert bnns.BNNSFilterCreateLayerTensorContraction(None) is None  # type: ignore[arg-type]
    assert "layer_params is NULL, must be BNNSLayerParametersTensorContraction" in (bnns.last_error() or "")


def test_contraction_calls_that_fail_write_nothing() -> None:
    a, b, y = normal(2, 3), normal(2, 3, seed=1), np.full((2, 3), 7, np.float32)
    two = create("a_i, b_i -> c_i", *(first((3,)) for _ in range(3)))
    one = create("x_i, x_i -> c_i", *(first((3,)) for _ in range(3)))
    dx, dy = np.full_like(a, 7), normal(2, 3, seed=2)
    good, incoming = first((3,), dx), first((3,), dy)
    calls: list[tuple[Any, str]] = [
        (lambda: apply(two, [a], y), "the filter does not have one input: use the functions for two inputs"),
        (lambda: apply(one, [a, b], y), "the filter does not have two inputs: use BNNSFilterApplyBatch"),
        (lambda: bnns.BNNSFilterApplyTwoInputBatch(two, 2, a, 0, None, 0, y, 0), "inB is NULL"),
        (lambda: bnns.BNNSFilterApplyTwoInputBatch(two, 3, a, 0, b, 0, y, 0), "out has 24 bytes, but 3 samples"),
        (lambda: backward(two, [a], [good], incoming, 2), "the filter does not have one input"),
        (lambda: backward(one, [a, b], [good, None], incoming, 2), "the filter does not have two inputs"),
        (lambda: backward(two, [a, b], [good, None], None, 2), "out_delta is NULL"),
        (lambda: backward(two, [a, b], [good, good], incoming, 2), "inA_delta overlaps inB_delta in memory"),
        (lambda: backward(two, [a, b], [good, None], incoming, 2, weights=good), "neither operand is weights"),
        (lambda: backward(two, [a, b], [good, None], incoming, 2, bias=good), "a product has no bias"),
        (lambda: backward(one, [None], [good], incoming, 2), "in is NULL"),
        (
            lambda: backward(one, [a], [first((2,), dx)], incoming, 2),
            "in_delta has 2 elements, expected 3 as in iA_desc",
        ),
    ]
    all_fail(calls, y, dx)


# ---- Gram matrices ---------------------------------------------------------------------------------------------------


def gram(x: np.ndarray, alpha: float) -> np.ndarray:
    """Of images [N, C, H, W], in float64."""
    flat = x.astype(np.float64).reshape(len(x), x.shape[1], -1)
    return alpha * flat @ flat.transpose(0, 2, 1)


@pytest.mark.parametrize("out", [ROW, COLUMN, FIRST[2]])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 7, 1), (13, 1, 1), (40, 11, 3)])
def test_gram_matrices_and_their_gradient(shape: tuple[int, int, int], out: int) -> None:
    channels = shape[0]
    x, dy = normal(3, *shape), normal(3, channels, channels, seed=1)
    image = Descriptor(layout=IMAGE, size=shape[::-1], data_type=F32)
    square = Descriptor(layout=out, size=(channels, channels), data_type=F32)
    filter = created(bnns.BNNSFilterCreateLayerGram(bnns.BNNSLayerParametersGram(0.25, image, square)))
    y = np.empty_like(dy)
    assert bnns.BNNSFilterApplyBatch(filter, 3, x, 0, y, 0) == 0, bnns.last_error()
    assert np.allclose(y, gram(x, 0.25), rtol=1e-4, atol=1e-4)
    for flags in (0, 1):
        dx = np.ones_like(x)
        image.data, image.flags, square.data = dx, flags, dy
        succeeds(bnns.BNNSFilterApplyBackwardBatch(filter, 3, x, 0, image, 0, None, 0, square, 0, None, None))
        both = (dy + dy.transpose(0, 2, 1)).astype(np.float64)
        exact = 0.25 * np.einsum("nfc,nchw->nfhw", both, x.astype(np.float64))
        assert np.allclose(dx, exact + flags, rtol=1e-4, atol=1e-4)
    direction = np.random.default_rng(2).normal(size=x.shape)
    ends = [gram(x.astype(np.float64) + step * direction, 0.25) for step in (1e-6, -1e-6)]
    slope = ((ends[0] - ends[1]) * dy).sum() / 2e-6
    assert np.isclose(slope, ((dx.astype(np.float64) - 1) * direction).sum(), rtol=1e-3)


def test_gram_matrices_of_several_images() -> None:
    """Leading axes, before those of a pixel and its channel in the order of size, are kept."""
    x = normal(2, 5, 3, 4, 6)  # samples, then (leading, i, j, channel)
    made = first((5, 3, 4, 6)), first((5, 6, 6))
    filter = created(bnns.BNNSFilterCreateLayerGram(bnns.BNNSLayerParametersGram(2.0, *made)))
    y = np.empty((2, 5, 6, 6), np.float32)
    assert bnns.BNNSFilterApplyBatch(filter, 2, x, 0, y, 0) == 0
    assert np.allclose(y, 2 * np.einsum("nlijf,nlijc->nlfc", x, x), rtol=1e-4, atol=1e-4)


def test_gram_layers_that_cannot_be_made() -> None:
    image = Descriptor(layout=IMAGE, size=(4, 5, 3), data_type=F32)
    square = Descriptor(layout=ROW, size=(3, 3), data_type=F32)

    def reason(i_desc: Any, o_desc: Any, alpha: Any = 1.0) -> str:
        assert bnns.BNNSFilterCreateLayerGram(bnns.BNNSLayerParametersGram(alpha, i_desc, o_desc)) is None
        return bnns.last_error() or ""

    size = "size=(columns, rows)=(3, 3)"
    assert f'i_desc has {size}, 2 axes, but "x_*ijf" has at least 3 indices' in reason(square, square)
    wrong = Descriptor(layout=ROW, size=(3, 4), data_type=F32)
    assert "has the extent 3 in i_desc and 4 in o_desc" in reason(image, wrong)
    assert '"*" stands for 0 axes of the operands, but for 1 of o_desc' in reason(image, first((1, 3, 3)))
    assert "alpha is None" in reason(image, square, None)
    x, y = normal(2, 60), np.full((2, 9), 7, np.float32)
    filter = bnns.BNNSFilterCreateLayerGram(bnns.BNNSLayerParametersGram(1.0, image, square))
    fails(bnns.BNNSFilterApplyTwoInputBatch(filter, 2, x, 0, x, 0, y, 0), "the filter does not have two inputs")
    assert (y == 7).all()


def test_swifts_gram_layer() -> None:
    image, square = BNNS.Shape.imageCHW(5, 4, 3), BNNS.Shape.matrixRowMajor(3, 3)
    x, y = normal(2, 3, 4, 5), np.empty((2, 3, 3), np.float32)
    dx, dy = np.empty_like(x), normal(2, 3, 3, seed=1)
    with BNNS.GramLayer(input=image.descriptor(), output=square.descriptor(), alpha=0.5) as swift:
        swift.apply(batchSize=2, input=image.descriptor(x), output=square.descriptor(y))
        swift.applyBackward(
            batchSize=2,
            input=image.descriptor(x),
            outputGradient=square.descriptor(dy),
            generatingInputGradient=image.descriptor(dx),
        )
    assert np.allclose(y, gram(x, 0.5), rtol=1e-4, atol=1e-4)
    both = dy + dy.transpose(0, 2, 1)
    assert np.allclose(dx, 0.5 * np.einsum("nfc,nchw->nfhw", both, x), rtol=1e-4, atol=1e-4)
    with pytest.raises(BNNS.Error, match="unableToCreateLayer"):
        BNNS.GramLayer(input=square.descriptor(), output=square.descriptor(), alpha=1.0)
