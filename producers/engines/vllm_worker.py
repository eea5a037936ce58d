"""What Headrace adds to vLLM's worker process: weights that can be overwritten and compared in place.

vLLM loads this module there by name (`worker_extension_cls`) before it loads the model. Tensors are named as in the
model's folder; how they lie in vLLM (fused, sharded) is the business of the model's own `load_weights`, so any model
that vLLM can load can be updated.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.platforms import current_platform

from ..lifeline import die_with_parent
from .served import Part, from_text


def _keep_weights_in_place() -> None:
    """vLLM's CPU build packs each matrix once and computes with the packed copy, where an update would be lost."""
    if not current_platform.is_cpu():
        return

    def keep(self: Any, layer: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    linear.LinearBase._cpu_skip_gemm_dispatch = True
    vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading = keep


_keep_weights_in_place()
if os.environ.get("HEADRACE_ENGINE_PARENT") == str(os.getppid()):
    die_with_parent(os.getppid())  # vLLM's engine process would outlive a worker that is killed


class Extension:
    """Methods of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any

    def headrace_write(self, dtype: str, parts: list[Part] | str) -> None:
        """Overwrite served weights. What is sent was checked; an error here leaves them in a state that nobody
        knows."""
        model = self.model_runner.model
        dense, sparse = _patches(dtype, parts)
        with torch.no_grad():
            if dense:
                load_checkpoint_weight_patches(model, dense)
            if sparse:
                # The deltas that they come from name each position once.
                load_checkpoint_weight_patches(model, sparse, validate_unique_indices=False)

    def headrace_differing(self, dtype: str, parts: list[Part] | str) -> list[str]:
        """Names of the whole tensors in `parts` that are not what vLLM computes with, or that it has no place for."""
        differing = []
        for patch in _patches(dtype, parts)[0]:
            written = _same(self.model_runner.model, patch)
            if not written or not all(written):
                differing.append(patch.name)
        return differing


def _patches(dtype: str, parts: list[Part] | str
             ) -> tuple[list[CheckpointWeightPatch], list[CheckpointWeightPatch]]:  # fmt: skip
    dense, sparse = [], []
    torch_dtype = getattr(torch, dtype)
    for name, shape, positions, values in from_text(parts) if isinstance(parts, str) else parts:
        flat = torch.frombuffer(bytearray(values), dtype=torch_dtype)
        if positions is None:
            dense.append(CheckpointWeightPatch(name, tuple(shape), torch_dtype, flat))
        else:
            index = torch.frombuffer(bytearray(positions), dtype=torch.int64)
            sparse.append(CheckpointWeightPatch(name, tuple(shape), torch_dtype, flat, index))
    return dense, sparse


def _same(model: Any, patch: CheckpointWeightPatch) -> list[bool]:
    """Whether each place that the model's loader would write a tensor to holds it already; nothing is written."""
    found: list[bool] = []
    original = torch.Tensor.copy_

    def compare(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        found.append(torch.equal(destination, source.to(destination)))
        return destination

    torch.Tensor.copy_ = compare  # type: ignore[assignment, method-assign]
    try:
        with torch.no_grad():
            model.load_weights([(patch.name, patch.values.view(patch.shape))])
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
    return found


assert sys.byteorder == "little", "parts are little-endian"
