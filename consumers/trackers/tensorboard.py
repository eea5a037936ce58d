"""TensorBoard: event files in a folder. What is drawn is what the files say, so nothing is drawn twice.

A point is one record of the file, written and flushed at once: a crash leaves it whole or torn, and TensorBoard's own
reader leaves a torn one out, as this module does.
"""

from __future__ import annotations

from pathlib import Path

from headrace.schemas.errors import SettingsError

from ..curves import Point

# The name of the tag that marks a version's point; evaluations have another one.
VERSIONS, EVALUATIONS = "headrace/version", "headrace/evaluation"


class TensorBoard:
    """Draws into `folder`, which belongs to one run. Raises SettingsError where TensorBoard isn't installed, or the
    folder can't be written."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise SettingsError("TensorBoard isn't installed: pip install 'headrace[trackers]'") from error
        self.drawn = _drawn(folder)
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise SettingsError(f"{folder} can't be written: {error}") from error

    def draw(self, point: Point, *, evaluation: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        mark = EVALUATIONS if evaluation else VERSIONS
        values = [Summary.Value(tag=tag, simple_value=value)
                  for tag, value in {**point.values, mark: float(point.version)}.items()]  # fmt: skip
        self._writer.add_event(Event(wall_time=point.at_ms / 1000, step=point.version, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _drawn(folder: Path) -> tuple[int, int]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    newest, evaluations = -1, 0
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            tags = {value.tag for value in event.summary.value}
            newest = max(newest, event.step) if VERSIONS in tags else newest
            evaluations += EVALUATIONS in tags
    return newest, evaluations
