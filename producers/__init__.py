"""Whoever makes trajectories: the rollout SDK, the worker, engines and environments."""

from .sdk import open_producer

__all__ = ["open_producer"]
