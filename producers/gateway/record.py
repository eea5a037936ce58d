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
        self._turns = 0
        self._places: dict[int, tuple[int, int]] = {}  # by number in the conversation: spans that end prompt and answer
        self._last: int | None = None  # the turn that ends with the newest span

    @property
    def ended(self) -> bool:
        return self._writer.ended

    async def turn(self, turn: Turn, *, orphaned: bool = False) -> None:
        async with self._lock:
            await self._begin()
            prompt, writer = turn.prompt, self._writer
            new, parent = prompt.ids[prompt.known :], self._parent(turn)
            source = Source.PROMPT if prompt.after is None else Source.ENVIRONMENT
            answers = bool(new) and source == Source.ENVIRONMENT  # belongs to the turn before, and ends it
            if self._turns and not answers:
                writer.next_turn()
            if new:
                await self._context(turn, new, source, parent, answers, orphaned)
                parent = -1
            middle = writer.cut() if new else self._places[prompt.after or 0][int(prompt.with_answer)]
            writer.timed(turn.timings_ms())
            at = 0
            for version, count in turn.runs:
                tokens, logprobs = turn.tokens[at : at + count], turn.logprobs[at : at + count]
                await _patiently(partial(writer.model, tokens, logprobs, version, parent=parent, trains=not orphaned))
                at, parent = at + count, -1
            end = writer.cut(REASON_ORPHANED if orphaned else turn.finish)
            await _patiently(writer.flush)
            self._turns += 1
            self._last = None if orphaned else turn.number
            if turn.number is not None and not orphaned:
                self._places[turn.number] = (middle, end)

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

    def _parent(self, turn: Turn) -> int:
        """The span that the turn's first own token continues; -1: the one before."""
        prompt = turn.prompt
        if prompt.after is None:
            return 0 if self._turns else -1
        if prompt.with_answer and prompt.after == self._last:
            return -1
        return self._places[prompt.after][int(prompt.with_answer)]


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
