"""Writing several records as one, exactly once, under a transactional id that one process owns.

Who opens a Transactor takes the id over: its last owner is fenced, its open transaction is gone, and what it committed
can be read (a commit is acknowledged a moment before readers see it; a broker that dies in between leaves it to this
call). So a position is read from the log after taking over, never before. What a failure means is decided here: an
abortable one is aborted and everything is built and sent again (so records that name offsets get new ones); a commit
that may pass is asked for again; being fenced, or any fatal error, ends this Transactor, and its owner comes back only
with a fresh one, after reading from the log what became of the last transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.schemas.errors import Fenced, HeadraceError, LogError, RecordTooLarge
from headrace.schemas.topics import RECORD_BYTES

from .clients import KafkaConfig, reason, transactional_producer

T = TypeVar("T")

TIMEOUT_S = 120.0  # for one whole transaction, tries included: a broker that is away for a minute is waited for
TRANSACTION_TIMEOUT_S = 60.0  # after which the broker aborts an open one, which stalls its readers until then
PAUSE_S = 0.1

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH,
           KafkaError.TRANSACTION_COORDINATOR_FENCED}  # fmt: skip
# The same record would fail in the same way again.
_PERMANENT = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE,
              KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP, KafkaError.TOPIC_EXCEPTION,
              KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
              KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC,
              KafkaError._UNKNOWN_PARTITION, KafkaError._INVALID_ARG}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """A record to write; the partition is always the writer's choice."""

    topic: str
    partition: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Consumed:
    """Positions that become those of a consumer group with a transaction, if it commits."""

    positions: Sequence[TopicPartition]
    group: object  # `Consumer.consumer_group_metadata()`


Send = Callable[[Sequence[Output]], list[int]]


class _Abort(Exception):
    """This try is to be aborted and done again."""


class _Retry(_Abort):
    """The same call may be made again, where that makes sense."""


def _from_kafka(raised: KafkaException | SystemError) -> KafkaException:
    """With a delivery callback set, the client dresses a fatal error up as a SystemError."""
    if isinstance(raised, KafkaException):
        return raised
    if isinstance(raised.__cause__, KafkaException):
        return raised.__cause__
    raise raised


