"""A broker that is away for a minute: stopped, or killed and started again, under producers that go on writing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.broker import start_broker
from headrace.consumers import audit, open_run
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.receiver import Receiver
from headrace.producers.worker import Worker
from headrace.schemas.codec import decode
from headrace.schemas.errors import Undelivered
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Heartbeat, Lease, LeaseEnded, Span, Task
from headrace.schemas.topics import FLEET, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from tests.fake_engine import FakeEngine
from tests.scripted_run import ScriptedRun, scripted_settings

AWAY_S = 60.0
QUEUE_BYTES = 8 << 20
TASK = Task("mine", "jsonl", "{}", 0)

# Writes until its input ends, repeating whatever raised Backpressure; then it closes and says what it wrote.
WRITER = """
import json, sys, threading, time
import numpy as np
from headrace.producers import open_producer
from headrace.schemas.errors import Backpressure
from headrace.schemas.events import Task
kafka, run, queue = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
stop, held = threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
def insist(call, *args, **named):
    global held
    while True:
        try:
            return call(*args, **named)
        except Backpressure:
            held += 1
            time.sleep(0.05)
producer = open_producer(run, kafka, unmanaged=True, max_unassembled=10**6, max_bytes=queue)
wrote, random = {}, np.random.default_rng(0)
print("ready", flush=True)
while not stop.is_set():
    group = producer.group(Task("mine", "jsonl", "{}", 0), 2)
    try:
        opened = group.__enter__()
    except Backpressure:
        held += 1
        time.sleep(0.05)
        continue
    for slot in opened.slots:
        with opened.episode(slot) as episode:
            insist(episode.start, temperature=1.0, max_new_tokens=9, seed=slot)
            for turn in range(4):
                insist(episode.model, random.integers(0, 50000, 5000), -random.random(5000), 0)
                insist(episode.environment, [1, 2, turn])
            insist(episode.finish, float(slot))
        wrote[f"{opened.id}/{slot}"] = episode._writer._sequence
    group.__exit__(None, None, None)
    time.sleep(0.02)
