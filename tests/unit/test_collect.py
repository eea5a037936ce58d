"""The collection benchmark: its load, its engine model, and that its arms differ in what they say and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collect_arms import ALL, BARRIER, FIFO, Arm
from benchmarks.collect_figures import Job, Journal, mean, run, sooner
from benchmarks.collect_load import Load, Trajectory, source_of
from benchmarks.collect_parameters import FULL_LOAD, GROUP_SIZE, GROUPS, PREFILL_TOKENS_PER_S, Cell
from benchmarks.collect_virtual import Engine, Episode, Outcome, simulate
from benchmarks.harness import CannotMeasure

ROOT = Path(__file__).parents[2]
CELL = Cell(2.0, "half", 3.0)


@pytest.fixture(scope="module")
def load() -> Load:
    return Load(source_of(None, None), 0)


@pytest.fixture(scope="module")
def everything(load: Load) -> Outcome:
    return simulate(load, CELL, ALL, 128, 3)


# ------------------------------------------------------------------------------------------------- the load


def test_a_group_is_the_same_whoever_asks_and_when(load: Load) -> None:
    later = Load(source_of(None, None), 0)
    later.group(70)
    assert later.group(3) == load.group(3) and later.group(70) == load.group(70)
    assert Load(source_of(None, None), 1).group(3) != load.group(3)


def test_fitted_load_has_the_moments_of_the_logs(load: Load) -> None:
    episodes = [one for index in range(128) for one in load.group(index)]
    agent, turns = [one.agent_s for one in episodes], [len(one.calls) for one in episodes]
    assert statistics.median(agent) == pytest.approx(math.exp(5.57), rel=0.15)
    assert statistics.stdev(map(math.log, agent)) == pytest.approx(0.87, rel=0.1)
    assert statistics.fmean(turns) == pytest.approx(19.3, rel=0.1)
    assert all(one.agent_s == pytest.approx(sum(one.calls) + sum(one.tools)) for one in episodes)
    assert statistics.median(one.setup_s(CELL) for one in episodes) == pytest.approx(3.0, rel=0.2)
    setup = sorted(one.setup_s(CELL) for one in episodes)
    assert setup[int(0.99 * len(setup))] == pytest.approx(97.0, rel=0.5)


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TRIAL: dict[str, object] = {"task_id": "a", "setup_s": 1.0, "agent_s": 40.0, "test_s": 2.0, "trial_s": 50.0}
STEPS: dict[str, object] = {"task_id": "a", "steps": [{"llm_s": 3.0, "tool_s": 1.0}, {"llm_s": 5.0, "tool_s": 1.0}]}


def test_traced_load_stretches_a_run_of_the_task_to_the_trial_s_time(tmp_path: Path) -> None:
    unfinished = TRIAL | {"agent_s": 1e6, "trial_s": None}
    source = source_of(write(tmp_path / "trials", TRIAL, unfinished), write(tmp_path / "steps", STEPS))
    one = Load(source, 0).group(0)[0]
    assert (one.calls, one.tools, one.verify_s) == ([12.0, 20.0], [4.0, 4.0], 2.0)


@pytest.mark.parametrize(
    ("trials", "steps", "said"),
    [
        ({"task_id": "a"}, STEPS, "trials, line 1: no field `agent_s`"),
        (TRIAL, {"task_id": "a", "steps": [{"llm_s": 1.0}]}, "steps, line 1: .*`tool_s`"),
        (TRIAL | {"setup_s": None}, STEPS, "0 tasks with whole trials"),
    ],
)
def test_files_that_lack_something_are_refused_by_name(tmp_path: Path, trials: dict[str, object],
                                                       steps: dict[str, object], said: str) -> None:  # fmt: skip
    with pytest.raises(CannotMeasure, match=said):
        source_of(write(tmp_path / "trials", trials), write(tmp_path / "steps", steps))


def test_one_file_without_the_other_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match="belong together"):
        source_of(tmp_path / "trials", None)
    with pytest.raises(CannotMeasure, match="can't be read"):
        source_of(tmp_path / "trials", tmp_path / "steps")


# ------------------------------------------------------------------------------------------------- the engine


def test_a_call_takes_the_slow_down_at_full_load_and_no_more_alone(load: Load) -> None:
    engine = Engine(Cell(4.0, "none", 3.0))
    episode = Episode((0, 0), load.group(0)[0], 0)
    idle = episode.work.calls[0] + episode.work.context[0] / PREFILL_TOKENS_PER_S
    assert engine.call(0, episode)[0] == pytest.approx(idle * (1 + 3 / FULL_LOAD))
    engine.running[0] = FULL_LOAD - 1
    assert engine.call(0, episode)[0] == pytest.approx(idle * 4)


def test_a_prefix_is_found_only_where_it_was_computed_and_while_there_is_room(load: Load) -> None:
    episode, sibling = (Episode((0, slot), load.group(0)[slot], slot) for slot in (0, 1))
    unlimited = Engine(Cell(1.0, "unlimited", 3.0))
    assert unlimited.call(0, episode)[1] == 0
    assert unlimited.call(0, sibling)[1] == sibling.work.context[0]  # the prompt that siblings share
    episode.turn = 1
    assert unlimited.call(1, episode)[1] == 0
    assert unlimited.call(0, episode)[1] == episode.work.context[0] + episode.work.tokens[0]
    half, many = Engine(CELL), [one for index in range(64) for one in load.group(index)]
    episode.turn = 0
    half.call(0, episode)
    for number, work in enumerate(many[8:], 8):
        other = Episode((number // 8, number % 8), work, number)
        other.turn = len(work.calls) - 1
        half.call(0, other)
    episode.turn = 1
    assert half.call(0, episode)[1] == 0


# ------------------------------------------------------------------------------------------------- the arms


def test_headrace_with_max_lag_0_and_nothing_else_is_the_barrier(load: Load) -> None:
    ours = simulate(load, CELL, Arm("synchronous", "headrace", max_lag=0), 64, 2)
    theirs = simulate(load, CELL, BARRIER, 64, 2)
    assert [batch.at for batch in ours.batches] == [batch.at for batch in theirs.batches]
    assert ours.sampled == theirs.sampled


def test_nothing_sampled_is_thrown_away_and_nothing_is_batched_twice(everything: Outcome) -> None:
    batched = [group for batch in everything.batches for group in batch.groups]
    assert len(batched) == len(set(batched)) == 3 * GROUPS
    open_groups = {group for group, _ in everything.sampled} - set(batched)
    # What has begun and isn't batched is among the first launched: it is on its way, or a candidate.
    assert set(batched) | open_groups <= set(range((2 + 1) * GROUPS + 3 * GROUPS))
    assert everything.sampled >= {(group, slot) for group in batched for slot in range(GROUP_SIZE)}


class Bimodal:
    """Every second group takes a hundred times as long; each episode is one call."""

    def group(self, index: int) -> list[Trajectory]:
        seconds = 1000.0 if index % 2 else 10.0
        return [Trajectory([seconds], [0.0], [round(seconds * 50)], [2000], seconds, 1.0, 0.0)] * GROUP_SIZE


def test_bimodal_durations_train_the_lengths_that_were_sampled() -> None:
    outcome = simulate(Bimodal(), Cell(1.0, "none", 3.0), ALL, 256, 16)  # type: ignore[arg-type]
    long = [sum(group % 2 for group in batch.groups) / GROUPS for batch in outcome.batches]
    assert long[0] < 0.1  # the first batches are of the short ones,
    assert sum(long) / len(long) == pytest.approx(0.5, abs=0.1)  # and the long ones are all trained later
    trained = {group for batch in outcome.batches for group in batch.groups}
    assert set(range(max(trained) - 3 * GROUPS)) <= trained


def test_max_lag_bounds_what_is_under_way(load: Load) -> None:
    for lag in (0, 1):
        outcome = simulate(load, CELL, Arm("bounded", "headrace", max_lag=lag), 256, 1)
        before = [group for group, (at, _) in outcome.began.items() if at < outcome.batches[0].at]
        assert lag * GROUPS < len(before) <= (lag + 1) * GROUPS
    assert {lag for batch in simulate(load, CELL, BARRIER, 256, 2).batches for lag in batch.lags} == {0}


def test_slots_are_never_idle_while_work_is_admitted(everything: Outcome) -> None:
    assert everything.busy / (128 * everything.batches[-1].at) > 0.99
    assert everything.sandboxes <= 1.5 * 128


def test_fifo_takes_groups_as_they_end(load: Load) -> None:
    outcome = simulate(load, CELL, FIFO, 128, 2)
    first, second = ({*batch.groups} for batch in outcome.batches)
    assert len(first) == len(second) == GROUPS and not first & second
    assert outcome.batches[0].at < simulate(load, CELL, BARRIER, 128, 1).batches[0].at


def test_the_same_seed_gives_the_same_figures_in_another_process(load: Load) -> None:
    job = Job(0, CELL, FIFO, 256, 1, None)
    code = ("from benchmarks.collect_figures import *; from benchmarks.collect_arms import *; "
            f"print(run(Job(0, {CELL!r}, FIFO, 256, 1, None)).first)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert float(done.stdout) == run(job).first, done.stderr


def test_journal_gives_back_what_was_run(tmp_path: Path) -> None:
    job = Job(0, CELL, FIFO, 256, 1, None)
    one = dataclasses.replace(run(job), steady=1.0, late=1.0)  # of one batch they aren't numbers
    Journal(tmp_path / "journal").add(job, one)
    again = Journal(tmp_path / "journal")
    assert again.find(job) == one
    assert again.find(Job(1, CELL, FIFO, 256, 1, None)) is None


def test_means_carry_the_interval_of_their_seeds() -> None:
    spread = mean([1.0, 3.0])
    assert spread.median == 2.0
    assert spread.high - spread.low == pytest.approx(2 * 1.96)
    assert sooner([25.0, 50.0], [100.0, 100.0]).median == 62.5


# ------------------------------------------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--virtual", "--real"])
def test_a_quick_run_of_either_form_says_its_figures_as_json(form: str) -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.collect", form, "--quick", "--json"], capture_output=True,
                          text=True, cwd=ROOT, timeout=280)  # fmt: skip
    if form == "--real" and "needs sandboxes of kind process" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    subjects = {one["subject"] for one in said if "measure" in one}
    assert {"barrier", "all", "than barrier"} <= subjects
    assert all(one["value"] > 0 for one in said if "first batch" in one.get("measure", "") and one["unit"] == "s")
    goals = [one["goal"] for one in said if "goal" in one]
    assert len(goals) == (5 if form == "--virtual" else 0)
