"""Leases under fire: workers that vanish, come back, hand over twice and write late; and tasks that kill them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.schemas.events import (
    Assignment,
    AttemptEnded,
    EpisodeEnded,
    EpisodeStarted,
    FleetTick,
    GroupClosed,
    HandBack,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseRequest,
    Span,
)
from headrace.schemas.outcomes import Outcome
from tests.scripted import Script, run_settings
from tests.simulation import Held, Sim, exhausted

# ------------------------------------------------------------------------------------ any order of anything


class Fleet(RuleBasedStateMachine):
    """Two workers, each perhaps with a zombie of its own, and a coordinator that dies at any point. What the fold
    writes reaches the coordinator late and in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim(run_settings(
            rollout={"group_size": 2, "reserves": 1, "max_attempts": 3, "deadline_s": 90},
            batch={"groups": 2, "max_lag": 1, "max_groups_per_batch": 10_000},
        ))  # fmt: skip
        self.sim.delayed = True
        self.incarnations = {"w": 0, "v": 0}
        self.scripts: dict[tuple[str, int, int, str], Script] = {}  # every attempt that some incarnation was given
        self.sent: dict[tuple[str, int, int, str], list[Any]] = {}
        self.beat("w")
        self.beat("v")
        self.sim.publish()
        self.decide()

    def beat(self, name: str, incarnation: int | None = None) -> None:
        number = self.incarnations[name] if incarnation is None else incarnation
        self.sim.beat(name, f"{name}{number}", capacity=5)

    def decide(self) -> None:
        self.sim.decide()
        for lease, one in self.sim.held:
            key = (lease.group, one.slot, one.attempt, lease.incarnation)
            self.scripts.setdefault(key, Script(*key, version=lease.min_version))

    @rule()
    def the_coordinator_decides(self) -> None:
        self.decide()

    @rule(name=st.sampled_from("wv"))
    def a_worker_beats(self, name: str) -> None:
        self.beat(name)

    @rule(name=st.sampled_from("wv"))
    def a_worker_starts_anew(self, name: str) -> None:
        self.incarnations[name] += 1
        self.beat(name)

    @rule(name=st.sampled_from("wv"), back=st.integers(1, 2))
    def a_zombie_beats(self, name: str, back: int) -> None:
        if self.incarnations[name] >= back:
            self.beat(name, self.incarnations[name] - back)

    @rule(seconds=st.integers(1, 30), beating=st.sampled_from(["", "w", "v", "wv"]))
    def time_passes(self, seconds: int, beating: str) -> None:
        for _ in range(seconds):
            self.sim.pass_s(1)
            for name in beating:
                self.beat(name)

    @precondition(lambda self: self.scripts)
    @rule(data=st.data(), kind=st.sampled_from(["span", "end", "infra", "unknown", "gap", "repeat",
                                                          "foreign", "foreign"]))  # fmt: skip
    def anyone_writes_of_anything_it_was_ever_given(self, data: st.DataObject, kind: str) -> None:
        """Also of what was taken away, has ended, or is closed."""
        script = data.draw(st.sampled_from(list(self.scripts.values())))
        sent = self.sent.setdefault((script.group, script.slot, script.attempt, script.incarnation), [])
        if kind == "repeat":
            if sent:
                self.sim.feed(data.draw(st.sampled_from(sent)))
            return
        if kind == "foreign":  # an incarnation that was never given it takes up where another left off
            stranger = Script(script.group, script.slot, script.attempt, "x0", sequence=script.sequence)
            self.sim.feed(stranger.span(), stranger.ended())
            return
        if script.sequence == 0 and kind != "gap":
            sent.append(script.started())
            self.sim.feed(sent[-1])
        if kind == "gap":
            script.sequence += 1
        if kind in ("span", "gap"):
            sent.append(script.span(salt=1000 * int(script.incarnation[1:]) + script.attempt))
        else:
            outcome = {"infra": Outcome.INFRA_FAILURE, "unknown": Outcome.UNKNOWN}.get(kind)
            sent.append(script.ended(None if outcome else float(script.slot % 2), outcome))
        self.sim.feed(sent[-1])

    @precondition(lambda self: self.sim.held)
    @rule(data=st.data())
    def a_worker_finishes_what_it_has_of_a_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.sim.open))
        for lease, one in [held for held in self.sim.held if held[0].group == group]:
            script = self.scripts[lease.group, one.slot, one.attempt, lease.incarnation]
            self.sim.feed(*([script.started()] if script.sequence == 0 else []), script.span(),
                          script.ended(float(one.slot % 2)))  # fmt: skip
            self.sim.held.remove((lease, one))

    @precondition(lambda self: self.scripts)
    @rule(data=st.data(), times=st.integers(1, 2))
    def slots_are_handed_back(self, data: st.DataObject, times: int) -> None:
        """By whoever was ever given them, also twice or long after."""
        key = data.draw(st.sampled_from(list(self.scripts)))
        number = next(lease.number for lease in self.sim.wrote(Lease) if _names(lease, key))
        for _ in range(times):
            back = HandBack(key[3][0], key[3], key[0], number, (key[1],), "x")
            self.sim.observe("fleet", back)

    @rule(count=st.integers(1, 4))
    def the_coordinator_hears_of_some(self, count: int) -> None:
        self.sim.deliver(count)

    @rule()
    def the_trainer_publishes(self) -> None:
        if self.sim.manifests and self.sim.manifests[-1].batch > self.sim.version:
            self.sim.publish(rho=0.01)

    @rule(in_the_act=st.booleans())
    def the_coordinator_dies(self, in_the_act: bool) -> None:
        if in_the_act:
            self.sim.coordinator.decide(self.sim.now)  # and writes nothing of it
        self.sim.restart()

    # ------------------------------------------------------------------------------------------- what holds

    @invariant()
    def no_slot_waits_for_an_attempt_after_its_end(self) -> None:
        for slot in self.ended_slots():
            assert slot.state.name == "ENDED"

    def ended_slots(self) -> Iterator[Any]:
        """The coordinator's view of the slots of which it has heard that they have ended."""
        heard = len(self.sim.logs["groups"]) - len(self.sim._undelivered)
        for _, event in self.sim.logs["groups"][:heard]:
            if isinstance(event, AttemptEnded) and event.ends_slot:
                if group := self.sim.coordinator.leasing.groups.get(event.group):
                    yield group.slots[event.slot]

    def check(self) -> None:
        self.attempts_are_unique_and_a_slot_ends_once()
        self.two_samplings_are_never_spliced()

    def attempts_are_unique_and_a_slot_ends_once(self) -> None:
        leased = [(lease.group, a.slot, a.attempt) for lease in self.sim.wrote(Lease) for a in lease.assignments]
        assert len(leased) == len(set(leased))
        ended: dict[tuple[str, int], int] = {}
        for event in self.sim.wrote(AttemptEnded) + self.sim.wrote(GroupClosed):
            if isinstance(event, GroupClosed):
                assert all(ended[event.group, fate.slot] == fate.attempt for fate in event.slots)
            elif event.ends_slot:
                assert (event.group, event.slot) not in ended
                ended[event.group, event.slot] = event.attempt

    def two_samplings_are_never_spliced(self) -> None:
        """What a candidate holds of a slot was written by the one incarnation that was leased that attempt."""
        lessee = {(lease.group, a.slot, a.attempt): lease.incarnation
                  for lease in self.sim.wrote(Lease) for a in lease.assignments}  # fmt: skip
        for group, payload in self.sim.payloads.items():
            slots = [episode.slot for episode in payload.episodes]
            assert len(slots) == len(set(slots))
            for episode in payload.episodes:
                assert lessee[group, episode.slot, episode.attempt] == episode.incarnation
                events = [self.sim.trajectories[offset] for offset in episode.offsets]
                assert [getattr(e, "sequence", -1) for e in events] == list(range(len(events)))
                for event in events:
                    assert isinstance(event, EpisodeStarted | Span | EpisodeEnded)
                    assert (event.group, event.slot, event.attempt, event.incarnation) == (
                        group, episode.slot, episode.attempt, episode.incarnation)  # fmt: skip
                assert isinstance(events[-1], EpisodeEnded)

    def teardown(self) -> None:
        """Everyone comes to their senses: then the run goes on."""
        self.sim.delayed = False
        self.sim.restart()
        goal = len(self.sim.manifests) + 2
        for turn in range(400):
            for name in "wv":
                self.beat(name)
            self.sim.pass_s(1)
            self.decide()
            if len(self.sim.manifests) >= goal:
                break
            if self.sim.held:
                self.sim.end(self.sim.held[0], float(turn % 2))
            elif self.sim.manifests and self.sim.manifests[-1].batch > self.sim.version:
                self.sim.publish(rho=0.01)
        else:
            raise AssertionError("the run stands still")
        self.check()


