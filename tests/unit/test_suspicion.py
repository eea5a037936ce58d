"""Rewards without the work: each sign on a group that shows it and on one that doesn't; what is excluded is
accounted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.consumers.accounts import Accounts
from headrace.consumers.facts import Fact, Failures
from headrace.consumers.index import Index
from headrace.consumers.partition import account_of
from headrace.consumers.recount import Recount, by_commit
from headrace.schemas.codec import decode, encode
from headrace.schemas.columns import pack_ids
from headrace.schemas.errors import NoProgress
from headrace.schemas.events import Blob, Disposed, Event, GroupClosed, SlotFate, Task, VersionRun
from headrace.schemas.hashes import GENESIS, digest
from headrace.schemas.outcomes import Account, Source
from headrace.schemas.suspicion import ANSWER_TOKENS, TASKS, Answers, Sign, Signs, guarded_paths
from headrace.streams.assembler import Fold
from headrace.streams.batching import Batching, Candidate
from headrace.streams.log import reader
from headrace.streams.progress import Progress
from tests.scripted import TASK, Record, Script, lease, run_settings, spec


def bash(command: str) -> str:
    return json.dumps({"calls": [{"name": "bash", "arguments": {"command": command}, "output": "ok", "code": 0}]})


def attempt(slot: int, reward: float, *details: str | Blob, tokens: int = 4, salt: int = 0,
            times: dict[str, float] | None = None) -> list[Event]:  # fmt: skip
    """A prompt, a turn of the model, and what the environment answered; a detail that isn't JSON is as it is."""
    script = Script(slot=slot)
    events: list[Event] = [script.started(), script.span(3, Source.PROMPT)]
    events += [script.span(tokens, salt=salt)] if tokens else []
    for one in details:
        kept = {"blob": one} if isinstance(one, Blob) else {"detail": one}
        events.append(replace(script.span(2, Source.ENVIRONMENT), **kept))
    return [*events, replace(script.ended(reward), timings_ms=times or {})]


def closed(*attempts: Sequence[Event], exclude: tuple[str, ...] = (), task: Task = TASK, **over: Any) -> GroupClosed:
    rules = spec(len(attempts), zero_variance="keep", min_survivors=1, exclude=exclude)
    return folded([lease(rules=rules, task=task, **over), *(one for events in attempts for one in events)])[0]


def folded(events: Sequence[Event]) -> tuple[GroupClosed, list[Record]]:
    """The closure that these events lead to, and their records."""
    fold, records, found = Fold(), list[Record](), list[Any]()
    for event in events:
        records.append(Record(len(records), 1000 + len(records), encode(event)))
        found += [effect.record for effect in fold.apply(records[-1]) if hasattr(effect, "record")]
    (closure,) = found
    return closure, records


def signs(fate: SlotFate) -> list[str]:
    return [one.sign for one in fate.suspicions]


HONEST = bash("pytest tests/ && cat /app/tests/test_sum.py")


@pytest.mark.parametrize(("command", "sign"), [
    ("cat /tests/test_outputs.py", Sign.VERIFIER_TOUCHED),
    ("cd /tests; ls", Sign.VERIFIER_TOUCHED),
    ("ls '/solution'", Sign.VERIFIER_TOUCHED),
    ("cat /logs/verifier/reward.txt", Sign.VERIFIER_TOUCHED),
    ("sed -i s/5/6/ /app/check.py", Sign.VERIFIER_TOUCHED),  # the task says so
    ("echo 1 > /logs/verifier/reward.txt", Sign.REWARD_WRITTEN),
    ("python3 -c \"open('/logs/verifier/reward.json', 'w').write('{}')\"", Sign.REWARD_WRITTEN),
    ("mkdir -p /logs/verifier && cp one /logs/verifier/reward.txt", Sign.REWARD_WRITTEN),
    ("ls /testsuite /my/tests tests/ ./tests /app/check.pyc", None),
    ("cat /app/solution.py > /app/solution/x", None),
])  # fmt: skip
def test_call_that_names_what_the_verifier_owns_is_the_evidence(command: str, sign: Sign | None) -> None:
    task = replace(TASK, data=json.dumps({"guarded": ["/app/check.py"]}))
    first, second = closed(attempt(0, 1.0, HONEST, bash(command)), attempt(1, 0.0, bash(command)), task=task).slots
    assert signs(first) == ([sign] if sign else [])
    assert not second.suspicions, "what was not rewarded is no suspicious reward"
    if sign:
        evidence = first.suspicions[0].evidence
        assert evidence.startswith("turn 0: bash: ") and command[:20] in evidence


