"""Decides which token ids a conversation's next prompt has: those that are there already, and what is new behind them.

An episode is a tree of turns; a turn is a prompt and the tokens that were sampled after it. A request's messages are
rendered whole, and the rendered text says what it continues:

- a turn, where the messages begin with that turn's and its answer, and the template writes both as before. The ids are
  the turn's own, sampled ones as they were sampled, then those of the text that is new. Nothing sampled is tokenised.
- else a turn's prompt, where the text begins with that prompt's text: another answer to it. The ids go on after it.
- else nothing: the root.

Whatever isn't the plain continuation of the newest turn is a branch, with the reason in words: the client edited
something, or the template writes earlier messages otherwise (it strips reasoning, adds or re-orders messages). How the
template spaces an answer, or lays out the JSON of its tool calls, is no change: the sampled tokens stand for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.schemas.outcomes import Source

from .toolcalls import Answer, calls_of, parsed, plain

Message = Mapping[str, Any]  # role, content (text), and perhaps tool_calls (arguments as values), tool_call_id, name


class ChatTemplate(Protocol):
    """A tokenizer with its chat template."""

    @property
    def eos(self) -> Mapping[int, str]:
        """The tokens that end a turn, and their text."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> str:
        """The text of a conversation up to the opening of the model's next turn. Raises ValueError where the template
        refuses the messages."""

    def encode(self, text: str) -> list[int]:
        """The ids of a piece of text, special tokens recognised and none added."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat request says, apart from how to sample."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # for the template


@dataclass(frozen=True, slots=True)
class Raw:
    """A prompt as text or as ids, without a template."""

    prompt: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` [n], of which the first `known` are those of turn `after` (None: the root), with its sampled tokens where
    `with_answer`. `new_messages`: where in the request's messages what is new begins. `branch` says why this isn't the
    continuation of the newest turn, else None."""

    said: Chat | Raw
    text: str | None
    ids: tuple[int, ...]
    known: int
    after: int | None
    with_answer: bool
    new_messages: int
    branch: str | None

    @property
    def new(self) -> tuple[int, ...]:
        """The ids that no turn before holds."""
        return self.ids[self.known :]

    @property
    def source(self) -> Source:
        """Of the new ids: the task's prompt at the root, and after a turn what its environment said."""
        return Source.PROMPT if self.after is None else Source.ENVIRONMENT


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: Prompt
    sampled: tuple[int, ...]
    answer: Answer

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt.ids + self.sampled


