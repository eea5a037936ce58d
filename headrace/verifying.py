"""Judges recorded answers with another function: the `Verifier` that a replay is given.

The function is called as `score(item, text)`, as that of a JSON-lines run is: `item` is the task's line, or the data
set's entry with its question as `prompt`. It runs in the environment host's process, so that one that hangs or dies
costs its own answer alone, which then has no verdict.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

from headrace.producers.environments.gym import GYM
from headrace.producers.environments.host import EnvironmentHost
from headrace.schemas.errors import SettingsError
from headrace.schemas.events import Task

log = logging.getLogger("headrace.replay")


class ScoreVerifier:
    """`name`: module:function."""

    def __init__(self, name: str, timeout_s: float) -> None:
        if not all(name.partition(":")):
            raise SettingsError(f"verifier {name!r}: give it as module:function, called as score(item, text)")
        self._name, self._timeout_s = name, timeout_s
        self._host = EnvironmentHost("jsonl")

    def rewards(self, answers: Sequence[tuple[Task, str]]) -> list[float | None]:
        """Raises EnvironmentFailed where no host comes up."""
        asked = [self._host.ask_score(self._task(task), text, self._timeout_s) for task, text in answers]
        found: dict[int, float | None] = {}
        while len(found) < len(asked):
            for reply in self._host.poll(0.2):
                if reply.failed is not None:
                    log.warning("no verdict: %s (%s)", reply.failed.message, reply.failed.reason)
                found[reply.request] = reply.verdict.reward if reply.verdict is not None else None
        return [found[number] for number in asked]

    def _task(self, task: Task) -> Task:
        if task.source not in ("jsonl", "reasoning_gym"):
            raise SettingsError(f"task {task.id}: what a sandbox of source {task.source!r} held can't be judged again "
                                "by a function of the answer's text")  # fmt: skip
        item = json.loads(task.data)["item"] if task.source == "jsonl" else GYM.entry(task)
        return replace(task, source="jsonl", data=json.dumps({"score": self._name, "item": item}, default=str))

    def close(self) -> None:
        self._host.close()