Fleet.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None,
                                   suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
test_any_order_of_losses_hand_backs_zombies_and_restarts = Fleet.TestCase


def _names(lease: Lease, key: tuple[str, int, int, str]) -> bool:
    return (lease.group, lease.incarnation) == (key[0], key[3]) and Assignment(key[1], key[2]) in lease.assignments


# ------------------------------------------------------------------------------------------ one fault each


def started(workers: int = 1, capacity: int = 100, groups: int = 2, max_lag: int = 0, **rollout: Any) -> Sim:
    sim = Sim(run_settings(rollout={"group_size": 2, "max_attempts": 3} | rollout,
                           batch={"groups": groups, "max_lag": max_lag}))  # fmt: skip
    for number in range(workers):
        sim.beat(f"w{number}", capacity=capacity)
    sim.publish()
    sim.decide()
    return sim


def lessees(sim: Sim) -> dict[str, str]:
    return {f"{lease.group}/{one.slot}": lease.incarnation for lease, one in sim.held}


def test_worker_stopped_until_its_lease_went_on_changes_nothing_when_it_wakes() -> None:
    """The same incarnation, after SIGSTOP: it writes on, beats again, and is given new work."""
    sim = started(workers=2, capacity=2, groups=1, lease_timeout_s=5)
    lease, one = sim.held[0]
    stopped = Script(lease.group, one.slot, one.attempt, lease.incarnation)
    sim.feed(stopped.started(), stopped.span(salt=7))
    other = "w1" if lease.worker == "w0" else "w0"
    sim.pass_s(7, other)
    sim.decide()
    assert set(lessees(sim).values()) == {f"{other}0"}
    sim.beat(lease.worker)
    sim.feed(stopped.span(salt=8), stopped.ended(1.0))
    assert not sim.decide() and not sim.wrote(AttemptEnded)
    for i, held in enumerate(list(sim.held)):
        sim.end(held, float(i))
    (payload,) = sim.payloads.values()
    assert [(e.attempt, e.incarnation) for e in payload.episodes] == [(1, f"{other}0")] * 2
    closure = sim.wrote(GroupClosed)[0]
    assert closure.accounts["superseded"] == 8
    sim.decide()
    sim.publish()
    assert sim.decide().tasks, "the one that woke is as good as any other"


