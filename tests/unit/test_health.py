"""The health of a task set, on closures and attempts whose every rate is known."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from headrace.consumers.facts import Fact
from headrace.consumers.health import FEWEST, Rate, TaskSet, task_set
from headrace.schemas.events import AttemptEnded, GroupClosed, SlotFate, VersionRun
from headrace.schemas.hashes import GENESIS
from tests.scripted import TASK, lease

LINK: dict[str, Any] = {"number": 0, "previous": GENESIS}


def slot(number: int, success: bool, version: int = 0, answer: bytes | None = None, **over: Any) -> SlotFate:
    plain: dict[str, Any] = dict(
        slot=number, attempt=0, incarnation="w", outcome="model_success" if success else "model_failure", reason="stop",
        boundary="none", reward=float(success), counted=True, model_tokens=4, context_tokens=3,
        versions=(VersionRun(version, 4),), answer=answer,
    )  # fmt: skip
    return SlotFate(**(plain | over))


def closed(task: str, *slots: SlotFate, at: int = 0, closure: str = "candidate", purpose: str = "train") -> Fact[Any]:
    event = GroupClosed(**LINK, cause=0, group=f"{task}-{at}", closure=closure, purpose=purpose, task=task, opened=0,
                        open_ms=0, flagged=None, slots=slots, accounts={"candidate": 4}, context_tokens=0,
                        content_hash=None, samples=(), held_up_by=0)  # fmt: skip
    return Fact("groups", 0, at, at, b"", event)


def attempts(task: str, version: int, outcomes: Iterable[str], name: str = "") -> list[Fact[Any]]:
    """A lease at that version, and how its slots' attempts ended."""
    group, ends = name or f"{task}@{version}", list(outcomes)
    facts: list[Any] = [lease(group, dict.fromkeys(range(len(ends)), 0), min_version=version,
                              task=TASK.__class__(task, "t", "{}", 0))]  # fmt: skip
    facts += [AttemptEnded(**LINK, cause=0, group=group, slot=i, attempt=0, incarnation="w", outcome=outcome,
                           reason="r", boundary="b", reward=None, model_tokens=0, ends_slot=True)
              for i, outcome in enumerate(ends)]  # fmt: skip
    return [Fact("groups", 0, i, 0, b"", fact) for i, fact in enumerate(facts)]


def lost(count: int, of: int, outcome: str = "infra_failure") -> list[str]:
    return [outcome] * count + ["model_failure"] * (of - count)


# Values of Wilson's interval as R's prop.test (without correction) has them.
@pytest.mark.parametrize(("rate", "low", "high"), [
    (Rate(0, 10), 0.0, 0.2775328), (Rate(10, 10), 0.7224672, 1.0), (Rate(3, 10), 0.1077913, 0.6032219),
])  # fmt: skip
def test_interval_is_wilson_s(rate: Rate, low: float, high: float) -> None:
    assert rate.low == pytest.approx(low, abs=1e-6) and rate.high == pytest.approx(high, abs=1e-6)
    assert Rate(0, 0).value is None and (Rate(0, 0).low, Rate(0, 0).high) == (0.0, 1.0)


def test_solve_rate_is_told_by_the_version_that_sampled_and_counts_training_alone() -> None:
    found = task_set([
        closed("t", slot(0, True, 0), slot(1, False, 0), at=1), closed("t", slot(0, True, 3), slot(1, True, 2), at=2),
        closed("t", slot(0, True, 9), at=3, purpose="eval"),
        closed("t", slot(0, True, 3, counted=False), at=4),
    ]).health()  # fmt: skip
    (one,) = found
    assert {version: (rate.hits, rate.count) for version, rate in one.by_version.items()} == {
        0: (1, 2), 2: (1, 1), 3: (1, 1)}  # fmt: skip
    assert (one.solved.hits, one.solved.count, one.groups, one.reward) == (3, 4, 3, 0.75)


def test_task_is_called_saturated_or_never_solved_on_enough_episodes_alone_and_by_its_newest() -> None:
    def state(successes: Sequence[bool]) -> str | None:
        return task_set([closed("t", slot(0, one), at=i) for i, one in enumerate(successes)]).health()[0].state

    assert state([True] * (FEWEST - 1)) is None and state([True] * FEWEST) == "saturated"
    assert state([False] * (FEWEST - 1)) is None and state([False] * FEWEST) == "never_solved"
    assert state([False] * 50 + [True] * 32) == "saturated", "what it once failed has been learnt"
    assert state([True] * 32 + [False, True] * 16) is None
    # Partitions are read one after the other: by time, not in the order in which they come.
    facts = [closed("t", slot(0, i < 32), at=100 - i) for i in range(64)]
    assert task_set(facts).health()[0].state == "saturated"


def test_same_answer_with_another_verdict_makes_a_task_flaky() -> None:
    one, other = b"answer 1", b"answer 2"
    facts = [closed("t", slot(0, True, answer=one), slot(1, False, answer=other)),
             closed("t", slot(0, True, answer=one))]  # fmt: skip
    steady = task_set(facts).health()[0]
    assert steady.state is None and (steady.repeats.hits, steady.repeats.count) == (0, 1)
    flaky = task_set([*facts, closed("t", slot(0, False, answer=one))]).health()[0]
    assert flaky.state == "flaky" and (flaky.repeats.hits, flaky.repeats.count) == (1, 2)
    # Another task's verdict on it is another matter, and no verdict is none.
    aside = [closed("u", slot(0, False, answer=one)), closed("t", slot(0, False, answer=one, outcome="infra_failure"))]
    assert all(task.state is None for task in task_set([*facts, *aside]).health())


def test_task_that_loses_more_attempts_than_the_fleet_is_an_alert_and_chance_is_none() -> None:
    rng = random.Random(7)
    fleet = [fact for i in range(40) for fact in attempts(f"t{i}", 0, lost(int(rng.random() < 0.5), 8))]
    assert not task_set(fleet).alerts()
    (alert,) = task_set([*fleet, *attempts("broken", 0, lost(6, 8, "unknown"))]).alerts()
    assert (alert.task, alert.outcome, alert.rate.hits, alert.rate.count, alert.against) == (
        "broken", "unknown", 6, 8, 0.0)  # fmt: skip
    assert alert.p < 1e-4 and "broken: unknown ends 6 of 8" in str(alert) and "0.0% in the other tasks" in str(alert)
    assert not task_set([*fleet, *attempts("unlucky", 0, lost(2, 2))]).alerts(), "two attempts say nothing"
    assert not task_set(attempts("alone", 0, lost(8, 8))).alerts(), "there are no others to compare it with"


def test_rate_that_rises_with_the_version_is_an_alert_and_one_that_falls_is_none() -> None:
    def over(counts: Sequence[int], task: str = "t") -> list[Fact[Any]]:
        return [fact for version, k in enumerate(counts) for fact in attempts(task, version, lost(k, 20))]

    (alert,) = task_set(over([0, 1, 3, 6, 9])).alerts()
    assert (alert.task, alert.against) == ("t", None) and "rises with the version" in str(alert)
    assert not task_set(over([9, 6, 3, 1, 0])).alerts() and not task_set(over([3, 3, 3, 3, 3])).alerts()
    # Of tasks that never come round again, the fleet's shows it.
    fleet = [fact for version in range(10) for i in range(4)
             for fact in attempts(f"t{version}.{i}", version, lost(version // 2, 16))]  # fmt: skip
    assert [one.task for one in task_set(fleet).alerts()] == [None]


def test_empty_run_has_no_task_and_no_alert() -> None:
    assert (TaskSet().health(), TaskSet().alerts()) == ((), ())
