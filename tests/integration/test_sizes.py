"""Large groups, episodes and manifests through the real log: from the SDK to what the trainer fetches."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.consumers.facts import Fact, Failures
from headrace.consumers.samples import SampleCheck
from headrace.consumers.source import Snapshot
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.groups import Group
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import pack_float32, pack_int32
from headrace.schemas.errors import BlobDamaged, BlobLost, RecordTooLarge
from headrace.schemas.events import (
    GroupClosed,
    GroupPayload,
    GroupRef,
    Manifest,
    PartitionPosition,
    PayloadEpisode,
    PayloadSpan,
    SampleChunk,
    SampleRef,
    SlotFate,
    Task,
    VersionRun,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Closure, Outcome
from headrace.schemas.payload import content_hash, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, GROUPS, MANIFEST_BYTES, SAMPLES, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader, Record, end_offsets, last_record, read_at, read_range
from headrace.streams.log.transactions import Output, Transactor
from headrace.trainer.fetch import Batch, fetch_batch
from tests.roles import role
from tests.scripted import lease, run_settings, spec

Kafka = dict[str, Any]
CLOSES_S = 240.0  # a slow machine
VOCABULARY = 50_000


def settings(**log: Any) -> RunSettings:
    return run_settings(rollout={"group_size": 2}, log={"partitions": 1, "commit_ms": 50, "span_tokens": 8192, **log})


@contextmanager
def assembler(kafka: Kafka, topics: RunTopics, run: RunSettings) -> Iterator[None]:
    with role(run_assembler, kafka, topics, run, join_s=60.0) as raised:
        yield
    assert not raised, raised


def write_group(kafka: Kafka, run: str, name: str, tokens: int) -> None:
    """One managed group of two episodes with `tokens` model tokens each, through the SDK."""
    topics = RunTopics(run)
    with open_producer(run, kafka, unmanaged=True) as producer:
        opening = lease(name, rules=spec(2, deadline_s=3600.0), incarnation=producer.incarnation)
        raw = clients.producer(kafka)
        raw.produce(topics.name(TRAJECTORIES), encode(opening), key=name)
        assert raw.flush(60) == 0
        group = Group(producer, opening)
        for slot in group.slots:
            with group.episode(slot) as episode:
                episode.start(temperature=1.0, max_new_tokens=tokens, seed=slot)
                episode.prompt([1, 2, 3])
                random = np.random.default_rng(slot)
                for begin in range(0, tokens, 100_000):
                    n = min(100_000, tokens - begin)
                    ids = random.integers(0, VOCABULARY, n)
                    episode.model(ids, -random.random(n), version=0)
                    while producer.flush(30):
                        pass
                episode.finish(float(slot == 0))


def closure(kafka: Kafka, topics: RunTopics, name: str, within_s: float = CLOSES_S) -> tuple[int, GroupClosed]:
    groups = topics.name(GROUPS)
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        for record in read_range(kafka, groups, 0, 0, end_offsets(kafka, groups)[0]):
            event = decode(record.value)
            if isinstance(event, GroupClosed) and event.group == name:
                return record.offset, event
        time.sleep(0.2)
    raise AssertionError(f"{name} did not close within {within_s:g} s")


def manifest_of(chain: Chain, closed: list[tuple[int, GroupClosed]]) -> Manifest:
    refs, rows = [], []
    for index, (offset, event) in enumerate(closed):
        assert event.content_hash is not None
        refs.append(GroupRef(event.group, 0, offset, event.content_hash, event.accounts["candidate"], 0))
        rows += [(index, fate.slot, run.version, run.count) for fate in event.slots for run in fate.versions]
    columns = [pack_int32(np.array(column, np.int32)) for column in zip(*rows, strict=True)]
    ones = np.ones(len(rows), np.float32)
    return Manifest(**chain.link(), batch=1, target=0, settings_offset=0, decided_ms=0, groups=tuple(refs),
                    positions=(PartitionPosition(0, closed[-1][0] + 1),), closures_since=len(closed),
                    segment_group=columns[0], segment_slot=columns[1], segment_version=columns[2],
                    segment_count=columns[3], segment_drift=pack_float32(0 * ones), segment_weight=pack_float32(ones),
                    )  # fmt: skip


def batch_record(kafka: Kafka, topics: RunTopics, closed: list[tuple[int, GroupClosed]]) -> Record:
    chain, name = Chain(), topics.name(BATCHES)
    transactor = Transactor(kafka, topics.transactional_id("coordinator"), record_bytes=MANIFEST_BYTES)
    transactor.send([Output(name, 0, chain.extend(manifest_of(chain, closed)))])
    transactor.close()
    record = last_record(kafka, name, 0)
    assert record is not None
    return record


def fetch(kafka: Kafka, topics: RunTopics, record: Record, run: RunSettings) -> Batch:
    with Reader(kafka) as reader:
        return fetch_batch(reader, topics, record, run.staleness)


def chunks(kafka: Kafka, topics: RunTopics, event: GroupClosed) -> list[SampleChunk]:
    places = [ref.offset for ref in event.samples]
    found = read_at(kafka, topics.name(SAMPLES), 0, places)
    return [one for at in places if isinstance(one := decode(found[at].value), SampleChunk)]


@pytest.mark.parametrize("size", [900_000, 1_100_000, pytest.param(52_000_000, marks=pytest.mark.slow)])
def test_group_of_any_size_reaches_the_trainer_with_one_content_hash_chunked_or_as_a_blob(
    kafka: Kafka, run_name: str, tmp_path: Path, size: int
) -> None:
    tokens = size // 12  # at least 6 bytes each, in two episodes
    hashes = set()
    for kind, log in (("chunked", {}), ("blob", {"blob_url": tmp_path.as_uri(), "blob_bytes": 500_000})):
        topics, run = RunTopics(f"{run_name}-{kind}"), settings(**log)
        create_run(kafka, topics, run)
        write_group(kafka, topics.run, "g", tokens)
        with assembler(kafka, topics, run):
            at, event = closure(kafka, topics, "g")
        assert event.closure == Closure.CANDIDATE and event.accounts == {"candidate": 2 * tokens}
        found = chunks(kafka, topics, event)
        held = sum(len(one.data) + (one.blob.length if one.blob else 0) for one in found)
        assert held > size and (found[0].blob is not None, len(found) == 1) == (kind == "blob", kind == "blob")
        batch = fetch(kafka, topics, batch_record(kafka, topics, [(at, event)]), run)
        assert [e.reward for e in batch.groups[0].episodes] == [1.0, 0.0]
        assert [int(e.mask.sum()) for e in batch.groups[0].episodes] == [tokens, tokens]
        hashes.add(event.content_hash)
    assert len(hashes) == 1


def test_blob_that_is_lost_or_damaged_is_named_by_trainer_and_ledger(
    kafka: Kafka, run_name: str, tmp_path: Path
) -> None:
    topics, run = RunTopics(run_name), settings(blob_url=tmp_path.as_uri(), blob_bytes=1000)
    create_run(kafka, topics, run)
    write_group(kafka, run_name, "g", 1000)
    with assembler(kafka, topics, run):
        at, event = closure(kafka, topics, "g")
    record = batch_record(kafka, topics, [(at, event)])
    (chunk,) = chunks(kafka, topics, event)
    assert chunk.blob is not None
    path = Path(chunk.blob.address.removeprefix("file://"))
    good = path.read_bytes()
    fact = Fact("groups", 0, at, 0, b"", event)

    def ledger() -> list[str]:
        failures = Failures()
        check = SampleCheck(Snapshot(kafka, topics), 0, failures)
        check.commit([fact])
        check.finish()
        return failures.lines

    assert ledger() == [] and fetch(kafka, topics, record, run).groups
    where = rf"{topics.name(SAMPLES)}.0.@{event.samples[0].offset}: blob {chunk.blob.address} "
    for damage, error, said in (
        (good[:-1], BlobDamaged, "has .* bytes, its record says"),
        (good[:-1] + b"!", BlobDamaged, "has another digest"),
        (None, BlobLost, ".* is not there"),
    ):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(error, match=where + said):
            fetch(kafka, topics, record, run)
        (line,) = ledger()
        assert line.startswith("samples[0]@") and chunk.blob.address in line
    path.write_bytes(good)
    assert ledger() == []


DIES_BETWEEN = """
import json, os, signal, sys, threading
from headrace.schemas.topics import RunTopics
from headrace.streams import assembling
from headrace.streams.log.policy import open_settings
kafka, topics = json.loads(sys.argv[1]), RunTopics(sys.argv[2])
assembling.Transactor.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
assembling.run_assembler(kafka, topics, open_settings(kafka, topics).settings, threading.Event())
"""


def test_crash_between_a_blob_and_its_record_leaves_an_orphan_and_a_run_that_goes_on(
    kafka: Kafka, run_name: str, tmp_path: Path
) -> None:
    topics, run = RunTopics(run_name), settings(blob_url=tmp_path.as_uri(), blob_bytes=1000)
    create_run(kafka, topics, run)
    write_group(kafka, run_name, "g", 1000)
    died = subprocess.run([sys.executable, "-c", DIES_BETWEEN, json.dumps(kafka), run_name], timeout=CLOSES_S)
    assert died.returncode == -signal.SIGKILL
    (orphan,) = (tmp_path / run_name).iterdir()
    (tmp_path / run_name / ("0" * 32)).write_bytes(b"another orphan")
    assert end_offsets(kafka, topics.name(SAMPLES))[0] == 0
    with assembler(kafka, topics, run):
        at, event = closure(kafka, topics, "g")
    (chunk,) = chunks(kafka, topics, event)
    assert chunk.blob is not None and chunk.blob.address.endswith(orphan.name)
    assert fetch(kafka, topics, batch_record(kafka, topics, [(at, event)]), run).groups


MEASURED = """
import json, sys, threading, time
import psutil
from headrace.schemas.topics import RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.log.policy import open_settings
kafka, topics = json.loads(sys.argv[1]), RunTopics(sys.argv[2])
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
seen = [psutil.Process().memory_info().rss]
def sample():
    while True:
        seen.append(psutil.Process().memory_info().rss)
        time.sleep(0.02)
