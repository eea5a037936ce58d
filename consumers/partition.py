"""One partition of `groups`, read once, in step with its partitions of `samples` and `trajectories`.

What is settled by a closure itself goes into the accounts here; candidates go into the index, where the decisions find
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import Addendum, GroupClosed, SlotFate
from headrace.schemas.outcomes import SUSPICIOUS, Account, Closure
from headrace.schemas.topics import DEADLETTER, GROUPS, TRAJECTORIES

from .accounts import Accounts
from .facts import ChainCheck, Fact, Failures, read_facts
from .index import Index
from .recount import Recount, by_commit, count_late, trainable
from .samples import SampleCheck
from .source import LogSource

# Closures of groups that were never to be trained on.
NOT_FOR_TRAINING = (Closure.EVALUATED, Closure.UNMANAGED)


@dataclass(slots=True)
class Partition:
    """What a partition of `groups` and of `trajectories` adds to the account."""

    groups: Counter[tuple[str, str]] = field(default_factory=Counter)  # by closure and disposition, of no candidates
    context_tokens: int = 0
    duplicates: int = 0
    logged_tokens: int = 0
    repeated_tokens: int = 0
    retained: bool = True


def audit_partition(source: LogSource, number: int, index: Index, accounts: Accounts,
                    failures: Failures) -> Partition:  # fmt: skip
    """Read it, prove it, count it. Candidates are left in the index."""
    found = Partition(retained=source.first(TRAJECTORIES, number) == 0)
    samples = SampleCheck(source, number, failures)
    recount = Recount(
        number, source.first(TRAJECTORIES, number), source.records(TRAJECTORIES, number), index, accounts, failures,
        letters=source.first(DEADLETTER, 0) == 0,
    )  # fmt: skip
    attempts: dict[str, dict[tuple[int, int], int]] = {}  # model tokens of ended attempts of open groups
    due = 0
    for commit in by_commit(_checked(source, number, failures)):
        for ended in commit.ends:
            attempts.setdefault(ended.group, {})[ended.slot, ended.attempt] = ended.model_tokens
        commit.closures = [fact for fact in commit.closures if _first_closure(fact, index, failures)]
        if (position := commit.position) is not None:
            if position.event.start != due or position.event.offset < due:
                failures.add("position", position, f"accounts for {position.event.start} to {position.event.offset}; "
                                                   f"the one before ended at {due}")  # fmt: skip
            due = position.event.offset
        samples.commit(commit.closures)
        for fact in commit.addenda:
            _count_addendum(fact.event, recount, index, accounts, found)
        recount.commit(commit)
        for closed in commit.closures:
            _count_closure(closed, attempts.pop(closed.event.group, {}), accounts, found, failures)
    samples.finish()
    recount.finish()
    found.logged_tokens, found.repeated_tokens = recount.logged, recount.repeated
    found.duplicates += recount.duplicates
    found.groups["open", "open"] += len(recount.open)
    return found


def _checked(source: LogSource, number: int, failures: Failures) -> Iterator[Fact[Any]]:
    chain = ChainCheck(failures)
    for fact in read_facts(source, GROUPS, number, failures):
        chain.feed(fact)
        yield fact


def _first_closure(fact: Fact[GroupClosed], index: Index, failures: Failures) -> bool:
    if index.add_closure(fact):
        return True
    failures.add("closure", fact, f"closes {fact.event.group}, which {index.closure(fact.event.group)} closed")
    return False


def _count_closure(fact: Fact[GroupClosed], attempts: dict[tuple[int, int], int], accounts: Accounts, found: Partition,
                   failures: Failures) -> None:  # fmt: skip
    """What a closure settles by itself, by what its slots say; its own sums must agree with them."""
    event = fact.event
    found.context_tokens += event.context_tokens
    sums: Counter[str] = Counter()
    for slot in event.slots:
        account, reason = account_of(slot, event.closure)
        sums["candidate" if account is None else account] += slot.model_tokens
        if account is not None:
            accounts.count(account, slot.model_tokens, slot.model_tokens, reason)
    for name in ("candidate", Account.EXCLUDED, Account.SURPLUS):
        if event.accounts.get(name, 0) != sums[name]:
            failures.add("closure", fact, f"{event.accounts.get(name, 0)} tokens {name}; its slots hold {sums[name]}")
    last = {(slot.slot, slot.attempt) for slot in event.slots}
    superseded = event.accounts.get(Account.SUPERSEDED, 0)
    for attempt, tokens in attempts.items():
        if attempt not in last and tokens <= superseded:
            accounts.count(Account.SUPERSEDED, tokens, tokens)
            superseded -= tokens
    accounts.count(Account.SUPERSEDED, superseded, None, episodes=0)  # written after their attempt's end
    if event.closure != Closure.CANDIDATE:
        found.groups[event.closure, event.closure] += 1
        if event.closure not in NOT_FOR_TRAINING:
            fates = ((slot.model_tokens, 0, account_of(slot, event.closure)) for slot in event.slots)
            accounts.settle((tokens, trained, f"{a} ({r})" if r else str(a)) for tokens, trained, (a, r) in fates)


def account_of(slot: SlotFate, closure: str) -> tuple[Account | None, str]:
    """Account and reason of a slot's last attempt; None while its candidate is undecided."""
    if not trainable(slot.outcome):
        return Account.EXCLUDED, slot.outcome
    if slot.excluded:
        return Account.EXCLUDED, SUSPICIOUS
    if not slot.counted:
        return Account.SURPLUS, ""
    return (None, "") if closure == Closure.CANDIDATE else (Account.EXCLUDED, closure)


def _count_addendum(event: Addendum, recount: Recount, index: Index, accounts: Accounts, found: Partition) -> None:
    if event.kind == "late":
        count_late(event.group, event.model_tokens, recount.open, index, accounts)
    elif event.kind == "foreign":
        accounts.count(Account.FOREIGN, event.model_tokens, event.model_tokens, episodes=0)
    elif event.kind == "duplicate":
        found.duplicates += 1
