"""The curves of a run: for each published version a point, made of records that the version names, so that whoever
reads the log, and whenever, draws the same curve.

| name | of version n |
|---|---|
| `reward/mean`, `reward/episodes` | over the counted episodes of all groups that closed between the manifests n-1 and n, whatever became of them; no mean where none has a reward |
| `groups/closed`, `groups/batch` | groups that closed between the two manifests, and those in batch n |
| `lag/mean`, `lag/max` | versions between sampling and training, over the batch's tokens that have weight |
| `batch/interval_s` | manifest n-1 to manifest n |
| `step/seconds` | manifest n to the commit of version n: fetching and training |
| `publication/bytes` | of version n in `weights` (0: by a path) |
| `train/...` | what the trainer measured, by the names of its metrics; `train/rho`: RMS change of log-probability, nats |

Version 0 has only its publication. Evaluations are points of their own, `eval/SUITE`, at the version that was scored.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import Event, GroupClosed, Manifest, Publication, Score, Version
from headrace.schemas.outcomes import Purpose
from headrace.schemas.topics import BATCHES, GROUPS

# (topic, partition, first offset, offset after the last) -> the events there, in order, without what doesn't decode.
Read = Callable[[str, int, int, int], Iterable[Event]]


@dataclass(frozen=True, slots=True)
class Point:
    """Values at a version. `at_ms`: when the version was committed, or the score taken, ms since 1970."""

    version: int
    at_ms: int
    values: dict[str, float]


@dataclass(slots=True)
class Curves:
    """Feed it `policy` and `evals`, each in its order from the beginning. `after`: versions up to this one are known to
    whoever asks, and not made again."""

    read: Read
    after: int = -1
    _versions: dict[int, Version] = field(default_factory=dict)  # committed, and not yet published
    _offset: int = -1  # of the manifest before, in `batches`

    def feed(self, event: Event) -> Iterator[Point]:
        match event:
            case Version():
                self._versions[event.version] = event
            case Publication() if (version := self._versions.pop(event.version, None)) is not None:
                before, self._offset = self._offset, version.batch_offset
                if version.version > self.after:
                    yield self._point(version, event, before)
            case Score():
                values = {f"eval/{event.suite}": event.mean, f"eval/{event.suite}/standard_error": event.standard_error}
                yield Point(event.version, event.evaluated_ms, values)
            case _:
                pass

    def _point(self, version: Version, publication: Publication, before: int) -> Point:
        values = {"publication/bytes": float(publication.size)}
        manifest = self._manifest(version.batch_offset)
        if manifest is not None:
            earlier = self._manifest(before)
            values |= self._rewards(manifest, earlier) | _lag(manifest)
            values["groups/batch"] = float(len(manifest.groups))
            values["step/seconds"] = (version.committed_ms - manifest.decided_ms) / 1000
            if earlier is not None:
                values["batch/interval_s"] = (manifest.decided_ms - earlier.decided_ms) / 1000
            values |= {f"train/{name}": value for name, value in version.metrics.items()} | {"train/rho": version.rho}
        return Point(version.version, version.committed_ms, values)

    def _manifest(self, offset: int) -> Manifest | None:
        if offset < 0:
            return None
        return next((e for e in self.read(BATCHES, 0, offset, offset + 1) if isinstance(e, Manifest)), None)

    def _rewards(self, manifest: Manifest, earlier: Manifest | None) -> dict[str, float]:
        since = {one.partition: one.offset for one in earlier.positions} if earlier is not None else {}
        closed = [event for one in manifest.positions
                  for event in self.read(GROUPS, one.partition, since.get(one.partition, 0), one.offset)
                  if isinstance(event, GroupClosed) and event.purpose == Purpose.TRAIN]  # fmt: skip
        rewards = [slot.reward for group in closed for slot in group.slots if slot.counted and slot.reward is not None]
        counts = {"groups/closed": float(len(closed)), "reward/episodes": float(len(rewards))}
        return counts | ({"reward/mean": float(np.mean(rewards))} if rewards else {})


def _lag(manifest: Manifest) -> dict[str, float]:
    counts = unpack_int32(manifest.segment_count) * (unpack_float32(manifest.segment_weight) > 0)
    lags = manifest.target - unpack_int32(manifest.segment_version)
    if not counts.sum():
        return {}
    return {"lag/mean": float(np.average(lags, weights=counts)), "lag/max": float(lags[counts > 0].max())}
