"""Format HRW1: values as they are, which need no base to be read.

Whole tensors are sent so: all those of a snapshot, and in a delta those for which nothing shorter is known. Deltas were
sent so too before HRW2; they are still read.

A chunk's data: header, then one zstd frame of (table of frames, gaps, values). Gaps (uint32) and values are split into
planes by byte, so that the compressor finds the near-constant ones. A frame is a piece of one tensor: a `run` of
consecutive elements, or (no longer written) elements whose positions are `first` plus the running sum of gaps, of which
the first is 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import zstandard

from .state import Bits, Piece
from .streams import LEVEL

MAGIC = b"HRW1"
CHUNK_BYTES = 900_000  # of a chunk's data; with its envelope it stays below Kafka's default of 1 MiB

_HEADER = struct.Struct("<4sBIII")  # magic, bytes per value, bytes of table, gaps, values
_FRAME = struct.Struct("<HBQI")  # bytes of name, whether a run, first position, elements
_RAW_BYTES = CHUNK_BYTES - 10_000  # zstd adds at most 1/256 and a little where nothing compresses
_GAP = 4


def encode(tensors: Mapping[str, Bits]) -> Iterator[bytes]:
    """Whole tensors (unsigned [n] each) as chunks' data within `CHUNK_BYTES`. They are read while the iterator runs."""
    for runs in _chunked(tensors):
        yield _data(runs)


def count(tensors: Mapping[str, Bits]) -> int:
    """The chunks that `encode` gives."""
    return sum(1 for _ in _chunked(tensors))


def size(values: Bits) -> int:
    """Bytes that values take in this format, about."""
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(_planes(values)))


def decode(data: bytes) -> list[Piece]:
    """Raises ValueError, struct.error or zstandard.ZstdError where the data isn't what the format says."""
    magic, width, head, gap_count, elements = _HEADER.unpack_from(data)
    expected = head + _GAP * gap_count + width * elements
    if magic != MAGIC or width not in (1, 2, 4) or expected > CHUNK_BYTES:
        raise ValueError("no chunk of this format")
    packed = memoryview(data)[_HEADER.size :]
    if (announced := zstandard.frame_content_size(packed)) != expected:  # or a flipped bit may ask for terabytes
        raise ValueError(f"{announced} bytes where the header says {expected}")
    raw = memoryview(zstandard.ZstdDecompressor().decompress(packed))
    gaps = _unplanes(raw[head : head + _GAP * gap_count], _GAP)
    values = _unplanes(raw[head + _GAP * gap_count :], width)
    pieces = []
    at = gap_at = value_at = 0
    while at < head:
        name_bytes, run, first, n = _FRAME.unpack_from(raw, at)
        name = bytes(raw[at + _FRAME.size : at + _FRAME.size + name_bytes]).decode()
        at += _FRAME.size + name_bytes
        positions = None
        if not run:
            steps = gaps[gap_at : gap_at + n].astype(np.int64)
            if steps.size != n or n == 0 or steps[0] != 0 or (steps[1:] < 1).any() or first >= 2**32:
                raise ValueError(f"positions in {name!r} that don't ascend")
            positions = first + np.cumsum(steps)
            gap_at += n
        if value_at + n > values.size:
            raise ValueError("more elements than values")
        pieces.append(Piece(name, first, positions, values[value_at : value_at + n]))
        value_at += n
    if (at, gap_at, value_at) != (head, gap_count, elements):
        raise ValueError("frames that don't use up their columns")
    return pieces


def _chunked(tensors: Mapping[str, Bits]) -> Iterator[list[Piece]]:
    """Runs, gathered into chunks whose raw bytes stay within the limit and whose values are equally wide."""
    chunk: list[Piece] = []
    room = _RAW_BYTES
    for name, values in tensors.items():
        overhead = _FRAME.size + len(name.encode())
        start = 0
        while start < values.size or start == 0:  # an empty tensor is a frame too
            if chunk and (room < overhead + values.itemsize or chunk[0].values.itemsize != values.itemsize):
                yield chunk
                chunk, room = [], _RAW_BYTES
            part = values[start : start + (room - overhead) // values.itemsize]
            chunk.append(Piece(name, start, None, part))
            room -= overhead + values.itemsize * part.size
            start += part.size
            if not part.size:
                break
    if chunk:
        yield chunk


def _data(runs: Sequence[Piece]) -> bytes:
    head = b"".join(
        _FRAME.pack(len(run.name.encode()), True, run.start, run.values.size) + run.name.encode() for run in runs
    )
    values = np.concatenate([run.values for run in runs])
    header = _HEADER.pack(MAGIC, values.itemsize, len(head), 0, values.size)
    return header + zstandard.ZstdCompressor(level=LEVEL).compress(head + _planes(values))


def _planes(values: Bits) -> bytes:
    # By shifts: a transposed copy of a [n, width] view is thirty times slower.
    return b"".join((values >> (8 * i)).astype(np.uint8).tobytes() for i in range(values.itemsize))


def _unplanes(data: memoryview, width: int) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    values: Bits = planes[0].astype(f"u{width}")
    for i in range(1, width):
        values |= planes[i].astype(f"u{width}") << (8 * i)
    return values
