"""Chains: each record of `groups`, `batches` and of every writer in `policy` names the one before it.

A missing, altered or repeated record therefore shows at its successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .codec import encode
from .events import Chained, Event
from .hashes import GENESIS, digest


@dataclass(slots=True)
class Chain:
    """The end of a chain: what the next record must carry."""

    number: int = 0
    previous: bytes = GENESIS

    @classmethod
    def after(cls, record: Chained, value: bytes) -> Chain:
        """The chain as it stands after a record that is on the log as `value`."""
        return cls(record.number + 1, digest(value))

    def link(self) -> dict[str, Any]:
        """Keyword arguments for the next record."""
        return {"number": self.number, "previous": self.previous}

    def extend(self, record: Event) -> bytes:
        """Encode `record`, which carries `link()`, and move on. Returns its bytes. Raises ValueError for a record that
        carries another link."""
        assert isinstance(record, Chained)
        if (record.number, record.previous) != (self.number, self.previous):
            raise ValueError(f"record number {record.number} does not continue a chain at {self.number}")
        value = encode(record)
        self.number, self.previous = self.number + 1, digest(value)
        return value

    def copy(self) -> Chain:
        """The same place in the chain, to try something from."""
        return Chain(self.number, self.previous)
