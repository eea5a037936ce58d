"""Decides how an attempt with tools goes on: what of an answer is a call, and which ids the next turn begins with.

Pure: it holds the conversation, and no engine, session or writer. Calls are read from the text (`toolcalls`), so any
engine can serve such attempts. An answer without a call is the model's last; one with a call that can't be read is told
so, since a slip in its syntax isn't the end of the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .conversation import Chat, ChatTemplate, Conversation, Message, Prompt
from .environments import Opening, ToolResult
from .places import Places
from .toolcalls import OPEN, parsed

UNREADABLE = ('The tool call can\'t be read: between <tool_call> and </tool_call> stands one JSON object with "name" '
              'and "arguments".')  # fmt: skip


class Dialogue:
    """Of one attempt. `prompt`: what the next turn begins with. Raises ValueError where the template refuses."""

    def __init__(self, template: ChatTemplate, opening: Opening) -> None:
        self._conversation, self._facts = Conversation(template), opening.facts
        self._messages: list[Message] = list(opening.messages)
        self._tools = tuple(opening.tools)
        self.places = Places()
        self.calls: tuple[tuple[str, Any], ...] = ()  # of the newest answer
        self._results: Sequence[ToolResult] = ()  # that aren't written yet
        self._number: int | None = None  # of the newest turn
        self._ask()

    def _ask(self) -> None:
        self.prompt: Prompt = self._conversation.prompt(Chat(tuple(self._messages), self._tools))

    def detail(self) -> str:
        """What is recorded beside the new ids, as JSON."""
        about: dict[str, Any] = {"messages": [dict(one) for one in self._messages[self.prompt.new_messages :]]}
        if self._number is None:
            about |= {"tools": list(self._tools)} | dict(self._facts)
        if self.calls:
            about["calls"] = self._made()
        if self.prompt.branch is not None:
            about["branch"] = self.prompt.branch
        return json.dumps(about, sort_keys=True)

    def answered(self, sampled: Sequence[int], raw: str, prompt_end: int, answer_end: int) -> bool:
        """The turn is over: what was sampled, its text, and the spans that end prompt and answer. Whether it goes on;
        `calls` are then to be made, and `told` says what came of them."""
        answer = parsed(raw)
        self._number = self._conversation.answered(self.prompt, sampled, answer)
        self.places.wrote(self._number, prompt_end, answer_end)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message["tool_calls"] = [{"type": "function", "id": self._id(i), "function": {"name": n, "arguments": a}}
                                     for i, (n, a) in enumerate(answer.calls)]  # fmt: skip
        self._messages.append(message)
        self.calls = answer.calls
        return bool(answer.calls) or OPEN in raw

    def _id(self, call: int) -> str:
        return f"call_{self._number}_{call}"

    def told(self, results: Sequence[ToolResult]) -> None:
        """What came of the calls, in their order; the next prompt is made. Fewer than the calls: the attempt ended."""
        self._results = results
        for i, ((name, _), result) in enumerate(zip(self.calls, results, strict=False)):
            self._messages.append({"role": "tool", "tool_call_id": self._id(i), "name": name,
                                   "content": result.content})  # fmt: skip
        if not self.calls:
            self._messages.append({"role": "user", "content": UNREADABLE})
        if len(results) == len(self.calls):
            self._ask()

    def written(self) -> None:
        """The prompt is on the log, with the calls before it."""
        self.calls, self._results = (), ()

    def last_words(self, facts: Mapping[str, Any]) -> str | None:
        """What is recorded of an end, as JSON: calls that no turn follows, and `facts`; None: nothing."""
        about = dict(facts) | ({"calls": self._made()} if self.calls else {})
        return json.dumps(about, sort_keys=True) if about else None

    def _made(self) -> list[dict[str, Any]]:
        """The newest calls, with what came of them; `content` null: nothing did."""
        out = []
        for i, (name, arguments) in enumerate(self.calls):
            result = self._results[i] if i < len(self._results) else None
            about = {"content": None} if result is None else {"content": result.content, **result.facts}
            out.append({"id": self._id(i), "name": name, "arguments": arguments} | about)
        return out
