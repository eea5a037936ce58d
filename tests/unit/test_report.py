"""The report over runs whose every record is known: its numbers against independent recomputation from the records, and
its page for a whole run, an empty one, and one that goes on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from headrace.consumers.report import Report, gather
from headrace.consumers.report.page import page
from headrace.consumers.report.sections import headline, sections
from headrace.reporting import report_row
from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import pack_float32, unpack_float32, unpack_int32
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import (
    AttemptEnded,
    Event,
    GroupClosed,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    PublicationClock,
    Score,
    Version,
)
from tests.memory_log import MemoryLog
from tests.synthetic_log import SETTINGS, synthetic_run

NOW = 3_000_000
KEYS = ["readiness", "freshness", "alignment", "reliability", "publication", "evaluation", "spent"]


def rewritten(log: MemoryLog, change: Any) -> MemoryLog:
    """Every record as `change(event)` has it; chains no longer hold, which only the ledger minds."""
    out = MemoryLog(log.run, {place: list(records) for place, records in log.logs.items()})
    for place, records in log.logs.items():
        for record in records:
            try:
                event = decode(record.value)
            except UndecodableRecord:
                continue
            new = change(event)
            if new is not event:
                out = out.altered(record, place, encode(new))
    return out


@pytest.fixture(scope="module")
def log() -> MemoryLog:
    """Slot 1 of each group waits for its environment 3 s, slot 0 decodes 1 s; versions tell of mismatch; replicas of
    their clocks; lags, drifts and weights differ by segment."""
    from dataclasses import replace

    def change(event: Event) -> Event:
        if isinstance(event, AttemptEnded):
            times = {"decode": 1000.0} if event.slot == 0 else {"decode": 500.0, "environment": 3000.0}
            return replace(event, timings_ms=times)
        if isinstance(event, Version) and event.version:
            told = {"mismatch_mean": 0.01 * event.version, "mismatch_max": 0.5 / event.version, "mismatch_tokens": 10.0,
                    "ess": 0.9, "ratio_mean": 1.02, "compute_s": 2.0, "waiting_s": 1.0}  # fmt: skip
            return replace(event, metrics=told)
        if isinstance(event, Manifest):
            n = len(unpack_int32(event.segment_count))
            return replace(event, target=event.target + 1, segment_drift=pack_float32(np.arange(n, dtype=np.float32)),
                           segment_weight=pack_float32(np.linspace(0, 1, n, dtype=np.float32)))  # fmt: skip
        return event

    log = rewritten(synthetic_run().log, change)
    for second in (1, 2):
        log.append("fleet", 0, Heartbeat("w", "w1", 2, 8, 0, True, "{}", {"busy_s": 0.75 * second,
                   "idle_no_requests_s": 0.25 * second}), at_ms=2_000_000 + 1000 * second)  # fmt: skip
    for version in (1, 2):
        at = 2_000_000.0 * version
        clocks = [at + ms for ms in (0, 100, 150, 200, 230, 240, 300)]
        log.append("fleet", 0, PublicationClock("w", "w1", version, *clocks))
    log.append("evals", 0, Score("held out", 0, b"\0" * 16, 100, 100, 0.4, 0.03, "{}", "{}", 1))
    log.append("evals", 0, Score("held out", 2, b"\0" * 16, 100, 100, 0.6, 0.04, "{}", "{}", 2))
    return log


@pytest.fixture(scope="module")
def report(log: MemoryLog) -> Report:
    return gather(log, SETTINGS, NOW)


def events(log: MemoryLog, topic: str, kind: type) -> Iterator[Any]:
    for (name, _), records in log.logs.items():
        for record in records if name == topic else ():
            event = decode(record.value)
            if isinstance(event, kind):
                yield event


def segments(log: MemoryLog) -> list[tuple[int, int, int, int, float, float]]:
    """One row a token: batch, target, version, ... by a loop of its own."""
    rows = []
    for m in events(log, "batches", Manifest):
        for version, count, drift, weight in zip(unpack_int32(m.segment_version), unpack_int32(m.segment_count),
                                                 unpack_float32(m.segment_drift), unpack_float32(m.segment_weight),
                                                 strict=True):  # fmt: skip
            rows += [(m.batch, m.target, int(version), 1, float(drift), float(weight))] * int(count)
    return rows


def test_the_four_times_follow_from_the_records(log: MemoryLog, report: Report) -> None:
    first_request = min(r.timestamp_ms for r in log.logs["tasks", 0])
    manifests = {m.batch: m for m in events(log, "batches", Manifest)}
    committed = {v.version: v.committed_ms for v in events(log, "policy", Version)}
    found = report.figures
    assert found.time_to_trainable_batch_s == (manifests[1].decided_ms - first_request) / 1000
    leased: dict[str, int] = {}
    for record in log.logs["tasks", 0]:
        event = decode(record.value)
        if isinstance(event, Lease):
            leased.setdefault(event.group, record.timestamp_ms)
    spans = [(m.decided_ms - min(leased[ref.group] for ref in m.groups)) / 1000 for m in manifests.values()]
    assert found.batch_span_s is not None and found.batch_span_s.max == max(spans)
    assert found.batch_span_s.mean == pytest.approx(sum(spans) / len(spans))
    told = [v.metrics["waiting_s"] for v in events(log, "policy", Version) if v.version > 1]
    assert found.trainer_wait_s is not None and found.trainer_wait_s.mean == pytest.approx(sum(told) / len(told))
    assert found.trainer_wait_share == pytest.approx(1.0 / (2.0 + 2.0 + 1.0))  # two versions of 2 s, the second's wait
    # max_ahead = 1: batch 2 had room at once, batch 3 when version 1 was committed.
    intervals = [manifests[2].decided_ms - manifests[1].decided_ms,
                 manifests[3].decided_ms - max(manifests[2].decided_ms, committed[1])]  # fmt: skip
    assert found.batch_interval_s is not None and found.batch_interval_s.max == max(intervals) / 1000


def test_scripted_delays_come_back_as_exactly_those_waits_and_name_the_straggler(
    log: MemoryLog, report: Report
) -> None:
    waits = report.figures.waits
    others = sum(one.slot != 0 for one in events(log, "groups", AttemptEnded))
    assert waits.steps_s["environment"] == 3.0 * others
    assert waits.steps_s["decode"] == (report.reliability.attempts - others) * 1.0 + others * 0.5
    for one in waits.stragglers:
        assert (one.slot, one.state, one.state_s) == (1, "environment", 3.0) or one.state == "earlier attempts"


def test_lag_drift_and_weights_are_means_over_tokens(log: MemoryLog, report: Report) -> None:
    rows = segments(log)
    for batch in report.freshness.batches:
        own = [row for row in rows if row[0] == batch.batch]
        assert batch.tokens == len(own)
        assert batch.lag_mean == pytest.approx(np.mean([target - version for _, target, version, *_ in own]))
        assert batch.drift_mean == pytest.approx(np.mean([row[4] for row in own]))
        assert batch.weight_mean == pytest.approx(np.mean([row[5] for row in own]))
        assert batch.masked == pytest.approx(np.mean([row[5] <= 0 for row in own]))
    assert report.freshness.masked_tokens == sum(row[5] <= 0 for row in rows)
    assert report.freshness.rule_active


def test_mismatch_is_weighed_by_tokens_and_the_worst_is_named(report: Report) -> None:
    found = report.alignment
    assert found.mean == pytest.approx((0.01 * 10 + 0.02 * 10) / 20) and found.tokens == 20
    assert found.worst is not None and (found.worst.version, found.worst.max) == (1, 0.5)
    assert [one.bias for one in found.versions] == [pytest.approx(0.02)] * 2


def test_outcomes_and_tasks_are_counted_from_the_attempts(log: MemoryLog, report: Report) -> None:
    ended = list(events(log, "groups", AttemptEnded))
    assert report.reliability.outcomes == Counter(one.outcome for one in ended)
    assert report.reliability.retried == sum(one.attempt > 0 for one in ended) > 0
    closed = list(events(log, "groups", GroupClosed))
    assert {task.task for task in report.reliability.tasks} == {one.task for one in closed}
    by_task = {task.task: task for task in report.reliability.tasks}
    assert (by_task["t-g2"].uniform, by_task["t-g2"].successes) == (1, 2)
    assert (by_task["t-g3"].lost, by_task["t-g3"].episodes, by_task["t-g3"].reward) == (2, 0, None)


def test_publication_is_timed_leg_by_leg(log: MemoryLog, report: Report) -> None:
    found = report.transport
    legs = {"fetch": 0.1, "decode": 0.05, "wait for a step": 0.05, "apply": 0.03, "resume": 0.01, "first token": 0.06}
    assert {name: value.p50 for name, value in found.legs.items()} == pytest.approx(legs)
    assert found.latency_s is not None and found.latency_s.p50 == pytest.approx(0.23)
    assert found.pause_s is not None and found.pause_s.p50 == pytest.approx(0.04)
    sizes: Counter[int] = Counter()
    for one in events(log, "policy", Publication):
        sizes[one.version] += one.size
    assert found.sizes == sizes
    slots = [slot for one in events(log, "groups", GroupClosed) for slot in one.slots if slot.versions]
    crossed = sum(len({run.version for run in slot.versions}) > 1 for slot in slots)
    assert found.crossed == crossed / len(slots) and found.cut_short == 0
    assert (found.requests, found.caches) == (SETTINGS.weights.requests, SETTINGS.weights.caches)


def test_an_evaluation_says_rise_and_error(report: Report) -> None:
    (suite,) = report.evaluation
    assert suite.rise == pytest.approx(0.2) and suite.rise_error == pytest.approx(0.05)


class _Checked(HTMLParser):
    """Collects what a page refers to, and that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> _Checked:
    parser = _Checked()
    parser.feed(html)
    assert not parser.open
    assert all(one.startswith("#") for one in parser.references), parser.references  # nothing from anywhere else
    assert not re.search(r"@import|url\((?!#)|<script|<link", html)
    return parser


