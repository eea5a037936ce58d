"""How an attempt becomes numbered events, and what is refused at the door."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.producers.times import DAY_MS, checked_ms
from headrace.schemas.codec import encode
from headrace.schemas.errors import Backpressure, InvalidRecord, ProducerClosed, RecordTooLarge
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Span, VersionRun
from headrace.schemas.outcomes import Boundary, Outcome, Source
from headrace.schemas.topics import RECORD_BYTES
from headrace.streams.log.blobs import Blobs, text


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


# --- Backpressure --------------------------------------------------------------------------------------------------

CALLS = st.lists(st.tuples(st.sampled_from(["model", "environment", "turn", "flush"]), st.integers(1, 12)), max_size=12)


def written(calls: list[tuple[str, int]], refusals: random.Random | None) -> list[Event]:
    """What reaches the log when each call is repeated for as long as it raises Backpressure."""
    out: list[Event] = []

    def send(key: str, event: Event) -> None:
        if refusals is not None and refusals.random() < 0.6:
            raise Backpressure("full")
        out.append(event)

    w = EpisodeWriter(Attempt("g", 1, 0, "i"), send, 4)
    base = 0

    def insist(call: Any) -> None:
        while True:
            try:
                call()
                return
            except Backpressure:
                continue

    at = 1_700_000_000_000
    insist(lambda: w.start(worker="w", engine={}, temperature=1.0, max_new_tokens=8, seed=1, started_ms=at))
    for kind, n in calls:
        tokens = np.arange(base, base + n)
        base += n
        if kind == "model":
            insist(partial(w.model, tokens, np.full(n, -1.0), version=n))
        elif kind == "environment":
            insist(partial(w.context, tokens, Source.ENVIRONMENT, "{}", ends_turn=True))
        elif kind == "turn":
            insist(w.next_turn)
        else:
            insist(w.flush)
    insist(lambda: w.end(Outcome.MODEL_FAILURE, "stop", reward=0.0, ended_ms=at + 1))
    return out


@settings(deadline=None)  # other work on the machine is no failure
@given(CALLS, st.integers(0, 2**32))
def test_a_call_repeated_after_backpressure_neither_loses_nor_doubles_a_token(
    calls: list[tuple[str, int]], seed: int
) -> None:
    assert written(calls, random.Random(seed)) == written(calls, None)


def test_backpressure_inside_a_long_call_holds_no_more_than_that_call() -> None:
    out: list[Event] = []

    room = 10

    def send(key: str, event: Event) -> None:
        if len(out) == room:
            raise Backpressure("full")
        out.append(event)

    w = EpisodeWriter(Attempt("g", 1, 0, "i"), send, 4)
    w.model(np.arange(400), np.full(400, -1.0), version=0)  # taken, although most of it waits
    for _ in range(3):
        with pytest.raises(Backpressure):
            w.model(np.arange(400), np.full(400, -1.0), version=0)
    room = 1000
    w.flush()
    assert len(out) == 100


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_tool_result_that_no_record_holds_is_refused_before_anything_of_it_is_written() -> None:
    w, out = writer(limit=512)
    started(w)
    w.context([1], Source.PROMPT)
    w.flush()
    before = list(out)
    with pytest.raises(RecordTooLarge, match=r"g/1 attempt 0: Span .*`detail` has 5000000 bytes; set log\.blob_url"):
        w.context(np.arange(3), Source.ENVIRONMENT, "x" * 5_000_000)
    with pytest.raises(RecordTooLarge, match="`text` has 5000000 bytes"):
        w.end(Outcome.MODEL_SUCCESS, "stop", reward=1.0, text="x" * 5_000_000)
    assert out == before and not w.ended
    w.end(Outcome.INFRA_FAILURE, "record_too_large", Boundary.PRODUCER)
    assert [e.sequence for e in out] == [0, 1, 2]  # type: ignore[union-attr]


def test_long_texts_move_to_the_blob_store_and_come_back_whole(tmp_path: Path) -> None:
    out: list[Event] = []
    blobs = Blobs(tmp_path.as_uri(), "run", 1 << 20)
    w = EpisodeWriter(Attempt("g", 1, 0, "i"), lambda key, event: out.append(event), 512, blobs.put)
    started(w)
    detail, said = "é" * 2_500_000, "y" * 5_000_000
    w.context(np.arange(1000), Source.ENVIRONMENT, detail, ends_turn=True)
    w.context([7], Source.ENVIRONMENT, "short")
    w.end(Outcome.MODEL_SUCCESS, "stop", reward=1.0, text=said)
    spans = [e for e in out if isinstance(e, Span)]
    assert [(s.count, s.detail, s.blob is not None) for s in spans] == [(512, None, True), (488, None, False),
                                                                       (1, "short", False)]  # fmt: skip
    assert text(spans[0]) == detail and text(spans[2]) == "short"
    (ended,) = (e for e in out if isinstance(e, EpisodeEnded))
    assert ended.text is None and text(ended) == said
    assert all(len(encode(e)) <= RECORD_BYTES for e in out)


def test_event_that_is_too_large_without_a_text_says_so() -> None:
    w, out = writer()
    with pytest.raises(RecordTooLarge, match="make its other fields smaller"):
        w.end(Outcome.MODEL_SUCCESS, "stop", reward=1.0, rewards={f"part {n}": 1.0 for n in range(100_000)})
    assert not out and not w.ended


# --- times ---------------------------------------------------------------------------------------------------------

NOW = 1_790_000_000_000


@pytest.mark.parametrize(("value", "said"), [
    (NOW // 1000, "looks like seconds since 1970: it must be in milliseconds, so multiply by 1000"),
    (NOW / 1000, "looks like seconds"),
    (NOW * 1000, "looks like microseconds"),
    (NOW * 10**6, "looks like nanoseconds"),
    (12_345_678.9, "before 2020.*a monotonic clock counts from the start of the machine"),
    (-1, "before 2020"),
    (0, "before 2020"),
    (1_500_000_000_000, "before 2020"),
    (NOW + 400 * DAY_MS, "400.0 days ahead of this machine's clock"),
    (float("nan"), "a time is a number of milliseconds"),
    (float("inf"), "a time is a number of milliseconds"),
    (True, "a time is a number of milliseconds"),
    ("now", "a time is a number of milliseconds"),
])  # fmt: skip
def test_time_that_cannot_be_is_refused_with_what_was_probably_meant(value: Any, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said):
        checked_ms("ended_ms", value, NOW)


@given(st.integers(1_577_836_800_000, NOW + DAY_MS))
def test_time_that_can_be_is_taken_as_it_is(value: int) -> None:
    assert checked_ms("ended_ms", value, NOW) == value


def test_times_and_timings_are_checked_before_anything_is_written() -> None:
    w, out = writer()
    with pytest.raises(InvalidRecord, match="started_ms = 1700000000 looks like seconds"):
        w.start(worker="w", engine={}, temperature=1.0, max_new_tokens=8, seed=1, started_ms=1_700_000_000)
    w.start(worker="w", engine={}, temperature=1.0, max_new_tokens=8, seed=1, started_ms=1_700_000_000_000)
    for over, said in (
        ({"ended_ms": 1_600_000_000_000}, "lies before started_ms"),
        ({"ended_ms": 1_700_000_001}, "looks like seconds"),
        ({"timings_ms": {"decode": -3.0}}, "'decode' is -3 ms"),
        ({"timings_ms": {"decode": float("nan")}}, "leave out what was not measured"),
    ):
        with pytest.raises(InvalidRecord, match=said):
            w.end(Outcome.MODEL_FAILURE, "stop", reward=0.0, **over)
    assert len(out) == 1 and not w.ended


def test_times_of_a_turn_stand_in_its_last_span_alone() -> None:
    w, out = writer(limit=2)
    started(w)
    w.model([1, 2, 3], [-0.5] * 3, 0)
    w.timed({"decode": 30.0, "model": 20.0})
    w.flush("stop")
    w.context([4], Source.ENVIRONMENT)
    w.timed({"environment": 5.0})
    w.flush()
    times = [event.timings_ms for event in out if isinstance(event, Span)]
    assert times == [{}, {"decode": 30.0, "model": 20.0}, {"environment": 5.0}]
    with pytest.raises(InvalidRecord, match="'decode' is -1 ms"):
        w.timed({"decode": -1.0})
