"""Where elements changed, as the distances between them.

Distances are near-geometric: their low bits are noise and take the room they take, the high part is nearly constant and
compresses. So each row of distances is cut at a bit that its mean decides, which also follows the density from place to
place; the high parts are one column of bytes, the low bits lie apart in columns of 8, 4, 2 and 1 bits. Where nearly
everything changed, a bit for every element is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .state import Positions
from .streams import Columns, Writer

Gaps = NDArray[np.unsignedinteger[Any]]  # elements between a changed one and the one before it

_Rows = slice | NDArray[np.bool_]

_ROW = 4096  # distances that are cut at the same bit
_HIGH_MEAN = 5.0  # of the high part, at least: fewer values than that and the compressor sees matches that aren't there
_DENSE_MEAN = 3.0  # elements between two changed ones; below it a bitmap is shorter
_BITMAP = 255  # in place of a row's cut
_ESCAPE = 255  # a high part of so much or more: the rest is in a column of its own
_WIDTHS = (8, 4, 2, 1)
_FARTHEST = 1 << 44  # no two elements of any model are so far apart; sums of a chunk's distances stay below 2^63


def put_gaps(out: Writer, positions: Positions) -> None:
    """`positions`: ascending, >= 0, one or more; gone through in rows of gaps."""
    places = positions.astype(np.uint32) if positions[-1] < 1 << 32 else positions.view(np.uint64)
    gaps = places.copy()
    gaps[1:] -= places[:-1]
    gaps[1:] -= gaps.dtype.type(1)
    starts = np.arange(0, gaps.size, _ROW)
    means = np.add.reduceat(gaps, starts) / np.minimum(_ROW, gaps.size - starts)
    fitting = np.log2(np.maximum(means, _HIGH_MEAN) / _HIGH_MEAN)
    middle = np.floor(fitting[fitting.size // 2])
    fitting[np.abs(fitting - middle - 0.5) < 0.8] = middle  # rows that hardly differ are gone through as one
    cuts = fitting.astype(np.uint8)
    cuts[means < _DENSE_MEAN] = _BITMAP
    out.put(cuts.tobytes())
    high, low = [], []
    for cut, rows in _by_cut(cuts, gaps.size):
        part = gaps[rows]
        if cut == _BITMAP:
            ends = np.cumsum(part.astype(np.int64) + 1)
            bits = np.zeros(int(ends[-1]), np.bool_)
            bits[ends - 1] = True
            out.put(np.packbits(bits))
            continue
        high.append(part >> part.dtype.type(cut))
        low += _cut_off(part, cut)
    if high:
        every = np.concatenate(high) if len(high) > 1 else high[0]
        escaped = every[every >= _ESCAPE].astype(np.uint64) - np.uint64(_ESCAPE)
        out.put(np.minimum(every, every.dtype.type(_ESCAPE)).astype(np.uint8))
        out.put(_planes(escaped))
    for column in low:
        out.put(column, compress=False)  # noise


def take_gaps(columns: Columns, count: int) -> Positions:
    """The positions (int64 [count], ascending, >= 0) that `put_gaps` wrote. Raises ValueError where that isn't what is
    there."""
    cuts = columns.take(-(-count // _ROW))
    groups = list(_by_cut(cuts, count))
    if any(56 < cut < _BITMAP for cut, _ in groups):
        raise ValueError("distances that are cut nowhere")
    found: list[tuple[_Rows, Gaps]] = []
    for rows in [rows for cut, rows in groups if cut == _BITMAP]:
        places = np.flatnonzero(np.unpackbits(columns.take()))
        if places.size != _size(rows, count):
            raise ValueError(f"{places.size} places in a bitmap of {_size(rows, count)}")
        found.append((rows, (np.diff(places, prepend=-1) - 1).view(np.uint64)))
    groups = [(cut, rows) for cut, rows in groups if cut != _BITMAP]
    sizes = [_size(rows, count) for _, rows in groups]
    if groups:
        high = columns.take(sum(sizes))
        escaped = _unplanes(columns.take())
        # Without escapes the high part has 8 bits, and 16 hold it with as many low bits.
        wide: Gaps = high.astype(np.uint64 if escaped.size or max(cut for cut, _ in groups) > 7 else np.uint16)
        if escaped.size or high.max() == _ESCAPE:
            wide[high == _ESCAPE] += escaped.astype(wide.dtype)
        at = 0
        for (cut, rows), size in zip(groups, sizes, strict=True):
            found.append((rows, _put_back(columns, wide[at : at + size], cut)))
            at += size
    if len(found) == 1:
        gaps = found[0][1]
    else:
        gaps = np.empty(count, np.uint64)
        for rows, part in found:
            gaps[rows] = part
    gaps[1:] += gaps.dtype.type(1)
    positions = np.cumsum(gaps, dtype=np.int64)
    if gaps.itemsize == 8 and (gaps > _FARTHEST).any():
        raise ValueError("distances that are beyond all weights")
    return positions


def _by_cut(cuts: NDArray[np.uint8], count: int) -> Iterator[tuple[int, _Rows]]:
    """For each cut that occurs, the gaps in rows that have it."""
    if (cuts == cuts[0]).all():
        yield int(cuts[0]), slice(None)
        return
    each = np.repeat(cuts, _ROW)[:count]
    for cut in np.unique(cuts).tolist():
        yield cut, each == cut


def _size(rows: _Rows, count: int) -> int:
    return count if isinstance(rows, slice) else int(np.count_nonzero(rows))


def _cut_off(gaps: Gaps, cut: int) -> list[NDArray[np.uint8]]:
    """The low `cut` bits, lowest first, in columns of 8, 4, 2 and 1 bits."""
    columns, at = [], 0
    for width in _WIDTHS:
        while cut >= width:
            part = (gaps >> gaps.dtype.type(at) if at else gaps).astype(np.uint8)
            columns.append(_pack(part, width))
            at, cut = at + width, cut - width
    return columns


def _put_back(columns: Columns, high: Gaps, cut: int) -> Gaps:
    unsigned, at = high.dtype.type, 0
    gaps = high << unsigned(cut) if cut else high
    for width in _WIDTHS:
        while cut - at >= width:
            part = _unpack(columns.take(-(-high.size * width // 8)), width, high.size)
            gaps |= part.astype(high.dtype) << unsigned(at) if at else part
            at += width
    return gaps


def _pack(part: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """The low `width` bits of values, several to a byte, the first lowest."""
    if width == 8:
        return part
    per = 8 // width
    each = np.concatenate([part, np.zeros(-part.size % per, np.uint8)]) if part.size % per else part
    each = each & np.uint8((1 << width) - 1)
    together = each.view(f"<u{per}")  # value i of a byte lies at bit 8 * i, and belongs at bit width * i
    packed = together.astype(np.uint8)
    for i in range(1, per):
        packed |= (together >> together.dtype.type((8 - width) * i)).astype(np.uint8)
    return packed


def _unpacked(width: int) -> NDArray[Any]:
    """For each byte the values that `_pack` put into it, as the bytes of one wider number."""
    each = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, width, dtype=np.uint8)
    return (each & np.uint8((1 << width) - 1)).view(f"<u{8 // width}").reshape(-1)


_UNPACKED = {width: _unpacked(width) for width in _WIDTHS if width < 8}


def _unpack(packed: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint8]:
    if width == 8:
        return packed
    return _UNPACKED[width].take(packed).view(np.uint8)[:count]


def _planes(wide: NDArray[np.uint64]) -> bytes:
    return wide.view(np.uint8).reshape(-1, 8).T.tobytes()


def _unplanes(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(data.reshape(8, -1).T).view(np.uint64).reshape(-1)
