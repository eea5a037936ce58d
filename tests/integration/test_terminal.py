"""Terminal tasks on every kind of sandbox: reference solutions, forged verdicts, and the loop of turns in a worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.producers.environments import Judged, ToolResult
from headrace.producers.environments.sessions import Sessions
from headrace.producers.environments.terminal import Terminal
from headrace.producers.toolloop import ToolLoop
from headrace.schemas.errors import SandboxFailed
from headrace.schemas.events import EpisodeEnded, Span, Task
from headrace.schemas.outcomes import Outcome, Source
from headrace.schemas.settings import TaskSettings
from headrace.schemas.topics import TRAJECTORIES
from headrace.streams.tasks import TaskSource, task_source
from tests.publishing import Publishing
from tests.sandboxes import KINDS, backend_of, labelled, within
from tests.saying import SayingEngine, call
from tests.scripted import spec
from tests.working import Working

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples/terminal"
TASK_TOML = """
[metadata]
sandboxes = ["docker", "process"]
[agent]
timeout_sec = {agent}
[verifier]
timeout_sec = 20.0
env = {{ RIGHT = "42" }}
[environment]
memory_mb = 256
storage_mb = 64
"""
CHECK = """#!/bin/bash
if [ "$(cat answer)" = "$RIGHT" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module", params=list(KINDS))
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    backend = backend_of(request.param)
    one = Terminal(backend, 8, 3)
    yield one
    one.close()
    assert within(20, lambda: not labelled(backend.kind))


def source_of(path: Path, kind: str) -> TaskSource:
    return task_source(TaskSettings(source="terminal", path=str(path), sandbox=kind, output_bytes=400))


def write_task(folder: Path, *, check: str = CHECK, dockerfile: str = "", agent: float = 300.0) -> Path:
    for name, text in {"task.toml": TASK_TOML.format(agent=agent), "instruction.md": "Write the answer.\n",
                       "environment/Dockerfile": f"FROM headrace-plain:tools\nWORKDIR /app\n{dockerfile}",
                       "tests/test.sh": check}.items():  # fmt: skip
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def attempt(terminal: Terminal, task: Task, *commands: str) -> Judged:
    terminal.opening(task)
    session = terminal.open(task)
    try:
        for command in commands:
            result = session.call("bash", {"command": command}, 100.0)
            if isinstance(result, Judged):
                return result
        return session.score()
    finally:
        session.close()


def solution(task: Task) -> str:
    return f"bash <<'SOLUTION'\n{Path(json.loads(task.data)['folder'], 'solution/solve.sh').read_text()}\nSOLUTION"


# ------------------------------------------------------------------------------------------------- tasks


def test_every_task_scores_its_reference_solution_and_nothing_else(terminal: Terminal) -> None:
    names = sorted(path.parent.name for path in OWN.glob("*/task.toml"))
    assert len(names) == 6
    source = source_of(OWN, terminal.kind)
    tasks = [task for name in names if (task := source.find(name))]
    with ThreadPoolExecutor(4) as threads:
        solved = list(threads.map(lambda task: attempt(terminal, task, solution(task)), tasks))
        empty = list(threads.map(lambda task: attempt(terminal, task), tasks))
    for task, one, none in zip(tasks, solved, empty, strict=True):
        assert one.verdict is not None and one.verdict.reward == 1.0, (task.id, one)
        assert one.ending.outcome is Outcome.MODEL_SUCCESS
        assert none.verdict is not None and none.verdict.reward == 0.0, (task.id, none)
        assert none.ending.outcome is Outcome.MODEL_FAILURE


FORGED = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > "
FORGED += "/logs/verifier/reward.json; printf 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"


def test_what_the_model_leaves_where_the_verifier_reads_and_writes_is_no_verdict(terminal: Terminal, tmp_path: Path
                                                                                  ) -> None:  # fmt: skip
    task = source_of(write_task(tmp_path / "answer"), terminal.kind).find("answer")
    assert task is not None
    rows = {FORGED: "stop", "touch /tests": "scorer_broken_by_model",
            "mkdir -p /logs; ln -s /app /logs/verifier; echo 1 > /app/reward.txt": None,
            "[ -e /tests ] || [ -e /logs ] || [ -e /solution ] && echo 42 > answer": "stop"}  # fmt: skip
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(lambda row: attempt(terminal, task, row), rows))
    for (row, reason), end in zip(rows.items(), ends, strict=True):
        assert end.ending.outcome is Outcome.MODEL_FAILURE, (row, end)
        assert reason in (None, end.ending.reason), (row, end)


def test_image_that_cannot_be_built_and_verifier_without_a_reward_are_ours(terminal: Terminal, tmp_path: Path) -> None:
    broken = source_of(write_task(tmp_path / "broken", dockerfile="RUN exit 3\n"), terminal.kind).find("broken")
    assert broken is not None
    with pytest.raises(SandboxFailed, match="3"):
        terminal.opening(broken)
    for name, check in (("silent", "exit 0"), ("wordy", "echo much > /logs/verifier/reward.txt")):
        task = source_of(write_task(tmp_path / name, check=check), terminal.kind).find(name)
        assert task is not None
        end = attempt(terminal, task)
        assert (end.ending.outcome, end.ending.reason) == (Outcome.INFRA_FAILURE, "scorer_failed")


# ------------------------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Row:
    """What the model says, turn by turn, and how its attempt ends."""

    says: tuple[str, ...]
    outcome: Outcome
    reason: str
    reward: float | None
    turns: int


