"""One episode again: the calls of a scripted model in a fresh sandbox, the first difference, and the outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers import open_run
from headrace.consumers.recording import recording
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.dialogue import Dialogue
from headrace.producers.environments import Judged
from headrace.producers.environments.terminal import Terminal
from headrace.producers.groups import Episode
from headrace.producers.toolcalls import parsed
from headrace.schemas.errors import DataLossError, SettingsError
from headrace.schemas.events import Lease, Task
from headrace.schemas.settings import TaskSettings
from headrace.schemas.topics import RunTopics
from headrace.streams.tasks import task_source
from tests.chat_templates import TOOLS, Pairs
from tests.command import Command
from tests.sandboxes import backend_of
from tests.scripted import Script, lease
from tests.scripted_run import scripted_settings

SOLVED = ("cd /tmp; x=4", "echo $x; pwd", "echo ${x}2 > /app/answer", "ls /nowhere")
RANDOM = ("echo first", "cat /proc/sys/kernel/random/uuid", "echo 42 > answer")
KILLED = ("echo bye", "kill -9 $PPID; sleep 5")
PARTS = {
    "task.toml": '[metadata]\nsandboxes = ["docker", "process"]\n[environment]\nmemory_mb = 256\nstorage_mb = 64\n',
    "instruction.md": "Write the answer.\n",
    "environment/Dockerfile": "FROM headrace-plain:tools\nWORKDIR /app\n",
    "tests/test.sh": '[ "$(cat answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
}


def task_in(folder: Path) -> Task:
    for name, text in PARTS.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    settings = TaskSettings(source="terminal", path=str(folder), sandbox="process")
    task = task_source(settings).find(folder.name)
    assert task is not None
    return task


def play(terminal: Terminal, task: Task, episode: Episode, commands: tuple[str, ...], **said: Any) -> None:
    """What a worker does with a model that says this: each turn is written as the worker's loop writes it. `said`
    replaces what the end says."""
    dialogue = Dialogue(Pairs(TOOLS), terminal.opening(task))
    session, end = terminal.open(task), None
    episode.start(temperature=1.0, max_new_tokens=999, seed=1)
    episode.prompt(dialogue.prompt.new, dialogue.detail())
    assert dialogue.prompt.new
    for command in (*commands, None):
        asked = json.dumps({"name": "bash", "arguments": {"command": command}})
        raw = "Done." if command is None else f"<tool_call>\n{asked}\n</tool_call>"
        ids = Pairs(TOOLS).encode(raw)
        episode.model(ids, [-0.5] * len(ids), version=0)
        dialogue.written()
        dialogue.answered([*ids, 2], raw, 1, 2)
        assert parsed(raw).calls == dialogue.calls
        if command is None:
            break
        result = session.call("bash", {"command": command}, 100.0)
        if isinstance(result, Judged):
            dialogue.told([])
            end = result
            break
        dialogue.told([result])
        episode.environment(dialogue.prompt.new, dialogue.detail())
    end = session.score() if end is None else end
    session.close()
    if words := dialogue.last_words(end.facts):
        episode.environment([], words)
    facts: dict[str, Any] = {"outcome": end.ending.outcome, "reason": end.ending.reason, "reward": 0.0}
    episode.finish(**(facts | ({"reward": end.verdict.reward} if end.verdict else {}) | said))


@pytest.fixture(scope="module")
def played(kafka: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A run with one group of such episodes (its slots: SOLVED, RANDOM, one whose end is recorded as another than it
    is, KILLED) and one of a task that only answers."""
    folder, name = tmp_path_factory.mktemp("tasks") / "answer", "run-reproduced"
    task, terminal = task_in(folder), Terminal(backend_of("process"), 4, 2)
    create_run(kafka, RunTopics(name), scripted_settings())
    plays: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (SOLVED, {}), (RANDOM, {}), (("echo 41 > answer",), {"outcome": "model_success", "reward": 1.0}), (KILLED, {})]
    try:
        with open_producer(name, dict(kafka), unmanaged=True) as producer:
            with producer.group(task, size=len(plays)) as group:
                for slot, (commands, said) in enumerate(plays):
                    with group.episode(slot) as episode:
                        play(terminal, task, episode, commands, **said)
            asked = {"score": "tests.unit.scorers:vowels", "item": {"prompt": "Say it."}}
            with producer.group(Task("vowels", "jsonl", json.dumps(asked), 0), size=2) as group:
                for slot, reward in enumerate((0.5, 0.25)):
                    with group.episode(slot) as episode:
                        episode.start(temperature=1.0, max_new_tokens=9, seed=1)
                        episode.prompt([1])
                        episode.model([5, 6], [-0.5, -0.5], version=0)
                        episode.finish(reward=reward, text="ab")
    finally:
        terminal.close()
    yield name, folder


