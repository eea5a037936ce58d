"""Decides whether committed versions come out again as they were committed, and what would have come out otherwise.

A replay reads the log and this machine's checkpoints and writes nothing. It begins with the newest good checkpoint that
is no newer than where it is asked to begin, else with version 0; every batch is proved by its hashes on the way in, and
every version by its hashes on the way out. A counterfactual trains the same batches under other settings or with
another verifier's rewards, and is a run of its own in `policy`, beside the one whose batches it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.schemas import delta
from headrace.schemas.errors import ReplayMismatch, RunConflict, SettingsError
from headrace.schemas.events import COUNTERFACTUAL, Derived, GroupCount, Version
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, RunTopics
from headrace.schemas.verifier import Verifier
from headrace.streams.log.hanging import check_settled
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader
from headrace.streams.log.transactions import Transactor

from .checkpoint import Checkpoints, train_hash
from .fetch import Batch
from .history import differences
from .inbox import Inbox
from .loop import figures_of, fingerprint, initial, step_settings
from .publish import Policy, read_policy
from .ranks import Ranks
from .report import StepReport
from .rescore import rescored
from .retained import check_retained
from .step import TrainState

Change = Callable[[RunSettings], RunSettings]


@dataclass(frozen=True, slots=True)
class Again:
    """One version, trained again. `holds`: whether its recorded hashes must come out (a rebase passed over the others).
    `differs`: what of the fingerprint is another one here."""

    recorded: Version
    report: StepReport
    served_hash: bytes
    train_hash: bytes
    holds: bool
    differs: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return (self.served_hash, self.train_hash) == (self.recorded.served_hash, self.recorded.train_hash)


@dataclass(frozen=True, slots=True)
class Beside:
    """A version of the run, and what its batch made under the changes, as version `version` of the counterfactual.
    `ess`: of the batch's tokens under the trained policy, as a share."""

    recorded: Version
    version: int
    metrics: dict[str, float]
    ess: float


class Replay:
    """A run, to be trained again. Several may be open at a time, also beside the run's own trainer."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, state_dir: Path, device: str = "cpu") -> None:
        """Raises RunNotFound, InvalidRecord, and SettingsError for a counterfactual."""
        self._kafka, self._topics, self._state_dir, self._device = kafka, topics, state_dir, device
        opened = open_settings(kafka, topics)
        self.settings = opened.settings
        self._head = read_policy(kafka, topics, opened)
        if self._head.derived is not None and self._head.derived.kind == COUNTERFACTUAL:
            raise SettingsError(f"run {topics.run!r} is a counterfactual of {self._head.derived.parent!r}: replay that "
                                "one, with the same --set")  # fmt: skip
        self._inbox = Inbox(kafka, topics, opened, self._head)
        self._reader = Reader(kafka)

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return self._head.committed

    @property
    def cursor(self) -> int:
        """Where the run's tasks began."""
        return self._head.derived.cursor if self._head.derived is not None else 0

    def version(self, number: int) -> Version:
        """Raises SettingsError where there is none."""
        if number not in self._head.versions:
            raise SettingsError(f"run {self._topics.run!r} has versions 0 to {self.newest}, none of number {number}")
        return self._head.versions[number]

    def state_at(self, number: int) -> TrainState:
        """The train state of a version, proved: from the newest good checkpoint, trained again from there.

        Raises SettingsError, DataLossError naming all that is missing, ReplayMismatch, CheckpointError, ModelError.
        """
        wanted = self.version(number)
        here = Ranks(device=torch.device(self._device))
        state = initial(self.settings, self._state_dir, self._head.derived, here).state
        found = Checkpoints(self._state_dir / "checkpoints", 1).newest(self._head.history.known(number), number)
        if found is not None:
            state.load_state(found.tensors, found.metadata)
        path = self._head.history.path(number, after=state.version)
        check_retained(self._kafka, self._topics, path)
        for recorded in path:
            self._step(state, recorded)
        _, own_hash = _hashes(state, self.settings)
        if own_hash != wanted.train_hash:
            apart = ", ".join(differences(fingerprint(state, self.settings), wanted.fingerprint)) or "nothing"
            raise ReplayMismatch(
                f"version {number} came out as {own_hash.hex()}, and was committed as {wanted.train_hash.hex()}; of "
                f"the fingerprint differs: {apart}. Set that back, or begin with a version of which there is a "
                "checkpoint"
            )
        state.version = number
        return state

    def again(self, first: int, last: int) -> Iterator[Again]:
        """The versions that led from `first` to `last`, each as soon as it is trained again. Raises as `state_at`."""
        self._check(first, last)
        check_retained(self._kafka, self._topics, self._head.history.path(last, after=first))
        state = self.state_at(first)
        for recorded in self._head.history.path(last, after=first):
            report = self._step(state, recorded)
            served_hash, own_hash = _hashes(state, self.settings)
            holds = recorded.version not in self._head.history.loose
            yield Again(recorded, report, served_hash, own_hash, holds,
                        tuple(differences(fingerprint(state, self.settings), recorded.fingerprint)))  # fmt: skip

    def _check(self, first: int, last: int) -> None:
        self.version(first), self.version(last)
        path = self._head.history.path(last)
        if first >= last or (first and first not in {one.version for one in path}):
            raise SettingsError(f"version {first} did not lead to version {last} of run {self._topics.run!r}: choose "
                                f"from 0 and {', '.join(str(one.version) for one in path) or 'no other'}")  # fmt: skip

    def _step(self, state: TrainState, recorded: Version, change: Change = lambda settings: settings,
              judge: Callable[[Batch], Batch] = lambda batch: batch) -> StepReport:  # fmt: skip
        state.version = recorded.version - 1  # which the batch's target is, also behind versions that were given up
        batch = judge(self._inbox.recorded(recorded))
        settings = step_settings(change(self._inbox.settings(batch.manifest)))
        return state.train_batch(self._inbox.groups(batch), batch.manifest.target, settings, batch.reused)

    # ------------------------------------------------------------------------------------------- counterfactuals

    def counterfactual(self, topics: RunTopics, first: int, last: int, change: Change,
                       verifier: Verifier | None = None) -> Iterator[Beside]:  # fmt: skip
        """The batches that led from `first` to `last`, trained under changed settings from the weights of `first`, and
        recorded as versions 0, 1, ... of the run `topics`, which must have been created as this counterfactual. One
        that was broken off is gone through again, and must come out as it was recorded. Raises as `state_at`."""
        self._check(first, last)
        path = self._head.history.path(last, after=first)
        check_retained(self._kafka, self._topics, path)
        state = self.state_at(first)
        with _Record(self._kafka, topics) as record:
            record.version(0, state, self.settings, None, None)
            for number, recorded in enumerate(path, 1):
                batches: list[Batch] = []

                def judge(batch: Batch, taken: list[Batch] = batches) -> Batch:
                    taken.append(batch if verifier is None else rescored(self._reader, self._topics, batch, verifier))
                    return taken[0]

                report = self._step(state, recorded, change, judge)
                metrics = figures_of(batches[0], report)
                record.version(number, state, change(self._inbox.settings(batches[0].manifest)), recorded, report,
                               metrics)  # fmt: skip
                yield Beside(recorded, number, metrics, effective_size(metrics))

    def close(self) -> None:
        self._inbox.close()
        self._reader.close()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def effective_size(metrics: Mapping[str, float]) -> float:
    """Of a batch's tokens, weighed with their ratios to the policies that sampled them, as a share of their number:
    (sum w)^2 / (k sum w^2). 0 where the ratios are beyond all numbers.

    Source: Kish 1965, as `mismatch.effective_share`; by the means of w and of w^2, which a version records.
    """
    mean, chi2 = metrics.get("ratio_mean"), metrics.get("chi2")
    return 0.0 if mean is None or chi2 is None or chi2 <= -1 else min(1.0, mean**2 / (1 + chi2))


