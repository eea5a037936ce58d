"""The trainer's loop: the next batch in, one version out, which is published while the next batch is trained.

It holds nothing that the log doesn't: a start reads `policy`, takes the newest good checkpoint, and trains again what
was committed after it. Training is deterministic, so the hashes must come out as they were recorded; a difference stops
the run, or is settled by a record as the run's settings say (`history`). It is never passed over.
"""

from __future__ import annotations

import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.schemas import delta
from headrace.schemas.errors import (
    HeadraceError,
    NonFiniteGradient,
    NonFiniteLogprob,
    ReplayMismatch,
    SettingsError,
)
from headrace.schemas.events import FORK, Derived, GroupCount, Reconciled, ReplicaAlignment, Version
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log.direct import Offering
from headrace.streams.log.hanging import check_settled
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Transactor

from .ahead import Ahead, Taken
from .background import Background
from .checkpoint import Checkpoints, origin, train_hash
from .combinations import idle
from .drift import beside_estimated
from .fetch import Batch
from .following import Led, follow
from .history import REBASE, ROLLBACK, STOP, differences
from .inbox import Inbox
from .probes import Probes, as_group, told
from .publish import Policy, Publisher, read_policy
from .ranks import ALONE, Ranks, join, leave
from .report import StepReport
from .step import TrainState
from .weighing import StepSettings, loss_rules

log = logging.getLogger("headrace.trainer")


def step_settings(settings: RunSettings) -> StepSettings:
    """What of the run settings decides a step."""
    loss, optimizer = settings.loss, settings.optimizer
    return StepSettings(
        learning_rate=optimizer.learning_rate,
        warmup_versions=optimizer.warmup,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        minibatches=optimizer.minibatches,
        epochs=optimizer.epochs,
        micro_batch_tokens=optimizer.micro_batch_tokens,
        probe_tokens=optimizer.probe_tokens,
        group_size=settings.rollout.group_size,
        budget=settings.rollout.max_new_tokens,
        reuse_drift_limit=settings.staleness.floor + settings.reuse.drift_limit,
        **loss_rules(loss),
    )


def initial(settings: RunSettings, state_dir: Path, derived: Derived | None, ranks: Ranks = ALONE) -> Led:
    """Version 0: the model folder's weights, in a fork with the optimizer of the version that it comes from. Raises
    ModelError, CheckpointError."""
    led = Led(settings.model, settings.optimizer.recompute_activations, ranks)
    if derived is not None and derived.kind == FORK:
        start = origin(state_dir, derived)
        led.load_state(start.tensors, start.metadata)
    return led


def fingerprint(state: TrainState, settings: RunSettings) -> str:
    """What decides the bits besides the data, as JSON."""
    return json.dumps(
        {
            **state.fingerprint(),
            "machine": platform.machine(),
            "micro_batch_tokens": str(settings.optimizer.micro_batch_tokens),
            "train_hash": delta.TREE_ALGORITHM,
        },
        sort_keys=True,
    )


