"""retrograd.bnns does nothing wrong in silence: arrays agree with descriptors, failures are seen and explained."""

from __future__ import annotations

import array
import ctypes
import logging
import mmap
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from retrograd import bnns
from retrograd.lab import reference
from support.bnns_inside import Invalid, first_failure

Array = np.ndarray[Any, Any]
F32 = bnns.BNNSDataTypeFloat32
EPSILON = float(np.float32(1e-3))
describe = bnns.BNNSNDArrayDescriptor.from_array


def vector(data: Any, size: int = 4, data_type: int = F32, **fields: Any) -> bnns.BNNSNDArrayDescriptor:
    return bnns.BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayoutVector, size=(size,), data=data, data_type=data_type, **fields
    )


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def batch_norm(size: tuple[int, ...] = (6,), stride: tuple[int, ...] = (), **fields: Any) -> Any:
    layout = bnns.BNNSDataLayoutVector if len(size) == 1 else bnns.BNNSDataLayoutImageCHW
    sample = bnns.BNNSNDArrayDescriptor(layout=layout, size=size, stride=stride, data_type=F32)
    layer = bnns.BNNSLayerParametersNormalization(i_desc=sample, o_desc=sample, epsilon=1e-3, momentum=0.9, **fields)
    return bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer)


def expected_batch_norm(x: Array) -> Array:
    return np.asarray(reference.norm_forward(x, kind="batch", eps=EPSILON).y)


def error() -> str:
    return bnns.last_error() or ""


# ---- arrays agree with their descriptors -----------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (lambda: np.zeros(8), "float64"),
    "int64": (lambda: np.zeros(8, np.int64), "int64"),
    "int32": (lambda: np.zeros(8, np.int32), "int32"),
    "float16": (lambda: np.zeros(8, np.float16), "float16"),
    "bfloat16": (lambda: np.zeros(8, ml_dtypes.bfloat16), "bfloat16"),
    "uint8": (lambda: np.zeros(32, np.uint8), "uint8"),
    "bool": (lambda: np.zeros(32, bool), "bool"),
    "complex64": (lambda: np.zeros(8, np.complex64), "complex64"),
    "big-endian": (lambda: np.zeros(8, ">f4"), "non-native byte order"),
    "structured": (lambda: np.zeros(8, [("a", np.float32)]), "'a'"),
    "array.array": (lambda: array.array("d", [0.0] * 8), "float64"),
    "typed memoryview": (lambda: memoryview(np.zeros(8)), "float64"),
    "ctypes doubles": (lambda: (ctypes.c_double * 8)(), "float64"),
    "ctypes structures": (lambda: (type("S", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_float)]}) * 8)(), "T{"),
    "strided": (lambda: np.zeros(16, np.float32)[::2], "not contiguous"),
    "reversed": (lambda: np.zeros(8, np.float32)[::-1], "not contiguous"),
    "broadcast": (lambda: np.broadcast_to(np.float32(0), (8,)), "not contiguous"),
    "fortran": (lambda: np.zeros((2, 4), np.float32, order="F"), "not contiguous"),
    "strided memoryview": (lambda: memoryview(np.zeros(16, np.float32))[::2], "not contiguous"),
    "raw with gaps": (lambda: memoryview(bytearray(64))[::2], "must be contiguous"),
    "masked": (lambda: np.ma.masked_array(np.zeros(8, np.float32), mask=[1] + [0] * 7), "masked"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_disagrees_with_its_descriptor_is_refused(name: str) -> None:
    make, reason = WRONG[name]
    with pytest.raises(Invalid, match=re.escape(reason)):
        vector(make()).view()


@pytest.mark.parametrize("name", WRONG)
def test_what_disagrees_is_refused_wherever_it_is_given(name: str) -> None:
    """As in, out, gamma, a delta, an optimizer's arrays: -1, the field by Apple's name, nothing written."""
    make, reason = WRONG[name]
    wrong = make()
    x, y = normal(2, 4), np.full((2, 4), 7, np.float32)
    filter = batch_norm((4,))
    apply = bnns.BNNSNormalizationFilterApplyBatch
    assert apply(filter, 2, wrong, 4, y, 4, True) == -1
    assert error().startswith("BNNSNormalizationFilterApplyBatch: in ")
    assert reason in error()
    assert apply(filter, 2, x, 4, wrong, 4, True) == -1
    assert error().startswith("BNNSNormalizationFilterApplyBatch: out ")
    assert batch_norm((4,), gamma_desc=vector(wrong)) is None
    assert error().startswith("BNNSFilterCreateLayerNormalization: gamma_desc.data ")
    assert apply(filter, 2, x, 4, y, 4, True) == 0
    good, bad = vector(x), vector(wrong)
    backward = bnns.BNNSNormalizationFilterApplyBackwardBatch
    for deltas, field in (((bad, good), "in_delta"), ((vector(y), bad), "out_delta")):
        before = y.copy()
        assert backward(filter, 2, deltas[0], 4, None, 0, deltas[1], 4, None, None) == -1
        assert error().startswith(f"BNNSNormalizationFilterApplyBackwardBatch: {field}.data ")
        assert np.array_equal(y, before)
    assert backward(filter, 2, None, 0, None, 0, good, 4, None, bad) == -1
    assert error().startswith("BNNSNormalizationFilterApplyBackwardBatch: gamma_delta.data ")
    fields = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.1, gradient_scale=1)
    parameter = vector(normal(4))
    assert bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionSGDMomentum, fields, 1, [parameter], [bad], None) == -1
    assert error().startswith("BNNSOptimizerStep: gradients[0].data ")


