"""Quix Streams: stateful stream processing in Python on Kafka, on the same broker, with processing "exactly-once".

One application (its authors run one process per replica) with two stateful dataframes. The first is keyed by group: the
spans of a group lie in its state store (RocksDB, with a changelog topic), each under a key of its own, so that no span
is written twice; with the last sibling's end the group goes to `samples` whole and to `groups` in short. The second is
keyed by a constant and makes batches. Values are JSON (orjson is what the library itself uses), compression is zstd,
commits come every 0.2 s as in Headrace, and the producer is the library's own.

What it doesn't do: leases and attempts, sequence gaps, deadlines of groups (there are windows, by time), token
accounts, staleness, hashes. State is written to disk and to the changelog, so each span is on the broker twice.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import load
from .venvs import Venv

if TYPE_CHECKING:
    from .running import Ran, Work

NAME = "Quix Streams"
VENV = Venv("quixstreams", ("quixstreams==3.28.1", "numpy==2.3.5"))
EVENTS, SAMPLES, GROUPS, BATCHES = "events", "samples", "groups", "batches"
PARTITIONS = 4
COMMIT_S = 0.2
PRODUCER = {"compression.type": "zstd", "linger.ms": 5, "enable.idempotence": True, "acks": "all",
            "retry.backoff.ms": 10, "message.max.bytes": 8 << 20}  # fmt: skip


def producer(prefix: str, bootstrap: str, path: str, *_: str) -> None:
    import orjson
    from quixstreams import Application

    groups = load.read(path)
    app = Application(broker_address=bootstrap, consumer_group=prefix, producer_extra_config=PRODUCER, loglevel="ERROR")
    topic = f"{prefix}.{EVENTS}"
    with app.get_producer() as out:
        print("ready", flush=True)
        signal.sigwait({signal.SIGUSR1})
        began = time.process_time()
        for number, group in enumerate(groups):
            name = f"g{number:08d}"
            for episode in group:
                sequences = itertools.count()
                parts = load.spans(episode)
                events: list[dict[str, Any]] = [
                    {"type": "started", "worker": "w", "temperature": 1.0, "max_new_tokens": 1024,
                     "seed": episode.slot, "size": len(group), "started_ms": int(time.time() * 1000)},
                    {"type": "span", "source": "prompt", "tokens": episode.prompt},
                    *({"type": "span", "source": "model", "version": load.VERSION, "tokens": episode.tokens[part],
                       "logprobs": episode.logprobs[part]} for part in parts),
                    {"type": "ended", "outcome": "success", "reason": "stop", "reward": episode.reward,
                     "size": len(group), "ended_ms": int(time.time() * 1000)},
                ]  # fmt: skip
                for event in events:
                    event |= {"group": name, "slot": episode.slot, "attempt": 0, "incarnation": "w0",
                              "sequence": next(sequences)}  # fmt: skip
                    out.produce(topic, orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY), name)
        out.flush(60)
    print(json.dumps({"cpu_s": time.process_time() - began, "left": 0}), flush=True)


def app(prefix: str, bootstrap: str, size: str, state_dir: str, *_: str) -> None:
    from quixstreams import Application
    from quixstreams.models import TopicConfig

    application = Application(
        broker_address=bootstrap, consumer_group=prefix, auto_offset_reset="earliest", commit_interval=COMMIT_S,
        processing_guarantee="exactly-once", state_dir=state_dir, producer_extra_config=PRODUCER, loglevel="ERROR",
        # As in Headrace's consumers; a killed member's partitions come back after the session's time-out.
        consumer_extra_config={"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000},
        consumer_poll_timeout=0.05,
    )  # fmt: skip

    def topic(name: str, partitions: int) -> Any:
        return application.topic(
            f"{prefix}.{name}", key_serializer="str", key_deserializer="str", value_serializer="json",
            value_deserializer="json", config=TopicConfig(partitions, 1, extra_config={"max.message.bytes": "8388608"}),
        )  # fmt: skip

    groups, batches = topic(GROUPS, 1), topic(BATCHES, 1)
    siblings = application.dataframe(topic(EVENTS, PARTITIONS))
    siblings = siblings.apply(_collect, stateful=True).filter(lambda group: group is not None)
    siblings = siblings.to_topic(topic(SAMPLES, PARTITIONS), key=lambda group: group["group"])
    siblings = siblings.apply(lambda group: {"group": group["group"], "rewards": group["rewards"]})
    siblings.to_topic(groups, key=lambda group: "all")
    made = application.dataframe(groups)
    made = made.apply(lambda group, state: _batch(group, state, int(size)), stateful=True)
    made.filter(lambda batch: batch is not None).to_topic(batches, key=lambda batch: "all")
    print("running", flush=True)
    application.run()


def _collect(event: dict[str, Any], state: Any) -> dict[str, Any] | None:
    """A group, with its last sibling's end."""
    kind, slot = event["type"], event["slot"]
    if kind == "span":
        state.set(f"{slot}/{event['sequence']}", event)
        return None
    if kind == "started":
        return None
    about = state.get("ended", default={})
    about[str(slot)] = [event["reward"], event["sequence"]]
    if len(about) < event["size"]:
        state.set("ended", about)
        return None
    episodes = []
    for one, (reward, last) in sorted(about.items()):
        keys = [f"{one}/{sequence}" for sequence in range(1, last)]
        episodes.append({"slot": int(one), "reward": reward, "spans": [state.get(key) for key in keys]})
        for key in keys:
            state.delete(key)
    state.delete("ended")
    return {"group": event["group"], "episodes": episodes, "rewards": [episode["reward"] for episode in episodes]}


def _batch(group: dict[str, Any], state: Any, size: int) -> dict[str, Any] | None:
    waiting = [*state.get("waiting", default=[]), group]
    if len(waiting) < size:
        state.set("waiting", waiting)
        return None
    number = state.get("number", default=0) + 1
    state.set("number", number)
    state.set("waiting", [])
    return {"batch": number, "decided_ms": int(time.time() * 1000), "groups": waiting}


_runs = itertools.count()


def run(work: Work, kill: bool) -> Ran:
    from headrace.schemas.topics import TopicSpec
    from headrace.streams.log import clients

    from .running import Process, module, names, on_broker

    python, prefix = VENV.make(), f"quix{next(_runs)}"
    topics = [f"{prefix}.{name}" for name in (EVENTS, SAMPLES, GROUPS, BATCHES)]
    config = {"compression.type": "producer", "max.message.bytes": "8388608"}
    clients.create_topics({"bootstrap.servers": work.bootstrap}, [
        TopicSpec(name, PARTITIONS if i < 2 else 1, 1, config) for i, name in enumerate(topics)
    ])  # fmt: skip
    changelogs = [f"changelog__{prefix}--{prefix}.{name}--default" for name in (EVENTS, GROUPS)]
    one = Process("application", module("quix", "app", prefix, work.bootstrap, work.batch, work.folder / prefix,
                                        python=python), "running")  # fmt: skip
    made = Process("producer", module("quix", "producer", prefix, work.bootstrap, work.path, python=python), "ready")
    return on_broker(work, [one], made, topics[-1], names, [*topics, *changelogs], one.name if kill else None)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    roles: dict[str, Callable[..., None]] = {"producer": producer, "app": app}
    roles[sys.argv[1]](*sys.argv[2:])
