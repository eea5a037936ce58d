"""The sandbox protocol: what an environment may ask of an isolated machine, and the facts that come back.

This module decides the contract alone. A sandbox is a place with files and one persistent shell, without a network. It
serves one episode and is then killed, never used again. A backend starts sandboxes of one kind and finds those that an
owner left behind who has died. Which commands run, and what their results mean, is the environment's business; how many
sandboxes there are is the pool's.

All methods may be called from any thread; one sandbox takes one step at a time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from headrace.schemas.outcomes import Limit

# By default:
OUTPUT_BYTES = 64 << 10  # of a step: what an agent can read at once
DISK_BYTES = 256 << 20  # that a sandbox may write
FILE_BYTES = 4096
MEMORY_BYTES = 512 << 20
PROCESSES = 256
CPUS = 1.0


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of; sandboxes of equal specs are interchangeable. `base`: what the backend takes as the
    file system below what the sandbox writes, or a snapshot (None: the backend's plain one). `folder`: where its shells
    begin (None: as the base says, else /home/agent). `variables`: of their environment. `fresh`: folders that are empty
    whatever the base has there, and that no snapshot holds. `output_bytes`: kept of a step's output. The rest is what
    all of its processes may have together: `disk_bytes` written (a file counts as `FILE_BYTES` at least),
    `memory_bytes`, `processes` (threads count, and the few that are ours), `cpus` of one core's time."""

    base: str | None = None
    folder: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    fresh: tuple[str, ...] = ()
    output_bytes: int = OUTPUT_BYTES
    disk_bytes: int = DISK_BYTES
    memory_bytes: int = MEMORY_BYTES
    processes: int = PROCESSES
    cpus: float = CPUS


@dataclass(frozen=True, slots=True)
class StepResult:
    """`output`: stdout and stderr as they came, at most the spec's `output_bytes`, the beginning and the end;
    `dropped` bytes between them were left out. `code`: the exit status (128 + n after signal n), None where the step's
    time was over and its processes were killed. `new_shell`: the shell died with this step, so directory and variables
    are those of the start; files stay. `seconds`: wall-clock time of the step. `limits`: those that were met in it."""

    output: bytes
    dropped: int
    code: int | None
    new_shell: bool
    seconds: float
    limits: frozenset[Limit] = frozenset()

    @property
    def timed_out(self) -> bool:
        return self.code is None


class Sandbox(Protocol):
    @property
    def id(self) -> str:
        """Unique among this owner's."""

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def alive(self) -> bool:
        """Whether another step may be tried."""

    def step(self, command: str, timeout_s: float) -> StepResult:
        """Run a command in the persistent shell. When its time is over, the processes that it started are killed, those
        of earlier steps go on, and the sandbox takes the next step. Raises SandboxLost where it is gone, or couldn't
        be brought to order: take another. The error says whose doing that was."""

    def snapshot(self, timeout_s: float) -> str:
        """Its files as they are now, as a base for others (`SandboxSpec.base`), until `Backend.remove` or its owner's
        death. Processes and variables are no part of it. Raises SandboxLost, SandboxFailed."""

    def kill(self) -> None:
        """End every process in it and remove everything of it. May be called twice, and while a step runs (which then
        raises SandboxLost)."""


class Backend(Protocol):
    kind: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The limits of a spec that can't be kept on this machine, each with its reason. Never silently: a pool says
        so at its start."""

    def remove(self, base: str) -> None:
        """A snapshot isn't needed any more. Sandboxes that stand on it may go on or not."""

    def start(self, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        """A sandbox whose shell has answered. Raises SandboxFailed."""

    def sweep(self) -> int:
        """Remove what owners left behind who are no more; how many sandboxes that were. Never touches those of an owner
        that lives."""


# ------------------------------------------------------------------------------------------------- whose it is


@dataclass(frozen=True, slots=True)
class Owner:
    """A process by number and time of birth, since numbers come again, in its namespace. It is written into the label
    of everything that a backend makes, so that a later process can tell what has lost its owner."""

    pid: int
    born: int  # clock ticks since the machine's start
    space: int = -1  # whose numbers they are; -1: this process's own

    def __post_init__(self) -> None:
        if self.space < 0:
            object.__setattr__(self, "space", _space())

    @classmethod
    def myself(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, birth_of(pid) or 0)

    @property
    def alive(self) -> bool:
        """True also where this can't be told from here."""
        return self.space != _space() or birth_of(self.pid) == self.born

    def label(self, sandbox: str) -> str:
        return f"{self.pid}.{self.born}.{self.space}.{sandbox}"

    @classmethod
    def of_label(cls, label: str) -> Owner | None:
        """None where it is no label of ours."""
        *numbers, sandbox = label.split(".")
        if len(numbers) != 3 or not all(map(str.isdecimal, numbers)) or not sandbox:
            return None
        return cls(*map(int, numbers))


@cache
def _space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def birth_of(pid: int) -> int | None:
    """Clock ticks since the machine's start at which a process began; None where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def ticks_now() -> int:
    """On the clock of `birth_of`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
