"""Decides what an environment with tools stands on here: its sandboxes, and the tokenizer that writes its turns."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.settings import RunSettings

from .toolloop import ToolLoop


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """What belongs to a place, not to a run. `room`: sandboxes at once; `starting`: of them, being set up; `docker`:
    the daemon's address (None: DOCKER_HOST, or the usual socket)."""

    room: int = 8
    starting: int = 2
    docker: str | None = None


def open_tools(settings: RunSettings, choice: SandboxChoice) -> ToolLoop | None:
    """None where the tasks need none. Raises SandboxFailed, DaemonLost, ModelError."""
    if settings.tasks.source != "terminal":
        return None
    from .environments.sessions import Sessions
    from .environments.terminal import Terminal
    from .gateway.tokenizer import Tokenizer
    from .sandboxes import Backend
    from .sandboxes.docker import DockerBackend
    from .sandboxes.process import ProcessBackend

    template = Tokenizer(settings.model.path)
    process = settings.tasks.sandbox == "process"
    backend: Backend = ProcessBackend() if process else DockerBackend(choice.docker)
    sessions = Sessions(Terminal(backend, choice.room, choice.starting))
    return ToolLoop(sessions, template, settings.model.max_length)
