"""Drift, the weight that follows from it, and what becomes of what is beyond a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import RealisedDrift, Version
from headrace.schemas.settings import StalenessSettings
from headrace.streams.staleness import Drifts, Forecast, assess, drift, dropped, pushed_out, weight

SETTINGS = StalenessSettings(floor=0.002, ramp_from=0.01, drift_limit=0.04, hard_lag=8, apply="auto")


def version(number: int, rho: float, *realised: RealisedDrift, tokens: int = 100) -> Version:
    facts: dict[str, Any] = dict(
        number=0, previous=b"", writer="trainer", version=number, parent=number - 1, batch=number, batch_offset=0,
        batch_digest=b"", hash_algorithm="", served_hash=b"", train_hash=b"", rho=rho, rho_tokens=tokens, groups=(),
        metrics={}, fingerprint="{}", committed_ms=0, realised=realised,
    )  # fmt: skip
    return Version(**facts)


def published(rho: Mapping[int, float]) -> Drifts:
    return Drifts(version(number, change) for number, change in rho.items())


def measured(number: int, moment: float, error: float | None) -> RealisedDrift:
    return RealisedDrift(number, 64, 4, moment, error, moment, 0.0, 1.0, 0.0, None)


def test_drift_is_the_square_of_the_summed_changes_over_the_floor() -> None:
    drifts = published({1: 0.05, 2: 0.1, 3: 0.02})
    for sampled, target, way in ((0, 3, 0.17), (1, 2, 0.1)):
        found = drifts.forecast(sampled, target, 0.002)
        assert found.drift == pytest.approx(0.002 + way**2) and found.extrapolated == 0


def test_equal_versions_are_at_the_floor_also_without_any_publication() -> None:
    assert Drifts().forecast(4, 4, 0.002) == Forecast(0.002, 0)


def test_unpublished_change_counts_as_the_latest_one_and_is_counted() -> None:
    found = published({1: 0.5, 2: 0.03}).forecast(1, 4, 0.0)
    assert found.drift == pytest.approx(0.09**2) and found.extrapolated == 2
    assert Drifts([version(1, 0.5), version(2, 0.0, tokens=0)]).forecast(1, 2, 0.0) == Forecast(0.5**2, 1)


def test_measured_divergence_is_where_the_sum_begins() -> None:
    assert drift({1: 0.1}, 0.01, measured=0.05) == pytest.approx(0.01 + (0.2 + 0.1) ** 2)
    assert drift({1: 0.1}, 0.01, measured=0.005) == pytest.approx(0.01 + 0.1**2)
    # Batch 3 measured version 0's tokens against version 2: from there, the change of version 3 alone is added.
    drifts = Drifts([version(1, 0.1), version(2, 0.1), version(3, 0.02, measured(0, 0.09, 0.01))])
    assert drifts.forecast(0, 3, 0.0).drift == pytest.approx((0.3 + 0.02) ** 2)
    assert drifts.forecast(1, 3, 0.0).drift == pytest.approx(0.12**2), "of version 1 nothing was measured"


@pytest.mark.parametrize("error", [None, 0.08])
def test_measurement_that_is_mostly_error_is_not_built_upon(error: float | None) -> None:
    drifts = Drifts([version(1, 0.1), version(2, 0.1, measured(0, 0.09, error))])
    assert drifts.forecast(0, 2, 0.0).drift == pytest.approx(0.2**2)


def test_what_was_published_later_does_not_change_an_earlier_forecast() -> None:
    early = Drifts([version(1, 0.1), version(2, 0.1)])
    late = Drifts([version(1, 0.1), version(2, 0.1), version(3, 0.1, measured(0, 0.2, 0.01)), version(4, 0.3)])
    late.publish(version(5, 0.3, measured(0, 0.5, 0.01)))
    assert late.forecast(0, 2, 0.0) == early.forecast(0, 2, 0.0), "the target decides"


def test_after_a_rollback_the_way_leads_back_over_what_was_given_up() -> None:
    drifts = Drifts([version(1, 0.1), version(2, 0.2), replace(version(3, 0.05), parent=1), version(4, 0.01)])
    assert drifts.forecast(2, 3, 0.0).drift == pytest.approx((0.2 + 0.05) ** 2)
    assert drifts.forecast(3, 5, 0.0).drift == pytest.approx(0.02**2)


def test_lag_decides_while_no_change_is_known() -> None:
    assert math.isnan(assess(0, 8, Drifts(), SETTINGS).drift)
    assert assess(0, 8, Drifts(), SETTINGS).weight == 1.0
    assert assess(0, 9, Drifts(), SETTINGS).weight == 0.0


@pytest.mark.parametrize(("over", "expected"), [(0.0, 1), (0.039, 1), (0.041, 0)])
def test_rule_limit_is_all_or_nothing(over: float, expected: float) -> None:
    assert weight(1, SETTINGS.floor + over, SETTINGS.model_copy(update={"rule": "limit"})) == expected


def test_drop_takes_the_whole_episode_and_mask_does_not() -> None:
    drops = SETTINGS.model_copy(update={"on_stale": "drop"})
    assert dropped([1.0, 0.0], drops) and not dropped([1.0, 0.5], drops) and not dropped([], drops)
    assert not dropped([1.0, 0.0], SETTINGS)


def test_version_pushes_out_what_is_within_the_limit_now_and_beyond_it_then() -> None:
    drifts = published({1: 0.1, 2: 0.1, 3: 0.1})
    assert pushed_out(1, 2, drifts, SETTINGS)  # 0.01, then 0.04 over the floor
    assert not pushed_out(2, 2, drifts, SETTINGS) and not pushed_out(0, 2, drifts, SETTINGS)
    assert pushed_out(0, 8, Drifts(), SETTINGS), "by lag alone"


@pytest.mark.parametrize(("over", "expected"), [(0.0, 1), (0.01, 1), (0.025, 0.5), (0.04, 0), (0.5, 0)])
def test_weight_is_a_ramp_over_the_floor(over: float, expected: float) -> None:
    assert weight(1, SETTINGS.floor + over, SETTINGS) == pytest.approx(expected)


@given(st.integers(0, 12), st.lists(st.floats(0, 0.2), min_size=12, max_size=12))
def test_more_drift_or_lag_never_weighs_more(sampled: int, changes: list[float]) -> None:
    drifts = published(dict(enumerate(changes, 1)))
    weights = [assess(sampled, target, drifts, SETTINGS).weight for target in range(sampled, 13)]
    assert all(0 <= one <= 1 for one in weights) and weights == sorted(weights, reverse=True)
