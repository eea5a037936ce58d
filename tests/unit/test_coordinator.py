"""Leases, pacing and batches: the coordinator with the real fold, around logs in memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.errors import NoProgress, TooUniform
from headrace.schemas.events import (
    Disposed,
    GroupClosed,
    HandBack,
    Lease,
    LeaseEnded,
    LeaseRequest,
    Manifest,
    RunCreated,
    SettingsChanged,
)
from headrace.schemas.hashes import GENESIS, digest
from headrace.schemas.outcomes import Outcome
from tests.scripted import Script, run_settings
from tests.simulation import Sim, exhausted


def simulation(groups: int = 2, max_lag: int = 1, size: int = 2, *, batch: dict[str, Any] | None = None,
               staleness: dict[str, Any] | None = None, tasks: dict[str, Any] | None = None,
               **rollout: Any) -> Sim:  # fmt: skip
    return Sim(run_settings(
        tasks={"dataset": "chain_sum"} | (tasks or {}),
        rollout={"group_size": size, "max_attempts": 2} | rollout,
        batch={"groups": groups, "max_lag": max_lag} | (batch or {}),
        staleness=staleness or {},
    ))  # fmt: skip


def started(groups: int = 2, max_lag: int = 1, size: int = 2, capacity: int = 1000, **over: Any) -> Sim:
    """One worker beats, version 0 is out, and the first groups are open."""
    sim = simulation(groups, max_lag, size, **over)
    sim.beat(capacity=capacity)
    sim.publish()
    sim.decide()
    return sim


# ------------------------------------------------------------------------------------------------------- pacing


def test_nothing_is_leased_before_version_0_is_published() -> None:
    sim = simulation()
    sim.beat()
    assert not sim.decide()
    sim.publish()
    assert sim.decide().tasks


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_room_is_what_the_lag_allows(max_lag: int) -> None:
    sim = started(groups=4, max_lag=max_lag)
    assert len(sim.open) == (max_lag + 1) * 4
    assert not sim.decide()


def test_group_without_a_batch_gives_its_place_back() -> None:
    sim = started(groups=2, max_lag=0)
    first = sim.open[0]
    sim.end_group(first, solved=False)
    assert [one.group for one in sim.decide().tasks if isinstance(one, Lease)] == ["g00000002"]
    sim.end_group(sim.open[0])  # a candidate keeps it
    assert not sim.decide()


def test_max_lag_0_is_strictly_synchronous() -> None:
    sim = started(groups=3, max_lag=0)
    fates = itertools.cycle([None, True, False])
    for version in range(1, 6):
        while len(sim.manifests) < version:
            sim.end_group(sim.open[0], solved=next(fates))
            sim.decide()
        assert not sim.open, "nothing is sampled while the batch is trained"
        assert all(ref.max_lag == 0 for ref in sim.manifests[-1].groups)
        sim.publish()
        assert {lease.min_version for lease in sim.decide().tasks if isinstance(lease, Lease)} == {version}


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.integers(1, 4), st.lists(st.floats(0, 1), min_size=30, max_size=30), st.randoms())
def test_pacing_keeps_going_when_most_groups_end_without_a_batch(
    max_lag: int, groups: int, dispositions: list[float], rng: random.Random
) -> None:
    """50 versions, whatever the order of dispositions; on average 70 % of the groups give no candidate."""
    sim = started(groups=groups, max_lag=max_lag, tasks={"size": None})
    while sim.version < 50:
        if sim.open:
            group = rng.choice(sim.open)
            roll = rng.choice(dispositions) if rng.random() < 0.3 else rng.random()
            sim.end_group(group, solved=None if roll < 0.3 else rng.random() < 0.5)
        sim.decide()
        assert sim.coordinator.room >= 0
        assert len(sim.open) <= (max_lag + 1) * groups
        if sim.manifests and sim.manifests[-1].batch > sim.version and (not sim.open or rng.random() < 0.3):
            sim.publish()
            sim.decide()
        assert sim.open or (sim.manifests and sim.manifests[-1].batch > sim.version), "the run stands still"
    assert [manifest.batch for manifest in sim.manifests][:50] == list(range(1, 51))


def test_run_gives_up_when_too_many_groups_close_without_a_batch_and_says_why() -> None:
    for solved, word in ((False, "too hard"), (True, "too easy")):
        sim = started(batch={"max_groups_per_batch": 5})
        with pytest.raises(TooUniform, match=f"{word}.*{100 * solved:.1f}%"):
            for _ in range(10):
                sim.end_group(sim.open[0], solved=solved)
                sim.decide()
        assert sum(isinstance(one, GroupClosed) for _, one in sim.logs["groups"]) == 6


def test_run_whose_episodes_all_fail_says_that_infrastructure_does() -> None:
    sim = started(max_attempts=1, batch={"max_groups_per_batch": 5})
    with pytest.raises(NoProgress, match="not one episode was judged"):
        for _ in range(100):
            sim.end(sim.held[0], None, Outcome.INFRA_FAILURE)
            sim.decide()


# ------------------------------------------------------------------------------------------------------- batches


def test_ready_groups_beyond_the_batch_remain_for_the_next_one() -> None:
    sim = started(groups=4, max_lag=2, batch={"max_ahead": 0})
    order = [sim.open[i] for i in (3, 1, 7, 0, 2, 9, 4, 5, 6, 8)]
    for group in order:
        sim.end_group(group)
    sim.decide()
    assert [[ref.group for ref in manifest.groups] for manifest in sim.manifests] == [order[:4]]
    assert len(sim.coordinator.batching.candidates) == 6
    sim.publish()
    sim.decide()
    assert [ref.group for ref in sim.manifests[-1].groups] == order[4:8]


def test_manifests_run_ahead_of_the_committed_version_by_no_more_than_max_ahead() -> None:
    sim = started(groups=1, max_lag=4, batch={"max_ahead": 1})
    for group in sim.open:
        sim.end_group(group)
    sim.decide()
    assert [manifest.target for manifest in sim.manifests] == [0, 1]
    sim.publish()
    sim.decide()
    assert [manifest.target for manifest in sim.manifests] == [0, 1, 2]


@pytest.mark.parametrize("updates", [1, 5])
def test_lag_after_n_updates_is_n(updates: int) -> None:
    sim = started(groups=1, max_lag=1, batch={"max_ahead": 0})
    slow = sim.open[0]
    for _ in range(updates):
        sim.end_group(sim.open[1])
        sim.decide()
        sim.publish()
        sim.decide()
    sim.end_group(slow)
    sim.decide()
    (ref,) = sim.manifests[-1].groups
    assert (ref.group, ref.max_lag) == (slow, updates)


def test_manifest_names_what_it_was_decided_from() -> None:
    sim = started(groups=1, max_lag=0)
    sim.end_group(sim.open[0], solved=True)
    sim.decide()
    sim.end_group(sim.open[0])
    sim.now = 77
    sim.decide()
    (manifest,) = sim.manifests
    assert manifest.closures_since == 2 and manifest.decided_ms == 77
    assert [(p.partition, p.offset) for p in manifest.positions] == [(0, len(sim.logs["groups"]))]
    assert unpack_int32(manifest.segment_slot).tolist() == [0, 1]
    assert unpack_int32(manifest.segment_count).tolist() == [4, 4]
    assert unpack_float32(manifest.segment_weight).tolist() == [1, 1]
    assert np.all(unpack_float32(manifest.segment_drift) == 0)


def test_tokens_beyond_the_hard_lag_weigh_nothing_and_a_group_of_nothing_else_is_stale() -> None:
    sim = started(groups=1, max_lag=1, batch={"max_ahead": 0}, staleness={"hard_lag": 2})
    stale, mixed = sim.open[:2]
    for _ in range(3):
        sim.publish()
    sim.end_group(stale)
    held = [h for h in sim.held if h[0].group == mixed]
    sim.end(held[0], 1.0, version=3)
    sim.end(held[1], 0.0, version=0)
    sim.coordinator.batching.batch = 3  # batches 1 to 3 are not this test's matter
    sim.decide()
    (disposed,) = sim.wrote(Disposed)
    assert (disposed.group, disposed.disposition, disposed.target) == (stale, "stale", 3)
    (manifest,) = sim.manifests
    assert [ref.group for ref in manifest.groups] == [mixed] and manifest.groups[0].max_lag == 3
    assert unpack_float32(manifest.segment_weight).tolist() == [1, 0]


def test_every_stale_candidate_gives_its_place_back_at_once_although_the_batch_is_full_without_it() -> None:
    sim = started(groups=1, max_lag=2, batch={"max_ahead": 0}, staleness={"hard_lag": 2})
    stale, fresh = sim.open[1:], sim.open[0]
    for _ in range(3):
        sim.publish()
    sim.end_group(fresh, version=3)
    for group in stale:
        sim.end_group(group, version=0)
    sim.coordinator.batching.batch = 3
    decided = sim.decide()
    assert [ref.group for ref in sim.manifests[-1].groups] == [fresh]
    assert {one.group for one in sim.wrote(Disposed)} == set(stale) and len(stale) == 2
    assert len([one for one in decided.tasks if isinstance(one, Lease)]) == 2, "new groups in their places"


def test_drop_takes_an_episode_with_one_token_beyond_the_limit_out_of_the_batch() -> None:
    sim = started(groups=1, max_lag=1, size=3, batch={"max_ahead": 0}, staleness={"hard_lag": 2, "on_stale": "drop"})
    for _ in range(3):
        sim.publish()
    for held, version in zip(list(sim.held), (3, 0, 3), strict=False):
        sim.end(held, float(version), version=version)
    sim.coordinator.batching.batch = 3
    sim.decide()
    (manifest,) = sim.manifests
    assert unpack_float32(manifest.segment_weight).tolist() == [1, 0, 1]


def test_wait_holds_the_batch_for_an_open_group_that_it_would_push_beyond_the_limit() -> None:
    sims = {rule: started(groups=1, max_lag=1, batch={"max_ahead": 0}, staleness={"hard_lag": 1, "on_stale": rule})
            for rule in ("mask", "wait")}  # fmt: skip
    for rule, sim in sims.items():
        slow, first, second = sim.open[0], sim.open[1], None
        sim.end_group(first)
        sim.decide()
        assert len(sim.manifests) == 1, "lag 0 now, lag 1 in the next batch: within the limit"
        sim.publish()
        sim.decide()
        second = next(group for group in sim.open if group != slow)
        sim.end_group(second)
        sim.decide()
        assert len(sim.manifests) == (2 if rule == "mask" else 1)
        sim.restart()
        sim.beat()
        sim.decide()
        assert len(sim.manifests) == (2 if rule == "mask" else 1), "also after a restart"
        sim.end_group(slow, version=0)
        sim.decide()
        if rule == "wait":  # it goes first, although it was completed later
            assert [ref.group for ref in sim.manifests[-1].groups] == [slow]
            assert unpack_float32(sim.manifests[-1].segment_weight).tolist() == [1, 1]
            sim.publish()
            for group in sim.open:  # opened at version 1: it waits for them too
                sim.end_group(group, solved=False)
            sim.decide()
            assert [ref.group for ref in sim.manifests[-1].groups] == [second]


def test_wait_ends_with_the_group_that_was_waited_for_whatever_became_of_it() -> None:
    sim = started(groups=1, max_lag=1, batch={"max_ahead": 0}, staleness={"hard_lag": 1, "on_stale": "wait"})
    slow, first = sim.open[:2]
    sim.end_group(first)
    sim.decide()
    sim.publish()
    sim.decide()
    sim.end_group(next(group for group in sim.open if group != slow))
    sim.decide()
    assert len(sim.manifests) == 1
    sim.end_group(slow, solved=False)
    sim.decide()
    assert len(sim.manifests) == 2


def test_manifest_counts_the_versions_whose_change_was_extrapolated() -> None:
    sim = started(groups=1, max_lag=2, batch={"max_ahead": 1})
    groups = sim.open[:3]
    sim.publish(rho=0.02)
    for group in groups:
        sim.end_group(group, version=0)
    sim.decide()
    assert [m.target for m in sim.manifests] == [0, 1, 2]
    assert [unpack_int32(m.segment_extrapolated or b"").tolist() for m in sim.manifests] == [[0, 0], [0, 0], [1, 1]]
    drifts = [unpack_float32(m.segment_drift)[0] for m in sim.manifests]
    assert drifts == pytest.approx([0.0, 0.02**2, 0.04**2])


def test_last_batch_is_short_when_the_tasks_are_used_up() -> None:
    sim = started(groups=2, max_lag=1, tasks={"size": 3})
    assert len(sim.open) == 3 and not sim.coordinator.finished
    for group in sim.open:
        sim.end_group(group)
    sim.decide()
    assert [len(manifest.groups) for manifest in sim.manifests] == [2, 1]
    for _ in range(2):
        sim.publish()
    assert not sim.decide() and sim.coordinator.finished


def test_too_few_for_a_last_batch_are_left_over_and_that_is_written_once() -> None:
    sim = started(groups=3, max_lag=1, tasks={"size": 4}, batch={"min_last_groups": 2})
    for group in sim.open:
        sim.end_group(group)
    sim.decide()
    assert [len(manifest.groups) for manifest in sim.manifests] == [3]
    (left,) = sim.wrote(Disposed)
    assert (left.group, left.disposition, left.target) == ("g00000003", "leftover", 1)
    assert left.reason == "1 left when the tasks were used up; a last batch needs 2"
    sim.restart()
    sim.beat()
    assert not sim.decide()
    sim.publish()
    sim.decide()
    assert sim.coordinator.finished and len(sim.wrote(Disposed)) == 1


def test_candidates_wait_for_their_batch_while_a_group_is_still_open() -> None:
    """The last one may complete a whole batch: nothing is short or left over before."""
    sim = started(groups=2, max_lag=1, tasks={"size": 2}, batch={"min_last_groups": 2})
    first, second = sim.open
    sim.end_group(first)
    sim.decide()
    assert not sim.manifests and not sim.wrote(Disposed)
    sim.end_group(second)
    sim.decide()
    assert [len(manifest.groups) for manifest in sim.manifests] == [2]


def test_group_sampled_at_once_and_queued_for_five_versions_has_lag_5() -> None:
    """prime-rl#3009: lag counts to the version that is trained, not to the one that was served at its end."""
    sim = started(groups=1, max_lag=5, batch={"max_ahead": 0})
    for group in sim.open:  # six groups, all by version 0, all done before anything is trained
        sim.end_group(group, version=0)
    for _ in range(6):
        sim.decide()
        sim.publish()
    assert [ref.max_lag for manifest in sim.manifests for ref in manifest.groups] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_trained_lengths_are_distributed_as_the_sampled_ones_although_long_groups_come_late(max_lag: int) -> None:
    """tinker-cookbook#822: half of the tasks take ten times as long. Pacing opens a group only for one that is trained,
    so the fast ones can't crowd the slow ones out."""
    sim, clock, ready = started(groups=4, max_lag=max_lag, size=2, staleness={"hard_lag": 40}), 0, dict[str, int]()
    draw = random.Random(5)
    long: dict[str, bool] = {}
    while len(sim.manifests) < 60:
        for group in sim.open:
            if group not in ready:
                long[group] = draw.random() < 0.5
                ready[group] = clock + (50 if long[group] else 5)
        clock += 1
        for group in [g for g in sim.open if ready[g] <= clock]:
            sim.end_group(group)
        sim.decide()
        if sim.manifests and sim.manifests[-1].batch > sim.version and clock % 3 == 0:
            sim.publish()
            sim.decide()
    trained = [long[ref.group] for manifest in sim.manifests for ref in manifest.groups]
    opened_first = sorted(long, key=lambda name: int(name[1:]))[: len(trained)]
    share, expected = sum(trained) / len(trained), sum(long[name] for name in opened_first) / len(trained)
    # Only what is in flight at the end can differ: at most the room.
    assert abs(share - expected) <= (max_lag + 1) * 4 / len(trained)
    assert not sim.wrote(Disposed)


