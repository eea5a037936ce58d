"""When a snapshot pays, how fast a transfer goes, and what a version waits for: without a broker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.schemas.delta import DELTA, HASH_ALGORITHM, PATH, SNAPSHOT
from headrace.schemas.errors import LogError
from headrace.schemas.events import Publication
from headrace.schemas.hashes import GENESIS
from headrace.streams.log.pace import Pace
from headrace.trainer.background import Background
from headrace.trainer.publish import Since


def published(version: int, kind: str, size: int) -> Publication:
    return Publication(version, GENESIS, "trainer", version, kind, -1, b"", HASH_ALGORITHM, b"", None, (), size, 0, 0,
                       0)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- snapshots


def snapshots(delta_size: int, full: int, versions: int, at_most: int, uncompressed: int = 1000) -> list[int]:
    since, taken = Since(), []
    since.note(published(0, PATH, 0))
    for version in range(1, versions + 1):
        since.note(published(version, DELTA, delta_size))
        if since.due(at_most, uncompressed):
            taken.append(version)
            since.note(published(version, SNAPSHOT, full))
    return taken


def test_snapshot_comes_when_the_deltas_since_the_last_are_as_many_bytes() -> None:
    assert snapshots(100, 700, 25, at_most=50) == [10, 17, 24], "the first against the weights as they are"


def test_snapshot_comes_at_the_bound_where_deltas_are_small_or_empty() -> None:
    assert snapshots(1, 700, 12, at_most=5) == [5, 10]
    assert snapshots(0, 700, 12, at_most=5) == [5, 10]


def test_newcomer_fetches_at_most_twice_what_it_must_and_snapshots_cost_no_more_than_deltas() -> None:
    for size in (7, 90, 333, 1500):
        taken = snapshots(size, 700, 200, at_most=10_000)
        longest = max(b - a for a, b in zip([taken[0], *taken], taken, strict=False))
        assert longest * size <= 700 + size
        assert len(taken) * 700 <= 200 * size + 700


# ------------------------------------------------------------------------------------------------------ the pace


def test_transfer_keeps_its_pace_and_saves_nothing_up() -> None:
    pace = Pace(1000.0)
    now = 100.0
    for _ in range(20):
        now += pace.wait_s(50, now)
    assert now == pytest.approx(101.0)
    now += 60
    assert pace.wait_s(500, now) == pytest.approx(0.5), "no burst after a pause"
    assert pace.wait_s(500, now + 0.1) == pytest.approx(0.9), "time that passes by itself counts"


def test_transfer_without_a_limit_never_waits() -> None:
    assert Pace(None).wait_s(1 << 40, 0.0) == 0.0


# ------------------------------------------------------------------------------------------------ the background


class Slow:
    """Stands for a publisher: each call waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.done: list[str] = []
        self.error: Exception | None = None

    def publish_delta(self, version: int, *_: Any) -> None:
        assert self.go.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.done.append(f"delta {version}")

    def publish_snapshot_if_due(self) -> None:
        assert self.go.acquire(timeout=10)
        self.done.append("snapshot")

    def abandon(self) -> None:
        self.go.release(100)


def test_at_most_one_version_is_unpublished() -> None:
    slow = Slow()
    background = Background(slow)  # type: ignore[arg-type]
    background.publish(1, {}, b"")
    background.check()
    assert slow.done == []
    threading.Timer(0.1, slow.go.release).start()
    background.settled()
    assert slow.done == ["delta 1"], "it waited for the delta, and not for the snapshot"
    background.publish(2, {}, b"")
    slow.go.release(3)
    background.finish()
    assert slow.done == ["delta 1", "snapshot", "delta 2", "snapshot"]
    background.close()


def test_failure_is_raised_where_the_trainer_next_looks() -> None:
    slow = Slow()
    slow.error = LogError("gone")
    background = Background(slow)  # type: ignore[arg-type]
    background.publish(1, {}, b"")
    slow.go.release(2)
    with pytest.raises(LogError, match="gone"):
        background.settled()
    background.close()
