"""What running a plane needs and gives, and how one on the broker is run: processes, a watched topic, a kill."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.broker import Broker
from headrace.streams.log.reader import Reader

from .. import harness
from ..harness import CannotMeasure, Started

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: the load, and a broker for those that need one."""

    broker: Broker
    folder: Path
    path: Path  # of the load
    groups: int
    batch: int  # groups
    tokens: int  # model tokens of the load
    about: str = ""  # the load, in words

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    @property
    def batched(self) -> int:
        """Groups that fill whole batches."""
        return self.groups - self.groups % self.batch


@dataclass(slots=True)
class Ran:
    """What came of it. `arrived`: how often each group is in a batch."""

    wall_s: float
    moved: int  # bytes
    cpu_s: dict[str, float] = field(default_factory=dict)  # the plane's processes
    beside_s: dict[str, float] = field(default_factory=dict)  # broker, framework
    arrived: Counter[str] = field(default_factory=Counter)
    killed: str = ""  # what was, in words

    def lost(self, groups: int) -> int:
        return groups - len(self.arrived)

    def doubled(self) -> int:
        return sum(count > 1 for count in self.arrived.values())


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a plane; `ready`: what it prints once it waits for work."""

    name: str
    argv: tuple[str, ...]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> Started:
        return Started(self.argv, env=self.env)


def module(name: str, *arguments: object, python: str | Path = sys.executable) -> tuple[str, ...]:
    """The command that runs a role of a plane."""
    return (str(python), "-m", f"benchmarks.planes.{name}", *map(str, arguments))


def on_broker(work: Work, processes: Sequence[Process], producer: Process, watched: str,
              groups_of: Callable[[bytes], Sequence[str]], topics: Sequence[str],
              victim: str | None) -> Ran:  # fmt: skip
    """Run processes and a producer until every group is in a record of `watched`. `victim`: the process that is killed
    (-9) when the first batch is there, and started again. Once no batch has come for 20 s the rest is lost."""
    with ExitStack() as stack:
        running = {one.name: stack.enter_context(one.start()) for one in processes}
        for one in processes:
            running[one.name].expect(one.ready)
        made = stack.enter_context(producer.start())
        made.expect(producer.ready)
        reader = stack.enter_context(Reader(harness.kafka_of(work.broker), {(watched, 0): 0}))
        before = {name: process.cpu_s() for name, process in running.items()}
        broker_before = harness.cpu_of(work.broker.pid)
        ran, began = Ran(0.0, 0), time.monotonic()
        made.signal(signal.SIGUSR1)
        heard = began
        while len(ran.arrived) < work.batched:
            for record in reader.poll(100, 0.02):
                ran.arrived.update(groups_of(record.value or b""))
                heard = time.monotonic()
                ran.wall_s = heard - began
            if victim and ran.arrived and not ran.killed:
                running[victim].signal(signal.SIGKILL)
                running[victim].wait(30)
                ran.killed = f"the {victim} after {len(ran.arrived)} groups"
                again = next(one for one in processes if one.name == victim)
                running[victim] = stack.enter_context(again.start())
            quiet = time.monotonic() - heard
            for name, process in running.items():
                if not process.alive():
                    raise CannotMeasure(f"the {name} ended by itself:\n{process.output()[-2000:]}")
            if (victim and ran.killed and quiet > 20 + TIMEOUT_S / 10) or quiet > TIMEOUT_S:
                break
        if victim:  # what comes twice comes late
            for record in reader.poll(100, 2.0):
                ran.arrived.update(groups_of(record.value or b""))
        else:
            ran.cpu_s = {name: process.cpu_s() - before[name] for name, process in running.items()}
        ran.beside_s["broker"] = harness.cpu_of(work.broker.pid) - broker_before
        said: dict[str, Any] = made.wait(TIMEOUT_S).last_json()
        if said.get("left"):
            raise CannotMeasure(f"the producer couldn't send {said['left']} events")
        ran.cpu_s = {producer.name: said["cpu_s"], **ran.cpu_s}
        for process in running.values():
            process.signal(signal.SIGTERM)
        for name, process in running.items():
            if process.wait(60).code not in (0, -signal.SIGTERM):
                raise CannotMeasure(f"the {name} failed:\n{process.output()[-2000:]}")
        ran.moved = sum(harness.log_bytes(work.broker, topic) for topic in topics)
        return ran


def names(value: bytes) -> list[str]:
    """The groups of a batch in JSON."""
    return [group["group"] for group in json.loads(value)["groups"]]
