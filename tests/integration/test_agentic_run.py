"""A whole run: the tasks of examples/terminal in Docker sandboxes, a real model through vLLM on CPU, real batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.consumers import audit, open_run
from headrace.models import smollm2
from headrace.producers.sandboxes.docker import LABEL
from headrace.settings import home
from tests.sandboxes import backend_of, within

EXAMPLE = Path(__file__).parents[2] / "examples/terminal"
VERSIONS = 2


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_agent_at_a_terminal_is_trained_end_to_end_and_the_ledger_closes(
    kafka: dict[str, Any], run_name: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    backend: Any = backend_of("docker")
    text = (EXAMPLE / "run.toml").read_text()
    changes = {'run = "terminal"': f'run = "{run_name}"', 'path = "model"': f'path = "{smollm2(home() / "models")}"',
               'path = "."': f'path = "{EXAMPLE}"', "group_size = 4": "group_size = 2",
               "max_new_tokens = 512": "max_new_tokens = 160", "max_turns = 8": "max_turns = 3\ntemperature = 0.3",
               "[site]": f'[site]\nstop_at = {VERSIONS}\nstate_dir = "{tmp_path}"'}  # fmt: skip
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    config = tmp_path / "run.toml"
    config.write_text(f'{text}\n[site.kafka]\n"bootstrap.servers" = "{kafka["bootstrap.servers"]}"\n')
    done = subprocess.run([sys.executable, "-m", "headrace", "run", str(config)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=2300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = open_run(run_name, kafka)
    ledger = audit(run.snapshot())
    assert ledger.closes, ledger.failures
    groups = list(run.groups())
    assert len([one for one in groups if one.disposition == "batched"]) >= VERSIONS * 2
    episodes = run.table("episodes").to_pandas()
    ended = episodes[episodes.outcome.isin(["model_success", "model_failure"])]
    assert len(ended) >= VERSIONS * 2 * 2 and set(ended.boundary) <= {"model", "none"}
    calls = [one for detail in run.table("spans").to_pandas().detail.dropna()
             for one in json.loads(detail).get("calls", ())]  # fmt: skip
    print(f"{len(ended)} episodes, {len(calls)} commands; rewards {sorted(ended.reward)}")
    assert calls, "the model called no tool: nothing of the sandboxes' way to a batch was shown"
    assert within(30, lambda: not backend.api.containers(all=True, filters={"label": LABEL}))
