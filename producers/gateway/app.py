"""Speaks HTTP for the gateway: bodies in, answers out, whole or as server-sent events; and notices who went away.

An agent authenticates with its episode's key, whoever launches agents with the admin token. An answer counts as seen
when all of it was handed to a connection that stood until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from orjson import dumps
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.schemas.errors import Backpressure, HeadraceError, NoProgress
from headrace.schemas.outcomes import Boundary, Outcome, Purpose

from ..groups import judged
from ..watch import Watch
from .attempts import AgentEpisode
from .lessee import REASON_FINISHED, Gateway
from .protocol import Asked, Refused, chat_request, completion_request, envelope, last_piece, piece
from .turns import Turn

M = TypeVar("M", bound=BaseModel)
Answering = Callable[[Request], Awaitable[Response]]

BODY_BYTES = 64 << 20
BODY_S = 60.0  # for a body to come
SEND_S = 30.0  # a client that takes nothing for so long is gone
WAIT_S = 60.0  # for a group, unless the request says otherwise


class _Lease(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int | None = Field(None, ge=1)
    task: str | None = None
    purpose: Purpose = Purpose.TRAIN
    version: int | None = Field(None, ge=0)
    greedy: bool = False
    wait_s: float = Field(WAIT_S, gt=0, le=3600)


class _Finish(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: float | None = None
    rewards: dict[str, float | None] = {}
    outcome: Outcome | None = None
    reason: str = REASON_FINISHED
    boundary: Literal["none", "model", "environment", "scorer"] | None = None
    text: str | None = None


def application(gateway: Gateway, *, token: str, model: str, base_url: str) -> Starlette:
    """`token`: of the admin side; `model`: the name that /v1/models gives; `base_url`: what agents are told."""

    async def chat(request: Request) -> Response:
        return await _answered(gateway.of_key(_bearer(request)), request, chat_request)

    async def completions(request: Request) -> Response:
        return await _answered(gateway.of_key(_bearer(request)), request, completion_request)

    async def models(request: Request) -> Response:
        found = {"id": model, "object": "model", "created": 0, "owned_by": "headrace",
                 "max_model_len": gateway.settings.model.max_length}  # fmt: skip
        return JSONResponse(found if "name" in request.path_params else {"object": "list", "data": [found]})

    async def lease(request: Request) -> Response:
        asked = _form(_Lease, await _json(request))
        if asked.greedy and asked.purpose != Purpose.EVAL:
            raise Refused(400, "greedy is for purpose eval: a train episode is sampled at the run's temperature",
                          code="invalid_value", param="greedy")  # fmt: skip
        issued = await gateway.lease(asked.size, asked.task, asked.purpose, asked.version, asked.wait_s,
                                     greedy=asked.greedy)  # fmt: skip
        if await request.is_disconnected():
            gateway.withdraw(issued)
            return Response(status_code=499)
        task = issued[0].episode.lease.task
        return JSONResponse({
            "group": issued[0].episode.lease.group, "purpose": asked.purpose, "model": model,
            "task": {"id": task.id, "source": task.source, "data": task.data, "seed": task.seed},
            "episodes": [{"id": one.episode.id, "slot": one.episode.attempt.slot,
                          "attempt": one.episode.attempt.attempt, "base_url": base_url, "key": one.key}
                         for one in issued],
        })  # fmt: skip

    async def finish(request: Request) -> Response:
        said = _form(_Finish, await _json(request))
        outcome, reason, boundary = judged(said.reward, said.outcome, said.reason)
        if outcome.trainable and said.reward is None:
            raise Refused(400, f"{outcome} needs a reward", code="invalid_value", param="reward")
        if said.boundary is not None:
            boundary = Boundary(said.boundary)
        return JSONResponse(await gateway.finish(request.path_params["id"], outcome, reason, boundary,
                                                 reward=said.reward, rewards=said.rewards, text=said.text))  # fmt: skip

    async def episode(request: Request) -> Response:
        return JSONResponse(gateway.summary(request.path_params["id"]))

    async def totals(request: Request) -> Response:
        return JSONResponse(gateway.totals())

    def admin(answer: Answering) -> Answering:
        async def checked(request: Request) -> Response:
            if not hmac.compare_digest(_bearer(request).encode(), token.encode()):
                raise Refused(401, "this needs the admin token of the gateway", code="invalid_api_key")
            return await answer(request)

        return checked

    def route(path: str, answer: Answering, method: str = "GET") -> Route:
        return Route(path, _guarded(answer), methods=[method])

    return Starlette(routes=[
        route("/v1/chat/completions", chat, "POST"),
        route("/v1/completions", completions, "POST"),
        route("/v1/models", models),
        route("/v1/models/{name:path}", models),
        route("/v1/episodes", admin(lease), "POST"),
        route("/v1/episodes/{id}", admin(episode)),
        route("/v1/episodes/{id}/finish", admin(finish), "POST"),
        route("/v1/gateway", admin(totals)),
    ])  # fmt: skip


async def _answered(episode: AgentEpisode, request: Request, understand: Callable[[Any], Asked]) -> Response:
    asked = understand(await _json(request))
    return _Answer(episode, episode.ask(asked), asked)


class _Answer(Response):
    """A turn on its way to one client."""

    def __init__(self, episode: AgentEpisode, turn: Turn, asked: Asked) -> None:
        self._episode, self._turn, self._asked = episode, turn, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn = self._turn
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: turn.tell())
        try:
            whole = await (self._stream(gone, send) if self._asked.stream else self._at_once(gone, send))
            if whole:
                self._episode.saw(turn)
        except (TimeoutError, OSError):
            pass  # it took nothing for too long, or its connection broke
        finally:
            gone.cancel()
            self._episode.left(turn)

    async def _at_once(self, gone: asyncio.Task[None], send: Send) -> bool:
        """Whether all of it was handed over."""
        turn = self._turn
        while not turn.over and not gone.done():
            await turn.more()
        if gone.done():
            return False
        if turn.error is not None:
            await _refusal(turn.error)({"type": "http"}, _never, send)
            return False
        body = json.dumps(turn.told().whole()).encode()
        async with asyncio.timeout(SEND_S):
            await send(_start(200, b"application/json", len(body)))
            await send({"type": "http.response.body", "body": body})
        return True

    async def _stream(self, gone: asyncio.Task[None], send: Send) -> bool:
        turn, asked, sent, begun = self._turn, self._asked, 0, False
        head, around = "", (b"", b"")
        with contextlib.closing(Watch(lambda since: since + SEND_S)) as watch:
            while not gone.done():
                over = turn.over
                if over and turn.error is not None and not begun:
                    await _refusal(turn.error)({"type": "http"}, _never, send)
                    return False
                events = b""
                if not begun and (over or turn.tokens):
                    version = turn.runs[-1][0] if turn.runs else 0
                    head = json.dumps(envelope(turn.name, turn.created, asked, f"v{version}", stream=True))[:-1]
                    around = _around(head, asked)
                    await send(_start(200, b"text/event-stream"))
                    begun = True
                    if asked.kind == "chat":
                        events = _event(head, piece(asked, "", first=True))
                shown = turn.reading.shown()
                if shown > sent:
                    events += around[0] + dumps(turn.reading.text[sent:shown]) + around[1]
                    sent = shown
                if over:
                    events += self._end(head)
                if events:
                    with watch:
                        await send({"type": "http.response.body", "body": events, "more_body": not over})
                if over:
                    return turn.error is None
                await turn.more()
        return False

    def _end(self, head: str) -> bytes:
        if self._turn.error is not None:
            return f"data: {json.dumps(self._turn.error.body())}\n\n".encode()
        told = self._turn.told()
        usage = f'data: {head}, "choices": [], "usage": {json.dumps(told.usage())}}}\n\n'.encode()
        return _event(head, last_piece(told)) + usage * self._asked.stream_usage + b"data: [DONE]\n\n"


def _event(head: str, choice: dict[str, Any]) -> bytes:
    return f'data: {head}, "choices": [{json.dumps(choice)}]}}\n\n'.encode()


def _around(head: str, asked: Asked) -> tuple[bytes, bytes]:
    """What stands before and after a token's text in its event: the same for all of a stream."""
    mark = "\x00"
    before, after = _event(head, piece(asked, mark)).rsplit(json.dumps(mark).encode(), 1)
    return before, after


