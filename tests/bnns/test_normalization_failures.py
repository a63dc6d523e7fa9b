"""BNNS normalization filters: what must fail, and that a failure changes nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.bnns import F16, Allocator, Descriptor, describe, fails, image, normal, not_created
from support.bnns_norm import Layer, activation, tanh


def bad_layers() -> Iterator[tuple[str, Callable[[Any], Any], str]]:
    """(name, what is done to good parameters, reason)"""

    def put(path: str, value: Any) -> Callable[[Any], Any]:
        def change(parameters: Any) -> None:
            *owners, last = path.split(".")
            for owner in owners:
                parameters = getattr(parameters, owner)
            setattr(parameters, last, value)

        return change

    yield "layout", put("i_desc.layout", bnns.BNNSDataLayoutRowMajorMatrix), "layout is BNNSDataLayoutRowMajorMatrix"
    yield "zero extent", put("i_desc.size", (5, 0, 3)), "extent must be at least 1"
    yield "extents differ", put("o_desc.size", (5, 2, 4)), "o_desc"
    yield "decreasing strides", put("o_desc.stride", (4, 1, 30)), r"stride\[1\] is 1, below that"
    yield "overlap", put("o_desc.stride", (1, 2, 30)), "share memory"
    yield "integers", put("i_desc.data_type", bnns.BNNSDataTypeInt8), "BNNSDataTypeInt8"
    yield (
        "gamma size",
        put("gamma_desc", describe(np.ones(4, np.float32))),
        r"gamma_desc\.size is \(4,\), expected size=\(3,\)",
    )
    yield "beta type", put("beta_desc", describe(np.ones(3, np.int32))), "beta_desc.data_type"
    yield (
        "gamma short",
        put("gamma_desc", image((3,), np.ones(2, np.float32))),
        r"gamma_desc\.data has 8 bytes, but size=\(3,\) spans 12",
    )
    yield "moving size", put("moving_mean_desc", describe(np.ones(2, np.float32))), "moving_mean_desc"
    yield "moving type", put("moving_variance_desc", describe(np.ones(3, np.float16))), "must be BNNSDataTypeFloat32"
    for value in (-0.1, 1.5, float("nan"), "x", None):
        yield f"momentum {value}", put("momentum", value), "momentum"
    for value in (-1e-3, float("nan"), float("inf")):
        yield f"epsilon {value}", put("epsilon", value), "epsilon"
    yield "activation", put("activation.function", 99), r"activation\.function is 0x63"
    yield "alpha", put("activation", bnns.BNNSActivation(2, float("nan"))), "NaN"
    yield "string", put("i_desc.size", ("a", 1, 1)), "must be an integer"
    yield "address", put("gamma_desc.data", 4096), "address"


@pytest.mark.parametrize(("change", "reason"), [case[1:] for case in bad_layers()], ids=[c[0] for c in bad_layers()])
def test_creation_fails(change: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    parameters = Layer("batch", (3, 2, 5), gamma=np.ones(3, np.float32)).parameters
    change(parameters)
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, parameters) is None
    assert caplog.records[-1].getMessage() == bnns.last_error()
    assert re.search(reason, bnns.last_error() or ""), bnns.last_error()


@pytest.mark.parametrize(
    ("norm_type", "fields", "reason"),
    [
        (bnns.BNNSGroupNorm, {"num_groups": 0}, "num_groups is 0"),
        (bnns.BNNSGroupNorm, {"num_groups": 2}, "num_groups is 2, which does not divide the 3"),
        (bnns.BNNSLayerNorm, {"normalization_axis": 3}, "normalization_axis is 3"),
        (bnns.BNNSConvolution, {}, "normType is 0"),
        (6, {}, "normType is 6"),
        ("batch", {}, "normType is 'batch'"),
    ],
)
def test_creation_fails_by_type(norm_type: Any, fields: dict[str, int], reason: str) -> None:
    parameters = Layer("batch", (3, 2, 5)).parameters
    for name, value in fields.items():
        setattr(parameters, name, value)
    not_created(bnns.BNNSFilterCreateLayerNormalization(norm_type, parameters), reason)


def test_layer_norm_of_a_vector_has_axis_0_only() -> None:
    assert Layer("layer", (5,), axis=0).made
    assert not Layer("layer", (5,), axis=1).made


def test_creation_fails_without_parameters() -> None:
    for nothing in (None, 5, bnns.BNNSActivation()):
        assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, nothing) is None  # type: ignore[arg-type]
    good = Layer("batch", (3, 2, 5)).parameters
    assert bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, good, "x") is None  # type: ignore[arg-type]


def test_unsupported_combinations_are_logged_as_information(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "retrograd.bnns"):
        Layer("batch", (3, 2, 5), activation=activation(bnns.BNNSActivationFunctionSoftmax))
        Layer("batch", (3, 2, 5), momentum=2)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.ERROR]


def test_the_last_error_is_kept_per_thread() -> None:
    Layer("batch", (3, 2, 5), momentum=2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bnns.last_error).result() is None
    assert "momentum is 2.0" in (bnns.last_error() or "")


def test_too_few_arguments_are_pythons_own_affair() -> None:
    with pytest.raises(TypeError, match="missing"):
        bnns.BNNSNormalizationFilterApplyBatch(None, 3)  # type: ignore[call-arg]


APPLY = {"batch": 4, "in": "x", "in_stride": 30, "out": "y", "out_stride": 30}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter": None}, "filter is NULL"),
        ({"filter": 3}, "not a filter"),
        ({"in": None}, "in is NULL"),
        ({"out": None}, "out is NULL"),
        ({"batch": 0}, "batch_size is 0"),
        ({"batch": -1}, "batch_size"),
        (
            {"batch": 5},
            "out has 480 bytes, but 5 samples of size=(W, H, C)=(5, 2, 3), with 30 values from one to",
        ),
        ({"batch": 2**62}, "out has 480 bytes"),
        ({"out_stride": 29}, "out_stride is 29, but a sample of out spans 30"),
        ({"in_stride": 31}, "in has 480 bytes"),
        ({"out_stride": bnns.SIZE_MAX}, "out has 480 bytes"),
        ({"in_stride": "x"}, "in_stride is 'x'"),
        ({"out": bytes(480)}, "out is read-only"),
        ({"in": bytes(479)}, "in has 479 bytes"),
        ({"out": bytearray(479)}, "out has 479 bytes"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_apply_fails_and_touches_nothing(changes: dict[str, Any], reason: str, training: bool) -> None:
    mean = np.zeros(3, np.float32)
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=np.ones(3, np.float32))
    x, y = normal(4, 3, 2, 5), np.full((4, 3, 2, 5), 7, np.float32)
    call = {"filter": layer.filter, **APPLY, "in": x, "out": y, **changes}
    status = bnns.BNNSNormalizationFilterApplyBatch(
        call["filter"], call["batch"], call["in"], call["in_stride"], call["out"], call["out_stride"], training
    )
    assert status == -1
    assert reason in (bnns.last_error() or "")
    assert (y == 7).all()
    assert not mean.any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out_delta": None}, "out_delta is NULL"),
        ({"out_delta": image((3, 2, 5))}, "out_delta.data is NULL"),
        ({"in_delta": image((3, 2, 5))}, "in_delta.data is NULL"),
        ({"gamma_delta": Descriptor()}, "gamma_delta.data is NULL"),
        (
            {"out_delta": image((3, 2, 4), np.zeros(200, np.float32))},
            "out_delta.size is (4, 2, 3), expected size=(W, H, C)=(5, 2, 3) as in o_desc",
        ),
        (
            {"in_delta": image((3, 5, 3), np.zeros(200, np.float32))},
            "in_delta.size is (3, 5, 3), expected size=(W, H, C)=(5, 2, 3) as in i_desc",
        ),
        (
            {"gamma_delta": describe(np.zeros(4, np.float32))},
            "gamma_delta.size is (4,), expected size=(3,) as in gamma_desc",
        ),
        (
            {"beta_delta": describe(np.zeros(2, np.float32))},
            "beta_delta.size is (2,), expected size=(3,) as in beta_desc",
        ),
        ({"out_delta": image((3, 2, 5), np.zeros(200, np.float16), data_type=F16)}, "out_delta.data_type"),
        ({"gamma_delta": describe(np.zeros(3, np.float16))}, "gamma_delta.data_type"),
        ({"in_delta": image((3, 2, 5), np.zeros(119, np.float32))}, "in_delta.data has 476 bytes"),
        ({"in_delta": image((3, 2, 5), bytes(480))}, "in_delta.data is read-only"),
        ({"in_delta": image((3, 2, 5), bytearray(480), flags=2)}, "in_delta.flags is 2"),
        ({"in_delta": image((3, 2, 5), bytearray(480), stride=(1, 2, 10))}, "share memory"),
        ({"in_delta_stride": 29}, "in_delta_stride is 29"),
        ({"out": np.zeros(119, np.float32)}, "out has 476 bytes"),
        ({"batch": 3}, "batch_size is 3"),
        ({"out_delta": 3}, "out_delta is of type int"),
        ({"filter": None}, "filter is NULL"),
    ],
)
def test_backward_fails_and_touches_nothing(changes: dict[str, Any], reason: str) -> None:
    ones = np.ones(3, np.float32)
    layer = Layer("batch", (3, 2, 5), gamma=ones, beta=ones, activation=tanh())
    x = normal(4, 3, 2, 5)
    y = layer.forward(x)
    results = [np.full_like(x, 7), np.full(3, 7, np.float32), np.full(3, 7, np.float32)]
    call: dict[str, Any] = {
        "filter": layer.filter,
        "batch": 4,
        "in_delta": image((3, 2, 5), results[0]),
        "in_delta_stride": 30,
        "out": y,
        "out_delta": image((3, 2, 5), x),
        "beta_delta": describe(results[1]),
        "gamma_delta": describe(results[2]),
        **changes,
    }
    status = bnns.BNNSNormalizationFilterApplyBackwardBatch(
        call["filter"],
        call["batch"],
        call["in_delta"],
        call["in_delta_stride"],
        call["out"],
        30,
        call["out_delta"],
        30,
        call["beta_delta"],
        call["gamma_delta"],
    )
    assert status == -1
    assert reason in (bnns.last_error() or "")
    assert all((result == 7).all() for result in results)


@pytest.mark.parametrize("when", ["before", "after"])
def test_read_only_moving_statistics_fail_in_training_only(when: str) -> None:
    mean = np.zeros(3, np.float32)
    mean.flags.writeable = when == "after"
    layer = Layer("batch", (3, 2, 5), mean=mean, variance=np.ones(3, np.float32))
    mean.flags.writeable = False
    x, y = normal(4, 3, 2, 5), np.full((4, 3, 2, 5), 7, np.float32)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, True) == -1
    assert (y == 7).all()
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, y, 30, False) == 0


def test_a_training_pass_that_fails_leaves_the_one_before() -> None:
    allocator = Allocator(limit=2)
    gamma = np.ones(3, np.float32)
    parameters = allocator.parameters()
    layer = Layer("batch", (3, 2, 5), gamma=gamma, parameters=parameters)
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    y = layer.forward(x)
    before = layer.gradients(dy, y, (3,))
    more = normal(9, 3, 2, 5)
    assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 9, more, 30, np.empty_like(more), 30, True) == -1
    for got, want in zip(layer.gradients(dy, y, (3,)), before, strict=True):
        assert np.array_equal(got, want)
    client = Layer("batch", (3, 2, 5), gamma=gamma, parameters=bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr))
    y = client.forward(x)
    before = client.gradients(dy, y, (3,))
    memory = np.empty(123, np.float32)
    client.parameters.gamma_desc.data = memory[60:63]
    memory[60:63] = 1
    over = bnns.BNNSFilterCreateLayerNormalization(
        bnns.BNNSBatchNorm, client.parameters, bnns.BNNSFilterParameters(bnns.BNNSFlagsUseClientPtr)
    )
    fails(bnns.BNNSNormalizationFilterApplyBatch(over, 4, x, 30, memory, 30, True), "out overlaps gamma_desc")
    for got, want in zip(client.gradients(dy, y, (3,)), before, strict=True):
        assert np.array_equal(got, want)


def test_results_over_one_another_are_refused() -> None:
    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer = Layer("batch", (3, 2, 5))
    layer.forward(x)
    memory = np.full(130, 7, np.float32)
    dx, one, other = memory[:120], memory[118:121], memory[120:123]
    for changed in ({"in_delta": dx, "gamma_delta": one}, {"gamma_delta": other, "beta_delta": memory[121:124]}):
        deltas = {n: image((3, 2, 5), a) if n == "in_delta" else describe(a) for n, a in changed.items()}
        fails(layer.backward(dy, None, **deltas), "overlaps")
        assert (memory == 7).all()
    moving = np.ones(4, np.float32)
    assert not Layer("batch", (3, 2, 5), mean=moving[:3], variance=moving[1:]).made
    layer = Layer("batch", (3, 2, 5), mean=memory[:3], variance=np.ones(3, np.float32))
    for training in (True, False):
        assert bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, memory, 30, training) == -1
    assert (memory == 7).all()


@pytest.mark.parametrize("training", [True, False])
def test_memory_at_any_alignment(training: bool) -> None:
    def odd(array: np.ndarray) -> np.ndarray:
        memory = np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype).reshape(array.shape)
        memory[...] = array
        return memory

    x, dy = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    layer, plain = (Layer("batch", (3, 2, 5), activation=tanh()) for _ in range(2))
    y = plain.forward(x, training)
    out = odd(y)
    out[...] = 0
    layer.forward(odd(x), training, out)
    assert np.array_equal(out, y)
    if training:
        dx = odd(x)
        assert layer.backward(odd(dy), out, in_delta=image((3, 2, 5), dx)) == 0, bnns.last_error()
        assert np.array_equal(dx, plain.gradients(dy, y, (3,))[0])


def test_infinity_is_quiet() -> None:
    """Warnings are errors in these tests: nothing may warn once results have been written."""
    x = normal(4, 3, 2, 5)
    x[0, 0, 0, 0] = np.inf
    Layer("batch", (3, 2, 5), mean=np.zeros(3, np.float32), variance=np.ones(3, np.float32), momentum=1).forward(x)
    assert Layer("batch", (3, 2, 5), activation=activation(8, -1e30, 1e30), types=(F16, F16)).made


def test_a_destroyed_filter_fails() -> None:
    layer = Layer("batch", (3, 2, 5))
    bnns.BNNSFilterDestroy(layer.filter)
    x = normal(4, 3, 2, 5)
    fails(bnns.BNNSNormalizationFilterApplyBatch(layer.filter, 4, x, 30, x, 30, True), "destroyed")
    assert bnns.BNNSFilterDestroy(None) is None


def test_the_general_functions_fail_on_a_normalization_filter() -> None:
    filter = Layer("batch", (3, 2, 5)).filter
    x = normal(4, 3, 2, 5)
    assert bnns.BNNSFilterApply(filter, x, x) == -1
    fails(bnns.BNNSFilterApplyBatch(filter, 4, x, 30, x, 30), "BNNSNormalizationFilterApplyBatch")
    d = image((3, 2, 5), x)
    assert bnns.BNNSFilterApplyBackwardBatch(filter, 4, x, 30, d, 30, x, 30, d, 30, None, None) == -1
    assert bnns.BNNSGetPointer(filter, bnns.BNNSPointerSpecifierAlpha).data is None
