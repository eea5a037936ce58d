"""Decides how one synchronous engine serves many asynchronous callers: a thread of its own drives it.

The thread sleeps while there is nothing to do and wakes at once when something is posted; whatever touches the engine
(requests, cancellations, weights) is posted and happens between two steps, in order.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import numpy as np

from headrace.schemas.errors import EngineError, ReplicaLost

from . import Changes, Engine, GenerationRequest, Progress, ReplicaHealth

log = logging.getLogger("headrace.engines.local")

T = TypeVar("T")
Items = asyncio.Queue[Progress | Exception]  # what one request's iterator hands out, the exception last

IDLE_S = 0.05  # between two calls of `between_steps` while nothing decodes: how late new weights may be noticed


class LocalReplica:
    """Offers `Replica` over any `Engine`. It owns the engine: nobody else may call it until `close`, which closes it.

    `between_steps`, where given, is called on the engine's thread between any two steps and every 50 ms while nothing
    decodes; a weight receiver's `apply_ready` belongs there. What it raises ends the replica.
    """

    def __init__(self, engine: Engine, *, name: str = "local",
                 between_steps: Callable[[Engine], object] | None = None) -> None:  # fmt: skip
        self.name = name
        self._engine, self._between = engine, between_steps
        self._capacity = engine.capacity
        self._loop: asyncio.AbstractEventLoop | None = None
        # What to do, and what to do instead where the engine is gone.
        self._posted: collections.deque[tuple[Callable[[], None], Callable[[Exception], object]]] = collections.deque()
        self._wake = threading.Condition()
        self._streams: dict[str, Items] = {}  # touched by the engine's thread alone
        self._closing = False
        self._lost: str | None = None  # why nothing runs here any more
        self._thread = threading.Thread(target=self._drive, name=f"engine {name}", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        self._loop = asyncio.get_running_loop()
        items: Items = asyncio.Queue()
        over = False
        self._post(lambda: self._submit(request, items), lambda error: self._deliver([(items, error)]))
        try:
            while not over:
                item = await items.get()
                over = isinstance(item, Exception) or item.finished is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not over:
                self._post(lambda: self._cancel(request.request_id, items), lambda error: None)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps and return what it returns. Raises what it raises."""
        loop = self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(outcome: T | Exception) -> None:
            if answer.done():
                return  # its caller was cancelled
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        def run() -> None:
            try:
                outcome: T | Exception = function(self._engine)
            except Exception as error:
                outcome = error
            loop.call_soon_threadsafe(settle, outcome)

        self._post(run, lambda error: loop.call_soon_threadsafe(settle, error))
        return await answer

    async def apply(self, version: int, changes: Changes) -> None:
        """Between two steps. Raises WeightsRefused."""
        await self.call(lambda engine: engine.apply(version, changes))

    async def restore(self, version: int, whole: Changes) -> None:
        """Make all weights anew, where they aren't `whole` already."""

        def work(engine: Engine) -> None:
            served = engine.served_arrays()
            same = all(np.array_equal(served[name].reshape(-1), bits.reshape(-1)) for name, (_, bits) in whole.items())
            if engine.version != version or not same:
                engine.apply(version, whole)

        await self.call(work)

    async def health(self) -> ReplicaHealth:
        if self._lost is not None:
            raise ReplicaLost(self._lost)
        active = self._engine.active
        running = min(active, self._capacity)
        return ReplicaHealth(self._engine.version, not self._closing, running, active - running, self._capacity)

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # -------------------------------------------------------------------------------------------- engine's thread

    def _post(self, what: Callable[[], None], instead: Callable[[Exception], object]) -> None:
        with self._wake:
            if self._lost is None:
                self._posted.append((what, instead))
                self._wake.notify()
                return
        instead(ReplicaLost(self._lost))

    def _submit(self, request: GenerationRequest, items: Items) -> None:
        try:
            self._engine.submit(request)
        except EngineError as error:
            self._deliver([(items, error)])
        except Exception as error:
            self._deliver([(items, ReplicaLost(f"replica {self.name} failed: {error}"))])
            raise
        else:
            self._streams[request.request_id] = items

    def _cancel(self, request_id: str, items: Items) -> None:
        if self._streams.get(request_id) is items:
            del self._streams[request_id]
            self._engine.cancel(request_id)

    def _deliver(self, items: list[tuple[Items, Progress | Exception]]) -> None:
        def put() -> None:
            for queue, item in items:
                queue.put_nowait(item)

        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)  # once for all of a step

    def _drive(self) -> None:
        why = "it was closed"
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # whatever it was, the engine's state is unknown now
            log.exception("replica %s is lost", self.name)
            why = f"its engine failed: {type(error).__name__}: {error}"
        with self._wake:
            self._lost = f"replica {self.name} is gone: {why}"
        lost = ReplicaLost(self._lost)
        for _, instead in self._posted:  # nothing is posted any more
            instead(lost)
        self._deliver([(items, lost) for items in self._streams.values()])
        self._engine.close()

    def _turn(self) -> None:
        with self._wake:
            if not (self._posted or self._closing or self._engine.active):
                self._wake.wait(None if self._between is None else IDLE_S)
        while self._posted:
            self._posted.popleft()[0]()
        if self._between is not None:
            self._between(self._engine)
        progress = self._engine.step()
        streams = self._streams
        self._deliver([(streams[one.request_id], one) for one in progress if one.request_id in streams])
        for one in progress:
            if one.finished is not None:
                streams.pop(one.request_id, None)
