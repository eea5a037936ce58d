"""Where elements changed, as the distances between them.

Distances are near-geometric: their low bits are noise and take the room they take, the high part is nearly constant and
compresses. So each row of distances is cut at a bit that its mean decides, which also follows the density from place to
place; the high parts are one column of bytes, the low bits lie apart in columns of 8, 4, 2 and 1 bits. Where nearly
everything changed, a bit for every element is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native
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
_MOST = 56  # bits that are cut off
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
    sizes = _sizes(cuts, count)
    if any(_MOST < cut < _BITMAP for cut in sizes):
        raise ValueError("distances that are cut nowhere")
    mapped, in_bitmap = np.zeros(0, np.uint64), sizes.pop(_BITMAP, 0)
    if in_bitmap:
        places = np.flatnonzero(np.unpackbits(columns.take()))
        if places.size != in_bitmap:
            raise ValueError(f"{places.size} places in a bitmap of {in_bitmap}")
        mapped = (np.diff(places, prepend=-1) - 1).view(np.uint64)
    high, escaped = np.zeros(0, np.uint8), mapped[:0]
    if sizes:
        high, escaped = columns.take(sum(sizes.values())), _unplanes(columns.take())
    low = tuple(columns.take(-(-size * width // 8)) for cut, size in sizes.items() for width, _ in _columns(cut))
    if native.compiled is not None:
        positions = np.empty(count, np.int64)
        native.compiled.positions(cuts, high, escaped, mapped, low, positions)
        return positions
    if np.count_nonzero(high == _ESCAPE) != escaped.size:
        raise ValueError("distances that nobody has")
    gaps = _put_back(cuts, count, sizes, high, escaped, mapped, low)
    if gaps.itemsize == 8 and (gaps > _FARTHEST).any():
        raise ValueError("distances that are beyond all weights")
    gaps[1:] += gaps.dtype.type(1)
    return np.cumsum(gaps, dtype=np.int64)


def _sizes(cuts: NDArray[np.uint8], count: int) -> dict[int, int]:
    """For each cut that occurs, ascending, the gaps in rows that have it."""
    rows = cuts.tobytes()
    sizes = {cut: _ROW * rows.count(cut) for cut in sorted(set(rows))}
    sizes[rows[-1]] -= _ROW * len(rows) - count
    return sizes


def _by_cut(cuts: NDArray[np.uint8], count: int) -> Iterator[tuple[int, _Rows]]:
    """For each cut that occurs, the gaps in rows that have it."""
    if (cuts == cuts[0]).all():
        yield int(cuts[0]), slice(None)
        return
    each = np.repeat(cuts, _ROW)[:count]
    for cut in np.unique(cuts).tolist():
        yield cut, each == cut


def _cut_off(gaps: Gaps, cut: int) -> list[NDArray[np.uint8]]:
    """The low `cut` bits, lowest first, in columns of 8, 4, 2 and 1 bits."""
    return [_pack((gaps >> gaps.dtype.type(at) if at else gaps).astype(np.uint8), width) for width, at in _columns(cut)]


def _columns(cut: int) -> Iterator[tuple[int, int]]:
    """The columns that hold the low `cut` bits: how wide each is, and from which bit up."""
    at = 0
    for width in _WIDTHS:
        while cut - at >= width:
            yield width, at
            at += width


def _put_back(cuts: NDArray[np.uint8], count: int, sizes: dict[int, int], high: NDArray[np.uint8],
              escaped: NDArray[np.uint64], mapped: NDArray[np.uint64], low: Sequence[NDArray[np.uint8]]
              ) -> Gaps:  # fmt: skip
    """All gaps from their columns."""
    # Without escapes the high part has 8 bits, and 16 hold it with as many low bits.
    wide: Gaps = high.astype(np.uint64 if escaped.size or max(sizes, default=0) > 7 else np.uint16)
    wide[high == _ESCAPE] += escaped.astype(wide.dtype)
    found, columns, at = {_BITMAP: mapped} if mapped.size else {}, iter(low), 0
    for cut, size in sizes.items():
        part = wide[at : at + size] << wide.dtype.type(cut)
        for width, shift in _columns(cut):
            part |= _unpack(next(columns), width, size).astype(wide.dtype) << wide.dtype.type(shift)
        found[cut], at = part, at + size
    if len(found) == 1:
        return next(iter(found.values()))
    gaps = np.empty(count, np.uint64)
    for cut, rows in _by_cut(cuts, count):
        gaps[rows] = found[cut]
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
