"""The ledger: every group has one disposition, every logged model token one account, and every record that the run
rests on is there as it was written. It counts by its own code and reads nothing but the log.

The accounts come from `groups`, `batches` and `policy`, which are kept for ever; where `trajectories` are retained they
are counted again from the raw events, and the two must agree to the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.events import Addendum, DeadLetter, GroupClosed, Position, Version
from headrace.schemas.outcomes import Account, Closure, Disposition
from headrace.schemas.topics import BATCHES, DEADLETTER, GROUPS, POLICY, SAMPLES, TASKS, TRAJECTORIES

from .facts import Fact, Failures, address, check_chain, read_facts
from .proofs import (
    Fate,
    check_batches,
    check_leases,
    check_policy,
    check_samples,
    check_weights,
    settings_records,
)
from .recount import Recount, trainable
from .source import LogSource

UNDECIDED = "open"


@dataclass(slots=True)
class Ledger:
    """A run's account. `groups` counts by (closure, disposition); `reasons` split an account's tokens further."""

    run: str
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    context_tokens: int = 0
    logged_tokens: int = 0  # model tokens counted in retained `trajectories`, repetitions included
    repeated_tokens: int = 0
    retained: bool = True  # whether `trajectories` still hold every event
    duplicates: int = 0
    dead_letters: int = 0
    batches: int = 0
    versions: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def closes(self) -> bool:
        return not self.failures

    def count(self, account: str, tokens: int, reason: str | None = None) -> None:
        if tokens:
            self.tokens[account] += tokens
            if reason:
                self.reasons.setdefault(account, Counter())[reason] += tokens


def audit(source: LogSource) -> Ledger:
    """Count everything, and prove it. What doesn't hold is in `failures`, one line each; nothing is raised for it."""
    ledger, failures = Ledger(source.run), Failures()

    # 1. The small topics, and their chains.
    policy = list(read_facts(source, POLICY, 0, failures))
    batches = list(read_facts(source, BATCHES, 0, failures))
    groups = [list(read_facts(source, GROUPS, p, failures)) for p in range(source.partitions(GROUPS))]
    for facts in groups:
        check_chain(facts, failures)
    closures = _closures(groups, failures)

    # 2. What they say of each other.
    versions = check_policy(policy, batches, failures)
    fates = check_batches(batches, closures, settings_records(policy), failures)
    check_weights(source, policy, failures)
    for p in range(source.partitions(SAMPLES)):
        check_samples(source, p, (c for c in closures.values() if c.partition == p), failures)

    # 3. The raw events: which there are, and what they add up to.
    recounts = [_recount(source, p, facts, closures, failures) for p, facts in enumerate(groups)]
    check_leases(
        list(read_facts(source, TASKS, 0, failures)),
        source.settled(TASKS, 0),
        recounts,
        closures,
        failures,
    )
    _dead_letters(source, recounts, ledger, failures)

    # 4. The accounts.
    for closure in closures.values():
        _count_group(closure, fates.get(closure.event.group), versions, ledger, failures)
    opened = {name for recount in recounts for name in recount.groups} | closures.keys()
    for fact in (fact for facts in groups for fact in facts if isinstance(fact.event, Addendum)):
        _count_addendum(fact.event, opened, ledger)
    for recount in recounts:
        ledger.logged_tokens += recount.logged
        ledger.repeated_tokens += recount.repeated
        ledger.duplicates += recount.duplicates
        ledger.retained &= recount.first == 0
        ledger.groups[UNDECIDED, UNDECIDED] += sum(name not in closures for name in recount.groups)
        for account, tokens in recount.unsettled.items():
            ledger.count(account, tokens)
    if ledger.retained and (total := ledger.tokens.total()) != (due := ledger.logged_tokens - ledger.repeated_tokens):
        failures.add("tokens", f"the accounts hold {total} model tokens, trajectories {due}")
    ledger.versions, ledger.batches = len(versions), sum(f.event.__class__.__name__ == "Manifest" for f in batches)
    ledger.groups += Counter()  # drops zeros
    ledger.failures = failures.lines
    return ledger


def _closures(groups: Iterable[list[Fact[Any]]], failures: Failures) -> dict[str, Fact[GroupClosed]]:
    closures: dict[str, Fact[GroupClosed]] = {}
    for fact in (fact for facts in groups for fact in facts if isinstance(fact.event, GroupClosed)):
        before = closures.setdefault(fact.event.group, fact)
        if before is not fact:
            failures.add(fact, f"closes {fact.event.group}, which {before} closed")
    return closures


