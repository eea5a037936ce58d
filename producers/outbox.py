"""The bounded way out: events leave in order, exactly once, or the caller is told.

An idempotent producer with an endless delivery time-out and a bounded queue. A full queue is `Backpressure`: nothing
was taken, try again. A delivery that fails for good is kept for whoever owns the attempt (`failures`).
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from headrace.schemas.codec import encode
from headrace.schemas.errors import Backpressure, ProducerClosed
from headrace.schemas.events import Event
from headrace.streams.log import clients

MAX_QUEUE_BYTES = 64 << 20


class Outbox:
    """One per process. Not for use from several threads at once."""

    def __init__(self, kafka: Mapping[str, Any], max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self._producer = clients.producer(kafka, **{"queue.buffering.max.kbytes": max(1, max_bytes >> 10)})
        self._broken: KafkaError | None = None
        self._closed = False
        self._unsent = 0  # the client's own count includes what it has to say to its logger
        self.failures: list[tuple[str, str]] = []  # (key, reason) of events that will never be delivered
        atexit.register(self._left_open)

    def put(self, topic: str, key: str | None, event: Event, wait_s: float = 0.0) -> None:
        """Queue an event. Raises Backpressure where the queue stays full for `wait_s`, ProducerClosed afterwards."""
        if self._closed or self._broken is not None:
            raise ProducerClosed(f"the outbox is closed{f' ({self._broken.str()})' if self._broken else ''}; "
                                 "open a new producer")  # fmt: skip
        value = encode(event)
        end = time.monotonic() + wait_s
        while True:
            try:
                self._producer.produce(topic, value=value, key=None if key is None else key.encode(),
                                       on_delivery=self._delivered)  # fmt: skip
                self._unsent += 1
                return
            except BufferError as error:
                if time.monotonic() >= end:
                    raise Backpressure(
                        f"{self._unsent} events wait for the broker and the queue is full: try again later; "
                        "nothing was lost"
                    ) from error
                self._producer.poll(0.05)
            except KafkaException as error:
                self._broken = error.args[0]
                raise ProducerClosed(f"the producer failed: {error.args[0].str()}; open a new one") from error

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._unsent -= 1
        if error is not None:
            key = message.key()
            self.failures.append((key.decode() if isinstance(key, bytes) else "", error.str()))
            if error.fatal():
                self._broken = error

    def poll(self) -> None:
        """Serve delivery reports. Call it now and then; `put` only does so when the queue is full."""
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> int:
        """Wait for deliveries; returns how many events are still unsent."""
        self._producer.flush(timeout_s)
        return self._unsent

    def close(self, timeout_s: float = 30.0) -> int:
        """Drain; returns how many events could not be sent within the deadline."""
        self._closed = True
        atexit.unregister(self._left_open)
        return self.flush(timeout_s)

    def _left_open(self) -> None:
        if self._unsent:
            print(f"headrace: this process ends with {self._unsent} events unsent; close() the producer first",
                  file=sys.stderr)  # fmt: skip
