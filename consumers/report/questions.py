"""The figures behind the six questions that `figures` and the ledger don't have: policy freshness, numerical alignment,
environment reliability, weight publication, evaluation.

Pure folds over records of the small topics. What the log can't support is None, never 0.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import Alignment as AlignmentVerdict
from headrace.schemas.events import (
    AttemptEnded,
    Disposed,
    GroupClosed,
    Manifest,
    Publication,
    PublicationClock,
    ReplicaAlignment,
    Score,
    Version,
)
from headrace.schemas.outcomes import REASON_WEIGHTS, Disposition, Outcome, Purpose
from headrace.schemas.settings import WeightSettings
from headrace.schemas.suspicion import Answers

from ..facts import Fact
from ..figures import Quantiles, quantiles
from ..health import LOST, Alert, TaskHealth, task_set
from ..tables import suspicions

INACTIVE = 0.02  # a staleness rule whose weights all lie so near to 1 changes nothing (DESIGN, section 6)


# ------------------------------------------------------------------------------------------------ policy freshness


@dataclass(frozen=True, slots=True)
class BatchFreshness:
    """Means over the batch's model tokens. Drift in nats squared, None where none is known."""

    batch: int
    tokens: int
    lag_mean: float
    lag_max: int
    drift_mean: float | None
    drift_max: float | None
    weight_mean: float
    weight_min: float
    masked: float  # share of tokens that the coordinator gave weight 0


@dataclass(frozen=True, slots=True)
class Freshness:
    """How old what is trained is: lag, drift and weights as the manifests recorded them."""

    batches: tuple[BatchFreshness, ...]
    drift: Quantiles | None  # over all tokens of manifests with a known drift
    weights: Quantiles | None  # over all tokens of manifests
    masked_tokens: int  # with weight 0
    stale_groups: int  # disposed of as stale

    @property
    def rule_active(self) -> bool:
        """Whether any staleness weight differs from 1 by more than 2 %."""
        return any(batch.weight_min < 1 - INACTIVE for batch in self.batches)


def freshness(facts: Iterable[Fact[Any]]) -> Freshness:
    """From the manifests and dispositions of `batches`. Quantiles are over tokens, drift in nats squared."""
    batches, weights, drifts, masked, stale = [], list[Any](), list[Any](), 0, 0
    for fact in facts:
        event = fact.event
        stale += isinstance(event, Disposed) and event.disposition == Disposition.STALE
        if not isinstance(event, Manifest):
            continue
        counts, weight = unpack_int32(event.segment_count), unpack_float32(event.segment_weight).astype(np.float64)
        lag = event.target - unpack_int32(event.segment_version)
        drift = unpack_float32(event.segment_drift).astype(np.float64)
        tokens, known = int(counts.sum()), np.isfinite(drift)
        if not tokens:
            continue
        zero = int(counts[weight <= 0].sum())
        masked += zero
        weights.append(np.repeat(weight, counts))
        drifts.append(np.repeat(drift[known], counts[known]))
        with_drift = int(counts[known].sum())
        batches.append(BatchFreshness(
            event.batch, tokens, float(counts @ lag / tokens), int(lag.max()),
            float(counts[known] @ drift[known] / with_drift) if with_drift else None,
            float(drift[known].max()) if with_drift else None, float(counts @ weight / tokens), float(weight.min()),
            zero / tokens,
        ))  # fmt: skip
    return Freshness(tuple(batches), quantiles(np.concatenate(drifts)) if drifts else None,
                     quantiles(np.concatenate(weights)) if weights else None, masked, stale)  # fmt: skip


# --------------------------------------------------------------------------------------------- numerical alignment