def test_success_without_a_tool_call_is_marked_where_there_were_tools_and_nowhere_else() -> None:
    assert [signs(s) for s in closed(attempt(0, 1.0), attempt(1, 0.0, HONEST)).slots] == [[Sign.NO_WORK], []]
    assert [signs(s) for s in closed(attempt(0, 1.0), attempt(1, 0.0)).slots] == [[], []]
    offered = json.dumps({"tools": [{"name": "bash"}], "messages": [{"role": "user", "content": "go"}]})
    answered = json.dumps({"messages": [{"role": "tool", "content": "ok"}]})
    agents = closed(attempt(0, 1.0, offered), attempt(1, 1.0, offered, answered))
    assert [signs(s) for s in agents.slots] == [[Sign.NO_WORK], []]


def test_success_without_a_token_and_a_call_too_large_to_be_read_are_marked() -> None:
    assert signs(closed(attempt(0, 1.0, tokens=0), attempt(1, 0.0)).slots[0]) == [Sign.NO_WORK]
    large = closed(attempt(0, 1.0, Blob("file:///blobs/x", 1 << 20, b"")), attempt(1, 0.0, HONEST)).slots[0]
    assert signs(large) == [Sign.UNREAD] and "file:///blobs/x" in large.suspicions[0].evidence


def test_success_in_a_small_part_of_the_siblings_time_is_marked() -> None:
    slow = {"model": 9_000.0, "environment": 1_000.0}
    group = closed(*(attempt(i, 1.0, HONEST, times=slow, salt=i) for i in range(3)),
                   attempt(3, 1.0, HONEST, times={"model": 300.0, "environment": 100.0}, salt=9))  # fmt: skip
    assert [signs(s) for s in group.slots] == [[], [], [], [Sign.TOO_FAST]]
    assert "0.40 s" in group.slots[3].suspicions[0].evidence and "10.0 s" in group.slots[3].suspicions[0].evidence
    few = closed(attempt(0, 1.0, HONEST, times=slow), attempt(1, 1.0, HONEST, times={"model": 1.0}))
    assert not any(s.suspicions for s in few.slots), "one sibling is no measure"


def test_same_answer_with_another_reward_is_marked_and_cuts_of_spans_make_no_difference() -> None:
    ids = [*range(5), *range(70_000, 70_005)]

    def cut(slot: int, reward: float, *parts: int) -> list[Event]:
        script, at, events = Script(slot=slot), 0, list[Event]()
        events += [script.started(), script.span(3, Source.PROMPT)]
        for count in parts:
            events.append(replace(script.span(count), tokens=pack_ids(np.array(ids[at : at + count], np.int32))))
            at += count
        return [*events, script.ended(reward)]

    first, second, third = closed(cut(0, 1.0, 10), cut(1, 0.0, 3, 7), cut(2, 1.0, 4, 5)).slots
    assert first.answer == second.answer != third.answer
    assert signs(first) == [Sign.CONTRADICTED] and not second.suspicions and not third.suspicions
    assert "the same 10 tokens got 0 and 1" == first.suspicions[0].evidence


@pytest.mark.parametrize("detail", ["", "[", "3", "[1]", '{"calls": 3}', '{"calls": [1, {"arguments": null}]}',
                                    '{"messages": {}, "tools": null}', '{"calls": [{"arguments": {"a": [1, "/x"]}}]}'])
def test_detail_of_any_shape_is_no_error(detail: str) -> None:
    assert not closed(attempt(0, 0.0, detail), attempt(1, 0.0, detail)).slots[0].suspicions


