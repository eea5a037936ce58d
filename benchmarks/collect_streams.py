"""Headrace's own streams as the collector of a simulation: the real coordinator and the real fold, without a broker.

Records go from one to the other as they do through the log, one partition, in virtual time. A version is committed and
published with its manifest, so that sampling alone takes time; the weights stay. Every group that closes is a
candidate (`zero_variance = keep`), nothing expires, and staleness only measures: no arm throws anything away.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.schemas.events import (
    AttemptEnded,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    Span,
    Version,
    VersionRun,
)
from headrace.schemas.outcomes import Outcome, Source
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, GROUPS, POLICY
from headrace.streams.assembler import Closed, Fold
from headrace.streams.coordinator import Coordinator

from ._virtual_log import LINK, Numbered, Place
from .collect_parameters import GROUP_SIZE, UNLIMITED_LAG

FOREVER_S = 1e9
INCARNATION = "w0"


def settings(groups: int, max_lag: int | None, group_size: int = GROUP_SIZE) -> RunSettings:
    """Of a run that only collects."""
    lag = UNLIMITED_LAG if max_lag is None else max_lag
    return RunSettings.model_validate({
        "model": {"path": "unused"}, "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": group_size, "zero_variance": "keep", "deadline_s": FOREVER_S, "max_age_s": FOREVER_S,
                    "lease_timeout_s": FOREVER_S},
        "batch": {"groups": groups, "max_lag": lag},
        "staleness": {"hard_lag": UNLIMITED_LAG}, "log": {"commit_ms": 100},
    })  # fmt: skip


class Streams:
    """`admit`, `ended` and `version` as `collect_virtual.Collector` says. `capacity`: slots that the worker takes
    leases for, with those that wait in its scheduler."""

    def __init__(self, groups: int, max_lag: int | None, capacity: int) -> None:
        self._coordinator = Coordinator(settings(groups, max_lag), Numbered("collect"))
        self._fold, self._groups = Fold(), groups
        self._offset, self.now_ms = 0, 0
        self.version = 0
        self._admitted: list[int] = []
        self._names: dict[int, str] = {}
        self._leased: dict[int, int] = {}  # slots of a group
        self._bounded = max_lag is not None
        self._indexes: dict[str, int] = {}
        self._observe(FLEET, Heartbeat("w", INCARNATION, 0, capacity, 0, True, "{}", {}))
        self._publish(0, -1)
        self._decide()

    def admit(self, waiting: int) -> list[int]:
        admitted, self._admitted = self._admitted, []
        return admitted

    def foresee(self) -> list[int]:
        return []  # leases alone say what is to come

    def began(self, group: int, slot: int) -> None:
        self._feed(EpisodeStarted(self._names[group], slot, 0, INCARNATION, 0, "w", "{}", 1.0, 1.0, 0, 1, 0, 0))

    def ended(self, group: int, slot: int, versions: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        name, count = self._names[group], sum(tokens for _, tokens in versions)
        runs = tuple(VersionRun(version, tokens) for version, tokens in versions)
        self._feed(Span(name, slot, 0, INCARNATION, 1, Source.MODEL, 0, -1, count, runs, None, None, None, {}, b"",
                        None, None, None))  # fmt: skip
        closed = self._feed(EpisodeEnded(name, slot, 0, INCARNATION, 2, Outcome.MODEL_SUCCESS, "stop", "none",
                                         float(slot % 2), {}, (), None, 0, {}))  # fmt: skip
        # A closure moves its group from the open ones to the candidates: no room comes of it, and nothing is decided
        # before there are candidates for a batch. Without a bound on the lag, each slot that ends gives room for one.
        due = closed and len(self._coordinator.batching.candidates) >= self._groups
        return self._decide() if due or not self._bounded else []

    # ------------------------------------------------------------------------------------------------- the log

    def _feed(self, event: Event) -> bool:
        """An event into `trajectories`, and what the fold makes of it to the coordinator. Whether a group closed."""
        self._offset += 1
        # The fold takes the bytes only as the event's identity: equal ones would be a repeat.
        closed = False
        for effect in self._fold.apply(Place(self._offset, self.now_ms, self._offset.to_bytes(8, "little")), event):
            if isinstance(effect, Closed):
                closed = True
                self._observe(GROUPS, replace(effect.record, content_hash=b"0" * 16))
            elif isinstance(effect, AttemptEnded):
                self._observe(GROUPS, effect)
            else:
                raise AssertionError(f"the fold says {effect}")
        return closed

    def _observe(self, topic: str, event: Event) -> None:
        self._offset += 1
        self._coordinator.observe(topic, Place(self._offset, self.now_ms, b""), event)

    def _decide(self) -> list[list[tuple[int, int]]]:
        """Batches that are made now: (group, lag) of each group."""
        batches = []
        while decision := self._coordinator.decide(self.now_ms):
            for lease in decision.trajectories:
                self._feed(lease)
                assert isinstance(lease, Lease), f"a slot was given up: {lease}"
                index = int(lease.task.id)
                self._names[index], self._indexes[lease.group] = lease.group, index
                # Where the worker's capacity is the only bound, a group may be leased in parts.
                self._leased[index] = self._leased.get(index, 0) + len(lease.assignments)
                if self._leased[index] == lease.spec.slots:
                    self._admitted.append(index)
            for entry, _ in decision.batches:
                assert isinstance(entry, Manifest), f"a group was disposed of: {entry}"
                batches.append([(self._indexes[ref.group], ref.max_lag) for ref in entry.groups])
                self._publish(entry.batch, entry.target)
        return batches

    def _publish(self, version: int, parent: int) -> None:
        link = LINK | {"writer": "t"}
        self.version = version
        self._observe(POLICY, Version(**link, version=version, parent=parent, batch=version or -1, batch_offset=0,
                                      batch_digest=b"", hash_algorithm="", served_hash=b"", train_hash=b"", rho=0.0,
                                      rho_tokens=0, groups=(), metrics={}, fingerprint="{}",
                                      committed_ms=0))  # fmt: skip
        self._observe(POLICY, Publication(**link, version=version, kind="path", base=-1, base_hash=b"",
                                          hash_algorithm="", served_hash=b"", path="x", chunks=(), size=0, changed=0,
                                          elements=0, published_ms=0))  # fmt: skip
