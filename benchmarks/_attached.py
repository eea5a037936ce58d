"""What three attached consumers cost a training: one real run, with and without them in turn.

Broker, coordinator, assembler, worker and trainer are the real ones with a tiny model, without a pause, so that nothing
hides what consumers take: all share this machine's cores. A window is the mean time from commit to commit; the
consumers have begun to follow before it begins. `python -m benchmarks._attached KIND RUN BOOTSTRAP` is one of them:
`events` decodes every record of the run, `groups` joins closed groups with their fates, `ledger` audits the whole run
again and again, with ten seconds between.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.consumers import audit, open_run
from headrace.schemas.events import Version
from headrace.schemas.topics import POLICY

from .harness import Started

KINDS = ("events", "groups", "ledger")
THERE = "following"
AUDIT_EVERY_S = 10.0


def step_times(kafka: Mapping[str, Any], pairs: int, versions: int) -> dict[str, list[float]]:
    """Seconds a version, `alone` and `attached`, one of each a pair; which comes first alternates."""
    from .overlap import rules
    from .streams_load import create

    run, bootstrap = "attached", str(kafka["bootstrap.servers"])
    found: dict[str, list[float]] = {"alone": [], "attached": []}
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
            for subject in sorted(found, reverse=bool(pair % 2)):
                with ExitStack() as attached:
                    command = [sys.executable, "-m", "benchmarks._attached"]
                    consumers = [attached.enter_context(Started([*command, kind, run, bootstrap]))
                                 for kind in KINDS if subject == "attached"]  # fmt: skip
                    for consumer in consumers:
                        consumer.expect(THERE, 120.0)
                    found[subject].append(_window(commits, versions))
    return found


def _window(commits: Iterator[Any], versions: int) -> float:
    """Seconds a version over the next ones."""
    now = time.time() * 1000
    first = next(event for event in commits if event.committed_ms >= now)
    last = [next(commits) for _ in range(versions)][-1]
    return float(last.committed_ms - first.committed_ms) / 1000 / versions


def main(kind: str, name: str, bootstrap: str) -> None:
    run = open_run(name, {"bootstrap.servers": bootstrap})
    print(THERE, flush=True)
    if kind == "ledger":
        while True:
            audit(run.snapshot())
            time.sleep(AUDIT_EVERY_S)
    elif kind == "groups":
        for _ in run.groups(follow=True):
            pass
    else:
        for _ in run.events(start="latest", follow=True):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:4])