def test_changed_settings_hold_for_what_is_decided_after_them() -> None:
    sim = simulation(groups=1, max_lag=0)
    link: dict[str, Any] = dict(number=0, previous=b"", writer="set")
    plain = sim.settings.model_dump_json()
    sim.observe("policy", RunCreated(**link, run="r", settings=plain, software="", created_ms=0))
    sim.beat()
    sim.publish()
    sim.decide()
    sim.observe("policy", SettingsChanged(**link, changes='{"batch.max_lag": 2}', changed_ms=0))
    sim.decide()
    assert len(sim.open) == 3
    sim.end_group(sim.open[0])
    sim.decide()
    assert sim.manifests[0].settings_offset == 3


# ------------------------------------------------------------------------------------------------------- workers


def test_group_goes_to_one_worker_where_one_has_room_and_is_split_where_none_has() -> None:
    sim = simulation(groups=1, max_lag=1, size=4)
    for name, capacity in (("a", 3), ("b", 5)):
        sim.beat(name, capacity=capacity)
    sim.publish()
    sim.decide()
    shares = [(lease.group, lease.worker, len(lease.assignments), lease.opens) for lease in sim.wrote(Lease)]
    assert shares == [("g00000000", "b", 4, True), ("g00000001", "a", 3, True), ("g00000001", "b", 1, False)]


