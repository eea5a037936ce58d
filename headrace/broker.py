"""The development broker: a real Apache Kafka (KRaft) on this machine, of one node or of three. This module decides
when its nodes are started, in which folder which of them lives, and how it ends.

A home folder holds one broker: a folder for each node (the home itself where there is one node only), a state file
and a lock. How many nodes it has is settled when it is first started. Three nodes hold three copies of everything and
acknowledge what two of them have, so that each may be killed and started again by its number while clients go on.
A detached broker outlives the command that started it; an owned one dies with its owner, even on kill -9.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import os
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .jars import KAFKA_VERSION, BrokerError, file_lock
from .node import (
    Config,
    Node,
    cluster_id_of,
    end_nodes,
    format_data,
    free_ports,
    is_free,
    java_command,
    last_lines,
    spawn,
    write_properties,
)

__all__ = ["KAFKA_VERSION", "Broker", "BrokerError", "broker_status", "default_home", "ensure_broker", "start_broker",
           "stop_broker"]  # fmt: skip

READY_TIMEOUT_S = 120.0  # an idle machine takes 2 s for one node, 5 s for three
PORT_TRIES = 3
SIZES = (1, 3)  # two nodes would stand still whenever one of them is away
_HEAP = {1: "512m", 3: "256m"}


class _PortTaken(BrokerError):
    """Between the look and the start."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A development broker as its state file describes it."""

    home: Path
    cluster_id: str
    nodes: tuple[Node, ...]

    @property
    def bootstrap(self) -> str:
        """The address for clients: `bootstrap.servers`."""
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def pid(self) -> int:
        """Of the first node."""
        return self.nodes[0].pid

    def node(self, number: int) -> Node:
        """Numbers begin at 1. `kill`, `stop`, `pause` and `resume` are its methods."""
        return self.nodes[number - 1]

    def stop(self) -> None:
        """End it cleanly; its data stays."""
        stop_broker(self.home)

    def kill(self) -> None:
        """End all its nodes as a crash would (kill -9); its data stays."""
        with file_lock(self.home / "lock"):
            for node in self.nodes:
                node.kill()

    def start_node(self, number: int, *, owner: bool = False) -> Broker:
        """Start a node that was killed or stopped, and wait until it answers. The broker with its new process.
        Raises BrokerError."""
        with file_lock(self.home / "lock"):
            broker = _recorded(self.home) or self
            if broker.node(number).runs():
                raise BrokerError(f"node {number} of the development broker of {self.home} already runs")
            return _start_nodes(broker, [number], owner=owner)

    def wait_in_sync(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until each node is there and each partition has all its copies: only then does the next fault hit a whole
        broker. Raises BrokerError."""
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        deadline = time.monotonic() + timeout_s
        missing = ""
        while time.monotonic() < deadline:
            try:
                metadata = client.list_topics(timeout=5.0)
            except KafkaException:
                continue
            behind = [f"{name}[{number}]" for name, topic in metadata.topics.items()
                      for number, one in topic.partitions.items() if len(one.isrs) < len(one.replicas)]  # fmt: skip
            if len(metadata.brokers) == len(self.nodes) and not behind:
                return
            missing = f"{len(metadata.brokers)} of {len(self.nodes)} nodes are there; not in sync: {behind[:5]}"
            time.sleep(0.1)
        raise BrokerError(f"the development broker of {self.home} is not whole after {timeout_s:g} s: {missing}")

    def behind(self) -> int | None:
        """The number of the node whose copies are out of step most often; None where all are in step. Raises
        BrokerError where no node answers."""
        try:
            topics = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}).list_topics(timeout=10.0).topics
        except KafkaException as error:
            raise BrokerError(f"the development broker of {self.home} does not answer: {error}") from error
        missing = Counter(node for topic in topics.values() for one in topic.partitions.values()
                          for node in set(one.replicas) - set(one.isrs))  # fmt: skip
        return missing.most_common(1)[0][0] if missing else None


def default_home() -> Path:
    """The home of the user's own development broker."""
    if own := os.environ.get("HEADRACE_HOME"):
        return Path(own) / "broker"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "headrace" / "broker"


def ensure_broker(home: Path | None = None, nodes: int | None = None) -> str:
    """The address of the development broker in `home`, started detached where none runs; nodes of it that are missing
    are started. `nodes`: 1 (the default of a new home) or 3. Raises BrokerError."""
    home = _resolve(home)
    with file_lock(home / "lock"):  # of two commands at once, one starts it and the other finds it
        if running := _running(home):
            _check_size(running, nodes)
            lost = [node.number for node in running.nodes if not node.runs()]
            return (_start_nodes(running, lost, owner=False) if lost else running).bootstrap
        return _start(home, nodes, owner=False, heap=None, config=None).bootstrap


def start_broker(home: Path | None = None, *, nodes: int | None = None, owner: bool = False, heap: str | None = None,
                 config: Config | None = None) -> Broker:  # fmt: skip
    """Start the broker of `home` and return when it answers. Raises BrokerError, also when it runs already.

    `nodes`: 1 (the default of a new home) or 3. `owner`: it dies when the calling thread's process does. `heap`: of
    each node (512 MB, or 256 MB where there are three). `config`: broker properties over the defaults.
    """
    home = _resolve(home)
    with file_lock(home / "lock"):
        if running := _running(home):
            raise BrokerError(f"the development broker of {home} already runs: {running.bootstrap}, pid {running.pid}")
        return _start(home, nodes, owner=owner, heap=heap, config=config)


def stop_broker(home: Path | None = None) -> bool:
    """End the broker of `home`, all its nodes at once; False when none ran. What does not end within 30 s is killed."""
    home = _resolve(home)
    with file_lock(home / "lock"):
        broker = _recorded(home)
        running = [node for node in broker.nodes if node.runs()] if broker else []
        end_nodes(running)
        return bool(running)


def broker_status(home: Path | None = None) -> Broker | None:
    """The broker that runs in `home` and answers, else None; single nodes of three may be down (`Node.runs`)."""
    broker = _recorded(_resolve(home))
    if broker is None:
        return None
    return broker if any(node.runs() and node.answers(broker.cluster_id, 5.0) for node in broker.nodes) else None


def _resolve(home: Path | None) -> Path:
    return (home or default_home()).resolve()


def _running(home: Path) -> Broker | None:
    """The broker of `home`, waited for where a process exists but is slow."""
    broker = _recorded(home)
    if broker is None:
        return None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while running := [node for node in broker.nodes if node.runs()]:
        # Two of three are needed to go on; fewer may never answer, and are there all the same.
        if any(node.answers(broker.cluster_id, 2.0) for node in running) or 2 * len(running) < len(broker.nodes):
            return broker
        if time.monotonic() > deadline:
            raise BrokerError(f"the development broker of {home} (pid {running[0].pid}) runs but does not answer at "
                              f"{running[0].bootstrap}: `headrace broker stop` ends it"
                              f"{last_lines(running[0].home)}")  # fmt: skip
        time.sleep(0.1)
    return None


def _start(home: Path, size: int | None, *, owner: bool, heap: str | None, config: Config | None) -> Broker:
    """Start the whole broker."""
    # 1. Java and the jars; how many nodes.
    java = java_command()
    last = _recorded(home)
    if last is not None:
        _check_size(last, size)
    count = len(last.nodes) if last is not None else size or 1
    if count not in SIZES:
        raise BrokerError(f"a development broker has 1 node or 3, not {count}")

    # 2. A new home gets its identity; then the ports of the last time, so that clients find it again, unless someone
    #    took them. Someone may take one until Kafka itself does: then others.
    folders = [_folder(home, number, count) for number in range(1, count + 1)]
    cluster_id = cluster_id_of(folders[0]) or _new_cluster_id()
    heap = heap or _HEAP[count]
    ports = [(node.port, node.controller_port) for node in last.nodes] if last else []
    for tries in range(PORT_TRIES):
        if tries or not ports or not all(is_free(port) for pair in ports for port in pair):
            ports = free_ports(count)
        for number, folder in enumerate(folders, 1):
            write_properties(folder, number, ports, config or {})
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda folder: format_data(java, folder, cluster_id), folders))
        # 3. The processes: all before any wait, for one of three has no quorum and never gets ready.
        nodes = tuple(Node(k, folder, 0, *ports[k - 1], heap, 0.0) for k, folder in enumerate(folders, 1))
        with contextlib.suppress(_PortTaken):
            return _start_nodes(Broker(home, cluster_id, nodes), list(range(1, count + 1)), owner=owner, java=java)
    raise BrokerError(f"the development broker of {home} found its ports taken {PORT_TRIES} times: try again")


