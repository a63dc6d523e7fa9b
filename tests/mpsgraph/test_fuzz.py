"""A short run of fuzz_mpsgraph.py."""

from __future__ import annotations

import fuzz_mpsgraph
import pytest

from support import fuzz_driver


@pytest.mark.long
def test_random_operations() -> None:
    tally = fuzz_driver.work(fuzz_mpsgraph.run, 0, 3000)
    assert tally["gradients done"] > 300
    assert len({name.rsplit(" ", 1)[0] for name in tally if name.endswith(" done")}) > 80


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuzz_mpsgraph.Call.run

    def shifted(self: fuzz_mpsgraph.Call, graph: object, inputs: list[object], targets: list[object]) -> list[object]:
        found = real(self, graph, inputs, targets)
        unknown = any(-1 in t.shape for t in inputs)  # type: ignore[attr-defined]
        return [v + 1 if unknown and v.dtype.kind == "f" else v for v in found]

    monkeypatch.setattr(fuzz_mpsgraph.Call, "run", shifted)
    with pytest.raises(BaseException, match="other bits with unknown sizes"):
        fuzz_driver.work(fuzz_mpsgraph.run, 0, 300)
