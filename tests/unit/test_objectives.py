"""Objectives, penalties and corrections: gradients by finite differences, and what must change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from headrace.schemas.errors import SettingsError  # noqa: E402
from headrace.trainer import advantages, corrections, losses, penalties, rejection, reused  # noqa: E402
from headrace.trainer.corrections import Correction  # noqa: E402
from headrace.trainer.losses import Objective  # noqa: E402
from headrace.trainer.mismatch import effective_share, mismatch  # noqa: E402
from headrace.trainer.reductions import Tokens  # noqa: E402
from headrace.trainer.rejection import Rejection  # noqa: E402

RULES = {
    "surrogate": Objective("surrogate"),
    "reinforce": Objective("reinforce"),
    "ppo": Objective("ppo", dual_clip=3.0),
    "gspo": Objective("gspo", 0.02, 0.03),
    "cispo": Objective("cispo", 1.0, 0.5),
    "dppo_tv": Objective("surrogate", tv_low=0.02, tv_high=0.02),
}


def batch(seed: int = 0, k: int = 24, episodes: int = 4) -> tuple[Tokens, Any, Any, Any, Any]:
    """Tokens, log-probabilities, proximal ones, advantages, weights."""
    rng = torch.Generator().manual_seed(seed)
    episode = torch.arange(k) % episodes
    used = torch.rand(k, generator=rng) > 0.2
    proximal = -1 - 2 * torch.rand(k, generator=rng, dtype=torch.float64)
    logprobs = proximal + 0.4 * torch.randn(k, generator=rng, dtype=torch.float64)
    own = torch.randn(episodes, generator=rng, dtype=torch.float64)[episode]
    weights = torch.where(used, torch.rand(k, generator=rng, dtype=torch.float64) + 0.5, torch.zeros(()).double())
    return Tokens(episode, used, episodes), logprobs, proximal, own, weights


def total(name: str, tokens: Tokens, logprobs: Any, proximal: Any, own: Any, weights: Any) -> Any:
    return losses.token_losses(RULES[name], tokens, logprobs, own, weights, proximal).sum()


def gradient(name: str, tokens: Tokens, logprobs: Any, proximal: Any, own: Any, weights: Any) -> Any:
    leaf = logprobs.clone().requires_grad_()
    (found,) = torch.autograd.grad(total(name, tokens, leaf, proximal, own, weights), leaf)
    return found


# What each objective differentiates: some of its factors are constants, which finite differences mustn't move.
def differentiated(name: str, tokens: Tokens, at: Any, logprobs: Any, proximal: Any, own: Any, weights: Any) -> Any:
    if name == "cispo":
        constant = (at - proximal).exp().clamp(1 - 1.0, 1 + 0.5)
        return -(weights * constant * own * logprobs)
    if name == "gspo":
        s = tokens.spread(tokens.means(at - proximal)).exp() * (logprobs - at).exp()
        return weights * torch.maximum(-own * s, -own * s.clamp(1 - 0.02, 1 + 0.03))
    if name == "dppo_tv":
        inside = rejection.tv_kept(at, proximal, own, 0.02, 0.02)
        return torch.where(inside, -weights * own * (logprobs - proximal).exp(), torch.zeros(()).double())
    return losses.token_losses(RULES[name], tokens, logprobs, own, weights, proximal)


@pytest.mark.parametrize("name", RULES)
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    """Where the objective has a kink (a clip's edge) within the step, the two sides differ: none lies so near here."""
    tokens, logprobs, proximal, own, weights = batch()
    found = gradient(name, tokens, logprobs, proximal, own, weights)
    h = 1e-6
    for j in range(len(logprobs)):
        up, down = logprobs.clone(), logprobs.clone()
        up[j] += h
        down[j] -= h
        both = [differentiated(name, tokens, logprobs, x, proximal, own, weights).sum() for x in (up, down)]
        assert float(found[j]) == pytest.approx(float(both[0] - both[1]) / (2 * h), abs=1e-7), (name, j)
    assert float(found.abs().max()) > 0.01 and bool((found[~tokens.used] == 0).all())


@pytest.mark.parametrize("kind", penalties.KINDS)
def test_gradient_of_a_penalty_is_that_of_finite_differences(kind: str) -> None:
    tokens, logprobs, reference, _, _ = batch()
    assert torch.autograd.gradcheck(
        lambda x: penalties.penalty(kind, x, reference, tokens.used).sum(), (logprobs.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("name", RULES)
def test_masking_tokens_equals_deleting_them_and_order_is_nothing(name: str) -> None:
    tokens, logprobs, proximal, own, weights = batch(1)
    whole = gradient(name, tokens, logprobs, proximal, own, weights)
    keep = tokens.used
    left = Tokens(tokens.episode[keep], keep[keep], tokens.episodes)
    deleted = gradient(name, left, logprobs[keep], proximal[keep], own[keep], weights[keep])
    torch.testing.assert_close(whole[keep], deleted, rtol=0, atol=1e-12)
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(3))
    shuffled = gradient(name, Tokens(tokens.episode[order], keep[order], tokens.episodes), logprobs[order],
                        proximal[order], own[order], weights[order])  # fmt: skip
    torch.testing.assert_close(whole[order], shuffled, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RULES)
def test_bad_numbers_on_masked_tokens_reach_nothing(name: str, bad: float) -> None:
    tokens, logprobs, proximal, own, weights = batch(2)
    good = gradient(name, tokens, logprobs, proximal, own, weights)
    for column in (0, 1):
        now, before = logprobs.clone(), proximal.clone()
        (now, before)[column][~tokens.used] = bad
        torch.testing.assert_close(gradient(name, tokens, now, before, own, weights), good, rtol=0, atol=0)
        value = total(name, tokens, now, before, own, weights)
        assert bool(torch.isfinite(value))


@pytest.mark.parametrize("name", ["surrogate", "reinforce", "ppo", "gspo", "cispo", "dppo_tv"])
def test_where_the_proximal_policy_is_the_present_one_every_objective_has_reinforces_gradient(name: str) -> None:
    """So nothing but the weights matters at one optimizer step per version."""
    tokens, logprobs, _, own, weights = batch(4)
    found = gradient(name, tokens, logprobs, None, own, weights)
    torch.testing.assert_close(found, -weights * own, rtol=0, atol=1e-12)


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    logprobs, proximal = torch.tensor([2.0, 2.0]).double(), torch.zeros(2).double()
    own, ones = torch.tensor([-1.0, 1.0]).double(), torch.ones(2).double()
    free = losses.ppo(logprobs, own, ones, proximal)
    bounded = losses.ppo(logprobs, own, ones, proximal, dual=3.0)
    assert free.tolist() == pytest.approx([math.e**2, -1.2]) and bounded.tolist() == pytest.approx([3.0, -1.2])


# -------------------------------------------------------------------------------------------------------- corrections

ratios = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(ratios, st.sampled_from(corrections.LEVELS), st.floats(0.01, 0.9), st.floats(1.1, 100))
def test_weights_stay_within_their_bounds_and_carry_no_gradient(
    logs: list[float], level: str, low: float, high: float
) -> None:
    x = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(torch.arange(len(logs)) % 2, torch.ones(len(logs), dtype=torch.bool), 2)
    masks = Correction(ratio_level=level, mask_below=low, mask_above=high)
    cuts = Correction(ratio_level=level, truncate_below=low, truncate_above=high)
    masked, cut = (corrections.correct(tokens, corrections.difference(x, torch.zeros_like(x)), torch.zeros_like(x), r)
                   .weights for r in (masks, cuts))  # fmt: skip
    assert not masked.requires_grad and not cut.requires_grad
    assert bool(((masked == 0) | ((masked >= low) & (masked <= high))).all())
    assert bool(((cut >= low) & (cut <= high)).all())
    assert bool((masked[masked > 0] == cut[masked > 0]).all())


def test_levels_are_the_token_the_product_and_its_root_over_the_episodes_used_tokens() -> None:
    x = torch.tensor([0.5, -1.0, math.nan, 0.2]).double()
    tokens = Tokens(torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, False, True]), 2)
    assert corrections.ratios(tokens, x)[[0, 1, 3]].log().tolist() == pytest.approx([0.5, -1.0, 0.2])
    assert corrections.ratios(tokens, x, "sequence").log().tolist() == pytest.approx([-0.5] * 3 + [0.2])
    assert corrections.ratios(tokens, x, "geometric").log().tolist() == pytest.approx([-0.25] * 3 + [0.2])
    with pytest.raises(SettingsError, match="geometric"):
        corrections.ratios(tokens, x, "paragraph")


