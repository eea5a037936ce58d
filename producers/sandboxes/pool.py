"""A pool of warm sandboxes: set up in the background, each taken once, then killed and replaced.

An episode that is known ahead `order`s its sandbox and takes it when it has its turn; one that isn't takes a spare.
How many there are is decided in `sizing`; this module does what it says, with a thread for each that may be set up at
once. They live as long as the pool, since a sandbox may end with the thread that started it.

A failed start is tried again up to a bound, with a pause; then it fails the oldest order of its spec, and only that.
At its start a pool removes what earlier owners left behind who are no more; `close` leaves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.errors import SandboxFailed

from . import Backend, Sandbox, SandboxSpec
from .sizing import Demand, Size, Standing, to_start

log = logging.getLogger("headrace.sandboxes")

START_TIMEOUT_S = 120.0
TRIES = 3
PAUSE_S = 0.5  # after a failed start, so that a broken machine isn't hammered
LOOK_S = 1.0  # demand falls without anything happening


@dataclass(slots=True, eq=False)
class Order:
    """A place in the pool's queue; see `Pool.order`."""

    spec: SandboxSpec
    pool: Pool
    waits: bool = False
    sandbox: Sandbox | None = None
    error: SandboxFailed | None = None

    @property
    def ready(self) -> bool:
        """Whether `take` will not wait."""
        return self.sandbox is not None

    def take(self, timeout_s: float) -> Sandbox:
        """The sandbox, which is the caller's until `Pool.release`. Raises SandboxFailed where none could be started, or
        not in this time; the order is over then."""
        return self.pool._take(self, timeout_s)

    def cancel(self) -> None:
        """It won't be needed. What was set up for it serves another order of its spec, or is spare."""
        self.pool._cancel(self)


@dataclass(frozen=True, slots=True)
class Figures:
    """Now, and since the pool's start."""

    in_use: int
    ready: int
    starting: int
    started: int
    failed: int
    warm: int  # takes that found theirs ready
    cold: int  # takes that waited
    swept: int  # left behind by owners that are no more, and removed at the start


