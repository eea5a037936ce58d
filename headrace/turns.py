"""One episode for people, turn by turn: what was asked, sampled, called and judged. Pure: a recording in, lines out.

Messages and results come from what the events tell; sampled tokens are text where the run's tokenizer is at hand, and
else only counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.consumers.recording import Part, Recording
from headrace.schemas.calls import RecordedCall
from headrace.schemas.columns import Int32
from headrace.schemas.outcomes import Source

if TYPE_CHECKING:
    from headrace.producers.reproduction import Again

LINES = 20  # of a text: the first and the last half are shown

Decode = Callable[[Int32], str]


def decoder(model_path: str) -> Decode | None:
    """What makes text of token ids, where the model's folder and the package `tokenizers` are here."""
    file = Path(model_path) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # whatever it is: the view is without text then
        return None
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def episode_lines(found: Recording, decode: Decode | None) -> Iterator[str]:
    """A whole attempt for a terminal: how it was sampled, its turns with their calls, and how it ended."""
    task = found.task
    yield (f"episode {found.group}/{found.slot}, attempt {found.attempt} by {found.incarnation[:8]}; task {task.id} "
           f"({task.source})")  # fmt: skip
    if found.started is not None:
        s = found.started
        yield f"temperature {s.temperature:g}, at most {s.max_new_tokens} tokens, seed {s.seed}, worker {s.worker}"
    if found.sandbox:
        yield "sandbox " + ", ".join(f"{name} {value}" for name, value in found.sandbox.items())
    turn = -1
    for part in found.parts:
        if part.turn != turn:
            turn = part.turn
            yield from ("", f"turn {turn}")
        yield from _part(part, decode)
    yield ""
    if found.ended is None:
        yield "it has not ended"
        return
    e = found.ended
    parts = "".join(f", {name} {value if value is not None else 'none'}" for name, value in e.rewards.items())
    yield f"{e.outcome}: {e.reason} ({e.boundary}); reward {'none' if e.reward is None else f'{e.reward:g}'}{parts}"
    if found.text:
        yield from _text(found.text)


def _part(part: Part, decode: Decode | None) -> Iterator[str]:
    if part.source == Source.MODEL:
        versions = sorted({run.version for run in part.versions})
        said = f"  model: {len(part.tokens)} tokens of v{', v'.join(map(str, versions)) or '?'}"
        yield said + (f", {part.stop_reason}" if part.stop_reason else "") + _seconds(part.timings_ms)
        if decode is not None:
            yield from _text(decode(part.tokens))
        return
    for call in part.calls:
        yield from call_lines(call)
    messages = [one for one in part.said.get("messages") or () if isinstance(one, dict) and one.get("role") != "tool"]
    scorer = part.said.get("scorer")
    if isinstance(scorer, dict):
        yield "  scorer:"
        yield from _text(str(scorer.get("output") or "[it printed nothing]"))
    if len(part.tokens) and (not part.calls or messages or part.source == Source.PROMPT):
        yield f"  {part.source}: {len(part.tokens)} tokens{_seconds(part.timings_ms)}"
    for message in messages:
        yield f"    {message.get('role')}:"
        yield from _text(str(message.get("content") or ""), 6)
    if not part.said and decode is not None:
        yield from _text(decode(part.tokens))


def call_lines(call: RecordedCall) -> Iterator[str]:
    """One tool call, and what came back."""
    yield f"  {call.name}: {_arguments(call.arguments)}"
    facts = ", ".join(f"{name} {value}" for name, value in call.facts.items())
    if facts:
        yield f"    ({facts})"
    yield from _text("[nothing came back: it ended the attempt]" if call.content is None else call.content)


def again_lines(one: Again) -> Iterator[str]:
    """A call that was made again."""
    yield f"call {one.number} (turn {one.call.turn}) {one.call.name}: {_arguments(one.call.arguments)}"
    yield from ("    " + line for line in (one.differs or "the same").splitlines())


def _arguments(arguments: Mapping[str, Any] | None) -> str:
    if arguments is None:
        return "(made by an agent elsewhere)"
    values = list(arguments.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(dict(arguments))


def _seconds(timings_ms: Mapping[str, float]) -> str:
    return "".join(f", {name} {ms / 1000:.2f} s" for name, ms in timings_ms.items() if ms >= 5)


def _text(text: str, indent: int = 4) -> Iterator[str]:
    lines = text.rstrip("\n").split("\n")
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], f"... {len(lines) - LINES} lines ...", *lines[-LINES // 2 :]]
    yield from (" " * indent + "| " + line for line in lines)
