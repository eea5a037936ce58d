"""What a caller of the SDK holds: a group, and each of its episodes for as long as it is written.

Every episode that begins ends on the log, whatever happens in its body; what never began is given back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from numpy.typing import ArrayLike

from headrace.schemas.errors import AttemptOver, HeadraceError, InvalidRecord, RecordTooLarge, WrongThread
from headrace.schemas.events import Lease, Task
from headrace.schemas.outcomes import (
    REASON_NEVER_FINISHED,
    REASON_PRODUCER_RAISED,
    REASON_RECORD_TOO_LARGE,
    REASON_SCORER_FAILED,
    Boundary,
    Outcome,
    Source,
)

from .episodes import Attempt, EpisodeWriter


class Owner(Protocol):
    """Who lends groups and sends what their episodes write."""

    def begin(self, attempt: Attempt) -> Episode:
        """The attempt, to be written."""

    def end(self, writer: EpisodeWriter, outcome: Outcome, reason: str, boundary: Boundary = Boundary.PRODUCER, *,
            reward: float | None = None, text: str | None = None) -> None:  # fmt: skip
        """End the attempt unless it has ended; what can't leave now leaves as soon as it can."""

    def give_back(self, lease: Lease, attempts: list[Attempt]) -> None:
        """Slots of a lease that will not be run."""


class ModelFailure(Exception):
    """Raise it in an episode's body to declare that the model failed: the episode ends as `model_failure` with this
    reward, and the exception goes no further."""

    def __init__(self, reason: str, reward: float = 0.0) -> None:
        self.reason, self.reward = reason, reward
        super().__init__(reason)


class Episode:
    """One attempt of one slot, being written by the thread that opened it."""

    def __init__(self, writer: EpisodeWriter, worker: str) -> None:
        self._writer, self._worker = writer, worker
        self._thread = threading.get_ident()
        self._started = False

    @property
    def ended(self) -> bool:
        """Whether its end was written, by whomever."""
        return self._writer.ended

    def start(self, *, temperature: float, max_new_tokens: int, seed: int, engine: Mapping[str, str] | None = None,
              top_p: float = 1.0, top_k: int = 0, started_ms: int | None = None) -> None:  # fmt: skip
        """How the attempt is sampled. Call it first. `started_ms`: milliseconds since 1970, default now; raises
        InvalidRecord where it can't be."""
        self._mine().start(worker=self._worker, engine=engine or {}, temperature=temperature, top_p=top_p, top_k=top_k,
                           max_new_tokens=max_new_tokens, seed=seed, started_ms=started_ms)  # fmt: skip
        self._started = True

    def prompt(self, tokens: ArrayLike, detail: str | None = None) -> None:
        """Prompt token ids, int [n]. `detail`: JSON, such as the `tools` that the model is offered."""
        self._begun().context(tokens, Source.PROMPT, detail)

    def model(self, tokens: ArrayLike, logprobs: ArrayLike, version: int) -> None:
        """Sampled ids int [n] with processed logprobs float [n] (nats), all by policy `version`. Raises InvalidRecord
        where a logprob is missing or not finite."""
        writer = self._begun()
        writer.flush_older(time.monotonic())
        writer.model(tokens, logprobs, version)

    def environment(self, tokens: ArrayLike, detail: str | None = None) -> None:
        """What the environment answered, int [n]; the next model tokens belong to the next turn. `detail`: JSON, such
        as tool calls with results. Raises RecordTooLarge where no record holds it and the run has no blob store."""
        self._begun().context(tokens, Source.ENVIRONMENT, detail, ends_turn=True)

    def finish(self, reward: float | None, outcome: Outcome | None = None, *, reason: str = "finished",
               boundary: Boundary = Boundary.NONE, rewards: Mapping[str, float | None] | None = None,
               text: str | None = None, timings_ms: Mapping[str, float] | None = None,
               ended_ms: int | None = None) -> None:  # fmt: skip
        """End the attempt. Without `outcome`: success where the reward is positive; no reward means that the scorer
        failed, which never trains. `boundary`: with an `outcome`, the part that failed. Times in milliseconds; raises
        InvalidRecord for those that can't be, RecordTooLarge where no record holds the text and the run has no blob
        store."""
        outcome, reason, boundary = judged(reward, outcome, reason, boundary)
        self._mine().end(outcome, reason, boundary, reward=reward, rewards=rewards, text=text, timings_ms=timings_ms,
                         ended_ms=ended_ms)  # fmt: skip

    def _mine(self) -> EpisodeWriter:
        if threading.get_ident() != self._thread:
            raise WrongThread(f"{self._writer.attempt} belongs to the thread that opened it: open each episode in the "
                              "thread that writes it")  # fmt: skip
        return self._writer

    def _begun(self) -> EpisodeWriter:
        writer = self._mine()
        if not self._started and not writer.ended:
            raise InvalidRecord(f"{writer.attempt}: call start() first")
        return writer


