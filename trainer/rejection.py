"""Decides which tokens and episodes are too far off to teach anything, whatever their weight would be.

Each rule looks at the divergence of the two policies on the sampled tokens, by token or over an episode, and keeps or
rejects. All are constants, all must agree for a token to stay, and what is no number is rejected. Log-ratios are
log pi - log mu; they are clamped at +-20 before exp. Pure functions, float64 and bool [k].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.schemas.errors import SettingsError

from .reductions import CLAMP, Tokens


def k1(x: torch.Tensor) -> torch.Tensor:
    """-x: unbiased for KL(mu || pi) where mu sampled, of either sign."""
    return -x.clamp(-CLAMP, CLAMP)


def k2(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: biased, never negative, low variance."""
    return x.clamp(-CLAMP, CLAMP).square() / 2


def k3(x: torch.Tensor) -> torch.Tensor:
    """e^x - 1 - x: unbiased for KL(mu || pi) where mu sampled, never negative."""
    return x.clamp(-CLAMP, CLAMP).exp() - 1 - x.clamp(-CLAMP, CLAMP)


def k3_reverse(x: torch.Tensor) -> torch.Tensor:
    """e^-x - 1 + x: k3 of mu / pi (as AReaL computes it). It grows with what pi made rarer, not with what it made more
    likely."""
    return k3(-x)


def factor(x: torch.Tensor) -> torch.Tensor:
    """e^|x|: by what factor the two differ (NeMo-RL's multiplicative probability error)."""
    return x.abs().clamp(max=CLAMP).exp()


# Source of k1, k2, k3: Schulman, "Approximating KL Divergence" (2020). `ratio` is pi / mu in log space: summed it is
# the product, averaged the geometric mean.
STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ratio": lambda x: x, "k1": k1, "k2": k2, "k3": k3, "k3_reverse": k3_reverse, "factor": factor,
}  # fmt: skip
OVER = ("token", "sum", "mean", "max")


@dataclass(frozen=True)
class Rejection:
    """Reject where the statistic `by`, taken `over` each token or over the episode's used tokens, lies outside
    [below, above] (None: no limit). A limit on `ratio` is a ratio; on the others nats (`factor`: a factor)."""

    by: str
    over: str
    below: float | None = None
    above: float | None = None


def statistic(tokens: Tokens, log_ratios: torch.Tensor, by: str, over: str) -> torch.Tensor:
    """The statistic at each token, that of its episode unless `over` is token; float64 [k]. `ratio` as its logarithm.
    Raises SettingsError for a rule that isn't there."""
    if by not in STATISTICS or over not in OVER:
        raise SettingsError(f"reject by {by!r} over {over!r}: expected one of {', '.join(STATISTICS)}, over one of "
                            f"{', '.join(OVER)}")  # fmt: skip
    values = STATISTICS[by](log_ratios.double())
    if over == "token":
        return values
    taken = {"sum": tokens.sums, "mean": tokens.means, "max": tokens.maxima}[over]
    return tokens.spread(taken(values))


def kept(tokens: Tokens, log_ratios: torch.Tensor, rules: Sequence[Rejection]) -> torch.Tensor:
    """bool [k]: what no rule rejects. An episode without a used token is kept (there is nothing of it to reject).

    Source: sequence rejection sampling, "When Speed Kills Stability" (Liu et al. 2025); the statistics as in verl's
    rollout correction, geometric masks as in prime-rl and SkyRL.
    """
    keep = torch.ones_like(tokens.used)
    for rule in rules:
        value = statistic(tokens, log_ratios, rule.by, rule.over)
        below, above = rule.below, rule.above
        if rule.by == "ratio":
            below, above = (None if limit is None else math.log(limit) if limit > 0 else -math.inf
                            for limit in (below, above))  # fmt: skip
        # Written so that NaN is rejected: it lies within no bounds.
        within = (value >= (-math.inf if below is None else below)) & (value <= (math.inf if above is None else above))
        if rule.over != "token":
            within = within | ~tokens.spread(tokens.present())
        keep = keep & within
    return keep


def unvetoed(tokens: Tokens, log_ratios: torch.Tensor, below: float, above: float | None) -> torch.Tensor:
    """bool [k]: False for all of an episode in which one token's ratio is under `below` or over `above`: a context that
    one of the policies can hardly have produced.

    Source: the veto of verl's rollout correction (removed there later) and of slime's; with both bounds SkyRL's outlier
    mask and prime-rl's sequence mask.
    """
    wild = torch.zeros_like(tokens.used)
    if below > 0:
        wild = wild | (log_ratios < math.log(below))
    if above is not None:
        wild = wild | (log_ratios > math.log(above))
    wild = (wild | torch.isnan(log_ratios)) & tokens.used
    return tokens.spread(tokens.sums(wild.double())) == 0


def opsm(tokens: Tokens, log_ratios: torch.Tensor, advantages: torch.Tensor, delta: float) -> torch.Tensor:
    """Off-policy sequence mask, bool [k]: False for an episode with a negative advantage whose mean log mu - log pi
    exceeds `delta`: pushing down what the policy no longer does only does harm.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), off-policy sequence masking.
    """
    far = tokens.means(-log_ratios) > delta
    return ~(tokens.spread(far) & (advantages < 0))


def m2_kept(tokens: Tokens, log_ratios: torch.Tensor, limit: float) -> torch.Tensor:
    """bool [k]: the used tokens that stay when those of the largest squared log-ratio are taken away until the mean
    square of the rest is below `limit`. One at least stays. Over the whole batch; equal ones by their place.

    Source: M2PO (arXiv:2510.01161), as AReaL applies it: whatever the advantage's sign.
    """
    places = tokens.used.nonzero()[:, 0]
    if not len(places):
        return tokens.used
    squares, order = log_ratios.double().clamp(-CLAMP, CLAMP).square()[places].sort(descending=True, stable=True)
    rest = squares.flip(0).cumsum(0).flip(0) / torch.arange(len(places), 0, -1, device=squares.device)
    calm = (rest < limit).nonzero()
    first = int(calm[0]) if len(calm) else len(places) - 1
    keep = torch.zeros_like(tokens.used)
    keep[places[order[first:]]] = True
    return keep


def tv_kept(current: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, low: float, high: float
            ) -> torch.Tensor:  # fmt: skip
    """bool [k]: False where the token's probability has already moved further than allowed in the direction in which
    its advantage pushes: up by more than `high` (advantage > 0), down by more than `low` (advantage <= 0). A bound on
    the probability, not the ratio, leaves rare tokens room. Log-probabilities [k], without gradient.

    Source: DPPO-TV (arXiv:2602.04879), the binary total-variation mask; as in verl and prime-rl.
    """
    moved = current.detach().double().exp() - proximal.detach().double().exp()
    return torch.where(advantages > 0, moved <= high, moved >= -low)
