"""The kind `docker`: running containers with a shell attached, through the Docker SDK.

What isolates: no network, no capability and none to gain, limits of memory (swap included), processes and CPU,
Docker's own system call filter, nothing logged. Layers of the image are read-only; what a container writes lies in a
layer of its own. Docker can't bound that layer on the usual file systems: no file may grow beyond a share of
`disk_bytes`, and a thread looks at all layers several times a second and ends a sandbox that is beyond it (what is
written between two looks gets through).

A container ends when its attached connection does, and removes itself: so the death of its owner ends it, unless a step
runs. The rest, and snapshots, carry their owner's label and are found by `sweep`.

Whose doing an end is, the daemon's events say: a kill through Docker came from outside; a container that ends without
one was ended by what ran in it. (Whoever kills its processes behind Docker's back has it blamed on the model: with an
unknown cause, the other way round would be a refuge.) Every question to the daemon has a time-out, and one that isn't
answered is infrastructure.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.schemas.errors import DaemonLost, HeadraceError, SandboxFailed, SandboxLost
from headrace.schemas.outcomes import Limit

from . import FILE_BYTES, Owner, SandboxSpec
from .cgroups import Group
from .image import plain_image
from .shell import ARGV, OUTPUT, STATUS, Ended, Silent
from .stepping import ShellSandbox

LABEL, MACHINE = "headrace.sandbox", "headrace.machine"
REPOSITORY = "headrace-snapshot"
DAEMON_S = 20.0  # for an answer to one question; a busy daemon takes seconds to start a container
PING_S = 5.0
GRACE_S = 0.5  # for what the daemon had still to pass on when a step's time was over
FILE_SHARE = 0.75  # of the disk, for a single file: whoever meets that bound has room to go on
LOOK_S = 0.2  # between two looks at what was written
LATE_S = 600.0  # within which a snapshot that was given up may still appear
READ_BYTES = 64 << 10
EVENT_S = 2.0  # for the daemon to have noticed an end


class DockerBackend:
    """`address`: of the daemon; None: what DOCKER_HOST says, or the usual socket. `image`: what a spec without a base
    is made of; None: one that is made of this machine's own packages. Raises SandboxFailed where the SDK isn't
    installed, DaemonLost where no daemon answers."""

    kind = "docker"

    def __init__(self, address: str | None = None, image: str | None = None) -> None:
        try:
            import docker.errors
        except ImportError:
            raise SandboxFailed("sandboxes of kind docker need its SDK: pip install 'headrace[docker]'") from None
        self.address = address or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._not_found = docker.errors.NotFound
        self._doomed: list[str] = []  # images
        self._left: list[str] = []  # containers
        self._late: dict[str, float] = {}  # snapshots that may still appear, and until when
        self._owner, self._machine = Owner.myself(), _machine()
        with self.asking("a connection"):
            self.api, self._pings = self.connection(DAEMON_S), self.connection(PING_S)
            self._pings.ping()
        self._image, self._lock = image, threading.Lock()
        self._layers = _Layers()
        self.missing = self._missing()

    def connection(self, timeout_s: float) -> Any:
        import docker

        api = docker.APIClient(self.address, version="1.41", timeout=timeout_s, max_pool_size=64)
        api.trust_env = False  # no proxy stands between
        return api

    def _missing(self) -> tuple[str, ...]:
        with self.asking("what it can limit"):
            about = self.api.info()
        found = [words for key, words in (("MemoryLimit", "memory"), ("PidsLimit", "number of processes"),
                                          ("CpuCfsQuota", "CPU")) if not about.get(key, True)]  # fmt: skip
        if about["Driver"] != "overlay2" or not os.access(Path(about["DockerRootDir"], about["Driver"]), os.R_OK):
            found.append(f"disk (only single files are bounded: layers of {about['Driver']} can't be seen from here)")
        return tuple(found)

    @property
    def image(self) -> str:
        """Made, or found, at its first use. Raises SandboxFailed."""
        with self._lock:
            if self._image is None:
                with self.asking("the plain image"):
                    self._image = plain_image(self.api)
            return self._image

    def start(self, spec: SandboxSpec, timeout_s: float) -> DockerSandbox:
        name, image = uuid.uuid4().hex[:12], spec.base or self.image
        # An image, and a snapshot too, says where its shells begin, as whom, and with which variables.
        plain: dict[str, Any] = {} if spec.base else {
            "user": "0:0", "working_dir": "/home/agent",
            "environment": {"HOME": "/home/agent", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}}
        own = {"environment": plain.get("environment", {}) | dict(spec.variables)}
        if spec.folder:
            own["working_dir"] = spec.folder
        file_bytes = round(spec.disk_bytes * FILE_SHARE)
        with self.asking(f"a container of image {image}"):
            config = self.api.create_host_config(
                init=True, auto_remove=True, network_mode="none", ipc_mode="private", cap_drop=["ALL"],
                security_opt=["no-new-privileges"], mem_limit=spec.memory_bytes, memswap_limit=spec.memory_bytes,
                tmpfs={path: f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_bytes}" for path in spec.fresh},
                pids_limit=spec.processes, nano_cpus=round(spec.cpus * 1e9), log_config={"Type": "none", "Config": {}},
                ulimits=[{"Name": "fsize", "Soft": file_bytes, "Hard": file_bytes},
                         {"Name": "core", "Soft": 0, "Hard": 0}])  # fmt: skip
            made = self.api.create_container(
                image, list(ARGV[1:]), entrypoint=list(ARGV[:1]), name=f"headrace-{name}", hostname="sandbox",
                stdin_open=True, labels=self.labels(name), host_config=config, **(plain | own))["Id"]  # fmt: skip
        try:
            with self.asking(f"container {name}"):
                attached = self.api.attach_socket(made, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                self.api.start(made)
                facts = self.api.inspect_container(made)
            sandbox = DockerSandbox(name, spec, self, facts, Frames(attached))
        except HeadraceError:
            self._remove(made)
            raise
        try:
            sandbox.wait_ready(timeout_s)
        except SandboxLost as error:
            sandbox.kill()
            raise SandboxFailed(f"a sandbox of kind docker didn't start: {error}") from error
        self._layers.watch(sandbox)
        return sandbox

    def labels(self, name: str) -> dict[str, str]:
        return {LABEL: self._owner.label(name), MACHINE: self._machine}

    def remove(self, base: str) -> None:
        if base.startswith(f"{REPOSITORY}:"):
            with contextlib.suppress(SandboxFailed), self.asking(f"the removal of {base}"):
                self._doomed.append(self.api.inspect_image(base)["Id"])
                self.api.remove_image(base, force=True)
            self.tidy()

    def give_up(self, base: str) -> None:
        """A snapshot that took too long: the daemon may finish it yet."""
        self._late[base] = time.monotonic() + LATE_S

    def tidy(self) -> None:
        """Images that were removed while others stood on them go with the last of those; and what came late."""
        for base, until in list(self._late.items()):
            with contextlib.suppress(SandboxFailed), self.asking(f"the removal of {base}"):
                try:
                    self.api.remove_image(base, force=True)
                except self._not_found:
                    if time.monotonic() < until:
                        continue
                self._late.pop(base, None)
        for image in reversed(list(self._doomed)):
            with contextlib.suppress(SandboxFailed), self.asking("the removal of an image"):
                try:
                    self.api.remove_image(image, force=True)
                except self._not_found:
                    pass
                with contextlib.suppress(ValueError):
                    self._doomed.remove(image)

    def _remove(self, container: str) -> None:
        try:
            with self.asking("the removal of a container"):
                self.api.remove_container(container, force=True, v=True)
        except DaemonLost:
            self._left.append(container)
        except SandboxFailed:  # it has removed itself, or is about to
            pass

    def discard(self, container: str) -> None:
        """Remove it, now or as soon as the daemon answers again."""
        self._left.append(container)
        if self.answers():
            for _ in range(len(self._left)):
                with contextlib.suppress(IndexError):  # another thread took the last
                    self._remove(self._left.pop())
            self.tidy()

    def sweep(self) -> int:
        mine = {"label": [f"{MACHINE}={self._machine}", LABEL]}
        with self.asking("what was left behind"):
            containers = self.api.containers(all=True, filters=mine)
            images = self.api.images(filters=mine)  # newest first
        found = set[str]()
        for one, remove in ((one, self._remove) for one in containers):
            if _orphan(one, found):
                remove(one["Id"])
        for one in reversed(images):
            if _orphan(one, found):
                self._doomed.append(one["Id"])
        self.tidy()
        return len(found)

    def answers(self) -> bool:
        try:
            return bool(self._pings.ping())
        except Exception:
            return False

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Turns what the SDK raises into SandboxFailed, and silence into DaemonLost."""
        import docker.errors
        import requests.exceptions
        import urllib3.exceptions

        try:
            yield
        except docker.errors.APIError as error:
            raise SandboxFailed(f"docker at {self.address}: no {what}: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, urllib3.exceptions.HTTPError,
                OSError) as error:  # fmt: skip
            raise DaemonLost(f"docker at {self.address}: no answer about {what}: {error}") from error


