"""Which task comes next: a pure function of a cursor and of the settings in force, so that the log alone says where a
run stands. `headrace set` refreshes a source: what is drawn from then on is another; what was leased stands in the
leases.

A source makes tasks without their environment: the worker's environment turns `Task.data` into a prompt and a verdict.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.schemas.errors import InvalidTask, TasksExhausted
from headrace.schemas.events import Task
from headrace.schemas.settings import TaskSettings
from headrace.schemas.suspicion import GUARDED
from headrace.schemas.taskfolder import SPEC, digest_of, missing, parse_task, read_folder, unknown

log = logging.getLogger("headrace.tasks")


class TaskSource(Protocol):
    """Tasks by number and by name; the same ones after every restart."""

    def at(self, cursor: int) -> Task | None:
        """The task at `cursor` (from 0); None: the source has ended before it."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task of that id, if the source has it."""
        ...


def task_source(settings: TaskSettings) -> TaskSource:
    """Raises TasksExhausted where the source is empty or broken, or doesn't have a task that is to rest."""
    if settings.source == "reasoning_gym":
        return GymSource(settings)
    paths = [Path(path) for path in (settings.path or "", *settings.more)]
    read = _folders if settings.source == "terminal" else _lines
    tasks: dict[str, dict[str, Any]] = {}
    for path in paths:
        found = read(path, settings)
        if again := found.keys() & tasks.keys():
            raise TasksExhausted(f"tasks.more {path}: it has a task {min(again)} as a file or folder before it: rename "
                                 "one, since a name is one task for ever")  # fmt: skip
        tasks |= found
    return Rounds(settings, tasks)


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


class Rounds:
    """Tasks that come round again and again, in order, up to `size` of them. Those that rest are passed over but in one
    of `rest_rounds` rounds."""

    def __init__(self, settings: TaskSettings, tasks: Mapping[str, dict[str, Any]]) -> None:
        """`tasks`: what is in the data of each, by its name. Raises TasksExhausted where one that rests isn't there."""
        self._settings, self._tasks, self._names = settings, tasks, list(tasks)
        rested = set(settings.rested)
        if unknown := rested - tasks.keys():
            raise TasksExhausted(f"tasks.rested names {min(unknown)!r}, which is no task of {settings.path}: it begins "
                                 f"with {self._names[0]!r}")  # fmt: skip
        self._awake = [name for name in self._names if name not in rested]

    def at(self, cursor: int) -> Task | None:
        settings = self._settings
        if settings.size is not None and cursor >= settings.size:
            return None
        every, awake = len(self._names), len(self._awake)
        place = cursor % (every + (settings.rest_rounds - 1) * awake if awake < every else every)
        return self.find(self._names[place] if place < every else self._awake[(place - every) % awake])

    def find(self, task_id: str) -> Task | None:
        if task_id not in self._tasks:
            return None
        settings = self._settings
        return Task(task_id, settings.source, _data(settings, self._tasks[task_id]), settings.seed)


# -------------------------------------------------------------------------------------------- what is in a path


def _lines(path: Path, settings: TaskSettings) -> dict[str, dict[str, Any]]:
    """One JSON object a line, with at least `prompt`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TasksExhausted(f"tasks.path {path}: can't be read ({error})") from error
    items = [_item(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise TasksExhausted(f"tasks.path {path}: holds no task; each line is a JSON object with `prompt`")
    return {f"{path.stem}-{i}": {"score": settings.score, "item": item} for i, item in enumerate(items)}


def _folders(path: Path, settings: TaskSettings) -> dict[str, dict[str, Any]]:
    """Task folders, in the order of their names. Each is named by its folder and a digest of what an episode depends
    on, so that a worker whose copy is another says so. All are read at the start."""
    try:
        folders = [path] if (path / SPEC).exists() else sorted(one.parent for one in path.glob(f"*/{SPEC}"))
        found = [(folder, read_folder(folder)) for folder in folders]
    except OSError as error:
        raise TasksExhausted(f"tasks.path {path}: can't be read ({error})") from error
    if not found:
        raise TasksExhausted(f"tasks.path {path}: no folder in it holds a {SPEC}")
    how = {"sandbox": settings.sandbox, "step_timeout_s": settings.step_timeout_s,
           "output_bytes": settings.output_bytes}  # fmt: skip
    tasks: dict[str, dict[str, Any]] = {}
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
        tasks[folder.name] = {"folder": str(folder), "digest": digest_of(files)} | how
        if task.metadata.guarded:
            tasks[folder.name][GUARDED] = task.metadata.guarded
    return tasks


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
