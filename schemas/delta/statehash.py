"""The hash that names a state of the weights, and finds what was damaged in it.

It is a sum over elements, 128 bits, in any order: so both ends move it along from the changed elements alone, each
tensor has its own part of it, and a full count (an audit) shows which tensor isn't what it should be. It guards against
loss and damage, not against an adversary.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..hashes import digest
from . import native
from .state import Bits, Changes, Positions, State, Tensor, flat

HASH_ALGORITHM = "headrace-mix128-1"  # what `state_hash` computes
TREE_ALGORITHM = "headrace-tree128-1"  # what `tree_hash` computes

Sums = tuple[int, int]  # each mod 2^64

_U64 = np.uint64
_WRAP = 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's finaliser, then one round more
_SECOND = _U64(0xD6E8FEB86659FD93)
_BLOCK = 1 << 14  # elements; two uint64 buffers of a block stay in the second-level cache
_PLACES = np.arange(_BLOCK, dtype=_U64) << _U64(32)


def _key(name: str, tensor: Tensor) -> bytes:
    return _key_of(name, tensor.dtype, tensor.bits.shape)


@functools.lru_cache(maxsize=4096)
def _key_of(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return digest(json.dumps([name, dtype, list(shape)]).encode())


def _mix(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """In place; `spare` is overwritten."""
    for shift, factor in _ROUNDS:
        np.right_shift(x, _U64(shift), out=spare)
        np.bitwise_xor(x, spare, out=x)
        np.multiply(x, _U64(factor), out=x)
    np.right_shift(x, _U64(31), out=spare)
    np.bitwise_xor(x, spare, out=x)


def element_sums(name: str, tensor: Tensor, places: Positions | int, values: Bits, old: Bits | None = None) -> Sums:
    """What `values` at `places` (ascending positions, or the first of a run) count for in the tensor's sums: the sums
    over (position << 32 | bits), each offset by the tensor's key and mixed. With `old`, what they count for more than
    those."""
    offset = int.from_bytes(_key(name, tensor)[:8], "little")
    if native.compiled is not None:
        positions, start = (None, places) if isinstance(places, int) else (places, 0)
        sums: Sums = native.compiled.element_sums(offset, positions, start, values, old, values.itemsize)
        return sums
    x, spare = np.empty(_BLOCK, _U64), np.empty(_BLOCK, _U64)
    where = np.empty(_BLOCK, _U64) if old is not None else x
    total: Sums = 0, 0
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK]
        block, rest, here = x[: part.size], spare[: part.size], where[: part.size]
        if isinstance(places, int):
            np.add(_PLACES[: part.size], _U64(((places + start << 32) + offset) % _WRAP), out=here)
        else:
            np.left_shift(places[start : start + _BLOCK].view(_U64), _U64(32), out=here)
            np.add(here, _U64(offset), out=here)
        np.add(here, part, out=block)
        total = plus(total, _mixed_sums(block, rest))
        if old is not None:
            np.add(here, old[start : start + _BLOCK], out=block)
            total = minus(total, _mixed_sums(block, rest))
    return total


def _mixed_sums(x: NDArray[np.uint64], spare: NDArray[np.uint64]) -> Sums:
    """Both are overwritten."""
    _mix(x, spare)
    first = int(x.sum())
    np.multiply(x, _SECOND, out=x)
    np.right_shift(x, _U64(32), out=spare)
    np.bitwise_xor(x, spare, out=x)
    return first, int(x.sum())


def own_sums(name: str, tensor: Tensor) -> Sums:
    """What a tensor counts for beside its elements, so that one without elements counts too."""
    first, second = struct.unpack("<QQ", _key(name, tensor))
    return first, second


def tensor_sums(name: str, tensor: Tensor) -> Sums:
    """What a whole tensor counts for. Raises ValueError for bits that nothing here handles."""
    return plus(own_sums(name, tensor), element_sums(name, tensor, 0, flat(name, tensor)))


def state_sums(state: State) -> dict[str, Sums]:
    """Of each tensor, over every bit; about 1 s for 135 million elements."""
    return {name: tensor_sums(name, tensor) for name, tensor in state.items()}


def plus(one: Sums, other: Sums) -> Sums:
    """Modulo 2^64, each."""
    return (one[0] + other[0]) % _WRAP, (one[1] + other[1]) % _WRAP


def minus(one: Sums, other: Sums) -> Sums:
    """Modulo 2^64, each."""
    return (one[0] - other[0]) % _WRAP, (one[1] - other[1]) % _WRAP


def combined(sums: Mapping[str, Sums], before: bytes = bytes(16)) -> bytes:
    """The 16 bytes of a state hash, from all tensors' sums; or `before`, moved along by what was added to some."""
    total: Sums = struct.unpack("<QQ", before)
    for own in sums.values():
        total = plus(total, own)
    return struct.pack("<QQ", *total)


def moved(sums: Mapping[str, Sums], moves: Mapping[str, Sums]) -> dict[str, Sums]:
    """The sums of all tensors after something was added to those of some."""
    return {**sums, **{name: plus(sums[name], move) for name, move in moves.items()}}


def state_hash(state: State) -> bytes:
    """16 bytes over names, dtypes, shapes and every bit."""
    return combined(state_sums(state))


def updated_hash(before: bytes, state: State, changes: Changes) -> bytes:
    """The hash of `state` with `changes` written, given its hash; `state` itself still holds the old values."""
    moves = {}
    for name, (positions, values) in changes.items():
        tensor = state[name]
        old = flat(name, tensor) if positions is None else flat(name, tensor).take(positions)
        moves[name] = element_sums(name, tensor, 0 if positions is None else positions, values, old)
    return combined(moves, before)


def flipped_bit(name: str, tensor: Tensor, expected: Sums) -> tuple[int, int] | None:
    """Flat position and bit of the one bit that is wrong in a tensor, or None where more is wrong than one bit. Takes
    about 0.1 s for each million elements."""
    wrong = minus(tensor_sums(name, tensor), expected)
    offset = int.from_bytes(_key(name, tensor)[:8], "little")
    values = flat(name, tensor)
    spare = np.empty(_BLOCK, _U64)
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK]
        places = _PLACES[: part.size] + _U64(((start << 32) + offset) % _WRAP)
        found = places + part
        _mix(found, spare[: part.size])
        for bit in range(8 * values.itemsize):
            right = places + (part ^ part.dtype.type(1 << bit))
            _mix(right, spare[: part.size])
            for at in np.flatnonzero(found - right == _U64(wrong[0])).tolist():
                one, other = part[at : at + 1], part[at : at + 1] ^ part.dtype.type(1 << bit)
                place = start + at
                if element_sums(name, tensor, place, one, other) == wrong:
                    return place, bit
    return None


def tree_hash(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """16 bytes over names, dtypes, shapes and contents, in the order of names: for state that is hashed as a whole."""
    leaves = [
        (name, str(array.dtype), list(array.shape), xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data))
        for name, array in sorted(arrays.items())
    ]
    return digest(json.dumps(leaves).encode())
