"""No test depends on speed or on the scheduler: clocks and short timeouts are for support/waiting.py."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import waiting
from support.waiting import ends, wait_until

FOLDER = Path(__file__).parent
FUZZERS = "support/fuzz_"  # which may look at the clock to end what hangs
TESTS = sorted(
    name
    for name in (path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))
    if name.rpartition("/")[2].startswith(("test_", "conftest"))
    or (name.startswith("support/") and name != "support/waiting.py" and not name.startswith(FUZZERS))
)
CLOCKS = {"sleep", "time", "monotonic", "perf_counter", "process_time", "time_ns", "monotonic_ns", "perf_counter_ns"}
WAITS = {"wait", "join", "poll", "alarm", "result", "communicate", "select"}


def faults(source: str) -> Iterator[str]:
    """Calls of clocks, and waits that end after a number of seconds instead of PATIENCE."""
    nodes = list(ast.walk(ast.parse(source)))
    clocks = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "sleep(" in node.value:
            yield f"line {node.lineno}: a script that sleeps"
        if not isinstance(node, ast.Call):
            continue
        function, arguments = node.func, node.args
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        of_time = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "time"
        if (of_time and name in CLOCKS) or (isinstance(function, ast.Name) and name in clocks):
            yield f"line {node.lineno}: {name}()"
        if name in WAITS and isinstance(function, ast.Attribute) and arguments and is_number(arguments[-1]):
            yield f"line {node.lineno}: {name}({ast.unparse(arguments[-1])})"
        for keyword in node.keywords:
            if keyword.arg == "timeout" and is_number(keyword.value):
                yield f"line {node.lineno}: timeout={ast.unparse(keyword.value)}"


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value > 0


@pytest.mark.parametrize("name", TESTS)
def test_tests_wait_for_events(name: str) -> None:
    found = list(faults((FOLDER / name).read_text(encoding="utf-8")))
    assert name == "test_waiting.py" or not found, "wait for an event (support/waiting.py), or at least PATIENCE"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import time; time.sleep(0.1)", 1),
        ("from time import perf_counter as now; now()", 1),
        ("thread.join(10)", 1),
        ("event.wait(timeout=2.5)", 1),
        ("run(['x'], timeout=60)", 1),
        ("run(['python', '-c', 'import time; time.sleep(1)'])", 1),
        ("thread.join(); event.wait(PATIENCE); run(['x'], timeout=PATIENCE); ', '.join(names); mapping.get(key)", 0),
        ("monkeypatch.setattr(runs.time, 'monotonic', lambda: now[0])", 0),
    ],
)
def test_the_rule_sees(source: str, count: int) -> None:
    assert len(list(faults(source))) == count


def test_hypothesis_has_no_clock() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_what_never_happens_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 0.01)
    with pytest.raises(AssertionError, match="the sky has not fallen"):
        wait_until(lambda: False, "the sky has not fallen")
    over = threading.Event()
    with pytest.raises(AssertionError, match="hangs"):
        ends(over.wait)
    over.set()
