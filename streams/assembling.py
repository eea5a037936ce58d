"""The assembler's loop: events in, the fold's effects out, exactly once.

A transaction holds a commit's payload chunks, dead letters and records of `groups`, a `Position` last; it begins when
everything is computed but the offsets that the samples get. Each partition has a transactional id of its own: taking it
over fences the process that had it. What a group's spans hold is kept decoded while there is room, else read again
when the group closes; reading never pauses for memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.errors import DataLossError, RecordError
from headrace.schemas.events import (
    DeadLetter,
    GroupClosed,
    GroupPayload,
    PayloadEpisode,
    PayloadSpan,
    SampleRef,
    Span,
    Tick,
)
from headrace.schemas.hashes import digest
from headrace.schemas.payload import CHUNK_BYTES, content_hash, payload_span, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import DEADLETTER, GROUPS, SAMPLES, TRAJECTORIES, RunTopics

from .assembler import Closed, Fold, Refused, read_event
from .clock import TICK_AFTER_S
from .log.hanging import check_settled
from .log.reader import Reader, Record, beginning_offsets, read_at, read_backwards
from .log.transactions import Output, Send, Transactor
from .progress import Progress
from .ticking import Ticker

log = logging.getLogger("headrace.assembler")

SPAN_BYTES = 256 << 20  # of all partitions of a process: the spans of groups that are open
COMMIT_RECORDS = 10_000  # input records of one Position at most: 16 bytes each, and a record must stay under 1 MB
POLL_RECORDS = 1000
WAIT_S = 0.02
LOAD = 4  # of the time, commits may take one part in LOAD + 1: with slow ones the interval grows


def run_assembler(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
                  partitions: Sequence[int] | None = None) -> None:  # fmt: skip
    """Fold these partitions (default: all) until `stop`. Raises Fenced where another process took one over."""
    name = topics.name(TRAJECTORIES)
    owned = list(range(settings.log.partitions) if partitions is None else partitions)
    with ExitStack() as stack:
        begin = beginning_offsets(kafka, name)
        parts = {p: _Partition(kafka, topics, p, begin[p], SPAN_BYTES // len(owned)) for p in owned}
        for part in parts.values():
            stack.callback(part.close)
        ticker = Ticker(kafka, name, Tick)
        stack.callback(ticker.close)
        reader = stack.enter_context(Reader(kafka, {(name, p): part.progress.read_from for p, part in parts.items()}))
        log.info("assembling %d partitions of %s", len(owned), name)
        next_commit = 0.0
        while not stop.is_set():
            for record in reader.poll(POLL_RECORDS, WAIT_S):
                parts[record.partition].take(record)
            now = time.monotonic()
            if now >= next_commit or any(part.progress.records >= COMMIT_RECORDS for part in parts.values()):
                for part in parts.values():
                    part.commit_if_due()
                spent = time.monotonic() - now
                next_commit = now + max(settings.log.commit_ms / 1000, LOAD * spent)
            for part in parts.values():
                if part.fold.open_groups and now - part.heard >= TICK_AFTER_S:
                    ticker.tick(part.number)
                    part.heard = now
        for part in parts.values():
            part.commit_if_due(clean=True)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A candidate's payload, encoded."""

    content_hash: bytes
    chunks: tuple[bytes, ...]