def test_a_strided_output_keeps_what_lies_between() -> None:
    x, big = normal(4, 6), np.full((4, 12), 7, np.float32)
    assert bnns.BNNSNormalizationFilterApplyBatch(batch_norm(), 4, x, 6, big[:, ::2], 6, True) == -1
    assert "not contiguous" in error()
    assert "from_array" in error()
    assert (big == 7).all()


@pytest.mark.parametrize("columns", [slice(None, None, 2), slice(0, 6), slice(1, 7)], ids=str)
def test_a_strided_array_is_used_where_the_strides_describe_it(columns: slice) -> None:
    x, dy = normal(4, 6), normal(4, 6, seed=1)
    step = columns.step or 1
    filter = batch_norm(stride=(step,))
    big, y = np.full((4, 12), np.nan, np.float32), np.full((4, 12), 7, np.float32)
    big[:, columns] = x
    apply = bnns.BNNSNormalizationFilterApplyBatch
    assert apply(filter, 4, big[:, columns], 12, y[:, columns], 12, True) == 0, error()
    assert np.allclose(y[:, columns], expected_batch_norm(x), atol=1e-5)
    y[:, columns] = 7
    assert (y == 7).all()
    # The gradient in the same way, and a first part of the samples.
    dx = np.full((4, 12), 7, np.float32)
    in_delta, out_delta = (vector(a, 6, stride=(step,)) for a in (dx[:, columns], big[:, columns]))
    big[:, columns] = dy
    backward = bnns.BNNSNormalizationFilterApplyBackwardBatch
    assert backward(filter, 4, in_delta, 12, None, 0, out_delta, 12, None, None) == 0, error()
    plain, want = batch_norm(), np.empty_like(x)
    assert apply(plain, 4, x, 6, np.empty_like(x), 6, True) == 0
    assert backward(plain, 4, vector(want, 6), 6, None, 0, vector(dy, 6), 6, None, None) == 0
    assert np.array_equal(dx[:, columns], want)
    dx[:, columns] = 7
    assert (dx == 7).all()
    assert apply(filter, 2, big[:, columns], 12, y[:, columns], 12, False) == 0, error()
    # One stride wrong: refused.
    assert apply(filter, 4, big[:, columns], 11, y[:, columns], 12, True) == -1
    assert apply(filter, 5, big[:, columns], 12, y[:, columns], 12, True) == -1


def test_from_array_describes_a_strided_array() -> None:
    whole = np.arange(48, dtype=np.float32).reshape(4, 12)
    part = whole[:, ::2]
    assert np.array_equal(describe(part).view(), part)
    described = describe(part)
    described.stride[1] = 11
    with pytest.raises(Invalid, match="not contiguous"):
        described.view()


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(16),
        lambda: memoryview(bytearray(16)),
        lambda: memoryview(bytearray(16)).cast("b"),
        lambda: memoryview(bytearray(16)).cast("c"),
        lambda: memoryview(np.zeros(16, np.uint8)),
        lambda: memoryview(np.zeros(4)[:2]).cast("B"),
        lambda: mmap.mmap(-1, 16),
        lambda: (ctypes.c_char * 16)(),
        lambda: (ctypes.c_ubyte * 16)(),
        lambda: array.array("B", bytes(16)),
    ],
)
def test_raw_memory_holds_whatever_the_descriptor_says(make: Callable[[], Any]) -> None:
    raw = make()
    vector(raw).view()[:] = [1, 2, 3, 4]
    assert vector(raw).view().tolist() == [1, 2, 3, 4]
    assert vector(raw, 8, bnns.BNNSDataTypeFloat16).view().tobytes() == np.arange(1, 5, dtype=np.float32).tobytes()


def test_typed_memory_that_agrees() -> None:
    for data in (
        normal(4),
        normal(2, 2),
        normal(5, 3),
        array.array("f", [1, 2, 3, 4]),
        (ctypes.c_float * 4)(),
        memoryview(normal(4)),
        normal(4).reshape(1, 4).T,
        np.asfortranarray(normal(4, 1)),
        normal(4).view(np.matrix),
    ):
        assert vector(data).view().shape == (4,)
    half = np.arange(4).astype(ml_dtypes.bfloat16)
    assert vector(half, data_type=bnns.BNNSDataTypeBFloat16).view().tolist() == [0, 1, 2, 3]
    with pytest.raises(Invalid, match=r"uint16, but its descriptor says BNNSDataTypeBFloat16: .* view keeps the bits"):
        vector(half.view(np.uint16), data_type=bnns.BNNSDataTypeBFloat16).view()


