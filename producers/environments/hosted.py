"""Serves attempts of an environment with tools to workers elsewhere: which are whose, and how long they are kept.

All that goes in and out is text and numbers, and nothing is raised: whose fault an error is gets decided here, where it
happens. A worker that isn't heard for `SILENT_S` is gone: its attempts are closed, and their sandboxes serve others.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.schemas.errors import SandboxLost
from headrace.schemas.events import Task
from headrace.schemas.outcomes import Boundary, Ending, Outcome, of_error

from . import Judged, Opening, Session, ToolEnvironment, ToolResult, Verdict, words_of

log = logging.getLogger("headrace.sandboxes")

SILENT_S = 30.0  # without a word, whoever is at the other end is gone
LOOK_S = 1.0


@dataclass(slots=True)
class _Attempt:
    """`session`: once it is open. `over`: it was ended while it was being opened."""

    worker: str
    session: Session | None = None
    over: bool = False


class SandboxHost:
    """Owns `environment`. Methods may be called from several threads. `worker` names a worker's incarnation, `key` an
    attempt among all workers'; a task, and what comes back, is JSON."""

    def __init__(self, environment: ToolEnvironment, clock: Callable[[], float] = time.monotonic) -> None:
        self._environment, self._clock = environment, clock
        self._attempts: dict[str, _Attempt] = {}
        self._heard: dict[str, float] = {}
        self._lock = threading.Lock()

    def hear(self, worker: str) -> str:
        """A worker is alive; so is this host, and this is the room that it has."""
        with self._lock:
            self._heard[worker] = self._clock()
        return json.dumps({"room": self._environment.room})

    def opening(self, task: str) -> str:
        try:
            return json.dumps({"opening": asdict(self._environment.opening(Task(**json.loads(task))))})
        except Exception as error:
            return _failed(error)

    def open(self, worker: str, key: str, task: str) -> str:
        one = _Attempt(worker)
        with self._lock:
            self._attempts[key] = one
            self._heard.setdefault(worker, self._clock())
        try:
            session = self._environment.open(Task(**json.loads(task)))
        except Exception as error:
            self.end(key)
            return _failed(error)
        with self._lock:
            one.session, over = session, one.over
        if over:
            session.close()
        return "{}"

    def call(self, key: str, name: str, arguments: str, left_s: float) -> str:
        return self._ask(key, lambda session: session.call(name, json.loads(arguments), left_s))

    def score(self, key: str) -> str:
        return self._ask(key, lambda session: session.score())

    def end(self, key: str) -> str:
        """It is over, or given up; more than once."""
        with self._lock:
            one = self._attempts.pop(key, None)
            if one is not None:
                one.over = True
        if one is not None and one.session is not None:
            one.session.close()
        return "{}"

    def tidy(self) -> int:
        """Close the attempts of workers that are gone; how many those were."""
        with self._lock:
            gone = {worker for worker, at in self._heard.items() if self._clock() - at > SILENT_S}
            keys = [key for key, one in self._attempts.items() if one.worker in gone]
            for worker in gone:
                del self._heard[worker]
        for key in keys:
            self.end(key)
        return len(keys)

    def close(self) -> None:
        for key in list(self._attempts):
            self.end(key)
        self._environment.close()

    def _ask(self, key: str, what: Callable[[Session], ToolResult | Judged]) -> str:
        one = self._attempts.get(key)
        try:
            if one is None or one.session is None:
                raise SandboxLost(f"attempt {key} isn't known here: its worker was silent for over {SILENT_S:g} s")
            said = what(one.session)
        except Exception as error:
            return _failed(error)
        return json.dumps({"judged" if isinstance(said, Judged) else "result": asdict(said)})


def run_host(environment: ToolEnvironment, stop: threading.Event, serve: Callable[[SandboxHost], None]) -> None:
    """`serve` is told of the host; until `stop`."""
    host = SandboxHost(environment)
    try:
        serve(host)
        log.info("has room for %d attempts", environment.room)
        while not stop.wait(LOOK_S):
            if closed := host.tidy():
                log.warning("closed %d attempts of workers that are gone", closed)
    finally:
        host.close()


# ------------------------------------------------------------------------------------------------- as JSON


def _failed(error: BaseException) -> str:
    return json.dumps({"judged": asdict(Judged(of_error(error), error=words_of(error)))})


def judged_of(found: dict[str, Any]) -> Judged:
    """From its JSON."""
    ending, verdict = found["ending"], found["verdict"]
    return Judged(Ending(Outcome(ending["outcome"]), ending["reason"], Boundary(ending["boundary"])),
                  None if verdict is None else Verdict(**verdict), found["error"], found["facts"])  # fmt: skip


def opening_of(found: dict[str, Any]) -> Opening:
    """From its JSON."""
    return Opening(**found)


def result_of(found: dict[str, Any]) -> ToolResult:
    """From its JSON."""
    return ToolResult(**found)
