"""The lines that `headrace run` prints: what the log says of the run, folded into a few figures.

A pure fold over small records; the supervisor feeds it. Figures of the whole run belong to `headrace report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import (
    AttemptEnded,
    DeadLetter,
    FleetTick,
    GroupClosed,
    Heartbeat,
    Lease,
    LeaseEnded,
    Manifest,
    Publication,
    Version,
)
from headrace.schemas.outcomes import REASON_WORKER_LOST, Outcome
from headrace.streams.log.reader import Record

STALE_BEAT_MS = 10_000


@dataclass(slots=True)
class Progress:
    """What a run's lines on the screen are made of, folded from its records as they come."""

    version: int = -1
    published: int = -1
    manifest: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    opened: set[str] = field(default_factory=set)
    last_manifest_ms: int | None = None
    interval_s: float | None = None
    lag: float | None = None
    beats: dict[str, tuple[int, Heartbeat]] = field(default_factory=dict)
    rate: dict[str, tuple[int, float]] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    dead_letters: int = 0
    now_ms: int = 0
    coordinated: int = 0  # signs of life of the coordinator
    finished: Counter[str] = field(default_factory=Counter)  # attempts that a worker brought to a verdict
    given_up: dict[str, None] = field(default_factory=dict)  # groups whose workers were lost every time
    _incarnations: dict[str, str] = field(default_factory=dict)  # the newest of each worker that was leased something
    _running: dict[str, dict[tuple[str, int], str]] = field(default_factory=dict)  # incarnation: (group, slot): task

    def observe(self, record: Record) -> bool:
        """Take one record in. True where it is a new version: time for a line."""
        self.now_ms = max(self.now_ms, record.timestamp_ms)
        try:
            event = decode(record.value)
        except UndecodableRecord:
            return False
        match event:
            case Version():
                self.version = event.version
                return True
            case Publication():
                self.published = event.version
            case Manifest():
                if self.last_manifest_ms is not None:
                    self.interval_s = (event.decided_ms - self.last_manifest_ms) / 1000
                self.last_manifest_ms, self.manifest = event.decided_ms, event.batch
                lags = [group.max_lag for group in event.groups]
                self.lag = sum(lags) / len(lags) if lags else None
            case Lease() if not event.unmanaged:
                self.opened.add(event.group)
                before = self._incarnations.get(event.worker)
                if before is not None and before != event.incarnation:
                    self._running.pop(before, None)
                self._incarnations[event.worker] = event.incarnation
                slots = self._running.setdefault(event.incarnation, {})
                slots |= {(event.group, one.slot): event.task.id for one in event.assignments}
            case LeaseEnded():
                self._over(event.incarnation, event.group, *event.slots)
            case AttemptEnded():
                self._ended(event)
            case FleetTick():
                self.coordinated += 1
            case GroupClosed():
                self.opened.discard(event.group)
                for fate in event.slots:
                    self._over(fate.incarnation, event.group, fate.slot)
                for fate in event.slots:
                    if fate.counted and fate.reward is not None:
                        self.reward_sum += fate.reward
                        self.reward_count += 1
            case Heartbeat() if event.managed:
                self._beat(record.timestamp_ms, event)
            case DeadLetter():
                self.dead_letters += 1
            case _:
                pass
        return False

    def _ended(self, event: AttemptEnded) -> None:
        if event.outcome in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE):
            self.finished[event.incarnation] += 1
        if event.reason == REASON_WORKER_LOST and event.ends_slot:
            self.given_up[event.group] = None
        self._over(event.incarnation, event.group, event.slot)

    def _over(self, incarnation: str, group: str, *slots: int) -> None:
        for slot in slots:
            self._running.get(incarnation, {}).pop((group, slot), None)

    def running(self, worker: str) -> set[str]:
        """What the worker of this name was leased last and hasn't ended: group and task, in words."""
        slots = self._running.get(self._incarnations.get(worker, ""), {})
        return {f"{group} (task {task})" for (group, _), task in slots.items()}

    def has_finished(self, worker: str) -> bool:
        """Whether the newest incarnation of that worker brought any attempt to a verdict."""
        return self.finished[self._incarnations.get(worker, "")] > 0

    def _beat(self, at_ms: int, beat: Heartbeat) -> None:
        sampled = beat.counters.get("sampled_tokens", 0.0)
        before = self.rate.get(beat.incarnation)
        # Over five seconds and more: a rate over one heartbeat says nothing.
        if before is None or at_ms - before[0] >= 5000:
            if before is not None:
                self.tokens_per_s[beat.incarnation] = (sampled - before[1]) / ((at_ms - before[0]) / 1000)
            self.rate[beat.incarnation] = (at_ms, sampled)
        self.beats[beat.incarnation] = (at_ms, beat)
        for incarnation, (seen, _) in list(self.beats.items()):
            if at_ms - seen > STALE_BEAT_MS:
                for table in (self.beats, self.rate, self.tokens_per_s):
                    table.pop(incarnation, None)

    def take_reward(self) -> tuple[float | None, int]:
        """Mean reward over all groups that closed since the last call, and how many episodes."""
        mean, count = (self.reward_sum / self.reward_count, self.reward_count) if self.reward_count else (None, 0)
        self.reward_sum, self.reward_count = 0.0, 0
        return mean, count

    def waits_for(self) -> str:
        """What the trainer waits for."""
        if self.version < 0:
            return "version 0"
        if self.published < self.version:
            return f"publication of v{self.published + 1}"
        if self.manifest > self.version:
            return f"nothing: trains batch {self.version + 1}"
        if not self.beats:
            return "a worker"
        return f"batch {self.version + 1}: {len(self.opened)} groups open"

    def line(self, processes: Mapping[str, str]) -> str:
        reward, episodes = self.take_reward()
        shown = [f"v{max(self.version, 0):<4d}"]
        shown.append(f"reward {reward:6.3f} over {episodes:3d} episodes" if reward is not None else "reward      -")
        shown.append(f"interval {self.interval_s:5.1f} s" if self.interval_s is not None else "interval     - ")
        shown.append(f"lag {self.lag:.1f}" if self.lag is not None else "lag -")
        shown.append(f"open {len(self.opened):2d}")
        shown.append(f"{sum(self.tokens_per_s.values()):5.0f} tok/s")
        unwell = [f"{name} {state}" for name, state in processes.items() if state != "up"]
        shown.append(", ".join(unwell) if unwell else f"{len(processes)} up")
        shown.append(f"trainer waits for {self.waits_for()}")
        if self.dead_letters:
            shown.append(f"{self.dead_letters} dead letters")
        return "  ".join(shown)
