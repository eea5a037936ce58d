"""Workers and sandbox hosts on a Ray cluster of three nodes on this machine: apart, killed, and nothing left behind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.consumers.ledger import audit
from headrace.consumers.run import open_run
from headrace.node import free_ports
from headrace.schemas.events import AttemptEnded
from headrace.schemas.outcomes import Outcome
from headrace.schemas.topics import GROUPS
from tests.running import Running
from tests.sandboxes import backend_of, labelled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
PLACED = re.compile(r"process (\d+) of \S+, Ray node (\w+)")
WITHIN_S = 240.0  # on a slow and busy machine
TASK = {
    "task.toml": 'schema_version = "1.1"\n[metadata]\nsandboxes = ["process"]\n[environment]\nstorage_mb = 64\n',
    "instruction.md": "Say anything.\n",
    "environment/Dockerfile": "FROM headrace-plain:tools\nWORKDIR /app\n",
    # A verdict that is drawn, so that siblings differ; slow enough to be met at work.
    "tests/test.sh": "sleep 1; echo $((RANDOM % 2)) > /logs/verifier/reward.txt\n",
}


def add_node(cluster: Any, **given: Any) -> None:
    """With ports that are known beforehand (else a node waits for its agents), and no process that isn't needed."""
    (metrics, dashboard), (environments, _) = free_ports(2)
    cluster.add_node(wait=False, num_cpus=1, object_store_memory=80 << 20, include_log_monitor=False,
                     metrics_agent_port=metrics, dashboard_agent_listen_port=dashboard,
                     runtime_env_agent_port=environments, **given)  # fmt: skip


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """The first node is for engines, and where the supervisor connects; the others are for sandboxes. Environment
    variables are those that the nodes, and Ray here, start with."""
    pytest.importorskip("ray")
    backend_of("process")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"USAGE_STATS_ENABLED": "0", "AUTH_MODE": "disabled", "memory_monitor_refresh_ms": "0",
                            "raylet_start_wait_time_s": f"{WITHIN_S:.0f}"}.items():  # fmt: skip
            patch.setenv(f"RAY_{name}", value)
        from ray._private.node import Node
        from ray.cluster_utils import Cluster

        patch.setattr(Node, "start_api_server", lambda *_, **__: None)  # of the dashboard: heavy, and for people
        cluster = Cluster()
        add_node(cluster, resources={"engine": 1}, _system_config=QUICK, no_monitor=True)
        for _ in range(2):
            add_node(cluster, resources={"sandbox": 2})
        cluster.wait_for_nodes(WITHIN_S)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def running(tmp_path: Path, kafka: dict[str, Any], run_name: str) -> Iterator[Running]:
    running = Running(tmp_path, kafka, run_name)
    tasks = tmp_path / "task"
    for name, text in TASK.items():
        (tasks / name).parent.mkdir(parents=True, exist_ok=True)
        (tasks / name).write_text(text)
    text = running.config.read_text()
    for old, new in (('source = "jsonl"', 'source = "terminal"\nsandbox = "process"'),
                     (f'path = "{tmp_path / "tasks.jsonl"}"', f'path = "{tasks}"'), ('score = "scorers:vowels"', ""),
                     ("[site]", "[site]\nsandboxes = 4"),
                     ("[site.kafka]", "[site.ray]\nsandbox_hosts = 2\n[site.kafka]")):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    running.config.write_text(text)
    yield running
    running.kill_all()


def placed(running: Running, name: str) -> list[tuple[int, str]]:
    """(process, Ray's node) of each incarnation, as the supervisor has written them down."""
    log = running.folder / "home" / "runs" / running.topics.run / "logs" / f"{name}.log"
    return [(int(pid), node) for pid, node in PLACED.findall(log.read_text())] if log.exists() else []


def until(running: Running, true: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not true():
        assert running.process is not None and running.process.poll() is None, running.said()
        assert time.monotonic() < end, running.said()
        time.sleep(0.05)


def scores(pid: int) -> bool:
    """Whether a verifier is at work in a sandbox of that host's."""
    try:
        return any("/tests/test.sh" in child.cmdline() for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return False


def test_killed_sandbox_node_and_engine_actor_are_replaced_and_the_account_closes(
    running: Running, ray_cluster: Any
) -> None:
    engines = ray_cluster.head_node.node_id
    nodes = {node.node_id for node in ray_cluster.list_all_nodes()}
    running.start("--ray", ray_cluster.address)
    running.wait_for(1)
    (worker,), (first,), (second,) = (placed(running, name) for name in ("worker", "sandboxes-0", "sandboxes-1"))
    assert worker[1] == engines and {first[1], second[1]} <= nodes - {engines}
    until(running, lambda: scores(first[0]))
    version = running.version()
    (doomed,) = [node for node in ray_cluster.list_all_nodes() if node.node_id == first[1]]
    ray_cluster.remove_node(doomed, allow_graceful=False)
    psutil.Process(worker[0]).kill()
    until(running, lambda: len(placed(running, "sandboxes-0")) == 2 and len(placed(running, "worker")) == 2)
    running.wait_for(version + 2)
    replaced = placed(running, "sandboxes-0")[1]
    assert replaced[1] not in (first[1], engines), "the node that is left has room for both hosts"
    assert placed(running, "worker")[1][1] == engines
    running.drain()

    run = open_run(running.topics.run, running.kafka)
    ledger = audit(run.snapshot())
    assert ledger.closes, ledger.failures
    ended = [event for _, event in run.events(GROUPS) if isinstance(event, AttemptEnded)]
    again = {(one.group, one.slot) for one in ended if one.attempt > 0 and one.outcome != Outcome.INFRA_FAILURE}
    assert again, "what the killed ones ran was tried again"
    for pid, _ in [worker, first, second, replaced, *placed(running, "worker")]:
        assert not psutil.pid_exists(pid)
        assert labelled("process", pid) == [] or pid == first[0]


def test_what_the_cluster_lacks_is_one_line_before_anything_is_made(running: Running, ray_cluster: Any) -> None:
    running.config.write_text(running.config.read_text().replace("sandbox_hosts = 2", 'sandbox = "elsewhere"'))
    running.start("--ray", ray_cluster.address)
    assert running.finish() == 1
    said = (running.folder / "out").read_text()
    assert len(said.splitlines()) == 1 and "of the resource 'elsewhere', and 1 x sandboxes need 1: start" in said
    assert running.version() == -1
