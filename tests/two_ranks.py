"""What each process of `torchrun` runs for the test that several ranks equal one: every rank trains its part of one
train state, and rank 0 the same batches alone beside it. Prints how far they are apart, as JSON.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.two_ranks MODEL
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.schemas.settings import LoraSettings
from headrace.trainer.batches import Group
from headrace.trainer.ranks import ALONE, Ranks, join, leave
from headrace.trainer.rejection import Rejection
from headrace.trainer.reused import Reused
from headrace.trainer.spread import rows_of
from headrace.trainer.step import TrainState
from headrace.trainer.weighing import StepSettings
from tests.unit.rows import groups

PLAIN = StepSettings(learning_rate=3e-3, micro_batch_tokens=30, probe_tokens=60)
CASES = {
    "one step": PLAIN,
    "recomputed": replace(PLAIN, micro_batch_tokens=60),
    "adapter": PLAIN,
    "one row": replace(PLAIN, micro_batch_tokens=10_000),
    "batch scored first": replace(PLAIN, normalise=True, reject=(Rejection("k3", "mean", above=0.1),)),
    "several steps": replace(PLAIN, minibatches=2, epochs=2, objective="ppo", kl="k2", kl_coefficient=0.5),
}


def gradients(state: TrainState, batch: list[Group], settings: StepSettings, ranks: Ranks) -> dict[str, torch.Tensor]:
    """In whole, of every trained tensor; the state stays."""
    state._accumulate(batch, settings)
    state._reuse(Reused("failed", batch[0].episodes[0], 0.5), batch, settings)
    found = {}
    for name, parameter in state._parameters.items():
        assert parameter.grad is not None
        own = ranks.local(parameter.grad)
        whole = own if ranks.size == 1 else ranks.collect(own, state._shapes[name])
        if whole is not None:
            found[name] = whole.clone()
    state._zero_grad()
    return found


def batch_of(case: str) -> list[Group]:
    """Of "one row" there is nothing for the other rank."""
    if case != "one row":
        return groups()
    first = groups()[0]
    one, other = (replace(episode, reward=float(slot)) for slot, episode in enumerate(first.episodes[:2]))
    return [replace(first, episodes=(one, replace(other, mask=other.mask & False)))]


def report(path: Path, case: str, ranks: Ranks) -> dict[str, Any]:
    settings, batch = CASES[case], batch_of(case)
    options: dict[str, Any] = {"recompute": case == "recomputed",
                               "lora": LoraSettings(rank=4) if case == "adapter" else None}  # fmt: skip
    here = TrainState(path, compute_dtype="float64", **options, ranks=ranks)
    there = TrainState(path, compute_dtype="float64", **options, ranks=ALONE)  # on each rank, so that none waits
    for _ in range(2):  # nothing is left of the first
        ours, alone = gradients(here, batch, settings, ranks), gradients(there, batch, settings, ALONE)
    said = [one.train_batch(batch, 0, settings) for one in (here, there)]
    tensors, metadata = here.state_tensors()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    again = TrainState(path, compute_dtype="float64", **options, ranks=ranks)
    again.load_state(saved, metadata)
    for one in (here, again):  # the same bits go on to the same bits
        one.train_batch(batch, 1, settings)
    if ranks.rank:
        return {}
    masters = there.state_tensors()[0]
    onward, restored = here.state_tensors()[0], again.state_tensors()[0]
    return {
        "gradients": max(float((ours[n] - g).abs().max() / g.abs().max().clamp(min=1e-3)) for n, g in alone.items()),
        "tensors": len(alone),
        "masters": max(float((saved[n] - m).abs().max()) for n, m in masters.items() if n.startswith("master.")),
        "loss": abs(said[0].loss - said[1].loss), "norm": abs(said[0].grad_norm / said[1].grad_norm - 1),
        "rho": abs(said[0].rho - said[1].rho), "same counts": said[0].groups == said[1].groups,
        "rows": len(rows_of(batch, settings.micro_batch_tokens, ranks.size)),
        "resumed": all(torch.equal(onward[n], restored[n]) for n in onward) and len(onward) == 3 * len(alone),
        "part": sum(m.numel() for m in here._masters.values()) / sum(m.numel() for m in there._masters.values()),
    }  # fmt: skip


def main(path: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    ranks = join("cpu")
    found = {case: report(path, case, ranks) for case in CASES}
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
