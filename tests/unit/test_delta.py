"""The weights' wire format: every bit arrives, and what is damaged or meant for other weights changes nothing."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.schemas import delta
from headrace.schemas.codec import decode, encode
from headrace.schemas.delta import Tensor, ranks, relative
from headrace.schemas.delta.chunks import checksum_of
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


def send(old: State, new: State, codec: str = "fast") -> list[WeightChunk]:
    return delta.encode_delta(1, old, delta.diff(old, new), codec)


def receive(old: State, new: State, chunks: Sequence[WeightChunk]) -> State:
    """Over the wire, both ways of applying: held and then written, twice; and chunk by chunk."""
    chunks = [as_chunk(decode(encode(c))) for c in chunks]
    head, base_hash, sums = publication(delta.DELTA, old, new), delta.state_hash(old), delta.state_sums(old)
    held = delta.copy_state(old)
    changes, moves = delta.decode_verified(held, 0, base_hash, head, chunks)
    assert same(held, old)
    delta.write(held, changes)
    delta.write(held, changes)
    served = delta.copy_state(old)
    assert delta.verify_and_apply(served, 0, base_hash, head, chunks) == moves
    assert same(served, held)
    assert delta.state_hash(served) == head.served_hash == delta.combined(delta.moved(sums, moves))
    assert delta.state_sums(served) == delta.moved(sums, moves)
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


CODECS = ["fast", "dense"]
DTYPES = {
    "bfloat16": "u2", "float16": "u2", "float32": "u4", "float8_e4m3fn": "u1", "float8_e5m2": "u1", "int8": "u1",
    "uint8": "u1", "int32": "u4", "of another library": "u2",
}  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_delta_of_any_density_arrives_bit_for_bit(dtype: str, share: float, codec: str) -> None:
    old, new = random_state(3, dtype), random_state(4, dtype)
    rng = np.random.default_rng(5)
    for name, tensor in new.items():
        keep = rng.random(tensor.bits.shape) >= share
        tensor.bits[keep] = old[name].bits[keep]
    assert same(receive(old, new, send(old, new, codec)), new)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor before and after: any bits of any dtype, with some, all or none of the elements changed."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    old = draw(npst.arrays(DTYPES[dtype], shape))
    new = draw(st.just(old.copy()) | npst.arrays(DTYPES[dtype], shape) | st.just(old ^ old.dtype.type(1)))
    keep = draw(st.just(np.zeros(shape, bool)) | npst.arrays(np.bool_, shape, fill=st.just(True)))
    return Tensor(dtype, old), Tensor(dtype, np.where(keep, old, new))


@given(pairs=st.lists(tensors(), min_size=1, max_size=4), codec=st.sampled_from(CODECS))
@settings(max_examples=80, deadline=None)
def test_any_bits_arrive(pairs: list[tuple[Tensor, Tensor]], codec: str) -> None:
    """NaN payloads, signed zeros and denormals are bits like any others; tensors of several dtypes share a delta."""
    arrives(pairs, codec)


@pytest.mark.slow
@given(pairs=st.lists(tensors(), min_size=1, max_size=4), codec=st.sampled_from(CODECS))
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bits_arrive_again_and_again(pairs: list[tuple[Tensor, Tensor]], codec: str) -> None:
    arrives(pairs, codec)


def arrives(pairs: list[tuple[Tensor, Tensor]], codec: str) -> None:
    old = {f"tensor {i}": pair[0] for i, pair in enumerate(pairs)}
    new = {f"tensor {i}": pair[1] for i, pair in enumerate(pairs)}
    assert same(receive(old, new, send(old, new, codec)), new)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [d for d, bits in DTYPES.items() if bits == "u1"])
def test_every_8_bit_value_can_become_every_other(dtype: str, codec: str) -> None:
    old, new = np.repeat(np.arange(256, dtype="u1"), 256), np.tile(np.arange(256, dtype="u1"), 256)
    for other in (new, np.where(np.arange(65536) % 7 == 0, new, old)):
        before, after = {"w": Tensor(dtype, old)}, {"w": Tensor(dtype, other)}
        assert same(receive(before, after, send(before, after, codec)), after)


@pytest.mark.parametrize("codec", CODECS)
def test_special_values_of_bfloat16_arrive(codec: str) -> None:
    old = {"w": Tensor("bfloat16", np.zeros(1000, np.uint16))}
    new = delta.copy_state(old)
    new["w"].bits[:90] = np.tile(SPECIAL_BF16, 10)
    chunks = send(old, new, codec)
    assert same(receive(old, new, chunks), new)
    assert sum(p.values.size for part in delta.decode_chunks(chunks, old) for p in part) == 80, "-0.0 is a change"


@pytest.mark.parametrize("codec", CODECS)
def test_one_changed_element_costs_one_small_chunk(codec: str) -> None:
    old = random_state(6)
    new = delta.copy_state(old)
    new["embed"].bits[60, 31] ^= 1
    chunks = send(old, new, codec)
    assert len(chunks) == 1 and len(chunks[0].data) < (60 if codec == "fast" else 350)
    assert same(receive(old, new, chunks), new)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_changed_is_a_delta_without_chunks(codec: str) -> None:
    old = random_state(7)
    assert send(old, old, codec) == []
    assert same(receive(old, old, []), old)


def step(state: State, seed: int, size: float) -> State:
    """What an optimizer does: each master weight (what is served, with some remainder) moves by about `size`."""
    rng, new = np.random.default_rng(seed), delta.copy_state(state)
    for tensor in new.values():
        remainder = rng.integers(-0x7FFF, 0x7FFF, tensor.bits.shape)
        master = ((tensor.bits.astype(np.int64) << 16) + remainder).astype(np.uint32).view(np.float32)
        master += (size * rng.normal(size=master.shape)).astype(np.float32)
        tensor.bits[...] = (master.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)
    return new


def weights(seed: int, **sizes: int) -> State:
    rng = np.random.default_rng(seed)
    normal = {n: (rng.normal(size=s) * 0.02).astype(np.float32).view(np.uint32) >> 16 for n, s in sizes.items()}
    return {n: Tensor("bfloat16", bits.astype(np.uint16)) for n, bits in normal.items()}


def test_tensor_better_sent_whole_is_sent_whole() -> None:
    """Values that are set anew go out as they are; small steps of all weights don't."""
    old = weights(8, other=30_000, moved=30_000)
    new = step(old, 9, 1e-3)
    new["other"].bits[:] = np.arange(30_000) % 7
    chunks = send(old, new)
    assert [chunk.data[:4] for chunk in chunks] == [b"HRW2", b"HRW1"]
    parts = [part for (part,) in delta.decode_chunks(chunks, old)]
    assert [(part.name, part.positions) for part in parts] == [("moved", None), ("other", None)]
    assert len(chunks[0].data) < 0.7 * len(next(delta.encode_snapshot(1, {"moved": new["moved"]})).data)
    assert same(receive(old, new, chunks), new)


