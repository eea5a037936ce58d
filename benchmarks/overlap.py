"""What overlapping sampling and training buys, and at what lag: a short real run at max_lag 0, 1, 2 and 4.

Broker, coordinator, assembler, worker and trainer are the real ones, each a process, with a tiny model that really
samples and really trains. Their delays are modelled as if each had a device of its own, and slept, not computed: a
decoding step of 16 sequences lasts 50 ms, a batch of 4 groups of 4 episodes trains for 1.5 s, answers have a lognormal
length (median 20 tokens, cut at 64) that is drawn, not the model's. So the figures say what the *system* makes of two
such devices, not how fast any device is; where this machine couldn't keep the pace, a row says by how much.

Wall-clock runs from the publication of version 0 to the commit of the last version. Idle shares of the engine are of
its time until then, those of the trainer of the time that its versions account for; all are what `headrace status`
shows of any run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.consumers.figures import Figures, figures
from headrace.consumers.run import open_run
from headrace.consumers.tables import read_small
from headrace.models import tiny_model
from headrace.schemas.events import Publication, Version
from headrace.schemas.settings import RunSettings
from headrace.schemas.waiting import Idle, TrainerTime

from . import harness
from .harness import Result, Started
from .streams_load import create, role

LAGS = (0, 1, 2, 4)
SLOTS, GROUPS, SIBLINGS, MAX_TOKENS = 16, 4, 4, 64
STEP_S, TRAIN_S = 0.05, 1.5
VERIFIER = '''"""Scores an answer by its share of vowels."""
def score(item, text):
    return sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text))
'''


def measure(options: argparse.Namespace, result: Result) -> None:
    versions = 4 if options.quick else options.versions
    walls: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, harness.temporary_broker() as broker:
        for lag in (0, 1) if options.quick else LAGS:
            found, walls[lag], beyond = one_run(harness.kafka_of(broker), Path(folder), lag, versions)
            subject, waits = f"max_lag {lag}", found.waits
            result.row("wall-clock a version", subject, walls[lag] / versions, "s")
            for name in ("busy", *Idle):
                result.row(f"engine {name}", subject, 100 * waits.engine.get(str(name), 0.0), "%")
            for name in (TrainerTime.COMPUTE, TrainerTime.WAITING):
                result.row(f"trainer {name}", subject, 100 * waits.trainer.get(str(name), 0.0), "%")
            if found.trainer_wait_s is not None:
                result.row("trainer wait, median", subject, found.trainer_wait_s.p50, "s")
            if found.lag is not None:
                result.row("lag of trained tokens, mean", subject, found.lag.mean, "versions")
                result.row("lag of trained tokens, greatest", subject, found.lag.max, "versions")
            result.row("beyond the modelled pace, engine", subject, 100 * beyond["worker"], "%")
            result.row("beyond the modelled pace, trainer", subject, 100 * beyond["trainer"], "%")
            result.row("advice", subject, f"{waits.bottleneck or 'none'}: {waits.advice}")
    for lag in walls:
        if lag:
            result.row("times as fast as max_lag 0", f"max_lag {lag}", walls[0] / walls[lag])
    result.note(f"{versions} versions each, one run of each lag. The trainer alone needs {TRAIN_S:g} s a version; the "
                f"engine alone about {_sampling_s():.1f} s where its {SLOTS} slots are always full.")  # fmt: skip


def _sampling_s() -> float:
    """Seconds of a batch's tokens with all slots full: their mean length times the steps."""
    from ._overlap_roles import MEDIAN_TOKENS, SPREAD

    return float(MEDIAN_TOKENS * 2.718281828 ** (SPREAD**2 / 2) * GROUPS * SIBLINGS / SLOTS * STEP_S)


def rules(folder: Path, lag: int) -> RunSettings:
    (folder / "overlap_verifier.py").write_text(VERIFIER)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("a", "bb", "so", "tree")))
    return RunSettings.model_validate({
        "model": {"path": str(tiny_model(folder / "model")), "dtype": "bfloat16", "max_length": 128},
        "tasks": {"source": "jsonl", "path": str(tasks), "score": "overlap_verifier:score"},
        "rollout": {"group_size": SIBLINGS, "max_new_tokens": MAX_TOKENS, "zero_variance": "keep",
                    "lease_timeout_s": 60.0},
        "batch": {"groups": GROUPS, "max_lag": lag},
        "checkpoint": {"every": 1000},
    })  # fmt: skip


def one_run(kafka: Mapping[str, Any], folder: Path, lag: int, versions: int) -> tuple[Figures, float, dict[str, float]]:
    """Its figures up to the last version, the seconds that it took, and each role's share beyond its pace."""
    run, bootstrap = f"overlap-{lag}", str(kafka["bootstrap.servers"])
    topics = create(kafka, run, rules(folder, lag))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    def own(name: str, *more: object) -> Started:
        words = [sys.executable, "-m", "benchmarks._overlap_roles", name, run, "--bootstrap", bootstrap, "--parent",
                 str(os.getpid()), *map(str, more)]  # fmt: skip
        return Started(words, env={"PYTHONPATH": path, "HEADRACE_HOME": str(folder / run)})

    with role("assembler", run, bootstrap), role("coordinator", run, bootstrap):
        with own("worker", "--slots", SLOTS, "--step-s", STEP_S) as worker:
            worker.expect("loaded", 300.0)  # the run begins with version 0, which only the trainer publishes
            with own("trainer", "--train-s", TRAIN_S, "--versions", versions, "--state-dir", folder / run) as trainer:
                trained = trainer.wait(600.0).last_json()
            worker.signal()
            sampled = worker.wait(120.0).last_json()
    facts = read_small(open_run(run, kafka, topics.prefix).snapshot())
    ends = [f.event.committed_ms for f in facts if isinstance(f.event, Version) and f.event.version == versions]
    begin = next(fact.timestamp_ms for fact in facts if isinstance(fact.event, Publication))
    found = figures(fact for fact in facts if fact.timestamp_ms <= ends[0])
    shares = {name: one["beyond_s"] / max(1e-9, one["paced_s"]) for name, one in
              (("worker", sampled), ("trainer", trained))}  # fmt: skip
    return found, (ends[0] - begin) / 1000, shares


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=12, help="trained by each run (%(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("overlap", __doc__, measure, argv, _arguments, packages=("torch", "transformers"))


if __name__ == "__main__":
    raise SystemExit(main())