class DockerSandbox(ShellSandbox):
    """A container, its shell on an attached connection."""

    def __init__(self, name: str, spec: SandboxSpec, backend: DockerBackend, facts: dict[str, Any],
                 frames: Frames) -> None:  # fmt: skip
        self.container: str = facts["Id"]
        self._backend, self._frames = backend, frames
        pid = int(facts["State"]["Pid"])
        ours = self.container in _read(Path(f"/proc/{pid}/cgroup"))  # the daemon is on this machine
        self._pid = pid if ours and pid else None
        self.upper = Path((facts["GraphDriver"]["Data"] or {}).get("UpperDir", "/nonexistent"))
        self.beyond = False  # its disk; set by whoever looks
        super().__init__(name, spec, frames, Group.of(pid) if self._pid else None)

    @property
    def alive(self) -> bool:
        return not self._killed and not self._given_up and not self._frames.closed

    def _over(self) -> bool:
        try:
            with self._backend.asking(f"the state of {self.id}"):
                return not self._backend.api.inspect_container(self.container)["State"]["Running"]
        except DaemonLost:
            raise
        except SandboxFailed:  # it was removed when it ended
            return True

    def _snapshot(self, timeout_s: float) -> str:
        labels = self._backend.labels(uuid.uuid4().hex[:12])
        api, base = self._backend.connection(timeout_s), f"{REPOSITORY}:{labels[LABEL]}"
        try:
            with self._backend.asking(f"a snapshot of {self.id}"):
                api.commit(self.container, REPOSITORY, labels[LABEL], conf={"Labels": labels})
        except DaemonLost:
            self._backend.give_up(base)
            raise
        finally:
            api.close()
        return base

    def kill(self) -> None:
        self._killed = True
        self._end()
        with self._lock:
            self._channel.close()
            if self._group is not None:
                self._group.close()

    # ------------------------------------------------------------------------------------------- this kind

    @property
    def _first(self) -> int | None:
        return self._pid

    def _disk_full(self) -> bool:
        return self.beyond

    def _end(self) -> None:
        # First, since the daemon removes no container whose output waits to be read; and a step that runs must see its
        # channel close also where the daemon hangs.
        self._frames.shut()
        self._backend.discard(self.container)

    def _late(self) -> Ended | None:
        if not self._backend.answers():
            raise SandboxLost(f"{self.id}: the daemon at {self._backend.address} doesn't answer", daemon=True)
        with contextlib.suppress(Silent):
            return self._shell.late(GRACE_S)
        return None

    def _ended(self, limits: frozenset[Limit], others: bool) -> SandboxLost:
        if self.beyond:
            return SandboxLost(f"{self.id}: it had written more than {self.spec.disk_bytes} bytes, or too many files",
                               limits)  # fmt: skip
        events: dict[str, dict[str, str]] = {}
        deadline = time.monotonic() + EVENT_S
        try:
            while "die" not in events and time.monotonic() < deadline:
                with self._backend.asking(f"the end of {self.id}"):
                    said = self._backend.api.events(since=1, until=f"{time.time():.6f}", decode=True,
                                                    filters={"container": self.container})  # fmt: skip
                    events = {one["Action"]: one["Actor"]["Attributes"] for one in said}
                time.sleep(0.0 if "die" in events else 0.05)
        except SandboxFailed as error:
            return SandboxLost(f"{self.id}: {error}", daemon=True)
        if "die" not in events:
            return SandboxLost(f"{self.id}: the connection to its container was cut")
        if "oom" in events:
            limits |= {Limit.MEMORY}
        return SandboxLost(f"{self.id}: its container ended with {events['die'].get('exitCode')}", limits,
                           from_within="kill" not in events and not others)  # fmt: skip


