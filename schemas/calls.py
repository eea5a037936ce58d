"""What a span's `detail` tells of the tool calls of a turn, for whoever reads an episode: signs, views, reproductions.

`calls` name each call with its `arguments` and facts (exit status, limits that were met). What the model was told
stands in the message of the role `tool` with the call's id, or, of calls that no turn followed, in the call's own
`content`. An agent behind the gateway makes its calls elsewhere: only what came back is there, as messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_OWN = frozenset({"id", "name", "arguments", "content"})


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """`arguments`: None where an agent made it elsewhere. `content`: what the model was told; None: nothing came
    back."""

    turn: int
    name: str
    arguments: Mapping[str, Any] | None
    content: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)


def parsed_detail(detail: str | None) -> dict[str, Any]:
    """A detail as a JSON object; nothing of what is none."""
    try:
        said = json.loads(detail) if detail else None
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def calls_of(said: Mapping[str, Any], turn: int) -> tuple[RecordedCall, ...]:
    """The calls of a parsed detail, in order."""
    told = [one for one in _objects(said.get("messages")) if one.get("role") == "tool"]
    calls = list(_objects(said.get("calls")))
    if not calls:
        return tuple(RecordedCall(turn, str(one.get("name") or "tool"), None, _text(one.get("content")))
                     for one in told)  # fmt: skip
    by_id = {str(one.get("tool_call_id")): one.get("content") for one in told}
    out = []
    for one in calls:
        arguments = one.get("arguments")
        facts = {name: value for name, value in one.items() if name not in _OWN}
        content = one["content"] if "content" in one else by_id.get(str(one.get("id")))
        out.append(RecordedCall(turn, str(one.get("name")), arguments if isinstance(arguments, dict) else {},
                                _text(content), facts))  # fmt: skip
    return tuple(out)


def _objects(value: Any) -> Iterable[dict[str, Any]]:
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _text(content: Any) -> str | None:
    """Of a message, whose content may be in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return None if content is None else str(content)
