"""A plain PyTorch loop as a run's trainer: everything else (rollouts, batches, weights) is Headrace's.

    python examples/plain_pytorch.py RUN HOST:PORT [VERSIONS]

Make the run with `headrace create CONFIG`, start its coordinator, assembler and workers (`headrace start ROLE RUN`),
and this in place of `headrace start trainer RUN`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headrace.trainer import open_trainer
from headrace.trainer.door import TrainerBatch

CAP = 2.0  # on a token's importance ratio


def loss_of(model: Any, batch: TrainerBatch) -> torch.Tensor:
    """Truncated importance sampling, each sampled token alike."""
    rows = batch.padded()
    logits = model(input_ids=rows["tokens"], attention_mask=rows["attention"].long()).logits[:, :-1]
    now = {name: column[:, 1:] for name, column in rows.items()}  # what each position predicts
    logits = logits / now["temperature"].clamp(min=1e-3)[..., None]
    logprobs = torch.log_softmax(logits, -1).gather(-1, now["tokens"][..., None])[..., 0]
    ratio = (logprobs.detach() - now["logprobs"]).exp().clamp(max=CAP)
    terms = -ratio * now["weights"] * now["advantages"] * logprobs
    return torch.where(now["sampled"], terms, 0.0).sum() / now["sampled"].sum().clamp(min=1)


def train(run: str, kafka: Mapping[str, Any], versions: int, rate: float = 1e-5) -> dict[str, torch.Tensor]:
    """Go on to version `versions`, from version 0; the weights then."""
    with open_trainer(run, kafka) as trainer:
        model = AutoModelForCausalLM.from_pretrained(trainer.settings.model.path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for batch in trainer.batches():
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            trainer.publish(batch.version, model.state_dict(), {"loss": float(loss.detach())})
            print(f"version {batch.version}: loss {float(loss.detach()):.4f}", flush=True)
            if batch.version >= versions:
                break
        state: dict[str, torch.Tensor] = model.state_dict()
    return state


if __name__ == "__main__":
    train(sys.argv[1], {"bootstrap.servers": sys.argv[2]}, int(sys.argv[3]) if len(sys.argv) > 3 else 100)
