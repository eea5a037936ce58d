"""A run that is deleted is gone: topics, blobs and state; one that is at work, or not there, is left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.create import create_run
from headrace.removing import belongings, remove
from headrace.schemas.codec import encode
from headrace.schemas.errors import RunBusy
from headrace.schemas.events import Heartbeat
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import ALL_TOPICS, FLEET, POLICY, RunTopics
from headrace.streams.log import clients
from headrace.streams.log.blobs import open_blobs, open_weights
from headrace.streams.log.policy import runs
from tests.command import Command
from tests.scripted import run_settings

Kafka = Mapping[str, Any]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def made(kafka: Kafka, name: str, tmp_path: Path) -> RunSettings:
    settings = run_settings(log={"partitions": 2, "blob_url": (tmp_path / "blobs").as_uri()},
                            weights={"store_url": (tmp_path / "weights").as_uri()},
                            rollout={"lease_timeout_s": 8.0})  # fmt: skip
    create_run(kafka, RunTopics(name), settings)
    return settings


def there(kafka: Kafka, name: str) -> set[str]:
    known = clients.admin(kafka).list_topics(timeout=30.0).topics
    return {topic for topic in ALL_TOPICS if RunTopics(name).name(topic) in known}


def test_deleted_run_is_gone_with_blobs_and_state_and_no_other_is_touched(
    kafka: Kafka, run_name: str, headrace: Command, tmp_path: Path
) -> None:
    settings, other = made(kafka, run_name, tmp_path), f"{run_name}-other"
    made(kafka, other, tmp_path)
    for name in (run_name, other):
        blobs = open_blobs(settings.log, name)
        assert blobs is not None
        blobs.put(b"large")
        weights = open_weights(settings.weights.store_url, name)
        assert weights is not None
        weights.put(1, b"chunk")
        (tmp_path / "home" / "runs" / name / "checkpoints").mkdir(parents=True)
    code, out, _ = headrace("delete", run_name)
    assert code == 1 and "with --yes" in out and there(kafka, run_name) == set(ALL_TOPICS)
    code, out, error = headrace("delete", run_name, "--yes", "--json")
    assert (code, error) == (0, "") and json.loads(out)["deleted"]
    assert there(kafka, run_name) == set() and run_name not in runs(kafka, "headrace")
    assert there(kafka, other) == set(ALL_TOPICS)
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [other]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [other]
    assert [path.name for path in (tmp_path / "home" / "runs").iterdir()] == [other]
    code, _, error = headrace("delete", run_name, "--yes")
    assert code == 2 and f"no run {run_name!r}" in error
    made(kafka, run_name, tmp_path)  # its name is free again
    assert there(kafka, run_name) == set(ALL_TOPICS)


@pytest.mark.slow
def test_run_at_work_is_refused_and_keeps_everything(kafka: Kafka, run_name: str, tmp_path: Path) -> None:
    made(kafka, run_name, tmp_path)
    topics = RunTopics(run_name)
    producer = clients.producer(kafka)
    producer.produce(topics.name(FLEET), encode(Heartbeat("w", "w0", 0, 1, 1, True, "{}", {})))
    assert producer.flush(30) == 0
    found = belongings(kafka, topics, tmp_path / "none")
    with pytest.raises(RunBusy, match="is at work"):
        remove(kafka, topics, found)
    assert there(kafka, run_name) == set(ALL_TOPICS)
    time.sleep(9.0)
    remove(kafka, topics, found)
    assert there(kafka, run_name) == set()


def test_interrupted_deletion_is_finished_by_the_next(kafka: Kafka, run_name: str, tmp_path: Path) -> None:
    """Whatever is gone already: `policy` goes last, so the run is still found."""
    made(kafka, run_name, tmp_path)
    topics = RunTopics(run_name)
    found = belongings(kafka, topics, tmp_path / "none")
    assert found.topics[-1] == topics.name(POLICY)
    clients.delete_topics(kafka, found.topics[:4])
    again = belongings(kafka, topics, tmp_path / "none")
    assert set(again.topics) == set(found.topics[4:])
    remove(kafka, topics, again)
    assert there(kafka, run_name) == set()