threading.Thread(target=sample, daemon=True).start()
run_assembler(kafka, topics, open_settings(kafka, topics).settings, stop)
print(seen[0], max(seen), flush=True)
"""


@pytest.mark.slow
def test_episode_of_a_million_tokens_is_written_and_assembled_in_bounded_memory(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    before = psutil.Process().memory_info().rss
    write_group(kafka, run_name, "g", 1_000_000)
    assert psutil.Process().memory_info().rss - before < 200 << 20
    child = subprocess.Popen([sys.executable, "-c", MEASURED, json.dumps(kafka), run_name], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        at, event = closure(kafka, topics, "g")
        out, _ = child.communicate("\n", timeout=CLOSES_S)
    finally:
        child.kill()
        child.wait()
    idle, peak = (int(line) for line in out.split())
    assert peak - idle < 250 << 20  # a payload of 16 MB, some copies of it, and what the client may prefetch
    assert event.accounts == {"candidate": 2_000_000}
    assert len(fetch(kafka, topics, batch_record(kafka, topics, [(at, event)]), run).groups[0].episodes) == 2


def wide_payload(name: str, slots: int, runs: int) -> GroupPayload:
    def episode(slot: int) -> PayloadEpisode:
        prompt = PayloadSpan("prompt", 0, -1, 1, (), pack_int32(np.array([1], np.int32)), None, None)
        ids, logprobs = np.arange(runs, dtype=np.int32), np.full(runs, -0.5, np.float32)
        span = PayloadSpan("model", 0, -1, runs, tuple(VersionRun(v, 1) for v in range(runs)), pack_int32(ids),
                           pack_float32(logprobs), None)  # fmt: skip
        return PayloadEpisode(slot, 0, "i", str(Outcome.MODEL_SUCCESS), float(slot), 1.0, (prompt, span), (0, 1))

    return GroupPayload(name, Task(name, "t", "{}", 0), tuple(episode(slot) for slot in range(slots)))


@pytest.mark.slow
def test_manifest_of_4096_groups_is_written_read_and_fetched_by_the_trainer(kafka: Kafka, run_name: str) -> None:
    slots, runs, count = 12, 4, 4096
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    transactor, chain = Transactor(kafka, topics.transactional_id("assembler", 0)), Chain()
    closed: list[tuple[int, GroupClosed]] = []
    for begin in range(0, count, 256):
        payloads = [wide_payload(f"g{n:08d}", slots, runs) for n in range(begin, begin + 256)]
        values = [encode(to_chunks(payload)[0]) for payload in payloads]
        offsets = transactor.send([Output(topics.name(SAMPLES), 0, value) for value in values])
        events = []
        for payload, value, offset in zip(payloads, values, offsets, strict=True):
            fates = tuple(SlotFate(e.slot, 0, "i", e.outcome, "stop", "none", e.reward, True, runs, 1,
                                   tuple(VersionRun(v, 1) for v in range(runs))) for e in payload.episodes)  # fmt: skip
            event = GroupClosed(**chain.link(), cause=0, group=payload.group, closure=str(Closure.CANDIDATE),
                                purpose="train", task="t", opened=0, open_ms=1, flagged=None, slots=fates,
                                accounts={"candidate": slots * runs}, context_tokens=slots,
                                content_hash=content_hash(payload), samples=(SampleRef(offset, digest(value)),),
                                held_up_by=0)  # fmt: skip
            events.append((event, chain.extend(event)))
        places = transactor.send([Output(topics.name(GROUPS), 0, value) for _, value in events])
        closed += [(at, event) for at, (event, _) in zip(places, events, strict=True)]
    transactor.close()
    record = batch_record(kafka, topics, closed)
    assert len(record.value or b"") > 4 * 1_048_588  # far beyond what any other topic takes
    batch = fetch(kafka, topics, record, run)
    assert len(batch.groups) == count and all(len(group.episodes) == slots for group in batch.groups)
    assert [group.group_id for group in batch.groups] == [ref.group for ref in batch.manifest.groups]


def test_record_that_a_transaction_cannot_hold_is_refused_before_it_begins(kafka: Kafka, run_name: str) -> None:
    topics = RunTopics(run_name)
    create_run(kafka, topics, settings())
    transactor = Transactor(kafka, topics.transactional_id("coordinator"))
    name = topics.name(BATCHES)
    with pytest.raises(RecordTooLarge, match=f"{name}: a record of 1000000 bytes"):
        transactor.send([Output(name, 0, b"small"), Output(name, 0, b"x" * 1_000_000)])
    assert transactor.alive and end_offsets(kafka, name)[0] == 0
    transactor.send([Output(name, 0, b"small")])
    assert last_record(kafka, name, 0) is not None

