"""Ways for an attempt to fail, and what each must count as, on every kind of sandbox.

The hostile half is the model's making: whatever it does to its sandbox, its failure counts as its failure. (Where an
attack worked, it writes the right answer: then the row fails as a success.) The other half is ours: it never counts.
Rows run beside each other; afterwards the pool serves the next attempt, and nothing is
left.
"""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headrace.producers.sandboxes import Backend, Sandbox, SandboxSpec, docker, shell
from headrace.producers.sandboxes.attempts import Attempt, Scorer
from headrace.producers.sandboxes.docker import DockerBackend
from headrace.producers.sandboxes.pool import Pool
from headrace.producers.sandboxes.sizing import Size
from headrace.schemas.errors import SandboxFailed
from headrace.schemas.outcomes import REASONS, Ending, Outcome, of_error
from tests.proxy import Proxy
from tests.sandboxes import KINDS, backend_of, kill_from_outside, labelled, needs, within

SPEC = SandboxSpec(disk_bytes=16 << 20, memory_bytes=128 << 20, processes=64, output_bytes=2000)
SCORER = Scorer("bash /tests/check.sh", 20.0,
                {"/tests/check.sh": b'test "$(cat /home/agent/answer 2> /dev/null)" = 42'})  # fmt: skip
RUNS_THE_ANSWER = replace(SCORER, files={"/tests/check.sh": b". /home/agent/answer; test $result = 42 || exit 1"})
RIGHT = "echo 42 > /home/agent/answer"


@dataclass
class World:
    """What the rows find."""

    backend: Backend
    pool: Pool
    secret: Path  # on this machine
    port: int  # where this machine listens


@dataclass(frozen=True)
class Hostile:
    """The model's steps; `{secret}` and `{port}` are the world's. `quick`: its steps are cut short."""

    name: str
    steps: tuple[str, ...]
    reasons: tuple[str, ...] = ("stop",)
    scorer: Scorer = SCORER
    quick: bool = False
    kinds: tuple[str, ...] = tuple(KINDS)

    def run(self, world: World) -> Ending:
        budget_s, step_s = (1.2, 0.6) if self.quick else (90.0, 30.0)
        with begun(world, budget_s, step_s) as attempt:
            for command in self.steps:
                attempt.step(command.replace("{secret}", str(world.secret)).replace("{port}", str(world.port)))
            return attempt.score(self.scorer)


def begun(world: World, budget_s: float, step_s: float) -> Attempt:
    """One that has a sandbox: on a machine that is busy with other tests a start may fail, before any model acts."""
    for _ in range(3):
        attempt = Attempt(world.pool, budget_s=budget_s, step_s=step_s)
        if attempt.ending is None:
            break
        warnings.warn(f"a sandbox didn't start: {attempt.error}", stacklevel=1)
    return attempt