def _recount(source: LogSource, partition: int, facts: list[Fact[Any]], closures: Mapping[str, Fact[GroupClosed]],
             failures: Failures) -> Recount:  # fmt: skip
    positions = [fact for fact in facts if isinstance(fact.event, Position)]
    due = 0
    for fact in positions:
        if fact.event.start != due or fact.event.offset < due:
            failures.add(fact, f"accounts for {fact.event.start} to {fact.event.offset}; the one before ended at {due}")
        due = fact.event.offset
    recount = Recount(
        partition,
        source.first(TRAJECTORIES, partition),
        {name: closure for name, closure in closures.items() if closure.partition == partition},
        [fact for fact in facts if isinstance(fact.event, Addendum)],
        positions,
        failures,
    )
    for record in source.records(TRAJECTORIES, partition):
        recount.feed(record)
    recount.finish()
    return recount


def _dead_letters(source: LogSource, recounts: Iterable[Recount], ledger: Ledger, failures: Failures) -> None:
    """A record that the assembler could not use has a dead letter, as long as those are kept."""
    written = set()
    for fact in read_facts(source, DEADLETTER, 0, failures):
        letter: DeadLetter = fact.event
        ledger.dead_letters += 1
        written.add((letter.topic.rsplit(".", 1)[-1], letter.partition, letter.offset))
    if source.first(DEADLETTER, 0) > 0:
        return
    for recount in recounts:
        for record in recount.refused:
            if record.offset < recount.position and (TRAJECTORIES, recount.partition, record.offset) not in written:
                where = address(TRAJECTORIES, recount.partition, record.offset)
                failures.add(where, "can't be used, but no dead letter says so")


def _count_group(fact: Fact[GroupClosed], fate: Fate | None, versions: Mapping[int, Fact[Version]], ledger: Ledger,
                 failures: Failures) -> None:  # fmt: skip
    """Put a closed group's tokens into accounts, by what its slots say; its own sums must agree with them."""
    event = fact.event
    ledger.context_tokens += event.context_tokens
    candidate, by_reason, surplus = 0, Counter[str](), 0
    for slot in event.slots:
        if not trainable(slot.outcome):
            by_reason[slot.outcome] += slot.model_tokens
        elif not slot.counted:
            surplus += slot.model_tokens
        elif event.closure == Closure.CANDIDATE:
            candidate += slot.model_tokens
        else:
            by_reason[event.closure] += slot.model_tokens
    for name, tokens in (("candidate", candidate), (Account.EXCLUDED, by_reason.total()), (Account.SURPLUS, surplus)):
        if event.accounts.get(name, 0) != tokens:
            failures.add(fact, f"{event.accounts.get(name, 0)} tokens {name}; its slots hold {tokens}")
    for reason, tokens in by_reason.items():
        ledger.count(Account.EXCLUDED, tokens, reason)
    for account in (Account.SURPLUS, Account.SUPERSEDED):
        ledger.count(account, event.accounts.get(account, 0))

    if event.closure != Closure.CANDIDATE:
        ledger.groups[event.closure, event.closure] += 1
        return
    ledger.groups[event.closure, fate.disposition if fate else UNDECIDED] += 1
    version = versions.get(fate.batch) if fate and fate.batch is not None else None
    if fate is not None and fate.disposition != Disposition.BATCHED:
        ledger.count(Account.EXCLUDED, candidate, fate.disposition)
    elif fate is None or version is None:
        ledger.count(Account.OPEN, candidate, "candidate undecided" if fate is None else "batch not committed")
    else:
        count = next((count for count in version.event.groups if count.group == event.group), None)
        ledger.count(Account.TRAINED, count.trained if count else 0)
        ledger.count(Account.MASKED, count.masked if count else 0)


def _count_addendum(event: Addendum, opened: Collection[str], ledger: Ledger) -> None:
    if event.kind == "late":  # the assembler can't know whether a group that isn't open ever was
        ledger.count(Account.LATE if event.group in opened else Account.FOREIGN, event.model_tokens)
    elif event.kind == "foreign":
        ledger.count(Account.FOREIGN, event.model_tokens)
    elif event.kind == "duplicate":
        ledger.duplicates += 1
