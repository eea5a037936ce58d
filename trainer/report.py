"""Decides what a step says of itself: tokens trained and masked by rule, lags, sizes of weights, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from .alignment import Verdict
from .batches import Group, counted
from .drift import LagStatistics, lag_statistics
from .mismatch import effective_share, mismatch
from .reductions import Tokens
from .reused import ReusedCounts


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Model tokens of one group's episodes: trained, and masked by rule ("stale": staleness weight 0, episodes dropped
    for it too; "ratio": correction weight 0; and those of the rejections that are set)."""

    group_id: str
    trained: int
    masked: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one version's training came to; recorded in `Version`."""

    version: int  # the version that this step made
    loss: float  # mean over its optimizer steps, penalties included
    grad_norm: float  # before clipping; mean over its optimizer steps
    learning_rate: float
    reward_mean: float  # over counted episodes
    groups: tuple[GroupCounts, ...]
    lags: tuple[LagStatistics, ...]  # by behaviour version, ascending
    ess: float  # effective sample size of the correction's weights, as a share of the trained tokens
    rho: float  # RMS change of log-probability, nats, from the version before to this one, on the probe; noise removed
    probe_tokens: int  # how many model tokens rho rests on
    row_tokens: int  # tokens that went through the forward pass
    seconds: dict[str, float]  # forward, backward, optimizer (clipping too), rounding to what is served, probe
    reused: tuple[ReusedCounts, ...] = ()
    optimizer_steps: int = 1  # inside this version
    clipped: float = 0.0  # share of the tokens scored that the objective's clip held back, over all optimizer steps
    penalty: float = 0.0  # mean KL estimate per token before its coefficient, over all optimizer steps
    rho_noise: float = 0.0  # RMS difference of two equivalent forwards on the probe, nats
    alignment: Verdict | None = None  # of the engine; None: no episode was sampled by the target version alone
    figures: dict[str, float] = field(default_factory=dict)  # of the mismatch: ratio_mean, kl_k3, chi2, weight_mean


@dataclass(frozen=True, slots=True)
class Scored:
    """Every model token of the batch's counted episodes, in their order, as the version began; arrays [k]."""

    current: NDArray[np.float64]  # log-probability under the served weights of the target version
    behaviour: NDArray[np.float32]
    log_ratio: NDArray[np.float64]  # clamped
    staleness: NDArray[np.float32]
    correction: NDArray[np.float64]  # weight before rejection is 0 where the ratio masks, and where a rule rejects
    versions: NDArray[np.int32]
    episode: NDArray[np.int64]
    rejected: dict[str, NDArray[np.bool_]]

    def part(self, start: int, stop: int, first: int) -> Scored:
        """Tokens `start` to `stop`, their episodes counted from `first`."""
        own = slice(start, stop)
        return Scored(self.current[own], self.behaviour[own], self.log_ratio[own], self.staleness[own],
                      self.correction[own], self.versions[own], self.episode[own] - first,
                      {rule: out[own] for rule, out in self.rejected.items()})  # fmt: skip

    @staticmethod
    def joined(parts: Sequence[Scored]) -> Scored:
        columns = {name: np.concatenate([getattr(part, name) for part in parts])
                   for name in ("current", "behaviour", "log_ratio", "staleness", "correction", "versions", "episode")}
        rejected = {rule: np.concatenate([part.rejected[rule] for part in parts]) for rule in parts[0].rejected}
        return Scored(**columns, rejected=rejected)


def group_counts(groups: Sequence[Group], scored: Scored) -> tuple[GroupCounts, ...]:
    """Trained and masked tokens of each group; a masked one counts for the first rule that masks it."""
    number = [index for index, group in enumerate(groups) for episode in group.episodes if episode.counted]
    group_of = np.array(number)[scored.episode]
    left = np.ones(len(group_of), np.bool_)
    rules = {"stale": scored.staleness == 0, **scored.rejected, "ratio": scored.correction == 0}
    own_rule = {}
    for rule, out in rules.items():  # each token by the first rule that masks it
        own_rule[rule] = left & out
        left = left & ~out
    counts = []
    for index, group in enumerate(groups):
        own = group_of == index
        masked = {rule: int((own & out).sum()) for rule, out in own_rule.items()}
        masked["stale"] += sum(int(one.column("mask").sum()) for one in group.episodes if one.dropped)
        counts.append(GroupCounts(group.group_id, int((own & left).sum()), masked))
    return tuple(counts)


def lags_of(scored: Scored) -> tuple[LagStatistics, ...]:
    """Log-ratios of the scored tokens, by the version that sampled them."""
    return lag_statistics(scored.log_ratio, scored.versions, scored.episode)


def effective(scored: Scored) -> float:
    """Of the correction's weights of the tokens that aren't stale."""
    return effective_share(torch.from_numpy(scored.correction[scored.staleness > 0]))


def figures(groups: Sequence[Group], scored: Scored) -> dict[str, float]:
    """How far the trained policy is from those that sampled, and the mean weight that is left: 1 where nothing is
    biased."""
    used = torch.from_numpy(scored.staleness > 0)
    if not bool(used.any()):
        return {}
    tokens = Tokens(torch.from_numpy(scored.episode), used, len(counted(groups)))
    found = mismatch(tokens, torch.from_numpy(scored.current), torch.from_numpy(scored.behaviour))
    values = {"ratio_mean": found.ratio, "kl_k3": found.kl_k3, "chi2": found.chi2,
              "weight_mean": float(tokens.mean(torch.from_numpy(scored.correction)))}  # fmt: skip
    return {name: value for name, value in values.items() if np.isfinite(value)}  # k3 isn't clamped
