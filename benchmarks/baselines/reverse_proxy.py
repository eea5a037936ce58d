"""A bare reverse proxy of the gateway's own framework: what one writes in an hour, and what any hop in between costs.

It passes bodies on as they come and understands nothing. `python -m benchmarks.baselines.reverse_proxy PORT TARGET`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def application(target: str) -> Starlette:
    sessions: list[aiohttp.ClientSession] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            sessions.append(session)
            yield

    async def forward(request: Request) -> StreamingResponse:
        answer = await sessions[0].request(request.method, f"{target}{request.url.path}", data=await request.body(),
                                           headers={"content-type": "application/json"})  # fmt: skip

        async def parts() -> AsyncIterator[bytes]:
            async with answer:
                async for part in answer.content.iter_any():
                    yield part

        return StreamingResponse(parts(), answer.status, media_type=answer.content_type)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])], lifespan=lifespan)


async def _serve(port: int, target: str) -> None:
    server = uvicorn.Server(uvicorn.Config(application(target), port=port, log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await task


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the gateway's
        runner.run(_serve(int(sys.argv[1]), sys.argv[2]))
