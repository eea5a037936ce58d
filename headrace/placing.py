"""What is placed on a Ray cluster, and on which nodes: decided from site settings and facts of nodes, without Ray.

A worker takes one of a resource that only engine hosts have (a GPU, or a label), a sandbox host one of a label that
only CPU hosts have: so the two are apart, and each kind grows by its own number of nodes and its own setting. Ray finds
the node; here is checked beforehand that there are nodes to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.schemas.errors import ClusterError
from headrace.schemas.settings import TaskSettings

from .settings import SiteSettings

GPU = "GPU"  # as Ray calls it


@dataclass(frozen=True, slots=True)
class Node:
    """One that is alive. `resources`: that it has in all, in use or not."""

    address: str
    resources: Mapping[str, float]


def roles(site: SiteSettings, tasks: TaskSettings) -> dict[str, int]:
    """How many of each are placed there: first what the others need."""
    from headrace.producers.tooling import needs_sandboxes

    hosts = {"sandboxes": site.ray.sandbox_hosts} if needs_sandboxes(tasks) else {}
    return hosts | {"worker": site.workers}


def resource(role: str, site: SiteSettings) -> str:
    """Of which one of that role takes 1."""
    if role == "sandboxes":
        return site.ray.sandbox
    return site.ray.engine or (GPU if site.device.startswith("cuda") else "engine")


def check(wanted: Mapping[str, str], counts: Mapping[str, int], nodes: Sequence[Node], address: str) -> None:
    """Raises ClusterError where the nodes don't have room for `counts` of roles, each of which takes its resource in
    `wanted`."""
    for name in dict.fromkeys(wanted.values()):
        asked = {role: counts[role] for role in wanted if wanted[role] == name}
        room, need = sum(int(node.resources.get(name, 0)) for node in nodes), sum(asked.values())
        if room < need:
            words = " and ".join(f"{n} x {role}" for role, n in asked.items())
            how = "--num-gpus=1" if name == GPU else f"--resources='{{\"{name}\": 1}}'"
            raise ClusterError(f"the {len(nodes)} nodes of the Ray cluster at {address} have {room} of the resource "
                               f"{name!r}, and {words} need {need}: start nodes with `ray start --address={address} "
                               f"{how}`, or change [site]")  # fmt: skip