@dataclass(frozen=True, slots=True)
class VersionAlignment:
    """|trainer's minus engine's log-probability| in nats, over the batch's tokens that its target version sampled."""

    version: int
    mean: float | None
    max: float | None
    tokens: int
    ess: float | None  # effective sample size of the importance weights, as a share of the tokens
    rho: float  # RMS change of log-probability by this version's step, nats
    bias: float | None  # mean importance ratio minus 1, before correction
    bias_left: float | None  # mean weight minus 1 on the alignment's tokens, after it
    kind: str | None  # the trainer's verdict on the engine: aligned, noise, meaning, biased; None: no fresh episode
    what: str | None  # what the engine's log-probabilities are, where the kind is `meaning`


@dataclass(frozen=True, slots=True)
class ProbeAlignment:
    """One engine's tokens in replicas' probes of one way to compute them: `prefill` or `decode`. Where weights are
    rounded to a grid for the forward, `engine` says on which side, so that what it does to the mismatch shows."""

    engine: str
    way: str
    replicas: int
    tokens: int
    mismatch: float  # RMS of engine minus trainer, winsorised at 1, nats
    bias_left: float  # mean weight minus 1, after the correction
    kinds: dict[str, int]  # probes by verdict
    wrong: str | None  # the newest one that is none of rounding: which replica, at which version, and what it means


@dataclass(frozen=True, slots=True)
class Alignment:
    """Whether engine and trainer compute the same log-probabilities for the tokens of lag 0, in nats."""

    versions: tuple[VersionAlignment, ...]
    mean: float | None  # over all those tokens
    worst: VersionAlignment | None  # by `max`
    probes: tuple[ProbeAlignment, ...] = ()  # by engine and way; no policy change is in them, whatever the lag

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.versions)

    @property
    def wrong(self) -> VersionAlignment | None:
        """The newest version whose engine meant something else than the trainer, or leaned to one side."""
        return next((one for one in reversed(self.versions) if one.kind in ("meaning", "biased")), None)


def alignment(facts: Sequence[Fact[Any]]) -> Alignment:
    """From what each version's step measured (`Version.metrics`), and what it found of replicas' probes."""
    rows = []
    for fact in facts:
        if isinstance(event := fact.event, Version) and event.version:
            told = event.metrics
            rows.append(VersionAlignment(event.version, told.get("mismatch_mean"), told.get("mismatch_max"),
                                         int(told.get("mismatch_tokens", 0)), told.get("ess"), event.rho,
                                         told["ratio_mean"] - 1 if "ratio_mean" in told else None,
                                         *_verdict(event)))  # fmt: skip
    known = [row for row in rows if row.mean is not None and row.tokens]
    tokens = sum(row.tokens for row in known)
    mean = sum((row.mean or 0.0) * row.tokens for row in known) / tokens if tokens else None
    return Alignment(tuple(rows), mean, max(known, key=lambda row: row.max or 0.0, default=None), _probes(facts))


def _probes(facts: Sequence[Fact[Any]]) -> tuple[ProbeAlignment, ...]:
    told: dict[tuple[str, str], list[tuple[ReplicaAlignment, AlignmentVerdict]]] = {}
    for fact in facts:
        for one in fact.event.replicas if isinstance(fact.event, Version) else ():
            engine = _computed(json.loads(one.engine), json.loads(fact.event.fingerprint))
            for way, found in (("prefill", one.prefill), ("decode", one.decode)):
                if found is not None:
                    told.setdefault((engine, way), []).append((one, found))
    return tuple(_probe(engine, way, found) for (engine, way), found in sorted(told.items()))


def _computed(engine: dict[str, str], trainer: dict[str, str]) -> str:
    """How both sides compute, by their fingerprints."""
    here, there = engine.get("quantisation", "none"), trainer.get("quantisation", "none")
    name = str(engine.get("engine", "engine"))
    return name if here == there == "none" else f"{name} (weights on {here}, the trainer's on {there})"