def _start_nodes(broker: Broker, numbers: list[int], *, owner: bool, java: list[str] | None = None) -> Broker:
    """Start these nodes, which are configured already, and wait until each answers under the broker's cluster id."""
    java = java or java_command()
    started: dict[int, tuple[Node, subprocess.Popen[bytes], int]] = {}
    for number in numbers:
        old = broker.node(number)
        log = old.home / "broker.log"
        before = log.stat().st_size if log.exists() else 0
        node, process = spawn(java, number, old.home, (old.port, old.controller_port), old.heap, owner)
        started[number] = node, process, before
    now = tuple(started[node.number][0] if node.number in started else node for node in broker.nodes)
    broker = Broker(broker.home, broker.cluster_id, now)
    _record(broker)
    deadline = time.monotonic() + READY_TIMEOUT_S
    for node, process, before in started.values():
        while not node.answers(broker.cluster_id, 2.0):
            said = None
            if (code := process.poll()) is not None:
                said = f"the development broker ended at once (status {code})"
            elif time.monotonic() > deadline:
                said = f"the development broker did not answer within {READY_TIMEOUT_S:.0f} s"
            if said is not None:
                words = last_lines(node.home, before)
                for _, other, _ in started.values():
                    other.kill()
                    other.wait()
                raise (_PortTaken if "Address already in use" in words else BrokerError)(said + words)
            time.sleep(0.05)
    for _, process, _ in started.values():
        process.returncode = 0  # known by its pid from here on; the object would only warn that its process still runs
    if len(numbers) > 1:
        broker.wait_in_sync(max(1.0, deadline - time.monotonic()))
    return broker


