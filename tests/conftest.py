"""What every test may ask for: one real broker of its own for the session, or three nodes, and names that no other test
uses."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from headrace.broker import Broker, broker_status, start_broker, stop_broker
from tests.command import Command

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: what is begun last decides when several files at a time are through."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker in a home of its own, so that the user's is never touched; it dies with the test process."""
    broker = start_broker(tmp_path_factory.mktemp("broker"), owner=True)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def kafka(broker: Broker) -> dict[str, str | int | bool]:
    """The client properties of the session's broker."""
    return {"bootstrap.servers": broker.bootstrap}


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    cluster = start_broker(tmp_path_factory.mktemp("cluster"), nodes=3, owner=True)
    yield cluster
    stop_broker(cluster.home)


@pytest.fixture
def cluster(_cluster: Broker) -> Broker:
    """A broker of three nodes, shared by the session and started for the first test that asks; whole at the start of
    each test, whatever the one before did to its nodes."""
    found = broker_status(_cluster.home) or _cluster
    for node in found.nodes:
        node.resume()
        if not node.runs():
            found = found.start_node(node.number, owner=True)
    found.wait_in_sync()
    return found


@pytest.fixture
def headrace(kafka: dict[str, str | int | bool], monkeypatch: pytest.MonkeyPatch,
             capsys: pytest.CaptureFixture[str]) -> Command:  # fmt: skip
    """The command line, on the session's broker."""
    return Command(str(kafka["bootstrap.servers"]), monkeypatch, capsys)


@pytest.fixture
def run_name() -> str:
    """A run id that no other test of this broker uses."""
    return f"run-{os.getpid()}-{next(_numbers)}"
