"""Decides which of several replicas runs a request, and what becomes of the request when a replica fails it.

Routing itself is `routing`'s; here is what can go wrong. A replica that fails is fenced: nothing goes there until a
health check admits it again, later each time it fails without having finished a request. A request that its replica
lost goes on elsewhere from its prompt and the tokens that were already handed out, so that none is lost or told twice;
how often is bounded for each request, and for all together by a budget, so that a broken fleet isn't beaten to death.
A replica that is silent for too long, in a request or in its health checks, counts as lost: a connection that is half
open says nothing for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.schemas.errors import EngineError, ReplicaLost, RequestAborted

from .engines import GenerationRequest, Progress, Replica, ReplicaHealth
from .routing import Choice, Request, Router, blocks_of
from .watch import Watch

log = logging.getLogger("headrace.replicas")

FENCED_MAX_S = 60.0
# Retries that are possible at once (and one more for each place on a replica, since one that dies loses as many), and
# what a request that ends well gives back.
BUDGET_RESERVE, BUDGET_SHARE = 10.0, 0.2
SEED_STEP = 0x9E3779B97F4A7C15  # a retry draws from another random stream than the tokens that it follows


class _Stalled(ReplicaLost):
    """One stream is silent while others of its replica go on: no reason to fence it."""


class State(enum.StrEnum):
    """Whether a replica gets requests."""

    SERVING = "serving"
    FENCED = "fenced"  # until a health check admits it
    DRAINING = "draining"  # finishes what it has


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs in seconds. `first_token_s` covers the prompt, and the queue where the replica gives no tokens to
    anybody; `patience_s` is how long a request waits while no replica serves."""

    first_token_s: float = 120.0
    between_tokens_s: float = 30.0
    request_s: float = 3600.0
    patience_s: float = 60.0
    retries: int = 3
    check_every_s: float = 1.0
    check_s: float = 5.0
    failed_checks: int = 3  # in a row; then what runs there is lost too
    fence_s: float = 1.0  # after a failure; each more in a row doubles it


@dataclass(slots=True)
class _Entry:
    replica: Replica
    state: State = State.SERVING
    why: str = ""
    health: ReplicaHealth | None = None
    failures: int = 0  # since it last finished a request
    failed_checks: int = 0
    fenced_until: float = 0.0
    heard: float = 0.0  # the last token, of any request
    running: dict[int, Watch] = field(default_factory=dict)  # by ticket: its waits for tokens
    checking: asyncio.Task[None] | None = None
    checked: asyncio.Event = field(default_factory=asyncio.Event)  # once


Admit = Callable[[Replica, ReplicaHealth], Awaitable[ReplicaHealth]]


