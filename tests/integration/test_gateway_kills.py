"""Replicas that are killed under agents: every slot ends once, whole, and the ledger closes."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Span
from headrace.schemas.outcomes import Source
from tests.gateway_run import GatewayRun

pytestmark = pytest.mark.slow


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
    with _replica() as (first, one), _replica() as (second, two):
        engine = f'engine = "openai"\nreplicas = ["http://127.0.0.1:{one}", "http://127.0.0.1:{two}"]'
        run = GatewayRun(tmp_path, kafka, run_name, engine=engine)
        with run.roles(), ThreadPoolExecutor(8) as pool:
            run.start_gateway()
            episodes = [run.one() for _ in range(8)]
            body = [{"role": "user", "content": "go"}]
            asked = [pool.submit(run.chat, episode["key"], body, max_tokens=40, return_token_ids=True)
                     for episode in episodes]  # fmt: skip
            time.sleep(1.0)  # half way through their two seconds
            first.kill()
            answers = [one.result(60)["choices"][0] for one in asked]
            assert second.poll() is None
            for episode, answer in zip(episodes, answers, strict=True):
                assert len(answer["token_ids"]) == 40
                run.finish(episode["id"], 1.0)
                found = [e for e in run.attempt(episode) if isinstance(e, Span) and e.source == Source.MODEL]
                assert [t for span in found for t in span.token_ids().tolist()] == answer["token_ids"]
        _check_attempts(run)
        assert run.ledger().closes
