"""A run of any length, written record by record with the schemas alone, into files that are read back in order.

It stands for what a broker holds: neither the writer nor the reader keeps more than one batch of groups in memory. All
groups have the same shape, and their number alone decides how long the run is. Groups overlap as they do in a real one:
a batch's groups are open together, and are decided and trained some time after they closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.columns import pack_float32, pack_ids, pack_int32, pack_int64
from headrace.schemas.events import (
    Assignment,
    AttemptEnded,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    GroupCount,
    GroupPayload,
    GroupRef,
    GroupSpec,
    Lease,
    Manifest,
    PartitionPosition,
    PayloadEpisode,
    Position,
    Publication,
    RunCreated,
    SampleRef,
    SlotFate,
    Span,
    Task,
    Version,
    VersionRun,
)
from headrace.schemas.hashes import crc, digest
from headrace.schemas.payload import content_hash, payload_span, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import ALL_TOPICS, BY_GROUP
from headrace.streams.log.reader import Record

_FRAME = struct.Struct("<qqI")  # offset, timestamp, length of the value
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every group."""

    slots: int = 4
    spans: int = 2  # of the model, per episode
    span_tokens: int = 128
    prompt_tokens: int = 64
    batch: int = 16  # groups
    partitions: int = 4

    @property
    def group_tokens(self) -> int:
        """Model tokens."""
        return self.slots * self.spans * self.span_tokens


class FileLog:
    """A LogSource over such files. Whole partitions are read in one sweep, with a buffer of a megabyte."""

    def __init__(self, folder: Path, run: str = "long") -> None:
        self.run, self._folder = run, folder
        self._counts = {topic: len(list(folder.glob(f"{topic}-*"))) for topic in ALL_TOPICS}
        self._ends: dict[tuple[str, int], int] = {}

    def partitions(self, topic: str) -> int:
        return self._counts[topic]

    def first(self, topic: str, partition: int) -> int:
        return 0

    def end(self, topic: str, partition: int) -> int:
        if (topic, partition) not in self._ends:
            last = -1
            for record in self.records(topic, partition):
                last = record.offset
            self._ends[topic, partition] = last + 1
        return self._ends[topic, partition]

    def settled(self, topic: str, partition: int) -> int:
        return 1 << 62  # nobody writes any more

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        with (self._folder / f"{topic}-{partition}").open("rb", buffering=_READ_BYTES) as file:
            while head := file.read(_FRAME.size):
                offset, timestamp_ms, size = _FRAME.unpack(head)
                value = file.read(size)
                if end is not None and offset >= end:
                    return
                if offset >= start:
                    yield Record(topic, partition, offset, timestamp_ms, None, value)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        newer = (r.offset for r in self.records(topic, partition) if r.timestamp_ms >= time_ms)
        return next(newer, self.end(topic, partition))


@dataclass(slots=True)
class _Partition:
    chain: Chain = field(default_factory=Chain)
    position: int = 0
    offsets: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)


