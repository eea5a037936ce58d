"""How much of the work that a prefix cache saves survives routing over 8 replicas, and how even the load stays.

A trace's requests, in order and at their times, are routed by `headrace.producers.routing` and by three routers that
know nothing of caches. Each replica keeps a prefix cache of whole blocks (least recently used out first), which says
what a request really found there; the router only sees what came before, never the caches and never an answer's length
before its end. Shares are of the prompt tokens that one cache without limit finds, which is all that any routing could.

Load is the tokens that a replica computes: prompt tokens that its cache didn't hold, and the answer. Imbalance is the
most loaded replica's over the mean, for the run and for each 60-second window (the last, unfinished one left out).
Requests end, and the first token comes, as on a replica that prefills one request after another at 8,000 tokens/s and
then decodes at 40 tokens/s: a model of an engine, not a measurement; only the rows of cost are measured time.

TRACE: JSON lines with timestamp (ms), input_length, output_length and hash_ids (names of the prompt's blocks of 512
tokens, each with everything before it), such as the traces of Mooncake. Without one, conversations are drawn: families
of system prompts, turns that come back after a while, answers of lognormal length.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.producers.routing import PrefixCache, Request, Router, blocks_of

from . import harness
from .baselines.routing import Baseline, ConsistentHash, LeastLoaded, RoundRobin
from .harness import CannotMeasure, Result

REPLICAS = 8
BLOCK = 512
CACHES = (None, 500, 1000, 2000)  # blocks per replica
WINDOW_S = 60.0
PREFILL_PER_S, DECODE_PER_S = 8000.0, 40.0
OURS = "prefix under bounded load"


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds
    prompt: int
    answer: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one pass over a trace. `hits`: prompt tokens found in caches; per replica: `computed` [8] and per window
    [windows, 8] tokens, `requests` [8]; `first_s`: seconds to each first token."""

    hits: int
    estimated: int | None
    computed: np.ndarray
    windows: np.ndarray
    requests: np.ndarray
    first_s: np.ndarray


class Ours:
    """The router of this project behind the call of the baselines."""

    def __init__(self, cached_blocks: int | None) -> None:
        self.router = Router(block_tokens=BLOCK)
        for replica in range(REPLICAS):
            self.router.added(str(replica), capacity=256, cached_blocks=cached_blocks)


