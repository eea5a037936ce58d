"""The coordinator's loop: reads where the log stands, then writes each decision in one transaction.

One transactional id, taken over at the start, makes it the only one: after that the ends of `tasks` and `batches` are
final, and they are read no more. It joins no group and commits no position: everything it needs stands in its topics.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import NoProgress, RecordError, RecordTooLarge
from headrace.schemas.events import (
    DeadLetter,
    EpisodeEnded,
    Exhausted,
    FleetTick,
    Lease,
    LeaseEnded,
    LeaseRequest,
    Manifest,
)
from headrace.schemas.outcomes import REASON_WORKER_LOST
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import (
    BATCHES,
    DEADLETTER,
    FLEET,
    MANIFEST_BYTES,
    RECORD_BYTES,
    TASKS,
    TRAJECTORIES,
    RunTopics,
)

from .assembler import read_event
from .clock import TICK_AFTER_S
from .coordinator import Coordinator, Decision
from .intake import Place, letters, understand
from .log.hanging import check_settled
from .log.policy import Schemas
from .log.reader import Reader, Record, beginning_offsets, end_offsets, read_backwards, read_range
from .log.transactions import Output, Transactor
from .restoring import restore
from .stalls import Part, Stall
from .tasks import TaskSource
from .ticking import Ticker

log = logging.getLogger("headrace.coordinator")

WAIT_S = 0.02
POLL_RECORDS = 1000
LOOK_S = 0.25  # between two looks at whether anything stands still
PULSE_S = 5.0  # a tick at least so often, also on a busy `fleet`: whoever watches the coordinator sees it live
PROBE_RECORDS = 20_000
# Whoever asked so recently may still wait for the answer; producers give up after about as long.
REQUEST_AGE_MS = 60_000

Refused = list[tuple[Record, RecordError]]


def run_coordinator(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
                    source: TaskSource) -> None:  # fmt: skip
    """Coordinate until `stop`, or until the tasks are used up and all their batches are published. Raises TooUniform or
    NoProgress where the run gets nowhere, TasksExhausted where the source is broken, Fenced where another coordinator
    took over."""
    with ExitStack() as stack:
        transactor = Transactor(kafka, topics.transactional_id("coordinator"), record_bytes=MANIFEST_BYTES)
        stack.callback(transactor.close)
        check_settled(kafka, [(topics.name(TASKS), 0), (topics.name(BATCHES), 0)])
        coordinator = Coordinator(settings, source)
        schemas = Schemas(kafka, topics)
        refused: Refused = []
        positions = _restore(kafka, topics, coordinator, schemas, refused)
        known = _lettered(kafka, topics) if refused else set()
        fleet = topics.name(FLEET)
        ticker = Ticker(kafka, fleet, FleetTick)
        stack.callback(ticker.close)
        reader = stack.enter_context(Reader(kafka, positions))
        log.info("coordinating %s from batch %d, %d groups open", topics.run, coordinator.batching.batch,
                 len(coordinator.leasing.groups))  # fmt: skip
        if coordinator.settings.reuse.enabled:
            log.warning("reuse.enabled: recorded successes are used again where a task fails; this biases the gradient")
        heard = ticked = looked = time.monotonic()
        while not stop.is_set():
            for record in reader.poll(POLL_RECORDS, WAIT_S):
                if record.topic == fleet:
                    heard = time.monotonic()
                _observe(coordinator, topics, record, schemas, refused)
            now = time.monotonic()
            if now - heard >= TICK_AFTER_S or now - ticked >= PULSE_S:
                ticker.tick(0)
                heard = ticked = now
            decision = coordinator.decide(int(time.time() * 1000))
            outputs = _outputs(topics, decision, letters(refused, known))
            if outputs:
                transactor.send(outputs)
                _tell(decision, coordinator)
            refused.clear()
            if coordinator.finished:
                log.info("the tasks are used up and all their batches are published")
                return
            if now - looked >= LOOK_S:
                looked = now
                _judge(coordinator.stall(), topics.run, lambda: _unread(kafka, topics, coordinator))


def _judge(stall: Stall | None, run: str, unread: Callable[[], str | None]) -> None:
    """Raises NoProgress at the bound; warns before."""
    if stall is None:
        return
    if stall.part == Part.WORKERS and (what := unread()) is not None:
        stall = stall.blaming(Part.ASSEMBLER, what)  # they have done their work
    if stall.final:
        raise NoProgress(stall.say(run))
    log.warning("%s", stall.say(run))


def _unread(kafka: Mapping[str, Any], topics: RunTopics, coordinator: Coordinator) -> str | None:
    """An attempt's end in `trajectories` that lies beyond what `groups` accounts for, in words."""
    name = topics.name(TRAJECTORIES)
    ends = end_offsets(kafka, name)
    for partition, end in ends.items():
        start = coordinator.assembled.get(partition, 0)
        for count, record in enumerate(read_range(kafka, name, partition, start, end)):
            event = read_event(record.value)
            if isinstance(event, EpisodeEnded) and event.group in coordinator.leasing.groups:
                return (f"the end of slot {event.slot} of group {event.group} at {name}[{partition}]@{record.offset} "
                        f"waits for it; it has accounted for what lies below {start}")  # fmt: skip
            if count >= PROBE_RECORDS:
                break
    return None


