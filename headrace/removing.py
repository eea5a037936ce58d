"""`headrace delete`: remove a run for good. Decides what belongs to it, in which order it goes, and when it may not.

What names the rest goes last: blobs and this machine's state first, then the topics, `policy` at the end. So a deletion
that is interrupted can be made again. A run whose processes are at work is refused: they would write on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.schemas.errors import RunBusy
from headrace.schemas.topics import FLEET, POLICY, RunTopics
from headrace.streams.log import clients
from headrace.streams.log.blobs import Blobs, stores
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import end_offsets, read_backwards

from .plain import dumps
from .reading import Bootstrap, ConfigOption, Json, RunArgument, say
from .settings import kafka_config, load_site, state_dir


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("delete")(delete_command)


def delete_command(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without it, only say what would go")] = False,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Delete a run: topics, blobs, stored weights, and its checkpoints and logs on this machine. Exit 1 without --yes.
    """
    site = load_site(config, bootstrap)
    topics = RunTopics(run, site.prefix)
    found = belongings(kafka := kafka_config(site), topics, state_dir(site, run))
    if yes:
        remove(kafka, topics, found)
    if as_json:
        say([dumps({"run": run, "deleted": yes, "topics": list(found.topics), "state": str(found.state or "") or None,
                    "blobs": [one.folder for one in found.blobs]})])  # fmt: skip
    else:
        said = [*found.topics, *([str(found.state)] if found.state else []),
                *(f"{one.folder}/*" for one in found.blobs)]  # fmt: skip
        say([f"run {run} is deleted:" if yes else f"with --yes, run {run} would be deleted for good:",
             *(f"  {one}" for one in said)])  # fmt: skip
    raise typer.Exit(0 if yes else 1)


@dataclass(frozen=True, slots=True)
class Belongings:
    """What there is of a run: topics, a folder on this machine, blobs and weights in stores."""

    topics: tuple[str, ...]
    state: Path | None
    blobs: list[Blobs]


def belongings(kafka: Mapping[str, Any], topics: RunTopics, state: Path) -> Belongings:
    """Raises RunNotFound."""
    settings = open_settings(kafka, topics).settings
    there = clients.admin(kafka).list_topics(timeout=30.0).topics
    specs = topics.specs(settings.log.partitions, settings.log.replication)
    names = [spec.name for spec in specs if spec.name in there]
    names.sort(key=lambda name: name == topics.name(POLICY))
    return Belongings(tuple(names), state if state.is_dir() else None, stores(settings, topics.run))


def remove(kafka: Mapping[str, Any], topics: RunTopics, found: Belongings) -> None:
    """Raises RunBusy where processes of the run are at work, LogError or BlobError where something can't be removed;
    calling again goes on."""
    _check_idle(kafka, topics)
    for one in found.blobs:
        one.remove_all()
    if found.state is not None:
        shutil.rmtree(found.state)
    clients.delete_topics(kafka, [name for name in found.topics if name != topics.name(POLICY)])
    clients.delete_topics(kafka, [topics.name(POLICY)])


def _check_idle(kafka: Mapping[str, Any], topics: RunTopics) -> None:
    """Workers, gateway and coordinator write to `fleet` at least every few seconds."""
    name = topics.name(FLEET)
    if name not in clients.admin(kafka).list_topics(timeout=30.0).topics:
        return
    timeout_s = open_settings(kafka, topics).settings.rollout.lease_timeout_s
    newest = next(iter(read_backwards(kafka, name, 0, end_offsets(kafka, name)[0])), None)
    if newest is not None and (age_s := time.time() - newest.timestamp_ms / 1000) < timeout_s:
        raise RunBusy(f"run {topics.run!r} is at work: something wrote to {name} {max(0.0, age_s):.0f} s ago. Stop its "
                      f"processes, wait {timeout_s:g} s, and delete it then")  # fmt: skip
