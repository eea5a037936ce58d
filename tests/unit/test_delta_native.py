"""The codec's compiled inner loops and their numpy twins give the same, to the bit, for good bytes and for bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.delta import Tensor, native, relative
from headrace.schemas.delta.chunks import checksum_of
from headrace.schemas.errors import DamagedWeights
from headrace.schemas.events import WeightChunk

pytestmark = pytest.mark.skipif(native.compiled is None, reason="the compiled loops weren't built at the install")

DTYPES = {"bfloat16": "u2", "float16": "u2", "float32": "u4", "float8_e4m3fn": "u1", "int8": "u1", "of others": "u2"}
Found = list[tuple[str, int, list[int] | None, list[int]]]


def both(call: Any) -> tuple[Any, Any]:
    """With the compiled loops, and without."""
    compiled, first = native.compiled, call()
    native.compiled = None
    try:
        return first, call()
    finally:
        native.compiled = compiled


def states(seed: int, dtype: str, share: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Normal weights, of which a share moved by a few units and some were set anew; one tensor is clustered (escapes
    and bitmaps)."""
    rng, kind = np.random.default_rng(seed), np.dtype(DTYPES[dtype])
    old: dict[str, Tensor] = {}
    new: dict[str, Tensor] = {}
    for name, size in {"a": 9_000, "b": 0, "c": 70_000, "d": 1}.items():
        bits: NDArray[Any] = rng.integers(0, 2 ** (8 * kind.itemsize), size).astype(kind)
        if dtype in ("bfloat16", "float32"):
            normal = rng.standard_normal(size).astype(np.float32).view(np.uint32)
            bits = (normal >> (16 if kind == "u2" else 0)).astype(kind)
        moves = rng.random(size) < share
        if name == "c":
            moves[10_000:60_000] = False
            moves[60_000:66_000] = rng.random(6_000) < 0.9
        after = bits + np.where(moves, rng.choice([-2, -1, 1, 1, 3], size), 0).astype(kind)
        anew = moves & (rng.random(size) < 0.01)
        after[anew] = rng.integers(0, 2 ** (8 * kind.itemsize), int(anew.sum())).astype(kind)
        old[name], new[name] = Tensor(dtype, bits), Tensor(dtype, after)
    return old, new


def pieces(old: delta.State, chunks: Sequence[WeightChunk]) -> Found | None:
    """What is decoded, as plain lists; None where it is refused."""
    try:
        return [(p.name, p.start, None if p.positions is None else p.positions.tolist(), p.values.tolist())
                for part in delta.decode_chunks(chunks, old) for p in part]  # fmt: skip
    except DamagedWeights:
        return None


@pytest.mark.parametrize("codec", ["fast", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0005, 0.02, 0.4, 0.8])
def test_both_find_encode_decode_hash_and_write_the_same(dtype: str, share: float, codec: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(relative, "MAX_CHANGES", 20_000)
    old, new = states(1, dtype, share)

    def changes() -> list[tuple[str, list[int] | None, list[int]]]:
        return [(n, None if p is None else p.tolist(), v.tolist()) for n, (p, v) in delta.diff(old, new).items()]

    one, other = both(changes)
    assert one == other
    chunks, twins = both(lambda: delta.encode_delta(1, old, delta.diff(old, new), codec))
    assert chunks == twins
    found, twin = both(lambda: pieces(old, chunks))
    assert found is not None and found == twin
    hashes, twins = both(lambda: (delta.state_hash(new), delta.updated_hash(b"h" * 16, old, delta.diff(old, new))))
    assert hashes == twins

    def written() -> dict[str, list[int]]:
        state = delta.copy_state(old)
        for part in delta.decode_chunks(chunks, old):
            delta.write_pieces(state, part)
        return {name: tensor.bits.tolist() for name, tensor in state.items()}

    one, other = both(written)
    assert one == other == {name: tensor.bits.tolist() for name, tensor in new.items()}


@given(seed=st.integers(0, 2**32 - 1), codec=st.sampled_from(["fast", "dense"]))
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_end_the_same_way_in_both(seed: int, codec: str) -> None:
    """Below the checksum: refused, or decoded to the same overwrites (which verification then refuses)."""
    rng = np.random.default_rng(seed)
    old, new = states(2, "bfloat16", 0.05)
    (chunk,) = delta.encode_delta(1, old, delta.diff(old, new), codec)
    data = bytearray(chunk.data)
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(4, len(data)))] = int(rng.integers(256))
    data = data[: int(rng.integers(5, len(data)))] if rng.random() < 0.1 else data
    bad = WeightChunk(1, delta.DELTA, 0, 1, checksum_of(1, delta.DELTA, 0, 1, bytes(data)), bytes(data))
    found, twin = both(lambda: pieces(old, [bad]))
    assert found == twin


def test_compiled_loops_refuse_what_does_not_fit() -> None:
    """Called past their callers' own checks: an error, and no access outside of the arrays."""
    loops: Any = native.compiled
    eight, places = np.zeros(8, np.uint16), np.array([0, 8], np.int64)
    calls: list[tuple[Any, ...]] = [
        (loops.take, eight, 2, places, np.zeros(2, np.uint16)),
        (loops.put, eight, 2, places - 9, np.zeros(2, np.uint16)),
        (loops.put, eight, 2, places, np.zeros(3, np.uint16)),
        (loops.take, eight, 3, places, np.zeros(2, np.uint16)),
        (loops.differing, eight, eight[:4], 2, 0, places, eight.copy()),
        (loops.element_sums, 0, places, 0, eight, None, 2),
        (loops.stepped, eight, 2, 20, places, 1, (), 1, eight.copy()),
    ]
    for call, *arguments in calls:
        with pytest.raises((ValueError, IndexError)):
            call(*arguments)
    assert not eight.any()
