"""The lines that `headrace run` prints: what the log says of the run, folded into a few figures.

A pure fold over small records; the supervisor feeds it. Figures of the whole run belong to `headrace report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import (
    DeadLetter,
    GroupClosed,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    Version,
)
from headrace.streams.log.reader import Record

STALE_BEAT_MS = 10_000


@dataclass(slots=True)
class Progress:
    version: int = -1
    published: int = -1
    manifest: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    opened: set[str] = field(default_factory=set)
    last_manifest_ms: int | None = None
    interval_s: float | None = None
    last_version: Version | None = None
    lag: float | None = None
    beats: dict[str, tuple[int, Heartbeat]] = field(default_factory=dict)
    rate: dict[str, tuple[int, float]] = field(default_factory=dict)
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    dead_letters: int = 0
    now_ms: int = 0

    def observe(self, record: Record) -> bool:
        """Take one record in. True where it is a new version: time for a line."""
        self.now_ms = max(self.now_ms, record.timestamp_ms)
        try:
            event = decode(record.value)
        except UndecodableRecord:
            return False
        match event:
            case Version():
                self.version, self.last_version = event.version, event
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
            case GroupClosed():
                self.opened.discard(event.group)
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
