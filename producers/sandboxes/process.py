"""The kind `process`: a shell in namespaces of its own (bubblewrap), over an overlay that lives in memory.

What isolates: every namespace is new (no network but an unconnected loopback, no foreign process in sight), no
capability, an environment of its own. The file system is `base` (a folder with a root file system and bash; without one
the machine's /usr, read-only) under an overlay whose writable layer is a tmpfs of bounded size. Overlay and tmpfs are
mounted in the sandbox's own mount namespace: they vanish with its last process, so a crash leaves no mount and no file.

The processes end with their owner (a parent-death signal, which the kernel binds to the thread that started them: that
thread must live as long as the sandbox). What slips through, because the owner died while it was being started, carries
its label on the command line and is found by `sweep`.

An outer shell restarts the one that runs the steps when it dies: a command may `exit`, `exec` or kill its shell. (One
that kills every process it can see loses its sandbox.) A step's end comes over a pipe that its command doesn't have, so
output can't forge it by accident; a command that wants to can lie about its own exit status, and about nothing else.
Not limited yet: memory and number of processes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import SandboxFailed, SandboxLost

from . import Owner, SandboxSpec, StepResult, ticks_now

VARIABLE = "HEADRACE_SANDBOX"
NAME = VARIABLE.encode()
SETTLE_S = 1.0  # for killed processes to be gone and a new shell to answer; then the sandbox is given up
READ_BYTES = 64 << 10
SAME_TICK = 1  # a process that was born in the tick of its step, or that before, is taken for one of the step's

# In the sandbox. Descriptor 3 is the status pipe: "S n" a step's exit status, "X n" the shell died with it, "R" a shell
# is ready. Commands end with a NUL byte; at the end of all commands it waits to be killed.
_INNER = r"""
printf 'R\n' >&3
while IFS= read -r -d '' __command; do eval "$__command" </dev/null 3>&-; printf 'S %d\n' "$?" >&3; done
exec sleep infinity 3>&-
"""
_OUTER = r"""
exec 3>&2 2>/dev/null
trap '' INT TERM HUP QUIT
while :; do bash --noprofile --norc -c "$0" 2>&1; printf 'X %d\n' "$?" >&3; done
"""
# Outside of it, in a mount namespace that only the sandbox will have: $1 mount point, $2 bytes, $3 base or nothing.
_MOUNT = r"""
set -e
mount -t tmpfs -o size="$2",mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root" "$1/plain"
mkdir -p "$1/plain/etc" "$1/plain/usr" "$1/plain/root" "$1/plain/var" "$1/plain/home/agent"
mount -t overlay overlay -o lowerdir="${3:-$1/plain}",upperdir="$1/upper",workdir="$1/work" "$1/root"
shift 3
exec "$@"
"""


class ProcessBackend:
    """`folder` gets one empty folder, the mount point of all sandboxes, each of which sees only its own. Raises
    SandboxFailed where this machine lacks a tool; the message says which."""

    kind = "process"

    def __init__(self, folder: Path | None = None) -> None:
        for tool in ("bwrap", "unshare", "mount", "bash"):
            if shutil.which(tool) is None:
                raise SandboxFailed(f"sandboxes of kind process need `{tool}`, which isn't installed here (Debian: "
                                    "apt-get install bubblewrap)")  # fmt: skip
        self._owner = Owner.myself()
        self._mount_point = (folder or Path(tempfile.gettempdir())) / "headrace-sandbox"
        self._mount_point.mkdir(parents=True, exist_ok=True)

    def start(self, spec: SandboxSpec, timeout_s: float) -> ProcessSandbox:
        if spec.base is not None and not (Path(spec.base) / "usr/bin/bash").exists():
            raise SandboxFailed(f"base {spec.base}: no root file system with /usr/bin/bash")
        name = uuid.uuid4().hex[:12]
        sandbox = ProcessSandbox(name, spec, self._command(spec, self._owner.label(name)))
        try:
            sandbox.wait_ready(timeout_s)
        except SandboxLost as error:
            sandbox.kill()
            raise SandboxFailed(f"a sandbox of kind process didn't start: {error}") from error
        return sandbox

    def _command(self, spec: SandboxSpec, label: str) -> list[str]:
        at = str(self._mount_point)
        # As root one more user namespace would only get in the way of the mounts; anyone else needs it for them.
        outer = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        system = [] if spec.base is not None else ["--ro-bind", "/usr", "/usr"] + [
            word for name in ("bin", "lib", "lib64", "sbin") if Path("/", name).is_symlink()
            for word in ("--symlink", f"usr/{name}", f"/{name}")]  # fmt: skip
        return [*outer, "bash", "-c", _MOUNT, "mount", at, str(spec.disk_bytes), spec.base or "",
                "bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
                "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv",
                "--setenv", VARIABLE, label, "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin",
                "--setenv", "HOME", "/home/agent", "--setenv", "LANG", "C.UTF-8",
                "--bind", f"{at}/root", "/", *system, "--proc", "/proc", "--dev", "/dev",
                "--dir", "/tmp", "--dir", "/home/agent", "--chdir", "/home/agent",
                "bash", "--noprofile", "--norc", "-c", _OUTER, _INNER]  # fmt: skip

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
        return len(found)


class ProcessSandbox:
    def __init__(self, name: str, spec: SandboxSpec, command: list[str]) -> None:
        self.id, self.spec = name, spec
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/")  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._output, self._status = (
            pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr))  # fmt: skip
        for pipe in (self._input, self._output, self._status):
            os.set_blocking(pipe, False)
        self._said = b""  # on the status pipe, not yet a whole line
        self._lock = threading.Lock()  # one step at a time
        self._killed = False

    @property
    def alive(self) -> bool:
        return not self._killed and self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Raises SandboxLost."""
        with self._lock:
            self._await("R", Kept(0), time.monotonic() + timeout_s)

    def step(self, command: str, timeout_s: float) -> StepResult:
        if "\0" in command:
            return StepResult(b"a command can't hold a NUL byte\n", 0, 2, False, 0.0)
        with self._lock:
            began, born = time.monotonic(), ticks_now()
            kept = Kept(self.spec.output_bytes)
            self._drain(Kept(0))  # what earlier steps' processes said since
            said = self._await("SX", kept, began + timeout_s, command.encode(errors="replace") + b"\0")
            dead = said is None or said[0] == "X"
            if said is None:
                self._kill_since(born)
            if dead:
                self._await("R", kept, time.monotonic() + SETTLE_S)
            self._drain(kept)
            return StepResult(kept.bytes, kept.dropped, None if said is None else int(said[1]), dead,
                              time.monotonic() - began)  # fmt: skip

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(OSError):
            self._process.kill()  # the namespace's first process dies with it, and everything in it with that
        self._process.wait()
        with self._lock:  # a step that runs has seen its pipes close
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    # ------------------------------------------------------------------------------------------------- the pipes

    def _await(self, kinds: str, kept: Kept, deadline: float, send: bytes = b"") -> tuple[str, str] | None:
        """The next status of one of these kinds, while output is read and `send` is written. None at the deadline
        where a command was sent, else SandboxLost."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._status, selectors.EVENT_READ)
            if send:
                selector.register(self._input, selectors.EVENT_WRITE)
            command = bool(send)
            while True:
                while b"\n" in self._said:
                    line, _, self._said = self._said.partition(b"\n")
                    kind, _, value = line.decode(errors="replace").partition(" ")
                    if len(kind) == 1 and kind in kinds:
                        return kind, value
                left = deadline - time.monotonic()
                if left <= 0:
                    if command:
                        return None
                    raise SandboxLost(f"{self.id}: its shell didn't answer in time")
                for key, _ in selector.select(left):
                    try:
                        if key.fd == self._input:
                            send = send[os.write(self._input, send) :]
                            if not send:
                                selector.unregister(self._input)
                        elif key.fd == self._output:
                            if not kept.read(self._output):
                                selector.unregister(self._output)  # the command closed it; the status still comes
                        else:
                            data = os.read(self._status, READ_BYTES)
                            if not data:
                                raise self._lost()
                            self._said += data
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        raise self._lost() from error

    def _drain(self, kept: Kept) -> None:
        """What the output pipe holds now: a step's own processes have written all of theirs before its end is told.
        Bounded, since others may write on."""
        with contextlib.suppress(OSError):
            for _ in range(16):
                if not kept.read(self._output):
                    break

    def _lost(self) -> SandboxLost:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(SETTLE_S)
        words = self._said.decode(errors="replace").strip()
        return SandboxLost(f"{self.id}: " + ("it was killed" if self._killed else f"it ended with {code} {words}"))

    # ------------------------------------------------------------------------------------------------- time-outs

    def _kill_since(self, born: int) -> None:
        """Kill the step's processes and its shell, again and again while they make new ones. Raises SandboxLost where
        that doesn't end."""
        deadline, shells = time.monotonic() + SETTLE_S, None
        while True:
            outer, below = self._processes()
            shells = {pid for pid, one in below.items() if one.parent == outer} if shells is None else shells
            # What the outer shell starts meanwhile is the next one, which is idle; its children can only be such.
            left = [pid for pid, one in below.items()
                    if pid in shells or (one.born >= born - SAME_TICK and one.parent != outer)]  # fmt: skip
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                self._process.kill()
                raise SandboxLost(f"{self.id}: the processes of a step that took too long couldn't all be killed")
            time.sleep(0.002)

    def _processes(self) -> tuple[int, dict[int, _Process]]:
        """The outer shell, and every process below it or orphaned to the namespace's first. Raises SandboxLost."""
        everyone = {one.pid: one for one in _all_processes()}
        children: dict[int, list[int]] = {}
        for one in everyone.values():
            children.setdefault(one.parent, []).append(one.pid)
        first = next(iter(children.get(self._process.pid, ())), None)
        # The namespace's first has the outer shell as its eldest child; orphans come later.
        outer = min(children.get(first, ()), key=lambda pid: (everyone[pid].born, pid), default=None) if first else None
        if outer is None:
            raise self._lost()
        below, todo = {}, [pid for pid in children[first] if pid != outer] + children.get(outer, [])  # type: ignore[index]
        while todo:
            pid = todo.pop()
            below[pid] = everyone[pid]
            todo += children.get(pid, ())
        return outer, below


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    born: int  # clock ticks since the machine's start


def _all_processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                yield _Process(int(name), int(fields[1]), int(fields[19]))


class Kept:
    """The beginning and the end of an output, `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self._head, self._tail = limit - limit // 2, limit // 2
        self._begin, self._end, self.dropped = b"", b"", 0

    @property
    def bytes(self) -> bytes:
        return self._begin + self._end

    def read(self, fd: int) -> int:
        """Take what there is, up to `READ_BYTES`; how much that was. 0: everyone has closed it. Raises
        BlockingIOError where there is nothing now."""
        data = os.read(fd, READ_BYTES)
        self.add(data)
        return len(data)

    def add(self, data: bytes) -> None:
        room = self._head - len(self._begin)
        self._begin, rest = self._begin + data[:room], data[room:]
        if rest:
            end = self._end + rest
            self._end = end[len(end) - self._tail :] if len(end) > self._tail else end
            self.dropped += len(end) - len(self._end)
