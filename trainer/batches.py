"""Decides how episodes are laid out for the forward pass: which tokens share a row, what each may see, and which
positions are scored.

A micro-batch is one row. The prompts of its groups form a tree: what all of them begin with comes once, then the rest
of each distinct prompt once, then each sibling's tokens. A token sees its own segment up to itself and the segments
above it, nothing else, and its position counts along that path; so the row computes what separate rows would have,
without computing a shared prefix again. Where a row is cut never changes the gradient, since every normaliser is taken
over the whole batch beforehand.

An episode that branches (its context was compacted, or several answers continue one beginning) has several strands:
each is laid out under the context in which its tokens were sampled, and all lie in one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Strand:
    """Tokens in one context: as the same fields of `Episode`. experts int16 [p + n, layers, each]: which experts of a
    mixture each of its tokens went through, prompt included, -1 where that wasn't recorded; None: nowhere."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    weights: NDArray[np.float32]
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One sibling as it was recorded.

    prompt int32 [p], p >= 1; tokens int32 [n], everything after the prompt; mask bool [n], True where the model
    sampled the token. logprobs float32 [n]: behaviour log-probabilities in nats (anything where mask is False);
    versions int32 [n]: the policy version that sampled each. weights float32 [n]: staleness weights, 0 masks a token.
    `counted` episodes form the baseline and are trained on; the others (infra failures, surplus reserves) are left out
    of everything. `reward` may be None only where `counted` is False. `branches` are further strands, each with the
    whole context that it continues as its prompt; a sampled token stands in the tokens of exactly one strand.
    `dropped`: it isn't counted because it is stale. `experts` are as of `Strand`.
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
    branches: tuple[Strand, ...] = ()
    dropped: bool = False
    experts: NDArray[np.int16] | None = None

    @property
    def strands(self) -> tuple[Episode | Strand, ...]:
        """Itself, and the branches that leave it."""
        return (self, *self.branches)

    def column(self, name: str) -> NDArray[Any]:
        """tokens, mask, logprobs, versions or weights, strand after strand."""
        if not self.branches:
            found: NDArray[Any] = getattr(self, name)
            return found
        return np.concatenate([getattr(strand, name) for strand in self.strands])


@dataclass(frozen=True, slots=True)
class Group:
    """A group's episodes as they are trained, those that don't count included."""

    group_id: str
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of t tokens and the k model tokens scored in it.

    ids, positions int64 [t]; segment int64 [t] and visible bool [s, s]: token i may see token j iff j <= i and
    visible[segment[i], segment[j]].
    keep int64 [k]: the row index whose hidden state predicts each scored token; targets int64 [k]; temperature,
    behaviour, weights float32 [k]; versions int32 [k]; episode int64 [k]: index into the batch's counted episodes;
    offset int64 [k]: index into that episode's tokens, strand after strand. experts int16 [t, layers, each]: to be
    taken by the routers (-1: they choose); None: they choose all.
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
    experts: NDArray[np.int16] | None = None


def counted(groups: Sequence[Group]) -> list[tuple[Group, Episode]]:
    """The episodes that are trained on, in order; `MicroBatch.episode` indexes this list."""
    return [(group, episode) for group in groups for episode in group.episodes if episode.counted]


def pack(groups: Sequence[Group], budget: int) -> Iterator[MicroBatch]:
    """Micro-batches of at most `budget` row tokens, in order. A group that doesn't fit is split between siblings, and
    its prompt repeated; an episode longer than the budget has a row of its own. Every model token of every counted
    episode is scored in exactly one of them, and those of one episode in the same one."""
    row = _Row()
    for index, (_, episode) in enumerate(counted(groups)):
        strands = [strand for strand in episode.strands if strand.mask.any()]
        if not strands:
            continue
        if row.siblings and row.size(strands) > budget:
            yield row.build()
            row = _Row()
        row.add(index, episode, strands)
    if row.siblings:
        yield row.build()


@dataclass(frozen=True, slots=True)
class _Sibling:
    index: int  # of its episode in the batch
    strand: Episode | Strand
    temperature: float
    first: int  # offset of its first token in its episode
    prompt: int  # number of its prompt in the row


