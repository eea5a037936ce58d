"""Decides which batch is due: manifests in turn, each with its groups and the settings under which it was decided.

What else lies in `batches` decides nothing; a manifest that was altered is named by its address, or by the next one,
which then comes out of turn.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from headrace.schemas.codec import kind_of
from headrace.schemas.errors import InvalidRecord, RecordError
from headrace.schemas.events import Manifest, Version
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings, StalenessSettings
from headrace.schemas.topics import BATCHES, RunTopics
from headrace.streams.log.policy import Opened, Schemas
from headrace.streams.log.reader import Reader, Record, beginning_offsets
from headrace.streams.staleness import Drifts

from .batches import Group
from .fetch import Batch, expect, fetch_batch, within_limits
from .publish import PolicyHead, read_policy

log = logging.getLogger("headrace.trainer")

POLL_S = 0.2


class Inbox:
    """Reads `batches` from behind the newest committed version's manifest."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, opened: Opened, head: PolicyHead) -> None:
        self._kafka, self._topics, self._opened = kafka, topics, opened
        self._settings, self._versions = head.settings, head.versions
        self._drifts, self._told = Drifts(), -1
        batches = topics.name(BATCHES)
        newest = head.versions.get(head.committed)
        at = newest.batch_offset + 1 if newest and newest.version else beginning_offsets(kafka, batches)[0]
        self._manifests = Reader(kafka, {(batches, 0): at})
        self._reader, self._schemas = Reader(kafka), Schemas(kafka, topics)

    def next(self, stop: threading.Event) -> Record | None:
        """The next manifest as it lies on the log; None once `stop` is set."""
        while not stop.is_set():
            for record in self._manifests.poll(1, POLL_S):
                if self._is_manifest(record):
                    return record
        return None

    def _is_manifest(self, record: Record) -> bool:
        """By its header: a damaged one is for whoever reads it to name."""
        if kind_of(record.value) is None:
            try:
                self._schemas.decode(record.value)  # a newer coordinator's: its schema is known from now on
            except RecordError as error:
                log.warning("%s[%d]@%d decides nothing: %s", record.topic, record.partition, record.offset, error)
        return kind_of(record.value) is Manifest

    def fetch(self, record: Record, due: int, staleness: StalenessSettings | None = None) -> Batch:
        """The manifest's groups, proved; `due` is the version that it makes. `staleness` stands for that of its
        settings. Raises InvalidRecord by address where another batch is due, and what `fetch_batch` raises."""
        manifest = expect(record, Manifest)
        if (manifest.batch, manifest.target) != (due, due - 1):
            raise InvalidRecord(f"batch {manifest.batch} for version {manifest.target} where batch {due} is due",
                                record.topic, record.partition, record.offset)  # fmt: skip
        if manifest.settings_offset not in self._settings:
            self._settings = read_policy(self._kafka, self._topics, self._opened).settings
        if manifest.settings_offset not in self._settings:
            raise InvalidRecord(f"it was decided under settings at policy offset {manifest.settings_offset}, where "
                                "there are none", record.topic, record.partition, record.offset)  # fmt: skip
        return fetch_batch(self._reader, self._topics, record, staleness or self.settings(manifest).staleness)

    def groups(self, batch: Batch) -> tuple[Group, ...]:
        """As they may be trained. Ask once its target is committed: a batch may be fetched before."""
        manifest = batch.manifest
        return within_limits(batch.groups, manifest.target, self._drifts_at(manifest.target),
                             self.settings(manifest).staleness)  # fmt: skip

    def _drifts_at(self, target: int) -> Drifts:
        """What had been published once `target` was committed, whatever has been since."""
        if target < self._told:
            self._drifts, self._told = Drifts(), -1
        for number in range(self._told + 1, target + 1):
            if number in self._versions:
                self._drifts.publish(self._versions[number])
        self._told = target
        return self._drifts

    def settings(self, manifest: Manifest) -> RunSettings:
        """Those under which a manifest that was fetched was decided."""
        return self._settings[manifest.settings_offset]

    def recorded(self, version: Version) -> Batch:
        """What a committed version was trained from. Raises InvalidRecord where that manifest was altered."""
        record = self._reader.read_at(self._topics.name(BATCHES), 0, [version.batch_offset])[version.batch_offset]
        if digest(record.value or b"") != version.batch_digest:
            raise InvalidRecord(f"version {version.version} was trained from another manifest: this one was altered",
                                record.topic, record.partition, record.offset)  # fmt: skip
        return self.fetch(record, version.batch)

    def close(self) -> None:
        self._manifests.close()
        self._reader.close()
