"""What holds a producer back that has no lease to wait for: groups that nobody has assembled, candidates that wait.

Both are read from the log where they stand, and only when they matter: own groups when there are many of them,
candidates when a request went unanswered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.errors import Backpressure
from headrace.schemas.events import Disposed, GroupClosed, Manifest, Publication
from headrace.schemas.outcomes import Closure
from headrace.schemas.topics import BATCHES, GROUPS, POLICY, RunTopics
from headrace.streams.log.reader import Reader, beginning_offsets, end_offsets, read_backwards, read_range

MAX_UNASSEMBLED = 256
MANIFESTS = 64  # to look back for where each partition's candidates were last taken
PUBLICATIONS = 64  # records of `policy` to look back for the newest publication


class Unassembled:
    """An unmanaged producer's own groups that `groups` doesn't close yet. One thread at a time."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, most: int) -> None:
        """Make it before the first group is opened, so that no closure is missed."""
        name = topics.name(GROUPS)
        self._reader = Reader(kafka, {(name, p): end for p, end in end_offsets(kafka, name).items()})
        self._name, self._most = name, most
        self._open: dict[str, None] = {}

    def make_room(self, wait_s: float) -> None:
        """Return once one more group may be opened. Raises Backpressure where that takes longer than `wait_s`."""
        end = time.monotonic() + wait_s
        while len(self._open) >= self._most:
            records = self._reader.poll(1000, min(0.1, max(0.0, end - time.monotonic())))
            for record in records:
                if kind_of(record.value) is GroupClosed:
                    closed = decode(record.value)
                    assert isinstance(closed, GroupClosed)
                    self._open.pop(closed.group, None)
            if not records and len(self._open) >= self._most and time.monotonic() >= end:
                raise Backpressure(f"{len(self._open)} groups of this producer are not closed in {self._name} yet "
                                   f"(the oldest is {next(iter(self._open))}): the assembler stands still or is "
                                   "behind; try again later, nothing was lost")  # fmt: skip

    def opened(self, group: str) -> None:
        self._open[group] = None

    def close(self) -> None:
        self._reader.close()


def candidates_waiting(kafka: Mapping[str, Any], topics: RunTopics) -> tuple[int, int]:
    """(candidates that no manifest took, manifests whose version is not published) as the log stands.

    In each partition candidates are taken in order, so those that wait lie behind the last one that was taken.
    """
    batches, groups = topics.name(BATCHES), topics.name(GROUPS)
    begins, ends = beginning_offsets(kafka, groups), end_offsets(kafka, groups)
    taken: dict[int, int] = {}  # by partition: the last offset that a manifest names
    disposed: set[str] = set()
    newest, manifests, oldest = 0, 0, {}
    for record in read_backwards(kafka, batches, 0):
        event = decode(record.value)
        if isinstance(event, Disposed):
            disposed.add(event.group)
        elif isinstance(event, Manifest):
            newest, manifests = max(newest, event.batch), manifests + 1
            for ref in event.groups:
                taken[ref.partition] = max(taken.get(ref.partition, -1), ref.offset)
            oldest = {one.partition: one.offset for one in event.positions}
            if taken.keys() >= ends.keys() or manifests >= MANIFESTS:
                break
    else:
        oldest = {}  # all manifests were seen: what none of them names has waited from the beginning
    waiting = 0
    for partition, end in ends.items():
        start = taken[partition] + 1 if partition in taken else oldest.get(partition, 0)
        for record in read_range(kafka, groups, partition, max(start, begins[partition]), end):
            if kind_of(record.value) is GroupClosed:
                closed = decode(record.value)
                assert isinstance(closed, GroupClosed)
                waiting += closed.closure == Closure.CANDIDATE and closed.group not in disposed
    return waiting, max(0, newest - max(0, _published(kafka, topics)))


def _published(kafka: Mapping[str, Any], topics: RunTopics) -> int:
    """The newest published version, -1 where there is none (or it lies too far back to matter)."""
    for seen, record in enumerate(read_backwards(kafka, topics.name(POLICY), 0)):
        if kind_of(record.value) is Publication:
            published = decode(record.value)
            assert isinstance(published, Publication)
            return published.version
        if seen >= PUBLICATIONS:
            break
    return -1
