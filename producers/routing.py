"""Which replica serves a request: the one decision of this module, a pure function of what it is told.

A replica that holds a request's prefix need not compute it again, so a conversation goes back to where its earlier
turns lie and siblings meet at their common prompt; but never at any price. Load is bounded as in consistent hashing
with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350): the holder of the longest prefix takes a
request while its load stays within `BOUND` times the mean. Beyond that the request goes where load and tokens to
compute, these `RECOMPUTED` times, are least together: again to the holder where what it saves outweighs its queue.

Load is work, in tokens to compute (prompt tokens that no cache holds, and the answer): all of it while the request
runs, and after its end a remainder that halves every `HALF_LIFE_S`, so that a burst of short requests counts too.
What a replica's cache holds is a mirror: the blocks of the requests that went there, the least recently used gone
first. The mirror is an estimate; where an engine tells what it found in its cache, both are reported.

No clients, threads or clocks: the time is an argument (seconds, any clock that never goes back).
"""

from __future__ import annotations

import enum
import hashlib
import operator
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_TOKENS = 128  # a multiple of the engines' 16: coarser than they cache, and an eighth of the hashing
CACHED_BLOCKS = 65_536  # of a replica whose engine doesn't tell: 8 M tokens, and about 10 MB here
BOUND = 1.25  # of the mean load: a quarter above it is what a prefix may cost its holder
RECOMPUTED = 3.0  # a queue takes time from those in it; a token computed twice takes a token from the whole fleet
HALF_LIFE_S = 40.0  # of ended work: the time over which load is levelled
CONVERSATIONS = 65_536  # whose replica is remembered: more than are ever under way
FIRST_ANSWER = 256.0  # tokens that an answer is taken to have, until answers have been seen
SMALLEST = 1e-6  # share of ended work at which it is counted anew
ANSWER_WEIGHT = 0.05  # of each new answer in that mean


class Reason(enum.StrEnum):
    """Why a request went where it went."""

    PREFIX = "prefix"  # that replica holds the longest prefix
    NEW = "new"  # no replica holds any of it: the least loaded
    SPILLED = "spilled"  # the holder has too much to do
    REROUTED = "rerouted"  # the conversation's replica is gone, fenced, draining or to be avoided


@dataclass(frozen=True, slots=True)
class Request:
    """What routing knows of one request. `blocks` name its prompt in pieces of the same size, each with everything
    before it (`blocks_of` of ids, or a trace's hashes); the last may be partial. `tokens` is the prompt's length."""

    conversation: str
    tokens: int
    blocks: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Choice:
    """`ticket` names the request in `ended`; `cached_tokens` of its prompt are estimated to lie in the cache there."""

    ticket: int
    replica: str
    reason: Reason
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens of all requests so far; `true` and `told` (tokens of the requests whose engine told it) are what
    the engines found in their caches, `estimated_of_told` the estimate for the same requests."""

    prompt: int = 0
    estimated: int = 0
    told: int = 0
    true: int = 0
    estimated_of_told: int = 0


def blocks_of(ids: Sequence[int], salt: Hashable = None, block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Names of the full blocks of a prompt of token ids: each is a hash over everything up to its end, and over `salt`
    (the served version where engines salt their prefix cache with it)."""
    data = np.asarray(ids, dtype="<i4").tobytes()
    chain, step = hashlib.blake2b(repr(salt).encode(), digest_size=16), 4 * block_tokens
    names = []
    for end in range(step, len(data) + 1, step):
        chain.update(data[end - step : end])
        names.append(chain.digest())
    return names


