"""What may happen to a run, and in which order: a schedule is a pure function of its seed and length.

A fault is done and undone here; whether the run goes on afterwards is `stage`'s to judge. One node of the broker at a
time: with two of three gone, nobody can go on.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException

from headrace.broker import Broker, BrokerError
from headrace.schemas.errors import LogError
from headrace.schemas.topics import RunTopics
from headrace.streams.log import clients
from headrace.streams.log.transactions import Transactor

from .clock import Clocks
from .crew import Crew

ROLES = ("assembler", "coordinator", "trainer", "worker")
TRANSACTION_TIMEOUT_S = 5
# Past the time-out, the broker's look for overdue transactions, and the workers' leases.
STOPPED_S = TRANSACTION_TIMEOUT_S + 2.5
IN_SYNC_S = 25.0
STORM = 3  # workers that join and leave at once
JUMPS_S = (15, -15, 3600, -3600, 86_400)


@dataclass
class Stage:
    """What faults act upon."""

    crew: Crew
    broker: Broker
    clocks: Clocks
    kafka: Mapping[str, Any]
    topics: RunTopics
    random: random.Random

    def one(self, role: str) -> str:
        return self.random.choice(self.crew.names(role))

    def pause(self, shortest_s: float, longest_s: float) -> None:
        time.sleep(self.random.uniform(shortest_s, longest_s))

    def restart_node(self, number: int) -> None:
        self.broker = self.broker.start_node(number, owner=True)
        self.settle()

    def settle(self) -> None:
        """All copies are in step again: only then does the next fault hit a whole cluster.

        A follower can give up: Kafka 4.4.0 marks a partition as failed where the leader's epoch is newer than what the
        follower knows of it, and where that happened for the last one (seen after a node was stopped and went on), only
        its restart helps. So it is restarted, as an operator would.
        """
        for _ in self.broker.nodes:
            try:
                self.broker.wait_in_sync(IN_SYNC_S)
                return
            except BrokerError:
                behind = self.broker.behind()
                if behind is None:
                    continue
                self.broker.node(behind).stop()
                self.broker = self.broker.start_node(behind, owner=True)
        self.broker.wait_in_sync()


Fault = Callable[[Stage], str]  # what was done, in a few words


def kill(role: str) -> Fault:
    def fault(stage: Stage) -> str:
        name = stage.one(role)
        stage.crew.kill(name)
        return name

    return fault


def kill_workers(stage: Stage) -> str:
    names = stage.crew.names("worker")
    for name in names:
        stage.crew.kill(name)
    return ", ".join(names)


def stop(role: str) -> Fault:
    def fault(stage: Stage) -> str:
        return _stopped(stage, [stage.one(role)])

    return fault


def stop_all(stage: Stage) -> str:
    return _stopped(stage, [name for role in ROLES for name in stage.crew.names(role)])


def _stopped(stage: Stage, names: list[str]) -> str:
    for name in names:
        stage.crew.child(name).signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for name in names:
        stage.crew.child(name).signal(signal.SIGCONT)
    return f"{', '.join(names)} for {STOPPED_S:g} s"


def take_over(stage: Stage) -> str:
    """A second assembler while the first only sleeps; the first wakes up, is fenced, and comes back as a third."""
    first = stage.crew.child("assembler")
    first.signal(signal.SIGSTOP)
    stage.crew.start("assembler-second", "assembler", once=True)
    stage.pause(4.0, 6.0)
    first.signal(signal.SIGCONT)
    return "a second assembler while the first is stopped"


def fence(stage: Stage) -> str:
    """A stranger takes a role's transactional id, as a tool or a wrong deployment would."""
    role = stage.random.choice(("assembler", "coordinator", "trainer"))
    partition = stage.random.randrange(4) if role == "assembler" else None
    name = stage.topics.transactional_id(role, partition)
    try:
        Transactor(stage.kafka, name, timeout_s=30.0).close()
    except LogError as error:  # the role itself was quicker
        return f"{name}: {error}"
    return name


