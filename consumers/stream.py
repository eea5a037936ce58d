"""One way to go through what comes from a run: `for` in a thread, `async for` on an event loop.

A stream is a recipe: each iteration reads anew, with a Kafka client of its own that is closed when the iteration ends,
however it ends. The asynchronous form reads in a thread of its own, so the loop never waits for the broker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

Stopped = Callable[[], bool]
Open = Callable[[Stopped], Generator[list[T], None, None]]


class Stream(Generic[T]):
    """Made by `Run`. `open_` yields what has come, in lists; while it follows the log, an empty one each 0.2 s."""

    def __init__(self, open_: Open[T], stop: threading.Event | None = None) -> None:
        self._open = open_
        self._stop = stop or threading.Event()

    def __iter__(self) -> Iterator[T]:
        """Ends at the end of the log, or when `stop` is set where the log is followed."""
        batches = self._open(self._stop.is_set)
        try:
            for batch in batches:
                yield from batch
        finally:
            batches.close()

    async def __aiter__(self) -> AsyncIterator[T]:
        """As `__iter__`. A task that is cancelled leaves within 0.2 s, and so does the thread that reads for it."""
        left = threading.Event()
        batches = self._open(lambda: left.is_set() or self._stop.is_set())
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "headrace-stream")  # one: a Kafka client is not for several threads
        try:
            while (batch := await loop.run_in_executor(thread, lambda: next(batches, None))) is not None:
                for one in batch:
                    yield one
        finally:
            left.set()
            thread.submit(batches.close)
            thread.shutdown(wait=False)
