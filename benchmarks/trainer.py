"""What the trainer's step costs beside what it computes: against a bare PyTorch loop on the same batches.

Ours is the trainer as it runs: manifests and groups from a real broker, proved by hash, packed, trained, hashed,
committed, published; the bare loop pads, trains and keeps everything to itself. Both are processes that take turns of
one step, in an order that reverses each time. Forward, backward and optimizer (with clipping) are timed around the
calls themselves; what is left of a step is the trainer's own. The probe, which measures rho on 256 tokens, has a
budget of its own and is shown apart. A checkpoint is counted at a tenth, since it is due every ten versions.
Publication runs behind the next step; here a turn waits for it, and it is shown apart as well: with it, a share is the
most that it can be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.models import smollm2, tiny_model
from headrace.schemas.errors import ModelError
from headrace.schemas.settings import RunSettings
from headrace.settings import home
from headrace.trainer.step import TrainState
from tests.synthetic_run import PARTITIONS, SyntheticRun, episode

from . import harness
from .harness import CannotMeasure, Result, Row

GROUPS, SIBLINGS, PROMPT, NEW = 8, 8, 48, (32, 64)  # the settings' defaults
RATE = 1e-6
SAVED_EVERY = 10  # versions: `checkpoint.every`
COMPUTE = ("forward_s", "backward_s", "optimizer_s")


class Subject:
    """One loop in its process."""

    def __init__(self, *argv: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "benchmarks._trainer_loops", *argv],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         cwd=harness.ROOT)  # fmt: skip
        self._line("ready")

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._line("{"))
        return said

    def _line(self, begins: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begins):
                return line
        raise CannotMeasure(f"a measured loop ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(options: argparse.Namespace, result: Result) -> None:
    pairs = 2 if options.quick else options.pairs
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        model = tiny_model(folder / "model") if options.quick else _smollm2()
        broker = stack.enter_context(harness.temporary_broker())
        sampled = _sampled(model, options.threads)
        settings = _settings(model)
        run = SyntheticRun(harness.kafka_of(broker), "trainer", settings)
        stack.callback(run.close)
        for version in range(pairs + 2):  # one for the turn that warms up, one to be read ahead
            run.write_batch([[episode(slot, prompt, tokens, logprobs, [version] * len(tokens), reward)
                              for slot, (tokens, logprobs, reward) in enumerate(group)]
                             for prompt, group in sampled])  # fmt: skip
        file = _arrays(folder, sampled)
        subjects = {
            "ours": Subject("ours", "trainer", broker.bootstrap, str(folder / "state"), str(options.threads)),
            "bare": Subject("bare", str(model), str(file), str(options.threads)),
        }
        for one in subjects.values():
            stack.callback(one.close)
        steps = harness.alternate({name: one.step for name, one in subjects.items()}, pairs)
    _tell(result, steps, sum(len(tokens) for _, group in sampled for tokens, _, _ in group))
    result.note(f"{GROUPS} groups of {SIBLINGS}, prompts of {PROMPT} tokens, {NEW[0]} to {NEW[1]} sampled, "
                f"{options.threads} threads, {'a tiny model' if options.quick else 'SmolLM2-135M'} in float32 on "
                f"weights rounded to bfloat16; {pairs} alternating pairs. Intervals of ratios: 95 % bootstrap over "
                "pairs.")  # fmt: skip


Sampled = list[tuple[Any, list[tuple[Any, Any, float]]]]  # prompt, and of each sibling tokens, logprobs, reward


def _smollm2() -> Path:
    try:
        return smollm2(home() / "models")
    except ModelError as error:
        raise CannotMeasure(str(error)) from error


def _settings(model: Path) -> RunSettings:
    return RunSettings.model_validate({
        "model": {"path": str(model), "max_length": 2048},
        "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": SIBLINGS, "max_new_tokens": NEW[1]},
        "batch": {"groups": GROUPS},
        "optimizer": {"learning_rate": RATE, "micro_batch_tokens": 1024},
        "weights": {"snapshot_every": 1000},
        "checkpoint": {"every": 1000},
        "log": {"partitions": PARTITIONS},
    })  # fmt: skip


def _sampled(model: Path, threads: int) -> Sampled:
    """Random tokens with the log-probabilities that version 0 gives them, so that ratios lie about 1."""
    from headrace.trainer.batches import Episode, Group, pack

    torch.set_num_threads(threads)
    rng, state = np.random.default_rng(0), TrainState(model)
    vocabulary = state._model.config.vocab_size
    groups = []
    for number in range(GROUPS):
        prompt = rng.integers(3, vocabulary, PROMPT).astype(np.int32)
        columns = [rng.integers(3, vocabulary, rng.integers(*NEW)).astype(np.int32) for _ in range(SIBLINGS)]
        groups.append(Group(str(number), tuple(
            Episode(slot, prompt, tokens, np.ones(len(tokens), np.bool_), np.zeros(len(tokens), np.float32),
                    np.zeros(len(tokens), np.int32), np.ones(len(tokens), np.float32), float(slot % 2), True, 1.0)
            for slot, tokens in enumerate(columns))))  # fmt: skip
    with torch.no_grad():
        scored = np.concatenate([state._logprobs(row).numpy() for row in pack(groups, 1024)])
    found, at = [], 0
    for group in groups:
        siblings = []
        for one in group.episodes:
            siblings.append((one.tokens, scored[at : at + len(one.tokens)], float(one.slot % 2)))
            at += len(one.tokens)
        found.append((group.episodes[0].prompt, siblings))
    return found


def _arrays(folder: Path, sampled: Sampled) -> Path:
    """The same for the bare loop, with GRPO's advantages."""
    arrays: dict[str, Any] = {"rate": np.float64(RATE)}
    advantages: list[float] = []
    for prompt, group in sampled:
        rewards = np.array([reward for _, _, reward in group])
        scaled = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for (tokens, logprobs, _), advantage in zip(group, scaled, strict=True):
            number = len(advantages)
            arrays |= {f"prompt{number}": prompt, f"tokens{number}": tokens, f"logprobs{number}": logprobs}
            advantages.append(float(advantage))
    np.savez(folder / "episodes.npz", advantage=np.array(advantages), **arrays)
    return folder / "episodes.npz"


