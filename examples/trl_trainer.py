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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headrace.trainer import open_trainer
from headrace.trainer.door import OpenTrainer


class FromHeadrace(GRPOTrainer):  # type: ignore[misc]
    source: OpenTrainer

    def _prepare_inputs(self, _: Any) -> dict[str, torch.Tensor]:
        """The next batch, in TRL's words: its prompt is the first token, and tools' tokens are context."""
        self.batch = next(self.source.batches())
        rows = {name: column.to(self.accelerator.device) for name, column in self.batch.padded().items()}
        now = {name: column[:, 1:] for name, column in rows.items()}
        return {"prompt_ids": rows["tokens"][:, :1], "prompt_mask": rows["attention"][:, :1].long(),
                "completion_ids": now["tokens"], "completion_mask": now["attention"].long(),
                "tool_mask": now["sampled"].long(), "advantages": now["advantages"] * now["weights"],
                "old_per_token_logps": now["logprobs"], "num_items_in_batch": now["sampled"].sum()}  # fmt: skip


def rewarded(*_: Any, **__: Any) -> list[float]:
    """TRL asks for such a function; it never calls it here."""
    raise AssertionError("rewards come with the batch, as advantages")


class Publish(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: FromHeadrace) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.trainer.source.publish(self.trainer.batch.version, model.state_dict())


def train(run: str, kafka: Mapping[str, Any], versions: int, rate: float = 1e-5) -> None:
    """From version 0 to `versions`."""
    with open_trainer(run, kafka) as source, tempfile.TemporaryDirectory() as folder:
        path = source.settings.model.path
        config = GRPOConfig(folder, max_steps=versions, learning_rate=rate, lr_scheduler_type="constant", bf16=False,
                            temperature=source.settings.rollout.temperature, num_generations=2, save_strategy="no",
                            per_device_train_batch_size=2, report_to="none")  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = FromHeadrace(model, rewarded, args=config, processing_class=AutoTokenizer.from_pretrained(path),
                               train_dataset=Dataset.from_dict({"prompt": [""] * 2}))  # fmt: skip
        trainer.source = source
        trainer.add_callback(Publish(trainer))
        trainer.train()


if __name__ == "__main__":
    train(sys.argv[1], {"bootstrap.servers": sys.argv[2]}, int(sys.argv[3]) if len(sys.argv) > 3 else 100)
