"""What must hold of the schemas that `policy` announces, beside the chain that runs through them.

The newest record of a chain has none after it that would vouch for it. So these vouch for themselves: the fingerprint
is that of the schema's very text, and each names the last record of its announcement.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.schemas.codec import fingerprint_of
from headrace.schemas.events import SchemaAdded

from .facts import Fact, Failures


class Announcements:
    """Feed it the records of `policy`, in order."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        # What an announcement has still to bring, and the record before it and after that.
        self._due: dict[tuple[str, int], tuple[Fact[Any], Fact[Any]]] = {}
        self._before: tuple[str, int] | None = None

    def feed(self, fact: Fact[Any]) -> None:
        if self._before in self._due:
            self._due[self._before] = (self._due[self._before][0], fact)
        self._before, event = None, fact.event
        if not isinstance(event, SchemaAdded):
            return
        self._due.pop((event.writer, event.number), None)
        if fingerprint_of(event.schema) != event.fingerprint or _name(event.schema) != event.name:
            self._fail(fact, f"is not the schema of {event.name} that its fingerprint names: it was altered")
        if event.last < event.number:
            self._fail(fact, f"number {event.number} of an announcement that ended with {event.last}")
        elif event.number < event.last:
            self._before = event.writer, event.number + 1
            self._due[self._before] = fact, fact

    def finish(self) -> None:
        for (_, number), (fact, after) in self._due.items():
            self._fail(after, f"number {number} of the announced schemas is missing after {fact}")

    def _fail(self, fact: Fact[Any], message: str) -> None:
        self._failures.add("schema", fact, message)


def _name(schema: str) -> str:
    try:
        return str(json.loads(schema)["name"]).rpartition(".")[2]
    except (ValueError, TypeError, KeyError):
        return ""
