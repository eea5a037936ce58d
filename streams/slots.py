"""What a fold knows of the groups that are open: their slots, and the attempts that leases have named.

Of an attempt's events it keeps 16 bytes each (offset, and a hash that tells an equal repeat from a conflicting one);
what they hold stays on the log.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    GroupSpec,
    PayloadEpisode,
    SlotFate,
    Span,
    Suspicion,
    Task,
    VersionRun,
)
from headrace.schemas.outcomes import Account, Boundary, Closure, Outcome, Purpose, Source
from headrace.schemas.suspicion import Judged, Signs, guarded_paths, own_ms, suspicions
from headrace.schemas.waiting import MODEL_TIME, Step

ACCOUNT_CANDIDATE = "candidate"  # of a closure: its disposition decides later

EpisodeEvent = EpisodeStarted | Span | EpisodeEnded


@dataclass(slots=True)
class Attempt:
    """What is known of one attempt. Its events are kept as 16 bytes each: offset and hash, by sequence."""

    number: int
    incarnation: str
    offsets: array[int] = field(default_factory=lambda: array("q"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    beyond: dict[int, int] = field(default_factory=dict)  # hashes after a gap, by sequence
    model_tokens: int = 0
    context_tokens: int = 0
    turns: int = 0  # that are over
    times: dict[str, float] = field(default_factory=dict)  # ms by step: of its spans, and at its end of the whole
    runs: list[list[int]] = field(default_factory=list)  # [version, count]
    signs: Signs = field(default_factory=Signs)
    temperature: float = math.nan
    reported: bool = False  # its own EpisodeEnded has been seen
    outcome: Outcome | None = None  # None: it runs

    def known(self, sequence: int) -> int | None:
        if 0 <= sequence < len(self.hashes):
            return self.hashes[sequence]
        return self.beyond.get(sequence)

    def count(self, event: EpisodeEvent) -> None:
        if isinstance(event, EpisodeEnded):
            self.times |= event.timings_ms
        if not isinstance(event, Span):
            return
        # A turn is over with its stop reason, or once another follows.
        ended = event.source == Source.MODEL and event.stop_reason is not None
        self.turns = max(self.turns, event.turn + ended)
        for step, ms in event.timings_ms.items():
            self.times[step] = self.times.get(step, 0.0) + ms
        if event.source != Source.MODEL:
            self.context_tokens += event.count
            return
        self.model_tokens += event.count
        for run in event.versions:
            if self.runs and self.runs[-1][0] == run.version:
                self.runs[-1][1] += run.count
            else:
                self.runs.append([run.version, run.count])

    def spent(self, spec: GroupSpec) -> bool:
        """Whether a budget on the episode's own clock is used up: no deadline can be blamed for that."""
        used: list[tuple[float, float | None]] = [
            (self.model_tokens, max(1, spec.max_tokens)), (self.turns, spec.max_turns),
            (self.times.get(MODEL_TIME, 0.0) / 1000, spec.model_time_s),
            (self.times.get(Step.ENVIRONMENT, 0.0) / 1000, spec.tool_time_s),
        ]  # fmt: skip
        return any(most is not None and amount >= most for amount, most in used)


@dataclass(slots=True)
class Slot:
    """One member of a group: its attempts, and what decided."""

    number: int
    attempts: dict[int, Attempt] = field(default_factory=dict)
    current: Attempt | None = None  # the newest; once ended, the one that decided
    ended: bool = False
    ended_at: int = -1
    outcome: Outcome = Outcome.UNKNOWN
    reason: str = ""
    boundary: str = Boundary.NONE
    reward: float | None = None
    suspicions: tuple[Suspicion, ...] = ()  # once the group closes
    excluded: bool = False  # for one of them

    @property
    def failed(self) -> bool:
        return self.ended and not self.outcome.trainable


@dataclass(slots=True)
class Group:
    """An open group of the fold."""

    id: str
    opened: int  # offset
    opened_ms: int
    before: tuple[int, int]  # the clock just before the opening record
    purpose: str
    unmanaged: bool
    spec: GroupSpec
    task: Task
    slots: list[Slot]
    _guarded: re.Pattern[str] | None = None

    @property
    def guarded(self) -> re.Pattern[str]:
        """What finds the paths that are none of the model's business."""
        if self._guarded is None:
            self._guarded = guarded_paths(self.task.data)
        return self._guarded

    def counting(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.failed][: self.spec.group_size]


def judge(group: Group) -> None:
    """What is suspicious about the rewards, once all slots have ended. Only what is to be trained on is excluded."""
    ended = [(slot, slot.current) for slot in group.slots if slot.current is not None and slot.outcome.trainable]
    found = suspicions([Judged(slot.outcome, slot.reward, attempt.model_tokens, own_ms(attempt.times), attempt.signs)
                        for slot, attempt in ended])  # fmt: skip
    trains = group.purpose == Purpose.TRAIN and not group.unmanaged
    for (slot, _), some in zip(ended, found, strict=True):
        slot.suspicions = some
        slot.excluded = trains and any(one.sign in group.spec.exclude for one in some)


def fate(slot: Slot, counted: bool) -> SlotFate:
    """What a closure says of the slot; of one that nobody began, attempt -1."""
    attempt = slot.current or Attempt(-1, "")
    return SlotFate(slot.number, attempt.number, attempt.incarnation, slot.outcome, slot.reason, slot.boundary,
                    slot.reward, counted, attempt.model_tokens, attempt.context_tokens,
                    tuple(VersionRun(version, count) for version, count in attempt.runs), slot.suspicions,
                    slot.excluded, attempt.signs.answer)  # fmt: skip


def accounts(group: Group, counted: set[int], closure: Closure) -> dict[str, int]:
    """Model tokens of the group's leased attempts, by account. (Foreign, late and repeated ones are in addenda.)"""
    accounts: dict[str, int] = {}
    for slot in group.slots:
        for attempt in slot.attempts.values():
            if attempt is not slot.current:
                account = str(Account.SUPERSEDED)
            elif slot.number in counted:
                account = ACCOUNT_CANDIDATE if closure == Closure.CANDIDATE else str(Account.EXCLUDED)
            else:
                surplus = slot.outcome.trainable and not slot.excluded
                account = str(Account.SURPLUS if surplus else Account.EXCLUDED)
            if attempt.model_tokens:
                accounts[account] = accounts.get(account, 0) + attempt.model_tokens
    return accounts


def episodes(survivors: Iterable[Slot]) -> Iterator[PayloadEpisode]:
    """The payload's episodes of slots that ended, their columns still to be filled in."""
    for slot in survivors:
        attempt = slot.current
        assert attempt is not None
        yield PayloadEpisode(slot.number, attempt.number, attempt.incarnation, slot.outcome, slot.reward,
                             attempt.temperature, (), tuple(attempt.offsets))  # fmt: skip
