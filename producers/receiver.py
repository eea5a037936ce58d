"""Decides how published weights come to be served here: which publications are fetched, and when they count as good.

A background thread follows `policy`, picks the cheapest route from what is served to what is newest, fetches and
decodes ahead of need. The driving thread applies between decode steps: each delta is proved against the served weights
before the first write. What is refused is never served: the version that is served stays, and another route is taken: a
later snapshot, or all weights anew from the newest full base (a snapshot or the model folder) and its chain of deltas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.errors import DataLossError, HeadraceError, WeightsRefused, WrongBase
from headrace.schemas.events import Publication, PublicationClock
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader, beginning_offsets

from .publications import Arrays, Publications, Published, check_initial, fetch

log = logging.getLogger("headrace.receiver")

AHEAD = 4  # updates decoded before they are applied; more would only hold memory
POLL_S = 0.1


class WeightTarget(Protocol):
    """What the receiver needs of an engine (see `engines.Engine`): live served bits, and a way to overwrite them."""

    @property
    def version(self) -> int: ...

    def served_arrays(self) -> dict[str, NDArray[Any]]: ...

    def apply(self, version: int, changes: Mapping[str, delta.Change]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Update:
    record: Publication
    changes: delta.Changes
    proved: bool  # against the published hash already: all weights at once don't depend on what is served
    clock: PublicationClock


class Receiver:
    """Brings an engine to the newest published version and keeps it there.

    `load` once, then `apply_ready` between decode steps, `sampled` after a step that sampled something, `close` at the
    end; all from the thread that drives the engine.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        topics: RunTopics,
        *,
        worker: str = "",
        incarnation: str = "",
        initial: Callable[[], Arrays] | None = None,
    ) -> None:
        """`initial` loads the bits of version 0 again; without it only snapshots serve as a full base."""
        self._kafka, self._topics, self._initial = kafka, topics, initial
        self._worker, self._incarnation = worker, incarnation
        self._lock = threading.Lock()  # guards what both threads touch: _ready, _bad, _head, _anew, _failure
        self._ready: deque[_Update] = deque()
        self._bad: set[int] = set()  # policy offsets of publications that were refused here
        self._head = 0  # the version that is served once all of _ready is applied
        self._anew = False  # what is served can't be built upon: all weights are made anew
        self._failure: BaseException | None = None
        self._publications = Publications()
        self._policy: Reader | None = None
        self._said: str | None = None  # the last reason for standing still, so that it is logged once
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, delta.Tensor] = {}  # live
        self._dtype = ""
        self._hash = b""  # of what is served
        self._waiting: PublicationClock | None = None  # applied, no token sampled yet
        self._finished: list[PublicationClock] = []
        self.refusals: list[tuple[int, HeadraceError]] = []  # version and reason, in the order in which they happened

    @property
    def newest(self) -> int:
        """The newest version that is known to be published; -1 before the first."""
        return self._publications.newest

    # ------------------------------------------------------------------------------------------- driving thread

    def load(self, engine: WeightTarget, stop: threading.Event | None = None, version: int | None = None) -> bool:
        """Bring an engine that has just loaded the run's model folder to `version` (default: the newest), waiting for
        version 0 where the trainer hasn't published it yet. False where `stop` came first. Without `version` the
        receiver goes on following.

        Raises WrongBase where the folder holds other weights than the run began with, WeightsRefused where `version`
        can't be had.
        """
        self._dtype = open_settings(self._kafka, self._topics).settings.model.dtype
        self._state = delta.as_state(engine.served_arrays(), self._dtype)
        name = self._topics.name(POLICY)
        self._policy = Reader(self._kafka, {(name, 0): beginning_offsets(self._kafka, name)[0]})
        while self._publications.initial() is None or not self._policy.at_end:
            self._read_policy()
            if stop is not None and stop.is_set():
                return False
        self._hash = check_initial(self._publications, self._topics, self._state).served_hash
        self._head = engine.version
        # Deleted by the trainer below the last but one snapshot, and no damage: others lead on.
        self._bad = self._publications.gone(beginning_offsets(self._kafka, self._topics.name(WEIGHTS))[0])
        target = self.newest if version is None else version
        with Reader(self._kafka) as weights:
            while self._head < target and not (stop is not None and stop.is_set()):
                ahead = self._decode_ahead(weights, target)
                self._apply(engine)
                if not ahead:
                    break  # refused, and no other way: whatever comes next is tried while following
        if version is not None and engine.version != version:
            why = f": {self.refusals[-1][1]}" if self.refusals else ""
            raise WeightsRefused(f"version {version} can't be had; version {engine.version} is served{why}")
        self._waiting, self._finished = None, []  # how an old version came here says nothing about publication
        if stop is not None and stop.is_set():
            return False
        if version is None:
            self._thread = threading.Thread(target=self._follow, name="receiver", daemon=True)
            self._thread.start()
        return True

    def apply_ready(self, engine: WeightTarget) -> list[PublicationClock]:
        """Apply whatever is ready, in order, and return the clocks that are complete since the last call. Cheap when
        there is nothing. Raises what ended the following thread (LogError, ...); a refusal is logged, not raised."""
        if self._failure is not None:
            raise self._failure
        if self._ready:
            self._apply(engine)
        finished, self._finished = self._finished, []
        return finished

    def sampled(self, version: int) -> None:
        """A token was sampled from `version`: the last of its publication's clocks."""
        if self._waiting is not None and version >= self._waiting.version:
            self._finished.append(replace(self._waiting, first_token_ms=_now()))
            self._waiting = None

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._policy is not None:
            self._policy.close()

    def _apply(self, engine: WeightTarget) -> None:
        paused = _now()
        applied = []
        while True:
            with self._lock:
                if not self._ready:
                    break
                update = self._ready.popleft()
            record = update.record
            try:
                if not update.proved:
                    delta.verify(self._state, engine.version, self._hash, record, update.changes)
                engine.apply(record.version, update.changes)
            except WeightsRefused as error:
                self._refuse(record.version, error, engine.version)
                break
            self._hash = record.served_hash
            applied.append(replace(update.clock, paused_ms=paused, applied_ms=_now()))
        if applied:
            resumed = _now()
            clocks = [replace(clock, resumed_ms=resumed) for clock in applied]
            superseded = [self._waiting] if self._waiting is not None else []
            self._finished += [*superseded, *clocks[:-1]]
            self._waiting = clocks[-1]
            log.info("serving version %d", engine.version)

    def _refuse(self, version: int, error: WeightsRefused, served: int) -> None:
        """Whether what is served is wrong or the delta is, making all weights anew will show; the rest of the route
        falls with it."""
        log.error("version %d was refused, version %d stays served: %s", version, served, error)
        with self._lock:
            self.refusals.append((version, error))
            self._ready.clear()
            self._head, self._anew = served, True

    # ----------------------------------------------------------------------------------------- following thread

    def _follow(self) -> None:
        try:
            with Reader(self._kafka) as weights:
                while not self._closed.is_set():
                    self._read_policy()
                    self._decode_ahead(weights, self.newest)
        except BaseException as error:  # to be raised where the engine is driven
            self._failure = error

    def _read_policy(self) -> None:
        assert self._policy is not None
        for record in self._policy.poll(100, POLL_S):
            self._publications.note(record)

    def _decode_ahead(self, weights: Reader, target: int) -> bool:
        """Fetch and decode on the way to `target`, as far as there is room. False where nothing could be done."""
        done = False
        while not self._closed.is_set():
            with self._lock:
                head, anew, bad = self._head, self._anew, set(self._bad)
                if head >= target or len(self._ready) >= AHEAD:
                    return done
            try:
                way = self._publications.route(None if anew else head, target, bad)
            except WrongBase as error:
                if str(error) != self._said:
                    log.error("%s", error)
                self._said = str(error)
                return done
            update = self._make_anew(weights, way) if anew else self._decode(weights, way[0])
            if update is None:
                continue  # refused: another way, if there is one
            with self._lock:
                if (self._head, self._anew) != (head, anew):
                    continue  # what is served was refused in between: this way no longer leads on
                self._ready.append(update)
                self._head, self._anew = update.record.version, False
            done = True
        return done

    def _decode(self, weights: Reader, published: Published) -> _Update | None:
        record = published.record
        try:
            chunks = fetch(weights, self._topics, record)
            fetched = _now()
            changes = delta.decode_chunks(chunks)
            if record.kind == delta.SNAPSHOT:
                delta.verify(self._state, -1, b"", record, changes)
        except (WeightsRefused, DataLossError) as error:
            self._mark(published, error)
            return None
        return _Update(record, changes, record.kind == delta.SNAPSHOT, self._clock(record, fetched))

    def _make_anew(self, weights: Reader, way: Sequence[Published]) -> _Update | None:
        """All weights of the way's last version, built beside what is served."""
        if self._initial is None and way[0].record.kind == delta.PATH:
            self._mark(way[0], WeightsRefused("this process can't load the model folder again: start it anew"))
            return None
        log.info("making version %d anew from the %s of version %d", way[-1].record.version, way[0].record.kind,
                 way[0].record.version)  # fmt: skip
        state = {n: replace(t, bits=np.zeros_like(t.bits)) for n, t in self._state.items()}
        at, served_hash = -1, b""
        for published in way:
            record = published.record
            try:
                if record.kind == delta.PATH and self._initial is not None:
                    state = delta.copy_state(delta.as_state(self._initial(), self._dtype))
                    check_initial(self._publications, self._topics, state)
                else:
                    chunks = fetch(weights, self._topics, record)
                    delta.verify_and_apply(state, at, served_hash, record, chunks)
            except (WeightsRefused, DataLossError) as error:
                self._mark(published, error)
                return None
            at, served_hash = record.version, record.served_hash
        changes: delta.Changes = {name: (None, tensor.bits.reshape(-1)) for name, tensor in state.items()}
        return _Update(way[-1].record, changes, True, self._clock(way[-1].record, _now()))

    def _mark(self, published: Published, error: WeightsRefused | DataLossError) -> None:
        version = published.record.version
        log.error("version %d (%s) can't be used: %s", version, published.record.kind, error)
        with self._lock:
            self.refusals.append((version, error))
            self._bad.add(published.offset)

    def _clock(self, record: Publication, fetched: float) -> PublicationClock:
        return PublicationClock(
            self._worker, self._incarnation, record.version, float(record.published_ms), fetched, _now(), None, None,
            None, None,
        )  # fmt: skip


def _now() -> float:
    return time.time() * 1000