def test_lease_handed_back_twice_or_after_the_loss_of_its_worker_ends_once() -> None:
    sim = started(workers=2, capacity=2, groups=1, lease_timeout_s=5)
    lease, _ = sim.held[0]
    back = HandBack(lease.worker, lease.incarnation, lease.group, lease.number, (0, 1), "handed_back")
    for _ in range(2):
        sim.observe("fleet", back)
    ended, again = sim.decide().tasks
    assert isinstance(ended, LeaseEnded) and isinstance(again, Lease) and again.worker != lease.worker
    sim.observe("fleet", back)
    sim.observe("fleet", HandBack("w9", "w90", again.group, again.number, (0, 1), "a stranger's"))
    assert not sim.decide()
    sim.pass_s(7, lease.worker)
    lost, third = sim.decide().tasks
    assert isinstance(lost, LeaseEnded) and (lost.reason, lost.number) == ("worker_lost", again.number)
    sim.observe("fleet", HandBack(again.worker, again.incarnation, again.group, again.number, (0, 1), "handed_back"))
    assert not sim.decide()
    assert isinstance(third, Lease) and [a.attempt for a in third.assignments] == [2, 2]


def test_end_that_crosses_with_the_next_lease_of_its_slot_stands() -> None:
    """Two leases of one slot in flight: the worker was given up while its verdict was on the way."""
    sim = started(workers=2, capacity=2, groups=1, lease_timeout_s=5)
    sim.delayed = True
    first = list(sim.held)
    for i, (lease, one) in enumerate(first):
        sim.feed(*Script(lease.group, one.slot, one.attempt, lease.incarnation).whole(float(i)))
    sim.pass_s(7, "w1" if first[0][0].worker == "w0" else "w0")
    again = [one for one in sim.decide().tasks if isinstance(one, Lease)]
    assert again and again[0].assignments[0].attempt == 1
    sim.deliver()
    sim.decide()
    (payload,) = sim.payloads.values()
    assert {e.incarnation for e in payload.episodes} == {first[0][0].incarnation}
    assert [c.closure for c in sim.wrote(GroupClosed)] == ["candidate"]


