"""retrograd.mps: descriptors, matrices and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.mps import (
    MPSCNNNeuronType,
    MPSDataType,
    MPSMatrix,
    MPSMatrixDescriptor,
    MPSTemporaryMatrix,
    MPSTemporaryVector,
    MPSVector,
    MPSVectorDescriptor,
)
from support.arrays import assert_same_bits
from support.mps import (
    BETA,
    DEVICE,
    EXAMPLE_C_DY,
    GAMMA,
    MEAN,
    QUEUE,
    VAR,
    X,
    forward,
    forward_kernel,
    forward_operands,
    gradient,
    gradient_kernel,
    matrix,
    vector,
)


def test_data_types_have_apples_values() -> None:
    assert MPSDataType.float32 == 0x10000020
    assert MPSDataType.float16 == 0x10000010
    assert [MPSDataType.int8, MPSDataType.uInt64, MPSDataType.unorm8] == [0x20000008, 64, 0x40000008]
    assert [kind.value for kind in MPSCNNNeuronType] == list(range(17))


@pytest.mark.parametrize(
    ("columns", "data_type", "expected"),
    [
        (0, MPSDataType.float32, 0),
        (1, MPSDataType.float32, 4),
        (1, MPSDataType.float16, 2),
        (2, MPSDataType.float32, 16),
        (5, MPSDataType.float32, 32),
        (8, MPSDataType.float16, 16),
        (9, MPSDataType.float16, 32),
        (3, MPSDataType.int8, 4),
        (5, MPSDataType.uInt64, 64),
    ],
)
def test_recommended_strides(columns: int, data_type: MPSDataType, expected: int) -> None:
    assert MPSMatrixDescriptor.rowBytes(forColumns=columns, dataType=data_type) == expected
    assert MPSVectorDescriptor.vectorBytes(forLength=columns, dataType=data_type) == expected


def test_matrix_descriptor() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=16, dataType=MPSDataType.float32)
    assert (descriptor.rows, descriptor.columns, descriptor.rowBytes, descriptor.matrices) == (4, 3, 16, 1)
    assert descriptor.matrixBytes == 64
    descriptor.rows, descriptor.rowBytes = 5, 32
    assert descriptor.matrixBytes == 64  # as it was made
    assert MPSMatrix(device=DEVICE, descriptor=descriptor).rows == 5
    descriptor.dataType = MPSDataType.float16
    assert descriptor.dataType is MPSDataType.float16
    old = MPSMatrixDescriptor(dimensions=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    assert (old.rows, old.matrixBytes) == (4, 48)
    several = MPSMatrixDescriptor(
        rows=4, columns=3, matrices=2, rowBytes=16, matrixBytes=80, dataType=MPSDataType.float32
    )
    assert (several.matrices, several.matrixBytes) == (2, 80)
    for name in ("matrices", "matrixBytes"):
        with pytest.raises(AttributeError):
            setattr(several, name, 1)


def test_vector_descriptor() -> None:
    descriptor = MPSVectorDescriptor(length=3, dataType=MPSDataType.float32)
    assert (descriptor.length, descriptor.vectors, descriptor.vectorBytes) == (3, 1, 16)
    several = MPSVectorDescriptor(length=3, vectors=2, vectorBytes=12, dataType=MPSDataType.float32)
    assert (several.vectors, several.vectorBytes) == (2, 12)
    several.length = 2
    assert several.length == 2
    for name in ("vectors", "vectorBytes"):
        with pytest.raises(AttributeError):
            setattr(several, name, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rowBytes": 8}, "rowBytes is 8, but 3 columns need 12"),
        ({"rowBytes": 14}, "rowBytes is 14, not a multiple of the element's 4 bytes"),
        ({"matrices": 2, "matrixBytes": 50}, "matrixBytes is 50, not a multiple of rowBytes, 12"),
        ({"matrices": 2, "matrixBytes": 36}, "matrixBytes is 36, but 4 rows need 48"),
        ({"matrixBytes": 50}, "not a multiple"),
        ({"matrices": 0}, "matrices is 0"),
        ({"dataType": 0}, "dataType is 0x0"),
        ({"dataType": MPSDataType.unorm1}, "not an element type"),
        ({"dataType": 0x90000010}, "not an element type"),
        ({"rows": -1}, "rows is -1"),
    ],
)
def test_matrix_descriptor_refusals(changed: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {"rows": 4, "columns": 3, "rowBytes": 12, "dataType": MPSDataType.float32} | changed
    with pytest.raises(ValueError, match=message):
        MPSMatrixDescriptor(**arguments)


@pytest.mark.parametrize("place", ["buffer", "device"])
@pytest.mark.parametrize(
    "descriptor",
    [
        MPSMatrixDescriptor(rows=4, columns=3, rowBytes=16, matrixBytes=2**64 - 16, dataType=MPSDataType.float32),
        MPSMatrixDescriptor(rows=2**64 - 1, columns=0, rowBytes=0, dataType=MPSDataType.float32),
        MPSMatrixDescriptor(rows=2**40, columns=0, matrices=2**40, rowBytes=0, dataType=MPSDataType.float32),
        MPSVectorDescriptor(length=3, vectorBytes=2**64 - 4, dataType=MPSDataType.float32),
    ],
)
def test_what_cannot_be_addressed_is_refused(descriptor: Any, place: str) -> None:
    memory = {"buffer": DEVICE.makeBuffer(length=64)} if place == "buffer" else {"device": DEVICE}
    make: Any = MPSMatrix if isinstance(descriptor, MPSMatrixDescriptor) else MPSVector
    with pytest.raises(ValueError, match=r"descriptor has extents .* and strides .*, more than the"):
        make(descriptor=descriptor, **memory)


def test_row_bytes_has_an_older_spelling() -> None:
    row_bytes: Any = MPSMatrixDescriptor.rowBytes
    assert row_bytes(fromColumns=5, dataType=MPSDataType.float32) == 32
    for columns in ({}, {"forColumns": 5, "fromColumns": 5}):
        with pytest.raises(TypeError, match="olumns"):
            row_bytes(dataType=MPSDataType.float32, **columns)


def test_vector_descriptor_refusals() -> None:
    for changed in ({"vectorBytes": 8}, {"vectorBytes": 14}, {"vectors": 0}):
        arguments: dict[str, Any] = {"length": 3, "vectors": 2, "vectorBytes": 12} | changed
        with pytest.raises(ValueError, match="MPSVectorDescriptor: vector"):
            MPSVectorDescriptor(**arguments, dataType=MPSDataType.float32)


def test_elements_lie_where_the_descriptor_says() -> None:
    memory = np.arange(60, dtype=np.float32)
    buffer = DEVICE.makeBuffer(bytesNoCopy=memory)
    descriptor = MPSMatrixDescriptor(
        rows=3, columns=2, matrices=2, rowBytes=20, matrixBytes=80, dataType=MPSDataType.float32
    )
    made = MPSMatrix(buffer=buffer, offset=8, descriptor=descriptor)
    assert (made.rows, made.columns, made.matrices, made.offset) == (3, 2, 2, 8)
    assert (made.rowBytes, made.matrixBytes, made.dataType, made.data) == (20, 80, MPSDataType.float32, buffer)
    assert made.device is DEVICE
    assert made.resourceSize() == 80 + 2 * 20 + 2 * 4
    element = made._elements()
    for k, i, j in np.ndindex(2, 3, 2):
        assert element[k, i, j] == memory[(8 + k * 80 + i * 20 + j * 4) // 4]
    several = MPSVectorDescriptor(length=3, vectors=4, vectorBytes=20, dataType=MPSDataType.float32)
    vectors = MPSVector(buffer=buffer, offset=4, descriptor=several)
    assert (vectors.length, vectors.vectors, vectors.vectorBytes, vectors.offset) == (3, 4, 20, 4)
    assert vectors._elements()[2, 1] == memory[(4 + 2 * 20 + 4) // 4]


def test_the_buffer_must_hold_the_last_element_and_no_more() -> None:
    """offset + (matrices - 1) * matrixBytes + (rows - 1) * rowBytes + columns * size: not the last row's padding."""
    descriptor = MPSMatrixDescriptor(
        rows=3, columns=2, matrices=2, rowBytes=20, matrixBytes=80, dataType=MPSDataType.float32
    )
    needed = 8 + 80 + 40 + 8
    MPSMatrix(buffer=DEVICE.makeBuffer(length=needed), offset=8, descriptor=descriptor)
    with pytest.raises(ValueError, match="buffer has 135 bytes, but the descriptor needs 136"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=needed - 1), offset=8, descriptor=descriptor)
    vectors = MPSVectorDescriptor(length=3, vectors=4, vectorBytes=20, dataType=MPSDataType.float32)
    MPSVector(buffer=DEVICE.makeBuffer(length=72), descriptor=vectors)
    with pytest.raises(ValueError, match="buffer has 71 bytes, but the descriptor needs 72"):
        MPSVector(buffer=DEVICE.makeBuffer(length=71), descriptor=vectors)
    huge = MPSMatrixDescriptor(rows=2**62, columns=2, rowBytes=2**40, dataType=MPSDataType.float32)
    with pytest.raises(ValueError, match="but the descriptor needs"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=64), descriptor=huge)