def test_optimizer_step_costs_less_than_its_entropy_without_the_base() -> None:
    """At about one change in a hundred: both codecs beat independent positions with a sign, the dense one by far."""
    old = weights(11, w=1_000_000)
    new = step(old, 12, 2.5e-7)
    (change,) = delta.diff(old, new).values()
    p = change[1].size / 1_000_000
    assert 0.005 < p < 0.02
    fast, dense = (8 * sum(len(c.data) for c in send(old, new, codec)) / change[1].size for codec in CODECS)
    positions = -np.log2(p) - (1 - p) / p * np.log2(1 - p)
    assert fast < positions + 1.9
    assert dense < 0.85 * fast


@pytest.mark.parametrize("codec", CODECS)
def test_many_tensors_of_several_dtypes_and_chunks_arrive(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that end in the middle of tensors, positions that cross blocks, rows of distances cut at several bits."""
    monkeypatch.setattr(relative, "MAX_CHANGES", 6000)
    monkeypatch.setattr(ranks, "_BLOCK", 5000)
    old = weights(13, a=40_000, b=7, c=100_000, d=3)
    old["e"] = Tensor("float32", np.random.default_rng(14).integers(0, 2**32, 20_000).astype("u4"))
    old["f"] = Tensor("bfloat16", old["c"].bits[::-1].reshape(1000, 100).copy())
    new = delta.copy_state(old)
    rng = np.random.default_rng(15)
    for name, share in {"a": 0.3, "b": 0.4, "c": 0.02, "e": 0.2, "f": 0.001}.items():
        change = rng.random(old[name].bits.shape) < share
        new[name].bits[change] = rng.permutation(old[name].bits.reshape(-1)).reshape(change.shape)[change]
    chunks = send(old, new, codec)
    assert len(chunks) > 3
    assert same(receive(old, new, chunks), new)


@pytest.mark.parametrize("kind", [delta.DELTA, delta.SNAPSHOT])
def test_incompressible_weights_stay_below_the_chunk_limit(kind: str) -> None:
    rng = np.random.default_rng(9)
    old = {f"layer.{i}": Tensor("bfloat16", rng.integers(0, 65536, 700_000).astype("u2")) for i in range(3)}
    new = delta.copy_state(old)
    for tensor in new.values():
        tensor.bits[rng.random(700_000) < 0.3] ^= 0x5555
    chunks = send(old, new) if kind == delta.DELTA else list(delta.encode_snapshot(1, new))
    assert len(chunks) > 2
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
        delta.verify(old, 0, delta.state_hash(old), head, [])


def test_missing_repeated_swapped_or_foreign_chunks_are_refused() -> None:
    rng = np.random.default_rng(18)
    old = {"w": Tensor("bfloat16", rng.integers(0, 65536, 2_000_000).astype("u2"))}
    new = delta.copy_state(old)
    new["w"].bits[rng.random(2_000_000) < 0.3] ^= 1
    chunks, head = send(old, new), publication(delta.DELTA, old, new)
    assert len(chunks) >= 3
    foreign = delta.encode_delta(2, old, delta.diff(old, new))
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


def changed_everywhere(seed: int) -> tuple[State, State]:
    """Some elements of most tensors, all of one, a whole one anew: every format and method there is."""
    old = random_state(seed)
    old["anew"] = Tensor("bfloat16", np.random.default_rng(seed).integers(0, 65536, 400).astype("u2"))
    new = delta.copy_state(old)
    rng = np.random.default_rng(seed + 1)
    for tensor in new.values():
        tensor.bits[rng.random(tensor.bits.shape) < 0.2] ^= 1
    new["norm"].bits[:] ^= 7
    new["anew"].bits[:] = 3
    return old, new


def of_kind(kind: str, old: State, new: State) -> list[WeightChunk]:
    return list(delta.encode_snapshot(1, new)) if kind == delta.SNAPSHOT else send(old, new, kind)


COUNTS = [600, pytest.param(10_000, marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [*CODECS, delta.SNAPSHOT])
def test_any_mutation_of_the_bytes_is_refused_and_changes_nothing(kind: str, count: int) -> None:
    old, new = changed_everywhere(21)
    chunks = of_kind(kind, old, new)
    values = [encode(c) for c in chunks]
    head = publication(delta.SNAPSHOT if kind == delta.SNAPSHOT else delta.DELTA, old, new)
    served, served_hash = delta.copy_state(old), delta.state_hash(old)
    rng = np.random.default_rng(22)
    refused = 0
    while refused < count:
        k = int(rng.integers(len(values)))
        bad = [*values]
        bad[k] = mutate(values[k], rng)
        if bad[k] == values[k]:
            continue
        with pytest.raises((DamagedWeights, UndecodableRecord)):
            delta.verify_and_apply(served, 0, served_hash, head, [as_chunk(decode(v)) for v in bad])
        refused += 1
    assert same(served, old)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [*CODECS, delta.SNAPSHOT])
def test_mutations_below_the_checksum_are_refused_and_change_nothing(kind: str, count: int) -> None:
    """A writer with a fault makes chunks whose checksums fit: the frames and the state hash still don't let them in."""
    old, new = changed_everywhere(23)
    chunks = of_kind(kind, old, new)
    head = publication(delta.SNAPSHOT if kind == delta.SNAPSHOT else delta.DELTA, old, new)
    served, served_hash = delta.copy_state(old), delta.state_hash(old)
    rng = np.random.default_rng(24)
    refused = 0
    for _ in range(count):
        bad = [*chunks]
        k = int(rng.integers(len(chunks)))
        data = mutate(chunks[k].data, rng)
        checksum = checksum_of(chunks[k].version, chunks[k].kind, chunks[k].index, chunks[k].of, data)
        bad[k] = replace(chunks[k], data=data, checksum=checksum)
        try:
            delta.verify_and_apply(served, 0, served_hash, head, bad)
        except DamagedWeights:
            refused += 1
        else:  # bytes that the decoder doesn't look at (zstd's reserved ones): the weights are right all the same
            assert same(served, new)
            served = delta.copy_state(old)
    assert same(served, old)
    assert refused > 0.9 * count


@pytest.mark.parametrize(
    ("file", "kind"), [("hrw1", delta.DELTA), ("hrw1", delta.SNAPSHOT), ("hrw2", "fast"), ("hrw2", "dense")]
)
def test_weights_written_by_earlier_versions_are_still_read(file: str, kind: str) -> None:
    """tests/data/deltas/hrw1.json holds records as 0.1 wrote them, hrw2.json those of the first version with HRW2."""
    kept = json.loads((Path(__file__).parents[1] / f"data/deltas/{file}.json").read_text())
    served, new = {}, {}
    for name, (dtype, shape, bits, data) in kept["old"].items():
        served[name] = Tensor(dtype, np.frombuffer(base64.b64decode(data), bits).reshape(shape).copy())
        after = np.frombuffer(base64.b64decode(kept["new"][name]), bits)
        new[name] = Tensor(dtype, after.reshape(shape).copy())
    chunks = [as_chunk(decode(base64.b64decode(record))) for record in kept[kind]]
    assert {chunk.data[:4] for chunk in chunks} == ({b"HRW1"} if file == "hrw1" else {b"HRW1", b"HRW2"})
    assert delta.state_hash(served).hex() == kept["old_hash"]
    head = publication(delta.SNAPSHOT if kind == delta.SNAPSHOT else delta.DELTA, served, new)
    assert head.served_hash.hex() == kept["new_hash"]
    delta.verify_and_apply(served, 0, delta.state_hash(served), head, chunks)
    assert same(served, new)


def test_unknown_format_is_refused_by_name() -> None:
    old, new = changed_everywhere(25)
    first, *rest = send(old, new)
    data = b"HRW9" + first.data[4:]
    first = replace(first, data=data, checksum=checksum_of(1, delta.DELTA, 0, first.of, data))
    with pytest.raises(DamagedWeights, match="format b'HRW9'; this version of Headrace reads HRW1 and HRW2"):
        delta.verify_and_apply(old, 0, delta.state_hash(old), publication(delta.DELTA, old, new), [first, *rest])


@pytest.mark.parametrize("codec", CODECS)
def test_applying_holds_one_decoded_chunk_beside_the_compressed_delta(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks there are. To hold all of it decoded, for a short pause, takes ten bytes a changed element,
    and as much again while the pieces of a tensor are joined."""
    monkeypatch.setattr(relative, "MAX_CHANGES", 5_000)
    monkeypatch.setattr(ranks, "_BLOCK", 1 << 13)
    old = weights(26, w=3_000_000)
    new = step(old, 27, 5e-7)
    head, base_hash, served = publication(delta.DELTA, old, new), delta.state_hash(old), delta.copy_state(old)
    chunks = send(old, new, codec)
    assert len(chunks) > 10

    def peak(call: Callable[[], object]) -> int:
        tracemalloc.start()
        call()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    for chunk in delta.decode_chunks(chunks, served):  # what is made once is made
        assert chunk
    one = peak(lambda: next(delta.decode_chunks(chunks, served)))
    held = peak(lambda: delta.decode_verified(served, 0, base_hash, head, chunks))
    streamed = peak(lambda: delta.verify_and_apply(served, 0, base_hash, head, chunks))
    assert same(served, new)
    assert streamed < one + 600_000, "the buffers of the hash, too"
    assert streamed < held
    assert held < one + 600_000 + 8 * head.changed, "4 bytes and the value for each, beside that"


def test_audit_names_the_tensor_and_the_bit_that_went_wrong() -> None:
    state = random_state(28)
    sums = delta.state_sums(state)
    assert all(delta.damage(name, tensor, sums[name]) is None for name, tensor in state.items())
    state["mlp.weight"].bits[50, 17] ^= 1 << 14
    for name, tensor in state.items():
        found = delta.damage(name, tensor, sums[name])
        assert (found is not None) == (name == "mlp.weight")
    found = delta.damage("mlp.weight", state["mlp.weight"], sums["mlp.weight"])
    assert isinstance(found, DamagedWeights)
    assert f"bit 14 of element {50 * 33 + 17} is wrong" in str(found) and "'mlp.weight'" in str(found)
    state["mlp.weight"].bits[0, 0] ^= 1
    assert "more than one bit" in str(delta.damage("mlp.weight", state["mlp.weight"], sums["mlp.weight"]))


def test_tree_hash_covers_names_dtypes_shapes_and_contents() -> None:
    a = np.arange(6, dtype=np.float32)
    variants: list[dict[str, Any]] = [
        {"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.view(np.int32)}, {"a": a[::-1]}, {"a": a, "b": a[:0]},
    ]  # fmt: skip
    assert len({delta.tree_hash(v) for v in variants}) == len(variants)
    assert delta.tree_hash({"a": a, "b": a}) == delta.tree_hash({"b": a, "a": a})
