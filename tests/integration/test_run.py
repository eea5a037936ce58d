"""A run end to end: from prompts to new weights, through a real Kafka, as a person starts it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.consumers.figures import measure
from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.consumers.waits import EARLIER
from headrace.schemas import delta
from headrace.schemas.events import AlignmentProbe, DeadLetter, Publication, Version
from headrace.schemas.topics import DEADLETTER, FLEET, POLICY, TRAJECTORIES
from headrace.streams.log import clients
from tests.reference_fold import check_batches
from tests.running import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VERSIONS = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, kafka: dict[str, Any]) -> Iterator[Running]:
    """A strictly synchronous run of 12 versions in float32 that met garbage on its way."""
    running = Running(tmp_path_factory.mktemp("run"), kafka, f"run-e2e-{os.getpid()}", max_lag="max_lag = 0",
                      dtype='dtype = "float32"')  # fmt: skip
    running.start("--stop-at", str(VERSIONS))
    running.wait_for(2)
    producer = clients.producer(kafka)
    for garbage in (b"", b"not an event", b"\xc3\x01" + b"\0" * 40):
        producer.produce(running.topics.name(TRAJECTORIES), value=garbage, partition=1)
    producer.flush(10)
    code = running.finish()
    assert code == 0, running.said()
    yield running
    running.kill_all()


def versions(running: Running) -> list[Version]:
    return [e for _, e in open_run(running.topics.run, running.kafka).events(POLICY) if isinstance(e, Version)]


def test_run_stops_at_the_version_and_its_ledger_closes(finished: Running) -> None:
    assert [v.version for v in versions(finished)] == list(range(VERSIONS + 1))
    log = open_run(finished.topics.run, finished.kafka).snapshot()
    ledger = audit(log)
    assert ledger.closes, ledger.failures
    assert ledger.tokens["trained"] > 0
    assert check_batches(log) == []


def test_garbage_in_trajectories_is_kept_aside_with_its_address_and_the_partition_goes_on(finished: Running) -> None:
    run = open_run(finished.topics.run, finished.kafka)
    letters = [e for _, e in run.events(DEADLETTER) if isinstance(e, DeadLetter)]
    assert {e.partition for e in letters} == {1}
    assert sorted(e.kind for e in letters) == ["UndecodableRecord", "UndecodableRecord", "UnknownSchema"]
    assert b"not an event" in {e.value for e in letters}
    after = max(e.offset for e in letters)
    assert any(r.partition == 1 and r.offset > after for r, _ in run.events(TRAJECTORIES))


def test_at_zero_lag_engine_and_trainer_agree_in_float32_at_first_and_after_ten_versions(finished: Running) -> None:
    """ms-swift#8196, trl#4159: an identical model has log-ratios of about 0."""
    trained = versions(finished)[1:]
    assert len(trained) >= 10
    for version in trained:
        assert version.metrics["lag_max"] == 0
        assert version.metrics["mismatch_max"] < 1e-4, version.version


def test_replicas_probes_are_judged_with_the_version_that_they_sampled(finished: Running) -> None:
    """verl#6780: at zero lag, for each replica, prefill and decoding apart; in no group and no account."""
    run = open_run(finished.topics.run, finished.kafka)
    probes = {one.version: one for _, one in run.events(FLEET) if isinstance(one, AlignmentProbe)}
    judged = [one for version in versions(finished) for one in version.replicas]
    assert judged and probes.keys() <= {0, 10}
    for one in judged:
        assert one.prefill is not None and one.decode is not None
        assert one.prefill.tokens + one.decode.tokens == sum(probes[one.version].counts)
        for found in (one.prefill, one.decode):
            assert found.kind == "aligned" and found.mismatch < 1e-8 and abs(found.bias) < 1e-4


def test_weights_served_from_the_log_equal_the_trainers_bit_for_bit(finished: Running) -> None:
    from safetensors.numpy import load_file

    from headrace.producers.engines.hf import HfEngine
    from headrace.producers.publications import served_state

    engine = HfEngine(str(finished.folder / "model"), slots=1, max_tokens=64, dtype="float32")
    served = served_state(finished.kafka, finished.topics, engine.served_arrays(), VERSIONS)
    newest = versions(finished)[-1]
    assert delta.state_hash(delta.as_state(served, "float32")) == newest.served_hash
    checkpoint = load_file(finished.folder / "home" / "runs" / finished.topics.run / "checkpoints"
                           / f"{VERSIONS:08d}.safetensors")  # fmt: skip
    for name, bits in served.items():
        master = next(t for key, t in checkpoint.items() if key.endswith(name) and key.startswith("master"))
        assert np.array_equal(master.view(np.uint32), bits), name


def test_publications_are_a_folder_then_deltas_and_snapshots(finished: Running) -> None:
    events = [e for _, e in open_run(finished.topics.run, finished.kafka).events(POLICY) if isinstance(e, Publication)]
    kinds = {(e.version, e.kind) for e in events}
    assert {v for v, kind in kinds if kind == "delta"} == set(range(1, VERSIONS + 1))
    # They come when they pay, and at the latest every fourth version (the run's `weights.snapshot_every`).
    snapshots = sorted(v for v, kind in kinds if kind == "snapshot")
    assert all(0 < b - a <= 4 for a, b in itertools.pairwise([0, *snapshots])) and snapshots[-1] > VERSIONS - 4
    assert events[0].kind == "path" and events[0].version == 0


