"""`headrace export`: the tables of a run as files. It writes nothing, to no topic.

Which tables there are and what they hold is `headrace.consumers.frames`' to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.consumers.frames import SPECS, export

from .plain import dumps, table
from .reading import Bootstrap, ConfigOption, Json, RunArgument, opened_run, say


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("export")(export_command)


def export_command(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="where to write; made if it isn't there", metavar="DIR")],
    only: Annotated[
        list[str] | None, typer.Option("--table", help=f"{', '.join(SPECS)}; repeat it; without it, all")
    ] = None,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Write a run's tables as Parquet, one file each: DIR/tokens.parquet, ... Earlier exports there are replaced."""
    source = opened_run(run, bootstrap, config).snapshot()
    rows = [{"table": made.name, "rows": count, "bytes": file.stat().st_size, "file": str(file)}
            for made, file, count in export(source, folder, only or ())]  # fmt: skip
    say([dumps(rows)] if as_json else table(rows))
