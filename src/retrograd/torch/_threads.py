"""The threads on which the engine runs inside a PyTorch program.

PyTorch's OpenMP workers spin for milliseconds after each operation, on the cores that the engine's own threads would
need. So the engine uses PyTorch's workers. Its results are the same, bit for bit.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from ..ops._threads import borrow_team, has_borrowed_team

__all__ = ["get_thread_pool", "set_thread_pool"]

ThreadPool: TypeAlias = Literal["torch", "retrograd"]


def _team() -> tuple[int, int] | None:
    """The addresses by which GNU OpenMP's team of PyTorch is entered, or None: PyTorch was built without it.

    Looked up in the library that PyTorch has loaded. Another one in this process would have threads of its own.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.is_file() or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        parallel, thread_index = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in (parallel, thread_index))
    first, second = (address or 0 for address in addresses)
    return (first, second) if first and second else None


def set_thread_pool(name: ThreadPool) -> None:
    """Run the engine on the threads of PyTorch ("torch") or on its own ("retrograd"). Results are the same."""
    if name == "retrograd":
        borrow_team(0, 0)
    elif name == "torch":
        team = _team()
        if team is None:
            raise RuntimeError("set_thread_pool: this PyTorch has no GNU OpenMP, so its threads cannot be shared")
        borrow_team(*team)
    else:
        raise ValueError(f"set_thread_pool: name is {name!r}, must be 'torch' or 'retrograd'")


def get_thread_pool() -> ThreadPool:
    """Whose threads the engine runs on in this process. A forked child starts with its own."""
    return "torch" if has_borrowed_team() else "retrograd"


def share_threads() -> None:
    """What importing the bridge does: PyTorch's threads, where that is possible."""
    team = _team()
    if team is not None:
        borrow_team(*team)
