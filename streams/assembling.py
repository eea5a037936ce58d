"""The assembler's loop: events in, the fold's effects out, exactly once.

A transaction holds a commit's payload chunks, dead letters and records of `groups`, a `Position` last; it begins when
everything is computed but the offsets that the samples get. Each partition has a transactional id of its own: taking it
over fences the process that had it.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.errors import DataLossError, Fenced
from headrace.schemas.events import Addendum, DeadLetter, GroupClosed, SampleRef, Span, Tick
from headrace.schemas.hashes import digest
from headrace.schemas.payload import CHUNK_BYTES, content_hash, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import DEADLETTER, GROUPS, SAMPLES, TRAJECTORIES, RunTopics

from .assembler import Closed, Fold, Refused, read_event
from .clock import TICK_AFTER_S
from .kept import Budget, KeptSpans
from .log.blobs import Blobs, open_blobs
from .log.hanging import check_settled
from .log.policy import Schemas
from .log.reader import Reader, Record, beginning_offsets, read_backwards
from .log.transactions import Output, Send, Transactor
from .progress import Progress
from .ticking import Ticker
from .trimming import Trimmer

log = logging.getLogger("headrace.assembler")

MEMORY_BYTES = 256 << 20  # for the spans of open groups, of all partitions of a process
COMMIT_RECORDS = 10_000  # input records of one Position at most: 16 bytes each, and a record must stay under 1 MB
POLL_RECORDS = 1000
WAIT_S = 0.02
LOAD = 2  # commits may take one part in so many of the time: with slow ones the interval grows
COMMITS_AT_ONCE = 8  # a transaction mostly waits for the broker: one after the other, many partitions would add up
# A record is several objects, and none of them is in a cycle: looking for one so often would cost a tenth of the CPU.
GARBAGE = 50_000
# What is written is mostly sampled tokens that were zstd'd once: lz4 takes 13 % more room there and half the time.
COMPRESSION = {"compression.type": "lz4"}


def run_assembler(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
                  partitions: Sequence[int] | None = None, *, memory_bytes: int = MEMORY_BYTES) -> None:  # fmt: skip
    """Fold these partitions (default: all) until `stop`. Spans of open groups take up to `memory_bytes`.

    Raises Fenced where another process took one over (what the others hold is committed first), DataLossError where
    input that is still needed was deleted.
    """
    gc.set_threshold(GARBAGE)
    name = topics.name(TRAJECTORIES)
    owned = list(range(settings.log.partitions) if partitions is None else partitions)
    with ExitStack() as stack:
        begin = beginning_offsets(kafka, name)
        budget, blobs = Budget(memory_bytes), open_blobs(settings.log, topics.run)
        again = stack.enter_context(Reader(kafka))
        parts = {p: _Partition(kafka, topics, p, begin[p], budget, again, blobs) for p in owned}
        for part in parts.values():
            stack.callback(part.close)
        ticker = Ticker(kafka, name, Tick)
        stack.callback(ticker.close)
        trimmer = None
        if settings.log.keep_trajectories_s is not None:
            trimmer = Trimmer(kafka, name, settings.log.keep_trajectories_s)
            stack.callback(trimmer.close)
        reader = stack.enter_context(Reader(kafka, {(name, p): part.progress.read_from for p, part in parts.items()}))
        pool = stack.enter_context(ThreadPoolExecutor(min(len(owned), COMMITS_AT_ONCE), "commit"))
        log.info("assembling %s of %s", ", ".join(map(str, owned)), name)
        next_commit = 0.0
        while not stop.is_set():
            heard = set()
            for record in reader.poll(POLL_RECORDS, WAIT_S):
                parts[record.partition].take(record)
                heard.add(record.partition)
            now = time.monotonic()
            if now >= next_commit or any(part.progress.records >= COMMIT_RECORDS for part in parts.values()):
                _commit(pool, parts.values())
                spent = time.monotonic() - now
                next_commit = now + max(settings.log.commit_ms / 1000, LOAD * spent)
            for p, part in parts.items():
                if p in heard or not part.fold.open_groups:
                    part.heard = now
                elif now - part.heard >= TICK_AFTER_S:
                    ticker.tick(p)
                    part.heard = now
            if trimmer is not None:
                trimmer.trim({p: (part.progress.low_mark, part.fold.clock.last_ms) for p, part in parts.items()})
        _commit(pool, parts.values(), clean=True)


def _commit(pool: ThreadPoolExecutor, parts: Collection[_Partition], clean: bool = False) -> None:
    """Where one was fenced, the others still commit what is theirs. Raises Fenced."""
    fenced = [error for error in pool.map(_Partition.commit, [p for p in parts if p.due(clean)]) if error is not None]
    if fenced:
        for part in parts:
            if part.alive and part.due(clean=True):
                part.commit()
        raise fenced[0]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A candidate's payload, encoded."""

    content_hash: bytes
    chunks: tuple[bytes, ...]


