"""What the SDK's context managers promise: every episode that begins ends, and what never began is given back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.producers import ModelFailure
from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.producers.groups import Episode, Group
from headrace.producers.outbox import Failure, Outbox
from headrace.producers.refusals import TRIES, Refusals
from headrace.schemas.errors import AttemptOver, Backpressure, InvalidRecord, RecordTooLarge, WrongThread
from headrace.schemas.events import EpisodeEnded, Event, Lease, Tick
from headrace.schemas.outcomes import Boundary, Outcome
from tests.scripted import Script, lease, spec


class Owner:
    """Takes everything at once."""

    def __init__(self) -> None:
        self.out: list[Event] = []
        self.given_back: list[int] = []

    def begin(self, attempt: Attempt) -> Episode:
        return Episode(EpisodeWriter(attempt, lambda key, event: self.out.append(event), 512), "w")

    def end(self, writer: EpisodeWriter, outcome: Outcome, reason: str, boundary: Boundary = Boundary.PRODUCER, *,
            reward: float | None = None, text: str | None = None) -> None:  # fmt: skip
        if not writer.ended:
            self.out += writer.leave(outcome, reason, boundary, reward=reward, text=text)

    def give_back(self, lease: Lease, attempts: list[Attempt]) -> None:
        self.given_back += [attempt.slot for attempt in attempts]

    def ends(self) -> dict[int, tuple[str, str, float | None]]:
        return {e.slot: (e.outcome, e.reason, e.reward) for e in self.out if isinstance(e, EpisodeEnded)}


def begun(episode: Episode) -> None:
    episode.start(temperature=1.0, max_new_tokens=4, seed=1)
    episode.prompt([1, 2])


def test_body_that_raises_ends_its_episode_and_no_other() -> None:
    owner = Owner()
    group = Group(owner, lease(rules=spec(5)))
    with pytest.raises(ZeroDivisionError), group.episode(0) as episode:
        begun(episode)
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), group.episode(1) as episode:
        raise KeyboardInterrupt
    with group.episode(2) as episode:
        begun(episode)
        raise ModelFailure("answer_not_parsed", reward=-1.0)
    with group.episode(3) as episode:
        begun(episode)
        episode.model([3], [-0.5], version=0)
        episode.finish(1.0)
    with group.episode(4) as episode:
        begun(episode)
    assert owner.ends() == {
        0: ("infra_failure", "producer_raised", None),
        1: ("infra_failure", "producer_raised", None),
        2: ("model_failure", "answer_not_parsed", -1.0),
        3: ("model_success", "finished", 1.0),
        4: ("unknown", "never_finished", None),
    }


def test_text_that_no_record_holds_ends_the_episode_as_an_infrastructure_failure() -> None:
    owner = Owner()
    group = Group(owner, lease())
    with pytest.raises(RecordTooLarge, match="log.blob_url"), group.episode(0) as episode:
        begun(episode)
        episode.environment([5], "x" * 2_000_000)
    assert owner.ends() == {0: ("infra_failure", "record_too_large", None)}


def test_slot_is_written_once_and_what_never_began_is_given_back() -> None:
    owner = Owner()
    group = Group(owner, lease(rules=spec(3)))
    with group.episode(1) as episode:
        begun(episode)
    with pytest.raises(AttemptOver, match="written once"), group.episode(1):
        pass
    group.close()
    assert owner.given_back == [0, 2]


def test_misuse_of_an_episode_is_a_typed_error_and_writes_nothing() -> None:
    owner = Owner()
    with Group(owner, lease()).episode(0) as episode:
        with pytest.raises(InvalidRecord, match="call start"):
            episode.prompt([1])
        begun(episode)
        with pytest.raises(InvalidRecord, match="started twice"):
            episode.start(temperature=1.0, max_new_tokens=4, seed=1)
        with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThread, match="belongs to the thread that opened it"):
            pool.submit(episode.model, [1], [-0.5], 0).result()
        episode.finish(1.0)
        written = len(owner.out)
        with pytest.raises(AttemptOver, match="has ended \\(model_success"):
            episode.finish(0.0)
        with pytest.raises(AttemptOver):
            episode.model([1], [-0.5], version=0)
        with pytest.raises(AttemptOver):
            episode.environment([1])
    assert len(owner.out) == written


def test_refused_event_owes_its_attempt_an_end_at_its_own_number_and_not_for_ever() -> None:
    refusals, attempt = Refusals(), Attempt("g", 0, 0, "i")

    def refused(sequence: int, kind: str = "Span") -> EpisodeEnded | None:
        return refusals.end_for(Failure("g", kind, attempt, sequence, "too large"))

    end = refused(3)
    assert end is not None and (end.sequence, end.outcome, end.reason, end.boundary) == (
        3, "infra_failure", "delivery_failed", "log")  # fmt: skip
    assert refused(4) is None and refused(5) is None  # they followed it
    assert [refused(3, "EpisodeEnded") is not None for _ in range(TRIES)] == [True] * (TRIES - 1) + [False]
    assert refusals.end_for(Failure("w", "Heartbeat", None, -1, "too large")) is None


def test_full_queue_is_backpressure_in_bytes_and_closing_says_what_is_unsent_by_episode() -> None:
    box = Outbox({"bootstrap.servers": "127.0.0.1:9"}, max_bytes=100_000)
    script = Script("g")
    taken = 0
    with pytest.raises(Backpressure, match="events .* wait for the broker"):
        while True:
            box.put("t", "g", script.span(1000))
            taken += 1
    assert 7 <= taken <= 16  # 6 kB each, and what they cost beside
    with pytest.raises(Backpressure):
        for n in range(200):
            box.put("t", "w", Tick("w", n))  # small ones are bounded too
    unsent = box.close(0.1)
    assert unsent.by_episode["g/0 attempt 0"] == taken
    assert "events unsent: g/0 attempt 0" in str(unsent)
