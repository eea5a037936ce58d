"""A trainer of two processes on the real broker: `headrace start trainer` under torchrun, one of them with the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.models import tiny_model
from headrace.producers.engines.hf import HfEngine
from headrace.producers.receiver import Receiver
from headrace.schemas.settings import LoraSettings
from headrace.streams.log.policy import open_settings
from headrace.trainer.publish import read_policy
from tests.synthetic_run import SyntheticRun, run_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_processes_train_an_adapter_that_engines_apply_and_end_together(
    kafka: Mapping[str, Any], run_name: str, tmp_path: Path
) -> None:
    """Three versions; then one rank is killed."""
    model = tiny_model(tmp_path / "model", hidden=32)
    settings = run_settings(model)
    lora = settings.model.model_copy(update={"lora": LoraSettings(rank=4)})
    run = SyntheticRun(kafka, run_name, settings.model_copy(update={"model": lora}))
    run.write_random_batches(3)
    config = tmp_path / "site.toml"
    config.write_text(f'[site]\ntrainer_processes = 2\ntrainer_threads = 1\nstate_dir = "{tmp_path}"\n'
                      f'[site.kafka]\n"bootstrap.servers" = "{kafka["bootstrap.servers"]}"\n')  # fmt: skip
    command = [sys.executable, "-m", "headrace", "start", "trainer", run_name, "--config", str(config), "--parent",
               str(os.getpid())]  # fmt: skip
    with open(tmp_path / "said", "w+") as said, subprocess.Popen(command, stderr=said, stdout=said) as job:
        try:
            head = read_policy(kafka, run.topics, open_settings(kafka, run.topics))
            while head.published < 3:
                assert job.poll() is None, (tmp_path / "said").read_text()[-3000:]
                time.sleep(0.5)
                head = read_policy(kafka, run.topics, open_settings(kafka, run.topics))
            ranks = psutil.Process(job.pid).children()
            (second,) = [one for one in ranks if one.environ().get("RANK") == "1"]
            assert not [c for c in second.net_connections() if c.raddr and c.raddr.port == _port(kafka)]
            second.kill()
            assert job.wait(300) != 0
            assert not psutil.wait_procs(ranks, 60)[1], "a rank outlived its job"
        finally:
            job.kill()
    assert [json.loads(v.fingerprint)["ranks"] for v in head.versions.values()] == ["2"] * 4
    assert [p.version for p in head.publications if p.kind == "delta"] == [1, 2, 3]
    engine = HfEngine(model, slots=1, max_tokens=64, lora=run.settings.model.lora)
    first = {name: bits.copy() for name, bits in engine.served_arrays().items()}
    receiver = Receiver(kafka, run.topics)
    assert receiver.load(engine) and engine.version == 3, "its hash is that of the trainer's adapter"
    receiver.close()
    assert any((first[name] != bits).any() for name, bits in engine.served_arrays().items())
    run.close()


def _port(kafka: Mapping[str, Any]) -> int:
    return int(str(kafka["bootstrap.servers"]).rpartition(":")[2])
