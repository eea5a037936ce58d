"""What an ended episode was, why, and which boundary failed: the one vocabulary of outcomes, closures and accounts.

The split matters because an infrastructure failure that trains the policy poisons it, while a failure of the model's
own making must always count. Classify where it happens, before an exception crosses a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import (
    BlobError,
    DaemonLost,
    DeliveryFailed,
    EnvironmentFailed,
    FailedElsewhere,
    RecordTooLarge,
    ReplicaLost,
    SandboxFailed,
    SandboxLost,
)


class Outcome(StrEnum):
    """What an attempt ended with, and whose doing that was."""

    MODEL_SUCCESS = "model_success"
    MODEL_FAILURE = "model_failure"
    INFRA_FAILURE = "infra_failure"
    UNKNOWN = "unknown"

    @property
    def trainable(self) -> bool:
        """Only what the model did may train it."""
        return self in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)


class Boundary(StrEnum):
    """At which part a failure happened."""

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
    """How a group closed; only a candidate can be trained."""

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
    SUSPICIOUS = "suspicious"


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
    """Where a span's tokens are from."""

    PROMPT = "prompt"
    MODEL = "model"
    ENVIRONMENT = "environment"


class Purpose(StrEnum):
    """What a group is sampled for."""

    TRAIN = "train"
    EVAL = "eval"


# Reasons that are written by more than one place, or that a reader looks for by name.
SUSPICIOUS = str(Disposition.SUSPICIOUS)  # also why tokens of one episode are excluded
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
REASON_MEMORY = "memory_exhausted"
REASON_PROCESSES = "processes_exhausted"
REASON_DISK = "disk_exhausted"
REASON_STEP_TIMEOUT = "step_timeout"
REASON_SANDBOX_ENDED = "sandbox_ended"
REASON_SCORER_BROKEN = "scorer_broken_by_model"
REASON_SANDBOX_FAILED = "sandbox_failed"
REASON_SANDBOX_LOST = "sandbox_lost"
REASON_DAEMON_LOST = "daemon_lost"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: its outcome, why, and the boundary that failed."""

    outcome: Outcome
    reason: str
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class Reason:
    """A line of the table. `outcome`: None where the verifier's verdict decides."""

    name: str
    boundary: Boundary
    outcome: Outcome | None
    meaning: str

    def ending(self, success: bool = False) -> Ending:
        """`success`: the verdict, where that decides."""
        outcome = self.outcome or (Outcome.MODEL_SUCCESS if success else Outcome.MODEL_FAILURE)
        return Ending(outcome, self.name, Boundary.NONE if outcome is Outcome.MODEL_SUCCESS else self.boundary)


def _table(outcome: Outcome | None, boundary: Boundary, *lines: tuple[str, str]) -> list[Reason]:
    return [Reason(name, boundary, outcome, meaning) for name, meaning in lines]