Endings = Callable[["Hostile | Ours"], Ending]
SPENT = ("budget_spent",)
HOSTILE = [
    Hostile("leaves at once", ()),
    Hostile("is wrong", ("echo 41 > /home/agent/answer",)),
    Hostile("exits its shell", ("exit 0",)),
    Hostile("kills its shell", ("kill -9 $$", "kill -9 $BASHPID")),
    # What the runner held ends a moment later: soon enough, mostly, for nothing to be judged any more.
    Hostile("kills the runner", ("kill -9 $PPID", "echo"), ("stop", "sandbox_ended")),
    Hostile("kills everything", ("kill -9 -1; sleep 1", "echo"), ("sandbox_ended",)),
    Hostile("stops the runner", ("kill -STOP $PPID; exit",) * 2, ("step_timeout", "sandbox_ended"), quick=True),
    Hostile("kills the first process", ("kill -9 1; kill -SEGV 1",), ("stop", "sandbox_ended")),
    Hostile("sends a command's wrong end", ("echo S 0 4 > /proc/$$/fd/3; sleep 0.1; false",)),
    Hostile("reads the commands that follow", ("cat /proc/$$/fd/0 > /dev/null & sleep 0.1", "echo", "echo", "echo"),
            ("stop", *SPENT), quick=True),
    Hostile("redefines what its shell needs", ("printf() { :; }; eval() { :; }; read() { :; }", "echo"),
            ("stop", "sandbox_ended", *SPENT), quick=True),
    Hostile("closes every descriptor", ("exec 0<&- 1>&- 2>&-; for i in {0..9}; do eval exec $i'>&-'; done", "echo"),
            ("stop", *SPENT), quick=True),
    Hostile("sends a NUL byte", ("echo \0",)),
    Hostile("eats memory", ("head -c 400000000 /dev/zero | tail -n 1",) * 2),
    Hostile("eats memory in the shell itself", ("x=$(head -c 400000000 /dev/zero | tr '\\0' x)",),
            ("stop", "sandbox_ended", "memory_exhausted")),
    Hostile("eats memory in many processes", (
        "for i in {1..9}; do head -c 90000000 /dev/zero | tail -n 1 & done; wait",)),
    Hostile("eats memory as files", ("head -c 400000000 /dev/zero > /dev/shm/file",), ("stop", "memory_exhausted")),
    Hostile("fills the disk", ("head -c 400000000 /dev/zero > /home/agent/file",), ("stop", "disk_exhausted")),
    Hostile("fills the disk with many files", (
        "for i in {1..60}; do head -c 999999 /dev/zero > /tmp/$i; done; sleep 1",), ("stop", "disk_exhausted")),
    Hostile("fills the disk with empty files", ("seq -f /tmp/%.0f 120000 | xargs touch; sleep 1",),
            ("stop", "disk_exhausted", "memory_exhausted")),
    Hostile("forks without end", (":() { : | : & }; :; sleep 9",) * 3, (*SPENT, "processes_exhausted", "step_timeout"),
            quick=True),
    Hostile("starts too many processes", ("for i in {1..70}; do sleep 99 & done",),
            ("stop", *SPENT, "processes_exhausted"), quick=True),
    Hostile("floods its output", ("yes",) * 3, SPENT, quick=True),
    Hostile("floods its output in the background", ("yes & yes >&2 & true", "echo", RIGHT.replace("42", "41"))),
    Hostile("prints one endless line", ("head -c 30000000 /dev/zero",)),
    Hostile("sleeps", ("sleep 99",) * 3, SPENT, quick=True),
    Hostile("burns CPU time", ("while :; do :; done",) * 3, SPENT, quick=True),
    Hostile("ignores signals", ("trap '' TERM INT HUP QUIT; while :; do sleep 9; done",) * 3, SPENT, quick=True),
    Hostile("hides a process in another session", ("setsid bash -c 'sleep 2; echo 42 > /home/agent/answer' &",)),
    Hostile("reaches for this machine's network", ("exec 9<> /dev/tcp/127.0.0.1/{port} && " + RIGHT,)),
    Hostile("reaches for the internet", ("exec 9<> /dev/tcp/192.0.2.1/80 && " + RIGHT,
                                         "echo x > /dev/udp/192.0.2.1/53 && " + RIGHT)),
    Hostile("reads this machine's files", ("cat {secret} && " + RIGHT, "cat /proc/1/root{secret} && " + RIGHT,
                                           "cat /etc/shadow && " + RIGHT)),
    Hostile("looks for the Docker socket", (
        "for at in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do [ -e $at ] && " + RIGHT
        + "; done; true",)),
    Hostile("looks for the scorer's files", ("[ -e /tests ] && " + RIGHT, "find / -name check.sh 2>&1 | grep tests && "
                                             + RIGHT)),
    Hostile("raises its own limits", (
        "for at in $(find /sys/fs/cgroup -name '*max' -o -name '*limit_in_bytes'); do echo 99999999999 > $at && "
        + RIGHT + "; done; ulimit -f unlimited; ulimit -u 9999",)),
    Hostile("mounts and enters namespaces", ("mount -t tmpfs none /mnt && " + RIGHT, "chroot / true && " + RIGHT,
                                             "mknod /tmp/sda b 254 0 && cat /tmp/sda && " + RIGHT)),
    Hostile("writes into the kernel's files", ("echo 1 > /proc/sys/kernel/sysrq && " + RIGHT,
                                               "echo c > /proc/sysrq-trigger && " + RIGHT)),
    Hostile("removes everything", ("rm -rf --no-preserve-root / 2> /dev/null",),
            ("stop", "scorer_broken_by_model", "sandbox_ended")),
    Hostile("lets the scorer hang", ("mkfifo /home/agent/answer",), ("scorer_broken_by_model",),
            replace(SCORER, timeout_s=1.5)),
    Hostile("lets the scorer crash", ("echo 'exit 7' > /home/agent/answer",), ("scorer_broken_by_model",),
            RUNS_THE_ANSWER),
    Hostile("lets the scorer kill its shell", ("echo 'kill -9 $PPID' > /home/agent/answer",),
            ("scorer_broken_by_model", "sandbox_ended"), RUNS_THE_ANSWER),
    Hostile("lets the scorer eat memory", (
        "echo 'head -c 400000000 /dev/zero | tail -n 1; exit $?' > /home/agent/answer",), ("scorer_broken_by_model",),
        RUNS_THE_ANSWER),
]  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def endings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[Endings]:  # fmt: skip
    """Runs the rows that were asked for, several at a time: most of them wait, and none may disturb another."""
    backend = backend_of(request.param)
    needs(backend, "memory", "number of processes", "disk")
    secret = tmp_path_factory.mktemp("host") / "secret"
    secret.write_text("of this machine\n")
    rows: list[Hostile | Ours] = []
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if getattr(item, "module", None) is request.module and params.get("endings") == backend.kind:
            rows.append(params["row"])
    with (pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as server,
          Pool(backend, Size(12, 3, least=2, most=3), SPEC) as pool):  # fmt: skip
        patch.setattr(shell, "SETTLE_S", 2.0)
        patch.setattr(docker, "PING_S", 1.0)
        world = World(backend, pool, secret, server.getsockname()[1])
        with ThreadPoolExecutor(4) as threads:
            ran = {row.name: threads.submit(row.run, world) for row in rows if backend.kind in row.kinds}
            yield lambda row: ran[row.name].result()
        served(pool)
        assert pool.figures().in_use == 0
    assert within(10, lambda: not labelled(backend.kind))


