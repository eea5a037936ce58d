"""Every way to tamper with one record of a log, and whether the ledger must notice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.consumers.ledger import audit
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Lease
from headrace.schemas.topics import BATCHES, GROUPS, POLICY, SAMPLES, TRAJECTORIES
from headrace.streams.log.reader import Record
from tests.memory_log import MemoryLog, Place

PROVEN = (GROUPS, SAMPLES, BATCHES, POLICY)


@dataclass(frozen=True, slots=True)
class Tampering:
    what: str
    place: Place
    record: Record
    log: MemoryLog
    successor: int | None  # the next record's offset

    def __str__(self) -> str:
        return f"{self.what} {self.place[0]}[{self.place[1]}]@{self.record.offset}"

    def noticed(self) -> bool:
        """The ledger fails and names the record, or the one after it."""
        failures = audit(self.log).failures
        name = f"{self.place[0]}[{self.place[1]}]@"
        added = self.log.logs[self.place][-1].offset
        wanted = {f"{name}{offset}" for offset in (self.record.offset, self.successor, added) if offset is not None}
        event = None
        if self.place[0] == TRAJECTORIES:
            with contextlib.suppress(UndecodableRecord):
                event = decode(self.record.value)
        lease = f"lease {event.number} of {event.group} " if isinstance(event, Lease) else None  # its name in `tasks`
        return any(
            (lease is not None and lease in line) or any(word.strip(":;,.") in wanted for word in line.split())
            for line in failures
        )


def other_value(value: bytes, seed: int) -> bytes:
    """The record with one field changed: it decodes, and says something else."""
    event = decode(value)
    for field in sorted(fields(event), key=lambda f: random.Random(f"{seed} {f.name}").random()):
        old = getattr(event, field.name)
        new: Any = None
        if isinstance(old, bool):
            new = not old
        elif isinstance(old, int | float):
            new = old + 1
        elif isinstance(old, str) and old:
            new = old + "x"
        elif isinstance(old, bytes) and old:
            new = bytes([old[0] ^ 1]) + old[1:]
        if new is not None and (changed := encode(replace(event, **{field.name: new}))) != value:
            return changed
    raise AssertionError(f"nothing to change in {event}")


def flipped(value: bytes, seed: int) -> bytes:
    """One bit of one byte turned over."""
    at = random.Random(seed).randrange(len(value))
    return value[:at] + bytes([value[at] ^ (1 << seed % 8)]) + value[at + 1 :]


def tamperings(log: MemoryLog, referred: set[tuple[Place, int]]) -> Iterator[Tampering]:
    """All of them; the last record of a partition is left alone unless it is among `referred`."""
    for place, records in log.logs.items():
        for index, record in enumerate(records):
            last = index + 1 == len(records)
            successor = None if last else records[index + 1].offset
            free = last and (place, record.offset) not in referred
            if place[0] in PROVEN:
                assert record.value is not None
                yield Tampering("repeating", place, record, log.repeated(record, place), successor)
                if free:
                    continue
                yield Tampering("removing", place, record, log.without(record, place), successor)
                for name, make in (("flipping a bit of", flipped), ("altering", other_value)):
                    try:
                        value = make(record.value, record.offset)
                    except UndecodableRecord:
                        continue
                    yield Tampering(name, place, record, log.altered(record, place, value), successor)
            elif place[0] == TRAJECTORIES and not free:
                yield Tampering("removing", place, record, log.without(record, place), successor)


def referred_to(log: MemoryLog) -> set[tuple[Place, int]]:
    """Records that another one names by their place: samples, closures, manifests, input below a position."""
    named: set[tuple[Place, int]] = set()
    for (topic, partition), records in log.logs.items():
        for record in records:
            if topic in (GROUPS, BATCHES, POLICY):
                event: Any = decode(record.value)
                match type(event).__name__:
                    case "GroupClosed":
                        named |= {((SAMPLES, partition), ref.offset) for ref in event.samples}
                    case "Manifest":
                        named |= {((GROUPS, ref.partition), ref.offset) for ref in event.groups}
                    case "Version":
                        named.add(((BATCHES, 0), event.batch_offset))
                    case "Position":
                        named |= {((TRAJECTORIES, partition), r.offset) for r in log.logs[TRAJECTORIES, partition]
                                  if r.offset < event.offset}  # fmt: skip
    return named


def check_every_tampering(log: MemoryLog) -> int:
    """Try them all; how many there were."""
    assert audit(log).closes, audit(log).failures
    unnoticed, tried = [], 0
    for tampering in tamperings(log, referred_to(log)):
        tried += 1
        if not tampering.noticed():
            unnoticed.append(f"{tampering}: {audit(tampering.log).failures}")
    assert not unnoticed, f"{len(unnoticed)} of {tried}:\n" + "\n".join(unnoticed)
    return tried
