"""Decides what a manifest's groups are: read by offset, proved by hash, laid out as episodes with token weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.codec import decode
from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.errors import BlobError, InvalidRecord, RecordError, UndecodableRecord
from headrace.schemas.events import (
    Event,
    GroupClosed,
    GroupPayload,
    GroupRef,
    Manifest,
    PayloadEpisode,
    Reuse,
    SampleChunk,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Outcome
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.settings import StalenessSettings
from headrace.schemas.topics import GROUPS, SAMPLES, RunTopics
from headrace.streams.log.blobs import fetched
from headrace.streams.log.reader import Reader, Record
from headrace.streams.staleness import Drifts, assess, dropped

from .batches import Episode, Group, Strand
from .layout import laid_out
from .reused import Reused

Kind = TypeVar("Kind", bound=Event)
Laid = TypeVar("Laid", Episode, Strand)


@dataclass(frozen=True, slots=True)
class Batch:
    """A manifest with its groups, in the manifest's order. Lags are over its model tokens, in versions."""

    manifest: Manifest
    offset: int  # of the manifest in `batches`
    digest: bytes  # of its value
    groups: tuple[Group, ...]
    reused: tuple[Reused, ...]
    lag_mean: float
    lag_max: int


def fetch_batch(reader: Reader, topics: RunTopics, record: Record, staleness: StalenessSettings) -> Batch:
    """Everything that the manifest in `record` names. Raises InvalidRecord naming the record that isn't what another
    one vouches for, DataLossError where one is no longer retained, BlobError where a blob isn't."""
    manifest = expect(record, Manifest)
    payloads = payloads_of(reader, topics, manifest.groups, f"manifest {manifest.batch}")
    segments = _segments(manifest, record)
    groups = []
    for index, payload in enumerate(payloads):
        ref = manifest.groups[index]
        try:
            episodes = tuple(
                _episode(episode, manifest.target, segments.get((index, episode.slot), []), staleness)
                for episode in payload.episodes
            )
        except InvalidRecord as error:
            raise InvalidRecord(f"group {ref.group}: {error}", record.topic, record.partition, record.offset) from error
        groups.append(Group(ref.group, episodes))
    lags = [manifest.target - e.column("versions")[e.column("mask")] for group in groups for e in group.episodes]
    lag = np.concatenate(lags) if lags else np.zeros(0, np.int64)
    mean, most = (float(lag.mean()), int(lag.max())) if lag.size else (0.0, 0)
    reused = tuple(_reused(reader, topics, reuse) for reuse in manifest.reused)
    return Batch(manifest, record.offset, digest(record.value or b""), tuple(groups), reused, mean, most)


def expect(record: Record, kind: type[Kind]) -> Kind:
    """The record, decoded, as a `kind`. Raises RecordError with its address."""
    where = (record.topic, record.partition, record.offset)
    try:
        event = decode(record.value)
    except UndecodableRecord as error:
        raise UndecodableRecord(str(error), *where) from error
    if not isinstance(event, kind):
        raise InvalidRecord(f"a {type(event).__name__} where a {kind.__name__} should be", *where)
    return event


def payloads_of(reader: Reader, topics: RunTopics, refs: Sequence[GroupRef], who: str) -> list[GroupPayload]:
    """In the order of the references; partition by partition, so that each is read in one sweep. Raises InvalidRecord
    where a closure isn't the one that was named."""
    found: dict[int, GroupPayload] = {}
    for partition in sorted({ref.partition for ref in refs}):
        own = [(i, ref) for i, ref in enumerate(refs) if ref.partition == partition]
        closures = reader.read_at(topics.name(GROUPS), partition, [ref.offset for _, ref in own])
        closed = {i: expect(closures[ref.offset], GroupClosed) for i, ref in own}
        wanted = [sample.offset for closure in closed.values() for sample in closure.samples]
        samples = reader.read_at(topics.name(SAMPLES), partition, wanted)
        for i, ref in own:
            closure, at = closed[i], closures[ref.offset]
            if (closure.group, closure.content_hash) != (ref.group, ref.content_hash):
                raise InvalidRecord(
                    f"it closes group {closure.group} with another content than {who} names as "
                    f"group {ref.group}: the log was altered", at.topic, at.partition, at.offset
                )  # fmt: skip
            found[i] = _payload(closure, samples)
    return [found[i] for i in range(len(refs))]


def _reused(reader: Reader, topics: RunTopics, reuse: Reuse) -> Reused:
    """The success that it names, in the context in which it was sampled. Raises InvalidRecord where it is none."""
    source = reuse.source
    (payload,) = payloads_of(reader, topics, [source], f"the reuse beside group {reuse.group}")
    recorded = next((one for one in payload.episodes if one.slot == reuse.slot), None)
    where = (topics.name(GROUPS), source.partition, source.offset)
    if recorded is None or recorded.outcome != Outcome.MODEL_SUCCESS:
        was = "not counted" if recorded is None else recorded.outcome
        raise InvalidRecord(f"slot {reuse.slot} of group {source.group} is used again as a success beside group "
                            f"{reuse.group}, and is {was}", *where)  # fmt: skip
    try:
        return Reused(reuse.group, laid_out(recorded), reuse.advantage)
    except InvalidRecord as error:
        raise InvalidRecord(f"group {source.group}: {error}", *where) from error


