"""Decides how turns lie on the log: each once, whole, at its place in the episode's tree.

What is new before an answer comes first (the prompt, then what tools and the environment said, with the messages and
what the agent asked for as detail), then what was sampled. A turn that nobody saw is written masked: its tokens have an
account and train nobody, and nothing continues it. The log never holds half a turn: what a killed gateway had not
written yet appears in the engines' counts alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.schemas.errors import Backpressure, BlobError, RecordTooLarge
from headrace.schemas.outcomes import Boundary, Outcome, Source

from ..conversation import Chat
from ..engines.probe import refused_for_training
from ..episodes import EpisodeWriter
from ..places import Places
from .turns import Turn

log = logging.getLogger("headrace.gateway")

AGAIN_S = 0.05  # until a full queue is asked again
REASON_ORPHANED = "orphaned"


class Record:
    """One attempt's way to the log; calls wait for each other. They raise what the writer raises, but for Backpressure,
    which they wait out: a full queue holds the agent, and loses nothing."""

    def __init__(self, writer: EpisodeWriter, start: Callable[[EpisodeWriter], None]) -> None:
        """`start` writes the attempt's first event."""
        self._writer, self._start = writer, start
        self._lock = asyncio.Lock()
        self._started = False
        self._places = Places()

    @property
    def ended(self) -> bool:
        return self._writer.ended

    async def turn(self, turn: Turn, *, orphaned: bool = False) -> None:
        async with self._lock:
            await self._begin()
            prompt, writer = turn.prompt, self._writer
            new, source, parent = prompt.new, prompt.source, self._places.parent(prompt)
            answers = bool(new) and source == Source.ENVIRONMENT  # belongs to the turn before, and ends it
            if self._places.any and not answers:
                writer.next_turn()
            if new:
                await self._context(turn, new, source, parent, answers, orphaned)
                parent = -1
            middle = writer.cut() if new else self._places.end(prompt)
            writer.timed(turn.timings_ms())
            at = 0
            for version, count in turn.runs:
                tokens, logprobs = turn.tokens[at : at + count], turn.logprobs[at : at + count]
                await _patiently(partial(writer.model, tokens, logprobs, version, parent=parent, trains=not orphaned))
                at, parent = at + count, -1
            end = writer.cut(REASON_ORPHANED if orphaned else turn.finish)
            await _patiently(writer.flush)
            self._places.wrote(None if orphaned else turn.number, middle, end)

    async def end(self, outcome: Outcome, reason: str, boundary: Boundary, *, reward: float | None = None,
                  rewards: Mapping[str, float | None] | None = None, text: str | None = None,
                  timings_ms: Mapping[str, float] | None = None) -> None:  # fmt: skip
        async with self._lock:
            if outcome.trainable:
                await self._begin()
            await _patiently(partial(self._writer.end, outcome, reason, boundary, reward=reward, rewards=rewards,
                                     text=text, timings_ms=timings_ms))  # fmt: skip

    async def _begin(self) -> None:
        if not self._started:
            await _patiently(partial(self._start, self._writer))
            self._started = True

    async def _context(self, turn: Turn, new: tuple[int, ...], source: Source, parent: int, ends: bool,
                       orphaned: bool) -> None:  # fmt: skip
        take = partial(self._writer.context, new, source, ends_turn=ends, parent=parent)
        try:
            await _patiently(partial(take, detail=_detail(turn, orphaned)))
        except (RecordTooLarge, BlobError) as error:
            log.warning("turn %s: its messages are left out of the detail, its tokens are whole: %s", turn.name, error)
            await _patiently(partial(take, detail=_detail(turn, orphaned, messages=False)))


async def _patiently(step: Callable[[], object]) -> None:
    while True:
        try:
            step()
            return
        except Backpressure:
            await asyncio.sleep(AGAIN_S)


def _detail(turn: Turn, orphaned: bool, messages: bool = True) -> str:
    """What came with a turn, as JSON. A prompt that is text stands in the tokens."""
    prompt, said = turn.prompt, turn.prompt.said
    about: dict[str, Any] = {"turn": turn.name, "request": turn.asked.key.hex(), "asked": dict(turn.asked.asked),
                             "seed": turn.request.sampling.seed, "max_tokens": turn.request.sampling.max_new_tokens}
    if bent := refused_for_training(turn.asked.asked):
        about["not_followed"] = bent
    if isinstance(said, Chat):
        if messages:
            about["messages"] = list(said.messages[prompt.new_messages :])
            if said.tools and not prompt.known:
                about["tools"] = list(said.tools)
        else:
            about["messages_left_out"] = len(said.messages) - prompt.new_messages
    if prompt.branch is not None:
        about["branch"] = prompt.branch
    if orphaned:
        about["orphaned"] = "aborted" if turn.finish is None else "nobody saw the answer"
    return json.dumps(about, sort_keys=True)
