"""A Hugging Face tokenizer, as the gateway needs one: its template, its ends of turns, and text token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ModelError

from ..conversation import Message
from ..toolcalls import in_words


class Tokenizer:
    """Of a model folder. Implements `conversation.ChatTemplate`. Raises ModelError where there is none."""

    def __init__(self, folder: str | Path) -> None:
        from jinja2 import Environment, meta
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
        template = self._tokenizer.chat_template
        if not isinstance(template, str) or not getattr(self._tokenizer, "is_fast", False):
            raise ModelError(f"{folder}: the gateway needs a fast tokenizer with one chat template")
        # What lies below does the same without a detour for batches, which costs as much as all else of a request.
        self._core = self._tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(template))
        # Else they are put into words.
        self._knows_tools = "tools" in meta.find_undeclared_variables(parsed)
        ends = _ends(Path(folder), self._tokenizer.eos_token_id)
        self.eos: Mapping[int, str] = {i: str(self._tokenizer.convert_ids_to_tokens(i)) for i in sorted(ends)}

    def render(self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> str:
        """The prompt as text, by the chat template. Raises ValueError for messages that the template refuses."""
        from jinja2 import TemplateError

        if not self._knows_tools:
            messages, tools = in_words(messages, tools), ()
        try:
            return str(self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=list(tools) or None, add_generation_prompt=True,
                tokenize=False, **options))  # fmt: skip
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=False).ids)

    def stream(self) -> Callable[[int], str]:
        """Of one sequence: what each token adds to its text, special tokens left out."""
        from tokenizers.decoders import DecodeStream

        decoding, core = DecodeStream(skip_special_tokens=True), self._core
        return lambda token: decoding.step(core, token) or ""

    def token(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self._tokenizer.decode([token]))


def _without_generation(template: str) -> str:
    """Marks for training data that plain Jinja doesn't know."""
    for mark in ("generation", "endgeneration"):
        for left, right in (("{%", "%}"), ("{%-", "-%}"), ("{%-", "%}"), ("{%", "-%}")):
            template = template.replace(f"{left} {mark} {right}", "")
    return template


def _ends(folder: Path, own: int | None) -> set[int]:
    """The model's ends of turns: those of its generation config, and the tokenizer's own."""
    ends = set() if own is None else {int(own)}
    for name in ("generation_config.json", "config.json"):
        if (file := folder / name).is_file():
            found = json.loads(file.read_text()).get("eos_token_id")
            ends |= set(found) if isinstance(found, list) else set() if found is None else {found}
    return {int(i) for i in ends}
