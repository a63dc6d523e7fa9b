"""A short run of fuzz_mps.py; ``make fuzz`` has the long one, under sanitizers."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import fuzz_mps
import pytest

from retrograd import mps
from support import fuzz_driver


@pytest.mark.long
def test_random_and_mutated_kernels_buffers_and_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("retrograd.mps"), "propagate", False)
    tally = fuzz_driver.work(fuzz_mps.run, 0, 4000)
    names = {name.rsplit(" ", 1)[0] for name in tally if name.endswith((" done", " refused"))}
    assert {"MPSMatrixBatchNormalization.encode", "MPSMatrixBatchNormalizationGradient.encode"} <= names
    assert {"MPSRNNMatrixTrainingLayer", "encodeForwardSequence", "encodeGradientSequence"} <= names
    for name in names:  # neither all refused nor all accepted: mutation does something, and not too much
        assert tally[f"{name} refused"] > 0, name
        assert tally[f"{name} done"] > 0, name
    assert tally["compared with the oracle"] > 500
    assert tally["a recurrent layer compared with the oracle"] > 200


def _until_found(reason: str) -> None:
    with pytest.raises(fuzz_driver.Broken, match=reason):
        fuzz_driver.work(fuzz_mps.run, 0, 400)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuzz_mps.oracle

    def shifted(*arguments: Any) -> Any:
        expected = real(*arguments)
        return None if expected is None else {k: values + 0.5 for k, values in expected.items()}

    monkeypatch.setattr(fuzz_mps, "oracle", shifted)
    _until_found("expected")


def test_a_wrong_value_of_a_recurrent_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuzz_mps.recurrent_oracle

    def shifted(*arguments: Any) -> Any:
        expected = real(*arguments)
        if expected is not None:
            expected["dweights"][-1] = expected["dweights"][-1] + 0.5
        return expected

    monkeypatch.setattr(fuzz_mps, "recurrent_oracle", shifted)
    _until_found("dweights is")


def test_an_exception_that_is_not_documented_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(mps.MPSMatrixBatchNormalization, "encode", raises)
    _until_found(r"oops(.|\n)*repeat it with --seed \d+ --count 1")


def test_a_write_outside_of_a_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuzz_mps.check_results

    def scribbled(made: Any, storages: list[Any], *rest: Any) -> None:
        result = storages[6 if len(storages) == 9 else 5]
        result._elements()[..., -1] += 1  # the last column is not always in the window
        real(made, storages, *rest)

    monkeypatch.setattr(fuzz_mps, "check_results", scribbled)
    monkeypatch.setattr(fuzz_mps, "oracle", lambda *_: None)
    monkeypatch.setattr(fuzz_mps, "KINDS", [fuzz_mps.kernel])
    _until_found("outside of its window")


def test_each_case_can_be_repeated() -> None:
    first: Counter[str] = Counter()
    second: Counter[str] = Counter()
    for tally in (first, second):
        for seed in range(40):
            fuzz_mps.run(seed, tally)
    assert first == second
