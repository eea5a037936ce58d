"""What the gateway adds to a request and to each streamed token, and how many requests a core of it serves.

Beside it stand the replica alone and a bare reverse proxy of the same framework and event loop
(`baselines/reverse_proxy.py`), one after the other in turns. The replica is a real HTTP server with a script for a
model (`_scripted_replica.py`): each token leaves it at a time known beforehand, so a token's lateness is its arrival
less that time, and what a hop adds is its lateness less that of the replica alone. The gateway runs as `headrace start
gateway` does, with engine `openai` in front of that server, and writes every turn to a real broker.

Lateness is taken twice: with all streams at once, where cores may be short, and with a tenth of them, where they
aren't; beside it stand the CPU seconds that each process took meanwhile. Requests per second per core are requests over
the CPU seconds of the one process (all its threads), with 16 tokens each, streamed as fast as they come.

That no token is altered is shown twice: under that load, where each streamed text must be the tokens on the log, and
with a real engine (a tiny model through `hf`), where ids and log-probabilities of each answer must be those on the log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from headrace.models import tiny_model
from headrace.producers.engines.served import ModelFolder
from headrace.schemas import delta
from headrace.schemas.codec import decode
from headrace.schemas.events import Span
from headrace.schemas.outcomes import Source
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import TRAJECTORIES, RunTopics
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range

from . import harness
from .harness import CannotMeasure, Result, Started, alternate
from .streams_load import DAY_S, Trainer, create, role, settings

TOKEN = "of-this-benchmark"
FIRST_S, GAP_S = 0.5, 0.5  # two tokens a second of each stream: 500 streams are a thousand tokens a second
SIBLINGS = 25  # episodes of one group
WORKING = 16  # requests at once where the cost of a request is taken
SHORT = 16  # its tokens
PROMPT = "Say how late it is, and how late it will be when you have said so."


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    tokens: int
    requests: int
    repetitions: int


def measure(options: argparse.Namespace, result: Result) -> None:
    load = Load(20, 6, 40, 1) if options.quick else Load(500, 20, 600, 2)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch, harness.temporary_broker() as broker:
        kafka = harness.kafka_of(broker)
        folder = tiny_model(Path(scratch) / "model")
        altered = _real_engine(kafka, Path(scratch), folder, 2 if options.quick else 8)
        altered += _scripted(kafka, Path(scratch), folder, load, result)
    result.at_most("tokens altered", altered, 0)
    result.at_least("streams at once", None if options.quick else load.streams, 500)
    result.note(f"{load.streams} streams at once, {load.tokens} tokens each, one every {GAP_S:g} s. Load generator, "
                "replica, broker, coordinator and the measured process share this machine's cores, so lateness holds "
                "the waiting for a core too.")  # fmt: skip


# ------------------------------------------------------------------------------------------------ lateness and cost


@dataclass(slots=True)
class Lateness:
    """Seconds: of each first token, of each later one, and of each last one. `cpu`: seconds that each process took."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)


