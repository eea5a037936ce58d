"""Which task comes next: a pure function of a cursor, so that the log alone says where a run stands.

A source makes tasks without their environment: the worker's environment turns `Task.data` into a prompt and a verdict.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from headrace.schemas.errors import TasksExhausted
from headrace.schemas.events import Task
from headrace.schemas.settings import TaskSettings


class TaskSource(Protocol):
    """Tasks by number and by name; the same ones after every restart."""

    def at(self, cursor: int) -> Task | None:
        """The task at `cursor` (from 0); None: the source has ended before it."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task of that id, if the source has it."""
        ...


def task_source(settings: TaskSettings) -> TaskSource:
    """Raises TasksExhausted where the source is empty or broken."""
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
        """Raises TasksExhausted where the file can't be read or holds no task, or a line that is no task."""
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
