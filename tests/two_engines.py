"""What each process of `torchrun` runs for the test of trainer and engine in one process: an FSDP2 part of the train
state, and a whole engine that sleeps while it trains. Rank 0 publishes to the log as any trainer does. Prints what each
rank saw, as JSON.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.two_engines MODEL BOOTSTRAP RUN
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.producers.engines import GenerationRequest, Sampling
from headrace.producers.engines.hf import HfEngine
from headrace.schemas import delta
from headrace.schemas.errors import EngineError, WeightsRefused
from headrace.trainer.ranks import join, leave
from headrace.trainer.step import TrainState
from headrace.trainer.weighing import StepSettings
from tests.publishing import DTYPE, Publishing
from tests.unit.rows import groups

VERSIONS = 2
SIZES: Any = {"slots": 2, "max_tokens": 64, "dtype": DTYPE}


def held(engine: HfEngine) -> int:
    """Bytes of what it computes with, serves and caches."""
    weights = [*engine._parameters.values(), *engine._served.values()]
    caches = [*engine._cache.keys, *engine._cache.values, *engine._prefix[1], *engine._prefix[2]]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*weights, *caches))


def hash_of(engine: HfEngine) -> str:
    return delta.state_hash(delta.as_state(engine.served_arrays(), DTYPE)).hex()


def greedy(engine: HfEngine) -> list[int]:
    tokens: list[int] = []
    engine.submit(GenerationRequest("r", [5, 6, 7], Sampling(1.0, 20, 0, greedy=True)))
    while engine.active:
        for one in engine.step():
            assert one.version == engine.version
            tokens += one.token_ids.tolist()
    return tokens


def main(model: Path, bootstrap: str, run: str) -> None:
    torch.set_num_threads(1)
    ranks = join("cpu")
    state, engine = TrainState(model, DTYPE, ranks=ranks), HfEngine(model, **SIZES)
    source = None
    if ranks.rank == 0:
        source = Publishing({"bootstrap.servers": bootstrap}, run, arrays=state.served_bits(),
                            model={"path": str(model), "dtype": DTYPE})  # fmt: skip
        source.begin()
    found: dict[str, Any] = {"hashes": [], "tokens": [], "asleep": [], "awake": held(engine), "refused": []}
    greedy(engine)
    for version in range(1, VERSIONS + 1):
        engine.sleep()
        gc.collect()
        found["asleep"].append(held(engine))
        for call in (lambda: greedy(engine), lambda n=version: engine.apply(n, {})):
            try:
                call()
            except (EngineError, WeightsRefused) as error:
                found["refused"].append(type(error).__name__)
        state.train_batch(groups(), version - 1, StepSettings(learning_rate=3e-3, micro_batch_tokens=60))
        if source is not None:
            changes, served_hash = source.publisher.compare(delta.as_state(state.served_bits(), DTYPE))
            source.publisher.publish(version, changes, served_hash)
            found["published"] = served_hash.hex()
        engine.wake(version, state.served_everywhere())
        found["hashes"].append(hash_of(engine))
        found["tokens"].append(greedy(engine))
    again = HfEngine(model, **SIZES)
    again.apply(VERSIONS, {name: (None, bits.copy()) for name, bits in engine.served_arrays().items()})
    found["fresh"] = greedy(again)
    said: list[Any] = [None] * ranks.size
    dist.all_gather_object(said, found)
    if ranks.rank == 0:
        print(json.dumps(said), flush=True)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
