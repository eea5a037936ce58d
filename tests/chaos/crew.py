"""The processes of a chaos run: who is started, who is started again, and what the closures say meanwhile.

Like `headrace run`, the crew starts a role again when it has died, and takes an error that a restart would repeat for
the end. One thread does all of it, so that a role's absence lasts no longer than its restart takes, and so that every
child dies with this process (the kernel ties a child to the thread that started it).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.roles import FINAL
from headrace.schemas.codec import decode
from headrace.schemas.events import GroupClosed
from headrace.schemas.topics import GROUPS, RunTopics
from headrace.streams.log.reader import Reader, beginning_offsets

ROOT = Path(__file__).parents[2]
RESTART_S = 0.3
TURN_S = 0.05
LAST_WORDS = 12


class CrewFailed(Exception):
    """A process ended for good, or the crew could not go on; the message holds its last words."""


@dataclass(slots=True)
class Child:
    """One process, by its name; it is replaced when it dies, until it is retired."""

    name: str
    role: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    retired: bool = False  # no restart
    done: bool = False  # it ended by itself, with 0
    killed: bool = False  # by a fault: what follows is no death of its own
    ended_at: float | None = None

    def signal(self, signum: int) -> None:
        self.killed |= signum in (signal.SIGKILL, signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
        return "\n".join(f"  {self.name}| {line}" for line in lines)


@dataclass(slots=True)
class Death:
    """A process ended by itself, with an error that a restart should mend."""

    at: float
    name: str
    code: int
    last: str


@dataclass
class Crew:
    """Everything that works on one run. Times are of time.monotonic."""

    kafka: Mapping[str, Any]
    topics: RunTopics
    config: Path  # file with the site settings
    logs: Path
    closures: list[tuple[float, str]] = field(default_factory=list)  # when each was seen, and of which group
    deaths: list[Death] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._children: dict[str, Child] = {}
        self._lock = threading.RLock()
        self._orders: list[tuple[str, str, list[str], bool]] = []
        self._failed: BaseException | None = None
        self._over = threading.Event()
        self.logs.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._work, name="crew")
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for faults

    def start(self, name: str, role: str, *options: str, once: bool = False) -> None:
        """Have a process started; `options` go to its command. `once`: it is not started again when it dies."""
        with self._lock:
            self._orders.append((name, role, list(options), once))

    def child(self, name: str) -> Child:
        with self._lock:
            return self._children[name]

    def names(self, role: str) -> list[str]:
        """Of those that are not retired."""
        with self._lock:
            return [c.name for c in self._children.values() if c.role == role and not c.retired]

    def kill(self, name: str) -> None:
        self.child(name).signal(signal.SIGKILL)

    def retire(self, name: str, signum: int = signal.SIGTERM) -> None:
        """End it; it is not started again."""
        with self._lock:
            child = self._children[name]
            child.retired = True
            child.signal(signal.SIGCONT)
            child.signal(signum)

    def done(self, name: str) -> bool:
        with self._lock:
            return name in self._children and self._children[name].done

    def check(self) -> None:
        """Raises CrewFailed where something went wrong that no restart mends."""
        if self._failed is not None:
            raise CrewFailed(str(self._failed)) from self._failed

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > end:
                return False
            time.sleep(TURN_S)
        return True

    def finish(self, timeout_s: float = 60.0) -> None:
        """Ask everyone to end, workers first and the assembler last, as `headrace run` does."""
        for role in ("worker", "trainer", "coordinator", "assembler"):
            for name in self.names(role):
                self.retire(name)
            self.wait(lambda r=role: not self._alive(r), timeout_s)  # type: ignore[misc]

    def close(self) -> None:
        """Kill whoever is left."""
        self._over.set()
        self._thread.join()

    def _alive(self, role: str) -> bool:
        with self._lock:
            return any(c.role == role and c.process.poll() is None for c in self._children.values())

    # ------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            groups = self.topics.name(GROUPS)
            positions = {(groups, p): at for p, at in beginning_offsets(self.kafka, groups).items()}
            with Reader(self.kafka, positions) as reader:
                while not self._over.is_set():
                    self._tend()
                    for record in reader.poll(500, TURN_S):
                        event = decode(record.value)
                        if isinstance(event, GroupClosed):
                            self.closures.append((time.monotonic(), event.group))
        except BaseException as error:
            self._failed = error
        while not self._over.wait(TURN_S):  # children die with the thread that started them: it outlives the failure
            pass
        with self._lock:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            for child in self._children.values():
                child.process.wait()

    def _tend(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, []
            for name, role, options, once in orders:
                command = self._command(name, role, options)
                self._children[name] = Child(name, role, command, self.logs / f"{name}.log",
                                             self._spawn(name, command), retired=once)  # fmt: skip
            for child in self._children.values():
                code = child.process.poll()
                if code is None or child.done:
                    continue
                if child.ended_at is None:
                    self._ended(child, code)
                elif not child.retired and time.monotonic() - child.ended_at >= RESTART_S:
                    child.process, child.ended_at = self._spawn(child.name, child.command), None

    def _ended(self, child: Child, code: int) -> None:
        child.ended_at = time.monotonic()
        if code == FINAL:
            raise CrewFailed(f"{child.name} ended for good:\n{child.last_words()}")
        if code == 0 and not child.killed:
            child.done = True
        elif not child.killed:
            words = child.last_words().splitlines()
            self.deaths.append(Death(child.ended_at, child.name, code, words[-1] if words else ""))
        child.killed = False

    def _command(self, name: str, role: str, options: list[str]) -> list[str]:
        module = ["headrace", "start", role] if role in ("assembler", "coordinator") else [f"tests.chaos.{role}"]
        named = ["--name", name] if role == "worker" else []
        return [sys.executable, "-m", *module, self.topics.run, "--config", str(self.config), "--parent",
                str(os.getpid()), *named, *options]  # fmt: skip

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                                    start_new_session=True)  # fmt: skip
