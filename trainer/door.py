"""The door for other trainers: batches out as tensors, weights in by version.

    trainer = open_trainer("demo", kafka)
    for batch in trainer.batches():
        loss = ...                                   # over batch.padded()
        trainer.publish(batch.version, model.state_dict())

Whoever trains this way owns the run's versions as our own trainer does: a second one fences the first. Optimizer state
and restarts are its own affair; `version` says where the log stands. Recorded staleness weights are in the batches
(`staleness.apply = "auto"`), since this trainer may have no exact ratios.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.errors import ReplayMismatch, WeightsRefused
from headrace.schemas.events import GroupCount, Version
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log.hanging import check_settled
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Transactor

from .batches import counted
from .fetch import Batch
from .inbox import Inbox
from .loop import step_settings
from .publish import Policy, Publisher, read_policy
from .step import BITS, DTYPES, TrainState
from .weighing import batch_advantages


@dataclass(frozen=True, slots=True)
class TrainerBatch:
    """One batch, its sequences laid one after another; all tensors [t], t tokens.

    tokens int64; position int64, from 0 in each sequence; sequence int64: number of the sequence (an episode that
    branches has several); episode int64: number of the episode in the batch. sampled bool: the model sampled it and it
    may be trained. For sampled tokens: logprobs float32 (behaviour, nats, at `temperature`), versions int32, weights
    float32 (staleness, 0 masks), advantages float32 (by the run's `loss.advantage`); 0 for others.
    `version` is what its training makes: publish it under that. `groups` names the group of each episode.
    """

    version: int
    groups: tuple[str, ...]
    tokens: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    episode: torch.Tensor
    sampled: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    temperature: torch.Tensor

    def padded(self, pad: int = 0) -> dict[str, torch.Tensor]:
        """The same by sequence, [sequences, longest], padded on the right: `tokens` with `pad`, the rest with 0 or
        False; `attention` bool is True where there is a token."""
        counts = torch.bincount(self.sequence)
        place = self.sequence * int(counts.max()) + self.position
        shape = (len(counts), int(counts.max()))

        def laid(column: torch.Tensor, fill: int = 0) -> torch.Tensor:
            return torch.full((shape[0] * shape[1],), fill, dtype=column.dtype).scatter(0, place, column).view(shape)

        names = ("sampled", "logprobs", "versions", "weights", "advantages", "temperature", "episode", "position")
        return {"tokens": laid(self.tokens, pad), "attention": laid(torch.ones_like(self.sampled)),
                **{name: laid(getattr(self, name)) for name in names}}  # fmt: skip


class OpenTrainer:
    """Use `open_trainer`; one thread. Closing leaves the run as it stands."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings) -> None:
        self.settings = settings
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        check_settled(kafka, [(topics.name(POLICY), 0)])
        opened = open_settings(kafka, topics)
        head = read_policy(kafka, topics, opened)
        self._versions = head.versions
        self._policy = Policy(topics, self._transactor, head.chain)
        self._publisher = Publisher(kafka, topics, self._policy, settings.weights)
        self._publisher.remember(head.publications)
        self._inbox = Inbox(kafka, topics, opened, head)
        self._published = head.published
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._has_base = False
        self._taken: Batch | None = None

    @property
    def version(self) -> int:
        """The newest committed version; its weights are what the next batch trains. -1 before version 0."""
        return max(self._versions, default=-1)

    def begin(self) -> None:
        """Version 0 is the model folder of the run's settings. Called by `open_trainer`. Raises ModelError."""
        state = TrainState(self.settings.model.path, self.settings.model.dtype, lora=self.settings.model.lora)
        served = delta.as_state(state.served_bits(), self.settings.model.dtype)
        self._shapes = {name: tensor.bits.shape for name, tensor in served.items()}
        if self._versions:
            return
        served_hash = delta.state_hash(served)
        self._publisher.publish_initial(lambda **link: self._record(link, 0, None, served_hash),
                                        self.settings.model.path, served, served_hash)  # fmt: skip
        self._has_base, self._published = True, 0

    def batches(self, stop: threading.Event | None = None) -> Iterator[TrainerBatch]:
        """Each batch as soon as its manifest is on the log, for ever or until `stop` is set. A batch must have been
        published before the next one is asked for: they target its weights. Raises WeightsRefused
        where it wasn't, and what a fetch raises."""
        stop = stop or threading.Event()
        while True:
            if self._published < self.version or self._taken is not None:
                due = self.version if self._taken is None else self.version + 1
                raise WeightsRefused(f"version {due} is not published yet: call publish({due}, state_dict) before the "
                                     "next batch")  # fmt: skip
            record = self._inbox.next(stop)
            if record is None:
                return
            batch = self._inbox.fetch(record, self.version + 1)
            settings = self._inbox.settings(batch.manifest)
            if settings.staleness.apply == "auto":
                always = settings.staleness.model_copy(update={"apply": "always"})
                batch = self._inbox.fetch(record, self.version + 1, always)
            self._taken = batch
            yield _tensors(batch, self.version + 1, settings)

    def publish(self, version: int, state_dict: Mapping[str, torch.Tensor], metrics: Mapping[str, float] | None = None
                ) -> None:  # fmt: skip
        """Commit the version that the last batch made, and publish its weights, rounded to the published dtype. Names
        that version 0 doesn't have (tied tensors' second names) are passed over. After a restart, a version that was
        committed but not published is published here first, from the same weights.

        Raises WeightsRefused where the version isn't due or a tensor is missing, has another shape or isn't finite;
        ReplayMismatch where a committed version's weights are others; Fenced or LogError.
        """
        held = self._bits(state_dict)
        served = delta.as_state(held, self.settings.model.dtype)
        if version == self.version > self._published:
            served_hash, recorded = delta.state_hash(served), self._versions[version].served_hash
            if served_hash != recorded:
                raise ReplayMismatch(f"version {version} was committed with weights of hash {recorded.hex()}, these "
                                     f"have {served_hash.hex()}: publish those that were committed")  # fmt: skip
        elif self._taken is None or version != self.version + 1:
            raise WeightsRefused(f"version {version} is not due: the log stands at {self.version}, and "
                                 f"{'no batch is' if self._taken is None else 'one batch is'} taken")  # fmt: skip
        else:
            batch, base = self._taken, self._has_base
            changes, served_hash = self._publisher.compare(served) if base else ({}, delta.state_hash(served))
            self._policy.write(lambda **link: self._record(link, version, batch, served_hash, metrics))
            self._taken = None
            if base:
                self._publisher.publish(version, changes, served_hash)
                self._published = version
                return
        self._publisher.publish_snapshot(version, served, served_hash)  # its base is not at hand
        self._publisher.rebase(version, served, served_hash)
        self._has_base, self._published = True, version

    def _bits(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        dtype = DTYPES[self.settings.model.dtype]
        held = {}
        for name, shape in self._shapes.items():
            if name not in state_dict or tuple(state_dict[name].shape) != shape:
                found = f"has shape {tuple(state_dict[name].shape)}" if name in state_dict else "is missing"
                raise WeightsRefused(f"tensor {name!r} {found}: version 0 has it with shape {shape}")
            rounded = state_dict[name].detach().to("cpu", dtype).contiguous()
            if not bool(torch.isfinite(rounded).all()):
                raise WeightsRefused(f"tensor {name!r} holds NaN or an infinity: nothing was published")
            held[name] = rounded.view(BITS[dtype]).numpy()
        return held

    def _record(self, link: Mapping[str, Any], version: int, batch: Batch | None, served_hash: bytes,
                metrics: Mapping[str, float] | None = None) -> Version:  # fmt: skip
        counts = () if batch is None else tuple(_counts(batch))
        figures = dict(metrics or {})
        if batch is not None:
            figures |= {"lag_mean": batch.lag_mean, "lag_max": float(batch.lag_max),
                        "tokens": float(sum(count.trained for count in counts))}  # fmt: skip
        self._versions[version] = made = Version(
            **link, version=version, parent=version - 1, batch=0 if batch is None else batch.manifest.batch,
            batch_offset=-1 if batch is None else batch.offset, batch_digest=b"" if batch is None else batch.digest,
            hash_algorithm=delta.HASH_ALGORITHM, served_hash=served_hash, train_hash=served_hash, rho=0.0, rho_tokens=0,
            groups=counts, metrics=figures, fingerprint=json.dumps({"trainer": "open_trainer"}),
            committed_ms=int(time.time() * 1000),
        )  # fmt: skip
        return made

    def close(self) -> None:
        """Let go of the log; a publication that has begun is finished first."""
        self._inbox.close()
        self._publisher.close()
        self._transactor.close()

    def __enter__(self) -> OpenTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_trainer(run: str, kafka: Mapping[str, Any], *, prefix: str = "headrace") -> OpenTrainer:
    """Take the run's trainer over. Raises RunNotFound, BrokerUnreachable, ModelError, InvalidRecord."""
    topics = RunTopics(run, prefix)
    trainer = OpenTrainer(kafka, topics, open_settings(kafka, topics).settings)
    try:
        trainer.begin()
    except BaseException:
        trainer.close()
        raise
    return trainer


def _counts(batch: Batch) -> Iterator[GroupCount]:
    """Tokens handed out with a weight, and without."""
    for group in batch.groups:
        episodes = [e for e in group.episodes if e.counted]
        trained = sum(int((e.column("weights")[e.column("mask")] > 0).sum()) for e in episodes)
        yield GroupCount(group.group_id, trained, sum(int(e.column("mask").sum()) for e in episodes) - trained)


def _tensors(batch: Batch, version: int, settings: RunSettings) -> TrainerBatch:
    advantage = batch_advantages(batch.groups, step_settings(settings)).numpy()
    columns: dict[str, list[NDArray[Any]]] = {}
    members = counted(batch.groups)
    sequence = 0
    for number, (_, episode) in enumerate(members):
        for strand in episode.strands:
            context, n = len(strand.prompt), len(strand.prompt) + len(strand.tokens)
            may = strand.mask & (strand.weights > 0)
            own = {
                "tokens": np.concatenate([strand.prompt, strand.tokens]).astype(np.int64),
                "position": np.arange(n),
                "sequence": np.full(n, sequence),
                "episode": np.full(n, number),
                "sampled": np.concatenate([np.zeros(context, np.bool_), may]),
                "temperature": np.full(n, episode.temperature, np.float32),
            }
            for name, values in (("logprobs", strand.logprobs), ("weights", strand.weights),
                                 ("versions", strand.versions),
                                 ("advantages", np.full(len(may), advantage[number], np.float32))):  # fmt: skip
                kept = np.where(may, values, np.zeros_like(values))
                own[name] = np.concatenate([np.zeros(context, values.dtype), kept])
            for name, column in own.items():
                columns.setdefault(name, []).append(column)
            sequence += 1
    tensors = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    return TrainerBatch(version, tuple(group.group_id for group, _ in members), **tensors)
