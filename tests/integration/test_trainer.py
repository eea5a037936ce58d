"""The trainer on the real broker: what it trains follows from the log alone, whenever it dies."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.consumers.accounts import Accounts
from headrace.consumers.facts import Failures
from headrace.consumers.index import Index
from headrace.consumers.partition import audit_partition
from headrace.consumers.proofs import check_policy
from headrace.consumers.source import Snapshot
from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.engines.hf import HfEngine
from headrace.producers.publications import served_state
from headrace.producers.receiver import Receiver
from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import pack_float32
from headrace.schemas.errors import Fenced, HeadraceError, InvalidRecord, LogError, NonFiniteLogprob, ReplayMismatch
from headrace.schemas.events import (
    GroupClosed,
    Manifest,
    PayloadEpisode,
    Publication,
    Reuse,
    SettingsChanged,
    Tick,
    VersionRun,
)
from headrace.schemas.hashes import GENESIS
from headrace.schemas.outcomes import Outcome
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, FLEET, GROUPS, POLICY
from headrace.streams.log.reader import Reader, Record, end_offsets, read_range
from headrace.streams.log.transactions import Output
from headrace.trainer import loop
from headrace.trainer.fetch import fetch_batch
from headrace.trainer.inbox import Inbox
from headrace.trainer.loop import Trainer, run_trainer
from headrace.trainer.publish import Policy, Publisher
from headrace.trainer.step import TrainState
from tests.killed_trainer import BOUNDARIES, BOUNDARIES_BETWEEN, kill_at
from tests.synthetic_run import PARTITIONS, SyntheticRun, episode, run_settings
from tests.training import head, train
from tests.unit.test_alignment_probe import probed

Kafka = Mapping[str, Any]


pytestmark = pytest.mark.usefixtures("deterministic")


@contextmanager
def training(run: SyntheticRun, state_dir: Path) -> Iterator[Trainer]:
    trainer = Trainer(run.kafka, run.topics, run.settings, state_dir)
    try:
        trainer.start()
        yield trainer
    finally:
        trainer.close()


def outcome(run: SyntheticRun) -> list[tuple[Any, ...]]:
    """What must not depend on when and how often the trainer died."""
    return [(v.version, v.parent, v.batch, v.batch_digest, v.served_hash, v.train_hash, v.groups, v.rho)
            for v in head(run).versions.values()]  # fmt: skip


def manifests(run: SyntheticRun) -> list[Record]:
    name = run.topics.name(BATCHES)
    return list(read_range(run.kafka, name, 0, 0, end_offsets(run.kafka, name)[0]))


def decode_manifest(record: Record) -> Manifest:
    event = decode(record.value)
    assert isinstance(event, Manifest)
    return event


def engine_of(model: Path, **options: Any) -> HfEngine:
    return HfEngine(model, slots=12, max_tokens=128, **options)


def sample(engine: HfEngine, seed: int) -> list[list[PayloadEpisode]]:
    """Three groups of four, sampled by the engine as a worker would."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(3):
        prompt = rng.integers(3, 250, 9).tolist()
        for slot in range(4):
            seeded = Sampling(1.0, 12, int(rng.integers(1 << 30)))
            engine.submit(GenerationRequest(str(slot), prompt, seeded, engine.eos_ids))
        columns: dict[str, tuple[list[int], list[float], list[int]]] = {str(s): ([], [], []) for s in range(4)}
        while engine.active:
            for one in engine.step():
                tokens, logprobs, versions = columns[one.request_id]
                tokens += one.token_ids.tolist()
                logprobs += one.logprobs.tolist()
                versions += [one.version] * len(one.token_ids)
        groups.append([episode(int(s), prompt, *column, reward=float(int(s) % 2)) for s, column in columns.items()])
    return groups


# --------------------------------------------------------------------------------------------- versions and weights


