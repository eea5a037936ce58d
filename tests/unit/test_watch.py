"""One timer for many waits: each ends as it would under a time-out of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from headrace.producers.watch import Watch


@contextlib.contextmanager
def watch(limit_s: float) -> Iterator[Watch]:
    with contextlib.closing(Watch(lambda since: since + limit_s)) as found:
        yield found


def test_waits_that_are_short_never_time_out_however_long_all_of_them_take() -> None:
    async def test() -> None:
        with watch(0.2) as one:
            for _ in range(10):
                with one:
                    await asyncio.sleep(0.04)
                await asyncio.sleep(0.01)

    asyncio.run(test())


@pytest.mark.parametrize("before", [0, 3])
def test_wait_that_is_long_times_out_and_the_task_goes_on(before: int) -> None:
    async def test() -> None:
        with watch(0.05) as one:
            for _ in range(before):
                with one:
                    await asyncio.sleep(0.02)
            for _ in range(2):  # also once more
                with pytest.raises(TimeoutError):
                    with one:
                        await asyncio.sleep(20)
            await asyncio.sleep(0.1)  # between two waits there is nothing to end

    asyncio.run(test())


def test_expiring_ends_the_wait_at_once_and_nothing_where_nobody_waits() -> None:
    async def test() -> None:
        with watch(20) as one:
            one.expire()
            asyncio.get_running_loop().call_later(0.02, one.expire)
            with pytest.raises(TimeoutError):
                with one:
                    await asyncio.sleep(20)

    asyncio.run(test())


def test_cancelling_the_task_is_no_time_out() -> None:
    async def test() -> None:
        with watch(20) as one:
            async def wait() -> None:
                with one:
                    await asyncio.sleep(20)

            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            one.expire()
            task.cancel()  # both: who cancels has the last word
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(test())
