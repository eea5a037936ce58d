"""Format HRW2: changes told in terms of the weights that they change.

A chunk holds parts of tensors of one dtype, laid end to end, and which of their elements became what. It can be read
only beside its base, and what is read is a set of overwrites: (position, new bits). Three methods say where: `fast` by
distances, `dense` by distances within octaves (fewer bytes, slower), `every` for parts of which most elements changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from . import plain
from .positions import put_gaps, take_gaps
from .ranks import from_ranks, to_ranks
from .state import Bits, Piece, Positions, State, flat, take
from .streams import Columns, Writer
from .values import put_values, take_values

MAGIC = b"HRW2"
FAST, DENSE, EVERY = range(3)
CODECS = {"fast": FAST, "dense": DENSE}
MAX_CHANGES = 1 << 18  # elements of a chunk: 0.3 to 0.5 MB at one change in a hundred, and 3 MB decoded

T = TypeVar("T")

_SAMPLE = 1 << 16  # elements that are encoded in both formats, to see which is shorter


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a tensor, and what of them is written: `values` at `positions` (flat in the tensor), or
    all."""

    name: str
    start: int
    stop: int
    positions: Positions | None
    values: Bits

    def cut(self, count: int) -> tuple[Part, Part]:
        """At a number of written elements."""
        if self.positions is None:
            middle, halves = self.start + count, (None, None)
        else:
            middle = int(self.positions[count])
            halves = self.positions[:count], self.positions[count:]  # type: ignore[assignment]
        return (
            Part(self.name, self.start, middle, halves[0], self.values[:count]),
            Part(self.name, middle, self.stop, halves[1], self.values[count:]),
        )


def encode(state: State, parts: Sequence[Part], method: int) -> Iterator[bytes]:
    """Parts of one dtype as chunks' data, each within `plain.CHUNK_BYTES`. `state` still holds the old values."""
    rest = list(parts)
    while rest:
        chunk, rest = _split(rest, MAX_CHANGES)
        yield from _within_limit(state, chunk, method)


def is_shorter(state: State, name: str, values: Bits) -> bool:
    """Whether a tensor that is sent as a whole takes fewer bytes relative to the old one than it does plain."""
    sample = values[:_SAMPLE]
    return len(_data(state, [Part(name, 0, sample.size, None, sample)], EVERY)) < plain.size(sample)


def _within_limit(state: State, parts: list[Part], method: int) -> Iterator[bytes]:
    data = _data(state, parts, method)
    count = sum(part.values.size for part in parts)
    if len(data) <= plain.CHUNK_BYTES or count < 2:
        yield data
        return
    for half in _split(parts, count // 2):
        yield from _within_limit(state, half, method)


def _split(parts: list[Part], count: int) -> tuple[list[Part], list[Part]]:
    """The parts with the first `count` written elements, and the rest."""
    for i, part in enumerate(parts):
        if part.values.size > count:
            if not count:
                return parts[:i], parts[i:]
            first, second = part.cut(count)
            return [*parts[:i], first], [second, *parts[i + 1 :]]
        count -= part.values.size
    return parts, []


def _data(state: State, parts: Sequence[Part], method: int) -> bytes:
    dtype = state[parts[0].name].dtype
    ranges = [flat(part.name, state[part.name])[part.start : part.stop] for part in parts]
    new = _joined([part.values for part in parts])
    out = Writer()
    out.number(method)
    out.number(new.size)
    out.put("\0".join([dtype, *(part.name for part in parts)]).encode())
    out.numbers(number for part in parts for number in (part.start, part.stop - part.start))
    if method == EVERY:
        old = _joined(ranges)
    else:
        olds, ends = [], []
        end = 0
        for part, values in zip(parts, ranges, strict=True):
            assert part.positions is not None
            here = part.positions - part.start if part.start else part.positions
            olds.append(take(values, here))
            ends.append(here + end if end else here)
            end += values.size
        old, positions = _joined(olds), _joined(ends)
        if method == DENSE:
            positions, counts = to_ranks(dtype, ranges, positions)
            out.numbers(counts.tolist())
        put_gaps(out, positions)
    put_values(out, dtype, old, new, _least(method))
    return MAGIC + out.bytes()


def decode(data: bytes, state: State) -> list[Piece]:
    """The overwrites of a chunk, given the state that it applies to. Raises ValueError, IndexError or
    zstandard.ZstdError where it isn't what the format says, or doesn't fit the state."""
    columns = Columns(memoryview(data)[len(MAGIC) :])
    method, count = columns.number(), columns.number()
    if method not in (FAST, DENSE, EVERY) or not 0 < count <= MAX_CHANGES:
        raise ValueError(f"method {method} for {count} elements")
    dtype, *names = columns.take().tobytes().decode().split("\0")
    bounds = columns.numbers()
    if not names or len(bounds) != 2 * len(names):
        raise ValueError(f"{len(names)} tensors with {len(bounds)} bounds")
    ranges = [
        _range(state, name, dtype, start, size)
        for name, start, size in zip(names, bounds[::2], bounds[1::2], strict=True)
    ]
    ends = np.array(list(itertools.accumulate(values.size for values in ranges)))
    positions, end = None, 0
    if method == EVERY:
        old = _joined(ranges)
        if old.size != count:
            raise ValueError(f"{count} elements for a place of {old.size}")
        cuts = ends
    else:
        counts = np.array(columns.numbers(), np.int64) if method == DENSE else None
        positions = take_gaps(columns, count)
        if not 0 <= positions[0] <= positions[-1] < ends[-1]:
            raise ValueError("positions beyond the last element")
        if counts is not None:
            positions = from_ranks(dtype, ranges, positions, counts)
        cuts = np.searchsorted(positions, ends)
        for values, lo, hi in _slices(ranges, cuts):
            if end:
                positions[lo:hi] -= end
            end += values.size
        old = _joined([take(values, positions[lo:hi]) for values, lo, hi in _slices(ranges, cuts)])
    new = take_values(columns, dtype, old, _least(method))
    columns.end()
    pieces = []
    for (name, start), lo, hi in _slices(list(zip(names, bounds[::2], strict=True)), cuts):
        if positions is None:
            pieces.append(Piece(name, start, None, new[lo:hi], old[lo:hi]))
        elif lo < hi:
            places = positions[lo:hi]
            if start:
                places += start
            pieces.append(Piece(name, int(places[0]), places, new[lo:hi], old[lo:hi]))
    return pieces


def _range(state: State, name: str, dtype: str, start: int, size: int) -> Bits:
    if name not in state:
        raise ValueError(f"tensor {name!r} isn't served here")
    tensor = state[name]
    if tensor.dtype != dtype or start + size > tensor.bits.size:
        raise ValueError(
            f"elements {start} to {start + size} of tensor {name!r} as {dtype}; served are {tensor.bits.size} as "
            f"{tensor.dtype}"
        )
    return flat(name, tensor)[start : start + size]


def _slices(each: Sequence[T], cuts: NDArray[np.int64]) -> Iterator[tuple[T, int, int]]:
    lo = 0
    for one, hi in zip(each, cuts.tolist(), strict=True):
        yield one, lo, hi
        lo = hi


def _joined(arrays: Sequence[Bits]) -> Bits:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _least(method: int) -> int:
    """The smallest distance between old and new value."""
    return 0 if method == EVERY else 1
