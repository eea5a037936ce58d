"""Where time goes: the one vocabulary of waiting, for whoever measures it and whoever shows it."""

from __future__ import annotations

from enum import StrEnum


class Step(StrEnum):
    """The parts of an episode's time; keys of `timings_ms`."""

    QUEUE = "queue"  # leased or asked for, and not begun
    PREFILL = "prefill"  # until the first token
    DECODE = "decode"
    ENVIRONMENT = "environment"  # tools, and whatever else the environment does between turns
    SANDBOX_START = "sandbox_start"
    SCORER = "scorer"


MODEL_TIME = "model"  # of `timings_ms`, beside the steps: what the decoding takes with the engine to itself


class Idle(StrEnum):
    """Why an engine had nothing to decode."""

    PACED = "paced"  # nothing may be opened: the rooms that `max_lag` allows are full
    NO_REQUESTS = "no_requests"  # work could be leased, and none has come (yet)
    ENVIRONMENT = "environment"  # every episode here waits for its environment or scorer
    WEIGHTS = "weights"  # episodes wait for a version that this engine doesn't serve yet, or weights are applied
    UNROUTED = "unrouted"  # requests wait, and no replica may take them


class TrainerTime(StrEnum):
    """What the trainer does with its time."""

    COMPUTE = "compute"
    WAITING = "waiting"  # for a manifest
    FETCHING = "fetching"
    COMMITTING = "committing"
    PUBLISHING = "publishing"  # waiting for the version before to be on its way: publication has fallen behind
