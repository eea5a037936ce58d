"""The table of tokens: columns straight from the spans' bytes into Arrow's buffers, no row is ever made.

A batch is made of many spans at once, and no Python runs for a token, and little for a span: fields are taken from all
spans side by side, bytes are put together as they lie there and unpacked in one go.

The position of a token needs the length of what its span continues: that is kept for attempts that haven't ended, of
`KEPT` attempts at most (those of long ago first to go), so that attempts which never end take no memory for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.columns import halves
from headrace.schemas.errors import RecordError
from headrace.schemas.events import EpisodeEnded, Span
from headrace.schemas.outcomes import Source
from headrace.schemas.topics import TRAJECTORIES

from ..source import LogSource
from .schema import TOKENS

# Of a batch, at least; at most so many and one span more. With twice as many the allocator would give memory back to
# the system and fault it in again at every batch.
ROWS = 1 << 15
KEPT = 1 << 16
_SOURCES = tuple(str(source) for source in Source)
_NUMBERS = {source: number for number, source in enumerate(_SOURCES)}

_FIELDS = ("count", "group", "slot", "attempt", "incarnation", "sequence", "source", "turn", "engine", "tokens",
           "logprobs", "mask", "entropies")  # fmt: skip
_fields = attrgetter(*_FIELDS)

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
    ends, held, count = _Ends(), _Held(), 0
    for partition in range(source.partitions(TRAJECTORIES)):
        for record in source.records(TRAJECTORIES, partition):
            kind = kind_of(record.value)
            if kind is not Span and kind is not EpisodeEnded:
                continue
            try:
                event: Any = decode(record.value)
                if kind is Span:
                    event.check()
            except RecordError:  # also a span whose columns contradict each other: the ledger names it
                continue
            if kind is EpisodeEnded:
                ends.ended((event.group, event.slot, event.attempt, event.incarnation))
                continue
            held.add(event, record.offset, ends)
            count += event.count
            if count >= rows:
                yield _batch(held, partition, count)
                held, count = _Held(), 0
        if held.places:
            yield _batch(held, partition, count)
            held, count = _Held(), 0


class _Held:
    """Spans of a batch, field after field in flat lists of strings, bytes and numbers: objects that hold others would
    be visited by Python's garbage collector again and again."""

    def __init__(self) -> None:
        self.fields: list[Any] = []  # _FIELDS of each span
        self.places: list[int] = []  # offset and begin of each
        self.runs: list[int] = []  # version and count of each run of tokens; version -1 where no model sampled them

    def add(self, span: Span, offset: int, ends: _Ends) -> None:
        found = _fields(span)
        self.fields += found
        self.places += (offset, ends.begin(found[1:5], span))
        if not span.versions:
            self.runs += (-1, span.count)
        for run in span.versions:
            self.runs += (run.version, run.count)


