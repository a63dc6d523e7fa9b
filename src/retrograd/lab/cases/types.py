"""Types shared by cases and bounds."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Float64s: TypeAlias = npt.NDArray[np.float64]
Kind: TypeAlias = Literal["batch", "instance", "layer", "group"]
Layout: TypeAlias = Literal["first", "last"]
Peephole: TypeAlias = Literal["none", "diagonal", "full"]
RecurrentMask: TypeAlias = Literal["none", "tied", "gates", "steps", "full"]
WeightsForm: TypeAlias = Literal["concatenated", "stacked", "gates"]
NamedActivation: TypeAlias = tuple[str, float, float]  # name, alpha, beta
