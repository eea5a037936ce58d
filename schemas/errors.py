"""The one tree of errors: what a caller can catch, and what each says.

Every error is one sentence that names the record or the file, and a way out. The command line prints it and exits;
it never prints a traceback for one of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose."""


class SettingsError(HeadraceError):
    """A configuration file or a setting is wrong; the message names file and key."""


class RunNotFound(HeadraceError):
    """No run of that id on this cluster."""


class RunConflict(HeadraceError):
    """The run exists with other settings; the message prints the difference."""


class RunBusy(HeadraceError):
    """Processes of the run are at work; the message says what to stop."""


class NotAnnounced(HeadraceError):
    """This version writes records in forms that the run doesn't know yet: announce them first."""


class RecordError(HeadraceError):
    """A record can't be used. `where` is its address, once a reader knows it."""

    def __init__(self, message: str, topic: str | None = None, partition: int | None = None, offset: int | None = None):
        self.topic, self.partition, self.offset = topic, partition, offset
        where = f"{topic}[{partition}]@{offset}: " if topic is not None else ""
        super().__init__(where + message)


class UndecodableRecord(RecordError):
    """Not a single-object Avro record of a known schema, or one that ends too early or too late."""


class UnknownSchema(UndecodableRecord):
    """An Avro record of a schema that this process has not met. Where its writer is a newer Headrace, the schema stands
    in `policy`: learn it there, then decode again."""

    def __init__(self, fingerprint: bytes):
        self.fingerprint = fingerprint  # the eight bytes after the marker
        super().__init__(f"unknown schema fingerprint {fingerprint.hex()}; was it written by a newer version of "
                         "Headrace that didn't announce it in `policy`?")  # fmt: skip


class UnencodableRecord(RecordError):
    """A value that its field doesn't hold; the message names the kind of record and the field. Nothing was written."""


class InvalidRecord(RecordError):
    """Decoded, but breaks a rule of its kind (columns of unequal length, a model token without logprob, ...)."""


class BlobError(RecordError):
    """The blob store refused or failed; the message names the blob's address."""


class BlobLost(BlobError):
    """There is no such blob: it was deleted, or the store is another one."""


class BlobDamaged(BlobError):
    """The blob has another length or digest than the record that names it says."""


class RecordTooLarge(HeadraceError):
    """An event or record is larger than a record may be. Nothing of it was written; the message says what to set."""


class LogError(HeadraceError):
    """Kafka refused or failed in a way that retries don't mend."""


class BrokerUnreachable(LogError):
    """No broker answers at the address."""


class ClusterError(HeadraceError):
    """The Ray cluster doesn't answer, or has no node for what is to run there; the message says what to start."""


class Fenced(LogError):
    """Another process took this role over; come back only with a fresh client."""


class HungTransaction(LogError):
    """A transaction that no time-out ends holds back everything behind it; the message says how to abort it."""


class DataLossError(LogError):
    """A position lies below what the topic still retains."""


class Backpressure(HeadraceError):
    """The outbox is full (or too many candidates wait): try again later, nothing was lost."""


class ProducerClosed(HeadraceError):
    """The producer has been closed or has failed; it takes no more events."""


class AttemptOver(ProducerClosed):
    """The attempt has ended, or its lease is gone; it takes no more events."""


class DeliveryFailed(AttemptOver):
    """The broker refused an event for good, so its attempt has ended as an infrastructure failure."""


class WrongThread(HeadraceError):
    """An episode belongs to the thread that opened it."""


class NoProgress(HeadraceError):
    """The run stands still; the message says which part and why."""


class Undelivered(NoProgress):
    """A producer was closed, and its deadline passed before everything was on the log. `unsent`: events, by episode."""

    def __init__(self, message: str, unsent: Mapping[str, int]):
        self.unsent = dict(unsent)
        super().__init__(message)


class TasksExhausted(HeadraceError):
    """The task source is empty or broken; the message names the task."""


class InvalidTask(TasksExhausted):
    """A task's folder is incomplete or its `task.toml` wrong; the message names file, line and key."""


class TooUniform(NoProgress):
    """Too many groups closed without a batch: the tasks are too hard or too easy for this policy."""


class WeightsRefused(HeadraceError):
    """A delta or snapshot was refused before anything was written; the served version stays."""


class WrongBase(WeightsRefused):
    """The delta's base is not the version (or not the bits) that is served here."""


class DamagedWeights(WeightsRefused):
    """A chunk is missing, repeated, or its checksum doesn't match."""


class NonFiniteLogprob(HeadraceError):
    """A NaN or infinite log-probability on a trainable token."""


class NonFiniteGradient(HeadraceError):
    """The gradient of a batch overflowed or is undefined; no weight was changed."""


class CheckpointError(HeadraceError):
    """A checkpoint is damaged or doesn't belong to the run."""


class ReplayMismatch(HeadraceError):
    """Re-training gave other bits than the log says."""


class ModelError(HeadraceError):
    """A model path is missing or isn't a causal language model."""


class EngineError(HeadraceError):
    """The engine refused a request that it can never run."""


class ReplicaLost(HeadraceError):
    """A replica died, hung or refused a request that another may run: nothing more of the request comes from it."""


class RequestAborted(ReplicaLost):
    """A replica gave a request up because its weights change: it may go on at once, there too."""


class EnvironmentFailed(HeadraceError):
    """The environment's host died, hung or raised: infrastructure, never the model's fault."""


class SandboxFailed(HeadraceError):
    """A sandbox couldn't be started, in time or at all: infrastructure, never the model's fault."""


class DaemonLost(SandboxFailed):
    """The daemon that sandboxes are asked of is gone, or doesn't answer in time; the message says at which address."""


class SandboxLost(HeadraceError):
    """A sandbox is gone, or was given up, under the step that it ran; the message says what happened.

    `limits`: which of its limits (`outcomes.Limit`) were met. `from_within`: what ran in it ended it; nobody outside
    did. `daemon`: its daemon is gone, or doesn't answer. Whose fault that makes it, `outcomes.of_error` says."""

    def __init__(self, message: str, limits: Collection[str] = (), *, from_within: bool = False, daemon: bool = False):
        self.limits, self.from_within, self.daemon = frozenset(limits), from_within, daemon
        super().__init__(message)


class FailedElsewhere(HeadraceError):
    """An attempt failed on the host that its environment runs on. `reason`: as `outcomes.REASONS` has it; it was given
    where the failure happened."""

    def __init__(self, message: str, reason: str):
        self.reason = reason
        super().__init__(message)
