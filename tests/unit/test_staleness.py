"""Drift and the weight that follows from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.settings import StalenessSettings
from headrace.streams.staleness import assess, drift, weight

SETTINGS = StalenessSettings(floor=0.002, ramp_from=0.01, drift_limit=0.04, hard_lag=8, apply="auto")


def test_drift_is_the_square_of_the_summed_changes_over_the_floor() -> None:
    rho = {1: 0.05, 2: 0.1, 3: 0.02}
    assert drift(0, 3, rho, 0.002) == pytest.approx(0.002 + 0.17**2)
    assert drift(1, 2, rho, 0.002) == pytest.approx(0.002 + 0.1**2)


def test_equal_versions_are_at_the_floor_also_without_any_publication() -> None:
    assert drift(4, 4, {}, 0.002) == 0.002


def test_unpublished_change_counts_as_the_latest_one() -> None:
    assert drift(1, 4, {1: 0.5, 2: 0.03}, 0.0) == pytest.approx(0.09**2)
    assert drift(1, 2, {1: 0.5, 2: math.nan}, 0.0) == pytest.approx(0.5**2)


def test_measured_divergence_is_where_the_sum_begins() -> None:
    assert drift(0, 1, {1: 0.1}, 0.01, measured=0.05) == pytest.approx(0.01 + (0.2 + 0.1) ** 2)
    assert drift(0, 1, {1: 0.1}, 0.01, measured=0.005) == pytest.approx(0.01 + 0.1**2)


def test_lag_decides_while_no_change_is_known() -> None:
    assert math.isnan(assess(0, 8, {}, SETTINGS).drift)
    assert assess(0, 8, {}, SETTINGS).weight == 1.0
    assert assess(0, 9, {}, SETTINGS).weight == 0.0


@pytest.mark.parametrize(("over", "expected"), [(0.0, 1), (0.01, 1), (0.025, 0.5), (0.04, 0), (0.5, 0)])
def test_weight_is_a_ramp_over_the_floor(over: float, expected: float) -> None:
    assert weight(1, SETTINGS.floor + over, SETTINGS) == pytest.approx(expected)


@given(st.integers(0, 12), st.lists(st.floats(0, 0.2), min_size=12, max_size=12))
def test_more_drift_or_lag_never_weighs_more(version: int, changes: list[float]) -> None:
    rho = dict(enumerate(changes, 1))
    weights = [assess(version, target, rho, SETTINGS).weight for target in range(version, 13)]
    assert all(0 <= one <= 1 for one in weights) and weights == sorted(weights, reverse=True)