producer.close(180.0)
print(json.dumps({"held": held, "wrote": wrote}), flush=True)
"""


def hold(pid: int) -> None:
    """SIGSTOP, and wait until the process stands still: a busy machine takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def resident(process: psutil.Process, seconds: float) -> int:
    """The most that the process held, of samples over so many seconds."""
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, process.memory_info().rss)
        time.sleep(0.1)
    return most


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.soak)])
def test_broker_away_for_a_minute_is_backpressure_in_bounded_memory_and_nothing_is_lost_or_doubled(
    tmp_path: Path, run_name: str, how: str
) -> None:
    broker = start_broker(tmp_path, owner=True)
    kafka = {"bootstrap.servers": broker.bootstrap}
    topics = RunTopics(run_name)
    create_run(kafka, topics, scripted_settings())
    writer = subprocess.Popen([sys.executable, "-c", WRITER, json.dumps(kafka), run_name, str(QUEUE_BYTES)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        process = psutil.Process(writer.pid)
        before = resident(process, 5.0)
        if how == "stopped":
            hold(broker.pid)
            during = resident(process, AWAY_S)
            os.kill(broker.pid, signal.SIGCONT)
        else:
            broker.kill()
            during = resident(process, AWAY_S)
            broker = start_broker(tmp_path, owner=True)
        after = resident(process, 10.0)
        out, said = writer.communicate("\n", timeout=300)
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == 0 and said == "", said
    result = json.loads(out)
    assert result["held"] > 10
    # The queue, and as much again for what the client keeps of it; a minute's tokens would be far more.
    assert max(during, after) - before < 6 * QUEUE_BYTES, (before, during, after)
    found = defaultdict(list)
    for number in beginning_offsets(kafka, topics.name(TRAJECTORIES)):
        end = end_offsets(kafka, topics.name(TRAJECTORIES))[number]
        for record in read_range(kafka, topics.name(TRAJECTORIES), number, 0, end):
            event = decode(record.value)
            if isinstance(event, Lease):
                continue
            assert isinstance(event, EpisodeStarted | Span | EpisodeEnded) and event.attempt == 0
            found[f"{event.group}/{event.slot}"].append(event.sequence)
    assert {name: len(numbers) for name, numbers in found.items()} == result["wrote"]
    assert all(numbers == list(range(len(numbers))) for numbers in found.values())
    broker.stop()


@pytest.mark.slow
def test_closing_while_the_broker_is_away_says_what_is_unsent_by_episode(tmp_path: Path, run_name: str) -> None:
    broker = start_broker(tmp_path, owner=True)
    try:
        kafka = {"bootstrap.servers": broker.bootstrap}
        create_run(kafka, RunTopics(run_name), scripted_settings())
        producer = open_producer(run_name, kafka, unmanaged=True)
        with producer.group(TASK, 2) as group:
            producer.flush()
            hold(broker.pid)
            for slot in group.slots:
                with group.episode(slot) as episode:
                    episode.start(temperature=1.0, max_new_tokens=9, seed=slot)
                    if slot:
                        episode.model([1], [-0.5], version=0)
                        episode.finish(1.0)
        with pytest.raises(Undelivered, match="5 events unsent: .* within 1 s") as caught:
            producer.close(1.0)
        assert caught.value.unsent == {f"{group.id}/0 attempt 0": 2, f"{group.id}/1 attempt 0": 3}
        producer.close()  # again: nothing
    finally:
        os.kill(broker.pid, signal.SIGCONT)
        broker.stop()


LEFT_OPEN = """
import json, os, signal, sys, time
from headrace.producers import open_producer
from headrace.schemas.events import Task
producer = open_producer(sys.argv[2], json.loads(sys.argv[1]), unmanaged=True)
with producer.group(Task("mine", "jsonl", "{}", 0), 1) as group:
    producer.flush()
    os.kill(int(sys.argv[3]), signal.SIGSTOP)
    time.sleep(1.0)
    print(group.id)
    with group.episode(0) as episode:
        episode.start(temperature=1.0, max_new_tokens=9, seed=1)
        episode.finish(1.0)
"""


@pytest.mark.slow
def test_process_that_exits_without_closing_names_the_groups_whose_events_are_unsent(
    tmp_path: Path, run_name: str
) -> None:
    broker = start_broker(tmp_path, owner=True)
    try:
        kafka = {"bootstrap.servers": broker.bootstrap}
        create_run(kafka, RunTopics(run_name), scripted_settings())
        done = subprocess.run([sys.executable, "-c", LEFT_OPEN, json.dumps(kafka), run_name, str(broker.pid)],
                              capture_output=True, text=True, timeout=120)  # fmt: skip
    finally:
        os.kill(broker.pid, signal.SIGCONT)
        broker.stop()
    group = done.stdout.strip()
    assert f"ends without closing its producer, with 2 events unsent: {group}/0 attempt 0 (2)" in done.stderr


@pytest.mark.slow
def test_worker_whose_broker_was_away_keeps_its_leases_and_follows_the_weights(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "unit"))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(5)))
    broker = start_broker(tmp_path / "home", owner=True)
    kafka, topics = {"bootstrap.servers": broker.bootstrap}, RunTopics(run_name)
    run = scripted_settings(tasks={"source": "jsonl", "path": str(tasks), "score": "scorers:vowels"},
                            model={"path": "unused", "dtype": "float32"},
                            rollout={"group_size": 2, "lease_timeout_s": 6})  # fmt: skip
    trainer = ScriptedRun(kafka, topics, run, capacity=0)
    trainer.until(0)
    engine, stop = FakeEngine(), threading.Event()
    receiver = Receiver(kafka, topics, worker="w", incarnation="w0")
    assert receiver.load(engine, stop)
    worker = Worker(kafka, topics, run, engine, receiver, name="real", incarnation="w0", capacity=8)
    raised: list[BaseException] = []

    def caught(what: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                what()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    def outage() -> None:
        while trainer.version < 2:
            time.sleep(0.05)
        hold(broker.pid)
        time.sleep(20.0)  # three times the lease timeout
        os.kill(broker.pid, signal.SIGCONT)

    threads = [caught(lambda: worker.run(stop)), caught(outage)]
    try:
        trainer.until(8, timeout_s=240.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
        receiver.close()
        trainer.close()
    assert not raised, raised

    def events(topic: str) -> list[Any]:
        name = topics.name(topic)
        return [decode(r.value) for r in read_range(kafka, name, 0, 0, end_offsets(kafka, name)[0])]

    assert not [e for e in events(TASKS) if isinstance(e, LeaseEnded) and e.reason == "worker_lost"]
    assert {e.incarnation for e in events(FLEET) if isinstance(e, Heartbeat) and e.worker == "real"} == {"w0"}
    assert engine.version >= 7 and not receiver.refusals
    assert trainer._state["w"].bits.any() and engine.weights["w"].any()
    ledger = audit(open_run(run_name, kafka).snapshot())
    assert ledger.closes, ledger.failures
    broker.stop()
