"""Three brokers, of which one at a time is killed, stopped or restarted under writers, readers and a whole run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.broker import Broker
from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.create import create_run
from headrace.schemas.errors import Fenced, LogError, SettingsError
from headrace.schemas.events import Lease
from headrace.schemas.topics import GROUPS, RunTopics, TopicSpec
from headrace.streams.log import clients
from headrace.streams.log.clients import KafkaConfig
from headrace.streams.log.reader import Reader, end_offsets, read_range
from headrace.streams.log.transactions import Output, Send, Transactor
from tests.reference_fold import check_batches
from tests.scripted_run import ScriptedRun, scripted_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
PROGRESS_S = 60.0  # 30 on a machine of its own
PARTITIONS = 3


@pytest.fixture
def kafka3(cluster: Broker) -> KafkaConfig:
    return {"bootstrap.servers": cluster.bootstrap}


@pytest.fixture
def topic3(kafka3: KafkaConfig, run_name: str) -> str:
    name = f"test.{run_name}.log"
    clients.create_topics(kafka3, [TopicSpec(name, PARTITIONS, 3, {"min.insync.replicas": "2"})])
    return name


def leader(kafka: KafkaConfig, topic: str, partition: int = 0) -> int:
    return int(clients.admin(kafka).list_topics(timeout=30.0).topics[topic].partitions[partition].leader)


def coordinator(kafka: KafkaConfig, transactional_id: str) -> int:
    """The node that leads the id's partition of `__transaction_state`, by Java's hash of a string."""
    number = 0
    for letter in transactional_id:
        number = (31 * number + ord(letter)) & 0xFFFFFFFF
    states = clients.admin(kafka).list_topics(timeout=30.0).topics["__transaction_state"].partitions
    return int(states[(number & 0x7FFFFFFF if number < 1 << 31 else (1 << 32) - number) % len(states)].leader)


class Traffic:
    """A transactional writer that numbers its records, one transaction after the other, and a reader that sees them. A
    writer that is fenced is replaced by a fresh one, which goes on behind what can be read."""

    def __init__(self, kafka: KafkaConfig, topic: str, identity: str) -> None:
        self.seen: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
        self.fenced = 0
        self._kafka, self._topic, self._identity = kafka, topic, identity
        self._over = threading.Event()
        self.raised: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guard, args=(body,)) for body in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def _guard(self, body: Any) -> None:
        try:
            body()
        except BaseException as error:
            self.raised.append(error)

    def _write(self) -> None:
        transactor = Transactor(self._kafka, self._identity, transaction_timeout_s=5.0)
        number = 0
        while not self._over.is_set():
            try:
                transactor.send([Output(self._topic, p, b"%d" % number) for p in range(PARTITIONS)])
                number += 1
            except (Fenced, LogError):
                self.fenced += 1
                transactor = Transactor(self._kafka, self._identity, transaction_timeout_s=5.0)
                end = end_offsets(self._kafka, self._topic)[0]
                number = sum(1 for _ in read_range(self._kafka, self._topic, 0, 0, end))

    def _read(self) -> None:
        with Reader(self._kafka, {(self._topic, p): 0 for p in range(PARTITIONS)}) as reader:
            while not self._over.is_set():
                for record in reader.poll(500, 0.1):
                    self.seen[record.partition].append(int(record.value or b""))

    def progress(self) -> None:
        """Some transactions more have been committed and read, in every partition."""
        before = {p: len(values) for p, values in self.seen.items()}
        deadline = time.monotonic() + PROGRESS_S
        while any(len(self.seen[p]) < before[p] + 5 for p in self.seen):
            assert not self.raised, self.raised
            assert time.monotonic() < deadline, f"no progress within {PROGRESS_S:g} s"
            time.sleep(0.05)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(150)
        assert not self.raised, self.raised


@pytest.fixture
def traffic(kafka3: KafkaConfig, topic3: str, run_name: str) -> Iterator[Traffic]:
    traffic = Traffic(kafka3, topic3, f"test.{run_name}")
    traffic.progress()
    yield traffic
    traffic.close()
    for values in traffic.seen.values():
        assert values == list(range(len(values)))  # nothing lost, nothing doubled, nothing out of order


def test_each_broker_is_restarted_in_turn_and_writers_and_readers_go_on(cluster: Broker, traffic: Traffic) -> None:
    """ckp#173."""
    for node in cluster.nodes:
        node.stop()
        traffic.progress()
        cluster.start_node(node.number, owner=True).wait_in_sync()
        traffic.progress()


def test_leader_that_is_stopped_past_the_transactions_timeout_loses_and_doubles_nothing(
    cluster: Broker, traffic: Traffic, kafka3: KafkaConfig, topic3: str
) -> None:
    """lrk#3297, from the broker's side."""
    node = cluster.node(leader(kafka3, topic3))
    node.pause()
    time.sleep(9.0)
    node.resume()
    traffic.progress()


