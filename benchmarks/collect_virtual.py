"""Discrete events in virtual time: one load, one cell of the grid, one arm.

What decides is Headrace's own code where the arm says so (see `collect_arms`); engines, caches, tools and set-ups are
the model of `collect_parameters`. Times are seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from headrace.producers.routing import Request, Router
from headrace.producers.sandboxes.sizing import Size, Standing, to_start
from headrace.producers.scheduler import Scheduler, SlotKey

from .baselines.barrier_collector import BarrierCollector, LaunchOrder, RoundRobin
from .baselines.fifo_collector import FifoCollector
from .collect_arms import Arm
from .collect_load import Load, Trajectory
from .collect_parameters import (
    FULL_LOAD,
    GROUP_SIZE,
    GROUPS,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    REPLICAS,
    SANDBOXES_PER_SLOT,
    Cell,
)
from .collect_streams import Streams

BLOCK_TOKENS = 2000  # in which the router names prompts here: the estimate is as coarse, the model's caches aren't
QUEUED = 1_000_000  # leases that the worker takes beyond its slots, so that max_lag alone is the limit
Key = tuple[int, int]  # group, slot


class Collector(Protocol):
    """Who admits groups, and which make a batch."""

    version: int  # that is sampled from now: batches made so far

    def admit(self, waiting: int) -> list[int]:
        """Groups that are launched now, where so many slots have been launched and wait. Ask until there is none."""

    def foresee(self) -> list[int]:
        """Groups that will surely be launched next."""

    def began(self, group: int, slot: int) -> None: ...

    def ended(self, group: int, slot: int, versions: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Batches that this makes: (group, lag) of each group. `versions`: (version, tokens) runs."""


@dataclass(frozen=True, slots=True)
class Batch:
    at: float
    groups: tuple[int, ...]
    lags: tuple[int, ...]  # of each group: that of its oldest token


@dataclass(slots=True)
class Outcome:
    """What a run gave. `began`: when each group's first slot began, and in which batch's time."""

    batches: list[Batch] = field(default_factory=list)
    began: dict[int, tuple[float, int]] = field(default_factory=dict)
    sampled: set[Key] = field(default_factory=set)  # episodes that began
    sandboxes: int = 0  # most at once
    busy: float = 0.0  # slot-seconds in which a slot was taken, up to the last batch
    prompt_tokens: int = 0
    found_tokens: int = 0  # of them in the prefix cache of the replica that took the request

    @property
    def first(self) -> float:
        return self.batches[0].at

    def interval(self, since: int = 0) -> float:
        """Mean seconds between batches after batch `since`."""
        return (self.batches[-1].at - self.batches[since].at) / (len(self.batches) - 1 - since)


class Episode:
    __slots__ = ("key", "work", "number", "name", "turn", "versions", "blocks")

    def __init__(self, key: Key, work: Trajectory, number: int) -> None:
        self.key, self.work, self.number, self.turn = key, work, number, 0
        self.versions: list[tuple[int, int]] = []
        self.name = str(number)
        # Names of the blocks of the whole conversation; the first are the group's.
        shared, whole = PROMPT_TOKENS // BLOCK_TOKENS, (work.context[-1] + work.tokens[-1]) // BLOCK_TOKENS
        self.blocks = [-(key[0] * shared + i) - 1 for i in range(shared)]
        self.blocks += [number * 1000 + i for i in range(whole - shared)]


class Engine:
    """The replicas: how long a call takes, by load and by what the prefix cache holds."""

    def __init__(self, cell: Cell) -> None:
        self._slope = (cell.slowdown - 1) / FULL_LOAD
        self._room = cell.cache_tokens
        self.running = [0] * REPLICAS  # calls
        self._caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(REPLICAS)]
        self._held = [0] * REPLICAS

    def call(self, replica: int, episode: Episode) -> tuple[float, int]:
        """(seconds, prompt tokens found) of the episode's next call, which begins now."""
        work, turn = episode.work, episode.turn
        context, found = work.context[turn], 0
        if self._room:
            cache, own, shared = self._caches[replica], episode.number, -episode.key[0] - 1
            found = cache.get(own, 0) or (PROMPT_TOKENS if shared in cache else 0)
            after = context + work.tokens[turn]
            self._held[replica] += after - cache.get(own, 0) + (0 if shared in cache else PROMPT_TOKENS)
            cache[shared] = PROMPT_TOKENS
            cache[own] = after
            cache.move_to_end(shared)
            cache.move_to_end(own)
            while self._held[replica] > self._room:
                self._held[replica] -= cache.popitem(last=False)[1]
        self.running[replica] += 1
        slow = 1 + self._slope * self.running[replica]
        return (work.calls[turn] + (context - found) / PREFILL_TOKENS_PER_S) * slow, found


