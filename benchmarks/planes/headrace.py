"""Headrace itself: a worker without a model, the assembler and the coordinator, each a process, on a real broker.

The worker takes leases, writes every event of its episodes through the code that real workers use (EpisodeWriter,
Outbox) and reports to the coordinator; it hands over whole completions. Version 0 is published at the start, and the
room is wide enough for all groups, so that nothing waits for a trainer. What holds: exactly one fate for each group,
every token in one account, any process may be killed at any time.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import load

if TYPE_CHECKING:
    from headrace.schemas.settings import RunSettings
    from headrace.schemas.topics import RunTopics

    from .running import Ran, Work

NAME = "Headrace"
DAY_S = 86_400.0  # longer than anything here: no deadline or lease runs out


# ---------------------------------------------------------------------------------------------------------- processes


def _stop_on_term() -> threading.Event:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def assembler(run: str, bootstrap: str, *_: str) -> None:
    from headrace.schemas.topics import RunTopics
    from headrace.streams.assembling import run_assembler
    from headrace.streams.log.policy import open_settings

    kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
    began = time.process_time()
    run_assembler(kafka, topics, open_settings(kafka, topics).settings, _stop_on_term())
    print(json.dumps({"cpu_s": time.process_time() - began}), flush=True)


def coordinator(run: str, bootstrap: str, *_: str) -> None:
    from headrace.schemas.topics import RunTopics
    from headrace.streams.coordinating import run_coordinator
    from headrace.streams.log.policy import open_settings
    from headrace.streams.tasks import task_source

    kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
    settings = open_settings(kafka, topics).settings
    run_coordinator(kafka, topics, settings, _stop_on_term(), task_source(settings.tasks))


def worker(run: str, bootstrap: str, path: str, *_: str) -> None:
    """Serve leases with the episodes of the load, in order, from the first on."""
    from headrace.producers.outbox import Outbox
    from headrace.schemas.codec import decode
    from headrace.schemas.events import Heartbeat, Lease
    from headrace.schemas.topics import FLEET, TASKS, TRAJECTORIES, RunTopics
    from headrace.streams.log.reader import Reader, end_offsets

    groups = load.read(path)
    kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
    tasks, fleet, trajectories = topics.name(TASKS), topics.name(FLEET), topics.name(TRAJECTORIES)
    reader = Reader(kafka, {(tasks, 0): end_offsets(kafka, tasks)[0]})
    outbox = Outbox(kafka)
    slots, incarnation, done, beat = sum(map(len, groups)), f"w-{time.monotonic_ns():x}", 0, 0.0
    _when_told()
    began = time.process_time()
    while done < len(groups):
        if time.monotonic() - beat >= 1.0:
            beat, size = time.monotonic(), len(groups[0])
            free = slots - done * size
            outbox.put(fleet, "w", Heartbeat("w", incarnation, 0, slots, free, True, "{}", {}), wait_s=60)
        for record in reader.poll(100, 0.05):
            lease = decode(record.value)
            if isinstance(lease, Lease) and lease.incarnation == incarnation and done < len(groups):
                for assignment in lease.assignments:
                    episode = groups[done][assignment.slot]
                    _write(lease.group, incarnation, episode,
                           lambda key, event: outbox.put(trajectories, key, event, wait_s=60))  # fmt: skip
                    outbox.poll()
                done += 1
    outbox.close(60)  # what it couldn't send will not arrive
    print(json.dumps({"cpu_s": time.process_time() - began}), flush=True)


def _write(group: str, incarnation: str, episode: load.Episode, send: Any) -> None:
    from headrace.producers.episodes import Attempt, EpisodeWriter
    from headrace.schemas.outcomes import Boundary, Outcome, Source

    writer = EpisodeWriter(Attempt(group, episode.slot, 0, incarnation), send, load.SPAN_TOKENS)
    writer.start(worker="w", engine={}, temperature=1.0, max_new_tokens=1024, seed=episode.slot)
    writer.context(episode.prompt, Source.PROMPT)
    writer.model(episode.tokens, episode.logprobs, load.VERSION)
    good = episode.reward > 0
    writer.end(Outcome.MODEL_SUCCESS if good else Outcome.MODEL_FAILURE, "stop",
               Boundary.NONE if good else Boundary.MODEL, reward=episode.reward,
               rewards={"score": episode.reward})  # fmt: skip


def fill(run: str, bootstrap: str, path: str, *_: str) -> None:
    """Write what `trajectories` holds of the load, opening records too, without a coordinator."""
    from headrace.producers.outbox import Outbox
    from headrace.schemas.events import Assignment, Lease, Task
    from headrace.schemas.outcomes import Purpose
    from headrace.schemas.topics import TRAJECTORIES, RunTopics
    from headrace.streams.log.policy import open_settings

    kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
    spec, name, outbox = open_settings(kafka, topics).settings.spec(), topics.name(TRAJECTORIES), Outbox(kafka)
    task = Task("chain_sum-0-0", "reasoning_gym", "{}", 0)
    for number, group in enumerate(load.read(path)):
        key = f"g{number:08d}"
        lease = Lease(key, number, True, False, "w", "w0", Purpose.TRAIN, 0,
                      tuple(Assignment(e.slot, 0) for e in group), spec, task, number + 1, None)  # fmt: skip
        outbox.put(name, key, lease, wait_s=60)
        for episode in group:
            _write(key, "w0", episode, lambda key, event: outbox.put(name, key, event, wait_s=60))
        outbox.poll()
    outbox.close(60)


def bare(run: str, bootstrap: str, columns: str, *_: str) -> None:
    """Consume and decode `trajectories` to its end, and nothing else; with `columns`, to arrays."""
    from confluent_kafka import TopicPartition

    from headrace.schemas.codec import decode
    from headrace.schemas.events import Span
    from headrace.schemas.topics import TRAJECTORIES, RunTopics
    from headrace.streams.log import clients

    name = RunTopics(run).name(TRAJECTORIES)
    consumer = clients.consumer({"bootstrap.servers": bootstrap})
    ends = {p: consumer.get_watermark_offsets(TopicPartition(name, p))[1] for p in clients.partitions(consumer, name)}
    began, ended, records = time.process_time(), 0, 0
    consumer.assign([TopicPartition(name, p, 0) for p in ends])
    while ended < len(ends):
        first = consumer.poll(1.0)
        for message in (*([first] if first else ()), *consumer.consume(1000, 0)):
            if message.error() is not None:
                ended += 1  # the end of a partition: nothing else is reported here
                continue
            event = decode(message.value())
            records += 1
            if columns == "columns" and isinstance(event, Span):
                event.token_ids()
                event.behaviour_logprobs()
    print(json.dumps({"cpu_s": time.process_time() - began, "records": records}), flush=True)


def _when_told() -> None:
    """Say that all is prepared; go on at SIGUSR1."""
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})


ROLES: dict[str, Callable[..., None]] = {
    "assembler": assembler, "coordinator": coordinator, "worker": worker, "fill": fill, "bare": bare,
}


# ------------------------------------------------------------------------------------------------------- measurement


def settings(groups: int, batch: int) -> RunSettings:
    from headrace.schemas.settings import RunSettings

    batches = -(-groups // batch)
    return RunSettings.model_validate({
        "model": {"path": "unused", "max_length": 1 << 20},
        "tasks": {"dataset": "chain_sum", "size": groups},
        "rollout": {"group_size": 8, "max_new_tokens": 1 << 19, "lease_timeout_s": DAY_S, "deadline_s": DAY_S,
                    "max_age_s": DAY_S},
        "batch": {"groups": batch, "max_lag": batches, "max_ahead": batches},
        "staleness": {"hard_lag": batches + 1},
    })  # fmt: skip


def publish_first(kafka: dict[str, Any], topics: RunTopics) -> None:
    """Version 0 and its publication, as a trainer writes them."""
    from headrace.schemas.chain import Chain
    from headrace.schemas.events import Publication, Version
    from headrace.schemas.hashes import digest
    from headrace.schemas.topics import POLICY
    from headrace.streams.log.policy import open_settings
    from headrace.streams.log.transactions import Output, Transactor

    chain, now = Chain(0, digest(open_settings(kafka, topics).value)), int(time.time() * 1000)
    version = Version(**chain.link(), writer="trainer", version=0, parent=-1, batch=-1, batch_offset=-1,
                      batch_digest=b"", hash_algorithm="none", served_hash=b"0", train_hash=b"", rho=0.0, rho_tokens=0,
                      groups=(), metrics={}, fingerprint="{}", committed_ms=now)  # fmt: skip
    first = chain.extend(version)
    publication = Publication(**chain.link(), writer="trainer", version=0, kind="path", base=-1, base_hash=b"",
                              hash_algorithm="none", served_hash=b"0", path="unused", chunks=(), size=0, changed=0,
                              elements=0, published_ms=now)  # fmt: skip
    transactor = Transactor(kafka, topics.transactional_id("trainer"))
    transactor.send([Output(topics.name(POLICY), 0, value) for value in (first, chain.extend(publication))])
    transactor.close()


BARE = "consume + decode"
COLUMNS = "consume + decode + columns"
_runs = itertools.count()


def _run(work: Work) -> tuple[RunTopics, Callable[..., tuple[str, ...]]]:
    """A new run, and how its processes are started."""
    from headrace.create import create_run
    from headrace.schemas.topics import RunTopics

    from .running import module

    topics, kafka = RunTopics(f"p{next(_runs)}"), {"bootstrap.servers": work.bootstrap}
    create_run(kafka, topics, settings(work.groups, work.batch))
    return topics, lambda role, *more: module("headrace", role, topics.run, work.bootstrap, *more)


def run(work: Work, kill: bool) -> Ran:
    from headrace.schemas.codec import decode
    from headrace.schemas.events import Manifest
    from headrace.schemas.topics import ALL_TOPICS, BATCHES

    from .running import Process, on_broker

    topics, argv = _run(work)
    publish_first({"bootstrap.servers": work.bootstrap}, topics)

    def groups_of(value: bytes) -> list[str]:
        event = decode(value)
        return [ref.group for ref in event.groups] if isinstance(event, Manifest) else []

    processes = [Process("assembler", argv("assembler"), "assembling"),
                 Process("coordinator", argv("coordinator"), "coordinating")]  # fmt: skip
    return on_broker(work, processes, Process("worker", argv("worker", work.path), "ready"), topics.name(BATCHES),
                     groups_of, [topics.name(topic) for topic in ALL_TOPICS],
                     "assembler" if kill else None)  # fmt: skip


def assembler_and_bare(work: Work) -> dict[str, float]:
    """CPU seconds of the assembler, and of consuming and decoding the same records."""
    from headrace.schemas.codec import kind_of
    from headrace.schemas.events import GroupClosed
    from headrace.schemas.topics import GROUPS
    from headrace.streams.log.reader import Reader

    from ..harness import CannotMeasure, Started, run_process

    topics, argv = _run(work)
    if (filled := run_process(argv("fill", work.path))).code:
        raise CannotMeasure(f"the load couldn't be written:\n{filled.output[-2000:]}")
    out: dict[str, float] = {}
    name, partitions = topics.name(GROUPS), settings(work.groups, work.batch).log.partitions
    with Started(argv("assembler")) as process:
        closed, end = 0, time.monotonic() + 300
        with Reader({"bootstrap.servers": work.bootstrap}, {(name, p): 0 for p in range(partitions)}) as reader:
            while closed < work.groups:
                closed += sum(kind_of(record.value) is GroupClosed for record in reader.poll(1000, 0.02))
                if not process.alive() or time.monotonic() > end:
                    raise CannotMeasure(f"the assembler closed {closed} groups:\n{process.output()[-2000:]}")
        process.signal(signal.SIGTERM)
        out["assembler"] = float(process.wait(60).last_json()["cpu_s"])
    for bare, how in ((BARE, "objects"), (COLUMNS, "columns")):
        out[bare] = float(run_process(argv("bare", how)).last_json()["cpu_s"])
    return out


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # before any thread: the worker waits for it
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    ROLES[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
