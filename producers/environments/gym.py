"""Tasks of the `reasoning-gym` library: its procedural data sets with its own verifiers, unchanged.

`task.data` is JSON: dataset, config, seed, index, the level if any, and how to ask (system, examples, template).
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from typing import Any

from headrace.schemas.events import Task

from . import Message, Verdict

# The library draws item i of a data set from `seed + i`, so that neighbouring seeds share almost all their items.
# Seeds are spread so far apart that two runs, or training and held-out tasks, never meet.
_SEED_STRIDE = 10_000_019
_SEED_SPACE = 2**31


@cache
def _dataset(name: str, seed: int, config: str, level: int | None) -> Any:
    import reasoning_gym

    plain = json.loads(config)
    if level is not None:
        plain = at_level(name, plain, level)
    return reasoning_gym.create_dataset(name, **plain | {"seed": seed * _SEED_STRIDE % _SEED_SPACE, "size": 10**9})


def at_level(name: str, config: dict[str, Any], level: int) -> dict[str, Any]:
    """The data set's configuration at a level of its curriculum: of each attribute the highest where it has no more.
    Raises ValueError where it has no curriculum, or the configuration doesn't go with it."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise ValueError(f"the data set {name!r} has no curriculum: change its tasks.config in a new run")
    curriculum = create_curriculum(name)
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration(config)
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def levels(name: str) -> int:
    """How many its curriculum has: at the last one every attribute is at its highest."""
    from reasoning_gym.factory import create_curriculum

    return max((len(attribute.levels) for attribute in create_curriculum(name).attributes.values()), default=0)


def conversation(data: dict[str, Any], question: str) -> list[Message]:
    """How a question is put to the model: system message, solved examples as earlier turns, then the question."""
    messages: list[Message] = []
    if data.get("system"):
        messages.append({"role": "system", "content": data["system"]})
    template = data.get("template") or "{question}"
    for asked, answered in data.get("examples") or ():
        messages.append({"role": "user", "content": template.replace("{question}", asked)})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": template.replace("{question}", question)})
    return messages


class ReasoningGym:
    """Tasks of a reasoning-gym data set, scored by the library's own verifier."""

    def prepare(self) -> None:
        import reasoning_gym  # noqa: F401

    def _item(self, data: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        dataset = _dataset(data["dataset"], int(data["seed"]), json.dumps(data.get("config") or {}, sort_keys=True),
                           data.get("level"))  # fmt: skip
        return dataset, dataset[int(data["index"])]

    def messages(self, task: Task) -> list[Message]:
        data = json.loads(task.data)
        return conversation(data, self._item(data)[1]["question"])

    def score(self, task: Task, text: str) -> Verdict:
        data = json.loads(task.data)
        dataset, item = self._item(data)
        reward = float(dataset.score_answer(text.strip(), item))
        return Verdict(reward, success=reward >= 1.0, components={"verifier": reward})

    def entry(self, task: Task) -> dict[str, Any]:
        """The data set's own entry (question, answer, metadata), with the question as `prompt` too."""
        _, item = self._item(json.loads(task.data))
        return {**item, "prompt": item["question"]}

    def holds_answer(self, task: Task) -> bool:
        """Whether the conversation gives the task's answer away: as a word of it, in any case."""
        answer = str(self._item(json.loads(task.data))[1]["answer"]).lower()
        said = " ".join(message["content"] for message in self.messages(task)).lower()
        return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", said) is not None


GYM = ReasoningGym()
