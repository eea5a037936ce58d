"""Settings that change in a living run: what is decided afterwards goes by them, and says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.changing import change
from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.consumers.state import state
from headrace.consumers.tables import read_small
from headrace.create import create_run
from headrace.schemas.codec import decode
from headrace.schemas.errors import RunConflict
from headrace.schemas.events import Manifest, SettingsChanged
from headrace.schemas.settings import changed
from headrace.schemas.topics import BATCHES, POLICY, RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from headrace.trainer.publish import read_policy
from tests.command import Command
from tests.scripted_run import ScriptedRun, scripted_settings


@pytest.fixture
def run(kafka: dict[str, Any], run_name: str) -> Iterator[ScriptedRun]:
    one = ScriptedRun(kafka, RunTopics(run_name), scripted_settings())
    yield one
    one.close()


def events(run: ScriptedRun, topic: str, kind: type) -> list[tuple[int, Any]]:
    name = run.topics.name(topic)
    records = read_range(run.kafka, name, 0, beginning_offsets(run.kafka, name)[0], end_offsets(run.kafka, name)[0])
    return [(r.offset, e) for r in records if isinstance(e := decode(r.value), kind)]


def test_batches_decided_after_a_change_go_by_it_also_after_restarts_and_the_ledger_closes(run: ScriptedRun) -> None:
    groups = run.settings.batch.groups
    thread = threading.Thread(target=run.until, args=(8,))
    thread.start()
    while run.version < 2 and thread.is_alive():
        time.sleep(0.01)
    first = change(run.kafka, run.topics, {"batch.groups": groups + 1, "optimizer.learning_rate": 0.5})
    assert first.changes == {"batch.groups": (groups, groups + 1),
                             "optimizer.learning_rate": (run.settings.optimizer.learning_rate, 0.5)}  # fmt: skip
    thread.join()
    run.until(run.version + 3)  # on a slow machine nothing may have been decided since the change
    second = change(run.kafka, run.topics, {"batch.groups": groups + 2})
    run.until(run.version + 4)
    manifests = [manifest for _, manifest in events(run, BATCHES, Manifest)]
    sizes = {0: groups, first.offset: groups + 1, second.offset: groups + 2}
    assert {m.settings_offset for m in manifests} == set(sizes)
    assert all(len(m.groups) == sizes[m.settings_offset] for m in manifests)
    assert [m.settings_offset for m in manifests] == sorted(m.settings_offset for m in manifests)
    opened = open_settings(run.kafka, run.topics)
    by_offset = read_policy(run.kafka, run.topics, opened).settings  # what the trainer goes by
    assert second.offset is not None and by_offset[second.offset].optimizer.learning_rate == 0.5
    source = open_run(run.topics.run, run.kafka).snapshot()
    assert audit(source).closes, audit(source).failures
    assert state(read_small(source), opened.settings, 0, 0).batch_groups == groups + 2


def test_command_says_what_changed_and_since_when(run: ScriptedRun, headrace: Command) -> None:
    name = run.topics.run
    code, out, error = headrace("set", name, "batch.max_lag=3", "staleness.apply=never")
    assert (code, error) == (0, "")
    assert "batch.max_lag: 1 -> 3" in out and 'staleness.apply: "auto" -> "never"' in out and "policy[0]@" in out
    now = changed(run.settings, {"batch.max_lag": 3, "staleness.apply": "never"})
    assert not create_run(run.kafka, run.topics, run.settings) and not create_run(run.kafka, run.topics, now)
    with pytest.raises(RunConflict, match="headrace set"):
        create_run(run.kafka, run.topics, changed(run.settings, {"batch.max_lag": 2}))
    (place, event), = events(run, POLICY, SettingsChanged)
    assert f"policy[0]@{place}" in out and json.loads(event.changes) == {"batch.max_lag": 3, "staleness.apply": "never"}
    code, out, _ = headrace("set", name, "batch.max_lag=3", "--json")
    assert (code, json.loads(out)["changes"]) == (0, {})
    assert len(events(run, POLICY, SettingsChanged)) == 1, "what holds already is not written again"


@pytest.mark.parametrize(("word", "said"), [
    ("model.path=/elsewhere", "model.path can't change in a run"),
    ("rollout.temperature=2", "rollout.temperature can't change"),
    ("log.partitions=8", "log.partitions can't change"),
    ("batch.colour=red", "no run setting 'batch.colour'"),
    ("learning_rate=1", "no run setting 'learning_rate'"),
    ("batch.groups=many", "batch.groups: Input should be a valid integer"),
    ("batch.max_lag=99", "hard_lag is smaller than batch.max_lag"),
    ("batch.max_lag", "key=value"),
])  # fmt: skip
def test_what_can_t_change_is_refused_by_name_and_nothing_is_written(
    run: ScriptedRun, headrace: Command, word: str, said: str
) -> None:
    code, out, error = headrace("set", run.topics.run, "optimizer.learning_rate=0.1", word)
    assert (code, out) == (2, "") and said in error and error.count("\n") == 1
    assert not events(run, POLICY, SettingsChanged)


def test_run_that_is_not_there_is_said_so(headrace: Command) -> None:
    code, _, error = headrace("set", "nowhere", "batch.max_lag=0")
    assert code == 2 and "no run 'nowhere'" in error
