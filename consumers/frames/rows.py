"""Rows of the tables that are not made token by token: plain dicts, one after the other, in bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headrace.schemas import topics
from headrace.schemas.codec import decode, kind_of
from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import (
    AttemptEnded,
    GroupClosed,
    Heartbeat,
    Manifest,
    Publication,
    PublicationClock,
    Score,
    SlotFate,
    Span,
    Version,
)
from headrace.schemas.outcomes import Closure, Outcome
from headrace.schemas.suspicion import Answers
from headrace.schemas.topics import BATCHES, EVALS, FLEET, GROUPS, POLICY, TRAJECTORIES

from ..facts import Fact, Failures, read_facts
from ..health import TaskSet
from ..source import LogSource
from ..tables import suspicions
from .attempts import Attempt, Told, closures
from .fates import OPEN, Fate, Fates

Row = dict[str, Any]
CLOCKS = ("published", "fetched", "decoded", "paused", "applied", "resumed", "first_token")


# ------------------------------------------------------------------------------------------------ groups, episodes


def groups(source: LogSource) -> Iterator[Row]:
    """Of every group with a lease or a closure."""
    for told, closed, fate, partition in _decided(source):
        attempts = [fact.event for fact in told.ended.values()]
        row: Row = {
            "id": told.group, "disposition": fate.disposition, "reason": fate.reason, "batch": fate.batch,
            "version": fate.version, "max_lag": fate.max_lag, "opened_ms": told.opened_ms, "partition": partition,
            "attempts": len(attempts),
            "infra_failures": sum(one.outcome == Outcome.INFRA_FAILURE for one in attempts),
        }  # fmt: skip
        if closed is None:
            assert told.opening is not None
            yield row | {
                "task": told.opening.task.id, "purpose": told.opening.purpose, "closure": OPEN,
                "slots": told.opening.spec.slots, "counted": 0,
                "model_tokens": sum(one.model_tokens for one in attempts), "context_tokens": 0, "candidate_tokens": 0,
                "excluded_tokens": 0, "surplus_tokens": 0, "superseded_tokens": 0, "offset": told.opened,
            }  # fmt: skip
            continue
        event = closed.event
        rewards = np.array([s.reward for s in event.slots if s.counted and s.reward is not None])
        yield row | {
            "task": event.task, "purpose": event.purpose, "closure": event.closure, "closed_ms": closed.timestamp_ms,
            "open_s": event.open_ms / 1000, "slots": len(event.slots), "counted": sum(s.counted for s in event.slots),
            "reward_mean": float(rewards.mean()) if rewards.size else None,
            "reward_std": float(rewards.std()) if rewards.size else None,
            "model_tokens": sum(event.accounts.values()), "context_tokens": event.context_tokens,
            **{f"{account}_tokens": event.accounts.get(account, 0)
               for account in ("candidate", "excluded", "surplus", "superseded")},
            "held_up_by": event.held_up_by, "flagged": event.flagged,
            "content_hash": event.content_hash.hex() if event.content_hash else None, "offset": closed.offset,
        }  # fmt: skip


def episodes(source: LogSource) -> Iterator[Row]:
    """Of every attempt that ended, and of those of open groups that are still at work."""
    answers = _answers(source)
    for told, closed, fate, partition in _decided(source):
        fates = {s.slot: s for s in closed.event.slots} if closed else {}
        opening = told.opening
        about: Row = {
            "group": told.group, "disposition": fate.disposition, "batch": fate.batch, "max_lag": fate.max_lag,
            "closure": closed.event.closure if closed else OPEN, "closed_ms": closed.timestamp_ms if closed else None,
            "task": closed.event.task if closed else opening.task.id if opening else None,
            "purpose": closed.event.purpose if closed else opening.purpose if opening else None,
            "partition": partition,
        }  # fmt: skip
        running = told.started.keys() - told.ended.keys() if closed is None else set()
        for attempt in sorted(told.ended.keys() | running):
            yield about | _episode(told, attempt, closed, fates.get(attempt[0]), answers)


def _answers(source: LogSource) -> Answers:
    """What passed in which tasks, in all of the run."""
    return Answers.of(fact.event for partition in range(source.partitions(GROUPS))
                      for fact in read_facts(source, GROUPS, partition, Failures())
                      if isinstance(fact.event, GroupClosed))  # fmt: skip


def _episode(told: Told, attempt: Attempt, closed: Fact[GroupClosed] | None, fate: SlotFate | None,
             answers: Answers) -> Row:  # fmt: skip
    slot, number = attempt
    last = fate if fate is not None and fate.attempt == number else None
    versions = [run.version for run in last.versions] if last else []
    signs = suspicions(last, answers) if last else ()
    started, finished, ended = told.started.get(attempt), told.finished.get(attempt), told.ended.get(attempt)
    row: Row = {
        "id": f"{told.group}/{slot}", "slot": slot, "attempt": number,
        "counted": last is not None and last.counted, "context_tokens": last.context_tokens if last else None,
        "version_min": min(versions, default=None), "version_max": max(versions, default=None),
        "suspicious": ",".join(one.sign for one in signs) or None,
        "evidence": "; ".join(f"{one.sign}: {one.evidence}" for one in signs) or None,
        "excluded": last is not None and last.excluded,
        "held_up": closed is not None and closed.event.held_up_by == slot and last is not None,
        "worker": started.worker if started else None, "engine": started.engine if started else None,
        "started_ms": started.started_ms if started else None, "ended_ms": finished.ended_ms if finished else None,
    }  # fmt: skip
    if ended is None:
        assert started is not None
        return row | {"incarnation": started.incarnation, "last": False, "model_tokens": 0, "offset": -1}
    event = ended.event
    return row | {
        "incarnation": event.incarnation, "outcome": event.outcome, "reason": event.reason, "boundary": event.boundary,
        "reward": event.reward, "last": event.ends_slot, "model_tokens": event.model_tokens, "offset": ended.offset,
    }  # fmt: skip


def _decided(source: LogSource) -> Iterator[tuple[Told, Fact[GroupClosed] | None, Fate, int]]:
    fates = Fates(source)
    try:
        for partition in range(source.partitions(GROUPS)):
            for told, closed in closures(source, partition):
                if closed is None:
                    yield told, None, Fate(OPEN), partition
                elif closed.event.closure == Closure.CANDIDATE:
                    yield told, closed, fates.of(told.group), partition
                else:
                    yield told, closed, Fate(closed.event.closure), partition
    finally:
        fates.close()


# ----------------------------------------------------------------------------------------------- batches, versions


def batches(source: LogSource) -> Iterator[Row]:
    """Of every manifest; what was trained and masked is null until its version is committed."""
    committed = {
        event.batch: (event.version, sum(c.trained for c in event.groups), sum(c.masked for c in event.groups),
                      event.committed_ms)
        for event in (fact.event for fact in read_facts(source, POLICY, 0, Failures()))
        if isinstance(event, Version) and event.version
    }  # fmt: skip
    for fact in read_facts(source, BATCHES, 0, Failures()):
        if not isinstance(event := fact.event, Manifest):
            continue
        version, trained, masked, at = committed.get(event.batch, (None, None, None, None))
        yield {
            "batch": event.batch, "target": event.target, "version": version, "groups": len(event.groups),
            **_segments(event), "trained_tokens": trained, "masked_tokens": masked, "reused": len(event.reused),
            "closures_since": event.closures_since, "settings_offset": event.settings_offset,
            "decided_ms": event.decided_ms, "committed_ms": at, "offset": fact.offset,
        }  # fmt: skip


def _segments(event: Manifest) -> Row:
    """Means over tokens."""
    counts = unpack_int32(event.segment_count).astype(np.float64)
    lags = event.target - unpack_int32(event.segment_version)
    weights, drifts = unpack_float32(event.segment_weight), unpack_float32(event.segment_drift).astype(np.float64)
    tokens, known = counts.sum(), np.isfinite(drifts)
    drifted = counts[known].sum()
    return {
        "model_tokens": int(tokens), "weighted_tokens": int(counts[weights > 0].sum()),
        "weight_mean": float(counts @ weights / tokens) if tokens else None,
        "lag_mean": float(counts @ lags / tokens) if tokens else None,
        "lag_max": int(lags.max()) if lags.size else None,
        "drift_mean": float(counts[known] @ drifts[known] / drifted) if drifted else None,
        "drift_max": float(drifts[known].max()) if known.any() else None,
    }  # fmt: skip


def versions(source: LogSource) -> Iterator[Row]:
    """Of every committed version, with its newest publication."""
    rows: dict[int, Row] = {}
    for fact in read_facts(source, POLICY, 0, Failures()):
        event = fact.event
        if isinstance(event, Version):
            told = event.metrics
            rows[event.version] = {
                "version": event.version, "parent": event.parent, "batch": event.batch if event.version else None,
                "committed_ms": event.committed_ms, "bytes": 0, "rho": event.rho, "rho_tokens": event.rho_tokens,
                "trained_tokens": sum(c.trained for c in event.groups),
                "masked_tokens": sum(c.masked for c in event.groups),
                **{name: told.get(name) for name in ("loss", "grad_norm", "learning_rate", "reward", "ess",
                                                     "mismatch_mean", "mismatch_max", "waiting_s", "fetching_s",
                                                     "compute_s")},
                "metrics": json.dumps(_finite(told)), "served_hash": event.served_hash.hex(), "offset": fact.offset,
            }  # fmt: skip
            if before := rows.get(event.version - 1):  # a version tells of the one before what came after its record
                before |= {name: told.get(name) for name in ("committing_s", "publishing_s")}
        elif isinstance(event, Publication) and (row := rows.get(event.version)):
            row["kind"], row["bytes"] = event.kind, row["bytes"] + event.size
            row.setdefault("published_ms", event.published_ms)
            row.setdefault("changed_share", event.changed / event.elements if event.elements else None)
    yield from rows.values()


# ------------------------------------------------------------------------------------------------------- the others


def replicas(source: LogSource) -> Iterator[Row]:
    """Of every heartbeat."""
    for fact in read_facts(source, FLEET, 0, Failures()):
        if isinstance(event := fact.event, Heartbeat):
            idle = [v for name, v in event.counters.items() if name.startswith("idle_") and name.endswith("_s")]
            yield {
                "worker": event.worker, "incarnation": event.incarnation, "heard_ms": fact.timestamp_ms,
                "version": event.version, "capacity": event.capacity, "free": event.free, "managed": event.managed,
                "sampled_tokens": event.counters.get("sampled_tokens"), "busy_s": event.counters.get("busy_s"),
                "idle_s": sum(idle) if idle else None, "counters": json.dumps(_finite(event.counters)),
                "engine": event.engine, "offset": fact.offset,
            }  # fmt: skip


def publications(source: LogSource) -> Iterator[Row]:
    """Of every version on every replica that took it: `PublicationClock` in milliseconds since the epoch."""
    for fact in read_facts(source, FLEET, 0, Failures()):
        if isinstance(event := fact.event, PublicationClock):
            clocks = {f"{step}_ms": getattr(event, f"{step}_ms") for step in CLOCKS}
            yield {"version": event.version, "worker": event.worker, "incarnation": event.incarnation, **clocks,
                   "offset": fact.offset}  # fmt: skip


def tasks(source: LogSource) -> Iterator[Row]:
    """Unlike the others it remembers each attempt and each answer, some 200 bytes: what is flaky shows in all alone."""
    found = TaskSet()
    for topic in (topics.TASKS, GROUPS):
        for partition in range(source.partitions(topic)):
            for fact in read_facts(source, topic, partition, Failures()):
                found.feed(fact)
    for one in found.health():
        about: Row = {
            "task": one.task, "state": one.state, "repeats": one.repeats.count, "contradicted": one.repeats.hits,
            "suspicious": one.suspicious, "lost": one.lost, "attempts": one.attempts,
        }  # fmt: skip
        for version, rate in one.by_version.items():
            yield about | {"version": version, "episodes": rate.count, "successes": rate.hits, "solved": rate.value,
                           "low": rate.low, "high": rate.high}  # fmt: skip


def evals(source: LogSource) -> Iterator[Row]:
    """Of every score of a suite."""
    for fact in read_facts(source, EVALS, 0, Failures()):
        event: Score = fact.event
        yield {
            "suite": event.suite, "version": event.version, "items": event.items, "scored": event.scored,
            "mean": event.mean, "standard_error": event.standard_error, "served_hash": event.served_hash.hex(),
            "sampling": event.sampling, "engine": event.engine, "evaluated_ms": event.evaluated_ms,
            "offset": fact.offset,
        }  # fmt: skip


def spans(source: LogSource) -> Iterator[Row]:
    """Of every readable span, without its columns."""
    for partition in range(source.partitions(TRAJECTORIES)):
        for record in source.records(TRAJECTORIES, partition):
            if kind_of(record.value) is Span:
                try:
                    event = decode(record.value)
                except UndecodableRecord:
                    continue
                assert isinstance(event, Span)
                yield _span(event) | {"partition": partition, "offset": record.offset, "logged_ms": record.timestamp_ms}


def _span(event: Span) -> Row:
    numbers = [run.version for run in event.versions]
    logprobs = event.behaviour_logprobs()
    return {
        "group": event.group, "slot": event.slot, "attempt": event.attempt, "incarnation": event.incarnation,
        "sequence": event.sequence, "source": event.source, "turn": event.turn, "parent": event.parent,
        "count": event.count, "version_min": min(numbers, default=None), "version_max": max(numbers, default=None),
        "logprob_mean": float(np.mean(logprobs, dtype=np.float64)) if logprobs is not None and logprobs.size else None,
        "stop_reason": event.stop_reason, "engine": event.engine, "detail": event.detail,
        "blob": event.blob.address if event.blob else None,
    }  # fmt: skip


def waits(source: LogSource) -> Iterator[Row]:
    """Of every attempt that ended: the milliseconds that each part of it took."""
    for partition in range(source.partitions(GROUPS)):
        ended: dict[str, list[Fact[AttemptEnded]]] = {}  # of open groups
        for fact in read_facts(source, GROUPS, partition, Failures()):
            if isinstance(fact.event, AttemptEnded):
                ended.setdefault(fact.event.group, []).append(fact)
            elif isinstance(fact.event, GroupClosed):
                for one in ended.pop(fact.event.group, ()):
                    yield from _steps(one, fact)
        for one in (one for group in ended.values() for one in group):
            yield from _steps(one, None)


def _steps(ended: Fact[AttemptEnded], closed: Fact[GroupClosed] | None) -> Iterator[Row]:
    event = ended.event
    about = {"group": event.group, "slot": event.slot, "attempt": event.attempt, "incarnation": event.incarnation,
             "task": closed.event.task if closed else None, "closed_ms": closed.timestamp_ms if closed else None,
             "partition": ended.partition, "offset": ended.offset}  # fmt: skip
    for step, wait_ms in event.timings_ms.items():
        yield about | {"step": step, "wait_ms": wait_ms}


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
