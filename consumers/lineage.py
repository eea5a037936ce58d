"""Lineage both ways: from a trained token to the event, the record and the engine that made it; from an episode to the
batches and versions that it fed.

Pure over a LogSource. A candidate's payload names the offsets of its events, so a token is followed by addresses; what
was copied is compared on the way, and a difference is an error, never passed over. Only to find a group by its name are
`groups` and `batches` read through (they are small).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.codec import decode
from headrace.schemas.columns import unpack_float32, unpack_ids, unpack_int32
from headrace.schemas.errors import DataLossError, InvalidRecord, SettingsError
from headrace.schemas.events import (
    Addendum,
    AttemptEnded,
    Disposed,
    EpisodeStarted,
    Event,
    GroupClosed,
    Manifest,
    PayloadEpisode,
    Publication,
    SampleChunk,
    Span,
    Version,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Closure, Source
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.topics import BATCHES, GROUPS, POLICY, SAMPLES, TRAJECTORIES
from headrace.streams.log.blobs import fetched

from .facts import Fact, Failures, address, read_facts
from .source import LogSource


@dataclass(frozen=True, slots=True)
class Use:
    """A batch that an episode is in. `weights`: staleness weight by sampling version."""

    batch: int
    target: int
    manifest: str  # address
    lag: int
    weights: dict[int, float]
    version: int | None  # that was trained from it; None: not committed yet
    committed: str | None  # address of that version's record
    published: bool
    reused_beside: str | None = None  # the group beside which it is used again, by reference


@dataclass(frozen=True, slots=True)
class EpisodeFate:
    """What became of an episode. `disposition` is None while a candidate waits, or while the group is open."""

    group: str
    slot: int
    closure: str | None
    closed: str | None  # address
    disposition: str | None
    counted: bool
    reward: float | None
    tokens: dict[int, int]  # model tokens of the last attempt by sampling version
    attempts: tuple[AttemptEnded, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Where a token of a candidate comes from. `event` and what is read from it are None where `trajectories` are
    trimmed."""

    group: str
    slot: int
    index: int  # within the episode, context included
    attempt: int
    incarnation: str
    source: str
    token: int
    logprob: float | None  # nats
    version: int | None  # that sampled it
    closure: str  # address
    samples: tuple[str, ...]  # addresses of the records that the trainer read
    event: str | None  # address of the span
    index_in_event: int
    logged_ms: int | None
    started: str | None  # address of the attempt's first event
    worker: str | None
    engine: str | None  # JSON: fingerprint
    temperature: float | None
    seed: int | None
    uses: tuple[Use, ...]


def trace_episode(source: LogSource, group: str, slot: int) -> EpisodeFate:
    """Raises SettingsError where the run knows no such group or slot."""
    attempts: list[AttemptEnded] = []
    closure: Fact[GroupClosed] | None = None
    for partition in range(source.partitions(GROUPS)):
        for fact in read_facts(source, GROUPS, partition, Failures()):
            if isinstance(fact.event, Addendum) or getattr(fact.event, "group", None) != group:
                continue
            if isinstance(fact.event, AttemptEnded) and fact.event.slot == slot:
                attempts.append(fact.event)
            elif isinstance(fact.event, GroupClosed):
                closure = fact
        if closure is not None:
            break
    if closure is None and not attempts:
        raise SettingsError(f"run {source.run!r} knows of no ended attempt {group}/{slot}: `headrace show {source.run} "
                            "episodes` lists them")  # fmt: skip
    if closure is None:
        return EpisodeFate(group, slot, None, None, None, False, None, {}, tuple(attempts), ())
    event = closure.event
    fate = next((one for one in event.slots if one.slot == slot), None)
    if fate is None:
        raise SettingsError(f"group {group} has no slot {slot}: its slots are 0 to {len(event.slots) - 1}")
    tokens: dict[int, int] = {}
    for run in fate.versions:
        tokens[run.version] = tokens.get(run.version, 0) + run.count
    disposition, uses = _uses(source, group, slot)
    if event.closure != Closure.CANDIDATE:
        disposition = event.closure
    return EpisodeFate(group, slot, event.closure, str(closure), disposition, fate.counted, fate.reward, tokens,
                       tuple(attempts), uses)  # fmt: skip