def test_served_weights_after_n_deltas_equal_the_trainers_bit_for_bit(run: SyntheticRun, tmp_path: Path) -> None:
    run.write_random_batches(12)
    follower = engine_of(Path(run.settings.model.path))
    receiver = Receiver(run.kafka, run.topics)
    with training(run, tmp_path) as trainer:
        assert receiver.load(follower)
        trainer.run(threading.Event(), 12)
        while follower.version < 12:
            receiver.apply_ready(follower)
        receiver.close()
        newcomer = engine_of(Path(run.settings.model.path))
        late = Receiver(run.kafka, run.topics)
        assert late.load(newcomer)
        late.close()
        wanted = trainer._state.served_bits()
        first = engine_of(Path(run.settings.model.path)).served_arrays()
        for found in (follower.served_arrays(), newcomer.served_arrays(),
                      served_state(run.kafka, run.topics, first, 12)):  # fmt: skip
            assert list(found) == list(wanted)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
        assert any(not np.array_equal(first[name], wanted[name]) for name in wanted)
    kinds = [(p.version, p.kind) for p in head(run).publications]
    assert kinds[:2] == [(0, "path"), (1, "delta")] and (5, "snapshot") in kinds and (10, "snapshot") in kinds


def test_versions_name_batch_parent_hashes_counts_and_figures(run: SyntheticRun, tmp_path: Path) -> None:
    run.write_random_batches(3)
    train(run, tmp_path, 3)
    versions = head(run).versions
    assert [(v.version, v.parent, v.batch) for v in versions.values()] == [(0, -1, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3)]
    third = versions[3]
    manifest = decode(manifests(run)[2].value)
    assert {g.group: g.trained + g.masked for g in third.groups} == {
        ref.group: ref.model_tokens for ref in manifest.groups  # type: ignore[union-attr]
    }
    assert third.metrics["lag_max"] == 1 and 0 < third.metrics["lag_mean"] < 1
    for figure in ("loss", "grad_norm", "reward", "ess", "tokens", "mismatch_max", "mismatch_mean", "waiting_s",
                   "fetching_s", "compute_s", "committing_s", "publishing_s"):  # fmt: skip
        assert math.isfinite(third.metrics[figure]), figure
    assert {"torch", "cpu", "threads", "machine", "micro_batch_tokens"} <= json.loads(third.fingerprint).keys()


def test_trainer_waits_for_its_manifest_and_saves_when_stopped(run: SyntheticRun, tmp_path: Path) -> None:
    run.write_random_batches(1)
    stop = threading.Event()
    thread = threading.Thread(target=run_trainer, args=(run.kafka, run.topics, run.settings, stop, tmp_path))
    thread.start()
    name = run.topics.name(POLICY)
    with Reader(run.kafka, {(name, 0): 0}) as reader:
        seen: list[Any] = []
        while not any(isinstance(e, Publication) and e.version == 1 for e in seen):
            seen += [decode(record.value) for record in reader.poll(timeout_s=0.2)]
    run.write_random_batches(1)
    with Reader(run.kafka, {(name, 0): 0}) as reader:
        while not any(isinstance(e, Publication) and e.version == 2 for e in seen):
            seen += [decode(record.value) for record in reader.poll(timeout_s=0.2)]
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["00000002.safetensors"]


def test_reached_version_ends_at_once_and_a_greater_one_goes_on(run: SyntheticRun, tmp_path: Path) -> None:
    run.write_random_batches(4)
    train(run, tmp_path, 2)
    before = outcome(run)
    train(run, tmp_path, 2)
    assert outcome(run) == before and len(before) == 3
    train(run, tmp_path, 4)
    assert outcome(run)[:3] == before and len(outcome(run)) == 5


