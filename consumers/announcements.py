"""What must hold of the schemas that `policy` announces, beside the chain that runs through them.

The newest record of a chain has none after it that would vouch for it. So these vouch for themselves: the fingerprint
is that of the schema's very text, and each names the last record of its announcement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.schemas.codec import fingerprint_of
from headrace.schemas.events import SchemaAdded

from .facts import Fact


def check_announcements(facts: Sequence[Fact[Any]]) -> Iterator[tuple[Fact[Any], str]]:
    """The records of `policy`, in order -> the record, and what doesn't hold of it (or of what stood before it)."""
    places = {(fact.event.writer, fact.event.number) for fact in facts if isinstance(fact.event, SchemaAdded)}
    for i, fact in enumerate(facts):
        if not isinstance(event := fact.event, SchemaAdded):
            continue
        if fingerprint_of(event.schema) != event.fingerprint or _name(event.schema) != event.name:
            yield fact, f"is not the schema of {event.name} that its fingerprint names: it was altered"
        if event.last < event.number:
            yield fact, f"number {event.number} of an announcement that ended with {event.last}"
        elif event.number < event.last and (event.writer, event.number + 1) not in places:
            after = facts[i + 1] if i + 1 < len(facts) else fact
            yield after, f"number {event.number + 1} of the announced schemas is missing after {fact}"


def _name(schema: str) -> str:
    try:
        return str(json.loads(schema)["name"]).rpartition(".")[2]
    except (ValueError, TypeError, KeyError):
        return ""
