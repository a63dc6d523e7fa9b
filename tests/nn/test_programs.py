"""Programs of nested arguments: what the last program takes runs at once, anything else is looked up again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn
from retrograd.nn.program import Programs


class Scaled(nn.Module):
    def __init__(self) -> None:
        self.scale = nn.Parameter(np.full(2, 3.0, np.float32))

    def forward(self, x: Any, state: Any = None) -> Any:
        parts = [] if state is None else list(state.values() if isinstance(state, dict) else state)
        kind = type(state).__name__
        total = x * self.scale
        for place, part in enumerate(parts):
            if part is not None:
                total = total + part * 10.0 ** (place + 1)
        return {kind: total}


def arrays(*values: float) -> list[Any]:
    return [np.full(2, value, np.float32) for value in values]


X, (A, B, C) = np.ones(2, np.float32), arrays(1, 2, 3)
STATES: list[tuple[Any, str, float]] = [
    (nn.LstmState(A, B), "LstmState", 213.0),
    (nn.LstmState(B, A), "LstmState", 123.0),
    ((A, B), "tuple", 213.0),
    ([A, B], "list", 213.0),
    ([A, B, C], "list", 3213.0),
    ([A], "list", 13.0),
    ([A, None], "list", 13.0),
    ([None, A], "list", 103.0),
    (None, "NoneType", 3.0),
    ({"a": A, "b": B}, "dict", 213.0),
    ([A.astype(np.float64), B], "list", 213.0),
    ([[1.0, 1.0], B], "list", 213.0),
    ((1.0, B), "tuple", 213.0),
]


@pytest.mark.parametrize("keyword", [False, True])
def test_every_state_after_every_other(keyword: bool) -> None:
    """The last program is not taken for arguments of another form."""
    model = Scaled()
    programs = Programs(model, [model], keep=100)
    for first in STATES:
        for second in STATES:
            for state, kind, expected in (first, second):
                found = programs(X, state=state) if keyword else programs(X, state)
                assert list(found) == [kind]
                np.testing.assert_array_equal(found[kind], np.full(2, expected, np.float32))


def test_a_known_state_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    programs = Programs(model, [model])
    programs(X, nn.LstmState(A, B))

    def refuse(*_: Any) -> Any:
        raise AssertionError("looked up again")

    monkeypatch.setattr(programs, "program_for", refuse)
    found = programs(X, nn.LstmState(B, B))
    np.testing.assert_array_equal(found["LstmState"], np.full(2, 223.0, np.float32))
    for other in ((B, B), nn.LstmState(B, None), nn.LstmState(B, B[:1])):
        with pytest.raises(AssertionError, match="looked up again"):
            programs(X, other)


def test_a_state_is_carried_from_step_to_step() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(np.ones(2, np.float32))

        def forward(self, x: Any, state: Any) -> Any:
            state = nn.LstmState(state.h + x, state.c * 2.0)
            return graph.sum(self.w * x), state

    model = Sums()
    step = nn.compile(model, None, nn.SGD(model, 0.5))
    state: Any = nn.LstmState(np.zeros(2, np.float32), np.ones(2, np.float32))
    losses = []
    for _ in range(4):
        loss, state = step(X, state)
        assert type(state) is nn.LstmState
        losses.append(loss)
    assert losses == [2.0, 1.0, 0.0, -1.0]
    assert state.h.tolist() == [4.0, 4.0]
    assert state.c.tolist() == [16.0, 16.0]
