"""`train series` on series that other packages carry: nobody who trusts it is worse off than with AutoETS."""

from __future__ import annotations

import numpy as np
import pytest

from support.outside_series import SERIES, measure, table

for package in ("statsforecast", "statsmodels", "pmdarima", "vega_datasets"):
    pytest.importorskip(package)


@pytest.mark.long
def test_nobody_is_worse_off_than_with_autoets() -> None:
    found = [measure(series) for series in SERIES]
    print("\n".join(table(found)))
    assert {one.name: one.ratio for one in found if one.ratio > 1.03} == {}
    assert np.mean([one.error for one in found]) < np.mean([one.rival for one in found])
    assert 0.7 <= np.mean([one.inside for one in found]) <= 0.9
