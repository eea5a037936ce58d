"""Runs the attempts of environments with tools beside the worker's loop: each in a thread, which ends with it.

The worker asks, and finds the answers in `poll`; it never waits for a sandbox. What a session raises ends its attempt,
classified here. An attempt that the worker gives up is closed at once, whatever its thread is doing, and nothing more
is heard of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import Task
from headrace.schemas.outcomes import of_error

from . import Judged, Session, ToolEnvironment, ToolResult, words_of
from .host import Failed, Reply

log = logging.getLogger("headrace.sessions")

OPENINGS = 2  # tasks that are made ready at once: building an image keeps a machine busy


@dataclass(slots=True)
class _Running:
    """`session`: once it is open. `over`: nobody wants to hear of it any more."""

    work: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    session: Session | None = None
    opened_s: float = 0.0  # what opening took, until it was told
    over: bool = False


class Sessions:
    """Driven from one thread, as an `EnvironmentHost` is. `key` names an attempt."""

    def __init__(self, environment: ToolEnvironment) -> None:
        self._environment = environment
        self._openings = ThreadPoolExecutor(OPENINGS, "openings")
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._next = 0

    @property
    def free(self) -> int:
        """How many more may begin."""
        return max(0, self._environment.room - len(self._running))

    def ask_messages(self, task: Task, timeout_s: float) -> int:
        """The reply has an `opening`. It takes as long as it takes: its environment bounds it."""
        number = self._number()

        def work() -> None:
            try:
                self._replies.put(Reply(number, opening=self._environment.opening(task)))
            except Exception as error:
                ending = of_error(error)
                self._replies.put(Reply(number, failed=Failed(ending.reason, ending.boundary, words_of(error))))

        self._openings.submit(work)
        return number

    def begin(self, key: str, task: Task) -> None:
        """The attempt begins: its state is set up while the model says its first words."""
        one = self._running[key] = _Running()
        threading.Thread(target=self._run, args=(one, task), name=f"session {key}", daemon=True).start()

    def ask_calls(self, key: str, calls: Sequence[tuple[str, Any]], left_s: float) -> int:
        """The reply has `results`, or is `judged`."""
        number, one = self._number(), self._running[key]

        def work(session: Session) -> Reply:
            results, left = list[ToolResult](), left_s
            for name, arguments in calls:
                result = session.call(name, arguments, left)
                if isinstance(result, Judged):
                    return Reply(number, results=results, judged=result)
                results.append(result)
                left -= result.seconds
            return Reply(number, results=results)

        self._put(one, number, work)
        return number

    def ask_verdict(self, key: str) -> int:
        """The reply is `judged`."""
        number = self._number()
        self._put(self._running[key], number, lambda session: Reply(number, judged=session.score()))
        return number

    def end(self, key: str) -> None:
        """The attempt is over, or given up."""
        one = self._running.pop(key, None)
        if one is not None:
            one.over = True
            if one.session is not None:
                one.session.close()
            one.work.put(None)

    def poll(self, wait_s: float = 0.0) -> list[Reply]:
        replies = list[Reply]()
        try:
            replies.append(self._replies.get(timeout=wait_s) if wait_s > 0 else self._replies.get_nowait())
            while True:
                replies.append(self._replies.get_nowait())
        except queue.Empty:
            return replies

    def close(self) -> None:
        for key in list(self._running):
            self.end(key)
        self._openings.shutdown(wait=False, cancel_futures=True)
        self._environment.close()

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _put(self, one: _Running, number: int, work: Callable[[Session], Reply]) -> None:
        def answer() -> None:
            try:
                assert one.session is not None
                reply = work(one.session)
            except Exception as error:
                if not one.over:
                    log.warning("a session ended: %s", words_of(error))
                reply = Reply(number, judged=Judged(of_error(error), error=words_of(error)))
            if not one.over:
                reply.sandbox_s, one.opened_s = one.opened_s, 0.0
                self._replies.put(reply)

        one.work.put(answer)

    def _run(self, one: _Running, task: Task) -> None:
        """A session's thread."""
        began = time.monotonic()
        try:
            one.session = self._environment.open(task)
        except Exception as error:
            one.session = _Broken(Judged(of_error(error), error=words_of(error)))
        one.opened_s = time.monotonic() - began
        try:
            while not one.over and (work := one.work.get()) is not None:
                work()
        finally:
            one.session.close()  # also where it was given up while it was being opened


class _Broken:
    """A session that couldn't be opened: whatever is asked of it, it ended so."""

    def __init__(self, judged: Judged) -> None:
        self._judged = judged

    def call(self, *_: object) -> Judged:
        return self._judged

    def score(self) -> Judged:
        return self._judged

    def close(self) -> None:
        pass
