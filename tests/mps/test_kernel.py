"""retrograd.mps: the members of the kernels, copying, and when a kernel is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.mps import (
    FLT_MIN,
    MPSCNNNeuronType,
    MPSKernelOptions,
    MPSMatrixBatchNormalization,
    MPSMatrixBatchNormalizationGradient,
    MPSMatrixBinaryKernel,
    MPSMatrixUnaryKernel,
    MTLDevice,
    MTLOrigin,
    MTLOriginMake,
    MTLSize,
    MTLSizeMake,
    NSUIntegerMax,
)
from support.arrays import assert_same_bits
from support.mps import (
    BETA,
    DEVICE,
    GAMMA,
    MEAN,
    QUEUE,
    VAR,
    X,
    commit,
    f32,
    forward,
    forward_kernel,
    gradient_kernel,
    matrix,
    vector,
)


def test_forward_defaults() -> None:
    kernel = MPSMatrixBatchNormalization(device=DEVICE)
    assert isinstance(kernel, MPSMatrixUnaryKernel)
    assert kernel.epsilon == FLT_MIN == np.float32(1.17549435e-38)
    assert kernel.sourceNumberOfFeatureVectors == kernel.sourceInputFeatureChannels == NSUIntegerMax == 2**64 - 1
    assert kernel.computeStatistics is False
    assert kernel.sourceMatrixOrigin == kernel.resultMatrixOrigin == MTLOrigin(0, 0, 0)
    assert (kernel.batchStart, kernel.batchSize) == (0, NSUIntegerMax)
    assert (kernel.options, kernel.label, kernel.device) == (MPSKernelOptions.none, None, DEVICE)


def test_gradient_defaults() -> None:
    kernel = MPSMatrixBatchNormalizationGradient(device=DEVICE)
    assert isinstance(kernel, MPSMatrixBinaryKernel)
    assert kernel.epsilon == FLT_MIN
    assert kernel.sourceNumberOfFeatureVectors == kernel.sourceInputFeatureChannels == NSUIntegerMax
    assert not hasattr(kernel, "computeStatistics")
    assert kernel.primarySourceMatrixOrigin == kernel.secondarySourceMatrixOrigin == MTLOrigin(0, 0, 0)
    assert kernel.resultMatrixOrigin == MTLOrigin(0, 0, 0)
    assert (kernel.batchStart, kernel.batchSize) == (0, NSUIntegerMax)
    assert kernel.gradientThroughStatistics is True


def test_members_are_kept_and_plain() -> None:
    kernel = forward_kernel(
        label="norm",
        options=MPSKernelOptions.verbose | MPSKernelOptions.allowReducedPrecision,
        batchStart=np.int64(3),
        batchSize=7,
        sourceNumberOfFeatureVectors=True,
        epsilon=0.1,
        sourceMatrixOrigin=(1, 2, 0),
    )
    assert (kernel.label, kernel.options) == ("norm", 18)
    assert (kernel.batchStart, kernel.batchSize, kernel.sourceNumberOfFeatureVectors) == (3, 7, 1)
    assert type(kernel.batchStart) is int
    assert type(kernel.sourceNumberOfFeatureVectors) is int
    assert kernel.epsilon == np.float32(0.1)  # a C float
    assert type(kernel.epsilon) is float
    assert kernel.sourceMatrixOrigin == MTLOrigin(x=1, y=2, z=0)


@pytest.mark.parametrize(
    ("member", "value", "error"),
    [
        ("epsilon", "0.1", TypeError),
        ("epsilon", None, TypeError),
        ("epsilon", np.array([1.0, 2.0]), TypeError),
        ("epsilon", 10**400, ValueError),
        ("batchStart", -1, ValueError),
        ("batchStart", 2**64, ValueError),
        ("batchSize", 1.0, TypeError),
        ("sourceNumberOfFeatureVectors", "3", TypeError),
        ("sourceInputFeatureChannels", -5, ValueError),
        ("computeStatistics", "yes", TypeError),
        ("label", 3, TypeError),
        ("options", -1, ValueError),
        ("sourceMatrixOrigin", (1, 2), TypeError),
        ("resultMatrixOrigin", (1, -2, 0), ValueError),
        ("resultMatrixOrigin", 5, TypeError),
    ],
)
def test_members_of_a_wrong_kind_are_refused(member: str, value: object, error: type[Exception]) -> None:
    kernel = forward_kernel()
    before = getattr(kernel, member)
    with pytest.raises(error, match=member):
        setattr(kernel, member, value)
    assert getattr(kernel, member) == before


def test_a_parameter_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match="setNeuronType: parameterB is an int too large for a float"):
        forward_kernel().setNeuronType(MPSCNNNeuronType.tanH, 1, 10**400)


def test_options_are_written_as_in_swift() -> None:
    kernel = forward_kernel()
    kernel.options = [MPSKernelOptions.verbose, MPSKernelOptions.skipAPIValidation]  # type: ignore[assignment]
    assert kernel.options == MPSKernelOptions.verbose | MPSKernelOptions.skipAPIValidation
    kernel.options = []  # type: ignore[assignment]
    assert kernel.options == MPSKernelOptions.none
    assert (MTLOriginMake(1, 2, 0), MTLSizeMake(1, 2, 3)) == (MTLOrigin(1, 2, 0), MTLSize(1, 2, 3))


def test_encode_with_anything_but_an_archiver_is_refused() -> None:
    for kernel in (forward_kernel(), gradient_kernel()):
        with pytest.raises(TypeError, match="encode: with_ must be an NSKeyedArchiver, not int"):
            kernel.encode(with_=5)


def test_only_members_can_be_set() -> None:
    """What is misspelt, or belongs to the other kernel, is not silently kept."""
    with pytest.raises(AttributeError, match="has no member computeStatistics"):
        gradient_kernel().computeStatistics = True
    with pytest.raises(AttributeError, match="has no member epsilom"):
        forward_kernel().epsilom = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="neuronType is a method"):
        forward_kernel().neuronType = 1  # type: ignore[assignment, method-assign]
    with pytest.raises(AttributeError):
        matrix(X).rows = 3  # type: ignore[misc]


def test_device_is_required_and_read_only() -> None:
    with pytest.raises(TypeError, match="device must be an MTLDevice"):
        MPSMatrixBatchNormalization(device=None)
    with pytest.raises(AttributeError):
        forward_kernel().device = DEVICE  # type: ignore[misc]


def same_members(a: Any, b: Any) -> bool:
    names = [setting.name for setting in a._settings]
    neuron = ("neuronType", "neuronParameterA", "neuronParameterB", "neuronParameterC")
    return all(getattr(a, n) == getattr(b, n) for n in names) and all(
        getattr(a, n)() == getattr(b, n)() for n in neuron
    )


@pytest.mark.parametrize("make", [forward_kernel, gradient_kernel])
def test_copying(make: Callable[..., Any]) -> None:
    kernel = make(label="a", epsilon=0.5, batchSize=3, resultMatrixOrigin=(1, 2, 0), neuron=MPSCNNNeuronType.tanH)
    other = MTLDevice()
    copies = [kernel.copy(), kernel.copy(None, device=other), kernel.copy(with_=None), copy.copy(kernel)]
    copies.append(copy.deepcopy(kernel))
    for made in copies:
        assert type(made) is type(kernel)
        assert made is not kernel
        assert same_members(made, kernel)
    assert [made.device for made in copies] == [DEVICE, other, DEVICE, DEVICE, DEVICE]
    copies[0].epsilon = 0.25
    copies[0].setNeuronType(MPSCNNNeuronType.sigmoid)
    assert (kernel.epsilon, kernel.neuronType()) == (0.5, MPSCNNNeuronType.tanH)
    with pytest.raises(TypeError, match="MTLDevice"):
        kernel.copy(device="gpu")


def test_a_kernel_is_captured_when_it_is_encoded() -> None:
    """Changed and encoded again before anything runs."""
    kernel, results = forward_kernel(), [np.empty_like(X) for _ in range(3)]
    buffer = QUEUE.makeCommandBuffer()
    operands = [matrix(X), vector(MEAN), vector(VAR), None, None]
    for k, y in enumerate(results):
        kernel.epsilon = 0.5 * k
        kernel.setNeuronType(MPSCNNNeuronType.linear, 1, k)
        kernel.encode(buffer, *operands, matrix(y))
    buffer.commit()
    kernel.epsilon = 99
    buffer.waitUntilCompleted()
    for k, y in enumerate(results):
        np.testing.assert_allclose(y, (X - MEAN) / np.sqrt(VAR + 0.5 * k) + k, rtol=1e-5, atol=1e-6)


def test_a_change_of_any_member_is_seen_with_the_same_operands() -> None:
    """A kernel remembers its last operands; the results must not show it."""
    x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.zeros((6, 4), np.float32)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    operands = (matrix(x), vector(mean), vector(var), None, None, matrix(y))
    kernel = forward_kernel(epsilon=0)
    changes: list[tuple[str, Any, Any]] = [
        ("epsilon", 3, x / 2),
        ("sourceNumberOfFeatureVectors", 2, np.vstack([x[:2] / 2, 0 * x[2:]])),
        ("sourceInputFeatureChannels", 1, np.pad(x[:2, :1] / 2, ((0, 4), (0, 3)))),
        ("sourceMatrixOrigin", (1, 2, 0), np.pad(x[1:3, 2:3] / 2, ((0, 4), (0, 3)))),
        ("resultMatrixOrigin", (3, 1, 0), np.pad(x[1:3, 2:3] / 2, ((3, 1), (1, 2)))),
        ("computeStatistics", True, np.pad(f32((-1,), (1,)) * 2 / np.sqrt(4 + 3), ((3, 1), (1, 2)))),
        ("batchSize", 0, np.zeros((6, 4))),
    ]
    commit(kernel, *operands)
    np.testing.assert_array_equal(y, x)
    for name, value, expected in changes:
        setattr(kernel, name, value)
        y.fill(0)
        commit(kernel, *operands)
        np.testing.assert_allclose(y, expected, rtol=1e-6, err_msg=name)


def test_options_change_nothing_and_bounds_are_always_checked() -> None:
    kernel = forward_kernel(options=MPSKernelOptions.skipAPIValidation | MPSKernelOptions.allowReducedPrecision)
    plain = forward(forward_kernel(), X, MEAN, VAR, GAMMA, BETA)
    assert_same_bits([forward(kernel, X, MEAN, VAR, GAMMA, BETA)], [plain])
    kernel.resultMatrixOrigin = MTLOrigin(1, 0, 0)
    with pytest.raises(ValueError, match="reach beyond resultMatrix"):
        forward(kernel, X, MEAN, VAR, GAMMA, BETA)
