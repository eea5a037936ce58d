"""The table of tokens: columns straight from the spans' bytes into Arrow's buffers, no row is ever made.

The position of a token needs the length of what
its span continues: that is kept for attempts that haven't ended, of `KEPT` attempts at most (those of long ago first to
go), so that attempts which never end take no memory for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.columns import halves, unpack_float32
from headrace.schemas.errors import RecordError
from headrace.schemas.events import EpisodeEnded, Span, VersionRun
from headrace.schemas.outcomes import Source
from headrace.schemas.topics import TRAJECTORIES

from ..source import LogSource

ROWS = 1 << 16  # of a batch, at least; at most so many and one span more
KEPT = 1 << 16
_SOURCES = tuple(str(source) for source in Source)
_NUMBERS = {source: number for number, source in enumerate(_SOURCES)}

_Key = tuple[str, int, int, str]


class _Ends:
    """How many tokens an attempt has up to the end of each of its spans."""

    def __init__(self) -> None:
        self._known: dict[_Key, dict[int, int]] = {}

    def begin(self, key: _Key, span: Span) -> int:
        """Where this span begins; -1: unknown."""
        ends = self._known.get(key)
        if ends is None:
            if span.sequence > 1:  # its beginning was deleted, or is forgotten
                return -1
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            ends = self._known[key] = {0: 0}
        at = ends.get(span.parent if span.parent >= 0 else span.sequence - 1, -1)
        if at >= 0:
            ends[span.sequence] = at + span.count
        return at

    def ended(self, key: _Key) -> None:
        self._known.pop(key, None)


def tokens(source: LogSource, rows: int = ROWS) -> Iterator[Any]:
    """pyarrow.RecordBatch after pyarrow.RecordBatch, as `schema.TOKENS` describes them."""
    ends = _Ends()
    held: list[tuple[int, int, Span]] = []  # offset, begin, span
    count = 0
    for partition in range(source.partitions(TRAJECTORIES)):
        for record in source.records(TRAJECTORIES, partition):
            kind = kind_of(record.value)
            if kind is not Span and kind is not EpisodeEnded:
                continue
            try:
                event = decode(record.value)
                if isinstance(event, Span):
                    event.check()
            except RecordError:  # also a span whose columns contradict each other: the ledger names it
                continue
            if isinstance(event, EpisodeEnded):
                ends.ended((event.group, event.slot, event.attempt, event.incarnation))
                continue
            assert isinstance(event, Span)
            key = (event.group, event.slot, event.attempt, event.incarnation)
            held.append((record.offset, ends.begin(key, event), event))
            count += event.count
            if count >= rows:
                yield _batch(held, partition, count)
                held, count = [], 0
        if held:
            yield _batch(held, partition, count)
            held, count = [], 0


def _batch(held: list[tuple[int, int, Span]], partition: int, count: int) -> Any:
    import pyarrow as pa

    from .schema import TOKENS

    group, incarnation, engine = dict[str, int](), dict[str, int](), dict[str, int]()  # strings as numbers
    facts = np.array([(
        span.count, group.setdefault(span.group, len(group)), span.slot, span.attempt,
        incarnation.setdefault(span.incarnation, len(incarnation)), span.sequence, begin, _NUMBERS[span.source],
        span.turn, -1 if span.engine is None else engine.setdefault(span.engine, len(engine)), offset,
    ) for offset, begin, span in held], np.int64)  # fmt: skip
    counts = facts[:, 0]
    starts = np.cumsum(counts) - counts
    known = facts[:, 6] >= 0
    facts[:, 6] -= starts  # where in the batch the attempt would begin
    # All at once: for one after the other numpy takes seven times as long.
    groups, slot, attempt, incarnations, sequence, begins, sources, turn, engines = np.repeat(
        np.ascontiguousarray(facts[:, 1:10].T, np.int32), counts, axis=1)  # fmt: skip
    within = np.arange(count, dtype=np.int32) + begins
    spans = [span for _, _, span in held]
    version = _versions(spans)
    sampled = version >= 0
    trainable = sampled.copy()
    entropy: Any = None
    for at, span in zip(starts.tolist(), spans, strict=True):  # what few spans have
        if span.mask is not None:
            trainable[at : at + span.count] &= np.frombuffer(span.mask, np.uint8) != 0
        if span.entropies is not None:
            entropy = np.full(count, np.nan, np.float32) if entropy is None else entropy
            entropy[at : at + span.count] = unpack_float32(span.entropies)

    unsampled = None if sampled.all() else ~sampled

    def category(numbers: Any, labels: Any, mask: Any = None) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=mask), pa.array(labels, pa.string()))

    columns = {
        "group": category(groups, list(group)), "slot": slot, "attempt": attempt,
        "incarnation": category(incarnations, list(incarnation)), "sequence": sequence,
        "position": pa.array(within, mask=None if known.all() else np.repeat(~known, counts)),
        "source": category(sources, _SOURCES), "turn": turn,
        "token": _ids(spans, count), "logprob": pa.array(_logprobs(spans, count), mask=unsampled),
        "version": pa.array(version, mask=unsampled), "trainable": trainable,
        "entropy": pa.nulls(count, pa.float32()) if entropy is None else pa.array(entropy, mask=np.isnan(entropy)),
        "engine": category(engines, list(engine), engines < 0 if any(s.engine is None for s in spans) else None),
        "partition": np.full(count, partition, np.int32), "offset": np.repeat(facts[:, 10], counts),
    }  # fmt: skip
    return pa.RecordBatch.from_arrays([pa.array(columns[c.name]) for c in TOKENS.columns], schema=TOKENS.arrow())


# Columns of many spans at once: their bytes are put together as they lie there, and unpacked in one go.


def _ids(spans: Sequence[Span], count: int) -> Any:
    """int32[count]."""
    parts = [halves(span.tokens, span.count) for span in spans]
    ids = np.frombuffer(b"".join([low for low, _ in parts]), "<u2").astype(np.int32)
    if any(high is not None for _, high in parts):
        upper = b"".join([high or bytes(2 * span.count) for (_, high), span in zip(parts, spans, strict=True)])
        ids |= np.frombuffer(upper, "<u2").astype(np.int32) << 16
    return ids


def _logprobs(spans: Sequence[Span], count: int) -> Any:
    """float32[count]; 0 where a span has none."""
    out = np.empty((count, 4), np.uint8)
    for i in range(4):  # a span's first bytes of all values, then all second ones, ...
        plane = [bytes(span.count) if span.logprobs is None else span.logprobs[i * span.count : (i + 1) * span.count]
                 for span in spans]  # fmt: skip
        out[:, i] = np.frombuffer(b"".join(plane), np.uint8)
    return out.view("<f4")[:, 0]


def _versions(spans: Sequence[Span]) -> Any:
    """int32, one for each token; -1 where no model sampled it."""
    runs = [(run.version, run.count) for span in spans
            for run in (span.versions if span.source == Source.MODEL else (VersionRun(-1, span.count),))]  # fmt: skip
    values = np.array(runs, np.int64).reshape(-1, 2)
    return np.repeat(values[:, 0].astype(np.int32), values[:, 1])
