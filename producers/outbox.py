"""The bounded way out: events leave in order, exactly once, or the caller is told.

An idempotent producer with an endless delivery time-out, behind a queue that is bounded in bytes. A full queue is
`Backpressure`: nothing was taken, try again. An event that the broker refuses for good is a `Failure`, which whoever
owns the attempt must take and act upon. Whatever has not been sent is known by episode, until the process ends.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from headrace.schemas.codec import encode
from headrace.schemas.errors import Backpressure, ProducerClosed, RecordTooLarge
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Lease, Span
from headrace.schemas.topics import RECORD_BYTES
from headrace.streams.log import clients

from .episodes import Attempt

MAX_QUEUE_BYTES = 64 << 20
EVENT_BYTES = 1024  # what an event costs in memory beside its value: the client's and our bookkeeping
NAMED = 8  # episodes that a message names

_EPISODE = (Span, EpisodeStarted, EpisodeEnded)
# Whose an event is: the fields of its Attempt (a tuple costs less than making one for each event), or what it is.
_Owner = tuple[str, int, int, str] | str


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that will never be on the log. `attempt` and `sequence` are None and -1 where it belongs to none."""

    key: str | None
    kind: str
    attempt: Attempt | None
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unsent:
    """Events that are not on the log (yet), by episode; by kind where they belong to none."""

    by_episode: Mapping[str, int]

    @property
    def events(self) -> int:
        return sum(self.by_episode.values())

    def __str__(self) -> str:
        first = ", ".join(f"{name} ({count})" for name, count in list(self.by_episode.items())[:NAMED])
        more = len(self.by_episode) - NAMED
        return f"{self.events} events unsent" + (f": {first}" if first else "") + (f" and {more} more" * (more > 0))


class Outbox:
    """One per process. Not for use from several threads at once."""

    def __init__(self, kafka: Mapping[str, Any], max_bytes: int = MAX_QUEUE_BYTES) -> None:
        # Our own bound comes first: it counts what small events cost, and says whose they are.
        self._producer = clients.producer(kafka, **{
            "queue.buffering.max.kbytes": max(1, (max_bytes >> 10) + (2 * RECORD_BYTES >> 10)),
            "queue.buffering.max.messages": max(1, max_bytes // EVENT_BYTES) + 1,
        })  # fmt: skip
        self._max_bytes = max_bytes
        self._bytes = 0
        self._unsent: Counter[_Owner] = Counter()
        self._failures: list[Failure] = []
        self._broken: KafkaError | None = None
        self._closed = False
        atexit.register(self._left_open)

    @property
    def unsent(self) -> Unsent:
        return Unsent({_said(owner): count for owner, count in self._unsent.items()})

    def put(self, topic: str, key: str | None, event: Event, wait_s: float = 0.0) -> None:
        """Queue an event. Raises Backpressure where the queue stays full for `wait_s`, RecordTooLarge where no record
        holds it, ProducerClosed after `close` or a fatal error. Nothing was taken then."""
        if self._closed:
            raise ProducerClosed("the producer is closed: open a new one")
        value = encode(event)
        if len(value) > RECORD_BYTES:
            raise RecordTooLarge(f"{_said(_owner(event))}: {type(event).__name__} of {len(value)} bytes, and a record "
                                 f"holds {RECORD_BYTES}; nothing of it was written")  # fmt: skip
        size = len(value) + EVENT_BYTES
        end = time.monotonic() + wait_s
        while True:
            self._producer.poll(0)
            if self._broken is not None:
                raise ProducerClosed(f"the producer failed ({self._broken.str()}): open a new one")
            # One event alone is always let in, or it could never leave.
            if (self._bytes + size <= self._max_bytes or not self._bytes) and self._produce(topic, key, event, value):
                return
            if time.monotonic() >= end:
                raise Backpressure(f"{self.unsent.events} events ({self._bytes >> 10} kB) wait for the broker and the "
                                   "queue is full: make the same call again later; nothing was lost")  # fmt: skip
            self._producer.poll(0.05)

    def _produce(self, topic: str, key: str | None, event: Event, value: bytes) -> bool:
        owner, size = _owner(event), len(value) + EVENT_BYTES
        sequence = event.sequence if isinstance(event, _EPISODE) else -1
        kind = type(event).__name__  # and not the event itself: it would be held until it is delivered

        def delivered(error: KafkaError | None, message: Message) -> None:
            self._bytes -= size
            self._unsent[owner] -= 1
            if not self._unsent[owner]:
                del self._unsent[owner]
            if error is not None:
                attempt = None if isinstance(owner, str) else Attempt(*owner)
                self._failures.append(Failure(key, kind, attempt, sequence, f"{error.str()} [{error.name()}]"))
                if error.fatal():
                    self._broken = error

        try:
            self._producer.produce(topic, value=value, key=None if key is None else key.encode(), on_delivery=delivered)
        except BufferError:
            return False
        except KafkaException as error:
            self._broken = error.args[0]
            raise ProducerClosed(f"the producer failed ({clients.reason(error)}): open a new one") from error
        self._bytes += size
        self._unsent[owner] += 1
        return True

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve delivery reports."""
        self._producer.poll(timeout_s)

    def take_failures(self) -> list[Failure]:
        """Events that will never be delivered, each once; the first of an attempt is the one with the lowest number."""
        taken, self._failures = self._failures, []
        return sorted(taken, key=lambda failure: failure.sequence)

    def flush(self, timeout_s: float) -> Unsent:
        """Wait for deliveries; what is still unsent."""
        self._producer.flush(timeout_s)
        return self.unsent

    def close(self, timeout_s: float = 30.0) -> Unsent:
        """Drain; what could not be sent within the deadline."""
        self._closed = True
        atexit.unregister(self._left_open)
        return self.flush(timeout_s)

    def _left_open(self) -> None:
        self._producer.poll(0)
        print(f"headrace: this process ends without closing its producer, with {self.unsent}; call close() first",
              file=sys.stderr)  # fmt: skip


def _owner(event: Event) -> _Owner:
    if isinstance(event, _EPISODE):
        return event.group, event.slot, event.attempt, event.incarnation
    return f"{event.group} opening" if isinstance(event, Lease) else type(event).__name__


def _said(owner: _Owner) -> str:
    return owner if isinstance(owner, str) else str(Attempt(*owner))
