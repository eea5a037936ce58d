"""The way onto the log, against the real broker."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headrace.broker import Broker, start_broker
from headrace.consumers import audit, open_run
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.outbox import Outbox
from headrace.schemas.codec import decode
from headrace.schemas.errors import Backpressure, NoProgress, RunConflict, RunNotFound
from headrace.schemas.events import EpisodeEnded, Lease, Span, Task, Tick
from headrace.schemas.settings import ModelSettings, RunSettings, TaskSettings
from headrace.schemas.topics import TRAJECTORIES, RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from tests.scripted_run import ScriptedRun, scripted_settings


def settings(**over: Any) -> RunSettings:
    return RunSettings(model=ModelSettings(path="unused"), tasks=TaskSettings(dataset="chain_sum"), **over)


def trajectories(kafka: dict[str, Any], topics: RunTopics) -> list[Any]:
    name = topics.name(TRAJECTORIES)
    ends = end_offsets(kafka, name)
    return [decode(r.value) for p, begin in beginning_offsets(kafka, name).items()
            for r in read_range(kafka, name, p, begin, ends[p])]  # fmt: skip


def test_run_is_created_once_and_other_settings_are_refused_with_the_difference(
    kafka: dict[str, Any], run_name: str
) -> None:
    topics = RunTopics(run_name)
    assert create_run(kafka, topics, settings())
    assert not create_run(kafka, topics, settings())
    assert open_settings(kafka, topics).settings == settings()
    with pytest.raises(RunConflict, match="seed: the run has 0, given 5"):
        create_run(kafka, topics, settings(seed=5))
    with pytest.raises(RunNotFound, match=run_name):
        open_settings(kafka, RunTopics("nothing-here"))


def test_unmanaged_producer_writes_its_groups_itself_and_a_raising_sibling_disturbs_no_other(
    kafka: dict[str, Any], run_name: str
) -> None:
    topics = RunTopics(run_name)
    create_run(kafka, topics, settings())
    task = Task("mine", "jsonl", "{}", 0)
    with open_producer(run_name, kafka, unmanaged=True) as producer, producer.group(task, 3) as group:
        for slot in group.slots:
            try:
                with group.episode(slot) as episode:
                    episode.start(temperature=1.0, max_new_tokens=4, seed=slot)
                    episode.prompt([1, 2])
                    episode.model([3, 4], [-0.1, -0.2], version=0)
                    if slot == 1:
                        raise RuntimeError("the agent broke")
                    episode.finish(1.0 if slot else None)
            except RuntimeError:
                pass
    found = trajectories(kafka, topics)
    leases = [e for e in found if isinstance(e, Lease)]
    assert [(e.unmanaged, e.opens, len(e.assignments)) for e in leases] == [(True, True, 3)]
    ends = {e.slot: (e.outcome, e.boundary) for e in found if isinstance(e, EpisodeEnded)}
    assert ends == {0: ("infra_failure", "scorer"), 1: ("infra_failure", "producer"), 2: ("model_success", "none")}
    for span in found:
        if isinstance(span, Span):
            span.check()


def test_producer_without_a_coordinator_is_told_so(kafka: dict[str, Any], run_name: str) -> None:
    create_run(kafka, RunTopics(run_name), settings())
    with open_producer(run_name, kafka) as producer, pytest.raises(NoProgress, match="coordinator gave no group"):
        with producer.group(wait_s=1.0):
            pass


def test_managed_producer_is_given_a_group_and_what_it_writes_is_trained_like_a_workers(
    kafka: dict[str, Any], run_name: str
) -> None:
    run = ScriptedRun(kafka, RunTopics(run_name), scripted_settings())
    try:
        with ThreadPoolExecutor(1) as pool, open_producer(run_name, kafka) as producer:
            driven = pool.submit(run.until, 4, 240.0)
            with producer.group(size=3, wait_s=200.0) as group:
                assert group.slots == [0, 1, 2] and group.task.source == "reasoning_gym"
                for slot in group.slots:
                    with group.episode(slot) as episode:
                        episode.start(temperature=1.0, max_new_tokens=4, seed=slot)
                        episode.prompt([1, 2])
                        episode.model([3, 4], [-0.1, -0.2], version=0)
                        episode.finish(float(slot == 1))
            producer.flush()
            driven.result()
        run.until(6, 240.0)  # whatever was ready by then has been batched
    finally:
        run.close()
    opened = open_run(run_name, kafka)
    view = next(view for view in opened.groups() if view.id == group.id)
    assert view.closure == "candidate" and view.disposition == "batched"
    ledger = audit(opened.snapshot())
    assert ledger.closes, ledger.failures


@pytest.mark.slow
def test_outage_is_backpressure_and_afterwards_nothing_is_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, run_name: str
) -> None:
    home = tmp_path_factory.mktemp("outage")
    broker: Broker = start_broker(home, owner=True)
    kafka = {"bootstrap.servers": broker.bootstrap}
    topics = RunTopics(run_name)
    create_run(kafka, topics, settings())
    outbox = Outbox(kafka, max_bytes=256 << 10)
    name, sent = topics.name(TRAJECTORIES), 0
    filler = "x" * 2000
    outbox.put(name, "g", Tick(filler, sent))
    sent += 1
    assert not outbox.flush(10).events
    broker.kill()
    with pytest.raises(Backpressure, match="nothing was lost"):
        while sent < 10_000:
            outbox.put(name, "g", Tick(filler, sent), wait_s=0.2)
            sent += 1
    assert sent < 1000  # the queue is bounded
    broker = start_broker(home, owner=True)
    outbox.put(name, "g", Tick(filler, sent), wait_s=30.0)
    assert not outbox.close(60.0).events
    numbers = [e.number for e in trajectories(kafka, topics) if isinstance(e, Tick)]
    assert numbers == list(range(sent + 1)) and not outbox.take_failures()
    broker.stop()


def test_process_that_exits_without_closing_says_so(kafka: dict[str, Any], run_name: str) -> None:
    code = (
        "from headrace.producers.outbox import Outbox\n"
        "from headrace.schemas.events import Tick\n"
        "box = Outbox({'bootstrap.servers': '127.0.0.1:1'})\n"
        f"box.put('{run_name}', None, Tick('w', 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "1 events unsent" in done.stderr


def test_long_episode_costs_bounded_time_to_write(kafka: dict[str, Any], run_name: str) -> None:
    """A million tokens in one episode arrive whole, in spans of the set size."""
    topics = RunTopics(run_name)
    create_run(kafka, topics, settings())
    tokens = np.arange(1_000_000) % 50_000
    with open_producer(run_name, kafka, unmanaged=True) as producer:
        with producer.group(Task("long", "jsonl", "{}", 0), 1) as group, group.episode(0) as episode:
            episode.start(temperature=1.0, max_new_tokens=1, seed=0)
            for begin in range(0, len(tokens), 100_000):
                part = tokens[begin : begin + 100_000]
                episode.model(part, np.full(len(part), -1.0), version=0)
                while producer.flush(10):
                    time.sleep(0.01)
            episode.finish(0.0)
    spans = sorted((e for e in trajectories(kafka, topics) if isinstance(e, Span)), key=lambda s: s.sequence)
    assert np.array_equal(np.concatenate([s.token_ids() for s in spans]), tokens)
    assert max(s.count for s in spans) == settings().log.span_tokens