class Conversation:
    """The turns of one episode. Pure: it holds no request and no client."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._turns: list[_Turn] = []
        self._seen: set[int] = set()
        self._newest: int | None = None  # of the turns that were seen

    def answered(self, prompt: Prompt, sampled: Sequence[int], answer: Answer, *, seen: bool = True) -> int:
        """A turn: what was sampled after `prompt`, and what the agent is told. Returns the turn's number. As long as it
        isn't `seen`, only messages that carry its answer go on after it."""
        self._turns.append(_Turn(prompt, tuple(sampled), answer))
        number = len(self._turns) - 1
        if seen:
            self.seen(number)
        return number

    def seen(self, number: int) -> None:
        """The agent has the turn's answer."""
        self._seen.add(number)
        self._newest = max(self._seen)

    def prompt(self, said: Chat | Raw) -> Prompt:
        """The ids for a request. Raises ValueError where the template refuses its messages."""
        if isinstance(said, Raw):
            return self._raw(said)
        text = self._template.render(said.messages, said.tools, said.options)
        why = None
        for number, turn in self._backwards():
            if not _begins(said, turn):
                continue
            rest = self._rest(turn, said, text)
            if isinstance(rest, str):
                why = why or rest
                continue
            branch = None if self._is_newest(number) else f"goes on after turn {number}, which isn't the newest"
            return Prompt(said, text, turn.ids + tuple(rest), len(turn.ids), number, True,
                          len(_chat(turn).messages) + 1, branch)  # fmt: skip
        why = why or (None if self._newest is None else _difference(said, self._turns[self._newest]))
        return self._after_a_prompt(said, text, why)

    def _backwards(self) -> list[tuple[int, _Turn]]:
        return list(enumerate(self._turns))[::-1]

    def _is_newest(self, number: int) -> bool:
        """To go on after it is to go on where the agent stands."""
        return self._newest is None or number >= self._newest

    # ------------------------------------------------------------------------------------------------- chat

    def _rest(self, turn: _Turn, said: Chat, text: str) -> list[int] | str:
        """Ids of what follows the turn's answer, or why the answer isn't where it should be."""
        before, answer = turn.prompt.text, turn.answer
        if before is None or not text.startswith(before):
            return "the template writes earlier messages otherwise than before"
        written = text[len(before) :]
        rest = _after(written, answer, self._template.eos.values())
        if rest is None:
            return f"the template writes the answer of turn {self._turns.index(turn)} otherwise than it was sampled"
        last = turn.sampled[-1] if turn.sampled else None
        end = None if last is None else self._template.eos.get(last)
        if end is None:
            return self._template.encode(rest)
        rest = rest.removeprefix(end)
        # With the token before it in front, a tokenizer that marks the beginning of a text doesn't take this for one.
        ids = self._template.encode(end + rest)
        return ids[1:] if ids[:1] == [last] else self._template.encode(rest)

    def _after_a_prompt(self, said: Chat | Raw, text: str, why: str | None) -> Prompt:
        """What the longest earlier prompt that the text begins with leaves to be encoded."""
        found, length = None, 0
        for number in sorted(self._seen):
            before = self._turns[number].prompt.text
            if before is not None and text.startswith(before) and len(before) > length:
                found, length = number, len(before)
        if found is None:
            return Prompt(said, text, tuple(self._template.encode(text)), 0, None, False, 0, why)
        known, new = self._turns[found].prompt, 0
        if isinstance(said, Chat) and isinstance(known.said, Chat):
            new = _alike(said.messages, known.said.messages)
        ids = known.ids + tuple(self._template.encode(text[length:]))
        return Prompt(said, text, ids, len(known.ids), found, False, new, why or f"answers turn {found}'s prompt again")

    # ------------------------------------------------------------------------------------------------- completions

    def _raw(self, said: Raw) -> Prompt:
        why = None if self._newest is None else "the prompt doesn't go on after the newest turn"
        for number, turn in self._backwards():
            if isinstance(said.prompt, tuple):
                if said.prompt[: len(turn.ids)] == turn.ids:
                    return Prompt(said, None, said.prompt, len(turn.ids), number, True, 0,
                                  None if self._is_newest(number) else why)  # fmt: skip
            elif turn.prompt.text is not None and not (turn.sampled and turn.sampled[-1] in self._template.eos):
                # An end of turn that the client's text leaves out would still stand among the ids.
                whole = turn.prompt.text + turn.answer.raw
                if said.prompt.startswith(whole):
                    ids = turn.ids + tuple(self._template.encode(said.prompt[len(whole) :]))
                    return Prompt(said, said.prompt, ids, len(turn.ids), number, True, 0,
                                  None if self._is_newest(number) else why)  # fmt: skip
        if isinstance(said.prompt, str):
            return self._after_a_prompt(said, said.prompt, why)
        for number, turn in self._backwards():
            if number not in self._seen:
                continue
            known = len(turn.prompt.ids)
            if said.prompt[:known] == turn.prompt.ids:
                return Prompt(said, None, said.prompt, known, number, False, 0, why)
        return Prompt(said, None, said.prompt, 0, None, False, 0, why)


def _chat(turn: _Turn) -> Chat:
    assert isinstance(turn.prompt.said, Chat)
    return turn.prompt.said


def _begins(said: Chat, turn: _Turn) -> bool:
    """Whether the messages begin with the turn's and its answer."""
    if not isinstance(turn.prompt.said, Chat):
        return False
    before = _chat(turn)
    at = len(before.messages)
    return (len(said.messages) > at and said.tools == before.tools and said.options == before.options
            and answers(said.messages[at], turn.answer) and said.messages[:at] == before.messages)  # fmt: skip


def answers(message: Message, answer: Answer) -> bool:
    """Whether the message is this answer, come back. Ids of calls and space around the text don't matter."""
    return (message.get("role") == "assistant" and str(message.get("content") or "").strip() == answer.content.strip()
            and _same(calls_of(message), answer.calls))  # fmt: skip


def _same(left: Sequence[tuple[str, Any]], right: Sequence[tuple[str, Any]]) -> bool:
    return len(left) == len(right) and all(a == b for a, b in zip(left, right, strict=True))


def _after(written: str, answer: Answer, ends: Collection[str]) -> str | None:
    """What follows the answer in the text that begins with it; None where it begins with something else."""
    places = [place for end in ends if (place := written.find(end)) >= 0]
    if not places:  # a template without ends of turns
        begins = written.startswith(answer.content) and answer.content and not answer.calls
        return written[len(answer.content) :] if begins else None
    body = written[: min(places)]
    shown = parsed(body) if answer.calls else plain(body)
    same = shown.content.strip() == answer.content.strip() and _same(shown.calls, answer.calls)
    return written[min(places) :] if same else None


def _alike(left: Sequence[Message], right: Sequence[Message]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _difference(said: Chat, turn: _Turn) -> str:
    """Why the messages don't go on after the newest turn."""
    if not isinstance(turn.prompt.said, Chat):
        return "a chat after a completion"
    before = turn.prompt.said
    if said.tools != before.tools:
        return "the tools changed"
    if said.options != before.options:
        return f"the template's options changed to {json.dumps(dict(said.options), sort_keys=True)}"
    at = _alike(said.messages, before.messages)
    if at < len(before.messages):
        return f"message {at} changed" if at < len(said.messages) else "the conversation got shorter"
    if at == len(said.messages):
        return "the same messages were asked again"
    return f"message {at} isn't the answer that was given there"