def served(pool: Pool) -> None:
    """The next attempt is what it would have been."""
    with Attempt(pool, budget_s=60.0, step_s=30.0) as attempt:
        attempt.step(RIGHT)
        ending = attempt.score(SCORER)
    assert ending == REASONS["stop"].ending(success=True), attempt.error


@pytest.mark.slow
@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row.name)
def test_failure_of_the_model_s_making_counts_as_its_failure(endings: Endings, row: Hostile) -> None:
    ending = endings(row)
    assert ending.outcome is Outcome.MODEL_FAILURE
    assert ending.reason in row.reasons


# ------------------------------------------------------------------------------------------------- ours


@dataclass
class Ours:
    """`breaks` runs an attempt in which something of ours breaks."""

    name: str
    breaks: Callable[[World], Ending]
    reason: str
    kinds: tuple[str, ...] = tuple(KINDS)

    def run(self, world: World) -> Ending:
        return self.breaks(world)


def killed_in_a_step(world: World) -> Ending:
    with Attempt(world.pool, budget_s=60.0, step_s=30.0) as attempt:
        assert attempt._sandbox is not None
        return _broken_in(attempt, lambda sandbox: kill_from_outside(sandbox))


def released_in_a_step(world: World) -> Ending:
    with Attempt(world.pool, budget_s=60.0, step_s=30.0) as attempt:
        return _broken_in(attempt, lambda sandbox: sandbox.kill())


def killed_between_steps(world: World) -> Ending:
    with Attempt(world.pool, budget_s=60.0, step_s=30.0) as attempt:
        assert attempt._sandbox is not None
        kill_from_outside(attempt._sandbox)
        within(10, lambda: attempt._sandbox is None or not attempt._sandbox.alive or bool(attempt.step("sleep 0.05")))
        return _ended(attempt)


def _ended(attempt: Attempt) -> Ending:
    ending = attempt.ending or attempt.step("sleep 30")
    assert isinstance(ending, Ending)
    return ending


def _broken_in(attempt: Attempt, how: Callable[[Sandbox], None], command: str = "sleep 30") -> Ending:
    sandbox = attempt._sandbox
    assert sandbox is not None
    thread = threading.Timer(0.3, how, [sandbox])
    thread.start()
    ending = attempt.step(command)
    thread.join()
    assert isinstance(ending, Ending)
    return ending


def base_that_cannot_start(world: World) -> Ending:
    return _ended(Attempt(world.pool, replace(SPEC, base="headrace-no-such-image"), budget_s=1.0, step_s=1.0))


