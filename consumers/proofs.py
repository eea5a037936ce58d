"""What must hold between the topics of a run: whatever one record names exists, unchanged, and is named once.

Each function takes decoded facts, adds what doesn't hold to the failures, and returns what the next one builds on.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from headrace.schemas.columns import unpack_int32
from headrace.schemas.errors import RecordError
from headrace.schemas.events import (
    Disposed,
    GroupClosed,
    Lease,
    LeaseEnded,
    Manifest,
    Publication,
    RunCreated,
    SampleChunk,
    SettingsChanged,
    Version,
    WeightChunk,
)
from headrace.schemas.outcomes import Closure, Disposition, Source
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.topics import SAMPLES, WEIGHTS
from headrace.streams.log.blobs import fetched

from .announcements import check_announcements
from .facts import Fact, Failures, address, check_chain, read_facts
from .recount import Recount
from .source import LogSource


@dataclass(frozen=True, slots=True)
class Fate:
    """What the coordinator decided of a candidate, and in which record."""

    disposition: Disposition
    reason: str
    batch: int | None
    by: Fact[Any]


def check_samples(source: LogSource, partition: int, closures: Iterable[Fact[GroupClosed]], failures: Failures) -> None:
    """Every record of `samples` belongs to exactly one closure, and holds what that closure's hash vouches for."""
    first, settled = source.first(SAMPLES, partition), source.settled(SAMPLES, partition)
    owed: dict[int, tuple[Fact[GroupClosed], bytes]] = {}
    for closure in closures:
        if (closure.event.closure == Closure.CANDIDATE) != bool(closure.event.samples):
            failures.add(closure, f"{closure.event.closure} with {len(closure.event.samples)} records of samples")
        for ref in closure.event.samples:
            if ref.offset in owed:
                where = address(SAMPLES, partition, ref.offset)
                failures.add(where, f"belongs to {owed[ref.offset][0]} and to {closure}")
            elif ref.offset >= first:
                owed[ref.offset] = (closure, ref.digest)
    parts: dict[int, list[SampleChunk]] = {}
    for fact in read_facts(source, SAMPLES, partition, failures):
        owner, expected = owed.pop(fact.offset, (None, b""))
        if owner is None:
            if fact.offset < settled:
                failures.add(fact, "belongs to no closure: it was added or repeated")
            continue
        if fact.digest != expected:
            failures.add(fact, f"was altered: {owner} holds another digest of it")
            continue
        chunks = parts.setdefault(owner.offset, [])
        chunks.append(fact.event)
        if len(chunks) == len(owner.event.samples):
            _check_payload(parts.pop(owner.offset), fact, owner, failures)
    for offset, (owner, _) in owed.items():
        failures.add(address(SAMPLES, partition, offset), f"is missing or unreadable: {owner} refers to it")


def _check_payload(chunks: list[SampleChunk], last: Fact[Any], closure: Fact[GroupClosed], failures: Failures) -> None:
    try:
        payload = from_chunks(fetched(chunks))
        hashed = content_hash(payload)
    except (RecordError, ValueError) as error:
        failures.add(last, f"the payload of {closure} can't be read: {error}")
        return
    if hashed != closure.event.content_hash:
        failures.add(last, f"its content hash is not the one of {closure}")
    fates = {f.slot: f.model_tokens for f in closure.event.slots if f.counted}
    held = {e.slot: sum(s.count for s in e.spans if s.source == Source.MODEL) for e in payload.episodes}
    if payload.group != closure.event.group or held != fates:
        failures.add(last, f"holds other episodes than {closure}: tokens by slot {held}, there {fates}")