def test_normalised_weights_have_mean_1_over_the_batch() -> None:
    tokens, logprobs, proximal, own, _ = batch(5)
    x = logprobs - proximal
    for level in ("token", "sequence"):
        found = corrections.correct(tokens, x, own, Correction(ratio_level=level, truncate_above=1.5, normalise=True))
        assert float(corrections.mean_weight(tokens, found.weights, level)) == pytest.approx(1.0)
    none = corrections.correct(tokens, x, own, Correction(mask_above=1e-9, normalise=True))
    assert float(none.weights.abs().max()) == 0.0, "nothing to divide by"


@settings(max_examples=100, deadline=None)
@given(ratios, st.sampled_from(["k1", "k2", "k3", "k3_reverse", "factor", "ratio"]),
       st.sampled_from(["token", "sum", "mean", "max"]), st.floats(0.001, 5))  # fmt: skip
def test_rejection_takes_whole_episodes_or_single_tokens_and_a_wider_limit_takes_fewer(
    logs: list[float], by: str, over: str, above: float
) -> None:
    x = torch.tensor(logs, dtype=torch.float64)
    tokens = Tokens(torch.arange(len(logs)) % 3, torch.ones(len(logs), dtype=torch.bool), 3)
    narrow, wide = (rejection.kept(tokens, x, [Rejection(by, over, above=limit)]) for limit in (above, 2 * above))
    assert bool((wide | ~narrow).all())
    if over != "token":
        for one in (narrow, wide):
            assert all(len(set(one[tokens.episode == e].tolist())) <= 1 for e in range(3))