def test_waiting_is_measured_and_each_batch_has_a_straggler_with_a_name_and_a_state(finished: Running) -> None:
    found = measure(open_run(finished.topics.run, finished.kafka).snapshot())
    waits = found.waits
    assert waits.steps_s.keys() == {"queue", "prefill", "decode", "scorer"}
    assert all(seconds > 0 for seconds in waits.steps_s.values())
    assert waits.engine["busy"] > 0 and waits.engine["paced"] > 0  # the trainer's turn at max_lag = 0
    assert sum(waits.engine.values()) == pytest.approx(1.0)
    assert waits.trainer["waiting"] > 0 and waits.trainer["compute"] > 0
    assert [one.batch for one in waits.stragglers] == list(range(1, found.batches + 1))
    for one in waits.stragglers:
        assert one.state in {*waits.steps_s, EARLIER} and one.state_s > 0
    assert waits.gpu_hours is None


def test_same_run_goes_on_to_a_later_version_and_other_settings_are_refused(finished: Running) -> None:
    finished.start("--stop-at", str(VERSIONS))
    assert finished.finish() == 0
    assert f"version {VERSIONS} is published already" in finished.said()
    text = finished.config.read_text()
    finished.config.write_text(text.replace("max_new_tokens = 24", "max_new_tokens = 20"))
    finished.start("--stop-at", str(VERSIONS + 2))
    assert finished.finish() == 2
    assert "rollout.max_new_tokens: the run has 24, given 20" in finished.said()
    finished.config.write_text(text)
    finished.start("--stop-at", str(VERSIONS + 2))
    assert finished.finish() == 0, finished.said()
    assert [v.version for v in versions(finished)] == list(range(VERSIONS + 3))
    ledger = audit(open_run(finished.topics.run, finished.kafka).snapshot())
    assert ledger.closes, ledger.failures


def test_ctrl_c_drains_and_a_second_one_stops_at_once(tmp_path: Path, kafka: dict[str, Any], run_name: str) -> None:
    running = Running(tmp_path, kafka, run_name)
    try:
        running.start()
        running.wait_for(2)
        running.drain()
        assert "stopping: roles finish what they have begun" in running.said()
        running.start()
        running.wait_for(running.version() + 1)
        assert running.process is not None
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
        ledger = audit(open_run(run_name, kafka).snapshot())
        assert ledger.closes, ledger.failures
    finally:
        running.kill_all()


def test_process_that_dies_again_and_again_ends_the_run_with_its_own_last_words(
    tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    running = Running(tmp_path, kafka, run_name, max_deaths='max_deaths = 2\ndevice = "no-such-device"')
    try:
        running.start()
        assert running.finish() == 1
        out = (running.folder / "out").read_text()
        assert "worker died 2 times in a row" in out and "no-such-device" in out
    finally:
        running.kill_all()


def test_run_is_supervised_once_on_a_machine(tmp_path: Path, kafka: dict[str, Any], run_name: str) -> None:
    running = Running(tmp_path, kafka, run_name)
    try:
        running.start()
        running.wait_for(0)
        code, said = command("run", str(running.config), HEADRACE_HOME=str(running.folder / "home"))
        assert code == 2 and "already supervised here" in said, said
    finally:
        running.kill_all()


def command(*words: str, bootstrap: str = "127.0.0.1:1", **environment: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "HEADRACE_BOOTSTRAP_SERVERS": bootstrap, **environment})  # fmt: skip
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("old", "new", "code", "expected"),
    [
        (r'path = ".*model"', 'path = "/nowhere"', 2, "model.path: /nowhere: no such folder"),
        (r"group_size = 4", "group_size = -1", 2, "rollout.group_size"),
        (r'"bootstrap.servers" = ".*"', '"bootstrap.servers" = "127.0.0.1:9"', 1, "no Kafka broker answers at"),
        (r'"bootstrap.servers" = ', '"no.such.property" = "x"\n"bootstrap.servers" = ', 2, "no.such.property"),
        (r'score = "scorers:vowels"', "", 2, "needs `path` and `score`"),
    ],
)
def test_wrong_file_is_one_clear_line(
    old: str, new: str, code: int, expected: str, tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    running = Running(tmp_path, kafka, run_name)
    text, found = re.subn(old, new, running.config.read_text(), count=1)
    assert found == 1
    running.config.write_text(text)
    got, said = command("run", str(running.config))
    assert got == code and expected in said and "Traceback" not in said, said


def test_unknown_run_and_role_are_one_clear_line(kafka: dict[str, Any]) -> None:
    bootstrap = kafka["bootstrap.servers"]
    for words in (("ledger", "nobody"), ("status", "nobody"), ("cat", "nobody"), ("start", "worker", "nobody")):
        code, said = command(*words, bootstrap=bootstrap)
        assert code == 2 and "no run 'nobody'" in said and "Traceback" not in said, said
    code, said = command("start", "captain", "nobody", bootstrap=bootstrap)
    assert code == 2 and "no role 'captain'" in said


def test_scorer_module_that_is_missing_ends_the_run_with_a_reason(
    tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    """Every episode fails at the scorer: bounded attempts, no group trains, and the run says so instead of hanging."""
    running = Running(tmp_path, kafka, run_name, score='score = "nowhere:nothing"', max_lag="max_groups_per_batch = 6")
    try:
        running.start()
        assert running.finish() == 1
        said = running.said()
        assert "scorer" in said and "Traceback" not in said, said
    finally:
        running.kill_all()
