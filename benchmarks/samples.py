"""Tokens and log-probabilities that a real model sampled, so that sizes and speeds are those of real data.

`tests/data/logprobs/samples.npz` holds 8 prompts with 8 completions each, as SmolLM2-135M-Instruct sampled them at
temperature 1 with the built-in engine. `python -m benchmarks.wire --sample` makes the file anew (some minutes of CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.schemas.columns import Float32, Int32

from .harness import ROOT, CannotMeasure

FILE = ROOT / "tests" / "data" / "logprobs" / "samples.npz"
GROUP_SIZE = 8
MAX_NEW_TOKENS = 461
PROMPTS = (
    "Write a long story about a lighthouse keeper who finds a message in a bottle.",
    "Explain step by step how a steam engine works.",
    "Describe the history of bread, from the first grain to the modern bakery.",
    "Write a Python program that plays noughts and crosses, and explain each function.",
    "A train leaves at 9:40 and travels 312 km at 78 km/h. When does it arrive? Show every step of your work.",
    "Write a letter from a grandmother to her grandson who moves abroad.",
    "What are the causes and the consequences of inflation? Give examples.",
    "Invent a board game with rules, pieces, and an example of play.",
)


@dataclass(frozen=True, slots=True)
class Completion:
    """One episode. prompt int32[p]; tokens int32[n]; logprobs float32[n], nats, processed."""

    group: int
    slot: int
    prompt: Int32
    tokens: Int32
    logprobs: Float32


def load(file: Path = FILE) -> list[Completion]:
    """In order of group and slot. Raises CannotMeasure where the file is missing."""
    if not file.is_file():
        raise CannotMeasure(f"{file} is missing: `python -m benchmarks.wire --sample` makes it")
    with np.load(file) as data:
        prompts = np.split(data["prompts"], np.cumsum(data["prompt_lengths"])[:-1])
        ends = np.cumsum(data["lengths"])[:-1]
        columns = zip(np.split(data["tokens"], ends), np.split(data["logprobs"], ends), strict=True)
        return [Completion(i // GROUP_SIZE, i % GROUP_SIZE, prompts[i // GROUP_SIZE], tokens, logprobs)
                for i, (tokens, logprobs) in enumerate(columns)]  # fmt: skip


def sample(file: Path = FILE, slots: int = 64) -> None:
    """Sample them with the built-in engine and write the file."""
    from headrace.models import smollm2
    from headrace.producers.engines import GenerationRequest, Sampling
    from headrace.producers.engines.hf import HfEngine
    from headrace.settings import home

    engine = HfEngine(smollm2(home() / "models"), slots=slots, max_tokens=1024)
    prompts = [engine.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    tokens: dict[str, list[Int32]] = {}
    logprobs: dict[str, list[Float32]] = {}
    for group, prompt in enumerate(prompts):
        for slot in range(GROUP_SIZE):
            name = f"{group}-{slot}"
            tokens[name], logprobs[name] = [], []
            sampling = Sampling(1.0, MAX_NEW_TOKENS, group * GROUP_SIZE + slot)
            engine.submit(GenerationRequest(name, prompt, sampling, engine.eos_ids))
    while engine.active:
        for one in engine.step():
            tokens[one.request_id].append(one.token_ids)
            logprobs[one.request_id].append(one.logprobs)
    whole = [(np.concatenate(tokens[name]), np.concatenate(logprobs[name])) for name in tokens]
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        file,
        prompts=np.concatenate([np.array(p, np.int32) for p in prompts]),
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        tokens=np.concatenate([ids for ids, _ in whole]).astype(np.int32),
        logprobs=np.concatenate([values for _, values in whole]).astype(np.float32),
        lengths=np.array([len(ids) for ids, _ in whole], np.int32),
    )
