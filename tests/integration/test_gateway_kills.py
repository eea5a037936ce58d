"""Gateways and replicas that are killed under agents: every slot ends once, whole, and the ledger closes."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers import open_run
from headrace.schemas.codec import decode
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Span, Version
from headrace.schemas.outcomes import Source
from headrace.schemas.topics import POLICY
from headrace.streams.log.reader import read_backwards
from tests.gateway_run import Answered, GatewayRun

pytestmark = pytest.mark.slow

AGENTS = 6
RUN_S = 240.0


class Agents:
    """Threads that launch episodes, talk, now and then branch, ask twice or hang up, and finish; they outlive a
    gateway that is away, as launchers do."""

    def __init__(self, run: GatewayRun) -> None:
        self.run, self.stop = run, threading.Event()
        self.groups = set[str]()
        self.lost = 0

    def play(self, number: int) -> None:
        draw = random.Random(number)
        while not self.stop.is_set():
            try:
                given = self.run.episodes(wait_s=5)
                self.groups.add(given["group"])
                for one in given["episodes"]:
                    self._episode(draw, one)
            except (OSError, http.client.HTTPException, Answered):
                self.lost += 1
                time.sleep(0.2)

    def _episode(self, draw: random.Random, one: dict[str, Any]) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Say {draw.random():.3f}."}]
        for turn in range(draw.randint(1, 3)):
            answer = self.run.chat(one["key"], messages, max_tokens=draw.randint(4, 24), timeout_s=60)
            if draw.random() < 0.3:
                assert self.run.chat(one["key"], messages, max_tokens=5)["choices"]  # another answer: a branch
            if draw.random() < 0.3:
                # Hangs up: an orphan, unless the answer was quicker.
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.run.chat(one["key"], messages, max_tokens=90, seed=turn, timeout_s=0.05)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
        self.run.finish(one["id"], float(draw.random() < 0.5))


@pytest.mark.timeout(900)
def test_run_fed_by_agents_outlives_a_killed_gateway_and_its_ledger_closes(
    tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    run = GatewayRun(tmp_path, kafka, run_name, batch={"groups": 2, "max_lag": 3})
    with run.roles():
        run.start_gateway()
        agents = Agents(run)
        with ThreadPoolExecutor(AGENTS) as pool:
            played = [pool.submit(agents.play, number) for number in range(AGENTS)]
            try:
                _until(run, 1)
                run.kill_gateway()  # in the middle of turns
                run.start_gateway()  # the same name: its old incarnation's slots are lost at once
                _until(run, 3)
            finally:
                agents.stop.set()
                for one in played:
                    one.result(120)
        _sweep(run, agents)
        run.closed(sorted(agents.groups), 120)
    _check_attempts(run)
    lost = [a for view in open_run(run_name, kafka).groups() for a in view.slots if a.attempt > 0]
    assert lost and agents.lost, "the kill lost no slot: it came between two"
    ledger = run.ledger()
    assert ledger.closes, ledger.failures


def _until(run: GatewayRun, version: int) -> None:
    """A trained version is committed: each is a batch of what agents did."""
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        for record in read_backwards(run.kafka, run.topics.name(POLICY), 0):
            if isinstance(event := decode(record.value), Version):
                if event.version >= version:
                    return
                break
        time.sleep(0.3)
    raise AssertionError(f"no version {version}:\n{(run.folder / 'gw.log').read_text()[-3000:]}")


def _sweep(run: GatewayRun, agents: Agents) -> None:
    """Slots that were lost wait for whoever asks: ask until nothing of an open group is left."""
    for _ in range(50):
        open_ones = agents.groups - {view.id for view in open_run(run.topics.run, run.kafka).groups() if view.closure}
        if not open_ones:
            return
        with contextlib.suppress(Answered):
            given = run.episodes(wait_s=3)
            agents.groups.add(given["group"])
            for one in given["episodes"]:
                agents._episode(random.Random(1), one)


def _check_attempts(run: GatewayRun) -> None:
    """No attempt has a hole, an event twice, or anything after its end; no model token lies in two spans."""
    attempts: dict[tuple[str, int, int, str], list[Any]] = {}
    for event in run.events():
        if isinstance(event, EpisodeStarted | Span | EpisodeEnded):
            attempts.setdefault((event.group, event.slot, event.attempt, event.incarnation), []).append(event)
    assert attempts
    for name, events in attempts.items():
        assert [event.sequence for event in events] == list(range(len(events))), name
        assert not any(isinstance(event, EpisodeEnded) for event in events[:-1]), name
        for span in (event for event in events if isinstance(event, Span)):
            span.check()
            assert -1 <= span.parent < span.sequence
    slots = [key for key, _ in itertools.groupby(sorted(name[:3] for name in attempts))]
    assert len(slots) == len(set(slots)) == len(attempts), "one writer for each attempt"


@contextlib.contextmanager
def _replica(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server without a model: see its docstring."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks._scripted_replica", str(port), "0.05", "0.05"],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().split()[1])
    finally:
        process.kill()
        process.wait()


def test_killed_replica_costs_an_agent_nothing(tmp_path: Path, kafka: dict[str, Any], run_name: str) -> None:
    """Nor does a silent one. The first is killed; another is stopped: its connections stay open and say nothing, until
    health checks find it out, and later it goes on with what nobody waits for any more."""
    with _replica() as (first, one), _replica() as (second, two), _replica() as (third, three):
        servers = ", ".join(f'"http://127.0.0.1:{port}"' for port in (one, two, three))
        run = GatewayRun(tmp_path, kafka, run_name, engine=f'engine = "openai"\nreplicas = [{servers}]')
        with run.roles(), ThreadPoolExecutor(8) as pool:
            run.start_gateway()
            for server, how in ((first, signal.SIGKILL), (second, signal.SIGSTOP)):
                episodes = [run.one() for _ in range(8)]
                body = [{"role": "user", "content": "go"}]
                asked = [pool.submit(run.chat, episode["key"], body, max_tokens=40, return_token_ids=True)
                         for episode in episodes]  # fmt: skip
                time.sleep(1.0)  # half way through their two seconds
                server.send_signal(how)
                answers = [one.result(60)["choices"][0] for one in asked]
                assert third.poll() is None
                second.send_signal(signal.SIGCONT)
                for episode, answer in zip(episodes, answers, strict=True):
                    assert len(answer["token_ids"]) == 40
                    run.finish(episode["id"], 1.0)
                    found = [e for e in run.attempt(episode) if isinstance(e, Span) and e.source == Source.MODEL]
                    assert [t for span in found for t in span.token_ids().tolist()] == answer["token_ids"]
        _check_attempts(run)
        assert run.ledger().closes


def test_silent_agent_and_dead_gateway_end_as_what_they_are(tmp_path: Path, kafka: dict[str, Any],
                                                            run_name: str) -> None:  # fmt: skip
    run = GatewayRun(tmp_path, kafka, run_name,
                     rollout={"group_size": 2, "max_new_tokens": 64, "lease_timeout_s": 2, "max_attempts": 2,
                              "agent_timeout_s": 2, "deadline_s": 60})  # fmt: skip
    with run.roles():
        run.start_gateway()
        given = run.episodes()
        first, second = (one | {"group": given["group"]} for one in given["episodes"])
        run.chat(first["key"], [{"role": "user", "content": "hello"}])
        ended = run.attempt(first)[-1]  # nobody says anything more
        assert isinstance(ended, EpisodeEnded) and (ended.outcome, ended.reason) == ("unknown", "agent_silent")
        again = run.episodes()
        while again["group"] != given["group"]:  # word of the end is still on its way to the coordinator
            again = run.episodes()
        assert again["episodes"][0]["attempt"] == 1
        run.kill_gateway()  # and never comes back
        view = run.closed([given["group"]], 120)[given["group"]]
    assert view.closure == "too_few_survivors"
    assert {fate.outcome for fate in view.slots} == {"infra_failure"}
    assert run.ledger().closes
