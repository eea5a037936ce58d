"""What the ledger says beside whether it closes: of an earlier moment, of long episodes, of successes used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.accounting import as_of, ledger_lines, ledger_row, length_rows
from headrace.consumers.accounts import Accounts, bucket, spread
from headrace.consumers.asof import AsOf
from headrace.consumers.facts import LINES_OF_A_KIND, Failures
from headrace.consumers.ledger import Ledger, audit
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import SettingsError
from headrace.schemas.events import DeadLetter, Disposed, Manifest, Position, SettingsChanged, Version
from headrace.schemas.outcomes import Account, Closure, Outcome
from headrace.streams.log.blobs import Blobs
from tests.memory_log import MemoryLog
from tests.synthetic_log import EPISODE_TOKENS, TOKENS, SyntheticRun, synthetic_run

SLOTS = ((0, 0), (1, 0))


# ------------------------------------------------------------------------------------------------- as it stood then


def decided(log: MemoryLog, offset: int) -> list[Manifest | Disposed]:
    events = [decode(record.value) for record in log.logs["batches", 0] if record.offset <= offset]
    return [event for event in events if isinstance(event, Manifest | Disposed)]


def numbers(ledger: Ledger) -> dict[str, int]:
    """Everything that may only grow as a run goes on."""
    closed = {f"{c}/{d}": n for (c, d), n in ledger.groups.items() if d != "open"}
    final = {name: n for name, n in ledger.tokens.items() if name != Account.OPEN}
    return {**closed, **final, "batches": ledger.batches, "versions": ledger.versions, "logged": ledger.logged_tokens,
            "context": ledger.context_tokens, "letters": ledger.dead_letters}  # fmt: skip


def test_the_ledger_closes_as_of_every_decision_and_its_numbers_only_grow() -> None:
    log = synthetic_run().log
    before: dict[str, int] = {}
    for record in log.logs["batches", 0]:
        ledger = audit(AsOf(log, offset=record.offset))
        assert ledger.failures == [], record.offset
        assert ledger.tokens.total() == ledger.logged_tokens - ledger.repeated_tokens
        now = numbers(ledger)
        assert {name: n for name, n in before.items() if n > now.get(name, 0)} == {}
        assert ledger.batches == sum(isinstance(event, Manifest) for event in decided(log, record.offset))
        before = now
    whole = audit(log)
    assert audit(AsOf(log, offset=log.logs["batches", 0][-1].offset)) == whole
    assert before == numbers(whole)


def test_the_ledger_closes_as_of_every_moment_at_which_something_was_written() -> None:
    log = synthetic_run().log
    times = sorted({record.timestamp_ms for records in log.logs.values() for record in records})
    versions = []
    for time_ms in times[::3]:
        ledger = audit(AsOf(log, time_ms=time_ms))
        assert ledger.failures == [], time_ms
        versions.append(ledger.versions)
    assert versions == sorted(versions) and len(set(versions)) == 4


def test_a_candidate_that_was_decided_later_is_open_and_a_version_of_a_later_batch_is_not_there() -> None:
    log = synthetic_run().log
    second = next(r for r in log.logs["batches", 0] if getattr(decode(r.value), "batch", 0) == 2)
    before = audit(AsOf(log, time_ms=second.timestamp_ms))
    assert (before.batches, before.versions) == (1, 2)
    assert before.groups["candidate", "open"] == 2 and before.tokens["open"] == 2 * 2 * EPISODE_TOKENS
    after = audit(AsOf(log, time_ms=second.timestamp_ms + 1))
    assert (after.batches, after.versions) == (2, 2)
    assert after.groups["candidate", "open"] == 0
    assert after.reasons["open"] == {"batch not committed": 2 * 2 * EPISODE_TOKENS}


def test_clocks_that_differ_never_tear_a_batch_from_what_it_rests_on() -> None:
    """The trainer's clock is an hour slow, the assembler's an hour fast: the records' references hold."""
    log = synthetic_run().log
    for (topic, _), records in log.logs.items():
        shift = {"policy": -3_600_000, "groups": 3_600_000, "deadletter": 3_600_000}.get(topic, 0)
        records[:] = [replace(record, timestamp_ms=record.timestamp_ms + shift) for record in records]
    for record in log.logs["batches", 0]:
        assert audit(AsOf(log, offset=record.offset)).failures == []


