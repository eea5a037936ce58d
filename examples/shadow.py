"""Shadow mode: rollouts that another framework dumped become a run, with its ledger, its tables and its report, before
anything is replaced.

    python -m examples.shadow prime-rl outputs/run_default --run mine
    python -m examples.shadow verl rollout_data --run mine --model models/Qwen3-0.6B
    python -m examples.shadow trl outputs --run mine --model models/Qwen3-0.6B

prime-rl dumps tokens with the engine's log-probabilities: they are taken as they are. verl and TRL dump text. Its
tokens are found again with the tokenizer of `--model` (special tokens that the text lost stay lost), and their
log-probabilities are computed by a forward of that model: they are *its* and not the engine's, the fingerprint of each
episode says so, and nothing about numerical alignment follows from them.

Groups are written as unmanaged ones: in ledger, tables and report, never in a batch. An assembler runs here until the
last group has closed. A run may be added to: groups that are whole on the log are passed over, so a killed import is
started again with the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.dumped import READERS, Messages, Rollout, Text, Turn, read
from headrace.consumers import open_run
from headrace.create import create_run
from headrace.producers import open_producer
from headrace.producers.groups import Episode
from headrace.schemas.errors import HeadraceError, NoProgress, SettingsError
from headrace.schemas.events import GroupClosed, Lease, Task
from headrace.schemas.outcomes import (
    REASON_DEADLINE,
    REASON_NEVER_STARTED,
    REASON_PRODUCER_CLOSED,
    REASON_PRODUCER_RAISED,
    Boundary,
    Outcome,
)
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import GROUPS, TRAJECTORIES, RunTopics
from headrace.settings import kafka_config, load_site
from headrace.streams.assembling import run_assembler

CLOSED_WITHIN_S = 60.0  # the assembler closes a group within a second of its last event
NAME = 60  # letters of a task's prompt that name it
# How slots end of an import that was killed or failed.
CUT_SHORT = (REASON_DEADLINE, REASON_NEVER_STARTED, REASON_PRODUCER_CLOSED, REASON_PRODUCER_RAISED)


class Reader:
    """Text as a model's tokens, with their log-probabilities under that model."""

    def __init__(self, path: str, temperature: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch, self._temperature = torch, temperature
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def turns(self, text: Text) -> tuple[Turn, ...]:
        """A prompt and a sampled turn; the model is asked once. Log-probabilities at the temperature."""
        prompt = self._prompt(text.prompt)
        answer: list[int] = self._tokenizer(text.completion, add_special_tokens=False)["input_ids"]
        if not answer:
            return (Turn(False, prompt),)
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        given = self._torch.log_softmax(logits / self._temperature, -1)
        logprobs: list[float] = given.gather(1, self._torch.tensor(answer)[:, None])[:, 0].tolist()
        return Turn(False, prompt), Turn(True, answer, logprobs)

    def _prompt(self, prompt: Messages) -> list[int]:
        if not isinstance(prompt, str):
            prompt = str(self._tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids or [self._tokenizer.bos_token_id or 0]


def write(episode: Episode, rollout: Rollout, turns: Sequence[Turn], temperature: float,
          engine: Mapping[str, str]) -> None:  # fmt: skip
    sampled = sum(len(turn.ids) for turn in turns if turn.sampled)
    episode.start(temperature=temperature, max_new_tokens=max(1, sampled), seed=0, engine=engine)
    for number, turn in enumerate(turns):
        if turn.sampled:
            episode.model(turn.ids, turn.logprobs, rollout.version)
        elif number:
            episode.environment(turn.ids)
        else:
            episode.prompt(turn.ids)
    if rollout.failed is not None:
        episode.finish(None, Outcome.INFRA_FAILURE, reason=rollout.failed, boundary=Boundary.ENVIRONMENT,
                       timings_ms=rollout.timings_ms)  # fmt: skip
    else:
        episode.finish(rollout.reward, reason=rollout.reason, rewards=rollout.rewards, timings_ms=rollout.timings_ms)


def shadow(framework: str, folder: Path, run: str, kafka: Mapping[str, Any], model: str | None = None,
           temperature: float = 1.0) -> Counter[str]:  # fmt: skip
    """Bring the dump into the run. What was written: `groups`, `episodes`, `tokens` (sampled ones), and `left out`,
    tokens of other branches of a conversation than its last.

    Raises SettingsError where text has no model to read it with, InvalidRecord for a damaged dump, NoProgress."""
    settings = RunSettings.model_validate({
        "model": {"path": model or framework},
        "tasks": {"source": "jsonl", "path": str(folder), "score": f"{framework}:recorded"},
    })  # fmt: skip
    reader = None if model is None else Reader(model, temperature)
    engine = {"name": framework, "source": "shadow"}
    if model is not None:
        engine |= {"tokens": "found again in the text", "logprobs": f"a forward of {Path(model).name}"}
    topics, counts = RunTopics(run), Counter[str]()
    create_run(kafka, topics, settings)
    there, written = _whole_tasks(run, kafka), set[str]()
    with _assembler(kafka, topics, settings), open_producer(run, dict(kafka), unmanaged=True) as producer:
        for _, siblings in itertools.groupby(read(framework, folder), key=lambda rollout: rollout.group):
            members = list(siblings)
            task = Task(_short(members[0].task), framework, json.dumps({"group": members[0].group}), 0)
            if members[0].group in there:
                continue
            with producer.group(task, len(members)) as group:
                for slot, rollout in enumerate(members):
                    turns = _turns(rollout, reader, framework)
                    with group.episode(slot) as episode:
                        write(episode, rollout, turns, temperature, engine)
                    counts += Counter({"episodes": 1, "left out": rollout.left_out,
                                       "tokens": sum(len(turn.ids) for turn in turns if turn.sampled)})  # fmt: skip
                written.add(group.id)
        producer.flush()
        _wait_until_closed(run, kafka, written)
    return counts + Counter({"groups": len(written)})


def _turns(rollout: Rollout, reader: Reader | None, framework: str) -> Sequence[Turn]:
    if not isinstance(rollout.content, Text):
        return rollout.content
    if reader is None:
        raise SettingsError(f"{framework} dumps text: give --model, the folder of a model that finds its tokens again")
    return reader.turns(rollout.content)


def _short(task: str) -> str:
    """A name for people that no other task has: long ones share their beginnings."""
    words = " ".join(task.split())
    return words if len(words) <= NAME else f"{hashlib.sha256(task.encode()).hexdigest()[:8]} ...{words[-NAME:]}"


def _whole_tasks(run: str, kafka: Mapping[str, Any]) -> set[str]:
    """Groups of the dump, all of whose rollouts are on the log already."""
    whole: dict[str, str] = {}  # the run's group: the dump's
    for _, event in open_run(run, kafka).events(TRAJECTORIES, GROUPS, kinds=(Lease, GroupClosed)):
        if isinstance(event, Lease) and event.opens:
            whole[event.group] = json.loads(event.task.data)["group"]
        elif isinstance(event, GroupClosed) and any(slot.reason in CUT_SHORT for slot in event.slots):
            whole.pop(event.group, None)
    return set(whole.values())


@contextmanager
def _assembler(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings) -> Iterator[None]:
    """It runs beside the body; what ends it is raised at the end of the body."""
    stop, raised = threading.Event(), list[HeadraceError]()

    def body() -> None:
        try:
            run_assembler(kafka, topics, settings, stop)
        except HeadraceError as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        if raised:
            raise raised[0]


def _wait_until_closed(run: str, kafka: Mapping[str, Any], groups: set[str]) -> None:
    left, since = set(groups), time.monotonic()
    while left:
        closed = {group.id for group in open_run(run, kafka).groups()}
        if left & closed:
            left, since = left - closed, time.monotonic()
        elif time.monotonic() - since > CLOSED_WITHIN_S:
            raise NoProgress(f"{len(left)} groups of run {run!r} don't close, the first is {min(left)}: start "
                             f"`headrace start assembler {run}` and see `headrace status {run}`")  # fmt: skip
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=list(READERS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True, help="run id; made if it isn't there")
    parser.add_argument("--model", help="folder of the model whose tokenizer and forward read dumped text")
    parser.add_argument("--temperature", type=float, default=1.0, help="at which the rollouts were sampled")
    parser.add_argument("--bootstrap", help="Kafka's address (default: the environment's, or the development broker)")
    given = parser.parse_args(argv)
    try:
        kafka = kafka_config(load_site(None, given.bootstrap), start=True)
        counts = shadow(given.framework, given.folder, given.run, kafka, given.model, given.temperature)
    except HeadraceError as error:
        print(f"shadow: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    print(", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing new")
    print(f"Next: headrace report {given.run}, headrace ledger {given.run}, headrace export {given.run} out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
