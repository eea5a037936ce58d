"""Decides what combines with what: the one table of the parts of a loss, and which settings can't act together.

Formula, source and defaults stand in the docstring of each part's function. Impossible combinations are refused when
settings are read (`schemas.settings`); those that are possible and can't act are named here, in a warning. No clients,
no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.settings import LossSettings, RunSettings


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the loss, what sets it, where its formula stands, what it does to the denominators, and what it
    combines with."""

    name: str
    settings: str
    function: str  # module.function of headrace.trainer
    denominators: str
    combines: str


KEEPS = "stay"
SHRINKS = "stay; `reject_shrinks`: without the rejected tokens"

TABLE: tuple[Part, ...] = (
    Part("GRPO, DAPO advantage", "advantage = grpo", "advantages.grpo", KEEPS, "every objective"),
    Part("Dr. GRPO advantage", "advantage = centered", "advantages.centered", KEEPS,
         "every objective; Dr. GRPO also has denominator = budget"),
    Part("RLOO", "advantage = rloo", "advantages.rloo", KEEPS, "every objective"),
    Part("RLOO, scaled", "advantage = rloo_scaled", "advantages.rloo_scaled", KEEPS, "every objective"),
    Part("group of one", "rollout.group_size = 1, lone", "advantages.lone", KEEPS, "every objective"),
    Part("surrogate", "objective = surrogate", "losses.surrogate", KEEPS, "weights; with bypass instead of weights"),
    Part("REINFORCE", "objective = reinforce", "losses.reinforce", KEEPS,
         "weights; with bypass they are taken anew at each optimizer step"),
    Part("PPO clip, dual clip", "objective = ppo, clip_low, clip_high, dual_clip", "losses.ppo", KEEPS,
         "weights (decoupled PPO), or bypass; acts with more than one optimizer step, or bypass"),
    Part("GSPO", "objective = gspo, clip_low, clip_high", "losses.gspo", KEEPS,
         "as PPO; meant with denominator = sequence_mean"),
    Part("CISPO", "objective = cispo, clip_low, clip_high", "losses.cispo", KEEPS, "as PPO"),
    Part("DPPO-TV", "tv_low, tv_high", "rejection.tv_kept", KEEPS,
         "every objective, in its papers surrogate or cispo; acts with more than one optimizer step, or bypass"),
    Part("ratio", "ratio_level", "corrections.ratios", KEEPS, "truncation, masking; not with bypass except reinforce"),
    Part("truncation (TIS)", "truncate_below, truncate_above", "corrections.truncate", KEEPS, "masking, after it"),
    Part("masking (MIS, IcePop)", "mask_below, mask_above", "corrections.mask", KEEPS, "truncation"),
    Part("normalisation", "normalise", "corrections.normalise", KEEPS,
         "ratio_level token or sequence; before rejection; scores the batch first"),
    Part("rejection", "reject: by, over, below, above", "rejection.kept", SHRINKS, "everything; all rules must agree"),
    Part("veto", "veto_below, veto_above", "rejection.unvetoed", SHRINKS, "everything"),
    Part("OPSM", "opsm_delta", "rejection.opsm", SHRINKS, "everything"),
    Part("M2PO", "m2_limit", "rejection.m2_kept", SHRINKS, "everything; scores the batch first"),
    Part("KL k1", "kl = k1, kl_coefficient, kl_reference", "penalties.k1", "the objective's",
         "everything; over all tokens that aren't stale, masked and rejected ones too"),
    Part("KL k2", "kl = k2, kl_coefficient, kl_reference", "penalties.k2", "the objective's", "as k1"),
    Part("KL k3", "kl = k3, kl_coefficient, kl_reference", "penalties.k3", "the objective's", "as k1"),
    Part("denominators", "denominator", "losses.token_shares", "token_mean, sequence_mean, sequence_sum, budget: over "
         "the tokens and episodes of an optimizer step's share of the batch", "everything"),
)  # fmt: skip


def idle(settings: RunSettings) -> list[str]:
    """One sentence for each setting that can't act in this combination, or not as its name promises."""
    return list(_idle(settings))


def _idle(settings: RunSettings) -> Iterator[str]:
    loss, steps = settings.loss, settings.optimizer.minibatches * settings.optimizer.epochs
    defaults = LossSettings()
    if steps == 1 and not loss.bypass:
        why = ("can't act: with one optimizer step per version the ratio to the proximal policy is 1; set "
               "optimizer.minibatches or optimizer.epochs, or loss.bypass")  # fmt: skip
        if loss.objective in ("ppo", "gspo", "cispo"):
            yield f"loss.objective = {loss.objective!r}: its clip {why}"
        if loss.tv_low is not None or loss.tv_high is not None:
            yield f"loss.tv_low and loss.tv_high {why}"
    if loss.objective in ("surrogate", "reinforce") and (loss.clip_low, loss.clip_high) != (
        defaults.clip_low, defaults.clip_high
    ):  # fmt: skip
        yield f"loss.clip_low and loss.clip_high can't act: objective {loss.objective!r} doesn't clip"
    if loss.bypass and loss.objective != "reinforce":
        limits = [name for name in ("truncate_below", "truncate_above", "mask_below", "mask_above", "normalise",
                                    "ratio_level") if name in loss.model_fields_set]  # fmt: skip
        if limits:
            yield (f"loss.{', loss.'.join(limits)} can't act: with loss.bypass the ratio of objective "
                   f"{loss.objective!r} corrects, and a weight beside it would count it twice")  # fmt: skip
    elif loss.truncate_above is not None and loss.mask_above is not None and loss.truncate_above >= loss.mask_above:
        yield "loss.truncate_above can't act: loss.mask_above masks what it would cut off"
    if loss.truncate_below and loss.truncate_below <= loss.mask_below:
        yield "loss.truncate_below can't act: loss.mask_below masks what it would lift"
    rejects = loss.reject or loss.veto_below or loss.veto_above or loss.opsm_delta or loss.m2_limit
    if loss.reject_shrinks and not rejects:
        yield "loss.reject_shrinks can't act: nothing rejects"
    if settings.rollout.group_size == 1:
        if loss.advantage in ("rloo", "rloo_scaled"):
            yield f"loss.advantage = {loss.advantage!r} can't act: a group of one has no others; loss.lone decides"
    elif loss.lone is not None:
        yield "loss.lone can't act: rollout.group_size is greater than 1, and a single survivor teaches nothing"
    if loss.kl == "k1":
        yield ("loss.kl = 'k1' restrains nothing: as a loss its gradient is 0 in expectation; k2's is the gradient of "
               "the divergence")  # fmt: skip


def as_markdown() -> str:
    """The table as docs/corrections.md shows it."""
    rows = ["| part | settings | formula, source, defaults | denominators | combines with |", "|---|---|---|---|---|"]
    rows += [f"| {p.name} | `{p.settings}` | `{p.function}` | {p.denominators} | {p.combines} |" for p in TABLE]
    return "\n".join(rows)
