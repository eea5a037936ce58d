"""The processes of a sandbox as this machine sees them: which belong to a step, and their end.

A sandbox's tree is its namespace's first process, the outer shell as that one's eldest child, below it the shell that
runs the steps; orphans become children of the first. A process belongs to a step if it was born since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SAME_TICK = 1  # a process that was born in the tick of its step, or that before, is taken for one of the step's


class CannotEnd(Exception):
    """Processes are left after all the time, or the tree isn't what it was; the message says which."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `pid` and `born` together are never given twice."""

    pid: int
    parent: int
    born: int  # clock ticks since the machine's start


def processes() -> Iterator[Process]:
    """Every living one."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                yield Process(int(name), int(fields[1]), int(fields[19]))


def child_of(pid: int) -> int | None:
    """Its eldest child."""
    return min(((one.born, one.pid) for one in processes() if one.parent == pid), default=(0, None))[1]


def below(first: int) -> tuple[int, dict[int, Process]]:
    """The outer shell, and every process below it or orphaned to the first. Raises CannotEnd where it is gone."""
    everyone = {one.pid: one for one in processes()}
    children: dict[int, list[int]] = {}
    for one in everyone.values():
        children.setdefault(one.parent, []).append(one.pid)
    # Orphans come later than the outer shell.
    outer = min(children.get(first, ()), key=lambda pid: (everyone[pid].born, pid), default=None)
    if outer is None:
        raise CannotEnd("its shell is gone")
    found, todo = {}, [pid for pid in children[first] if pid != outer] + children.get(outer, [])
    while todo:
        pid = todo.pop()
        found[pid] = everyone[pid]
        todo += children.get(pid, ())
    return outer, found


def send(pids: Iterator[int] | list[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_since(first: int, born: int, timeout_s: float) -> None:
    """Kill what was born since, and the shell of the steps, again and again while they make new ones. Raises CannotEnd
    where that doesn't end, PermissionError where they are somebody else's."""
    deadline, shells = time.monotonic() + timeout_s, None
    while True:
        outer, found = below(first)
        shells = {pid for pid, one in found.items() if one.parent == outer} if shells is None else shells
        # What the outer shell starts meanwhile is the next one, which is idle; its children can only be such.
        left = [pid for pid, one in found.items()
                if pid in shells or (one.born >= born - SAME_TICK and one.parent != outer)]  # fmt: skip
        if not left:
            return
        send(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise CannotEnd("the processes of a step that took too long couldn't all be killed")
        time.sleep(0.002)
