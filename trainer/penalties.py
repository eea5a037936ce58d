"""Decides what moving away from another policy costs: an estimate of KL(pi || reference) at each sampled token, added
to the loss. The reference is version 0, or the behaviour policy. Pure functions; [k] in, float64 [k] out,
differentiable.

The values estimate KL where pi itself sampled. As losses they differ: k1's gradient is that of log pi, 0 in
expectation, so k1 as a loss restrains nothing; k2's is unbiased; k3's is biased towards the reference
(arXiv:2506.09477).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.schemas.errors import SettingsError

from .reductions import CLAMP

# k3 grows like e^x: its value is bounded, as in verl, TRL's successors and NeMo-RL.
K3_LIMIT = 10.0


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log pi - log ref."""
    return logprobs.double() - reference.double()


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(log pi - log ref)^2 / 2. Towards the behaviour policy with coefficient 2 * tau it is prime-rl's KL loss
    (Kimi K2.5, arXiv:2602.02276)."""
    return k1(logprobs, reference).square() / 2


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """e^x - 1 - x with x = log ref - log pi clamped at +-20; the value at +-10."""
    x = (reference.double() - logprobs.double()).clamp(-CLAMP, CLAMP)
    return (x.exp() - x - 1).clamp(-K3_LIMIT, K3_LIMIT)


def absolute(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|log pi - log ref|."""
    return k1(logprobs, reference).abs()


# Source of k1, k2, k3: Schulman, "Approximating KL Divergence" (2020).
KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1, "k2": k2, "k3": k3, "abs": absolute,
}  # fmt: skip


def penalty(kind: str, logprobs: torch.Tensor, reference: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """By the settings, 0 where used bool [k] is False. Raises SettingsError for a kind that isn't there."""
    if kind not in KINDS:
        raise SettingsError(f"kl = {kind!r}: expected one of {', '.join(KINDS)}")
    zero = torch.zeros(used.shape, dtype=torch.float64, device=used.device)
    exact = torch.where(used, logprobs.double(), zero)
    return torch.where(used, KINDS[kind](exact, torch.where(used, reference.double(), zero)), zero)
