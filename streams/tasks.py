"""Which task comes next: a pure function of a cursor, so that the log alone says where a run stands.

A source makes tasks without their environment: the worker's environment turns `Task.data` into a prompt and a verdict.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from headrace.schemas.errors import InvalidTask, TasksExhausted
from headrace.schemas.events import Task
from headrace.schemas.settings import TaskSettings
from headrace.schemas.taskfolder import PARTS, SPEC, digest_of, missing, parse_task, unknown

log = logging.getLogger("headrace.tasks")


class TaskSource(Protocol):
    def at(self, cursor: int) -> Task | None:
        """The task at `cursor` (from 0); None: the source has ended before it."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task of that id, if the source has it."""
        ...


def task_source(settings: TaskSettings) -> TaskSource:
    """Raises TasksExhausted where the source is empty or broken."""
    if settings.source == "terminal":
        return FolderSource(settings)
    return GymSource(settings) if settings.source == "reasoning_gym" else JsonLinesSource(settings)


class GymSource:
    """Items of a reasoning-gym data set, named but not made: any index gives one, so there is no natural end."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._name = f"{settings.dataset}-{settings.seed}"

    def at(self, cursor: int) -> Task | None:
        settings = self._settings
        if settings.size is not None and cursor >= settings.size:
            return None
        data = {"dataset": settings.dataset, "config": settings.config, "seed": settings.seed, "index": cursor}
        return Task(f"{self._name}-{cursor}", settings.source, _data(settings, data), settings.seed)

    def find(self, task_id: str) -> Task | None:
        index = _index(task_id, self._name)
        return None if index is None else self.at(index)


class JsonLinesSource:
    """One JSON object a line, with at least `prompt`; taken in order, again and again up to `size` tasks."""

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.path is not None
        self._settings, path = settings, Path(settings.path)
        self._name = path.stem
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TasksExhausted(f"tasks.path {path}: can't be read ({error})") from error
        self._items = [_item(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
        if not self._items:
            raise TasksExhausted(f"tasks.path {path}: holds no task; each line is a JSON object with `prompt`")

    def at(self, cursor: int) -> Task | None:
        settings = self._settings
        if settings.size is not None and cursor >= settings.size:
            return None
        index = cursor % len(self._items)
        data = {"score": settings.score, "item": self._items[index]}
        return Task(f"{self._name}-{index}", settings.source, _data(settings, data), settings.seed)

    def find(self, task_id: str) -> Task | None:
        index = _index(task_id, self._name)
        return self.at(index) if index is not None and index < len(self._items) else None


class FolderSource:
    """Task folders, in the order of their names, again and again up to `size` tasks. Each is named by its folder and a
    digest of what an episode depends on, so that a worker whose copy is another says so. All are read at the start."""

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.path is not None
        self._settings, path = settings, Path(settings.path)
        try:
            folders = [path] if (path / SPEC).exists() else sorted(one.parent for one in path.glob(f"*/{SPEC}"))
            found = [(folder, read_folder(folder)) for folder in folders]
        except OSError as error:
            raise TasksExhausted(f"tasks.path {path}: can't be read ({error})") from error
        if not found:
            raise TasksExhausted(f"tasks.path {path}: no folder in it holds a {SPEC}")
        self._tasks: dict[str, dict[str, Any]] = {}
        for folder, files in found:
            if lacking := missing(files):
                raise InvalidTask(f"{folder}: it has no {lacking}")
            text = files[SPEC].decode(errors="replace")
            task = parse_task(str(folder / SPEC), text)
            if strange := unknown(text):
                log.warning("%s: unknown keys are left out: %s", folder / SPEC, ", ".join(strange))
            if settings.sandbox not in task.metadata.sandboxes:
                raise InvalidTask(f"{folder / SPEC}: tasks.sandbox is {settings.sandbox!r}, and the task runs in "
                                  f"{', '.join(task.metadata.sandboxes)} (metadata.sandboxes)")  # fmt: skip
            self._tasks[folder.name] = {"folder": str(folder), "digest": digest_of(files)}
        self._names = list(self._tasks)

    def at(self, cursor: int) -> Task | None:
        if self._settings.size is not None and cursor >= self._settings.size:
            return None
        return self.find(self._names[cursor % len(self._names)])

    def find(self, task_id: str) -> Task | None:
        if task_id not in self._tasks:
            return None
        settings = self._settings
        how = {"sandbox": settings.sandbox, "step_timeout_s": settings.step_timeout_s,
               "output_bytes": settings.output_bytes}  # fmt: skip
        return Task(task_id, settings.source, _data(settings, self._tasks[task_id] | how), settings.seed)


def read_folder(folder: Path) -> dict[str, bytes]:
    """What an episode of a task folder depends on, by path within it. Raises OSError."""
    return {name: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
            and (name := file.relative_to(folder).as_posix()).startswith(PARTS)}  # fmt: skip


def _item(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise TasksExhausted(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
        raise TasksExhausted(f"{path}, line {number}: a task is a JSON object with a text `prompt`")
    return item


def _data(settings: TaskSettings, data: dict[str, Any]) -> str:
    presentation = {"system": settings.system, "examples": settings.examples, "template": settings.template}
    return json.dumps(data | presentation, sort_keys=True, ensure_ascii=False)


def _index(task_id: str, name: str) -> int | None:
    head, _, tail = task_id.rpartition("-")
    return int(tail) if head == name and tail.isdecimal() else None
