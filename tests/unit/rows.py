"""Rows of tokens without a model: what weighs and what is refused needs no forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.trainer.batches import Episode, Group, MicroBatch, pack


def episode(n: int, slot: int = 0, **changes: Any) -> Episode:
    values: dict[str, Any] = {
        "slot": slot, "prompt": np.array([1, 2], np.int32), "tokens": np.arange(3, 3 + n, dtype=np.int32),
        "mask": np.ones(n, np.bool_), "logprobs": np.full(n, -1.0, np.float32), "versions": np.zeros(n, np.int32),
        "weights": np.ones(n, np.float32), "reward": float(slot), "counted": True, "temperature": 1.0,
    }  # fmt: skip
    return Episode(**(values | changes))


def member(n: int) -> tuple[Group, Episode]:
    one = episode(n)
    return Group("g", (one,)), one


def row(n: int) -> MicroBatch:
    (found,) = pack([member(n)[0]], 1000)
    return found


def groups(seed: int = 0, count: int = 3, size: int = 3, vocabulary: int = 259) -> list[Group]:
    """Random prompts and tokens with plausible log-probabilities; lengths differ, and one token in five is context."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = rng.integers(3, vocabulary, 4 + number).astype(np.int32)
        episodes = []
        for slot in range(size):
            n = int(rng.integers(3, 9))
            mask = rng.random(n) > 0.2
            mask[0] = True
            episodes.append(episode(
                n, slot, prompt=prompt, tokens=rng.integers(3, vocabulary, n).astype(np.int32), mask=mask,
                logprobs=rng.normal(-5.5, 0.3, n).astype(np.float32), reward=float(rng.integers(0, 3)),
            ))  # fmt: skip
        found.append(Group(f"g{number}", tuple(episodes)))
    return found
