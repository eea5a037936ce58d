"""Whether the forecast of drift can be trusted: what was forecast of each batch's tokens beside what was then realised
on them, by lag, and the limit on forecasts that follows.

A cell is what one version sampled of one batch: its forecast was made before, from other episodes. Both are taken over
the floor, which is what the tokens of lag 0 show. Rank correlations are over cells of lag 1 and more; a lag has one of
its own, in which it says nothing itself. Pure; a figure that the records can't support is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.schemas.events import Version

from .facts import Fact

# What the limit on forecasts is to keep the realised drift below, over the floor: an RMS log-ratio of 0.2, at which
# PPO's clip begins to act.
WANTED = 0.04
FEW = 20  # cells; with fewer no limit is suggested


@dataclass(frozen=True, slots=True)
class Cell:
    """Nats squared, over the floor."""

    target: int
    lag: int
    tokens: int
    forecast: float
    realised: float


@dataclass(frozen=True, slots=True)
class LagCalibration:
    """Token means over the floor, nats squared; rank correlation of forecast with realised over the lag's cells."""

    lag: int
    cells: int
    tokens: int
    forecast: float
    realised: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """`factor`: realised over forecast, of token means. `limit`: the `staleness.drift_limit` at which realised drift is
    about `WANTED`, as far as forecasts are off by that factor."""

    lags: tuple[LagCalibration, ...]
    floor: float | None  # token mean of the realised second moment at lag 0; None: no batch had such tokens
    correlation: float | None  # of forecast with realised, all lags pooled
    lag_correlation: float | None  # of lag with realised, beside it
    factor: float | None
    limit: float | None

    @property
    def cells(self) -> int:
        return sum(one.cells for one in self.lags)


def calibration(facts: Iterable[Fact[Any]], floor: float) -> Calibration:
    """`floor`: the run's `staleness.floor`, which forecasts contain."""
    return calibrated([fact.event for fact in facts if isinstance(fact.event, Version)], floor)


def calibrated(versions: Iterable[Version], floor: float) -> Calibration:
    """Forecast against realised drift, by lag. What versions of lag 0 realise (weighed by tokens) is taken off as the
    floor of `realised`, `floor` (nats squared) off the forecasts."""
    told = [(version.parent, one) for version in versions for one in version.realised]
    equal = [(one.tokens, one.second_moment) for target, one in told if one.version == target]
    shown = sum(n * moment for n, moment in equal) / sum(n for n, _ in equal) if equal else None
    cells = [Cell(target, target - one.version, one.tokens, one.estimated - floor, one.second_moment - (shown or 0.0))
             for target, one in told if one.version < target and one.estimated is not None]  # fmt: skip
    return of_cells(cells, shown)


def of_cells(cells: Sequence[Cell], floor: float | None) -> Calibration:
    """The calibration that these cells give; both drifts are over their floors. `floor` (nats squared) is what lag 0
    showed, None where nothing was trained at lag 0."""
    lags = []
    for lag in sorted({one.lag for one in cells}):
        own = [one for one in cells if one.lag == lag]
        tokens = sum(one.tokens for one in own)
        lags.append(LagCalibration(
            lag, len(own), tokens, sum(one.tokens * one.forecast for one in own) / tokens,
            sum(one.tokens * one.realised for one in own) / tokens,
            spearman([one.forecast for one in own], [one.realised for one in own]),
        ))  # fmt: skip
    forecast = sum(one.tokens * one.forecast for one in lags)
    realised = sum(one.tokens * one.realised for one in lags)
    factor = realised / forecast if forecast > 0 and realised > 0 else None
    return Calibration(
        tuple(lags), floor, spearman([one.forecast for one in cells], [one.realised for one in cells]),
        spearman([one.lag for one in cells], [one.realised for one in cells]), factor,
        WANTED / factor if factor is not None and len(cells) >= FEW else None,
    )  # fmt: skip


def spearman(left: ArrayLike, right: ArrayLike) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None for fewer than three pairs, or where one side is all
    the same."""
    a, b = _ranks(np.asarray(left, np.float64)), _ranks(np.asarray(right, np.float64))
    if len(a) < 3 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: NDArray[np.float64] = (ends - (counts - 1) / 2)[number]
    return mean
