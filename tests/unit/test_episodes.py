"""How an attempt becomes numbered events, and what is refused at the door."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.schemas.errors import InvalidRecord, ProducerClosed
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Span, VersionRun
from headrace.schemas.outcomes import Outcome, Source


def writer(limit: int = 4) -> tuple[EpisodeWriter, list[Event]]:
    out: list[Event] = []
    return EpisodeWriter(Attempt("g", 1, 0, "i"), lambda key, event: out.append(event), limit), out


def started(w: EpisodeWriter) -> None:
    w.start(worker="w", engine={}, temperature=1.0, max_new_tokens=8, seed=1)


def test_events_of_an_attempt_are_numbered_without_a_gap() -> None:
    w, out = writer()
    started(w)
    w.context([1, 2, 3], Source.PROMPT)
    for token in range(10):
        w.model(token, -0.5, version=2 if token < 6 else 3)
    w.end(Outcome.MODEL_SUCCESS, "stop", reward=1.0)
    assert [e.sequence for e in out if isinstance(e, EpisodeStarted | Span | EpisodeEnded)] == list(range(len(out)))
    spans = [e for e in out if isinstance(e, Span)]
    for span in spans:
        span.check()
    assert [s.count for s in spans] == [3, 4, 4, 2]
    assert np.concatenate([s.token_ids() for s in spans[1:]]).tolist() == list(range(10))
    assert spans[2].versions == (VersionRun(2, 2), VersionRun(3, 2))
    assert isinstance(out[-1], EpisodeEnded)


def test_a_long_prompt_is_cut_into_spans() -> None:
    w, out = writer(limit=4)
    w.context(np.arange(10), Source.PROMPT)
    w.flush()
    assert [e.count for e in out if isinstance(e, Span)] == [4, 4, 2]


def test_no_span_exceeds_the_limit_however_tokens_come() -> None:
    w, out = writer(limit=4)
    for n in (3, 3, 9, 1):
        w.model(np.arange(n), np.full(n, -1.0), version=0)
    w.flush()
    assert [e.count for e in out if isinstance(e, Span)] == [4, 4, 4, 4]


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), -float("inf"), 0.7])
def test_model_token_without_a_usable_logprob_is_refused_at_the_door(logprob: float) -> None:
    w, out = writer()
    with pytest.raises(InvalidRecord, match="g/1 attempt 0"):
        w.model([1, 2], [-0.5, logprob], version=0)
    with pytest.raises(InvalidRecord):
        w.model([1, 2], [-0.5], version=0)
    with pytest.raises(InvalidRecord):
        w.model([1], [-0.5], version=-1)
    w.flush()
    assert not out


def test_turns_are_told_apart() -> None:
    w, out = writer(limit=100)
    w.context([1], Source.PROMPT)
    w.model([2], [-1.0], version=0)
    w.context([3], Source.ENVIRONMENT)
    w.next_turn()
    w.model([4], [-1.0], version=0)
    w.end(Outcome.MODEL_FAILURE, "length", reward=0.0)
    assert [(s.source, s.turn) for s in out if isinstance(s, Span)] == [
        ("prompt", 0), ("model", 0), ("environment", 0), ("model", 1)]  # fmt: skip


def test_an_open_span_is_cut_after_two_seconds() -> None:
    w, out = writer(limit=100)
    w.model([2], [-1.0], version=0)
    w.flush_older(time.monotonic() + 1.0)
    assert not out
    w.flush_older(time.monotonic() + 2.1)
    assert len(out) == 1


def test_an_ended_attempt_takes_nothing_more() -> None:
    w, _ = writer()
    w.end(Outcome.MODEL_FAILURE, "stop", reward=0.0)
    with pytest.raises(ProducerClosed):
        w.model([1], [-1.0], version=0)
    with pytest.raises(ProducerClosed):
        w.end(Outcome.MODEL_FAILURE, "stop", reward=0.0)
    abandoned, out = writer()
    abandoned.model([1], [-1.0], version=0)
    abandoned.abandon()
    assert abandoned.ended and not out
