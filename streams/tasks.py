"""Which task comes next: a pure function of a cursor and of the settings in force, so that the log alone says where a run
stands. `headrace set` refreshes a source: what is drawn from then on is another, what was leased stands in the leases.

A source makes tasks without their environment: the worker's environment turns `Task.data` into a prompt and a verdict.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from headrace.schemas.errors import TasksExhausted
from headrace.schemas.events import Task
from headrace.schemas.settings import TaskSettings


class TaskSource(Protocol):
    def at(self, cursor: int) -> Task | None:
        """The task at `cursor` (from 0); None: the source has ended before it."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task of that id, if the source has it."""
        ...


def task_source(settings: TaskSettings) -> TaskSource:
    """Raises TasksExhausted where the source is empty or broken, or doesn't have a task that is to rest."""
    return GymSource(settings) if settings.source == "reasoning_gym" else JsonLinesSource(settings)


class GymSource:
    """Items of a reasoning-gym data set, named but not made: any index gives one, so there is no natural end. A task
    that is drawn at a level of the data set's curriculum says so in its name, so that a name is one task for ever."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._name = f"{settings.dataset}-{settings.seed}"

    def at(self, cursor: int) -> Task | None:
        return self._task(cursor, self._settings.level)

    def _task(self, index: int, level: int | None) -> Task | None:
        settings = self._settings
        if settings.size is not None and index >= settings.size:
            return None
        data = {"dataset": settings.dataset, "config": settings.config, "seed": settings.seed, "index": index}
        if level is not None:
            data["level"] = level
        at = "" if level is None else f"-level{level}"
        return Task(f"{self._name}{at}-{index}", settings.source, _data(settings, data), settings.seed)

    def find(self, task_id: str) -> Task | None:
        found = re.fullmatch(rf"{re.escape(self._name)}(?:-level(\d+))?-(\d+)", task_id)
        return None if found is None else self._task(int(found[2]), None if found[1] is None else int(found[1]))


class JsonLinesSource:
    """One JSON object a line, with at least `prompt`; taken in order, again and again up to `size` tasks. Those that
    rest are passed over but in one of `rest_rounds` rounds."""

    def __init__(self, settings: TaskSettings) -> None:
        assert settings.path is not None
        self._settings = settings
        self._items: list[dict[str, Any]] = []
        self._ids: dict[str, int] = {}
        for path in map(Path, (settings.path, *settings.more)):
            self._read(path)
        if unknown := [name for name in settings.rested if name not in self._ids]:
            raise TasksExhausted(f"tasks.rested names {unknown[0]!r}, which is no task of {settings.path}: they are "
                                 f"called {path.stem}-0 and so on")  # fmt: skip
        rested = set(settings.rested)
        self._names = list(self._ids)
        self._awake = [index for name, index in self._ids.items() if name not in rested]

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TasksExhausted(f"tasks.path {path}: can't be read ({error})") from error
        items = [_item(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
        if not items:
            raise TasksExhausted(f"tasks.path {path}: holds no task; each line is a JSON object with `prompt`")
        if f"{path.stem}-0" in self._ids:
            raise TasksExhausted(f"tasks.more {path}: another file of that name holds tasks of the same names: rename it")
        self._ids |= {f"{path.stem}-{i}": len(self._items) + i for i in range(len(items))}
        self._items += items

    def at(self, cursor: int) -> Task | None:
        settings = self._settings
        if settings.size is not None and cursor >= settings.size:
            return None
        every, awake = len(self._items), len(self._awake)
        place = cursor % (every + (settings.rest_rounds - 1) * awake if awake else every)
        return self._task(place if place < every else self._awake[(place - every) % awake])

    def _task(self, index: int) -> Task:
        data = {"score": self._settings.score, "item": self._items[index]}
        return Task(self._names[index], self._settings.source, _data(self._settings, data), self._settings.seed)

    def find(self, task_id: str) -> Task | None:
        index = self._ids.get(task_id)
        return None if index is None else self._task(index)


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