def kill_node(stage: Stage) -> str:
    number = stage.random.randrange(len(stage.broker.nodes)) + 1
    stage.broker.node(number).kill()
    stage.pause(0.0, 3.0)
    stage.restart_node(number)
    return f"node {number}"


def kill_node_and_role(stage: Stage) -> str:
    number, name = stage.random.randrange(len(stage.broker.nodes)) + 1, stage.one(stage.random.choice(ROLES))
    stage.broker.node(number).kill()
    stage.pause(0.0, 1.0)
    stage.crew.kill(name)
    stage.restart_node(number)
    return f"node {number}, {name}"


def stop_node(stage: Stage) -> str:
    """Its connections stay, and nobody answers: worse than a node that is gone."""
    node = stage.broker.node(stage.random.randrange(len(stage.broker.nodes)) + 1)
    node.pause()
    time.sleep(STOPPED_S)
    node.resume()
    stage.settle()
    return f"node {node.number} for {STOPPED_S:g} s"


def rolling_restart(stage: Stage) -> str:
    for number in range(1, len(stage.broker.nodes) + 1):
        stage.broker.node(number).stop()  # by its number: settling may have restarted it since
        stage.restart_node(number)
    return "each node in turn"


def storm(stage: Stage) -> str:
    names = [f"worker-storm-{i}" for i in range(STORM)]
    for name in names:
        stage.crew.start(name, "worker", once=True)
    stage.pause(4.0, 7.0)
    for i, name in enumerate(names):
        stage.crew.retire(name, signal.SIGKILL if i % 2 else signal.SIGTERM)
    return f"{STORM} workers join, and leave at once"


def jump_node(stage: Stage) -> str:
    node, seconds = stage.random.choice(stage.broker.nodes), stage.random.choice(JUMPS_S)
    stage.clocks.set(node.pid, seconds)
    stage.pause(2.0, 4.0)
    stage.clocks.set(node.pid, 0)
    return f"node {node.number} by {seconds} s and back"


def jump_role(stage: Stage) -> str:
    name, seconds = stage.one(stage.random.choice(ROLES)), stage.random.choice(JUMPS_S)
    pid = stage.crew.child(name).process.pid
    stage.clocks.set(pid, seconds)
    stage.pause(2.0, 4.0)
    stage.clocks.set(pid, 0)
    return f"{name} by {seconds} s and back"


def delete_offsets(stage: Stage) -> str:
    """Whatever consumer groups there are: no role depends on one, so there should be none of the run's."""
    admin = clients.admin(stage.kafka)
    names = [group.group_id for group in admin.list_consumer_groups(request_timeout=30).result().valid]
    for future in (admin.delete_consumer_groups(names, request_timeout=30) if names else {}).values():
        try:
            future.result()
        except KafkaException as error:
            return f"{len(names)} consumer groups, not all: {clients.reason(error)}"
    return f"{len(names)} consumer groups"


KINDS: dict[str, Fault] = {
    **{f"kill -9 {role}": kill(role) for role in ROLES},
    "kill -9 all workers": kill_workers,
    **{f"stop {role}": stop(role) for role in ROLES},
    "stop all roles": stop_all,
    "second assembler": take_over,
    "id taken by a stranger": fence,
    "kill -9 node": kill_node,
    "kill -9 node and role": kill_node_and_role,
    "stop node": stop_node,
    "rolling restart": rolling_restart,
    "join and leave storm": storm,
    "clock of a node": jump_node,
    "clock of a role": jump_role,
    "offsets deleted": delete_offsets,
}


# What the short schedule leaves out: each of these is close to one that it has.
REST = {"kill -9 all workers", "stop trainer", "kill -9 node", "clock of a role", "stop all roles"}


def schedule(seed: int, count: int | None) -> list[str]:
    """Kinds in the order in which they come, every kind before any comes again; without `count` the short schedule."""
    draw = random.Random(seed)
    if count is None:
        short = [kind for kind in KINDS if kind not in REST]
        draw.shuffle(short)
        return short
    out: list[str] = []
    while len(out) < count:
        deck = list(KINDS)
        draw.shuffle(deck)
        out += deck
    return out[:count]
