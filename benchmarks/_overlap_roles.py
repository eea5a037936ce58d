"""Worker and trainer of `benchmarks.overlap`: the real ones, slowed to the pace of devices that are not here.

The worker's engine samples for real, and each step then lasts `--step-s`; how long an answer becomes is drawn, with a
long tail. The trainer trains for real, and each batch then lasts `--train-s`. Both sleep for what is left, so that two
roles on one machine don't slow each other as two devices wouldn't. The last line of each is JSON: how many seconds it
was beyond its pace, because the machine couldn't keep it.

`python -m benchmarks._overlap_roles worker|trainer RUN --bootstrap HOST:PORT ...`
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.producers.engines import GenerationRequest, Progress
from headrace.producers.engines.hf import HfEngine
from headrace.producers.lifeline import die_with_parent
from headrace.producers.receiver import Receiver
from headrace.producers.worker import Worker
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics
from headrace.streams.log.policy import open_settings
from headrace.trainer.fetch import Batch
from headrace.trainer.loop import Trainer
from headrace.trainer.step import StepReport

MEDIAN_TOKENS, SPREAD = 20, 0.5  # of an answer: lognormal, cut at the run's budget


class Pace:
    """Makes each call of something last so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.beyond_s = self.paced_s = 0.0

    def rest(self, began: float) -> None:
        took = time.monotonic() - began
        self.paced_s += self._seconds
        self.beyond_s += max(0.0, took - self._seconds)
        time.sleep(max(0.0, self._seconds - took))


class PacedEngine(HfEngine):
    """See `producers.engines.Engine`."""

    def __init__(self, *args: Any, step_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pace = Pace(step_s)

    def submit(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        tokens = round(MEDIAN_TOKENS * random.Random(sampling.seed).lognormvariate(0.0, SPREAD))
        sampling = replace(sampling, max_new_tokens=max(1, min(tokens, sampling.max_new_tokens)))
        super().submit(replace(request, sampling=sampling))

    def step(self) -> list[Progress]:
        began, progress = time.monotonic(), super().step()
        if progress:
            self.pace.rest(began)
        return progress


class PacedTrainer(Trainer):
    def __init__(self, *args: Any, train_s: float) -> None:
        super().__init__(*args)
        self.pace = Pace(train_s)

    def _train(self, batch: Batch) -> StepReport:
        began, report = time.monotonic(), super()._train(batch)
        self.pace.rest(began)
        return report


def worker(kafka: dict[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
           given: argparse.Namespace) -> Pace:  # fmt: skip
    def load(slots: int) -> PacedEngine:
        return PacedEngine(settings.model.path, slots=slots, max_tokens=settings.model.max_length,
                           dtype=settings.model.dtype, step_s=given.step_s)  # fmt: skip

    engine, incarnation = load(given.slots), uuid.uuid4().hex
    print("loaded", flush=True)
    receiver = Receiver(kafka, topics, worker="w", incarnation=incarnation, initial=lambda: load(1).served_arrays())
    try:
        if receiver.load(engine, stop):
            Worker(kafka, topics, settings, engine, receiver, name="w", incarnation=incarnation,
                   capacity=2 * given.slots).run(stop)  # fmt: skip
    finally:
        receiver.close()
    return engine.pace


def trainer(kafka: dict[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
            given: argparse.Namespace) -> Pace:  # fmt: skip
    torch.use_deterministic_algorithms(True)
    paced = PacedTrainer(kafka, topics, settings, given.state_dir, train_s=given.train_s)
    try:
        paced.start()
        paced.run(stop, given.versions)
    finally:
        paced.close()
    return paced.pace


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["worker", "trainer"])
    parser.add_argument("run")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--versions", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--train-s", type=float, default=0.0)
    parser.add_argument("--state-dir", type=Path, default=Path())
    given = parser.parse_args()
    die_with_parent(given.parent)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kafka = {"bootstrap.servers": given.bootstrap}
    topics = RunTopics(given.run)
    run = worker if given.role == "worker" else trainer
    pace = run(kafka, topics, open_settings(kafka, topics).settings, stop, given)
    print(json.dumps({"paced_s": pace.paced_s, "beyond_s": pace.beyond_s}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
