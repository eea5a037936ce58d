"""The trainer of a run whose batches are written by hand, and what the log says of it."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace.streams.log.policy import open_settings
from headrace.trainer.loop import run_trainer
from headrace.trainer.publish import PolicyHead, read_policy
from tests.synthetic_run import SyntheticRun


def train(run: SyntheticRun, state_dir: Path, stop_at: int, threads: int = 1) -> None:
    run_trainer(run.kafka, run.topics, run.settings, threading.Event(), state_dir, stop_at, threads=threads)


def head(run: SyntheticRun) -> PolicyHead:
    return read_policy(run.kafka, run.topics, open_settings(run.kafka, run.topics))
