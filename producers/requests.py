"""How a producer without a worker's loop comes by groups: it asks, and whatever it is given is run or handed back.

A request outlives the caller's patience: the coordinator may answer it later. So a request that its caller gave up is
taken up by the next call that asks for the same; an answer that comes while nobody waits is handed back at once, and no
group is left to nobody.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Event, HandBack, Lease, LeaseEnded, LeaseRequest
from headrace.schemas.outcomes import REASON_HANDED_BACK, Purpose
from headrace.schemas.topics import TASKS, RunTopics
from headrace.streams.log.policy import Schemas
from headrace.streams.log.reader import Reader, end_offsets

ANSWER_WAIT_S = 0.1

# Task (any: None), size, purpose, version, attempts.
What = tuple[str | None, int | None, Purpose, int | None, int]


class Requests:
    """Any thread may call; one at a time reads."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, worker: str, incarnation: str, *,
                 ask: Callable[[Event], None], later: Callable[[Event], None],
                 ended: Callable[[LeaseEnded], None]) -> None:  # fmt: skip
        """`ask` writes to `fleet` now or raises, `later` as soon as it can; `ended` is told of leases taken back. Make
        it before the first heartbeat: an older lease can't name the incarnation, and a newer one is not missed."""
        name = topics.name(TASKS)
        self._reader = Reader(kafka, {(name, 0): end_offsets(kafka, name)[0]})
        self._schemas = Schemas(kafka, topics)
        self._worker, self._incarnation = worker, incarnation
        self._ask, self._later, self._ended = ask, later, ended
        self._reading = threading.Lock()
        self._state = threading.Lock()
        self._waiting: set[str] = set()
        self._given_up: dict[What, str] = {}
        self._answers: dict[str, Lease] = {}

    def group(self, what: What, wait_s: float) -> Lease | None:
        """The lease of a group, or None where the coordinator gave none in time. Raises Backpressure."""
        task, size, purpose, version, attempts = what
        with self._state:
            request = self._given_up.pop(what, None) or uuid.uuid4().hex
            self._waiting.add(request)
        lease = None
        try:
            end = time.monotonic() + wait_s
            # Asked again although it may have been before: it is answered once, however often it stands there.
            self._ask(LeaseRequest(request, self._worker, self._incarnation, task, size, purpose, version,
                                   attempts))  # fmt: skip
            while lease is None and time.monotonic() < end:
                self.serve(ANSWER_WAIT_S)
                with self._state:
                    lease = self._answers.pop(request, None)
            return lease
        finally:
            with self._state:
                self._waiting.discard(request)
                unread = self._answers.pop(request, None)
                if lease is None and unread is None:
                    self._given_up[what] = request
            if unread is not None:
                self._hand_back(unread)

    def serve(self, wait_s: float = 0.0) -> None:
        """Read `tasks`, and act on what concerns this incarnation."""
        with self._reading:
            records = self._reader.poll(200, wait_s)
        for record in records:
            try:
                event = self._schemas.decode(record.value)
            except UndecodableRecord:
                continue  # whoever proves the log names it; it asks nothing of us
            if isinstance(event, Lease) and event.incarnation == self._incarnation:
                self._answered(event)
            elif isinstance(event, LeaseEnded) and event.incarnation == self._incarnation:
                self._ended(event)

    def _answered(self, lease: Lease) -> None:
        with self._state:
            wanted = lease.request in self._waiting
            if wanted:
                self._answers[str(lease.request)] = lease
            self._given_up = {what: one for what, one in self._given_up.items() if one != lease.request}
        if not wanted:
            self._hand_back(lease)

    def _hand_back(self, lease: Lease) -> None:
        self._later(hand_back(lease, tuple(one.slot for one in lease.assignments)))

    def close(self) -> None:
        with self._reading:
            self._reader.close()


def hand_back(lease: Lease, slots: tuple[int, ...], reason: str = REASON_HANDED_BACK) -> HandBack:
    """The record by which a worker gives leased slots back unused."""
    return HandBack(lease.worker, lease.incarnation, lease.group, lease.number, slots, reason)
