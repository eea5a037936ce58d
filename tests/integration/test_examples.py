"""The worked examples find what was hidden in a run for them to find."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import mismatch, slowest_batches, suspicious_rewards
from headrace.consumers import open_run
from headrace.create import create_run
from headrace.models import tiny_model
from headrace.producers import open_producer
from headrace.producers.engines import GenerationRequest, Sampling
from headrace.schemas.events import Task
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.log.policy import open_settings
from tests.roles import role
from tests.scripted_run import ScriptedRun, scripted_settings


def timings(group: str, slot: int) -> dict[str, float]:
    """Slot 1 waits 2 s for its environment; in one group, 9 s."""
    late = 9000.0 if group == "g00000003" else 2000.0
    return {"decode": 100.0, "environment": late if slot else 0.0}


def test_the_slowest_batches_are_named_with_what_held_them_up(kafka: Mapping[str, Any], run_name: str) -> None:
    run = ScriptedRun(kafka, RunTopics(run_name), scripted_settings(), timings=timings,
                      judge=lambda group, slot, attempt: float(slot == 0))  # fmt: skip
    run.until(3)
    run.close()
    found = slowest_batches.slowest(open_run(run_name, kafka), 10)
    assert len(found) >= 3 and (found["span_s"].diff().dropna() <= 0).all()
    assert (found["slot"] == 1).all() and (found["attempts"] == 1).all()
    expected = [timings(group, 1)["environment"] / 1000 for group in found["group"]]
    assert found["environment"].tolist() == expected and (found["decode"] == 0.1).all()


def test_a_scorer_that_contradicts_itself_and_an_answer_that_always_wins_are_found(
    kafka: Mapping[str, Any], run_name: str
) -> None:
    create_run(kafka, RunTopics(run_name), scripted_settings(rollout={"group_size": 4}))
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        for task in ("honest", "contradicted", "open-sesame"):
            with producer.group(Task(task, "test", "{}", 0), size=4) as group:
                for slot in group.slots:
                    with group.episode(slot) as episode:
                        episode.start(temperature=1.0, max_new_tokens=8, seed=slot)
                        episode.prompt([1, 2])
                        answer = [7, 7] if task != "honest" else [slot, 8]
                        episode.model(answer, [-0.5, -0.5], version=0)
                        episode.finish(reward=1.0 if task != "contradicted" else float(slot % 2))
    _close(kafka, run_name, 3)
    found = suspicious_rewards.suspicious(open_run(run_name, kafka))
    assert sorted(found.index) == ["contradicted", "open-sesame"]
    assert found.loc["contradicted", "contradicted"] == 1 and found.loc["open-sesame", "one_answer"]


@pytest.mark.slow
def test_a_mismatch_is_found_at_its_position_and_engine(
    kafka: Mapping[str, Any], run_name: str, tmp_path: Path
) -> None:
    """Real tokens of the built-in engine; what the second "engine" says is off by 0.5 nats from position 32 on."""
    from headrace.producers.engines.hf import HfEngine

    model = tiny_model(tmp_path / "model")
    sections = {"model": {"path": str(model), "dtype": "float32"}, "tasks": {"dataset": "chain_sum"},
                "rollout": {"group_size": 2}}  # fmt: skip
    settings = RunSettings.model_validate(sections)
    create_run(kafka, RunTopics(run_name), settings)
    engine = HfEngine(str(model), slots=4, max_tokens=96, dtype="float32")
    prompt = [5, 6, 7, 8]
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        with producer.group(Task("t", "test", "{}", 0), size=2) as group:
            for slot, name in enumerate(("sound", "broken")):
                engine.submit(GenerationRequest(name, prompt, Sampling(1.0, 48, slot)))
                tokens, logprobs = list[int](), list[float]()
                while engine.active:
                    for one in engine.step():
                        tokens += one.token_ids.tolist()
                        logprobs += one.logprobs.tolist()
                said = np.array(logprobs) - 0.5 * (name == "broken") * (np.arange(len(tokens)) + len(prompt) >= 32)
                with group.episode(slot) as episode:
                    episode.start(temperature=1.0, max_new_tokens=48, seed=slot, engine={"name": name})
                    episode.prompt(prompt)
                    episode.model(tokens, said, version=0)
                    episode.finish(reward=float(slot))
    _close(kafka, run_name, 1)
    found = mismatch.mismatch(open_run(run_name, kafka)).set_index(["engine", "position"])["mean"]
    assert found["sound"].max() < 1e-3
    assert found["broken"].iloc[:-1].max() < 1e-3 and found["broken"].iloc[-1] == pytest.approx(0.5, abs=1e-3)
    assert found.index.get_level_values("position")[-1].left == 32


def _close(kafka: Mapping[str, Any], run: str, groups: int) -> None:
    """Let the assembler close that many groups."""
    topics = RunTopics(run)
    with role(run_assembler, kafka, topics, open_settings(kafka, topics).settings) as raised:
        end = time.monotonic() + 60
        while len(list(open_run(run, kafka).groups())) < groups and not raised:
            assert time.monotonic() < end, "the groups did not close"
            time.sleep(0.2)
    assert not raised
