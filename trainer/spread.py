"""Decides which rows of a batch each process of a job computes: rows of about equal length at the same time, and about
equally many tokens in all.

The processes take each pass together, since every layer's weights are gathered from all of them: a short row beside a
long one would only wait. Which process computes a row changes nothing but the order in which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .batches import Group, MicroBatch, pack


def rows_of(groups: Sequence[Group], budget: int, ranks: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` row tokens; of fewer where some of the processes would have none."""
    rows = list(pack(groups, budget))
    if len(rows) < ranks:
        rows = list(pack(groups, -(-sum(len(row.ids) for row in rows) // ranks)))
    return rows


def spread(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the rows that each rank computes, in the order of its passes; `sizes` in tokens. In every pass the
    longest of the rows that are left go out, the longest of them to the rank that has had the fewest tokens. Where they
    don't come out even, some ranks have one row less."""
    if ranks == 1:
        return [list(range(len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    rows: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for first in range(0, len(order), ranks):
        free = sorted(range(ranks), key=lambda rank: (tokens[rank], rank))
        for rank, row in zip(free, order[first : first + ranks], strict=False):
            rows[rank].append(row)
            tokens[rank] += sizes[row]
    return rows
