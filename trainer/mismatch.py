"""Decides which figures say how far the trained policy is from the one that sampled, and what the weights do about it.

Nothing here changes what is trained, so nothing is clamped that needn't be: an infinite log-probability shows as one.
Pure functions; log-probabilities [k] in nats of one batch's tokens; float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .corrections import ratios
from .reductions import Tokens


@dataclass(frozen=True, slots=True)
class Mismatch:
    """log_ratio = log pi - log mu. Over the used tokens: `kl` the mean of -log_ratio and `kl_k3` that of its k3, both
    for KL(mu || pi); `ratio` the mean ratio (1 where the two agree: the bias that is left), `chi2` the mean square of
    the ratio - 1, `chi2_episode` that of the episode's. By episode, [episodes]: mean log-probability under each."""

    kl: float
    kl_k3: float
    ratio: float
    chi2: float
    chi2_episode: float
    current: torch.Tensor
    behaviour: torch.Tensor


def mismatch(tokens: Tokens, current: torch.Tensor, behaviour: torch.Tensor) -> Mismatch:
    """chi2 clamps its log-ratios at +-20 as weights do, the rest doesn't.

    Source: k1 and k3 Schulman 2020; chi2 and what it says of weights' variance: Owen, "Monte Carlo theory", section
    9.1.
    """
    x = current.detach().double() - behaviour.double()
    token, episode = ratios(tokens, x), ratios(tokens, x, "sequence")
    per_episode = tokens.means(episode.square())[tokens.present()]
    return Mismatch(
        kl=float(tokens.mean(-x)),
        kl_k3=float(tokens.mean(x.exp() - x - 1)),
        ratio=float(tokens.mean(token)),
        chi2=float(tokens.mean(token.square())) - 1,
        chi2_episode=float(per_episode.mean()) - 1 if len(per_episode) else 0.0,
        current=tokens.means(current.detach()),
        behaviour=tokens.means(behaviour),
    )


def effective_share(weights: torch.Tensor) -> float:
    """Effective sample size as a share of k: (sum w)^2 / (k sum w^2), float64 [k]; 0 where all are 0.

    Source: Kish 1965; Owen, "Monte Carlo theory", section 9.3.
    """
    squares = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares > 0 else 0.0
