"""Decides which model the trainer computes with: the folder's, without dropout, with an adapter where the run trains
one, and with activations kept or computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.schemas.errors import ModelError


def load_model(model_path: str | Path) -> Any:
    """In float32. Raises ModelError."""
    if not (Path(model_path) / "config.json").is_file():
        raise ModelError(f"{model_path} holds no config.json: model_path must be a Hugging Face model folder")
    transformers.utils.logging.disable_progress_bar()
    try:
        # Without dropout (eval): what is differentiated is the policy that is served.
        return AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} can't be loaded as a causal language model: {error}") from error


def layers(model: Any) -> Iterator[Any]:
    """Its transformer layers."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def recompute_activations(model: Any) -> None:
    """Keep only each layer's input and compute the rest again in the backward pass: the same bits, less memory, a third
    more time (arXiv:1604.06174). Raises ModelError where the model can't."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"optimizer.recompute_activations: {error}") from error
    for layer in layers(model):
        layer.training = True  # the layer alone, which asks for it; what is in it stays without dropout
