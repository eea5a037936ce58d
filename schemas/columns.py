"""Token columns: how a run of integers or floats becomes bytes.

Little-endian 32-bit values, shuffled by byte (all first bytes, then all second bytes, ...), so that the producer's zstd
finds the near-constant high bytes next to each other: 4.9 bytes per token against 5.2 unshuffled, on real samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


def _shuffle(values: NDArray[np.generic]) -> bytes:
    width = values.dtype.itemsize
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, width).T.tobytes()


def _unshuffle(data: bytes, dtype: str) -> NDArray[np.generic]:
    width = np.dtype(dtype).itemsize
    if len(data) % width:
        raise ValueError(f"a column of {len(data)} bytes is not a whole number of {width}-byte values")
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def pack_int32(values: Int32) -> bytes:
    """int32[n] -> 4n bytes."""
    return _shuffle(np.asarray(values, "<i4"))


def unpack_int32(data: bytes) -> Int32:
    """4n bytes -> int32[n]. Raises ValueError on another length."""
    return _unshuffle(data, "<i4").astype(np.int32, copy=False)


def pack_int64(values: NDArray[np.int64]) -> bytes:
    """int64[n] -> 8n bytes."""
    return _shuffle(np.asarray(values, "<i8"))


def unpack_int64(data: bytes) -> NDArray[np.int64]:
    """8n bytes -> int64[n]. Raises ValueError on another length."""
    return _unshuffle(data, "<i8").astype(np.int64, copy=False)


def pack_float32(values: Float32) -> bytes:
    """float32[n] -> 4n bytes, every bit kept."""
    return _shuffle(np.asarray(values, "<f4"))


def unpack_float32(data: bytes) -> Float32:
    """4n bytes -> float32[n]. Raises ValueError on another length."""
    return _unshuffle(data, "<f4").astype(np.float32, copy=False)
