"""A closed group and what became of it: the fold that joins a closure with its disposition, each group once.

Pure: records of `groups` and `batches` in, views out. What it holds are candidates that wait and decisions that were
read before their closures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.schemas.events import Disposed, Event, GroupClosed, Manifest, SlotFate
from headrace.schemas.outcomes import Closure, Disposition
from headrace.streams.log.reader import Record


@dataclass(frozen=True, slots=True)
class GroupView:
    """A closed group and its fate. `disposition` is None while a candidate waits for the coordinator."""

    id: str
    partition: int
    offset: int  # of the closure in `groups`
    closed_ms: int
    closure: str
    disposition: str | None
    reason: str
    batch: int | None
    max_lag: int | None  # versions between sampling and training; None: not in a batch
    held_up_by: int  # the slot that ended last
    open_ms: int
    purpose: str
    task: str
    slots: tuple[SlotFate, ...]
    accounts: Mapping[str, int]

    @property
    def reward(self) -> float | None:
        """Mean over the counted slots."""
        rewards = [slot.reward for slot in self.slots if slot.counted and slot.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


class _Fate(NamedTuple):
    disposition: str
    reason: str
    batch: int | None
    max_lag: int | None


class GroupFates:
    """Feed it records of `groups` and `batches`, in order within each partition."""

    def __init__(self) -> None:
        self._waiting: dict[str, GroupView] = {}
        self._early: dict[str, _Fate] = {}  # read before their closures

    def feed(self, record: Record, event: Event) -> Iterator[GroupView]:
        """The groups whose fate is known with this record."""
        if isinstance(event, GroupClosed):
            view = _view(record, event)
            if event.closure != Closure.CANDIDATE:
                yield view
            elif fate := self._early.pop(event.group, None):
                yield replace(view, **fate._asdict())
            else:
                self._waiting[event.group] = view
        elif isinstance(event, Manifest):
            for ref in event.groups:
                yield from self._decided(ref.group, _Fate(Disposition.BATCHED, "", event.batch, ref.max_lag))
        elif isinstance(event, Disposed):
            yield from self._decided(event.group, _Fate(event.disposition, event.reason, None, None))

    def _decided(self, group: str, fate: _Fate) -> Iterator[GroupView]:
        if view := self._waiting.pop(group, None):
            yield replace(view, **fate._asdict())
        else:
            self._early[group] = fate

    def waiting(self) -> list[GroupView]:
        """Candidates without a disposition, in order of closure within a partition."""
        return list(self._waiting.values())


def _view(record: Record, event: GroupClosed) -> GroupView:
    return GroupView(
        id=event.group, partition=record.partition, offset=record.offset, closed_ms=record.timestamp_ms,
        closure=event.closure, disposition=None if event.closure == Closure.CANDIDATE else event.closure, reason="",
        batch=None, max_lag=None, held_up_by=event.held_up_by, open_ms=event.open_ms, purpose=event.purpose,
        task=event.task, slots=event.slots, accounts=event.accounts,
    )  # fmt: skip
