"""A run on two modelled devices, for `benchmarks.staleness`: one samples, one trains, in virtual time.

Engine, training step and coordinator are Headrace's own; a tiny model really samples and really trains. Only time is
modelled: a group takes as long as it is drawn to (however many are under way, as on an engine with room), a step takes
1. What a group samples is sampled when it begins, on the weights that are served then; a version is served once its
step's time is over. There is no log between them: the coordinator sees the records themselves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.engines.hf import HfEngine
from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import (
    Disposed,
    GroupClosed,
    Heartbeat,
    Lease,
    Manifest,
    Publication,
    SlotFate,
    Version,
    VersionRun,
)
from headrace.schemas.outcomes import Closure, Outcome, Purpose
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, GROUPS, POLICY
from headrace.streams.coordinator import Coordinator
from headrace.trainer.batches import Episode, Group
from headrace.trainer.drift import beside_estimated
from headrace.trainer.step import StepSettings, TrainState

from ._virtual_log import LINK, Numbered, Place

WORDS = ("even", "odd")
SERVED_LONG = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What is sampled, and how long it takes (`duration(rng)`, in steps). `settings(share)`: of the training step, by
    the share of the run's time that is over."""

    model: Path
    slots: int
    tokens: int
    max_tokens: int
    temperature: float
    duration: Callable[[np.random.Generator], float]
    settings: Callable[[float], StepSettings]
    dtype: str = "bfloat16"


@dataclass(slots=True)
class Ran:
    """What a run came to."""

    versions: list[Version] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of all tokens sampled for training, by version
    trained_lags: list[tuple[int, int]] = field(default_factory=list)  # lag and tokens of segments with weight
    stale_lags: list[tuple[int, int]] = field(default_factory=list)  # and of those without, groups disposed of too
    time: float = 0.0
    reward: float = 0.0  # of the last version, on episodes of its own

    def counted(self, manifest: Manifest) -> None:
        columns = (unpack_int32(manifest.segment_version), unpack_int32(manifest.segment_count),
                   unpack_float32(manifest.segment_weight))  # fmt: skip
        for version, tokens, weight in zip(*(column.tolist() for column in columns), strict=True):
            (self.trained_lags if weight > 0 else self.stale_lags).append((manifest.target - version, tokens))

    @property
    def masked(self) -> float:
        """Share of the tokens that were decided upon and got no weight."""
        out, kept = (sum(tokens for _, tokens in one) for one in (self.stale_lags, self.trained_lags))
        return out / max(1, out + kept)

    @property
    def trained(self) -> float:
        """Tokens with weight, per unit of time."""
        return sum(tokens for _, tokens in self.trained_lags) / self.time


def settings(groups: int, siblings: int, max_lag: int, **staleness: Any) -> RunSettings:
    return RunSettings.model_validate({
        "model": {"path": "unused"}, "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": siblings, "zero_variance": "keep", "lease_timeout_s": 1e9},
        "batch": {"groups": groups, "max_lag": max_lag},
        "staleness": {"hard_lag": SERVED_LONG, "drift_limit": 1e9} | staleness,
    })  # fmt: skip


