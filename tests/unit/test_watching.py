"""`status --follow` over logs that are written down: it ends with the run, and reads each record once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.consumers.state import SILENT_S, state
from headrace.consumers.tables import SmallTopics, read_small
from headrace.schemas.events import FleetTick
from headrace.streams.log.reader import Record
from headrace.watching import ENDED, watch
from tests.memory_log import MemoryLog
from tests.synthetic_log import SETTINGS, synthetic_run


@dataclass
class Followed:
    """What `watch` needs of a run."""

    log: MemoryLog
    name: str = "synthetic"
    settings: Any = SETTINGS
    snapshots: int = 0

    def snapshot(self) -> MemoryLog:
        self.snapshots += 1
        return self.log


def test_it_ends_when_no_process_of_the_run_writes_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    run = Followed(synthetic_run().log)  # whose newest record is of 1970
    watch(run, False)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert run.snapshots == 1 and out.endswith(f"{ENDED}\n") and "held up by" in out
    watch(run, True)  # type: ignore[arg-type]
    row = json.loads(capsys.readouterr().out)
    assert row["verdicts"].keys() == {"readiness", "freshness", "alignment", "reliability", "publication", "evaluation"}
    assert row["ledger"] is None


def test_a_run_that_has_not_begun_or_goes_on_is_not_over() -> None:
    now = int(time.time() * 1000)
    begun = MemoryLog.empty("begun", dict.fromkeys(("groups", "trajectories", "samples"), 2))
    assert not state(read_small(begun), SETTINGS, now, 0).over
    begun.append("fleet", 0, FleetTick("coordinator", 0), at_ms=now - 1000)
    assert not state(read_small(begun), SETTINGS, now, 0).over
    assert state(read_small(begun), SETTINGS, now + int(1000 * SILENT_S), 0).over


@dataclass
class Counting(MemoryLog):
    read: list[Record] = field(default_factory=list)

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        for record in MemoryLog.records(self, topic, partition, start, end):
            self.read.append(record)
            yield record


def test_each_record_is_read_once_and_nothing_is_missing() -> None:
    whole = synthetic_run().log
    small, seen = SmallTopics(), list[Record]()
    for share in (0.3, 0.6, 0.6, 1.0):
        part = Counting(whole.run, {place: records[: round(share * len(records))]
                                    for place, records in whole.logs.items()})  # fmt: skip
        facts = small.read(part)
        seen += part.read
        assert [str(fact) for fact in facts] == [str(fact) for fact in read_small(part)]
    assert len({(r.topic, r.partition, r.offset) for r in seen}) == len(seen)

