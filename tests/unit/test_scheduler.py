"""The scheduler as claims: which slot begins, how many run, and whose clock runs."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producers.scheduler import Budget, EngineLoad, Scheduler, SlotKey


def lease(scheduler: Scheduler, group: str, slots: int, reserves: int = 0) -> list[SlotKey]:
    keys = [SlotKey(group, number, 0) for number in range(slots + reserves)]
    for key in keys:
        scheduler.leased(key, reserve=key.slot >= slots)
    return keys


def test_group_nearest_to_completion_begins_first_and_then_the_one_launched_first() -> None:
    scheduler = Scheduler(most=1)
    for group, slots in (("a", 3), ("b", 2), ("c", 2)):
        lease(scheduler, group, slots)
    order = []
    while begun := scheduler.starts():
        order += [key.group for key in begun]
        scheduler.ended(begun[0])
    assert order == ["b", "b", "c", "c", "a", "a", "a"]


def test_retry_comes_before_groups_that_have_hardly_begun() -> None:
    scheduler = Scheduler(most=2)
    [first] = lease(scheduler, "old", 1)
    lease(scheduler, "new", 8)
    assert scheduler.starts()[0] == first
    scheduler.ended(first, lost=True)
    scheduler.leased(again := SlotKey("old", 0, 1))
    assert scheduler.starts() == [again]


def test_reserve_begins_for_a_lost_slot_and_otherwise_only_in_room_that_nobody_wants() -> None:
    scheduler = Scheduler(most=3)
    *counted, reserve = lease(scheduler, "g", 2, reserves=1)
    other = lease(scheduler, "h", 9)
    assert scheduler.starts() == [*counted, other[0]]
    scheduler.ended(counted[0], lost=True)
    assert scheduler.starts() == [reserve]
    idle = Scheduler(most=3)
    lease(idle, "g", 2, reserves=1)
    assert [key.slot for key in idle.starts()] == [0, 1, 2]


def test_long_group_is_not_starved_by_short_ones_that_keep_coming() -> None:
    scheduler, overtaken = Scheduler(most=1, overtaken=10), 0
    lease(scheduler, "long", 8)
    for number in range(200):
        lease(scheduler, f"short{number}", 1)
        [begun] = scheduler.starts()
        scheduler.ended(begun)
        if begun.group == "long":
            assert overtaken <= 10
            overtaken = 0
        else:
            overtaken += 1
    assert scheduler.waiting == 8  # of the short ones: each start of the long group's took one's place


def test_long_episodes_end_as_often_as_they_begin_whatever_the_short_ones_do() -> None:
    """Bimodal durations: nine of ten episodes take 1 tick, the tenth 50. Groups keep coming; none is given up."""
    scheduler, draw = Scheduler(most=16), random.Random(0)
    lasts: dict[SlotKey, int] = {}
    running: dict[SlotKey, int] = {}
    closed: list[list[int]] = []
    groups: dict[str, list[SlotKey]] = {}
    ended: set[SlotKey] = set()
    for tick in range(3000):
        while len(groups) < 12 and tick < 2500:
            name = f"g{len(lasts)}"
            groups[name] = lease(scheduler, name, 4)
            lasts |= {key: 50 if draw.random() < 0.1 else 1 for key in groups[name]}
        running |= {key: tick + lasts[key] for key in scheduler.starts()}
        for key in [key for key, end in running.items() if end <= tick]:
            del running[key]
            ended.add(key)
            scheduler.ended(key)
        for name in [name for name, keys in groups.items() if ended.issuperset(keys)]:
            closed.append([lasts[key] for key in groups.pop(name)])
    assert not groups and not running  # the last ones too
    trained = [last for group in closed for last in group]
    assert sum(trained) / len(trained) == sum(lasts.values()) / len(lasts)


def test_slot_whose_version_is_not_served_yet_does_not_block_the_others() -> None:
    scheduler = Scheduler(most=4)
    lease(scheduler, "ahead", 1)
    lease(scheduler, "now", 2)
    assert [key.group for key in scheduler.starts(lambda key: key.group != "ahead")] == ["now", "now"]
    assert [key.group for key in scheduler.starts()] == ["ahead"]


def test_free_sandboxes_bound_the_starts() -> None:
    scheduler = Scheduler(most=8)
    lease(scheduler, "g", 8)
    scheduler.observe(EngineLoad(0, 0, 8), sandboxes_free=3)
    assert len(scheduler.starts()) == 3
    assert scheduler.starts() == []


@pytest.mark.parametrize("share_of_time_in_the_engine", [1.0, 0.5, 0.2])
def test_concurrency_grows_until_the_engine_is_full_and_its_queue_stays_short(
        share_of_time_in_the_engine: float) -> None:  # fmt: skip
    """Episodes of 20 turns, each of which takes 4 ticks of the engine and then the rest in its environment."""
    scheduler, draw, capacity = Scheduler(most=512, first=32), random.Random(0), 32
    lease(scheduler, "g", 5000)
    queue: deque[SlotKey] = deque()
    decoding: dict[SlotKey, int] = {}
    tools: dict[SlotKey, int] = {}
    turns: dict[SlotKey, int] = {}
    busy, longest = [], []
    for tick in range(600):
        scheduler.observe(EngineLoad(len(decoding), len(queue), capacity))
        for key in scheduler.starts():
            queue.append(key)
            turns[key] = 20
        for key in [key for key, left in tools.items() if left <= tick]:
            del tools[key]
            queue.append(key)
        while queue and len(decoding) < capacity:
            decoding[queue.popleft()] = tick + draw.randint(2, 6)
        for key in [key for key, left in decoding.items() if left <= tick]:
            del decoding[key]
            turns[key] -= 1
            if not turns[key]:
                scheduler.ended(key)
            else:
                mean = 4 / share_of_time_in_the_engine - 4
                tools[key] = tick + round(draw.uniform(0, 2 * mean))
        if tick >= 200:
            busy.append(len(decoding) / capacity)
            longest.append(len(queue))
    assert sum(busy) / len(busy) > 0.75  # each request leaves its slot empty for a fifth of its time here
    assert sum(longest) / len(longest) < 0.5 * capacity
    assert scheduler.running < 3 * capacity / share_of_time_in_the_engine


STEP = st.one_of(
    st.tuples(st.just("lease"), st.integers(1, 8), st.integers(0, 2)),
    st.tuples(st.just("start"), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["end", "lose", "withdraw"]), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("engine"), st.integers(0, 20), st.integers(0, 30)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=100), st.integers(1, 12), st.integers(1, 5))
def test_room_never_stays_empty_while_slots_wait_and_nobody_is_overtaken_too_often(
        steps: list[tuple[str, int, int]], most: int, overtaken: int) -> None:  # fmt: skip
    scheduler = Scheduler(most, overtaken=overtaken)
    running: list[SlotKey] = []
    waiting: dict[SlotKey, bool] = {}  # -> is it a reserve
    launched: dict[str, int] = {}
    passed: dict[str, int] = {}
    for number, (what, a, b) in enumerate(steps):
        if what == "lease":
            for key in lease(scheduler, f"g{number}", a, b):
                waiting[key] = key.slot >= a
            launched[f"g{number}"] = number
        elif what == "engine":
            scheduler.observe(EngineLoad(min(a, 10), b, 10))
            assert min(10, most) <= scheduler.limit <= most
        elif what == "start":
            for key in scheduler.starts():
                stood_in = waiting.pop(key)
                passed.pop(key.group, None)
                for group in {other.group for other, reserve in waiting.items() if not reserve}:
                    if launched[group] < launched[key.group]:
                        passed[group] = passed.get(group, 0) + 1
                        assert passed[group] <= overtaken
                if stood_in:
                    assert not any(k.group == key.group and not r for k, r in waiting.items())
                running.append(key)
            assert len(running) >= min(scheduler.limit, len(running) + len(waiting))
        elif what == "withdraw" and waiting:
            key = list(waiting)[a % len(waiting)]
            del waiting[key]
            scheduler.ended(key)
        elif running and what != "withdraw":
            key = running.pop(a % len(running))
            scheduler.ended(key, lost=what == "lose")
        assert scheduler.running == len(running)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8))
def test_every_leased_slot_runs_once(sizes: list[int], most: int) -> None:
    scheduler = Scheduler(most)
    keys = [key for number, slots in enumerate(sizes) for key in lease(scheduler, f"g{number}", slots)]
    begun: list[SlotKey] = []
    while now := scheduler.starts():
        assert scheduler.running <= most
        begun += now
        scheduler.ended(now[-1])
        for key in now[:-1]:
            scheduler.ended(key)
    assert sorted(begun) == sorted(keys)
    assert scheduler.waiting == scheduler.running == 0


def test_busy_engine_is_not_the_models_time() -> None:
    alone, crowded = Budget(10_000, max_model_s=10.0), Budget(10_000, max_model_s=10.0)
    for _ in range(9):
        assert alone.model(100, decode_s=1.0, token_s=0.01) == pytest.approx(1.0)
        assert crowded.model(100, decode_s=8.0, token_s=0.01) == pytest.approx(1.0)
    assert (alone.spent(), crowded.spent()) == (None, None)
    alone.model(100, 1.0, 0.01)
    assert alone.spent() == "model_time"


@pytest.mark.parametrize(("budget", "spent"), [
    (Budget(100), "tokens"), (Budget(1000, max_turns=2), "turns"),
    (Budget(1000, max_model_s=0.9), "model_time"), (Budget(1000, max_tool_s=5.0), "tool_time"),
])  # fmt: skip
def test_each_budget_ends_its_episode_by_name(budget: Budget, spent: str) -> None:
    assert budget.spent() is None
    for _ in range(2):
        budget.model(50, 0.5, 0.01)
        budget.tool(2.5)
    assert budget.spent() == spent