def test_slots_without_a_place_are_leased_before_a_new_group() -> None:
    sim = started(groups=2, max_lag=0, size=4, capacity=3)
    assert [len(lease.assignments) for lease in sim.wrote(Lease)] == [3]
    sim.end(sim.held[0], 1.0)
    sim.decide()
    last = sim.wrote(Lease)[-1]
    assert (last.group, [(a.slot, a.attempt) for a in last.assignments], last.opens) == ("g00000000", [(3, 0)], False)


def test_worker_without_heartbeats_loses_its_slots_to_a_living_one() -> None:
    sim = started(groups=1, max_lag=0, lease_timeout_s=15)
    sim.pass_s(14, "v")
    assert not sim.decide()
    sim.pass_s(3, "v")
    decision = sim.decide()
    ended, lease = decision.tasks
    assert isinstance(ended, LeaseEnded) and (ended.incarnation, ended.slots, ended.reason) == (
        "w0", (0, 1), "worker_lost")  # fmt: skip
    assert isinstance(lease, Lease) and (lease.worker, lease.opens) == ("v", False)
    assert [(a.slot, a.attempt) for a in lease.assignments] == [(0, 1), (1, 1)]


def test_lost_slots_wait_until_some_worker_lives() -> None:
    sim = started(groups=1, max_lag=0)
    sim.pass_s(20)
    assert [type(one) for one in sim.decide().tasks] == [LeaseEnded]
    sim.pass_s(100)
    assert not sim.decide()
    sim.beat("v")
    assert [type(one) for one in sim.decide().tasks] == [Lease]


