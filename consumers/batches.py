"""What the coordinator decided: each candidate has at most one disposition, which names it as it is.

`batches` is read in step with `policy`: a manifest is remembered until the version that was trained from it is there.
Successes that are used again, by reference, are proven here too, and counted beside the accounts: their tokens were
logged once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.columns import unpack_float32, unpack_int32
from headrace.schemas.events import Disposed, GroupCount, Manifest, Reuse
from headrace.schemas.outcomes import Account, Closure, Disposition
from headrace.schemas.topics import BATCHES, GROUPS, POLICY

from .accounts import Accounts, spread
from .facts import ChainCheck, Fact, Failures, address, read_facts
from .givenup import ROLLED_BACK
from .index import Closed, ClosedSlot, Index
from .source import LogSource

OPEN = "open"


@dataclass(frozen=True, slots=True)
class Batch:
    """A manifest that waits for its version."""

    batch: int
    offset: int
    digest: bytes
    held: dict[str, int]  # model tokens by group
    groups: tuple[tuple[Closed, dict[int, int]], ...]  # with tokens of weight 0 by slot
    reused: Counter[str]  # model tokens by the group beside which a success is used


@dataclass(slots=True)
class Batches:
    """Read up to an offset by `advance`; at last `finish`."""

    source: LogSource
    settings: Mapping[int, bytes]  # offset and digest of the settings records of `policy`, as far as that has been read
    index: Index
    accounts: Accounts
    failures: Failures
    waiting: dict[int, Batch] = field(default_factory=dict)  # by offset of the manifest
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)  # candidates, by closure and disposition
    reused: Counter[str] = field(default_factory=Counter)  # model tokens: trained, masked, open
    reuses: int = 0
    manifests: int = 0
    _due: int = 1
    _next: Fact[Any] | None = None
    _facts: Iterator[Fact[Any]] = iter(())

    def __post_init__(self) -> None:
        self._facts = self._checked()
        self._next = next(self._facts, None)

    def _checked(self) -> Iterator[Fact[Any]]:
        chain = ChainCheck(self.failures)
        for fact in read_facts(self.source, BATCHES, 0, self.failures):
            chain.feed(fact)
            yield fact

    def advance(self, offset: int | None = None) -> None:
        """Through the record at `offset`; None: to the end."""
        while self._next is not None and (offset is None or self._next.offset <= offset):
            fact, self._next = self._next, next(self._facts, None)
            if isinstance(fact.event, Disposed):
                self._disposed(fact)
            else:
                self._manifest(fact)

    def commit(self, batch: Batch, counts: dict[str, GroupCount], reused: dict[str, GroupCount], *,
               given_up: bool = False) -> None:  # fmt: skip
        """A version was trained from it: `counts` say what became of the tokens. `given_up`: by a rollback later, so
        that nothing of them is in the weights that were gone on from."""
        del self.waiting[batch.offset]
        for closed, masked in batch.groups:
            if count := counts.get(closed.name):
                if given_up:
                    self._exclude(closed, ROLLED_BACK)
                else:
                    self._trained(closed, masked, count)
        for group in batch.reused:
            if count := reused.get(group):
                if given_up:
                    self.reused[Account.EXCLUDED] += count.trained + count.masked
                    continue
                self.reused[Account.TRAINED] += count.trained
                self.reused[Account.MASKED] += count.masked

    def finish(self) -> None:
        """What waits is open."""
        self.advance()
        for batch in self.waiting.values():
            for closed, _ in batch.groups:
                self._count_open(closed, "batch not committed")
            self.reused[Account.OPEN] += batch.reused.total()
        for closed in self.index.undecided(Closure.CANDIDATE):
            self.groups[Closure.CANDIDATE, OPEN] += 1
            self._count_open(closed, "candidate undecided")

    # ------------------------------------------------------------------------------------------------- decisions

    def _disposed(self, fact: Fact[Disposed]) -> None:
        event = fact.event
        if event.disposition not in (Disposition.STALE, Disposition.LEFTOVER, Disposition.SUSPICIOUS):
            self._fail(fact, f"{event.disposition!r} is not a disposition of a group without a batch")
            return
        closed = self._decide(fact, event.group, (event.partition, event.offset), event.disposition)
        if closed is not None:
            self._exclude(closed, event.disposition)

    def _decide(self, fact: Fact[Any], group: str, place: tuple[int, int], disposition: str) -> Closed | None:
        """The candidate, if this is its first decision."""
        closed = self.index.closure(group)
        if closed is None or (closed.partition, closed.offset) != place:
            self._fail(fact, f"names {address(GROUPS, *place)} as the closure of {group}, which it is not")
        elif closed.closure != Closure.CANDIDATE:
            self._fail(fact, f"{disposition} {group}, which {closed} closed as {closed.closure}")
        elif closed.decided is not None:
            self._fail(fact, f"{disposition} {group}, which {closed.decided} decided before")
        else:
            self.index.decide(group, str(fact))
            self.groups[closed.closure, str(disposition)] += 1
            return closed
        return None

    def _manifest(self, fact: Fact[Manifest]) -> None:
        event = fact.event
        self.manifests += 1
        if (event.batch, event.target) != (self._due, self._due - 1):
            self._fail(fact, f"batch {event.batch} for version {event.target} where batch {self._due} is due")
        self._due = event.batch + 1
        # One that was decided after the snapshot of `policy` may name a record beyond it.
        where = address(POLICY, 0, event.settings_offset)
        if event.settings_offset in self.settings:
            if event.settings_digest not in (None, self.settings[event.settings_offset]):
                self._fail(fact, f"decided under settings that {where} doesn't hold any more: it was altered")
        elif fact.offset < self.source.settled(BATCHES, 0):
            self._fail(fact, f"decided under {where}, which holds no settings, or is missing")
        segments = self._segments(fact)
        groups = []
        for number, ref in enumerate(event.groups):
            closed = self._decide(fact, ref.group, (ref.partition, ref.offset), Disposition.BATCHED)
            if closed is None:
                continue
            if ref.content_hash != closed.content_hash:
                self._fail(fact, f"holds another content hash of {ref.group} than {closed}")
            counted, masked = segments.get(number, (0, {}))
            if not closed.tokens == ref.model_tokens == counted:
                self._fail(fact, f"{ref.model_tokens} model tokens of {ref.group}, {counted} in segments; {closed} "
                                 f"holds {closed.tokens}")  # fmt: skip
            groups.append((closed, masked))
        reused: Counter[str] = Counter()
        for reuse in event.reused:
            self._check_reuse(fact, reuse)
            reused[reuse.group] += reuse.model_tokens
            self.reuses += 1
        held = {ref.group: ref.model_tokens for ref in event.groups}
        self.waiting[fact.offset] = Batch(event.batch, fact.offset, fact.digest, held, tuple(groups), reused)

    def _segments(self, fact: Fact[Manifest]) -> dict[int, tuple[int, dict[int, int]]]:
        """By index into the manifest's groups: model tokens in its segments, and of these, by slot, of weight 0."""
        event, found = fact.event, dict[int, tuple[int, dict[int, int]]]()
        try:
            columns = [unpack_int32(c).tolist() for c in (event.segment_group, event.segment_slot, event.segment_count)]
            rows = zip(*columns, unpack_float32(event.segment_weight).tolist(), strict=True)
            for number, slot, count, weight in rows:
                tokens, masked = found.setdefault(number, (0, {}))
                if weight <= 0:
                    masked[slot] = masked.get(slot, 0) + count
                found[number] = (tokens + count, masked)
        except ValueError:
            self._fail(fact, "its segment columns are damaged")
        return found

    # ------------------------------------------------------------------------------------------------- accounts

    def _trained(self, closed: Closed, masked: dict[int, int], count: GroupCount) -> None:
        slots = [slot for slot in closed.slots if slot.counted]
        known = [min(slot.model_tokens, masked.get(slot.slot, 0)) for slot in slots]
        if sum(known) > count.masked:  # the trainer masks less than the manifest would have it
            known = spread(count.masked, known)
        left = [slot.model_tokens - m for slot, m in zip(slots, known, strict=True)]
        out = [m + more for m, more in zip(known, spread(count.masked - sum(known), left), strict=True)]
        trained = spread(count.trained, [slot.model_tokens - m for slot, m in zip(slots, out, strict=True)])
        shares: dict[int, int] = {}
        for slot, hidden, used in zip(slots, out, trained, strict=True):
            self.accounts.count(Account.TRAINED, used, slot.model_tokens, episodes=int(used > 0))
            self.accounts.count(Account.MASKED, hidden, slot.model_tokens, episodes=int(used == 0))
            shares[slot.slot] = used
        # Of a damaged log, in which not even the sums agree: nothing is lost from the account.
        self.accounts.count(Account.TRAINED, count.trained - sum(trained), None, episodes=0)
        self.accounts.count(Account.MASKED, count.masked - sum(out), None, episodes=0)
        self._settle(closed, shares, str(Account.MASKED))

    def _exclude(self, closed: Closed, reason: str) -> None:
        for slot in closed.slots:
            if slot.counted:
                self.accounts.count(Account.EXCLUDED, slot.model_tokens, slot.model_tokens, reason)
        self._settle(closed, {}, f"{Account.EXCLUDED} ({reason})")

    def _count_open(self, closed: Closed, reason: str) -> None:
        for slot in closed.slots:
            if slot.counted:
                self.accounts.count(Account.OPEN, slot.model_tokens, slot.model_tokens, reason)

    def _settle(self, closed: Closed, trained: dict[int, int], fate: str) -> None:
        def where(slot: ClosedSlot) -> str:
            return fate if slot.counted else slot.account

        self.accounts.settle((s.model_tokens, trained.get(s.slot, 0), where(s)) for s in closed.slots)

    # ------------------------------------------------------------------------------------------------- reuse

    def _check_reuse(self, fact: Fact[Manifest], reuse: Reuse) -> None:
        """A recorded success of a candidate, used beside a later group of its task that had none."""
        source, beside = self.index.closure(reuse.source.group), self.index.closure(reuse.group)
        what = f"uses slot {reuse.slot} of {reuse.source.group} beside {reuse.group}"
        place = (reuse.source.partition, reuse.source.offset)
        if source is None or (source.partition, source.offset) != place or source.closure != Closure.CANDIDATE:
            self._fail_reuse(fact, f"{what}, but {address(GROUPS, *place)} is not that group's closure as a candidate")
            return
        if source.content_hash != reuse.source.content_hash:
            self._fail_reuse(fact, f"{what}, but holds another content hash than {source}")
        slot = next((slot for slot in source.slots if slot.slot == reuse.slot), None)
        if slot is None or not slot.success or not slot.counted:
            self._fail_reuse(fact, f"{what}, which is no success that counts in {source}")
        elif slot.model_tokens != reuse.model_tokens:
            self._fail_reuse(fact, f"{what} with {reuse.model_tokens} model tokens; {source} holds {slot.model_tokens}")
        if beside is None:
            self._fail_reuse(fact, f"{what}, which has not closed")
        else:
            if beside.task != source.task:
                self._fail_reuse(fact, f"{what}, but the tasks are {source.task} and {beside.task}")
            if any(s.success for s in beside.slots) or not any(s.failure for s in beside.slots):
                self._fail_reuse(fact, f"{what}, whose attempts in {beside} did not all fail")
        before = self.index.use(reuse.source.group, reuse.slot, reuse.use)
        if reuse.use != before + 1:
            self._fail_reuse(fact, f"{what} as use {reuse.use} where use {before + 1} is due")

    def _fail(self, where: object, message: str) -> None:
        self.failures.add("decision", where, message)

    def _fail_reuse(self, where: object, message: str) -> None:
        self.failures.add("reuse", where, message)