class Pool:
    """`standard`: the spec of the spare ones, and of whoever names none."""

    def __init__(self, backend: Backend, size: Size, standard: SandboxSpec | None = None) -> None:
        self.size, self.standard = size, standard or SandboxSpec()
        self._backend = backend
        self._changed = threading.Condition()
        self._orders: list[Order] = []  # that have no sandbox, in order
        self._ready: set[Order] = set()  # that have one, and haven't taken it
        self._spare: deque[Sandbox] = deque()
        self._in_use: dict[int, Sandbox] = {}
        self._dying: deque[Sandbox] = deque()
        self._starting: Counter[SandboxSpec] = Counter()
        self._failures: Counter[SandboxSpec] = Counter()  # in a row
        self._demand = Demand()
        self._started = self._failed = self._warm = self._cold = 0
        self._pause_until = 0.0
        self._closed = False
        self._swept = backend.sweep()
        if self._swept:
            log.warning("removed %d sandboxes that processes which are no more had left behind", self._swept)
        if backend.missing:
            log.warning("sandboxes of kind %s are not limited here in: %s", backend.kind, "; ".join(backend.missing))
        self._threads = [threading.Thread(target=self._work, name=f"sandboxes-{i}", daemon=True)
                         for i in range(size.starting)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------------------- the users

    def order(self, spec: SandboxSpec | None = None) -> Order:
        """One will be needed soon: it is set up ahead, in the order of the orders, as the size allows. Raises
        SandboxFailed once the pool is closed."""
        order = Order(spec or self.standard, self)
        with self._changed:
            if self._closed:
                raise SandboxFailed("the pool is closed")
            self._orders.append(order)
            self._hand_out()
        return order

    def take(self, spec: SandboxSpec | None = None, timeout_s: float = START_TIMEOUT_S) -> Sandbox:
        """A spare one, or the next. Raises SandboxFailed."""
        return self.order(spec).take(timeout_s)

    def release(self, sandbox: Sandbox) -> None:
        """Its episode is over: it is killed in the background, and its place is free."""
        with self._changed:
            if self._in_use.pop(id(sandbox), None) is not None:
                self._dying.append(sandbox)
                self._changed.notify_all()

    @contextlib.contextmanager
    def sandbox(self, spec: SandboxSpec | None = None, timeout_s: float = START_TIMEOUT_S) -> Iterator[Sandbox]:
        """Taken, and released at the end."""
        one = self.take(spec, timeout_s)
        try:
            yield one
        finally:
            self.release(one)

    def remove(self, snapshot: str) -> None:
        """Of one of its sandboxes: it isn't needed any more."""
        self._backend.remove(snapshot)

    def figures(self) -> Figures:
        with self._changed:
            return Figures(len(self._in_use), len(self._ready) + len(self._spare), self._starting.total(),
                           self._started, self._failed, self._warm, self._cold, self._swept)  # fmt: skip

    def close(self) -> None:
        """Kill all of them, those in use too."""
        with self._changed:
            self._closed = True
            self._dying += [*self._in_use.values(), *(o.sandbox for o in self._ready if o.sandbox), *self._spare]
            self._in_use.clear()
            self._ready.clear()
            self._spare.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, order: Order, timeout_s: float) -> Sandbox:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            order.waits, warm = True, order.ready
            self._demand.took(time.monotonic())
            self._changed.notify_all()
            while order.sandbox is None or not order.sandbox.alive:
                if order.sandbox is not None:  # it died on the shelf: the next one
                    self._ready.discard(order)
                    self._dying.append(order.sandbox)
                    order.sandbox, warm = None, False
                    self._orders.insert(0, order)
                    self._hand_out()
                    continue
                left = deadline - time.monotonic()
                if order not in self._orders or self._closed:
                    raise order.error or SandboxFailed("the order was cancelled, or its pool closed")
                if left <= 0:
                    self._orders.remove(order)
                    raise SandboxFailed(f"no sandbox within {timeout_s:g} s: {len(self._in_use)} of {self.size.total} "
                                        f"are in use, {self._starting.total()} are being set up")  # fmt: skip
                self._changed.wait(left)
            self._ready.discard(order)
            self._in_use[id(order.sandbox)] = order.sandbox
            self._warm, self._cold = self._warm + warm, self._cold + (not warm)
            return order.sandbox

    def _cancel(self, order: Order) -> None:
        with self._changed:
            if order in self._orders:
                self._orders.remove(order)
            elif order in self._ready and order.sandbox is not None:
                self._ready.discard(order)
                self._spare.append(order.sandbox)
                order.sandbox = None
            self._hand_out()

    # ------------------------------------------------------------------------------------------------- the threads

    def _work(self) -> None:
        while True:
            with self._changed:
                spec = None
                while not self._dying and (spec := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait(LOOK_S)
                doomed = self._dying.popleft() if self._dying else None
            if doomed is not None:
                try:
                    doomed.kill()
                except Exception:
                    log.exception("sandbox %s couldn't be removed; the next start will sweep it", doomed.id)
            elif spec is not None:
                self._start(spec)

    def _next(self) -> SandboxSpec | None:
        """What to start now; it then counts as being set up."""
        now = time.monotonic()
        if self._closed or now < self._pause_until:
            return None
        uncovered, begun = self._uncovered()
        standing = Standing(len(self._in_use), len(self._ready) + len(self._spare), self._starting.total(),
                            len(uncovered), len(self._spare) + begun)  # fmt: skip
        ordered, extra = to_start(self.size, standing, self._demand.spare(now, self.size))
        if ordered:
            spec = uncovered[0].spec
        elif extra:
            spec = self.standard
        else:
            if uncovered and self._spare and standing.starting < self.size.starting:
                self._dying.append(self._spare.popleft())  # it is of another spec, and holds the place of an order
                self._changed.notify_all()
            return None
        self._starting[spec] += 1
        return spec

    def _start(self, spec: SandboxSpec) -> None:
        began, failure = time.monotonic(), None
        try:
            sandbox = self._backend.start(spec, START_TIMEOUT_S)
        except Exception as error:  # whatever it is: its order is told, and this thread serves the others
            failure = error if isinstance(error, SandboxFailed) else SandboxFailed(f"a sandbox didn't start: {error!r}")
        with self._changed:
            self._starting[spec] -= 1
            if failure is None:
                self._started += 1
                self._failures.pop(spec, None)
                self._demand.set_up(time.monotonic() - began)
                (self._dying if self._closed else self._spare).append(sandbox)
            else:
                self._start_failed(spec, failure)
            self._hand_out()

    def _start_failed(self, spec: SandboxSpec, failure: SandboxFailed) -> None:
        self._failed += 1
        self._failures[spec] += 1
        self._pause_until = time.monotonic() + PAUSE_S
        log.warning("%s (%d in a row)", failure, self._failures[spec])
        if self._failures[spec] >= TRIES:
            self._failures.pop(spec)
            order = next((one for one in self._in_turn() if one.spec == spec), None)
            if order is not None:
                self._orders.remove(order)
                order.error = failure

    # ------------------------------------------------------------------------------------------------- bookkeeping

    def _in_turn(self) -> list[Order]:
        """Those that somebody waits for come first."""
        return sorted(self._orders, key=lambda order: not order.waits)

    def _uncovered(self) -> tuple[list[Order], int]:
        """Orders for which nothing is being set up, in turn; and how many are being set up beyond all orders."""
        begun, out = self._starting.copy(), []
        for order in self._in_turn():
            if begun[order.spec] > 0:
                begun[order.spec] -= 1
            else:
                out.append(order)
        return out, begun.total()

    def _hand_out(self) -> None:
        """Spare ones to the orders of their spec."""
        for order in self._in_turn() if self._spare else ():
            order.sandbox = next((one for one in self._spare if one.spec == order.spec), None)
            if order.sandbox is not None:
                self._spare.remove(order.sandbox)
                self._orders.remove(order)
                self._ready.add(order)
        self._changed.notify_all()
