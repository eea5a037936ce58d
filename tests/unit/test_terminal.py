"""Task folders, Dockerfiles without Docker, reward files and dialogues: what is decided without a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.producers.dialogue import UNREADABLE, Dialogue
from headrace.producers.environments import Opening, ToolResult
from headrace.producers.environments.reward import verdict_of
from headrace.producers.sandboxes.dockerfile import Command, Files, Folder, Variable, images, steps
from headrace.schemas.errors import InvalidTask, TasksExhausted
from headrace.schemas.settings import TaskSettings
from headrace.schemas.taskfolder import digest_of, parse_task, unknown
from headrace.streams.tasks import task_source
from tests.chat_templates import STRIPS_REASONING, TOOLS, Pairs
from tests.saying import END, call

EXAMPLES = Path(__file__).parents[2] / "examples/terminal"


# ------------------------------------------------------------------------------------------------- task folders


def test_task_of_the_public_format_says_its_time_outs_and_limits() -> None:
    task = parse_task("task.toml", """
version = "1.0"
[metadata]
author_name = "somebody"
tags = ["git"]
anything = {of = "theirs"}
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 1800
[environment]
build_timeout_sec = 60
docker_image = "somewhere/task:1"
cpus = 2
memory = "2G"
storage = "512M"
allow_internet = true
""")
    assert (task.agent.timeout_sec, task.verifier.timeout_sec, task.environment.build_timeout_sec) == (1800, 900, 60)
    assert (task.memory_bytes, task.disk_bytes, task.environment.cpus) == (2 << 30, 512 << 20, 2)
    assert task.metadata.sandboxes == ("docker",)


@pytest.mark.parametrize(("text", "says"), [
    ("[agent]\ntimeout_sec = \n", "not valid TOML.*line 2"),
    ("[verifier]\n\n[agent]\ntimeout_sec = -1", "line 4: agent.timeout_sec: .*greater than 0, got -1"),
    ("[agent]\ntimeout_sec = 1\n[environment]\ncpus = 1\ngpus = 2", "line 5: environment.gpus: it can't be kept here"),
    ("[environment]\nmemory_mb = \"lots\"", "line 2: environment.memory_mb: .*got 'lots'"),
    ("[[steps]]\nname = \"one\"", "line 1: steps: it can't be kept here"),
    ("[environment.env]\nKEY = \"${SECRET}\"", "environment.env: KEY asks for a variable of this machine"),
    ("[metadata]\nsandboxes = [\"podman\"]", "line 2: metadata.sandboxes.0: .*got 'podman'"),
    ("agent = 3", "line 1: agent: .*got 3"),
])  # fmt: skip
def test_bad_task_file_is_refused_with_its_line_and_key(text: str, says: str) -> None:
    with pytest.raises(InvalidTask, match=f"tasks/x/task.toml.*{says}"):
        parse_task("tasks/x/task.toml", text)


def test_unknown_keys_are_named_and_left_out() -> None:
    text = "difficult = true\n[environment]\ncpu = 1\n[metadata]\nanything = 1\n[task]\nname = 'a/b'\n"
    assert unknown(text) == ["difficult", "environment.cpu"]
    assert parse_task("task.toml", text).environment.cpus == 1.0


def test_folder_of_tasks_is_a_source_that_goes_round(tmp_path: Path) -> None:
    source = task_source(TaskSettings(source="terminal", path=str(EXAMPLES), size=8))
    tasks = [source.at(i) for i in range(9)]
    assert tasks[8] is None and tasks[0] is not None and tasks[6] == tasks[0]
    assert len({task.id for task in tasks if task}) == 6
    assert source.find(tasks[2].id if tasks[2] else "") == tasks[2] and source.find("no-such-task") is None
    one = task_source(TaskSettings(source="terminal", path=str(EXAMPLES / "fix-tests"), sandbox="process")).at(0)
    assert one is not None and one.id == "fix-tests" and json.loads(one.data)["sandbox"] == "process"
    with pytest.raises(TasksExhausted, match="no folder in it holds a task.toml"):
        task_source(TaskSettings(source="terminal", path=str(tmp_path)))
    (tmp_path / "half").mkdir()
    (tmp_path / "half/task.toml").write_text("")
    with pytest.raises(InvalidTask, match="half: it has no instruction.md"):
        task_source(TaskSettings(source="terminal", path=str(tmp_path)))
    (tmp_path / "half/instruction.md").write_text("Do it.")
    (tmp_path / "half/tests").mkdir()
    (tmp_path / "half/tests/test.sh").write_text("exit 0")
    with pytest.raises(InvalidTask, match="tasks.sandbox is 'process', and the task runs in docker"):
        task_source(TaskSettings(source="terminal", path=str(tmp_path), sandbox="process"))


def test_digest_is_of_what_an_episode_depends_on() -> None:
    files = {"task.toml": b"", "tests/test.sh": b"exit 0", "solution/solve.sh": b"a", "README.md": b"b"}
    assert digest_of(files) == digest_of(files | {"solution/solve.sh": b"c", "README.md": b"d"})
    assert digest_of(files) != digest_of(files | {"tests/test.sh": b"exit 1"})
    assert digest_of(files) != digest_of({name: data for name, data in files.items() if name != "task.toml"})


# ------------------------------------------------------------------------------------------------- Dockerfiles


def test_dockerfile_without_docker_is_folders_files_variables_and_commands() -> None:
    text = """# a comment
