"""Makes what a task's sandboxes stand on, out of its Dockerfile: an image, or a snapshot where there is no Docker.

Each is made once: an image is known by a digest of its files and of what it is built from, and stays with the daemon; a
snapshot lives as long as its backend's process. No registry is asked for anything but what the Dockerfile itself asks
for while it is built. `headrace-plain:tools` is made on the spot, of this machine's own packages.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import tarfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.errors import InvalidTask, SandboxFailed, SandboxLost

from . import Backend, Sandbox, SandboxSpec
from .attempts import write
from .docker import DockerBackend
from .dockerfile import Command, Files, Folder, Variable, images, steps
from .image import TOOLS_IMAGE, tools_image

REPOSITORY = "headrace-task"
START_S = 120.0
_TOOLS = threading.Lock()  # made by one thread


@dataclass(frozen=True, slots=True)
class Base:
    """What to put into a spec."""

    base: str | None
    folder: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


class Bases:
    """For one backend. Methods may be called from several threads; equal bases are made once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._made: dict[str, Base] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def of(self, folder: Path, image: str | None, digest: str, timeout_s: float) -> Base:
        """Of the task whose Dockerfile lies in `folder`; `image`: a ready one that it names, which is taken where the
        daemon has it. Raises SandboxFailed, InvalidTask."""
        key = f"{folder}:{digest}:{image}"
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                if isinstance(self._backend, DockerBackend):
                    self._made[key] = _image(self._backend, folder, image, timeout_s)
                else:
                    self._made[key] = _snapshot(self._backend, folder, timeout_s)
            return self._made[key]

    def close(self) -> None:
        """Remove what can't outlive this process."""
        if not isinstance(self._backend, DockerBackend):
            for one in self._made.values():
                if one.base is not None:
                    self._backend.remove(one.base)
        self._made.clear()


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTask(f"{file}: can't be read ({error}): a task needs a Dockerfile, or an image that is "
                          "here already under the name of environment.docker_image") from error  # fmt: skip


# ------------------------------------------------------------------------------------------------- with Docker


def _image(backend: DockerBackend, folder: Path, ready: str | None, timeout_s: float) -> Base:
    api = backend.connection(timeout_s)
    try:
        with backend.asking("its images"):
            if ready is not None and api.images(ready):
                return Base(ready)
            dockerfile = _read(folder / "Dockerfile")
            digest = hashlib.sha256()
            for name in images(dockerfile):
                if name == TOOLS_IMAGE:
                    with _TOOLS:
                        tools_image(api)
                found = api.images(name)
                digest.update(f"{name} {found[0]['Id'] if found else ''}\n".encode())
            context = _context(folder)
            digest.update(context)
            name = f"{REPOSITORY}:{digest.hexdigest()[:16]}"
            if not api.images(name):
                _build(backend, folder, name, context, timeout_s)
            return Base(name)
    finally:
        api.close()


def _build(backend: DockerBackend, folder: Path, name: str, context: bytes, timeout_s: float) -> None:
    """In a connection of its own, which is closed when the time is over: the daemon then gives the build up. (A build
    that says nothing may take that long from its last word.)"""
    import urllib3.exceptions

    api, deadline, said = backend.connection(timeout_s), time.monotonic() + timeout_s, ""
    try:
        for line in api.build(fileobj=io.BytesIO(context), custom_context=True, tag=name, rm=True, forcerm=True,
                              decode=True):  # fmt: skip
            if "error" in line:
                raise SandboxFailed(f"{folder}: its image can't be built: {line['error'].strip()}; {said}".rstrip("; "))
            said = str(line.get("stream", "")).strip() or said
            if time.monotonic() > deadline:
                raise SandboxFailed(f"{folder}: its image wasn't built within {timeout_s:g} s; last: {said}")
    except (OSError, urllib3.exceptions.HTTPError) as error:  # nothing was said for so long
        if time.monotonic() < deadline:
            raise
        raise SandboxFailed(f"{folder}: its image wasn't built within {timeout_s:g} s; last: {said}") from error
    finally:
        api.close()


def _context(folder: Path) -> bytes:
    """The folder as a tar archive that depends on nothing but its files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            entry = tar.gettarinfo(path, path.relative_to(folder).as_posix())
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            if entry.isfile():
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)
    return out.getvalue()


# ------------------------------------------------------------------------------------------------- without


def _snapshot(backend: Backend, folder: Path, timeout_s: float) -> Base:
    file = folder / "Dockerfile"
    todo, deadline = steps(str(file), _read(file)), time.monotonic() + timeout_s
    at, variables = "/home/agent", dict[str, str]()
    sandbox = backend.start(SandboxSpec(), START_S)
    try:
        for step in todo:
            if isinstance(step, Variable):
                variables[step.name] = step.value
            elif isinstance(step, Folder):
                at = os.path.normpath(os.path.join(at, step.path))
                _run(sandbox, f"mkdir -p {shlex.quote(at)}", file, deadline)
            elif isinstance(step, Files):
                _copy(sandbox, folder, step, at)
            else:
                assert isinstance(step, Command)
                own = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
                _run(sandbox, f"( {own}cd {shlex.quote(at)} && {step.text}\n)", file, deadline)
        return Base(sandbox.snapshot(max(1.0, deadline - time.monotonic())), at, tuple(variables.items()))
    except SandboxLost as error:
        raise SandboxFailed(f"{file}: its sandbox was lost while it was set up: {error}") from error
    finally:
        sandbox.kill()


def _run(sandbox: Sandbox, command: str, file: Path, deadline: float) -> None:
    result = sandbox.step(command, max(0.1, deadline - time.monotonic()))
    if result.code != 0:
        how = "took too long" if result.timed_out else f"ended with {result.code}"
        said = result.output.decode(errors="replace").strip()[-500:]
        raise SandboxFailed(f"{file}: {command.strip()[:200]!r} {how}: {said}")


def _copy(sandbox: Sandbox, folder: Path, step: Files, at: str) -> None:
    into = step.target.endswith("/") or len(step.sources) > 1 or step.target == "."
    target = os.path.normpath(os.path.join(at, step.target))
    for source in step.sources:
        found = sorted(folder.glob(source.strip("/") or ".")) if source != "." else [folder]
        if not found:
            raise InvalidTask(f"{folder / 'Dockerfile'}: COPY {source}: there is no such file")
        for path in found:
            if path.is_dir():
                for one in sorted(path.rglob("*")):
                    if one.is_file():
                        _put(sandbox, one, os.path.join(target, one.relative_to(path).as_posix()))
            else:
                _put(sandbox, path, os.path.join(target, path.name) if into or len(found) > 1 else target)


def _put(sandbox: Sandbox, file: Path, path: str) -> None:
    write(sandbox, path, file.read_bytes())
    if file.stat().st_mode & 0o100:
        sandbox.step(f"chmod +x {shlex.quote(path)}", START_S)