def test_slot_whose_last_attempts_worker_is_lost_is_exhausted_and_the_group_ends() -> None:
    sim = started(groups=1, max_lag=0, max_attempts=1)
    sim.pass_s(20, "v")
    assert [(one.slot, one.reason) for one in exhausted(sim.decide())] == [(0, "worker_lost"), (1, "worker_lost")]
    assert [one.closure for one in sim.wrote(GroupClosed)] == ["too_few_survivors"]
    assert sim.decide().tasks  # the next group


def test_new_incarnation_of_a_worker_ends_the_old_ones_leases_at_once() -> None:
    sim = started(groups=1, max_lag=0)
    sim.beat("w", "w1")
    assert [(type(one), one.incarnation) for one in sim.decide().tasks] == [(LeaseEnded, "w0"), (Lease, "w1")]
    sim.beat("w", "w0")  # a zombie's heartbeat brings nothing back
    assert not sim.decide()
    assert [one.incarnation for one, _ in sim.held] == ["w1", "w1"]


def test_outage_of_the_log_loses_no_worker() -> None:
    sim = started(groups=1, max_lag=0, lease_timeout_s=15)
    sim.now += 12 * 3600 * 1000
    sim.pass_s(1)
    assert not sim.decide()
    sim.restart()
    sim.pass_s(10)
    assert not sim.decide()