def test_the_account_of_an_earlier_moment_closes_also_where_trajectories_were_trimmed_since() -> None:
    log = synthetic_run().log
    for p in range(log.partitions("trajectories")):
        for record in log.logs["trajectories", p][::9]:
            trimmed = log.trimmed(("trajectories", p), record.offset)
            for decision in log.logs["batches", 0][:-1]:
                assert audit(AsOf(trimmed, offset=decision.offset)).failures == [], (record.offset, decision.offset)


def test_a_log_that_was_altered_before_that_moment_is_noticed_as_of_it() -> None:
    log = synthetic_run().log
    for place in (("groups", 0), ("samples", 0), ("trajectories", 0), ("policy", 0)):
        damaged = log.without(log.logs[place][1], place)
        assert audit(AsOf(damaged, offset=2)).failures, place


def test_a_moment_is_given_as_an_offset_a_time_or_how_long_ago() -> None:
    log = synthetic_run().log
    for records in log.logs.values():  # in this century
        records[:] = [replace(r, timestamp_ms=r.timestamp_ms + 1_700_000_000_000) for r in records]
    second = log.logs["batches", 0][1].timestamp_ms
    assert audit(as_of(log, "0", 0)).batches == 1
    assert audit(as_of(log, str(second), 0)).batches == 1
    assert audit(as_of(log, "2h", second + 2 * 3_600_000)).batches == 1
    assert audit(as_of(log, "0.5d ago", second + 12 * 3_600_000 + 1)).batches == 2
    assert audit(as_of(log, "2001-01-01T00:00", 0)).batches == 0
    assert audit(as_of(log, "2100-01-01T00:00:00+00:00", 0)).batches == 3
    for wrong in ("99", "yesterday", "2x"):
        with pytest.raises(SettingsError, match="batches"):
            as_of(log, wrong, 0)


# ------------------------------------------------------------------------------------------------- lengths


