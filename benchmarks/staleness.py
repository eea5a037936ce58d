"""Whether measured drift predicts what stale tokens cost, and what a limit on it buys beside a limit on lag.

Engine, training step, coordinator and forecasts are Headrace's own; a small model made here really samples and really
trains (reward: the share of tokens whose ids are even, or odd, as the prompt asks). Time is modelled on two devices:
one samples, groups taking as long as they are drawn to, however many are under way; one trains, a batch taking 1. The
learning rate rises for a tenth of the time and then falls to a tenth (half a cosine). See `_staleness_world`.

*Forecast.* Durations are spread log-uniformly, so that lags are. A cell is what one version sampled of one batch; its
forecast was made before, from other episodes; both are over the floor, which is what lag 0 shows. Rank correlations are
over cells of all seeds, of lag 1 and more; within a lag, lag itself says nothing (its correlation counts as 0). Then,
of the same cells: what drift is left in the tokens that are kept, where the same share is masked by forecast, or by
lag.

*Reward.* At equal wall-clock, for fixed lags and for the limit on drift that the calibration above suggests. Reward is
that of the last version on episodes of its own. Throughput is of tokens with weight. A cut-off by lag masks as much as
the limit on drift does, for the same seed.

`--smollm2` measures the forecast at lags 0, 4 and 16 on SmolLM2-135M (an hour or more on a CPU).
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrace.consumers.calibration import Calibration, Cell, calibrated, of_cells
from headrace.models import smollm2, tiny_model
from headrace.schemas.errors import ModelError
from headrace.settings import home
from headrace.trainer.step import StepSettings

from . import harness
from ._staleness_world import Load, Ran, World, settings
from .harness import CannotMeasure, Result

GROUPS, SIBLINGS, TOKENS = 4, 4, 8
PEAK, WARM, LAST = 3e-3, 0.1, 0.1  # learning rate; share of the time that it rises; share of the peak that is left
LAGS = (0, 1, 2, 4, 16)
SPREAD = (1.0, 50.0)  # durations for the forecast
MEDIAN, SIGMA = 2.0, 0.7  # lognormal durations for the rewards
SHARES = (0.1, 0.3, 0.5)
LEAST_CELLS = 20  # of a lag that is judged by itself


def measure(options: argparse.Namespace, result: Result) -> None:
    import torch

    torch.set_num_threads(1)
    seeds = 1 if options.quick else options.seeds
    until = 10.0 if options.quick else options.time
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        if options.smollm2:
            pretrained(3 if options.quick else options.versions, result)
            return
        model = tiny_model(Path(folder) / "model", seed=1, hidden=32)
        found = forecasts(model, seeds, until, result)
        rewards(model, seeds, until, found.limit or 0.04, (0, 1) if options.quick else LAGS, result)


# ------------------------------------------------------------------------------------------------------- forecast


def forecasts(model: Path, seeds: int, until: float, result: Result) -> Calibration:
    low, high = (math.log(one) for one in SPREAD)
    load = small(model, lambda rng: math.exp(rng.uniform(low, high)))
    # So much room that sampling keeps pace with training: with more, all groups would wait for as long as it lets them.
    pace = round((SPREAD[1] - SPREAD[0]) / (high - low)) - 1
    cells: list[Cell] = []
    for seed in range(seeds):
        cells += cells_of(World(load, settings(GROUPS, SIBLINGS, pace), seed).run(until))
    found = of_cells(cells, None)
    told(found, "small model", result)
    for share in SHARES:
        for name, key in (("by forecast", by_forecast), ("by lag", by_lag)):
            result.row(f"realised drift left where {share:.0%} is masked", name, left(cells, key, share),
                       "nats squared")  # fmt: skip
    result.at_least("pooled rank correlation of forecast with realised drift", found.correlation, 0.9)
    within = [one.correlation for one in found.lags if one.cells >= LEAST_CELLS and one.correlation is not None]
    result.at_least("rank correlation within each lag, the least (lag's own: 0)", min(within, default=None), 0.01)
    return found


def cells_of(ran: Ran) -> list[Cell]:
    """Of one run, each over that run's floor."""
    floor = calibrated(ran.versions, 0.0).floor or 0.0
    return [Cell(v.parent, v.parent - one.version, one.tokens, one.estimated, one.second_moment - floor)
            for v in ran.versions for one in v.realised
            if one.version < v.parent and one.estimated is not None]  # fmt: skip


