"""verl's settings and results in our words. The numbers are production's; what stands here besides is how verl reports:
its masked mean divides by the count + 1e-8, and shares are averaged in float32."""

from __future__ import annotations

import math
from typing import Any

import torch

from headrace.trainer import corrections, losses, penalties, rejection
from headrace.trainer.advantages import advantages, lone
from headrace.trainer.corrections import Corrected
from headrace.trainer.mismatch import effective_share, mismatch
from headrace.trainer.reductions import CLAMP, Tokens
from headrace.trainer.weighing import StepSettings

from .cases import NotCovered, Rows, rules, vector

EPSILON = 1e-8


def masked_mean(tokens: Tokens, values: torch.Tensor) -> float:
    n = float(tokens.counts().sum())
    return float(tokens.mean(values)) * n / (n + EPSILON)


def masked_means(tokens: Tokens, values: torch.Tensor) -> torch.Tensor:
    return tokens.means(values) * tokens.counts() / (tokens.counts() + EPSILON)


def share(flags: torch.Tensor) -> float:
    return float(flags.float().mean())


def deviation(tokens: Tokens, values: torch.Tensor, low: float, high: float) -> float:
    if float(tokens.counts().sum()) <= 1:
        return 0.0
    bounded = values.clamp(low, high)
    return math.sqrt(max(0.0, masked_mean(tokens, bounded.square()) - masked_mean(tokens, bounded) ** 2)) \
        if not bool(torch.isnan(bounded[tokens.used]).any()) else math.nan


def spread(values: torch.Tensor, ideal: float) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std()) if len(values) > 1 else 0.0,
            "max": float(values.max()), "min": float(values.min()),
            "max_deviation": float((values - ideal).abs().max())}  # fmt: skip


def bounds(threshold: Any) -> tuple[float | None, float]:
    """(lower, upper) of "0.5_5.0" or 2.0."""
    low, _, high = str(threshold).rpartition("_")
    return (float(low) if low else None), float(high)


# ------------------------------------------------------------------------------------------------------------ weights


def weight_settings(p: dict[str, Any]) -> dict[str, Any]:
    low, high = bounds(p.get("rollout_is_threshold", 2.0))
    limits = {"truncate_above": high} if low is None else {"mask_below": low, "mask_above": high}
    return {"ratio_level": p.get("rollout_is", "token"), **limits}


