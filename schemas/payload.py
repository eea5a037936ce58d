"""What a candidate group carries to the trainer, and the hash that vouches for it.

The content hash covers the task and, by slot, ids, logprobs, versions, masks, reward and outcome. It covers neither
attempt, incarnation, offsets nor times, nor where spans were cut: two runs that sampled the same have the same hash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .codec import decode, encode
from .columns import Float32, Int32, unpack_float32, unpack_int32
from .errors import InvalidRecord
from .events import GroupPayload, PayloadEpisode, PayloadSpan, SampleChunk, Span
from .hashes import hasher
from .outcomes import Source

CHUNK_BYTES = 900_000
_TRUTH = bytes([0, *[1] * 255])  # of a byte, as a byte


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
    return PayloadSpan(
        span.source, span.turn, span.parent, span.count, span.versions, span.tokens, span.logprobs, span.mask
    )


def episode_columns(episode: PayloadEpisode) -> EpisodeColumns:
    """The episode's spans, concatenated."""
    tokens, logprobs, versions, trainable = [], [], [], []
    for span in episode.spans:
        model = span.source == Source.MODEL
        tokens.append(unpack_int32(span.tokens))
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
    """16 bytes (`hashes.CONTENT_ALGORITHM`) over what is trained, in slot order."""
    hashed = hasher()
    for i, part in enumerate(_hashed_parts(payload)):
        if i:
            hashed.update(b"\0")
        hashed.update(part)
    return hashed.digest()


def _hashed_parts(payload: GroupPayload) -> Iterator[bytes | bytearray]:
    """The columns of `episode_columns` as bytes, without the arrays: the assembler hashes all that is trained."""
    task = payload.task
    yield repr((task.id, task.source, task.data, task.seed)).encode()
    for episode in sorted(payload.episodes, key=lambda e: e.slot):
        spans = episode.spans
        size = struct.pack("<q", sum(span.count for span in spans))
        reward = float("nan") if episode.reward is None else episode.reward
        yield struct.pack("<qd?d", episode.slot, reward, episode.reward is None, episode.temperature)
        yield episode.outcome.encode()
        yield size
        yield _concatenated([span.tokens for span in spans])
        yield size
        yield _concatenated([bytes(4 * span.count) if span.logprobs is None else span.logprobs for span in spans])
        yield size
        yield b"".join(_version_bytes(span) for span in spans)
        yield size
        yield b"".join(_trainable_bytes(span) for span in spans)


def _concatenated(columns: Sequence[bytes]) -> bytearray:
    """32-bit columns, each shuffled by byte: their values one after the other, as they were before."""
    values = bytearray(sum(map(len, columns)))
    start = 0
    for column in columns:
        n = len(column) // 4
        for i in range(4):
            plane = column[i * n : (i + 1) * n]
            if plane[:1] != b"\0" or plane.count(0) < n:  # those of token ids' high bytes often hold nothing but 0
                values[start + i : start + 4 * n : 4] = plane
        start += 4 * n
    return values


def _version_bytes(span: PayloadSpan) -> bytes:
    if span.source != Source.MODEL or not span.versions:
        return struct.pack("<i", -1) * span.count
    return b"".join([struct.pack("<i", run.version) * run.count for run in span.versions])


def _trainable_bytes(span: PayloadSpan) -> bytes:
    if span.source != Source.MODEL:
        return bytes(span.count)
    return b"\1" * span.count if span.mask is None else span.mask.translate(_TRUTH)


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
