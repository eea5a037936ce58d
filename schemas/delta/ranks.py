"""Positions counted within octaves: the denser, slower way to say where elements changed.

An element of a smaller octave is likelier to change. In the order of (octave, position) the changed elements lie close
together at first and then ever farther apart, so their distances cost fewer bits. Both ends must count through the
whole base, which is what it costs; that happens in blocks, so no more than one is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native
from .numbers import OCTAVES, mantissa_of, octave
from .state import Bits, Positions

Ranks = NDArray[np.int64]
Counts = NDArray[np.int64]  # elements of each octave, [OCTAVES]

_EACH = np.arange(OCTAVES, dtype=np.uint8)
_OTHER_BASE = "the base has other octaves than the one that was encoded"
_BLOCK = 1 << 17  # elements that are sorted at a time


def _blocks(dtype: str, ranges: Sequence[Bits]) -> Iterator[tuple[int, Ranks, NDArray[np.int64]]]:
    """For each block of the ranges, end to end: its first position, its elements in the order of octaves, and where in
    that order each octave begins ([OCTAVES + 1])."""
    offset = 0
    for values in ranges:
        for start in range(0, values.size, _BLOCK):
            octaves = octave(dtype, values[start : start + _BLOCK])
            order = np.argsort(octaves, kind="stable")
            begins = np.append(np.searchsorted(octaves[order], _EACH), octaves.size)
            yield offset + start, order, begins
        offset += values.size


def to_ranks(dtype: str, ranges: Sequence[Bits], positions: Positions) -> tuple[Ranks, Counts]:
    """Ranks, ascending, of the elements at `positions` (ascending, over `ranges` end to end), and how many elements of
    each octave there are."""
    seen = np.zeros(OCTAVES, np.int64)
    octaves: list[NDArray[Any]] = []
    ranks = []
    if native.compiled is not None:
        offset = 0
        for values in ranges:
            here = positions[slice(*np.searchsorted(positions, [offset, offset + values.size]))] - offset
            octaves.append(np.empty(here.size, np.uint8))
            ranks.append(np.empty(here.size, np.int64))
            native.compiled.to_ranks(values, values.itemsize, mantissa_of(dtype), here, seen, octaves[-1], ranks[-1])
            offset += values.size
        return _in_order(octaves, ranks, seen)
    mask = np.zeros(_BLOCK, np.bool_)
    for offset, order, begins in _blocks(dtype, ranges):
        here = positions[slice(*np.searchsorted(positions, [offset, offset + order.size]))] - offset
        mask[here] = True
        found = np.flatnonzero(mask[order])
        mask[here] = False
        of = np.searchsorted(begins, found, side="right") - 1
        octaves.append(of)
        ranks.append(found - begins[of] + seen[of])
        seen += np.diff(begins)
    return _in_order(octaves, ranks, seen)


def _in_order(octaves: Sequence[NDArray[Any]], ranks: Sequence[Ranks], seen: Counts) -> tuple[Ranks, Counts]:
    first = np.cumsum(seen) - seen
    return np.sort(np.concatenate(ranks) + first[np.concatenate(octaves)]), seen


def from_ranks(dtype: str, ranges: Sequence[Bits], ranks: Ranks, counts: Counts) -> Positions:
    """Positions, ascending, of the elements of these `ranks` (ascending). Raises ValueError where the octaves of the
    base don't have these `counts`: it isn't the base that was counted."""
    at = np.cumsum(counts) - counts  # rank of the next element of each octave
    if ranks.size and ranks[-1] >= counts.sum():
        raise ValueError("positions beyond the last element")
    places = np.empty(ranks.size, np.int64)
    if native.compiled is not None:
        _find(dtype, ranges, ranks, at, counts, places)
        return places
    for offset, order, begins in _blocks(dtype, ranges):
        here = np.diff(begins)
        bounds = np.searchsorted(ranks, np.stack([at, at + here]))
        for k in np.flatnonzero(bounds[0] < bounds[1]).tolist():
            lo, hi = bounds[:, k].tolist()
            places[lo:hi] = order[ranks[lo:hi] - (at[k] - begins[k])] + offset
        at += here
    if (at != np.cumsum(counts)).any():
        raise ValueError(_OTHER_BASE)
    places.sort()
    return places


def _find(dtype: str, ranges: Sequence[Bits], ranks: Ranks, at: Ranks, counts: Counts, places: Positions) -> None:
    """`from_ranks`, compiled: one pass over the base, which meets the positions in their order."""
    assert native.compiled is not None
    ends = np.cumsum(counts)
    following, last = np.searchsorted(ranks, at), np.searchsorted(ranks, ends)
    offset = found = 0
    for values in ranges:
        found += native.compiled.from_ranks(
            values, values.itemsize, mantissa_of(dtype), offset, ranks, at, following, last, places[found:]
        )
        offset += values.size
    if (at != ends).any() or found != ranks.size:
        raise ValueError(_OTHER_BASE)