class _Writer:
    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.files: dict[tuple[str, int], BinaryIO] = {}
        self.ends: dict[tuple[str, int], int] = {}
        for topic in ALL_TOPICS:
            for p in range(shape.partitions if topic in BY_GROUP else 1):
                self.files[topic, p] = (folder / f"{topic}-{p}").open("wb", buffering=_READ_BYTES)
                self.ends[topic, p] = 0
        self.parts = [_Partition() for _ in range(shape.partitions)]
        self.batches, self.trainer = Chain(), Chain()
        self.now = 1_700_000_000_000
        self.leases = 0
        random = np.random.default_rng(0)
        n = shape.span_tokens
        self.columns = [(pack_ids(random.integers(0, 50_000, n).astype(np.int32)),
                         pack_float32(-random.exponential(1.0, n).astype(np.float32))) for _ in range(64)]  # fmt: skip
        self.prompt = pack_ids(random.integers(0, 50_000, shape.prompt_tokens).astype(np.int32))
        self.spec = GroupSpec(shape.slots, 0, 3, 1, 600.0, 3600.0, "survivors", "refill", 1 << 20)

    def put(self, topic: str, partition: int, value: bytes) -> int:
        place = (topic, partition)
        offset = self.ends[place]
        self.now += 1
        file = self.files[place]
        file.write(_FRAME.pack(offset, self.now, len(value)))
        file.write(value)
        self.ends[place] = offset + 1
        if topic == "trajectories":
            part = self.parts[partition]
            part.offsets.append(offset)
            part.crcs.append(crc(value))
        return offset

    def raw(self, partition: int, event: Event) -> int:
        return self.put("trajectories", partition, encode(event))

    def out(self, partition: int, cls: type, **fields: Any) -> int:
        chain = self.parts[partition].chain
        return self.put("groups", partition, chain.extend(cls(**chain.link(), **fields)))

    # ------------------------------------------------------------------------------------------------- the run

    def write(self, groups: int) -> None:
        settings = RunSettings.model_validate({"model": {"path": "none"}, "tasks": {"dataset": "chain_sum"}})
        created = RunCreated(**Chain().link(), writer="create", run="long", settings=settings.model_dump_json(),
                             software="benchmark", created_ms=self.now)  # fmt: skip
        self.trainer.previous = digest(encode(created))
        self.put("policy", 0, encode(created))
        self.version(0, (), -1, b"")
        for number, begin in enumerate(range(0, groups, self.shape.batch)):
            self.batch(number + 1, range(begin, min(groups, begin + self.shape.batch)))
        for file in self.files.values():
            file.close()

    def batch(self, number: int, names: range) -> None:
        open_: list[tuple[str, int, Task, int]] = []
        for index in names:
            name, p = f"g{index:08d}", index % self.shape.partitions
            task = Task(f"t{index}", "benchmark", "{}", index)
            lease = Lease(name, self.leases, True, False, "w", "w1", "train", 0,
                          tuple(Assignment(s, 0) for s in range(self.shape.slots)), self.spec, task, index,
                          None)  # fmt: skip
            self.leases += 1
            self.put("tasks", 0, encode(lease))
            open_.append((name, p, task, self.raw(p, lease)))
        episodes: dict[tuple[str, int], PayloadEpisode] = {}
        for slot in range(self.shape.slots):  # siblings of all groups run side by side
            for name, p, _, _ in open_:
                episodes[name, slot] = self.episode(name, p, slot, number - 1)
        refs = [self.close(*one, [episodes[one[0], s] for s in range(self.shape.slots)]) for one in open_]
        for p in range(self.shape.partitions):
            self.commit(p)
        offset, value = self.manifest(number, refs)
        self.version(number, refs, offset, value)

    def episode(self, name: str, p: int, slot: int, version: int) -> PayloadEpisode:
        key, n = (name, slot, 0, "w1"), self.shape.span_tokens
        self.raw(p, EpisodeStarted(*key, 0, "w", "{}", 1.0, 1.0, 0, 4096, slot, self.now))
        spans = [Span(*key, 1, "prompt", 0, -1, self.shape.prompt_tokens, (), None, None, None, {}, self.prompt, None,
                      None, None)]  # fmt: skip
        for index in range(self.shape.spans):
            tokens, logprobs = self.columns[(self.now + index) % len(self.columns)]
            spans.append(Span(*key, 2 + index, "model", 0, -1, n, (VersionRun(version, n),), None, None, None,
                              {"decode": 1.0}, tokens, logprobs, None, None))  # fmt: skip
        offsets = tuple(self.raw(p, span) for span in spans)
        reward = float(slot % 2)
        outcome = "model_success" if reward else "model_failure"
        self.raw(p, EpisodeEnded(*key, 2 + self.shape.spans, outcome, "stop", "none", reward, {}, (), None, self.now,
                                 {}))  # fmt: skip
        payload = tuple(payload_span(span) for span in spans)
        return PayloadEpisode(slot, 0, "w1", outcome, reward, 1.0, payload, offsets)

    def close(self, name: str, p: int, task: Task, opened: int, episodes: list[PayloadEpisode]) -> GroupRef:
        payload, n = GroupPayload(name, task, tuple(episodes)), self.shape.spans * self.shape.span_tokens
        refs = []
        for chunk in to_chunks(payload):
            value = encode(chunk)
            refs.append(SampleRef(self.put("samples", p, value), digest(value)))
        cause, fates = self.ends["trajectories", p] - 1, []
        for one in episodes:
            self.out(p, AttemptEnded, cause=cause, group=name, slot=one.slot, attempt=0, incarnation="w1",
                     outcome=one.outcome, reason="stop", boundary="none", reward=one.reward, model_tokens=n,
                     ends_slot=True)  # fmt: skip
            runs = one.spans[1].versions
            fates.append(SlotFate(one.slot, 0, "w1", one.outcome, "stop", "none", one.reward, True, n,
                                  self.shape.prompt_tokens, (VersionRun(runs[0].version, n),)))  # fmt: skip
        hashed = content_hash(payload)
        offset = self.out(
            p, GroupClosed, cause=cause, group=name, closure="candidate", purpose="train", task=task.id, opened=opened,
            open_ms=1000, flagged=None, slots=tuple(fates), accounts={"candidate": self.shape.group_tokens},
            context_tokens=self.shape.slots * self.shape.prompt_tokens, content_hash=hashed, samples=tuple(refs),
            held_up_by=0,
        )  # fmt: skip
        return GroupRef(name, p, offset, hashed, self.shape.group_tokens, 0)

    def commit(self, p: int) -> None:
        part, end = self.parts[p], self.ends["trajectories", p]
        gaps = np.diff(np.array([part.position, *part.offsets], np.int64))
        self.out(p, Position, offset=end, low_mark=end, clock_ms=0, last_ms=self.now, start=part.position,
                 gaps=pack_int64(gaps), crcs=pack_int64(np.array(part.crcs, np.int64)))  # fmt: skip
        part.position, part.offsets, part.crcs = end, [], []

    def manifest(self, number: int, refs: list[GroupRef]) -> tuple[int, bytes]:
        slots, n = self.shape.slots, self.shape.spans * self.shape.span_tokens

        def ints(values: Any) -> bytes:
            return pack_int32(np.asarray(values, np.int32))

        rows = len(refs) * slots
        manifest = Manifest(
            **self.batches.link(), batch=number, target=number - 1, settings_offset=0, decided_ms=self.now,
            groups=tuple(refs),
            positions=tuple(PartitionPosition(p, self.ends["groups", p]) for p in range(self.shape.partitions)),
            closures_since=len(refs), segment_group=ints(np.repeat(np.arange(len(refs)), slots)),
            segment_slot=ints(np.tile(np.arange(slots), len(refs))), segment_version=ints(np.full(rows, number - 1)),
            segment_count=ints(np.full(rows, n)), segment_drift=pack_float32(np.zeros(rows, np.float32)),
            segment_weight=pack_float32(np.ones(rows, np.float32)),
        )  # fmt: skip
        value = self.batches.extend(manifest)
        return self.put("batches", 0, value), value

    def version(self, number: int, refs: Any, offset: int, value: bytes) -> None:
        served = digest(b"weights %d" % number)
        version = Version(
            **self.trainer.link(), writer="trainer", version=number, parent=number - 1, batch=number or -1,
            batch_offset=offset, batch_digest=digest(value) if number else b"", hash_algorithm="none",
            served_hash=served, train_hash=served, rho=0.01, rho_tokens=256,
            groups=tuple(GroupCount(ref.group, ref.model_tokens, 0) for ref in refs), metrics={}, fingerprint="{}",
            committed_ms=self.now,
        )  # fmt: skip
        self.put("policy", 0, self.trainer.extend(version))
        publication = Publication(
            **self.trainer.link(), writer="trainer", version=number, kind="path", base=-1, base_hash=b"",
            hash_algorithm="none", served_hash=served, path="none", chunks=(), size=0, changed=0, elements=1,
            published_ms=self.now,
        )  # fmt: skip
        self.put("policy", 0, self.trainer.extend(publication))


def write_run(folder: Path, groups: int, shape: Shape | None = None) -> Shape:
    """A finished run of so many groups, as files in `folder`."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    _Writer(folder, shape).write(groups)
    return shape
