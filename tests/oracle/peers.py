"""The settings and results of TRL, prime-rl, slime, AReaL, OpenRLHF, NeMo-RL and SkyRL in our words. The numbers are
production's; a setting without a counterpart raises NotCovered, which fails the case."""

from __future__ import annotations

import math
from typing import Any

import torch

from headrace.trainer import corrections, losses, penalties, rejection
from headrace.trainer.advantages import advantages, leave_one_out, of_members, whole_group
from headrace.trainer.mismatch import mismatch
from headrace.trainer.reductions import Tokens

from .cases import NotCovered, Rows, number, rules, vector
from .verl import masked_mean, share


def only(p: dict[str, Any], *known: str) -> None:
    """Refuse what isn't known: a setting that was passed over would be no comparison."""
    if unknown := sorted(set(p) - set(known)):
        raise NotCovered(f"parameters {', '.join(unknown)}")


def corrected(data: Rows, x: torch.Tensor, **loss: Any) -> corrections.Corrected:
    return corrections.correct(data.tokens, x, torch.zeros_like(x), rules(**loss))


def padded(data: Rows, values: torch.Tensor, padding: float) -> torch.Tensor:
    """What a peer holds at padding, where ours is 0."""
    return torch.where(data.tokens.used, values, torch.full_like(values, padding))


# ---------------------------------------------------------------------------------------------------------------- TRL


def trl_weights(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "mode", "clip_min", "clip_max")
    level, _, action = p["mode"].partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        raise NotCovered(f"mode = {p['mode']}")
    low, high = p.get("clip_min") or 0.0, p.get("clip_max")
    data = Rows.of(i["mask"])
    x = corrections.difference(data.flat(i["old"]), data.flat(i["sampling"]))
    weights = corrected(data, x, ratio_level=level, **{f"{action}_below": low, f"{action}_above": high}).weights
    # TRL's ratio is exp(0) at padding, and one per row for a sequence.
    return {"ratio": data.rows(padded(data, weights, 1.0)) if level == "token" else data.first(weights)}


