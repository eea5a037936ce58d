"""`headrace cat`, `status` and `show`: the commands that read a run. They write nothing, to no topic.

What a run's records mean is `headrace.consumers`' to say; this module decides what a person or a program gets to see.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.consumers.facts import Fact
from headrace.consumers.figures import Figures, Quantiles, figures
from headrace.consumers.health import task_set
from headrace.consumers.letters import DeadLetters, dead_letters
from headrace.consumers.recording import recording
from headrace.consumers.report.words import seconds
from headrace.consumers.run import Run, list_runs, open_run
from headrace.consumers.selection import Start
from headrace.consumers.state import State, state
from headrace.consumers.tables import KINDS, Row, read_small
from headrace.consumers.waits import Waits
from headrace.schemas.errors import DataLossError, SettingsError
from headrace.schemas.events import Version
from headrace.schemas.topics import ALL_TOPICS, POLICY, TRAJECTORIES

from .plain import dumps, event_row, jsonable, record_row, record_text, table
from .settings import kafka_config, load_site
from .turns import decoder, episode_lines

RunArgument = Annotated[str, typer.Argument(help="run id", metavar="RUN")]
Json = Annotated[bool, typer.Option("--json", help="for programs")]
Bootstrap = Annotated[str | None, typer.Option(help="Kafka's address, HOST:PORT", metavar="HOST:PORT")]
ConfigOption = Annotated[Path | None, typer.Option(help="file whose [site] part to use", metavar="CONFIG.toml")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (cat, status, show):
        app.command()(command)


def cat(
    run: RunArgument,
    topic: Annotated[str | None, typer.Argument(help=f"one of {', '.join(ALL_TOPICS)}; without it, all")] = None,
    start: Annotated[
        str, typer.Option("--from", help="an offset, a time (2026-01-31T12:00), earliest or latest")
    ] = "earliest",
    follow: Annotated[bool, typer.Option(help="go on as records come, until Ctrl-C")] = False,
    raw: Annotated[bool, typer.Option(help="bytes in base64 instead of decoded columns and sizes")] = False,
    as_json: Annotated[bool, typer.Option("--json/--text", help="one JSON object a line, or lines for people")] = True,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Print a run's events, dead letters too."""
    opened = opened_run(run, bootstrap, config)
    topics = ALL_TOPICS if topic is None else (topic,)
    with until_interrupted() as stop:
        for record, event in opened.events(*topics, start=_start(start), follow=follow, stop=stop):
            if as_json:
                print(dumps(record_row(record, event, opened.topics, raw)), flush=follow)
            else:
                print("\n".join(record_text(record, event, opened.topics)), flush=follow)


