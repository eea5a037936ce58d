"""What of a fold's effects is already on the log, and what the next commit says.

The last record of a partition of `groups` is always a `Position`: all input below its offset is accounted for. A
restart folds again from its low mark. Then a closure or an end of an attempt is due if no record of it is found between
that mark and the position, an addendum or dead letter only at or beyond the position: a group that closed between the
two may have been opened before the mark, and would look late now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode
from headrace.schemas.columns import pack_int64
from headrace.schemas.events import AttemptEnded, Event, GroupClosed, Position
from headrace.schemas.hashes import crc

from .assembler import Closed, Effect, Fold, RecordLike, Refused
from .clock import LogClock


@dataclass(slots=True)
class Progress:
    """One partition's: feed `take` with what the fold makes of each record."""

    position: int = 0  # all input below is on the log
    read_from: int = 0
    clock: LogClock = field(default_factory=LogClock)  # as it stood at `read_from`
    chain: Chain = field(default_factory=Chain)
    # A failed attempt is named again when a deadline ends its slot, so that `ends_slot` is part of its name.
    ended: set[tuple[str, int, int, bool]] = field(default_factory=set)
    closed: set[tuple[str, int]] = field(default_factory=set)

    low_mark: int = 0  # of the last Position: a restart reads from here
    pending: list[Effect] = field(default_factory=list)
    offset: int = 0  # all input below has been folded
    _next_mark: int = 0
    _offsets: list[int] = field(default_factory=list)
    _crcs: list[int] = field(default_factory=list)

    @classmethod
    def recover(cls, newest_first: Iterable[bytes]) -> Progress:
        """From the values of a partition of `groups`, read backwards as far as is needed."""
        progress, position = cls(), None
        for value in newest_first:
            record: Any = decode(value)
            if position is None:
                progress.chain = Chain.after(record, value)
            if isinstance(record, AttemptEnded):
                progress.ended.add((record.group, record.slot, record.attempt, record.ends_slot))
            elif isinstance(record, GroupClosed):
                progress.closed.add((record.group, record.opened))
            elif isinstance(record, Position):
                if position is None:
                    position = record
                if record.offset <= position.low_mark:
                    break
        if position is not None:
            progress.position, progress.read_from = position.offset, position.low_mark
            progress.clock = LogClock(position.clock_ms, position.last_ms)
        progress.offset = progress.low_mark = progress.read_from
        return progress

    def take(self, record: RecordLike, effects: Sequence[Effect]) -> list[Effect]:
        """Those of a record's effects that are due; they wait for the next commit."""
        if record.offset >= self.position:
            self._offsets.append(record.offset)
            self._crcs.append(crc(record.value or b""))
        self.offset = record.offset + 1
        if not effects:
            return []
        due = [effect for effect in effects if self._due(effect)]
        self.pending += due
        return due

    def _due(self, effect: Effect) -> bool:
        if isinstance(effect, AttemptEnded):
            return (effect.group, effect.slot, effect.attempt, effect.ends_slot) not in self.ended
        if isinstance(effect, Closed):
            return (effect.record.group, effect.record.opened) not in self.closed
        return effect.cause >= self.position

    @property
    def records(self) -> int:
        """Input records that wait for a commit."""
        return len(self._offsets)

    @property
    def replayed(self) -> bool:
        """Whether the fold is where it was at the position again. Only then may it name a new one."""
        return self.offset >= self.position

    def commit(self, fold: Fold, complete: Callable[[Closed], GroupClosed]) -> tuple[Chain, list[tuple[str, bytes]]]:
        """The records of `groups` (group id, value) that settle all that is pending, and the chain after them.

        `complete` adds what only the samples' place decides. Settles nothing: call `committed` once they are written.
        """
        chain, out = self.chain.copy(), []

        def put(key: str, record: Event) -> None:
            out.append((key, chain.extend(record)))

        for effect in self.pending:
            if isinstance(effect, Refused):
                continue
            record = complete(effect) if isinstance(effect, Closed) else effect
            put(record.group, replace(record, **chain.link()))
        self._next_mark, clock_ms, last_ms = fold.low_mark(self.offset)
        gaps = np.diff(np.array([self.position, *self._offsets], np.int64))
        crcs = np.array(self._crcs, np.int64)
        put("", Position(**chain.link(), offset=self.offset, low_mark=self._next_mark, clock_ms=clock_ms,
                         last_ms=last_ms, start=self.position, gaps=pack_int64(gaps),
                         crcs=pack_int64(crcs)))  # fmt: skip
        return chain, out

    def committed(self, chain: Chain) -> None:
        self.chain, self.position, self.low_mark = chain, self.offset, self._next_mark
        self.pending, self._offsets, self._crcs = [], [], []