def long_and_short(groups: int, *, lose_long: bool) -> SyntheticRun:
    """Batches of two; each group has an episode of 8 and one of 64 tokens, which is lost if `lose_long`."""
    run = SyntheticRun()
    run.version(0)
    for index in range(groups):
        name = f"g{index}"
        run.lease(name, *SLOTS)
        run.episode(name, 0, 1.0)
        if lose_long:
            run.episode(name, 1, None, outcome=Outcome.INFRA_FAILURE, tokens=32)
        else:
            run.episode(name, 1, 0.0, tokens=32)
        run.close(name, Closure.CANDIDATE)
        if index % 2:
            run.batch(index // 2 + 1, f"g{index - 1}", name)
            run.version(index // 2 + 1)
    return run


def test_tokens_are_told_apart_by_the_length_of_their_episode() -> None:
    ledger = audit(long_and_short(4, lose_long=True).log)
    assert ledger.closes, ledger.failures
    held = {(row.upto, row.account, row.reason): (row.tokens, row.episodes) for row in ledger.lengths}
    assert held == {(32, "trained", None): (4 * 8, 4), (64, "excluded", "infra_failure"): (4 * 64, 4)}
    assert sum(row.tokens for row in ledger.lengths) == ledger.tokens.total()
    assert [(row["trained %"], row["infra_failure %"]) for row in length_rows(ledger)] == [(100.0, None), (None, 100.0)]


def test_a_bias_against_long_episodes_is_named_and_none_where_there_is_none() -> None:
    biased, fair = audit(long_and_short(24, lose_long=True).log), audit(long_and_short(24, lose_long=False).log)
    assert biased.bias is not None and biased.bias.significant
    assert (biased.bias.above, biased.bias.long_share, biased.bias.other_share) == (32, 0.0, 1.0)
    assert biased.bias.long_groups == biased.bias.other_groups == 24
    assert any(line.startswith("bias: ") and "infra_failure" in line for line in ledger_lines(biased))
    assert ledger_row(biased)["bias"]["significant"] is True
    assert fair.bias is not None and not fair.bias.significant
    assert not any(line.startswith("bias: ") for line in ledger_lines(fair))


def test_with_few_groups_no_bias_is_claimed() -> None:
    assert audit(long_and_short(8, lose_long=True).log).bias is None


def test_chance_is_called_a_bias_at_most_as_often_as_the_test_allows() -> None:
    """Groups are trained or not as a whole, by a coin: siblings share their fate, and no length suffers."""
    random, named = np.random.default_rng(5), 0
    for _ in range(1000):
        accounts = Accounts()
        for trained in random.random(60) < 0.7:
            lengths = [16] * 4 + [200] * 4
            accounts.settle((n, n if trained else 0, "stale") for n in lengths)
        bias = accounts.bias()
        named += bias is not None and bias.significant
    assert named <= 10


def test_masked_tokens_count_with_the_slot_whose_weight_is_0_and_others_in_proportion() -> None:
    run = SyntheticRun()
    run.version(0)
    for name in ("a", "b"):
        run.lease(name, *SLOTS)
        run.episode(name, 0, 1.0)
        run.episode(name, 1, 0.0, tokens=32)
        run.close(name, Closure.CANDIDATE)
    run.batch(1, "a", "b", masked={1})
    run.version(1, masked=64 + 4)  # of `a`: its slot of 64, and 4 tokens by the trainer's own rule
    ledger = audit(run.log)
    assert ledger.failures == []
    held = {(row.upto, row.account): (row.tokens, row.episodes) for row in ledger.lengths}
    assert held == {(32, "trained"): (4 + 8, 2), (32, "masked"): (4, 0), (64, "masked"): (64, 1),
                    (64, "trained"): (64, 1)}  # fmt: skip


def test_buckets_are_powers_of_two_and_a_spread_loses_nothing() -> None:
    assert [bucket(n) for n in (0, 1, 32, 33, 64, 65, 1 << 20)] == [0, 32, 32, 64, 64, 128, 1 << 20]
    assert spread(10, [1, 1, 1]) == [3, 3, 4] and spread(7, [0, 5, 2]) == [0, 5, 2] and spread(3, [0, 0]) == [0, 0]


# ------------------------------------------------------------------------------------------------- successes used again


def reusing(change: Callable[[SyntheticRun], object] = lambda run: None, *, use: int = 1, slot: int = 0,
            beside: str = "g2", lost: int = 0) -> Ledger:  # fmt: skip
    """`g0` has a success; `g2`, of the same task, has none, and batch 2 uses that of `g0` beside it."""
    run = SyntheticRun()
    run.version(0)
    for name, reward, closure, task in (
        ("g0", 1.0, Closure.CANDIDATE, "hard"), ("g1", 1.0, Closure.CANDIDATE, ""),
        ("g2", 0.0, Closure.ZERO_VARIANCE, "hard"), ("g3", 1.0, Closure.CANDIDATE, ""),
        ("g4", 0.0, Closure.ZERO_VARIANCE, "other"),
    ):  # fmt: skip
        run.lease(name, *SLOTS, task=task)
        run.episode(name, 0, reward)
        run.episode(name, 1, 0.0)
        run.close(name, closure)
    run.batch(1, "g0", "g1")
    run.version(1)
    change(run)
    run.batch(2, "g3", reused=(run.reuse(beside, "g0", slot, use),))
    run.version(2, lost=lost)
    return audit(run.log)


def test_a_success_used_again_is_counted_beside_the_accounts() -> None:
    ledger = reusing()
    assert ledger.failures == []
    assert (ledger.reuses, ledger.reused_tokens["trained"]) == (1, EPISODE_TOKENS)
    assert ledger.tokens.total() == ledger.logged_tokens == 5 * 2 * EPISODE_TOKENS
    assert any("reused by reference" in line and f"{EPISODE_TOKENS} trained" in line for line in ledger_lines(ledger))


def forge(run: SyntheticRun) -> None:
    closed, partition, offset = run.closures["g0"]
    run.closures["g0"] = replace(closed, content_hash=b"\1" * 16), partition, offset


def misplace(run: SyntheticRun) -> None:
    closed, partition, offset = run.closures["g0"]
    run.closures["g0"] = closed, partition, offset + 1


def lengthen(run: SyntheticRun) -> None:
    closed, partition, offset = run.closures["g0"]
    slots = tuple(replace(slot, model_tokens=99) for slot in closed.slots)
    run.closures["g0"] = replace(closed, slots=slots), partition, offset


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (lambda: reusing(forge), "another content hash"),
        (lambda: reusing(misplace), "is not that group's closure"),
        (lambda: reusing(lengthen), "99 model tokens"),
        (lambda: reusing(slot=1), "is no success"),
        (lambda: reusing(beside="g1"), "the tasks are"),
        (lambda: reusing(beside="g0"), "did not all fail"),
        (lambda: reusing(beside="g4"), "the tasks are hard and other"),
        (lambda: reusing(beside="g9"), "has not closed"),
        (lambda: reusing(use=2), "use 1 is due"),
        (lambda: reusing(lost=1), "of a success beside g2"),
    ],
)
def test_a_use_that_does_not_hold_is_named(ledger: Callable[[], Ledger], said: str) -> None:
    failures = ledger().failures
    assert any(said in line and line.startswith(("batches[0]@1", "policy[0]@")) for line in failures), failures