def status(
    run: Annotated[str | None, typer.Argument(help="run id; without it, the runs there are", metavar="[RUN]")] = None,
    follow: Annotated[bool, typer.Option(help="live, with the report's verdicts, until Ctrl-C or its end")] = False,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Show where a run stands and what holds it up; without RUN, list the runs."""
    if run is None:
        if follow:
            raise SettingsError("--follow needs a run: `headrace status RUN --follow`")
        rows = [_run_row(name, bootstrap, config) for name in list_runs(*_site(bootstrap, config))]
        say([dumps(rows)] if as_json else table(rows) if rows else ["there are no runs"])
        return
    opened = opened_run(run, bootstrap, config)
    if follow:
        from .watching import watch

        watch(opened, as_json)
        return
    source = opened.snapshot()
    letters = dead_letters(source)
    facts = read_small(source)
    found, waits = state(facts, opened.settings, int(time.time() * 1000), letters.count), figures(facts).waits
    alerts = task_set(facts).alerts()
    if as_json:
        say([dumps(jsonable(found) | {"run": run, "held_up_by": found.held_up_by, "letters": letters_row(letters),
                                      "waits": waits, "alerts": alerts})])  # fmt: skip
    else:
        say(status_lines(run, found, letters, waits))
        say(f"alert       {alert}" for alert in alerts)


def show(
    run: RunArgument,
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}; KIND/ID for one in full")] = None,
    where: Annotated[list[str] | None, typer.Option(help="column=value, or a column that isn't empty; repeat it to "
                                                    "narrow down")] = None,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """List a run's episodes, groups, batches, versions, replicas or tasks, or show one in full: an episode turn by
    turn, of the others (and with --json) all records."""
    name, _, wanted = (kind or "").partition("/")
    if kind is not None and name not in KINDS:
        raise SettingsError(f"no kind {name!r}: use one of {', '.join(KINDS)}, or KIND/ID")
    opened = opened_run(run, bootstrap, config)
    source = opened.snapshot()
    facts = read_small(source)
    if kind is None:
        rows: list[Row] = [{"kind": name, "count": len(make(facts))} for name, make in KINDS.items()]
    else:
        rows = _where(KINDS[name](facts), where or [])
    if not wanted:
        say([dumps(rows)] if as_json else table(rows) if rows else ["none"])
        return
    row = next((row for row in rows if str(row["id"]) == wanted), None)
    if row is None:
        raise SettingsError(f"run {run!r} has no {name}/{wanted}; `headrace show {run} {name}` lists them")
    if as_json:
        say([dumps(row | {"records": list(_records_of(opened, facts, name, wanted))})])
        return
    say(f"{key:12} {value}" for key, value in row.items() if value is not None)
    say([""])
    if name == "episodes":
        # What the events tell is shown turn by turn; where they are deleted, what the small topics know.
        events = (event for _, event in opened.events(TRAJECTORIES, episode=wanted))
        with contextlib.suppress(DataLossError):
            say(episode_lines(recording(events, wanted), decoder(opened.settings.model.path)))
            return
    say(dumps(record) for record in _records_of(opened, facts, name, wanted))


# ------------------------------------------------------------------------------------------------------ for people


def figure_lines(found: Figures) -> Iterator[str]:
    """The figures as a person reads them; "-" for what the log can't support."""
    def spread(value: Quantiles | None) -> str:
        return f"p50 {value.p50:.2f} s, p95 {value.p95:.2f} s" if value else "-"

    first = found.time_to_trainable_batch_s
    yield f"time to trainable batch  {first:.2f} s" if first is not None else "time to trainable batch  -"
    yield f"batch interval           {spread(found.batch_interval_s)}"
    yield f"batch span               {spread(found.batch_span_s)}"
    share = f", {100 * found.trainer_wait_share:.0f} % of its time" if found.trainer_wait_share is not None else ""
    yield f"trainer wait             {spread(found.trainer_wait_s)}{share}"
    lag = found.lag
    yield f"lag of trained tokens    {f'mean {lag.mean:.2f}, p95 {lag.p95:.0f}, max {lag.max:.0f}' if lag else '-'}"
    yield f"tokens per second        {f'{found.tokens_per_s:.0f}' if found.tokens_per_s is not None else '-'}"
    yield from waits_lines(found.waits)
    for window in found.rewards:
        mean = f"{window.mean:.3f}" if window.mean is not None else "-"
        yield f"reward v{window.first}-{window.last}".ljust(25) + f"{mean} over {window.groups} closed groups"


def waits_lines(found: Waits) -> Iterator[str]:
    """Shares of time, the newest batch's straggler, and what to change."""

    def parts(shares: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) or "-"

    yield f"time of episodes         {parts(found.steps)}"
    yield f"time of engines          {parts(found.engine)}"
    first = f"; before the first batch {found.first_wait_s:.1f} s" if found.first_wait_s is not None else ""
    yield f"time of the trainer      {parts(found.trainer)}{first}"
    if found.gpu_hours is not None:
        yield f"GPU-hours                {found.gpu_hours:.2f}"
    if found.stragglers:
        last = found.stragglers[-1]
        yield (f"straggler of batch {last.batch}".ljust(25) + f"{last.group}/{last.slot} (task {last.task}): "
               f"{last.state}, {last.state_s:.1f} s of {last.open_s:.1f} s")  # fmt: skip
    yield f"bottleneck               {found.bottleneck or 'none'}: {found.advice}"


def status_lines(run: str, found: State, letters: DeadLetters, waits: Waits) -> Iterator[str]:
    """Where the run stands, and who waits for what."""
    yield f"run         {run}"
    yield f"version     {found.version} committed, {found.published} published; newest batch {found.batch}"
    closed = ", ".join(f"{name} {n}" for name, n in found.closed.items()) or "none"
    yield f"groups      {found.open_groups} open, {found.candidates} candidates wait; closed: {closed}"
    for worker in found.workers:
        alive = "" if worker.alive else ", gone"
        yield (f"worker      {worker.worker} ({worker.incarnation[:8]}) serves {worker.version}, {worker.free} of "
               f"{worker.capacity} slots free, heartbeat {seconds(worker.heard_s)} ago{alive}")  # fmt: skip
    for role, ago in found.signs_s.items():
        yield f"{role:11} {f'last wrote {seconds(ago)} ago' if ago is not None else 'has written nothing'}"
    yield f"dead        {letters_text(letters)}"
    yield f"held up by  {found.held_up_by}"
    yield from waits_lines(waits)


def letters_text(letters: DeadLetters) -> str:
    """The dead letters in one sentence."""
    if letters.newest is None:
        return "no letters"
    kinds = ", ".join(f"{n} {kind} of {topic}" for (kind, topic), n in letters.by_kind.most_common())
    most = f"at most {letters.count} letters, the newest {letters.read}"
    count = f"{letters.count} letters" if letters.exact else most
    new = letters.newest
    return f"{count}: {kinds}; newest {new.at} about {new.origin}: {new.reason}"


def letters_row(letters: DeadLetters) -> dict[str, Any]:
    """The dead letters as one JSON object."""
    kinds = [{"kind": kind, "topic": topic, "count": n} for (kind, topic), n in letters.by_kind.most_common()]
    row: dict[str, Any] = jsonable(letters)
    return row | {"by_kind": kinds}


# ------------------------------------------------------------------------------------------------------ the pieces


def _site(bootstrap: str | None, config: Path | None) -> tuple[dict[str, Any], str]:
    site = load_site(config, bootstrap)
    return kafka_config(site), site.prefix


def opened_run(run: str, bootstrap: str | None, config: Path | None) -> Run:
    """The run at the address that options, file or environment give. Raises BrokerUnreachable, RunNotFound."""
    return open_run(run, *_site(bootstrap, config))


def _run_row(name: str, bootstrap: str | None, config: Path | None) -> Row:
    """Of a run of the list: from `policy` alone, which is small."""
    run = opened_run(name, bootstrap, config)
    records = list(run.events(POLICY))
    newest = max((event.version for _, event in records if isinstance(event, Version)), default=None)
    return {"run": name, "version": newest, "model": run.settings.model.path,
            "created_ms": records[0][0].timestamp_ms, "newest_ms": records[-1][0].timestamp_ms}  # fmt: skip


def _start(text: str) -> Start:
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text)
    raise SettingsError(f"--from {text!r}: give an offset, a time such as 2026-01-31T12:00, earliest or latest")


