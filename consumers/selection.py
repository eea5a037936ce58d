"""Where a reader begins, and which events it wants: decided here, without a client.

An event belongs to a group, an episode or a version if it says so itself; nothing is looked up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from headrace.schemas.errors import SettingsError
from headrace.schemas.events import Disposed, Event, GroupClosed, Kinds, Lease, Manifest, Span, Version
from headrace.schemas.topics import ALL_TOPICS


@dataclass(frozen=True, slots=True)
class FromVersion:
    """Begin where this version was committed: at its own record in `policy`, at the manifest that it was trained from
    in `batches`, and elsewhere at the time of the commit."""

    version: int


Positions = Mapping[tuple[str, int], int]
"""(topic without prefix and run, partition) -> offset of the next record."""

Start = Literal["earliest", "latest"] | int | datetime | FromVersion | Positions
"""Where to begin: an end of the log; an offset (in each partition; where it is deleted, at the oldest that is
retained); a time; a version; or exact positions, as a service keeps them (DataLossError where one is deleted; a
partition that isn't named is read from its beginning)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What must hold of an event; None: anything. All that is given must hold.

    - `group`: the event is of this group, or names it (a manifest with it, its disposition, its version's counts).
    - `slot` of that group: of this episode, any attempt.
    - `version`: the event's tokens were sampled by it, it is what a manifest trains into, or the event is of it.
    - `kinds`: classes of `headrace.schemas.events`.
    """

    group: str | None = None
    slot: int | None = None
    version: int | None = None
    kinds: tuple[type, ...] = ()

    @classmethod
    def of(cls, *, group: str | None = None, episode: str | None = None, version: int | None = None,
           kinds: type | tuple[type, ...] = ()) -> Selection:  # fmt: skip
        """`episode` as tables show it: GROUP/SLOT. Raises SettingsError."""
        slot = None
        if episode is not None:
            named, slash, number = episode.rpartition("/")
            if not slash or not number.isdecimal():
                raise SettingsError(f"episode {episode!r}: give GROUP/SLOT, as `headrace show RUN episodes` lists them")
            if group not in (None, named):
                raise SettingsError(f"episode {episode!r} is not of group {group!r}: give one of the two")
            group, slot = named, int(number)
        return cls(group, slot, version, kinds if isinstance(kinds, tuple) else (kinds,))

    @property
    def everything(self) -> bool:
        return self == Selection()

    def key(self, topic: str) -> bytes | None:
        """What every record of this topic that is wanted has as its key; None: that can't be said. Spares decoding."""
        keyed = topic in ("trajectories", "samples", "groups", "tasks")
        return self.group.encode() if self.group is not None and keyed else None

    def topics(self) -> tuple[str, ...]:
        """Those that may hold what is wanted. Raises SettingsError where none does."""
        found = tuple(topic for topic in ALL_TOPICS if any(map(self.wants_kind, Kinds.BY_TOPIC[topic])))
        if not found:
            raise SettingsError(f"no topic holds records of the kinds {', '.join(k.__name__ for k in self.kinds)}: use "
                                "classes of headrace.schemas.events")  # fmt: skip
        return found

    def wants_kind(self, kind: type) -> bool:
        """False: no record of this kind can be wanted. Its header says the kind, so that spares decoding too."""
        return not self.kinds or issubclass(kind, self.kinds)

    def wants(self, event: Event) -> bool:
        return (self.wants_kind(type(event))
                and (self.group is None or self._of_group(event, self.group))
                and (self.version is None or self._of_version(event, self.version)))  # fmt: skip

    def _of_group(self, event: Any, group: str) -> bool:
        if isinstance(event, Manifest):
            return any(ref.group == group for ref in event.groups) or any(one.group == group for one in event.reused)
        if isinstance(event, Version):
            return any(count.group == group for count in event.groups)
        if getattr(event, "group", None) != group:
            return False
        if self.slot is None or isinstance(event, GroupClosed | Disposed):
            return True
        if isinstance(event, Lease):
            return any(one.slot == self.slot for one in event.assignments)
        slots = getattr(event, "slots", None)  # of a lease that ended, or was handed back
        return self.slot in slots if slots is not None else getattr(event, "slot", self.slot) == self.slot

    @staticmethod
    def _of_version(event: Any, version: int) -> bool:
        if isinstance(event, Manifest):
            return event.batch == version
        if isinstance(event, Span):
            return any(run.version == version for run in event.versions)
        if isinstance(event, GroupClosed):
            return any(run.version == version for fate in event.slots for run in fate.versions)
        return getattr(event, "version", None) == version