# ------------------------------------------------------------------------------------------------- what else is proven


def test_thousands_of_failures_of_a_kind_are_counted_and_the_first_ones_shown() -> None:
    failures = Failures()
    for number in range(5000):
        failures.add("sample", f"samples[0]@{number}", "belongs to no closure")
    failures.add("lease", "tasks[0]@1", "lease 1 is missing")
    assert failures.counts == {"sample": 5000, "lease": 1}
    assert len(failures.lines) == LINES_OF_A_KIND + 2 and "4950 more" in failures.lines[-1]
    assert any("tasks[0]@1" in line for line in failures.lines)


def under_changed_settings() -> tuple[SyntheticRun, int]:
    """A run whose only batch was decided under the settings record at the offset."""
    run = SyntheticRun()
    run.version(0)
    for name in ("a", "b"):
        run.lease(name, *SLOTS)
        run.episode(name, 0, 1.0)
        run.episode(name, 1, 0.0)
        run.close(name, Closure.CANDIDATE)
    offset = run.set(0)
    run.batch(1, "a", "b", settings_offset=offset)
    run.version(1)
    return run, offset


def test_a_removed_change_of_settings_is_named_by_the_batch_that_was_decided_under_it() -> None:
    run, offset = under_changed_settings()
    assert audit(run.log).closes
    record = next(r for r in run.log.logs["policy", 0] if r.offset == offset)
    assert any(f"policy[0]@{offset}" in line for line in audit(run.log.without(record, ("policy", 0))).failures)


def test_the_last_settings_record_altered_is_named_by_the_batch_that_was_decided_under_it() -> None:
    """Nothing of its writer follows it, so no chain would show it."""
    run, offset = under_changed_settings()
    records = run.log.logs["policy", 0]
    place = next(i for i, r in enumerate(records) if r.offset == offset)
    event = decode(records[place].value)
    assert isinstance(event, SettingsChanged)
    records[place] = replace(records[place], value=encode(replace(event, changed_ms=event.changed_ms + 1)))
    assert any(f"policy[0]@{offset} doesn't hold" in line for line in audit(run.log).failures)


def test_a_payload_in_a_blob_is_proven_by_its_digest_and_a_lost_or_altered_blob_is_named(tmp_path: Path) -> None:
    run = SyntheticRun()
    run.version(0)
    run.lease("a", *SLOTS)
    run.episode("a", 0, 1.0)
    run.episode("a", 1, 0.0)
    run.blobs = Blobs(tmp_path.as_uri(), "blobs", 0)
    run.close("a", Closure.CANDIDATE)
    assert audit(run.log).failures == []
    (blob,) = (tmp_path / "blobs").iterdir()
    held = blob.read_bytes()
    for damaged in (held[:-1] + bytes([held[-1] ^ 1]), held[:-1], None):
        blob.unlink()
        if damaged is not None:
            blob.write_bytes(damaged)
        failures = audit(run.log).failures
        assert len(failures) == 1 and failures[0].startswith("samples[") and blob.name in failures[0], failures
        blob.write_bytes(held)


def test_a_lost_position_and_a_lost_version_leave_the_rest_countable() -> None:
    log = synthetic_run().log
    for kind, place in ((Position, ("groups", 0)), (Version, ("policy", 0))):
        lost = next(r for r in log.logs[place][2:] if isinstance(decode(r.value), kind))
        ledger = audit(log.without(lost, place))
        assert not ledger.closes and sum(ledger.groups.values()) == sum(audit(log).groups.values())


def test_an_addendum_about_an_event_that_was_none_of_that_is_named() -> None:
    run = synthetic_run()
    run._event("g11", run.groups["g11"].spans[0, 0][1][1])
    run.addendum("foreign", "g11", TOKENS)  # it is a repetition
    run.commit(run.partition("g11"))
    assert any("counted: duplicate" in line for line in audit(run.log).failures)


def test_letters_about_other_topics_excuse_no_event() -> None:
    log = synthetic_run().log
    place = ("deadletter", 0)
    for record in log.logs[place]:
        letter = decode(record.value)
        assert isinstance(letter, DeadLetter)
        moved = log.altered(record, place, encode(replace(letter, topic="headrace.synthetic.fleet")))
        assert any("no dead letter" in line for line in audit(moved).failures)
