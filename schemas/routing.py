"""What engine and trainer must do alike in a mixture-of-experts model: which experts a token goes through. The engine
records its routers' choices, the trainer's routers take them as recorded.

A router's choice is discrete: where two experts are nearly as good, rounding decides, and a token that goes through
other experts has another distribution altogether. So replaying the choices removes what no precision does (R3,
arXiv:2510.11370). Only the choice is replayed: the experts' weights are computed from the trainer's own router, so that
gradients reach it. torch is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .columns import Int16
from .errors import InvalidRecord, ModelError

if TYPE_CHECKING:
    import torch

Experts = Int16  # [tokens, layers, experts a token]; -1: not recorded

_ROWS = 8  # random hidden states on which a router is tried


def routers(model: Any) -> list[Any]:
    """Those of its layers, in order. Raises ModelError where there are none, or one of them weighs its experts in a way
    that isn't known here."""
    found = [module for module in model.modules() if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))]
    if not found:
        raise ModelError(f"{type(model).__name__} has no routers that are known here: model.replay_routing is for "
                         "mixture-of-experts models such as Qwen3-MoE, OLMoE and Mixtral")  # fmt: skip
    for router in found:
        _rule(router)
    return found


class Recording:
    """The choices of a model's routers in its newest forward pass."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError as `routers` does."""
        self._chosen: list[torch.Tensor | None] = []
        for number, router in enumerate(routers(model)):
            self._chosen.append(None)
            router.register_forward_hook(lambda _, __, output, number=number: self._keep(number, output))

    def _keep(self, number: int, output: Any) -> None:
        self._chosen[number] = output[2]

    def take(self) -> Experts:
        """int16 [tokens of the forward, layers, experts a token]."""
        import torch

        chosen = torch.stack([one for one in self._chosen if one is not None], dim=1)
        found: Experts = chosen.to("cpu", torch.int16).numpy()
        return found


class Replay:
    """Makes a model's routers take recorded choices, in place. `choose` before each forward; a backward pass that
    computes activations again takes the same ones."""

    def __init__(self, model: Any) -> None:
        """Raises ModelError as `routers` does."""
        self._experts: torch.Tensor | None = None
        found = routers(model)
        self._shape = len(found), int(found[0].top_k)
        self._most = min(router.weight.shape[0] for router in found)
        for number, router in enumerate(found):
            self._replace(number, router)

    def choose(self, experts: Experts | None, device: Any) -> None:
        """int16 [tokens of the next forwards, layers, experts a token]; where it is -1, and with None, the routers
        choose. Raises InvalidRecord for another model's."""
        import torch

        if experts is not None and (experts.shape[1:] != self._shape or int(experts.max(initial=-1)) >= self._most):
            layers, each = experts.shape[1:]
            raise InvalidRecord(f"tokens went through {each} experts in each of {layers} layers, numbered up to "
                                f"{experts.max(initial=-1)}; this model has {self._most}, and takes {self._shape[1]} "
                                f"in each of {self._shape[0]}")  # fmt: skip
        self._experts = None if experts is None else torch.from_numpy(experts).to(device, torch.int64)

    def _replace(self, number: int, router: Any) -> None:
        import torch

        own, rule = router.forward, _rule(router)

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, scores, chosen = own(hidden)
            if self._experts is None:
                return logits, scores, chosen
            recorded = self._experts[:, number]
            known = (recorded >= 0).all(-1, keepdim=True)
            taken = torch.where(known, recorded, chosen)
            return logits, torch.where(known, rule(logits, taken).to(scores.dtype), scores), taken

        router.forward = forward


def _rule(router: Any) -> Any:
    """How it weighs experts [tokens, k] by its logits [tokens, experts]: their softmax probabilities, as they are or
    made to sum to 1. Which of them is found by trying."""
    import torch

    def plain(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return logits.float().softmax(-1).gather(-1, experts)

    def normalised(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        scores = plain(logits, experts)
        return scores / scores.sum(-1, keepdim=True)

    weight = router.weight
    hidden = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        output = router(hidden)
    told = isinstance(output, tuple) and len(output) == 3 and output[2].shape == output[1].shape
    for rule in (plain, normalised) if told else ():
        if torch.allclose(rule(output[0], output[2]).float(), output[1].float(), rtol=1e-2, atol=1e-3):
            return rule
    raise ModelError(f"{type(router).__name__} weighs its experts in a way that isn't known here: "
                     "model.replay_routing can't be used with this model")  # fmt: skip
