"""Decides which episodes agents may run here: the gateway is the lessee, and each episode has a key of its own.

Whoever launches agents asks for episodes and finishes them; an agent has its episode's key and nothing else. Only
digests of keys are kept. An agent that neither asks nor waits for `rollout.agent_timeout_s` is gone: its attempt ends
as `unknown`. Leases that the coordinator took back, or whose events the broker refused, end here too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from headrace.schemas.errors import AttemptOver, EngineError, HeadraceError, RecordTooLarge, ReplicaLost
from headrace.schemas.events import Lease
from headrace.schemas.outcomes import (
    REASON_OTHER_VERSION,
    REASON_PRODUCER_RAISED,
    REASON_RECORD_TOO_LARGE,
    Boundary,
    Outcome,
    Purpose,
)
from headrace.schemas.settings import RunSettings

from ..alignment import Prober
from ..engines import GenerationRequest, Replica
from ..episodes import Attempt, EpisodeWriter
from ..sdk import Producer
from .attempts import COUNTS, AgentEpisode
from .protocol import Refused
from .tokenizer import Tokenizer
from .turns import Turn
from .updates import Updates

log = logging.getLogger("headrace.gateway")

LOOK_S = 0.5  # between two looks for episodes that are over without anybody saying so
ASKING = 32  # requests for groups that may wait for the coordinator at once
REMEMBERED = 10_000  # episodes that are over, and can still be asked about
REASON_AGENT_SILENT = "agent_silent"
REASON_FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Issued:
    """An episode as it is given out; its key is nowhere else."""

    episode: AgentEpisode
    key: str


class Gateway:
    """All episodes of this process. On one asyncio loop."""

    def __init__(self, producer: Producer, settings: RunSettings, tokenizer: Tokenizer, replica: Replica,
                 updates: Updates, *, engine: Mapping[str, str], grace_s: float) -> None:  # fmt: skip
        self.producer, self.settings = producer, settings
        self._tokenizer, self._replica, self._updates = tokenizer, replica, updates
        self._engine, self._grace_s = dict(engine), grace_s
        self._threads = ThreadPoolExecutor(ASKING, "gateway-leases")
        self._by_key: dict[bytes, AgentEpisode] = {}
        self._keys: dict[str, bytes] = {}  # by episode
        self._episodes: dict[str, AgentEpisode] = {}
        self._over: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self._totals: collections.Counter[str] = collections.Counter()  # of the episodes that are over
        self._told: dict[str, float] = {}  # what the next heartbeat says
        self._prober = Prober(settings.alignment, settings.rollout.temperature)
        self._probing: set[asyncio.Task[None]] = set()
        producer.report = self._report

    # ------------------------------------------------------------------------------------------------- leases

    async def lease(self, size: int | None, task: str | None, purpose: Purpose, version: int | None, wait_s: float, *,
                    greedy: bool = False) -> list[Issued]:  # fmt: skip
        """Episodes of one group. Raises Backpressure and NoProgress as `Producer.group` does."""
        lease = await asyncio.get_running_loop().run_in_executor(
            self._threads, self.producer.lease, task, size, purpose, version, wait_s,
            self.settings.rollout.max_attempts)  # fmt: skip
        if lease.version is not None and self._updates.version > lease.version:
            self.producer.give_back(lease, _attempts(lease), REASON_OTHER_VERSION)
            raise self._other_version(lease)
        return [self._issue(lease, attempt, greedy) for attempt in _attempts(lease)]

    def _issue(self, lease: Lease, attempt: Attempt, greedy: bool) -> Issued:
        episode = AgentEpisode(lease, attempt, self.producer.writer(attempt), self.settings, self._tokenizer,
                               self._sample, worker=self.producer.worker, engine=self._engine, greedy=greedy,
                               grace_s=self._grace_s, give_up=self._give_up)  # fmt: skip
        key = f"hr-{secrets.token_urlsafe(24)}"
        digest = _digest(key)
        self._by_key[digest], self._keys[episode.id], self._episodes[episode.id] = episode, digest, episode
        if lease.version is not None:
            self._updates.pin(episode.id, lease.version)
        log.info("episode %s: task %s, key %s", episode.id, lease.task.id, digest.hex()[:12])
        return Issued(episode, key)

    def withdraw(self, issued: list[Issued]) -> None:
        """Nobody took them: the slots go back, and use no attempt up."""
        for one in issued:
            episode = one.episode
            episode.over = "it was handed back"
            self.producer.give_back(episode.lease, [episode.attempt])
            self._give_up(episode.writer, AttemptOver(f"{episode.attempt} was handed back"))
            self._forget(episode)

    # ------------------------------------------------------------------------------------------------- episodes

    def of_key(self, key: str) -> AgentEpisode:
        """Raises Refused."""
        episode = self._by_key.get(_digest(key))
        if episode is None:
            raise Refused(401, "this key belongs to no episode that is open here: POST /v1/episodes gives one",
                          code="invalid_api_key")  # fmt: skip
        return episode

    def summary(self, name: str) -> dict[str, Any]:
        """Raises Refused."""
        if (episode := self._episodes.get(name)) is not None:
            return episode.summary()
        if name in self._over:
            return self._over[name]
        raise Refused(404, f"no episode {name} here", code="not_found")

    async def finish(self, name: str, outcome: Outcome, reason: str, boundary: Boundary, **verdict: Any
                     ) -> dict[str, Any]:  # fmt: skip
        """Its summary, also where it was over before. Raises Refused."""
        episode = self._episodes.get(name)
        if episode is not None:
            await episode.end(outcome, reason, boundary, **verdict)
            self._forget(episode)
        return self.summary(name)

    def totals(self) -> dict[str, float]:
        episodes = self._episodes.values()
        counts = {name: self._totals[name] + sum(one.counts[name] for one in episodes) for name in COUNTS}
        return {"open_episodes": float(len(episodes)), "episodes": float(self._totals["episodes"]),
                **{name: float(count) for name, count in counts.items()}}  # fmt: skip

    async def look_after(self) -> None:
        """For ever: end what nobody will end."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._told = self.totals()
            self._probe()
            for episode in list(self._episodes.values()):
                if episode.over is None and (over := self.producer.over(episode.attempt)) is not None:
                    episode.failed(over)
                if episode.over is not None and not episode.ending:
                    self._forget(episode)
                elif episode.over is None and episode.silent_s > self.settings.rollout.agent_timeout_s:
                    asyncio.create_task(self.finish(episode.id, Outcome.UNKNOWN, REASON_AGENT_SILENT,
                                                    Boundary.ENVIRONMENT))  # fmt: skip

    def abort_all(self, error: Refused) -> None:
        """End whatever is being sampled; agents ask again."""
        for episode in self._episodes.values():
            episode.abort(error)

    def _forget(self, episode: AgentEpisode) -> None:
        if self._episodes.pop(episode.id, None) is None:
            return
        self._by_key.pop(self._keys.pop(episode.id), None)
        self._updates.unpin(episode.id)
        self._totals.update(episode.counts)
        self._totals["episodes"] += 1
        self._over[episode.id] = episode.summary()
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        # Whatever it came to is on the way to the log; the producer needn't know it any more.
        self.producer.end(episode.writer, Outcome.INFRA_FAILURE, REASON_PRODUCER_RAISED, text=episode.over)

    def _give_up(self, writer: EpisodeWriter, error: HeadraceError) -> None:
        if isinstance(error, AttemptOver):
            writer.abandon(error)
        reason = REASON_RECORD_TOO_LARGE if isinstance(error, RecordTooLarge) else REASON_PRODUCER_RAISED
        self.producer.end(writer, Outcome.INFRA_FAILURE, reason, text=f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------- sampling

    async def _sample(self, episode: AgentEpisode, turn: Turn) -> None:
        await self._updates.admitted(episode.lease.min_version)
        try:
            if episode.lease.version is not None and self._updates.version > episode.lease.version:
                turn.fail(self._other_version(episode.lease))
            else:
                await turn.generate(self._replica, self._tokenizer.eos)
                if turn.error is None:
                    self._prober.served(turn.prompt.ids, turn.tokens)
        finally:
            self._updates.ended(turn.runs[-1][0] if turn.runs else None)

    def _probe(self) -> None:
        """Beside the turns, at versions that are to be probed. A token of another version gives the probe up."""
        probe = self._prober.result(self.producer.worker, self.producer.incarnation, self._engine)
        if probe is not None:
            self.producer.to_fleet(probe)
        for request in self._prober.begin(self._updates.version, frozenset(self._tokenizer.eos)):
            task = asyncio.create_task(self._read_probe(request))
            self._probing.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._probing.discard)

    async def _read_probe(self, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(cast(Any, self._replica.generate(request))) as progress:
                async for one in progress:
                    self._prober.took(one)
        except (EngineError, ReplicaLost) as error:
            log.info("the alignment probe goes without %s: %s", request.request_id, error)
        self._prober.refused(request.request_id)

    def _other_version(self, lease: Lease) -> Refused:
        return Refused(410, f"version {lease.version} is served no more: version {self._updates.version} is",
                       code="other_version")  # fmt: skip

    def _report(self) -> tuple[int, str, dict[str, float]]:
        """On the heartbeat's thread: what it reads is replaced and never changed."""
        return self._updates.version, json.dumps(self._engine, sort_keys=True), self._told

    async def close(self) -> None:
        """Aborts what runs; episodes that are open end as infrastructure failures when the producer closes."""
        self.abort_all(Refused(503, "the gateway is closing", code="closing"))
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._probing:
            task.cancel()
        await self._replica.close()


def _attempts(lease: Lease) -> list[Attempt]:
    return [Attempt(lease.group, one.slot, one.attempt, lease.incarnation) for one in lease.assignments]


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