def test_an_object_with_an_array_interface() -> None:
    class Wrapper:
        def __init__(self, array: Array) -> None:
            self.array = array
            self.__array_interface__ = array.__array_interface__

    x = normal(4)
    assert np.shares_memory(vector(Wrapper(x)).view(), x)
    descriptor = vector(Wrapper(x))
    descriptor.view()
    descriptor.data.__array_interface__ = np.zeros(4).__array_interface__
    with pytest.raises(Invalid, match="float64"):
        descriptor.view()


def test_torch_tensors_agree_or_are_refused(torch: Any) -> None:
    assert vector(torch.zeros(4)).view().shape == (4,)
    bfloat16 = torch.arange(4, dtype=torch.bfloat16)
    assert vector(bfloat16, data_type=bnns.BNNSDataTypeBFloat16).view().tolist() == [0, 1, 2, 3]
    for wrong, reason in (
        (torch.zeros(4, dtype=torch.float64), "float64"),
        (torch.zeros(8)[::2], "not contiguous"),
        (bfloat16, "bfloat16"),
    ):
        with pytest.raises(Invalid, match=reason):
            vector(wrong).view()


def test_the_training_cache_is_any_contiguous_memory() -> None:
    layer, y = lstm()
    capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(layer)
    forward = bnns.BNNSDirectApplyLSTMBatchTrainingCaching
    for cache in (bytearray(capacity), np.zeros(capacity, np.uint8), np.zeros(capacity, np.float64)):
        assert forward(layer, None, cache, capacity) == 0, error()
    expected = y.copy()
    strided, y[...] = np.full((capacity, 2), 7, np.uint8), 0
    for wrong, reason in (
        (strided[:, 0], "must be contiguous"),
        (np.ma.masked_array(np.zeros(capacity, np.uint8)), "masked"),
        (y.ctypes.data, "pass the array, not its address"),
    ):
        assert forward(layer, None, wrong, capacity) == -1
        assert error().startswith("BNNSDirectApplyLSTMBatchTrainingCaching: training_cache_ptr ")
        assert reason in error()
    assert (strided == 7).all()
    assert (y == 0).all()
    assert forward(layer, None, None, 0) == 0
    assert np.array_equal(y, expected)


def lstm(**fields: Any) -> tuple[bnns.BNNSLayerParametersLSTM, Array]:
    x, y = normal(3, 2, 5), np.zeros((3, 2, 4), np.float32)
    layer = bnns.BNNSLayerParametersLSTM(
        5, 4, 2, 1, 3, lstm_flags=bnns.BNNSLayerFlagsLSTMDefaultActivations,
        input_descriptor=bnns.BNNSLSTMDataDescriptor(describe(x, bnns.BNNSDataLayoutSNE)),
        output_descriptor=bnns.BNNSLSTMDataDescriptor(describe(y, bnns.BNNSDataLayoutSNE)),
    )  # fmt: skip
    for number, name in enumerate(("input_gate", "forget_gate", "candidate_gate", "output_gate")):
        gate = getattr(layer, name)
        gate.iw_desc[0], gate.hw_desc = describe(normal(4, 5, seed=number)), describe(normal(4, 4, seed=number))
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer, y


@pytest.mark.parametrize(
    ("place", "data", "reason"),
    [
        ("input_descriptor.data_desc", np.zeros((3, 2, 5)), "float64"),
        ("input_descriptor.data_desc", np.zeros((3, 2, 10), np.float32)[:, :, ::2], "not contiguous"),
        ("output_descriptor.data_desc", np.zeros((3, 2, 4), np.float32, order="F"), "not contiguous"),
        ("forget_gate.hw_desc", np.zeros((4, 4), np.int32), "int32"),
        ("sequence_descriptor", np.array([2, 2, 1]), "int64, but its descriptor says BNNSDataTypeUInt32"),
    ],
)
def test_an_lstm_array_that_disagrees(place: str, data: Any, reason: str) -> None:
    layer, y = lstm()
    part, _, field = place.partition(".")
    owner: Any = getattr(layer, part) if field else layer
    if place == "sequence_descriptor":
        layer.sequence_descriptor = vector(data, 3, bnns.BNNSDataTypeUInt32)
    else:
        getattr(owner, field).data = data
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == -1
    assert error().startswith(f"BNNSDirectApplyLSTMBatchTrainingCaching: {place}.data ")
    assert reason in error()
    assert (y == 0).all()


def test_an_lstm_reads_strided_arrays_that_its_strides_describe() -> None:
    layer, y = lstm()
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == 0
    expected = y.copy()
    wide = np.full((3, 2, 9), np.nan, np.float32)
    wide[:, :, :5] = layer.input_descriptor.data_desc.data
    layer.input_descriptor.data_desc = describe(wide[:, :, :5], bnns.BNNSDataLayoutSNE)
    y[...] = 0
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == 0, error()
    assert np.array_equal(y, expected)


