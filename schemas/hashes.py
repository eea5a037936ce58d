"""Hashes that prove the log: each names its algorithm where it is recorded.

`blake2b-128` chains records and covers contents. The check of a single retained event is CRC-32: it has to tell that a
record is the one that was read, at 4 bytes each.
"""

from __future__ import annotations

import hashlib
import zlib

CONTENT_ALGORITHM = "headrace-content128-3"  # BLAKE2b over what `payload.content_hash` says
GENESIS = b"\0" * 16  # what the first record of a chain calls the one before it


def digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b."""
    return hasher(data).digest()


def hasher(data: bytes = b"") -> hashlib.blake2b:
    """The same, in pieces: `update`, then `digest`."""
    return hashlib.blake2b(data, digest_size=16)


def crc(data: bytes) -> int:
    """CRC-32 (zlib's): against damage, not against forgery."""
    return zlib.crc32(data)
