"""Decides what an episode's reward is worth against its siblings'. Pure functions over one group's counted rewards.

Infra failures and surplus reserves have left before: they are in no mean, no deviation and no denominator.
"""

from __future__ import annotations

import torch

from headrace.schemas.errors import SettingsError

# Added to the deviation, so that nearly equal rewards don't become large advantages.
EPSILON = 1e-6


def grpo(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6), with the unbiased deviation; float64 [n] -> float64 [n]. Equal rewards, and a single
    one, give 0: there is nothing to compare.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


def centered(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean, without the division that weighs easy and hard tasks up; float64 [n] -> float64 [n].

    Source: "Understanding R1-Zero-Like Training" (Dr. GRPO, arXiv:2503.20783), section 3.2.
    """
    return rewards - rewards.mean()


RULES = {"grpo": grpo, "centered": centered}


def advantages(rule: str, rewards: torch.Tensor) -> torch.Tensor:
    """Advantages of one group's counted episodes by the named rule; rewards float64 [n], finite."""
    if rule not in RULES:
        raise SettingsError(f"advantage = {rule!r}: expected one of {', '.join(RULES)}")
    return RULES[rule](rewards)
