"""What no restart, interleaving, clock or lack of memory may change: properties of the fold and of its progress.

A *story* is a partition of `trajectories`: groups under any rules, their siblings' events in any interleaving, with
duplicates, conflicts, gaps, invalid, foreign and late events, retries, exhausted slots, garbage and ticks. It is told
once without a disturbance, and again with one; what is on the log in the end has to be the same.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import pack_float32
from headrace.schemas.errors import RecordError
from headrace.schemas.events import (
    Addendum,
    AttemptEnded,
    Event,
    Exhausted,
    GroupClosed,
    GroupSpec,
    Lease,
    Position,
    Span,
    Tick,
)
from headrace.schemas.outcomes import Outcome, Source
from headrace.schemas.payload import content_hash
from headrace.streams.assembler import Closed, Fold, Refused, read_event
from headrace.streams.clock import MAX_SKEW_MS, MAX_STEP_MS, LogClock
from headrace.streams.kept import Budget, KeptSpans
from headrace.streams.log.reader import Record
from headrace.streams.progress import Progress
from tests.reference_fold import Closure, reference_closures
from tests.scripted import Script, lease, newest_first, spec

# -------------------------------------------------------------------------------------------------------- stories

GROUPS = ("a", "b", "c", "d")
KINDS = (
    ["event"] * 6 + ["end"] * 4 + ["whole"] * 6 + ["lease"] * 3
    + ["repeat", "conflict", "skip", "invalid", "early", "foreign", "exhausted", "garbage", "tick", "wait"]
)  # fmt: skip
STEPS_MS = (0, 1, 300, 1500, 4000)
ENDS: list[tuple[float | None, Outcome | None]] = [
    (1.0, None), (0.0, None), (1.0, None), (0.5, None), (None, Outcome.INFRA_FAILURE), (None, Outcome.UNKNOWN),
    (None, Outcome.MODEL_FAILURE), (float("nan"), Outcome.MODEL_SUCCESS),
]  # fmt: skip


# (max_tokens, max_turns, model_time_s, tool_time_s)
BUDGETS = [(4, None, None, None), (64, None, None, None), (64, 2, None, None), (64, 3, 0.5, None),
           (64, None, None, 0.3)]  # fmt: skip
BUDGETS_BY_NAME = [dict(zip(("max_tokens", "max_turns", "model_time_s", "tool_time_s"), one, strict=True))
                   for one in BUDGETS]  # fmt: skip
BROKEN = pack_float32(np.array([np.nan, 1.0], np.float32))


@dataclass(frozen=True)
class Rules:
    spec: GroupSpec
    purpose: str = "train"
    unmanaged: bool = False


@dataclass(frozen=True)
class Move:
    kind: str
    group: int
    slot: int
    attempt: int  # 0: the one that was leased last, 1: the one after, 2: the one before
    step_ms: int
    choice: int


def timed(span: Span, choice: int) -> Span:
    """A turn of its own, with the time that it took its side."""
    step = "model" if span.source == Source.MODEL else "environment"
    return replace(span, turn=span.sequence // 2, timings_ms={step: 200.0 * choice, "queue": 9000.0},
                   stop_reason="stop" if choice % 2 else None)  # fmt: skip


def shifted(records: Sequence[Record], by_ms: Iterable[int]) -> list[Record]:
    """The same records with other timestamps."""
    return [replace(record, timestamp_ms=record.timestamp_ms + by) for record, by in zip(records, by_ms, strict=True)]


_specs = st.builds(
    lambda size, reserves, attempts, survivors, deadline, policy, zero, tokens: spec(
        size, reserves=reserves, max_attempts=attempts, min_survivors=min(size, survivors), deadline_s=deadline,
        max_age_s=2.5 * deadline, on_deadline=policy, zero_variance=zero, max_tokens=tokens[0], max_turns=tokens[1],
        model_time_s=tokens[2], tool_time_s=tokens[3],
    ),
    st.integers(1, 3), st.integers(0, 1), st.integers(1, 3), st.integers(0, 3), st.sampled_from([6.0, 15.0, 40.0]),
    st.sampled_from(["survivors", "cancel", "wait"]), st.sampled_from(["refill", "keep"]),
    st.sampled_from(BUDGETS),
)  # fmt: skip
_rules = st.builds(Rules, _specs, st.sampled_from(["train", "train", "train", "eval"]),
                   st.sampled_from([False, False, False, True]))  # fmt: skip
_moves = st.lists(
    st.builds(Move, st.sampled_from(KINDS), st.integers(0, len(GROUPS) - 1), st.integers(0, 9),
              st.sampled_from([0] * 8 + [1, 2]), st.sampled_from(STEPS_MS), st.integers(0, len(ENDS) - 1)),
    min_size=10, max_size=60,
)  # fmt: skip


def told(rules: Sequence[Rules], moves: Sequence[Move]) -> list[Record]:
    """The records of a story. Groups open once, by the first event or lease that is moved for them; what comes for
    them before is late. Offsets have gaps, as markers of transactions leave them."""
    out: list[Record] = []
    scripts: dict[tuple[int, int, int, str], Script] = {}
    newest: dict[tuple[int, int], int] = {}  # attempt by group and slot
    unopened = set(range(len(GROUPS)))
    now, ticks = 100_000, itertools.count()

    def put(value: Event | bytes) -> None:
        offset = out[-1].offset + 1 + len(out) % 3 // 2 if out else 4
        out.append(Record("trajectories", 0, offset, now, None, value if isinstance(value, bytes) else encode(value)))

    for move in moves:
        now += move.step_ms
        name, own = GROUPS[move.group], rules[move.group]
        slot = move.slot % own.spec.slots if move.slot < 9 else own.spec.slots  # one beyond the last: foreign
        last = newest.get((move.group, slot), 0)
        attempt = max(0, last + (0, 1, -1)[move.attempt])
        incarnation = f"w{attempt}"
        script = scripts.setdefault((move.group, slot, attempt, incarnation), Script(name, slot, attempt, incarnation))
        if move.kind == "tick":
            put(Tick("t", next(ticks)))
        elif move.kind == "wait":
            for _ in range(2 * (1 + move.choice)):
                now += 1000
                put(Tick("t", next(ticks)))
        elif move.kind == "garbage":
            put(b"\xc3\x01garbage")
        elif move.group in unopened and move.kind in ("event", "whole", "lease"):
            unopened.discard(move.group)
            some = {s: 0 for s in range(own.spec.slots) if move.kind != "lease" or s != slot}
            put(lease(name, some, rules=own.spec, purpose=own.purpose, unmanaged=own.unmanaged))
        elif move.kind == "lease":  # a retry, after an end or a hand-back; or one that comes too late
            attempt = last + 1 if move.attempt < 2 else max(0, last - 1)
            newest[move.group, slot] = max(last, attempt)
            put(lease(name, {slot: attempt}, opens=False, incarnation=f"w{attempt}"))
        elif move.kind == "exhausted":
            put(Exhausted(name, slot, attempt, "worker_lost"))
        elif move.kind == "foreign":
            put(Script(name, slot, attempt, "stranger").span(3))
        elif move.kind == "whole":
            if script.sequence == 0:
                put(script.started())
                put(script.span(3, Source.PROMPT))
            put(script.span(2 + move.choice))
            put(script.ended(*ENDS[move.choice]))
        elif move.kind == "invalid":
            put(replace(script.span(2), logprobs=None if move.choice % 2 else BROKEN))
        elif move.kind == "early" and script.sequence == 0:
            put(script.span(2))
        elif move.kind in ("repeat", "conflict"):
            while script.sequence < 2:
                put(script.span(2) if script.sequence else script.started())
            script.sequence -= 1
            put(script.span(2, salt=0 if move.kind == "repeat" else 7))
        elif move.kind == "end":
            put(script.ended(*ENDS[move.choice]))
        else:
            if move.kind == "skip":
                script.sequence += 1
            source = Source.ENVIRONMENT if move.choice == 3 else Source.MODEL
            put(script.started() if script.sequence == 0 else timed(script.span(2, source), move.choice))
    return out


_stories = st.builds(told, st.lists(_rules, min_size=len(GROUPS), max_size=len(GROUPS)), _moves)


def drawn(seed: int) -> list[Record]:
    """A story from the same alphabet, by seed. Half of them calm enough for groups to survive."""
    draw = random.Random(seed)
    rules = []
    for _ in GROUPS:
        size = draw.choice([1, 2, 2, 3])
        rules.append(Rules(
            spec(size, reserves=draw.choice([0, 1]), max_attempts=draw.choice([1, 2, 3]),
                 min_survivors=draw.randrange(size + 1), deadline_s=(deadline := draw.choice([6.0, 15.0, 40.0])),
                 max_age_s=2.5 * deadline, on_deadline=draw.choice(["survivors", "cancel", "wait"]),
                 zero_variance=draw.choice(["refill", "keep"]), **draw.choice(BUDGETS_BY_NAME)),
            draw.choice(["train"] * 6 + ["eval"]), draw.random() < 0.1))  # fmt: skip
    calm = seed % 2
    kinds = ["event"] * 4 + ["whole"] * 8 + ["lease", "repeat", "tick"] if calm else KINDS
    ends = range(4) if calm else range(len(ENDS))
    moves = [
        Move(draw.choice(kinds), draw.randrange(len(GROUPS)), draw.randrange(10),
             draw.choice([0] if calm else [0] * 8 + [1, 2]), draw.choice(STEPS_MS), draw.choice(ends))
        for _ in range(draw.randrange(20, 90))
    ]  # fmt: skip
    return told(rules, moves)


# ------------------------------------------------------------------------------------------------------ assemblers


@dataclass
class Log:
    """What assemblers have committed: values of `groups`, and the offsets of what went to `deadletter`."""

    groups: list[bytes] = field(default_factory=list)
    letters: list[int] = field(default_factory=list)

    def said(self) -> list[Event]:
        """All but the positions, without the place in the chain."""
        events: list[Event] = []
        for value in self.groups:
            event: Event = decode(value)
            if isinstance(event, AttemptEnded | GroupClosed | Addendum):
                events.append(replace(event, number=0, previous=b""))
            else:
                assert isinstance(event, Position)
        return events

    def upto(self, commit: tuple[int, int]) -> Log:
        return Log(self.groups[: commit[0]], self.letters[: commit[1]])


class Assembler:
    """The loop without Kafka: recovers from what is committed, folds, keeps spans under a budget, and commits."""

    def __init__(self, log: Log, records: Sequence[Record], memory: int = 1 << 20) -> None:
        self.log, self.records = log, records
        self.progress = Progress.recover(newest_first(log.groups))
        self.fold = Fold(self.progress.clock)
        by_offset = {record.offset: record for record in records}
        self.again: list[int] = []

        def read_again(offsets: Collection[int]) -> dict[int, Event | RecordError]:
            self.again += offsets
            return {offset: read_event(by_offset[offset].value) for offset in offsets}

        self.budget = Budget(memory)
        self.spans = KeptSpans(self.budget, read_again)
        self.hashes: dict[str, bytes] = {}

    def take(self, record: Record) -> None:
        if record.offset < self.progress.read_from:
            return
        event = read_event(record.value)
        effects = self.fold.apply(record, event)
        self.progress.take(record, effects)
        if isinstance(event, Span) and not any(isinstance(effect, Addendum) for effect in effects):
            self.spans.keep(event, record)
        for effect in effects:
            if isinstance(effect, Closed):
                if effect.payload is not None:
                    self.hashes[effect.record.group] = content_hash(self.spans.fill(effect.payload))
                self.spans.drop(effect.record.group)

    def commit(self) -> None:
        if not self.progress.replayed:
            return
        chain, out = self.progress.commit(
            self.fold, lambda closed: replace(closed.record, content_hash=self.hashes.get(closed.record.group))
        )
        self.log.groups += [value for _, value in out]
        self.log.letters += [effect.cause for effect in self.progress.pending if isinstance(effect, Refused)]
        self.progress.committed(chain)


def assembled(records: Sequence[Record], log: Log | None = None, memory: int = 1 << 20) -> Log:
    """Everything, by one assembler that goes on from `log` and commits at the end."""
    log = log or Log()
    assembler = Assembler(log, records, memory)
    for record in records:
        assembler.take(record)
    assembler.commit()
    return log


def closures(log: Log) -> dict[str, Closure]:
    return {e.group: Closure(e.closure, e.cause, e.content_hash) for e in log.said() if isinstance(e, GroupClosed)}


def check_every_restart(records: Sequence[Record], commit_every: int) -> None:
    """An assembler that dies after any record, having committed after every nth, is followed by one that ends in what
    an undisturbed one says: nothing twice, nothing missing, nothing else."""
    calm = assembled(records)
    said, letters = calm.said(), calm.letters
    log, commits = Log(), [(0, 0)]
    first = Assembler(log, records)
    for i, record in enumerate(records):
        first.take(record)
        if (i + 1) % commit_every == 0:
            first.commit()
            commits.append((len(log.groups), len(log.letters)))
    # Where between two commits it dies makes no difference to what is on the log, so each commit stands for all.
    for commit in commits:
        after = assembled(records, log.upto(commit))
        assert after.said() == said
        assert after.letters == letters


# ------------------------------------------------------------------------------------------------------- restarts


@settings(max_examples=40, deadline=None)
@given(_stories, st.sampled_from([1, 2, 5]))
def test_a_restart_at_any_record_changes_nothing_that_is_decided(records: list[Record], commit_every: int) -> None:
    check_every_restart(records, commit_every)
    for said in assembled(records).said():
        event(type(said).__name__ + getattr(said, "closure", "") + getattr(said, "kind", ""))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(_stories, st.sampled_from([1, 2, 5]))
def test_a_restart_at_any_record_changes_nothing_over_many_stories(records: list[Record], commit_every: int) -> None:
    check_every_restart(records, commit_every)


@settings(max_examples=60, deadline=None)
@given(_stories, st.lists(st.integers(0, 200), max_size=8), st.integers(1, 6))
def test_any_number_of_deaths_changes_nothing(records: list[Record], deaths: list[int], commit_every: int) -> None:
    log = Log()
    for death in deaths:
        assembler = Assembler(log, records)
        for i, record in enumerate(records[:death]):
            assembler.take(record)
            if i % commit_every == 0:
                assembler.commit()
    calm = assembled(records)
    assert assembled(records, log).said() == calm.said() and log.letters == calm.letters


@pytest.mark.slow
def test_the_drawn_stories_reach_every_kind_of_effect_and_no_restart_changes_one() -> None:
    """Over a fixed set of seeds; the same alphabet as the stories above."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        records = drawn(seed)
        if seed < 20:
            check_every_restart(records, 1)
        log = assembled(records)
        assert closures(log) == reference_closures(records), f"seed {seed}"
        seen["refused"] += len(log.letters)
        for said in log.said():
            if isinstance(said, GroupClosed):
                seen[f"closed as {said.closure}"] += 1
                seen["flagged"] += said.flagged is not None
                seen["one sibling"] += said.closure == "candidate" and len(said.slots) == 1
                counted = [fate.counted for fate in said.slots]
                seen["a reserve stands in"] += said.closure == "candidate" and not all(counted) and counted[-1]
                seen.update(f"account {account}" for account in said.accounts)
            elif isinstance(said, AttemptEnded):
                seen[f"ended: {said.reason}"] += 1
                seen["may be tried again"] += not said.ends_slot
            elif isinstance(said, Addendum):
                seen[said.kind] += 1
    expected = {f"closed as {closure}" for closure in
                ("candidate", "zero_variance", "too_few_survivors", "expired", "evaluated", "unmanaged")}  # fmt: skip
    expected |= {f"ended: {reason}" for reason in
                 ("stop", "sequence_gap", "conflicting_repeat", "invalid_event", "scorer_failed", "attempts_exhausted",
                  "worker_lost", "deadline", "budget_spent", "surplus")}  # fmt: skip
    expected |= {f"account {account}" for account in ("candidate", "excluded", "surplus", "superseded")}
    expected |= {"late", "foreign", "duplicate", "conflict", "refused", "flagged", "one sibling", "a reserve stands in",
                 "may be tried again"}  # fmt: skip
    assert {name for name in expected if seen[name] < 3} == set()