def _probe(engine: str, way: str, found: Sequence[tuple[ReplicaAlignment, AlignmentVerdict]]) -> ProbeAlignment:
    tokens = sum(one.tokens for _, one in found)
    wrong = next(((replica, one) for replica, one in reversed(found) if one.kind in ("meaning", "biased")), None)
    return ProbeAlignment(
        engine, way, len({replica.worker for replica, _ in found}), tokens,
        math.sqrt(sum(one.mismatch * one.tokens for _, one in found) / tokens),
        sum(one.bias * one.tokens for _, one in found) / tokens, dict(Counter(one.kind for _, one in found)),
        wrong and f"{wrong[0].worker} at version {wrong[0].version}: "
        + (wrong[1].what if wrong[1].kind == "meaning" else "to one side"),
    )  # fmt: skip


def _verdict(event: Version) -> tuple[float | None, str | None, str | None]:
    found = event.alignment
    return (None, None, None) if found is None else (found.bias, found.kind, found.what)


# ----------------------------------------------------------------------------------------- environment reliability


@dataclass(frozen=True, slots=True)
class Reliability:
    """What attempts ended with, who was at fault, and which tasks teach nothing."""

    outcomes: dict[str, int]  # attempts by outcome
    failures: dict[str, int]  # attempts that are no success, by "boundary: reason"
    lost_by_boundary: dict[str, int]  # infrastructure's and unknown ones
    retried: int  # attempts beyond the first of a slot
    without_verdict: int  # attempts whose scorer gave none
    tasks: tuple[TaskHealth, ...]  # most groups first
    alerts: tuple[Alert, ...]  # tasks that lose attempts more often than others, or more often with each version
    successes: int  # of closed groups
    suspicious: dict[str, int]  # of these, with a sign that the reward was not earned; by the first sign
    excluded: int  # of these, left out of training for it

    @property
    def attempts(self) -> int:
        return sum(self.outcomes.values())

    @property
    def lost(self) -> int:
        return sum(self.lost_by_boundary.values())

    def tasks_that_are(self, state: str) -> list[TaskHealth]:
        """Most groups first."""
        return [task for task in self.tasks if task.state == state]

    @property
    def suspicious_share(self) -> float | None:
        """Of the successes of closed groups."""
        return sum(self.suspicious.values()) / self.successes if self.successes else None


def reliability(facts: Sequence[Fact[Any]]) -> Reliability:
    """From attempts and closures of `groups`; surplus attempts are nobody's outcome."""
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    boundaries: Counter[str] = Counter()
    signs: Counter[str] = Counter()
    found = task_set(facts)
    closed = [event for fact in facts if isinstance(event := fact.event, GroupClosed)
              and event.purpose == Purpose.TRAIN]  # fmt: skip
    answers = Answers.of(closed)
    successes = excluded = 0
    for slot in (slot for group in closed for slot in group.slots):
        successes += slot.outcome == Outcome.MODEL_SUCCESS
        excluded += slot.excluded
        if some := suspicions(slot, answers):
            signs[some[0].sign] += 1
    retried = silent = 0
    for fact in facts:
        if not isinstance(event := fact.event, AttemptEnded) or event.reason == "surplus":
            continue  # a reserve that was not needed has not failed
        outcomes[event.outcome] += 1
        retried += event.attempt > 0
        silent += event.boundary == "scorer"
        if event.outcome != Outcome.MODEL_SUCCESS:
            failures[f"{event.boundary}: {event.reason}"] += 1
        if event.outcome in LOST:
            boundaries[event.boundary] += 1
    return Reliability(dict(outcomes), dict(failures.most_common()), dict(boundaries.most_common()), retried, silent,
                       found.health(), found.alerts(), successes, dict(signs.most_common()), excluded)  # fmt: skip


# ---------------------------------------------------------------------------------------------- weight publication

