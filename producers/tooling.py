"""Decides what an environment with tools stands on here: its sandboxes, or the hosts elsewhere that have them, and the
tokenizer that writes its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.schemas.errors import SandboxFailed
from headrace.schemas.settings import RunSettings, TaskSettings

from .environments import ToolEnvironment
from .sandboxes import Backend
from .toolloop import ToolLoop


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """What belongs to a place, not to a run. `room`: sandboxes at once; `starting`: of them, being set up; `docker`:
    the daemon's address (None: DOCKER_HOST, or the usual socket). `elsewhere`: makes the environment where its
    sandboxes are on other hosts; the rest is those hosts' then."""

    room: int = 8
    starting: int = 2
    docker: str | None = None
    elsewhere: Callable[[], ToolEnvironment] | None = None


def needs_sandboxes(tasks: TaskSettings) -> bool:
    """Whether attempts at such tasks run in sandboxes."""
    return tasks.source == "terminal"


def open_tools(settings: RunSettings, choice: SandboxChoice) -> ToolLoop | None:
    """None where the tasks need none. Raises SandboxFailed, DaemonLost, ModelError."""
    if not needs_sandboxes(settings.tasks):
        return None
    from .environments.sessions import Sessions
    from .gateway.tokenizer import Tokenizer

    template = Tokenizer(settings.model.path)
    environment = choice.elsewhere() if choice.elsewhere is not None else open_environment(settings, choice)
    return ToolLoop(Sessions(environment), template, settings.model.max_length)


def open_environment(settings: RunSettings, choice: SandboxChoice) -> ToolEnvironment:
    """With sandboxes of this machine, for tasks that need any. Raises SandboxFailed, DaemonLost."""
    from .environments.terminal import Terminal

    return Terminal(open_backend(settings.tasks.sandbox, choice.docker), choice.room, choice.starting)


def open_backend(kind: str, docker: str | None) -> Backend:
    """Sandboxes of one kind on this machine. Raises SandboxFailed, also for a kind that isn't known, DaemonLost."""
    from .sandboxes.docker import DockerBackend
    from .sandboxes.process import ProcessBackend

    kinds: dict[str, Callable[[], Backend]] = {"docker": lambda: DockerBackend(docker), "process": ProcessBackend}
    if kind not in kinds:
        raise SandboxFailed(f"this version of Headrace knows sandboxes of the kinds {', '.join(kinds)}")
    return kinds[kind]()
