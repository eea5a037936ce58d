"""The figures of a run: how long until there was something to train, how far sampling lags, what the reward does.

Pure functions over records of the small topics. A figure that the log can't support is None, never 0. The times belong
together and are shown together: a short batch interval beside a long batch span is a deep pipeline, not a fast one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import (
    GroupClosed,
    Lease,
    LeaseRequest,
    Manifest,
    Publication,
    RunCreated,
    Version,
)
from headrace.schemas.outcomes import Closure, Purpose
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, FLEET, GROUPS, POLICY, TASKS
from headrace.schemas.waiting import TrainerTime

from .facts import Fact, Failures, read_facts
from .source import LogSource
from .waits import Waiting, Waits

WINDOWS = 10  # of versions, for the reward's course


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a list of values: median, 95th percentile, greatest and mean."""

    p50: float
    p95: float
    max: float
    mean: float
    count: int


@dataclass(frozen=True, slots=True)
class RewardWindow:
    """Groups that closed while versions `first` to `last` were being trained, whatever became of them; in a run that
    trains nothing, those that these versions sampled."""

    first: int
    last: int
    mean: float | None  # over counted episodes
    episodes: int
    groups: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What `headrace status` and the report say of a whole run. None: the log can't support it."""

    version: int  # the newest committed one; -1: none
    published: int
    batches: int
    elapsed_s: float | None  # from the first request or lease to the newest record
    time_to_trainable_batch_s: float | None  # from the first request or lease to the first manifest
    batch_interval_s: Quantiles | None  # manifest to manifest, while there was room for one
    batch_span_s: Quantiles | None  # from the lease of a batch's oldest group to its manifest
    trainer_wait_s: Quantiles | None  # of each batch but the first, as `waits` defines it
    trainer_wait_share: float | None  # of the trainer's time, without its wait for the first batch
    lag: Quantiles | None  # versions between sampling and training, over trained tokens
    tokens_per_s: float | None  # model tokens of closed groups
    rewards: tuple[RewardWindow, ...]
    waits: Waits  # who waited for what, and what to change


def measure(source: LogSource) -> Figures:
    """Read the small topics, and compute. Undecodable records are the ledger's matter: left out."""
    ignored = Failures()
    places = [(topic, p) for topic in (POLICY, TASKS, FLEET, BATCHES, GROUPS) for p in range(source.partitions(topic))]
    return figures(fact for place in places for fact in read_facts(source, *place, ignored))


@dataclass(slots=True)
class _Seen:
    """What the records say, by kind; times in ms."""

    asked: list[int] = field(default_factory=list)
    leased: dict[str, int] = field(default_factory=dict)
    closures: list[Fact[GroupClosed]] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    published: int = -1
    max_ahead: int = 1
    newest: int = 0
    waiting: Waiting = field(default_factory=Waiting)


def figures(facts: Iterable[Fact[Any]]) -> Figures:
    """Records of any topics, in log order within a partition."""
    seen = _Seen()
    for fact in facts:
        seen.newest = max(seen.newest, fact.timestamp_ms)
        seen.waiting.observe(fact)
        match fact.event:
            case Lease() as lease:
                seen.leased.setdefault(lease.group, fact.timestamp_ms)
                seen.asked.append(fact.timestamp_ms)
            case LeaseRequest():
                seen.asked.append(fact.timestamp_ms)
            case GroupClosed():
                seen.closures.append(fact)
            case Manifest() as manifest:
                seen.manifests.append(manifest)
            case Version() as version:
                seen.versions.append(version)
            case Publication() as publication:
                seen.published = max(seen.published, publication.version)
            case RunCreated() as created:
                seen.max_ahead = RunSettings.model_validate_json(created.settings).batch.max_ahead
    return _compute(seen)


