"""Where and what: 32-bit positions and 16-bit values, as a sparse tensor is kept."""

from __future__ import annotations

import numpy as np

from . import Bits


class IndexValue:
    name = "index + value"

    def encode(self, base: Bits, new: Bits) -> bytes:
        index = np.flatnonzero(base != new).astype(np.uint32)
        return index.tobytes() + new[index].tobytes()

    def apply(self, base: Bits, data: bytes) -> None:
        count = len(data) // 6
        base[np.frombuffer(data, np.uint32, count)] = np.frombuffer(data, np.uint16, count, 4 * count)
