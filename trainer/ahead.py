"""Decides what the trainer reads ahead: the one batch that comes after the one in training, no more.

A thread waits for its manifest, reads the groups, proves and lays them out while the trainer computes, so that memory
holds two batches at most and a step that outlasts every time-out of Kafka's loses nothing: nobody's membership depends
on how often it is asked. What fails in the thread is raised when that batch is asked for, after the one before it has
been trained.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from .fetch import Batch
from .inbox import Inbox

CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch, and what it held the trainer up for: until its manifest was there, and until it was read."""

    batch: Batch
    waiting_s: float
    fetching_s: float


class Ahead:
    """All calls from one thread. From the first `take` on, `inbox` belongs to the thread behind."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._due = 0
        self._coming: Future[tuple[Batch, float] | None] | None = None

    def take(self, due: int, stop: threading.Event, check: Callable[[], object]) -> Taken | None:
        """The batch that makes version `due`; None once `stop` is set. `check` is asked on the way whether there can be
        one: what it raises ends the wait. Raises what `Inbox.fetch` raises."""
        asked = time.monotonic()
        if self._coming is None or self._due != due:
            assert self._coming is None, "batches are taken in turn"
            self._begin(due)
        assert self._coming is not None
        while not stop.is_set():
            check()
            if not wait([self._coming], CHECK_S).done:
                continue
            coming, self._coming = self._coming, None
            found = coming.result()
            if found is None:
                return None
            batch, there = found
            now = time.monotonic()
            there = min(max(there, asked), now)
            self._begin(due + 1)
            return Taken(batch, there - asked, now - there)
        return None

    def _begin(self, due: int) -> None:
        self._due, self._coming = due, self._thread.submit(self._read, due)

    def _read(self, due: int) -> tuple[Batch, float] | None:
        record = self._inbox.next(self._closed)
        if record is None:
            return None
        there = time.monotonic()
        return self._inbox.fetch(record, due), there

    def close(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._inbox.close()
