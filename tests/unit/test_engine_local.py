"""What a replica promises that drives an engine from its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.producers.engines import Engine, Finished, GenerationRequest, Progress, Sampling
from headrace.producers.engines.local import LocalReplica
from headrace.schemas.errors import EngineError, ReplicaLost
from tests.fake_engine import FakeEngine


class Slow(FakeEngine):
    """One token a step, a step every 5 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, int] = {}
        self.broken = False

    def submit(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise EngineError("an empty prompt")
        super().submit(request)
        self.left[request.request_id] = request.sampling.max_new_tokens

    def step(self) -> list[Progress]:
        if self.broken:
            raise RuntimeError("the device is gone")
        if not self._active:
            return []
        time.sleep(0.005)
        out = []
        for name in list(self._active):
            self.left[name] -= 1
            ended: Finished | None = "length" if self.left[name] == 0 else None
            if ended:
                del self._active[name]
            out.append(Progress(name, np.array([7], np.int32), np.array([-0.5], np.float32), self.version, ended))
        return out


def request(name: str, tokens: int = 4, prompt: tuple[int, ...] = (1, 2)) -> GenerationRequest:
    return GenerationRequest(name, prompt, Sampling(1.0, tokens, 0))


def serve(body: Callable[[LocalReplica, Any], Coroutine[Any, Any, None]], engine: Engine | None = None,
          **given: Any) -> None:  # fmt: skip
    async def run() -> None:
        driven = engine or Slow()
        replica = LocalReplica(driven, name="r", **given)
        try:
            await asyncio.wait_for(body(replica, driven), 30)
        finally:
            await replica.close()

    asyncio.run(run())


async def collect(replica: LocalReplica, wanted: GenerationRequest) -> list[Progress]:
    return [one async for one in replica.generate(wanted)]


def test_many_requests_share_the_steps_and_each_gets_its_own_tokens() -> None:
    async def body(replica: LocalReplica, engine: Slow) -> None:
        began = time.monotonic()
        all_of_them = await asyncio.gather(*(collect(replica, request(f"r{i}", 20)) for i in range(16)))
        assert [len(items) for items in all_of_them] == [20] * 16
        assert all(items[-1].finished == "length" for items in all_of_them)
        assert {one.request_id for one in all_of_them[3]} == {"r3"}
        assert time.monotonic() - began < 16 * 20 * 0.005  # one after the other would take that long

    serve(body)


def test_an_idle_replica_wakes_at_once() -> None:
    async def body(replica: LocalReplica, engine: FakeEngine) -> None:
        waits = []
        for i in range(20):
            await asyncio.sleep(0.01)
            began = time.monotonic()
            await collect(replica, request(f"r{i}"))
            waits.append(time.monotonic() - began)
        assert sorted(waits)[10] < 0.01

    serve(body, FakeEngine())


def test_closing_the_iterator_or_cancelling_its_reader_aborts_the_request() -> None:
    async def body(replica: LocalReplica, engine: Slow) -> None:
        items = replica.generate(request("closed", 100_000))
        await anext(items)
        await items.aclose()  # type: ignore[attr-defined]
        reader = asyncio.create_task(collect(replica, request("cancelled", 100_000)))
        await asyncio.sleep(0.05)
        assert (await replica.health()).running == 1
        reader.cancel()
        while (await replica.health()).running:
            await asyncio.sleep(0.005)
        assert engine.active == 0

    serve(body)


def test_a_request_that_can_never_run_says_so_and_harms_nobody() -> None:
    async def body(replica: LocalReplica, engine: Slow) -> None:
        other = asyncio.create_task(collect(replica, request("good", 10)))
        with pytest.raises(EngineError, match="empty"):
            await collect(replica, request("bad", prompt=()))
        assert len(await other) == 10

    serve(body)


def test_an_engine_that_fails_loses_every_request_and_takes_no_more() -> None:
    async def body(replica: LocalReplica, engine: Slow) -> None:
        readers = [asyncio.create_task(collect(replica, request(f"r{i}", 100_000))) for i in range(3)]
        await asyncio.sleep(0.03)
        engine.broken = True
        for reader in readers:
            with pytest.raises(ReplicaLost, match="device is gone"):
                await reader
        with pytest.raises(ReplicaLost):
            await collect(replica, request("later"))
        with pytest.raises(ReplicaLost):
            await replica.health()
        with pytest.raises(ReplicaLost):
            await replica.call(lambda engine: engine.version)

    serve(body)


def test_weights_change_between_steps_also_while_nothing_runs() -> None:
    def newer(engine: Engine) -> None:
        engine.apply(engine.version + 1, {"w": (np.array([0]), np.array([3], np.uint32))})

    async def body(replica: LocalReplica, engine: Slow) -> None:
        items = replica.generate(request("r", 6))
        versions = [(await anext(items)).version]
        await replica.call(newer)
        versions += [one.version async for one in items]
        assert versions[0] == 0 and versions[-1] == 1 and versions == sorted(versions)
        await replica.call(newer)  # idle now
        assert (await replica.health()).version == 2
        assert await replica.call(lambda engine: int(engine.served_arrays()["w"][0])) == 3

    serve(body)


def test_what_is_called_between_steps_is_called_on_an_idle_engine_too() -> None:
    seen: list[int] = []

    async def body(replica: LocalReplica, engine: Slow) -> None:
        await asyncio.sleep(0.3)
        assert len(seen) >= 3

    serve(body, between_steps=lambda engine: seen.append(engine.active))
