"""A role of the streams in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def role(run: Callable[..., None], *args: Any, join_s: float = 30.0) -> Iterator[list[BaseException]]:
    """A role in a thread; what it raised, if anything."""
    stop, raised = threading.Event(), list[BaseException]()

    def body() -> None:
        try:
            run(*args[:3], stop, *args[3:])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join(join_s)
        assert not thread.is_alive()
