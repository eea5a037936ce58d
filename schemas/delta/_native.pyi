"""native.c: arrays as contiguous buffers; `width` is the bytes of an element, `mantissa` its bits or -1 where there is
no exponent. All raise ValueError (IndexError for positions) where buffers don't fit each other."""

from typing import Any

from numpy.typing import NDArray

Buffer = NDArray[Any]

def differing(old: Buffer, new: Buffer, width: int, start: int, places: Buffer, values: Buffer) -> int:
    """How many elements differ; `places` (int64, counted from `start`) and `values` get them."""

def take(array: Buffer, width: int, places: Buffer, out: Buffer) -> None: ...
def put(array: Buffer, width: int, places: Buffer, values: Buffer) -> None: ...
def element_sums(
    key: int, places: Buffer | None, start: int, values: Buffer, old: Buffer | None, width: int
) -> tuple[int, int]: ...
def positions(
    cuts: Buffer, high: Buffer, escapes: Buffer, mapped: Buffer, lows: tuple[Buffer, ...], out: Buffer
) -> None:
    """`escapes` and `mapped` (distances of rows that are bitmaps) uint64; `lows`: columns as they lie in a chunk."""

def to_ranks(
    values: Buffer, width: int, mantissa: int, places: Buffer, seen: Buffer, octaves: Buffer, ranks: Buffer
) -> None:
    """`seen` int64 [256] is moved on; `octaves` (uint8) and `ranks` (int64, within the octave) of each place."""

def from_ranks(
    values: Buffer, width: int, mantissa: int, offset: int, ranks: Buffer, at: Buffer, next: Buffer, ends: Buffer,
    out: Buffer,
) -> int:  # fmt: skip
    """How many positions `out` got; `at` (rank of each octave's next element) and `next` (index of its next wanted
    rank, below `ends`), int64 [256] each, are moved on."""

def stepped(
    old: Buffer, width: int, mantissa: int, down: Buffer, below: int, planes: tuple[Buffer, ...], least: int,
    out: Buffer,
) -> None: ...  # fmt: skip
