"""What must hold of `policy`, and between it and `batches`, `weights` and `tasks`: whatever one record names exists,
unchanged, and is named once.

Everything is read in order, once; what an exact join must remember is in the index.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from headrace.schemas.columns import unpack_int32
from headrace.schemas.events import (
    COUNTERFACTUAL,
    Derived,
    GroupCount,
    Lease,
    Manifest,
    Publication,
    Reconciled,
    RunCreated,
    SettingsChanged,
    Version,
    WeightChunk,
)
from headrace.schemas.topics import BATCHES, POLICY, TASKS, WEIGHTS

from .accounts import Accounts
from .announcements import Announcements
from .batches import Batches
from .facts import ChainCheck, Fact, Failures, address, read_facts
from .givenup import given_up
from .index import Index
from .source import LogSource


def check_policy(source: LogSource, index: Index, accounts: Accounts, failures: Failures) -> Batches:
    """Versions without gap, each trained from the manifest it names, published in turn; and the batches that they were
    trained from. The closures must be in the index."""
    settings: dict[int, bytes] = {}
    batches = Batches(source, settings, index, accounts, failures)
    check = _Policy(index, batches, WeightCheck(source, failures), failures, given_up(source))
    announcements = Announcements(failures)
    for fact in read_facts(source, POLICY, 0, failures):
        check.chain(fact)
        announcements.feed(fact)
        match fact.event:
            case RunCreated() | SettingsChanged():
                settings[fact.offset] = fact.digest  # under which a manifest may have been decided
            case Version():
                check.version(fact)
            case Publication():
                check.publication(fact)
            case Reconciled():
                check.reconciled(fact)
            case Derived():
                check.derived = fact.event
    announcements.finish()
    batches.finish()
    return batches


@dataclass(slots=True)
class _Policy:
    index: Index
    batches: Batches
    weights: WeightCheck
    failures: Failures
    given_up: frozenset[int]
    derived: Derived | None = None
    _created: Fact[RunCreated] | None = None
    _first: bool = True
    _chains: dict[str, ChainCheck] = field(default_factory=dict)  # by writer
    _newest: int = -1
    _tip: int = -1  # whose weights the next version is trained from

    def chain(self, fact: Fact[Any]) -> None:
        event, first, self._first = fact.event, self._first, False
        if first and isinstance(event, RunCreated):
            self._created = fact
            self._chains[event.writer] = ChainCheck(self.failures)
        elif first:
            self.failures.add("version", fact, "is not the record of the run's creation: that is missing before it")
        self._chains.setdefault(event.writer, ChainCheck(self.failures, begin=self._created)).feed(fact)

    def version(self, fact: Fact[Version]) -> None:
        event, due = fact.event, self._newest + 1
        if (event.version, event.parent) != (due, self._tip):
            self._fail(fact, f"version {event.version} from {event.parent} where version {due} from {self._tip} is due")
        if event.version and not self._borrows:
            before = self.index.version(event.version - 1)
            if before is None or not before[2]:
                self._fail(fact, f"version {event.version} before version {event.version - 1} was published")
            self._trained_from(fact)
        self.index.add_version(event.version, event.served_hash, str(fact))
        self._newest = max(self._newest, event.version)
        self._tip = event.version

    @property
    def _borrows(self) -> bool:
        """Whether it trains another run's batches, and publishes nothing."""
        return self.derived is not None and self.derived.kind == COUNTERFACTUAL

    def reconciled(self, fact: Fact[Reconciled]) -> None:
        """What was settled about the newest version when it came out differently."""
        event = fact.event
        newest, base = self.index.version(event.version), self.index.version(event.checkpoint)
        if event.version != self._newest or newest is None or base is None or event.checkpoint >= self._tip:
            self._fail(fact, f"{event.rule} of version {event.version} to version {event.checkpoint}, where version "
                             f"{self._newest} from {self._tip} is the newest")  # fmt: skip
            return
        if event.rule == "rollback":
            if event.served_hash != base[0]:
                self._fail(fact, f"goes on from version {event.checkpoint} under another hash than {base[1]}")
            if event.replaces == newest[2]:
                self._fail(fact, f"replaces={event.replaces}, but whether version {event.version} had been published "
                                 f"is {newest[2]}")  # fmt: skip
            self._tip = event.checkpoint
        elif event.rule != "rebase" or not event.replaces:
            self._fail(fact, f"{event.rule!r} with replaces={event.replaces} is no way to settle a difference")
        if event.replaces:
            self.index.add_version(event.version, event.served_hash, str(fact))

    def _trained_from(self, fact: Fact[Version]) -> None:
        event = fact.event
        self.batches.advance(event.batch_offset)
        batch = self.batches.waiting.get(event.batch_offset)
        where = address(BATCHES, 0, event.batch_offset)
        if batch is None:
            self._fail(where, f"is no manifest that waits for a version, or missing: {fact} was trained from it")
            return
        if event.batch_digest != batch.digest:
            self._fail(where, f"was altered: {fact} holds another digest of it")
        if not event.batch == batch.batch == event.version:
            self._fail(fact, f"version {event.version} from batch {event.batch}, but {where} is {batch.batch}")
        counts, reused = _by_group(event.groups), _by_group(event.reused)
        self._compare(fact, counts, batch.held, f"of {{}}; {where}: ")
        self._compare(fact, reused, batch.reused, f"of a success beside {{}}; {where}: ")
        self.batches.commit(batch, counts, reused, given_up=event.version in self.given_up)

    def _compare(self, fact: Fact[Version], counts: Mapping[str, GroupCount], held: Mapping[str, int],
                 what: str) -> None:  # fmt: skip
        for group in sorted(counts.keys() | held.keys()):
            count = counts.get(group)
            used = None if count is None else count.trained + count.masked
            if used != held.get(group):
                self._fail(fact, f"{used} tokens trained or masked {what.format(group)}{held.get(group)}")

    def publication(self, fact: Fact[Publication]) -> None:
        event = fact.event
        version, base = self.index.version(event.version), self.index.version(event.base)
        if version is None:
            self._fail(fact, f"publishes version {event.version}, which was not committed before it", "publication")
        elif event.served_hash != version[0]:
            said = f"publishes version {event.version} under another hash than {version[1]}"
            self._fail(fact, said, "publication")
        if event.kind == "delta" and (base is None or base[0] != event.base_hash):
            said = f"a delta to version {event.base} with a hash that this version doesn't have"
            self._fail(fact, said, "publication")
        self.index.publish(event.version)
        self.weights.publication(fact)

    def _fail(self, where: object, message: str, kind: Any = "version") -> None:
        self.failures.add(kind, where, message)


