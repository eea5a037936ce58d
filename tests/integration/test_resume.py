"""What a run does when training again gives other bits; replay, counterfactual, fork and rescore on the real broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from headrace.changing import change
from headrace.cli import main
from headrace.consumers.accounts import Accounts
from headrace.consumers.batches import Batches
from headrace.consumers.facts import Failures
from headrace.consumers.index import Index
from headrace.consumers.ledger import audit
from headrace.consumers.partition import audit_partition
from headrace.consumers.proofs import check_policy
from headrace.consumers.run import open_run
from headrace.consumers.source import Snapshot
from headrace.models import tiny_model
from headrace.producers.engines.hf import HfEngine
from headrace.producers.receiver import Receiver
from headrace.schemas import delta
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import CheckpointError, DataLossError, ReplayMismatch
from headrace.schemas.events import Derived, EpisodeEnded, PayloadEpisode, Reconciled, Task, Version
from headrace.schemas.topics import BATCHES, POLICY, SAMPLES, TRAJECTORIES
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader, end_offsets, read_range
from headrace.streams.log.transactions import Output
from headrace.trainer import loop, replay
from headrace.trainer.fetch import fetch_batch
from headrace.trainer.loop import Trainer
from headrace.trainer.publish import Publisher
from headrace.trainer.rescore import rescored
from headrace.verifying import ScoreVerifier
from tests.command import Command
from tests.synthetic_run import PARTITIONS, SyntheticRun, episode, run_settings
from tests.training import head, train

Kafka = Mapping[str, Any]
Events = list[Any]


pytestmark = pytest.mark.usefixtures("deterministic")


def events(run: SyntheticRun, kind: type) -> Events:
    return [event for _, event in open_run(run.topics.run, run.kafka).events(POLICY) if isinstance(event, kind)]


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the same batches give other bits, as on another machine."""
    for module in (loop, replay):
        honest: Callable[..., Any] = loop.step_settings
        monkeypatch.setattr(module, "step_settings", lambda s, honest=honest: replace(honest(s), learning_rate=1.1e-4))


def proved(run: SyntheticRun) -> tuple[Batches, Accounts]:
    """By the independent count; no raw events stand behind these closures."""
    source, failures, accounts = Snapshot(run.kafka, run.topics), Failures(), Accounts()
    with Index() as index:
        for number in range(PARTITIONS):
            audit_partition(source, number, index, Accounts(), Failures())
        batches = check_policy(source, index, accounts, failures)
    assert failures.lines == []
    return batches, accounts


def serving(run: SyntheticRun, version: int) -> tuple[HfEngine, Receiver]:
    engine, receiver = HfEngine(Path(run.settings.model.path), slots=4, max_tokens=64), Receiver(run.kafka, run.topics)
    assert receiver.load(engine) and engine.version == version
    return engine, receiver


def follow(engine: HfEngine, receiver: Receiver, version: int) -> bytes:
    """Until the version is served; its hash."""
    while engine.version < version:
        receiver.apply_ready(engine)
    receiver.close()
    return delta.state_hash(delta.as_state(engine.served_arrays(), "bfloat16"))


# --------------------------------------------------------------------------------------------- rebase and rollback


