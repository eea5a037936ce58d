"""How many dead letters a run has, of which kinds, and the newest one: by a bounded read of the end of the topic.

The topic's offsets count markers and aborted records too, so that they bound the number of letters from above; only
reading counts them exactly. The newest `READ` are read (or `READ_BYTES` of them), and with fewer than that the count is
exact. Of the others it is at most as many as there are offsets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import DeadLetter
from headrace.schemas.topics import DEADLETTER

from .facts import address
from .source import LogSource, backwards

READ = 1000
READ_BYTES = 32 << 20
WINDOW = 64  # records that are held at once; each may fill a megabyte


@dataclass(frozen=True, slots=True)
class NewestLetter:
    """The newest dead letter that can be read."""

    at: str  # address of the letter
    origin: str  # and of the record that it is about
    time_ms: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """`count` is exact, or an upper bound; `by_kind` counts the `read` newest ones by kind and topic of origin."""

    count: int = 0
    exact: bool = True
    read: int = 0
    by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    newest: NewestLetter | None = None


def origin(letter: DeadLetter) -> str:
    """The address of the record that a letter is about, its topic without prefix and run."""
    return address(letter.topic.rsplit(".", 1)[-1], letter.partition, letter.offset)


def dead_letters(source: LogSource, read: int = READ, read_bytes: int = READ_BYTES) -> DeadLetters:
    """Those that the run has now."""
    by_kind: Counter[tuple[str, str]] = Counter()
    newest, seen, size, oldest = None, 0, 0, source.end(DEADLETTER, 0)
    for record in backwards(source, DEADLETTER, 0, widest=WINDOW):
        if seen >= read or size >= read_bytes:
            left = oldest - source.first(DEADLETTER, 0)
            return DeadLetters(seen + left, False, seen, by_kind, newest)
        seen, size, oldest = seen + 1, size + len(record.value or b""), record.offset
        where = address(DEADLETTER, 0, record.offset)
        try:
            letter = decode(record.value)
        except UndecodableRecord as error:
            letter = DeadLetter(DEADLETTER, 0, record.offset, type(error).__name__, str(error), None, record.value)
        if isinstance(letter, DeadLetter):
            by_kind[letter.kind, letter.topic.rsplit(".", 1)[-1]] += 1
            newest = newest or NewestLetter(where, origin(letter), record.timestamp_ms, letter.kind, letter.reason)
    return DeadLetters(seen, True, seen, by_kind, newest)
