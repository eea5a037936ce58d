"""Reading the log by position, and deciding where it ends.

Offsets are positions with gaps: markers of transactions and aborted records take offsets and are never shown. So no
count is taken from watermarks, and a read to the end ends by the position that the broker names there, not by the
offset of a last record. Readers join no consumer group and commit nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from confluent_kafka import KafkaError, TopicPartition

from headrace.schemas.errors import DataLossError, LogError

from .clients import PASSING, Isolation, KafkaConfig, consumer, insist, partitions
from .transactions import TRANSACTION_TIMEOUT_S

Position = tuple[str, int]  # topic, partition

# Going back, the first window is as large as the records that usually suffice; the last is bounded by memory.
FIRST_WINDOW, LAST_WINDOW = 16, 1024
# Wanted offsets nearer than this are fetched in one go: a fetch costs about as much as reading over that many.
NEAR = 64
# How long the broker holds back an answer that would be empty. An end is known only by such an answer, and a jump waits
# for the one that is out; who follows the log would only ask more often.
FOLLOWING_WAIT_MS, JUMPING_WAIT_MS = 100, 10
# Who is in no hurry has the broker gather what comes, for so long or up to so much: an answer for every few records
# would cost both sides more than the records do.
GATHERING_WAIT_MS, GATHERING_BYTES = 200, 256 << 10
STALL_S = 60.0
# A follower that stands still below the end looks so often whether a transaction hangs, and takes it for one so long
# after the time-out of an open one.
LOOK_S, GRACE_S = 10.0, 30.0

@dataclass(slots=True, unsafe_hash=True)  # not frozen: making one for each record read would take four times as long
class Record:
    """One record of the log and its address."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Reader:
    """Reads from explicit positions. Not for several threads."""

    def __init__(self, config: KafkaConfig, positions: Mapping[Position, int] | None = None,
                 isolation: Isolation = "read_committed", gather: bool = False):  # fmt: skip
        """With positions it follows the log from there; without, it is for `read` and `read_at`. `gather`: what comes
        is shown up to 0.2 s later, at a fraction of the cost: for whoever only looks on."""
        fetch: dict[str, str | int | bool] = {"fetch.wait.max.ms": FOLLOWING_WAIT_MS if positions else JUMPING_WAIT_MS}
        if gather:
            fetch = {"fetch.wait.max.ms": GATHERING_WAIT_MS, "fetch.min.bytes": GATHERING_BYTES}
        self._consumer = consumer({**config, **fetch}, isolation)
        self._partitions: dict[str, list[int]] = {}
        self._positions: dict[Position, int] = {}
        self._at_end: set[Position] = set()
        self._config, self._looks = config, isolation == "read_committed"
        self._look_at = time.monotonic() + LOOK_S
        self._standing: dict[Position, tuple[int, float]] = {}  # offset, and since when
        if positions:
            self.assign(positions)

    @property
    def positions(self) -> dict[Position, int]:
        """The next offset of each partition; beyond the markers where its end has been reached."""
        return dict(self._positions)

    @property
    def at_end(self) -> bool:
        """Whether each partition had been read to its end when it was last heard of."""
        return len(self._at_end) == len(self._positions)

    def assign(self, positions: Mapping[Position, int]) -> None:
        """Go on from these positions, and from no others. Raises LogError where there is no such partition."""
        for topic, number in positions:  # the client would wait for a missing one in silence
            self._check(topic, number)
        self._positions, self._at_end = dict(positions), set()
        self._consumer.assign([TopicPartition(topic, number, at) for (topic, number), at in positions.items()])

    def poll(self, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records, in order within a partition; the first one is waited for, the others are not.

        Raises DataLossError when a position is no longer (or not yet) in the log, HungTransaction when one can't be
        passed for longer than a transaction may be open, LogError when Kafka refuses.
        """
        deadline = time.monotonic() + timeout_s
        if self._looks and time.monotonic() >= self._look_at:
            self._look()
        while True:
            records = self._fetch(max_records, max(0.0, deadline - time.monotonic()))
            # The client waits whole milliseconds: with less than one left it would spin.
            if records or deadline - time.monotonic() < 0.001:
                return records

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Record]:
        """Every record with start <= offset < end, then stop; `end` may lie behind markers. Raises LogError where
        nothing comes for `STALL_S`."""
        if start >= end:
            return
        place = (topic, partition)
        self.assign({place: start})
        moved = time.monotonic()
        while self._positions[place] < end:
            before = self._positions[place]
            for record in self._fetch(500, timeout_s=1.0):
                if record.offset >= end:
                    return
                yield record
            if self._positions[place] != before:
                moved = time.monotonic()
            elif time.monotonic() - moved > STALL_S:
                raise LogError(f"{topic}[{partition}]@{before}: nothing came for {STALL_S:g} s, and the end of the "
                               f"read is {end}: an open transaction may hold it back")  # fmt: skip

    def read_at(self, topic: str, partition: int, offsets: Iterable[int]) -> dict[int, Record]:
        """The records at these offsets, by offset. Raises DataLossError where there is none."""
        found: dict[int, Record] = {}
        for near in _ranges(sorted(set(offsets))):
            wanted = set(near)
            for record in self.read(topic, partition, near[0], near[-1] + 1):
                if record.offset in wanted:
                    found[record.offset] = record
            if lost := wanted - found.keys():
                more = f" (nor at {spans(sorted(lost)[1:])})" if len(lost) > 1 else ""
                raise DataLossError(f"{topic}[{partition}]@{min(lost)}: there is no such record{more}; it was deleted, "
                                    "or the offset belongs to a marker or an aborted transaction")  # fmt: skip
        return found

    def partitions(self, topic: str, timeout_s: float = 30.0) -> list[int]:
        """The partitions of a topic, ascending. Raises LogError where there is no such topic."""
        if topic not in self._partitions:
            self._partitions[topic] = partitions(self._consumer, topic, timeout_s)
        return self._partitions[topic]

    def bounds(self, topic: str, partition: int, timeout_s: float = 30.0) -> tuple[int, int]:
        """The first retained offset, and where a reader of this isolation would come to a stop now."""
        self._check(topic, partition, timeout_s)
        place = TopicPartition(topic, partition)
        low, high = insist(lambda left_s: self._consumer.get_watermark_offsets(place, timeout=left_s), timeout_s,
                           f"{topic}[{partition}]: its offsets are not to be had", of_seen=True)  # fmt: skip
        return int(low), int(high)

    def offset_at(self, topic: str, partition: int, timestamp_ms: int, timeout_s: float = 30.0) -> int:
        """The first offset whose record is not older; the end where all are."""
        self._check(topic, partition, timeout_s)
        asked = [TopicPartition(topic, partition, timestamp_ms)]
        found = insist(lambda left_s: self._consumer.offsets_for_times(asked, timeout=left_s)[0], timeout_s,
                       f"{topic}[{partition}]: its offsets are not to be had", of_seen=True)  # fmt: skip
        return int(found.offset) if found.offset >= 0 else self.bounds(topic, partition, timeout_s)[1]

    def close(self) -> None:
        """Give the connection back."""
        self._consumer.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def _check(self, topic: str, partition: int, timeout_s: float = 30.0) -> None:
        if partition not in self.partitions(topic, timeout_s):
            raise LogError(f"{topic}: there is no partition {partition}")

    def _fetch(self, max_records: int, timeout_s: float) -> list[Record]:
        """As poll, but back at once, perhaps with nothing, when an end of a partition is reached."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        # One poll waits and one takes what is there: consume() alone would wait until all of max_records have come.
        rest = self._consumer.consume(max_records - 1, 0) if max_records > 1 else []
        return self._take([first, *rest])

    def _take(self, messages: list[Any]) -> list[Record]:
        records: list[Record] = []
        positions, at_end = self._positions, self._at_end
        for message in messages:
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            place = (topic, partition)
            if (error := message.error()) is not None:
                self._note(error, place, offset)
            elif place in positions and offset is not None:  # else left over from an earlier assignment
                positions[place] = offset + 1
                at_end.discard(place)
                records.append(Record(topic, partition, offset, message.timestamp()[1], message.key(), message.value(),
                                      tuple(message.headers() or ())))  # fmt: skip
        return records

    def _look(self) -> None:
        """For positions that stay at the end of what can be read, while more is written."""
        from .hanging import hung, standing

        limit = int(self._config.get("transaction.timeout.ms", 1000 * TRANSACTION_TIMEOUT_S)) / 1000 + GRACE_S
        self._look_at = time.monotonic() + LOOK_S
        for place in self._positions:
            at, now = self._positions[place], time.monotonic()
            before, since = self._standing.pop(place, (at, now))
            # As of the last fetch: cheap, and enough to leave out those that read on.
            written = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)[1]
            if place not in self._at_end or written <= at:
                continue
            if at != before:
                since = now
            elif now - since > 2 * LOOK_S:
                found = standing(self._config, place)
                if found is None:  # an outage: the time-outs begin anew after it
                    since = now
                elif found[0] < found[1] and now - since > limit:
                    raise hung(self._config, place, *found, now - since)
            self._standing[place] = at, since

    def _note(self, error: KafkaError, place: Position, offset: int | None) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            if place in self._positions and offset is not None:
                self._positions[place] = max(offset, self._positions[place])
                self._at_end.add(place)
            return
        if error.code() in PASSING or (error.retriable() and not error.fatal()):
            return
        where = f"{place[0]}[{place[1]}]@{self._positions.get(place, offset)}"
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise DataLossError(f"{where}: this position is not in the log: what was there has been deleted, or the "
                                "topic was truncated or made anew; start from a position that is retained")  # fmt: skip
        raise LogError(f"{where}: {error.str()} [{error.name()}]")


