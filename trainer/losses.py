"""Decides what is minimised: the policy-gradient objective of each token and what a batch's sum is divided by.

Objectives share one form: log-probabilities under the weights that are differentiated, those of the proximal policy
(the served weights of the target version, or, with `bypass`, the behaviour policy), advantages and weights, which are
constants. With one optimizer step per version and without bypass the proximal policy is the one that is differentiated:
their ratio is 1 and no clip can act (`combinations` warns). A token of weight 0 has neither value nor gradient,
whatever its numbers are. Pure functions; float64 [k] in, float64 [k] out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.schemas.errors import SettingsError

from . import rejection
from .reductions import CLAMP, Tokens

# GSPO clamps the sequence's log-ratio from above only, and tighter (as verl does).
GSPO_CLAMP = 10.0

OBJECTIVES = ("surrogate", "reinforce", "ppo", "gspo", "cispo")
DENOMINATORS = ("token_mean", "sequence_mean", "sequence_sum", "budget")


@dataclass(frozen=True)
class Objective:
    """Which objective, and its limits. Limits of None don't act."""

    objective: str = "surrogate"  # one of OBJECTIVES
    clip_low: float = 0.2  # ratios are clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high (DAPO's clip-higher: 0.28)
    dual_clip: float | None = None  # the most that -ratio * advantage may be where the advantage is negative, > 1
    tv_low: float | None = None  # DPPO-TV: how far a probability may fall while it is pushed down
    tv_high: float | None = None  # and rise while it is pushed up
    bypass: bool = False  # the proximal policy is the behaviour policy