class Pool:
    """Several replicas as one; offers `Replica` itself. All methods on one loop; `start` first.

    `admit(replica, health)` is called after each health check; it may bring a replica up to date, and returns its
    health then. ReplicaLost keeps it fenced.
    """

    name = "pool"

    def __init__(self, replicas: Sequence[Replica], router: Router | None = None, limits: Limits | None = None,
                 admit: Admit | None = None) -> None:  # fmt: skip
        """Raises ValueError where two replicas have one name."""
        if len({one.name for one in replicas}) != len(replicas):
            raise ValueError(f"replicas of the same name: {', '.join(sorted(one.name for one in replicas))}")
        self._limits, self._admit = limits or Limits(), admit
        self._router = router or Router()
        self._entries: dict[str, _Entry] = {}
        self._given = list(replicas)
        self._changed = asyncio.Event()  # some replica may serve that didn't
        self._budget = self._most = BUDGET_RESERVE
        self.retried = 0  # requests that went on elsewhere
        self.waiting = 0  # requests that no replica may take now
        self._closed = False

    @property
    def router(self) -> Router:
        """What it has decided, and why, is counted there."""
        return self._router

    @property
    def states(self) -> dict[str, tuple[State, str]]:
        """Each replica's state, and why where it isn't serving."""
        return {name: (one.state, one.why) for name, one in self._entries.items()}

    # ------------------------------------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        end = time.monotonic() + self._limits.request_s
        given: list[int] = []
        version, attempts, losses, avoid = 0, 0, 0, set[str]()
        while True:
            asked = _the_rest(request, given, attempts)
            if asked is None:  # all there is had come, only the end was lost
                stopped = given[-1] in request.stop_ids
                yield Progress(request.request_id, np.empty(0, np.int32), np.empty(0, np.float32), version,
                               "stop" if stopped else "length")  # fmt: skip
                return
            choice = await self._choose(asked, avoid, end)
            entry = self._entries[choice.replica]
            began, cached = len(given), None
            try:
                stream = self._watched(entry, choice.ticket, entry.replica.generate(asked), end)
                async with contextlib.aclosing(stream):
                    async for one in stream:
                        given += one.token_ids.tolist()
                        version, cached = one.version, one.cached_tokens if cached is None else cached
                        yield one if not attempts else replace(one, request_id=request.request_id, cached_tokens=None)
                        if one.finished is not None:
                            self._well(entry)
                            return
                raise ReplicaLost(f"replica {choice.replica} ended an answer without saying so")
            except RequestAborted:
                attempts += 1
                avoid.clear()
            except ReplicaLost as error:
                attempts, losses = attempts + 1, losses + 1
                avoid = {choice.replica}
                if not isinstance(error, _Stalled):
                    self._failed(entry, str(error))
                self._spend(request, losses, error)
            finally:
                whole = [*asked.prompt, *given[began:]]
                self._router.ended(choice.ticket, time.monotonic(), len(given) - began,
                                   blocks_of(whole, version), cached)  # fmt: skip

    async def _choose(self, request: GenerationRequest, avoid: set[str], end: float) -> Choice:
        """Wait until some replica may take the request. Raises ReplicaLost after `patience_s`."""
        patience = min(end, time.monotonic() + self._limits.patience_s)
        affinity = request.affinity
        conversation = request.request_id if affinity is None else affinity.conversation
        self.waiting += 1
        try:
            while True:
                now = time.monotonic()
                facts = Request(conversation, len(request.prompt), blocks_of(request.prompt, self._version()))
                choice = self._router.choose(facts, now, avoid) or self._router.choose(facts, now)
                if choice is not None:
                    return choice
                if now >= patience or self._closed:
                    raise ReplicaLost(f"no replica serves: {self._account()}")
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience - now):
                        await self._changed.wait()
        finally:
            self.waiting -= 1

    def _version(self) -> int:
        return max((one.health.version for one in self._entries.values() if one.health is not None), default=0)

    async def _watched(self, entry: _Entry, ticket: int, stream: AsyncIterator[Progress], end: float
                       ) -> AsyncGenerator[Progress]:  # fmt: skip
        """The stream, unless it is silent for too long or its replica is lost meanwhile."""
        began, limit = time.monotonic(), self._limits.first_token_s

        def until(since: float) -> float:
            """A request may wait in the replica's queue for long, as long as others get tokens."""
            return min(end, max(began, entry.heard) + limit if first else since + limit)

        watch, first = Watch(until), True
        entry.running[ticket] = watch
        try:
            while True:
                try:
                    with watch:
                        one = await anext(stream, None)
                except TimeoutError:
                    now = time.monotonic()
                    if now >= end:
                        raise EngineError(f"a request took longer than {self._limits.request_s:.0f} s") from None
                    kind = _Stalled if now - entry.heard < limit and not entry.why else ReplicaLost
                    raise kind(entry.why or f"replica {entry.replica.name} was silent for {limit:.0f} s") from None
                if one is None:
                    return
                entry.heard = time.monotonic()
                if first:
                    first, limit = False, self._limits.between_tokens_s
                    watch.close()
                yield one
        finally:
            watch.close()
            entry.running.pop(ticket, None)
            await stream.aclose()  # type: ignore[attr-defined]

    def _spend(self, request: GenerationRequest, losses: int, error: ReplicaLost) -> None:
        if losses > self._limits.retries:
            raise ReplicaLost(f"request {request.request_id!r} was lost {losses} times, last: {error}") from error
        if self._budget < 1:
            raise ReplicaLost(f"request {request.request_id!r} was lost, and too many others too: {error}") from error
        self._budget -= 1
        self.retried += 1

    # ------------------------------------------------------------------------------------------------ replicas

    async def start(self) -> None:
        """Check every replica once, and go on doing so."""
        for replica in self._given:
            self.add(replica)
        await asyncio.gather(*(entry.checked.wait() for entry in self._entries.values()))

    def add(self, replica: Replica) -> None:
        """A replica takes requests from its first good health check on."""
        entry = self._entries[replica.name] = _Entry(replica, State.FENCED, "it hasn't been checked yet")
        self._router.added(replica.name)
        self._router.fenced(replica.name)
        entry.checking = asyncio.create_task(self._check_for_ever(entry), name=f"health of {replica.name}")

    async def remove(self, name: str) -> None:
        """Drain it, wait for what it has, and close it."""
        self.drain(name)
        entry = self._entries[name]
        while entry.running:
            await asyncio.sleep(0.05)
        await self._end(self._entries.pop(name))
        self._router.removed(name)

    def drain(self, name: str) -> None:
        """What runs there may finish; nothing new goes there."""
        self._entries[name].state, self._entries[name].why = State.DRAINING, "it is being drained"
        self._router.drained(name)

    def fence(self, name: str, why: str) -> None:
        """Nothing new goes there until a health check admits it."""
        entry = self._entries[name]
        if entry.state is State.SERVING:
            log.warning("replica %s is fenced: %s", name, why)
            self._router.fenced(name)
        if entry.state is not State.DRAINING:
            entry.state, entry.why = State.FENCED, why

    async def health(self) -> ReplicaHealth:
        """Of those that serve; `version` is the lowest."""
        known = [one.health for one in self._entries.values() if one.state is State.SERVING and one.health is not None]
        if not known:
            raise ReplicaLost(f"no replica serves: {self._account()}")
        waiting = self.waiting + sum(one.waiting for one in known)
        return ReplicaHealth(min(one.version for one in known), True, sum(one.running for one in known), waiting,
                             sum(one.capacity for one in known))  # fmt: skip

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(self._end(entry) for entry in self._entries.values()))
        self._entries.clear()

    async def _end(self, entry: _Entry) -> None:
        if entry.checking is not None:
            entry.checking.cancel()
            await asyncio.wait([entry.checking])
        entry.why = entry.why or "it is closed"
        _cut(entry)
        await entry.replica.close()

    def _well(self, entry: _Entry) -> None:
        entry.failures = 0
        self._budget = min(self._most, self._budget + BUDGET_SHARE)

    def _failed(self, entry: _Entry, why: str) -> None:
        name = entry.replica.name
        if self._entries.get(name) is not entry:
            return
        entry.fenced_until = time.monotonic() + min(FENCED_MAX_S, self._limits.fence_s * 2.0**entry.failures)
        entry.failures += 1
        self.fence(name, why)

    async def _check_for_ever(self, entry: _Entry) -> None:
        while True:
            await self._check(entry)
            entry.checked.set()
            # One that is gone for good is asked less often.
            slower = 1 if entry.failed_checks < self._limits.failed_checks else 10
            await asyncio.sleep(self._limits.check_every_s * slower)

    async def _check(self, entry: _Entry) -> None:
        name = entry.replica.name
        try:
            async with asyncio.timeout(self._limits.check_s):
                health = await entry.replica.health()
            if self._admit is not None:
                health = await self._admit(entry.replica, health)
            if not health.serving:
                raise ReplicaLost(f"replica {name} takes no requests")
        except Exception as error:  # whatever a replica does must not end its checks
            self._check_failed(entry, error)
            return
        if entry.health is None:
            self._budget += health.capacity
            self._most += health.capacity
        entry.health, entry.failed_checks = health, 0
        self._router.told(name, health.waiting, health.capacity)
        if entry.state is State.FENCED and time.monotonic() >= entry.fenced_until:
            log.info("replica %s serves version %d", name, health.version)
            entry.state, entry.why = State.SERVING, ""
            self._router.restored(name)
            self._changed.set()

    def _check_failed(self, entry: _Entry, error: Exception) -> None:
        entry.failed_checks += 1
        why = f"replica {entry.replica.name}: {error or 'it does not answer'}"
        if not isinstance(error, ReplicaLost | TimeoutError) and entry.why != why:
            log.error("%s (%s)", why, type(error).__name__)
        self.fence(entry.replica.name, why)
        if entry.failed_checks == self._limits.failed_checks:
            entry.why = why
            _cut(entry)

    def _account(self) -> str:
        return "; ".join(f"{name} is {one.state}, {one.why}" for name, one in self._entries.items()) or "there is none"


def _cut(entry: _Entry) -> None:
    """End every wait for one of its tokens."""
    for watch in entry.running.values():
        watch.expire()


def _the_rest(request: GenerationRequest, given: Sequence[int], attempts: int) -> GenerationRequest | None:
    """What is left of a request of which `given` has been handed out; None where only its end is missing."""
    if not attempts:
        return request
    left = request.sampling.max_new_tokens - len(given)
    if not left or (given and given[-1] in request.stop_ids):
        return None
    sampling = replace(request.sampling, max_new_tokens=left,
                       seed=(request.sampling.seed + len(given) * SEED_STEP) % 2**63)  # fmt: skip
    return replace(request, request_id=f"{request.request_id}#{attempts}", prompt=[*request.prompt, *given],
                   sampling=sampling)  # fmt: skip
