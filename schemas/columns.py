"""Token columns: how a run of integers or floats becomes bytes.

Numbers are little-endian and shuffled by byte (all first bytes, then all second bytes, ...): zstd then finds the
near-constant high bytes next to each other. Token ids are cut at 16 bits instead: their low halves side by side, then
what is above them, if anything is. There zstd finds words and phrases again, which a shuffle would tear apart: 5.1
bytes per token with logprobs against 5.25 shuffled and 5.4 plain, on real samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")


def _shuffle(values: NDArray[np.generic]) -> bytes:
    # Strided slices of bytes are several times faster than numpy's transpose at the length of a span.
    raw, width = values.tobytes(), values.dtype.itemsize
    return b"".join([raw[i::width] for i in range(width)])


def _unshuffle(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    width = dtype.itemsize
    count, odd = divmod(len(data), width)
    if odd:
        raise ValueError(f"a column of {len(data)} bytes is not a whole number of {width}-byte values")
    out = bytearray(len(data))
    for i in range(width):
        out[i::width] = data[i * count : (i + 1) * count]
    return np.frombuffer(out, dtype)


def pack_ids(ids: Int32) -> bytes:
    """Token ids int32[n] -> 2n bytes where all are below 2^16, 3n where they are below 2^24, else 4n (shuffled)."""
    values = np.asarray(ids, _INT32)
    unsigned = values.view(_UINT32)
    most = int(unsigned.max(initial=0))  # a negative id is a large one here
    if most < 1 << 16:
        return unsigned.astype(_UINT16).tobytes()
    if most < 1 << 24:
        return unsigned.astype(_UINT16).tobytes() + values.tobytes()[2::4]
    return _shuffle(values)


def unpack_ids(data: bytes, count: int) -> Int32:
    """-> int32[count]. Raises ValueError where the bytes aren't those of so many ids."""
    if len(data) == 2 * count:
        return np.frombuffer(data, _UINT16).astype(np.int32)
    if len(data) == 3 * count:
        ids = np.frombuffer(data, _UINT16, count).astype(np.int32)
        return ids + (np.frombuffer(data, np.uint8, offset=2 * count).astype(np.int32) << 16)
    if len(data) == 4 * count:
        return unpack_int32(data)
    raise ValueError(f"a column of {len(data)} bytes does not hold {count} token ids")


def halves(data: bytes, count: int) -> tuple[bytes, bytes | None]:
    """Of a column of `count` token ids: the low and the high 16 bits of each, 2 * count bytes each, little-endian. None
    for high ones that are all 0. Without arrays: whoever hashes all that is sampled needs them fast."""
    if len(data) == 2 * count:
        return data, None
    if len(data) == 3 * count:
        high = bytearray(2 * count)
        high[::2] = data[2 * count :]
        return data[: 2 * count], bytes(high) if any(high) else None
    low, high = bytearray(2 * count), bytearray(2 * count)
    planes = [data[i * count : (i + 1) * count] for i in range(4)]
    low[::2], low[1::2], high[::2], high[1::2] = planes
    return bytes(low), bytes(high) if any(high) else None


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
