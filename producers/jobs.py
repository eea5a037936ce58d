"""One attempt on its way through a worker: what it waits for, and how long each step took."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace

from headrace.schemas.events import Lease
from headrace.schemas.waiting import MODEL_TIME, Step

from .engines import Affinity, GenerationRequest, Sampling
from .episodes import Attempt, EpisodeWriter
from .scheduler import Budget, Pace, SlotKey


class Phase(enum.Enum):
    """What an attempt waits for."""

    PROMPT = enum.auto()  # the environment host is to say what the model is asked
    READY = enum.auto()  # the scheduler is to let it begin
    DECODING = enum.auto()
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
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    stop_reason: str = ""
    timings_ms: dict[str, float] = field(default_factory=dict)
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
        a = self.attempt
        return f"{a.group}/{a.slot}/{a.attempt}" + (f"~{self.preempted}" if self.preempted else "")

    def asks(self, stop_ids: frozenset[int]) -> GenerationRequest:
        """What is left for the engine to sample. After tokens have come, they are part of the prompt, and the random
        stream is another one, named by their number: the numbers drawn for them must not come again."""
        assert self.sampling is not None
        done = len(self.tokens)
        sampling = replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - done,
                           seed=self.sampling.seed + done)  # fmt: skip
        # Affinity is to the conversation, whatever the request is called.
        affinity = Affinity(self.request.partition("~")[0], self.attempt.group)
        return GenerationRequest(self.request, [*self.prompt, *self.tokens], sampling, stop_ids, affinity)

    @property
    def begun(self) -> bool:
        return self.phase in (Phase.DECODING, Phase.SCORING)

    def decoded(self, now: float, reason: str, pace: Pace) -> dict[str, float]:
        """The model's turn is over. The turn's times, in ms."""
        self.finished, self.stop_reason, self.phase = now, reason, Phase.SCORING
        decode_s = now - self.first_token
        pace.see(len(self.tokens), decode_s)
        model_s = self.budget.model(len(self.tokens), decode_s, pace.token_s)
        turn = {Step.QUEUE: self.submitted - self.received, Step.PREFILL: self.first_token - self.submitted,
                Step.DECODE: decode_s, MODEL_TIME: model_s}  # fmt: skip
        self.timings_ms = {str(step): 1000 * seconds for step, seconds in turn.items()}
        return self.timings_ms

    def scored(self, now: float) -> dict[str, float]:
        """The verdict is there. The episode's times, in ms."""
        return self.timings_ms | {str(Step.SCORER): 1000 * (now - self.finished)}


def budget_of(lease: Lease) -> Budget:
    """What the lease allows an attempt: tokens, turns, seconds of model and tools."""
    spec = lease.spec
    return Budget(spec.max_tokens, spec.max_turns, spec.model_time_s, spec.tool_time_s)