class _Partition:
    """One partition's fold, and what it takes to write its effects."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, number: int, begin: int, span_bytes: int) -> None:
        self.number = number
        self._kafka, self._topics = kafka, topics
        # First the id, which ends a predecessor's open transaction; only then is the end of `groups` final.
        self._transactor = Transactor(kafka, topics.transactional_id("assembler", number))
        check_settled(kafka, [(topics.name(GROUPS), number), (topics.name(SAMPLES), number)])
        self.progress = self._recover()
        if self.progress.read_from < begin:
            raise DataLossError(
                f"{topics.name(TRAJECTORIES)}[{number}]@{self.progress.read_from}: what has still to be read begins "
                f"here, but the topic begins at {begin}; nobody may delete above the low mark in {topics.name(GROUPS)}"
            )
        self.fold = Fold(self.progress.clock)
        self.heard = time.monotonic()
        self._spans: dict[str, dict[int, PayloadSpan | None]] = {}  # by group and offset; None: to be read again
        self._sizes: dict[str, int] = {}
        self._room = span_bytes
        self._samples: dict[str, _Sample] = {}
        self._refused: dict[int, Record] = {}

    def _recover(self) -> Progress:
        groups = self._topics.name(GROUPS)
        return Progress.recover(r.value or b"" for r in read_backwards(self._kafka, groups, self.number))

    def take(self, record: Record) -> None:
        self.heard = time.monotonic()
        event = read_event(record.value)
        if isinstance(event, Span) and self.fold.is_open(event.group):
            self._keep(event, record)
        effects = self.fold.apply(record, event)
        due = self.progress.take(record, effects)
        for effect in due:
            if isinstance(effect, Refused):
                self._refused[effect.cause] = record
                log.warning("%s[%d]@%d goes to %s: %s", record.topic, record.partition, record.offset, DEADLETTER,
                            effect.reason)  # fmt: skip
            elif isinstance(effect, Closed) and effect.payload is not None:
                self._samples[effect.record.group] = self._sample(effect.payload)
        for effect in effects:
            if isinstance(effect, Closed):
                self._spans.pop(effect.record.group, None)
                self._room += self._sizes.pop(effect.record.group, 0)

    def _keep(self, span: Span, record: Record) -> None:
        size = len(record.value or b"")
        spans = self._spans.setdefault(span.group, {})
        if size > self._room:
            spans[record.offset] = None
            return
        spans[record.offset] = payload_span(span)
        self._room -= size
        self._sizes[span.group] = self._sizes.get(span.group, 0) + size

    def _sample(self, plan: GroupPayload) -> _Sample:
        kept = self._spans.get(plan.group, {})
        wanted = {o for episode in plan.episodes for o in episode.offsets if kept.get(o, ...) is None}
        found = self._read_again(wanted) if wanted else {}

        def filled(episode: PayloadEpisode) -> PayloadEpisode:
            spans = (kept.get(o) or found.get(o) for o in episode.offsets)
            return replace(episode, spans=tuple(span for span in spans if span is not None))

        payload = replace(plan, episodes=tuple(filled(episode) for episode in plan.episodes))
        return _Sample(content_hash(payload), tuple(encode(chunk) for chunk in to_chunks(payload)))

    def _read_again(self, offsets: set[int]) -> dict[int, PayloadSpan]:
        found = {}
        for offset, record in read_at(self._kafka, self._topics.name(TRAJECTORIES), self.number, offsets).items():
            event = read_event(record.value)
            if isinstance(event, RecordError):
                raise event
            assert isinstance(event, Span)
            found[offset] = payload_span(event)
        return found

    # ------------------------------------------------------------------------------------------------- commits

    def commit_if_due(self, clean: bool = False) -> None:
        """`clean` settles input without effects too, so that the next process has nothing to fold again."""
        progress = self.progress
        if progress.replayed and (progress.pending or progress.records >= (1 if clean else COMMIT_RECORDS)):
            self._commit()

    def _commit(self) -> None:
        samples, groups = self._topics.name(SAMPLES), self._topics.name(GROUPS)
        waiting = [(group, value) for group, sample in self._samples.items() for value in sample.chunks]
        first = [Output(samples, self.number, value, group.encode()) for group, value in waiting]
        first += [self._dead_letter(effect) for effect in self.progress.pending if isinstance(effect, Refused)]
        digests = [digest(value) for _, value in waiting]

        def build(send: Send) -> Chain:
            offsets = send(first) if first else []
            refs: dict[str, list[SampleRef]] = {}
            for (group, _), offset, checksum in zip(waiting, offsets, digests, strict=False):
                refs.setdefault(group, []).append(SampleRef(offset, checksum))

            def complete(effect: Closed) -> GroupClosed:
                sample = self._samples.get(effect.record.group)
                if sample is None:
                    return effect.record
                places = tuple(refs[effect.record.group])
                return replace(effect.record, content_hash=sample.content_hash, samples=places)

            chain, records = self.progress.commit(self.fold, complete)
            send([Output(groups, self.number, value, key.encode() or None) for key, value in records])
            return chain

        try:
            self.progress.committed(self._transactor.commit(build))
        except Exception:
            log.error("partition %d of %s stops at %d; nothing above %d is committed", self.number,
                      self._topics.name(TRAJECTORIES), self.progress.offset, self.progress.position)  # fmt: skip
            raise
        self._samples, self._refused = {}, {}

    def _dead_letter(self, effect: Refused) -> Output:
        record = self._refused[effect.cause]
        # A value that fills a record to its limit would not fit with the reason beside it.
        letter = DeadLetter(record.topic, record.partition, record.offset, effect.kind, effect.reason, record.key,
                            None if record.value is None else record.value[:CHUNK_BYTES])  # fmt: skip
        return Output(self._topics.name(DEADLETTER), 0, encode(letter), record.key)

    def close(self) -> None:
        self._transactor.close()
