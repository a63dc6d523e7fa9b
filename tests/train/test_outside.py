"""`train series` on series that other packages carry: nobody who trusts it is worse off than with AutoETS."""

from __future__ import annotations

import numpy as np
import pytest

from support.outside_series import SERIES, measure, table

for package in ("statsforecast", "statsmodels", "pmdarima", "vega_datasets"):
    pytest.importorskip(package)


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))  # each of 6 series: a minute or two, on several processes
def test_nobody_is_worse_off_than_with_autoets(part: int) -> None:
    found = [measure(series) for series in SERIES[part::3]]
    print("\n".join(table(found)))
    assert {one.name: one.ratio for one in found if one.ratio > 1.03} == {}
    assert np.mean([one.error for one in found]) < np.mean([one.rival for one in found])
    assert 0.7 <= np.mean([one.inside for one in found]) <= 0.9
