"""How an attempt becomes events: numbering, where spans are cut, and what is refused at the door.

A span ends when its source, turn or mask changes, at `span_tokens` tokens, after two seconds, or with the episode.
Model tokens without a finite log-probability are refused, and so are times that can't be and events that no record
holds. A call takes all it is given or nothing: `Backpressure` means nothing, so the same call may be made again. What
was taken and can't leave yet waits here, at most one call's worth; the next call sends it first.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.schemas.codec import encode
from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.errors import AttemptOver, Backpressure, InvalidRecord, RecordTooLarge
from headrace.schemas.events import (
    Blob,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    RoutedExperts,
    Span,
    VersionRun,
    routed_experts,
)
from headrace.schemas.outcomes import REASON_DELIVERY_FAILED, Boundary, Outcome, Source
from headrace.schemas.topics import RECORD_BYTES

from .times import checked_ms, checked_timings

SPAN_AGE_S = 2.0
SAID = 500  # characters of an error that an event carries
# Characters (of up to four bytes) that leave room for the longest span in any record.
SHORT = RECORD_BYTES // 16

PutBlob = Callable[[bytes], Blob]
EpisodeEvent = EpisodeStarted | Span | EpisodeEnded
E = TypeVar("E", bound=EpisodeEvent)


class Send(Protocol):
    """How an episode's events leave it."""

    def __call__(self, key: str, event: Event) -> None:
        """Take the event for writing, under its key. Raises Backpressure where that can't be now."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt of which slot, by which incarnation: the identity of everything it writes."""

    group: str
    slot: int
    attempt: int
    incarnation: str

    def __str__(self) -> str:
        return f"{self.group}/{self.slot} attempt {self.attempt}"


@dataclass(slots=True)
class _Open:
    """The span being filled."""

    source: Source
    turn: int
    since: float
    detail: str | None = None
    count: int = 0
    tokens: list[NDArray[Any]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)  # [version, count]
    parent: int = -1
    trains: bool = True
    experts: list[NDArray[np.int16]] = field(default_factory=list)  # one item for each of `logprobs`, or none


