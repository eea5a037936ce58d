"""`docs/wire.md` is enough to read a run: what follows uses it and general libraries, and of Headrace only bytes."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from numpy.typing import NDArray

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()

# ------------------------------------------------------------------------- a reader, written from the document


def crc_64_avro(data: bytes) -> bytes:
    """Avro's specification, "Schema Fingerprints"; lowest byte first."""
    empty = 0xC15D213AA4D7A795
    crc = empty
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (empty & -(crc & 1))
    return crc.to_bytes(8, "little")


def unshuffled(column: bytes, dtype: str) -> NDArray[Any]:
    """Section 4."""
    width, n = np.dtype(dtype).itemsize, len(column) // np.dtype(dtype).itemsize
    values = bytes(column[plane * n + i] for i in range(n) for plane in range(width))
    return np.frombuffer(values, dtype)


def token_ids(column: bytes, count: int) -> NDArray[Any]:
    """Section 4."""
    width = len(column) // count
    if width == 4:
        return unshuffled(column, "<i4")
    low, high = column[: 2 * count], column[2 * count :] or bytes(count)
    return np.array([low[2 * i] + 256 * low[2 * i + 1] + 65536 * high[i] for i in range(count)], "<i4")


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass
class ForeignReader:
    """Section 3: knows one schema, and learns the others from `policy`."""

    schemas: dict[bytes, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = re.search(r"```json format SchemaAdded\n(.*?)```", DOCUMENT, re.DOTALL)
        named = re.search(r"Its fingerprint is `(\w{16})`", DOCUMENT)
        assert found and named
        self.schemas[bytes.fromhex(named[1])] = fastavro.parse_schema(json.loads(found[1]))

    def read_policy(self, values: Sequence[bytes]) -> None:
        first = next(iter(self.schemas))
        for value in values:
            if value[2:10] == first:
                added = self.decode(value)
                assert crc_64_avro(added["schema"].encode()) == added["fingerprint"]
                self.schemas[added["fingerprint"]] = fastavro.parse_schema(json.loads(added["schema"]))

    def decode(self, value: bytes) -> Any:
        assert value[:2] == b"\xc3\x01"
        body = io.BytesIO(value[10:])
        record = fastavro.schemaless_reader(body, self.schemas[value[2:10]], None)
        assert body.tell() == len(value) - 10
        return record

    def read_payload(self, closure: Any, samples: dict[int, bytes]) -> Any:
        """Section 5."""
        chunks = []
        for number, place in enumerate(closure["samples"]):
            value = samples[place["offset"]]
            assert digest(value) == place["digest"]
            chunk = self.decode(value)
            assert (chunk["group"], chunk["index"], chunk["of"]) == (closure["group"], number, len(closure["samples"]))
            chunks.append(chunk["data"])
        return self.decode(b"".join(chunks))


def runs(values: Sequence[int]) -> bytes:
    return b"".join(struct.pack("<qq", value, len(list(same))) for value, same in itertools.groupby(values))


def content_hash(payload: Any) -> bytes:
    """Section 7."""
    task = payload["task"]
    parts = [task[name].encode() for name in ("id", "source", "data")] + [struct.pack("<q", task["seed"])]
    for episode in sorted(payload["episodes"], key=lambda e: e["slot"]):
        reward = episode["reward"]
        number = bytes.fromhex("000000000000F87F") if reward is None else struct.pack("<d", reward)
        parts += [struct.pack("<q", episode["slot"]) + number + bytes([reward is None])
                  + struct.pack("<d", episode["temperature"]), episode["outcome"].encode()]  # fmt: skip
        columns: list[list[Any]] = [[], [], [], []]
        for span in episode["spans"]:
            n, model = span["count"], span["source"] == "model"
            columns[0] += token_ids(span["tokens"], n).tolist()
            columns[1] += (unshuffled(span["logprobs"], "<f4") if model else np.zeros(n, "<f4")).tolist()
            sampled = [run["version"] for run in span["versions"] for _ in range(run["count"])]
            columns[2] += sampled if model else [-1] * n
            columns[3] += [int(model and byte != 0) for byte in span["mask"] or b"\1" * n]
        ids = np.array(columns[0], "<u4")
        high, logprobs = (ids >> 16).astype("<u2"), np.array(columns[1], "<f4").tobytes()
        parts += [ids.astype("<u2").tobytes(), high.tobytes() if high.any() else b"",
                  b"".join(logprobs[plane::4] for plane in range(4)), runs(columns[2]), runs(columns[3])]  # fmt: skip
        ends = [0, *itertools.accumulate(span["count"] for span in episode["spans"])]
        jumps = [struct.pack("<qq", ends[i], ends[span["parent"]]) for i, span in enumerate(episode["spans"])
                 if span["parent"] not in (-1, i)]  # fmt: skip
        parts += [b"".join(jumps)] * bool(jumps)
    return digest(b"".join(struct.pack("<Q", len(part)) + part for part in parts))


def murmur2(key: bytes) -> int:
    """Kafka's own, as a signed integer."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for (k,) in struct.iter_unpack("<I", key[:whole]):
        k = k * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if rest := key[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    h ^= h >> 15
    return h - 2**32 if h >= 2**31 else h


# --------------------------------------------------------------------------------------- bytes, and what they say


@dataclass
class Log:
    """Values as they lie in a run's topics."""

    policy: list[bytes]
    span: bytes
    samples: dict[int, bytes]
    closure: bytes


TOKENS = [[5, 6], [7, 70000, 2**31 - 1, 0, 12, 8, 9], [1], [2, 3]]
LOGPROBS = [-0.5, -1e-20, -0.125, 0.0, -3.25, -2.0, -1.0]
DATA = 'it\'s "5"\t\u00e9\u200b\U0001f9ea\x07\\'


@pytest.fixture(scope="module")
def log() -> Log:
    from headrace.schemas import events, payload
    from headrace.schemas.chain import Chain
    from headrace.schemas.codec import encode, own_schemas
    from headrace.schemas.columns import pack_float32, pack_ids

    def ids(tokens: list[int]) -> bytes:
        return pack_ids(np.array(tokens, np.int32))

    logprobs = pack_float32(np.array(LOGPROBS, np.float32))
    runs = (events.VersionRun(3, 4), events.VersionRun(4, 3))
    span = events.Span("g", 1, 0, "i", 2, "model", 0, -1, 7, runs, "stop", None, None, {"decode": 1.5}, ids(TOKENS[1]),
                       logprobs, b"\1\1\0\1\1\1\1", None)  # fmt: skip
    prompt = events.PayloadSpan("prompt", 0, -1, 2, (), ids(TOKENS[0]), None, None)
    answer = events.PayloadSpan("environment", 0, -1, 1, (), ids(TOKENS[2]), None, None)
    last = events.PayloadSpan("model", 1, -1, 2, (events.VersionRun(4, 2),), ids(TOKENS[3]),
                              pack_float32(np.array([-1, -2], np.float32)), None)  # fmt: skip
    branch = replace(last, parent=1)
    first = events.PayloadEpisode(1, 0, "i", "model_success", 1.0, 0.7,
                                  (prompt, payload.payload_span(span), answer, branch), (11, 12, 13, 14))  # fmt: skip
    second = events.PayloadEpisode(0, 2, "j", "model_failure", None, 1.0, (prompt, last), (15, 16))
    group = events.GroupPayload("g", events.Task("t\n1", "source's", DATA, -9), (first, second))
    values = [encode(chunk) for chunk in payload.to_chunks(group, limit=100)]
    assert len(values) > 3
    places = tuple(events.SampleRef(2 * i, digest(value)) for i, value in enumerate(values))
    closure = events.GroupClosed(0, bytes(16), 9, "g", "candidate", "train", "t", 1, 5, None, (), {}, 0,
                                 payload.content_hash(group), places, 1)  # fmt: skip
    chain = Chain()
    created = events.RunCreated(**chain.link(), writer="create", run="r", settings="{}", software="", created_ms=0)
    policy = [chain.extend(created)]
    for name, fingerprint, schema in own_schemas():
        policy.append(chain.extend(events.SchemaAdded(**chain.link(), writer="create", name=name, schema=schema,
                                                      fingerprint=fingerprint, last=99)))  # fmt: skip
    return Log(policy, encode(span), {2 * i: value for i, value in enumerate(values)}, encode(closure))


@pytest.fixture
def reader(log: Log) -> ForeignReader:
    found = ForeignReader()
    found.read_policy(log.policy)
    return found


def test_span_is_read_by_the_document_alone(log: Log, reader: ForeignReader) -> None:
    span = reader.decode(log.span)
    assert [span[name] for name in ("group", "slot", "attempt", "incarnation", "sequence", "source", "count")] == [
        "g", 1, 0, "i", 2, "model", 7]  # fmt: skip
    assert token_ids(span["tokens"], 7).tolist() == TOKENS[1]
    assert unshuffled(span["logprobs"], "<f4").tobytes() == np.array(LOGPROBS, "<f4").tobytes()
    assert span["mask"] == b"\1\1\0\1\1\1\1" and span["entropies"] is None
    assert [(run["version"], run["count"]) for run in span["versions"]] == [(3, 4), (4, 3)]


def test_chunked_payload_is_read_and_its_content_hash_computed_by_the_document_alone(
    log: Log, reader: ForeignReader
) -> None:
    closure = reader.decode(log.closure)
    payload = reader.read_payload(closure, log.samples)
    assert payload["task"]["data"] == DATA
    assert [[token_ids(s["tokens"], s["count"]).tolist() for s in e["spans"]] for e in payload["episodes"]] == [
        TOKENS, [TOKENS[0], TOKENS[3]]]  # fmt: skip
    assert content_hash(payload) == closure["content_hash"]
    payload["episodes"][0]["reward"] = 0.0
    assert content_hash(payload) != closure["content_hash"]


def test_chain_in_policy_is_what_the_document_says(log: Log, reader: ForeignReader) -> None:
    previous = bytes(16)
    for number, value in enumerate(log.policy):
        record = reader.decode(value)
        assert (record["number"], record["previous"]) == (number, previous)
        previous = digest(value)


@pytest.mark.parametrize("dtype", ["<i4", "<f4"])
def test_worked_examples_of_shuffled_columns_hold(dtype: str) -> None:
    expected = {"<i4": [1, 256, 70000], "<f4": [-0.5, -1.0]}[dtype]
    blocks = re.findall(r"```text format shuffled\nvalues([0-9A-F \n]+)\nshuffled([0-9A-F ]+)\n```", DOCUMENT)
    assert len(blocks) == 2
    values, shuffled = (bytes.fromhex(text) for text in blocks[dtype == "<i4"])
    assert np.frombuffer(values, dtype).tolist() == expected == unshuffled(shuffled, dtype).tolist()


def test_worked_examples_of_token_ids_hold() -> None:
    from headrace.schemas.columns import pack_ids

    expected = [[1, 256, 70000], [1, 256]]
    for text, ids in zip(re.findall(r"^ids  ([0-9A-F ]+)$", DOCUMENT, re.MULTILINE), expected, strict=True):
        column = bytes.fromhex(text)
        assert token_ids(column, len(ids)).tolist() == ids
        assert pack_ids(np.array(ids, np.int32)) == column


def test_partitioner_of_the_document_is_kafkas() -> None:
    vectors = re.findall(r'`murmur2\("(\w+)"\)` is (-?\d+)', DOCUMENT)
    assert len(vectors) == 2
    for key, expected in vectors:
        assert murmur2(key.encode()) == int(expected)


def test_document_names_every_topic_and_every_kind_of_record() -> None:
    from headrace.schemas import errors
    from headrace.schemas.events import GroupPayload, Kinds

    rows = {row.split("`")[1]: row for row in DOCUMENT.splitlines() if row.startswith("| `")}
    for topic, kinds in Kinds.BY_TOPIC.items():
        for kind in kinds:
            assert f"`{kind.__name__}`" in rows[topic], f"{kind.__name__} is missing in the row of {topic}"
    assert f"`{GroupPayload.__name__}`" in rows["samples"]
    for error in (errors.UndecodableRecord, errors.UnknownSchema, errors.InvalidRecord):
        assert f"`{error.__name__}`" in DOCUMENT
