"""Does an attempt's tools say the same again? Repeats recorded calls in a fresh session, and compares.

This module decides what a difference is: another text for the model, or another fact than time (exit status, limits
that were met, a new shell, bytes left out). The calls after a difference are made too, since the outcome is what counts
in the end. What the model said is not sampled again: its recorded calls stand for it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.calls import RecordedCall

from .environments import Judged, Session, ToolResult

TIMES = frozenset({"seconds"})  # facts that differ from run to run
LINES = 12  # of a difference


@dataclass(frozen=True, slots=True)
class Again:
    """A call that was made again. `now`: what came of it, or how the attempt ended with it. `differs`: in words; None:
    nothing."""

    number: int  # from 0
    call: RecordedCall
    now: ToolResult | Judged
    differs: str | None


def repeat(calls: Sequence[RecordedCall], session: Session, *, score: bool = True) -> Iterator[Again | Judged]:
    """Each call in turn, and at last how it ended: the verdict (where it is to be taken), or what ended it before."""
    for number, call in enumerate(calls):
        now = session.call(call.name, call.arguments or {}, math.inf)
        yield Again(number, call, now, difference(call, now))
        if isinstance(now, Judged):
            yield now
            return
    if score:
        yield session.score()


def difference(call: RecordedCall, now: ToolResult | Judged) -> str | None:
    """What came back otherwise than it was recorded, for a person to read; None: nothing."""
    if isinstance(now, Judged):
        said = f"it ended the attempt: {now.ending.reason} ({now.error or 'no error'})"
        return None if call.content is None else said
    if call.content is None:
        return "it ended the attempt when it was recorded, and doesn't now"
    facts = [f"{name}: {was!r} was recorded, {is_!r} now" for name, was, is_ in _facts(call.facts, now.facts)]
    text = [] if call.content == now.content else list(_lines(call.content, now.content))
    return "\n".join([*facts, *text]) or None


def _facts(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted((recorded.keys() | now.keys()) - TIMES):
        if recorded.get(name) != now.get(name):
            yield name, recorded.get(name), now.get(name)


def _lines(recorded: str, now: str) -> Iterator[str]:
    """The first lines in which two texts differ: `-` as recorded, `+` now."""
    found = [line for line in difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", n=0,
                                                   lineterm="") if not line.startswith(("---", "+++"))]  # fmt: skip
    yield from found[:LINES] or ["(white space at the end)"]
    if len(found) > LINES:
        yield f"... {len(found) - LINES} more lines"