def _payload(closure: GroupClosed, samples: dict[int, Record]) -> GroupPayload:
    chunks = []
    for ref in closure.samples:
        record = samples[ref.offset]
        where = (record.topic, record.partition, record.offset)
        if digest(record.value or b"") != ref.digest:
            raise InvalidRecord(f"it isn't the record that group {closure.group} closed with: it was altered", *where)
        chunks.append(expect(record, SampleChunk))
    if not closure.samples:
        raise InvalidRecord(f"group {closure.group} is in a batch, but its closure names no samples")
    try:
        payload = from_chunks(fetched(chunks))
        if payload.group != closure.group or content_hash(payload) != closure.content_hash:
            raise InvalidRecord(f"its content is not what group {closure.group} closed with")
    except BlobError as error:
        raise type(error)(str(error), *where) from error
    except (RecordError, ValueError) as error:
        raise InvalidRecord(str(error), *where) from error
    return payload


_Segment = tuple[int, int, float]  # version, tokens, weight


def _segments(manifest: Manifest, record: Record) -> dict[tuple[int, int], list[_Segment]]:
    """By (index of the group, slot), in the order of the tokens."""
    columns: list[Sequence[float]] = [
        unpack_int32(packed).tolist()
        for packed in (manifest.segment_group, manifest.segment_slot, manifest.segment_version, manifest.segment_count)
    ]
    columns.append(unpack_float32(manifest.segment_weight).tolist())
    if len({len(column) for column in columns}) > 1:
        raise InvalidRecord("its segment columns differ in length", record.topic, record.partition, record.offset)
    found: dict[tuple[int, int], list[_Segment]] = {}
    for group, slot, version, count, weight in zip(*columns, strict=True):
        found.setdefault((int(group), int(slot)), []).append((int(version), int(count), weight))
    return found


def _episode(
    recorded: PayloadEpisode, target: int, segments: Sequence[_Segment], staleness: StalenessSettings
) -> Episode:
    episode = laid_out(recorded)
    if episode.reward is None:
        raise InvalidRecord(f"slot {recorded.slot} counts without a reward")
    versions = np.repeat([s[0] for s in segments], [s[1] for s in segments])
    if not np.array_equal(versions, episode.column("versions")[episode.column("mask")]):
        tokens = int(episode.column("mask").sum())
        raise InvalidRecord(f"slot {recorded.slot}: its segments don't cover its {tokens} model tokens")
    counts = [int(strand.mask.sum()) for strand in episode.strands]
    head, *rest = np.split(_token_weights(target, segments, staleness), np.cumsum(counts)[:-1])
    branches = tuple(_weighed(strand, own) for strand, own in zip(episode.branches, rest, strict=True))
    gone = bool(segments) and dropped([weight for _, _, weight in segments], staleness)
    return replace(_weighed(episode, head), branches=branches, counted=episode.counted and not gone, dropped=gone)


def _weighed(strand: Laid, own: NDArray[np.float32]) -> Laid:
    """With the weights of its model tokens, float32 [model tokens], beside its own."""
    weights = np.ones(strand.tokens.size, np.float32)
    weights[strand.mask] = own
    return replace(strand, weights=weights * strand.weights)


def _token_weights(
    target: int, segments: Sequence[_Segment], staleness: StalenessSettings
) -> NDArray[np.float32]:
    """Recorded weights, float32 [model tokens]. A weight of 0 always masks; others act only with `apply = always`,
    since the loss has exact ratios and a forecast beside them would count the same drift twice."""
    kept = []
    for version, _, weight in segments:
        if target - version > staleness.hard_lag:
            weight = 0.0  # the limit holds at use, whatever was decided before
        kept.append(weight if staleness.apply == "always" or weight <= 0 else 1.0)
    return np.repeat(np.array(kept, np.float32), [count for _, count, _ in segments])


def within_limits(groups: Sequence[Group], target: int, drifts: Drifts, staleness: StalenessSettings
                  ) -> tuple[Group, ...]:  # fmt: skip
    """The groups as they may be trained once `target` is committed, with all that has been published up to it: tokens
    that are beyond a limit then are masked, whatever the manifest knew. `drifts` must hold no later version."""
    stale = {int(version) for group in groups for one in group.episodes for version in np.unique(one.column("versions"))
             if assess(int(version), target, drifts, staleness).weight <= 0}  # fmt: skip
    if not stale:
        return tuple(groups)

    def masked(strand: Laid) -> Laid:
        out = np.isin(strand.versions, list(stale)) & strand.mask
        return replace(strand, weights=np.where(out, np.float32(0), strand.weights))

    return tuple(replace(group, episodes=tuple(
        replace(masked(one), branches=tuple(map(masked, one.branches))) for one in group.episodes))
        for group in groups)  # fmt: skip
