"""Decides that a run stands still: which part, for how long, and why. A pure state machine, fed with facts.

A part is looked at only while it has work: the trainer while a version is due from it, the workers while slots are
leased or wait to be, the assembler while it owes a closure. It moves when something of it arrives. What a hung part
brings about by itself (a deadline that closes a group, a worker lost, a lease handed back) is no move, or a run could
go round for ever. The clock is that of `fleet`, which the log moves: it stands still through an outage of the broker
and through the coordinator's own absence, so neither can trip the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from headrace.schemas.events import AttemptEnded, Event, Heartbeat, Publication, Version
from headrace.schemas.outcomes import REASON_DEADLINE, REASON_WORKER_LOST

from .assembler import REASON_SURPLUS

WARNINGS = 10  # in equal steps up to the bound, the last one being the error
SAMPLED = "sampled_tokens"  # the counter of a heartbeat that shows a worker at work within an episode

_NO_WORK_OF_A_WORKER = frozenset({REASON_DEADLINE, REASON_WORKER_LOST, REASON_SURPLUS})


class Part(StrEnum):
    """A part of the run that can hold it up."""

    TRAINER = "trainer"
    WORKERS = "workers"
    ASSEMBLER = "assembler"


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that is leased."""

    group: str
    task: str
    slot: int
    attempt: int
    lease: int
    worker: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the run stands. Counts of slots: `held` are leased, `wanted` could be if a worker took them."""

    committed: int
    published: int
    batch: int  # the newest manifest
    wanted: int
    held: int
    oldest: Held | None  # of the held ones
    reporting: int  # incarnations whose heartbeats are heard
    offering: int  # of them such as take leases unasked
    owed: int  # open groups of which every slot has ended


@dataclass(frozen=True, slots=True)
class Stall:
    """A part from which nothing came for `still_ms` although it has work; at `bound_ms` the run ends."""

    part: Part
    why: str
    still_ms: int
    bound_ms: int

    @property
    def final(self) -> bool:
        return self.still_ms >= self.bound_ms

    def blaming(self, part: Part, why: str) -> Stall:
        return Stall(part, why, self.still_ms, self.bound_ms)

    def say(self, run: str) -> str:
        """What a person reads at 3 a.m."""
        verb = "stand" if self.part == Part.WORKERS else "stands"
        return (f"the {self.part} of run {run} {verb} still for {self.still_ms / 1000:.0f} s (rollout.no_progress_s is "
                f"{self.bound_ms / 1000:g}): {self.why}; look at `headrace status {run}` and the "
                f"{self.part.removesuffix('s')}'s log file")  # fmt: skip


@dataclass(slots=True)
class Stalls:
    """Feed it every record that the coordinator reads, with the time on the clock of `fleet`."""

    _since: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    _told: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    _sampled: dict[str, float] = field(default_factory=dict)

    def observe(self, now_ms: int, event: Event) -> None:
        match event:
            case Version() | Publication():
                self._moved(Part.TRAINER, now_ms)
            case AttemptEnded():
                self._moved(Part.ASSEMBLER, now_ms)
                if event.reason not in _NO_WORK_OF_A_WORKER:
                    self._moved(Part.WORKERS, now_ms)
            case Heartbeat():
                sampled = event.counters.get(SAMPLED, 0.0)
                if sampled > self._sampled.get(event.incarnation, 0.0):
                    self._moved(Part.WORKERS, now_ms)
                self._sampled[event.incarnation] = sampled
            case _:
                pass

    def look(self, now_ms: int, at: Standing, bound_ms: int) -> Stall | None:
        """The part that stands still longest, where a warning or the error is due."""
        stalls = []
        for part, why in ((Part.TRAINER, _trainer(at)), (Part.WORKERS, _workers(at)), (Part.ASSEMBLER, _assembler(at))):
            if why is None:
                self._moved(part, now_ms)
                continue
            stall = Stall(part, why, now_ms - self._since[part], bound_ms)
            step = stall.still_ms * WARNINGS // bound_ms
            if step > self._told[part]:
                self._told[part] = step
                stalls.append(stall)
        return max(stalls, key=lambda stall: stall.still_ms, default=None)

    def _moved(self, part: Part, now_ms: int) -> None:
        self._since[part], self._told[part] = now_ms, 0


def _trainer(at: Standing) -> str | None:
    if at.committed < 0:
        return "the run waits for the publication of version 0, and the trainer has not committed it"
    if at.published < at.committed:
        return f"version {at.committed} is committed and not published"
    if at.batch > at.committed:
        return f"batch {at.batch} waits for the trainer, and no version has come since version {at.committed}"
    return None


def _workers(at: Standing) -> str | None:
    if at.published < 0 or not (at.held or at.wanted):
        return None
    if not at.reporting:
        return f"no worker reports, and {at.wanted + at.held} slots wait for one"
    if at.oldest is not None:
        one = at.oldest
        return (f"{at.reporting} report, hold {at.held} slots and produce nothing; the oldest is slot {one.slot} of "
                f"group {one.group} (task {one.task}, attempt {one.attempt}, lease {one.lease}), held by {one.worker} "
                f"(incarnation {one.incarnation[:8]})")  # fmt: skip
    if not at.offering:
        return None  # producers that ask when they like
    return f"{at.reporting} report and take none of the {at.wanted} slots that wait"


def _assembler(at: Standing) -> str | None:
    return f"every slot of {at.owed} groups has ended, and their closure doesn't come" if at.owed else None
