"""The data and the values of the specification of linear recurrences. Nothing here may import the engine."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def fill(shape: tuple[int, ...], start: int) -> Array:
    """The numbers of the specification: multiples of 1/20 from -9/20 to 9/20."""
    k = np.arange(math.prod(shape))
    return (((7 * k + start) % 19 - 9) / 20).reshape(shape)


CHECK: Final = {
    "y": [-0.18, 0.275, -0.7825, -0.075, 0.192, -0.03875, -0.223875, 0.3475, -0.1808, 0.1325625, -0.6291, -0.0305],
    "da": [
        0.0592, -0.05514375, -0.45855, -0.0078, -0.0612, -0.1643125, -0.26605, -0.0405, -0.1152, -0.0174375,
        -0.12313125, -0.10425,
    ],
    "db": [-0.296, -0.367625, 1.019, 0.078, 0.34, -0.5975, 0.34, 0.54, -0.6, 0.45, 0.55, -0.3],
    "dh0": [-0.0444, -0.1838125, 0.86615, 0.0195],
}  # fmt: skip
