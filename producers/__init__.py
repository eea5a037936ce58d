"""Whoever makes trajectories: the rollout SDK, the worker, engines and environments."""

from .groups import ModelFailure
from .sdk import open_producer

__all__ = ["ModelFailure", "open_producer"]