# Every reason that an attempt's end may have. docs/outcomes.md is this table: a test compares them, and another one the
# table with what the code writes.
REASONS: dict[str, Reason] = {one.name: one for one in [
    *_table(None, Boundary.MODEL,
            (REASON_STOP, "the model said that it is done, and its answer was scored"),
            (REASON_LENGTH, "the model reached its length, in tokens or turns, and what there was then was scored"),
            ("finished", "an agent's attempt was finished through the gateway, with a reward")),
    *_table(Outcome.MODEL_FAILURE, Boundary.MODEL,
            (REASON_BUDGET_SPENT, "the attempt's own clock (tokens, turns, the model's and its tools' time) is spent"),
            (REASON_EXHAUSTED, "all attempts ended without an outcome, and no fault of ours is on record"),
            (REASON_MEMORY, "what ran in the sandbox ate its memory, and the sandbox with it"),
            (REASON_PROCESSES, "what ran in the sandbox used up its processes, and it couldn't be brought to order"),
            (REASON_DISK, "what ran in the sandbox wrote more than it may, and was ended"),
            (REASON_STEP_TIMEOUT, "a step took too long, and its processes couldn't be ended without the sandbox"),
            (REASON_SANDBOX_ENDED, "what ran in the sandbox killed its shells, or kept them from answering"),
            (REASON_SCORER_BROKEN, "the scorer breaks on what the model left, and works on the task as it was given")),
    *_table(Outcome.INFRA_FAILURE, Boundary.SANDBOX,
            (REASON_SANDBOX_FAILED, "no sandbox could be started: its image or base, the machine, or no room in time"),
            (REASON_SANDBOX_LOST, "the sandbox was killed from outside, or the connection to it was cut"),
            (REASON_DAEMON_LOST, "the daemon that keeps the sandboxes is gone, or doesn't answer")),
    *_table(Outcome.INFRA_FAILURE, Boundary.SCORER,
            (REASON_SCORER_TIMEOUT, "the scorer gave no verdict in its time, on the task as it was given either"),
            (REASON_SCORER_FAILED, "the scorer raised, died, or gave no verdict")),
    *_table(Outcome.INFRA_FAILURE, Boundary.ENVIRONMENT,
            (REASON_ENVIRONMENT_FAILED, "the environment's host died, hung or raised"),
            (REASON_PROMPT_TOO_LONG, "the task's prompt is longer than the engine takes"),
            ("no_turn", "an agent was finished without a turn of the model")),
    *_table(Outcome.INFRA_FAILURE, Boundary.ENGINE,
            (REASON_ENGINE_LOST, "the engine died, hung or refused the request")),
    *_table(Outcome.INFRA_FAILURE, Boundary.PRODUCER,
            (REASON_PRODUCER_RAISED, "our own code, or the caller's, raised"),
            (REASON_PRODUCER_CLOSED, "the producer was closed while the attempt ran"),
            (REASON_NEVER_STARTED, "the attempt was handed back before it began"),
            (REASON_WORKER_LOST, "the worker died, or its heartbeats stopped"),
            (REASON_RECORD_TOO_LARGE, "an event is larger than a record may be"),
            (REASON_BLOB_FAILED, "the blob store refused a payload"),
            (REASON_CONFLICTING_REPEAT, "an event came twice with different content"),
            ("invalid_event", "an event breaks a rule of its kind"),
            (REASON_DEADLINE, "the group's deadline passed while the attempt's own clock was not spent")),
    *_table(Outcome.INFRA_FAILURE, Boundary.LOG,
            (REASON_DELIVERY_FAILED, "the broker refused an event for good"),
            (REASON_SEQUENCE_GAP, "an event is missing")),
    *_table(Outcome.UNKNOWN, Boundary.PRODUCER,
            (REASON_NEVER_FINISHED, "the caller left the attempt without saying how it ended")),
    *_table(Outcome.UNKNOWN, Boundary.ENVIRONMENT,
            ("agent_silent", "an agent neither asked nor finished for too long")),
    *_table(Outcome.UNKNOWN, Boundary.NONE,
            ("surplus", "a reserve that wasn't needed")),
]}  # fmt: skip

# What a sandbox that is lost is blamed on, first match first: what made the others happen comes before them.
_BY_LIMIT = {Limit.MEMORY: REASON_MEMORY, Limit.PROCESSES: REASON_PROCESSES, Limit.DISK: REASON_DISK,
             Limit.TIME: REASON_STEP_TIMEOUT}  # fmt: skip
_BY_ERROR: dict[type[BaseException], str] = {
    DaemonLost: REASON_DAEMON_LOST, SandboxFailed: REASON_SANDBOX_FAILED, EnvironmentFailed: REASON_ENVIRONMENT_FAILED,
    ReplicaLost: REASON_ENGINE_LOST, RecordTooLarge: REASON_RECORD_TOO_LARGE, BlobError: REASON_BLOB_FAILED,
    DeliveryFailed: REASON_DELIVERY_FAILED,
}  # fmt: skip


def of_error(error: BaseException) -> Ending:
    """Whose fault an error is. One that nobody foresaw is ours. A limit that was met makes it the model's, whatever
    else happened: otherwise using it up would be a way out."""
    if isinstance(error, FailedElsewhere):
        reason = error.reason
    elif isinstance(error, SandboxLost):
        met = next((reason for limit, reason in _BY_LIMIT.items() if limit in error.limits), None)
        reason = met or (REASON_DAEMON_LOST if error.daemon else
                         REASON_SANDBOX_ENDED if error.from_within else REASON_SANDBOX_LOST)  # fmt: skip
    else:
        reason = next((name for kind, name in _BY_ERROR.items() if isinstance(error, kind)), REASON_PRODUCER_RAISED)
    return REASONS[reason].ending()


def markdown() -> str:
    """The table for docs/outcomes.md."""
    lines = ["| outcome | boundary | reason | meaning |", "|---|---|---|---|"]
    lines += [f"| {f'`{one.outcome}`' if one.outcome else 'the verdict decides'} | {one.boundary} | `{one.name}` | "
              f"{one.meaning} |" for one in REASONS.values()]  # fmt: skip
    return "\n".join(lines) + "\n"