# ---------------------------------------------------------------------------------------------------------- memory


@settings(max_examples=60, deadline=None)
@given(_stories, st.sampled_from([0, 500, 2000]))
def test_lack_of_memory_changes_no_closure_and_no_content(records: list[Record], memory: int) -> None:
    assert assembled(records, memory=memory).said() == assembled(records).said()


def test_spans_beyond_the_budget_are_read_again_and_the_budget_is_whole_afterwards() -> None:
    again = 0
    for seed in range(1, 41, 2):
        records = drawn(seed)
        assembler = Assembler(Log(), records, memory=1500)
        for record in records:
            assembler.take(record)
            assert 0 <= assembler.budget.room <= 1500
        if assembler.fold.open_groups == 0:
            assert assembler.budget.room == 1500
        again += len(assembler.again)
    assert again > 20


# ----------------------------------------------------------------------------------------------------------- clocks

DAY_MS = 24 * 3600 * 1000


@settings(max_examples=60, deadline=None)
@given(_stories, st.integers(0, 300), st.integers(MAX_STEP_MS, DAY_MS))
def test_a_nights_pause_is_no_longer_than_the_longest_step(records: list[Record], at: int, pause_ms: int) -> None:
    """However long the log stood still: the same as if it had stood still for one step."""
    short, long = (assembled(shifted(records, [ms if i >= at else 0 for i in range(len(records))]))
                   for ms in (MAX_STEP_MS, pause_ms))  # fmt: skip
    assert long.said() == short.said()