class Routed:
    """Headrace's router over these replicas."""

    def __init__(self, cell: Cell) -> None:
        self._router = Router(block_tokens=BLOCK_TOKENS)
        blocks = None if math.isinf(cell.cache_tokens) else int(cell.cache_tokens) // BLOCK_TOKENS
        for i in range(REPLICAS):
            self._router.added(str(i), FULL_LOAD, blocks)

    def choose(self, episode: Episode, now: float) -> tuple[int, int]:
        tokens = episode.work.context[episode.turn]
        request = Request(episode.name, tokens, episode.blocks[: tokens // BLOCK_TOKENS])
        choice = self._router.choose(request, now)
        assert choice is not None
        return int(choice.replica), choice.ticket

    def ended(self, ticket: int, now: float, tokens: int) -> None:
        self._router.ended(ticket, now, tokens)


class InTurn:
    def __init__(self) -> None:
        self._robin = RoundRobin(REPLICAS)

    def choose(self, episode: Episode, now: float) -> tuple[int, int]:
        return self._robin.choose(), 0

    def ended(self, ticket: int, now: float, tokens: int) -> None:
        pass


class Scheduled:
    """Headrace's scheduler, with the interface of `LaunchOrder`."""

    def __init__(self, slots: int) -> None:
        self._scheduler = Scheduler(slots)
        self.waiting = 0

    def launched(self, keys: Iterable[Key]) -> None:
        for group, slot in keys:
            self._scheduler.leased(SlotKey(str(group), slot, 0))
            self.waiting += 1

    def starts(self, able: Callable[[Key], bool]) -> list[Key]:
        if not self.waiting or not self._scheduler.room():
            return []
        begin = self._scheduler.starts(lambda key: able((int(key.group), key.slot)))
        self.waiting -= len(begin)
        return [(int(key.group), key.slot) for key in begin]

    def ended(self, key: Key) -> None:
        self._scheduler.ended(SlotKey(str(key[0]), key[1], 0))


def simulate(load: Load, cell: Cell, arm: Arm, slots: int, batches: int) -> Outcome:
    """Until so many batches are made."""
    run = _Run(load, cell, arm, slots)
    while len(run.outcome.batches) < batches:
        run.step()
    return run.outcome


class _Run:
    def __init__(self, load: Load, cell: Cell, arm: Arm, slots: int) -> None:
        self.outcome = Outcome()
        self._load, self._cell, self._apart = load, cell, arm.sandboxes
        self._collector: Collector
        self._streams: Streams | None = None
        if arm.assembly == "headrace":
            capacity = QUEUED if arm.max_lag is not None else 2 * slots
            self._collector = self._streams = Streams(GROUPS, arm.max_lag, capacity)
        else:
            kind = BarrierCollector if arm.assembly == "barrier" else FifoCollector
            self._collector = kind(GROUPS, GROUP_SIZE)
        self._queue = Scheduled(slots) if arm.schedule else LaunchOrder(slots)
        self._router = Routed(cell) if arm.routing else InTurn()
        self._engine = Engine(cell)
        self._heap: list[tuple[float, int, Callable[[Episode], None], Episode]] = []
        self._calls: list[tuple[float, int, int, int, int]] = []  # end, number, replica, ticket, tokens
        self._now, self._count = 0.0, 0
        self._taken, self._counted = 0, 0.0  # slots, and up to when their time is in `busy`
        self._episodes: dict[Key, Episode] = {}
        total = math.ceil(SANDBOXES_PER_SLOT * slots)
        self._size = Size(total, total)
        self._ordered: set[int] = set()  # groups
        self._orders: deque[Episode] = deque()
        self._ready: set[Key] = set()
        self._starting = self._in_use = 0
        self._launch()

    def step(self) -> None:
        self._now, _, action, episode = heappop(self._heap)
        action(episode)

    def _at(self, time: float, action: Callable[[Episode], None], episode: Episode) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, action, episode))

    # ------------------------------------------------------------------------------------------- what is to be done

    def _launch(self) -> None:
        while groups := self._collector.admit(self._queue.waiting):
            for group in groups:
                self._queue.launched((group, slot) for slot in range(GROUP_SIZE))
                self._order(group)
        if self._apart:
            for group in self._collector.foresee():
                self._order(group)
            self._set_up()
        self._fill()

    def _slots(self, more: int) -> None:
        self.outcome.busy += self._taken * (self._now - self._counted)
        self._taken, self._counted = self._taken + more, self._now

    def _order(self, group: int) -> None:
        if group not in self._ordered:
            self._ordered.add(group)
            for slot, work in enumerate(self._load.group(group)):
                self._episodes[group, slot] = episode = Episode((group, slot), work, group * GROUP_SIZE + slot)
                self._orders.append(episode)

    def _set_up(self) -> None:
        now = Standing(self._in_use, len(self._ready), self._starting, len(self._orders), 0)
        for _ in range(to_start(self._size, now, 0)[0]):
            episode = self._orders.popleft()
            self._starting += 1
            self._at(self._now + episode.work.setup_s(self._cell), self._is_ready, episode)
        self.outcome.sandboxes = max(self.outcome.sandboxes, self._in_use + len(self._ready) + self._starting)

    def _is_ready(self, episode: Episode) -> None:
        self._starting -= 1
        self._ready.add(episode.key)
        self._fill()

    def _fill(self) -> None:
        able = self._ready.__contains__ if self._apart else lambda _: True
        begin = self._queue.starts(able)
        self._slots(len(begin))
        for key in begin:
            episode = self._episodes[key]
            self._in_use += 1
            self._collector.began(*key)
            self.outcome.sampled.add(key)
            self.outcome.began.setdefault(key[0], (self._now, self._collector.version))
            if self._apart:
                self._ready.discard(key)
                self._turn(episode)
            else:
                self.outcome.sandboxes = max(self.outcome.sandboxes, self._in_use)
                self._at(self._now + episode.work.setup_s(self._cell), self._turn, episode)
        if begin:
            self._launch()  # a collector may launch more when fewer wait

    # ------------------------------------------------------------------------------------------- an episode

    def _turn(self, episode: Episode) -> None:
        now, work, turn = self._now, episode.work, episode.turn
        while self._calls and self._calls[0][0] <= now:
            end, _, replica, ticket, tokens = heappop(self._calls)
            self._engine.running[replica] -= 1
            self._router.ended(ticket, end, tokens)
        replica, ticket = self._router.choose(episode, now)
        seconds, found = self._engine.call(replica, episode)
        self.outcome.prompt_tokens += work.context[turn]
        self.outcome.found_tokens += found
        end = now + seconds
        heappush(self._calls, (end, episode.number, replica, ticket, work.tokens[turn]))
        version, runs = self._collector.version, episode.versions
        if runs and runs[-1][0] == version:
            runs[-1] = version, runs[-1][1] + work.tokens[turn]
        else:
            runs.append((version, work.tokens[turn]))
        episode.turn += 1
        last = episode.turn == len(work.calls)
        self._at(end + work.tools[turn], self._agent_ended if last else self._turn, episode)

    def _agent_ended(self, episode: Episode) -> None:
        self._at(self._now + episode.work.verify_s, self._verified, episode)
        if self._apart:  # the slot goes on with another while the verifier runs
            self._slots(-1)
            self._queue.ended(episode.key)
            self._fill()

    def _verified(self, episode: Episode) -> None:
        self._in_use -= 1
        if self._streams is not None:
            self._streams.now_ms = round(self._now * 1000)
        if not self._apart:
            self._slots(-1)
            self._queue.ended(episode.key)
        for batch in self._collector.ended(*episode.key, episode.versions):
            self.outcome.batches.append(Batch(self._now, tuple(g for g, _ in batch), tuple(lag for _, lag in batch)))
        del self._episodes[episode.key]
        self._launch()
