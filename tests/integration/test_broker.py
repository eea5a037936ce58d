"""The development broker against real processes: what starts one, what finds one, and what ends one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import jars
from headrace.broker import (
    Broker,
    BrokerError,
    broker_status,
    default_home,
    ensure_broker,
    start_broker,
    stop_broker,
)
from headrace.mending import mend
from headrace.schemas.topics import TopicSpec
from headrace.streams.log import clients
from headrace.streams.log.reader import last_record
from headrace.streams.log.transactions import Output, Transactor


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, stdout=subprocess.PIPE)


def gone(pid: int, timeout_s: float = 0.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie that init has not reaped yet
                return True
        except OSError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


ENSURE = """
import pathlib, sys
from headrace.broker import ensure_broker
print(ensure_broker(pathlib.Path(sys.argv[1])))
"""
OWN = """
import pathlib, sys, time
from headrace.broker import start_broker
print(start_broker(pathlib.Path(sys.argv[1]), owner=True).pid, flush=True)
time.sleep(600)
"""


def test_two_commands_at_once_start_one_broker_which_outlives_them_and_is_stopped_by_a_third(tmp_path: Path) -> None:
    commands = [python(ENSURE, str(tmp_path)) for _ in range(2)]
    addresses = {command.communicate()[0].strip() for command in commands}
    try:
        assert all(command.returncode == 0 for command in commands)
        (address,) = addresses
        running = broker_status(tmp_path)
        assert running is not None and running.bootstrap == address
        assert ensure_broker(tmp_path) == address
    finally:
        assert stop_broker(tmp_path)
    assert gone(running.pid)
    assert broker_status(tmp_path) is None
    assert not stop_broker(tmp_path)


@pytest.mark.slow
def test_a_broker_survives_a_stop_and_a_kill_with_its_data_and_its_address(tmp_path: Path) -> None:
    broker = start_broker(tmp_path, owner=True)
    kafka = {"bootstrap.servers": broker.bootstrap}
    clients.create_topics(kafka, [TopicSpec("kept", 1, 1, {})])
    transactor = Transactor(kafka, "writer")
    transactor.send([Output("kept", 0, b"first")])

    broker.stop()
    again = start_broker(tmp_path, owner=True)
    assert (again.bootstrap, again.cluster_id) == (broker.bootstrap, broker.cluster_id)
    transactor.send([Output("kept", 0, b"second")])
    # Acknowledged is not yet visible: a single broker killed in between may drop the markers (docs/design.md).
    deadline = time.monotonic() + 30.0
    while last_of(kafka, "kept") != b"second":
        assert time.monotonic() < deadline
        time.sleep(0.05)

    again.kill()
    assert gone(again.pid)
    third = start_broker(tmp_path, owner=True)
    Transactor(kafka, "writer").send([Output("kept", 0, b"third")])
    deadline = time.monotonic() + 30.0
    while (found := last_of(kafka, "kept")) != b"third":
        assert found == b"second" and time.monotonic() < deadline
        time.sleep(0.05)
    third.stop()


@pytest.mark.slow
def test_a_broker_moves_to_other_ports_when_its_own_are_taken(tmp_path: Path) -> None:
    broker = start_broker(tmp_path, owner=True)
    (node,) = broker.nodes
    assert node.port < 32768 and node.controller_port < 32768  # below what the system gives to clients
    clients.create_topics({"bootstrap.servers": broker.bootstrap}, [TopicSpec("kept", 1, 1, {})])
    broker.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", node.port))
        taken.listen()
        moved = start_broker(tmp_path, owner=True)
    assert moved.node(1).port != node.port and moved.cluster_id == broker.cluster_id
    assert clients.partitions(clients.admin({"bootstrap.servers": moved.bootstrap}), "kept") == [0]
    moved.stop()


def test_an_owned_broker_dies_with_its_owner_even_on_kill_9(tmp_path: Path) -> None:
    owner = python(OWN, str(tmp_path))
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert gone(pid, 10.0)


def test_a_second_start_in_the_same_home_is_refused(broker: Broker) -> None:
    with pytest.raises(BrokerError, match=f"already runs: {broker.bootstrap}"):
        start_broker(broker.home)


def test_a_stranger_with_the_recorded_pid_or_port_is_not_taken_for_the_broker(broker: Broker, tmp_path: Path) -> None:
    state = json.loads((broker.home / "broker.json").read_text())
    state["nodes"][0]["pid"] = os.getpid()
    (tmp_path / "broker.json").write_text(json.dumps(state))
    assert broker_status(tmp_path) is None
    assert not stop_broker(tmp_path)  # least of all is it ended
    (tmp_path / "broker.json").write_text("{garbage")
    assert broker_status(tmp_path) is None
    (node,) = broker.nodes
    assert node.answers(broker.cluster_id, 5.0) and not node.answers("another", 5.0)


def test_a_state_file_of_version_0_1_still_names_its_broker(broker: Broker, tmp_path: Path) -> None:
    (node,) = broker.nodes
    facts = {"pid": node.pid, "port": node.port, "controller_port": node.controller_port, "started": node.started,
             "cluster_id": broker.cluster_id}  # fmt: skip
    now = (broker.home / "broker.json").read_text()
    try:
        (broker.home / "broker.json").write_text(json.dumps(facts))
        found = broker_status(broker.home)
        assert found is not None and (found.bootstrap, found.pid) == (broker.bootstrap, broker.pid)
    finally:
        (broker.home / "broker.json").write_text(now)


@pytest.mark.slow
def test_a_broker_that_cannot_start_says_its_own_last_words(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="Invalid value many"):  # while its new home is formatted
        start_broker(tmp_path, owner=True, config={"num.io.threads": "many"})
    start_broker(tmp_path, owner=True).stop()
    with pytest.raises(BrokerError, match=r"ended at once[\s\S]*broker\.log[\s\S]*Invalid value many"):
        start_broker(tmp_path, owner=True, config={"num.io.threads": "many"})
    assert broker_status(tmp_path) is None


def test_the_users_broker_lives_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_home() == tmp_path / "data" / "headrace" / "broker"
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "own"))
    assert default_home() == tmp_path / "own" / "broker"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Java and Maven and with an empty cache, which is returned."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("HEADRACE_KAFKA_JARS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


def test_without_java_maven_and_registry_one_error_lists_the_ways_to_go_on(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BrokerError) as caught:
        ensure_broker(tmp_path / "home")
    for way in ("Maven", "Java 17", "HEADRACE_KAFKA_JARS", "bootstrap.servers"):
        assert way in str(caught.value)
    assert not [path for path in bare.iterdir() if path.is_dir()]  # nothing half done is left to be found


def test_jars_that_came_only_in_part_are_not_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(target: Path, java: jars.Java) -> None:
        (target / "kafka_2.13-4.4.0.jar").touch()
        raise BrokerError("the network went away")

    monkeypatch.setattr(jars, "_fetch_by_mvn", half)
    monkeypatch.setattr(jars, "_fetch_by_jgo", half)
    with pytest.raises(BrokerError, match="the network went away"):
        jars.find_jars(jars.Java(Path("java"), 17))
    assert [path.name for path in bare.iterdir()] == ["jars.lock"]


@pytest.mark.slow
def test_where_nothing_is_installed_java_and_kafka_come_from_the_registries_once(bare: Path, tmp_path: Path) -> None:
    broker = start_broker(tmp_path / "home", owner=True)
    assert clients.check_broker({"bootstrap.servers": broker.bootstrap}) == broker.cluster_id
    broker.stop()
    assert len(list((bare / f"kafka-{jars.KAFKA_VERSION}").glob("*.jar"))) > 40
    os.environ["PIP_NO_INDEX"] = "1"  # `bare` forgets the environment with the test
    try:
        start_broker(tmp_path / "home", owner=True).stop()
    finally:
        del os.environ["PIP_NO_INDEX"]


# --- three nodes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_nodes_keep_three_copies_and_each_comes_back_by_its_number(cluster: Broker, run_name: str) -> None:
    kafka = {"bootstrap.servers": cluster.bootstrap}
    clients.create_topics(kafka, [TopicSpec(f"test.{run_name}", 2, 3, {})])
    Transactor(kafka, run_name).send([Output(f"test.{run_name}", 0, b"kept")])
    cluster.wait_in_sync()
    topics = clients.admin(kafka).list_topics(timeout=30.0).topics
    assert {len(one.replicas) for name in (f"test.{run_name}", "__transaction_state")
            for one in topics[name].partitions.values()} == {3}  # fmt: skip
    for number in (1, 2, 3):
        before = cluster.node(number)
        before.kill()
        assert gone(before.pid) and not before.runs()
        status = broker_status(cluster.home)
        assert status is not None and [node.runs() for node in status.nodes].count(False) == 1
        deadline = time.monotonic() + 120.0  # acknowledged is not yet marked, and the kill may come in between
        while last_of(kafka, f"test.{run_name}") != b"kept":  # by the two others
            assert time.monotonic() < deadline
            time.sleep(0.1)
        after = cluster.start_node(number, owner=True).node(number)
        assert (after.port, after.number) == (before.port, number) and after.pid != before.pid
        cluster.wait_in_sync()
        cluster = current(cluster)
    with pytest.raises(BrokerError, match="node 2 .* already runs"):
        cluster.start_node(2)
    with pytest.raises(BrokerError, match="holds a broker of 3, not 1.*HEADRACE_HOME"):
        ensure_broker(cluster.home, nodes=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_nodes_by_command_are_found_again_mended_and_ended_at_once(tmp_path: Path) -> None:
    def command(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "headrace", "broker", *words], capture_output=True, text=True,
                              env={**os.environ, "HEADRACE_HOME": str(tmp_path)})  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    home = tmp_path / "broker"
    try:
        assert command("start", "--nodes", "2")[1].count("1 node or 3, not 2") == 1
        code, said = command("start", "--nodes", "3", "--json")
        assert code == 0
        nodes = json.loads(said)["nodes"]
        assert [row["node"] for row in nodes] == [1, 2, 3] and len({row["pid"] for row in nodes}) == 3
        assert command("status")[0] == 0
        os.kill(nodes[1]["pid"], signal.SIGKILL)
        os.kill(nodes[2]["pid"], signal.SIGSTOP)  # the end reaches it all the same
        assert gone(nodes[1]["pid"], 10.0)
        code, said = command("status")
        assert code == 1 and "down" in said and "`headrace broker start`" in said
        os.kill(nodes[2]["pid"], signal.SIGCONT)
        code, said = command("start", "--json")  # as many as it has, and only what is missing
        again = json.loads(said)["nodes"]
        assert code == 0 and [row["bootstrap"] for row in again] == [row["bootstrap"] for row in nodes]
        assert [row["pid"] == old["pid"] for row, old in zip(again, nodes, strict=True)] == [True, False, True]
        os.kill(nodes[0]["pid"], signal.SIGSTOP)
        assert command("stop") == (0, "stopped\n")
        assert all(gone(row["pid"]) for row in again)
    finally:
        stop_broker(home)


def current(broker: Broker) -> Broker:
    found = broker_status(broker.home)
    assert found is not None
    return found


def last_of(kafka: clients.KafkaConfig, topic: str) -> bytes | None:
    record = last_record(kafka, topic, 0)
    return None if record is None else record.value


@pytest.mark.slow
def test_mend_aborts_what_hangs_and_readers_go_on(broker: Broker, kafka: clients.KafkaConfig, run_name: str) -> None:
    topic = f"test.{run_name}.held"
    clients.create_topics(kafka, [TopicSpec(topic, 2, 1, {})])
    writer = clients.transactional_producer(kafka, f"test.{run_name}", 600.0)
    writer.init_transactions()
    writer.begin_transaction()
    for partition in range(2):
        writer.produce(topic, b"never marked", partition=partition)
    writer.flush()
    Transactor(kafka, f"test.{run_name}.other").send([Output(topic, 1, b"behind")])
    assert last_record(kafka, topic, 1) is None
    assert sorted(mend(broker.home, longest_s=1.0)) == [f"{topic}[0]@0", f"{topic}[1]@0"]
    record = last_record(kafka, topic, 1)
    assert record is not None and record.value == b"behind" and last_record(kafka, topic, 0) is None
    assert mend(broker.home, longest_s=1.0) == []
