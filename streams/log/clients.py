"""How Headrace talks to Kafka: the client properties that everything else relies on are decided here and nowhere else.

Producers are idempotent, never give a record up by time, and hold a bounded queue. Consumers are assigned, commit
nothing, read only what is committed, and stop at a position that is gone instead of jumping over the gap. What
librdkafka has to say goes to the logger `headrace.kafka`, never to the terminal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.schemas.errors import BrokerUnreachable, LogError, SettingsError
from headrace.schemas.topics import RECORD_BYTES, TopicSpec

KafkaConfig = Mapping[str, str | int | bool]
Isolation = Literal["read_committed", "read_uncommitted"]
T = TypeVar("T")

_log = logging.getLogger("headrace.kafka")
_log.addHandler(logging.NullHandler())  # else logging's last resort prints warnings to stderr

FRAMING_BYTES = 10_000  # key, headers and what the protocol adds to a record's value
# A topic was just created, its leader moves, or a broker dies with a question pending: another one knows better soon.
PASSING = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._TIMED_OUT,
           KafkaError._DESTROY_BROKER, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE,
           KafkaError.OFFSET_NOT_AVAILABLE}  # fmt: skip
# What a broker says of a new topic that it hasn't heard of, and a client that asked such a broker last.
UNHEARD = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
HEARD_S = 5.0

_EVERY_CLIENT: KafkaConfig = {
    "client.id": "headrace",
    "log_level": 4,
    "reconnect.backoff.max.ms": 500,  # back within half a second of the broker's return, not within ten
    # The default of 100 makes back-to-back transactions wait 90 ms each for the markers of the one before.
    "retry.backoff.ms": 10,
    # A topic is there before anyone writes to it: an unknown one is a mistake, and 30 s is long to wait for that.
    "topic.metadata.propagation.max.ms": int(1e3 * HEARD_S),
}

_PRODUCER: KafkaConfig = {
    **_EVERY_CLIENT,
    "enable.idempotence": True,
    "acks": "all",
    "compression.type": "zstd",
    "linger.ms": 5,
    "partitioner": "murmur2_random",
    "message.max.bytes": RECORD_BYTES + FRAMING_BYTES,
    # An outage fills this queue, and then the caller hears of it; memory stays bounded.
    "queue.buffering.max.kbytes": 64 << 10,
    "queue.buffering.max.messages": 100_000,
}

_CONSUMER: KafkaConfig = {
    **_EVERY_CLIENT,
    "group.id": "headrace-reader",  # the client insists on one; nothing joins it and nothing is committed to it
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
    "queued.max.messages.kbytes": 16 << 10,
    "fetch.queue.backoff.ms": 20,  # a full queue is looked at again soon: the default of 1 s would halve throughput
    "fetch.error.backoff.ms": 50,
}


def producer(config: KafkaConfig, **over: str | int | bool) -> Producer:
    """Idempotent; records wait for the broker for ever (`message.timeout.ms=0`), in a queue that raises BufferError
    when full. `over` are further client properties."""
    return _make(Producer, {**_PRODUCER, "message.timeout.ms": 0, **config, **over})


def transactional_producer(config: KafkaConfig, transactional_id: str, timeout_s: float,
                           record_bytes: int = RECORD_BYTES) -> Producer:  # fmt: skip
    """Not yet initialised. The broker aborts a transaction that stays open for `timeout_s`, or for the site's
    `transaction.timeout.ms`."""
    timeout = {"transaction.timeout.ms": int(timeout_s * 1000)}
    own = {"transactional.id": transactional_id, "message.max.bytes": record_bytes + FRAMING_BYTES}
    return _make(Producer, {**_PRODUCER, **timeout, **config, **own})


def consumer(config: KafkaConfig, isolation: Isolation = "read_committed") -> Consumer:
    """For assign() only. It reports ends of partitions, and a position that is gone as `_AUTO_OFFSET_RESET`."""
    return _make(Consumer, {**_CONSUMER, **config, "isolation.level": isolation})


def admin(config: KafkaConfig) -> AdminClient:
    """A client for topics and groups. Raises SettingsError for properties that librdkafka refuses."""
    return _make(AdminClient, {**_EVERY_CLIENT, **config})


def check_broker(config: KafkaConfig, timeout_s: float = 5.0) -> str:
    """The cluster's id. Raises BrokerUnreachable when no broker answers in time."""
    said: list[KafkaError] = []
    client = _make(AdminClient, {**_EVERY_CLIENT, **config, "error_cb": said.append})
    try:
        return str(client.list_topics(timeout=timeout_s).cluster_id)
    except KafkaException as error:
        client.poll(0)  # serves error_cb
        reasons = [str(one.str()) for one in said if one.code() != KafkaError._ALL_BROKERS_DOWN]
        raise BrokerUnreachable(
            f"no Kafka broker answers at {config.get('bootstrap.servers', '(bootstrap.servers is not set)')} within "
            f"{timeout_s:g} s ({reasons[-1] if reasons else reason(error)}): check the [kafka] table of the site "
            "settings, or start the development broker with `headrace broker start`"
        ) from error


