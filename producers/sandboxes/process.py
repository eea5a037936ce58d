"""The kind `process`: a shell in namespaces of its own (bubblewrap), over an overlay that lives in memory.

What isolates: every namespace is new (no network but an unconnected loopback, no foreign process in sight), no
capability, an environment of its own. The file system is `base` (a folder with a root file system and bash; without one
the machine's /usr, read-only) under an overlay whose writable layer is a tmpfs of bounded size. Overlay and tmpfs are
mounted in the sandbox's own mount namespace: they vanish with its last process, so a crash leaves no mount and no file.
Memory (with what it has written, since that lies in memory), processes and CPU are limited by a control group.

The processes end with their owner (a parent-death signal, which the kernel binds to the thread that started them: that
thread must live as long as the sandbox). What slips through, because the owner died while it was being started, carries
its label on the command line and is found by `sweep`; so are control groups and snapshots, by their folders' names.

Whose doing an end is: nothing in the sandbox can reach the process that keeps it, so a signal to that one came from
outside; where it ends by itself, what ran in it killed its shell.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

from headrace.schemas.errors import SandboxFailed, SandboxLost
from headrace.schemas.outcomes import Limit

from . import FILE_BYTES, Owner, SandboxSpec
from .cgroups import Group, Groups
from .layers import Layers
from .shell import ARGV, OUTPUT, SETTLE_S, STATUS
from .stepping import ShellSandbox
from .trees import CannotEnd, below, child_of, send

VARIABLE = "HEADRACE_SANDBOX"
NAME = VARIABLE.encode()
READ_BYTES = 64 << 10

# Outside of it, in a mount namespace that only the sandbox will have: $1 mount point, $2 bytes, $3 files, $4 layers
# with a colon after each, $5 base or nothing, $6 number of control groups, then their doors.
_MOUNT = r"""
set -e
at=$1 bytes=$2 files=$3 layers=$4 base=$5 doors=$6
shift 6
for ((; doors; doors--)); do echo $$ > "$1"; shift; done
mount -t tmpfs -o size="$bytes",nr_inodes="$files",mode=755 tmpfs "$at"
mkdir "$at/upper" "$at/work" "$at/root" "$at/plain"
mkdir -p "$at/plain/etc" "$at/plain/usr" "$at/plain/root" "$at/plain/var" "$at/plain/home/agent"
for name in bin lib lib64 sbin; do if [ -L "/$name" ]; then ln -s "usr/$name" "$at/plain/$name"; fi; done
mount -t overlay overlay -o lowerdir="$layers${base:-$at/plain}",upperdir="$at/upper",workdir="$at/work" "$at/root"
exec "$@"
"""


class ProcessBackend:
    """`folder` gets an empty folder, the mount point of all sandboxes, each of which sees only its own; and one for
    snapshots. Raises SandboxFailed where this machine lacks a tool; the message says which."""

    kind = "process"

    def __init__(self, folder: Path | None = None) -> None:
        for tool in ("bwrap", "unshare", "mount", "bash"):
            if shutil.which(tool) is None:
                raise SandboxFailed(f"sandboxes of kind process need `{tool}`, which isn't installed here (Debian: "
                                    "apt-get install bubblewrap)")  # fmt: skip
        self._owner = Owner.myself()
        folder = folder or Path(tempfile.gettempdir())
        self._mount_point, self.snapshots = folder / "headrace-sandbox", folder / "headrace-snapshots"
        self._layers = Layers(self.snapshots)
        self._mount_point.mkdir(parents=True, exist_ok=True)
        self._groups = Groups()

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(self._groups.missing)

    def start(self, spec: SandboxSpec, timeout_s: float) -> ProcessSandbox:
        name = uuid.uuid4().hex[:12]
        label = self._owner.label(name)
        layers, base = self._layers.below(spec.base)
        if base is not None and not (Path(base) / "usr/bin/bash").exists():
            raise SandboxFailed(f"base {base}: no root file system with /usr/bin/bash")
        group = self._groups.create(label, spec)
        try:
            sandbox = ProcessSandbox(name, spec, self._command(spec, label, layers, base, group), group, self)
        except OSError:
            group.remove()
            raise
        try:
            sandbox.wait_ready(timeout_s)
        except SandboxLost as error:
            sandbox.kill()
            raise SandboxFailed(f"a sandbox of kind process didn't start: {error}") from error
        return sandbox

    def _command(self, spec: SandboxSpec, label: str, layers: str = "", base: str | None = None,
                 group: Group | None = None) -> list[str]:  # fmt: skip
        at, doors = str(self._mount_point), [str(door) for door in group.doors] if group else []
        # As root one more user namespace would only get in the way of the mounts; anyone else needs it for them.
        outer = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        system = [] if base is not None else ["--ro-bind", "/usr", "/usr"]
        return [*outer, "bash", "-c", _MOUNT, "mount", at, str(spec.disk_bytes), str(spec.disk_bytes // FILE_BYTES),
                layers, base or "", str(len(doors)), *doors,
                "bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
                "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv",
                "--setenv", VARIABLE, label, "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin",
                "--setenv", "HOME", "/home/agent", "--setenv", "LANG", "C.UTF-8",
                *(word for name, value in spec.variables for word in ("--setenv", name, value)),
                "--bind", f"{at}/root", "/", *system, "--proc", "/proc", "--dev", "/dev",
                "--dir", "/tmp", "--dir", "/home/agent", *(word for path in spec.fresh for word in ("--tmpfs", path)),
                "--chdir", spec.folder or "/home/agent", *ARGV]  # fmt: skip

    def remove(self, base: str) -> None:
        self._layers.remove(base)

    def sweep(self) -> int:
        found = set()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            label = words[words.index(NAME) + 1].decode(errors="replace") if NAME in words[:-1] else ""
            owner = Owner.of_label(label)
            if owner is not None and not owner.alive:
                with contextlib.suppress(OSError):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found.add(label)
        return len(found | self._groups.sweep() | self._layers.sweep())


class ProcessSandbox(ShellSandbox):
    """A process tree under bubblewrap, in a control group of its own."""

    def __init__(self, name: str, spec: SandboxSpec, command: list[str], group: Group, backend: ProcessBackend) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/")  # fmt: skip
        super().__init__(name, spec, Pipes(self._process), group)
        self._backend = backend
        self._root: int | None = None  # a descriptor of its file system

    @property
    def alive(self) -> bool:
        return not self._killed and not self._given_up and self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        super().wait_ready(timeout_s)
        self._root = os.open(self._upper, os.O_PATH | os.O_DIRECTORY)

    @property
    def _upper(self) -> Path:
        """What it has written, through the mount namespace of the process that keeps it."""
        return Path(f"/proc/{self._process.pid}/root", *self._backend._mount_point.absolute().parts[1:], "upper")

    def _over(self) -> bool:
        return self._process.poll() is not None

    def _snapshot(self, timeout_s: float) -> str:
        first = self._first
        if first is None:
            raise SandboxFailed(f"{self.id}: it has no process any more")
        try:
            pids = list(below(first)[1])
            send(pids, signal.SIGSTOP)
        except CannotEnd as error:
            raise SandboxFailed(f"{self.id}: {error}") from error
        try:
            return self._backend._layers.add(self._backend._owner.label(uuid.uuid4().hex[:12]), self._upper,
                                             self.spec.base, timeout_s)  # fmt: skip
        finally:
            with contextlib.suppress(CannotEnd):
                send(pids, signal.SIGCONT)

    def kill(self) -> None:
        self._killed = True
        self._end()
        with self._lock:  # a step that runs has seen its pipes close
            self._channel.close()
            if self._root is not None:
                os.close(self._root)
                self._root = None
            if self._group is not None:
                self._group.remove()

    # ------------------------------------------------------------------------------------------- this kind

    @property
    def _first(self) -> int | None:
        return child_of(self._process.pid)

    def _disk_full(self) -> bool:
        if self._root is None:
            return False
        left = os.fstatvfs(self._root)
        return left.f_bavail == 0 or left.f_favail == 0

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()  # the namespace's first process dies with it, and everything in it with that
        self._process.wait()

    def _ended(self, limits: frozenset[Limit], others: bool) -> SandboxLost:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(SETTLE_S)
        return SandboxLost(f"{self.id}: it ended with {code} {self._shell.last_words}".rstrip(), limits,
                           from_within=code is not None and code >= 0 and not others)  # fmt: skip


class Pipes:
    """A channel over the three pipes of a process; its stderr is the status."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._files = (process.stdin, process.stdout, process.stderr)
        self._input, *outputs = (file.fileno() for file in self._files)
        self._streams = dict(zip(outputs, (OUTPUT, STATUS), strict=True))
        for file in self._files:
            os.set_blocking(file.fileno(), False)
        self._poll = select.poll()
        for fd in self._streams:
            self._poll.register(fd, select.POLLIN)

    def exchange(self, data: bytes, timeout_s: float) -> tuple[int, list[tuple[int, bytes]]]:
        if data:
            self._poll.register(self._input, select.POLLOUT)
        taken, came = 0, []
        for fd, _ in self._poll.poll(max(0, timeout_s) * 1000):
            try:
                if fd == self._input:
                    taken = os.write(fd, data)
                    continue
                said = os.read(fd, READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError from error
            if said:
                came.append((self._streams[fd], said))
            elif self._streams[fd] == OUTPUT:
                self._poll.unregister(fd)  # everyone closed it; the status still comes
            else:
                raise EOFError
        if data:
            self._poll.unregister(self._input)
        return taken, came

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
