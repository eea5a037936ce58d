"""Any process of a run may be killed at any moment: it goes on by itself (or resumes), and the account closes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.schemas.events import Version
from headrace.schemas.topics import POLICY
from tests.reference_fold import check_batches
from tests.running import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def running(tmp_path: Path, kafka: dict[str, Any], run_name: str) -> Iterator[Running]:
    running = Running(tmp_path, kafka, run_name)
    yield running
    running.kill_all()


def prove(running: Running, at_least: int) -> None:
    """The ledger closes, versions have no gap, and what was trained is what the raw events say."""
    run = open_run(running.topics.run, running.kafka)
    log = run.snapshot()
    ledger = audit(log)
    assert ledger.closes, ledger.failures
    versions = [e.version for _, e in run.events(POLICY) if isinstance(e, Version)]
    assert versions == list(range(len(versions))) and len(versions) > at_least
    assert check_batches(log) == []


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (8, 9))])
def test_every_role_killed_in_turn_loses_and_doubles_nothing(seed: int, running: Running) -> None:
    """In one run, in an order and at moments that the seed draws."""
    draw = random.Random(seed)
    roles = ["worker", "assembler", "coordinator", "trainer", "supervisor"]
    draw.shuffle(roles)
    running.start()
    running.wait_for(1)
    for role in roles:
        time.sleep(draw.uniform(0.0, 2.0))
        victim = running.role(role)
        while victim is None:  # it is just being started again
            time.sleep(0.05)
            victim = running.role(role)
        children = victim.children(recursive=True)
        before = running.version()
        victim.kill()
        if role == "supervisor":
            assert running.process is not None
            running.process.wait()
            gone, alive = psutil.wait_procs(children, timeout=10)
            assert not alive, "children outlived their supervisor"
            running.start()
        running.wait_for(before + 2)
    running.drain()
    prove(running, 2 * len(roles))