def test_a_plan_that_was_kept_does_not_let_another_array_pass() -> None:
    x, y = normal(2, 4), np.empty((2, 4), np.float32)
    filter = batch_norm((4,))
    assert bnns.BNNSNormalizationFilterApplyBatch(filter, 2, x, 4, y, 4, True) == 0
    in_delta, out_delta, gamma_delta = vector(np.empty((2, 4), np.float32)), vector(x), vector(np.empty(4, np.float32))
    for _ in range(2):
        for descriptor in (in_delta, out_delta, gamma_delta):
            arguments = (filter, 2, in_delta, 4, None, 0, out_delta, 4, None, gamma_delta)
            for _ in range(2):
                assert bnns.BNNSNormalizationFilterApplyBackwardBatch(*arguments) == 0
            good, descriptor.data = descriptor.data, descriptor.data.astype(np.float64)
            assert bnns.BNNSNormalizationFilterApplyBackwardBatch(*arguments) == -1
            assert "float64" in error()
            descriptor.data = good
    lists = [vector(normal(4))], [vector(normal(4))]
    fields = bnns.BNNSOptimizerSGDMomentumFields(learning_rate=0.1, gradient_scale=1)
    step = bnns.BNNSOptimizerStep
    assert step(bnns.BNNSOptimizerFunctionSGDMomentum, fields, 1, *lists, None) == 0
    lists[1][0].data = np.ones(4)
    assert step(bnns.BNNSOptimizerFunctionSGDMomentum, fields, 1, *lists, None) == -1
    layer, _ = lstm()
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == 0
    layer.input_gate.hw_desc.data = np.zeros((4, 4))
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == -1


# ---- addresses, and sizes in the descriptor's own order --------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        lambda x: x.ctypes.data,
        lambda x: np.intp(x.ctypes.data),
        lambda x: x.ctypes,
        lambda x: ctypes.c_void_p(x.ctypes.data),
        lambda x: x.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        lambda x: ctypes.byref(ctypes.c_float()),
        lambda x: ctypes.c_char_p(b"abcdefghijklmnopqrstuvwxyz"),
        lambda x: ctypes.CFUNCTYPE(None)(lambda: None),
    ],
)
def test_an_address_is_refused_with_advice(address: Callable[[Array], Any]) -> None:
    x, y = normal(2, 4), np.empty((2, 4), np.float32)
    given = address(x)
    assert bnns.BNNSNormalizationFilterApplyBatch(batch_norm((4,)), 2, given, 4, y, 4, True) == -1
    assert error().startswith("BNNSNormalizationFilterApplyBatch: in is ")
    assert error().endswith(": pass the array, not its address")
    with pytest.raises(Invalid, match=r"^data is .*: pass the array, not its address$"):
        vector(given).view()


def test_size_errors_give_the_expected_size_in_the_layouts_order() -> None:
    x, y = normal(2, 3, 4, 5), np.empty((2, 3, 4, 5), np.float32)
    filter = batch_norm((5, 4, 3))
    assert bnns.BNNSNormalizationFilterApplyBatch(filter, 2, x, 60, y, 60, True) == 0
    backward = bnns.BNNSNormalizationFilterApplyBackwardBatch

    def delta(layout: int, *size: int) -> bnns.BNNSNDArrayDescriptor:
        return bnns.BNNSNDArrayDescriptor(layout=layout, size=size, data=x, data_type=F32)

    for descriptor, text in (
        (delta(bnns.BNNSDataLayoutImageCHW, 3, 4, 5), "(3, 4, 5), expected size=(W, H, C)=(5, 4, 3) as in o_desc"),
        (delta(bnns.BNNSDataLayout3DFirstMajor, 5, 4, 3), "(5, 4, 3), expected size=(3, 4, 5) (slowest first)"),
        (delta(bnns.BNNSDataLayout3DLastMajor, 3, 4, 5), "(3, 4, 5), expected size=(5, 4, 3) (fastest first)"),
        (delta(bnns.BNNSDataLayoutVector, 59), "(59,), expected size=(W, H, C)=(5, 4, 3) as in o_desc"),
    ):
        assert backward(filter, 2, None, 0, None, 0, descriptor, 60, None, None) == -1
        assert f"BNNSNormalizationFilterApplyBackwardBatch: out_delta.size is {text}" in error()
    assert bnns.BNNSNormalizationFilterApplyBatch(filter, 3, x, 60, y, 60, True) == -1
    assert "3 samples of size=(W, H, C)=(5, 4, 3)" in error()
    assert batch_norm((5, 4, 3), gamma_desc=vector(normal(5), 5)) is None
    assert "gamma_desc.size is (5,), expected size=(3,), one value for each channel" in error()
    with pytest.raises(Invalid, match=re.escape("size=(columns, rows)=(5, 4) spans 80")):
        bnns.BNNSNDArrayDescriptor(
            layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(5, 4), data=normal(4), data_type=F32
        ).view()


