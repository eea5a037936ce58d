"""What a replica makes of a server that isn't what it should be: real HTTP, answers that are wrong in one way each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.producers.engines import GenerationRequest, Progress, Sampling
from headrace.producers.engines.opening import KEY_VARIABLE, EngineChoice, open_replicas
from headrace.schemas.errors import EngineError, ModelError, ReplicaLost, SettingsError

pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from headrace.producers.engines.openai import OpenAIReplica  # noqa: E402

Completions = Callable[[web.Request], Awaitable[web.StreamResponse]]


def choice(**facts: Any) -> dict[str, Any]:
    return {"text": "x", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -0.25]},
            "finish_reason": None} | facts  # fmt: skip


def events(*choices: dict[str, Any] | str, end: bool = True, pieces: int = 0) -> Completions:
    """A stream of events; strings go out as they are. `pieces`: cut into so many bytes at a time."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = "".join(one if isinstance(one, str) else f"data: {json.dumps({'choices': [one]})}\n\n"
                       for one in choices).encode() + (b"data: [DONE]\n\n" if end else b"")  # fmt: skip
        for at in range(0, len(body), pieces or len(body)):
            await response.write(body[at : at + (pieces or len(body))])
        return response

    return answer


def status(code: int) -> Completions:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "because"}, status=code)

    return answer


def serve(completions: Completions, body: Callable[[OpenAIReplica], Coroutine[Any, Any, None]], *,
          models: Any = ({"id": "policy", "max_model_len": 128},), **given: Any) -> list[dict[str, Any]]:  # fmt: skip
    """Run `body` against such a server; returns the requests that it saw."""
    seen: list[dict[str, Any]] = []

    async def main() -> None:
        async def complete(request: web.Request) -> web.StreamResponse:
            seen.append(await request.json() | {"authorization": request.headers.get("Authorization")})
            return await completions(request)

        async def list_models(request: web.Request) -> web.Response:
            return web.json_response({"data": list(models)})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", list_models),
                        web.get("/health", health)])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        replica = OpenAIReplica(f"http://127.0.0.1:{port}/v1", **given)
        try:
            await replica.open()
            await asyncio.wait_for(body(replica), 20)
        finally:
            await replica.close()
            await runner.cleanup()

    asyncio.run(main())
    return seen


async def ask(replica: OpenAIReplica) -> list[Progress]:
    wanted = GenerationRequest("r", (1, 2, 3), Sampling(0.7, 4, 2**64 - 1), frozenset({9, 8}))
    return [one async for one in replica.generate(wanted)]


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_ids_and_logprobs_come_as_they_were_sent_however_the_stream_is_cut(pieces: int) -> None:
    async def body(replica: OpenAIReplica) -> None:
        steps = await ask(replica)
        assert [int(i) for one in steps for i in one.token_ids] == [5, 6, 7]
        assert [float(v) for one in steps for v in one.logprobs] == [-0.5, -0.25, -1.5]
        assert [one.finished for one in steps] == [None, "stop"]
        assert (await replica.health()).serving

    last = choice(token_ids=[7], logprobs={"token_logprobs": [-1.5]}, finish_reason="stop")
    stream = events(choice(prompt_token_ids=[1, 2, 3]), ": a comment\n\n", last, pieces=pieces)
    seen = serve(stream, body, api_key="sk-1", version=3)
    # Nothing is left to the server's defaults, or to those in the model's folder.
    assert seen[0] == {
        "model": "policy", "prompt": [1, 2, 3], "n": 1, "stream": True, "max_tokens": 4, "seed": 2**63 - 1,
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": [8, 9], "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False, "cache_salt": "v3",
        "authorization": "Bearer sk-1",
    }  # fmt: skip


@pytest.mark.parametrize(("completions", "error", "said"), [
    (events(choice(token_ids=None)), ModelError, "without their ids"),
    (events(choice(logprobs=None)), ModelError, "without their log-probabilities"),
    (events(choice(logprobs={"token_logprobs": [-0.5]})), ModelError, "without their log-probabilities"),
    (events(choice(logprobs={"token_logprobs": [None, -0.5]})), ModelError, "without their log-probabilities"),
    (events(choice(prompt_token_ids=[1, 2, 4])), EngineError, "changed the prompt"),
    (events(choice(finish_reason="abort")), ReplicaLost, "abort"),
    (events(choice(), end=False), ReplicaLost, "after 2 tokens without a reason"),
    (events(choice(), "data: {]\n\n"), ReplicaLost, "after 2 tokens"),
    (events(choice(), 'data: {"error": {"message": "CUDA"}}\n\n'), ReplicaLost, "CUDA"),
    (status(400), EngineError, "400.*because"),
    (status(401), EngineError, "401"),
    (status(429), ReplicaLost, "429"),
    (status(503), ReplicaLost, "503"),
])  # fmt: skip
def test_an_answer_that_is_wrong_is_an_error_that_says_what_and_whether_another_replica_may_help(
    completions: Completions, error: type[Exception], said: str
) -> None:
    async def body(replica: OpenAIReplica) -> None:
        with pytest.raises(error, match=said):
            await ask(replica)

    serve(completions, body)


def test_a_server_of_several_models_or_of_another_one_must_be_told_which() -> None:
    async def body(replica: OpenAIReplica) -> None:
        raise AssertionError("opened")

    with pytest.raises(ModelError, match="one, two.*name the model"):
        serve(events(), body, models=({"id": "one"}, {"id": "two"}))
    with pytest.raises(ModelError, match="not policy"):
        serve(events(), body, models=({"id": "one"},), model="policy")


def test_a_server_without_our_extension_takes_no_weights_and_says_how_it_would() -> None:
    class Folder:
        dtype, bits = "float32", dict[str, Any]()

    async def body(replica: OpenAIReplica) -> None:
        raise AssertionError("opened")

    with pytest.raises(ModelError, match="VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls headrace"):
        serve(events(), body, folder=Folder())


def test_a_place_where_nobody_listens_is_a_lost_replica() -> None:
    async def main() -> None:
        replica = OpenAIReplica("http://127.0.0.1:9")
        with pytest.raises(ReplicaLost, match="127.0.0.1:9"):
            await replica.health()
        with pytest.raises(ReplicaLost):
            await ask(replica)
        await replica.close()

    asyncio.run(main())


def test_addresses_and_keys_are_checked_and_a_key_is_never_part_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("ftp://host:1", "host:1", "http://me:secret@host:1"):
        with pytest.raises(ModelError) as refused:
            OpenAIReplica(address)
        assert "secret" not in str(refused.value)
    file = tmp_path / "key"
    with pytest.raises(SettingsError, match="can't be read"):
        open_replicas(EngineChoice("openai", replicas=("http://h:1",), key_file=str(file)))
    file.write_text("\n")
    with pytest.raises(SettingsError, match="empty"):
        open_replicas(EngineChoice("openai", replicas=("http://h:1",), key_file=str(file)))
    file.write_text("sk-file\n")
    with pytest.raises(SettingsError, match="site.replicas"):
        open_replicas(EngineChoice("openai"))
    monkeypatch.setenv(KEY_VARIABLE, "sk-variable")
    for choice_, key in ((EngineChoice("openai", replicas=("http://h:1", "http://h:2"), key_file=str(file)), "sk-file"),
                         (EngineChoice("openai", replicas=("http://h:1",)), "sk-variable")):  # fmt: skip
        replicas = open_replicas(choice_)
        assert [one.base_url for one in replicas] == list(choice_.replicas)
        assert all(key not in repr(one) + str(one) for one in replicas)
