"""Assemblers side by side, one after the other, and with little room: on the real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer

from headrace.consumers.ledger import audit
from headrace.consumers.source import Snapshot
from headrace.create import create_run
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import Fenced
from headrace.schemas.events import AttemptEnded, Event, GroupClosed, Position
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import GROUPS, SAMPLES, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.log import clients
from headrace.streams.log.reader import beginning_offsets, end_offsets, last_record
from tests.integration.test_streams import audited, everything, until
from tests.roles import role
from tests.scripted import Script, lease, run_settings, spec

Kafka = Mapping[str, Any]
WAIT_S = 120.0  # of a machine that is busy with something else


def settings(**log: Any) -> RunSettings:
    return run_settings(rollout={"group_size": 2}, log={"partitions": 2, "commit_ms": 50} | log)


class Writer:
    """Writes events of groups into the partition that is asked for."""

    def __init__(self, kafka: Kafka, topics: RunTopics) -> None:
        self._producer: Producer = clients.producer(kafka)
        self._topic = topics.name(TRAJECTORIES)

    def put(self, partition: int, *events: Event) -> None:
        for event in events:
            self._producer.produce(self._topic, encode(event), key=b"k", partition=partition)
        assert self._producer.flush(30) == 0

    def whole(self, partition: int, name: str, tokens: int = 4) -> None:
        """A group of two, from its opening to its end."""
        siblings = (event for slot in (0, 1) for event in Script(name, slot).whole(float(slot), tokens=tokens))
        self.put(partition, lease(name, rules=spec(2, deadline_s=600.0, max_tokens=1 << 20)), *siblings)


def closed(kafka: Kafka, topics: RunTopics) -> dict[str, GroupClosed]:
    return {event.group: event for event in everything(kafka, topics, GROUPS) if isinstance(event, GroupClosed)}


def position(kafka: Kafka, topics: RunTopics, partition: int) -> Position:
    record = last_record(kafka, topics.name(GROUPS), partition)
    event = decode(record.value) if record else None
    assert isinstance(event, Position)
    return event


def unsound(kafka: Kafka, topics: RunTopics) -> list[str]:
    """What the ledger has to say. (The leases here are nobody's, so that `tasks` has none.)"""
    return [line for line in audited(kafka, topics) if "has no record in tasks" not in line]


def begin(kafka: Kafka, topics: RunTopics, partition: int = 0) -> int:
    return beginning_offsets(kafka, topics.name(TRAJECTORIES))[partition]


# --------------------------------------------------------------------------------------------------------- trimming


def test_settled_events_past_their_age_are_deleted_and_none_above_the_low_mark(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(keep_trajectories_s=1.0)
    create_run(kafka, topics, run)
    writer = Writer(kafka, topics)
    for n in range(3):
        writer.whole(0, f"done-{n}")
    opening, *rest = [lease("open", rules=spec(2, deadline_s=600.0)),
                      *(event for slot in (0, 1) for event in Script("open", slot).whole(float(slot)))]  # fmt: skip
    writer.put(0, opening)
    low_mark = end_offsets(kafka, topics.name(TRAJECTORIES))[0] - 1
    with role(run_assembler, kafka, topics, run):
        # The open group brings ticks, and with them the time at which the rest is old enough.
        until(lambda: begin(kafka, topics) == low_mark, WAIT_S)
        assert position(kafka, topics, 0).low_mark == low_mark
    with role(run_assembler, kafka, topics, run):  # and one that starts on what is left
        writer.put(0, *rest)
        writer.whole(0, "after")
        until(lambda: {"open", "after"} <= closed(kafka, topics).keys(), WAIT_S)
        assert begin(kafka, topics) <= position(kafka, topics, 0).low_mark
    assert {group.closure for group in closed(kafka, topics).values()} == {"candidate"}
    found = audit(Snapshot(kafka, topics))
    assert not found.retained and unsound(kafka, topics) == []


# An assembler that would delete, and is killed where it does: after the commit that allows it.
DELETING = """
import sys, threading, time
from headrace.schemas.topics import RunTopics
from headrace.streams import trimming
from headrace.streams.assembling import run_assembler
from headrace.streams.log.policy import open_settings
bootstrap, run = sys.argv[1:]
def held(*_):
    print("deleting", flush=True)
    time.sleep(600)
trimming.delete = held
kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
run_assembler(kafka, topics, open_settings(kafka, topics).settings, threading.Event())
"""


def test_assembler_killed_between_commit_and_deletion_leaves_it_to_the_next(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(keep_trajectories_s=0.5)
    create_run(kafka, topics, run)
    writer = Writer(kafka, topics)
    writer.whole(0, "done")
    writer.put(0, lease("open", rules=spec(2, deadline_s=600.0)))
    low_mark = end_offsets(kafka, topics.name(TRAJECTORIES))[0] - 1
    process = subprocess.Popen([sys.executable, "-c", DELETING, str(kafka["bootstrap.servers"]), run_name],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout is not None
        watchdog = threading.Timer(WAIT_S, process.kill)
        watchdog.start()
        assert process.stdout.readline() == "deleting\n"
        watchdog.cancel()
    finally:
        process.kill()
        process.wait()
    assert position(kafka, topics, 0).low_mark == low_mark and begin(kafka, topics) == 0
    with role(run_assembler, kafka, topics, run):
        until(lambda: begin(kafka, topics) == low_mark, WAIT_S)
        writer.put(0, *(event for slot in (0, 1) for event in Script("open", slot).whole(float(slot))))
        until(lambda: "open" in closed(kafka, topics), WAIT_S)
    assert len([e for e in everything(kafka, topics, GROUPS) if isinstance(e, GroupClosed)]) == 2
    assert unsound(kafka, topics) == []


def test_without_a_limit_everything_is_kept(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    Writer(kafka, topics).whole(0, "done")
    with role(run_assembler, kafka, topics, run):
        until(lambda: "done" in closed(kafka, topics), WAIT_S)
        time.sleep(1.5)
    assert begin(kafka, topics) == 0 and audit(Snapshot(kafka, topics)).retained


# ----------------------------------------------------------------------------------------------------------- shares


def start_assembler(kafka: Kafka, run: str, share: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "start", "assembler", run, "--share", share, "--bootstrap",
         str(kafka["bootstrap.servers"])],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "HEADRACE_HOME": str(home)},
    )  # fmt: skip


def test_assemblers_with_a_share_each_do_all_of_it_together(kafka: Kafka, run_name: str, tmp_path: Path) -> None:
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    writer = Writer(kafka, topics)
    processes = [start_assembler(kafka, run_name, f"{i}/2", tmp_path) for i in range(2)]
    try:
        for partition in (0, 1):
            writer.whole(partition, f"in-{partition}")
        until(lambda: len(closed(kafka, topics)) == 2, WAIT_S)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(WAIT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert unsound(kafka, topics) == []


@pytest.mark.slow
def test_overlapping_assembler_ends_as_fenced_and_commits_what_is_its_own(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(commit_ms=5000)
    create_run(kafka, topics, run)
    writer = Writer(kafka, topics)
    with role(run_assembler, kafka, topics, run, [0, 1]) as first:
        writer.whole(0, "before")
        until(lambda: "before" in closed(kafka, topics), WAIT_S)
        with role(run_assembler, kafka, topics, run, [1]) as second:
            # The first one decides on both partitions, and commits that of the one that is still its own.
            writer.whole(0, "mine")
            writer.whole(1, "theirs")
            until(lambda: bool(first), WAIT_S)
            assert "mine" in closed(kafka, topics)
            until(lambda: "theirs" in closed(kafka, topics), WAIT_S)
            assert isinstance(first[0], Fenced) and "assembler.1" in str(first[0]) and not second
    assert unsound(kafka, topics) == []


# ----------------------------------------------------------------------------------------------------------- memory


def assemble_all(kafka: Kafka, topics: RunTopics, run: RunSettings, groups: int, memory_bytes: int) -> None:
    def assemble(kafka: Kafka, topics: RunTopics, run: RunSettings, stop: threading.Event) -> None:
        run_assembler(kafka, topics, run, stop, memory_bytes=memory_bytes)

    with role(assemble, kafka, topics, run):
        until(lambda: len(closed(kafka, topics)) == groups, WAIT_S)


def test_closures_and_contents_are_the_same_without_memory_for_spans(kafka: Kafka, run_name: str) -> None:
    """Two runs with the same events; what the poorer one writes differs in nothing."""
    said: list[list[Any]] = []
    for name, memory in ((run_name, 1 << 20), (f"{run_name}-poor", 3000)):
        topics, run = RunTopics(name), settings(partitions=1)
        create_run(kafka, topics, run)
        writer = Writer(kafka, topics)
        scripts = [Script(f"g{n}", slot) for n in range(4) for slot in (0, 1)]
        for n in range(4):
            writer.put(0, lease(f"g{n}", rules=spec(2, deadline_s=600.0, max_tokens=1 << 20)))
        for make in (Script.started, lambda s: s.span(300), lambda s: s.span(200, salt=3),
                     lambda s: s.ended(float(s.slot))):  # fmt: skip
            writer.put(0, *map(typed(make), scripts))  # siblings of all groups side by side
        assemble_all(kafka, topics, run, 4, memory)
        samples = [event.data for event in everything(kafka, topics, SAMPLES)]
        ends = [e for e in everything(kafka, topics, GROUPS) if isinstance(e, AttemptEnded)]
        hashes = {group: (e.closure, e.content_hash) for group, e in closed(kafka, topics).items()}
        said.append([samples, len(ends), hashes])
        assert unsound(kafka, topics) == []
    assert said[0] == said[1]


@pytest.mark.slow
def test_candidates_that_no_trainer_takes_hold_no_memory(kafka: Kafka, run_name: str, tmp_path: Path) -> None:
    """Nobody coordinates or trains here. 10 M tokens are 80 MB as columns: the process may not grow with them."""
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    writer, tokens = Writer(kafka, topics), 50_000
    process = start_assembler(kafka, run_name, "0/1", tmp_path)
    try:
        resident = []
        for n in range(100):
            writer.whole(n % 2, f"g{n}", tokens)
            if n % 10 == 9:
                until(lambda n=n: len(closed(kafka, topics)) == n + 1, WAIT_S)  # type: ignore[misc]
                resident.append(psutil.Process(process.pid).memory_info().rss)
        assert max(resident[-3:]) < max(resident[2:5]) + (16 << 20)
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------------------------------------------ stopped


@pytest.mark.slow
def test_assembler_stopped_past_its_time_loses_and_doubles_nothing(
    kafka: Kafka, run_name: str, tmp_path: Path
) -> None:
    """Another one takes over while it stands still; when it goes on, it is fenced at its first commit."""
    topics, run = RunTopics(run_name), settings(commit_ms=500)
    create_run(kafka, topics, run)
    writer = Writer(kafka, topics)
    stopped = start_assembler(kafka, run_name, "0/1", tmp_path)
    try:
        writer.whole(0, "before")
        until(lambda: "before" in closed(kafka, topics), WAIT_S)
        for n in range(20):  # it is stopped with some of these read, and perhaps sent
            writer.whole(n % 2, f"during-{n}")
        stopped.send_signal(signal.SIGSTOP)
        with role(run_assembler, kafka, topics, run):
            until(lambda: len(closed(kafka, topics)) == 21, WAIT_S)
            stopped.send_signal(signal.SIGCONT)
            for n in range(4):
                writer.whole(n % 2, f"after-{n}")
            assert stopped.wait(WAIT_S) == 1
            assert stopped.stderr is not None and "another process owns the transactional id" in stopped.stderr.read()
            until(lambda: len(closed(kafka, topics)) == 25, WAIT_S)
    finally:
        stopped.kill()
        stopped.communicate()
    assert len([e for e in everything(kafka, topics, GROUPS) if isinstance(e, GroupClosed)]) == 25
    assert unsound(kafka, topics) == []


def typed(make: Callable[[Script], Event]) -> Callable[[Script], Event]:
    return make
