"""The development broker: one real Apache Kafka (KRaft) node on this machine. This module decides when one is started,
which process counts as ours, and how it ends.

A home folder holds one broker: its data, its log and a state file. It is ours when the process of the state file runs
with that home's configuration *and* answers with that home's cluster id: a port alone may be answered by a stranger.
A detached broker outlives the command that started it; an owned one dies with its owner, even on kill -9.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .jars import KAFKA_VERSION, BrokerError, Java, file_lock, find_jars, find_java

__all__ = ["KAFKA_VERSION", "Broker", "BrokerError", "broker_status", "default_home", "ensure_broker", "start_broker",
           "stop_broker"]  # fmt: skip

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
LOG_LIMIT = 8 << 20  # bytes of broker.log beyond which a start turns it over; one older log is kept
LAST_LINES = 15

SETTINGS: Mapping[str, str | int] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    # One node: one replica of everything, and few partitions of what Kafka keeps for itself.
    "default.replication.factor": 1,
    "num.partitions": 1,
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    # After kill -9 the controller refuses the new process until this has passed (default 9 s).
    "broker.session.timeout.ms": 2000,
    "broker.heartbeat.interval.ms": 400,
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
class Broker:
    """A running development broker."""

    home: Path
    pid: int
    port: int
    controller_port: int
    cluster_id: str
    started: float  # seconds since the epoch

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it cleanly; its data stays."""
        stop_broker(self.home)

    def kill(self) -> None:
        """End it as a crash would (kill -9); its data stays."""
        with file_lock(self.home / "lock"):
            if _ours(self):
                os.kill(self.pid, signal.SIGKILL)
                _gone(self, STOP_TIMEOUT_S)


def default_home() -> Path:
    """The home of the user's own development broker."""
    if own := os.environ.get("HEADRACE_HOME"):
        return Path(own) / "broker"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "headrace" / "broker"


def ensure_broker(home: Path | None = None) -> str:
    """The address of the development broker in `home`, started detached where none runs. Raises BrokerError."""
    home = _resolve(home)
    with file_lock(home / "lock"):  # of two commands at once, one starts it and the other finds it
        return (_running(home) or _start(home, owner=False, heap="512m", config=None)).bootstrap


def start_broker(home: Path | None = None, *, owner: bool = False, heap: str = "512m",
                 config: Mapping[str, str | int] | None = None) -> Broker:  # fmt: skip
    """Start the broker of `home` and return when it answers. Raises BrokerError, also when it runs already.

    `owner`: it dies when the calling thread's process does. `config`: broker properties over the defaults.
    """
    home = _resolve(home)
    with file_lock(home / "lock"):
        if running := _running(home):
            raise BrokerError(f"the development broker of {home} already runs: {running.bootstrap}, pid {running.pid}")
        return _start(home, owner=owner, heap=heap, config=config)


def stop_broker(home: Path | None = None) -> bool:
    """End the broker of `home`; False when none ran. A broker that does not end within 30 s is killed."""
    home = _resolve(home)
    with file_lock(home / "lock"):
        broker = _recorded(home)
        if broker is None or not _ours(broker):
            return False
        os.kill(broker.pid, signal.SIGTERM)
        if not _gone(broker, STOP_TIMEOUT_S):
            os.kill(broker.pid, signal.SIGKILL)
            _gone(broker, STOP_TIMEOUT_S)
        return True


def broker_status(home: Path | None = None) -> Broker | None:
    """The broker that runs in `home` and answers, else None."""
    broker = _recorded(_resolve(home))
    return broker if broker and _ours(broker) and _answers(broker, timeout_s=5.0) else None


def _resolve(home: Path | None) -> Path:
    return (home or default_home()).resolve()


def _running(home: Path) -> Broker | None:
    """The broker of `home`, waited for where its process exists but is slow."""
    broker = _recorded(home)
    if broker is None or not _ours(broker):
        return None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while _ours(broker):
        if _answers(broker, timeout_s=2.0):
            return broker
        if time.monotonic() > deadline:
            raise BrokerError(f"the development broker of {home} (pid {broker.pid}) runs but does not answer at "
                              f"{broker.bootstrap}: `headrace broker stop` ends it{_last_lines(home, 0)}")  # fmt: skip
        time.sleep(0.1)
    return None


