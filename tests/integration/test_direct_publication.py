"""Weights that come to a run's roles directly from its trainer, and by the log where that way is cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.node import free_ports
from tests.proxy import Proxy
from tests.running import TESTS, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def direct(text: str) -> list[tuple[int, bool]]:
    """Each version that a role took, and whether all of it came directly."""
    found = re.findall(r"version (\d+): (\d+) of (\d+) chunks came directly", text)
    return [(int(version), taken == chunks) for version, taken, chunks in found]


@contextmanager
def gateway(running: Running, address: str, said: Path) -> Iterator[None]:
    """A process of its own, which gets weights from `address`; what it says is in `said`."""
    config = running.folder / "gateway.toml"
    config.write_text(f'[site]\nslots = 2\nworker_threads = 1\nweights_socket = "{address}"\n[site.gateway]\nport = 0\n'
                      f'[site.kafka]\n"bootstrap.servers" = "{running.kafka["bootstrap.servers"]}"\n')  # fmt: skip
    environment = {**os.environ, "HEADRACE_HOME": str(running.folder / "home"), "PYTHONPATH": str(TESTS / "unit")}
    command = [sys.executable, "-m", "headrace", "start", "gateway", running.topics.run, "--config", str(config),
               "--name", "gw", "--parent", str(os.getpid())]  # fmt: skip
    with open(said, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                                                   env=environment) as process:  # fmt: skip
        try:
            yield
        finally:
            process.kill()


def test_worker_and_gateway_get_weights_directly_and_by_the_log_while_that_way_is_cut(
    tmp_path: Path, kafka: dict[str, Any], run_name: str
) -> None:
    """First the gateway's connection falls silent and stays open; then the trainer is killed."""
    port = free_ports(1)[0][0]
    socket = f'worker_threads = 1\nweights_socket = "127.0.0.1:{port}"'
    running, proxy = Running(tmp_path, kafka, run_name, worker_threads=socket), Proxy(port)
    said = tmp_path / "gateway.log"
    said.touch()

    def worker() -> str:
        logs = running.folder / "home" / "runs" / run_name / "logs"
        return "".join(log.read_text(errors="replace") for log in logs.glob("worker*.log"))

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 900
        while not condition():
            assert running.process is not None and running.process.poll() is None, running.said()
            assert time.monotonic() < end, f"{running.said()}\n{said.read_text()}"
            time.sleep(0.2)

    try:
        running.start()
        until(lambda: running.version() >= 0)
        with gateway(running, f"127.0.0.1:{proxy.port}", said):
            until(lambda: any(whole for _, whole in direct(worker())))
            until(lambda: any(whole for _, whole in direct(said.read_text())))
            proxy.stall()
            silent = running.version() + 1  # what was on its way may have come
            until(lambda: any(version > silent and not whole for version, whole in direct(said.read_text())))
            proxy.flow()
            trainer = running.role("trainer")
            assert trainer is not None
            before, there = len(worker()), len(said.read_text())
            trainer.kill()
            lost, back = "weights come by the log, not directly", "weights come directly from"
            until(lambda: lost in worker()[before:] and lost in said.read_text()[there:])
            until(lambda: back in worker()[before:])
            connected = worker().index(back, before)
            until(lambda: any(whole for _, whole in direct(worker()[connected:])))
            newest = running.version()
            until(lambda: max(map(int, re.findall(r"serving version (\d+)", said.read_text()))) >= newest)
        running.drain()
        ledger = audit(open_run(run_name, kafka).snapshot())
        assert ledger.closes, ledger.failures
    finally:
        running.kill_all()
        proxy.close()
