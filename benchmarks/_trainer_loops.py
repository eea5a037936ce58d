"""The two loops of benchmarks.trainer, each in a process of its own that does as many steps as it is told on its
standard input, and says as JSON what they took.

    python -m benchmarks._trainer_loops ours RUN HOST:PORT STATE_DIR THREADS
    python -m benchmarks._trainer_loops bare MODEL EPISODES.npz THREADS
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.schemas.topics import RunTopics
from headrace.streams.log.policy import open_settings
from headrace.trainer.loop import Trainer

from . import harness
from .baselines.pytorch_loop import Loop, padded

ROWS = 8  # completions in a micro-batch of the bare loop


def ours(run: str, bootstrap: str, folder: str) -> Callable[[], dict[str, Any]]:
    """The trainer as `headrace start trainer` runs it, from manifest to publication and checkpoint."""
    kafka, topics = {"bootstrap.servers": bootstrap}, RunTopics(run)
    trainer = Trainer(kafka, topics, open_settings(kafka, topics).settings, Path(folder))
    trainer.start()
    honest, saving = trainer._save, [0.0]

    def save() -> None:
        began = time.perf_counter()
        honest()
        saving[0] = time.perf_counter() - began

    trainer._save = save  # type: ignore[method-assign]

    def step() -> dict[str, Any]:
        trainer.run(threading.Event(), trainer.version + 1)
        own = {f"{name}_s": spent for name, spent in trainer._seconds.items()}  # of the loop's own thread
        return {"saving_s": saving[0], **trainer._versions[trainer.version].metrics, **own}

    return step


def bare(model: str, file: str) -> Callable[[], dict[str, Any]]:
    arrays = np.load(file)
    episodes = [(arrays[f"prompt{i}"], arrays[f"tokens{i}"], arrays[f"logprobs{i}"], float(arrays["advantage"][i]))
                for i in range(len(arrays["advantage"]))]  # fmt: skip
    loop, batch = Loop(model, float(arrays["rate"])), padded(episodes, ROWS)
    return lambda: {"loss": loop.step(batch), "row_tokens": sum(rows.tokens.numel() for rows in batch)}


def main(kind: str, *given: str) -> None:
    *rest, threads = given
    torch.set_num_threads(int(threads))
    if kind == "ours":
        torch.use_deterministic_algorithms(True)
    step = ours(*rest) if kind == "ours" else bare(*rest)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        said = step()
        print(json.dumps({**said, "step_s": time.perf_counter() - began, "peak": harness.peak_rss()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
