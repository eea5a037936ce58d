"""How long an answer of Kafka's is waited for, and which errors are waited out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.schemas.errors import LogError
from headrace.streams.log import clients


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("headrace.streams.log.clients.time.monotonic", lambda: now[0])
    monkeypatch.setattr("headrace.streams.log.clients.time.sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


def failing(clock: list[float], until_s: float, code: int) -> Callable[[float], str]:
    def call(left_s: float) -> str:
        if clock[0] < until_s:
            raise KafkaException(KafkaError(code))
        return "answer"

    return call


def test_partition_that_was_seen_is_known_to_every_broker_soon(clock: list[float]) -> None:
    unheard: int = KafkaError._UNKNOWN_PARTITION
    assert clients.insist(failing(clock, 1.0, unheard), 30.0, "offsets", of_seen=True) == "answer"
    with pytest.raises(LogError, match="offsets"):  # nobody has seen it
        clients.insist(failing(clock, clock[0] + 1.0, unheard), 30.0, "offsets")
    began = clock[0]
    with pytest.raises(LogError, match="offsets"):  # it was deleted meanwhile
        clients.insist(failing(clock, 1e9, unheard), 30.0, "offsets", of_seen=True)
    assert clock[0] - began < 6.0


@pytest.mark.parametrize("of_seen", [False, True])
def test_error_that_passes_is_waited_out_as_long_as_was_said(clock: list[float], of_seen: bool) -> None:
    named: Any = {"of_seen": of_seen}
    assert clients.insist(failing(clock, 20.0, KafkaError._TRANSPORT), 30.0, "it", **named) == "answer"
    with pytest.raises(LogError):
        clients.insist(failing(clock, 1e9, KafkaError._TRANSPORT), 30.0, "it", **named)
    assert 50.0 < clock[0] < 52.0
