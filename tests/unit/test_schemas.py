"""The wire: every record survives the trip, and what isn't ours is refused by name."""

from __future__ import annotations

import dataclasses
import io
import json
import types
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import codec, events
from headrace.schemas.chain import Chain
from headrace.schemas.columns import (
    halves,
    pack_float32,
    pack_ids,
    pack_int32,
    unpack_float32,
    unpack_ids,
    unpack_int32,
)
from headrace.schemas.errors import InvalidRecord, SettingsError, UndecodableRecord, UnencodableRecord
from headrace.schemas.hashes import GENESIS, digest
from headrace.schemas.payload import content_hash, from_chunks, to_chunks
from headrace.schemas.topics import ALL_TOPICS, RunTopics

CLASSES = get_args(events.Event)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Annotated:
        return st.floats(allow_nan=False, allow_infinity=False)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(hint)})
    simple = {int: st.integers(-(2**63), 2**63 - 1), str: st.text(max_size=20), bool: st.booleans(),
              float: st.floats(allow_nan=False), bytes: st.binary(max_size=40)}  # fmt: skip
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), values_of(arguments[1]), max_size=3)
    assert origin in (Union, types.UnionType)
    return st.none() | values_of(next(a for a in arguments if a is not type(None)))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_record_survives_the_trip(cls: type) -> None:
    @settings(deadline=None)  # the first one compiles
    @given(values_of(cls))
    def survives(event: events.Event) -> None:
        assert codec.decode(codec.encode(event)) == event

    survives()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_compiled_code_writes_the_very_bytes_of_fastavro(cls: type) -> None:
    """Ours is the fast way to write them, never another format: byte by byte the same, and each reads the other's."""

    @settings(deadline=None)
    @given(values_of(cls))
    def same(event: events.Event) -> None:
        body = io.BytesIO()
        fastavro.schemaless_writer(body, codec.schema_of(cls), codec.to_plain(event))
        assert codec.encode(event)[codec.HEADER :] == body.getvalue()

    same()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_class_and_schema_file_have_the_same_fields_in_the_same_order(cls: type) -> None:
    schema = json.loads((resources.files("headrace.schemas") / "avro" / f"{cls.__name__}.avsc").read_text())
    assert [f["name"] for f in schema["fields"]] == [f.name for f in dataclasses.fields(cls)]


def test_every_record_has_a_topic_or_lies_inside_another() -> None:
    placed = {cls for classes in events.Kinds.BY_TOPIC.values() for cls in classes}
    assert set(CLASSES) - placed == {events.GroupPayload}
    assert set(events.Kinds.BY_TOPIC) == set(ALL_TOPICS)