def trl_advantages(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """A reward that is NaN marks a member that isn't counted."""
    only(p, "num_generations", "scale_rewards")
    rule = {"group": "grpo", "none": "centered"}.get(str(p["scale_rewards"]).lower())
    if rule is None:
        raise NotCovered(f"scale_rewards = {p['scale_rewards']}")
    found, deviations = [], []
    for rewards in torch.split(vector(i["rewards"]), p["num_generations"]):
        counted = ~torch.isnan(rewards)
        found += of_members(rule, rewards, counted, epsilon=1e-4).tolist()
        own = whole_group(rewards, counted)[1]
        deviations += (own if int(counted.sum()) > 1 else torch.full_like(own, math.nan)).tolist()  # of one: undefined
    return {"advantages": found, "std": deviations}


def trl_opsm(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "off_policy_threshold")
    data = Rows.of(i["mask"])
    x = corrections.difference(data.flat(i["per_token_logps"]), data.flat(i["sampling_per_token_logps"]))
    ours = rules(opsm_delta=p["off_policy_threshold"])
    out = corrections.correct(data.tokens, x, data.flat(i["advantages"]), ours).rejected["opsm"]
    return {"keep": data.first(~out)}


# ----------------------------------------------------------------------------------------------------------- prime-rl


def prime(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    return prime_dppo(p, i) if "dppo_mask_low" in p else prime_masked(p, i)


def prime_rows(i: dict[str, Any]) -> tuple[Rows, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = vector(i["trainer_logprobs"]).requires_grad_()
    return Rows.of([i["loss_mask"]]), logprobs, vector(i["inference_logprobs"]), vector(i["advantages"])


def k3_mean(tokens: Tokens, current: torch.Tensor, behaviour: torch.Tensor) -> float:
    return mismatch(tokens, current, behaviour).kl_k3


def prime_dppo(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """Bypass: the ratio to the behaviour policy is in the objective; the penalty is k2 towards it."""
    only(p, "dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau")
    data, logprobs, behaviour, own = prime_rows(i)
    tokens = data.tokens
    ours = rules(objective="surrogate", bypass=True, tv_low=p["dppo_mask_low"], tv_high=p["dppo_mask_high"],
                 **({"kl": "k2", "kl_coefficient": 2 * p["kl_tau"], "kl_reference": "behaviour"} if p["kl_tau"] else {})
                 )  # fmt: skip
    scaled, weights = p["adv_tau"] * own, tokens.used.double()
    total = losses.token_losses(ours, tokens, logprobs, scaled, weights, behaviour).sum()
    if ours.kl:
        total = total + ours.kl_coefficient * penalties.penalty(ours.kl, logprobs, behaviour, tokens.used).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    current = logprobs.detach()
    dropped = tokens.used & ~rejection.tv_kept(current, behaviour, own, p["dppo_mask_low"], p["dppo_mask_high"])
    return {"loss": float(total.detach()), "grad": logprobs.grad.tolist(), "metrics": {
        "masked_mismatch_kl": k3_mean(tokens.only(dropped), current, behaviour),
        "unmasked_mismatch_kl": k3_mean(tokens.only(~dropped), current, behaviour),
        "is_masked": float(tokens.mean(dropped)),
        "is_masked_low": float(tokens.mean(dropped & (own < 0))),
        "is_masked_high": float(tokens.mean(dropped & (own > 0))),
        "masked_advantage_positive": float(tokens.only(dropped).mean(own > 0)),
        "masked_advantage_negative": float(tokens.only(dropped).mean(own < 0)),
    }}  # fmt: skip


def prime_masked(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """An earlier default: the ratio as a constant, masked by token, by geometric mean and by the worst token."""
    only(p, "ratio_type", "token_mask_high", "token_mask_low", "sequence_clip_high", "geo_mask_high", "geo_mask_low",
         "sequence_mask_low", "sequence_mask_high", "adv_tau", "teacher_tau", "kl_tau")  # fmt: skip
    if p["ratio_type"] != "token" or p["teacher_tau"] or p["kl_tau"]:
        raise NotCovered("ratio_type other than token, teacher_tau, kl_tau")
    data, logprobs, behaviour, own = prime_rows(i)
    tokens = data.tokens
    low, high, geo = p["token_mask_low"], p["token_mask_high"], (p["geo_mask_low"], p["geo_mask_high"])
    ours = rules(objective="reinforce", bypass=True, mask_below=low, mask_above=high,
                 reject=[{"by": "ratio", "over": "mean", "below": geo[0], "above": geo[1]}],
                 veto_below=p["sequence_mask_low"], veto_above=p["sequence_mask_high"])  # fmt: skip
    x = corrections.difference(logprobs, behaviour)
    found = corrections.correct(tokens, x, own, ours)
    total = losses.token_losses(ours, tokens, logprobs, p["adv_tau"] * own, found.weights, behaviour).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    current, ratio = logprobs.detach(), corrections.ratios(tokens, x)
    masked = tokens.used & (found.weights == 0)
    geometric = float(corrections.ratios(tokens, x, "geometric")[0])
    seen = ratio[tokens.used]
    return {"loss": float(total.detach()), "grad": logprobs.grad.tolist(), "metrics": {
        "mismatch_kl": k3_mean(tokens, current, behaviour),
        "masked_mismatch_kl": k3_mean(tokens.only(masked), current, behaviour),
        "unmasked_mismatch_kl": k3_mean(tokens.only(~masked), current, behaviour),
        "is_masked": masked[tokens.used].tolist(),
        "is_masked_low": (seen < low).tolist(), "is_masked_high": (seen > high).tolist(),
        "sequence_masked_low": float((seen < p["sequence_mask_low"]).any()),
        "sequence_masked_high": float((seen > p["sequence_mask_high"]).any()),
        "geo_masked_low": float(geometric < geo[0]), "geo_masked_high": float(geometric > geo[1]),
        "geo_seq_ratio": geometric,
    }}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- slime


def slime_weights(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """`use_tis` switches the whole function on: without it slime neither weighs nor rejects."""
    only(p, "use_tis", "tis_level", "tis_mode", "tis_upper_bound", "tis_lower_bound", "tis_batch_normalize", "use_rs",
         "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")  # fmt: skip
    data = Rows.of(i["masks"])
    x = corrections.difference(data.flat(i["train"]), data.flat(i["rollout"]))
    if not p.get("use_tis", True):
        return {"weights": None, "masks": data.rows(data.tokens.used)}
    high = p.get("tis_upper_bound", 2.0)
    low = p.get("tis_lower_bound", 0.5) or 1 / high
    mode, level = p.get("tis_mode", "truncate"), p.get("tis_level", "token")
    weights = {
        "truncate": {"truncate_above": high},
        "clip": {"truncate_below": low, "truncate_above": high},
        "mask": {"mask_below": low, "mask_above": high},
    }.get(mode)
    if weights is None:
        raise NotCovered(f"tis_mode = {mode}")
    rejects: dict[str, Any] = {}
    if p.get("use_rs"):
        bounds = {"below": p.get("rs_lower_bound") or low, "above": p.get("rs_upper_bound") or high}
        over = {"token": "token", "sequence": "sum", "geometric": "mean"}[p.get("rs_level", "token")]
        rejects = {"reject": [{"by": "ratio", "over": over, **bounds}], "veto_below": p.get("rs_veto_threshold") or 0.0}
    # slime gives weights and masks apart: the weights of rejected tokens stay.
    weighed = corrected(data, x, ratio_level=level, normalise=p.get("tis_batch_normalize", False), **weights)
    kept = corrected(data, x, **rejects).kept(data.tokens).used
    if mode == "mask":
        kept = kept & (weighed.weights > 0)
    return {"weights": data.rows(weighed.weights), "masks": data.rows(kept)}


def slime_rewards(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "n_samples_per_prompt", "rollout_batch_size", "grpo_std_normalization", "advantage_estimator")
    rule = "grpo" if p.get("grpo_std_normalization", True) else "centered"
    groups = torch.split(vector(i["rewards"]), p["n_samples_per_prompt"])
    return {"rewards": [value for group in groups for value in advantages(rule, group).tolist()]}


# -------------------------------------------------------------------------------------------------------------- AReaL


def areal_rejection(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """Its k3 is that of mu / pi. At the level of sequences a ratio weighs as the geometric mean."""
    only(p, "level", "action", "metric", "agg", "upper", "lower")
    level, action, metric = p.get("level", "token"), p.get("action", "mask"), p.get("metric", "ratio")
    low, high = p.get("lower"), p["upper"]
    data = Rows.of(i["mask"])
    x = corrections.difference(data.flat(i["proximal"]), data.flat(i["behave"]))
    tokens = data.tokens
    ratio_level = "geometric" if level == "sequence" and metric == "ratio" else "token"
    if action == "clamp":
        if metric != "ratio" or (level == "sequence" and p.get("agg", "mean") != "mean"):
            raise NotCovered("action = clamp by anything but the ratio, or its mean")
        raw = corrected(data, x, ratio_level=ratio_level).weights
        weights = corrected(data, x, ratio_level=ratio_level, truncate_below=low or 0.0, truncate_above=high).weights
        return {"mask": data.rows(tokens.used), "weight": data.rows(weights),
                "filtered": float(tokens.mean(weights != raw))}  # fmt: skip
    over = p.get("agg", "mean") if level == "sequence" else "token"
    by = {"ratio": "ratio", "kl_k1": "ratio", "kl_k2": "k2", "kl_k3": "k3_reverse"}.get(metric)
    if by is None:
        raise NotCovered(f"metric = {metric}")
    bounds = [None if limit is None else math.exp(limit) if metric == "kl_k1" else limit for limit in (low, high)]
    rule = {"by": by, "over": over, "below": bounds[0], "above": bounds[1]}
    found = corrected(data, x, ratio_level=ratio_level, reject=[rule])
    kept = found.kept(tokens).used
    return {"mask": data.rows(kept), "weight": data.rows(found.weights), "filtered": float(tokens.mean(~kept))}


def areal_m2po(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "m2_threshold")
    data = Rows.of(i["mask"])
    x = corrections.difference(data.flat(i["prox"]), data.flat(i["old"]))
    return {"mask": data.rows(corrected(data, x, m2_limit=p["m2_threshold"]).kept(data.tokens).used)}


# ----------------------------------------------------------------------------------------------------------- OpenRLHF


def openrlhf(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "type", "threshold")
    low, high = p["threshold"]
    weights = {
        "tis": {"truncate_below": low, "truncate_above": high},
        "icepop": {"mask_below": low, "mask_above": high},
        "seq-mask-tis": {"reject": [{"by": "ratio", "over": "mean", "below": low, "above": high}]},
    }.get(p["type"])
    if weights is None:
        raise NotCovered(f"type = {p['type']}")
    data = Rows.of(i["mask"])
    proximal, behaviour = data.flat(i["old_log_probs"]), data.flat(i["rollout_log_probs"])
    found = corrected(data, corrections.difference(proximal, behaviour), **weights)
    each = losses.token_losses(rules(objective="ppo"), data.tokens, data.flat(i["log_probs"]),
                               data.flat(i["advantages"]), found.weights, proximal)  # fmt: skip
    shares = data.tokens.spread(losses.token_shares("token_mean", data.tokens.counts().long()))
    return {"loss": float((each * shares).sum()), "vllm_kl": mismatch(data.tokens, proximal, behaviour).kl}


# ------------------------------------------------------------------------------------------------------------ NeMo-RL


def nemo_loss(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    kind = p.get("truncated_importance_sampling_type")
    only(p, "truncated_importance_sampling_type", "truncated_importance_sampling_ratio",
         "truncated_importance_sampling_ratio_min", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c")  # fmt: skip
    low = p.get("truncated_importance_sampling_ratio_min")
    high = p.get("truncated_importance_sampling_ratio")
    bounds: dict[str, dict[str, Any]] = {
        "tis": {"truncate_below": low or 0.0, "truncate_above": high},
        "icepop": {"mask_below": low, "mask_above": high},
        "seq-mask-tis": {"reject": [{"by": "ratio", "over": "mean", "below": low, "above": high}]},
    }
    weights = bounds.get(kind or "", {})
    valid = [[number(a) * number(b) for a in row] for row, b in zip(i["tm"], i["smk"], strict=True)]
    data = Rows.of(valid)
    tokens, proximal, behaviour = data.tokens, data.flat(i["prev"]), data.flat(i["gen"])
    x = corrections.difference(proximal, behaviour)
    found = corrected(data, x, **weights)
    ours = rules(objective="ppo", clip_low=p.get("ratio_clip_min", 0.2), clip_high=p.get("ratio_clip_max", 0.2),
                 dual_clip=p.get("ratio_clip_c"))  # fmt: skip
    each = losses.token_losses(ours, tokens, data.flat(i["cur"]), data.flat(i["a"]), found.weights, proximal)
    mixture = torch.logaddexp(proximal, behaviour) - math.log(2)
    ratio = corrections.ratios(tokens, x)
    outside = None
    if kind == "seq-mask-tis":
        samples = Tokens(torch.arange(tokens.episodes), tokens.present(), tokens.episodes)
        outside = masked_mean(samples, tokens.maxima(found.rejected["rejected"]))
    elif kind is not None and high is not None:
        outside = masked_mean(tokens, (ratio < (low or 0.0)) | (ratio > high))

    def k3(a: torch.Tensor, b: torch.Tensor) -> float:
        n = float(tokens.counts().sum())
        return mismatch(tokens, a, b).kl_k3 * n / (n + 1e-8)

    return {
        "loss": masked_mean(tokens, each), "is_oob_ratio": outside,
        "sampling_importance_ratio": masked_mean(tokens, found.weights),
        "gen_kl_error": k3(proximal, behaviour), "policy_kl_error": k3(behaviour, proximal),
        "js": 0.5 * k3(proximal, mixture) + 0.5 * k3(behaviour, mixture),
        "token_mult_prob_error": masked_mean(tokens, rejection.factor(x)),
    }  # fmt: skip


def nemo_baseline(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "leave_one_out_baseline")
    rewards, counted = vector(i["rewards"]), vector(i["valid_mask"]) > 0
    baseline, deviation = (leave_one_out if p.get("leave_one_out_baseline", True) else whole_group)(rewards, counted)
    return {"baseline": baseline.tolist(), "std": deviation.tolist(), "advantage": (rewards - baseline).tolist()}


def nemo_factor(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    """Episodes whose probabilities differ by more than a factor, on average over tokens, leave."""
    only(p, "seq_logprob_error_threshold")
    data = Rows.of([[number(a) * number(b) for a in row]
                    for row, b in zip(i["token_mask"], i["sample_mask"], strict=True)])  # fmt: skip
    tokens = data.tokens
    x = corrections.difference(data.flat(i["prev"]), data.flat(i["gen"]))
    limit = p["seq_logprob_error_threshold"]
    out = tokens.maxima(corrected(data, x, reject=[{"by": "factor", "over": "mean", "above": limit}])
                        .rejected["rejected"]) > 0  # fmt: skip
    factors = tokens.means(rejection.factor(x))
    rewards = vector(i.get("rewards", [1.0] * tokens.episodes))

    def range_of(values: torch.Tensor, end: str) -> dict[str, float]:
        taken = (values.max(), values.mean(), values.min()) if len(values) else (torch.zeros(()),) * 3
        return {f"{name}_seq_mult_prob_error{end}": float(value)
                for name, value in zip(("max", "mean", "min"), taken, strict=True)}  # fmt: skip

    return {"sample_mask": torch.where(out, 0.0, vector(i["sample_mask"])).tolist(), "metrics": {
        **range_of(factors[tokens.present()], ""), **range_of(factors[tokens.present() & ~out], "_after_mask"),
        "num_masked_seqs": int(out.sum()),
        "masked_correct_pct": share(rewards[out] == 1) if bool(out.any()) else 0.0,
    }}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- SkyRL


def skyrl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    only(p, "tis_ratio_type", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high", "sequence_mask_metric",
         "geo_mask_low", "geo_mask_high", "product_mask_low", "product_mask_high", "outlier_token_is_threshold_low",
         "outlier_token_is_threshold_high", "token_mask_is_threshold_low", "token_mask_is_threshold_high")  # fmt: skip
    data = Rows.of(i["mask"])
    tokens = data.tokens
    x = corrections.difference(data.flat(i["old"]), data.flat(i["rollout"]))
    ratio = corrections.ratios(tokens, x)
    seen = torch.where(tokens.used, ratio, torch.zeros_like(ratio))  # SkyRL counts padding as 0 in all but the mean
    metrics: dict[str, float] = {
        "is_ratio_mean": float(tokens.mean(ratio)), "is_ratio_std": float(seen.std()),
        "is_ratio_max": float(seen.max()), "is_ratio_min": float(seen.min()),
    }  # fmt: skip
    reject: list[dict[str, Any]] = []
    loss: dict[str, Any] = {}
    low, high = (p.get(f"outlier_token_is_threshold_{end}") for end in ("low", "high"))
    if low is not None or high is not None:
        loss |= {"veto_below": low or 0.0, "veto_above": high}
        wild = {"high": ratio > (high or math.inf), "low": ratio < (low or 0.0)}
        for end, name in (("high", "over_high"), ("low", "under_low")):
            metrics[f"outlier_seq_{name}_ratio"] = share(tokens.maxima(wild[end]) > 0)
        metrics["outlier_seq_masked_ratio"] = share(tokens.maxima(wild["high"] | wild["low"]) > 0)
    low, high = (p.get(f"token_mask_is_threshold_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        reject.append({"by": "ratio", "over": "token", "below": low, "above": high})
        metrics["token_mask_ratio"] = float(tokens.mean((ratio < low) | (ratio > high)))
    if metric := p.get("sequence_mask_metric"):
        over, name, default = {"geometric": ("mean", "geo", (0.99, 1.01)),
                               "product": ("sum", "product", (0.5, 2.0))}[metric]  # fmt: skip
        low, high = p.get(f"{name}_mask_low", default[0]), p.get(f"{name}_mask_high", default[1])
        reject.append({"by": "ratio", "over": over, "below": low, "above": high})
        value = tokens.means(rejection.statistic(tokens, x, "ratio", over)).exp()
        metrics |= {f"{name}_sequence_mask_over_high_ratio": share(value > high),
                    f"{name}_sequence_mask_under_low_ratio": share(value < low),
                    f"{name}_sequence_mask_masked_ratio": share((value > high) | (value < low))}  # fmt: skip
    kept = corrected(data, x, reject=reject, **loss).kept(tokens).used
    weights = None
    if level := p.get("tis_ratio_type"):
        cap = p.get(f"{level}_tis_ratio_clip_high", {"token": 2.0, "sequence": 5.0}[level])
        found = corrected(data, x, ratio_level=level, truncate_above=cap).weights
        weights = data.rows(padded(data, found, 1.0)) if level == "token" else data.first(found)
        capped = corrections.ratios(tokens, x, level) > cap
        metrics["tis_token_clip_high_ratio" if level == "token" else "tis_seq_clip_high_ratio"] = (
            float(tokens.mean(capped)) if level == "token" else share(tokens.maxima(capped) > 0))  # fmt: skip
    return {"ratio": weights, "mask": data.rows(kept), "metrics": metrics}


FUNCTIONS = {
    "_generate_and_score_completions (IS block L2579-2624)": trl_weights,
    "IS block L2579-2624": trl_weights,
    "_generate_and_score_completions (advantage block L2679-2730)": trl_advantages,
    "GRPOTrainer.get_off_policy_mask": trl_opsm,
    "default_loss_fn": prime,
    "compute_mis_weights": slime_weights,
    "_post_process_rewards": slime_rewards,
    "apply_rejection_sampling": areal_rejection,
    "_apply_m2po_masking": areal_m2po,
    "PolicyLoss.forward": openrlhf,
    "ClippedPGLossFn.__call__": nemo_loss,
    "calculate_baseline_and_std_per_prompt": nemo_baseline,
    "compute_and_apply_seq_logprob_error_masking": nemo_factor,
    "compute_off_policy_correction": skyrl,
}
# Compared in float32, whatever dtype the inputs have: SkyRL takes exp in it.
SINGLE = {"compute_off_policy_correction"}