# Name, from which clock, to which.
LEGS = (("fetch", "published", "fetched"), ("decode", "fetched", "decoded"), ("wait for a step", "decoded", "paused"),
        ("apply", "paused", "applied"), ("resume", "applied", "resumed"),
        ("first token", "resumed", "first_token"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Delivery:
    """One version at one replica. Seconds; a leg whose clocks are missing is left out."""

    version: int
    worker: str
    legs: dict[str, float]
    latency_s: float | None  # from publication to the weights in place
    pause_s: float | None  # decoding stood still


@dataclass(frozen=True, slots=True)
class Transport:
    """How versions reach the engines: times, bytes, and what became of requests that were running."""

    deliveries: tuple[Delivery, ...]
    legs: dict[str, Quantiles]
    latency_s: Quantiles | None
    pause_s: Quantiles | None
    commit_to_publication_s: Quantiles | None
    sizes: dict[int, int]  # bytes by version
    kinds: dict[str, int]  # publications by kind
    changed: Quantiles | None  # share of elements that a delta changes
    requests: str  # what the run's settings do to active requests when weights change
    caches: str  # and to their keys and values
    crossed: float | None  # share of the closed groups' episodes that several versions sampled
    cut_short: int  # attempts that a change of weights ended


def transport(facts: Sequence[Fact[Any]], weights: WeightSettings) -> Transport:
    """From publications, clocks and closures. `weights` names the policy for running requests."""
    deliveries, sizes, kinds, changed = [], Counter[int](), Counter[str](), []
    committed = {f.event.version: f.event.committed_ms for f in facts if isinstance(f.event, Version)}
    late, sampled, cut_short = [], list[bool](), 0
    for fact in facts:
        event = fact.event
        if isinstance(event, GroupClosed):
            sampled += [len({run.version for run in slot.versions}) > 1 for slot in event.slots if slot.versions]
        elif isinstance(event, AttemptEnded):
            cut_short += event.reason == REASON_WEIGHTS
        elif isinstance(event, PublicationClock):
            deliveries.append(_delivery(event))
        elif isinstance(event, Publication):
            sizes[event.version] += event.size
            kinds[event.kind] += 1
            if event.kind == "delta" and event.elements:
                changed.append(event.changed / event.elements)
            if event.version in committed:
                late.append(max(0, event.published_ms - committed[event.version]) / 1000)
    found = {name: quantiles([one.legs[name] for one in deliveries if name in one.legs]) for name, _, _ in LEGS}
    return Transport(
        tuple(deliveries), {name: value for name, value in found.items() if value},
        quantiles([one.latency_s for one in deliveries if one.latency_s is not None]),
        quantiles([one.pause_s for one in deliveries if one.pause_s is not None]),
        quantiles(late), dict(sizes), dict(kinds), quantiles(changed), weights.requests, weights.caches,
        sum(sampled) / len(sampled) if sampled else None, cut_short,
    )  # fmt: skip


def _delivery(event: PublicationClock) -> Delivery:
    def between(begin: str, end: str) -> float | None:
        first, last = getattr(event, f"{begin}_ms"), getattr(event, f"{end}_ms")
        return None if first is None or last is None else max(0.0, last - first) / 1000

    legs = {name: value for name, begin, end in LEGS if (value := between(begin, end)) is not None}
    return Delivery(event.version, event.worker, legs, between("published", "applied"), between("paused", "resumed"))


# ------------------------------------------------------------------------------------------------------ evaluation


@dataclass(frozen=True, slots=True)
class Suite:
    """Scores of one suite, by version."""

    name: str
    scores: tuple[Score, ...]

    @property
    def rise(self) -> float | None:
        """Newest minus oldest version's score; None with only one."""
        return self.scores[-1].mean - self.scores[0].mean if len(self.scores) > 1 else None

    @property
    def rise_error(self) -> float | None:
        """Standard error of that difference, the two taken as independent."""
        first, last = self.scores[0], self.scores[-1]
        return float(np.hypot(first.standard_error, last.standard_error)) if len(self.scores) > 1 else None


def evaluation(scores: Iterable[Score]) -> tuple[Suite, ...]:
    """Scores by suite, each suite's by version and then by time."""
    suites: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        suites[score.suite].append(score)
    return tuple(Suite(name, tuple(sorted(found, key=lambda s: (s.version, s.evaluated_ms))))
                 for name, found in suites.items())  # fmt: skip