def test_failed_attempt_is_leased_again_alone_and_its_siblings_go_on() -> None:
    sim = started(groups=1, max_lag=0)
    sim.end(sim.held[0], None, Outcome.INFRA_FAILURE)
    (lease,) = sim.decide().tasks
    assert isinstance(lease, Lease) and [(a.slot, a.attempt) for a in lease.assignments] == [(0, 1)]
    assert len(sim.held) == 2


def test_lease_handed_back_uses_up_no_attempt_and_waits_for_a_heartbeat() -> None:
    sim = started(groups=1, max_lag=0, max_attempts=1)
    for attempt in range(1, 4):
        lease = sim.wrote(Lease)[-1]
        sim.observe("fleet", HandBack("w", "w0", lease.group, lease.number, (0, 1), "handed_back"))
        assert [type(one) for one in sim.decide().tasks] == [LeaseEnded]
        sim.beat()
        (again,) = sim.decide().tasks
        assert isinstance(again, Lease) and {a.attempt for a in again.assignments} == {attempt}


def test_worker_is_told_of_an_end_that_it_cannot_know() -> None:
    sim = started(groups=1, max_lag=0)
    lease, one = sim.held[0]
    script = Script(lease.group, one.slot, one.attempt, lease.incarnation)
    script.sequence = 1
    sim.feed(script.span())  # the first event never came
    ended, again = sim.decide().tasks
    assert isinstance(ended, LeaseEnded) and (ended.slots, ended.reason) == ((0,), "sequence_gap")
    assert isinstance(again, Lease) and again.assignments[0].attempt == 1


