"""Which hashes hold, and which versions led to the newest weights, as the trainer's records are folded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from headrace.consumers.ledger import audit
from headrace.schemas.codec import decode
from headrace.schemas.events import Publication, Reconciled, Version
from headrace.trainer.history import History, differences
from tests.synthetic_log import SyntheticRun, synthetic_run

LINK: dict[str, Any] = {"number": 0, "previous": b"", "writer": "trainer"}


def version(number: int, parent: int | None = None) -> Version:
    return Version(
        **LINK, version=number, parent=number - 1 if parent is None else parent, batch=number, batch_offset=number,
        batch_digest=b"", hash_algorithm="", served_hash=b"s%d" % number, train_hash=b"t%d" % number, rho=0.0,
        rho_tokens=0, groups=(), metrics={}, fingerprint="{}", committed_ms=0,
    )  # fmt: skip


def settled(rule: str, newest: int, checkpoint: int, *, replaces: bool, link: dict[str, Any] = LINK,
            served_hash: bytes = b"S", train_hash: bytes = b"T") -> Reconciled:  # fmt: skip
    return Reconciled(**link, rule=rule, version=newest, checkpoint=checkpoint, differed=checkpoint + 1,
                      replaces=replaces, hash_algorithm="", served_hash=served_hash, train_hash=train_hash,
                      fingerprint='{"threads": "2"}', decided_ms=0)  # fmt: skip


def history(newest: int) -> History:
    found = History()
    for number in range(newest + 1):
        found.commit(version(number))
    return found


def numbers(found: History, **of: int) -> list[int]:
    return [one.version for one in found.path(**of)]


def test_each_version_leads_to_the_next() -> None:
    found = history(4)
    assert (found.tip, numbers(found)) == (4, [1, 2, 3, 4])
    assert (numbers(found, after=2), numbers(found, to=2)) == ([3, 4], [1, 2])
    assert found.known() == {n: b"t%d" % n for n in range(5)}


def test_after_a_rebase_the_newest_version_has_its_new_hashes_and_those_passed_over_prove_nothing() -> None:
    found = history(4)
    found.reconcile(settled("rebase", 4, 1, replaces=True))
    assert (found.tip, numbers(found, after=1), found.loose, found.replaced) == (4, [2, 3, 4], {2, 3}, {4})
    assert (found.versions[4].served_hash, found.versions[4].train_hash) == (b"S", b"T")
    assert found.known() == {0: b"t0", 1: b"t1", 4: b"T"}, "no checkpoint of 2 or 3 is good any more"


def test_after_a_rollback_the_next_version_keeps_counting_and_comes_from_the_checkpoint() -> None:
    found = history(4)
    found.reconcile(settled("rollback", 4, 1, replaces=False))
    assert (found.tip, found.committed, numbers(found)) == (1, 4, [1])
    assert found.known() == {0: b"t0", 1: b"t1"}, "weights that were given up are nowhere gone on from"
    found.commit(version(5, parent=1))
    found.commit(version(6))
    assert (found.tip, numbers(found)) == (6, [1, 5, 6])
    assert numbers(found, to=4) == [1, 2, 3, 4], "and can still be replayed"
    found.reconcile(settled("rollback", 6, 0, replaces=False))
    assert (found.tip, numbers(found), found.known()) == (0, [], {0: b"t0"})


def test_version_that_nobody_had_taken_stands_for_the_checkpoint_after_a_rollback() -> None:
    found = history(3)
    found.reconcile(settled("rollback", 3, 2, replaces=True))
    assert (found.tip, found.versions[3].served_hash, found.replaced) == (2, b"S", {3})


def test_a_difference_between_fingerprints_is_named() -> None:
    one = json.dumps({"threads": "1", "torch": "2"})
    assert differences(one, one) == []
    assert differences(json.dumps({"threads": "2", "torch": "2"}), one) == ["threads 2 (then 1)"]


# ------------------------------------------------------------------------------------------------- in the ledger


def trainers(run: SyntheticRun) -> dict[int, Version]:
    events = (decode(record.value) for record in run.log.logs["policy", 0])
    return {event.version: event for event in events if isinstance(event, Version)}


def written(run: SyntheticRun, event: Reconciled | Publication) -> None:
    run._put("policy", run.trainer.extend(event))


def test_tokens_of_versions_that_were_rolled_back_are_excluded_by_that_name_and_the_account_closes() -> None:
    run = synthetic_run()
    before, versions = audit(run.log), trainers(run)
    newest, base = max(versions), max(versions) - 1
    own = {"served_hash": versions[base].served_hash, "train_hash": versions[base].train_hash}
    link = {**run.trainer.link(), "writer": "trainer"}
    written(run, settled("rollback", newest, base, replaces=False, link=link, **own))
    after = audit(run.log)
    assert after.failures == []
    lost = sum(count.trained + count.masked for count in versions[newest].groups)
    assert lost and after.reasons["excluded"]["rolled_back"] == lost
    assert after.tokens["excluded"] == before.tokens["excluded"] + lost
    assert after.tokens.total() == before.tokens.total()
    assert after.groups == before.groups, "they were batched all the same"


def test_ledger_holds_a_rebase_and_a_rollback_to_what_they_claim() -> None:
    for rule, checkpoint, replaces, says in (
        ("rollback", 1, False, "goes on from version 1 under another hash"),
        ("rollback", 0, True, "had been published"),
        ("rebase", 1, False, "no way to settle a difference"),
        ("rebase", 2, True, "is the newest"),
    ):
        run = synthetic_run()
        link = {**run.trainer.link(), "writer": "trainer"}
        own = {"served_hash": trainers(run)[0].served_hash} if (rule, checkpoint) == ("rollback", 0) else {}
        written(run, settled(rule, 2, checkpoint, replaces=replaces, link=link, **own))
        assert any(says in line for line in audit(run.log).failures), (rule, audit(run.log).failures)


def test_rebased_version_is_published_under_its_new_hash_only() -> None:
    run = synthetic_run()
    newest = max(trainers(run))
    link = {**run.trainer.link(), "writer": "trainer"}
    written(run, settled("rebase", newest, newest - 1, replaces=True, link=link))
    assert audit(run.log).failures == []
    old = next(event for record in reversed(run.log.logs["policy", 0])
               if isinstance(event := decode(record.value), Publication))  # fmt: skip
    written(run, replace(old, **run.trainer.link(), chunks=()))
    assert any("under another hash" in line for line in audit(run.log).failures)
