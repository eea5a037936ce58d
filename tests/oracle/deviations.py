"""Where ours differs from a peer's value on purpose: each with what ours is and why the peer's is wrong.

tests/unit/test_oracle.py shows for each that the peer's value breaks a rule that holds for its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deviation:
    ours: dict[str, Any]  # of the result's values, as a file of cases would hold them
    why: str


DEVIATIONS: dict[str, Deviation] = {
    "verl.is.icepop_all_oob": Deviation(
        {"weights": [[0.0, 0.0]], "metrics": {"rollout_is_eff_sample_size": 0.0, "rollout_is_mean": 0.0}},
        "a batch of which every weight is masked stops verl with a division by zero; its effective sample size is 0",
    ),
    "trl.is.nan_in_padding": Deviation(
        {"ratio": [[1.0]]},
        "what stands at padding takes part: TRL multiplies by the mask, and NaN * 0 is NaN",
    ),
    "prime.dppo_nan_padding": Deviation(
        {"loss": -1.0, "grad": [0.0, -1.0]},
        "what stands at a masked token takes part: the mask is applied by multiplication, and NaN * 0 is NaN",
    ),
    "slime.nan_padding": Deviation(
        {"weights": [[1.0, 0.0]], "masks": [[1.0, 0.0]]},
        "what stands at a masked token takes part: the sum over the sequence multiplies by the mask",
    ),
    "slime.rewards.one_member_dropped": Deviation(
        {"rewards": [0.8660238981246948, -0.8660238981246948, -0.8660238981246948, 0.8660238981246948, 0.0, 0.0, 0.0]},
        "a batch collapsed into one group: with one member missing, both prompts are normalised together, and three "
        "equal rewards teach something",
    ),
    "areal.nonfinite_ratio": Deviation(
        {"mask": [[1, 0]], "weight": [[1.0, 0.0]], "filtered": 0.5},
        "a token that the policy gives no probability is kept at weight 1: its log-ratio is set to 0 where it isn't "
        "finite. Its ratio is the limit, 0 (and the trainer refuses the batch)",
    ),
    "openrlhf.icepop_inf": Deviation(
        {"loss": -0.5, "vllm_kl": -400.0},
        "NaN kept: without a clamp the ratio overflows, and inf * 0 is NaN exactly for the outlier that the filter is "
        "for",
    ),
    "nemo.tis_overflow": Deviation(
        {"loss": -0.16666666638888888, "is_oob_ratio": 0.16666666638888888, "sampling_importance_ratio": 1.1666666647},
        "non-finite weight 0: a ratio that overflows is set to 0 before it is truncated, where the cap stands for all "
        "others",
    ),
}  # fmt: skip
