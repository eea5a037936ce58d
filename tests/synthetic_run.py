"""A run whose batches are written by hand: what the assembler and the coordinator would have put on the log.

Everything but offsets and times follows from a seed, so two runs of one seed train the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.create import create_run
from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.columns import pack_float32, pack_ids, pack_int32
from headrace.schemas.events import (
    GroupClosed,
    GroupPayload,
    GroupRef,
    Manifest,
    PartitionPosition,
    PayloadEpisode,
    PayloadSpan,
    Reuse,
    SampleRef,
    SlotFate,
    Task,
    VersionRun,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Closure, Outcome, Source
from headrace.schemas.payload import content_hash, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, GROUPS, SAMPLES, RunTopics
from headrace.streams.log.transactions import Output, Transactor

VOCABULARY = 259
PARTITIONS = 2


def run_settings(model: Path, **sections: Any) -> RunSettings:
    base: dict[str, Any] = {
        "model": {"path": str(model), "max_length": 128},
        "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": 4, "max_new_tokens": 16},
        "batch": {"groups": 3},
        "optimizer": {"learning_rate": 1e-4, "micro_batch_tokens": 256, "probe_tokens": 64},
        "weights": {"snapshot_every": 5},
        "checkpoint": {"every": 3, "keep": 2},
        "log": {"partitions": PARTITIONS},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return RunSettings.model_validate(base)


def span(source: Source, tokens: Any, logprobs: Any = None, versions: Sequence[int] = ()) -> PayloadSpan:
    column = np.asarray(tokens, np.int32)
    runs: list[VersionRun] = []
    for version in versions:
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(version, runs[-1].count + 1)
        else:
            runs.append(VersionRun(version, 1))
    packed = None if logprobs is None else pack_float32(np.asarray(logprobs, np.float32))
    return PayloadSpan(str(source), 0, -1, len(column), tuple(runs), pack_ids(column), packed, None)


def episode(slot: int, prompt: Any, tokens: Any, logprobs: Any, versions: Sequence[int], reward: float,
            temperature: float = 1.0) -> PayloadEpisode:  # fmt: skip
    outcome = Outcome.MODEL_SUCCESS if reward > 0 else Outcome.MODEL_FAILURE
    spans = (span(Source.PROMPT, prompt), span(Source.MODEL, tokens, logprobs, versions))
    return PayloadEpisode(slot, 0, "w", str(outcome), reward, temperature, spans, ())


def model_runs(one: PayloadEpisode) -> list[VersionRun]:
    return [run for s in one.spans for run in s.versions]


class SyntheticRun:
    """`write_random_batches` or `write_batch`; batch n targets version n - 1."""

    def __init__(self, kafka: Mapping[str, Any], run: str, settings: RunSettings) -> None:
        self.kafka, self.topics, self.settings = kafka, RunTopics(run), settings
        create_run(kafka, self.topics, settings)
        self._transactor = Transactor(kafka, self.topics.transactional_id("synthetic"))
        self._groups = [Chain() for _ in range(PARTITIONS)]
        self._batches = Chain()
        self._count = 0
        self.batch = 0

    def write_random_batches(self, count: int, seed: int = 0, reused: Sequence[Reuse] = ()) -> None:
        """Random prompts and tokens; plausible logprobs; every third group mixes two versions and lags by one."""
        for _ in range(count):
            rng = np.random.default_rng([seed, self.batch])
            groups = []
            for g in range(self.settings.batch.groups):
                prompt = rng.integers(3, VOCABULARY, rng.integers(4, 12))
                episodes = []
                for slot in range(self.settings.rollout.group_size):
                    n = int(rng.integers(2, 16))
                    lagged = max(0, self.batch - 1) if g % 3 == 2 else self.batch
                    versions = [lagged] * (n // 2) + [self.batch] * (n - n // 2)
                    tokens = rng.integers(3, VOCABULARY, n)
                    reward = float(tokens[0] % 2)
                    episodes.append(episode(slot, prompt, tokens, rng.normal(-5.5, 0.2, n), versions, reward))
                groups.append(episodes)
            self.write_batch(groups, reused=reused)

    def write_batch(self, groups: Sequence[Sequence[PayloadEpisode]], weight: float = 1.0, damage: str | None = None,
                    reused: Sequence[Reuse] = ()) -> int:  # fmt: skip
        """Samples, closures and the manifest; the manifest's offset. `damage` names what one record gets wrong."""
        refs, rows = [], []
        for index, episodes in enumerate(groups):
            group, partition = f"g{self._count:08d}", self._count % PARTITIONS
            self._count += 1
            payload = GroupPayload(group, Task(group, "test", "{}", 0), tuple(episodes))
            refs.append(self._close(payload, partition, damage if index == 0 else None))
            rows += [(index, e.slot, run.version, run.count) for e in episodes for run in model_runs(e)]
        columns = [pack_int32(np.array(column, np.int32)) for column in zip(*rows, strict=True)]
        self.batch += 1
        manifest = Manifest(
            **self._batches.link(), batch=self.batch, target=self.batch - 1, settings_offset=0, decided_ms=0,
            groups=tuple(refs), positions=(PartitionPosition(0, 0),), closures_since=len(refs),
            segment_group=columns[0], segment_slot=columns[1], segment_version=columns[2], segment_count=columns[3],
            segment_drift=pack_float32(np.full(len(rows), np.nan, np.float32)),
            segment_weight=pack_float32(np.full(len(rows), weight, np.float32)), reused=tuple(reused),
        )  # fmt: skip
        (offset,) = self._transactor.send([Output(self.topics.name(BATCHES), 0, self._batches.extend(manifest))])
        return offset

    def _close(self, payload: GroupPayload, partition: int, damage: str | None) -> GroupRef:
        values = [encode(chunk) for chunk in to_chunks(payload, limit=400)]
        if damage == "content":
            hashed = b"\1" * 16
        else:
            hashed = content_hash(payload)
        tokens = sum(run.count for e in payload.episodes for run in model_runs(e))
        fates = tuple(
            SlotFate(e.slot, e.attempt, e.incarnation, e.outcome, "stop", "none", e.reward, True,
                     sum(run.count for run in model_runs(e)), 0, tuple(model_runs(e))) for e in payload.episodes
        )  # fmt: skip
        chain = self._groups[partition].copy()

        def build(send: Any) -> int:
            nonlocal chain
            chain = self._groups[partition].copy()
            offsets = send([Output(self.topics.name(SAMPLES), partition, value) for value in values])
            digests = [digest(value) for value in values]
            if damage == "digest":
                digests[0] = b"\2" * 16
            if damage == "missing":
                offsets[-1] += 1  # the transaction's marker
            closed = GroupClosed(
                **chain.link(), cause=0, group=payload.group, closure=str(Closure.CANDIDATE), purpose="train",
                task=payload.task.id, opened=0, open_ms=0, flagged=None, slots=fates, accounts={"candidate": tokens},
                context_tokens=0, content_hash=hashed,
                samples=tuple(SampleRef(o, d) for o, d in zip(offsets, digests, strict=True)), held_up_by=0,
            )  # fmt: skip
            (offset,) = send([Output(self.topics.name(GROUPS), partition, chain.extend(closed))])
            assert isinstance(offset, int)
            return offset

        offset = self._transactor.commit(build)
        self._groups[partition] = chain
        return GroupRef(payload.group, partition, offset, hashed, tokens, 0)

    def send(self, outputs: Sequence[Output]) -> None:
        """Records as they are, without a place in any chain."""
        self._transactor.send(outputs)

    def close(self) -> None:
        self._transactor.close()
