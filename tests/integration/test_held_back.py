"""Producers under pressure: held back while candidates pile up, refused by the broker, killed in mid-episode."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from headrace.consumers import audit, open_run
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.worker import Worker
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import Backpressure, DeliveryFailed
from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    Lease,
    LeaseEnded,
    Manifest,
    Span,
    Task,
)
from headrace.schemas.outcomes import REASON_HANDED_BACK
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import GROUPS, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log import clients
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from headrace.streams.tasks import task_source
from tests.fake_engine import FakeEngine
from tests.scripted import lease, spec
from tests.scripted_run import ScriptedRun, scripted_settings

Kafka = dict[str, Any]
WAIT_S = 120.0  # a slow machine
TASK = Task("mine", "jsonl", "{}", 0)


def everything(kafka: Kafka, topics: RunTopics, topic: str) -> list[Event]:
    name = topics.name(topic)
    ends = end_offsets(kafka, name)
    return [decode(r.value) for p, begin in beginning_offsets(kafka, name).items()
            for r in read_range(kafka, name, p, begin, ends[p])]  # fmt: skip


def until(what: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    end = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end, f"waited {within_s:g} s in vain"
        time.sleep(0.1)
    return found


@contextmanager
def roles(kafka: Kafka, topics: RunTopics, run: RunSettings, *, coordinator: bool = True) -> Iterator[None]:
    stop, raised = threading.Event(), list[BaseException]()

    def body(role: Callable[..., None], *more: Any) -> None:
        try:
            role(kafka, topics, run, stop, *more)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=body, args=(run_assembler,))]
    if coordinator:
        threads.append(threading.Thread(target=body, args=(run_coordinator, task_source(run.tasks))))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not raised, raised


def closed(kafka: Kafka, topics: RunTopics) -> dict[str, GroupClosed]:
    return {e.group: e for e in everything(kafka, topics, GROUPS) if isinstance(e, GroupClosed)}


def write(group: Any, slot: int, reward: float) -> None:
    with group.episode(slot) as episode:
        episode.start(temperature=1.0, max_new_tokens=4, seed=slot)
        episode.prompt([1, 2])
        episode.model([3, 4 + slot], [-0.1, -0.2], version=0)
        episode.finish(reward)


def test_unmanaged_producer_is_held_back_while_the_assembler_stands_still(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), scripted_settings()
    create_run(kafka, topics, run)
    with open_producer(run_name, kafka, unmanaged=True, max_unassembled=3) as producer:
        for _ in range(3):
            with producer.group(TASK, 2) as group:
                write(group, 0, 1.0)  # the other slot never begins, which must not keep the group open
        with pytest.raises(Backpressure, match="3 groups of this producer are not closed .*assembler"):
            with producer.group(TASK, 2, wait_s=0.5):
                pass
        with roles(kafka, topics, run, coordinator=False):
            for _ in range(4):
                with producer.group(TASK, 2, wait_s=WAIT_S) as group:
                    write(group, 0, 1.0)
                    write(group, 1, 0.0)
            until(lambda: len(closed(kafka, topics)) == 7)
    reasons = {fate.reason for event in closed(kafka, topics).values() for fate in event.slots}
    assert reasons == {"finished", "never_started"}


@pytest.mark.slow
def test_request_that_outlives_its_caller_is_asked_once_and_its_group_is_handed_back(
    kafka: Kafka, run_name: str
) -> None:
    topics = RunTopics(run_name)
    run = scripted_settings(batch={"groups": 2, "max_lag": 0}, rollout={"group_size": 2, "deadline_s": 3600})
    trainer = ScriptedRun(kafka, topics, run, capacity=0)
    trainer.until(0)

    def commit() -> bool:
        for record in trainer._reader.poll(100, 0.1):
            event = decode(record.value)
            if isinstance(event, Manifest):
                trainer._commit(event, record.value or b"", record.offset)
                return True
        return False

    with roles(kafka, topics, run), open_producer(run_name, kafka) as producer:
        with producer.group(size=2, wait_s=WAIT_S) as first:
            write(first, 0, 1.0)
            write(first, 1, 0.0)
        until(lambda: first.id in closed(kafka, topics))
        with producer.group(size=2, wait_s=WAIT_S) as second:
            # 1. One candidate waits and one group is open: there is no room for a third.
            with pytest.raises(Backpressure, match="1 candidates wait for a batch and 0 batches for the trainer"):
                with producer.group(size=2, wait_s=1.0):
                    pass
            write(second, 0, 1.0)
            write(second, 1, 0.0)
        # 2. Both are in a batch that nobody has trained: still no room, and asking again asks the same.
        until(lambda: second.id in closed(kafka, topics))
        for _ in range(2):
            with pytest.raises(Backpressure):
                with producer.group(size=2, wait_s=1.0):
                    pass
        # 3. The trainer goes on. The answer comes while nobody waits for it: it is handed back at once.
        until(commit)
        tasks = until(lambda: [e for e in everything(kafka, topics, TASKS) if isinstance(e, LeaseEnded)])
        assert [(e.incarnation, e.slots, e.reason) for e in tasks] == [
            (producer.incarnation, (0, 1), REASON_HANDED_BACK)]  # fmt: skip
        until(lambda: tasks[0].group in closed(kafka, topics))
        assert closed(kafka, topics)[tasks[0].group].closure == "too_few_survivors"
        # 4. Whoever asks now is answered.
        with producer.group(size=2, wait_s=WAIT_S) as last:
            write(last, 0, 1.0)
            write(last, 1, 0.0)
        until(lambda: last.id in closed(kafka, topics))
        leases = [e for e in everything(kafka, topics, TASKS) if isinstance(e, Lease)]
        assert [e.group for e in leases] == [first.id, second.id, tasks[0].group, last.id]
    trainer.close()
    ledger = audit(open_run(run_name, kafka).snapshot())
    assert ledger.closes, ledger.failures


CHILD = """
import json, sys, time
from headrace.producers import open_producer
from headrace.schemas.errors import AttemptOver
from headrace.schemas.events import Task
kafka, run, unmanaged = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "unmanaged"
producer = open_producer(run, kafka, unmanaged=unmanaged)
with producer.group(Task("mine", "jsonl", "{}", 0) if unmanaged else None, 2) as group:
    with group.episode(0) as episode:
        episode.start(temperature=1.0, max_new_tokens=4, seed=0)
        episode.prompt([1, 2])
        episode.model([3, 4], [-0.1, -0.2], version=0)
        episode._writer.flush()
        producer.flush()
        print(group.id, flush=True)
        sys.stdin.readline()
        time.sleep(3)
        try:
            episode.model([5], [-0.1], version=0)
            episode._writer.flush()
        except AttemptOver as over:
            print(over, flush=True)
