"""What a candidate group carries to the trainer, and the hash that vouches for it.

The content hash covers the task and, by slot, ids, logprobs, versions, masks, reward and outcome. It covers neither
attempt, incarnation, offsets nor times, nor where spans were cut: two runs that sampled the same have the same hash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .codec import decode, encode
from .columns import Float32, Int32, unpack_float32, unpack_int32
from .errors import InvalidRecord
from .events import GroupPayload, PayloadEpisode, PayloadSpan, SampleChunk, Span
from .hashes import digest
from .outcomes import Source

CHUNK_BYTES = 900_000


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
    task = payload.task
    parts = [repr((task.id, task.source, task.data, task.seed)).encode()]
    for episode in sorted(payload.episodes, key=lambda e: e.slot):
        columns = episode_columns(episode)
        reward = float("nan") if episode.reward is None else episode.reward
        parts.append(struct.pack("<qd?d", episode.slot, reward, episode.reward is None, episode.temperature))
        parts.append(episode.outcome.encode())
        for column in (columns.tokens, columns.logprobs, columns.versions, columns.trainable.astype(np.uint8)):
            parts.append(struct.pack("<q", column.size))
            parts.append(np.ascontiguousarray(column).tobytes())
    return digest(b"\0".join(parts))


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
