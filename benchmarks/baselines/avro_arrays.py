"""Avro with `array<int>` and `array<float>`, by fastavro's compiled writer and reader: what the schema language offers
for token columns. Single-object encoding, so that a reader knows the schema."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence

import fastavro
import numpy as np
from fastavro.schema import fingerprint, to_parsing_canonical_form

from . import Columns, Piece

_PLAIN = {
    "type": "record",
    "name": "Span",
    "fields": [
        {"name": "group", "type": "string"},
        {"name": "slot", "type": "int"},
        {"name": "attempt", "type": "int"},
        {"name": "incarnation", "type": "string"},
        {"name": "sequence", "type": "long"},
        {"name": "source", "type": "string"},
        {"name": "turn", "type": "int"},
        {"name": "version", "type": "long"},
        {"name": "tokens", "type": {"type": "array", "items": "int"}},
        {"name": "logprobs", "type": {"type": "array", "items": "float"}},
    ],
}
SCHEMA = fastavro.parse_schema(_PLAIN)
HEADER = b"\xc3\x01" + bytes.fromhex(fingerprint(to_parsing_canonical_form(_PLAIN), "CRC-64-AVRO"))


class AvroArrays:
    name = "Avro arrays (fastavro)"

    def encode(self, piece: Piece) -> list[bytes]:
        out = io.BytesIO()
        out.write(HEADER)
        fastavro.schemaless_writer(out, SCHEMA, {
            "group": piece.group, "slot": piece.slot, "attempt": piece.attempt, "incarnation": piece.incarnation,
            "sequence": piece.sequence, "source": "model", "turn": 0, "version": piece.version,
            "tokens": piece.ids.tolist(), "logprobs": piece.logprobs.tolist(),
        })  # fmt: skip
        return [out.getvalue()]

    def decode(self, values: Sequence[bytes]) -> list[Columns]:
        out: list[Columns] = []
        for value in values:
            body = io.BytesIO(value)
            body.seek(len(HEADER))
            span = fastavro.schemaless_reader(body, SCHEMA, None)
            assert isinstance(span, dict)
            ids, logprobs = np.array(span["tokens"], np.int32), np.array(span["logprobs"], np.float32)
            out.append(((span["group"], span["slot"]), ids, logprobs))
        return out

    def episode(self, piece: Piece) -> Hashable:
        return piece.group, piece.slot
