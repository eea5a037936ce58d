"""Decides how a batch becomes the next version: forward on served weights, loss, gradients, optimizer, and rounding to what is served.

The whole step is in the order in which it happens. Nothing here reads or writes a log or a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from .batches import Group


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What of the run settings decides a step; the caller fills it from the settings under which the manifest was decided."""

    learning_rate: float = 1e-5
    warmup_versions: int = 0  # the rate rises linearly over the first versions
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    advantage: str = "grpo"  # grpo: (r - mean) / (std + eps) | mean: r - mean
    correction: str = "truncate"  # none | truncate | mask
    ratio_low: float = 0.5  # mask: below it a token gets weight 0
    ratio_high: float = 2.0  # truncate: cap; mask: above it a token gets weight 0
    denominator: str = "token_mean"  # token_mean | sequence_mean
    micro_batch_tokens: int = 1024
    probe_tokens: int = 256


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Model tokens of one group: trained, and masked by rule; they add up to the model tokens of its counted episodes."""

    group_id: str
    trained: int
    masked: dict[str, int]  # rule ("stale" | "ratio") -> tokens


@dataclass(frozen=True, slots=True)
class LagStatistics:
    """Log-ratio (served weights of the target version minus behaviour) of the model tokens sampled by one version, in nats."""

    version: int
    tokens: int
    mean_abs: float
    max_abs: float
    second_moment: float  # of |log-ratio| winsorised at 1


@dataclass(frozen=True, slots=True)
class StepReport:
    version: int  # the version that this step made
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    reward_mean: float  # over counted episodes
    groups: tuple[GroupCounts, ...]
    lags: tuple[LagStatistics, ...]  # by behaviour version, ascending
    ess: float  # effective sample size of the correction's weights, as a share of the trained tokens
    rho: float  # RMS change of log-probability from the version before to this one, on the probe
    probe_tokens: int
    row_tokens: int  # what went through the forward pass
    seconds: dict[str, float]  # forward_backward, optimizer, probe


class TrainState:
    """Float32 masters, AdamW moments, and the model that computes with the served weights.

    `dtype` is the published one (bfloat16 | float16 | float32), `compute_dtype` that of the forward pass: served weights are exactly
    representable in it.
    """

    version: int

    def __init__(self, model_path: str | Path, dtype: str = "bfloat16", compute_dtype: str = "float32", device: str = "cpu") -> None:
        raise NotImplementedError

    def train_batch(self, groups: Sequence[Group], target_version: int, settings: StepSettings) -> StepReport:
        """One committed batch: version `target_version`, which must be the one after the present. On an error nothing has changed."""
        raise NotImplementedError

    def served_bits(self) -> dict[str, NDArray[Any]]:
        """Name -> the served weights' bits (bfloat16 and float16 as uint16, float32 as uint32), live and read-only; tied tensors once, in the
        order of `named_parameters()`. They change in `train_batch`: copy what must outlive it."""
        raise NotImplementedError

    def state_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Everything a checkpoint needs: flat name -> tensor (live, not copied), and metadata of strings, for safetensors."""
        raise NotImplementedError

    def load_state(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Back to a checkpoint's state, bit for bit."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, str]:
        """What decides the bits besides the data: device, library versions, CPU dispatch, threads, dtypes."""
        raise NotImplementedError
