"""Distances between changed positions in the smallest integers that hold them, and old XOR new there, through zstd."""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from . import Bits


class GapXorZstd:
    name = "gap + XOR + zstd"

    def encode(self, base: Bits, new: Bits) -> bytes:
        index = np.flatnonzero(base != new)
        gaps = np.diff(index, prepend=0)
        width = 2 if gaps.size == 0 or gaps.max() < 1 << 16 else 4
        columns = gaps.astype(f"u{width}").tobytes() + (base[index] ^ new[index]).tobytes()
        return struct.pack("<BI", width, index.size) + zstandard.ZstdCompressor(level=1).compress(columns)

    def apply(self, base: Bits, data: bytes) -> None:
        width, count = struct.unpack_from("<BI", data)
        columns = zstandard.ZstdDecompressor().decompress(data[5:])
        index = np.cumsum(np.frombuffer(columns, f"u{width}", count), dtype=np.int64)
        base[index] ^= np.frombuffer(columns, np.uint16, count, width * count)