# ------------------------------------------------------------------------------------------------------- requests


def request(sim: Sim, name: str = "r1", **over: Any) -> None:
    facts: dict[str, Any] = dict(request=name, worker="sdk", incarnation="sdk0", task=None, size=None, purpose="train",
                                 version=None)  # fmt: skip
    sim.observe("fleet", LeaseRequest(**(facts | over)))


def test_request_is_answered_once_also_after_a_restart() -> None:
    sim = simulation(groups=1, max_lag=0)
    sim.publish()
    request(sim, size=3)
    (lease,) = sim.decide().tasks
    assert isinstance(lease, Lease) and (lease.request, lease.incarnation, lease.spec.group_size) == ("r1", "sdk0", 3)
    for _ in range(2):
        request(sim, size=3)
        assert not sim.decide()
        sim.restart()


def test_request_for_training_waits_for_room_and_one_for_evaluation_takes_none() -> None:
    sim = started(groups=1, max_lag=0)
    request(sim)
    request(sim, "r2", purpose="eval", task="chain_sum-0-9", version=0)
    (lease,) = sim.decide().tasks
    assert isinstance(lease, Lease) and (lease.request, lease.purpose, lease.task.id) == ("r2", "eval", "chain_sum-0-9")
    sim.end_group("g00000000", solved=True)
    (lease,) = sim.decide().tasks
    assert isinstance(lease, Lease) and lease.request == "r1"


