"""Decides how a server that speaks the OpenAI protocol is used as one replica: token ids in, token ids out.

Such a server must return what no client can compute: the ids that it sampled and their processed log-probabilities
(vLLM does, with `return_token_ids` and `--logprobs-mode processed_logprobs`); one that doesn't is refused. Nothing is
ever tokenised on the way. A request runs on one version: before its weights change, every stream is cut here, so that
whoever retries it goes on from its tokens on the new version. A server has one owner, who writes its weights: the last
that took it; the one before finds another's mark there, and lets it be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from headrace.schemas.errors import EngineError, ModelError, ReplicaLost, RequestAborted

from . import Changes, Finished, GenerationRequest, Progress, ReplicaHealth
from .served import ModelFolder, as_text, messages, whole

CONNECT_S = 5.0
CONTROL_S = 20.0  # an answer to anything but a generation
CLEAR_TRIES = 50
WEIGHTS_S = 600.0  # an answer to a message of weights
RETRY_ELSEWHERE = frozenset({408, 409, 425, 429})  # and 5xx; any other refusal is the request's own fault
_METRIC = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class OpenAIReplica:
    """A server at `base_url` (without `/v1`); see `Replica` for the contract. `open` first.

    `model`: the name under which it serves (None: the only one it has). `capacity`: requests that it decodes at once.
    `folder`: the served weights, kept up to date by `apply`; needs a vLLM server in development mode with our worker
    extension (docs/engines.md). Without it the server's weights are taken to be `version` for ever.
    """

    def __init__(self, base_url: str, *, name: str | None = None, model: str | None = None, api_key: str | None = None,
                 capacity: int = 32, version: int = 0, folder: ModelFolder | None = None) -> None:  # fmt: skip
        """Connects to nothing yet. Raises ModelError for an address that is none, or without aiohttp."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise ModelError(f"{parts.hostname or base_url}: a replica's address is http(s)://HOST:PORT, without user "
                             "or password")  # fmt: skip
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.name = name or parts.netloc
        self.max_tokens: int | None = None  # prompt and completion, where the server tells
        try:
            import aiohttp
        except ImportError as error:
            raise ModelError("servers are reached through aiohttp: install headrace[openai]") from error
        # What a network, or a server that isn't what it should be, can do to an answer.
        self._lost = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError)
        self._model, self._capacity, self._folder = model, capacity, folder
        self._version: int | None = version  # None: the weights there are unknown
        self._mark = uuid.uuid4().hex[:12]  # on each version that is written here, so that another's is noticed
        self._opened = self._written = self._taken = False
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: Any = None
        self._responses: set[Any] = set()
        self._epoch = 0  # of weights: a stream of an earlier one is cut
        self._open_for_requests = asyncio.Event()
        self._open_for_requests.set()

    # ------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        await self._open_for_requests.wait()
        if self._version is None:
            raise ReplicaLost(f"replica {self.name}: its weights are unknown")
        epoch, version = self._epoch, self._version
        told, cached, finished = 0, None, None
        try:
            async with self._send("POST", "/v1/completions", self._body(request, version), None) as response:
                self._responses.add(response)
                try:
                    await self._accepted(response)
                    async for event in _events(response.content):
                        if self._epoch != epoch:
                            break
                        choice = (event.get("choices") or [None])[0]
                        if "error" in event:
                            raise ReplicaLost(f"replica {self.name}: {event['error']}")
                        if choice is None:
                            continue
                        ids, logprobs = self._tokens(choice, request)
                        finished = _finished(choice.get("finish_reason"))
                        if finished:  # read to the end, so that the connection serves again
                            with contextlib.suppress(*self._lost):
                                async with asyncio.timeout(1.0):
                                    await response.read()
                        if ids.size or finished:
                            yield Progress(request.request_id, ids, logprobs, version, finished, cached)
                            told += ids.size
                        if finished:
                            return
                finally:
                    self._responses.discard(response)
        except self._lost as error:
            if self._epoch == epoch:
                said = f"{error or type(error).__name__} after {told} tokens"
                raise ReplicaLost(f"replica {self.name}: {said}") from error
        if self._epoch != epoch:
            raise RequestAborted(f"replica {self.name}: its weights change")
        raise ReplicaLost(f"replica {self.name} ended its answer after {told} tokens without a reason")

    def _body(self, request: GenerationRequest, version: int) -> dict[str, Any]:
        """Every parameter of the distribution is stated, so that no default of the server or the model's folder
        counts."""
        sampling = request.sampling
        return {
            "model": self._model, "prompt": [int(i) for i in request.prompt], "n": 1, "stream": True,
            "max_tokens": sampling.max_new_tokens, "seed": sampling.seed % 2**63,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": sorted(request.stop_ids),
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False,
            "cache_salt": f"v{version}",
        }  # fmt: skip

    def _tokens(self, choice: dict[str, Any], request: GenerationRequest) -> tuple[Any, Any]:
        """Ids int32 [n] and log-probabilities float32 [n] of one event."""
        ids, columns = choice.get("token_ids"), choice.get("logprobs")
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and list(prompt) != [int(i) for i in request.prompt]:
            raise EngineError(f"replica {self.name} changed the prompt of {request.request_id!r}")
        if ids is None and not choice.get("text"):
            ids = []  # an event that only ends
        found = (columns or {}).get("token_logprobs") or []
        if ids is None or len(found) != len(ids) or None in found:
            lacking = "ids" if ids is None else "log-probabilities"
            raise ModelError(f"replica {self.name} returns tokens without their {lacking}: it can't serve training (a "
                             "vLLM server can)")  # fmt: skip
        return np.array(ids, np.int32), np.array(found, np.float32)

    # ------------------------------------------------------------------------------------------------ the server

    async def open(self) -> None:
        """Connect and learn what is served there. Raises ReplicaLost where nothing answers, ModelError where it can't
        be used."""
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            # A connection each: none may wait for another's to be free.
            self._session = aiohttp.ClientSession(self.base_url, headers=self._headers, timeout=timeout,
                                                  connector=aiohttp.TCPConnector(limit=0))  # fmt: skip
        models = (await self._ask("GET", "/v1/models")).get("data") or []
        names = [str(one["id"]) for one in models]
        if self._model is None and len(names) == 1:
            self._model = names[0]
        if self._model not in names:
            raise ModelError(f"replica {self.name} serves {', '.join(names) or 'nothing'}, not {self._model}: name the "
                             "model")  # fmt: skip
        self.max_tokens = next(one.get("max_model_len") for one in models if one["id"] == self._model)
        if self._folder is not None:
            try:
                await self._rpc("headrace_differing", "[]")
            except EngineError as error:
                raise ModelError(f"replica {self.name} takes no weights ({error}): start vLLM with "
                                 "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
                                 "headrace.producers.engines.vllm_worker.Extension") from error  # fmt: skip
        self._opened = True

    async def health(self) -> ReplicaHealth:
        if not self._opened:
            await self.open()
        await self._ask("GET", "/health")
        version = self._version
        if self._folder is not None and self._open_for_requests.is_set():
            epoch, served = self._epoch, await self._served_version()
            if served != version and epoch == self._epoch:
                version = self._version = None  # it was started anew
        counts = {"running": len(self._responses), "waiting": 0}
        try:
            text = await self._ask("GET", "/metrics", raw=True)
        except EngineError:
            text = b""  # another make of server
        for kind, value in _METRIC.findall(text):
            counts[kind.decode()] = int(float(value))
        return ReplicaHealth(-1 if version is None else version, version is not None, counts["running"],
                             counts["waiting"], self._capacity)  # fmt: skip

    async def _served_version(self) -> int | None:
        """What this owner wrote last there. Raises ReplicaLost where another has taken the server since."""
        mark, _, number = str((await self._ask("GET", "/weight_info")).get("weight_version")).partition(":")
        if mark == self._mark:
            return int(number)
        self._taken = self._taken or (self._written and number != "")
        if self._taken:
            raise ReplicaLost(f"replica {self.name} has been taken over by another worker")
        return None

    async def apply(self, version: int, changes: Changes) -> None:
        """Overwrite the server's weights; they were checked. Every stream here is cut first. Raises ReplicaLost, and
        then the weights there are unknown until they are made anew (`restore`)."""
        assert self._folder is not None
        await self._served_version()
        self._open_for_requests.clear()
        self._epoch += 1
        self._version = None
        for response in list(self._responses):
            response.close()
        try:
            await self._ask("POST", "/pause?mode=abort")
            await self._clear_cache()
            for parts in messages(self._folder.bits, changes):
                await self._rpc("headrace_write", as_text(parts))
            await self._ask("POST", "/update_weight_version", {"new_version": f"{self._mark}:{version}"})
            await self._ask("POST", "/resume")
            self._version, self._written = version, True
        except EngineError as error:
            raise ReplicaLost(f"replica {self.name} didn't take version {version}: {error}") from error
        finally:
            self._open_for_requests.set()

    async def _clear_cache(self) -> None:
        """No key of the old weights stays. Raises ReplicaLost where the server doesn't say that it did."""
        for _ in range(CLEAR_TRIES):  # what was aborted holds its blocks for a moment
            if (await self._ask("POST", "/reset_prefix_cache")).get("success"):
                return
            await asyncio.sleep(0.1)
        raise ReplicaLost(f"replica {self.name} didn't clear its prefix cache")

    async def restore(self, version: int, whole: Changes) -> None:
        """Make all of its weights anew, whatever was there."""
        await self.apply(version, whole)

    async def differing(self) -> list[str]:
        """Names of the tensors that the server doesn't compute with as they should be."""
        assert self._folder is not None
        found: list[str] = []
        for parts in messages(self._folder.bits, whole(self._folder.bits)):
            found += [name for one in await self._rpc("headrace_differing", as_text(parts)) for name in one]
        return found

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------------------------------------------ HTTP

    def _send(self, verb: str, path: str, body: Any, timeout_s: float | None) -> Any:
        import aiohttp

        if self._session is None or self._session.closed:
            raise ReplicaLost(f"replica {self.name} is not open")
        timeout = aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_S)
        return self._session.request(verb, path, json=body, timeout=timeout)

    async def _rpc(self, method: str, parts: str) -> Any:
        assert self._folder is not None
        body = {"method": method, "args": [self._folder.dtype, parts]}
        return (await self._ask("POST", "/collective_rpc", body, timeout_s=WEIGHTS_S)).get("results")

    async def _ask(self, verb: str, path: str, body: Any = None, *, raw: bool = False,
                   timeout_s: float = CONTROL_S) -> Any:  # fmt: skip
        """One answer. Raises ReplicaLost, or EngineError where the server refuses."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._send(verb, path, body, timeout_s) as response:
                    await self._accepted(response)
                    content = await response.read()
        except self._lost as error:
            raise ReplicaLost(f"replica {self.name}: {path}: {error or type(error).__name__}") from error
        if raw:
            return content
        try:
            return json.loads(content) if content else {}
        except ValueError as error:
            raise EngineError(f"replica {self.name} answers {path} with something else than JSON") from error

    async def _accepted(self, response: Any) -> None:
        if response.status == 200:
            return
        said = (await response.read())[:500].decode(errors="replace")
        message = f"replica {self.name} answers {response.status}: {said}"
        if response.status >= 500 or response.status in RETRY_ELSEWHERE:
            raise ReplicaLost(message)
        raise EngineError(message)


async def _events(content: Any) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, whatever their length."""
    from orjson import loads  # several times as fast as json's, and each token is an event

    buffer = b""
    async for piece in content.iter_any():
        buffer += piece
        *whole_ones, buffer = buffer.split(b"\n\n")
        for event in whole_ones:
            for line in event.splitlines():
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield loads(line[5:])


def _finished(reason: str | None) -> Finished | None:
    if reason in ("stop", "length"):
        return reason  # type: ignore[return-value]
    if reason is None:
        return None
    raise ReplicaLost(f"the request was ended as {reason!r}")
