"""Agents behind the gateway, against the real broker and a real model: what they are told, and what lies on the log."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Span
from headrace.schemas.outcomes import Source
from tests.gateway_run import Answered, GatewayRun, path_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, kafka: dict[str, Any]) -> Iterator[GatewayRun]:
    """One run and one gateway for the tests that leave them be. Most episodes are for evaluation: none is trained."""
    found = GatewayRun(tmp_path_factory.mktemp("gateway"), kafka, f"gateway-{os.getpid()}")
    with found.roles():
        found.start_gateway()
        yield found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def spans(run: GatewayRun, one: dict[str, Any]) -> list[Span]:
    return [event for event in run.attempt(one) if isinstance(event, Span)]


def test_conversation_lies_on_the_log_token_for_token(run: GatewayRun) -> None:
    one = run.one()
    key = one["key"]
    messages: list[Any] = [user("Say a.")]
    told = []
    for number in range(3):
        answer = run.chat(key, messages, return_token_ids=True, logprobs=True, temperature=0.3)
        told.append(answer)
        messages += [answer["choices"][0]["message"], user(f"again {number}")]
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) <= 8
    summary = run.finish(one["id"], 1.0)
    assert (summary["turns"], summary["branches"], summary["orphaned_tokens"]) == (3, 0, 0)
    events = run.attempt(one)
    started, ended = events[0], events[-1]
    assert isinstance(started, EpisodeStarted) and (started.temperature, started.top_p, started.top_k) == (1.0, 1.0, 0)
    assert isinstance(ended, EpisodeEnded) and (ended.outcome, ended.reward) == ("model_success", 1.0)
    assert {"queue", "prefill", "decode", "environment"} <= ended.timings_ms.keys()
    found = [event for event in events if isinstance(event, Span)]
    assert [s.source for s in found] == ["prompt", "model"] + ["environment", "model"] * 2
    assert [s.turn for s in found] == [0, 0, 0, 1, 1, 2] and all(s.parent == -1 for s in found)
    for number, answer in enumerate(told):
        span, choice = found[2 * number + 1], answer["choices"][0]
        assert span.token_ids().tolist() == choice["token_ids"]
        logprobs = span.behaviour_logprobs()
        assert logprobs is not None and span.version_column().tolist() == [0] * span.count
        assert logprobs.tolist() == pytest.approx([one["logprob"] for one in choice["logprobs"]["content"]])
        assert path_of(found, span.sequence - 1) == answer["prompt_token_ids"]
        detail = json.loads(found[2 * number].detail or "")
        assert detail["asked"]["temperature"] == 0.3 and detail["messages"] == [
            user("Say a.") if not number else user(f"again {number - 1}")]  # fmt: skip
    run.finish(one["id"], 0.0)


def test_same_request_again_is_one_turn_and_gets_the_same_answer(run: GatewayRun) -> None:
    one = run.one()
    key, body = one["key"], {"messages": [user("Say bb.")], "max_tokens": 40, "model": "m"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: run.call("/v1/chat/completions", body, key), range(4)))
    late = run.call("/v1/chat/completions", body, key)
    assert all(answer == late for answer in answers)
    other = run.call("/v1/chat/completions", body | {"seed": 5}, key)
    assert other["id"] != late["id"]
    summary = run.finish(one["id"], 1.0)
    assert (summary["turns"], summary["retried"], summary["branches"]) == (2, 4, 1)
    model = [s for s in spans(run, one) if s.source == Source.MODEL]
    assert len(model) == 2 and model[0].parent == -1 and model[1].parent == 1  # both answer the prompt's span
    run.finish(one["id"], 0.0)


def test_client_that_goes_away_leaves_a_masked_orphan_and_its_retry_one_canonical_turn(run: GatewayRun) -> None:
    one = run.one()
    key, name = one["key"], one["id"]
    body = {"messages": [user("Say so.")], "max_tokens": 120, "model": "m", "stream": True}
    _leave(run, key, body | {"seed": 1})  # nobody asks for this one again
    _leave(run, key, body)
    answer = run.call("/v1/chat/completions", body | {"stream": False}, key)  # within the grace: the same turn
    run.chat(key, [user("Say so."), answer["choices"][0]["message"], user("next")])
    summary = run.finish(name, 1.0)
    assert (summary["turns"], summary["orphaned_turns"]) == (2, 1) and summary["orphaned_tokens"] > 0
    found = spans(run, one)
    masked = [s for s in found if s.source == Source.MODEL and s.mask is not None]
    assert {s.stop_reason for s in masked} == {"orphaned"} and not any(b"".join(s.mask or b"" for s in masked))
    assert sum(s.count for s in masked) == summary["orphaned_tokens"]
    reasons = [json.loads(s.detail).get("orphaned") for s in found if s.detail]
    assert reasons.count(None) == 2 and {"aborted", "nobody saw the answer"} & set(reasons)
    trained = [s for s in found if s.source == Source.MODEL and s.mask is None]
    assert sum(s.count for s in trained[:-1]) == answer["usage"]["completion_tokens"]
    assert not set(path_of(found, trained[-1].sequence)) - set(range(300))
    run.finish(one["id"], 0.0)


def _used(run: GatewayRun, one: dict[str, Any]) -> dict[str, Any]:
    """An episode that had a turn and a success, so that its slot waits for nobody."""
    run.chat(one["key"], [user("now")])
    run.finish(one["id"], 1.0)
    return one


def _leave(run: GatewayRun, key: str, body: dict[str, Any]) -> None:
    """Ask, read a little of the stream, and hang up."""
    place = urlsplit(run.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {key}"})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_stream_says_what_the_whole_answer_says(run: GatewayRun) -> None:
    one = run.one()
    key = one["key"]
    place = urlsplit(run.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    body = {"messages": [user("Say tree.")], "max_tokens": 30, "model": "m", "stop": ["e"]}
    connection.request("POST", "/v1/chat/completions", json.dumps(
        body | {"stream": True, "stream_options": {"include_usage": True}}), {"authorization": f"Bearer {key}"})
    lines = [line for line in connection.getresponse().read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    whole = run.call("/v1/chat/completions", body, key)
    assert text == whole["choices"][0]["message"]["content"] and "e" not in text
    assert chunks[-1]["usage"] == whole["usage"] and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert {c["id"] for c in chunks} == {whole["id"]}
    run.finish(one["id"], 0.0)


def test_changed_history_is_a_branch_on_the_log(run: GatewayRun) -> None:
    one = run.one()
    key, name = one["key"], one["id"]
    first = run.chat(key, [user("one")])["choices"][0]["message"]
    run.chat(key, [user("one"), first, user("two")])
    run.chat(key, [user("one"), first, user("three")])  # beside it
    run.chat(key, [{"role": "system", "content": "compacted"}, user("four")])
    summary = run.finish(name, 1.0)
    assert (summary["turns"], summary["branches"]) == (4, 2)
    found = spans(run, one)
    by_source = [(s.source, s.parent) for s in found]
    assert by_source == [("prompt", -1), ("model", -1), ("environment", -1), ("model", -1), ("environment", 2),
                         ("model", -1), ("prompt", 0), ("model", -1)]  # fmt: skip
    assert path_of(found, 5)[: len(path_of(found, 2))] == path_of(found, 2)
    reasons = [json.loads(s.detail or "{}").get("branch") for s in found if s.detail]
    assert reasons == [None, None, "goes on after turn 0, which isn't the newest", "message 0 changed"]
    run.finish(one["id"], 0.0)


@pytest.mark.parametrize(("more", "status", "code"), [
    ({"n": 2}, 400, "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter"),
    ({"tool_choice": "required"}, 400, "unsupported_parameter"),
    ({"messages": []}, 400, "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
     "unsupported_content"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded"),
])  # fmt: skip
def test_what_is_not_supported_is_said_in_the_protocols_words(run: GatewayRun, more: Any, status: int,
                                                              code: str) -> None:  # fmt: skip
    one = run.one()
    with pytest.raises(Answered) as answered:
        run.call("/v1/chat/completions", {"messages": [user("x")], "model": "m"} | more, one["key"])
    assert (answered.value.status, answered.value.body["error"]["code"]) == (status, code)
    _used(run, one)


def test_keys_open_their_own_door_alone(run: GatewayRun) -> None:
    one = run.one()
    key = one["key"]
    for path, body, wrong in (("/v1/chat/completions", {"messages": [user("x")]}, "hr-guess"),
                              ("/v1/chat/completions", {"messages": [user("x")]}, "the admin token"),
                              ("/v1/episodes", {}, key), (f"/v1/episodes/{one['id']}", None, key)):
        with pytest.raises(Answered) as answered:
            run.call(path, body, wrong)
        assert answered.value.status == 401
    log = (run.folder / "gw.log").read_text()
    assert key not in log and "key " in log
    _used(run, one)
    with pytest.raises(Answered) as answered:
        run.chat(key, [user("late")])
    assert answered.value.status == 401


def test_budget_of_tokens_is_the_episodes_own(run: GatewayRun) -> None:
    one = run.one()
    key = one["key"]
    spent, messages = 0, [user("go")]
    with pytest.raises(Answered) as answered:
        for _ in range(200):
            answer = run.chat(key, messages, max_tokens=200)
            spent += answer["usage"]["completion_tokens"]
            messages = [user(f"go {spent}")]
    assert answered.value.body["error"]["code"] == "token_budget_spent"
    assert spent == run.settings.rollout.max_new_tokens
    run.finish(one["id"], 0.0)


def test_episode_without_a_turn_is_no_ones_success_and_its_slot_waits_for_whoever_asks(run: GatewayRun) -> None:
    given = run.episodes(size=2)
    first, second = given["episodes"]
    run.chat(second["key"], [user("here")])
    run.finish(second["id"], 1.0)
    done = run.finish(first["id"], 1.0)
    assert (done["result"]["outcome"], done["result"]["reason"]) == ("infra_failure", "no_turn")
    assert run.finish(first["id"], 0.0) == done  # again: the same
    again = _used(run, run.one(purpose="train"))
    while again["group"] != given["group"]:  # word of the end is still on its way to the coordinator
        again = _used(run, run.one(purpose="train"))
    assert (again["slot"], again["attempt"]) == (first["slot"], 1)
    assert run.closed([given["group"]])[given["group"]].closure == "zero_variance"


def test_evaluation_may_be_greedy_and_is_never_trained(run: GatewayRun) -> None:
    given = run.episodes(purpose="eval", size=2, greedy=True)
    answers = [run.chat(one["key"], [user("same")])["choices"][0]["message"] for one in given["episodes"]]
    assert answers[0] == answers[1]
    for number, one in enumerate(given["episodes"]):
        run.finish(one["id"], float(number))
    assert run.closed([given["group"]])[given["group"]].closure == "evaluated"
    started = run.attempt(given["episodes"][0] | {"group": given["group"]})[0]
    assert isinstance(started, EpisodeStarted) and started.temperature == 0.0
    with pytest.raises(Answered, match="greedy is for purpose eval"):
        run.episodes(greedy=True)


def test_half_open_connection_holds_nobody_else(run: GatewayRun) -> None:
    """A client that takes nothing of its stream, and one that never sends its body."""
    one, two = run.one(), run.one()
    key, other = one["key"], two["key"]
    place = urlsplit(run.url)
    stuck = [socket.create_connection((place.hostname, place.port)) for _ in range(2)]
    body = json.dumps({"messages": [user("x")], "max_tokens": 100, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: "
    stuck[0].sendall(head.encode() + f"{len(body)}\r\n\r\n".encode() + body)
    stuck[1].sendall(head.encode() + b"100000\r\n\r\n{")
    for number in range(3):
        assert run.chat(other, [user(f"hello {number}")])["usage"]["completion_tokens"] > 0
    for connection in stuck:
        connection.close()
    assert run.finish(one["id"], 0.0)["turns"] <= 1 and run.finish(two["id"], 0.0)["turns"] == 3


def test_stock_client_talks_streams_retries_and_is_told_errors_in_its_own_classes(run: GatewayRun) -> None:
    """The `openai` package as it is."""
    one = run.one()
    client = openai.OpenAI(base_url=f"{run.url}/v1", api_key=one["key"])
    tools: Any = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}}]
    messages: Any = [user("Say a.")]
    answer = client.chat.completions.create(model="m", messages=messages, max_tokens=12, tools=tools)
    assert answer.usage is not None and answer.usage.completion_tokens <= 12
    messages += [answer.choices[0].message, user("on")]
    stream = client.chat.completions.create(model="m", messages=messages, max_tokens=12, tools=tools, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    impatient = client.with_options(timeout=0.02, max_retries=40)
    messages += [{"role": "assistant", "content": text}, user("and on")]
    answer = impatient.chat.completions.create(model="m", messages=messages, max_tokens=40, tools=tools)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        client.chat.completions.create(model="m", messages=messages, n=2)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="hr-other").chat.completions.create(model="m", messages=messages)
    assert [model.id for model in client.models.list()] == [run.topics.run]
    completion = client.completions.create(model="m", prompt="Once", max_tokens=5)
    assert completion.choices[0].finish_reason in ("stop", "length")
    summary = run.finish(one["id"], 1.0)
    assert (summary["turns"], summary["orphaned_turns"]) == (4, 0), summary
    found = spans(run, one)
    assert found[0].count > len("Say a.") + 300  # its template knows no tools: they came in words
    assert [s.mask for s in found if s.source == Source.MODEL] == [None] * 4


def test_ledger_of_everything_above_closes(run: GatewayRun) -> None:
    ledger = run.ledger()
    assert ledger.closes, ledger.failures
    assert run.gateway is not None and run.gateway.poll() is None
    run.gateway.send_signal(signal.SIGTERM)
    assert run.gateway.wait(60) == 0, Path(run.folder / "gw.log").read_text()[-2000:]
