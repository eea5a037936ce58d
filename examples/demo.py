"""The demo: a pretrained language model learns a reasoning task from a log, on two CPU cores, in a few minutes.

`make demo [STEPS=n] [RUN=name] [SEED=s]` runs it. The held-out score is the verifier's own, greedy, on tasks that no
group was ever given; it is measured on the model folder before, and afterwards on the weights as the log published
them. STEPS is the version at which to stop: a greater one goes on, a reached one prints the account again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.accounting import account_lines
from headrace.consumers.run import Run, open_run
from headrace.create import create_run
from headrace.models import smollm2
from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.engines.hf import HfEngine
from headrace.producers.environments.gym import GYM
from headrace.producers.outbox import Outbox
from headrace.producers.publications import served_state
from headrace.schemas.errors import HeadraceError
from headrace.schemas.events import Publication, Score, Task
from headrace.schemas.topics import EVALS, POLICY
from headrace.settings import Config, home, kafka_config, load_config, state_dir
from headrace.streams.tasks import task_source
from headrace.supervisor import Supervisor

CONFIG = Path(__file__).with_name("demo.toml")
STEPS = 12
HELD_OUT = 300
HELD_OUT_SEED = 1_000_003  # no run's tasks are drawn with it
MOST_GROUPS = 2_000  # far more than a demo opens
SUITE = "held-out"


def say(line: str = "") -> None:
    print(line, flush=True)


def configure(run: str, seed: int) -> Config:
    """The demo's settings with this run's id, seed and model."""
    text = CONFIG.read_text()
    for name, value in (("RUN", run), ("SEED", str(seed)), ("MODEL", str(smollm2(home() / "models")))):
        text = text.replace(f"{{{name}}}", value)
    folder = home() / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(text)
    return load_config(file)


def held_out(config: Config) -> list[Task]:
    """Tasks that no group of this run is ever given: by what they ask, not only by their number. None of their prompts
    holds its own answer (a palindrome would)."""
    tasks = config.settings.tasks
    trained, fresh = task_source(tasks), task_source(tasks.model_copy(update={"seed": HELD_OUT_SEED}))
    seen = {_question(task) for i in range(MOST_GROUPS) if (task := trained.at(i)) is not None}
    found: dict[str, Task] = {}
    for i in itertools.count():
        task = fresh.at(i)
        if task is None or len(found) == HELD_OUT:
            return list(found.values())
        question = _question(task)
        if question not in seen and not GYM.holds_answer(task):
            found.setdefault(question, task)
    raise AssertionError("unreachable")


def _question(task: Task) -> str:
    return GYM.messages(task)[-1]["content"]


def evaluate(engine: HfEngine, tasks: list[Task], max_new_tokens: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The verifier's score of a greedy answer to each task: float64 [tasks]."""
    for i, task in enumerate(tasks):
        prompt = engine.encode_chat(GYM.messages(task))
        engine.submit(GenerationRequest(str(i), prompt, Sampling(1.0, max_new_tokens, 0, greedy=True), engine.eos_ids))
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(tasks))}
    while engine.active:
        for progress in engine.step():
            answers[progress.request_id] += progress.token_ids.tolist()
    return np.array([GYM.score(task, engine.decode(answers[str(i)])).reward for i, task in enumerate(tasks)])


def score(config: Config, kafka: Mapping[str, Any], run: Run, version: int, what: str) -> Score:
    """The held-out score of a version as it is served; taken from `evals` where it was measured before."""
    for _, event in run.events(EVALS):
        if isinstance(event, Score) and (event.suite, event.version) == (SUITE, version):
            return told(event, what)
    began = time.monotonic()
    settings = config.settings
    engine = HfEngine(settings.model.path, slots=64, max_tokens=settings.model.max_length, dtype=settings.model.dtype,
                      compute_dtype=settings.model.compute_dtype, lora=settings.model.lora)  # fmt: skip
    served_hash = b""
    if version > 0:
        state = served_state(kafka, config.topics, engine.served_arrays(), version)
        engine.apply(version, {name: (None, bits) for name, bits in state.items()})
        served_hash = next(e.served_hash for _, e in run.events(POLICY)
                           if isinstance(e, Publication) and e.version == version)  # fmt: skip
    rewards = evaluate(engine, held_out(config), settings.rollout.max_new_tokens)
    event = Score(SUITE, version, served_hash, HELD_OUT, len(rewards), float(rewards.mean()),
                  float(rewards.std(ddof=1) / np.sqrt(len(rewards))), json.dumps({"greedy": True}),
                  json.dumps(engine.fingerprint(), sort_keys=True), int(time.time() * 1000))  # fmt: skip
    outbox = Outbox(kafka)
    outbox.put(config.topics.name(EVALS), SUITE, event, wait_s=30.0)
    outbox.close()
    return told(event, f"{what} (in {time.monotonic() - began:.0f} s)")


def told(event: Score, what: str) -> Score:
    say(f"held-out score {what}: {event.mean:.3f} +- {event.standard_error:.3f}  "
        f"(v{event.version}, the verifier's own score, greedy, {event.scored} tasks)")  # fmt: skip
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=STEPS, help="version at which to stop")
    parser.add_argument("--seed", type=int, default=1, help="seeds tasks and sampling")
    parser.add_argument("--run", help="run id (default: demo-s<seed>)")
    given = parser.parse_args()
    run_id = given.run or f"demo-s{given.seed}"

    began = time.monotonic()
    say(f"run {run_id}: preparing the model (converted once)")
    config = configure(run_id, given.seed)
    kafka = kafka_config(config.site, start=True)
    new = create_run(kafka, config.topics, config.settings)
    run = open_run(run_id, kafka)
    say(f"run {run_id}: {'created' if new else 'resumed'} on the broker at {kafka['bootstrap.servers']}")
    before = score(config, kafka, run, 0, "before")
    Supervisor(kafka, config.topics, config.site, config.file, say, stop_at=given.steps).run()
    version = max(e.version for _, e in run.events(POLICY) if isinstance(e, Publication))
    after = score(config, kafka, run, version, "after")

    say()
    for line in account_lines(run):
        say(line)
    rise = after.mean - before.mean
    error = float(np.hypot(before.standard_error, after.standard_error))
    say()
    say(f"held-out score: {before.mean:.3f} -> {after.mean:.3f}, a rise of {rise:+.3f}"
        + (f" ({rise / error:.1f} standard errors)" if error else "")
        + f"; {time.monotonic() - began:.0f} s in all")  # fmt: skip
    say()
    say("Next (with .venv/bin on the PATH):")
    for command, meaning in (
        (f"headrace ledger {run_id}", "prove that every group and every token is accounted for"),
        (f"headrace status {run_id}", "where the run stands"),
        (f"headrace show {run_id} groups --where disposition=stale", "what was not trained, and why"),
        (f"headrace show {run_id} versions", "each version: what it trained, how far it moved"),
        (f"headrace cat {run_id} trajectories", "every event, as JSON lines"),
        (f"make demo STEPS={given.steps + 10} RUN={run_id} SEED={given.seed}", "go on from here"),
    ):
        say(f"  {command:60} {meaning}")
    say(f"Logs of the roles: {state_dir(config.site, run_id) / 'logs'}; "
        "the broker stays up until `headrace broker stop`.")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except HeadraceError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