def _tell(result: Result, steps: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int) -> None:
    ours, bare = steps["ours"], steps["bare"]

    def of(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([one[name] for one in ours], np.float64)

    computed, probe, saving = sum(of(name) for name in COMPUTE), of("probe_s"), of("saving_s") / SAVED_EVERY
    path = of("fetching_s") + of("compute_s") + of("publishing_s") + of("committing_s")
    behind = of("step_s") - of("saving_s") - path  # the publication, and the little until a turn begins
    step, most = path + saving, path + saving + behind
    for name, values in {
        "forward": of("forward_s"), "backward": of("backward_s"), "optimizer": of("optimizer_s"),
        "probe": probe, "rounding to what is served": of("rounding_s"), "fetching (read ahead)": of("fetching_s"),
        "packing, weights, figures": of("compute_s") - computed - probe - of("rounding_s"),
        "comparing with what was published": of("publishing_s"), "hashing and committing": of("committing_s"),
        "a tenth of a checkpoint": saving, "publication, behind the next step": behind,
    }.items():  # fmt: skip
        result.row("time of a step of ours", name, harness.spread(values.tolist()), "s")
    beside = (step - computed - probe) / (step - probe)
    result.row("share of a step", "outside forward, backward, optimizer and probe", harness.spread(beside.tolist()))
    result.row("share of a step", "the same, had nothing overlapped",
               harness.spread(((most - computed - probe) / (most - probe)).tolist()))  # fmt: skip
    result.row("share of a step", "probe", harness.spread((probe / step).tolist()))
    speeds = {"ours": (tokens / step).tolist(), "bare PyTorch loop": [tokens / one["step_s"] for one in bare]}
    for name, values in speeds.items():
        result.row("sampled tokens trained per second", name, harness.spread(values), "tokens/s")
    _ratio(result, "tokens per second, ours over bare", speeds["ours"], speeds["bare PyTorch loop"])
    result.row("tokens through the model in a step", "ours (prompts once a group)", ours[0]["row_tokens"])
    result.row("tokens through the model in a step", "bare PyTorch loop (padded)", bare[0]["row_tokens"])
    peaks = {name: max(one["peak"] for one in steps[name]) / 2**20 for name in steps}
    result.row("peak memory", "ours", peaks["ours"], "MiB")
    result.row("peak memory", "bare PyTorch loop", peaks["bare"], "MiB")
    result.row("peak memory", "ours over bare", peaks["ours"] / peaks["bare"])
    result.at_most("share outside forward, backward and optimizer, beside the probe", float(np.median(beside)), 0.03)


def _ratio(result: Result, measure: str, ours: Sequence[float], other: Sequence[float]) -> None:
    """The geometric mean over pairs, with its interval."""
    logs = np.log(np.array(ours) / np.array(other))
    draws = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(draws, (0.025, 0.975)))
    result.rows.append(Row(measure, "95 % interval", float(np.exp(logs.mean())), "", float(low), float(high)))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=10, help="alternating pairs of steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each loop")


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("trainer", __doc__, measure, argv, _arguments, packages=("torch", "transformers"))


if __name__ == "__main__":
    raise SystemExit(main())
