"""Programs that tests run."""

from __future__ import annotations

import os
import shutil

import pytest


def tool(*names: str) -> str:
    for name in names:
        if name and shutil.which(name):
            return name
    reason = f"none of {', '.join(filter(None, names))} is installed"
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and {reason}")
    return pytest.skip(reason)
