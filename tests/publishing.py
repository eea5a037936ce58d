"""A run whose trainer only publishes: for tests of what receives weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.create import create_run
from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.events import Publication, Version, WeightChunk
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Output, Transactor
from headrace.trainer.publish import Policy, Publisher, read_policy

DTYPE = "bfloat16"


class Publishing:
    """Version n differs from n - 1 in a twentieth of its elements, by the bits of `flip`. `history[n]` are its bits."""

    def __init__(self, kafka: Mapping[str, Any], run: str, *, arrays: Mapping[str, NDArray[Any]], flip: int = 1,
                 weights: Mapping[str, Any] | None = None, tap: Callable[[int, bytes], object] | None = None,
                 **sections: Any) -> None:  # fmt: skip
        self.kafka, self.topics, self._flip = kafka, RunTopics(run), flip
        plain: dict[str, Any] = {
            "model": {"path": str(Path.cwd()), "dtype": DTYPE}, "tasks": {"dataset": "chain_sum"},
            "log": {"partitions": 1}, "weights": {"snapshot_every": 1000, **(weights or {})},
        }  # fmt: skip
        self.settings = settings = RunSettings.model_validate(plain | sections)
        create_run(kafka, self.topics, settings)
        self.transactor = Transactor(kafka, self.topics.transactional_id("trainer"))
        self._other = Transactor(kafka, self.topics.transactional_id("test"))
        opened = open_settings(kafka, self.topics)
        policy = Policy(self.topics, self.transactor, Chain(0, digest(opened.value)))
        self.publisher = Publisher(kafka, self.topics, policy, settings.weights, tap)
        self.arrays = {name: bits.copy() for name, bits in arrays.items()}
        self.history = [{name: bits.copy() for name, bits in arrays.items()}]

    @property
    def state(self) -> dict[str, delta.Tensor]:
        return delta.as_state(self.arrays, DTYPE)

    def begin(self) -> None:
        hashed = delta.state_hash(self.state)

        def version(**link: Any) -> Version:
            return Version(**link, version=0, parent=-1, batch=0, batch_offset=-1, batch_digest=b"",
                           hash_algorithm=delta.HASH_ALGORITHM, served_hash=hashed, train_hash=b"", rho=0.0,
                           rho_tokens=0, groups=(), metrics={}, fingerprint="{}", committed_ms=0)  # fmt: skip

        self.publisher.publish_initial(version, "somewhere", self.state, hashed)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            number = len(self.history)
            rng = np.random.default_rng([7, number])
            for bits in self.arrays.values():
                bits[rng.random(bits.shape) < 0.05] ^= self._flip
            changes, served_hash = self.publisher.compare(self.state)
            self.publisher.publish(number, changes, served_hash)
            self.history.append({name: bits.copy() for name, bits in self.arrays.items()})

    def publications(self) -> list[Publication]:
        return read_policy(self.kafka, self.topics, open_settings(self.kafka, self.topics)).publications

    def send(self, output: Output) -> None:
        """A record as another role would write it."""
        self._other.send([output])

    def damage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next delta's chunks get a flipped bit on their way to the log."""
        honest = delta.encode_delta

        def encode(*args: Any) -> Iterator[WeightChunk]:
            for chunk in honest(*args):
                data = bytearray(chunk.data)
                data[len(data) // 2] ^= 4
                yield replace(chunk, data=bytes(data))

        with monkeypatch.context() as patch:
            patch.setattr(delta, "encode_delta", encode)
            self.publish()
