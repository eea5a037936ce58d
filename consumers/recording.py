"""One attempt as it was recorded, turn by turn: what a person reads, and what a reproduction repeats.

Pure over the events of its episode, in log order. It keeps the events of the incarnation that a lease named, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.calls import RecordedCall, calls_of, parsed_detail
from headrace.schemas.columns import Int32
from headrace.schemas.errors import DataLossError, SettingsError
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Lease, Span, Task, VersionRun
from headrace.streams.log.blobs import text as text_of


@dataclass(frozen=True, slots=True)
class Part:
    """A span. `tokens` int32[count]. `said`: its detail, parsed; `calls` of it."""

    source: str
    turn: int
    tokens: Int32
    versions: tuple[VersionRun, ...]
    stop_reason: str | None
    timings_ms: Mapping[str, float]
    said: Mapping[str, Any]
    calls: tuple[RecordedCall, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """`started`, `ended`: None where the attempt hasn't, or the event is gone. `text`: what the verifier judged."""

    group: str
    slot: int
    attempt: int
    incarnation: str
    task: Task
    started: EpisodeStarted | None
    parts: tuple[Part, ...]
    ended: EpisodeEnded | None
    text: str | None

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        return tuple(call for part in self.parts for call in part.calls)

    @property
    def offered(self) -> bool:
        """Whether the model had tools."""
        return any(part.said.get("tools") or part.calls for part in self.parts)

    @property
    def sandbox(self) -> Mapping[str, Any]:
        """What is recorded of its sandbox (`kind`, `base`, ...); nothing where it had none."""
        found = (part.said.get("sandbox") for part in self.parts)
        return next((one for one in found if isinstance(one, dict)), {})


def recording(events: Iterable[Any], episode: str, attempt: int | None = None,
              fetch: Callable[[Span | EpisodeEnded], str | None] = text_of) -> Recording:  # fmt: skip
    """Of these events of `trajectories` that concern the episode (GROUP/SLOT), the attempt (default: the last one that
    was leased). `fetch` gives an event's long text, wherever it lies.

    Raises SettingsError where there is no such attempt, DataLossError where its beginning was deleted.
    """
    group, _, number = episode.rpartition("/")
    slot, opening = int(number), None
    lessees: dict[int, str] = {}
    found: dict[tuple[int, str], dict[int, Any]] = {}
    for event in events:
        if isinstance(event, Lease):
            opening = event if event.opens else opening
            lessees |= {one.attempt: event.incarnation for one in event.assignments
                        if one.slot == slot and one.attempt not in lessees}  # fmt: skip
        elif isinstance(event, EpisodeStarted | Span | EpisodeEnded) and (event.group, event.slot) == (group, slot):
            found.setdefault((event.attempt, event.incarnation), {}).setdefault(event.sequence, event)
    if opening is None and not found:
        raise SettingsError(f"there is no episode {episode!r}: give GROUP/SLOT, as `headrace show RUN episodes` lists "
                            "them")  # fmt: skip
    if opening is None:
        raise DataLossError(f"the opening record of group {group} is deleted, and its task with it")
    wanted = max(lessees, default=-1) if attempt is None else attempt
    if wanted not in lessees:
        raise SettingsError(f"episode {episode} has no attempt {wanted}: its attempts are "
                            f"{', '.join(map(str, sorted(lessees))) or 'none'}")  # fmt: skip
    incarnation = lessees[wanted]
    own = [event for _, event in sorted(found.get((wanted, incarnation), {}).items())]
    started = next((one for one in own if isinstance(one, EpisodeStarted)), None)
    ended = next((one for one in own if isinstance(one, EpisodeEnded)), None)
    return Recording(group, slot, wanted, incarnation, opening.task, started,
                     tuple(_part(one, fetch) for one in own if isinstance(one, Span)), ended,
                     None if ended is None else fetch(ended))  # fmt: skip


def _part(span: Span, fetch: Callable[[Span | EpisodeEnded], str | None]) -> Part:
    said = parsed_detail(fetch(span))
    return Part(span.source, span.turn, span.token_ids(), span.versions, span.stop_reason, span.timings_ms, said,
                calls_of(said, span.turn))  # fmt: skip
