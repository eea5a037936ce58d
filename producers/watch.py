"""Decides when one of many short waits has lasted too long, with one timer for all of them.

A stream waits for each of its tokens. `asyncio.timeout` would set a timer for each, and cancel it again; here a timer
is set once in a limit, and looks how long the wait that it finds has lasted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType


class Watch:
    """Of one task's waits, one after the other: `with watch: await ...` raises TimeoutError where the wait outlasts
    what `until` allows, or `expire` is called meanwhile, just as `asyncio.timeout` does. `close` it in the end."""

    __slots__ = ("_until", "_since", "_task", "_cancelling", "_expired", "_timer")

    def __init__(self, until: Callable[[float], float]) -> None:
        """`until`: the end of a wait that began at this time, both by time.monotonic. It is asked only when it may be
        over, and what it says may change."""
        self._until = until
        self._since = 0.0
        self._task: asyncio.Task[object] | None = None  # that waits
        self._cancelling = 0  # how often others had cancelled it before
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        self._since = time.monotonic()
        if self._timer is None:
            self._set(self._until(self._since) - self._since)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        task, self._task = self._task, None
        if self._expired:
            self._expired = False
            assert task is not None
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def expire(self) -> None:
        """End the wait, if there is one, as if its time were over."""
        if self._task is not None and not self._expired:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next wait sets it anew
        left = self._until(self._since) - time.monotonic()
        if left > 0:
            self._set(left)
        else:
            self.expire()