def test_reserve_runs_from_the_start_and_stands_in_only_for_one_that_failed() -> None:
    sim = started(groups=1, reserves=1, max_attempts=1)
    group = sim.open[0]
    assert [one.slot for lease, one in sim.held if lease.group == group] == [0, 1, 2]
    by_slot = {one.slot: (lease, one) for lease, one in sim.held if lease.group == group}
    sim.end(by_slot[2], 1.0)
    sim.end(by_slot[0], None, Outcome.INFRA_FAILURE)
    assert not sim.payloads
    sim.end(by_slot[1], 0.0)
    (payload,) = sim.payloads.values()
    assert [e.slot for e in payload.episodes] == [1, 2]


@pytest.mark.parametrize("workers", [1, 3])
def test_task_that_kills_every_worker_ends_and_the_others_go_on(workers: int) -> None:
    """NeMo-RL#3938, prime-rl#2459: bounded attempts, the group is terminal, and nobody else's groups are."""
    sim = started(workers=workers, capacity=6, groups=3, max_lag=1)
    poison, deaths = sim.open[0], 0
    incarnations = dict.fromkeys((f"w{n}" for n in range(workers)), 0)
    for _ in range(200):
        victims = {lease.worker for lease, _ in sim.held if lease.group == poison}
        for name in victims:  # at once, before anything else that it runs is done
            deaths += 1
            incarnations[name] += 1
        for name, number in incarnations.items():
            sim.beat(name, f"{name}{number}", capacity=6)
        sim.decide()
        if not victims:
            for i, held in enumerate(h for h in list(sim.held) if h[0].group != poison):
                sim.end(held, float(i % 2))
        sim.decide()
        if sim.manifests and sim.manifests[-1].batch > sim.version:
            sim.publish()
    fates = {closure.group: closure.closure for closure in sim.wrote(GroupClosed)}
    assert fates[poison] == "too_few_survivors" and set(fates.values()) - {"candidate"} == {"too_few_survivors"}
    assert [name for name, fate in fates.items() if fate != "candidate"] == [poison]
    assert deaths == 3 and sim.version > 3
    assert sim.coordinator.leasing.groups.keys().isdisjoint({poison})


def test_suspect_runs_where_no_other_suspect_does() -> None:
    sim = started(workers=1, capacity=100, groups=3, max_attempts=2)
    sim.beat("w0", "w01")
    sim.decide()
    assert len({lease.group for lease, _ in sim.held}) == 1, "each of the three may have been the one"
    (first,) = {lease.group for lease, _ in sim.held}
    sim.end_group(first)
    sim.decide()
    assert sim.open and first not in sim.open
    sim.beat("w1")
    sim.decide()
    assert len(sim.open) == 2 and len(set(lessees(sim).values())) == 2


def test_lost_attempts_are_counted_from_the_log_after_a_restart() -> None:
    sim = started(workers=1, capacity=100, groups=3, max_attempts=2)
    sim.restart()
    sim.beat("w0")
    sim.decide()
    sim.beat("w0", "w01")
    sim.decide()
    sim.restart()
    sim.beat("w0", "w01")
    sim.decide()
    assert len(sim.open) == 1
    sim.beat("w0", "w02")
    decision = sim.decide()
    assert {one.group for one in exhausted(decision)} == {f"g{0:08d}"}


