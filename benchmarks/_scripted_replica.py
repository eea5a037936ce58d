"""A server that speaks the replica's protocol by a script: `python -m benchmarks._scripted_replica PORT TTFT_S GAP_S`.

Not a model: token i of a request is a fixed function of its prompt and seed, and leaves TTFT_S + i * GAP_S after the
request came, by the clock. Each event is written by itself. It takes weights without looking at them, so that a gateway
in front of it starts as in front of vLLM; what it says of log-probabilities follows the temperature, as a real one's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from typing import Any

import uvloop

WORDS = range(35, 90)  # printable characters of the tiny model's tokenizer


def token(prompt: list[int], seed: int, i: int) -> int:
    return WORDS[zlib.crc32(f"{sum(prompt)}/{len(prompt)}/{seed}/{i}".encode()) % len(WORDS)]


class Replica:
    def __init__(self, first_s: float, gap_s: float) -> None:
        self._first_s, self._gap_s = first_s, gap_s
        self._weights = "none"  # what their owner calls them

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                came = asyncio.get_running_loop().time()
                line, *rest = head.decode().split("\r\n")
                headers = dict(one.lower().split(": ", 1) for one in rest if ": " in one)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = line.split(" ")[1]
                if path == "/v1/completions":
                    await self._complete(json.loads(body), came, writer)
                else:
                    _whole(writer, self._said(path, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, asked: dict[str, Any], came: float, writer: asyncio.StreamWriter) -> None:
        prompt, n, loop = asked["prompt"], asked["max_tokens"], asyncio.get_running_loop()
        logprob = -1.0 if asked["temperature"] in (0.0, 1.0) else -0.001  # colder is surer
        fixed = asked["temperature"] < 0.1  # as greedily
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i in range(n):
            due = came + self._first_s + i * self._gap_s
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            found = token(prompt, 0 if fixed else asked["seed"], i)
            choice = {"index": 0, "text": chr(found), "token_ids": [found], "finish_reason": None,
                      "logprobs": {"token_logprobs": [logprob], "tokens": [f"token_id:{found}"]}}  # fmt: skip
            if i == n - 1:
                choice["finish_reason"] = "length"
            _chunk(writer, b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n")
            await writer.drain()
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _said(self, path: str, body: bytes) -> Any:
        """What vLLM answers besides."""
        if path == "/update_weight_version":
            self._weights = json.loads(body)["new_version"]
        return {"/v1/models": {"data": [{"id": "scripted", "max_model_len": 4096}]},
                "/weight_info": {"weight_version": self._weights}, "/collective_rpc": {"results": [[]]},
                "/reset_prefix_cache": {"success": True}}.get(path, {})  # fmt: skip


def _whole(writer: asyncio.StreamWriter, value: Any) -> None:
    body = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main(port: int, first_s: float, gap_s: float) -> None:
    server = await asyncio.start_server(Replica(first_s, gap_s).serve, "127.0.0.1", port, backlog=2048)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # it must not be what is measured
        runner.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
