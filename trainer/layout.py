"""Decides how a recorded episode is laid out: which of its tokens are context, and which stand together in one context.

An episode is a tree of spans. Each run of spans that continue one another is a strand under the whole context that it
continues, so that every sampled token is trained once, in the context in which it was sampled: an episode whose context
was compacted trains the summary after the long context, and what follows after the short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import InvalidRecord
from headrace.schemas.events import PayloadEpisode
from headrace.schemas.payload import EpisodeColumns, episode_columns

from .batches import Episode, Strand


@dataclass(frozen=True, slots=True)
class _Run:
    """Spans that continue one another: `before`, the context that they continue, and their `own` tokens, as indices of
    the episode's tokens in the log's order. `experts`: where their routing was recorded, of both one after the other
    (-1: not there)."""

    before: NDArray[np.int64]
    own: NDArray[np.int64]
    experts: NDArray[np.int16] | None = None


def laid_out(recorded: PayloadEpisode) -> Episode:
    """With a weight of 1 for every token that may be trained on, else 0. Raises InvalidRecord naming the slot."""
    columns, runs = episode_columns(recorded), _runs(recorded)
    sampling = [run for run in runs if (columns.versions[run.own] >= 0).any()] or runs[:1]
    head, *branches = (_strand(recorded.slot, columns, run) for run in sampling)
    return Episode(
        slot=recorded.slot,
        prompt=head.prompt,
        tokens=head.tokens,
        mask=head.mask,
        logprobs=head.logprobs,
        versions=head.versions,
        weights=head.weights,
        reward=recorded.reward,
        counted=True,
        temperature=recorded.temperature,
        branches=tuple(branches),
        experts=head.experts,
    )


def _runs(recorded: PayloadEpisode) -> list[_Run]:
    """Span i has sequence i + 1; its parent is the sequence of the span that it continues, -1 for the one before, 0
    (the episode's start) for none. Spans that continue one another are consecutive, so a run is a range."""
    bounds = np.cumsum([0, *(span.count for span in recorded.spans)])
    nothing = np.zeros(0, np.int64)
    starts, befores = [0], [nothing]  # of runs: the first token, and the context
    run_of: list[int] = []  # of spans
    routed: list[list[_Rows]] = [[]]  # of runs
    for i, span in enumerate(recorded.spans):
        parent = i if span.parent == -1 else span.parent
        if not 0 <= parent <= i:
            raise InvalidRecord(f"slot {recorded.slot}: span {i + 1} continues span {span.parent}, which doesn't come "
                                "before it")  # fmt: skip
        if parent != i:
            before = nothing
            if parent:
                run = run_of[parent - 1]
                before = np.concatenate([befores[run], np.arange(starts[run], bounds[parent])])
            starts.append(int(bounds[i]))
            befores.append(before)
            # What was computed for the context is what the new run goes on from.
            routed.append([(first, rows[: max(0, len(before) - first)]) for first, rows in routed[run]]
                          if parent else [])  # fmt: skip
        run_of.append(len(starts) - 1)
        if span.experts is not None:
            end = len(befores[-1]) + int(bounds[i + 1]) - starts[-1] - 1
            column = span.experts.column()
            rows = column[max(0, len(column) - end) :]
            routed[-1].append((end - len(rows), rows))
    ends = [*starts[1:], int(bounds[-1])]
    return [_Run(before, np.arange(start, end), _placed(rows, len(before) + end - start))
            for before, start, end, rows in zip(befores, starts, ends, routed, strict=True)]  # fmt: skip


_Rows = tuple[int, NDArray[np.int16]]  # the place of the first one among a run's context and own tokens, and all


def _placed(routed: Sequence[_Rows], size: int) -> NDArray[np.int16] | None:
    if not any(len(rows) for _, rows in routed):
        return None
    found = np.full((size, *routed[0][1].shape[1:]), -1, np.int16)
    for first, rows in routed:
        if rows.shape[1:] != found.shape[1:]:
            raise InvalidRecord(f"its tokens went through models of different shapes: {rows.shape[1:]} and "
                                f"{found.shape[1:]} experts")  # fmt: skip
        found[first : first + len(rows)] = rows
    return found


def _strand(slot: int, columns: EpisodeColumns, run: _Run) -> Strand:
    """Its prompt is all before its first sampled token, which must be something."""
    sampled = columns.versions[run.own] >= 0
    cut = int(np.argmax(sampled)) if sampled.any() else len(run.own)
    prompt, own = np.concatenate([run.before, run.own[:cut]]), run.own[cut:]
    if not len(prompt):
        raise InvalidRecord(f"slot {slot} has no prompt")
    return Strand(
        prompt=columns.tokens[prompt],
        tokens=columns.tokens[own],
        mask=sampled[cut:],
        logprobs=columns.logprobs[own],
        versions=columns.versions[own],
        weights=columns.trainable[own].astype(np.float32),
        experts=run.experts,
    )
