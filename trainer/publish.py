"""Decides when a version exists for receivers, and what the trainer has said in `policy`.

Chunks go out through an idempotent producer, unseen; only the publication, in a transaction of the trainer's own id,
makes the version exist, so a trainer that was fenced can't publish. The published weights are kept as the base of the
next delta, and move on only when the publication is on the log.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import InvalidRecord, LogError, UndecodableRecord
from headrace.schemas.events import Authored, Publication, SettingsChanged, Version, WeightChunk
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings, changed
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log import clients
from headrace.streams.log.policy import Opened, settled_end
from headrace.streams.log.reader import Reader, beginning_offsets
from headrace.streams.log.transactions import Output, Transactor

log = logging.getLogger("headrace.trainer")

WRITER = "trainer"
DELIVERY_S = 120.0  # for all chunks of a publication; as long as a transaction waits for a broker that is away

Make = Callable[..., Authored]


@dataclass(slots=True)
class PolicyHead:
    """What `policy` says: settings, versions, what of them is published, and where the trainer's chain ends."""

    settings: dict[int, RunSettings]  # in force from a policy offset on
    chain: Chain
    versions: dict[int, Version] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)

    @property
    def committed(self) -> int:
        return max(self.versions, default=-1)

    @property
    def published(self) -> int:
        return max((p.version for p in self.publications), default=-1)


def read_policy(kafka: Mapping[str, Any], topics: RunTopics, opened: Opened) -> PolicyHead:
    """All of `policy`. A record that is no one's, or asks for settings that can't be, decides nothing, as it decided
    nothing for the coordinator. Raises InvalidRecord where the trainer's chain or the sequence of versions is broken.
    """
    name = topics.name(POLICY)
    head = PolicyHead({opened.offset: opened.settings}, Chain(0, digest(opened.value)))
    with Reader(kafka) as reader:
        for record in reader.read(name, 0, beginning_offsets(kafka, name)[0], settled_end(kafka, topics)):
            where = (name, 0, record.offset)
            try:
                event = decode(record.value)
                if isinstance(event, SettingsChanged):
                    newest = head.settings[max(head.settings)]
                    head.settings[record.offset] = changed(newest, json.loads(event.changes))
            except (UndecodableRecord, ValueError) as error:
                log.warning("%s[%d]@%d decides nothing: %s", *where, error)
                continue
            if not isinstance(event, Version | Publication):
                continue
            if (event.number, event.previous) != (head.chain.number, head.chain.previous):
                raise InvalidRecord(f"record {event.number} of the trainer doesn't follow the one before it", *where)
            head.chain = Chain.after(event, record.value or b"")
            if isinstance(event, Publication):
                head.publications.append(event)
            elif event.version != head.committed + 1:
                raise InvalidRecord(f"version {event.version} where {head.committed + 1} is due", *where)
            else:
                head.versions[event.version] = event
    return head


class Policy:
    """The trainer's pen in `policy`: each call is one short transaction of records that continue its chain."""

    def __init__(self, topics: RunTopics, transactor: Transactor, chain: Chain) -> None:
        self._name, self._transactor, self._chain = topics.name(POLICY), transactor, chain

    def write(self, *makers: Make) -> None:
        """Each maker gets `number`, `previous` and `writer`. Raises Fenced or LogError."""
        chain = self._chain.copy()
        values = []
        for make in makers:
            record = make(**chain.link(), writer=WRITER)
            assert isinstance(record, Version | Publication)
            values.append(chain.extend(record))
        self._transactor.send([Output(self._name, 0, value) for value in values])
        self._chain = chain


@dataclass(slots=True)
class _Base:
    """The weights that were published last, as a copy."""

    version: int
    hash: bytes
    state: dict[str, delta.Tensor]


