"""Events of scripted producers, and the other ends of the streams: a worker and a trainer that do as they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.codec import encode
from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.events import (
    Assignment,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupSpec,
    Lease,
    Span,
    Task,
    VersionRun,
)
from headrace.schemas.outcomes import Boundary, Outcome, Purpose, Source
from headrace.schemas.settings import RunSettings
from headrace.streams.log import reader


def run_settings(**sections: Any) -> RunSettings:
    plain: dict[str, Any] = {"model": {"path": "unused"}, "tasks": {"dataset": "chain_sum"}}
    return RunSettings.model_validate(plain | sections)


TASK = Task("chain_sum-0-0", "reasoning_gym", "{}", 0)


def spec(size: int = 2, **over: Any) -> GroupSpec:
    rules: dict[str, Any] = dict(
        group_size=size, reserves=0, max_attempts=2, min_survivors=(size + 1) // 2, deadline_s=60.0, max_age_s=600.0,
        on_deadline="survivors", zero_variance="refill", max_tokens=64,
    )  # fmt: skip
    return GroupSpec(**(rules | over))


def lease(group: str = "g", assignments: dict[int, int] | None = None, *, rules: GroupSpec | None = None,
          incarnation: str = "w0", opens: bool = True, **over: Any) -> Lease:  # fmt: skip
    """`assignments`: slot to attempt; all slots as their first attempt by default."""
    rules = rules or spec()
    pairs = {slot: 0 for slot in range(rules.slots)} if assignments is None else assignments
    facts: dict[str, Any] = dict(
        group=group, number=0, opens=opens, unmanaged=False, worker="w", incarnation=incarnation,
        purpose=str(Purpose.TRAIN), min_version=0, assignments=tuple(Assignment(s, a) for s, a in pairs.items()),
        spec=rules, task=TASK, cursor=1, request=None,
    )  # fmt: skip
    return Lease(**(facts | over))


def newest_first(groups: Sequence[bytes]) -> Iterator[reader.Record]:
    """Values of one partition of `groups`, as a reader meets them that goes backwards."""
    for offset in reversed(range(len(groups))):
        yield reader.Record("groups", 0, offset, 0, None, groups[offset])


@dataclass(slots=True)
class Script:
    """The events of one attempt, numbered as they are asked for."""

    group: str = "g"
    slot: int = 0
    attempt: int = 0
    incarnation: str = "w0"
    version: int = 0
    sequence: int = field(default=0)

    def _identity(self) -> dict[str, Any]:
        self.sequence += 1
        return dict(group=self.group, slot=self.slot, attempt=self.attempt, incarnation=self.incarnation,
                    sequence=self.sequence - 1)  # fmt: skip

    def started(self) -> EpisodeStarted:
        return EpisodeStarted(**self._identity(), worker="w", engine="{}", temperature=1.0, top_p=1.0, top_k=0,
                              max_new_tokens=64, seed=1, started_ms=0)  # fmt: skip

    def span(self, count: int = 4, source: Source = Source.MODEL, salt: int = 0) -> Span:
        model = source == Source.MODEL
        tokens = np.arange(count, dtype=np.int32) + 100 * self.slot + salt
        return Span(
            **self._identity(), source=source, turn=0, parent=-1, count=count,
            versions=(VersionRun(self.version, count),) if model else (), stop_reason=None, engine=None, detail=None,
            timings_ms={}, tokens=pack_ids(tokens),
            logprobs=pack_float32(np.full(count, -0.5, np.float32)) if model else None, mask=None, entropies=None,
        )  # fmt: skip

    def ended(self, reward: float | None = 1.0, outcome: Outcome | None = None, reason: str = "stop") -> EpisodeEnded:
        if outcome is None:
            outcome = Outcome.MODEL_SUCCESS if reward else Outcome.MODEL_FAILURE
        return EpisodeEnded(**self._identity(), outcome=outcome, reason=reason, boundary=Boundary.NONE, reward=reward,
                            rewards={}, turn_rewards=(), text=None, ended_ms=0, timings_ms={})  # fmt: skip

    def whole(self, reward: float | None = 1.0, outcome: Outcome | None = None, tokens: int = 4) -> Iterator[Event]:
        """Start, prompt, completion, end."""
        yield self.started()
        yield self.span(3, Source.PROMPT)
        yield self.span(tokens)
        yield self.ended(reward, outcome)


@dataclass(frozen=True, slots=True)
class Record:
    """What a fold needs of a record."""

    offset: int
    timestamp_ms: int
    value: bytes | None
    partition: int = 0
    key: bytes | None = None


def record(offset: int, event: Event, timestamp_ms: int | None = None) -> Record:
    return Record(offset, offset * 10 if timestamp_ms is None else timestamp_ms, encode(event))
