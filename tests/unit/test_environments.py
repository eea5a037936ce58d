"""Environments run in a process that may be killed; a scorer's failure is never the model's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from headrace.producers.environments.host import EnvironmentHost, Reply
from headrace.schemas.events import Task


def task(name: str = "t") -> Task:
    data = {"score": "scorers:misbehave", "item": {"prompt": "Say it."}, "system": "Be brief."}
    return Task(name, "jsonl", json.dumps(data), 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvironmentHost]:
    from pathlib import Path

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    host = EnvironmentHost("jsonl")
    yield host
    host.close()


def collect(host: EnvironmentHost, count: int, within_s: float = 60.0) -> dict[int, Reply]:
    replies: dict[int, Reply] = {}
    end = time.monotonic() + within_s
    while len(replies) < count:
        assert time.monotonic() < end, f"only {replies}"
        replies |= {reply.request: reply for reply in host.poll(0.05)}
    return replies


def test_prompt_is_built_from_the_tasks_own_data(host: EnvironmentHost) -> None:
    number = host.ask_messages(task(), 10.0)
    assert collect(host, 1)[number].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say it."},
    ]


@pytest.mark.parametrize("text", ["raise", "none", "nan"])
def test_scorer_without_a_verdict_is_a_failure_and_never_a_zero(host: EnvironmentHost, text: str) -> None:
    number = host.ask_score(task(), text, 10.0)
    reply = collect(host, 1)[number]
    assert reply.verdict is None
    assert reply.failed is not None and (reply.failed.reason, reply.failed.boundary) == ("scorer_failed", "scorer")


def test_scorer_that_sleeps_for_ever_is_timed_out_and_the_siblings_are_scored(host: EnvironmentHost) -> None:
    before = host.ask_score(task(), "fine", 10.0)
    hung = host.ask_score(task(), "hang", 1.0)
    after = [host.ask_score(task(), "fine", 10.0) for _ in range(3)]
    replies = collect(host, 5)
    failed = replies[hung].failed
    assert failed is not None and failed.reason == "scorer_timeout"
    for number in [before, *after]:
        verdict = replies[number].verdict
        assert verdict is not None and verdict.reward == 1.0


def test_scorer_that_kills_its_process_fails_alone(host: EnvironmentHost) -> None:
    dead = host.ask_score(task(), "die", 10.0)
    after = host.ask_score(task(), "fine", 10.0)
    replies = collect(host, 2)
    failed = replies[dead].failed
    assert failed is not None and failed.boundary == "scorer"
    assert replies[after].verdict is not None


def test_reasoning_gym_asks_and_judges_unchanged() -> None:
    from headrace.producers.environments.gym import GYM

    pytest.importorskip("reasoning_gym")
    data = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "seed": 1, "index": 17,
            "examples": [["1 + 1 =", "2"]], "template": "Q: {question}"}  # fmt: skip
    sums = Task("chain_sum-1-17", "reasoning_gym", json.dumps(data), 1)
    messages = GYM.messages(sums)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == "Q: 1 + 1 ="
    answer = eval(messages[-1]["content"].split(":")[-1].rstrip(" =."))  # noqa: S307 - a sum that the library wrote
    assert GYM.score(sums, f" {answer}\n").success
    assert GYM.score(sums, "no idea").reward != 1.0


def test_level_of_the_curriculum_makes_items_harder_and_the_configuration_stays_below_it() -> None:
    pytest.importorskip("reasoning_gym")
    from headrace.producers.environments.gym import GYM, at_level, levels

    def longest(level: int | None) -> int:
        data = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "allow_negation": True}, "seed": 1}
        data |= {} if level is None else {"level": level}
        return max(len(GYM.messages(Task("t", "reasoning_gym", json.dumps(data | {"index": i}), 0))[-1]["content"])
                   for i in range(20))  # fmt: skip

    top = levels("chain_sum") - 1
    assert longest(None) < longest(top) and longest(0) < longest(top) and top > 0
    assert at_level("chain_sum", {"allow_negation": True}, top)["allow_negation"] is True
    assert at_level("chain_sum", {}, top + 5) == at_level("chain_sum", {}, top), "an attribute stays at its highest"
    with pytest.raises(ValueError, match="has no curriculum"):
        at_level("composite", {}, 1)


def test_neighbouring_seeds_share_no_items() -> None:
    pytest.importorskip("reasoning_gym")
    from headrace.producers.environments.gym import GYM

    def questions(seed: int) -> list[str]:
        return [GYM.messages(Task("t", "reasoning_gym", json.dumps(
            {"dataset": "chain_sum", "config": {"min_digits": 4, "max_digits": 4}, "seed": seed, "index": i}), 0)
        )[-1]["content"] for i in range(50)]  # fmt: skip

    assert not set(questions(1)) & set(questions(2))