def test_step_that_outlasts_the_poll_interval_loses_nothing(run: SyntheticRun, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """And the next batch is read while this one trains, no more than one."""
    run.write_random_batches(3)
    run.kafka = {**run.kafka, "session.timeout.ms": 1000, "max.poll.interval.ms": 1000}
    read = {due: threading.Event() for due in range(1, 5)}
    honest_fetch, honest_train = Inbox.fetch, TrainState.train_batch

    def fetch(self: Inbox, record: Record, due: int) -> Any:
        batch = honest_fetch(self, record, due)
        read[due].set()
        return batch

    def slowly(self: TrainState, groups: Any, target: int, *args: Any) -> Any:
        if target < 2:
            assert read[target + 2].wait(30), "the next batch isn't read while this one trains"
        time.sleep(1.5)
        return honest_train(self, groups, target, *args)

    monkeypatch.setattr(Inbox, "fetch", fetch)
    monkeypatch.setattr(TrainState, "train_batch", slowly)
    train(run, tmp_path, 3)
    assert head(run).published == 3
    assert not read[4].is_set()


# ------------------------------------------------------------------------------------------------------------- kills


# (version, boundary): checkpoints are due at 3, 6, 9, ...; snapshots five versions after the last one.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", [
    tuple(zip((1, 2, 4, 4, 5, 7, 8, 8, 10, 11, 11, 12, 15), BOUNDARIES, strict=True)),
    tuple(zip((2, 3, 5, 7, 9, 10), BOUNDARIES_BETWEEN, strict=True)),
], ids=["in turn", "in two threads"])  # fmt: skip
def test_kill_at_every_boundary_leaves_no_gap_no_skip_and_no_double(
    kafka: Kafka, run_name: str, model: Path, tmp_path: Path, plan: tuple[tuple[int, str], ...]
) -> None:
    """One run is killed at each boundary in turn, another is left alone: their versions have the same hashes."""
    settings = run_settings(model)
    calm = SyntheticRun(kafka, f"{run_name}-calm", settings)
    killed = SyntheticRun(kafka, f"{run_name}-killed", settings)
    last = 17
    for run in (calm, killed):
        run.write_random_batches(last, seed=3)
    train(calm, tmp_path / "calm", last)
    for version, boundary in plan:
        code = kill_at(kafka, killed.topics, settings, tmp_path / "killed", last, boundary, version)
        assert code == -9, f"{boundary}: exit code {code}"
    train(killed, tmp_path / "killed", last)
    assert outcome(killed) == outcome(calm)
    assert [v.version for v in head(killed).versions.values()] == list(range(last + 1))
    vouched_for(killed, last)
    engine, receiver = engine_of(model), Receiver(kafka, killed.topics)
    assert receiver.load(engine) and engine.version == last and receiver.refusals == []
    receiver.close()
    with training(calm, tmp_path / "calm") as trainer:
        wanted = trainer._state.served_bits()
    assert all(np.array_equal(engine.served_arrays()[name], wanted[name]) for name in wanted)
    calm.close()
    killed.close()


def vouched_for(run: SyntheticRun, last: int) -> None:
    """By the independent count: each version once, in turn, published before the next is committed, chunks first."""
    publications = head(run).publications
    once = [p.version for p in publications if p.kind == "delta"]
    assert once == sorted(set(once))
    first = list(dict.fromkeys(p.version for p in publications))
    assert first == list(range(last + 1)), "published late or never"
    source, failures = Snapshot(run.kafka, run.topics), Failures()
    with Index() as index:
        for number in range(PARTITIONS):  # no raw events stand behind these closures
            audit_partition(source, number, index, Accounts(), Failures())
        batches = check_policy(source, index, Accounts(), failures)
        assert not failures.lines and batches.manifests == last
        assert [index.version(number) is not None for number in range(last + 2)] == [True] * (last + 1) + [False]


