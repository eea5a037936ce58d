"""What becomes of an agent's requests: turns, retries, orphans, and how they lie on the log. A scripted replica
samples; everything else is real, but for the way to the broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from headrace.producers.engines import Engine, GenerationRequest, Progress, ReplicaHealth
from headrace.producers.episodes import Attempt, EpisodeWriter
from headrace.producers.gateway import app
from headrace.producers.gateway.attempts import AgentEpisode
from headrace.producers.gateway.protocol import Asked, Refused, chat_request, completion_request
from headrace.producers.gateway.reading import Reading
from headrace.producers.gateway.tokenizer import Tokenizer
from headrace.producers.gateway.turns import Turn
from headrace.producers.gateway.updates import OnUpdate, Updates
from headrace.producers.receiver import Receiver
from headrace.schemas.errors import Backpressure, HeadraceError, ReplicaLost
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Event, Span
from headrace.schemas.outcomes import Boundary, Outcome, Source
from tests.chat_templates import Pairs
from tests.scripted import lease, run_settings, spec

SETTINGS = run_settings(model={"path": "unused", "max_length": 400}, rollout={"max_new_tokens": 100})


class Scripted:
    """Says `texts` in turn, one character a token, each when `go` lets it."""

    name = "scripted"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[GenerationRequest] = []
        self.aborted = 0
        self.go = asyncio.Semaphore(0)
        self.free = True  # nobody need let it

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        self.requests.append(request)
        text, ended = self.texts.pop(0), False
        try:
            ids = [100 + ord(c) for c in text.removesuffix("!")] + [2]
            for number, token in enumerate(ids[: request.sampling.max_new_tokens]):
                if not self.free:
                    await self.go.acquire()
                if text.endswith("!") and token == 2:
                    raise ReplicaLost("it died")
                last = number + 1 == request.sampling.max_new_tokens
                ended = token == 2 or last
                yield Progress(request.request_id, np.array([token], np.int32), np.array([-0.5], np.float32), 3,
                               "stop" if token == 2 else "length" if last else None)  # fmt: skip
        finally:
            self.aborted += not ended
            await asyncio.sleep(0)  # as who closes a connection

    async def health(self) -> ReplicaHealth:
        return ReplicaHealth(3, True, 0, 0, 8)

    async def close(self) -> None:
        pass


class Stage:
    """An episode, its replica, and what was written."""

    def __init__(self, *texts: str, grace_s: float = 0.05, full: int = 0, **rules: Any) -> None:
        """`full`: so many calls are told that the queue is full."""
        self.replica, self.events, self._full = Scripted(*texts), list[Event](), full
        self.given_up: list[HeadraceError] = []
        writer = EpisodeWriter(Attempt("g", 0, 0, "w0"), self._send, 512)
        tokenizer = cast(Tokenizer, Pairs())

        async def sample(episode: AgentEpisode, turn: Turn) -> None:
            await turn.generate(self.replica, tokenizer.eos)

        def give_up(writer: EpisodeWriter, error: HeadraceError) -> None:
            self.given_up.append(error)
            writer.abandon()

        rules = {"max_tokens": 100} | rules
        self.episode = AgentEpisode(lease(rules=spec(**rules)), writer.attempt, writer, SETTINGS, tokenizer, sample,
                                    worker="gw", engine={}, greedy=False, grace_s=grace_s, give_up=give_up)  # fmt: skip

    def _send(self, key: str, event: Event) -> None:
        if self._full:
            self._full -= 1
            raise Backpressure("full")
        self.events.append(event)

    async def say(self, *messages: dict[str, Any], **more: Any) -> Turn:
        """Ask, wait for the answer, and take it."""
        turn = self.episode.ask(asked(*messages, **more))
        while not turn.over:
            await turn.more()
        if turn.error is None:
            self.episode.saw(turn)
        self.episode.left(turn)
        return turn

    async def end(self, reward: float = 1.0) -> list[Span]:
        await self.episode.end(Outcome.MODEL_SUCCESS, "finished", Boundary.NONE, reward=reward)
        return [event for event in self.events if isinstance(event, Span)]


def asked(*messages: dict[str, Any], **more: Any) -> Asked:
    return chat_request({"model": "m", "messages": list(messages), **more})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def staged(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(within())


def shape(spans: Sequence[Span]) -> list[tuple[str, int, int, bool]]:
    return [(span.source, span.turn, span.parent, span.mask is None) for span in spans]


def test_turns_lie_on_the_log_with_what_was_said_between_them() -> None:
    async def test() -> None:
        stage = Stage("yes", "no")
        await stage.say(user("q"), temperature=0.1)
        turn = await stage.say(user("q"), said("yes"), {"role": "tool", "content": "r", "tool_call_id": "1"})
        assert stage.replica.requests[1].prompt == turn.prompt.ids and turn.prompt.branch is None
        spans = await stage.end()
        assert shape(spans) == [("prompt", 0, -1, True), ("model", 0, -1, True), ("environment", 0, -1, True),
                                ("model", 1, -1, True)]  # fmt: skip
        ids = [token for span in spans for token in span.token_ids().tolist()]
        assert ids == [*turn.prompt.ids, *turn.tokens] and spans[1].version_column().tolist() == [3] * 4
        details = [json.loads(span.detail) for span in spans if span.detail]
        assert details[0]["asked"] == {"model": "m", "temperature": 0.1}
        assert details[1]["messages"] == [{"role": "tool", "content": "r", "tool_call_id": "1"}]
        started, ended = stage.events[0], stage.events[-1]
        assert isinstance(started, EpisodeStarted) and started.temperature == SETTINGS.rollout.temperature
        assert isinstance(ended, EpisodeEnded) and ended.outcome == "model_success"

    staged(test)


def test_retry_of_a_running_request_is_the_same_turn() -> None:
    async def test() -> None:
        stage = Stage("yes")
        stage.replica.free = False
        first = stage.episode.ask(asked(user("q")))
        await asyncio.sleep(0)
        stage.episode.left(first)  # its client timed out
        again = stage.episode.ask(asked(user("q"), stream=True))  # streamed this time
        assert again is first
        stage.replica.free = True
        stage.replica.go.release()
        while not again.over:
            await again.more()
        await asyncio.sleep(0.1)  # beyond the grace
        stage.episode.saw(again)
        stage.episode.left(again)
        assert stage.episode.ask(asked(user("q"))) is first  # and late
        spans = await stage.end()
        assert len(stage.replica.requests) == 1 and [s.source for s in spans] == ["prompt", "model"]
        assert stage.episode.counts["retried"] == 2 and not stage.replica.aborted

    staged(test)


def test_request_that_nobody_waits_for_is_aborted_and_masked_and_its_late_retry_is_canonical() -> None:
    async def test() -> None:
        stage = Stage("a long answer", "short")
        stage.replica.free = False
        turn = stage.episode.ask(asked(user("q")))
        stage.replica.go.release()
        stage.replica.go.release()
        while len(turn.tokens) < 2:
            await turn.more()
        stage.episode.left(turn)
        await asyncio.sleep(0.2)
        assert stage.replica.aborted == 1 and turn.error is not None
        stage.replica.free = True
        again = await stage.say(user("q"))
        assert again is not turn and again.answer().content == "short"
        await stage.say(user("q"), said("short"), user("w")) if stage.replica.texts else None
        spans = await stage.end()
        assert shape(spans) == [("prompt", 0, -1, True), ("model", 0, -1, False), ("prompt", 1, 0, True),
                                ("model", 1, -1, True)]  # fmt: skip
        assert spans[1].mask == bytes(2) and spans[1].stop_reason == "orphaned"
        assert json.loads(spans[0].detail or "")["orphaned"] == "aborted"
        assert stage.episode.counts["orphaned_tokens"] == 2

    staged(test)


@pytest.mark.parametrize("again", [True, False])
def test_client_whose_connection_stalls_is_as_one_that_went_away(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half open: it takes nothing more of its stream, and never says that it is gone."""
    monkeypatch.setattr(app, "SEND_S", 0.05)

    async def test() -> None:
        stage, taken = Stage("yes"), list[Any]()
        request = asked(user("q"), stream=True)
        turn = stage.episode.ask(request)
        while not turn.over:
            await turn.more()

        async def send(message: Any) -> None:
            taken.append(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # its buffers are full

        async def receive() -> Any:
            await asyncio.Event().wait()

        await app._Answer(stage.episode, turn, request)({"type": "http"}, receive, send)
        assert len(taken) == 2 and not turn.seen and not turn.watchers
        if again:
            assert await stage.say(user("q")) is turn and turn.seen
        spans = await stage.end()
        assert len(stage.replica.requests) == 1 and [span.source for span in spans] == [Source.PROMPT, Source.MODEL]
        assert spans[1].count == 4 and (spans[1].mask is None) == again  # whole, once, and trained if it was seen

    staged(test)


def test_answer_that_nobody_took_is_an_orphan_at_the_end_unless_a_later_request_carries_it() -> None:
    async def test() -> None:
        stage = Stage("one", "two", "three")
        for messages in ((user("a"),), (user("b"),)):
            turn = stage.episode.ask(asked(*messages))
            while not turn.over:
                await turn.more()
            stage.episode.left(turn)  # complete, and not taken
        await stage.say(user("a"), said("one"), user("next"))  # the agent has it after all
        spans = await stage.end()
        assert [s.mask is None for s in spans if s.source == Source.MODEL] == [True, True, False]
        assert stage.episode.counts["turns"] == 2 and stage.episode.counts["orphaned_turns"] == 1

    staged(test)


def test_parallel_requests_of_one_agent_are_siblings_in_the_tree() -> None:
    async def test() -> None:
        stage = Stage("ab", "cd", "ef")
        await stage.say(user("q"))
        one, two = (stage.episode.ask(asked(user("q"), said("ab"), user(text))) for text in "xy")
        while not (one.over and two.over):
            await (two if one.over else one).more()
        for turn in (two, one):  # taken in the other order
            stage.episode.saw(turn)
            stage.episode.left(turn)
        spans = await stage.end()
        assert shape(spans)[2:] == [("environment", 0, -1, True), ("model", 1, -1, True),
                                    ("environment", 1, 2, True), ("model", 2, -1, True)]  # fmt: skip
        assert spans[4].token_ids().tolist() == list(one.prompt.ids[one.prompt.known :])

    staged(test)


def test_lost_replica_is_an_error_that_asks_for_a_retry_and_its_tokens_are_accounted() -> None:
    async def test() -> None:
        stage = Stage("hal!", "whole")
        lost = await stage.say(user("q"))
        assert lost.error is not None and (lost.error.status, lost.error.code) == (503, "replica_lost")
        assert (await stage.say(user("q"))).answer().content == "whole"
        spans = await stage.end()
        assert [(s.count, s.mask is None) for s in spans if s.source == Source.MODEL] == [(3, False), (6, True)]

    staged(test)


def test_full_queue_holds_the_episode_and_loses_nothing() -> None:
    async def test() -> None:
        stage = Stage("yes", "no", full=7)
        await stage.say(user("q"))
        await stage.say(user("q"), said("yes"), user("w"))
        await stage.end()
        numbers = [cast(Span, event).sequence for event in stage.events]
        assert numbers == list(range(6)) and not stage.given_up

    staged(test)


@pytest.mark.parametrize(("rules", "code"), [({"max_tokens": 4}, "token_budget_spent"),
                                             ({"max_turns": 1}, "turn_budget_spent")])  # fmt: skip
def test_budgets_end_the_asking_and_not_the_episode(rules: dict[str, Any], code: str) -> None:
    async def test() -> None:
        stage = Stage("yes", **rules)
        assert (await stage.say(user("q"))).answer().content == "yes"
        with pytest.raises(Refused) as refused:
            stage.episode.ask(asked(user("q"), said("yes"), user("w")))
        assert refused.value.code == code and len(await stage.end()) == 2

    staged(test)


def test_what_cannot_be_written_ends_the_attempt_and_says_so() -> None:
    async def test() -> None:
        stage = Stage("yes")

        def refuse(key: str, event: Event) -> None:
            raise HeadraceError("the broker refuses it")

        stage._send = refuse  # type: ignore[method-assign]
        stage.episode.writer._send = refuse
        await stage.say(user("q"))
        await asyncio.sleep(0.05)
        assert stage.given_up and stage.episode.over == "the broker refuses it"
        with pytest.raises(Refused, match="is over"):
            stage.episode.ask(asked(user("again")))

    staged(test)


def test_stop_string_ends_the_answer_and_its_tokens_stay_in_the_turn() -> None:
    async def test() -> None:
        stage = Stage("say STOP and more", "next")
        turn = await stage.say(user("q"), stop=["STOP"])
        assert turn.answer().content == "say " and len(turn.tokens) == len("say STOP") and stage.replica.aborted == 1
        after = await stage.say(user("q"), said("say "), user("w"), stop=["STOP"])
        assert after.prompt.branch is None and after.prompt.ids[: after.prompt.known][-8:] == tuple(turn.tokens)
        assert shape(await stage.end())[1] == ("model", 0, -1, True)

    staged(test)


def test_text_that_may_become_a_stop_string_is_held() -> None:
    reading = Reading(["<end>"], tools=False)
    shown = []
    for piece in ("a", "<e", "n", "x", "<end", ">", "z"):
        reading.add(piece)
        shown.append(reading.text[: reading.shown()])
    assert shown == ["a", "a", "a", "a<enx", "a<enx", "a<enx", "a<enx"] and reading.stopped


def test_tool_call_is_told_as_one_and_not_streamed_as_text() -> None:
    async def test() -> None:
        raw = 'ok<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
        stage = Stage(raw)
        turn = stage.episode.ask(asked(user("q"), tools=[{"type": "function", "function": {"name": "bash"}}]))
        seen = set()
        while not turn.over:
            await turn.more()
            seen.add(turn.reading.text[: turn.reading.shown()])
        assert seen <= {"", "o", "ok"}
        message = turn.told().whole()["choices"][0]
        assert message["finish_reason"] == "tool_calls" and message["message"]["content"] == "ok"
        call = message["message"]["tool_calls"][0]["function"]
        assert (call["name"], json.loads(call["arguments"])) == ("bash", {"command": "ls"})

    staged(test)


def test_the_same_request_has_one_key_and_another_has_another() -> None:
    plain = asked(user("q"))
    assert plain.key == asked(user("q"), stream=True, stream_options={"include_usage": True}).key
    assert len({asked(user("q"), seed=1).key, plain.key, asked(user("q"), temperature=0.5).key}) == 3
    parts = asked({"role": "user", "content": [{"type": "text", "text": "q"}]})
    assert parts.said == plain.said
    with pytest.raises(Refused, match="one prompt a request"):
        completion_request({"prompt": ["a", "b"]})
    with pytest.raises(Refused, match="must be a JSON object"):
        chat_request([])


class Weights:
    """A receiver that has a version ready."""

    def __init__(self) -> None:
        self.ready = True

    def sampled(self, version: int) -> None:
        pass

    def apply_ready(self, engine: Any) -> list[str]:
        if self.ready:
            self.ready, engine.version = False, engine.version + 1
        return ["clock"]


class Serving:
    version = 1


@pytest.mark.parametrize(("policy", "aborts"), [("keep", 0), ("hold", 0), ("abort", 1)])
def test_new_weights_wait_for_requests_that_run_or_not_as_the_setting_says(policy: OnUpdate, aborts: int) -> None:
    async def test() -> None:
        engine, aborted = Serving(), []
        updates = Updates(policy, cast(Receiver, Weights()), lambda clock: None)
        updates.version, updates.abort = 1, lambda: aborted.append(1)
        await updates.admitted(1)
        for _ in range(3):
            updates.between_steps(cast(Engine, engine))
        assert engine.version == (2 if policy == "keep" else 1) and len(aborted) == aborts
        if policy != "keep":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(updates.admitted(0), 0.2)
            updates.ended(1)
            updates.between_steps(cast(Engine, engine))
        await asyncio.wait_for(updates.admitted(2), 1)
        assert updates.version == engine.version == 2

    staged(test)


def test_version_that_an_evaluation_is_pinned_to_stays_served() -> None:
    engine, updates = Serving(), Updates("keep", cast(Receiver, Weights()), lambda clock: None)
    updates.pin("e", 1)
    updates.between_steps(cast(Engine, engine))
    assert engine.version == 1
    updates.unpin("e")
    updates.between_steps(cast(Engine, engine))
    assert engine.version == 2
