"""What the delta codec is measured against, each vectorised as its authors would, in a file of its own.

All of them send bits of one tensor and read without verification; the base must be the right one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]


class Baseline(Protocol):
    name: str

    def encode(self, base: Bits, new: Bits) -> bytes:
        """All that a receiver needs to turn `base` into `new`; finding what changed is part of it."""
        ...

    def apply(self, base: Bits, data: bytes) -> None:
        """Turn `base` into `new`, in place."""
        ...
