"""What an expert would write without Headrace: a plain PyTorch loop over padded rows, in the same dtype, on the same
batches, with the same loss: forward, backward, clip, AdamW. No log, no hashes, no publication, no probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch of n completions, padded on the right. tokens int64, attention int64, sampled bool, logprobs
    float32 [n, longest]; advantage float32 [n]."""

    tokens: torch.Tensor
    attention: torch.Tensor
    sampled: torch.Tensor
    logprobs: torch.Tensor
    advantage: torch.Tensor


def padded(episodes: Sequence[tuple[Any, Any, Any, float]], rows: int) -> list[Rows]:
    """(prompt, tokens, logprobs, advantage) of each episode, `rows` of them in a micro-batch, by length."""
    ordered = sorted(episodes, key=lambda one: len(one[0]) + len(one[1]))
    found = []
    for at in range(0, len(ordered), rows):
        part = ordered[at : at + rows]
        longest = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in part)
        columns = [np.zeros((len(part), longest), kind) for kind in (np.int64, np.int64, np.bool_, np.float32)]
        for i, (prompt, tokens, logprobs, _) in enumerate(part):
            start, end = len(prompt), len(prompt) + len(tokens)
            columns[0][i, :end] = [*prompt, *tokens]
            columns[1][i, :end] = 1
            columns[2][i, start:end] = True
            columns[3][i, start:end] = logprobs
        advantage = torch.tensor([one[3] for one in part], dtype=torch.float32)
        tokens, attention, sampled, logprobs = (torch.from_numpy(column) for column in columns)
        found.append(Rows(tokens, attention, sampled, logprobs, advantage))
    return found


class Loop:
    """`step` on one batch after the other."""

    def __init__(self, path: str, rate: float) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0,
                                           fused=True)  # fmt: skip

    def step(self, batch: Sequence[Rows]) -> float:
        """The loss: truncated importance sampling, each sampled token alike."""
        total, loss = sum(int(rows.sampled.sum()) for rows in batch), 0.0
        for rows in batch:
            at = rows.sampled[:, 1:]
            hidden = self.model.model(input_ids=rows.tokens, attention_mask=rows.attention).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden[at])  # of the sampled tokens alone
            logprobs = -torch.nn.functional.cross_entropy(logits, rows.tokens[:, 1:][at], reduction="none")
            ratio = (logprobs.detach() - rows.logprobs[:, 1:][at]).exp().clamp(max=2.0)
            advantage = rows.advantage[:, None].expand(at.shape)[at]
            part = -(ratio * advantage * logprobs).sum() / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
