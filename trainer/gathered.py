"""Decides how what each rank found of its own rows becomes what every rank knows of all rows: a token is in one rank's
row, so columns that hold 0 elsewhere are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import MicroBatch
from .ranks import Ranks
from .report import Scored
from .spread import spread


def own_rows(rows: Sequence[MicroBatch], ranks: Ranks) -> Iterator[tuple[int, MicroBatch, bool]]:
    """The rows that this rank computes, with their numbers; as many as any other does, so that a rank may go over the
    shortest row once more for nothing (True)."""
    shares = spread([len(row.ids) for row in rows], ranks.size)
    own = shares[ranks.rank]
    for number in own:
        yield number, rows[number], False
    shortest = min(range(len(rows)), key=lambda number: len(rows[number].ids))
    for _ in range(len(own), max(map(len, shares))):
        yield shortest, rows[shortest], True


Columns = Mapping[str, NDArray[Any]]


def gathered(rows: Sequence[MicroBatch], found: Mapping[int, Columns], spare: Mapping[int, Columns], ranks: Ranks
             ) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Columns over all rows' tokens [k], from those of this rank's rows by number; float64 where ranks are several.
    `spare`: of rows that are another's; a rank may have no other."""
    names = list(next(iter({**spare, **found}.values())))
    if ranks.size == 1:
        return {name: np.concatenate([found[number][name] for number in range(len(rows))]) for name in names}
    places = np.cumsum([0, *(len(row.targets) for row in rows)])
    table = np.zeros((len(names), places[-1]))
    for number, columns in found.items():
        for line, name in enumerate(names):
            table[line, places[number] : places[number + 1]] = columns[name]
    return dict(zip(names, ranks.total(torch.from_numpy(table)).numpy(), strict=True))


def joined(rows: Sequence[MicroBatch], parts: Mapping[int, Scored], spare: Mapping[int, Scored], ranks: Ranks
           ) -> Scored:  # fmt: skip
    """The tokens of all rows, from this rank's by number of the row; `spare` as in `gathered`."""
    if ranks.size == 1:
        return Scored.joined([parts[number] for number in range(len(rows))])
    found = gathered(rows, _columns(parts), _columns(spare), ranks)
    current, log_ratio, correction = (found.pop(name) for name in ("current", "log_ratio", "correction"))
    behaviour, weights, versions, episode = (np.concatenate([getattr(row, name) for row in rows])
                                             for name in ("behaviour", "weights", "versions", "episode"))  # fmt: skip
    rejected = {rule: out > 0 for rule, out in found.items()}
    return Scored(current, behaviour, log_ratio, weights, correction, versions, episode, rejected)


def _columns(parts: Mapping[int, Scored]) -> dict[int, Columns]:
    return {number: {"current": part.current, "log_ratio": part.log_ratio, "correction": part.correction,
                     **part.rejected} for number, part in parts.items()}  # fmt: skip