def _check_size(broker: Broker, size: int | None) -> None:
    if size is not None and size != len(broker.nodes):
        raise BrokerError(f"{broker.home} holds a broker of {len(broker.nodes)}, not {size}: its data stays as it is; "
                          "set HEADRACE_HOME to another folder, or stop the broker and remove this one")  # fmt: skip


def _folder(home: Path, number: int, count: int) -> Path:
    return home if count == 1 else home / f"node-{number}"


def _new_cluster_id() -> str:
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return _new_cluster_id() if text.startswith("-") else text  # a leading '-' would be read as an option


def _record(broker: Broker) -> None:
    rows = [{key: value for key, value in asdict(node).items() if key not in ("number", "home")}
            for node in broker.nodes]  # fmt: skip
    fresh = broker.home / "broker.json.new"
    fresh.write_text(json.dumps({"cluster_id": broker.cluster_id, "nodes": rows}))
    fresh.replace(broker.home / "broker.json")


def _recorded(home: Path) -> Broker | None:
    try:
        state: Mapping[str, Any] = json.loads((home / "broker.json").read_text())
        if "nodes" not in state:  # written by 0.1: of one node
            own = {key: state[key] for key in ("pid", "port", "controller_port", "started")}
            state = {"cluster_id": state["cluster_id"], "nodes": [own | {"heap": _HEAP[1]}]}
        rows = state["nodes"]
        nodes = tuple(Node(number=k, home=_folder(home, k, len(rows)), **row) for k, row in enumerate(rows, 1))
        return Broker(home, state["cluster_id"], nodes)
    except (OSError, ValueError, TypeError, KeyError):
        return None
