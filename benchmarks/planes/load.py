"""The episodes that every plane is given: the same ids and log-probabilities, in groups of eight.

The sampled completions come back as often as the load is long, each time with shifted ids and slightly other
log-probabilities, so that no compressor finds the first time in the second. Prompts and rewards are part of the load;
tokens are counted without prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..samples import Completion

VOCABULARY = 49_152
SPAN_TOKENS = 512  # events carry at most so many; `log.span_tokens` by default
VERSION = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """prompt int32[p]; tokens int32[n]; logprobs float32[n], nats; reward 0 or 1."""

    group: int
    slot: int
    prompt: Any
    tokens: Any
    logprobs: Any
    reward: float


def write(path: Path, completions: list[Completion], groups: int, chain: int = 1) -> int:
    """The load of so many groups as a file that needs only numpy to be read; `chain` completions make one episode. Its
    model tokens."""
    siblings: dict[int, list[Completion]] = {}
    for one in completions:
        siblings.setdefault(one.group, []).append(one)
    prompts, tokens, logprobs = [], [], []
    for group in range(groups):
        for slot, first in enumerate(siblings[group * chain % len(siblings)]):
            parts = [_again(siblings, group * chain + link, slot) for link in range(chain)]
            prompts.append(first.prompt)
            tokens.append(np.concatenate([ids for ids, _ in parts]))
            logprobs.append(np.concatenate([values for _, values in parts]))
    np.savez(path, prompts=np.concatenate(prompts), prompt_lengths=[len(p) for p in prompts],
             tokens=np.concatenate(tokens), logprobs=np.concatenate(logprobs),
             lengths=[len(t) for t in tokens], size=len(siblings[0]))  # fmt: skip
    return sum(map(len, tokens))


def _again(siblings: dict[int, list[Completion]], number: int, slot: int) -> tuple[Any, Any]:
    """Ids and log-probabilities of the completion of that running number: from the second time on, others."""
    time, which = divmod(number, len(siblings))
    one = siblings[which][slot]
    return (((one.tokens + 977 * time) % VOCABULARY).astype(np.int32),
            (one.logprobs * np.float32(1 - 1e-3 * time)).astype(np.float32))  # fmt: skip


def read(path: str | Path) -> list[list[Episode]]:
    """The groups of a load, each a list of its episodes by slot."""
    with np.load(path) as data:
        size = int(data["size"])
        ends = np.cumsum(data["lengths"])[:-1]
        prompts = np.split(data["prompts"], np.cumsum(data["prompt_lengths"])[:-1])
        columns = list(zip(prompts, np.split(data["tokens"], ends), np.split(data["logprobs"], ends), strict=True))
    return [[Episode(i // size, slot, *columns[i + slot], reward=float(slot % 2)) for slot in range(size)]
            for i in range(0, len(columns), size)]  # fmt: skip


def spans(episode: Episode) -> list[slice]:
    """Where an episode's model tokens are cut."""
    return [slice(i, i + SPAN_TOKENS) for i in range(0, len(episode.tokens), SPAN_TOKENS)]
