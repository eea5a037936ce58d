"""The picture of the collection benchmark: the grid, and what each part brings. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .collect_arms import ADDED, ALL, REMOVED
from .collect_parameters import STEADY_SOONER, Cell

if TYPE_CHECKING:
    from .collect import Runs

COLOURS = {64: "tab:green", 128: "tab:orange", 256: "tab:blue"}


def plot(runs: Runs, cells: Sequence[Cell], slots: Sequence[int], grid_seeds: int, median: Cell, seeds: int,
         file: Path) -> None:  # fmt: skip
    """`median`: the cell in which the parts were added and removed, at the most slots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), width_ratios=(3, 2), layout="constrained")
    for count in slots:
        values = [runs.steady(ALL, cell, count, grid_seeds).median for cell in cells]
        left.plot(values, range(len(cells)), "o", color=COLOURS[count], label=f"{count} slots")
        left.axvline(STEADY_SOONER[count], color=COLOURS[count], linestyle=":", linewidth=1)
    left.set_yticks(range(len(cells)), [str(cell) for cell in cells], fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("steady state sooner than the barrier, % (dotted: goals in the median cell)")
    left.set_title(f"the grid, {grid_seeds} seeds")
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    arms = (*ADDED, *REMOVED, ALL)
    for offset, of, label in ((-0.2, runs.steady, "steady state"), (0.2, runs.first, "first batch")):
        spreads = [of(arm, median, slots[-1], seeds) for arm in arms]
        right.barh([i + offset for i in range(len(arms))], [one.median for one in spreads], height=0.36, label=label,
                   xerr=[[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]],
                   error_kw={"elinewidth": 1})  # fmt: skip
    right.set_yticks(range(len(arms)), [arm.name for arm in arms], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("sooner than the barrier, %")
    right.set_title(f"parts, {slots[-1]} slots, {median}, {seeds} seeds", fontsize=10)
    right.legend(fontsize=8)
    right.grid(alpha=0.3, axis="x")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
