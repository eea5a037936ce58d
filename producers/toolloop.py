"""Drives attempts with tools from turn to turn: what is asked of engine, session and writer next, for each.

The worker's loop calls it and does as it says; it waits for nothing. An answer without a call, and one that used up the
attempt's tokens or turns or the model's length, is the last: what the attempt has come to is scored. An attempt whose
time is spent has failed, and isn't scored.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from headrace.schemas.errors import BlobError, RecordTooLarge
from headrace.schemas.outcomes import (
    REASON_BUDGET_SPENT,
    REASON_LENGTH,
    REASON_STOP,
    REASONS,
    Source,
)
from headrace.schemas.waiting import Step

from .conversation import ChatTemplate
from .dialogue import Dialogue
from .environments import Judged, Opening
from .environments.host import Reply
from .environments.sessions import Sessions
from .jobs import Job, Phase

log = logging.getLogger("headrace.toolloop")

# What happens next to an attempt: the number of a question to its session, its end, or (None) its next turn.
Next = int | Judged | None


class ToolLoop:
    """`max_length`: of a conversation, in tokens. Owns `sessions`."""

    def __init__(self, sessions: Sessions, template: ChatTemplate, max_length: int) -> None:
        self.sessions, self.max_length = sessions, max_length
        self._template = template

    def prompted(self, job: Job, opening: Opening) -> None:
        """Raises ValueError where the chat template refuses the messages."""
        job.dialogue = Dialogue(self._template, opening)
        job.budget.max_agent_s = opening.agent_s
        job.prompt, job.phase = list(job.dialogue.prompt.ids), Phase.READY

    def begin(self, job: Job) -> None:
        """Its first turn was asked of the engine."""
        self.sessions.begin(job.name, job.lease.task)
        self._write(job)

    def turn_over(self, job: Job, raw: str, reason: str, end: int) -> Next:
        """The model has said `raw`; `end`: the span that ends it."""
        assert job.dialogue is not None
        goes_on = job.dialogue.answered(job.tokens, raw, job.prompt_end, end)
        if reason == REASON_BUDGET_SPENT:
            return self._out_of_time()
        if reason != REASON_STOP or not goes_on:
            return self._verdict(job, reason)
        return self._spent(job) or self._calls(job)

    def answered(self, job: Job, reply: Reply) -> Next:
        """What the session said of calls, or of the whole attempt."""
        assert job.dialogue is not None
        seconds = sum(result.seconds for result in reply.results or ())
        job.budget.tool(seconds)
        if reply.results is not None or reply.sandbox_s:
            took: dict[str, float] = {Step.ENVIRONMENT: seconds, Step.SANDBOX_START: reply.sandbox_s}
            job.writer.timed(job.took({step: value for step, value in took.items() if value}))
        if reply.results is not None:
            job.dialogue.told(reply.results)
        if reply.judged is not None:
            return reply.judged
        if (spent := self._spent(job)) is not None:
            return spent
        if len(job.dialogue.prompt.ids) >= self.max_length:
            return self._verdict(job, REASON_LENGTH)
        self._write(job)
        job.next_turn(job.dialogue.prompt.ids, time.monotonic())
        return None

    def record_end(self, job: Job, facts: Mapping[str, Any]) -> None:
        """What no turn follows, and `facts` of the end: beside no token."""
        assert job.dialogue is not None
        words = job.dialogue.last_words(facts)
        if words is not None:
            self._context(job, (), Source.ENVIRONMENT, words, -1)

    # ------------------------------------------------------------------------------------------------- decisions

    def _spent(self, job: Job) -> Next:
        spent = job.budget.spent()
        if spent is None:
            return None
        return self._verdict(job, REASON_LENGTH) if spent in ("tokens", "turns") else self._out_of_time()

    def _out_of_time(self) -> Judged:
        return Judged(REASONS[REASON_BUDGET_SPENT].ending())

    def _calls(self, job: Job) -> int:
        assert job.dialogue is not None
        job.phase = Phase.CALLING
        return self.sessions.ask_calls(job.name, job.dialogue.calls, job.budget.tool_left_s())

    def _verdict(self, job: Job, reason: str) -> int:
        job.stop_reason, job.phase, job.finished = reason, Phase.SCORING, time.monotonic()
        return self.sessions.ask_verdict(job.name)

    # ------------------------------------------------------------------------------------------------- the log

    def _write(self, job: Job) -> None:
        """What is new before the next turn."""
        dialogue, writer = job.dialogue, job.writer
        assert dialogue is not None
        prompt, places = dialogue.prompt, dialogue.places
        if places.any and prompt.source is not Source.ENVIRONMENT:
            writer.next_turn()
        self._context(job, prompt.new, prompt.source, dialogue.detail(), places.parent(prompt))
        dialogue.written()
        job.prompt_end = writer.cut()

    def _context(self, job: Job, ids: tuple[int, ...], source: Source, detail: str, parent: int) -> None:
        ends = source is Source.ENVIRONMENT and bool(ids)
        try:
            job.writer.context(ids, source, detail, ends_turn=ends, parent=parent)
        except (RecordTooLarge, BlobError) as error:
            log.warning("%s: a detail is left out, its tokens are whole: %s", job.attempt, error)
            job.writer.context(ids, source, json.dumps({"left_out": str(error)[:500]}), ends_turn=ends, parent=parent)
