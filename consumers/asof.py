"""A run's log as it stood at an earlier moment: a consistent cut through all its topics, as a source to read from.

The moment is a time T. Given as an offset of `batches`, the decision there is the last one that counts, and T is the
time of the one after it; where there is none, the cut is the whole log. Times are those of the records, so they are
as good as the writers' clocks; what records say of each other goes before them.

| topic | the cut |
|---|---|
| `batches` | the decisions before T |
| `policy` | what is before T, at least the settings under which the last manifest was decided, and no version that was trained from a later manifest |
| `groups` | what is before T, at least the positions that the last manifest states and the closures disposed of since; from there on to the end of the assembler's commit, since a commit is there as a whole or not at all |
| `trajectories` | what the last position of that partition of `groups` accounts for |
| `samples`, `weights`, `tasks` | what is named by the above |
| `deadletter` | letters about records of `trajectories` in the cut, and others before T |

Everything else is as if it weren't there: a candidate that was decided later is open. Events that the assembler had not
accounted for at T are left out, since of them nobody can say afterwards when they were written. Where `trajectories`
have been deleted up to a group that was open at T, that partition's raw events can't be counted any more, and the
tokens of its open groups are missing from the account.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.codec import decode
from headrace.schemas.errors import SettingsError, UndecodableRecord
from headrace.schemas.events import DeadLetter, Disposed, Event, Manifest, Position, Version
from headrace.schemas.topics import BATCHES, DEADLETTER, GROUPS, POLICY, SAMPLES, TASKS, TRAJECTORIES
from headrace.streams.log.reader import Record

from .source import LogSource, backwards

# No record is older, no offset so large: an integer above is a time in ms since the epoch.
OLDEST_MS = 10**11


@dataclass(frozen=True, slots=True)
class _Edge:
    """Where the cut goes through a partition of `groups` and of `trajectories`."""

    groups: int
    raw: int
    low_mark: int  # the raw events of all groups that were open begin here


class AsOf:
    """A LogSource over another one."""

    def __init__(self, source: LogSource, *, offset: int | None = None, time_ms: int | None = None) -> None:
        """Either an offset of `batches` or a time. Raises SettingsError where the offset is beyond the last decision,
        or nothing is there before it."""
        assert (offset is None) != (time_ms is None)
        self.run, self._source = source.run, source
        self._time: int | None  # None: the cut is the whole log
        end, first = source.end(BATCHES, 0), source.first(BATCHES, 0)
        if offset is not None:
            later = next(source.records(BATCHES, 0, offset + 1), None)
            if next(source.records(BATCHES, 0, offset), None) is None or offset < first:
                newest = next(backwards(source, BATCHES, 0), None)
                held = f"its decisions end with offset {newest.offset}" if newest else "it holds no decision yet"
                raise SettingsError(f"batches has no record at offset {offset}: {held}")
            self._time, self._batches = (later.timestamp_ms, offset + 1) if later else (None, end)
        else:
            self._time, self._batches = time_ms, source.offset_at(BATCHES, 0, time_ms or 0)
        manifest, self._named = self._decided()
        self._policy = self._before(POLICY, 0, 0 if manifest is None else manifest.settings_offset + 1)
        self._edges = [self._edge(p) for p in range(source.partitions(GROUPS))]

    # ------------------------------------------------------------------------------------------------- the cut

    def _before(self, topic: str, partition: int, least: int) -> int:
        """The end of what was there at T."""
        if self._time is None:
            return self._source.end(topic, partition)
        return max(least, self._source.offset_at(topic, partition, self._time))

    def _decided(self) -> tuple[Manifest | None, dict[int, int]]:
        """The last manifest, and by partition of `groups` the end of what the decisions rest on."""
        named: dict[int, int] = {}
        for record in backwards(self._source, BATCHES, 0, self._batches):
            event = _decoded(record)
            if isinstance(event, Disposed):
                named[event.partition] = max(named.get(event.partition, 0), event.offset + 1)
            elif isinstance(event, Manifest):
                for one in event.positions:
                    named[one.partition] = max(named.get(one.partition, 0), one.offset)
                return event, named
        return None, named

    def _edge(self, partition: int) -> _Edge:
        """The end of the commit that the cut falls into."""
        end = min(self._before(GROUPS, partition, self._named.get(partition, 0)), self._source.end(GROUPS, partition))
        last = next(backwards(self._source, GROUPS, partition, end), None)
        position = _decoded(last) if last is not None else None
        if last is not None and not isinstance(position, Position):
            for record in self._source.records(GROUPS, partition, end):
                end, position = record.offset + 1, _decoded(record)
                if isinstance(position, Position):
                    break
        if not isinstance(position, Position):
            return _Edge(end, 0, 0)
        return _Edge(end, position.offset, position.low_mark)

    # ------------------------------------------------------------------------------------------------- the source

    def partitions(self, topic: str) -> int:
        return self._source.partitions(topic)

    def first(self, topic: str, partition: int) -> int:
        first = self._source.first(topic, partition)
        if topic == TRAJECTORIES and self._time is not None and self._edges[partition].low_mark < first:
            return max(first, self._edges[partition].raw)  # as if all were deleted
        return first

    def end(self, topic: str, partition: int) -> int:
        end = self._source.end(topic, partition)
        if self._time is None:
            return end
        cuts = {BATCHES: lambda: self._batches, POLICY: lambda: self._policy,
                GROUPS: lambda: self._edges[partition].groups, TRAJECTORIES: lambda: self._edges[partition].raw}
        return min(end, cuts[topic]()) if topic in cuts else end

    def settled(self, topic: str, partition: int) -> int:
        if self._time is None:
            return self._source.settled(topic, partition)
        return 0 if topic in (SAMPLES, TASKS) else self.end(topic, partition)

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        start, cut = max(start, self.first(topic, partition)), self.end(topic, partition)
        records = self._source.records(topic, partition, start, cut if end is None else min(cut, end))
        if self._time is None:
            yield from records
            return
        for record in records:
            event = _decoded(record) if topic in (POLICY, DEADLETTER) else None
            if isinstance(event, Version) and event.batch_offset >= self._batches:
                return
            if topic == DEADLETTER and not self._had(record, event):
                continue
            yield record

    def _had(self, record: Record, letter: Event | None) -> bool:
        if isinstance(letter, DeadLetter) and letter.topic.rsplit(".", 1)[-1] == TRAJECTORIES:
            return letter.partition < len(self._edges) and letter.offset < self._edges[letter.partition].raw
        return self._time is None or record.timestamp_ms < self._time

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        return min(self._source.offset_at(topic, partition, time_ms), self.end(topic, partition))


def _decoded(record: Record) -> Event | None:
    try:
        return decode(record.value)
    except UndecodableRecord:
        return None
