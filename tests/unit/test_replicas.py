"""What becomes of requests whose replica fails them: scripted replicas, each failing in its own way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.producers.engines import Affinity, GenerationRequest, Progress, ReplicaHealth, Sampling
from headrace.producers.replicas import BUDGET_RESERVE, Limits, Pool, State
from headrace.schemas.errors import EngineError, ReplicaLost, RequestAborted

QUICK = Limits(first_token_s=0.3, between_tokens_s=0.3, patience_s=0.5, check_every_s=0.02, check_s=0.2,
               fence_s=0.1)  # fmt: skip


class Scripted:
    """A replica whose n-th token follows from how many came before it, prompt included: so a hole or a repeat shows.

    `fail`: (number of the request here, tokens that it has given) -> an error to raise, or seconds of silence.
    """

    def __init__(self, name: str, fail: Callable[[int, int], Exception | float | None] = lambda n, given: None) -> None:
        self.name, self.fail = name, fail
        self.asked: list[GenerationRequest] = []
        self.running = 0
        self.aborted = 0
        self.closed = False
        self.sick: Exception | float | None = None
        self.version = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress]:
        self.asked.append(request)
        number, given = len(self.asked), 0
        self.running += 1
        try:
            while True:
                trouble = self.fail(number, given)
                if isinstance(trouble, Exception):
                    raise trouble
                await asyncio.sleep(trouble or 0.001)
                token = len(request.prompt) + given
                given += 1
                last = given == request.sampling.max_new_tokens
                yield Progress(request.request_id, np.array([token], np.int32), np.array([-1.0], np.float32),
                               self.version, "length" if last else None)  # fmt: skip
                if last:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += given < request.sampling.max_new_tokens
            raise
        finally:
            self.running -= 1

    async def health(self) -> ReplicaHealth:
        if isinstance(self.sick, Exception):
            raise self.sick
        await asyncio.sleep(self.sick or 0)
        return ReplicaHealth(self.version, True, self.running, 0, 8)

    async def close(self) -> None:
        self.closed = True


def request(name: str = "r", tokens: int = 20, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), Sampling(1.0, tokens, 7), **more)


def run(body: Callable[[Pool], Coroutine[Any, Any, None]], replicas: Sequence[Scripted], limits: Limits = QUICK,
        **given: Any) -> None:  # fmt: skip
    async def main() -> None:
        pool = Pool(replicas, limits=limits, **given)
        await pool.start()
        try:
            await asyncio.wait_for(body(pool), 20)
        finally:
            await pool.close()
        assert all(one.closed for one in replicas)

    asyncio.run(main())


async def collect(pool: Pool, wanted: GenerationRequest) -> list[Progress]:
    return [one async for one in pool.generate(wanted)]


def whole(steps: Sequence[Progress], tokens: int = 20) -> bool:
    return [int(i) for one in steps for i in one.token_ids] == list(range(3, 3 + tokens))


def on_first(trouble: Exception | float, after: int = 5) -> Callable[[int, int], Exception | float | None]:
    """Trouble in the first request here, once it has given `after` tokens."""
    return lambda number, given: trouble if number == 1 and given == after else None


@pytest.mark.parametrize("trouble", [ReplicaLost("it died"), 5.0], ids=["dies", "silent"])
@pytest.mark.parametrize("after", [0, 5, 19])
def test_a_lost_request_goes_on_elsewhere_without_a_hole_or_a_repeat(trouble: Exception | float, after: int) -> None:
    both = [Scripted(name, on_first(trouble, after)) for name in "ab"]
    both[1].fail = lambda number, given: None
    both[1].sick = ReplicaLost("not yet")

    async def body(pool: Pool) -> None:
        reading = asyncio.create_task(collect(pool, request()))
        await asyncio.sleep(0.01)
        both[1].sick = None
        steps = await reading
        assert whole(steps) and steps[-1].finished == "length"
        assert {one.request_id for one in steps} == {"r"}
        assert [len(one.asked) for one in both] == [1, 1]
        again = both[1].asked[0]
        assert list(again.prompt) == [1, 2, 3, *range(3, 3 + after)]
        assert again.sampling.max_new_tokens == 20 - after and again.request_id != "r"
        assert (again.sampling.seed == 7) == (after == 0)  # other numbers than those that drew what it follows
        assert pool.retried == 1 and pool.states["a"][0] is State.FENCED

    run(body, both, replace(QUICK, fence_s=30.0, patience_s=10.0))


def test_a_request_is_retried_so_often_and_no_more() -> None:
    replicas = [Scripted(name, lambda number, given: ReplicaLost("no")) for name in "abcdef"]

    async def body(pool: Pool) -> None:
        with pytest.raises(ReplicaLost, match="lost 4 times"):
            await collect(pool, request())
        assert sum(len(one.asked) for one in replicas) == 4

    run(body, replicas)


def test_a_broken_fleet_is_not_beaten_to_death() -> None:
    """All requests together have a budget of retries, which those that end well fill up again."""
    replicas = [Scripted(name, lambda number, given: ReplicaLost("no") if given == 5 else None) for name in "abcdefgh"]

    async def body(pool: Pool) -> None:
        ends = await asyncio.gather(*(collect(pool, request(f"r{i}")) for i in range(60)), return_exceptions=True)
        assert all(isinstance(one, ReplicaLost) for one in ends)
        assert 60 <= pool.retried <= BUDGET_RESERVE + 8 * 8  # and one for each place on a replica

    run(body, replicas)


def test_what_can_never_run_is_not_retried() -> None:
    both = [Scripted(name, on_first(EngineError("too long"), 0)) for name in "ab"]

    async def body(pool: Pool) -> None:
        with pytest.raises(EngineError, match="too long"):
            await collect(pool, request())
        assert sum(len(one.asked) for one in both) == 1
        assert {state for state, _ in pool.states.values()} == {State.SERVING}

    run(body, both)


def test_a_request_that_an_update_aborts_goes_on_at_once_and_nobody_is_to_blame() -> None:
    only = Scripted("a", lambda number, given: RequestAborted("its weights change") if given == 2 else None)

    async def body(pool: Pool) -> None:
        assert whole(await collect(pool, request()))  # after many an update
        assert len(only.asked) == 10 and pool.retried == 0
        assert pool.states["a"][0] is State.SERVING

    run(body, [only])


def test_where_only_the_end_was_lost_nothing_is_sampled_again() -> None:
    def stop_is_lost(number: int, given: int) -> Exception | None:
        return ReplicaLost("it died") if given == 4 else None

    both = [Scripted(name, stop_is_lost) for name in "ab"]

    async def body(pool: Pool) -> None:
        steps = await collect(pool, request(stop_ids=frozenset({6})))  # the fourth token
        assert whole(steps, 4) and steps[-1].finished == "stop"
        assert sum(len(one.asked) for one in both) == 1

    run(body, both)


STEADY = replace(QUICK, first_token_s=1.0, between_tokens_s=1.0, check_s=10.0)


async def beside_another(pool: Pool) -> None:
    """A request while another one gets its tokens all the time."""
    other = asyncio.create_task(collect(pool, request("other", 1_000_000)))
    await asyncio.sleep(0.05)
    assert whole(await collect(pool, request()))
    assert not other.done() and {state for state, _ in pool.states.values()} == {State.SERVING}
    other.cancel()


def test_a_request_may_wait_in_a_replicas_queue_as_long_as_others_get_tokens() -> None:
    only = Scripted("a", lambda number, given: 2.5 if number == 2 and given == 0 else None)

    async def body(pool: Pool) -> None:
        await beside_another(pool)
        assert len(only.asked) == 2 and pool.retried == 0

    run(body, [only], STEADY)


def test_a_stream_that_stalls_alone_is_retried_and_its_replica_not_fenced() -> None:
    only = Scripted("a", lambda number, given: 30.0 if number == 2 and given == 3 else None)

    async def body(pool: Pool) -> None:
        await beside_another(pool)
        assert len(only.asked) == 3 and pool.retried == 1

    run(body, [only], STEADY)


def test_a_replica_that_answers_no_health_check_is_fenced_and_what_runs_there_goes_on_elsewhere() -> None:
    both = [Scripted("a", lambda number, given: 30.0 if given == 5 else None), Scripted("b")]
    both[1].sick = ReplicaLost("not yet")
    patient = Limits(first_token_s=60, between_tokens_s=60, patience_s=5, check_every_s=0.02, check_s=0.1)

    async def body(pool: Pool) -> None:
        reading = asyncio.create_task(collect(pool, request()))
        await asyncio.sleep(0.1)
        both[0].sick, both[1].sick = 30.0, None  # half open: it says nothing, and nothing breaks
        assert whole(await reading)
        assert [len(one.asked) for one in both] == [1, 1] and both[0].aborted == 1

    run(body, both, patient)


def test_a_fenced_replica_serves_again_after_a_good_check_later_each_time() -> None:
    only = Scripted("a", lambda number, given: ReplicaLost("no") if number <= 2 else None)
    patient = Limits(first_token_s=5, between_tokens_s=5, patience_s=10, check_every_s=0.02, fence_s=0.1)

    async def body(pool: Pool) -> None:
        began = asyncio.get_running_loop().time()
        assert whole(await collect(pool, request()))
        assert 0.29 < asyncio.get_running_loop().time() - began < 8  # 0.1 s, then 0.2 s
        assert pool.states["a"][0] is State.SERVING and len(only.asked) == 3

    run(body, [only], patient)


def test_a_draining_replica_finishes_what_it_has_and_takes_nothing_new() -> None:
    both = [Scripted("a"), Scripted("b")]
    both[1].sick = ReplicaLost("not yet")

    async def body(pool: Pool) -> None:
        first = asyncio.create_task(collect(pool, request("first", 200)))
        await asyncio.sleep(0.02)
        both[1].sick = None
        leaving = asyncio.create_task(pool.remove("a"))
        while pool.states["b"][0] is not State.SERVING:
            await asyncio.sleep(0.01)
        await asyncio.gather(*(collect(pool, request(f"r{i}")) for i in range(4)))
        assert [len(one.asked) for one in both] == [1, 4]
        assert whole(await first, 200)
        await leaving
        assert both[0].closed and both[0].aborted == 0 and set(pool.states) == {"b"}

    run(body, both)


def test_where_no_replica_serves_a_request_waits_for_a_while_and_then_says_why() -> None:
    only = Scripted("a")
    only.sick = ReplicaLost("nobody listens there")

    async def body(pool: Pool) -> None:
        with pytest.raises(ReplicaLost, match="a is fenced.*nobody listens there"):
            await collect(pool, request())
        with pytest.raises(ReplicaLost, match="no replica serves"):
            await pool.health()
        waiting = asyncio.create_task(collect(pool, request()))
        await asyncio.sleep(0.05)
        assert pool.waiting == 1
        only.sick = None
        assert whole(await waiting) and pool.waiting == 0
        assert (await pool.health()).capacity == 8

    run(body, [only])


def test_closing_the_iterator_aborts_at_the_replica_and_frees_its_place() -> None:
    only = Scripted("a")

    async def body(pool: Pool) -> None:
        items = pool.generate(request("r", 100_000))
        await anext(items)
        await items.aclose()  # type: ignore[attr-defined]
        reading = asyncio.create_task(collect(pool, request("s", 100_000)))
        await asyncio.sleep(0.02)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (only.running, only.aborted) == (0, 2)
        assert pool.states["a"][0] is State.SERVING

    run(body, [only])


def test_one_of_four_replicas_fails_and_no_request_goes_there_any_more() -> None:
    four = [Scripted(name) for name in "abcd"]
    four[2].fail = lambda number, given: ReplicaLost("device lost")
    four[2].sick = None

    async def body(pool: Pool) -> None:
        async def turns(number: int) -> None:
            for turn in range(3):
                steps = await collect(pool, request(f"{number}/{turn}", affinity=Affinity(str(number), "g")))
                assert whole(steps)

        four[2].sick = ReplicaLost("device lost")
        await asyncio.gather(*(turns(number) for number in range(12)))
        assert pool.states["c"][0] is State.FENCED and "device lost" in pool.states["c"][1]
        assert sum(len(one.asked) for one in four) == 36 + pool.retried

    run(body, four)


def test_a_replica_that_is_not_admitted_stays_fenced() -> None:
    both = [Scripted("a"), Scripted("b")]
    both[1].version = 4

    async def admit(replica: Any, health: ReplicaHealth) -> ReplicaHealth:
        if health.version != 4:
            raise ReplicaLost(f"it serves version {health.version}, not 4")
        return health

    async def body(pool: Pool) -> None:
        steps = await collect(pool, request())
        assert whole(steps) and not both[0].asked and {one.version for one in steps} == {4}
        assert "version 0" in pool.states["a"][1]
        both[0].version = 4
        while pool.states["a"][0] is not State.SERVING:
            await asyncio.sleep(0.01)

    run(body, both, admit=admit)
