"""TRL as a run's trainer: its GRPO loss and optimizer, on batches from Headrace instead of its own generation.

    python examples/trl_trainer.py RUN HOST:PORT [VERSIONS]

As examples/plain_pytorch.py, in place of `headrace start trainer RUN`. Needs headrace[train,trl].
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from headrace.trainer import open_trainer


class FromHeadrace(GRPOTrainer):  # type: ignore[misc]
    source: Any  # what `open_trainer` gives
    batch = None

    def _prepare_inputs(self, _: Any) -> dict[str, torch.Tensor]:
        """The next batch, in TRL's words: its prompt is the first token, and tools' tokens are context."""
        self.publish()
        self.batch = next(self.source.batches())
        rows = {name: column.to(self.accelerator.device) for name, column in self.batch.padded().items()}
        now = {name: column[:, 1:] for name, column in rows.items()}
        return {"prompt_ids": rows["tokens"][:, :1], "prompt_mask": rows["attention"][:, :1].long(),
                "completion_ids": now["tokens"], "completion_mask": now["attention"].long(),
                "tool_mask": now["sampled"].long(), "advantages": now["advantages"] * now["weights"],
                "old_per_token_logps": now["logprobs"], "num_items_in_batch": now["sampled"].sum()}  # fmt: skip

    def publish(self) -> None:
        if self.batch is not None:
            self.source.publish(self.batch.version, self.model.state_dict())


def train(run: str, kafka: Mapping[str, Any], versions: int, rate: float = 1e-5) -> None:
    """From version 0 to `versions`, one optimizer step each. Rewards come with the batch: TRL's function has none."""
    with open_trainer(run, kafka) as source, tempfile.TemporaryDirectory() as folder:
        path, temperature = source.settings.model.path, source.settings.rollout.temperature
        config = GRPOConfig(folder, max_steps=versions, learning_rate=rate, temperature=temperature, num_generations=2,
                            per_device_train_batch_size=2, bf16=False, save_strategy="no", report_to="none")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = FromHeadrace(model, lambda **_: [], args=config, processing_class=AutoTokenizer.from_pretrained(path),
                               train_dataset=Dataset.from_dict({"prompt": [""] * 2}))  # fmt: skip
        trainer.source = source
        trainer.train()
        trainer.publish()


if __name__ == "__main__":
    train(sys.argv[1], {"bootstrap.servers": sys.argv[2]}, int(sys.argv[3]) if len(sys.argv) > 3 else 100)
