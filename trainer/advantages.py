"""Decides what an episode's reward is worth against its siblings'. Pure functions over one group's rewards.

Infra failures and surplus reserves have left before: they are in no mean, no deviation and no denominator. Zero
variance is tested after that, and gives 0, as does a single survivor: there is nothing to compare. Only a group that
was meant to have one episode (`group_size` 1) is worth something alone, against what `lone` is told. Rewards are
float64 and finite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.schemas.errors import SettingsError

# Added to the deviation, so that nearly equal rewards don't become large advantages.
EPSILON = 1e-6
# A variance below this share of the mean square is what rounding leaves of equal rewards.
ROUNDING = 1e-12


def whole_group(rewards: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased deviation of the counted rewards, for each member: rewards float64 [n], counted bool [n] ->
    float64 [n] twice. With fewer than two counted: the reward itself and 0, so that nothing is learned."""
    own = rewards[counted]
    if len(own) < 2:
        return rewards.clone(), torch.zeros_like(rewards)
    return torch.full_like(rewards, float(own.mean())), torch.full_like(rewards, float(own.std()))


def leave_one_out(rewards: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased deviation of the other counted rewards, for each member; shapes as `whole_group`. Of fewer than
    two others the deviation is 0. What stands at a member that isn't counted means nothing.

    Source: RLOO (arXiv:2402.14740); the deviation of the others is NeMo-RL's.
    """
    n = int(counted.sum())
    if n < 2:
        return rewards.clone(), torch.zeros_like(rewards)
    own = torch.where(counted, rewards, torch.zeros_like(rewards))
    mean = (own.sum() - own) / (n - 1)
    square = (own.square().sum() - own.square()) / (n - 1)
    variance = square - mean.square()
    variance = torch.where(variance > ROUNDING * square, variance, torch.zeros_like(variance))
    return mean, torch.zeros_like(mean) if n < 3 else (variance * (n - 1) / (n - 2)).sqrt()


def grpo(rewards: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """(r - mean) / (std + 1e-6), with the unbiased deviation; float64 [n] -> float64 [n]. Equal rewards, and a single
    one, give 0: there is nothing to compare.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. DAPO (arXiv:2503.14476) has the same.
    """
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)


def centered(rewards: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """r - mean, without the division that weighs easy and hard tasks up; float64 [n] -> float64 [n].

    Source: "Understanding R1-Zero-Like Training" (Dr. GRPO, arXiv:2503.20783), section 3.2.
    """
    return rewards - rewards.mean()


def rloo(rewards: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """r - mean of the others = n / (n - 1) * (r - mean): unbiased, since the baseline doesn't hold the reward itself;
    float64 [n] -> float64 [n].

    Source: RLOO (arXiv:2402.14740); "Buy 4 REINFORCE samples" (Kool et al. 2019).
    """
    return rewards - leave_one_out(rewards, torch.ones_like(rewards, dtype=torch.bool))[0]


def rloo_scaled(rewards: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """r - mean of the others, divided by their deviation + epsilon unless that is 0. So the one that alone differs
    isn't divided and its siblings are: NeMo-RL's GRPO default. float64 [n] -> float64 [n].
    """
    mean, deviation = leave_one_out(rewards, torch.ones_like(rewards, dtype=torch.bool))
    return torch.where(deviation > 0, (rewards - mean) / (deviation + epsilon), rewards - mean)


RULES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "grpo": grpo, "centered": centered, "rloo": rloo, "rloo_scaled": rloo_scaled,
}  # fmt: skip
SCALED = ("grpo", "rloo_scaled")
LONE = ("batch_mean", "none")


def advantages(rule: str, rewards: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """Advantages of one group's counted episodes by the named rule; rewards float64 [n], finite. Raises SettingsError
    for a rule that isn't there."""
    if rule not in RULES:
        raise SettingsError(f"advantage = {rule!r}: expected one of {', '.join(RULES)}")
    return RULES[rule](rewards, epsilon)


def lone(rule: str, rewards: torch.Tensor, baseline: str, epsilon: float = EPSILON) -> torch.Tensor:
    """Advantages of groups of one episode, over a batch of them: rewards float64 [b] -> float64 [b].

    batch_mean: r - mean over the batch (REINFORCE with a baseline, Williams 1992). none: r itself. A rule that divides
    by the group's deviation takes 1 for it (so the division is by 1 + epsilon), as verl does. Raises
    SettingsError for a rule that isn't there.
    """
    if baseline not in LONE:
        raise SettingsError(f"lone = {baseline!r}: expected one of {', '.join(LONE)}")
    centred = rewards - rewards.mean() if baseline == "batch_mean" else rewards
    return centred / (1 + epsilon) if rule in SCALED else centred


def of_members(rule: str, rewards: torch.Tensor, counted: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """As `advantages`, of all members of a group: those not counted (infra failures, surplus reserves) leave first and
    get 0. rewards float64 [n], anything where counted bool [n] is False."""
    found = torch.zeros_like(rewards)
    found[counted] = advantages(rule, rewards[counted], epsilon) if bool(counted.any()) else found[counted]
    return found
