"""Runs a benchmark at a lower instruction-set level, of retrograd and of the libraries it is compared with."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Final

from ... import _core

__all__ = ["LevelError", "at_level", "restrictions"]

# What makes the other libraries stay at a level. They read these variables when they are loaded. At the scalar level,
# which they do not have, the lowest that they have.
_OTHERS: Final[Mapping[str, Mapping[str, str]]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    },
    "scalar": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "ARMV8" if platform.machine() in ("aarch64", "arm64") else "Nehalem",
        "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2",
    },
}
_OWN: Final = "RETROGRAD_ISA"
_VARIABLES: Final = (_OWN, *_OTHERS["avx2"])
# Inductor finds its compiled code again by its source, not by the level it was compiled for.
_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


class LevelError(Exception):
    """A level at which the benchmark cannot run."""


def restrictions() -> str:
    """The variables that keep retrograd or other libraries at a level, as they are set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name))


@contextlib.contextmanager
def at_level(level: str | None) -> Iterator[None]:
    """Run at this level; None: as the environment says. At the machine's highest level, nothing is restricted."""
    if level is None:
        yield
        return
    levels = _core.isa_levels()
    if level not in levels:
        raise LevelError(f"this machine can run {', '.join(levels)}")
    if "torch" in sys.modules:
        raise LevelError("PyTorch is already loaded, and stays at its level")
    before, selected = {name: os.environ.get(name) for name in (*_VARIABLES, _CACHE)}, _core.isa()
    lowered = {} if level == levels[-1] else {_OWN: level, **_OTHERS.get(level, {})}
    cache = before[_CACHE] or os.path.join(tempfile.gettempdir(), "retrograd-inductor")
    try:
        _set_variables({name: lowered.get(name) for name in _VARIABLES})
        _set_variables({_CACHE: f"{cache}-{level}" if lowered else before[_CACHE]})
        _core.select_isa(level)
        yield
    finally:
        _core.select_isa(selected)
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