def test_version_whose_base_is_lost_is_published_as_a_snapshot(run: SyntheticRun, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Committed, saved, but not published: the next start has the weights and no base."""
    run.write_random_batches(2)
    train(run, tmp_path, 1)
    with training(run, tmp_path) as trainer:
        monkeypatch.setattr(trainer._publisher, "publish_delta", lambda *_: None)
        trainer.run(threading.Event(), 2)
        assert trainer._saved == 2
    assert (head(run).committed, head(run).published) == (2, 1)
    train(run, tmp_path, 2)
    newest = head(run).publications[-1]
    assert (newest.version, newest.kind) == (2, "snapshot")
    engine, receiver = engine_of(Path(run.settings.model.path)), Receiver(run.kafka, run.topics)
    assert receiver.load(engine) and engine.version == 2
    receiver.close()


def test_publication_that_fails_moves_neither_base_nor_version(run: SyntheticRun, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run.write_random_batches(2)
    with training(run, tmp_path) as trainer:
        trainer.run(threading.Event(), 1)
        honest = Policy.write

        def write(self: Policy, *makers: Any) -> Any:
            if "publication" in makers[0].__qualname__:
                raise LogError("the broker is gone")
            return honest(self, *makers)

        with monkeypatch.context() as patch:
            patch.setattr(Policy, "write", write)
            with pytest.raises(LogError):
                trainer.run(threading.Event(), 2)
        base = trainer._publisher._base
        assert base is not None and base.version == 1
    assert (head(run).committed, head(run).published) == (2, 1)
    train(run, tmp_path, 2)
    assert [(p.version, p.kind) for p in head(run).publications][-1] == (2, "delta"), "trained again from version 1"


def test_next_version_is_trained_while_this_one_is_on_its_way_and_committed_only_after_it(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_random_batches(2)
    seen: list[str] = []
    trained = threading.Event()
    honest_publish, honest_train, honest_commit = Publisher.publish_delta, Trainer._train, Trainer._commit

    def publish_delta(self: Publisher, version: int, *args: Any) -> None:
        if version == 1:
            assert trained.wait(20), "the trainer stood still meanwhile"
        honest_publish(self, version, *args)
        seen.append(f"published {version}")

    def train_one(self: Trainer, *args: Any) -> Any:
        report = honest_train(self, *args)
        if report.version == 2:
            trained.set()
        return report

    def commit(self: Trainer, *args: Any) -> None:
        honest_commit(self, *args)
        seen.append(f"committed {self.version}")

    monkeypatch.setattr(Publisher, "publish_delta", publish_delta)
    monkeypatch.setattr(Trainer, "_train", train_one)
    monkeypatch.setattr(Trainer, "_commit", commit)
    train(run, tmp_path, 2)
    assert seen == ["committed 1", "published 1", "committed 2", "published 2"]
    assert head(run).versions[2].metrics["publishing_s"] >= 0


def test_commits_do_not_wait_for_a_snapshot(run: SyntheticRun, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run.write_random_batches(6)
    committed = threading.Event()
    honest, honest_commit = Publisher.publish_snapshot, Trainer._commit

    def publish_snapshot(self: Publisher, *args: Any) -> None:
        assert committed.wait(20), "version 6 waited for the snapshot of version 5"
        honest(self, *args)

    def commit(self: Trainer, *args: Any) -> None:
        honest_commit(self, *args)
        if self.version == 6:
            committed.set()

    monkeypatch.setattr(Publisher, "publish_snapshot", publish_snapshot)
    monkeypatch.setattr(Trainer, "_commit", commit)
    train(run, tmp_path, 6)
    assert [(p.version, p.kind) for p in head(run).publications][-2:] == [(5, "snapshot"), (6, "delta")]


def test_publication_that_fails_ends_a_trainer_that_waits_for_its_next_batch(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would give it one: the coordinator waits for the version to be published."""
    run.write_random_batches(1)

    def publish_delta(*_: Any) -> None:
        time.sleep(0.5)
        raise LogError("the broker is gone")

    with training(run, tmp_path) as trainer:
        monkeypatch.setattr(trainer._publisher, "publish_delta", publish_delta)
        with pytest.raises(LogError, match="the broker is gone"):
            trainer.run(threading.Event(), 2)


def test_second_trainer_fences_the_first_which_can_neither_commit_nor_publish(
    run: SyntheticRun, tmp_path: Path
) -> None:
    run.write_random_batches(2)
    with training(run, tmp_path / "a") as first:
        first.run(threading.Event(), 1)
        with training(run, tmp_path / "b") as second:
            with pytest.raises(Fenced):
                first.run(threading.Event(), 2)
            second.run(threading.Event(), 2)
    assert [v.version for v in head(run).versions.values()] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ replay


def test_retraining_without_a_checkpoint_gives_the_same_bits(
    run: SyntheticRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.write_random_batches(5)
    train(run, tmp_path / "first", 4)
    with caplog.at_level(logging.INFO, logger="headrace.trainer"):
        train(run, tmp_path / "empty", 5)
    assert caplog.text.count("both hashes as recorded") == 4
    assert len(head(run).versions) == 6


def test_difference_in_replay_stops_the_run_and_says_what_differs(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_random_batches(2)
    train(run, tmp_path / "first", 2)
    honest = loop.step_settings
    monkeypatch.setattr(loop, "step_settings", lambda s: replace(honest(s), learning_rate=1.1e-4))
    with pytest.raises(ReplayMismatch) as raised:
        train(run, tmp_path / "empty", 3)
    recorded = head(run).versions[1]
    for part in ("version 1", recorded.served_hash.hex(), recorded.train_hash.hex(), "Fingerprint", "checkpoint"):
        assert part in str(raised.value)
    assert len(head(run).versions) == 3, "nothing was written"


def test_several_optimizer_steps_and_branching_episodes_replay_to_the_same_bits(
    kafka: Kafka, run_name: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each episode's context is compacted: a summary, then an answer under the summary alone."""
    settings = run_settings(model, loss={"objective": "ppo", "dual_clip": 3.0, "m2_limit": 0.5},
                            optimizer={"minibatches": 3, "epochs": 2})  # fmt: skip
    run = SyntheticRun(kafka, run_name, settings)
    for batch in range(3):
        rng = np.random.default_rng(batch)

        def compacted(slot: int, rng: np.random.Generator = rng, version: int = batch) -> PayloadEpisode:
            one = episode(slot, rng.integers(3, 250, 5), rng.integers(3, 250, 4), rng.normal(-5.5, 0.2, 4),
                          [version] * 4, float(slot % 2))  # fmt: skip
            summary, answer = one.spans
            other = replace(answer, tokens=summary.tokens, count=5, versions=(VersionRun(version, 5),),
                            logprobs=pack_float32(np.full(5, -5.5, np.float32)))  # fmt: skip
            return replace(one, spans=(summary, answer, replace(summary, parent=0), other))

        run.write_batch([[compacted(slot) for slot in range(4)] for _ in range(3)])
    train(run, tmp_path / "first", 3)
    versions = head(run).versions
    assert [versions[n].metrics["optimizer_steps"] for n in (1, 2, 3)] == [6, 6, 6]
    assert all(g.trained + g.masked == 4 * 9 for g in versions[1].groups)
    with caplog.at_level(logging.INFO, logger="headrace.trainer"):
        train(run, tmp_path / "empty", 3)
    assert caplog.text.count("both hashes as recorded") == 3
    run.close()


def test_same_offsets_give_the_identical_batch(run: SyntheticRun) -> None:
    run.write_random_batches(2)
    record = manifests(run)[1]
    with Reader(run.kafka) as reader:
        one, two = (fetch_batch(reader, run.topics, record, run.settings.staleness) for _ in range(2))
    assert one.digest == two.digest and len(one.groups) == 3
    for a, b in zip(one.groups, two.groups, strict=True):
        for x, y in zip(a.episodes, b.episodes, strict=True):
            assert (x.slot, x.reward, x.temperature) == (y.slot, y.reward, y.temperature)
            for column in ("prompt", "tokens", "mask", "logprobs", "versions", "weights"):
                assert np.array_equal(getattr(x, column), getattr(y, column))


@pytest.mark.parametrize("damage", ["digest", "content", "missing"])
def test_altered_or_missing_samples_are_refused_by_address(run: SyntheticRun, tmp_path: Path, damage: str) -> None:
    groups = [[episode(slot, [5, 6, 7], [9, 10], [-5.0, -5.0], [0, 0], float(slot % 2)) for slot in range(4)]]
    run.write_batch(groups, damage=damage)
    with pytest.raises(HeadraceError, match=r"samples\[0\]@\d+|groups\[0\]@\d+"):
        train(run, tmp_path, 1)
    assert head(run).committed == 0, "nothing was trained"


def reuse_of(run: SyntheticRun, batch: int) -> Reuse:
    """Of the first success in that batch, beside a group that is in none."""
    for source in decode_manifest(manifests(run)[batch - 1]).groups:
        (record,) = read_range(run.kafka, run.topics.name(GROUPS), source.partition, source.offset, source.offset + 1)
        closed = decode(record.value)
        assert isinstance(closed, GroupClosed)
        for fate in closed.slots:
            if fate.outcome == Outcome.MODEL_SUCCESS:
                return Reuse("failed-altogether", source, fate.slot, 0.75, 1, fate.model_tokens)
    raise AssertionError("the batch has no success")


def test_success_used_again_is_fetched_from_where_its_batch_left_it(run: SyntheticRun, tmp_path: Path) -> None:
    """It is trained beside the batch, counted apart, and changes the weights."""
    run.write_random_batches(2)
    train(run, tmp_path / "without", 2)
    without = head(run).versions[2]
    assert without.reused == ()

    far = run.settings.model_copy(update={"reuse": run.settings.reuse.model_copy(update={"drift_limit": 1.0})})
    again = SyntheticRun(run.kafka, f"{run.topics.run}-again", far)  # its logprobs are drawn, not sampled
    try:
        again.write_random_batches(1)
        reuse = reuse_of(again, 1)
        again.write_random_batches(1, reused=[reuse])
        train(again, tmp_path / "with", 2)
        version = head(again).versions[2]
    finally:
        again.close()
    assert [one.group for one in version.reused] == ["failed-altogether"]
    assert sum(one.trained + one.masked for one in version.reused) == reuse.model_tokens
    assert version.groups == without.groups and version.served_hash != without.served_hash


def test_success_used_again_whose_samples_are_not_what_its_closure_vouches_for_is_refused_by_address(
    run: SyntheticRun, tmp_path: Path
) -> None:
    run.write_random_batches(1)
    train(run, tmp_path, 1)
    reuse = reuse_of(run, 1)
    run.write_random_batches(1, reused=[replace(reuse, source=replace(reuse.source, content_hash=b"\7" * 16))])
    with pytest.raises(HeadraceError, match=r"groups\[\d\]@\d+"):
        train(run, tmp_path, 2)
    assert head(run).committed == 1


def test_manifest_out_of_turn_is_refused_by_address(run: SyntheticRun, tmp_path: Path) -> None:
    run.batch = 4
    run.write_random_batches(1)
    with pytest.raises(InvalidRecord, match=r"batches\[0\]@0: batch 5 for version 4 where batch 1 is due"):
        train(run, tmp_path, 1)


def test_what_else_lies_in_policy_and_batches_decides_nothing(run: SyntheticRun, tmp_path: Path) -> None:
    """Garbage, records of other topics and settings that can't be: before the first version, and after a restart."""
    stray = [b"", b"garbage", encode(Tick("t", 0)), b"\xc3\x01" + b"x" * 20,
             encode(SettingsChanged(0, GENESIS, "set", '{"batch.groups": "many"}', 0)),
             encode(SettingsChanged(0, GENESIS, "set", "no JSON", 0))]  # fmt: skip

    def litter() -> None:
        for topic in (POLICY, BATCHES):
            run.send([Output(run.topics.name(topic), 0, value) for value in stray])

    litter()
    run.write_random_batches(1)
    train(run, tmp_path, 1)
    litter()
    run.write_random_batches(1)
    train(run, tmp_path, 2)
    assert head(run).committed == 2


def test_segments_that_miss_tokens_are_refused(run: SyntheticRun, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from tests import synthetic_run

    monkeypatch.setattr(synthetic_run, "model_runs", lambda e: [VersionRun(0, 1)])
    run.write_random_batches(1)
    with pytest.raises(InvalidRecord, match=r"batches\[0\]@0: group g00000000: slot 0: its segments"):
        train(run, tmp_path, 1)


def test_non_finite_logprob_is_one_clear_error(run: SyntheticRun, tmp_path: Path) -> None:
    groups = [[episode(s, [5, 6, 7], [9, 10], [-5.0, -np.inf], [0, 0], float(s % 2)) for s in range(4)]]
    run.write_batch(groups)
    with pytest.raises(NonFiniteLogprob, match="group g00000000, slot 0"):
        train(run, tmp_path, 1)
    assert head(run).committed == 0


# --------------------------------------------------------------------------------------------- staleness, alignment


def weights_of(run: SyntheticRun, record: Record, settings: RunSettings) -> set[float]:
    with Reader(run.kafka) as reader:
        batch = fetch_batch(reader, run.topics, record, settings.staleness)
    return {float(w) for group in batch.groups for e in group.episodes for w in e.weights[e.mask]}


def test_recorded_weight_acts_only_where_it_is_asked_to_but_zero_always_masks(run: SyntheticRun, model: Path) -> None:
    def batch() -> list[list[PayloadEpisode]]:
        return [[episode(s, [5, 6], [9, 10], [-5.0, -5.0], [0, 0], float(s % 2)) for s in range(4)]]

    run.write_batch(batch(), weight=0.25)
    run.write_batch(batch(), weight=0.0)
    quarter, zero = manifests(run)
    expected = {"auto": {1.0}, "never": {1.0}, "always": {0.25}}
    for rule, found in expected.items():
        settings = run_settings(model, staleness={"apply": rule})
        assert weights_of(run, quarter, settings) == found
        assert weights_of(run, zero, settings) == {0.0}


def test_tokens_beyond_the_hard_lag_are_masked_at_use(run: SyntheticRun, model: Path) -> None:
    run.batch = 9
    run.write_batch([[episode(s, [5, 6], [9, 10], [-5.0, -5.0], [0, 1], float(s % 2)) for s in range(4)]])
    (record,) = manifests(run)
    assert weights_of(run, record, run_settings(model, staleness={"hard_lag": 8})) == {0.0, 1.0}
    assert weights_of(run, record, run_settings(model, staleness={"hard_lag": 9})) == {1.0}


def test_engine_and_trainer_agree_at_lag_0_from_version_0_to_10(run: SyntheticRun, tmp_path: Path) -> None:
    """The same weights give the same log-probabilities in both, to float32's rounding; one position off fails."""
    engine, receiver = engine_of(Path(run.settings.model.path)), Receiver(run.kafka, run.topics)
    with training(run, tmp_path) as trainer:
        assert receiver.load(engine)
        for target in range(11):
            while engine.version < target:
                receiver.apply_ready(engine)
            run.write_batch(sample(engine, seed=target))
            trainer.run(threading.Event(), target + 1)
        groups = sample_after(receiver, engine, 11)
        shifted = [[shift(e) for e in group] for group in groups]
        run.write_batch(shifted)
        trainer.run(threading.Event(), 12)
    receiver.close()
    versions = head(run).versions
    worst = {v.version: v.metrics["mismatch_max"] for v in versions.values() if v.version}
    assert all(worst[n] < 1e-4 for n in range(1, 12)), worst
    assert worst[12] > 0.1, "the shifted mutant"


def test_late_probe_of_a_replica_is_judged_with_the_weights_that_it_sampled(run: SyntheticRun, tmp_path: Path) -> None:
    """The trainer has gone on by then, and what it trains is the same."""
    probe = probed(engine_of(Path(run.settings.model.path)))
    wrong = replace(probe, incarnation="j", temperature=1.0)  # says another temperature than it sampled with
    damaged = replace(probe, incarnation="k", counts=(*probe.counts, 1))
    run.write_random_batches(9)
    with training(run, tmp_path / "one") as trainer:
        trainer.run(threading.Event(), 3)
        run.send([Output(run.topics.name(FLEET), 0, encode(one)) for one in (damaged, probe, wrong)])
        for version in range(4, 10):
            trainer.run(threading.Event(), version)
            if judged := head(run).versions[version].replicas:
                break
            time.sleep(0.3)  # until it has come from the broker
    assert [(one.version, one.incarnation) for one in judged] == [(0, "i"), (0, "j")]
    assert json.loads(judged[0].engine)["engine"] == "hf"
    right, other = [[found for found in (one.prefill, one.decode) if found is not None] for one in judged]
    assert [found.kind for found in right] == ["aligned"] * 2 and [found.tokens for found in right] == [12, 84]
    assert [found.kind for found in other] == ["meaning"] * 2 and other[0].what.endswith("times the temperature")
    train(run, tmp_path / "again", version)  # no probe: every version comes out as it was committed


def sample_after(receiver: Receiver, engine: HfEngine, version: int) -> list[list[PayloadEpisode]]:
    while engine.version < version:
        receiver.apply_ready(engine)
    return sample(engine, seed=99)


def shift(one: PayloadEpisode) -> PayloadEpisode:
    """Each token with the log-probability of its neighbour."""
    from headrace.schemas.columns import pack_float32, unpack_float32

    prompt, generated = one.spans
    assert generated.logprobs is not None
    rolled = np.roll(unpack_float32(generated.logprobs), 1)
    return replace(one, spans=(prompt, replace(generated, logprobs=pack_float32(rolled))))


def test_ledger_vouches_for_versions_and_publications(run: SyntheticRun, tmp_path: Path) -> None:
    """The independent count agrees with what the trainer wrote into `policy` and `weights`."""
    run.write_random_batches(6)
    train(run, tmp_path, 6)
    vouched_for(run, 6)