def _by_group(counts: tuple[GroupCount, ...]) -> dict[str, GroupCount]:
    out: dict[str, GroupCount] = {}
    for one in counts:
        held = out.get(one.group)
        out[one.group] = one if held is None else GroupCount(one.group, held.trained + one.trained,
                                                             held.masked + one.masked)  # fmt: skip
    return out


class WeightCheck:
    """Every retained chunk that a publication names is there as written. Others are orphans of crashes: ignored.

    One trainer publishes at a time, so the chunks of a publication follow those of the one before.
    """

    def __init__(self, source: LogSource, failures: Failures) -> None:
        self._failures, self._read = failures, source.first(WEIGHTS, 0)
        self._first = self._read
        self._facts: Iterator[Fact[WeightChunk]] = read_facts(source, WEIGHTS, 0, failures)
        self._next: Fact[WeightChunk] | None = next(self._facts, None)

    def publication(self, fact: Fact[Publication]) -> None:
        for index, offset in enumerate(fact.event.chunks):
            if offset < self._first:
                continue
            where = address(WEIGHTS, 0, offset)
            if offset < self._read:
                self._fail(where, f"{fact} names it, but others that were named came after it")
                continue
            while self._next is not None and self._next.offset < offset:
                self._next = next(self._facts, None)
            self._read = offset + 1
            if self._next is None or self._next.offset != offset:
                self._fail(where, f"is missing: {fact} names it")
                continue
            self._chunk(fact, index, self._next)
            self._next = next(self._facts, None)

    def _chunk(self, by: Fact[Publication], index: int, fact: Fact[WeightChunk]) -> None:
        event, chunk = by.event, fact.event
        if (chunk.version, chunk.kind, chunk.index, chunk.of) != (event.version, event.kind, index, len(event.chunks)):
            self._fail(fact, f"is not chunk {index} of the {event.kind} that {by} names")
        elif chunk.blob is None and chunk.checksum != _weights_checksum(chunk):
            self._fail(fact, "its checksum does not match its data")

    def _fail(self, where: object, message: str) -> None:
        self._failures.add("weights", where, message)


def _weights_checksum(chunk: WeightChunk) -> bytes:
    """As `schemas.delta` defines it: XXH3-128 over place, kind and data."""
    head = struct.pack("<qqq", chunk.version, chunk.index, chunk.of) + chunk.kind.encode() + b"\0"
    return xxhash.xxh3_128_digest(head + chunk.data)


def check_leases(source: LogSource, index: Index, first: Callable[[int], int], failures: Failures) -> None:
    """What the coordinator leased in `tasks` it also wrote to `trajectories`, and the other way round. The leases of
    `trajectories` must be in the index; `first` is a partition's first offset that was read for them."""
    settled, due = source.settled(TASKS, 0), 0
    written = index.leases()
    twin = next(written, None)
    for fact in read_facts(source, TASKS, 0, failures):
        if twin is None and fact.offset >= settled:
            return
        lease = fact.event
        if not isinstance(lease, Lease):
            continue
        if lease.number != due:
            failures.add("lease", fact, f"lease {lease.number} where {due} is due")
        due = lease.number + 1
        while twin is not None and twin.number < lease.number:
            failures.add("lease", twin.where, f"lease {twin.number} has no record in tasks")
            twin = next(written, None)
        if twin is not None and twin.number == lease.number:
            if twin.digest != fact.digest:
                failures.add("lease", fact, f"lease {lease.number} is another one in {twin.where}")
            twin = next(written, None)
        elif fact.offset < settled:
            closed = index.closure(lease.group)
            if closed is None or closed.opened >= first(closed.partition):
                failures.add("lease", fact, f"lease {lease.number} of {lease.group} is missing in trajectories")
    while twin is not None:
        failures.add("lease", twin.where, f"lease {twin.number} has no record in tasks")
        twin = next(written, None)


def max_lag(manifest: Manifest) -> int:
    """Versions between sampling and training, of the oldest token in the batch."""
    versions = unpack_int32(manifest.segment_version)
    return int(manifest.target - np.min(versions)) if versions.size else 0