def check_batches(facts: Sequence[Fact[Manifest | Disposed]], closures: Mapping[str, Fact[GroupClosed]],
                  settings: Mapping[int, Fact[Any]], failures: Failures) -> dict[str, Fate]:  # fmt: skip
    """Each candidate has at most one disposition, which names it as it is. The dispositions by group."""
    check_chain(facts, failures)
    fates: dict[str, Fate] = {}
    due = 1

    def decide(fact: Fact[Any], group: str, place: tuple[int, int], disposition: Disposition, reason: str,
               batch: int | None) -> Fact[GroupClosed] | None:  # fmt: skip
        closure = closures.get(group)
        if closure is None or (closure.partition, closure.offset) != place:
            failures.add(fact, f"names {address('groups', *place)} as the closure of {group}, which it is not")
            return None
        if closure.event.closure != Closure.CANDIDATE:
            failures.add(fact, f"{disposition} {group}, which {closure} closed as {closure.event.closure}")
        if group in fates:
            failures.add(fact, f"{disposition} {group}, which {fates[group].by} made {fates[group].disposition}")
        fates[group] = Fate(disposition, reason, batch, fact)
        return closure

    for fact in facts:
        event = fact.event
        if isinstance(event, Disposed):
            if event.disposition not in (Disposition.STALE, Disposition.LEFTOVER):
                failures.add(fact, f"{event.disposition!r} is not a disposition of a group without a batch")
                continue
            place = (event.partition, event.offset)
            decide(fact, event.group, place, Disposition(event.disposition), event.reason, None)
            continue
        if (event.batch, event.target) != (due, due - 1):
            failures.add(fact, f"batch {event.batch} for version {event.target} where batch {due} is due")
        due = event.batch + 1
        if event.settings_offset not in settings:
            failures.add(fact, f"decided under {address('policy', 0, event.settings_offset)}, which holds no settings")
        counts = _tokens_by_group(fact, failures)
        for index, ref in enumerate(event.groups):
            closure = decide(fact, ref.group, (ref.partition, ref.offset), Disposition.BATCHED, "", event.batch)
            if closure is None:
                continue
            if ref.content_hash != closure.event.content_hash:
                failures.add(fact, f"holds another content hash of {ref.group} than {closure}")
            held = closure.event.accounts.get("candidate", 0)
            if not held == ref.model_tokens == counts[index]:
                failures.add(fact, f"{ref.model_tokens} model tokens of {ref.group}, {counts[index]} in segments; "
                                   f"{closure} holds {held}")  # fmt: skip
    return fates


def _tokens_by_group(fact: Fact[Any], failures: Failures) -> Counter[int]:
    """Model tokens in the manifest's segments, by index into its groups."""
    counts: Counter[int] = Counter()
    try:
        columns = unpack_int32(fact.event.segment_group).tolist(), unpack_int32(fact.event.segment_count).tolist()
        for index, n in zip(*columns, strict=True):
            counts[index] += n
    except ValueError:
        failures.add(fact, "its segment columns are damaged")
    return counts


def check_policy(facts: Sequence[Fact[Any]], batches: Sequence[Fact[Manifest | Disposed]],
                 failures: Failures) -> dict[int, Fact[Version]]:  # fmt: skip
    """Versions without gap, each trained from the manifest it names, published in turn. The versions by number."""
    created = next((fact for fact in facts if isinstance(fact.event, RunCreated)), None)
    if facts and created is not facts[0]:
        failures.add(facts[0], "is not the record of the run's creation: that is missing before it")
    chains: dict[str, list[Fact[Any]]] = {}
    for fact in facts:
        chains.setdefault(fact.event.writer, []).append(fact)
    for chain in chains.values():
        check_chain(chain, failures, begin=None if chain[0] is created else created)
    for where, message in check_announcements(facts):
        failures.add(where, message)
    manifests = {fact.offset: fact for fact in batches if isinstance(fact.event, Manifest)}
    versions: dict[int, Fact[Version]] = {}
    published: set[int] = set()
    for fact in facts:
        if isinstance(fact.event, Version):
            _check_version(fact, versions, published, manifests, failures)
            versions[fact.event.version] = fact
        elif isinstance(fact.event, Publication):
            _check_publication(fact, versions, failures)
            published.add(fact.event.version)
    return versions


def _check_version(fact: Fact[Version], versions: Mapping[int, Fact[Version]], published: set[int],
                   manifests: Mapping[int, Fact[Any]], failures: Failures) -> None:  # fmt: skip
    event, due = fact.event, max(versions, default=-1) + 1
    if (event.version, event.parent) != (due, due - 1):
        failures.add(fact, f"version {event.version} from {event.parent} where version {due} is due")
    if event.version and event.version - 1 not in published:
        failures.add(fact, f"version {event.version} before version {event.version - 1} was published")
    if event.version == 0:
        return
    manifest = manifests.get(event.batch_offset)
    where = address("batches", 0, event.batch_offset)
    if manifest is None:
        failures.add(where, f"is no manifest, or missing: {fact} was trained from it")
        return
    if event.batch_digest != manifest.digest:
        failures.add(where, f"was altered: {fact} holds another digest of it")
    if not event.batch == manifest.event.batch == event.version:
        failures.add(fact, f"version {event.version} from batch {event.batch}, but {where} is {manifest.event.batch}")
    counts = {count.group: count.trained + count.masked for count in event.groups}
    held = {ref.group: ref.model_tokens for ref in manifest.event.groups}
    for group in sorted(counts.keys() | held.keys()):
        if counts.get(group) != held.get(group):
            failures.add(fact, f"{counts.get(group)} tokens trained or masked of {group}; {where}: {held.get(group)}")