def test_rebase_takes_what_came_out_as_the_newest_version_and_everybody_follows(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_random_batches(6)
    train(run, tmp_path / "first", 4)
    before = head(run).versions[4]
    engine, receiver = serving(run, 4)  # the weights that are passed over
    change(run.kafka, run.topics, {"checkpoint.on_difference": "rebase"})
    with monkeypatch.context() as patch:
        elsewhere(patch)
        with patch.context() as killed:  # between the record and the snapshot
            killed.setattr(Publisher, "publish_snapshot", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train(run, tmp_path / "other", 6)
        train(run, tmp_path / "other", 6)
        (event,) = events(run, Reconciled)
        assert (event.rule, event.version, event.checkpoint, event.differed, event.replaces) == (
            "rebase", 4, 0, 1, True)  # fmt: skip
        found = head(run)
        assert found.versions[4].served_hash == event.served_hash != before.served_hash
        assert [(p.kind, p.served_hash) for p in found.publications if p.version == 4] == [
            ("delta", before.served_hash), ("snapshot", event.served_hash)]  # fmt: skip
        assert [(v.version, v.parent) for v in found.versions.values()][5:] == [(5, 4), (6, 5)]
        train(run, tmp_path / "empty", 6)
        assert len(events(run, Reconciled)) == 1, "what was settled comes out again, and is settled"
    wanted = found.versions[6].served_hash
    assert follow(engine, receiver, 6) == wanted, "who served the old version 4 finds its way"
    assert follow(*serving(run, 6), 6) == wanted
    batches, _ = proved(run)
    assert batches.manifests == 6


def test_rebase_takes_over_what_another_number_of_threads_computes(
    kafka: Kafka, run_name: str, tmp_path: Path
) -> None:
    """Nothing is patched: the gradients of layer norms are summed by thread, so one thread and two have other last
    bits. (Models without them came out alike, measured.)"""
    run = SyntheticRun(kafka, run_name, run_settings(tiny_model(tmp_path / "model", kind="gpt2", hidden=32)))
    run.write_random_batches(5)
    train(run, tmp_path / "one", 3, threads=1)
    recorded = head(run)
    with pytest.raises(ReplayMismatch, match=r"version 1 came out differently.*Fingerprint differs in: "
                                             r"threads 2 \(then 1\)\. Set back what differs"):  # fmt: skip
        train(run, tmp_path / "two", 5, threads=2)
    assert head(run).versions == recorded.versions and not events(run, Reconciled), "nothing is passed over by default"
    change(run.kafka, run.topics, {"checkpoint.on_difference": "rebase"})
    train(run, tmp_path / "two", 5, threads=2)
    (event,), found = events(run, Reconciled), head(run)
    assert (event.rule, event.version, event.checkpoint, event.differed) == ("rebase", 3, 0, 1)
    assert event.train_hash != recorded.versions[3].train_hash and json.loads(event.fingerprint)["threads"] == "2"
    assert [json.loads(v.fingerprint)["threads"] for v in found.versions.values()] == ["1"] * 3 + ["2"] * 3
    (*_, newest) = [p for p in found.publications if p.version == 3]
    assert (newest.kind, newest.served_hash) == ("snapshot", event.served_hash)
    train(run, tmp_path / "again", 5, threads=2)  # all of it, from version 0 on
    assert head(run).versions == found.versions and len(events(run, Reconciled)) == 1
    assert follow(*serving(run, 5), 5) == found.versions[5].served_hash
    proved(run)
    run.close()


def test_rollback_goes_on_from_the_checkpoint_and_gives_up_what_came_after(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_random_batches(7)
    train(run, tmp_path, 5)
    engine, receiver = serving(run, 5)
    newest = tmp_path / "checkpoints" / "00000005.safetensors"
    newest.unlink()
    change(run.kafka, run.topics, {"checkpoint.on_difference": "rollback"})
    elsewhere(monkeypatch)
    train(run, tmp_path, 5)
    (event,) = events(run, Reconciled)
    found = head(run)
    assert (event.rule, event.version, event.checkpoint, event.differed, event.replaces) == (
        "rollback", 5, 3, 4, False)  # fmt: skip
    assert (event.served_hash, event.train_hash) == (found.versions[3].served_hash, found.versions[3].train_hash)
    assert not newest.exists(), "these are no weights of version 5"
    train(run, tmp_path, 7)
    found = head(run)
    assert [(v.version, v.parent, v.batch) for v in found.versions.values()][6:] == [(6, 3, 6), (7, 6, 7)]
    assert [p.kind for p in found.publications if p.version == 6] == ["snapshot"], "nobody has the base of a delta"
    assert follow(engine, receiver, 7) == found.versions[7].served_hash
    for file in (tmp_path / "checkpoints").glob("*7.*"):
        file.unlink()
    train(run, tmp_path, 7)
    assert len(events(run, Reconciled)) == 1, "version 7 comes from 6, 6 from 3"
    _, accounts = proved(run)
    lost = sum(c.trained + c.masked for v in (4, 5) for c in found.versions[v].groups)
    assert accounts.by_reason()["excluded"]["rolled_back"] == lost > 0


def test_version_that_nobody_had_taken_yet_stands_for_the_checkpoint_after_a_rollback(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a strictly synchronous run would wait for ever for a version that can't be published."""
    run.write_random_batches(5)
    train(run, tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish_delta", lambda *_: None)
        patch.setattr(Publisher, "publish_snapshot_if_due", lambda *_: None)
        patch.setattr(Trainer, "_save", lambda *_: None)
        train(run, tmp_path, 4)
    assert (head(run).committed, head(run).published) == (4, 3)
    change(run.kafka, run.topics, {"checkpoint.on_difference": "rollback"})
    elsewhere(monkeypatch)
    train(run, tmp_path, 5)
    (event,), found = events(run, Reconciled), head(run)
    assert (event.version, event.checkpoint, event.replaces) == (4, 3, True)
    assert found.versions[4].served_hash == found.versions[3].served_hash
    assert [(p.version, p.kind) for p in found.publications][-2:] == [(4, "snapshot"), (5, "delta")]
    assert follow(*serving(run, 5), 5) == found.versions[5].served_hash
    proved(run)


def test_without_determinism_each_version_is_saved_before_its_commit_and_none_is_trained_again(
    kafka: Kafka, run_name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SyntheticRun(kafka, run_name, run_settings(model, checkpoint={"deterministic": False, "every": 3, "keep": 1}))
    run.write_random_batches(4)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path, 2)
    assert [f.stem for f in sorted((tmp_path / "checkpoints").iterdir())] == ["00000001"], "saved, and never committed"
    train(run, tmp_path, 2)
    assert [f.stem for f in sorted((tmp_path / "checkpoints").iterdir())] == ["00000001", "00000002"]
    elsewhere(monkeypatch)
    train(run, tmp_path, 4)
    assert head(run).committed == 4 and not events(run, Reconciled)
    run.close()


# --------------------------------------------------------------------------------------- replay and counterfactual


@pytest.fixture
def trained(run: SyntheticRun, tmp_path: Path) -> tuple[SyntheticRun, str]:
    """Five versions, and the file that says where their checkpoints are."""
    run.write_random_batches(5)
    config = tmp_path / "site.toml"
    config.write_text(f'[site]\nstate_dir = "{tmp_path}"\ntrainer_threads = 1\n')
    train(run, tmp_path / run.topics.run, 5)
    return run, str(config)


def test_replay_gives_the_same_bits_and_names_the_first_version_that_does_not(
    trained: tuple[SyntheticRun, str], headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = trained
    name = run.topics.run
    before = end_offsets(run.kafka, run.topics.name(POLICY))
    found = headrace.json("replay", name, "--config", config)
    assert found["equal"] and [one["version"] for one in found["versions"]] == [1, 2, 3, 4, 5]
    assert [one["train_hash"] for one in found["versions"]] == [v.train_hash.hex() for v in events(run, Version)[1:]]
    code, out, _ = headrace("replay", name, "--from", "3", "--to", "4", "--config", config)
    assert code == 0 and "versions 4 to 4 came out bit for bit" in out
    elsewhere(monkeypatch)
    code, out, _ = headrace("replay", name, "--from", "3", "--config", config)
    assert code == 1 and "version 4 came out differently" in out and out.count("DIFFERENT") == 1
    code, _, error = headrace("replay", name, "--to", "9", "--config", config)
    assert code == 2 and "versions 0 to 5" in error
    assert end_offsets(run.kafka, run.topics.name(POLICY)) == before, "a replay writes nothing"


@pytest.mark.slow
def test_counterfactual_is_a_run_of_its_own_beside_the_one_that_was(
    trained: tuple[SyntheticRun, str], headrace: Command
) -> None:
    run, config = trained
    name, same, other = run.topics.run, f"{run.topics.run}-same", f"{run.topics.run}-other"
    given = ("replay", name, "--config", config)
    kept = headrace.json(*given, "--set", "optimizer.learning_rate=1e-4", "--as", same)
    assert all(one["was"]["loss"] == one["would_be"]["loss"] for one in kept["versions"]), "nothing is other"
    twin = [e for _, e in open_run(same, run.kafka).events(POLICY) if isinstance(e, Version)]
    assert [v.train_hash for v in twin] == [v.train_hash for v in events(run, Version)]
    changes = ("--from", "1", "--set", "loss.advantage=centered", "--set", "optimizer.learning_rate=2e-4")
    code, out, error = headrace(*given, *changes, "--as", other, "--min-ess", "0.01")
    assert code == 0, error
    assert out.count("\nv") == 4 and "would be" in out and f"headrace report {other} --against {name}" in out
    found = headrace.json(*given, *changes, "--as", other, "--min-ess", "0.01")  # once more: as it was recorded
    assert [(one["version"], one["as"]) for one in found["versions"]] == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert all(one["was"]["loss"] != one["would_be"]["loss"] for one in found["versions"])
    recorded = [e for _, e in open_run(other, run.kafka).events(POLICY) if isinstance(e, Version | Derived)]
    assert isinstance(recorded[0], Derived) and (recorded[0].kind, recorded[0].parent) == ("counterfactual", name)
    assert json.loads(recorded[0].changes) == {"loss.advantage": "centered", "optimizer.learning_rate": 2e-4}
    assert [e.version for e in recorded[1:]] == [0, 1, 2, 3, 4]
    assert audit(open_run(other, run.kafka).snapshot()).failures == []
    code, out, _ = headrace(*given, *changes, "--as", other, "--min-ess", "1.1")
    assert code == 1 and "stopped at version 2: the effective sample size is" in out
    for words, said in (((*given, "--set", "model.dtype=float32", "--as", "x"), "a counterfactual may change"),
                        ((*given, *changes), "needs both"), (("replay", other), "is a counterfactual of"),
                        ((*given, "--from", "2", *changes[2:], "--as", other), "use another run id")):  # fmt: skip
        code, _, error = headrace(*words)
        assert code == 2 and said in error, error


def test_data_that_retention_took_is_named_by_every_offset_before_anything_is_trained(
    trained: tuple[SyntheticRun, str], headrace: Command
) -> None:
    run, config = trained
    samples, batches = run.topics.name(SAMPLES), run.topics.name(BATCHES)
    second = events(run, Version)[2].batch_offset
    last = last_sample(run, 1, 2)
    delete(run.kafka, batches, 0, second)
    delete(run.kafka, samples, 1, last + 1)
    code, _, error = headrace("replay", run.topics.run, "--config", config)
    assert code == 1 and f"{batches}[0]@{events(run, Version)[1].batch_offset}" in error, error
    assert "versions 1, 2 can't be trained again" in error.replace("1..2", "1, 2") and f"{samples}[1]@" in error
    code, _, error = headrace("replay", run.topics.run, "--from", "3", "--config", config)
    assert code == 0, error


def delete(kafka: Kafka, topic: str, partition: int, below: int) -> None:
    admin = clients.admin(kafka)
    for future in admin.delete_records([TopicPartition(topic, partition, below)]).values():
        future.result()


def last_sample(run: SyntheticRun, partition: int, batch: int) -> int:
    """The last sample record of a partition that a batch needs."""
    name = run.topics.name(BATCHES)
    manifest: Any = decode(list(read_range(run.kafka, name, 0, 0, end_offsets(run.kafka, name)[0]))[-6 + batch].value)
    with Reader(run.kafka) as reader:
        offsets = [ref.offset for ref in manifest.groups if ref.partition == partition]
        closures = reader.read_at(run.topics.name("groups"), partition, offsets)
    closed: Any = [decode(record.value) for record in closures.values()]
    needed: list[int] = [sample.offset for one in closed for sample in one.samples]
    return max(needed)


# ------------------------------------------------------------------------------------------------ fork and rescore


@pytest.mark.slow
def test_fork_begins_with_a_versions_weights_and_optimizer_and_counts_from_0(
    trained: tuple[SyntheticRun, str], kafka: Kafka, headrace: Command, tmp_path: Path
) -> None:
    run, _ = trained
    name = f"{run.topics.run}-fork"
    config = tmp_path / "fork.toml"
    config.write_text(f"""
run = "{name}"
[model]
path = "weights-of-4"
max_length = 128
[tasks]
dataset = "chain_sum"
[rollout]
group_size = 4
max_new_tokens = 16
[batch]
groups = 3
[optimizer]
learning_rate = 1e-4
micro_batch_tokens = 256
probe_tokens = 64
[log]
partitions = {PARTITIONS}
[site]
state_dir = "{tmp_path}"
trainer_threads = 1
[site.kafka]
"bootstrap.servers" = "{kafka["bootstrap.servers"]}"
""")
    given = ("create", str(config), "--from", f"{run.topics.run}@4", "--json")
    assert created(headrace, *given) == {"run": name, "created": True}
    assert created(headrace, *given) == {"run": name, "created": False}
    fork = SyntheticRun(kafka, name, run_settings(tmp_path / "weights-of-4", checkpoint={"every": 10},
                                                  weights={"snapshot_every": 50}))  # fmt: skip
    fork.write_random_batches(2, seed=9)
    train(fork, tmp_path / name, 2)
    parent, versions = head(run).versions[4], head(fork).versions
    assert (versions[0].served_hash, versions[0].train_hash) == (parent.served_hash, parent.train_hash)
    assert [(v.version, v.parent) for v in versions.values()] == [(0, -1), (1, 0), (2, 1)]
    (derived,) = events(fork, Derived)
    assert (derived.kind, derived.parent, derived.version) == ("fork", run.topics.run, 4)
    assert follow(*serving(fork, 2), 2) == versions[2].served_hash
    for file in (tmp_path / name / "checkpoints").iterdir():
        file.unlink()
    train(fork, tmp_path / name, 2)  # from the origin again, bit for bit
    proved(fork)
    with pytest.raises(CheckpointError, match="with which this fork begins"):
        train(fork, tmp_path / "nowhere", 2)
    fork.close()


def created(headrace: Command, *words: str) -> Any:
    headrace.patch.setattr("sys.argv", ["headrace", *words])
    headrace.capture.readouterr()
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, error = headrace.capture.readouterr()
    assert code == 0, error
    return json.loads(out)


class Lengths:
    """A verifier of the test's own: long answers are good, an empty one has no verdict."""

    def rewards(self, answers: Sequence[tuple[Task, str]]) -> list[float | None]:
        return [float(len(text)) if text else None for _, text in answers]


def test_rescored_batch_has_the_rewards_that_another_verifier_gives_the_recorded_answers(run: SyntheticRun) -> None:
    name = run.topics.name(TRAJECTORIES)
    at = end_offsets(run.kafka, name)[0]
    texts = ["", "a", "bb", "ccc"]
    run.send([Output(name, 0, encode(EpisodeEnded(
        group="g00000000", slot=slot, attempt=0, incarnation="w", sequence=2, outcome="model_success", reason="stop",
        boundary="none", reward=1.0, rewards={}, turn_rewards=(), text=text, ended_ms=0, timings_ms={},
    ))) for slot, text in enumerate(texts)])  # fmt: skip

    def one(slot: int) -> PayloadEpisode:
        made = episode(slot, [5, 6], [9, 10 + slot], [-5.0, -4.0], [0, 0], 1.0)
        return replace(made, offsets=(at + slot,))

    run.write_batch([[one(slot) for slot in range(4)]])
    (record,) = read_range(run.kafka, run.topics.name(BATCHES), 0, 0, 1)
    with Reader(run.kafka) as reader:
        batch = fetch_batch(reader, run.topics, record, run.settings.staleness)
        found = rescored(reader, run.topics, batch, Lengths())
        assert [(e.reward, e.counted) for e in found.groups[0].episodes] == [
            (None, False), (1.0, True), (2.0, True), (3.0, True)]  # fmt: skip
        assert all(e.reward == 1.0 for e in batch.groups[0].episodes)
        delete(run.kafka, name, 0, at + 2)
        with pytest.raises(DataLossError, match=rf"\[0\]@{at}\.\.{at + 1}: the answers of group g00000000"):
            rescored(reader, run.topics, batch, Lengths())


def test_verifier_that_breaks_on_an_answer_has_no_verdict_on_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "unit"))
    verifier = ScoreVerifier("scorers:misbehave", timeout_s=20)
    task = Task("t", "jsonl", json.dumps({"score": "scorers:length", "item": {"prompt": "?"}}), 0)
    try:
        assert verifier.rewards([(task, "good"), (task, "raise"), (task, "die"), (task, "fine")]) == [1, None, None, 1]
    finally:
        verifier.close()
