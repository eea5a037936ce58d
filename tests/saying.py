"""A model that says what a test has written down, turn by turn; everything around it is real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.producers.engines import GenerationRequest, Progress
from tests.chat_templates import TOOLS, Pairs
from tests.fake_engine import FakeEngine

END = 2


def call(command: str, name: str = "bash") -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {"command": command}}) + "\n</tool_call>"


class SayingEngine(FakeEngine):
    """`scripts`: of each slot, its turns; the last is said again and again. `asked`: the requests, in order."""

    eos_ids = frozenset({END})

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.weights = {"w": np.zeros(64, np.uint16)}
        self.template, self._scripts = Pairs(TOOLS), scripts
        self.asked: list[GenerationRequest] = []

    def step(self) -> list[Progress]:
        out = []
        for name, request in list(self._active.items()):
            del self._active[name]
            self.asked.append(request)
            slot, _, number = name.split("/", 2)[1], None, name.rpartition("/")[2]
            script = self._scripts[int(slot)]
            turn = int(number.partition(".")[2] or 0)
            ids = [*self.template.encode(script[min(turn, len(script) - 1)]), END]
            most = request.sampling.max_new_tokens
            part = np.array(ids[:most], np.int32)
            out.append(Progress(name, part, np.full(len(part), -0.5, np.float32), self.version,
                                "stop" if len(ids) <= most else "length"))  # fmt: skip
        return out

    def encode_chat(self, messages: Any) -> list[int]:
        raise AssertionError("an environment with tools has a template of its own")

    def decode(self, ids: Sequence[int]) -> str:
        return self.template.decode([i for i in ids if i > END])