def blocks_by_count(group: str, shared_tokens: int, conversation: str, tokens: int,
                    block_tokens: int = BLOCK_TOKENS) -> Sequence[Hashable]:  # fmt: skip
    """Names where only counts are known: the first `shared_tokens` are the group's own, the rest the conversation's,
    which only ever grows."""
    shared = shared_tokens // block_tokens
    return [(group, i) for i in range(shared)] + [(conversation, i) for i in range(shared, tokens // block_tokens)]


class PrefixCache:
    """The blocks of one replica, least recently used out first. A block is never younger than the one before it, so
    what is held of a prompt is always a prefix of it."""

    def __init__(self, capacity: int | None) -> None:
        """`capacity` in blocks; None holds everything."""
        self.capacity = capacity
        self._held: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[Hashable]) -> int:
        """How many of the first blocks are held."""
        held, low, high = self._held, 0, len(blocks)
        if not high or blocks[0] not in held:
            return 0
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, blocks: Sequence[Hashable]) -> None:
        """The replica computes, or reads, all of them now."""
        held = self._held
        for block in reversed(blocks):  # the last is given up first
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
        if self.capacity is not None:
            while len(held) > self.capacity:
                held.popitem(last=False)


@dataclass(slots=True)
class _Replica:
    capacity: int
    cache: PrefixCache
    routable: bool = True
    running: int = 0
    waiting: int = 0  # as the engine told, of anybody's requests
    active_work: float = 0.0
    ended_work: float = 0.0  # as it was at the router's `_since`

    @property
    def free(self) -> bool:
        return self.running < self.capacity and not self.waiting


@dataclass(slots=True)
class _Running:
    replica: str
    conversation: str
    tokens: int
    cached: int
    work: float
    to_compute: int