def test_bounced_brokers_fence_a_producer_which_is_recreated_and_goes_on(
    cluster: Broker, kafka3: KafkaConfig, topic3: str, run_name: str
) -> None:
    """lrk#3928: the coordinator of its transaction dies, and the next one gives the transaction up."""
    identity = f"test.{run_name}"
    transactor = Transactor(kafka3, identity, transaction_timeout_s=3.0)
    transactor.send([Output(topic3, 0, b"before")])

    def bounced(send: Send) -> None:
        send([Output(topic3, 0, b"never")])
        number = coordinator(kafka3, identity)
        cluster.node(number).kill()
        cluster.start_node(number, owner=True)
        time.sleep(8.0)  # past the time-out
        send([Output(topic3, 0, b"nor this")])

    with pytest.raises(Fenced):
        transactor.commit(bounced)
    assert not transactor.alive
    Transactor(kafka3, identity).send([Output(topic3, 0, b"after")])
    deadline = time.monotonic() + PROGRESS_S
    seen: list[bytes | None] = []
    with Reader(kafka3, {(topic3, 0): 0}) as reader:
        while len(seen) < 2 and time.monotonic() < deadline:
            seen += [record.value for record in reader.poll()]
    assert seen == [b"before", b"after"]


def test_leader_killed_under_assembler_and_coordinator_loses_and_doubles_nothing(
    cluster: Broker, kafka3: KafkaConfig, run_name: str
) -> None:
    topics = RunTopics(run_name)
    draw = random.Random(7)
    killed: list[int] = []

    def kill_a_leader(run: ScriptedRun, lease: Lease) -> None:
        if lease.number in (6, 12):
            time.sleep(draw.uniform(0.0, 0.3))
            number = leader(kafka3, topics.name(GROUPS), lease.number % 2)
            cluster.node(number).kill()
            killed.append(number)
            cluster.start_node(number, owner=True)

    run = ScriptedRun(kafka3, topics, scripted_settings(log={"partitions": 2, "commit_ms": 50, "replication": 3}),
                      extra=kill_a_leader)  # fmt: skip
    try:
        run.until(8, timeout_s=240.0)
    finally:
        run.close()
    assert len(killed) == 2
    log = open_run(run_name, kafka3).snapshot()
    ledger = audit(log)
    assert ledger.closes, ledger.failures
    assert check_batches(log) == []


def test_new_run_with_one_copy_on_three_brokers_is_refused(kafka3: KafkaConfig, run_name: str) -> None:
    topics = RunTopics(run_name)
    with pytest.raises(SettingsError, match="lost with any one of them. Set log.replication = 3"):
        create_run(kafka3, topics, scripted_settings())
    with pytest.raises(SettingsError, match="this cluster has 3 brokers: set it to 3"):
        create_run(kafka3, topics, scripted_settings(log={"replication": 5}))
    assert not [name for name in clients.admin(kafka3).list_topics(timeout=30.0).topics if run_name in name]
    settings = scripted_settings(log={"replication": 3})
    assert create_run(kafka3, topics, settings) and not create_run(kafka3, topics, settings)


def chaos(home: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "tests.chaos", *options], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "TMPDIR": str(home), "OMP_NUM_THREADS": "1"})  # fmt: skip


def left_behind(home: Path) -> list[str]:
    """Command lines of processes that name this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(home) in words:
            found.append(words)
    return found


@pytest.mark.timeout(1500)
def test_short_chaos_ends_as_a_calm_run_on_the_same_input_and_leaves_nothing_behind(tmp_path: Path) -> None:
    running = chaos(tmp_path, "--seed", "4")
    said = running.communicate(timeout=1400)[0]
    assert running.returncode == 0 and "lost 0, doubled 0, different 0; ledgers close" in said, said
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_chaos_that_is_interrupted_leaves_nothing_behind(signum: int, tmp_path: Path) -> None:
    running = chaos(tmp_path, "--faults", "1", "--seed", "1")
    deadline = time.monotonic() + 240.0
    while not list(tmp_path.glob("headrace-chaos-*/logs/calm/worker-1.log")):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert len(left_behind(tmp_path)) >= 4
    running.send_signal(signum)
    said = running.communicate(timeout=120)[0]
    assert running.returncode == (1 if signum == signal.SIGINT else -signal.SIGKILL), said
    deadline = time.monotonic() + 150.0  # one that has just begun notices once Python has loaded what it imports
    while left_behind(tmp_path):
        assert time.monotonic() < deadline, left_behind(tmp_path)
        time.sleep(0.1)
