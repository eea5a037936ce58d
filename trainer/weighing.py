"""Decides what each token of a batch weighs as its version begins: advantages, ratios, rejections, denominators; and
how the batch is shared among the optimizer steps inside the version. Bad numbers are refused here, at one door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.errors import NonFiniteLogprob
from headrace.schemas.settings import LossSettings

from . import corrections
from .advantages import EPSILON, advantages, lone
from .batches import Episode, Group, MicroBatch, counted
from .corrections import Correction
from .losses import Objective
from .reductions import CLAMP, Tokens
from .rejection import Rejection
from .report import Scored


@dataclass(frozen=True)
class StepSettings(Correction, Objective):
    """What of the run settings decides a step: those under which the batch's manifest was decided."""

    learning_rate: float = 1e-5
    warmup_versions: int = 0  # the rate rises linearly over the first versions
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatches: int = 1  # optimizer steps of an epoch, each on its share of the groups
    epochs: int = 1  # times that the batch is gone through
    group_size: int = 2  # slots that a group was opened with: 1 makes `lone` count
    advantage: str = "grpo"  # one of advantages.RULES
    advantage_epsilon: float = EPSILON
    lone: str = "batch_mean"  # what a group of one is compared with: batch_mean | none
    truncate_above: float | None = 2.0  # the cap on a token's ratio
    denominator: str = "token_mean"  # one of losses.DENOMINATORS
    budget: int = 1  # model tokens that an episode may have, for `denominator = budget`
    kl: str | None = None  # one of penalties.KINDS; none: no penalty
    kl_coefficient: float = 0.0
    kl_reference: str = "initial"  # initial | behaviour
    reuse_drift_limit: float = 0.04  # second moment of a reused success beyond which all of its tokens count 0
    micro_batch_tokens: int = 1024  # row tokens of one forward and backward pass; never changes the gradient
    probe_tokens: int = 256  # row tokens of the forward pass that measures rho

    @property
    def optimizer_steps(self) -> int:
        return self.minibatches * self.epochs

    @property
    def looks_ahead(self) -> bool:
        """Whether all of the batch is scored on the served weights before any of it is trained."""
        return self.of_the_batch or self.optimizer_steps > 1


def loss_rules(loss: LossSettings) -> dict[str, Any]:
    """The `loss` section as the fields of `StepSettings` that it decides."""
    return {
        **loss.model_dump(exclude={"reject", "lone"}),
        "reject": tuple(Rejection(rule.by, rule.over, rule.below, rule.above) for rule in loss.reject),
        "lone": loss.lone or "batch_mean",
        # With bypass the objective's own ratio is that to the behaviour policy; a weight would count it twice.
        "weigh": not loss.bypass or loss.objective == "reinforce",
    }


@dataclass(frozen=True, slots=True)
class Begun:
    """What of the whole batch is settled as the version begins, before its first optimizer step."""

    advantage: torch.Tensor  # float64 [episodes]
    scored: Scored | None  # all tokens, where they are scored ahead
    kept: torch.Tensor | None  # int64 [episodes]: tokens in the denominators, where rejection shrinks them


def batch_advantages(groups: Sequence[Group], settings: StepSettings) -> torch.Tensor:
    """Of the counted episodes of a batch, float64 [episodes]."""
    rewards = [torch.tensor([episode.reward for episode in group.episodes if episode.counted], dtype=torch.float64)
               for group in groups]  # fmt: skip
    if settings.group_size == 1:
        return lone(settings.advantage, torch.cat(rewards), settings.lone, settings.advantage_epsilon)
    return torch.cat([advantages(settings.advantage, own, settings.advantage_epsilon) for own in rewards])


def lengths(members: Sequence[tuple[Group, Episode]]) -> torch.Tensor:
    """Model tokens of each counted episode, int64 [episodes]."""
    return torch.tensor([int(episode.column("mask").sum()) for _, episode in members], dtype=torch.int64)


def minibatches(groups: Sequence[Group], count: int) -> list[tuple[int, Sequence[Group]]]:
    """Whole groups in `count` shares of about equal size, in order (fewer where there are fewer groups), each with the
    number of its first counted episode. A share without a model token makes no step."""
    bounds = np.linspace(0, len(groups), min(count, len(groups)) + 1).round().astype(int)
    shares = [groups[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    firsts = np.cumsum([0, *(len(counted(share)) for share in shares[:-1])])
    return [(int(first), share) for first, share in zip(firsts, shares, strict=True) if lengths(counted(share)).sum()]


def corrected(current: NDArray[np.float64], columns: Mapping[str, NDArray[Any]], advantage: torch.Tensor,
               settings: StepSettings) -> tuple[Scored, corrections.Corrected]:  # fmt: skip
    """Tokens with their weights. `current` [k]: the trainer's log-probabilities, nats. `columns`, each [k]: behaviour,
    weights (staleness), versions, episode, which counts into `advantage` (float64 [e])."""
    behaviour, episode = torch.from_numpy(columns["behaviour"]), torch.from_numpy(columns["episode"])
    tokens = Tokens(episode, torch.from_numpy(columns["weights"]) > 0, len(advantage))
    apart = corrections.difference(torch.from_numpy(current), behaviour)
    found = corrections.correct(tokens, apart, advantage[episode], settings)
    scored = Scored(
        current, columns["behaviour"], apart.clamp(-CLAMP, CLAMP).numpy(), columns["weights"],
        found.weights.numpy(), columns["versions"], columns["episode"],
        {rule: out.numpy() for rule, out in found.rejected.items()},
    )  # fmt: skip
    return scored, found


def refuse_non_finite(members: Sequence[tuple[Group, Episode]], rows: Sequence[MicroBatch],
                      current: NDArray[np.float64]) -> None:  # fmt: skip
    """The one door for bad numbers: raises NonFiniteLogprob, with their count, where a token that may be trained has no
    finite log-probability on either side. `current` [k]: the trainer's, of all the rows' tokens. What a masked token
    holds is never looked at."""
    whole = {name: np.concatenate([getattr(row, name) for row in rows])
             for name in ("behaviour", "weights", "episode", "offset")}  # fmt: skip
    finite = np.isfinite(current) & np.isfinite(whole["behaviour"])
    bad = np.flatnonzero((whole["weights"] > 0) & ~finite)
    if not len(bad):
        return
    first = int(bad[0])
    group, episode = members[whole["episode"][first]]
    raise NonFiniteLogprob(
        f"{len(bad)} of {len(finite)} tokens have no finite log-probability; first, token {whole['offset'][first]} of"
        f" group {group.group_id}, slot {episode.slot}: behaviour {float(whole['behaviour'][first])}, trainer"
        f" {float(current[first])}. The batch was not trained"
    )
