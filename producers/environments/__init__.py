"""The environment protocol: what a task asks the model, and what its verifier says of the answer.

An environment runs in a host process of its own (`host`), never in the worker: its imports are heavy, its code is
somebody else's, and a verifier that hangs must be killable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from headrace.schemas.events import Task

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


def environment_for(task: Task) -> Environment:
    """The environment that understands `task.source`. Raises ValueError for an unknown source."""
    if task.source == "reasoning_gym":
        from .gym import GYM

        return GYM
    if task.source == "jsonl":
        from .function import FUNCTION

        return FUNCTION
    raise ValueError(f"task {task.id}: no environment for the source {task.source!r}")