def groups(headrace: Command, name: str) -> dict[str, str]:
    """By task."""
    opened = open_run(name, {"bootstrap.servers": headrace.address}).events("trajectories", kinds=Lease)
    return {event.task.id: event.group for _, event in opened if isinstance(event, Lease)}


@pytest.mark.slow
def test_calls_come_out_the_same_or_the_first_difference_is_shown_and_the_outcome_is_told(
    played: tuple[str, Path], headrace: Command
) -> None:
    name, folder = played
    by_task = groups(headrace, name)
    tools, answers = by_task["answer"], by_task["vowels"]
    same = headrace.json("replay", name, "--episode", f"{tools}/0")
    assert (same["same"], same["first_difference"], same["calls"], same["of"]) == (True, None, 4, 4)
    assert same["now"]["reward"] == same["was"]["reward"] == 1.0 and "kind process" in same["how"]

    code, out, error = headrace("replay", name, "--episode", f"{tools}/1")
    assert (code, error) == (0, "") and "the same outcome: model_success" in out
    assert "first difference: call 1 in turn 1" in out and "call 0 (turn 0) bash: echo first\n    the same" in out
    assert "    -" in out and "    +" in out, "both random numbers"

    code, out, _ = headrace("replay", name, "--episode", f"{tools}/2")
    assert code == 1 and "ANOTHER OUTCOME: was model_success" in out and "now model_failure (stop), reward 0" in out

    killed = headrace.json("replay", name, "--episode", f"{tools}/3")
    assert (killed["same"], killed["first_difference"], killed["calls"]) == (True, None, 2)
    assert killed["now"]["reason"] == killed["was"]["reason"] == "sandbox_ended"

    code, out, _ = headrace("replay", name, "--episode", f"{answers}/0")
    assert code == 0 and "no sandbox: its answer was judged again by jsonl" in out
    assert headrace("replay", name, "--episode", f"{answers}/1")[0] == 1, "the verifier says 0.5"

    # What can't be repeated is said, in one line.
    for wanted, status, said in ((f"{tools}/9", 2, "there is no episode"), ("g/0", 2, "no episode 'g/0'"),
                                 ("g", 2, "give GROUP/SLOT")):  # fmt: skip
        code, out, error = headrace("replay", name, "--episode", wanted)
        assert (code, out, error.count("\n")) == (status, "", 1) and said in error
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        code, out, error = headrace("replay", name, "--episode", f"{tools}/0")
        assert (code, out) == (1, "") and "ran in a sandbox of kind process, and there is none here" in error
    (folder / "instruction.md").write_text("Another task.\n")
    code, out, error = headrace("replay", name, "--episode", f"{tools}/0")
    assert (code, out) == (1, "") and "isn't what it was" in error and error.count("\n") == 1


# ------------------------------------------------------------------------------------------------- the recording


def test_recording_is_of_the_attempt_that_was_leased_last_and_of_no_foreign_writer() -> None:
    first, again, foreign = Script(), Script(attempt=1, incarnation="w1"), Script(attempt=1, incarnation="w9")
    events = [lease(assignments={0: 0}), *first.whole(0.0), *foreign.whole(1.0, tokens=9),
              lease(assignments={0: 1}, incarnation="w1", opens=False), *again.whole(1.0),
              *foreign.whole(1.0)]  # fmt: skip
    found = recording(events, "g/0")
    assert (found.attempt, found.incarnation, found.task.id) == (1, "w1", "chain_sum-0-0")
    assert [len(part.tokens) for part in found.parts] == [3, 4] and found.ended is not None
    assert recording(events, "g/0", attempt=0).incarnation == "w0"
    for attempt, slot in ((7, 0), (None, 1)):
        with pytest.raises(SettingsError, match="has no attempt|no attempt"):
            recording(events, f"g/{slot}", attempt=attempt)
    with pytest.raises(SettingsError, match="there is no episode"):
        recording([], "g/0")
    with pytest.raises(DataLossError, match="opening record of group g is deleted"):
        recording(list(first.whole(0.0)), "g/0")
