"""What changed elements became, given what they were.

Nearly every change is one place up or down the line of values. The direction is a coin's toss: a column of bits. The
distance is more than one only where the old value is small, for a step of the optimizer is many units of its last
place; and the receiver knows the old value. So distances are sent for the elements of the smallest octaves alone, up to
the last in which one went further, in the order of octaves: a column for each byte, of which most is a run of zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import native
from .numbers import OCTAVES, mantissa_of, octave, on_line
from .state import Bits
from .streams import Columns, Writer


def put_values(out: Writer, dtype: str, old: Bits, new: Bits, least: int) -> None:
    """`old` and `new`: unsigned [n]; `least` is the smallest distance: 1, or 0 where elements may have stayed."""
    unsigned = old.dtype.type
    step = on_line(dtype, new) - on_line(dtype, old)
    down = step >> unsigned(8 * old.itemsize - 1)
    out.put(np.packbits(down.view(np.bool_) if old.itemsize == 1 else down.astype(np.bool_)))
    further = (step ^ np.negative(down)) + (down - unsigned(least))
    octaves = octave(dtype, old)
    further_up = further != 0
    below = int((octaves * further_up).max()) + 1 if further_up.any() else 0
    out.number(below)
    if below:
        column = further[_small(octaves, below)]
        for byte in range(old.itemsize):
            plane = (column >> unsigned(8 * byte)).astype(np.uint8)
            out.put(plane if plane.any() else b"")


def take_values(columns: Columns, dtype: str, old: Bits, least: int) -> Bits:
    """The new values of `old`, in its order. Raises ValueError where that isn't what is there."""
    down, below = columns.take(-(-old.size // 8)), columns.number()
    planes = tuple(columns.take() for _ in range(old.itemsize)) if below else ()
    if native.compiled is not None:
        new = np.empty_like(old)
        native.compiled.stepped(old, old.itemsize, mantissa_of(dtype), down, min(below, OCTAVES), planes, least, new)
        return new
    unsigned = old.dtype.type
    turned = np.unpackbits(down, count=old.size).astype(old.dtype)
    # -x is ~x + 1: a step down is its distance less one, with all bits turned.
    step = unsigned(least) - turned
    if below:
        small = _small(octave(dtype, old), below)
        for byte, plane in enumerate(planes):
            if plane.size:
                if plane.size != small.size:
                    raise ValueError(f"{plane.size} distances for {small.size} elements")
                step[small] += plane.astype(old.dtype) << unsigned(8 * byte)
    step ^= np.negative(turned)
    step += on_line(dtype, old)
    return on_line(dtype, step)


def _small(octaves: NDArray[np.uint8], below: int) -> NDArray[np.int64]:
    """The elements of the octaves below one, in the order of octaves."""
    small = np.flatnonzero(octaves < below)
    by_octave: NDArray[np.int64] = small[np.argsort(octaves[small], kind="stable")]
    return by_octave