def test_k1_k2_and_k3_are_the_estimators_of_the_divergence() -> None:
    """On samples of mu: k1 and k3 have KL(mu || pi) as their mean, whatever pi is; k2 nearly, where pi is near."""
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.45, 0.25, 0.3]).double()
    x = (pi / mu).log()
    exact = float((mu * (mu / pi).log()).sum())
    assert float((mu * rejection.k1(x)).sum()) == pytest.approx(exact)
    assert float((mu * rejection.k3(x)).sum()) == pytest.approx(exact)
    assert float((mu * rejection.k2(x)).sum()) == pytest.approx(exact, rel=0.2)
    assert float((pi * rejection.k3_reverse(x)).sum()) == pytest.approx(float((pi * (pi / mu).log()).sum()))


def test_veto_takes_the_episode_of_one_wild_token_and_opsm_only_pushes_down_spare() -> None:
    x = torch.tensor([0.0, -12.0, 0.0, 0.1, 6.0, 0.0]).double()
    tokens = Tokens(torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6, dtype=torch.bool), 3)
    assert rejection.unvetoed(tokens, x, 1e-4, None).tolist() == [False, False, True, True, True, True]
    assert rejection.unvetoed(tokens, x, 1e-4, 100.0).tolist() == [False, False, True, True, False, False]
    assert rejection.unvetoed(tokens.only(x > -1), x, 1e-4, 100.0).tolist()[:2] == [True, True], "of used tokens"
    own = torch.tensor([-1.0, -1, 1, 1, -1, -1]).double()
    assert rejection.opsm(tokens, x, own, 0.5).tolist() == [False, False, True, True, True, True]
    assert rejection.opsm(tokens, x, -own, 0.5).tolist() == [True] * 6


@settings(max_examples=100, deadline=None)
@given(ratios, st.floats(0.001, 10))
def test_m2po_takes_the_fewest_tokens_and_those_of_the_largest_square(logs: list[float], limit: float) -> None:
    x = torch.tensor(logs, dtype=torch.float64).clamp(-20, 20)
    tokens = Tokens(torch.zeros(len(logs), dtype=torch.int64), torch.ones(len(logs)).bool(), 1)
    keep = rejection.m2_kept(tokens, x, limit)
    left, gone = x[keep].square(), x[~keep].square()
    assert len(left) and (float(left.mean()) < limit or len(left) == 1)
    if len(gone):
        assert float(gone.min()) >= float(left.max())
        assert float(torch.cat([left, gone.min()[None]]).mean()) >= limit * (1 - 1e-9)


