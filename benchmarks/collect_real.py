"""The real form of the collection benchmark: scaled time, a real broker, real sandboxes of kind process.

Assembler and coordinator run as `headrace start` runs them. The worker here takes their leases, and Headrace's own
scheduler, router and sandbox pool decide as in the virtual form; every episode is a thread with a sandbox in which its
tools and its verifier run (a `sleep` of their scaled time). No model runs: a call is a wait, as long as the engine
model says for the trace's time. Events carry the tokens' count, with drawn ids.

The baseline is the barrier of `baselines/`, in one process without a log: cold sandboxes, launch order, in turn.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.producers.sandboxes import Sandbox, SandboxSpec
from headrace.producers.sandboxes.pool import Order, Pool
from headrace.producers.sandboxes.process import ProcessBackend, ProcessSandbox
from headrace.producers.sandboxes.sizing import Size
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import HeadraceError, SandboxFailed
from headrace.schemas.events import Heartbeat, Lease, Manifest
from headrace.schemas.topics import BATCHES, FLEET, TASKS
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader, end_offsets

from . import harness
from .baselines.barrier_collector import BarrierCollector, LaunchOrder
from .collect_arms import ALL, BARRIER
from .collect_load import Load, source_of
from .collect_parameters import MAX_LAG, SANDBOXES_PER_SLOT, Cell
from .collect_streams import settings
from .collect_virtual import Collector, Engine, Episode, InTurn, Key, Routed, Scheduled, simulate
from .harness import CannotMeasure, Result
from .streams_load import DAY_S, SIBLINGS, Rollouts, Trainer, create, role

CELL = Cell(2.0, "half", 3.0)
SLOTS = 64
BATCHES_MADE = 3
SECONDS = 1 / 30  # of real time for one of the trace's
STARTING = 16  # set-ups at once in the pool
SHORTEST_S = 0.005  # a tool that takes less is a step that does nothing: a process more would take as long
TOKENS_LOGGED = 64  # of an episode: the streams' own load is measured elsewhere
TURN_S = 0.002  # between two looks at what came
BEAT_S = 0.5
LEASES = 10_000  # that the worker takes: max_lag alone is the limit


@dataclass(frozen=True, slots=True)
class Sizes:
    groups: int
    slots: int
    batches: int
    second: float


FULL = Sizes(32, SLOTS, BATCHES_MADE, SECONDS)
QUICK = Sizes(3, 8, 2, 1 / 600)


def measure_real(quick: bool, files: tuple[Path, Path] | None, result: Result) -> None:
    sizes = QUICK if quick else FULL
    load = Load(source_of(*files) if files else source_of(None, None), 0)
    try:
        backend = ProcessBackend()
        backend.start(SandboxSpec(), 30.0).kill()
    except SandboxFailed as error:
        raise CannotMeasure(f"the real form needs sandboxes of kind process: {error}") from error
    where = f"real, {sizes.groups} groups, {sizes.slots} slots, {CELL}"
    barrier = _Barrier(load, sizes, backend).run()
    with harness.temporary_broker() as broker:
        ours = _Headrace(load, sizes, backend, harness.kafka_of(broker)).run()
    for name, one in (("barrier", barrier), ("all", ours)):
        result.row(f"{where}: first batch", name, one.times[0] / sizes.second, "s of the trace")
        result.row(f"{where}: mean interval after it", name, _interval(one.times) / sizes.second, "s of the trace")
        result.row(f"{where}: how late waits ended, p95", name, one.late_p95 / sizes.second, "s of the trace")
    result.row(f"{where}: first batch sooner", "than barrier", 100 * (1 - ours.times[0] / barrier.times[0]), "%")
    result.row(f"{where}: interval sooner", "than barrier",
               100 * (1 - _interval(ours.times) / _interval(barrier.times)), "%")  # fmt: skip
    result.row(f"{where}: sandboxes that were ready when taken", "all", 100 * ours.warm, "%")
    if not quick:
        for arm, name in ((BARRIER, "barrier"), (ALL, "all")):
            virtual = simulate(load, CELL, arm, sizes.slots, sizes.batches)
            result.row("the same seed in virtual time: first batch", name, virtual.first, "s")
            result.row("the same seed in virtual time: mean interval after it", name, virtual.interval(), "s")
    result.note(f"Real broker, assembler, coordinator and sandboxes; a second of the trace takes {sizes.second:.4f} s "
                "here. Model calls are waits timed from the traces: no model runs. One run of one seed.")  # fmt: skip


def _interval(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


@dataclass(frozen=True, slots=True)
class Timed:
    """Real seconds from the beginning to each batch; the share of sandboxes that were ready when taken."""

    times: list[float]
    late_p95: float
    warm: float


@dataclass(frozen=True, slots=True)
class PreparedSpec(SandboxSpec):
    """A sandbox whose set-up takes some seconds of real time beyond its start."""

    prepare_s: float = 0.0


class Prepared:
    """The backend with that set-up, as a command in the sandbox."""

    kind = "process"

    def __init__(self, backend: ProcessBackend) -> None:
        self._backend, self.missing, self.remove = backend, backend.missing, backend.remove

    def start(self, spec: SandboxSpec, timeout_s: float) -> ProcessSandbox:
        sandbox = self._backend.start(spec, timeout_s)
        if isinstance(spec, PreparedSpec):
            sandbox.step(f"sleep {spec.prepare_s:.4f}", timeout_s)
        return sandbox

    def sweep(self) -> int:
        return self._backend.sweep()


class _Driver:
    """One collector at work: begins episodes, each a thread, until its batches are made."""

    def __init__(self, load: Load, sizes: Sizes, router: Routed | InTurn, slots: Scheduled | LaunchOrder) -> None:
        self._load, self._sizes, self._router, self._queue = load, sizes, router, slots
        self._engine = Engine(CELL)
        self._lock = threading.Lock()  # of router and engine
        self._said: queue.SimpleQueue[tuple[str, Episode, Exception | None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._late: list[float] = []
        self.began, self.times = time.monotonic(), list[float]()
        self.version = 0

    def _launch(self, group: int) -> list[Episode]:
        self._queue.launched((group, slot) for slot in range(SIBLINGS))
        return [Episode((group, slot), work, group * SIBLINGS + slot)
                for slot, work in enumerate(self._load.group(group))]  # fmt: skip

    def _begin(self, episode: Episode, sandbox: Callable[[], Sandbox], release: Callable[[Sandbox], None],
               early: bool) -> None:  # fmt: skip
        """`early`: the slot is free when the agent has ended, else after the verifier."""
        thread = threading.Thread(target=self._live, args=(episode, sandbox, release, early))
        self._threads.append(thread)
        thread.start()

    def _live(self, episode: Episode, sandbox: Callable[[], Sandbox], release: Callable[[Sandbox], None],
              early: bool) -> None:  # fmt: skip
        try:
            own = sandbox()
            try:
                for tool in episode.work.tools:
                    if self._stop.is_set():
                        return
                    self._call(episode)
                    self._step(own, tool)
                if early:
                    self._said.put(("free", episode, None))
                self._step(own, episode.work.verify_s)
            finally:
                release(own)
            if not early:
                self._said.put(("free", episode, None))
            self._said.put(("ended", episode, None))
        except (HeadraceError, OSError) as error:
            self._said.put(("failed", episode, error))

    def _call(self, episode: Episode) -> None:
        """A model call: as long as the engine model says."""
        work, turn = episode.work, episode.turn
        with self._lock:
            replica, ticket = self._router.choose(episode, time.monotonic() / self._sizes.second)
            seconds, _ = self._engine.call(replica, episode)
            episode.versions.append((self.version, work.tokens[turn]))
            episode.turn += 1
        self._wait(seconds, time.sleep)
        with self._lock:
            self._engine.running[replica] -= 1
            self._router.ended(ticket, time.monotonic() / self._sizes.second, work.tokens[turn])

    def _step(self, sandbox: Sandbox, seconds: float) -> None:
        def step(real_s: float) -> None:
            sandbox.step("true" if real_s < SHORTEST_S else f"sleep {real_s:.4f}", real_s + 60)

        self._wait(seconds, step)

    def _wait(self, seconds: float, how: Callable[[float], None]) -> None:
        real_s, began = seconds * self._sizes.second, time.monotonic()
        how(real_s)
        self._late.append(max(0.0, time.monotonic() - began - real_s))

    def _hear(self) -> Iterator[Episode]:
        """Slots that are free are; episodes that ended are given."""
        while not self._said.empty():
            kind, episode, error = self._said.get()
            if error is not None:
                raise CannotMeasure(f"an episode failed: {error}") from error
            if kind == "free":
                self._queue.ended(episode.key)
            else:
                yield episode

    def _made(self) -> bool:
        self.times.append(time.monotonic() - self.began)
        return len(self.times) >= self._sizes.batches

    def _end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def timed(self, warm: float) -> Timed:
        late = sorted(self._late)
        return Timed(self.times, late[int(0.95 * len(late))], warm)


class _Barrier(_Driver):
    def __init__(self, load: Load, sizes: Sizes, backend: ProcessBackend) -> None:
        super().__init__(load, sizes, InTurn(), LaunchOrder(sizes.slots))
        self._collector: Collector = BarrierCollector(sizes.groups, SIBLINGS)
        self._backend = Prepared(backend)

    def run(self) -> Timed:
        episodes: dict[Key, Episode] = {}
        try:
            while True:
                while groups := self._collector.admit(self._queue.waiting):
                    for group in groups:
                        episodes |= {one.key: one for one in self._launch(group)}
                for key in self._queue.starts(lambda _: True):
                    self._begin(episodes[key], self._cold(episodes[key]), lambda one: one.kill(), early=False)
                for episode in self._hear():
                    if self._collector.ended(*episode.key, episode.versions) and self._made():
                        return self.timed(0.0)
                time.sleep(TURN_S)
        finally:
            self._end()

    def _cold(self, episode: Episode) -> Callable[[], Sandbox]:
        spec = PreparedSpec(prepare_s=episode.work.setup_s(CELL) * self._sizes.second)
        return lambda: self._backend.start(spec, DAY_S)


class _Headrace(_Driver):
    def __init__(self, load: Load, sizes: Sizes, backend: ProcessBackend, kafka: Mapping[str, Any]) -> None:
        super().__init__(load, sizes, Routed(CELL), Scheduled(sizes.slots))
        self._kafka, self._backend = kafka, Prepared(backend)

    def run(self) -> Timed:
        topics = create(self._kafka, "collect", settings(self._sizes.groups, MAX_LAG))
        bootstrap, incarnation = str(self._kafka["bootstrap.servers"]), f"w-{time.monotonic_ns():x}"
        tasks, fleet, batches = topics.name(TASKS), topics.name(FLEET), topics.name(BATCHES)
        total = round(SANDBOXES_PER_SLOT * self._sizes.slots)
        trainer, rollouts = Trainer(self._kafka, topics), Rollouts(self._kafka, topics, incarnation)
        beats, beat = clients.producer(self._kafka), 0.0
        episodes: dict[Key, Episode] = {}
        orders: dict[Key, Order] = {}
        names: dict[int, str] = {}
        with (
            role("assembler", "collect", bootstrap), role("coordinator", "collect", bootstrap) as coordinator,
            Reader(self._kafka, {(tasks, 0): end_offsets(self._kafka, tasks)[0], (batches, 0): 0}) as reader,
            Pool(self._backend, Size(total, min(total, STARTING))) as pool,
        ):  # fmt: skip
            trainer.publish(0)
            try:
                while True:
                    if (now := time.monotonic()) - beat > BEAT_S:
                        beat = now
                        alive = Heartbeat("w", incarnation, self.version, LEASES, LEASES, True, "{}", {})
                        beats.produce(fleet, encode(alive), key="w")
                    beats.poll(0)
                    if not coordinator.alive():
                        raise CannotMeasure(f"the coordinator ended:\n{coordinator.output()[-2000:]}")
                    for record in reader.poll(1000, TURN_S):
                        event = decode(record.value)
                        if isinstance(event, Lease) and event.opens:
                            if not names:
                                self.began = time.monotonic()  # the processes are up, and have decided something
                            group = int(event.task.id.rpartition("-")[2])
                            names[group] = event.group
                            for one in self._launch(group):
                                episodes[one.key] = one
                                prepare_s = one.work.setup_s(CELL) * self._sizes.second
                                orders[one.key] = pool.order(PreparedSpec(prepare_s=prepare_s))
                        elif isinstance(event, Manifest):
                            if self._made():
                                figures = pool.figures()
                                return self.timed(figures.warm / (figures.warm + figures.cold))
                            self.version = event.batch
                            trainer.publish(event.batch)
                    for key in self._queue.starts(lambda key: orders[key].ready):
                        rollouts.start(names[key[0]], key[1])
                        self._begin(episodes[key], self._taken(orders.pop(key)), pool.release, early=True)
                    for episode in self._hear():
                        name, slot = names[episode.key[0]], episode.key[1]
                        rollouts.sample(name, slot, 1, TOKENS_LOGGED, episode.versions[0][0])
                        rollouts.end(name, slot, 2)
            finally:
                self._end()
                trainer.close()

    @staticmethod
    def _taken(order: Order) -> Callable[[], Sandbox]:
        return lambda: order.take(DAY_S)