def _check_publication(fact: Fact[Publication], versions: Mapping[int, Fact[Version]], failures: Failures) -> None:
    event = fact.event
    version, base = versions.get(event.version), versions.get(event.base)
    if version is None:
        failures.add(fact, f"publishes version {event.version}, which was not committed before it")
    elif event.served_hash != version.event.served_hash:
        failures.add(fact, f"publishes version {event.version} under another hash than {version}")
    if event.kind == "delta" and (base is None or base.event.served_hash != event.base_hash):
        failures.add(fact, f"a delta to version {event.base} with a hash that this version doesn't have")


def check_weights(source: LogSource, facts: Iterable[Fact[Any]], failures: Failures) -> None:
    """Every retained chunk that a publication names is there as written. Others are orphans of crashes: ignored."""
    owed: dict[int, tuple[Fact[Publication], int]] = {}
    for fact in facts:
        if isinstance(fact.event, Publication):
            owed |= {offset: (fact, index) for index, offset in enumerate(fact.event.chunks)}
    first = source.first(WEIGHTS, 0)
    for fact in read_facts(source, WEIGHTS, 0, failures):
        chunk: WeightChunk = fact.event
        owner, index = owed.pop(fact.offset, (None, 0))
        if owner is None:
            continue
        event = owner.event
        if (chunk.version, chunk.kind, chunk.index, chunk.of) != (event.version, event.kind, index, len(event.chunks)):
            failures.add(fact, f"is not chunk {index} of the {event.kind} that {owner} names")
        elif chunk.checksum != _weights_checksum(chunk):
            failures.add(fact, "its checksum does not match its data")
    for offset, (owner, _) in owed.items():
        if offset >= first:
            failures.add(address(WEIGHTS, 0, offset), f"is missing: {owner} names it")


def _weights_checksum(chunk: WeightChunk) -> bytes:
    """As `schemas.delta` defines it: XXH3-128 over place, kind and data."""
    head = struct.pack("<qqq", chunk.version, chunk.index, chunk.of) + chunk.kind.encode() + b"\0"
    return xxhash.xxh3_128_digest(head + chunk.data)


def check_leases(tasks: Sequence[Fact[Lease | LeaseEnded]], settled: int, recounts: Sequence[Recount],
                 closures: Mapping[str, Fact[GroupClosed]], failures: Failures) -> None:  # fmt: skip
    """What the coordinator leased in `tasks` it also wrote to `trajectories`, and the other way round."""
    leases = [lease for recount in recounts for lease in recount.leases]
    first = {recount.partition: recount.first for recount in recounts}
    unleased = {group: where for recount in recounts for group, where in recount.unleased.items()}
    written = {fact.event.number: fact for fact in leases if not fact.event.unmanaged}
    numbers: set[int] = set()
    due = 0
    for fact in tasks:
        lease = fact.event
        if not isinstance(lease, Lease):
            continue
        if lease.number != due:
            failures.add(fact, f"lease {lease.number} where {due} is due")
        due = lease.number + 1
        numbers.add(lease.number)
        twin, closure = written.get(lease.number), closures.get(lease.group)
        trimmed = closure is not None and closure.event.opened < first[closure.partition]
        if twin is None and fact.offset < settled and not trimmed:
            before = f" before {unleased[lease.group]}" if lease.group in unleased else ""
            failures.add(fact, f"lease {lease.number} of {lease.group} is missing in trajectories{before}")
        elif twin is not None and twin.event != lease:
            failures.add(fact, f"lease {lease.number} is another one in {twin}")
    for number, fact in written.items():
        if number not in numbers:
            failures.add(fact, f"lease {number} has no record in tasks")


def max_lag(manifest: Manifest) -> int:
    """Versions between sampling and training, of the oldest token in the batch."""
    versions = unpack_int32(manifest.segment_version)
    return int(manifest.target - np.min(versions)) if versions.size else 0


def settings_records(facts: Iterable[Fact[Any]]) -> dict[int, Fact[Any]]:
    """The records of `policy` under which a manifest may have been decided, by offset."""
    return {fact.offset: fact for fact in facts if isinstance(fact.event, RunCreated | SettingsChanged)}