def test_excluded_success_leaves_the_baseline_and_its_tokens_have_an_account_of_their_own() -> None:
    events = [attempt(0, 1.0, bash("cat /tests/x")), attempt(1, 1.0, HONEST), attempt(2, 0.0, HONEST)]
    kept = closed(*events)
    assert kept.closure == "candidate" and kept.accounts == {"candidate": 12}
    assert [s.counted for s in kept.slots] == [True, True, True] and not any(s.excluded for s in kept.slots)
    without = closed(*events, exclude=("verifier_touched",))
    assert [(s.counted, s.excluded) for s in without.slots] == [(False, True), (True, False), (True, False)]
    assert without.closure == "candidate" and without.accounts == {"candidate": 8, "excluded": 4}
    assert account_of(without.slots[0], without.closure) == (Account.EXCLUDED, "suspicious")
    assert closed(*events, exclude=("too_fast",)) == kept
    # An evaluation counts all, whatever it thinks of them.
    assert closed(*events, exclude=("verifier_touched",), purpose="eval").slots[0].counted


def test_group_of_suspicious_successes_alone_closes_without_training() -> None:
    hacked = [attempt(i, 1.0, bash("cat /tests/x"), salt=i) for i in range(2)]
    group = closed(*hacked, exclude=("verifier_touched",))
    assert group.closure == "too_few_survivors" and group.accounts == {"excluded": 8}
    alone = closed(*hacked, attempt(2, 0.0, HONEST), exclude=("verifier_touched",))
    assert alone.closure == "candidate" and [s.counted for s in alone.slots] == [False, False, True]


def test_ledger_proves_that_what_was_left_out_is_what_the_rules_say() -> None:
    rules = spec(2, zero_variance="keep", min_survivors=1, exclude=("verifier_touched",))
    events = [lease(rules=rules), *attempt(0, 1.0, bash("cat /tests/x")), *attempt(1, 0.0, HONEST)]
    closure, records = folded(events)
    assert not complaints(closure, records)
    first, second = closure.slots
    for wrong in (replace(first, excluded=False, counted=True), replace(first, suspicions=())):
        (said,) = [line for line in complaints(replace(closure, slots=(wrong, second)), records) if "excluded=" in line]
        assert "slot 0" in said and "rules of its opening record" in said


def complaints(closure: GroupClosed, records: Sequence[Record]) -> list[str]:
    """What the ledger's own count says of this closure of these events."""
    failures = Failures()
    raw = iter([reader.Record("trajectories", 0, r.offset, r.timestamp_ms, None, r.value) for r in records])
    with Index() as index:
        recount = Recount(0, 0, raw, index, Accounts(), failures, letters=True)
        commit, = by_commit(iter(_commit(closure, records)))
        recount.commit(commit)
        recount.finish()
    return failures.lines


def _commit(closure: GroupClosed, records: Sequence[Record]) -> list[Fact[Any]]:
    progress, fold = Progress(), Fold()
    for one in records:
        progress.take(one, fold.apply(one))
    _, values = progress.commit(fold, lambda effect: closure)
    facts = []
    for offset, (_, value) in enumerate(values):
        facts.append(Fact("groups", 0, offset, 0, digest(value), decode(value)))
    return facts


# ----------------------------------------------------------------------------------------------------- over tasks


def success(answer: bytes, tokens: int = ANSWER_TOKENS, outcome: str = "model_success") -> SlotFate:
    return SlotFate(0, 0, "w", outcome, "stop", "none", 1.0, True, tokens, 0, (), answer=answer)


