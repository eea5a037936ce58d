"""What is measured of drift: the probe, its noise, and what a batch's tokens say."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.schemas.columns import pack_float32, pack_int32  # noqa: E402
from headrace.schemas.events import Manifest  # noqa: E402
from headrace.schemas.settings import StalenessSettings  # noqa: E402
from headrace.streams.staleness import Drifts  # noqa: E402
from headrace.trainer.batches import Episode, Group  # noqa: E402
from headrace.trainer.drift import beside_estimated, change, clustered_error, lag_statistics, probe_of  # noqa: E402
from headrace.trainer.fetch import _episode, within_limits  # noqa: E402
from headrace.trainer.report import Scored, group_counts  # noqa: E402
from tests.synthetic_run import episode as recorded  # noqa: E402
from tests.unit.test_staleness import version  # noqa: E402


def episode(slot: int, tokens: int, counted: bool = True) -> Episode:
    ones = np.ones(tokens, np.float32)
    return Episode(slot, np.arange(10, dtype=np.int32), np.arange(tokens, dtype=np.int32), ones > 0, -ones,
                   np.zeros(tokens, np.int32), ones, 1.0 if counted else None, counted, 1.0)  # fmt: skip


def test_probe_is_of_many_groups_within_its_budget_and_never_empty() -> None:
    groups = [Group(f"g{n}", (episode(0, 20, counted=n != 1), episode(1, 20))) for n in range(4)]
    probe, numbers = probe_of(groups, 100)
    assert [(one.group_id, [e.slot for e in one.episodes]) for one in probe] == [("g0", [0]), ("g1", [1]), ("g2", [0])]
    assert numbers.tolist() == [0, 2, 3]
    everything, numbers = probe_of(groups, 10_000)
    assert sum(len(one.episodes) for one in everything) == 7 and numbers.tolist() == list(range(7))
    assert probe_of(groups, 0)[1].tolist() == [0]


def test_noise_is_taken_out_of_the_change_and_never_makes_it_negative() -> None:
    rng = np.random.default_rng(0)
    before, moved = rng.normal(size=20_000), 0.02 * rng.normal(size=20_000)
    noise = [0.05 * rng.normal(size=20_000) for _ in range(3)]
    rho, size = change(before + noise[0], before + moved + noise[1], before + moved + noise[2])
    assert rho == pytest.approx(0.02, rel=0.2) and size == pytest.approx(0.05 * 2**0.5, rel=0.02)
    assert change(before, before, before + noise[0])[0] == 0


def test_statistics_of_a_version_against_their_definitions() -> None:
    x = np.array([0.5, -2.0, 0.1, 0.2, np.nan, 0.3])
    versions, number = np.array([3, 3, 3, 4, 4, 4], np.int32), np.array([0, 0, 1, 1, 1, 2])
    three, four = lag_statistics(x, versions, number)
    assert (three.version, three.tokens, three.episodes, four.tokens) == (3, 3, 2, 2)
    assert three.second_moment == pytest.approx((0.25 + 1 + 0.01) / 3) and three.max_abs == 2.0
    assert three.raw == pytest.approx((0.25 + 4 + 0.01) / 3) and three.beyond == pytest.approx(1 / 3)
    assert three.k3 == pytest.approx(np.mean([np.exp(v) - 1 - v for v in (0.5, -2.0, 0.1)]))


def test_error_counts_episodes_not_tokens() -> None:
    """A hundred tokens that say the same are one observation: the error is that of the episodes' means."""
    rng = np.random.default_rng(1)
    means = rng.normal(size=40)
    repeated, number = np.repeat(means, 100), np.repeat(np.arange(40), 100)
    assert clustered_error(repeated, number) == pytest.approx(means.std(ddof=1) / 40**0.5)
    assert np.isnan(clustered_error(repeated[:100], number[:100]))


def test_realised_stands_beside_what_the_manifest_forecast() -> None:
    manifest = Manifest(
        number=0, previous=b"", batch=1, target=2, settings_offset=0, decided_ms=0, groups=(), positions=(),
        closures_since=0, segment_group=b"", segment_slot=b"", segment_weight=b"",
        segment_version=pack_int32(np.array([1, 1, 2], np.int32)),
        segment_count=pack_int32(np.array([1, 3, 2], np.int32)),
        segment_drift=pack_float32(np.array([0.1, 0.2, np.nan], np.float32)),
    )
    lags = lag_statistics(np.full(6, 0.3), np.array([1, 1, 1, 1, 2, 2], np.int32), np.array([0, 1, 1, 1, 2, 2]))
    one, two = beside_estimated(lags, manifest)
    assert one.estimated == pytest.approx(0.175) and one.second_moment == pytest.approx(0.09)
    assert two.estimated is None and two.error is None


# ---------------------------------------------------------------------------------------------- limits, at use


SEGMENTS = [(0, 1, 1.0), (3, 2, 1.0)]  # version, tokens, recorded weight


def fetched(segments: list[tuple[int, int, float]], drifts: Drifts, **rules: object) -> Episode:
    settings = StalenessSettings.model_validate({"drift_limit": 0.04} | rules)
    versions = [number for number, count, _ in segments for _ in range(count)]
    one = recorded(0, [5, 6], [7, 8, 9], [-1.0, -1.0, -1.0], versions, 1.0)
    (group,) = within_limits([Group("g", (_episode(one, 3, segments, settings),))], 3, drifts, settings)
    return group.episodes[0]


def test_what_was_published_since_the_manifest_masks_at_use_whatever_on_stale_says() -> None:
    moved = Drifts([version(1, 0.1), version(2, 0.1), version(3, 0.1)])
    for rule in ("mask", "wait", "drop"):
        found = fetched(SEGMENTS, moved, on_stale=rule)
        assert found.counted and not found.dropped and found.weights.tolist() == [0, 1, 1]
        assert fetched(SEGMENTS, Drifts(), on_stale=rule).weights.tolist() == [1, 1, 1]
    assert fetched(SEGMENTS, Drifts(), hard_lag=2).weights.tolist() == [0, 1, 1]


def test_dropped_episode_leaves_the_batch_and_its_tokens_are_counted_as_masked() -> None:
    stale = [(0, 1, 0.0), (3, 2, 0.0)]  # as the coordinator writes it with `drop`: all of its segments
    gone = fetched(stale, Drifts(), on_stale="drop")
    assert gone.dropped and not gone.counted
    masked = fetched(stale, Drifts(), on_stale="mask")
    assert masked.counted and not masked.dropped and not masked.weights.any()
    ones = np.ones(4)
    scored = Scored(-ones, -ones.astype(np.float32), 0 * ones, ones.astype(np.float32), ones,
                    np.zeros(4, np.int32), np.zeros(4, np.int64), {})  # fmt: skip
    (counts,) = group_counts([Group("g", (episode(0, 4), gone))], scored)
    assert counts.trained == 4 and counts.masked == {"stale": 3, "ratio": 0}