def _batch(held: _Held, partition: int, count: int) -> Any:
    import pyarrow as pa

    (counts, group, slot, attempt, incarnation, sequence, source, turn, engine, ids, logprobs, masks,
     entropies) = (held.fields[i :: len(_FIELDS)] for i in range(len(_FIELDS)))  # fmt: skip
    offsets, begins = held.places[::2], held.places[1::2]
    group_names, group_numbers = _numbered(group)
    incarnation_names, incarnation_numbers = _numbered(incarnation)
    engine_names, engine_numbers = _numbered(engine)
    sizes, begin = np.array(counts, np.int64), np.array(begins, np.int64)
    begin -= np.cumsum(sizes) - sizes  # where in the batch the attempt would begin
    facts = np.array([group_numbers, slot, attempt, incarnation_numbers, sequence, begin,
                      list(map(_NUMBERS.__getitem__, source)), turn, engine_numbers], np.int64)  # fmt: skip
    # All at once: for one after the other numpy takes longer.
    groups, slots, attempts, incarnations, sequences, position, sources, turns, engines = np.repeat(
        facts.astype(np.int32), sizes, axis=1)  # fmt: skip
    position += np.arange(count, dtype=np.int32)
    version = np.repeat(np.array(held.runs[::2], np.int64).astype(np.int32), held.runs[1::2])
    sampled = version >= 0
    trainable, every = sampled, None if sampled.all() else sampled
    if any(masks):
        trainable = sampled & (np.frombuffer(_joined(masks, counts, b"\1"), np.uint8) != 0)
    if any(entropies):
        entropy = _floats(entropies, counts, count)
        recorded = np.repeat([column is not None for column in entropies], sizes) & ~np.isnan(entropy)
    else:
        entropy, recorded = np.zeros(count, np.float32), np.zeros(count, np.bool_)

    def array(kind: Any, values: Any, valid: Any = None) -> Any:
        """Numpy's buffer as it is; rows that aren't `valid` are null."""
        return pa.Array.from_buffers(kind, count, [None if valid is None else _bits(valid), pa.py_buffer(values)])

    def category(numbers: Any, labels: Sequence[str], valid: Any = None) -> Any:
        labelled = pa.array(labels, pa.string())
        return pa.DictionaryArray.from_arrays(array(pa.int32(), numbers, valid), labelled, safe=False)

    int32, int64, float32 = pa.int32(), pa.int64(), pa.float32()
    columns = {
        "group": category(groups, group_names), "slot": array(int32, slots), "attempt": array(int32, attempts),
        "incarnation": category(incarnations, incarnation_names), "sequence": array(int32, sequences),
        "position": array(int32, position, None if min(begins) >= 0 else np.repeat(np.array(begins) >= 0, sizes)),
        "source": category(sources, _SOURCES), "turn": array(int32, turns),
        "token": array(int32, _ids(ids, counts, count)),
        "logprob": array(float32, _floats(logprobs, counts, count), every), "version": array(int32, version, every),
        "trainable": pa.Array.from_buffers(pa.bool_(), count, [None, _bits(trainable)]),
        "entropy": array(float32, entropy, recorded),
        "engine": category(engines, engine_names, engines >= 0 if None in engine else None),
        "partition": array(int32, np.full(count, partition, np.int32)),
        "offset": array(int64, np.repeat(np.array(offsets, np.int64), sizes)),
    }  # fmt: skip
    return pa.RecordBatch.from_arrays([columns[c.name] for c in TOKENS.columns], schema=_schema())


@cache
def _schema() -> Any:
    return TOKENS.arrow()


def _bits(flags: Any) -> Any:
    """bool[n] as Arrow holds them: a bit each, lowest first."""
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))


# Columns of many spans, one after the other.


def _numbered(labels: Sequence[str | None]) -> tuple[list[str], list[int]]:
    """(each label once, the number of each one's label; -1 for None)."""
    names = [label for label in dict.fromkeys(labels) if label is not None]
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)} | {None: -1}
    return names, list(map(numbers.__getitem__, labels))


def _joined(columns: Sequence[bytes | None], counts: Sequence[int], missing: bytes) -> bytes:
    """`missing` for each value of a span that has none."""
    return b"".join([missing * n if column is None else column for column, n in zip(columns, counts, strict=True)])


def _ids(columns: Sequence[bytes], counts: Sequence[int], count: int) -> Any:
    """int32[count]."""
    low, high = b"".join(columns), None
    if len(low) > 2 * count:  # not all of 16 bits
        halved = [halves(column, n) for column, n in zip(columns, counts, strict=True)]
        low, high = b"".join([one for one, _ in halved]), _joined([one for _, one in halved], counts, bytes(2))
    ids = np.frombuffer(low, "<u2").astype(np.int32)
    if high is not None:
        ids |= np.frombuffer(high, "<u2").astype(np.int32) << 16
    return ids


def _floats(columns: Sequence[bytes | None], counts: Sequence[int], count: int) -> Any:
    """float32[count]; 0 where a span has none."""
    out = np.empty((count, 4), np.uint8)
    if None in columns:
        columns = [bytes(4 * n) if column is None else column for column, n in zip(columns, counts, strict=True)]
    for i in range(4):  # a span's first bytes of all values, then all second ones, ...
        plane = [column[i * n : (i + 1) * n] for column, n in zip(columns, counts, strict=True)]  # type: ignore[index]
        out[:, i] = np.frombuffer(b"".join(plane), np.uint8)
    return out.view("<f4")[:, 0]
