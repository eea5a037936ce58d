"""Decides how episodes are laid out for the forward pass: which tokens share a row, what each may see, and which positions are scored.

A micro-batch is one row. The prompts of its groups form a tree: what all of them begin with comes once, then the rest of each distinct
prompt once, then each sibling's tokens. A token sees its own segment up to itself and the segments above it, nothing else, and its position
counts along that path; so the row computes what separate rows would have, without computing a shared prefix again. Where a row is cut never
changes the gradient, since every normaliser is taken over the whole batch beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Episode:
    """One sibling as it was recorded.

    prompt int32 [p], p >= 1; tokens int32 [n], everything after the prompt; mask bool [n], True where the model sampled the token.
    logprobs float32 [n]: behaviour log-probabilities in nats (anything where mask is False); versions int32 [n]: the policy version that
    sampled each. weights float32 [n]: staleness weights, 0 masks a token. `counted` episodes form the baseline and are trained on; the
    others (infra failures, surplus reserves) are left out of everything. `reward` may be None only where `counted` is False.
    """

    slot: int
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    weights: NDArray[np.float32]
    reward: float | None
    counted: bool
    temperature: float


@dataclass(frozen=True, slots=True)
class Group:
    group_id: str
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of t tokens and the k model tokens scored in it.

    ids, positions int64 [t]; segment int64 [t] and visible bool [s, s]: token i may see token j iff j <= i and
    visible[segment[i], segment[j]].
    keep int64 [k]: the row index whose hidden state predicts each scored token; targets int64 [k]; temperature, behaviour, weights
    float32 [k]; versions int32 [k]; episode int64 [k]: index into the batch's counted episodes; offset int64 [k]: index into that
    episode's tokens.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    segment: NDArray[np.int64]
    visible: NDArray[np.bool_]
    keep: NDArray[np.int64]
    targets: NDArray[np.int64]
    temperature: NDArray[np.float32]
    behaviour: NDArray[np.float32]
    weights: NDArray[np.float32]
    versions: NDArray[np.int32]
    episode: NDArray[np.int64]
    offset: NDArray[np.int64]


def counted(groups: Sequence[Group]) -> list[tuple[Group, Episode]]:
    """The episodes that are trained on, in order; `MicroBatch.episode` indexes this list."""
    return [(group, episode) for group in groups for episode in group.episodes if episode.counted]


def pack(groups: Sequence[Group], budget: int) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` row tokens, in order. A group that doesn't fit is split between siblings, and its prompt repeated; an
    episode longer than the budget has a row of its own. Every model token of every counted episode is scored in exactly one of them."""
    raise NotImplementedError