def _start(home: Path, *, owner: bool, heap: str, config: Mapping[str, str | int] | None) -> Broker:
    # 1. Java and the jars.
    java = find_java()
    base = [str(java.executable), *_jvm_arguments(java), "-cp", f"{find_jars(java)}/*"]

    # 2. The ports of the last time, so that clients find it again, unless someone took them.
    last = _recorded(home)
    port, controller_port = _ports(last)
    properties = home / "server.properties"
    properties.write_text(_properties(home, port, controller_port, config or {}))

    # 3. A new home is formatted once; its cluster id is its identity from then on.
    log = home / "broker.log"
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.replace(home / "broker.log.1")
    if not (home / "data" / "meta.properties").exists():
        form = ["kafka.tools.StorageTool", "format", "-t", _new_cluster_id(), "-c", str(properties)]
        done = subprocess.run([*base, *form], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise BrokerError(f"{home / 'data'} could not be formatted:\n{_telling(done.stdout + done.stderr)}")
    cluster_id = _cluster_id(home)

    # 4. The process.
    command = [*base[:1], "-Xms64m", f"-Xmx{heap}", *base[1:], "kafka.Kafka", str(properties)]
    if owner:
        command = [sys.executable, "-I", "-S", "-c", _OWNED, str(os.getpid()), *command]
    log_start = log.stat().st_size if log.exists() else 0
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, cwd=home)  # fmt: skip
    broker = Broker(home, process.pid, port, controller_port, cluster_id, time.time())
    _record(broker)

    # 5. Ready when it answers under its own cluster id.
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _answers(broker, timeout_s=2.0):
        if (code := process.poll()) is not None:
            raise BrokerError(f"the development broker ended at once (status {code}){_last_lines(home, log_start)}")
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise BrokerError(f"the development broker did not answer within {READY_TIMEOUT_S:.0f} s"
                              f"{_last_lines(home, log_start)}")  # fmt: skip
        time.sleep(0.05)
    # From here on it is known by its pid; the Popen object would only warn that its process still runs.
    process.returncode = 0
    return broker


def _jvm_arguments(java: Java) -> list[str]:
    newer = ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]  # else it warns
    quiet = newer if java.version >= 24 else []
    return [*quiet, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS"]  # fmt: skip


def _properties(home: Path, port: int, controller_port: int, config: Mapping[str, str | int]) -> str:
    listeners = f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"
    placed = {"log.dirs": str(home / "data"), "listeners": listeners, "advertised.listeners": listeners,
              "controller.quorum.voters": f"1@127.0.0.1:{controller_port}"}  # fmt: skip
    return "".join(f"{key}={value}\n" for key, value in {**SETTINGS, **placed, **config}.items())


def _ports(last: Broker | None) -> tuple[int, int]:
    if last and _free(last.port) and _free(last.controller_port):
        return last.port, last.controller_port
    port, controller_port = _free_port(), _free_port()
    return (port, controller_port) if port != controller_port else _ports(None)


def _free_port() -> int:
    """Below the ephemeral range, where a client that retries against a dead broker could take the port itself."""
    while not _free(port := random.SystemRandom().randrange(20_000, 32_000)):
        pass
    return port


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's remains are no occupant
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _new_cluster_id() -> str:
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return _new_cluster_id() if text.startswith("-") else text  # a leading '-' would be read as an option


def _cluster_id(home: Path) -> str:
    for line in (home / "data" / "meta.properties").read_text().splitlines():
        if line.startswith("cluster.id="):
            return line.removeprefix("cluster.id=").replace("\\", "")
    raise BrokerError(f"{home / 'data' / 'meta.properties'} names no cluster.id: remove {home} to start afresh")


def _record(broker: Broker) -> None:
    state = {key: value for key, value in dataclasses.asdict(broker).items() if key != "home"}
    fresh = broker.home / "broker.json.new"
    fresh.write_text(json.dumps(state))
    fresh.replace(broker.home / "broker.json")


def _recorded(home: Path) -> Broker | None:
    try:
        return Broker(home=home, **json.loads((home / "broker.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _ours(broker: Broker) -> bool:
    """Whether the recorded pid still is that broker, and not a stranger to whom the pid went since; no zombie is."""
    properties = str(broker.home / "server.properties")
    try:
        return properties in Path(f"/proc/{broker.pid}/cmdline").read_text()
    except OSError:
        if Path("/proc/self").exists():
            return False
    listed = subprocess.run(["ps", "-o", "command=", "-p", str(broker.pid)], capture_output=True, text=True)
    return properties in listed.stdout


def _gone(broker: Broker, timeout_s: float) -> bool:
    """Wait for its end, and reap it where it is our own child."""
    deadline = time.monotonic() + timeout_s
    while _ours(broker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(broker.pid, os.WNOHANG)
    return True


def _answers(broker: Broker, timeout_s: float) -> bool:
    try:
        # The port first: it is cheaper, and a client would log each refusal.
        socket.create_connection(("127.0.0.1", broker.port), timeout=timeout_s).close()
        metadata = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}).list_topics(timeout=timeout_s)
    except (OSError, KafkaException):
        return False
    return bool(metadata.brokers) and metadata.cluster_id == broker.cluster_id


def _last_lines(home: Path, start: int) -> str:
    log = home / "broker.log"
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - (64 << 10)))
        return f"; the last lines of {log}:\n{_telling(file.read().decode(errors='replace'))}"


def _telling(output: str) -> str:
    """Its last lines, without the frames of stack traces."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join("  " + line for line in lines[-LAST_LINES:])