class Router:
    """Replicas come and go by `added`, `removed`, `fenced`, `drained` and `restored`; requests by `choose` and
    `ended`. The same calls give the same choices."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, bound: float = BOUND,
                 half_life_s: float = HALF_LIFE_S) -> None:  # fmt: skip
        """Raises ValueError for a bound below 1."""
        if bound < 1:
            raise ValueError(f"bound is {bound}: below 1 no replica could take its share")
        self._block_tokens, self._bound, self._half_life_s = block_tokens, bound, half_life_s
        self._replicas: dict[str, _Replica] = {}
        self._home: OrderedDict[str, str] = OrderedDict()  # conversation -> replica, the latest used last
        self._running: dict[int, _Running] = {}
        self._tickets = 0
        self._now = self._since = 0.0
        self._kept = 1.0
        self._answer = FIRST_ANSWER
        self._prompt = self._estimated = self._told = self._true = self._estimated_of_told = 0
        self.reasons = dict.fromkeys(Reason, 0)

    # ------------------------------------------------------------------------------------------------ replicas

    def added(self, name: str, capacity: int = 1, cached_blocks: int | None = CACHED_BLOCKS) -> None:
        """A replica is there, with an empty cache (again, where it was restarted). `capacity` weighs its share."""
        self.removed(name)
        self._replicas[name] = _Replica(max(1, capacity), PrefixCache(cached_blocks))

    def removed(self, name: str) -> None:
        """It is gone, with its cache and what ran there."""
        self._replicas.pop(name, None)
        for ticket in [ticket for ticket, one in self._running.items() if one.replica == name]:
            del self._running[ticket]

    def fenced(self, name: str) -> None:
        """It failed or lags: nothing goes there until `restored`."""
        self._replicas[name].routable = False

    drained = fenced  # what runs there may finish; nothing new goes there

    def restored(self, name: str) -> None:
        self._replicas[name].routable = True

    def told(self, name: str, waiting: int, capacity: int | None = None) -> None:
        """What a health check said: requests in the engine's own queue, whoever sent them."""
        replica = self._replicas[name]
        replica.waiting, replica.capacity = waiting, max(1, capacity or replica.capacity)

    def loads(self) -> dict[str, float]:
        """Work of each replica now, in tokens."""
        return {name: self._work(one) for name, one in self._replicas.items()}

    @property
    def hits(self) -> Hits:
        return Hits(self._prompt, self._estimated, self._told, self._true, self._estimated_of_told)

    # ------------------------------------------------------------------------------------------------ requests

    def choose(self, request: Request, now: float, avoid: Collection[str] = ()) -> Choice | None:
        """Where the request goes; it counts there from now on. None while no replica may take it. `avoid`: replicas
        that have just failed it."""
        self._fade(now)
        home = self._home.get(request.conversation)
        tokens, blocks, kept = request.tokens, request.blocks, self._kept
        able: list[_Option] = []
        total = room = 0.0
        for name, one in self._replicas.items():  # the one loop that every request runs: kept flat
            if one.routable and name not in avoid:
                work = one.active_work + one.ended_work * kept
                cached = min(tokens, self._block_tokens * one.cache.match(blocks))
                able.append((cached, name == home, -work / one.capacity, name, one))
                total += work
                room += one.capacity
        if not able:
            return None
        holder = max(able, key=_PREFERENCE)
        cached, _, load, name, one = holder
        work = tokens - cached + self._answer
        reason = Reason.PREFIX
        if not cached:
            name, reason = max(_free(able) or able, key=_LOAD)[3], Reason.NEW
        elif (not one.free and _free(able)  # its slots are taken and others' aren't
              or work - load * one.capacity > self._bound * one.capacity / room * (total + work)):  # fmt: skip
            best = min(_free(able) or able, key=lambda option: (
                -option[2] + RECOMPUTED * (tokens - option[0]) / option[4].capacity))  # fmt: skip
            reason = Reason.PREFIX if best is holder else Reason.SPILLED
            cached, _, _, name, _ = best
        if home is not None and all(option[3] != home for option in able):
            reason = Reason.REROUTED
        return self._started(request, name, reason, cached)

    def _work(self, replica: _Replica) -> float:
        """In tokens, now."""
        return replica.active_work + replica.ended_work * self._kept

    def _started(self, request: Request, name: str, reason: Reason, cached: int) -> Choice:
        replica, to_compute = self._replicas[name], request.tokens - cached
        work = to_compute + self._answer
        replica.running += 1
        replica.active_work += work
        replica.cache.use(request.blocks)
        self._home[request.conversation] = name
        self._home.move_to_end(request.conversation)
        if len(self._home) > CONVERSATIONS:
            self._home.popitem(last=False)
        self._tickets += 1
        self._running[self._tickets] = _Running(name, request.conversation, request.tokens, cached, work, to_compute)
        self.reasons[reason] += 1
        self._prompt += request.tokens
        self._estimated += cached
        return Choice(self._tickets, name, reason, cached)

    def ended(self, ticket: int, now: float, answer_tokens: int, blocks: Sequence[Hashable] | None = None,
              cached_tokens: int | None = None) -> None:  # fmt: skip
        """A request ended, for whatever reason. `blocks`: of prompt and answer together, which the cache holds now;
        `cached_tokens`: what the engine found of its prompt. A ticket of a removed replica is ignored."""
        self._fade(now)
        one = self._running.pop(ticket, None)
        if one is None:
            return
        replica = self._replicas[one.replica]
        replica.running -= 1
        replica.active_work -= one.work
        replica.ended_work += (one.to_compute + answer_tokens) / self._kept
        self._answer += ANSWER_WEIGHT * (answer_tokens - self._answer)
        if blocks is not None:
            replica.cache.use(blocks)
        if cached_tokens is not None:
            self._told += one.tokens
            self._true += cached_tokens
            self._estimated_of_told += one.cached

    def _fade(self, now: float) -> None:
        """Ended work halves every half-life: `ended_work` is in units of the time `_since`, `_kept` of it are left."""
        if now > self._now:
            self._now = now
            self._kept = 0.5 ** ((now - self._since) / self._half_life_s)
            if self._kept < SMALLEST:
                for replica in self._replicas.values():
                    replica.ended_work *= self._kept
                self._since, self._kept = now, 1.0


# (tokens in its cache, whether the conversation is at home there, minus its load, name, replica)
_Option = tuple[int, bool, float, str, _Replica]
_PREFERENCE, _LOAD = operator.itemgetter(0, 1, 2), operator.itemgetter(2)


def _free(able: list[_Option]) -> list[_Option]:
    return [option for option in able if option[4].free]
