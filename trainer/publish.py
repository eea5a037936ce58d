"""Decides when a version exists for receivers, when a snapshot pays, and what the trainer has said in `policy`.

Chunks are sent unseen; only the publication, in a transaction of the trainer's own id, makes the version exist, so a
trainer that was fenced can't publish. The published weights are kept as the base of the next delta, and move on only
when the publication is on the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode
from headrace.schemas.errors import InvalidRecord, LogError, UndecodableRecord
from headrace.schemas.events import Authored, Derived, Publication, Reconciled, Version
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings, WeightSettings
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log.blobs import open_weights
from headrace.streams.log.policy import Opened, settings_changes, settings_from, settled_records
from headrace.streams.log.transactions import Output, Transactor

from .history import History
from .sending import Sender

log = logging.getLogger("headrace.trainer")

WRITER = "trainer"

Make = Callable[..., Authored]


@dataclass(slots=True)
class PolicyHead:
    """What `policy` says: settings, versions, what of them is published, and where the trainer's chain ends."""

    settings: dict[int, RunSettings]  # in force from a policy offset on
    chain: Chain
    history: History = field(default_factory=History)
    publications: list[Publication] = field(default_factory=list)
    derived: Derived | None = None  # where the run comes from, if it is no run of its own

    @property
    def versions(self) -> dict[int, Version]:
        return self.history.versions

    @property
    def committed(self) -> int:
        return self.history.committed

    @property
    def published(self) -> int:
        """The newest version that is published as it stands."""
        return max((p.version for p in self.publications
                    if p.version not in self.versions or p.served_hash == self.versions[p.version].served_hash),
                   default=-1)  # fmt: skip


def read_policy(kafka: Mapping[str, Any], topics: RunTopics, opened: Opened) -> PolicyHead:
    """All of `policy`. A record that is no one's, or asks for settings that can't be, decides nothing, as it decided
    nothing for the coordinator. Raises InvalidRecord where the trainer's chain or the sequence of versions is broken.
    """
    records = settled_records(kafka, topics)
    settings = settings_from(opened.settings, opened.offset, settings_changes(records))
    head = PolicyHead(settings, Chain(0, digest(opened.value)))
    for record in records:
        where = (record.topic, record.partition, record.offset)
        try:
            event = decode(record.value)
        except UndecodableRecord as error:
            log.warning("%s[%d]@%d decides nothing: %s", *where, error)
            continue
        if isinstance(event, Derived):
            head.derived = event
        if not isinstance(event, Version | Publication | Reconciled):
            continue
        if (event.number, event.previous) != (head.chain.number, head.chain.previous):
            raise InvalidRecord(f"record {event.number} of the trainer doesn't follow the one before it", *where)
        head.chain = Chain.after(event, record.value or b"")
        if isinstance(event, Publication):
            head.publications.append(event)
        elif isinstance(event, Version):
            if event.version != head.committed + 1:
                raise InvalidRecord(f"version {event.version} where {head.committed + 1} is due", *where)
            head.history.commit(event)
        elif {event.version, event.checkpoint} <= head.versions.keys():
            head.history.reconcile(event)
        else:
            raise InvalidRecord(f"it settles version {event.version} by version {event.checkpoint}, which were not "
                                "committed before it", *where)  # fmt: skip
    return head


class Policy:
    """The trainer's pen in `policy`: each call is one short transaction of records that continue its chain.

    Versions and publications are written by two threads. The lock covers chain and transactor together: transactions
    take turns, each continues the chain as the one before left it, and a transactor that has died (fenced, or a commit
    whose outcome is unknown) is dead for both.
    """

    def __init__(self, topics: RunTopics, transactor: Transactor, chain: Chain) -> None:
        self._name, self._transactor, self._chain = topics.name(POLICY), transactor, chain
        self._lock = threading.Lock()

    def write(self, *makers: Make) -> list[Version | Publication | Reconciled]:
        """Each maker gets `number`, `previous` and `writer`; what they made. Raises Fenced or LogError."""
        with self._lock:
            chain = self._chain.copy()
            made, values = [], []
            for make in makers:
                record = make(**chain.link(), writer=WRITER)
                assert isinstance(record, Version | Publication | Reconciled)
                made.append(record)
                values.append(chain.extend(record))
            self._transactor.send([Output(self._name, 0, value) for value in values])
            self._chain = chain
        return made


