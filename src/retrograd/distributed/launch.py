"""How a process was started: alone, or by mpirun as one of several ranks."""

from __future__ import annotations

import functools
import os
from typing import Any

import retrograd as rg

from .ending import announce_end
from .group import Group

__all__ = ["launched_ranks", "world"]

# Set by MPICH and Intel MPI, by Open MPI, and by Slurm's srun with one of these.
_RANK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def launched_ranks() -> int | None:
    """The number of ranks that mpirun has started, or None if this process was started without it."""
    for name in _RANK_COUNTS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None


def world(shards: int) -> Group:
    """The group of all ranks that mpirun started; of this process alone if it was started without mpirun.

    Ranks on one machine that mpirun has not bound to CPUs divide them: the default number of threads becomes a fair
    share, unless RETROGRAD_NUM_THREADS is set.

    All ranks call it. A rank that ends while others wait for it, whatever its exit code, raises an error on those.
    """
    if launched_ranks() is None:
        return Group(shards)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the second, if there is no MPI library
        raise ImportError(
            f"mpirun has started {launched_ranks()} ranks, but mpi4py cannot be used ({error}): "
            "pip install 'retrograd[mpi]', in an environment with an MPI library"
        ) from None
    group = Group(shards, _all_ranks())
    if not os.environ.get("RETROGRAD_NUM_THREADS"):
        _share_cpus(MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED))
    return group


@functools.cache
def _all_ranks() -> Any:
    """A communicator of all ranks, whose messages do not mix with other MPI messages of the program."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if comm.Get_size() > 1:
        announce_end(comm)
    return comm


def _share_cpus(machine: Any) -> None:
    """Set the number of threads to this rank's share of the CPUs; `machine` has the ranks on this machine."""
    mine = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    sharing = machine.allgather(mine).count(mine)
    machine.Free()
    rg.set_num_threads(max(1, rg.get_num_threads() // sharing))
