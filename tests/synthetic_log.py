"""A small run, written record by record with the schemas alone: two versions, and at least one token in every account.

It stands for what assembler, coordinator and trainer write; none of their code is used, so the ledger's tests don't
inherit their mistakes. `_Partition` keeps what a commit needs: the input since the last position, and the chain.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import xxhash

from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode
from headrace.schemas.columns import pack_float32, pack_ids, pack_int32, pack_int64
from headrace.schemas.events import (
    Addendum,
    Assignment,
    AttemptEnded,
    DeadLetter,
    Disposed,
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
    Reuse,
    RunCreated,
    SampleRef,
    SettingsChanged,
    SlotFate,
    Span,
    Task,
    Tick,
    Version,
    VersionRun,
    WeightChunk,
)
from headrace.schemas.hashes import crc, digest
from headrace.schemas.outcomes import Boundary, Closure, Outcome
from headrace.schemas.payload import content_hash, payload_span, to_chunks
from headrace.schemas.settings import RunSettings
from headrace.streams.log.blobs import Blobs
from tests.memory_log import MemoryLog

SPEC = GroupSpec(2, 1, 3, 1, 600.0, 3600.0, "survivors", "refill", 64)
SETTINGS = RunSettings.model_validate(
    {
        "model": {"path": "/models/tiny"},
        "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": 2, "reserves": 1},
        "batch": {"groups": 2},
    }
)
PROMPT, TOKENS = 3, 4  # tokens of each prompt, and of each model span
EPISODE_TOKENS = 2 * TOKENS


@dataclass
class _Group:
    lease: Lease
    opened: int
    spans: dict[tuple[int, int], list[tuple[int, Span]]] = field(default_factory=dict)
    ends: dict[tuple[int, int], EpisodeEnded] = field(default_factory=dict)


@dataclass
class _Partition:
    number: int
    chain: Chain = field(default_factory=Chain)
    position: int = 0


class SyntheticRun:
    def __init__(self, name: str = "synthetic", partitions: int = 2) -> None:
        self.log = MemoryLog.empty(name, dict.fromkeys(("trajectories", "samples", "groups"), partitions))
        self.parts = [_Partition(p) for p in range(partitions)]
        self.groups: dict[str, _Group] = {}
        self.closures: dict[str, tuple[GroupClosed, int, int]] = {}  # with partition and offset
        self.batches, self.trainer = Chain(), Chain()
        self.blobs: Blobs | None = None
        self.now = 1_000_000
        self.leases = self.ticks = self.served = 0
        created = RunCreated(
            **Chain().link(),
            writer="create",
            run=name,
            settings=SETTINGS.model_dump_json(),
            software="test",
            created_ms=self.now,
        )
        self.trainer.previous = digest(self._put("policy", created))

    def _put(self, topic: str, event: Event | bytes, partition: int = 0, key: str = "") -> bytes:
        self.now += 10
        value = self.log.append(topic, partition, event, key, self.now).value
        assert value is not None
        return value

    def partition(self, group: str) -> int:
        return crc(group.encode()) % len(self.parts)

    def _event(self, group: str, event: Event) -> int:
        self._put("trajectories", event, self.partition(group), group)
        return self.log.end("trajectories", self.partition(group)) - 1

    # ------------------------------------------------------------------------------------------------- producers

    def lease(self, group: str, *slots: tuple[int, int], incarnation: str = "w1", unmanaged: bool = False,
              task: str = "") -> None:  # fmt: skip
        """(slot, attempt) pairs; the first lease of a group opens it."""
        opens = group not in self.groups
        lease = Lease(
            group,
            0 if unmanaged else self.leases,
            opens,
            unmanaged,
            "worker",
            incarnation,
            "train",
            0,
            tuple(Assignment(*pair) for pair in slots),
            SPEC,
            Task(task or f"t-{group}", "test", "{}", 1),
            0,
            None,
        )
        if not unmanaged:
            self.leases += 1
            self._put("tasks", lease, key=group)
        offset = self._event(group, lease)
        if opens:
            self.groups[group] = _Group(lease, offset)

    def episode(
        self,
        group: str,
        slot: int,
        reward: float | None,
        attempt: int = 0,
        incarnation: str = "w1",
        outcome: str = "",
        foreign: bool = False,
        tokens: int = TOKENS,
    ) -> None:
        """Start, prompt, two model spans of `tokens` each of the version that is served, end."""
        identity = (group, slot, attempt, incarnation)
        started = EpisodeStarted(*identity, 0, "worker", "{}", 1.0, 1.0, 0, 64, 1, self.now)
        prompt = Span(
            *identity,
            1,
            "prompt",
            0,
            -1,
            PROMPT,
            (),
            None,
            None,
            None,
            {},
            pack_ids(np.arange(PROMPT, dtype=np.int32)),
            None,
            None,
            None,
        )
        spans = [self.span(identity, sequence, tokens) for sequence in (2, 3)]
        success = Outcome.MODEL_SUCCESS if reward else Outcome.MODEL_FAILURE
        ended = EpisodeEnded(
            *identity, 4, outcome or success, "stop", Boundary.NONE, reward, {"total": reward}, (), "a", self.now, {}
        )
        events: list[Event] = [started, prompt, *spans, ended]
        placed = [(self._event(group, event), event) for event in events]
        if not foreign:
            self.groups[group].spans[slot, attempt] = [(o, e) for o, e in placed if isinstance(e, Span)]
            self.groups[group].ends[slot, attempt] = ended

    def span(self, identity: tuple[str, int, int, str], sequence: int, tokens: int = TOKENS) -> Span:
        ids = np.arange(tokens, dtype=np.int32) + sequence
        return Span(
            *identity,
            sequence,
            "model",
            0,
            -1,
            tokens,
            (VersionRun(self.served, tokens),),
            None,
            None,
            None,
            {"decode": 1.0},
            pack_ids(ids),
            pack_float32(np.full(tokens, -0.5, np.float32)),
            None,
            None,
        )

    # ------------------------------------------------------------------------------------------------- assembler

    def _out(self, part: _Partition, cls: type, **fields: object) -> int:
        value = part.chain.extend(cls(**part.chain.link(), **fields))
        self._put("groups", value, part.number)
        return self.log.end("groups", part.number) - 1

    def close(self, group: str, closure: Closure, counted: tuple[int, ...] = (0, 1)) -> None:
        """Close on the newest record of the group's partition."""
        held, part = self.groups.pop(group), self.parts[self.partition(group)]
        cause = self.log.end("trajectories", part.number) - 1
        accounts: Counter[str] = Counter()
        fates, episodes, context = [], [], 0
        for (slot, attempt), ended in sorted(held.ends.items()):
            spans = held.spans[slot, attempt]
            model = sum(span.count for _, span in spans if span.source == "model")
            context += PROMPT
            last = (slot, attempt + 1) not in held.ends
            keep = last and slot in counted
            self._out(
                part,
                AttemptEnded,
                cause=cause,
                group=group,
                slot=slot,
                attempt=attempt,
                incarnation="w1",
                outcome=ended.outcome,
                reason=ended.reason,
                boundary=ended.boundary,
                reward=ended.reward,
                model_tokens=model,
                ends_slot=last,
            )
            trainable = Outcome(ended.outcome).trainable
            account = (
                "superseded"
                if not last
                else "excluded"
                if not trainable
                else "surplus"
                if not keep
                else "candidate"
                if closure == Closure.CANDIDATE
                else "excluded"
            )
            accounts[account] += model
            if last:
                runs = tuple(run for _, span in spans for run in span.versions)
                fates.append(
                    SlotFate(
                        slot,
                        attempt,
                        ended.incarnation,
                        ended.outcome,
                        ended.reason,
                        ended.boundary,
                        ended.reward,
                        keep and trainable,
                        model,
                        PROMPT,
                        runs,
                    )
                )
            if account == "candidate":
                episodes.append(
                    PayloadEpisode(
                        slot,
                        attempt,
                        ended.incarnation,
                        ended.outcome,
                        ended.reward,
                        1.0,
                        tuple(payload_span(s) for _, s in spans),
                        tuple(o for o, _ in spans),
                    )
                )
        payload = GroupPayload(group, held.lease.task, tuple(episodes))
        samples = []
        if closure == Closure.CANDIDATE:
            for chunk in self.blobs.pack(payload) if self.blobs else to_chunks(payload, limit=150):
                value = self._put("samples", chunk, part.number, group)
                samples.append(SampleRef(self.log.end("samples", part.number) - 1, digest(value)))
        fields = dict(
            cause=cause,
            group=group,
            closure=closure,
            purpose="train",
            task=held.lease.task.id,
            opened=held.opened,
            open_ms=500,
            flagged=None,
            slots=tuple(fates),
            accounts=dict(accounts),
            context_tokens=context,
            content_hash=content_hash(payload) if samples else None,
            samples=tuple(samples),
            held_up_by=1,
        )
        offset = self._out(part, GroupClosed, **fields)
        closed = decode(self.log.logs["groups", part.number][-1].value)
        assert isinstance(closed, GroupClosed)
        self.closures[group] = (closed, part.number, offset)
        self.commit(part.number)

    def addendum(self, kind: str, group: str, tokens: int, back: int = 1) -> None:
        """About the record `back` before the end of the group's partition."""
        part = self.parts[self.partition(group)]
        cause = self.log.end("trajectories", part.number) - back
        self._out(part, Addendum, cause=cause, kind=kind, group=group, slot=0, attempt=0, model_tokens=tokens)

    def commit(self, partition: int) -> None:
        part = self.parts[partition]
        records = [r for r in self.log.logs["trajectories", partition] if r.offset >= part.position]
        offsets = np.array([r.offset for r in records], np.int64)
        end = self.log.end("trajectories", partition)
        self._out(
            part,
            Position,
            offset=end,
            low_mark=end,
            clock_ms=0,
            last_ms=self.now,
            start=part.position,
            gaps=pack_int64(np.diff(offsets, prepend=part.position)),
            crcs=pack_int64(np.array([crc(r.value or b"") for r in records], np.int64)),
        )
        part.position = end

    def tick(self, partition: int) -> None:
        self._put("trajectories", Tick(f"assembler-{partition}", self.ticks), partition)
        self.ticks += 1

    def garbage(self, partition: int, value: bytes = b"not avro") -> None:
        self._put("trajectories", value, partition)
        offset = self.log.end("trajectories", partition) - 1
        self._put(
            "deadletter",
            DeadLetter(
                "headrace.synthetic.trajectories",
                partition,
                offset,
                "UndecodableRecord",
                "not a single-object Avro record",
                None,
                value,
            ),
        )

    # -------------------------------------------------------------------------------- coordinator and trainer

    def batch(self, number: int, *names: str, reused: tuple[Reuse, ...] = (), masked: Collection[int] = (),
              settings_offset: int = 0) -> None:  # fmt: skip
        """The tokens of `masked` slots have weight 0."""
        refs, rows = [], []
        for index, name in enumerate(names):
            closed, partition, offset = self.closures[name]
            assert closed.content_hash is not None
            tokens = closed.accounts["candidate"]
            refs.append(GroupRef(name, partition, offset, closed.content_hash, tokens, 0))
            rows += [
                (index, fate.slot, fate.versions[0].version, fate.model_tokens) for fate in closed.slots if fate.counted
            ]
        columns = [pack_int32(np.array(column, np.int32)) for column in zip(*rows, strict=True)]
        weights = np.array([slot not in masked for _, slot, _, _ in rows], np.float32)
        floats = pack_float32(np.zeros(len(rows), np.float32)), pack_float32(weights)
        manifest = Manifest(
            **self.batches.link(),
            batch=number,
            target=number - 1,
            settings_offset=settings_offset,
            decided_ms=self.now,
            groups=tuple(refs),
            positions=tuple(PartitionPosition(p.number, self.log.end("groups", p.number)) for p in self.parts),
            closures_since=len(names),
            segment_group=columns[0],
            segment_slot=columns[1],
            segment_version=columns[2],
            segment_count=columns[3],
            segment_drift=floats[0],
            segment_weight=floats[1],
            reused=reused,
            settings_digest=digest(self.log.logs["policy", 0][settings_offset].value or b""),
        )
        self._put("batches", self.batches.extend(manifest))

    def reuse(self, beside: str, source: str, slot: int = 0, use: int = 1) -> Reuse:
        """The success of a slot of `source`, beside a group."""
        closed, partition, offset = self.closures[source]
        assert closed.content_hash is not None
        ref = GroupRef(source, partition, offset, closed.content_hash, closed.accounts["candidate"], 0)
        tokens = next(fate.model_tokens for fate in closed.slots if fate.slot == slot)
        return Reuse(beside, ref, slot, 0.5, use, tokens)

    def set(self, number: int) -> int:
        """The n-th change of settings by hand; its offset."""
        chain = Chain(number, digest(self.log.logs["policy", 0][0 if number == 0 else -1].value or b""))
        self._put("policy", SettingsChanged(**chain.link(), writer="set", changes="{}", changed_ms=self.now))
        return self.log.end("policy", 0) - 1

    def dispose(self, group: str, disposition: str) -> None:
        _, partition, offset = self.closures[group]
        self._put(
            "batches",
            self.batches.extend(
                Disposed(
                    **self.batches.link(),
                    group=group,
                    partition=partition,
                    offset=offset,
                    disposition=disposition,
                    reason="lag",
                    target=1,
                )
            ),
        )

    def version(self, number: int, masked: int = 0, lost: int = 0) -> None:
        """Train batch `number` (0: initial weights) but for `masked` and `lost` tokens of its first group; publish."""
        counts, reused, offset, value = [], list[GroupCount](), -1, b""
        if number:
            record, manifest = next(
                (r, e)
                for r in self.log.logs["batches", 0]
                if isinstance(e := decode(r.value), Manifest) and e.batch == number
            )
            offset, value = record.offset, record.value or b""
            for index, ref in enumerate(manifest.groups):
                out = masked if index == 0 else 0
                counts.append(GroupCount(ref.group, ref.model_tokens - out - (0 if index else lost), out))
            reused = [GroupCount(one.group, one.model_tokens - lost, 0) for one in manifest.reused]
        served = digest(b"weights %d" % number)
        version = Version(
            **self.trainer.link(),
            writer="trainer",
            version=number,
            parent=number - 1,
            batch=number or -1,
            batch_offset=offset,
            batch_digest=digest(value) if number else b"",
            hash_algorithm="test",
            served_hash=served,
            train_hash=served,
            rho=0.01,
            rho_tokens=256,
            groups=tuple(counts),
            metrics={"wait_s": 0.5, "step_s": 1.5},
            fingerprint="{}",
            committed_ms=self.now,
            reused=tuple(reused),
        )
        self._put("policy", self.trainer.extend(version))
        chunks = []
        for index in range(2 if number else 0):
            data = b"delta %d %d" % (number, index)
            check = xxhash.xxh3_128_digest(struct.pack("<qqq", number, index, 2) + b"delta\0" + data)
            self._put("weights", WeightChunk(number, "delta", index, 2, check, data))
            chunks.append(self.log.end("weights", 0) - 1)
        base = digest(b"weights %d" % (number - 1)) if number else b""
        self._put(
            "policy",
            self.trainer.extend(
                Publication(
                    **self.trainer.link(),
                    writer="trainer",
                    version=number,
                    kind="delta" if number else "path",
                    base=number - 1,
                    base_hash=base,
                    hash_algorithm="test",
                    served_hash=served,
                    path=None if number else "/models/tiny",
                    chunks=tuple(chunks),
                    size=100,
                    changed=10,
                    elements=1000,
                    published_ms=self.now,
                )
            ),
        )
        self.served = number


