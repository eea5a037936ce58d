"""What an exact join over a whole run needs to remember, kept on disk: memory holds a small cache of it.

Some questions are about any group that ever was: did it close before, did a late event belong to it, is it what this
manifest names? The answers take some 200 bytes a group, so they go into a private SQLite database in a temporary file
(in the directory that SQLITE_TMPDIR or TMPDIR names), which is gone when it is closed.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

from headrace.schemas.events import GroupClosed
from headrace.schemas.outcomes import SUSPICIOUS, Account, Outcome

from .facts import Fact, address

CACHE_KB = 8 << 10

# What is known of a slot, as bits; else infrastructure failed.
COUNTED, SUCCESS, FAILURE, UNKNOWN, LEFT_OUT = 1, 2, 4, 8, 16

_OUTCOMES: dict[str, int] = {
    Outcome.MODEL_SUCCESS: SUCCESS, Outcome.MODEL_FAILURE: FAILURE, Outcome.UNKNOWN: UNKNOWN,
}  # fmt: skip

_TABLES = """
CREATE TABLE closures (name TEXT PRIMARY KEY, "partition" INT, "offset" INT, closure TEXT, purpose TEXT, opened INT,
    tokens INT, hash BLOB, task TEXT, slots BLOB, decided TEXT) WITHOUT ROWID;
