"""The weights' wire format: every bit arrives, and what is damaged or meant for other weights changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.schemas import delta
from headrace.schemas.codec import decode, encode
from headrace.schemas.delta import Tensor
from headrace.schemas.errors import DamagedWeights, UndecodableRecord, WeightsRefused, WrongBase
from headrace.schemas.events import Publication, WeightChunk
from headrace.schemas.hashes import GENESIS, digest

State = dict[str, Tensor]

SPECIAL_BF16 = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81], np.uint16)


def random_state(seed: int, dtype: str = "u2") -> State:
    rng = np.random.default_rng(seed)
    label = {"u1": "float8_e4m3fn", "u2": "bfloat16", "u4": "float32"}[dtype]
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (61, 32), "empty": (0, 4), "scalar": (), "norm": (32,), "mlp.weight": (96, 33)
    }  # fmt: skip
    top = 2 ** (8 * np.dtype(dtype).itemsize)
    return {n: Tensor(label, rng.integers(0, top, s).astype(dtype).reshape(s)) for n, s in shapes.items()}


def publication(kind: str, old: State, new: State, version: int = 1, changed: int | None = None) -> Publication:
    if changed is None:
        changed = delta.changed(delta.diff(old, new)) if kind == delta.DELTA else delta.elements(new)
    base = version - 1 if kind == delta.DELTA else -1
    return Publication(
        0, GENESIS, "trainer", version, kind, base, delta.state_hash(old) if base >= 0 else b"", delta.HASH_ALGORITHM,
        delta.state_hash(new), None, (), 0, changed, delta.elements(new), 0,
    )  # fmt: skip


def same(a: State, b: State) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[n].bits, b[n].bits) for n in a)


def send(old: State, new: State) -> list[WeightChunk]:
    return list(delta.encode_delta(1, delta.diff(old, new)))


def receive(old: State, new: State, chunks: Sequence[WeightChunk]) -> State:
    served = delta.copy_state(old)
    head = publication(delta.DELTA, old, new)
    delta.verify_and_apply(served, 0, delta.state_hash(old), head, [as_chunk(decode(encode(c))) for c in chunks])
    assert delta.state_hash(served) == head.served_hash
    return served


def as_chunk(event: Any) -> WeightChunk:
    assert isinstance(event, WeightChunk)
    return event


def test_state_hash_is_the_one_that_was_published_first() -> None:
    """A run that was recorded with this algorithm must be provable for ever: another value needs another name."""
    state = {"a": Tensor("bfloat16", np.arange(6, dtype=np.uint16).reshape(2, 3))}
    assert delta.HASH_ALGORITHM == "headrace-mix128-1"
    assert delta.state_hash(state).hex() == "3bbdfb5128ff943389df9b18745d9502"
    assert delta.state_hash(state) == scalar_hash("a", state["a"])


def scalar_hash(name: str, tensor: Tensor) -> bytes:
    """The definition, one element at a time."""
    wrap, sums = 2**64, [0, 0]
    key = digest(json.dumps([name, tensor.dtype, list(tensor.bits.shape)]).encode())
    own = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    for position, value in enumerate(tensor.bits.reshape(-1).tolist()):
        x = ((position << 32 | value) + own[0]) % wrap
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
        x ^= x >> 31
        sums[0] += x
        x = x * 0xD6E8FEB86659FD93 % wrap
        sums[1] += x ^ x >> 32
    return b"".join(((s + k) % wrap).to_bytes(8, "little") for s, k in zip(sums, own, strict=True))


def test_state_hash_covers_names_dtypes_shapes_and_tensors_without_elements() -> None:
    base = random_state(1)
    variants: list[State] = [base]
    variants.append({("norm2" if n == "norm" else n): t for n, t in base.items()})
    variants.append({n: replace(t, dtype="float16") if n == "norm" else t for n, t in base.items()})
    variants.append({n: replace(t, bits=t.bits.reshape(32, 61)) if n == "embed" else t for n, t in base.items()})
    variants.append({n: t for n, t in base.items() if n != "empty"})
    swapped = dict(base)
    swapped["norm"] = replace(base["norm"], bits=base["norm"].bits[::-1].copy())
    variants.append(swapped)
    assert len({delta.state_hash(state) for state in variants}) == len(variants)


def test_state_hash_does_not_depend_on_the_order_of_tensors() -> None:
    state = random_state(2)
    assert delta.state_hash(dict(reversed(state.items()))) == delta.state_hash(state)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_delta_of_any_density_arrives_bit_for_bit(dtype: str, share: float) -> None:
    old, new = random_state(3, dtype), random_state(4, dtype)
    rng = np.random.default_rng(5)
    for name, tensor in new.items():
        keep = rng.random(tensor.bits.shape) >= share
        tensor.bits[keep] = old[name].bits[keep]
    assert same(receive(old, new, send(old, new)), new)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bits_arrive(data: st.DataObject) -> None:
    """NaN payloads, signed zeros and denormals are bits like any others."""
    dtype = data.draw(st.sampled_from(["u1", "u2", "u4"]))
    shape = data.draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    old, new = (
        {"w": Tensor("x", data.draw(npst.arrays(dtype, shape))), "v": Tensor("x", data.draw(npst.arrays(dtype, (5,))))}
        for _ in range(2)
    )
    assert same(receive(old, new, send(old, new)), new)


def test_special_values_of_bfloat16_arrive() -> None:
    old = {"w": Tensor("bfloat16", np.zeros(1000, np.uint16))}
    new = delta.copy_state(old)
    new["w"].bits[:90] = np.tile(SPECIAL_BF16, 10)
    chunks = send(old, new)
    assert same(receive(old, new, chunks), new)
    assert delta.changed(delta.decode_chunks(chunks)) == 80, "-0.0 is a change, +0.0 is none"


def test_one_changed_element_costs_one_small_chunk() -> None:
    old = random_state(6)
    new = delta.copy_state(old)
    new["embed"].bits[60, 31] ^= 1
    chunks = send(old, new)
    assert len(chunks) == 1 and len(chunks[0].data) < 100
    assert same(receive(old, new, chunks), new)


def test_nothing_changed_is_a_delta_without_chunks() -> None:
    old = random_state(7)
    assert send(old, old) == []
    assert same(receive(old, old, []), old)


def test_tensor_better_sent_whole_is_sent_whole() -> None:
    old, new = random_state(8), random_state(8)
    new["mlp.weight"].bits[:60] ^= 3
    changes = delta.decode_chunks(send(old, new))
    assert changes["mlp.weight"][0] is None and set(changes) == {"mlp.weight"}


@pytest.mark.parametrize("kind", [delta.DELTA, delta.SNAPSHOT])
def test_incompressible_weights_stay_below_the_chunk_limit(kind: str) -> None:
    rng = np.random.default_rng(9)
    old = {f"layer.{i}": Tensor("bfloat16", rng.integers(0, 65536, 700_000).astype("u2")) for i in range(3)}
    new = delta.copy_state(old)
    for tensor in new.values():
        tensor.bits[rng.random(700_000) < 0.3] ^= 0x5555
    chunks = send(old, new) if kind == delta.DELTA else list(delta.encode_snapshot(1, new))
    assert len(chunks) > 3
    assert max(len(c.data) for c in chunks) <= delta.CHUNK_BYTES
    assert max(len(encode(c)) for c in chunks) < 1_000_000
    served = delta.copy_state(old)
    delta.verify_and_apply(served, 0, delta.state_hash(old), publication(kind, old, new), chunks)
    assert same(served, new)


def test_snapshot_replaces_whatever_is_served() -> None:
    new = random_state(10)
    served = random_state(11)
    head = publication(delta.SNAPSHOT, served, new, version=7)
    delta.verify_and_apply(served, 3, b"?" * 16, head, list(delta.encode_snapshot(7, new)))
    assert same(served, new)


def test_wrong_base_is_refused_and_the_served_version_stays() -> None:
    old, new, other = random_state(12), random_state(13), random_state(14)
    chunks, head = send(old, new), publication(delta.DELTA, old, new)
    served = delta.copy_state(other)
    with pytest.raises(WrongBase, match="are served here|those served here"):
        delta.verify_and_apply(served, 0, delta.state_hash(other), head, chunks)
    with pytest.raises(WrongBase, match="applies to version 0; version 3 is served"):
        delta.verify_and_apply(served, 3, delta.state_hash(old), head, chunks)
    assert same(served, other)


def test_base_that_was_corrupted_where_it_changes_is_refused() -> None:
    old = random_state(15)
    new = delta.copy_state(old)
    new["norm"].bits[4] ^= 1
    served = delta.copy_state(old)
    served["norm"].bits[4] ^= 8
    before = delta.copy_state(served)
    with pytest.raises(DamagedWeights, match="nothing was written"):
        delta.verify_and_apply(served, 0, delta.state_hash(old), publication(delta.DELTA, old, new), send(old, new))
    assert same(served, before)


def test_unknown_hash_is_refused() -> None:
    old, new = random_state(16), random_state(17)
    head = replace(publication(delta.DELTA, old, new), hash_algorithm="headrace-mix128-2")
    with pytest.raises(WeightsRefused, match="headrace-mix128-2"):
        delta.verify(old, 0, delta.state_hash(old), head, delta.diff(old, new))


def test_missing_repeated_swapped_or_foreign_chunks_are_refused() -> None:
    rng = np.random.default_rng(18)
    old = {"w": Tensor("bfloat16", rng.integers(0, 65536, 2_000_000).astype("u2"))}
    new = delta.copy_state(old)
    new["w"].bits[rng.random(2_000_000) < 0.3] ^= 1
    chunks, head = send(old, new), publication(delta.DELTA, old, new)
    assert len(chunks) >= 3
    foreign = list(delta.encode_delta(2, delta.diff(old, new)))
    served = delta.copy_state(old)
    for bad in (
        chunks[:-1], chunks[1:], [], [chunks[0], *chunks], [chunks[1], chunks[0], *chunks[2:]],
        [chunks[0], foreign[1], *chunks[2:]], foreign, list(delta.encode_snapshot(1, new)),
    ):  # fmt: skip
        with pytest.raises(DamagedWeights):
            delta.verify_and_apply(served, 0, delta.state_hash(old), head, bad)
    assert same(served, old)


def test_delta_for_another_model_is_refused() -> None:
    old, new = random_state(19), random_state(20)
    chunks, head = send(old, new), publication(delta.DELTA, old, new)
    for name, bits in (("embed", np.zeros((3, 3), "u2")), ("embed", old["embed"].bits.astype("u4"))):
        other = {**old, name: Tensor("bfloat16", bits)}
        with pytest.raises(DamagedWeights):
            delta.verify_and_apply(other, 0, delta.state_hash(old), head, chunks)
    lacking = {n: t for n, t in old.items() if n != "embed"}
    with pytest.raises(DamagedWeights, match="isn't served here"):
        delta.verify_and_apply(lacking, 0, delta.state_hash(old), head, chunks)


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    place = int(rng.integers(len(out)))
    match int(rng.integers(5)):
        case 0:
            out[place] ^= 1 << int(rng.integers(8))
        case 1:
            del out[place:]
        case 2:
            del out[place : place + int(rng.integers(1, 40))]
        case 3:
            out[place:place] = rng.bytes(int(rng.integers(1, 40)))
        case _:
            out[place : place + 8] = rng.bytes(8)
    return bytes(out)


@pytest.mark.parametrize("kind", [delta.DELTA, delta.SNAPSHOT])
def test_two_thousand_mutations_of_the_bytes_are_refused_and_change_nothing(kind: str) -> None:
    old = random_state(21)
    new = delta.copy_state(old)
    rng = np.random.default_rng(22)
    for tensor in new.values():
        tensor.bits[rng.random(tensor.bits.shape) < 0.2] ^= 1
    new["norm"].bits[:] ^= 7  # sent whole
    chunks = send(old, new) if kind == delta.DELTA else list(delta.encode_snapshot(1, new))
    values, head = [encode(c) for c in chunks], publication(kind, old, new)
    served, served_hash = delta.copy_state(old), delta.state_hash(old)
    refused = 0
    for _ in range(2000):
        k = int(rng.integers(len(values)))
        bad = [*values]
        bad[k] = mutate(values[k], rng)
        if bad[k] == values[k]:
            continue
        with pytest.raises((DamagedWeights, UndecodableRecord)):
            delta.verify_and_apply(served, 0, served_hash, head, [as_chunk(decode(v)) for v in bad])
        refused += 1
    assert refused > 1900
    assert same(served, old)


def test_mutations_below_the_checksum_are_refused_and_change_nothing() -> None:
    """A writer with a fault makes chunks whose checksums fit: the frames and the state hash still don't let them in."""
    old = random_state(23)
    new = delta.copy_state(old)
    rng = np.random.default_rng(24)
    for tensor in new.values():
        tensor.bits[rng.random(tensor.bits.shape) < 0.2] ^= 1
    (chunk,) = send(old, new)
    head, served, served_hash = publication(delta.DELTA, old, new), delta.copy_state(old), delta.state_hash(old)
    for _ in range(2000):
        data = mutate(chunk.data, rng)
        if data == chunk.data:
            continue
        checksum = delta._checksum(chunk.version, chunk.kind, chunk.index, chunk.of, data)
        try:
            delta.verify_and_apply(served, 0, served_hash, head, [replace(chunk, data=data, checksum=checksum)])
        except DamagedWeights:
            assert same(served, old)
        else:  # bytes that the decoder doesn't look at (zstd's reserved ones): the weights are right all the same
            assert same(served, new)
            served = delta.copy_state(old)


def test_tree_hash_covers_names_dtypes_shapes_and_contents() -> None:
    a = np.arange(6, dtype=np.float32)
    variants: list[dict[str, Any]] = [
        {"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.view(np.int32)}, {"a": a[::-1]}, {"a": a, "b": a[:0]},
    ]  # fmt: skip
    assert len({delta.tree_hash(v) for v in variants}) == len(variants)
    assert delta.tree_hash({"a": a, "b": a}) == delta.tree_hash({"b": a, "a": a})
