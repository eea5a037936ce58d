"""How soon a batch of 256 trajectories is collected with fixed weights, and which part of Headrace brings how much.

Batches of 32 groups of 8, drawn from trials of Terminal-Bench (`--trials`, `--steps`: JSON lines; without them from
distributions fitted to such logs). The version advances with each batch, the weights stay, and training takes no time.

`--virtual` (the default): discrete events in virtual time that drive Headrace's own scheduler, router, coordinator,
fold and pool sizing. Engines, prefix caches, tools and set-ups are a model, and so is the contention on them: its
parameters and the grid stand in `collect_parameters.py`, committed before the first figure. All arms get the same
trajectories.
Baselines: a barrier over the batch (launch order, a cold sandbox per episode in the episode's slot, replicas in turn),
and the same without the barrier, first in first out. `--real`: the same code through a real broker, with real sandboxes
of kind process, in scaled time; model calls are waits timed from the traces, no model runs.

Published beside it: 66.9 % less time for 256 trajectories of Terminal-Bench by others' changes to routing, sandboxes
and batch assembly. That is another workload, another engine and another baseline; the figures don't compare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from . import harness
from .collect_arms import ADDED, ALL, ALONE, BARRIER, BY_LAG, FIFO, REMOVED, Arm
from .collect_figures import Job, Journal, Summary, beyond, mean, p95, run_all, sooner
from .collect_load import source_of
from .collect_parameters import (
    FIRST_SOONER,
    GRID,
    GROUP_SIZE,
    GROUPS,
    LENGTH_WITHIN,
    LONG_BATCHES,
    SEEDS,
    SLOTS,
    STEADY_BATCHES,
    STEADY_SOONER,
    Cell,
)
from .harness import Result

FULL_SLOTS = SLOTS[-1]
# Shares of the seeds: each cell of the grid gets few, to find the median one, which then gets all, and the worst.
GRID_SHARE, PART_SHARE, LONG_SHARE = 0.06, 0.2, 0.05
PUBLISHED = 66.9


class Runs:
    """Simulated runs, each done once. `seeds`: at most so many."""

    def __init__(self, files: tuple[Path, Path] | None, processes: int, batches: int,
                 journal: Path | None = None) -> None:  # fmt: skip
        self.files, self._processes, self.batches = files, processes, batches
        self._journal = Journal(journal)
        self._done: dict[Job, Summary] = {}

    def want(self, arms: Sequence[Arm], cells: Sequence[Cell], slots: Sequence[int], seeds: int,
             batches: int | None = None) -> None:  # fmt: skip
        jobs = [self._job(seed, cell, arm, count, batches) for seed in range(seeds) for count in reversed(slots)
                for cell in cells for arm in arms]  # fmt: skip
        self._done |= {job: one for job in jobs if (one := self._journal.find(job)) is not None}
        missing = [job for job in jobs if job not in self._done]
        for number, (job, one) in enumerate(run_all(missing, self._processes), 1):
            self._done[job] = one
            self._journal.add(job, one)
            if number % 50 == 0:
                print(f"collect: {number} of {len(missing)} runs", file=sys.stderr, flush=True)

    def of(self, arm: Arm, cell: Cell, slots: int, seeds: int, batches: int | None = None) -> list[Summary]:
        return [self._done[self._job(seed, cell, arm, slots, batches)] for seed in range(seeds)]

    def _job(self, seed: int, cell: Cell, arm: Arm, slots: int, batches: int | None) -> Job:
        return Job(seed, cell, arm, slots, 1 if arm is ALONE else batches or self.batches, self.files)

    def steady(self, arm: Arm, cell: Cell, slots: int, seeds: int, against: Arm = BARRIER) -> harness.Spread:
        return sooner([one.steady for one in self.of(arm, cell, slots, seeds)],
                      [one.steady for one in self.of(against, cell, slots, seeds)])  # fmt: skip

    def first(self, arm: Arm, cell: Cell, slots: int, seeds: int, against: Arm = BARRIER) -> harness.Spread:
        return sooner([one.first for one in self.of(arm, cell, slots, seeds)],
                      [one.first for one in self.of(against, cell, slots, seeds)])  # fmt: skip


def measure(options: argparse.Namespace, result: Result) -> None:
    files = (options.trials, options.steps) if options.trials and options.steps else None
    source_of(options.trials, options.steps)  # bad files are told of before anything is measured
    if options.real:
        from .collect_real import measure_real

        measure_real(options.quick, files, result)
    else:
        _virtual(options, files, result)
    result.note(f"Published elsewhere: {PUBLISHED:g} % (other workload, other baseline).")


def _virtual(options: argparse.Namespace, files: tuple[Path, Path] | None, result: Result) -> None:
    quick = options.quick
    seeds = options.seeds or (1 if quick else SEEDS)
    slots = (FULL_SLOTS,) if quick else SLOTS
    cells = GRID[6:8] if quick else GRID
    grid_seeds, part_seeds, long_seeds = (max(1, round(seeds * share))
                                          for share in (GRID_SHARE, PART_SHARE, LONG_SHARE))  # fmt: skip
    runs = Runs(files, options.processes, 1 + (2 if quick else STEADY_BATCHES), options.journal)
    runs.want((BARRIER, ALL), cells, slots, grid_seeds)
    middle, worst = _grid(runs, cells, slots, grid_seeds, result)
    for count in slots:
        at = dict.fromkeys((middle[count], worst[count]))
        for cell in at:
            where, many = ("median cell", seeds) if cell == middle[count] else ("worst cell", part_seeds)
            runs.want((BARRIER, FIFO, ALL), (cell,), (count,), many)
            _headline(runs, cell, count, many, f"{count} slots, {where} ({cell})", result)
    cell = middle[FULL_SLOTS]
    if not quick:
        runs.want((*ADDED, *REMOVED, ALONE, *BY_LAG), (cell,), (FULL_SLOTS,), part_seeds)
        _parts(runs, cell, part_seeds, result)
        _lags(runs, cell, part_seeds, result)
        runs.want((ALL,), (cell,), (FULL_SLOTS,), long_seeds, LONG_BATCHES)
        _lengths(runs, cell, long_seeds, result)
    _goals(runs, middle, slots, seeds, None if quick else long_seeds, result)
    _notes(runs, files, seeds, grid_seeds, part_seeds, long_seeds, result)
    if options.save and not quick:
        from .collect_plot import plot

        plot(runs, cells, slots, grid_seeds, cell, part_seeds, harness.RESULTS / "collect.png")


def _grid(runs: Runs, cells: Sequence[Cell], slots: Sequence[int], seeds: int,
          result: Result) -> tuple[dict[int, Cell], dict[int, Cell]]:  # fmt: skip
    """Every cell; the median one (of two the less favourable) and the worst, by slots."""
    middle, worst = {}, {}
    for count in slots:
        steady = {cell: runs.steady(ALL, cell, count, seeds) for cell in cells}
        for cell in cells:
            result.row(f"grid, {count} slots: steady state sooner than the barrier", str(cell), steady[cell], "%")
        for cell in cells:
            result.row(f"grid, {count} slots: first batch sooner than the barrier", str(cell),
                       runs.first(ALL, cell, count, seeds), "%")  # fmt: skip
        ordered = sorted(cells, key=lambda cell: steady[cell].median)
        middle[count], worst[count] = ordered[(len(ordered) - 1) // 2], ordered[0]
    return middle, worst


def _headline(runs: Runs, cell: Cell, slots: int, seeds: int, where: str, result: Result) -> None:
    for arm in (BARRIER, FIFO, ALL):
        many = runs.of(arm, cell, slots, seeds)
        result.row(f"{where}: first batch", arm.name, mean([one.first for one in many]), "s")
    for arm in (BARRIER, FIFO, ALL):
        many = runs.of(arm, cell, slots, seeds)
        result.row(f"{where}: batch interval, steady state", arm.name, mean([one.steady for one in many]), "s")
    bound = [GROUPS * GROUP_SIZE * one.sampled[1] / slots for one in runs.of(ALL, cell, slots, seeds)]
    result.row(f"{where}: batch interval, steady state", "bound", mean(bound), "s")
    result.row(f"{where}: bound, steady state sooner", "than barrier",
               sooner(bound, [one.steady for one in runs.of(BARRIER, cell, slots, seeds)]), "%")  # fmt: skip
    for against in (BARRIER, FIFO):
        result.row(f"{where}: all, first batch sooner", f"than {against.name}",
                   runs.first(ALL, cell, slots, seeds, against), "%")  # fmt: skip
        result.row(f"{where}: all, steady state sooner", f"than {against.name}",
                   runs.steady(ALL, cell, slots, seeds, against), "%")  # fmt: skip
    for arm in (BARRIER, FIFO, ALL):
        many = runs.of(arm, cell, slots, seeds)
        result.row(f"{where}: time in which a slot is taken", arm.name, mean([100 * one.busy for one in many]), "%")
        result.row(f"{where}: prompt tokens found in a prefix cache", arm.name,
                   mean([100 * one.found for one in many]), "%")  # fmt: skip
        result.row(f"{where}: sandboxes at once, at most", arm.name, float(max(one.sandboxes for one in many)))


def _parts(runs: Runs, cell: Cell, seeds: int, result: Result) -> None:
    where = f"{FULL_SLOTS} slots, {cell}"
    for arm in (*ADDED, *REMOVED, ALL):
        result.row(f"{where}: steady state sooner than the barrier", arm.name,
                   runs.steady(arm, cell, FULL_SLOTS, seeds), "%")  # fmt: skip
    for arm in (*ADDED, *REMOVED, ALL, ALONE):
        result.row(f"{where}: first batch sooner than the barrier", arm.name,
                   runs.first(arm, cell, FULL_SLOTS, seeds), "%")  # fmt: skip


def _lags(runs: Runs, cell: Cell, seeds: int, result: Result) -> None:
    for arm in BY_LAG:
        many, name = runs.of(arm, cell, FULL_SLOTS, seeds), f"{FULL_SLOTS} slots, {cell}, {arm.name}"
        lags = [lag for one in many for lag in one.lags]
        result.row(name, "steady state sooner than the barrier", runs.steady(arm, cell, FULL_SLOTS, seeds), "%")
        result.row(name, "first batch sooner than the barrier", runs.first(arm, cell, FULL_SLOTS, seeds), "%")
        result.row(name, "lag of a group's oldest token, p95", p95(lags), "versions")
        result.row(name, "lag of a group's oldest token, maximum", float(max(lags)), "versions")
        result.row(name, "groups with a token beyond the default hard lag", beyond(lags), "%")


def _lengths(runs: Runs, cell: Cell, seeds: int, result: Result) -> None:
    many, name = runs.of(ALL, cell, FULL_SLOTS, seeds, LONG_BATCHES), f"all, {LONG_BATCHES} batches, {cell}"
    for index, unit in enumerate(("tokens", "s of agent time")):
        result.row(name, f"mean length of sampled episodes, {unit}", mean([one.sampled[index] for one in many]))
        result.row(name, f"mean length of trained episodes, {unit}", mean([one.trained[index] for one in many]))
        result.row(name, f"trained against sampled, {unit}", mean(_off(many, index)), "%")
    for number in range(4):
        result.row(name, f"mean length in batch {number + 1}", mean([one.by_batch[number] for one in many]), "tokens")
    ages, ages_s = [age for one in many for age in one.ages], [age for one in many for age in one.ages_s]
    result.row(name, "groups carried over from an earlier batch's time",
               100 * len(ages) / sum(len(one.lags) for one in many), "%")  # fmt: skip
    for unit, values in (("batches", ages), ("s", ages_s)):
        result.row(name, "age of carried-over groups, p95", p95(values), unit)
        result.row(name, "age of carried-over groups, maximum", float(max(values)), unit)
    result.row(name, "batch interval, batches 1 to 50", mean([one.steady for one in many]), "s")
    result.row(name, "batch interval, batches 26 to 50", mean([one.late for one in many]), "s")


def _off(many: Sequence[Summary], index: int) -> list[float]:
    return [100 * (one.trained[index] / one.sampled[index] - 1) for one in many]


def _goals(runs: Runs, middle: dict[int, Cell], slots: Sequence[int], seeds: int, long_seeds: int | None,
           result: Result) -> None:  # fmt: skip
    full = middle[FULL_SLOTS]
    result.at_least(f"first batch sooner than the barrier, {FULL_SLOTS} slots, median cell, %",
                    runs.first(ALL, full, FULL_SLOTS, seeds).median, FIRST_SOONER)  # fmt: skip
    for count in reversed(SLOTS):
        got = runs.steady(ALL, middle[count], count, seeds).median if count in slots else None
        result.at_least(f"steady state sooner than the barrier, {count} slots, median cell, %", got,
                        STEADY_SOONER[count])  # fmt: skip
    many = runs.of(ALL, full, FULL_SLOTS, long_seeds, LONG_BATCHES) if long_seeds else []
    off = max(abs(statistics.fmean(_off(many, index))) for index in (0, 1)) if many else None
    result.at_most("trained against sampled length over 50 batches, % off", off, LENGTH_WITHIN)


def _notes(runs: Runs, files: tuple[Path, Path] | None, seeds: int, grid_seeds: int, part_seeds: int,
           long_seeds: int, result: Result) -> None:  # fmt: skip
    drawn = f"{files[0].name} and {files[1].name}" if files else "the fitted distributions"
    result.note(f"Virtual time. Trajectories from {drawn}. {seeds} seeds ({grid_seeds} for each cell of the grid, "
                f"{part_seeds} in the worst cell and for the rows by part and by lag, {long_seeds} for {LONG_BATCHES} "
                "batches); means with their 95 % intervals. A cell: slow-down at full load, prefix cache, median "
                f"set-up. Steady state: the mean interval of the {runs.batches - 1} batches after the first. The bound "
                "is what no collector can pass with these slots: each always taken, by episodes whose engine is idle, "
                "prefix at hand and sandbox ready; what lies between it and `all` is contention in the engine "
                "model.")  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--virtual", action="store_true", help="virtual time (the default)")
    form.add_argument("--real", action="store_true", help="real broker and sandboxes, scaled time")
    parser.add_argument("--trials", type=Path, metavar="FILE", help="trials: task_id, setup_s, agent_s, test_s, ...")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="recorded runs: task_id, steps of llm_s and tool_s")
    parser.add_argument("--seeds", type=int, help=f"of the virtual form (default {SEEDS}, with --quick 1)")
    parser.add_argument("--processes", type=int, default=1, help="for the virtual form")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep finished runs there, and take them from it")


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    name = "collect_real" if "--real" in given else "collect"
    return harness.run(name, __doc__, measure, argv, arguments, packages=("matplotlib",))


if __name__ == "__main__":
    raise SystemExit(main())