FROM ubuntu:24.04
ENV NAME=one OTHER="two words"
ENV OLD three four
WORKDIR /app
COPY a.txt b.txt  sub/
COPY ["with space", "/app/x"]
RUN echo one && \\
    # a comment in between
    echo two
RUN ["echo", "three words"]
CMD ["bash"]
"""
    assert steps("Dockerfile", text) == [
        Variable("NAME", "one"), Variable("OTHER", "two words"), Variable("OLD", "three four"), Folder("/app"),
        Files(("a.txt", "b.txt"), "sub/"), Files(("with space",), "/app/x"), Command("echo one && \n    echo two"),
        Command("echo 'three words'"),
    ]  # fmt: skip
    assert images(text) == ["ubuntu:24.04"]


@pytest.mark.parametrize(("line", "says"), [
    ("ARG X=1", "ARG needs Docker"), ("USER agent", "USER needs Docker"), ("FROM other", "several images"),
    ("COPY --from=other /x /y", "COPY with a variable"), ("WORKDIR $HOME", "WORKDIR with a variable"),
    ("RUN <<EOF\nEOF", "here-document"), ("ADD https://example.org/x /x", "an address"), ("COPY one", "can't be read"),
])  # fmt: skip
def test_dockerfile_that_needs_docker_is_refused_with_its_line(line: str, says: str) -> None:
    with pytest.raises(InvalidTask, match=f"Dockerfile, line 3: .*{says}"):
        steps("Dockerfile", f"FROM one\n\n{line}\n")


# ------------------------------------------------------------------------------------------------- reward files


@pytest.mark.parametrize(("text", "named", "reward", "success"), [
    ("1\n", False, 1.0, True), ("0", False, 0.0, False), ("0.5", False, 0.5, False), (" 1.0 ", False, 1.0, True),
    ('{"reward": 0.25, "style": 1}', True, 0.25, False), ('{"a": 1, "b": 0.5}', True, 0.75, False),
    ("1", True, 1.0, True), ('{"passed": true}', True, 1.0, True),
])  # fmt: skip
def test_reward_file_is_a_verdict(text: str, named: bool, reward: float, success: bool) -> None:
    verdict = verdict_of(text, named)
    assert verdict is not None and (verdict.reward, verdict.success) == (reward, success)


@pytest.mark.parametrize(("text", "named"), [
    ("", False), ("yes", False), ("nan", False), ("inf", False), ("", True), ("{}", True), ('{"reward": "1"}', True),
    ('{"reward": NaN}', True), ("[1]", True), ("[" * 9000, True),
])  # fmt: skip
def test_reward_file_that_says_no_number_is_no_verdict(text: str, named: bool) -> None:
    assert verdict_of(text, named) is None


# ------------------------------------------------------------------------------------------------- dialogues


def test_turn_goes_on_from_the_ids_that_were_sampled() -> None:
    pairs = Pairs(TOOLS)
    dialogue = Dialogue(pairs, Opening([{"role": "user", "content": "Go."}], [{"name": "bash"}]))
    first = dialogue.prompt.ids
    # As characters, where the tokenizer would have taken pairs: what was sampled stays as it was sampled.
    sampled = [100 + ord(letter) for letter in call("ls")] + [END]
    assert dialogue.answered(sampled, call("ls"), 1, 2)
    assert dialogue.calls == (("bash", {"command": "ls"}),)
    dialogue.told([ToolResult("a.txt", 0.5, {"code": 0})])
    assert dialogue.prompt.ids[: len(first) + len(sampled)] == (*first, *sampled)
    assert "a.txt" in pairs.decode(dialogue.prompt.new) and dialogue.places.parent(dialogue.prompt) == -1
    detail = json.loads(dialogue.detail())
    assert detail["calls"] == [{"id": "call_0_0", "name": "bash", "arguments": {"command": "ls"}, "content": "a.txt",
                                "code": 0}]  # fmt: skip
    assert [one["role"] for one in detail["messages"]] == ["tool"]
    dialogue.written()
    assert not dialogue.answered([105, END], "I see.", 3, 4) and dialogue.last_words({}) is None


def test_call_that_cannot_be_read_is_answered_and_the_end_records_what_was_not_made() -> None:
    dialogue = Dialogue(Pairs(TOOLS), Opening([{"role": "user", "content": "Go."}], [{"name": "bash"}]))
    broken = "<tool_call>\n{bash}\n</tool_call>"
    assert dialogue.answered([*Pairs().encode(broken), END], broken, 1, 2) and dialogue.calls == ()
    dialogue.told([])
    assert json.loads(dialogue.detail())["messages"] == [{"role": "user", "content": UNREADABLE}]
    dialogue.written()
    both = call("one") + call("two")
    assert dialogue.answered([*Pairs().encode(both), END], both, 3, 4)
    dialogue.told([ToolResult("1")])
    words = json.loads(dialogue.last_words({"scorer": {}}) or "")
    assert [one["content"] for one in words["calls"]] == ["1", None] and words["scorer"] == {}


def test_template_that_rewrites_earlier_turns_makes_a_branch() -> None:
    pairs = Pairs(STRIPS_REASONING)
    dialogue = Dialogue(pairs, Opening([{"role": "user", "content": "Go."}], []))
    said = "<think>hm</think>" + "<tool_call>x"
    assert dialogue.answered([*pairs.encode(said), END], said, 1, 2)
    dialogue.told([])
    assert dialogue.prompt.branch is not None
    assert dialogue.places.parent(dialogue.prompt) != -1
