"""The names of a run's topics, how many partitions each has, and how long it keeps what it holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SettingsError

TASKS, TRAJECTORIES, SAMPLES, GROUPS, BATCHES = "tasks", "trajectories", "samples", "groups", "batches"
POLICY, WEIGHTS, FLEET, EVALS, DEADLETTER = "policy", "weights", "fleet", "evals", "deadletter"
ALL_TOPICS = (TASKS, TRAJECTORIES, SAMPLES, GROUPS, BATCHES, POLICY, WEIGHTS, FLEET, EVALS, DEADLETTER)
# These share a partition count: what a group's events caused lies in the partition of the same number.
BY_GROUP = (TRAJECTORIES, SAMPLES, GROUPS)

# What the value of a record may hold, so that with key, headers and framing it is accepted by client and broker.
RECORD_BYTES = 990_000
# Manifests are whole: one of 4,096 groups with 16 slots and a few versions takes about 5 MB.
MANIFEST_BYTES = 8_000_000
_BROKER_BYTES = {BATCHES: 8 << 20}
_USUAL_BROKER_BYTES = 1_048_588

DAY_MS = 24 * 3600 * 1000
# Nothing that decides what was trained expires by time; the readers of `trajectories` and `weights` delete below
# their own marks instead.
_RETENTION_MS = {FLEET: 7 * DAY_MS, DEADLETTER: 14 * DAY_MS}

_RUN = re.compile(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create."""

    name: str
    partitions: int
    replication: int
    config: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunTopics:
    """Every name that a run owns on the cluster: topics, transactional ids."""

    run: str
    prefix: str = "headrace"

    def __post_init__(self) -> None:
        for what, value in (("run id", self.run), ("topic prefix", self.prefix)):
            if not _RUN.fullmatch(value):
                raise SettingsError(
                    f"{what} {value!r}: use 1 to 64 lower-case letters, digits, '-' or '_', "
                    "beginning and ending with a letter or digit"
                )

    def name(self, topic: str) -> str:
        """`groups` -> `headrace.demo.groups`."""
        return f"{self.prefix}.{self.run}.{topic}"

    def short(self, name: str) -> str:
        """`headrace.demo.groups` -> `groups`."""
        return name.rsplit(".", 1)[1]

    def transactional_id(self, role: str, partition: int | None = None) -> str:
        """Of a role, or of its share of one partition: whoever takes it fences the one before."""
        return self.name(role) if partition is None else f"{self.name(role)}.{partition}"

    def specs(self, partitions: int, replication: int) -> list[TopicSpec]:
        """What to create: partitions, copies and configuration of each topic."""
        out = []
        for topic in ALL_TOPICS:
            config = {
                "cleanup.policy": "delete",
                "retention.ms": str(_RETENTION_MS.get(topic, -1)),
                "retention.bytes": "-1",
                "max.message.bytes": str(_BROKER_BYTES.get(topic, _USUAL_BROKER_BYTES)),
                "min.insync.replicas": "2" if replication >= 3 else "1",
                "unclean.leader.election.enable": "false",
                "compression.type": "producer",
            }
            if topic in (TRAJECTORIES, FLEET):
                # One clock for deadlines and lease timeouts: the leader's. Those of the producers may differ, and then
                # each change of producer would move the log's clock.
                config["message.timestamp.type"] = "LogAppendTime"
            count = partitions if topic in BY_GROUP else 1
            out.append(TopicSpec(self.name(topic), count, replication, config))
        return out
