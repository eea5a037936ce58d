"""Decides how tokens that come from a loop are handed out step by step: the asynchronous half of an `Engine`.

A thread of its own runs the loop; each request is a task there that reads its tokens. Whoever drives the engine never
waits for more than `STEP_S`, and never for the work of a request.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EngineError, ReplicaLost

from ..loops import new_loop
from . import GenerationRequest, Progress, check_request
from .served import ModelFolder, read_only

log = logging.getLogger("headrace.engines.driven")

T = TypeVar("T")

STEP_S = 0.02  # how long a step waits for tokens before its caller may do something else


class ActiveRequest:
    """One request on its way: the task that reads its tokens, and whether any have come."""

    __slots__ = ("request", "task", "begun", "cancelled")

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.begun = self.cancelled = False


class LoopEngine(abc.ABC):
    """What of an `Engine` is the same wherever its requests run on a loop: all but how tokens and updates come about.
    `slots`: requests that decode at once."""

    def __init__(self, folder: ModelFolder, slots: int, max_tokens: int):
        self._folder, self._slots, self._max_tokens = folder, slots, max_tokens
        self._version = 0
        self._active: dict[str, ActiveRequest] = {}
        self._arrived = threading.Condition()
        self._out: list[tuple[ActiveRequest, Progress]] = []
        self._failure: Exception | None = None
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        """The request's tokens; runs on the loop. EngineError and ReplicaLost are the request's own end; what else it
        raises ends the engine."""

    @abc.abstractmethod
    async def _stop(self) -> None:
        """Free what was opened on the loop, after every request's task has ended."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._folder.eos_ids

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return read_only(self._folder.bits)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._folder.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return self._folder.decode(ids)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop what its caller, who isn't on it, waits for."""
        waiting: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return waiting.result()

    def submit(self, request: GenerationRequest) -> None:
        if request.request_id in self._active:
            raise EngineError(f"request {request.request_id!r} is already active: use another id")
        request = self._possible(request)
        self._check_alive()
        active = self._active[request.request_id] = ActiveRequest(request)
        self._loop.call_soon_threadsafe(self._begin, active)

    def _possible(self, request: GenerationRequest) -> GenerationRequest:
        """As it can run. Raises EngineError where it never can."""
        check_request(request, self._folder.vocabulary, self._max_tokens)
        # A token that the model doesn't have can't be sampled, and vLLM refuses to look out for it.
        possible = frozenset(i for i in request.stop_ids if 0 <= i < self._folder.vocabulary)
        return request if possible == request.stop_ids else replace(request, stop_ids=possible)

    def cancel(self, request_id: str) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            active.cancelled = True
            self._loop.call_soon_threadsafe(lambda: active.task and active.task.cancel())

    def step(self) -> list[Progress]:
        with self._arrived:
            if self._active and not self._out and self._failure is None:
                self._arrived.wait(STEP_S)
            out, self._out = self._out, []
        self._check_alive()
        progress = [one for active, one in out if not active.cancelled]
        for one in progress:
            if one.finished is not None:
                del self._active[one.request_id]
        return progress

    def close(self) -> None:
        async def stop() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop()

        if not self._loop.is_closed():
            self.run(stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise ReplicaLost(f"the engine has failed: {self._failure}") from self._failure

    # ------------------------------------------------------------------------------------------------ on the loop

    def _begin(self, active: ActiveRequest) -> None:
        if not active.cancelled and active.task is None:
            active.task = self._loop.create_task(self._read(active))

    async def _begin_again(self, active: ActiveRequest) -> None:
        """Restart a request of which no token has come."""
        if active.task is not None:
            active.task.cancel()
            await asyncio.wait([active.task])
            active.task = None
        self._begin(active)

    async def _read(self, active: ActiveRequest) -> None:
        version = self.version
        try:
            async for one in self._generate(active.request):
                active.begun, version = True, one.version
                self._tell(active, one)
        except (EngineError, ReplicaLost) as error:
            log.warning("request %s is given up: %s", active.request.request_id, error)
            self._tell(active, Progress(active.request.request_id, np.empty(0, np.int32), np.empty(0, np.float32),
                                        version, "lost"))  # fmt: skip
        except Exception as error:
            self._fail(error)

    def _tell(self, active: ActiveRequest, one: Progress) -> None:
        with self._arrived:
            self._out.append((active, one))
            self._arrived.notify()

    def _fail(self, error: Exception) -> None:
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify()
