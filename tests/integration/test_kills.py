"""Any process of a run may be killed at any moment: it goes on by itself (or resumes), and the account closes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.models import tiny_model
from headrace.schemas.codec import decode
from headrace.schemas.errors import LogError
from headrace.schemas.events import Version
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log.reader import last_record
from tests.reference_fold import check_batches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TESTS = Path(__file__).parent.parent
KILLS = 5
PROGRESS_S = 90.0  # two versions more after a kill, on a slow machine

CONFIG = """
run = "{run}"
seed = 1
[model]
path = "{model}"
dtype = "bfloat16"
[tasks]
source = "jsonl"
path = "{tasks}"
score = "scorers:vowels"
[rollout]
group_size = 4
max_new_tokens = 24
lease_timeout_s = 4
[batch]
groups = 3
[optimizer]
learning_rate = 3e-4
[checkpoint]
every = 3
[weights]
snapshot_every = 4
[site]
worker_threads = 1
trainer_threads = 1
slots = 16
max_deaths = 100
[site.kafka]
"bootstrap.servers" = "{bootstrap}"
"""


class Running:
    """`headrace run`, as a person starts it."""

    def __init__(self, folder: Path, kafka: dict[str, Any], run: str) -> None:
        self.folder, self.kafka, self.topics = folder, kafka, RunTopics(run)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("a", "bb", "so", "tree")))
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG.format(run=run, model=tiny_model(folder / "model"), tasks=tasks,
                                             bootstrap=kafka["bootstrap.servers"]))  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "HEADRACE_HOME": str(self.folder / "home"), "PYTHONPATH": str(TESTS / "unit")}
        with open(self.folder / "out", "ab") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "headrace", "run", str(self.config)], stdout=out,
                                            stderr=out, env=environment, stdin=subprocess.DEVNULL)  # fmt: skip

    def role(self, role: str) -> psutil.Process | None:
        assert self.process is not None
        if role == "supervisor":
            return psutil.Process(self.process.pid)
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "start" in words and role in words:
                return child
        return None

    def version(self) -> int:
        try:
            record = last_record(self.kafka, self.topics.name(POLICY), 0)
        except LogError:  # not created yet
            return -1
        event = decode(record.value) if record is not None else None
        return int(getattr(event, "version", -1))

    def wait_for(self, version: int) -> None:
        assert self.process is not None
        end = time.monotonic() + PROGRESS_S
        while self.version() < version:
            assert self.process.poll() is None, f"the run ended:\n{self.said()}"
            assert time.monotonic() < end, f"no version {version} within {PROGRESS_S:g} s:\n{self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        logs = self.folder / "home" / "runs" / self.topics.run / "logs"
        parts = [(self.folder / "out").read_text()[-3000:]]
        parts += [f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in sorted(logs.glob("*.log"))]
        return "\n".join(parts)

    def drain(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(120) == 0, self.said()

    def kill_all(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


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


@pytest.mark.parametrize("role", ["worker", "assembler", "coordinator", "trainer", "supervisor"])
def test_role_killed_at_five_moments_loses_and_doubles_nothing(role: str, running: Running) -> None:
    moments = random.Random(f"{role}-7")
    running.start()
    running.wait_for(1)
    for _ in range(KILLS):
        time.sleep(moments.uniform(0.0, 2.0))
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
    prove(running, 2 * KILLS)
