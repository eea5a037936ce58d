"""Limits of memory, processes and CPU for a group of processes: control groups, version 1 or 2, whichever is there.

A group lies below this process's own, so that limits from outside hold for it too, in a folder that `sweep` knows by
name; its own name is its owner's label. Where no group may be made (no root, nothing delegated, a hierarchy that is
mounted read-only), `Groups.missing` says which limits that leaves out, and why: a pool tells the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import SandboxFailed

from . import Owner, SandboxSpec
from .trees import send

FOLDER = "headrace-sandboxes"
CONTROLLERS = {"memory": "memory", "pids": "number of processes", "cpu": "CPU"}
PERIOD_US = 100_000  # of the CPU's quota: the kernel's default
SLACK_BYTES = 1 << 20  # a full group lacks what the kernel charges at once
GONE_S = 2.0  # a group whose last process has just ended is busy for some milliseconds


@dataclass(frozen=True, slots=True)
class Place:
    """Where a controller's groups are made: `parent/FOLDER/label`."""

    parent: Path
    unified: bool  # version 2


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the group was made. `kills`: its processes that were killed for memory; `full`: whether it has met its
    memory limit; `refused`: forks."""

    kills: int = 0
    full: bool = False
    refused: int = 0


class Groups:
    """`proc`: the folder of this process, as the kernel describes it."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._mounts = list(_mounts(proc))
        self.places: dict[str, Place] = {}
        self.missing: list[str] = []
        for controller, words in CONTROLLERS.items():
            try:
                self.places[controller] = self._place(controller, _own(proc))
            except OSError as error:
                self.missing.append(f"{words} ({error})")

    def _place(self, controller: str, own: Mapping[str, str]) -> Place:
        """Raises OSError."""
        last = OSError(f"no mounted hierarchy of control groups has the controller {controller}")
        for mount, controllers in self._mounts:
            unified = controllers is None
            if controllers is not None and controller not in controllers:
                continue
            below = mount / own.get("" if unified else controller, "/").lstrip("/")
            while not below.is_dir():  # seen through another namespace
                below = below.parent
            # Version 2 gives no controller to the children of a group that has processes: try upwards.
            for parent in [below, *below.parents]:
                if not parent.is_relative_to(mount):
                    break
                try:
                    _usable(parent, controller, unified)
                    return Place(parent, unified)
                except OSError as error:
                    last = error
        raise last

    def create(self, label: str, spec: SandboxSpec) -> Group:
        """Raises SandboxFailed."""
        folders: dict[str, Path] = {}
        try:
            for controller, place in self.places.items():
                folder = place.parent / FOLDER / label
                for _ in range(3):  # whoever removes the last group removes the folder above
                    with contextlib.suppress(FileNotFoundError):
                        _enable(folder, place)
                        break
                folders[controller] = folder
                _limit(folder, controller, place.unified, spec)
        except OSError as error:
            Group(folders).remove()
            raise SandboxFailed(f"no control group for a sandbox: {error}") from error
        return Group(folders)

    def sweep(self) -> set[str]:
        """Remove the groups, with all processes in them, of owners that are no more; their labels."""
        found: dict[str, list[Path]] = {}
        for mount, _ in self._mounts:
            for folder, below, _ in os.walk(mount):
                if os.path.basename(folder) == FOLDER:
                    for label in below:
                        owner = Owner.of_label(label)
                        if owner is not None and not owner.alive:
                            found.setdefault(label, []).append(Path(folder, label))
                    below.clear()
        for folders in found.values():
            Group({str(i): folder for i, folder in enumerate(folders)}).remove()
        return set(found)


