"""What weights are here: bits by name, and what of them changed.

Weights are compared, sent and written as bits in the published dtype, never as numbers, so that NaN payloads, signed
zeros and denormals arrive as they are. A change is an overwrite: written twice, it is the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native

Bits = NDArray[Any]
Positions = NDArray[np.int64]
# The new bits of one tensor: flat positions (int64 ascending, or None for the whole tensor) and values (unsigned [n]).
Change = tuple[Positions | None, Bits]
Changes = dict[str, Change]

_SCAN = 1 << 19  # elements compared at a time: what changed is gathered while it lies in the cache


@dataclass(frozen=True, slots=True)
class Tensor:
    """Served weights of one name: `bits` is unsigned (uint8, uint16 or uint32) in the tensor's shape."""

    dtype: str  # what the bits are: bfloat16, float16, float32, ...
    bits: Bits


State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Overwrites in one tensor: a run of elements from `start`, or those at `positions` (ascending; `start` first)."""

    name: str
    start: int
    positions: Positions | None
    values: Bits
    old: Bits | None = None  # what is there, where decoding has looked


def as_state(arrays: Mapping[str, Bits], dtype: str) -> dict[str, Tensor]:
    """Arrays of bits that are all of one dtype, as an engine or a trainer hands them out."""
    return {name: Tensor(dtype, bits) for name, bits in arrays.items()}


def copy_state(state: State) -> dict[str, Tensor]:
    """The same weights in memory of their own."""
    return {name: Tensor(tensor.dtype, tensor.bits.copy()) for name, tensor in state.items()}


def elements(state: State) -> int:
    """Of all tensors."""
    return sum(tensor.bits.size for tensor in state.values())


def flat(name: str, tensor: Tensor) -> Bits:
    """The elements in a row, as a view. Raises ValueError for bits that nothing here handles."""
    bits = tensor.bits
    if bits.dtype.kind != "u" or bits.itemsize > 4 or bits.size >= 2**32 or not bits.flags.c_contiguous:
        raise ValueError(f"tensor {name!r}: the state is unsigned bits of at most 32, contiguous, below 2^32 elements")
    return bits.reshape(-1)


def diff(old: State, new: State) -> Changes:
    """What must be written to turn `old` into `new`, compared as bits. A tensor of which more than half changed is
    there as a whole. Raises ValueError where names, dtypes or shapes differ."""
    if [(n, t.dtype, t.bits.shape) for n, t in old.items()] != [(n, t.dtype, t.bits.shape) for n, t in new.items()]:
        raise ValueError("the two states differ in names, order, dtypes or shapes: send a snapshot")
    changes: Changes = {}
    for name, tensor in new.items():
        before, after = flat(name, old[name]), flat(name, tensor)
        places, values = [np.zeros(0, np.int64)], [after[:0]]
        for start in range(0, after.size, _SCAN):
            here, bits = _differing(before[start : start + _SCAN], after[start : start + _SCAN], start)
            places.append(here)
            values.append(bits)
        positions = np.concatenate(places)
        if positions.size > after.size // 2:
            changes[name] = (None, after.copy())
        elif positions.size:
            changes[name] = (positions, np.concatenate(values))
    return changes


def _differing(old: Bits, new: Bits, start: int) -> tuple[Positions, Bits]:
    """Where `new` isn't `old`, counted from `start`, and its bits there."""
    if native.compiled is not None:
        positions, values = np.empty(new.size, np.int64), np.empty_like(new)
        count = native.compiled.differing(old, new, new.itemsize, start, positions, values)
        return positions[:count].copy(), values[:count].copy()
    positions = np.flatnonzero(old != new)
    values = new.take(positions)
    positions += start
    return positions, values


def take(elements: Bits, positions: Positions) -> Bits:
    """The elements ([n]) at positions. Raises IndexError."""
    if native.compiled is None:
        return elements.take(positions)
    out = np.empty(positions.size, elements.dtype)
    native.compiled.take(elements, elements.itemsize, positions, out)
    return out


def put(elements: Bits, positions: Positions | NDArray[np.uint32], values: Bits) -> None:
    """Overwrite the elements ([n]) at positions ([k]) with values ([k]). Raises IndexError."""
    if native.compiled is None:
        elements[positions] = values
    else:
        native.compiled.put(elements, elements.itemsize, positions, np.ascontiguousarray(values))


def changed(changes: Mapping[str, Change]) -> int:
    """Elements that are written."""
    return sum(values.size for _, values in changes.values())


def write(state: State, changes: Mapping[str, Change]) -> None:
    """Overwrite in place. What was verified can't fail here."""
    if isinstance(changes, Overwrites):
        changes.write(state)
    else:
        write_pieces(state, (Piece(name, 0, positions, values) for name, (positions, values) in changes.items()))


def write_pieces(state: State, pieces: Iterable[Piece]) -> None:
    """Overwrite in place; positions are flat. Raises KeyError, ValueError, IndexError for pieces that don't fit."""
    for piece in pieces:
        target = state[piece.name].bits.reshape(-1)
        if piece.positions is None:
            target[piece.start : piece.start + piece.values.size] = piece.values
        else:
            put(target, piece.positions, piece.values)


class Overwrites(Mapping[str, Change]):
    """Verified pieces by tensor, for weights that are served until all of them are written; those of one tensor are
    consecutive runs, or positions that ascend. A position takes 4 bytes here; each access makes the change of one
    tensor anew, so that going through `items` holds no more than one in the form in which it is written."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[NDArray[np.uint32] | None, Bits]]] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        """Their values are kept, not copied."""
        for piece in pieces:
            places = None if piece.positions is None else piece.positions.astype(np.uint32)
            self._pieces.setdefault(piece.name, []).append((places, piece.values))

    def write(self, state: State) -> None:
        """As `items` would be written, without making them."""
        for name, pieces in self._pieces.items():
            target, start = flat(name, state[name]), 0
            for places, values in pieces:
                if places is None:
                    target[start : start + values.size] = values
                    start += values.size
                else:
                    put(target, places, values)

    def __getitem__(self, name: str) -> Change:
        pieces = self._pieces[name]
        values = pieces[0][1] if len(pieces) == 1 else np.concatenate([part for _, part in pieces])
        places = [part for part, _ in pieces if part is not None]
        return (np.concatenate(places).astype(np.int64) if places else None), values

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