def test_tv_mask_holds_back_only_what_already_moved_in_the_direction_of_its_advantage() -> None:
    before, after = torch.tensor([0.1, 0.5, 0.1, 0.5]).log(), torch.tensor([0.5, 0.1, 0.5, 0.1]).log()
    own = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()
    assert rejection.tv_kept(after, before, own, 0.2, 0.2).tolist() == [False, True, True, False]


# --------------------------------------------------------------------------------------------------------- advantages


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.float64)


def test_infra_failed_members_leave_before_mean_and_deviation() -> None:
    rewards, counted = tensor(1, 1, 0, math.nan), torch.tensor([True, True, True, False])
    for rule in advantages.RULES:
        found = advantages.of_members(rule, rewards, counted)
        assert found.tolist() == [*advantages.advantages(rule, tensor(1, 1, 0)).tolist(), 0.0]


@pytest.mark.parametrize("rule", advantages.RULES)
def test_zero_variance_is_tested_after_failures_left_and_a_single_survivor_teaches_nothing(rule: str) -> None:
    """[1, 1, 1, failed] has no signal, however the failed one was scored; [1, failed, failed] neither."""
    equal = advantages.of_members(rule, tensor(1, 1, 1, 0), torch.tensor([True, True, True, False]))
    assert equal.abs().max() < 1e-9
    single = advantages.of_members(rule, tensor(1, 0, 0), torch.tensor([True, False, False]))
    assert single.tolist() == [0, 0, 0]
    assert advantages.of_members(rule, tensor(1, 0), torch.tensor([False, False])).tolist() == [0, 0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_rloo_compares_with_the_mean_of_the_others(values: list[float]) -> None:
    found = advantages.rloo(tensor(*values)).tolist()
    others = [float(np.mean(values[:i] + values[i + 1 :])) for i in range(len(values))]
    assert found == pytest.approx([v - o for v, o in zip(values, others, strict=True)], abs=1e-9)


def test_group_of_one_is_worth_what_it_is_told_to_compare_with() -> None:
    rewards = tensor(1, 0, 0.5)
    assert advantages.lone("centered", rewards, "none").tolist() == rewards.tolist()
    assert advantages.lone("centered", rewards, "batch_mean").tolist() == [0.5, -0.5, 0]
    assert advantages.lone("grpo", rewards, "none").tolist() == pytest.approx((rewards / (1 + 1e-6)).tolist())
    with pytest.raises(SettingsError, match="batch_mean"):
        advantages.lone("grpo", rewards, "median")


# ------------------------------------------------------------------------------------------- denominators and figures


def test_denominators_are_those_of_their_papers() -> None:
    lengths = torch.tensor([2, 6, 0])
    shares = {rule: (losses.token_shares(rule, lengths, 8) * lengths).tolist() for rule in losses.DENOMINATORS}
    assert shares["token_mean"] == pytest.approx([0.25, 0.75, 0])
    assert shares["sequence_mean"] == pytest.approx([0.5, 0.5, 0])
    assert shares["sequence_sum"] == pytest.approx([1, 3, 0])
    assert shares["budget"] == pytest.approx([1 / 8, 3 / 8, 0])


def test_success_used_again_counts_as_a_token_of_the_batch_does() -> None:
    lengths = torch.tensor([2, 6])
    for rule in ("token_mean", "sequence_sum", "budget"):
        assert reused.share(rule, lengths, 5, 8) == losses.token_shares(rule, lengths, 8)[0]
    assert reused.share("sequence_mean", lengths, 5) == pytest.approx(1 / (2 * 5))


def test_figures_of_equal_policies_are_0_and_their_mean_ratio_1() -> None:
    tokens, logprobs, _, _, _ = batch(6)
    found = mismatch(tokens, logprobs, logprobs)
    assert (found.kl, found.kl_k3, found.chi2, found.chi2_episode) == (0, 0, 0, 0) and found.ratio == 1
    assert effective_share(torch.ones(5).double()) == 1 and effective_share(torch.zeros(3).double()) == 0
