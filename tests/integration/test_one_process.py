"""Trainer and engine in one process, on each of two ranks: weights go from one to the other in memory, and the record
of each version to the log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.models import tiny_model
from headrace.producers.engines.hf import HfEngine
from headrace.producers.receiver import Receiver
from headrace.schemas.topics import RunTopics
from tests.publishing import DTYPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def test_an_engine_sleeps_while_its_process_trains_and_wakes_with_the_parts_of_all_ranks(
    kafka: dict[str, Any], run_name: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", hidden=32)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "tests.two_engines", str(model), kafka["bootstrap.servers"], run_name],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    for said in (first, second):
        assert said["awake"] > 0 and said["asleep"] == [0, 0], "weights, keys and values are given up"
        assert said["refused"] == ["EngineError", "WeightsRefused"] * 2
        assert said["tokens"][-1] == said["fresh"], "as an engine that was never anything else"
    assert first["hashes"] == second["hashes"] and len(set(first["hashes"])) == 2
    assert first["hashes"][-1] == first["published"]
    follower = HfEngine(model, slots=1, max_tokens=64, dtype=DTYPE)  # elsewhere, by the log
    receiver = Receiver(kafka, RunTopics(run_name))
    assert receiver.load(follower) and follower.version == 2, "its hash is the record's, so the same bits"
    receiver.close()
