"""Chat templates as models really carry them, and a tokenizer without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from headrace.producers.conversation import Message

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolLM2's: a system message of its own where there is none.
ADDS_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a "
    "helpful AI assistant<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: reasoning stays within a turn of the user's, and leaves with the next.
STRIPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and "
    "loop.index0 < ns.last and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
# As DeepSeek's: reasoning never comes back.
NEVER_REASONS = STRIPS_REASONING.replace("loop.index0 < ns.last and ", "")
# All of the system's words first, wherever they stand.
REORDERS = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its date moves on with the conversation.
COUNTS = "Messages so far: {{ messages | length }}<|im_end|>\n" + CHATML
# As Qwen2.5's tools: calls are written by the template from their values, with its own spacing.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.tool_calls %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{% for c in m.tool_calls %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}
PAIRS = ("th", "in", "he", "ll", "lo", "ok", '":', " {", "\n\n")  # merges, so that where a text is cut shows


class Pairs:
    """Characters, and pairs of them that the tokenizer merges greedily from the left."""

    eos: Mapping[int, str] = {2: "<|im_end|>"}

    def __init__(self, template: str = CHATML) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = json.dumps
        self._template = environment.from_string(template)

    def render(self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **options)

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            special = next((name for name in SPECIAL if text.startswith(name, at)), None)
            if special:
                ids.append(SPECIAL[special])
                at += len(special)
            elif text[at : at + 2] in PAIRS:
                ids.append(3 + PAIRS.index(text[at : at + 2]))
                at += 2
            else:
                ids.append(100 + ord(text[at]))
                at += 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        names = {number: name for name, number in SPECIAL.items()}
        return "".join(names.get(i) or (PAIRS[i - 3] if i < 100 else chr(i - 100)) for i in ids)

    def stream(self) -> Callable[[int], str]:
        """Token by token."""
        return lambda token: self.decode([token])