producer.close()
"""


def child(kafka: Kafka, run: str, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(kafka), run, kind], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.slow
def test_producer_that_stood_still_past_its_lease_is_told_and_writes_nothing_more(
    kafka: Kafka, run_name: str
) -> None:
    topics = RunTopics(run_name)
    run = scripted_settings(rollout={"group_size": 2, "lease_timeout_s": 3, "deadline_s": 3600})
    trainer = ScriptedRun(kafka, topics, run, capacity=0)
    trainer.until(0)
    zombie = child(kafka, run_name, "managed")
    try:
        with roles(kafka, topics, run):
            assert zombie.stdout is not None
            group = zombie.stdout.readline().strip()
            zombie.send_signal(signal.SIGSTOP)
            event = until(lambda: closed(kafka, topics).get(group))
            zombie.send_signal(signal.SIGCONT)
            out, said = zombie.communicate("\n", timeout=WAIT_S)
    finally:
        zombie.kill()
        zombie.wait()
        trainer.close()
    assert [fate.reason for fate in event.slots] == ["worker_lost"] * 2
    assert out == f"{group}/0 attempt 0: the coordinator took its lease back (worker_lost)\n", said
    assert zombie.returncode == 0 and said == ""
    ledger = audit(open_run(run_name, kafka).snapshot())
    assert ledger.closes, ledger.failures


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reason"), [("managed", "worker_lost"), ("unmanaged", "deadline")])
def test_producer_killed_in_mid_episode_leaves_a_group_that_closes_once(
    kafka: Kafka, run_name: str, kind: str, reason: str
) -> None:
    topics = RunTopics(run_name)
    rollout = {"group_size": 2, "lease_timeout_s": 3, "deadline_s": 8 if kind == "unmanaged" else 3600}
    run = scripted_settings(rollout=rollout)
    trainer = ScriptedRun(kafka, topics, run, capacity=0)
    trainer.until(0)
    with roles(kafka, topics, run):
        victim = child(kafka, run_name, kind)
        try:
            assert victim.stdout is not None
            group = victim.stdout.readline().strip()
            assert group and group not in closed(kafka, topics)
        finally:
            victim.kill()
            victim.communicate()
        event = until(lambda: closed(kafka, topics).get(group))
    trainer.close()
    assert [(f.outcome, f.reason) for f in event.slots] == [("infra_failure", reason)] * 2
    assert event.slots[0].model_tokens == 2 and event.accounts == {"excluded": 2}
    assert [e.group for e in everything(kafka, topics, GROUPS) if isinstance(e, GroupClosed)].count(group) == 1
    ledger = audit(open_run(run_name, kafka).snapshot())
    assert ledger.closes, ledger.failures


def refuse_above(kafka: Kafka, topic: str, size: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = clients.admin(kafka)  # it must outlive its futures
    for future in admin.incremental_alter_configs([change]).values():
        future.result(30)


def numbered(events: list[Event], group: str, slot: int) -> list[EpisodeStarted | Span | EpisodeEnded]:
    return [e for e in events if isinstance(e, EpisodeStarted | Span | EpisodeEnded)
            and (e.group, e.slot) == (group, slot)]  # fmt: skip


def test_event_that_the_broker_refuses_ends_its_episode_and_no_other(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), scripted_settings()
    create_run(kafka, topics, run)
    refuse_above(kafka, topics.name(TRAJECTORIES), 2000)
    random = np.random.default_rng(0)
    with open_producer(run_name, kafka, unmanaged=True) as producer, producer.group(TASK, 40) as group:
        write(group, 0, 1.0)
        for slot in group.slots[1:]:  # the broker may need a moment to learn of its new limit
            try:
                with group.episode(slot) as episode:
                    episode.start(temperature=1.0, max_new_tokens=4, seed=slot)
                    episode.environment([1, 2])  # leaves now; an open span would be refused in one batch with the next
                    assert producer.flush(WAIT_S) == 0
                    episode.model(random.integers(0, 50_000, 512), -random.random(512), version=0)
                    producer.flush(WAIT_S)
                    episode.model([1], [-0.5], version=0)
                    episode.environment([1])
                    episode.finish(0.0)
            except DeliveryFailed as error:
                assert f"{group.id}/{slot} attempt 0: the broker refused event 2 (Span) for good" in str(error)
                break
        else:
            raise AssertionError("the broker took everything")
        write(group, slot + 1, 0.0)
    events = everything(kafka, topics, TRAJECTORIES)
    told = numbered(events, group.id, slot)
    assert [e.sequence for e in told] == [0, 1, 2]
    end = told[-1]
    assert isinstance(end, EpisodeEnded)
    assert (end.outcome, end.reason, end.boundary) == ("infra_failure", "delivery_failed", "log")
    assert end.text is not None and "event 2 (Span)" in end.text
    for other in (0, slot + 1):
        assert [e.sequence for e in numbered(events, group.id, other)] == [0, 1, 2, 3]
    with roles(kafka, topics, run, coordinator=False):
        event = until(lambda: closed(kafka, topics).get(group.id))
    assert [event.slots[s].reason for s in (0, slot, slot + 1)] == ["finished", "delivery_failed", "finished"]


class NoWeights:
    ready, newest, refusals = False, -1, ()

    def take_clocks(self) -> list[Any]:
        return []

    def sampled(self, version: int) -> None:
        pass


class Talkative(FakeEngine):
    """A completion of 7 tokens reads as more than a record holds."""

    def decode(self, ids: Sequence[int]) -> str:
        return "a" * 2_000_000 if len(ids) == 7 else super().decode(ids)


@pytest.mark.slow
def test_worker_ends_attempts_whose_events_are_refused_and_runs_the_others(
    kafka: Kafka, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "unit"))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "Say a."}\n')
    topics = RunTopics(run_name)
    run = scripted_settings(tasks={"source": "jsonl", "path": str(tasks), "score": "scorers:vowels"})
    create_run(kafka, topics, run)
    long = "g/1/0"  # and later than the others, which would be refused with it in one batch
    lengths = {long: 512, "g/2/0": 7}
    engine = Talkative(lambda name: lengths.get(name, 4), lambda name: 5.0 if name == long else 0.0)
    worker = Worker(kafka, topics, run, engine, NoWeights(), name="w", incarnation="w0", capacity=8)  # type: ignore[arg-type]
    task = task_source(run.tasks).at(0)
    assert task is not None
    opening = lease("g", rules=spec(3, max_attempts=1), incarnation="w0", task=task)
    refuse_above(kafka, topics.name(TRAJECTORIES), 2000)
    time.sleep(3.0)  # until the broker knows
    raw = clients.producer(kafka)
    for topic in (TRAJECTORIES, TASKS):
        raw.produce(topics.name(topic), encode(opening), key="g")
    assert raw.flush(60) == 0
    end = time.monotonic() + WAIT_S
    ends: list[EpisodeEnded] = []
    while len(ends) < 3:
        assert time.monotonic() < end, ends
        for _ in range(50):
            worker.turn()
        ends = [e for e in everything(kafka, topics, TRAJECTORIES) if isinstance(e, EpisodeEnded)]
    assert not worker._jobs
    worker.close()
    assert {e.slot: e.reason for e in ends} == {0: "stop", 1: "delivery_failed", 2: "record_too_large"}
