"""Decides what becomes of an agent's requests: which are one turn, which go on from where, and how the attempt ends.

The same request again is the same turn, whether it is still being sampled or answered long ago; to sample anew, an
agent varies `seed`. A turn is written once it was seen. What nobody saw by the end, or was aborted, is an orphan.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from headrace.schemas.errors import AttemptOver, HeadraceError
from headrace.schemas.events import Lease
from headrace.schemas.outcomes import Boundary, Outcome
from headrace.schemas.settings import RunSettings

from ..conversation import Conversation
from ..engines import Affinity, GenerationRequest, Sampling
from ..episodes import Attempt, EpisodeWriter
from .protocol import Asked, Refused
from .record import Record
from .tokenizer import Tokenizer
from .turns import Turn

log = logging.getLogger("headrace.gateway")

REASON_NO_TURN = "no_turn"
COUNTS = ("turns", "branches", "retried", "orphaned_turns", "orphaned_tokens", "sampled_tokens")


class AgentEpisode:
    """One attempt, driven by whoever holds its key. On the gateway's loop alone."""

    def __init__(self, lease: Lease, attempt: Attempt, writer: EpisodeWriter, settings: RunSettings,
                 tokenizer: Tokenizer, sample: Callable[[AgentEpisode, Turn], Coroutine[Any, Any, None]], *,
                 worker: str, engine: Mapping[str, str], greedy: bool, grace_s: float,
                 give_up: Callable[[EpisodeWriter, HeadraceError], None]) -> None:  # fmt: skip
        """`sample` brings a turn to its end; `engine` is its fingerprint; `greedy` is for evaluation; `grace_s` after
        the last one who waited for a turn has left, it is aborted; `give_up` ends an attempt that can't be written."""
        self.lease, self.attempt, self.writer = lease, attempt, writer
        self.id = f"{attempt.group}-{attempt.slot}-{attempt.attempt}"
        self._settings, self._tokenizer, self._sample_turn = settings, tokenizer, sample
        self._greedy, self._grace_s, self._give_up = greedy, grace_s, give_up
        self._seed = _number(f"{settings.seed}/{attempt.group}/{attempt.slot}/{attempt.attempt}")
        self._conversation = Conversation(tokenizer)
        self._turns: dict[bytes, Turn] = {}  # by the request's key: what a retry gets
        self._complete: dict[int, Turn] = {}  # by number in the conversation
        self._running: set[Turn] = set()
        self._asked = 0
        began_ms = int(time.time() * 1000)

        def start(writer: EpisodeWriter) -> None:
            writer.start(worker=worker, engine=engine, temperature=0.0 if greedy else settings.rollout.temperature,
                         max_new_tokens=lease.spec.max_tokens, seed=self._seed, started_ms=began_ms)  # fmt: skip

        self._record = Record(writer, start)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._timings = {"queue": 0.0, "prefill": 0.0, "decode": 0.0, "environment": 0.0}
        self._active_at = time.monotonic()
        self.over: str | None = None  # why it takes no more requests
        self.result: dict[str, Any] | None = None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.branches: list[str] = []  # why, each once

    # ------------------------------------------------------------------------------------------------- requests

    def ask(self, asked: Asked) -> Turn:
        """The request's turn, begun now or before; the caller waits for it, and says `left` afterwards. Raises
        Refused."""
        if self.over is not None:
            raise self._gone()
        turn = self._turns.get(asked.key)
        if turn is not None:
            self.counts["retried"] += 1
        else:
            turn = self._begin(asked)
        turn.watchers += 1
        return turn

    def _begin(self, asked: Asked) -> Turn:
        try:
            prompt = self._conversation.prompt(asked.said)
        except ValueError as error:
            raise Refused(400, str(error), code="invalid_messages", param="messages") from error
        most = self._most_tokens(len(prompt.ids), asked.max_tokens)
        if prompt.after is not None and prompt.with_answer:
            self.saw(self._complete[prompt.after])  # or it couldn't have been told back
        if prompt.branch is not None:
            self.counts["branches"] += 1
            if prompt.branch not in self.branches:
                self.branches.append(prompt.branch)
                log.warning("episode %s branches: %s", self.id, prompt.branch)
        if self._asked and not self._running:
            self._timings["environment"] += (time.monotonic() - self._active_at) * 1e3
        name = f"{self.id}-{self._asked}"
        sampling = Sampling(self._settings.rollout.temperature, most, _number(f"{self._seed}/{self._asked}"),
                            greedy=self._greedy)  # fmt: skip
        request = GenerationRequest(f"{name}-{self.attempt.incarnation[:8]}", prompt.ids, sampling,
                                    frozenset(self._tokenizer.eos), Affinity(self.id, self.lease.group))  # fmt: skip
        turn = Turn(name, asked, prompt, request, self._tokenizer.stream(), self._settle)
        self._asked += 1
        self._turns[asked.key] = turn
        self._running.add(turn)
        turn.task = self._spawn(self._sample_turn(self, turn))
        return turn

    def _most_tokens(self, prompt: int, asked: int | None) -> int:
        spec, length = self.lease.spec, self._settings.model.max_length
        budget = spec.max_tokens
        if spec.max_turns is not None and self._asked - self.counts["orphaned_turns"] >= spec.max_turns:
            raise Refused(400, f"episode {self.id} has had its {spec.max_turns} turns (rollout.max_turns)",
                          code="turn_budget_spent")  # fmt: skip
        rest = budget - self.counts["sampled_tokens"] - sum(len(turn.tokens) for turn in self._running)
        if rest <= 0:
            raise Refused(400, f"episode {self.id} has spent its {budget} tokens (rollout.max_new_tokens)",
                          code="token_budget_spent")  # fmt: skip
        if length <= prompt:
            raise Refused(400, f"This model's maximum context length is {length} tokens (model.max_length). However, "
                               f"your messages resulted in {prompt} tokens.", code="context_length_exceeded",
                          param="messages")  # fmt: skip
        return min(rest, length - prompt, asked or rest)

    def _settle(self, turn: Turn) -> None:
        """A turn that is over becomes one of the conversation, or an orphan; before anyone is told."""
        self._running.discard(turn)
        self._active_at = time.monotonic()
        self.counts["sampled_tokens"] += len(turn.tokens)
        for name, ms in turn.timings_ms().items():
            self._timings[name] += ms
        if turn.error is not None:
            self._orphan(turn)
            return
        turn.number = self._conversation.answered(turn.prompt, turn.tokens, turn.answer(), seen=False)
        self._complete[turn.number] = turn

    # ------------------------------------------------------------------------------------------------- who saw what

    def saw(self, turn: Turn) -> None:
        """The agent has the whole answer."""
        if not turn.seen and turn.number is not None and self.over is None:
            turn.seen = True
            self._conversation.seen(turn.number)
            self.counts["turns"] += 1
            self._spawn(self._write(turn, orphaned=False))

    def left(self, turn: Turn) -> None:
        """One of those who waited for it doesn't any more."""
        turn.watchers -= 1
        now = self._active_at = turn.left_at = time.monotonic()
        if not turn.watchers and not turn.over:
            asyncio.get_running_loop().call_later(self._grace_s, self._abandon, turn, now)

    def _abandon(self, turn: Turn, left_at: float) -> None:
        if not turn.watchers and turn.left_at == left_at and turn in self._running:
            self._abort(turn, Refused(499, "nobody waited for this answer any more", code="abandoned"))

    def abort(self, error: Refused) -> None:
        """End what is being sampled; agents that ask again begin anew."""
        for turn in [turn for turn in self._running if turn.submitted]:
            self._abort(turn, error)

    def _abort(self, turn: Turn, error: Refused) -> None:
        turn.fail(error)
        if turn.task is not None:
            turn.task.cancel()

    def _orphan(self, turn: Turn) -> None:
        """It will never be seen."""
        if self._turns.get(turn.asked.key) is turn:
            del self._turns[turn.asked.key]
        if turn.tokens:
            self.counts["orphaned_turns"] += 1
            self.counts["orphaned_tokens"] += len(turn.tokens)
            self._spawn(self._write(turn, orphaned=True))

    @property
    def silent_s(self) -> float:
        """How long the agent has neither asked nor waited."""
        return 0.0 if self._running else time.monotonic() - self._active_at

    # ------------------------------------------------------------------------------------------------- the end

    @property
    def ending(self) -> bool:
        return self._ending is not None and not self._ending.done()

    async def end(self, outcome: Outcome, reason: str, boundary: Boundary, *, reward: float | None = None,
                  rewards: Mapping[str, float | None] | None = None, text: str | None = None) -> None:  # fmt: skip
        """Once: a later call waits for the first one's end. An attempt without a turn can't be trained on, and is an
        infrastructure failure."""
        if self._ending is None and self.result is None:
            for turn in list(self._running):
                self._abort(turn, Refused(410, f"episode {self.id} is over: {reason}", code="episode_over"))
            if outcome.trainable and not any(turn.seen for turn in self._complete.values()):
                outcome, reason, boundary, reward = Outcome.INFRA_FAILURE, REASON_NO_TURN, Boundary.ENVIRONMENT, None
            self.over = self.over or f"{outcome} ({reason})"
            for turn in self._complete.values():
                if not turn.seen:
                    self._orphan(turn)
            self.result = {"outcome": str(outcome), "reason": reason, "boundary": str(boundary), "reward": reward}
            self._ending = asyncio.create_task(self._end(outcome, reason, boundary, reward, rewards, text))
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _end(self, outcome: Outcome, reason: str, boundary: Boundary, reward: float | None,
                   rewards: Mapping[str, float | None] | None, text: str | None) -> None:  # fmt: skip
        if self._tasks:
            await asyncio.wait(self._tasks)  # turns on their way to the log
        try:
            await self._record.end(outcome, reason, boundary, reward=reward, rewards=rewards, text=text,
                                   timings_ms=self._timings)  # fmt: skip
        except HeadraceError as error:
            self.failed(error)
        self._turns, self._complete = {}, {}

    async def _write(self, turn: Turn, *, orphaned: bool) -> None:
        try:
            await self._record.turn(turn, orphaned=orphaned)
        except HeadraceError as error:
            self.failed(error)
        except Exception as error:  # a fault of ours must not leave an attempt without this turn
            log.exception("turn %s can't be written", turn.name)
            self.failed(HeadraceError(f"turn {turn.name} can't be written: {type(error).__name__}: {error}"))

    def failed(self, error: HeadraceError) -> None:
        """Nothing more of it can be written: its lease is gone, or the broker refuses it."""
        if not isinstance(error, AttemptOver) or self.over is None:
            log.error("episode %s can't go on: %s", self.id, error)
        self.over = self.over or str(error)
        self.result = {"outcome": str(Outcome.INFRA_FAILURE), "reason": str(error), "boundary": str(Boundary.LOG),
                       "reward": None}  # fmt: skip
        self._give_up(self.writer, error)
        for turn in list(self._running):
            self._abort(turn, self._gone())

    def _gone(self) -> Refused:
        return Refused(410, f"episode {self.id} is over: {self.over}", code="episode_over")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def summary(self) -> dict[str, Any]:
        """What is known of it, as JSON has it."""
        return {"id": self.id, "group": self.attempt.group, "slot": self.attempt.slot, "attempt": self.attempt.attempt,
                "task": self.lease.task.id, "purpose": self.lease.purpose, "over": self.over, "result": self.result,
                **self.counts, "branched": self.branches, "silent_s": round(self.silent_s, 1)}  # fmt: skip


def _number(words: str) -> int:
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
