"""Decides which replicas' alignment probes are compared with the trainer's own numbers, and when.

A probe is of one version, and is scored with that version's served weights, which the trainer keeps from then on until
the next one that is to be probed (`alignment.every`). So it doesn't matter how late a replica served it. Probes are
read from `fleet` from the start of the trainer on, before each step, a few at a time; what was missed while there was
no trainer is missed: nothing that is trained depends on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.errors import RecordError
from headrace.schemas.events import AlignmentProbe, ReplicaAlignment
from headrace.schemas.topics import FLEET, RunTopics
from headrace.streams.log.reader import Reader, end_offsets

from .alignment import Verdict
from .batches import Episode, Group

log = logging.getLogger("headrace.trainer")

A_STEP = 4  # probes compared before one step, so that a large fleet holds none up
WAITING = 1000  # probes of one version that may wait; each is a few kB
RECORDS = 500


class Probes:
    """What lies on `fleet`, of versions whose weights are kept."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics) -> None:
        name = topics.name(FLEET)
        self._reader = Reader(kafka, {(name, 0): end_offsets(kafka, name)[0]})
        self._waiting: dict[tuple[str, int], AlignmentProbe] = {}

    def due(self, kept: int) -> list[AlignmentProbe]:
        """Some of those of version `kept`, each once. Those of later versions wait, those of earlier ones are gone."""
        while records := self._reader.poll(RECORDS, 0.0):
            for record in records:
                if kind_of(record.value) is not AlignmentProbe or len(self._waiting) >= WAITING:
                    continue  # most are heartbeats, and not looked into
                try:
                    probe = decode(record.value)
                    assert isinstance(probe, AlignmentProbe)
                    probe.continuations()
                except RecordError as error:
                    log.warning("%s[%d]@%d is ignored: %s", record.topic, record.partition, record.offset, error)
                    continue
                self._waiting[probe.incarnation, probe.version] = probe
        self._waiting = {key: probe for key, probe in self._waiting.items() if probe.version >= kept}
        own = [key for key, probe in self._waiting.items() if probe.version == kept][:A_STEP]
        return [self._waiting.pop(key) for key in own]

    def close(self) -> None:
        self._reader.close()


def as_group(probe: AlignmentProbe) -> Group:
    """Its continuations as episodes; they have no reward and are never trained."""
    episodes = []
    for slot, (context, tokens, logprobs) in enumerate(probe.continuations()):
        ones = np.ones(len(tokens), np.float32)
        versions = np.full(len(tokens), probe.version, np.int32)
        episodes.append(Episode(slot, context, tokens, ones > 0, logprobs, versions, ones, None, True,
                                probe.temperature))  # fmt: skip
    return Group(f"{probe.worker}/{probe.incarnation}", tuple(episodes))


def told(probes: Sequence[AlignmentProbe], verdicts: Sequence[tuple[Verdict | None, Verdict | None]]
         ) -> tuple[ReplicaAlignment, ...]:  # fmt: skip
    """What the version record says of them; wrong ones are warned of."""
    out = []
    for probe, (prefill, decoded) in zip(probes, verdicts, strict=True):
        for part, one in (("prefill", prefill), ("decode", decoded)):
            if one is not None and not one.good:
                engine = json.loads(probe.engine).get("engine", "")
                log.warning("replica %s (%s), version %d, %s: %s", probe.worker, engine, probe.version, part, one)
        records = [None if one is None else one.record() for one in (prefill, decoded)]
        out.append(ReplicaAlignment(probe.worker, probe.incarnation, probe.version, probe.engine, *records))
    return tuple(out)
