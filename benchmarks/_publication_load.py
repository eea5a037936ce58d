"""Weights to publish, and a replica to publish them to: what `benchmarks.publication` runs in processes of their own.

`python -m benchmarks._publication_load RUN --bootstrap HOST:PORT --model FOLDER|synthetic:N --checkpoint FILE` is the
replica (with `--direct HOST:PORT`, weights come to it over a socket). It follows the run by the worker's own receiver.
With a model folder it samples all the while (a full engine of four requests); with synthetic weights it only holds
them. It prints one JSON line for each thing that happened.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.lifeline import die_with_parent
from headrace.producers.receiver import Receiver
from headrace.schemas import delta
from headrace.schemas.topics import WEIGHTS, RunTopics
from headrace.streams.log.direct import Following, HandedOver

from . import harness
from .baselines import reload

Arrays = dict[str, NDArray[Any]]
BLOCK = 1 << 24  # elements of one tensor, and of what is drawn at a time
REQUESTS, PROMPT, NEW = 4, 32, 96


# ------------------------------------------------------------------------------------------------------ the weights


def synthetic(elements: int) -> Arrays:
    """bf16 weights of so many elements: normal, deviation 0.03; one block, turned on for each tensor."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(min(BLOCK, elements), np.float32) * np.float32(0.03)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    return {f"layer.{i}": np.roll(block, 7919 * i)[: min(BLOCK, elements - i * BLOCK)]
            for i in range(-(-elements // BLOCK))}  # fmt: skip


def adamw_changes(state: delta.State, share: float, seed: int) -> delta.Changes:
    """What a step changes of bf16 weights: each master moves by about the learning rate, up or down, so a weight
    changes with probability rate / (unit in its last place), and by more than a unit where the rate is greater. The
    rate is the one at which `share` of all weights change."""
    sample = np.concatenate([t.bits.reshape(-1)[: 1 << 20] for t in state.values()])
    octaves = np.bincount(sample >> 7 & 0xFF, minlength=256) / sample.size
    units = np.ldexp(1.0, np.arange(256) - 134)
    low, high = -30.0, 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(octaves @ np.minimum(1.0, 10**middle / units)) < share else (low, middle)
    moves = 10**high / units
    chance, steps = np.minimum(1.0, moves).astype(np.float32), np.clip(np.rint(moves), 1, 64).astype(np.int32)
    rng = np.random.default_rng(seed)
    changes: delta.Changes = {}
    for name, tensor in state.items():
        bits, places, values = tensor.bits.reshape(-1), [], []
        for start in range(0, bits.size, 1 << 22):
            part = bits[start : start + (1 << 22)]
            octave = part >> 7 & 0xFF
            here = np.flatnonzero(rng.random(part.size, np.float32) < chance[octave])
            old, step = part[here].astype(np.int32), steps[octave[here]]
            size = (old & 0x7FFF) + np.where(rng.random(here.size) < 0.5, step, -step)
            values.append((np.abs(size) | (old & 0x8000) ^ np.where(size < 0, 0x8000, 0)).astype(np.uint16))
            places.append(here + start)
        changes[name] = (np.concatenate(places), np.concatenate(values))
    return changes


# ------------------------------------------------------------------------------------------------------ the replica


class Held:
    """Stands for an engine where there is none of that size: weights that are overwritten in place."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.version = arrays, 0

    def served_arrays(self) -> Arrays:
        return self.arrays

    def apply(self, version: int, changes: Mapping[str, delta.Change]) -> None:
        delta.write(delta.as_state(self.arrays, "bfloat16"), dict(changes))
        self.version = version

    def place(self, name: str, bits: NDArray[Any]) -> None:
        self.arrays[name][:] = bits

    def step(self) -> int:
        time.sleep(0.002)
        return 1


class Sampled:
    """The real engine, full of requests: each that ends is followed by another."""

    def __init__(self, folder: str) -> None:
        import torch

        from headrace.producers.engines.hf import HfEngine

        torch.set_num_threads(1)
        self._engine = HfEngine(folder, slots=REQUESTS, max_tokens=PROMPT + NEW)
        self._rng, self._number = np.random.default_rng(0), 0
        self.served_arrays, self.apply = self._engine.served_arrays, self._engine.apply

    @property
    def version(self) -> int:
        return self._engine.version

    def place(self, name: str, bits: NDArray[Any]) -> None:
        """As a reload in place does: the served copy, and the parameter that computes."""
        import torch

        engine = self._engine
        with torch.no_grad():
            engine._bits[name][...] = bits
            engine._parameters[name].copy_(engine._served[name])

    def step(self) -> int:
        while self._engine.active < REQUESTS:
            self._number += 1
            prompt = self._rng.integers(10, 200, PROMPT).tolist()
            self._engine.submit(GenerationRequest(str(self._number), prompt, Sampling(1.0, NEW, self._number)))
        return sum(len(one.token_ids) for one in self._engine.step())


def memory(what: str) -> int:
    """Bytes: VmRSS now, or VmHWM since the last `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) << 10
    return 0


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    for name in ("bootstrap", "model", "checkpoint", "parent", "name"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--direct")
    given = parser.parse_args()
    die_with_parent(int(given.parent))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kind, _, size = given.model.partition(":")
    target: Any = Held(synthetic(int(size))) if kind == "synthetic" else Sampled(given.model)
    topics, ahead = RunTopics(given.run), HandedOver() if given.direct else None
    following = Following(given.direct, topics.name(WEIGHTS), ahead) if ahead is not None else None
    receiver = Receiver({"bootstrap.servers": given.bootstrap}, topics, worker=given.name, incarnation=given.name,
                        audit_s=1e9, ahead=ahead)  # fmt: skip
    if not receiver.load(target, stop):
        return 0
    for _ in range(20):
        target.step()
    say("loaded", t=time.time())
    for _ in range(3):  # the baseline: everything stands still while it loads
        began = time.monotonic()
        reload.load(Path(given.checkpoint), target.place)
        say("reloaded", pause_s=time.monotonic() - began)
        target.step()
    forget_peak()
    before, tokens, told = memory("VmRSS"), 0, 0.0
    say("ready", t=time.time())
    while not stop.is_set():
        for clock in receiver.apply_ready(target):
            times = {name.removesuffix("_ms"): getattr(clock, name) for name in
                     ("published_ms", "fetched_ms", "decoded_ms", "paused_ms", "applied_ms", "resumed_ms",
                      "first_token_ms")}  # fmt: skip
            say("clock", version=clock.version, extra=memory("VmHWM") - before, **times)
            forget_peak()
            before = memory("VmRSS")
        sampled = target.step()
        tokens += sampled
        if sampled:
            receiver.sampled(target.version)
        if (now := time.time()) - told > 0.05:
            told = now
            say("tokens", t=now, n=tokens)
    receiver.close()
    if following is not None:
        following.close()
    return 0


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


@contextlib.contextmanager
def replica(run: str, bootstrap: str, model: str, checkpoint: Path, name: str, direct: str | None = None
            ) -> Iterator[Replica]:  # fmt: skip
    import os

    argv: list[str | Path] = [sys.executable, "-m", "benchmarks._publication_load", run, "--bootstrap", bootstrap,
                             "--model", model, "--checkpoint", checkpoint, "--parent", str(os.getpid()), "--name",
                             name, *(["--direct", direct] if direct else [])]  # fmt: skip
    with harness.Started(argv, env={"OMP_NUM_THREADS": "1"}) as process:
        yield Replica(process)


class Replica:
    """What a replica's process has said."""

    def __init__(self, process: harness.Started) -> None:
        self._process = process

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = self._process.output().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [one for one in found if one["event"] == event]

    def wait_for(self, event: str, where: Callable[[dict[str, Any]], bool] = lambda _: True,
                 timeout_s: float = 900.0) -> dict[str, Any]:  # fmt: skip
        end = time.monotonic() + timeout_s
        while True:
            for one in self.said(event):
                if where(one):
                    return one
            if not self._process.alive() or time.monotonic() > end:
                raise harness.CannotMeasure(f"a replica never said {event!r}:\n{self._process.output()[-2000:]}")
            time.sleep(0.05)

    def tokens_per_s(self, begin: float, end: float) -> float | None:
        """Between two times; None where less than two counts fall between."""
        counts = [(one["t"], one["n"]) for one in self.said("tokens") if begin <= one["t"] <= end]
        if len(counts) < 2 or counts[-1][0] == counts[0][0]:
            return None
        return float((counts[-1][1] - counts[0][1]) / (counts[-1][0] - counts[0][0]))


if __name__ == "__main__":
    raise SystemExit(main())