class Frames:
    """A channel over an attached connection: frames of both streams, each after eight bytes (0 to 3: which one, 4 to 7:
    big-endian length)."""

    def __init__(self, attached: Any) -> None:
        self._attached = attached  # keeps the connection from being closed
        self._socket: socket.socket = getattr(attached, "_sock", attached)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._poll = select.poll()
        self._head, self._left, self._stream = b"", 0, 0
        self.closed = False

    def exchange(self, data: bytes, timeout_s: float) -> tuple[int, list[tuple[int, bytes]]]:
        self._poll.register(self._fd, select.POLLIN | (select.POLLOUT if data else 0))
        taken, came = 0, []
        for _, what in self._poll.poll(max(0, timeout_s) * 1000):
            try:
                if what & select.POLLOUT and data:
                    with contextlib.suppress(BlockingIOError):
                        taken = self._socket.send(data)
                if what & ~select.POLLOUT:
                    said = self._socket.recv(READ_BYTES)
                    if not said:
                        raise EOFError
                    came = list(self._frames(said))
            except BlockingIOError:
                pass
            except (OSError, EOFError) as error:
                self.closed = True
                raise EOFError from error
        return taken, came

    def _frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        while data:
            if not self._left:
                more = 8 - len(self._head)
                self._head, data = self._head + data[:more], data[more:]
                if len(self._head) < 8:
                    return
                self._stream, self._left = struct.unpack(">BxxxI", self._head)
                self._head = b""
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            if part:
                yield (STATUS if self._stream == 2 else OUTPUT), part

    def shut(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._attached.close()
            self._socket.close()


class _Layers:
    """Looks at what sandboxes have written, while there are any."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[DockerSandbox] = weakref.WeakSet()
        self._lock, self._running = threading.Lock(), False

    def watch(self, sandbox: DockerSandbox) -> None:
        if not sandbox.upper.is_dir():
            return
        with self._lock:
            self._watched.add(sandbox)
            if not self._running:
                self._running = True
                threading.Thread(target=self._look, name="sandbox-layers", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                living = [one for one in self._watched if one.alive]
                if not living:
                    self._running = False
                    self._watched.clear()
                    return
            for one in living:
                if _written(one.upper, one.spec.disk_bytes) > one.spec.disk_bytes:
                    one.beyond = True
                    one._end()


def _written(folder: Path, limit: int) -> int:
    """Bytes on disk below a folder; no further than it takes to know that they are beyond the limit."""
    total, todo = 0, [str(folder)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        total += max(FILE_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                    if total > limit:
                        return total
        except OSError:
            continue
    return total


def _orphan(one: dict[str, Any], found: set[str]) -> bool:
    label = (one.get("Labels") or {}).get(LABEL, "")
    owner = Owner.of_label(label)
    if owner is None or owner.alive:
        return False
    found.add(label)
    return True


def _machine() -> str:
    """Daemons can be shared, and process numbers mean something on one machine only."""
    return _read(Path("/etc/machine-id")).strip() or socket.gethostname()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
