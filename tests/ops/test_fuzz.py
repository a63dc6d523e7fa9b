"""A short run of fuzz_arrays.py, and that it sees what it is there to see; ``make fuzz`` has the long one."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from typing import Any

import fuzz_arrays
import numpy as np
import pytest

import retrograd as rg
from support import fuzz_calls, fuzz_driver, fuzz_oracle

Array = np.ndarray[Any, Any]


@pytest.mark.long
def test_random_and_mutated_calls() -> None:
    tally = fuzz_driver.work(fuzz_arrays.run, 0, 8000)
    for name in fuzz_arrays.NAMES:  # neither all refused nor all accepted: mutation does something, and not too much
        assert tally[f"{name} refused"] > 0, name
        assert tally[f"{name} done"] > 0, name
    for name in fuzz_oracle.ORACLES:
        assert tally[f"{name} compared"] > 0, name


def test_every_function_has_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_arrays.check_every_function_has_a_generator()
    monkeypatch.setattr(rg, "__all__", [*rg.__all__, "new_function"])
    monkeypatch.setattr(rg, "new_function", lambda x: x, raising=False)
    with pytest.raises(fuzz_driver.Broken, match="new_function"):
        fuzz_arrays.check_every_function_has_a_generator()


def call(function: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """A case of activation_forward, with this function in its place."""
    random = np.random.default_rng(0)
    make = fuzz_calls.Maker(random, fuzz_calls.Memory(random))
    monkeypatch.setattr(make, "chance", lambda share=0.5: True)  # compared with the oracle, and run again
    values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    x, out = make.memory.place(values, "S"), make.memory.place(values, "X")
    arguments = {"x": x, "activation": rg.Activation("relu"), "out": out, "num_threads": 2, **more}
    monkeypatch.setattr(rg, "activation_forward", function)
    fuzz_arrays.one_case("activation_forward", make, arguments, Counter())


def base(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_what_is_right_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    call(rg.activation_forward, monkeypatch)


@pytest.mark.parametrize("place", [0, 70, -1])  # before, between the elements of a strided array, after
@pytest.mark.parametrize("name", ["x", "out"])
def test_a_write_outside_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> None:
    right = rg.activation_forward

    def wrong(**arguments: Any) -> Array:
        y = right(**arguments)
        array = arguments[name]
        block = base(array)
        counts = np.zeros(block.size, np.int64)
        fuzz_calls.Memory(np.random.default_rng(0)).count_bytes(array, counts, block)
        gaps = np.flatnonzero(counts == 0)
        block[gaps[np.searchsorted(gaps, place)] if place > 0 else place] ^= 1
        return y

    with pytest.raises(fuzz_driver.Broken, match="has changed byte"):
        call(wrong, monkeypatch)


def test_a_changed_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rg.activation_forward

    def wrong(**arguments: Any) -> Array:
        y = right(**arguments)
        arguments["x"][1, 2] = 7
        return y

    with pytest.raises(fuzz_driver.Broken, match="has changed byte"):
        call(wrong, monkeypatch)


def test_a_write_before_a_refusal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**arguments: Any) -> Array:
        arguments["out"][0, 0] = 7
        raise ValueError("activation_forward: too late")

    with pytest.raises(fuzz_driver.Broken, match=r"too late.* has changed byte"):
        call(wrong, monkeypatch)


def test_another_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**arguments: Any) -> Array:
        raise AssertionError("inside")

    with pytest.raises(AssertionError, match="inside"):
        call(wrong, monkeypatch)


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rg.activation_forward

    def wrong(**arguments: Any) -> Array:
        y = right(**arguments)
        y[2, 3] *= 1.001
        return y

    with pytest.raises(fuzz_driver.Broken, match="tolerances from the oracle"):
        call(wrong, monkeypatch)


def test_bits_that_depend_on_the_threads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = rg.activation_forward, []

    def wrong(**arguments: Any) -> Array:
        y = right(**arguments)
        calls.append(1)
        y[2, 3] = np.nextafter(y[2, 3], np.float32(len(calls)))
        return y

    with pytest.raises(fuzz_driver.Broken, match="depends on the number of threads"):
        call(wrong, monkeypatch)


def test_a_masked_array_or_a_result_that_overlaps_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((3, 4), np.float32)
    with pytest.raises(fuzz_driver.Broken, match="masked"):
        call(lambda **arguments: values, monkeypatch, x=np.ma.masked_array(values, values == 0))
    random = np.random.default_rng(0)
    memory = fuzz_calls.Memory(random)
    block = memory.place(np.zeros(12, np.float32), "C")
    overlapping = np.lib.stride_tricks.as_strided(block, (3, 4), (4, 4))
    assert memory.writable([overlapping])[1] == "a result that overlaps itself"
    assert memory.writable([block[:5], block[4:]])[1] == "two results that overlap"
    assert memory.writable([block[:5], block[5:]])[1] == ""


def crashes(seed: int, tally: Counter[str]) -> None:
    tally["cases"] += 1
    if seed == 37:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(seed: int, tally: Counter[str]) -> None:
    if seed == 77:
        signal.pause()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_process_that_dies_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz_driver.work_in_processes(crashes, 38, 100, 3) == {"cases": 100}
    with pytest.raises(fuzz_driver.Broken, match="ended with -9; repeat it with --seed 37 --count 1"):
        fuzz_driver.work_in_processes(crashes, 0, 100, 2)
    monkeypatch.setattr(fuzz_driver, "STUCK", 2.0)
    with pytest.raises(fuzz_driver.Broken, match="not ended after 2 seconds; repeat it with --seed 77 --count 1"):
        fuzz_driver.work_in_processes(hangs, 0, 100, 2)
