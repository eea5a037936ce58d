"""Decides what a success that is used again adds to a batch: -share * sum of weight * advantage * grad log pi.

The advantage is the recorded constant. `share` is what a token of it would count among the batch's own, by the
batch's denominator as it is, so the ordinary groups count exactly what they would without it. Ratio and drift are
exact, on served weights at use: beyond the drift limit every token counts 0. Pure functions over tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batches import Episode
from .losses import surrogate, token_shares


@dataclass(frozen=True, slots=True)
class Reused:
    """A recorded success that is trained on once more, beside a group whose attempts all failed."""

    group_id: str  # that group, which is in no batch
    episode: Episode
    advantage: float


@dataclass(frozen=True, slots=True)
class ReusedCounts:
    """Its model tokens: trained, and masked by rule ("mask": its own mask; "drift": beyond the limit; "ratio":
    correction weight 0). `drift`: mean squared log-ratio of target's served weights over behaviour, winsorised at 1."""

    group_id: str
    trained: int
    masked: dict[str, int]
    drift: float


def share(rule: str, lengths: torch.Tensor, own: int, budget: int = 1) -> float:
    """Of one token of a success with `own` model tokens, in a batch whose counted episodes have `lengths` int64 [e].

    token_mean: 1 / tokens of the batch. sequence_mean: 1 / (episodes of the batch * own). Others: as any token's.
    """
    if rule == "sequence_mean":
        return 1 / (max(1, int((lengths > 0).sum())) * max(1, own))
    return float(token_shares(rule, lengths, budget)[0])


def term(one: Reused, logprobs: torch.Tensor, log_ratio: torch.Tensor, allowed: torch.Tensor, correction: torch.Tensor,
         share: float, drift_limit: float) -> tuple[torch.Tensor | None, ReusedCounts]:  # fmt: skip
    """What to add to the loss, float64 [], if anything. Over the success's model tokens: logprobs [k], log_ratio and
    correction float64 [k], allowed bool [k] (its own mask)."""
    drift = float(log_ratio[allowed].abs().clamp(max=1.0).square().mean()) if bool(allowed.any()) else 0.0
    near = drift <= drift_limit
    weight = torch.where(allowed & near, correction, torch.zeros_like(correction))
    trained = int((weight > 0).sum())
    rest = int(allowed.sum()) - trained
    masked = {"mask": int((~allowed).sum()), "drift": 0 if near else rest, "ratio": rest if near else 0}
    counts = ReusedCounts(one.group_id, trained, masked, drift)
    if not trained:
        return None, counts
    return surrogate(logprobs, torch.full_like(weight, one.advantage), weight * share).sum(), counts