class EpisodeWriter:
    """Writes one attempt, span by span, through `send`. `blobs` stores an event's long text that no record holds."""

    def __init__(self, attempt: Attempt, send: Send, span_tokens: int, blobs: PutBlob | None = None) -> None:
        self.attempt = attempt
        self._send, self._limit, self._blobs = send, span_tokens, blobs
        self._sequence = 0
        self._turn = 0
        self._open: _Open | None = None
        self._waiting: deque[Event] = deque()  # numbered, and not yet taken by `send`
        self._cache_version: int | None = None
        self._timings: dict[str, float] = {}  # of the next span that is cut
        self._started_ms: int | None = None  # where the caller said so
        self._over: AttemptOver | None = None

    @property
    def ended(self) -> bool:
        """Whether its end was written, by whomever."""
        return self._over is not None

    # ------------------------------------------------------------------------------------------------- in

    def start(self, *, worker: str, engine: Mapping[str, str], temperature: float, max_new_tokens: int, seed: int,
              top_p: float = 1.0, top_k: int = 0, started_ms: int | None = None) -> None:  # fmt: skip
        """The first event: everything needed to sample the attempt again. Raises InvalidRecord for a `started_ms` that
        can't be."""
        self._check_open()
        now = int(time.time() * 1000)
        if started_ms is not None:
            started_ms = self._started_ms = checked_ms("started_ms", started_ms, now)
        if self._sequence:
            raise InvalidRecord(f"{self.attempt}: started twice, or after its first tokens")
        a = self.attempt
        self._put(EpisodeStarted(a.group, a.slot, a.attempt, a.incarnation, self._sequence, worker,
                                 json.dumps(dict(engine), sort_keys=True), temperature, top_p, top_k, max_new_tokens,
                                 seed, now if started_ms is None else started_ms))  # fmt: skip

    def model(self, tokens: ArrayLike, logprobs: ArrayLike, version: int, *, parent: int = -1, trains: bool = True,
              experts: NDArray[np.int16] | None = None) -> None:  # fmt: skip
        """Tokens int [n] that policy `version` sampled, with their processed log-probabilities float [n], nats.
        `parent`: the span that they continue, as `cut` named it (0: the episode's root), where it isn't the one before.
        Without `trains` they are masked: counted, and never trained on. experts int16 [m, layers, each], m >= n: as an
        engine's `Progress` has them.

        Raises InvalidRecord where one is missing, not finite, or positive.
        """
        self._check_open()
        ids, values = np.atleast_1d(np.asarray(tokens)), np.atleast_1d(np.asarray(logprobs, np.float32))
        if ids.shape != values.shape or ids.ndim != 1:
            raise InvalidRecord(f"{self.attempt}: {ids.shape} tokens with {values.shape} logprobs")
        if not np.isfinite(values).all() or (values > 1e-3).any():
            raise InvalidRecord(f"{self.attempt}: model tokens need a finite log-probability of at most 0 each")
        if version < 0:
            raise InvalidRecord(f"{self.attempt}: model tokens need the policy version that sampled them")
        if experts is not None and (experts.ndim != 3 or len(experts) < len(ids)):
            raise InvalidRecord(f"{self.attempt}: the experts of {len(ids)} tokens have the shape {experts.shape}")
        self._take(Source.MODEL, ids, values, version, parent=parent, trains=trains, experts=experts)

    def context(self, tokens: ArrayLike, source: Source, detail: str | None = None, *, ends_turn: bool = False,
                parent: int = -1) -> None:  # fmt: skip
        """Tokens int [n] that no model of ours sampled: the prompt, or what the environment said. `detail` (JSON: tool
        calls with results) stands in the first span of this call; `ends_turn`: what follows is the next turn. `parent`
        is as of `model`.

        Raises RecordTooLarge where no record holds the detail and the run has no blob store, BlobError where it fails.
        """
        self._check_open()
        self._take(source, np.atleast_1d(np.asarray(tokens)), None, -1, detail, ends_turn, parent=parent)

    def _take(self, source: Source, ids: NDArray[Any], logprobs: NDArray[np.float32] | None, version: int,
              detail: str | None = None, ends_turn: bool = False, *, parent: int = -1, trains: bool = True,
              experts: NDArray[np.int16] | None = None) -> None:  # fmt: skip
        self._settle()  # Backpressure from here: nothing of this call has been taken
        blob = None
        if detail is not None:
            # Proved on its own first: when the span is cut, the call can no longer be refused.
            probe = self._fitted(self._span(_Open(source, self._turn, 0.0, detail, 1, [ids[: self._limit]]), None))
            detail, blob = probe.detail, probe.blob
        apart = detail is not None or blob is not None or parent >= 0
        if self._open is not None and (apart or (self._open.source, self._open.trains) != (source, trains)):
            self._cut()
        begin = 0
        while begin < len(ids) or detail is not None or blob is not None:
            if self._open is None:
                self._open = _Open(source, self._turn, time.monotonic(), parent=parent, trains=trains)
                parent = -1
            open_span = self._open
            end = min(len(ids), begin + self._limit - open_span.count)
            open_span.tokens.append(ids[begin:end])
            if logprobs is not None and end > begin:
                open_span.logprobs.append(logprobs[begin:end])
                if experts is not None:  # the last row is of the last token but one
                    before = len(experts) - len(ids)
                    open_span.experts.append(experts[before + begin if begin else 0 : before + end])
                if open_span.versions and open_span.versions[-1][0] == version:
                    open_span.versions[-1][1] += end - begin
                else:
                    open_span.versions.append([version, end - begin])
            open_span.count += end - begin
            begin = end
            if detail is not None or blob is not None:
                open_span.detail = detail
                self._cut(blob=blob)
                detail = blob = None
            elif open_span.count >= self._limit:
                self._cut()
        if ends_turn:
            self._end_turn()
        self._leave()

    def next_turn(self) -> None:
        """What follows is of another turn; what waits is sent. Raises Backpressure."""
        self._end_turn()
        self._leave()

    def _end_turn(self) -> None:
        self._cut()
        self._turn += 1

    def cached(self, version: int) -> None:
        """The model's tokens from here on are sampled on cached keys of this version, the oldest of them."""
        if version != self._cache_version:
            self._cut()
        self._cache_version = version

    def timed(self, timings_ms: Mapping[str, float]) -> None:
        """Durations in milliseconds of what happened since the span before (keys: `schemas.waiting`): the next span to
        be cut carries them. Raises InvalidRecord for what no duration can be."""
        for name, value in checked_timings(timings_ms).items():
            self._timings[name] = self._timings.get(name, 0.0) + value

    def flush_older(self, now: float) -> None:
        """Cut the open span if it has waited for two seconds (`now`: time.monotonic)."""
        if self._open is not None and now - self._open.since >= SPAN_AGE_S:
            self.flush()

    def cut(self, stop_reason: str | None = None) -> int:
        """End the open span here: the number by which a later span may name it as its parent."""
        self._cut(stop_reason)
        return self._sequence - 1

    def flush(self, stop_reason: str | None = None) -> None:
        """Cut the open span, and send all that waits. Raises Backpressure where that can't leave yet."""
        self._cut(stop_reason)
        self._settle()

    def end(self, outcome: Outcome, reason: str, boundary: Boundary = Boundary.NONE, *, reward: float | None = None,
            rewards: Mapping[str, float | None] | None = None, text: str | None = None, stop_reason: str | None = None,
            timings_ms: Mapping[str, float] | None = None, ended_ms: int | None = None) -> None:  # fmt: skip
        """The last event. Anything written afterwards raises AttemptOver.

        Raises Backpressure (call it again), InvalidRecord for times that can't be, RecordTooLarge where no record holds
        the text and the run has no blob store.
        """
        self._check_open()
        now = int(time.time() * 1000)
        at = now if ended_ms is None else checked_ms("ended_ms", ended_ms, now)
        if ended_ms is not None and self._started_ms is not None and at < self._started_ms:
            raise InvalidRecord(f"{self.attempt}: ended_ms = {at} lies before started_ms = {self._started_ms}")
        timings = checked_timings(timings_ms or {})
        self.flush(stop_reason)
        a = self.attempt
        event = self._fitted(EpisodeEnded(a.group, a.slot, a.attempt, a.incarnation, self._sequence, outcome, reason,
                                          boundary, reward, dict(rewards or {}), (), text, at, timings))  # fmt: skip
        self._send(a.group, event)
        self._sequence += 1
        self._over = AttemptOver(f"{self.attempt} has ended ({outcome}: {reason})")

    def abandon(self, why: AttemptOver | None = None) -> None:
        """Write nothing more: the lease is gone, or the process gives the slot back. Later calls raise `why`."""
        self._open = None
        self._waiting.clear()
        self._over = why or AttemptOver(f"{self.attempt} was given up")

    def leave(self, outcome: Outcome, reason: str, boundary: Boundary, *, reward: float | None = None,
              text: str | None = None) -> list[Event]:  # fmt: skip
        """End the attempt without sending: what is still to be sent, in order, for whoever sends it later."""
        self._cut()
        a, said = self.attempt, None if text is None else text[:SAID]
        ended = EpisodeEnded(a.group, a.slot, a.attempt, a.incarnation, self._sequence, outcome, reason, boundary,
                             reward, {}, (), said, int(time.time() * 1000), {})  # fmt: skip
        events = [*self._waiting, ended]
        self.abandon(AttemptOver(f"{self.attempt} has ended ({outcome}: {reason})"))
        return events

    # ------------------------------------------------------------------------------------------------- out

    def _check_open(self) -> None:
        if self._over is not None:
            raise type(self._over)(str(self._over))

    def _put(self, event: EpisodeEvent) -> None:
        self._settle()
        self._send(self.attempt.group, self._fitted(event))
        self._sequence += 1

    def _cut(self, stop_reason: str | None = None, blob: Blob | None = None) -> None:
        """The open span joins what waits."""
        if self._open is None:
            return
        span, self._open = self._open, None
        self._waiting.append(self._span(span, stop_reason, blob))
        self._timings = {}
        self._sequence += 1

    def _span(self, span: _Open, stop_reason: str | None, blob: Blob | None = None) -> Span:
        a, model, cache = self.attempt, span.source == Source.MODEL, self._cache_version
        if not model or cache is None or all(version == cache for version, _ in span.versions):
            cache = None
        tokens = np.concatenate(span.tokens).astype(np.int32, copy=False)
        return Span(a.group, a.slot, a.attempt, a.incarnation, self._sequence, span.source, span.turn, span.parent,
                    len(tokens), tuple(VersionRun(version, count) for version, count in span.versions), stop_reason,
                    None, span.detail, self._timings, pack_ids(tokens),
                    pack_float32(np.concatenate(span.logprobs)) if model else None,
                    None if span.trains else bytes(len(tokens)), None, blob, cache, _routed(span))  # fmt: skip

    def _settle(self) -> None:
        """Send what waits, in order. Raises Backpressure; what could not leave still waits."""
        while self._waiting:
            self._send(self.attempt.group, self._waiting[0])
            self._waiting.popleft()

    def _leave(self) -> None:
        """As `_settle`, at the end of a call that has been taken."""
        try:
            self._settle()
        except Backpressure:
            pass  # the next call says so, before it takes anything

    def _fitted(self, event: E) -> E:
        """The event as a record holds it: long text moves to the blob store. Raises RecordTooLarge, BlobError."""
        if _surely_fits(event) or (size := len(encode(event))) <= RECORD_BYTES:
            return event
        name = "detail" if isinstance(event, Span) else "text"
        said = f"{self.attempt}: {type(event).__name__} of {size} bytes, and a record holds {RECORD_BYTES}"
        value = None if isinstance(event, EpisodeStarted) else event.detail if isinstance(event, Span) else event.text
        if value is None or size - len(data := value.encode()) > RECORD_BYTES:
            raise RecordTooLarge(f"{said}: make its other fields smaller; nothing of it was written")
        if self._blobs is None:
            raise RecordTooLarge(f"{said}: its field `{name}` has {len(data)} bytes; set log.blob_url so that it can "
                                 "lie beside the log, or shorten it; nothing of it was written")  # fmt: skip
        changes: dict[str, Any] = {name: None, "blob": self._blobs(data)}
        return replace(event, **changes)


