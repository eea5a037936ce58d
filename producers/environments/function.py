"""Tasks from a JSON-lines file, judged by any Python function `score(task, text) -> float | None`.

`task.data` is JSON: `score` ("module:function"), `item` (the line, with at least `prompt`), and how to ask. The
function gets the line as a dict. None means that it has no verdict; a positive number is a success.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from headrace.schemas.events import Task

from . import Message, Verdict
from .gym import conversation


@cache
def _function(name: str) -> Callable[[dict[str, Any], str], float | None]:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    return found  # type: ignore[no-any-return]


class ScoreFunction:
    """Tasks of a JSON-lines file, scored by the function that `tasks.score` names."""

    def prepare(self) -> None:
        """Nothing: which function is meant stands in the task."""

    def messages(self, task: Task) -> list[Message]:
        data = json.loads(task.data)
        return conversation(data, data["item"]["prompt"])

    def score(self, task: Task, text: str) -> Verdict:
        data = json.loads(task.data)
        reward = _function(data["score"])(data["item"], text)
        if reward is None:
            return Verdict(None, success=False)
        return Verdict(float(reward), success=float(reward) > 0, components={"score": float(reward)})


FUNCTION = ScoreFunction()
