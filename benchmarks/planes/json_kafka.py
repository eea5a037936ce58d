"""A pipeline of the same shape in JSON, as someone who knows Kafka well would write it, on the same broker and client.

A producer writes started, span and ended events with orjson; a grouper collects siblings in a dict and writes complete
groups with their input position in one transaction; a batcher reads the groups' small records and writes batches in
transactions. A restart begins at the oldest open group and skips the groups that are written already, so that a killed
process loses and doubles nothing. The grouper checks each span (as many log-probabilities as tokens, finite) and puts
the spans' JSON into the group as it came, without writing it anew.

What it doesn't do: leases and attempts (a repeated or competing producer would be taken twice), sequence gaps,
deadlines, token accounts, staleness, hashes that show a missing or altered record, re-reading under a memory budget.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import load

if TYPE_CHECKING:
    from .running import Ran, Work

NAME = "JSON pipeline (orjson)"
EVENTS, SAMPLES, GROUPS, BATCHES = "events", "samples", "groups", "batches"
PARTITIONS = 4
COMMIT_S = 0.2  # as Headrace's log.commit_ms
WAIT_S = 0.02


def producer(prefix: str, bootstrap: str, path: str, *_: str) -> None:
    import orjson

    from headrace.streams.log import clients

    groups = load.read(path)
    out = clients.producer({"bootstrap.servers": bootstrap})
    out.list_topics(timeout=30)
    topic, dumps, numpy = f"{prefix}.{EVENTS}", orjson.dumps, orjson.OPT_SERIALIZE_NUMPY
    _when_told()
    began = time.process_time()

    def send(key: bytes, event: dict[str, Any]) -> None:
        value = dumps(event, option=numpy)
        while True:
            try:
                out.produce(topic, value, key)
                return
            except BufferError:
                out.poll(0.05)

    for number, group in enumerate(groups):
        name = f"g{number:08d}"
        key = name.encode()
        for episode in group:
            who = {"group": name, "slot": episode.slot, "attempt": 0, "incarnation": "w0"}
            send(key, {"type": "started", **who, "sequence": 0, "worker": "w", "temperature": 1.0,
                       "max_new_tokens": 1024, "seed": episode.slot, "size": len(group),
                       "started_ms": int(time.time() * 1000)})  # fmt: skip
            send(key, {"type": "span", **who, "sequence": 1, "source": "prompt", "tokens": episode.prompt})
            parts = load.spans(episode)
            for sequence, part in enumerate(parts, 2):
                send(key, {"type": "span", **who, "sequence": sequence, "source": "model", "version": load.VERSION,
                           "tokens": episode.tokens[part], "logprobs": episode.logprobs[part]})  # fmt: skip
            send(key, {"type": "ended", **who, "sequence": 2 + len(parts), "outcome": "success", "reason": "stop",
                       "reward": episode.reward, "ended_ms": int(time.time() * 1000)})  # fmt: skip
            out.poll(0)
    left = out.flush(60)
    print(json.dumps({"cpu_s": time.process_time() - began, "left": left}), flush=True)


@dataclass(slots=True)
class _Group:
    first: int  # offset of its first event
    size: int
    spans: dict[int, list[bytes]] = field(default_factory=dict)  # slot -> JSON of its spans
    rewards: dict[int, float] = field(default_factory=dict)
    tokens: int = 0


def grouper(prefix: str, bootstrap: str, *_: str) -> None:
    import orjson

    from headrace.streams.log import clients

    events, samples, groups = (f"{prefix}.{name}" for name in (EVENTS, SAMPLES, GROUPS))
    kafka = {"bootstrap.servers": bootstrap}
    out = clients.transactional_producer({**kafka, "message.max.bytes": 8 << 20}, f"{prefix}.grouper", 60)
    out.init_transactions(60)
    consumer = clients.consumer({**kafka, "group.id": f"{prefix}.grouper"})
    done = {orjson.loads(value)["group"] for value in _whole(kafka, groups)}
    at = _assign(consumer, events)
    open_groups: list[dict[str, _Group]] = [{} for _ in range(PARTITIONS)]
    complete: list[tuple[int, str, _Group]] = []
    loads, running, next_commit = orjson.loads, _running(), 0.0
    print("grouping", flush=True)
    while running():
        for message in _poll(consumer):
            partition, value = message.partition(), message.value()
            at[partition] = message.offset() + 1
            event = loads(value)
            name = event["group"]
            if name in done:
                continue
            mine = open_groups[partition]
            kind, slot = event["type"], event["slot"]
            if kind == "started":
                group = mine.get(name) or mine.setdefault(name, _Group(message.offset(), event["size"]))
                group.spans[slot] = []
            elif kind == "span":
                group = mine[name]
                if event["source"] == "model":
                    logprobs = event["logprobs"]
                    if len(logprobs) != len(event["tokens"]) or None in logprobs:  # JSON has null for what isn't finite
                        raise ValueError(f"{events}[{partition}]@{message.offset()}: a bad span")
                    group.tokens += len(logprobs)
                group.spans[slot].append(value)
            else:
                group = mine[name]
                group.rewards[slot] = event["reward"]
                if len(group.rewards) == group.size:
                    complete.append((partition, name, group))
                    done.add(name)
                    del mine[name]
        if complete and time.monotonic() >= next_commit:
            out.begin_transaction()
            offsets = _send(out, samples, [
                (partition, name, orjson.dumps({"group": name, "episodes": [
                    {"slot": slot, "reward": group.rewards[slot], "spans": [orjson.Fragment(one) for one in spans]}
                    for slot, spans in sorted(group.spans.items())
                ]})) for partition, name, group in complete
            ])  # fmt: skip
            _send(out, groups, [
                (partition, name, orjson.dumps({"group": name, "partition": partition, "offset": offset,
                                                "tokens": group.tokens, "rewards": sorted(group.rewards.items())}))
                for (partition, name, group), offset in zip(complete, offsets, strict=True)
            ])  # fmt: skip
            low = [min((g.first for g in mine.values()), default=at[p]) for p, mine in enumerate(open_groups)]
            _commit(out, consumer, events, low)
            complete = []
            next_commit = time.monotonic() + COMMIT_S
    consumer.close()


def batcher(prefix: str, bootstrap: str, size: str, *_: str) -> None:
    import orjson

    from headrace.streams.log import clients

    groups, batches = f"{prefix}.{GROUPS}", f"{prefix}.{BATCHES}"
    kafka = {"bootstrap.servers": bootstrap}
    out = clients.transactional_producer(kafka, f"{prefix}.batcher", 60)
    out.init_transactions(60)
    consumer = clients.consumer({**kafka, "group.id": f"{prefix}.batcher"})
    written = [orjson.loads(value) for value in _whole(kafka, batches)]
    done = {one["group"] for batch in written for one in batch["groups"]}
    at, number, running = _assign(consumer, groups), len(written), _running()
    waiting: list[tuple[int, int, dict[str, Any]]] = []
    print("batching", flush=True)
    while running():
        for message in _poll(consumer):
            at[message.partition()] = message.offset() + 1
            group = orjson.loads(message.value())
            if group["group"] not in done:
                waiting.append((message.partition(), message.offset(), group))
        while len(waiting) >= int(size):
            taken, waiting = waiting[: int(size)], waiting[int(size) :]
            number += 1
            out.begin_transaction()
            value = orjson.dumps({"batch": number, "decided_ms": int(time.time() * 1000),
                                  "groups": [{**group, "at": offset} for _, offset, group in taken]})  # fmt: skip
            _send(out, batches, [(0, "", value)])
            low = [min((o for p, o, _ in waiting if p == partition), default=at[partition])
                   for partition in range(PARTITIONS)]  # fmt: skip
            _commit(out, consumer, groups, low)
    consumer.close()


def _poll(consumer: Any) -> list[Any]:
    first = consumer.poll(WAIT_S)
    messages = [*([first] if first else ()), *consumer.consume(1000, 0)]
    return [one for one in messages if one.error() is None]


def _assign(consumer: Any, topic: str) -> list[int]:
    """Go on from what was committed; the positions."""
    from confluent_kafka import TopicPartition

    committed = consumer.committed([TopicPartition(topic, p) for p in range(PARTITIONS)], timeout=30)
    places = [TopicPartition(topic, one.partition, max(0, one.offset)) for one in committed]
    consumer.assign(places)
    return [place.offset for place in sorted(places, key=lambda place: place.partition)]


def _send(out: Any, topic: str, records: list[tuple[int, str, bytes]]) -> list[int]:
    offsets = [-1] * len(records)

    def placed(index: int) -> Any:
        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                raise RuntimeError(error.str())
            offsets[index] = message.offset()

        return delivered

    for index, (partition, key, value) in enumerate(records):
        out.produce(topic, value, key, partition=partition, on_delivery=placed(index))
        out.poll(0)
    if out.flush(60) or -1 in offsets:
        raise RuntimeError(f"records of {topic} were not delivered")
    return offsets


def _commit(out: Any, consumer: Any, topic: str, low: list[int]) -> None:
    from confluent_kafka import TopicPartition

    places = [TopicPartition(topic, partition, offset) for partition, offset in enumerate(low)]
    out.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 60)
    out.commit_transaction(60)


def _whole(kafka: dict[str, str], topic: str) -> list[bytes]:
    """Every committed value of a topic."""
    from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range

    begin, end = beginning_offsets(kafka, topic), end_offsets(kafka, topic)
    return [r.value or b"" for p in end for r in read_range(kafka, topic, p, begin[p], end[p])]


def _running() -> Any:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    return lambda: not stopped


def _when_told() -> None:
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1})


_runs = itertools.count()


def run(work: Work, kill: bool) -> Ran:
    from headrace.schemas.topics import TopicSpec
    from headrace.streams.log import clients

    from .running import Process, module, names, on_broker

    prefix = f"json{next(_runs)}"
    config = {"compression.type": "producer", "max.message.bytes": "8388608"}
    topics = [f"{prefix}.{name}" for name in (EVENTS, SAMPLES, GROUPS, BATCHES)]
    clients.create_topics({"bootstrap.servers": work.bootstrap}, [
        TopicSpec(name, 1 if name.endswith(BATCHES) else PARTITIONS, 1, config) for name in topics
    ])  # fmt: skip

    def argv(role: str, *more: object) -> tuple[str, ...]:
        return module("json_kafka", role, prefix, work.bootstrap, *more)

    processes = [Process("grouper", argv("grouper"), "grouping"),
                 Process("batcher", argv("batcher", work.batch), "batching")]  # fmt: skip
    return on_broker(work, processes, Process("producer", argv("producer", work.path), "ready"), topics[-1], names,
                     topics, "grouper" if kill else None)  # fmt: skip


ROLES: dict[str, Callable[..., None]] = {"producer": producer, "grouper": grouper, "batcher": batcher}

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    ROLES[sys.argv[1]](*sys.argv[2:])
