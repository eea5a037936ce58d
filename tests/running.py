"""`headrace run` as a person starts it, on a tiny model: for tests that need the whole system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from headrace.models import tiny_model
from headrace.schemas.codec import decode
from headrace.schemas.errors import LogError
from headrace.schemas.topics import POLICY, RunTopics
from headrace.streams.log.reader import last_record

TESTS = Path(__file__).parent
PROGRESS_S = 240.0  # a few versions more, on a slow and busy machine

CONFIG = """
run = "{run}"
seed = 1
[model]
path = "{model}"
dtype = "bfloat16"
[tasks]
source = "jsonl"
path = "{tasks}"
score = "scorers:vowels"
[rollout]
group_size = 4
max_new_tokens = 24
lease_timeout_s = 4
[batch]
groups = 3
max_lag = 1
[optimizer]
learning_rate = 3e-4
[checkpoint]
every = 3
[weights]
snapshot_every = 4
[site]
worker_threads = 1
trainer_threads = 1
slots = 16
max_deaths = 100
[site.kafka]
"bootstrap.servers" = "{bootstrap}"
"""


class Running:
    """`headrace run`, as a person starts it."""

    def __init__(self, folder: Path, kafka: dict[str, Any], run: str, **changes: str) -> None:
        """`changes`: settings lines of CONFIG to replace, by their key (`max_lag="max_lag = 0"`)."""
        self.folder, self.kafka, self.topics = folder, kafka, RunTopics(run)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("a", "bb", "so", "tree")))
        self.config = folder / "run.toml"
        text = CONFIG.format(run=run, model=tiny_model(folder / "model"), tasks=tasks,
                             bootstrap=kafka["bootstrap.servers"])  # fmt: skip
        for key, line in changes.items():
            assert f"\n{key} = " in text, key
            text = "\n".join(line if old.startswith(f"{key} = ") else old for old in text.splitlines())
        self.config.write_text(text)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        environment = {**os.environ, "HEADRACE_HOME": str(self.folder / "home"), "PYTHONPATH": str(TESTS / "unit")}
        with open(self.folder / "out", "ab") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "headrace", "run", str(self.config), *options],
                                            stdout=out, stderr=out, env=environment,
                                            stdin=subprocess.DEVNULL)  # fmt: skip

    def finish(self, within_s: float = 450.0) -> int:
        """Wait for the end; the exit code."""
        assert self.process is not None
        return self.process.wait(within_s)

    def role(self, role: str) -> psutil.Process | None:
        assert self.process is not None
        if role == "supervisor":
            return psutil.Process(self.process.pid)
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "start" in words and role in words:
                return child
        return None

    def version(self) -> int:
        try:
            record = last_record(self.kafka, self.topics.name(POLICY), 0)
        except LogError:  # not created yet
            return -1
        event = decode(record.value) if record is not None else None
        return int(getattr(event, "version", -1))

    def wait_for(self, version: int) -> None:
        assert self.process is not None
        end = time.monotonic() + PROGRESS_S
        while self.version() < version:
            assert self.process.poll() is None, f"the run ended:\n{self.said()}"
            assert time.monotonic() < end, f"no version {version} within {PROGRESS_S:g} s:\n{self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        logs = self.folder / "home" / "runs" / self.topics.run / "logs"
        parts = [(self.folder / "out").read_text()[-3000:]]
        parts += [f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in sorted(logs.glob("*.log"))]
        return "\n".join(parts)

    def drain(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(120) == 0, self.said()

    def kill_all(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
