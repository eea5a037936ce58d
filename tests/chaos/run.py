"""One chaos run: a calm run, the same run under faults, and the comparison of what the two decided."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from headrace.broker import start_broker
from headrace.create import create_run
from headrace.schemas.errors import HeadraceError
from headrace.schemas.topics import ALL_TOPICS, RunTopics
from headrace.streams.log.reader import Reader

from . import load
from .clock import Clocks
from .crew import ROOT, Crew, CrewFailed
from .faults import KINDS, TRANSACTION_TIMEOUT_S, Stage
from .outcome import Outcome, differences, doubled, lost, outcome

WORKERS = 2
# A copy that no longer follows leaves the in-sync set, and stops holding up writers, after 10 s and not after 30.
BROKER = {"replica.lag.time.max.ms": 10_000}
PACE_S = 2.0  # of the trainer under faults
GROUPS_PER_FAULT = 20
BRAKE = 4  # times slower where the faults so far have used up their groups: the load must last until the last of them,
# however long a fault takes on this machine
PROGRESS_S = 120.0  # a run that gives no closure for so long after a fault has failed
AFTER = 4  # closures that count as going on, after a fault has been undone and
WATCHED_S = 3.0  # so much time has passed: what the fault holds up may show a moment later
DRAIN_S = 900.0

Say = Callable[[str], None]


@dataclass
class Done:
    """A fault that happened. Times are of time.monotonic."""

    number: int
    kind: str
    what: str
    began: float
    ended: float  # undone: everyone is there again
    stall_s: float = 0.0  # the longest time without a closure, from its beginning to that of the next
    deaths: int = 0  # of roles, by themselves


@dataclass
class Result:
    seed: int
    faults: list[Done] = field(default_factory=list)
    groups: int = 0
    attempts: int = 0  # counted slots that were tried more than once
    seconds: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)  # what does not close
    deaths: list[str] = field(default_factory=list)  # of roles by themselves, with their last words
    failed: str | None = None
    calm_stall_s: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.failed or self.lost or self.doubled or self.different or self.ledger)


def chaos(home: Path, kinds: list[str], result: Result, say: Say) -> None:
    """Both runs on a new broker of three nodes in `home`; the nodes and the roles die with this process. What happens
    is noted in `result` as it happens."""
    clocks = Clocks(home)
    os.environ.update(clocks.environment)  # of everything that is started from here on
    say("starting three brokers")
    broker = start_broker(home / "broker", nodes=3, owner=True, config=BROKER)
    try:
        config = home / "site.toml"
        config.write_text(f'[site]\n[site.kafka]\n"bootstrap.servers" = "{broker.bootstrap}"\n'
                          f'"transaction.timeout.ms" = {TRANSACTION_TIMEOUT_S * 1000}\n')  # fmt: skip
        kafka = {"bootstrap.servers": broker.bootstrap}
        tasks = home / "tasks.jsonl"
        groups = GROUPS_PER_FAULT * len(kinds) + 50
        load.write_tasks(tasks, groups)
        pace = home / "pace"
        found: list[Outcome] = []
        for name in ("calm", "chaos"):
            topics = RunTopics(name)
            create_run(kafka, topics, load.settings(tasks, groups, result.seed))
            began = time.monotonic()
            crew = Crew(kafka, topics, config, home / "logs" / name)
            stage = Stage(crew, broker, clocks, kafka, topics, random.Random(result.seed))
            try:
                _set_pace(pace, 0.0 if name == "calm" else PACE_S)
                _start(crew, pace)
                if name == "chaos":
                    _faults(stage, kinds, pace, result, say)
                _drain(crew, pace, groups)
            except (CrewFailed, HeadraceError) as error:
                result.failed = f"run {name}: {error}{_stuck(kafka, topics)}"
                return
            finally:
                crew.close()
                if name == "chaos":
                    _attribute(result, crew)
            result.seconds[name] = time.monotonic() - began
            if name == "calm":
                result.calm_stall_s = longest_gap([at for at, _ in crew.closures])
            say(f"run {name}: {len(crew.closures)} groups closed in {result.seconds[name]:.0f} s; its ledger is proved")
            result.ledger += _ledger(name, config)
            found.append(outcome(kafka, topics))
        calm, disturbed = found
        result.groups, result.attempts = len(disturbed.groups), disturbed.attempts
        result.lost, result.doubled = lost(calm, disturbed), doubled(disturbed)
        result.different = differences(calm, disturbed)
        if len(calm.groups) != groups:
            result.failed = f"the calm run closed {len(calm.groups)} of {groups} groups"
    finally:
        broker.stop()


def _start(crew: Crew, pace: Path) -> None:
    crew.start("assembler", "assembler")
    crew.start("coordinator", "coordinator")
    crew.start("trainer", "trainer", "--pace", str(pace))
    for number in range(WORKERS):
        crew.start(f"worker-{number}", "worker")
    if not crew.wait(lambda: bool(crew.closures), PROGRESS_S):
        raise CrewFailed(f"no closure within {PROGRESS_S:g} s of the start")


def _faults(stage: Stage, kinds: list[str], pace: Path, result: Result, say: Say) -> None:
    crew = stage.crew
    for number, kind in enumerate(kinds, 1):
        stage.pause(0.0, 1.0)
        done = Done(number, kind, "", time.monotonic(), 0.0)
        result.faults.append(done)
        _set_pace(pace, PACE_S, until=load.versions_of(GROUPS_PER_FAULT * number))
        done.what = KINDS[kind](stage)
        done.ended = time.monotonic()
        time.sleep(WATCHED_S)
        crew.check()
        enough = len(crew.closures) + AFTER
        if not crew.wait(lambda n=enough: len(crew.closures) >= n, PROGRESS_S):  # type: ignore[misc]
            if crew.done("coordinator"):
                raise CrewFailed(f"the load was used up by fault {number} of {len(kinds)}, so that nothing could be "
                                 "seen to go on: raise GROUPS_PER_FAULT or PACE_S")  # fmt: skip
            raise CrewFailed(f"no progress for {PROGRESS_S:g} s after fault {number} ({kind}: {done.what})")
        say(f"{number:4}/{len(kinds)}  {kind:24} {done.what:52} {time.monotonic() - done.began:5.1f} s  "
            f"{len(crew.closures)} closed")  # fmt: skip

def _set_pace(pace: Path, seconds: float, until: int | None = None) -> None:
    """The trainer takes so long for a version, and `BRAKE` times as long from version `until` on."""
    fresh = pace.with_suffix(".new")
    fresh.write_text(json.dumps([seconds, seconds * BRAKE, until]))
    fresh.replace(pace)


def _drain(crew: Crew, pace: Path, groups: int) -> None:
    """Let it come to its end by itself, at full speed."""
    _set_pace(pace, 0.0)
    if not crew.wait(lambda: crew.done("coordinator"), DRAIN_S):
        raise CrewFailed(f"{len(crew.closures)} of {groups} groups closed, and the coordinator has not ended")
    crew.finish()


def _attribute(result: Result, crew: Crew) -> None:
    """To each fault the longest time without a closure and the deaths that followed it."""
    times = [at for at, _ in crew.closures]
    for i, fault in enumerate(result.faults):
        fault.ended = fault.ended or time.monotonic()
        end = result.faults[i + 1].began if i + 1 < len(result.faults) else fault.ended + WATCHED_S
        before = [at for at in times if at < fault.began][-1:]
        fault.stall_s = longest_gap([*before, *(at for at in times if fault.began <= at < end)])
        fault.deaths = sum(fault.began <= death.at < end for death in crew.deaths)
    result.deaths = [f"{death.name}, code {death.code}: {death.last}" for death in crew.deaths]


def longest_gap(times: list[float]) -> float:
    return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)


def _ledger(name: str, config: Path) -> list[str]:
    command = [sys.executable, "-m", "headrace", "ledger", name, "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DRAIN_S)
    if done.returncode == 0 and json.loads(done.stdout)["closes"]:
        return []
    return [f"headrace ledger {name}: exit code {done.returncode}", *(done.stderr or done.stdout).splitlines()[-20:]]


def _stuck(kafka: Mapping[str, Any], topics: RunTopics) -> str:
    """Partitions that a read-committed reader can't read to the end: an open or hanging transaction."""
    lines = []
    try:
        with Reader(kafka) as stable, Reader(kafka, isolation="read_uncommitted") as all_:
            for topic in ALL_TOPICS:
                name = topics.name(topic)
                for partition in stable.partitions(name):
                    seen, high = stable.bounds(name, partition)[1], all_.bounds(name, partition)[1]
                    if seen < high:
                        lines.append(f"\n  {name}[{partition}]: readable to {seen}, written to {high}")
    except (KafkaException, HeadraceError) as error:
        lines.append(f"\n  (where it stands can't be told: {error})")
    return "".join(lines)
