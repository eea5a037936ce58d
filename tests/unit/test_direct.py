"""Weights beside the log: what is held for a receiver, and what a socket does with listeners that are slow or wrong."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from headrace.schemas.errors import SettingsError
from headrace.streams.log.direct import MAGIC, Following, HandedOver, Offering


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_record_is_there_once_and_what_lies_before_it_goes_with_it() -> None:
    ahead = HandedOver()
    for offset in (3, 5, 6, 9):
        ahead.put(offset, bytes([offset]))
    assert ahead.take(4) is None and ahead.take(3) is None, "3 was before 4"
    assert ahead.take(6) == b"\6" and ahead.take(6) is None and ahead.take(5) is None
    assert ahead.take(9) == b"\t" and ahead.taken == 2


def test_the_oldest_records_make_room() -> None:
    ahead = HandedOver(held_bytes=10)
    for offset in range(4):
        ahead.put(offset, bytes(4))
    assert [ahead.take(offset) for offset in range(4)] == [None, None, bytes(4), bytes(4)]


def test_records_reach_every_listener_and_one_that_comes_back() -> None:
    offering, first, second = Offering("127.0.0.1:0", "run.weights"), HandedOver(), HandedOver()
    address = f"127.0.0.1:{offering.port}"
    followers = [Following(address, "run.weights", one) for one in (first, second)]
    until(lambda: offering.listeners == 2)
    offering.offer(7, b"x" * 1_000_000)
    for ahead in (first, second):
        until(lambda ahead=ahead: 7 in ahead._records)  # type: ignore[misc]
        assert ahead.take(7) == b"x" * 1_000_000
    offering.close()
    until(lambda: offering.listeners == 0)
    again = Offering(address, "run.weights")
    until(lambda: again.listeners == 2)
    again.offer(8, b"later")
    until(lambda: 8 in first._records and 8 in second._records)
    for one in followers:
        one.close()
    again.close()


def test_a_listener_that_does_not_keep_up_is_cut_off_and_never_waited_for() -> None:
    offering = Offering("127.0.0.1:0", "run.weights", held_bytes=50_000_000)
    with socket.create_connection(("127.0.0.1", offering.port)) as slow:
        until(lambda: offering.listeners == 1)
        for offset in range(100):
            offering.offer(offset, bytes(4_000_000))
        assert offering.listeners == 0
        while slow.recv(1 << 20):
            pass
    offering.close()


@pytest.mark.parametrize("greeting", [MAGIC + b"\5\0other", b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_offers_another_run_or_no_weights_is_not_listened_to(
    greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = HandedOver()
    with socket.create_server(("127.0.0.1", 0)) as server:
        following = Following(f"127.0.0.1:{server.getsockname()[1]}", "run.weights", ahead)
        connection, _ = server.accept()
        connection.sendall(greeting + b"\1" * 100)
        until(lambda: "weights come by the log" in caplog.text)
        following.close()
        connection.close()
    assert not ahead._records


def test_an_address_that_is_none_or_is_in_use_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="HOST:PORT is expected"):
        Offering("8000", "run.weights")
    offering = Offering("127.0.0.1:0", "run.weights")
    with pytest.raises(SettingsError, match="can't be listened at"):
        Offering(f"127.0.0.1:{offering.port}", "run.weights")
    offering.close()
