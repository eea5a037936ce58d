"""Task sources: the same cursor gives the same task, for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import TasksExhausted
from headrace.schemas.settings import TaskSettings
from headrace.streams.tasks import TaskSource, task_source


def gym(**over: Any) -> TaskSource:
    plain = {"dataset": "chain_sum", "config": {"min_terms": 2}, "seed": 7}
    return task_source(TaskSettings.model_validate(plain | over))


def lines(path: Path, text: str, **over: Any) -> TaskSource:
    path.write_text(text, encoding="utf-8")
    plain = {"source": "jsonl", "path": str(path), "score": "module:function"}
    return task_source(TaskSettings.model_validate(plain | over))


def test_gym_task_names_its_item_and_all_that_makes_it() -> None:
    task = gym(system="be brief").at(3)
    assert task is not None and (task.id, task.source, task.seed) == ("chain_sum-7-3", "reasoning_gym", 7)
    assert json.loads(task.data) == {
        "dataset": "chain_sum", "config": {"min_terms": 2}, "seed": 7, "index": 3,
        "system": "be brief", "examples": [], "template": "{question}",
    }  # fmt: skip
    assert gym(system="be brief").at(3) == task


def test_source_without_a_size_has_no_end_and_one_with_a_size_ends_there() -> None:
    assert gym().at(10**9) is not None
    assert gym(size=2).at(1) is not None and gym(size=2).at(2) is None


def test_task_is_found_by_its_id() -> None:
    source = gym(size=10)
    assert source.find("chain_sum-7-9") == source.at(9)
    for stranger in ("chain_sum-7-10", "chain_sum-8-1", "chain_sum-7-x", ""):
        assert source.find(stranger) is None


def test_lines_are_taken_in_order_again_and_again_up_to_the_size(tmp_path: Path) -> None:
    text = '{"prompt": "1+1", "answer": 2}\n\n{"prompt": "größer?"}\n'
    source = lines(tmp_path / "sums.jsonl", text, size=3)
    tasks = [source.at(cursor) for cursor in range(3)]
    assert [task.id for task in tasks if task] == ["sums-0", "sums-1", "sums-0"] and source.at(3) is None
    assert tasks[0] is not None
    data = json.loads(tasks[0].data)
    assert (data["score"], data["item"]) == ("module:function", {"prompt": "1+1", "answer": 2})
    assert source.find("sums-1") == tasks[1] and source.find("sums-2") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no task"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n["b"]', "line 3: a task is a JSON object"),
        ('{"question": "a"}', "line 1: a task is"),
    ],
)
def test_empty_or_broken_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TasksExhausted, match=f"tasks.jsonl.*{said}"):
        lines(tmp_path / "tasks.jsonl", text)


def test_missing_file_is_named() -> None:
    with pytest.raises(TasksExhausted, match="/no/such/file.jsonl"):
        task_source(TaskSettings.model_validate({"source": "jsonl", "path": "/no/such/file.jsonl", "score": "m:f"}))


def test_source_makes_tasks_without_their_environment() -> None:
    code = "import headrace.streams.tasks, sys; assert 'reasoning_gym' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
