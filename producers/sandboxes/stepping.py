"""A step in a sandbox that has a shell, of any kind: its time, its limits, and whose doing it is where all is lost.

A kind says how its shell is reached, what its first process is, which limits were met, and how it ended.
"""

from __future__ import annotations

import abc
import signal
import threading
import time

from headrace.schemas.errors import DaemonLost, SandboxFailed, SandboxLost
from headrace.schemas.outcomes import Limit

from . import SandboxSpec, StepResult, ticks_now
from .cgroups import Counters, Group
from .shell import SETTLE_S, Channel, Ended, Kept, Shell, Silent
from .trees import CannotEnd, kill_since

FILE_TOO_LARGE = 128 + signal.SIGXFSZ
ENDS_S = 3.0  # for a sandbox whose first process was killed to be gone


class ShellSandbox(abc.ABC):
    """Implements `Sandbox.step` and `snapshot`; its lock is held while one of them is at work, or the closing of its
    channel."""

    def __init__(self, name: str, spec: SandboxSpec, channel: Channel, group: Group | None) -> None:
        self.id, self.spec = name, spec
        self._channel, self._shell, self._group = channel, Shell(channel), group
        self._counted = group.counters() if group else Counters()
        self._lock = threading.Lock()
        self._killed = self._given_up = False

    # ------------------------------------------------------------------------------------------- what a kind says

    @property
    @abc.abstractmethod
    def _first(self) -> int | None:
        """The first process of its namespace, by this machine's number; None where that can't be told."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """As far as is known here."""

    @abc.abstractmethod
    def _over(self) -> bool:
        """Whether it has ended; whoever knows is asked. Raises DaemonLost."""

    @abc.abstractmethod
    def _snapshot(self, timeout_s: float) -> str: ...

    @abc.abstractmethod
    def _disk_full(self) -> bool: ...

    @abc.abstractmethod
    def _end(self) -> None:
        """Kill all of it, at once."""

    @abc.abstractmethod
    def _ended(self, limits: frozenset[Limit], others: bool) -> SandboxLost:
        """Its channel has closed: why. `others`: the machine itself ran out of memory and killed something in it."""

    def _late(self) -> Ended | None:
        """The step's time is over: its end, where it was only the way from here to there that took long. Raises
        SandboxLost where that way is cut."""
        return None

    # ------------------------------------------------------------------------------------------- steps

    def wait_ready(self, timeout_s: float) -> None:
        """Raises SandboxLost."""
        with self._lock:
            try:
                self._shell.wait_ready(timeout_s)
            except Silent:
                raise SandboxLost(f"{self.id}: its shell didn't answer within {timeout_s:g} s") from None
            except EOFError:
                raise self._lost() from None

    def step(self, command: str, timeout_s: float) -> StepResult:
        if "\0" in command:
            return StepResult(b"a command can't hold a NUL byte\n", 0, 2, False, 0.0)
        with self._lock:
            if self._killed or self._given_up:
                raise self._lost()  # its pipes are closed, and their numbers may be another's
            began, born = time.monotonic(), ticks_now()
            kept, ended = Kept(self.spec.output_bytes), None
            try:
                try:
                    ended = self._shell.run(command, timeout_s, kept)
                except Silent:
                    ended = self._late()
                if ended is None:
                    self._kill_step(born)
                if ended is None or ended.died:
                    self._recover(timed_out=ended is None)
            except EOFError:
                raise self._lost() from None
            limits = self._limits()[0] | ({Limit.TIME} if ended is None else set())
            if ended is not None and ended.code == FILE_TOO_LARGE:
                limits |= {Limit.DISK}
            return StepResult(kept.output, kept.dropped, ended.code if ended else None, ended is None or ended.died,
                              time.monotonic() - began, limits)  # fmt: skip

    def snapshot(self, timeout_s: float) -> str:
        with self._lock:
            if not self.alive:
                raise self._lost()
            try:
                return self._snapshot(timeout_s)
            except DaemonLost:
                raise
            except SandboxFailed as error:
                # None can be made of one that is about to end, and then it is why it ends that counts: else a model
                # could make its failure look like ours.
                deadline = time.monotonic() + ENDS_S
                while not self._over():
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
                raise self._lost() from error

    def _kill_step(self, born: int) -> None:
        first = self._first
        try:
            if first is None:
                raise CannotEnd("it can't be told from here which its processes are")
            kill_since(first, born, SETTLE_S)
        except (CannotEnd, PermissionError) as error:
            self._give_up(f"a step took too long, and the sandbox had to be ended: {error}", timed_out=True)

    def _recover(self, timed_out: bool) -> None:
        try:
            self._shell.recover()
        except Silent:
            self._late()  # raises where it is the way to it that is cut
            self._give_up("its next shell didn't answer", timed_out)

    def _give_up(self, why: str, timed_out: bool) -> None:
        """Both are the command's doing: it took too long, or killed its shell and then kept the next one away."""
        limits = self._limits()[0] | ({Limit.TIME} if timed_out else set())
        self._given_up = True
        self._end()
        raise SandboxLost(f"{self.id}: {why}", limits, from_within=True)

    def _lost(self) -> SandboxLost:
        if self._killed:
            return SandboxLost(f"{self.id}: it was killed")
        if self._given_up:
            return SandboxLost(f"{self.id}: it was given up before")
        return self._ended(*self._limits())

    def _limits(self) -> tuple[frozenset[Limit], bool]:
        """Those met since the last time that this was asked; and whether something was killed for the memory of
        others."""
        found, others = set(), False
        if self._group is not None:
            before, now = self._counted, self._group.counters()
            self._counted = now
            others = now.kills > before.kills and not now.full
            if now.kills > before.kills and now.full:
                found.add(Limit.MEMORY)
            if now.refused > before.refused:
                found.add(Limit.PROCESSES)
        if self._disk_full():
            found.add(Limit.DISK)
        return frozenset(found), others