def read_range(config: KafkaConfig, topic: str, partition: int, start: int, end: int) -> Iterator[Record]:
    """Every committed record with start <= offset < end."""
    with Reader(config) as reader:
        yield from reader.read(topic, partition, start, end)


def read_at(config: KafkaConfig, topic: str, partition: int, offsets: Iterable[int]) -> dict[int, Record]:
    """The records at these offsets, by offset. Raises DataLossError where there is none."""
    with Reader(config) as reader:
        return reader.read_at(topic, partition, offsets)


def beginning_offsets(config: KafkaConfig, topic: str) -> dict[int, int]:
    """The first retained offset of each partition."""
    return {partition: low for partition, (low, _) in _bounds(config, topic).items()}


def end_offsets(config: KafkaConfig, topic: str) -> dict[int, int]:
    """Where a read-committed reader of each partition would come to a stop now: its last stable offset."""
    return {partition: high for partition, (_, high) in _bounds(config, topic).items()}


def offsets_at(config: KafkaConfig, topic: str, timestamp_ms: int) -> dict[int, int]:
    """The first offset of each partition whose record is not older; the end where all are."""
    with Reader(config) as reader:
        return {partition: reader.offset_at(topic, partition, timestamp_ms) for partition in reader.partitions(topic)}


def read_backwards(config: KafkaConfig, topic: str, partition: int, end: int | None = None) -> Iterator[Record]:
    """Committed records from the one before `end` (default: the newest) back to the oldest that is retained."""
    window = FIRST_WINDOW
    with Reader(config) as reader:
        low, high = reader.bounds(topic, partition)
        end = high if end is None else min(end, high)
        while end > low:
            start = max(low, end - window)
            yield from reversed(list(reader.read(topic, partition, start, end)))
            end, window = start, min(2 * window, LAST_WINDOW)


def read_backwards_until(config: KafkaConfig, topic: str, partition: int,
                         predicate: Callable[[Record], bool]) -> list[Record]:  # fmt: skip
    """The newest record that satisfies `predicate` and all after it, in log order; all of them where none does."""
    kept = []
    for record in read_backwards(config, topic, partition):
        kept.append(record)
        if predicate(record):
            break
    return kept[::-1]


def last_record(config: KafkaConfig, topic: str, partition: int) -> Record | None:
    """The newest committed record, although the log ends with markers; None where there is none."""
    return next(read_backwards(config, topic, partition), None)


def _bounds(config: KafkaConfig, topic: str) -> dict[int, tuple[int, int]]:
    with Reader(config) as reader:
        return {partition: reader.bounds(topic, partition) for partition in reader.partitions(topic)}


def spans(offsets: Iterable[int]) -> str:
    """Ascending offsets in words: `0..3, 7`."""
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset == runs[-1][1] + 1:
            runs[-1][1] = offset
        else:
            runs.append([offset, offset])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _ranges(offsets: list[int]) -> Iterator[list[int]]:
    """Split ascending offsets where the gap is wide."""
    start = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] - offsets[i - 1] > NEAR:
            if start < i:
                yield offsets[start:i]
            start = i
