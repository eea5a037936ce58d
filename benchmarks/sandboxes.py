"""What sandboxes cost an episode, and what they leave behind when their owner is killed.

Both kinds, alone and eight at once: a cold start up to the first answer of its shell; a take of a warm one with its
first step; a step in the persistent shell; a snapshot; a fork of it up to its first step; a kill until nothing is left.
Baselines (`baselines/bare_sandboxes.py`): a `docker run` per episode with a `docker exec` per step, and a fresh
bubblewrap per step. Then a process that takes sandboxes is killed (-9) at random moments, again and again; after the
next start nothing of its predecessors may be left: no process, container, image, control group, mount or folder.

The kind docker needs a daemon (DOCKER_HOST, or the usual socket); without one its figures are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.producers.sandboxes import Backend, Sandbox, SandboxSpec
from headrace.producers.sandboxes.cgroups import FOLDER
from headrace.producers.sandboxes.docker import LABEL, DockerBackend
from headrace.producers.sandboxes.pool import Pool
from headrace.producers.sandboxes.process import VARIABLE
from headrace.producers.sandboxes.sizing import Size
from headrace.schemas.errors import SandboxFailed

from . import harness
from ._sandbox_taker import backend_of
from .baselines.bare_sandboxes import BwrapStep, DockerRun
from .harness import CannotMeasure, Result

AT_ONCE = (1, 8)
WAIT_S = 120.0
STEP_S = 60.0
SPEC = SandboxSpec()


def measure(options: argparse.Namespace, result: Result) -> None:
    starts, steps, takes = (8, 50, 24) if options.quick else (48, 1000, 1000)
    for kind in ("process", "docker"):
        backend: Backend | None
        try:
            backend = backend_of(kind)
            backend.start(SPEC, WAIT_S).kill()
        except SandboxFailed as error:
            if kind == "process" and not _docker_answers():
                raise CannotMeasure(str(error)) from error
            result.note(f"Left out: {error}")
            backend = None
        medians: dict[str, float] = {}
        if backend is not None:
            for limit in backend.missing:
                result.note(f"Sandboxes of kind {kind} had no limit of {limit}.")
            for many in AT_ONCE:
                found = _costs(backend, many, starts, steps)
                found |= _baseline(backend, many, starts, steps)
                for (what, whose), seconds in found.items():
                    p50, p95 = (float(q) * 1e3 for q in np.percentile(seconds, (50, 95)))
                    medians.setdefault(f"{what}, {whose}", p50)  # of one alone
                    result.row(f"{what}, {many} at once", f"{whose}, p50", p50, "ms")
                    result.row(f"{what}, {many} at once", f"{whose}, p95", p95, "ms")
        result.at_least(f"{kind}: warm take faster than a cold start",
                        _ratio(medians, f"cold start, {kind}", f"warm take, {kind}"), 20)  # fmt: skip
        result.at_least(f"{kind}: step faster than a fresh {'exec' if kind == 'docker' else 'bubblewrap'}",
                        _ratio(medians, f"step, plain {kind}", f"step, {kind}"), 100)  # fmt: skip
        left = None if backend is None else _killed(kind, takes, result)
        result.at_most(f"{kind}: left behind after {takes} takes with random kills", left, 0)
    result.note("A step is `true`; a warm take ends with the answer to one. Starts begin when the one before is gone.")


def _ratio(medians: dict[str, float], slow: str, quick: str) -> float | None:
    return medians[slow] / medians[quick] if slow in medians and quick in medians else None


def _docker_answers() -> bool:
    try:
        return bool(DockerBackend().answers())
    except SandboxFailed:
        return False


# ------------------------------------------------------------------------------------------------- what it costs


def _costs(backend: Backend, many: int, starts: int, steps: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each operation, `many` of them at a time."""
    kind = backend.kind
    found: dict[tuple[str, str], list[float]] = {}

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        found.setdefault((what, kind), []).append(time.perf_counter() - began)

    def life(_: int) -> None:
        made = list[Sandbox]()
        timed("cold start", lambda: made.append(_first_step(backend.start(SPEC, WAIT_S))))
        made[0].step("head -c 100000 /dev/zero > file", STEP_S)
        names = list[str]()
        timed("snapshot", lambda: names.append(made[0].snapshot(WAIT_S)))
        timed("fork", lambda: made.append(_first_step(backend.start(replace(SPEC, base=names[0]), WAIT_S))))
        made[1].kill()
        backend.remove(names[0])
        timed("kill", made[0].kill)

    def stepping(_: int) -> None:
        one = backend.start(SPEC, WAIT_S)
        for _ in range(20):
            one.step("true", STEP_S)
        for _ in range(steps):
            timed("step", lambda: one.step("true", STEP_S))
        one.kill()

    with ThreadPoolExecutor(many) as threads:
        list(threads.map(life, range(starts)))
        list(threads.map(stepping, range(many)))
        with Pool(backend, Size(3 * many, many, least=many, most=many)) as pool:

            def episode(_: int) -> None:
                timed("warm take", lambda: taken.append(_first_step(pool.take())))

            for _ in range(max(2, starts // many)):
                taken: list[Sandbox] = []
                end = time.monotonic() + WAIT_S
                while pool.figures().ready < many:
                    if time.monotonic() > end:
                        raise CannotMeasure("the pool was never full")
                    time.sleep(0.01)
                list(threads.map(episode, range(many)))
                for one in taken:
                    pool.release(one)
    return found


def _first_step(sandbox: Sandbox) -> Sandbox:
    sandbox.step("true", STEP_S)
    return sandbox


def _baseline(backend: Backend, many: int, starts: int, steps: int) -> dict[tuple[str, str], list[float]]:
    whose = f"plain {backend.kind}"
    found: dict[tuple[str, str], list[float]] = {}

    def life(_: int) -> None:
        began = time.perf_counter()
        one = DockerRun(backend.api, backend.image) if isinstance(backend, DockerBackend) else BwrapStep()
        one.step("true")
        if isinstance(one, DockerRun):
            found.setdefault(("cold start", whose), []).append(time.perf_counter() - began)
        for _ in range(max(5, steps // starts)):
            began = time.perf_counter()
            one.step("true")
            found.setdefault(("step", whose), []).append(time.perf_counter() - began)
        began = time.perf_counter()
        one.kill()
        if isinstance(one, DockerRun):
            found.setdefault(("kill", whose), []).append(time.perf_counter() - began)

    with ThreadPoolExecutor(many) as threads:
        list(threads.map(life, range(starts // 2)))
    return found


# ------------------------------------------------------------------------------------------------- what is left


def _killed(kind: str, takes: int, result: Result) -> int:
    """How many things are left after so many takes by processes that were killed, and one more start."""
    draw, done, kills, pids = random.Random(0), 0, 0, set[int]()
    with tempfile.TemporaryDirectory() as folder:
        while done < takes:
            argv = [sys.executable, "-m", "benchmarks._sandbox_taker", kind, folder]
            with harness.Started(argv) as taker:
                pids.add(taker.pid)
                taker.expect("up", WAIT_S)
                time.sleep(draw.uniform(0.0, 6.0))
                taker.signal(signal.SIGKILL)
                done += taker.output().count("take\n")
            kills += 1
        backend = backend_of(kind, folder)
        Pool(backend, Size(1, 1)).close()  # the next start
        end = time.monotonic() + 30  # for what the kernel and the daemon are still at
        while (left := _left(kind, pids, Path(folder))) and time.monotonic() < end:
            time.sleep(0.2)
        result.row("takes by owners that were killed", kind, float(done))
        result.row("owners killed", kind, float(kills))
        if left:
            result.note(f"Left behind by {kind}: {', '.join(sorted(left)[:5])}.")
        return len(left)


def _left(kind: str, pids: set[int], folder: Path) -> set[str]:
    def ours(label: str) -> bool:
        return label.partition(".")[0].isdecimal() and int(label.partition(".")[0]) in pids

    if kind == "docker":
        api = DockerBackend().api
        every = api.containers(all=True, filters={"label": LABEL}) + api.images(filters={"label": LABEL})
        return {one["Labels"][LABEL] for one in every if ours(one["Labels"][LABEL])}
    found = {name for at, below, _ in os.walk("/sys/fs/cgroup") if at.endswith(FOLDER) for name in below if ours(name)}
    found |= {str(path) for path in folder.glob("headrace-snapshots/*")}
    found |= {line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if VARIABLE in words[:-1] and ours(words[words.index(VARIABLE) + 1]):
            found.add(" ".join(words))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run("sandboxes", __doc__, measure, argv, packages=("docker",))


if __name__ == "__main__":
    raise SystemExit(main())
