"""A run that stands still says which part does and why, warns first, and ends within the bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import HandBack, Heartbeat, LeaseRequest
from headrace.schemas.outcomes import Outcome
from headrace.streams.stalls import Part, Stall
from tests.scripted import Script, run_settings
from tests.simulation import Sim

BOUND_S = 100


def simulation(**rollout: Any) -> Sim:
    return Sim(run_settings(
        rollout={"group_size": 2, "no_progress_s": BOUND_S, "lease_timeout_s": 5, "deadline_s": 10_000} | rollout,
        batch={"groups": 2, "max_lag": 1},
    ))  # fmt: skip


def started(**rollout: Any) -> Sim:
    sim = simulation(**rollout)
    sim.beat("w")
    sim.publish()
    sim.decide()
    return sim


def wait(sim: Sim, seconds: int, *beating: str) -> list[Stall]:
    """What the coordinator says meanwhile."""
    said = []
    for _ in range(seconds):
        sim.pass_s(1, *beating)
        sim.decide()
        if stall := sim.coordinator.stall():
            said.append(stall)
    return said


def final(said: list[Stall]) -> Stall:
    """The one error, after warnings at every tenth of the bound."""
    assert [stall.still_ms // 1000 for stall in said] == [10 * n for n in range(1, 11)]
    assert [stall.final for stall in said] == [False] * 9 + [True]
    return said[-1]


def test_version_0_that_is_never_published_is_the_trainers() -> None:
    sim = simulation()
    stall = final(wait(sim, BOUND_S + 1, "w"))
    assert stall.part == Part.TRAINER and "version 0" in stall.why


def test_run_without_a_worker_says_how_many_slots_wait() -> None:
    sim = started()
    sim.restart()
    stall = final(wait(sim, BOUND_S + 1))
    assert stall.part == Part.WORKERS and "no worker reports, and 8 slots wait" in stall.why
    text = stall.say("demo")
    assert text.startswith("the workers of run demo stand still for 100 s (rollout.no_progress_s is 100)")
    assert text.endswith("look at `headrace status demo` and the worker's log file")


def test_worker_that_only_beats_is_named_with_its_oldest_lease() -> None:
    stall = final(wait(started(), BOUND_S, "w"))
    assert stall.part == Part.WORKERS
    assert ("1 report, hold 8 slots and produce nothing; the oldest is slot 0 of group g00000000 (task chain_sum-0-0, "
            "attempt 0, lease 0), held by w (incarnation w0)") in stall.why  # fmt: skip


def test_deadlines_losses_and_hand_backs_are_no_progress() -> None:
    for disturb in ("deadline", "loss", "hand_back"):
        sim = started(deadline_s=20, max_attempts=50)
        said, number = [], 0
        for second in range(BOUND_S):
            if disturb == "loss" and second % 7 == 0:
                number += 1
            if disturb == "hand_back" and sim.held:
                lease, one = sim.held[0]
                sim.observe("fleet", HandBack("w", lease.incarnation, lease.group, lease.number, (one.slot,), "x"))
            if disturb == "deadline" and sim.held:
                sim.feed(Script(sim.held[0][0].group, 9).started())  # the fold's clock runs
            sim.beat("w", f"w{number}")
            said += wait(sim, 1)
        assert said[-1].final and said[-1].part == Part.WORKERS, disturb


def test_worker_that_samples_is_at_work_however_long_its_episodes_are() -> None:
    sim = started()
    for second in range(3 * BOUND_S):
        sim.observe("fleet", Heartbeat("w", "w0", 0, 1000, 0, True, "{}", {"sampled_tokens": second // 8}))
        assert wait(sim, 1) == []


def test_trainer_that_takes_no_batch_is_named_with_the_version_it_is_at() -> None:
    sim = started()
    while sim.held:
        sim.end_group(sim.open[0])
        sim.decide()
    stall = final(wait(sim, BOUND_S, "w"))
    assert stall.part == Part.TRAINER and "batch 2 waits for the trainer" in stall.why and "version 0" in stall.why


def test_closure_that_never_comes_is_the_assemblers() -> None:
    sim = started(max_attempts=1)
    sim.delayed = True
    sim.pass_s(6, "v")  # every slot's only attempt is lost, and exhausted
    said = wait(sim, BOUND_S + 1, "v")
    assert said[-1].part == Part.ASSEMBLER and "every slot of 4 groups has ended" in said[-1].why


def test_outage_and_absence_of_the_coordinator_trip_nothing() -> None:
    sim = started()
    assert len(wait(sim, 11, "w")) == 1
    sim.now += 10 * BOUND_S * 1000  # nothing was read meanwhile
    assert wait(sim, 3, "w") == []
    sim.restart()
    sim.now += 10 * BOUND_S * 1000
    assert wait(sim, 9, "w") == []


def test_part_without_work_may_be_silent_as_long_as_it_likes() -> None:
    sim = started()
    while sim.held:
        sim.end_group(sim.open[0])
        sim.decide()
    assert wait(sim, 95, "w")[-1].part == Part.TRAINER, "the workers have nothing to do"
    sim.publish()
    assert wait(sim, 9, "w") == []


def test_producers_that_ask_when_they_like_are_no_stall() -> None:
    sim = simulation()
    sim.publish()
    for _ in range(2 * BOUND_S):
        sim.beat("sdk", capacity=0, managed=False)
        assert wait(sim, 1) == []
    sim.observe("fleet", LeaseRequest("r", "sdk", "sdk0", None, None, "train", None))
    sim.decide()
    said = []
    for _ in range(BOUND_S):
        sim.beat("sdk", capacity=0, managed=False)
        said += wait(sim, 1)
    assert said[-1].final and "held by sdk" in said[-1].why


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["beat", "other", "win", "lose", "infra", "publish", "restart", "new"]), max_size=40))
def test_whatever_happened_before_a_silence_ends_the_run_within_the_bound(moves: list[str]) -> None:
    """Never a silent hang: wherever a run is, some part owes the next step."""
    sim, number = started(max_attempts=2), 0
    for move in moves:
        if move in ("beat", "other"):
            sim.beat("w" if move == "beat" else "v", capacity=3)
        elif move == "new":
            number += 1
            sim.beat("w", f"w{number}")
        elif move == "restart":
            sim.restart()
        elif move == "publish" and sim.manifests and sim.manifests[-1].batch > sim.version:
            sim.publish()
        elif sim.held and move in ("win", "lose", "infra"):
            sim.end(sim.held[0], None if move == "infra" else float(move == "win"),
                    Outcome.INFRA_FAILURE if move == "infra" else None)  # fmt: skip
        sim.decide()
    said = wait(sim, BOUND_S + 15)
    assert any(stall.final for stall in said), said


def test_run_that_is_finished_waits_for_nothing() -> None:
    sim = Sim(run_settings(tasks={"dataset": "chain_sum", "size": 2},
                           rollout={"group_size": 2, "no_progress_s": BOUND_S},
                           batch={"groups": 2, "max_lag": 0}))  # fmt: skip
    sim.beat("w")
    sim.publish()
    sim.decide()
    for group in sim.open:
        sim.end_group(group)
    sim.decide()
    sim.publish()
    assert sim.coordinator.finished and wait(sim, 2 * BOUND_S) == []


@pytest.mark.parametrize("bound", [0.05, 3600.0 * 24])
def test_any_bound_has_its_warnings(bound: float) -> None:
    sim = simulation(no_progress_s=bound)
    said = wait(sim, 3)
    assert [stall.final for stall in said][-1:] == ([True] if bound < 1 else [])