def no_room(world: World) -> Ending:
    with Pool(world.backend, Size(1, 1), SPEC) as pool, pool.sandbox():
        return _ended(Attempt(pool, budget_s=1.0, step_s=1.0, take_s=0.3))


def closed_pool(world: World) -> Ending:
    pool = Pool(world.backend, Size(1, 1), SPEC)
    pool.close()
    return _ended(Attempt(pool, budget_s=1.0, step_s=1.0))


def scored_by(scorer: Scorer) -> Callable[[World], Ending]:
    def breaks(world: World) -> Ending:
        with Attempt(world.pool, budget_s=60.0, step_s=30.0) as attempt:
            attempt.step(RIGHT)
            return attempt.score(scorer)

    return breaks


def forks_cannot_be_started(world: World) -> Ending:
    class Forkless:
        """The backend, which from the first snapshot on starts nothing."""

        def __getattr__(self, name: str) -> object:
            return getattr(world.backend, name)

        def start(self, spec: SandboxSpec, timeout_s: float) -> Sandbox:
            if attempts:
                raise SandboxFailed("the machine is broken")
            return world.backend.start(spec, timeout_s)

    attempts: list[Attempt] = []
    with Pool(Forkless(), Size(2, 1), SPEC) as pool, Attempt(pool, budget_s=60.0, step_s=30.0) as attempt:  # type: ignore[arg-type]
        attempts.append(attempt)
        return attempt.score(SCORER)


def daemon(how: str) -> Callable[[World], Ending]:
    """A daemon behind a proxy that falls silent, or closes, while a step runs."""

    def breaks(world: World) -> Ending:
        assert isinstance(world.backend, DockerBackend)
        proxy = Proxy(world.backend.address.removeprefix("unix://"))
        backend = DockerBackend(proxy.url.replace("http:", "tcp:"), world.backend.image)
        try:
            with Pool(backend, Size(1, 1), SPEC) as pool:
                with Attempt(pool, budget_s=60.0, step_s=1.0) as attempt:
                    # The container ends by itself, after its step, when nobody is connected to it any more.
                    ending = _broken_in(attempt, lambda _: proxy.stall() if how == "hangs" else proxy.close(),
                                        "sleep 3")  # fmt: skip
                if how == "hangs":
                    proxy.flow()
            return ending
        finally:
            if how == "hangs":
                proxy.close()

    return breaks


def no_daemon(world: World) -> Ending:
    with pytest.raises(SandboxFailed) as error:
        DockerBackend("tcp://127.0.0.1:9")
    assert "127.0.0.1:9" in str(error.value)
    return of_error(error.value)


OURS = [
    Ours("sandbox killed from outside in a step", killed_in_a_step, "sandbox_lost"),
    Ours("sandbox killed by its owner in a step", released_in_a_step, "sandbox_lost"),
    Ours("sandbox killed from outside between steps", killed_between_steps, "sandbox_lost"),
    Ours("base that can't start", base_that_cannot_start, "sandbox_failed"),
    Ours("no room in time", no_room, "sandbox_failed"),
    Ours("pool that is closed", closed_pool, "sandbox_failed"),
    Ours("scorer that raises", scored_by(Scorer("exit 3", 20.0)), "scorer_failed"),
    Ours("scorer that isn't there", scored_by(Scorer("/tests/no-such-scorer", 20.0)), "scorer_failed"),
    Ours("scorer that is killed", scored_by(Scorer("kill -9 $BASHPID", 20.0)), "scorer_failed"),
    Ours("scorer that sleeps for ever", scored_by(Scorer("sleep 999", 0.5)), "scorer_timeout"),
    Ours("machine that starts no fork", forks_cannot_be_started, "sandbox_failed"),
    Ours("daemon that hangs in a step", daemon("hangs"), "daemon_lost", ("docker",)),
    Ours("daemon that dies in a step", daemon("dies"), "daemon_lost", ("docker",)),
    Ours("daemon that isn't there", no_daemon, "daemon_lost", ("docker",)),
]


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.name)
def test_failure_of_our_making_never_counts(endings: Endings, row: Ours, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["endings"] not in row.kinds:
        return  # it has no daemon
    ending = endings(row)
    assert ending.outcome is Outcome.INFRA_FAILURE
    assert ending.reason == row.reason
