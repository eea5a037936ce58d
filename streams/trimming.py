"""How much of `trajectories` may be deleted, and its deletion.

Only what is both settled and old: below the low mark of the last committed `Position` (a restart reads from there) and
older than `log.keep_trajectories_s`, by the log's own clock, so that a stopped run deletes nothing. `groups` carries
the accounts and `samples` what is trained, so that nothing which was decided is lost. A process that dies between a
commit and its deletion has only kept more: the next one deletes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.schemas.errors import LogError

from .log import clients
from .log.reader import Reader

log = logging.getLogger("headrace.assembler")

EVERY_S = 60.0  # a deletion is cheap, but frees whole segments only


def trim_to(low_mark: int, first_young: int, begin: int) -> int | None:
    """The offset below which to delete, or None. `low_mark` is committed; from `first_young` on records are to be kept;
    the log begins at `begin`."""
    end = min(low_mark, first_young)
    return end if end > begin else None


def delete(admin: AdminClient, topic: str, ends: Mapping[int, int]) -> dict[int, Future[Any]]:
    """Ask for everything below these offsets to go. What came of it, by partition; the client must outlive that."""
    wanted = [TopicPartition(topic, partition, end) for partition, end in ends.items()]
    return {place.partition: future for place, future in admin.delete_records(wanted).items()}


class Trimmer:
    """Deletes below the marks of a topic's partitions, now and then and without waiting for it."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, keep_s: float) -> None:
        self._topic, self._keep_ms = topic, round(1000 * keep_s)
        self._every_s = min(EVERY_S, keep_s)
        self._admin, self._reader = clients.admin(kafka), Reader(kafka)
        self._begin: dict[int, int] = {}
        self._asked: dict[int, Future[Any]] = {}
        self._next = time.monotonic()

    def trim(self, marks: Mapping[int, tuple[int, int]]) -> None:
        """`marks`: by partition, the committed low mark and the newest timestamp (ms) that was read.

        What Kafka refuses is logged and tried again; only the disk waits for it.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        try:
            self._settle()
            ends = {}
            for partition, (low_mark, newest_ms) in marks.items():
                if partition in self._asked or newest_ms < 0:
                    continue
                young = self._reader.offset_at(self._topic, partition, newest_ms - self._keep_ms, 5.0)
                end = trim_to(low_mark, young, self._begin.get(partition, 0))
                if end is not None:
                    ends[partition] = end
            if ends:
                self._asked |= delete(self._admin, self._topic, ends)
        except (KafkaException, LogError) as error:
            log.warning("%s is not trimmed now: %s", self._topic, error)

    def _settle(self) -> None:
        for partition, future in list(self._asked.items()):
            if not future.done():
                continue
            del self._asked[partition]
            try:
                self._begin[partition] = future.result().low_watermark
                log.info("%s[%d] begins at %d now", self._topic, partition, self._begin[partition])
            except KafkaException as error:
                log.warning("%s[%d] was not trimmed: %s", self._topic, partition, clients.reason(error))

    def close(self) -> None:
        self._reader.close()