@dataclass(slots=True)
class Since:
    """What was published since all weights were published last: as a snapshot, or as the run's model folder."""

    versions: int = 0
    size: int = 0  # bytes of deltas
    full: int | None = None  # bytes of the last snapshot

    def note(self, publication: Publication) -> None:
        if publication.kind == delta.DELTA:
            self.versions, self.size = self.versions + 1, self.size + publication.size
        else:
            self.versions, self.size = 0, 0
            self.full = publication.size if publication.kind == delta.SNAPSHOT else self.full

    def due(self, at_most: int, uncompressed: int) -> bool:
        """Whether a snapshot pays: once the deltas since the last one are as many bytes as it, so that a newcomer never
        fetches more than twice what it must, and snapshots never cost more than the deltas. `at_most` bounds the chain
        in versions. Before the first snapshot, the weights as they are stand for its size."""
        return self.versions >= at_most or 0 < (self.full or uncompressed) <= self.size


@dataclass(slots=True)
class _Base:
    """The weights that were published last, as a copy."""

    version: int
    hash: bytes
    state: dict[str, delta.Tensor]


class Publisher:
    """Publishes versions in turn. `rebase` once, then `compare` and `publish` (or `advance`) for each version.

    What a thread of the background does is `publish_delta` and `publish_snapshot_if_due`; nothing else may be called
    while a delta is on its way, and only `compare` while a snapshot is (both only read the base).
    """

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, policy: Policy, weights: WeightSettings,
                 tap: Callable[[int, bytes], object] | None = None) -> None:  # fmt: skip
        """`tap`: who else gets the records of `weights` (streams.log.direct)."""
        self._policy, self._settings = policy, weights
        self._sender = Sender(kafka, topics.name(WEIGHTS), max_bytes_per_s=weights.max_bytes_per_s,
                              store=open_weights(weights.store_url, topics.run), tap=tap)  # fmt: skip
        self._base: _Base | None = None
        self._since = Since()
        self._snapshots: list[Publication] = []

    def remember(self, publications: Iterable[Publication]) -> None:
        """What was published before this start."""
        for one in publications:
            self._note(one)

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
        """The delta from the base to `version`; then the snapshot, where one is due. Raises as the two do."""
        self.publish_delta(version, changes, served_hash)
        self.publish_snapshot_if_due()

    def publish_delta(self, version: int, changes: delta.Changes, served_hash: bytes) -> None:
        """Raises Fenced, LogError or BlobError, and then the base hasn't moved. Where versions between were given up,
        whoever serves the last of them doesn't have the base: then all weights are published."""
        base = self._base
        assert base is not None
        if base.version != version - 1:
            state = delta.copy_state(base.state)
            delta.write(state, changes)
            self.publish_snapshot(version, state, served_hash)
            self.advance(version, changes, served_hash)
            return
        offsets, size = self._sender.send(delta.encode_delta(version, base.state, changes, self._settings.codec))
        self._write(self._publication(version, delta.DELTA, served_hash, offsets, size, delta.changed(changes),
                                      base.state, base=base))  # fmt: skip
        self.advance(version, changes, served_hash)

    def publish_snapshot_if_due(self) -> None:
        """A snapshot of the base, where it pays (`Since.due`). Raises Fenced or LogError."""
        base = self._base
        assert base is not None
        if not self._since.due(self._settings.snapshot_every, _bytes(base.state)):
            return
        if delta.state_hash(base.state) != base.hash:
            raise LogError(f"the copy of version {base.version} in memory was corrupted: start the trainer again")
        self.publish_snapshot(base.version, base.state, base.hash)

    def publish_snapshot(self, version: int, state: delta.State, served_hash: bytes) -> None:
        """All weights of `version`: for newcomers, for recovery, and where the base of a delta is no longer at hand."""
        offsets, size = self._sender.send(delta.encode_snapshot(version, state))
        count = delta.elements(state)
        self._write(self._publication(version, delta.SNAPSHOT, served_hash, offsets, size, count, state))
        if len(self._snapshots) >= 2:
            oldest = self._snapshots[-2]
            self._sender.forget_below(oldest.chunks[0], oldest.version)

    def abandon(self) -> None:
        """Break off what is being sent, from any thread."""
        self._sender.abandon()

    def close(self) -> None:
        self._sender.close()

    def _write(self, make: Make) -> None:
        (publication,) = self._policy.write(make)
        assert isinstance(publication, Publication)
        self._note(publication)
        log.info("version %d is published as a %s: %d elements, %d bytes in %d chunks", publication.version,
                 publication.kind, publication.changed, publication.size, len(publication.chunks))  # fmt: skip

    def _note(self, publication: Publication) -> None:
        self._since.note(publication)
        if publication.kind == delta.SNAPSHOT and publication.chunks:
            self._snapshots = [*self._snapshots[-1:], publication]

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


def _bytes(state: delta.State) -> int:
    return sum(tensor.bits.nbytes for tensor in state.values())
