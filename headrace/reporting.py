"""`headrace report`: the six questions on one page, or the same numbers for a program. It writes nothing, to no topic.

What the numbers are and what they mean is `headrace.consumers.report`'s to say.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.consumers.report import Report, gather
from headrace.consumers.report.sections import headline, sections
from headrace.schemas.errors import SettingsError

from .accounting import ledger_row
from .plain import dumps, jsonable
from .reading import Bootstrap, ConfigOption, Json, RunArgument, opened_run, say


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(report)


def report(
    run: RunArgument,
    against: Annotated[str | None, typer.Option(help="another run, to stand beside", metavar="RUN")] = None,
    out: Annotated[
        Path | None, typer.Option(help="file to write (default: RUN.html here)", metavar="FILE.html")
    ] = None,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Answer the six questions on one HTML page: readiness, freshness, alignment, reliability, publication,
    evaluation; and say where tokens and hours went, what the bottleneck is and which setting to change next."""
    found = _gathered(run, bootstrap, config)
    other = _gathered(against, bootstrap, config) if against is not None else None
    if as_json:
        row = report_row(found)
        say([dumps(row if other is None else row | {"against": report_row(other)})])
        return
    from headrace.consumers.report.page import page

    file = out or Path(f"{run}.html")
    html = page(found, other)
    try:
        file.write_text(html)
    except OSError as error:
        raise SettingsError(f"{file} can't be written: {error}") from error
    say([*verdict_lines(found), f"report      {file} ({file.stat().st_size / 1000:.0f} kB, opens without a network)"])


def verdict_lines(found: Report) -> list[str]:
    """The verdicts alone, for people."""
    marks = {True: "yes", False: "NO", None: "?"}
    return [*headline(found), *(f"{marks[s.good]:3}  {s.question} {s.verdict}" for s in sections(found))]


def report_row(found: Report) -> dict[str, Any]:
    """Every number of the page, and its verdicts."""
    row: dict[str, Any] = jsonable(found)
    bottleneck, advice = headline(found)
    verdicts = {s.key: {"question": s.question, "verdict": s.verdict, "good": s.good} for s in sections(found)}
    ledger = None if found.ledger is None else ledger_row(found.ledger)
    return row | {"ledger": ledger, "bottleneck": bottleneck, "advice": advice, "verdicts": verdicts}


def _gathered(run: str, bootstrap: str | None, config: Path | None) -> Report:
    opened = opened_run(run, bootstrap, config)
    return gather(opened.snapshot(), opened.settings, int(time.time() * 1000))
