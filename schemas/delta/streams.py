"""How columns of bytes lie in a chunk: one after the other, each compressed where that is shorter.

A column is what one idea yields (the high parts of gaps, the signs, ...). They are kept apart because the compressor
then finds one distribution in each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import zstandard
from numpy.typing import NDArray

LEVEL = 1
LIMIT = 1 << 23  # bytes of one column, unpacked: what a damaged length may ask for


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, the low ones first. `number` is not negative."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Reused(threading.local):
    """A compressor takes longer to make than a column takes to read; one belongs to one thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_reused = _Reused()


class Writer:
    """Collects columns. Layout: for each, varint of its bytes, varint of its bytes as stored, then those; fewer stored
    than there are means a zstd frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def put(self, column: NDArray[np.uint8] | bytes, compress: bool = True) -> None:
        """A column: the bytes of uint8 [n], compressed where that is shorter."""
        raw = column if isinstance(column, bytes) else column.tobytes()
        packed = _reused.compressor.compress(raw) if compress and len(raw) > 16 else raw
        stored = packed if len(packed) < len(raw) else raw
        self._parts += [varint(len(raw)), varint(len(stored)), stored]

    def number(self, number: int) -> None:
        """A number that is not negative, beside the columns."""
        self._parts.append(varint(number))

    def numbers(self, numbers: Iterable[int]) -> None:
        """Numbers that are not negative, as one column."""
        self.put(b"".join(varint(number) for number in numbers))

    def bytes(self) -> bytes:
        """Everything that was put, in order."""
        return b"".join(self._parts)


class Columns:
    """Reads what a `Writer` wrote. Raises ValueError (or zstandard.ZstdError) where that isn't what is there."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def number(self) -> int:
        """The next number that stands beside the columns."""
        number, self._at = _read_varint(self._data, self._at)
        return number

    def numbers(self) -> list[int]:
        """The next column, as the numbers that it holds."""
        data, at, out = self.take().data, 0, []
        while at < len(data):
            number, at = _read_varint(data, at)
            out.append(number)
        return out

    def take(self, size: int | None = None) -> NDArray[np.uint8]:
        """The next column: uint8 [size], or of whatever size it says. Read only."""
        raw, stored = self.number(), self.number()
        if raw > LIMIT or stored > raw or stored > len(self._data) - self._at or (size is not None and raw != size):
            raise ValueError(f"a column of {raw} bytes, {stored} stored, {size} expected")
        part = self._data[self._at : self._at + stored]
        self._at += stored
        if stored == raw:
            return np.frombuffer(part, np.uint8)
        if zstandard.frame_content_size(part) != raw:
            raise ValueError("a column of another length than it says")
        return np.frombuffer(_reused.decompressor.decompress(part, max_output_size=raw), np.uint8)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and the place behind it."""
    number = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise ValueError("a number without an end")
