"""Task sources: the same cursor gives the same task, for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import InvalidRecord, TasksExhausted
from headrace.schemas.events import SettingsChanged
from headrace.schemas.hashes import GENESIS
from headrace.schemas.settings import TaskSettings
from headrace.streams.coordinator import Coordinator
from headrace.streams.tasks import TaskSource, task_source
from tests.scripted import record, run_settings


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


def test_task_at_a_level_says_so_in_its_name_and_is_found_by_it() -> None:
    task = gym(level=2).at(3)
    assert task is not None and task.id == "chain_sum-7-level2-3" and json.loads(task.data)["level"] == 2
    for source in (gym(), gym(level=0), gym(level=2)):
        assert source.find("chain_sum-7-level2-3") == task, "a name is one task, whatever the level is by now"
        assert source.find("chain_sum-7-3") == gym().at(3)


def test_tasks_that_rest_are_drawn_in_one_of_their_rounds(tmp_path: Path) -> None:
    text = "".join(f'{{"prompt": "{i}"}}\n' for i in range(3))
    source = lines(tmp_path / "t.jsonl", text, rested=["t-1"], rest_rounds=3)
    drawn = [task.id for cursor in range(14) if (task := source.at(cursor))]
    assert drawn == ["t-0", "t-1", "t-2", *["t-0", "t-2"] * 2] * 2
    assert source.find("t-1") is not None
    alone = lines(tmp_path / "t.jsonl", text, rested=["t-0", "t-1", "t-2"])
    assert [task.id for cursor in range(4) if (task := alone.at(cursor))] == ["t-0", "t-1", "t-2", "t-0"]
    with pytest.raises(TasksExhausted, match="tasks.rested names 'u-1'.*begins with 't-0'"):
        lines(tmp_path / "t.jsonl", text, rested=["u-1"])


def test_further_files_are_taken_in_behind_the_first_and_leave_its_names_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "harder.jsonl").write_text('{"prompt": "c"}')
    plain = '{"prompt": "a"}\n{"prompt": "b"}'
    source = lines(tmp_path / "first.jsonl", plain, more=[str(tmp_path / "harder.jsonl")])
    assert [task.id for cursor in range(4) if (task := source.at(cursor))] == [
        "first-0", "first-1", "harder-0", "first-0"]  # fmt: skip
    assert source.find("first-1") == lines(tmp_path / "first.jsonl", plain).find("first-1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "first.jsonl").write_text('{"prompt": "c"}')
    with pytest.raises(TasksExhausted, match="first.jsonl: it has a task first-0 as a file or folder before it"):
        lines(tmp_path / "first.jsonl", plain, more=[str(tmp_path / "sub" / "first.jsonl")])


@pytest.mark.parametrize("over", [{"rested": ["x"]}, {"more": ["x"]}])
def test_what_a_source_can_t_do_is_no_setting_of_it(over: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set `level`"):
        gym(**over)
    with pytest.raises(ValueError, match="whose data sets have curricula"):
        task_source(TaskSettings.model_validate({"source": "jsonl", "path": "x", "score": "m:f", "level": 1}))


def test_source_makes_tasks_without_their_environment() -> None:
    code = "import headrace.streams.tasks, sys; assert 'reasoning_gym' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_coordinator_draws_by_the_settings_in_force_and_what_they_name_must_be_there(tmp_path: Path) -> None:
    path, more = tmp_path / "t.jsonl", tmp_path / "more.jsonl"
    path.write_text('{"prompt": "a"}\n')
    more.write_text('{"prompt": "b"}\n')
    settings = run_settings(tasks={"source": "jsonl", "path": str(path), "score": "m:f"})
    coordinator = Coordinator(settings, task_source(settings.tasks))

    def change(**changes: Any) -> None:
        said = json.dumps({f"tasks.{name}": value for name, value in changes.items()})
        event = SettingsChanged(0, GENESIS, "set", said, 0)
        coordinator.observe("policy", record(0, event), event)

    def drawn() -> list[str]:
        return [task.id for cursor in range(3) if (task := coordinator._source.at(cursor))]

    change(more=[str(more)])
    assert drawn() == ["t-0", "more-0", "t-0"]
    change(rested=["t-0"], size=2)
    assert drawn() == ["t-0", "more-0"] and coordinator.settings.tasks.more == (str(more),)
    with pytest.raises(InvalidRecord, match="tasks.path can't change"):
        change(path="x")
    with pytest.raises(TasksExhausted, match="/no/such.jsonl: can't be read"):
        change(more=["/no/such.jsonl"])
