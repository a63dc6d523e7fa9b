"""Fixtures of the tests of retrograd.jax."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def rj(jax: Any) -> Any:
    import retrograd.jax

    return retrograd.jax


@pytest.fixture
def x64(jax: Any) -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def check_grads(jax: Any) -> Any:
    return importlib.import_module("jax.test_util").check_grads
