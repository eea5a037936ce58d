"""Tasks at a terminal: folders in the format of Terminal-Bench and Harbor, each attempt in a sandbox of its own.

The model has one tool, a shell. When it says no more, the task's `tests/test.sh` runs in a fork of the sandbox's files,
and the reward file that it writes is the verdict. What the model must not see isn't there before: `/tests` and
`/logs/verifier` are folders of the fork alone, empty when it begins, and `solution/` is nowhere.

`task.data` is JSON: folder, digest, sandbox, step_timeout_s, output_bytes, and how to ask (system, examples, template).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.schemas.errors import EnvironmentFailed
from headrace.schemas.events import Task
from headrace.schemas.taskfolder import INSTRUCTION, SPEC, TaskFile, digest_of, parse_task, read_folder

from ..sandboxes import Backend, Sandbox, SandboxSpec, StepResult
from ..sandboxes.attempts import Attempt, Scorer
from ..sandboxes.bases import Base, Bases
from ..sandboxes.pool import Pool
from ..sandboxes.sizing import Size
from . import Judged, Opening, ToolResult, Verdict
from .gym import conversation
from .reward import verdict_of

SYSTEM = (
    "You work at the shell of a Linux machine without a network, by calling the tool `bash`. Directory and variables "
    "stay from call to call. Look first, do what the task asks, check it, and then say that you are done, in words and "
    "without a tool call."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell. Returns what it prints, and its exit status where that isn't 0.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
TESTS, LOGS = "/tests", "/logs/verifier"
RUN = f"mkdir -p {LOGS} /logs/agent /logs/artifacts; chmod -R a+rx {TESTS}; bash {TESTS}/test.sh"
READ_S = 30.0
SHOWN = 4000  # characters of what the verifier printed that are recorded


class Terminal:
    """Implements `ToolEnvironment`. `room`: sandboxes at once; `starting` of them may be set up at the same time."""

    def __init__(self, backend: Backend, room: int, starting: int) -> None:
        self.room = room
        self.kind, self._bases = backend.kind, Bases(backend)
        self._pool = Pool(backend, Size(room, min(room, starting)))

    def opening(self, task: Task) -> Opening:
        data, task_file, files = _read(task)
        base = self._base(data, task_file)
        about = {"kind": self.kind, "base": base.base, "digest": data["digest"]}
        messages = conversation(data | {"system": data.get("system") or SYSTEM}, files[INSTRUCTION].decode())
        return Opening(messages, [TOOL], task_file.agent.timeout_sec, {"sandbox": about})

    def open(self, task: Task) -> TerminalSession:
        data, task_file, files = _read(task)
        base, about = self._base(data, task_file), task_file.environment
        spec = SandboxSpec(base.base, folder=about.workdir or base.folder,
                           variables=base.variables + tuple(about.env.items()), output_bytes=data["output_bytes"],
                           disk_bytes=task_file.disk_bytes, memory_bytes=task_file.memory_bytes,
                           cpus=about.cpus)  # fmt: skip
        tests = {f"/{name}": content for name, content in files.items() if name.startswith("tests/")}
        scorer = Scorer(RUN, task_file.verifier.timeout_sec, tests, fresh=(TESTS, LOGS),
                        variables=tuple(task_file.verifier.env.items()), verdict=_verdict)  # fmt: skip
        return TerminalSession(self._pool, spec, scorer, data["step_timeout_s"])

    def _base(self, data: Mapping[str, Any], task_file: TaskFile) -> Base:
        about = task_file.environment
        return self._bases.of(Path(data["folder"], "environment"), about.docker_image, data["digest"],
                              about.build_timeout_sec)  # fmt: skip

    def close(self) -> None:
        self._pool.close()
        self._bases.close()


class TerminalSession:
    """Implements `Session`. Its sandbox is taken when it is made."""

    def __init__(self, pool: Pool, spec: SandboxSpec, scorer: Scorer, step_s: float) -> None:
        self._spec, self._scorer = spec, scorer
        self._attempt = Attempt(pool, spec, budget_s=math.inf, step_s=step_s)

    def call(self, name: str, arguments: Mapping[str, Any], left_s: float) -> ToolResult | Judged:
        command = arguments.get("command")
        if name != "bash" or not isinstance(command, str) or set(arguments) != {"command"}:
            return ToolResult(f"error: there is one tool, bash, with one argument, command (text); not {name} with "
                              f"{json.dumps(dict(arguments))[:200]}")  # fmt: skip
        self._attempt.left_s = left_s
        result = self._attempt.step(command)
        if not isinstance(result, StepResult):
            return self._judged()
        facts: dict[str, Any] = {"code": result.code, "seconds": round(result.seconds, 4)}
        facts |= {"dropped": result.dropped} if result.dropped else {}
        facts |= {"new_shell": True} if result.new_shell else {}
        facts |= {"limits": sorted(result.limits)} if result.limits else {}
        return ToolResult(shown(result, self._spec.output_bytes), result.seconds, facts)

    def score(self) -> Judged:
        self._attempt.score(self._scorer)
        return self._judged()

    def _judged(self) -> Judged:
        attempt = self._attempt
        assert attempt.ending is not None
        said, verdict = attempt.said.decode(errors="replace"), attempt.verdict
        facts: dict[str, Any] = {}
        if verdict or said:
            facts["scorer"] = {"output": said[-SHOWN:], "rewards": verdict.components if verdict else None}
        return Judged(attempt.ending, attempt.verdict, None if attempt.error is None else str(attempt.error), facts)

    def close(self) -> None:
        self._attempt.close()


def shown(result: StepResult, output_bytes: int) -> str:
    """A step's result as the model is told."""
    head, tail = result.output, b""
    if result.dropped:
        at = output_bytes - output_bytes // 2
        head, tail = head[:at], head[at:]
    parts = [head.decode(errors="replace")]
    if result.dropped:
        parts.append(f"\n[{result.dropped} bytes left out]\n{tail.decode(errors='replace')}")
    text = "".join(parts).rstrip("\n")
    notes = []
    if result.timed_out:
        notes.append(f"[killed: it took longer than {result.seconds:.0f} s]")
    elif result.code or not text:
        notes.append(f"[exit status {result.code}]")
    if result.new_shell:
        notes.append("[the shell was started anew: directory and variables are those of the beginning]")
    if result.limits:
        notes.append(f"[limits met: {', '.join(sorted(result.limits))}]")
    return "\n".join(([text] if text else []) + notes)


def _read(task: Task) -> tuple[dict[str, Any], TaskFile, dict[str, bytes]]:
    data = json.loads(task.data)
    folder = Path(data["folder"])
    try:
        files = read_folder(folder)
    except OSError as error:
        raise EnvironmentFailed(f"task {task.id}: {folder} can't be read here ({error})") from error
    if digest_of(files) != data["digest"]:
        raise EnvironmentFailed(f"task {task.id}: {folder} isn't what it was when the coordinator read it: every "
                                "worker needs the same files, and a changed task needs another name")  # fmt: skip
    return data, parse_task(str(folder / SPEC), files[SPEC].decode(errors="replace")), files


def _verdict(sandbox: Sandbox, result: StepResult) -> Verdict | None:
    """From the reward file, whatever the command's exit status."""
    for name, named in (("reward.json", True), ("reward.txt", False)):
        read = sandbox.step(f"cat {LOGS}/{name}", READ_S)
        if read.code == 0:
            return verdict_of(read.output.decode(errors="replace"), named)
    return None
