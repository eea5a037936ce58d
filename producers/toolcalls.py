"""Decides what of a model's text is a tool call, in the Hermes format that most open models speak:

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

What can't be parsed stays text: a broken call is what the model said, and the agent sees it. For chat templates that
know nothing of tools, this module writes the schemas, calls and results into the messages in the same format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_ABOUT_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent is told of a turn. `calls`: (name, arguments). `raw`: the model's text, without its end of turn and
    whatever a stop string cut off."""

    content: str
    calls: tuple[tuple[str, Any], ...]
    raw: str


def parsed(raw: str) -> Answer:
    """The model's text, taken apart. Text between and after calls belongs to the content."""
    content, calls, at = [], list[tuple[str, Any]](), 0
    while (begin := raw.find(OPEN, at)) >= 0:
        end = raw.find(CLOSE, begin)
        inner = raw[begin + len(OPEN) : end if end >= 0 else len(raw)]
        call = _call(inner)
        if call is None:
            content.append(raw[at : begin + len(OPEN)])
            at = begin + len(OPEN)
            continue
        content.append(raw[at:begin])
        calls.append(call)
        at = end + len(CLOSE) if end >= 0 else len(raw)
    content.append(raw[at:])
    text = "".join(content)
    return Answer(text.rstrip() if calls else text, tuple(calls), raw)


def plain(raw: str) -> Answer:
    """As text, where no tools were offered."""
    return Answer(raw, (), raw)


def _call(inner: str) -> tuple[str, Any] | None:
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def shown(raw: str) -> int:
    """How much of a growing text may be given out: all before the first call, and before what may yet become one."""
    if (begin := raw.find(OPEN)) >= 0:
        return len(raw[:begin].rstrip())
    for length in range(min(len(OPEN) - 1, len(raw)), 0, -1):
        if raw.endswith(OPEN[:length]):
            return len(raw[:-length].rstrip())
    return len(raw.rstrip())


def calls_of(message: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """(name, arguments) of a message's calls."""
    return tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages for a template that knows nothing of tools: their schemas in the system message, calls in the
    assistant's text, results in the user's."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], str(message.get("content") or "")
        if message.get("tool_calls"):
            calls = [f"{OPEN}\n{json.dumps({'name': n, 'arguments': a})}\n{CLOSE}" for n, a in calls_of(message)]
            content = "\n".join(([content] if content else []) + calls)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        out.append({"role": role, "content": content})
    if tools:
        about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{about}"
        else:
            out.insert(0, {"role": "system", "content": about})
    return out