DONE = "That is all."
ROWS = {
    "solves it": Row((call("cd /tmp; x=4"), f"{call('echo $x; pwd')}\n{call('echo ${x}2 > /app/answer')}", DONE),
                     Outcome.MODEL_SUCCESS, "stop", 1.0, 3),
    "gives up": Row((DONE,), Outcome.MODEL_FAILURE, "stop", 0.0, 1),
    "slips in its syntax": Row(("<tool_call>\n{\"name\": bash}\n</tool_call>", call("echo 42 > answer"), DONE),
                               Outcome.MODEL_SUCCESS, "stop", 1.0, 3),
    "calls what isn't there": Row((call("print(42)", "python"), DONE), Outcome.MODEL_FAILURE, "stop", 0.0, 2),
    "never comes to an end": Row((call("echo 42 > answer"),), Outcome.MODEL_SUCCESS, "length", 1.0, 5),
    "sleeps": Row((call("echo 42 > answer; sleep 60"),), Outcome.MODEL_FAILURE, "budget_spent", 0.0, 1),
    "kills the runner": Row((call("kill -9 $PPID; sleep 5"),), Outcome.MODEL_FAILURE, "sandbox_ended", 0.0, 1),
    "fills its context": Row((call("yes | head -c 90000"), DONE), Outcome.MODEL_FAILURE, "length", 0.0, 4),
}  # fmt: skip
MAX_LENGTH = 2600


def test_worker_goes_from_turn_to_turn_and_each_attempt_ends_as_it_must(
    terminal: Terminal, kafka: Any, run_name: str, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "answer", agent=4.0)
    task = source_of(folder, terminal.kind).find("answer")
    assert task is not None
    says = [row.says for row in ROWS.values()]
    says[-1] = (says[-1][0],) * 9
    engine = SayingEngine(says)
    source = Publishing(kafka, run_name, arrays=engine.weights, model={"path": "unused", "max_length": MAX_LENGTH},
                        tasks={"source": "terminal", "path": str(folder), "sandbox": terminal.kind})  # fmt: skip
    source.begin()
    sessions = Sessions(terminal)
    working = Working(source, engine, tools=ToolLoop(sessions, engine.template, MAX_LENGTH))
    try:
        working.worker._capacity = 99
        working.lease("g", task=task, rules=spec(len(ROWS), max_tokens=2000, max_turns=5))
        working.until(lambda: working.ended("g", len(ROWS)))
        assert sessions.free == terminal.room
        spans = working.events(TRAJECTORIES, Span)
        ends = {end.slot: end for end in working.events(TRAJECTORIES, EpisodeEnded)}
    finally:
        for key in list(sessions._running):
            sessions.end(key)
        working.receiver.close()
        working.worker._tasks.close()
        working.worker._outbox.close()
    for slot, (name, row) in enumerate(ROWS.items()):
        end, own = ends[slot], [span for span in spans if span.slot == slot]
        assert (end.outcome, end.reason, end.reward) == (row.outcome, row.reason, row.reward), (name, end)
        for span in own:
            span.check()
        assert len({span.turn for span in own if span.source == Source.MODEL}) == row.turns, name
        # What was asked of the engine in the last turn, and its answer, are the tokens on the log, in their order.
        asked = [request for request in engine.asked if request.request_id.split("/")[1] == str(slot)]
        logged = np.concatenate([span.token_ids() for span in own]).tolist()
        assert logged[: len(asked[-1].prompt)] == list(asked[-1].prompt), name
        assert [span.parent for span in own] == [-1] * len(own)
    solved = [json.loads(span.detail) for span in spans if span.slot == 0 and span.detail]
    assert solved[0]["tools"][0]["function"]["name"] == "bash" and solved[0]["sandbox"]["kind"] == terminal.kind
    made = [one for detail in solved for one in detail.get("calls", ())]
    assert [one["arguments"]["command"] for one in made] == ["cd /tmp; x=4", "echo $x; pwd", "echo ${x}2 > /app/answer"]
    assert [one["content"] for one in made] == ["[exit status 0]", "4\n/tmp", "[exit status 0]"]
    assert solved[-1]["scorer"]["rewards"] == {"reward": 1.0}
    assert ends[0].timings_ms["environment"] > 0 and ends[0].timings_ms["scorer"] > 0
    long = [json.loads(span.detail) for span in spans if span.slot == 7 and span.detail]
    assert "bytes left out" in long[1]["calls"][0]["content"] and "calls" in long[-1] and "scorer" in long[-1]


# ------------------------------------------------------------------------------------------------- refusals


def test_changed_folder_is_refused_by_name(tmp_path: Path) -> None:
    backend = backend_of("process")
    terminal = Terminal(backend, 1, 1)
    try:
        task = source_of(write_task(tmp_path / "answer"), "process").find("answer")
        assert task is not None
        (tmp_path / "answer/instruction.md").write_text("Something else.\n")
        with pytest.raises(Exception, match="answer.*isn't what it was"):
            terminal.opening(task)
        shutil.rmtree(tmp_path / "answer/tests")
        with pytest.raises(Exception, match="isn't what it was"):
            terminal.open(task)
    finally:
        terminal.close()


def test_tool_that_is_asked_wrongly_says_so(terminal: Terminal, tmp_path: Path) -> None:
    task = source_of(write_task(tmp_path / "answer"), terminal.kind).find("answer")
    assert task is not None
    terminal.opening(task)
    session = terminal.open(task)
    for name, arguments in (("bash", {}), ("bash", {"command": 3}), ("sh", {"command": "ls"})):
        result = session.call(name, arguments, 10.0)
        assert isinstance(result, ToolResult) and result.content.startswith("error: there is one tool")
    session.close()
