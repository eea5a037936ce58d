"""All roles of a run: which are started, when one is started again, and when the run is over. They are processes of
this machine, but for those that a placer puts elsewhere.

A process that dies is started again with back-off; one that dies again and again, or ends with an error that a restart
would repeat, ends the run with its own last words. A worker that has brought an attempt to its end since its start
isn't one of those: a task that kills its workers is bounded by its attempts, and the run outlives it. That the run
stands still is the coordinator's to say; that the coordinator does, is said here. Ctrl-C drains, a second one stops at
once; children end when this process is killed. Nothing is kept here: killing the supervisor loses nothing, and the same
command goes on.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.consumers.run import BOOTSTRAP_VARIABLE
from headrace.schemas.codec import decode
from headrace.schemas.errors import HeadraceError, LogError, NoProgress, RunConflict
from headrace.schemas.events import Publication
from headrace.schemas.topics import BATCHES, DEADLETTER, FLEET, GROUPS, POLICY, TASKS, RunTopics
from headrace.streams.log.reader import Position, Reader, beginning_offsets, end_offsets, read_backwards

from .progress import Progress
from .roles import FINAL
from .settings import SiteSettings, state_dir

SETTLED_S = 60.0  # a process that lived so long is not one that dies again and again
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
DRAIN_S = {"worker": 60.0, "sandboxes": 30.0, "trainer": 120.0, "coordinator": 30.0, "assembler": 30.0}
QUIET_LINE_S = 15.0  # a line at least so often, also when no version comes
LAST_WORDS = 20
PULSE_LATE_S = 30.0  # beyond the bound on progress: it covers a start of the coordinator
PROBE_S = 1.0  # how often the broker is asked whether it answers, while the coordinator is silent
TURN_OVER_BYTES = 16 << 20
LOST = 255  # as an exit code: of what was placed elsewhere, and is no more

Say = Callable[[str], None]


class Process(Protocol):
    """What is asked of a child, wherever it runs: as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | Any: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Placer(Protocol):
    """Where some roles are placed instead of on this machine."""

    @property
    def roles(self) -> Mapping[str, int]:
        """How many of each."""

    def start(self, role: str, name: str, log: Path) -> Process:
        """One more of that role. What there is to say of it goes into `log`."""


class RoleFailed(HeadraceError):
    """A role ended for good; the message holds its last words."""


@dataclass(slots=True)
class _Child:
    name: str
    role: str
    log: Path
    share: str | None = None  # of the partitions, where there are several assemblers
    process: Process | None = None
    started: float = 0.0
    deaths: int = 0
    restart_at: float = 0.0
    done: bool = False
    ran: set[str] | None = None  # what it ran at each of its deaths in a row

    @property
    def state(self) -> str:
        if self.done:
            return "done"
        if self.process is None:
            return f"restarts ({self.deaths})"
        return "up" if self.process.poll() is None else "dead"

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-LAST_WORDS:]
            return "\n".join(f"  {self.name}| {line}" for line in lines)
        return ""


def _worker_name(child: _Child) -> str:
    return f"{socket.gethostname()}-{child.name}"


@dataclass(slots=True)
class _Pulse:
    """How long the coordinator has been silent, counted only while the broker answers."""

    seen: int = -1
    silent_s: float = 0.0
    at: float = field(default_factory=time.monotonic)

    def silent(self, now: float, signs: int, excused: bool, answers: Callable[[], bool]) -> float:
        if excused or signs != self.seen:
            self.seen, self.silent_s, self.at = signs, 0.0, now
        elif now - self.at >= PROBE_S:
            # This process may have been away itself, or waited for the answer: no step counts more than two probes.
            self.silent_s += min(now - self.at, 2 * PROBE_S) if answers() else 0.0
            self.at = now
        return self.silent_s


