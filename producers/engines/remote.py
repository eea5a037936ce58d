"""Decides how a worker drives replicas that compute elsewhere as if they were one engine of its own.

The worker's weights live here as bits; each replica is given every update, is fenced while it serves another version,
and is made anew from these bits, and probed, where it was started again or took an update only in part.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from headrace.schemas.errors import ReplicaLost

from ..replicas import Limits, Pool
from . import Changes, Engine, GenerationRequest, Progress, Replica, ReplicaHealth
from .driven import LoopEngine
from .probe import TEXTS, probe_replica
from .served import ModelFolder, check_changes, refuse_nan, whole, write_changes

log = logging.getLogger("headrace.engines.remote")

UPDATE_S = 60.0  # for a replica to take an update
LAGGARD_S = 5.0  # more, once another has it
LOOK_S = 0.05  # between two calls of `between_steps`: how late new weights may be noticed


class UpdatableReplica(Replica, Protocol):
    """A replica whose weights its owner writes. `max_tokens`: prompt and completion of a request at most, where it
    tells."""

    max_tokens: int | None

    async def apply(self, version: int, changes: Changes) -> None:
        """Overwrite served weights; requests that run go on, or raise RequestAborted. Raises ReplicaLost."""

    async def restore(self, version: int, whole: Changes) -> None:
        """Make all weights anew, whatever was there. Raises ReplicaLost."""


class RemoteEngine(LoopEngine):
    """`Engine` over a pool of replicas. `slots`: requests that all of them decode at once."""

    def __init__(self, replicas: Sequence[UpdatableReplica], folder: ModelFolder, *, slots: int, max_tokens: int,
                 facts: Mapping[str, str], limits: Limits | None = None) -> None:  # fmt: skip
        super().__init__(folder, slots, max_tokens)
        self._facts = {"dtype": folder.dtype, **facts}
        self._replicas = {one.name: one for one in replicas}
        self._probes = [folder.encode_chat([{"role": "user", "content": text}]) for text in TEXTS]
        self._weights = asyncio.Lock()  # one writer of weights at a time, here and in the replicas
        self._at: dict[str, int] = {}  # replica -> the version that it is known to have whole
        # Replicas whose weights are being made anew -> what was updated since that began.
        self._missed: dict[str, list[tuple[int, Changes]]] = {}
        try:
            self._pool: Pool = self.run(self._start(limits))
        except BaseException:
            self.close()
            raise

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def unrouted(self) -> bool:
        """Whether everything that it has to do waits for a replica that may serve."""
        return self._pool.waiting >= max(1, self.active)

    def apply(self, version: int, changes: Changes) -> None:
        check_changes(version, self._version, self._folder.bits, changes)
        refuse_nan(version, changes, self._folder.dtype)
        self._check_alive()
        self.run(self._update(version, changes))

    def fingerprint(self) -> dict[str, str]:
        return dict(self._facts)

    # ------------------------------------------------------------------------------------------------ on the loop

    def stream(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        """The request's tokens for who runs on the loop; no step reports them. Raises EngineError where it can never
        run."""
        return self._generate(self._possible(request))

    async def _start(self, limits: Limits | None) -> Pool:
        pool = self._pool = Pool(list(self._replicas.values()), limits=limits, admit=self._admit)
        await pool.start()
        await pool.health()  # one of them must serve
        self._max_tokens = min([self._max_tokens, *(one.max_tokens for one in self._replicas.values()
                                                    if one.max_tokens is not None)])  # fmt: skip
        return pool

    async def _stop(self) -> None:
        if hasattr(self, "_pool"):
            await self._pool.close()

    def _generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        return self._pool.generate(request)

    async def _admit(self, replica: Replica, health: ReplicaHealth) -> ReplicaHealth:
        """A replica serves only with the weights that are here. Making them anew takes long where there are many: what
        is updated meanwhile goes there too, and nobody waits for it."""
        name = replica.name
        if self._at.get(name) == self._version == health.version and health.serving:
            return health
        log.info("replica %s is brought to version %d", name, self._version)
        self._at.pop(name, None)
        missed = self._missed[name] = []
        try:
            await self._replicas[name].restore(self._version, whole(self._folder.bits))
            await probe_replica(replica, self._probes)
            async with self._weights:
                for version, changes in missed:
                    async with asyncio.timeout(LAGGARD_S):
                        await self._replicas[name].apply(version, changes)
                self._at[name] = self._version
        finally:
            del self._missed[name]
        return await replica.health()

    async def _update(self, version: int, changes: Changes) -> None:
        async with self._weights:
            write_changes(self._folder.bits, changes)
            before, self._version = self._version, version
            for missed in self._missed.values():
                missed.append((version, changes))
            current = [name for name, at in self._at.items() if at == before]
            self._at.clear()
            for name, failed in (await self._offer(version, changes, current)).items():
                if failed is None:
                    self._at[name] = version
                else:
                    self._pool.fence(name, f"it didn't take version {version}: {failed}")
        if not self._at:
            raise ReplicaLost(f"no replica took version {version}")

    async def _offer(self, version: int, changes: Changes, names: Sequence[str]) -> dict[str, str | None]:
        """Replica -> why it didn't take the update. Once one has it, the others have `LAGGARD_S`, since the worker
        waits."""
        tasks = {asyncio.create_task(self._replicas[name].apply(version, changes)): name for name in names}
        waiting, limit = set(tasks), UPDATE_S
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if any(task.exception() is None for task in done):
                limit = LAGGARD_S
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        answers: dict[str, str | None] = {}
        for task, name in tasks.items():
            error = TimeoutError("it took too long") if task in waiting else task.exception()
            answers[name] = None if error is None else str(error)
        return answers


class RemoteReplica:
    """Offers `Replica` over a `RemoteEngine`, on the engine's own loop: what calls it runs there (`RemoteEngine.run`).
    No token changes threads on its way from the server to the caller, which would cost more than all that is done to
    it. `close` leaves the engine open.

    `between_steps` is called every 50 ms on a thread of its own, where a weight receiver's `apply_ready` may wait for
    the servers. What it raises ends the replica.
    """

    def __init__(self, engine: RemoteEngine, *, name: str = "remote",
                 between_steps: Callable[[Engine], object]) -> None:  # fmt: skip
        self.name = name
        self._engine, self._between = engine, between_steps
        self._lost: str | None = None  # why nothing runs here any more
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"weights of {name}", daemon=True)
        self._thread.start()

    def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        """Raises at once what a request can be refused for."""
        self._check_alive()
        return self._engine.stream(request)

    async def health(self) -> ReplicaHealth:
        """Where no server serves now, requests wait: the replica isn't lost by that."""
        self._check_alive()
        pool, serving = self._engine.pool, not self._closing.is_set()
        try:
            return replace(await pool.health(), serving=serving)
        except ReplicaLost:
            return ReplicaHealth(self._engine.version, serving, 0, pool.waiting, self._engine.capacity)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.to_thread(self._thread.join)
        self._lost = self._lost or f"replica {self.name} is gone: it was closed"

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise ReplicaLost(self._lost)

    def _look(self) -> None:
        try:
            while not self._closing.wait(LOOK_S):
                self._between(self._engine)
        except Exception as error:  # whatever it was, nobody knows what is served now
            log.exception("replica %s is lost", self.name)
            self._lost = f"replica {self.name} is gone: its engine failed: {type(error).__name__}: {error}"
