"""What a candidate group carries to the trainer, and the hash that vouches for it.

The content hash covers the task and, by slot, ids, logprobs, versions, masks, reward and outcome. It covers neither
attempt, incarnation, offsets nor times, nor where spans were cut: two runs that sampled the same have the same hash.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .codec import decode, encode
from .columns import Float32, Int32, halves, unpack_float32, unpack_ids
from .errors import InvalidRecord
from .events import GroupPayload, PayloadEpisode, PayloadSpan, SampleChunk, Span
from .hashes import hasher
from .outcomes import Source

CHUNK_BYTES = 900_000
_TRUTH = bytes([0, *[1] * 255])  # of a byte, as a byte
_RUN = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class EpisodeColumns:
    """One row per token of an episode, all of length n, prompt included.

    `logprobs` (nats) are 0 and `versions` -1 where no model sampled the token; `trainable` is True for model tokens
    that no mask excludes.
    """

    tokens: Int32
    logprobs: Float32
    versions: Int32
    trainable: NDArray[np.bool_]


def payload_span(span: Span) -> PayloadSpan:
    """The span without what names its attempt; columns are shared, not copied."""
    return PayloadSpan(
        span.source, span.turn, span.parent, span.count, span.versions, span.tokens, span.logprobs, span.mask,
        span.experts
    )


def episode_columns(episode: PayloadEpisode) -> EpisodeColumns:
    """The episode's spans, concatenated."""
    tokens, logprobs, versions, trainable = [], [], [], []
    for span in episode.spans:
        model = span.source == Source.MODEL
        tokens.append(unpack_ids(span.tokens, span.count))
        logprobs.append(
            unpack_float32(span.logprobs) if span.logprobs is not None else np.zeros(span.count, np.float32)
        )
        versions.append(
            np.repeat([run.version for run in span.versions], [run.count for run in span.versions]).astype(np.int32)
            if model and span.versions
            else np.full(span.count, -1, np.int32)
        )
        mask = np.frombuffer(span.mask, np.uint8).astype(bool) if span.mask is not None else np.ones(span.count, bool)
        trainable.append(mask & model)
    if not tokens:
        return EpisodeColumns(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, bool))
    return EpisodeColumns(
        np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(versions), np.concatenate(trainable)
    )


def content_hash(payload: GroupPayload) -> bytes:
    """16 bytes over what is trained, in slot order (`hashes.CONTENT_ALGORITHM`; docs/wire.md, section 7)."""
    hashed = hasher()
    for part in _hashed_parts(payload):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def _hashed_parts(payload: GroupPayload) -> Iterator[bytes]:
    """Columns as they lie in the spans, cut where the columns are and not where the spans are; no arrays are made,
    since the assembler hashes all that may be trained."""
    task = payload.task
    yield task.id.encode()
    yield task.source.encode()
    yield task.data.encode()
    yield struct.pack("<q", task.seed)
    for episode in sorted(payload.episodes, key=lambda e: e.slot):
        spans = episode.spans
        reward = float("nan") if episode.reward is None else episode.reward
        yield struct.pack("<qd?d", episode.slot, reward, episode.reward is None, episode.temperature)
        yield episode.outcome.encode()
        ids = [halves(span.tokens, span.count) for span in spans]
        yield b"".join([low for low, _ in ids])
        high = any(part is not None for _, part in ids)
        yield b"".join([part or bytes(2 * span.count) for (_, part), span in zip(ids, spans, strict=True)]) * high
        yield b"".join([_plane(span, i) for i in range(4) for span in spans])
        yield b"".join([_RUN.pack(*run) for run in _merged(run for span in spans for run in _version_runs(span))])
        yield b"".join([_RUN.pack(*run) for run in _merged(run for span in spans for run in _trainable_runs(span))])
        if branches := _branches(spans):
            yield branches
        if routed := _routed(spans):
            yield routed


def _routed(spans: Sequence[PayloadSpan]) -> bytes:
    """The recorded routing: a word, layers and experts in each, runs of (place of the first row in the episode, rows),
    neighbours joined, and all rows as uint16."""
    if all(span.experts is None for span in spans):
        return b""
    ends = itertools.accumulate(span.count for span in spans)
    recorded = [(end, span.experts) for end, span in zip(ends, spans, strict=True) if span.experts is not None]
    runs: list[list[int]] = []
    for end, experts in recorded:
        first = end - 1 - experts.rows
        if runs and sum(runs[-1]) == first:
            runs[-1][1] += experts.rows
        else:
            runs.append([first, experts.rows])
    shape = _RUN.pack(recorded[0][1].layers, recorded[0][1].each)
    data = [experts.column().astype("<u2").tobytes() for _, experts in recorded]
    return b"experts" + shape + b"".join(_RUN.pack(*run) for run in runs) + b"".join(data)


def _branches(spans: Sequence[PayloadSpan]) -> bytes:
    """For each span that doesn't continue the one before it: its first token, and the token behind the one that it
    continues (0: none, a context of its own; -1: there is no such place)."""
    if all(span.parent == -1 for span in spans):
        return b""
    bounds = [0, *itertools.accumulate(span.count for span in spans)]
    return b"".join(
        _RUN.pack(bounds[i], bounds[span.parent] if 0 <= span.parent <= i else -1)
        for i, span in enumerate(spans) if span.parent not in (-1, i)
    )  # fmt: skip


def _plane(span: PayloadSpan, i: int) -> bytes:
    """Byte `i` of each logprob."""
    n = span.count
    return bytes(n) if span.logprobs is None else span.logprobs[i * n : (i + 1) * n]


def _version_runs(span: PayloadSpan) -> Iterable[tuple[int, int]]:
    if span.source != Source.MODEL or not span.versions:
        return ((-1, span.count),)
    return [(run.version, run.count) for run in span.versions]


def _trainable_runs(span: PayloadSpan) -> Iterable[tuple[int, int]]:
    if span.source != Source.MODEL or span.mask is None:
        return ((int(span.source == Source.MODEL), span.count),)
    return [(int(value), len(list(same))) for value, same in itertools.groupby(span.mask.translate(_TRUTH))]


def _merged(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(value, count), neighbours of one value together, none of no length."""
    value, total = 0, 0
    for one, count in runs:
        if one != value and total:
            yield value, total
            total = 0
        if count:
            value, total = one, total + count
    if total:
        yield value, total


def to_chunks(payload: GroupPayload, limit: int = CHUNK_BYTES) -> list[SampleChunk]:
    """The payload as records of at most `limit` bytes of data each."""
    return split(payload.group, encode(payload), limit)


def split(group: str, data: bytes, limit: int = CHUNK_BYTES) -> list[SampleChunk]:
    """As `to_chunks`, of a payload that is encoded already."""
    count = max(1, -(-len(data) // limit))
    return [SampleChunk(group, i, count, data[i * limit : (i + 1) * limit]) for i in range(count)]


def from_chunks(chunks: Sequence[SampleChunk]) -> GroupPayload:
    """Raises InvalidRecord where the chunks aren't exactly those of one payload, in order, with their data."""
    if not chunks or [c.index for c in chunks] != list(range(chunks[0].of)) or len({c.group for c in chunks}) != 1:
        raise InvalidRecord("the chunks of a group's payload are incomplete, repeated or mixed")
    if any(chunk.blob is not None for chunk in chunks):
        raise InvalidRecord("the payload lies in a blob, which must be fetched first")
    payload = decode(b"".join(chunk.data for chunk in chunks) if len(chunks) > 1 else chunks[0].data)
    if not isinstance(payload, GroupPayload):
        raise InvalidRecord("the chunks hold no group payload")
    return payload