class Transactor:
    """The owner of one transactional id. Not for several threads."""

    def __init__(self, config: KafkaConfig, transactional_id: str, *, timeout_s: float = TIMEOUT_S,
                 transaction_timeout_s: float = TRANSACTION_TIMEOUT_S, record_bytes: int = RECORD_BYTES):  # fmt: skip
        """Fences the id's last owner. No record may have more than `record_bytes` of value. Raises LogError when the
        broker refuses or does not answer in time."""
        self.transactional_id = transactional_id
        self._timeout_s = timeout_s
        self._record_bytes = record_bytes
        self._deadline = time.monotonic() + timeout_s
        self._dead: HeadraceError | None = None
        self._producer = transactional_producer(config, transactional_id, transaction_timeout_s, record_bytes)
        self._insist(self._producer.init_transactions, "its id could not be taken over")

    def commit(self, build: Callable[[Send], T], consumed: Consumed | None = None) -> T:
        """One transaction of what `build` sends, and of `consumed`; returns what `build` returned, committed.

        `build(send)` calls `send(outputs)` as often as it likes and gets the offsets of those records, in order, with
        which it may build the next ones. It may be called several times and only the last one's records count, so it
        must not change anything outside. An error it raises aborts the transaction and is passed on.
        Raises RecordTooLarge, Fenced or LogError; after Fenced, or once `alive` is False, open a new Transactor.
        """
        self._deadline = time.monotonic() + self._timeout_s
        while True:
            if self._dead is not None:
                raise self._dead
            try:
                # 1. Begin; 2. send, which waits until each record has an offset; 3. the positions, if any; 4. commit.
                self._call(self._producer.begin_transaction)
                built = build(self._send)
                if consumed is not None:
                    self._insist(lambda left_s: self._producer.send_offsets_to_transaction(
                        list(consumed.positions), consumed.group, left_s), "its positions were not taken")  # fmt: skip
                self._insist(self._producer.commit_transaction, "the commit's outcome is unknown")
                return built
            except _Abort as abort:
                self._abort()
                if self._left() <= 0:
                    raise LogError(f"transaction of {self.transactional_id}: gave up after {self._timeout_s:g} s, "
                                   f"nothing of it was written: {abort}") from abort  # fmt: skip
                time.sleep(PAUSE_S)
            except BaseException:
                if self._dead is None:
                    self._abort()
                raise

    def send(self, outputs: Sequence[Output]) -> list[int]:
        """One transaction of these records; their offsets, in order. Raises as `commit` does; RecordTooLarge before
        anything begins."""
        self._check_sizes(outputs)
        return self.commit(lambda send: send(outputs))

    @property
    def alive(self) -> bool:
        """False once fenced, failed or closed."""
        return self._dead is None

    def close(self) -> None:
        """Give the id up. Nothing is pending between calls, so there is nothing to wait for."""
        self._dead = self._dead or LogError(f"transactional id {self.transactional_id}: closed")
        del self._producer  # its close() would try to abort, and warn where the id is no longer ours

    def _send(self, outputs: Sequence[Output]) -> list[int]:
        self._check_sizes(outputs)
        offsets = [-1] * len(outputs)
        failed: list[tuple[Output, KafkaError]] = []
        for i, output in enumerate(outputs):
            self._produce(output, self._on_delivery(i, output, offsets, failed))
        if self._call(lambda: self._producer.flush(max(0.0, self._left()))):
            raise _Abort("the broker did not take the records in time")
        for output, error in failed:
            where = f"{output.topic}[{output.partition}]: a record of {len(output.value or b'')} bytes"
            self._judge(error, where)
            raise _Abort(f"{where}: {error.str()} [{error.name()}]")
        if -1 in offsets:  # written, but where is unknown: the broker recognised a repeat
            raise _Abort("a record was acknowledged without its offset")
        return offsets

    def _check_sizes(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if (size := len(output.value or b"")) > self._record_bytes:
                raise RecordTooLarge(f"{output.topic}: a record of {size} bytes, and it may hold {self._record_bytes}; "
                                     "nothing of its transaction was written")  # fmt: skip

    def _produce(self, output: Output, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
        while True:
            try:
                self._call(lambda: self._producer.produce(
                    output.topic, value=output.value, key=output.key, partition=output.partition,
                    headers=list(output.headers), on_delivery=on_delivery))  # fmt: skip
                self._call(lambda: self._producer.poll(0))
                return
            except BufferError as full:  # the queue is bounded: let the broker take some
                if self._left() <= 0:
                    raise _Abort("the broker did not take the records in time") from full
                self._call(lambda: self._producer.poll(0.1))

    @staticmethod
    def _on_delivery(i: int, output: Output, offsets: list[int], failed: list[tuple[Output, KafkaError]]
                     ) -> Callable[[KafkaError | None, Message], None]:  # fmt: skip
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append((output, error))
            elif (offset := message.offset()) is not None and offset >= 0:
                offsets[i] = offset

        return delivered

    def _abort(self) -> None:
        self._insist(self._producer.abort_transaction, "it could not be aborted")

    def _insist(self, call: Callable[[float], None], what: str) -> None:
        """Make a call again for as long as its error may pass; the deadline is shared by all calls of one path."""
        while True:
            try:
                self._call(lambda: call(max(1.0, self._left())))
                return
            except _Retry as retry:
                if self._left() <= 0:
                    message = f"{what}: no answer within {self._timeout_s:g} s ({retry})"
                    raise self._die(LogError(f"transactional id {self.transactional_id}: {message}")) from retry
                time.sleep(PAUSE_S)

    def _call(self, call: Callable[[], T]) -> T:
        """Make a call and turn Kafka's error into ours."""
        try:
            return call()
        except (KafkaException, SystemError) as raised:
            cause = _from_kafka(raised)
            if cause.args[0].code() == KafkaError._FATAL:  # something was, says `produce`; the other calls say what
                try:
                    self._producer.begin_transaction()
                except (KafkaException, SystemError) as known:
                    cause = _from_kafka(known)
            error: KafkaError = cause.args[0]
            self._judge(error, f"transactional id {self.transactional_id}", cause)
            if error.txn_requires_abort():
                raise _Abort(reason(cause)) from cause
            if error.retriable() or error.code() == KafkaError._TIMED_OUT:
                raise _Retry(reason(cause)) from cause
            said = f"transactional id {self.transactional_id}: {reason(cause)}"
            raise self._die(LogError(said)) from cause

    def _judge(self, error: KafkaError, where: str, cause: BaseException | None = None) -> None:
        """Raise what no repetition mends."""
        said = f"{where}: {error.str()} [{error.name()}]"
        if error.code() in _FENCED:
            raise self._die(Fenced(f"{said}: another process owns the transactional id {self.transactional_id} now, or "
                                   "the broker aborted a transaction that took too long")) from cause  # fmt: skip
        if error.fatal():
            raise self._die(LogError(said)) from cause
        if error.code() in _PERMANENT:
            raise LogError(said) from cause

    def _die(self, error: HeadraceError) -> HeadraceError:
        self._dead = error
        return error

    def _left(self) -> float:
        return self._deadline - time.monotonic()