def _scripted(kafka: Mapping[str, Any], scratch: Path, folder: Path, load: Load, result: Result) -> int:
    """Rows and goals of latency and cost; how many tokens were altered."""
    slow, fast = _port(), _port()
    with (
        _replica(slow, FIRST_S, GAP_S) as slow_replica, _replica(fast, 0.0, 0.0) as replica,
        _proxy(slow) as (slow_proxy, between), _proxy(fast) as (fast_proxy, proxy),
        _gateway(kafka, scratch, folder, "slow", slow, load.streams) as (slow_gateway, in_front, _),
        _gateway(kafka, scratch, folder, "fast", fast, load.streams) as (fast_gateway, gateway, topics),
    ):  # fmt: skip
        talks = asyncio.run(_talks(slow_gateway, load.streams))
        working = asyncio.run(_talks(fast_gateway, WORKING))

        def late(load: Load) -> Mapping[str, Sequence[Lateness]]:
            return alternate({
                "replica alone": lambda: _late({"replica": slow_replica}, f"http://127.0.0.1:{slow}", None, load),
                "bare proxy": lambda: _late({"replica": slow_replica, "bare proxy": between}, slow_proxy, None, load),
                "gateway": lambda: _late({"replica": slow_replica, "gateway": in_front}, slow_gateway, talks, load),
            }, load.repetitions, warm=load.repetitions > 1)  # fmt: skip

        few = max(2, load.streams // 10)
        _latency_rows(late(replace(load, streams=few, tokens=load.tokens // 2)), result, f" at {few} streams")
        _latency_rows(late(load), result, "")
        cost = alternate({
            "replica alone": lambda: _cpu_s(replica, f"http://127.0.0.1:{fast}", None, load),
            "bare proxy": lambda: _cpu_s(proxy, fast_proxy, None, load),
            "gateway": lambda: _cpu_s(gateway, fast_gateway, working, load),
        }, load.repetitions)  # fmt: skip
        for subject, seconds in cost.items():
            result.row("requests per second per core", subject,
                       harness.spread([load.requests / one for one in seconds]), "requests/s")  # fmt: skip
        return _altered(kafka, topics, folder, working)


def _latency_rows(late: Mapping[str, Sequence[Lateness]], result: Result, where: str) -> None:
    """With goals where the load is the whole one (`where` says of another which it is)."""
    added: dict[tuple[str, str], list[float]] = {}
    for measure_, name in (("first token", "first"), ("streamed token", "between"), ("request", "last")):
        for subject, runs in late.items():
            values = [1e3 * x for run in runs for x in getattr(run, name)]
            result.row(f"lateness of a {measure_}, p50{where}", subject, statistics.median(values), "ms")
            result.row(f"lateness of a {measure_}, p99{where}", subject, statistics.quantiles(values, n=100)[98], "ms")
        for subject in ("bare proxy", "gateway"):
            pairs = zip(late[subject], late["replica alone"], strict=True)
            added[subject, name] = [1e3 * (statistics.fmean(getattr(through, name)) - statistics.fmean(
                getattr(alone, name))) for through, alone in pairs]  # fmt: skip
            result.row(f"added to a {measure_}, mean{where}", subject, harness.spread(added[subject, name]), "ms")
    for subject, runs in late.items():
        for process in runs[0].cpu:
            result.row(f"CPU of the {process}{where}", subject,
                       harness.spread([run.cpu[process] for run in runs]), "s")  # fmt: skip
    if where:
        return
    for name, said in (("last", "request"), ("between", "streamed token")):
        proxy, gateway = (statistics.median(added[subject, name]) for subject in ("bare proxy", "gateway"))
        result.at_most(f"added to a {said}, as a multiple of the bare proxy's", gateway / proxy if proxy > 0 else None,
                       2.0)  # fmt: skip


@dataclass(slots=True)
class Talk:
    """One episode's conversation, and the texts that were streamed to it."""

    key: str
    messages: list[dict[str, str]]
    texts: list[str] = field(default_factory=list)

    def begin_anew(self) -> None:
        """The next request is the first of a conversation that nobody has had."""
        self.messages = [{"role": "user", "content": f"{PROMPT} ({len(self.texts)})"}]


async def _talks(url: str, count: int) -> list[Talk]:
    """Episodes for evaluation, which the coordinator gives whatever the trainer does."""
    async with _session() as session:
        talks: list[Talk] = []
        while len(talks) < count:
            asked = {"size": min(SIBLINGS, count - len(talks)), "purpose": "eval", "wait_s": 120}
            async with session.post(f"{url}/v1/episodes", json=asked, headers=_bearer(TOKEN)) as answer:
                if answer.status != 200:
                    raise CannotMeasure(f"no episodes: {await answer.text()}")
                talks += [Talk(one["key"], [{"role": "user", "content": PROMPT}])
                          for one in (await answer.json())["episodes"]]  # fmt: skip
        return talks


def _late(processes: Mapping[str, Started], url: str, talks: Sequence[Talk] | None, load: Load) -> Lateness:
    before = {name: process.cpu_s() for name, process in processes.items()} | {"load generator": time.process_time()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as everything that it talks to
        late = runner.run(_streams(url, talks, load))
    after = {name: process.cpu_s() for name, process in processes.items()} | {"load generator": time.process_time()}
    late.cpu = {name: after[name] - before[name] for name in before}
    return late


async def _streams(url: str, talks: Sequence[Talk] | None, load: Load) -> Lateness:
    """All streams at once, through the gateway with `talks`, else as the gateway would ask."""
    late, draw = Lateness(), random.Random(0)
    async with _session() as session:
        await asyncio.gather(*(
            _stream(session, url, talks[i] if talks else None, i, load.tokens, late, wait_s=draw.uniform(0, 2))
            for i in range(load.streams)))  # fmt: skip
    return late


async def _stream(session: Any, url: str, talk: Talk | None, number: int, tokens: int, late: Lateness,
                  wait_s: float = 0.0) -> None:  # fmt: skip
    await asyncio.sleep(wait_s)
    if talk is None:
        path, headers = "/v1/completions", {}
        body: dict[str, Any] = {
            "model": "scripted", "prompt": [40 + i % 40 for i in range(100)], "max_tokens": tokens, "stream": True,
            "temperature": 1.0, "seed": number, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
    else:
        path, headers = "/v1/chat/completions", _bearer(talk.key)
        body = {"model": "m", "messages": talk.messages, "max_tokens": tokens, "stream": True}
    began, text = time.monotonic(), ""
    async with session.post(f"{url}{path}", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise CannotMeasure(f"{url} answers {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic() - began
            choice = json.loads(line[6:])["choices"][0]
            piece = choice["text"] if talk is None else choice["delta"].get("content") or ""
            for i in range(len(text), len(text) + len(piece)):
                overdue = now - FIRST_S - i * GAP_S
                (late.first if i == 0 else late.between).append(overdue)
                if i == tokens - 1:
                    late.last.append(overdue)
            text += piece
    if len(text) != tokens:
        raise CannotMeasure(f"{url} streamed {len(text)} tokens instead of {tokens}")
    if talk is not None:
        talk.texts.append(text)
        talk.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]


def _cpu_s(process: Started, url: str, talks: Sequence[Talk] | None, load: Load) -> float:
    """CPU seconds of the process for all requests, `WORKING` at a time."""
    async def work() -> None:
        async with _session() as session:
            async def one(worker: int) -> None:
                for i in range(worker, load.requests, WORKING):
                    if talks:
                        talks[worker].begin_anew()
                    await _stream(session, url, talks[worker] if talks else None, i, SHORT, Lateness())

            await asyncio.gather(*map(one, range(WORKING)))

    before = process.cpu_s()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    return process.cpu_s() - before


def _altered(kafka: Mapping[str, Any], topics: RunTopics, folder: Path, talks: Sequence[Talk]) -> int:
    """Texts that were streamed and aren't the tokens of a model span on the log, or the other way round."""
    model = ModelFolder(folder, "bfloat16")  # its tokenizer has a character of its own for each of these tokens
    deadline, expected = time.monotonic() + 60, sorted(text for talk in talks for text in talk.texts)
    while True:
        found = sorted(model.decode(span.token_ids().tolist()) for span in _spans(kafka, topics)
                       if span.source == Source.MODEL)  # fmt: skip
        if len(found) >= len(expected) or time.monotonic() > deadline:
            return sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))
        time.sleep(0.2)


# ------------------------------------------------------------------------------------------------ a real engine


def _real_engine(kafka: Mapping[str, Any], scratch: Path, folder: Path, episodes: int) -> int:
    """Tokens of conversations with a tiny model whose id or log-probability isn't on the log as it was answered."""
    with _gateway(kafka, scratch, folder, "real", None, episodes) as (url, _, topics):
        told = asyncio.run(_converse(url, episodes))
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for span in _spans(kafka, topics):
        logprobs = span.behaviour_logprobs()
        if logprobs is not None:
            for token, logprob in zip(span.token_ids().tolist(), logprobs.tolist(), strict=True):
                found.setdefault((span.group, span.slot), []).append((token, logprob))
    altered = 0
    for place, tokens in told.items():
        there = found.get(place, [])
        altered += abs(len(there) - len(tokens))
        altered += sum(a != b for a, b in zip(there, tokens, strict=False))
    return altered


async def _converse(url: str, episodes: int) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Three turns of each episode; (group, slot) -> its sampled tokens with their log-probabilities, as answered."""
    told: dict[tuple[str, int], list[tuple[int, float]]] = {}
    async with _session() as session:
        asked = {"size": episodes, "purpose": "eval", "wait_s": 120}
        async with session.post(f"{url}/v1/episodes", json=asked, headers=_bearer(TOKEN)) as answer:
            given = await answer.json()

        async def talk(one: dict[str, Any]) -> None:
            messages, tokens = [{"role": "user", "content": PROMPT}], list[tuple[int, float]]()
            for _ in range(3):
                body = {"messages": messages, "max_tokens": 16, "logprobs": True, "return_token_ids": True}
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=_bearer(one["key"])) as answer:
                    choice = (await answer.json())["choices"][0]
                logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
                tokens += list(zip(choice["token_ids"], logprobs, strict=True))
                messages += [choice["message"], {"role": "user", "content": "And now?"}]
            told[given["group"], one["slot"]] = tokens
            async with session.post(f"{url}/v1/episodes/{one['id']}/finish", json={"reward": 1.0},
                                    headers=_bearer(TOKEN)) as answer:  # fmt: skip
                await answer.read()

        await asyncio.gather(*map(talk, given["episodes"]))
    return told


def _spans(kafka: Mapping[str, Any], topics: RunTopics) -> Iterator[Span]:
    name = topics.name(TRAJECTORIES)
    ends = end_offsets(kafka, name)
    for partition, begin in beginning_offsets(kafka, name).items():
        for record in read_range(kafka, name, partition, begin, ends[partition]):
            if isinstance(event := decode(record.value), Span):
                yield event


# ---------------------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def _replica(port: int, first_s: float, gap_s: float) -> Iterator[Started]:
    argv = [sys.executable, "-m", "benchmarks._scripted_replica", str(port), str(first_s), str(gap_s)]
    with Started(argv) as process:
        process.expect("ready", 60)
        yield process


@contextlib.contextmanager
def _proxy(target: int) -> Iterator[tuple[str, Started]]:
    port = _port()
    argv = [sys.executable, "-m", "benchmarks.baselines.reverse_proxy", str(port), f"http://127.0.0.1:{target}"]
    with Started(argv) as process:
        process.expect("ready", 60)
        yield f"http://127.0.0.1:{port}", process


@contextlib.contextmanager
def _gateway(kafka: Mapping[str, Any], scratch: Path, folder: Path, run: str, replica: int | None,
             slots: int) -> Iterator[tuple[str, Started, RunTopics]]:  # fmt: skip
    """A gateway with its run: version 0 published, assembler and coordinator as processes."""
    rules = settings().model_dump(mode="json")
    rules["model"] = {"path": str(folder), "max_length": 4096}
    rules["rollout"] |= {"agent_timeout_s": DAY_S, "no_progress_s": DAY_S, "max_new_tokens": 3500}
    topics = create(kafka, run, RunSettings.model_validate(rules))
    trainer = Trainer(kafka, topics)
    state = delta.as_state(ModelFolder(folder, "bfloat16").bits, "bfloat16")
    trainer.publish(0, str(folder), delta.state_hash(state), delta.HASH_ALGORITHM)
    engine = f'engine = "openai"\nreplicas = ["http://127.0.0.1:{replica}"]' if replica else 'engine = "hf"'
    port = _port()
    file = scratch / f"{run}.toml"
    file.write_text(f'[site]\nslots = {slots}\nworker_threads = 1\n{engine}\n[site.kafka]\n"bootstrap.servers" = '
                    f'"{kafka["bootstrap.servers"]}"\n')  # fmt: skip
    bootstrap = str(kafka["bootstrap.servers"])
    argv = [sys.executable, "-m", "headrace", "start", "gateway", run, "--config", str(file), "--port", str(port)]
    with role("assembler", run, bootstrap), role("coordinator", run, bootstrap):
        with Started(argv, env={"HEADRACE_HOME": str(scratch / "home"), "HEADRACE_GATEWAY_TOKEN": TOKEN}) as process:
            url = f"http://127.0.0.1:{port}"
            _wait_for(process, port)
            yield url, process, topics
    trainer.close()


def _wait_for(process: Started, port: int) -> None:
    end = time.monotonic() + 600
    while process.alive() and time.monotonic() < end:
        if "serving version" in process.output():
            return
        time.sleep(0.1)
    raise CannotMeasure(f"the gateway didn't start:\n{process.output()[-2000:]}")


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[Any]:
    try:
        import aiohttp
    except ImportError as error:
        raise CannotMeasure("the load generator and the bare proxy need aiohttp") from error
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("gateway", __doc__, measure, argv, packages=("starlette", "uvicorn", "aiohttp", "torch"))


if __name__ == "__main__":
    sys.exit(main())
