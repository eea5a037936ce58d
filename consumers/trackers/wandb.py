"""Weights & Biases, offline unless its own environment variables say otherwise: no data leaves by itself.

The run's name here is its id there. What is drawn is what W&B holds: offline its files, which a process of its own
writes a little later, online the summary of the run. All curves are over `version`, so an evaluation that comes late
still has its place. Where this process is killed and another begins before W&B's has written the rest, a row may be
there twice, with the same version and the same values.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from headrace.schemas.errors import SettingsError

from ..curves import Point

# Rows say where they stand, for whoever draws on: the newest version, and how many evaluations.
VERSIONS, EVALUATIONS = "headrace/version", "headrace/evaluations"
# W&B's files are LevelDB logs: blocks of records framed by (checksum, size, kind), behind a header of its own.
_HEADER, _BLOCK, _FRAME = 7, 32_768, struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


class WeightsAndBiases:
    """Draws into `folder`. Raises SettingsError where wandb isn't installed, or refuses."""

    def __init__(self, folder: Path, run: str, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SettingsError("wandb isn't installed: pip install 'headrace[trackers]'") from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            drawn = [row for file in sorted(folder.glob(f"wandb/offline-run-*-{run}/*.wandb")) for row in rows(file)]
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # else it advertises that to standard error
            quiet = wandb.Settings(silent=True, x_disable_stats=True, console="off")
            self._run = wandb.init(id=run, name=run, project=project, dir=str(folder), resume="allow", settings=quiet,
                                   mode=None if "WANDB_MODE" in os.environ else "offline")  # fmt: skip
        except (wandb.Error, OSError) as error:
            raise SettingsError(f"W&B can't draw into {folder}: {error}") from error
        drawn.append(dict(self._run.summary))  # online, after a resume: of what the server holds
        self.drawn = (max(int(row.get(VERSIONS, -1)) for row in drawn),
                      max(int(row.get(EVALUATIONS, 0)) for row in drawn))  # fmt: skip
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def draw(self, point: Point, *, evaluation: bool) -> None:
        newest, evaluations = self.drawn
        self.drawn = (newest, evaluations + 1) if evaluation else (point.version, evaluations)
        where = {VERSIONS: self.drawn[0], EVALUATIONS: self.drawn[1]}
        self._run.log({"version": point.version, "at_ms": point.at_ms, **point.values, **where}, commit=True)

    def close(self) -> None:
        self._run.finish()


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The history of one of W&B's offline files. What a killed process left unfinished at its end is left out."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    record_of = cast("Any", wandb_internal_pb2).Record.FromString

    data, at, parts = file.read_bytes(), _HEADER, b""
    while at + _FRAME.size <= len(data):
        if (rest := _BLOCK - at % _BLOCK) < _FRAME.size:
            at += rest
            continue
        _, size, kind = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + size
        if not kind or end > len(data):
            return
        parts += data[at + _FRAME.size : end]
        at = end
        if kind in (_WHOLE, _LAST):
            try:
                record = record_of(parts)
            except DecodeError:
                return
            parts = b""
            if record.history.item:
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
