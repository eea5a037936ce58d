"""What an expert would write who only wants to see every event: the client's own batched consume, and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from headrace.schemas.codec import decode
from headrace.schemas.events import Span


def count_tokens(kafka: Mapping[str, Any], topic: str) -> int:
    """Model and context tokens of all spans of the topic, each event decoded; no column is unpacked."""
    consumer = Consumer({**kafka, "group.id": "bare", "enable.auto.commit": False, "enable.partition.eof": True,
                         "isolation.level": "read_committed", "check.crcs": True})  # fmt: skip
    partitions = sorted(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    tokens, ended = 0, set[int]()
    while len(ended) < len(partitions):
        for message in consumer.consume(500, 1.0):
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition() or 0)
                continue
            event = decode(message.value())
            if isinstance(event, Span):
                tokens += event.count
    consumer.close()
    return tokens