def test_size_errors_of_layer_norm_parameters() -> None:
    sample = bnns.BNNSNDArrayDescriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(5, 4, 3), data_type=F32)
    layer = bnns.BNNSLayerParametersNormalization(
        i_desc=sample, o_desc=sample, epsilon=1e-3, gamma_desc=vector(normal(7), 7), normalization_axis=1
    )
    assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSLayerNorm, layer) is None
    assert "gamma_desc.size is (7,), expected size=(5, 4, 3) (fastest first) or size=(5, 4) (fastest first)" in error()


@pytest.mark.parametrize(
    ("place", "size", "text"),
    [
        (
            "input_descriptor.data_desc",
            (3, 2, 5),
            "(3, 2, 5), expected size=(input_size, batch_size, seq_len)=(5, 2, 3)",
        ),
        ("output_descriptor.data_desc", (4, 3, 2), "size=(directions * hidden_size, batch_size, seq_len)=(4, 2, 3)"),
        ("forget_gate.hw_desc", (5, 4), "hidden_size * directions * num_layers)=(4, 4)"),
    ],
)
def test_size_errors_of_an_lstm_name_its_scalar_fields(place: str, size: tuple[int, ...], text: str) -> None:
    layer, _ = lstm()
    part, _, field = place.partition(".")
    getattr(getattr(layer, part), field).size = size
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == -1
    assert error().startswith(f"BNNSDirectApplyLSTMBatchTrainingCaching: {place}.size is {size}")
    assert text in error()


# ---- failures are seen -----------------------------------------------------------------------------------------------


def fail() -> int:
    return bnns.BNNSFilterApply(None, None, None)


def test_the_first_failure_of_a_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_failure, "seen", False)
    with pytest.warns(bnns.BNNSWarning, match=r"BNNSFilterApply: filter is NULL .*last_error.*log") as found:
        assert fail() == -1
    assert len(found) == 1
    assert found[0].filename == __file__  # the caller's line, not one of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fail() == -1


def test_the_warning_comes_once_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_failure, "seen", False)
    monkeypatch.setattr(warnings, "warn", lambda message, *_, **__: seen.append(message))
    seen: list[str] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        fail()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_a_process_shows_the_warning_by_default() -> None:
    code = "from retrograd import bnns\nfor _ in range(3): bnns.BNNSFilterApply(None, None, None)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("BNNSWarning: BNNSFilterApply: filter is NULL") == 1


def test_the_swift_face_raises_and_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_failure, "seen", False)
    shape = bnns.BNNS.Shape.vector(4)
    with pytest.raises(bnns.BNNS.Error, match="epsilon is -1"):
        bnns.BNNS.NormalizationLayer(
            type=bnns.BNNS.NormalizationType.batch(), input=shape.descriptor(), output=shape.descriptor(), epsilon=-1
        )
    assert not first_failure.seen
    with pytest.warns(bnns.BNNSWarning):
        fail()


def test_success_clears_the_last_error() -> None:
    fail()
    assert error() == "BNNSFilterApply: filter is NULL"
    filter = batch_norm((4,))
    assert bnns.last_error() is None
    fail()
    bnns.BNNSFilterDestroy(filter)  # in a clean-up, before the reason is asked for
    assert error() == "BNNSFilterApply: filter is NULL"
    assert bnns.BNNSComputeLSTMTrainingCacheCapacity(lstm()[0]) > 0
    assert bnns.last_error() is None


# ---- in Apple's words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"time_step": 0}, "time_step is 0, must be at least 1"),
        ({"epsilon": -1}, "epsilon is -1.0"),
        ({"beta1": 2}, "beta1 is 2.0"),
        ({"regularization_scale": -1, "regularization_func": 2}, "regularization_scale is -1.0"),
        ({"regularization_scale": -1, "regularization_func": 1}, "regularization_scale is -1.0"),
        ({"clip_gradients": True, "clip_gradients_min": 2}, "(clip_gradients_min, clip_gradients_max) is (2.0, 0.0)"),
    ],
)
def test_what_an_optimizer_refuses_is_told_by_apples_fields(fields: dict[str, Any], text: str) -> None:
    settings = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "time_step": 1, "epsilon": 1e-8, "gradient_scale": 1}
    adam = bnns.BNNSOptimizerAdamFields(**{**settings, **fields})
    lists = [[vector(normal(4, seed=k))] for k in range(2)], [vector(np.zeros(4, np.float32)) for _ in range(2)]
    assert bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionAdam, adam, 1, *lists[0], lists[1]) == -1
    assert error().startswith(f"BNNSOptimizerStep: {text}")


