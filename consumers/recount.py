"""The ledger's own count of a partition of `trajectories`: which records there are, and each token's account.

It knows nothing of how the assembler folds: it reads the raw events once, in order, with the closures beside it, and
asks of each record: was its group open, closed, or never opened? Was its writer leased? Has it been here before? The
answers must be those that `groups` gives.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schemas.codec import decode
from headrace.schemas.columns import unpack_int64
from headrace.schemas.errors import RecordError
from headrace.schemas.events import (
    Addendum,
    EpisodeEnded,
    EpisodeStarted,
    Exhausted,
    GroupClosed,
    Kinds,
    Lease,
    Position,
    Span,
    Tick,
)
from headrace.schemas.hashes import crc, digest
from headrace.schemas.outcomes import Account, Closure, Outcome, Source
from headrace.schemas.topics import TRAJECTORIES
from headrace.streams.log.reader import Record

from .facts import Fact, Failures, address

Attempt = tuple[str, int, int, str]  # group, slot, attempt, incarnation


def trainable(outcome: str) -> bool:
    """Also of an altered record, whose outcome may be no outcome."""
    return outcome in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


@dataclass(slots=True)
class _Group:
    """What the raw events say of a group whose opening record is retained."""

    opening: Lease
    offset: int
    lessees: dict[tuple[int, int], str] = field(default_factory=dict)  # of (slot, attempt)
    tokens: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (slot, attempt)
    context: int = 0


@dataclass(slots=True)
class Recount:
    """Feed it every retained record, then `finish`."""

    partition: int
    first: int
    closures: Mapping[str, Fact[GroupClosed]]
    addenda: Sequence[Fact[Addendum]]
    positions: Sequence[Fact[Position]]
    failures: Failures

    groups: dict[str, _Group] = field(default_factory=dict)
    leases: list[Fact[Lease]] = field(default_factory=list)
    unleased: dict[str, str] = field(default_factory=dict)  # of a group: its first event that no lease here allows
    refused: list[Record] = field(default_factory=list)  # undecodable or invalid: owed a dead letter
    logged: int = 0  # model tokens of valid records
    repeated: int = 0  # of these, in records that repeat an earlier one
    duplicates: int = 0  # repetitions that no record of `groups` has counted yet
    unsettled: Counter[Account] = field(default_factory=Counter)  # decided here, in no record of `groups` yet
    _expected: dict[int, tuple[int, Fact[Position]]] = field(default_factory=dict)  # offset: crc, and who says so
    _added: dict[int, tuple[str, int]] = field(default_factory=dict)  # offset: kind and tokens of an addendum due
    _seen: dict[Attempt, dict[int, bytes]] = field(default_factory=dict)
    _ended: set[Attempt] = field(default_factory=set)
    _ticks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fact in self.positions:
            try:
                crcs = unpack_int64(fact.event.crcs).tolist()
                gaps = unpack_int64(fact.event.gaps).tolist()
                offsets = itertools.islice(itertools.accumulate(gaps, initial=fact.event.start), 1, None)
                for offset, check in zip(offsets, crcs, strict=True):
                    if offset >= self.first:
                        self._expected[offset] = (check, fact)
            except ValueError:
                self.failures.add(fact, "its list of records is damaged")

    @property
    def position(self) -> int:
        """Everything below is accounted for in `groups`."""
        return self.positions[-1].event.offset if self.positions else 0

    def feed(self, record: Record) -> None:
        where = address(TRAJECTORIES, self.partition, record.offset)
        if record.offset < self.position:
            check, _ = self._expected.pop(record.offset, (None, None))
            if check is None:
                self.failures.add(where, f"was not there when {self.positions[-1]} accounted for all below")
            elif check != crc(record.value or b""):
                self.failures.add(where, "was altered: its checksum is not the one that `groups` holds")
        try:
            event = decode(record.value)
            if isinstance(event, Span):
                event.check()
        except RecordError:
            self.refused.append(record)
            return
        match event:
            case Lease():
                self._lease(event, record)
            case EpisodeStarted() | Span() | EpisodeEnded():
                self._event(event, record, where)
            case Tick():
                self._tick(event, record, where)
            case Exhausted():
                pass
            case _:
                assert not isinstance(event, Kinds.BY_TOPIC[TRAJECTORIES])
                self.refused.append(record)

    def _lease(self, event: Lease, record: Record) -> None:
        place = (TRAJECTORIES, self.partition, record.offset)
        self.leases.append(Fact(*place, record.timestamp_ms, digest(record.value or b""), event))
        if event.opens and event.group not in self.groups:
            self.groups[event.group] = _Group(event, record.offset)
        if group := self.groups.get(event.group):
            for one in event.assignments:
                if 0 <= one.slot < group.opening.spec.slots:
                    group.lessees.setdefault((one.slot, one.attempt), event.incarnation)

    def _tick(self, event: Tick, record: Record, where: str) -> None:
        last = self._ticks.get(event.writer)
        if record.offset >= self.position and last is not None and event.number > last + 1:
            self.failures.add(where, f"tick {event.number} of {event.writer} after {last}: ticks before it are missing")
        self._ticks[event.writer] = event.number

    def _event(self, event: EpisodeStarted | Span | EpisodeEnded, record: Record, where: str) -> None:
        model = event.count if isinstance(event, Span) and event.source == Source.MODEL else 0
        context = event.count if isinstance(event, Span) and event.source != Source.MODEL else 0
        self.logged += model
        kind = self._kind(event, record)
        if kind is None:
            self._check_sequence(event, record, where)
            group = self.groups.get(event.group)
            if group is not None:
                group.tokens[event.slot, event.attempt] += model
                group.context += context
            return
        if kind in ("foreign", "late"):
            self.unleased.setdefault(event.group, where)
        if kind in ("duplicate", "conflict"):
            self.repeated += model
        if record.offset < self.position:
            self._added[record.offset] = (kind, model)
        elif kind == "duplicate":
            self.duplicates += 1
        elif kind == "late":
            known = event.group in self.closures or event.group in self.groups
            self.unsettled[Account.LATE if known else Account.FOREIGN] += model
        elif kind == "foreign":
            self.unsettled[Account.FOREIGN] += model

    def _kind(self, event: EpisodeStarted | Span | EpisodeEnded, record: Record) -> str | None:
        """None: it belongs to its group. Else what an addendum calls it."""
        closure, group = self.closures.get(event.group), self.groups.get(event.group)
        if closure is not None and not closure.event.opened <= record.offset <= closure.event.cause:
            return "late"
        if group is None:  # opened below what is retained, or never
            return None if closure is not None else "late"
        if group.lessees.get((event.slot, event.attempt)) != event.incarnation:
            return "foreign"
        attempt = (event.group, event.slot, event.attempt, event.incarnation)
        seen = self._seen.setdefault(attempt, {})
        value = digest(record.value or b"")
        if event.sequence in seen:
            return "duplicate" if seen[event.sequence] == value else "conflict"
        if attempt in self._ended:
            return "late"
        seen[event.sequence] = value
        if isinstance(event, EpisodeEnded):
            self._ended.add(attempt)
        return None

    def _check_sequence(self, event: EpisodeStarted | Span | EpisodeEnded, record: Record, where: str) -> None:
        if record.offset < self.position or event.sequence == 0:
            return
        seen = self._seen.get((event.group, event.slot, event.attempt, event.incarnation))
        if seen is not None and event.sequence - 1 not in seen:
            self.failures.add(where, f"event {event.sequence} of slot {event.slot}, attempt {event.attempt} of "
                                     f"{event.group}: the one before it is missing")  # fmt: skip

    # ------------------------------------------------------------------------------------------------- the result

    def finish(self) -> None:
        """Compare what was counted with what `groups` says."""
        for offset, (_, position) in self._expected.items():
            self.failures.add(address(TRAJECTORIES, self.partition, offset), f"is missing: {position} accounts for it")
        recorded = {fact.event.cause: fact for fact in self.addenda if fact.event.cause >= self.first}
        for offset, (kind, tokens) in self._added.items():
            fact = recorded.pop(offset, None)
            if fact is None:
                where = address(TRAJECTORIES, self.partition, offset)
                self.failures.add(where, f"{kind}, but no addendum of `groups` says so")
            elif (fact.event.kind, fact.event.model_tokens) != (kind, tokens):
                said = f"{fact.event.kind} with {fact.event.model_tokens} tokens"
                self.failures.add(fact, f"{said}; counted: {kind}, {tokens}")
        for extra in recorded.values():
            if self._retained(extra.event.group):
                where = address(TRAJECTORIES, self.partition, extra.event.cause)
                self.failures.add(extra, f"{extra.event.kind} because of {where}, which is not")
        for name, group in self.groups.items():
            if name in self.closures:
                self._compare(group, self.closures[name])
            else:
                self.unsettled[Account.OPEN] += sum(group.tokens.values())

    def _retained(self, group: str) -> bool:
        closure = self.closures.get(group)
        return closure is None or closure.event.opened >= self.first

    def _compare(self, group: _Group, fact: Fact[GroupClosed]) -> None:
        closure = fact.event
        if group.offset != closure.opened:
            self.failures.add(fact, f"opened at {closure.opened}; its opening record is at {group.offset}")
        if group.context != closure.context_tokens:
            self.failures.add(fact, f"{closure.context_tokens} context tokens; counted: {group.context}")
        counted: Counter[str] = Counter()
        fates = {fate.slot: fate for fate in closure.slots}
        for (slot, attempt), tokens in group.tokens.items():
            fate = fates.get(slot)
            if fate is None or attempt != fate.attempt:
                counted[Account.SUPERSEDED] += tokens
            elif not trainable(fate.outcome):
                counted[Account.EXCLUDED] += tokens
            elif not fate.counted:
                counted[Account.SURPLUS] += tokens
            else:
                counted["candidate" if closure.closure == Closure.CANDIDATE else Account.EXCLUDED] += tokens
        for fate in closure.slots:
            if fate.model_tokens != (n := group.tokens[fate.slot, fate.attempt]):
                self.failures.add(fact, f"{fate.model_tokens} model tokens in slot {fate.slot}; counted: {n}")
        said = {name: n for name, n in closure.accounts.items() if n}
        if said != (own := {str(name): n for name, n in counted.items() if n}):
            self.failures.add(fact, f"accounts {said} of {closure.group}; counted: {own}")
