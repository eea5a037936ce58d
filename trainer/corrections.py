"""Decides how much a token counts that another policy than the one being trained has sampled.

The ratio is pi / mu: pi the served weights of the target version (the forward at the start of the step, detached), mu
the recorded behaviour log-probability. It covers staleness and engine mismatch alike. Weights are constants: they carry
no gradient. A token that they mask leaves the numerator alone; the denominators stay (`losses.token_shares`) unless
`reject_shrinks` is set. What combines with what is in `combinations`. Pure functions, float64 [k].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.schemas.errors import SettingsError

from . import rejection
from .reductions import CLAMP, Tokens
from .rejection import Rejection

# A mean weight below it is no divisor: then nothing is normalised (as in verl).
SMALLEST_MEAN = 1e-8

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Correction:
    """What weighs a token by its ratio, and what rejects it. Nothing acts by default.

    Weight: `ratio` at the level `ratio_level`, masked outside [mask_below, mask_above], then truncated to
    [truncate_below, truncate_above], then divided by the mean where `normalise` is set. Rejection (`rejection`): every
    rule of `reject`, the vetoes, `opsm_delta`, `m2_limit`. Limits of None don't act.
    """

    weigh: bool = True  # False: the ratio is not a weight (every weight 1); rejection still acts
    ratio_level: str = "token"  # token | sequence | geometric
    truncate_below: float = 0.0
    truncate_above: float | None = None
    mask_below: float = 0.0
    mask_above: float | None = None
    normalise: bool = False
    reject: tuple[Rejection, ...] = ()
    veto_below: float = 0.0
    veto_above: float | None = None
    opsm_delta: float | None = None
    m2_limit: float | None = None
    reject_shrinks: bool = False  # True: rejected tokens leave the denominators too

    @property
    def of_the_batch(self) -> bool:
        """Whether a token's weight depends on tokens of other episodes, or the denominators on the ratios: then all of
        the batch must be scored before any of it is trained."""
        return self.normalise or self.m2_limit is not None or self.reject_shrinks


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """weights float64 [k], 0 for every token that isn't used, is masked by its ratio, or is rejected; masked by its
    ratio, and rejected by rule, each bool [k] over used tokens, in the order in which rules are asked."""

    weights: torch.Tensor
    masked: torch.Tensor
    rejected: dict[str, torch.Tensor]

    def kept(self, tokens: Tokens) -> Tokens:
        """The tokens that no rule rejects (those masked by their ratio included)."""
        for out in self.rejected.values():
            tokens = tokens.only(~out)
        return tokens


def difference(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """log pi - log mu, [k] -> float64 [k], without gradient and not yet clamped."""
    return current.detach().double() - behaviour.double()


def log_ratio(current: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """log pi - log mu, clamped at +-20; [k] -> float64 [k], without gradient."""
    return difference(current, behaviour).clamp(-CLAMP, CLAMP)


def ratios(tokens: Tokens, log_ratios: torch.Tensor, level: str = "token") -> torch.Tensor:
    """pi / mu of each token, or of its whole episode: float64 [k] -> float64 [k]. Clamped at e^+-20 after the sum or
    the mean, so that one wild token can't hide behind another. Raises SettingsError for a level that isn't there.

    token: pi / mu of the token: biased beyond one token, low variance (as PPO's, arXiv:1707.06347).
    sequence: the product over the episode's used tokens: unbiased, variance grows with the length.
    geometric: the product's n-th root, as in GSPO (arXiv:2507.18071), equation 7: length takes no part.
    """
    if level == "token":
        exact = log_ratios
    elif level == "sequence":
        exact = tokens.spread(tokens.sums(log_ratios))
    elif level == "geometric":
        exact = tokens.spread(tokens.means(log_ratios))
    else:
        raise SettingsError(f"ratio_level = {level!r}: expected one of {', '.join(LEVELS)}")
    return exact.double().clamp(-CLAMP, CLAMP).exp()


def truncate(ratio: torch.Tensor, above: float, below: float = 0.0) -> torch.Tensor:
    """min(max(ratio, below), above): a bounded variance for a small bias. A lower bound above 0 lifts tokens that the
    policy no longer produces: it is biased towards them (OpenRLHF, slime's `clip`).

    Source: truncated importance sampling (Ionides 2008); per token for engine mismatch in "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    """
    return ratio.clamp(min=below, max=above)


def mask(ratio: torch.Tensor, below: float, above: float) -> torch.Tensor:
    """The ratio where below <= ratio <= above, else 0: a token that the two policies disagree on teaches nothing. What
    isn't a number stays none, so that it can't pass for a masked token.

    Source: IcePop, in "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (Ring-1T, arXiv:2510.18855), section 3; of sequences (MIS) "When Speed Kills Stability" (Liu et al. 2025).
    """
    return torch.where((ratio < below) | (ratio > above), torch.zeros_like(ratio), ratio)


def weights(
    ratios: torch.Tensor, truncate_above: float | None, mask_below: float, mask_above: float | None,
    truncate_below: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The constant that multiplies each token's gradient: masked, then truncated; a limit of None doesn't act. A masked
    token isn't lifted by `truncate_below`. Ratios float64 [k] -> float64 [k] >= 0."""
    outside = (ratios < mask_below) | (ratios > (math.inf if mask_above is None else mask_above))
    bounded = truncate(ratios, math.inf if truncate_above is None else truncate_above, truncate_below)
    return torch.where(outside, torch.zeros_like(bounded), bounded)


def mean_weight(tokens: Tokens, weight: torch.Tensor, level: str) -> torch.Tensor:
    """Of weights float64 [k]: over used tokens, or, for weights of whole episodes, over episodes that have one; float64
    []. Masked weights count as 0."""
    if level == "token":
        return tokens.mean(weight)
    return tokens.means(weight)[tokens.present()].mean() if bool(tokens.present().any()) else weight.new_zeros(())


def normalise(tokens: Tokens, weight: torch.Tensor, level: str) -> torch.Tensor:
    """weight / mean weight: the size of the step no longer depends on how far off the batch is. The mean is over the
    whole batch, after truncation and before rejection (as in verl's rollout correction); a weight may then exceed its
    cap. float64 [k] -> float64 [k].

    Source: self-normalised importance sampling (Owen, "Monte Carlo theory", section 9.2).
    """
    mean = mean_weight(tokens, weight, level)
    return weight / mean if bool(mean > SMALLEST_MEAN) else weight


def correct(tokens: Tokens, log_ratios: torch.Tensor, advantages: torch.Tensor, rules: Correction) -> Corrected:
    """Weights and rejections of all the tokens that the rules may see together. log_ratios (`difference`) and
    advantages float64 [k], constants."""
    if rules.weigh:
        ratio = ratios(tokens, log_ratios, rules.ratio_level)
        weight = weights(ratio, rules.truncate_above, rules.mask_below, rules.mask_above, rules.truncate_below)
    else:
        weight = torch.ones_like(log_ratios, dtype=torch.float64)
    zero = torch.zeros_like(weight)
    weight = torch.where(tokens.used, weight, zero)
    masked = tokens.used & (weight == 0)
    if rules.normalise:
        weight = normalise(tokens, weight, rules.ratio_level)
    rejected: dict[str, torch.Tensor] = {}
    if rules.reject:
        rejected["rejected"] = ~rejection.kept(tokens, log_ratios, rules.reject)
    if rules.veto_below > 0 or rules.veto_above is not None:
        rejected["veto"] = ~rejection.unvetoed(tokens, log_ratios, rules.veto_below, rules.veto_above)
    if rules.opsm_delta is not None:
        rejected["opsm"] = ~rejection.opsm(tokens, log_ratios, advantages, rules.opsm_delta)
    if rules.m2_limit is not None:
        rejected["m2"] = ~rejection.m2_kept(tokens, log_ratios, rules.m2_limit)
    rejected = {name: out & tokens.used for name, out in rejected.items()}
    for out in rejected.values():
        weight = torch.where(out, zero, weight)
    return Corrected(weight, masked, rejected)
