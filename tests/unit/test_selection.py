"""Which events a reader gets: decided without a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator

import pytest

from headrace.consumers.facts import Failures, read_facts
from headrace.consumers.selection import Selection
from headrace.consumers.stream import Stream
from headrace.schemas.errors import SettingsError
from headrace.schemas.events import Event, GroupClosed, Manifest, Span, Version
from headrace.schemas.topics import ALL_TOPICS
from tests.synthetic_log import synthetic_run


@pytest.fixture(scope="module")
def events() -> list[Event]:
    log = synthetic_run().log
    return [fact.event for topic in ALL_TOPICS for p in range(log.partitions(topic))
            for fact in read_facts(log, topic, p, Failures())]  # fmt: skip


def kinds(events: list[Event], selection: Selection) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in events:
        if selection.wants(event):
            found[type(event).__name__] = found.get(type(event).__name__, 0) + 1
    return found


def test_a_group_has_its_events_and_what_names_it(events: list[Event]) -> None:
    found = kinds(events, Selection.of(group="g1"))
    # Two leases (each in two topics), three attempts, one closure, its manifest and its version.
    assert found["Lease"] == 4 and found["AttemptEnded"] == 3 and found["EpisodeStarted"] == 3
    assert (found["GroupClosed"], found["Manifest"], found["Version"]) == (1, 1, 1)


def test_an_episode_has_all_its_attempts_and_no_sibling(events: list[Event]) -> None:
    selection = Selection.of(episode="g1/1")
    spans = [event for event in events if isinstance(event, Span) and selection.wants(event)]
    assert {(span.group, span.slot) for span in spans} == {("g1", 1)} and {span.attempt for span in spans} == {0, 1}


def test_a_version_has_what_it_sampled_and_what_it_was_trained_from(events: list[Event]) -> None:
    selection = Selection.of(version=1)
    found = [event for event in events if selection.wants(event)]
    assert all(run.version == 1 for event in found if isinstance(event, Span) for run in event.versions)
    assert [event.batch for event in found if isinstance(event, Manifest)] == [1]
    assert [event.version for event in found if isinstance(event, Version)] == [1]


def test_kinds_narrow_down_and_all_conditions_must_hold(events: list[Event]) -> None:
    assert kinds(events, Selection.of(group="g0", kinds=GroupClosed)) == {"GroupClosed": 1}
    assert kinds(events, Selection.of(group="g0", version=7)) == {}
    assert Selection.of().everything and not Selection.of(kinds=Span).everything


def test_an_episode_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="GROUP/SLOT"):
        Selection.of(episode="g1")
    with pytest.raises(SettingsError, match="not of group"):
        Selection.of(group="g2", episode="g1/0")


def counting(seen: list[str]) -> Callable[[Callable[[], bool]], Generator[list[int], None, None]]:
    def read(stopped: Callable[[], bool]) -> Generator[list[int], None, None]:
        try:
            for number in range(1000):
                if stopped():
                    return
                yield [2 * number, 2 * number + 1]
                time.sleep(0.01)
        finally:
            seen.append("closed")

    return read


def test_a_stream_is_read_anew_each_time_and_closed_when_left() -> None:
    seen: list[str] = []
    stream = Stream(counting(seen))
    for _ in range(2):
        for number in stream:
            if number == 3:
                break
    assert len(seen) == 2


def test_an_asynchronous_reader_leaves_the_loop_free_and_its_thread_ends_with_it() -> None:
    seen: list[str] = []

    async def main() -> tuple[list[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        task, got = asyncio.ensure_future(tick()), []
        stream = Stream(counting(seen)).__aiter__()
        async for number in stream:
            got.append(number)
            if number == 11:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        task.cancel()
        return got, ticks

    got, ticks = asyncio.run(main())
    assert got == list(range(12)) and ticks > 5
    end = time.monotonic() + 5
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    assert seen == ["closed"]


def test_a_cancelled_asynchronous_reader_stops_following() -> None:
    seen: list[str] = []

    async def follow() -> None:
        async for _ in Stream(counting(seen)):
            pass

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(follow(), 0.1)

    asyncio.run(main())
    end = time.monotonic() + 5
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    assert seen == ["closed"]
