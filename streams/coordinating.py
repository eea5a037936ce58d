"""The coordinator's loop: reads where the log stands, then writes each decision in one transaction.

One transactional id, taken over at the start, makes it the only one: after that the ends of `tasks` and `batches` are
final, and they are read no more. It joins no group and commits no position: everything it needs stands in its topics.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Event, FleetTick, Lease, LeaseEnded, LeaseRequest, Manifest
from headrace.schemas.outcomes import REASON_WORKER_LOST
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, FLEET, GROUPS, POLICY, TASKS, TRAJECTORIES, RunTopics

from .clock import TICK_AFTER_S
from .coordinator import Coordinator, Decision
from .log.hanging import check_settled
from .log.reader import Reader, Record, beginning_offsets, end_offsets, read_backwards, read_range
from .log.transactions import Output, Transactor
from .tasks import TaskSource
from .ticking import Ticker

log = logging.getLogger("headrace.coordinator")

WAIT_S = 0.02
POLL_RECORDS = 1000
# Whoever asked so recently may still wait for the answer; producers give up after about as long.
REQUEST_AGE_MS = 60_000


def run_coordinator(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
                    source: TaskSource) -> None:  # fmt: skip
    """Coordinate until `stop`, or until the tasks are used up and all their batches are published. Raises TooUniform or
    NoProgress where the run gets nowhere, TasksExhausted where the source is broken, Fenced where another coordinator
    took over."""
    with ExitStack() as stack:
        transactor = Transactor(kafka, topics.transactional_id("coordinator"))
        stack.callback(transactor.close)
        check_settled(kafka, [(topics.name(TASKS), 0), (topics.name(BATCHES), 0)])
        coordinator = Coordinator(settings, source)
        positions = _restore(kafka, topics, coordinator)
        fleet = topics.name(FLEET)
        ticker = Ticker(kafka, fleet, FleetTick)
        stack.callback(ticker.close)
        reader = stack.enter_context(Reader(kafka, positions))
        log.info("coordinating %s from batch %d, %d groups open", topics.run, coordinator.batching.batch,
                 len(coordinator.leasing.groups))  # fmt: skip
        heard = time.monotonic()
        while not stop.is_set():
            for record in reader.poll(POLL_RECORDS, WAIT_S):
                if record.topic == fleet:
                    heard = time.monotonic()
                _observe(coordinator, topics, record)
            if time.monotonic() - heard >= TICK_AFTER_S:
                ticker.tick(0)
                heard = time.monotonic()
            decision = coordinator.decide(int(time.time() * 1000))
            if decision:
                transactor.send(_outputs(topics, decision))
                _tell(decision)
            if coordinator.finished:
                log.info("the tasks are used up and all their batches are published")
                return


def _restore(kafka: Mapping[str, Any], topics: RunTopics, coordinator: Coordinator) -> dict[tuple[str, int], int]:
    """Bring the coordinator to where the log stands. The positions from which it goes on."""
    positions: dict[tuple[str, int], int] = {}

    def whole(topic: str) -> list[Iterator[Record]]:
        name = topics.name(topic)
        begin, end = beginning_offsets(kafka, name), end_offsets(kafka, name)
        positions.update({(name, p): end[p] for p in end})
        return [read_range(kafka, name, p, begin[p], end[p]) for p in end]

    for topic in (POLICY, TASKS, BATCHES, GROUPS):
        # Closures of different partitions in the order in which they were written, as nearly as clocks allow.
        merged = heapq.merge(*whole(topic), key=lambda r: (r.timestamp_ms, r.partition, r.offset))
        for record in merged:
            _observe(coordinator, topics, record)
    fleet = topics.name(FLEET)
    end = end_offsets(kafka, fleet)[0]
    since = time.time() * 1000 - REQUEST_AGE_MS
    recent = []
    for record in read_backwards(kafka, fleet, 0, end):
        if record.timestamp_ms < since:
            break
        recent.append(record)
    for record in reversed(recent):
        event = _decoded(record)
        if isinstance(event, LeaseRequest):
            coordinator.observe("", record, event)  # the request alone: its time is past
    own = {topics.name(TASKS), topics.name(BATCHES)}
    return {place: at for place, at in positions.items() if place[0] not in own} | {(fleet, 0): end}


def _observe(coordinator: Coordinator, topics: RunTopics, record: Record) -> None:
    event = _decoded(record)
    if event is not None:
        coordinator.observe(topics.short(record.topic), record, event)


def _decoded(record: Record) -> Event | None:
    """None where it can't be read: the ledger names such records; here they decide nothing."""
    try:
        return decode(record.value)
    except UndecodableRecord as error:
        log.error("%s[%d]@%d is ignored: %s", record.topic, record.partition, record.offset, error)
        return None


def _outputs(topics: RunTopics, decision: Decision) -> list[Output]:
    tasks, trajectories, batches = topics.name(TASKS), topics.name(TRAJECTORIES), topics.name(BATCHES)
    by_key = -1  # a group's partition is the producer's murmur2 of its id, as it is for everyone who writes of it
    return [
        *(Output(tasks, 0, encode(one), one.group.encode()) for one in decision.tasks),
        *(Output(trajectories, by_key, encode(one), one.group.encode()) for one in decision.trajectories),
        *(Output(batches, 0, value) for _, value in decision.batches),
    ]


def _tell(decision: Decision) -> None:
    for record, _ in decision.batches:
        if isinstance(record, Manifest):
            log.info("batch %d for version %d: %d groups, lag %d at most", record.batch, record.target,
                     len(record.groups), max(ref.max_lag for ref in record.groups))  # fmt: skip
        else:
            log.info("group %s is %s: %s", record.group, record.disposition, record.reason)
    for one in decision.tasks:
        if isinstance(one, LeaseEnded) and one.reason == REASON_WORKER_LOST:
            log.warning("incarnation %s is lost; slots %s of %s are leased again", one.incarnation[:8],
                        ", ".join(map(str, one.slots)), one.group)  # fmt: skip
        elif isinstance(one, Lease):
            log.debug("lease %d: %s to %s", one.number, one.group, one.worker)