def create_topics(config: KafkaConfig, specs: Iterable[TopicSpec], timeout_s: float = 30.0) -> list[str]:
    """Create what is missing and return when all of it can be used. The names that were created; those that existed
    are left as they are. Raises LogError."""
    deadline = time.monotonic() + timeout_s
    client = admin(config)
    wanted = {spec.name: spec for spec in specs}
    new = [NewTopic(s.name, num_partitions=s.partitions, replication_factor=s.replication, config=dict(s.config))
           for s in wanted.values()]  # fmt: skip
    created = []
    for name, future in client.create_topics(new, operation_timeout=timeout_s, request_timeout=timeout_s).items():
        try:
            future.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise LogError(f"topic {name} was not created: {reason(error)}") from error
    # The controller knows them now; the broker that clients ask may learn of them a moment later.
    while missing := wanted.keys() - _led(client, deadline):
        if time.monotonic() > deadline:
            raise LogError(f"no leader for the topics {', '.join(sorted(missing))} within {timeout_s:g} s: are all "
                           "brokers up? The same call goes on from here")  # fmt: skip
        time.sleep(0.02)
    return created


def delete_topics(config: KafkaConfig, names: Sequence[str], timeout_s: float = 60.0) -> None:
    """Delete topics, those that are there, and return when no broker shows them any more. Raises LogError."""
    deadline = time.monotonic() + timeout_s
    client = admin(config)
    there = [name for name in names if name in client.list_topics(timeout=timeout_s).topics]
    if not there:
        return
    for name, future in client.delete_topics(there, operation_timeout=timeout_s, request_timeout=timeout_s).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise LogError(f"topic {name} was not deleted: {reason(error)}") from error
    while left := set(there) & client.list_topics(timeout=timeout_s).topics.keys():
        if time.monotonic() > deadline:
            raise LogError(f"topics {', '.join(sorted(left))} are still there after {timeout_s:g} s")
        time.sleep(0.05)


def partitions(client: Consumer | Producer | AdminClient, topic: str, timeout_s: float = 30.0) -> list[int]:
    """The partitions of a topic, ascending. Raises LogError where there is no such topic."""
    found = insist(lambda left_s: client.list_topics(topic, timeout=left_s).topics[topic], timeout_s,
                   f"the partitions of {topic} are not to be had")  # fmt: skip
    if found.error is not None or not found.partitions:
        raise LogError(f"there is no topic {topic} on this cluster: was its run deleted?")
    return sorted(found.partitions)


def insist(call: Callable[[float], T], timeout_s: float, what: str, *, of_seen: bool = False) -> T:
    """Ask (with the seconds that are left) until there is an answer, or an error that won't pass. `of_seen`: about a
    partition that was seen just now, so that one who doesn't know it will soon. Raises LogError."""
    began = time.monotonic()
    while True:
        try:
            return call(max(1.0, began + timeout_s - time.monotonic()))
        except KafkaException as error:
            code, for_s = error.args[0].code(), time.monotonic() - began
            passes = code in PASSING or of_seen and code in UNHEARD and for_s < HEARD_S
            if not passes or for_s > timeout_s:
                raise LogError(f"{what}: {reason(error)}") from error
            time.sleep(0.05)


def reason(error: BaseException) -> str:
    """What Kafka said, in words."""
    first = error.args[0] if error.args else error
    return f"{first.str()} [{first.name()}]" if isinstance(first, KafkaError) else str(first)


def _led(client: AdminClient, deadline: float) -> set[str]:
    try:
        topics = client.list_topics(timeout=max(0.1, deadline - time.monotonic())).topics
    except KafkaException:
        return set()
    return {name for name, topic in topics.items() if topic.partitions and
            all(one.leader >= 0 for one in topic.partitions.values())}  # fmt: skip


def _make(factory: Callable[..., T], properties: Mapping[str, Any]) -> T:
    own = dict(properties)
    if "transactional.id" not in own:
        own.pop("transaction.timeout.ms", None)  # the site's, for all clients: the others would only warn
    try:
        return factory(own, logger=_log)
    except (KafkaException, ValueError, TypeError) as error:
        raise SettingsError(f"Kafka's client refuses a property of the [kafka] table: {reason(error)}") from error
