"""Decides how drift is measured: on which tokens a step's change is probed, what of it is noise, and what a batch's
tokens say of the policies that sampled them.

A step's change is measured on a rolling probe: tokens of the newest batch, from as many groups as fit. Two forwards
that mean the same differ by rounding; so much is taken out of the change, which in bfloat16 would otherwise be rounding
for the most part. The second one has each episode in a row of its own and, where positions are rotary, all positions
moved by `SHIFT`: the rows alone leave most roundings as they were. Pure functions over numpy columns; log-ratios are
those of the target's served weights over behaviour, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import Manifest, RealisedDrift

from .batches import Group

SHIFT = 7  # positions; rotary embeddings know differences alone
WINSOR = 1.0  # nats: a larger |log-ratio| counts as this, so that one wild token can't be all of a second moment


def probe_of(groups: Sequence[Group], budget: int) -> tuple[list[Group], NDArray[np.int64]]:
    """The probe, and the numbers (int64 [p]) of its episodes among the batch's counted ones, ascending. Of each group
    in turn the first counted episode with model tokens, then the second, as long as about `budget` row tokens hold
    them; one at least."""
    numbered: list[list[tuple[int, int]]] = []  # of each group: number in the batch, index in the group
    number = 0
    for group in groups:
        own = []
        for index, episode in enumerate(group.episodes):
            if episode.counted:
                if episode.column("mask").any():
                    own.append((number, index))
                number += 1
        numbered.append(own)
    taken: dict[int, list[tuple[int, int]]] = {}
    used = 0
    for turn in range(max(map(len, numbered), default=0)):
        for at, own in enumerate(numbered):
            if turn >= len(own):
                continue
            episode = groups[at].episodes[own[turn][1]]
            size = sum(len(strand.tokens) for strand in episode.strands)
            size += len(episode.prompt) if at not in taken else 0
            if not taken or used + size <= budget:
                taken.setdefault(at, []).append(own[turn])
                used += size
    probe = [Group(groups[at].group_id, tuple(groups[at].episodes[index] for _, index in sorted(taken[at])))
             for at in sorted(taken)]  # fmt: skip
    return probe, np.array(sorted(n for own in taken.values() for n, _ in own), np.int64)


def change(before: NDArray[np.float64], after: NDArray[np.float64], again: NDArray[np.float64]) -> tuple[float, float]:
    """(rho, noise), both RMS in nats: log-probabilities [k] of the probe under the weights before, under those after,
    and under those after by an equivalent forward. rho^2 = max(0, M2 - n^2), M2 the mean squared change and n^2 the
    mean squared difference of the two forwards."""
    noise = float(np.mean((after - again) ** 2))
    return math.sqrt(max(0.0, float(np.mean((after - before) ** 2)) - noise)), math.sqrt(noise)


@dataclass(frozen=True, slots=True)
class LagStatistics:
    """Log-ratios of the tokens that one version sampled, nats (squared), clamped at +-20."""

    version: int
    tokens: int
    episodes: int
    mean_abs: float
    max_abs: float
    second_moment: float  # of |log-ratio| winsorised at 1
    error: float  # its standard error, clustered by episode; nan: one episode
    raw: float  # the second moment as it is
    k3: float  # mean of ratio - 1 - log-ratio
    beyond: float  # share of the tokens that are winsorised


def lag_statistics(log_ratio: NDArray[np.float64], versions: NDArray[np.int32], episode: NDArray[np.int64]
                   ) -> tuple[LagStatistics, ...]:  # fmt: skip
    """Of a batch's tokens [k], by the version that sampled them, ascending. What is not finite is left out."""
    found = []
    for version in np.unique(versions):
        own = (versions == version) & np.isfinite(log_ratio)
        if not own.any():
            continue
        x, size = log_ratio[own], np.abs(log_ratio[own])
        squares = np.minimum(size, WINSOR) ** 2
        found.append(LagStatistics(
            int(version), len(x), len(np.unique(episode[own])), float(size.mean()), float(size.max()),
            float(squares.mean()), clustered_error(squares, episode[own]), float(np.mean(x**2)),
            float(np.mean(np.expm1(x) - x)), float(np.mean(size > WINSOR)),
        ))  # fmt: skip
    return tuple(found)


def clustered_error(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> float:
    """Standard error of the mean of values [k] whose clusters [k] are independent and whose members aren't: tokens of
    an episode share its context. sqrt(E / (E - 1) sum over the E clusters of (sum of deviations)^2) / k; nan for one.

    Source: Liang and Zeger 1986; Miller, "Adding Error Bars to Evals" (arXiv:2411.00640), section 2.2.
    """
    _, number = np.unique(cluster, return_inverse=True)
    clusters = int(number.max()) + 1
    if clusters < 2:
        return math.nan
    sums = np.bincount(number, values - values.mean(), clusters)
    return math.sqrt(clusters / (clusters - 1) * float(sums @ sums)) / len(values)


def beside_estimated(lags: Sequence[LagStatistics], manifest: Manifest) -> tuple[RealisedDrift, ...]:
    """What a version publishes of its batch: realised drift, and what the manifest had forecast for the same tokens."""
    versions, counts = unpack_int32(manifest.segment_version), unpack_int32(manifest.segment_count)
    forecast = unpack_float32(manifest.segment_drift).astype(np.float64)
    out = []
    for one in lags:
        own = (versions == one.version) & np.isfinite(forecast)
        tokens = int(counts[own].sum())
        out.append(RealisedDrift(
            one.version, one.tokens, one.episodes, one.second_moment,
            one.error if math.isfinite(one.error) else None, one.raw, one.k3, one.max_abs, one.beyond,
            float(counts[own] @ forecast[own]) / tokens if tokens else None,
        ))  # fmt: skip
    return tuple(out)
