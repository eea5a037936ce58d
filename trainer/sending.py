"""Decides how the chunks of a publication get to where receivers find them: unseen, in order, no faster than they may.

Chunks go out through an idempotent producer, outside any transaction: until a publication names their offsets they mean
nothing, so a crash leaves orphans that nobody looks at. Where the run has a store, a chunk's data is put there first
and the record that goes out names it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.schemas.codec import encode
from headrace.schemas.errors import BlobError, LogError
from headrace.schemas.events import WeightChunk
from headrace.streams.log import clients
from headrace.streams.log.blobs import WeightStore
from headrace.streams.log.pace import Pace

log = logging.getLogger("headrace.trainer")

DELIVERY_S = 120.0  # without a chunk being taken; as long as a transaction waits for a broker that is away


class Abandoned(Exception):
    """The process is about to end and waits for no transfer: what was sent stays an orphan."""


class Sender:
    """One thread sends; any thread may `abandon`."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, *, max_bytes_per_s: float | None = None,
                 store: WeightStore | None = None,
                 tap: Callable[[int, bytes], object] | None = None) -> None:  # fmt: skip
        """`tap` gets each record, with its offset, once the log has it; it must not wait."""
        self._kafka, self._topic, self._store = kafka, topic, store
        self._producer = clients.producer(kafka, **{"compression.type": "none"})  # chunks are compressed already
        self._pace = Pace(max_bytes_per_s)
        self._tap = tap
        self._abandoned = threading.Event()

    def send(self, chunks: Iterable[WeightChunk]) -> tuple[list[int], int]:
        """Offsets of the chunks in order, and the bytes of their data. Raises LogError where the broker doesn't take
        them, BlobError where the store doesn't, Abandoned."""
        offsets: dict[int, int] = {}
        failed: list[str] = []
        count = size = 0

        def delivered(index: int, value: bytes | None) -> Callable[[KafkaError | None, Message], None]:
            def report(error: KafkaError | None, message: Message) -> None:
                at = message.offset()
                if error is not None or at is None or at < 0:
                    failed.append(error.str() if error is not None else "it was acknowledged without its offset")
                else:
                    offsets[index] = at
                    if value is not None and self._tap is not None:
                        self._tap(at, value)

            return report

        try:
            for chunk in chunks:
                value = encode(self._stored(chunk))
                self._produce(value, delivered(count, value if self._tap is not None else None))
                count, size = count + 1, size + len(chunk.data)
                if self._abandoned.wait(self._pace.wait_s(len(chunk.data), time.monotonic())):
                    raise Abandoned
            self._flush()
        except KafkaException as error:
            raise LogError(f"{self._topic}: weights can't be sent: {clients.reason(error)}") from error
        if len(offsets) != count:
            why = failed[0] if failed else f"no answer within {DELIVERY_S:g} s"
            raise LogError(f"{self._topic}: {count - len(offsets)} of {count} chunks were not delivered ({why})")
        return [offsets[index] for index in range(count)], size

    def forget_below(self, offset: int, version: int) -> None:
        """Delete what lies before a snapshot, by the offset of its first chunk and by its version; where that fails,
        it is only more than is needed."""
        place = TopicPartition(self._topic, 0, offset)
        admin = clients.admin(self._kafka)  # held until the futures are done: a collected client never resolves them
        try:
            for future in admin.delete_records([place]).values():
                future.result()
        except KafkaException as error:
            log.warning("%s: what lies below offset %d can't be deleted: %s", self._topic, offset,
                        clients.reason(error))  # fmt: skip
        try:
            if self._store is not None:
                self._store.forget_before(version)
        except BlobError as error:
            log.warning("%s", error)

    def abandon(self) -> None:
        """Let a `send` that is under way, and any later one, end with Abandoned."""
        self._abandoned.set()

    def close(self) -> None:
        self._producer.purge()
        self._producer.close()

    def _stored(self, chunk: WeightChunk) -> WeightChunk:
        if self._store is None:
            return chunk
        return replace(chunk, data=b"", blob=self._store.put(chunk.version, chunk.data))

    def _produce(self, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
        deadline = time.monotonic() + DELIVERY_S
        while True:
            try:
                self._producer.produce(self._topic, value=value, partition=0, on_delivery=on_delivery)
                self._producer.poll(0)
                return
            except BufferError as full:  # the queue is bounded: let the broker take some
                if time.monotonic() > deadline:
                    raise LogError(f"{self._topic}: the broker has taken no weights for {DELIVERY_S:g} s: is it up, "
                                   "and has it room?") from full  # fmt: skip
                if self._abandoned.is_set():
                    raise Abandoned from full
                self._producer.poll(0.1)

    def _flush(self) -> None:
        deadline, left = time.monotonic() + DELIVERY_S, len(self._producer)
        while left and time.monotonic() < deadline:
            if self._abandoned.is_set():
                raise Abandoned
            before, left = left, self._producer.flush(0.2)
            if left < before:
                deadline = time.monotonic() + DELIVERY_S
