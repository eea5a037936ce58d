"""Trackers on a real broker: a tracker that is attached afterwards shows what one shows that was there from the start,
was killed, and was started again; and each point is what the raw events say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.consumers import open_run
from headrace.consumers.trackers import Tracker, track
from headrace.consumers.trackers.tensorboard import TensorBoard
from headrace.consumers.trackers.wandb import rows
from headrace.schemas.events import GroupClosed, Manifest, Score, Version
from headrace.schemas.topics import BATCHES, EVALS, GROUPS, POLICY, RunTopics
from tests.command import Command
from tests.scripted_run import ScriptedRun, scripted_settings

Points = dict[str, list[tuple[int, float]]]  # name: (version, value) in order


@pytest.fixture
def scripted(kafka: Mapping[str, Any], run_name: str) -> Iterator[ScriptedRun]:
    run = ScriptedRun(kafka, RunTopics(run_name), scripted_settings())
    yield run
    run.close()


def score(run: ScriptedRun, version: int, mean: float) -> None:
    run.send(EVALS, "held-out", Score("held-out", version, b"", 10, 10, mean, 0.05, "{}", "{}", 1_700_000_000_000))
    run.flush()


def tensorboard_points(folder: Path) -> Points:
    """As TensorBoard itself shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(one.step, round(one.value, 6)) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def wandb_points(folder: Path) -> Points:
    """The rows of W&B's own offline files, in its order of files."""
    out: Points = defaultdict(list)
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for row in rows(file):
            for name in row.keys() - {"version", "at_ms"}:
                if not name.startswith(("_", "headrace/")):
                    out[name].append((row["version"], round(row[name], 6)))
    return dict(out)


def killed_on_the_way(run: ScriptedRun, option: str, folder: Path) -> None:
    """A follower from the start on, until it has drawn something; then it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "track", run.topics.run, option, str(folder), "--follow", "--bootstrap",
         str(run.kafka["bootstrap.servers"])], env={**os.environ, "WANDB_SILENT": "true"})  # fmt: skip
    try:
        end, drawn = time.monotonic() + 60.0, tensorboard_points if option == "--tensorboard" else wandb_points
        while not folder.exists() or not drawn(folder):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    finally:
        helpers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not psutil.wait_procs(helpers, timeout=60)[1]  # W&B's own, which writes what it had


@pytest.mark.slow
@pytest.mark.parametrize(("option", "points"), [("--tensorboard", tensorboard_points), ("--wandb", wandb_points)])
def test_tracker_attached_afterwards_shows_the_curves_of_one_that_was_killed_and_came_again(
    scripted: ScriptedRun, headrace: Command, tmp_path: Path, option: str, points: Any
) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    pytest.importorskip("openai")  # at whose sight W&B has something to say
    scripted.until(2)
    score(scripted, 0, 0.25)
    killed_on_the_way(scripted, option, early)
    scripted.until(4)
    score(scripted, 2, 0.5)  # of a version that was drawn long ago
    for folder in (early, late, late):  # the second time there is nothing to do
        row = headrace.json("track", scripted.topics.run, option, str(folder))
    assert row["points"] == 0
    shown = points(late)
    assert points(early) == shown
    assert [version for version, _ in shown["publication/bytes"]] == [0, 1, 2, 3, 4]
    assert shown["eval/held-out"] == [(0, 0.25), (2, 0.5)]


def test_points_are_what_the_raw_events_say(scripted: ScriptedRun, tmp_path: Path) -> None:
    scripted.until(3)
    run = open_run(scripted.topics.run, scripted.kafka)
    tracker: Tracker = TensorBoard(tmp_path)
    assert track(run, tracker) == 4
    tracker.close()
    shown = tensorboard_points(tmp_path)

    manifests = [event for _, event in run.events(BATCHES) if isinstance(event, Manifest)]
    committed = {e.version: e.committed_ms for _, e in run.events(POLICY) if isinstance(e, Version)}
    closures = [(record, event) for record, event in run.events(GROUPS) if isinstance(event, GroupClosed)]
    before: dict[int, int] = {}
    for manifest in manifests[:3]:
        now = {one.partition: one.offset for one in manifest.positions}
        rewards = [slot.reward for record, event in closures for slot in event.slots
                   if before.get(record.partition, 0) <= record.offset < now[record.partition]
                   and slot.counted and slot.reward is not None]  # fmt: skip
        before, batch = now, manifest.batch
        assert dict(shown["reward/episodes"])[batch] == len(rewards) > 0
        assert dict(shown["reward/mean"])[batch] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
        assert dict(shown["lag/max"])[batch] == max(ref.max_lag for ref in manifest.groups)
        assert dict(shown["step/seconds"])[batch] == pytest.approx((committed[batch] - manifest.decided_ms) / 1000)


def test_wrong_use_is_one_clear_line(headrace: Command) -> None:
    code, _, said = headrace("track", "r")
    assert code == 2 and said == "headrace: give either --tensorboard DIR or --wandb DIR\n"
