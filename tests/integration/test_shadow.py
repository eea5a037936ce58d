"""Rollouts that verl, prime-rl and TRL dumped become runs, with every number that the dump has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples import shadow
from examples.dumped import Text, read
from headrace.consumers import audit, open_run
from headrace.consumers.report import gather
from headrace.consumers.report.sections import sections
from headrace.models import tiny_model
from headrace.schemas.errors import InvalidRecord, SettingsError

DUMPS = Path(__file__).parents[1] / "data" / "shadow"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("shadow") / "model")


def brought(framework: str, run: str, kafka: Mapping[str, Any], model: Path | None = None) -> Any:
    """The run's ended episodes, one row each, after the dump was brought into it; its account closes."""
    argv = [framework, str(DUMPS / framework), "--run", run, "--bootstrap", str(kafka["bootstrap.servers"])]
    assert shadow.main([*argv, *(["--model", str(model)] if model else [])]) == 0
    ledger = audit(open_run(run, kafka).snapshot())
    assert ledger.closes, ledger.failures
    assert {closure for closure, _ in ledger.groups} == {"unmanaged"}
    assert ledger.tokens.total() == ledger.tokens["excluded"] == ledger.logged_tokens > 0
    return open_run(run, kafka).table("episodes").to_pandas()


def test_prime_rl_rollouts_keep_tokens_logprobs_versions_times_and_failures(
    kafka: Mapping[str, Any], run_name: str
) -> None:
    episodes = brought("prime-rl", run_name, kafka)
    rows = [json.loads(line) for step in (1, 2) for line in
            (DUMPS / f"prime-rl/rollouts/step_{step}/train_rollouts.jsonl").read_text().splitlines()]  # fmt: skip
    traces = [trace for row in rows for trace in row.get("traces", [row])]
    assert len(episodes) == len(traces) == 12 and episodes["group"].nunique() == 4
    lost = episodes[episodes["outcome"] == "infra_failure"]
    assert lost["reason"].tolist() == ["SandboxError"] and lost["boundary"].tolist() == ["environment"]
    assert lost["reward"].isna().all()
    rewards = [trace["rewards"]["correct"]["score"] for trace in traces if trace["rewards"]]
    assert sorted(episodes["reward"].dropna()) == sorted(rewards)
    run = open_run(run_name, kafka)
    tokens = run.table("tokens").to_pandas()
    sampled = tokens[tokens["source"] == "model"]
    assert sorted(sampled["logprob"].round(4)) == pytest.approx(sorted(
        value for trace in traces for node in trace["nodes"] for value in node["logprobs"]), abs=1e-4)  # fmt: skip
    assert sorted(tokens["token"]) == sorted(i for t in traces for node in t["nodes"] for i in node["token_ids"])
    assert sampled.groupby("version", observed=True).ngroups == 2  # one of step 2 was sampled a version before
    report = gather(run.snapshot(), run.settings, 0)
    steps = {"sandbox_start": 0.5, "decode": 1.5, "environment": 0.5, "scorer": 0.1}
    assert report.figures.waits.steps_s == pytest.approx({name: 12 * s for name, s in steps.items()}, rel=1e-3)
    assert report.reliability.lost_by_boundary == {"environment": 1} and len(report.reliability.tasks) == 2
    assert sum(window.groups for window in report.figures.rewards) == 4
    assert {section.key for section in sections(report)} >= {"reliability", "spent"}


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "groups", "rewards"), [
    ("verl", 4, [0.0] * 8 + [1.0] * 4), ("trl", 2, None),
])  # fmt: skip
def test_dumped_text_is_read_by_the_model_that_is_named(
    kafka: Mapping[str, Any], run_name: str, model: Path, framework: str, groups: int, rewards: list[float] | None
) -> None:
    episodes = brought(framework, run_name, kafka, model)
    dumped = list(read(framework, DUMPS / framework))
    assert len(episodes) == len(dumped) and episodes["group"].nunique() == groups
    known = sorted(one.reward for one in dumped if one.reward is not None)
    assert sorted(episodes["reward"].dropna()) == pytest.approx(known)
    assert rewards is None or sorted(episodes["reward"]) == rewards
    tokens = open_run(run_name, kafka).table("tokens").to_pandas()
    texts = sorted(bytes_of(one) for one in dumped)
    ids = tokens[tokens["source"] == "model"].groupby(["group", "slot"], observed=True).size()
    assert sorted(ids) == sorted(len(text) for text in texts)  # a byte each: that is the tiny model's tokenizer
    again = [framework, str(DUMPS / framework), "--run", run_name, "--bootstrap", str(kafka["bootstrap.servers"]),
             "--model", str(model)]  # fmt: skip
    assert shadow.main(again) == 0
    assert len(list(open_run(run_name, kafka).groups())) == groups  # nothing is brought twice


def bytes_of(rollout: Any) -> bytes:
    assert isinstance(rollout.content, Text)
    return rollout.content.completion.encode()


def test_text_without_a_model_and_damaged_dumps_are_named(
    kafka: Mapping[str, Any], run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match="--model"):
        shadow.shadow("verl", DUMPS / "verl", run_name, kafka)
    with pytest.raises(SettingsError, match="train_rollouts|rollouts.jsonl"):
        list(read("prime-rl", tmp_path))
    shutil.copytree(DUMPS / "verl", tmp_path / "verl")
    with (tmp_path / "verl" / "2.jsonl").open("a") as file:
        file.write('{"input": "a", "step": 2}\n')
    with pytest.raises(InvalidRecord, match=r"2\.jsonl, line 7: it has no `output`"):
        list(read("verl", tmp_path / "verl"))
    trace = json.loads((DUMPS / "prime-rl/rollouts/step_1/train_rollouts.jsonl").read_text().splitlines()[0])
    trace["nodes"][1]["logprobs"].pop()
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(trace) + "\n")
    with pytest.raises(InvalidRecord, match=r"rollouts\.jsonl, line 1: a node has"):
        list(read("prime-rl", tmp_path))
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1")
    argv = ["trl", str(tmp_path), "--run", f"{run_name}-trl", "--bootstrap", str(kafka["bootstrap.servers"])]
    assert shadow.main(argv) == 1 and "completions_00001.parquet" in capsys.readouterr().err
