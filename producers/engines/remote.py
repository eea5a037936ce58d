"""Decides how a worker drives replicas that compute elsewhere as if they were one engine of its own.

The worker's weights live here as bits; each replica is given every update, is fenced while it serves another version,
and is made anew from these bits where it was started again or took an update only in part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.schemas.errors import ReplicaLost

from ..replicas import Limits, Pool
from . import Changes, GenerationRequest, Progress, Replica, ReplicaHealth
from .driven import LoopEngine
from .served import ModelFolder, check_changes, read_only, refuse_nan, whole, write_changes

log = logging.getLogger("headrace.engines.remote")


class UpdatableReplica(Replica, Protocol):
    """A replica whose weights its owner writes."""

    async def apply(self, version: int, changes: Changes) -> None:
        """Overwrite served weights; requests that run go on, or raise RequestAborted. Raises ReplicaLost."""

    async def restore(self, version: int, whole: Changes) -> None:
        """Make all weights anew, whatever was there. Raises ReplicaLost."""


class RemoteEngine(LoopEngine):
    """`Engine` over a pool of replicas. `slots`: requests that all of them decode at once."""

    def __init__(self, replicas: Sequence[UpdatableReplica], folder: ModelFolder, *, slots: int, max_tokens: int,
                 facts: Mapping[str, str], limits: Limits | None = None) -> None:  # fmt: skip
        super().__init__(folder.vocabulary, max_tokens)
        self._folder, self._slots, self._version = folder, slots, 0
        self._facts = {"dtype": folder.dtype, **facts}
        self._replicas = {one.name: one for one in replicas}
        self._weights = asyncio.Lock()  # one writer of weights at a time, here and in the replicas
        self._at: dict[str, int] = {}  # replica -> the version that it is known to have whole
        try:
            self._pool: Pool = self._on_loop(self._start(limits))
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._folder.eos_ids

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def unrouted(self) -> bool:
        """Whether everything that it has to do waits for a replica that may serve."""
        return self._pool.waiting >= max(1, self.active)

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return read_only(self._folder.bits)

    def apply(self, version: int, changes: Changes) -> None:
        check_changes(version, self._version, self._folder.bits, changes)
        refuse_nan(version, changes, self._folder.dtype)
        self._check_alive()
        self._on_loop(self._update(version, changes))

    def fingerprint(self) -> dict[str, str]:
        return dict(self._facts)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._folder.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return self._folder.decode(ids)

    # ------------------------------------------------------------------------------------------------ on the loop

    async def _start(self, limits: Limits | None) -> Pool:
        pool = self._pool = Pool(list(self._replicas.values()), limits=limits, admit=self._admit)
        await pool.start()
        await pool.health()  # one of them must serve
        return pool

    async def _stop(self) -> None:
        if hasattr(self, "_pool"):
            await self._pool.close()

    def _generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        return self._pool.generate(request)

    async def _admit(self, replica: Replica, health: ReplicaHealth) -> None:
        """A replica serves only with the weights that are here."""
        at = self._at.get(replica.name)
        if at == self._version == health.version and health.serving:
            return
        async with self._weights:
            if self._at.get(replica.name) != self._version or health.version != self._version or not health.serving:
                log.info("replica %s is brought to version %d", replica.name, self._version)
                self._at.pop(replica.name, None)
                await self._replicas[replica.name].restore(self._version, whole(self._folder.bits))
                self._at[replica.name] = self._version

    async def _update(self, version: int, changes: Changes) -> None:
        async with self._weights:
            write_changes(self._folder.bits, changes)
            before, self._version = self._version, version
            current = [name for name, at in self._at.items() if at == before]
            self._at.clear()
            results = await asyncio.gather(*(self._replicas[name].apply(version, changes) for name in current),
                                           return_exceptions=True)  # fmt: skip
            for name, result in zip(current, results, strict=True):
                if isinstance(result, BaseException):
                    with contextlib.suppress(KeyError):
                        self._pool.fence(name, f"it didn't take version {version}: {result}")
                else:
                    self._at[name] = version
        if not self._at:
            raise ReplicaLost(f"no replica took version {version}")