class _Row:
    """A row being filled: distinct prompts in order of appearance, and strands with the number of their prompt."""

    def __init__(self) -> None:
        self.prompts: dict[bytes, NDArray[np.int32]] = {}
        self.stem: NDArray[np.int32] | None = None  # what all prompts begin with
        self.siblings: list[_Sibling] = []
        self.tail_tokens = 0

    def size(self, strands: Sequence[Episode | Strand]) -> int:
        """Row tokens if `strands` were added."""
        prompts, stem = dict(self.prompts), self.stem
        for strand in strands:
            prompts[strand.prompt.tobytes()] = strand.prompt
            stem = _common(stem, strand.prompt)
        assert stem is not None
        own = sum(len(prompt) - len(stem) for prompt in prompts.values())
        return len(stem) + own + self.tail_tokens + sum(len(_tail(strand)) for strand in strands)

    def add(self, index: int, episode: Episode, strands: Sequence[Episode | Strand]) -> None:
        first = dict(zip(map(id, episode.strands), np.cumsum([0, *(len(s.tokens) for s in episode.strands)]),
                         strict=False))  # fmt: skip
        for strand in strands:
            self.stem = _common(self.stem, strand.prompt)
            key = strand.prompt.tobytes()
            self.prompts.setdefault(key, strand.prompt)
            number = list(self.prompts).index(key)
            self.siblings.append(_Sibling(index, strand, episode.temperature, int(first[id(strand)]), number))
            self.tail_tokens += len(_tail(strand))

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
        for one in self.siblings:
            tail = _tail(one.strand)
            pieces.append(tail)
            parents.append(prompt_segment[one.prompt])
            starts.append(len(one.strand.prompt))
            offset = np.flatnonzero(one.strand.mask)
            # Token o is predicted by the one before it: the prompt's last for the first token, else tail[o - 1].
            keep.append(np.where(offset == 0, prompt_end[one.prompt], used + offset - 1))
            offsets.append(offset)
            episodes.append(np.full(len(offset), one.index))
            used += len(tail)
        visible = np.eye(len(pieces), dtype=np.bool_)
        for segment, parent in enumerate(parents):
            if parent >= 0:
                visible[segment] |= visible[parent]
        lengths = [len(piece) for piece in pieces]

        def column(name: str, dtype: type) -> NDArray[Any]:
            parts = [getattr(one.strand, name)[o] for one, o in zip(self.siblings, offsets, strict=True)]
            joined: NDArray[Any] = np.concatenate(parts).astype(dtype)
            return joined

        temperatures = [np.full(len(o), one.temperature) for one, o in zip(self.siblings, offsets, strict=True)]
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
            offset=np.concatenate([one.first + o for one, o in zip(self.siblings, offsets, strict=True)]),
            experts=self._experts(stem, int(sum(lengths))),
        )

    def _experts(self, stem: int, size: int) -> NDArray[np.int16] | None:
        """[size, layers, each], piece after piece; of a prompt that siblings share, the first one's."""
        shapes = [one.strand.experts.shape[1:] for one in self.siblings if one.strand.experts is not None]
        if not shapes:
            return None
        first = {one.prompt: one.strand for one in reversed(self.siblings)}
        pieces = [(self.siblings[0].strand, 0, stem)]
        pieces += [(first[number], stem, len(prompt)) for number, prompt in enumerate(self.prompts.values())]
        pieces += [(one.strand, len(one.strand.prompt), len(one.strand.prompt) + len(_tail(one.strand)))
                   for one in self.siblings]  # fmt: skip
        found, at = np.full((size, *shapes[0]), -1, np.int16), 0
        for strand, start, end in pieces:
            if strand.experts is not None:
                found[at : at + end - start] = strand.experts[start:end]
            at += end - start
        return found


def _common(stem: NDArray[np.int32] | None, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """What both begin with."""
    if stem is None:
        return prompt
    length = min(len(stem), len(prompt))
    differing = np.flatnonzero(stem[:length] != prompt[:length])
    return stem[: differing[0] if len(differing) else length]


def _tail(strand: Episode | Strand) -> NDArray[np.int32]:
    """The tokens after the prompt that are inputs: nothing is predicted from the last model token or beyond it."""
    return strand.tokens[: np.flatnonzero(strand.mask)[-1]]