def _routed(span: _Open) -> RoutedExperts | None:
    """Where it was recorded for all of the span's tokens: as much of it, from the end, as leaves room in a record."""
    if not span.experts or len(span.experts) < len(span.logprobs):
        return None
    rows = np.concatenate(span.experts)
    most = RECORD_BYTES // 2 // (2 * rows.shape[1] * rows.shape[2])
    return routed_experts(rows[-most:]) if most else None


def delivery_failed(attempt: Attempt, sequence: int, why: str) -> EpisodeEnded:
    """How an attempt ends when the broker refused its event number `sequence` for good.

    It takes that number: the log shows an end where the event should be, or the fold saw the gap already.
    """
    return EpisodeEnded(attempt.group, attempt.slot, attempt.attempt, attempt.incarnation, sequence,
                        Outcome.INFRA_FAILURE, REASON_DELIVERY_FAILED, Boundary.LOG, None, {}, (), why[:SAID],
                        int(time.time() * 1000), {})  # fmt: skip


def never_started(attempt: Attempt, reason: str) -> EpisodeEnded:
    """How an attempt ends of which nothing was written."""
    return EpisodeEnded(attempt.group, attempt.slot, attempt.attempt, attempt.incarnation, 0, Outcome.INFRA_FAILURE,
                        reason, Boundary.PRODUCER, None, {}, (), None, int(time.time() * 1000), {})  # fmt: skip


def _surely_fits(event: EpisodeEvent) -> bool:
    """Whether its texts are so short that no record is too small for it; what else there is, is bounded."""
    if isinstance(event, Span):
        return event.detail is None or len(event.detail) < SHORT
    if isinstance(event, EpisodeStarted):
        return len(event.worker) + len(event.engine) < SHORT
    return len(event.reason) + len(event.text or "") + sum(map(len, event.rewards)) < SHORT