class Group:
    """Of one sandbox: a folder in each hierarchy."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = dict(folders)
        self._open: dict[Path, int | None] = {}

    @classmethod
    def of(cls, pid: int, proc: Path = Path("/proc/self")) -> Group:
        """That of a process, which somebody else made."""
        own = _own(Path(f"/proc/{pid}"))
        folders = {}
        for mount, controllers in _mounts(proc):
            for controller in CONTROLLERS:
                if controllers is None or controller in controllers:
                    folder = mount / own.get(controller if controllers else "", "/").lstrip("/")
                    if (folder / "cgroup.procs").exists() and (controllers or _has(folder, controller)):
                        folders[controller] = folder
        return cls(folders)

    @property
    def doors(self) -> list[Path]:
        """Where a process writes its number to enter."""
        return sorted({folder / "cgroup.procs" for folder in self._folders.values()})

    def counters(self) -> Counters:
        memory, pids = self._folders.get("memory"), self._folders.get("pids")
        kills, full = 0, False
        if memory is not None:
            events = self._pairs(memory / "memory.events")
            if events:
                kills, full = events.get("oom_kill", 0), events.get("oom", 0) > 0
            else:
                kills = self._pairs(memory / "memory.oom_control").get("oom_kill", 0)
                if kills:  # version 1 counts failures in some kernels only
                    most, limit = (self._number(memory / name) for name in
                                   ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))  # fmt: skip
                    full = most + SLACK_BYTES >= limit
        return Counters(kills, full, self._pairs(pids / "pids.events").get("max", 0) if pids else 0)

    def close(self) -> None:
        """Its files; they are opened once, since they are read at every step."""
        for fd in self._open.values():
            if fd is not None:
                os.close(fd)
        self._open.clear()

    def _read(self, path: Path) -> bytes:
        if path not in self._open:
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError:
                self._open[path] = None
        fd = self._open[path]
        try:
            return b"" if fd is None else os.pread(fd, 4096, 0)
        except OSError:  # the group is gone
            return b""

    def _number(self, path: Path) -> int:
        said = self._read(path).strip()
        return int(said) if said.isdigit() else 0

    def _pairs(self, path: Path) -> dict[str, int]:
        lines = (line.split() for line in self._read(path).decode().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}

    def remove(self) -> None:
        """With all that runs in it. What can't be removed in a moment is left to the next sweep."""
        self.close()
        deadline = time.monotonic() + GONE_S
        for folder in set(self._folders.values()):
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    with contextlib.suppress(OSError, ValueError):
                        send([int(pid) for pid in (folder / "cgroup.procs").read_text().split()], signal.SIGKILL)
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.001)
            with contextlib.suppress(OSError):  # others are in it
                folder.parent.rmdir()


# ------------------------------------------------------------------------------------------------- the files


def _mounts(proc: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Each mounted hierarchy with its controllers; None: version 2, whose groups say."""
    for line in (proc / "mounts").read_text().splitlines():
        _, where, kind, options = line.split(" ")[:4]
        if kind == "cgroup2":
            yield Path(where), None
        elif kind == "cgroup":
            yield Path(where), set(options.split(","))


def _own(proc: Path) -> dict[str, str]:
    """The path of a process's group by controller; "" is version 2's."""
    found = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _has(folder: Path, controller: str) -> bool:
    with contextlib.suppress(OSError):
        return controller in (folder / "cgroup.controllers").read_text().split()
    return False


def _usable(parent: Path, controller: str, unified: bool) -> None:
    """Try it. Raises OSError."""
    trial = parent / FOLDER / f"trial-{os.getpid()}-{controller}"
    try:
        _enable(trial, Place(parent, unified), controller)
        if unified and not _has(trial, controller):
            raise OSError(f"{parent} gives its groups no controller {controller}")
        if not os.access(trial / "cgroup.procs", os.W_OK):
            raise OSError(f"{trial / 'cgroup.procs'} isn't writable")
    finally:
        for folder in (trial, trial.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _enable(folder: Path, place: Place, *controllers: str) -> None:
    """Make the group, with the controllers. Raises OSError."""
    folder.parent.mkdir(exist_ok=True)
    for controller in (controllers or tuple(CONTROLLERS)) if place.unified else ():
        if _has(place.parent, controller):
            for above in (place.parent, folder.parent):
                (above / "cgroup.subtree_control").write_text(f"+{controller}")
    folder.mkdir(exist_ok=True)


def _limit(folder: Path, controller: str, unified: bool, spec: SandboxSpec) -> None:
    quota = round(spec.cpus * PERIOD_US)
    if controller == "memory":
        (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(spec.memory_bytes))
        swap, none = ("memory.swap.max", "0") if unified else ("memory.memsw.limit_in_bytes", str(spec.memory_bytes))
        if (folder / swap).exists():
            (folder / swap).write_text(none)
    elif controller == "pids":
        (folder / "pids.max").write_text(str(spec.processes))
    elif unified:
        (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
