"""Whoever makes trajectories: the rollout SDK, the worker, engines and environments."""
