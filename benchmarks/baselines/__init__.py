"""What Headrace is measured against, each as someone who knows it well would write it, in a file of its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.schemas.columns import Float32, Int32


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of model tokens with the facts that every format must carry. ids int32[n]; logprobs float32[n], nats."""

    group: str
    slot: int
    attempt: int
    incarnation: str
    sequence: int
    version: int
    ids: Int32
    logprobs: Float32


# An episode by whatever name the format gives it, and columns of it: int32[n], float32[n].
Columns = tuple[Hashable, Int32, Float32]


class Format(Protocol):
    """How a span becomes the values of records, and back. Decoding ends with arrays, as a trainer needs them."""

    name: str

    def encode(self, piece: Piece) -> Sequence[bytes]: ...

    def decode(self, values: Sequence[bytes]) -> list[Columns]:
        """`values` of consecutive records of a partition."""
        ...

    def episode(self, piece: Piece) -> Hashable:
        """What `decode` calls the piece's episode."""
        ...
