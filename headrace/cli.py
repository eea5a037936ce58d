"""The command line: `headrace VERB [RUN] ...`. Exit 0 fine, 1 the check or the work failed, 2 wrong use.

This module decides how a person's words reach the parts, and that an error is one clear line on standard error.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from headrace.schemas.errors import (
    HeadraceError,
    ModelError,
    NotAnnounced,
    RunConflict,
    RunNotFound,
    SettingsError,
)
from headrace.schemas.topics import RunTopics

from . import accounting, reading
from .settings import describe, kafka_config, load_config, load_site

WRONG_USE = (SettingsError, RunNotFound, RunConflict, ModelError, NotAnnounced)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Reinforcement learning of language-model agents, from a log.")  # fmt: skip
broker_app = typer.Typer(no_args_is_help=True, help="The development broker: a real Apache Kafka on this machine.")
app.add_typer(broker_app, name="broker")
reading.register(app)
accounting.register(app)

ConfigArgument = Annotated[Path, typer.Argument(help="TOML file with the run's settings", metavar="CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="for programs")]


def say(line: str) -> None:
    print(line, flush=True)


@app.command()
def run(
    config: ConfigArgument,
    print_settings: Annotated[bool, typer.Option(help="show every setting with its meaning, and end")] = False,
    stop_at: Annotated[int | None, typer.Option(help="version at which to stop (over the file's)")] = None,
    as_json: Json = False,
) -> None:
    """Create or resume a run, and supervise all its roles here. Ctrl-C drains; twice stops at once."""
    from .create import check_model, create_run
    from .supervisor import Supervisor

    loaded = load_config(config)
    if print_settings:
        _print_settings([*describe(loaded.settings), *describe(loaded.site, "site.")], as_json)
        return
    check_model(loaded.settings)
    kafka = kafka_config(loaded.site, start=True)
    new = create_run(kafka, loaded.topics, loaded.settings)
    say(f"run {loaded.run}: {'created' if new else 'resumed'} on {kafka['bootstrap.servers']}")
    Supervisor(kafka, loaded.topics, loaded.site, loaded.file, say, stop_at=stop_at,
               no_progress_s=loaded.settings.rollout.no_progress_s).run()  # fmt: skip


def _print_settings(rows: list[tuple[str, object, str]], as_json: bool) -> None:
    if as_json:
        say(json.dumps([{"key": k, "value": v, "meaning": m} for k, v, m in rows], default=str))
        return
    for key, value, meaning in rows:
        say(f"{key:32} {json.dumps(value, default=str):28} {meaning}")


@app.command()
def create(config: ConfigArgument, as_json: Json = False) -> None:
    """Make a run's topics and its first record. Safe to repeat."""
    from .create import check_model, create_run

    loaded = load_config(config)
    check_model(loaded.settings)
    kafka = kafka_config(loaded.site, start=True)
    new = create_run(kafka, loaded.topics, loaded.settings)
    if as_json:
        say(json.dumps({"run": loaded.run, "created": new}))
    else:
        say(f"run {loaded.run}: {'created' if new else 'exists with these settings'}")


@app.command()
def start(
    role: Annotated[str, typer.Argument(help="assembler, coordinator, worker or trainer", metavar="ROLE")],
    run: Annotated[str, typer.Argument(help="run id", metavar="RUN")],
    config: Annotated[Path | None, typer.Option(help="file whose [site] part to use")] = None,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka's address, HOST:PORT")] = None,
    stop_at: Annotated[int | None, typer.Option(help="version at which the trainer ends")] = None,
    name: Annotated[str | None, typer.Option(help="a worker's name; keep it over restarts")] = None,
    share: Annotated[str | None, typer.Option(help="i/n: an assembler's share of the partitions")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one role, in this process."""
    from headrace.producers.lifeline import die_with_parent
    from headrace.streams.log.policy import check_announced, open_settings

    from .roles import ROLES, run_role

    if parent is not None:
        die_with_parent(parent)
    if role not in ROLES:
        raise SettingsError(f"no role {role!r}: use one of {', '.join(ROLES)}")
    site = load_site(config)
    if bootstrap:
        site = site.model_copy(update={"kafka": {**site.kafka, "bootstrap.servers": bootstrap}})
    if stop_at is not None:
        site = site.model_copy(update={"stop_at": stop_at})
    if share is not None:
        site = site.model_copy(update={"assembler_share": share})
    kafka = kafka_config(site)
    topics = RunTopics(run, site.prefix)
    settings = open_settings(kafka, topics).settings
    check_announced(kafka, topics)
    raise typer.Exit(run_role(role, kafka, topics, settings, site, name))


@broker_app.command("start")
def broker_start(as_json: Json = False) -> None:
    """Start it (or find it running)."""
    from .broker import broker_status, ensure_broker

    address = ensure_broker()
    broker = broker_status()
    if as_json:
        say(json.dumps({"bootstrap": address, "pid": broker.pid if broker else None}))
    else:
        say(f"development broker at {address}{f', pid {broker.pid}, data in {broker.home}' if broker else ''}")


@broker_app.command("stop")
def broker_stop(as_json: Json = False) -> None:
    """Stop it; its data stays."""
    from .broker import stop_broker

    stopped = stop_broker()
    say(json.dumps({"stopped": stopped}) if as_json else "stopped" if stopped else "it wasn't running")


@broker_app.command("status")
def broker_status_command(as_json: Json = False) -> None:
    """Whether it runs, and where. Exit 1 where it doesn't."""
    from .broker import broker_status, default_home

    broker = broker_status()
    if as_json:
        say(json.dumps({"running": broker is not None, "bootstrap": broker.bootstrap if broker else None}))
    elif broker:
        say(f"running at {broker.bootstrap}, pid {broker.pid}, data in {broker.home}")
    else:
        say(f"not running (its data would be in {default_home()}); start it with `headrace broker start`")
    raise typer.Exit(0 if broker else 1)


@app.command("version")
def version_command() -> None:
    """The installed version."""
    say(version("headrace"))


def main() -> None:
    logging.captureWarnings(True)
    try:
        app()
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WRONG_USE) else 1)
    except KeyboardInterrupt:
        sys.exit(130)