@pytest.mark.parametrize(
    ("function", "fields", "kinds", "pair"),
    [
        ("Adam", "Adam", 2, ("accumulators[0]", "accumulators[3]")),
        ("Adam", "Adam", 2, ("gradients[1]", "accumulators[2]")),
        ("AdamAMSGrad", "Adam", 3, ("parameters[1]", "accumulators[4]")),
        ("SGDMomentum", "SGDMomentum", 1, ("gradients[0]", "accumulators[1]")),
        ("RMSProp", "RMSProp", 3, ("accumulators[1]", "accumulators[5]")),
        ("RMSProp", "RMSProp", 3, ("parameters[0]", "accumulators[2]")),
        ("SGDMomentum", "SGDMomentum", 1, ("parameters[0]", "gradients[1]")),
    ],
)
def test_overlaps_are_told_by_apples_lists(function: str, fields: str, kinds: int, pair: tuple[str, str]) -> None:
    names = [
        f"{name}[{k}]"
        for name, n in (("parameters", 2), ("gradients", 2), ("accumulators", 2 * kinds))
        for k in range(n)
    ]
    arrays = {name: normal(4, seed=k) for k, name in enumerate(names)}
    arrays[pair[1]] = arrays[pair[0]]
    described = [vector(array) for array in arrays.values()]
    settings: Any = getattr(bnns, f"BNNSOptimizer{fields}Fields")(learning_rate=0.1, gradient_scale=1)
    for name, value in {"momentum": 0.5, "centered": True, "time_step": 1, "beta1": 0.9, "beta2": 0.9}.items():
        if hasattr(settings, name):
            setattr(settings, name, value)
    number = getattr(bnns, f"BNNSOptimizerFunction{function}")
    assert bnns.BNNSOptimizerStep(number, settings, 2, described[:2], described[2:4], described[4:]) == -1
    assert set(re.findall(r"\w+\[\d\]", error())) == set(pair)


def test_what_the_engine_refuses_of_an_lstm_is_told_by_apples_fields() -> None:
    layer, _ = lstm()
    layer.sequence_descriptor = describe(np.array([2, 9, 1], np.uint32))
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == -1
    assert error() == (
        "BNNSDirectApplyLSTMBatchTrainingCaching: sequence_descriptor.data has 9, must be from 0 to 2, the samples of "
        "input_descriptor.data_desc"
    )
    layer, _ = lstm()
    raw = bytearray(81)
    layer.forget_gate.iw_desc[0].data = memoryview(raw)[1:]
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, None, 0) == -1
    assert error().startswith("BNNSDirectApplyLSTMBatchTrainingCaching: forget_gate.iw_desc is not aligned")
    layer, _ = lstm()
    capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(layer)
    cache = bytearray(capacity)
    layer.input_descriptor.data_desc.data = memoryview(cache)[:120]
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, cache, capacity) == -1
    assert "training_cache_ptr" in error()
    assert "input_descriptor.data_desc" in error()
    assert not re.search(r"lstm_forward|\bx\b", error())


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        (bnns.BNNSActivation(8, 2.0, 1.0), "activation.function is BNNSActivationFunctionClamp: the lower bound"),
        (bnns.BNNSActivation(8, float("nan")), "activation.function is BNNSActivationFunctionClamp: alpha is NaN"),
        (bnns.BNNSActivation(24), "activation.function is BNNSActivationFunctionCELU: with alpha = 0"),
    ],
)
def test_activations_are_called_as_apple_calls_them(activation: bnns.BNNSActivation, text: str) -> None:
    assert batch_norm((4,), activation=activation) is None
    assert error().startswith(f"BNNSFilterCreateLayerNormalization: {text}")


def test_an_activation_that_cannot_be_trained_is_called_as_apple_calls_it() -> None:
    x, y = normal(2, 4), np.empty((2, 4), np.float32)
    filter = batch_norm((4,), activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionSiLU))
    assert bnns.BNNSNormalizationFilterApplyBatch(filter, 2, x, 4, y, 4, True) == 0
    deltas = vector(np.empty((2, 4), np.float32)), vector(x)
    assert bnns.BNNSNormalizationFilterApplyBackwardBatch(filter, 2, deltas[0], 4, y, 4, deltas[1], 4, None, None) == -1
    assert "activation.function is BNNSActivationFunctionSiLU: the output does not tell" in error()
    assert bnns.BNNSGetPointer(filter, 0).data is None
    assert error().startswith("BNNSGetPointer: ")


# ---- what only we accept ---------------------------------------------------------------------------------------------