def synthetic_run() -> SyntheticRun:
    """Two committed versions, a batch that waits, and every closure, disposition and account."""
    run = SyntheticRun()
    run.version(0)
    slots = ((0, 0), (1, 0))

    def candidate(name: str) -> None:
        run.lease(name, *slots)
        run.episode(name, 0, 1.0)
        run.episode(name, 1, 0.0)
        run.close(name, Closure.CANDIDATE)

    # Plain, and with an attempt that the infrastructure lost.
    candidate("g0")
    run.lease("g1", *slots)
    run.episode("g1", 0, 1.0)
    run.episode("g1", 1, None, outcome=Outcome.INFRA_FAILURE)
    run.lease("g1", (1, 1))
    run.episode("g1", 1, 0.0, attempt=1)
    run.close("g1", Closure.CANDIDATE)
    run.batch(1, "g0", "g1")
    run.version(1, masked=3)

    # Without a batch: nothing to compare, too few left.
    run.lease("g2", *slots)
    run.episode("g2", 0, 1.0)
    run.episode("g2", 1, 1.0)
    run.close("g2", Closure.ZERO_VARIANCE)
    run.lease("g3", *slots)
    run.episode("g3", 0, None, outcome=Outcome.INFRA_FAILURE)
    run.episode("g3", 1, None, outcome=Outcome.UNKNOWN)
    run.close("g3", Closure.TOO_FEW_SURVIVORS, counted=())

    # A reserve that isn't needed; a repeated event; a writer without a lease.
    run.lease("g4", *slots, (2, 0))
    for slot in range(3):
        run.episode("g4", slot, float(slot == 0))
    run.close("g4", Closure.CANDIDATE)
    run.lease("g5", *slots)
    run.episode("g5", 0, 1.0)
    run._event("g5", run.groups["g5"].spans[0, 0][1][1])
    run.addendum("duplicate", "g5", TOKENS)
    run.episode("g5", 1, 1.0, incarnation="zombie", foreign=True)
    for back in range(5, 0, -1):
        run.addendum("foreign", "g5", TOKENS if back in (2, 3) else 0, back)
    run.episode("g5", 1, 0.0)
    run.close("g5", Closure.CANDIDATE)
    run.batch(2, "g4", "g5")
    run.version(2)

    # After the closure; of a group that nobody opened; garbage; time passing.
    run._event("g2", run.span(("g2", 0, 0, "w1"), 9))
    run.addendum("late", "g2", TOKENS)
    run._event("nobody", run.span(("nobody", 0, 0, "w1"), 0))
    run.addendum("late", "nobody", TOKENS)
    for p in range(2):
        run.garbage(p)
        run.tick(p)
        run.commit(p)

    # The coordinator's other fates, a batch that waits, a candidate undecided, shadow mode, a group still open.
    candidate("g6")
    run.dispose("g6", "stale")
    candidate("g7")
    run.dispose("g7", "leftover")
    candidate("g8")
    candidate("g9")
    run.batch(3, "g8", "g9")
    candidate("g10")
    run.lease("u0", *slots, unmanaged=True)
    run.episode("u0", 0, 1.0)
    run.episode("u0", 1, 0.0)
    run.close("u0", Closure.UNMANAGED)
    run.lease("g11", *slots)
    run.episode("g11", 0, 1.0)
    return run


__all__ = ["EPISODE_TOKENS", "SETTINGS", "SPEC", "TOKENS", "SyntheticRun", "synthetic_run"]
