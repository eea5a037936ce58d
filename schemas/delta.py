"""The wire format of weights, and the hash that names their state.

A delta is lossless: flat positions and the new bits of the elements that changed, in the published dtype. It overwrites
and never adds, so it decodes without its base; whether the base is the right one is proved before the first write, by
the state hash. That hash is a sum over elements, so both ends update it from the changed elements alone; it guards
against loss and damage, not against an adversary.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from .errors import DamagedWeights, WeightsRefused, WrongBase
from .events import Publication, WeightChunk
from .hashes import digest

HASH_ALGORITHM = "headrace-mix128-1"  # what `state_hash` computes
TREE_ALGORITHM = "headrace-tree128-1"  # what `tree_hash` computes
CHUNK_BYTES = 900_000  # of a chunk's data; with its envelope it stays below Kafka's default of 1 MiB
DELTA, SNAPSHOT, PATH = "delta", "snapshot", "path"

Bits = NDArray[Any]
# The new bits of one tensor: flat positions (int64 ascending, or None for the whole tensor) and values (unsigned [n]).
Change = tuple[NDArray[np.int64] | None, Bits]
Changes = dict[str, Change]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Served weights of one name: `bits` is unsigned (uint8, uint16 or uint32) in the tensor's shape."""

    dtype: str  # what the bits are: bfloat16, float16, float32, ...
    bits: Bits


State = Mapping[str, Tensor]


def as_state(arrays: Mapping[str, Bits], dtype: str) -> dict[str, Tensor]:
    """Arrays of bits that are all of one dtype, as an engine or a trainer hands them out."""
    return {name: Tensor(dtype, bits) for name, bits in arrays.items()}


def copy_state(state: State) -> dict[str, Tensor]:
    return {name: Tensor(tensor.dtype, tensor.bits.copy()) for name, tensor in state.items()}


def elements(state: State) -> int:
    return sum(tensor.bits.size for tensor in state.values())


# ---------------------------------------------------------------------------------------------------- state hash

_U64 = np.uint64
_WRAP = 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's finaliser, then one round more
_SECOND = _U64(0xD6E8FEB86659FD93)
_BLOCK = 1 << 15  # elements; two uint64 buffers of a block stay in the second-level cache
_PLACES = np.arange(_BLOCK, dtype=_U64) << _U64(32)

Sums = tuple[int, int]


def _key(name: str, tensor: Tensor) -> bytes:
    return digest(json.dumps([name, tensor.dtype, list(tensor.bits.shape)]).encode())


def _flat(name: str, tensor: Tensor) -> Bits:
    bits = tensor.bits
    if bits.dtype.kind != "u" or bits.itemsize > 4 or bits.size >= 2**32 or not bits.flags.c_contiguous:
        raise ValueError(f"tensor {name!r}: the state is unsigned bits of at most 32, contiguous, below 2^32 elements")
    return bits.reshape(-1)


def _mix(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> Sums:
    """Two sums over mixed elements; `x` and `spare` are overwritten."""
    for shift, factor in _ROUNDS:
        np.right_shift(x, _U64(shift), out=spare)
        np.bitwise_xor(x, spare, out=x)
        np.multiply(x, _U64(factor), out=x)
    np.right_shift(x, _U64(31), out=spare)
    np.bitwise_xor(x, spare, out=x)
    first = int(x.sum())
    np.multiply(x, _SECOND, out=x)
    np.right_shift(x, _U64(32), out=spare)
    np.bitwise_xor(x, spare, out=x)
    return first, int(x.sum())


def _sums(key: bytes, positions: NDArray[np.int64] | None, values: Bits) -> Sums:
    """Sums over elements (position << 32 | bits), each offset by the tensor's key and mixed, mod 2^64."""
    offset = int.from_bytes(key[:8], "little")
    x, spare = np.empty(_BLOCK, _U64), np.empty(_BLOCK, _U64)
    first = second = 0
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK]
        block, rest = x[: part.size], spare[: part.size]
        if positions is None:
            np.add(_PLACES[: part.size], _U64(((start << 32) + offset) % _WRAP), out=block)
        else:
            np.left_shift(positions[start : start + _BLOCK].view(_U64), _U64(32), out=block)
            np.add(block, _U64(offset), out=block)
        np.add(block, part, out=block)
        one, two = _mix(block, rest)
        first, second = first + one, second + two
    return first % _WRAP, second % _WRAP


def _pack(first: int, second: int) -> bytes:
    return struct.pack("<QQ", first % _WRAP, second % _WRAP)


