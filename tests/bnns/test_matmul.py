"""BNNS products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import CLIENT, F32, Descriptor, created, fails, first, normal, not_created, succeeds

ROW, COLUMN = bnns.BNNSDataLayoutRowMajorMatrix, bnns.BNNSDataLayoutColumnMajorMatrix


def layer(a: Any, b: Any, out: Any, **fields: Any) -> Any:
    return bnns.BNNSLayerParametersBroadcastMatMul(
        **{"alpha": 1.0, "iA_desc": a, "iB_desc": b, "o_desc": out, **fields}
    )


def create(a: Any, b: Any, out: Any, **fields: Any) -> Any:
    return created(bnns.BNNSFilterCreateLayerBroadcastMatMul(layer(a, b, out, **fields), CLIENT))


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "leads", [((), ()), ((2,), (2,)), ((2,), (1,)), ((), (3,)), ((2, 1), (3,)), ((1,), (4, 1)), ((2, 3), (2, 3))]
)
def test_products_of_two_inputs_and_their_gradients(trans: Any, leads: Any, torch: Any) -> None:
    shapes = [(*leads[0], 3, 4), (*leads[1], 4, 5)]
    shapes = [(*s[:-2], s[-1], s[-2]) if t else s for s, t in zip(shapes, trans, strict=True)]
    batch = 2
    a, b = (normal(batch, *s, seed=k) for k, s in enumerate(shapes))
    rank = max(len(s) for s in shapes)
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (a, b)]
    wide = [t.reshape(batch, *(1,) * (rank - len(s)), *s) for t, s in zip(tensors, shapes, strict=True)]
    wide = [t.transpose(-1, -2) if turn else t for t, turn in zip(wide, trans, strict=True)]
    expected = 1.5 * torch.matmul(*wide)
    out = tuple(expected.shape[1:])
    filter = create(first(shapes[0]), first(shapes[1]), first(out), alpha=1.5, transA=trans[0], transB=trans[1])
    y = np.empty((batch, *out), np.float32)
    assert bnns.BNNSFilterApplyTwoInputBatch(filter, batch, a, 0, b, 0, y, 0) == 0, bnns.last_error()
    assert np.allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    dy = normal(batch, *out, seed=9)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    for flags in (0, 1):
        da, db = np.ones_like(a), np.ones_like(b)
        succeeds(bnns.BNNSFilterApplyBackwardTwoInputBatch(
            filter, batch, a, 0, first(shapes[0], da, flags=flags), 0, b, 0, first(shapes[1], db, flags=flags), 0,
            None, 0, first(out, dy), 0, None, None,
        ))  # fmt: skip
        for got, tensor in zip((da, db), tensors, strict=True):
            assert np.allclose(got, tensor.grad.numpy() + flags, rtol=1e-4, atol=1e-4)
    one = np.empty(out, np.float32)
    assert bnns.BNNSFilterApplyTwoInput(filter, a[0], b[0], one) == 0
    assert np.array_equal(one, y[0])


def test_gradients_against_finite_differences() -> None:
    a, b, dy = normal(1, 2, 3, 4), normal(1, 4, 5, seed=1), normal(1, 2, 3, 5, seed=2)
    filter = create(first((2, 3, 4)), first((4, 5)), first((2, 3, 5)), alpha=-0.5)
    da, db = np.empty_like(a), np.empty_like(b)
    succeeds(bnns.BNNSFilterApplyBackwardTwoInputBatch(
        filter, 1, a, 0, first((2, 3, 4), da), 0, b, 0, first((4, 5), db), 0, None, 0, first((2, 3, 5), dy), 0,
        None, None,
    ))  # fmt: skip
    wide = [a[0].astype(np.float64), b[0].astype(np.float64)]
    for k, gradient in enumerate((da, db)):
        direction = np.random.default_rng(k).normal(size=wide[k].shape)
        ends = (
            [-0.5 * (wide[0] + s * direction) @ wide[1] for s in (1e-6, -1e-6)]
            if k == 0
            else [-0.5 * wide[0] @ (wide[1] + s * direction) for s in (1e-6, -1e-6)]
        )
        slope = ((ends[0] - ends[1]) * dy[0]).sum() / 2e-6
        assert np.isclose(slope, (gradient[0] * direction).sum(), rtol=1e-4)


@pytest.mark.parametrize("which", ["a", "b"])
def test_weights_are_trained_over_the_batch(which: str) -> None:
    w, x, dy = normal(4, 4), normal(5, 4, 4, seed=1), normal(5, 4, 4, seed=2)
    sample, held = first((4, 4)), first((4, 4), w)
    parts = (held, sample) if which == "a" else (sample, held)
    filter = create(*parts, sample, **{f"{which}_is_weights": True, "transB": True})
    y, dx, dw = np.empty_like(x), np.empty_like(x), np.empty_like(w)
    assert bnns.BNNSFilterApplyBatch(filter, 5, x, 0, y, 0) == 0, bnns.last_error()
    expected = w @ x.transpose(0, 2, 1) if which == "a" else x @ w.T
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-5)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 5, x, 0, first((4, 4), dx), 0, None, 0, first((4, 4), dy), 0, first((4, 4), dw), None
    )
    assert status == 0, bnns.last_error()
    if which == "a":
        assert np.allclose(dw, (dy @ x).sum(0), rtol=1e-4, atol=1e-4)
        assert np.allclose(dx, dy.transpose(0, 2, 1) @ w, rtol=1e-4, atol=1e-4)
    else:
        assert np.allclose(dw, (dy.transpose(0, 2, 1) @ x).sum(0), rtol=1e-4, atol=1e-4)
        assert np.allclose(dx, dy @ w, rtol=1e-4, atol=1e-4)
    w += 1  # the client's memory
    again = np.empty_like(y)
    assert bnns.BNNSFilterApplyBatch(filter, 5, x, 0, again, 0) == 0
    assert not np.array_equal(again, y)
    # The gradient of one operand does not need that operand.
    assert bnns.BNNSFilterApplyBackwardBatch(
        filter, 5, None, 0, first((4, 4), dx), 0, None, 0, first((4, 4), dy), 0, None, None
    ) == 0  # fmt: skip


def test_a_quadratic_product_adds_both_gradients() -> None:
    x, dy = normal(3, 4, 5), normal(3, 4, 4, seed=1)
    filter = create(first((4, 5)), Descriptor(), first((4, 4)), quadratic=True, transB=True, alpha=2.0)
    y, dx = np.empty_like(dy), np.empty_like(x)
    assert bnns.BNNSFilterApplyBatch(filter, 3, x, 0, y, 0) == 0, bnns.last_error()
    assert np.allclose(y, 2 * x @ x.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)
    status = bnns.BNNSFilterApplyBackwardBatch(
        filter, 3, x, 0, first((4, 5), dx), 0, None, 0, first((4, 4), dy), 0, None, None
    )
    assert status == 0, bnns.last_error()
    assert np.allclose(dx, 2 * (dy + dy.transpose(0, 2, 1)) @ x, rtol=1e-4, atol=1e-4)


def test_beta_adds_to_the_output() -> None:
    a, b, y = normal(2, 3, 4), normal(2, 4, 5, seed=1), normal(2, 3, 5, seed=2)
    before = y.copy()
    filter = create(first((3, 4)), first((4, 5)), first((3, 5)), beta=1.0)
    assert bnns.BNNSFilterApplyTwoInputBatch(filter, 2, a, 0, b, 0, y, 0) == 0
    assert np.allclose(y, before + a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [ROW, COLUMN, bnns.BNNSDataLayout2DLastMajor, bnns.BNNSDataLayout2DFirstMajor])
def test_layouts_of_matrices(layout: int) -> None:
    """RowMajorMatrix lists columns first; all others list rows first, and all but FirstMajor have them fastest."""
    a, b = normal(2, 3), normal(3, 4, seed=1)

    def described(matrix: np.ndarray) -> Any:
        rows_slowest = layout in (ROW, bnns.BNNSDataLayout2DFirstMajor)
        memory = matrix.copy() if rows_slowest else np.ascontiguousarray(matrix.T)
        size = matrix.shape[::-1] if layout == ROW else matrix.shape
        return Descriptor(layout=layout, size=size, data=memory, data_type=F32)

    out = described(np.zeros((2, 4), np.float32))
    assert bnns.BNNSMatMul(False, False, 1.0, described(a), described(b), out, None, None) == 0, bnns.last_error()
    y = out.data if layout in (ROW, bnns.BNNSDataLayout2DFirstMajor) else out.data.T
    assert np.allclose(y, a @ b, rtol=1e-5, atol=1e-5)


def test_the_function_without_a_filter() -> None:
    a, b = normal(2, 1, 3, 4), normal(5, 3, 6, seed=1)
    out = np.full((2, 5, 4, 6), 7, np.float32)
    parts = first(a.shape, a), first(b.shape, b), first(out.shape, out)
    assert bnns.BNNSMatMulWorkspaceSize(True, False, 0.5, *parts) == 0
    assert bnns.BNNSMatMul(True, False, 0.5, *parts) == 0, bnns.last_error()
    assert np.allclose(out, 0.5 * np.swapaxes(a, -1, -2) @ b, rtol=1e-5, atol=1e-5)
    without = [Descriptor(layout=d.layout, size=tuple(d.size), data_type=F32) for d in parts]
    assert bnns.BNNSMatMulWorkspaceSize(True, False, 0.5, *without) == 0  # data is not read
    assert bnns.BNNSMatMulWorkspaceSize(False, False, 0.5, *parts) < 0
    out[:] = 7
    cases: list[tuple[Any, str]] = [
        ((False, False, 1.0, *parts), "a product of matrices 3 x 4 and 3 x 6"),
        ((True, False, 1.0, parts[0], parts[1], first((2, 5, 6, 4), out)), "expected (2, 5, 4, 6)"),
        ((True, False, 1.0, *without), "output.data is NULL"),
        ((True, False, "x", *parts), "alpha is 'x'"),
        ((False, False, 1.0, first((2, 3, 4), a), first((3, 4, 2), b), parts[2]), "do not broadcast"),
        ((True, False, 1.0, None, parts[1], parts[2]), "inputA is of type NoneType"),
    ]
    for arguments, reason in cases:
        fails(bnns.BNNSMatMul(*arguments), reason)
    assert bnns.BNNSMatMul(False, False, 1.0, first((4, 4), out), first((4, 4), a), first((4, 4), out)) == -1
    assert "output overlaps inputA in memory" in (bnns.last_error() or "")
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"beta": 0.5}, "beta is 0.5, must be 0 or 1"),
        ({"a_is_weights": True, "b_is_weights": True}, "at most one of quadratic, a_is_weights and b_is_weights"),
        ({"a_is_weights": True}, "iA_desc.data is NULL"),
        ({"transA": True}, "iA_desc has size=(3, 4) (slowest first)"),
        ({"o_desc": first((5, 3))}, "o_desc has the extents (5, 3), rows and columns last, expected (3, 5)"),
        (
            {"iA_desc": Descriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(4, 3, 1), data_type=F32)},
            "iA_desc.layout is BNNSDataLayoutImageCHW; it must be a matrix or an nD layout",
        ),
        ({"iB_desc": first((4, 5), data_type=bnns.BNNSDataTypeInt8)}, "iB_desc.data_type is BNNSDataTypeInt8"),
    ],
)
def test_creation_fails(fields: dict[str, Any], reason: str) -> None:
    made = layer(**{"a": first((3, 4)), "b": first((4, 5)), "out": first((3, 5))})
    for name, value in fields.items():
        setattr(made, name, value)
    not_created(bnns.BNNSFilterCreateLayerBroadcastMatMul(made), reason)


def test_calls_fail_and_touch_nothing() -> None:
    a, b, y = normal(2, 3, 4), normal(2, 4, 5, seed=1), np.full((2, 3, 5), 7, np.float32)
    filter = create(first((3, 4)), first((4, 5)), first((3, 5)))
    assert bnns.BNNSFilterApplyBatch(filter, 2, a, 0, y, 0) == -1
    assert "the filter does not have one input: use the functions for two inputs" in (bnns.last_error() or "")
    fails(bnns.BNNSFilterApplyTwoInputBatch(filter, 2, a, 0, None, 0, y, 0), "inB is NULL")
    quadratic = create(first((3, 3)), Descriptor(), first((3, 3)), quadratic=True)
    assert bnns.BNNSFilterApplyTwoInput(quadratic, a, a, y) == -1
    assert "the filter does not have two inputs: use BNNSFilterApplyBatch" in (bnns.last_error() or "")
    activation = bnns.BNNSLayerParametersActivation(first((3, 4)), first((3, 4)), bnns.BNNSActivation(3))
    other = bnns.BNNSFilterCreateLayerActivation(activation)
    fails(bnns.BNNSFilterApplyTwoInput(other, a, b, y), "filter does not have two inputs")
    dy = normal(2, 3, 5, seed=2)
    da = np.full_like(a, 7)

    def backward(inA: Any, inB: Any, in_delta: Any, out_delta: Any, weights: Any = None, bias: Any = None) -> str:
        status = bnns.BNNSFilterApplyBackwardTwoInputBatch(
            filter, 2, inA, 0, in_delta, 0, inB, 0, None, 0, None, 0, out_delta, 0, weights, bias
        )
        assert status == -1
        return bnns.last_error() or ""

    good, incoming = first((3, 4), da), first((3, 5), dy)
    assert "inB is NULL" in backward(a, None, good, incoming)
    assert "out_delta is NULL" in backward(a, b, good, None)
    assert "inA_delta has 15 elements, expected 12 as in iA_desc" in backward(a, b, first((3, 5), da), incoming)
    assert "neither operand is weights" in backward(a, b, good, incoming, weights=good)
    assert "a product has no bias" in backward(a, b, good, incoming, bias=good)
    assert (da == 7).all()
    assert (y == 7).all()


def test_swifts_products() -> None:
    shapes = [BNNS.Shape.matrixFirstMajor(*s) for s in ((3, 4), (4, 5), (3, 5))]
    a, b, y = normal(2, 3, 4), normal(2, 4, 5, seed=1), np.empty((2, 3, 5), np.float32)
    da, db, dy = np.empty_like(a), np.empty_like(b), normal(2, 3, 5, seed=2)
    options: dict[str, Any] = {"transposedA": False, "transposedB": False, "isWeightsA": False, "alpha": 1.0}
    parts = [shape.descriptor() for shape in shapes]
    with BNNS.BroadcastMatrixMultiplyLayer(
        inputA=parts[0],
        inputB=parts[1],
        output=parts[2],
        isWeightsB=False,
        accumulatesToOutput=False,
        isQuadratic=False,
        **options,
    ) as swift:
        given = {"inputA": shapes[0].descriptor(a), "inputB": shapes[1].descriptor(b)}
        swift.applyTwo(batchSize=2, output=shapes[2].descriptor(y), **given)
        swift.applyBackwardTwo(
            batchSize=2,
            outputGradient=shapes[2].descriptor(dy),
            generatingInputAGradient=shapes[0].descriptor(da),
            generatingInputBGradient=shapes[1].descriptor(db),
            **given,
        )
    assert np.allclose(y, a @ b, rtol=1e-5, atol=1e-5)
    assert np.allclose(da, dy @ b.transpose(0, 2, 1), rtol=1e-4, atol=1e-4)
    assert np.allclose(db, a.transpose(0, 2, 1) @ dy, rtol=1e-4, atol=1e-4)
    with BNNS.BroadcastMatrixMultiplyLayer(
        inputA=parts[0],
        inputB=shapes[1].descriptor(b[0]),
        output=parts[2],
        isWeightsB=True,
        accumulatesToOutput=False,
        isQuadratic=False,
        **options,
    ) as swift:
        swift.apply(batchSize=2, input=shapes[0].descriptor(a), output=shapes[2].descriptor(y))
    assert np.allclose(y, a @ b[0], rtol=1e-5, atol=1e-5)
    one = {"inputA": shapes[0].descriptor(a[0]), "inputB": shapes[1].descriptor(b[1]), "alpha": 2.0}
    assert BNNS.matrixMultiplicationWorkspaceSize(output=shapes[2].descriptor(y[0]), **one) == 0
    BNNS.applyMatrixMultiplication(output=shapes[2].descriptor(y[0]), **one)
    assert np.allclose(y[0], 2 * a[0] @ b[1], rtol=1e-5, atol=1e-5)
    assert BNNS.matrixMultiplicationWorkspaceSize(output=shapes[0].descriptor(a[0]), **one) is None
