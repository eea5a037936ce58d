"""Routing as claims: where a request goes, and why."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producers.routing import (
    PrefixCache,
    Reason,
    Request,
    Router,
    blocks_by_count,
    blocks_of,
)

BLOCK = 128


def router(*names: str, capacity: int = 64) -> Router:
    made = Router()
    for name in names:
        made.added(name, capacity)
    return made


def turn(conversation: str, tokens: int, group: str = "g", shared: int = 0) -> Request:
    return Request(conversation, tokens, blocks_by_count(group, shared, conversation, tokens))


def test_conversation_goes_back_to_the_replica_that_holds_its_prefix() -> None:
    homes: dict[int, str] = {}
    routing = router("a", "b", "c")
    for length in range(1, 6):
        for number in range(12):
            choice = routing.choose(turn(f"c{number}", 1000 * length), 0.0)
            assert choice is not None
            assert homes.setdefault(number, choice.replica) == choice.replica
            assert choice.reason is (Reason.NEW if length == 1 else Reason.PREFIX)
            routing.ended(choice.ticket, 0.0, 200)
    assert Counter(homes.values()) == {"a": 4, "b": 4, "c": 4}


def test_siblings_share_a_replica_and_groups_spread() -> None:
    places: dict[str, set[str]] = {}
    routing = router("a", "b", "c", "d")
    for group in "pqrs":
        for slot in range(8):
            choice = routing.choose(turn(f"{group}{slot}", 4000, group, shared=4000), 0.0)
            assert choice is not None
            places.setdefault(group, set()).add(choice.replica)
    assert [len(where) for where in places.values()] == [1] * 4
    assert len(set.union(*places.values())) == 4


def test_a_popular_prompt_spills_when_its_holder_has_too_much_to_do() -> None:
    routing = router("a", "b")
    choices = [routing.choose(turn(f"c{i}", 2000, shared=1000), 0.0) for i in range(40)]
    assert Counter(c.replica for c in choices if c) == {"a": 20, "b": 20}
    assert {c.reason for c in choices if c} == {Reason.NEW, Reason.PREFIX, Reason.SPILLED}


def test_full_slots_send_a_conversation_elsewhere_while_others_are_free() -> None:
    routing = router("a", "b", capacity=2)
    first = routing.choose(turn("x", 5000), 0.0)
    assert first is not None
    routing.told(first.replica, waiting=3)
    moved = routing.choose(turn("x", 6000), 0.0)
    assert moved is not None
    assert (moved.replica != first.replica, moved.reason) == (True, Reason.SPILLED)


@pytest.mark.parametrize("how", ["fenced", "drained", "removed"])
def test_conversation_of_a_lost_replica_is_rerouted_and_stays_at_its_new_one(how: str) -> None:
    routing = router("a", "b", "c")
    first = routing.choose(turn("x", 3000), 0.0)
    assert first is not None
    getattr(routing, how)(first.replica)
    second = routing.choose(turn("x", 4000), 0.0)
    assert second is not None
    assert second.replica != first.replica
    assert (second.reason, second.cached_tokens) == (Reason.REROUTED, 0)
    if how != "removed":
        routing.restored(first.replica)
    third = routing.choose(turn("x", 5000), 0.0)
    assert third is not None
    assert (third.replica, third.reason) == (second.replica, Reason.PREFIX)
    routing.ended(first.ticket, 0.0, 10)  # a late word of a lost replica harms nothing


def test_one_failing_replica_of_four_is_fenced_and_the_others_share_its_work_evenly() -> None:
    routing, seen = router("a", "b", "c", "d"), Counter[str]()
    first = [routing.choose(turn(f"c{i}", 1000), 0.0) for i in range(40)]
    routing.fenced("b")
    for turns in range(2, 5):
        for number in range(40):
            choice = routing.choose(turn(f"c{number}", 1000 * turns), 0.0)
            assert choice is not None
            seen[choice.replica] += 1
            was = first[number]
            assert was is not None
            if was.replica != "b":  # conversations elsewhere don't move for it
                assert choice.replica == was.replica
    assert seen.keys() == {"a", "c", "d"}
    assert max(seen.values()) <= 1.25 * sum(seen.values()) / 3


def test_same_prompt_after_an_update_expects_nothing_of_the_old_versions_cache() -> None:
    routing, ids = router("a"), list(range(1000))
    for version, cached in ((1, 0), (1, 896), (2, 0), (2, 896)):
        choice = routing.choose(Request("x", 1000, blocks_of(ids, salt=version)), 0.0)
        assert choice is not None
        assert choice.cached_tokens == cached


def test_replica_that_just_failed_a_request_is_avoided_and_nowhere_is_said() -> None:
    routing = router("a", "b")
    first = routing.choose(turn("x", 3000), 0.0)
    assert first is not None
    again = routing.choose(turn("x", 3000), 0.0, avoid={first.replica})
    assert again is not None
    assert again.replica != first.replica
    assert routing.choose(turn("x", 3000), 0.0, avoid={"a", "b"}) is None
    assert Router().choose(turn("x", 3000), 0.0) is None


def test_restarted_replica_has_an_empty_cache() -> None:
    routing = router("a")
    assert routing.choose(turn("x", 3000), 0.0)
    routing.added("a", 64)
    choice = routing.choose(turn("x", 3000), 0.0)
    assert choice is not None
    assert choice.cached_tokens == 0
    assert routing.loads()["a"] == pytest.approx(3256)


def test_capacity_weighs_the_share() -> None:
    routing = router()
    routing.added("small", 16)
    routing.added("large", 48)
    where = Counter(choice.replica for i in range(64) if (choice := routing.choose(turn(f"c{i}", 1000), 0.0)))
    assert where == {"small": 16, "large": 48}


def test_ended_work_fades_and_running_work_does_not() -> None:
    routing = router("a")
    first, _ = routing.choose(turn("x", 1000), 0.0), routing.choose(turn("y", 1000), 0.0)
    assert first is not None
    routing.ended(first.ticket, 0.0, 1000)
    assert routing.loads()["a"] == pytest.approx(2000 + 1256)
    routing.choose(turn("x", 0), 40.0)
    assert routing.loads()["a"] == pytest.approx(1000 + 1256 + 256 + 0.05 * (1000 - 256), rel=0.01)


def test_hits_are_reported_estimated_and_true() -> None:
    routing = router("a")
    first = routing.choose(turn("x", 1280), 0.0)
    assert first is not None
    routing.ended(first.ticket, 0.0, 1280, blocks=blocks_by_count("g", 0, "x", 2560), cached_tokens=0)
    second = routing.choose(turn("x", 2560), 0.0)
    third = routing.choose(turn("z", 1280), 0.0)
    assert second is not None and third is not None
    routing.ended(second.ticket, 0.0, 5, cached_tokens=1280)
    routing.ended(third.ticket, 0.0, 5)  # its engine doesn't tell
    hits = routing.hits
    assert (hits.prompt, hits.estimated) == (1280 + 2560 + 1280, 2560)
    assert (hits.told, hits.true, hits.estimated_of_told) == (1280 + 2560, 1280, 2560)


def test_blocks_of_ids_name_everything_before_them_and_the_salt() -> None:
    ids = list(range(1000))
    names = blocks_of(ids, salt=3)
    assert len(names) == 1000 // BLOCK
    assert blocks_of(ids[:500], salt=3) == names[: 500 // BLOCK]
    assert not set(names) & set(blocks_of(ids, salt=4))
    assert not set(names) & set(blocks_of([7, *ids], salt=3))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=60), st.integers(1, 20))
def test_what_a_bounded_cache_holds_of_a_prompt_is_a_prefix(uses: list[tuple[int, int]], capacity: int) -> None:
    cache = PrefixCache(capacity)
    for conversation, length in uses:
        blocks = [("shared", i) if i < 3 else (conversation, i) for i in range(length)]
        cache.use(blocks)
        assert len(cache) <= capacity
        assert cache.match(blocks) == min(length, capacity)
    for conversation in range(6):
        blocks = [("shared", i) if i < 3 else (conversation, i) for i in range(12)]
        held = [block in cache._held for block in blocks]
        assert held == [True] * cache.match(blocks) + [False] * (12 - cache.match(blocks))


STEP = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 9), st.integers(1, 4000)),
    st.tuples(st.just("end"), st.integers(0, 99), st.integers(0, 500)),
    st.tuples(st.sampled_from(["fenced", "restored", "removed", "added"]), st.integers(0, 3), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=80))
def test_whatever_happens_load_is_never_negative_and_only_able_replicas_are_chosen(
        steps: list[tuple[str, int, int]]) -> None:  # fmt: skip
    routing, able, there, now = router("r0", "r1"), {"r0", "r1"}, {"r0", "r1"}, 0.0
    tickets: list[int] = []
    for what, number, size in steps:
        now += 1.0
        name = f"r{number}"
        if what == "ask":
            choice = routing.choose(turn(f"c{number}", size, shared=300), now)
            assert (choice is None) == (not able)
            if choice:
                assert choice.replica in able
                assert 0 <= choice.cached_tokens <= size
                tickets.append(choice.ticket)
        elif what == "end":
            if tickets:
                routing.ended(tickets.pop(number % len(tickets)), now, size)
        elif what == "added":
            routing.added(name)
            able.add(name)
            there.add(name)
        elif name in there:
            getattr(routing, what)(name)
            (able.add if what == "restored" else able.discard)(name)
            if what == "removed":
                there.discard(name)
        assert all(load > -1e-6 for load in routing.loads().values())