def _restore(kafka: Mapping[str, Any], topics: RunTopics, coordinator: Coordinator, schemas: Schemas,
             refused: Refused) -> dict[tuple[str, int], int]:  # fmt: skip
    """Bring the coordinator to where the log stands. The positions from which it goes on."""
    positions: dict[tuple[str, int], int] = {}

    def whole(topic: str) -> Iterator[Record]:
        name = topics.name(topic)
        begin, end = beginning_offsets(kafka, name), end_offsets(kafka, name)
        positions.update({(name, p): end[p] for p in end})
        # Those of different partitions in the order in which they were written, as nearly as clocks allow.
        return heapq.merge(*(read_range(kafka, name, p, begin[p], end[p]) for p in end),
                           key=lambda r: (r.timestamp_ms, r.partition, r.offset))  # fmt: skip

    def observe(topic: str, record: Record) -> None:
        _observe(coordinator, topics, record, schemas, refused)

    began = time.monotonic()
    count = restore(coordinator, whole, observe)
    log.info("%d records say where the run stands (read in %.1f s)", count, time.monotonic() - began)
    fleet = topics.name(FLEET)
    end = end_offsets(kafka, fleet)[0]
    since = time.time() * 1000 - REQUEST_AGE_MS
    recent = []
    for record in read_backwards(kafka, fleet, 0, end):
        if record.timestamp_ms < since:
            break
        recent.append(record)
    for record in reversed(recent):
        try:
            event = understand(FLEET, record.value, schemas.decode)
        except RecordError:
            continue
        if isinstance(event, LeaseRequest):
            coordinator.observe("", record, event)  # the request alone: its time is past
    own = {topics.name(TASKS), topics.name(BATCHES)}
    return {place: at for place, at in positions.items() if place[0] not in own} | {(fleet, 0): end}


def _lettered(kafka: Mapping[str, Any], topics: RunTopics) -> set[Place]:
    """The records that have a letter, of whatever topic."""
    name, places = topics.name(DEADLETTER), set()
    for record in read_range(kafka, name, 0, beginning_offsets(kafka, name)[0], end_offsets(kafka, name)[0]):
        try:
            letter = decode(record.value)
        except RecordError:
            continue
        if isinstance(letter, DeadLetter):
            places.add((letter.topic, letter.partition, letter.offset))
    return places


def _observe(coordinator: Coordinator, topics: RunTopics, record: Record, schemas: Schemas,
             refused: Refused) -> None:  # fmt: skip
    topic = topics.short(record.topic)
    try:
        coordinator.observe(topic, record, understand(topic, record.value, schemas.decode))
    except RecordError as error:
        coordinator.passed(topic, record)
        refused.append((record, error))
        log.warning("%s[%d]@%d decides nothing: %s", record.topic, record.partition, record.offset, error)


def _outputs(topics: RunTopics, decision: Decision, refused: list[DeadLetter]) -> list[Output]:
    tasks, trajectories, batches = topics.name(TASKS), topics.name(TRAJECTORIES), topics.name(BATCHES)
    by_key = -1  # a group's partition is the producer's murmur2 of its id, as it is for everyone who writes of it
    _check_sizes(decision)
    return [
        *(Output(tasks, 0, encode(one), one.group.encode()) for one in decision.tasks),
        *(Output(trajectories, by_key, encode(one), one.group.encode()) for one in decision.trajectories),
        *(Output(batches, 0, value) for _, value in decision.batches),
        *(Output(topics.name(DEADLETTER), 0, encode(letter), letter.key) for letter in refused),
    ]


def _check_sizes(decision: Decision) -> None:
    """Raises RecordTooLarge, with the setting to change, before anything of the decision is written."""
    for record, value in decision.batches:
        if isinstance(record, Manifest) and len(value) > MANIFEST_BYTES:
            raise RecordTooLarge(
                f"the manifest of batch {record.batch} takes {len(value)} bytes for {len(record.groups)} groups, and a "
                f"record of {BATCHES} holds {MANIFEST_BYTES}: lower batch.groups, or rollout.group_size; nothing of "
                "it was written")  # fmt: skip
    for lease in decision.tasks:
        if isinstance(lease, Lease) and (size := len(encode(lease))) > RECORD_BYTES:
            raise RecordTooLarge(
                f"task {lease.task.id}: a lease with it takes {size} bytes, and a record of {TASKS} holds "
                f"{RECORD_BYTES}: keep what is large out of the task (a reference in its data will do)")  # fmt: skip


def _tell(decision: Decision, coordinator: Coordinator) -> None:
    for record, _ in decision.batches:
        if isinstance(record, Manifest):
            reused = f", {len(record.reused)} successes used again (biased)" if record.reused else ""
            log.info("batch %d for version %d: %d groups, lag %d at most%s", record.batch, record.target,
                     len(record.groups), max(ref.max_lag for ref in record.groups), reused)  # fmt: skip
        else:
            log.info("group %s is %s: %s", record.group, record.disposition, record.reason)
    for one in decision.tasks:
        if isinstance(one, LeaseEnded) and one.reason == REASON_WORKER_LOST:
            log.warning("incarnation %s is lost; slots %s of %s are leased again", one.incarnation[:8],
                        ", ".join(map(str, one.slots)), one.group)  # fmt: skip
        elif isinstance(one, Lease):
            log.debug("lease %d: %s to %s", one.number, one.group, one.worker)
    given_up = {one.group for one in decision.trajectories if isinstance(one, Exhausted)}
    for name in sorted(given_up & coordinator.leasing.groups.keys()):
        group = coordinator.leasing.groups[name]
        log.warning("task %s (group %s) is given up: %d attempts in a row were lost with their workers; if it is this "
                    "task that kills them, their logs say how", group.opening.task.id, name, group.lost)  # fmt: skip
