"""What holds for all tests of the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """Empty sets, NaN and Inf must pass through the oracle in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
