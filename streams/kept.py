"""What the spans of open groups take up in memory: as much as a budget allows; the rest is read again by offset.

Nothing waits for memory: a span beyond the budget leaves its offset, 8 bytes, and its group's closure fetches it. A
candidate's content is the same either way. Candidates don't pile up here: once committed they lie in `samples`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from headrace.schemas.errors import InvalidRecord, RecordError
from headrace.schemas.events import Event, GroupPayload, PayloadEpisode, PayloadSpan, Span
from headrace.schemas.payload import payload_span

from .assembler import RecordLike

SPAN_OVERHEAD = 400  # bytes that a span takes in memory beside its record's value

ReadAgain = Callable[[Collection[int]], Mapping[int, Event | RecordError]]


@dataclass(slots=True)
class Budget:
    """Bytes that are left, of all partitions of a process."""

    room: int


@dataclass(slots=True)
class _Held:
    spans: dict[int, PayloadSpan] = field(default_factory=dict)  # by offset
    beyond: array[int] = field(default_factory=lambda: array("q"))  # offsets of those that found no room
    size: int = 0


class KeptSpans:
    """One partition's. `read_again` reads events of that partition by offset; it raises DataLossError."""

    def __init__(self, budget: Budget, read_again: ReadAgain) -> None:
        self._budget, self._read_again = budget, read_again
        self._groups: dict[str, _Held] = {}

    def keep(self, span: Span, record: RecordLike) -> None:
        held = self._groups.get(span.group)
        if held is None:
            held = self._groups[span.group] = _Held()
        size = len(record.value or b"") + SPAN_OVERHEAD
        if size > self._budget.room:
            held.beyond.append(record.offset)
            return
        held.spans[record.offset] = payload_span(span)
        held.size += size
        self._budget.room -= size

    def fill(self, plan: GroupPayload) -> GroupPayload:
        """The plan with the spans at its episodes' offsets. Raises DataLossError where one is gone from the log."""
        held = self._groups.get(plan.group) or _Held()
        spans = held.spans
        if held.beyond:
            wanted = {offset for episode in plan.episodes for offset in episode.offsets}.intersection(held.beyond)
            spans = spans | {offset: _again(offset, event) for offset, event in self._read_again(wanted).items()}

        def filled(episode: PayloadEpisode) -> PayloadEpisode:
            return replace(episode, spans=tuple([spans[offset] for offset in episode.offsets if offset in spans]))

        return replace(plan, episodes=tuple(filled(episode) for episode in plan.episodes))

    def drop(self, group: str) -> None:
        """Its closure has been decided."""
        held = self._groups.pop(group, None)
        if held is not None:
            self._budget.room += held.size


def _again(offset: int, event: Event | RecordError) -> PayloadSpan:
    if isinstance(event, Span):
        return payload_span(event)
    raise event if isinstance(event, RecordError) else InvalidRecord(f"no span at offset {offset}")
