"""A task source that is refreshed in a living run: rested, taken in, a level higher; also after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.changing import change
from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.schemas.topics import RunTopics
from tests.command import Command
from tests.scripted_run import ScriptedRun, scripted_settings


def ids(run: ScriptedRun) -> list[str]:
    """The tasks of the groups that the worker was given, in order of opening."""
    opened = {lease.group: lease for lease in run.leases}
    return [opened[group].task.id for group in sorted(opened)]


def lines(path: Path, count: int) -> str:
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(count)))
    return str(path)


@pytest.mark.slow
def test_tasks_rest_and_others_are_taken_in_and_a_restart_draws_the_same(
    kafka: Any, run_name: str, tmp_path: Path, headrace: Command
) -> None:
    tasks = {"source": "jsonl", "path": lines(tmp_path / "t.jsonl", 2), "score": "m:f"}
    run = ScriptedRun(kafka, RunTopics(run_name), scripted_settings(tasks=tasks), judge=lambda g, slot, a: float(slot))
    try:
        run.until(2)
        before = len(ids(run))
        assert set(ids(run)) == {"t-0", "t-1"}
        for words, said in ((["tasks.more=[\"/no/such.jsonl\"]"], "/no/such.jsonl: can't be read"),
                            (["tasks.rested=[\"t-9\"]"], "names 't-9', which is no task"),
                            (["tasks.level=1"], "whose data sets have curricula"),
                            (["tasks.path=x"], "tasks.path can't change")):  # fmt: skip
            code, out, error = headrace("set", run_name, *words)
            assert (code, out) == (2, "") and said in error and error.count("\n") == 1
        more = lines(tmp_path / "new.jsonl", 1)
        words = [f"tasks.more={json.dumps([more])}", 'tasks.rested=["t-0"]', "tasks.rest_rounds=100"]
        assert headrace("set", run_name, *words)[0] == 0
        run.until(6)  # a new coordinator, which reads both settings from the log
        run.until(8)
        after = ids(run)[before:]
        assert {"t-1", "new-0"} <= set(after) and after.count("t-0") <= 3, after
        source = open_run(run_name, kafka).snapshot()
        assert audit(source).closes, audit(source).failures
        code, out, _ = headrace("show", run_name, "tasks", "--json")
        rows = {row["id"]: row for row in json.loads(out)}
        assert code == 0 and rows.keys() == {"t-0", "t-1", "new-0"}
        assert rows["t-1"]["solved"] == 0.5 and 0 < rows["t-1"]["low"] < 0.5 < rows["t-1"]["high"] < 1
    finally:
        run.close()


def test_level_of_a_curriculum_is_set_and_one_that_there_is_not_is_refused(
    kafka: Any, run_name: str, headrace: Command
) -> None:
    pytest.importorskip("reasoning_gym")
    run = ScriptedRun(kafka, RunTopics(run_name), scripted_settings())
    try:
        code, _, error = headrace("set", run_name, "tasks.level=99")
        assert code == 2 and "the curriculum of 'chain_sum' has levels 0 to" in error
        found = change(run.kafka, run.topics, {"tasks.level": 1})
        assert found.changes == {"tasks.level": (None, 1)}
        run.until(1)
        assert all(name.startswith("chain_sum-0-level1-") for name in ids(run))
    finally:
        run.close()