def is_metrics(p: dict[str, Any], data: Rows, x: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    tokens, level = data.tokens, p.get("rollout_is", "token")
    low, high = bounds(p.get("rollout_is_threshold", 2.0))
    icepop, low = low is not None, 1 / high if low is None else low
    raw = torch.where(tokens.used, corrections.ratios(tokens, x, level), torch.zeros_like(x))
    found: dict[str, float] = {"rollout_is_mean": masked_mean(tokens, weights)}
    if level == "sequence":
        logs = tokens.sums(x)
        found |= {"rollout_is_max": math.exp(min(float(logs.max()), CLAMP)),
                  "rollout_is_min": math.exp(float(logs.min())),
                  "rollout_is_ratio_fraction_high": share(logs > math.log(high)),
                  "rollout_is_ratio_fraction_low": share(logs < math.log(low))}  # fmt: skip
    else:
        own = weights[tokens.used]
        found |= {"rollout_is_max": float(own.max()), "rollout_is_min": float(own.min()),
                  "rollout_is_ratio_fraction_high": masked_mean(tokens, (raw > high).double()),
                  "rollout_is_ratio_fraction_low": masked_mean(tokens, (raw < low).double())}  # fmt: skip
    found["rollout_is_std"] = deviation(tokens, weights, 0.0, high)
    found["rollout_is_eff_sample_size"] = effective_sample(tokens, weights.clamp(0.0, high))
    means, raws = masked_means(tokens, weights), masked_means(tokens, raw)
    found |= {f"rollout_is_seq_{name}": value for name, value in spread(means, 1.0).items()}
    found |= {"rollout_is_seq_fraction_high": share(raws > high), "rollout_is_seq_fraction_low": share(raws < low)}
    if icepop:
        found["rollout_is_oob_ratio"] = masked_mean(tokens, ((raw < low) | (raw > high)).double())
    return found


def effective_sample(tokens: Tokens, weights: torch.Tensor) -> float:
    """Production's share, with verl's 1e-8 in the counts and in the mean."""
    own = weights[tokens.used]
    found, n, mean = effective_share(own), len(own), float(own.mean())
    if math.isnan(mean):
        return math.nan
    counted = n / (n + EPSILON)
    return found * ((mean * counted + EPSILON) / mean) ** 2 / counted if found else 0.0


def weights_and_metrics(p: dict[str, Any], data: Rows, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    settings = weight_settings(p)
    weights = corrections.correct(data.tokens, x, torch.ones_like(x), rules(**settings)).weights
    metrics = is_metrics(p, data, x, weights)
    if p.get("rollout_is_batch_normalize"):
        level, tokens = settings["ratio_level"], data.tokens
        mean = float(corrections.mean_weight(tokens, weights, level))
        theirs = (masked_mean(tokens, weights) if level == "token"
                  else float(masked_means(tokens, weights)[tokens.present()].mean()))  # fmt: skip
        normalised = corrections.correct(tokens, x, torch.ones_like(x), rules(**settings, normalise=True)).weights
        acts = mean > corrections.SMALLEST_MEAN
        weights = normalised * mean / theirs if acts else normalised
        metrics["rollout_is_batch_norm_factor"] = theirs if acts else 1.0
    return weights, metrics


def correction_weights(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["response_mask"])
    weights, metrics = weights_and_metrics(p, data, data.flat(i["log_ratio"]))
    return {"weights": data.rows(weights), "metrics": metrics}


# ---------------------------------------------------------------------------------------------------------- rejection


def reject_rules(p: dict[str, Any]) -> list[dict[str, Any]]:
    """verl bounds k1, so that its limits are on mu / pi: "0.5_5.0" keeps pi / mu in [0.2, 2]."""
    options = [one.strip() for one in p["rollout_rs"].split(",")]
    thresholds = [one.strip() for one in str(p["rollout_rs_threshold"]).split(",")]
    found = []
    for option, threshold in zip(options, thresholds * (len(options) if len(thresholds) == 1 else 1), strict=True):
        where, _, by = option.rpartition("_")
        if by not in ("k1", "k2", "k3") or where not in ("token", "seq_sum", "seq_mean", "seq_max"):
            raise NotCovered(f"rollout_rs = {option}")
        low, high = bounds(threshold)
        rule = {"by": by, "over": where.removeprefix("seq_"), "above": high}
        if by == "k1":
            rule |= {"below": math.log(1 / high if low is None else low), "above": math.log(high)}
        found.append(rule)
    return found


def rejection_mask(p: dict[str, Any], data: Rows, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    tokens = data.tokens
    metrics: dict[str, float] = {}
    present = tokens.present()
    keep = torch.ones_like(tokens.used)
    for option, rule in zip(p["rollout_rs"].split(","), reject_rules(p), strict=True):
        name = f"rollout_rs_{option.strip()}"
        value = rejection.statistic(tokens, x, rule["by"], rule["over"])
        kept = rejection.kept(tokens, x, rules(reject=[rule]).reject)
        keep = keep & kept
        low, high = rule.get("below"), rule["above"]
        at_token = rule["over"] == "token"
        by_row = masked_means(tokens, value) if at_token else tokens.means(value)
        if rule["over"] == "mean":
            by_row = by_row * tokens.counts() / (tokens.counts() + EPSILON)
            value = tokens.spread(by_row)
        by_row = by_row[present]
        measured = value[tokens.used] if at_token else by_row

        def part(flags: torch.Tensor, at_token: bool = at_token) -> float:
            return masked_mean(tokens, flags.double()) if at_token else share(flags)

        over = value if at_token else by_row
        metrics |= {
            f"{name}_mean": masked_mean(tokens, value),
            f"{name}_max": float(measured.max()), f"{name}_min": float(measured.min()),
            f"{name}_fraction_high": part(over > high),
            f"{name}_fraction_low": 0.0 if low is None else part(over < low),
            f"{name}_std": deviation(tokens, value, 0.0 if low is None else low, high),
            **{f"{name}_seq_{key}": number for key, number in spread(by_row, 0.0).items()},
            f"{name}_seq_fraction_high": share(by_row > high),
            f"{name}_masked_fraction": masked_mean(tokens, (~kept).double()),
            f"{name}_seq_masked_fraction": float((tokens.sums((~kept).double()) > 0)[present].double().mean()),
        }  # fmt: skip
        if low is not None:
            metrics[f"{name}_seq_fraction_low"] = share(by_row < low)
    metrics["rollout_rs_masked_fraction"] = masked_mean(tokens, (~keep).double())
    metrics["rollout_rs_seq_masked_fraction"] = share(tokens.sums((~keep).double()) > 0)
    return keep & tokens.used, metrics


def rejected(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["response_mask"])
    mask, metrics = rejection_mask(p, data, data.flat(i["log_ratio"]))
    return {"mask": data.rows(mask), "metrics": metrics}


def offpolicy(data: Rows, current: torch.Tensor, behaviour: torch.Tensor) -> dict[str, float]:
    tokens = data.tokens
    found = mismatch(tokens, current, behaviour)
    n, counts = float(tokens.counts().sum()), tokens.counts()
    whole, absent = n / (n + EPSILON), float((~tokens.present()).sum())
    ours, theirs = (mean * counts / (counts + EPSILON) for mean in (found.current, found.behaviour))
    apart = theirs - ours
    rows = len(counts)
    return {
        "training_ppl": float((-ours).exp().mean()), "training_log_ppl": float((-ours).mean()),
        "rollout_ppl": float((-theirs).exp().mean()), "rollout_log_ppl": float((-theirs).mean()),
        "kl": found.kl * whole, "k3_kl": found.kl_k3 * whole,
        "log_ppl_diff": float(apart.mean()), "log_ppl_abs_diff": float(apart.abs().mean()),
        "log_ppl_diff_max": float(apart.max()), "log_ppl_diff_min": float(apart.min()),
        "ppl_ratio": float(apart.exp().mean()),
        "chi2_token": (found.chi2 + 1) * whole - 1,
        "chi2_seq": ((found.chi2_episode + 1) * (rows - absent) + absent) / rows - 1,
    }  # fmt: skip


def offpolicy_metrics(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["response_mask"])
    return offpolicy(data, data.flat(i["old_log_prob"]), data.flat(i["rollout_log_prob"]))


def correction_and_rejection(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["response_mask"])
    current, behaviour = data.flat(i["old_log_prob"]), data.flat(i["rollout_log_prob"])
    x = corrections.difference(current, behaviour)
    found: dict[str, Any] = {"weights": None}
    metrics: dict[str, float] = {}
    mask = data.tokens.used
    if p.get("rollout_is"):
        weights, metrics = weights_and_metrics(p, data, x)
        found["weights"] = data.rows(weights)
    if p.get("rollout_rs"):
        mask, more = rejection_mask(p, data, x)
        metrics |= more
    if veto := p.get("rollout_token_veto_threshold"):
        kept = ~corrections.correct(data.tokens, x, x, rules(veto_below=veto)).rejected["veto"]
        mask = mask & kept
        found["veto_fraction"] = share(data.tokens.sums((~kept).double()) > 0)
    metrics |= offpolicy(data, current, behaviour)
    return found | {"mask": data.rows(mask), "metrics": {f"rollout_corr/{k}": v for k, v in metrics.items()}}


# ------------------------------------------------------------------------------------------------ advantages,
# objectives


def grpo_advantage(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """A group of one counts for itself, as with our rollout.group_size = 1 and lone = "none"; verl's mask is that of
    the response, not of membership: all members form the baseline."""
    rule = "grpo" if p.get("norm_adv_by_std_in_grpo", True) else "centered"
    epsilon = p.get("epsilon", 1e-6)
    rewards, groups = vector(i["rewards"]), torch.tensor(i["group"])
    found = torch.zeros_like(rewards)
    for group in set(i["group"]):
        own = rewards[groups == group]
        found[groups == group] = (advantages(rule, own, epsilon) if len(own) > 1
                                  else lone(rule, own, "none", epsilon))  # fmt: skip
    if i.get("mask") is not None:
        found = found * vector(i["mask"])
    return {"advantages": found.tolist()}


DENOMINATORS = {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean":
"sequence_mean",
                "seq-mean-token-sum-norm": "budget"}  # fmt: skip


def shares(mode: str, tokens: Tokens, budget: int) -> torch.Tensor:
    """Of each token, float64 [k]."""
    counts = tokens.counts()
    found = losses.token_shares(DENOMINATORS[mode], counts.long(), budget)
    if mode == "seq-mean-token-mean":
        found = found * counts / (counts + EPSILON)
    return torch.where(tokens.used, tokens.spread(found), torch.zeros(()).double())


def aggregated(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["loss_mask"])
    budget = p.get("loss_scale_factor") or len(i["loss_mask"][0])
    values = torch.where(data.tokens.used, data.flat(i["loss_mat"]), torch.zeros(()).double())
    return {"loss": float((values * shares(p["loss_agg_mode"], data.tokens, budget)).sum())}


def clip(p: dict[str, Any]) -> dict[str, float]:
    both = p.get("clip_ratio", 0.2)
    low, high = p.get("clip_ratio_low"), p.get("clip_ratio_high")
    return {"clip_low": both if low is None else low, "clip_high": both if high is None else high}


def minimised(settings: StepSettings, data: Rows, i: dict[str, Any], weights: torch.Tensor, proximal: torch.Tensor,
              mode: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss and gradient; log-probabilities and advantages, flat."""
    tokens = data.tokens
    logprobs = data.flat(i["log_prob"]).requires_grad_()
    own = data.flat(i["advantages"])
    constant = weights * shares(mode, tokens, max(data.lengths))
    total = losses.token_losses(settings, tokens, logprobs, own, constant, proximal).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return {"loss": float(total.detach()), "grad_log_prob": data.rows(logprobs.grad)}, logprobs.detach(), own


def policy_loss(kind: str, p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    data = Rows.of(i["response_mask"])
    tokens, proximal = data.tokens, data.flat(i["old_log_prob"])
    given = i.get("rollout_is_weights")
    weights = torch.ones_like(proximal) if given is None else data.flat(given)
    mode = "seq-mean-token-mean" if kind == "gspo" else p.get("loss_agg_mode", "token-mean")
    dual = p.get("clip_ratio_c", 3.0)
    settings = {
        "ppo": {"objective": "ppo", **clip(p), "dual_clip": dual},
        "gspo": {"objective": "gspo", **clip(p)},
        "cispo": {"objective": "cispo", **clip(p)},
        # A truncated ratio as a constant, and the mask on the probabilities.
        "dppo_tv": {"objective": "cispo", "clip_low": 1.0, "clip_high": p.get("clip_ratio_c", 20.0) - 1,
                    "tv_low": clip(p)["clip_low"], "tv_high": clip(p)["clip_high"]},
    }[kind]  # fmt: skip
    ours = rules(**settings)
    found, current, own = minimised(ours, data, i, weights, proximal, mode)
    held = losses.clipped(ours, tokens, current, own, proximal)
    below = torch.zeros_like(held)
    if kind == "ppo":
        ones = torch.ones_like(own)
        below = losses.ppo(current, own, ones, proximal, **limits(ours)) > losses.ppo(
            current, own, ones, proximal, **limits(ours), dual=dual)  # fmt: skip
    elif kind == "dppo_tv":
        inside = rejection.tv_kept(current, proximal, own, ours.tv_low or 0, ours.tv_high or 0)
        held, below = ~inside, held & inside
    x = corrections.log_ratio(current, proximal)
    return found | {"metrics": {
        "actor/pg_clipfrac": masked_mean(tokens, held.double()),
        "actor/pg_clipfrac_lower": masked_mean(tokens, below.double()),
        "actor/ppo_kl": masked_mean(tokens, -x),
    }}  # fmt: skip


def limits(settings: StepSettings) -> dict[str, float]:
    return {"low": settings.clip_low, "high": settings.clip_high}


def bypass(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """The ratio is that of the present policy to the behaviour policy; rejected tokens leave the denominators."""
    data = Rows.of(i["response_mask"])
    behaviour = data.flat(i["rollout_log_prob"])
    settings: dict[str, Any] = {"bypass": True, "reject_shrinks": True}
    if p.get("loss_type", "ppo_clip") == "reinforce":
        settings["objective"] = "reinforce"
        if p.get("rollout_is"):
            settings |= weight_settings(p)
            settings["normalise"] = bool(p.get("rollout_is_batch_normalize"))
    else:
        settings |= {"objective": "ppo", **clip(p), "dual_clip": p.get("clip_ratio_c", 3.0)}
    if p.get("rollout_rs"):
        settings["reject"] = reject_rules(p)
    ours = rules(**settings)
    x = corrections.difference(data.flat(i["log_prob"]), behaviour)
    if ours.objective == "reinforce" and not p.get("rollout_is"):
        corrected = Corrected(torch.ones_like(x), torch.zeros_like(data.tokens.used), {})
    else:
        corrected = corrections.correct(data.tokens, x, data.flat(i["advantages"]), ours)
    left = Rows(data.lengths, corrected.kept(data.tokens))
    return minimised(ours, left, i, corrected.weights, behaviour, p.get("loss_agg_mode", "token-mean"))[0]


def kl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(p["kl_penalty"], p["kl_penalty"])
    current, reference = vector(i["logprob"]), vector(i["ref_logprob"])
    used = torch.ones_like(current, dtype=torch.bool)
    return {"kl": penalties.penalty(kind, current, reference, used).tolist()}


FUNCTIONS = {
    "compute_rollout_correction_weights": correction_weights,
    "compute_rollout_rejection_mask": rejected,
    "compute_rollout_correction_and_rejection_mask": correction_and_rejection,
    "compute_offpolicy_metrics": offpolicy_metrics,
    "compute_grpo_outcome_advantage": grpo_advantage,
    "compute_grpo_vectorized_outcome_advantage": grpo_advantage,
    "agg_loss": aggregated,
    "compute_policy_loss_vanilla": lambda p, i: policy_loss("ppo", p, i),
    "compute_policy_loss_gspo": lambda p, i: policy_loss("gspo", p, i),
    "compute_policy_loss_cispo": lambda p, i: policy_loss("cispo", p, i),
    "compute_policy_loss_dppo_tv": lambda p, i: policy_loss("dppo_tv", p, i),
    "compute_policy_loss_bypass_mode": bypass,
    "kl_penalty_forward": kl,
}
