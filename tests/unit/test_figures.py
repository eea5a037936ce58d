"""Figures over records that are written down here, so that each can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.consumers.facts import Fact
from headrace.consumers.figures import figures, measure, quantiles
from headrace.schemas.codec import decode
from headrace.schemas.events import GroupClosed, Lease, Manifest, Version
from tests.synthetic_log import EPISODE_TOKENS, synthetic_run


def _facts(lag: int = 0, second_ms: int = 4000, **metrics: float) -> list[Fact[Any]]:
    """Of the synthetic run, re-timed: leases at 1 s, manifests at 3, 4 (`second_ms`) and 9 s, commits at 0, 5 and 8 s.
    `metrics`: what version 2 says of itself."""
    out = []
    for (topic, partition), records in synthetic_run().log.logs.items():
        for record in records if topic in ("tasks", "groups", "batches", "policy") else []:
            event, at = decode(record.value), 2000
            if isinstance(event, Lease):
                at = 1000
            elif isinstance(event, Manifest):
                at = {1: 3000, 2: second_ms, 3: 9000}[event.batch]
                event = replace(event, decided_ms=at, target=event.target + lag)
            elif isinstance(event, Version):
                at = {0: 0, 1: 5000, 2: 8000}[event.version]
                event = replace(event, committed_ms=at, metrics=metrics if event.version == 2 else {})
            elif isinstance(event, GroupClosed):
                at = 2000 if event.group in ("g0", "g1") else 7000
            out.append(Fact(topic, partition, record.offset, at, b"", event))
    return out


def test_times_follow_from_leases_manifests_and_commits() -> None:
    found = figures(_facts())
    assert found.time_to_trainable_batch_s == 2.0
    # Batch 2 had room at once: 1 s. Batch 3 had none until version 1 was committed at 5 s: 4 s, not 5.
    assert found.batch_interval_s == quantiles([1.0, 4.0])
    assert found.batch_span_s == quantiles([2.0, 3.0, 8.0])
    # Batch 2 was there before version 1 was committed; batch 3 isn't trained yet.
    assert found.trainer_wait_s == quantiles([0.0]) and found.trainer_wait_share == 0.0
    assert (found.version, found.published, found.batches) == (2, 2, 3)


def test_the_wait_for_the_first_batch_stands_apart_and_later_ones_are_a_share_of_the_rest() -> None:
    found = figures(_facts(second_ms=6500))  # 1.5 s after version 1, of 8 - 3 s since the first manifest
    assert found.waits.first_wait_s == 3.0  # from version 0
    assert found.trainer_wait_s == quantiles([1.5]) and found.trainer_wait_share == pytest.approx(1.5 / 5.0)
    assert found.waits.trainer == {"waiting": found.trainer_wait_share, "compute": pytest.approx(3.5 / 5.0)}


def test_a_trainer_that_measures_its_wait_is_taken_at_its_word() -> None:
    found = figures(_facts(waiting_s=4.0, compute_s=4.0))
    assert found.trainer_wait_s == quantiles([4.0])
    assert found.trainer_wait_share == pytest.approx(4.0 / (4.0 + 4.0 + 2.0))  # version 1 computed for 2 s


def test_lag_is_weighed_by_tokens_of_committed_batches() -> None:
    lag = figures(_facts()).lag
    assert lag is not None and lag.max == 0 and lag.count == 8 * EPISODE_TOKENS
    lagging = figures(_facts(lag=2)).lag
    assert lagging is not None and lagging.mean == 2.0


def test_reward_is_over_all_closed_groups_whatever_became_of_them() -> None:
    first, second = figures(_facts()).rewards
    assert (first.first, first.last, first.groups, first.mean) == (1, 1, 2, 0.5)
    # g2 (both right), g3 (nobody left), g4 to g10 and u0 (one of two each).
    assert (second.groups, second.episodes) == (10, 18) and second.mean == pytest.approx(10 / 18)


def test_what_the_log_cannot_support_is_none() -> None:
    empty = figures([])
    assert empty.version == -1 and empty.lag is None and empty.tokens_per_s is None and empty.rewards == ()


def test_a_whole_log_is_measured() -> None:
    assert measure(synthetic_run().log).version == 2
