"""One Kafka (KRaft) node of the development broker: its configuration, its process, and which process counts as ours.

A node is ours when the recorded process runs with that node's configuration *and* answers with the broker's cluster id:
a port alone may be answered by a stranger, and a pid may have gone to one. An owned node dies with the thread's process
that started it, even on kill -9; a detached one outlives it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .jars import BrokerError, Java, find_jars, find_java

STOP_TIMEOUT_S = 30.0
LOG_LIMIT = 8 << 20  # bytes of broker.log beyond which a start turns it over; one older log is kept
LAST_LINES = 15

Config = Mapping[str, str | int]

SETTINGS: Config = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    # Few partitions of what Kafka keeps for itself.
    "num.partitions": 1,
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.num.partitions": 1,
    # A hung transaction stalls every read-committed reader: look for overdue ones each second, not each ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
    "group.initial.rebalance.delay.ms": 0,
    # A run is kept until it is deleted: nothing expires by itself.
    "log.retention.ms": -1,
    "offsets.retention.minutes": 525_600,
    "message.max.bytes": 8 << 20,
    # Small: the cleaner alone would take 128 MB of heap.
    "log.cleaner.dedupe.buffer.size": 8 << 20,
    "num.network.threads": 2,
    "num.io.threads": 4,
    "background.threads": 2,
}


def settings(nodes: int) -> Config:
    """Of each node of a broker of so many."""
    replicas, in_sync = min(nodes, 3), 2 if nodes >= 3 else 1
    alone: Config = {
        # After kill -9 the controller refuses the new process until this has passed (default 9 s).
        "broker.session.timeout.ms": 2000,
        "broker.heartbeat.interval.ms": 400,
    }
    together: Config = {
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
        "replica.lag.time.max.ms": 5000,
        "unclean.leader.election.enable": "false",
    }
    return {
        **SETTINGS,
        **(alone if nodes == 1 else together),
        "min.insync.replicas": in_sync,
        "default.replication.factor": replicas,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


# Become the broker, and have the kernel kill it when the owner dies: PR_SET_PDEATHSIG is 1 and survives exec. The
# owner may have died before the call. The signal follows the *thread* that started the broker.
_OWNED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the state file knows it; its process may be gone (`runs`)."""

    number: int  # from 1
    home: Path  # its own folder: data, log and configuration
    pid: int
    port: int
    controller_port: int
    heap: str
    started: float  # seconds since the epoch

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def properties(self) -> Path:
        return self.home / "server.properties"

    def runs(self) -> bool:
        """Whether the recorded pid still is this node, and not a stranger to whom the pid went since; no zombie is."""
        try:
            return str(self.properties) in Path(f"/proc/{self.pid}/cmdline").read_text()
        except OSError:
            if Path("/proc/self").exists():
                return False
        listed = subprocess.run(["ps", "-o", "command=", "-p", str(self.pid)], capture_output=True, text=True)
        return str(self.properties) in listed.stdout

    def answers(self, cluster_id: str, timeout_s: float) -> bool:
        """Whether its port is answered by a broker of this cluster."""
        try:
            # The port first: it is cheaper, and a client would log each refusal.
            socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s).close()
            client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
            metadata = client.list_topics(timeout=timeout_s)
        except (OSError, KafkaException):
            return False
        return bool(metadata.brokers) and metadata.cluster_id == cluster_id

    def kill(self) -> None:
        """End it as a crash would (kill -9); its data stays."""
        self._signal(signal.SIGKILL)
        gone([self], STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End it cleanly, within 30 s, else by kill; its data stays."""
        end_nodes([self])

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: int) -> None:
        if self.runs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def end_nodes(nodes: Sequence[Node]) -> None:
    """End them cleanly and at once (one by one, the last would wait for a quorum); whoever isn't gone in 30 s is
    killed."""
    for node in nodes:
        node._signal(signal.SIGTERM)
        node._signal(signal.SIGCONT)  # a paused one would never hear of it
    if not gone(nodes, STOP_TIMEOUT_S):
        for node in nodes:
            node._signal(signal.SIGKILL)
        gone(nodes, STOP_TIMEOUT_S)


def gone(nodes: Iterable[Node], timeout_s: float) -> bool:
    """Wait for their end, and reap them where they are our own children."""
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        while node.runs():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(node.pid, os.WNOHANG)
    return True


def java_command() -> list[str]:
    """Java with Kafka's classes. Raises BrokerError where they are not to be had."""
    java = find_java()
    return [str(java.executable), *_jvm_arguments(java), "-cp", f"{find_jars(java)}/*"]


def write_properties(home: Path, number: int, ports: Sequence[tuple[int, int]], config: Config) -> None:
    """The configuration of node `number` of a broker whose nodes listen at `ports` (clients, controllers)."""
    port, controller_port = ports[number - 1]
    listeners = f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"
    voters = ",".join(f"{k}@127.0.0.1:{one}" for k, (_, one) in enumerate(ports, 1))
    placed = {"node.id": number, "log.dirs": str(home / "data"), "listeners": listeners,
              "advertised.listeners": listeners, "controller.quorum.voters": voters}  # fmt: skip
    home.mkdir(parents=True, exist_ok=True)
    lines = {**settings(len(ports)), **placed, **config}.items()
    (home / "server.properties").write_text("".join(f"{key}={value}\n" for key, value in lines))


def format_data(java: Sequence[str], home: Path, cluster_id: str) -> None:
    """A new home is formatted once; its cluster id is its identity from then on. Raises BrokerError."""
    if cluster_id_of(home) is not None:
        return
    form = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(home / "server.properties")]
    done = subprocess.run([*java, *form], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BrokerError(f"{home / 'data'} could not be formatted:\n{_telling(done.stdout + done.stderr)}")


def cluster_id_of(home: Path) -> str | None:
    """None where the home has not been formatted yet. Raises BrokerError where its file names none."""
    file = home / "data" / "meta.properties"
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        if line.startswith("cluster.id="):
            return line.removeprefix("cluster.id=").replace("\\", "")
    raise BrokerError(f"{file} names no cluster.id: remove {home} to start afresh")


def spawn(java: Sequence[str], number: int, home: Path, ports: tuple[int, int], heap: str, owner: bool
          ) -> tuple[Node, subprocess.Popen[bytes]]:  # fmt: skip
    """Start the process; it is not ready yet."""
    log = home / "broker.log"
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.replace(home / "broker.log.1")
    command = [*java[:1], "-Xms64m", f"-Xmx{heap}", *java[1:], "kafka.Kafka", str(home / "server.properties")]
    if owner:
        command = [sys.executable, "-I", "-S", "-c", _OWNED, str(os.getpid()), *command]
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, cwd=home)  # fmt: skip
    return Node(number, home, process.pid, *ports, heap, time.time()), process


def free_ports(count: int) -> list[tuple[int, int]]:
    """Below the ephemeral range, where a client that retries against a dead broker could take the port itself."""
    found: set[int] = set()
    while len(found) < 2 * count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        if is_free(port):
            found.add(port)
    ports = list(found)
    return list(zip(ports[::2], ports[1::2], strict=True))


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's remains are no occupant
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def last_lines(home: Path, start: int = 0) -> str:
    """What a node's log says since byte `start`, for an error message: the lines that tell, of the last 64 KiB."""
    log = home / "broker.log"
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - (64 << 10)))
        return f"; the last lines of {log}:\n{_telling(file.read().decode(errors='replace'))}"


def _jvm_arguments(java: Java) -> list[str]:
    newer = ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]  # else it warns
    quiet = newer if java.version >= 24 else []
    return [*quiet, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS"]  # fmt: skip


def _telling(output: str) -> str:
    """Its last lines, without the frames of stack traces."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join("  " + line for line in lines[-LAST_LINES:])