class World:
    def __init__(self, load: Load, rules: RunSettings, seed: int) -> None:
        self._load, self._rules, self._seed = load, rules, seed
        self._rng = np.random.default_rng(seed)
        self._state = TrainState(load.model, dtype=load.dtype)
        self._engine = HfEngine(load.model, slots=load.slots, max_tokens=load.max_tokens, dtype=load.dtype)
        self._coordinator = Coordinator(rules, Numbered("staleness"))
        self._offset, self.now, self._numbers = 0, 0.0, itertools.count()
        self._sampled: dict[str, tuple[Group, int]] = {}  # and the version that sampled it
        self._events: list[tuple[float, int, Any]] = []
        self._due: list[Manifest] = []
        self._training = False
        self.ran = Ran()

    def run(self, until: float, versions: int | None = None) -> Ran:
        """Until that time, or so many versions."""
        self._until = until
        self._observe(FLEET, Heartbeat("w", "w0", 0, SERVED_LONG, SERVED_LONG, True, "{}", {}))
        self._served(self._version(0, None, 0.0, 0))
        while self.ran.time < until and (versions is None or len(self.ran.versions) < versions):
            self._turn()
            self.now, _, event = heapq.heappop(self._events)
            if self.now > until:
                break
            self.ran.time = self.now
            if isinstance(event, GroupClosed):
                self._observe(GROUPS, event)
            else:
                self._training = False
                self._engine.apply(event.version, {n: (None, b.reshape(-1)) for n, b in
                                                   self._state.served_bits().items()})  # fmt: skip
                self.ran.versions.append(event)
                self._served(event)
        self.ran.reward = float(np.mean([e.reward for group in self._sample(["eval"] * 32, 1_000_000)
                                         for e in group.episodes]))  # fmt: skip
        return self.ran

    def _turn(self) -> None:
        """Everything that may begin now."""
        while decision := self._coordinator.decide(int(self.now * 1000)):
            leases = [one for one in decision.trajectories if isinstance(one, Lease)]
            groups = self._sample([lease.group for lease in leases], int(leases[0].task.id) if leases else 0)
            for lease, group in zip(leases, groups, strict=True):
                self._sampled[lease.group] = group, self._engine.version
                self._put(self.now + self._load.duration(self._rng), self._closed(lease, group))
            for entry, _ in decision.batches:
                if isinstance(entry, Manifest):
                    self._due.append(entry)
                elif isinstance(entry, Disposed):
                    group, version = self._sampled.pop(entry.group)
                    self.ran.stale_lags.append((entry.target - version, sum(len(e.tokens) for e in group.episodes)))
        if self._due and not self._training:
            self._training = True
            manifest = self._due.pop(0)
            self.ran.counted(manifest)
            groups = self._groups(manifest)
            step = self._load.settings(min(1.0, self.now / self._until))
            report = self._state.train_batch(groups, manifest.target, step)
            self.ran.rewards.append(report.reward_mean)
            made = self._version(report.version, manifest, report.rho, report.probe_tokens)
            made = replace(made, realised=beside_estimated(report.lags, manifest), rho_noise=report.rho_noise)
            self._put(self.now + 1.0, made)

    # ------------------------------------------------------------------------------------------------ sampling

    def _sample(self, names: Sequence[str], first: int) -> list[Group]:
        """One group for each name, on the weights that are served now. Its reward: the share of tokens whose ids are
        even, or odd, as the prompt asks."""
        size, load = self._rules.rollout.group_size, self._load
        prompts = [self._engine.encode_chat([{"role": "user", "content": WORDS[(first + n) % 2]}])
                   for n in range(len(names))]  # fmt: skip
        for n, prompt in enumerate(prompts):
            for slot in range(size):
                seed = ((self._seed * 2_000_003 + first + n) * 64 + slot) * 1_000 + self._engine.version
                self._engine.submit(GenerationRequest(f"{n}/{slot}", prompt, Sampling(load.temperature, load.tokens,
                                                                                     seed)))  # fmt: skip
        found: dict[str, list[Any]] = {}
        while self._engine.active:
            for progress in self._engine.step():
                found.setdefault(progress.request_id, []).append(progress)
        return [Group(name, tuple(self._episode(slot, prompts[n], found[f"{n}/{slot}"], (first + n) % 2)
                                  for slot in range(size)))
                for n, name in enumerate(names)]  # fmt: skip

    def _episode(self, slot: int, prompt: Sequence[int], steps: Sequence[Any], parity: int) -> Episode:
        tokens = np.concatenate([step.token_ids for step in steps])
        ones = np.ones(len(tokens), np.float32)
        return Episode(slot, np.array(prompt, np.int32), tokens, ones > 0,
                       np.concatenate([step.logprobs for step in steps]),
                       np.full(len(tokens), steps[0].version, np.int32), ones,
                       float(np.mean(tokens % 2 == parity)), True, self._load.temperature)  # fmt: skip

    def _groups(self, manifest: Manifest) -> list[Group]:
        """The manifest's groups, with its staleness weights where they are 0 (as `staleness.apply = auto` has it)."""
        groups = [self._sampled.pop(ref.group)[0] for ref in manifest.groups]
        rows = zip(unpack_int32(manifest.segment_group).tolist(), unpack_int32(manifest.segment_slot).tolist(),
                   unpack_float32(manifest.segment_weight).tolist(), strict=True)  # fmt: skip
        zero = {(number, slot) for number, slot, weight in rows if weight <= 0}
        return [replace(group, episodes=tuple(
            replace(one, weights=np.zeros_like(one.weights)) if (number, one.slot) in zero else one
            for one in group.episodes)) for number, group in enumerate(groups)]  # fmt: skip

    # ------------------------------------------------------------------------------------------------- records

    def _put(self, at: float, event: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _observe(self, topic: str, event: Any) -> None:
        self._offset += 1
        self._coordinator.observe(topic, Place(self._offset, int(self.now * 1000)), event)

    def _closed(self, lease: Lease, group: Group) -> GroupClosed:
        fates = tuple(SlotFate(e.slot, 0, "w0", Outcome.MODEL_SUCCESS, "stop", "none", e.reward, True, len(e.tokens),
                               len(e.prompt), (VersionRun(int(e.versions[0]), len(e.tokens)),))
                      for e in group.episodes)  # fmt: skip
        tokens = sum(fate.model_tokens for fate in fates)
        return GroupClosed(**LINK, cause=0, group=lease.group, closure=Closure.CANDIDATE, purpose=Purpose.TRAIN,
                           task=lease.task.id, opened=0, open_ms=0, flagged=None, slots=fates,
                           accounts={"candidate": tokens}, context_tokens=0, content_hash=b"0" * 16, samples=(),
                           held_up_by=0)  # fmt: skip

    def _version(self, number: int, manifest: Manifest | None, rho: float, tokens: int) -> Version:
        return Version(**LINK, writer="t", version=number, parent=number - 1, batch=manifest.batch if manifest else -1,
                       batch_offset=0, batch_digest=b"", hash_algorithm="", served_hash=b"", train_hash=b"", rho=rho,
                       rho_tokens=tokens, groups=(), metrics={}, fingerprint="{}", committed_ms=0)  # fmt: skip

    def _served(self, version: Version) -> None:
        self._observe(POLICY, version)
        self._observe(POLICY, Publication(**LINK, writer="t", version=version.version, kind="path", base=-1,
                                          base_hash=b"", hash_algorithm="", served_hash=b"", path="x", chunks=(),
                                          size=0, changed=0, elements=0, published_ms=0))  # fmt: skip
