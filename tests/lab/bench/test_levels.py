"""A benchmark at a lower level: retrograd and the libraries it is compared with, restored afterwards."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from retrograd import _core
from retrograd.lab import bench
from retrograd.lab.bench import levels

LEVELS = _core.isa_levels()


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in (*levels._VARIABLES, "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("level", LEVELS)
def test_all_libraries_are_at_the_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _core.isa()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "something")
    with bench.at_level(level):
        assert _core.isa() == level
        if level == LEVELS[-1]:
            assert bench.restrictions() == ""  # the highest of each library
        else:
            assert os.environ["RETROGRAD_ISA"] == level  # of child processes
            assert os.environ["ATEN_CPU_CAPABILITY"] == {"scalar": "default"}.get(level, level)
            named = {part.partition("=")[0] for part in bench.restrictions().split()}
            assert named == set(levels._VARIABLES)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith(f"-{level}")  # its code is for one level
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert _core.isa() == before
    assert bench.restrictions() == "ATEN_CPU_CAPABILITY=something"


def test_every_lower_level_has_settings() -> None:
    """Those of one level name the same variables as those of any other."""
    assert set(LEVELS[:-1]) <= set(levels._OTHERS)
    assert {frozenset(settings) for settings in levels._OTHERS.values()} == {frozenset(levels._VARIABLES[1:])}


def test_restored_after_an_error() -> None:
    before = _core.isa()
    with pytest.raises(ZeroDivisionError), bench.at_level("scalar"):
        raise ZeroDivisionError
    assert (_core.isa(), bench.restrictions()) == (before, "")


def test_without_a_level_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with bench.at_level(None):
        assert bench.restrictions() == "ONEDNN_MAX_CPU_ISA=AVX2"


def test_levels_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bench.LevelError, match="this machine can run scalar"), bench.at_level("sse9"):
        pass
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with pytest.raises(bench.LevelError, match="PyTorch is already loaded"), bench.at_level("scalar"):
        pass