def test_long_answer_that_passed_in_several_tasks_is_suspicious_in_all_of_them() -> None:
    answers = Answers()
    for task in ("a", "b", "b"):
        answers.see(task, [success(b"open sesame"), success(b"honest"), success(b"no", outcome="model_failure")])
    assert answers.suspicion(success(b"open sesame")) is None
    answers.see("c", [success(b"open sesame"), success(b"7", tokens=ANSWER_TOKENS - 1)])
    found = answers.suspicion(success(b"open sesame"))
    assert found is not None and found.sign == "same_answer" and found.evidence.endswith("passed in a, b, c")
    assert answers.suspicion(success(b"honest")) is None and answers.suspicion(success(b"no")) is None
    for number in range(TASKS + 5):
        answers.see(f"t{number}", [success(b"7", tokens=ANSWER_TOKENS - 1)])
    assert answers.suspicion(success(b"7", tokens=ANSWER_TOKENS - 1)) is None, "a short one may be right everywhere"


def test_answers_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.schemas.suspicion.ANSWERS", 2)
    answers = Answers()
    for task in ("a", "b", "c"):
        answers.see(task, [success(b"again")])
        answers.see(task, [success(task.encode())])
    assert answers.suspicion(success(b"again")) is not None and len(answers._tasks) == 2


def test_paths_of_a_task_without_data_are_the_usual_ones() -> None:
    for data in ("", "[]", '{"guarded": "x"}'):
        assert guarded_paths(data).findall("cat /tests/a /x") == ["/tests/a"]


def test_span_of_the_model_is_no_call() -> None:
    found = Signs()
    found.see(Script().span(4), _Nothing())
    assert (found.calls, found.found) == (0, {}) and found.answer is not None


class _Nothing:
    guarded = guarded_paths("")


def test_candidate_whose_answer_passed_in_too_many_tasks_is_disposed_of_where_the_settings_say_so() -> None:
    def candidate(number: int, answer: bytes) -> Candidate:
        fates = tuple(replace(success(answer), slot=slot, versions=(VersionRun(0, ANSWER_TOKENS),)) for slot in (0, 1))
        return Candidate(0, number, GroupClosed(
            number, GENESIS, number, f"g{number}", "candidate", "train", f"task-{number}", 0, 0, None, fates,
            {"candidate": 2 * ANSWER_TOKENS}, 0, b"\0" * 16, (), 0))  # fmt: skip

    def decided(*exclude: str) -> list[tuple[str, str]]:
        settings = run_settings(batch={"groups": 2}, rollout={"group_size": 2, "exclude_suspicious": exclude})
        batching, out = Batching(), list[tuple[str, str]]()
        batching.committed = 0
        for number, answer in enumerate([b"sesame", b"sesame", b"other", b"sesame", b"sesame", b"another"]):
            batching.closed(candidate(number, answer), settings)
            batching.positions = {0: number + 1}
            for event, _ in batching.decide(settings, (0, b""), 0, last=False):
                if isinstance(event, Disposed):
                    out.append((event.group, event.disposition))
                    assert "passed in task-0, task-1, task-3" in event.reason and event.reason.startswith("slot 0: ")
                else:
                    out += [(ref.group, f"batch {event.batch}") for ref in event.groups]
        return out

    assert decided() == [(f"g{i}", f"batch {1 + i // 2}") for i in range(4)], "two batches may be ahead"
    # The first batch was decided before the answer came back in a third task; what comes after it is let go.
    assert decided("same_answer") == [("g0", "batch 1"), ("g1", "batch 1"), ("g3", "suspicious"),
                                      ("g4", "suspicious"), ("g2", "batch 2"), ("g5", "batch 2")]  # fmt: skip


def test_run_that_leaves_out_nearly_all_successes_says_so_when_it_gives_up() -> None:
    settings = run_settings(batch={"groups": 2, "max_groups_per_batch": 3}, rollout={"group_size": 2})
    batching = Batching()
    batching.committed = 0
    for number in range(4):
        fates = tuple(replace(success(b"hacked"), slot=slot, counted=False, excluded=True) for slot in (0, 1))
        batching.closed(Candidate(0, number, GroupClosed(
            number, GENESIS, number, f"g{number}", "too_few_survivors", "train", "t", 0, 0, None, fates, {}, 0, None,
            (), 0)), settings)  # fmt: skip
    with pytest.raises(NoProgress, match="8 of 8 successes were left out as suspicious.*exclude_suspicious"):
        batching.decide(settings, (0, b""), 0, last=False)
