"""A run's curves in the trackers that researchers look at: each tracker is a reader of the log like any other.

A tracker holds what it has drawn; asked again, after a crash or weeks later, it is told of the rest only. So one that
is attached after the run shows the same curves as one that was there from the start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Event, Publication, Score, Version
from headrace.schemas.topics import EVALS, POLICY
from headrace.streams.log.reader import Reader

from ..curves import Curves, Point
from ..run import Run

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where points are drawn. Those of versions come in order; those of evaluations in the order of their records."""

    @property
    def drawn(self) -> tuple[int, int]:
        """(the newest version that is drawn, -1: none; how many evaluations are drawn)."""

    def draw(self, point: Point, *, evaluation: bool) -> None:
        """As a whole or not at all, also where this process is killed."""

    def close(self) -> None: ...


def track(run: Run, tracker: Tracker, *, follow: bool = False, stop: threading.Event | None = None) -> int:
    """Draw what the tracker lacks; with `follow`, go on until `stop`. Returns how many points were drawn."""
    newest, evaluations = tracker.drawn
    drawn = 0
    with Reader(run.kafka) as reader:
        def read(topic: str, partition: int, start: int, end: int) -> Iterable[Event]:
            for record in reader.read(run.topics.name(topic), partition, start, end):
                try:
                    yield decode(record.value)
                except UndecodableRecord as error:
                    log.warning("%s[%d]@%d is left out: %s", topic, partition, record.offset, error)

        curves = Curves(read, newest)
        for _, event in run.events(POLICY, EVALS, follow=follow, stop=stop, kinds=(Version, Publication, Score)):
            assert not isinstance(event, UndecodableRecord)  # such are left out where kinds are named
            evaluation = isinstance(event, Score)
            if evaluation and evaluations:
                evaluations -= 1
                continue
            for point in curves.feed(event):
                tracker.draw(point, evaluation=evaluation)
                drawn += 1
    return drawn
