"""`headrace set`: change run settings of a living run. Decides what may be asked for, and writes it once.

A change is a record of `policy`, of a writer of its own (`set`): it holds for every manifest that the coordinator
decides after it has read it, which the manifest says, and which the trainer and a replay go by.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from headrace.schemas.errors import SettingsError, TasksExhausted
from headrace.schemas.events import SettingsChanged
from headrace.schemas.settings import TaskSettings, changed
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log import policy
from headrace.streams.log.transactions import Output, Transactor
from headrace.streams.tasks import task_source

from .plain import dumps
from .reading import Bootstrap, ConfigOption, Json, RunArgument, say
from .settings import describe, kafka_config, load_site

WRITER = "set"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("set")(set_command)


def set_command(
    run: RunArgument,
    changes: Annotated[list[str], typer.Argument(help="key=value ..., as `run --print-settings` names them",
                                                 metavar="KEY=VALUE...")],
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:  # fmt: skip
    """Change run settings from the next manifest on: learning rate, max_lag, staleness, loss, deadlines, tasks."""
    site = load_site(config, bootstrap)
    found = change(kafka_config(site), RunTopics(run, site.prefix), parsed(changes))
    if as_json:
        rows = {key: {"was": was, "is": now} for key, (was, now) in found.changes.items()}
        say([dumps({"run": run, "offset": found.offset, "changes": rows})])
    elif found.offset is None:
        say([f"run {run}: nothing to change, it has these settings"])
    else:
        say([*(f"{key}: {json.dumps(was)} -> {json.dumps(now)}" for key, (was, now) in found.changes.items()),
             f"holds from the next manifest on (policy[0]@{found.offset})"])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed (key: before, after), and where it stands; no offset where nothing was."""

    changes: dict[str, tuple[Any, Any]]
    offset: int | None


def _check_tasks(tasks: TaskSettings) -> None:
    """What the coordinator and the environments could make nothing of is refused here, before it ends the run."""
    from headrace.producers.environments.gym import at_level, levels

    try:
        task_source(tasks)
        if tasks.level is not None:
            assert tasks.dataset is not None
            at_level(tasks.dataset, tasks.config, tasks.level)  # it has a curriculum that goes with the configuration
            if tasks.level >= (count := levels(tasks.dataset)):
                raise SettingsError(f"tasks.level = {tasks.level}: the curriculum of {tasks.dataset!r} has levels 0 to "
                                    f"{count - 1}")  # fmt: skip
    except (TasksExhausted, ValueError, TypeError, AssertionError) as error:
        raise SettingsError(f"{error}; nothing was changed") from error


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` each; a value is JSON, or else a string. Raises SettingsError."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or key in found:
            raise SettingsError(f"{word!r}: give each setting once, as key=value (for example batch.max_lag=2)")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def change(kafka: Mapping[str, Any], topics: RunTopics, changes: Mapping[str, Any]) -> Change:
    """Write one record that makes these changes. Raises SettingsError naming the key, RunNotFound, Fenced where another
    changes settings at the same moment (nothing was written)."""
    # 1. Take the id over, which ends what a predecessor began; 2. read what holds; 3. write what differs from it.
    opened = policy.open_settings(kafka, topics)
    transactor = Transactor(kafka, topics.transactional_id(WRITER))
    try:
        records = policy.settled_records(kafka, topics)
        before = policy.in_force(opened.settings, policy.settings_changes(records))
        try:
            after = changed(before, changes)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'settings'}: {p['msg']}" for p in error.errors())
            raise SettingsError(said) from error
        except ValueError as error:
            raise SettingsError(f"{error}; `headrace run CONFIG --print-settings` lists them") from error
        was, now = ({key: value for key, value, _ in describe(one)} for one in (before, after))
        differing = {key: (was[key], now[key]) for key in changes if was[key] != now[key]}
        if not differing:
            return Change({}, None)
        if before.tasks != after.tasks:
            _check_tasks(after.tasks)
        chain = policy.chain_of(WRITER, records)
        event = SettingsChanged(**chain.link(), writer=WRITER, changed_ms=int(time.time() * 1000),
                                changes=json.dumps({key: now for key, (_, now) in differing.items()}))  # fmt: skip
        (offset,) = transactor.send([Output(topics.name(POLICY), 0, chain.extend(event))])
        return Change(differing, offset)
    finally:
        transactor.close()
