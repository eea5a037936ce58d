"""Token columns: how a run of integers or floats becomes bytes.

Little-endian 32-bit values, shuffled by byte (all first bytes, then all second bytes, ...), so that the producer's zstd
finds the near-constant high bytes next to each other: 4.9 bytes per token against 5.2 unshuffled, on real samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


def _shuffle(values: NDArray[np.generic]) -> bytes:
    # Strided slices of bytes are several times faster than numpy's transpose at the length of a span.
    raw, width = values.tobytes(), values.dtype.itemsize
    return b"".join([raw[i::width] for i in range(width)])


def _unshuffle(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    width = dtype.itemsize
    count, odd = divmod(len(data), width)
    if odd:
        raise ValueError(f"a column of {len(data)} bytes is not a whole number of {width}-byte values")
    out, planes = bytearray(len(data)), width
    if dtype == _INT32 and data.count(0, 2 * count) == 2 * count:
        planes = 2  # the high bytes of token ids are 0 as a rule, and so is `out`: a look at them is cheaper
    for i in range(planes):
        out[i::width] = data[i * count : (i + 1) * count]
    return np.frombuffer(out, dtype)


def pack_int32(values: Int32) -> bytes:
    """int32[n] -> 4n bytes."""
    return _shuffle(np.asarray(values, _INT32))


def unpack_int32(data: bytes) -> Int32:
    """4n bytes -> int32[n]. Raises ValueError on another length."""
    return _unshuffle(data, _INT32).astype(np.int32, copy=False)


def pack_int64(values: NDArray[np.int64]) -> bytes:
    """int64[n] -> 8n bytes."""
    return _shuffle(np.asarray(values, _INT64))


def unpack_int64(data: bytes) -> NDArray[np.int64]:
    """8n bytes -> int64[n]. Raises ValueError on another length."""
    return _unshuffle(data, _INT64).astype(np.int64, copy=False)


def pack_float32(values: Float32) -> bytes:
    """float32[n] -> 4n bytes, every bit kept."""
    return _shuffle(np.asarray(values, _FLOAT32))


def unpack_float32(data: bytes) -> Float32:
    """4n bytes -> float32[n]. Raises ValueError on another length."""
    return _unshuffle(data, _FLOAT32).astype(np.float32, copy=False)
