"""The command line: `headrace VERB [RUN] ...`. Exit 0 fine, 1 the check or the work failed, 2 wrong use.

This module decides how a person's words reach the parts, and that an error is one clear line on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

from . import accounting, changing, exporting, reading, removing, replaying, reporting, tracking
from .settings import describe, kafka_config, load_config, load_site

if TYPE_CHECKING:
    from headrace.schemas.settings import RunSettings

    from .broker import Broker

WRONG_USE = (SettingsError, RunNotFound, RunConflict, ModelError, NotAnnounced)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Reinforcement learning of language-model agents, from a log.")  # fmt: skip
broker_app = typer.Typer(no_args_is_help=True, help="The development broker: a real Apache Kafka on this machine.")
app.add_typer(broker_app, name="broker")
reading.register(app)
accounting.register(app)
changing.register(app)
removing.register(app)
exporting.register(app)
reporting.register(app)
replaying.register(app)
tracking.register(app)

ConfigArgument = Annotated[Path, typer.Argument(help="TOML file with the run's settings", metavar="CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="for programs")]


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


@app.command()
def run(
    config: ConfigArgument,
    print_settings: Annotated[bool, typer.Option(help="show every setting with its meaning, and end")] = False,
    stop_at: Annotated[int | None, typer.Option(help="version at which to stop (over the file's)")] = None,
    ray: Annotated[str | None, typer.Option(help="place workers and sandbox hosts on the Ray cluster there (HOST:PORT "
                                            "of its head, or auto); this machine must be one of its nodes",
                                            metavar="ADDRESS")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Create or resume a run, and supervise all its roles here. Ctrl-C drains; twice stops at once."""
    from .create import check_model, create_run
    from .supervisor import Supervisor

    loaded = load_config(config)
    if print_settings:
        _print_settings([*describe(loaded.settings), *describe(loaded.site, "site.")], as_json)
        return
    _name_idle(loaded.settings)
    check_model(loaded.settings)
    kafka = kafka_config(loaded.site, start=True)
    placer = None
    if ray is not None:
        from .cluster import Cluster

        placer = Cluster(ray, kafka, loaded, say)
    try:
        new = create_run(kafka, loaded.topics, loaded.settings)
        say(f"run {loaded.run}: {'created' if new else 'resumed'} on {kafka['bootstrap.servers']}")
        Supervisor(kafka, loaded.topics, loaded.site, loaded.file, say, stop_at=stop_at,
                   no_progress_s=loaded.settings.rollout.no_progress_s, placer=placer).run()  # fmt: skip
    finally:
        if placer is not None:
            placer.close()


def _name_idle(settings: RunSettings) -> None:
    """Say on standard error which settings can't act in their combination."""
    from headrace.trainer.combinations import idle

    for sentence in idle(settings):
        print(f"headrace: {sentence}", file=sys.stderr)


def _print_settings(rows: list[tuple[str, object, str]], as_json: bool) -> None:
    if as_json:
        say(json.dumps([{"key": k, "value": v, "meaning": m} for k, v, m in rows], default=str))
        return
    for key, value, meaning in rows:
        say(f"{key:32} {json.dumps(value, default=str):28} {meaning}")


