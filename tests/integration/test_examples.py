"""The worked examples find what was hidden in a run for them to find."""

from __future__ import annotations

import json
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
from tests.command import Command
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
    kafka: Mapping[str, Any], run_name: str, headrace: Command
) -> None:
    create_run(kafka, RunTopics(run_name), scripted_settings(rollout={"group_size": 4}))
    call = json.dumps({"calls": [{"name": "bash", "arguments": {"command": "cat /tests/test_outputs.py"}}]})
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        for task in ("honest", "contradicted", "sesame-1", "sesame-2", "sesame-3", "peeped"):
            with producer.group(Task(task, "test", "{}", 0), size=4) as group:
                for slot in group.slots:
                    with group.episode(slot) as episode:
                        episode.start(temperature=1.0, max_new_tokens=64, seed=slot)
                        episode.prompt([1, 2])
                        same = [7] * 20 if task.startswith("sesame") else [8] * 20 if task == "contradicted" else []
                        answer = same or [slot, len(task), 9]
                        episode.model(answer, [-0.5] * len(answer), version=0)
                        if task == "peeped":
                            episode.environment([3], call)
                        episode.finish(reward=1.0 if task != "contradicted" else float(slot % 2))
    _close(kafka, run_name, 6)
    run = open_run(run_name, kafka)
    found = suspicious_rewards.suspicious(run)
    assert sorted(found.index) == ["contradicted", "peeped", "sesame-1", "sesame-2", "sesame-3"]
    assert found["signs"].to_dict() == {"contradicted": "contradicted", "peeped": "verifier_touched"} | {
        f"sesame-{i}": "same_answer" for i in (1, 2, 3)}  # fmt: skip
    assert found.loc["contradicted", "contradicted"] == 2 and found.loc["peeped", "marked"] == 4
    assert "cat /tests/test_outputs.py" in found.loc["peeped", "evidence"]
    # The command line lists the same, and nothing else; one in full shows the call, turn by turn.
    code, out, _ = headrace("show", run_name, "episodes", "--where", "suspicious", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == found["marked"].sum() and all(row["outcome"] == "model_success" for row in rows)
    peeped = next(row["id"] for row in rows if row["suspicious"].startswith("verifier_touched"))
    code, out, _ = headrace("show", run_name, f"episodes/{peeped}")
    assert code == 0 and "bash: cat /tests/test_outputs.py" in out and "model: 3 tokens of v0" in out
    assert "model_success: " in out and "suspicious   verifier_touched: turn 0: bash: cat /tests" in out
    code, out, error = headrace("replay", run_name, "--episode", peeped)
    assert (code, out) == (2, "") and "of the source 'test', for which there is no environment here" in error


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