def _hashes(state: TrainState, settings: RunSettings) -> tuple[bytes, bytes]:
    """(served, train)."""
    served = delta.state_hash(delta.as_state(state.served_bits(), settings.model.dtype))
    return served, train_hash(*state.state_tensors())


class _Record:
    """The counterfactual's versions in its own `policy`. Those that are there already are compared, not written."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics) -> None:
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        check_settled(kafka, [(topics.name(POLICY), 0)])
        head = read_policy(kafka, topics, open_settings(kafka, topics))
        self._known, self._topics = head.versions, topics
        self._policy = Policy(topics, self._transactor, head.chain)

    def version(self, number: int, state: TrainState, settings: RunSettings, recorded: Version | None,
                report: StepReport | None, metrics: Mapping[str, float] | None = None) -> None:  # fmt: skip
        """Raises RunConflict where another one is recorded under this number."""
        served_hash, own_hash = _hashes(state, settings)
        if (known := self._known.get(number)) is not None:
            if known.train_hash != own_hash:
                raise RunConflict(f"run {self._topics.run!r} holds another version {number} than came out now "
                                  f"({known.train_hash.hex()} and {own_hash.hex()}): take another run id")  # fmt: skip
            return
        groups = () if report is None else tuple(
            GroupCount(one.group_id, one.trained, sum(one.masked.values())) for one in report.groups
        )  # fmt: skip
        said = fingerprint(state, settings)

        def make(**link: Any) -> Version:
            return Version(
                **link, version=number, parent=number - 1, batch=recorded.batch if recorded else 0,
                batch_offset=recorded.batch_offset if recorded else -1,
                batch_digest=recorded.batch_digest if recorded else b"", hash_algorithm=delta.HASH_ALGORITHM,
                served_hash=served_hash, train_hash=own_hash, rho=report.rho if report else 0.0,
                rho_tokens=report.probe_tokens if report else 0, groups=groups, metrics=dict(metrics or {}),
                fingerprint=said, committed_ms=int(time.time() * 1000),
            )  # fmt: skip

        self._policy.write(make)

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._transactor.close()


def derived(kind: str, parent: str, recorded: Version, *, cursor: int = 0, changes: str = "{}",
            verifier: str | None = None) -> Callable[..., Derived]:  # fmt: skip
    """The maker of the record that says where a run comes from."""
    now = int(time.time() * 1000)
    return lambda **link: Derived(
        **link, kind=kind, parent=parent, version=recorded.version, hash_algorithm=delta.HASH_ALGORITHM,
        served_hash=recorded.served_hash, train_hash=recorded.train_hash, cursor=cursor, changes=changes,
        verifier=verifier, derived_ms=now,
    )  # fmt: skip