def _compute(seen: _Seen) -> Figures:
    committed = {version.version: version.committed_ms for version in seen.versions}
    decided = {manifest.batch: manifest.decided_ms for manifest in seen.manifests}
    begin = min(seen.asked, default=None)
    first = min(decided.values(), default=None)
    waits = seen.waiting.waits()
    tokens = sum(sum(slot.model_tokens for slot in fact.event.slots) for fact in seen.closures)
    last_closure = max((fact.timestamp_ms for fact in seen.closures), default=None)
    return Figures(
        version=max(committed, default=-1),
        published=seen.published,
        batches=len(decided),
        elapsed_s=(seen.newest - begin) / 1000 if begin is not None else None,
        time_to_trainable_batch_s=(first - begin) / 1000 if first is not None and begin is not None else None,
        batch_interval_s=quantiles(_intervals(decided, committed, seen.max_ahead)),
        batch_span_s=quantiles(_spans(seen)),
        trainer_wait_s=quantiles(waits.trainer_waits_s),
        trainer_wait_share=waits.trainer.get(TrainerTime.WAITING, 0.0) if waits.trainer else None,
        lag=_lag(seen.manifests, committed.keys()),
        tokens_per_s=1000 * tokens / (last_closure - begin)
        if begin is not None and last_closure is not None and last_closure > begin
        else None,
        rewards=_rewards(seen),
        waits=waits,
    )


def _intervals(decided: dict[int, int], committed: dict[int, int], max_ahead: int) -> list[float]:
    """Manifest to manifest. The clock stands while the trainer has all the batches that it may have ahead."""
    out = []
    for n, at in decided.items():
        if n - 1 in decided:
            room_since = committed.get(n - 1 - max_ahead, 0)
            out.append(max(0, at - max(decided[n - 1], room_since)) / 1000)
    return out


def _spans(seen: _Seen) -> list[float]:
    spans = []
    for manifest in seen.manifests:
        leased = [seen.leased[ref.group] for ref in manifest.groups if ref.group in seen.leased]
        if leased:
            spans.append((manifest.decided_ms - min(leased)) / 1000)
    return spans


def _lag(manifests: Iterable[Manifest], committed: Iterable[int]) -> Quantiles | None:
    """Over the tokens of committed batches that had weight."""
    trained = set(committed)
    lags: list[np.ndarray[Any, Any]] = []
    for manifest in manifests:
        if manifest.batch in trained:
            counts = unpack_int32(manifest.segment_count) * (unpack_float32(manifest.segment_weight) > 0)
            lags.append(np.repeat(manifest.target - unpack_int32(manifest.segment_version), counts))
    return quantiles(np.concatenate(lags)) if lags else None


def _rewards(seen: _Seen) -> tuple[RewardWindow, ...]:
    """Closed groups by the version that was in training when they closed, in at most `WINDOWS` windows."""
    commits = sorted((version.committed_ms, version.version) for version in seen.versions if version.version > 0)
    times = np.array([at for at, _ in commits])
    by_version: dict[int, list[GroupClosed]] = {}
    for fact in seen.closures:
        if fact.event.purpose != Purpose.TRAIN:
            continue
        if commits:
            index = int(np.searchsorted(times, fact.timestamp_ms))
            # What closes after the last commit counts with the last window: it was sampled for the next version.
            by_version.setdefault(commits[min(index, len(commits) - 1)][1], []).append(fact.event)
        elif fact.event.closure == Closure.UNMANAGED:
            sampled = [run.version for slot in fact.event.slots for run in slot.versions]
            by_version.setdefault(max(sampled, default=0), []).append(fact.event)
    windows = []
    shown = [version for _, version in commits] or sorted(by_version)
    for part in np.array_split(np.array(shown), min(WINDOWS, len(shown))) if shown else ():
        groups = [group for version in part.tolist() for group in by_version.get(version, [])]
        rewards = [s.reward for group in groups for s in group.slots if s.counted and s.reward is not None]
        mean = float(np.mean(rewards)) if rewards else None
        windows.append(RewardWindow(int(part[0]), int(part[-1]), mean, len(rewards), len(groups)))
    return tuple(windows)


def quantiles(values: Sequence[float] | np.ndarray[Any, Any]) -> Quantiles | None:
    """Of values [n]; None of nothing."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return None
    p50, p95 = np.percentile(array, [50, 95])
    return Quantiles(float(p50), float(p95), float(array.max()), float(array.mean()), int(array.size))
