"""Series in tests are fitted by fewer methods from fewer origins; test_contest.py and test_outside.py have all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retrograd.train import contest


@pytest.fixture(scope="module", autouse=True)
def fast(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in ("test_contest.py", "test_outside.py"):
            patch.delitem(contest.METHODS, "arima")
            patch.setattr(contest, "_TESTED", 3)
            patch.setattr(contest, "_EARLIER", 6)
        yield
