"""The ledger: every group has one disposition, every logged model token one account, and every record that the run
rests on is there as it was written. It counts by its own code and reads nothing but the log.

The accounts come from `groups`, `batches` and `policy`, which are kept for ever; where `trajectories` are retained they
are counted again from the raw events, and the two must agree to the token.

It reads each record once and remembers what is open or undecided. What must be known of every group that ever was (who
closed it, who decided it) is on disk, in the index. So its memory doesn't grow with the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.schemas.events import DeadLetter
from headrace.schemas.outcomes import Account
from headrace.schemas.topics import DEADLETTER, GROUPS, TRAJECTORIES

from .accounts import Accounts, Bias
from .facts import Failures, read_facts
from .index import Index
from .partition import audit_partition
from .proofs import check_leases, check_policy
from .source import LogSource


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Tokens and episodes of one account and reason whose episodes have at most `upto` model tokens, and more than half
    of that. 0: no token at all; None: the length isn't known. Late and foreign events are no episodes: they stand by
    their own tokens."""

    upto: int | None
    account: str
    reason: str | None
    tokens: int
    episodes: int


@dataclass(slots=True)
class Ledger:
    """A run's account. `groups` counts by (closure, disposition); `reasons` split an account's tokens further."""

    run: str
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    lengths: list[LengthRow] = field(default_factory=list)
    bias: Bias | None = None  # None: too few groups to tell
    context_tokens: int = 0
    logged_tokens: int = 0  # model tokens counted in retained `trajectories`, repetitions included
    repeated_tokens: int = 0
    reused_tokens: Counter[str] = field(default_factory=Counter)  # uses by reference: trained, masked, open
    reuses: int = 0
    retained: bool = True  # whether `trajectories` still hold every event
    duplicates: int = 0
    dead_letters: int = 0
    batches: int = 0
    versions: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # failures by kind: all of them
    failures: list[str] = field(default_factory=list)  # one line each; of a kind with very many, the first ones

    @property
    def closes(self) -> bool:
        return not self.failed


def audit(source: LogSource) -> Ledger:
    """Count everything, and prove it. What doesn't hold is in `failures`, one line each; nothing is raised for it."""
    ledger, failures, accounts = Ledger(source.run), Failures(), Accounts()
    with Index() as index:
        # 1. What went wrong outside: the recount asks for it.
        _dead_letters(source, index, ledger, failures)

        # 2. Partition by partition, what the assembler made of the raw events, its samples, and the events themselves.
        for number in range(source.partitions(GROUPS)):
            found = audit_partition(source, number, index, accounts, failures)
            ledger.groups += found.groups
            ledger.context_tokens += found.context_tokens
            ledger.duplicates += found.duplicates
            ledger.logged_tokens += found.logged_tokens
            ledger.repeated_tokens += found.repeated_tokens
            ledger.retained &= found.retained
        for known, size, events in index.late():
            account = Account.LATE if known else Account.FOREIGN
            accounts.count(account, size * events, size, episodes=0)

        # 3. What was decided of the closures, trained and published.
        check_leases(source, index, lambda number: source.first(TRAJECTORIES, number), failures)
        batches = check_policy(source, index, accounts, failures)
        ledger.groups += batches.groups
        ledger.reused_tokens, ledger.reuses = batches.reused, batches.reuses
        ledger.batches, ledger.versions = batches.manifests, index.versions

    # 4. The account.
    ledger.tokens, ledger.reasons, ledger.bias = accounts.by_account(), accounts.by_reason(), accounts.bias()
    ledger.lengths = _rows(accounts)
    if ledger.retained and (total := ledger.tokens.total()) != (due := ledger.logged_tokens - ledger.repeated_tokens):
        failures.add("total", "tokens", f"the accounts hold {total} model tokens, trajectories {due}")
    ledger.failures, ledger.failed = failures.lines, {str(kind): n for kind, n in failures.counts.items()}
    return ledger


def _dead_letters(source: LogSource, index: Index, ledger: Ledger, failures: Failures) -> None:
    for fact in read_facts(source, DEADLETTER, 0, failures):
        letter: DeadLetter = fact.event
        ledger.dead_letters += 1
        if letter.topic.rsplit(".", 1)[-1] == TRAJECTORIES:
            index.add_letter(letter.partition, letter.offset)


def _rows(accounts: Accounts) -> list[LengthRow]:
    """By length, then in the order of the accounts."""
    order = {str(account): number for number, account in enumerate(Account)}
    keys = sorted(accounts.tokens.keys() | accounts.episodes.keys(), key=lambda k: (k[2], order[k[0]], k[1]))
    return [LengthRow(upto if upto >= 0 else None, account, reason or None, accounts.tokens[account, reason, upto],
                      accounts.episodes[account, reason, upto]) for account, reason, upto in keys]  # fmt: skip