def test_elements_must_be_aligned() -> None:
    descriptor = MPSMatrixDescriptor(rows=2, columns=2, rowBytes=8, dataType=MPSDataType.float32)
    with pytest.raises(ValueError, match="offset is 2"):
        MPSMatrix(buffer=DEVICE.makeBuffer(length=64), offset=2, descriptor=descriptor)


def test_a_matrix_without_a_buffer_gets_one_when_it_is_used() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    result = MPSMatrix(device=DEVICE, descriptor=descriptor)
    assert result._buffer is None
    forward_kernel().encode(**(operands := forward_operands(resultMatrix=result)))
    operands["commandBuffer"].commit()
    operands["commandBuffer"].waitUntilCompleted()
    got = np.frombuffer(result.data.contents(), np.float32).reshape(4, 3)
    assert_same_bits([got], [forward(forward_kernel(), X, MEAN, VAR, GAMMA, BETA)])
    result.synchronize(on=operands["commandBuffer"])


def test_a_matrix_needs_a_buffer_or_a_device() -> None:
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    with pytest.raises(TypeError):
        MPSMatrix()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="give a buffer or a device"):
        MPSMatrix(descriptor=descriptor)
    with pytest.raises(TypeError, match="buffer must be an MTLBuffer, not bytearray"):
        MPSMatrix(buffer=bytearray(48), descriptor=descriptor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MPSVectorDescriptor"):
        MPSVector(device=DEVICE, descriptor=descriptor)  # type: ignore[arg-type]


def test_temporary_objects_count_their_readings() -> None:
    buffer = QUEUE.makeCommandBuffer()
    descriptor = MPSMatrixDescriptor(rows=4, columns=3, rowBytes=12, dataType=MPSDataType.float32)
    between = MPSTemporaryMatrix(commandBuffer=buffer, matrixDescriptor=descriptor)
    statistics = MPSVectorDescriptor(length=3, dataType=MPSDataType.float32)
    mean, var = (MPSTemporaryVector(commandBuffer=buffer, descriptor=statistics) for _ in range(2))
    assert (between.readCount, mean.readCount) == (1, 1)
    mean.readCount = var.readCount = 2
    operands = forward_operands(
        commandBuffer=buffer, meanVector=mean, varianceVector=var, gammaVector=None, betaVector=None
    )
    kernel = forward_kernel(epsilon=0.01, computeStatistics=True)
    kernel.encode(**operands | {"resultMatrix": between})
    assert (between.readCount, mean.readCount) == (1, 2)  # written, not read
    dx, dgamma, y = np.empty_like(X), np.empty(3, np.float32), np.empty_like(X)
    gradient_kernel(epsilon=0.01).encode(
        buffer, matrix(EXAMPLE_C_DY), matrix(X), mean, var, None, None, matrix(dx), vector(dgamma)
    )
    assert (mean.readCount, var.readCount) == (1, 1)
    plain = forward_kernel(epsilon=0)
    plain.encode(buffer, between, mean, var, None, None, matrix(y))
    assert (between.readCount, mean.readCount, var.readCount) == (0, 0, 0)
    with pytest.raises(ValueError, match="readCount is 0, so the contents are gone"):
        plain.encode(buffer, between, vector(MEAN), vector(VAR), None, None, matrix(y))
    with pytest.raises(ValueError, match="readCount is 0"):
        _ = between.data
    buffer.commit()
    buffer.waitUntilCompleted()
    assert buffer.error is None
    one, two = np.empty(3, np.float32), np.empty(3, np.float32)
    first = forward(kernel, X, one, two, None, None)
    assert_same_bits([dx], [gradient(gradient_kernel(epsilon=0.01), EXAMPLE_C_DY, X, one, two, None, None).dx])
    assert_same_bits([y], [forward(plain, first, one, two, None, None)])
    MPSTemporaryMatrix.prefetchStorage(buffer, [descriptor])
    MPSTemporaryVector.prefetchStorage(buffer, [statistics])