def surrogate(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor,
              proximal: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """-weight * advantage * exp(logp - proximal) per token; without `proximal` exp(logp - stop(logp)), whose value is
    -weight * advantage and whose gradient that of REINFORCE, -weight * advantage * grad log pi. logprobs [k];
    advantages, weights and proximal float64 [k], constants; float64 [k]. A token of weight 0 has no gradient, whatever
    its log-probability.

    Source: Williams 1992; the surrogate's form as in PPO (arXiv:1707.06347), equation 6.
    """
    used = weights != 0
    _, ratio = _ratio(logprobs, proximal, used)
    return torch.where(used, -weights * advantages * ratio, torch.zeros_like(weights))


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """-weight * advantage * logp. Where the weight is the ratio pi / mu of the present policy this is the exact
    off-policy gradient; its value means nothing.

    Source: Williams 1992; with importance weights Precup et al. 2000.
    """
    used = weights != 0
    exact = torch.where(used, logprobs.double(), torch.zeros_like(weights))
    return torch.where(used, -weights * advantages * exact, torch.zeros_like(weights))


def ppo(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, proximal: torch.Tensor | None,
        low: float = 0.2, high: float = 0.2, dual: float | None = None) -> torch.Tensor:  # fmt: skip
    """-weight * min(r * A, clip(r, 1 - low, 1 + high) * A), r = exp(logp - proximal); with `dual` = c at most
    c * |A| where A is negative.

    Source: PPO (arXiv:1707.06347), equation 7; decoupled from the behaviour policy, whose ratio is then the weight:
    "Batch size-invariance for policy optimization" (arXiv:2110.00641); bounds apart: DAPO (arXiv:2503.14476), section
    3.1; dual clip: "Mastering Complex Control in MOBA Games" (arXiv:1912.09729).
    """
    used = weights != 0
    _, ratio = _ratio(logprobs, proximal, used)
    return torch.where(used, weights * _clipped(ratio, advantages, low, high, dual), torch.zeros_like(weights))


def gspo(tokens: Tokens, logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor,
         proximal: torch.Tensor | None, low: float, high: float) -> torch.Tensor:  # fmt: skip
    """PPO's clip of the episode's ratio: s = exp(mean over the episode of logp - proximal), at each token
    stop(s) * exp(logp - stop(logp)). Its mean is over all used tokens of the episode, so an episode must not be cut.
    Defaults of the paper: low 3e-4, high 4e-4, denominator sequence_mean.

    Source: GSPO (arXiv:2507.18071), equations 5, 7 and 14 (GSPO-token).
    """
    used = weights != 0
    exact = torch.where(tokens.used, logprobs.double(), torch.zeros_like(weights))
    before = exact.detach() if proximal is None else torch.where(tokens.used, proximal, exact.detach())
    mean = tokens.spread(tokens.means((exact - before).detach()))
    ratio = (exact - exact.detach() + mean).clamp(max=GSPO_CLAMP).exp()
    return torch.where(used, weights * _clipped(ratio, advantages, low, high, None), torch.zeros_like(weights))


def cispo(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, proximal: torch.Tensor | None,
          low: float, high: float) -> torch.Tensor:  # fmt: skip
    """-weight * stop(clip(r, 1 - low, 1 + high)) * A * logp: the clipped ratio is a constant, so no token loses its
    gradient. Defaults of the paper: no lower bound (low >= 1) and a wide upper one. With `tv_low` and `tv_high` this is
    DPPO-TV with a truncated ratio (verl's `dppo_tv`: high = 19).

    Source: CISPO, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """
    used = weights != 0
    exact, ratio = _ratio(logprobs, proximal, used)
    constant = ratio.detach().clamp(1 - low, 1 + high)
    return torch.where(used, -weights * constant * advantages * exact, torch.zeros_like(weights))


def token_losses(rules: Objective, tokens: Tokens, logprobs: torch.Tensor, advantages: torch.Tensor,
                 weights: torch.Tensor, proximal: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """By the settings; float64 [k]. `proximal` of None: the policy that is differentiated. Raises SettingsError for an
    objective that isn't there."""
    if rules.tv_low is not None or rules.tv_high is not None:
        before = logprobs.detach().double() if proximal is None else proximal
        inside = rejection.tv_kept(logprobs, before, advantages, _or_infinite(rules.tv_low),
                                   _or_infinite(rules.tv_high))  # fmt: skip
        weights = torch.where(inside, weights, torch.zeros_like(weights))
    if rules.objective == "surrogate":
        return surrogate(logprobs, advantages, weights, proximal)
    if rules.objective == "reinforce":
        return reinforce(logprobs, advantages, weights)
    if rules.objective == "ppo":
        return ppo(logprobs, advantages, weights, proximal, rules.clip_low, rules.clip_high, rules.dual_clip)
    if rules.objective == "gspo":
        return gspo(tokens, logprobs, advantages, weights, proximal, rules.clip_low, rules.clip_high)
    if rules.objective == "cispo":
        return cispo(logprobs, advantages, weights, proximal, rules.clip_low, rules.clip_high)
    raise SettingsError(f"objective = {rules.objective!r}: expected one of {', '.join(OBJECTIVES)}")


def clipped(rules: Objective, tokens: Tokens, logprobs: torch.Tensor, advantages: torch.Tensor,
            proximal: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """bool [k]: the used tokens whose ratio the objective's clip holds back (a clipped ratio makes the loss greater,
    or, for cispo, differs from the ratio)."""
    if rules.objective not in ("ppo", "gspo", "cispo"):
        return torch.zeros_like(tokens.used)
    _, ratio = _ratio(logprobs.detach(), proximal, tokens.used)
    if rules.objective == "gspo":
        ratio = tokens.spread(tokens.means(ratio.log())).clamp(max=GSPO_CLAMP).exp()
    bounded = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    held = ratio != bounded if rules.objective == "cispo" else -advantages * bounded > -advantages * ratio
    return held & tokens.used


def _ratio(logprobs: torch.Tensor, proximal: torch.Tensor | None, used: torch.Tensor
           ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(log-probability, ratio to the proximal policy clamped at e^+-20), harmless where not used."""
    exact = torch.where(used, logprobs.double(), torch.zeros(used.shape, dtype=torch.float64, device=used.device))
    if proximal is None:
        return exact, torch.exp(exact - exact.detach())
    return exact, (exact - torch.where(used, proximal, exact.detach())).clamp(-CLAMP, CLAMP).exp()


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None
             ) -> torch.Tensor:  # fmt: skip
    worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return worst if dual is None else torch.where(advantages < 0, torch.minimum(worst, -advantages * dual), worst)


def _or_infinite(limit: float | None) -> float:
    return torch.inf if limit is None else limit


def token_shares(rule: str, lengths: torch.Tensor, budget: int = 1) -> torch.Tensor:
    """What one token of each episode counts in the batch's loss; lengths int64 [e] (model tokens of the counted
    episodes, masked ones included: masking takes from the numerator alone) -> float64 [e]. Episodes without a token
    count in no denominator. Raises SettingsError for another rule than these:

    token_mean: 1 / tokens of the batch, every token alike (DAPO, arXiv:2503.14476, section 3.3).
    sequence_mean: 1 / (episodes * tokens of the episode), every episode alike (GRPO, arXiv:2402.03300, equation 3).
    sequence_sum: 1 / episodes, long episodes weigh more.
    budget: 1 / (episodes * budget), with the token budget of an episode: as sequence_sum, but of the size of a mean
        (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    exact = lengths.double()
    episodes = (lengths > 0).sum().clamp(min=1)
    if rule == "token_mean":
        return torch.ones_like(exact) / exact.sum().clamp(min=1)
    if rule == "sequence_mean":
        return 1 / (episodes * exact.clamp(min=1))
    if rule == "sequence_sum":
        return torch.ones_like(exact) / episodes
    if rule == "budget":
        return torch.ones_like(exact) / (episodes * budget)
    raise SettingsError(f"denominator = {rule!r}: expected one of {', '.join(DENOMINATORS)}")