def state_hash(state: State) -> bytes:
    """16 bytes over names, dtypes, shapes and every bit; about 1 s for 135 million elements."""
    first = second = 0
    for name, tensor in state.items():
        key = _key(name, tensor)
        one, two = _sums(key, None, _flat(name, tensor))
        own = struct.unpack("<QQ", key)  # so that a tensor without elements counts too
        first, second = first + one + own[0], second + two + own[1]
    return _pack(first, second)


def updated_hash(before: bytes, state: State, changes: Changes) -> bytes:
    """The hash of `state` with `changes` written, given its hash; `state` itself still holds the old values."""
    first, second = struct.unpack("<QQ", before)
    for name, (positions, values) in changes.items():
        key, flat = _key(name, state[name]), _flat(name, state[name])
        old = _sums(key, positions, flat if positions is None else flat[positions])
        new = _sums(key, positions, values)
        first, second = first - old[0] + new[0], second - old[1] + new[1]
    return _pack(first, second)


def tree_hash(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """16 bytes over names, dtypes, shapes and contents, in the order of names: for state that is hashed as a whole."""
    leaves = [
        (name, str(array.dtype), list(array.shape), xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data))
        for name, array in sorted(arrays.items())
    ]
    return digest(json.dumps(leaves).encode())


# -------------------------------------------------------------------------------------------------------- change


def diff(old: State, new: State) -> Changes:
    """What must be written to turn `old` into `new`, compared as bits. A tensor of which more than half changed is sent
    whole. Raises ValueError where names, dtypes or shapes differ."""
    if [(n, t.dtype, t.bits.shape) for n, t in old.items()] != [(n, t.dtype, t.bits.shape) for n, t in new.items()]:
        raise ValueError("the two states differ in names, order, dtypes or shapes: send a snapshot")
    changes: Changes = {}
    mask = np.empty(2 * _BLOCK, np.bool_)
    for name, tensor in new.items():
        before, after = _flat(name, old[name]), _flat(name, tensor)
        found = []
        for start in range(0, after.size, mask.size):
            part = after[start : start + mask.size]
            differs = np.not_equal(part, before[start : start + mask.size], out=mask[: part.size])
            found.append(np.flatnonzero(differs) + start)
        positions = np.concatenate(found) if found else np.zeros(0, np.int64)
        if positions.size > after.size // 2:
            changes[name] = (None, after.copy())
        elif positions.size:
            changes[name] = (positions.astype(np.int64, copy=False), after[positions])
    return changes


def changed(changes: Changes) -> int:
    """Elements that are written."""
    return sum(values.size for _, values in changes.values())


def write(state: State, changes: Changes) -> None:
    """Overwrite in place. What was verified can't fail here."""
    for name, (positions, values) in changes.items():
        flat = state[name].bits.reshape(-1)
        if positions is None:
            flat[:] = values
        else:
            flat[positions] = values


# -------------------------------------------------------------------------------------------------------- chunks
#
# A chunk's data: header, then one zstd frame of (table of frames, gaps, values). Gaps (uint32) and values are split
# into planes by byte, so that the compressor finds the near-constant ones. A frame is a piece of one tensor: a `run` of
# consecutive elements, or elements whose positions are `first` plus the running sum of gaps (the first gap is 0).

_HEADER = struct.Struct("<4sBIII")  # magic, bytes per value, bytes of table, gaps, values
_FRAME = struct.Struct("<HBQI")  # bytes of name, whether a run, first position, elements
_MAGIC = b"HRW1"
_LEVEL = 1
_RAW_BYTES = CHUNK_BYTES - 10_000  # zstd adds at most 1/256 and a little where nothing compresses
_GAP = 4

_Frame = tuple[str, int, NDArray[np.int64] | None, Bits]  # name, first, positions, values


def _planes(values: Bits) -> bytes:
    # By shifts: a transposed copy of a [n, width] view is thirty times slower.
    return b"".join((values >> (8 * i)).astype(np.uint8).tobytes() for i in range(values.itemsize))


def _unplanes(data: memoryview, width: int) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    values: Bits = planes[0].astype(f"u{width}")
    for i in range(1, width):
        values |= planes[i].astype(f"u{width}") << (8 * i)
    return values


