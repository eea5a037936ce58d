"""What three attached consumers cost a training: one real run, with and without them in turn.

Broker, coordinator, assembler, worker and trainer are the real ones with a tiny model, without a pause, so that nothing
hides what consumers take: all share this machine's cores. A window is the mean time from commit to commit; it begins
once each consumer shows what has just happened. `python -m benchmarks._attached KIND RUN BOOTSTRAP` is one of them:
`events` decodes every record of the run, `groups` joins closed groups with their fates. The third is
`headrace status RUN --follow`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.consumers import open_run
from headrace.schemas.events import Version
from headrace.schemas.topics import POLICY

from .harness import Started

KINDS = ("events", "groups", "status")
THERE = "following"


@dataclass(slots=True)
class Windows:
    """Seconds a version, one window after the other, and the CPU of each consumer as a share of one core."""

    alone: list[float] = field(default_factory=list)
    attached: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def windows(kafka: Mapping[str, Any], pairs: int, versions: int) -> Windows:
    """`alone` and `attached`, one of each a pair; which comes first alternates."""
    from .overlap import rules
    from .streams_load import create

    run, bootstrap = "attached", str(kafka["bootstrap.servers"])
    found = Windows()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        create(kafka, run, rules(folder, 1))
        env = {"HEADRACE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
               "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
        for role in ("assembler", "coordinator", "worker", "trainer"):
            argv = [sys.executable, "-m", "headrace", "start", role, run, "--bootstrap", bootstrap]
            stack.enter_context(Started(argv, env=env))
        commits = (event for _, event in open_run(run, kafka).events(POLICY, kinds=Version, follow=True))
        _window(commits, versions)  # what is slow the first time
        for pair in range(pairs):
            for attached in (False, True) if pair % 2 else (True, False):
                if attached:
                    found.attached.append(_attached(commits, versions, run, bootstrap, found.cpu))
                else:
                    found.alone.append(_window(commits, versions))
    return found


def _attached(commits: Iterator[Any], versions: int, run: str, bootstrap: str, cpu: dict[str, list[float]]) -> float:
    with ExitStack() as stack:
        consumers = {kind: stack.enter_context(Started(_command(kind, run, bootstrap))) for kind in KINDS}
        for kind, consumer in consumers.items():
            consumer.expect("{" if kind == "status" else THERE, 120.0)
        before, began = {kind: one.cpu_s() for kind, one in consumers.items()}, time.monotonic()
        seconds = _window(commits, versions)
        for kind, one in consumers.items():
            cpu[kind].append((one.cpu_s() - before[kind]) / (time.monotonic() - began))
    return seconds


def _command(kind: str, run: str, bootstrap: str) -> list[str | Path]:
    if kind == "status":
        return [sys.executable, "-m", "headrace", "status", run, "--follow", "--json", "--bootstrap", bootstrap]
    return [sys.executable, "-m", "benchmarks._attached", kind, run, bootstrap]


def _window(commits: Iterator[Any], versions: int) -> float:
    """Seconds a version over the next ones."""
    now = time.time() * 1000
    first = next(event for event in commits if event.committed_ms >= now)
    last = [next(commits) for _ in range(versions)][-1]
    return float(last.committed_ms - first.committed_ms) / 1000 / versions


def main(kind: str, name: str, bootstrap: str) -> None:
    run, now, there = open_run(name, {"bootstrap.servers": bootstrap}), time.time() * 1000, False
    if kind == "groups":
        times = (group.closed_ms for group in run.groups(follow=True))
    else:
        times = (record.timestamp_ms for record, _ in run.events(start="latest", follow=True))
    for time_ms in times:
        if not there and time_ms >= now:
            there = True
            print(THERE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
