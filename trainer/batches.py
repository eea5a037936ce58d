"""Decides how episodes are laid out for the forward pass: which tokens share a row, what each may see, and which
positions are scored.

A micro-batch is one row. The prompts of its groups form a tree: what all of them begin with comes once, then the rest
of each distinct prompt once, then each sibling's tokens. A token sees its own segment up to itself and the segments
above it, nothing else, and its position counts along that path; so the row computes what separate rows would have,
without computing a shared prefix again. Where a row is cut never changes the gradient, since every normaliser is taken
over the whole batch beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Episode:
    """One sibling as it was recorded.

    prompt int32 [p], p >= 1; tokens int32 [n], everything after the prompt; mask bool [n], True where the model
    sampled the token. logprobs float32 [n]: behaviour log-probabilities in nats (anything where mask is False);
    versions int32 [n]: the policy version that sampled each. weights float32 [n]: staleness weights, 0 masks a token.
    `counted` episodes form the baseline and are trained on; the others (infra failures, surplus reserves) are left out
    of everything. `reward` may be None only where `counted` is False.
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
    keep int64 [k]: the row index whose hidden state predicts each scored token; targets int64 [k]; temperature,
    behaviour, weights float32 [k]; versions int32 [k]; episode int64 [k]: index into the batch's counted episodes;
    offset int64 [k]: index into that episode's tokens.
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
    """Micro-batches of at most `budget` row tokens, in order. A group that doesn't fit is split between siblings, and
    its prompt repeated; an episode longer than the budget has a row of its own. Every model token of every counted
    episode is scored in exactly one of them."""
    row = _Row()
    for index, (_, episode) in enumerate(counted(groups)):
        if not episode.mask.any():
            continue
        if row.siblings and row.size(episode) > budget:
            yield row.build()
            row = _Row()
        row.add(index, episode)
    if row.siblings:
        yield row.build()


class _Row:
    """A row being filled: distinct prompts in order of appearance, and siblings with the number of their prompt."""

    def __init__(self) -> None:
        self.prompts: dict[bytes, NDArray[np.int32]] = {}
        self.stem: NDArray[np.int32] | None = None  # what all prompts begin with
        self.siblings: list[tuple[int, Episode, int]] = []  # (index in the batch, episode, number of its prompt)
        self.tail_tokens = 0

    def size(self, episode: Episode) -> int:
        """Row tokens if `episode` were added."""
        prompts = self.prompts | {episode.prompt.tobytes(): episode.prompt}
        stem = len(self._stem_with(episode.prompt))
        own = sum(len(prompt) - stem for prompt in prompts.values())
        return stem + own + self.tail_tokens + len(_tail(episode))

    def add(self, index: int, episode: Episode) -> None:
        self.stem = self._stem_with(episode.prompt)
        key = episode.prompt.tobytes()
        self.prompts.setdefault(key, episode.prompt)
        self.siblings.append((index, episode, list(self.prompts).index(key)))
        self.tail_tokens += len(_tail(episode))

    def _stem_with(self, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.stem is None:
            return prompt
        length = min(len(self.stem), len(prompt))
        differing = np.flatnonzero(self.stem[:length] != prompt[:length])
        return self.stem[: differing[0] if len(differing) else length]

    def build(self) -> MicroBatch:
        assert self.stem is not None
        stem = len(self.stem)
        pieces: list[NDArray[np.int32]] = [self.stem]
        parents, starts = [-1], [0]  # of each segment: the one above it, and the position of its first token
        prompt_segment, prompt_end = [], []  # of each distinct prompt: its last segment, and its last token in the row
        used = stem
        for prompt in self.prompts.values():
            own = prompt[stem:]
            if len(own):
                pieces.append(own)
                parents.append(0)
                starts.append(stem)
                used += len(own)
            prompt_segment.append(len(pieces) - 1 if len(own) else 0)
            prompt_end.append(used - 1 if len(own) else stem - 1)
        keep, offsets, episodes = [], [], []
        for index, episode, number in self.siblings:
            tail = _tail(episode)
            pieces.append(tail)
            parents.append(prompt_segment[number])
            starts.append(len(episode.prompt))
            offset = np.flatnonzero(episode.mask)
            # Token o is predicted by the one before it: the prompt's last for the first token, else tail[o - 1].
            keep.append(np.where(offset == 0, prompt_end[number], used + offset - 1))
            offsets.append(offset)
            episodes.append(np.full(len(offset), index))
            used += len(tail)
        visible = np.eye(len(pieces), dtype=np.bool_)
        for segment, parent in enumerate(parents):
            if parent >= 0:
                visible[segment] |= visible[parent]
        lengths = [len(piece) for piece in pieces]

        def column(name: str, dtype: type) -> NDArray[Any]:
            parts = [getattr(e, name)[o] for (_, e, _), o in zip(self.siblings, offsets, strict=True)]
            joined: NDArray[Any] = np.concatenate(parts).astype(dtype)
            return joined

        temperatures = [np.full(len(o), e.temperature) for (_, e, _), o in zip(self.siblings, offsets, strict=True)]
        return MicroBatch(
            ids=np.concatenate(pieces).astype(np.int64),
            positions=np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            segment=np.repeat(np.arange(len(pieces)), lengths),
            visible=visible,
            keep=np.concatenate(keep),
            targets=column("tokens", np.int64),
            temperature=np.concatenate(temperatures).astype(np.float32),
            behaviour=column("logprobs", np.float32),
            weights=column("weights", np.float32),
            versions=column("versions", np.int32),
            episode=np.concatenate(episodes),
            offset=np.concatenate(offsets),
        )


def _tail(episode: Episode) -> NDArray[np.int32]:
    """The tokens after the prompt that are inputs: nothing is predicted from the last model token or beyond it."""
    return episode.tokens[: np.flatnonzero(episode.mask)[-1]]
