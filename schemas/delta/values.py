"""What changed elements became, given what they were.

Nearly every change is one place up or down the line of values; the direction is a coin's toss, the distance depends on
the octave of the old value, which the receiver knows. So elements are put in the order of their octaves, and then
directions are one column of bits and distances one column for each byte, of which most is a run of zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .numbers import octave, on_line
from .state import Bits
from .streams import Columns, Writer

Order = NDArray[np.int64]


def order_of(dtype: str, old: Bits) -> Order:
    """Elements by octave; within one, as they were."""
    return np.argsort(octave(dtype, old), kind="stable")


def put_values(out: Writer, dtype: str, old: Bits, new: Bits, least: int) -> None:
    """`old` and `new` (unsigned [n]) in the order of octaves; `least` is the smallest distance: 1, or 0 where elements
    may have stayed as they were."""
    unsigned = old.dtype.type
    step = on_line(dtype, new) - on_line(dtype, old)
    down = step >> unsigned(8 * old.itemsize - 1)
    distance = (step ^ np.negative(down)) + (down - unsigned(least))
    out.put(np.packbits(down.astype(np.bool_)))
    for byte in range(old.itemsize):
        column = (distance >> unsigned(8 * byte)).astype(np.uint8)
        out.put(column if column.any() else b"")


def take_values(columns: Columns, dtype: str, old: Bits, least: int) -> Bits:
    """The new values of `old`, in its order. Raises ValueError where that isn't what is there."""
    unsigned, count = old.dtype.type, old.size
    down = np.unpackbits(columns.take(-(-count // 8)), count=count).astype(old.dtype)
    distance = np.full(count, least, old.dtype)
    for byte in range(old.itemsize):
        column = columns.take()
        if column.size:  # ValueError where it has another length
            distance += column.astype(old.dtype) << unsigned(8 * byte)
    step = (distance - down) ^ np.negative(down)
    step += on_line(dtype, old)
    return on_line(dtype, step)
