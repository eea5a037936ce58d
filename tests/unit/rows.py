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
