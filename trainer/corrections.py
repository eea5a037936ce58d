"""Decides how much a token counts that another policy than the one being trained has sampled.

The ratio is pi / mu: pi the served weights of the target version (the forward at the start of the step, detached), mu
the recorded behaviour log-probability. It covers staleness and engine mismatch alike. Pure functions, float64.
"""

from __future__ import annotations

import torch

from headrace.schemas.errors import SettingsError

# A log-ratio beyond it is clamped, so that exp stays finite in any type: e^20 is far beyond every cap in use.
CLAMP = 20.0


def log_ratio(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """log pi - log mu, clamped at +-20; [k] -> float64 [k], without gradient."""
    return (current.detach().double() - behaviour.double()).clamp(-CLAMP, CLAMP)


def truncate(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(ratio, high): a bounded variance for a small bias.

    Source: truncated importance sampling (Ionides 2008); per token for engine mismatch in "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    """
    return ratio.clamp(max=high)


def mask(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The ratio where low <= ratio <= high, else 0: a token that the two policies disagree on teaches nothing.

    Source: IcePop, in "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (Ring-1T, arXiv:2510.18855), section 3.
    """
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def none(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """1 everywhere: as if the target version had sampled every token."""
    return torch.ones_like(ratio)


RULES = {"truncate": truncate, "mask": mask, "none": none}


def weights(rule: str, ratios: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The constant that multiplies each token's gradient, by the named rule; ratios float64 [k] -> float64 [k] >=
    0."""
    if rule not in RULES:
        raise SettingsError(f"correction = {rule!r}: expected one of {', '.join(RULES)}")
    return RULES[rule](ratios, low, high)