def test_loss_of_a_workers_earlier_attempt_takes_nothing_from_the_next_one_after_a_restart() -> None:
    """At a start `tasks` are read before `groups`: the lease of the next attempt comes before the end of the last."""
    sim = started(workers=1, capacity=4, groups=1)
    sim.beat("w1", capacity=100)
    sim.end(sim.held[0], None, Outcome.INFRA_FAILURE)
    sim.decide()
    moved = [lease for lease, one in sim.held if one.attempt == 1]
    assert [lease.worker for lease in moved] == ["w1"]
    sim.restart()
    sim.pass_s(20, "w1")
    ended = [one for one in sim.decide().tasks if isinstance(one, LeaseEnded)]
    assert [(one.incarnation, one.slots) for one in ended] == [("w00", (1,))]


def test_pinned_evaluation_takes_no_room_and_is_never_batched() -> None:
    sim = started(groups=1, max_lag=0)
    for _ in range(2):
        sim.end_group(sim.open[0])
        sim.decide()
        sim.publish()
        sim.decide()
    room = sim.coordinator.room
    ask = LeaseRequest("r1", "e", "e0", "chain_sum-0-9", 2, "eval", 1)
    sim.observe("fleet", ask)
    (lease,) = sim.decide().tasks
    assert isinstance(lease, Lease)
    assert (lease.purpose, lease.version, lease.min_version, lease.task.id) == ("eval", 1, 1, "chain_sum-0-9")
    assert sim.coordinator.room == room
    mine: list[Held] = [held for held in sim.held if held[0].number == lease.number]
    for i, held in enumerate(mine):
        sim.end(held, float(i), version=1)
    closure = sim.wrote(GroupClosed)[-1]
    assert (closure.group, closure.closure) == (lease.group, "evaluated")
    sim.decide()
    assert lease.group not in sim.payloads and not sim.coordinator.batching.candidates
    sim.restart()
    assert not sim.coordinator.batching.candidates


def test_lost_slot_of_a_group_that_was_asked_for_waits_for_whoever_asks_next() -> None:
    sim = started(groups=1, max_lag=0)
    sim.observe("fleet", LeaseRequest("r1", "gw", "gw0", "chain_sum-0-9", 2, "eval", None, 3))
    (first,) = sim.decide().tasks
    assert isinstance(first, Lease) and first.spec.max_attempts == 3
    sim.observe("fleet", Heartbeat("gw", "gw1", 0, 0, 0, False, "{}", {}))  # it was started anew
    decision = sim.decide()
    (ended,) = decision.tasks
    assert isinstance(ended, LeaseEnded) and ended.slots == (0, 1) and not decision.trajectories
    sim.restart()
    sim.observe("fleet", LeaseRequest("r2", "sdk", "sdk0", None, None, "eval", None))  # has one attempt: a new group
    sim.observe("fleet", LeaseRequest("r3", "gw", "gw1", None, 1, "eval", None, 3))
    sim.observe("fleet", LeaseRequest("r4", "other", "other0", "chain_sum-0-9", None, "eval", None, 3))
    leases = [one for one in sim.decide().tasks if isinstance(one, Lease) and one.request]
    assert [(one.request, one.group == first.group, one.opens) for one in leases] == [
        ("r2", False, True), ("r3", True, False), ("r4", True, False)]  # fmt: skip
    assert [[(a.slot, a.attempt) for a in one.assignments] for one in leases[1:]] == [[(0, 1)], [(1, 1)]]


@pytest.mark.parametrize("timeout_s", [3, 4, 5, 15])
def test_worker_that_was_away_with_the_broker_has_time_to_be_heard_whoever_writes_first(timeout_s: int) -> None:
    sim = started(workers=2, capacity=2, groups=1, lease_timeout_s=timeout_s)
    sim.now += 60_000
    sim.observe("fleet", FleetTick("c", 0))  # not a worker's
    assert not sim.decide().tasks
    sim.beat("w1")
    assert not sim.decide().tasks
    sim.beat("w0")
    sim.pass_s(timeout_s + 1, "w0", "w1")
    assert not sim.decide().tasks
    sim.pass_s(timeout_s + 1, "w1" if sim.held[0][0].worker == "w0" else "w0")
    assert any(isinstance(one, LeaseEnded) and one.reason == "worker_lost" for one in sim.decide().tasks)
