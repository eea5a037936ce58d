"""What of a model's forward engine and trainer must do alike beside its weights: the precision of the head, and the
grid of weights that are computed with in fewer bits.

Both change what a token's log-probability is, so both are run settings, and both sides take them from here. torch is
imported where it is used: the core stays without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INT8_MOST, FP8_MOST = 127.0, 448.0  # largest magnitude of a symmetric int8, and of float8 e4m3


def widen_head(model: Any) -> None:
    """Have a causal language model compute its logits in float32, in place: the last hidden state and the head's
    weights are widened before their product. A model that computes in float32 or more stays as it is.

    In bfloat16 a logit of 20 is rounded to steps of 0.125, which no softmax afterwards brings back (MiniMax-M1,
    arXiv:2506.13585, section 3.2, found engine and trainer apart for that reason).
    """
    from torch.nn.functional import linear

    if model.dtype.itemsize >= 4:
        return
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward


def quantised_names(model: Any) -> frozenset[str]:
    """The parameters that a quantised forward rounds: weights of linear layers, without the head. Embeddings, norms and
    biases stay as they are, as in the engines' weight-only schemes."""
    from torch.nn import Linear

    head = model.get_output_embeddings()
    return frozenset(f"{name}.weight" for name, module in model.named_modules()
                     if isinstance(module, Linear) and module is not head)  # fmt: skip


def fake_quantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights [out, in] that `kind` (int8 | fp8) can hold, nearest to these; float32. One scale per output channel,
    symmetric: its largest magnitude over 127, or over 448 for e4m3. Activations stay as they are.

    Source: LLM.int8 (arXiv:2208.07339), vector-wise; FP8 formats (arXiv:2209.05433).
    """
    import torch

    wide = weight.float()
    most = INT8_MOST if kind == "int8" else FP8_MOST
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / most
    if kind == "int8":
        return (wide / scale).round() * scale
    return (wide / scale).to(torch.float8_e4m3fn).float() * scale
