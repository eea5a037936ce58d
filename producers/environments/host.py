"""Runs environments in a process that may be killed: whose fault a failure is gets decided here, where it happens.

The host answers requests in order, JSON lines on its pipes. The request at the head of the line is the one being worked
on: when it exceeds its time-out the process is killed, that request fails alone (`scorer_timeout`), and the others are
sent to a fresh process. A host that dies by itself fails the request that it was working on.
"""

from __future__ import annotations

import collections
import json
import math
import os
import selectors
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from headrace.schemas.errors import EnvironmentFailed
from headrace.schemas.events import Task
from headrace.schemas.outcomes import (
    REASON_ENVIRONMENT_FAILED,
    REASON_SCORER_FAILED,
    REASON_SCORER_TIMEOUT,
    Boundary,
)

from ..lifeline import die_with_parent
from . import Judged, Message, Opening, ToolResult, Verdict, environment_for, words_of

START_TIMEOUT_S = 180.0  # importing an environment library on a cold disk
MAX_START_FAILURES = 3  # a host that never comes up is an error that a person must see


@dataclass(frozen=True, slots=True)
class Failed:
    """An infrastructure failure at the environment's boundary."""

    reason: str
    boundary: str
    message: str


@dataclass(slots=True)
class Reply:
    """The answer to one request: the prompt's messages, or the verdict, or why there is none. From an environment with
    tools: how its attempts open, the results of calls, or how the attempt ended, perhaps after some of them;
    `sandbox_s`: what setting up its state took, once."""

    request: int
    messages: list[Message] | None = None
    verdict: Verdict | None = None
    failed: Failed | None = None
    opening: Opening | None = None
    results: list[ToolResult] | None = None
    judged: Judged | None = None
    sandbox_s: float = 0.0


@dataclass(slots=True)
class _Request:
    number: int
    kind: str  # messages | score
    task: Task
    text: str | None
    timeout_s: float
    started: float | None = None


class EnvironmentHost:
    """Driven from one thread: `ask_messages` and `ask_score` queue, `poll` returns what is ready and never blocks."""

    def __init__(self, source: str, python: str = sys.executable) -> None:
        self._command = [python, "-m", "headrace.producers.environments.host", source, str(os.getpid())]
        self._waiting: collections.deque[_Request] = collections.deque()
        self._next = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._born = 0.0
        self._start_failures = 0
        self._buffer = b""

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def ask_messages(self, task: Task, timeout_s: float) -> int:
        return self._ask("messages", task, None, timeout_s)

    def ask_score(self, task: Task, text: str, timeout_s: float) -> int:
        return self._ask("score", task, text, timeout_s)

    def _ask(self, kind: str, task: Task, text: str | None, timeout_s: float) -> int:
        request = _Request(self._next, kind, task, text, timeout_s)
        self._next += 1
        self._waiting.append(request)
        if self._process is None:
            self._start()
        elif self._ready:
            self._send(request)
        return request.number

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdin is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._ready, self._buffer, self._born = False, b"", time.monotonic()

    def _send(self, request: _Request) -> None:
        assert self._process is not None and self._process.stdin is not None
        line = json.dumps({"kind": request.kind, "task": asdict(request.task), "text": request.text,
                           "number": request.number})  # fmt: skip
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # poll finds the dead process and decides

    def poll(self, wait_s: float = 0.0) -> list[Reply]:
        """Replies that are there, after waiting up to `wait_s` for the first. Raises EnvironmentFailed where no host
        comes up."""
        if self._process is None:
            return []
        assert self._process.stdout is not None
        if wait_s > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                selector.select(wait_s)
        while chunk := self._read():
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        replies = []
        for line in lines:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready, self._start_failures = True, 0
                for request in self._waiting:
                    self._send(request)
            elif self._waiting and self._waiting[0].number == answer["number"]:
                replies.append(_reply(answer))
                self._waiting.popleft()
        return replies + self._watch()

    def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.read(1 << 16) or b""

    def _watch(self) -> list[Reply]:
        """End a host that hangs; replace one that is gone."""
        assert self._process is not None
        now = time.monotonic()
        if not self._ready:
            if self._process.poll() is None and now - self._born < START_TIMEOUT_S:
                return []
            self._start_failures += 1
            self._end()
            if self._start_failures >= MAX_START_FAILURES:
                raise EnvironmentFailed(
                    f"the environment host did not come up {MAX_START_FAILURES} times; its own words are above. "
                    f"Try: {' '.join(self._command[:-1])} </dev/null"
                )
            self._start()
            return []
        head = self._waiting[0] if self._waiting else None
        if head is None:
            return []
        head.started = head.started or now
        died = self._process.poll() is not None
        if not died and now - head.started <= head.timeout_s:
            return []
        self._end()
        self._waiting.popleft()
        if self._waiting:
            self._start()
        scoring = head.kind == "score"
        reason = REASON_ENVIRONMENT_FAILED if not scoring else REASON_SCORER_FAILED if died else REASON_SCORER_TIMEOUT
        what = "died" if died else f"took longer than {head.timeout_s:g} s"
        return [Reply(head.number, failed=Failed(reason, Boundary.SCORER if scoring else Boundary.ENVIRONMENT,
                                                 f"the environment host {what} on task {head.task.id}"))]  # fmt: skip

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._process = None
        for request in self._waiting:
            request.started = None

    def close(self) -> None:
        self._waiting.clear()
        self._end()


def _reply(answer: dict[str, Any]) -> Reply:
    if "failed" in answer:
        return Reply(answer["number"], failed=Failed(**answer["failed"]))
    if "messages" in answer:
        return Reply(answer["number"], messages=answer["messages"])
    return Reply(answer["number"], verdict=Verdict(**answer["verdict"]))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """One request, in the host. Whatever the environment raises is its own failure, never the model's."""
    scoring = request["kind"] == "score"
    try:
        task = Task(**request["task"])
        environment = environment_for(task)
        if not scoring:
            return {"messages": environment.messages(task)}
        verdict = environment.score(task, request["text"])
        if verdict.reward is None:
            raise ValueError("the verifier returned no verdict")
        if not math.isfinite(verdict.reward):
            raise ValueError(f"the verifier returned {verdict.reward}")
        return {"verdict": asdict(verdict)}
    except Exception as error:
        reason = REASON_SCORER_FAILED if scoring else REASON_ENVIRONMENT_FAILED
        boundary = Boundary.SCORER if scoring else Boundary.ENVIRONMENT
        return {"failed": {"reason": reason, "boundary": boundary, "message": words_of(error)}}


def main() -> None:
    """The host process: requests as JSON lines on standard input, answers on a copy of standard output."""
    if len(sys.argv) == 3:
        die_with_parent(int(sys.argv[2]))
    # What an environment prints must not mix with the answers: fd 1 becomes stderr, answers go to a copy of the pipe.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if len(sys.argv) > 1:
        environment_for(Task("", sys.argv[1], "{}", 0)).prepare()
    answers.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answers.write(json.dumps({"number": request["number"]} | _answer(request)).encode() + b"\n")


if __name__ == "__main__":
    main()
