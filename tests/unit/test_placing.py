"""What is placed on a Ray cluster, and where there is no room for it; without Ray."""

from __future__ import annotations

import pytest

from headrace.cluster import _check_answers
from headrace.placing import Node, check, resource, roles
from headrace.schemas.errors import ClusterError
from headrace.schemas.settings import TaskSettings
from headrace.settings import RaySite, SiteSettings

TERMINAL = TaskSettings(source="terminal", path="tasks")
NODES = [Node("10.0.0.1", {"CPU": 8.0, "GPU": 2.0}), Node("10.0.0.2", {"CPU": 64.0, "sandbox": 1.5})]


def test_engines_and_sandbox_hosts_are_counted_apart_and_hosts_only_where_tasks_need_them() -> None:
    site = SiteSettings(workers=3, ray=RaySite(sandbox_hosts=2))
    assert roles(site, TERMINAL) == {"sandboxes": 2, "worker": 3}
    assert roles(site, TaskSettings(dataset="chain_sum")) == {"worker": 3}


def test_a_worker_takes_a_gpu_where_its_device_is_one_and_a_sandbox_host_never_does() -> None:
    on_gpu, on_cpu = SiteSettings(device="cuda:0"), SiteSettings()
    named = SiteSettings(device="cuda", ray=RaySite(engine="big", sandbox="cpu"))
    assert [resource("worker", site) for site in (on_gpu, on_cpu, named)] == ["GPU", "engine", "big"]
    assert [resource("sandboxes", site) for site in (on_gpu, on_cpu, named)] == ["sandbox", "sandbox", "cpu"]


def test_too_few_nodes_are_named_with_what_to_start() -> None:
    wanted = {"sandboxes": "sandbox", "worker": "GPU"}
    check(wanted, {"sandboxes": 1, "worker": 2}, NODES, "h:1")
    with pytest.raises(ClusterError, match=r"2 nodes .* have 1 of the resource 'sandbox', and 2 x sandboxes need 2: .*"
                                           r"--resources='\{\"sandbox\": 1\}'"):  # fmt: skip
        check(wanted, {"sandboxes": 2, "worker": 2}, NODES, "h:1")
    with pytest.raises(ClusterError, match="have 2 of the resource 'GPU', and 3 x worker need 3: .*--num-gpus=1"):
        check(wanted, {"sandboxes": 1, "worker": 3}, NODES, "h:1")
    with pytest.raises(ClusterError, match="1 x sandboxes and 1 x worker need 2"):
        check(dict.fromkeys(wanted, "sandbox"), {"sandboxes": 1, "worker": 1}, NODES, "h:1")


@pytest.mark.parametrize("address", ["nonsense", "host:port", "127.0.0.1:1"])
def test_wrong_address_is_one_line_at_once(address: str) -> None:
    with pytest.raises(ClusterError, match="no Ray cluster answers|give HOST:PORT"):
        _check_answers(address)
