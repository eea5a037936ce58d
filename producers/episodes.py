"""How an attempt becomes events: numbering, and where spans are cut.

A span ends when its source, turn or mask changes, at `span_tokens` tokens, after two seconds, or with the episode.
Model tokens without a finite log-probability are refused here, at the door.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from headrace.schemas.columns import pack_float32, pack_int32
from headrace.schemas.errors import InvalidRecord, ProducerClosed
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Span, VersionRun
from headrace.schemas.outcomes import Boundary, Outcome, Source

SPAN_AGE_S = 2.0


class Send(Protocol):
    def __call__(self, key: str, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt of which slot, by which incarnation: the identity of everything it writes."""

    group: str
    slot: int
    attempt: int
    incarnation: str


@dataclass(slots=True)
class _Open:
    """The span being filled."""

    source: Source
    turn: int
    since: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class EpisodeWriter:
    """Writes one attempt. `turn` counts from 0 and is set by the caller's calls to `next_turn`."""

    def __init__(self, attempt: Attempt, send: Send, span_tokens: int) -> None:
        self.attempt = attempt
        self._send, self._limit = send, span_tokens
        self._sequence = 0
        self._turn = 0
        self._open: _Open | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def _put(self, event: Event) -> None:
        self._send(self.attempt.group, event)
        self._sequence += 1

    def start(self, *, worker: str, engine: Mapping[str, str], temperature: float, max_new_tokens: int, seed: int,
              top_p: float = 1.0, top_k: int = 0) -> None:  # fmt: skip
        """The first event: everything needed to sample the attempt again."""
        a = self.attempt
        self._put(EpisodeStarted(a.group, a.slot, a.attempt, a.incarnation, self._sequence, worker,
                                 json.dumps(dict(engine), sort_keys=True), temperature, top_p, top_k, max_new_tokens,
                                 seed, int(time.time() * 1000)))  # fmt: skip

    def model(self, tokens: ArrayLike, logprobs: ArrayLike, version: int) -> None:
        """Tokens int [n] that policy `version` sampled, with their processed log-probabilities float [n], nats.

        Raises InvalidRecord where one is missing, not finite, or positive.
        """
        ids, values = np.atleast_1d(np.asarray(tokens)), np.atleast_1d(np.asarray(logprobs, np.float32))
        if ids.shape != values.shape or ids.ndim != 1:
            raise InvalidRecord(f"{self._where()}: {ids.shape} tokens with {values.shape} logprobs")
        if not np.isfinite(values).all() or (values > 1e-3).any():
            raise InvalidRecord(f"{self._where()}: model tokens need a finite log-probability of at most 0 each")
        if version < 0:
            raise InvalidRecord(f"{self._where()}: model tokens need the policy version that sampled them")
        self._append(Source.MODEL, ids.tolist(), values.tolist(), [version] * len(ids))

    def context(self, tokens: ArrayLike, source: Source) -> None:
        """Tokens int [n] that no model of ours sampled: the prompt, or what the environment said."""
        self._append(source, np.atleast_1d(np.asarray(tokens)).tolist(), [], [])

    def next_turn(self) -> None:
        self.flush()
        self._turn += 1

    def _append(self, source: Source, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        if self._ended:
            raise ProducerClosed(f"{self._where()} has ended")
        if self._open is not None and self._open.source != source:
            self.flush()
        begin = 0
        while begin < len(tokens):
            if self._open is None:
                self._open = _Open(source, self._turn, time.monotonic())
            part = slice(begin, begin + self._limit - len(self._open.tokens))
            self._open.tokens += tokens[part]
            self._open.logprobs += logprobs[part]
            self._open.versions += versions[part]
            begin = part.stop
            if len(self._open.tokens) >= self._limit:
                self.flush()

    def flush_older(self, now: float) -> None:
        """Cut the open span if it has waited for two seconds (`now`: time.monotonic)."""
        if self._open is not None and now - self._open.since >= SPAN_AGE_S:
            self.flush()

    def flush(self, stop_reason: str | None = None) -> None:
        if self._open is None:
            return
        span, self._open = self._open, None
        model = span.source == Source.MODEL
        a = self.attempt
        self._put(Span(a.group, a.slot, a.attempt, a.incarnation, self._sequence, span.source, span.turn, -1,
                       len(span.tokens), _runs(span.versions), stop_reason, None, None, {},
                       pack_int32(np.array(span.tokens, np.int32)),
                       pack_float32(np.array(span.logprobs, np.float32)) if model else None, None, None))  # fmt: skip

    def end(self, outcome: Outcome, reason: str, boundary: Boundary = Boundary.NONE, *, reward: float | None = None,
            rewards: Mapping[str, float | None] | None = None, text: str | None = None, stop_reason: str | None = None,
            timings_ms: Mapping[str, float] | None = None) -> None:  # fmt: skip
        """The last event. Anything written afterwards raises ProducerClosed."""
        if self._ended:
            raise ProducerClosed(f"{self._where()} has ended")
        self.flush(stop_reason)
        a = self.attempt
        self._put(EpisodeEnded(a.group, a.slot, a.attempt, a.incarnation, self._sequence, outcome, reason, boundary,
                               reward, dict(rewards or {}), (), text, int(time.time() * 1000),
                               dict(timings_ms or {})))  # fmt: skip
        self._ended = True

    def abandon(self) -> None:
        """Write nothing more: the lease is gone, or the process gives the slot back."""
        self._open, self._ended = None, True

    def _where(self) -> str:
        return f"{self.attempt.group}/{self.attempt.slot} attempt {self.attempt.attempt}"


def _runs(versions: Sequence[int]) -> tuple[VersionRun, ...]:
    """Run-length pairs. [3, 3, 4] -> ((3, 2), (4, 1))."""
    runs: list[VersionRun] = []
    for version in versions:
        if runs and runs[-1].version == version:
            runs[-1] = VersionRun(version, runs[-1].count + 1)
        else:
            runs.append(VersionRun(version, 1))
    return tuple(runs)