class Publisher:
    """Publishes versions in turn. `rebase` once, then `compare` and `publish` (or `advance`) for each version."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, policy: Policy, snapshot_every: int,
                 codec: str = "fast") -> None:  # fmt: skip
        self._kafka, self._weights, self._policy = kafka, topics.name(WEIGHTS), policy
        self._snapshot_every, self._codec = snapshot_every, codec
        self._producer = clients.producer(kafka, **{"compression.type": "none"})  # chunks are compressed already
        self._base: _Base | None = None
        self._snapshots: list[int] = []  # first offset in `weights` of each

    def remember(self, publications: Iterable[Publication]) -> None:
        """What was published before this start."""
        self._snapshots += [p.chunks[0] for p in publications if p.kind == delta.SNAPSHOT and p.chunks]

    def rebase(self, version: int, state: delta.State, served_hash: bytes) -> None:
        """Take a copy of `state`, whose hash is known, as what was published last."""
        self._base = _Base(version, served_hash, delta.copy_state(state))

    def publish_initial(self, version: Make, path: str, state: delta.State, served_hash: bytes) -> None:
        """Version 0 exists as a model folder: its record and its publication are one transaction."""
        self._policy.write(version, self._publication(0, delta.PATH, served_hash, [], 0, 0, state, path=path))
        self.rebase(0, state, served_hash)

    def compare(self, state: delta.State) -> tuple[delta.Changes, bytes]:
        """What changed since the base, and the hash of `state`."""
        assert self._base is not None
        changes = delta.diff(self._base.state, state)
        return changes, delta.updated_hash(self._base.hash, self._base.state, changes)

    def advance(self, version: int, changes: delta.Changes, served_hash: bytes) -> None:
        """`version` is published: it is the base of the next one."""
        assert self._base is not None
        delta.write(self._base.state, changes)
        self._base.version, self._base.hash = version, served_hash

    def publish(self, version: int, changes: delta.Changes, served_hash: bytes) -> None:
        """The delta from the base to `version`; then the snapshot, where one is due. Raises Fenced or LogError, and
        then the base hasn't moved."""
        base = self._base
        assert base is not None
        offsets, size = self._send(delta.encode_delta(version, base.state, changes, self._codec))
        self._policy.write(self._publication(version, delta.DELTA, served_hash, offsets, size, delta.changed(changes),
                                             base.state, base=base))  # fmt: skip
        self.advance(version, changes, served_hash)
        if version % self._snapshot_every == 0:
            if delta.state_hash(base.state) != served_hash:
                raise LogError(f"the copy of version {version} in memory was corrupted: start the trainer again")
            self.publish_snapshot(version, base.state, served_hash)

    def publish_snapshot(self, version: int, state: delta.State, served_hash: bytes) -> None:
        """All weights of `version`: for newcomers, for recovery, and where the base of a delta is no longer at hand."""
        offsets, size = self._send(delta.encode_snapshot(version, state))
        count = delta.elements(state)
        self._policy.write(self._publication(version, delta.SNAPSHOT, served_hash, offsets, size, count, state))
        self._snapshots += offsets[:1]
        if len(self._snapshots) >= 2:
            self._forget_below(self._snapshots[-2])

    def _publication(self, version: int, kind: str, served_hash: bytes, offsets: Sequence[int], size: int, changed: int,
                     state: delta.State, *, base: _Base | None = None, path: str | None = None) -> Make:  # fmt: skip
        count = delta.elements(state)
        based = (-1, b"") if base is None else (base.version, base.hash)

        def make(**link: Any) -> Publication:
            return Publication(
                **link, version=version, kind=kind, base=based[0], base_hash=based[1],
                hash_algorithm=delta.HASH_ALGORITHM, served_hash=served_hash, path=path, chunks=tuple(offsets),
                size=size, changed=changed, elements=count, published_ms=int(time.time() * 1000),
            )  # fmt: skip

        return make

    def _send(self, chunks: Iterable[WeightChunk]) -> tuple[list[int], int]:
        """Offsets of the chunks in order, and their bytes. Raises LogError where the broker doesn't take them."""
        deadline = time.monotonic() + DELIVERY_S
        offsets: dict[int, int] = {}
        failed: list[str] = []
        count = size = 0

        def delivered(index: int) -> Callable[[KafkaError | None, Message], None]:
            def report(error: KafkaError | None, message: Message) -> None:
                at = message.offset()
                if error is not None or at is None or at < 0:
                    failed.append(error.str() if error is not None else "it was acknowledged without its offset")
                else:
                    offsets[index] = at

            return report

        try:
            for chunk in chunks:
                value = encode(chunk)
                while True:
                    try:
                        self._producer.produce(self._weights, value=value, partition=0, on_delivery=delivered(count))
                        break
                    except BufferError as full:  # the queue is bounded: let the broker take some
                        if time.monotonic() > deadline:
                            raise LogError(f"{self._weights}: the broker takes no weights") from full
                        self._producer.poll(0.1)
                count, size = count + 1, size + len(chunk.data)
            self._producer.flush(max(0.0, deadline - time.monotonic()))
        except KafkaException as error:
            raise LogError(f"{self._weights}: weights can't be sent: {clients.reason(error)}") from error
        if len(offsets) != count:
            why = failed[0] if failed else f"no answer within {DELIVERY_S:g} s"
            raise LogError(f"{self._weights}: {count - len(offsets)} of {count} chunks were not delivered ({why})")
        return [offsets[index] for index in range(count)], size

    def _forget_below(self, offset: int) -> None:
        """Weights before the last but one snapshot: newcomers and recovery begin at the later ones."""
        place = TopicPartition(self._weights, 0, offset)
        admin = clients.admin(self._kafka)  # held until the futures are done: a collected client never resolves them
        try:
            for future in admin.delete_records([place]).values():
                future.result()
        except KafkaException as error:
            log.warning("%s: what lies below offset %d can't be deleted: %s", self._weights, offset,
                        clients.reason(error))  # fmt: skip

    def close(self) -> None:
        self._producer.purge()
        self._producer.close()