def _start(status: int, kind: bytes, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", kind)]
    headers += [(b"cache-control", b"no-cache")] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    raise AssertionError("a body is not asked for")


# ------------------------------------------------------------------------------------------------- what all routes do


def _guarded(answer: Answering) -> Answering:
    async def safely(request: Request) -> Response:
        try:
            return await answer(request)
        except Refused as refused:
            return _refusal(refused)
        except Backpressure as error:
            return _refusal(Refused(429, str(error), code="backpressure", retry_after_s=1.0))
        except NoProgress as error:
            return _refusal(Refused(503, str(error), code="no_progress", retry_after_s=5.0))
        except HeadraceError as error:
            return _refusal(Refused(503, f"{type(error).__name__}: {error}", code="unavailable"))
        except ClientDisconnect:
            return Response(status_code=499)

    return safely


def _refusal(refused: Refused) -> JSONResponse:
    headers = {} if refused.retry_after_s is None else {"retry-after": f"{refused.retry_after_s:g}"}
    return JSONResponse(refused.body(), refused.status, headers)


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise Refused(401, "send the key as `Authorization: Bearer KEY`", code="invalid_api_key")
    return key.strip()


async def _json(request: Request) -> Any:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise Refused(413, f"the body is larger than {BODY_BYTES >> 20} MiB", code="too_large")
    except TimeoutError:
        raise Refused(408, f"no whole body came within {BODY_S:g} s", code="timeout") from None
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}", code="invalid_json") from error


def _form(kind: type[M], body: Any) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"{where or 'body'}: {first['msg']}", code="invalid_value", param=where or None) from error