def _where(rows: list[Row], conditions: list[str]) -> list[Row]:
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if rows and name not in rows[0]:
            raise SettingsError(f"--where {condition!r}: give column=value, or a column alone for rows where it says "
                                f"something; columns are {', '.join(rows[0])}")  # fmt: skip
        rows = [row for row in rows if (_matches(row.get(name), value) if equals else row.get(name))]
    return rows


def _matches(held: Any, value: str) -> bool:
    if isinstance(held, bool):
        return value.lower() in (("true", "yes", "1") if held else ("false", "no", "0"))
    if isinstance(held, int | float):
        with contextlib.suppress(ValueError):
            return float(value) == float(held)
    return value == ("" if held is None else str(held))


def _records_of(run: Run, facts: list[Fact[Any]], kind: str, wanted: str) -> Iterator[dict[str, Any]]:
    """Everything on the log about one thing: the records that decided it, and an episode's own events."""
    group, _, slot = wanted.rpartition("/") if kind == "episodes" else (wanted, "", "")
    names = {
        "episodes": ("group", group), "groups": ("group", group), "batches": ("batch", wanted),
        "versions": ("version", wanted), "replicas": ("incarnation", wanted), "tasks": ("task", wanted),
    }  # fmt: skip
    field, value = names[kind]
    for fact in facts:
        held = getattr(fact.event, field, None)
        if str(getattr(held, "id", held)) == value and slot in ("", str(getattr(fact.event, "slot", slot))):
            yield {"at": str(fact), "time_ms": fact.timestamp_ms, "kind": type(fact.event).__name__,
                   "event": event_row(fact.event)}  # fmt: skip
    if kind == "episodes":
        for record, event in run.events(TRAJECTORIES):
            if getattr(event, "group", None) == group and str(getattr(event, "slot", None)) == slot:
                yield record_row(record, event, run.topics)


def say(lines: Any) -> None:
    """Print each line."""
    for line in lines:
        print(line)


@contextlib.contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """Ctrl-C, and a reader of our output that has seen enough, end it in silence."""
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
    finally:
        signal.signal(signal.SIGINT, before)
