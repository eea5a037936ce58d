"""One attempt on its way through a worker: what it waits for, and how long each step took."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.schemas.events import Lease
from headrace.schemas.waiting import MODEL_TIME, Step

from .dialogue import Dialogue
from .engines import Affinity, GenerationRequest, Sampling
from .episodes import Attempt, EpisodeWriter
from .scheduler import Budget, Pace, SlotKey


class Phase(enum.Enum):
    """What an attempt waits for."""

    PROMPT = enum.auto()  # the environment host is to say what the model is asked
    READY = enum.auto()  # the scheduler is to let it begin
    DECODING = enum.auto()
    CALLING = enum.auto()  # its tools are at work
    SCORING = enum.auto()


@dataclass(slots=True)
class Job:
    """An assignment of a lease. Times are `time.monotonic`."""

    lease: Lease
    attempt: Attempt
    writer: EpisodeWriter
    budget: Budget
    phase: Phase = Phase.PROMPT
    received: float = field(default_factory=time.monotonic)
    dialogue: Dialogue | None = None  # where there are tools
    prompt: list[int] = field(default_factory=list)  # of this turn: all that stands before it
    tokens: list[int] = field(default_factory=list)  # that this turn has sampled
    before: int = 0  # tokens that earlier turns have sampled
    turn: int = 0
    prompt_end: int = -1  # the span that ends the prompt
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    stop_reason: str = ""
    timings_ms: dict[str, float] = field(default_factory=dict)  # of all turns
    sampling: Sampling | None = None  # as it was submitted first
    preempted: int = 0  # how often it was taken out of the engine and put back, to go on from its tokens
    cache_version: int | None = None  # of the oldest keys that its next token is sampled on; None: none are cached

    @property
    def key(self) -> SlotKey:
        a = self.attempt
        return SlotKey(a.group, a.slot, a.attempt)

    @property
    def request(self) -> str:
        """Its name in the engine."""
        turn = f".{self.turn}" if self.turn else ""
        return self.name + turn + (f"~{self.preempted}" if self.preempted else "")

    @property
    def name(self) -> str:
        """Its conversation's, and its session's."""
        a = self.attempt
        return f"{a.group}/{a.slot}/{a.attempt}"

    def asks(self, stop_ids: frozenset[int], max_length: int) -> GenerationRequest:
        """What is left for the engine to sample. After tokens have come, they are part of the prompt, and the random
        stream is another one, named by their number: the numbers drawn for them must not come again. `max_length`: of
        prompt and answer; a conversation that grows gets what room it leaves."""
        assert self.sampling is not None
        done = self.before + len(self.tokens)
        most = self.sampling.max_new_tokens - done
        if self.dialogue is not None:
            most = max(1, min(most, max_length - len(self.prompt) - len(self.tokens)))
        sampling = replace(self.sampling, max_new_tokens=most, seed=self.sampling.seed + done)
        # Affinity is to the conversation, whatever the request is called.
        affinity = Affinity(self.name, self.attempt.group)
        return GenerationRequest(self.request, [*self.prompt, *self.tokens], sampling, stop_ids, affinity)

    @property
    def begun(self) -> bool:
        return self.phase in (Phase.DECODING, Phase.CALLING, Phase.SCORING)

    def decoded(self, now: float, reason: str, pace: Pace) -> dict[str, float]:
        """The model's turn is over. The turn's times, in ms."""
        self.finished, self.stop_reason, self.phase = now, reason, Phase.SCORING
        decode_s = now - self.first_token
        pace.see(len(self.tokens), decode_s)
        model_s = self.budget.model(len(self.tokens), decode_s, pace.token_s)
        turn: dict[str, float] = {
            Step.QUEUE: self.submitted - self.received, Step.PREFILL: self.first_token - self.submitted,
            Step.DECODE: decode_s, MODEL_TIME: model_s}  # fmt: skip
        return self.took(turn)

    def took(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """What it spent, by step; in ms, and added to the episode's."""
        found = {str(step): 1000 * value for step, value in seconds.items()}
        for step, value in found.items():
            self.timings_ms[step] = self.timings_ms.get(step, 0.0) + value
        return found

    def next_turn(self, ids: Sequence[int], now: float) -> None:
        """Its next turn begins with these."""
        self.before += len(self.tokens)
        self.prompt, self.tokens, self.turn = list(ids), [], self.turn + 1
        self.received, self.submitted, self.first_token = now, now, 0.0
        self.cache_version, self.preempted, self.phase = None, 0, Phase.DECODING

    def scored(self, now: float) -> dict[str, float]:
        """The verdict is there. The episode's times, in ms."""
        return self.timings_ms | {str(Step.SCORER): 1000 * (now - self.finished)}


def budget_of(lease: Lease) -> Budget:
    """What the lease allows an attempt: tokens, turns, seconds of model and tools."""
    spec = lease.spec
    return Budget(spec.max_tokens, spec.max_turns, spec.model_time_s, spec.tool_time_s)