@given(st.binary(max_size=200))
def test_garbage_is_undecodable_and_never_anything_else(data: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        codec.decode(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_record_decodes_or_is_undecodable(position: int, value: int) -> None:
    raw = bytearray(codec.encode(span()))
    raw[position % len(raw)] = value
    try:
        codec.decode(bytes(raw))
    except UndecodableRecord:
        pass


@pytest.mark.parametrize(("event", "said"), [
    (events.Tick("w", 2**63), "Tick can't be written: number: 9223372036854775808 does not fit into 64 bits"),
    (events.Tick("a\ud800", 1), r"Tick can't be written: writer: str 'a\\ud800' is not UTF-8"),
    (events.Tick(None, 1), "Tick can't be written: writer: NoneType None where str must be"),  # type: ignore[arg-type]
    (events.Tick("w", 1.5), "number: float 1.5 where an integer must be"),  # type: ignore[arg-type]
    (events.SampleChunk("g", 0, 1, np.zeros(3)), "SampleChunk can't be written: data: ndarray"),  # type: ignore[arg-type]
    (events.LeaseEnded("g", 0, "i", (1, 2**70), ""), r"slots\[1\]: \d+ does not fit into 64 bits"),
    (events.Version(0, b"", "t", 0, -1, 0, 0, b"", "", b"", b"", float("nan"), 0, (), {}, "", 0),
     "Version can't be written: rho: nan where a finite number must be"),
    (events.Version(0, b"", "t", 0, -1, 0, 0, b"", "", b"", b"", 0.0, 0, (events.GroupCount("g", 0, "1"),), {},  # type: ignore[arg-type]
                    "", 0), r"groups\[0\].masked: str '1' where an integer must be"),
    (events.Heartbeat("w", "i", 0, 0, 0, True, "{}", {"x": "y"}), r"counters\['x'\]: str 'y' where a float must be"),  # type: ignore[dict-item]
    (events.Assignment(0, 0), "a Assignment is no record of ours"),
])  # fmt: skip
def test_value_that_its_field_does_not_hold_is_refused_by_name_before_anything_is_written(
    event: Any, said: str
) -> None:
    with pytest.raises(UnencodableRecord, match=said):
        codec.encode(event)


@pytest.mark.parametrize("number", [0, -1, 1, -2, 63, 64, 4095, 4096, -4096, 8191, 8192, 2**31, 2**63 - 1, -(2**63)])
def test_longs_of_every_length_survive_and_are_avros(number: int) -> None:
    value = codec.encode(events.Tick("w", number))
    assert codec.decode(value) == events.Tick("w", number)
    body = io.BytesIO()
    fastavro.schemaless_writer(body, "long", number)
    assert value.endswith(body.getvalue())


@pytest.mark.parametrize("tail", [b"\xff" * 9 + b"\x7f", b"\xff" * 11, b"\x80" * 3])
def test_long_beyond_64_bits_or_without_an_end_is_undecodable(tail: bytes) -> None:
    with pytest.raises(UndecodableRecord, match="Tick"):
        codec.decode(codec.encode(events.Tick("w", 0))[:-1] + tail)


def test_arrays_in_several_blocks_with_sizes_are_read_as_avro_allows() -> None:
    """We write one block; another language's writer may cut them, and name their bytes."""
    value = codec.encode(events.LeaseEnded("g", 0, "i", (), "r"))
    at = len(value) - 3  # the empty array's end, then the reason
    blocks = b"\x02\x0a" + b"\x03\x04\x0c\x0e" + b"\x00"  # [5], then [6, 7] as a block of two with its two bytes
    read = codec.decode(value[:at] + blocks + value[at + 1 :])
    assert read == events.LeaseEnded("g", 0, "i", (5, 6, 7), "r")


def test_record_with_a_tail_is_refused() -> None:
    with pytest.raises(UndecodableRecord, match="1 bytes too many"):
        codec.decode(codec.encode(events.Tick("w", 1)) + b"\0")


def test_header_is_avros_single_object_encoding() -> None:
    """Marker C3 01, then CRC-64-AVRO of the canonical schema, little-endian: the test vector of Avro's specification
    for "null" is 0x63dd24e7cc258f8a."""
    assert codec.schema_header("null") == bytes.fromhex("c301") + (0x63DD24E7CC258F8A).to_bytes(8, "little")
    raw = codec.encode(events.Tick("w", 7))
    assert raw[:10] == codec.schema_header(codec.schema_of(events.Tick))
    assert fastavro.schemaless_reader(io.BytesIO(raw[10:]), codec.schema_of(events.Tick), None) == {
        "writer": "w", "number": 7}  # fmt: skip


@given(st.lists(st.floats(width=32)), st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_columns_keep_every_bit(floats: list[float], integers: list[int]) -> None:
    f, i = np.array(floats, np.float32), np.array(integers, np.int32)
    assert unpack_float32(pack_float32(f)).tobytes() == f.tobytes()
    assert unpack_int32(pack_int32(i)).tolist() == integers


@given(st.tuples(st.lists(st.integers(0, 2**16 - 1)), st.lists(st.integers(0, 2**24 - 1)),
                 st.lists(st.integers(-(2**31), 2**31 - 1))))  # fmt: skip
def test_token_ids_come_back_in_the_fewest_bytes_that_hold_them(columns: tuple[list[int], ...]) -> None:
    for ids, most in zip(columns, (2, 3, 4), strict=True):
        column = np.array(ids, np.int32)
        packed = pack_ids(column)
        assert len(packed) <= most * len(ids)
        for data in (packed, pack_int32(column)):  # also as 0.1.0 wrote them
            assert unpack_ids(data, len(ids)).tolist() == ids
            low, high = (np.frombuffer(half or bytes(2 * len(ids)), "<u2") for half in halves(data, len(ids)))
            assert (low + (high.astype(np.uint32) << 16)).astype(np.int32).tolist() == ids
            assert halves(data, len(ids)) == halves(packed, len(ids))
    with pytest.raises(ValueError, match="does not hold 3 token ids"):
        unpack_ids(b"\0" * 13, 3)


def span(**over: Any) -> events.Span:
    columns = {"tokens": pack_int32(np.arange(4, dtype=np.int32)),
               "logprobs": pack_float32(np.full(4, -0.5, np.float32))}  # fmt: skip
    base = dict(group="g", slot=0, attempt=0, incarnation="i", sequence=1, source="model", turn=0, parent=-1, count=4,
                versions=(events.VersionRun(3, 4),), stop_reason=None, engine=None, detail=None, timings_ms={},
                mask=None, entropies=None)  # fmt: skip
    return events.Span(**(base | columns | over))  # type: ignore[arg-type]


@pytest.mark.parametrize("over", [
    {"logprobs": None},
    {"logprobs": pack_float32(np.array([-1, np.nan, -1, -1], np.float32))},
    {"logprobs": pack_float32(np.array([-1, 0.5, -1, -1], np.float32))},
    {"logprobs": pack_float32(np.zeros(3, np.float32))},
    {"tokens": b"\0" * 13},
    {"count": -4},
    {"versions": (events.VersionRun(3, 3),)},
    {"versions": (events.VersionRun(3, 5), events.VersionRun(4, -1))},
    {"mask": b"\1"},
    {"source": "nobody"},
    {"source": "prompt"},
])  # fmt: skip
def test_span_that_contradicts_itself_is_invalid(over: dict[str, Any]) -> None:
    span().check()
    with pytest.raises(InvalidRecord):
        span(**over).check()


def payload(cut: int, attempt: int = 0, reward: float | None = 1.0, logprob: float = -0.5) -> events.GroupPayload:
    """One episode of 2 prompt and 6 model tokens whose model span is cut after `cut` tokens."""

    def part(a: int, b: int) -> events.PayloadSpan:
        n = b - a
        return events.PayloadSpan("model", 0, -1, n, (events.VersionRun(1, n),),
                                  pack_int32(np.arange(a, b, dtype=np.int32)),
                                  pack_float32(np.full(n, logprob, np.float32)), None)  # fmt: skip

    prompt = events.PayloadSpan("prompt", 0, -1, 2, (), pack_int32(np.array([8, 9], np.int32)), None, None)
    episode = events.PayloadEpisode(0, attempt, f"i{attempt}", "model_success", reward, 1.0,
                                    (prompt, part(0, cut), part(cut, 6)), (attempt, cut))  # fmt: skip
    return events.GroupPayload("g", events.Task("t", "s", "{}", 0), (episode,))


def test_content_hash_covers_what_is_trained_and_not_how_it_came() -> None:
    same = content_hash(payload(2))
    assert content_hash(payload(4, attempt=1)) == same
    assert content_hash(payload(2, reward=0.0)) != same
    assert content_hash(payload(2, reward=None)) != same
    assert content_hash(payload(2, logprob=-0.25)) != same


def test_content_hash_covers_the_context_in_which_a_branch_was_sampled() -> None:
    """The trainer lays tokens out by `parent`: under another one, the same ones would be trained in another context."""

    def under(parent: int, cut: int = 3) -> bytes:
        one = payload(cut)
        (episode,) = one.episodes
        *before, last = episode.spans
        episode = dataclasses.replace(episode, spans=(*before, dataclasses.replace(last, parent=parent)))
        return content_hash(dataclasses.replace(one, episodes=(episode,)))

    assert under(-1) == under(2) == content_hash(payload(3)), "2 is the one before"
    assert len({under(parent) for parent in (-1, 0, 1, 7)}) == 4
    assert under(1, cut=4) != under(1)


def test_payload_is_chunked_and_put_together_only_when_whole() -> None:
    chunks = to_chunks(payload(3), limit=50)
    assert len(chunks) > 3 and from_chunks(chunks) == payload(3)
    for wrong in (chunks[:-1], chunks[1:], [*chunks, chunks[-1]], chunks[::-1], []):
        with pytest.raises(InvalidRecord):
            from_chunks(wrong)


def test_chain_links_each_record_to_the_one_before() -> None:
    chain = Chain()
    first = events.Addendum(**chain.link(), cause=1, kind="late", group="g", slot=0, attempt=0, model_tokens=3)
    assert (first.number, first.previous) == (0, GENESIS)
    value = chain.extend(first)
    assert chain.link() == {"number": 1, "previous": digest(value)}
    assert Chain.after(first, value).link() == chain.link()
    with pytest.raises(ValueError, match="does not continue"):
        chain.extend(first)


@pytest.mark.parametrize("run", ["", "Demo", "a b", "-a", "a.", "x" * 65, "a/b"])
def test_run_id_that_cannot_name_a_topic_is_refused(run: str) -> None:
    with pytest.raises(SettingsError, match="run id"):
        RunTopics(run)


def test_schema_files_hold_nothing_else() -> None:
    folder = Path(str(resources.files("headrace.schemas") / "avro"))
    assert {f.name.split(".")[0] for f in folder.iterdir()} == {cls.__name__ for cls in CLASSES}
