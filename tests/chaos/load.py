"""The input of a chaos run: what is sampled is a pure function of seed, task and slot, and so is every reward.

So two runs on the same settings must end in the same closures with the same content hashes, whatever was killed on the
way and however often a slot was tried. Deadlines and attempts lie beyond any outage; tokens are stamped with version 0
always, whatever the trainer has published in the meantime.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.settings import RunSettings

GROUP_SIZE = 4
BATCH_GROUPS = 3
VOCABULARY = 32_000
EOS = 2
SHORTEST, LONGEST = 12, 60  # tokens of a completion
EQUAL_EVERY = 5  # of so many tasks one rewards all siblings alike, and its group closes without a batch
WEIGHTS = 64  # elements of the policy: versions must differ, nothing is computed with them
LEASE_TIMEOUT_S = 4.0
REPLICATION = 3


def write_tasks(file: Path, count: int) -> None:
    lines = ({"prompt": f"task {i}", "equal": i % EQUAL_EVERY == 0} for i in range(count))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def settings(tasks: Path, count: int, seed: int) -> RunSettings:
    return RunSettings.model_validate(
        {
            "seed": seed,
            "model": {"path": "synthetic", "dtype": "float32"},
            "tasks": {"source": "jsonl", "path": str(tasks), "score": "tests.chaos.load:score", "size": count},
            "rollout": {
                "group_size": GROUP_SIZE, "max_new_tokens": LONGEST, "max_attempts": 100_000, "deadline_s": 86_400.0,
                "lease_timeout_s": LEASE_TIMEOUT_S, "score_timeout_s": 600.0,
            },
            "batch": {"groups": BATCH_GROUPS, "max_lag": 6, "max_groups_per_batch": 1_000_000},
            "staleness": {"hard_lag": 1_000_000, "drift_limit": 1e12},
            "weights": {"snapshot_every": 5},
            "log": {"partitions": 4, "replication": REPLICATION, "commit_ms": 100, "span_tokens": 16},
        }
    )  # fmt: skip


def completion(prompt: Sequence[int], slot: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token ids and log-probabilities that slot `slot` samples after this prompt; the prompt holds task and seed."""
    words = np.asarray(prompt, np.int32).tobytes() + slot.to_bytes(4, "little")
    draw = np.random.default_rng(int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little"))
    tokens = draw.integers(3, VOCABULARY, draw.integers(SHORTEST, LONGEST), dtype=np.int32)
    tokens[-1] = EOS
    return tokens, -draw.exponential(1.0, tokens.size).astype(np.float32)


def versions_of(groups: int) -> int:
    """How many versions so many groups make: those whose siblings are rewarded alike go into no batch."""
    return groups * (EQUAL_EVERY - 1) // (EQUAL_EVERY * BATCH_GROUPS)


def text_of(tokens: Sequence[int]) -> str:
    return f"{zlib.crc32(np.asarray(tokens, np.int32).tobytes()):08x}"


def score(item: dict[str, Any], text: str) -> float:
    """The verifier, in the environment's host."""
    return 1.0 if item["equal"] else int(text, 16) % 4 / 3


def weights(version: int) -> dict[str, delta.Tensor]:
    """The policy of a version: one element differs from that of the version before."""
    bits = np.zeros(WEIGHTS, np.uint32)
    for number in range(1, version + 1):
        bits[number % WEIGHTS] = number
    return {"w": delta.Tensor("float32", bits)}
