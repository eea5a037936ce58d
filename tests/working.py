"""A real worker whose loop the test turns, with leases by hand: for tests of what happens while weights change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.producers.receiver import Receiver
from headrace.producers.toolloop import ToolLoop
from headrace.producers.worker import Worker
from headrace.schemas.codec import decode, encode
from headrace.schemas.events import EpisodeEnded, Event, GroupSpec, Span, Task
from headrace.schemas.outcomes import Source
from headrace.schemas.topics import TASKS, TRAJECTORIES
from headrace.streams.log.reader import end_offsets, read_range
from headrace.streams.log.transactions import Output
from tests.publishing import Publishing
from tests.scripted import lease, spec

SLOTS, NEW = 2, 60
TASK = Task("t", "jsonl", json.dumps({"score": "scorers:vowels", "item": {"prompt": "Say it."}}), 0)


class Working:
    """A worker whose loop the test turns, with leases by hand."""

    def __init__(self, source: Publishing, engine: Any, incarnation: str = "i", tools: ToolLoop | None = None) -> None:
        self.source, self.engine, self.incarnation = source, engine, incarnation
        self.receiver = Receiver(source.kafka, source.topics, worker="w", incarnation=incarnation,
                                 initial=lambda: source.history[0])  # fmt: skip
        assert self.receiver.load(self.engine)
        self.worker = Worker(source.kafka, source.topics, source.settings, self.engine, self.receiver, name="w",
                             incarnation=incarnation, capacity=8, tools=tools)  # fmt: skip
        self._leases = 0

    def lease(self, group: str, assignments: dict[int, int] | None = None, *, task: Task = TASK,
              rules: GroupSpec | None = None, **over: Any) -> None:  # fmt: skip
        rules = rules or spec(SLOTS, max_tokens=NEW)
        one = replace(lease(group, assignments, rules=rules, incarnation=self.incarnation, opens=assignments is None,
                            **over), task=task, number=self._leases)  # fmt: skip
        self._leases += 1
        self.source.send(Output(self.source.topics.name(TASKS), 0, encode(one)))

    def until(self, condition: Callable[[], bool], seconds: float = 180.0) -> None:
        end, due = time.monotonic() + seconds, 0.0
        while True:
            if time.monotonic() > due:  # most conditions read a topic
                if condition():
                    return
                due = time.monotonic() + 1.0
            assert time.monotonic() < end, "it did not happen in time"
            self.worker.turn()

    def sample(self, tokens: int) -> None:
        while self.worker._counters["sampled_tokens"] < tokens:
            self.worker.turn()

    def events(self, topic: str, kind: type[Event]) -> list[Any]:
        name = self.source.topics.name(topic)
        found = [decode(r.value) for r in read_range(self.source.kafka, name, 0, 0, end_offsets(self.source.kafka,
                 name)[0])]  # fmt: skip
        return [one for one in found if isinstance(one, kind)]

    def ended(self, group: str, slots: int = SLOTS) -> bool:
        return len([one for one in self.events(TRAJECTORIES, EpisodeEnded) if one.group == group]) == slots

    def spans(self, group: str) -> list[list[Span]]:
        """The model's, of each slot."""
        every = [one for one in self.events(TRAJECTORIES, Span) if one.group == group and one.source == Source.MODEL]
        return [[one for one in every if one.slot == slot] for slot in range(SLOTS)]

    def change_weights(self) -> None:
        """Publish the next version, and turn until it is fetched and proved."""
        self.source.publish()
        while not self.receiver.ready:
            assert self.receiver._failure is None and not self.receiver.refusals
            time.sleep(0.01)

    def close(self) -> None:
        self.worker.close()
        self.receiver.close()


def versions(spans: list[Span]) -> list[int]:
    return [run.version for span in spans for run in span.versions for _ in range(run.count)]