def told(found: Calibration, subject: str, result: Result) -> None:
    result.row("cells", subject, found.cells)
    for name, value in (("forecast", found.correlation), ("lag", found.lag_correlation)):
        result.row("rank correlation with realised drift, pooled", f"{subject}: {name}",
                   "none" if value is None else value)  # fmt: skip
    for one in found.lags:
        if one.cells >= LEAST_CELLS and one.correlation is not None:
            result.row("rank correlation of the forecast within a lag", f"{subject}: lag {one.lag}", one.correlation)
    for one in found.lags:
        if one.lag in (1, 2, 4, 8, 16):
            result.row("realised drift", f"{subject}: lag {one.lag}", one.realised, "nats squared")
            result.row("forecast drift", f"{subject}: lag {one.lag}", one.forecast, "nats squared")
    if found.factor is not None:
        result.row("realised over forecast", subject, found.factor)
    if found.limit is not None:
        result.row("limit that it suggests", subject, found.limit, "nats squared")


def by_forecast(one: Cell) -> float:
    return one.forecast


def by_lag(one: Cell) -> float:
    return float(one.lag)


def left(cells: Sequence[Cell], key: Callable[[Cell], float], share: float) -> float:
    """Token mean of the realised drift that is left where the `share` of tokens with the greatest keys is masked; of
    those with equal keys all alike, as if by chance."""
    total = sum(one.tokens for one in cells)
    out, kept, drift = share * total, 0.0, 0.0
    for value in sorted({key(one) for one in cells}, reverse=True):
        own = [one for one in cells if key(one) == value]
        tokens = sum(one.tokens for one in own)
        stays = 1 - min(1.0, out / tokens)
        out -= (1 - stays) * tokens
        kept += stays * tokens
        drift += stays * sum(one.tokens * one.realised for one in own)
    return drift / kept


# --------------------------------------------------------------------------------------------------------- reward


def rewards(model: Path, seeds: int, until: float, limit: float, lags: Sequence[int], result: Result) -> None:
    load = small(model, lambda rng: MEDIAN * math.exp(SIGMA * rng.normal()))
    most, some = max(lags), sorted(lags)[-2]
    arms: dict[str, list[Ran]] = {f"lag {lag}": [] for lag in lags}
    drift = {lag: f"drift limit, max_lag {lag}" for lag in dict.fromkeys((some, most))}
    cut = f"lag cut-off that masks as much, max_lag {most}"
    arms |= {name: [] for name in (*drift.values(), cut)}

    def once(max_lag: int, seed: int, **staleness: object) -> Ran:
        return World(load, settings(GROUPS, SIBLINGS, max_lag, **staleness), seed).run(until)

    for seed in range(seeds):
        for lag in lags:
            arms[f"lag {lag}"].append(once(lag, seed))
        for lag, name in drift.items():
            arms[name].append(once(lag, seed, rule="limit", drift_limit=limit, ramp_from=0.0))
        rules = settings(GROUPS, SIBLINGS, most)
        hard = cutoff(arms[drift[most]][-1])  # may be below max_lag, which settings refuse: that alone would be waste
        limits = rules.staleness.model_copy(update={"hard_lag": hard})
        arms[cut].append(World(load, rules.model_copy(update={"staleness": limits}), seed).run(until))
    for name, runs in arms.items():
        result.row("reward at equal wall-clock", name, harness.spread([one.reward for one in runs]))
    for name, runs in arms.items():
        result.row("versions made", name, float(np.mean([len(one.versions) for one in runs])))
    for name, runs in arms.items():
        result.row("tokens with weight, a unit of time", name, float(np.mean([one.trained for one in runs])))
    for name, runs in arms.items():
        result.row("tokens too stale to train", name, 100 * float(np.mean([one.masked for one in runs])), "%")
    first = [one.reward for one in arms["lag 0"]]
    bar = float(np.mean(first)) - error(first)
    good = [f"lag {lag}" for lag in lags if mean_of(arms[f"lag {lag}"]) >= bar]
    fastest = max(float(np.mean([one.trained for one in arms[name]])) for name in good)
    result.row("reward of lag 0 minus one standard error", "lag 0", bar)
    result.note(f"Fixed lags whose reward is at least that: {', '.join(good)}; {fastest:.1f} tokens a unit of time at "
                f"most. {seeds} seeds, {until:g} units of time, drift limit {limit:.4f}.")  # fmt: skip
    held = [name for name in drift.values() if mean_of(arms[name]) >= bar]
    result.at_least("throughput of the drift limit, over the best such fixed lag's",
                    max((float(np.mean([one.trained for one in arms[name]])) / fastest for name in held),
                        default=None), 1.0)  # fmt: skip
    result.at_least("reward of the drift limit minus that of the lag cut-off that masks as much",
                    mean_of(arms[drift[most]]) - mean_of(arms[cut]), 0.0)  # fmt: skip