def _frames(changes: Mapping[str, Change]) -> Iterator[list[_Frame]]:
    """Pieces of tensors, gathered into chunks whose raw bytes stay within the limit."""
    chunk: list[_Frame] = []
    room = _RAW_BYTES
    for name, (positions, values) in changes.items():
        cost = values.itemsize + (0 if positions is None else _GAP)
        overhead = _FRAME.size + len(name.encode())
        start = 0
        while start < values.size or (start == 0 and positions is None):  # an empty tensor sent whole is a frame too
            if chunk and (room < overhead + cost or chunk[0][3].itemsize != values.itemsize):
                yield chunk
                chunk, room = [], _RAW_BYTES
            part = values[start : start + (room - overhead) // cost]
            where = None if positions is None else positions[start : start + part.size]
            chunk.append((name, start if where is None else int(where[0]), where, part))
            room -= overhead + cost * part.size
            start += part.size
            if not part.size:
                break
    if chunk:
        yield chunk


def _data(frames: Sequence[_Frame]) -> bytes:
    table, gaps = [], []
    for name, first, positions, values in frames:
        table.append(_FRAME.pack(len(name.encode()), positions is None, first, values.size) + name.encode())
        if positions is not None:
            gaps.append(np.diff(positions, prepend=positions[:1]).astype(np.uint32))
    values = np.concatenate([frame[3] for frame in frames])
    all_gaps = np.concatenate(gaps) if gaps else np.zeros(0, np.uint32)
    head = b"".join(table)
    header = _HEADER.pack(_MAGIC, values.itemsize, len(head), all_gaps.size, values.size)
    return header + zstandard.ZstdCompressor(level=_LEVEL).compress(head + _planes(all_gaps) + _planes(values))


def _checksum(version: int, kind: str, index: int, of: int, data: bytes) -> bytes:
    head = struct.pack("<qqq", version, index, of) + kind.encode() + b"\0"
    return xxhash.xxh3_128_digest(head + data)


def _chunks(version: int, kind: str, changes: Mapping[str, Change]) -> Iterator[WeightChunk]:
    of = sum(1 for _ in _frames(changes))
    for index, frames in enumerate(_frames(changes)):
        data = _data(frames)
        yield WeightChunk(version, kind, index, of, _checksum(version, kind, index, of, data), data)


def encode_delta(version: int, changes: Changes) -> Iterator[WeightChunk]:
    """The chunks that make `version` out of its base, in order; none where nothing changed."""
    return _chunks(version, DELTA, changes)


def encode_snapshot(version: int, state: State) -> Iterator[WeightChunk]:
    """The chunks that hold all of `state`. It is read while the iterator runs."""
    return _chunks(version, SNAPSHOT, {name: (None, _flat(name, tensor)) for name, tensor in state.items()})


def decode_chunks(chunks: Sequence[WeightChunk]) -> Changes:
    """The changes that one publication's chunks hold, in order. Raises DamagedWeights on a wrong checksum, on missing,
    repeated or mixed chunks, and on frames that contradict themselves; needs no state."""
    for place, chunk in enumerate(chunks):
        what = f"chunk {place} of {len(chunks)} of version {chunks[0].version}"
        if (chunk.index, chunk.of) != (place, len(chunks)):
            raise DamagedWeights(f"{what} says that it is {chunk.index} of {chunk.of}: chunks are missing or misplaced")
        if (chunk.version, chunk.kind) != (chunks[0].version, chunks[0].kind):
            raise DamagedWeights(f"{what} belongs to the {chunk.kind} of version {chunk.version}")
        if _checksum(chunk.version, chunk.kind, chunk.index, chunk.of, chunk.data) != chunk.checksum:
            raise DamagedWeights(f"{what} has another checksum than it names: {len(chunk.data)} bytes were damaged")
    pieces: dict[str, list[_Frame]] = {}
    for chunk in chunks:
        for frame in _decode_chunk(chunk):
            pieces.setdefault(frame[0], []).append(frame)
    return {name: _join(name, frames) for name, frames in pieces.items()}


def _decode_chunk(chunk: WeightChunk) -> list[_Frame]:
    try:
        return list(_parse(chunk.data))
    except (ValueError, TypeError, struct.error, zstandard.ZstdError) as error:
        raise DamagedWeights(
            f"chunk {chunk.index} of version {chunk.version} can't be decoded ({error}): was it written by a newer "
            "version of Headrace?"
        ) from error


def _parse(data: bytes) -> Iterator[_Frame]:
    magic, width, head, gap_count, count = _HEADER.unpack_from(data)
    size = head + _GAP * gap_count + width * count
    if magic != _MAGIC or width not in (1, 2, 4) or size > CHUNK_BYTES:
        raise ValueError("no chunk of this format")
    packed = memoryview(data)[_HEADER.size :]
    raw = memoryview(zstandard.ZstdDecompressor().decompress(packed, max_output_size=CHUNK_BYTES))
    if len(raw) != size:
        raise ValueError(f"{len(raw)} bytes where the header says {size}")
    gaps = _unplanes(raw[head : head + _GAP * gap_count], _GAP)
    values = _unplanes(raw[head + _GAP * gap_count :], width)
    at = gap_at = value_at = 0
    while at < head:
        name_bytes, run, first, n = _FRAME.unpack_from(raw, at)
        name = bytes(raw[at + _FRAME.size : at + _FRAME.size + name_bytes]).decode()
        at += _FRAME.size + name_bytes
        positions = None
        if not run:
            steps = gaps[gap_at : gap_at + n].astype(np.int64)
            if steps.size != n or n == 0 or steps[0] != 0 or (steps[1:] < 1).any():
                raise ValueError(f"positions in {name!r} that don't ascend")
            positions = first + np.cumsum(steps)
            gap_at += n
        if value_at + n > values.size:
            raise ValueError("more elements than values")
        yield name, first, positions, values[value_at : value_at + n]
        value_at += n
    if (at, gap_at, value_at) != (head, gap_count, count):
        raise ValueError("frames that don't use up their columns")


def _join(name: str, frames: Sequence[_Frame]) -> Change:
    values = np.concatenate([frame[3] for frame in frames])
    if all(frame[2] is None for frame in frames):
        starts = np.cumsum([0, *(frame[3].size for frame in frames)])
        if [frame[1] for frame in frames] != starts[:-1].tolist():
            raise DamagedWeights(f"the runs of tensor {name!r} leave a gap or overlap")
        return None, values
    parts = [frame[2] for frame in frames if frame[2] is not None]
    positions = np.concatenate(parts)
    if len(parts) != len(frames) or (np.diff(positions) < 1).any():
        raise DamagedWeights(f"the positions in tensor {name!r} don't ascend from chunk to chunk")
    return positions, values


# ------------------------------------------------------------------------------------------------ verify and apply


def verify(state: State, version: int, served_hash: bytes, publication: Publication, changes: Changes) -> None:
    """Prove, before anything is written, that `changes` turn what is served here (`version`, `served_hash`, `state`)
    into what was published.

    Raises WrongBase where the delta belongs on other weights, DamagedWeights where the result would not be the
    published one, WeightsRefused where this software doesn't know the hash.
    """
    what = f"{publication.kind} of version {publication.version}"
    if publication.hash_algorithm != HASH_ALGORITHM:
        raise WeightsRefused(f"{what}: its hash is {publication.hash_algorithm!r}, known here is {HASH_ALGORITHM!r}")
    if publication.kind == DELTA and publication.base != version:
        raise WrongBase(f"{what} applies to version {publication.base}; version {version} is served here")
    if publication.kind == DELTA and publication.base_hash != served_hash:
        raise WrongBase(
            f"{what} applies to weights {publication.base_hash.hex()}; those served here as version {version} are "
            f"{served_hash.hex()}"
        )
    for name, (positions, values) in changes.items():
        if name not in state:
            raise DamagedWeights(f"{what} has a tensor {name!r} that isn't served here")
        bits = state[name].bits
        if values.dtype != bits.dtype:
            raise DamagedWeights(f"{what}: tensor {name!r} has {values.dtype} values, served are {bits.dtype}")
        if positions is None and values.size != bits.size:
            raise DamagedWeights(f"{what}: tensor {name!r} has {values.size} elements, served are {bits.size}")
        if positions is not None and positions.size and not 0 <= positions[0] <= positions[-1] < bits.size:
            raise DamagedWeights(f"{what}: a position lies outside the {bits.size} elements of tensor {name!r}")
    if changed(changes) != publication.changed:
        raise DamagedWeights(f"{what} has {changed(changes)} elements, its record says {publication.changed}")
    if publication.kind == DELTA:
        result = updated_hash(served_hash, state, changes)
    else:
        if missing := [name for name in state if name not in changes or changes[name][0] is not None]:
            raise DamagedWeights(f"{what} lacks tensors that are served here: {', '.join(missing[:3])}")
        shapes = {name: Tensor(t.dtype, changes[name][1].reshape(t.bits.shape)) for name, t in state.items()}
        result = state_hash(shapes)
    if result != publication.served_hash:
        raise DamagedWeights(
            f"{what} would give weights {result.hex()}, its record says {publication.served_hash.hex()}; nothing was "
            "written"
        )


def verify_and_apply(
    state: State, version: int, served_hash: bytes, publication: Publication, chunks: Sequence[WeightChunk]
) -> None:
    """Decode, prove, then overwrite `state` in place; its hash is then the publication's. Raises as `decode_chunks` and
    `verify` do, and then nothing has changed."""
    if chunks and (chunks[0].version, chunks[0].kind) != (publication.version, publication.kind):
        raise DamagedWeights(
            f"the chunks are a {chunks[0].kind} of version {chunks[0].version}, published was the "
            f"{publication.kind} of version {publication.version}"
        )
    changes = decode_chunks(chunks)
    verify(state, version, served_hash, publication, changes)
    write(state, changes)