@settings(max_examples=80, deadline=None)
@given(_stories, st.lists(st.integers(0, 15_000), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_leaders_clocks_15_s_apart_gain_no_more_than_that_however_often_leadership_moves(
    records: list[Record], skews_ms: list[int], seed: int
) -> None:
    """So no deadline comes earlier than by that, and what ends long enough before its deadline ends as it would."""
    draw, clock, true = random.Random(seed), LogClock(), LogClock()
    led = shifted(records, [draw.choice(skews_ms) for _ in records])
    for record, skewed in zip(records, led, strict=True):
        assert clock.see(skewed.timestamp_ms) <= true.see(record.timestamp_ms) + max(skews_ms)
    patient = [patiently(record) for record in records]
    calm = assembled(patient).said()
    disturbed = assembled([replace(r, timestamp_ms=s.timestamp_ms) for r, s in zip(patient, led, strict=True)]).said()
    # Only the time for which a group was open is another one.
    assert [without_time(said) for said in disturbed] == [without_time(said) for said in calm]


def patiently(record: Record) -> Record:
    """The same record; an opening one with a deadline that no story reaches, by 15 s and more."""
    found = read_event(record.value)
    if not isinstance(found, Lease):
        return record
    return replace(record, value=encode(replace(found, spec=replace(found.spec, deadline_s=2e3, max_age_s=2e3))))


def without_time(said: Event) -> Event:
    return replace(said, open_ms=0) if isinstance(said, GroupClosed) else said


@settings(max_examples=40, deadline=None)
@given(_stories, st.lists(st.integers(0, 15_000), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_every_group_closes_when_enough_ticks_pass(records: list[Record], skews_ms: list[int], seed: int) -> None:
    """Whoever leads, and although no event comes any more."""
    draw = random.Random(seed)
    last = max((r.timestamp_ms for r in records), default=0)
    # With clocks 15 s apart, a leader that is back every 15 s is the worst: then the clock counts 5 of them.
    longest_s = 3 * int(2.5 * 40) + 15 + 15
    ticks = [Record("trajectories", 0, records[-1].offset + 1 + i, last + 1000 * i, None, encode(Tick("t", i)))
             for i in range(longest_s)]  # fmt: skip
    story = [replace(r, timestamp_ms=r.timestamp_ms + draw.choice(skews_ms)) for r in [*records, *ticks]]
    assembler = Assembler(Log(), story)
    for record in story:
        assembler.take(record)
    assert assembler.fold.open_groups == 0


def test_a_clock_that_was_set_right_again_counts_on() -> None:
    clock = LogClock()
    for timestamp in (0, 1000, DAY_MS, DAY_MS - MAX_SKEW_MS, 2000, 3000):
        clock.see(timestamp)
    assert clock.now_ms == 1000 + MAX_STEP_MS + 1000
