"""Whether a publication may be written here: proved from its chunks before the first write.

The base must be the version and the bits that the record names, and the result must be the bits that it names. Both are
the state hash; it is moved along by the changed elements alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..errors import DamagedWeights, WeightsRefused, WrongBase
from ..events import Publication, WeightChunk
from .chunks import DELTA, check_chunks, decode_chunks
from .state import Overwrites, Piece, State, Tensor, flat, write_pieces
from .statehash import (
    HASH_ALGORITHM,
    Sums,
    combined,
    element_sums,
    flipped_bit,
    own_sums,
    plus,
    tensor_sums,
)  # fmt: skip


def verify(
    state: State, version: int, served_hash: bytes, publication: Publication, pieces: Iterable[Iterable[Piece]]
) -> dict[str, Sums]:
    """Prove that `pieces`, as `decode_chunks` gives them, turn what is served here (`version`, `served_hash`, `state`)
    into what was published; nothing of them is kept. Returns what a delta adds to the sums of each tensor, or the sums
    that a snapshot gives it.

    Raises WrongBase where the delta belongs on other weights, DamagedWeights where the result would not be the
    published one, WeightsRefused where this software doesn't know the hash; and what `pieces` raises.
    """
    what = f"{publication.kind} of version {publication.version}"
    if publication.hash_algorithm != HASH_ALGORITHM:
        raise WeightsRefused(f"{what}: its hash is {publication.hash_algorithm!r}, known here is {HASH_ALGORITHM!r}")
    is_delta = publication.kind == DELTA
    if is_delta and publication.base != version:
        raise WrongBase(f"{what} applies to version {publication.base}; version {version} is served here")
    if is_delta and publication.base_hash != served_hash:
        raise WrongBase(
            f"{what} applies to weights {publication.base_hash.hex()}; those served here as version {version} are "
            f"{served_hash.hex()}"
        )
    sums: dict[str, Sums] = {} if is_delta else {name: own_sums(name, tensor) for name, tensor in state.items()}
    written = dict.fromkeys(state, 0)  # elements of each tensor up to which pieces have come
    seen, changed = set(), 0
    for piece in (piece for chunk in pieces for piece in chunk):
        end = _end(what, piece, state)
        if piece.start < written[piece.name] or not (is_delta or piece.start == written[piece.name]):
            raise DamagedWeights(f"{what}: the pieces of tensor {piece.name!r} leave a gap or overlap")
        written[piece.name] = end
        seen.add(piece.name)
        changed += piece.values.size
        tensor = state[piece.name]
        places = piece.start if piece.positions is None else piece.positions
        old = piece.old
        if is_delta and old is None:
            served = flat(piece.name, tensor)
            old = served[piece.start : end] if piece.positions is None else served.take(piece.positions)
        move = element_sums(piece.name, tensor, places, piece.values, old if is_delta else None)
        sums[piece.name] = plus(sums.get(piece.name, (0, 0)), move)
    if not is_delta and (lacking := [n for n, t in state.items() if n not in seen or written[n] != t.bits.size]):
        raise DamagedWeights(f"{what} lacks tensors that are served here: {', '.join(lacking[:3])}")
    if changed != publication.changed:
        raise DamagedWeights(f"{what} has {changed} elements, its record says {publication.changed}")
    if (result := combined(sums, served_hash) if is_delta else combined(sums)) != publication.served_hash:
        raise DamagedWeights(
            f"{what} would give weights {result.hex()}, its record says {publication.served_hash.hex()}; nothing was "
            "written"
        )
    return sums


def decode_verified(
    state: State, version: int, served_hash: bytes, publication: Publication, chunks: Sequence[WeightChunk]
) -> tuple[Overwrites, dict[str, Sums]]:
    """All overwrites of a publication, proved, and what `verify` returns: for weights that are served while this runs,
    so that what is left is to write. Holds 4 bytes beside the value for each changed element. Raises as `check_chunks`,
    `decode_chunks` and `verify` do."""
    held = Overwrites()

    def holding() -> Iterator[list[Piece]]:
        for pieces in decode_chunks(chunks, state):
            held.add(pieces)
            yield pieces

    check_chunks(publication, chunks)
    sums = verify(state, version, served_hash, publication, holding())
    return held, sums


def verify_and_apply(
    state: State, version: int, served_hash: bytes, publication: Publication, chunks: Sequence[WeightChunk]
) -> dict[str, Sums]:
    """Prove, then overwrite `state` in place; its hash is then the publication's. Chunks are decoded twice, so that no
    more than one is held decoded: for weights that nobody is served from meanwhile. Raises as `decode_verified` does,
    and then nothing has changed."""
    check_chunks(publication, chunks)
    sums = verify(state, version, served_hash, publication, decode_chunks(chunks, state))
    for pieces in decode_chunks(chunks, state):
        write_pieces(state, pieces)
    return sums


def damage(name: str, tensor: Tensor, expected: Sums) -> DamagedWeights | None:
    """What an audit finds in a served tensor that should have these sums; names the element where one bit of it is
    wrong. Takes some 10 ns an element, and twenty times that where there is damage."""
    if tensor_sums(name, tensor) == expected:
        return None
    found = flipped_bit(name, tensor, expected)
    if found is None:
        where = "more than one bit is wrong"
    else:
        where = f"bit {found[1]} of element {found[0]} is wrong"
    return DamagedWeights(
        f"tensor {name!r} isn't what was published and served: {where}; check this machine's memory. All weights are "
        "made anew with the next version"
    )


def _end(what: str, piece: Piece, state: State) -> int:
    """The place behind the last element of a piece. Raises DamagedWeights where it doesn't fit the state."""
    name, positions = piece.name, piece.positions
    if name not in state:
        raise DamagedWeights(f"{what} has a tensor {name!r} that isn't served here")
    bits = state[name].bits
    if piece.values.dtype != bits.dtype:
        raise DamagedWeights(f"{what}: tensor {name!r} has {piece.values.dtype} values, served are {bits.dtype}")
    end = piece.start + piece.values.size if positions is None else int(positions[-1]) + 1
    if end > bits.size:
        raise DamagedWeights(f"{what}: a position lies outside the {bits.size} elements of tensor {name!r}")
    return end