class Trainer:
    """One owner of the run's weights. Made fresh at each start; `start`, then `run`."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, state_dir: Path,
                 ranks: Ranks = ALONE, tap: Callable[[int, bytes], object] | None = None) -> None:  # fmt: skip
        self._kafka, self._topics, self._settings = kafka, topics, settings
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        check_settled(kafka, [(topics.name(POLICY), 0)])
        opened = open_settings(kafka, topics)
        head = read_policy(kafka, topics, opened)
        self._history, self._published, self._derived = head.history, head.published, head.derived
        self._policy = Policy(topics, self._transactor, head.chain)
        self._publisher = Publisher(kafka, topics, self._policy, settings.weights, tap)
        self._publisher.remember(head.publications)
        self._background = Background(self._publisher)
        self._deterministic = settings.checkpoint.deterministic
        keep = settings.checkpoint.keep if self._deterministic else max(2, settings.checkpoint.keep)
        self._state_dir, self._checkpoints = state_dir, Checkpoints(state_dir / "checkpoints", keep)
        self._on_difference = list(head.settings.values())[-1].checkpoint.on_difference
        self._ranks = ranks
        self._led = self._initial()
        self._saved = -1
        self._seconds: dict[str, float] = {}
        self._inbox = Inbox(kafka, topics, opened, head)
        self._ahead = Ahead(self._inbox)
        self._kept = -1  # the version whose served weights are kept for the replicas' probes of it
        self._probes = Probes(kafka, topics) if settings.alignment.every else None

    @property
    def _state(self) -> TrainState:
        return self._led.state

    @property
    def version(self) -> int:
        return self._state.version

    # ------------------------------------------------------------------------------------------------------ start

    def start(self) -> None:
        """Come to the newest committed version, and publish it where that is still to be done. Raises SettingsError in
        a counterfactual."""
        for sentence in idle(self._settings):
            log.warning("%s", sentence)
        if self._derived is not None and self._derived.kind != FORK:
            raise SettingsError(f"run {self._topics.run!r} is a counterfactual of {self._derived.parent!r}: nothing "
                                "more is trained in it")  # fmt: skip
        committed = self._history.committed
        if committed < 0:
            self._begin()
            return
        base = self._recall()
        differed = self._train_again(base)
        if differed is not None:
            self._reconcile(base, differed)
        # After a rollback the count runs on, from the weights of a version that lies further back.
        self._state.version = committed
        if self._history.tip != committed:
            self._saved = committed  # these are no weights of that version
        if self._published < committed:  # the base of a delta is no longer at hand
            state = self._served()
            served_hash = delta.state_hash(state)
            self._publisher.rebase(committed, state, served_hash)
            self._publisher.publish_snapshot(committed, state, served_hash)

    def _train_again(self, base: int) -> int | None:
        """What was committed since version `base`; the first version that came out differently, where the run's
        settings say how to go on from it. After a rollback's difference nothing more is trained. Raises ReplayMismatch.
        """
        differed = None
        for recorded in self._history.path(after=base):
            self._state.version = recorded.version - 1
            report = self._train(self._inbox.recorded(recorded))
            changes, served_hash = self._publisher.compare(self._served())
            settled = recorded.version in self._history.loose
            if differed is None and not settled and (difference := self._difference(recorded, served_hash)):
                if self._on_difference == STOP:
                    raise ReplayMismatch(difference)
                log.error("%s", difference)
                differed = recorded.version
                if self._on_difference == ROLLBACK:
                    return differed
            proved = differed is None and not settled
            if self.version > self._published and proved and self.version not in self._history.replaced:
                self._publisher.publish(self.version, changes, served_hash)
                self._published = self.version
            else:
                self._publisher.advance(self.version, changes, served_hash)
            log.info("version %d trained again (reward %.3f), %s", self.version, report.reward_mean,
                     "both hashes as recorded" if proved else "its hashes hold no more")  # fmt: skip
        return differed

    def _reconcile(self, base: int, differed: int) -> None:
        """Settle a difference by a record: what came out is the newest version (rebase), or training goes on from
        version `base` (rollback)."""
        rule, newest = self._on_difference, self._history.committed
        if rule == ROLLBACK:
            self._led = self._initial()
            base = self._recall()
        served_hash, own_hash = delta.state_hash(self._served()), train_hash(*self._state.state_tensors())
        replaces = rule == REBASE or newest > self._published
        own_fingerprint = self._fingerprint(self._settings)

        def reconciled(**link: Any) -> Reconciled:
            return Reconciled(
                **link, rule=rule, version=newest, checkpoint=base, differed=differed, replaces=replaces,
                hash_algorithm=delta.HASH_ALGORITHM, served_hash=served_hash, train_hash=own_hash,
                fingerprint=own_fingerprint, decided_ms=_now_ms(),
            )  # fmt: skip

        (event,) = self._policy.write(reconciled)
        assert isinstance(event, Reconciled)
        self._history.reconcile(event)
        if replaces:
            self._published = newest - 1
        if rule == REBASE:
            self._save()
            log.warning("rebase: what was trained again is version %d from here on", newest)
        else:
            log.warning("rollback: training goes on from version %d; versions %d to %d are given up", base, base + 1,
                        newest)  # fmt: skip

    def _begin(self) -> None:
        """Version 0 is the model folder."""
        state = self._served()
        served_hash = delta.state_hash(state)
        own_hash = train_hash(*self._state.state_tensors())
        own_fingerprint = self._fingerprint(self._settings)

        def version(**link: Any) -> Version:
            made = Version(
                **link, version=0, parent=-1, batch=0, batch_offset=-1, batch_digest=b"",
                hash_algorithm=delta.HASH_ALGORITHM, served_hash=served_hash, train_hash=own_hash, rho=0.0,
                rho_tokens=0, groups=(), metrics={}, fingerprint=own_fingerprint, committed_ms=_now_ms(),
            )  # fmt: skip
            self._history.commit(made)
            return made

        self._publisher.publish_initial(version, self._settings.model.path, state, served_hash)
        log.info("version 0 is %s (%d elements, %s)", self._settings.model.path, delta.elements(state),
                 served_hash.hex())  # fmt: skip

    def _recall(self) -> int:
        """The newest good checkpoint of a version that led here, else where the run began; its version."""
        checkpoint = self._checkpoints.newest(self._history.known())
        if checkpoint is not None:
            self._led.load_state(checkpoint.tensors, checkpoint.metadata)
            self._saved = checkpoint.version
        state = self._served()
        served_hash = delta.state_hash(state)
        if difference := self._difference(self._history.versions[self.version], served_hash):
            raise ReplayMismatch(difference)
        log.info("resuming at version %d from %s; %d versions to train again", self.version,
                 checkpoint.file if checkpoint else "the model folder",
                 len(self._history.path(after=self.version)))  # fmt: skip
        self._publisher.rebase(self.version, state, served_hash)
        return self.version

    def _train(self, batch: Batch) -> StepReport:
        settings = step_settings(self._inbox.settings(batch.manifest))
        return self._led.train_batch(self._inbox.groups(batch), batch.manifest.target, settings, batch.reused)

    def _difference(self, recorded: Version, served_hash: bytes) -> str | None:
        """What to say where the weights here are not those of the log."""
        own_hash = train_hash(*self._state.state_tensors())
        if (served_hash, own_hash) == (recorded.served_hash, recorded.train_hash):
            return None
        here = self._fingerprint(self._settings)
        apart = ", ".join(differences(here, recorded.fingerprint)) or "nothing"
        return (
            f"version {recorded.version} came out differently than it was committed: served weights "
            f"{served_hash.hex()}, on the log {recorded.served_hash.hex()}; train state {own_hash.hex()}, on the log "
            f"{recorded.train_hash.hex()}. Fingerprint differs in: {apart}. Set back what differs (threads, "
            f"libraries, machine, model folder) and start the trainer again, give it a checkpoint of version "
            f"{recorded.version} or later, or let the run go on without these bits: `headrace set {self._topics.run} "
            "checkpoint.on_difference=rebase` (or rollback)"
        )

    # ------------------------------------------------------------------------------------------------------- run

    def run(self, stop: threading.Event, stop_at: int | None = None) -> None:
        """Train until `stop` is set or version `stop_at` is published; then save. A snapshot that is on its way when
        `stop` is set is left for later."""
        self._keep()
        while not stop.is_set() and (stop_at is None or self.version < stop_at):
            before, self._seconds = self._seconds, {}
            taken = self._ahead.take(self.version + 1, stop, self._background.check)
            if taken is None:
                break
            self._advance(taken, before)
            if self._saved < self.version and self.version % self._settings.checkpoint.every == 0:
                self._save()
        self._background.settled()
        if self._saved < self.version:
            self._save()
        if not stop.is_set():
            self._background.finish()

    def _advance(self, taken: Taken, before: Mapping[str, float]) -> None:
        """1. Train, while the next batch is read; 2. wait until the version before is published, and compare with it;
        3. commit; 4. let it be published. `before`: seconds of the version before."""
        batch = taken.batch
        self._seconds |= {"waiting": taken.waiting_s, "fetching": taken.fetching_s}
        with self._timed("compute"):
            replicas, aligned_s = self._align(batch)
            try:
                report = self._train(batch)
            except (NonFiniteLogprob, NonFiniteGradient) as error:
                log.error("batch %d was refused: %s", batch.manifest.batch, error)
                raise
        report.seconds["probe"] += aligned_s
        if report.alignment is not None and not report.alignment.good:
            log.warning("batch %d: %s", batch.manifest.batch, report.alignment)
        with self._timed("publishing"):
            self._background.settled()
            changes, served_hash = self._publisher.compare(self._served())
        if not self._deterministic:  # these bits come but once
            self._save()
        with self._timed("committing"):
            self._commit(batch, report, served_hash, before, replicas)
        self._background.publish(self.version, changes, served_hash)
        self._keep()
        seconds = self._seconds
        log.info("version %d: reward %.3f, loss %.4f, lag %.2f (max %d), %d tokens trained, %d masked; waited %.1f s, "
                 "fetched %.1f, trained %.1f, publishing held it up for %.2f, committed %.2f",
                 self.version, report.reward_mean, report.loss, batch.lag_mean, batch.lag_max,
                 sum(g.trained for g in report.groups), sum(sum(g.masked.values()) for g in report.groups),
                 seconds["waiting"], seconds["fetching"], seconds["compute"], seconds["publishing"],
                 seconds["committing"])  # fmt: skip

    def _keep(self) -> None:
        """Keep what is served of a version that replicas are probed at: their probes come later."""
        led = self._history.tip == self.version and self.version not in self._history.replaced
        if self._settings.alignment.probes(self.version) and led and self._kept != self.version:
            self._led.keep_served()
            self._kept = self.version

    def _align(self, batch: Batch) -> tuple[tuple[ReplicaAlignment, ...], float]:
        """Compare what replicas have told since with the weights that they served, and in how many seconds. Nothing
        depends on it."""
        began = time.monotonic()
        probes = [] if self._probes is None else self._probes.due(self._kept)
        if not probes:
            return (), 0.0
        settings = step_settings(self._inbox.settings(batch.manifest))
        replicas = told(probes, self._led.align([as_group(one) for one in probes], settings))
        return replicas, time.monotonic() - began

    def _commit(self, batch: Batch, report: StepReport, served_hash: bytes, before: Mapping[str, float],
                replicas: tuple[ReplicaAlignment, ...]) -> None:  # fmt: skip
        """The version record: from here on the batch has been trained."""
        manifest = batch.manifest
        own_hash = train_hash(*self._state.state_tensors())
        own_fingerprint = self._fingerprint(self._inbox.settings(manifest))
        counts = tuple(GroupCount(g.group_id, g.trained, sum(g.masked.values())) for g in report.groups)
        reused = tuple(GroupCount(g.group_id, g.trained, sum(g.masked.values())) for g in report.reused)
        metrics = figures_of(batch, report) | {
            f"{name}_s": self._seconds[name] for name in ("waiting", "fetching", "compute", "publishing")
        }
        if "committing" in before:  # of the version before: its own is still to come
            metrics["committing_s"] = before["committing"]

        def version(**link: Any) -> Version:
            return Version(
                **link, version=report.version, parent=self._history.tip, batch=manifest.batch,
                batch_offset=batch.offset, batch_digest=batch.digest, hash_algorithm=delta.HASH_ALGORITHM,
                served_hash=served_hash, train_hash=own_hash, rho=report.rho, rho_tokens=report.probe_tokens,
                groups=counts, metrics=metrics, fingerprint=own_fingerprint, committed_ms=_now_ms(), reused=reused,
                rho_noise=report.rho_noise, realised=beside_estimated(report.lags, manifest),
                alignment=None if report.alignment is None else report.alignment.record(), replicas=replicas,
            )  # fmt: skip

        (made,) = self._policy.write(version)
        assert isinstance(made, Version)
        self._history.commit(made)

    def _served(self) -> dict[str, delta.Tensor]:
        return delta.as_state(self._state.served_bits(), self._settings.model.dtype)

    def _initial(self) -> Led:
        return initial(self._settings, self._state_dir, self._derived, self._ranks)

    def _fingerprint(self, settings: RunSettings) -> str:
        return fingerprint(self._state, settings)

    # ----------------------------------------------------------------------------------------------------- saving

    def _save(self) -> None:
        version = self._history.versions.get(self.version)
        tensors, metadata = self._state.state_tensors()
        extra = {"fingerprint": self._fingerprint(self._settings), "run": self._topics.run}
        if version is not None:
            extra |= {"batch_offset": str(version.batch_offset), "served_hash": version.served_hash.hex()}
        started = time.monotonic()
        file = self._checkpoints.save(self.version, tensors, metadata | extra)
        self._saved = self.version
        log.info("version %d saved to %s in %.1f s", self.version, file, time.monotonic() - started)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - started

    def dismiss(self) -> None:
        """Let the other ranks end."""
        self._led.close()

    def close(self) -> None:
        self._background.close()
        self._ahead.close()
        if self._probes is not None:
            self._probes.close()
        self._publisher.close()
        self._transactor.close()


def figures_of(batch: Batch, report: StepReport) -> dict[str, float]:
    """The figures of one version; logprob differences in nats, over the tokens that the target version sampled."""
    masked: dict[str, int] = {}
    for group in report.groups:
        for rule, tokens in group.masked.items():
            masked[f"masked_{rule}"] = masked.get(f"masked_{rule}", 0) + tokens
    aligned = next((lag for lag in report.lags if lag.version == batch.manifest.target), None)
    figures: dict[str, float] = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "reward": report.reward_mean,
        "ess": report.ess,
        "lag_mean": batch.lag_mean,
        "lag_max": batch.lag_max,
        "tokens": sum(group.trained for group in report.groups),
        "row_tokens": report.row_tokens,
        "optimizer_steps": report.optimizer_steps,
        **report.figures,
        **masked,
        **{f"{name}_s": spent for name, spent in report.seconds.items()},
    }
    if aligned is not None:
        figures |= {"mismatch_mean": aligned.mean_abs, "mismatch_max": aligned.max_abs,
                    "mismatch_tokens": aligned.tokens}  # fmt: skip
    if report.clipped:
        figures["clipped"] = report.clipped
    if report.penalty:
        figures["kl_penalty"] = report.penalty
    if report.reused:
        figures |= {"reused_tokens": sum(one.trained for one in report.reused),
                    "reused_drift_max": max(one.drift for one in report.reused)}  # fmt: skip
    return {name: float(value) for name, value in figures.items()}


def _now_ms() -> int:
    return int(time.time() * 1000)


def run_trainer(
    kafka: Mapping[str, Any],
    topics: RunTopics,
    settings: RunSettings,
    stop: threading.Event,
    state_dir: Path,
    stop_at: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    weights_socket: str | None = None,
) -> None:
    """Train the run until `stop` is set, or until version `stop_at` is published. `state_dir` holds checkpoints;
    workers get weights directly from `weights_socket`. Under torchrun this is what rank 0 does, and `run_follower` what
    the others do.

    Raises Fenced where another trainer took over, ReplayMismatch where re-training gave other bits than were committed
    and the run's settings don't say how to go on (`checkpoint.on_difference`),
    InvalidRecord or DataLossError where a batch can't be proved, NonFiniteLogprob, NonFiniteGradient, ModelError.
    """
    ranks = _joined(threads, device, settings.checkpoint.deterministic)
    offering = Offering(weights_socket, topics.name(WEIGHTS)) if weights_socket else None
    trainer = Trainer(kafka, topics, settings, state_dir, ranks, None if offering is None else offering.offer)
    try:
        trainer.start()
        trainer.run(stop, stop_at)
        trainer.dismiss()
    except HeadraceError:
        trainer.dismiss()  # the others are where this one is: between two words
        raise
    finally:
        trainer.close()
        if offering is not None:
            offering.close()
    leave()


def run_follower(threads: int | None = None, device: str = "cpu") -> None:
    """A rank of a torchrun job that isn't 0: it computes what rank 0 tells it, until that ends. Knows no Kafka."""
    follow(_joined(threads, device))
    leave()


def _joined(threads: int | None, device: str, deterministic: bool = True) -> Ranks:
    if threads is not None:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    return join(device)
