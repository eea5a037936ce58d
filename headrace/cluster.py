"""Workers and sandbox hosts as actors on a Ray cluster: how they are reached, and what their ends mean.

An actor here is a thin frame around the role as it runs everywhere else. Ray starts none again by itself: the
supervisor does, as it does with processes, and Ray finds a node for it. Actors belong to the supervisor's connection,
so they end with it, even when it is killed. What crosses is text and numbers. A worker finds sandbox hosts by the names
of actors in the run's namespace, which is new at each start of the supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from headrace.producers.environments.elsewhere import Door, Elsewhere
from headrace.producers.environments.hosted import SandboxHost, run_host
from headrace.schemas.errors import ClusterError
from headrace.schemas.topics import RunTopics

from . import placing, roles
from .settings import Config, SiteSettings
from .supervisor import LOST

ANSWER_S = 5.0  # for a head to take a connection
END_S = 20.0  # for an actor that was killed to be gone
WAITS_S = 15.0  # without a node, before that is said
HOSTS = "sandboxes-"  # how the names of their actors begin
CALLS = 64  # of a host at the same time, beside one for each sandbox that it has
CONTROL = "control"  # the concurrency group of what must be answered while the rest is at work


class RoleActor:
    """One role in a process of Ray's. `given`: JSON, as `Cluster` writes it."""

    def __init__(self, given: str) -> None:
        found = json.loads(given)
        self._role, self._name, self._kafka = found["role"], found["name"], found["kafka"]
        self._topics = RunTopics(found["run"], found["prefix"])
        self._site = SiteSettings.model_validate(found["site"])
        self._stop, self._ready = threading.Event(), threading.Event()
        self._host: SandboxHost | None = None

    def about(self) -> str:
        """Where it is."""
        import ray

        try:
            output = os.readlink("/proc/self/fd/2")
        except OSError:
            output = "Ray's log folder"
        return json.dumps({"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(),
                           "machine": socket.gethostname(), "log": output})  # fmt: skip

    def run(self) -> str:
        """Until it ends, or is asked to: exit code and last words."""
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO,
                            stream=sys.stderr, force=True)  # fmt: skip
        code, words = roles.ended(self._role, self._body)
        if words:
            print(words, file=sys.stderr, flush=True)
        return json.dumps({"code": code, "words": words})

    def stop(self) -> None:
        self._stop.set()

    def ask(self, method: str, *given: str | float) -> str:
        """Of a sandbox host; waits until it is ready."""
        self._ready.wait()
        answer: str = getattr(self._host, method)(*given)
        return answer

    def _body(self) -> None:
        from headrace.producers.tooling import open_environment
        from headrace.streams.log.policy import open_settings

        settings = open_settings(self._kafka, self._topics).settings
        if self._role == "sandboxes":
            run_host(open_environment(settings, roles.sandbox_choice(self._site)), self._stop, self._serve)
        else:
            roles.worker(self._kafka, self._topics, settings, self._site, self._stop, self._name,
                         elsewhere=lambda: Elsewhere(find_hosts, self._site.workers))  # fmt: skip

    def _serve(self, host: SandboxHost) -> None:
        self._host = host
        self._ready.set()


