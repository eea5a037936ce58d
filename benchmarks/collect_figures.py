"""From simulated runs to figures: what is kept of each, and how seeds become a mean with its interval."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .collect_arms import Arm
from .collect_load import Load, source_of
from .collect_parameters import HARD_LAG, Cell
from .collect_virtual import Outcome, simulate
from .harness import Spread

CONFIDENCE = 1.96  # standard errors: the mean's 95 % interval


@dataclass(frozen=True, slots=True)
class Job:
    """One simulated run. `files`: trials and steps, or None for the fitted distributions."""

    seed: int
    cell: Cell
    arm: Arm
    slots: int
    batches: int
    files: tuple[Path, Path] | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds, lengths in model tokens and in agent seconds of the trace, ages of carried-over groups (begun
    before the batch that they are in was begun) in batches and in seconds."""

    first: float
    steady: float
    lags: tuple[int, ...]  # of each batched group
    busy: float  # share of the slots' time
    sandboxes: int
    found: float  # share of prompt tokens in the prefix cache
    sampled: tuple[float, float]  # mean length of all episodes that began: tokens, seconds
    trained: tuple[float, float]
    by_batch: tuple[float, ...]  # mean tokens of each batch's episodes
    late: float  # interval between the later half of the batches
    ages: tuple[int, ...]
    ages_s: tuple[float, ...]


def summary(load: Load, outcome: Outcome, slots: int) -> Summary:
    def lengths(groups: Sequence[int]) -> tuple[float, float]:
        episodes = [one for group in groups for one in load.group(group)]
        return (statistics.fmean(one.length for one in episodes), statistics.fmean(one.agent_s for one in episodes))

    begun = [load.group(group)[slot] for group, slot in outcome.sampled]
    batched = [group for batch in outcome.batches for group in batch.groups]
    carried = [(number - outcome.began[group][1], batch.at - outcome.began[group][0])
               for number, batch in enumerate(outcome.batches) for group in batch.groups
               if outcome.began[group][1] < number]  # fmt: skip
    count = len(outcome.batches)
    return Summary(
        outcome.first, outcome.interval() if count > 1 else math.nan,
        tuple(lag for batch in outcome.batches for lag in batch.lags),
        outcome.busy / (slots * outcome.batches[-1].at), outcome.sandboxes,
        outcome.found_tokens / outcome.prompt_tokens,
        (statistics.fmean(one.length for one in begun), statistics.fmean(one.agent_s for one in begun)),
        lengths(batched), tuple(lengths(batch.groups)[0] for batch in outcome.batches),
        outcome.interval(count // 2) if count > 2 else math.nan,
        tuple(age for age, _ in carried), tuple(age for _, age in carried),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _load(files: tuple[Path, Path] | None, seed: int) -> Load:
    return Load(source_of(*files) if files else source_of(None, None), seed)


def run(job: Job) -> Summary:
    load = _load(job.files, job.seed)
    return summary(load, simulate(load, job.cell, job.arm, job.slots, job.batches), job.slots)


def run_all(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Summary]]:
    """Each once; those of one seed one after another, since they share its load."""
    todo = sorted(dict.fromkeys(jobs), key=lambda job: (str(job.files), job.seed))
    if processes == 1:
        yield from ((job, run(job)) for job in todo)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from zip(todo, pool.map(run, todo, chunksize=8), strict=True)


class Journal:
    """Finished runs in a file, one a line, so that a long benchmark may be stopped and taken up again. Whoever changes
    what is simulated takes another file."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._known = file, dict[str, Summary]()
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                name, values = json.loads(line)
                fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                                          for key, value in values.items()}  # fmt: skip
                self._known[name] = Summary(**fields)

    def find(self, job: Job) -> Summary | None:
        return self._known.get(repr(job))

    def add(self, job: Job, one: Summary) -> None:
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps([repr(job), dataclasses.asdict(one)]) + "\n")


def mean(values: Sequence[float]) -> Spread:
    """Mean, and the ends of its 95 % interval over the seeds."""
    middle = statistics.fmean(values)
    half = CONFIDENCE * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Spread(middle, middle - half, middle + half)


def sooner(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Percent, seed by seed: the same trajectories in both."""
    return mean([100 * (1 - a / b) for a, b in zip(ours, theirs, strict=True)])


def p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else 0.0


def beyond(lags: Sequence[int]) -> float:
    """Percent of groups with a token older than the default limit."""
    return 100 * sum(lag > HARD_LAG for lag in lags) / len(lags)