def test_the_page_is_whole_needs_no_network_and_answers_each_question(report: Report) -> None:
    html = page(report)
    found = checked(html)
    assert found.tags["svg"] == len(KEYS) and found.tags["section"] == len(KEYS)
    assert 'name="viewport"' in html and "@media print" in html and "@media (max-width" in html
    assert [section.key for section in sections(report)] == KEYS
    for section in sections(report):
        assert section.verdict.endswith(".") and section.rows and all(row.meaning for row in section.rows)
    bottleneck, advice = headline(report)
    assert bottleneck in html and advice.split(":")[0] in html


def test_an_empty_run_and_one_without_a_version_have_a_page() -> None:
    empty = gather(MemoryLog.empty("empty", {}), SETTINGS, NOW)
    html = page(empty)
    assert checked(html).tags["svg"] == 0 and "Nothing has happened yet." in html
    assert [section.good for section in sections(empty)] == [None] * len(KEYS)
    begun = MemoryLog.empty("begun", {"groups": 2, "trajectories": 2, "samples": 2})
    for place, records in synthetic_run().log.logs.items():
        begun.logs[place] = [r for r in records if r.timestamp_ms < 1_000_200]  # the first group is open
    html = page(gather(begun, SETTINGS, 1_001_000))
    checked(html)
    assert "No batch has been decided yet." in html


def test_two_runs_stand_side_by_side(report: Report) -> None:
    other = gather(MemoryLog.empty("other", {}), SETTINGS, NOW)
    html = page(report, other)
    checked(html)
    assert "synthetic against other" in html and html.count('data-run="other"') > 20


def test_names_from_outside_are_escaped(log: MemoryLog) -> None:
    evil = MemoryLog(log.run, {place: list(records) for place, records in log.logs.items()})
    evil.append("evals", 0, Score("<script>alert(1)</script>", 2, b"", 1, 1, 0.5, 0.1, "{}", "{}", 3))
    html = page(gather(evil, SETTINGS, NOW))
    assert "<script" not in html and "&lt;script&gt;" in html


def test_json_has_the_same_numbers_as_the_page(report: Report) -> None:
    row = report_row(report)
    assert row["verdicts"].keys() == set(KEYS)
    assert row["figures"]["time_to_trainable_batch_s"] == report.figures.time_to_trainable_batch_s
    assert row["alignment"]["mean"] == report.alignment.mean and row["ledger"]["run"] == "synthetic"
