"""`headrace track`: a run's curves in TensorBoard or Weights & Biases, during the run or afterwards. It writes to no
topic.

What the curves are is `headrace.consumers.curves`' to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.consumers.trackers import Tracker, track
from headrace.schemas.errors import SettingsError

from .plain import dumps
from .reading import Bootstrap, ConfigOption, Json, RunArgument, opened_run, say, until_interrupted


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("track")(track_command)


def track_command(
    run: RunArgument,
    tensorboard: Annotated[Path | None, typer.Option(help="folder of event files", metavar="DIR")] = None,
    wandb: Annotated[
        Path | None, typer.Option(help="folder of W&B files; offline unless WANDB_MODE says otherwise", metavar="DIR")
    ] = None,
    project: Annotated[str, typer.Option(help="W&B's project")] = "headrace",
    follow: Annotated[bool, typer.Option(help="go on as versions come, until Ctrl-C")] = False,
    as_json: Json = False,
    bootstrap: Bootstrap = None,
    config: ConfigOption = None,
) -> None:
    """Draw a run's curves, by version. Attached afterwards, or again after a crash, it draws what is missing."""
    if (tensorboard is None) == (wandb is None):
        raise SettingsError("give either --tensorboard DIR or --wandb DIR")
    opened = opened_run(run, bootstrap, config)
    tracker: Tracker
    if tensorboard is not None:
        from headrace.consumers.trackers.tensorboard import TensorBoard

        tracker = TensorBoard(tensorboard)
    else:
        from headrace.consumers.trackers.wandb import WeightsAndBiases

        assert wandb is not None
        tracker = WeightsAndBiases(wandb, run, project)
    try:
        with until_interrupted() as stop:
            drawn = track(opened, tracker, follow=follow, stop=stop)
    finally:
        tracker.close()
    where = str(tensorboard or wandb)
    say([dumps({"run": run, "points": drawn, "where": where})] if as_json else [f"{drawn} points drawn in {where}"])
