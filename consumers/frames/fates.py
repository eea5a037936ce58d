"""What `batches` and `policy` decided about each candidate, kept on disk: a run of any length takes little memory.

A private SQLite database in a temporary file, as the ledger's index.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from headrace.schemas.events import Disposed, Manifest, Version
from headrace.schemas.outcomes import Disposition
from headrace.schemas.topics import BATCHES, POLICY

from ..facts import Failures, read_facts
from ..source import LogSource

OPEN = "open"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a group, so far as `batches` and `groups` say; `version` trained it."""

    disposition: str
    reason: str | None = None
    batch: int | None = None
    max_lag: int | None = None
    version: int | None = None


class Fates:
    """Not for several threads."""

    def __init__(self, source: LogSource) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-8192"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE fates (name TEXT PRIMARY KEY, disposition TEXT, reason TEXT, batch INT, lag INT)"
                         " WITHOUT ROWID")  # fmt: skip
        self._db.execute("BEGIN")
        ignored = Failures()
        for fact in read_facts(source, BATCHES, 0, ignored):
            event, rows = fact.event, list[tuple[str, str, str | None, int | None, int | None]]()
            if isinstance(event, Manifest):
                rows = [(ref.group, str(Disposition.BATCHED), None, event.batch, ref.max_lag) for ref in event.groups]
            elif isinstance(event, Disposed):
                rows = [(event.group, event.disposition, event.reason, None, None)]
            self._db.executemany("INSERT OR IGNORE INTO fates VALUES (?,?,?,?,?)", rows)
        self._versions = {fact.event.batch: fact.event.version for fact in read_facts(source, POLICY, 0, ignored)
                          if isinstance(fact.event, Version) and fact.event.version}  # fmt: skip

    def of(self, candidate: str) -> Fate:
        query = "SELECT disposition, reason, batch, lag FROM fates WHERE name = ?"
        row = self._db.execute(query, (candidate,)).fetchone()
        if row is None:
            return Fate(OPEN)
        return Fate(row[0], row[1] or None, row[2], row[3], self._versions.get(row[2]))

    def close(self) -> None:
        self._db.close()
