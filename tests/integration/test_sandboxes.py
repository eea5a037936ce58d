"""One contract for every kind of sandbox, and the pool. Where a kind can't run here, its tests say why."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.producers.sandboxes import Backend, Owner, Sandbox, SandboxSpec
from headrace.producers.sandboxes.pool import Pool
from headrace.producers.sandboxes.process import ProcessBackend
from headrace.producers.sandboxes.sizing import Size
from headrace.producers.sandboxes.stepping import ShellSandbox
from headrace.schemas.errors import SandboxFailed, SandboxLost
from headrace.schemas.outcomes import Limit
from tests.sandboxes import KINDS, START_S, STEP_S, backend_of, kill_from_outside, labelled, needs, running, within


@pytest.fixture(params=list(KINDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_of(request.param)


@pytest.fixture
def sandbox(backend: Backend) -> Iterator[Sandbox]:
    one = backend.start(SandboxSpec(output_bytes=2000, disk_bytes=8 << 20), START_S)
    yield one
    one.kill()


def said(sandbox: Sandbox, command: str, timeout_s: float = STEP_S) -> str:
    return sandbox.step(command, timeout_s).output.decode()


# ------------------------------------------------------------------------------------------------- steps


def test_shell_keeps_directory_and_variables_between_steps(sandbox: Sandbox) -> None:
    sandbox.step("mkdir sub; cd sub; answer=42; greet() { echo hello; }", STEP_S)
    assert said(sandbox, 'basename "$PWD"; echo $answer; greet') == "sub\n42\nhello\n"


def test_step_gives_both_outputs_in_order_and_the_exit_status(sandbox: Sandbox) -> None:
    result = sandbox.step("echo one; echo two >&2; echo three; (exit 7)", STEP_S)
    assert (result.output, result.code, result.dropped, result.new_shell) == (b"one\ntwo\nthree\n", 7, 0, False)
    assert sandbox.step("sh -c 'kill -TERM $$'", STEP_S).code == 128 + signal.SIGTERM
    assert said(sandbox, "printf 'a\\nb'; printf ' c\n'") == "a\nb c\n"
    assert sandbox.step("cat", STEP_S).code == 0  # a step has no input


def test_command_that_is_no_shell_is_data_and_no_error(sandbox: Sandbox) -> None:
    assert sandbox.step('echo "never closed', STEP_S).code == 2
    assert sandbox.step("a\0b", STEP_S).code == 2
    assert said(sandbox, "echo fine") == "fine\n"


@pytest.mark.parametrize("command", ["exit 5", "kill -9 $$", "exec false", "set -e; false"])
def test_step_that_ends_its_shell_gets_a_new_one_and_keeps_its_files(sandbox: Sandbox, command: str) -> None:
    sandbox.step("echo kept > file; cd /tmp", STEP_S)
    result = sandbox.step(command, STEP_S)
    assert result.new_shell and result.code != 0 and result.output == b""
    assert said(sandbox, "cat file") == "kept\n"


def test_time_out_kills_the_whole_tree_of_the_step_and_nothing_else(sandbox: Sandbox) -> None:
    sandbox.step("sleep 1001 & echo started", STEP_S)
    time.sleep(0.1)  # a process belongs to a step by its time of birth, which has ticks of 10 ms
    began = time.monotonic()
    tree = "setsid sleep 1002 > /dev/null 2>&1 < /dev/null & (sleep 1003; echo late) & while :; do sleep 0.01; done"
    result = sandbox.step(tree, 0.3)
    assert result.timed_out and result.new_shell and result.code is None
    assert time.monotonic() - began < 15
    processes = said(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep 1001" in processes
    assert "sleep 1002" not in processes and "sleep 1003" not in processes


@pytest.mark.parametrize("command", ["while :; do :; done", "kill -STOP $$", "trap '' TERM INT; sleep 1000"])
def test_shell_that_never_answers_is_replaced(sandbox: Sandbox, command: str) -> None:
    assert sandbox.step(command, 0.2).timed_out
    assert said(sandbox, "echo back") == "back\n"


def test_flood_of_output_is_bounded_and_keeps_beginning_and_end(sandbox: Sandbox) -> None:
    result = sandbox.step("echo begin; yes | head -c 3000000; echo end", STEP_S)
    assert len(result.output) == 2000
    assert result.output.startswith(b"begin\n") and result.output.endswith(b"y\nend\n")
    assert len(result.output) + result.dropped == 6 + 3_000_000 + 4
    endless = sandbox.step("yes", 0.3)
    assert endless.timed_out and len(endless.output) <= 2000 < endless.dropped


def test_output_of_an_earlier_step_is_not_taken_for_that_of_the_next(sandbox: Sandbox) -> None:
    sandbox.step("(sleep 0.2; echo late) & true", STEP_S)
    time.sleep(0.5)
    assert said(sandbox, "echo mine") == "mine\n"


# ------------------------------------------------------------------------------------------------- isolation


def test_sandbox_has_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sandbox.step(f"exec 9<> /dev/tcp/127.0.0.1/{port}", STEP_S).code != 0
        interfaces = said(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").split()
    assert set(interfaces) <= {"lo", "tunl0", "sit0"} and sandbox.step("echo x > /dev/udp/192.0.2.1/9", STEP_S).code


def test_sandbox_sees_nothing_of_this_machine(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert sandbox.step(f"cat {tmp_path}/secret", STEP_S).code != 0
    assert "PYTEST" not in said(sandbox, "env")
    assert "pytest" not in said(sandbox, "cat /proc/[0-9]*/cmdline")
    assert set(said(sandbox, "grep Cap /proc/self/status | grep -v Bnd | cut -f2").split()) == {"0" * 16}


def test_sandboxes_share_nothing_and_their_base_stays_as_it_was(backend: Backend) -> None:
    one, two = backend.start(SandboxSpec(), START_S), backend.start(SandboxSpec(), START_S)
    try:
        one.step("for at in /home/agent /tmp /etc; do echo one > $at/file; done; echo one > /usr/bin/mine", STEP_S)
        assert said(two, "ls /home/agent /tmp; cat /etc/file").split()[:2] == ["/home/agent:", "/tmp:"]
        assert "one" not in said(two, "cat /etc/file /tmp/file /home/agent/file /usr/bin/mine")
        assert not Path("/etc/file").exists() and not Path("/usr/bin/mine").exists()
    finally:
        one.kill()
        two.kill()


# ------------------------------------------------------------------------------------------------- limits


def test_disk_is_bounded_and_a_full_one_is_the_step_s_failure(sandbox: Sandbox) -> None:
    full = sandbox.step("head -c 50000000 /dev/zero > /home/agent/big", STEP_S)
    assert full.code != 0 and full.limits == {Limit.DISK}
    assert sandbox.step("rm /home/agent/big && echo x > /home/agent/small", STEP_S).code == 0


def test_many_files_together_are_bounded_too(backend: Backend) -> None:
    needs(backend, "disk")
    one = backend.start(SandboxSpec(disk_bytes=8 << 20), START_S)
    try:
        limits = one.step("for i in {1..40}; do head -c 1000000 /dev/zero > $i || exit 1; done; sleep 2", STEP_S).limits
    except SandboxLost as lost:  # where the file system has no bound of its own
        limits = frozenset(Limit(one) for one in lost.limits)
    finally:
        one.kill()
    assert limits == {Limit.DISK}


def test_memory_is_bounded_and_the_shell_outlives_who_ate_it(backend: Backend) -> None:
    needs(backend, "memory")
    one = backend.start(SandboxSpec(memory_bytes=64 << 20), START_S)
    try:
        result = one.step("head -c 200000000 /dev/zero | tail -n 1", STEP_S)
        assert result.code == 128 + signal.SIGKILL and result.limits == {Limit.MEMORY}
        assert one.step("echo still here", STEP_S).limits == frozenset()
    finally:
        one.kill()


def test_processes_are_bounded_and_a_fork_bomb_is_ended_with_its_step(backend: Backend) -> None:
    needs(backend, "number of processes")
    one = backend.start(SandboxSpec(processes=40), START_S)
    try:
        result = one.step(":() { : | : & }; :; sleep 60", 1.0)
        assert result.limits == {Limit.PROCESSES, Limit.TIME}
        assert said(one, "ls -d /proc/[0-9]* | wc -l") < "9"
    except SandboxLost as lost:
        assert {Limit.PROCESSES, Limit.TIME} <= lost.limits
    finally:
        one.kill()


def test_cpu_time_is_bounded(backend: Backend) -> None:
    needs(backend, "CPU")
    one = backend.start(SandboxSpec(cpus=0.2), START_S)
    try:
        spent = one.step("timeout 1 bash -c 'while :; do :; done'; times", STEP_S).output.decode()
        user = spent.split()[-2]  # of the children: "0m0.200s"
        assert float(user.partition("m")[2].rstrip("s")) < 0.6
    finally:
        one.kill()


# ------------------------------------------------------------------------------------------------- snapshots


def test_fork_of_a_snapshot_begins_with_its_files_and_neither_sees_the_other(backend: Backend) -> None:
    made = list[Sandbox]()
    try:
        made.append(parent := backend.start(SandboxSpec(), START_S))
        parent.step("mkdir sub; echo one > sub/file; echo gone > gone; ln -s sub/file link; chmod 700 sub", STEP_S)
        first = parent.snapshot(STEP_S)
        parent.step("echo two > sub/file", STEP_S)
        made.append(child := backend.start(SandboxSpec(first), START_S))
        assert said(child, "cat link; stat -c %a sub") == "one\n700\n"
        child.step("rm gone; rm -r sub; mkdir sub; echo three > sub/other", STEP_S)
        second = child.snapshot(STEP_S)
        backend.remove(first)
        made.append(grandchild := backend.start(SandboxSpec(second), START_S))
        assert said(grandchild, "cat sub/*; ls") == "three\nlink\nsub\n"
        assert said(parent, "cat sub/file gone") == "two\ngone\n"
        backend.remove(second)
        with pytest.raises(SandboxFailed):
            backend.start(SandboxSpec(second), START_S)
    finally:
        for one in made:
            one.kill()


# ------------------------------------------------------------------------------------------------- ends


def test_kill_leaves_no_process_and_steps_say_so(backend: Backend) -> None:
    one = backend.start(SandboxSpec(), START_S)
    one.step("setsid sleep 1004 > /dev/null 2>&1 < /dev/null &", STEP_S)
    one.kill()
    one.kill()
    assert not one.alive
    assert within(10, lambda: not [label for label in labelled(backend.kind) if label.endswith(one.id)])
    assert within(10, lambda: not running("sleep 1004"))
    with pytest.raises(SandboxLost):
        one.step("true", STEP_S)


def test_kill_during_a_step_ends_the_step_at_once(backend: Backend) -> None:
    one, raised = backend.start(SandboxSpec(), START_S), list[BaseException]()

    def step() -> None:
        try:
            one.step("sleep 1000", 600)
        except SandboxLost as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.2)
    one.kill()
    thread.join(20)
    assert not thread.is_alive() and "it was killed" in str(raised[0])


def test_model_that_kills_everything_loses_its_sandbox_by_its_own_doing(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxLost) as lost:
        for _ in range(5):
            sandbox.step("kill -9 -1", STEP_S)
            time.sleep(0.1)
    assert not sandbox.alive and lost.value.from_within


def test_snapshot_of_a_sandbox_that_the_model_is_ending_is_lost_by_its_own_doing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(sandbox, ShellSandbox)
    take = sandbox._snapshot

    def late(timeout_s: float) -> str:
        assert within(30, sandbox._over)
        return take(timeout_s)

    monkeypatch.setattr(sandbox, "_snapshot", late)
    sandbox.step("R=$PPID; (sleep 1; kill -9 $R) > /dev/null 2>&1 &", STEP_S)
    with pytest.raises(SandboxLost) as error:
        sandbox.snapshot(STEP_S)
    assert error.value.from_within


def test_snapshot_that_cannot_be_made_of_a_living_sandbox_is_ours(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(timeout_s: float) -> str:
        raise SandboxFailed("no room")

    monkeypatch.setattr(sandbox, "_snapshot", refused)
    with pytest.raises(SandboxFailed, match="no room"):
        sandbox.snapshot(STEP_S)
    assert said(sandbox, "echo still here") == "still here\n"


def test_sandbox_that_is_killed_from_outside_is_not_the_model_s_doing(backend: Backend) -> None:
    one = backend.start(SandboxSpec(), START_S)
    try:
        thread = threading.Timer(0.3, kill_from_outside, [one])
        thread.start()
        with pytest.raises(SandboxLost) as lost:
            one.step("sleep 1000", STEP_S)
        thread.join()
        assert not lost.value.from_within and not lost.value.limits
    finally:
        one.kill()


def test_base_that_cannot_start_is_a_typed_error(backend: Backend, tmp_path: Path) -> None:
    base = str(tmp_path) if backend.kind == "process" else "headrace-no-such-image"
    with pytest.raises(SandboxFailed, match=base):
        backend.start(SandboxSpec(base), START_S)


def test_machine_without_the_tools_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxFailed, match="bubblewrap"):
        ProcessBackend()


# ------------------------------------------------------------------------------------------------- owners that die

OWNER = """
import sys, time
from headrace.producers.sandboxes.pool import Pool
from headrace.producers.sandboxes.sizing import Size
from headrace.producers.sandboxes.stepping import ShellSandbox
from tests.sandboxes import KINDS
backend = KINDS[sys.argv[1]]()
pool = Pool(backend, Size(4, 4, least=2, most=2))
one = pool.take()
one.step("setsid sleep 1005 > /dev/null 2>&1 < /dev/null &", 60)
one.snapshot(60)
while pool.figures().ready < 2: time.sleep(0.01)
print("ready", flush=True)
one.step("sleep 1006", 600)
"""


def test_owner_that_is_killed_leaves_nothing_after_the_next_start(backend: Backend) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, backend.kind], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[2])  # fmt: skip
    assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
    assert within(STEP_S, lambda: running("sleep 1006"))
    assert len(labelled(backend.kind, owner.pid)) == 4  # and the snapshot
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with Pool(backend, Size(2, 2)) as pool:
        assert pool.figures().swept >= 2
    assert within(10, lambda: not running("sleep 1005") and not running("sleep 1006"))
    assert within(10, lambda: not labelled(backend.kind, owner.pid))


def test_next_start_spares_what_a_living_owner_has(backend: Backend) -> None:
    living = backend.start(SandboxSpec(), START_S)
    try:
        KINDS[backend.kind]().sweep()
        assert said(living, "echo spared") == "spared\n"
    finally:
        living.kill()


def test_sandbox_whose_owner_died_while_it_was_being_started_is_found_by_its_label() -> None:
    backend = backend_of("process")
    assert isinstance(backend, ProcessBackend)
    dead = subprocess.Popen(["true"])
    dead.wait()
    # As it would be if the owner had died before the sandbox asked to die with it.
    command = [word for word in backend._command(SandboxSpec(), Owner(dead.pid, 1).label("left"))
               if word != "--die-with-parent"]  # fmt: skip
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert orphan.stderr is not None and orphan.stderr.readline() == b"R\n"
    try:
        assert backend.sweep() >= 1
        assert orphan.wait(20) != 0
        assert within(10, lambda: not labelled("process", dead.pid))
    finally:
        orphan.kill()
        orphan.communicate()


# ------------------------------------------------------------------------------------------------- the pool


def test_spare_sandbox_is_taken_at_once_and_replaced_in_the_background(backend: Backend) -> None:
    with Pool(backend, Size(4, 2, least=1, most=1)) as pool:
        assert within(START_S, lambda: pool.figures().ready == 1)
        one = pool.take()
        assert said(one, "echo mine") == "mine\n"
        assert within(START_S, lambda: pool.figures().ready == 1)
        pool.release(one)
        assert within(START_S, lambda: not one.alive)
        figures = pool.figures()
        assert (figures.warm, figures.cold, figures.in_use, figures.started) == (1, 0, 0, 2)
    assert within(10, lambda: not labelled(backend.kind))


def test_order_ahead_is_ready_when_its_turn_comes_and_a_cancelled_one_serves_the_next(backend: Backend) -> None:
    other = SandboxSpec(output_bytes=100)
    with Pool(backend, Size(2, 2)) as pool:
        first, second = pool.order(other), pool.order(other)
        assert within(START_S, lambda: first.ready and second.ready)
        first.cancel()
        third = pool.order(other)
        assert third.ready
        with pytest.raises(SandboxFailed, match="cancelled"):
            first.take(1.0)
        assert third.take(1.0).spec == other
        assert pool.figures().started == 2


def test_pool_never_exceeds_its_size_and_whoever_waits_is_told_why(backend: Backend) -> None:
    with Pool(backend, Size(2, 2, least=0, most=1)) as pool:
        one, two = pool.take(), pool.take()
        with pytest.raises(SandboxFailed, match="2 of 2 are in use"):
            pool.take(timeout_s=0.2)
        assert pool.figures().started == 2
        pool.release(one)
        three = pool.take()
        assert said(three, "echo next") == "next\n"
        assert not one.alive and two.alive


def test_spare_sandboxes_of_another_kind_give_way_to_an_order(backend: Backend) -> None:
    with Pool(backend, Size(1, 1)) as pool:
        unwanted = pool.order(SandboxSpec(output_bytes=100))
        assert within(START_S, lambda: unwanted.ready)
        unwanted.cancel()
        assert pool.take().spec == SandboxSpec()


def test_spec_that_cannot_start_fails_its_order_alone_after_some_tries(backend: Backend, tmp_path: Path) -> None:
    base = str(tmp_path) if backend.kind == "process" else "headrace-no-such-image"
    with Pool(backend, Size(4, 2)) as pool:
        bad, good = pool.order(SandboxSpec(base)), pool.order()
        with pytest.raises(SandboxFailed, match=base):
            bad.take(START_S)
        assert said(good.take(START_S), "echo good") == "good\n"
        assert pool.figures().failed == 3


def test_sandbox_that_died_on_the_shelf_is_not_handed_out(backend: Backend) -> None:
    with Pool(backend, Size(3, 2)) as pool:
        order = pool.order()
        assert within(START_S, lambda: order.ready)
        assert order.sandbox is not None
        order.sandbox.kill()
        assert said(order.take(START_S), "echo fresh") == "fresh\n"


def test_takes_at_once_with_sandboxes_killed_at_random_are_all_served_and_nothing_stays(backend: Backend) -> None:
    draw = random.Random(0)
    with Pool(backend, Size(6, 4, least=1, most=2)) as pool:

        def episode(number: int) -> str:
            with pool.sandbox(timeout_s=START_S) as one:
                if draw.random() < 0.3:
                    threading.Thread(target=one.kill).start()
                try:
                    return said(one, f"sleep 0.01; echo {number}")
                except SandboxLost:
                    return "lost"

        with ThreadPoolExecutor(6) as threads:
            results = list(threads.map(episode, range(40 if backend.kind == "process" else 15)))
        assert all(result in ("lost", f"{number}\n") for number, result in enumerate(results))
        assert 0 < results.count("lost") < len(results)
        assert pool.figures().in_use == 0
    assert within(10, lambda: not labelled(backend.kind))
