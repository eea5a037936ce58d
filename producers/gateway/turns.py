"""Decides how a turn comes about, and who saw it.

A request and its retries share one turn and are told the same. A turn is seen once its answer was handed whole to a
connection that stood, or once a later request carries the answer. One that nobody waits for any more goes on for a
while, since a client that timed out asks again; then it is aborted. What nobody saw is orphaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, cast

from headrace.schemas.errors import EngineError, ReplicaLost

from ..conversation import Prompt
from ..engines import GenerationRequest, Progress, Replica
from ..toolcalls import Answer
from .protocol import Asked, Refused, Told
from .reading import Reading

log = logging.getLogger("headrace.gateway")


class Turn:
    """What was sampled for one request. `runs`: [version, count] of consecutive tokens."""

    def __init__(self, name: str, asked: Asked, prompt: Prompt, request: GenerationRequest,
                 stream: Callable[[int], str], settle: Callable[[Turn], None]) -> None:  # fmt: skip
        """`settle` is called once, when the turn is over, before those who wait for it know."""
        self.name, self.asked, self.prompt, self.request = name, asked, prompt, request
        self._stream, self._settle = stream, settle
        self.reading = Reading(asked.stop, asked.tools)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.runs: list[list[int]] = []
        self.finish: str | None = None
        self.error: Refused | None = None
        self.number: int | None = None  # in the conversation, once it is complete
        self.seen = False
        self.watchers = 0
        self.left_at = 0.0  # when the last of them left
        self.task: asyncio.Task[None] | None = None
        self.cached_tokens: int | None = None
        self.created = int(time.time())
        self.began = time.monotonic()
        self.submitted = self.first = self.ended = 0.0  # monotonic too
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None

    def add(self, one: Progress, ends: Collection[int]) -> bool:
        """What a step sampled; whether the turn is over, so that the rest needn't be sampled."""
        if one.finished == "lost":
            self.fail(Refused(503, "the engine gave the request up: ask again", code="replica_lost", retry_after_s=1.0))
            return True
        self.first = self.first or time.monotonic()
        if one.cached_tokens is not None:
            self.cached_tokens = one.cached_tokens
        stopped = False
        for token, logprob in zip(one.token_ids.tolist(), one.logprobs.tolist(), strict=True):
            text = "" if token in ends else self._stream(token)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.texts.append(text)
            if self.runs and self.runs[-1][0] == one.version:
                self.runs[-1][1] += 1
            else:
                self.runs.append([one.version, 1])
            if stopped := self.reading.add(text):
                break
        if stopped or one.finished is not None:
            self._over(finish="stop" if stopped else one.finished)
        self.tell()
        return self.over

    def fail(self, error: Refused) -> None:
        if not self.over:
            self._over(error=error)
            self.tell()

    def _over(self, *, finish: str | None = None, error: Refused | None = None) -> None:
        self.finish, self.error, self.ended, self.reading.ended = finish, error, time.monotonic(), True
        self._settle(self)

    def tell(self) -> None:
        """Wake those who wait for `more`."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def more(self) -> None:
        """Wait until something changed."""
        if not self.over:
            news = asyncio.get_running_loop().create_future()
            self._waiting.append(news)
            await news

    def answer(self) -> Answer:
        return self.reading.answer()

    def timings_ms(self) -> dict[str, float]:
        """Of a turn that is over: how long it waited for an engine, for its first token, and for the others."""
        submitted = self.submitted or self.ended
        first = self.first or self.ended
        return {"queue": (submitted - self.began) * 1e3, "prefill": max(0.0, first - submitted) * 1e3,
                "decode": max(0.0, self.ended - first) * 1e3}  # fmt: skip

    def told(self) -> Told:
        assert self.finish is not None
        return Told(self.name, self.created, self.asked, self.answer(), self.finish, self.prompt.ids, self.tokens,
                    self.logprobs, self.texts, self.runs[-1][0] if self.runs else 0, self.cached_tokens)  # fmt: skip

    async def generate(self, replica: Replica, ends: Collection[int]) -> None:
        """Sample it. Never raises: what went wrong is the turn's `error`."""
        self.submitted = time.monotonic()
        try:
            # Closing the iterator aborts the request, also where this task is cancelled.
            async with contextlib.aclosing(cast(Any, replica.generate(self.request))) as progress:
                async for one in progress:
                    if self.add(one, ends):
                        return
            self.fail(Refused(503, "the engine ended without an answer", code="engine_failed"))
        except EngineError as error:
            self.fail(Refused(400, str(error), code="engine_refused"))
        except ReplicaLost as error:
            self.fail(Refused(503, f"no replica can answer now: {error}", code="replica_lost", retry_after_s=1.0))
        except Exception as error:  # a fault of ours: whoever waits is told
            log.exception("turn %s failed", self.name)
            self.fail(Refused(500, f"{type(error).__name__}: {error}", code="internal_error"))