@dataclass(slots=True)
class Supervisor:
    """The roles of one run on this machine: started, watched, started again, and drained."""

    kafka: Mapping[str, Any]
    topics: RunTopics
    site: SiteSettings
    config_file: Path
    say: Say
    stop_at: int | None = None  # over the file's
    no_progress_s: float = 600.0
    placer: Placer | None = None
    children: list[_Child] = field(default_factory=list)
    interrupts: int = 0

    def run(self) -> None:
        """Until the version to stop at, the end of the tasks, Ctrl-C, or an error. Raises RoleFailed, RunConflict."""
        stop_at = self.site.stop_at if self.stop_at is None else self.stop_at
        if stop_at is not None and (published := self._published()) >= stop_at:
            self.say(f"version {published} is published already; a greater version to stop at goes on")
            return
        with self._lock():
            before = [signal.signal(signum, self._interrupted) for signum in (signal.SIGINT, signal.SIGTERM)]
            try:
                self._run()
            finally:
                self._kill()
                for signum, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                    signal.signal(signum, handler)

    def _run(self) -> None:
        assemblers = self.site.assemblers
        placed = {"worker": self.site.workers} if self.placer is None else self.placer.roles
        roles = [*["assembler"] * assemblers, "coordinator", *(role for role, n in placed.items() for _ in range(n)),
                 "trainer"]  # fmt: skip
        count: collections.Counter[str] = collections.Counter()
        logs = state_dir(self.site, self.topics.run) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for role in roles:
            name = role if roles.count(role) == 1 else f"{role}-{count[role]}"
            share = f"{count[role]}/{assemblers}" if role == "assembler" and assemblers > 1 else None
            count[role] += 1
            self.children.append(_Child(name, role, logs / f"{name}.log", share))
        for child in self.children:
            self._start(child)
        progress, pulse = Progress(), _Pulse()
        with Reader(self.kafka, self._positions()) as reader:
            spoke = time.monotonic()
            resumed, given_up, new_version = False, set[str](), False
            while not self.interrupts:
                trained = self._role_done("trainer")  # asked first, so that its last version is among what is read then
                for record in reader.poll(1000, 0.2):
                    new_version |= progress.observe(record)
                self._look_after(progress)
                self._feel(pulse, progress, reader)
                caught_up = reader.at_end
                if caught_up and not resumed:
                    progress.take_reward()  # of an earlier sitting: it has had its lines
                    given_up = set(progress.given_up)
                    resumed = True
                if resumed:
                    for group in progress.given_up.keys() - given_up:
                        self.say(f"group {group} is given up: every worker that ran it was lost; see its task with "
                                 f"`headrace show {self.topics.run} groups/{group}`")  # fmt: skip
                    given_up |= progress.given_up.keys()
                if caught_up and (new_version or time.monotonic() - spoke > QUIET_LINE_S):
                    self.say(progress.line({child.name: child.state for child in self.children}))
                    spoke, new_version = time.monotonic(), False
                if trained and caught_up:
                    break
                if self._role_done("coordinator") and caught_up and progress.published >= progress.manifest:
                    self.say("the tasks have ended and every batch is trained")
                    break
        self.say("stopping: roles finish what they have begun; Ctrl-C again stops at once"
                 if self.interrupts else "draining")  # fmt: skip
        self._drain()

    def _published(self) -> int:
        for record in read_backwards(self.kafka, self.topics.name(POLICY), 0):
            if isinstance(event := decode(record.value), Publication):
                return event.version
        return -1

    def _positions(self) -> dict[Position, int]:
        positions: dict[Position, int] = {}
        for topic in (POLICY, BATCHES, TASKS, GROUPS):
            name = self.topics.name(topic)
            positions |= {(name, p): offset for p, offset in beginning_offsets(self.kafka, name).items()}
        for topic in (FLEET, DEADLETTER):
            name = self.topics.name(topic)
            positions |= {(name, p): offset for p, offset in end_offsets(self.kafka, name).items()}
        return positions

    # ------------------------------------------------------------------------------------------------ children

    def _start(self, child: _Child) -> None:
        if child.log.exists() and child.log.stat().st_size > TURN_OVER_BYTES:
            child.log.replace(child.log.with_suffix(".log.1"))
        child.started = time.monotonic()
        if self.placer is not None and child.role in self.placer.roles:
            child.process = self.placer.start(child.role, _worker_name(child), child.log)
            return
        with open(child.log, "ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "start", child.role, self.topics.run, "--config",
                 str(self.config_file), "--parent", str(os.getpid()), "--name", _worker_name(child),
                 *(["--stop-at", str(self.stop_at)] if self.stop_at is not None else []),
                 *(["--share", child.share] if child.share is not None else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, BOOTSTRAP_VARIABLE: str(self.kafka["bootstrap.servers"])},
            )  # fmt: skip

    def _feel(self, pulse: _Pulse, progress: Progress, reader: Reader) -> None:
        """Raises NoProgress where the coordinator gives no sign of life although the broker answers: then nobody else
        would say that the run stands still."""
        child = next(child for child in self.children if child.role == "coordinator")
        excused = child.process is None or child.done  # the restarts of a dead one are bounded by their number
        limit = self.no_progress_s + PULSE_LATE_S
        if pulse.silent(time.monotonic(), progress.coordinated, excused, lambda: self._answers(reader)) < limit:
            return
        raise NoProgress(f"the coordinator of run {self.topics.run} stands still for {limit:.0f} s: its process "
                         f"{child.process.pid if child.process else '?'} runs and gives no sign of life, although the "
                         f"broker answers; look at `headrace status {self.topics.run}` and at {child.log}")  # fmt: skip

    def _answers(self, reader: Reader) -> bool:
        try:
            reader.bounds(self.topics.name(FLEET), 0, timeout_s=PROBE_S)
        except LogError:
            return False
        return True

    def _look_after(self, progress: Progress) -> None:
        now = time.monotonic()
        for child in self.children:
            if child.done:
                continue
            if child.process is None:
                if now >= child.restart_at:
                    self._start(child)
                continue
            code = child.process.poll()
            if code is None:
                continue
            child.process = None
            if code == 0:
                child.done = True
            elif code == FINAL:
                raise RoleFailed(f"{child.name} ended the run:\n{child.last_words()}\nLogs: {child.log.parent}/*.log")
            else:
                self._died(child, code, now, progress)

    def _died(self, child: _Child, code: int, now: float, progress: Progress) -> None:
        worker = _worker_name(child)
        running = progress.running(worker) if child.role == "worker" else set()
        anew = now - child.started > SETTLED_S or (child.role == "worker" and progress.has_finished(worker))
        child.deaths = 1 if anew else child.deaths + 1
        child.ran = running if anew or child.ran is None else child.ran & running
        how = "with its node or actor" if code == LOST else f"by signal {-code}" if code < 0 else f"with code {code}"
        if child.deaths >= self.site.max_deaths:
            ran = f"Each time it ran {', '.join(sorted(child.ran)[:5])}.\n" if child.ran else ""
            raise RoleFailed(f"{child.name} died {child.deaths} times in a row, at last {how}:\n{child.last_words()}\n"
                             f"{ran}Its whole log: {child.log}")  # fmt: skip
        wait = BACKOFF_S[min(child.deaths, len(BACKOFF_S)) - 1]
        child.restart_at = now + wait
        ran = f" while it ran {', '.join(sorted(running)[:3])}{', ...' * (len(running) > 3)}" if running else ""
        self.say(f"{child.name} died {how}{ran}; starts again in {wait:g} s")

    def _role_done(self, role: str) -> bool:
        return all(child.done for child in self.children if child.role == role)

    def _drain(self) -> None:
        """In the order of the flow: who makes events first, who reads them last."""
        for role, within_s in DRAIN_S.items():
            group = [child for child in self.children if child.role == role and child.process is not None]
            for child in group:
                assert child.process is not None
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + within_s
            for child in group:
                assert child.process is not None
                while child.process.poll() is None and time.monotonic() < end and self.interrupts < 2:
                    time.sleep(0.05)
                if child.process.poll() is None:
                    self.say(f"{child.name} is stopped where it stands; nothing is lost, a resume goes on from the log")
                    child.process.kill()
                elif child.process.returncode not in (0, -signal.SIGTERM):
                    self.say(f"{child.name} ended with code {child.process.returncode}:\n{child.last_words()}")

    def _kill(self) -> None:
        for child in self.children:
            if child.process is not None:
                if child.process.poll() is None:
                    child.process.kill()
                child.process.wait()

    def _interrupted(self, *_: object) -> None:
        self.interrupts += 1

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One supervisor per run and machine: two would fence each other's roles for ever."""
        folder = state_dir(self.site, self.topics.run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "supervisor.lock", "a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                handle.seek(0)
                raise RunConflict(f"run {self.topics.run!r} is already supervised here, by process "
                                  f"{handle.read().strip() or '?'}") from error  # fmt: skip
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield
