"""An engine without a model, for tests of whatever drives one: it samples at once, from a request's own seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.producers.engines import Changes, GenerationRequest, Progress

ALPHABET = "aeioubcdfghklmnp"


class FakeEngine:
    """`lengths`: tokens of a completion by request id; `after_s`: when they come. Weights are 64 float32."""

    capacity = 64
    eos_ids = frozenset({0})

    def __init__(self, lengths: Callable[[str], int] = lambda request: 4,
                 after_s: Callable[[str], float] = lambda request: 0.0) -> None:  # fmt: skip
        self.version = 0
        self.weights = {"w": np.zeros(64, np.uint32)}
        self._lengths, self._after_s = lengths, after_s
        self._active: dict[str, GenerationRequest] = {}
        self._due: dict[str, float] = {}

    @property
    def active(self) -> int:
        return len(self._active)

    def submit(self, request: GenerationRequest) -> None:
        self._active[request.request_id] = request
        self._due[request.request_id] = time.monotonic() + self._after_s(request.request_id)

    def cancel(self, request_id: str) -> None:
        self._active.pop(request_id, None)

    def step(self) -> list[Progress]:
        out = []
        for name, request in list(self._active.items()):
            if time.monotonic() < self._due[name]:
                continue
            del self._active[name]
            random, n = np.random.default_rng(request.sampling.seed), self._lengths(name)
            ids = random.integers(1, 50_000, n).astype(np.int32)
            out.append(Progress(name, ids, -random.random(n).astype(np.float32), self.version, "stop"))
        return out

    def apply(self, version: int, changes: Changes) -> None:
        for name, (places, values) in changes.items():
            self.weights[name].reshape(-1)[slice(None) if places is None else places] = values
        self.version = version

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return dict(self.weights)

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "fake"}

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [1, 2, 3]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(ALPHABET[i % len(ALPHABET)] for i in ids)

    def close(self) -> None:
        self._active.clear()
