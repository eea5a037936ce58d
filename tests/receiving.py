"""Receivers on the real broker, with arrays in an engine's place: for tests of how weights arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.producers.receiver import Receiver
from headrace.schemas import delta
from headrace.schemas.errors import WeightsRefused
from tests.publishing import DTYPE, Publishing

Arrays = dict[str, NDArray[Any]]
Kafka = Mapping[str, Any]


def model(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (400, 50), "norm": (50,), "mlp": (300, 100)}
    return {name: rng.integers(0, 65536, shape).astype(np.uint16) for name, shape in shapes.items()}


class Target:
    """Stands for an engine: arrays that are overwritten between steps."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.version = {name: bits.copy() for name, bits in arrays.items()}, 0
        self.applied: list[int] = []

    def served_arrays(self) -> Arrays:
        return self.arrays

    def apply(self, version: int, changes: Mapping[str, delta.Change]) -> None:
        if version <= self.version:
            raise WeightsRefused(f"version {version} can't follow {self.version}")
        delta.write(delta.as_state(self.arrays, DTYPE), dict(changes))
        self.version = version
        self.applied.append(version)

    def serves(self, arrays: Arrays) -> bool:
        return all(np.array_equal(self.arrays[name], bits) for name, bits in arrays.items())


class Source(Publishing):
    """Of that model."""

    def __init__(self, kafka: Kafka, run: str, **weights: Any) -> None:
        super().__init__(kafka, run, arrays=model(), weights=weights)


@contextmanager
def receiving(source: Publishing, target: Target, **options: Any) -> Iterator[Receiver]:
    receiver = Receiver(source.kafka, source.topics, worker="w", incarnation="i", **options)
    try:
        assert receiver.load(target)
        yield receiver
    finally:
        receiver.close()


def until(condition: Callable[[], bool], step: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        step()
        time.sleep(0.01)
