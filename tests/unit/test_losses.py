"""Advantages, corrections and losses against hand-worked values and the values that peers' own code gives."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.schemas.errors import SettingsError

torch = pytest.importorskip("torch")

from headrace.trainer import corrections  # noqa: E402
from headrace.trainer.advantages import advantages  # noqa: E402
from headrace.trainer.losses import surrogate, token_shares  # noqa: E402


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    got = advantages("grpo", tensor(1, 0, 0, 0))
    assert got.tolist() == pytest.approx([0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3)


def test_mean_baseline_keeps_the_rewards_scale() -> None:
    assert advantages("centered", tensor(3, 1, 2)).tolist() == [1, -1, 0]


@pytest.mark.parametrize("rule", ["grpo", "centered"])
def test_equal_rewards_and_a_single_one_teach_nothing(rule: str) -> None:
    assert advantages(rule, tensor(0.3, 0.3, 0.3)).abs().max() < 1e-9
    assert advantages(rule, tensor(1.0)).tolist() == [0.0]


def test_truncation_caps_and_never_raises() -> None:
    # Ratios of the log-ratios 0.1, -0.2, 0.9 and -3 under a cap of 2; as verl's token-level truncation gives them.
    ratios = corrections.log_ratio(tensor(0.1, -0.2, 0.9, -3), tensor(0, 0, 0, 0)).exp()
    got = corrections.weights(ratios, 2.0, 0.0, None)
    assert got.tolist() == pytest.approx([1.1051709180756477, 0.8187307530779818, 2.0, 0.049787068367863944])


def test_masking_zeroes_both_sides_and_leaves_the_ratio_between() -> None:
    ratios = tensor(0.49, 0.5, 1.0, 2.0, 2.01)
    assert corrections.weights(ratios, None, 0.5, 2.0).tolist() == [0, 0.5, 1.0, 2.0, 0]


def test_without_limits_the_ratio_is_the_weight() -> None:
    assert corrections.weights(tensor(0.1, 7), None, 0.0, None).tolist() == [0.1, 7]


def test_a_wild_log_ratio_is_clamped_before_it_can_overflow() -> None:
    got = corrections.log_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert got.tolist() == [20, -20] and torch.isfinite(got.exp()).all()


def test_the_surrogates_gradient_is_reinforce_times_the_weight_and_weights_carry_none() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    weight = tensor(0.5, 0.0, 2.0)
    loss = surrogate(logprobs, tensor(1, 1, -3), weight)
    assert loss.tolist() == [-0.5, 0, 6]
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-0.5, 0, 6]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_masked_tokens_bad_number_reaches_neither_loss_nor_gradient(value: float) -> None:
    logprobs = torch.tensor([-1.0, value], requires_grad=True)
    surrogate(logprobs, tensor(1, 1), tensor(1, 0)).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1, 0]


def test_token_mean_weighs_tokens_alike_and_sequence_mean_episodes() -> None:
    lengths = torch.tensor([1, 3, 0])
    assert token_shares("token_mean", lengths).tolist() == [0.25] * 3
    assert (token_shares("sequence_mean", lengths) * lengths).tolist() == pytest.approx([0.5, 0.5, 0])


def test_an_unknown_rule_names_those_there_are() -> None:
    with pytest.raises(SettingsError, match="grpo, centered"):
        advantages("gae", tensor(1))
    with pytest.raises(SettingsError, match="token_mean"):
        token_shares("median", torch.tensor([1]))
