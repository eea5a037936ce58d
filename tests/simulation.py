"""Streams without a broker: the real coordinator and the real fold around logs in memory, one partition each.

The test plays workers and trainer: it beats, ends slots, commits versions, and may restart the coordinator at any time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.events import (
    Assignment,
    Event,
    Exhausted,
    FleetTick,
    GroupPayload,
    Heartbeat,
    Lease,
    LeaseEnded,
    Manifest,
    Publication,
    Version,
)
from headrace.schemas.outcomes import Outcome
from headrace.schemas.settings import RunSettings
from headrace.streams.assembler import Closed, Fold, Refused
from headrace.streams.coordinator import Coordinator, Decision
from headrace.streams.intake import understand
from headrace.streams.restoring import restore
from headrace.streams.tasks import TaskSource, task_source
from tests.scripted import Record, Script

Held = tuple[Lease, Assignment]


class Sim:
    def __init__(self, settings: RunSettings, source: TaskSource | None = None) -> None:
        self.settings, self.source = settings, source or task_source(settings.tasks)
        self.logs: dict[str, list[tuple[Record, Event]]] = {t: [] for t in ("policy", "tasks", "batches", "groups")}
        self.coordinator = Coordinator(settings, self.source)
        self.fold, self.chain, self.now, self.offset = Fold(), Chain(), 0, 0
        self.held: list[Held] = []  # leased, and neither ended nor taken back, in order
        self.version = -1
        self.trajectories: dict[int, Event] = {}  # by offset
        self.payloads: dict[str, GroupPayload] = {}  # of candidates, without their spans
        self.delayed = False  # what the fold writes reaches the coordinator only by `deliver`
        self._undelivered: list[tuple[Record, Event]] = []

    # ------------------------------------------------------------------------------------------- the streams

    def observe(self, topic: str, event: Event) -> None:
        log = self.logs.get(topic)
        group = getattr(event, "group", None)
        record = Record(len(log) if log is not None else 0, self.now, encode(event), key=group and group.encode())
        if log is not None:
            log.append((record, event))
        if topic == "groups" and self.delayed:
            self._undelivered.append((record, event))
        elif topic in ("policy", "groups", "fleet"):
            self.coordinator.observe(topic, record, event)

    def deliver(self, count: int | None = None) -> None:
        """The next records of `groups` reach the coordinator."""
        count = len(self._undelivered) if count is None else count
        arrived, self._undelivered = self._undelivered[:count], self._undelivered[count:]
        for record, event in arrived:
            self.coordinator.observe("groups", record, event)

    def decide(self) -> Decision:
        decision = self.coordinator.decide(self.now)
        for one in decision.tasks:
            self.observe("tasks", one)
            if isinstance(one, LeaseEnded):
                self.held = [h for h in self.held if not (h[0].number == one.number and h[1].slot in one.slots)]
            else:
                self.held += [(one, assignment) for assignment in one.assignments]
        for event in decision.trajectories:
            self.feed(event)
        for entry, value in decision.batches:
            assert encode(entry) == value
            self.observe("batches", entry)
        return decision

    def feed(self, *events: Event) -> None:
        """Events into `trajectories`; what the fold makes of them goes into `groups` at once."""
        for event in events:
            self.offset += 1
            self.trajectories[self.offset] = event
            for effect in self.fold.apply(Record(self.offset, self.now, encode(event))):
                if isinstance(effect, Refused):
                    continue
                if isinstance(effect, Closed) and effect.payload is not None:
                    self.payloads[effect.record.group] = effect.payload
                record = replace(effect.record, content_hash=b"0" * 16) if isinstance(effect, Closed) else effect
                self.observe("groups", replace(record, **self.chain.link()))
                self.chain.extend(self.logs["groups"][-1][1])

    def restart(self) -> None:
        """The coordinator dies (what it decided last is lost where it wasn't written) and comes back; heartbeats have
        to be heard anew."""
        self.coordinator, self._undelivered = Coordinator(self.settings, self.source), []
        restore(self.coordinator, lambda topic: [record for record, _ in self.logs[topic]],
                lambda topic, record: self.coordinator.observe(topic, record, understand(topic, record.value)))

    # ------------------------------------------------------------------------------------- workers and trainer

    def beat(self, name: str = "w", incarnation: str | None = None, capacity: int = 1000, managed: bool = True) -> None:
        self.observe("fleet", Heartbeat(name, incarnation or f"{name}0", 0, capacity, 0, managed, "{}", {}))

    def pass_s(self, seconds: int, *beating: str) -> None:
        """Ticks on `fleet`, one a second, while these workers beat."""
        for _ in range(seconds):
            self.now += 1000
            self.observe("fleet", FleetTick("c", 0))
            for name in beating:
                self.beat(name)

    def end(self, held: Held, reward: float | None, outcome: Outcome | None = None, version: int | None = None) -> None:
        """The worker runs this slot to its end."""
        lease, one = held
        self.held.remove(held)
        script = Script(lease.group, one.slot, one.attempt, lease.incarnation)
        script.version = lease.min_version if version is None else version
        self.feed(*script.whole(reward, outcome))

    def end_group(self, group: str, *, solved: bool | None = None, version: int | None = None) -> None:
        """All its slots end: as a candidate, or (`solved` given) with equal rewards."""
        for i, held in enumerate([h for h in self.held if h[0].group == group]):
            self.end(held, float(i % 2) if solved is None else float(solved), version=version)

    def publish(self, rho: float | None = None) -> None:
        """The trainer commits and publishes the next version."""
        self.version += 1
        link: dict[str, Any] = dict(number=0, previous=b"", writer="trainer")
        self.observe("policy", Version(**link, version=self.version, parent=self.version - 1, batch=self.version or -1,
                                       batch_offset=0, batch_digest=b"", hash_algorithm="", served_hash=b"",
                                       train_hash=b"", rho=rho or 0.0, rho_tokens=0 if rho is None else 100, groups=(),
                                       metrics={}, fingerprint="{}", committed_ms=0))  # fmt: skip
        self.observe("policy", Publication(**link, version=self.version, kind="path", base=-1, base_hash=b"",
                                           hash_algorithm="", served_hash=b"", path="x", chunks=(), size=0, changed=0,
                                           elements=0, published_ms=0))  # fmt: skip

    # ------------------------------------------------------------------------------------------- what happened

    def wrote(self, kind: type[Any]) -> list[Any]:
        return [event for log in self.logs.values() for _, event in log if isinstance(event, kind)]

    @property
    def manifests(self) -> list[Manifest]:
        return [event for _, event in self.logs["batches"] if isinstance(event, Manifest)]

    @property
    def open(self) -> list[str]:
        """Groups with slots that are leased, oldest first."""
        return list(dict.fromkeys(lease.group for lease, _ in self.held))


def exhausted(decision: Decision) -> list[Exhausted]:
    return [event for event in decision.trajectories if isinstance(event, Exhausted)]