NOT_APPLES = "; this is accepted here, but not by Apple's headers"


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged as information since the last look."""
    caplog.set_level(logging.INFO, "retrograd.bnns")

    def look() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return look


def train(kind: int, layer: bnns.BNNSLayerParametersNormalization, x: Array, dy: Array) -> tuple[Array, Array]:
    """The output and the gradient of the input, over two passes."""
    filter = bnns.BNNSFilterCreateLayerNormalization(
        kind, layer, bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
    )
    y, dx = np.empty_like(x), np.empty_like(x)
    size = x[0].size
    in_delta, out_delta = layer.i_desc.copy(), layer.i_desc.copy()
    in_delta.data, out_delta.data = dx, dy
    for _ in range(2):
        assert bnns.BNNSNormalizationFilterApplyBatch(filter, len(x), x, size, y, size, True) == 0, error()
        assert (
            bnns.BNNSNormalizationFilterApplyBackwardBatch(
                filter, len(x), in_delta, size, y, size, out_delta, size, None, None
            )
            == 0
        ), error()
    return y, dx


def check(got: tuple[Array, Array], x: Array, dy: Array, gamma: Any, beta: Any, tolerance: float, **form: Any) -> None:
    y = np.asarray(reference.norm_forward(x, gamma, beta, eps=EPSILON, **form).y)
    dx = reference.norm_backward(dy, x, y, gamma, beta, eps=EPSILON, **form).dx
    assert np.allclose(got[0], y, rtol=tolerance, atol=tolerance)
    assert np.allclose(got[1], dx, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("layout", "size"), [("3DLastMajor", (5, 4, 3)), ("3DFirstMajor", (3, 4, 5)), ("ImageCHW", (5, 4, 3))]
)
def test_3d_layouts_of_a_normalization(layout: str, size: tuple[int, ...], notes: Callable[[], list[str]]) -> None:
    x, dy = normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1)
    number = getattr(bnns, f"BNNSDataLayout{layout}")
    sample = bnns.BNNSNDArrayDescriptor(layout=number, size=size, data_type=F32)
    layer = bnns.BNNSLayerParametersNormalization(i_desc=sample, o_desc=sample, epsilon=1e-3)
    got = train(bnns.BNNSBatchNorm, layer, x, dy)
    check(got, x, dy, None, None, 1e-5, kind="batch")
    create = "BNNSFilterCreateLayerNormalization"
    expected = [f"{create}: {name}.layout is BNNSDataLayout{layout}{NOT_APPLES}" for name in ("i_desc", "o_desc")]
    assert notes() == ([] if layout == "ImageCHW" else expected)


@pytest.mark.parametrize("types", [(np.float32, np.float16), (ml_dtypes.bfloat16, np.float32), (np.float16,) * 2])
def test_types_of_gamma_and_beta(types: tuple[Any, Any], notes: Callable[[], list[str]]) -> None:
    x, dy, gamma, beta = normal(8, 4), normal(8, 4, seed=1), normal(4, seed=2), normal(4, seed=3)
    gamma, beta = gamma.astype(types[0]), beta.astype(types[1])
    layer = bnns.BNNSLayerParametersNormalization(
        vector(None), vector(None), describe(beta), describe(gamma), epsilon=1e-3
    )
    got = train(bnns.BNNSBatchNorm, layer, x, dy)
    check(got, x, dy, gamma.astype(np.float64), beta.astype(np.float64), 1e-5, kind="batch")
    found = notes()
    if types[0] is types[1]:
        assert found == []
    else:
        assert len(found) == 1
        assert "gamma_desc.data_type and beta_desc.data_type differ (BNNSDataType" in found[0]
        assert found[0].endswith(NOT_APPLES)


def test_gamma_that_is_no_vector(notes: Callable[[], list[str]]) -> None:
    x, dy, gamma = normal(8, 4), normal(8, 4, seed=1), normal(4, seed=2)
    layer = bnns.BNNSLayerParametersNormalization(
        vector(None), vector(None), gamma_desc=describe(gamma.reshape(4, 1)), epsilon=1e-3
    )
    check(train(bnns.BNNSBatchNorm, layer, x, dy), x, dy, gamma, None, 1e-5, kind="batch")
    what = "gamma_desc.layout is BNNSDataLayoutRowMajorMatrix, not a vector"
    assert notes() == [f"BNNSFilterCreateLayerNormalization: {what}{NOT_APPLES}"]


def test_layer_norm_parameters_of_the_normalized_axes(notes: Callable[[], list[str]]) -> None:
    x, dy, gamma = normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1), normal(4, 5, seed=2)
    sample = bnns.BNNSNDArrayDescriptor(layout=bnns.BNNSDataLayoutImageCHW, size=(5, 4, 3), data_type=F32)
    layer = bnns.BNNSLayerParametersNormalization(
        i_desc=sample, o_desc=sample, gamma_desc=describe(gamma), epsilon=1e-3, normalization_axis=1
    )
    check(train(bnns.BNNSLayerNorm, layer, x, dy), x, dy, gamma, None, 1e-5, kind="layer", axis=2)
    assert notes() == []  # the header's form
    layer.gamma_desc = describe(np.broadcast_to(gamma, (3, 4, 5)).copy())
    train(bnns.BNNSLayerNorm, layer, x, dy)
    assert notes() == []


@pytest.mark.parametrize(
    ("name", "alpha", "ours", "reference_name"),
    [
        ("ScaledTanh", 1.5, "", "scaled_tanh"),
        ("ReLU6", 0.0, "", "relu6"),
        ("LeakyRectifiedLinear", 0.0, " with alpha 0", "relu"),
        ("LeakyRectifiedLinear", 0.25, None, "leaky_relu"),
        ("Tanh", 0.0, None, "tanh"),
    ],
)
def test_activations_that_only_we_train(
    name: str, alpha: float, ours: str | None, reference_name: str, notes: Callable[[], list[str]]
) -> None:
    x, dy = normal(8, 4), normal(8, 4, seed=1)
    function = getattr(bnns, f"BNNSActivationFunction{name}")
    beta = 0.5 if name == "ScaledTanh" else 0.0
    layer = bnns.BNNSLayerParametersNormalization(
        vector(None), vector(None), epsilon=1e-3, activation=bnns.BNNSActivation(function, alpha, beta)
    )
    form = {"activation": reference_name, "alpha": alpha, "act_beta": beta}
    check(train(bnns.BNNSBatchNorm, layer, x, dy), x, dy, None, None, 1e-5, kind="batch", **form)
    what = f"activation.function is BNNSActivationFunction{name}{ours}, and backward trains it"
    assert notes() == ([] if ours is None else [f"BNNSFilterCreateLayerNormalization: {what}{NOT_APPLES}"])


def test_backward_without_client_memory_is_noted_once_per_filter(notes: Callable[[], list[str]]) -> None:
    x, y, dx = normal(8, 4), np.empty((8, 4), np.float32), np.empty((8, 4), np.float32)
    gamma = np.full(4, 2, np.float32)
    for _ in range(2):
        filter = batch_norm((4,), gamma_desc=describe(gamma))
        for _ in range(3):
            assert bnns.BNNSNormalizationFilterApplyBatch(filter, 8, x, 4, y, 4, True) == 0
            in_delta, out_delta = vector(dx), vector(x)
            assert (
                bnns.BNNSNormalizationFilterApplyBackwardBatch(
                    filter, 8, in_delta, 4, None, 0, out_delta, 4, None, None
                )
                == 0
            )
        (found,) = notes()
        assert "without BNNSFlagsUseClientPtr" in found
        assert found.endswith(NOT_APPLES)


def test_bfloat16_deltas_of_an_activation_are_noted_once(notes: Callable[[], list[str]]) -> None:
    x, y = normal(8, 4), np.empty((8, 4), np.float32)
    layer = bnns.BNNSLayerParametersActivation(vector(None), vector(None), bnns.BNNSActivation(4))
    filter = bnns.BNNSFilterCreateLayerActivation(layer)
    assert bnns.BNNSFilterApplyBatch(filter, 8, x, 4, y, 4) == 0
    dy, dx = np.ones((8, 4), ml_dtypes.bfloat16), np.empty((8, 4), np.float32)
    out_delta = vector(dy, data_type=bnns.BNNSDataTypeBFloat16)
    for _ in range(2):
        arguments = (filter, 8, x, 4, vector(dx), 4, y, 4, out_delta, 4, None, None)
        assert bnns.BNNSFilterApplyBackwardBatch(*arguments) == 0, error()
    assert np.allclose(dx, 1 - np.tanh(x) ** 2, atol=1e-6)
    what = "BNNSFilterApplyBackwardBatch: out_delta.data_type is BNNSDataTypeBFloat16"
    assert notes() == [what + NOT_APPLES]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint8, np.int64])
def test_types_of_an_lstms_counts(dtype: Any, notes: Callable[[], list[str]]) -> None:
    layer, y = lstm()
    layer.sequence_descriptor = describe(np.array([2, 2, 1], np.uint32))
    forward = bnns.BNNSDirectApplyLSTMBatchTrainingCaching
    assert forward(layer, None, None, 0) == 0
    expected = y.copy()
    assert notes() == []
    layer.sequence_descriptor, y[...] = describe(np.array([2, 2, 1], dtype)), 7
    for _ in range(3):
        assert forward(layer, None, None, 0) == 0, error()
    assert np.array_equal(y, expected)
    assert (y[2, 1] == 0).all()
    shown = f"sequence_descriptor.data_type is BNNSDataType{np.dtype(dtype).name.title().replace('ui', 'UI')}"
    shown = shown.replace("Uint", "UInt")
    assert notes() == ([] if dtype is np.uint32 else [f"BNNSLayerParametersLSTM: {shown}{NOT_APPLES}"])


def test_a_sequence_in_the_layout_of_an_image(notes: Callable[[], list[str]]) -> None:
    layer, y = lstm()
    forward = bnns.BNNSDirectApplyLSTMBatchTrainingCaching
    assert forward(layer, None, None, 0) == 0
    expected = y.copy()
    layer.input_descriptor.data_desc.layout = bnns.BNNSDataLayoutImageCHW
    y[...] = 0
    for _ in range(2):
        assert forward(layer, None, None, 0) == 0, error()
    assert np.array_equal(y, expected)
    what = "input_descriptor.data_desc.layout is BNNSDataLayoutImageCHW"
    assert notes() == [f"BNNSLayerParametersLSTM: {what}{NOT_APPLES}"]