class _Partition:
    """One partition's fold, and what it takes to write its effects."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, number: int, begin: int, budget: Budget,
                 again: Reader, blobs: Blobs | None) -> None:  # fmt: skip
        self.number = number
        self._kafka, self._topics, self._blobs = kafka, topics, blobs
        self._decode = Schemas(kafka, topics).decode  # a newer writer's events are refused by no pass, or by all
        # First the id, which ends a predecessor's open transaction; only then is the end of `groups` final.
        self._transactor = Transactor({**COMPRESSION, **kafka}, topics.transactional_id("assembler", number))
        check_settled(kafka, [(topics.name(GROUPS), number), (topics.name(SAMPLES), number)])
        self.progress = self._recover()
        name = topics.name(TRAJECTORIES)
        if self.progress.read_from < begin:
            raise DataLossError(
                f"{name}[{number}]@{self.progress.read_from}: what has still to be read begins "
                f"here, but the topic begins at {begin}: what lay between was deleted, and nobody may delete above the "
                f"low mark in {topics.name(GROUPS)}. This run can't go on; a fork can, from its newest version "
                f"(`headrace create CONFIG --from {topics.run}@VERSION`)"
            )
        self.fold = Fold(self.progress.clock)
        self.heard = time.monotonic()
        self._spans = KeptSpans(budget, lambda offsets: {
            offset: read_event(record.value, self._decode)
            for offset, record in again.read_at(name, number, offsets).items()
        })  # fmt: skip
        self._samples: dict[str, _Sample] = {}
        self._refused: dict[int, Record] = {}

    def _recover(self) -> Progress:
        groups = self._topics.name(GROUPS)
        return Progress.recover(read_backwards(self._kafka, groups, self.number), self._decode)

    def take(self, record: Record) -> None:
        event = read_event(record.value, self._decode)
        effects = self.fold.apply(record, event)
        due = self.progress.take(record, effects)
        if isinstance(event, Span) and not any(isinstance(effect, Addendum) for effect in effects):
            self._spans.keep(event, record)  # before the closures: it may belong to what its own arrival closes
        for effect in due:
            if isinstance(effect, Refused):
                self._refused[effect.cause] = record
                log.warning("%s[%d]@%d goes to %s: %s", record.topic, record.partition, record.offset, DEADLETTER,
                            effect.reason)  # fmt: skip
            elif isinstance(effect, Closed) and effect.payload is not None:
                payload = self._spans.fill(effect.payload)
                # A blob is written here, long before the transaction that names it.
                chunks = to_chunks(payload) if self._blobs is None else self._blobs.pack(payload)
                self._samples[effect.record.group] = _Sample(
                    content_hash(payload), tuple([encode(chunk) for chunk in chunks])
                )
        for effect in effects:
            if isinstance(effect, Closed):
                self._spans.drop(effect.record.group)

    # ------------------------------------------------------------------------------------------------- commits

    def due(self, clean: bool = False) -> bool:
        """`clean` settles input without effects too, so that the next process has nothing to fold again."""
        progress = self.progress
        return progress.replayed and (bool(progress.pending) or progress.records >= (1 if clean else COMMIT_RECORDS))

    def commit(self) -> Fenced | None:
        """Write all that is pending. Returns Fenced where the partition is another process's now."""
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
        except Exception as error:
            log.error("partition %d of %s stops at %d; nothing above %d is committed", self.number,
                      self._topics.name(TRAJECTORIES), self.progress.offset, self.progress.position)  # fmt: skip
            if isinstance(error, Fenced):
                return error
            raise
        self._samples, self._refused = {}, {}
        return None

    def _dead_letter(self, effect: Refused) -> Output:
        record = self._refused[effect.cause]
        # A value that fills a record to its limit would not fit with the reason beside it.
        letter = DeadLetter(record.topic, record.partition, record.offset, effect.kind, effect.reason, record.key,
                            None if record.value is None else record.value[:CHUNK_BYTES])  # fmt: skip
        return Output(self._topics.name(DEADLETTER), 0, encode(letter), record.key)

    @property
    def alive(self) -> bool:
        return self._transactor.alive

    def close(self) -> None:
        self._transactor.close()
