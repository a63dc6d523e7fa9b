"""A short run of fuzz_bnns.py; ``make fuzz`` has the long one, under sanitizers."""

from __future__ import annotations

import inspect
import logging

import fuzz_bnns
import fuzz_bnns_graph
import numpy as np
import pytest

from retrograd import bnns
from support import fuzz_driver
from support.fuzz_bnns_graph import ALWAYS_REFUSED

# They take any filter and have no status. Cases call them without a tally.
DESTROYERS = {"BNNSFilterDestroy", "BNNSDestroyNearestNeighbors", "BNNSDestroyRandomGenerator"}
NO_ARGUMENTS = {"BNNSGraphCompileOptionsMakeDefault"}


@pytest.mark.long
def test_random_and_mutated_descriptors() -> None:
    logging.getLogger("retrograd.bnns").propagate = False
    try:
        tally = fuzz_driver.work(fuzz_bnns.run, 0, 300 * len(fuzz_bnns.CASES))
    finally:
        logging.getLogger("retrograd.bnns").propagate = True
    functions = {name for name in vars(bnns) if name.startswith("BNNS") and inspect.isfunction(getattr(bnns, name))}
    functions -= DESTROYERS | NO_ARGUMENTS
    for name in functions:  # neither all refused nor all accepted: mutation does something, and not too much
        assert tally[f"{name} refused"] > 0, name
        assert (tally[f"{name} done"] > 0) != (name in ALWAYS_REFUSED), name


@pytest.mark.long
def test_random_operations_of_the_builder() -> None:
    tally = fuzz_driver.work(fuzz_bnns_graph.run, 0, 40 * len(fuzz_bnns_graph.OPERATIONS))
    for operation in fuzz_bnns_graph.OPERATIONS:
        refused = operation.name not in fuzz_bnns_graph.NEVER_REFUSED
        assert (tally[f"{operation.name} refused"] > 0) == refused, operation.name
        assert tally[f"{operation.name} done"] > 0, operation.name


def test_the_guards_are_seen() -> None:
    memory = fuzz_bnns.Buffers(np.random.default_rng(0))
    memory.take(4)
    memory.check_guards()
    memory.blocks[0][-1] = 0
    with pytest.raises(fuzz_driver.Broken, match="outside"):
        memory.check_guards()


def test_an_exception_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(random: object, memory: object) -> fuzz_bnns.Case:
        raise KeyError("oops")

    monkeypatch.setattr(fuzz_bnns, "CASES", [raises])
    with pytest.raises(fuzz_driver.Broken, match="repeat it with --seed 5 --count 1"):
        fuzz_driver.work(fuzz_bnns.run, 5, 1)


def test_a_write_between_the_elements_of_a_strided_array_is_seen() -> None:
    memory = fuzz_bnns.Buffers(np.random.default_rng(0))
    array = memory.strided(4)
    array += 1
    memory.check_guards()
    memory.buffers[0][1] += 1
    with pytest.raises(fuzz_driver.Broken, match="between the elements"):
        memory.check_guards()
