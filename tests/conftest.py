"""Fixtures that all tests share, and what a skipped test means.

Tests against other frameworks (PyTorch, JAX, ONNX, Keras, Core ML), on MPI, and of an example with scikit-learn's data
are skipped where those are not installed, so that the suite runs anywhere. Where it must not be silent about that: with
CI set they have to be installed, and with RETROGRAD_NO_SKIPS set any skip at all fails the run.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import retrograd
from retrograd import _core
from retrograd.ops import _threads

# Failed assertions in helpers show their values, as those in tests do.
pytest.register_assert_rewrite("support")
# JAX is compared with on the CPU, and need not look for anything else when it starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No example is too slow: a busy machine is no fault of ours.
settings.register_profile("retrograd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("retrograd")
OPTIONAL = ("torch", "jax", "onnx", "matplotlib", "h5py", "onnxruntime", "sklearn", "mpi4py")
# Slow to import, and only in tests that need them.
INSTALLED = ("keras", "coremltools", "onnxscript", "expecttest", "denoiser", "efficientnet_pytorch")
_skipped: list[str] = []
_modules = 0  # how many were imported when garbage collection was last told to ignore them


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


for _name in ("torch", "jax"):
    _found = importlib.util.find_spec(_name)
    if _found is None or _found.origin is None:  # the folder of its tests, which is on the path
        sys.modules[_name] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") and not hasattr(config, "workerinput"):  # once, not in every process
        for name in OPTIONAL:
            try:
                _import(name)
            except ImportError as error:
                raise pytest.UsageError(f"CI is set, and {name} cannot be imported: {error}") from error
        for name in INSTALLED:
            if importlib.util.find_spec(name) is None:
                raise pytest.UsageError(f"CI is set, and {name} is not installed")


def _freeze() -> None:
    """Exempt modules and collected tests from garbage collection: tests collect often, and each pass took half a
    second. Garbage of tests is still found."""
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


# Tests that take a minute or more, some by themselves on all CPUs. At the end of a run one process would wait for them.
_LONGEST = ("test_levels.py", "test_outside.py", "test_site.py", "test_steps.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> bool:
        return item.get_closest_marker("long") is None or item.path.name not in _LONGEST

    items.sort(key=rank)  # the others keep their order


def pytest_collection_finish() -> None:
    _freeze()


def pytest_runtest_logfinish() -> None:
    if len(sys.modules) > _modules + 100:  # the test has imported PyTorch, JAX or coremltools
        _freeze()


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skipped and os.environ.get("RETROGRAD_NO_SKIPS") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _skipped and os.environ.get("RETROGRAD_NO_SKIPS"):
        terminalreporter.section("RETROGRAD_NO_SKIPS is set, and tests were skipped", red=True)
        for nodeid in _skipped:
            terminalreporter.line(nodeid)


@pytest.fixture(autouse=True)
def _engine_as_it_was() -> Iterator[None]:
    """Whatever a test does to the instruction-set level and the number of threads ends with it."""
    isa, threads, chosen = _core.isa(), retrograd.get_num_threads(), _threads.chosen
    yield
    _core.select_isa(isa)
    _core.set_num_threads(threads)
    _threads.chosen = chosen


@pytest.fixture(autouse=True)
def _bnns_failures_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests make BNNS functions fail on purpose. Those of the warning itself set `seen` back to False."""
    from support.bnns_inside import first_failure  # not above: pytest rewrites assertions of support at its import

    monkeypatch.setattr(first_failure, "seen", True)


# Levels between the lowest and the highest repeat what those check. test_same_bits.py compares all of them.
_LEVELS = _core.isa_levels()


@pytest.fixture(
    params=[pytest.param(level, marks=pytest.mark.long if level in _LEVELS[1:-1] else ()) for level in _LEVELS]
)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level of this machine in turn, in force."""
    level = str(request.param)
    assert _core.select_isa(level)
    return level


def _optional(name: str) -> Any:
    try:
        return _import(name)
    except ImportError:
        return pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="session")
def torch() -> Any:
    module = _optional("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="session")
def jax() -> Any:
    return _optional("jax")
