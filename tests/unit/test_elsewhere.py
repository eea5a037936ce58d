"""Attempts on hosts elsewhere: which host, whose fault, and what is closed when one of the two ends is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.producers.environments import Judged, Opening, ToolResult, Verdict
from headrace.producers.environments.elsewhere import Door, Elsewhere, Load, choose, share
from headrace.producers.environments.hosted import SILENT_S, SandboxHost
from headrace.schemas.errors import DaemonLost, SandboxFailed, SandboxLost
from headrace.schemas.events import Task
from headrace.schemas.outcomes import REASON_SANDBOX_LOST, REASON_STOP, REASONS, Outcome, of_error

TASK = Task("t-0", "terminal", '{"folder": "x"}', 3)


# ------------------------------------------------------------------------------------------------- decisions


def test_attempt_goes_to_the_most_free_room_and_a_full_host_queues() -> None:
    assert choose([Load("a", 4, 3), Load("b", 4, 1), Load("c", 2, 0)]) == "b"
    assert choose([Load("b", 4, 1), Load("a", 4, 1)]) == "a"
    assert choose([Load("a", 1, 3), Load("b", 1, 2)]) == "b"
    assert choose([]) is None


def test_workers_share_the_room_and_none_is_left_without() -> None:
    assert [share([8, 8], workers) for workers in (1, 3, 20)] == [16, 5, 1]
    assert share([], 2) == 0 and share([0], 1) == 0


# ------------------------------------------------------------------------------------------------- both ends


@dataclass
class Counting:
    """An environment whose only state is a number, which its one tool counts up."""

    room: int = 4
    opened: int = 0
    closed: list[int] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)  # "wait" returns when it is set

    def opening(self, task: Task) -> Opening:
        if task.id == "broken":
            raise DaemonLost("no daemon at x")
        return Opening([{"role": "user", "content": task.data}], [{"name": "add"}], 5.0, {"seed": task.seed})

    def open(self, task: Task) -> CountingSession:
        if task.id == "slow":
            self.hold.wait()
        if task.id == "broken":
            raise SandboxFailed("no room")
        self.opened += 1
        return CountingSession(self, self.opened)

    def close(self) -> None:
        self.hold.set()


@dataclass
class CountingSession:
    environment: Counting
    number: int
    total: int = 0

    def call(self, name: str, arguments: Mapping[str, Any], left_s: float) -> ToolResult | Judged:
        if name == "wait":
            self.environment.hold.wait()
        if name == "lose":
            raise SandboxLost("killed from outside")
        self.total += arguments["by"]
        return ToolResult(str(self.total), 0.5, {"left_s": left_s})

    def score(self) -> Judged:
        return Judged(REASONS[REASON_STOP].ending(success=True), Verdict(1.0, True, {"total": float(self.total)}))

    def close(self) -> None:
        self.environment.closed.append(self.number)


class ThreadDoor:
    """To a host in this process; what was asked of it fails once it is `dead`."""

    def __init__(self, host: SandboxHost) -> None:
        self.host, self.dead, self.deaf = host, False, False
        self._threads = ThreadPoolExecutor(8)

    def ask(self, method: str, *given: str | float) -> Future[str]:
        future: Future[str] = Future()
        if self.dead:
            future.set_exception(ConnectionError("the actor died"))
        elif not self.deaf:
            return self._threads.submit(getattr(self.host, method), *given)
        return future


class Hosts:
    def __init__(self, *environments: Counting) -> None:
        self.doors = {f"host-{n}": ThreadDoor(SandboxHost(one)) for n, one in enumerate(environments)}
        self.client = Elsewhere(self.find, 1)

    def find(self) -> Mapping[str, Door]:
        return dict(self.doors)

    def close(self) -> None:
        self.client.close()
        for door in self.doors.values():
            door.host.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    one = Hosts(Counting())
    yield one
    one.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_attempt_elsewhere_says_what_it_says_here(hosts: Hosts) -> None:
    here = Counting()
    assert hosts.client.opening(TASK) == here.opening(TASK)
    local, remote = here.open(TASK), hosts.client.open(TASK)
    for by, left_s in ((2, 4.5), (3, float("inf"))):
        assert remote.call("add", {"by": by}, left_s) == local.call("add", {"by": by}, left_s)
    assert remote.score() == local.score()
    remote.close()
    remote.close()
    (door,) = hosts.doors.values()
    environment = door.host._environment
    assert isinstance(environment, Counting)
    until(lambda: environment.closed == [1])
    assert hosts.client.room == 4


def test_whose_fault_it_is_is_said_where_it_happens(hosts: Hosts) -> None:
    broken = Task("broken", "terminal", "{}", 0)
    for asked, error in ((hosts.client.opening, DaemonLost("x")), (hosts.client.open, SandboxFailed("x"))):
        with pytest.raises(Exception, match="no daemon|no room") as raised:
            asked(broken)
        assert of_error(raised.value) == of_error(error)
    session = hosts.client.open(TASK)
    lost = session.call("lose", {}, 1.0)
    assert isinstance(lost, Judged) and lost.ending == REASONS[REASON_SANDBOX_LOST].ending()
    fault = session.call("add", {"wrong": 1}, 1.0)
    assert isinstance(fault, Judged) and fault.ending.outcome is Outcome.INFRA_FAILURE
    assert "KeyError" in str(fault.error)
    session.close()


def test_host_that_dies_loses_its_attempts_and_the_next_go_to_its_replacement(hosts: Hosts) -> None:
    session = hosts.client.open(TASK)
    hosts.doors["host-0"].dead = True
    with pytest.raises(SandboxLost, match="host-0 is gone: ConnectionError: the actor died") as raised:
        session.call("add", {"by": 1}, 1.0)
    assert of_error(raised.value) == REASONS[REASON_SANDBOX_LOST].ending()
    session.close()
    environment = Counting(room=2)
    dead = hosts.doors.pop("host-0")
    hosts.doors["host-1"] = ThreadDoor(SandboxHost(environment))
    hosts.client.open(TASK).close()
    until(lambda: environment.closed == [1])
    until(lambda: hosts.client.room == 2)
    dead.host.close()


def test_host_that_vanishes_under_a_step_ends_it(hosts: Hosts) -> None:
    session = hosts.client.open(TASK)
    door = hosts.doors.pop("host-0")
    door.deaf = True
    with pytest.raises(SandboxLost, match="is gone, or didn't answer in time"):
        session.call("add", {"by": 1}, float("inf"))
    session.close()
    door.host.close()


def test_attempt_that_is_closed_under_a_step_ends_it_there_too(hosts: Hosts) -> None:
    session = hosts.client.open(TASK)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(session.call, "wait", {"by": 0}, float("inf"))
        session.close()
        with pytest.raises(SandboxLost):
            step.result()
    environment = hosts.doors["host-0"].host._environment
    assert isinstance(environment, Counting)
    until(lambda: environment.closed == [1])


# ------------------------------------------------------------------------------------------------- a host alone


def test_attempts_of_a_silent_worker_are_closed_and_those_of_others_go_on() -> None:
    now, environment = [100.0], Counting()
    host = SandboxHost(environment, lambda: now[0])
    host.hear("dead"), host.hear("alive")
    task = '{"id": "t", "source": "terminal", "data": "{}", "seed": 0}'
    host.open("dead", "k1", task), host.open("alive", "k2", task)
    now[0] += SILENT_S
    host.hear("alive")
    assert host.tidy() == 0
    now[0] += 1
    assert host.tidy() == 1 and environment.closed == [1]
    assert '"result"' in host.call("k2", "add", '{"by": 1}', 1.0)
    assert f'"{REASON_SANDBOX_LOST}"' in host.call("k1", "add", '{"by": 1}', 1.0)


def test_attempt_that_is_ended_while_it_is_opened_is_closed() -> None:
    environment = Counting()
    host = SandboxHost(environment)
    with ThreadPoolExecutor(1) as thread:
        opened = thread.submit(host.open, "w", "k", '{"id": "slow", "source": "terminal", "data": "{}", "seed": 0}')
        until(lambda: "k" in host._attempts)
        host.end("k")
        environment.hold.set()
        opened.result()
    assert environment.closed == [1]