def cutoff(ran: Ran) -> int:
    """The lag beyond which lies about the share of its tokens that it masked."""
    lags = np.array([lag for lag, _ in ran.trained_lags + ran.stale_lags])
    tokens = np.array([count for _, count in ran.trained_lags + ran.stale_lags])
    return min(range(int(lags.max()) + 1), key=lambda lag: abs(tokens[lags > lag].sum() / tokens.sum() - ran.masked))


def mean_of(runs: Sequence[Ran]) -> float:
    return float(np.mean([one.reward for one in runs]))


def error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


# --------------------------------------------------------------------------------------------------------- models


def step(share: float, peak: float) -> StepSettings:
    """At that share of the time."""
    fall = LAST + (1 - LAST) * (1 + math.cos(math.pi * max(0.0, share - WARM) / (1 - WARM))) / 2
    rate = peak * min(1.0, (share + 0.02) / WARM) * fall
    return StepSettings(learning_rate=rate, micro_batch_tokens=1024, probe_tokens=192, mask_below=0.125, mask_above=8.0)


def small(model: Path, duration: Callable[[np.random.Generator], float]) -> Load:
    return Load(model, 64, TOKENS, 64, 1.0, duration, functools.partial(step, peak=PEAK))


def fixed(lag: int, rng: np.random.Generator) -> float:
    """All groups take as long as so many steps: with room for as many batches, that is their lag."""
    return lag + 0.5 + 0.1 * float(rng.random())


def pretrained(versions: int, result: Result) -> None:
    try:
        model = smollm2(home() / "models")
    except ModelError as error:
        raise CannotMeasure(str(error)) from error
    for lag in (0, 4, 16):
        load = Load(model, 16, 24, 256, 1.0, functools.partial(fixed, lag), functools.partial(step, peak=1e-5))
        ran = World(load, settings(2, SIBLINGS, lag), 0).run(1e9, versions)
        told(calibrated(ran.versions, 0.0), f"SmolLM2-135M, max_lag {lag}", result)
        result.row("reward of the last version", f"SmolLM2-135M, max_lag {lag}", ran.reward)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="of each arm (%(default)s)")
    parser.add_argument("--time", type=float, default=120.0, help="of each arm, in training steps (%(default)g)")
    parser.add_argument("--smollm2", action="store_true", help="the forecast on SmolLM2-135M instead")
    parser.add_argument("--versions", type=int, default=40, help="with --smollm2: trained at each lag (%(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("staleness", __doc__, measure, argv, _arguments, packages=("torch", "transformers"))


if __name__ == "__main__":
    raise SystemExit(main())
