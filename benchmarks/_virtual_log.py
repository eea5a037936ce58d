"""What stands for the log where records pass from one to the other in virtual time, without a broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.schemas.events import Task

LINK: dict[str, Any] = {"number": 0, "previous": b""}  # of a chain that nobody proves


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record would lie."""

    offset: int
    timestamp_ms: int
    value: bytes = b""
    partition: int = 0


@dataclass(frozen=True, slots=True)
class Numbered:
    """Task i of a load, for ever."""

    source: str

    def at(self, cursor: int) -> Task | None:
        return Task(str(cursor), self.source, "{}", 0)

    def find(self, task_id: str) -> Task | None:
        return self.at(int(task_id))
