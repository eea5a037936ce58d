"""What `headrace show` says of versions and replicas: sizes, ratio, clocks, state."""

from __future__ import annotations

import json
from typing import Any

from headrace.consumers.facts import Fact
from headrace.consumers.tables import replicas, versions
from headrace.schemas.delta import DELTA, HASH_ALGORITHM, PATH, SNAPSHOT
from headrace.schemas.events import Heartbeat, Publication, PublicationClock, RunCreated, Version
from headrace.schemas.hashes import GENESIS


def facts(*events: Any) -> list[Fact[Any]]:
    return [Fact("t", 0, offset, 1000 + offset, b"", event) for offset, event in enumerate(events)]


def version(number: int) -> Version:
    return Version(number, GENESIS, "trainer", number, number - 1, number, -1, b"", HASH_ALGORITHM, b"", b"", 0.0, 0,
                   (), {}, "{}", 0)  # fmt: skip


def published(number: int, kind: str, size: int) -> Publication:
    return Publication(0, GENESIS, "trainer", number, kind, number - 1, b"", HASH_ALGORITHM, b"", None, (), size, 10,
                       1000, 5000)  # fmt: skip


def clock(worker: str, number: int, *times: float | None) -> PublicationClock:
    return PublicationClock(worker, worker, number, *times)


def beat(worker: str, number: int, fenced: str | None = None) -> Heartbeat:
    return Heartbeat(worker, worker, number, 8, 4, True, "{}", {"sampled_tokens": 7.0}, fenced)


CREATED = RunCreated(0, GENESIS, "create", "r", json.dumps({"model": {"dtype": "bfloat16"}}), "0", 0)


def test_version_shows_its_sizes_its_ratio_and_the_slowest_replicas_times() -> None:
    rows = versions(facts(
        CREATED, version(0), published(0, PATH, 0), version(1), published(1, DELTA, 20), published(1, SNAPSHOT, 1500),
        clock("a", 1, 5000, 5100, 5150, 5160, 5170, 5180, 5400),
        clock("b", 1, 5000, 5900, 5950, 5960, 5965, 5970, None),
        version(2),
    ))  # fmt: skip
    assert [row["published"] for row in rows] == ["path", "delta snapshot", None]
    one = rows[1]
    assert (one["bytes"], one["ratio"], one["changed"]) == (1520, 100.0, 0.01)
    assert (one["replicas"], one["fetch_s"], one["pause_s"], one["first_token_s"]) == (2, 0.9, 0.02, 0.4)
    assert (rows[2]["ratio"], rows[2]["replicas"], rows[2]["pause_s"]) == (None, 0, None)


def test_replica_shows_how_far_it_is_behind_whether_it_is_fenced_and_its_newest_clocks() -> None:
    rows = replicas(facts(
        published(1, DELTA, 20), published(2, DELTA, 20), published(3, DELTA, 20), beat("a", 1), beat("b", 1),
        clock("a", 2, 5000, 5100, 5150, 5170, 5180, 5190, 5400), beat("a", 3),
        beat("b", 1, "version 2 was refused: no"),
    ))  # fmt: skip
    a, b = rows
    assert (a["id"], a["behind"], a["state"]) == ("a", 0, "serving")
    times = [a[name] for name in ("fetch_s", "decode_s", "wait_s", "pause_s", "first_token_s")]
    assert times == [0.1, 0.05, 0.02, 0.02, 0.4]
    assert (b["behind"], b["state"], b["pause_s"]) == (2, "fenced: version 2 was refused: no", None)
