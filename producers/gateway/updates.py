"""Decides when new weights are applied below open requests, and which requests wait meanwhile.

`keep`: between two steps; requests go on, and each token says which version sampled it. `hold`: new requests wait and
those that run come to their end first. `abort`: those that run are aborted and their agents ask again. Whatever the
policy, a request waits until its lease's version is served, and what an evaluation is pinned to stays served.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

from headrace.schemas.events import PublicationClock

from ..engines import Engine
from ..receiver import Receiver

OnUpdate = Literal["keep", "hold", "abort"]

LOOK_S = 0.05


class Updates:
    """`between_steps` runs on the thread that changes weights, the rest on the gateway's loop. Which requests run is
    counted here, between `admitted` and `ended`, so that none begins while weights change that mustn't below it."""

    def __init__(self, policy: OnUpdate, receiver: Receiver, clocks: Callable[[PublicationClock], None]) -> None:
        """`clocks` takes each publication's clock."""
        self._policy, self._receiver, self._clocks = policy, receiver, clocks
        self._lock = threading.Lock()
        self._pinned: dict[str, int] = {}  # version, by episode
        self._holding = False  # new requests wait
        self._running = 0
        self._sampled = -1
        self.version = 0
        self.abort: Callable[[], object] | None = None  # called on the engine's thread before weights change

    def between_steps(self, engine: Engine) -> None:
        receiver = self._receiver
        if self._sampled >= 0:
            receiver.sampled(self._sampled)
        ready = receiver.ready
        if ready:
            with self._lock:
                if engine.version in self._pinned.values():
                    return
                begins, self._holding = not self._holding, self._policy != "keep"
                wait = self._holding and self._running > 0
            if wait:
                if begins and self._policy == "abort" and self.abort is not None:
                    self.abort()
                return
        for clock in receiver.apply_ready(engine):
            self._clocks(clock)
        self.version, self._holding = engine.version, False

    async def admitted(self, version: int) -> None:
        """Return once a request may run that needs at least this version; say `ended` afterwards."""
        while True:
            with self._lock:
                if not self._holding and self.version >= version:
                    self._running += 1
                    return
            await asyncio.sleep(LOOK_S)

    def ended(self, version: int | None) -> None:
        """A request has ended, and this version sampled its last token, where it has any."""
        with self._lock:
            self._running -= 1
        if version is not None:
            self._sampled = version

    def pin(self, episode: str, version: int) -> None:
        """While the version is served and the episode is open, nothing is applied."""
        with self._lock:
            self._pinned[episode] = version

    def unpin(self, episode: str) -> None:
        with self._lock:
            self._pinned.pop(episode, None)
