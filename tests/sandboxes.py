"""What the tests of sandboxes share: a backend of each kind, or why there is none here; and what an owner has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from headrace.producers.sandboxes import Backend, Sandbox, SandboxSpec
from headrace.producers.sandboxes.cgroups import FOLDER
from headrace.producers.sandboxes.docker import LABEL, DockerBackend, DockerSandbox
from headrace.producers.sandboxes.process import VARIABLE, ProcessBackend, ProcessSandbox
from headrace.schemas.errors import SandboxFailed

KINDS: dict[str, Callable[[], Backend]] = {"process": ProcessBackend, "docker": DockerBackend}
START_S = 60.0  # on a busy machine
STEP_S = 30.0


def backend_of(kind: str) -> Backend:
    """Skips the test, with the reason, where sandboxes of this kind can't run here."""
    made = _backend(kind)
    if isinstance(made, SandboxFailed):
        pytest.skip(f"no sandboxes of kind {kind} here: {made}")
    return made


@cache
def _backend(kind: str) -> Backend | SandboxFailed:
    try:
        made = KINDS[kind]()
        made.start(SandboxSpec(), START_S).kill()
    except SandboxFailed as error:
        return error
    return made


def needs(backend: Backend, *limits: str) -> None:
    """Skips the test where the backend says that it lacks one of these."""
    lacking = [one for one in backend.missing if one.startswith(limits)]
    if lacking:
        pytest.skip(f"limits that sandboxes of kind {backend.kind} lack here: {'; '.join(lacking)}")


def kill_from_outside(sandbox: Sandbox) -> None:
    if isinstance(sandbox, DockerSandbox):
        sandbox._backend.api.kill(sandbox.container)
    else:
        assert isinstance(sandbox, ProcessSandbox)
        sandbox._process.kill()


def within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def command_lines() -> Iterator[list[str]]:
    for folder in Path("/proc").iterdir():
        try:
            yield (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue


def running(words: str) -> bool:
    """Whether a process with exactly this command line runs on this machine."""
    return any(words.split() == line[:-1] for line in command_lines())


def labelled(kind: str, owner: int | None = None) -> list[str]:
    """Labels of what lives and belongs to that owner (this process): sandboxes, control groups, snapshots."""
    if kind == "docker":
        api = DockerBackend().api
        every = api.containers(all=True, filters={"label": LABEL}) + api.images(filters={"label": LABEL})
        found = [one["Labels"][LABEL] for one in every]
    else:
        found = [line[line.index(VARIABLE) + 1] for line in command_lines() if VARIABLE in line[:-1]]
        found += [name for folder, below, _ in os.walk("/sys/fs/cgroup") if folder.endswith(FOLDER) for name in below]
        backend = backend_of("process")
        assert isinstance(backend, ProcessBackend)
        found += [path.name for path in backend.snapshots.glob("*")]
    return sorted({label for label in found if label.startswith(f"{owner or os.getpid()}.")})
