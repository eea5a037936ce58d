"""Decides whether what versions were trained from is still on the log: manifests, closures and samples, by offset.

Asked before anything is trained again, so that all that is missing is named at once and not after an hour's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.schemas.errors import DataLossError
from headrace.schemas.events import GroupClosed, Manifest, Version
from headrace.schemas.topics import BATCHES, GROUPS, SAMPLES, RunTopics
from headrace.streams.log.reader import Reader, beginning_offsets, spans

from .fetch import expect

Place = tuple[str, int]  # topic's short name, partition


def check_retained(kafka: Mapping[str, Any], topics: RunTopics, versions: Sequence[Version]) -> None:
    """Raises DataLossError that names every deleted offset that these versions need, and where to begin instead."""
    begin = {(short, partition): low for short in (BATCHES, GROUPS, SAMPLES)
             for partition, low in beginning_offsets(kafka, topics.name(short)).items()}  # fmt: skip
    if not any(begin.values()):
        return
    lost: dict[Place, set[int]] = {}
    affected = []
    with Reader(kafka) as reader:
        for version in versions:
            needed = _missing(reader, topics, begin, version)
            for place, offsets in needed.items():
                lost.setdefault(place, set()).update(offsets)
            if needed:
                affected.append(version.version)
    if lost:
        named = "; ".join(f"{topics.name(topic)}[{partition}]@{spans(sorted(offsets))}"
                          for (topic, partition), offsets in sorted(lost.items()))  # fmt: skip
        raise DataLossError(
            f"versions {spans(affected)} can't be trained again, since what they were trained from was deleted: "
            f"{named}. Begin behind them, at version {max(affected)} or later, of which there must be a checkpoint "
            f"(--from-version {max(affected)})"
        )


def _missing(reader: Reader, topics: RunTopics, begin: Mapping[Place, int], version: Version) -> dict[Place, set[int]]:
    """Offsets below the first one that is retained."""
    if version.batch_offset < begin[BATCHES, 0]:
        return {(BATCHES, 0): {version.batch_offset}}
    record = reader.read_at(topics.name(BATCHES), 0, [version.batch_offset])[version.batch_offset]
    manifest = expect(record, Manifest)
    lost: dict[Place, set[int]] = {}
    needed: dict[int, set[int]] = {}
    for ref in (*manifest.groups, *(reuse.source for reuse in manifest.reused)):
        gone = ref.offset < begin[GROUPS, ref.partition]
        (lost.setdefault((GROUPS, ref.partition), set()) if gone else needed.setdefault(ref.partition, set())).add(
            ref.offset
        )
    for partition, offsets in needed.items():
        for closure in reader.read_at(topics.name(GROUPS), partition, offsets).values():
            gone_samples = {sample.offset for sample in expect(closure, GroupClosed).samples
                            if sample.offset < begin[SAMPLES, partition]}  # fmt: skip
            if gone_samples:
                lost.setdefault((SAMPLES, partition), set()).update(gone_samples)
    return lost