class ActorDoor:
    """Implements `Door`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, method: str, *given: str | float) -> Future[str]:
        group = CONTROL if method in ("hear", "end") else "calls"
        future: Future[str] = self._actor.ask.options(concurrency_group=group).remote(method, *given).future()
        return future


_doors: dict[str, Door] = {}  # of this process


def find_hosts() -> Mapping[str, Door]:
    """In the namespace of the actor that asks."""
    import ray
    from ray.util import list_named_actors

    names = [name for name in list_named_actors() if name.startswith(HOSTS)]
    for name in names:
        if name not in _doors:
            try:
                _doors[name] = ActorDoor(ray.get_actor(name))
            except ValueError:  # it has just ended
                continue
    for name in _doors.keys() - set(names):
        del _doors[name]
    return dict(_doors)


class Cluster:
    """A connection to one; implements the supervisor's `Placer`. Raises ClusterError."""

    def __init__(self, address: str, kafka: Mapping[str, Any], config: Config, say: Callable[[str], None]) -> None:
        self._say, self._config, self._kafka = say, config, kafka
        self.roles = placing.roles(config.site, config.settings.tasks)
        self._number = 0
        self._ray = _connect(address, f"headrace.{config.site.prefix}.{config.run}.{uuid.uuid4().hex[:8]}")
        try:
            resources = {role: placing.resource(role, config.site) for role in self.roles}
            placing.check(resources, self.roles, self._nodes(), address)
        except BaseException:
            self.close()
            raise

    def start(self, role: str, name: str, log: Path) -> Placed:
        self._number += 1
        config, label = self._config, placing.resource(role, self._config.site)
        given = {"role": role, "name": name, "kafka": dict(self._kafka), "run": config.run,
                 "prefix": config.site.prefix, "site": config.site.model_dump(mode="json")}  # fmt: skip
        place: dict[str, Any] = {"num_gpus": 1} if label == placing.GPU else {"resources": {label: 1}}
        groups = {"calls": config.site.sandboxes + CALLS, CONTROL: 8, "run": 1}
        made = self._ray.remote(concurrency_groups=groups)(RoleActor).options(
            num_cpus=0, scheduling_strategy="SPREAD", max_restarts=0, **place,
            name=f"{HOSTS if role == 'sandboxes' else 'worker-'}{self._number}",
        )  # fmt: skip
        return Placed(self._ray, made.remote(json.dumps(given)), log, lambda line: self._say(f"{name} {line}"), label)

    def close(self) -> None:
        self._ray.shutdown()

    def _nodes(self) -> list[placing.Node]:
        return [placing.Node(node["NodeManagerAddress"], node["Resources"]) for node in self._ray.nodes()
                if node["Alive"]]  # fmt: skip


class Placed:
    """An actor, as the supervisor's `Process`. `pid`: on its node, once it has one."""

    def __init__(self, ray: Any, actor: Any, log: Path, say: Callable[[str], None], label: str) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._ray, self._actor, self._log, self._say, self._label = ray, actor, log, say, label
        self._about = actor.about.options(concurrency_group=CONTROL).remote()
        self._run = actor.run.options(concurrency_group="run").remote()
        self._waits_since = time.monotonic()

    def poll(self) -> int | None:
        if self.returncode is None:
            if not self.pid:
                self._place()
            if self._ready(self._run):
                self._end()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """It is asked to end. One that has no node yet is given up."""
        if self.poll() is not None:
            return
        if self.pid:
            self._actor.stop.options(concurrency_group=CONTROL).remote()
        else:
            self._ray.kill(self._actor)
            self.returncode = -signal.SIGTERM

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def wait(self) -> int:
        if self.returncode is None:
            self._ray.wait([self._run], timeout=END_S)
            if self.poll() in (None, LOST):
                self.returncode = -signal.SIGKILL
        assert self.returncode is not None
        return self.returncode

    def _ready(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])

    def _place(self) -> None:
        if self._ready(self._about):
            try:
                found = json.loads(self._ray.get(self._about))
            except self._ray.exceptions.RayError:
                return  # the end of `run` says the same
            self.pid = found["pid"]
            self._write(f"process {self.pid} of {found['machine']}, Ray node {found['node']}; its log: {found['log']}")
        elif time.monotonic() - self._waits_since > WAITS_S:
            self._waits_since = time.monotonic() + 3 * WAITS_S
            self._say(f"waits for a node with a free {self._label!r}")

    def _end(self) -> None:
        try:
            found = json.loads(self._ray.get(self._run))
            self.returncode, words = found["code"], found["words"]
        except self._ray.exceptions.RayError as error:
            self.returncode, words = LOST, " ".join(str(error).split())
        self._write(words or "it has ended")
        self._ray.kill(self._actor)  # its place is free

    def _write(self, line: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


# ------------------------------------------------------------------------------------------------- the connection


def _connect(address: str, namespace: str) -> Any:
    """The module `ray`, connected. Raises ClusterError."""
    try:
        import ray
    except ImportError as error:
        raise ClusterError("--ray needs Ray: pip install 'headrace[ray]'") from error
    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:400]
        raise ClusterError(f"no connection to the Ray cluster at {address}: {said} (this machine must be one of its "
                           f"nodes: `ray start --address={address} --num-cpus=0`; Python, Ray's version and "
                           "RAY_AUTH_MODE must be the cluster's)") from error  # fmt: skip
    return ray


def _check_answers(address: str) -> None:
    """Ray itself would try for half a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"--ray {address}: give HOST:PORT of the cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`"
                           ) from error  # fmt: skip
