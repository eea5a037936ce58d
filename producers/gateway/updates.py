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

from ..engines import Engine, Replica
from ..receiver import Receiver

OnUpdate = Literal["keep", "hold", "abort"]

LOOK_S = 0.05


class Updates:
    """`between_steps` runs on the engine's thread, the rest on the gateway's loop."""

    def __init__(self, policy: OnUpdate, receiver: Receiver | None = None,
                 clocks: Callable[..., None] = lambda clock: None) -> None:  # fmt: skip
        """Without a receiver the replicas' weights are somebody else's; `clocks` takes each publication's clock."""
        self._policy, self._receiver, self._clocks = policy, receiver, clocks
        self._lock = threading.Lock()
        self._pinned: dict[str, int] = {}  # version, by episode
        self._holding = False  # new requests wait
        self._sampled = -1
        self.version = 0
        self.abort: Callable[[], object] | None = None  # called on the engine's thread before weights change

    def between_steps(self, engine: Engine) -> None:
        receiver = self._receiver
        assert receiver is not None
        if self._sampled >= 0:
            receiver.sampled(self._sampled)
        ready = receiver.ready
        with self._lock:
            pinned = engine.version in self._pinned.values()
        if ready and pinned:
            return
        if ready and engine.active and self._policy != "keep":
            if not self._holding and self._policy == "abort" and self.abort is not None:
                self.abort()
            self._holding = True
            return
        for clock in receiver.apply_ready(engine):
            self._clocks(clock)
        self.version, self._holding = engine.version, False

    async def admitted(self, version: int) -> None:
        """Return once a request may run that needs at least this version."""
        while self._holding or self.version < version:
            await asyncio.sleep(LOOK_S)

    def sampled(self, version: int) -> None:
        self._sampled = version

    def pin(self, episode: str, version: int) -> None:
        """While the version is served and the episode is open, nothing is applied."""
        with self._lock:
            self._pinned[episode] = version

    def unpin(self, episode: str) -> None:
        with self._lock:
            self._pinned.pop(episode, None)

    async def follow(self, replica: Replica) -> None:
        """For ever, where the replicas' weights are somebody else's: learn which version all of them serve."""
        while self._receiver is None:
            self.version = (await replica.health()).version
            await asyncio.sleep(LOOK_S)