CREATE TABLE opened (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE leases (number INTEGER PRIMARY KEY, "partition" INT, "offset" INT, digest BLOB);
CREATE TABLE letters ("partition" INT, "offset" INT, PRIMARY KEY ("partition", "offset")) WITHOUT ROWID;
CREATE TABLE late (name TEXT, size INT, events INT, PRIMARY KEY (name, size)) WITHOUT ROWID;
CREATE TABLE versions (version INTEGER PRIMARY KEY, hash BLOB, "where" TEXT, published INT);
CREATE TABLE uses (name TEXT, slot INT, uses INT, PRIMARY KEY (name, slot)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class ClosedSlot:
    """What a join needs of a slot of a closed group."""

    slot: int
    model_tokens: int
    counted: bool
    success: bool
    failure: bool  # the model's
    unknown: bool
    excluded: bool  # as suspicious

    @property
    def account(self) -> str:
        """Of one that doesn't count."""
        if self.excluded:
            return f"{Account.EXCLUDED} ({SUSPICIOUS})"
        if self.success or self.failure:
            return str(Account.SURPLUS)
        return f"{Account.EXCLUDED} ({Outcome.UNKNOWN if self.unknown else Outcome.INFRA_FAILURE})"


@dataclass(frozen=True, slots=True)
class Closed:
    """What is kept of a closure. `decided` is the address of the record that decided the candidate."""

    name: str
    partition: int
    offset: int
    closure: str
    purpose: str
    opened: int
    tokens: int  # of the candidate
    content_hash: bytes | None
    task: str
    slots: tuple[ClosedSlot, ...]
    decided: str | None

    def __str__(self) -> str:
        return address("groups", self.partition, self.offset)


@dataclass(frozen=True, slots=True)
class RawLease:
    """A coordinator's lease in `trajectories`."""

    number: int
    where: str
    digest: bytes


class Index:
    """Not for several threads."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # no name: a temporary file of its own
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KB}"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_TABLES)
        self._db.execute("BEGIN")

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._db.close()

    # ------------------------------------------------------------------------------------------------- groups

    def add_closure(self, fact: Fact[GroupClosed]) -> bool:
        """False where the group has closed before: then the first closure stands."""
        event = fact.event
        slots = array("q")
        for fate in event.slots:
            slots.extend((fate.slot, fate.model_tokens, COUNTED * fate.counted + _OUTCOMES.get(fate.outcome, 0)
                          + LEFT_OUT * fate.excluded))
        done = self._db.execute(
            "INSERT OR IGNORE INTO closures VALUES (?,?,?,?,?,?,?,?,?,?,NULL)",
            (event.group, fact.partition, fact.offset, event.closure, event.purpose, event.opened,
             event.accounts.get("candidate", 0), event.content_hash, event.task, slots.tobytes()),
        )  # fmt: skip
        return done.rowcount == 1

    def closure(self, group: str) -> Closed | None:
        row = self._db.execute("SELECT * FROM closures WHERE name = ?", (group,)).fetchone()
        return _closed(row) if row else None

    def decide(self, group: str, where: str) -> None:
        self._db.execute("UPDATE closures SET decided = ? WHERE name = ?", (where, group))

    def undecided(self, closure: str) -> Iterator[Closed]:
        """Those that closed so and were not decided."""
        for row in self._db.execute("SELECT * FROM closures WHERE closure = ? AND decided IS NULL", (closure,)):
            yield _closed(row)

    def add_opened(self, groups: Iterable[str]) -> None:
        """Groups that were opened and have not closed."""
        self._db.executemany("INSERT OR IGNORE INTO opened VALUES (?)", ((group,) for group in groups))

    def add_late(self, group: str, size: int) -> None:
        """A late event of a group of which nobody knows yet whether it ever was."""
        self._db.execute("INSERT INTO late VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET events = events + 1",
                         (group, size))  # fmt: skip

    def late(self) -> Iterator[tuple[bool, int, int]]:
        """(whether the group ever was, model tokens of an event, how many such events)."""
        for known, size, events in self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM closures c WHERE c.name = late.name)"
            " OR EXISTS (SELECT 1 FROM opened o WHERE o.name = late.name), size, sum(events) FROM late GROUP BY 1, 2"
        ):
            yield bool(known), size, events

    # ------------------------------------------------------------------------------------------------- the others

    def add_lease(self, number: int, partition: int, offset: int, digest: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO leases VALUES (?,?,?,?)", (number, partition, offset, digest))

    def leases(self) -> Iterator[RawLease]:
        """By number, ascending."""
        for number, partition, offset, digest in self._db.execute("SELECT * FROM leases ORDER BY number"):
            yield RawLease(number, address("trajectories", partition, offset), digest)

    def add_letter(self, partition: int, offset: int) -> None:
        """A dead letter about a record of `trajectories`."""
        self._db.execute("INSERT OR IGNORE INTO letters VALUES (?,?)", (partition, offset))

    def has_letter(self, partition: int, offset: int) -> bool:
        query = 'SELECT 1 FROM letters WHERE "partition" = ? AND "offset" = ?'
        return self._db.execute(query, (partition, offset)).fetchone() is not None

    def add_version(self, version: int, served_hash: bytes, where: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO versions VALUES (?,?,?,0)", (version, served_hash, where))

    def publish(self, version: int) -> None:
        self._db.execute("UPDATE versions SET published = 1 WHERE version = ?", (version,))

    def version(self, version: int) -> tuple[bytes, str, bool] | None:
        """(served hash, address, whether it was published)."""
        query = 'SELECT hash, "where", published FROM versions WHERE version = ?'
        row = self._db.execute(query, (version,)).fetchone()
        return (row[0], row[1], bool(row[2])) if row else None

    @property
    def versions(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM versions").fetchone()[0])

    def use(self, group: str, slot: int, use: int) -> int:
        """Note this use of a success. The use that was noted before; 0: none."""
        row = self._db.execute("SELECT uses FROM uses WHERE name = ? AND slot = ?", (group, slot)).fetchone()
        self._db.execute("INSERT OR REPLACE INTO uses VALUES (?,?,?)", (group, slot, use))
        return int(row[0]) if row else 0


def _closed(row: tuple[str, int, int, str, str, int, int, bytes | None, str, bytes, str | None]) -> Closed:
    packed = array("q")
    packed.frombytes(row[9])
    triples = zip(packed[::3], packed[1::3], packed[2::3], strict=True)
    slots = tuple(ClosedSlot(slot, tokens, bool(what & COUNTED), bool(what & SUCCESS), bool(what & FAILURE),
                             bool(what & UNKNOWN), bool(what & LEFT_OUT))
                  for slot, tokens, what in triples)  # fmt: skip
    return Closed(*row[:9], slots, row[10])
