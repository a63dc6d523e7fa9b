"""Queries of the size of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import bnns

Descriptor = bnns.BNNSNDArrayDescriptor
F32 = bnns.BNNSDataTypeFloat32


def test_data_size_in_bytes() -> None:
    for array, size in (
        (np.zeros(7, np.float32), 28),
        (np.zeros((2, 3), np.int8), 6),
        (np.zeros((2, 3, 4), np.float16), 48),
        (np.zeros((6, 10), np.float32)[:, ::2], 4 * (5 * 10 + 4 * 2 + 1)),  # to the last element
    ):
        assert bnns.BNNSNDArrayGetDataSize(Descriptor.from_array(array)) == size
    assert bnns.last_error() is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"data": None}, "array.data is NULL"),
        ({"data_type": bnns.BNNSDataTypeInt4}, "data_type is BNNSDataTypeInt4"),
        ({"data_type": bnns.BNNSDataTypeIndexed8}, "data_type is BNNSDataTypeIndexed8"),
        ({"layout": 99}, "layout is 0x63"),
        ({"layout": bnns.BNNSDataLayoutFullyConnectedSparse}, "is opaque"),
        ({"size": (0,)}, "an extent must be at least 1"),
    ],
)
def test_data_size_that_is_not_known(fields: dict[str, Any], reason: str) -> None:
    given = {"layout": bnns.BNNSDataLayoutVector, "size": (7,), "data": np.zeros(7, np.float32), "data_type": F32}
    assert bnns.BNNSNDArrayGetDataSize(Descriptor(**{**given, **fields})) == 0
    assert reason in (bnns.last_error() or "")
    assert bnns.BNNSNDArrayGetDataSize(None) == 0  # type: ignore[arg-type]


def test_rank_of_every_layout() -> None:
    layouts = {n: v for n, v in vars(bnns).items() if n.startswith("BNNSDataLayout") and isinstance(v, int)}
    for name, value in layouts.items():
        assert bnns.BNNSDataLayoutGetRank(value) == value >> 16, name
    assert bnns.BNNSDataLayoutGetRank(bnns.BNNSDataLayoutMHA_DHK) == 3
    for strange in (0, 1, 0x30004, 0x90000, -1, None, 65536.0):
        assert bnns.BNNSDataLayoutGetRank(strange) == bnns.SIZE_MAX  # type: ignore[arg-type]
        assert "which is not a BNNSDataLayout" in (bnns.last_error() or "")


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], data_type: int = F32, **fields: Any) -> bnns.BNNSTensor:
    return bnns.BNNSTensor(data_type=data_type, rank=len(shape), shape=shape, stride=stride, **fields)


@pytest.mark.parametrize(
    ("shape", "stride", "data_type", "size"),
    [
        ((2, 3), (3, 1), F32, 24),
        ((2, 3), (10, 1), F32, 52),
        ((2, 3), (0, 1), F32, 12),  # a stride of 0 repeats
        ((2, 3), (0, 0), F32, 4),
        ((), (), bnns.BNNSDataTypeFloat16, 2),
        ((2, 0), (3, 1), F32, 0),
        ((5,), (1,), bnns.BNNSDataTypeInt4, 3),  # packed
        ((5,), (1,), bnns.BNNSDataTypeUInt3, 2),
        ((7,), (1,), bnns.BNNSDataTypeBFloat16, 14),
        ((7,), (1,), bnns.BNNSDataTypeBoolean, 7),
        (tuple(range(1, 9)), (40320, 20160, 6720, 1680, 336, 56, 8, 1), F32, 161280),
    ],
)
def test_allocation_size_of_a_tensor(shape: Any, stride: Any, data_type: int, size: int) -> None:
    assert bnns.BNNSTensorGetAllocationSize(tensor(shape, stride, data_type)) == size


def test_allocation_size_that_is_not_known() -> None:
    cases = [
        (tensor((2, -1), (3, 1)), "shape[1] is -1: the extent is dynamic"),
        (tensor((2, 3), (-3, 1)), "stride[0] is -3, must be at least 0"),
        (tensor((2,), (1,), 0x10000), "data_type is"),
        (bnns.BNNSTensor(data_type=F32, rank=9), "rank is 9, must be from 0 to 8"),
        (bnns.BNNSTensor(data_type=F32, rank="x"), "rank is 'x', must be an integer"),
        (tensor((2**62, 2**62), (2**62, 1)), "more than a size_t can hold"),
        (None, "tensor is of type NoneType"),
    ]
    for one, reason in cases:
        assert bnns.BNNSTensorGetAllocationSize(one) == bnns.SIZE_MAX  # type: ignore[arg-type]
        assert reason in (bnns.last_error() or "")


def test_image_of_a_tensor() -> None:
    data, label = np.zeros(6, np.float32), b"weights\0"
    one = tensor((2, -3), (3, 1), data=data, data_size_in_bytes=24, name=label)
    image = one.to_bytes()
    assert len(image) == 160
    assert image[:16] == bytes([0x20, 0, 1, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    assert image[16:24] == (-3).to_bytes(8, "little", signed=True)
    address = int.from_bytes(image[136:144], "little")
    assert address == data.ctypes.data
    back = bnns.BNNSTensor.from_bytes(image, {address: data, int.from_bytes(image[152:], "little"): label})
    assert back == one
    assert back.shape[:2] == (2, -3)
    back.shape[1] = 3
    back.stride = (4, 1)
    assert repr(back).startswith("BNNSTensor(data_type=BNNSDataTypeFloat32, rank=2, shape=(2, 3), stride=(4, 1)")
    with pytest.raises(ValueError, match="shape has 8 entries, not 9"):
        back.shape = range(9)
