"""A publication as records: which format each tensor goes out in, and what of chunks is accepted.

A chunk's data begins with the name of its format, so older ones stay readable and unknown ones are refused by name. Its
checksum covers its place in the publication too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import xxhash
import zstandard

from ..errors import DamagedWeights
from ..events import Publication, WeightChunk
from . import plain, relative
from .relative import Part
from .state import Bits, Changes, Piece, State, flat

DELTA, SNAPSHOT, PATH = "delta", "snapshot", "path"


def encode_delta(version: int, base: State, changes: Changes, codec: str = "fast") -> list[WeightChunk]:
    """The chunks that make `version` out of `base`, which still holds the old values; none where nothing changed.
    `codec` is `fast` or `dense`."""
    some: dict[str, list[Part]] = {}
    whole: dict[str, list[Part]] = {}
    unrelated: dict[str, Bits] = {}
    for name, (positions, values) in changes.items():
        tensor = base[name]
        if positions is None and not (values.size and relative.is_shorter(base, name, values)):
            unrelated[name] = values
        elif values.size:
            by_dtype = whole if positions is None else some
            by_dtype.setdefault(tensor.dtype, []).append(Part(name, 0, tensor.bits.size, positions, values))
    data = [d for parts in some.values() for d in relative.encode(base, parts, relative.CODECS[codec])]
    data += [d for parts in whole.values() for d in relative.encode(base, parts, relative.EVERY)]
    data += plain.encode(unrelated)
    return list(_chunks(version, DELTA, data, len(data)))


def encode_snapshot(version: int, state: State) -> Iterator[WeightChunk]:
    """The chunks that hold all of `state`. It is read while the iterator runs."""
    tensors = {name: flat(name, tensor) for name, tensor in state.items()}
    return _chunks(version, SNAPSHOT, plain.encode(tensors), plain.count(tensors))


def check_chunks(publication: Publication, chunks: Sequence[WeightChunk]) -> None:
    """Raises DamagedWeights where these aren't the publication's chunks, all of them, in order and as they were
    written."""
    of = len(chunks)
    for place, chunk in enumerate(chunks):
        what = f"chunk {place} of {of} of the {publication.kind} of version {publication.version}"
        if (chunk.version, chunk.kind) != (publication.version, publication.kind):
            raise DamagedWeights(f"{what} belongs to the {chunk.kind} of version {chunk.version}")
        if (chunk.index, chunk.of) != (place, of):
            raise DamagedWeights(f"{what} says that it is {chunk.index} of {chunk.of}: chunks are missing or misplaced")
        if not is_intact(chunk):
            raise DamagedWeights(f"{what} has another checksum than it names: {len(chunk.data)} bytes were damaged")


def is_intact(chunk: WeightChunk) -> bool:
    """Whether it is as it was written."""
    return checksum_of(chunk.version, chunk.kind, chunk.index, chunk.of, chunk.data) == chunk.checksum


def decode_chunks(chunks: Iterable[WeightChunk], state: State) -> Iterator[list[Piece]]:
    """What each chunk overwrites in `state`, the base of a delta; one chunk is decoded at a time. Chunks of one
    publication have no element in common, so a chunk may be written before the next one is decoded. Raises
    DamagedWeights."""
    for chunk in chunks:
        what = f"chunk {chunk.index} of the {chunk.kind} of version {chunk.version}"
        name = chunk.data[:4]
        if name not in (plain.MAGIC, relative.MAGIC):
            raise DamagedWeights(
                f"{what} is in format {name!r}; this version of Headrace reads HRW1 and HRW2: use the version that "
                "wrote it, or a newer one"
            )
        try:
            yield plain.decode(chunk.data) if name == plain.MAGIC else relative.decode(chunk.data, state)
        except (ValueError, TypeError, IndexError, OverflowError, struct.error, zstandard.ZstdError) as error:
            raise DamagedWeights(f"{what} can't be decoded on what is served here: {error}") from error


def _chunks(version: int, kind: str, every: Iterable[bytes], of: int) -> Iterator[WeightChunk]:
    for index, data in enumerate(every):
        yield WeightChunk(version, kind, index, of, checksum_of(version, kind, index, of, data), data)


def checksum_of(version: int, kind: str, index: int, of: int, data: bytes) -> bytes:
    """16 bytes (XXH3-128) over a chunk's place and data, so that a chunk in another's place shows as well."""
    head = struct.pack("<qqq", version, index, of) + kind.encode() + b"\0"
    return xxhash.xxh3_128_digest(head + data)
