"""The fold: which attempts, slots and groups end, how, and that no restart changes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.consumers.accounts import Accounts
from headrace.consumers.facts import Fact, Failures, check_chain
from headrace.consumers.index import Index
from headrace.consumers.recount import Recount, by_commit
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import InvalidRecord
from headrace.schemas.events import (
    Addendum,
    AttemptEnded,
    Event,
    Exhausted,
    GroupClosed,
    GroupSpec,
    Heartbeat,
    Position,
    Tick,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Outcome
from headrace.streams.assembler import Closed, Effect, Fold, Refused
from headrace.streams.clock import MAX_STEP_MS
from headrace.streams.log import reader
from headrace.streams.progress import Progress
from tests.scripted import Record, Script, lease, newest_first, record, spec


class Folded:
    """A fold that is fed events; `effects` are all so far."""

    def __init__(self) -> None:
        self.fold, self.offset, self.now = Fold(), 0, 1_000
        self.effects: list[Effect] = []

    def feed(self, *events: Event, after_ms: int = 1) -> list[Effect]:
        out: list[Effect] = []
        for event in events:
            out += self.raw(encode(event), after_ms)
        return out

    def raw(self, value: bytes | None, after_ms: int = 1) -> list[Effect]:
        self.now += after_ms
        effects = self.fold.apply(Record(self.offset, self.now, value))
        self.offset += 1
        self.effects += effects
        return effects

    def pass_s(self, seconds: float) -> list[Effect]:
        """Ticks, one a second."""
        out: list[Effect] = []
        for number in range(math.ceil(seconds)):
            out += self.feed(Tick("t", number), after_ms=1000)
        return out

    @property
    def closures(self) -> list[GroupClosed]:
        return [effect.record for effect in self.effects if isinstance(effect, Closed)]

    @property
    def closure(self) -> GroupClosed:
        (only,) = self.closures
        return only

    def ends(self) -> list[tuple[int, int, str, bool]]:
        return [(e.slot, e.attempt, e.reason, e.ends_slot) for e in self.effects if isinstance(e, AttemptEnded)]

    def addenda(self) -> list[tuple[str, int]]:
        return [(e.kind, e.model_tokens) for e in self.effects if isinstance(e, Addendum)]


def opened(rules: GroupSpec | None = None, **over: Any) -> Folded:
    folded = Folded()
    folded.feed(lease(rules=rules or spec(), **over))
    return folded


# ------------------------------------------------------------------------------------------------------- closures


def test_group_closes_as_candidate_when_each_counted_slot_has_ended() -> None:
    folded = opened()
    folded.feed(*Script(slot=0).whole(1.0))
    assert not folded.closures
    effects = folded.feed(*Script(slot=1).whole(0.0))
    closed = effects[-1]
    assert isinstance(closed, Closed) and closed.payload is not None
    assert folded.closure.closure == "candidate" and folded.closure.accounts == {"candidate": 8}
    assert folded.closure.context_tokens == 6 and folded.closure.held_up_by == 1
    assert [episode.offsets for episode in closed.payload.episodes] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert folded.fold.open_groups == 0


def test_equal_rewards_close_as_zero_variance_or_are_kept_and_flagged() -> None:
    for rule, closure, flagged in (("refill", "zero_variance", None), ("keep", "candidate", "zero_variance")):
        folded = opened(spec(zero_variance=rule))
        folded.feed(*Script(slot=0).whole(0.5), *Script(slot=1).whole(0.5))
        assert (folded.closure.closure, folded.closure.flagged) == (closure, flagged)


def test_single_episode_group_is_a_candidate_without_variance() -> None:
    folded = opened(spec(1))
    folded.feed(*Script().whole(1.0))
    assert folded.closure.closure == "candidate"


@pytest.mark.parametrize(
    ("purpose", "unmanaged", "closure"), [("eval", False, "evaluated"), ("train", True, "unmanaged")]
)
def test_groups_that_never_train_close_by_what_they_are_for(purpose: str, unmanaged: bool, closure: str) -> None:
    folded = opened(purpose=purpose, unmanaged=unmanaged)
    folded.feed(*Script(slot=0).whole(1.0), *Script(slot=1).whole(0.0))
    assert folded.closure.closure == closure
    assert folded.closure.accounts == {"excluded": 8}


def test_sibling_that_never_ends_closes_the_group_at_its_deadline() -> None:
    folded = opened(spec(8, deadline_s=60))
    for slot in range(7):
        folded.feed(*Script(slot=slot).whole(float(slot % 2)))
    folded.pass_s(58)
    assert not folded.closures
    folded.pass_s(3)
    assert folded.closure.closure == "candidate"
    assert [fate.counted for fate in folded.closure.slots] == [True] * 7 + [False]
    assert folded.closure.slots[7].reason == "deadline" and folded.closure.held_up_by == 7
    assert folded.ends()[-1] == (7, 0, "deadline", True)


@pytest.mark.parametrize(
    ("rule", "closure", "at_s"),
    [("survivors", "too_few_survivors", 60), ("cancel", "expired", 60), ("wait", "too_few_survivors", 600)],
)
def test_deadline_acts_by_its_policy(rule: str, closure: str, at_s: int) -> None:
    folded = opened(spec(4, on_deadline=rule, min_survivors=2))
    folded.feed(*Script(slot=0).whole(1.0))
    folded.pass_s(at_s - 2)
    assert not folded.closures
    folded.pass_s(3)
    assert folded.closure.closure == closure
    assert folded.closure.accounts == {"excluded": 4}


def test_slot_open_at_the_deadline_is_the_models_failure_only_if_its_budget_is_spent() -> None:
    folded = opened(spec(3, max_tokens=10))
    folded.feed(*Script(slot=0).whole(1.0))
    for slot, tokens in ((1, 10), (2, 9)):
        script = Script(slot=slot)
        folded.feed(script.started(), script.span(tokens))
    folded.pass_s(61)
    fates = folded.closure.slots
    assert (fates[1].outcome, fates[1].reason, fates[1].reward, fates[1].counted) == (
        "model_failure", "budget_spent", 0.0, True)  # fmt: skip
    assert (fates[2].outcome, fates[2].reason, fates[2].reward) == ("infra_failure", "deadline", None)
    assert folded.closure.accounts == {"candidate": 14, "excluded": 9}


@pytest.mark.parametrize(("budget", "turns"), [
    ({"max_turns": 2}, [{}, {}]),
    ({"model_time_s": 3.0}, [{"model": 2000.0}, {"model": 1000.0}]),
    ({"tool_time_s": 1.5}, [{"environment": 700.0}, {"environment": 900.0}]),
])  # fmt: skip
def test_each_clock_of_the_episode_excuses_nothing_once_it_is_spent(
        budget: dict[str, Any], turns: list[dict[str, float]]) -> None:  # fmt: skip
    """Slot 1 used its budget up; slot 2 only waited, for longer than that, in queues."""
    folded = opened(spec(3, **budget))
    folded.feed(*Script(slot=0).whole(1.0))
    for slot, times in ((1, turns), (2, [*turns[:1], {"queue": 50_000.0, "decode": 50_000.0}])):
        script = Script(slot=slot)
        folded.feed(script.started())
        for turn, timings in enumerate(times):
            last = slot == 2 and turn == 1
            folded.feed(replace(script.span(2), turn=turn, timings_ms=timings, stop_reason=None if last else "stop"))
    folded.pass_s(61)
    assert [(fate.outcome, fate.reason) for fate in folded.closure.slots[1:]] == [
        ("model_failure", "budget_spent"), ("infra_failure", "deadline")]  # fmt: skip


def test_outage_of_the_log_expires_nothing() -> None:
    folded = opened(spec(deadline_s=60))
    folded.feed(Tick("t", 0), after_ms=12 * 3600 * 1000)
    assert folded.fold.open_groups == 1 and folded.fold.clock.now_ms == MAX_STEP_MS
    folded.feed(Tick("t", 1), after_ms=-3_600_000)
    assert folded.fold.clock.now_ms == MAX_STEP_MS


def test_event_that_arrives_with_the_deadline_still_counts() -> None:
    folded = opened(spec(deadline_s=4))
    folded.feed(*Script(slot=0).whole(1.0))
    *rest, end = Script(slot=1).whole(0.0)
    folded.feed(*rest)
    folded.feed(end, after_ms=5000)
    assert folded.closure.closure == "candidate" and folded.closure.slots[1].reason == "stop"


# ------------------------------------------------------------------------------------------------------- reserves


def test_counted_slots_are_chosen_by_number_not_by_who_was_faster() -> None:
    folded = opened(spec(2, reserves=2))
    for slot in (3, 2):  # the reserves are first
        folded.feed(*Script(slot=slot).whole(1.0))
    folded.feed(*Script(slot=1).whole(0.0))
    assert not folded.closures
    folded.feed(*Script(slot=0).whole(1.0))
    assert [fate.counted for fate in folded.closure.slots] == [True, True, False, False]
    assert folded.closure.accounts == {"candidate": 8, "surplus": 8}


def test_reserve_stands_in_for_an_infrastructure_failure_only() -> None:
    folded = opened(spec(2, reserves=1, max_attempts=1))
    folded.feed(*Script(slot=2).whole(1.0), *Script(slot=1).whole(0.0))
    folded.feed(*Script(slot=0).whole(None, Outcome.INFRA_FAILURE))
    assert [fate.counted for fate in folded.closure.slots] == [False, True, True]
    assert folded.closure.accounts == {"candidate": 8, "excluded": 4}


def test_reserve_still_running_at_the_closure_ends_with_it() -> None:
    folded = opened(spec(2, reserves=1))
    script = Script(slot=2)
    folded.feed(script.started(), script.span(5))
    folded.feed(*Script(slot=0).whole(1.0), *Script(slot=1).whole(0.0))
    assert folded.closure.slots[2].reason == "surplus" and folded.closure.accounts == {"candidate": 8, "excluded": 5}
    folded.feed(script.span(2))
    assert folded.addenda() == [("late", 2)]


# ------------------------------------------------------------------------------------------------------- attempts


def test_failed_attempt_with_attempts_left_ends_no_slot_and_its_successor_counts() -> None:
    folded = opened()
    folded.feed(*Script(slot=0).whole(None, Outcome.INFRA_FAILURE), *Script(slot=1).whole(0.0))
    assert folded.ends() == [(0, 0, "stop", False), (1, 0, "stop", True)] and not folded.closures
    folded.feed(lease(assignments={0: 1}, opens=False, incarnation="w1"))
    folded.feed(*Script(slot=0, attempt=1, incarnation="w1").whole(1.0))
    assert folded.closure.slots[0].attempt == 1
    assert folded.closure.accounts == {"candidate": 8, "superseded": 4}


def test_always_failing_task_is_tried_a_bounded_number_of_times_and_its_group_ends() -> None:
    folded = opened(spec(max_attempts=3))
    folded.feed(*Script(slot=1).whole(1.0))
    for attempt in range(3):
        if attempt:
            folded.feed(lease(assignments={0: attempt}, opens=False))
        folded.feed(*Script(slot=0, attempt=attempt).whole(None, Outcome.INFRA_FAILURE))
    assert folded.closure.closure == "zero_variance"  # one survivor, which is enough here, has nothing to differ from
    assert [ends for *_, ends in folded.ends()] == [True, False, False, True]


def test_unknown_is_no_refuge_when_no_fault_of_ours_is_recorded() -> None:
    folded = opened(spec(max_attempts=2))
    folded.feed(*Script(slot=1).whole(1.0), *Script(slot=0).whole(None, Outcome.UNKNOWN))
    folded.feed(lease(assignments={0: 1}, opens=False))
    folded.feed(*Script(slot=0, attempt=1).whole(None, Outcome.UNKNOWN))
    fate = folded.closure.slots[0]
    assert (fate.outcome, fate.reason, fate.reward, fate.counted) == ("model_failure", "attempts_exhausted", 0.0, True)


def test_unknown_after_a_lost_worker_never_trains() -> None:
    folded = opened(spec(max_attempts=2))
    folded.feed(*Script(slot=1).whole(1.0), Script(slot=0).started())
    folded.feed(lease(assignments={0: 1}, opens=False, incarnation="w1"))  # the first attempt's worker was lost
    folded.feed(*Script(slot=0, attempt=1, incarnation="w1").whole(None, Outcome.UNKNOWN))
    assert (folded.closure.slots[0].outcome, folded.closure.slots[0].counted) == ("unknown", False)


def test_trainable_outcome_without_a_reward_is_the_scorers_failure() -> None:
    for reward in (None, math.nan, math.inf):
        folded = opened(spec(max_attempts=1))
        folded.feed(*Script(slot=0).whole(reward, Outcome.MODEL_FAILURE))
        (end,) = [e for e in folded.effects if isinstance(e, AttemptEnded)]
        assert (end.outcome, end.reason, end.boundary, end.reward) == (
            "infra_failure", "scorer_failed", "scorer", None)  # fmt: skip


def test_exhausted_ends_the_slot_of_a_lost_worker() -> None:
    folded = opened(spec(max_attempts=1))
    folded.feed(*Script(slot=1).whole(1.0), Exhausted("g", 0, 0, "worker_lost"))
    assert folded.ends()[-1] == (0, 0, "worker_lost", True)
    assert folded.closure.closure == "zero_variance"


def test_lease_after_the_slots_end_changes_nothing() -> None:
    folded = opened()
    folded.feed(*Script(slot=0).whole(1.0))
    folded.feed(lease(assignments={0: 1}, opens=False, incarnation="w1"), Exhausted("g", 0, 1, "worker_lost"))
    folded.feed(*Script(slot=0, attempt=1, incarnation="w1").whole(0.0))
    folded.feed(*Script(slot=1).whole(0.0))
    assert folded.closure.slots[0].attempt == 0 and folded.closure.slots[0].reward == 1.0
    assert folded.closure.accounts == {"candidate": 8, "superseded": 4} and folded.addenda() == []


def test_zombie_of_a_superseded_attempt_changes_nothing() -> None:
    folded = opened()
    zombie = Script(slot=0)
    folded.feed(zombie.started(), zombie.span(3))
    folded.feed(lease(assignments={0: 1}, opens=False, incarnation="w1"))
    folded.feed(zombie.span(2), zombie.ended(1.0), *Script(slot=1).whole(1.0))
    assert not folded.closures
    folded.feed(*Script(slot=0, attempt=1, incarnation="w1").whole(0.0))
    assert folded.closure.accounts == {"candidate": 8, "superseded": 5}


# ------------------------------------------------------------------------------------------- broken streams of events


def test_equal_repeat_is_dropped_and_counted() -> None:
    folded = opened()
    script = Script(slot=0)
    events = list(script.whole(1.0))
    folded.feed(events[0], events[1], events[2], events[2], events[3], events[3], *Script(slot=1).whole(0.0))
    assert folded.addenda() == [("duplicate", 4), ("duplicate", 0)]
    assert folded.closure.closure == "candidate" and folded.closure.accounts == {"candidate": 8}


def test_repeat_with_other_content_is_a_dead_letter_and_ends_the_attempt() -> None:
    folded = opened()
    script = Script(slot=0)
    folded.feed(script.started(), first := script.span(4))
    effects = folded.feed(replace(first, tokens=first.tokens[::-1]))
    assert [type(effect) for effect in effects] == [Addendum, Refused, AttemptEnded]
    assert folded.ends() == [(0, 0, "conflicting_repeat", False)]


def test_conflicting_repeat_after_the_slots_end_is_only_counted() -> None:
    folded = opened()
    script = Script(slot=0)
    events = list(script.whole(1.0))
    folded.feed(*events)
    effects = folded.feed(replace(script.ended(0.0), sequence=3))
    assert folded.addenda() == [("conflict", 0)] and len(effects) == 1
    folded.feed(*Script(slot=1).whole(0.0))
    assert folded.closure.slots[0].reward == 1.0


def test_gap_is_an_infrastructure_failure_at_once() -> None:
    folded = opened()
    script = Script(slot=0)
    folded.feed(script.started())
    script.span()
    folded.feed(late := script.span(7))
    assert folded.ends() == [(0, 0, "sequence_gap", False)]
    folded.feed(late)
    assert folded.addenda() == [("duplicate", 7)]


def test_incarnation_that_no_lease_named_is_foreign() -> None:
    folded = opened()
    folded.feed(*Script(slot=0, incarnation="stranger").whole(1.0), *Script(slot=7).whole(1.0))
    folded.feed(*Script(slot=0, attempt=1).whole(1.0))
    assert folded.addenda() == [("foreign", 0), ("foreign", 0), ("foreign", 4), ("foreign", 0)] * 3
    assert not folded.closures


def test_record_of_a_group_that_is_not_open_is_late_and_opens_nothing() -> None:
    folded = Folded()
    folded.feed(*Script().whole(1.0), lease(opens=False))
    assert folded.addenda() == [("late", 0), ("late", 0), ("late", 4), ("late", 0)]
    assert folded.fold.open_groups == 0


def test_events_after_an_attempts_own_end_are_late_and_not_in_its_account() -> None:
    folded = opened()
    script = Script(slot=0)
    folded.feed(*script.whole(1.0), script.span(9), *Script(slot=1).whole(0.0))
    assert folded.addenda() == [("late", 9)] and folded.closure.accounts == {"candidate": 8}


@pytest.mark.parametrize("value", [None, b"", b"garbage", encode(Heartbeat("w", "i", 0, 1, 1, True, "", {}))])
def test_garbage_goes_to_the_dead_letters_and_the_partition_goes_on(value: bytes | None) -> None:
    folded = opened()
    folded.feed(*Script(slot=0).whole(1.0))
    (refused,) = folded.raw(value)
    assert isinstance(refused, Refused) and refused.cause == 5
    folded.feed(*Script(slot=1).whole(0.0))
    assert folded.closure.closure == "candidate"


def test_model_tokens_without_logprobs_are_refused_at_ingest() -> None:
    folded = opened()
    script = Script(slot=0)
    folded.feed(script.started())
    (refused,) = folded.feed(replace(script.span(4), logprobs=None))
    assert isinstance(refused, Refused) and "logprob" in refused.reason
    folded.feed(script.ended())
    assert folded.ends() == [(0, 0, "sequence_gap", False)]


@pytest.mark.parametrize("first", ["span", "ended"])
def test_attempt_that_did_not_start_is_invalid(first: str) -> None:
    folded = opened()
    folded.feed(getattr(Script(slot=0), first)())
    assert folded.ends() == [(0, 0, "invalid_event", False)]


def test_attempt_may_fail_before_it_started() -> None:
    folded = opened()
    folded.feed(Script(slot=0).ended(None, Outcome.INFRA_FAILURE, "prompt_too_long"))
    assert folded.ends() == [(0, 0, "prompt_too_long", False)]


# ------------------------------------------------------------------------------------------------------- restarts

GROUPS_IN_PLAY = ("a", "b", "c")
STEPS_MS = (0, 1, 400, 3000, 9000)
RULES = [
    spec(2, deadline_s=20.0),
    spec(2, reserves=1, max_attempts=2, deadline_s=12.0, min_survivors=1, max_tokens=6),
    spec(1, max_attempts=1, deadline_s=8.0, on_deadline="cancel"),
    spec(2, deadline_s=5.0, max_age_s=15.0, on_deadline="wait", zero_variance="keep", max_attempts=3),
]
OUTCOMES = [(1.0, None), (0.0, None), (None, Outcome.INFRA_FAILURE), (None, Outcome.UNKNOWN),
            (None, Outcome.MODEL_FAILURE)]  # fmt: skip

_moves = st.lists(
    st.tuples(
        st.sampled_from(["event"] * 8 + ["end"] * 4 + ["lease"] * 2 + ["repeat", "conflict", "skip", "foreign", "tick",
                                                                     "garbage", "exhausted"]),
        st.integers(0, 2),  # group
        st.integers(0, 2),  # slot
        st.integers(0, 2),  # attempt
        st.sampled_from(STEPS_MS),
        st.integers(0, 4),  # outcome or rules
    ),
    min_size=20, max_size=120,
)  # fmt: skip


def world(moves: Sequence[tuple[str, int, int, int, int, int]]) -> list[reader.Record]:
    """Siblings' events of three groups in any interleaving, with duplicates, gaps, foreign and late events, retries,
    ticks and garbage. Groups open once; offsets have gaps, as markers of transactions leave them."""
    out: list[reader.Record] = []
    scripts: dict[tuple[int, int, int, str], Script] = {}
    unopened = set(range(3))
    now, ticks = 1000, 0

    def put(value: bytes | None) -> None:
        offset = out[-1].offset + 1 + len(out) % 3 // 2 if out else 4
        out.append(reader.Record("trajectories", 0, offset, now, None, value))

    for kind, g, slot, attempt, step, choice in moves:
        now += step
        name, incarnation = GROUPS_IN_PLAY[g], f"w{attempt}"
        if kind == "tick":
            ticks += 1
            put(encode(Tick("t", ticks)))
            continue
        if kind == "garbage":
            put(b"\xc3\x01garbage")
            continue
        if g in unopened:  # whatever comes first: late, unless it opens the group
            if kind in ("event", "lease"):
                unopened.discard(g)
                rules = RULES[choice % len(RULES)]
                some = {s: 0 for s in range(rules.slots) if kind == "event" or s != slot}
                put(encode(lease(name, some, rules=rules)))
                continue
        if kind == "lease":
            put(encode(lease(name, {slot: attempt}, opens=False, incarnation=incarnation)))
            continue
        if kind == "exhausted":
            put(encode(Exhausted(name, slot, attempt, "worker_lost")))
            continue
        if kind == "foreign":
            incarnation = "stranger"
        key = (g, slot, attempt, incarnation)
        script = scripts.setdefault(key, Script(name, slot, attempt, incarnation))
        if kind == "skip":
            script.sequence += 1
        elif kind in ("repeat", "conflict") and script.sequence:
            script.sequence -= 1
            put(encode(script.span(2, salt=0 if kind == "repeat" else 7)))
        elif kind == "end":
            put(encode(script.ended(*OUTCOMES[choice])))
        else:
            put(encode(script.started() if script.sequence == 0 else script.span(2)))
    return out


@dataclass
class Logged:
    """What a sequence of processes has committed: values of `groups`, and inputs that went to `deadletter`."""

    groups: list[bytes] = field(default_factory=list)
    letters: list[int] = field(default_factory=list)

    def process(self, records: Sequence[reader.Record], commits: Iterable[int], until: int) -> None:
        """One process: recovers, reads up to record number `until` and dies, having committed after some."""
        progress = Progress.recover(newest_first(self.groups))
        fold, commits = Fold(progress.clock), set(commits)
        for i, one in enumerate(records[:until]):
            if one.offset < progress.read_from:
                continue
            progress.take(one, fold.apply(one))
            if i in commits and progress.replayed:
                self.commit(progress, fold)

    def commit(self, progress: Progress, fold: Fold) -> None:
        chain, out = progress.commit(fold, lambda closed: closed.record)
        self.groups += [value for _, value in out]
        self.letters += [effect.cause for effect in progress.pending if isinstance(effect, Refused)]
        progress.committed(chain)

    def facts(self) -> list[Fact[Any]]:
        return [Fact("groups", 0, i, 0, digest(value), decode(value)) for i, value in enumerate(self.groups)]

    def said(self) -> list[Event]:
        """Everything but positions, without the place in the chain."""
        return [replace(fact.event, number=0, previous=b"") for fact in self.facts()
                if not isinstance(fact.event, Position)]  # fmt: skip


def on_the_log(events: Iterable[Event]) -> list[reader.Record]:
    return [reader.Record("t", 0, i, i, None, encode(event)) for i, event in enumerate(events)]


def undisturbed(records: Sequence[reader.Record]) -> Logged:
    log = Logged()
    log.process(records, [len(records) - 1], len(records))
    return log


@settings(max_examples=150, deadline=None)
@given(_moves, st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6), st.sets(st.integers(0, 119)))
def test_no_restart_changes_what_is_decided_or_says_it_twice(
    moves: list[tuple[str, int, int, int, int, int]], deaths: list[tuple[float, float]], commits: set[int]
) -> None:
    records = world(moves)
    if not records:
        return
    calm, log = undisturbed(records), Logged()
    for at, _ in sorted(deaths):
        log.process(records, commits, round(at * len(records)))
    log.process(records, commits | {len(records) - 1}, len(records))
    assert log.said() == calm.said()
    assert log.letters == calm.letters
    failures = Failures()
    check_chain(log.facts(), failures)
    # The ledger's own count of the raw events, which knows nothing of the fold, agrees with all of it.
    with Index() as index:
        recount = Recount(0, 0, iter(records), index, Accounts(), failures, letters=False)
        for commit in by_commit(log.facts()):
            for closed in commit.closures:
                index.add_closure(closed)
            recount.commit(commit)
        recount.finish()
    assert failures.lines == []


@settings(max_examples=100, deadline=None)
@given(_moves)
def test_each_slot_ends_once_before_its_closure_and_each_group_closes_once(
    moves: list[tuple[str, int, int, int, int, int]],
) -> None:
    said = undisturbed(world(moves)).said() if world(moves) else []
    ended, closed = set(), set()
    for event in said:
        if isinstance(event, AttemptEnded) and event.ends_slot:
            assert (event.group, event.slot) not in ended and event.group not in closed
            ended.add((event.group, event.slot))
        if isinstance(event, GroupClosed):
            assert event.group not in closed
            closed.add(event.group)
            assert {(event.group, fate.slot) for fate in event.slots} <= ended
            assert all(Outcome(fate.outcome).trainable for fate in event.slots if fate.counted)


def test_group_that_closed_between_mark_and_position_is_not_late_after_a_restart() -> None:
    """`b` opens before the mark is set by `a`, and closes after: a replay from the mark knows nothing of `b`."""
    rules = spec(1, max_attempts=1)
    b = list(Script("b").whole(1.0))
    events: list[Event] = [lease("x", rules=rules), lease("b", rules=rules), *Script("x").whole(1.0),
                           lease("a", rules=rules), *b]  # fmt: skip
    records = on_the_log(events)
    log = undisturbed(records)
    more = [*records, reader.Record("t", 0, len(records), 99, None, encode(Tick("t", 0)))]
    log.process(more, [len(more) - 1], len(more))
    assert not [event for event in log.said() if isinstance(event, Addendum)]


@pytest.mark.parametrize("stray", [b"", b"garbage", encode(Tick("t", 0)), encode(lease())])
def test_what_else_lies_in_groups_changes_nothing_for_the_next_process(stray: bytes) -> None:
    log = undisturbed(on_the_log([lease(rules=spec(1)), *Script().whole(1.0)]))
    clean = Progress.recover(newest_first(log.groups))
    for place in range(len(log.groups) + 1):
        assert Progress.recover(newest_first([*log.groups[:place], stray, *log.groups[place:]])) == clean


@pytest.mark.parametrize("damage", ["lost", "altered", "repeated"])
def test_damage_between_the_marks_is_refused_by_address_and_never_said_twice(damage: str) -> None:
    """The closure of `b` is on the log; `a` is open since before, so that a restart reads back to that."""
    rules = spec(1, max_attempts=1)
    events = [lease("a", rules=rules), lease("b", rules=rules), *Script("b").whole(1.0)]
    groups = undisturbed(on_the_log(events)).groups
    assert len(groups) == 3  # the attempt's end, the closure, the position
    for place in range(2):
        damaged = list(groups)
        if damage == "lost":
            del damaged[place]
        elif damage == "altered":
            damaged[place] = damaged[place][:-1] + bytes([damaged[place][-1] ^ 1])
        else:
            damaged.insert(place, damaged[place])
        with pytest.raises(InvalidRecord, match=r"groups\[0\]@\d: record number \d stands here"):
            Progress.recover(newest_first(damaged))


def test_decoded_event_may_be_passed_in_to_spare_a_second_decoding() -> None:
    one, two = Fold(), Fold()
    for i, event in enumerate([lease(rules=spec(1)), *Script().whole(1.0)]):
        assert one.apply(record(i, event)) == two.apply(record(i, event), event)
