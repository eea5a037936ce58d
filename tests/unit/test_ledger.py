"""The ledger closes over a run that is whole, puts every token where it belongs, and follows what is trimmed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from headrace.consumers.ledger import audit
from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Event, Lease, Span
from headrace.streams.log.reader import Record
from tests.synthetic_log import EPISODE_TOKENS as EPISODE
from tests.synthetic_log import TOKENS, SyntheticRun, synthetic_run

GROUP = 2 * EPISODE


def decoded(records: Iterable[Record]) -> Iterator[tuple[Record, Event]]:
    """Without what can't be."""
    for record in records:
        with contextlib.suppress(UndecodableRecord):
            yield record, decode(record.value)


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


def test_accounts_stay_the_same_wherever_trajectories_are_trimmed() -> None:
    log = synthetic_run().log
    whole = audit(log)
    cut_short = 0
    for p in range(log.partitions("trajectories")):
        records = log.logs["trajectories", p]
        opened = [r.offset for r, e in decoded(records) if isinstance(e, Lease) and e.group == "g11"]
        for record in records:
            if opened and record.offset > opened[0]:
                break  # the low mark: nobody deletes above the oldest open group
            ledger = audit(log.trimmed(("trajectories", p), record.offset))
            assert ledger.failures == [] and ledger.tokens == whole.tokens, f"trajectories[{p}] below {record.offset}"
            cut_short += not ledger.retained
    assert cut_short > 50


def test_trimmed_samples_and_weights_are_no_loss() -> None:
    log = synthetic_run().log
    for place in (("samples", 0), ("samples", 1), ("weights", 0)):
        for record in log.logs[place]:
            assert audit(log.trimmed(place, record.offset)).closes


def test_a_repeated_event_is_counted_and_still_closes() -> None:
    run = synthetic_run()
    before = audit(run.log)
    run._event("g11", run.groups["g11"].spans[0, 0][1][1])  # its group is open
    run._event("g0", run.span(("g0", 0, 0, "w1"), 2))  # its group has closed
    after = audit(run.log)
    assert after.closes and after.duplicates == before.duplicates + 1
    assert after.tokens["late"] == before.tokens["late"] + TOKENS
    assert after.tokens["open"] == before.tokens["open"]


def test_a_gap_above_the_last_position_is_named() -> None:
    run = synthetic_run()
    place = ("trajectories", run.partition("g11"))
    spans = [r for r, e in decoded(run.log.logs[place]) if isinstance(e, Span) and e.group == "g11"]
    failures = audit(run.log.without(spans[1], place)).failures
    assert [line.split(":")[0] for line in failures] == [f"trajectories[{place[1]}]@{spans[2].offset}"]


def test_an_unusable_record_without_a_dead_letter_is_named() -> None:
    log = synthetic_run().log
    log.logs["deadletter", 0].pop()
    assert any("dead letter" in line for line in audit(log).failures)


def test_a_version_that_trains_other_tokens_than_its_manifest_is_named() -> None:
    run = synthetic_run()
    run.version(3, lost=1)
    assert any("tokens trained or masked of g8" in line for line in audit(run.log).failures)
