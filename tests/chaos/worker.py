"""A worker of the load: the worker's real code, weights, environment host and outbox, with an engine that samples
nothing but knows what it would have sampled. `python -m tests.chaos.worker RUN --config FILE --name NAME`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.producers.engines import Changes, GenerationRequest, Progress
from headrace.producers.lifeline import die_with_parent
from headrace.producers.receiver import Receiver
from headrace.producers.worker import Worker
from headrace.schemas import delta
from headrace.schemas.errors import HeadraceError
from headrace.schemas.topics import RunTopics
from headrace.settings import kafka_config, load_site
from headrace.streams.log.policy import open_settings
from tests.chaos import load

TOKENS_PER_STEP = 5  # so that episodes last for several steps, and spans are cut within them
STEP_S = 0.004


class SyntheticEngine:
    """See `producers.engines.Engine`."""

    eos_ids = frozenset({load.EOS})

    def __init__(self, capacity: int) -> None:
        self.capacity, self.version = capacity, 0
        self._state = load.weights(0)
        self._requests: dict[str, tuple[NDArray[np.int32], NDArray[np.float32], int]] = {}

    @property
    def active(self) -> int:
        return len(self._requests)

    def submit(self, request: GenerationRequest) -> None:
        _, slot, _ = request.request_id.rsplit("/", 2)
        self._requests[request.request_id] = (*load.completion(request.prompt, int(slot)), 0)

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def step(self) -> list[Progress]:
        out = []
        for name, (tokens, logprobs, begin) in list(self._requests.items())[: self.capacity]:
            end = begin + TOKENS_PER_STEP
            self._requests[name] = tokens, logprobs, end
            last = end >= tokens.size
            out.append(Progress(name, tokens[begin:end], logprobs[begin:end], 0, "stop" if last else None))
            if last:
                del self._requests[name]
        if out:
            time.sleep(STEP_S)
        return out

    def apply(self, version: int, changes: Changes) -> None:
        delta.write(self._state, dict(changes))
        self.version = version

    def served_arrays(self) -> dict[str, NDArray[Any]]:
        return {name: tensor.bits for name, tensor in self._state.items()}

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "synthetic"}

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [3 + byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return load.text_of(ids)

    def close(self) -> None:
        self._requests.clear()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    site = load_site(given.config)
    try:
        run_worker(kafka_config(site), RunTopics(given.run, site.prefix), given.name, given.slots, stop)
    except HeadraceError as error:
        print(f"worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def run_worker(kafka: Mapping[str, Any], topics: RunTopics, name: str, slots: int, stop: threading.Event) -> None:
    settings = open_settings(kafka, topics).settings
    incarnation, engine = uuid.uuid4().hex, SyntheticEngine(slots)
    receiver = Receiver(kafka, topics, worker=name, incarnation=incarnation,
                        initial=lambda: SyntheticEngine(1).served_arrays())  # fmt: skip
    try:
        if receiver.load(engine, stop):
            Worker(kafka, topics, settings, engine, receiver, name=name, incarnation=incarnation,
                   capacity=2 * slots).run(stop)  # fmt: skip
    finally:
        receiver.close()


if __name__ == "__main__":
    sys.exit(main())
