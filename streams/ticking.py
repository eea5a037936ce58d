"""Writes ticks, so that a log's clock runs while nothing else happens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from headrace.schemas.codec import encode
from headrace.schemas.events import FleetTick, Tick

from .log import clients


class Ticker:
    """Ticks of one writer, numbered per partition. One that waits for the broker is enough: an outage must not end in
    a flood of them."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, kind: type[Tick] | type[FleetTick]) -> None:
        self._producer = clients.producer(kafka)
        self._topic, self._kind, self._writer = topic, kind, uuid.uuid4().hex
        self._numbers: dict[int, int] = {}
        self._waiting: set[int] = set()

    def tick(self, partition: int) -> None:
        self._producer.poll(0)
        if partition in self._waiting:
            return
        number = self._numbers.get(partition, 0)
        self._numbers[partition] = number + 1
        self._waiting.add(partition)
        self._producer.produce(self._topic, encode(self._kind(self._writer, number)), partition=partition,
                               on_delivery=lambda *_: self._waiting.discard(partition))  # fmt: skip

    def close(self) -> None:
        self._producer.flush(5)
