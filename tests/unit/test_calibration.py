"""Forecast against realised drift: figures that can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.consumers.calibration import WANTED, Cell, calibrated, of_cells, spearman
from headrace.schemas.events import RealisedDrift
from tests.unit.test_staleness import version


def realised(number: int, moment: float, estimated: float | None, tokens: int = 10) -> RealisedDrift:
    return RealisedDrift(number, tokens, 4, moment, 0.1 * moment, moment, 0.0, 1.0, 0.0, estimated)


def test_cells_are_over_the_floor_that_lag_0_shows_and_forecasts_over_that_which_they_contain() -> None:
    # Version v + 1 was trained on a batch for target v.
    versions = [
        version(3, 0.1, realised(2, 0.01, 0.005), realised(1, 0.03, 0.045), realised(0, 0.09, 0.085)),
        version(4, 0.1, realised(3, 0.03, 0.005), realised(2, 0.05, 0.065, tokens=30), realised(1, 0.1, None)),
    ]
    found = calibrated(versions, 0.005)
    assert found.floor == pytest.approx(0.02) and found.cells == 3
    one, two = found.lags
    assert (one.lag, one.cells, one.tokens) == (1, 2, 40)
    assert one.forecast == pytest.approx((10 * 0.04 + 30 * 0.06) / 40)
    assert one.realised == pytest.approx((10 * 0.01 + 30 * 0.03) / 40)
    assert two.lag == 2
    assert two.forecast == pytest.approx(0.08) and two.realised == pytest.approx(0.07)
    assert found.correlation == pytest.approx(1.0) and found.limit is None, "too few cells for a limit"
    assert found.factor == pytest.approx((40 * one.realised + 10 * 0.07) / (40 * one.forecast + 10 * 0.08))


def test_limit_is_where_realised_drift_is_what_is_wanted() -> None:
    cells = [Cell(target, 1 + target % 3, 8, 0.01 * target, 0.005 * target) for target in range(1, 30)]
    found = of_cells(cells, 0.0)
    assert found.factor == pytest.approx(0.5) and found.limit == pytest.approx(2 * WANTED)
    assert all(one.correlation == pytest.approx(1.0) for one in found.lags)


def test_nothing_is_claimed_where_nothing_was_measured() -> None:
    found = calibrated([version(1, 0.1)], 0.0)
    assert (found.cells, found.floor, found.correlation, found.factor, found.limit) == (0, None, None, None, None)


def test_rank_correlation_shares_ranks_and_says_nothing_of_constants() -> None:
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    shared = float(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(shared)
    assert spearman([1, 1, 1], [1, 2, 3]) is None and spearman([1, 2], [1, 2]) is None
