"""Decides how published weights come to be served here: which publications are fetched, and when they count as good.

A background thread follows `policy`, picks the cheapest route from what is served to what is newest, fetches, decodes
and proves ahead of need, beside the served weights, which nobody changes meanwhile. The driving thread then writes
between decode steps. What is refused is never served: the version that is served stays, and another route is taken: a
later snapshot, or all weights anew from the newest full base (a snapshot or the model folder) and its chain of deltas.

When there is nothing else to do, the background thread counts through what is served, tensor by tensor (an audit):
weights that went wrong in memory are named and made anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas import delta
from headrace.schemas.errors import (
    BlobDamaged,
    BlobError,
    BlobLost,
    DataLossError,
    HeadraceError,
    WeightsRefused,
    WrongBase,
)
from headrace.schemas.events import Publication, PublicationClock
from headrace.schemas.settings import ModelSettings
from headrace.schemas.topics import POLICY, WEIGHTS, RunTopics
from headrace.streams.log.direct import Following, HandedOver
from headrace.streams.log.pace import Pace
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader, beginning_offsets

from .publications import Arrays, Publications, Published, check_initial, fetch

log = logging.getLogger("headrace.receiver")

POLL_S = 0.1
STORE_S = 1.0  # from one attempt at a store that doesn't answer to the next
# A publication that is refused for good: another way is taken.
_LOST = (WeightsRefused, DataLossError, BlobLost, BlobDamaged)
AUDIT_S = 600.0  # from the end of one audit to the next; one takes about a second for each 135 million elements


class WeightTarget(Protocol):
    """What the receiver needs of an engine (see `engines.Engine`): live served bits, and a way to overwrite them."""

    @property
    def version(self) -> int: ...

    def served_arrays(self) -> dict[str, NDArray[Any]]: ...

    def apply(self, version: int, changes: Mapping[str, delta.Change]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Update:
    record: Publication
    changes: Mapping[str, delta.Change]  # proved
    sums: dict[str, delta.Sums]  # of each tensor, once it is applied
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
        audit_s: float = AUDIT_S,
        ahead: HandedOver | None = None,
    ) -> None:
        """`initial` loads the bits of version 0 again; without it only snapshots serve as a full base. `audit_s`: from
        one audit of the served weights to the next. `ahead`: where records of `weights` may lie before the log is
        asked for them."""
        self._kafka, self._topics, self._initial = kafka, topics, initial
        self._worker, self._incarnation = worker, incarnation
        self._lock = threading.Lock()  # guards what both threads touch: from _ready to _writes
        self._ready: _Update | None = None  # it applies to what is served now, so there is never more than one
        self._bad: set[int] = set()  # policy offsets of publications that were refused here
        self._served = 0  # the version
        self._sums: dict[str, delta.Sums] = {}  # of what should be served
        self._writes = 0  # begun and ended: odd while served weights are being written
        self._anew = False  # what is served can't be built upon: all weights are made anew
        self._failure: BaseException | None = None
        self._publications = Publications()
        self._policy: Reader | None = None
        self._said: str | None = None  # the last reason for standing still, so that it is logged once
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, delta.Tensor] = {}  # live
        self._dtype = ""
        self._pace = Pace(None)
        self._ahead = ahead
        self._audit_s = audit_s
        self._unaudited: list[str] = []  # tensors that this audit has yet to count
        self._waiting: PublicationClock | None = None  # applied, no token sampled yet
        self._finished: list[PublicationClock] = []
        self.refusals: list[tuple[int, HeadraceError]] = []  # version and reason, in the order in which they happened

    @property
    def newest(self) -> int:
        """The newest version that is known to be published; -1 before the first."""
        return self._publications.newest

    @property
    def ready(self) -> bool:
        """Whether `apply_ready` would change what is served."""
        return self._ready is not None

    # ------------------------------------------------------------------------------------------- driving thread

    def load(self, engine: WeightTarget, stop: threading.Event | None = None, version: int | None = None) -> bool:
        """Bring an engine that has just loaded the run's model folder to `version` (default: the newest), waiting for
        version 0 where the trainer hasn't published it yet. False where `stop` came first. Without `version` the
        receiver goes on following.

        Raises WrongBase where the folder holds other weights than the run began with, WeightsRefused where `version`
        can't be had.
        """
        settings = open_settings(self._kafka, self._topics).settings
        self._dtype, self._pace = settings.model.dtype, Pace(settings.weights.max_bytes_per_s)
        self._state = delta.as_state(engine.served_arrays(), self._dtype)
        name = self._topics.name(POLICY)
        self._policy = Reader(self._kafka, {(name, 0): beginning_offsets(self._kafka, name)[0]})
        while self._publications.initial() is None or not self._policy.at_end:
            self._read_policy()
            if stop is not None and stop.is_set():
                return False
        self._sums = delta.state_sums(self._state)
        check_initial(self._publications, self._topics, delta.combined(self._sums))
        self._served = engine.version
        # Deleted by the trainer below the last but one snapshot, and no damage: others lead on.
        self._bad = self._publications.gone(beginning_offsets(self._kafka, self._topics.name(WEIGHTS))[0])
        target = self.newest if version is None else version
        with Reader(self._kafka) as weights:
            while engine.version < target and not (stop is not None and stop.is_set()):
                if not self._decode_ahead(weights, target):
                    break  # refused, and no other way: whatever comes next is tried while following
                self._apply(engine)
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

    def apply_ready(self, engine: WeightTarget, then: Callable[[], object] = lambda: None) -> list[PublicationClock]:
        """Apply what is ready, call `then` before sampling goes on, and `take_clocks`. Cheap when there is nothing. A
        refusal is logged, not raised."""
        if self._ready is not None:
            self._apply(engine, then)
        return self.take_clocks()

    def take_clocks(self) -> list[PublicationClock]:
        """The clocks that are complete since the last call. Raises what ended the following thread (LogError, ...)."""
        if self._failure is not None:
            raise self._failure
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

    def _apply(self, engine: WeightTarget, then: Callable[[], object] = lambda: None) -> None:
        paused = _now()
        with self._lock:
            update, self._ready = self._ready, None
            self._writes += 1
        assert update is not None
        version = update.record.version
        refused = None
        try:
            engine.apply(version, update.changes)
        except WeightsRefused as error:
            refused = error
        with self._lock:
            self._writes += 1
            self._served = engine.version
            if refused is None:
                self._sums, self._anew = update.sums, False
        if refused is not None:
            self._refuse(version, refused)
            return
        applied = _now()
        then()
        if self._waiting is not None:  # superseded
            self._finished.append(self._waiting)
        self._waiting = replace(update.clock, paused_ms=paused, applied_ms=applied, resumed_ms=_now())
        log.info("serving version %d", version)

    def _refuse(self, version: int, error: WeightsRefused) -> None:
        """Whether what is served is wrong or what came for it is, making all weights anew will show."""
        with self._lock:
            log.error("version %d was refused, version %d stays served: %s", version, self._served, error)
            self.refusals.append((version, error))
            self._ready, self._anew = None, True

    # ----------------------------------------------------------------------------------------- following thread

    def _follow(self) -> None:
        try:
            audited = time.monotonic()
            with Reader(self._kafka) as weights:
                while not self._closed.is_set():
                    self._read_policy()
                    if self._decode_ahead(weights, self.newest):
                        continue
                    if time.monotonic() - audited > self._audit_s and self._audited():
                        audited = time.monotonic()
        except BaseException as error:  # to be raised where the engine is driven
            self._failure = error

    def _read_policy(self) -> None:
        assert self._policy is not None
        for record in self._policy.poll(100, POLL_S if self._served >= self.newest else 0.01):
            self._publications.note(record)

    def _decode_ahead(self, weights: Reader, target: int) -> bool:
        """Fetch, decode and prove the next step on the way to `target`. False where there is nothing to be done: one
        waits to be applied already, or there is no way."""
        while not self._closed.is_set():
            with self._lock:
                served, anew, bad = self._served, self._anew, set(self._bad)
                if self._ready is not None or self._writes % 2 or served >= target:
                    return False
            try:
                way = self._publications.route(None if anew else served, target, bad)
            except WrongBase as error:
                self._stand_still(error)
                return False
            try:
                update = self._make_anew(weights, way) if anew else self._decode(weights, way[0])
            except BlobError as error:  # the store is away: it is asked again, and what is served stays
                self._stand_still(error)
                self._closed.wait(STORE_S)
                return False
            if update is not None:
                self._said = None
                with self._lock:
                    self._ready = update
                return True
        return False

    def _stand_still(self, error: HeadraceError) -> None:
        if str(error) != self._said:
            log.error("%s", error)
        self._said = str(error)

    def _pause(self, size: int) -> None:
        self._closed.wait(self._pace.wait_s(size, time.monotonic()))

    def _decode(self, weights: Reader, published: Published) -> _Update | None:
        """The next version, from what is served. None where it was refused: another way, if there is one."""
        record = published.record
        before = 0 if self._ahead is None else self._ahead.taken
        try:
            chunks = fetch(weights, self._topics, record, self._pause, self._ahead)
            delta.check_chunks(record, chunks)
        except _LOST as error:
            self._mark(published, error)
            return None
        fetched = _now()
        if self._ahead is not None:
            log.info("version %d: %d of %d chunks came directly", record.version, self._ahead.taken - before,
                     len(chunks))  # fmt: skip
        try:
            served_hash = delta.combined(self._sums)
            changes, moves = delta.decode_verified(self._state, self._served, served_hash, record, chunks)
        except WeightsRefused as error:
            if record.kind == delta.SNAPSHOT:  # it doesn't depend on what is served
                self._mark(published, error)
            else:
                self._refuse(record.version, error)
            return None
        sums = moves if record.kind == delta.SNAPSHOT else delta.moved(self._sums, moves)
        return _Update(record, changes, sums, self._clock(record, fetched))

    def _make_anew(self, weights: Reader, way: Sequence[Published]) -> _Update | None:
        """All weights of the way's last version, built beside what is served."""
        if self._initial is None and way[0].record.kind == delta.PATH:
            self._mark(way[0], WeightsRefused("this process can't load the model folder again: start it anew"))
            return None
        log.info("making version %d anew from the %s of version %d", way[-1].record.version, way[0].record.kind,
                 way[0].record.version)  # fmt: skip
        state = {n: replace(t, bits=np.zeros_like(t.bits)) for n, t in self._state.items()}
        at, served_hash, fetched = -1, b"", _now()
        for published in way:
            record = published.record
            try:
                if record.kind == delta.PATH and self._initial is not None:
                    state = delta.copy_state(delta.as_state(self._initial(), self._dtype))
                    check_initial(self._publications, self._topics, delta.state_hash(state))
                else:
                    chunks = fetch(weights, self._topics, record, self._pause, self._ahead)
                    fetched = _now()
                    delta.verify_and_apply(state, at, served_hash, record, chunks)
            except _LOST as error:
                self._mark(published, error)
                return None
            at, served_hash = record.version, record.served_hash
        sums = delta.state_sums(state)
        changes: delta.Changes = {name: (None, tensor.bits.reshape(-1)) for name, tensor in state.items()}
        return _Update(way[-1].record, changes, sums, self._clock(way[-1].record, fetched))

    def _audited(self) -> bool:
        """Count through one more tensor of what is served; whether it was the last one."""
        with self._lock:
            writes, sums = self._writes, self._sums
            if writes % 2 or self._anew:
                return False
        if not self._unaudited:
            self._unaudited = list(self._state)
        name = self._unaudited[-1]
        damage = delta.damage(name, self._state[name], sums[name])
        with self._lock:
            if writes != self._writes:
                return False  # written meanwhile: this tensor is counted again
        if damage is not None:
            self._refuse(self._served, damage)
        self._unaudited.pop()
        return not self._unaudited

    def _mark(self, published: Published, error: HeadraceError) -> None:
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


@contextmanager
def open_receiver(kafka: Mapping[str, Any], topics: RunTopics, model: ModelSettings, *, worker: str, incarnation: str,
                  weights_socket: str | None = None) -> Iterator[Receiver]:  # fmt: skip
    """A role's receiver. `weights_socket`: HOST:PORT where the trainer hands weights over, beside the log. Raises
    SettingsError."""
    from .engines.served import ModelFolder

    ahead = HandedOver() if weights_socket else None
    following = Following(weights_socket, topics.name(WEIGHTS), ahead) if weights_socket and ahead else None
    receiver = Receiver(kafka, topics, worker=worker, incarnation=incarnation, ahead=ahead,
                        initial=lambda: ModelFolder(model.path, model.dtype, model.lora).bits)  # fmt: skip
    try:
        yield receiver
    finally:
        receiver.close()
        if following is not None:
            following.close()