def trace_token(source: LogSource, group: str, slot: int, index: int) -> TokenOrigin:
    """The `index`-th token (from 0) of the counted episode in `slot` of a candidate, in the order in which the trainer
    reads it: all spans, context included.

    Raises SettingsError where there is no such token, DataLossError where its samples are deleted, InvalidRecord where
    a copy differs from what it is a copy of.
    """
    closure = _closure(source, group)
    if not closure.event.samples:
        raise SettingsError(f"group {group} closed as {closure.event.closure}: nothing of it was given to a trainer")
    episode = _payload(source, closure, slot)
    ends = np.cumsum([span.count for span in episode.spans])
    if not ends.size or not 0 <= index < ends[-1]:
        total = int(ends[-1]) if ends.size else 0
        raise SettingsError(f"episode {group}/{slot} has {total} tokens: there is none with index {index}")
    number = int(np.searchsorted(ends, index, "right"))
    span = episode.spans[number]
    at = index - int(ends[number]) + span.count
    token = int(unpack_ids(span.tokens, span.count)[at])
    model = span.source == Source.MODEL
    logprob = float(unpack_float32(span.logprobs)[at]) if span.logprobs is not None else None
    event, started = _events(source, closure.partition, episode, number)
    if event is not None:
        original, behaviour = event[1].token_ids(), event[1].behaviour_logprobs()
        if original[at] != token or (logprob is not None and (behaviour is None or behaviour[at] != logprob)):
            raise InvalidRecord("the samples of the closure hold another token than this event",
                                TRAJECTORIES, closure.partition, event[0].offset)  # fmt: skip
    first = started[1] if started else None
    return TokenOrigin(
        group, slot, index, episode.attempt, episode.incarnation, span.source, token, logprob,
        _version_at(span.versions, at) if model else None, str(closure),
        tuple(address(SAMPLES, closure.partition, ref.offset) for ref in closure.event.samples),
        address(TRAJECTORIES, closure.partition, event[0].offset) if event else None, at,
        event[0].timestamp_ms if event else None,
        address(TRAJECTORIES, closure.partition, started[0].offset) if started else None,
        first.worker if first else None, first.engine if first else None, first.temperature if first else None,
        first.seed if first else None, _uses(source, group, slot)[1],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the pieces


def _closure(source: LogSource, group: str) -> Fact[GroupClosed]:
    for partition in range(source.partitions(GROUPS)):
        for fact in read_facts(source, GROUPS, partition, Failures()):
            if isinstance(fact.event, GroupClosed) and fact.event.group == group:
                return fact
    raise SettingsError(f"run {source.run!r} has no closed group {group!r}: `headrace show {source.run} groups` lists "
                        "them")  # fmt: skip


def _payload(source: LogSource, closure: Fact[GroupClosed], slot: int) -> PayloadEpisode:
    """The episode as the trainer reads it, proved by the closure's hashes."""
    chunks = []
    for ref in closure.event.samples:
        record = next(source.records(SAMPLES, closure.partition, ref.offset, ref.offset + 1), None)
        if record is None:
            raise DataLossError(f"{address(SAMPLES, closure.partition, ref.offset)}: there is no such record; the "
                                f"samples of {closure.event.group} were deleted")  # fmt: skip
        event = decode(record.value)
        if not isinstance(event, SampleChunk) or digest(record.value or b"") != ref.digest:
            raise InvalidRecord(f"not the record that {closure} names", SAMPLES, closure.partition, ref.offset)
        chunks.append(event)
    payload = from_chunks(fetched(chunks))
    if content_hash(payload) != closure.event.content_hash:
        raise InvalidRecord(f"its content is not what {closure} vouches for", SAMPLES, closure.partition,
                            closure.event.samples[0].offset)  # fmt: skip
    episode = next((one for one in payload.episodes if one.slot == slot), None)
    if episode is None:
        counted = ", ".join(str(one.slot) for one in payload.episodes)
        raise SettingsError(f"slot {slot} of {payload.group} does not count; the slots that do: {counted}")
    return episode


def _events(source: LogSource, partition: int, episode: PayloadEpisode, number: int) -> tuple[Any, Any]:
    """((record, span) number `number`, (record, first event)) of the episode's own events; None where it is trimmed."""
    spans, found, first = 0, None, None
    for offset in episode.offsets:
        record = next(source.records(TRAJECTORIES, partition, offset, offset + 1), None)
        event: Event | None = decode(record.value) if record is not None else None
        if isinstance(event, EpisodeStarted):
            first = record, event
        elif isinstance(event, Span):
            if spans == number:
                found = record, event
            spans += 1
        elif record is None:  # trimmed: which span it was can't be told by counting
            return None, first
        if found and first:
            break
    return found, first


def _version_at(runs: Any, at: int) -> int | None:
    for run in runs:
        if at < run.count:
            return int(run.version)
        at -= run.count
    return None


def _uses(source: LogSource, group: str, slot: int) -> tuple[str | None, tuple[Use, ...]]:
    """(disposition of a candidate, the batches that this episode is in)."""
    disposition, manifests = None, list(_manifests(source, group, slot))
    for fact in read_facts(source, BATCHES, 0, Failures()) if not manifests else ():
        if isinstance(fact.event, Disposed) and fact.event.group == group:
            disposition = fact.event.disposition
    if not manifests:
        return disposition, ()
    versions: dict[int, tuple[Fact[Version], bool]] = {}
    wanted = {fact.event.batch for fact, _ in manifests}
    for fact in read_facts(source, POLICY, 0, Failures()):
        if isinstance(fact.event, Version) and fact.event.batch in wanted and fact.event.version:
            versions[fact.event.batch] = fact, False
        elif isinstance(fact.event, Publication):
            for batch, (version, _) in versions.items():
                if version.event.version == fact.event.version:
                    versions[batch] = version, True
    uses = []
    for fact, beside in manifests:
        event = fact.event
        weights = _weights(event, group, slot) if beside is None else {}
        known = versions.get(event.batch)
        oldest = min(weights, default=event.target)
        uses.append(Use(event.batch, event.target, str(fact), event.target - oldest, weights,
                        known[0].event.version if known else None, str(known[0]) if known else None,
                        known[1] if known else False, beside))  # fmt: skip
        disposition = disposition if beside is not None else "batched"
    return disposition, tuple(uses)


def _manifests(source: LogSource, group: str, slot: int) -> Iterator[tuple[Fact[Manifest], str | None]]:
    for fact in read_facts(source, BATCHES, 0, Failures()):
        if isinstance(fact.event, Manifest):
            if any(ref.group == group for ref in fact.event.groups):
                yield fact, None
            for reuse in fact.event.reused:
                if (reuse.source.group, reuse.slot) == (group, slot):
                    yield fact, reuse.group


def _weights(event: Manifest, group: str, slot: int) -> dict[int, float]:
    index = next(i for i, ref in enumerate(event.groups) if ref.group == group)
    rows = zip(unpack_int32(event.segment_group).tolist(), unpack_int32(event.segment_slot).tolist(),
               unpack_int32(event.segment_version).tolist(), unpack_float32(event.segment_weight).tolist(),
               strict=True)  # fmt: skip
    return {version: weight for number, of, version, weight in rows if (number, of) == (index, slot)}
