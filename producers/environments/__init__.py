"""The environment protocol: what a task asks the model, and what its verifier says of the answer.

An environment that only asks and judges runs in a host process of its own (`host`), never in the worker: its imports
are heavy, its code is somebody else's, and a verifier that hangs must be killable. One with tools has a session for
each attempt, in a thread of the worker's (`sessions`): what is somebody else's runs in a sandbox there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.schemas.events import Task
from headrace.schemas.outcomes import Ending

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` of None: the verifier has no verdict (which is never the same as 0)."""

    reward: float | None
    success: bool
    components: dict[str, float | None] = field(default_factory=dict)


class Environment(Protocol):
    """One kind of task. Whatever `messages` and `score` raise, the host turns into an infrastructure failure."""

    def prepare(self) -> None:
        """Import what is heavy, before the first request's time-out runs."""

    def messages(self, task: Task) -> list[Message]:
        """The conversation to which the model answers."""

    def score(self, task: Task, text: str) -> Verdict:
        """The verifier's judgement of the model's whole answer."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How the attempts of a task begin. `tools`: as OpenAI's API has them. `agent_s`: how long one may take on its own
    clock (the model's time and its tools'); None: no limit of the task's. `facts`: what is recorded (JSON)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    agent_s: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`content`: what the model is told. `seconds`: that count on the attempt's clock. `facts`: what is recorded."""

    content: str
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """How an attempt ended. `verdict`: None where none was reached. `error`: in words. `facts`: what is recorded."""

    ending: Ending
    verdict: Verdict | None = None
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One attempt in an environment with tools. Used by one thread, but for `close`. What a method raises is classified
    by `outcomes.of_error`."""

    def call(self, name: str, arguments: Mapping[str, Any], left_s: float) -> ToolResult | Judged:
        """The model uses a tool, with so much left on its clock. A wrong name or argument is a result that says so."""

    def score(self) -> Judged:
        """The model is done. Over afterwards."""

    def close(self) -> None:
        """Free what it holds. From any thread, also while another method runs, which then ends soon; more than once."""


class ToolEnvironment(Protocol):
    """One kind of task whose attempts have a state that tools change. Methods may be called from several threads."""

    @property
    def room(self) -> int:
        """How many sessions there may be at once."""

    def opening(self, task: Task) -> Opening:
        """What the model is asked. May take its time (an image is built). Raises what `of_error` classifies."""

    def open(self, task: Task) -> Session:
        """An attempt begins. Raises what `of_error` classifies."""

    def close(self) -> None:
        """End all that is left."""


def words_of(error: BaseException) -> str:
    """An error as it is recorded: its type, and what it says of itself, cut short."""
    return f"{type(error).__name__}: {error}"[:500]


def environment_for(task: Task) -> Environment:
    """The environment that understands `task.source`. Raises ValueError for an unknown source."""
    if task.source == "reasoning_gym":
        from .gym import GYM

        return GYM
    if task.source == "jsonl":
        from .function import FUNCTION

        return FUNCTION
    raise ValueError(f"task {task.id}: no environment for the source {task.source!r}")
