"""Where elements changed, as the distances between them.

Distances are near-geometric: their low bits are noise and take the room they take, the high part is nearly constant and
compresses. So each row of distances is cut at a bit that its mean decides, which also follows the density from place to
place; the high parts are one column of bytes, the low bits lie apart in columns of 8, 4, 2 and 1 bits. Where nearly
everything changed, a bit for every element is shorter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .streams import Columns, Writer

Gaps = NDArray[np.int64]

_ROW = 4096  # distances that are cut at the same bit
_HIGH_MEAN = 5.0  # of the high part, at least: fewer values than that and the compressor sees matches that aren't there
_DENSE_MEAN = 3.0  # elements between two changed ones; below it a bitmap is shorter
_BITMAP = 255  # in place of a row's cut
_ESCAPE = 255  # a high part of so much or more: the rest is in a column of its own
_WIDTHS = (8, 4, 2, 1)


def put_gaps(out: Writer, gaps: Gaps) -> None:
    """`gaps`: elements between a changed one and the one before it, >= 0, one or more."""
    starts = np.arange(0, gaps.size, _ROW)
    means = np.add.reduceat(gaps, starts) / np.minimum(_ROW, gaps.size - starts)
    cuts = np.log2(np.maximum(means, _HIGH_MEAN) / _HIGH_MEAN).astype(np.uint8)
    cuts[means < _DENSE_MEAN] = _BITMAP
    out.put(cuts.tobytes())
    high, low = [], []
    for cut, rows in _by_cut(cuts, gaps.size):
        part = gaps[rows]
        if cut == _BITMAP:
            bits = np.zeros(int(part.sum()) + part.size, np.bool_)
            bits[np.cumsum(part + 1) - 1] = True
            out.put(np.packbits(bits))
            continue
        high.append(part >> cut)
        low += _cut_off(part, cut)
    if high:
        every = np.concatenate(high)
        escaped = every[every >= _ESCAPE] - _ESCAPE
        out.put(np.minimum(every, _ESCAPE).astype(np.uint8))
        out.put(_planes(escaped))
    for column in low:
        out.put(column)


def take_gaps(columns: Columns, count: int) -> Gaps:
    """What `put_gaps` wrote: int64 [count], >= 0. Raises ValueError where that isn't what is there."""
    cuts = columns.take(-(-count // _ROW))
    if ((cuts > 56) & (cuts != _BITMAP)).any():
        raise ValueError("distances that are cut nowhere")
    gaps = np.empty(count, np.int64)
    groups = list(_by_cut(cuts, count))
    for cut, rows in groups:
        if cut == _BITMAP:
            places = np.flatnonzero(np.unpackbits(columns.take()))
            gaps[rows] = np.diff(places, prepend=-1) - 1  # ValueError where there are more or fewer
    groups = [(cut, rows) for cut, rows in groups if cut != _BITMAP]
    if not groups:
        return gaps
    sizes = [gaps[rows].size for _, rows in groups]
    high = columns.take(sum(sizes))
    wide = high.astype(np.int64)
    escaped = _unplanes(columns.take())
    if escaped.size or high.max() == _ESCAPE:
        wide[high == _ESCAPE] += escaped
    at = 0
    for (cut, rows), size in zip(groups, sizes, strict=True):
        part = wide[at : at + size]
        at += size
        gaps[rows] = _put_back(columns, part, cut)
    if gaps.min() < 0:
        raise ValueError("distances that go backwards")
    return gaps


def _by_cut(cuts: NDArray[np.uint8], count: int) -> list[tuple[int, slice | NDArray[np.bool_]]]:
    """For each cut that occurs, the distances in rows that have it."""
    distinct = np.unique(cuts).tolist()
    if len(distinct) == 1:
        return [(distinct[0], slice(None))]
    each = np.repeat(cuts, _ROW)[:count]
    return [(cut, each == cut) for cut in distinct]


def _cut_off(gaps: Gaps, cut: int) -> list[NDArray[np.uint8]]:
    """The low `cut` bits, lowest first, in columns of 8, 4, 2 and 1 bits."""
    columns = []
    for width in _WIDTHS:
        while cut >= width:
            part = gaps.astype(np.uint8) if width == 8 else gaps.astype(np.uint8) & np.uint8((1 << width) - 1)
            columns.append(_pack(part, width))
            gaps = gaps >> width
            cut -= width
    return columns


def _put_back(columns: Columns, high: Gaps, cut: int) -> Gaps:
    gaps, at, left = high << cut, 0, cut
    for width in _WIDTHS:
        while left >= width:
            part = _unpack(columns.take(-(-high.size * width // 8)), width, high.size)
            gaps |= part if at == 0 else part.astype(np.int64) << at
            at, left = at + width, left - width
    return gaps


def _pack(part: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Values of `width` bits, several to a byte, the first lowest."""
    if width == 8:
        return part
    per = 8 // width
    padded = np.concatenate([part, np.zeros(-part.size % per, np.uint8)]) if part.size % per else part
    packed = padded[0::per].copy()
    for i in range(1, per):
        packed |= padded[i::per] << np.uint8(width * i)
    return packed


def _unpack(packed: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint8]:
    if width == 8:
        return packed
    per = 8 // width
    part = np.empty(packed.size * per, np.uint8)
    mask = np.uint8((1 << width) - 1)
    for i in range(per):
        np.bitwise_and(packed >> np.uint8(width * i), mask, out=part[i::per])
    return part[:count]


def _planes(wide: Gaps) -> bytes:
    return wide.view(np.uint8).reshape(-1, 8).T.tobytes()


def _unplanes(data: NDArray[np.uint8]) -> Gaps:
    return np.ascontiguousarray(data.reshape(8, -1).T).view(np.int64).reshape(-1)
