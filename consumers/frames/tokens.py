"""The table of tokens: columns straight from the spans' bytes into Arrow's buffers, no row is ever made.

A span's columns are unshuffled into their place in the batch's arrays. The position of a token needs the length of what
its span continues: that is kept for attempts that haven't ended, of `KEPT` attempts at most (those of long ago first to
go), so that attempts which never end take no memory for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.columns import unpack_float32
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import EpisodeEnded, Span
from headrace.schemas.outcomes import Source
from headrace.schemas.topics import TRAJECTORIES

from ..source import LogSource

ROWS = 1 << 16  # of a batch, at least; at most so many and one span more
KEPT = 1 << 16
_SOURCES = tuple(str(source) for source in Source)

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


class _Names:
    """Strings of one batch as numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


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
            except UndecodableRecord:
                continue
            except Exception:  # a span whose columns contradict each other: the ledger names it
                continue
            assert isinstance(event, Span | EpisodeEnded)
            key = (event.group, event.slot, event.attempt, event.incarnation)
            if isinstance(event, EpisodeEnded):
                ends.ended(key)
                continue
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

    token, version = np.empty(count, np.int32), np.full(count, -1, np.int32)
    logprob, entropy = np.full(count, np.nan, np.float32), np.full(count, np.nan, np.float32)
    trainable, within = np.zeros(count, bool), np.empty(count, np.int32)
    names = {name: _Names() for name in ("group", "incarnation", "engine")}
    per_span: list[tuple[int, ...]] = []
    at, entropies = 0, False
    for offset, begin, span in held:
        end = at + span.count
        token[at:end] = span.token_ids()
        within[at:end] = np.arange(begin, begin + span.count, dtype=np.int32)
        if span.source == Source.MODEL:
            assert span.logprobs is not None
            logprob[at:end] = unpack_float32(span.logprobs)
            runs = span.versions
            version[at:end] = runs[0].version if len(runs) == 1 else span.version_column()
            trainable[at:end] = True if span.mask is None else np.frombuffer(span.mask, np.uint8) != 0
        if span.entropies is not None:
            entropy[at:end], entropies = unpack_float32(span.entropies), True
        per_span.append((
            span.count, names["group"](span.group), span.slot, span.attempt, names["incarnation"](span.incarnation),
            span.sequence, begin, _SOURCES.index(span.source), span.turn,
            -1 if span.engine is None else names["engine"](span.engine), offset,
        ))  # fmt: skip
        at = end
    facts = np.array(per_span, np.int64)
    counts = facts[:, 0]
    group, slot, attempt, incarnation, sequence, begins, sources, turn, engine = (
        np.repeat(facts[:, i].astype(np.int32), counts) for i in range(1, 10))  # fmt: skip

    def category(numbers: Any, labels: Any, null: bool = False) -> Any:
        mask = numbers < 0 if null else None
        return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32(), mask=mask), pa.array(labels, pa.string()))

    sampled = version >= 0
    columns = {
        "group": category(group, list(names["group"].numbers)), "slot": slot, "attempt": attempt,
        "incarnation": category(incarnation, list(names["incarnation"].numbers)), "sequence": sequence,
        "position": pa.array(within, mask=begins < 0), "source": category(sources, _SOURCES), "turn": turn,
        "token": token, "logprob": pa.array(logprob, mask=~sampled), "version": pa.array(version, mask=~sampled),
        "trainable": trainable,
        "entropy": pa.array(entropy, mask=np.isnan(entropy)) if entropies else pa.nulls(count, pa.float32()),
        "engine": category(engine, list(names["engine"].numbers), null=True),
        "partition": np.full(count, partition, np.int32), "offset": np.repeat(facts[:, 10], counts),
    }  # fmt: skip
    return pa.RecordBatch.from_arrays([pa.array(columns[c.name]) for c in TOKENS.columns], schema=TOKENS.arrow())
