"""Decides what is minimised: the policy-gradient surrogate and what a batch's sum is divided by. Pure functions.

A version is one optimizer step over its batch (1 minibatch x 1 epoch), so the policy that is differentiated is the
proximal one: their ratio is 1, no clip can act, and none is offered.
"""

from __future__ import annotations

import torch

from headrace.schemas.errors import SettingsError


def surrogate(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """-weight * advantage * exp(logp - stop(logp)) per token; its value is -weight * advantage, its gradient that of
    REINFORCE, -weight * advantage * grad log pi. logprobs [k]; advantages and weights float64 [k], constants; float64
    [k]. A token of weight 0 has no gradient, whatever its log-probability.

    Source: Williams 1992; the surrogate's form as in PPO (arXiv:1707.06347), equation 6, at the first step.
    """
    used = weights != 0
    exact = torch.where(used, logprobs.double(), torch.zeros_like(weights))
    return torch.where(used, -weights * advantages * torch.exp(exact - exact.detach()), torch.zeros_like(weights))


def token_shares(rule: str, lengths: torch.Tensor) -> torch.Tensor:
    """What one token of each episode counts in the batch's loss; lengths int64 [e] (model tokens of the counted
    episodes, masked ones included: masking takes from the numerator alone) -> float64 [e].

    token_mean: 1 / tokens of the batch, every token alike (DAPO, arXiv:2503.14476, section 3.3).
    sequence_mean: 1 / (episodes * tokens of the episode), every episode alike (GRPO, arXiv:2402.03300, equation 3).
    """
    exact = lengths.double()
    if rule == "token_mean":
        return torch.ones_like(exact) / exact.sum().clamp(min=1)
    if rule == "sequence_mean":
        return 1 / ((lengths > 0).sum().clamp(min=1) * exact.clamp(min=1))
    raise SettingsError(f"denominator = {rule!r}: expected token_mean or sequence_mean")