def one_pass(trace: Sequence[Arrival], caches: int | None, baseline: Baseline | None) -> Outcome:
    """Route the whole trace; `baseline` None: by our router."""
    ours = Ours(caches) if baseline is None else None
    held = [PrefixCache(caches) for _ in range(REPLICAS)]
    free_at = [0.0] * REPLICAS  # when its prefill queue is empty
    ending: list[tuple[float, int, int, int, int]] = []  # (time, tie, replica or ticket, answer, found)
    windows = np.zeros((1 + int(trace[-1].at // WINDOW_S), REPLICAS))
    requests, first, hits = np.zeros(REPLICAS), np.zeros(len(trace)), 0
    for number, one in enumerate(trace):
        while ending and ending[0][0] <= one.at:
            at, _, which, answer, found = heapq.heappop(ending)
            if ours is not None:
                ours.router.ended(which, at, answer, cached_tokens=found)
            elif baseline is not None:
                baseline.ended(which)
        if ours is not None:
            choice = ours.router.choose(Request(str(one.blocks[0]), one.prompt, one.blocks), one.at)
            assert choice is not None
            replica, which = int(choice.replica), choice.ticket
        else:
            assert baseline is not None
            replica = which = baseline.choose(one.blocks[0], one.at)
        found = min(one.prompt, BLOCK * held[replica].match(one.blocks))
        held[replica].use(one.blocks)
        hits += found
        requests[replica] += 1
        windows[int(one.at // WINDOW_S), replica] += one.prompt - found + one.answer
        free_at[replica] = max(free_at[replica], one.at) + (one.prompt - found) / PREFILL_PER_S
        first[number] = free_at[replica] - one.at
        heapq.heappush(ending, (free_at[replica] + one.answer / DECODE_PER_S, number, which, one.answer, found))
    estimated = ours.router.hits.estimated if ours is not None else None
    return Outcome(hits, estimated, windows.sum(0), windows, requests, first)


def found_by_one_cache(trace: Sequence[Arrival], capacity: int | None) -> int:
    """Prompt tokens that one cache for all requests finds."""
    cache, hits = PrefixCache(capacity), 0
    for one in trace:
        hits += min(one.prompt, BLOCK * cache.match(one.blocks))
        cache.use(one.blocks)
    return hits


def imbalance(loads: np.ndarray) -> np.ndarray:
    """Most over mean along the last axis; windows without load count as even."""
    mean = loads.mean(-1)
    return np.where(mean > 0, loads.max(-1) / np.maximum(mean, 1e-12), 1.0)


def measure(options: argparse.Namespace, result: Result) -> None:
    traces = {path.stem: read(path) for path in options.trace} or {"drawn": drawn(seed=0)}
    for name, trace in traces.items():
        said = f"{name}: " if len(traces) > 1 else ""
        _compare(trace, said, (None,) if options.quick else CACHES, result)
        _cost(trace, said, 1 if options.quick else 5, result)
        prompts = sum(one.prompt for one in trace)
        result.note(f"{said or name + ': '}{len(trace)} requests in {trace[-1].at:.0f} s, {prompts / 1e6:.1f} M prompt "
                    f"tokens, of which one cache without limit finds {found_by_one_cache(trace, None) / prompts:.1%}; "
                    f"{sum(one.answer for one in trace) / 1e6:.2f} M answer tokens.")  # fmt: skip


def _compare(trace: Sequence[Arrival], said: str, sizes: Sequence[int | None], result: Result) -> None:
    most = max(1, found_by_one_cache(trace, None))
    for caches in sizes:
        size = "unlimited caches" if caches is None else f"{caches:,} blocks per replica"
        routers: dict[str, Baseline | None] = {
            OURS: None, "round-robin": RoundRobin(REPLICAS), "least-loaded": LeastLoaded(REPLICAS),
            "consistent hashing": ConsistentHash(REPLICAS),
        }  # fmt: skip
        seen = {name: one_pass(trace, caches, baseline) for name, baseline in routers.items()}
        for name, outcome in seen.items():
            result.row(f"{said}hit tokens of one infinite cache's, {size}", name, outcome.hits / most)
        if caches is not None:
            shared = found_by_one_cache(trace, caches * REPLICAS) / most
            result.row(f"{said}hit tokens of one infinite cache's, {size}", "one cache of that size in all", shared)
        ours = seen[OURS]
        assert ours.estimated is not None
        result.row(f"{said}hit tokens of one infinite cache's, {size}", "ours, as estimated", ours.estimated / most)
        for name, outcome in seen.items():
            result.row(f"{said}imbalance of the run, {size}", name, float(imbalance(outcome.computed)))
        for what, of in (("median", np.median), ("largest", np.max)):
            for name, outcome in seen.items():
                by_window = imbalance(outcome.windows[:-1] if len(outcome.windows) > 1 else outcome.windows)
                result.row(f"{said}imbalance of 60-second windows, {what}, {size}", name, float(of(by_window)))
        for name, outcome in seen.items():
            result.row(f"{said}imbalance of requests, {size}", name, float(imbalance(outcome.requests)))
        for name, outcome in seen.items():
            result.row(f"{said}first token after, p95 (modelled), {size}", name,
                       float(np.percentile(outcome.first_s, 95)), "s")  # fmt: skip
        if caches is None:
            result.at_least(f"{said}hit share with unlimited caches", ours.hits / most, 0.97)
            result.at_most(f"{said}imbalance of the run, at that", float(imbalance(ours.computed)), 1.10)


def _cost(trace: Sequence[Arrival], said: str, repetitions: int, result: Result) -> None:
    """Microseconds for a decision and the word of its end."""
    requests = [Request(str(one.blocks[0]), one.prompt, one.blocks) for one in trace]

    def ours(caches: int | None) -> Callable[[], float]:
        def once() -> float:
            router, began = Ours(caches).router, time.perf_counter()
            for one, request in zip(trace, requests, strict=True):
                choice = router.choose(request, one.at)
                assert choice is not None
                router.ended(choice.ticket, one.at, one.answer)
            return (time.perf_counter() - began) / len(trace) * 1e6

        return once

    def theirs(make: Callable[[int], Baseline]) -> Callable[[], float]:
        def once() -> float:
            baseline, began = make(REPLICAS), time.perf_counter()
            for one in trace:
                baseline.ended(baseline.choose(one.blocks[0], one.at))
            return (time.perf_counter() - began) / len(trace) * 1e6

        return once

    def hashing() -> float:
        ids = np.arange(8192, dtype=np.int32)
        began = time.perf_counter()
        for _ in range(20):
            blocks_of(ids)  # type: ignore[arg-type]
        return (time.perf_counter() - began) / 20 * 1e6

    taken = harness.alternate({f"{OURS}, unlimited": ours(None), f"{OURS}, 1,000 blocks": ours(1000),
                               "round-robin": theirs(RoundRobin), "least-loaded": theirs(LeastLoaded),
                               "consistent hashing": theirs(ConsistentHash),
                               "to name the blocks of 8,192 ids": hashing}, repetitions)  # fmt: skip
    for name, values in taken.items():
        result.row(f"{said}a decision and its end", name, harness.spread(values), "us")


# ---------------------------------------------------------------------------------------------------------- traces


def read(path: Path) -> list[Arrival]:
    """Raises CannotMeasure, naming the line, for what isn't such a trace."""
    trace: list[Arrival] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                one = json.loads(line)
                trace.append(Arrival(one["timestamp"] / 1000, int(one["input_length"]), int(one["output_length"]),
                                     tuple(one["hash_ids"])))  # fmt: skip
                if not trace[-1].blocks or (len(trace) > 1 and trace[-1].at < trace[-2].at):
                    raise CannotMeasure(f"{path}, line {number}: no hash_ids, or a timestamp before the last line's")
    except OSError as error:
        raise CannotMeasure(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CannotMeasure(f"{path}, line {number}: not a request of a trace ({error!r})") from error
    if not trace:
        raise CannotMeasure(f"{path} holds no request")
    return trace


def drawn(seed: int, conversations: int = 1200, minutes: float = 20.0) -> list[Arrival]:
    """Conversations that begin at random; of 40 families, each with a system prompt that all of its turns share."""
    draw, names = random.Random(seed), itertools.count()
    systems = [[next(names) for _ in range(draw.randint(1, 6))] for _ in range(40)]

    def turns() -> Iterator[Arrival]:
        for _ in range(conversations):
            at, blocks = draw.uniform(0, 60 * minutes), list(draw.choice(systems))
            for _ in range(1 + min(20, int(draw.expovariate(1 / 4)))):
                answer = max(1, round(draw.lognormvariate(4.5, 1.0)))
                fresh = max(1, round(draw.lognormvariate(6.5, 1.2)))
                blocks += [next(names) for _ in range(1 + fresh // BLOCK)]
                yield Arrival(at, len(blocks) * BLOCK - draw.randrange(BLOCK), answer, tuple(blocks))
                at += draw.expovariate(1 / 30) + 2

    return sorted((one for one in turns() if one.at < 60 * minutes), key=lambda one: one.at)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", nargs="*", type=Path, help="JSON lines; by default data are drawn")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("routing", __doc__, measure, argv, _arguments)


if __name__ == "__main__":
    raise SystemExit(main())
