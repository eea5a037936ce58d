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
from pathlib import Path
from typing import Protocol

OUTPUT_BYTES = 64 << 10  # of a step, by default: what an agent can read at once
DISK_BYTES = 256 << 20  # that a sandbox may write, by default


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of; sandboxes of equal specs are interchangeable. `base`: what the backend takes as the
    file system below what the sandbox writes (None: the backend's plain one). `output_bytes`: kept of a step's output;
    `disk_bytes`: that it may write in all."""

    base: str | None = None
    output_bytes: int = OUTPUT_BYTES
    disk_bytes: int = DISK_BYTES


@dataclass(frozen=True, slots=True)
class StepResult:
    """`output`: stdout and stderr as they came, at most the spec's `output_bytes`, the beginning and the end;
    `dropped` bytes between them were left out. `code`: the exit status (128 + n after signal n), None where the step's
    time was over and its processes were killed. `new_shell`: the shell died with this step, so directory and variables
    are those of the start; files stay. `seconds`: wall-clock time of the step."""

    output: bytes
    dropped: int
    code: int | None
    new_shell: bool
    seconds: float

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
        be brought to order: take another."""

    def kill(self) -> None:
        """End every process in it and remove everything of it. May be called twice, and while a step runs (which then
        raises SandboxLost)."""


class Backend(Protocol):
    kind: str

    def start(self, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        """A sandbox whose shell has answered. Raises SandboxFailed."""

    def sweep(self) -> int:
        """Remove what owners left behind who are no more; how many sandboxes that were. Never touches those of an owner
        that lives."""


# ------------------------------------------------------------------------------------------------- whose it is


@dataclass(frozen=True, slots=True)
class Owner:
    """A process by number and time of birth, since numbers come again. It is written into the label of everything that
    a backend makes, so that a later process can tell what has lost its owner."""

    pid: int
    born: int  # clock ticks since the machine's start

    @classmethod
    def myself(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, birth_of(pid) or 0)

    @property
    def alive(self) -> bool:
        return birth_of(self.pid) == self.born

    def label(self, sandbox: str) -> str:
        return f"{self.pid}.{self.born}.{sandbox}"

    @classmethod
    def of_label(cls, label: str) -> Owner | None:
        """None where it is no label of ours."""
        pid, _, rest = label.partition(".")
        born, _, sandbox = rest.partition(".")
        return cls(int(pid), int(born)) if pid.isdecimal() and born.isdecimal() and sandbox else None


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
