"""What of a fold's effects is already on the log, and what the next commit says.

The last record of a partition of `groups` is always a `Position`: all input below its offset is accounted for. A
restart folds again from its low mark. Then a closure or an end of an attempt is due if no record of it is found between
that mark and the position, an addendum or dead letter only at or beyond the position: a group that closed between the
two may have been opened before the mark, and would look late now.

What else lies in that partition decides nothing, as long as the chain shows that nothing of ours is missing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode
from headrace.schemas.columns import pack_int64
from headrace.schemas.errors import InvalidRecord, RecordError
from headrace.schemas.events import AttemptEnded, Chained, Event, GroupClosed, Kinds, Position
from headrace.schemas.hashes import crc, digest
from headrace.schemas.topics import GROUPS

from .assembler import Closed, Effect, Fold, RecordLike, Refused
from .clock import LogClock
from .log.reader import Record


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
    def recover(cls, newest_first: Iterable[Record], read: Callable[[bytes | None], Event] = decode) -> Progress:
        """From a partition of `groups`, read backwards as far as is needed.

        Raises InvalidRecord where a record of ours is missing, altered or repeated on the way: what it said might
        otherwise be said twice.
        """
        progress, position = cls(), None
        above: tuple[int, bytes] | None = None  # what the record met last says of the one before it
        last: Record | None = None
        for one in newest_first:
            try:
                record = read(one.value)
            except RecordError:
                continue  # if it was one of ours, its neighbours in the chain show it
            if not isinstance(record, Chained) or not isinstance(record, Kinds.BY_TOPIC[GROUPS]):
                continue
            if above is None:
                progress.chain = Chain.after(record, one.value or b"")
            elif above != (record.number + 1, digest(one.value or b"")):
                raise _broken(one, f"record number {record.number} stands here where number {above[0] - 1} is due")
            above, last = (record.number, record.previous), one
            if isinstance(record, AttemptEnded):
                progress.ended.add((record.group, record.slot, record.attempt, record.ends_slot))
            elif isinstance(record, GroupClosed):
                progress.closed.add((record.group, record.opened))
            elif isinstance(record, Position):
                if position is None:
                    position = record
                if record.offset <= position.low_mark:
                    break
        else:
            if last is not None and above is not None and above[0] > 0:
                raise _broken(last, f"record number {above[0]} stands here, and none before it")
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


def _broken(at: Record, what: str) -> InvalidRecord:
    return InvalidRecord(f"{what}: a record was lost, altered or written by another program, and `headrace ledger` "
                         "says which; restore the topic from a copy, or go on in a new run",
                         at.topic, at.partition, at.offset)  # fmt: skip
