"""An environment with tools whose attempts run on sandbox hosts elsewhere: which host an attempt goes to, and when a
host is lost.

A host is alive while it answers; each is asked every second, which also tells it that this worker lives. One that is
gone, or silent for `SILENT_S`, ends the attempts that it had as `sandbox_lost`: that is infrastructure, and the next
lease gives their slots to new attempts. Whether it is replaced, and where, isn't decided here: hosts are found anew.
A step's own time-out is kept by its host; here each wait ends with the host, at the latest.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from headrace.schemas.errors import FailedElsewhere, HeadraceError, SandboxFailed, SandboxLost
from headrace.schemas.events import Task

from . import Judged, Opening, ToolResult
from .hosted import LOOK_S, SILENT_S, judged_of, opening_of, result_of

log = logging.getLogger("headrace.sandboxes")

WAIT_S = 120.0  # for any host to be there
LATE_S = 60.0  # beyond an attempt's own clock: for the way, and for what isn't counted on that


class Door(Protocol):
    """The way to one host."""

    def ask(self, method: str, *given: str | float) -> Future[str]:
        """A method of `SandboxHost`. The future raises where the host is gone."""


# ------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True)
class Load:
    """A host as one worker sees it. `open`: the attempts that this worker has there."""

    name: str
    room: int
    open: int


def choose(hosts: Sequence[Load]) -> str | None:
    """Where the next attempt goes: to the most free room, then by name. A full host queues; None: there is no host."""
    best = min(hosts, key=lambda one: (one.open - one.room, one.name), default=None)
    return None if best is None else best.name


def share(rooms: Sequence[int], workers: int) -> int:
    """How many attempts one of so many workers has at once: its part of the room, and one at least, where there is
    any."""
    return max(1, sum(rooms) // workers) if sum(rooms) else 0


# ------------------------------------------------------------------------------------------------- hosts


@dataclass(slots=True, eq=False)
class _Host:
    name: str
    door: Door
    since: float
    question: Future[str] | None = None
    heard: float | None = None  # the last answer
    room: int = 0
    open: int = 0
    gone: bool = False
    doubted: bool = False  # something that was asked of it failed, and it hasn't answered since

    def usable(self, now: float) -> bool:
        return not (self.gone or self.doubted) and self.heard is not None and now - self.heard <= SILENT_S

    def lost(self, now: float) -> bool:
        return self.gone or now - (self.heard or self.since) > SILENT_S


class Elsewhere:
    """Implements `ToolEnvironment`. `find`: the doors of the hosts that there are now, by name; a replaced host has
    another name. `workers`: that share them."""

    def __init__(self, find: Callable[[], Mapping[str, Door]], workers: int) -> None:
        self._find, self._workers = find, workers
        self.worker = uuid.uuid4().hex
        self._hosts: dict[str, _Host] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._looking = threading.Thread(target=self._look_on, name="sandbox hosts", daemon=True)
        self._looking.start()

    @property
    def room(self) -> int:
        with self._changed:
            now = time.monotonic()
            return share([host.room for host in self._hosts.values() if host.usable(now)], self._workers)

    def opening(self, task: Task) -> Opening:
        return opening_of(_sound(self._answer(self._choose(), "opening", _json(task)))["opening"])

    def open(self, task: Task) -> _Remote:
        host = self._choose()
        with self._changed:
            host.open += 1
        session = _Remote(self, host, f"{self.worker}.{uuid.uuid4().hex[:12]}")
        try:
            _sound(self._answer(host, "open", self.worker, session.key, _json(task)))
        except HeadraceError:
            session.close()
            raise
        return session

    def close(self) -> None:
        self._closed.set()
        self._looking.join(2 * LOOK_S)  # it may be asking a cluster that doesn't answer

    # ------------------------------------------------------------------------------------------------- inside

    def _look_on(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # whoever finds them doesn't answer: what is known stays
                log.warning("sandbox hosts can't be found: %s: %s", type(error).__name__, error)
            self._closed.wait(LOOK_S)

    def _look(self) -> None:
        found, now = self._find(), time.monotonic()
        with self._changed:
            for name in self._hosts.keys() - found.keys():
                self._hosts.pop(name).gone = True
                log.warning("sandbox host %s is gone", name)
            for name in found.keys() - self._hosts.keys():
                self._hosts[name] = _Host(name, found[name], now)
            for host in self._hosts.values():
                question = host.question
                if question is not None and question.done():
                    host.question, host.doubted = None, question.exception() is not None
                    if not host.doubted:
                        host.room, host.heard = json.loads(question.result())["room"], now
                if host.question is None:
                    host.question = host.door.ask("hear", self.worker)
            self._changed.notify_all()

    def _choose(self) -> _Host:
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not self._closed.is_set():
                now = time.monotonic()
                usable = [host for host in self._hosts.values() if host.usable(now)]
                name = choose([Load(host.name, host.room, host.open) for host in usable])
                if name is not None:
                    return self._hosts[name]
                if now > deadline:
                    raise SandboxFailed(f"no sandbox host answered within {WAIT_S:g} s")
                self._changed.wait(LOOK_S)
        raise SandboxFailed("the worker ends")

    def _answer(self, host: _Host, method: str, *given: str | float, within_s: float = float("inf"),
                over: Callable[[], bool] = lambda: False) -> dict[str, Any]:  # fmt: skip
        """Raises SandboxLost."""
        future, deadline = host.door.ask(method, *given), time.monotonic() + within_s
        while True:
            try:
                found: dict[str, Any] = json.loads(future.result(LOOK_S))
                return found
            except TimeoutError:
                now = time.monotonic()
                if host.lost(now) or now > deadline or over() or self._closed.is_set():
                    raise SandboxLost(f"sandbox host {host.name} is gone, or didn't answer in time") from None
            except Exception as error:
                host.doubted = True
                first = next(iter(str(error).splitlines()), "")
                raise SandboxLost(f"sandbox host {host.name} is gone: {type(error).__name__}: {first}") from error

    def _left(self, host: _Host, key: str) -> None:
        with self._changed:
            host.open -= 1
        if not host.gone:
            host.door.ask("end", key)


class _Remote:
    """Implements `Session`."""

    def __init__(self, hosts: Elsewhere, host: _Host, key: str) -> None:
        self.key = key
        self._hosts, self._host = hosts, host
        self._over, self._lock = False, threading.Lock()

    def call(self, name: str, arguments: Mapping[str, Any], left_s: float) -> ToolResult | Judged:
        answer = self._hosts._answer(self._host, "call", self.key, name, json.dumps(arguments), left_s,
                                     within_s=left_s + LATE_S, over=lambda: self._over)  # fmt: skip
        return judged_of(answer["judged"]) if "judged" in answer else result_of(answer["result"])

    def score(self) -> Judged:
        answer = self._hosts._answer(self._host, "score", self.key, over=lambda: self._over)
        return judged_of(answer["judged"])

    def close(self) -> None:
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._hosts._left(self._host, self.key)


def _sound(answer: dict[str, Any]) -> dict[str, Any]:
    """Raises FailedElsewhere: what was classified where it happened falls the same way here."""
    if "judged" in answer:
        raise FailedElsewhere(answer["judged"]["error"], answer["judged"]["ending"]["reason"])
    return answer


def _json(task: Task) -> str:
    return json.dumps(asdict(task))
