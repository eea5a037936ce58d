"""What an ended episode was, why, and which boundary failed: the one vocabulary of outcomes, closures and accounts.

The split matters because an infrastructure failure that trains the policy poisons it, while a failure of the model's
own making must always count. Classify where it happens, before an exception crosses a process.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    MODEL_SUCCESS = "model_success"
    MODEL_FAILURE = "model_failure"
    INFRA_FAILURE = "infra_failure"
    UNKNOWN = "unknown"

    @property
    def trainable(self) -> bool:
        """Only what the model did may train it."""
        return self in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


class Boundary(StrEnum):
    NONE = "none"
    MODEL = "model"
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    SCORER = "scorer"
    PRODUCER = "producer"
    LOG = "log"


class Limit(StrEnum):
    """What a sandbox has a bounded amount of: whoever uses it up has used it up."""

    MEMORY = "memory"
    PROCESSES = "processes"
    DISK = "disk"
    TIME = "time"


class Closure(StrEnum):
    CANDIDATE = "candidate"
    ZERO_VARIANCE = "zero_variance"
    TOO_FEW_SURVIVORS = "too_few_survivors"
    EXPIRED = "expired"
    EVALUATED = "evaluated"
    UNMANAGED = "unmanaged"


class Disposition(StrEnum):
    """The final fate of a candidate. Every other closure is its group's disposition by itself."""

    BATCHED = "batched"
    STALE = "stale"
    LEFTOVER = "leftover"


class Account(StrEnum):
    """Exactly one for every logged model token."""

    TRAINED = "trained"
    MASKED = "masked"
    EXCLUDED = "excluded"
    SURPLUS = "surplus"
    SUPERSEDED = "superseded"
    FOREIGN = "foreign"
    LATE = "late"
    OPEN = "open"


class Source(StrEnum):
    PROMPT = "prompt"
    MODEL = "model"
    ENVIRONMENT = "environment"


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


# Reasons that are written by more than one place, or that a reader looks for by name.
REASON_STOP = "stop"
REASON_LENGTH = "length"
REASON_SEQUENCE_GAP = "sequence_gap"
REASON_CONFLICTING_REPEAT = "conflicting_repeat"
REASON_DEADLINE = "deadline"
REASON_BUDGET_SPENT = "budget_spent"
REASON_WORKER_LOST = "worker_lost"
REASON_EXHAUSTED = "attempts_exhausted"
REASON_SCORER_TIMEOUT = "scorer_timeout"
REASON_SCORER_FAILED = "scorer_failed"
REASON_PRODUCER_RAISED = "producer_raised"
REASON_ENVIRONMENT_FAILED = "environment_failed"
REASON_PROMPT_TOO_LONG = "prompt_too_long"
REASON_HANDED_BACK = "handed_back"
REASON_DELIVERY_FAILED = "delivery_failed"
REASON_BLOB_FAILED = "blob_failed"
REASON_RECORD_TOO_LARGE = "record_too_large"
REASON_NEVER_FINISHED = "never_finished"
REASON_NEVER_STARTED = "never_started"
REASON_PRODUCER_CLOSED = "producer_closed"
REASON_FENCED = "replica_fenced"
REASON_WEIGHTS = "weights_changed"
REASON_OTHER_VERSION = "other_version"
REASON_ENGINE_LOST = "engine_lost"
