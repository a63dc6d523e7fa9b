"""The type of arrays, and the engine's dtypes: the one object of each, because hot code compares them by identity."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ._errors import ArgumentTypeError

Array: TypeAlias = npt.NDArray[Any]
# In results: None where a gradient was not requested. `Array | None` would make callers check what they asked for.
MaybeArray: TypeAlias = Array | Any
Statistics: TypeAlias = npt.NDArray[np.float64]

BYTE: Final = np.dtype(np.uint8)
INT16: Final = np.dtype(np.int16)
INT32: Final = np.dtype(np.int32)
INT64: Final = np.dtype(np.int64)
FLOAT16: Final = np.dtype(np.float16)
FLOAT32: Final = np.dtype(np.float32)
FLOAT64: Final = np.dtype(np.float64)
FLOATS: Final = (FLOAT32, FLOAT64)  # what most functions compute in, in the order of the engine's codes

# The engine's dtype codes. bfloat16 is recognised by name, so that ml_dtypes need not be imported.
_CODES: Final = {FLOAT32: 0, FLOAT64: 1, FLOAT16: 2}
_BFLOAT16_CODE: Final = 3


def dtype_code(name: str, dtype: np.dtype[Any]) -> int:
    """The engine's code of a dtype in which data may be stored."""
    code = _CODES.get(dtype)
    if code is not None:
        return code
    check_native(name, dtype)
    if dtype.name == "bfloat16" and dtype.itemsize == 2:
        return _BFLOAT16_CODE
    raise ArgumentTypeError(name, "{argument} has dtype {}; it must be float32, float64, float16 or bfloat16", dtype)


def check_native(name: str, dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:
        raise ArgumentTypeError(
            name,
            "{argument} is in non-native byte order ({}); convert it with "
            "{argument}.astype({argument}.dtype.newbyteorder('='))",
            dtype.str,
        )


def is_float64(name: str, array: Array) -> bool:
    """Whether the array is float64; raises unless it is float32 or float64."""
    dtype = array.dtype
    if dtype is FLOAT32:
        return False
    if dtype is FLOAT64:
        return True
    if dtype in FLOATS:
        return dtype == FLOAT64
    if dtype.newbyteorder() in FLOATS:
        check_native(name, dtype)
    raise ArgumentTypeError(name, "{argument} has dtype {}; it must be float32 or float64", dtype)
