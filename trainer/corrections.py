"""Decides how much a token counts that another policy than the one being trained has sampled.

The ratio is pi / mu: pi the served weights of the target version (the forward at the start of the step, detached), mu
the recorded behaviour log-probability. It covers staleness and engine mismatch alike. Pure functions, float64.
"""

from __future__ import annotations

import math

import torch

# A log-ratio beyond it is clamped, so that exp stays finite in any type: e^20 is far beyond every cap in use.
CLAMP = 20.0


def log_ratio(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """log pi - log mu, clamped at +-20; [k] -> float64 [k], without gradient."""
    return (current.detach().double() - behaviour.double()).clamp(-CLAMP, CLAMP)


def truncate(ratio: torch.Tensor, above: float) -> torch.Tensor:
    """min(ratio, above): a bounded variance for a small bias.

    Source: truncated importance sampling (Ionides 2008); per token for engine mismatch in "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    """
    return ratio.clamp(max=above)


def mask(ratio: torch.Tensor, below: float, above: float) -> torch.Tensor:
    """The ratio where below <= ratio <= above, else 0: a token that the two policies disagree on teaches nothing.

    Source: IcePop, in "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (Ring-1T, arXiv:2510.18855), section 3.
    """
    return torch.where((ratio >= below) & (ratio <= above), ratio, torch.zeros_like(ratio))


def weights(
    ratios: torch.Tensor, truncate_above: float | None, mask_below: float, mask_above: float | None
) -> torch.Tensor:
    """The constant that multiplies each token's gradient: masked, then truncated; a limit of None doesn't act. Ratios
    float64 [k] -> float64 [k] >= 0."""
    kept = mask(ratios, mask_below, math.inf if mask_above is None else mask_above)
    return kept if truncate_above is None else truncate(kept, truncate_above)
