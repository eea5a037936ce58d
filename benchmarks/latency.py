"""From the end of a group's last sibling to a manifest that a reader sees, through the real broker.

Assembler and coordinator run as `headrace start` runs them, each a process. A worker without a model takes leases,
samples all of a group's tokens and then, at times that know nothing of the commit interval, ends its last sibling. The
clock runs from just before that record is handed to the producer until a read-committed reader of `batches` has the
manifest; each manifest holds one group. Versions are published as fast as manifests come, so that nothing waits for a
trainer.
"""

from __future__ import annotations

import argparse
import queue
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.schemas.codec import decode, encode
from headrace.schemas.events import Heartbeat, Lease, Manifest
from headrace.schemas.topics import BATCHES, FLEET, TASKS
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader, end_offsets

from . import harness
from .harness import CannotMeasure, Result
from .streams_load import Rollouts, Trainer, create, role, settings

INTERVALS_MS = (100, 500)
GROUPS_PER_S = 8.0  # moderate: 8 groups of 8 siblings, 16,000 tokens a second
TOKENS = 256
SETTLE = 10  # the first groups meet processes that have just started


def measure(options: argparse.Namespace, result: Result) -> None:
    groups = 40 if options.quick else 600
    with harness.temporary_broker() as broker:
        kafka = harness.kafka_of(broker)
        for interval in INTERVALS_MS:
            waits = _waits(kafka, f"latency-{interval}", interval, groups)
            p50, p99 = np.percentile(waits, (50, 99)) * 1000
            subject = f"committed every {interval} ms"
            result.row("last end to manifest, p50", subject, float(p50), "ms")
            result.row("last end to manifest, p99", subject, float(p99), "ms")
            result.row("last end to manifest, longest", subject, max(waits) * 1000, "ms")
            result.at_most(f"p99 under twice {interval} ms and 100 ms", float(p99), 2 * interval + 100)
    result.note(f"{groups} groups of 8 siblings, {TOKENS} tokens each, about {GROUPS_PER_S:g} groups a second.")


def _waits(kafka: Mapping[str, Any], run: str, interval_ms: int, groups: int) -> list[float]:
    """Seconds, of each group."""
    rules = settings(commit_ms=interval_ms, room=32)
    topics, bootstrap = create(kafka, run, rules), str(kafka["bootstrap.servers"])
    trainer = Trainer(kafka, topics)
    tasks, fleet, batches = topics.name(TASKS), topics.name(FLEET), topics.name(BATCHES)
    with (
        role("assembler", run, bootstrap), role("coordinator", run, bootstrap),
        Reader(kafka, {(tasks, 0): end_offsets(kafka, tasks)[0]}) as reader, _watched(kafka, batches) as manifests,
    ):  # fmt: skip
        trainer.publish(0)
        incarnation = f"w-{time.monotonic_ns():x}"
        beats, rollouts = clients.producer(kafka), Rollouts(kafka, topics, incarnation)
        draw, beat, due, published = random.Random(0), 0.0, 0.0, 0
        ready: list[str] = []
        ended: dict[str, float] = {}
        waits: list[float] = []
        give_up = time.monotonic() + 120 + 20 * groups / GROUPS_PER_S
        while len(waits) < groups + SETTLE:
            now = time.monotonic()
            if now > give_up:
                raise CannotMeasure(f"only {len(waits)} manifests came")
            if now - beat > 0.5:
                beat = now
                alive = Heartbeat("w", incarnation, published, 10_000, 10_000, True, "{}", {})
                beats.produce(fleet, encode(alive), key="w")
            beats.poll(0)
            if ready and now >= due:
                group = ready.pop(0)
                ended[group] = time.monotonic()
                rollouts.end(group, 7, 2)
                due = now + draw.expovariate(GROUPS_PER_S)
            for record in reader.poll(100, 0.001):
                event = decode(record.value)
                if isinstance(event, Lease) and event.incarnation == incarnation:
                    rollouts.all_but_the_end(event.group, TOKENS)
                    for slot in range(7):
                        rollouts.end(event.group, slot, 2)
                    ready.append(event.group)
            while not manifests.empty():
                seen, manifest = manifests.get()
                waits += [seen - ended[ref.group] for ref in manifest.groups]
                published += 1
                trainer.publish(published)
        trainer.close()
    return waits[SETTLE:]


@contextmanager
def _watched(kafka: Mapping[str, Any], batches: str) -> Iterator[queue.SimpleQueue[tuple[float, Manifest]]]:
    """Manifests with the time at which they were seen, by a thread that does nothing else."""
    seen: queue.SimpleQueue[tuple[float, Manifest]] = queue.SimpleQueue()
    stop = threading.Event()

    def watch() -> None:
        with Reader(kafka, {(batches, 0): 0}) as reader:
            while not stop.is_set():
                for record in reader.poll(100, 0.1):
                    now, event = time.monotonic(), decode(record.value)
                    if isinstance(event, Manifest):
                        seen.put((now, event))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("latency", __doc__, measure, argv)


if __name__ == "__main__":
    raise SystemExit(main())
