"""Decides what a LoRA adapter is at version 0, and under which names its tensors are published (arXiv:2106.09685).

Trainer and engines put it into the model folder's model each by themselves, so both must come to the same numbers from
the settings alone: A is drawn from a stream of its own for each tensor (uniform within 1 / sqrt(inputs), as in the
peft library), B is 0, and so the model is the folder's. Names are those of peft's adapter files.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ModelError
from .settings import LoraSettings

PREFIX = "base_model.model."  # what peft's files call the model that is adapted


def initial(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """float32 of that shape: a tensor of version 0, by its published name. The same everywhere for the same seed."""
    if ".lora_A." not in name:
        return np.zeros(shape, np.float32)
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, zlib.crc32(name.encode())]))
    bound = 1 / math.sqrt(shape[1])
    return random.uniform(-bound, bound, shape).astype(np.float32)


def inject(model: Any, lora: LoraSettings) -> dict[str, Any]:
    """Put the adapter into a Hugging Face model, in place; published name -> its parameters (float32 values of version
    0, in the model's dtype). The rest of the model no longer asks for gradients. Raises ModelError where peft is
    missing, or the model has none of the layers that are to be adapted."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError("model.lora needs peft: install headrace[lora]") from error
    import torch

    targets = list(lora.targets) or "all-linear"
    try:
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights=False)
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ModelError(f"model.lora.targets: {error}") from error
    found = {}
    with torch.no_grad():
        for own_name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            name = PREFIX + own_name.replace(".default.", ".")
            parameter.copy_(torch.from_numpy(initial(name, tuple(parameter.shape), lora.seed)))
            found[name] = parameter
    model.eval()  # a new layer is in training mode
    return found
