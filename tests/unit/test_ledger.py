"""The ledger closes over a run that is whole, puts every token where it belongs, and follows what is trimmed."""

from __future__ import annotations

from headrace.consumers.ledger import audit
from tests.synthetic_log import EPISODE_TOKENS as EPISODE
from tests.synthetic_log import TOKENS, SyntheticRun, synthetic_run

GROUP = 2 * EPISODE


def test_a_whole_run_closes_with_every_token_in_exactly_one_account() -> None:
    run = synthetic_run()
    ledger = audit(run.log)
    assert ledger.failures == []
    assert ledger.tokens == {
        "trained": 4 * GROUP - 3,
        "masked": 3,
        "excluded": GROUP + GROUP + 2 * GROUP + GROUP,  # zero variance, failed slots, stale and leftover, unmanaged
        "surplus": EPISODE,
        "superseded": EPISODE,
        "foreign": EPISODE + TOKENS,  # an incarnation without a lease, a group that nobody opened
        "late": TOKENS,
        "open": GROUP + 2 * GROUP + EPISODE,  # undecided, batch not committed, group open
    }
    assert ledger.reasons["excluded"] == {
        "zero_variance": GROUP, "infra_failure": EPISODE, "unknown": EPISODE, "stale": GROUP, "leftover": GROUP,
        "unmanaged": GROUP,
    }  # fmt: skip
    assert ledger.tokens.total() == ledger.logged_tokens - ledger.repeated_tokens
    assert ledger.groups == {
        ("candidate", "batched"): 6, ("candidate", "stale"): 1, ("candidate", "leftover"): 1, ("candidate", "open"): 1,
        ("zero_variance", "zero_variance"): 1, ("too_few_survivors", "too_few_survivors"): 1,
        ("unmanaged", "unmanaged"): 1, ("open", "open"): 1,
    }  # fmt: skip
    assert (ledger.duplicates, ledger.repeated_tokens, ledger.dead_letters) == (1, TOKENS, 2)
    assert (ledger.versions, ledger.batches) == (3, 3)


def test_an_empty_run_closes() -> None:
    assert audit(SyntheticRun().log).closes
