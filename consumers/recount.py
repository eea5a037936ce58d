"""The ledger's own count of a partition of `trajectories`: which records there are, and each token's account.

It knows nothing of how the assembler folds: it reads the raw events once, in order and in step with the commits of
`groups`, and asks of each record: was its group open, closed, or never opened? Was its writer leased? Has it been here
before? The answers must be those that `groups` gives. It remembers open groups only: a group's events are forgotten
with its closure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

from headrace.schemas.codec import decode
from headrace.schemas.columns import unpack_int64
from headrace.schemas.errors import RecordError
from headrace.schemas.events import (
    Addendum,
    AttemptEnded,
    EpisodeEnded,
    EpisodeStarted,
    Exhausted,
    GroupClosed,
    Kinds,
    Lease,
    Position,
    SlotFate,
    Span,
    Tick,
)
from headrace.schemas.hashes import crc, digest
from headrace.schemas.outcomes import Account, Closure, Outcome, Purpose, Source
from headrace.schemas.topics import TRAJECTORIES
from headrace.streams.log.reader import Record

from .accounts import Accounts
from .facts import Fact, Failures, address
from .index import Index

Event = EpisodeStarted | Span | EpisodeEnded


def trainable(outcome: str) -> bool:
    """Also of an altered record, whose outcome may be no outcome."""
    return outcome in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


@dataclass(slots=True)
class _Group:
    """What the raw events say of a group that is open."""

    opening: Lease
    offset: int
    lessees: dict[tuple[int, int], str] = field(default_factory=dict)  # of (slot, attempt)
    tokens: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (slot, attempt)
    context: int = 0
    seen: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # of (slot, attempt): hash by sequence
    ended: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True)
class Commit:
    """The records of one commit of the assembler, up to its position; without one it is the end of a damaged log."""

    position: Fact[Position] | None = None
    closures: list[Fact[GroupClosed]] = field(default_factory=list)
    addenda: list[Fact[Addendum]] = field(default_factory=list)
    ends: list[AttemptEnded] = field(default_factory=list)


def by_commit(facts: Iterable[Fact[Any]]) -> Iterator[Commit]:
    """Records of a partition of `groups`, commit by commit."""
    commit = Commit()
    for fact in facts:
        match fact.event:
            case Position():
                commit.position = fact
                yield commit
                commit = Commit()
            case GroupClosed():
                commit.closures.append(fact)
            case Addendum():
                commit.addenda.append(fact)
            case AttemptEnded() as ended:
                commit.ends.append(ended)
    if commit.closures or commit.addenda or commit.ends:
        yield commit


@dataclass(slots=True)
class Recount:
    """Give it each commit of the partition of `groups`, in order; then `finish`."""

    partition: int
    first: int  # what lies below is no longer retained
    records: Iterator[Record]  # those of the partition
    index: Index
    accounts: Accounts
    failures: Failures
    letters: bool = True  # whether each dead letter is still there

    open: dict[str, _Group] = field(default_factory=dict)
    logged: int = 0  # model tokens of valid records
    repeated: int = 0  # of these, in records that repeat an earlier one
    duplicates: int = 0  # repetitions that no record of `groups` has counted yet
    _next: Record | None = None
    _closures: list[Fact[GroupClosed]] = field(default_factory=list)  # of this commit, by cause, still to come
    _addenda: dict[int, Fact[Addendum]] = field(default_factory=dict)  # of this commit, by cause
    # What can't be judged yet, of a group whose opening record was not seen: offset, address and complaint. Its closure
    # may say that it was opened below what is retained.
    _unopened: dict[str, tuple[int, object, str]] = field(default_factory=dict)
    _ticks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next = next(self.records, None)

    # ------------------------------------------------------------------------------------------------- commits

    def commit(self, commit: Commit) -> None:
        """All input below its position is what that lists, and led to these closures and addenda."""
        self._closures = sorted(commit.closures, key=lambda fact: fact.event.cause, reverse=True)
        self._addenda = {fact.event.cause: fact for fact in commit.addenda if fact.event.cause >= self.first}
        if commit.position is not None:
            self._read(commit.position)
        while self._closures:
            self._close(self._closures.pop())
        for cause, fact in self._addenda.items():
            self._fail("recount", fact, f"{fact.event.kind} because of {self._at(cause)}, which is not")

    def finish(self) -> None:
        """The rest of the records, which no commit accounts for yet."""
        while self._next is not None:
            self._feed(self._take(), settled=False)
        for _, where, complaint in self._unopened.values():
            self._fail("recount", where, complaint)
        self.index.add_opened(self.open)
        for group in self.open.values():
            for tokens in group.tokens.values():
                self.accounts.count(Account.OPEN, tokens, tokens, "group open")

    def _read(self, position: Fact[Position]) -> None:
        listed, at = self._listed(position), 0
        while self._next is not None and self._next.offset < position.event.offset:
            record = self._take()
            while at < len(listed) and listed[at][0] < record.offset:
                self._missing(listed[at][0], position)
                at += 1
            if at == len(listed) or listed[at][0] != record.offset:
                said = f"was not there when {position} accounted for all below it"
                self._fail("input record", self._at(record.offset), said)
            else:
                if listed[at][1] != crc(record.value or b""):
                    said = f"was altered: its checksum is not the one in {position}"
                    self._fail("input record", self._at(record.offset), said)
                at += 1
            self._feed(record, settled=True)
        for offset, _ in listed[at:]:
            self._missing(offset, position)

    def _take(self) -> Record:
        record = self._next
        assert record is not None
        self._next = next(self.records, None)
        return record

    def _listed(self, position: Fact[Position]) -> list[tuple[int, int]]:
        """(offset, checksum) of the retained records that the position lists."""
        try:
            checks = unpack_int64(position.event.crcs).tolist()
            gaps = unpack_int64(position.event.gaps).tolist()
            offsets = itertools.islice(itertools.accumulate(gaps, initial=position.event.start), 1, None)
            return [(offset, check) for offset, check in zip(offsets, checks, strict=True) if offset >= self.first]
        except ValueError:
            self._fail("position", position, "its list of records is damaged")
            return []

    def _missing(self, offset: int, position: Fact[Position]) -> None:
        self._fail("input record", self._at(offset), f"is missing: {position} accounts for it")

    # ------------------------------------------------------------------------------------------------- records

    def _feed(self, record: Record, *, settled: bool) -> None:
        while self._closures and self._closures[-1].event.cause < record.offset:
            self._close(self._closures.pop())
        try:
            event = decode(record.value)
            if isinstance(event, Span):
                event.check()
        except RecordError:
            self._refused(record, settled)
            return
        match event:
            case Lease():
                self._lease(event, record)
            case EpisodeStarted() | Span() | EpisodeEnded():
                self._event(event, record, settled)
            case Tick():
                self._tick(event, record.offset, settled)
            case Exhausted():
                pass
            case _:
                assert not isinstance(event, Kinds.BY_TOPIC[TRAJECTORIES])
                self._refused(record, settled)

    def _refused(self, record: Record, settled: bool) -> None:
        """A record that the assembler could not use has a dead letter, as long as those are kept."""
        if settled and self.letters and not self.index.has_letter(self.partition, record.offset):
            self._fail("dead letter", self._at(record.offset), "can't be used, but no dead letter says so")

    def _lease(self, event: Lease, record: Record) -> None:
        if not event.unmanaged:
            self.index.add_lease(event.number, self.partition, record.offset, digest(record.value or b""))
        if event.opens and event.group not in self.open:
            self.open[event.group] = _Group(event, record.offset)
        if group := self.open.get(event.group):
            for one in event.assignments:
                if 0 <= one.slot < group.opening.spec.slots:
                    group.lessees.setdefault((one.slot, one.attempt), event.incarnation)

    def _tick(self, event: Tick, offset: int, settled: bool) -> None:
        last = self._ticks.get(event.writer)
        if not settled and last is not None and event.number > last + 1:
            said = f"tick {event.number} of {event.writer} after {last}: ticks before it are missing"
            self._fail("input record", self._at(offset), said)
        self._ticks[event.writer] = event.number

    def _event(self, event: Event, record: Record, settled: bool) -> None:
        model = event.count if isinstance(event, Span) and event.source == Source.MODEL else 0
        context = event.count if isinstance(event, Span) and event.source != Source.MODEL else 0
        self.logged += model
        group = self.open.get(event.group)
        kind = "late" if group is None else self._kind(group, event, record, settled)
        if group is not None and kind is None:
            group.tokens[event.slot, event.attempt] += model
            group.context += context
            return
        assert kind is not None
        if kind in ("duplicate", "conflict"):
            self.repeated += model
        if settled:
            self._said(event, kind, model, record.offset)
        elif kind == "duplicate":
            self.duplicates += 1
        elif kind == "late":
            count_late(event.group, model, self.open, self.index, self.accounts)
        elif kind == "foreign":
            self.accounts.count(Account.FOREIGN, model, model, episodes=0)

    def _kind(self, group: _Group, event: Event, record: Record, settled: bool) -> str | None:
        """None: it belongs to its group, which is open. Else what an addendum calls it."""
        attempt = (event.slot, event.attempt)
        if group.lessees.get(attempt) != event.incarnation:
            return "foreign"
        seen = group.seen.setdefault(attempt, {})
        check = xxh3_64_intdigest(record.value or b"")
        if event.sequence in seen:
            return "duplicate" if seen[event.sequence] == check else "conflict"
        if attempt in group.ended:
            return "late"
        seen[event.sequence] = check
        if isinstance(event, EpisodeEnded):
            group.ended.add(attempt)
        if not settled and event.sequence and event.sequence - 1 not in seen:
            said = f"event {event.sequence} of slot {event.slot}, attempt {event.attempt} of {event.group}"
            self._fail("input record", self._at(record.offset), f"{said}: the one before it is missing")
        return None

    def _said(self, event: Event, kind: str, model: int, offset: int) -> None:
        """Compare with the addendum that the commit should have of this record."""
        fact = self._addenda.pop(offset, None)
        where: object = fact
        if fact is None:
            where = self._at(offset)
            complaint = f"{kind}, but no addendum of `groups` says so"
        elif (fact.event.kind, fact.event.model_tokens) == (kind, model):
            return
        else:
            complaint = f"{fact.event.kind} with {fact.event.model_tokens} tokens; counted: {kind}, {model}"
        if event.group in self.open or (fact is not None and not self.first):
            self._fail("recount", where, complaint)
        else:
            self._unopened.setdefault(event.group, (offset, where, complaint))

    # ------------------------------------------------------------------------------------------------- closures

    def _close(self, fact: Fact[GroupClosed]) -> None:
        event = fact.event
        offset = self._unopened.get(event.group, (-1,))[0]
        if event.opened <= offset <= event.cause:
            del self._unopened[event.group]
        group = self.open.pop(event.group, None)
        if group is not None:
            self._compare(group, fact)

    def _compare(self, group: _Group, fact: Fact[GroupClosed]) -> None:
        closure = fact.event
        if group.offset != closure.opened:
            self._fail("recount", fact, f"opened at {closure.opened}; its opening record is at {group.offset}")
        if group.context != closure.context_tokens:
            self._fail("recount", fact, f"{closure.context_tokens} context tokens; counted: {group.context}")
        counted: Counter[str] = Counter()
        fates = {fate.slot: fate for fate in closure.slots}
        for (slot, attempt), tokens in group.tokens.items():
            fate = fates.get(slot)
            if fate is None or attempt != fate.attempt:
                counted[Account.SUPERSEDED] += tokens
            elif not trainable(fate.outcome) or fate.excluded:
                counted[Account.EXCLUDED] += tokens
            elif not fate.counted:
                counted[Account.SURPLUS] += tokens
            else:
                counted["candidate" if closure.closure == Closure.CANDIDATE else Account.EXCLUDED] += tokens
        for fate in closure.slots:
            if fate.model_tokens != (n := group.tokens[fate.slot, fate.attempt]):
                self._fail("recount", fact, f"{fate.model_tokens} model tokens in slot {fate.slot}; counted: {n}")
            due = self._excludes(group.opening, fate)
            if fate.excluded != due or (due and fate.counted):
                self._fail("recount", fact, f"excluded={fate.excluded} of slot {fate.slot} of {closure.group}, which "
                           f"the rules of its opening record and its suspicions make {due}")  # fmt: skip
        said = {name: n for name, n in closure.accounts.items() if n}
        if said != (own := {str(name): n for name, n in counted.items() if n}):
            self._fail("recount", fact, f"accounts {said} of {closure.group}; counted: {own}")

    @staticmethod
    def _excludes(opening: Lease, fate: SlotFate) -> bool:
        trains = opening.purpose == Purpose.TRAIN and not opening.unmanaged
        return trains and any(one.sign in opening.spec.exclude for one in fate.suspicions)

    def _at(self, offset: int) -> str:
        return address(TRAJECTORIES, self.partition, offset)

    @property
    def _fail(self) -> Callable[..., None]:
        return self.failures.add


def count_late(group: str, tokens: int, open_groups: Iterable[str], index: Index, accounts: Accounts) -> None:
    """The assembler can't know whether a group that isn't open ever was: *late* if it was, else *foreign*."""
    if group in open_groups or index.closure(group) is not None:
        accounts.count(Account.LATE, tokens, tokens, episodes=0)
    else:
        index.add_late(group, tokens)
