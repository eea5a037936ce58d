"""Decides which transactions of the development broker hang, and aborts them with Kafka's own tool.

An open transaction ends by itself at its time-out, so whatever still holds readers back after the longest time-out
hangs. Aborting it loses nothing that anyone acted upon: nobody could read it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from headrace.schemas.errors import LogError
from headrace.streams.log.clients import KafkaConfig, admin
from headrace.streams.log.reader import GRACE_S, Position, Reader
from headrace.streams.log.transactions import TRANSACTION_TIMEOUT_S

from .broker import broker_status, default_home
from .jars import BrokerError, find_java, find_tools

LONGEST_S = TRANSACTION_TIMEOUT_S + GRACE_S
TOOL_S = 120.0
ANSWER_S = 5.0


def mend(home: Path | None = None, *, longest_s: float = LONGEST_S, say: Callable[[str], None] = print) -> list[str]:
    """The transactions that were aborted, as `topic[partition]@offset`. `longest_s`: no transaction is open for longer.
    Raises BrokerError."""
    broker = broker_status(home)
    if broker is None:
        raise BrokerError(f"the development broker of {home or default_home()} doesn't run: `headrace broker start`")
    kafka: KafkaConfig = {"bootstrap.servers": broker.bootstrap}
    aborted: list[str] = []
    held = _held(kafka)
    if held:
        say(f"{len(held)} partitions are held back; whatever is merely open ends within {longest_s:.0f} s")
    deadline = time.monotonic() + longest_s
    while held and time.monotonic() < deadline:
        time.sleep(1.0)
        held = {place: at for place, at in _held(kafka).items() if held.get(place) == at}
    while held:  # behind one that is aborted, another may hang
        for (topic, partition), at in held.items():
            _abort(kafka, topic, partition, at)
            aborted.append(f"{topic}[{partition}]@{at}")
        before, held = held, _held(kafka)
        if stuck := [place for place, at in held.items() if before.get(place) == at]:
            raise BrokerError(f"{stuck[0][0]}[{stuck[0][1]}]@{held[stuck[0]]} is still held back after its abort")
    return aborted


def _held(kafka: KafkaConfig) -> dict[Position, int]:
    """Partitions that can't be read to their end, and how far they can be."""
    out: dict[Position, int] = {}
    with Reader(kafka) as stable, Reader(kafka, isolation="read_uncommitted") as everything:  # one pair for them all
        for name, topic in admin(kafka).list_topics(timeout=30.0).topics.items():
            for partition in topic.partitions if not name.startswith("__") else ():
                try:
                    readable, written = (r.bounds(name, partition, ANSWER_S)[1] for r in (stable, everything))
                except LogError:
                    continue  # deleted in the meantime, or without a leader: nothing to abort
                if readable < written:
                    out[name, partition] = readable
    return out


def _abort(kafka: KafkaConfig, topic: str, partition: int, offset: int) -> None:
    java = find_java()
    command = [str(java.executable), "-cp", find_tools(java), "org.apache.kafka.tools.TransactionsCommand",
               "--bootstrap-server", str(kafka["bootstrap.servers"]), "abort", "--topic", topic, "--partition",
               str(partition), "--start-offset", str(offset)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TOOL_S)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise BrokerError(f"{topic}[{partition}]@{offset}: Kafka's tool could not abort it: {said[-1] if said else ''}")