@app.command()
def create(
    config: ConfigArgument,
    parent: Annotated[str | None, typer.Option("--from", help="fork: begin with this version's weights, optimizer and "
                                               "tasks; model.path of CONFIG is where the weights are put",
                                               metavar="RUN@VERSION")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a run's topics and its first record. Safe to repeat."""
    from .create import check_model, create_run

    loaded = load_config(config)
    _name_idle(loaded.settings)
    kafka = kafka_config(loaded.site, start=True)
    derived = None
    if parent is not None:
        from .forking import prepare_fork

        derived = prepare_fork(kafka, loaded, parent)
    check_model(loaded.settings)
    new = create_run(kafka, loaded.topics, loaded.settings, derived)
    if as_json:
        say(json.dumps({"run": loaded.run, "created": new}))
    else:
        say(f"run {loaded.run}: {'created' if new else 'exists with these settings'}")


@app.command()
def start(
    role: Annotated[str, typer.Argument(help="assembler, coordinator, worker, gateway or trainer", metavar="ROLE")],
    run: Annotated[str, typer.Argument(help="run id", metavar="RUN")],
    config: Annotated[Path | None, typer.Option(help="file whose [site] part to use")] = None,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka's address, HOST:PORT")] = None,
    stop_at: Annotated[int | None, typer.Option(help="version at which the trainer ends")] = None,
    name: Annotated[str | None, typer.Option(help="a worker's or gateway's name; keep it over restarts")] = None,
    share: Annotated[str | None, typer.Option(help="i/n: an assembler's share of the partitions")] = None,
    port: Annotated[int | None, typer.Option(help="where a gateway listens (over the file's)")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one role, in this process."""
    from headrace.producers.lifeline import die_with_parent
    from headrace.streams.log.policy import check_announced, open_settings

    from .roles import ROLES, follow_trainer, run_role

    if parent is not None:
        die_with_parent(parent)
    if role not in ROLES:
        raise SettingsError(f"no role {role!r}: use one of {', '.join(ROLES)}")
    site = load_site(config, bootstrap)
    if stop_at is not None:
        site = site.model_copy(update={"stop_at": stop_at})
    if port is not None:
        site = site.model_copy(update={"gateway": site.gateway.model_copy(update={"port": port})})
    if share is not None:
        site = site.model_copy(update={"assembler_share": share})
    if role == "trainer" and int(os.environ.get("RANK", "0")):  # of a torchrun job
        raise typer.Exit(follow_trainer(site))
    kafka = kafka_config(site)
    topics = RunTopics(run, site.prefix)
    settings = open_settings(kafka, topics).settings
    check_announced(kafka, topics)
    raise typer.Exit(run_role(role, kafka, topics, settings, site, name))


@broker_app.command("start")
def broker_start(
    nodes: Annotated[int | None, typer.Option(help="1 or 3; settled when it is first started (default 1)")] = None,
    as_json: Json = False,
) -> None:
    """Start it (or find it running; missing nodes are started)."""
    from .broker import broker_status, ensure_broker

    address = ensure_broker(nodes=nodes)
    broker = broker_status()
    if as_json:
        say(json.dumps({"bootstrap": address, "nodes": _node_rows(broker)}))
    else:
        say(f"development broker at {address}{f', {_pids(broker)}, data in {broker.home}' if broker else ''}")


@broker_app.command("stop")
def broker_stop(as_json: Json = False) -> None:
    """Stop it, all its nodes at once; its data stays."""
    from .broker import stop_broker

    stopped = stop_broker()
    say(json.dumps({"stopped": stopped}) if as_json else "stopped" if stopped else "it wasn't running")


@broker_app.command("status")
def broker_status_command(as_json: Json = False) -> None:
    """Whether it runs, and where. Exit 1 where it doesn't, or not all of it."""
    from .broker import broker_status, default_home

    broker = broker_status()
    whole = broker is not None and all(node.runs() for node in broker.nodes)
    if as_json:
        say(json.dumps({"running": broker is not None, "bootstrap": broker.bootstrap if broker else None,
                        "nodes": _node_rows(broker)}))  # fmt: skip
    elif broker:
        down = "" if whole else "; `headrace broker start` starts what is down"
        say(f"running at {broker.bootstrap}, {_pids(broker)}, data in {broker.home}{down}")
    else:
        say(f"not running (its data would be in {default_home()}); start it with `headrace broker start`")
    raise typer.Exit(0 if whole else 1)


@broker_app.command("mend")
def broker_mend(as_json: Json = False) -> None:
    """Abort transactions that hang since a node was killed; stop the runs first. Waits until open ones are over."""
    from .mending import mend

    found = mend(say=lambda line: None if as_json else say(line))
    if as_json:
        say(json.dumps({"aborted": found}))
    else:
        say("\n".join(f"aborted: {place}" for place in found) if found else "no transaction hangs")


def _node_rows(broker: Broker | None) -> list[dict[str, object]]:
    return [{"node": node.number, "bootstrap": node.bootstrap, "pid": node.pid if node.runs() else None}
            for node in (broker.nodes if broker else ())]  # fmt: skip


def _pids(broker: Broker) -> str:
    pids = ", ".join(str(node.pid) if node.runs() else "down" for node in broker.nodes)
    return f"pid {pids}" if len(broker.nodes) == 1 else f"{len(broker.nodes)} nodes, pids {pids}"


@app.command("version")
def version_command() -> None:
    """The installed version."""
    say(version("headrace"))


def main() -> None:
    """The command line. An error of ours is one sentence on standard error; exit 2 for wrong use, 1 for the rest."""
    logging.captureWarnings(True)
    try:
        app()
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, WRONG_USE) else 1)
    except KeyboardInterrupt:
        sys.exit(130)

