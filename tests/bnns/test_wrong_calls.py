"""Calls with missing or unknown arguments, and arrays of float64: errors name the function and say what to pass."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS

X = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            lambda: bnns.BNNSFilterApply(None, X),  # type: ignore[call-arg]
            "BNNSFilterApply: out is missing; it takes filter, in_, out",
        ),
        (
            lambda: bnns.BNNSFilterApply(out=X),  # type: ignore[call-arg]
            "BNNSFilterApply: filter, in_ are missing; it takes filter, in_, out",
        ),
        (
            lambda: bnns.BNNSFilterApply(None, X, X, X),  # type: ignore[call-arg]
            "BNNSFilterApply: too many positional arguments; it takes filter, in_, out",
        ),
        (
            lambda: bnns.BNNSFilterApply(None, X, X, size=4),  # type: ignore[call-arg]
            "BNNSFilterApply: got an unexpected keyword argument 'size'; it takes filter, in_, out",
        ),
        (
            lambda: BNNS.NormalizationLayer(input=None),  # type: ignore[call-arg, arg-type]
            "missing 3 required keyword-only arguments: 'type', 'output', and 'epsilon'",
        ),
    ],
)
def test_missing_and_unknown_arguments_are_named(line: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        line()


@pytest.mark.parametrize(
    "line",
    [
        lambda: bnns.BNNSNDArrayDescriptor.from_array(np.zeros(4)),
        lambda: bnns.BNNSNDArrayDescriptor.allocateUninitialized(scalarType=np.float64, shape=BNNS.Shape.vector(4)),
        lambda: bnns.BNNSNDArrayDescriptor.allocate(initializingFrom=np.zeros(4), shape=BNNS.Shape.vector(4)),
    ],
)
def test_float64_has_no_descriptor(line: Callable[[], object]) -> None:
    message = "there is no BNNSDataType for elements of type float64; BNNS computes in float32: pass array.astype("
    with pytest.raises(ValueError, match=re.escape(message)):
        line()