def judged(reward: float | None, outcome: Outcome | None, reason: str,
           boundary: Boundary = Boundary.NONE) -> tuple[Outcome, str, Boundary]:  # fmt: skip
    """What an attempt that was finished so has come to. Without `outcome`: success where the reward is positive; no
    reward means that the scorer failed, which never trains."""
    if outcome is not None:
        return outcome, reason, boundary
    if reward is None:
        return Outcome.INFRA_FAILURE, REASON_SCORER_FAILED, Boundary.SCORER
    return Outcome.MODEL_SUCCESS if reward > 0 else Outcome.MODEL_FAILURE, reason, Boundary.NONE


class Group:
    """A leased (or unmanaged) group. Its episodes may be written by different threads."""

    def __init__(self, owner: Owner, lease: Lease) -> None:
        self._owner, self.lease = owner, lease
        self._begun: set[int] = set()

    @property
    def id(self) -> str:
        """The group's id, as in all of its records."""
        return self.lease.group

    @property
    def task(self) -> Task:
        """What its members try."""
        return self.lease.task

    @property
    def slots(self) -> list[int]:
        """The slots that this lease gives, each for one `episode`."""
        return [assignment.slot for assignment in self.lease.assignments]

    @contextmanager
    def episode(self, slot: int) -> Iterator[Episode]:
        """The slot's attempt; it ends on the log whatever happens in the body. Raises AttemptOver where the slot was
        opened before."""
        attempt = self._attempt(slot)
        if slot in self._begun:
            raise AttemptOver(f"{attempt} was opened before: a slot's attempt is written once")
        self._begun.add(slot)
        episode = self._owner.begin(attempt)
        try:
            yield episode
        except ModelFailure as failure:
            self._owner.end(episode._writer, Outcome.MODEL_FAILURE, failure.reason, Boundary.MODEL,
                            reward=failure.reward)  # fmt: skip
        except RecordTooLarge as error:
            self._owner.end(episode._writer, Outcome.INFRA_FAILURE, REASON_RECORD_TOO_LARGE, text=str(error))
            raise
        except BaseException as error:
            self._owner.end(episode._writer, Outcome.INFRA_FAILURE, REASON_PRODUCER_RAISED,
                            text=f"{type(error).__name__}: {error}")  # fmt: skip
            raise
        else:
            self._owner.end(episode._writer, Outcome.UNKNOWN, REASON_NEVER_FINISHED)

    def _attempt(self, slot: int) -> Attempt:
        attempts = {a.slot: a.attempt for a in self.lease.assignments}
        if slot not in attempts:
            raise HeadraceError(f"group {self.id}: slot {slot} isn't leased here (slots: {self.slots})")
        return Attempt(self.id, slot, attempts[slot], self.lease.incarnation)

    def close(self) -> None:
        """What never began is given back, so that the group needn't wait for its deadline."""
        if rest := tuple(slot for slot in self.slots if slot not in self._begun):
            self._owner.give_back(self.lease, [self._attempt(slot) for slot in rest])
