"""Where a run stands now, and the one thing that holds it up: a pure function of its small topics and of the time.

Processes are known by what they write: a worker by its heartbeats, the others by their newest record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import FleetTick, Lease, SettingsChanged, Version
from headrace.schemas.outcomes import Closure
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, GROUPS, POLICY, TASKS
from headrace.streams.log.policy import in_force

from .facts import Fact
from .tables import batches, groups, replicas, versions

# A role that works writes at least a tick each second; so long a silence is no slow broker.
SILENT_S = 15.0


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker's newest heartbeat says. `alive`: it was heard within the lease's time-out."""

    worker: str
    incarnation: str
    version: int
    free: int
    capacity: int
    heard_s: float  # ago
    alive: bool


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands, from its records alone."""

    version: int  # newest committed; -1: none
    published: int
    batch: int  # newest manifest; 0: none
    open_groups: int
    candidates: int  # waiting for a batch
    batch_groups: int  # that make one
    closed: dict[str, int]  # groups by disposition
    oldest_open_s: float | None
    workers: tuple[Worker, ...]
    signs_s: dict[str, float | None] = field(default_factory=dict)  # role: newest record, seconds ago
    dead_letters: int = 0
    silent_s: float | None = None  # since the newest record of any process; None: there is none but the run's first

    @property
    def over(self) -> bool:
        """Whether it had begun, and no process of it writes any more."""
        return self.silent_s is not None and self.silent_s > SILENT_S and not self.alive

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    @property
    def held_up_by(self) -> str:
        """The one thing that the next version waits for, and what to look at."""

        if self.version < 0 and self.closed and self.closed.keys() == {Closure.UNMANAGED}:
            return "nothing: all of its groups are unmanaged, so that none of them is ever trained"
        if self.version < 0:
            return "the trainer has not written version 0 yet"
        if self.published < self.version:
            return f"version {self.published + 1} is not published yet: the trainer is at it, or not running"
        if self.batch > self.version:
            ago = self.signs_s.get("trainer")
            said = f"wrote last {ago:.0f} s ago" if ago is not None else "has written nothing"
            return f"the trainer has batch {self.version + 1}; it {said}"
        if not self.alive:
            return "no worker sends heartbeats: `headrace run` starts the run again, `headrace start worker` one worker"
        sign = self.signs_s.get("coordinator")
        if self.candidates >= self.batch_groups and (sign is None or sign > SILENT_S):
            return "enough candidates wait, but the coordinator is silent: is it running?"
        if self.open_groups:
            return (f"batch {self.version + 1} has {self.candidates} of {self.batch_groups} groups; "
                    f"{self.open_groups} are open, the oldest for {self.oldest_open_s or 0:.0f} s")  # fmt: skip
        return "no group is open: the coordinator is silent or the tasks have ended"


def state(facts: Sequence[Fact[Any]], settings: RunSettings, now_ms: int, dead_letters: int) -> State:
    """`settings`: those that the run was created with."""
    settings = in_force(settings, ((fact.offset, fact.event) for fact in facts
                                   if isinstance(fact.event, SettingsChanged)))  # fmt: skip
    rows = groups(facts)
    opened = {fact.event.group: fact.timestamp_ms for fact in reversed(facts) if isinstance(fact.event, Lease)}
    running = [opened[row["id"]] for row in rows if row["closure"] == "open" and row["id"] in opened]
    known, published = versions(facts), [row for row in versions(facts) if row["published"]]
    workers = []
    for row in replicas(facts):
        if row["managed"]:
            heard = (now_ms - row["heard_ms"]) / 1000
            workers.append(Worker(row["worker"], row["id"], row["version"], row["free"], row["capacity"], heard,
                                  heard < settings.rollout.lease_timeout_s))  # fmt: skip
    signs: dict[str, int] = {}
    for fact in facts:
        for role in _roles(fact):
            signs[role] = max(signs.get(role, 0), fact.timestamp_ms)
    newest = max((fact.timestamp_ms for fact in facts if fact.topic != POLICY or isinstance(fact.event, Version)),
                 default=None)  # fmt: skip
    return State(
        version=max((row["id"] for row in known), default=-1),
        published=max((row["id"] for row in published), default=-1),
        batch=max((row["id"] for row in batches(facts)), default=0),
        open_groups=len(running),
        candidates=sum(row["closure"] == "candidate" and row["disposition"] == "open" for row in rows),
        batch_groups=settings.batch.groups,
        closed=dict(Counter(row["disposition"] for row in rows if row["disposition"] != "open").most_common()),
        oldest_open_s=(now_ms - min(running)) / 1000 if running else None,
        workers=tuple(workers),
        signs_s={role: (now_ms - signs[role]) / 1000 if role in signs else None
                 for role in ("assembler", "coordinator", "trainer")},
        dead_letters=dead_letters,
        silent_s=(now_ms - newest) / 1000 if newest is not None else None,
    )  # fmt: skip


def _roles(fact: Fact[Any]) -> list[str]:
    """Who must have been alive to write this."""
    if fact.topic in (TASKS, BATCHES) or isinstance(fact.event, FleetTick):
        return ["coordinator"]
    if fact.topic == POLICY and fact.event.writer == "trainer":
        return ["trainer"]
    return ["assembler"] if fact.topic == GROUPS else []