def test_lost_requester_ends_its_group() -> None:
    sim = simulation(groups=1, max_lag=0)
    sim.publish()
    request(sim)
    sim.decide()
    sim.pass_s(20, "w")
    assert len(exhausted(sim.decide())) == 2
    assert [one.closure for one in sim.wrote(GroupClosed)] == ["too_few_survivors"]


# ------------------------------------------------------------------------------------------------------- restarts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["end"] * 6 + ["infra", "beat", "beat", "lose", "publish", "publish", "tick",
                                                        "restart", "hand_back", "gap"]),
                          st.integers(0, 5), st.sampled_from([0.0, 0.0, 1.0])), max_size=80),
       st.integers(0, 2))  # fmt: skip
def test_whatever_happens_no_attempt_is_leased_twice_and_no_candidate_is_lost(
    moves: list[tuple[str, int, float]], max_lag: int
) -> None:
    sim = started(groups=2, max_lag=max_lag, capacity=5, batch={"max_groups_per_batch": 10_000})
    incarnations = {"w": 0, "v": 0}
    for kind, number, reward in moves:
        name = "wv"[number % 2]
        held = sim.held[number % len(sim.held)] if sim.held else None
        if kind == "beat":
            sim.beat(name, f"{name}{incarnations[name]}", capacity=5)
        elif kind == "lose":
            incarnations[name] += 1
        elif kind == "tick":
            sim.pass_s(6)
        elif kind == "publish" and sim.manifests and sim.manifests[-1].batch > sim.version:
            sim.publish(rho=0.01)
        elif kind == "restart":
            before = _standing(sim)
            sim.restart()
            assert _standing(sim) == before
            for name, n in incarnations.items():
                sim.beat(name, f"{name}{n}", capacity=5)
        elif held and kind == "end":
            sim.end(held, reward)
        elif held and kind == "infra":
            sim.end(held, None, Outcome.INFRA_FAILURE)
        elif held and kind == "hand_back":
            lease, one = held
            sim.observe("fleet", HandBack(lease.worker, lease.incarnation, lease.group, lease.number, (one.slot,), "x"))
        elif held and kind == "gap":
            lease, one = held
            sim.feed(Script(lease.group, one.slot, one.attempt, lease.incarnation, sequence=9).span())
        sim.decide()

    leased = [(lease.group, a.slot, a.attempt) for lease in sim.wrote(Lease) for a in lease.assignments]
    assert len(leased) == len(set(leased))
    numbers = [lease.number for lease in sim.wrote(Lease)]
    assert numbers == sorted(set(numbers))
    tasks = [lease.task.id for lease in sim.wrote(Lease) if lease.opens]
    assert len(tasks) == len(set(tasks))
    candidates = [c.group for c in sim.wrote(GroupClosed) if c.closure == "candidate"]
    fates = [ref.group for manifest in sim.manifests for ref in manifest.groups]
    fates += [disposed.group for disposed in sim.wrote(Disposed)]
    waiting = [candidate.closure.group for candidate in sim.coordinator.batching.candidates]
    assert sorted(fates + waiting) == sorted(candidates)
    assert [manifest.batch for manifest in sim.manifests] == list(range(1, len(sim.manifests) + 1))
    previous = GENESIS
    for record, event in sim.logs["batches"]:
        assert isinstance(event, Manifest | Disposed) and event.previous == previous
        previous = digest(record.value or b"")


def _standing(sim: Sim) -> Any:
    """Where the coordinator stands, but for what only heartbeats say."""
    coordinator = sim.coordinator
    slots = {name: [(s.attempt, s.incarnation, s.lease, s.state.name) for s in group.slots]
             for name, group in coordinator.leasing.groups.items()}  # fmt: skip
    batching = coordinator.batching
    return (slots, coordinator.room, coordinator._cursor, coordinator._opened, coordinator._leases,
            coordinator.published, batching.batch, batching._closures, batching._chain,
            [candidate.closure.group for candidate in batching.candidates])  # fmt: skip
